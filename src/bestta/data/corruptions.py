"""The 15 common corruptions and their 4 extra ones, at five severities, for images of any size.

Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations" (ICLR 2019) define them twice: for CIFAR-10-C and for ImageNet-C, whose constants
Cityscapes-C took over. Here they are functions of the image, the constants and a seed alone: with
the same versions of OpenCV, NumPy and Pillow, the same call gives the same bytes in any order, in
any process and with any number of threads.

Other versions round differently. Between OpenCV 5.0 with NumPy 2.4 and OpenCV 4.11 with NumPy 1.26,
``elastic_transform`` differs by up to 5 grey levels on photographs, and up to 9 on pure noise;
``snow``, ``frost`` and ``fog`` differ by 1 in less than a hundredth of the pixels; in the others no
difference was found.

Example:
    >>> image = np.full((256, 512, 3), 128, dtype=np.uint8)
    >>> corrupt(image, "fog", severity=3, seed=7).shape
    (256, 512, 3)
    >>> snow = Corruption("snow", severity=5)       # can be sent to other processes
    >>> bool((snow(image, seed=7) == snow(image, seed=7)).all())
    True
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import cv2
import numpy as np
from PIL import Image

from bestta.data import frost as window
from bestta.data.samples import Pixels
from bestta.data.seeds import Seed, generator

Floats = np.ndarray[Any, np.dtype[np.float32]]
Indices = np.ndarray[Any, np.dtype[np.int32]]

Family = Literal["cifar", "imagenet"]
"""Whose constants: those of CIFAR-10-C, or those of ImageNet-C and Cityscapes-C."""

CORRUPTIONS: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
"""The corruptions results are reported on, in the usual order."""

EXTRA: tuple[str, ...] = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The corruptions left for choosing settings, so that nobody tunes on the reported ones."""

Constants = tuple[float, ...]
Severities = tuple[Constants, Constants, Constants, Constants, Constants]

# What each number means is told by the arguments of the function of the same name below.
CONSTANTS: dict[Family, dict[str, Severities]] = {
    "cifar": {
        "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
        "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
        "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        "elastic_transform": (
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
        ),
        "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
        "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
        "speckle_noise": ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,)),
        "gaussian_blur": ((0.4,), (0.6,), (0.7,), (0.8,), (1,)),
        "spatter": (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    },
    "imagenet": {
        "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
        "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
        "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "elastic_transform": ((12.5,), (16.25,), (21.25,), (25,), (30,)),
        "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
        "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
        "speckle_noise": ((0.15,), (0.2,), (0.35,), (0.45,), (0.6,)),
        "gaussian_blur": ((1,), (2,), (3,), (4,), (6,)),
        "spatter": (
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    },
}
"""``CONSTANTS[family][name][severity - 1]``; intensities are on a scale from 0 to 1."""


@dataclass(frozen=True)
class Corruption:
    """One corruption at one severity, checked once and then called image by image.

    Attributes:
        name: One of ``CORRUPTIONS`` or ``EXTRA``.
        severity: 1 (mild) to 5.
        family: Whose constants to use.
        frost: A folder of textures for frost, in place of the ones drawn by :mod:`.frost`.
    """

    name: str
    severity: int
    family: Family = "imagenet"
    frost: Path | str | None = None

    def __post_init__(self) -> None:
        names = (*CORRUPTIONS, *EXTRA)
        if self.name not in names:
            near = difflib.get_close_matches(str(self.name), names, n=1, cutoff=0.4)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"no corruption named {self.name!r}.{meant}\nThere are: {', '.join(names)}."
            )
        whole = isinstance(self.severity, int | np.integer) and not isinstance(self.severity, bool)
        if not whole or not 1 <= self.severity <= 5:
            raise ValueError(
                f"severity is a whole number from 1 (mild) to 5, it was {self.severity!r}"
            )
        if self.family not in get_args(Family):
            raise ValueError(
                f"no family of constants named {self.family!r}. "
                f"There are: {', '.join(map(repr, get_args(Family)))}."
            )
        object.__setattr__(self, "severity", int(self.severity))
        if self.frost is not None:
            object.__setattr__(self, "frost", Path(self.frost))
            window.textures(self.frost)

    @property
    def constants(self) -> Constants:
        """The published numbers of this corruption at this severity."""
        return CONSTANTS[self.family][self.name][self.severity - 1]

    def __call__(self, image: Pixels, seed: Seed = 0) -> Pixels:
        """The corrupted image, a new array.

        Args:
            image: (H, W, 3) bytes, RGB. It is left as it is.
            seed: Names the draw; without effect on corruptions that draw nothing.
        """
        image = _checked(image)
        if self.name in FIXED:
            return FIXED[self.name](image, *self.constants)
        rng = generator(seed, self.name, self.severity)
        if self.name == "frost":
            scale = _frost_scale_cifar if self.family == "cifar" else _frost_scale_imagenet
            return frost(image, rng, *self.constants, textures=self.frost, scale=scale)
        if self.name == "elastic_transform" and self.family == "cifar":
            return elastic_transform_with_affine(image, rng, *self.constants)
        return DRAWN[self.name](image, rng, *self.constants)


def corrupt(
    image: Pixels,
    name: str,
    severity: int,
    *,
    seed: Seed = 0,
    family: Family = "imagenet",
    frost: Path | str | None = None,
) -> Pixels:
    """``image`` under one corruption: a shortcut for :class:`Corruption`.

    Args:
        image: (H, W, 3) bytes, RGB, of any size.
        name: One of ``CORRUPTIONS`` or ``EXTRA``.
        severity: 1 (mild) to 5.
        seed: A number, or numbers and words such as ``(7, "lindau_000001")``.
        family: Whose constants to use.
        frost: A folder of textures for frost, in place of the ones drawn by :mod:`.frost`.

    Returns:
        A new image, (H, W, 3) bytes.
    """
    return Corruption(name, severity, family, frost)(image, seed)


# ---------------------------------------------------------------------------------------- noise


def gaussian_noise(image: Pixels, rng: np.random.Generator, sigma: float) -> Pixels:
    """Electronic noise: normal, the same everywhere."""
    noise = _noise(rng, image.shape, 0, 255 * sigma)
    return _pixels(cv2.add(image, noise, dtype=cv2.CV_8U))


def shot_noise(image: Pixels, rng: np.random.Generator, rate: float) -> Pixels:
    """The noise of counting light: Poisson with a mean of ``rate`` for white."""
    draws = rng.integers(0, POISSON_SLOTS, image.shape, dtype=np.uint16)
    slots = image.astype(np.int32)
    slots *= POISSON_SLOTS
    slots += draws
    return poisson_table(rate).take(slots)


def impulse_noise(image: Pixels, rng: np.random.Generator, amount: float) -> Pixels:
    """Salt and pepper: a share ``amount`` of all values becomes 0 or 255, with equal chance."""
    draws = rng.integers(0, 2**16, image.shape, dtype=np.uint16)
    each = round(amount / 2 * 2**16)
    salt = (draws < each).view(np.uint8)
    kept = (draws < 2**16 - each).view(np.uint8)
    return _pixels(np.maximum(image * kept, salt * np.uint8(255)))


def speckle_noise(image: Pixels, rng: np.random.Generator, sigma: float) -> Pixels:
    """Normal noise in proportion to the light."""
    gain = _noise(rng, image.shape, 1, sigma)
    return _pixels(cv2.multiply(image, gain, dtype=cv2.CV_8U))


POISSON_SLOTS = 2**13
"""Equally likely draws per grey level, so that a draw is one look-up.

Chances are met to 1 in 16,000. The mean and the variance of the noise at a grey level are those of
the formula to 0.02 % in general, and to 0.65 % and 1.5 % at worst: at the darkest levels and a rate
of 3, where grains are rare. Twice the slots take half as long again, for the table outgrows the
cache.
"""


@functools.lru_cache(maxsize=10)
def poisson_table(rate: float) -> Pixels:
    """Noisy values for each grey level and each of its slots, (256 * POISSON_SLOTS,) bytes."""
    mean = np.arange(256)[:, None] * (rate / 255)
    # Counts above the rate are all white.
    counts = np.arange(int(rate) + 1)
    log_factorial = np.array([math.lgamma(count + 1) for count in counts])
    with np.errstate(divide="ignore"):
        log_mean = np.log(mean)
    # 0 * log(0) is the 0 of a certain event.
    powers = np.multiply(counts, log_mean, out=np.zeros((256, len(counts))), where=counts > 0)
    chance = np.exp(powers - mean - log_factorial)
    ends = np.rint(np.minimum(chance.cumsum(axis=1), 1) * POISSON_SLOTS).astype(np.int64)
    ends[:, -1] = POISSON_SLOTS
    slots = np.diff(ends, axis=1, prepend=0)
    values = np.rint(counts * (255 / rate)).astype(np.uint8)
    return np.repeat(np.broadcast_to(values, slots.shape).ravel(), slots.ravel())


# ----------------------------------------------------------------------------------------- blur


def defocus_blur(image: Pixels, radius: float, alias_blur: float) -> Pixels:
    """An unfocused lens: every point becomes a disk."""
    if radius < 5:
        return _pixels(cv2.filter2D(image, -1, disk(radius, alias_blur)))
    return _bytes(_wide_disk_mean(image, radius, alias_blur))


def glass_blur(
    image: Pixels, rng: np.random.Generator, sigma: float, reach: float, rounds: float
) -> Pixels:
    """Frosted glass: pixels trade places with near ones between two Gaussian blurs."""
    height, width, _ = image.shape
    source = scatter(height, width, int(reach), int(rounds), rng)
    blurred = gaussian_blur(image, sigma)
    scattered = blurred.reshape(-1, 3).take(source.ravel(), axis=0)
    return gaussian_blur(scattered.reshape(image.shape), sigma)


def motion_blur(image: Pixels, rng: np.random.Generator, radius: float, sigma: float) -> Pixels:
    """A moving camera: a streak up to 45° from the horizontal."""
    return _bytes(_streaked(image, radius, sigma, rng.uniform(-45, 45)))


def zoom_blur(image: Pixels, stop: float, step: float) -> Pixels:
    """Moving ahead: the mean of the image at growing zoom, itself counted twice."""
    layer = image.astype(np.float32)
    total = layer.copy()
    factors = np.arange(1, stop, step)
    for factor in factors:
        cv2.accumulate(zoomed(layer, float(factor)), total)
    return _bytes(total / np.float32(len(factors) + 1))


def gaussian_blur(image: Pixels, sigma: float) -> Pixels:
    """A Gaussian cut off at four deviations."""
    side = 2 * int(4 * sigma + 0.5) + 1
    return _pixels(cv2.GaussianBlur(image, (side, side), sigma, borderType=cv2.BORDER_REPLICATE))


@functools.lru_cache(maxsize=32)
def disk(radius: float, alias_blur: float) -> Floats:
    """A disk that sums to one, its edge softened by a small Gaussian of ``alias_blur`` pixels."""
    reach, edge = int(radius), _softened(radius)
    offsets = np.arange(-reach - edge, reach + edge + 1)
    inside = offsets[:, None] ** 2 + offsets**2 <= radius**2
    side = 2 * edge + 1
    soft = cv2.GaussianBlur(
        inside.astype(np.float32), (side, side), alias_blur, borderType=cv2.BORDER_CONSTANT
    )
    kernel: Floats = soft / soft.sum()
    return kernel


def _softened(radius: float) -> int:
    """How many pixels the Gaussian on the edge of a disk reaches."""
    return 1 if radius <= 8 else 2


def _wide_disk_mean(image: Pixels, radius: float, alias_blur: float) -> Floats:
    """The correlation with ``disk(radius, alias_blur)``, at a cost that grows with the radius only.

    A disk is a stack of runs, one a row, and the sum over a run costs the same however long it is.
    The Gaussian on its edge is applied to the result, for the order of two filters is free.
    """
    height, width, _ = image.shape
    reach, edge = int(radius), _softened(radius)
    margin = reach + edge
    framed = cv2.copyMakeBorder(image, margin, margin, margin, margin, cv2.BORDER_REFLECT_101)
    total = np.zeros((height + 2 * edge, width + 2 * edge, 3), dtype=np.float32)
    rows_of: dict[int, list[int]] = {}  # by half the length of their run
    for row in range(-reach, reach + 1):
        rows_of.setdefault(int(math.sqrt(radius**2 - row**2)), []).append(row)
    for half, rows in rows_of.items():
        runs = cv2.boxFilter(framed, cv2.CV_32F, (2 * half + 1, 1), normalize=False)
        runs = runs[:, reach : reach + total.shape[1]]
        for row in rows:
            cv2.accumulate(runs[reach + row : reach + row + total.shape[0]], total)
    total /= sum((2 * half + 1) * len(rows) for half, rows in rows_of.items())
    soft = cv2.GaussianBlur(total, (2 * edge + 1,) * 2, alias_blur)
    return _floats(soft[edge : edge + height, edge : edge + width])


def scatter(height: int, width: int, reach: int, rounds: int, rng: np.random.Generator) -> Indices:
    """Where each pixel behind frosted glass comes from, (H, W) flat indices.

    In each round every inner pixel, from the last to the first, takes the value that some pixel
    up to ``reach`` away has at that moment.

    Choice: the published loop means to swap the two, but its NumPy row views alias, so the other
    pixel keeps its value; the published images are made that way, and so are these.

    Pixels are not visited one by one. One that looks at a pixel visited before it sees what that
    one has taken, so the looks form chains that end at a pixel not yet visited. Following all
    chains at once, with steps that double, finds their ends in a few passes.
    """
    here = np.arange(height * width, dtype=np.int32).reshape(height, width)
    source = here.ravel()
    inner = (slice(reach + 1, height - reach + 1), slice(reach + 1, width - reach + 1))
    if here[inner].size == 0:
        return here
    is_inner = np.zeros((height, width), dtype=bool)
    is_inner[inner] = True
    for _ in range(rounds):
        down, right = rng.integers(-reach, reach, (2, *here[inner].shape), dtype=np.int32)
        looks = here.copy()
        looks[inner] += down * np.int32(width) + right
        seen = looks.ravel()
        visited_before = (seen > here.ravel()) & is_inner.ravel().take(seen)
        end = np.where(visited_before, seen, here.ravel())
        while True:
            further = end.take(end)
            if np.array_equal(further, end):
                break
            end = further
        source = source.take(seen.take(end))
    return source.reshape(height, width)


def streak(radius: float, sigma: float, angle: float) -> tuple[Floats, Indices]:
    """Half a Gaussian along a line: weights (N,) that sum to one, and offsets (N, 2) as (y, x).

    The line, its rounding to pixels and its length of ``2 * radius + 1`` are ImageMagick's.
    """
    along = np.arange(2 * int(radius) + 1)
    weights = np.exp(-(along**2) / (2 * sigma**2))
    direction = np.array([math.sin(math.radians(angle)), math.cos(math.radians(angle))])
    offsets = np.ceil(along[:, None] * direction - 0.5).astype(np.int32)
    return (weights / weights.sum()).astype(np.float32), offsets


def _streaked(image: Pixels | Floats, radius: float, sigma: float, angle: float) -> Floats:
    """The mean of the image shifted along a line, (H, W) or (H, W, 3) floats."""
    weights, offsets = streak(radius, sigma, angle)
    height, width = image.shape[:2]
    (top, left), (bottom, right) = -offsets.min(axis=0), offsets.max(axis=0)
    framed = cv2.copyMakeBorder(image, top, bottom, left, right, cv2.BORDER_REPLICATE)
    mean = np.zeros(image.shape, dtype=np.float32)
    # A running mean: after each shift, the weighted mean of all shifts so far.
    starts = offsets - offsets.min(axis=0)
    for share, (y, x) in zip(weights / weights.cumsum(), starts, strict=True):
        cv2.accumulateWeighted(framed[y : y + height, x : x + width], mean, float(share))
    return mean


def zoomed(layer: Floats, factor: float, *, corner_to_corner: bool = False) -> Floats:
    """The middle of ``layer`` enlarged by ``factor`` to the size of the whole.

    The part that is enlarged is whole pixels, at least what is needed; the rest is trimmed off.

    Args:
        layer: (H, W) or (H, W, 3).
        factor: At least 1.
        corner_to_corner: Lay the centres of the corner pixels on one another, as the published
            files do. Photographs look the same either way; noise does not, for how much it is
            smoothed depends on where between its grains the new pixels lie.
    """
    height, width = layer.shape[:2]
    part_height, part_width = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - part_height) // 2, (width - part_width) // 2
    part = layer[top : top + part_height, left : left + part_width]
    size = max(width, round(part_width * factor)), max(height, round(part_height * factor))
    top, left = (size[1] - height) // 2, (size[0] - width) // 2
    if corner_to_corner:
        rows = _between(part_height, size[1], top, height)
        columns = _between(part_width, size[0], left, width)
        return _interpolated(_interpolated(part, columns, axis=1), rows, axis=0)
    large = cv2.resize(part, size)
    return _floats(large[top : top + height, left : left + width])


def _between(count: int, size: int, start: int, length: int) -> tuple[Indices, Floats]:
    """Where ``count`` samples are read when stretched to ``size``, their ends kept.

    Returns:
        For the new samples ``start`` to ``start + length``: the old one below each, and how far
        the new one lies towards the next, from 0 to 1, (length,) each.
    """
    at = np.arange(start, start + length) * ((count - 1) / max(1, size - 1))
    below = at.astype(np.int32)
    return below, (at - below).astype(np.float32)


def _interpolated(layer: Floats, between: tuple[Indices, Floats], axis: int) -> Floats:
    """``layer`` read between its samples along one axis, linearly.

    OpenCV's warps round places to 1/32 pixel or not, depending on the version; a threshold, as that
    of snow, would turn the small difference into flakes that are there or not.
    """
    below, share = between
    above = np.minimum(below + 1, layer.shape[axis] - 1)
    read = layer.take(below, axis)
    step = layer.take(above, axis)
    step -= read
    step *= np.expand_dims(share, tuple(range(1, layer.ndim - axis)))
    read += step
    return read


# -------------------------------------------------------------------------------------- weather


def snow(
    image: Pixels,
    rng: np.random.Generator,
    mean: float,
    sigma: float,
    zoom: float,
    threshold: float,
    radius: float,
    blur_sigma: float,
    mix: float,
) -> Pixels:
    """Whitened light, and flakes that fall: the bright grains of enlarged noise, streaked.

    Args:
        mean, sigma, zoom, threshold: The noise, how much it is enlarged, and what of it is a flake.
        radius, blur_sigma: The streak of a flake; it falls up to 45° from the vertical.
        mix: How much of the image stays as it is.
    """
    noise = _noise(rng, image.shape[:2], mean, sigma)
    layer = zoomed(noise, zoom, corner_to_corner=True)
    flakes = np.clip(np.where(layer < threshold, np.float32(0), layer), 0, 1)
    fallen = _streaked(flakes, radius, blur_sigma, rng.uniform(-135, -45))
    # The same flakes, turned by half a turn, make a second layer.
    fallen = 255 * (fallen + fallen[::-1, ::-1])
    pale = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) * np.float32(1.5) + np.float32(127.5)
    values = image.astype(np.float32)
    whitened = cv2.max(values, cv2.merge([pale, pale, pale]))
    lit = cv2.addWeighted(values, mix, whitened, 1 - mix, 0)
    return _pixels(cv2.add(lit, cv2.merge([fallen, fallen, fallen]), dtype=cv2.CV_8U))


def frost(
    image: Pixels,
    rng: np.random.Generator,
    weight: float,
    frost_weight: float,
    *,
    textures: Path | str | None = None,
    scale: Callable[[tuple[int, int], tuple[int, int]], float],
) -> Pixels:
    """A frosted pane in front of the lens: a random cut of a random texture is added."""
    if textures is None:
        # Choice: the published code never draws the last of its six textures; here all six are
        # drawn alike.
        pane = window.texture(int(rng.integers(len(window.PANES))))
    else:
        own = window.textures(textures)
        pane = own[rng.integers(len(own))]
    size, whole = (image.shape[1], image.shape[0]), (pane.shape[1], pane.shape[0])
    cut = window.cut(pane, size, scale(size, whole), rng)
    return _pixels(cv2.addWeighted(image, weight, cut, frost_weight, 0))


def _frost_scale_imagenet(size: tuple[int, int], texture: tuple[int, int]) -> float:
    """A tenth larger than natural, or than what covers the image."""
    return 1.1 * max(1.0, size[0] / texture[0], size[1] / texture[1])


def _frost_scale_cifar(size: tuple[int, int], texture: tuple[int, int]) -> float:
    """A fifth of natural for 32 pixels, and in proportion: a small cut of a large scene."""
    return max(0.2 * max(size) / 32, size[0] / texture[0], size[1] / texture[1])


def fog(image: Pixels, rng: np.random.Generator, amount: float, decay: float) -> Pixels:
    """Clouds of light, with the whole dimmed so that the brightest pixel stays about as bright."""
    height, width, _ = image.shape
    brightest = float(image.max()) / 255
    clouds = plasma(max(height, width), decay, rng)[:height, :width]
    dimmed = brightest / (brightest + amount)
    return _pixels(
        cv2.addWeighted(
            image, dimmed, cv2.merge([clouds] * 3), 255 * amount * dimmed, 0, dtype=cv2.CV_8U
        )
    )


def plasma(side: int, decay: float, rng: np.random.Generator) -> Floats:
    """Clouds by midpoint displacement on a torus: (S, S) from 0 to 1, S the next power of two.

    Each pass halves the spacing of the grid. A new point is the mean of its four neighbours plus a
    uniform draw, whose spread falls by ``decay`` squared from pass to pass: the smaller the decay,
    the rougher the clouds.
    """
    size = 2 ** max(1, math.ceil(math.log2(side)))
    corners = np.zeros((1, 1), dtype=np.float32)
    spread = 1.0
    while len(corners) < size:
        draws = rng.random((3, *corners.shape), dtype=np.float32)
        draws -= 0.5
        draws *= 8 * spread  # four times a draw from -spread to spread: all is divided by 4 below
        around = _floats(cv2.copyMakeBorder(corners, 0, 1, 0, 1, cv2.BORDER_WRAP))
        below, right = around[1:, :-1], around[:-1, 1:]
        middles, tops, lefts = draws
        middles += corners + below + right + around[1:, 1:]
        middles *= 0.25
        between = _floats(cv2.copyMakeBorder(middles, 1, 0, 1, 0, cv2.BORDER_WRAP))
        tops += corners + right + middles + between[:-1, 1:]
        lefts += corners + below + middles + between[1:, :-1]
        finer = np.empty((2 * len(corners), 2 * len(corners)), dtype=np.float32)
        finer[::2, ::2], finer[1::2, 1::2] = corners, middles
        np.multiply(tops, 0.25, out=finer[::2, 1::2])
        np.multiply(lefts, 0.25, out=finer[1::2, ::2])
        corners = finer
        spread /= decay**2
    corners -= corners.min()
    corners /= corners.max()
    return corners


def spatter(
    image: Pixels,
    rng: np.random.Generator,
    mean: float,
    sigma: float,
    blur: float,
    threshold: float,
    intensity: float,
    is_mud: float,
) -> Pixels:
    """Drops of water, or splashes of mud, on the lens: the high ground of blurred noise.

    Args:
        mean, sigma, blur, threshold: The noise, its blur, and above what it is liquid.
        intensity: How bright the water is, or how soft the rim of the mud.
        is_mud: 1 for mud, 0 for water.
    """
    noise = _noise(rng, image.shape[:2], mean, sigma)
    liquid = _smoothed(noise, blur)
    liquid[liquid < threshold] = 0
    if is_mud:
        cover = _smoothed((liquid > threshold).astype(np.float32), intensity)
        cover[cover < 0.8] = 0
        return _bytes(image * (1 - cover)[..., None] + MUD * cover[..., None])
    drops = _shaded(np.clip(liquid * 255, 0, 255).astype(np.uint8))
    brightest = float(drops.max())
    drops *= intensity / brightest if brightest > 0 else 0
    return _pixels(cv2.add(image, drops[..., None] * WATER, dtype=cv2.CV_8U))


WATER = np.array([175, 238, 238], dtype=np.float32)  # pale turquoise
MUD = np.array([63, 42, 20], dtype=np.float32)


def _shaded(liquid: Pixels) -> Floats:
    """Drops with a lit and a shaded rim, (H, W): their relief is the distance from their edges."""
    depth = cv2.distanceTransform(255 - cv2.Canny(liquid, 50, 150), cv2.DIST_L2, 5)
    relief = cv2.equalizeHist(cv2.blur(np.minimum(depth, 20), (3, 3)).astype(np.uint8))
    light = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float32)
    lit = cv2.blur(cv2.filter2D(relief, cv2.CV_8U, light), (3, 3))
    return _floats(liquid * lit.astype(np.float32))


def _smoothed(values: Floats, sigma: float) -> Floats:
    side = 2 * int(4 * sigma + 0.5) + 1
    return _floats(cv2.GaussianBlur(values, (side, side), sigma, borderType=cv2.BORDER_REPLICATE))


# -------------------------------------------------------------------------------------- digital


def brightness(image: Pixels, amount: float) -> Pixels:
    """A higher value in HSV: hue and saturation stay, so a pixel is scaled by its new maximum."""
    value = _brightest(image)
    levels = np.arange(1, 256, dtype=np.float32)
    gains = np.ones(256, dtype=np.float32)
    gains[1:] = np.minimum(levels + 255 * amount, 255) / levels
    gain = cv2.LUT(value, gains)
    bright = _pixels(cv2.multiply(image, cv2.merge([gain, gain, gain]), dtype=cv2.CV_8U))
    bright[value == 0] = round(255 * amount)  # black has no hue: it becomes grey
    return bright


def contrast(image: Pixels, factor: float) -> Pixels:
    """All values move towards the mean of their channel."""
    means = np.array(cv2.mean(image)[:3])
    table = np.arange(256)[:, None] * factor + means * (1 - factor)
    return _pixels(cv2.LUT(image, np.rint(table).astype(np.uint8).reshape(1, 256, 3)))


def saturate(image: Pixels, factor: float, offset: float) -> Pixels:
    """A scaled and shifted saturation in HSV; hue and value stay."""
    value = _brightest(image)
    red, green, blue = cv2.split(image)
    least = _pixels(cv2.min(cv2.min(red, green), blue))
    where = (value.astype(np.uint16) << 8) + least
    stretch = _stretches(factor, offset).take(where)
    still = value * (1 - stretch)
    moved = cv2.multiply(image, cv2.merge([stretch] * 3), dtype=cv2.CV_32F)
    saturated = _pixels(cv2.add(moved, cv2.merge([still] * 3), dtype=cv2.CV_8U))
    if offset > 0:
        # Grey has the hue 0, which is red.
        grey = value == least
        rest = np.rint(value[grey] * np.float32(1 - offset)).astype(np.uint8)
        saturated[grey] = np.stack([value[grey], rest, rest], axis=1)
    return saturated


@functools.lru_cache(maxsize=10)
def _stretches(factor: float, offset: float) -> Floats:
    """New over old saturation at ``256 * max + min`` of a pixel, (65536,).

    The distance of each channel from the maximum is in proportion to the saturation.
    """
    value, least = np.arange(256.0)[:, None], np.arange(256.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        saturation = np.clip((value - least) / value, 0, 1)
        stretch = np.clip(saturation * factor + offset, 0, 1) / saturation
    return np.where(least < value, stretch, 0).astype(np.float32).ravel()


def elastic_transform(image: Pixels, rng: np.random.Generator, alpha: float) -> Pixels:
    """A rubber sheet: smooth random displacements, in proportion to the image."""
    height, width, _ = image.shape
    sigma = 0.01 * width, 0.01 * height
    return _displaced(image, *displacement(height, width, sigma, 0.005 * height * alpha, rng))


def elastic_transform_with_affine(
    image: Pixels, rng: np.random.Generator, alpha: float, sigma: float, affine: float
) -> Pixels:
    """The rubber sheet of the CIFAR family: a random affine map first, then displacements.

    Args:
        alpha, sigma, affine: Displacement, smoothness and how far three corners of the middle move,
            as shares of the side of the image.
    """
    height, width, _ = image.shape
    # Choice: the published images are square; for others the shorter side counts, so that the
    # three points never come near a line.
    side = min(height, width)
    reach = max(1, side // 3)
    middle = np.array([width // 2, height // 2])
    points = middle + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = points + rng.uniform(-affine * side, affine * side, (3, 2))
    matrix = cv2.getAffineTransform(points.astype(np.float32), moved.astype(np.float32))
    mapped = cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    if alpha == 0:
        return _pixels(mapped)
    sigmas = sigma * side, sigma * side
    shift = displacement(height, width, sigmas, alpha * side, rng)
    return _displaced(_pixels(mapped), *shift)


def displacement(
    height: int, width: int, sigma: tuple[float, float], most: float, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Blurred uniform noise, how far each pixel moves right and down: two (H, W) arrays.

    Args:
        height, width: The size of the image.
        sigma: Deviation of the blur along x and y.
        most: The noise before the blur reaches from ``-most`` to ``most``.
    """
    draws = rng.random((2, height, width), dtype=np.float32)
    draws -= 0.5
    draws *= 2 * most
    side_x, side_y = (2 * int(3 * each + 0.5) + 1 for each in sigma)
    blur = functools.partial(
        cv2.GaussianBlur,
        ksize=(side_x, side_y),
        sigmaX=sigma[0],
        sigmaY=sigma[1],
        borderType=cv2.BORDER_REFLECT,
    )
    return _floats(blur(draws[0])), _floats(blur(draws[1]))


def _displaced(image: Pixels, right: Floats, down: Floats) -> Pixels:
    height, width, _ = image.shape
    x = right + np.arange(width, dtype=np.float32)
    y = down + np.arange(height, dtype=np.float32)[:, None]
    return _pixels(cv2.remap(image, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT))


def pixelate(image: Pixels, scale: float) -> Pixels:
    """Fewer pixels: shrunk by means over boxes, and enlarged again without smoothing."""
    height, width, _ = image.shape
    size = max(1, int(width * scale)), max(1, int(height * scale))
    small = Image.fromarray(image).resize(size, Image.Resampling.BOX)
    return np.array(small.resize((width, height), Image.Resampling.NEAREST))


def jpeg_compression(image: Pixels, quality: float) -> Pixels:
    """Written as JPEG and read again."""
    # OpenCV and Pillow share the codec and its defaults: the bytes are the same, the copies fewer.
    blue_first = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    _, file = cv2.imencode(".jpg", blue_first, [cv2.IMWRITE_JPEG_QUALITY, int(quality)])
    read = _pixels(cv2.imdecode(file, cv2.IMREAD_COLOR))
    return _pixels(cv2.cvtColor(read, cv2.COLOR_BGR2RGB))


# --------------------------------------------------------------------------------------- common

FIXED: dict[str, Callable[..., Pixels]] = {
    effect.__name__: effect
    for effect in (
        defocus_blur,
        zoom_blur,
        brightness,
        contrast,
        pixelate,
        jpeg_compression,
        gaussian_blur,
        saturate,
    )
}
"""Functions of the image alone: ``effect(image, *constants)``."""

DRAWN: dict[str, Callable[..., Pixels]] = {
    effect.__name__: effect
    for effect in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        glass_blur,
        motion_blur,
        snow,
        fog,
        elastic_transform,
        speckle_noise,
        spatter,
    )
}
"""Functions of the image and a random generator: ``effect(image, rng, *constants)``.

Frost is not among them, for it needs textures as well.
"""


def _checked(image: Pixels) -> Pixels:
    if not isinstance(image, np.ndarray):
        raise TypeError(
            f"an image is a NumPy array of bytes, (H, W, 3) in RGB; "
            f"this is a {type(image).__module__}.{type(image).__qualname__}"
        )
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ValueError(
            f"an image is (H, W, 3) of uint8, RGB; this array is {image.shape} of {image.dtype}"
        )
    return np.ascontiguousarray(image)


def _noise(
    rng: np.random.Generator, shape: tuple[int, ...], mean: float = 0, sigma: float = 1
) -> Floats:
    noise: Floats = rng.standard_normal(shape, dtype=np.float32)
    noise *= sigma
    noise += mean
    return noise


def _brightest(image: Pixels) -> Pixels:
    """The value of each pixel in HSV, (H, W)."""
    red, green, blue = cv2.split(image)
    return _pixels(cv2.max(cv2.max(red, green), blue))


def _bytes(values: Any) -> Pixels:
    """Floats as bytes: held within 0 to 255 and rounded, halves to even as OpenCV does throughout.

    Choice: the published files cut the fraction off, which darkens every corruption by half a grey
    level and leaves it to the last bit of a float whether a flat image stays as it was.
    """
    return _pixels(cv2.convertScaleAbs(np.maximum(values, np.float32(0))))


def _pixels(array: Any) -> Pixels:
    """What OpenCV returns is typed as any array; here it is known to be bytes."""
    pixels: Pixels = array
    return pixels


def _floats(array: Any) -> Floats:
    floats: Floats = array
    return floats
