"""ResNet-50 backbone (He et al., 2016), version 1.5, with optional dilation.

Module names are those of torchvision, so its ImageNet checkpoints load as they are.
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


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand, added to a shortcut.

    Version 1.5: the stride sits on the 3x3 convolution, which sees every pixel,
    and not on the first 1x1, which would skip three out of four.
    """

    expansion: ClassVar[int] = 4

    def __init__(self, in_channels: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(
            width, width, 3, stride=stride, padding=dilation, dilation=dilation, bias=False
        )
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, 4 * width, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        summed: Tensor = self.relu(out + shortcut)
        return summed


class ResNet50(nn.Module):
    """ResNet-50 without its classifier, as the encoder of a segmentation network.

    Args:
        output_stride: Image size over size of the last map: 32 as for
            classification, 16 or 8 with dilation in the last one or two stages.
    """

    channels: ClassVar[Channels] = Channels(low=256, high=2048)

    def __init__(self, output_stride: int = 32) -> None:
        super().__init__()
        geometry2, geometry3, geometry4 = stage_geometries(output_stride)
        self.output_stride = output_stride
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, blocks=3, geometry=StageGeometry(1, 1, 1))
        self.layer2 = _stage(256, 128, blocks=4, geometry=geometry2)
        self.layer3 = _stage(512, 256, blocks=6, geometry=geometry3)
        self.layer4 = _stage(1024, 512, blocks=3, geometry=geometry4)
        initialise(self)

    def forward(self, images: Tensor) -> Features:
        """Compute the features of normalised images (B, 3, H, W).

        Returns:
            ``low`` (B, 256, H/4, W/4) and ``high`` (B, 2048, H/s, W/s) with the
            output stride s; sizes are rounded up.
        """
        check_images(images, type(self).__name__)
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        low = self.layer1(x)
        high = self.layer4(self.layer3(self.layer2(low)))
        return Features(low, high)

    @staticmethod
    def rename_public_key(key: str) -> str | None:
        """Name here of a tensor in a torchvision checkpoint; None for the classifier's."""
        return None if key.startswith("fc.") else key


def _stage(in_channels: int, width: int, blocks: int, geometry: StageGeometry) -> nn.Sequential:
    first = Bottleneck(in_channels, width, geometry.stride, geometry.first_dilation)
    in_channels = width * Bottleneck.expansion
    others = [Bottleneck(in_channels, width, 1, geometry.dilation) for _ in range(blocks - 1)]
    return nn.Sequential(first, *others)
