"""DeepLabV3+ (Chen et al., 2018): an encoder, atrous pyramid pooling and a light decoder."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.models.common import check_images, initialise
from bestta.models.depthwise import DepthwiseConv2d
from bestta.models.efficientnet_lite import EfficientNetLite0
from bestta.models.resnet import ResNet50
from bestta.models.small_resnet import SmallResNet

EncoderName = Literal["resnet50", "efficientnet_lite0", "small"]


class _Plan(NamedTuple):
    """An encoder and the head that goes with it."""

    encoder: type[ResNet50] | type[EfficientNetLite0] | type[SmallResNet]
    width: int = 256
    low_level_width: int = 48
    separable: bool = True
    reach: int = 96
    """Distance in pixels of the image that the first atrous branch looks to either side."""


_PLANS = {
    "resnet50": _Plan(ResNet50, separable=False),
    "efficientnet_lite0": _Plan(EfficientNetLite0),
    "small": _Plan(SmallResNet, width=96, low_level_width=24, reach=32),
}
_DROPOUT = 0.1
_SMALLEST_SIDE = 32


class ConvBNReLU(nn.Sequential):
    """Convolution that keeps the map's size, batch norm, ReLU.

    Args:
        in_channels, out_channels: Channel counts.
        kernel: Odd kernel size.
        dilation: Spacing of the kernel's taps.
        separable: Split the convolution into one filter per channel and a 1x1
            mixing them. Choice: one batch norm, after the mixing. The paper leaves
            open whether the filters have their own; without, a step on one image
            is cheaper and has fewer statistics to estimate.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        dilation: int = 1,
        separable: bool = False,
    ) -> None:
        layers: list[nn.Module] = []
        if separable:
            layers.append(_same_size_conv(in_channels, in_channels, kernel, dilation, in_channels))
            kernel, dilation = 1, 1
        layers.append(_same_size_conv(in_channels, out_channels, kernel, dilation))
        super().__init__(*layers, nn.BatchNorm2d(out_channels), nn.ReLU())


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: the same map seen at several scales at once.

    Args:
        in_channels: Channels of the encoder's last map.
        width: Channels of each branch and of the result.
        rates: Dilations of the three 3x3 branches.
        separable: Whether these branches are depthwise separable.
    """

    def __init__(
        self, in_channels: int, width: int, rates: tuple[int, int, int], separable: bool
    ) -> None:
        super().__init__()
        atrous = [ConvBNReLU(in_channels, width, 3, rate, separable) for rate in rates]
        self.branches = nn.ModuleList([ConvBNReLU(in_channels, width, 1), *atrous])
        # Choice: no batch norm on the pooled vector. It has one value per image and
        # channel, so the statistics of a single image, which test-time methods
        # estimate, would be undefined there (PyTorch refuses to compute them).
        self.pooling = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(in_channels, width, 1), nn.ReLU()
        )
        self.project = ConvBNReLU(width * (len(self.branches) + 1), width, 1)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, h, w) to (B, width, h, w)."""
        scales = [branch(x) for branch in self.branches]
        pooled = self.pooling(x).expand(-1, -1, *x.shape[2:])
        out: Tensor = self.dropout(self.project(torch.cat([*scales, pooled], dim=1)))
        return out


class Decoder(nn.Module):
    """Sharpen the pyramid's output with low-level features and classify each pixel."""

    def __init__(
        self, low_channels: int, width: int, low_width: int, classes: int, separable: bool
    ) -> None:
        super().__init__()
        self.low_level = ConvBNReLU(low_channels, low_width, 1)
        self.refine = nn.Sequential(
            ConvBNReLU(width + low_width, width, 3, separable=separable),
            ConvBNReLU(width, width, 3, separable=separable),
        )
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, low: Tensor, pyramid: Tensor) -> Tensor:
        """Logits (B, classes, H', W') of features (B, C, H', W') and (B, width, h, w)."""
        low = self.low_level(low)
        pyramid = _resize(pyramid, (low.shape[2], low.shape[3]))
        logits: Tensor = self.classifier(self.refine(torch.cat([pyramid, low], dim=1)))
        return logits


class DeepLabV3Plus(nn.Module):
    """DeepLabV3+ for semantic segmentation, with a large or a small encoder.

    >>> model = DeepLabV3Plus("efficientnet_lite0", classes=19).eval()
    >>> model(torch.zeros(1, 3, 64, 128)).shape
    torch.Size([1, 19, 64, 128])

    Args:
        encoder: ``"resnet50"``; ``"efficientnet_lite0"``, which also makes the
            convolutions of pyramid and decoder depthwise separable; or ``"small"``, a quarter
            of the size of that, for images of a few hundred pixels.
        classes: Number of classes; 19 is Cityscapes.
        output_stride: Image size over size of the encoder's last map: 8, 16 or 32, with
            ``"small"`` 4, 8 or 16. Smaller is finer, slower and needs more memory.
    """

    def __init__(
        self, encoder: EncoderName = "resnet50", classes: int = 19, output_stride: int = 16
    ) -> None:
        super().__init__()
        if encoder not in _PLANS:
            raise ValueError(f"no encoder named {encoder!r}. Encoders: {', '.join(_PLANS)}.")
        if classes < 1:
            raise ValueError(f"classes must be at least 1; got {classes}.")
        plan = _PLANS[encoder]
        self.encoder = encoder
        self.classes = classes
        self.output_stride = output_stride
        self.backbone = plan.encoder(output_stride)
        low, high = self.backbone.channels
        # The paper's rates 6, 12, 18 at output stride 16, spanning the same part of the
        # image at the other strides.
        unit = plan.reach // output_stride
        self.aspp = ASPP(high, plan.width, (unit, 2 * unit, 3 * unit), plan.separable)
        self.decoder = Decoder(low, plan.width, plan.low_level_width, classes, plan.separable)
        initialise(self.aspp)
        initialise(self.decoder)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes, H, W) of normalised images (B, 3, H, W).

        Raises:
            ValueError: If the images have another shape or are smaller than 32x32.
        """
        check_images(images, type(self).__name__, _SMALLEST_SIDE)
        features = self.backbone(images)
        logits = self.decoder(features.low, self.aspp(features.high))
        return _resize(logits, (images.shape[2], images.shape[3]))


def _same_size_conv(
    in_channels: int, out_channels: int, kernel: int, dilation: int, groups: int = 1
) -> nn.Conv2d:
    depthwise = groups == in_channels == out_channels
    return (DepthwiseConv2d if depthwise else nn.Conv2d)(
        in_channels,
        out_channels,
        kernel,
        padding=dilation * (kernel // 2),
        dilation=dilation,
        groups=groups,
        bias=False,
    )


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
