"""A small ResNet (He et al., 2016) encoder: basic blocks, few channels, for small images.

One block per stage, and the first stage at half the image size instead of a quarter: in an image
of 256x128 pixels a pole is one pixel wide, and a quarter of that is nothing.
"""

from typing import ClassVar

from torch import Tensor, nn

from bestta.models.common import (
    Channels,
    Features,
    StageGeometry,
    check_images,
    initialise,
    stage_geometries,
)

_WIDTHS = (32, 64, 128, 160)
_STEM_CHANNELS = 24
OUTPUT_STRIDES = (4, 8, 16)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions added to a shortcut, which is a 1x1 convolution where shapes change."""

    def __init__(self, in_channels: int, channels: int, geometry: StageGeometry) -> None:
        super().__init__()
        stride, first, second = geometry
        self.conv1 = nn.Conv2d(
            in_channels, channels, 3, stride, padding=first, dilation=first, bias=False
        )
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=second, dilation=second, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.downsample = nn.Sequential(
            nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, channels, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        summed: Tensor = self.relu(self.bn2(self.conv2(out)) + self.downsample(x))
        return summed


class SmallResNet(nn.Module):
    """Nine convolutions on the main path, 0.74 million parameters.

    Args:
        output_stride: Image size over size of the last map: 16, or 8 or 4 with dilation in the
            last one or two stages.
    """

    channels: ClassVar[Channels] = Channels(low=_WIDTHS[0], high=_WIDTHS[-1])

    def __init__(self, output_stride: int = 16) -> None:
        super().__init__()
        if output_stride not in OUTPUT_STRIDES:
            raise ValueError(
                f"output_stride {output_stride!r} is not available; use "
                f"{', '.join(map(str, OUTPUT_STRIDES[:-1]))} or {OUTPUT_STRIDES[-1]}."
            )
        self.output_stride = output_stride
        # Every stage sits one octave finer than in the large networks.
        geometries = (StageGeometry(1, 1, 1), *stage_geometries(2 * output_stride))
        inputs = (_STEM_CHANNELS, *_WIDTHS)
        self.conv1 = nn.Conv2d(3, _STEM_CHANNELS, 3, 2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_STEM_CHANNELS)
        self.relu = nn.ReLU()
        self.layer1 = BasicBlock(inputs[0], inputs[1], geometries[0])
        self.layer2 = BasicBlock(inputs[1], inputs[2], geometries[1])
        self.layer3 = BasicBlock(inputs[2], inputs[3], geometries[2])
        self.layer4 = BasicBlock(inputs[3], inputs[4], geometries[3])
        initialise(self)

    def forward(self, images: Tensor) -> Features:
        """Compute the features of normalised images (B, 3, H, W).

        Returns:
            ``low`` (B, 32, H/2, W/2) and ``high`` (B, 160, H/s, W/s) with the output stride s;
            sizes are rounded up.
        """
        check_images(images, type(self).__name__)
        low = self.layer1(self.relu(self.bn1(self.conv1(images))))
        high = self.layer4(self.layer3(self.layer2(low)))
        return Features(low, high)
