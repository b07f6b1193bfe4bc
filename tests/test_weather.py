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


# Fog


def transmission(distance_m: float, severity: int, seed: int) -> np.ndarray:
    """How much light arrives from ``distance_m``: white less black, so the airlight cancels."""
    depth = np.full((40, 80), distance_m)
    white, black = (
        light(simulate(np.full((40, 80, 3), v, np.uint8), "fog", severity, seed=seed, depth=depth))
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


def test_fog_changes_nothing_at_no_distance_and_hides_everything_at_infinity():
    image = street()
    near = simulate(image, "fog", 5, depth=np.zeros((HEIGHT, WIDTH)))
    assert np.array_equal(near, image)
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
    assert np.array_equal(half[:, :128], street()[:, :128])
    assert np.array_equal(half[:, 128:], prior[:, 128:])


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


# Snow


@pytest.mark.parametrize("seed", range(3))
def test_the_ground_grows_whiter_with_every_severity_of_snow(seed):
    ground = over_severities("snow", lambda x: x[NEAR_ROAD].mean(), seed=seed)
    assert falls([*ground[::-1], street()[NEAR_ROAD].mean()])


def test_snow_whitens_the_ground_more_than_the_sides_of_houses():
    near = np.full((HEIGHT, WIDTH), 10.0)  # No veil to speak of, so that only lying snow counts.
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
