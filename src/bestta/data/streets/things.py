"""What stands on the street: how things are drawn before one another, and where they may stand."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bestta.data.streets.light import Light, hazed
from bestta.data.streets.plan import Street
from bestta.data.streets.scene import BUILDING, VEGETATION, Colour, Floats, Style
from bestta.data.streets.view import Camera, View, sixteenths

_ANGLES = np.arange(10) * (2 * math.pi / 10)
CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], 1).astype(np.float32)
"""Outline (10, 2) of a circle of radius 1; rounder than this nothing has to be."""


def circle(x: float, y: float, radius: float) -> Floats:
    """Outline (10, 2) of a circle around (x, y)."""
    return CIRCLE * np.float32(radius) + np.array((x, y), np.float32)


@dataclass
class Thing(ABC):
    """Something that stands on the ground and is drawn over what is behind it."""

    x: float
    z: float
    depth: float
    reach: float
    """No part of it is further than this to the left or right of its foot."""
    lit: float
    """1 in the sun, 0 in the shadow of a building."""
    shadows: list[tuple[Floats, int]] = field(default_factory=list)
    """Outlines (N, 2) on the ground in X and Z, with how dark each is, 0 to 255."""
    contacts: list[Floats] = field(default_factory=list)
    """Outlines (N, 2) on the ground that little light reaches, such as beneath a car."""

    @abstractmethod
    def paint(self, view: View) -> None:
        """Draws the thing as if nothing were before it."""

    def stand(self, view: View) -> None:
        """Draws the thing where no wall is before it. Nearer things are drawn later."""
        u, v, scale = view.camera.foot(self.x, self.z)
        reach = self.reach * scale + 1
        left, right = max(int(u - reach), 0), min(int(u + reach) + 2, view.camera.width)
        if left >= right:
            return
        # A thing may lean against a wall.
        before = self.depth - 1.5
        if view.nearest[left:right].min() >= before:
            self.paint(view)
            return
        # What walls hide is put back after painting.
        region = (slice(0, max(min(int(v) + 2, view.camera.height), 0)), slice(left, right))
        label = view.label[region]
        hidden = ((label == BUILDING) | (label == VEGETATION)) & (view.depth[region] < before)
        image, pieces = view.image[region][hidden], view.pieces[region][hidden]
        self.paint(view)
        view.image[region][hidden] = image
        view.pieces[region][hidden] = pieces


class Part(NamedTuple):
    """A convex piece of a figure."""

    outline: Floats
    """(N, 2) metres to the right of and above the foot."""
    colour: Colour
    label: int


@dataclass
class Figure(Thing):
    """A thing that is flat and faces the camera, such as a person or a sign."""

    parts: list[Part] = field(default_factory=list)
    """From back to front."""

    def paint(self, view: View) -> None:
        """Draws its parts."""
        u, v, scale = view.camera.foot(self.x, self.z)
        outlines = np.concatenate([part.outline for part in self.parts])
        pixels = outlines * np.array((scale, -scale), np.float32) + np.array((u, v), np.float32)
        fixed = sixteenths(pixels)
        pieces: dict[int, int] = {}
        end = 0
        for part in self.parts:
            if part.label not in pieces:
                pieces[part.label] = view.piece(part.label, self.depth)
            begin, end = end, end + len(part.outline)
            view.fill(fixed[begin:end], hazed(part.colour, self.depth), pieces[part.label])


class Footprint(NamedTuple):
    """Where something stands: a rectangle in the ground plan, or a disc if both halves are 0."""

    x: float
    z: float
    half_width: float
    half_length: float
    heading: float = 0.0
    """Where its length points, 0 being along Z."""
    radius: float = 0.0
    """Of a disc, or by how much the rectangle is larger all around."""

    def distance(self, x: float, z: float) -> float:
        """Metres from a point of the ground plan to its edge; 0 or less inside."""
        sin, cos = math.sin(self.heading), math.cos(self.heading)
        right, ahead = x - self.x, z - self.z
        across = abs(right * cos - ahead * sin) - self.half_width
        along = abs(right * sin + ahead * cos) - self.half_length
        return math.hypot(max(across, 0.0), max(along, 0.0)) - self.radius


class Crowd:
    """Collects things, and knows where on the street they may stand."""

    def __init__(self, street: Street, camera: Camera, light: Light, style: Style) -> None:
        self.street, self.camera, self.light, self.style = street, camera, light, style
        self.things: list[Thing] = []
        self.taken: list[tuple[float, float, float]] = []
        """X, Z and radius of places where vehicles are."""
        self.stands: list[Footprint] = []
        """Where the vehicles, trunks, poles and people are that are drawn."""

    def place(self, side: float, z: float) -> tuple[float, float, float]:
        """X, Z and depth of a spot of the street."""
        x = self.street.x(side, z)
        return x, z, self.camera.depth(x, z)

    def stand(self, side: float, z: float, radius: float) -> tuple[float, float, float] | None:
        """:meth:`place` for something slender, a step aside if needed to stand in nothing else.

        None where a few steps along the street do not help.
        """
        for step in (0.0, 0.8, -0.8, 1.6, -1.6, 2.4, -2.4):
            x, at, depth = self.place(side, z + step)
            if all(
                abs(at - other.z) > 7 or other.distance(x, at) >= radius for other in self.stands
            ):
                self.stands.append(Footprint(x, at, 0.0, 0.0, radius=radius))
                return x, at, depth
        return None

    def lit(self, side: float, z: float, height: float) -> float:
        """1 where the sun shines at ``height``, 0 where a building is before it."""
        shadow = float(self.street.shadow_height(np.float32(side), np.float32(z), self.light))
        return min(max(0.5 + height - shadow, 0.0), 1.0)

    def seen(self, depth: float, size: float, share: float | None = None) -> bool:
        """Whether something of ``size`` metres is large enough in the image to be drawn.

        Args:
            depth: How far away it is.
            size: Its height or, for poles, its width.
            share: Of the image's height that it must take up, if not the style's ``smallest``.
        """
        camera, share = self.camera, self.style.smallest if share is None else share
        return depth > 1.5 and size * camera.focal >= share * camera.height * depth

    def collides(self, x: float, z: float, radius: float) -> bool:
        """Whether a vehicle is there already; if not, the place is taken now."""
        if any(math.hypot(x - a, z - b) < radius + r for a, b, r in self.taken):
            return True
        self.taken.append((x, z, radius))
        return False

    def thrown(self, outline: Floats, height: float) -> Floats:
        """Where the shadow of a ground outline (N, 2) lies once raised to ``height``."""
        away = np.array(self.light.sun, np.float32) * np.float32(-height / self.light.tangent)
        return outline + away

    def streak(self, x: float, z: float, half_width: float, height: float) -> Floats:
        """Ground outline (4, 2) of the shadow of something slender."""
        (towards, along), tangent = self.light.sun, self.light.tangent
        a, b = along * half_width, -towards * half_width
        c, d = x - towards * height / tangent, z - along * height / tangent
        return np.array(
            ((x - a, z - b), (x + a, z + b), (c + a, d + b), (c - a, d - b)), np.float32
        )
