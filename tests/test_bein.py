"""BeIN against the paper's equations, at its limits, and on whatever features there are."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import bestta
import oracle
from bestta.bein import SLOPE_MAX, SLOPE_MIN, BeIN, apart_by_chance, bein_affine, believed

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def style(channels: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    """A source style and both γ, small enough for the slope to stay within its bounds."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(channels, generator=g, dtype=dtype) * (high - low) + low

    return uniform(-1, 1), uniform(0.5, 2), uniform(-0.3, 0.3), uniform(-0.1, 0.3)


def features(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=dtype) * 2 + 0.7


shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 7), st.integers(2, 7))


@given(shapes, st.floats(0, 1), st.integers(0, 2**16))
def test_values_equal_the_equations(shape, rho, seed):
    x, (mu_s, sigma_s, gamma_mu, gamma_sigma) = features(*shape, seed=seed), style(shape[1], seed)
    ours = bestta.bein(x, mu_s, sigma_s, gamma_mu, gamma_sigma, rho)
    literal = oracle.bein(x, mu_s, sigma_s, gamma_mu, gamma_sigma, rho)
    torch.testing.assert_close(ours, literal, rtol=1e-9, atol=1e-9)


@given(shapes, st.floats(0, 1), st.integers(0, 2**16))
def test_gradients_equal_those_of_the_equations(shape, rho, seed):
    weight = features(*shape, seed=seed + 1)

    def gradients(function):
        inputs = [features(*shape, seed=seed), *style(shape[1], seed)]
        for tensor in inputs:
            tensor.requires_grad_()
        (function(*inputs, rho) * weight).sum().backward()
        return [tensor.grad for tensor in inputs]

    for ours, literal in zip(gradients(bestta.bein), gradients(oracle.bein), strict=True):
        torch.testing.assert_close(ours, literal, rtol=1e-7, atol=1e-7)


def test_gradients_pass_the_numerical_check():
    inputs = [t.requires_grad_() for t in (features(2, 3, 3, 4), *style(3))]
    assert torch.autograd.gradcheck(lambda *t: bestta.bein(*t, 0.7), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 3, 1, 1), (2, 7, 3)])
def test_rho_zero_without_gamma_is_the_identity_bit_for_bit(dtype, shape):
    x = features(*shape).to(dtype)
    mu_s, sigma_s, _, _ = style(3, dtype=torch.float32)
    assert torch.equal(bestta.bein(x, mu_s, sigma_s, 0.0, 0.0, 0.0), x)


def test_rho_one_without_gamma_is_adain():
    """The independent implementation is PyTorch's instance norm with the source style as affine."""
    x, (mu_s, sigma_s, _, _) = features(3, 4, 6, 5), style(4)
    adain = F.instance_norm(x, weight=sigma_s, bias=mu_s, eps=1e-5)
    torch.testing.assert_close(bestta.bein(x, mu_s, sigma_s, 0.0, 0.0, 1.0), adain)


def test_rho_one_without_gamma_gives_every_image_the_source_style():
    x, (mu_s, sigma_s, _, _) = features(3, 4, 9, 8), style(4)
    y = bestta.bein(x, mu_s, sigma_s, 0.0, 0.0, 1.0)
    torch.testing.assert_close(y.mean((2, 3)), mu_s.expand(3, 4))
    torch.testing.assert_close(
        y.std((2, 3), correction=0), sigma_s.expand(3, 4), rtol=1e-5, atol=1e-5
    )


def test_without_gamma_the_mean_lands_between_source_and_input_by_rho():
    x, (mu_s, sigma_s, _, _) = features(2, 4, 9, 8), style(4)
    y = bestta.bein(x, mu_s, sigma_s, 0.0, 0.0, 0.7)
    torch.testing.assert_close(y.mean((2, 3)), 0.7 * mu_s + 0.3 * x.mean((2, 3)))


def test_each_sample_is_normalised_by_itself():
    x, parameters = features(4, 3, 5, 6), style(3)
    together = bestta.bein(x, *parameters, 0.7)
    alone = torch.cat([bestta.bein(sample, *parameters, 0.7) for sample in x.split(1)])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_tokens_are_maps_with_the_channels_last():
    x, parameters = features(2, 3, 4, 5), style(3)
    tokens = bestta.bein(x.flatten(2).mT, *parameters, 0.7)
    torch.testing.assert_close(tokens.mT.unflatten(2, (4, 5)), bestta.bein(x, *parameters, 0.7))


def test_maps_may_hold_their_channels_last():
    x, parameters = features(2, 3, 4, 5), style(3)
    y = bestta.bein(x.permute(0, 2, 3, 1), *parameters, 0.7, channel_dim=-1)
    torch.testing.assert_close(y.permute(0, 3, 1, 2), bestta.bein(x, *parameters, 0.7))


def test_memory_format_is_kept_and_changes_no_value():
    x, parameters = features(2, 3, 4, 5), style(3)
    y = bestta.bein(x.to(memory_format=torch.channels_last), *parameters, 0.7)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, bestta.bein(x, *parameters, 0.7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_fp32_result_once(dtype):
    x, parameters = features(2, 3, 8, 8).to(dtype), style(3, dtype=torch.float32)
    y = bestta.bein(x, *parameters, 0.7)
    assert y.dtype == dtype
    assert torch.equal(y, bestta.bein(x.float(), *parameters, 0.7).to(dtype))


def test_statistics_of_fp16_features_are_not_taken_in_fp16():
    """Most squares of these values do not fit into fp16, whose largest number is 65504."""
    x = (features(1, 3, 8, 8) * 100).half()
    mu_s, sigma_s, _, _ = style(3, dtype=torch.float32)
    y = bestta.bein(x, mu_s, sigma_s, 0.0, 0.0, 1.0).float()
    torch.testing.assert_close(y.std((2, 3), correction=0)[0], sigma_s, rtol=2e-3, atol=0)


def test_relative_gamma_is_gamma_in_units_of_the_source_deviation():
    x, (mu_s, sigma_s, gamma_mu, gamma_sigma) = features(2, 3, 4, 5), style(3)
    relative = bestta.bein(x, mu_s, sigma_s, gamma_mu, gamma_sigma, 0.7, relative=True)
    absolute = bestta.bein(x, mu_s, sigma_s, sigma_s * gamma_mu, sigma_s * gamma_sigma, 0.7)
    torch.testing.assert_close(relative, absolute)


def test_scalar_gamma_is_the_same_gamma_in_every_channel():
    x, (mu_s, sigma_s, _, _) = features(2, 3, 4, 5), style(3)
    scalar = bestta.bein(x, mu_s, sigma_s, 0.2, 0.1, 0.7)
    vector = bestta.bein(x, mu_s, sigma_s, torch.full((3,), 0.2), torch.full((3,), 0.1), 0.7)
    torch.testing.assert_close(scalar, vector, rtol=1e-6, atol=1e-6)


# --- stability ------------------------------------------------------------------------------

any_gamma = st.floats(allow_nan=True, allow_infinity=True, width=32)
magnitudes = st.sampled_from([0.0, 1e-30, 1e-8, 1e-3, 1.0, 1e3, 1e12, 1e30])


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    dtype=st.sampled_from(DTYPES),
    rho=st.floats(0, 1),
    gamma_mu=any_gamma,
    gamma_sigma=any_gamma,
    mean=magnitudes,
    spread=magnitudes,
    sigma_s=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    relative=st.booleans(),
)
def test_output_is_finite_whatever_gamma_is(
    shape, dtype, rho, gamma_mu, gamma_sigma, mean, spread, sigma_s, relative
):
    """Constant images, 1x1 maps, silent channels and huge values among them."""
    x = features(*shape, dtype=torch.float64) * spread + mean
    largest = torch.finfo(dtype).max
    x = x.clamp(-largest, largest).to(dtype)
    channels = shape[1]
    y = bestta.bein(
        x,
        torch.linspace(-1, 1, channels),
        torch.full((channels,), sigma_s),
        torch.tensor(gamma_mu),
        torch.tensor(gamma_sigma),
        rho,
        relative=relative,
    )
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("gamma", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38])
@pytest.mark.parametrize("which", ["gamma_mu", "gamma_sigma"])
@pytest.mark.parametrize("relative", [True, False])
def test_the_worst_gamma_gives_finite_output_and_gradient(gamma, which, relative):
    x = features(1, 3, 4, 4, dtype=torch.float32).requires_grad_()
    gammas = {"gamma_mu": torch.zeros(3), "gamma_sigma": torch.zeros(3)}
    gammas[which] = torch.tensor([0.0, gamma, 0.1])
    y = bestta.bein(x, torch.ones(3), torch.full((3,), 5.0), **gammas, rho=0.7, relative=relative)
    assert bool(y.isfinite().all())
    y.sum().backward()
    assert bool(x.grad.isfinite().all())


@given(
    sigma_x=st.floats(1e-6, 1e6),
    sigma_s=st.floats(0, 1e6),
    gamma_sigma=st.floats(-1e6, 1e6),
    rho=st.floats(0, 1),
)
def test_slope_never_leaves_its_bounds(sigma_x, sigma_s, gamma_sigma, rho):
    tensors = [torch.tensor([v], dtype=torch.float64) for v in (0.3, sigma_x, 0.1, sigma_s, 0.0)]
    a, _ = bein_affine(*tensors, torch.tensor([gamma_sigma], dtype=torch.float64), rho)
    assert SLOPE_MIN <= a.item() <= SLOPE_MAX


@given(sigma_x=st.floats(1e-6, 1e6), sigma_s=st.floats(0, 1e6), rho=st.floats(0, 1))
def test_a_bound_on_the_slope_never_moves_the_mean(sigma_x, sigma_s, rho):
    """By hand: with γ = 0 the mean μ_x must land on ρ μ_s + (1-ρ) μ_x, whatever the slope is."""
    mu_x, mu_s = 5.0, -2.0
    tensors = [torch.tensor([v], dtype=torch.float64) for v in (mu_x, sigma_x, mu_s, sigma_s, 0, 0)]
    a, b = bein_affine(*tensors, rho)
    assert (a * mu_x + b).item() == pytest.approx(rho * mu_s + (1 - rho) * mu_x, abs=1e-6)


def test_gamma_past_the_pole_does_not_invert_the_features():
    """Eq. 7 has its pole at γ_σ = -(ρ σ_s + (1-ρ) σ_x); behind it the literal form flips signs."""
    x, (mu_s, sigma_s, _, _) = features(1, 3, 6, 6), style(3)
    gamma_sigma = torch.full((3,), -50.0, dtype=torch.float64)
    flipped = oracle.bein(x, mu_s, sigma_s, torch.zeros_like(mu_s), gamma_sigma, 0.7)
    ours = bestta.bein(x, mu_s, sigma_s, 0.0, gamma_sigma, 0.7)
    centred = x - x.mean((2, 3), keepdim=True)
    assert bool(((flipped - flipped.mean((2, 3), keepdim=True)) * centred <= 0).all())
    assert bool(((ours - ours.mean((2, 3), keepdim=True)) * centred >= 0).all())


# --- the layer ------------------------------------------------------------------------------


def test_layer_holds_two_parameters_per_channel_or_two_in_all():
    mu_s, sigma_s, _, _ = style(6)
    sizes = [
        {n: p.numel() for n, p in BeIN(mu_s, sigma_s, gamma_shape=s).named_parameters()}
        for s in ("channel", "scalar")
    ]
    assert sizes == [{"gamma_mu": 6, "gamma_sigma": 6}, {"gamma_mu": 1, "gamma_sigma": 1}]


@pytest.mark.parametrize("gamma_shape", ["channel", "scalar"])
@pytest.mark.parametrize("relative", [True, False])
def test_layer_computes_the_function(gamma_shape, relative):
    x, (mu_s, sigma_s, _, _) = features(2, 3, 4, 5), style(3)
    layer = BeIN(mu_s, sigma_s, 0.6, gamma_shape=gamma_shape, relative=relative)
    with torch.no_grad():
        layer.gamma_mu.add_(0.2)
        layer.gamma_sigma.sub_(0.1)
    expected = bestta.bein(x, mu_s, sigma_s, 0.2, -0.1, 0.6, relative=relative)
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_stream_statistics_are_their_moving_average():
    """By hand: the first image starts the average; then it is 0.75 of it and 0.25 of the image."""
    mu_s, sigma_s, _, _ = style(3)
    layer = BeIN(mu_s, sigma_s, 1.0, statistics_decay=0.75)
    first, second = features(1, 3, 4, 4, seed=5), features(1, 3, 4, 4, seed=6) * 3
    layer(first)
    y = layer(second)
    (mu_1, sigma_1), (mu_2, sigma_2) = map(oracle.instance_statistics, (first, second))
    mu, sigma = 0.75 * mu_1 + 0.25 * mu_2, 0.75 * sigma_1 + 0.25 * sigma_2
    expected = sigma_s.view(1, 3, 1, 1) * (second - mu) / sigma + mu_s.view(1, 3, 1, 1)
    # AdaIN with μ, σ of the stream; the offset of Eq. 6-8 takes the same statistics.
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(layer.mu_x, mu.flatten())
    torch.testing.assert_close(layer.sigma_x, sigma.flatten())


def test_a_batch_moves_the_streams_statistics_once_by_its_mean():
    mu_s, sigma_s, _, _ = style(3)
    layer = BeIN(mu_s, sigma_s, statistics_decay=0.75)
    first, batch = features(1, 3, 4, 4, seed=5), features(3, 3, 4, 4, seed=6) * 3
    layer(first)
    y = layer(batch)
    (mu_1, sigma_1), (mu_2, sigma_2) = map(oracle.instance_statistics, (first, batch))
    mu, sigma = 0.75 * mu_1 + 0.25 * mu_2, 0.75 * sigma_1 + 0.25 * sigma_2  # of each sample
    torch.testing.assert_close(layer.mu_x, mu.mean(0).flatten())
    torch.testing.assert_close(layer.sigma_x, sigma.mean(0).flatten())
    transferred = 0.7 * (sigma_s.view(1, 3, 1, 1) * (batch - mu) / sigma + mu_s.view(1, 3, 1, 1))
    torch.testing.assert_close(y, transferred + 0.3 * batch)


def test_statistics_that_overflow_do_not_enter_the_stream():
    layer = BeIN(torch.zeros(3), torch.ones(3), statistics_decay=0.9)
    layer(torch.full((1, 3, 2, 2), 1e25) * torch.tensor([1.0, -1.0]))  # the first of all images
    assert bool(layer.mu_x.isfinite().all() & layer.sigma_x.isfinite().all())
    layer(features(1, 3, 4, 4, dtype=torch.float32))
    before = layer.mu_x, layer.sigma_x
    layer(torch.full((1, 3, 2, 2), 1e25) * torch.tensor([1.0, -1.0]))
    assert torch.equal(layer.mu_x, before[0])
    assert torch.equal(layer.sigma_x, before[1])


def test_a_layers_state_dict_carries_the_streams_statistics():
    used, fresh = (BeIN(torch.zeros(3), torch.ones(3), statistics_decay=0.5) for _ in range(2))
    used(features(1, 3, 4, 4, dtype=torch.float32))
    empty = fresh.state_dict()
    fresh.load_state_dict(used.state_dict())
    x = features(1, 3, 4, 4, seed=9, dtype=torch.float32)
    assert torch.equal(fresh(x), used(x))
    fresh.load_state_dict(empty)
    assert fresh.mu_x is None


def weighed(images, mu_s, sigma_s, spreads, decay):
    """The weighed statistics of each image, two (C,), written out in NumPy, one image a time.

    And the images, by number, with which the average began anew.
    """
    home, spreads = (mu_s.numpy(), sigma_s.numpy()), [v.numpy() for v in spreads]
    average, recent, odd, q, n, out, anew = None, None, None, spreads, -1, [], []

    def distance(one, other):
        return sum(sum((o - a) ** 2 for o, a in zip(one, other, strict=True)) / home[1] ** 2)

    for number, x in enumerate(images):
        own = [v.flatten().numpy() for v in oracle.instance_statistics(x)]
        n += 1
        if decay <= 0.9 and average is not None:
            last, odd = odd, None
            if distance(own, average) > 2 * sum(sum(q) / home[1] ** 2):
                if last is not None and distance(own, last) < distance(own, average):
                    # As if there had been one image before this, and it that one.
                    average, q, n = last, spreads, 1
                    anew.append(number)
                else:
                    odd = own
        step = max(1 - decay, 1 / (n + 1))
        unlike = 0.0
        if average is None:
            average = recent = own
        else:
            far = [(o - a) ** 2 for o, a in zip(own, average, strict=True)]
            times = sum(sum(far) / home[1] ** 2) / sum(sum(q) / home[1] ** 2)
            unlike = max(0, 1 - 2 / times)
            # One image counts as no further than twice the usual, squared.
            share = min(1, np.sqrt(2 / times))
            fast = max(0.1, 1 / (n + 1))
            recent = [
                r + fast * (a + share * (o - a) - r)
                for o, a, r in zip(own, average, recent, strict=True)
            ]
            q = [v + step * (f - v) for v, f in zip(q, far, strict=True)]
            average = [a + step * (o - a) for o, a in zip(own, average, strict=True)]
        if decay > 0.9 and n >= 20:
            # Var of each fading average, s / (2 - s), less twice their covariance.
            chance = 0.1 / 1.9 + step / (2 - step) - 0.2 * step / (0.1 + step - 0.1 * step)
            apart = [(r - a) ** 2 for r, a in zip(recent, average, strict=True)]
            if sum(sum(apart) / home[1] ** 2) > 6 * chance * sum(sum(q) / home[1] ** 2):
                average, recent, n, step = own, own, 0, 1.0
                anew.append(number)
        contrast = np.minimum(average[1] / home[1], 1)
        weight = [
            np.clip(1 - contrast**2 * s / v, unlike, 1) for s, v in zip(spreads, q, strict=True)
        ]
        style = [a + w * (o - a) for a, w, o in zip(average, weight, own, strict=True)]
        # A mean of n images has 1/n of their variance, a fading one (1 - d) / (1 + d) in the end;
        # this image is in it with `step`.
        rest = max(step / (2 - step), 1 / (n + 1))
        chance = [
            s * (w**2 + 2 * w * (1 - w) * step + (1 - w) ** 2 * rest)
            for s, w in zip(spreads, weight, strict=True)
        ]
        shift = [v - h for v, h in zip(style, home, strict=True)]
        found = sum((shift[0] ** 2 + shift[1] ** 2) / home[1] ** 2)
        away = max(0, 1 - sum(sum(chance) / home[1] ** 2) / found)
        out.append([h + away * d for h, d in zip(home, shift, strict=True)])
    return out, anew


@pytest.mark.parametrize(("decay", "count"), [(0.75, 7), (0.9, 20), (0.99, 70)])
def test_weighed_statistics_are_those_written_out_by_hand(decay, count):
    mu_s, sigma_s, _, _ = style(3)
    spreads = torch.tensor([0.01, 0.3, 2.0]).double(), torch.tensor([0.02, 0.1, 1.0]).double()
    layer = BeIN(mu_s, sigma_s, 1.0, statistics_decay=decay, spread=spreads)
    # Slowly from the start; one odd image, and another style from the 12th on; later and later.
    late = {
        0.75: list(range(count)),
        0.9: [40.0 if i == 6 or i >= 12 else 0.0 for i in range(count)],
        0.99: [max(0, i - 25) for i in range(count)],
    }[decay]
    images = [
        features(1, 3, 4, 4, seed=5 + i) * (1 + 0.3 * t) + 0.2 * t for i, t in enumerate(late)
    ]
    expected, anew = weighed(images, mu_s, sigma_s, spreads, decay)
    assert anew  # each is a stream whose memory begins anew
    assert decay != 0.9 or anew[0] == 13  # not with the odd image, but the second of a style
    for x, (mu, sigma) in zip(images, expected, strict=True):
        mu, sigma = (torch.from_numpy(v).view(1, 3, 1, 1) for v in (mu, sigma))
        adain = sigma_s.view(1, 3, 1, 1) * (x - mu) / sigma + mu_s.view(1, 3, 1, 1)
        torch.testing.assert_close(layer(x), adain)


def test_what_chance_explains_is_not_believed_and_what_is_far_beyond_it_is():
    found = torch.tensor([0.5, 0.25, 5e5, 1.0])
    weight = believed(found, torch.tensor([0.5, 0.5, 0.5, 0.25]))
    torch.testing.assert_close(weight, torch.tensor([0.0, 0.0, 1.0, 0.75]), atol=1e-5, rtol=0)
    # A channel that never varies, nor did in the source, has nothing to weigh.
    assert bool(believed(torch.zeros(3), torch.zeros(3)).isfinite().all())


CHANNELS = 64
CONTENT = 0.1


def played(layer, *, shifts, seed=0):
    """The mean that each image is normalised with, (C,): content as the source's, and a shift."""
    g = torch.Generator().manual_seed(seed)
    pattern = torch.tensor([-1.0, 1.0]).repeat(8).view(1, 1, 4, 4)  # mean 0, deviation 1
    means = []
    for shift in shifts:
        content = torch.randn(1, CHANNELS, 1, 1, generator=g) * CONTENT**0.5
        _, done = layer.transfer(pattern + content + shift)
        means.append(done.mu_x.flatten())
    return means


def build(*, weighed=True, decay=0.9):
    spread = torch.full((CHANNELS,), CONTENT), torch.full((CHANNELS,), 1e-3)
    mu_s, sigma_s = torch.zeros(CHANNELS), torch.ones(CHANNELS)
    return BeIN(mu_s, sigma_s, 1.0, statistics_decay=decay, spread=spread if weighed else None)


def size(means) -> float:
    return float(torch.stack(means).square().mean())


def test_images_of_the_source_are_left_as_they_are():
    """What chance explains is no style: what is normalised with stays near the source's 0."""
    shifts = [0.0] * 40
    plain = size(played(build(weighed=False), shifts=shifts))
    assert size(played(build(), shifts=shifts)) < 0.25 * plain


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("seen", [0, 3, 40])
def test_chance_is_what_a_simulation_of_the_weighed_mean_finds(batch, seen):
    """Of independent draws of variance 1: the variance of (1-w) average + w own, for w = 0.3."""
    decay, w, count = 0.9, 0.3, 40_000
    rng = np.random.default_rng(0)
    average = np.zeros(count)
    for n in range(seen + 1):
        step = max(1 - decay, 1 / (n + 1))
        images = rng.standard_normal((batch, count))
        average = average + step * (images.mean(0) - average)
    simulated = ((1 - w) * average + w * images[0]).var()

    given = []

    def believed(found, chance):
        given.append(chance)
        return np.full((1, 1), w, np.float32)

    spread = torch.ones(1), torch.zeros(1)
    layer = BeIN(torch.zeros(1), torch.ones(1), 1.0, statistics_decay=decay, spread=spread)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["bestta.bein"], "believed", believed)
        for _ in range(seen + 1):
            layer(torch.randn(batch, 1, 2, 2))
    assert float(given[-1].flatten()[0]) == pytest.approx(simulated, rel=0.12)


def test_a_layer_that_did_not_weigh_before_goes_on_weighing():
    plain, weighing = build(weighed=False), build()
    played(plain, shifts=[2.0] * 3)
    weighing.remember(plain.remembered())
    assert all(bool(mean.isfinite().all()) for mean in played(weighing, shifts=[2.0] * 3))


def test_a_change_of_weather_is_followed_at_once():
    """An average with decay 0.9 has come a tenth of the way after one image, ours nearly all."""
    shifts = [2.0] * 30 + [-2.0]
    assert float(played(build(), shifts=shifts)[-1].mean()) < -1.5
    assert float(played(build(weighed=False), shifts=shifts)[-1].mean()) > 1.5


def test_a_short_memory_begins_anew_with_the_second_image_of_another_weather():
    layer = build()
    played(layer, shifts=[2.0] * 30)
    settled = float(layer.mu_spread.mean())
    played(layer, shifts=[-2.0], seed=1)
    assert float(layer.mu_x.mean()) > 1.5  # it may be an odd one
    played(layer, shifts=[-2.0], seed=2)
    assert float(layer.seen) == 2
    assert float(layer.mu_x.mean()) == pytest.approx(-2.0, abs=0.1)
    # How far apart two weathers are is not how much images of one of them vary.
    assert float(layer.mu_spread.mean()) < 2 * settled
    # From then on it is a mean of the images since: of four, with a quarter of their variance.
    played(layer, shifts=[-2.0] * 2, seed=3)
    assert float((layer.mu_x + 2).square().mean()) < CONTENT / 3


def test_one_odd_image_ends_no_memory_however_often_there_is_one():
    layer = build()
    means = played(layer, shifts=[2.0] * 30 + [-2.0, 2.0, 2.0, -2.0, 2.0, 8.0, -2.0, 2.0])
    assert float(layer.seen) == 38
    assert layer.mu_odd is None
    assert float(means[-1].mean()) > 1.2


def test_in_steady_weather_a_short_memory_goes_on():
    """Channels vary together here, eight and eight, so single images are often far out."""
    g = torch.Generator().manual_seed(0)
    layer = build()
    pattern = torch.tensor([-1.0, 1.0]).repeat(8).view(1, 1, 4, 4)
    began, before = 0, 0.0
    for _ in range(400):
        content = torch.randn(1, 8, 1, 1, generator=g).repeat(1, 8, 1, 1) * CONTENT**0.5
        layer(pattern + content + 2.0)
        began += float(layer.seen) < before
        before = float(layer.seen)
    assert began <= 4


@pytest.mark.parametrize("decay", [0.3, 0.9])
def test_after_a_picture_that_stood_still_the_memory_is_as_before(decay):
    """Identical frames teach that images do not vary; that must not be believed for good."""
    layer = build(decay=decay)
    played(layer, shifts=[1.0] * 20)
    usual = float(layer.mu_spread.mean())
    for _ in range(300):
        played(layer, shifts=[1.0], seed=5)
    assert float(layer.mu_spread.mean()) < 1e-6 * usual
    played(layer, shifts=[1.0] * 20, seed=6)
    assert 0.4 * usual < float(layer.mu_spread.mean()) < 2.5 * usual
    assert float(layer.seen) > 2


def test_batches_of_another_weather_begin_anew_together_and_one_odd_sample_does_not():
    g = torch.Generator().manual_seed(0)
    pattern = torch.tensor([-1.0, 1.0]).repeat(8).view(1, 1, 4, 4)

    def batch(*shifts):
        content = torch.randn(len(shifts), CHANNELS, 1, 1, generator=g) * CONTENT**0.5
        return pattern + content + torch.tensor(shifts).view(-1, 1, 1, 1)

    layer = build()
    for _ in range(10):
        layer(batch(2.0, 2.0, 2.0, 2.0))
    for _ in range(3):
        layer(batch(2.0, 1.4, 2.0, 2.0))
    assert float(layer.seen) == 13
    for _ in range(2):
        layer(batch(-2.0, -2.0, -2.0, -2.0))
    assert float(layer.seen) == 2
    assert float(layer.mu_x.mean()) == pytest.approx(-2.0, abs=0.1)


def test_an_image_with_a_channel_that_overflows_is_no_other_weather():
    layer = build()
    played(layer, shifts=[2.0] * 10)
    broken = torch.full((1, CHANNELS, 4, 4), -2.0)
    broken[:, 3] = float("inf")
    for _ in range(2):
        layer(broken)
    assert layer.mu_odd is None
    assert float(layer.mu_x.mean()) > 0
    for value in layer.remembered().values():
        assert value is None or bool(value.isfinite().all())


def test_a_stream_goes_on_to_the_bit_between_an_odd_image_and_the_next():
    used, restored, loaded = build(), build(), build()
    played(used, shifts=[2.0] * 10 + [-2.0])
    assert used.mu_odd is not None
    restored.remember(used.remembered())
    loaded.load_state_dict(used.state_dict())
    expected = played(used, shifts=[-2.0] * 3, seed=1)
    for other in (restored, loaded):
        for mean, same in zip(played(other, shifts=[-2.0] * 3, seed=1), expected, strict=True):
            assert torch.equal(mean, same)


def test_a_long_memory_begins_anew_after_a_change_that_no_single_image_shows():
    """The shift is smaller than what single images differ by; a plain average hardly moves."""
    shifts = [1.0] * 200 + [1.25] * 30
    followed, plain = (build(weighed=w, decay=0.998) for w in (True, False))
    assert float(played(followed, shifts=shifts)[-1].mean()) == pytest.approx(1.25, abs=0.03)
    assert float(played(plain, shifts=shifts)[-1].mean()) < 1.05
    assert float(followed.seen) < 60


@pytest.mark.parametrize("odd", [2.0, 20.0, 1e6])
def test_one_odd_image_ends_no_long_memory(odd):
    layer = build(decay=0.998)
    played(layer, shifts=[1.0] * 200 + [odd] + [1.0] * 30)
    assert float(layer.seen) == 231


@pytest.mark.parametrize("batch", [1, 8])
def test_a_long_memory_of_batches_begins_anew_as_their_means_scatter(batch):
    """Means of eight images scatter by an eighth: what is chance for one is a change for them."""
    g = torch.Generator().manual_seed(0)

    def mean_of(shift):
        content = torch.randn(batch, CHANNELS, 1, 1, generator=g) * CONTENT**0.5
        return torch.tensor([-1.0, 1.0]).repeat(8).view(1, 1, 4, 4) + content + shift

    layer = build(decay=0.998)
    for shift in [1.0] * 100 + [1.1] * 30:
        layer(mean_of(shift))
    assert (float(layer.seen) == 130) is (batch == 1)


def test_a_long_memory_goes_on_while_the_style_stays():
    layer = build(decay=0.998)
    played(layer, shifts=[1.0] * 300)
    assert float(layer.seen) == 300


def test_a_short_memory_keeps_no_average_of_the_last_few():
    layer = build(decay=0.9)
    played(layer, shifts=[0.0] * 3)
    assert layer.mu_recent is None
    assert layer.sigma_recent is None


@pytest.mark.parametrize("first", [None, 0.998])
def test_a_short_memory_that_becomes_a_long_one_goes_on(first):
    """And where it was long before that, nothing of that time comes back."""
    short, long = build(decay=0.9), build(decay=0.998)
    if first is not None:
        before = build(decay=first)
        played(before, shifts=[4.0] * 40)
        short.remember(before.remembered())
    played(short, shifts=[1.0] * 40)
    long.remember(short.remembered())
    assert float(played(long, shifts=[1.0] * 30)[-1].mean()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("seen", [30, 100, 1500])
def test_two_averages_of_a_stream_are_apart_by_chance_as_in_a_simulation(seen):
    rng, count = np.random.default_rng(0), 8_000
    slow, fast = np.zeros(count), np.zeros(count)
    for n in range(seen + 1):
        image = rng.standard_normal(count)
        step = max(0.002, 1 / (n + 1))
        slow = slow + step * (image - slow)
        fast = fast + max(0.1, 1 / (n + 1)) * (image - fast)
    assert apart_by_chance(step) == pytest.approx((fast - slow).var(), rel=0.1)


def test_back_home_hardly_anything_of_the_weather_is_left():
    """Neither of the stream's statistics nor of what was learned, γ."""

    def change(layer):
        played(layer, shifts=[4.0] * 30)
        with torch.no_grad():
            layer.gamma_mu.fill_(0.5)
            return float((layer(image) - image).square().mean())

    g = torch.Generator().manual_seed(1)
    content = torch.randn(1, CHANNELS, 1, 1, generator=g) * CONTENT**0.5
    image = torch.randn(1, CHANNELS, 8, 8, generator=g) + content
    assert change(build()) < CONTENT < 0.01 * change(build(weighed=False))


def test_the_weighed_gradient_passes_the_numerical_check():
    mu_s, sigma_s, _, _ = style(2)
    layer = BeIN(mu_s, sigma_s, 0.5, statistics_decay=0.5, spread=(sigma_s * 0.1, sigma_s * 0.1))
    layer(features(1, 2, 3, 3, seed=5))
    layer(features(1, 2, 3, 3, seed=6) * 2)
    remembered, held = layer.remembered(), np.full((1, 2), 0.3)

    def run(x):
        layer.remember(remembered)
        # What to believe is a number of the stream's, and no function of the image: hold it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["bestta.bein"], "believed", lambda *_: held)
            return layer(x)

    x = features(1, 2, 3, 3, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(run, (x,))


def test_a_loaded_style_is_the_one_that_images_are_weighed_against():
    home, away = build(), build()
    with torch.no_grad():
        away.mu_s.add_(3.0)
    home.load_state_dict(away.state_dict())
    assert float(played(home, shifts=[3.0])[0].mean()) == pytest.approx(3.0, abs=0.1)


def test_a_layer_loaded_in_inference_mode_can_be_trained():
    used, fresh = build(), build()
    with torch.inference_mode():
        fresh.load_state_dict(used.state_dict())
    fresh(torch.randn(1, CHANNELS, 4, 4)).sum().backward()
    assert fresh.gamma_mu.grad is not None


def test_a_layers_state_dict_carries_what_weighing_needs():
    used, fresh = build(), build()
    for seed in range(3):
        used(features(1, CHANNELS, 4, 4, seed=seed, dtype=torch.float32))
    fresh.load_state_dict(used.state_dict())
    x = features(1, CHANNELS, 4, 4, seed=9, dtype=torch.float32)
    assert torch.equal(fresh(x), used(x))


@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_images_that_overflow_do_not_enter_weighed_statistics(decay):
    spread = torch.full((3,), 0.1), torch.full((3,), 0.1)
    layer = BeIN(torch.zeros(3), torch.ones(3), statistics_decay=decay, spread=spread)
    huge = torch.full((1, 3, 2, 2), 1e25) * torch.tensor([1.0, -1.0])
    for x in (huge, features(1, 3, 4, 4, dtype=torch.float32), huge):
        layer(x)
    for value in layer.remembered().values():
        assert value is None or bool(value.isfinite().all())


def test_without_decay_the_layer_remembers_nothing():
    mu_s, sigma_s, _, _ = style(3)
    layer = BeIN(mu_s, sigma_s)
    before = layer(features(1, 3, 4, 4, seed=5))
    layer(features(1, 3, 4, 4, seed=6) * 9)
    assert torch.equal(layer(features(1, 3, 4, 4, seed=5)), before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bestta.bein(torch.ones(2, 3), *style(3), 0.5), r"\(B, C, H, W\).*\(2, 3\)"),
        (lambda: bestta.bein(torch.ones(1, 4, 2, 2), *style(3), 0.5), "3 channels.*have 4"),
        (lambda: bestta.bein(torch.ones(1, 3, 0, 2), *style(3), 0.5), "no features"),
        (
            lambda: bestta.bein(torch.ones(1, 3, 2, 2).int(), *style(3), 0.5),
            "floating-point.*int32",
        ),
        (lambda: bestta.bein(torch.ones(1, 3, 2, 2), *style(3), 1.5), "rho.*1.5"),
        (lambda: BeIN(torch.ones(3), torch.ones(4)), r"mu_s \(3,\), sigma_s \(4,\)"),
        (lambda: BeIN(torch.ones(3), -torch.ones(3)), "not negative"),
        (lambda: BeIN(torch.ones(3), torch.ones(3), slope_min=0.0), "0 < slope_min"),
        (lambda: BeIN(torch.ones(3), torch.ones(3), gamma_shape="two"), "'channel' or 'scalar'"),
        (lambda: BeIN(torch.ones(3), torch.ones(3), statistics_decay=1.0), "statistics_decay"),
        (lambda: BeIN(torch.ones(3), torch.ones(3), spread=(torch.ones(2),) * 2), "spread"),
        (lambda: BeIN(torch.ones(3), torch.ones(3), spread=(-torch.ones(3),) * 2), "spread"),
        (
            lambda: bestta.bein(
                torch.ones(1, 3, 2, 2), torch.ones(3), torch.ones(3), torch.ones(2), 0.0, 0.5
            ),
            r"gamma_mu.*\(2,\)",
        ),
    ],
)
def test_bad_input_is_told_what_was_seen_and_what_would_work(call, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()


def test_a_copy_and_a_cast_layer_weigh_by_their_own_buffers():
    """Arrays are kept at hand from image to image: those of a copy must be the copy's."""
    mu_s, sigma_s, _, _ = style(4)
    spread = sigma_s * 0.2, sigma_s * 0.1
    layer = BeIN(mu_s.float(), sigma_s.float(), 0.8, statistics_decay=0.99, spread=spread)
    images = [features(1, 4, 3, 3, seed=n).float() for n in range(6)]
    for image in images[:3]:
        layer(image)
    twin = copy.deepcopy(layer)
    for one in (layer, twin):  # as an average of models is written back
        one.mu_x.add_(1.0)
    torch.testing.assert_close(twin(images[3]), layer(images[3]))
    wide = copy.deepcopy(layer).double()
    torch.testing.assert_close(wide(images[4].double()).float(), layer(images[4]))
    half = copy.deepcopy(layer).to(torch.bfloat16)
    torch.testing.assert_close(half(images[5]).float(), layer(images[5]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_numpy_weighs_as_pytorch_does(decay, batch, weighed, dtype):
    """The same lines run with arrays on a CPU and with tensors elsewhere; here with both."""
    mu_s, sigma_s, _, _ = style(6)
    spread = (sigma_s * 0.2, sigma_s * 0.1) if weighed else None
    layers = [
        BeIN(mu_s.float(), sigma_s.float(), 0.8, statistics_decay=decay, spread=spread)
        for _ in range(2)
    ]
    anew = [0, 0]
    for number in range(90):
        x = features(batch, 6, 4, 4, seed=number).to(dtype) * (1 + number // 30) + number // 30
        if number == 70:
            x[0, 2] = float("nan")
        seen = []
        for which, layer in enumerate(layers):
            with pytest.MonkeyPatch.context() as patch:
                if which:
                    patch.setattr(sys.modules["bestta.bein"], "_array", lambda t: t.detach())
                y, _ = layer.transfer(x)
            anew[which] += layer.began_anew
            seen.append([y, *(v for v in layer.remembered().values() if v is not None)])
        for one, other in zip(*seen, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert anew[0] == anew[1]
    assert anew[0] > 0 or not layers[0].remembers_long
