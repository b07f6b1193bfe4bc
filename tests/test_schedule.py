"""On which images γ learns: every one, every so-many-th, or those after the style has moved."""

from __future__ import annotations

import pytest
import torch

import bestta
from bestta import SourceProfile
from bestta.adapters.schedule import Settling
from bestta.bein import BeIN
from nets import Segmenter, randomise, stream

FOG = {"shift": 1.5, "scale": 0.4}


@pytest.fixture(scope="module")
def segmenter():
    return randomise(Segmenter(), seed=1)


@pytest.fixture(scope="module")
def profile(segmenter):
    return SourceProfile.collect(segmenter, stream(16, seed=3), layers=["layer1", "layer2"])


def learned(adapter, images) -> list[bool]:
    """Whether γ moved with each image: looked at, not asked."""
    moves = []
    for image in images:
        before = [p.detach().clone() for p in adapter.trainable.values()]
        adapter(image)
        after = adapter.trainable.values()
        moves.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        assert adapter.last.adapted == moves[-1]
    return moves


# --- every so-many-th -----------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_so_many_th_image_is_learned_from_the_first_included(segmenter, profile, every):
    adapter = bestta.adapt(segmenter, profile, when=every)
    assert learned(adapter, stream(11, seed=7, **FOG)) == [i % every == 0 for i in range(11)]
    assert adapter.last.adapted_share == pytest.approx(len(range(0, 11, every)) / 11)


def test_an_image_that_is_not_learned_from_is_still_given_the_source_style(segmenter, profile):
    still = bestta.adapt(segmenter, profile, lr=0.0)
    rarely = bestta.adapt(segmenter, profile, when=100)
    first, *rest = stream(4, seed=7, **FOG)
    rarely(first)
    for parameter in rarely.trainable.values():  # as if nothing had been learned
        parameter.data.zero_()
    for image in rest:
        torch.testing.assert_close(rarely(image), still(image))
        assert "one image in 100" in rarely.last.reason


def test_the_average_of_the_target_goes_on_where_nothing_is_learned(segmenter, profile):
    """A follows every image: it says where the stream is, and not what was learned."""
    always = bestta.adapt(segmenter, profile, layers=["layer1"])
    rarely = bestta.adapt(segmenter, profile, layers=["layer1"], when=100)
    for image in stream(5, seed=7, **FOG):
        always(image), rarely(image)
    ours, theirs = (a.target_embedding["layer1"] for a in (rarely, always))
    torch.testing.assert_close(ours, theirs)


def test_a_broken_frame_is_not_counted(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, when=2)
    good = stream(3, seed=7, **FOG)
    blank = torch.full_like(good[0], 1e4)
    seen = learned(adapter, [good[0], blank, good[1], good[2]])
    assert adapter.images_seen == 4
    assert seen == [True, False, False, True]


# --- until settled --------------------------------------------------------------------------


def test_auto_learns_until_the_stream_has_settled_and_at_once_when_it_moves(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, when="auto")
    settle = Settling.settle
    fog = stream(30, seed=7, size=48, **FOG)
    dark = stream(30, seed=8, size=48, shift=-1.5, scale=0.6)
    moves = learned(adapter, [*fog, *dark])
    assert moves[:settle] == [True] * settle
    assert sum(moves[settle:30]) <= settle  # at most one false alarm
    assert moves[30 : 30 + settle] == [True] * settle
    assert not any(moves[-5:])
    assert adapter.last.adapted_share == pytest.approx(sum(moves) / 60)
    assert "settled" in adapter.last.reason


def test_a_camera_that_shows_one_picture_settles(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, when="auto")
    (image,) = stream(1, seed=7, **FOG)
    moves = learned(adapter, [image] * 20)
    assert moves == [i < Settling.settle for i in range(20)]


def test_a_settled_frame_has_no_graph(segmenter, profile):
    from bestta.insertion import inserted

    adapter = bestta.adapt(segmenter, profile, layers=["layer1"], when="auto")
    (image,) = stream(1, seed=7, **FOG)
    graphs = []
    with inserted(segmenter, {"layer2": lambda x: graphs.append(x.requires_grad)}):
        for _ in range(Settling.settle + 3):
            adapter(image)
    assert graphs[-3:] == [False] * 3
    assert graphs[-4]  # the last one that was learned from


def test_a_slow_drift_is_noticed_in_the_end():
    """Each image is hardly further than the one before; the sum of them is far."""
    torch.manual_seed(0)
    schedule, due = Settling(), []
    for step in range(200):
        drift = 0.0 if step < 60 else 0.01 * (step - 60)
        style = 0.1 * torch.randn(1, 2, 64) + drift
        due.append(schedule.due(style))
        schedule.seen(style)
    assert sum(due[20:60]) == 0
    assert sum(due[60:]) >= Settling.settle


def test_whether_an_image_is_due_is_asked_without_a_trace():
    torch.manual_seed(0)
    schedule = Settling()
    for _ in range(20):
        schedule.seen(torch.randn(1, 2, 8))
    before = schedule.state()
    assert schedule.due(10 + torch.randn(1, 2, 8))
    assert not schedule.due(schedule.memory["mean"][None])
    after = schedule.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_style_is_measured_in_source_deviations_and_silent_channels_count_for_nothing():
    bein = BeIN(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 0.0031]), eps=1e-5)
    style = bein.style(torch.tensor([[4.0, 9.0]]), torch.tensor([[16.0, 25.0]]))
    # (4 - 1) / 2, and log(4 / 2): by hand; the second channel's deviation is that of eps alone.
    expected = torch.tensor([[[1.5, 0.0], [0.6931, 0.0]]])
    torch.testing.assert_close(style, expected, atol=1e-4, rtol=1e-4)


# --- state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [3, "auto"])
def test_what_a_schedule_remembers_is_saved_and_loaded(segmenter, profile, when, tmp_path):
    images = stream(14, seed=7, **FOG)
    whole = bestta.adapt(segmenter, profile, when=when)
    expected = learned(whole, images)
    first = bestta.adapt(segmenter, profile, when=when)
    before = learned(first, images[:7])
    first.save(tmp_path / "state.safetensors")
    second = bestta.adapt(segmenter, profile, when=when)
    second.load(tmp_path / "state.safetensors")
    assert before + learned(second, images[7:]) == expected
    assert second.last.adapted_share == pytest.approx(whole.last.adapted_share)


def test_a_state_of_another_schedule_loads_and_starts_anew(segmenter, profile, tmp_path):
    """When γ learns only steers what happens next; what was learned has its meaning without."""
    auto = bestta.adapt(segmenter, profile, when="auto")
    learned(auto, stream(12, seed=7, **FOG))
    auto.save(tmp_path / "state.safetensors")
    always = bestta.adapt(segmenter, profile)
    always.load(tmp_path / "state.safetensors")
    assert all(learned(always, stream(2, seed=9, **FOG)))
    again = bestta.adapt(segmenter, profile, when="auto")
    always.save(tmp_path / "other.safetensors")
    again.load(tmp_path / "other.safetensors")
    assert learned(again, stream(1, seed=9, **FOG)) == [True]


def test_a_reset_forgets_the_schedule_and_the_share(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, when="auto")
    (image,) = stream(1, seed=7, **FOG)
    learned(adapter, [image] * 12)
    adapter.reset()
    assert learned(adapter, [image]) == [True]
    assert adapter.last.adapted_share == 1.0


@pytest.mark.parametrize("when", [0, -1, True, 1.5, "4", "often", None])
def test_a_schedule_that_is_none_is_refused(segmenter, profile, when):
    with pytest.raises(ValueError, match=r"always.*auto.*whole number"):
        bestta.adapt(segmenter, profile, when=when)


@pytest.mark.parametrize(("name", "value"), [("since", -1), ("since", 0), ("scatter", -1.0)])
def test_a_state_no_schedule_can_have_is_refused(segmenter, profile, name, value):
    adapter = bestta.adapt(segmenter, profile, when="auto")
    learned(adapter, stream(3, seed=7, **FOG))
    state = adapter.state()
    state[f"schedule/{name}"] = torch.tensor(value)
    with pytest.raises(ValueError, match=f"schedule/{name}"):
        adapter.load_state(state)


def test_one_odd_frame_does_not_blind_it_to_the_next_move():
    torch.manual_seed(0)
    schedule, due = Settling(), []
    for step in range(120):
        where = 3.0 if step == 60 else 0.35 if step >= 75 else 0.0
        style = 0.1 * torch.randn(1, 2, 64) + where
        due.append(schedule.due(style))
        schedule.seen(style)
    assert due[60]
    assert any(due[75:79])


def test_a_state_of_a_wider_model_goes_on_in_a_narrower_one(segmenter, profile):
    """Styles are remembered in fp32, whatever the model computes in."""
    schedule = Settling()
    schedule.seen(torch.randn(1, 2, 8, dtype=torch.float64))
    schedule.seen(torch.randn(1, 2, 8))
    assert {v.dtype for v in schedule.memory.values()} == {torch.float32, torch.int64}


def test_whole_maps_of_another_size_are_refused_where_nothing_is_learned_too(segmenter):
    profile = SourceProfile.collect(segmenter, stream(4, seed=3), layers="layer1", embedding="map")
    adapter = bestta.adapt(segmenter, profile, embedding="map", when=2)
    adapter(stream(1, seed=7, **FOG)[0])
    with pytest.raises(ValueError, match="whole maps of one size"):
        adapter(stream(1, seed=7, size=24, **FOG)[0])
