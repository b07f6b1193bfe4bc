"""Rendered streets: their bytes repeat, their geometry holds, and labels lie on what they name."""

from __future__ import annotations

import hashlib
import pickle
import re
import subprocess
import sys
from dataclasses import fields, replace

import cv2
import numpy as np
import pytest

from bestta.data.classes import CLASSES, PALETTE
from bestta.data.samples import Sample
from bestta.data.seeds import generator
from bestta.data.streets import CLASSES_USED, SKY_DEPTH, Scene, Streets, Style, _lay_out, render
from bestta.data.streets.figures import place_people
from bestta.data.streets.ground import paint_ground
from bestta.data.streets.light import Light
from bestta.data.streets.plan import Street, Verge, Wall
from bestta.data.streets.scene import Dice
from bestta.data.streets.things import Crowd, Figure, Footprint
from bestta.data.streets.vehicles import _bus_model, _car_model, _Vehicle
from bestta.data.streets.view import Camera, View, crop, lumps_tile
from bestta.data.streets.walls import paint_walls
from bestta.data.weather import simulate

ROAD, SIDEWALK, BUILDING, POLE, VEGETATION, SKY = 0, 1, 2, 5, 8, 10
PERSON, CAR, BUS = 11, 13, 15
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


def dice(*seed: object) -> Dice:
    return Dice(generator("test", *seed))


@pytest.fixture(scope="module")
def crowds() -> list[Crowd]:
    return [_lay_out(dice("crowd", i), 256, 128, Style())[0] for i in range(150)]


def stage(shadow: float = 0.0, sunny: bool = False) -> View:
    """An empty picture (256, 512) of a camera 1.5 m above the ground, 300 pixels to a radian."""
    camera = Camera(512, 256, focal=300.0, horizon=128.0, above=1.5, x=0.0, yaw=0.0)
    style = replace(PLAIN, texture=0.0, light=0.0, shadow=shadow, colour=0.0)
    light = Light.draw(dice("light"), style)
    light.sunny, light.sun, light.tangent = sunny, (1.0, 0.0), 0.6
    return View(camera, light, style)


def straight_street(**changes: object) -> Street:
    """One lane of 3.5 m each way, with solid lines and nothing beside it."""
    left, right = (Verge(3.8, grass=0.0, pavement=3.0, garden=0.0, kind="town") for _ in range(2))
    street = Street(
        *(3.5, 1, 0.0, 100.0, left, right, (False, False)),
        crossing=None,
        zebra=None,
        dashed=False,
        camera_side=0.0,
    )
    return replace(street, **changes)


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


def test_depth_is_positive_and_infinite_for_the_sky_alone(scenes):
    for scene in scenes:
        assert (scene.depth > 0).all()
        np.testing.assert_array_equal(np.isinf(scene.depth), scene.label == SKY)
    assert np.isposinf(SKY_DEPTH)


def test_weather_takes_the_depth_of_a_scene_as_it_is(scenes):
    foggy = simulate(scenes[0].image, "fog", 3, depth=scenes[0].depth)
    assert not np.array_equal(foggy, scenes[0].image)


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


def test_nothing_shows_through_a_nearer_wall():
    """Without things on it, a street has the same walls. Where one of them was, only what is
    nearer may be now. Things may lean against a wall by 1.5 m, and the far end of a vehicle is up
    to half its length of 10.7 m behind its middle."""
    for seed in range(16):
        bare, scene = render(seed, style=Style(density=0.0)), render(seed)
        wall = np.isin(bare.label, (BUILDING, VEGETATION))
        slack = np.where(np.isin(scene.label, (CAR, BUS)), 1.51 + 5.4, 1.51)
        assert (scene.depth <= bare.depth + slack)[wall].all()


def corners(stand: Footprint) -> np.ndarray:
    """Points (15, 2) in X and Z spread over the rectangle that a vehicle stands on."""
    sin, cos = np.sin(stand.heading), np.cos(stand.heading)
    grid = np.array([(u, v) for u in (-1, 0, 1) for v in (-1, -0.5, 0, 0.5, 1)])
    grid = grid * (stand.half_width, stand.half_length)
    return grid @ np.array([(cos, -sin), (sin, cos)]) + (stand.x, stand.z)


def inside(points: np.ndarray, stand: Footprint, margin: float = 0.0) -> np.ndarray:
    """Which of the points (N, 2) lie in that rectangle, made larger by ``margin``."""
    sin, cos = np.sin(stand.heading), np.cos(stand.heading)
    moved = np.abs((points - (stand.x, stand.z)) @ np.array([(cos, sin), (-sin, cos)]))
    return (moved < (stand.half_width + margin, stand.half_length + margin)).all(1)


def vehicles(crowd: Crowd) -> list[Footprint]:
    found = [stand for stand in crowd.stands if stand.half_length > 0]
    drawn = [(thing.x, thing.z) for thing in crowd.things if isinstance(thing, _Vehicle)]
    assert [(stand.x, stand.z) for stand in found] == drawn
    return found


def feet(crowd: Crowd, train_id: int) -> np.ndarray:
    """X and Z (N, 2) of the figures whose first part is of that class."""
    figures = [thing for thing in crowd.things if isinstance(thing, Figure)]
    found = [(f.x, f.z) for f in figures if f.parts[0].label == train_id]
    return np.array(found, float).reshape(-1, 2)


def nearest(some: np.ndarray, others: np.ndarray) -> float:
    """The least distance between two of the points (N, 2) and (M, 2) that are not the same."""
    apart = np.hypot(*(some[:, None] - others[None]).transpose(2, 0, 1))
    return float(apart[apart > 0].min(initial=np.inf))


def test_no_vehicle_stands_in_another(crowds):
    for crowd in crowds:
        stands = vehicles(crowd)
        for i, stand in enumerate(stands):
            assert not any(inside(corners(stand), other).any() for other in stands[:i])


def test_nobody_stands_in_a_vehicle(crowds):
    for crowd in crowds:
        walkers = feet(crowd, PERSON)
        assert not any(inside(walkers, stand, 0.15).any() for stand in vehicles(crowd))
    assert sum(len(feet(crowd, PERSON)) for crowd in crowds) > 5 * len(crowds)


def test_people_poles_and_trunks_keep_their_distance(crowds):
    for crowd in crowds:
        walkers, poles, trunks = (feet(crowd, i) for i in (PERSON, POLE, VEGETATION))
        assert nearest(poles, poles) > 0.499
        for others in (walkers, poles, trunks):
            assert nearest(walkers, others) > 0.499


def test_there_is_room_to_park_on_the_side_where_cars_may():
    for seed in range(40):
        street = Street.draw(dice("street", seed))
        room = [verge.road - street.lane * street.lanes for _, verge in street.verges]
        assert [width > 2 for width in room] == list(street.parking)


@pytest.mark.parametrize("model", [*map(_car_model, range(4)), _bus_model()])
def test_vehicles_stand_on_tyres_seen_from_behind_as_from_ahead(model):
    for face in (0, 1):
        tyres = [patch for patch in model.patches if patch[2:] == (face, "tyre")]
        assert len(tyres) == 2
        for first, last, _, _ in tyres:
            assert model.points[first:last, 1].min() == 0
            assert np.abs(model.points[first:last, 0]).max() < 0.5
        lefts = [model.points[first, 0] < 0 for first, _, _, _ in tyres]
        assert sorted(lefts) == [False, True]


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


@pytest.mark.parametrize("kind", ["_Vehicle", "_Tree", "Figure"])
def test_the_label_of_a_thing_is_where_it_covers_the_pixel(kind):
    """Painted over black and over white, a thing tells how much of each pixel it covers. What it
    covers wholly bears its label, what it covers by less than 0.4 does not, but for a few."""
    bare, stained, labelled = 0, 0, 0
    for seed in range(4):
        crowd, _ = _lay_out(dice("cover", seed), 512, 256, PLAIN)
        for thing in (thing for thing in crowd.things if type(thing).__name__ == kind):
            images = []
            for level in (0, 255):
                view = View(crowd.camera, crowd.light, PLAIN)
                view.image[:] = level
                thing.paint(view)
                images.append(view.image.astype(float))
            covered = 1 - (images[1] - images[0]).mean(2) / 255
            label = view.pieces > 0
            bare += int(((covered > 0.99) & ~label).sum())
            stained += int(((covered < 0.4) & label).sum())
            labelled += int(label.sum())
    assert labelled > 10_000
    assert bare < 1e-3 * labelled
    assert stained < 1e-3 * labelled


def facade(**changes: object) -> np.ndarray:
    """Brightness (60, 360) of a wall 10 m ahead that faces the camera, 30 pixels to a metre: 12 m
    of its first floor, which reaches from 2 to 4 m."""
    look = {"bay": 3.0, "storey": 2.0, "window_width": 0.25, "window_height": 0.3, "glass": 0.0}
    wall = Wall(
        *(-30.0, 10.0, 30.0, 10.0, 20.0, BUILDING, (150.0, 150.0, 150.0), (90.0, 60.0, 50.0)),
        **{**look, **changes},
    )
    view = stage()
    paint_walls(view, [wall], straight_street())
    # The camera is 1.5 m above the ground, and so is what it sees on the horizon.
    return view.image[128 - 75 : 128 - 15, 76:436].mean(2)


def test_facades_have_a_window_in_each_bay():
    """Windows are half as wide as their bay and 0.6 as high as their storey."""
    dark = facade() < 100
    assert dark.mean() == pytest.approx(0.5 * 0.6, abs=0.02)
    row = dark[30].astype(int)
    assert np.abs(np.diff(row)).sum() == pytest.approx(2 * 12 / 3, abs=1)
    assert not (facade(window_width=-1.0, window_height=-1.0) < 100).any()


def test_windows_have_frames_of_their_own_brightness():
    """Frames reach 0.035 of a bay and 0.04 of a storey beyond the panes, all around."""
    plain = float(np.median(facade(window_width=-1.0, window_height=-1.0)))
    share = (0.5 + 0.07) * (0.6 + 0.08) - 0.5 * 0.6
    assert (facade(trim=1.3) > 1.15 * plain).mean() == pytest.approx(share, abs=0.03)
    assert not (facade(trim=1.0) > 1.15 * plain).any()


def test_a_roof_begins_at_the_eaves_and_is_lower_at_its_ends():
    """A wall of 8 m, 20 m ahead, carries 2 m of roof on 5 m of plaster; 15 pixels to a metre."""
    wall = Wall(
        *(-4.0, 20.0, 4.0, 20.0, 7.0, BUILDING, (150.0, 150.0, 150.0), (90.0, 30.0, 20.0)),
        roof_height=2.0,
    )
    view = stage()
    paint_walls(view, [wall], straight_street())
    built = view.label == BUILDING
    ridge, eaves = 128 - 15 * (7 - 1.5), 128 - 15 * (5 - 1.5)
    columns = np.flatnonzero(built.any(0))
    tops = built.argmax(0)
    assert tops[256] == pytest.approx(ridge, abs=1)
    assert tops[columns[[0, -1]]] == pytest.approx(eaves, abs=1.5)
    red = view.image[..., 0] > 1.4 * view.image[..., 2]
    for column in (256, columns[0] + 15, columns[-1] - 15):
        roof = np.flatnonzero(red[:, column])
        assert (roof[0], roof[-1]) == pytest.approx((tops[column], eaves), abs=1.5)


def road(street: Street, depth: float) -> tuple[np.ndarray, np.ndarray]:
    """Brightness of the road along a row at that depth, and metres right of its middle."""
    view = stage()
    paint_ground(view, dice("ground"), street, [])
    row = round(128 + 300 * 1.5 / depth)
    sides = (np.arange(512) - 255.5) / 300 * 450 / (row - 128)
    on_road = view.label[row] == ROAD
    return view.image[row].mean(1)[on_road], sides[on_road]


def test_lines_are_painted_along_the_middle_and_the_edges_of_the_lanes():
    """They are 0.14 m wide, the lanes 3.5 m. At 9 m a pixel is 0.03 m."""
    bright, sides = road(straight_street(), 9.0)
    lines = sides[bright > 1.25 * np.median(bright)]
    apart = np.abs(lines[:, None] - np.array((-3.5, 0.0, 3.5)))
    assert (apart.min(1) < 0.1).all()
    assert (apart.min(0) < 0.05).all()


def test_bars_of_a_crossing_take_up_half_of_the_road():
    """They are 0.52 m wide and begin each metre."""
    bright, _ = road(straight_street(zebra=8.0), 9.5)
    plain, _ = road(straight_street(), 9.5)
    assert (bright > 1.25 * np.median(plain)).mean() == pytest.approx(0.52, abs=0.06)


def test_people_in_the_shade_of_a_house_are_darker():
    """The sun is on the right, where the houses are 40 m high or missing."""

    def brightness(height: float) -> np.ndarray:
        view, street = stage(shadow=1.0, sunny=True), straight_street()
        street.right.heights[:] = height
        crowd = Crowd(street, view.camera, view.light, replace(Style(), density=2.0))
        place_people(dice("people"), crowd)
        figures = [thing for thing in crowd.things if isinstance(thing, Figure)]
        return np.array([[np.mean(part.colour) for part in f.parts] for f in figures])

    sun, shade = brightness(0.0), brightness(40.0)
    assert len(sun) > 4
    # The sun gives half of the light to what it fully faces, and less to what it does not.
    assert (shade < 0.9 * sun).all()
    assert (shade / sun).mean() < 0.75


def test_noise_between_its_steps_is_interpolated():
    """On a whole step lies its value, half-way the mean of two; a step counts from its middle."""
    tile, places = lumps_tile(), np.arange(0.5, 40, 0.5, dtype=np.float32)
    fine = crop(tile, places + 250, places + 30)
    rows = np.arange(250, 290) & 255
    np.testing.assert_allclose(fine[::2, ::2], tile[rows][:, 30:70], atol=1e-5)
    middle = (tile[rows[:-1]] + tile[rows[1:]])[:, 30:70] / 2
    np.testing.assert_allclose(fine[1::2, ::2], middle, atol=1e-5)


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


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "a", None, True, [1.0]])
def test_a_knob_takes_numbers_from_0_up_and_says_what_it_was_given(value):
    told = re.escape(f"Style.texture is {value!r}; it takes a number from 0 up")
    with pytest.raises(ValueError, match=told):
        Style(texture=value)


def test_a_knob_takes_numbers_of_any_kind():
    assert Style(texture=1) == Style(texture=np.float32(1)) == Style()
