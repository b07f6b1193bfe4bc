"""Frost on a window pane, drawn: crystals that grow inward from the edges, ferns, needles, grain.

The corruption called frost lays such a texture over an image. A few panes are grown from fixed
seeds, once per process and only when asked for; a folder of photographs can stand in for them.

Example:
    >>> panes = textures()
    >>> len(panes), panes[0].shape
    (6, (768, 1024, 3))
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from bestta.data.samples import IMAGE_SUFFIXES, Pixels, UnreadableImage, read_image
from bestta.data.seeds import generator
from bestta.data.trees import found

Floats = np.ndarray[Any, np.dtype[np.float32]]

WIDTH, HEIGHT = 1024, 768
"""The size of a drawn texture."""


@dataclass(frozen=True)
class Pane:
    """How the frost of one pane has grown.

    Attributes:
        mean, deviation: Grey level of the whole texture, and its spread.
        tint: Red, green and blue over grey.
        fans, fern_length: How many fans of feathery crystals, and how long the longest are in
            pixels.
        barb: Length of the finest strokes, which is also the spacing of the branches.
        needles, needle_length: The same for straight splinters.
        from_edges: How strictly crystals start at the edges: 0 anywhere, 1 only there.
        clouds, grain: Deviation of the milky patches and of the fine grain, against that of the
            crystals.
    """

    mean: float
    deviation: float
    tint: tuple[float, float, float]
    fans: int
    fern_length: float
    barb: float
    needles: int
    needle_length: float
    from_edges: float
    clouds: float
    grain: float


# Grey levels and spreads are near those of photographs of frost; the rest is to the eye.
PANES: tuple[Pane, ...] = (
    Pane(135, 24, (0.72, 1.10, 1.18), 110, 260, 6.0, 1200, 80, 0.5, 1.0, 0.55),
    Pane(206, 22, (0.98, 0.99, 1.03), 110, 170, 5.5, 4500, 110, 0.0, 0.45, 0.40),
    Pane(190, 26, (0.96, 1.00, 1.04), 180, 140, 5.5, 3000, 70, 0.2, 0.5, 0.60),
    Pane(152, 30, (0.92, 1.00, 1.08), 200, 100, 4.5, 2000, 40, 0.1, 0.5, 0.80),
    Pane(124, 42, (0.92, 1.00, 1.08), 190, 220, 5.0, 1500, 50, 0.4, 0.5, 0.40),
    Pane(150, 40, (0.88, 1.01, 1.11), 75, 420, 7.5, 1500, 80, 0.9, 0.6, 0.40),
)


def textures(folder: Path | str | None = None) -> tuple[Pixels, ...]:
    """All textures: the drawn ones, or the images in ``folder``, sorted by name.

    Args:
        folder: Holds images of frost; None for the drawn textures.

    Returns:
        RGB images of bytes, (H, W, 3) each. They are shared and cannot be written to.
    """
    if folder is None:
        return tuple(texture(index) for index in range(len(PANES)))
    folder = Path(folder)
    files = sorted(folder.iterdir(), key=lambda path: path.name) if folder.is_dir() else []
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
    # Named with size and time, so that a file that is replaced is read anew.
    stats = [path.stat() for path in images]
    read = _read(tuple(zip(images, ((s.st_size, s.st_mtime_ns) for s in stats), strict=True)))
    if not read:
        raise ValueError(
            f"no readable image of frost in {folder}.\n"
            f"A folder of images ({', '.join(IMAGE_SUFFIXES)}) is expected, found\n{found(folder)}"
        )
    return read


@functools.lru_cache(maxsize=len(PANES))
def texture(index: int) -> Pixels:
    """Drawn texture ``index``, (768, 1024, 3) bytes: the same in every process."""
    pane, rng = PANES[index], generator("frost", index)
    crystals = _standard(_crystals(pane, rng))
    clouds = _standard(_clouds(rng))
    grain = _standard(_grain(rng))
    grey = _standard(crystals + pane.clouds * clouds + pane.grain * grain)
    # Bright tips and dark gaps level off, so that nothing is cut off hard at black or white.
    grey = _standard(np.tanh(0.45 * grey))
    levels = pane.mean + pane.deviation * grey
    # Clear glass takes more of the tint than white ice.
    tint = np.array(pane.tint, dtype=np.float32)
    whiteness = np.clip(levels / 255, 0, 1)[..., None] ** 2
    colour = levels[..., None] * (whiteness + (1 - whiteness) * tint)
    colour *= levels.mean() / colour.mean()
    drawn: Pixels = np.rint(np.clip(colour, 0, 255)).astype(np.uint8)
    drawn.setflags(write=False)
    return drawn


def cut(texture: Pixels, size: tuple[int, int], scale: float, rng: np.random.Generator) -> Pixels:
    """A random piece of ``texture`` at ``scale``, flipped at random.

    Args:
        texture: (H, W, 3) bytes.
        size: (width, height) of the piece.
        scale: Pixels of the piece per pixel of the texture; large enough that the piece fits in.
        rng: Draws the place and the flips.

    Returns:
        (height, width, 3) bytes.
    """
    sides = []
    for whole, part in zip((texture.shape[1], texture.shape[0]), size, strict=True):
        length = min(whole, max(1, round(part / scale)))
        start = int(rng.integers(whole - length + 1))
        sides.append(slice(start, start + length))
    across, down = (1 - 2 * int(flip) for flip in rng.integers(2, size=2))
    # The flips come last in the index: they are views, and nothing is copied but the piece.
    piece = np.ascontiguousarray(texture[sides[1], sides[0]][::down, ::across])
    # Choice: the published code reads between pixels when it shrinks as well. In a photograph that
    # does little harm; fine strokes as drawn here would become film grain, so areas are averaged.
    way = cv2.INTER_CUBIC if scale > 1 else cv2.INTER_AREA
    resized: Pixels = cv2.resize(piece, size, interpolation=way)  # type: ignore[assignment]
    return resized


@functools.lru_cache(maxsize=2)
def _read(images: tuple[tuple[Path, tuple[int, int]], ...]) -> tuple[Pixels, ...]:
    read = []
    for path, _ in images:
        try:
            image = read_image(path)
        except UnreadableImage as error:
            warnings.warn(f"left out of the frost textures: {error}", stacklevel=4)
            continue
        image.setflags(write=False)
        read.append(image)
    return tuple(read)


# ------------------------------------------------------------------------------------- growing


def _crystals(pane: Pane, rng: np.random.Generator) -> Floats:
    """Ferns over needles over clear glass, with the light from above, (H, W)."""
    canvas = np.full((HEIGHT, WIDTH), 60, dtype=np.uint8)
    _draw_needles(canvas, pane, rng)
    _draw_ferns(canvas, pane, rng)
    height = canvas.astype(np.float32)
    # Ridges catch light on one side and lie in shadow on the other.
    shade = _slope(cv2.GaussianBlur(height, (0, 0), 0.8))
    lit: Floats = height - 0.6 * shade
    return lit


def _draw_needles(canvas: Pixels, pane: Pane, rng: np.random.Generator) -> None:
    """Thin triangles in bundles of similar direction, each with a grey of its own."""
    count = pane.needles
    bundles = max(1, count // 12)
    middle = rng.uniform((0, 0), (WIDTH, HEIGHT), (bundles, 2))
    heading = rng.uniform(0, 2 * np.pi, bundles)
    of = rng.integers(bundles, size=count)
    length = pane.needle_length * rng.uniform(0.2, 1, count)
    angle = heading[of] + rng.normal(0, 0.25, count)
    root = middle[of] + rng.normal(0, pane.needle_length * 0.35, (count, 2))
    along = np.stack([np.cos(angle), np.sin(angle)], axis=1) * length[:, None]
    across = np.stack([-along[:, 1], along[:, 0]], axis=1) * rng.uniform(0.02, 0.09, (count, 1))
    corners = np.stack([root - across, root + along, root + across], axis=1)
    corners = np.rint(corners * 16).astype(np.int32)
    greys = rng.integers(50, 170, count)
    for triangle, grey in zip(corners, greys, strict=True):
        cv2.fillConvexPoly(canvas, triangle, int(grey), cv2.LINE_AA, 4)


def _draw_ferns(canvas: Pixels, pane: Pane, rng: np.random.Generator) -> None:
    """Fans of feathers that share a root, the small ones over the large ones."""
    lengths = np.sort(pane.fern_length * rng.uniform(0.15, 1, pane.fans) ** 1.7)[::-1]
    for length in lengths:
        root, heading = _root(pane, rng)
        for turn in rng.normal(0, 0.75, rng.integers(2, 6)):
            own = float(length * rng.uniform(0.5, 1) * np.cos(min(abs(turn), 1.2)))
            _draw_fern(canvas, root, heading + float(turn), own, pane.barb, rng)


def _root(pane: Pane, rng: np.random.Generator) -> tuple[np.ndarray[Any, Any], float]:
    """Where a fern starts and which way it grows: inward from an edge, or anywhere."""
    if rng.random() >= pane.from_edges:
        return rng.uniform((0, 0), (WIDTH, HEIGHT)), float(rng.uniform(0, 2 * np.pi))
    edge = rng.integers(4)
    along = rng.random()
    # Frost creeps in: some of it starts from what has grown before, further from the edge.
    inward = rng.exponential(0.16) - 0.04
    root = [(along, inward), (1 - inward, along), (along, 1 - inward), (inward, along)][edge]
    heading = (0.5, 1.0, 1.5, 0.0)[edge] * np.pi + rng.normal(0, 0.5)
    return np.array(root) * (WIDTH, HEIGHT), float(heading)


def _draw_fern(
    canvas: Pixels,
    root: np.ndarray[Any, Any],
    heading: float,
    length: float,
    barb: float,
    rng: np.random.Generator,
) -> None:
    """A bent stem, branches on both sides and barbs on the branches."""
    grey = float(rng.uniform(85, 165))
    spread = rng.uniform(0.65, 1.0)
    steps = max(5, int(length / (barb * rng.uniform(0.7, 1.1))))
    t = np.arange(steps) / steps
    bend = heading + rng.normal(0, 0.35) * t
    step = np.stack([np.cos(bend), np.sin(bend)], axis=1) * (length / steps)
    stem = root + np.cumsum(step, axis=0)
    # Branches are longest in the lower third and taper to the tip; a few stand out, some are lost.
    reach = length * rng.uniform(0.12, 0.26) * np.sin(np.pi * (0.12 + 0.88 * t) ** 0.75)
    reach = reach[:, None] * rng.uniform(0.35, 1.25, (steps, 2))
    angles = bend[:, None] + spread * np.array([1.0, -1.0]) + rng.normal(0, 0.10, (steps, 2))
    starts = np.repeat(stem[:, None], 2, axis=1)
    ends = starts + reach[..., None] * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    # The ice between the branches dims what is below, so that feathers lie over one another.
    middle = starts + 0.6 * (ends - starts)
    outline = np.concatenate([middle[:, 0], middle[::-1, 1]])
    cv2.fillPoly(canvas, [_fixed(outline)], grey * 0.6, cv2.LINE_AA, 4)
    _draw_lines(canvas, *_barbs(starts, ends, angles, reach, barb, rng), grey)
    _draw_lines(canvas, starts.reshape(-1, 2), ends.reshape(-1, 2), min(255, grey * 1.2))
    cv2.polylines(canvas, [_fixed(stem)], False, min(255, grey * 1.45), 1, cv2.LINE_AA, 4)


def _barbs(
    starts: np.ndarray[Any, Any],
    ends: np.ndarray[Any, Any],
    angles: np.ndarray[Any, Any],
    reach: np.ndarray[Any, Any],
    barb: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Short strokes that lean forward along the branches: their two ends, (N, 2) each."""
    count = (reach / barb).astype(int).ravel()
    branch = np.repeat(np.arange(count.size), count)
    first = np.repeat(np.cumsum(count) - count, count)
    t = (np.arange(branch.size) - first + 0.5) / np.maximum(count[branch], 1)
    a, b = starts.reshape(-1, 2)[branch], ends.reshape(-1, 2)[branch]
    root = a + (b - a) * t[:, None]
    size = barb * rng.uniform(0.5, 1.3, branch.size) * (1.15 - t)
    angle = angles.ravel()[branch] + rng.choice((0.75, -0.75), branch.size)
    return root, root + size[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _draw_lines(
    canvas: Pixels, starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], grey: float
) -> None:
    if len(starts):
        lines = _fixed(np.stack([starts, ends], axis=1))
        cv2.polylines(canvas, list(lines), False, grey, 1, cv2.LINE_AA, 4)


def _fixed(points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Points in sixteenths of a pixel, as OpenCV draws them with ``shift=4``."""
    fixed: np.ndarray[Any, Any] = np.rint(points * 16).astype(np.int32)
    return fixed


def _clouds(rng: np.random.Generator) -> Floats:
    """Milky patches: noise of three sizes, and thinner ice towards the middle, (H, W)."""
    total = np.zeros((HEIGHT, WIDTH), dtype=np.float32)
    for cells, weight in ((3, 1.0), (7, 0.6), (17, 0.35)):
        noise = rng.standard_normal((cells * 3 // 4 + 1, cells + 1), dtype=np.float32)
        total += weight * cv2.resize(noise, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    x, y = np.linspace(-1, 1, WIDTH, dtype=np.float32), np.linspace(-1, 1, HEIGHT, dtype=np.float32)
    total += 1.2 * np.maximum(x**4, y[:, None] ** 4)
    return total


def _grain(rng: np.random.Generator) -> Floats:
    """Rime, (H, W): lit ridges a few pixels wide, and finer noise."""
    fine = rng.standard_normal((HEIGHT, WIDTH), dtype=np.float32)
    ridges = _standard(_slope(np.abs(cv2.GaussianBlur(fine, (0, 0), 2.5))))
    # Rime is thick in some places and thin in others.
    thickness = cv2.resize(rng.random((13, 17), dtype=np.float32), (WIDTH, HEIGHT))
    grain: Floats = ridges * (0.3 + 1.2 * thickness) + 0.7 * fine
    return grain


def _slope(height: Any) -> Floats:
    """How steeply ``height`` falls towards the upper left, where the light comes from."""
    kernel = np.array([[1, 0, 0], [0, 0, 0], [0, 0, -1]], dtype=np.float32)
    slope: Floats = cv2.filter2D(height, -1, kernel)  # type: ignore[assignment]
    return slope


def _standard(values: Any) -> Floats:
    """Shifted and scaled to mean 0 and deviation 1."""
    mean, deviation = cv2.meanStdDev(values)
    standard: Floats = (values - np.float32(mean.item())) / np.float32(deviation.item())
    return standard
