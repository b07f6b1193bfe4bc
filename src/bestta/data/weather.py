"""Fog, night, rain and snow painted over clear street photographs, at severities 1 to 5.

This is simulation. It stands in for photographs of real bad weather when these are not at hand, and
asks for nothing but one picture taken from a car. Scores on it tell how methods compare under
changes of this kind; they do not replace scores on real weather.

What is modelled, all of it in linear light:

* The scene: a depth prior of road plane, street walls and sky, bent by what the picture shows:
  where the road ends in a column something stands, and bright calm colour that reaches the upper
  edge is sky. See :func:`perspective_depth`.
* Fog: flat light, Koschmieder's law at a visibility per severity, patches of thicker fog, a greyish
  airlight, light scattered forward.
* Night: little bluish light, the car's own headlights, street lamps, lit windows, lights of other
  cars, glare, shot and read noise.
* Rain: flat light, a veil that grows with distance, a dark road that mirrors what stands on it,
  streaks at several distances, drops on the lens.
* Snow: flat light, a veil, snow on the ground with tyre tracks and slush, some on ledges and
  leaves, flakes at several distances.

What is not modelled: true geometry (depth is guessed, so an object may stand in the wrong haze),
relighting by the lamps that are drawn (they brighten what is beside them in the picture, whatever
its distance, and cast no shadows), poles and cars to carry these lamps, mirror images other than
straight down, drops in focus, how snow settles and water flows, dirt and wipers, and above all what
people and traffic do in such weather. Shadows cast by the sun are weakened, not removed.

The same image, condition, severity and seed give the same picture whatever the process, the order
or the number of threads. Between versions of OpenCV (4.11 and 5.0 were compared) some pixels differ
by a level or two of 255, as the last digits of its arithmetic do, and kinds of processor may
do the same.

Example:
    >>> street = np.full((64, 128, 3), 90, np.uint8)
    >>> simulate(street, "fog", 3, seed=7).shape
    (64, 128, 3)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np

from bestta.data.samples import Pixels
from bestta.data.seeds import Seed, generator

Floats = np.ndarray[Any, np.dtype[Any]]
"""A map (H, W) or an image (H, W, 3) of single-precision numbers."""

Colour = tuple[float, float, float]
T = TypeVar("T")

CONDITIONS = ("fog", "night", "rain", "snow")
SEVERITIES = (1, 2, 3, 4, 5)

# The camera of the prior: that of Cityscapes, whose calibration files give a focal length of about
# 2262 pixels at 2048 pixels of width, a height of 1.22 m and a pitch of 0.038 rad, which puts the
# horizon 86 pixels above the middle of 1024. Other cars' cameras are close enough to it.
CAMERA_HEIGHT_M = 1.22
FOCAL_IN_WIDTHS = 1.1
HORIZON_IN_HEIGHTS = 0.42

STREET_HALF_WIDTH_M = 10.0
"""Distance from the camera to the walls on either side."""

FARTHEST_M = 100.0
"""What is neither sky nor near lies no farther than this: streets end."""

SKY_FROM_M = 1000.0
"""Depths that are given and as large as this stand for the sky."""

TALLEST_M = 13.0
"""Height of houses and trees, which tells how far away at most the upper part of the image is."""

NEAREST_FRONT_M = 14.0
"""Something wide that is nearer than this is a car or a bus, not a façade across the street."""

KERB_M = 0.15
"""Ground goes on above steps as high as this, and ends where anything taller stands."""

VISIBILITY_M = {
    "fog": (400.0, 230.0, 140.0, 85.0, 50.0),
    "rain": (1200.0, 800.0, 520.0, 340.0, 220.0),
    "snow": (900.0, 560.0, 340.0, 210.0, 130.0),
}
"""Meteorological optical range per severity: where the contrast with the sky falls to 5 %."""

EXTINCTION = math.log(20)
"""Extinction coefficient times meteorological optical range, from ``exp(-x) = 5 %``."""

WORKING_SIZE = (256, 160)
"""Larger images are understood at this size; the maps are then fitted to their edges."""


@dataclass(frozen=True)
class Weather:
    """One condition at one severity, ready to be applied to images and sent to other processes.

    Attributes:
        condition: One of :data:`CONDITIONS`.
        severity: 1 (mild) to 5 (severe).

    Example:
        >>> Weather("snow", 2)(np.zeros((8, 8, 3), np.uint8), seed=3).shape
        (8, 8, 3)
    """

    condition: str
    severity: int

    def __post_init__(self) -> None:
        _check_weather(self.condition, self.severity)

    def __call__(self, image: Pixels, seed: Seed = 0) -> Pixels:
        """``image`` (H, W, 3) in this weather."""
        return simulate(image, self.condition, self.severity, seed=seed)

    @property
    def name(self) -> str:
        """The condition."""
        return self.condition


def simulate(
    image: Pixels,
    condition: str,
    severity: int,
    *,
    seed: Seed = 0,
    depth: np.ndarray[Any, np.dtype[Any]] | None = None,
) -> Pixels:
    """The street of ``image`` in bad weather.

    Args:
        image: RGB bytes (H, W, 3), a street in clear weather seen from a car. Not modified.
        condition: One of :data:`CONDITIONS`.
        severity: 1 (mild) to 5 (severe).
        seed: Varies density, tint, wind and the places of lamps, drops and flakes.
        depth: Distance along the line of sight in metres (H, W). Infinite in the sky, and so are
            1000 m or more, for many sources write a large number there. Taken instead of the
            perspective prior where it is a number; the prior stays where it is NaN.

    Returns:
        RGB bytes (H, W, 3).
    """
    _check_weather(condition, severity)
    image = _checked_image(image)
    scene = _Scene(image, _checked_depth(depth, image))
    rng = generator(seed, condition, severity)
    light = _SIMULATORS[condition](_to_light(image), scene, severity, rng)
    return _to_bytes(light)


def perspective_depth(image: Pixels) -> Floats:
    """A guess at the distance of every pixel, from one street image and the usual camera.

    The road is a plane below the horizon, so its rows tell distances. Where the road ends in a
    column, something stands at that distance; above a car's or a person's height the walls of the
    street take over, far in the middle and near at the sides. Sky is infinitely far. The maps are
    fitted to the edges of the image, so that haze keeps to silhouettes.

    Args:
        image: RGB bytes (H, W, 3).

    Returns:
        Metres (H, W), positive, ``inf`` in the sky.
    """
    nearness = _Scene(_checked_image(image)).nearness
    with np.errstate(divide="ignore"):
        depth: Floats = np.float32(1) / np.where(nearness < 1 / 2000, np.float32(0), nearness)
    return depth


# Checks at the door


def _check_weather(condition: str, severity: int) -> None:
    if condition not in CONDITIONS:
        near = difflib.get_close_matches(str(condition).lower(), CONDITIONS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"no weather named {condition!r}.{hint}\nThere are: {', '.join(CONDITIONS)}."
        )
    whole = isinstance(severity, int | np.integer) and not isinstance(severity, bool)
    if not whole or severity not in SEVERITIES:
        raise ValueError(f"severity {severity!r} of {condition}: it is a whole number from 1 to 5.")


def _checked_image(image: Pixels) -> Pixels:
    if not isinstance(image, np.ndarray):
        raise TypeError(
            f"an image is a NumPy array (H, W, 3) of bytes, this is {type(image).__name__}."
        )
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(
            f"image of shape {image.shape} and type {image.dtype}: "
            "RGB bytes are expected, shape (H, W, 3) and type uint8."
        )
    return np.ascontiguousarray(image)


def _checked_depth(depth: Any, image: Pixels) -> Floats | None:
    if depth is None:
        return None
    given = np.asarray(depth)
    if given.shape != image.shape[:2] or given.dtype.kind not in "fiu":
        raise ValueError(
            f"depth of shape {given.shape} and type {given.dtype} for an image of shape "
            f"{image.shape}: metres of shape {image.shape[:2]} are expected."
        )
    if (given < 0).any():
        raise ValueError(
            f"depth down to {np.nanmin(given)} m: metres are 0 or more, inf in the sky "
            "and NaN where they are not known."
        )
    metres: Floats = given.astype(np.float32)
    metres[metres >= SKY_FROM_M] = np.inf
    return metres


# The scene: where the ground is, where the sky is, and how near everything else


class _Camera(NamedTuple):
    """Where rows and columns look, for one size of image."""

    horizon: float
    focal: float
    across: Floats
    """Columns to the right of the vanishing point, (1, W)."""
    below: Floats
    """Rows below the horizon, (H, 1)."""

    @property
    def per_row(self) -> float:
        """What the nearness of the road grows by from one row to the next, in 1/m."""
        return 1 / (self.focal * CAMERA_HEIGHT_M)


@lru_cache(maxsize=8)
def _camera(height: int, width: int) -> _Camera:
    horizon = HORIZON_IN_HEIGHTS * height
    across = np.arange(width, dtype=np.float32)[None] + np.float32(0.5 - width / 2)
    below = np.arange(height, dtype=np.float32)[:, None] + np.float32(0.5 - horizon)
    across.setflags(write=False)
    below.setflags(write=False)
    return _Camera(horizon, FOCAL_IN_WIDTHS * width, across, below)


class _Scene:
    """What is known of an image, each map (H, W) and made when it is first asked for."""

    def __init__(self, image: Pixels, depth: Floats | None = None) -> None:
        self.depth = depth
        self.luma: Floats = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) * np.float32(1 / 255)
        small = _shrink(image) * np.float32(1 / 255)
        self.small_luma: Floats = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
        logs = cv2.log(small + np.float32(0.02))
        self.red = logs[..., 0] - logs[..., 1]
        self.blue = logs[..., 2] - logs[..., 1]

    @cached_property
    def small_sky(self) -> Floats:
        return _find_sky(self.small_luma, self.red, self.blue, self._busy)

    @cached_property
    def small_ground(self) -> Floats:
        return _find_ground(self.small_luma, self.red, self.blue, self._busy)

    @cached_property
    def sky(self) -> Floats:
        sky = np.clip(self._fit(self.small_sky), 0, 1)
        if self.depth is not None:
            sky = np.where(np.isnan(self.depth), sky, np.isinf(self.depth).astype(np.float32))
        return sky

    @cached_property
    def ground(self) -> Floats:
        ground = np.clip(self._fit(self.small_ground), 0, 1)
        h, w = ground.shape
        if self.depth is None or h < 2:
            return ground
        # Down the image ground comes nearer by the row; what stands upright does not.
        nearer = np.gradient(self.nearness, axis=0) / np.float32(_camera(h, w).per_row)
        level = _ramp(nearer, 0.3, 0.6)
        return np.where(np.isnan(self.depth), ground, ground * level)

    @cached_property
    def plants(self) -> Floats:
        return np.clip(self._fit(_find_plants(self.red, self.blue)), 0, 1)

    @cached_property
    def nearness(self) -> Floats:
        """1 / distance in metres; 0 in the sky."""
        if self.depth is not None and not np.isnan(self.depth).any():
            return 1 / np.maximum(self.depth, np.float32(1e-4))
        nearness = np.maximum(
            self._fit(_guess_nearness(self.small_ground) * (1 - self.small_sky)), 0
        )
        if self.depth is not None:
            given = 1 / np.maximum(self.depth, np.float32(1e-4))
            nearness = np.where(np.isnan(self.depth), nearness, given)
        return nearness

    @cached_property
    def _busy(self) -> Floats:
        across = cv2.Sobel(self.small_luma, cv2.CV_32F, 1, 0, scale=0.25)
        down = cv2.Sobel(self.small_luma, cv2.CV_32F, 0, 1, scale=0.25)
        return cv2.blur(cv2.magnitude(across, down), (3, 3))

    def _fit(self, values: Floats) -> Floats:
        return _fit_to_edges(values, self.small_luma, self.luma)


def _find_sky(luma: Floats, red: Floats, blue: Floats, busy: Floats) -> Floats:
    """How surely each pixel is sky: bright, not warm, and joined to the upper edge by calm areas.

    The bounds are those that part sky from the rest in Cityscapes training images, where they find
    91 % of it; one pixel in five they take for sky is something else, mostly sunlit white walls.
    """
    h, w = luma.shape
    camera = _camera(h, w)
    side = np.abs(camera.across) * np.float32(0.3 / w)
    sky = _ramp(luma, 0.40, 0.56) * _ramp(blue, -0.13, -0.05) * _ramp(red, 0.08, 0.02)
    sky *= _ramp(camera.below / np.float32(h) + side, 0.04, -0.10)
    # White façades are as bright as sky. Their windows are what sets them apart.
    calm = cv2.blur(busy, _box(w, 30)) < 0.06
    seed = _parts_touching((sky > 0.4) & calm, slice(0, max(1, round(0.06 * h))))
    return sky * cv2.dilate(seed, np.ones(_box(w, 14), np.uint8))


def _find_ground(luma: Floats, red: Floats, blue: Floats, busy: Floats) -> Floats:
    """How surely each pixel is road, pavement or grass: like the road ahead, and joined to it.

    In Cityscapes training images it finds 92 % of the ground; 96 % of what it finds is ground.
    """
    h, w = luma.shape
    camera = _camera(h, w)
    lighter, redder, bluer = (_beside_the_road(x) for x in (cv2.log(luma + 0.02), red, blue))
    road = np.maximum(camera.below, 0.25) * np.float32(camera.per_row)
    wall = np.abs(camera.across) / np.float32(camera.focal * STREET_HALF_WIDTH_M) + 1 / 70
    score = np.minimum(2.2 * np.log(road / wall), 4) + 2.2
    # Markings and sunlit parts may be much lighter; grass is greener: less red and less blue.
    score -= np.square(lighter * np.where(lighter < 0, 1 / 0.40, 1 / 1.1))
    score -= np.square(redder / 0.10) * np.where(redder < 0, 0.3, 1)
    score -= np.square(bluer / 0.10) * np.where(bluer < 0, 0.2, 1)
    score -= np.minimum(np.square(busy / 0.09), 4)
    ground = _ramp(cv2.blur(np.clip(score, -4, 4).astype(np.float32), (3, 3)), -1, 1)
    mask = cv2.morphologyEx(
        (ground > 0.5).astype(np.uint8), cv2.MORPH_CLOSE, np.ones((3, 3), np.uint8)
    )
    joined = _parts_touching(mask, slice(int(0.75 * h), None))
    return np.maximum(ground, mask) * joined * _before_anything_stands(joined)


def _before_anything_stands(ground: Floats) -> Floats:
    """1 up each column of ``ground`` (H, W) to the first thing on it taller than a kerb, then 0.

    Bonnets and roofs of grey cars are as grey and smooth as the road. It does not go on behind
    them: what is seen above a bumper is the car.
    """
    h, w = ground.shape
    rows = np.arange(h, dtype=np.float32)[:, None]
    # The nearest ground in the column, at each row or below it; none below is the car's own bonnet.
    foot = np.minimum.accumulate(np.where(ground > 0, rows, np.float32(h))[::-1], axis=0)[::-1]
    below = np.maximum(foot + np.float32(0.5 - _camera(h, w).horizon), 0.5)
    tall = ((foot - rows) * CAMERA_HEIGHT_M > KERB_M * below) & (foot < h)
    stands = np.maximum.accumulate(tall[::-1], axis=0)[::-1]
    return np.float32(1) - stands


def _find_plants(red: Floats, blue: Floats) -> Floats:
    """How surely each pixel is green, against the grey of the road."""
    return _ramp(_beside_the_road(cv2.blur(red + blue, (3, 3))), -0.12, -0.26)


def _beside_the_road(values: Floats) -> Floats:
    """``values`` (H, W) less what they typically are on the road ahead."""
    h, w = values.shape
    top, left = int(0.62 * h), int(0.3 * w)
    ahead = values[top : max(int(0.85 * h), top + 1), left : max(int(0.7 * w), left + 1)]
    return values - np.float32(np.median(ahead))


def _guess_nearness(ground: Floats) -> Floats:
    """1 / distance (H, W) from the extent of the ground alone, sky left aside.

    On a plane, nearness grows linearly with the row below the horizon. Going up a column it falls
    by one row's worth on ground and stays as it is on whatever stands there.
    """
    h, w = ground.shape
    camera = _camera(h, w)
    plane = np.maximum(camera.below, 0) * np.float32(camera.per_row)
    passed = cv2.blur(ground, _box(w, 64, rows=1)) * (camera.below > 0)
    # Nothing stands in the lowest rows but the bonnet; what is not like road there is still near.
    passed[int(0.88 * h) :] = 1
    receded = np.cumsum(passed[::-1], axis=0, dtype=np.float32)[::-1] * np.float32(camera.per_row)
    low = np.maximum(plane[-1] - receded, plane)
    # Between legs and under cars one sees the road; that does not make the person far away.
    low = cv2.dilate(low, np.ones((1, _odd(w / 120)), np.uint8))

    standing = low[min(int(camera.horizon), h - 1)][None]
    wall = np.abs(camera.across) / np.float32(camera.focal * STREET_HALF_WIDTH_M)
    wall = np.hypot(wall, np.float32(1 / FARTHEST_M))
    # What spans a sixth of the view is a façade across the street, not a car, and rises as one.
    box = _box(w, 6, rows=1)
    front = cv2.blur(cv2.erode(standing, np.ones(box[::-1], np.uint8)), _box(w, 4, rows=1))
    behind = np.maximum(np.minimum(front, np.float32(1 / NEAREST_FRONT_M)), wall)
    behind = np.maximum(behind, -camera.below / np.float32(camera.focal * TALLEST_M))
    height_m = CAMERA_HEIGHT_M - camera.below / (camera.focal * np.maximum(standing, 1e-4))
    high = behind + np.maximum(standing - behind, 0) * _ramp(height_m, 2.2, 1.9)
    nearness: Floats = np.where(camera.below > 0, np.maximum(low, 1 / FARTHEST_M), high)
    return nearness.astype(np.float32)


def _fit_to_edges(values: Floats, guide: Floats, full_guide: Floats) -> Floats:
    """``values`` (h, w) enlarged to the size of ``full_guide`` (H, W), with its edges.

    The guided filter (He et al., 2013): in every window the map is an affine function of the guide.
    Its coefficients are smooth, so they are found at the small size and enlarged.
    """
    box = _box(guide.shape[1], 28)
    level, mean = cv2.blur(guide, box), cv2.blur(values, box)
    variance = cv2.blur(guide * guide, box) - level * level
    slope = (cv2.blur(values * guide, box) - mean * level) / (variance + np.float32(1e-3))
    offset = cv2.blur(mean - slope * level, box)
    fitted = _enlarge(cv2.blur(slope, box), *full_guide.shape)
    fitted *= full_guide
    fitted += _enlarge(offset, *full_guide.shape)
    return fitted


def _parts_touching(mask: Any, rows: slice) -> Floats:
    """1 in the connected parts of ``mask`` that reach into ``rows``, else 0."""
    count, parts = cv2.connectedComponents(mask.astype(np.uint8), connectivity=8)
    reaches = np.zeros(count, np.float32)
    reaches[np.unique(parts[rows])] = 1
    reaches[0] = 0
    return reaches[parts]


# Each condition paints over the light it is given, in place: fresh memory costs as much as sums.

# Fog

FOG_OVERCAST = 0.8
"""How far fog evens out light and shade, in shares of what rain and snow do."""


def _fog(light: Floats, scene: _Scene, severity: int, rng: np.random.Generator) -> Floats:
    visibility_m = _at(VISIBILITY_M["fog"], severity) * math.exp(rng.uniform(-0.1, 0.1))
    airlight = _tint(rng.uniform(0.54, 0.64), rng.uniform(-0.02, 0.02))
    # Where there is fog there is hardly any sun, and hardly any shadow.
    _overcast(light, scene, FOG_OVERCAST * _at(OVERCAST, severity), 1.0)
    return _veil(light, scene, visibility_m, airlight, rng, patchiness=0.18)


def _veil(
    light: Floats,
    scene: _Scene,
    visibility_m: float,
    airlight: Colour,
    rng: np.random.Generator,
    patchiness: float,
) -> Floats:
    """Koschmieder's law: ``light * t + airlight * (1 - t)`` with ``t = exp(-extinction * d)``."""
    h, w = scene.luma.shape
    thickness = 1 + np.float32(patchiness) * _clouds(rng, h, w, 5)
    extinction = thickness * np.float32(EXTINCTION / visibility_m)
    t = cv2.exp(-extinction / np.maximum(scene.nearness, np.float32(1e-6)))
    # Forward scattering softens what is far; a soft image of an even surface is that surface.
    _cover(light, cv2.blur(light, _box(w, 100)), np.float32(0.8) * (1 - t))
    _cover(light, _row(airlight, w), 1 - t)
    return light


# Night

AMBIENT = (0.36, 0.19, 0.103, 0.056, 0.031)
"""Share of the daylight left at night, per severity."""

SHOT_NOISE = (0.0005, 0.0010, 0.0019, 0.0034, 0.0056)
"""Variance of the noise per unit of light: the camera's gain."""

READ_NOISE = (0.0008, 0.0013, 0.0020, 0.0030, 0.0042)
"""Standard deviation of the noise that is there without light."""

WINDOWS_LIT = 0.25
"""Share of the windows behind which there is light."""

SODIUM: Colour = (1.0, 0.60, 0.22)
WARM_WHITE: Colour = (1.0, 0.80, 0.55)
COOL_WHITE: Colour = (0.90, 0.96, 1.0)
TAIL_LIGHT: Colour = (1.0, 0.10, 0.05)


class _Lamp(NamedTuple):
    """A light in the street: metres to the right, above the road and ahead, and what it is like."""

    x: float
    y: float
    z: float
    radius_m: float
    colour: Colour


def _night(light: Floats, scene: _Scene, severity: int, rng: np.random.Generator) -> Floats:
    h, w = scene.luma.shape
    street = SODIUM if rng.random() < 0.6 else WARM_WHITE
    lamps = _street_lamps(rng, street) + _car_lights(rng)
    lamps = [lamp for lamp in lamps if _has_room(lamp, scene)]

    _flatten(light, scene, 0.45)
    light *= np.float32(math.sqrt(0.10 / max(float(light.mean()), 0.01)))
    glow = _tint(_at(AMBIENT, severity) * 0.035, rng.uniform(-0.1, 0.15))
    up = np.clip(1 + _camera(h, w).below / np.float32(HORIZON_IN_HEIGHTS * h), 0, 1)
    sky = (np.float32(0.35) + up * up)[..., None] * _row(glow, w) * (1 + light)
    light *= _illumination(scene, severity, rng, lamps, street)
    _cover(light, sky, scene.sky)
    light += _draw_lights(lamps, scene, rng)

    shot, read = _at(SHOT_NOISE, severity), _at(READ_NOISE, severity)
    noise = _noise(rng, h, w)
    noise *= cv2.sqrt(light * np.float32(shot) + np.float32(read * read))
    light += noise
    return light


def _street_lamps(rng: np.random.Generator, colour: Colour) -> list[_Lamp]:
    x, y, gap = rng.uniform(5.5, 7.5), rng.uniform(6.5, 8.5), rng.uniform(26, 34)
    z = rng.uniform(16, 30)
    lamps = []
    for number in range(6):
        side = 1 if (number % 2 == 0) == (rng.random() < 0.9) else -1
        lamps.append(_Lamp(side * x, y, z + gap * number * 0.6, 0.16, colour))
    return lamps


def _car_lights(rng: np.random.Generator) -> list[_Lamp]:
    lamps = []
    for lane, colour in ((-3.4, COOL_WHITE), (rng.uniform(-0.4, 0.4), TAIL_LIGHT)):
        # One car near and one far, so that no two coincide.
        for z in rng.uniform((32, 65), (50, 95)):
            size = 0.16 if colour is COOL_WHITE else 0.11
            lamps += [_Lamp(lane + side, 0.7, float(z), size, colour) for side in (-0.65, 0.65)]
    return lamps


def _place(lamp: _Lamp, height: int, width: int) -> tuple[float, float, float]:
    """Column, row and radius in pixels at which ``lamp`` is seen."""
    camera = _camera(height, width)
    scale = camera.focal / lamp.z
    row = camera.horizon - scale * (lamp.y - CAMERA_HEIGHT_M)
    return width / 2 + scale * lamp.x, row, scale * lamp.radius_m


def _has_room(lamp: _Lamp, scene: _Scene) -> bool:
    """Whether nothing nearer seems to stand where the lamp would be."""
    h, w = scene.luma.shape
    column, row, _ = _place(lamp, h, w)
    if not (0 <= column < w and 0 <= row < h):
        return False
    # The row below counts too: the lamp of a car would hover above the edge of something near.
    return bool((scene.nearness[int(row) : int(row) + 2, int(column)] < 1.4 / lamp.z).all())


def _illumination(
    scene: _Scene,
    severity: int,
    rng: np.random.Generator,
    lamps: Sequence[_Lamp],
    street: Colour,
) -> Floats:
    """How much light of each colour falls on the scene, (H, W, 3): 1 is daylight."""
    h, w = scene.luma.shape
    nearness = _shrink(scene.nearness)
    height, width = nearness.shape
    camera = _camera(height, width)
    ambient = _at(AMBIENT, severity)
    moon = _tint(ambient, -rng.uniform(0.02, 0.12))

    # Low beams: a cone that widens ahead, cut off a little above the horizon.
    z = 1 / np.maximum(nearness, np.float32(1 / FARTHEST_M))
    x = camera.across * z / np.float32(camera.focal)
    beam = cv2.exp(-np.square(x / (1.6 + 0.16 * z))) * (1 / (1 + np.square(z / 13)))
    beam *= _ramp(camera.below / np.float32(height), -0.06, 0.06) * np.float32(0.95) + 0.05
    beam *= np.float32(2.2 * ambient**0.7)

    pools = np.zeros_like(beam)
    rows, columns = np.arange(height, dtype=np.float32), np.arange(width, dtype=np.float32)
    for lamp in lamps:
        if lamp.y < 3:
            continue
        column, row, _ = _place(lamp, height, width)
        scale = camera.focal / lamp.z
        foot = camera.horizon + scale * CAMERA_HEIGHT_M
        reach = 6.0 * scale
        middle = 0.35 * row + 0.65 * foot
        tall = 0.75 * (foot - row)
        pool = np.exp(-np.square((rows - middle) / tall))[:, None] * np.exp(
            -np.square((columns - column) / reach)
        )
        pools += np.float32(3.0 * ambient**0.8) * pool
    channels = [m + c * beam + s * pools for m, c, s in zip(moon, WARM_WHITE, street, strict=True)]
    field = cv2.merge([channel.astype(np.float32) for channel in channels])
    return _enlarge(field, h, w)


def _draw_lights(lamps: Sequence[_Lamp], scene: _Scene, rng: np.random.Generator) -> Floats:
    """Light that comes from lamps, windows and their glare, (H, W, 3)."""
    h, w = scene.luma.shape
    layer = np.zeros((h, w, 3), np.uint8)
    for lamp in lamps:
        column, row, radius = _place(lamp, h, w)
        colour = tuple(int(255 * math.sqrt(c)) for c in lamp.colour)
        centre = round(column * 16), round(row * 16)
        cv2.circle(layer, centre, round(max(radius, 0.6) * 16), colour, -1, cv2.LINE_AA, 4)
    lights = _to_light(layer)
    lights *= np.float32(10)
    _light_windows(lights, scene, rng)

    small = _shrink(lights)
    width = small.shape[1]
    glare = np.float32(0.3) * cv2.GaussianBlur(small, (0, 0), max(width / 160, 0.3))
    # Boxes over boxes come close to a bell, and cost the same at any width.
    for share, parts in ((0.5, 24), (0.8, 8)):
        wide = small
        for _ in range(3):
            wide = cv2.blur(wide, _box(width, parts))
        glare += np.float32(share) * wide
    lights += _enlarge(glare, h, w)
    return lights


def _light_windows(lights: Floats, scene: _Scene, rng: np.random.Generator) -> None:
    """Light behind some windows of façades: dark spots there, shaped as windows are."""
    h, w = scene.luma.shape
    upper = slice(0, max(1, int((HORIZON_IN_HEIGHTS - 0.05) * h)))
    # Drawn per place and not per spot, so that a spot more or less leaves all other chance alone.
    grid = (max(1, 56 * h // w), 56)
    strengths = rng.uniform(0.15, 0.5, size=grid) * (rng.random(grid) < WINDOWS_LIT)
    warmths = rng.uniform(-0.5, 1, size=grid)

    luma = (scene.luma[upper] * 255).astype(np.uint8)
    dark = cv2.morphologyEx(luma, cv2.MORPH_BLACKHAT, np.ones(_box(w, 36), np.uint8))
    dark = cv2.morphologyEx(dark, cv2.MORPH_OPEN, np.ones((_odd(w / 130), _odd(w / 170)), np.uint8))
    wall = (scene.sky[upper] < 0.5) & (scene.plants[upper] < 0.3)
    spots = ((dark > 30) & wall).astype(np.uint8)
    _, parts, stats, centres = cv2.connectedComponentsWithStats(spots, connectivity=4)
    _, top, wide, tall, area = stats.T
    fits = (area > 0.65 * wide * tall) & (np.maximum(wide, tall) < w / 25)
    fits &= (wide < 1.8 * tall) & (tall < 3 * wide) & (top > 0)
    fits[0] = False
    place = tuple(
        np.clip(c * n / size, 0, n - 1).astype(int)
        for c, n, size in zip(centres.T[::-1], grid, (h, w), strict=True)
    )
    strength, warmth = strengths[place] * fits, warmths[place]
    soft = _ramp(dark.astype(np.float32), 15, 45)
    channels = [
        (colour * strength * (1 - less * warmth)).astype(np.float32)[parts] * soft
        for colour, less in zip(WARM_WHITE, (0, 0.1, 0.3), strict=True)
    ]
    lights[upper] += cv2.merge(channels)


def _noise(rng: np.random.Generator, height: int, width: int) -> Floats:
    """Unit noise (H, W, 3), mostly grey, with coarser blotches of colour as cameras leave them."""
    grey = rng.standard_normal((height, width), dtype=np.float32)
    half = (max(1, height // 2), max(1, width // 2), 3)
    blotches = rng.standard_normal(half, dtype=np.float32)
    blotches *= np.float32(0.8)
    noise = _enlarge(blotches, height, width)
    noise += _spread(grey * np.float32(0.85))
    return noise


# Rain

STREAKS = (150, 300, 550, 850, 1200)
"""Streaks of rain in view."""

DROPS = (5, 10, 16, 24, 34)
"""Drops on the lens."""

WETNESS = (0.30, 0.45, 0.60, 0.72, 0.82)
"""How dark and how shiny water has made the ground."""


def _rain(light: Floats, scene: _Scene, severity: int, rng: np.random.Generator) -> Floats:
    h, w = scene.luma.shape
    _overcast(light, scene, _at(OVERCAST, severity), 1.15 + 0.05 * severity)
    _wet_road(light, scene, _at(WETNESS, severity), rng)
    grey = _tint(rng.uniform(0.36, 0.44), rng.uniform(-0.05, 0.0))
    visibility_m = _at(VISIBILITY_M["rain"], severity) * math.exp(rng.uniform(-0.1, 0.1))
    _veil(light, scene, visibility_m, grey, rng, patchiness=0.1)

    slant = rng.uniform(-0.35, 0.35)
    falling = _specks(rng, h, w, _at(STREAKS, severity), RAIN_LAYERS, slant, rush=0.15)
    _cover(light, np.float32(0.55), falling)
    _drops(light, _at(DROPS, severity), rng)
    return light


def _wet_road(light: Floats, scene: _Scene, wetness: float, rng: np.random.Generator) -> None:
    """The ground darker, and mirroring what stands on it."""
    h, w = scene.luma.shape
    ground, small = _shrink(scene.ground), _shrink(light)
    height, width = ground.shape
    # Where each column of ground ends, seen from below; what stands there is mirrored about it.
    rows = np.arange(height, dtype=np.float32)[:, None]
    edge = np.maximum.accumulate(np.where(ground < 0.5, rows, np.float32(-1)), axis=0)
    edge = np.maximum(cv2.blur(edge.astype(np.float32), _box(width, 32, rows=1)), 0)
    mirrored = np.clip(2 * edge - rows, 0, height - 1).astype(np.float32)
    columns = np.broadcast_to(np.arange(width, dtype=np.float32), (height, width))
    ripple = _clouds(rng, height, width, 40) * np.float32(0.006 * width)
    image = cv2.remap(small, columns + ripple, mirrored, cv2.INTER_LINEAR)
    # Beyond the upper edge of the image there is sky to mirror, and it is bright.
    beyond = _ramp(2 * edge - rows, 0.05 * height, -0.10 * height)
    _cover(image, np.float32(0.34), beyond)
    image = cv2.blur(image, (_odd(width / 80), _odd(height / 14)))

    camera = _camera(h, w)
    grazing = np.float32(1) / (1 + np.maximum(camera.below, 0) * np.float32(7 / h))
    puddles = 0.75 + 0.45 * _clouds(rng, h, w, 9)
    shine = scene.ground * (grazing * np.float32(1.15 * wetness)) * np.clip(puddles, 0.2, 1.2)
    image = _enlarge(image, h, w)
    image *= _spread(shine)
    light *= _spread(1 - np.float32(0.70 * wetness) * scene.ground)
    light += image


def _drops(light: Floats, count: int, rng: np.random.Generator) -> None:
    """Drops on the lens, out of focus: each bends in a smeared, upside-down view of the street."""
    h, w = light.shape[:2]
    smeared = cv2.blur(light, _box(w, 34))
    places = rng.random((count, 2))
    sizes = 0.008 + 0.022 * rng.random(count) ** 2
    for (across, down), size in zip(places, sizes, strict=True):
        radius = max(2, round(size * w))
        column, row = int(across * w), int(down * h)
        top, bottom = max(0, row - radius), min(h, row + radius + 1)
        left, right = max(0, column - radius), min(w, column + radius + 1)
        y, x = np.ogrid[top - row : bottom - row, left - column : right - column]
        inside = np.sqrt(np.square(x) + np.square(y * 0.9)).astype(np.float32) / radius
        alpha = _ramp(inside, 1.0, 0.55)[..., None] * np.float32(0.7)
        bent_rows = np.clip(row - 3 * y[:, 0], 0, h - 1)
        bent_columns = np.clip(column - 3 * x[0], 0, w - 1)
        view = smeared[bent_rows[:, None], bent_columns[None]]
        rim = 1 + np.float32(0.3) * (y / np.float32(radius))[..., None]
        patch = light[top:bottom, left:right]
        patch += (view * rim - patch) * alpha


# Snow

ROAD_COVER = (0.10, 0.30, 0.52, 0.75, 0.95)
"""Share of the road under snow, per severity."""

SIDE_COVER = (0.35, 0.60, 0.80, 0.94, 1.0)
"""Share of pavement and verge under snow."""

TRACKS = (0.95, 0.90, 0.80, 0.62, 0.45)
"""How far tyres have cleared their tracks."""

LEDGES = (0.20, 0.35, 0.50, 0.65, 0.80)
"""How white ledges and leaves have become."""

LANE_M = 3.5
"""Width of a lane, in the middle of which cars keep their tracks."""

FLAKES = (250, 500, 900, 1400, 2000)
"""Flakes in view."""


def _snow(light: Floats, scene: _Scene, severity: int, rng: np.random.Generator) -> Floats:
    h, w = scene.luma.shape
    _overcast(light, scene, _at(OVERCAST, severity), 1.05)
    _snow_on_ground(light, scene, severity, rng)
    _snow_on_ledges(light, scene, _at(LEDGES, severity), rng)
    grey = _tint(rng.uniform(0.52, 0.60), rng.uniform(-0.03, 0.0))
    visibility_m = _at(VISIBILITY_M["snow"], severity) * math.exp(rng.uniform(-0.1, 0.1))
    _veil(light, scene, visibility_m, grey, rng, patchiness=0.12)

    slant, size = rng.uniform(-0.5, 0.5), rng.uniform(0.8, 1.25)
    falling = _specks(rng, h, w, _at(FLAKES, severity), SNOW_LAYERS, slant, rush=0.5, size=size)
    _cover(light, np.float32(0.72), falling)
    return light


def _snow_on_ground(light: Floats, scene: _Scene, severity: int, rng: np.random.Generator) -> None:
    """Snow on road and pavement, with tracks of tyres and the slush in them."""
    h, w = scene.luma.shape
    camera = _camera(h, w)
    start = min(max(int(camera.horizon), 0), h - 1)
    below = np.maximum(camera.below[start:], 0.5)
    ahead_m = np.minimum(1 / (below * np.float32(camera.per_row)), 200)
    across_m = camera.across * np.float32(CAMERA_HEIGHT_M) / below

    # The texture lies on the ground: drawn as from above, stretched along the way cars go.
    texture = _ground_texture(rng)
    map_x = np.clip(across_m * 20, -8000, 8000) + np.float32(rng.uniform(0, 256))
    map_y = np.broadcast_to(ahead_m * 7, map_x.shape) + np.float32(rng.uniform(0, 256))
    rough = cv2.remap(
        texture, map_x, map_y.astype(np.float32), cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP
    )
    rough *= _ramp(ahead_m, 60, 15)

    middle = np.float32(rng.uniform(-0.25, 0.25))
    wander = middle + np.float32(0.25) * np.sin(ahead_m / 9 + np.float32(rng.uniform(0, 6)))
    lanes = (across_m - wander) * np.float32(1 / LANE_M)
    lanes -= np.rint(lanes)
    from_track = (np.abs(lanes) - np.float32(0.78 / LANE_M)) * np.float32(LANE_M / 0.30)
    track = cv2.exp(-from_track * from_track)
    carriageway = _ramp(np.abs(across_m), 6.5, 4.5)
    track *= carriageway * np.clip(1 + rough, 0.3, 1)

    cover = _at(SIDE_COVER, severity) + carriageway * np.float32(
        _at(ROAD_COVER, severity) - _at(SIDE_COVER, severity)
    )
    cover = _ramp(cover * 2.2 - 1.1 + rough, -0.9, 0.9)
    cover *= 1 - np.float32(_at(TRACKS, severity)) * track
    ground = scene.ground[start:]
    cover *= np.float32(0.5 + 0.5 * _at(SIDE_COVER, severity))
    part = light[start:]
    slush = part * _row((0.80, 0.77, 0.74), w) + np.float32(0.015)
    _cover(part, slush, track * ground * np.float32(0.8))

    typical = max(float(np.median(scene.luma[start:])), 0.05)
    shade = cv2.pow(np.clip(scene.luma[start:] / typical, 0.45, 1.25), 0.6)
    white = shade * (np.float32(0.52) + np.float32(0.07) * rough)
    bright = _spread(white) * _row((0.96, 0.985, 1.0), w)
    _cover(part, bright, cover * ground * np.float32(0.95))


def _snow_on_ledges(light: Floats, scene: _Scene, amount: float, rng: np.random.Generator) -> None:
    """Snow on edges that face up, which daylight shows as bright above dark, and on leaves."""
    h, w = scene.luma.shape
    step = max(1, round(h / 90))
    along = cv2.blur(scene.luma, (_odd(w / 60), 1))
    lower = along[np.minimum(np.arange(h) + step, h - 1)]
    ledge = _ramp(along - lower, 0.05, 0.20)
    local = scene.luma - cv2.blur(scene.luma, _box(w, 40))
    leaves = scene.plants * _ramp(local, -0.02, 0.10) * (0.8 + 0.4 * _clouds(rng, h, w, 12))
    alpha = np.clip(np.maximum(ledge, leaves), 0, 1) * (1 - scene.ground) * (1 - scene.sky)
    _cover(light, _row((0.48, 0.49, 0.50), w), alpha * np.float32(amount))


def _ground_texture(rng: np.random.Generator) -> Floats:
    """Roughness (256, 256) around 0 that tiles."""
    total = np.zeros((256, 256), np.float32)
    for cells, weight in ((8, 0.25), (32, 0.35), (128, 0.35)):
        grid = rng.standard_normal((cells, cells), dtype=np.float32)
        grid = np.pad(grid, 2, mode="wrap")
        size = 256 * (cells + 4) // cells
        edge = (size - 256) // 2
        large = cv2.resize(grid, (size, size), interpolation=cv2.INTER_CUBIC)
        total += np.float32(weight) * large[edge : edge + 256, edge : edge + 256]
    return total


# What several conditions share

OVERCAST = (0.25, 0.35, 0.45, 0.52, 0.58)
"""How far sunlight and shade are evened out, per severity."""


def _flatten(light: Floats, scene: _Scene, strength: float) -> None:
    """Light and shade evened out: sun and its shadows weakened, surfaces kept."""
    luma = scene.small_luma
    base = cv2.blur(_fit_to_edges(luma, luma, luma), _box(luma.shape[1], 40))
    # Squared, for luma is the square root of light.
    gain = cv2.pow(np.float32(0.30) / (base + np.float32(0.06)), 2 * strength)
    light *= _spread(_enlarge(np.minimum(gain, np.float32(3)), *scene.luma.shape))


def _overcast(light: Floats, scene: _Scene, strength: float, exposure: float) -> None:
    """A day without sun: even, paler light."""
    _flatten(light, scene, strength)
    grey = _spread(cv2.cvtColor(light, cv2.COLOR_RGB2GRAY))
    grey *= np.float32(strength * exposure)
    light *= np.float32((1 - strength) * exposure)
    light += grey


class _Layer(NamedTuple):
    """Rain or snow at one distance: its share of the specks and how these look."""

    share: float
    length: float
    """In widths of the image."""
    thickness: float
    """In pixels of an image 512 wide."""
    alpha: float


RAIN_LAYERS = (
    _Layer(0.80, 0.018, 1, 0.055),
    _Layer(0.18, 0.045, 1, 0.075),
    _Layer(0.02, 0.110, 2, 0.07),
)
SNOW_LAYERS = (
    _Layer(0.86, 0.002, 1, 0.35),
    _Layer(0.13, 0.005, 2, 0.50),
    _Layer(0.01, 0.014, 5, 0.45),
)


def _specks(
    rng: np.random.Generator,
    height: int,
    width: int,
    count: int,
    layers: Sequence[_Layer],
    slant: float,
    *,
    rush: float,
    size: float = 1.0,
) -> Floats:
    """How much of each pixel is hidden by rain or flakes, (H, W).

    Specks fall at a slant and fly outwards from the vanishing point, for the car drives into them.
    """
    clear = np.ones((height, width), np.float32)
    for layer in layers:
        number = max(1, int(count * layer.share))
        centres = rng.random((number, 2), dtype=np.float32) * np.array((width, height), np.float32)
        lengths = rng.uniform(0.6, 1.4, size=(number, 1)) * (layer.length * size * width)
        origin = np.array((width / 2, HORIZON_IN_HEIGHTS * height), np.float32)
        outward = (centres - origin) * np.float32(2 * rush / width)
        half = (np.array((slant, 1), np.float32) + outward) * lengths / 2
        ends = np.round(np.stack([centres - half, centres + half], axis=1) * 16).astype(np.int32)
        drawn = np.zeros((height, width), np.uint8)
        thickness = layer.thickness * size * width / 512
        cv2.polylines(drawn, list(ends), False, 255, max(1, round(thickness)), cv2.LINE_AA, 4)
        soft = cv2.GaussianBlur(drawn, (0, 0), max(0.35 * thickness, 0.3))
        clear *= 1 - soft * np.float32(layer.alpha / 255)
    return 1 - clear


def _clouds(rng: np.random.Generator, height: int, width: int, cells: int) -> Floats:
    """Smooth noise (H, W) within about ±1, ``cells`` of it across the image."""
    down = min(max(2, round(cells * height / width)), max(2, height))
    grid = rng.uniform(-1, 1, size=(down, max(2, cells))).astype(np.float32)
    return cv2.resize(grid, (width, height), interpolation=cv2.INTER_CUBIC)


def _cover(light: Floats, other: Floats | np.float32, share: Floats) -> None:
    """Put ``other`` in the place of ``light`` (H, W, 3) by ``share`` (H, W)."""
    light -= other
    light *= _spread(1 - share)
    light += other


def _shrink(image: Any) -> Any:
    """``image`` (H, W, ...) at the size at which scenes are understood."""
    h, w = image.shape[:2]
    scale = min(1.0, WORKING_SIZE[0] / w, WORKING_SIZE[1] / h)
    if scale == 1:
        return image
    size = max(1, round(w * scale)), max(1, round(h * scale))
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA)


def _enlarge(image: Floats, height: int, width: int) -> Floats:
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)


# NumPy is slow at repeating short rows of three, so colours and maps are spread out first.


def _spread(values: Floats) -> Floats:
    """One map (H, W) as three equal channels (H, W, 3)."""
    return cv2.merge([values, values, values])


def _row(colour: Colour, width: int) -> Floats:
    """``colour`` for a row of pixels, (W, 3)."""
    return np.tile(np.array(colour, np.float32), (width, 1))


def _to_light(image: Pixels) -> Floats:
    """Bytes as light from 0 to 1, the camera's response taken as a square root."""
    table = np.square(np.arange(256, dtype=np.float32) / 255)
    return cv2.LUT(image, table)


def _to_bytes(light: Floats) -> Pixels:
    level = cv2.sqrt(np.clip(light, 0, 1)) * np.float32(255)
    image: Pixels = np.rint(level).astype(np.uint8)
    return image


def _ramp(x: Any, low: float, high: float) -> Floats:
    """0 up to ``low``, 1 from ``high`` on, smooth between; falling where ``low > high``."""
    t = np.multiply(x - np.float32(low), np.float32(1 / (high - low)), dtype=np.float32)
    np.clip(t, 0, 1, out=t)
    smooth: Floats = t * t
    t *= -2
    t += 3
    smooth *= t
    return smooth


def _tint(level: float, warmth: float) -> Colour:
    """A cool grey of ``level``, redder where ``warmth`` is above 0 and bluer below.

    Cameras in cars lean to green; a neutral sky looks pink in their images.
    """
    return level * (0.955 + warmth), level, level * (0.99 - warmth)


def _at(table: Sequence[T], severity: int) -> T:
    return table[severity - 1]


def _odd(size: float) -> int:
    return int(size) | 1


def _box(width: int, share: float, rows: int | None = None) -> tuple[int, int]:
    """A window that spans one ``share``-th of the width, as OpenCV wants it: odd, (w, h)."""
    side = _odd(width / share)
    return side, side if rows is None else rows


_SIMULATORS: dict[str, Callable[[Floats, _Scene, int, np.random.Generator], Floats]] = {
    "fog": _fog,
    "night": _night,
    "rain": _rain,
    "snow": _snow,
}
