"""Augmentation: what image and label share, and how far each draw may go."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bestta.training.augment import Augment

LUMA = (0.299, 0.587, 0.114)  # Rec. 601


def dice(seed=0):
    return np.random.default_rng(seed)


def noise(height, width, seed=0):
    return dice(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def map_of(height, width):
    """An image that says in red and green from which column and row a pixel is; blue is 77."""
    image = np.full((height, width, 3), 77, dtype=np.uint8)
    image[:, :, 0] = np.arange(width)
    image[:, :, 1] = np.arange(height)[:, None]
    return image


def places(image):
    """Ids that tell the places of a `map_of` apart as well as 250 ids can."""
    columns, rows = image[:, :, 0].astype(int), image[:, :, 1].astype(int)
    return ((7 * columns + 31 * rows) % 250).astype(np.uint8)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))
augments = st.builds(
    Augment,
    crop=sizes,
    scale=st.sampled_from([(1.0, 1.0), (0.5, 2.0), (0.3, 0.3), (1.0, 1.7)]),
    margin=st.integers(0, 9),
    flip=st.booleans(),
    jitter=st.sampled_from([0.0, 0.1, 0.5]),
)
seeds = st.integers(0, 2**31)


# What holds for every draw


@given(augments, sizes, seeds)
def test_every_crop_has_its_size_even_of_a_smaller_image(augment, size, seed):
    image = noise(*size)
    out, label = augment(image, image[:, :, 1].copy(), dice(seed))
    width, height = augment.crop
    assert out.shape == (height, width, 3)
    assert label.shape == (height, width)
    assert out.dtype == label.dtype == np.uint8
    assert out.flags.c_contiguous
    assert label.flags.c_contiguous


@given(augments, sizes, seeds)
def test_no_label_comes_out_that_did_not_go_in_but_ignored(augment, size, seed):
    ids = dice(seed).choice(np.array([3, 7, 200], dtype=np.uint8), size)
    _, label = augment(noise(*size), ids, dice(seed))
    assert set(label.flat) <= {*ids.flat, 255}


@given(augments, sizes, seeds)
def test_the_same_dice_give_the_same_and_what_goes_in_is_left_alone(augment, size, seed):
    image, ids = noise(*size), noise(*size, seed=1)[:, :, 0].copy()
    before = image.copy(), ids.copy()
    image.setflags(write=False)
    ids.setflags(write=False)
    first, again = (augment(image, ids, dice(seed)) for _ in range(2))
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert np.array_equal(image, before[0])
    assert np.array_equal(ids, before[1])


def test_other_dice_give_another_crop():
    augment = Augment(crop=(20, 20), scale=(0.5, 2.0), jitter=0.2)
    image = noise(40, 40)
    shown = {augment(image, 0, dice(seed))[0].tobytes() for seed in range(20)}
    assert len(shown) == 20


@given(augments, sizes, seeds, st.integers(0, 9))
def test_the_class_of_a_whole_image_is_left_as_it_is(augment, size, seed, label):
    image = noise(*size)
    out, same = augment(image, label, dice(seed))
    assert same == label
    assert type(same) is int
    # The image itself is treated as one that has a map of classes.
    assert np.array_equal(out, augment(image, image[:, :, 0], dice(seed))[0])


@given(sizes, seeds)
def test_with_everything_off_a_crop_is_a_piece_of_the_image(size, seed):
    width, height = size
    image = map_of(50, 60)
    out, label = Augment(crop=size, flip=False)(image, places(image), dice(seed))
    left, top = out[0, 0, :2]
    assert np.array_equal(out, image[top : top + height, left : left + width])
    assert np.array_equal(label, places(image)[top : top + height, left : left + width])


def test_with_everything_off_a_crop_of_the_images_size_is_the_image():
    image = noise(30, 20)
    ids = image[:, :, 2].copy()
    out, label = Augment(crop=(20, 30), flip=False)(image, ids, dice())
    assert np.array_equal(out, image)
    assert np.array_equal(label, ids)


# Cropping and the margin


def test_every_place_for_the_crop_is_drawn_and_about_equally_often():
    image = map_of(7, 8)
    augment = Augment(crop=(6, 4), flip=False)
    corners = [tuple(augment(image, 0, dice(seed))[0][0, 0, :2]) for seed in range(1200)]
    counts = {corner: corners.count(corner) for corner in set(corners)}
    assert set(counts) == {(left, top) for left in range(3) for top in range(4)}
    # 100 each are expected; the deviation is sqrt(1200 * 1/12 * 11/12) = 9.6, so 5 of them.
    assert all(52 <= count <= 148 for count in counts.values())


def test_a_smaller_image_is_filled_up_with_ignored_grey_below_and_to_the_right():
    image = noise(3, 9)
    ids = np.full((3, 9), 4, dtype=np.uint8)
    out, label = Augment(crop=(12, 5), flip=False)(image, ids, dice())
    assert np.array_equal(out[:3, :9], image)
    assert np.array_equal(label[:3, :9], ids)
    inside = np.zeros((5, 12), dtype=bool)
    inside[:3, :9] = True
    assert np.all(out[~inside] == 128)
    assert np.all(label[~inside] == 255)


def test_an_image_that_is_short_of_one_side_only_is_cropped_along_the_other():
    image = map_of(3, 9)
    lefts = set()
    for seed in range(60):
        out, label = Augment(crop=(4, 5), flip=False)(image, places(image), dice(seed))
        left = int(out[0, 0, 0])
        lefts.add(left)
        assert np.array_equal(out[:3], image[:, left : left + 4])
        assert np.all(out[3:] == 128)
        assert np.all(label[3:] == 255)
    assert lefts == set(range(6))


def test_a_margin_mirrors_the_image_and_is_ignored_in_its_label():
    # One row 0 1 2 3 4 with two pixels more on each side, the border itself not repeated.
    expected = [2, 1, 0, 1, 2, 3, 4, 3, 2]
    image = map_of(5, 5)
    out, label = Augment(crop=(9, 9), margin=2, flip=False)(image, places(image), dice())
    assert np.array_equal(out[:, :, 0], np.tile(expected, (9, 1)))
    assert np.array_equal(out[:, :, 1], np.tile(expected, (9, 1)).T)
    assert np.all(out[:, :, 2] == 77)
    assert np.array_equal(label[2:7, 2:7], places(image))
    label[2:7, 2:7] = 255
    assert np.all(label == 255)


def test_a_margin_lets_the_crop_reach_just_as_far_over_every_edge():
    image = map_of(32, 32)
    augment = Augment(crop=(32, 32), margin=4, flip=False)
    corners = set()
    for seed in range(900):
        _, label = augment(image, places(image), dice(seed))
        rows, columns = (np.flatnonzero((label != 255).any(axis)) for axis in (1, 0))
        top = rows[0] or rows[-1] - 31  # from 4 pixels above the image to 4 below
        left = columns[0] or columns[-1] - 31
        corners.add((int(top), int(left)))
    # 81 places; each is missed by 900 draws with a probability of (80/81)**900 = 1.4e-5.
    assert corners == {(top, left) for top in range(-4, 5) for left in range(-4, 5)}


# Image and label together


@given(sizes, st.integers(0, 9), st.booleans(), seeds)
def test_every_pixel_keeps_its_own_label(size, margin, flip, seed):
    image = map_of(24, 33)
    augment = Augment(crop=size, margin=margin, flip=flip)
    out, label = augment(image, places(image), dice(seed))
    known = label != 255
    assert np.array_equal(label[known], places(out)[known])


@pytest.mark.parametrize("factor", [0.25, 0.4, 0.75, 1.0, 1.3, 2.0, 3.7])
@pytest.mark.parametrize("flip", [False, True])
def test_scaling_moves_image_and_label_alike(factor, flip):
    columns = map_of(200, 240)
    augment = Augment(crop=(48, 40), scale=(factor, factor), flip=flip)
    for channel in (0, 1):
        ids = columns[:, :, channel].copy()
        for seed in range(8):
            out, label = augment(columns, ids, dice(seed))
            known = label != 255
            assert known.all()
            apart = out[:, :, channel].astype(float) - label
            # The nearest pixel's centre is at most half a pixel away, of which there is a whole
            # number on one side; the image is rounded by another half.
            assert np.abs(apart).max() <= 1
            assert abs(apart.mean()) <= 0.6


def test_a_corner_that_is_marked_in_the_image_is_marked_in_its_label():
    # As a picture rather than as numbers: a white square whose pixels are class 1.
    image = np.zeros((64, 96, 3), dtype=np.uint8)
    image[8:40, 16:64] = 255
    ids = (image[:, :, 0] > 0).astype(np.uint8)
    augment = Augment(crop=(80, 60), scale=(0.5, 2.0), margin=0)
    for seed in range(40):
        out, label = augment(image, ids, dice(seed))
        known = label != 255
        differ = ((out[:, :, 0] > 127) != (label == 1)) & known
        # Only on the square's outline, where a pixel of the image is part black and part white.
        assert np.all((out[differ] > 0) & (out[differ] < 255))
        assert differ.mean() < 0.02


# Scale


def shown_size(factor_range, seed, height=60, width=100):
    """Size of a scaled image, from a crop so large that the rest is ignored."""
    augment = Augment(crop=(400, 240), scale=factor_range, flip=False)
    _, label = augment(noise(height, width), np.zeros((height, width), np.uint8), dice(seed))
    known = label != 255
    assert np.array_equal(known, np.outer(known.any(1), known.any(0)))  # one rectangle
    return int(known.any(1).sum()), int(known.any(0).sum())


def test_scales_fill_their_range_evenly_in_octaves():
    octaves = []
    for seed in range(400):
        height, width = shown_size((0.5, 4.0), seed)
        assert 30 <= height <= 240
        assert 50 <= width <= 400
        assert abs(height / 60 - width / 100) <= 0.5 / 60 + 0.5 / 100  # the shape is kept
        octaves.append(math.log2(width / 100))
    counts, _ = np.histogram(octaves, bins=6, range=(-1.001, 2.001))
    # 400 / 6 = 67 each, with a deviation of sqrt(400 * 1/6 * 5/6) = 7.5, so 4 of them.
    assert counts.sum() == 400
    assert np.all(np.abs(counts - 400 / 6) < 30)
    assert min(octaves) < -0.95
    assert max(octaves) > 1.95


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, (60, 100)), (0.5, (30, 50)), (1.5, (90, 150)), (0.01, (1, 1))]
)
def test_a_scale_without_range_is_a_factor(factor, expected):
    assert {shown_size((factor, factor), seed) for seed in range(5)} == {expected}


@pytest.mark.parametrize(("factor", "pitch"), [(0.5, 4), (1.0, 8), (2.0, 16), (2.5, 20)])
def test_a_checker_comes_out_with_its_pitch_times_the_factor(factor, pitch):
    checker = (np.add.outer(np.arange(96) // 8, np.arange(96) // 8) % 2).astype(np.uint8)
    image = np.repeat(checker[:, :, None] * 255, 3, axis=2)
    augment = Augment(crop=(48, 48), scale=(factor, factor), flip=False)
    for seed in range(5):
        out, label = augment(image, checker, dice(seed))
        for values in (out[:, :, 0] > 127, label == 1):
            for lines in (values[5], values[:, 5]):
                steps = np.diff(np.flatnonzero(np.diff(lines.astype(int))))
                assert np.all(steps == pitch)


def test_a_smaller_image_is_averaged_and_not_sampled():
    # The two pixels in the middle of every four are white: a sample there would be white too.
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    image[:, 1::4] = image[:, 2::4] = 255
    out, _ = Augment(crop=(16, 16), scale=(0.25, 0.25))(image, 0, dice())
    assert np.all(np.abs(out.astype(int) - 127.5) < 1)


def test_a_larger_image_has_values_between_those_of_its_pixels():
    image = np.zeros((4, 8, 3), dtype=np.uint8)
    image[:, 4:] = 200
    out, _ = Augment(crop=(32, 16), scale=(4.0, 4.0), flip=False)(image, 0, dice())
    # Centres of new pixels are at 1/8, 3/8, 5/8 and 7/8 between those of the old.
    expected = [0] * 14 + [25, 75, 125, 175] + [200] * 14
    assert np.array_equal(out[:, :, 0], np.tile(expected, (16, 1)))


# Flip


def test_half_of_the_images_are_mirrored_and_the_labels_with_them():
    image = map_of(6, 10)
    ids = places(image)
    augment = Augment(crop=(10, 6))
    mirrored = 0
    for seed in range(400):
        out, label = augment(image, ids, dice(seed))
        flipped = out[0, 0, 0] == 9
        mirrored += flipped
        assert np.array_equal(out, image[:, ::-1] if flipped else image)
        assert np.array_equal(label, ids[:, ::-1] if flipped else ids)
    # 200 are expected, with a deviation of sqrt(400 / 4) = 10.
    assert 160 <= mirrored <= 240


def test_no_image_is_mirrored_where_that_is_off():
    image = map_of(6, 10)
    augment = Augment(crop=(10, 6), flip=False)
    assert all(np.array_equal(augment(image, 0, dice(seed))[0], image) for seed in range(50))


# Jitter


def jittered(image, share, seed):
    height, width = image.shape[:2]
    return Augment(crop=(width, height), flip=False, jitter=share)(image, 0, dice(seed))[0]


@given(seeds, st.sampled_from([0.1, 0.3, 1.0]))
def test_a_grey_image_stays_grey(seed, share):
    grey = np.repeat(noise(12, 9, seed)[:, :, :1], 3, axis=2)
    out = jittered(grey, share, seed)
    assert np.array_equal(out[:, :, 0], out[:, :, 1])
    assert np.array_equal(out[:, :, 0], out[:, :, 2])


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("grey", [0, 1, 90, 180])
def test_a_flat_grey_changes_by_its_brightness_alone(grey, share):
    # Without colour and without contrast the other two factors have nothing to act on.
    flat = np.full((4, 4, 3), grey, dtype=np.uint8)
    values = []
    for seed in range(300):
        out = jittered(flat, share, seed)
        assert len(np.unique(out)) == 1
        values.append(int(out[0, 0, 0]))
    assert min(values) >= math.floor(grey * (1 - share) + 0.5 - 1e-3)
    assert max(values) <= math.floor(grey * (1 + share) + 0.5 + 1e-3)
    # 300 draws come within a twentieth of the range of either end, all but surely.
    assert min(values) <= grey * (1 - 0.9 * share) + 0.5
    assert max(values) >= min(grey * (1 + 0.9 * share) - 0.5, 255)
    # Their mean has a deviation of share * grey / sqrt(3 * 300) = share * grey / 30.
    assert abs(np.mean(values) - grey) <= 5 * share * grey / 30 + 0.5


def measured(out):
    """Mean, spread of the greys, and distance of the colours from grey."""
    grey = out @ np.array(LUMA)
    return grey.mean(), grey.std(), (out[:, :, 0] - grey).std()


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_brightness_contrast_and_saturation_change_by_no_more_than_their_share(share):
    # Far enough from black and white that nothing is clipped.
    image = dice(5).integers(90, 150, (40, 40, 3), dtype=np.uint8)
    mean, spread, colour = measured(image)
    ratios = []
    for seed in range(200):
        changed = measured(jittered(image, share, seed))
        # Brightness scales all three, contrast the last two, saturation the last.
        brightness = changed[0] / mean
        contrast = changed[1] / spread / brightness
        saturation = changed[2] / colour / brightness / contrast
        ratios.append((brightness, contrast, saturation))
    ratios = np.array(ratios)
    assert np.all(np.abs(ratios - 1) <= share + 0.01)  # bytes are rounded
    # Each of them reaches both ends, and none follows another.
    assert np.all(ratios.min(0) < 1 - 0.9 * share)
    assert np.all(ratios.max(0) > 1 + 0.9 * share)
    assert np.all(np.abs(np.corrcoef(ratios.T) - np.eye(3)) < 0.3)


def test_jitter_is_the_three_formulas_in_turn():
    image = noise(11, 13)
    width, height = 13, 11
    for seed in range(20):
        rolls = dice(seed)
        rolls.uniform(0, 0)  # the scale
        rolls.integers(1), rolls.integers(1)  # the only place for the crop
        brightness, contrast, saturation = rolls.uniform(0.7, 1.3, 3)
        expected = np.empty((height, width, 3))
        for y in range(height):
            for x in range(width):
                pixel = [brightness * float(value) for value in image[y, x]]
                grey = sum(share * value for share, value in zip(LUMA, pixel, strict=True))
                expected[y, x] = [grey + saturation * (value - grey) for value in pixel]
        middle = (expected @ np.array(LUMA)).mean()
        expected = np.clip(middle + contrast * (expected - middle), 0, 255)
        # Half a unit of rounding, and what single precision adds to it.
        assert np.abs(jittered(image, 0.3, seed) - expected).max() <= 0.501


def test_colours_that_become_too_bright_or_too_dark_stop_at_white_and_black():
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    image[:4] = 255
    for seed in range(50):
        out = jittered(image, 0.5, seed).astype(int)
        assert np.all(out[:4] > out[4:])  # none has come round from the other end
    ends = [jittered(image, 0.5, seed) for seed in range(50)]
    assert any(out.max() == 255 and out.min() == 0 for out in ends)


def test_jitter_leaves_labels_and_geometry_alone():
    image = map_of(30, 30)
    plain, wild = (Augment(crop=(9, 9), margin=3, jitter=share) for share in (0.0, 0.5))
    for seed in range(20):
        _, label = plain(image, places(image), dice(seed))
        assert np.array_equal(wild(image, places(image), dice(seed))[1], label)


def test_what_comes_out_can_be_written_to_without_a_trace_in_the_data_set():
    image, label = np.zeros((4, 6, 3), np.uint8), np.zeros((4, 6), np.uint8)
    seen, ids = Augment(crop=(6, 4), flip=False)(image, label, dice(0))
    seen += 1
    ids += 1
    assert not image.any()
    assert not label.any()
