"""The backdrop: the sky, and the façades and hedges that the ray of each image column meets."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import cv2
import numpy as np

from bestta.data.streets.light import HAZE, HAZE_DISTANCE
from bestta.data.streets.plan import Street, Wall
from bestta.data.streets.scene import VEGETATION, Dice, Floats
from bestta.data.streets.view import View, coverage, grain_tile, lumps_tile, sample

_LAYERS = 4
"""So many walls behind one another are looked at; those further back rise above few others."""

_NO_LAYER = 255

_MISSED = 1000.0
"""Depth of a wall that the ray does not meet: beyond all walls, yet a number to compute with."""

_GLASS = (132, 146, 160)
"""What a bright window reflects."""


def paint_sky(view: View, dice: Dice) -> None:
    """Paints the sky down to the horizon."""
    camera, light = view.camera, view.light
    last = min(int(camera.horizon) + 1, camera.height)
    zenith = np.array(dice.vary((88, 136, 204), 0.08 * view.style.colour), np.float32)
    low = np.array(dice.vary((204, 216, 228), 0.04 * view.style.colour), np.float32)
    bright, shift_rows, shift_columns = dice(0.85, 1.08), dice(0, 256), dice(0, 256)
    cloud = np.array((234, 236, 240), np.float32)
    if not light.sunny:
        cloud = np.array((204, 209, 214), np.float32) * np.float32(bright)
    # The sky has no edges: half the resolution shows all of it.
    above = (camera.horizon - view.rows[:last:2]) / np.float32(camera.focal)
    blue = np.sqrt(np.clip(above * 2, 0, 1))
    # Clouds are a ceiling: towards the horizon they are seen at a flatter angle.
    far = 12 / (above + 0.12)
    across = (view.columns[::2] - camera.width / 2) / np.float32(camera.focal)
    rows = np.broadcast_to((far + shift_rows)[:, None], (len(far), len(across)))
    # Places are cut off towards zero; sixteen tiles more keep them on one side of it.
    columns = np.outer(far, across) + np.float32(shift_columns + 4096)
    lumps: Any = sample(lumps_tile(), rows, columns)
    lumps = cv2.GaussianBlur(lumps, (0, 0), max(camera.height / 128, 0.5))
    cover = np.clip((lumps + np.float32(2.6 * light.clouds - 1.2)) * np.float32(0.8), 0, 1)
    shade = 1 + np.float32(0.04 * view.style.texture) * lumps
    planes = []
    for lower, upper, white in zip(low, zenith, cloud, strict=True):
        clear = (lower + blue * (upper - lower))[:, None]
        planes.append(cv2.convertScaleAbs((clear + cover * (white - clear)) * shade))
    view.image[:last] = cv2.resize(cv2.merge(planes), (camera.width, last))


def paint_walls(view: View, walls: list[Wall], street: Street) -> None:
    """Paints what the rays meet.

    Most of a façade depends on the column alone, and is worked out there (layers, W); only what
    depends on the height is worked out for each pixel (N,).
    """
    camera, light = view.camera, view.light
    # One row for each number of a wall; its colours, fields 6 and 7, are looked up at the end.
    table = np.array([(*w[:6], *w[8:], _facing(w, view)) for w in walls], np.float32).T
    hits = _cast(view, table)
    view.nearest = hits.depth[0]
    columns = _columns(view, street, table, hits)
    layer = _front_layer(view, hits)

    at = np.flatnonzero(layer != _NO_LAYER)
    rows, column_of = _places(camera.width, camera.height)
    cell = layer.ravel()[at].astype(np.int32) * camera.width + column_of[at]
    seen = _Surface(*columns.reshape(len(columns), -1).take(cell, 1))
    scale = seen.scale
    wall = seen.wall.astype(np.int32)
    height = np.float32(camera.above) - (rows[at] - np.float32(camera.horizon)) / scale
    view.depth.ravel()[at] = seen.depth
    label = table[5].astype(np.uint8)[wall]
    view.label.ravel()[at] = label

    # Storeys, and the windows in them.
    storeys = height * seen.per_storey
    level = np.floor(storeys)
    storeys -= level
    lowest = level < 1
    below_eaves = (seen.eaves - height) * scale
    on_roof = (below_eaves < 0) & (seen.has_roof > 0)
    tall = scale / seen.per_storey
    half_height = np.where(lowest, seen.low_height, seen.half_height)
    middle = storeys - np.float32(0.52)
    open_wall = np.clip(below_eaves - 0.25 * scale, 0, 1)
    pane = coverage(middle, half_height, tall)
    pane = pane * np.where(lowest, seen.low_pane, seen.pane) * open_wall
    frame = coverage(middle, half_height + np.float32(0.04), tall)
    frame *= np.where(lowest, seen.low_frame, seen.frame) * open_wall

    # Plaster with a ledge under each storey, tiles on the roof, leaves on hedges.
    texture = np.float32(view.style.texture)
    grain = sample(grain_tile(), height * 40, seen.along * 40 + seen.wall * 71)
    lumps = sample(lumps_tile(), height * 8 + seen.wall * 31, seen.along * 8)
    near = np.minimum(scale / 14, 1) * texture
    shade = 1 + near * (np.float32(0.05) * grain + np.float32(0.05) * lumps)
    shade *= 1 + seen.trim * frame
    shade -= np.float32(0.1) * (storeys * tall < 1)
    tiles = np.float32(0.12) * near * ((height * 4).astype(np.int32) & 1)
    shade = np.where(on_roof, shade - tiles, shade)
    tuft = np.float32(0.72) + (np.float32(0.2) * grain + np.float32(0.15) * lumps) * texture
    tuft += np.float32(0.25) * np.minimum(height / np.maximum(seen.eaves, 0.5), 1)
    shade = np.where(label == VEGETATION, tuft, shade)

    sunlit = seen.facing * np.clip((height - seen.shadow) * 2 + np.float32(0.5), 0, 1)
    luck = sample(grain_tile(), seen.window, level * 29)
    luck = np.float32(0.3) + seen.glass * (np.float32(0.6) + np.float32(0.5) * luck)
    luck = np.clip(luck, 0.12, 1.1)
    palette = np.array([w.colour for w in walls] + [w.roof for w in walls], np.float32)
    paint = wall + len(walls) * on_roof
    air = seen.depth / (seen.depth + np.float32(HAZE_DISTANCE))
    planes = []
    for i, glass in enumerate(_GLASS):
        colour = palette[:, i].take(paint) * shade
        colour += pane * (luck * np.float32(glass) - colour)
        colour *= np.float32(light.ambient[i]) + np.float32(light.direct[i]) * sunlit
        colour += air * (np.float32(HAZE[i]) - colour)
        planes.append(np.clip(colour, 0, 255))
    view.image.reshape(-1, 3)[at] = np.stack(planes, 1).astype(np.uint8)


def _facing(wall: Wall, view: View) -> float:
    """How the side of the wall that the camera sees is turned to the sun."""
    normal_x, normal_z = wall.z1 - wall.z0, wall.x0 - wall.x1
    length = math.hypot(normal_x, normal_z)
    if normal_x * (view.camera.x - wall.x0) - normal_z * wall.z0 < 0:
        length = -length
    return view.light.facing(normal_x / length, normal_z / length)


class _Hits(NamedTuple):
    """What the ray of each column meets, nearest first: arrays (layers, W)."""

    depth: Floats
    scale: Floats
    """Pixels per metre."""
    wall: Any
    """Number of the wall."""
    along: Floats
    """Metres from the wall's first end."""
    top: Floats
    """Height of the wall there."""


def _cast(view: View, table: Floats) -> _Hits:
    """Intersects the ray of each column with the walls in the ground plan."""
    x0, z0, x1, z1, height, label, gable, roof_height = table[:8, :, None]
    edge_x, edge_z = x1 - x0, z1 - z0
    from_x, from_z = x0 - np.float32(view.camera.x), z0
    cross = view.ray_x * edge_z - view.ray_z * edge_x
    cross[np.abs(cross) < 1e-6] = 1e-6
    away = (from_x * edge_z - from_z * edge_x) / cross
    share = (from_x * view.ray_z - from_z * view.ray_x) / cross
    away[(share < 0) | (share > 1) | (away < 0.3)] = _MISSED
    columns = np.arange(view.camera.width)
    walls, depths = [], []
    for _ in range(_LAYERS):
        index = away.argmin(0)
        walls.append(index)
        depths.append(away[index, columns])
        away[index, columns] = _MISSED
    wall = np.stack(walls)
    depth: Floats = np.stack(depths)
    share = np.clip(share[wall, columns], 0, 1)
    length = np.hypot(edge_x, edge_z)[wall, 0]
    along = share * length
    top = height[wall, 0] + gable[wall, 0] * (1 - np.abs(2 * share - 1))
    # Roofs are hipped: they lean back towards the ends as well.
    top -= np.maximum(roof_height[wall, 0] - np.minimum(along, length - along), 0)
    # Hedges are not cut straight.
    bumps = sample(lumps_tile(), along * 6, wall * 37)
    top *= 1 + np.float32(0.16) * bumps * (label == VEGETATION)[wall, 0]
    scale: Floats = np.float32(view.camera.focal) / depth
    return _Hits(depth, scale, wall, along, top)


def _front_layer(view: View, hits: _Hits) -> Any:
    """Which of the walls that its ray meets each pixel shows, (H, W)."""
    horizon, above = view.camera.horizon, np.float32(view.camera.above)
    bottoms = horizon + hits.scale * above
    tops = horizon - hits.scale * (hits.top - above)
    layer = np.full(view.label.shape, _NO_LAYER, np.uint8)
    rows = view.rows[:, None]
    for k in reversed(range(_LAYERS)):
        layer[(rows >= tops[k]) & (rows < bottoms[k]) & (hits.depth[k] < _MISSED)] = k
    return layer


class _Surface(NamedTuple):
    """What a wall looks like in a column: arrays (layers, W), or (N,) once looked up for pixels."""

    depth: Any
    scale: Any
    along: Any
    wall: Any
    eaves: Any
    """Height at which the roof begins."""
    has_roof: Any
    per_storey: Any
    """Storeys per metre."""
    pane: Any
    """How much of the column is window, at the height of a window."""
    frame: Any
    """How much of it is window or frame."""
    half_height: Any
    """Of a window, as a share of the storey."""
    low_pane: Any
    """The same three for the ground floor, which may have a shop or doors."""
    low_frame: Any
    low_height: Any
    window: Any
    """A number that tells a row of windows from its neighbours."""
    trim: Any
    """How much brighter frames are than the wall, 0 being alike."""
    glass: Any
    facing: Any
    shadow: Any
    """Height up to which the wall is in the shadow of the other side of the street."""


def _columns(view: View, street: Street, table: Floats, hits: _Hits) -> Floats:
    """All of :class:`_Surface` for each layer of each column, (fields, layers, W)."""
    wall = hits.wall
    height, roof_height = table[4, wall], table[7, wall]
    bay, storey, half_width, half_height, shop, trim, glass, facing = table[8:, wall]
    place = hits.along / bay
    number = np.floor(place)
    place -= number + np.float32(0.5)
    # Pixels per bay. From one column to the next is ``1 / scale`` metres on a wall that faces the
    # camera, and more on one that is seen at an angle.
    move = np.abs(np.diff(hits.along, axis=1, append=hits.along[:, -2:-1]))
    fine = bay / np.maximum(move, 1 / hits.scale)
    has_shop, windows = shop > 0, half_width > 0
    door = windows & ~has_shop & (number % 4 == 1)
    low_width = np.where(has_shop, np.float32(0.44), np.where(door, np.float32(0.17), half_width))
    low_height = np.where(has_shop, np.float32(0.34), np.where(door, np.float32(0.45), half_height))
    z = hits.depth * view.ray_z
    side = np.float32(view.camera.x) + hits.depth * view.ray_x
    side -= np.float32(0.5 * street.bend) * z * z
    surface = _Surface(
        depth=hits.depth,
        scale=hits.scale,
        along=hits.along,
        wall=wall,
        eaves=height - roof_height,
        has_roof=roof_height > 0,
        per_storey=1 / storey,
        pane=coverage(place, half_width, fine),
        frame=coverage(place, half_width + 0.035, fine),
        half_height=half_height,
        low_pane=coverage(place, low_width, fine),
        low_frame=coverage(place, low_width + 0.035, fine),
        low_height=low_height,
        window=number * 17 + wall * 7,
        trim=trim - 1,
        glass=glass,
        facing=facing,
        shadow=street.shadow_height(side, z, view.light),
    )
    return np.stack(surface).astype(np.float32)


@lru_cache(maxsize=8)
def _places(width: int, height: int) -> tuple[Any, Any]:
    """Row and column of each pixel in reading order, two arrays (H·W,)."""
    row, column = np.divmod(np.arange(width * height, dtype=np.int32), width)
    return row.astype(np.float32), column
