"""Second looks: an image in other sizes, answers in agreement, and nothing learned from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bestta
import bestta.adapters.bestta as module_under_test
from bestta import SourceProfile
from bestta.adapters.views import Favourite, agreed, unsureness, view_size
from nets import Segmenter, randomise, same, stream

FOG = {"shift": 1.5, "scale": 0.4}
STILL = {"lr": 0.0, "guard": False, "statistics_decay": 0.0}
"""What an image is answered with depends on that image alone."""


def entropies(logits: np.ndarray) -> np.ndarray:
    """Of each image, (B,), in nats: by NumPy, from probabilities."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return -(p * np.log(p)).sum(1).reshape(len(p), -1).mean(1)


# --- what several answers come to -----------------------------------------------------------------


def test_an_agreement_is_the_product_of_the_answers_each_to_the_power_of_its_weight():
    generator = torch.Generator().manual_seed(0)
    answers = [torch.randn(2, 5, 6, 4, generator=generator) * scale for scale in (1.0, 2.0, 4.0)]
    trust = 3.0
    found = agreed(answers, trust).softmax(1).numpy()

    weights = np.exp(-trust * np.stack([entropies(answer.numpy()) for answer in answers]))
    weights = (weights / weights.sum(0))[:, :, None, None, None]
    powers = [a.softmax(1).numpy() ** w for a, w in zip(answers, weights, strict=True)]
    product = np.prod(powers, axis=0)
    np.testing.assert_allclose(found, product / product.sum(1, keepdims=True), rtol=2e-5)


def test_without_trust_all_count_the_same_and_with_much_of_it_the_surest_alone():
    sure, unsure = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[0.0, 2.0, 1.0]])
    torch.testing.assert_close(agreed([sure, unsure], 0.0), (sure + unsure) / 2)
    torch.testing.assert_close(agreed([unsure, sure], 1e4), sure)
    # Where the first two count for nothing, nothing is divided by the nothing they come to.
    torch.testing.assert_close(agreed([unsure, unsure, sure], 1e4), sure)


def test_each_image_of_a_batch_is_weighed_by_itself():
    one = torch.tensor([[9.0, 0.0], [0.3, 0.0]])
    other = torch.tensor([[0.0, 0.3], [0.0, 9.0]])
    torch.testing.assert_close(agreed([one, other], 1e4), torch.tensor([[9.0, 0.0], [0.0, 9.0]]))


def test_a_single_channel_is_as_sure_as_its_yes_and_no():
    """A logit of 2 is a yes of 1 / (1 + e^−2)."""
    yes = 1 / (1 + np.exp(-2.0))
    expected = -(yes * np.log(yes) + (1 - yes) * np.log(1 - yes))
    assert unsureness(torch.full((1, 1, 3, 3), 2.0)).item() == pytest.approx(expected, rel=1e-5)


def test_the_entropy_of_a_large_map_is_told_by_some_of_its_pixels():
    """Half of it sure, half of it not: what every so-many-th pixel says is near the whole."""
    logits = torch.zeros(1, 4, 256, 512)
    logits[:, 0, :, :200] = 20.0
    whole = entropies(logits.double().numpy())
    assert unsureness(logits).item() == pytest.approx(whole.item(), rel=0.02)


def test_looks_that_agree_are_not_rounded():
    """A class that a model masks with the least number there is stays just that."""
    least = torch.finfo(torch.float32).min
    looks = [torch.tensor([[1.0, least, 0.3 * n]]) for n in range(4)]
    assert agreed(looks, 3.0)[0, 1] == least


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_answers_of_any_precision_are_agreed_on_in_their_own(dtype):
    looks = [torch.randn(2, 3, 5, 5, dtype=torch.float64) for _ in range(3)]
    found = agreed([look.to(dtype) for look in looks], 2.0)
    assert found.dtype == dtype
    close = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(found.double(), agreed(looks, 2.0), rtol=close, atol=close)


def test_no_view_has_less_than_32_pixels_a_side_but_of_images_that_have_less():
    assert view_size(torch.zeros(1, 3, 40, 100), 0.5) == (32, 50)
    assert view_size(torch.zeros(1, 3, 20, 100), 0.5) == (20, 50)
    assert view_size(torch.zeros(1, 3, 100, 270), 0.625, 32) == (64, 160)


# --- the adapter ----------------------------------------------------------------------------------


def mirrored(image: torch.Tensor, scale: float) -> torch.Tensor:
    """What a second look is at, 32 pixels a side at least: by PyTorch's own resizing."""
    sides = [max(round(scale * side), 32) for side in image.shape[2:]]
    view = F.interpolate(image, sides, mode="bilinear", align_corners=False, antialias=True)
    return torch.flip(view, (3,))


def test_an_image_is_answered_by_all_looks_in_agreement(segmenter, profile):
    plain = bestta.adapt(segmenter, profile, **STILL)
    adapter = bestta.adapt(segmenter, profile, scales=[0.5, 1.25], trust=2.0, **STILL)
    for image in stream(3, seed=5, size=64, **FOG):
        answers = [plain(image)]
        for scale in (0.5, 1.25):
            answer = torch.flip(plain(mirrored(image, scale)), (3,))
            answers.append(F.interpolate(answer, (64, 64), mode="bilinear", align_corners=False))
        weights = torch.tensor(np.stack([entropies(a.numpy()) for a in answers])).mul(-2).softmax(0)
        expected = sum(w.float() * a for w, a in zip(weights, answers, strict=True))
        torch.testing.assert_close(adapter(image), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(adapter(image), answers[0], atol=1e-2)


@pytest.mark.parametrize("guard", [False, True])
def test_second_looks_teach_nothing(segmenter, profile, guard):
    """Neither γ nor what is known of the stream is another for them, to the bit."""
    settings = {"when": "always", "guard": guard, "guard_margin": -1e6 if guard else None}
    settings |= {"layers": ("layer1",), "rho": 0.3}
    memory = {"statistics": "weighed", "statistics_decay": 0.9}
    alone = bestta.adapt(segmenter, profile, **settings, **memory)
    looking = bestta.adapt(segmenter, profile, scales=(0.5, 1.5), **settings, **memory)
    answered = 0
    for image in stream(10, seed=2, size=40, **FOG):
        first, second = alone(image), looking(image)
        assert same(alone.state(), looking.state())
        assert (alone.last.guard, alone.last.adapted) == (looking.last.guard, looking.last.adapted)
        answered += not alone.last.skipped
        assert torch.equal(first, second) == alone.last.skipped
    assert answered > 3
    assert looking.images_adapted == alone.images_adapted > 0


@pytest.mark.parametrize("predict", ["before", "after"])
def test_a_second_look_is_by_what_answered_the_first(segmenter, profile, predict):
    """By γ of before the step, or of after it if that is what is asked for; not by another."""
    settings = {"guard": False, "when": "always", "lr": 0.3, "predict": predict}
    looking = bestta.adapt(segmenter, profile, scales=(1.5,), trust=0.0, **settings)
    alone = bestta.adapt(segmenter, profile, **settings)
    held = bestta.adapt(segmenter, profile, guard=False, lr=0.0)
    for image in stream(4, seed=2, size=40, **FOG):
        if predict == "before":
            held.load_state(alone.state())
        first = alone(image)
        if predict == "after":
            held.load_state(alone.state())
        view = F.interpolate(
            torch.flip(held(mirrored(image, 1.5)), (3,)), (40, 40), mode="bilinear"
        )
        torch.testing.assert_close(looking(image), (first + view) / 2, rtol=1e-4, atol=1e-4)


def test_where_a_step_did_harm_the_second_look_is_without_what_was_learned(segmenter, profile):
    """Else a γ that makes all answers sure, and wrong, would win by being sure."""
    settings = {"layers": ("layer1",), "lr": 5.0, "gamma_bound": None, "guard": True}
    settings |= {"guard_margin": -1e6, "when": "always"}
    looking = bestta.adapt(segmenter, profile, scales=(1.5,), trust=0.0, **settings)
    alone = bestta.adapt(segmenter, profile, **settings)
    still = bestta.adapt(segmenter, profile, layers=("layer1",), lr=0.0, guard=False)
    harmed = 0
    for image in stream(12, seed=2, size=40, **FOG):
        first, second = alone(image), looking(image)
        if not alone.last.rolled_back or alone.last.skipped:
            continue
        harmed += 1
        view = F.interpolate(
            torch.flip(still(mirrored(image, 1.5)), (3,)), (40, 40), mode="bilinear"
        )
        torch.testing.assert_close(second, (first + view) / 2, rtol=1e-4, atol=1e-4)
    assert harmed > 0


def test_what_the_plain_model_answers_is_its_answer_exactly(segmenter, profile):
    """Paused, of bad pixels, and where the guard finds that adapting is not worth it."""
    settings = {"layers": ("layer1",), "rho": 0.3, "guard": True, "guard_margin": 1e6}
    adapter = bestta.adapt(segmenter, profile, scales=(1.5,), **settings)
    for image in stream(12, seed=8):
        assert torch.equal(adapter(image), segmenter(image))
        assert adapter.last.skipped
    with adapter.paused():
        assert torch.equal(adapter(image), segmenter(image))
    image[0, 0, 3, 3] = float("nan")
    torch.testing.assert_close(adapter(image), segmenter(image), equal_nan=True)


def test_a_second_look_takes_the_image_s_place_in_the_stream(segmenter, profile):
    """It is what an adapter that has seen the same images before would answer to the view alone."""
    settings = {"lr": 0.0, "guard": False, "statistics": "weighed", "statistics_decay": 0.9}
    looking = bestta.adapt(segmenter, profile, scales=(1.5,), trust=0.0, **settings)
    alone = bestta.adapt(segmenter, profile, **settings)
    for image in [*stream(3, seed=1, size=40), *stream(5, seed=2, size=40, **FOG)]:
        with alone.trial():
            view = torch.flip(alone(mirrored(image, 1.5)), (3,))
        view = F.interpolate(view, (40, 40), mode="bilinear", align_corners=False)
        torch.testing.assert_close(looking(image), (alone(image) + view) / 2, rtol=1e-4, atol=1e-4)


def test_classes_of_whole_images_are_agreed_on_too(classifier):
    model, profile = classifier, SourceProfile.collect(classifier, stream(8, seed=3), ["layer2"])
    plain = bestta.adapt(model, profile, **STILL)
    adapter = bestta.adapt(model, profile, scales=(1.5,), trust=0.0, **STILL)
    image = stream(1, seed=5, size=40, **FOG)[0]
    expected = (plain(image) + plain(mirrored(image, 1.5))) / 2
    torch.testing.assert_close(adapter(image), expected, rtol=1e-4, atol=1e-5)


class OneSize(Segmenter):
    """Takes images of 40x40 pixels, as networks with learned positions do."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.shape[2:] != (40, 40):
            raise self.error("images of 40x40 pixels")
        return super().forward(image)

    error: type[BaseException] = ValueError


@pytest.fixture
def one_size() -> tuple[OneSize, SourceProfile]:
    model = randomise(OneSize(), seed=1)
    return model, SourceProfile.collect(model, stream(8, seed=3, size=40), ["layer1"])


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("error", [ValueError, RuntimeError, IndexError])
def test_a_model_of_one_size_goes_on_without_second_looks_and_says_so(one_size, guard, error):
    one_size[0].error = error
    settings = {**STILL, "guard": guard, "guard_margin": -1e6}
    plain = bestta.adapt(*one_size, **settings)
    adapter = bestta.adapt(*one_size, scales=(1.5,), **settings)
    first, *others = stream(3, seed=5, size=40, **FOG)
    told = r"OneSize fails on views of \(60, 60\) and \(64, 64\) .*scales=\(\)"
    with pytest.warns(UserWarning, match=told) as warned:
        answer = adapter(first)
    assert [w.filename for w in warned] == [__file__]  # the line that called, not one of ours
    assert torch.equal(answer, plain(first))
    for image in others:  # pytest makes an error of a second warning
        assert torch.equal(adapter(image), plain(image))


class Small(Segmenter):
    """Takes no image of more than 44 pixels a side."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if max(image.shape[2:]) > 44:
            raise ValueError("too large")
        return super().forward(image)


def test_of_several_looks_those_that_fail_are_left_out_and_no_other_depends_on_them():
    model = randomise(Small(), seed=1)
    profile = SourceProfile.collect(model, stream(8, seed=3, size=40), ["layer1"])
    adapter = bestta.adapt(model, profile, scales=(0.9, 1.5), **STILL)
    alone = bestta.adapt(model, profile, scales=(0.9,), **STILL)
    first, second = stream(2, seed=5, size=40, **FOG)
    with pytest.warns(UserWarning, match="Small fails"):
        assert torch.equal(adapter(first), alone(first))
    assert torch.equal(adapter(second), alone(second))


def test_what_sizes_came_before_makes_no_difference():
    """Reset, or in a trial: an image is answered as it would be by a new adapter."""
    model = randomise(Halving(), seed=1)
    profile = SourceProfile.collect(model, stream(8, seed=3, size=64), ["layer1"])
    fresh = bestta.adapt(model, profile, scales=(0.625,), **STILL)
    adapter = bestta.adapt(model, profile, scales=(0.625,), **STILL)
    (small,), (large,) = stream(1, seed=5, size=128), stream(1, seed=6, size=96)
    expected = fresh(small)  # 80 pixels, which it takes
    adapter(large)  # 60 pixels, which it does not
    assert torch.equal(adapter(small), expected)


class Halving(Segmenter):
    """Takes images of multiples of 16 pixels, as networks do that add up what they halved."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.shape[2] % 16 or image.shape[3] % 16:
            raise RuntimeError("Sizes of tensors must match")
        return super().forward(image)


def test_a_model_that_takes_some_sizes_is_shown_views_of_those():
    model = randomise(Halving(), seed=1)
    profile = SourceProfile.collect(model, stream(8, seed=3, size=96), ["layer1"])
    plain = bestta.adapt(model, profile, **STILL)
    adapter = bestta.adapt(model, profile, scales=(0.625,), trust=0.0, **STILL)
    for image in stream(2, seed=5, size=96, **FOG):  # at 0.625 it is 60, and 64 is nearest
        view = torch.flip(plain(mirrored(image, 64 / 96)), (3,))
        view = F.interpolate(view, (96, 96), mode="bilinear", align_corners=False)
        expected = (plain(image) + view) / 2
        torch.testing.assert_close(adapter(image), expected, rtol=1e-4, atol=1e-4)


def test_a_second_look_that_is_stopped_leaves_no_trace(one_size):
    model, profile = one_size
    adapter = bestta.adapt(model, profile, scales=(1.5,), when="always")
    before = adapter.whole_state()
    model.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        adapter(stream(1, seed=5, size=40, **FOG)[0])
    assert same(adapter.whole_state(), before)


class Dazzled(Segmenter):
    """Has no answer to images of more than 40 rows."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits = super().forward(image)
        return logits * float("inf") if image.shape[2] > 40 else logits


def test_an_answer_that_is_not_finite_does_not_count():
    model = randomise(Dazzled(), seed=1)
    profile = SourceProfile.collect(model, stream(8, seed=3, size=40), ["layer1"])
    plain = bestta.adapt(model, profile, **STILL)
    adapter = bestta.adapt(model, profile, scales=(1.5,), **STILL)
    image = stream(1, seed=5, size=40, **FOG)[0]
    assert torch.equal(adapter(image), plain(image))


@pytest.mark.parametrize(
    "scales", [1.0, None, (0.0,), (-1.0, 1.0), ("a",), (float("inf"),), (True,)]
)
def test_sizes_that_are_none_are_refused(segmenter, profile, scales):
    with pytest.raises(
        ValueError,
        match=r"scales is a tuple of numbers above 0, such as \(0.625,\), or \(\) for none",
    ):
        bestta.adapt(segmenter, profile, scales=scales)


@pytest.mark.parametrize("guard", [False, True])
def test_a_step_that_is_stopped_anywhere_leaves_no_trace(one_size, guard):
    """At whichever forward of it: the step's own, the guard's, or a second look's."""
    model, profile = one_size
    settings = {"when": "always", "guard": guard, "guard_margin": -1e6, "scales": (1.0,)}
    adapter = bestta.adapt(model, profile, **settings)
    images = stream(3, seed=5, size=40, **FOG)
    adapter(images[0])
    before, stopped = adapter.whole_state(), 0
    for at in range(1, 9):
        forwards = 0

        def count(module, inputs, at=at):
            nonlocal forwards
            forwards += 1
            if forwards == at:
                raise KeyboardInterrupt

        handle = model.register_forward_pre_hook(count)
        try:
            adapter(images[1])
        except KeyboardInterrupt:
            stopped += 1
            assert same(adapter.whole_state(), before)
        else:
            break
        finally:
            handle.remove()
    assert stopped >= (3 if guard else 2)


# --- the surest of several sizes ------------------------------------------------------------------


def test_sizes_are_compared_when_the_style_moves_and_on_every_ninth_image():
    favourite, compared = Favourite((0.5, 1.0, 1.5)), []
    for image in range(32):
        if image == 20:
            favourite.begin_anew()
        chosen = favourite.chosen()
        compared.append(len(chosen) == 3)
        assert chosen in ([0, 1, 2], [1])
        unsure = dict(enumerate((0.5, 0.3, 0.4)))
        favourite.seen({size: unsure[size] for size in chosen}, len(chosen) == 3)
    # 0 and 1 begin, 10 and 19 are the ninth after the one before, at 20 the style has moved.
    assert [image for image, all_of_them in enumerate(compared) if all_of_them] == [
        *(0, 1, 10, 19),
        *(20, 21, 30),
    ]


def test_the_favourite_is_the_surest_by_a_moving_average_since_the_style_moved():
    favourite = Favourite((0.5, 1.5))
    assert favourite.chosen() == [0, 1]
    favourite.seen({0: 0.5, 1: 0.4}, True)
    assert favourite.best() == 1
    favourite.seen({0: 0.5, 1: 0.7}, True)  # by hand: 0.7 · 0.4 + 0.3 · 0.7 = 0.49
    assert favourite.unsure == pytest.approx([0.5, 0.49])
    assert favourite.chosen() == [1]
    favourite.seen({0: 0.5, 1: 0.6}, True)  # 0.7 · 0.49 + 0.3 · 0.6 = 0.523
    assert favourite.chosen() == [0]
    favourite.begin_anew()
    favourite.seen({0: 0.9, 1: 0.1}, True)  # nothing of the style before is in it
    assert favourite.unsure == [0.9, 0.1]


def test_a_size_that_fails_is_no_favourite_until_it_answers():
    favourite = Favourite((0.5, 1.5))
    for _ in range(2):
        favourite.seen({0: 2.0}, True)
    assert favourite.chosen() == [0]
    favourite.seen({0: 2.0, 1: 1.0}, True)
    assert favourite.unsure == [2.0, 1.0]
    assert favourite.chosen() == [1]
    favourite.seen({}, False)  # it failed: the next image is seen at all sizes
    assert favourite.chosen() == [0, 1]
    favourite.seen({0: 2.0}, True)
    assert favourite.chosen() == [0]


def views_seen(adapter) -> list[list[float]]:
    """At which sizes each image is seen from now on, a list for each once it is answered."""
    seen: list[list[float]] = [[]]
    usual = adapter.second_look

    def second_look(image, scale):
        seen[-1].append(scale)
        return usual(image, scale)

    adapter.second_look = second_look
    return seen


MEMORY = {"guard": False, "lr": 0.0, "statistics": "weighed", "statistics_decay": 0.9}


@pytest.mark.parametrize("when", ["auto", "always"])
def test_an_image_is_seen_at_the_size_that_was_the_surest(segmenter, profile, when):
    settings = {**MEMORY, "when": when, "trust": 2.0}
    alone = bestta.adapt(segmenter, profile, **settings)
    adapter = bestta.adapt(segmenter, profile, scales=(0.5, 1.5), looks="surest", **settings)
    seen, unsure, favourites = views_seen(adapter), [], []
    night = {"shift": -1.5, "scale": 0.1}
    for image in [*stream(6, seed=5, size=64, **FOG), *stream(6, seed=6, size=64, **night)]:
        answers, found = [], []
        for scale in (0.5, 1.5):
            with alone.trial():
                answer = torch.flip(alone(mirrored(image, scale)), (3,))
            answers.append(F.interpolate(answer, (64, 64), mode="bilinear", align_corners=False))
            found.append(entropies(answers[-1].numpy()).item())
        unsure.append(found)
        first, answered = alone(image), adapter(image)
        chosen = [(0.5, 1.5).index(scale) for scale in seen[-1]]
        looks = [first, *(answers[which] for which in chosen)]
        weights = np.exp([-2.0 * entropies(look.numpy()).item() for look in looks])
        expected = sum(float(w) * look for w, look in zip(weights, looks, strict=True))
        torch.testing.assert_close(answered, expected / float(weights.sum()), rtol=1e-3, atol=1e-3)
        if len(chosen) == 1:
            favourites.append((len(unsure) - 1, chosen[0]))
        seen.append([])
    # Both at first, and again when the style has moved; in between the surer one of those two.
    assert [image for image, _ in favourites] == [2, 3, 4, 5, 8, 9, 10, 11]
    for image, chosen in favourites:
        one, two = unsure[0 if image < 6 else 6], unsure[1 if image < 6 else 7]
        average = [0.7 * a + 0.3 * b for a, b in zip(one, two, strict=True)]
        assert chosen == int(np.argmin(average))


def test_which_size_is_the_surest_is_saved_and_loaded(segmenter, profile):
    settings = {**MEMORY, "when": "always", "scales": (0.5, 1.5), "looks": "surest"}
    one, other = (bestta.adapt(segmenter, profile, **settings) for _ in range(2))
    images = stream(14, seed=5, size=64, **FOG)
    for image in images[:7]:
        one(image)
    other.load_state(one.state())
    seen_by_one, seen_by_other = views_seen(one), views_seen(other)
    for image in images[7:]:
        assert torch.equal(one(image), other(image))
    assert seen_by_one == seen_by_other
    assert len(seen_by_one[0]) == 8  # one each, and all once more on the ninth after
    one.reset()
    new = bestta.adapt(segmenter, profile, **settings)
    assert same(one.state(), new.state())
    with one.trial():
        one(images[0])
    assert same(one.state(), new.state())


def test_a_memory_of_other_sizes_begins_anew(segmenter, profile):
    surest = {"looks": "surest", **MEMORY}
    two = bestta.adapt(segmenter, profile, scales=(0.5, 1.5), **surest)
    images = stream(4, seed=5, size=64, **FOG)
    for image in images[:3]:
        two(image)
    for scales, expected in (((0.5, 1.5), 1), ((1.5, 0.5), 2), ((0.5, 1, 1.5), 3), ((), 0)):
        other = bestta.adapt(segmenter, profile, scales=scales, **surest)
        other.load_state(two.state())
        seen = views_seen(other)
        other(images[3])
        assert len(seen[0]) == expected


@pytest.mark.parametrize(
    "damage",
    [
        {"looks/since": -2},
        {"looks/unsure": [-1.0, 0.5]},
        {"looks/since": None},
        {"looks/style/since": 0},
    ],
)
def test_a_damaged_memory_of_sizes_is_refused(segmenter, profile, damage):
    adapter = bestta.adapt(segmenter, profile, scales=(0.5, 1.5), looks="surest", **MEMORY)
    adapter(stream(1, seed=5, size=64, **FOG)[0])
    state = adapter.state()
    assert damage.keys() <= state.keys()
    for name, value in damage.items():
        if value is None:
            del state[name]
        else:
            state[name] = torch.tensor(value)
    with pytest.raises(ValueError, match="damaged"):
        adapter.load_state(state)


def test_a_move_on_an_image_that_the_plain_model_answers_is_not_forgotten(segmenter, profile):
    """The next one that BeIN answers is seen at all sizes, and nothing of before counts."""
    adapter = bestta.adapt(segmenter, profile, scales=(0.5, 1.5), looks="surest", **MEMORY)
    night = stream(6, seed=6, size=64, shift=-1.5, scale=0.1)
    for image in stream(5, seed=5, size=64, **FOG):
        adapter(image)
    before, usual = list(adapter.favourite.unsure), adapter._transaction

    def left_alone(image):
        prediction, report = usual(image)
        return prediction, replace(report, skipped=True)

    adapter._transaction = left_alone
    for image in night[:4]:
        adapter(image)
    assert adapter.since_moved() > 2
    adapter._transaction = usual
    seen = views_seen(adapter)
    adapter(night[4])
    assert seen[0] == [0.5, 1.5]
    found = {
        which: _unsureness_of(segmenter, profile, night, s) for which, s in enumerate((0.5, 1.5))
    }
    assert adapter.favourite.unsure == pytest.approx([found[0], found[1]], rel=1e-3)
    assert adapter.favourite.unsure != pytest.approx(before, rel=1e-2)


def _unsureness_of(segmenter, profile, night, scale) -> float:
    """How unsure an adapter that has seen the same images is of the last one's view alone."""
    alone = bestta.adapt(segmenter, profile, **MEMORY)
    for image in [*stream(5, seed=5, size=64, **FOG), *night[:4]]:
        alone(image)
    answer = torch.flip(alone(mirrored(night[4], scale)), (3,))
    answer = F.interpolate(answer, (64, 64), mode="bilinear", align_corners=False)
    return entropies(answer.numpy()).item()


def test_images_whose_step_is_undone_are_seen_at_one_more_size_and_leave_no_trace(
    segmenter, profile
):
    settings = {**MEMORY, "scales": (0.5, 1.5), "looks": "surest", "reach": 1.01}
    adapter = bestta.adapt(segmenter, profile, **settings)
    seen, start = views_seen(adapter), adapter.state()
    for image in stream(4, seed=5, size=64, shift=9.0, scale=3.0):
        adapter(image)
        assert adapter.last.rolled_back
        assert not adapter.last.skipped
    assert seen[0] == [0.5] * 4
    assert same(adapter.state(), start)


def test_answers_lie_in_memory_as_the_image_does(segmenter, profile, monkeypatch):
    """Where they do not, adding them up takes many times as long."""
    kinds = []
    usual = module_under_test.agreed

    def spy(answers, *others):
        kinds.append({a.is_contiguous(memory_format=torch.channels_last) for a in answers})
        return usual(answers, *others)

    monkeypatch.setattr(module_under_test, "agreed", spy)
    model = segmenter.to(memory_format=torch.channels_last)
    adapter = bestta.adapt(model, profile, scales=(0.75, 1.5), **STILL)
    # As pictures come: rows of pixels of three numbers, of which PyTorch resizes a view row by row.
    adapter(
        stream(1, seed=5, size=256, **FOG)[0][0]
        .permute(1, 2, 0)
        .contiguous()
        .permute(2, 0, 1)[None]
    )
    assert kinds == [{True}]


def test_looks_that_are_none_are_refused(segmenter, profile):
    with pytest.raises(ValueError, match="looks is one of 'all', 'surest'"):
        bestta.adapt(segmenter, profile, looks="best")


@pytest.mark.usual
def test_the_usual_form_looks_again_at_streets_and_once_at_other_images(segmenter, classifier):
    for model, scales in ((segmenter, [0.625, 1.25]), (classifier, [])):
        profile = SourceProfile.collect(model, stream(8, seed=3), ["layer1"])
        settings = bestta.adapt(model, profile).settings
        assert settings["scales"] == scales
        assert settings["looks"] == ("surest" if scales else "all")


def test_the_paper_looks_once(segmenter, profile):
    for form in ("paper", "single"):
        adapter = bestta.adapt(segmenter, profile, preset=form)
        assert adapter.settings["scales"] == []
        assert adapter.scales == ()
        adapter.remove()
