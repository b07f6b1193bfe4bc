"""What a camera may meet, simulated on pixels: the conditions that candidates are judged in.

Most of them change the style of an image: haze, darkness, glare, whitening, low contrast, a cast.
They rank layers as real adverse weather does. Noise favours layers and settings that hurt in real
weather, so blur and noise count little. Where OpenCV is installed, fog, night, rain and snow of
`bestta.data.weather` join them for segmentation, which is mostly of streets.

Every effect is a pure function of the pixels and of a generator named by what it draws for.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Effect = Callable[[Tensor, np.random.Generator], Tensor]
"""Pixels (C, H, W), 0 to 1, and what to draw from: the pixels in the condition."""

STYLE, EVEN, NOISE, EXPECTED = 1.0, 0.5, 0.25, 2.0
"""Weights: of a change of style; of one that is the same all over the image, which the first layer
undoes exactly and weather never is; of blur and noise; and of what the user says to expect."""

SMALLEST_STREET = 64
"""Below this height, in pixels, no weather is painted."""


@dataclass(frozen=True)
class Condition:
    """A condition, and how much it counts."""

    name: str
    effect: Effect
    weight: float = STYLE

    def __call__(self, pixels: Tensor, *words: int | str) -> Tensor:
        """``pixels`` (C, H, W) in this condition; ``words`` name the draw."""
        return self.effect(pixels, drawing(*words, self.name)).clamp(0, 1)


def drawing(*words: int | str) -> np.random.Generator:
    """A generator that is a function of ``words`` alone."""
    digest = hashlib.sha256(ascii(("calibrate", *words)).encode()).digest()
    return np.random.default_rng(list(digest))


def clear(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """No change: a stream is often clear, and must not be harmed then."""
    return pixels


def haze(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """A pale veil, thickest towards the upper middle as over a road, and patchy."""
    _, height, width = pixels.shape
    y = torch.linspace(0, 1, height)[:, None]
    x = torch.linspace(-1, 1, width)[None]
    far = torch.exp(-(((y - 0.4) / 0.45) ** 2) - (x / 1.2) ** 2)
    patches = smooth(draw, height, width, cells=4)
    thickness = draw.uniform(0.7, 1.8) * (0.35 + 0.65 * far) * (0.7 + 0.6 * patches)
    through = torch.exp(-thickness)
    light = draw.uniform(0.65, 0.9) * tint(draw, len(pixels), 0.04)
    return pixels * through + light * (1 - through)


def darkness(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Little light of a warm or bluish colour, and some noise."""
    gain, gamma = draw.uniform(0.2, 0.5), draw.uniform(1.1, 1.6)
    dark = pixels**gamma * gain * tint(draw, len(pixels), 0.25)
    return dark + 0.01 * normal(draw, pixels)


def glare(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """A low sun in the picture: a bright blob, and a veil over all of it."""
    _, height, width = pixels.shape
    y = torch.linspace(0, 1, height)[:, None] - draw.uniform(0.05, 0.5)
    x = torch.linspace(0, 1, width)[None] - draw.uniform(0.1, 0.9)
    away = (y**2 + x**2).sqrt()
    light = torch.exp(-away / draw.uniform(0.15, 0.35)) + draw.uniform(0.15, 0.35)
    return pixels + (1 - pixels) * (light * tint(draw, len(pixels), 0.08)).clamp(0, 1)


def whitening(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Mixed with white, as by a fogged lens or snow."""
    return pixels.lerp(torch.ones_like(pixels), draw.uniform(0.2, 0.5))


def low_contrast(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Drawn together towards its mean."""
    mean = pixels.mean((1, 2), keepdim=True)
    return mean + (pixels - mean) * draw.uniform(0.25, 0.5)


def colour_cast(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Light of another colour."""
    return pixels * tint(draw, len(pixels), 0.25) * draw.uniform(0.8, 1.1)


def blur(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """A little out of focus."""
    return blurred(pixels, draw.uniform(0.002, 0.004) * max(pixels.shape[1], 100))


def defocus(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Clearly out of focus."""
    return blurred(pixels, draw.uniform(0.01, 0.035) * pixels.shape[1])


def blurred(pixels: Tensor, sigma: float) -> Tensor:
    """Pixels (C, H, W), smoothed by a Gaussian."""
    reach = max(1, round(3 * sigma))
    line = torch.exp(-(torch.arange(-reach, reach + 1).float() ** 2) / (2 * sigma**2))
    line = line / line.sum()
    padded = F.pad(pixels[:, None], [reach] * 4, mode="replicate")
    return F.conv2d(F.conv2d(padded, line.view(1, 1, 1, -1)), line.view(1, 1, -1, 1))[:, 0]


def noise(pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """A little noise of the sensor."""
    return pixels + draw.uniform(0.02, 0.05) * normal(draw, pixels)


def weather(kind: str, pixels: Tensor, draw: np.random.Generator) -> Tensor:
    """Fog, night, rain or snow over a street, of middling severity."""
    from bestta.data.weather import simulate

    picture = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    severity, seed = int(draw.integers(2, 5)), int(draw.integers(2**31))
    painted = simulate(picture, kind, severity, seed=("calibrate", seed))
    return torch.from_numpy(painted).permute(2, 0, 1).float() / 255


PLAIN = (
    Condition("clear", clear),
    Condition("haze", haze),
    Condition("darkness", darkness),
    Condition("glare", glare),
    Condition("whitening", whitening, EVEN),
    Condition("low contrast", low_contrast, EVEN),
    Condition("colour cast", colour_cast, EVEN),
    Condition("blur", blur, NOISE),
    Condition("defocus", defocus),
    Condition("noise", noise, NOISE),
)
"""Those that any image can be put in."""

WEATHERS = tuple(Condition(k, partial(weather, k)) for k in ("fog", "night", "rain", "snow"))


def conditions_for(
    task: str, shape: Sequence[int], wanted: Sequence[str | Condition] | None = None
) -> list[Condition]:
    """The conditions for images of ``shape`` (C, H, W): those ``wanted``, or all that fit."""
    street = task == "segmentation" and shape[0] == 3 and shape[1] >= SMALLEST_STREET
    painted = street and all(map(importlib.util.find_spec, ("cv2", "PIL")))
    # Weather whitens and flattens as well: each look once. And streets are filmed in focus, while
    # for other pictures that is the commonest change there is.
    left_out = ("low contrast", "defocus") if painted else ("blur",)
    fitting = [c for c in PLAIN if c.name not in left_out]
    every = [*fitting, *(WEATHERS if painted else ())]
    if wanted is None:
        return every
    known = {c.name: c for c in (*PLAIN, *every)}
    chosen = []
    for one in [wanted] if isinstance(wanted, str | Condition) else wanted:
        if not isinstance(one, Condition) and one not in list(known):
            raise ValueError(
                f"no condition is called {one!r}. For these images there are: {', '.join(known)}; "
                "or give a bestta.calibration.Condition of your own."
            )
        chosen.append(known[one] if isinstance(one, str) else one)
    names = [c.name for c in chosen]
    if not chosen or len(set(names)) < len(names):
        raise ValueError(f"conditions are one or more, of different names; got {names}.")
    return chosen


def look_of(expected: Sequence[Tensor]) -> Effect:
    """Give pixels the look of one of the ``expected`` images (C, H, W), drawn anew each time.

    Its slow variation in brightness and colour (the low frequencies' amplitudes, the phases
    staying the image's own), then its mean and deviation in each channel.
    """

    def give(pixels: Tensor, draw: np.random.Generator) -> Tensor:
        other = expected[int(draw.integers(len(expected)))]
        other = F.interpolate(other[None], pixels.shape[1:], mode="bilinear", antialias=True)[0]
        ours, theirs = torch.fft.fft2(pixels), torch.fft.fft2(other)
        near = [(torch.fft.fftfreq(n) * n).abs() <= max(1.0, 0.01 * n) for n in pixels.shape[1:]]
        low = near[0][:, None] & near[1][None]
        amplitude = torch.where(low, theirs.abs(), ours.abs())
        moved = torch.fft.ifft2(torch.polar(amplitude, ours.angle())).real
        mean, deviation = moved.mean((1, 2), keepdim=True), moved.std((1, 2), keepdim=True)
        slope = other.std((1, 2), keepdim=True) / deviation.clamp_min(1e-4)
        given: Tensor = (moved - mean) * slope + other.mean((1, 2), keepdim=True)
        return given

    return give


def tint(draw: np.random.Generator, channels: int, strength: float) -> Tensor:
    """A colour of mean 1 in every channel, (C, 1, 1): warm, bluish, or anything between."""
    values = 1 + strength * draw.uniform(-1, 1, channels)
    return torch.from_numpy(values / values.mean()).float().view(-1, 1, 1)


def smooth(draw: np.random.Generator, height: int, width: int, cells: int) -> Tensor:
    """A slowly varying map (H, W), 0 to 1."""
    coarse = torch.from_numpy(draw.random((1, 1, cells, 2 * cells))).float()
    fine = F.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)[0, 0]
    return fine.clamp(0, 1)


def normal(draw: np.random.Generator, like: Tensor) -> Tensor:
    """Noise of deviation 1, shaped ``like``."""
    return torch.from_numpy(draw.standard_normal(tuple(like.shape), dtype=np.float32))
