"""Rendered streets: their bytes repeat, their geometry holds, and labels lie on what they name."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from dataclasses import fields, replace

import cv2
import numpy as np
import pytest

from bestta.data.classes import CLASSES, PALETTE
from bestta.data.samples import Sample
from bestta.data.streets import CLASSES_USED, SKY_DEPTH, Scene, Streets, Style, render

ROAD, SIDEWALK, BUILDING, VEGETATION, SKY, PERSON, CAR, BUS = 0, 1, 2, 8, 10, 11, 13, 15
GROUND = (0, 1, 9)
SIZES = [(256, 128), (512, 256), (96, 48), (128, 128), (333, 101), (64, 160)]
PLAIN = Style(noise=0, blur=0)


def digest(scene: Scene) -> str:
    parts = (scene.image, scene.label, scene.depth)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [render(("test", i)) for i in range(40)]


def ground_plane(scene: Scene) -> tuple[float, float]:
    """Horizon row, and rows below it times depth, from a line through 1 / depth of road pixels.

    A pinhole camera ``h`` above level ground sees it at depth ``f h / (row - horizon)``.
    """
    rows, columns = np.nonzero(scene.label == ROAD)
    slope, offset = np.polyfit(rows, 1 / scene.depth[rows, columns].astype(float), 1)
    return -offset / slope, 1 / slope


# The same bytes, wherever and whenever


def test_the_same_seed_gives_the_same_bytes():
    assert digest(render((3, "a"))) == digest(render((3, "a")))


def test_different_seeds_give_different_streets():
    assert len({digest(render(seed)) for seed in range(12)}) == 12


def test_another_process_renders_the_same_bytes():
    code = (
        "import hashlib; from bestta.data.streets import render; s = render(5, (96, 48));"
        "print(hashlib.sha256(s.image.tobytes() + s.label.tobytes() + s.depth.tobytes())"
        ".hexdigest())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == digest(render(5, (96, 48)))


def test_the_number_of_threads_changes_nothing():
    before = cv2.getNumThreads()
    try:
        digests = set()
        for threads in (1, 2, 4):
            cv2.setNumThreads(threads)
            digests.add(digest(render(11, (512, 256))))
    finally:
        cv2.setNumThreads(before)
    assert len(digests) == 1


def test_scenes_do_not_depend_on_what_was_rendered_before():
    alone = digest(render(21))
    for seed in range(3):
        render(seed, (128, 128), Style(density=2))
    assert digest(render(21)) == alone


def test_global_random_state_is_left_alone():
    # A state of its own, so that a fixed seed set by an earlier scene does not look like no change.
    np.random.seed(987)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    render(2)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_training_and_validation_never_share_a_scene():
    train, val = Streets(25, split="train", size=(64, 32)), Streets(25, split="val", size=(64, 32))
    seen = {sample.image.tobytes() for sample in train}
    assert len(seen) == 25
    assert not seen & {sample.image.tobytes() for sample in val}
    assert not {train.name(i) for i in range(25)} & {val.name(i) for i in range(25)}


def test_another_seed_is_another_city():
    one, two = Streets(5, seed=1, size=(64, 32)), Streets(5, seed=2, size=(64, 32))
    assert not {s.image.tobytes() for s in one} & {s.image.tobytes() for s in two}
    assert one.name(3) != two.name(3)


# What a scene is made of


@pytest.mark.parametrize("size", SIZES)
def test_every_size_gives_aligned_arrays_with_known_classes(size):
    for seed in range(3):
        scene = render(seed, size)
        assert scene.image.shape == (size[1], size[0], 3)
        assert scene.label.shape == scene.depth.shape == (size[1], size[0])
        assert scene.image.dtype == scene.label.dtype == np.uint8
        assert scene.depth.dtype == np.float32
        assert all(a.flags.c_contiguous for a in (scene.image, scene.label, scene.depth))
        assert set(np.unique(scene.label)) <= set(CLASSES_USED)
        assert {ROAD, BUILDING} <= set(np.unique(scene.label))


def test_every_class_is_common_and_large_enough_to_be_learnt(scenes):
    labels = np.stack([scene.label for scene in scenes])
    for train_id in CLASSES_USED:
        share = (labels == train_id).mean()
        present = ((labels == train_id).sum((1, 2)) > 40).mean()
        assert share > 0.002, f"{CLASSES[train_id]} covers {share:.2%}"
        assert present > 0.2, f"{CLASSES[train_id]} is in {present:.0%} of the scenes"


def test_no_class_crowds_out_the_others(scenes):
    shares = np.bincount(np.concatenate([s.label.ravel() for s in scenes]), minlength=19)
    assert shares.max() / shares.sum() < 0.5


def test_road_is_the_largest_class_in_the_lower_half(scenes):
    lower = np.concatenate([scene.label[64:].ravel() for scene in scenes])
    assert np.bincount(lower).argmax() == ROAD


def test_sky_is_above_the_road_in_every_column(scenes):
    for scene in scenes:
        sky, road = scene.label == SKY, scene.label == ROAD
        both = sky.any(0) & road.any(0)
        lowest_sky = 127 - sky[::-1].argmax(0)
        assert (lowest_sky < road.argmax(0))[both].all()


def test_same_street_at_twice_the_size():
    """Details are sized in metres: halving the larger label map gives the smaller one, but for
    edges. By chance two scenes agree on less than half of their pixels."""
    for seed in range(4):
        small, large = render(seed, (256, 128), PLAIN), render(seed, (512, 256), PLAIN)
        same = large.label[::2, ::2] == small.label
        assert same.mean() > 0.93
        other = render(seed + 100, (256, 128), PLAIN)
        assert (other.label == small.label).mean() < 0.8


# Geometry


def test_depth_is_positive_and_finite_and_infinite_only_for_the_sky(scenes):
    for scene in scenes:
        assert np.isfinite(scene.depth).all()
        assert (scene.depth > 0).all()
        np.testing.assert_array_equal(scene.depth == SKY_DEPTH, scene.label == SKY)


def test_road_lies_in_one_level_plane(scenes):
    for scene in scenes:
        horizon, drop = ground_plane(scene)
        rows, columns = np.nonzero(np.isin(scene.label, GROUND))
        assert rows.min() > horizon
        expected = drop / (rows - horizon)
        measured = scene.depth[rows, columns]
        close = measured < 100
        np.testing.assert_allclose(measured[close], expected[close], rtol=2e-3)


def test_depth_decreases_down_the_road(scenes):
    for scene in scenes:
        for column in (60, 128, 190):
            depth = scene.depth[scene.label[:, column] == ROAD, column]
            assert (np.diff(depth) < 0).all()


def test_vehicles_stand_on_the_ground(scenes):
    """Below a vehicle is ground that is hardly further away, or something nearer.

    The underside is at most 0.3 m above ground and the camera at least 1.25 m, so ground seen just
    below it is at most 1.25 / 0.95 = 1.32 times as far; half a vehicle's length comes on top.
    """
    for scene in scenes:
        vehicle = np.isin(scene.label, (CAR, BUS))
        rows, columns = np.nonzero(vehicle[:-1] & ~vehicle[1:])
        here, below = scene.depth[rows, columns], scene.depth[rows + 1, columns]
        # A few pixels at the upper corners of a body have what is behind the vehicle below them.
        assert (below > 1.32 * here + 5.5).mean() < 0.02 if len(rows) else True


def test_nothing_shows_through_a_nearer_vehicle(scenes):
    """Within one column a face of a vehicle is a single run of pixels. What interrupts the run is
    nearer, or belongs to the same vehicle, which is at most 11 m long."""
    for scene in scenes:
        vehicle = np.isin(scene.label, (CAR, BUS))
        for depth in np.unique(scene.depth[vehicle]):
            face = vehicle & (scene.depth == depth)
            below_top = np.maximum.accumulate(face, 0)
            above_bottom = np.maximum.accumulate(face[::-1], 0)[::-1]
            assert (scene.depth[below_top & above_bottom] < depth + 11).all()


def people(scene: Scene) -> list[tuple[float, float]]:
    """Depth and height in rows of each person whose feet are seen."""
    horizon, drop = ground_plane(scene)
    found = []
    for depth in np.unique(scene.depth[scene.label == PERSON]):
        rows = np.nonzero((scene.label == PERSON) & (scene.depth == depth))[0]
        foot = horizon + drop / depth
        assert rows.max() <= foot + 1.6
        if abs(rows.max() - foot) < 1.5:
            found.append((float(depth), float(rows.max() - rows.min())))
    return found


def test_a_person_twice_as_far_is_half_as_high(scenes):
    """Height in rows times depth is focal length times height in metres. Both vary by about ten
    per cent from scene to scene, and so do the medians of near and of far people."""
    found = np.array([person for scene in scenes for person in people(scene)])
    near, far = found[found[:, 0] < 12], found[found[:, 0] > 16]
    assert min(len(near), len(far)) > 15
    products = [np.median(group[:, 0] * group[:, 1]) for group in (near, far)]
    assert products[0] == pytest.approx(products[1], rel=0.12)
    assert np.median(near[:, 1]) > 1.5 * np.median(far[:, 1])


def test_people_are_people_sized(scenes):
    """The horizon passes at eye height: rows from foot to top over rows from foot to horizon is
    height over camera height, at least 1.5 / 1.85 and at most 1.95 / 1.25 for those seen whole."""
    ratios = []
    for scene in scenes:
        _, drop = ground_plane(scene)
        ratios += [height / (drop / depth) for depth, height in people(scene)]
    assert max(ratios) < 1.95 / 1.25 + 0.1
    assert 1.0 < np.median(ratios) < 1.3


# Image and label


def mean_colour(scenes: list[Scene], train_id: int) -> np.ndarray:
    return np.mean([s.image[s.label == train_id].mean(0) for s in scenes if train_id in s.label], 0)


def test_classes_look_like_what_they_are_called(scenes):
    sky, road = mean_colour(scenes, SKY), mean_colour(scenes, ROAD)
    assert sky.mean() > road.mean() + 50
    assert sky[2] > sky[0]
    for green in (VEGETATION, 9):
        red, leaf, blue = mean_colour(scenes, green)
        assert leaf > red
        assert leaf > blue + 15
    assert mean_colour(scenes, SIDEWALK).mean() > road.mean() + 10


@pytest.mark.parametrize("shift", [(0, 2), (0, -2), (2, 0), (-2, 0)])
def test_labels_lie_on_the_image_and_not_beside_it(scenes, shift):
    """Colours differ less within the labels' regions than within the same regions moved."""

    def spread(scene: Scene, label: np.ndarray) -> float:
        inner = np.s_[4:-4, 4:-4]
        ids, pixels = label[inner].ravel(), scene.image[inner].reshape(-1, 3).astype(float)
        count = np.maximum(np.bincount(ids, minlength=19), 1)
        sums = np.stack([np.bincount(ids, c, 19) for c in pixels.T], 1) / count[:, None]
        return float(((pixels - sums[ids]) ** 2).mean())

    better = [
        spread(scene, scene.label) < spread(scene, np.roll(scene.label, shift, (0, 1)))
        for scene in scenes
    ]
    assert np.mean(better) > 0.97


def test_surfaces_are_not_flat(scenes):
    for train_id in (ROAD, BUILDING, VEGETATION):
        spreads = [
            s.image[s.label == train_id].std(0).mean() for s in scenes if train_id in s.label
        ]
        assert np.median(spreads) > 8


def test_classes_overlap_in_colour(scenes):
    """Colour alone must not give the class away: the nearest mean colour names a class wrongly
    for a good part of the pixels."""
    means = np.stack([mean_colour(scenes, i) for i in CLASSES_USED])
    ids = np.array(CLASSES_USED)
    right = []
    for scene in scenes[:8]:
        pixels = scene.image.reshape(-1, 1, 3).astype(float)
        guess = ids[((pixels - means) ** 2).sum(2).argmin(1)]
        right.append((guess == scene.label.ravel()).mean())
    assert np.mean(right) < 0.6


# Style


def detail(scene: Scene, train_id: int) -> float:
    """Mean size of the image's Laplacian inside a class."""
    inside = cv2.erode((scene.label == train_id).astype(np.uint8), np.ones((5, 5), np.uint8)) > 0
    grey = cv2.cvtColor(scene.image, cv2.COLOR_RGB2GRAY).astype(np.float32)
    return float(np.abs(cv2.Laplacian(grey, cv2.CV_32F))[inside].mean())


@pytest.mark.parametrize("train_id", [ROAD, VEGETATION])
def test_texture_adds_detail_and_leaves_the_street_as_it_is(train_id):
    for seed in range(5):
        plain = render(seed, style=replace(PLAIN, texture=0.0))
        rich = render(seed, style=PLAIN)
        np.testing.assert_array_equal(plain.label, rich.label)
        np.testing.assert_array_equal(plain.depth, rich.depth)
        assert detail(plain, train_id) < 0.8 * detail(rich, train_id)


@pytest.mark.parametrize("knob", ["texture", "light", "shadow", "colour", "noise", "blur"])
def test_knobs_of_appearance_change_the_image_and_nothing_else(knob):
    changed = []
    for seed in range(4):
        one, other = render(seed), render(seed, style=replace(Style(), **{knob: 0.0}))
        np.testing.assert_array_equal(one.label, other.label)
        np.testing.assert_array_equal(one.depth, other.depth)
        changed.append(not np.array_equal(one.image, other.image))
    assert any(changed)


@pytest.mark.parametrize("knob", [f.name for f in fields(Style)])
def test_every_knob_does_something(knob):
    style = replace(Style(), **{knob: 2.5 * getattr(Style(), knob)})
    assert any(digest(render(seed)) != digest(render(seed, style=style)) for seed in range(6))


def test_light_varies_brightness_between_scenes():
    def spread(light: float) -> float:
        style = replace(PLAIN, light=light, colour=0.0, shadow=0.0)
        roads = [(s.image, s.label) for s in (render(i, (96, 48), style) for i in range(16))]
        return float(np.std([image[label == ROAD].mean() for image, label in roads]))

    assert spread(0.0) < 0.6 * spread(1.0)


def test_shadow_darkens_part_of_the_road():
    def dark(shadow: float) -> float:
        """Share of the road that is clearly darker than its bright parts."""
        style = replace(PLAIN, shadow=shadow, texture=0.0)
        scenes = [render(i, (128, 64), style) for i in range(12)]
        roads = [scene.image[scene.label == ROAD].mean(1) for scene in scenes]
        return float(np.mean([(road < 0.75 * np.percentile(road, 90)).mean() for road in roads]))

    assert dark(1.0) > 1.5 * dark(0.0)


def test_density_adds_objects():
    def objects(density: float) -> float:
        style = replace(Style(), density=density)
        labels = [render(i, (128, 64), style).label for i in range(8)]
        return float(np.isin(labels, (5, 6, 7, 11, 13, 15)).mean())

    assert objects(0.0) == 0
    assert objects(0.4) < objects(1.0)


def test_camera_varies_the_horizon():
    def horizons(camera: float) -> list[float]:
        style = replace(Style(), camera=camera)
        return [ground_plane(render(i, style=style))[0] for i in range(8)]

    assert np.std(horizons(0.0)) < 0.05
    assert np.std(horizons(1.0)) > 1


def test_nothing_smaller_than_the_smallest_is_drawn():
    style = replace(Style(), smallest=0.25)
    for seed in range(12):
        scene = render(seed, style=style)
        _, drop = ground_plane(scene)
        for depth, _ in people(scene):
            # 0.25 of 128 rows are at most 1.92 m, and the foot is 1.25 m or more below the horizon.
            assert drop / depth >= 0.25 * 128 * 1.25 / 1.92


def test_poles_twice_as_thick_cover_clearly_more():
    """Not twice as much: distant poles are a pixel wide either way, and near ones hide others."""

    def poles(width: float) -> float:
        style = replace(Style(), pole_width=width, thinnest=0.0)
        return float(np.mean([(render(i, style=style).label == 5).mean() for i in range(6)]))

    assert poles(0.4) > 1.4 * poles(0.2) > 1.4**2 * poles(0.1)


def test_noise_and_blur_do_what_they_say():
    sharp, noisy = render(4, style=PLAIN), render(4, style=replace(PLAIN, noise=1.0))
    soft = render(4, style=replace(PLAIN, blur=3.0))
    assert detail(soft, ROAD) < detail(sharp, ROAD) < detail(noisy, ROAD)
    difference = noisy.image.astype(float) - sharp.image
    assert abs(difference.mean()) < 0.3
    assert 0.8 < difference.std() < 4


# As a set of images


def test_a_set_is_indexed_sliced_and_iterated():
    streets = Streets(7, size=(64, 32))
    assert len(streets) == 7
    assert streets.kind == "streets"
    assert streets.classes == CLASSES
    assert streets.peek(0) == (64, 32)
    names = [sample.name for sample in streets]
    assert names == [streets.name(i) for i in range(7)]
    assert len(set(names)) == 7
    assert [sample.name for sample in streets[2:6:2]] == [names[2], names[4]]
    np.testing.assert_array_equal(streets[-1].image, streets[6].image)
    with pytest.raises(IndexError):
        streets[7]


def test_a_sample_is_its_scene():
    streets = Streets(50, size=(64, 32), seed=3)
    sample, scene = streets[42], streets.scene(42)
    assert isinstance(sample, Sample)
    assert sample.name == "streets/3/000042"
    np.testing.assert_array_equal(sample.image, scene.image)
    np.testing.assert_array_equal(sample.label, scene.label)


def test_a_pickled_set_shows_the_same_streets():
    streets = Streets(5, size=(64, 32), seed=3, style=Style(density=0.5), split="val")
    copy = pickle.loads(pickle.dumps(streets))
    assert (copy.name(4), len(copy)) == (streets.name(4), 5)
    assert digest(copy.scene(4)) == digest(streets.scene(4))


def test_a_longer_set_begins_with_the_shorter_one():
    short, long = Streets(3, size=(64, 32)), Streets(300, size=(64, 32))
    assert all(np.array_equal(short[i].image, long[i].image) for i in range(3))


def test_the_palette_has_one_colour_for_each_class():
    assert len(CLASSES) == len(PALETTE) == len(set(PALETTE)) == 19
    assert len(set(CLASSES)) == 19


# Errors


@pytest.mark.parametrize("size", [(0, 0), (-4, 8), (16, 128), (256, 8), (10_000, 128), (64.5, 64)])
def test_silly_sizes_are_refused(size):
    with pytest.raises(ValueError, match=r"size is .* from 32 to 4096"):
        render(0, size)
    with pytest.raises(ValueError, match=r"size is"):
        Streets(3, size=size)


@pytest.mark.parametrize("size", [256, (256,), (256, 128, 3), None, "large"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match=r"\(width, height\)"):
        render(0, size)


@pytest.mark.parametrize("count", [0, -3, 2.5, True, "ten"])
def test_silly_counts_are_refused(count):
    with pytest.raises(ValueError, match="whole number from 1 up"):
        Streets(count)


def test_an_unknown_split_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"no split 'test'; there are train, val"):
        Streets(3, split="test")


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_knob_takes_no_negative_or_endless_value(value):
    with pytest.raises(ValueError, match=r"Style\.texture"):
        Style(texture=value)
