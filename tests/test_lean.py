"""The lean path: the results of stock autograd with less kept, on any model, which stays as it was.

Stock PyTorch is the judge throughout: the same function without `LeanForward`, the same adapter
with ``lean=False``, or the formula in float64.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import bestta
from bestta import SourceProfile
from bestta.lean import forward, lean_entropy, lean_entropy_loss, winograd
from bestta.lean.bits import pack, pack_above, unpack
from bestta.lean.chains import Plan, Watch
from bestta.lean.forward import LeanForward, _known
from bestta.losses import entropy, entropy_loss
from bestta.moments import instance_moments
from nets import Segmenter, TokenClassifier, randomise, same, snapshot, stream

FOG = {"shift": 1.5, "scale": 0.4}


@pytest.fixture(scope="module", autouse=True)
def _small_images_count_as_large():
    """So that maps have their channels last in memory here, as those of large images do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "_LARGE", 1)
        yield


# --- what the tests run ---------------------------------------------------------------------


class Residual(nn.Module):
    """A block as ResNets have it: ReLUs in place, a sum in place, a shortcut that may scale."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, padding=1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


class Street(nn.Module):
    """Residual stages, a concatenation, interpolation: a DeepLab in small."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.layer1 = Residual(8, 8)
        self.layer2 = Residual(8, 12, stride=2)
        self.layer3 = Residual(12, 12)
        self.pooled = nn.Sequential(nn.Conv2d(12, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.low = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(
            nn.Conv2d(24, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, classes, 1),
        )

    def forward(self, image: Tensor) -> Tensor:
        low = self.layer1(self.stem(image))
        high = self.layer3(self.layer2(low))
        resize = partial(F.interpolate, size=low.shape[2:], mode="bilinear", align_corners=False)
        pooled = self.pooled(F.adaptive_avg_pool2d(high, 1))
        together = torch.cat([resize(high), self.low(low), resize(pooled)], 1)
        return resize(self.head(together), size=image.shape[2:])


class Behind(nn.Module):
    """BeIN's place is ``layer1``; what is asked of the lean path lies behind it."""

    def __init__(self, tail: nn.Module, channels: int = 8) -> None:
        super().__init__()
        self.layer1 = nn.Conv2d(3, channels, 3, padding=1)
        self.tail = tail

    def forward(self, image: Tensor) -> Tensor:
        return self.tail(self.layer1(image))


def images_for(model: nn.Module, length: int, **how) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    return [x.to(dtype) for x in stream(length, seed=7, **{**FOG, **how})]


def pair(model: nn.Module, layers=("layer1",), **settings):
    """Two adapters alike, one lean and one stock, that learn fast enough to be compared."""
    how = {key: settings.pop(key) for key in ("size", "batch") if key in settings}
    source = [x.to(next(model.parameters()).dtype) for x in stream(4, seed=3, **how)]
    embedding = settings.get("embedding", "pooled")
    profile = SourceProfile.collect(model, source, layers=list(layers), embedding=embedding)
    settings = {"lr": 0.02, "layers": list(layers), **settings}
    lean, stock = (bestta.adapt(model, profile, lean=on, **settings) for on in (True, False))
    return lean, stock


def gamma_of(adapter) -> Tensor:
    return torch.cat([p.detach().flatten() for p in adapter.trainable.values()])


def velocity_of(adapter) -> Tensor:
    return torch.cat([v.flatten() for v in adapter.velocity.values()])


def away(seen: Tensor, expected: Tensor) -> float:
    """The distance of ``seen`` from ``expected``, as a share of its length."""
    return float((seen.double() - expected.double()).norm() / expected.double().norm())


def assert_alike(lean, stock, images, tolerance: float, slack: float = 1) -> None:
    """Predictions, γ and velocity (with so much more slack) of both after each of the images."""
    for number, image in enumerate(images):
        seen, expected = lean(image), stock(image)
        assert lean.last.adapted, (number, lean.last)
        assert stock.last.adapted, (number, stock.last)
        assert seen.shape == expected.shape
        assert seen.dtype == expected.dtype
        assert away(seen, expected) < tolerance, number
        assert gamma_of(stock).norm() > 0
        assert away(gamma_of(lean), gamma_of(stock)) < tolerance, number
        assert away(velocity_of(lean), velocity_of(stock)) < slack * tolerance, number


def assert_model_alike(tail: nn.Module, tolerance: float = 1e-6, steps: int = 3, **how) -> None:
    """A model in float64 with this behind its BeIN learns lean what it learns by stock autograd."""
    size = {key: how.pop(key) for key in ("size", "batch") if key in how}
    model = randomise(Behind(tail), seed=4).double()
    lean, stock = pair(model, **size, **how)
    assert_alike(lean, stock, images_for(model, steps, **size), tolerance)


def plan_of(function, x: Tensor) -> Plan:
    watch = Watch()
    with torch.no_grad(), watch:
        function(x.detach().clone())
    return watch.plan()


def gradients_of(function, x: Tensor, mode=None) -> tuple[Tensor, Tensor]:
    """The result for ``x`` and the gradient of its product with fixed random numbers, to ``x``."""
    x = x.detach().requires_grad_()
    if mode is None:
        y = function(x)
    else:
        with mode:
            y = function(x)
            mode.finish()
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(9))
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    return y.detach(), gradient


def assert_function_alike(function, x: Tensor, channels_last: bool, tolerance: float) -> None:
    expected = gradients_of(function, x)
    assert expected[1].abs().max() > 0
    for plan in (Plan(), plan_of(function, x)):
        seen = gradients_of(function, x, LeanForward(plan, channels_last))
        for ours, theirs in zip(seen, expected, strict=True):
            limit = tolerance * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=limit)


# --- a hundred steps ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"layers": ("layer1", "layer2", "layer3")},
        {"layers": ("layer2",), "statistics_decay": 0.9},
        {"layers": ("layer1", "layer3"), "statistics_decay": 0.9, "statistics": "weighed"},
        {"predict": "after"},
        {"embedding": "map"},
        {"batch": 2},
        {"lambda_entropy": 0.0, "layers": ("layer1", "layer3")},
    ],
    ids=lambda how: "+".join(how) or "plain",
)
def test_each_of_a_hundred_steps_is_that_of_stock_autograd_in_float64(how):
    """γ itself is kept in fp32: hence 1e-6 and not 1e-12."""
    model = randomise(Street(), seed=4).double()
    lean, stock = pair(model, size=8, **how)
    assert_alike(lean, stock, images_for(model, 100, size=8, batch=how.get("batch", 1)), 1e-6)


@pytest.mark.parametrize("layers", [("layer1",), ("layer1", "layer3")])
def test_each_of_a_hundred_steps_is_that_of_stock_autograd_to_rounding_in_float32(layers):
    """A ReLU whose input is rounded to the other side of zero lets a whole gradient through or
    not, so that rounding shows in γ by more than an epsilon: up to a thousandth is granted. The
    velocity is what is left of gradients that nearly cancel once γ has settled: a hundredth of it.
    At four times this learning rate stock in fp32 is itself that far from stock in float64."""
    model = randomise(Street(), seed=4)
    lean, stock = pair(model, layers, size=16, lr=0.005)
    assert_alike(lean, stock, images_for(model, 100, size=16), 1e-3, slack=10)


def test_a_convolution_done_by_winograd_adapts_as_stock_autograd_does(monkeypatch):
    """64 channels at 40x40 are about where it begins to pay."""
    calls = []
    plain = winograd.convolve
    monkeypatch.setattr(winograd, "convolve", lambda *a: calls.append(a) or plain(*a))
    tail = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=2, dilation=2),
        nn.LeakyReLU(),
        nn.Conv2d(64, 5, 1),
    )
    model = randomise(Behind(tail, channels=64), seed=4)
    for parameter in model.tail.parameters():
        parameter.data.mul_(0.25)  # logits of a size at which the entropy has a slope
    lean, stock = pair(model, size=40)
    assert_alike(lean, stock, images_for(model, 3, size=40), 1e-3)
    assert len(calls) == 3 * 4  # per image: two forwards, two backwards


def test_tokens_and_attention_adapt_as_under_stock_autograd():
    model = randomise(TokenClassifier(), seed=4).double()
    lean, stock = pair(model, ("patch",), size=16)
    assert_alike(lean, stock, images_for(model, 5, size=16), 1e-6)


@pytest.mark.parametrize("layers", [("layer1",), ("layer2", "layer4")])
def test_the_order_of_values_in_memory_of_the_image_does_not_matter(layers):
    model = randomise(Segmenter(), seed=4).double()
    lean, stock = pair(model, layers)
    images = images_for(model, 4)
    assert_alike(lean, stock, [x.to(memory_format=torch.channels_last) for x in images], 1e-6)
    assert lean(images[0]).is_contiguous()


def test_the_answer_is_not_left_channels_last_where_a_part_of_the_models_is_not():
    """Nor after the owner has put the weights back into their old order."""

    class Two(Behind):
        def forward(self, image: Tensor) -> dict[str, Tensor]:
            seen = self.layer1(image)
            return {"out": self.tail(seen).contiguous(), "features": seen}

    last = torch.channels_last
    model = randomise(Two(nn.Conv2d(8, 5, 3, padding=1)), seed=4).to(memory_format=last)
    image = images_for(model, 1)[0]
    adapter, _ = pair(model)
    assert adapter(image).is_contiguous()
    model = randomise(Behind(nn.Conv2d(8, 5, 3, padding=1)), seed=4).to(memory_format=last)
    adapter, _ = pair(model)
    assert not adapter(image).is_contiguous()
    model.to(memory_format=torch.contiguous_format)
    assert adapter(image).is_contiguous()


@pytest.mark.parametrize("when", ["always", 1000])
@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pixels", [torch.contiguous_format, torch.channels_last])
def test_the_answer_lies_in_memory_as_that_of_the_model_itself(pixels, weights, when):
    model = randomise(Street(), seed=4).to(memory_format=weights)
    lean, _ = pair(model, when=when)
    for number, image in enumerate(images_for(model, 2)):
        image = image.to(memory_format=pixels)
        expected = model(image)
        assert lean(image).stride() == expected.stride()
        assert lean.last.adapted == (when == "always" or number == 0)


# --- operation by operation -----------------------------------------------------------------


def frozen(module: nn.Module) -> nn.Module:
    """In float64 and eval mode, with random weights and statistics."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator) * 0.4
            tensor.data.copy_(drawn.abs() + 0.5 if name == "running_var" else drawn)
    return module.double().eval().requires_grad_(False)


def prelu(weights: int) -> nn.Module:
    module = nn.PReLU(weights)
    module.weight.data = torch.linspace(-0.7, 0.9, weights) if weights > 1 else torch.tensor([-0.3])
    return module.double().requires_grad_(False)


def twice(x: Tensor) -> Tensor:
    """A map of its own: a leaf cannot be changed in place."""
    return x * 2


def add_in_place(x: Tensor, convolution: nn.Module) -> Tensor:
    out = convolution(x)
    out += x
    return out


def add_method_in_place(x: Tensor, convolution: nn.Module) -> Tensor:
    """The result is in the operand, not in what the call returns."""
    out = convolution(x)
    out.add_(torch.tanh(x))
    return out * 3


def add_twice_in_place(x: Tensor, convolution: nn.Module) -> Tensor:
    out = convolution(x)
    out.add_(x.tanh())
    out.add_(x.sin())
    return F.relu(out)


SMOOTH = 1e-4
"""Derivatives of SiLU and GELU are kept to 3e-5."""

POINTWISE = {
    "relu": (nn.ReLU(), 1e-9),
    "relu in place": (nn.ReLU(inplace=True), 1e-9),
    "relu6": (nn.ReLU6(), 1e-9),
    "relu6 in place": (nn.ReLU6(inplace=True), 1e-9),
    "hardtanh": (nn.Hardtanh(-0.4, 0.7), 1e-9),
    "hardtanh in place": (nn.Hardtanh(-0.4, 0.7, inplace=True), 1e-9),
    "leaky relu": (nn.LeakyReLU(0.1), 1e-9),
    "leaky relu in place": (nn.LeakyReLU(0.3, inplace=True), 1e-9),
    "leaky relu of a negative slope": (nn.LeakyReLU(-0.2), 1e-9),
    "prelu": (prelu(1), 1e-9),
    "prelu per channel": (prelu(6), 1e-9),
    "silu": (nn.SiLU(), SMOOTH),
    "silu in place": (nn.SiLU(inplace=True), SMOOTH),
    "gelu": (nn.GELU(), SMOOTH),
    "gelu by tanh": (nn.GELU("tanh"), SMOOTH),
    "torch.relu": (torch.relu, 1e-9),
    "torch.relu_": (torch.relu_, 1e-9),
    "Tensor.relu": (Tensor.relu, 1e-9),
    "Tensor.relu_": (Tensor.relu_, 1e-9),
    "hardswish, unknown": (nn.Hardswish(), 1e-9),
    "elu in place, unknown": (nn.ELU(inplace=True), 1e-9),
}

MAPS = {
    "max pooling": nn.MaxPool2d(3, 2, 1),
    "max pooling, ceil, dilated": nn.MaxPool2d(2, 2, 1, dilation=2, ceil_mode=True),
    "max pooling with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "average pooling": nn.AvgPool2d(2),
    "average pooling, ceil, padded": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "average pooling, padding not counted": nn.AvgPool2d(
        (3, 2), 2, 1, ceil_mode=True, count_include_pad=False
    ),
    "average pooling, divisor": nn.AvgPool2d(3, 2, divisor_override=5),
    "adaptive average": nn.AdaptiveAvgPool2d((3, None)),
    "adaptive average to one": nn.AdaptiveAvgPool2d(1),
    "adaptive maximum, unknown": nn.AdaptiveMaxPool2d(2),
    "nearest": nn.Upsample(scale_factor=2, mode="nearest"),
    "bilinear": nn.Upsample(size=(11, 5), mode="bilinear"),
    "bilinear, corners, by name": lambda x: F.interpolate(
        input=x, size=(11, 20), mode="bilinear", align_corners=True
    ),
    "cat": lambda x: torch.cat([x, x.tanh(), x.detach()], 1),
    "cat of rows": lambda x: torch.cat([x, x.tanh()], 2),
    "add": lambda x: x + x.tanh(),
    "add, alpha": lambda x: torch.add(x, x.tanh(), alpha=0.3),
    "add, broadcast": lambda x: x + x.mean((2, 3), keepdim=True),
    "add a number": lambda x: x + 1.0,
    "batch norm": frozen(nn.BatchNorm2d(6)),
    "batch norm without affine": frozen(nn.BatchNorm2d(6, affine=False)),
    "batch norm by batch statistics": frozen(nn.BatchNorm2d(6, track_running_stats=False)),
    "group norm, unknown": frozen(nn.GroupNorm(2, 6)),
    "layer norm": nn.Sequential(nn.Flatten(2), frozen(nn.LayerNorm(63))),
    "linear": nn.Sequential(nn.Flatten(2), frozen(nn.Linear(63, 5))),
    "linear, layer norm, relu in place": nn.Sequential(
        nn.Flatten(2), frozen(nn.Linear(63, 8)), frozen(nn.LayerNorm(8)), nn.ReLU(inplace=True)
    ),
}

CONVOLUTIONS = {
    "conv": nn.Conv2d(6, 4, 3, padding=1),
    "conv 1x1": nn.Conv2d(6, 4, 1, bias=False),
    "conv 1x1, strided": nn.Conv2d(6, 4, 1, stride=2),
    "conv, no padding": nn.Conv2d(6, 4, (2, 3)),
    "conv, padded beyond its kernel": nn.Conv2d(6, 4, 1, padding=1),
    "conv, strided": nn.Conv2d(6, 4, 3, stride=(2, 3), padding=(1, 0)),
    "conv, dilated": nn.Conv2d(6, 4, 3, padding=(2, 1), dilation=(2, 1)),
    "conv, grouped": nn.Conv2d(6, 4, 3, padding=1, groups=2),
    "conv, two kernels per channel": nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=6),
    "conv, depthwise": nn.Conv2d(6, 6, (5, 3), padding=(2, 0), groups=6),
    "conv, depthwise, strided": nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6),
    "conv, depthwise, dilated": nn.Conv2d(6, 6, 3, padding=(3, 1), dilation=(3, 1), groups=6),
    "conv, depthwise, padded beyond its kernel": nn.Conv2d(6, 6, 3, padding=(3, 2), groups=6),
    "conv, same": nn.Conv2d(6, 4, 3, padding="same", dilation=2),
    "conv, same, even kernel": nn.Conv2d(6, 4, (2, 3), padding="same"),
    "conv, valid": nn.Conv2d(6, 4, 3, padding="valid"),
    "conv, reflected": nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
    "conv of more weights than results": nn.Conv2d(6, 200, (7, 9)),
    "transposed": nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed, grouped": nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2),
    "transposed, dilated": nn.ConvTranspose2d(6, 4, 3, dilation=2, bias=False),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", POINTWISE)
def test_an_activation_has_stock_autograds_gradient(name, channels_last):
    function, tolerance = POINTWISE[name]
    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)
    x[0, 0, 0, :3] = 0.0  # at the kink itself
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    alone = nn.Sequential(frozen(nn.Conv2d(6, 6, 1)))
    assert_function_alike(lambda x: function(twice(x)), x, channels_last, tolerance)
    assert_function_alike(lambda x: function(alone(x)), x, channels_last, tolerance)
    tokens = torch.randn(2, 6, 5, dtype=torch.float64)
    assert_function_alike(lambda x: function(twice(x)), tokens, channels_last, tolerance)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_an_operation_on_maps_has_stock_autograds_gradient(name, channels_last):
    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)
    assert_function_alike(lambda x: MAPS[name](twice(x)), x, channels_last, 1e-9)
    x = x.to(memory_format=torch.channels_last)
    assert_function_alike(lambda x: MAPS[name](twice(x)), x, channels_last, 1e-9)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_what_follows_it_have_stock_autograds_gradient(
    name, dtype, channels_last
):
    """Alone; with a batch norm; with a batch norm and a ReLU, of which one is then made."""
    convolution = frozen(CONVOLUTIONS[name]).to(dtype)
    norm = frozen(nn.BatchNorm2d(convolution.out_channels)).to(dtype)
    x = torch.randn(2, 6, 9, 10, dtype=dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for chain in (
        nn.Sequential(convolution),
        nn.Sequential(convolution, norm),
        nn.Sequential(convolution, nn.LeakyReLU(0.2)),
        nn.Sequential(convolution, norm, nn.Hardtanh(-1, 3, inplace=True)),
    ):
        assert_function_alike(chain, x, channels_last, tolerance)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axes", [1, 3])
def test_convolutions_of_one_and_three_axes_have_stock_autograds_gradient(axes, transposed):
    kinds = {
        (1, False): nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2),
        (3, False): nn.Conv3d(4, 6, 3, padding=(1, 2, 1), dilation=(1, 2, 1)),
        (1, True): nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2),
        (3, True): nn.ConvTranspose3d(4, 6, 2, stride=2),
    }
    norms = {1: nn.BatchNorm1d(6), 3: nn.BatchNorm3d(6)}
    chain = nn.Sequential(frozen(kinds[axes, transposed]), frozen(norms[axes]), nn.ReLU())
    x = torch.randn(2, 4, *(6, 5, 7)[:axes], dtype=torch.float64)
    assert_function_alike(chain, x, channels_last=True, tolerance=1e-9)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("function", [add_in_place, add_method_in_place, add_twice_in_place])
def test_a_sum_in_place_of_a_convolution_has_stock_autograds_gradient(function, channels_last):
    convolution = frozen(nn.Conv2d(6, 6, 3, padding=1))
    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)
    assert_function_alike(lambda x: function(x, convolution), x, channels_last, 1e-9)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        torch.relu_,
        lambda x: F.relu(x, inplace=True),
        lambda x: x.mul_(3.0),
        lambda x: x.tanh_(),
        lambda x: x.index_fill_(1, torch.tensor([1, 8]), 0.5),
        lambda x: x[:, :4].relu_(),
        lambda x: x.__setitem__((slice(None), slice(3)), 0.5),
        lambda x: x.add_(x.sum((2, 3), keepdim=True).expand_as(x)),
    ],
    ids=["relu_", "F.relu", "mul_", "tanh_", "index_fill_", "relu_ of a part", "= 0.5", "add_"],
)
def test_a_concatenation_changed_in_place_has_stock_autograds_gradient(change, last):
    """The object is that which was put together; its values and its graph are not."""
    convolution = frozen(nn.Conv2d(12, 4, 3, padding=1))

    def function(x: Tensor) -> Tensor:
        together = torch.cat([twice(x), x.sin()], 1)
        change(together)
        return convolution(together)

    assert_function_alike(function, torch.randn(2, 6, 9, 7, dtype=torch.float64), last, 1e-9)


def test_a_concatenation_read_by_two_has_stock_autograds_gradient():
    one, other = (frozen(nn.Conv2d(12, 4, 3, padding=1)) for _ in range(2))

    def function(x: Tensor) -> Tensor:
        together = torch.cat([twice(x), x.sin().detach()[:, :2], x.sin()[:, 2:]], 1)
        return one(together) + other(together) * together.mean()

    assert_function_alike(function, torch.randn(2, 6, 9, 7, dtype=torch.float64), True, 1e-9)


def test_a_convolution_that_is_not_frozen_still_learns():
    convolution = nn.Conv2d(6, 4, 3).double()
    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)
    expected = torch.autograd.grad(convolution(x).square().sum(), convolution.weight)[0]
    with LeanForward(Plan(), channels_last=True):
        loss = convolution(x).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, convolution.weight)[0], expected)


# --- what is kept ---------------------------------------------------------------------------


def bytes_kept(function, x: Tensor, known: set[int], mode=None) -> int:
    """Bytes of all tensors that a graph keeps beside ``known`` ones, each memory counted once."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            kept[memory.data_ptr()] = (memory.nbytes(), tensor)
        return tensor

    x = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if mode is None:
            y = function(x)
        else:
            with mode:
                y = function(x)
                mode.finish()
    del y
    return sum(size for size, _ in kept.values())


def test_a_stack_keeps_one_bit_where_stock_autograd_keeps_two_maps():
    """Four times conv, batch norm, ReLU on 16 channels of 32x32, 65536 bytes a map in fp32.

    Stock autograd keeps the input and the result of each convolution (for the batch norm; the
    ReLU's result is the next one's input): 1 + 4 · 2 maps, and per batch norm at most two vectors.
    Here: a bit per value behind each ReLU, 2048 bytes, and the slope of each batch norm, 64 bytes.
    """
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        for _ in range(4)
    ]
    stack = randomise(nn.Sequential(*blocks), seed=5).requires_grad_(False)
    x = torch.randn(1, 16, 32, 32)
    known = {t.untyped_storage().data_ptr() for t in (*stack.parameters(), *stack.buffers())}
    a_map = x.numel() * 4
    stock = bytes_kept(stack, x, known)
    lean = bytes_kept(stack, x, known, LeanForward(plan_of(stack, x), channels_last=True))
    assert 9 * a_map <= stock <= 9 * a_map + 4 * 2 * 16 * 4
    assert lean <= 4 * (x.numel() // 8 + 16 * 4)


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)])
def test_an_average_keeps_nothing(pool):
    x = torch.randn(1, 16, 32, 32)
    kept = bytes_kept(lambda x: pool(twice(x)), x, set(), LeanForward(Plan()))
    assert kept <= 8  # the number 2


# --- what is not known ----------------------------------------------------------------------


class Spectrum(nn.Module):
    """A filter in the frequencies, complex numbers and all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(self.conv(x))
        return torch.fft.irfft2(spectrum * spectrum.abs().clamp(max=2), s=x.shape[2:])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(8, 24, 1)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).mT.chunk(3, -1)
        mixed = (q @ k.mT / 8**0.5).softmax(-1) @ v
        mixed = self.norm(mixed + F.scaled_dot_product_attention(q, k, v))
        return self.out(mixed.mT.unflatten(2, x.shape[2:]).relu())


class OwnConvolution(torch.autograd.Function):
    """Half of the gradient that autograd would give, so that a forgotten backward shows."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        ctx.shape = x.shape
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        found = torch.nn.grad.conv2d_input(ctx.shape, weight, gradient, padding=1)
        return found * 0.5, None


class StraightThrough(torch.autograd.Function):
    """A ReLU whose gradient ignores it."""

    @staticmethod
    def forward(ctx, x):
        return F.relu(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OwnNorm(torch.autograd.Function):
    """A batch norm in a function of its own, whose gradient is three times the right one."""

    @staticmethod
    def forward(ctx, x, mean, variance):
        ctx.save_for_backward(variance)
        return F.batch_norm(x, mean, variance)

    @staticmethod
    def backward(ctx, gradient):
        (variance,) = ctx.saved_tensors
        return gradient * 3 / (variance + 1e-5).sqrt().view(1, -1, 1, 1), None, None


class OwnFunctions(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "convolution":
            x = F.relu(self.bn(OwnConvolution.apply(x, self.conv1.weight)))
        elif self.kind == "relu":
            x = StraightThrough.apply(self.bn(self.conv1(x)))
        else:
            x = OwnNorm.apply(self.conv1(x), self.bn.running_mean, self.bn.running_var).relu()
        return self.conv2(x)


class Where(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.where(y > 0.3, y, y.square() * 0.1)


class Applied(nn.Module):
    """Blocks of the usual kind, run in an unusual way."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how = how
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.out = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.how(self.block, x))


def overloads(block: nn.Module, x: Tensor) -> Tensor:
    """A map read by name and by overload: as exported models call operations."""
    y = block[1](block[0](x))
    return block[2](y) - torch.ops.aten.relu.default(-y)


def in_pieces(block: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([block(piece) for piece in x.split(4, dim=2)], 2)


def recurrent(block: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + block(x)
    return x


def partly_without_gradients(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = block(x)
    return x * gate.tanh() + block(x)


def without_gradients_then_relu(block: nn.Module, x: Tensor) -> Tensor:
    """The gradients are off for half of what elsewhere is done in one go."""
    with torch.no_grad():
        shift = block[1](block[0](x))
    return block[2](shift) + x


def down_its_own_gradient(block: nn.Module, x: Tensor) -> Tensor:
    """A step downhill on an energy, as energy models take it inside of their forward."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(block(at).square().sum(), at, create_graph=True)
    return x - 0.1 * slope


UNKNOWN = {
    "fft": Spectrum(),
    "attention": Attention(),
    "own convolution": OwnFunctions("convolution"),
    "own relu": OwnFunctions("relu"),
    "own batch norm": OwnFunctions("norm"),
    "where": Where(),
    "overloads": Applied(overloads),
    "in pieces": Applied(in_pieces),
    "recurrent": Applied(recurrent),
    "partly without gradients": Applied(partly_without_gradients),
    "without gradients, then relu": Applied(without_gradients_then_relu),
    "checkpointed": Applied(partial(checkpoint, use_reentrant=False)),
    "gradient of a gradient": Applied(down_its_own_gradient),
    "vmap": Applied(lambda block, x: torch.vmap(lambda one: block(one[None])[0])(x)),
    "double": Applied(lambda block, x: block(x.float().double())),
}


IMPOSSIBLE = ("checkpointed", "gradient of a gradient", "vmap")


@pytest.mark.parametrize("name", [name for name in UNKNOWN if name not in IMPOSSIBLE])
def test_what_is_not_known_is_left_to_stock_autograd(name):
    assert_model_alike(UNKNOWN[name], size=8, batch=2)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_model_that_cannot_be_run_lean_is_run_by_stock_autograd_and_the_user_is_told(name):
    with pytest.warns(UserWarning, match="goes on with plain autograd") as told:
        assert_model_alike(UNKNOWN[name], size=8, batch=2)
    assert len(told) == 1  # and not with every image


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU()], ids=["relu", "silu"])
def test_a_gradient_inside_of_the_forward_is_itself_differentiated_in_float32(activation):
    """Where convolutions are asked of oneDNN directly, of which autograd knows nothing."""
    tail = Applied(down_its_own_gradient)
    tail.block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), activation)
    model = randomise(Behind(tail), seed=4)
    lean, stock = pair(model, size=8)
    with pytest.warns(UserWarning, match="gradient of a gradient"):
        assert_alike(lean, stock, images_for(model, 3, size=8), 1e-3)


@pytest.mark.filterwarnings("ignore")  # that of torch.jit
def test_a_map_read_by_a_scripted_function_is_what_it_would_be():
    """A scripted function runs outside of Python, where no call is seen."""

    def opposite(x: Tensor) -> Tensor:
        return torch.sigmoid(-x)

    scripted = torch.jit.script(opposite)

    def both(block: nn.Module, x: Tensor) -> Tensor:
        normed = block[1](block[0](x))
        return block[2](normed) + scripted(normed)

    assert_model_alike(Applied(both), size=8)


class Gate(torch.autograd.Function):
    """Lets through by the sign of the second map, to which it gives no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(gate > 0)
        return x * (gate > 0)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradient * mask, None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Conv2d(8, 40, 3, stride=2, padding=1)
        self.wide = nn.Conv2d(8, 40, 1)
        self.head = nn.Conv2d(40, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.interpolate(self.small(x), size=x.shape[2:])
        return self.head(Gate.apply(self.wide(x), gate))


def test_an_interpolated_map_may_be_given_no_gradient():
    assert_model_alike(Gated())


def by_hand(x: Tensor) -> Tensor:
    """An instance norm, as it is often written: by a batch norm of one image per channel."""
    batch, channels, *size = x.shape
    one = x.contiguous().view(1, batch * channels, *size)
    return F.batch_norm(one, None, None, training=True).view_as(x)


def by_torch(x: Tensor) -> Tensor:
    return torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, True)


class By(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.filterwarnings("ignore")  # that of torch.jit
@pytest.mark.parametrize(
    ("place", "norm"),
    [
        *((place, norm) for place in ("last", "behind", "before") for norm in (by_hand, by_torch)),
        # Where it is not the last but one, it is not seen, and its gradient may be that of PyTorch.
        *((place, torch.jit.script) for place in ("last", "behind")),
    ],
)
def test_an_instance_norm_near_an_upsampling_learns_as_under_stock_autograd(place, norm):
    """PyTorch's gradient of it is wrong for one image whose gradient has its channels last."""
    scripted = norm is torch.jit.script
    module = norm(nn.InstanceNorm2d(5)) if scripted else By(norm)
    head = nn.Conv2d(8, 5, 3, padding=1)
    enlarge = By(partial(F.interpolate, scale_factor=2, mode="bilinear"))
    order = {"last": (module,), "behind": (enlarge, module), "before": (module, enlarge)}[place]
    assert_model_alike(nn.Sequential(head, *order))


def test_calls_by_name_are_understood_like_those_by_position():
    weight = torch.randn(6, 6, 3, 3, dtype=torch.float64)
    mean, variance = torch.zeros(6).double(), torch.ones(6).double() * 2

    def function(x: Tensor) -> Tensor:
        x = F.conv2d(input=x, weight=weight, stride=[1], padding=1)
        x = F.batch_norm(x, running_var=variance, running_mean=mean, eps=0.1)
        x = F.max_pool2d(input=F.relu(input=x, inplace=True), kernel_size=2, stride=None)
        x = torch.conv2d(x, weight, None, 1, "same")
        return torch.add(input=x, other=F.leaky_relu(input=x, negative_slope=-2))

    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)
    assert_function_alike(function, x, channels_last=True, tolerance=1e-6)


def test_hooks_on_the_backward_pass_see_and_change_stock_autograds_gradients():
    model = randomise(Behind(Applied(lambda block, x: block(x))), seed=4).double()
    seen: list[Tensor] = []

    def hook(module, to_input, to_output):
        seen.extend(gradient.clone() for gradient in (*to_input, *to_output))
        return (to_input[0] * 2,)

    for module in model.tail.block:
        module.register_full_backward_hook(hook)
    lean, stock = pair(model, size=8)
    for image in images_for(model, 3, size=8):
        seen.clear()
        lean(image)
        ours = list(seen)
        seen.clear()
        stock(image)
        assert len(ours) == len(seen) == 6
        assert max(map(away, ours, seen)) < 1e-5
        assert away(gamma_of(lean), gamma_of(stock)) < 1e-6


def test_a_weight_that_is_computed_on_the_way_is_left_alone():
    tail = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), nn.ReLU(), nn.Conv2d(8, 5, 1)
    )
    assert_model_alike(tail, size=8)


def test_a_model_in_bfloat16_adapts_as_under_stock_autograd():
    """Rounded to 8 bits at every step on both ways, but at different places: so both are held
    against the same weights in fp32, and lean may be no further away than twice what stock is."""
    half = randomise(Street(), seed=4).bfloat16()
    full = randomise(Street(), seed=4).bfloat16().float()
    lean, stock = pair(half, size=32)
    _, judge = pair(full, size=32)
    for image in images_for(half, 3, size=32):
        seen, expected, exact = lean(image), stock(image), judge(image.float())
        assert seen.dtype == expected.dtype
        assert away(seen, exact) < 2 * away(expected, exact) < 0.05
        moved = gamma_of(judge)
        assert away(gamma_of(lean), moved) < 2 * away(gamma_of(stock), moved) < 0.5


# --- the model is its owner's ---------------------------------------------------------------


def everything_about(model: nn.Module) -> list[object]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        [(name, type(m), sorted(vars(m)), m.training) for name, m in model.named_modules()],
        [len(getattr(m, kind)) for m in model.modules() for kind in hooks],
        [
            (id(t), t.data_ptr(), t.stride(), t.dtype)
            for t in model.state_dict(keep_vars=True).values()
        ],
        ["forward" in vars(m) or type(m).forward for m in model.modules()],
    ]


def test_the_model_is_not_modified():
    model = randomise(Street(), seed=4)
    model.stem[0].weight.requires_grad_(False)
    before, weights = everything_about(model), snapshot(model)
    wanted = [p.requires_grad for p in model.parameters()]
    image = images_for(model, 1)[0]
    expected = model(image)
    lean, stock = pair(model)
    stock.remove()
    for image_of_stream in images_for(model, 3):
        lean(image_of_stream)
    assert everything_about(model) == before
    assert same(snapshot(model), weights)
    lean.remove()
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(image), expected)


def test_outside_of_a_step_nothing_is_intercepted():
    model = randomise(Street(), seed=4)
    lean, _ = pair(model)
    inside = []
    model.layer2.register_forward_hook(
        lambda *_: inside.append(len(_get_current_function_mode_stack()))
    )
    lean(images_for(model, 1)[0])
    assert inside == [1, 1]  # watched, then lean
    assert _get_current_function_mode_stack() == []
    model(images_for(model, 1)[0])
    assert inside == [1, 1, 0]


def test_nothing_is_intercepted_after_a_step_that_failed():
    model = randomise(Street(), seed=4)
    lean, _ = pair(model)
    handle = model.layer2.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lean(images_for(model, 1)[0])
    handle.remove()
    assert _get_current_function_mode_stack() == []
    assert torch.is_grad_enabled()


def test_weights_that_change_between_two_images_are_seen():
    """Nothing folded is kept: neither new values in place nor a new module go unnoticed."""
    model = randomise(Street(), seed=4).double()
    lean, stock = pair(model)
    images = images_for(model, 6)
    assert_alike(lean, stock, images[:2], 1e-6)
    model.layer2.bn1.running_var.mul_(2)
    model.head[0].weight.data.mul_(1.5)
    assert_alike(lean, stock, images[2:4], 1e-6)
    model.layer2.conv1 = frozen(nn.Conv2d(8, 12, 1))
    model.head[2] = nn.LeakyReLU(0.2).eval()
    model.head[1].eps = 0.1
    assert_alike(lean, stock, images[4:], 1e-6)


# --- chains ---------------------------------------------------------------------------------


class Chain(nn.Module):
    """A convolution, a batch norm and a ReLU, with an ear at each place in between."""

    def __init__(self, listen=None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.out = nn.Conv2d(8, 5, 1)
        self.listen = listen
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        conv = self.conv(x)
        if self.listen is not None:
            return self.listen(self, conv)
        return self.out(self.relu(self.bn(conv)))


def a_second_branch(chain: Chain, conv: Tensor) -> Tensor:
    return chain.out(chain.relu(chain.bn(conv)) + conv.sigmoid())


def a_second_branch_behind_the_norm(chain: Chain, conv: Tensor) -> Tensor:
    normed = chain.bn(conv)
    return chain.out(chain.relu(normed) - chain.relu(-normed))


def read_before_on_every_second_call(chain: Chain, conv: Tensor) -> Tensor:
    also = conv.sigmoid() if chain.calls % 2 == 0 else 1.0
    return chain.out(chain.relu(chain.bn(conv)) * also)


def read_before_on_every_third_call(chain: Chain, conv: Tensor) -> Tensor:
    also = conv.sigmoid() if chain.calls % 3 == 0 else 1.0
    return chain.out(chain.relu(chain.bn(conv)) * also)


def read_late_on_every_third_call(chain: Chain, conv: Tensor) -> Tensor:
    """The map is alive all the time, but on most images nobody wants it."""
    done = chain.relu(chain.bn(conv))
    return chain.out(done * conv.sigmoid() if chain.calls % 3 == 0 else done)


def read_late_between_on_every_third_call(chain: Chain, conv: Tensor) -> Tensor:
    normed = chain.bn(conv)
    done = chain.relu(normed)
    return chain.out(done - normed.tanh() if chain.calls % 3 == 0 else done)


def without_the_norm_on_every_third_call(chain: Chain, conv: Tensor) -> Tensor:
    return chain.out(chain.relu(conv if chain.calls % 3 == 0 else chain.bn(conv)))


def ends_early_on_every_third_call(chain: Chain, conv: Tensor) -> Tensor:
    return chain.bn(conv)[:, :5] if chain.calls % 3 == 0 else chain.out(chain.relu(chain.bn(conv)))


def kept_on_the_module(chain: Chain, conv: Tensor) -> Tensor:
    chain.kept = conv
    return chain.out(chain.relu(chain.bn(chain.kept)))


def in_a_list(chain: Chain, conv: Tensor) -> Tensor:
    maps = [conv]
    maps.append(chain.bn(maps[-1]))
    maps.append(chain.relu(maps[-1]))
    return chain.out(torch.stack(maps).sum(0))


LISTENERS = [
    a_second_branch,
    a_second_branch_behind_the_norm,
    read_before_on_every_second_call,
    read_before_on_every_third_call,
    read_late_on_every_third_call,
    read_late_between_on_every_third_call,
    without_the_norm_on_every_third_call,
    ends_early_on_every_third_call,
    kept_on_the_module,
    in_a_list,
]


@pytest.mark.parametrize("listen", LISTENERS, ids=lambda listen: listen.__name__)
def test_a_map_that_somebody_else_reads_is_what_stock_would_give(listen):
    """Calls are counted per adapter, so that both read it on the same images: a stock adapter
    runs the model once an image, the lean one also when it watches it, or is surprised."""
    model = randomise(Behind(Chain(listen)), seed=4).double()
    lean, stock = pair(model, size=8)
    for number, image in enumerate(images_for(model, 7, size=8)):
        for adapter in (lean, stock):
            model.tail.calls = number  # its forward makes it one more: image 2 is the third call
            with CountedOnce(model.tail):
                seen = adapter(image)
            if adapter is lean:
                ours = seen
        assert away(ours, seen) < 1e-6, number
        assert away(gamma_of(lean), gamma_of(stock)) < 1e-6, number


class CountedOnce:
    """While it lasts, however often the chain runs, it counts one call."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.calls = chain, chain.calls

    def __enter__(self) -> None:
        self.handle = self.chain.register_forward_pre_hook(self.hold)

    def hold(self, *_: object) -> None:
        self.chain.calls = self.calls

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def test_a_model_that_reads_a_map_on_every_second_forward_is_answered():
    """Counted by forward and not by image: the one that is watched does not read it, the lean one
    does. What it predicts is the stock adapter's at one of the two."""
    model = randomise(Behind(Chain(read_before_on_every_second_call)), seed=4).double()
    lean, stock = pair(model, size=8, lr=0.0)
    for image in images_for(model, 4, size=8):
        expected = [stock(image), stock(image)]
        seen = lean(image)
        assert min(away(seen, either) for either in expected) < 1e-9


@pytest.mark.parametrize("place", ["conv", "bn"])
def test_a_hook_that_was_there_from_the_start_sees_the_true_map(place):
    """It keeps the map and looks at it when the forward is over."""
    model = randomise(Behind(Chain()), seed=4).double()
    kept: list[Tensor] = []
    model.tail.get_submodule(place).register_forward_hook(lambda m, i, out: kept.append(out))
    lean, stock = pair(model, size=8)
    for image in images_for(model, 3, size=8):
        kept.clear()
        lean(image)
        seen = kept[-1].detach().clone()
        stock(image)
        assert seen.min() < 0  # no ReLU in it
        assert away(seen, kept[-1].detach()) < 1e-6
        assert away(gamma_of(lean), gamma_of(stock)) < 1e-6


@pytest.mark.parametrize("place", ["conv", "bn", "relu"])
def test_a_hook_that_comes_later_computes_with_the_true_map(place):
    model = randomise(Behind(Chain()), seed=4).double()
    lean, stock = pair(model, size=8)
    images = images_for(model, 6, size=8)
    assert_alike(lean, stock, images[:2], 1e-6)
    sums: list[float] = []
    handle = model.tail.get_submodule(place).register_forward_hook(
        lambda m, i, out: sums.append(float(out.detach().square().sum()))
    )
    for image in images[2:4]:
        sums.clear()
        lean(image)
        ours = sums[-1]
        stock(image)
        assert ours == pytest.approx(sums[-1], rel=1e-5)
        assert away(gamma_of(lean), gamma_of(stock)) < 1e-6
    handle.remove()
    assert_alike(lean, stock, images[4:], 1e-6)


@pytest.mark.parametrize("place", ["conv", "bn"])
def test_a_hook_that_comes_later_and_keeps_the_map_is_left_with_the_true_one(place):
    """It computes nothing while the model runs; what it kept is looked at afterwards."""
    model = randomise(Behind(Chain()), seed=4).double()
    lean, stock = pair(model, size=8)
    images = images_for(model, 4, size=8)
    assert_alike(lean, stock, images[:2], 1e-6)
    kept: list[Tensor] = []
    model.tail.get_submodule(place).register_forward_hook(lambda m, i, out: kept.append(out))
    for image in images[2:]:
        kept.clear()
        lean(image)
        seen = kept[-1].detach().clone()
        stock(image)
        assert away(seen, kept[-1].detach()) < 1e-6
        assert away(gamma_of(lean), gamma_of(stock)) < 1e-6


def test_a_hook_may_replace_a_map_in_the_middle():
    model = randomise(Behind(Chain()), seed=4).double()
    lean, stock = pair(model, size=8)
    images = images_for(model, 4, size=8)
    assert_alike(lean, stock, images[:2], 1e-6)
    model.tail.conv.register_forward_hook(lambda m, i, out: out * 0.5 - 0.1)
    assert_alike(lean, stock, images[2:], 1e-6)


class SharedTwice(nn.Module):
    """One convolution used twice, behind it now a ReLU, now none; one batch norm for both."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.out = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bn(self.conv(F.relu(self.bn(self.conv(x))))) + x)


class SharedOnEverySecond(SharedTwice):
    """The second use is decided by the image."""

    def forward(self, x: Tensor) -> Tensor:
        done = F.relu(self.bn(self.conv(x)))
        return self.out(self.conv(done) if float(x.detach()[0, 0, 0, 0]) > 0 else done)


@pytest.mark.parametrize("tail", [SharedTwice(), SharedOnEverySecond()], ids=["always", "some"])
def test_a_convolution_may_be_used_twice(tail):
    assert_model_alike(tail, size=8, steps=6)


class Flattening(nn.Module):
    """``view`` wants maps that lie row by row: of others it raises a RuntimeError."""

    def __init__(self, listen=None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 64, 5)
        self.chain = Chain(listen)

    def forward(self, x: Tensor) -> Tensor:
        extra = self.fc(F.relu(self.conv(x)).view(len(x), -1))
        return self.chain(x) + extra[:, :, None, None]


def test_a_model_that_views_its_maps_as_rows_works():
    assert_model_alike(Flattening(), size=8, batch=2)


def test_a_model_that_views_its_maps_and_then_reads_one_it_did_not_read_before_works():
    """Both at once: the first lean forward finds that maps must lie row by row, the next one, in
    which the chain is at its third call, that somebody reads the convolution."""
    model = randomise(Behind(Flattening(read_before_on_every_third_call)), seed=4).double()
    lean, stock = pair(model, size=8, batch=2, lr=0.0)
    for image in images_for(model, 4, size=8, batch=2):
        expected = [stock(image) for _ in range(3)]
        # Watched at call 1; at call 2 the view fails (or not even the chain is reached).
        model.tail.chain.calls = 1
        seen = lean(image)
        assert min(away(seen, either) for either in expected) < 1e-9


class Strided(nn.Module):
    """Every second column by the strides of a map, as code for rows would take it."""

    def __init__(self, ask) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 5, 3, padding=1)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(F.leaky_relu(self.conv(x), 0.2))


def by_own_strides(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.as_strided((b, c, h, w // 2), (x.stride(0), x.stride(1), x.stride(2), 2))


def by_assumed_strides(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return torch.as_strided(x, (b, c, h, w // 2), (c * h * w, h * w, w, 2))


@pytest.mark.parametrize("ask", [by_own_strides, by_assumed_strides])
def test_a_model_that_asks_how_its_maps_lie_in_memory_works(ask):
    assert_model_alike(Strided(ask), size=8, batch=2)


def test_an_error_of_the_model_is_passed_on_and_then_forgotten():
    model = randomise(Street(), seed=4).double()
    lean, stock = pair(model)
    images = images_for(model, 4)
    assert_alike(lean, stock, images[:2], 1e-6)
    known = _known[model][("layer1",)].plan
    before = lean.state()

    def fail(*_: object) -> None:
        raise RuntimeError("the camera is on fire")

    handle = model.layer3.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="the camera is on fire"):
        lean(images[2])
    handle.remove()
    assert same(lean.state(), before)
    assert known.any_layout
    assert _known[model][("layer1",)].plan.any_layout
    assert_alike(lean, stock, images[2:], 1e-6)


# --- bits -----------------------------------------------------------------------------------


@st.composite
def masks(draw) -> Tensor:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    kind = draw(st.sampled_from(["dense", "part", "stepped", "expanded"]))
    mask = (
        torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) > 0.4
    )
    if kind == "part":
        mask = mask[shape[0] // 2 :]  # dense, but not from the beginning of its memory
    elif kind == "stepped":
        mask = mask[..., ::2]
    elif kind == "expanded":
        mask = mask[:1].expand(shape)
    return mask.permute(order)


@settings(max_examples=200)
@given(masks())
def test_bits_come_back_as_they_went_in_one_per_value(mask):
    bits, shape = pack(mask)
    assert (bits.dtype, bits.numel()) == (torch.uint8, -(-mask.numel() // 8))
    back = unpack(bits, shape)
    assert back.dtype == torch.uint8
    assert torch.equal(back.bool(), mask)


@pytest.mark.parametrize("high", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "with gaps"])
def test_bits_say_which_values_lie_between_bounds(layout, dtype, high):
    """The bounds themselves and what is no number do not."""
    x = torch.randn(2, 5, 3, 7).to(dtype)
    x[0, 0, 0, :5] = torch.tensor([0.25, 1.0, float("nan"), float("inf"), -float("inf")])
    if layout == "channels last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "with gaps":
        x = x[:, 1:4, :, ::2]
    expected = (x > 0.25) & ((x < high) if high is not None else True)
    assert torch.equal(unpack(*pack_above(x, 0.25, high)).bool(), expected)


def test_bits_keep_the_order_of_values_in_memory():
    mask = (torch.rand(2, 3, 5, 7) > 0.5).to(memory_format=torch.channels_last)
    back = unpack(*pack(mask))
    assert back.stride() == mask.stride()


# --- winograd -------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    rows=st.integers(9, 40),
    columns=st.integers(5, 19),
    channels=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    batch=st.integers(1, 2),
    has_bias=st.booleans(),
    relu=st.booleans(),
)
def test_winograd_is_a_convolution(
    rows, columns, channels, padding, dilation, batch, has_bias, relu
):
    """The judge is `F.conv2d` in float64; the error is a share of the largest result."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn((batch, channels[0], rows, columns), generator=generator)
    weight = torch.randn((channels[1], channels[0], 3, 3), generator=generator)
    bias = torch.randn(channels[1], generator=generator) if has_bias else None
    expected = F.conv2d(
        x.double(), weight.double(), None if bias is None else bias.double(), 1, padding, dilation
    )
    scale = float(expected.abs().max())
    x = x.contiguous(memory_format=torch.channels_last)
    seen = winograd.convolve(x, weight, bias, padding, dilation, (0.0, None) if relu else None)
    if relu:
        expected = expected.relu()
    assert seen.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(seen.double(), expected, rtol=0, atol=1e-5 * scale)


def test_winograd_suits_large_maps_of_many_channels_only():
    def suits(channels=64, rows=64, kernel=3, dilation=1, dtype=torch.float32):
        weight = torch.empty(channels, channels, kernel, kernel, dtype=dtype)
        x = torch.empty(1, channels, rows, 64, dtype=dtype)
        return winograd.suits(x, weight, (1, 1), (dilation, dilation))

    assert suits()
    assert suits(dilation=2)
    assert not suits(channels=63)
    assert not suits(rows=11)
    assert not suits(kernel=1)
    assert not suits(kernel=5)
    assert not suits(dilation=3)
    assert not suits(dtype=torch.float64)
    assert not suits(rows=12, channels=1024)  # mixing 9.4 million weights for 0.8 million results


# --- entropy and moments --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient_last", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(2, 19, 71, 64), (1, 3, 1, 1), (1, 40, 3, 2000)])
def test_lean_entropy_is_the_entropy_and_has_its_gradient(
    shape, channels_last, gradient_last, dtype
):
    """71 rows are a strip of 53 and a rest of 18; 40 · 2000 logits do not fit into a strip."""
    logits = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
    if channels_last:
        logits = logits.to(memory_format=torch.channels_last)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    seen = lean_entropy_loss(ours, channels_last=gradient_last) * 0.3
    expected = entropy_loss(theirs) * 0.3
    assert seen.dtype == expected.dtype
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(seen, expected, rtol=max(tolerance / 100, 1e-10), atol=1e-6)
    (gradient,) = torch.autograd.grad(seen, ours)
    (judge,) = torch.autograd.grad(expected, theirs)
    limit = tolerance * float(judge.abs().max())
    torch.testing.assert_close(gradient, judge, rtol=tolerance, atol=limit)
    if gradient_last:
        assert gradient.is_contiguous(memory_format=torch.channels_last)
    else:
        assert gradient.stride() == logits.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(2, 19, 71, 64), (2, 3, 1, 1), (1, 40, 3, 2000), (3, 10)])
def test_lean_entropies_are_the_entropies_and_have_their_gradient(shape, channels_last, dtype):
    """Of each prediction, weighed as it comes: some of them count for nothing."""
    logits = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
    if channels_last and logits.dim() == 4:
        logits = logits.to(memory_format=torch.channels_last)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    seen, expected = lean_entropy(ours), entropy(theirs)
    assert seen.dtype == expected.dtype
    assert seen.shape == expected.shape
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
    weights = torch.rand(seen.shape).clamp_(min=0.5) - 0.5
    (gradient,) = torch.autograd.grad((seen * weights).sum(), ours)
    (judge,) = torch.autograd.grad((expected * weights).sum(), theirs)
    limit = tolerance * float(judge.abs().max())
    torch.testing.assert_close(gradient, judge, rtol=tolerance, atol=limit)
    last = channels_last and logits.dim() == 4
    layout = torch.channels_last if last else torch.contiguous_format
    assert gradient.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("channels_last", [False, True])
def test_lean_entropies_of_logits_in_any_order_of_memory(channels_last):
    """Rows before classes, and a part of a larger map: neither lies as either layout does."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for logits in (
        torch.randn(2, 5, 130, 160).transpose(1, 2).contiguous().transpose(1, 2),
        torch.randn(2, 5, 140, 160).to(memory_format=layout)[:, :, 1:-1, 2:-3],
        torch.randn(2, 9, 150, 160).to(memory_format=layout)[:, 2:6],
    ):
        ours, theirs = (logits.detach().requires_grad_() for _ in range(2))
        weights = torch.rand(logits[:, 0].shape)
        seen, expected = lean_entropy(ours), entropy(theirs)
        torch.testing.assert_close(seen, expected)
        (gradient,) = torch.autograd.grad((seen * weights).sum(), ours)
        (judge,) = torch.autograd.grad((expected * weights).sum(), theirs)
        torch.testing.assert_close(gradient, judge, rtol=1e-5, atol=1e-6)


def test_lean_entropies_of_impossible_classes_are_those_of_the_others():
    """A logit of −∞ has p log p → 0, and no gradient: as if there were no such class."""
    possible = torch.randn(1, 8, 100, 100)
    logits = torch.cat([possible, torch.full((1, 1, 100, 100), -torch.inf)], 1).requires_grad_()
    seen = lean_entropy(logits)
    torch.testing.assert_close(seen, entropy(possible))
    (gradient,) = torch.autograd.grad(seen.sum(), logits)
    assert gradient[:, -1].abs().max() < 1e-30
    assert gradient.isfinite().all()


def test_lean_entropies_refuse_the_gradient_of_their_gradient():
    logits = torch.randn(1, 8, 100, 100, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        torch.autograd.grad(lean_entropy(logits).sum(), logits, create_graph=True)


def test_only_large_maps_of_a_cpu_are_taken_strip_by_strip():
    small, large = (torch.zeros(9, 8, n, n, requires_grad=True) for n in (32, 100))
    names = [type(lean_entropy(x).grad_fn).__name__ for x in (small, large)]
    assert [name == "_EntropyBackward" for name in names] == [False, True]


def test_lean_entropy_of_extreme_logits_is_finite_and_zero():
    """One class is certain: H = 0, and so is the gradient; two alike give log 2."""
    logits = torch.full((1, 4, 3, 5), -1e4)
    logits[:, 1] = 1e4
    logits.requires_grad_()
    loss = lean_entropy_loss(logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert 0 <= loss.item() < 1e-30
    assert gradient.abs().max() < 1e-30
    logits = logits.detach().clone()
    logits[:, 2] = 1e4
    assert float(lean_entropy_loss(logits)) == pytest.approx(0.693147, rel=1e-5)


def test_lean_entropy_without_gradients_keeps_none():
    with torch.no_grad():
        assert lean_entropy_loss(torch.zeros(1, 5, 2, 2)).grad_fn is None


FEATURES = {
    "maps": ((2, 3, 5, 7), 1, torch.contiguous_format),
    "maps, channels last": ((2, 3, 5, 7), 1, torch.channels_last),
    "maps (B, H, W, C)": ((2, 5, 7, 3), 3, torch.contiguous_format),
    "tokens": ((2, 11, 3), 2, torch.contiguous_format),
    "one pixel": ((2, 3, 1, 1), 1, torch.contiguous_format),
}


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_of_moments_are_those_of_finite_differences(name):
    shape, axis, layout = FEATURES[name]
    x = torch.randn(shape, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: instance_moments(x, axis), (x,))


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_moments_are_mean_and_population_variance(name, dtype, wants_gradient):
    """`torch.var_mean` in float64 says what they are, also with a mean far from zero."""
    (batch, *rest), axis, layout = FEATURES[name]
    large = [n if axis == d + 1 else n * 13 for d, n in enumerate(rest)]
    x = (torch.randn(batch, *large) * 0.7 + 20).to(dtype).to(memory_format=layout)
    over = [d for d in range(1, x.dim()) if d != axis]
    variance, mean = torch.var_mean(x.double(), over, correction=0)
    seen = instance_moments(x.requires_grad_(wants_gradient), axis)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [m.dtype for m in seen] == [wide, wide]
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(seen[0].detach().double(), mean, rtol=rounding, atol=0)
    torch.testing.assert_close(seen[1].detach().double(), variance, rtol=10 * rounding, atol=0)


# --- several at once ------------------------------------------------------------------------


def test_two_threads_on_one_model_do_not_disturb_each_other():
    """A lean adapter, another one with other layers, and plain forwards, all at the same time."""
    model = randomise(Street(), seed=4)
    images = images_for(model, 25, size=16)
    first, _ = pair(model, ("layer1",), size=16)
    second, _ = pair(model, ("layer2", "layer3"), size=16)
    with torch.no_grad():
        expected = [
            [first(x) for x in images],
            [second(x) for x in images],
            [model(x) for x in images],
        ]
    learned = first.state(), second.state()
    first.reset()
    second.reset()
    seen: list[list[Tensor]] = [[], [], []]
    failures: list[BaseException] = []
    start = threading.Barrier(3)

    def work(answers: list[Tensor], answer) -> None:
        try:
            torch.set_num_threads(1)
            start.wait()
            with torch.no_grad():
                answers.extend(answer(x) for x in images)
        except BaseException as failure:
            failures.append(failure)

    workers = [
        threading.Thread(target=work, args=both)
        for both in zip(seen, (first, second, model), strict=True)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    for ours, theirs in zip(seen, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert same(first.state(), learned[0])
    assert same(second.state(), learned[1])


# --- precision and stride -------------------------------------------------------------------


def test_bf16_predicts_and_learns_about_as_fp32_does_lean_or_not():
    """bf16 has 8 bits: a 256th per rounding, and a few roundings in a row. Where a batch norm is
    folded they fall elsewhere, so that lean and stock are not compared with each other but with
    fp32: lean may be no further away than twice what stock is."""
    model = randomise(Street(), seed=4)
    _, full = pair(model, size=32)
    lean, stock = pair(model, size=32, precision="bf16")
    for image in images_for(model, 5, size=32):
        expected, seen, other = full(image), lean(image), stock(image)
        assert lean.last.adapted
        assert stock.last.adapted
        assert seen.dtype == other.dtype == torch.float32
        assert not torch.equal(seen, expected)
        assert away(seen, expected) < 2 * away(other, expected) < 0.05
        moved = gamma_of(full)
        assert gamma_of(lean).isfinite().all()
        assert away(gamma_of(lean), moved) < 2 * away(gamma_of(stock), moved) < 0.5
    assert all(p.dtype == torch.float32 for p in (*model.parameters(), *lean.trainable.values()))


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("size", [8, 9])
def test_an_entropy_stride_of_two_is_the_entropy_of_the_means_of_two_by_two(lean, size):
    """Of 9 rows the last one's means are over what there is of it."""
    model = randomise(Street(), seed=4)
    adapter = pair(model, size=size, entropy_stride=2)[not lean]
    plain = pair(model, size=size)[not lean]
    image = images_for(model, 1, size=size)[0]
    logits = adapter(image)
    halved = F.avg_pool2d(logits, 2, ceil_mode=True, count_include_pad=False)
    assert halved.shape[2:] == (-(-size // 2),) * 2
    assert adapter.last.losses["entropy"] == pytest.approx(float(entropy_loss(halved)), rel=1e-5)
    assert torch.equal(plain(image), logits)
    assert plain.last.losses["entropy"] != adapter.last.losses["entropy"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"precision": "fp16"}, "precision is one of 'fp32', 'bf16', not 'fp16'"),
        ({"precision": None}, "precision is one of 'fp32', 'bf16', not None"),
        ({"entropy_stride": 0}, "entropy_stride .*whole number from 1 on, not 0"),
        ({"entropy_stride": 1.5}, "entropy_stride .*whole number from 1 on, not 1.5"),
        ({"entropy_stride": True}, "entropy_stride .*whole number from 1 on, not True"),
        ({"when": 0}, "when is 'always', 'auto' or a whole number from 1 on, not 0"),
        ({"when": "often"}, "when is 'always', 'auto' or a whole number from 1 on, not 'often'"),
        ({"when": True}, "when is 'always', 'auto' or a whole number from 1 on, not True"),
        ({"when": 2.0}, "when is 'always', 'auto' or a whole number from 1 on, not 2.0"),
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_says_what_would(segmenter, profile, setting, words):
    with pytest.raises(ValueError, match=words):
        bestta.adapt(segmenter, profile, **setting)


def test_weights_may_lie_in_memory_in_any_order():
    """As after ``model.to(memory_format=torch.channels_last)``; the widths are Winograd's."""
    tail = nn.Sequential(nn.Conv2d(8, 64, 1), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
    model = randomise(Behind(tail), seed=4).to(memory_format=torch.channels_last)
    lean, stock = pair(model, size=40)
    assert_alike(lean, stock, images_for(model, 2, size=40), 1e-3)


# --- readers that no call shows, and models that remember ---------------------------------------


class Summed(nn.Module):
    """A map is added to another one, and read once more afterwards by ``reader``."""

    def __init__(self, reader) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.reader = reader

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        z = y + x
        return z + self.reader(y)


@pytest.mark.filterwarnings("ignore")  # that of torch.jit, and that the model does not run lean
def test_an_operand_that_a_scripted_function_reads_after_the_sum_is_what_it_was():
    def twice(x: Tensor) -> Tensor:
        return x * 2.0

    assert_model_alike(Summed(torch.jit.script(twice)), size=8)


def test_a_tensor_at_the_place_of_one_that_is_gone_is_not_taken_for_it():
    """A model that drops a map it was given for one that happens to have the same identity."""
    conv, bn = nn.Conv2d(3, 3, 1).requires_grad_(False), nn.BatchNorm2d(3).eval()
    for p in bn.parameters():
        p.requires_grad_(False)
    x = torch.randn(1, 3, 4, 4)
    watch = Watch()
    with torch.no_grad(), watch:
        F.relu(bn(conv(x)))
    other = x + 1.0
    expected = F.relu(bn(other))
    with torch.no_grad(), LeanForward(watch.plan()) as lean:
        gone = conv(x)
        entry = lean._expected.pop(id(gone))
        del gone
        lean._expected[id(other)] = entry  # as if this one had come to lie there
        torch.testing.assert_close(F.relu(bn(other)), expected)
        with pytest.raises(forward.Surprise):
            lean.finish()


class Remembers(nn.Module):
    """Adds to each image's features those of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        out = y if self.before is None else y + 0.5 * self.before
        self.before = y.detach()
        return out


def test_a_model_that_remembers_the_image_before_remembers_nothing_of_being_watched():
    assert_alike_apart(Remembers, images=4, size=200)


class Draws(nn.Module):
    """Random in eval mode, as dropout is that is never switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.conv(x), 0.5, training=True)


def test_a_model_that_draws_at_random_draws_the_same_lean():
    assert_alike_apart(Draws, images=3, size=16)


def assert_alike_apart(build, images: int, size: int) -> None:
    """As `assert_model_alike`, each adapter with a model of its own, and drawing the same."""
    answers = []
    for lean in (True, False):
        torch.manual_seed(0)
        model = randomise(Behind(build()), seed=4).double()
        ours, theirs = pair(model, size=size)
        adapter = ours if lean else theirs
        model.tail.before = None  # what the profile was collected from
        torch.manual_seed(5)
        answers.append([adapter(image) for image in images_for(model, images, size=size)])
        answers[-1].append(gamma_of(adapter))
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_model_whose_weights_were_replaced_is_watched_anew():
    """``load_state_dict(assign=True)`` gives it other tensors than those that were watched."""
    tail = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    model = randomise(Behind(tail), seed=4)
    lean, _ = pair(model, size=16)
    images = images_for(model, 3, size=16)
    lean(images[0])
    old = set(_known[model][("layer1",)].plan.chains)
    copied = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(copied, assign=True)
    lean(images[1])
    new = _known[model][("layer1",)].plan.chains
    assert new
    assert not old & set(new)
    assert all(any(weights is t for t in copied.values()) for weights, _ in new.values()) or all(
        any(weights is t for t in (*model.parameters(), *model.buffers()))
        for weights, _ in new.values()
    )


def test_a_chain_that_keeps_surprising_is_given_up_and_the_others_stay():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
            self.second = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
            self.looks = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.first[0](x)
            z = self.first[2](self.first[1](y))
            return self.second(z) + (y.mean() if self.looks else 0.0)

    model = randomise(Behind(Sometimes()), seed=4).double()
    lean, stock = pair(model, size=16)
    images = images_for(model, 4, size=16)
    for number, image in enumerate(images):
        model.tail.looks = number % 2 == 1
        torch.testing.assert_close(lean(image), stock(image), rtol=1e-9, atol=1e-9)
    kept = _known[model][("layer1",)].plan
    assert kept.after(model.tail.second[0].weight)
    assert not kept.after(model.tail.first[0].weight)


@pytest.mark.parametrize("lean", ["maybe", "false", None, 1])
def test_lean_is_yes_or_no(lean):
    model = randomise(Segmenter(), seed=1)
    profile = SourceProfile.collect(model, stream(2, seed=3), layers="layer1")
    with pytest.raises(ValueError, match="True or False"):
        bestta.adapt(model, profile, lean=lean)
