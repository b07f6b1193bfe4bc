"""CoTTA's random views: each change by itself, and all of them together."""

from __future__ import annotations

import colorsys
import math

import pytest
import torch
import torch.nn.functional as F

from bestta.adapters import augment as views
from bestta.adapters.augment import augment, check_normalise

PIXELS = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""The normalisation of an image that has none."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape or (2, 3, 9, 7), generator=generator(seed))


# --- colours ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "neutral"),
    [
        (views.brightness, 1),
        (views.contrast, 1),
        (views.saturation, 1),
        (views.gamma, 1),
        (views.hue, 0),
        (views.hue, 1),
    ],
)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_neutral_change_changes_nothing(change, neutral, channels):
    image = pixels(2, channels, 5, 4)
    torch.testing.assert_close(change(image, neutral), image)


def test_brightness_is_a_factor_and_ends_at_one():
    image = torch.tensor([0.2, 0.5, 0.9]).view(1, 3, 1, 1)
    torch.testing.assert_close(
        views.brightness(image, 0.5).flatten(), torch.tensor([0.1, 0.25, 0.45])
    )
    torch.testing.assert_close(
        views.brightness(image, 1.4).flatten(), torch.tensor([0.28, 0.7, 1.0])
    )


def test_contrast_is_about_the_mean_grey_of_each_image():
    # A black and a white pixel: the mean grey is 0.5, so half the contrast gives 0.25 and 0.75.
    half = torch.tensor([0.0, 1.0]).expand(1, 3, 1, 2)
    both = torch.cat([half, torch.full((1, 3, 1, 2), 0.1)])
    changed = views.contrast(both, 0.5)
    torch.testing.assert_close(changed[0], torch.tensor([0.25, 0.75]).expand(3, 1, 2))
    torch.testing.assert_close(changed[1], both[1])


def test_without_saturation_red_is_the_grey_of_its_brightness():
    # Red counts 0.299 (BT.601).
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    torch.testing.assert_close(views.saturation(red, 0.0).flatten(), torch.full((3,), 0.299))
    torch.testing.assert_close(
        views.saturation(red, 0.5).flatten(), torch.tensor([0.6495, 0.1495, 0.1495])
    )


def test_gamma_is_a_power():
    torch.testing.assert_close(views.gamma(torch.full((1, 3, 1, 1), 0.25), 0.5).mean().item(), 0.5)


def test_a_third_of_the_colour_circle_turns_red_into_green_into_blue():
    red, green, blue = torch.eye(3).view(3, 1, 3, 1, 1)
    for colour, following in ((red, green), (green, blue), (blue, red)):
        torch.testing.assert_close(views.hue(colour, 1 / 3), following)
        torch.testing.assert_close(views.hue(following, -1 / 3), colour)


@pytest.mark.parametrize("turn", [-0.06, 0.03, 0.5])
def test_hue_turns_as_the_standard_librarys_hsv_does(turn):
    image = pixels(1, 3, 6, 6)
    image[0, :, 0] = 0.3  # grey has no hue
    image[0, 0, 1] = image[0, 1, 1]  # two channels share the largest value
    found = views.hue(image, turn)[0].flatten(1).T.tolist()
    for (r, g, b), ours in zip(image[0].flatten(1).T.tolist(), found, strict=True):
        h, s, v = colorsys.rgb_to_hsv(r, g, b)
        assert ours == pytest.approx(colorsys.hsv_to_rgb((h + turn) % 1, s, v), abs=1e-5)


def test_colours_change_in_any_order_by_amounts_within_the_published_ranges(monkeypatch):
    published = {
        "brightness": (0.6, 1.4),
        "contrast": (0.7, 1.3),
        "saturation": (0.5, 1.5),
        "hue": (-0.06, 0.06),
        "gamma": (0.7, 1.3),
    }
    orders, amounts = set(), {name: [] for name in published}

    def record(name):
        def change(image, amount):
            amounts[name].append(amount)
            order.append(name)
            return image

        return change

    for name in published:
        monkeypatch.setattr(views, name, record(name))
    draw = generator()
    for _ in range(400):
        order: list[str] = []
        views.colour_jitter(pixels(), draw)
        assert sorted(order) == sorted(published)
        orders.add(tuple(order))
    assert len(orders) > 100  # of 120
    for name, (low, high) in published.items():
        assert low <= min(amounts[name]) < low + 0.02 * (high - low)
        assert high >= max(amounts[name]) > high - 0.02 * (high - low)


# --- shapes -------------------------------------------------------------------------------------


def test_no_turn_no_shift_and_no_scale_is_the_image_with_its_edge_going_on():
    image = pixels()
    torch.testing.assert_close(views.affine(image), image)
    torch.testing.assert_close(
        views.affine(image, margin=2), F.pad(image, (2, 2, 2, 2), mode="replicate")
    )


@pytest.mark.parametrize("side", [6, 7])
def test_a_quarter_turn_is_clockwise(side):
    image = pixels(1, 3, side, side)
    torch.testing.assert_close(views.affine(image, 90), image.rot90(-1, (2, 3)))


def test_a_shift_moves_down_and_right_by_pixels():
    image = pixels(1, 3, 6, 8)
    moved = views.affine(image, shift=(1, -2))
    torch.testing.assert_close(moved[..., 1:, :-2], image[..., :-1, 2:])


def test_twice_the_scale_shows_the_middle():
    # Every pixel of a ramp from the centre (2.5) on is half as far along at twice the size.
    ramp = torch.arange(6.0).expand(1, 1, 6, 6)
    torch.testing.assert_close(
        views.affine(ramp, scale=2.0)[0, 0, 0], 2.5 + (torch.arange(6.0) - 2.5) / 2
    )


def test_a_delta_blurs_to_the_gaussian():
    delta = torch.zeros(1, 1, 9, 9)
    delta[0, 0, 4, 4] = 1
    blurred = views.blur(delta, 0.5)[0, 0]
    assert blurred.shape == (5, 5)
    assert blurred.sum().item() == pytest.approx(1)
    # e^(-½ (d / 0.5)²) = e^(-2 d²), over the sum at d = -2 … 2.
    density = [math.exp(-2 * d * d) for d in (-2, -1, 0, 1, 2)]
    for row in range(5):
        for column in range(5):
            expected = density[row] * density[column] / sum(density) ** 2
            assert blurred[row, column].item() == pytest.approx(expected, abs=1e-7)


def test_the_least_blur_changes_nothing():
    image = pixels()
    torch.testing.assert_close(views.blur(image, 0.001), image[..., 2:-2, 2:-2])


@pytest.mark.parametrize(
    ("degrees", "shift", "scale"), [(15, (4, 4), 0.9), (-15, (-4, 4), 0.9), (7, (2, -3), 1.1)]
)
def test_it_is_the_published_way_of_padding_transforming_blurring_and_cropping(
    degrees, shift, scale
):
    # The published way, on 32 pixels: pad by 16, edge replicated, transform with zeros beyond the
    # border, blur, cut the centre out. The strongest parameters: zeros must not come into sight.
    image = pixels(1, 3, 32, 32)
    padded = F.pad(image, (16, 16, 16, 16), mode="replicate")
    a, (down, right) = math.radians(degrees), shift
    inverse = torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]) / scale
    offset = -inverse @ torch.tensor([right, down]).float() / 32
    theta = torch.cat([inverse, offset[:, None]], 1)[None]
    grid = F.affine_grid(theta, padded.shape, align_corners=False)
    moved = F.grid_sample(padded, grid, padding_mode="zeros", align_corners=False)
    taps = torch.exp(-0.5 * (torch.arange(-2.0, 3.0) / 0.5) ** 2)
    kernel = torch.outer(taps, taps) / taps.sum() ** 2
    blurred = F.conv2d(moved, kernel.expand(3, 1, 5, 5), padding=2, groups=3)
    expected = blurred[..., 16:48, 16:48]
    ours = views.blur(views.affine(image, degrees, shift, scale, margin=2), 0.5)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_shapes_change_by_amounts_within_the_published_ranges(monkeypatch):
    seen = []
    monkeypatch.setattr(views, "affine", lambda image, *amounts: seen.append(amounts))
    draw = generator()
    for _ in range(400):
        views.random_affine(pixels(1, 3, 32, 48), draw)
    degrees, shifts, scales, _ = zip(*seen, strict=True)
    assert -15 <= min(degrees) < -14
    assert 14 < max(degrees) <= 15
    assert 0.9 <= min(scales) < 0.91
    assert 1.09 < max(scales) <= 1.1
    # A sixteenth of the padded image: 64 and 96 pixels.
    down, right = zip(*shifts, strict=True)
    assert set(down) == set(range(-4, 5))
    assert set(right) == set(range(-6, 7))


# --- all of it ----------------------------------------------------------------------------------


def only_noise_and_flip(monkeypatch) -> None:
    monkeypatch.setattr(views, "colour_jitter", lambda image, draw: image)
    monkeypatch.setattr(
        views, "random_affine", lambda image, draw, margin: views.affine(image, margin=2)
    )
    monkeypatch.setattr(views, "BLUR", (0.001, 0.001))


def test_half_of_the_views_are_flipped_and_the_noise_is_small(monkeypatch):
    only_noise_and_flip(monkeypatch)
    image, draw = 0.1 + 0.8 * pixels(2, 3, 32, 32), generator()
    flips = 0
    for _ in range(200):
        view = augment(image, draw, PIXELS)
        flipped = bool((view - image).abs().mean() > 0.1)
        flips += flipped
        noise = (view.flip(-1) if flipped else view) - image
        # 6144 numbers of deviation 0.005: their own deviation is 0.005 up to a hundredth of it.
        assert noise.std().item() == pytest.approx(0.005, rel=0.05)
    assert 70 < flips < 130  # 100 ± 7


def test_draws_are_the_generators_and_no_others():
    image = pixels()
    start = torch.random.get_rng_state()
    first, second = (augment(image, generator(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, augment(image, generator(6)))
    draw = generator(5)
    augment(image, draw)
    assert not torch.equal(augment(image, draw), first)
    assert torch.equal(torch.random.get_rng_state(), start)


def test_one_draw_serves_the_whole_batch():
    image = pixels(1, 3, 16, 16)
    view = augment(image.expand(2, -1, -1, -1), generator(), PIXELS)
    # Only the noise, of deviation 0.005, differs.
    assert 0 < (view[0] - view[1]).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [(2, 2), (2, 9), (5, 3), (32, 32)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_any_size_channels_and_precision_come_back_as_they_were(dtype, size, channels):
    image = pixels(2, channels, *size).to(dtype)
    before = image.clone()
    view = augment(image, generator())
    assert view.shape == image.shape
    assert view.dtype == dtype
    assert bool(view.isfinite().all())
    assert torch.equal(image, before)


def test_half_precision_is_computed_in_single():
    image = pixels(2, 3, 8, 8).half()
    expected = augment(image.float(), generator(), PIXELS).half()
    assert torch.equal(augment(image, generator(), PIXELS), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(augment(image, generator(), PIXELS), expected)


def test_a_normalised_image_is_seen_as_its_pixels():
    mean, deviation = (0.48, 0.45, 0.4), (0.22, 0.25, 0.3)
    image = pixels()
    columns = [torch.tensor(values).view(3, 1, 1) for values in (mean, deviation)]
    view = augment((image - columns[0]) / columns[1], generator(), (mean, deviation))
    expected = (augment(image, generator(), PIXELS) - columns[0]) / columns[1]
    torch.testing.assert_close(view, expected, rtol=1e-4, atol=1e-4)


def test_without_a_normalisation_the_range_of_the_batch_stands_for_that_of_pixels():
    image = pixels()
    image = (image - image.min()) / (image.max() - image.min())
    view = augment(image * 5 - 2, generator())
    expected = augment(image, generator(), PIXELS) * 5 - 2
    torch.testing.assert_close(view, expected, rtol=1e-4, atol=1e-4)
    assert view.min() >= -2
    assert view.max() <= 3


def test_pixels_out_of_range_are_clipped_before_and_after():
    image = 3 * pixels() - 1
    view = augment(image, generator(), PIXELS)
    assert view.min() >= 0
    assert view.max() <= 1
    assert torch.equal(view, augment(image.clamp(0, 1), generator(), PIXELS))


@pytest.mark.parametrize("value", [0.0, -3.0, 1e20])
def test_a_constant_image_comes_back_with_nothing_but_noise(value):
    view = augment(torch.full((1, 3, 8, 8), value), generator())
    assert bool(view.isfinite().all())
    torch.testing.assert_close(view, torch.full((1, 3, 8, 8), value), rtol=1e-3, atol=0.05)


@pytest.mark.parametrize(
    "normalise",
    [
        3,
        (0.5, 0.5),
        ((0.5,),),
        ((0.5, 0.5), (0.5,)),
        ((0.5,), (0.0,)),
        ((0.5,), (float("nan"),)),
        ((float("inf"),), (1.0,)),
        ((), ()),
        ("ab", "cd"),
    ],
)
def test_a_normalisation_that_cannot_be_undone_is_refused(normalise):
    with pytest.raises(ValueError, match="means and the deviations"):
        check_normalise(normalise)


def test_a_normalisation_of_other_channels_is_refused():
    check_normalise(PIXELS)
    check_normalise(None)
    with pytest.raises(ValueError, match=r"3 channels.*\(2, 4, 5, 5\)"):
        augment(pixels(2, 4, 5, 5), generator(), PIXELS)
