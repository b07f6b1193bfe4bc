"""EfficientNet-Lite0 encoder: EfficientNet (Tan and Le, 2019) for phones.

"Lite" drops squeeze-and-excitation and replaces swish by ReLU6. The public
ImageNet weights come from TensorFlow, so convolutions pad the way it does.
"""

import re
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from bestta.models.common import Channels, Features, check_images, initialise, stage_geometries
from bestta.models.depthwise import depthwise_conv2d

BATCH_NORM_EPS = 1e-3


class _Row(NamedTuple):
    """One row of the architecture table: equal blocks, the first of which may stride."""

    layer: str
    expansion: int
    kernel: int
    channels: int
    blocks: int
    stride: int


_TABLE = (
    _Row("layer1", expansion=1, kernel=3, channels=16, blocks=1, stride=1),
    _Row("layer1", expansion=6, kernel=3, channels=24, blocks=2, stride=2),
    _Row("layer2", expansion=6, kernel=5, channels=40, blocks=2, stride=2),
    _Row("layer3", expansion=6, kernel=3, channels=80, blocks=3, stride=2),
    _Row("layer3", expansion=6, kernel=5, channels=112, blocks=3, stride=1),
    _Row("layer4", expansion=6, kernel=5, channels=192, blocks=4, stride=2),
    _Row("layer4", expansion=6, kernel=3, channels=320, blocks=1, stride=1),
)
_STEM_CHANNELS = 32


def same_padding(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Zeros before and after one axis for TensorFlow's "SAME" padding.

    The output has ``ceil(size / stride)`` elements; of an odd number of zeros,
    the extra one goes after. At stride 2 an even image is thus padded on one
    side only, where PyTorch would pad both.
    """
    outputs = -(-size // stride)
    reach = (outputs - 1) * stride + (kernel - 1) * dilation + 1
    total = max(reach - size, 0)
    return total // 2, total - total // 2


class SameConv2d(nn.Conv2d):
    """Bias-free convolution with `same_padding`, computed from the size of each input."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            dilation=dilation,
            groups=groups,
            bias=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, ceil(H/stride), ceil(W/stride))."""
        kernel, stride, dilation = self.kernel_size[0], self.stride[0], self.dilation[0]
        top, bottom = same_padding(x.shape[2], kernel, stride, dilation)
        left, right = same_padding(x.shape[3], kernel, stride, dilation)
        if (top, left) != (bottom, right):  # never at stride 1, so most maps need no copy
            x = F.pad(x, (left, right, top, bottom))
            top = left = 0
        if self.groups == self.in_channels == self.out_channels and top == left:
            return depthwise_conv2d(x, self.weight, stride, top, dilation)
        return F.conv2d(x, self.weight, None, self.stride, (top, left), self.dilation, self.groups)


class InvertedResidual(nn.Module):
    """MBConv block: widen by 1x1, filter each channel, narrow by 1x1.

    The input is added when the block keeps its shape. An expansion of 1 has
    nothing to widen and skips that step.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        expansion: int,
        kernel: int,
        stride: int,
        dilation: int,
    ) -> None:
        super().__init__()
        width = in_channels * expansion
        self.expand_conv: SameConv2d | None = None
        self.expand_bn: nn.BatchNorm2d | None = None
        if expansion != 1:
            self.expand_conv = SameConv2d(in_channels, width, 1)
            self.expand_bn = nn.BatchNorm2d(width, eps=BATCH_NORM_EPS)
        self.depthwise_conv = SameConv2d(width, width, kernel, stride, dilation, groups=width)
        self.depthwise_bn = nn.BatchNorm2d(width, eps=BATCH_NORM_EPS)
        self.project_conv = SameConv2d(width, out_channels, 1)
        self.project_bn = nn.BatchNorm2d(out_channels, eps=BATCH_NORM_EPS)
        self.relu = nn.ReLU6()
        self.keeps_shape = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, ceil(H/stride), ceil(W/stride))."""
        out: Tensor = x
        if self.expand_conv is not None and self.expand_bn is not None:
            out = self.relu(self.expand_bn(self.expand_conv(out)))
        out = self.relu(self.depthwise_bn(self.depthwise_conv(out)))
        out = self.project_bn(self.project_conv(out))
        return x + out if self.keeps_shape else out


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 without its head, as the encoder of a segmentation network.

    The 16 blocks are grouped by resolution: ``layer1`` holds blocks 0-2,
    ``layer2`` 3-4, ``layer3`` 5-10 and ``layer4`` 11-15.

    Args:
        output_stride: Image size over size of the last map: 32 as for
            classification, 16 or 8 with dilation in the last one or two layers.
    """

    channels: ClassVar[Channels] = Channels(low=24, high=320)

    def __init__(self, output_stride: int = 32) -> None:
        super().__init__()
        self.output_stride = output_stride
        self.conv1 = SameConv2d(3, _STEM_CHANNELS, 3, stride=2)
        self.bn1 = nn.BatchNorm2d(_STEM_CHANNELS, eps=BATCH_NORM_EPS)
        self.relu = nn.ReLU6()
        layers = _build_layers(output_stride)
        self.layer1 = nn.Sequential(*layers["layer1"])
        self.layer2 = nn.Sequential(*layers["layer2"])
        self.layer3 = nn.Sequential(*layers["layer3"])
        self.layer4 = nn.Sequential(*layers["layer4"])
        initialise(self)

    def forward(self, images: Tensor) -> Features:
        """Compute the features of normalised images (B, 3, H, W).

        Returns:
            ``low`` (B, 24, H/4, W/4) and ``high`` (B, 320, H/s, W/s) with the
            output stride s; sizes are rounded up.
        """
        check_images(images, type(self).__name__)
        low = self.layer1(self.relu(self.bn1(self.conv1(images))))
        high = self.layer4(self.layer3(self.layer2(low)))
        return Features(low, high)

    @staticmethod
    def rename_public_key(key: str) -> str | None:
        """Name here of a tensor in the public checkpoint.

        That file numbers its blocks 0-15 and calls their parts, in order,
        ``_expand_conv, _bn0, _depthwise_conv, _bn1, _project_conv, _bn2``.

        Returns:
            The name; None for a tensor of the classification head; the key itself
            if it follows another scheme.
        """
        if key.startswith(("_conv_head.", "_bn1.", "_fc.")):
            return None
        if key.startswith("_conv_stem."):
            return "conv1." + key.removeprefix("_conv_stem.")
        if key.startswith("_bn0."):
            return "bn1." + key.removeprefix("_bn0.")
        block_key = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key)
        if block_key is None:
            return key
        block, part, tensor = int(block_key[1]), block_key[2], block_key[3]
        if block not in _BLOCK_NAMES or part not in _PUBLIC_PARTS:
            return key
        return f"{_BLOCK_NAMES[block]}.{_PUBLIC_PARTS[part]}.{tensor}"


_PUBLIC_PARTS = {
    "_expand_conv": "expand_conv",
    "_bn0": "expand_bn",
    "_depthwise_conv": "depthwise_conv",
    "_bn1": "depthwise_bn",
    "_project_conv": "project_conv",
    "_bn2": "project_bn",
}


def _build_layers(output_stride: int) -> dict[str, list[nn.Module]]:
    """Blocks of each layer, with strides traded for dilation as `stage_geometries` says."""
    names = ("layer2", "layer3", "layer4")
    geometries = dict(zip(names, stage_geometries(output_stride), strict=True))
    layers: dict[str, list[nn.Module]] = {"layer1": [], "layer2": [], "layer3": [], "layer4": []}
    in_channels = _STEM_CHANNELS
    for row in _TABLE:
        for position in range(row.blocks):
            stride, dilation = row.stride if position == 0 else 1, 1
            if row.layer in geometries:
                geometry = geometries[row.layer]
                opens_layer = not layers[row.layer]
                stride = geometry.stride if opens_layer else 1
                dilation = geometry.first_dilation if opens_layer else geometry.dilation
            block = InvertedResidual(
                in_channels, row.channels, row.expansion, row.kernel, stride, dilation
            )
            layers[row.layer].append(block)
            in_channels = row.channels
    return layers


def _name_blocks() -> dict[int, str]:
    """Module name of each of the 16 blocks, by its number in the public checkpoint."""
    names: list[str] = []
    for layer in ("layer1", "layer2", "layer3", "layer4"):
        blocks = sum(row.blocks for row in _TABLE if row.layer == layer)
        names += [f"{layer}.{position}" for position in range(blocks)]
    return dict(enumerate(names))


_BLOCK_NAMES = _name_blocks()
