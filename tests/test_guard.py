"""The guard: it notices harm, undoes it, and leaves alone what needs no help."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import bestta
from bestta import SourceProfile, models
from bestta.adapters.base import StepReport
from bestta.benchmark.tally import Tally
from bestta.guard import Guard, Window, distance, glance_at, variety
from bestta.losses import entropy
from bestta.profile import AnswerProfile
from bestta.reports.page import _events
from nets import Classifier, Segmenter, randomise, same, stream

pytestmark = pytest.mark.guarded

FOG = {"shift": 1.5, "scale": 0.4}


def answer(*shares: float, entropy: float = 0.1) -> AnswerProfile:
    return AnswerProfile(torch.tensor(shares).double(), torch.tensor(entropy).double())


def logits_of(classes: list[int], sure: float = 5.0, count: int = 4) -> torch.Tensor:
    """A map (1, count, 8, 8) of these classes in stripes, each ``sure`` above the others."""
    labels = torch.tensor(classes).repeat_interleave(64 // len(classes)).reshape(1, 8, 8)
    return sure * nn.functional.one_hot(labels, count).permute(0, 3, 1, 2).double()


class Adapted:
    """What a guard sees of an adapter, with a state of one number."""

    name = "fake"
    has_still = True

    def __init__(self) -> None:
        self.learned = torch.zeros(1)

    def state(self) -> dict[str, torch.Tensor]:
        return {"learned": self.learned.clone()}

    def relearn(self, state) -> None:
        self.learned = state["learned"].clone()

    def unlearn(self) -> None:
        self.learned = torch.zeros(1)


# --- measures ------------------------------------------------------------------------------


def test_the_distance_of_histograms_is_half_of_what_must_be_moved_twice():
    # From (1, 0) to (0.25, 0.75) three quarters move.
    assert distance(torch.tensor([1.0, 0]), torch.tensor([0.25, 0.75])) == pytest.approx(0.75)


def test_variety_is_the_logarithm_of_how_many_classes_are_seen_alike():
    assert variety(torch.full((5,), 0.2)) == pytest.approx(math.log(5))
    assert variety(torch.tensor([1.0, 0, 0])) == 0


def test_a_glance_at_a_large_map_sees_what_the_whole_map_shows():
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(1, 6, 16, 32, generator=generator) * 3
    logits = nn.functional.interpolate(coarse, size=(512, 1024), mode="bilinear")
    seen = glance_at(logits)
    whole = logits.softmax(1).mean((0, 2, 3)).double()
    assert distance(seen.histogram, whole) < 0.01
    assert float(seen.entropy) == pytest.approx(float(entropy(logits).mean()), rel=0.02)


def test_a_window_is_the_mean_of_what_it_has_seen_until_it_is_full():
    window = Window(length=4)
    for number in range(3):
        window.add(answer(number / 4, 1 - number / 4, entropy=float(number)))
    assert window.entropy == pytest.approx(1.0)
    assert window.histogram is not None
    assert window.histogram.tolist() == pytest.approx([0.25, 0.75])
    for _ in range(60):
        window.add(answer(1.0, 0.0, entropy=5.0))
    assert window.entropy == pytest.approx(5.0, abs=1e-5)


# --- decisions -----------------------------------------------------------------------------

HOME = answer(0.25, 0.25, 0.25, 0.25, entropy=0.05)
EVEN, LOPSIDED = logits_of([0, 1, 2, 3]), logits_of([0, 0, 0, 1])


def test_who_sees_the_classes_of_home_is_better_than_who_sees_two_of_them():
    guard = Guard(HOME)
    verdict = guard.look(Adapted(), source=LOPSIDED, adapted=EVEN, still=None, size=0.0)
    assert verdict.answered_by == "adapted"
    assert guard.gain > 0
    other = Guard(HOME)
    verdict = other.look(Adapted(), source=EVEN, adapted=LOPSIDED, still=None, size=0.0)
    assert verdict.answered_by == "source"
    # Both ways the same number of points.
    assert other.gain == pytest.approx(-guard.gain)


def test_a_model_as_sure_as_at_home_is_left_alone_if_it_sees_what_it_saw_there():
    # A tenth of what home shows is missing here, and adapting finds it.
    source, adapted = logits_of([0, 1, 2, 3, 0, 1, 2, 2]), EVEN
    sure = float(glance_at(source).entropy)
    near, far = answer(0.25, 0.25, 0.25, 0.25, entropy=sure), answer(0, 0, 0, 1, entropy=sure)
    verdict = Guard(near, margin=-5).look(Adapted(), source, adapted, None, 0.0)
    assert verdict.answered_by == "source"
    assert "as sure of its answers as on source images" in verdict.words
    # As sure, but of other classes than at home: no reason to be left alone.
    assert (
        Guard(far, margin=-5).look(Adapted(), source, adapted, None, 0.0).answered_by == "adapted"
    )


def test_equal_answers_leave_it_to_the_source_model():
    assert Guard(HOME).look(Adapted(), EVEN, EVEN.clone(), None, 0.0).answered_by == "source"


def learning(guard: Guard, adapter: Adapted) -> None:
    """Look at answers that are good, until what is learned is worth keeping."""
    for number in range(1, 5):
        adapter.learned = torch.full((1,), float(number))
        verdict = guard.look(adapter, source=LOPSIDED, adapted=EVEN, still=EVEN, size=0.0)
        assert verdict.answered_by == "adapted"


COLLAPSED = logits_of([0], sure=9.0)


def test_what_collapses_is_rolled_back_at_once_to_the_last_good_state_and_slowed_down():
    guard, adapter = Guard(HOME), Adapted()
    learning(guard, adapter)
    adapter.learned = torch.tensor([99.0])
    verdict = guard.look(adapter, source=LOPSIDED, adapted=COLLAPSED, still=EVEN, size=0.0)
    for _ in range(4):  # one image in a window of good ones may not be enough
        if verdict.rolled_back:
            break
        verdict = guard.look(adapter, source=LOPSIDED, adapted=COLLAPSED, still=EVEN, size=0.0)
    assert verdict.rolled_back
    assert verdict.answered_by == "still"
    assert adapter.learned.item() != 99.0
    assert guard.pace == Guard.slower


@pytest.mark.parametrize(("moved", "undone"), [(1, False), (4, True)])
def test_what_is_learned_may_cost_half_a_point_and_no_more(moved, undone):
    """Each of 64 pixels that leaves the classes of home costs 21 / 64 points of distance."""
    guard, adapter = Guard(HOME), Adapted()
    lopsided = [0] * (16 + moved) + [1] * 16 + [2] * 16 + [3] * (16 - moved)
    for _ in range(4):
        verdict = guard.look(adapter, LOPSIDED, logits_of(lopsided), EVEN, size=0.0)
        if verdict.rolled_back:
            break
    assert verdict.rolled_back == undone


def test_answers_turned_over_are_harm_though_they_show_the_same_classes_as_surely():
    guard, adapter = Guard(HOME), Adapted()
    learning(guard, adapter)
    turned = EVEN.flip(-2)  # every pixel of another class; histogram and entropy are the same
    for _ in range(4):
        verdict = guard.look(adapter, source=LOPSIDED, adapted=turned, still=EVEN, size=0.0)
        if verdict.rolled_back:
            break
    assert verdict.rolled_back
    assert verdict.answered_by == "still"


def test_what_keeps_collapsing_is_held_still_until_the_stream_moves():
    guard, adapter = Guard(HOME), Adapted()
    for _ in range(40):
        guard.look(adapter, source=LOPSIDED, adapted=COLLAPSED, still=EVEN, size=0.0)
        if guard.mode == "still":
            break
    assert guard.mode == "still"
    assert guard.collapses == Guard.limit
    assert adapter.learned.item() == 0
    guard.look(adapter, source=LOPSIDED, adapted=EVEN, still=None, size=0.0)
    assert guard.mode == "still"
    guard.look_closely()
    assert guard.mode == "learning"
    assert guard.collapses < Guard.limit


def test_steps_get_their_size_back_after_long_good_behaviour():
    guard, adapter = Guard(HOME), Adapted()
    guard.look(adapter, source=LOPSIDED, adapted=COLLAPSED, still=EVEN, size=0.0)
    assert guard.pace == Guard.slower
    for _ in range(40):
        guard.look(adapter, source=LOPSIDED, adapted=EVEN, still=EVEN, size=0.0)
    assert guard.pace == 1.0
    assert guard.collapses == 0


def test_looks_stay_rare_though_every_picture_shows_another_scene():
    """Three quarters of each picture are of one class, drawn anew: a fixed bound would never do."""
    guard, adapter = Guard(HOME), Adapted()
    generator = torch.Generator().manual_seed(0)
    looked = 0
    for _ in range(200):
        main = int(torch.randint(4, (), generator=generator))
        scene = logits_of([main, main, main, (main + 1) % 4])
        if guard.due or guard.passed(glance_at(scene), 0.0):
            guard.look(adapter, scene, scene, None, 0.0)
            looked += 1
    assert looked < 100


def test_looks_get_rarer_where_all_is_clear_and_come_back_when_answers_move():
    guard, adapter = Guard(HOME), Adapted()
    learning(guard, adapter)
    waits = []
    for _ in range(30):
        guard.look(adapter, source=LOPSIDED, adapted=EVEN, still=EVEN, size=0.0)
        waits.append(guard.wait)
    assert waits[-1] == Guard.rarest
    assert waits == sorted(waits)
    assert not guard.due
    assert not guard.passed(glance_at(EVEN), 0.0)
    assert any(guard.passed(glance_at(logits_of([3])), 0.0) for _ in range(4))
    assert guard.due


def test_a_new_weather_is_judged_by_its_own_frames_from_the_first_on():
    guard, adapter = Guard(HOME), Adapted()
    for _ in range(12):  # here adapting sees too few classes, and the source model answers
        assert guard.look(adapter, EVEN, LOPSIDED, None, 0.0).answered_by == "source"
    other = logits_of([2, 2, 2, 2])  # then the source model does
    assert guard.look(adapter, other, EVEN, None, 0.0).answered_by == "adapted"


def test_what_is_learned_and_grows_is_looked_at():
    guard, adapter = Guard(HOME), Adapted()
    learning(guard, adapter)
    assert not guard.passed(glance_at(EVEN), size=0.9 * Guard.strayed)
    assert guard.passed(glance_at(EVEN), size=1.1 * Guard.strayed)


def test_being_surer_is_no_merit_of_what_learns_to_be_sure():
    # The same classes, and half of the entropy.
    guard = Guard(HOME)
    surer = logits_of([0, 0, 0, 1], sure=7.0)
    guard.look(Adapted(), source=LOPSIDED, adapted=surer, still=LOPSIDED, size=0.0)
    assert guard.gain == pytest.approx(0.0, abs=1e-9)


def test_a_classifier_that_is_surer_and_sees_no_better_classes_is_not_believed():
    """In noise it is surer, and wrong: only with more of home's classes it counts for something."""
    few, surely_few = torch.eye(4)[[0, 0, 1, 1]] * 2, torch.eye(4)[[0, 0, 1, 1]] * 8
    many = torch.eye(4) * 8
    home = AnswerProfile(torch.full((4,), 0.25).double(), torch.tensor(0.01).double())
    gains = []
    for answers in (surely_few, many):
        guard = Guard(home)
        guard.look(Adapted(), source=few, adapted=answers, still=answers, size=0.0)
        gains.append(guard.gain)
    assert gains[0] < 0.5 < gains[1]


class Baseline(Adapted):
    """The same of a method that has no form without what it has learned."""

    has_still = False


def test_a_baseline_may_turn_the_plain_models_answers_over_and_it_is_told_how_many():
    guard = Guard(HOME)
    for _ in range(4):
        verdict = guard.look(Baseline(), source=LOPSIDED, adapted=EVEN, still=None, size=0.0)
    assert not verdict.rolled_back
    # Stripes of classes 0 0 0 1 and 0 1 2 3: all but the first differ.
    assert guard.disagreement == pytest.approx(0.75)


def test_a_baseline_past_the_limit_is_left_because_of_the_harm_and_not_of_the_margin():
    guard = Guard(HOME, margin=-100.0)
    words = [
        guard.look(Baseline(), source=EVEN, adapted=COLLAPSED, still=None, size=0.0).words
        for _ in range(4)
    ]
    assert "the source model answers" in words[2]
    assert words[3] == "guard, source model: what was learned did harm, 3 times in a row"


def test_a_roll_back_that_ends_with_the_source_model_is_told_as_one():
    guard, adapter = Guard(HOME), Adapted()
    learning(guard, adapter)
    for _ in range(12):  # neither form is any good from here on
        verdict = guard.look(adapter, source=EVEN, adapted=COLLAPSED, still=EVEN, size=0.0)
        if verdict.rolled_back:
            break
    assert verdict.rolled_back
    told = "guard, rolled back: what was learned did harm; the source model answers"
    assert verdict.words == told


def of_class(*classes: int) -> torch.Tensor:
    """Logits (B, 4) of images of these classes."""
    return torch.eye(4)[list(classes)] * 8


@pytest.mark.parametrize("first", [1, 64])
def test_how_much_is_looked_at_follows_the_size_of_the_batch_and_not_that_of_the_first(first):
    """A window is 128 images or 4 times 4 batches, and 4 batches lately: docs/guard.md."""
    guard = Guard(HOME)
    for size in (first, 64):
        answers = of_class(*range(4), *[0] * 60)[:size]
        guard.look(Adapted(), answers, answers, None, 0.0)
    assert (guard.windows["source"].length, guard.windows["adapted lately"].length) == (16, 4)
    guard.look(Adapted(), of_class(1), of_class(1), None, 0.0)
    assert (guard.windows["source"].length, guard.windows["adapted lately"].length) == (128, 32)


@pytest.mark.parametrize(("margin", "trusted"), [(0.0, 31), (1.0, 0)])
def test_a_classifier_that_need_prove_no_gain_is_left_after_enough_images(margin, trusted):
    """Where the plain model sees all of home's classes and the adapted one a single one."""
    guard = Guard(HOME, margin=margin)
    by = [
        guard.look(Adapted(), of_class(i % 4), of_class(1), of_class(1), 0.0).answered_by
        for i in range(guard.enough)
    ]
    assert by[:trusted] == ["adapted"] * trusted
    assert by[-1] == "source"
    assert ("source" in by[:-1]) is (trusted == 0)


@pytest.mark.parametrize(("margin", "by"), [(-1.0, "adapted"), (1.0, "source")])
def test_a_classifier_at_home_is_left_alone_only_where_a_gain_is_asked_for(margin, by):
    """As sure as at home, it sees half of home's classes; adapting finds the others."""
    half, all_of_them = of_class(0, 1, 0, 1).repeat(8, 1), of_class(*range(4)).repeat(8, 1)
    home = AnswerProfile(torch.full((4,), 0.25).double(), glance_at(half).entropy)
    guard = Guard(home, margin=margin)
    for _ in range(4):
        verdict = guard.look(Adapted(), half, all_of_them, all_of_them, 0.0)
    assert guard.gain > 1.5
    assert verdict.answered_by == by


def test_a_few_images_that_learning_turns_over_are_no_collapse_of_a_trusted_classifier():
    """By hand: three turned over in a row are 1 - (31/32)³ of the last 32, and most of four."""
    guard = Guard(HOME, margin=0.0)
    for number in range(40):
        answer = of_class(number % 4)
        guard.look(Adapted(), answer, answer, answer, 0.0)
    for number in range(3):
        still, adapted = of_class(number % 4), of_class((number + 1) % 4)
        assert not guard.look(Adapted(), still, adapted, still, 0.0).rolled_back
    assert guard.disagreement == pytest.approx(1 - (31 / 32) ** 3)


def test_a_trusted_classifier_may_contradict_what_fails_without_what_it_has_learned():
    """γ = 0 sees one class of four where γ as learned sees all: most answers are turned over."""
    guard = Guard(HOME, margin=0.0)
    for number in range(3 * guard.enough):
        good = of_class(number % 4)
        verdict = guard.look(Adapted(), good, good, of_class(1), 0.0)
        assert not verdict.rolled_back
    assert guard.disagreement > guard.contrary


def test_harm_to_a_trusted_classifier_is_told_from_enough_images():
    """What is learned sees one class where the rest sees four: harm, but two images do not tell."""
    guard = Guard(HOME, margin=0.0)
    seen = []
    for number in range(guard.enough):
        still = of_class(number % 4)
        seen.append(guard.look(Adapted(), still, of_class(1), still, 0.0).rolled_back)
    assert not any(seen[: guard.enough - 1])
    assert seen[-1]


def test_a_trusted_classifier_may_owe_its_worth_to_what_it_has_learned():
    """Without what was learned its long memory does not fit: that is no reason to leave it."""
    guard = Guard(HOME, margin=-1.0)
    for number in range(2 * guard.enough):
        good, poor = of_class(number % 4), of_class(1 if number % 3 == 0 else number % 4)
        verdict = guard.look(Adapted(), good, good, poor, 0.0)
    assert guard.points("still", guard.windows["source"]) < -1.25
    assert guard.gain == pytest.approx(0.0)
    assert verdict.answered_by == "adapted"


# --- on an adapter -------------------------------------------------------------------------


@pytest.fixture
def classifier_profile():
    model = randomise(Classifier(), seed=1)
    return model, bestta.SourceProfile.collect(model, stream(24, seed=3), ["layer1", "layer2"])


@pytest.fixture
def guarded(segmenter, profile):
    return bestta.adapt(segmenter, profile, layers=("layer1",))


def test_the_guard_is_on_for_bestta_and_off_for_the_baselines_unless_asked(segmenter, profile):
    assert bestta.adapt(segmenter, profile).guard is not None
    assert bestta.adapt(segmenter, profile, guard=False).guard is None
    assert bestta.adapt(segmenter, method="tent").guard is None
    assert bestta.adapt(segmenter, profile, method="tent", guard=True).guard is not None


def test_a_guard_that_knows_nothing_of_home_is_told_of(segmenter, profile):
    with pytest.warns(UserWarning, match=r"SourceProfile\.collect.*any layer will do"):
        bestta.adapt(segmenter, method="tent", guard=True)
    with pytest.warns(UserWarning, match="does not know how Segmenter answers"):
        bestta.adapt(segmenter, replace(profile, answers=None))


def test_a_home_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="answers are NaN or infinite: collect it anew"):
        Guard(answer(0.5, float("nan")))


def test_where_the_source_model_answers_it_answers_to_the_bit(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, guard_margin=1e6)
    for image in stream(6, seed=8, **FOG):
        assert torch.equal(adapter(image), segmenter(image))
        assert adapter.last.skipped
        assert adapter.last.guard.startswith("guard, source model")


def test_where_adapting_is_worth_it_the_answers_are_those_without_a_guard(segmenter, profile):
    """A margin below everything: nobody intervenes, but for what does harm."""
    settings = {"layers": ("layer1",), "lr": 1e-3}
    guarded = bestta.adapt(segmenter, profile, guard_margin=-1e6, **settings)
    guarded.guard.home = None  # random nets are as sure in fog as at home
    plain = bestta.adapt(segmenter, profile, guard=False, **settings)
    for image in stream(20, seed=8, **FOG):
        assert torch.equal(guarded(image), plain(image))
    assert guarded.images_adapted == 20


LONG = {"statistics": "weighed", "statistics_decay": 0.99}


def test_a_memory_that_begins_anew_tells_of_another_style_at_once(segmenter, profile):
    """Of four layers one is enough, and by chance that may happen once in sixty images."""
    adapter = bestta.adapt(segmenter, profile, guard=False, **LONG)
    moved = []
    for image in [*stream(60, seed=1), *stream(20, seed=2, **FOG)]:
        adapter(image)
        moved.append(adapter.style_moved())
    assert sum(moved[:60]) <= 1
    assert any(moved[60:64])


def test_another_style_is_judged_by_its_own_images(segmenter, profile, monkeypatch):
    """The plain model's answers alone may not tell of it, and old ones fade slowly."""
    adapter = bestta.adapt(segmenter, profile, guard_margin=1e6, **LONG)
    images = stream(40, seed=1)
    for image in images:
        adapter(image)
    guard = adapter.guard
    assert guard.windows["source"].count > 4
    guard.wait = 0
    monkeypatch.setattr(adapter, "style_moved", lambda: True)
    adapter(images[0])
    assert guard.windows["source"].count == 1
    assert guard.due


def test_a_single_layer_of_many_tells_of_no_other_style(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, **LONG)
    many = len(adapter.bein)
    for bein in adapter.bein.values():
        bein.seen = torch.tensor(300.0)
    first, *others = adapter.bein.values()
    first.began_anew, first.seen = True, torch.tensor(1.0)
    assert adapter.style_moved() is (many <= 4)
    adapter.bein |= {f"copy {i}": bein for i, bein in enumerate(others)}
    adapter.bein |= {f"another {i}": bein for i, bein in enumerate(others)}
    assert len(adapter.bein) > 4
    assert not adapter.style_moved()


def test_a_change_that_is_told_again_and_again_keeps_no_stream_from_being_judged(
    classifier_profile, monkeypatch
):
    """Layers tell of a change one after another; enough looks must come together all the same."""
    model, profile = classifier_profile
    adapter = bestta.adapt(model, profile, **LONG)
    monkeypatch.setattr(adapter, "style_moved", lambda: True)
    most = 0
    for image in stream(40, seed=0):
        adapter(image)
        most = max(most, adapter.guard.windows["source"].count)
    assert most >= adapter.guard.enough


def test_a_classifier_is_trusted_where_images_like_the_sources_are_left_alone(
    classifier_profile,
):
    model, profile = classifier_profile
    image = stream(1, seed=0)[0]
    for settings, margin in ((LONG, -1.0), ({"statistics_decay": 0.0}, 1.0)):
        adapter = bestta.adapt(model, profile, **settings)
        adapter(image)
        assert adapter.guard.margin == margin


def test_a_state_that_was_wrecked_on_purpose_is_left_behind(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, layers=("layer1",), guard_margin=-1e6)
    adapter.guard.home = None
    images = stream(60, seed=8, **FOG)
    for image in images[:10]:
        adapter(image)
    with torch.no_grad():
        for parameter in adapter.trainable.values():
            parameter.fill_(50.0)
    still = bestta.adapt(segmenter, profile, layers=("layer1",), guard=False, lr=0)
    for image in images[10:]:
        logits = adapter(image)
        expected = still(image)
    assert adapter.learned_size() < 0.1  # γ itself is clamped to 0.5 by the first step
    agreement = (logits.argmax(1) == expected.argmax(1)).float().mean()
    assert agreement > 0.9


def test_a_guarded_stream_that_was_stopped_goes_on_to_the_bit(segmenter, profile, tmp_path):
    images = stream(24, seed=8, **FOG)
    settings = {"layers": ("layer1",), "lr": 0.3, "guard_margin": -1.0}
    through = bestta.adapt(segmenter, profile, **settings)
    expected = [through(image) for image in images]
    first = bestta.adapt(segmenter, profile, **settings)
    for image in images[:9]:
        first(image)
    first.save(tmp_path / "state.safetensors")
    second = bestta.adapt(segmenter, profile, **settings)
    second.load(tmp_path / "state.safetensors")
    for image, logits in zip(images[9:], expected[9:], strict=True):
        assert torch.equal(second(image), logits)
    assert same(second.whole_state(), through.whole_state())


def test_a_state_saved_without_a_guard_is_taken_up_with_one_and_the_other_way(
    segmenter, profile, tmp_path
):
    path = tmp_path / "state.safetensors"
    for saving, loading in ((False, True), (True, False)):
        one = bestta.adapt(segmenter, profile, guard=saving)
        for image in stream(3, seed=8, **FOG):
            one(image)
        one.save(path)
        other = bestta.adapt(segmenter, profile, guard=loading)
        other.load(path)
        assert other.images_seen == 3
        other(stream(1, seed=9)[0])


def test_reset_forgets_what_the_guard_knew(guarded):
    start = guarded.whole_state()
    for image in stream(9, seed=8, **FOG):
        guarded(image)
    assert guarded.guard.looks > 0
    guarded.reset()
    assert same(guarded.whole_state(), start)
    assert guarded.guard.looks == 0


def test_decisions_are_logged(segmenter, profile, caplog):
    with caplog.at_level(logging.INFO, "bestta.guard"):
        adapter = bestta.adapt(segmenter, profile, guard_margin=1e6)
        adapter(stream(1, seed=8)[0])
    assert "source model" in caplog.text


METHODS = [m for m in bestta.methods() if m not in ("eata", "ecotta", "petal", "source")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 4])
def test_every_method_takes_a_guard_and_resumes_under_it(method, batch, tmp_path):
    net, layers = (Classifier, ["layer2"]) if method == "rotta" else (Segmenter, ["layer1"])
    model = randomise(net(), seed=11)
    profile = SourceProfile.collect(model, stream(6, seed=3), layers=layers)
    small = {"cotta": {"augmentations": 2, "scales": (1.0,)}, "memo": {"views": 3}}
    settings = {"guard": True, "guard_margin": -5.0, **small.get(method, {})}
    adapter = bestta.adapt(model, profile, method=method, **settings)
    images = stream(10, seed=8, batch=batch, **FOG)
    for image in images[:6]:
        adapter(image)
    adapter.save(tmp_path / "state.safetensors")
    other = bestta.adapt(model, profile, method=method, **settings)
    other.load(tmp_path / "state.safetensors")
    for image in images[6:]:
        assert torch.equal(adapter(image), other(image))
    assert adapter.guard.looks > 0


def test_a_baseline_that_collapses_is_rolled_back_to_the_source(segmenter, profile):
    """TENT with steps a thousand times too large."""
    images = stream(30, seed=8, **FOG)
    adapter = bestta.adapt(segmenter, profile, method="tent", guard=True, lr=1.0)
    wild = bestta.adapt(segmenter, profile, method="tent", lr=1.0)
    for image in images:
        logits, alone = adapter(image), wild(image)
    source = segmenter(images[-1]).argmax(1)
    assert torch.equal(logits.argmax(1), source)
    assert not torch.equal(alone.argmax(1), source)


def test_a_guard_that_is_neither_on_nor_off_is_refused(segmenter, profile):
    with pytest.raises(ValueError, match="guard is True or False, not 'no'"):
        bestta.adapt(segmenter, profile, guard="no")


@pytest.mark.parametrize(("model", "margin"), [(Segmenter(), 0.5), (Classifier(), 1.0)])
def test_without_a_margin_it_is_the_tasks_and_stays_so_when_resumed(model, margin, tmp_path):
    model = randomise(model, seed=2)
    profile = SourceProfile.collect(model, stream(8, seed=3), layers=["layer1"])
    adapter = bestta.adapt(model, profile)
    adapter(stream(1, seed=4)[0])
    assert adapter.guard.margin == margin
    other = bestta.adapt(model, profile)
    adapter.save(tmp_path / "state.safetensors")
    other.load(tmp_path / "state.safetensors")
    assert other.guard.margin == margin
    assert bestta.adapt(model, profile, guard_margin=0.0).guard.margin == 0.0


@pytest.mark.parametrize("margin", [float("nan"), "x", [1], True])
@pytest.mark.parametrize("guard", [True, False])
def test_a_margin_that_is_no_number_is_refused(segmenter, profile, margin, guard):
    with pytest.raises(ValueError, match="guard_margin is a number of points, not"):
        bestta.adapt(segmenter, profile, guard_margin=margin, guard=guard)


def test_a_margin_nobody_can_reach_has_the_source_model_answer_whatever_comes(segmenter, profile):
    """Frames that stand out are looked at; who answers them is decided all the same."""
    adapter = bestta.adapt(segmenter, profile, layers=("layer1",), rho=0.3, guard_margin=1e6)
    images = stream(60, seed=8)
    for number, image in enumerate(images):
        odd = image * 2 + 1.5 if number > 34 and number % 7 == 0 else image
        assert torch.equal(adapter(odd), segmenter(odd))


FAINT = {"scale": 1e-3, "shift": 0.2}
"""Images that are out of BESTTA's reach, each of them."""


@pytest.mark.parametrize("margin", [1e6, -1e6])
def test_a_stream_that_nothing_is_learned_from_is_answered_by_whoever_is_better(
    segmenter, profile, margin
):
    """Thick fog from the first frame on: what BeIN makes of it may be worth a lot."""
    settings = {"layers": ("layer1",), "rho": 0.3}
    adapter = bestta.adapt(segmenter, profile, **settings, guard_margin=margin)
    unguarded = bestta.adapt(segmenter, profile, **settings, guard=False)
    for image in stream(12, seed=8, **FAINT):
        better = segmenter(image) if margin > 0 else unguarded(image)
        torch.testing.assert_close(adapter(image), better, rtol=0, atol=0)
        assert not adapter.last.adapted
    assert adapter.guard.looks > 4


@pytest.mark.parametrize("weather", [FOG, {}])
def test_a_blank_frame_among_others_is_answered_as_they_are_and_no_more_is_made_of_it(
    segmenter, profile, weather
):
    adapter = bestta.adapt(segmenter, profile, layers=("layer1",), rho=0.3, guard_margin=-1e6)
    for image in stream(10, seed=8, **weather):
        adapter(image)
    by_source = adapter.last.skipped
    assert by_source is not bool(weather)
    looks, memory = adapter.guard.looks, adapter.guard.windows["source"].histogram
    with adapter.trial():
        for blank in stream(4, seed=9, **FAINT):
            adapter(blank)
            assert adapter.last.skipped is by_source
        assert adapter.guard.looks == looks
        assert torch.equal(adapter.guard.windows["source"].histogram, memory)
        adapter(next(iter(stream(1, seed=10, **FAINT))))  # the fifth in a row
        assert adapter.guard.looks == looks + 1


def test_any_number_of_black_frames_changes_nothing(segmenter, profile):
    """A lens cap: the images behind it are answered as if it had never been on."""
    settings = {"layers": ("layer1",), "rho": 0.3, "guard_margin": -1e6, "statistics_decay": 0.9}
    capped, plain = (bestta.adapt(segmenter, profile, **settings) for _ in range(2))
    black = torch.full((1, 3, 12, 12), -2.1)
    for adapter in (capped, plain):
        for image in stream(6, seed=8, **FOG):
            adapter(image)
    for _ in range(12):
        capped(black)
        assert capped.last.rolled_back
        assert not capped.last.skipped
    for image in stream(6, seed=9, **FOG):
        torch.testing.assert_close(capped(image), plain(image), rtol=0, atol=0)


def test_black_frames_change_nothing_where_the_source_model_answers_either(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, layers=("layer1",), rho=0.3, guard_margin=1e6)
    for image in stream(9, seed=8, **FOG):
        adapter(image)
    assert adapter.guard.mode == "source"
    assert not adapter.guard.due
    before = adapter.guard.state()
    black = torch.full((1, 3, 12, 12), -2.1)
    for _ in range(12):
        assert torch.equal(adapter(black), segmenter(black))
        assert adapter.last.skipped
    assert same(adapter.guard.state(), before)


def test_the_words_name_the_bar_that_is_in_force():
    guard = Guard(margin=0.5)
    guard.mode, guard.gain = "source", 0.7  # more than the margin, and not enough to come back
    assert guard.words().endswith("worth +0.70 points; from 0.75 on it is taken up again")


def test_a_stream_that_begins_black_is_left_to_the_source_model(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, layers=("layer1",), rho=0.3, guard_margin=-1e6)
    black = torch.full((1, 3, 12, 12), -2.1)
    for _ in range(6):
        assert torch.equal(adapter(black), segmenter(black))
        assert adapter.last.skipped
    assert adapter.guard.looks == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update({"guard/numbers": state["guard/numbers"][:5]}),
        lambda state: state.pop("guard/histograms"),
        lambda state: state["guard/numbers"][:1].fill_(7),
        lambda state: state["guard/numbers"][:1].fill_(-1),
        lambda state: state["guard/numbers"][3:4].fill_(float("nan")),
        lambda state: state.update({"guard/histograms": state["guard/histograms"][:2]}),
        lambda state: state.update({"guard/histograms": state["guard/histograms"][:, :3]}),
        lambda state: state["guard/good/layer1/gamma_mu"].fill_(float("nan")),
    ],
)
def test_a_damaged_memory_of_the_guard_is_refused_and_changes_nothing(
    segmenter, profile, tmp_path, monkeypatch, damage
):
    adapter = bestta.adapt(segmenter, profile, layers=("layer1",), guard_margin=-1e6)
    adapter.guard.home = None
    for image in stream(6, seed=8, **FOG):
        adapter(image)
    state = {name: tensor.clone() for name, tensor in adapter.whole_state().items()}
    damage(state)
    path = tmp_path / "state.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(type(adapter), "whole_state", lambda self: state)
        adapter.save(path)
    fresh = bestta.adapt(segmenter, profile, layers=("layer1",), guard_margin=-1e6)
    with pytest.raises(ValueError, match="damaged"):
        fresh.load(path)
    assert fresh.images_seen == 0
    assert fresh.guard.looks == 0


def test_what_the_source_model_answers_leaves_no_trace_in_a_baseline(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, method="tent", guard=True, lr=1.0, guard_margin=1e6)
    start = adapter.state()
    for image in stream(12, seed=8, **FOG):
        adapter(image)
    assert same(adapter.state(), start)


@pytest.mark.parametrize("method", ["tent", "cotta", "bestta"])
def test_smaller_steps_are_smaller_for_every_method(segmenter, profile, method):
    small = {"augmentations": 2, "scales": (1.0,)} if method == "cotta" else {}
    layers = {"layers": ("layer1",)} if method == "bestta" else {}
    moved = {}
    for pace in (1.0, 0.25):
        adapter = bestta.adapt(
            segmenter, profile, method=method, guard=True, guard_margin=-1e6, **small, **layers
        )
        before = {n: p.detach().clone() for n, p in adapter.trainable.items()}
        adapter.guard.pace = pace
        adapter._transaction(stream(1, seed=8, **FOG)[0])  # a step, whoever answers
        steps = [(p.detach() - before[n]).abs().sum() for n, p in adapter.trainable.items()]
        moved[pace] = float(sum(steps))
    assert moved[1.0] > 0
    assert moved[0.25] == pytest.approx(0.25 * moved[1.0], rel=0.05)


def test_records_hold_for_how_long_a_decision_was_in_force_and_where_it_came_to_be():
    tally = Tally(models.card("streets"))
    for seen, words in enumerate(
        ["", "guard, source model: one reason", "guard, source model: another", ""], 1
    ):
        tally.note(StepReport(images_seen=seen, guard=words))
    assert tally.events["guard"] == {
        "frames": {"source model": 2},
        "changes": [[2, "source model: one reason"], [4, "the method answers"]],
    }
    assert "guard: source model 2" in _events(tally.events)


def test_a_profile_that_knows_other_classes_is_an_error_that_says_so(segmenter, profile):
    wrong = replace(profile, answers=answer(0.5, 0.3, 0.2))
    adapter = bestta.adapt(segmenter, wrong)
    with pytest.raises(ValueError, match="answers of 3 classes, and the model gives 5"):
        adapter(stream(1, seed=8)[0])


def test_an_answer_that_overflows_is_forgotten_and_the_state_can_be_loaded(
    segmenter, profile, tmp_path
):
    adapter = bestta.adapt(segmenter, profile, guard_margin=1e6)
    images = stream(40, seed=8)
    while adapter.guard.due:
        adapter(images.pop())
    huge = images[0] * 1e38
    assert bool(huge.isfinite().all())
    assert not bool(adapter(huge).isfinite().all())
    assert adapter.last.guard.startswith("guard, source model")
    for image in images:
        adapter(image)
    adapter.save(tmp_path / "state.safetensors")
    other = bestta.adapt(segmenter, profile, guard_margin=1e6)
    other.load(tmp_path / "state.safetensors")
    assert math.isfinite(other.guard.scatter)


def test_a_rolled_back_baseline_says_that_the_source_model_has_answered(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, method="tent", guard=True, lr=1.0, guard_margin=-1e6)
    adapter.guard.home = None
    undone = 0
    for image in stream(30, seed=8, **FOG):
        logits = adapter(image)
        if adapter.last.guard.startswith("guard, rolled back"):
            undone += 1
            assert torch.equal(logits, segmenter(image))
            assert adapter.last.skipped
            assert not adapter.last.adapted
    assert undone > 0


def test_what_a_baseline_learned_while_the_source_model_answered_is_not_told_as_learned(
    segmenter, profile
):
    """Called back from there, it goes on from its last good state."""
    adapter = bestta.adapt(segmenter, profile, method="tent", guard=True, guard_margin=1e6)
    for image in stream(6, seed=8, **FOG):
        adapter(image)
    assert adapter.guard.mode == "source"
    adapter.guard._margin, adapter.guard.home, adapter.guard.collapses = -1e6, None, 0
    adapter.guard.good = good = {name: 2 * t for name, t in adapter.state().items()}
    while adapter.guard.mode == "source":
        adapter(stream(1, seed=9, **FOG)[0])
    assert same(adapter.state(), good)
    assert not adapter.last.adapted
    assert adapter.last.reason == "what was learned before is back"


def test_who_holds_gamma_still_is_said(segmenter, profile, caplog):
    adapter = bestta.adapt(segmenter, profile, layers=("layer1",), guard_margin=-1e6)
    adapter.guard.home = None
    images = stream(40, seed=8, **FOG)
    adapter(images[0])
    adapter.guard.mode, adapter.guard.collapses = "still", 3
    adapter(images[1])
    assert adapter.last.reason == "γ is held still: by the guard"
    assert adapter.last.guard.startswith("guard, held still: ")
    adapter(torch.zeros_like(images[2]))  # refused, and still held
    assert adapter.last.guard.startswith("guard, held still: ")
    with caplog.at_level(logging.INFO, "bestta.guard"):
        adapter.guard.look_closely()
    assert "guard, learning again: the stream has moved" in caplog.text


def test_without_a_still_answer_to_compare_what_was_learned_is_told_and_stays(
    segmenter, profile, monkeypatch
):
    adapter = bestta.adapt(segmenter, profile, layers=("layer1",), guard_margin=-1e6, lr=0.1)
    broken = torch.full_like(segmenter(stream(1, seed=8)[0]), float("nan"))
    monkeypatch.setattr(adapter, "predict_unlearned", lambda image: broken)
    image = stream(1, seed=8, **FOG)[0]
    assert torch.equal(adapter(image), segmenter(image))
    assert adapter.last.skipped
    assert adapter.last.adapted
    assert adapter.last.guard == "guard, no look: an answer is not finite"
    assert adapter.learned_size() > 0
