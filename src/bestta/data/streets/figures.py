"""Flat figures that face the camera: people, trees, and lamps, signs and lights on their poles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from bestta.data.streets.light import hazed, times
from bestta.data.streets.plan import LEAVES
from bestta.data.streets.scene import (
    PERSON,
    POLE,
    TRAFFIC_LIGHT,
    TRAFFIC_SIGN,
    VEGETATION,
    Colour,
    Dice,
    Floats,
)
from bestta.data.streets.things import CIRCLE, Crowd, Figure, Footprint, Part, circle
from bestta.data.streets.view import View, crop, grain_tile, lumps_tile

# People -------------------------------------------------------------------------------------------


def place_people(dice: Dice, crowd: Crowd) -> None:
    """Puts people on the pavements, some in pairs, and on the pedestrian crossing."""
    street, density = crowd.street, crowd.style.density
    for sign, verge in street.verges:
        near = verge.road + verge.grass
        for _ in range(int(dice(0, 7) * density)):
            side, z = sign * dice(near + 0.5, near + verge.pavement - 0.3), dice(4.5, 30)
            _add_person(dice, crowd, side, z)
            if dice.chance(0.4):
                _add_person(dice, crowd, side + 0.62, z + dice(-0.3, 0.3))
    if street.zebra is not None:
        for _ in range(int(dice(0, 4) * density)):
            side, z = dice(-street.left.road, street.right.road), street.zebra + dice(0.3, 2.7)
            _add_person(dice, crowd, side, z)


_SKIN: tuple[Colour, ...] = ((224, 178, 150), (196, 146, 116), (142, 98, 72), (96, 66, 50))
_HAIR: tuple[Colour, ...] = ((40, 32, 28), (90, 64, 40), (160, 130, 90), (30, 28, 30))
_TOPS: tuple[Colour, ...] = (
    *((40, 44, 60), (150, 40, 44), (60, 90, 140), (206, 200, 190), (74, 100, 70), (190, 150, 60)),
    *((110, 70, 110), (44, 44, 46), (120, 116, 112), (206, 110, 60), (40, 110, 120)),
)
_TROUSERS: tuple[Colour, ...] = ((38, 42, 58), (52, 50, 48), (84, 92, 112), (112, 98, 80))


def _shape(*points: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Points given in hundredths of a person's height, with movements left out that are zero."""
    padded = ((*point, 0, 0, 0)[:5] for point in points)
    return tuple((x / 100, y / 100, *moves) for x, y, *moves in padded)


# The parts of a person, each with how far it faces the sun. A point is given by its distance right
# of the feet and above the ground, then how far it moves right with the stride, right with the
# swing of the arms, and up with the hem of a coat.
_BODY: tuple[tuple[str, float, tuple[Any, ...]], ...] = (
    ("legs", 0.35, _shape((-7, 48), (1, 48), (4.5, 0, -1), (-4.5, 0, -1))),
    ("legs", 0.75, _shape((-1, 48), (7, 48), (4.5, 0, 1), (-4.5, 0, 1))),
    ("top", 0.35, _shape((-9, 81), (-15, 73), (-17, 45, 0, 1), (-11, 45, 0, 1), (-5, 70))),
    ("top", 0.75, _shape((9, 81), (15, 73), (17, 45, 0, 1), (11, 45, 0, 1), (5, 70))),
    (
        *("top", 0.7),
        _shape((-10, 83), (10, 83), (13, 75), (10, 45, 0, 0, -1), (-10, 45, 0, 0, -1), (-13, 75)),
    ),
    ("hair", 0.75, _shape(*(CIRCLE * (6, 8.5) + (0, 91.5)).tolist())),
    ("skin", 0.75, _shape(*(CIRCLE * (4.8, 6.2) + (0, 89.5)).tolist())),
)
_BODY_POINTS = np.array([row for _, _, rows in _BODY for row in rows], np.float32)
_BODY_ENDS = np.cumsum([len(rows) for _, _, rows in _BODY]).tolist()


def _add_person(dice: Dice, crowd: Crowd, side: float, z: float) -> None:
    variety = crowd.style.colour
    tall, bulk = dice(1.55, 1.92), dice(1.0, 1.3)
    stride, swing = max(dice(-0.06, 0.13), 0.045), dice(-0.05, 0.05)
    coat = max(dice(-0.4, 0.15), 0.0)
    colours = {
        "skin": dice.vary(dice.pick(_SKIN), 0.06 * variety),
        "hair": dice.vary(dice.pick(_HAIR), 0.1 * variety),
        "top": dice.vary(dice.pick(_TOPS), 0.16 * variety),
        "legs": dice.vary(dice.pick(_TROUSERS), 0.16 * variety),
    }
    if not crowd.seen(crowd.place(side, z)[2], tall):
        return
    stand = crowd.stand(side, z, 0.25)
    if stand is None or not crowd.seen(stand[2], tall):
        return
    x, z, depth = stand
    lit = crowd.lit(side, z, 1.0)
    body = _BODY_POINTS[:, :2].copy()
    body[:, 0] += _BODY_POINTS[:, 2] * stride + _BODY_POINTS[:, 3] * swing
    body[:, 1] += _BODY_POINTS[:, 4] * coat
    body *= np.array((tall * bulk, tall), np.float32)
    thing = Figure(x, z, depth, 0.6, lit)
    begin = 0
    for (material, facing, _), end in zip(_BODY, _BODY_ENDS, strict=True):
        colour = times(colours[material], crowd.light.on(facing * lit))
        thing.parts.append(Part(body[begin:end], colour, PERSON))
        begin = end
    thing.contacts.append(circle(x, z, 0.3))
    thing.shadows.append((crowd.streak(x, z, 0.2, tall), 255))
    crowd.things.append(thing)


# Trees --------------------------------------------------------------------------------------------


def place_trees(dice: Dice, crowd: Crowd) -> None:
    """Puts rows of trees along the kerb, bushes in gardens, and more trees in parks."""
    street = crowd.street
    for sign, verge in street.verges:
        likely = {"town": 0.25, "houses": 0.45, "park": 0.7}[verge.kind]
        rows = [(verge.road + max(0.5 * verge.grass, 0.7), likely + 0.3 * (verge.grass > 0), 1.0)]
        if verge.garden > 0:
            rows.append((verge.line - 0.5 * verge.garden, 0.6, 0.55))
        if verge.kind == "park":
            rows += [(verge.line + 4, 0.7, 1.0), (verge.line + 10, 0.7, 1.0)]
        for side, likely, size in rows:
            z = dice(4, 10)
            while z < 50:
                offset = dice(-0.3, 0.3)
                if dice.chance(likely * crowd.style.density) and street.free(z, 2):
                    _add_tree(dice, crowd, sign * (side + offset), z, size)
                z += dice(6, 12) * (0.7 if size < 1 else 1)


@dataclass(kw_only=True)
class _Tree(Figure):
    """A trunk and a crown of leaves."""

    middle: float
    """Height of the crown's centre."""
    radius: float
    """Half the width of the crown."""
    upright: float
    """Half its height."""
    green: Colour
    ragged: float
    """How far its edge departs from an ellipse."""
    offset: tuple[int, ...]
    """Where in the noise its lumps and leaves lie: row and column of either."""

    def paint(self, view: View) -> None:
        """Draws the trunk, then the crown over it."""
        super().paint(view)
        u, v, scale = view.camera.foot(self.x, self.z)
        v -= scale * self.middle
        a, b = scale * self.radius, scale * self.upright
        height, width = view.label.shape
        left, right = max(int(u - 1.4 * a), 0), min(int(u + 1.4 * a) + 1, width)
        top, bottom = max(int(v - 1.4 * b), 0), min(int(v + 1.4 * b) + 1, height)
        if left >= right or top >= bottom:
            return
        x = (view.columns[left:right] - np.float32(u)) / np.float32(a)
        y = (view.rows[top:bottom] - np.float32(v)) / np.float32(b)
        # Forty steps of the tile to a radius make a crown as lumpy near as far; leaves have a size.
        lumps = crop(lumps_tile(), 40 * y + self.offset[0], 40 * x + self.offset[1])
        leaf = 40 / scale
        leaves = crop(grain_tile(), leaf * b * y + self.offset[2], leaf * a * x + self.offset[3])
        edge = (1 - y * y)[:, None] - x * x
        edge += np.float32(self.ragged) * lumps
        alpha = edge * np.float32(0.35 * min(a, b)) + np.float32(0.5)
        np.clip(alpha, 0, 1, out=alpha)
        sun = 0.5 + 0.5 * self.lit if view.light.sunny else 0.85
        slope = (0.18 * self.lit if view.light.sunny else 0.04) * view.light.sun[0]
        shade = (0.92 - 0.22 * y)[:, None] + np.float32(slope) * x
        texture = np.float32(view.style.texture)
        shade += (0.14 * texture) * lumps
        shade += (0.2 * texture) * leaves
        shade *= np.float32(sun)
        np.clip(shade, 0.12, 1.8, out=shade)
        region = view.image[top:bottom, left:right]
        green = hazed(self.green, self.depth)
        blended = []
        for old, level in zip(cv2.split(region), green, strict=True):
            new = shade * np.float32(level)
            new -= old
            new *= alpha
            new += old
            blended.append(cv2.convertScaleAbs(new))
        region[...] = cv2.merge(blended)
        leafy = view.piece(VEGETATION, self.depth)
        view.pieces[top:bottom, left:right][alpha > 0.5] = leafy


_ROUND = np.arange(24) * (2 * math.pi / 24)


def _ragged_circle(x: float, z: float, radius: float, offset: Sequence[int]) -> Floats:
    """Outline (24, 2) around (x, z) of a crown as the sun sees it."""
    rough = lumps_tile()[offset[0], (offset[1] + 10 * np.arange(24)) & 255]
    away = np.float32(radius) * (1 + np.float32(0.1) * rough)
    outline = np.stack([x + away * np.cos(_ROUND), z + away * np.sin(_ROUND)], 1)
    return outline.astype(np.float32)


def _add_tree(dice: Dice, crowd: Crowd, side: float, z: float, size: float) -> None:
    """A tree or, where ``size`` is below 1, often a bush."""
    variety = crowd.style.colour
    tall, wide, clear = dice(5.0, 9.0) * size, dice(0.26, 0.4), dice(0.26, 0.4)
    bushy, ragged = dice.chance(0.6), dice(0.25, 0.42)
    green = dice.vary(dice.pick(LEAVES), 0.14 * variety)
    bark = dice.vary((78, 66, 54), 0.12 * variety)
    offset = tuple(dice.whole(256) for _ in range(4))
    if size < 1 and bushy:
        tall, wide, clear = 0.4 * tall, 0.6, 0.05
    x, z, depth = crowd.place(side, z)
    if depth < 3.5 or not crowd.seen(depth, 0.7 * tall):
        return
    radius, middle = wide * tall, (0.5 + 0.5 * clear) * tall
    lit = crowd.lit(side, z, 0.6 * tall)
    half = 0.03 * tall
    stem = ((-half, 0.0), (half, 0.0), (0.7 * half, middle), (-0.7 * half, middle))
    colour = times(bark, crowd.light.on(0.6 * lit))
    thing = _Tree(
        *(x, z, depth, 1.4 * radius, lit),
        parts=[Part(np.array(stem, np.float32), colour, VEGETATION)],
        middle=middle,
        radius=radius,
        upright=0.56 * (1 - clear) * tall,
        green=green,
        ragged=ragged,
        offset=offset,
    )
    foot = 0.25 if clear > 0.1 else 0.8 * radius
    crowd.stands.append(Footprint(x, z, 0.0, 0.0, radius=foot))
    thing.contacts.append(circle(x, z, foot))
    thing.shadows.append((crowd.thrown(_ragged_circle(x, z, radius, offset), middle), 210))
    thing.shadows.append((crowd.streak(x, z, half, middle), 230))
    crowd.things.append(thing)


# Street furniture ---------------------------------------------------------------------------------


def place_furniture(dice: Dice, crowd: Crowd) -> None:
    """Puts lamps, signs and traffic lights beside the kerb."""
    street, density = crowd.street, crowd.style.density
    for sign, verge in street.verges:
        side = sign * (verge.road + 0.45)
        z, apart, tall = dice(4, 12), dice(10, 18), dice(5, 7.5)
        if dice.chance(0.75 * density):
            while z < 40:
                if street.free(z):
                    _add_lamp(dice, crowd, side, z, tall, -sign)
                z += apart
        for _ in range(3):
            z, shift = dice(4.5, 24), dice(0, 0.5)
            if dice.chance(0.6 * density) and street.free(z, 1):
                _add_sign(dice, crowd, side + sign * shift, z)
        luck, z = dice(), dice(7, 20)
        at = street.crossing[0] - 1.0 if street.crossing is not None else street.zebra
        if at is not None and luck < 0.85 * density:
            _add_traffic_lights(dice, crowd, side, at, -sign)
        elif at is None and luck < 0.3 * density:
            _add_traffic_lights(dice, crowd, side, z, -sign)


_METAL: tuple[Colour, ...] = ((112, 116, 118), (84, 88, 90), (140, 142, 142), (64, 74, 68))
_RED, _BLUE, _WHITE, _YELLOW, _BLACK = (
    *((190, 30, 34), (34, 74, 160), (232, 232, 228), (224, 176, 40), (40, 40, 44)),
)
_TRIANGLE = np.array(((-0.9, -0.7), (0.9, -0.7), (0.0, 0.95)), np.float32)
_DIAMOND = np.array(((-1.0, 0.0), (0.0, -1.0), (1.0, 0.0), (0.0, 1.0)), np.float32)
_SQUARE = np.array(((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)), np.float32)
_BOARD = _SQUARE * np.array((1.4, 0.65), np.float32)
_BAR = _SQUARE * np.array((0.75, 0.18), np.float32)
_ARROW = _SQUARE * np.array((0.2, 0.6), np.float32)
_OCTAGON = np.array(
    [(math.cos(math.pi * (i + 0.5) / 4), math.sin(math.pi * (i + 0.5) / 4)) for i in range(8)],
    np.float32,
)

# Plates of a sign from back to front: shape, scale, colour.
_SIGNS: tuple[tuple[tuple[Floats, float, Colour], ...], ...] = (
    ((CIRCLE, 1.0, _RED), (CIRCLE, 0.7, _WHITE)),
    ((CIRCLE, 1.0, _RED), (_BAR, 1.0, _WHITE)),
    ((CIRCLE, 1.0, _BLUE), (_ARROW, 1.0, _WHITE)),
    ((_TRIANGLE, 1.2, _RED), (_TRIANGLE, 0.72, _WHITE)),
    ((_DIAMOND, 1.2, _WHITE), (_DIAMOND, 0.92, _YELLOW)),
    ((_OCTAGON, 1.08, _RED), (_BAR, 1.0, _WHITE)),
    ((_SQUARE, 0.9, _BLUE), (_TRIANGLE, 0.65, _WHITE)),
    ((_BOARD, 1.1, _YELLOW), (_BAR, 1.2, _BLACK)),
    ((_BOARD, 1.1, _BLUE), (_BAR, 1.2, _WHITE)),
)

# Red, amber and green, lit and dark.
_LAMPS: tuple[tuple[Colour, Colour], ...] = (
    ((255, 60, 50), (80, 26, 26)),
    ((255, 196, 60), (84, 66, 28)),
    ((70, 240, 150), (22, 70, 50)),
)


def _rectangle(left: float, right: float, bottom: float, top: float) -> Floats:
    return np.array(((left, bottom), (right, bottom), (right, top), (left, top)), np.float32)


def _pole(crowd: Crowd, side: float, z: float, tall: float, metal: Colour) -> Figure | None:
    """A pole to put more parts on, if it is near enough to be drawn."""
    style = crowd.style
    if not crowd.seen(crowd.place(side, z)[2], style.pole_width, style.thinnest):
        return None
    stand = crowd.stand(side, z, 0.15 + 0.5 * style.pole_width)
    if stand is None or not crowd.seen(stand[2], style.pole_width, style.thinnest):
        return None
    x, z, depth = stand
    half, lit = 0.5 * crowd.style.pole_width, crowd.lit(side, z, 0.5 * tall)
    thing = Figure(x, z, depth, 4.0, lit)
    # A round pole is brighter on the side of the sun.
    dark, bright = crowd.light.on(0.1), crowd.light.on(0.9 * lit)
    if crowd.light.sun[0] < 0:
        dark, bright = bright, dark
    thing.parts = [
        Part(_rectangle(-half, half, 0.0, tall), times(metal, dark), POLE),
        Part(_rectangle(0.0, half, 0.0, tall), times(metal, bright), POLE),
    ]
    thing.shadows.append((crowd.streak(x, z, 0.7 * half, tall), 255))
    thing.contacts.append(circle(x, z, 1.5 * half))
    crowd.things.append(thing)
    return thing


def _add_lamp(dice: Dice, crowd: Crowd, side: float, z: float, tall: float, inward: int) -> None:
    arm, half = inward * dice(0.8, 1.8), 0.5 * crowd.style.pole_width
    metal = dice.vary(dice.pick(_METAL), 0.12 * crowd.style.colour)
    thing = _pole(crowd, side, z, tall, metal)
    if thing is None:
        return
    up, end = tall + 0.25, arm + 0.75 * inward
    stem = ((0, tall - half), (arm, up - half), (arm, up + half), (0, tall + half))
    head = ((arm, up - 0.2), (end, up - 0.14), (end, up + 0.1), (arm, up + 0.18))
    bright = crowd.light.on(0.7 * thing.lit)
    thing.parts += [
        Part(np.array(stem, np.float32), times(metal, bright), POLE),
        Part(np.array(head, np.float32), times((176, 178, 178), bright), POLE),
    ]


def _add_sign(dice: Dice, crowd: Crowd, side: float, z: float) -> None:
    tall, size, plates = dice(2.3, 3.0), dice(0.42, 0.56), dice.pick(_SIGNS)
    metal = dice.vary(dice.pick(_METAL), 0.12 * crowd.style.colour)
    worn = 0.12 * dice.bell() * crowd.style.colour
    thing = _pole(crowd, side, z, tall, metal)
    if thing is None:
        return
    light = crowd.light.on(0.3 + 0.5 * thing.lit)
    middle = np.array((0.0, tall + 0.3 * size), np.float32)
    for shape, scale, colour in plates:
        r, g, b = times(colour, light)
        faded = (r * (1 + worn), g * (1 + worn), b * (1 + worn))
        thing.parts.append(Part(shape * np.float32(size * scale) + middle, faded, TRAFFIC_SIGN))


def _add_traffic_lights(dice: Dice, crowd: Crowd, side: float, z: float, inward: int) -> None:
    tall, reach = dice(3.2, 4.2), inward * dice(1.6, 3.0)
    phase, overhead = dice.whole(3), dice.chance(0.4)
    metal = dice.vary(dice.pick(_METAL), 0.12 * crowd.style.colour)
    box = dice.vary((34, 38, 38), 0.2 * crowd.style.colour)
    top = tall + 1.6 if overhead else tall
    thing = _pole(crowd, side, z, top, metal)
    if thing is None:
        return
    light = crowd.light.on(0.5 * thing.lit)
    heads = [(0.0, 0.62 * tall)]
    if overhead:
        arm = _rectangle(min(0.0, reach), max(0.0, reach), top - 0.2, top)
        thing.parts.append(Part(arm, times(metal, light), POLE))
        heads.append((reach, top - 1.3))
    for right, foot in heads:
        outline = _rectangle(right - 0.24, right + 0.24, foot, foot + 1.3)
        thing.parts.append(Part(outline, times(box, light), TRAFFIC_LIGHT))
        for i, (on, off) in enumerate(_LAMPS):
            lens = circle(right, foot + 1.08 - 0.43 * i, 0.16)
            thing.parts.append(Part(lens, on if i == phase else off, TRAFFIC_LIGHT))
