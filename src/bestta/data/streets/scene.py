"""What all files of a street share: its classes, its style, the finished scene, and the dice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from bestta.data.samples import Pixels

Floats = np.ndarray[Any, np.dtype[np.float32]]
Colour = tuple[float, float, float]
"""Red, green and blue, 0 to 255; for light, how much of each arrives."""

_Option = TypeVar("_Option")

ROAD, SIDEWALK, BUILDING, POLE, TRAFFIC_LIGHT, TRAFFIC_SIGN = 0, 1, 2, 5, 6, 7
VEGETATION, TERRAIN, SKY, PERSON, CAR, BUS = 8, 9, 10, 11, 13, 15

CLASSES_USED: tuple[int, ...] = (
    *(ROAD, SIDEWALK, BUILDING, POLE, TRAFFIC_LIGHT, TRAFFIC_SIGN),
    *(VEGETATION, TERRAIN, SKY, PERSON, CAR, BUS),
)
"""Train ids that occur in the scenes. All are common and large enough to be learnt."""

SKY_DEPTH = math.inf
"""What the depth map holds where nothing is hit."""


@dataclass(frozen=True)
class Style:
    """How varied and how hard the scenes are.

    The knobs scale what is drawn from the seed without changing the draws: the same seed under two
    styles shows the same street, though at another density with other things on it. Zero switches
    an effect off.
    """

    texture: float = 1.0
    """Contrast of surfaces: asphalt, plaster, leaves, grass, cloth."""

    light: float = 1.0
    """Spread of exposure, contrast and colour temperature between scenes."""

    shadow: float = 1.0
    """Depth of cast shadows and of the shade under objects; above 1 they turn black."""

    colour: float = 1.0
    """Spread of the colours within a class around their mean."""

    camera: float = 1.0
    """Spread of the camera's height, pitch, yaw and focal length."""

    density: float = 1.0
    """How many vehicles, people, trees and signs there are."""

    smallest: float = 0.07
    """Objects lower than this share of the image's height are left out."""

    pole_width: float = 0.2
    """Thickness of poles in metres."""

    thinnest: float = 0.014
    """Poles are left out where they are thinner than this share of the image's height."""

    noise: float = 1.0
    """Sensor noise."""

    blur: float = 1.0
    """Softness of the lens."""

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"Style.{knob.name} is {value!r}; it takes a number from 0 up, "
                    f"such as the usual {knob.default}"
                )


@dataclass(frozen=True, eq=False)
class Scene:
    """One rendered street.

    Attributes:
        image: (H, W, 3) bytes, RGB.
        label: (H, W) bytes, Cityscapes train ids out of :data:`CLASSES_USED`.
        depth: (H, W) float32, metres along the viewing direction; infinite in the sky.
    """

    image: Pixels
    label: Pixels
    depth: Floats


class Dice:
    """Random numbers handed out one at a time.

    A scene takes about a thousand. Asking NumPy for each would cost more than painting the road,
    so they are drawn in blocks.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.left: list[float] = []

    def __call__(self, low: float = 0.0, high: float = 1.0) -> float:
        """A number from ``low`` to ``high``."""
        if not self.left:
            self.left = self.rng.random(1024).tolist()
        return low + (high - low) * self.left.pop()

    def chance(self, probability: float) -> bool:
        """True this often."""
        return self() < probability

    def whole(self, count: int) -> int:
        """A whole number below ``count``."""
        return int(self() * count)

    def bell(self) -> float:
        """A number around 0 with standard deviation 1, never beyond 3."""
        return 2 * (self() + self() + self()) - 3

    def pick(self, options: Sequence[_Option]) -> _Option:
        """One of the options, all as likely."""
        return options[self.whole(len(options))]

    def vary(self, colour: Sequence[float], by: float) -> Colour:
        """``colour`` with another brightness and a slightly other hue."""
        bright, hue = by * self.bell(), 0.4 * by
        r, g, b = (c * math.exp(bright + self(-hue, hue)) for c in colour)
        return r, g, b

    def bytes(self, shape: tuple[int, ...]) -> Pixels:
        """An array of this shape, all 256 levels as likely."""
        count = math.prod(shape)
        return np.frombuffer(self.rng.bytes(count), np.uint8).reshape(shape)
