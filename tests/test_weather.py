"""The weather against its laws, on a street drawn here so that every region is known."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from bestta.data import weather
from bestta.data.seeds import generator
from bestta.data.weather import CONDITIONS, Weather, perspective_depth, simulate

HEIGHT, WIDTH = 128, 256
SKY = np.s_[2:14, 116:140]
FAR_END = np.s_[30:50, 112:144]
NEAR_ROAD = np.s_[95:122, 60:196]
LEFT_WALL = np.s_[10:50, 4:40]


def street() -> np.ndarray:
    """A road between two brown houses, closed off far away, under a pale sky; all a little rough.

    The camera is the one of the module: horizon at 42 % of the height, 1.22 m above the road, and
    the houses 9 m to either side.
    """
    row, column = np.mgrid[0:HEIGHT, 0:WIDTH] + 0.5
    below, across = row - 0.42 * HEIGHT, np.abs(column - WIDTH / 2)
    image = np.empty((HEIGHT, WIDTH, 3))
    image[:] = (112, 92, 80)
    windows = (row % 16 > 9) & (column % 18 > 11)
    image[windows] = (45, 45, 50)
    far = (across < 22) & (below <= 0)
    image[far] = (70, 70, 68)
    image[far & ((row // 3 + column // 3) % 2 > 0)] = (120, 118, 110)
    image[(below < -26) & (across < 22)] = (205, 212, 218)
    ground = below > 1.22 / 9 * across
    image[ground] = (88, 88, 86)
    image[ground & (np.abs(across / np.maximum(below, 1) - 1.4) < 0.06)] = (150, 150, 148)
    rough = generator("street").normal(0, 4, (HEIGHT, WIDTH, 1))
    rough *= ~((below < -26) & (across < 22))[..., None]
    return np.clip(image + rough, 0, 255).astype(np.uint8)


def light(image: np.ndarray) -> np.ndarray:
    """Linear light: the response of the camera is a square root."""
    return np.square(image / 255.0)


def plane() -> np.ndarray:
    """Depth of a road without end, f · h / r by similar triangles, infinite above the horizon."""
    below = np.arange(HEIGHT) + 0.5 - 0.42 * HEIGHT
    depth = 1.1 * WIDTH * 1.22 / np.where(below > 0, below, np.nan)
    return np.broadcast_to(np.nan_to_num(depth, nan=np.inf)[:, None], (HEIGHT, WIDTH)).copy()


def without(layer: str, *args, **options) -> np.ndarray:
    """``simulate`` with the same chance, but what ``layer`` paints or returns is thrown away."""
    original = getattr(weather, layer)

    def unseen(light, *rest, **named):
        result = original(light.copy() if isinstance(light, np.ndarray) else light, *rest, **named)
        return None if result is None else np.zeros_like(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weather, layer, unseen)
        return simulate(*args, **options)


def noise_level(image: np.ndarray) -> float:
    """Standard deviation of the noise of a grey image (Immerkær, 1996), blind to slopes."""
    mask = np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]], float)
    response = cv2.filter2D(image.astype(float), -1, mask)[1:-1, 1:-1]
    return math.sqrt(math.pi / 2) * float(np.abs(response).mean()) / 6


def over_severities(condition: str, measure, image: np.ndarray | None = None, seed: int = 0):
    image = street() if image is None else image
    return [measure(simulate(image, condition, s, seed=seed)) for s in range(1, 6)]


def falls(values: list[float]) -> bool:
    return all(b < a for a, b in itertools.pairwise(values))


def digests() -> dict[str, str]:
    image = cv2.resize(street(), (512, 256))
    return {
        f"{c} {s}": hashlib.sha256(simulate(image, c, s, seed=5).tobytes()).hexdigest()
        for c in CONDITIONS
        for s in (2, 5)
    }


# Randomness


ELSEWHERE = """
import sys, types
import cv2
# The packages without what their __init__ would import: torch alone takes seconds.
for name, path in (("bestta", sys.argv[1] + "/.."), ("bestta.data", sys.argv[1])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.path.insert(0, sys.argv[2])
cv2.setNumThreads(4)
import json, test_weather
print(json.dumps(test_weather.digests()))
"""


def test_every_process_and_number_of_threads_paints_the_same_picture():
    folders = [str(Path(file).parent) for file in (weather.__file__, __file__)]
    command = [sys.executable, "-c", ELSEWHERE, *folders]
    elsewhere = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    threads = cv2.getNumThreads()
    try:
        cv2.setNumThreads(1)
        assert digests() == elsewhere
    finally:
        cv2.setNumThreads(threads)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_pictures_depend_on_the_seed_and_on_nothing_drawn_before(condition):
    first = simulate(street(), condition, 3, seed=1)
    other = simulate(street(), condition, 3, seed=2)
    assert np.array_equal(first, simulate(street(), condition, 3, seed=1))
    assert np.abs(first.astype(int) - other).mean() > 0.5


def test_global_random_state_is_left_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    for condition in CONDITIONS:
        simulate(street(), condition, 4)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


# What goes in and comes out


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 9), (9, 1), (8, 8), (64, 16), (101, 333), (120, 160), (300, 600)]
)
def test_every_size_gives_an_image_like_the_one_given(condition, shape):
    image = generator("any").integers(0, 256, (*shape, 3), dtype=np.uint8)
    image.setflags(write=False)
    given = image.copy()
    result = simulate(image, condition, 5)
    assert (result.shape, result.dtype) == (image.shape, np.uint8)
    assert result.flags.c_contiguous
    assert np.array_equal(image, given)
    assert not np.shares_memory(result, image)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_mirrored_and_cropped_views_are_as_good_as_copies(condition):
    view = street()[:, ::-1][:100]
    assert np.array_equal(
        simulate(view, condition, 3), simulate(np.ascontiguousarray(view), condition, 3)
    )


@pytest.mark.parametrize("level", [0, 128, 255])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_blank_images_raise_no_warning(condition, level):
    simulate(np.full((40, 80, 3), level, np.uint8), condition, 5)


def test_weather_is_a_picklable_simulate():
    snow = pickle.loads(pickle.dumps(Weather("snow", 2)))
    assert snow == Weather("snow", 2)
    assert snow.name == "snow"
    assert np.array_equal(snow(street(), 7), simulate(street(), "snow", 2, seed=7))


def test_errors_say_what_would_have_worked():
    image = street()
    with pytest.raises(ValueError, match=r"'snwo'.*Did you mean 'snow'\?\nThere are: fog, night"):
        simulate(image, "snwo", 1)
    for severity in (0, 6, 2.5, True, "3"):
        with pytest.raises(ValueError, match="whole number from 1 to 5"):
            Weather("fog", severity)
    with pytest.raises(ValueError, match=r"float64.*type uint8"):
        simulate(image / 255, "fog", 1)
    with pytest.raises(ValueError, match=r"\(128, 256\) and type uint8: RGB bytes"):
        simulate(image[..., 0], "fog", 1)
    with pytest.raises(TypeError, match="this is list"):
        perspective_depth([[0, 0, 0]])
    with pytest.raises(ValueError, match=r"depth of shape \(4, 4\).*\(128, 256\) are expected"):
        simulate(image, "fog", 1, depth=np.ones((4, 4)))
    with pytest.raises(ValueError, match=r"depth down to -1.0 m"):
        simulate(image, "fog", 1, depth=np.full((HEIGHT, WIDTH), -1.0))


# The depth prior


def test_depth_of_an_open_road_is_that_of_the_plane():
    """By similar triangles a road row r pixels below the horizon is f · h / r away."""
    image = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    depth = perspective_depth(image)
    assert depth.shape == (HEIGHT, WIDTH)
    assert depth.dtype == np.float32
    rows = np.arange(75, HEIGHT)
    expected = 1.1 * WIDTH * 1.22 / (rows + 0.5 - 0.42 * HEIGHT)
    assert depth[rows, WIDTH // 2] == pytest.approx(expected, rel=0.1)


def test_depth_grows_up_the_road_and_towards_the_vanishing_point():
    depth = perspective_depth(street())
    for column in (100, 128, 150):
        assert np.all(np.diff(depth[62:120, column]) < 0)
    middle_of_wall = depth[35]
    assert middle_of_wall[5] < middle_of_wall[60] < middle_of_wall[128] < math.inf


def test_sky_and_only_sky_is_infinitely_far():
    infinite = np.isinf(perspective_depth(street()))
    assert infinite[SKY].all()
    assert not infinite[FAR_END].any()
    assert not infinite[LEFT_WALL].any()
    assert not infinite[60:].any()


def test_a_white_house_front_with_windows_is_not_taken_for_sky():
    plain = street()
    plain[:54, :100] = 225
    row, column = np.mgrid[0:54, 0:100]
    windows = plain.copy()
    windows[:54, :100][(row % 10 < 6) & (column % 10 < 5)] = 50
    assert np.isinf(perspective_depth(windows))[:30, :90].mean() < 0.05
    assert np.isinf(perspective_depth(plain))[:30, :90].mean() > 0.5


def test_the_bonnet_in_view_does_not_bring_the_road_nearer():
    image = street()
    image[115:] = (15, 30, 70)
    seen, bare = (perspective_depth(x)[70:105, 100:156] for x in (image, street()))
    assert seen == pytest.approx(bare, rel=0.05)


def test_a_car_on_the_road_is_as_far_away_as_its_wheels():
    """The road meets the box at row 90, which is f · h / r = 9.4 m away."""
    image = street()
    image[58:90, 105:150] = (25, 20, 60)
    expected = 1.1 * WIDTH * 1.22 / (90 - 0.42 * HEIGHT)
    box, road = (perspective_depth(x)[64:84, 115:140] for x in (image, street()))
    assert np.median(box) == pytest.approx(expected, rel=0.15)
    assert np.median(road) > 1.5 * expected


def test_a_person_is_as_far_away_with_the_head_as_with_the_body():
    """Feet at row 90, where 1.22 m span r rows; grown people are about 1.75 m tall."""
    image = street()
    per_metre = (90 - 0.42 * HEIGHT) / 1.22
    top = round(90 - 1.75 * per_metre)
    image[top:90, 122:134] = (25, 20, 60)
    depth = perspective_depth(image)[:, 124:132]
    head, body = depth[top + 1 : top + 8], depth[65:80]
    assert np.median(head) == pytest.approx(np.median(body), rel=0.25)


def test_a_bright_even_road_is_not_sky():
    infinite = np.isinf(perspective_depth(np.full((HEIGHT, WIDTH, 3), 210, np.uint8)))
    assert infinite[:18].all()
    assert not infinite[round(0.47 * HEIGHT) :].any()


# What is taken for ground


def test_a_grey_bonnet_above_a_dark_bumper_is_not_ground():
    """The bumper of rows 80 to 90 is 10 · 1.22 / r = 0.34 m tall; the kerb of two rows 0.07 m."""
    car, kerb = street(), street()
    car[58:80, 105:150] = street()[95:117, 105:150]
    car[80:90, 105:150] = (25, 20, 60)
    kerb[88:90] = (25, 20, 60)
    bonnet = np.s_[64:76, 112:143]
    assert weather._Scene(car).ground[bonnet].max() < 0.3
    assert weather._Scene(kerb).ground[bonnet].min() > 0.7
    snowed, bare = (simulate(x, "snow", 5)[bonnet].mean() for x in (street(), car))
    assert snowed > bare + 20


def test_what_the_given_depth_shows_upright_is_not_ground_even_if_it_looks_like_road():
    road = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    open_road, car = plane(), plane()
    car[70:100, 105:150] = open_road[100, 0]
    inside, beside = np.s_[73:97, 110:145], np.s_[73:97, 60:95]
    ground = weather._Scene(road, car.astype(np.float32)).ground
    assert ground[inside].max() < 0.1
    assert ground[beside].min() > 0.9
    clean, snowed = (simulate(road, "snow", 5, depth=d)[inside].mean() for d in (car, open_road))
    assert snowed > clean + 20


def test_depth_counts_for_the_ground_only_where_it_is_a_number():
    unknown = np.full((HEIGHT, WIDTH), np.nan, np.float32)
    scene = weather._Scene(street(), unknown)
    assert np.array_equal(scene.ground, weather._Scene(street()).ground)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_depths_from_a_thousand_metres_on_are_sky(condition):
    infinite, large = plane(), plane()
    large[np.isinf(large)] = 1000
    given = large.copy()
    assert np.array_equal(
        simulate(street(), condition, 3, depth=infinite),
        simulate(street(), condition, 3, depth=large),
    )
    assert np.array_equal(large, given)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 2)])
def test_depth_of_the_smallest_images_is_taken_too(condition, shape):
    image = np.full((*shape, 3), 90, np.uint8)
    assert simulate(image, condition, 5, depth=np.full(shape, 8)).shape == image.shape


# Fog


def transmission(distance_m: float, severity: int, seed: int) -> np.ndarray:
    """How much light arrives from ``distance_m``: white less black, so the airlight cancels.

    Fog evens out the daylight before it veils it; here is the veil alone.
    """
    depth = np.full((40, 80), distance_m)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weather, "_overcast", lambda *_: None)
        white, black = (
            light(
                simulate(np.full((40, 80, 3), v, np.uint8), "fog", severity, seed=seed, depth=depth)
            )
            for v in (255, 0)
        )
    return (white - black).mean(axis=2)


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_twice_the_fog_lets_through_the_square_of_the_light(severity):
    """Koschmieder: t(d) = exp(-extinction · d), so t(2d) = t(d)²; bytes leave ±0.005 of light."""
    near_m = 0.2 * weather.VISIBILITY_M["fog"][severity - 1]
    once, twice = (transmission(x * near_m, severity, seed=3) for x in (1, 2))
    assert twice == pytest.approx(once**2, abs=0.012)


@pytest.mark.parametrize("severity", range(1, 6))
def test_five_percent_of_contrast_is_left_at_the_visibility(severity):
    """The definition of meteorological optical range; seeds vary it by ±10 %, patches by ±18 %."""
    visibility_m = weather.VISIBILITY_M["fog"][severity - 1]
    at_a_third = [transmission(visibility_m / 3, severity, seed).mean() for seed in range(8)]
    assert np.mean(at_a_third) == pytest.approx(0.05 ** (1 / 3), rel=0.08)


def test_fog_only_dims_the_sun_at_no_distance_and_hides_everything_at_infinity():
    image = street()
    for severity in (1, 5):
        near = simulate(image, "fog", severity, depth=np.zeros((HEIGHT, WIDTH)))
        dimmed = weather._to_light(image)
        strength = weather.FOG_OVERCAST * weather.OVERCAST[severity - 1]
        weather._overcast(dimmed, weather._Scene(image), strength, 1.0)
        off = np.abs(near.astype(int) - weather._to_bytes(dimmed))
        assert off.max() <= 1  # No distance is 0.1 mm, which may round the other way.
        assert (off > 0).mean() < 0.01
    far = np.full((HEIGHT, WIDTH), np.inf)
    hidden, dark = (simulate(x, "fog", 1, depth=far) for x in (image, image // 3))
    assert np.array_equal(hidden, dark)
    assert np.ptp(hidden.reshape(-1, 3), axis=0).max() == 0


def test_given_depth_counts_where_it_is_a_number_and_the_prior_elsewhere():
    depth = np.full((HEIGHT, WIDTH), np.nan)
    prior = simulate(street(), "fog", 4)
    assert np.array_equal(simulate(street(), "fog", 4, depth=depth), prior)
    depth[:, :128] = 0
    half = simulate(street(), "fog", 4, depth=depth)
    here = simulate(street(), "fog", 4, depth=np.zeros((HEIGHT, WIDTH)))
    assert np.array_equal(half[:, :128], here[:, :128])
    assert np.array_equal(half[:, 128:], prior[:, 128:])


@pytest.mark.parametrize("condition", ["fog", "rain", "snow"])
def test_shadows_of_the_sun_fade_with_every_severity(condition):
    """At no distance there is no veil, so only the daylight itself can have grown even."""
    image = np.full((HEIGHT, WIDTH, 3), 150, np.uint8)
    image[:, : WIDTH // 2] = 75

    def contrast(picture):
        return np.median(light(picture[:, 160:])) / np.median(light(picture[:, :96]))

    here = np.zeros((HEIGHT, WIDTH))
    levels = [contrast(simulate(image, condition, s, depth=here)) for s in range(1, 6)]
    assert falls([contrast(image), *levels])
    assert levels[-1] < 0.6 * contrast(image)


@pytest.mark.parametrize("seed", range(3))
def test_fog_takes_contrast_from_afar_with_every_severity_and_less_from_near(seed):
    clear = street()
    far = over_severities("fog", lambda x: x[FAR_END].std() / clear[FAR_END].std(), seed=seed)
    near = over_severities(
        "fog",
        lambda x: noise_level(x[NEAR_ROAD][..., 1]) / noise_level(clear[NEAR_ROAD][..., 1]),
        seed=seed,
    )
    assert falls([1, *far])
    assert all(f < n for f, n in zip(far, near, strict=True))


def test_fog_is_brighter_than_it_is_coloured():
    """Airlight is grey: its channels lie within a few percent of one another."""
    for seed in range(6):
        airlight = simulate(street(), "fog", 3, seed=seed)[SKY].reshape(-1, 3).mean(axis=0)
        assert np.ptp(airlight) < 0.06 * airlight.mean()
        assert airlight[0] < airlight[1] + 2


# Night


@pytest.mark.parametrize("seed", range(3))
def test_nights_grow_darker_with_every_severity(seed):
    assert falls([street().mean(), *over_severities("night", np.mean, seed=seed)])


def test_night_noise_grows_with_every_severity():
    grey = np.full((HEIGHT, WIDTH, 3), 110, np.uint8)
    levels = over_severities("night", lambda x: noise_level(x[90:, :, 1]), grey)
    assert falls(levels[::-1])
    assert levels[0] > 1


def test_noise_where_there_is_light_is_shot_noise():
    """Var(L) = g · L through a square root is σ = √g / 2 at any level: bright or less so."""
    measured = []
    for severity in range(1, 6):
        expected = 255 * math.sqrt(weather.SHOT_NOISE[severity - 1]) / 2
        for level in (255, 170):
            image = np.full((HEIGHT, WIDTH, 3), level, np.uint8)
            night = simulate(image, "night", severity, depth=np.full((HEIGHT, WIDTH), 9.0))
            measured.append(noise_level(night[90:, 64:192, 1]))
            assert measured[-1] == pytest.approx(expected, rel=0.3)
    assert measured[-1] > 2.5 * measured[1]  # √(0.0056 / 0.0005) is 3.3.


def test_the_night_sky_is_darker_than_the_road_in_the_headlights():
    for severity in range(1, 6):
        night = simulate(street(), "night", severity, seed=1)
        assert np.median(night[SKY]) < np.median(night[100:115, 100:156])


def test_lamps_are_bright_and_stand_in_other_places_for_other_seeds():
    shining = [simulate(street(), "night", 3, seed=s).max(axis=2) > 220 for s in range(4)]
    assert all(2 < lamps.sum() < 0.03 * lamps.size for lamps in shining)
    assert len({lamps.tobytes() for lamps in shining}) == 4


def test_glare_spreads_from_a_lamp_and_fades_with_distance():
    scene = weather._Scene(np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    lamp = weather._Lamp(0.0, 6.0, 30.0, 0.16, weather.SODIUM)
    column, row, radius = weather._place(lamp, HEIGHT, WIDTH)
    lights = weather._draw_lights([lamp], scene, generator(0))
    beside = [lights[int(row), int(column + away), 0] for away in (0, 4 * radius, 8, 16, 24)]
    assert falls([*beside, 0])


def test_windows_are_lit_where_windows_are_and_each_in_one_piece():
    image = street()
    row, column = np.mgrid[0:46, 0:100]
    windows = (row % 12 > 6) & (column % 10 > 5)
    image[:46, :100] = np.where(windows[..., None], 40, (112, 92, 80))
    count, parts = cv2.connectedComponents(windows.astype(np.uint8))
    for seed in range(3):
        lit = np.zeros(image.shape, np.float32)
        weather._light_windows(lit, weather._Scene(image), generator(seed))
        assert not lit[:46, :100][~windows].any()
        assert not lit[54:].any()
        shares = [(lit[:46, :100][parts == n] > 0).mean() for n in range(1, count)]
        assert set(shares) == {0.0, 1.0}
        assert np.mean(shares) == pytest.approx(weather.WINDOWS_LIT, abs=0.2)

        night = simulate(image, "night", 3, seed=seed).astype(int)[:46, :100]
        gain = night - without("_light_windows", image, "night", 3, seed=seed)[:46, :100]
        assert gain[windows].mean() > 2 * gain[~windows].mean() > 0  # Glare falls on the walls.


def test_dark_strips_and_corners_on_a_wall_are_not_lit_as_windows_are():
    image = street()
    image[:46, :100] = (112, 92, 80)
    window, strip, corner = np.zeros((3, HEIGHT, WIDTH), bool)
    window[6:11, 10:14] = strip[20:23, 10:60] = strip[20:23, 70:79] = True
    corner[30:39, 40:42] = corner[37:39, 40:49] = True
    image[window | strip | corner] = 40
    lit = np.zeros(image.shape, np.float32)
    for seed in range(30):
        weather._light_windows(lit, weather._Scene(image), generator(seed))
    assert lit[window].all()
    assert not lit[strip | corner].any()


def test_street_lamps_throw_pools_of_their_colour_on_the_ground_below():
    scene = weather._Scene(street())
    lamp = weather._Lamp(6.0, 7.0, 20.0, 0.16, weather.SODIUM)
    with_lamp, none = (
        weather._illumination(scene, 3, generator(0), lamps, weather.SODIUM)
        for lamps in ([lamp], [])
    )
    pool = with_lamp - none
    column = weather._place(lamp, HEIGHT, WIDTH)[0]
    foot = 0.42 * HEIGHT + 1.1 * WIDTH * 1.22 / lamp.z
    at_foot = pool[int(foot), int(column)]
    assert at_foot[0] > 0.5 * none[int(foot), int(column), 0]
    assert at_foot == pytest.approx(at_foot[0] * np.array(weather.SODIUM), rel=1e-2)
    assert pool[int(foot), 10, 0] < 0.01 * at_foot[0]


def test_nothing_shines_through_what_stands_before_it():
    image = np.full((HEIGHT, WIDTH, 3), 60, np.uint8)
    for seed in range(3):
        wall, far = (
            simulate(image, "night", 3, seed=seed, depth=np.full((HEIGHT, WIDTH), d)).max()
            for d in (6.0, 200.0)
        )
        assert wall < 150
        assert far == 255


def test_a_lamp_on_the_upper_edge_of_something_near_is_left_out():
    lamp = weather._Lamp(0.0, 0.7, 40.0, 0.16, weather.COOL_WHITE)
    column, row, _ = weather._place(lamp, HEIGHT, WIDTH)
    depth = np.full((HEIGHT, WIDTH), 60, np.float32)
    image = street()
    assert weather._has_room(lamp, weather._Scene(image, depth))
    depth[int(row) + 1 :, int(column)] = 10
    assert not weather._has_room(lamp, weather._Scene(image, depth))


def test_cars_at_night_come_in_pairs_of_lights_well_apart():
    for seed in range(20):
        lamps = weather._car_lights(generator(seed))
        for colour in (weather.COOL_WHITE, weather.TAIL_LIGHT):
            near, far = sorted({lamp.z for lamp in lamps if lamp.colour == colour})
            assert 32 <= near <= 50 < 65 <= far <= 95
        assert len(lamps) == 8


# Rain


@pytest.mark.parametrize("seed", range(3))
def test_rain_takes_colour_and_distance_with_every_severity(seed):
    def colour(image):
        return float(np.ptp(image[LEFT_WALL].astype(int), axis=-1).mean())

    assert falls([colour(street()), *over_severities("rain", colour, seed=seed)])
    assert falls(over_severities("rain", lambda x: x[FAR_END].std(), seed=seed))


def test_a_wet_road_mirrors_what_stands_behind_it():
    """Only the far end differs between the two streets, so on the road only its image can."""
    lit, dark = street(), street()
    lit[FAR_END], dark[FAR_END] = 230, 30
    mirrored = np.s_[58:74, 118:138]
    for severity in (2, 5):
        bright, dull = (simulate(x, "rain", severity).astype(float) for x in (lit, dark))
        assert bright[mirrored].mean() > dull[mirrored].mean() + 3
    fog_lit, fog_dark = (simulate(x, "fog", 2).astype(float) for x in (lit, dark))
    assert fog_lit[66:74, 118:138].mean() == pytest.approx(fog_dark[66:74, 118:138].mean(), abs=2)


def test_rain_falls_down_and_denser_with_every_severity():
    """Streaks change across more than along. All else on a black scene at no distance is smooth."""
    black, here = np.zeros((256, 512, 3), np.uint8), np.zeros((256, 512))

    def streaks(severity):
        rain = simulate(black, "rain", severity, depth=here)[..., 1].astype(float)
        return np.abs(np.diff(rain, axis=1)).mean() - np.abs(np.diff(rain, axis=0)).mean()

    assert falls([*(streaks(s) for s in range(5, 0, -1)), 0])


def test_a_wet_road_is_darker_than_a_dry_one_under_the_same_sky():
    """Straight down the water mirrors little, so the road close by loses more than it gains."""
    image = street()
    image[54:] = np.maximum(image[54:], 120)
    close = np.s_[110:126, 80:176]
    for severity in range(1, 6):
        wet = light(simulate(image, "rain", severity))
        dry = light(without("_wet_road", image, "rain", severity))
        assert wet[close].mean() < (1 - 0.2 * weather.WETNESS[severity - 1]) * dry[close].mean()
        assert wet[LEFT_WALL].mean() == pytest.approx(dry[LEFT_WALL].mean(), rel=0.01)


def test_drops_on_the_lens_blur_round_spots_and_nothing_else():
    """No drop is wider than 6 % of the image; fine rough texture does not survive in one."""
    rough = generator("rough").integers(60, 200, (256, 512, 3), dtype=np.uint8)
    for severity in (1, 5):
        with_drops = simulate(rough, "rain", severity)
        bare = without("_drops", rough, "rain", severity)
        changed = (with_drops != bare).any(axis=2)
        most = weather.DROPS[severity - 1] * math.pi * (0.03 * 512 / 0.9 + 1) ** 2
        assert 0.05 * most < changed.sum() < most
        inside = cv2.erode(changed.astype(np.uint8), np.ones((5, 5), np.uint8)) > 0
        assert with_drops[inside].std() < 0.7 * bare[inside].std()


def test_the_car_drives_into_the_rain_so_that_it_flies_outwards():
    """Along a streak that leans right going down, changes across and down have opposite signs."""
    black, here = np.zeros((256, 512, 3), np.uint8), np.zeros((256, 512))
    for seed in range(3):
        rain = simulate(black, "rain", 5, seed=seed, depth=here)[..., 1].astype(np.float32)
        lean = -cv2.Sobel(rain, cv2.CV_32F, 1, 0) * cv2.Sobel(rain, cv2.CV_32F, 0, 1)
        assert lean[:, 340:].mean() > lean[:, :172].mean() + 0.1 * np.abs(lean).mean()


# Snow


@pytest.mark.parametrize("seed", range(3))
def test_the_ground_grows_whiter_with_every_severity_of_snow(seed):
    ground = over_severities("snow", lambda x: x[NEAR_ROAD].mean(), seed=seed)
    assert falls([*ground[::-1], street()[NEAR_ROAD].mean()])


def test_snow_whitens_the_ground_more_than_the_sides_of_houses():
    near = np.minimum(plane(), 10)  # No veil to speak of, so that only lying snow counts.
    clear = light(street())
    for severity in range(2, 6):
        gain = light(simulate(street(), "snow", severity, depth=near)) - clear
        assert gain[NEAR_ROAD].mean() > 2 * gain[LEFT_WALL].mean()


def test_tyres_leave_darker_tracks_in_deep_snow():
    """Tracks run 0.78 m to either side of each lane's middle; between them snow lies."""
    road = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    rows = np.arange(85, 115)
    per_metre = (rows + 0.5 - 0.42 * HEIGHT) / 1.22
    snow = np.mean([simulate(road, "snow", 4, seed=s)[..., 1] for s in range(6)], axis=0)

    def at(across_m):
        return snow[rows, np.round(WIDTH / 2 + across_m * per_metre).astype(int)].mean()

    assert max(at(-0.78), at(0.78)) + 10 < min(at(0), at(-1.75), at(1.75))


def test_snow_lies_on_ledges_and_not_on_the_panes_below():
    """The wall above each window is bright above dark, as ledges in daylight are."""
    for severity in (1, 3, 5):
        snowed = simulate(street(), "snow", severity).astype(int)
        gain = snowed - without("_snow_on_ledges", street(), "snow", severity)
        columns = [c for c in range(4, 70) if (c + 0.5) % 18 > 12]
        ledges, panes = (gain[np.ix_([row, row + 16], columns)].mean() for row in (8, 12))
        assert ledges > 10 * weather.LEDGES[severity - 1]
        assert panes < 0.3 * ledges
        assert not gain[SKY].any()


def test_flakes_fall_before_everything_and_denser_with_every_severity():
    """On a black scene at no distance there is no veil and no lying snow: what is bright falls."""
    black, here = np.zeros((256, 512, 3), np.uint8), np.zeros((256, 512))
    flakes = [(simulate(black, "snow", s, depth=here)[..., 1] > 60).mean() for s in range(5, 0, -1)]
    assert falls([0.2, *flakes, 0.0005])
