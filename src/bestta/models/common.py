"""What the networks share: feature pairs, dilation, input checks, initial weights."""

import math
from typing import NamedTuple

from torch import Tensor, nn

OUTPUT_STRIDES = (8, 16, 32)


class Features(NamedTuple):
    """The two feature maps that a segmentation head reads."""

    low: Tensor
    """Output of ``layer1``: fine detail at a quarter of the image size (half in `SmallResNet`)."""
    high: Tensor
    """Output of ``layer4``: meaning, at one ``output_stride``-th of the image size."""


class Channels(NamedTuple):
    """Channel counts of the two maps of `Features`."""

    low: int
    high: int


class StageGeometry(NamedTuple):
    """Stride and dilation of one stage.

    The first block of a stage carries the stride. Where the stride is traded
    for dilation, that block still sees its input at the old spacing, so it keeps
    the dilation of the stage before; the blocks after it take the new one.
    """

    stride: int
    first_dilation: int
    dilation: int


def stage_geometries(output_stride: int) -> tuple[StageGeometry, StageGeometry, StageGeometry]:
    """Geometry of ``layer2``, ``layer3`` and ``layer4`` for an output stride of 8, 16 or 32.

    Each stage halves the map until the output stride is reached, and doubles the
    dilation from there on. Dilated and strided networks share all their weights:
    the dilated one computes the same features on a denser grid.

    Raises:
        ValueError: If the output stride is none of the three.
    """
    if output_stride not in OUTPUT_STRIDES:
        raise ValueError(f"output_stride {output_stride!r} is not available; use 8, 16 or 32.")
    dilation = 1
    geometries = []
    for stride_so_far in (8, 16, 32):
        if stride_so_far <= output_stride:
            geometries.append(StageGeometry(2, dilation, dilation))
        else:
            geometries.append(StageGeometry(1, dilation, 2 * dilation))
            dilation *= 2
    layer2, layer3, layer4 = geometries
    return layer2, layer3, layer4


def check_images(images: Tensor, network: str, smallest_side: int = 1) -> None:
    """Refuse anything but a floating-point batch of colour images, (B, 3, H, W).

    Args:
        images: What the caller passed.
        network: Name of the network, for the message.
        smallest_side: Least height and width in pixels.

    Raises:
        ValueError: With the shape or type that was seen and the one that works.
    """
    wanted = f"{network} takes images of shape (B, 3, H, W)"
    if smallest_side > 1:
        wanted += f" of at least {smallest_side}x{smallest_side} pixels"
    if images.ndim != 4 or images.shape[1] != 3:
        hint = " Add the batch dimension with image[None]." if images.ndim == 3 else ""
        raise ValueError(f"{wanted}; got shape {tuple(images.shape)}.{hint}")
    if images.shape[0] < 1 or min(images.shape[2:]) < smallest_side:
        raise ValueError(f"{wanted}; got shape {tuple(images.shape)}.")
    if not images.is_floating_point():
        raise ValueError(
            f"{wanted} with floating-point values; got {images.dtype}. "
            "Convert 8-bit images with image.float() / 255."
        )


def initialise(network: nn.Module) -> None:
    """Draw convolutions from Kaiming's fan-out normal; set batch norms to the identity.

    The fan-out counts the outputs that one input really reaches, so grouped
    (depthwise) convolutions start at the same signal level as dense ones.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            kernel_area = module.kernel_size[0] * module.kernel_size[1]
            fan_out = kernel_area * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
