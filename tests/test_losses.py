"""The losses against their equations in NumPy, and at the points where they could break."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical

from bestta import losses


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(u: np.ndarray, v: np.ndarray) -> float:
    return float(u.ravel() @ v.ravel() / (np.linalg.norm(u) * np.linalg.norm(v)))


def test_directional_style_loss_is_equation_9():
    source, average, adapted, unadapted = rows(7), rows(7, seed=1), rows(3, 7, seed=2), rows(3, 7)
    expected = np.mean(
        [
            1 - cosine((source - average).numpy(), (a - u).numpy())
            for a, u in zip(adapted, unadapted, strict=True)
        ]
    )
    ours = losses.directional_style_loss(source, average, adapted, unadapted)
    assert ours.item() == pytest.approx(expected, abs=1e-12)


def test_source_style_loss_is_the_cosine_distance_to_the_source():
    source, adapted = rows(7), rows(2, 7, seed=2)
    expected = np.mean([1 - cosine(source.numpy(), a.numpy()) for a in adapted])
    assert losses.source_style_loss(source, adapted).item() == pytest.approx(expected, abs=1e-12)


def test_content_loss_is_equation_10_over_whole_maps():
    unadapted, adapted = rows(2, 3, 4, 5), rows(2, 3, 4, 5, seed=1)
    expected = np.mean(
        [1 - cosine(u.numpy(), a.numpy()) for u, a in zip(unadapted, adapted, strict=True)]
    )
    assert losses.content_loss(unadapted, adapted).item() == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(0, 999))
def test_content_loss_from_moments_equals_the_one_over_maps(batch, channels, size, seed):
    def value_and_gradients(from_moments: bool):
        x = rows(batch, channels, size, size, seed=seed).requires_grad_()
        a = (rows(batch, channels, seed=seed + 1).abs() + 0.1).requires_grad_()
        b = rows(batch, channels, seed=seed + 2).requires_grad_()
        if from_moments:
            variance, mean = torch.var_mean(x, (2, 3), correction=0)
            loss = losses.content_loss_of_affine(mean, variance, a, b)
        else:
            loss = losses.content_loss(x, a[..., None, None] * x + b[..., None, None])
        return loss, *torch.autograd.grad(loss, (x, a, b))

    for ours, literal in zip(value_and_gradients(True), value_and_gradients(False), strict=True):
        torch.testing.assert_close(ours, literal, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3, 5)])
def test_entropy_is_that_of_the_categorical_distribution(shape):
    """The independent implementation is torch.distributions."""
    logits = rows(*shape) * 3
    expected = Categorical(logits=logits.movedim(1, -1)).entropy().mean()
    torch.testing.assert_close(losses.entropy_loss(logits), expected)


def test_entropy_of_a_uniform_prediction_is_the_log_of_the_classes():
    assert losses.entropy_loss(torch.zeros(1, 19, 4, 4)).item() == pytest.approx(math.log(19))


def test_entropy_of_a_certain_prediction_is_zero_with_finite_gradient():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = losses.entropy_loss(logits)
    loss.backward()
    assert loss.item() == 0
    assert bool(logits.grad.isfinite().all())


def test_entropy_of_half_precision_logits_is_taken_in_fp32():
    logits = rows(2, 19, 8, 8).half()
    assert losses.entropy_loss(logits).dtype == torch.float32


def test_l2_loss_is_a_norm_and_not_its_square():
    """By hand: |(3, 4)| + |(0, 2)| = 5 + 2."""
    assert losses.l2_loss(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])).item() == 7


def test_l2_loss_has_no_gradient_at_the_start():
    gamma = torch.zeros(4, requires_grad=True)
    losses.l2_loss(gamma, gamma).backward()
    assert torch.equal(gamma.grad, torch.zeros(4))


@pytest.mark.parametrize("zero", ["u", "v", "both"])
def test_a_vector_without_direction_has_no_similarity_and_no_gradient(zero):
    u = rows(1, 5).mul_(zero == "v").requires_grad_()
    v = rows(1, 5, seed=1).mul_(zero == "u").requires_grad_()
    similarity = losses.cosine(u, v)
    similarity.sum().backward()
    assert similarity.item() == 0
    assert torch.equal(u.grad, torch.zeros(1, 5))
    assert torch.equal(v.grad, torch.zeros(1, 5))


def test_content_loss_of_silent_features_has_no_gradient():
    zero = torch.zeros(1, 3)
    a, b = torch.ones(1, 3, requires_grad=True), torch.zeros(1, 3, requires_grad=True)
    losses.content_loss_of_affine(zero, zero, a, b).backward()
    assert torch.equal(a.grad, zero)
    assert torch.equal(b.grad, zero)


def test_half_precision_embeddings_are_compared_in_fp32():
    """Squares and differences of these do not fit into fp16, whose largest number is 65504."""
    u, v = rows(1, 3, 8, 8) * 1000, rows(1, 3, 8, 8, seed=1) * 1000
    exact = losses.content_loss(u.half().double(), v.half().double()).item()
    assert losses.content_loss(u.half(), v.half()).item() == pytest.approx(exact, abs=1e-5)
    wide, source = torch.full((1, 4), 6e4).half(), torch.ones(4)
    moved = losses.directional_style_loss(source, -source, wide, -wide)
    assert moved.item() == pytest.approx(0, abs=1e-6)


def test_a_direction_shorter_than_the_floor_counts_by_its_length():
    """By hand: u = (3, 4) and v = (0, 2) have the cosine 8 / (5 · 2); below 10, 8 / (10 · 10)."""
    u, v = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    assert losses.cosine(u, v).item() == pytest.approx(0.8)
    assert losses.cosine(u, v, floor=1.0).item() == pytest.approx(0.8)
    assert losses.cosine(u, v, floor=4.0).item() == pytest.approx(8 / (5 * 4))
    assert losses.cosine(u, v, floor=10.0).item() == pytest.approx(0.08)


def test_embeddings_that_hardly_differ_have_no_direction():
    u = torch.full((1, 3), 1e-14, dtype=torch.float64).requires_grad_()
    losses.cosine(u, torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(u.grad, torch.zeros(1, 3, dtype=torch.float64))


def test_likelihood_ratio_is_minus_the_expected_log_odds():
    """By hand, p = (0.7, 0.2, 0.1); p beyond 0.999 counts as 0.999."""
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    by_hand = -sum(v * math.log(v / (1 - v)) for v in (0.7, 0.2, 0.1))
    assert losses.likelihood_ratio(p.log()).item() == pytest.approx(by_hand, abs=1e-12)
    sure = torch.tensor([[40.0, 0.0]], dtype=torch.float64)
    assert losses.likelihood_ratio(sure).item() == pytest.approx(-math.log(999), rel=1e-9)


@pytest.mark.parametrize("p", [0.6, 0.9, 0.99])
def test_likelihood_ratio_still_teaches_where_the_entropy_has_stopped(p):
    """By hand, of two classes with log-odds z: slopes −(2p−1) − 2p(1−p)z and −p(1−p)z.

    From 90 to 99 % the entropy's falls to a quarter, and the ratio's by a tenth.
    """
    z = math.log(p / (1 - p))
    for loss, by_hand in (
        (losses.likelihood_ratio, -(2 * p - 1) - 2 * p * (1 - p) * z),
        (losses.entropy, -p * (1 - p) * z),
    ):
        logits = torch.tensor([[z, 0.0]], dtype=torch.float64, requires_grad=True)
        loss(logits).sum().backward()
        assert logits.grad[0, 0].item() == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 4, 5)])
def test_likelihood_ratio_is_one_number_a_prediction(shape):
    logits = rows(*shape)
    assert losses.likelihood_ratio(logits).shape == losses.entropy(logits).shape
    assert losses.worth(logits, torch.full((3,), 1 / 3)).shape == losses.entropy(logits).shape


def test_a_sure_answer_unlike_the_usual_one_is_worth_the_most():
    """By hand, of two classes: one alone against (0.5, 0.5) has cosine 1/√2, the most unlike."""
    even = torch.tensor([0.5, 0.5])
    sure, unsure = torch.tensor([[60.0, 0.0]]), torch.tensor([[0.5, 0.0]])
    assert losses.worth(sure, even).item() == pytest.approx(math.exp(3), rel=1e-5)
    assert 1 <= losses.worth(unsure, torch.tensor([0.3, 0.7])).item() < 6
    rare, frequent = torch.tensor([0.2, 0.8]), torch.tensor([0.65, 0.35])
    assert losses.worth(sure, rare) == losses.worth(sure, even)  # 20 is the most
    assert 1 < losses.worth(sure, frequent) < 0.5 * losses.worth(sure, even)


def test_the_usual_answer_is_worth_nothing():
    """Two images in five of ten classes: 0.4 / sqrt(0.4² + 0.6² / 9) is 0.894, and 0.42 is over."""
    one = torch.zeros(1, 10)
    one[0, 3] = 60.0
    for share, worthless in ((0.40, False), (0.42, True), (1.0, True)):
        usual = torch.full((10,), (1 - share) / 9)
        usual[3] = share
        assert (losses.worth(one, usual).item() == 0) is worthless, share


def test_total_weighs_each_loss_once():
    parts = {"style": torch.tensor(2.0), "entropy": torch.tensor(5.0)}
    assert losses.total_loss(parts, {"style": 0.5, "entropy": 0.1}).item() == pytest.approx(1.5)


def test_total_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="every weight is 0"):
        losses.total_loss({}, {})
