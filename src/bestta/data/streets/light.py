"""Light, from the sun to the sensor: what falls on surfaces, the air in between, the photograph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import cv2
import numpy as np

from bestta.data.samples import Pixels
from bestta.data.streets.scene import Colour, Dice, Floats, Style

HAZE: Colour = (196, 206, 216)
"""The colour of much air."""

HAZE_DISTANCE = 900.0
"""Metres at which half of what is seen is air."""


@dataclass
class Light:
    """Sun, sky and the photographer's settings."""

    sunny: bool
    sun: tuple[float, float]
    """Where the sun stands: X and Z of a unit vector on the ground."""
    tangent: float
    """Tangent of the sun's elevation."""
    direct: Colour
    """What the sun gives to level ground."""
    ambient: Colour
    """What the sky gives, even in the shadow. Both together are about 1."""
    shadow: float
    """How much of the light is missing under objects."""
    clouds: float
    """How much of the sky they cover: 0 for few, 1 for all."""
    exposure: float
    gains: Colour
    """Of the sensor: the colour temperature of the photograph."""
    contrast: float

    @classmethod
    def draw(cls, dice: Dice, style: Style) -> Light:
        """The light of some day."""
        sunny = dice.chance(0.62)
        angle = dice(0, 2 * math.pi)
        elevation = dice(0.45, 1.05)
        clouds = dice(0.0, 0.75) if sunny else dice(0.8, 1.0)
        spread = [dice(-1, 1) * style.light for _ in range(4)]
        warm = 0.05 + 0.05 * spread[0]
        strength = min((0.5 if sunny else 0.1) * style.shadow, 0.9)
        return cls(
            sunny,
            (math.sin(angle), math.cos(angle)),
            math.tan(elevation),
            direct=(strength * (1 + warm), strength, strength * (1 - 1.4 * warm)),
            ambient=((1 - strength) * (1 - warm), 1 - strength, (1 - strength) * (1 + 1.4 * warm)),
            shadow=min(0.55 * style.shadow, 1.0),
            clouds=clouds,
            exposure=math.exp(0.2 * spread[1]) * (1.0 if sunny else 0.9),
            gains=(1 + 0.06 * spread[2], 1.0, 1 - 0.06 * spread[2]),
            contrast=1 + 0.12 * spread[3],
        )

    def facing(self, normal_x: float, normal_z: float) -> float:
        """How an upright surface with this normal faces the sun, 1 being as much as the ground."""
        cosine = (normal_x * self.sun[0] + normal_z * self.sun[1]) / self.tangent
        return min(max(cosine, 0.0), 1.0) if self.sunny else 0.6

    def on(self, facing: float) -> Colour:
        """Light on a surface that faces the sun so much, 1 being as much as the ground."""
        facing = min(max(facing, 0.0), 1.15)
        r, g, b = (a + d * facing for a, d in zip(self.ambient, self.direct, strict=True))
        return r, g, b

    def photograph(self, image: Any, dice: Dice, style: Style) -> Pixels:
        """The painted image (H, W, 3) as a camera records it: lens, exposure and noise."""
        softness, strength = dice(0.25, 0.5), dice(1.2, 3.2)
        sigma = softness * style.blur * image.shape[0] / 128
        if sigma > 0.2:
            image = cv2.GaussianBlur(image, (0, 0), sigma)
        image = cv2.LUT(image, self._curve())
        if style.noise > 0:
            # Bytes looked up in the quantiles of a bell curve are a quick source of its noise.
            luck = dice.bytes(image.shape)
            noise = cv2.LUT(luck, _quantiles() * np.float32(strength * style.noise))
            image = cv2.add(image, noise, dtype=cv2.CV_8U)
        photograph: Pixels = image
        return photograph

    def _curve(self) -> Pixels:
        """What the camera makes of each level of each colour, (256, 1, 3)."""
        levels = np.arange(256, dtype=np.float64)[:, None]
        curved = 110 + (levels - 110) * self.contrast
        exposed = curved * (self.exposure * np.array(self.gains))
        return np.clip(np.rint(exposed), 0, 255).astype(np.uint8).reshape(256, 1, 3)


def times(colour: Colour, light: Colour) -> Colour:
    """``colour`` under that light."""
    return colour[0] * light[0], colour[1] * light[1], colour[2] * light[2]


def hazed(colour: Colour, depth: float) -> Colour:
    """``colour`` as it looks through that much air."""
    share = depth / (depth + HAZE_DISTANCE)
    r, g, b = (c + share * (air - c) for c, air in zip(colour, HAZE, strict=True))
    return r, g, b


@lru_cache(maxsize=1)
def _quantiles() -> Floats:
    """The middle of each of 256 equally likely parts of a bell curve, (256,)."""
    bell = NormalDist()
    return np.array([bell.inv_cdf((i + 0.5) / 256) for i in range(256)], np.float32)
