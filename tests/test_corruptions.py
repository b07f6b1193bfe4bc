"""The corruptions against their formulas, against plain loops, and at the edges of their input."""

from __future__ import annotations

import colorsys
import hashlib
import io
import math
import pickle
import subprocess
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest
from PIL import Image

import bestta
from bestta.data import corruptions, frost
from bestta.data.corruptions import CONSTANTS, CORRUPTIONS, EXTRA, Corruption, corrupt
from bestta.data.seeds import generator

NAMES = (*CORRUPTIONS, *EXTRA)
FAMILIES = ("cifar", "imagenet")
BLURS = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur")
DRAWN_FROM_NOTHING = (
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
)


def texture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth and a fine pattern over one another, with all three channels different."""
    rng = np.random.default_rng(seed)
    fine = rng.normal(0, 18, (height, width, 3))
    coarse = rng.normal(0, 50, (height // 8 + 2, width // 8 + 2, 3))
    grown = np.kron(coarse, np.ones((8, 8, 1)))[:height, :width]
    return np.clip(115 + grown + fine, 0, 255).astype(np.uint8)


def natural(height: int, width: int) -> np.ndarray:
    """Noise whose spectrum falls with the frequency, as that of photographs does."""
    spectrum = np.fft.fft2(np.random.default_rng(0).normal(size=(3, height, width)))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))
    values = np.fft.ifft2(spectrum / np.maximum(frequency, 0.01)).real
    return np.clip(115 + 40 * values / values.std(), 0, 255).astype(np.uint8).transpose(1, 2, 0)


def flat(grey: int, height: int = 40, width: int = 60) -> np.ndarray:
    return np.full((height, width, 3), grey, dtype=np.uint8)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(float) - b).mean())


# What holds for all of them


def test_there_are_fifteen_corruptions_and_four_more_in_both_families():
    assert len(CORRUPTIONS) == 15
    assert len(EXTRA) == 4
    for family in FAMILIES:
        assert sorted(CONSTANTS[family]) == sorted(NAMES)
        assert all(len(severities) == 5 for severities in CONSTANTS[family].values())


@pytest.mark.parametrize("name", NAMES)
def test_any_size_keeps_its_shape(name):
    for family in FAMILIES:
        for severity in range(1, 6):
            for height, width in ((32, 32), (97, 130), (130, 97), (1, 1), (2, 3), (1, 40)):
                image = texture(height, width)
                corrupted = corrupt(image, name, severity, seed=3, family=family)
                assert corrupted.shape == image.shape
                assert corrupted.dtype == np.uint8
                assert corrupted.flags.c_contiguous
                assert corrupted.flags.writeable


@pytest.mark.parametrize("name", NAMES)
def test_the_image_that_comes_in_is_left_alone(name):
    image = texture(33, 47)
    before = image.copy()
    image.setflags(write=False)
    corrupted = corrupt(image, name, 1, family="cifar")
    assert np.array_equal(image, before)
    assert not np.shares_memory(image, corrupted)


@pytest.mark.parametrize("name", NAMES)
def test_a_view_is_corrupted_like_its_copy(name):
    view = texture(50, 40).transpose(1, 0, 2)[::-1, ::2]
    corrupted = corrupt(view, name, 3)
    assert np.array_equal(corrupted, corrupt(np.ascontiguousarray(view), name, 3))
    assert corrupted.flags.c_contiguous


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_another_image_where_something_is_drawn_and_only_there(name):
    image = texture(64, 80)
    first, again, other = (corrupt(image, name, 3, seed=seed) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert np.array_equal(first, other) == (name in DRAWN_FROM_NOTHING)


def test_seeds_may_be_words_and_numbers():
    image = texture(20, 20)
    one = corrupt(image, "gaussian_noise", 2, seed=(7, "lindau"))
    assert np.array_equal(one, corrupt(image, "gaussian_noise", 2, seed=[7, "lindau"]))
    assert not np.array_equal(one, corrupt(image, "gaussian_noise", 2, seed=(7, "munster")))


# The package itself imports PyTorch, which takes seconds and is not needed here.
DIGESTS = """
import hashlib, sys, types
import cv2, numpy as np
sys.modules["bestta"] = types.ModuleType("bestta")
sys.modules["bestta"].__path__ = [sys.argv[1]]
from bestta.data.corruptions import CORRUPTIONS, EXTRA, corrupt
image = np.frombuffer(bytes.fromhex(sys.stdin.read()), np.uint8).reshape(64, 96, 3)
cv2.setNumThreads(3)
for name in reversed((*CORRUPTIONS, *EXTRA)):
    done = corrupt(image, name, 4, seed=("a", 1))
    print(name, hashlib.sha256(done.tobytes()).hexdigest())
"""


def test_another_process_with_other_threads_and_in_another_order_gives_the_same_bytes():
    image = texture(64, 96)
    ours = {n: corrupt(image, n, 4, seed=("a", 1)) for n in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, *bestta.__path__],
        input=image.tobytes().hex(),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = dict(line.split() for line in done.stdout.splitlines())
    assert theirs == {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in ours.items()}


@pytest.fixture
def _threads():
    before = cv2.getNumThreads()
    yield
    cv2.setNumThreads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_threads_does_not_show(name):
    image = texture(200, 310)
    done = []
    for threads in (1, 4):
        cv2.setNumThreads(threads)
        done.append(corrupt(image, name, 5))
    assert np.array_equal(*done)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name",
    [
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "speckle_noise",
        "zoom_blur",
        "gaussian_blur",
        "defocus_blur",
        "brightness",
        "contrast",
        "pixelate",
        "jpeg_compression",
    ],
)
def test_a_higher_severity_changes_more(name, family):
    image = natural(120, 160)
    changes = [difference(image, corrupt(image, name, s, family=family)) for s in range(1, 6)]
    assert changes == sorted(changes)
    assert changes[0] < 0.85 * changes[-1]


def test_the_families_differ_and_only_in_their_constants():
    """Where the constants agree, as for a saturation of .3, so must the bytes, and only there."""
    image = texture(32, 32)
    for name in NAMES:
        pairs = zip(*(CONSTANTS[family][name] for family in FAMILIES), strict=True)
        for severity, (cifar, imagenet) in enumerate(pairs, start=1):
            done = [corrupt(image, name, severity, family=family) for family in FAMILIES]
            assert np.array_equal(*done) == (cifar == imagenet)


# What Hendrycks & Dietterich published for the two benchmarks, transcribed a second time: for each
# corruption the numbers of severity 1 to 5.
PUBLISHED = {
    "cifar": """
gaussian_noise  .04  .06  .08  .09  .10
shot_noise  500  250  100  75  50
impulse_noise  .01  .02  .03  .05  .07
defocus_blur  .3,.4  .4,.5  .5,.6  1,.2  1.5,.1
glass_blur  .05,1,1  .25,1,1  .4,1,1  .25,1,2  .4,1,2
motion_blur  6,1  6,1.5  6,2  8,2  9,2.5
zoom_blur  1.06,.01  1.11,.01  1.16,.01  1.21,.01  1.26,.01
snow  .1,.2,1,.6,8,3,.95  .1,.2,1,.5,10,4,.9  .15,.3,1.75,.55,10,4,.9
      .25,.3,2.25,.6,12,6,.85  .3,.3,1.25,.65,14,12,.8
frost  1,.2  1,.3  .9,.4  .85,.4  .75,.45
fog  .2,3  .5,3  .75,2.5  1,2  1.5,1.75
brightness  .05  .1  .15  .2  .3
contrast  .75  .5  .4  .3  .15
elastic_transform  0,0,.08  .05,.2,.07  .08,.06,.06  .1,.04,.05  .1,.03,.03
pixelate  .95  .9  .85  .75  .65
jpeg_compression  80  65  58  50  40
speckle_noise  .06  .1  .12  .16  .2
gaussian_blur  .4  .6  .7  .8  1
saturate  .3,0  .1,0  1.5,0  2,.1  2.5,.2
spatter  .62,.1,.7,.7,.5,0  .65,.1,.8,.7,.5,0  .65,.3,1,.69,.5,0
         .65,.1,.7,.69,.6,1  .65,.1,.5,.68,.6,1
""",
    "imagenet": """
gaussian_noise  .08  .12  .18  .26  .38
shot_noise  60  25  12  5  3
impulse_noise  .03  .06  .09  .17  .27
defocus_blur  3,.1  4,.5  6,.5  8,.5  10,.5
glass_blur  .7,1,2  .9,2,1  1,2,3  1.1,3,2  1.5,4,2
motion_blur  10,3  15,5  15,8  15,12  20,15
zoom_blur  1.11,.01  1.16,.01  1.21,.02  1.26,.02  1.31,.03
snow  .1,.3,3,.5,10,4,.8  .2,.3,2,.5,12,4,.7  .55,.3,4,.9,12,8,.7
      .55,.3,4.5,.85,12,8,.65  .55,.3,2.5,.85,12,12,.55
frost  1,.4  .8,.6  .7,.7  .65,.7  .6,.75
fog  1.5,2  2,2  2.5,1.7  2.5,1.5  3,1.4
brightness  .1  .2  .3  .4  .5
contrast  .4  .3  .2  .1  .05
elastic_transform  12.5  16.25  21.25  25  30
pixelate  .6  .5  .4  .3  .25
jpeg_compression  25  18  15  10  7
speckle_noise  .15  .2  .35  .45  .6
gaussian_blur  1  2  3  4  6
saturate  .3,0  .1,0  2,0  5,.1  20,.2
spatter  .65,.3,4,.69,.6,0  .65,.3,3,.68,.6,0  .65,.3,2,.68,.5,0
         .65,.3,1,.65,1.5,1  .67,.4,1,.65,1.5,1
""",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_constants_are_the_published_ones(family):
    rows: dict[str, list[str]] = {}
    for word in PUBLISHED[family].split():
        if word[0].isalpha():
            name = word
        else:
            rows.setdefault(name, []).append(word)
    assert sorted(rows) == sorted(NAMES)
    for name, severities in rows.items():
        assert len(severities) == 5
        for severity, numbers in enumerate(severities, start=1):
            expected = tuple(float(number) for number in numbers.split(","))
            assert Corruption(name, severity, family).constants == expected, (name, severity)


def test_a_corruption_survives_pickling_and_equals_the_shortcut():
    image = texture(24, 24)
    snow = pickle.loads(pickle.dumps(Corruption("snow", 2, "cifar")))
    assert snow == Corruption("snow", 2, "cifar")
    assert np.array_equal(snow(image, 5), corrupt(image, "snow", 2, seed=5, family="cifar"))


# Noise


def test_gaussian_noise_has_its_deviation_and_no_mean():
    noisy = corrupt(flat(128, 256, 256), "gaussian_noise", 1).astype(float) - 128
    # .08 of 255; 128 is six deviations from both ends, so nothing is clipped.
    assert noisy.std() == pytest.approx(0.08 * 255, rel=0.01)
    assert abs(noisy.mean()) < 4 * 20.4 / math.sqrt(noisy.size)


def test_speckle_noise_is_in_proportion_to_the_light():
    for grey in (40, 120):
        noisy = corrupt(flat(grey, 256, 256), "speckle_noise", 1)
        assert noisy.std() == pytest.approx(0.15 * grey, rel=0.02)
    assert corrupt(flat(0), "speckle_noise", 5).max() == 0


def test_impulse_noise_makes_equal_shares_black_and_white():
    noisy = corrupt(flat(100, 256, 256), "impulse_noise", 5)
    for grey in (0, 255):
        share = float((noisy == grey).mean())
        assert abs(share - 0.135) < 4 * math.sqrt(0.135 * 0.865 / noisy.size)
    assert set(np.unique(noisy)) == {0, 100, 255}


@pytest.mark.parametrize("grey", [10, 60, 120])
def test_shot_noise_has_the_variance_of_counted_light(grey):
    """A count of mean r·g/255, scaled by 255/r: the mean is g and the variance 255·g/r."""
    noisy = corrupt(flat(grey, 256, 256), "shot_noise", 1)
    # Steps of 4.25 levels are rounded to whole ones, which moves the mean of a few by a quarter.
    assert noisy.mean() == pytest.approx(grey, abs=0.3)
    assert noisy.var() == pytest.approx(255 * grey / 60, rel=0.03)


def test_shot_noise_of_black_is_black():
    assert corrupt(flat(0), "shot_noise", 5).max() == 0


@pytest.mark.parametrize("rate", [3, 60, 500])
def test_the_poisson_table_holds_the_chances_of_each_count(rate):
    """Chances by the recursion p(k) = p(k-1)·m/k, to the half slot that rounding leaves."""
    table = corruptions.poisson_table(rate).reshape(256, -1)
    for grey in (0, 1, 77, 180, 255):
        mean, below, chance = rate * grey / 255, 0.0, math.exp(-rate * grey / 255)
        for count in range(rate):
            below += chance
            chance *= mean / (count + 1)
            value, next_value = (round(each * 255 / rate) for each in (count, count + 1))
            if next_value == value:
                continue  # two counts of one grey level
            share = (table[grey] <= value).mean()
            assert abs(share - below) < 1 / corruptions.POISSON_SLOTS


# Blur


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BLURS)
def test_a_blur_leaves_a_flat_image_as_it_is(name, family):
    for severity in range(1, 6):
        for grey in (0, 1, 86, 254, 255):
            assert np.array_equal(
                corrupt(flat(grey), name, severity, family=family, seed=severity), flat(grey)
            )


@pytest.mark.parametrize("name", BLURS)
def test_a_blur_keeps_the_mean_and_lowers_the_contrast(name):
    # Grey at its border, for a blur may bring in what lies beyond.
    image = np.full((160, 160, 3), 115, dtype=np.uint8)
    image[50:110, 50:110] = texture(60, 60)
    blurred = corrupt(image, name, 3)
    if name != "zoom_blur":
        assert blurred.mean() == pytest.approx(image.mean(), abs=0.7)
    assert blurred.std() < image.std()


def test_the_disk_of_radius_one_is_a_plus_of_five():
    kernel = corruptions.disk(1, 1e-3)
    expected = np.zeros((5, 5))
    expected[2, 1:4] = expected[1:4, 2] = 0.2
    np.testing.assert_allclose(kernel, expected, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_disk_sums_to_one_and_looks_the_same_from_all_sides(family):
    for radius, alias_blur in CONSTANTS[family]["defocus_blur"]:
        kernel = corruptions.disk(radius, alias_blur)
        assert kernel.sum() == pytest.approx(1, abs=1e-5)
        assert np.allclose(kernel, kernel.T, atol=1e-7)
        assert np.allclose(kernel, kernel[::-1], atol=1e-7)
        if radius >= 3:
            inside = (kernel > kernel.max() / 2).sum()
            assert inside == pytest.approx(math.pi * radius**2, rel=0.1)


@pytest.mark.parametrize(("radius", "side"), [(3, 3), (6, 3), (8, 3), (10, 5)])
def test_the_edge_of_a_disk_is_softened_over_three_pixels_and_over_five_beyond_a_radius_of_eight(
    radius, side
):
    """Beside it: the sharp disk, shifted by each place in the square and weighted by a Gaussian."""
    offsets = np.arange(-radius - 2, radius + 3)
    sharp = (np.hypot(offsets[:, None], offsets) <= radius).astype(float)
    near = range(-(side // 2), side // 2 + 1)
    expected = sum(
        math.exp(-2 * (y**2 + x**2)) * np.roll(sharp, (y, x), axis=(0, 1))
        for y in near
        for x in near
    )
    kernel = np.pad(corruptions.disk(radius, 0.5), 2 - side // 2)
    np.testing.assert_allclose(kernel, expected / expected.sum(), atol=1e-7)


@pytest.mark.parametrize("severity", range(1, 6))
def test_defocus_is_the_mean_over_a_disk(severity):
    """Beside it: the sum over the kernel, one shifted image a weight, in double precision."""
    image = texture(37, 50)
    kernel = corruptions.disk(*CONSTANTS["imagenet"]["defocus_blur"][severity - 1])
    margin = len(kernel) // 2
    framed = np.pad(image.astype(float), ((margin, margin), (margin, margin), (0, 0)), "reflect")
    expected = np.zeros(image.shape)
    for y, x in np.argwhere(kernel > 0):
        expected += float(kernel[y, x]) * framed[y : y + 37, x : x + 50]
    assert np.abs(corrupt(image, "defocus_blur", severity) - expected).max() <= 0.5 + 1e-2


@pytest.mark.parametrize("angle", [-135.0, -90.0, -50.0, -45.0, 0.0, 17.0, 45.0])
def test_a_streak_sums_to_one_and_lies_on_a_line(angle):
    weights, offsets = corruptions.streak(15, 8, angle)
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    assert len(weights) == 31
    # Half a Gaussian: exp(-1/2) after one deviation.
    assert weights[8] / weights[0] == pytest.approx(math.exp(-0.5), rel=1e-5)
    exact = np.arange(31)[:, None] * [math.sin(math.radians(angle)), math.cos(math.radians(angle))]
    assert np.abs(offsets - exact).max() <= 0.5 + 1e-9
    assert offsets[0].tolist() == [0, 0]


def test_motion_blur_is_the_sum_of_shifted_images():
    """Beside it: the sum written as a loop over pixels of an image with repeated borders."""
    image = texture(12, 15)
    blurred = corruptions.motion_blur(image, generator("any"), 4, 3)
    weights, offsets = corruptions.streak(4, 3, generator("any").uniform(-45, 45))
    expected = np.zeros(image.shape)
    for y in range(12):
        for x in range(15):
            for weight, (down, right) in zip(weights, offsets, strict=True):
                seen = image[np.clip(y + down, 0, 11), np.clip(x + right, 0, 14)]
                expected[y, x] += weight * seen.astype(float)
    assert np.abs(blurred - expected).max() <= 0.5 + 1e-3


def test_zoom_blur_is_the_mean_of_zoomed_images():
    """Beside it: one axis after the other by np.interp, pixel centres at half numbers."""

    def zoom_axis(values: np.ndarray, factor: float) -> np.ndarray:
        whole = len(values)
        part = math.ceil(whole / factor)
        size = round(part * factor)
        cut = values[(whole - part) // 2 :][:part]
        at = (np.arange(size) + 0.5) * part / size - 0.5
        large = np.stack([np.interp(at, np.arange(part), row) for row in cut.T], axis=1)
        return large[(size - whole) // 2 :][:whole]

    image = texture(24, 31)
    factors = [1 + 0.01 * step for step in range(12)]  # np.arange(1, 1.11, .01) goes to 1.11
    expected = np.zeros(image.shape)
    for channel in range(3):
        plane = image[..., channel].astype(float)
        layers = [plane] + [zoom_axis(zoom_axis(plane, f).T, f).T for f in factors]
        expected[..., channel] = np.mean(layers, axis=0)
    assert np.abs(corrupt(image, "zoom_blur", 1) - expected).max() <= 0.5 + 1e-2


def test_zooming_corner_to_corner_keeps_the_corners():
    layer = np.arange(36, dtype=np.float32).reshape(6, 6)
    large = corruptions.zoomed(layer, 2.0, corner_to_corner=True)  # the middle 3×3, as 6×6
    # Rows and columns 1 to 3 are enlarged: (6 - 3) // 2 = 1.
    assert large[[0, 0, -1, -1], [0, -1, 0, -1]].tolist() == pytest.approx(
        layer[[1, 1, 3, 3], [1, 3, 1, 3]].tolist(), abs=1e-5
    )


@pytest.mark.parametrize(("reach", "rounds"), [(1, 1), (1, 2), (2, 3), (4, 2)])
def test_glass_equals_the_loop_that_visits_one_pixel_after_the_other(reach, rounds):
    """The published loop, on the same draws: each pixel takes what another has at that moment."""
    height, width = 23, 31
    expected = np.arange(height * width).reshape(height, width)
    rng = generator("glass")
    for _ in range(rounds):
        shape = (2, height - 2 * reach, width - 2 * reach)
        down, right = rng.integers(-reach, reach, shape, dtype=np.int32)
        for y in range(height - reach, reach, -1):
            for x in range(width - reach, reach, -1):
                step = down[y - reach - 1, x - reach - 1], right[y - reach - 1, x - reach - 1]
                expected[y, x] = expected[y + step[0], x + step[1]]
    ours = corruptions.scatter(height, width, reach, rounds, generator("glass"))
    assert np.array_equal(ours, expected)


def test_glass_takes_pixels_from_nearby_and_leaves_the_frame_alone():
    source = corruptions.scatter(120, 150, 3, 2, generator(1))
    rows, columns = np.divmod(source, 150)
    away = np.maximum(abs(rows - np.arange(120)[:, None]), abs(columns - np.arange(150)))
    assert np.median(away) <= 3
    assert away.max() <= 30
    assert away[:4].max() == away[:, :4].max() == away[-2:].max() == away[:, -2:].max() == 0


def test_gaussian_blur_of_a_point_is_a_gaussian():
    image = flat(0, 41, 41)
    image[20, 20] = 255
    blurred = corrupt(image, "gaussian_blur", 1)[..., 0].astype(float)
    offsets = np.arange(-20, 21)
    expected = 255 * np.exp(-(offsets[:, None] ** 2 + offsets**2) / 2) / (2 * math.pi)
    assert np.abs(blurred - expected).max() < 1


# Weather


def test_clouds_lie_between_zero_and_one_and_are_rougher_with_a_smaller_decay():
    roughness = []
    for decay in (3, 2, 1.4):
        clouds = [corruptions.plasma(100, decay, generator(i)) for i in range(4)]
        assert all(c.shape == (128, 128) and c.min() == 0 and c.max() == 1 for c in clouds)
        roughness.append(np.mean([np.abs(np.diff(c, axis=0)).mean() / c.std() for c in clouds]))
    assert roughness == sorted(roughness)


def test_clouds_are_the_midpoint_displacement_of_a_plain_loop():
    """Beside it: a dictionary of points on a torus, filled square by square and diamond by diamond.

    The draws are the same, in the order middles, tops, lefts of each pass.
    """
    size, decay = 8, 2.0
    rng = generator("clouds")
    height = {(0, 0): 0.0}
    step, spread = size, 1.0
    while step > 1:
        half, count = step // 2, size // step
        draws = (rng.random((3, count, count), dtype=np.float32).astype(float) * 2 - 1) * spread

        def mean(points, around=height):
            return sum(around[y % size, x % size] for y, x in points) / 4

        grid = [(i, j) for i in range(count) for j in range(count)]
        for i, j in grid:
            y, x = i * step, j * step
            square = [(y, x), (y + step, x), (y, x + step), (y + step, x + step)]
            height[y + half, x + half] = mean(square) + draws[0, i, j]
        for i, j in grid:
            y, x = i * step, j * step
            top = [(y, x), (y, x + step), (y + half, x + half), (y - half, x + half)]
            left = [(y, x), (y + step, x), (y + half, x + half), (y + half, x - half)]
            height[y, x + half] = mean(top) + draws[1, i, j]
            height[y + half, x] = mean(left) + draws[2, i, j]
        step, spread = half, spread / decay**2
    expected = np.array([[height[y, x] for x in range(size)] for y in range(size)])
    expected = (expected - expected.min()) / (expected.max() - expected.min())
    ours = corruptions.plasma(size, decay, generator("clouds"))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_fog_lies_between_no_cloud_and_full_cloud():
    image = texture(64, 90)
    brightest = image.max() / 255
    for severity, (amount, _) in enumerate(CONSTANTS["imagenet"]["fog"], start=1):
        foggy = corrupt(image, "fog", severity)
        dimmed = brightest / (brightest + amount)
        assert (foggy >= np.floor(image * dimmed)).all()
        assert (foggy <= np.ceil((image + 255.0 * amount) * dimmed)).all()


def test_fog_of_a_black_image_is_black():
    assert corrupt(flat(0), "fog", 5).max() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_snow_only_brightens(family):
    image = texture(80, 120)
    for severity in range(1, 6):
        snowy = corrupt(image, "snow", severity, family=family).astype(int)
        assert (snowy >= image.astype(int) - 1).all()
        assert snowy.mean() > image.mean() + 2


def test_a_pixel_without_flakes_is_mixed_with_its_pale_grey():
    """By hand: 100 stays 100 for .8, and is 1.5·100 + 127.5 = 277.5 for .2: 135.5."""
    snowy = corrupt(flat(100, 64, 64), "snow", 1)
    assert abs(int(snowy.min()) - 135.5) <= 0.5


@pytest.mark.parametrize(("family", "severity"), [("imagenet", 3), ("imagenet", 5), ("cifar", 4)])
def test_snow_is_enlarged_noise_cut_off_streaked_and_laid_over_paler_light(family, severity):
    """Beside it: the formula in double precision, on the same draws, enlarged by np.interp."""
    mean, sigma, zoom, threshold, radius, blur, mix = CONSTANTS[family]["snow"][severity - 1]
    rng = generator(5, "snow", severity)
    layer = mean + sigma * rng.standard_normal((45, 70), dtype=np.float32).astype(float)
    for _ in range(2):  # one axis, then the other
        whole = len(layer)
        part = math.ceil(whole / zoom)
        size = max(whole, round(part * zoom))
        cut = layer[(whole - part) // 2 :][:part]
        at = np.linspace(0, part - 1, size)[(size - whole) // 2 :][:whole]
        layer = np.array([np.interp(at, np.arange(part), column) for column in cut.T])
    flakes = np.clip(np.where(layer < threshold, 0, layer), 0, 1)
    weights, offsets = corruptions.streak(radius, blur, rng.uniform(-135, -45))
    framed = np.pad(flakes, 40, "edge")
    fallen = sum(
        weight * framed[40 + down : 85 + down, 40 + right : 110 + right]
        for weight, (down, right) in zip(weights, offsets, strict=True)
    )
    lit = mix * 60 + (1 - mix) * (1.5 * 60 + 127.5)
    expected = np.clip(lit + 255 * (fallen + fallen[::-1, ::-1]), 0, 255)
    snowy = corrupt(flat(60, 45, 70), "snow", severity, family=family, seed=5)
    assert np.abs(snowy - expected[..., None]).max() <= 0.5 + 1e-2


def test_flakes_fall_rather_than_fly_sideways():
    """Streaks near the vertical change more from column to column than from row to row."""
    snowy = [corrupt(flat(60, 64, 64), "snow", 2, seed=seed).astype(float) for seed in range(12)]
    across, down = (np.mean([np.abs(np.diff(s, axis=a)).mean() for s in snowy]) for a in (1, 0))
    assert across > 1.3 * down


def test_flakes_fall_twice_the_second_time_turned_round():
    snowy = corrupt(flat(60, 65, 80), "snow", 3, seed=2)
    assert np.array_equal(snowy, snowy[::-1, ::-1])


def test_water_only_brightens_and_mud_turns_pixels_brown():
    image = texture(128, 128)
    for severity in (1, 2, 3):
        assert (corrupt(image, "spatter", severity, seed=1) >= image).all()
    muddy = corrupt(flat(255, 128, 128), "spatter", 5).reshape(-1, 3)
    darkest = muddy[muddy.sum(axis=1).argmin()]
    assert np.abs(darkest - np.array([63.0, 42, 20])).max() <= 2


def test_water_is_pale_turquoise():
    """On black only the drops are seen, in shades of 175, 238, 238."""
    red, green, blue = np.moveaxis(corrupt(flat(0, 128, 128), "spatter", 1).astype(float), 2, 0)
    assert blue.max() > 100
    assert np.array_equal(green, blue)
    assert np.abs(red - blue * 175 / 238).max() <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_mud_covers_four_fifths_of_a_pixel_or_more_or_none_of_it(family):
    """By hand, on white: red is 255, or at most .2 · 255 + .8 · 63 = 101.4."""
    red = corrupt(flat(255, 256, 256), "spatter", 4, family=family)[..., 0]
    covered = red[red < 255]
    assert covered.size > 100
    assert 97 <= covered.max() <= 102


def test_frost_is_the_weighted_sum_of_image_and_texture(tmp_path):
    """By hand, with a flat texture: .7 · 100 + .7 · 90 = 133 at severity 3."""
    Image.new("RGB", (300, 200), (90, 90, 90)).save(tmp_path / "pane.png")
    frosted = corrupt(flat(100), "frost", 3, frost=tmp_path)
    assert np.array_equal(frosted, flat(133))


def test_own_textures_are_read_sorted_by_name_and_read_anew_when_they_change(tmp_path):
    for name, grey in (("b.png", 20), ("a.jpg", 10), ("c.PNG", 30)):
        Image.new("L", (8, 8), grey).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    assert [int(t.mean()) for t in frost.textures(str(tmp_path))] == [10, 20, 30]
    Image.new("L", (9, 9), 200).save(tmp_path / "b.png")
    assert [int(t.mean()) for t in frost.textures(tmp_path)] == [10, 200, 30]


def test_a_broken_texture_is_left_out_with_a_warning(tmp_path):
    Image.new("L", (8, 8), 10).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match=r"b\.png"):
        assert len(frost.textures(tmp_path)) == 1


def test_drawn_textures_differ_have_the_greys_they_are_meant_to_and_are_protected():
    textures = frost.textures()
    assert len({t.tobytes() for t in textures}) == len(frost.PANES) >= 5
    for drawn, pane in zip(textures, frost.PANES, strict=True):
        assert drawn.shape == (frost.HEIGHT, frost.WIDTH, 3)
        assert drawn.mean() == pytest.approx(pane.mean, abs=2)
        assert drawn.mean(axis=2).std() == pytest.approx(pane.deviation, rel=0.1)
        with pytest.raises(ValueError, match="read-only"):
            drawn[0, 0] = 0


def test_a_drawn_texture_does_not_depend_on_what_was_drawn_before():
    before = frost.texture(3)
    frost.texture.cache_clear()
    assert np.array_equal(frost.texture(3), before)


@pytest.mark.parametrize("pane", frost.PANES[:2])
def test_ferns_and_needles_grow_over_much_of_a_pane(pane):
    """Ferns are drawn last: the same draws without them leave the needles as they are."""
    everything = frost._crystals(pane, generator("pane"))
    needles = frost._crystals(replace(pane, fans=0), generator("pane"))
    glass = frost._crystals(replace(pane, fans=0, needles=0), generator("pane"))
    assert (everything != needles).mean() > 0.15
    assert (needles != glass).mean() > 0.15


def test_a_shrunken_cut_shows_the_mean_of_each_box():
    """A fifth of natural, as for CIFAR: boxes of 5×5, and no grain where all of them are alike."""
    fine = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    cut = frost.cut(np.tile(fine, (32, 32, 1)), (32, 32), 0.2, generator(0))
    assert np.abs(cut - fine.mean(axis=(0, 1))).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("side", [32, 64, 128])
def test_frost_of_cifar_shows_as_much_of_the_texture_at_any_size(tmp_path, side):
    """By hand: 160 pixels of a ramp of 1 in 4, at a weight of .45, climb by 18 levels."""
    ramp = np.repeat((np.arange(1000) // 4).astype(np.uint8)[None], 1000, axis=0)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    frosted = corrupt(flat(0, side, side), "frost", 5, family="cifar", frost=tmp_path)
    assert np.ptp(frosted.astype(int)) == pytest.approx(18, abs=1.5)


def test_a_cut_shows_the_texture_at_its_scale():
    """On a ramp of one level a pixel, a cut at scale 2 climbs by half a level, either way."""
    ramp = np.repeat(np.arange(200, dtype=np.uint8)[None, :, None], 100, axis=0).repeat(3, axis=2)
    directions = set()
    for seed in range(12):
        cut = frost.cut(ramp, (80, 60), 2.0, generator(seed)).astype(float)
        assert cut.shape == (60, 80, 3)
        climb = (cut[:, -5] - cut[:, 5]).mean() / 70
        assert abs(climb) == pytest.approx(0.5, abs=0.03)
        directions.add(climb > 0)
    assert directions == {True, False}


# Digital


def in_hsv(pixel: np.ndarray, change) -> np.ndarray:
    """One pixel changed in HSV by Python's colorsys, in floats from 0 to 255."""
    h, s, v = colorsys.rgb_to_hsv(*(pixel / 255))
    return np.array(colorsys.hsv_to_rgb(h, *change(s, v))) * 255


def colours() -> np.ndarray:
    """Random colours, and those where hue or saturation is not defined: (H, W, 3)."""
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 256, (220, 3))
    grey = np.repeat(rng.integers(0, 256, (30, 1)), 3, axis=1)
    ends = np.array([[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 0, 1], [0, 255, 255]])
    dark = rng.integers(0, 4, (5, 3))
    return np.concatenate([anything, grey, ends, dark]).astype(np.uint8).reshape(13, 20, 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("severity", range(1, 6))
def test_brightness_adds_to_the_value_in_hsv(family, severity):
    (amount,) = CONSTANTS[family]["brightness"][severity - 1]
    image = colours()
    expected = np.apply_along_axis(in_hsv, 2, image, lambda s, v: (s, min(1, v + amount)))
    ours = corrupt(image, "brightness", severity, family=family)
    assert np.abs(ours - expected).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("severity", range(1, 6))
def test_saturate_scales_and_shifts_the_saturation_in_hsv(family, severity):
    factor, offset = CONSTANTS[family]["saturate"][severity - 1]
    image = colours()
    expected = np.apply_along_axis(in_hsv, 2, image, lambda s, v: (min(1, s * factor + offset), v))
    ours = corrupt(image, "saturate", severity, family=family)
    assert np.abs(ours - expected).max() <= 0.5 + 1e-3


def test_contrast_moves_values_towards_the_mean_of_their_channel():
    """By hand at .4: a mean of 50 takes 0 and 100 to 30 and 70; a flat channel stays."""
    image = np.array([[[0, 7, 200], [100, 7, 100]]], dtype=np.uint8)
    expected = [[[30, 7, 170], [70, 7, 130]]]
    assert corrupt(image, "contrast", 1).tolist() == expected


def test_pixelate_shows_the_mean_of_each_box():
    """By hand at .5: four boxes of four pixels, with the means 6, 10, 100 and 200."""
    grey = np.array(
        [[0, 12, 10, 10], [4, 8, 10, 10], [99, 101, 190, 210], [100, 100, 200, 200]],
        dtype=np.uint8,
    )
    expected = np.kron([[6, 10], [100, 200]], np.ones((2, 2)))
    pixelated = corrupt(np.repeat(grey[..., None], 3, axis=2), "pixelate", 2)
    assert np.array_equal(pixelated, np.repeat(expected[..., None], 3, axis=2))


@pytest.mark.parametrize("size", [(33, 50), (1, 1), (64, 64)])
def test_jpeg_is_what_pillow_writes_and_reads(size):
    """Another library, the same standard: OpenCV's and Pillow's defaults must not drift apart."""
    image = texture(*size)
    for severity, (quality,) in enumerate(CONSTANTS["imagenet"]["jpeg_compression"], start=1):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        expected = np.asarray(Image.open(file)).astype(int)
        assert np.abs(corrupt(image, "jpeg_compression", severity) - expected).max() <= 2


def test_displacements_are_bounded_smooth_and_differ_between_the_axes():
    right, down = corruptions.displacement(100, 200, (2.0, 1.0), 6.0, generator(3))
    assert right.shape == down.shape == (100, 200)
    assert 0.3 < np.abs(right).max() <= 6
    # A Gaussian of s pixels correlates neighbours by exp(-1/(4·s²)): .94 along x, .78 along y.
    for axis, expected in ((1, math.exp(-1 / 16)), (0, math.exp(-1 / 4))):
        step = np.diff(right, axis=axis)
        assert 1 - step.var() / (2 * right.var()) == pytest.approx(expected, abs=0.03)
    assert abs(np.corrcoef(right.ravel(), down.ravel())[0, 1]) < 0.2


@pytest.mark.parametrize("height", [60, 100, 160])
def test_elastic_moves_every_pixel_by_its_displacement(height):
    """A ramp shows it: the change of a value is the displacement times the slope, 2 a pixel."""
    ramp = np.repeat((2 * np.arange(100, dtype=np.uint8))[None, :, None], height, axis=0)
    image = np.repeat(ramp, 3, axis=2)
    # A blur of .01 of width and height, and .005 of the height times 12.5.
    right, _ = corruptions.displacement(
        height, 100, (1.0, height / 100), height / 200 * 12.5, generator(0, "elastic_transform", 1)
    )
    moved = corrupt(image, "elastic_transform", 1).astype(float) - image
    inside = (slice(None), slice(10, 90))
    assert np.abs(moved[..., 0] - 2 * right)[inside].max() <= 0.7


def test_the_mildest_elastic_transform_of_cifar_is_affine():
    """A plane stays a plane: away from the mirrored border no pixel is off the best fit."""
    y, x = np.mgrid[:96, :96]
    image = np.repeat((x + y)[..., None], 3, axis=2).astype(np.uint8)
    moved = corrupt(image, "elastic_transform", 1, family="cifar").astype(float)[..., 0]
    inner = moved[24:72, 24:72]
    rows, columns = np.mgrid[:48, :48]
    basis = np.stack([rows.ravel(), columns.ravel(), np.ones(48 * 48)], axis=1)
    fit = basis @ np.linalg.lstsq(basis, inner.ravel(), rcond=None)[0]
    assert np.abs(fit - inner.ravel()).max() < 1.0
    assert difference(moved, image[..., 0]) > 0.5


# Errors


def test_a_misspelt_corruption_names_the_nearest_and_all_others():
    with pytest.raises(ValueError, match=r"'jpeg'.* mean 'jpeg_compression'") as error:
        Corruption("jpeg", 1)
    assert all(name in str(error.value) for name in NAMES)


@pytest.mark.parametrize("severity", [0, 6, -1, 2.0, "3", True, None])
def test_a_severity_that_is_no_whole_number_from_one_to_five_is_refused(severity):
    with pytest.raises(ValueError, match=r"from 1 \(mild\) to 5, it was"):
        Corruption("fog", severity)


def test_a_severity_from_numpy_will_do():
    image = texture(8, 8)
    ours = corrupt(image, "fog", np.int64(2))
    assert np.array_equal(ours, corrupt(image, "fog", 2))


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match=r"'tiny'.*'cifar', 'imagenet'"):
        Corruption("fog", 1, "tiny")


@pytest.mark.parametrize(
    ("image", "seen"),
    [
        (np.zeros((4, 4, 3)), r"\(4, 4, 3\) of float64"),
        (np.zeros((4, 4), np.uint8), r"\(4, 4\) of uint8"),
        (np.zeros((3, 4, 4), np.uint8), r"\(3, 4, 4\) of uint8"),
        (np.zeros((0, 4, 3), np.uint8), r"\(0, 4, 3\) of uint8"),
    ],
)
def test_an_array_that_is_no_image_is_refused_with_what_it_is(image, seen):
    with pytest.raises(ValueError, match=seen):
        corrupt(image, "fog", 1)


def test_what_is_no_array_is_refused_with_what_it_is():
    with pytest.raises(TypeError, match=r"PIL\.Image\.Image"):
        corrupt(Image.new("RGB", (4, 4)), "fog", 1)


def test_a_frost_folder_without_images_is_refused_with_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"(?s)no readable image.*notes\.txt"):
        Corruption("frost", 1, frost=tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        Corruption("frost", 1, frost=tmp_path / "missing")
