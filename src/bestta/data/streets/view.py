"""The view: where the camera is, the picture while it is painted, and the texture of surfaces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cv2
import numpy as np

from bestta.data.samples import Pixels
from bestta.data.seeds import generator
from bestta.data.streets.light import Light
from bestta.data.streets.scene import SKY, SKY_DEPTH, Colour, Dice, Floats, Style


@dataclass
class Camera:
    """A camera that looks along the road, turned by ``yaw``.

    Pitch is a shift of the horizon, not a rotation, so that upright edges stay upright in the
    image and a wall has one depth per column.
    """

    width: int
    height: int
    focal: float
    """Focal length in pixels."""
    horizon: float
    """Row of the horizon."""
    above: float
    """Metres above the ground."""
    x: float
    yaw: float

    @classmethod
    def draw(cls, dice: Dice, width: int, height: int, style: Style) -> Camera:
        """A camera near the middle of a lane, whose own place is still to be added to ``x``."""
        spread = [dice(-1, 1) * style.camera for _ in range(5)]
        # The geometric mean of both sides keeps as much of the street in view at any proportions.
        unit = math.sqrt(width * height / 2)
        return cls(
            width,
            height,
            focal=unit * max(1.62 + 0.24 * spread[0], 0.5),
            horizon=height * min(max(0.44 + 0.045 * spread[1], 0.2), 0.7),
            above=min(max(1.55 + 0.3 * spread[2], 1.1), 3.0),
            x=0.45 * min(max(spread[3], -1.0), 1.0),
            yaw=0.09 * min(max(spread[4], -3.0), 3.0),
        )

    def rays(self) -> tuple[Floats, Floats]:
        """X and Z gained per metre of depth, for each column: two arrays (W,)."""
        slope = (np.arange(self.width, dtype=np.float32) - (self.width - 1) / 2) / self.focal
        sin, cos = math.sin(self.yaw), math.cos(self.yaw)
        return slope * cos + sin, cos - slope * sin

    def depth(self, x: float, z: float) -> float:
        """Depth of a point of the ground plan."""
        return (x - self.x) * math.sin(self.yaw) + z * math.cos(self.yaw)

    def foot(self, x: float, z: float) -> tuple[float, float, float]:
        """Column and row of a point of the ground, and pixels per metre there."""
        scale = self.focal / self.depth(x, z)
        right = (x - self.x) * math.cos(self.yaw) - z * math.sin(self.yaw)
        return (self.width - 1) / 2 + scale * right, self.horizon + scale * self.above, scale

    def project(self, points: Floats) -> tuple[Floats, Floats]:
        """Columns and rows (N, 2) and depths (N,) of points (N, 3)."""
        sin, cos = math.sin(self.yaw), math.cos(self.yaw)
        x, z = points[:, 0] - self.x, points[:, 2]
        depth = x * sin + z * cos
        scale = self.focal / np.maximum(depth, 0.05)
        pixels = np.empty((len(points), 2), np.float32)
        pixels[:, 0] = (self.width - 1) / 2 + scale * (x * cos - z * sin)
        pixels[:, 1] = self.horizon + scale * (self.above - points[:, 1])
        return pixels, depth


class View:
    """The picture while it is painted: colours, classes and depth as one camera sees them."""

    def __init__(self, camera: Camera, light: Light, style: Style) -> None:
        self.camera, self.light, self.style = camera, light, style
        shape = (camera.height, camera.width)
        self.image = np.zeros((*shape, 3), np.uint8)
        self.label = np.full(shape, SKY, np.uint8)
        self.depth = np.full(shape, SKY_DEPTH, np.float32)
        self.nearest = np.full(camera.width, SKY_DEPTH, np.float32)
        """Depth of the first wall in each column."""
        # Things are drawn into this as numbers of pieces; a piece has one class and one depth.
        # Ground and walls stay in the maps above until the end, to hide what is behind them.
        self.pieces = np.zeros(shape, np.uint16)
        self.piece_label, self.piece_depth = [SKY], [SKY_DEPTH]
        self.rows = np.arange(camera.height, dtype=np.float32)
        self.columns = np.arange(camera.width, dtype=np.float32)
        self.ray_x, self.ray_z = camera.rays()

    def piece(self, label: int, depth: float) -> int:
        """A number for pixels of this class and depth."""
        self.piece_label.append(label)
        self.piece_depth.append(depth)
        return len(self.piece_label) - 1

    def fill(self, outline: Any, colour: Colour, piece: int | None) -> None:
        """Fills a convex polygon (N, 2), given in :func:`sixteenths` of a pixel."""
        cv2.fillConvexPoly(self.image, outline, colour, cv2.LINE_AA, 4)
        if piece is not None:
            cv2.fillConvexPoly(self.pieces, outline, (piece,), cv2.LINE_8, 4)

    def maps(self) -> tuple[Pixels, Floats]:
        """The finished maps of classes and of depth, once all pieces are drawn."""
        drawn = self.pieces > 0
        numbers = self.pieces[drawn]
        self.label[drawn] = np.array(self.piece_label, np.uint8)[numbers]
        self.depth[drawn] = np.array(self.piece_depth, np.float32)[numbers]
        return self.label, self.depth


def sixteenths(pixels: Floats) -> Any:
    """Places in pixels as the fixed-point numbers that OpenCV draws between pixels with."""
    return np.rint(pixels * 16).astype(np.int32)


def coverage(distance: Floats, half: Any, pixels: Any) -> Floats:
    """How much of a pixel a strip covers, 0 to 1; one narrower than the pixel never fills it.

    Args:
        distance: From the strip's middle to the pixel's.
        half: Half the width of the strip.
        pixels: Pixels per unit of the two.
    """
    inside: Floats = half - np.abs(distance)
    inside *= pixels
    inside += np.float32(0.5)
    np.minimum(inside, 2 * half * pixels, out=inside)
    np.clip(inside, 0, 1, out=inside)
    return inside


@lru_cache(maxsize=4)
def _noise(lowest: int, highest: int) -> Floats:
    """A tile (256, 256) of noise that repeats without a seam, of unit variance.

    It has between ``lowest`` and ``highest`` waves to the tile, long ones stronger than short.
    """
    white = generator("streets", "noise", lowest, highest).standard_normal((256, 256))
    pitch = np.hypot(np.fft.fftfreq(256, 1 / 256)[:, None], np.fft.rfftfreq(256, 1 / 256)[None])
    weight = np.where((pitch >= lowest) & (pitch <= highest), 1 / np.maximum(pitch, 1), 0)
    tile = np.fft.irfft2(np.fft.rfft2(white) * weight, (256, 256))
    unit: Floats = (tile / tile.std()).astype(np.float32)
    unit.setflags(write=False)
    return unit


def lumps_tile() -> Floats:
    """Coarse noise: clouds, crowns of trees, stains."""
    return _noise(3, 40)


def grain_tile() -> Floats:
    """Fine noise: leaves, grass, plaster, gravel."""
    return _noise(24, 110)


def sample(tile: Floats, rows: Any, columns: Any) -> Floats:
    """The tile at the given places, repeated for ever."""
    flat = rows.astype(np.int32) & 255
    flat <<= 8
    flat |= columns.astype(np.int32) & 255
    sampled: Floats = tile.ravel().take(flat)
    return sampled


def crop(tile: Floats, rows: Floats, columns: Floats) -> Floats:
    """The tile on an even grid of rows (N,) and columns (M,), repeated for ever: (N, M).

    Where a step of the tile is wider than a pixel, what lies between steps is interpolated.
    """
    down, right = float(rows[-1] - rows[0]), float(columns[-1] - columns[0])
    down, right = down / max(len(rows) - 1, 1), right / max(len(columns) - 1, 1)
    if 0 < down < 1 and 0 < right < 1:
        # A step covers the places from its number to the next one, so its middle is half-way.
        top, left = float(rows[0]) - 0.5, float(columns[0]) - 0.5
        first, before = math.floor(top), math.floor(left)
        height, width = int(down * len(rows)) + 3, int(right * len(columns)) + 3
        steps = tile.take(np.arange(first, first + height) & 255, 0)
        steps = steps.take(np.arange(before, before + width) & 255, 1)
        matrix = np.array(((right, 0, left - before), (0, down, top - first)))
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        between: Any = cv2.warpAffine(steps, matrix, (len(columns), len(rows)), flags=flags)
        interpolated: Floats = between
        return interpolated
    band: Floats = tile.take(rows.astype(np.int32) & 255, 0)
    return band.take(columns.astype(np.int32) & 255, 1)
