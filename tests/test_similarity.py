"""Similarities, histograms of features, and how similarities go with scores."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import bestta
from bestta import SourceProfile
from bestta.benchmark.histograms import POSITIONS, Histograms, spread_channels
from bestta.benchmark.probe import Probe
from bestta.benchmark.similarity import Similarities
from bestta.files import load_tensors, save_tensors
from bestta.profile import LayerProfile
from bestta.reports.correlation import (
    correlate,
    correlations,
    correlations_within,
    frame_scores,
    line,
    share_above,
    student_quantile,
)
from fakes import fake_record
from nets import same, stream

FOG = {"shift": 1.5, "scale": 0.4}


def profile_of(profile: SourceProfile, mu, sigma, channel_dim: int | None = None) -> SourceProfile:
    """A profile with the given style at a layer called "here"."""
    layer = LayerProfile(
        torch.tensor(mu, dtype=torch.float64),
        torch.tensor(sigma, dtype=torch.float64),
        channel_dim,
    )
    return replace(profile, layers={"here": layer})


def flat(*channels: float) -> torch.Tensor:
    """A map (1, C, 1, 2) of which each channel has the given mean, and is not constant."""
    return torch.tensor([[[[c - 1.0, c + 1.0]] for c in channels]])


def cos(u, v) -> float:
    """By the definition, in plain Python."""
    product = sum(a * b for a, b in zip(u, v, strict=True))
    return product / (math.hypot(*u) * math.hypot(*v))


# --- similarities ---------------------------------------------------------------------------


def test_similarities_are_those_of_the_paper_by_hand(profile):
    """Two images; A starts at the first and moves a quarter of the way to the second."""
    similarities = Similarities(profile_of(profile, [4.0, 1.0], [1.0, 1.0]), "here", decay=0.75)
    logits = torch.tensor([[0.0, math.log(3.0)]])
    first = similarities.update(flat(1.0, 2.0), flat(2.0, 2.0), logits)
    assert first == pytest.approx(
        {
            "direction": cos((1, 0), (4 - 1, 1 - 2)),
            "target": cos((2, 2), (1, 2)),
            "source": cos((4, 1), (2, 2)),
            "entropy": -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)),
        }
    )
    second = similarities.update(flat(5.0, 2.0), flat(5.0, 0.0), logits)
    assert second == pytest.approx(
        {
            "direction": cos((0, -2), (4 - 2, 1 - 2)),
            "target": cos((5, 0), (5, 2)),
            "source": cos((4, 1), (5, 0)),
            "entropy": first["entropy"],
        }
    )


def test_a_batch_counts_by_its_mean_and_moves_the_average_once(profile):
    similarities = Similarities(profile_of(profile, [4.0, 1.0], [1.0, 1.0]), "here")
    plain, adapted = torch.cat([flat(1, 2), flat(3, 2)]), torch.cat([flat(2, 2), flat(3, 5)])
    seen = similarities.update(plain, adapted, torch.zeros(2, 4))
    to_source = (4 - 2, 1 - 2)
    assert seen["direction"] == pytest.approx((cos((1, 0), to_source) + cos((0, 3), to_source)) / 2)
    assert seen["target"] == pytest.approx((cos((2, 2), (1, 2)) + cos((3, 5), (3, 2))) / 2)
    assert seen["entropy"] == pytest.approx(math.log(4))
    assert similarities.tensors()["target_average"].tolist() == [2.0, 2.0]


def test_whole_maps_differ_where_their_means_agree(profile):
    """By hand: (0, 2) and (2, 0) have the same mean and nothing in common."""
    known = profile_of(profile, [4.0], [1.0])
    one, other = torch.tensor([[[[0.0, 2.0]]]]), torch.tensor([[[[2.0, 0.0]]]])
    numbers = {
        kind: Similarities(known, "here", target=kind).update(one, other, torch.zeros(1, 2))
        for kind in ("pooled", "map")
    }
    assert numbers["pooled"]["target"] == pytest.approx(1)
    assert numbers["map"]["target"] == 0
    assert numbers["map"]["direction"] == numbers["pooled"]["direction"] == 0  # it did not move


@pytest.mark.parametrize(("channel_dim", "layout"), [(None, (0, 1, 2, 3)), (-1, (0, 2, 3, 1))])
def test_channels_are_where_the_profile_says(profile, channel_dim, layout):
    plain, adapted = torch.rand(1, 3, 4, 5), torch.rand(1, 3, 4, 5)
    usual = Similarities(profile_of(profile, [1.0, 2.0, 3.0], [1.0] * 3), "here")
    known = profile_of(profile, [1.0, 2.0, 3.0], [1.0] * 3, channel_dim)
    moved = Similarities(known, "here")
    expected = usual.update(plain, adapted, torch.zeros(1, 2))
    ours = moved.update(plain.permute(layout), adapted.permute(layout), torch.zeros(1, 2))
    assert ours == pytest.approx(expected, abs=1e-6)


def test_bestta_agrees_on_its_average_and_on_its_losses(segmenter, profile):
    """At its only BeIN, with the plain cosine of the paper; the losses are 1 − cosine."""
    adapter = bestta.adapt(
        segmenter, profile, layers="layer2", style_floor=0.0, lr=0.1, embedding_decay=0.8
    )
    probe = Probe(adapter, "layer2")
    pooled = Similarities(profile, "layer2", decay=0.8)
    maps = Similarities(profile, "layer2", decay=0.8, target="map")
    for image in stream(5, seed=7, batch=2, **FOG):
        plain, seen = probe.plain(image), probe(image)
        numbers = pooled.update(plain, seen.features, seen.logits)
        losses = adapter.last.losses
        assert numbers["direction"] == pytest.approx(1 - losses["style"], abs=1e-5)
        assert numbers["entropy"] == pytest.approx(losses["entropy"], abs=1e-6)
        whole = maps.update(plain, seen.features, seen.logits)["target"]
        assert whole == pytest.approx(1 - losses["content"], abs=1e-5)
    ours, theirs = pooled.tensors(), adapter.state()["layer2/target_embedding"]
    torch.testing.assert_close(ours["target_average"], theirs)


def test_the_source_model_moves_in_no_direction(segmenter, profile):
    probe = Probe(bestta.adapt(segmenter, profile, method="source"), "layer3")
    similarities = Similarities(profile, "layer3")
    image = stream(1, seed=7)[0]
    seen = probe(image)
    numbers = similarities.update(probe.plain(image), seen.features, seen.logits)
    assert numbers["direction"] == 0
    assert numbers["target"] == pytest.approx(1)


def test_similarities_go_on_exactly_from_a_file(profile, tmp_path):
    known = profile_of(profile, [1.0, 2.0], [1.0, 1.0])
    frames = [(torch.rand(1, 2, 3, 3), torch.rand(1, 2, 3, 3), torch.rand(1, 4)) for _ in range(6)]
    whole = Similarities(known, "here")
    assert whole.tensors() == {}
    expected = [whole.update(*frame) for frame in frames]
    first, second = Similarities(known, "here"), Similarities(known, "here")
    second.restore(first.tensors())
    for frame in frames[:3]:
        first.update(*frame)
    save_tensors(tmp_path / "state", first.tensors(), {"kind": "test"})
    second.restore(load_tensors(tmp_path / "state", "test")[0])
    assert [second.update(*frame) for frame in frames[3:]] == expected[3:]
    assert same(whole.tensors(), second.tensors())


def test_what_is_not_finite_has_no_similarities_and_leaves_no_trace(profile):
    similarities = Similarities(profile_of(profile, [4.0, 1.0], [1.0, 1.0]), "here")
    similarities.update(flat(1, 2), flat(2, 2), torch.zeros(1, 4))
    before = similarities.tensors()
    bad = flat(math.nan, 2)
    assert set(similarities.update(bad, flat(2, 2), torch.zeros(1, 4))) == {"entropy"}
    assert similarities.update(flat(2, 2), bad, torch.full((1, 4), math.nan)) == {}
    assert same(before, similarities.tensors())


def test_similarities_refuse_what_does_not_fit(profile):
    known = profile_of(profile, [4.0, 1.0], [1.0, 1.0])
    similarities = Similarities(known, "here")
    logits = torch.zeros(1, 4)
    with pytest.raises(ValueError, match=r"\(1, 2, 1, 2\), the adapted ones \(1, 3, 1, 2\)"):
        similarities.update(flat(1, 2), flat(1, 2, 3), logits)
    with pytest.raises(ValueError, match=r"holds 2 channels at 'here'.*have 3"):
        similarities.update(flat(1, 2, 3), flat(1, 2, 3), logits)
    with pytest.raises(ValueError, match=r"target_average is torch.float32 \(3,\)"):
        similarities.restore({"target_average": torch.zeros(3)})
    with pytest.raises(ValueError, match="no layer 'there'"):
        Similarities(known, "there")
    with pytest.raises(ValueError, match="decay must lie"):
        Similarities(known, "here", decay=1.0)
    with pytest.raises(ValueError, match="'pooled' or 'map'"):
        Similarities(known, "here", target="maps")


# --- histograms -----------------------------------------------------------------------------


def counted(values: torch.Tensor, mu: float, sigma: float, bins: int) -> list[int]:
    """NumPy's own histogram, of values moved into its range."""
    edges = np.linspace(mu - 6 * sigma, mu + 6 * sigma, bins + 1)
    inside = np.clip(values.double().numpy(), edges[0], edges[-1])
    return np.histogram(inside, edges)[0].tolist()


def test_counts_are_those_of_numpy_and_nothing_is_lost(profile):
    """Values in steps of a half: many lie on an edge, and some beyond the last one."""
    mu, sigma = [0.5, -2.0, 1.0], [1.0, 0.5, 2.0]
    histograms = Histograms(profile_of(profile, mu, sigma), "here", channels=3, bins=12)
    source, plain, adapted = ((torch.randn(2, 3, 7, 9) * 8).round() / 2 for _ in range(3))
    histograms.add_source(source)
    histograms.add("fog", plain, adapted)
    found = histograms.result()
    assert found["channels"] == [0, 1, 2]
    for channel in range(3):
        expected = [
            counted(features[:, channel], mu[channel], sigma[channel], 12)
            for features in (source, plain, adapted)
        ]
        ours = [found["source"], found["target"]["fog"], found["adapted"]["fog"]]
        assert [counts[channel] for counts in ours] == expected
        assert [sum(counts[channel]) for counts in ours] == [2 * 7 * 9] * 3
        assert found["edges"][channel] == pytest.approx(
            np.linspace(mu[channel] - 6 * sigma[channel], mu[channel] + 6 * sigma[channel], 13)
        )


def test_tokens_and_maps_with_the_channels_last_are_counted_the_same(profile):
    mu, sigma = [0.5, -2.0], [1.0, 0.5]
    maps = torch.randn(1, 2, 3, 4)
    results = []
    for channel_dim, layout in ((None, maps), (None, maps.flatten(2).mT), (3, maps.movedim(1, 3))):
        histograms = Histograms(profile_of(profile, mu, sigma, channel_dim), "here")
        histograms.add_source(layout)
        histograms.add("fog", layout, layout * 2)
        results.append(histograms.result())
    assert results[0]["source"] == results[1]["source"] == results[2]["source"]
    for other in results[1:]:
        for side in ("target", "adapted"):
            distance = other["distance"][side]["fog"]
            assert distance == pytest.approx(results[0]["distance"][side]["fog"], rel=1e-6)


def test_distance_is_in_source_deviations_over_all_channels_but_silent_ones(profile):
    """By hand. Condition means: plain (2, 3, ·), adapted (1, 2, ·); the third is silent."""
    known = profile_of(profile, [1.0, 2.0, 0.0], [0.5, 4.0, 1e-9])
    histograms = Histograms(known, "here", channels=1)
    histograms.add("fog", flat(1.0, 2.0, 9.0), flat(0.0, 2.0, 9.0))
    histograms.add("fog", flat(3.0, 4.0, 9.0), flat(2.0, 2.0, 9.0))
    histograms.add("snow", flat(1.0, 2.0, 0.0), flat(1.0, 6.0, 0.0))
    distance = histograms.result()["distance"]
    assert distance["target"] == pytest.approx({"fog": (1 / 0.5 + 1 / 4) / 2, "snow": 0})
    assert distance["adapted"] == pytest.approx({"fog": 0, "snow": (0 + 4 / 4) / 2})


def test_channels_are_spread_from_quiet_to_loud_and_none_is_silent():
    """By hand: of 1 … 9 in threes, the middles are 2, 5 and 8."""
    sigma = torch.tensor([9.0, 0.0, 1, 8, 2, 7, 3, 6, 4, 5])
    chosen = spread_channels(sigma, sigma > 0, 3)
    assert sigma[chosen].sort().values.tolist() == [2, 5, 8]
    assert chosen.tolist() == sorted(chosen.tolist())
    assert len(spread_channels(sigma, sigma > 0, 50)) == 9
    assert 1 not in spread_channels(sigma, sigma > 0, 50)


def test_what_is_shown_does_not_depend_on_what_is_seen(segmenter, profile):
    one, other = (
        Histograms(profile, "layer3", channels=3),
        Histograms(profile, "layer3", channels=3),
    )
    one.add_source(torch.rand(1, 8, 6, 6))
    other.add_source(torch.rand(1, 8, 6, 6) * 100)
    a, b = one.result(), other.result()
    assert (a["channels"], a["edges"]) == (b["channels"], b["edges"])
    assert a["source"] != b["source"]


def test_of_large_maps_the_same_positions_are_counted_every_time(profile):
    known = profile_of(profile, [0.0, 0.0], [1.0, 1.0])
    large = torch.randn(1, 2, 128, 64)
    results = []
    for _ in range(2):
        histograms = Histograms(known, "here")
        histograms.add_source(large)
        results.append(histograms.result()["source"])
    assert results[0] == results[1]
    assert [sum(counts) for counts in results[0]] == [POSITIONS, POSITIONS]
    # Scattered: a map that is 0 on the left and 3 on the right is half and half, within chance.
    sides = torch.zeros(1, 2, 128, 64)
    sides[..., 32:] = 3.0
    histograms = Histograms(known, "here", bins=2)
    histograms.add_source(sides - 1.0)
    assert histograms.result()["source"][0] == pytest.approx([2048, 2048], abs=150)


def test_histograms_go_on_exactly_from_a_file(profile, tmp_path):
    frames = [
        (name, torch.randn(1, 8, 6, 6), torch.randn(1, 8, 6, 6))
        for name in ("snow", "fog/dense", "snow", "fog/dense", "dawn", "snow")
    ]
    whole, first, second = (Histograms(profile, "layer3") for _ in range(3))
    for histograms in (whole, first):
        histograms.add_source(frames[0][1])
    for frame in frames:
        whole.add(*frame)
    for frame in frames[:3]:
        first.add(*frame)
    save_tensors(tmp_path / "state", first.tensors(), {"kind": "test"})
    second.restore(load_tensors(tmp_path / "state", "test")[0])
    assert second.result() == first.result()
    for frame in frames[3:]:
        second.add(*frame)
    # As text, for the order of the conditions is part of a record.
    assert json.dumps(second.result()) == json.dumps(whole.result())
    assert list(whole.result()["target"]) == ["snow", "fog/dense", "dawn"]
    assert same(whole.tensors(), second.tensors())
    assert {t.dtype for t in whole.tensors().values()} == {torch.int64, torch.float64}


def test_the_order_of_many_conditions_survives_a_file(profile, tmp_path):
    """Eleven of them: as text, 10 comes before 2."""
    whole, other = Histograms(profile, "layer3"), Histograms(profile, "layer3")
    for number in range(11):
        whole.add(f"weather {7 * number % 11}", torch.rand(1, 8, 2, 2), torch.rand(1, 8, 2, 2))
    save_tensors(tmp_path / "state", whole.tensors(), {"kind": "test"})
    other.restore(load_tensors(tmp_path / "state", "test")[0])
    assert json.dumps(other.result()) == json.dumps(whole.result())


def test_the_result_is_the_entry_of_a_record(profile):
    histograms = Histograms(profile, "layer3")
    histograms.add_source(torch.rand(1, 8, 6, 6))
    histograms.add("fog", torch.rand(1, 8, 6, 6), torch.rand(1, 8, 6, 6))
    ours, expected = histograms.result(), fake_record(conditions=("fog",))["embeddings"]
    assert ours.keys() == expected.keys()
    assert ours["distance"].keys() == expected["distance"].keys()
    assert ours["target"].keys() == expected["target"].keys()
    assert len(ours["edges"]) == len(ours["channels"]) == len(ours["source"])
    assert len(ours["edges"][0]) == len(ours["source"][0]) + 1
    assert json.loads(json.dumps(ours, allow_nan=False)) == ours


def test_images_that_are_not_finite_are_not_counted(profile):
    known = profile_of(profile, [0.0], [1.0])
    histograms = Histograms(known, "here")
    good, bad = flat(1.0), flat(math.inf)
    histograms.add_source(bad)
    histograms.add("night", good, bad)
    assert histograms.result()["target"] == {}
    histograms.add("fog", torch.cat([good, bad]), torch.cat([flat(2.0), good]))
    found = histograms.result()
    assert sum(found["target"]["fog"][0]) == sum(found["adapted"]["fog"][0]) == 2
    assert found["distance"] == {"target": {"fog": 1.0}, "adapted": {"fog": 2.0}}
    assert sum(found["source"][0]) == 0


def test_histograms_refuse_what_does_not_fit(profile):
    histograms = Histograms(profile, "layer3", channels=2, bins=5)
    with pytest.raises(ValueError, match=r"holds 8 channels at 'layer3'.*have 3"):
        histograms.add_source(torch.rand(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"the adapted ones \(1, 8, 2, 2\)"):
        histograms.add("fog", torch.rand(1, 8, 4, 4), torch.rand(1, 8, 2, 2))
    with pytest.raises(ValueError, match="at least one channel and one bin"):
        Histograms(profile, "layer3", channels=0)
    with pytest.raises(ValueError, match="every channel of this layer is silent"):
        Histograms(profile_of(profile, [0.0], [0.0]), "here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": torch.zeros(2, 6, dtype=torch.int64)}, r"source is torch.int64 \(2, 6\)"),
        ({"source": torch.zeros(2, 5)}, "source is torch.float32"),
        ({"0/images/fog": None}, "'fog' has no images"),
        ({"source": None}, "no 'source'"),
        ({"colour": torch.zeros(1)}, "called 'colour'"),
    ],
)
def test_a_state_of_other_histograms_is_refused_and_changes_nothing(profile, change, words):
    histograms = Histograms(profile, "layer3", channels=2, bins=5)
    histograms.add("fog", torch.rand(1, 8, 4, 4), torch.rand(1, 8, 4, 4))
    before = histograms.tensors()
    state = {name: t for name, t in (before | change).items() if t is not None}
    with pytest.raises(ValueError, match=words):
        histograms.restore(state)
    assert same(before, histograms.tensors())


# --- correlations ---------------------------------------------------------------------------

X = [1.0, 2.0, 4.0, 5.0, 7.0, 8.0, 11.0]
Y = [2.0, 1.0, 5.0, 4.0, 9.0, 6.0, 10.0]


def test_pearson_and_its_interval_are_those_of_scipy():
    """scipy 1.17: pearsonr(X, Y) and its confidence_interval(0.95)."""
    found = correlate([*X, None, 3.0, math.nan], [*Y, 1.0, None, 2.0])
    assert found.r == pytest.approx(0.9098095493608891, abs=1e-12)
    assert found.low == pytest.approx(0.4978440282134916, abs=1e-12)
    assert found.high == pytest.approx(0.9867834081759036, abs=1e-12)
    assert found.n == 7


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1, 2, 3], [1, 2, 4]),
        ([1, 2, 3, None, 5], [1, 2, 4, 5, math.nan]),
        ([0.1] * 7, Y),
        (X, [0.3] * 7),
        ([], []),
    ],
)
def test_too_few_pairs_or_no_variance_have_no_correlation(x, y):
    found = correlate(x, y)
    assert (found.r, found.low, found.high) == (None, None, None)
    assert found.n == sum(None not in (a, b) and b == b for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("scale", [1.0, -2.0, 1e-200, 1e200])
def test_a_straight_line_correlates_fully_at_any_scale(scale):
    found = correlate(X, [scale * x for x in X])
    assert found.r == pytest.approx(math.copysign(1, scale))
    assert found.low == pytest.approx(math.copysign(1, scale))
    assert -1 <= found.low <= found.r <= found.high <= 1


def test_the_line_and_its_band_are_those_of_ordinary_least_squares():
    """From scipy's linregress and t.ppf, the band by the covariance of the two coefficients."""
    fit, low, high = line([*X, None], [*Y, 3.0], [0.0, 5.0, 12.0])
    assert fit == pytest.approx([0.5620155, 4.9127907, 11.00387597], abs=1e-7)
    assert low == pytest.approx([-2.32399485, 3.41913843, 7.65951773], abs=1e-7)
    assert high == pytest.approx([3.44802586, 6.40644296, 14.34823421], abs=1e-7)


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([2, 2, 2], [1, 2, 3]), ([], [])])
def test_there_is_no_line_through_too_little(x, y):
    with pytest.raises(ValueError, match=f"there are {len(x)} pairs"):
        line(x, y, [0.0])


def test_sides_of_different_length_are_refused():
    with pytest.raises(ValueError, match="there are 3 and 2"):
        correlate([1, 2, 3], [1, 2])


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [
        # From printed tables, with more digits from scipy's t.ppf.
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.3026527),
        (0.975, 3, 3.1824463),
        (0.975, 10, 2.2281389),
        (0.975, 30, 2.0422725),
        (0.975, 120, 1.9799304),
        (0.975, 100_000, 1.9599877),
        (0.95, 5, 2.0150484),
        (0.995, 7, 3.4994833),
        (0.025, 10, -2.2281389),
        (0.5, 4, 0.0),
    ],
)
def test_quantiles_of_student_are_those_of_the_tables(probability, freedom, quantile):
    assert student_quantile(probability, freedom) == pytest.approx(quantile, abs=1e-6)


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_a_quantile_of_nothing_is_refused(probability, freedom):
    with pytest.raises(ValueError, match="a probability between 0 and 1"):
        student_quantile(probability, freedom)


def record_of(scores, batch=1, steps=None, blocks=None, task="segmentation", **traces):
    """A record of the given frames and traces."""
    count = len(scores)
    record = fake_record(task=task)
    frames = {
        "position": list(range(count)),
        "block": blocks or [0] * count,
        "score": scores,
    }
    steps = list(range(0, count, batch)) if steps is None else steps
    return record | {
        "frames": frames,
        "stream": record["stream"] | {"batch": batch},
        "traces": {"step": steps, **traces},
    }


def test_correlations_are_with_the_score_of_the_same_frame():
    record = record_of(Y, direction=X, target=[-x for x in X], entropy=[None] * 7)
    found = correlations(record)
    assert set(found) == {"direction", "target", "entropy"}  # there is no source similarity
    assert found["direction"] == correlate(X, Y)
    assert found["target"].r == pytest.approx(-0.9098095493608891)
    assert (found["entropy"].r, found["entropy"].n) == (None, 0)


def test_what_only_tells_conditions_apart_does_not_correlate_within_them():
    """By hand: in each block the similarity falls as the score rises; the second has more of both.

    Without the blocks' means both are (-1, 0, 1) and (1, 0, -1), twice: r = -1.
    """
    record = record_of(
        [10.0, 20.0, 30.0, 70.0, 80.0, 90.0],
        blocks=[0, 0, 0, 1, 1, 1],
        direction=[0.3, 0.2, 0.1, 0.9, 0.8, 0.7],
        target=[0.1, 0.1, 0.1, 0.7, 0.7, 0.7],
    )
    assert correlations(record)["direction"].r > 0.8
    assert correlations(record)["target"].r > 0.9
    within = correlations_within(record)
    assert within["direction"] == pytest.approx(-1)
    assert within["target"] is None  # nothing is left of it
    assert set(within) == {"direction", "target"}
    mixed = record | {"blocks": [{"name": "mixed"}]}
    assert correlations_within(mixed) == {}


def test_in_classification_a_similarity_that_goes_with_right_answers_is_positive():
    """scipy 1.17: pointbiserialr of right and wrong with the similarities."""
    wrong = [100.0, 100.0, 0.0, 0.0, 100.0, 0.0]
    similarity = [0.1, 0.4, 0.5, 0.9, 0.2, 0.3]
    record = record_of(wrong, task="classification", target=similarity)
    assert correlations(record)["target"].r == pytest.approx(0.6454972243679028)
    assert frame_scores(record) == [0, 0, 100, 100, 0, 100]


def test_frames_predicted_at_once_count_by_their_mean():
    """By hand. A batch ends with its block; a frame without a score does not count."""
    scores = [10.0, 20.0, 30.0, 50.0, None, 70.0, None]
    record = record_of(scores, batch=2, blocks=[0, 0, 0, 1, 1, 1, 1], steps=[0, 2, 3, 5])
    assert frame_scores(record) == [15.0, 30.0, 50.0, 70.0]
    record["traces"]["step"] = [0, 1, 2]  # the second frame was a step of its own; then no traces
    assert frame_scores(record) == [10.0, 20.0, 30.0]
    assert frame_scores(record_of([None, 4.0])) == [None, 4.0]


def test_frames_are_matched_by_position_not_by_row():
    """Two frames of the stream could not be read; steps that were not traced are missing."""
    record = record_of([10.0, 20.0, 30.0, 40.0], batch=2, blocks=[0, 0, 1, 1], steps=[1, 5])
    record["frames"]["position"] = [1, 3, 4, 5]
    assert frame_scores(record) == [15.0, 40.0]
    record["traces"]["step"] = [0, 4]
    assert frame_scores(record) == [None, 35.0]


def test_the_share_above_counts_what_was_computed():
    record = record_of([1.0] * 5, target=[0.95, 0.9, None, 0.99, 0.1])
    assert share_above(record, "target", 0.9) == 0.5
    assert share_above(record, "direction", 0.9) is None
