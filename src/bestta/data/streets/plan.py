"""The plan of the street: how its lanes, verges and crossings lie, and which walls rise from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from bestta.data.streets.light import Light
from bestta.data.streets.scene import BUILDING, VEGETATION, Colour, Dice, Floats, Style

VergeKind = Literal["town", "houses", "park"]

Ends = tuple[float, float, float, float]
"""X and Z of one end of a wall, then of the other."""

_KINDS: tuple[VergeKind, ...] = ("town",) * 11 + ("houses",) * 5 + ("park",) * 4


@dataclass
class Verge:
    """One side of the road: grass, pavement, garden, then the building line."""

    road: float
    """Metres from the centre line to the kerb; the other widths follow from there outwards."""
    grass: float
    pavement: float
    garden: float
    kind: VergeKind
    heights: Floats = field(default_factory=lambda: np.zeros(256, np.float32))
    """Height of the buildings by whole metres of Z, from 0: what casts shadows on the road."""

    @classmethod
    def draw(cls, dice: Dice, road: float) -> Verge:
        """A verge beside a road of this half width."""
        kind = dice.pick(_KINDS)
        has_grass = dice.chance(0.4)
        has_garden = dice.chance(0.25 if kind == "town" else 0.85)
        grass, pavement, garden = dice(1.4, 2.8), dice(2.2, 4.4), dice(2.0, 5.0)
        return cls(road, grass * has_grass, pavement, garden * has_garden, kind)

    @property
    def line(self) -> float:
        """Metres from the centre line to the buildings."""
        return self.road + self.grass + self.pavement + self.garden


@dataclass
class Street:
    """The ground plan."""

    lane: float
    """Width of a lane."""
    lanes: int
    """Lanes in each direction."""
    bend: float
    """Curvature of the centre line, in 1 / metres."""
    end: float
    """Z of the last buildings, which close the view."""
    left: Verge
    right: Verge
    parking: tuple[bool, bool]
    """Whether cars may park on the left, and on the right."""
    crossing: tuple[float, float] | None
    """Where a side street begins and ends along Z."""
    zebra: float | None
    """Where a pedestrian crossing begins."""
    dashed: bool
    """Whether the centre line is."""
    camera_side: float
    """The middle of the lane that the camera is in."""

    @classmethod
    def draw(cls, dice: Dice) -> Street:
        """Some street."""
        lane = dice(3.1, 3.7)
        lanes = 1 if dice.chance(0.75) else 2
        parking = (dice.chance(0.6), dice.chance(0.6))
        begin, breadth = dice(11, 34), dice(6.0, 9.5)
        crosses = dice.chance(0.45)
        zebra_at, zebra_chance = dice(7, 22), dice()
        zebra = None
        if crosses and zebra_chance < 0.65:
            zebra = begin - 4.6
        elif not crosses and zebra_chance < 0.25:
            zebra = zebra_at
        return cls(
            lane,
            lanes,
            bend=0.0016 * dice.bell(),
            end=dice(70, 150),
            left=Verge.draw(dice, lane * lanes + (2.3 if parking[0] else 0.3)),
            right=Verge.draw(dice, lane * lanes + (2.3 if parking[1] else 0.3)),
            parking=parking,
            crossing=(begin, begin + breadth) if crosses else None,
            zebra=zebra,
            dashed=dice.chance(0.8),
            camera_side=lane * (0.5 if dice.chance(0.7) else lanes - 0.5),
        )

    @property
    def verges(self) -> tuple[tuple[int, Verge], tuple[int, Verge]]:
        """Left and right, each with the sign of ``side`` there."""
        return (-1, self.left), (1, self.right)

    def x(self, side: float, z: float) -> float:
        """X of the point ``side`` metres right of the centre line at ``z``."""
        return side + 0.5 * self.bend * z * z

    def along(self, side: float, z: float, length: float) -> Ends:
        """A line from ``z`` on that keeps its distance from the centre line."""
        return self.x(side, z), z, self.x(side, z + length), z + length

    def free(self, z: float, margin: float = 0.0) -> bool:
        """Whether ``z`` lies outside of the side street."""
        if self.crossing is None:
            return True
        return not self.crossing[0] - margin < z < self.crossing[1] + margin

    def shadow_height(self, side: Any, z: Any, light: Light) -> Any:
        """Up to which height the shadow of the buildings reaches; numbers or arrays.

        Negative where level ground is in the sun.
        """
        towards, along = light.sun
        if not light.sunny or abs(towards) < 0.15:
            return side * 0 - 1
        verge = self.right if towards > 0 else self.left
        reach = (verge.line - side * math.copysign(1, towards)) / abs(towards)
        index = np.clip(z + reach * along, 0, 255).astype(np.int32)
        return verge.heights.take(index) - reach * np.float32(light.tangent)


class Wall(NamedTuple):
    """An upright rectangle from (x0, z0) to (x1, z1), with what its surface looks like."""

    x0: float
    z0: float
    x1: float
    z1: float
    height: float
    """Up to the ridge of the roof, if the wall carries one."""
    label: int
    colour: Colour
    roof: Colour
    gable: float = 0.0
    """How much higher the middle is than the ends."""
    roof_height: float = 0.0
    """How much of the height is roof."""
    bay: float = 1.0
    """Metres from window to window."""
    storey: float = 1.0
    """Metres from floor to floor."""
    window_width: float = -1.0
    """Half the width of a window as a share of the bay; negative for a wall without windows."""
    window_height: float = -1.0
    """Half the height of a window as a share of the storey."""
    shop: bool = False
    """Whether there are shop windows on the ground floor."""
    trim: float = 1.0
    """Brightness of window frames, relative to the wall's."""
    glass: float = 0.0
    """How bright windows are, and how much they differ."""


_PLASTER: tuple[Colour, ...] = (
    *((214, 200, 172), (196, 178, 150), (176, 172, 166), (206, 186, 176), (190, 164, 120)),
    *((158, 92, 72), (136, 82, 66), (172, 120, 92), (150, 156, 162), (222, 218, 208)),
    *((120, 118, 116), (184, 190, 182), (170, 148, 140), (142, 128, 110)),
)
_ROOFS: tuple[Colour, ...] = ((120, 66, 52), (84, 80, 82), (98, 72, 62), (70, 74, 82))
LEAVES: tuple[Colour, ...] = (
    *((66, 92, 40), (84, 108, 48), (54, 82, 44), (96, 112, 50), (74, 98, 60), (108, 112, 56)),
)
"""Colours of hedges and trees."""


def plan_walls(dice: Dice, street: Street, style: Style) -> list[Wall]:
    """Everything upright and still, from the camera to the end of the street.

    Buildings enter themselves into the ``heights`` of their verge.
    """
    walls: list[Wall] = []
    for sign, verge in street.verges:
        if verge.kind == "park":
            walls += _hedge(dice, street, sign * (verge.line + 0.3), style)
        else:
            walls += _row(dice, street, verge, sign, style)
        # A second row closes the view through gaps.
        far = sign * (verge.line + dice(16, 28))
        for z in range(-10, math.ceil(street.end), 32):
            ends, tall = street.along(far, z, 32), dice(5, 11)
            if verge.kind == "park" or dice.chance(0.6):
                walls.append(_foliage(dice, ends, tall, style))
            else:
                walls.append(_facade(dice, ends, tall, _paints(dice, style), roof_height=2.0))
    x = -110.0
    while x < 110:
        breadth, tall = dice(12, 30), dice(6, 24)
        ends = (x, street.end, x + breadth, street.end + dice(-4, 4))
        if dice.chance(0.4):
            walls.append(_foliage(dice, ends, 0.55 * tall, style))
        else:
            walls.append(_facade(dice, ends, tall, _paints(dice, style), roof_height=1.5))
        x += breadth
    return walls


def _row(dice: Dice, street: Street, verge: Verge, sign: int, style: Style) -> list[Wall]:
    """The buildings of one side, with gaps where the side street and the gardens are."""
    walls: list[Wall] = []
    town = verge.kind == "town"
    z = -dice(2, 10)
    usual = dice(2.5, 5.5) if town else 2.0
    while z < street.end:
        breadth, floors, gap, gap_chance = dice(8, 22), dice(-1, 1.9), dice(3, 9), dice()
        storey, roof_chance, roof = dice(2.8, 3.4), dice(), dice(1.5, 3.0)
        setback, blank, gable = dice(), dice.chance(0.5), dice(1.5, 3.0)
        paints = _paints(dice, style)
        if town:
            line, gable = verge.line + 0.6 * setback, 0.0
            roof *= roof_chance < 0.55
        else:
            line, breadth, floors = verge.line + 1.5 * setback, 0.6 * breadth, 0.5 * floors
        height = storey * max(round(usual + floors), 1) + 0.6
        if street.crossing is not None:
            begin, end = street.crossing[0] - 2.5, street.crossing[1] + 2.5
            if z < end and z + breadth > begin:
                # What would stand in the side street ends before it, or else begins after it.
                if begin - z < 5:
                    z = end
                else:
                    breadth = begin - z
        front = street.along(sign * line, z, breadth)
        flank = (front[0], z, front[0] + sign * 12, z)
        top = height + roof
        walls.append(_facade(dice, front, top, paints, roof_height=roof, storey=storey))
        walls.append(
            _facade(dice, flank, height, paints, blank=blank, storey=storey, gable=gable + roof)
        )
        verge.heights[max(int(z), 0) : max(int(z + breadth), 0)] = top
        z += breadth
        if not town or gap_chance < 0.15:
            z += gap
    return walls


def _hedge(dice: Dice, street: Street, side: float, style: Style) -> list[Wall]:
    """Now and then a park begins with a hedge."""
    tall = dice(0.9, 1.6)
    if not dice.chance(0.5):
        return []
    return [
        _foliage(dice, street.along(side, z, 12), tall, style)
        for z in range(-2, 74, 12)
        if z < street.end - 12 and street.free(z + 6, 8)
    ]


def _facade(
    dice: Dice,
    ends: Ends,
    height: float,
    paints: tuple[Colour, Colour],
    *,
    roof_height: float = 0.0,
    blank: bool = False,
    storey: float = 3.0,
    gable: float = 0.0,
) -> Wall:
    bay, shop, trim, glass = dice(2.2, 3.8), dice.chance(0.5), dice(0.85, 1.3), dice(0.2, 0.6)
    window_width, window_height = dice(0.2, 0.36), dice(0.24, 0.36)
    return Wall(
        *(*ends, height, BUILDING, *paints, gable, roof_height, bay, storey),
        window_width=-1.0 if blank else window_width,
        window_height=-1.0 if blank else window_height,
        shop=shop and not blank,
        trim=trim,
        glass=glass,
    )


def _foliage(dice: Dice, ends: Ends, height: float, style: Style) -> Wall:
    green = dice.vary(dice.pick(LEAVES), 0.12 * style.colour)
    return Wall(*ends, height, VEGETATION, green, green)


def _paints(dice: Dice, style: Style) -> tuple[Colour, Colour]:
    """Colours of a building's walls and of its roof."""
    wall = dice.vary(dice.pick(_PLASTER), 0.14 * style.colour)
    return wall, dice.vary(dice.pick(_ROOFS), 0.15 * style.colour)
