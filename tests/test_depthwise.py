"""Depthwise convolutions against PyTorch's own, output and gradients, in every geometry."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bestta.models import DeepLabV3Plus, depthwise, efficientnet_lite
from bestta.models.depthwise import (
    DepthwiseConv2d,
    depthwise_conv2d,
    gradient_to_input,
    gradient_to_weight,
)
from bestta.models.efficientnet_lite import SameConv2d, same_padding

KERNELS, STRIDES, DILATIONS = (1, 3, 5, 7), (1, 2, 3), (1, 2, 3, 6)

# (kernel, stride, padding, dilation): at least one for each way a gradient is computed, and all
# that occur in the networks.
GEOMETRIES = (
    (1, 1, 0, 1),
    (3, 1, 1, 1),
    (3, 2, 0, 1),
    (5, 1, 2, 1),
    (5, 2, 0, 1),
    (7, 1, 3, 1),
    (3, 1, 2, 2),
    (5, 1, 4, 2),
    (3, 2, 2, 2),
    (3, 1, 6, 6),
    (5, 1, 8, 4),
)


def stock(x, weight, stride=1, padding=0, dilation=1):
    return F.conv2d(x, weight, None, stride, padding, dilation, groups=x.shape[1])


def draw(shape, kernel, seed=0, dtype=torch.float64):
    """Maps and filters that want gradients."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=dice, dtype=torch.float64)
    weight = torch.randn(shape[1], 1, kernel, kernel, generator=dice, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def upstream_of(out, seed=1):
    """A gradient to the output, another value in each place."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, generator=dice, dtype=torch.float64).to(out.dtype)


def gradients(convolve, x, weight, geometry, upstream=None):
    out = convolve(x, weight, *geometry)
    upstream = upstream_of(out) if upstream is None else upstream
    return torch.autograd.grad(out, (x, weight), upstream)


def assert_same_gradients(x, weight, geometry, upstream=None):
    ours = gradients(depthwise_conv2d, x, weight, geometry, upstream)
    theirs = gradients(stock, x, weight, geometry, upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def distance(a, b):
    """Length of the difference, as a share of b's."""
    return float((a.double() - b.double()).norm() / b.double().norm())


# Values


@pytest.mark.parametrize("dilation", DILATIONS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_both_gradients_are_pytorchs_own(kernel, stride, dilation):
    reach = dilation * (kernel - 1)
    for padding in sorted({0, reach // 2, max(0, reach - 1), reach}):
        least = max(1, reach + 1 - 2 * padding)
        # Odd and even, and one side with no more than a single place for the kernel.
        for height, width in ((least, least + 4), (least + 5, least + 2), (least + 6, least + 7)):
            x, weight = draw((2, 3, height, width), kernel)
            assert_same_gradients(x, weight, (stride, padding, dilation))


@settings(max_examples=80)
@given(
    kernel=st.sampled_from(KERNELS),
    stride=st.sampled_from(STRIDES),
    dilation=st.sampled_from(DILATIONS),
    share=st.floats(0, 1),
    more=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    batch=st.integers(1, 3),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_gradients_are_pytorchs_own_at_any_size(
    kernel, stride, dilation, share, more, batch, channels, seed
):
    reach = dilation * (kernel - 1)
    padding = round(share * reach)
    least = max(1, reach + 1 - 2 * padding)
    x, weight = draw((batch, channels, least + more[0], least + more[1]), kernel, seed)
    assert_same_gradients(x, weight, (stride, padding, dilation))


def test_gradients_of_three_windows_by_hand():
    # Of an image of one row only the kernel's middle row (a, b, c) meets pixels. At stride 2 and
    # padding 1 the outputs are
    #   y0 = b x0 + c x1,   y1 = a x1 + b x2 + c x3,   y2 = a x3 + b x4.
    a, b, c = 2.0, 3.0, 5.0
    x = torch.tensor([[[[1.0, 10.0, 100.0, 1000.0, 10000.0]]]], requires_grad=True)
    weight = torch.tensor([[[[7.0, 7, 7], [a, b, c], [7, 7, 7]]]], requires_grad=True)
    out = depthwise_conv2d(x, weight, stride=2, padding=1)
    assert out.flatten().tolist() == [53.0, 5320.0, 32000.0]
    to_x, to_weight = torch.autograd.grad(out, (x, weight), torch.tensor([[[[1.0, 2.0, 4.0]]]]))
    # dx0 = b, dx1 = c + 2a, dx2 = 2b, dx3 = 2c + 4a, dx4 = 4b
    assert to_x.flatten().tolist() == [3.0, 9.0, 6.0, 18.0, 12.0]
    # da = 2 x1 + 4 x3, db = x0 + 2 x2 + 4 x4, dc = x1 + 2 x3; the outer rows saw zeros only.
    assert to_weight[0, 0].tolist() == [[0.0] * 3, [4020.0, 40201.0, 2010.0], [0.0] * 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_output_is_pytorchs_to_the_bit_with_and_without_gradients(geometry, dtype):
    kernel, *rest = geometry
    x, weight = draw((2, 4, 21, 18), kernel, dtype=dtype)
    with torch.no_grad():
        expected = stock(x, weight, *rest)
        without = depthwise_conv2d(x, weight, *rest)
    frozen = depthwise_conv2d(x.detach(), weight.detach(), *rest)
    learning = depthwise_conv2d(x, weight, *rest)
    assert torch.equal(without, expected)
    assert torch.equal(frozen, expected)
    assert torch.equal(learning, expected)
    assert not without.requires_grad
    assert not frozen.requires_grad
    assert learning.requires_grad


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_an_empty_batch_has_an_empty_gradient_and_one_of_zeros(geometry):
    kernel, *rest = geometry
    x, weight = draw((0, 3, 21, 18), kernel)
    to_x, to_weight = gradients(depthwise_conv2d, x, weight, rest)
    assert to_x.shape == x.shape
    assert torch.equal(to_weight, torch.zeros_like(weight))


# What wants a gradient


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_either_gradient_comes_alone(geometry, monkeypatch):
    kernel, *rest = geometry
    x, weight = draw((2, 3, 21, 18), kernel)
    to_x, to_weight = gradients(stock, x, weight, rest)

    def never(*_):
        raise AssertionError("a gradient that nobody wants was computed")

    with monkeypatch.context() as patched:
        patched.setattr(depthwise, "gradient_to_weight", never)
        out = depthwise_conv2d(x, weight.detach(), *rest)
        (alone,) = torch.autograd.grad(out, x, upstream_of(out))
        torch.testing.assert_close(alone, to_x, rtol=1e-11, atol=1e-11)
    with monkeypatch.context() as patched:
        patched.setattr(depthwise, "gradient_to_input", never)
        out = depthwise_conv2d(x.detach(), weight, *rest)
        (alone,) = torch.autograd.grad(out, weight, upstream_of(out))
        torch.testing.assert_close(alone, to_weight, rtol=1e-11, atol=1e-11)


def saved_by(x, weight):
    """Where the tensors live that the graph of one convolution keeps for its backward pass."""
    kept = []

    def pack(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        depthwise_conv2d(x, weight, 1, 1)
    return kept


def test_a_frozen_weight_keeps_no_input_alive():
    x, weight = draw((2, 3, 9, 8), 3)
    assert x.data_ptr() in saved_by(x, weight)
    assert x.data_ptr() in saved_by(x.detach(), weight)
    assert saved_by(x, weight.detach()) == [weight.data_ptr()]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_second_derivatives_are_pytorchs_own(geometry):
    kernel, *rest = geometry
    x, weight = draw((2, 2, 14, 13), kernel)

    def second(convolution):
        out = convolution(x, weight, *rest)
        first = torch.autograd.grad(out.square().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))

    for ours, theirs in zip(second(depthwise_conv2d), second(stock), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("kernel", "padding"), [(1, 1), (3, 3), (3, 4), (5, 6)])
@pytest.mark.parametrize("stride", [1, 2])
def test_windows_that_lie_wholly_in_the_padding_add_nothing(kernel, padding, stride):
    x, weight = draw((2, 3, 7, 8), kernel)
    upstream = upstream_of(stock(x, weight, stride, padding, 1))
    ours = depthwise_conv2d(x, weight, stride, padding, 1)
    expected = stock(x, weight, stride, padding, 1)
    assert ours.equal(expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_several_filters_per_channel_are_left_to_pytorch():
    torch.manual_seed(0)
    for layer in (SameConv2d(1, 8, 3), SameConv2d(2, 4, 3, groups=2)):
        x = torch.randn(1, layer.in_channels, 9, 9, requires_grad=True)
        expected = F.conv2d(x, layer.weight, padding=1, groups=layer.groups)
        upstream = torch.randn_like(expected)
        for ours, theirs in zip(
            torch.autograd.grad(layer(x), (x, layer.weight), upstream),
            torch.autograd.grad(expected, (x, layer.weight), upstream),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


def test_functional_gradients_are_pytorchs_own():
    x, weight = draw((1, 2, 6, 6), 3)
    x, weight = x.detach(), weight.detach()

    def loss(convolution):
        return lambda w: convolution(x, w, 1, 1, 1).square().sum()

    ours = torch.func.grad(loss(depthwise_conv2d))(weight)
    torch.testing.assert_close(ours, torch.func.grad(loss(stock))(weight))


def test_a_network_can_be_traced_with_gradients_on():
    torch.manual_seed(0)
    layer = DepthwiseConv2d(3, 3, 3, padding=1, groups=3, bias=False)
    x = torch.randn(1, 3, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is on its way out, and says so
        traced = torch.jit.trace(layer, x)
    assert traced(x).equal(layer(x))


def test_a_bias_is_added():
    torch.manual_seed(0)
    layer = DepthwiseConv2d(3, 3, 3, padding=1, groups=3)
    x = torch.randn(2, 3, 6, 6)
    plain = F.conv2d(x, layer.weight, layer.bias, padding=1, groups=3)
    torch.testing.assert_close(layer(x), plain)


def test_autocast_leaves_double_precision_alone_and_backward_to_the_forward():
    x, weight = draw((1, 2, 6, 6), 3)  # double precision
    with torch.autocast("cpu", torch.bfloat16):
        assert depthwise_conv2d(x, weight, 1, 1).dtype == torch.float64
    x, weight = (t.detach().float().requires_grad_() for t in (x, weight))
    out = depthwise_conv2d(x, weight, 1, 1)
    (expected,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (inside,) = torch.autograd.grad(out.sum(), x)
    assert inside.equal(expected)


# Layouts and number formats


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_do_not_depend_on_how_maps_lie_in_memory(geometry):
    kernel, *rest = geometry
    x, weight = draw((2, 4, 21, 18), kernel)
    x, weight = x.detach(), weight.detach().requires_grad_()
    last = x.contiguous(memory_format=torch.channels_last)
    wide = torch.stack([x, -x], dim=-1)[..., 0]
    assert not last.is_contiguous()
    assert not wide.is_contiguous()
    assert not wide.is_contiguous(memory_format=torch.channels_last)
    upstream = upstream_of(stock(x, weight, *rest))
    layouts = (
        upstream,
        upstream.contiguous(memory_format=torch.channels_last),
        upstream.transpose(2, 3).contiguous().transpose(2, 3),
    )
    for maps in (x, last, wide):
        for gradient in layouts:
            assert_same_gradients(maps.requires_grad_(), weight, rest, gradient)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_gradient_of_a_sum_is_taken_though_it_is_one_number_in_memory(geometry):
    kernel, *rest = geometry
    x, weight = draw((2, 3, 21, 18), kernel)
    seen = []
    out = depthwise_conv2d(x, weight, *rest)
    out.register_hook(lambda gradient: seen.append(gradient.stride()))
    out.sum().backward()
    assert seen == [(0, 0, 0, 0)]  # else this test shows nothing
    theirs = torch.autograd.grad(stock(x, weight, *rest).sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_have_the_number_format_of_what_they_belong_to(geometry, dtype):
    kernel, *rest = geometry
    x, weight = draw((2, 4, 21, 18), kernel, dtype=dtype)
    out = depthwise_conv2d(x, weight, *rest)
    out.backward(upstream_of(out))
    assert weight.grad.dtype == x.grad.dtype == dtype
    # Autograd would convert other formats in silence; the functions themselves do not.
    maps, filters = x.detach(), weight.detach()
    assert gradient_to_input(upstream_of(out), filters, maps.shape[2:], *rest).dtype == dtype
    assert gradient_to_weight(upstream_of(out), maps, filters, *rest).dtype == dtype
    exact = gradients(stock, x.detach().double().requires_grad_(), weight.double(), rest)
    # The sums are of at most 2 * 21 * 18 terms of random sign, whose errors grow like the square
    # root of that, 27 units in the last place. Those of bf16 numbers are held in single precision
    # and rounded once.
    units = 1 if dtype == torch.bfloat16 else 27
    assert distance(x.grad, exact[0]) < units * torch.finfo(dtype).eps
    assert distance(weight.grad, exact[1]) < units * torch.finfo(dtype).eps


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_autocast_rounds_what_it_rounds_for_pytorchs_own_and_no_more(geometry):
    kernel, *rest = geometry
    x, weight = draw((2, 4, 21, 18), kernel, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = depthwise_conv2d(x, weight, *rest), stock(x, weight, *rest)
    assert out.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    upstream = upstream_of(out)
    out.backward(upstream)
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    exact = gradients(stock, x, weight, rest, upstream.float())
    # One rounded factor and one rounded sum, by up to 2**-8 each; the terms' signs are random.
    for mine, other in zip((x.grad, weight.grad), exact, strict=True):
        assert 0 < distance(mine, other) < 2**-7


def test_autocast_without_gradients_is_pytorchs_own():
    x, weight = draw((2, 4, 9, 8), 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out, expected = depthwise_conv2d(x, weight, 1, 2), stock(x, weight, 1, 2)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


# The promise of speed, without a clock


class Backwards(TorchDispatchMode):
    """Notes each backward convolution of PyTorch's: kernel, stride, dilation, format, outputs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            gradient, _, weight, _, stride, _, dilation, _, _, _, wanted = args
            self.seen.append((weight.shape[-1], stride[0], dilation[0], gradient.dtype, wanted))
        return func(*args, **(kwargs or {}))


def backwards_of(geometry, dtype):
    kernel, *rest = geometry
    x, weight = draw((2, 4, 21, 18), kernel, dtype=dtype)
    out = depthwise_conv2d(x, weight, *rest)
    with Backwards() as backwards:
        out.backward(upstream_of(out))
    return backwards.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("geometry", "calls"),
    [
        ((3, 1, 1, 1), [(3, 1)]),
        ((3, 2, 0, 1), [(3, 2)]),
        ((5, 1, 2, 1), [(3, 1)] * 4),
        ((5, 2, 0, 1), [(3, 2)] * 4),
        ((3, 1, 2, 2), [(3, 1)]),
        ((5, 1, 4, 2), [(3, 1)] * 4),
    ],
)
def test_small_kernels_never_leave_the_fast_path(geometry, calls, dtype):
    # PyTorch's is fast for kernels up to 3x3 without dilation, and only asked for the weight's.
    expected = [(kernel, stride, 1, dtype, [False, True, False]) for kernel, stride in calls]
    assert backwards_of(geometry, dtype) == expected


@pytest.mark.parametrize("geometry", [(3, 1, 6, 6), (7, 1, 3, 1)])
def test_where_there_is_no_fast_path_bf16_is_summed_in_single_precision(geometry):
    kernel, stride, _, dilation = geometry
    expected = [(kernel, stride, dilation, torch.float32, [False, True, False])]
    assert backwards_of(geometry, torch.bfloat16) == expected


# In layers and networks


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_layer_is_conv2d_with_a_group_per_channel(geometry):
    kernel, stride, padding, dilation = geometry
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 4}
    ours = DepthwiseConv2d(4, 4, kernel, bias=False, **options).double()
    theirs = nn.Conv2d(4, 4, kernel, bias=False, **options).double()
    theirs.load_state_dict(ours.state_dict())
    x, _ = draw((2, 4, 21, 18), kernel)
    out, expected = ours(x), theirs(x)
    assert torch.equal(out, expected)
    out.backward(upstream_of(out))
    to_x, to_weight = torch.autograd.grad(expected, (x, theirs.weight), upstream_of(out))
    torch.testing.assert_close(x.grad, to_x, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ours.weight.grad, to_weight, rtol=1e-11, atol=1e-11)


@given(
    size=st.tuples(st.integers(1, 15), st.integers(1, 15)),
    kernel=st.sampled_from((1, 3, 5)),
    stride=st.sampled_from((1, 2)),
    dilation=st.sampled_from((1, 2, 4)),
)
def test_same_convolutions_learn_as_convolutions_of_the_image_with_zeros_around(
    size, kernel, stride, dilation
):
    layer = SameConv2d(3, 3, kernel, stride, dilation, groups=3).double()
    x, _ = draw((2, 3, *size), kernel)
    out = layer(x)
    top, bottom = same_padding(size[0], kernel, stride, dilation)
    left, right = same_padding(size[1], kernel, stride, dilation)
    around = F.pad(x, (left, right, top, bottom))
    expected = stock(around, layer.weight, stride, 0, dilation)
    pair = (x, layer.weight)
    ours = torch.autograd.grad(out, pair, upstream_of(out))
    theirs = torch.autograd.grad(expected, pair, upstream_of(out))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("output_stride", [8, 16])
def test_a_network_learns_what_it_learns_with_pytorchs_own_convolutions(output_stride, monkeypatch):
    torch.manual_seed(0)
    model = DeepLabV3Plus("efficientnet_lite0", classes=5, output_stride=output_stride).double()
    images = torch.randn(2, 3, 48, 65, dtype=torch.float64)
    labels = torch.randint(5, (2, 48, 65))

    def learn():
        torch.manual_seed(1)  # the dropout's
        loss = F.cross_entropy(model(images), labels)
        return loss, dict(
            zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True)
        )

    names = [name for name, _ in model.named_parameters()]
    loss, ours = learn()
    calls = []

    def counted(*args):
        calls.append(args)
        return stock(*args)

    monkeypatch.setattr(depthwise, "depthwise_conv2d", counted)
    monkeypatch.setattr(efficientnet_lite, "depthwise_conv2d", counted)
    same_loss, theirs = learn()
    assert len(calls) == 16 + 3 + 2  # blocks, branches of the pyramid, decoder
    assert torch.equal(loss, same_loss)
    filters = [name for name in names if ours[name].ndim == 4 and ours[name].shape[1] == 1]
    assert len(filters) == len(calls)
    assert all(theirs[name].norm() > 1e-4 for name in filters)  # else it all says nothing
    # Absolute, too: a bias before a batch norm has no gradient but the rounding's.
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
