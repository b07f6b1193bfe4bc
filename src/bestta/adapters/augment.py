"""Random views of a batch, as CoTTA's teacher sees it (Wang, Fink, Van Gool and Dai, 2022).

Made for small images. One draw of parameters serves the whole batch, as published; only the noise
is drawn per pixel. In this order: pixels are clipped to [0, 1]; brightness, contrast, saturation,
hue and gamma change in a random order; the image is turned, moved and scaled, its edge going on
beyond its border; it is blurred, flipped with probability ½, given noise, and clipped again.

The published form pads by half a side, edge replicated, transforms and blurs the whole, and cuts
the centre out. Here only the centre is ever sampled, from an image whose edge goes on without end:
the same for a square (the zero fill never reaches its centre), at a quarter of the work, and
without black corners in a long image. Shifts are up to 1/16 of the padded image, so 1/8 of the
image itself, in whole pixels, as published.

Choice: published images lie in [0, 1]. Ours come as the model wants them. With ``normalise`` they
are taken back to [0, 1] and forth; without, the range of the batch stands for [0, 1].
Choice: hue and saturation are left alone where there are not three channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Normalisation = tuple[Sequence[float], Sequence[float]]
"""Mean and deviation per channel: the model is given ``(pixel − mean) / deviation``."""

BRIGHTNESS = (0.6, 1.4)
CONTRAST = (0.7, 1.3)
SATURATION = (0.5, 1.5)
HUE = (-0.06, 0.06)
GAMMA = (0.7, 1.3)
DEGREES = (-15.0, 15.0)
SHIFT = 1 / 16
"""Of the side of the padded image."""
SCALE = (0.9, 1.1)
BLUR = (0.001, 0.5)
"""Deviation of the blur, in pixels."""
TAPS = 5
FLIP_PROBABILITY = 0.5
NOISE = 0.005
GREY = (0.299, 0.587, 0.114)
"""What red, green and blue add to brightness (ITU-R BT.601)."""


def augment(
    image: Tensor, generator: torch.Generator, normalise: Normalisation | None = None
) -> Tensor:
    """One random view of a batch (B, C, H, W), of the same shape, type and normalisation.

    Args:
        image: Left as it is.
        generator: Where every random number comes from; on the CPU.
        normalise: What turned pixels in [0, 1] into ``image``. None lets the smallest value of the
            batch stand for 0 and the largest for 1 (for a constant batch, the value one above).
    """
    wide = image.detach().to(torch.promote_types(image.dtype, torch.float32))
    black, span = black_and_span(wide, normalise)
    pixels = ((wide - black) / span).clamp(0, 1)
    pixels = colour_jitter(pixels, generator)
    pixels = random_affine(pixels, generator, margin=TAPS // 2)
    pixels = blur(pixels, _uniform(generator, *BLUR))
    if _uniform(generator, 0, 1) < FLIP_PROBABILITY:
        pixels = pixels.flip(-1)
    noise = torch.randn(pixels.shape, generator=generator)
    pixels = (pixels + NOISE * noise.to(pixels)).clamp(0, 1)
    return (pixels * span + black).to(image.dtype)


def check_normalise(normalise: Any) -> None:
    """Raise a ValueError unless it is None, or means and deviations that can be divided by."""
    if normalise is None:
        return
    try:
        mean, deviation = (torch.tensor(list(values), dtype=torch.float64) for values in normalise)
    except (TypeError, ValueError):
        mean, deviation = torch.empty(0), torch.empty(0)
    fits = mean.numel() > 0 and mean.shape == deviation.shape and bool(mean.isfinite().all())
    if not fits or not bool(((deviation > 0) & deviation.isfinite()).all()):
        raise ValueError(
            "normalise is None, or the means and the deviations of the channels, as in "
            f"((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)); not {normalise!r}."
        )


# --- colours: pixels (B, C, H, W) in [0, 1], and so is what comes back --------------------------


def colour_jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation, hue and gamma by random amounts, in a random order."""
    changes = [
        (brightness, _uniform(generator, *BRIGHTNESS)),
        (contrast, _uniform(generator, *CONTRAST)),
        (saturation, _uniform(generator, *SATURATION)),
        (hue, _uniform(generator, *HUE)),
        (gamma, _uniform(generator, *GAMMA)),
    ]
    for index in torch.randperm(len(changes), generator=generator).tolist():
        change, amount = changes[index]
        pixels = change(pixels, amount)
    return pixels


def brightness(pixels: Tensor, factor: float) -> Tensor:
    """Times ``factor``."""
    return (pixels * factor).clamp(0, 1)


def contrast(pixels: Tensor, factor: float) -> Tensor:
    """Away from the mean grey of each image, ``factor`` times as far."""
    mean = grey(pixels).mean((1, 2, 3), keepdim=True)
    return (mean + factor * (pixels - mean)).clamp(0, 1)


def saturation(pixels: Tensor, factor: float) -> Tensor:
    """Away from each pixel's own grey, ``factor`` times as far."""
    if pixels.shape[1] != 3:
        return pixels
    own = grey(pixels)
    return (own + factor * (pixels - own)).clamp(0, 1)


def gamma(pixels: Tensor, exponent: float) -> Tensor:
    """To the power of ``exponent``."""
    return pixels**exponent


def grey(pixels: Tensor) -> Tensor:
    """How bright each pixel is, (B, 1, H, W)."""
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    return (pixels * pixels.new_tensor(GREY).view(3, 1, 1)).sum(1, keepdim=True)


def hue(pixels: Tensor, turn: float) -> Tensor:
    """Round the colour circle by ``turn`` of it; saturation and value (of HSV) stay."""
    if pixels.shape[1] != 3:
        return pixels
    red, green, blue = pixels.unbind(1)
    value, chroma = pixels.amax(1), pixels.amax(1) - pixels.amin(1)
    divisor = torch.where(chroma > 0, chroma, 1.0)
    # Where on the circle, in sixths: red at 0, green at 2, blue at 4.
    sixths = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixths = sixths + 6 * turn
    # A channel is at its lowest for two sixths of the circle, highest for two, on its way for one
    # on either side.
    channels = []
    for start in (5, 3, 1):
        place = (start + sixths) % 6
        channels.append(value - chroma * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(channels, 1).clamp(0, 1)


# --- shapes ---------------------------------------------------------------------------------


def random_affine(pixels: Tensor, generator: torch.Generator, margin: int = 0) -> Tensor:
    """Turned, moved and scaled by random amounts, with ``margin`` more pixels on each side."""
    degrees = _uniform(generator, *DEGREES)
    scale = _uniform(generator, *SCALE)
    height, width = pixels.shape[-2:]
    down, right = (
        round(_uniform(generator, -SHIFT, SHIFT) * (side + 2 * (side // 2)))
        for side in (height, width)
    )
    return affine(pixels, degrees, (down, right), scale, margin)


def affine(
    pixels: Tensor,
    degrees: float = 0.0,
    shift: tuple[float, float] = (0.0, 0.0),
    scale: float = 1.0,
    margin: int = 0,
) -> Tensor:
    """Turned clockwise about the centre, scaled, then moved ``shift`` pixels down and right.

    Bilinear; the edge goes on beyond the border. Returns (B, C, H + 2·margin, W + 2·margin).
    """
    height, width = pixels.shape[-2:]
    options: dict[str, Any] = {"dtype": pixels.dtype, "device": pixels.device}
    # Where in the result, from its centre, less the shift; then back through turn and scale.
    down = torch.arange(-margin, height + margin, **options) - (height - 1) / 2 - shift[0]
    right = torch.arange(-margin, width + margin, **options) - (width - 1) / 2 - shift[1]
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    cosine, sine = angle.cos().item() / scale, angle.sin().item() / scale
    rows = down[:, None] * cosine - right[None, :] * sine
    columns = right[None, :] * cosine + down[:, None] * sine
    # The image reaches from −1 to 1, its outermost pixels' outer borders included.
    grid = torch.stack([columns * 2 / width, rows * 2 / height], -1)
    return F.grid_sample(
        pixels,
        grid.expand(len(pixels), *grid.shape),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )


def blur(pixels: Tensor, deviation: float) -> Tensor:
    """A Gaussian over 5×5 pixels; two pixels less remain on each side."""
    kernel = gaussian(deviation)
    # Sums of shifted images: a convolution would be rounded to half precision under autocast.
    for dim in (-2, -1):
        length = pixels.shape[dim] - (TAPS - 1)
        pixels = torch.stack(
            [share * pixels.narrow(dim, tap, length) for tap, share in enumerate(kernel)]
        ).sum(0)
    return pixels


def gaussian(deviation: float) -> list[float]:
    """Five samples of a Gaussian, at whole pixels, that sum to 1."""
    offsets = torch.arange(TAPS, dtype=torch.float64) - TAPS // 2
    density = torch.exp(-0.5 * (offsets / deviation) ** 2)
    shares: list[float] = (density / density.sum()).tolist()
    return shares


# --- inside ---------------------------------------------------------------------------------


def black_and_span(image: Tensor, normalise: Normalisation | None) -> tuple[Tensor, Tensor]:
    """What a pixel of 0 is in ``image`` (..., C, H, W), and how far above it a pixel of 1."""
    if normalise is None:
        black, white = image.aminmax()
        return black, torch.where(white > black, white - black, 1.0)
    mean, deviation = (image.new_tensor(list(values)).view(-1, 1, 1) for values in normalise)
    if len(mean) not in (1, image.shape[-3]):
        raise ValueError(
            f"normalise has {len(mean)} channels, and the image is {tuple(image.shape)}. Give one "
            "mean and deviation for each channel, or one for all."
        )
    return -mean / deviation, 1 / deviation


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), generator=generator).item()
