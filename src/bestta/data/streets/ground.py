"""The ground: road, pavement and grass, what is painted on them, the shadows that fall there."""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np

from bestta.data.samples import Pixels
from bestta.data.streets.light import HAZE, HAZE_DISTANCE
from bestta.data.streets.plan import Street
from bestta.data.streets.scene import ROAD, SIDEWALK, SKY, TERRAIN, Dice, Floats
from bestta.data.streets.things import Thing
from bestta.data.streets.view import View, coverage, grain_tile, lumps_tile, sample, sixteenths

_FARTHEST = 999.0
"""Depth at which the ground is taken to end. It never does, but numbers should stay useful."""


def paint_ground(view: View, dice: Dice, street: Street, things: list[Thing]) -> None:
    """Paints the ground below the horizon, wherever no wall is."""
    light, style = view.light, view.style
    asphalt = dice.vary((104, 104, 106), 0.16 * style.colour)
    paving = dice.vary((156, 150, 144), 0.13 * style.colour)
    grass = dice.vary((104, 124, 58), 0.15 * style.colour)
    patched, slabs, worn = dice.chance(0.6), np.float32(dice(0.5, 1.2)), np.float32(dice(0.6, 1.0))
    texture = np.float32(style.texture)

    first = int(view.camera.horizon) + 1
    spots = _spots(view, street, first)
    depth, side, z, px, px_away = spots
    beyond = np.abs(side) - _by_side(side, street.left.road, street.right.road)
    label = _classes(street, side, z, beyond)
    on_road, lawn, paved = label == ROAD, label == TERRAIN, label == SIDEWALK
    kerb = ~on_road & (beyond < 0.2)

    grain = sample(grain_tile(), z * 40, side * 40)
    lumps = sample(lumps_tile(), z * 4, side * 8)
    near = np.clip(px_away / 12, 0.1, 1) * texture
    rough = grain * near
    shade = 1 + np.float32(0.06) * rough
    shade += (np.float32(0.045) * texture) * lumps
    shade += lawn * (np.float32(0.11) * rough + np.float32(0.08) * texture * lumps)
    # Slabs: dark joints, and no two slabs alike.
    across, away = side / slabs, z / slabs
    slab = sample(grain_tile(), away + 512, across + 512)
    joint = coverage(away - np.rint(away), np.float32(0.03), px_away * slabs)
    np.maximum(joint, coverage(across - np.rint(across), np.float32(0.03), px * slabs), out=joint)
    pattern = np.clip(px_away / 5, 0, 1) * texture
    shade += paved * pattern * (np.float32(0.045) * slab - np.float32(0.2) * joint)
    # Repairs in the asphalt, the wheel tracks of each lane, and the gutter.
    if patched:
        shade -= (np.float32(0.1) * texture) * (on_road & (lumps > 1.1))
    track = np.abs((np.abs(side) / np.float32(street.lane)) % 1 - np.float32(0.5))
    track = np.maximum(1 - np.abs(track - np.float32(0.24)) * 8, 0)
    shade -= (np.float32(0.05) * texture) * track * on_road
    shade -= np.float32(0.2) * (on_road & (beyond > -0.18) & (beyond < 0))

    white = _markings(street, spots) * on_road * worn
    cast, contact = _shadows(view, things)
    thrown = cast[first:] * np.clip(1 + np.float32(0.25) * grain, 0, 1) * np.float32(1 / 255)
    shaded = np.clip(street.shadow_height(side, z, light) * 2 + np.float32(0.5), 0, 1)
    sun = 1 - np.maximum(thrown, shaded)
    shade *= 1 - contact[first:] * np.float32(light.shadow / 255)
    air = depth / (depth + np.float32(HAZE_DISTANCE))
    surface = np.where(kerb, 3, np.where(on_road, 0, np.where(lawn, 2, 1)))
    planes = []
    for i in range(3):
        stone = min(paving[i] * 1.18, 225)
        palette = np.array((asphalt[i], paving[i], grass[i], stone), np.float32)
        colour = palette.take(surface)
        colour += white * (np.float32(220) - colour)
        colour *= shade
        colour *= np.float32(light.ambient[i]) + np.float32(light.direct[i]) * sun
        colour += air * (np.float32(HAZE[i]) - colour)
        planes.append(cv2.convertScaleAbs(colour))
    free = view.label[first:] == SKY
    cv2.copyTo(cv2.merge(planes), free.view(np.uint8), view.image[first:])
    np.copyto(view.label[first:], label, where=free)
    np.copyto(view.depth[first:], depth, where=free)


class _Spots(NamedTuple):
    """Where on the ground each pixel looks: arrays that broadcast to (rows below horizon, W)."""

    depth: Floats
    side: Floats
    z: Floats
    px: Floats
    """Pixels per metre across the road."""
    px_away: Floats
    """Pixels per metre along the road."""


def _spots(view: View, street: Street, first: int) -> _Spots:
    """What the pixels from row ``first`` on look at."""
    camera = view.camera
    drop = np.float32(camera.focal * camera.above)
    below = view.rows[first:, None] - np.float32(camera.horizon)
    depth: Floats = np.minimum(drop / below, np.float32(_FARTHEST))
    z = depth * view.ray_z
    side = np.float32(camera.x) + depth * view.ray_x
    side -= np.float32(0.5 * street.bend) * (z * z)
    # What is seen at an angle changes with the row as well as with the column, and the faster
    # change counts.
    slant = np.abs(side - np.float32(camera.x)) * np.float32(1 / camera.above)
    px: Floats = np.float32(camera.focal) / depth / np.maximum(np.float32(1), slant)
    return _Spots(depth, side, z, px, px_away=drop / (depth * depth))


def _by_side(side: Floats, left: float, right: float) -> Floats:
    """One number left of the centre line, the other one right of it."""
    return np.where(side > 0, np.float32(right), np.float32(left))


def _classes(street: Street, side: Floats, z: Floats, beyond: Floats) -> Pixels:
    """Train ids of the ground; ``beyond`` is metres outwards from the kerb."""
    verges = (street.left, street.right)
    label = np.full(side.shape, SIDEWALK, np.uint8)
    if any(v.grass for v in verges):
        label[(beyond > 0.2) & (beyond < _by_side(side, *(v.grass for v in verges)))] = TERRAIN
    # Beyond the pavement lies a garden, a lawn or nothing.
    lawns = (v.grass + v.pavement if v.garden or v.kind == "park" else 1e6 for v in verges)
    label[beyond > _by_side(side, *lawns)] = TERRAIN
    if street.crossing is not None:
        begin, end = street.crossing
        label[(z > begin - 2.5) & (z < end + 2.5)] = SIDEWALK
        label[(z > begin) & (z < end)] = ROAD
    label[beyond < 0] = ROAD
    return label


def _markings(street: Street, spots: _Spots) -> Floats:
    """How far each point of the road is painted white, 0 to 1."""
    _, side, z, px, px_away = spots
    half = np.float32(0.07)
    dash = coverage(z % 9 - 2, np.float32(2.0), px_away)
    white = coverage(side, half, px)
    if street.dashed:
        white *= dash
    away = np.abs(side)
    if street.lanes > 1:
        np.maximum(white, coverage(away - np.float32(street.lane), half, px) * dash, out=white)
    edge = coverage(away - np.float32(street.lane * street.lanes), half, px)
    np.maximum(white, edge, out=white)
    if street.crossing is not None:
        begin, end = street.crossing
        white *= (z < begin - 5) | (z > end + 1)
        stop = coverage(z - np.float32(begin - 5.2), np.float32(0.22), px_away)
        np.maximum(white, stop * (side > 0), out=white)
    if street.zebra is not None:
        bars = coverage(side % 1 - np.float32(0.5), np.float32(0.26), px)
        across = coverage(z - np.float32(street.zebra + 1.5), np.float32(1.5), px_away)
        white += across * (bars - white)
    return white


def _shadows(view: View, things: list[Thing]) -> tuple[Pixels, Pixels]:
    """Cast shadows and the shade under objects, as two maps (H, W), 255 being darkest."""
    cast = np.zeros(view.label.shape, np.uint8)
    contact = np.zeros(view.label.shape, np.uint8)
    outlines = [(contact, outline, 255) for thing in things for outline in thing.contacts]
    if view.light.sunny:
        outlines += [(cast, outline, dark) for thing in things for outline, dark in thing.shadows]
    if not outlines:
        return cast, contact
    flat = np.concatenate([outline for _, outline, _ in outlines])
    points = np.zeros((len(flat), 3), np.float32)
    points[:, 0], points[:, 2] = flat[:, 0], flat[:, 1]
    pixels, depths = view.camera.project(points)
    fixed = sixteenths(pixels)
    starts = np.cumsum([0, *(len(outline) for _, outline, _ in outlines)])
    # What reaches beside or behind the camera has no outline in the image.
    whole = np.minimum.reduceat(depths, starts[:-1]) > 0.8
    for i, (target, _, dark) in enumerate(outlines):
        if whole[i]:
            outline = fixed[starts[i] : starts[i + 1]]
            cv2.fillPoly(target, [outline], (dark,), cv2.LINE_AA, 4)
    # The sun is no point: what it throws has soft edges.
    soft = 2 * round(view.camera.height / 128) + 1
    softened: Any = cv2.blur(cast, (soft, soft))
    return softened, contact
