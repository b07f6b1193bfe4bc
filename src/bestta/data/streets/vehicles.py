"""Vehicles: cars and buses as boxes with windows, wheels and lamps on their faces."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import cv2
import numpy as np

from bestta.data.streets.light import hazed, times
from bestta.data.streets.scene import BUS, CAR, Colour, Dice, Floats
from bestta.data.streets.things import CIRCLE, Crowd, Footprint, Thing
from bestta.data.streets.view import View, sixteenths

_Normal = tuple[float, float, float]


def place_vehicles(dice: Dice, crowd: Crowd) -> None:
    """Puts vehicles on the lanes, on the side street, and along the kerbs."""
    street, density = crowd.street, crowd.style.density
    for lane in range(street.lanes):
        for sign in (-1, 1):
            z = dice(7, 26)
            while z < 50:
                side = sign * street.lane * (lane + 0.5) + dice(-0.3, 0.3)
                if dice.chance(0.5 * density) and street.free(z, 3):
                    _add_vehicle(dice, crowd, side, z, 0.0 if sign > 0 else math.pi, bus=0.2)
                z += dice(12, 24)
    if street.crossing is not None:
        middle = sum(street.crossing) / 2
        for sign in (-1, 1):
            side = dice(-9, 9)
            if dice.chance(0.45 * density):
                _add_vehicle(dice, crowd, side, middle - 1.8 * sign, sign * math.pi / 2, bus=0.15)
    for (sign, verge), allowed in zip(street.verges, street.parking, strict=True):
        full, z = dice(0.3, 0.95), dice(2, 6)
        while z < 48:
            shift, turned = dice(0.0, 0.2), dice.chance(0.1)
            clear = street.free(z, 5) and (street.zebra is None or abs(z - street.zebra - 1.5) > 5)
            if dice.chance(full * density) and allowed and clear:
                heading = 0.0 if (sign > 0) != turned else math.pi
                _add_vehicle(dice, crowd, sign * (verge.road - 1.15 - shift), z, heading)
            z += dice(5.6, 7.5)


class _Patch(NamedTuple):
    """A flat piece of a vehicle: rows of the model's points, the face it lies on, its material."""

    first: int
    last: int
    face: int
    material: str


@dataclass(frozen=True)
class _Model:
    """A vehicle of unit width, height and length, standing on the origin and facing +Z."""

    points: Floats
    """(N, 3), the four corners of each face before the patches on it."""
    patches: tuple[_Patch, ...]
    faces: Any
    """(F, 4), the rows of ``points`` that are each face's corners. Body first, then cabin."""
    normals: tuple[_Normal, ...]


# Corners of a box are numbered rear left, rear right, front right, front left, bottom then top.
# A face lists them anticlockwise as seen from outside, from its lower left.
_FACES: tuple[tuple[str, tuple[int, ...], _Normal], ...] = (
    ("rear", (0, 1, 5, 4), (0.0, 0.0, -1.0)),
    ("front", (2, 3, 7, 6), (0.0, 0.0, 1.0)),
    ("left", (3, 0, 4, 7), (-1.0, 0.0, 0.0)),
    ("right", (1, 2, 6, 5), (1.0, 0.0, 0.0)),
    ("top", (4, 5, 6, 7), (0.0, 1.0, 0.0)),
)


class _Builder:
    """Puts a model together from boxes and patches on their faces."""

    def __init__(self) -> None:
        self.points: list[Floats] = []
        self.patches: list[_Patch] = []
        self.corners: list[Floats] = []
        self.faces: list[range] = []
        self.normals: list[_Normal] = []

    def box(self, bottom: tuple[float, ...], top: tuple[float, ...]) -> dict[str, int]:
        """Adds a box; returns the numbers of its faces by name.

        Args:
            bottom, top: Height, half width, rear end and front end of either.
        """
        corners = np.array(
            [
                (x * half, y, z)
                for y, half, rear, front in (bottom, top)
                for x, z in ((-1, rear), (1, rear), (1, front), (-1, front))
            ],
            np.float32,
        )
        numbers = {}
        for name, order, normal in _FACES:
            numbers[name] = len(self.faces)
            face = corners[list(order)]
            self._add(face, numbers[name], "body")
            self.corners.append(face)
            self.faces.append(range(self.patches[-1].first, self.patches[-1].last))
            self.normals.append(normal)
        return numbers

    def patch(self, face: int, outline: Iterable[tuple[float, float]], material: str) -> None:
        """Adds a polygon in the face's own coordinates, (0, 0) lower left to (1, 1)."""
        lower_left, lower_right, upper_right, upper_left = self.corners[face]
        rows = [
            (lower_left * (1 - u) + lower_right * u) * (1 - v)
            + (upper_left * (1 - u) + upper_right * u) * v
            for u, v in outline
        ]
        self._add(np.array(rows, np.float32), face, material)

    def rectangle(
        self, face: int, u: tuple[float, float], v: tuple[float, float], material: str
    ) -> None:
        """Adds a patch from ``u[0]`` to ``u[1]`` and from ``v[0]`` to ``v[1]``."""
        self.patch(face, ((u[0], v[0]), (u[1], v[0]), (u[1], v[1]), (u[0], v[1])), material)

    def wheel(self, face: int, u: float, v: float, radius: tuple[float, float]) -> None:
        """Adds tyre and rim around (u, v)."""
        for share, material in ((1.0, "tyre"), (0.55, "rim")):
            self.patch(face, CIRCLE * np.array(radius) * share + (u, v), material)

    def tyres(self, face: int, half: float, z: float) -> None:
        """Adds both wheels of an axle as they look from ahead or behind, below the body.

        Args:
            face: They are seen whenever this face is.
            half: From the middle of the vehicle to the outer side of a tyre.
            z: Where they end, seen from there.
        """
        for outer in (-half, half):
            inner = outer * 0.72
            corners = ((outer, 0, z), (inner, 0, z), (inner, 0.25, z), (outer, 0.25, z))
            self._add(np.array(corners, np.float32), face, "tyre")
            # The body hides their upper part.
            self.patches.insert(0, self.patches.pop())

    def _add(self, points: Floats, face: int, material: str) -> None:
        first = sum(map(len, self.points))
        self.points.append(points)
        self.patches.append(_Patch(first, first + len(points), face, material))

    def model(self) -> _Model:
        """What has been put together."""
        faces = np.array([list(rows) for rows in self.faces])
        return _Model(np.concatenate(self.points), tuple(self.patches), faces, tuple(self.normals))


@lru_cache(maxsize=4)
def _car_model(kind: int) -> _Model:
    """Hatchback, saloon, estate or van, by the shape of body and cabin."""
    waist, rear, front, rear_top, front_top = (
        (0.60, -0.49, 0.22, -0.40, 0.02),
        (0.60, -0.34, 0.22, -0.22, 0.02),
        (0.58, -0.49, 0.24, -0.46, 0.06),
        (0.52, -0.50, 0.38, -0.49, 0.24),
    )[kind]
    builder = _Builder()
    body = builder.box((0.16, 0.49, -0.5, 0.5), (waist, 0.47, -0.49, 0.47))
    tall = waist - 0.16
    builder.tyres(body["rear"], 0.48, -0.39)
    builder.tyres(body["front"], 0.48, 0.39)
    for name in ("left", "right"):
        builder.rectangle(body[name], (0, 1), (0, 0.16), "trim")
        for u in (0.19, 0.81):
            builder.wheel(body[name], u, 0.06 / tall, (0.085, 0.22 / tall))
    for name, lamp in (("rear", "tail"), ("front", "lamp")):
        builder.rectangle(body[name], (0, 1), (0, 0.3), "trim")
        builder.rectangle(body[name], (0.03, 0.22), (0.55, 0.85), lamp)
        builder.rectangle(body[name], (0.78, 0.97), (0.55, 0.85), lamp)
        builder.rectangle(body[name], (0.37, 0.63), (0.34, 0.5), "plate")
    builder.rectangle(body["front"], (0.27, 0.73), (0.55, 0.82), "trim")
    cabin = builder.box((waist, 0.47, rear, front), (1.0, 0.38, rear_top, front_top))
    for name in ("rear", "front"):
        builder.rectangle(cabin[name], (0.07, 0.93), (0.1, 0.86), "glass")
    for name in ("left", "right"):
        builder.rectangle(cabin[name], (0.07, 0.47), (0.1, 0.84), "glass")
        builder.rectangle(cabin[name], (0.53, 0.93), (0.1, 0.84), "glass")
    return builder.model()


@lru_cache(maxsize=1)
def _bus_model() -> _Model:
    """A bus with a stripe under its row of windows."""
    builder = _Builder()
    body = builder.box((0.1, 0.5, -0.5, 0.5), (1.0, 0.48, -0.5, 0.5))
    builder.tyres(body["rear"], 0.49, -0.34)
    builder.tyres(body["front"], 0.49, 0.34)
    for name in ("left", "right"):
        builder.rectangle(body[name], (0, 1), (0, 0.1), "trim")
        builder.rectangle(body[name], (0, 1), (0.3, 0.38), "stripe")
        for i in range(6):
            left = 0.03 + 0.16 * i
            builder.rectangle(body[name], (left, left + 0.135), (0.42, 0.82), "glass")
        for u in (0.2, 0.8):
            builder.wheel(body[name], u, 0.05, (0.045, 0.16))
    for name, lamp in (("rear", "tail"), ("front", "lamp")):
        builder.rectangle(body[name], (0, 1), (0, 0.12), "trim")
        builder.rectangle(body[name], (0.06, 0.94), (0.4, 0.82), "glass")
        builder.rectangle(body[name], (0.25, 0.75), (0.86, 0.96), "trim")
        builder.rectangle(body[name], (0.05, 0.2), (0.16, 0.26), lamp)
        builder.rectangle(body[name], (0.8, 0.95), (0.16, 0.26), lamp)
        builder.rectangle(body[name], (0.4, 0.6), (0.14, 0.22), "plate")
    return builder.model()


_CAR_PAINTS: tuple[Colour, ...] = (
    *((214, 214, 212), (34, 35, 40), (120, 124, 128), (168, 172, 176), (150, 26, 28)),
    *((32, 62, 128), (66, 72, 82), (84, 20, 30), (28, 74, 62), (196, 150, 40), (60, 110, 160)),
)
_BUS_PAINTS: tuple[Colour, ...] = (
    *((222, 178, 40), (188, 40, 36), (214, 122, 40), (226, 196, 90), (60, 130, 90)),
)
_MATERIALS: dict[str, Colour] = {
    "trim": (42, 42, 44),
    "glass": (58, 66, 76),
    "tyre": (26, 26, 28),
    "rim": (134, 134, 136),
    "tail": (196, 28, 30),
    "lamp": (240, 238, 220),
    "plate": (226, 224, 200),
}


@dataclass(kw_only=True)
class _Vehicle(Thing):
    """A car or a bus, drawn as the faces that are turned to the camera."""

    model: _Model
    pixels: Floats
    """(N, 2), where the model's points are in the image."""
    depths: Floats
    """(N,), theirs."""
    lights: list[Colour]
    """Of each face."""
    materials: dict[str, Colour]
    label: int

    def paint(self, view: View) -> None:
        """Draws the patches of all faces that are seen, in the order they were added."""
        fixed = sixteenths(self.pixels)
        corner = self.pixels[self.model.faces]
        one, two = corner[:, 1] - corner[:, 0], corner[:, 2] - corner[:, 0]
        # Corners run anticlockwise where a face is seen from outside, and rows count downwards.
        seen = (one[:, 0] * two[:, 1] - one[:, 1] * two[:, 0] < 0).tolist()
        depths = self.depths[self.model.faces].mean(1).tolist()
        pieces = [view.piece(self.label, depth) for depth in depths]
        for first, last, face, material in self.model.patches:
            if seen[face]:
                # Details lie within their face, except for tyres.
                solid = material in ("body", "tyre")
                colour = hazed(times(self.materials[material], self.lights[face]), self.depth)
                view.fill(fixed[first:last], colour, pieces[face] if solid else None)


def _add_vehicle(
    dice: Dice, crowd: Crowd, side: float, z: float, heading: float, bus: float = 0.0
) -> None:
    """A vehicle that looks along ``heading``, 0 being Z; a bus with the probability ``bus``."""
    style, light = crowd.style, crowd.light
    is_bus, kind = dice.chance(bus), dice.whole(4)
    wider, taller, longer = dice(-1, 1), dice(-1, 1), dice(-1, 1)
    car_paint = dice.vary(dice.pick(_CAR_PAINTS), 0.15 * style.colour)
    bus_paint = dice.vary(dice.pick(_BUS_PAINTS), 0.1 * style.colour)
    stripe = dice.pick(_CAR_PAINTS)
    # The road turns by its slope, and a car keeps to it, give or take the driver.
    heading += math.atan(crowd.street.bend * z) + 0.02 * dice.bell()
    if is_bus:
        size = (2.55, 3.0 + 0.15 * taller, 9.5 + 1.2 * longer)
        model, paint, label = _bus_model(), bus_paint, BUS
        z += 3.5
    else:
        tall = (1.46, 1.44, 1.52, 1.9)[kind]
        size = (1.8 + 0.08 * wider, tall + 0.08 * taller, 4.35 + 0.35 * longer)
        model, paint, label = _car_model(kind), car_paint, CAR
    x, z, depth = crowd.place(side, z)
    if crowd.collides(x, z, 0.5 * size[2]) or not crowd.seen(depth, size[1]):
        return
    sin, cos = math.sin(heading), math.cos(heading)
    scaled = model.points * np.array(size, np.float32)
    points = np.empty_like(scaled)
    points[:, 0] = x + scaled[:, 0] * cos + scaled[:, 2] * sin
    points[:, 1] = scaled[:, 1]
    points[:, 2] = z - scaled[:, 0] * sin + scaled[:, 2] * cos
    pixels, depths = crowd.camera.project(points)
    if depths.min() < 2.2:
        return
    lit = crowd.lit(side, z, 0.7)
    lights = [
        light.on(lit * (light.facing(nx * cos + nz * sin, nz * cos - nx * sin) if ny == 0 else 1))
        for nx, ny, nz in model.normals
    ]
    thing = _Vehicle(
        *(x, z, depth, 0.6 * size[2], lit),
        model=model,
        pixels=pixels,
        depths=depths,
        lights=lights,
        materials={**_MATERIALS, "body": paint, "stripe": stripe},
        label=label,
    )
    # The lower edges of its two flanks are its outline on the ground.
    left, right = model.faces[2], model.faces[3]
    base = points[np.concatenate([left[:2], right[:2]])][:, [0, 2]]
    both = np.concatenate([base, crowd.thrown(base, 0.85 * size[1])])
    thing.contacts.append(base)
    crowd.stands.append(Footprint(x, z, 0.5 * size[0], 0.5 * size[2], heading))
    hull: Any = cv2.convexHull(both)
    thing.shadows.append((hull[:, 0], 255))
    crowd.things.append(thing)
