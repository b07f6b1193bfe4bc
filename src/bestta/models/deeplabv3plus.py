"""DeepLabV3+ (Chen et al., 2018): an encoder, atrous pyramid pooling and a light decoder."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.models.common import check_images, initialise, stage_geometries
from bestta.models.efficientnet_lite import EfficientNetLite0
from bestta.models.resnet import ResNet50

EncoderName = Literal["resnet50", "efficientnet_lite0"]

_ENCODERS: dict[str, type[ResNet50] | type[EfficientNetLite0]] = {
    "resnet50": ResNet50,
    "efficientnet_lite0": EfficientNetLite0,
}
_WIDTH = 256
_LOW_LEVEL_WIDTH = 48
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
        rates: Dilations of the three 3x3 branches.
        separable: Whether these branches are depthwise separable.
    """

    def __init__(self, in_channels: int, rates: tuple[int, int, int], separable: bool) -> None:
        super().__init__()
        atrous = [ConvBNReLU(in_channels, _WIDTH, 3, rate, separable) for rate in rates]
        self.branches = nn.ModuleList([ConvBNReLU(in_channels, _WIDTH, 1), *atrous])
        # Choice: no batch norm on the pooled vector. It has one value per image and
        # channel, so the statistics of a single image, which test-time methods
        # estimate, would be undefined there (PyTorch refuses to compute them).
        self.pooling = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(in_channels, _WIDTH, 1), nn.ReLU()
        )
        self.project = ConvBNReLU(_WIDTH * (len(self.branches) + 1), _WIDTH, 1)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, h, w) to (B, 256, h, w)."""
        scales = [branch(x) for branch in self.branches]
        pooled = self.pooling(x).expand(-1, -1, *x.shape[2:])
        out: Tensor = self.dropout(self.project(torch.cat([*scales, pooled], dim=1)))
        return out


class Decoder(nn.Module):
    """Sharpen the pyramid's output with low-level features and classify each pixel."""

    def __init__(self, low_channels: int, classes: int, separable: bool) -> None:
        super().__init__()
        self.low_level = ConvBNReLU(low_channels, _LOW_LEVEL_WIDTH, 1)
        self.refine = nn.Sequential(
            ConvBNReLU(_WIDTH + _LOW_LEVEL_WIDTH, _WIDTH, 3, separable=separable),
            ConvBNReLU(_WIDTH, _WIDTH, 3, separable=separable),
        )
        self.classifier = nn.Conv2d(_WIDTH, classes, 1)

    def forward(self, low: Tensor, pyramid: Tensor) -> Tensor:
        """Logits (B, classes, H/4, W/4) of features (B, C, H/4, W/4) and (B, 256, h, w)."""
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
        encoder: ``"resnet50"``, or ``"efficientnet_lite0"``, which also makes the
            convolutions of pyramid and decoder depthwise separable.
        classes: Number of classes; 19 is Cityscapes.
        output_stride: Image size over size of the encoder's last map: 8, 16 or 32.
            Smaller is finer, slower and needs more memory.
    """

    def __init__(
        self, encoder: EncoderName = "resnet50", classes: int = 19, output_stride: int = 16
    ) -> None:
        super().__init__()
        if encoder not in _ENCODERS:
            raise ValueError(f"no encoder named {encoder!r}. Encoders: {', '.join(_ENCODERS)}.")
        if classes < 1:
            raise ValueError(f"classes must be at least 1; got {classes}.")
        stage_geometries(output_stride)  # refuses a wrong output stride before building anything
        self.encoder = encoder
        self.classes = classes
        self.output_stride = output_stride
        separable = encoder == "efficientnet_lite0"
        self.backbone = _ENCODERS[encoder](output_stride)
        # The paper's rates 6, 12, 18 at output stride 16, spanning the same part of the
        # image at the other strides.
        unit = 96 // output_stride
        self.aspp = ASPP(self.backbone.channels.high, (unit, 2 * unit, 3 * unit), separable)
        self.decoder = Decoder(self.backbone.channels.low, classes, separable)
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
    return nn.Conv2d(
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
