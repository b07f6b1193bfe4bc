"""The networks, against hand-derived sizes, names and literal transcriptions."""

import doctest
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bestta.models import (
    DeepLabV3Plus,
    EfficientNetLite0,
    ResNet50,
    SmallResNet,
    WideResNet,
    deeplabv3plus,
)
from bestta.models.efficientnet_lite import SameConv2d, same_padding
from bestta.models.wide_resnet import PreActivationBlock

Shapes = dict[str, tuple[int, ...]]

# Names and shapes, written from the papers' tables and the public files' naming schemes,
# without building a network.


def batch_norm_shapes(name: str, channels: int) -> Shapes:
    vectors = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{vector}": (channels,) for vector in vectors} | {
        f"{name}.num_batches_tracked": ()
    }


def resnet50_shapes() -> Shapes:
    """torchvision's resnet50 without ``fc``: He et al. (2016), table 1, 50-layer column."""
    shapes: Shapes = {"conv1.weight": (64, 3, 7, 7)} | batch_norm_shapes("bn1", 64)
    inputs = 64
    for layer, width, blocks in ((1, 64, 3), (2, 128, 4), (3, 256, 6), (4, 512, 3)):
        for block in range(blocks):
            at = f"layer{layer}.{block}"
            shapes[f"{at}.conv1.weight"] = (width, inputs, 1, 1)
            shapes[f"{at}.conv2.weight"] = (width, width, 3, 3)
            shapes[f"{at}.conv3.weight"] = (4 * width, width, 1, 1)
            for norm, channels in (("bn1", width), ("bn2", width), ("bn3", 4 * width)):
                shapes |= batch_norm_shapes(f"{at}.{norm}", channels)
            if block == 0:
                shapes[f"{at}.downsample.0.weight"] = (4 * width, inputs, 1, 1)
                shapes |= batch_norm_shapes(f"{at}.downsample.1", 4 * width)
            inputs = 4 * width
    return shapes


# EfficientNet-Lite0, block by block: (inputs, outputs, expansion, kernel, stride).
LITE0_BLOCKS = (
    (32, 16, 1, 3, 1),
    (16, 24, 6, 3, 2),
    (24, 24, 6, 3, 1),
    (24, 40, 6, 5, 2),
    (40, 40, 6, 5, 1),
    (40, 80, 6, 3, 2),
    (80, 80, 6, 3, 1),
    (80, 80, 6, 3, 1),
    (80, 112, 6, 5, 1),
    (112, 112, 6, 5, 1),
    (112, 112, 6, 5, 1),
    (112, 192, 6, 5, 2),
    (192, 192, 6, 5, 1),
    (192, 192, 6, 5, 1),
    (192, 192, 6, 5, 1),
    (192, 320, 6, 3, 1),
)
LITE0_BLOCK_NAMES = (
    *("layer1.0", "layer1.1", "layer1.2"),
    *("layer2.0", "layer2.1"),
    *("layer3.0", "layer3.1", "layer3.2", "layer3.3", "layer3.4", "layer3.5"),
    *("layer4.0", "layer4.1", "layer4.2", "layer4.3", "layer4.4"),
)


def lite0_public_shapes() -> Shapes:
    """The public EfficientNet-Lite0 file, head included."""
    shapes: Shapes = {"_conv_stem.weight": (32, 3, 3, 3)} | batch_norm_shapes("_bn0", 32)
    for number, (inputs, outputs, expansion, kernel, _) in enumerate(LITE0_BLOCKS):
        at, width = f"_blocks.{number}", inputs * expansion
        if expansion > 1:
            shapes[f"{at}._expand_conv.weight"] = (width, inputs, 1, 1)
            shapes |= batch_norm_shapes(f"{at}._bn0", width)
        shapes[f"{at}._depthwise_conv.weight"] = (width, 1, kernel, kernel)
        shapes |= batch_norm_shapes(f"{at}._bn1", width)
        shapes[f"{at}._project_conv.weight"] = (outputs, width, 1, 1)
        shapes |= batch_norm_shapes(f"{at}._bn2", outputs)
    shapes["_conv_head.weight"] = (1280, 320, 1, 1)
    shapes |= batch_norm_shapes("_bn1", 1280)
    return shapes | {"_fc.weight": (1000, 1280), "_fc.bias": (1000,)}


def lite0_shapes() -> Shapes:
    """The encoder's own names for the same tensors, head left out."""
    parts = (("_bn0", "expand_bn"), ("_bn1", "depthwise_bn"), ("_bn2", "project_bn"))
    shapes: Shapes = {}
    for key, shape in lite0_public_shapes().items():
        if key.startswith("_blocks."):
            number, part, tensor = key.removeprefix("_blocks.").split(".")
            part = dict(parts).get(part, part.removeprefix("_"))
            shapes[f"{LITE0_BLOCK_NAMES[int(number)]}.{part}.{tensor}"] = shape
        elif key.startswith(("_conv_stem", "_bn0")):
            shapes[key.replace("_conv_stem", "conv1").replace("_bn0", "bn1")] = shape
    return shapes


def wide_resnet_shapes(blocks: int, width: int, classes: int) -> Shapes:
    """RobustBench's WideResNet: 6 * blocks + 4 layers."""
    shapes: Shapes = {"conv1.weight": (16, 3, 3, 3)}
    inputs = 16
    for group, outputs in ((1, 16 * width), (2, 32 * width), (3, 64 * width)):
        for block in range(blocks):
            at = f"block{group}.layer.{block}"
            shapes |= batch_norm_shapes(f"{at}.bn1", inputs)
            shapes[f"{at}.conv1.weight"] = (outputs, inputs, 3, 3)
            shapes |= batch_norm_shapes(f"{at}.bn2", outputs)
            shapes[f"{at}.conv2.weight"] = (outputs, outputs, 3, 3)
            if inputs != outputs:
                shapes[f"{at}.convShortcut.weight"] = (outputs, inputs, 1, 1)
            inputs = outputs
    shapes |= batch_norm_shapes("bn1", inputs)
    return shapes | {"fc.weight": (classes, inputs), "fc.bias": (classes,)}


def shapes_of(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def trainable_in(shapes: Shapes) -> int:
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(buffers))


def scramble_batch_norms(model: nn.Module, seed: int = 0) -> None:
    """Give every batch norm its own statistics and affine, so that none can be skipped."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.0, generator=generator)
                module.bias.uniform_(-0.5, 0.5, generator=generator)
                module.running_mean.uniform_(-0.5, 0.5, generator=generator)
                module.running_var.uniform_(0.5, 2.0, generator=generator)


def images(*size: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def on_meta(build, *arguments):
    """Build a network without storage: names and shapes only."""
    with torch.device("meta"):
        return build(*arguments)


def norm(state: dict[str, Tensor], name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    """Batch norm in evaluation, written out."""
    mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    column = (slice(None), None, None)
    return (x - mean[column]) / (var[column] + eps).sqrt() * weight[column] + bias[column]


@pytest.fixture(scope="module")
def resnet() -> ResNet50:
    torch.manual_seed(0)
    model = ResNet50(output_stride=32).eval()
    scramble_batch_norms(model)
    return model


@pytest.fixture(scope="module")
def lite() -> EfficientNetLite0:
    torch.manual_seed(0)
    model = EfficientNetLite0(output_stride=32).eval()
    scramble_batch_norms(model)
    return model


@pytest.fixture(scope="module", params=["resnet50", "efficientnet_lite0"])
def deeplab(request: pytest.FixtureRequest) -> DeepLabV3Plus:
    torch.manual_seed(0)
    model = DeepLabV3Plus(request.param, classes=5).eval()
    scramble_batch_norms(model)
    return model


# Names and sizes


@pytest.mark.parametrize("output_stride", [8, 16, 32])
def test_resnet50_has_torchvisions_names_and_shapes_at_every_output_stride(output_stride):
    assert shapes_of(on_meta(ResNet50, output_stride)) == resnet50_shapes()


def test_resnet50_has_the_published_parameter_count():
    # torchvision: 25,557,032 with the classifier's 2048 * 1000 + 1000.
    assert parameter_count(on_meta(ResNet50)) == 25_557_032 - 2_049_000


@pytest.mark.parametrize("output_stride", [8, 16, 32])
def test_lite0_has_the_tensors_of_the_public_file_at_every_output_stride(output_stride):
    assert shapes_of(on_meta(EfficientNetLite0, output_stride)) == lite0_shapes()


def test_lite0_has_the_published_parameter_count():
    # Published for the whole network: 4,652,008. Its head: 320 * 1280 + 2 * 1280 in the
    # convolution and its batch norm, 1280 * 1000 + 1000 in the classifier.
    encoder = 4_652_008 - (320 * 1280 + 2 * 1280) - 1_281_000
    assert parameter_count(on_meta(EfficientNetLite0)) == encoder
    assert trainable_in(lite0_shapes()) == encoder


@pytest.mark.parametrize(
    ("depth", "width", "classes"), [(28, 10, 10), (40, 2, 10), (16, 1, 3), (10, 4, 100)]
)
def test_wide_resnet_has_robustbenchs_names_and_shapes(depth, width, classes):
    expected = wide_resnet_shapes((depth - 4) // 6, width, classes)
    assert shapes_of(on_meta(WideResNet, depth, width, classes)) == expected


def test_wide_resnets_have_the_published_parameter_counts():
    assert parameter_count(on_meta(WideResNet, 28, 10)) == 36_479_194
    assert parameter_count(on_meta(WideResNet, 40, 2)) == 2_243_546


def test_pyramid_and_decoder_have_the_parameter_counts_of_a_hand_count():
    norm_256, norm_48 = 2 * 256, 2 * 48
    pooling_project = 5 * 256 * 256 + norm_256
    classifier = 256 * 19 + 19

    plain = on_meta(DeepLabV3Plus, "resnet50")
    assert parameter_count(plain.aspp) == (
        (2048 * 256 + norm_256)
        + 3 * (9 * 2048 * 256 + norm_256)
        + (2048 * 256 + 256)
        + pooling_project
    )
    assert parameter_count(plain.decoder) == (
        (256 * 48 + norm_48) + (9 * 304 * 256 + norm_256) + (9 * 256 * 256 + norm_256) + classifier
    )

    separable = on_meta(DeepLabV3Plus, "efficientnet_lite0")
    assert parameter_count(separable.aspp) == (
        (320 * 256 + norm_256)
        + 3 * (9 * 320 + 320 * 256 + norm_256)
        + (320 * 256 + 256)
        + pooling_project
    )
    assert parameter_count(separable.decoder) == (
        (24 * 48 + norm_48)
        + (9 * 304 + 304 * 256 + norm_256)
        + (9 * 256 + 256 * 256 + norm_256)
        + classifier
    )


@pytest.mark.parametrize("network", [ResNet50, EfficientNetLite0])
@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize("size", [(64, 96), (65, 97), (33, 50)])
def test_feature_maps_are_the_image_over_the_stride_rounded_up(network, output_stride, size):
    model = on_meta(network, output_stride).eval()
    features = model(torch.empty(2, 3, *size, device="meta"))
    low, high = model.channels
    assert features.low.shape == (2, low, *(math.ceil(side / 4) for side in size))
    assert features.high.shape == (2, high, *(math.ceil(side / output_stride) for side in size))


@pytest.mark.parametrize(
    ("encoder", "channels"),
    [("resnet50", (256, 512, 1024, 2048)), ("efficientnet_lite0", (24, 40, 112, 320))],
)
def test_both_encoders_offer_four_stages_under_the_same_names(encoder, channels):
    model = on_meta(DeepLabV3Plus, encoder).eval()
    seen = {}
    for stage in (1, 2, 3, 4):
        model.get_submodule(f"backbone.layer{stage}").register_forward_hook(
            lambda _module, _inputs, output, stage=stage: seen.update({stage: output.shape})
        )
    model(torch.empty(1, 3, 64, 64, device="meta"))
    sides = {1: 16, 2: 8, 3: 4, 4: 4}  # output stride 16
    assert seen == {
        stage: (1, channels[stage - 1], sides[stage], sides[stage]) for stage in (1, 2, 3, 4)
    }


@pytest.mark.parametrize("output_stride", [4, 8, 16])
@pytest.mark.parametrize("size", [(32, 64), (33, 50)])
def test_the_small_encoder_sees_every_stage_an_octave_finer(output_stride, size):
    model = on_meta(SmallResNet, output_stride).eval()
    features = model(torch.empty(2, 3, *size, device="meta"))
    assert features.low.shape == (2, 32, *(math.ceil(side / 2) for side in size))
    assert features.high.shape == (2, 160, *(math.ceil(side / output_stride) for side in size))


def test_the_small_deeplab_has_the_parameters_of_a_hand_count_and_is_under_a_quarter_of_lite0s():
    widths = (24, 32, 64, 128, 160)
    encoder = 27 * 24 + 2 * 24  # the stem; then per block two 3x3, a 1x1 and three batch norms
    for a, b in pairwise(widths):
        encoder += 9 * a * b + 9 * b * b + a * b + 3 * 2 * b
    width, low, high = 96, 24, 160
    norm = 2 * width
    pyramid = high * width + norm + 3 * (9 * high + high * width + norm)
    pyramid += high * width + width + 5 * width * width + norm
    decoder = 32 * low + 2 * low + 9 * (width + low) + (width + low) * width + norm
    decoder += 9 * width + width * width + norm + 19 * width + 19
    model = on_meta(DeepLabV3Plus, "small", 19, 8)
    assert parameter_count(model) == encoder + pyramid + decoder
    assert (
        parameter_count(model) < parameter_count(on_meta(DeepLabV3Plus, "efficientnet_lite0")) / 4
    )


@torch.no_grad()
@pytest.mark.parametrize("output_stride", [4, 8])
def test_the_dilated_small_encoder_computes_the_strided_features_on_a_denser_grid(output_stride):
    torch.manual_seed(0)
    strided = SmallResNet(16).eval()
    dilated = SmallResNet(output_stride).eval()
    dilated.load_state_dict(strided.state_dict())
    x = images(64, 96)
    step = 16 // output_stride
    expected = strided(x).high
    torch.testing.assert_close(
        dilated(x).high[:, :, ::step, ::step],
        expected,
        rtol=1e-3,
        atol=1e-4 * float(expected.std()),
    )


def test_a_basic_block_computes_what_a_literal_transcription_computes():
    torch.manual_seed(0)
    block = SmallResNet(8).layer2.eval()
    state, x = block.state_dict(), torch.randn(2, 32, 9, 12)
    y = norm(state, "bn1", F.conv2d(x, state["conv1.weight"], stride=2, padding=1)).relu()
    y = norm(state, "bn2", F.conv2d(y, state["conv2.weight"], padding=1))
    shortcut = F.conv2d(x, state["downsample.0.weight"], stride=2)
    shortcut = norm(state, "downsample.1", shortcut)
    torch.testing.assert_close(block(x), (y + shortcut).relu())


def test_the_small_pyramid_looks_a_third_as_far_as_the_large_ones():
    for output_stride, rates in ((4, (8, 16, 24)), (8, (4, 8, 12)), (16, (2, 4, 6))):
        model = on_meta(DeepLabV3Plus, "small", 19, output_stride)
        assert [branch[0].dilation[0] for branch in model.aspp.branches[1:]] == list(rates)


def test_the_small_encoder_refuses_other_output_strides():
    with pytest.raises(ValueError, match=r"output_stride 32 .*4, 8 or 16"):
        DeepLabV3Plus("small", output_stride=32)


# Values


def literal_resnet50(state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """ResNet-50 v1.5 at output stride 32, straight from its description."""
    x = F.conv2d(x, state["conv1.weight"], stride=2, padding=3)
    x = F.max_pool2d(norm(state, "bn1", x).relu(), 3, stride=2, padding=1)
    outputs = []
    for layer, blocks in ((1, 3), (2, 4), (3, 6), (4, 3)):
        for block in range(blocks):
            at = f"layer{layer}.{block}"
            stride = 2 if block == 0 and layer > 1 else 1
            y = norm(state, f"{at}.bn1", F.conv2d(x, state[f"{at}.conv1.weight"])).relu()
            y = F.conv2d(y, state[f"{at}.conv2.weight"], stride=stride, padding=1)
            y = norm(state, f"{at}.bn2", y).relu()
            y = norm(state, f"{at}.bn3", F.conv2d(y, state[f"{at}.conv3.weight"]))
            if block == 0:
                x = F.conv2d(x, state[f"{at}.downsample.0.weight"], stride=stride)
                x = norm(state, f"{at}.downsample.1", x)
            x = (x + y).relu()
        outputs.append(x)
    return outputs[0], outputs[-1]


def tensorflow_padding(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """The rule as TensorFlow's documentation states it, by cases of the remainder."""
    effective = (kernel - 1) * dilation + 1
    total = max(effective - (size % stride or stride), 0)
    return total // 2, total - total // 2


def literal_same_conv(x: Tensor, weight: Tensor, stride=1, dilation=1, groups=1) -> Tensor:
    """Zeros written around the image, then a convolution without padding."""
    top, bottom = tensorflow_padding(x.shape[2], weight.shape[2], stride, dilation)
    left, right = tensorflow_padding(x.shape[3], weight.shape[3], stride, dilation)
    padded = x.new_zeros(*x.shape[:2], top + x.shape[2] + bottom, left + x.shape[3] + right)
    padded[:, :, top : top + x.shape[2], left : left + x.shape[3]] = x
    return F.conv2d(padded, weight, stride=stride, dilation=dilation, groups=groups)


def literal_lite0(state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """EfficientNet-Lite0 at output stride 32, from the table above."""

    def relu6(x: Tensor) -> Tensor:
        return x.clamp(0, 6)

    x = relu6(norm(state, "bn1", literal_same_conv(x, state["conv1.weight"], 2), eps=1e-3))
    outputs = []
    for at, block in zip(LITE0_BLOCK_NAMES, LITE0_BLOCKS, strict=True):
        inputs, channels, expansion, _, stride = block
        y = x
        if expansion > 1:
            y = F.conv2d(y, state[f"{at}.expand_conv.weight"])
            y = relu6(norm(state, f"{at}.expand_bn", y, eps=1e-3))
        weight = state[f"{at}.depthwise_conv.weight"]
        y = literal_same_conv(y, weight, stride, groups=inputs * expansion)
        y = relu6(norm(state, f"{at}.depthwise_bn", y, eps=1e-3))
        y = F.conv2d(y, state[f"{at}.project_conv.weight"])
        y = norm(state, f"{at}.project_bn", y, eps=1e-3)
        x = x + y if stride == 1 and inputs == channels else y
        outputs.append(x)
    return outputs[2], outputs[15]


@torch.no_grad()
@pytest.mark.parametrize("size", [(64, 64), (45, 70)])
def test_resnet50_computes_what_a_literal_transcription_computes(resnet, size):
    x = images(*size)
    low, high = literal_resnet50(resnet.state_dict(), x)
    features = resnet(x)
    torch.testing.assert_close(features.low, low, rtol=1e-3, atol=1e-4 * float(low.std()))
    torch.testing.assert_close(features.high, high, rtol=1e-3, atol=1e-4 * float(high.std()))


@torch.no_grad()
@pytest.mark.parametrize("size", [(64, 64), (45, 70)])
def test_lite0_computes_what_a_literal_transcription_computes(lite, size):
    x = images(*size)
    low, high = literal_lite0(lite.state_dict(), x)
    features = lite(x)
    torch.testing.assert_close(features.low, low, rtol=1e-3, atol=1e-4 * float(low.std()))
    torch.testing.assert_close(features.high, high, rtol=1e-3, atol=1e-4 * float(high.std()))


@torch.no_grad()
@pytest.mark.parametrize("output_stride", [8, 16])
def test_dilated_resnet_computes_the_strided_features_on_a_denser_grid(resnet, output_stride):
    # A 3x3 with stride 2 and padding 1 is centred on the even pixels, so the strided map is
    # every second (fourth) element of the dense one, from the first on, borders included.
    dilated = ResNet50(output_stride).eval()
    dilated.load_state_dict(resnet.state_dict())
    x = images(64, 96)
    step = 32 // output_stride
    dense, strided = dilated(x).high, resnet(x).high
    torch.testing.assert_close(
        dense[:, :, ::step, ::step], strided, rtol=1e-3, atol=1e-4 * float(strided.std())
    )


@torch.no_grad()
@pytest.mark.parametrize("output_stride", [8, 16])
def test_dilated_lite0_computes_the_strided_features_on_a_denser_grid(lite, output_stride):
    # "SAME" on an even size pads one more zero after than before, which centres a strided
    # kernel on the odd pixels: the strided map is the last of every two (four) elements.
    dilated = EfficientNetLite0(output_stride).eval()
    dilated.load_state_dict(lite.state_dict())
    x = images(64, 96)
    step = 32 // output_stride
    dense, strided = dilated(x).high, lite(x).high
    torch.testing.assert_close(
        dense[:, :, step - 1 :: step, step - 1 :: step],
        strided,
        rtol=1e-3,
        atol=1e-4 * float(strided.std()),
    )


@settings(deadline=None)
@given(
    size=st.integers(1, 300),
    kernel=st.sampled_from([1, 3, 5]),
    stride=st.sampled_from([1, 2]),
    dilation=st.integers(1, 4),
)
def test_same_padding_is_tensorflows(size, kernel, stride, dilation):
    expected = tensorflow_padding(size, kernel, stride, dilation)
    assert same_padding(size, kernel, stride, dilation) == expected


@torch.no_grad()
@pytest.mark.parametrize("size", [(8, 8), (7, 8), (9, 6), (5, 5), (1, 2)])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2), (1, 4)])
def test_same_convolution_is_one_of_the_image_with_zeros_around(size, kernel, stride, dilation):
    torch.manual_seed(0)
    conv = SameConv2d(3, 4, kernel, stride, dilation)
    x = images(*size)
    expected = literal_same_conv(x, conv.weight, stride, dilation)
    assert expected.shape[2:] == tuple(math.ceil(side / stride) for side in size)
    torch.testing.assert_close(conv(x), expected)


def test_same_convolution_of_four_pixels_by_hand():
    # [1 2 3 4] is padded on the right only: windows [1 2 3] and [3 4 0] with weights 1 10 100.
    conv = SameConv2d(1, 1, 3, stride=2)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[0, 0, 0] = torch.tensor([1.0, 10.0, 100.0])
        out = conv(torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 1, 4, 4))
    np.testing.assert_array_equal(out[0, 0, 0].numpy(), [321, 43])


def test_lite0_copies_a_map_only_to_pad_its_five_strided_convolutions(lite, monkeypatch):
    padded = []
    pad = F.pad
    monkeypatch.setattr(F, "pad", lambda x, zeros: padded.append(x.shape[2]) or pad(x, zeros))
    with torch.no_grad():
        lite(images(64, 64))
    assert padded == [64, 32, 16, 8, 4]


@torch.no_grad()
@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(4, 4, 1), (4, 6, 1), (4, 6, 2)])
def test_wide_resnet_block_computes_what_a_literal_transcription_computes(inputs, outputs, stride):
    torch.manual_seed(0)
    block = PreActivationBlock(inputs, outputs, stride, dropout=0.3).eval()
    scramble_batch_norms(block)
    state = block.state_dict()
    x = torch.randn(2, inputs, 9, 8)

    activated = norm(state, "bn1", x).relu()
    y = F.conv2d(activated, state["conv1.weight"], stride=stride, padding=1)
    y = F.conv2d(norm(state, "bn2", y).relu(), state["conv2.weight"], padding=1)
    if inputs == outputs:
        expected = x + y
    else:  # the shortcut, too, starts from the activated input
        expected = F.conv2d(activated, state["convShortcut.weight"], stride=stride) + y
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_wide_resnet_averages_its_last_activations_over_the_image():
    torch.manual_seed(0)
    model = WideResNet(depth=10, width=1, classes=3).eval()
    scramble_batch_norms(model)
    state = model.state_dict()
    for size in ((32, 32), (33, 47), (8, 12)):
        last = model.block3(model.block2(model.block1(model.conv1(images(*size)))))
        assert last.shape == (1, 64, *(math.ceil(side / 4) for side in size))
        pooled = norm(state, "bn1", last).relu().flatten(2).sum(dim=2) / last[0, 0].numel()
        expected = pooled @ state["fc.weight"].T + state["fc.bias"]
        torch.testing.assert_close(model(images(*size)), expected)


@torch.no_grad()
def test_lite0_pyramid_and_decoder_compute_what_a_literal_transcription_computes():
    torch.manual_seed(0)
    model = DeepLabV3Plus("efficientnet_lite0", classes=4, output_stride=16).eval()
    scramble_batch_norms(model)
    state = model.state_dict()
    x = images(61, 80)
    low, high = model.backbone(x)

    def separable(x: Tensor, at: str, rate: int = 1) -> Tensor:
        filters = state[f"{at}.0.weight"]
        x = F.conv2d(x, filters, padding=rate, dilation=rate, groups=len(filters))
        return norm(state, f"{at}.2", F.conv2d(x, state[f"{at}.1.weight"])).relu()

    def pointwise(x: Tensor, at: str) -> Tensor:
        return norm(state, f"{at}.1", F.conv2d(x, state[f"{at}.0.weight"])).relu()

    pooled = high.mean(dim=(2, 3), keepdim=True)
    pooled = F.conv2d(pooled, state["aspp.pooling.1.weight"], state["aspp.pooling.1.bias"]).relu()
    scales = [pointwise(high, "aspp.branches.0")]
    scales += [
        separable(high, f"aspp.branches.{branch}", rate)
        for branch, rate in ((1, 6), (2, 12), (3, 18))
    ]
    scales.append(pooled.repeat(1, 1, *high.shape[2:]))
    pyramid = pointwise(torch.cat(scales, dim=1), "aspp.project")
    pyramid = F.interpolate(pyramid, size=(16, 20), mode="bilinear", align_corners=False)
    detail = pointwise(low, "decoder.low_level")
    fused = separable(torch.cat([pyramid, detail], dim=1), "decoder.refine.0")
    fused = separable(fused, "decoder.refine.1")
    logits = F.conv2d(fused, state["decoder.classifier.weight"], state["decoder.classifier.bias"])
    expected = F.interpolate(logits, size=(61, 80), mode="bilinear", align_corners=False)
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("encoder", ["resnet50", "efficientnet_lite0"])
@pytest.mark.parametrize(
    ("output_stride", "rates"), [(8, (12, 24, 36)), (16, (6, 12, 18)), (32, (3, 6, 9))]
)
def test_pyramid_rates_follow_the_output_stride(encoder, output_stride, rates):
    model = on_meta(DeepLabV3Plus, encoder, 19, output_stride)
    spatial = [branch[0] for branch in model.aspp.branches[1:]]
    assert [conv.dilation[0] for conv in spatial] == list(rates)
    assert [conv.padding[0] for conv in spatial] == list(rates)


# Behaviour


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 32), (33, 47), (64, 40)])
def test_deeplab_gives_logits_of_the_images_size(deeplab, size):
    logits = deeplab(images(*size))
    assert logits.shape == (1, 5, *size)
    assert logits.isfinite().all()


@torch.no_grad()
def test_an_image_gets_the_same_logits_alone_and_in_a_batch(deeplab):
    batch = images(40, 48, batch=2)
    together = deeplab(batch)
    alone = torch.cat([deeplab(image[None]) for image in batch])
    torch.testing.assert_close(alone, together, rtol=1e-3, atol=1e-3 * float(together.std()))


@torch.no_grad()
def test_evaluation_is_deterministic_and_training_drops_out(deeplab):
    x = images(48, 48)
    assert torch.equal(deeplab(x), deeplab(x))
    deeplab.aspp.dropout.train()
    try:
        assert not torch.equal(deeplab(x), deeplab(x))
    finally:
        deeplab.eval()


def test_every_parameter_learns_from_a_single_image():
    # Batch norms in training mode see one image here; the pooled vector of the pyramid has a
    # single value per channel and would make PyTorch raise if it were normalised.
    torch.manual_seed(0)
    model = DeepLabV3Plus("efficientnet_lite0", classes=3).train()
    model(images(64, 64)).square().mean().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


def test_hooked_batch_norm_outputs_are_not_overwritten_by_the_next_activation(lite):
    outputs = []
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        for module in lite.modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    with torch.no_grad():
        lite(images(64, 64))
    for handle in handles:
        handle.remove()
    assert len(outputs) == 1 + 15 * 3 + 2
    assert all(float(output.min()) < 0 for output in outputs)


def test_convolutions_start_with_kaimings_fan_out_deviation():
    torch.manual_seed(0)
    model = DeepLabV3Plus("efficientnet_lite0")
    dense = model.decoder.classifier.weight  # 19 outputs, 1x1
    filters = model.backbone.layer4[0].depthwise_conv.weight  # each input reaches 1 output, 5x5
    assert float(dense.detach().std()) == pytest.approx(math.sqrt(2 / 19), rel=0.05)
    assert float(filters.detach().std()) == pytest.approx(math.sqrt(2 / 25), rel=0.05)


def test_example_in_the_docstring_runs():
    results = doctest.testmod(deeplabv3plus)
    assert results.attempted == 2
    assert results.failed == 0


# Refusals


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 1, 64, 64), (64, 64), (0, 3, 64, 64)])
def test_deeplab_refuses_other_shapes_and_says_which_it_saw(deeplab, shape):
    with pytest.raises(ValueError, match=r"takes images of shape \(B, 3, H, W\)") as caught:
        deeplab(torch.zeros(shape))
    assert f"got shape {shape}" in str(caught.value)


@pytest.mark.parametrize("size", [(31, 64), (64, 31), (1, 1)])
def test_deeplab_refuses_images_under_32_pixels(deeplab, size):
    with pytest.raises(ValueError, match=r"at least 32x32 pixels; got shape \(1, 3, "):
        deeplab(torch.zeros(1, 3, *size))


def test_networks_refuse_integer_images_and_say_how_to_convert_them(deeplab):
    with pytest.raises(ValueError, match=r"got torch\.uint8.*image\.float\(\) / 255"):
        deeplab(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"WideResNet .*got torch\.int64"):
        on_meta(WideResNet, 10, 1)(torch.zeros(1, 3, 32, 32, dtype=torch.int64))


def test_a_missing_batch_dimension_is_named():
    with pytest.raises(ValueError, match=r"image\[None\]"):
        on_meta(WideResNet, 10, 1)(torch.zeros(3, 32, 32))


@pytest.mark.parametrize("depth", [4, 27, 29, 12, -2, 0])
def test_wide_resnet_refuses_other_depths_and_names_valid_ones(depth):
    with pytest.raises(ValueError, match=rf"depth {depth} .*10, 16, 22, 28, 34, 40"):
        WideResNet(depth=depth)


def test_wide_resnet_refuses_a_width_of_zero():
    with pytest.raises(ValueError, match="width=0"):
        WideResNet(width=0)


@pytest.mark.parametrize("build", [ResNet50, EfficientNetLite0, DeepLabV3Plus])
@pytest.mark.parametrize("output_stride", [4, 64, 0])
def test_other_output_strides_are_refused(build, output_stride):
    with pytest.raises(ValueError, match=f"output_stride {output_stride} .*8, 16 or 32"):
        build(output_stride=output_stride)


def test_deeplab_refuses_an_unknown_encoder_and_lists_the_known():
    with pytest.raises(ValueError, match=r"'vgg16'.*resnet50, efficientnet_lite0"):
        DeepLabV3Plus("vgg16")
    with pytest.raises(ValueError, match="classes must be at least 1; got 0"):
        DeepLabV3Plus(classes=0)
