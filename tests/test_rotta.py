"""RoTTA: its memory worked by hand, its update against a plain transcription of the paper's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import bestta
import bestta.adapters.rotta
from bestta.adapters.rotta import Item, Memory, RobustNorm
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, stream


def item(label: int, uncertainty: float, mark: float = 0.0, age: int = 0) -> Item:
    return Item(torch.full((1, 2, 2), mark), label, uncertainty, age)


def held(memory: Memory) -> list[tuple[int, float, int]]:
    """(label, mark, age) of each item, class by class."""
    return [(kept.label, kept.image[0, 0, 0].item(), kept.age) for kept in memory.items]


def adapter_of(model: nn.Module, **settings):
    return bestta.adapt(model, method="rotta", **settings)


# --- the memory -------------------------------------------------------------------------------


def test_the_score_is_the_papers():
    memory = Memory(capacity=4, lambda_t=1.0, lambda_u=1.0)
    # By hand: 1 / (1 + e^0) = 0.5; 1 / (1 + e^(−1)) = 0.731059, and ln 2 is half of ln 4.
    assert memory.score(item(0, 0.0), classes=2) == 0.5
    assert memory.score(item(0, math.log(2), age=4), classes=4) == pytest.approx(0.731059 + 0.5)
    weighted = Memory(capacity=4, lambda_t=2.0, lambda_u=3.0)
    assert weighted.score(item(0, math.log(2)), classes=4) == pytest.approx(2 * 0.5 + 3 * 0.5)


def test_a_known_sequence_fills_refuses_and_evicts_as_by_hand():
    # Capacity 4, two classes: each has a share of 2. Doubt is given in units of ln 2, so it is
    # the second term of the score as it stands. The first is s(age) = 1 / (1 + e^(−age / 4)):
    # s(0) = .500, s(1) = .562, s(2) = .622, s(3) = .679, s(4) = .731, s(5) = .777, s(6) = .818.
    memory = Memory(capacity=4, lambda_t=1.0, lambda_u=1.0)

    def add(label: int, doubt: float, mark: float) -> list[tuple[int, float, int]]:
        memory.add(item(label, doubt * math.log(2), mark), classes=2)
        return held(memory)

    # Two of class 0: room for both. Each ages by one with every arrival, its own included.
    assert add(0, 0.1, mark=1) == [(0, 1, 1)]
    assert add(0, 0.3, mark=2) == [(0, 1, 2), (0, 2, 1)]
    # Class 0 has its share, so a third competes with its own class although two places are free.
    # The first scores .622 + .1 = .722, the second .562 + .3 = .862, the newcomer .5 + .9 = 1.4: it
    # is refused, and all ages grow.
    assert add(0, 0.9, mark=3) == [(0, 1, 3), (0, 2, 2)]
    # Newcomer .5 + .2 = .7 against .679 + .1 = .779 and .622 + .3 = .922: the second goes.
    assert add(0, 0.2, mark=4) == [(0, 1, 4), (0, 4, 1)]
    # Class 1 has room for two.
    assert add(1, 0.5, mark=5) == [(0, 1, 5), (0, 4, 2), (1, 5, 1)]
    assert add(1, 0.0, mark=6) == [(0, 1, 6), (0, 4, 3), (1, 5, 2), (1, 6, 1)]
    # Full, and class 1 has its share: .622 + .5 = 1.122 and .562, the newcomer .5 + .4 = .9.
    assert add(1, 0.4, mark=7) == [(0, 1, 7), (0, 4, 4), (1, 6, 2), (1, 7, 1)]


def test_a_class_below_its_share_takes_from_those_that_hold_the_most():
    # Five places, and four classes with a share of 1.25; 0 and 1 hold two each, 2 holds one.
    memory = Memory(capacity=5, lambda_t=1.0, lambda_u=1.0)
    memory.items = [
        *(item(0, 0.2, mark=1), item(0, 0.5, mark=2)),
        *(item(1, 0.4, mark=3), item(1, 0.3, mark=4)),
        item(2, 0.9, mark=5),
    ]
    # All are of age 0, so doubt decides. The most doubtful of classes 0 and 1 goes, 2, though 5 is
    # more so. Then class 1 alone holds two, as would class 3: of class 1 goes 3.
    memory.add(item(3, 0.1, mark=6), classes=4)
    assert held(memory) == [(0, 1, 1), (1, 3, 1), (1, 4, 1), (2, 5, 1), (3, 6, 1)]
    memory.add(item(3, 0.1, mark=7), classes=4)
    assert held(memory) == [(0, 1, 2), (1, 4, 2), (2, 5, 2), (3, 6, 2), (3, 7, 1)]


def test_a_class_below_its_share_is_refused_if_it_scores_highest():
    memory = Memory(capacity=2, lambda_t=1.0, lambda_u=1.0)
    memory.items = [item(0, 0.2, 1), item(0, 0.5, 2)]
    memory.add(item(1, 1.0, mark=3), classes=2)
    assert held(memory) == [(0, 1, 1), (0, 2, 1)]


def test_of_equal_scores_the_last_one_goes_and_an_equal_newcomer_is_refused():
    memory = Memory(capacity=2, lambda_t=0.0, lambda_u=1.0)  # age does not count
    memory.items = [item(0, 0.5, 1), item(0, 0.5, 2)]
    memory.add(item(0, 0.5, mark=3), classes=1)
    assert held(memory) == [(0, 1, 1), (0, 2, 1)]
    memory.add(item(0, 0.4, mark=4), classes=1)
    assert held(memory) == [(0, 1, 2), (0, 4, 1)]


def test_more_classes_than_places_leave_one_place_for_each_that_came():
    memory = Memory(capacity=2, lambda_t=1.0, lambda_u=1.0)
    for label in range(3):
        memory.add(item(label, 0.1, mark=label), classes=10)
    # Full after two; the third is younger than both, of which the older scores highest.
    assert held(memory) == [(1, 1, 2), (2, 2, 1)]


def test_old_items_weigh_less():
    memory = Memory(capacity=4, lambda_t=1.0, lambda_u=1.0)
    memory.items = [item(0, 0.0, age=0), item(0, 0.0, age=4)]
    # By hand: 1 / 2, and e^(−1) / (1 + e^(−1)) = 0.268941.
    torch.testing.assert_close(memory.importance(), torch.tensor([0.5, 0.268941]))


# --- the batch norm ---------------------------------------------------------------------------


def test_the_batch_norm_moves_a_twentieth_while_learning_and_not_otherwise():
    source = nn.BatchNorm2d(1, eps=0.0).eval()
    source.running_mean.fill_(1.0)
    source.running_var.fill_(4.0)
    norm = RobustNorm(source, momentum=0.05)
    x = torch.tensor([3.0, 7.0]).view(2, 1, 1, 1)  # mean 5, variance 4
    torch.testing.assert_close(norm(x).flatten(), torch.tensor([1.0, 3.0]))  # (x − 1) / 2
    norm.learning = True
    # By hand: the mean becomes .95 · 1 + .05 · 5 = 1.2, the variance stays 4.
    torch.testing.assert_close(norm(x).flatten(), torch.tensor([0.9, 2.9]))
    norm.learning = False
    torch.testing.assert_close(norm(x).flatten(), torch.tensor([0.9, 2.9]))
    assert (source.running_mean.item(), source.running_var.item()) == (1.0, 4.0)


def test_gradients_flow_through_the_share_the_batch_has_in_the_statistics():
    source = randomise(nn.Sequential(nn.BatchNorm2d(2)), seed=3)[0].double()
    norm = RobustNorm(source, momentum=0.3)

    def function(x: torch.Tensor) -> torch.Tensor:
        fresh = copy.deepcopy(norm)
        fresh.learning = True
        return fresh(x)

    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)


def test_one_value_per_channel_moves_nothing():
    norm = RobustNorm(nn.BatchNorm1d(3).eval(), momentum=0.05)
    norm.learning = True
    norm(torch.ones(1, 3))
    assert all(map(torch.equal, norm.running, (torch.zeros(3), torch.ones(3))))


# --- the update -------------------------------------------------------------------------------


class Reference:
    """The published update, in place on two copies of the model, from plain operations."""

    def __init__(self, model: nn.Module) -> None:
        self.student, self.teacher = copy.deepcopy(model), copy.deepcopy(model)
        trained = [p for m in self.norms(self.student) for p in (m.weight, m.bias)]
        self.optimiser = torch.optim.Adam(trained, lr=1e-3)

    @staticmethod
    def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
        return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]

    def run(self, model: Classifier, x: torch.Tensor, learning: bool) -> torch.Tensor:
        for layer in (model.layer1, model.layer2):
            convolution, norm, _ = layer
            x = convolution(x)
            mean, variance = norm.running_mean, norm.running_var
            if learning:
                now = x.transpose(0, 1).flatten(1)
                mean = 0.95 * mean + 0.05 * now.mean(1)
                variance = 0.95 * variance + 0.05 * now.var(1, correction=0)
                norm.running_mean, norm.running_var = mean.detach(), variance.detach()
            x = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + norm.eps).sqrt()
            x = (x * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).relu()
        return model.fc(x.mean((2, 3)))

    def update(self, images: torch.Tensor, strong: torch.Tensor, ages: torch.Tensor) -> float:
        with torch.no_grad():
            target = self.run(self.teacher, images, learning=True).softmax(1)
        logits = self.run(self.student, strong, learning=True)
        weight = torch.exp(-ages) / (1 + torch.exp(-ages))
        loss = (weight * -(target * logits.log_softmax(1)).sum(1)).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        with torch.no_grad():
            for theirs, ours in zip(
                self.norms(self.teacher), self.norms(self.student), strict=True
            ):
                for kind in ("weight", "bias"):
                    slow, fast = getattr(theirs, kind), getattr(ours, kind)
                    slow.copy_(0.999 * slow + 0.001 * fast)
        return loss.item()


@pytest.mark.parametrize("batch", [1, 4])
def test_two_updates_are_those_of_the_published_rule(classifier, monkeypatch, batch):
    # The augmentation is replaced by one that needs no random numbers.
    monkeypatch.setattr(bestta.adapters.rotta, "augment", lambda x, generator, normalise: 0.5 * x)
    reference = Reference(classifier)  # first: an adapter freezes the model, and copies of it
    adapter = adapter_of(classifier, capacity=8, update_every=8)
    frames = torch.cat(stream(16, seed=7, shift=0.5, scale=1.5))
    for start in range(0, 16, batch):
        logits = adapter(frames[start : start + batch])
        with torch.no_grad():
            expected = reference.run(reference.teacher, frames[start : start + batch], False)
        torch.testing.assert_close(logits, expected)
        assert adapter.last.adapted == (start + batch in (8, 16))
        if adapter.last.adapted:
            kept = adapter.memory.items  # what it holds is tested above
            images, ages = (
                torch.stack([i.image for i in kept]),
                torch.tensor([i.age / 8 for i in kept]),
            )
            loss = reference.update(images, 0.5 * images, ages)
            assert adapter.last.losses["cross_entropy"] == pytest.approx(loss, rel=1e-5)
    for role, weights, copied in (
        (adapter.student, adapter.weights, reference.student),
        (adapter.teacher, adapter.teacher_weights, reference.teacher),
    ):
        for name, norm in role.norms.items():
            expected = copied.get_submodule(name)
            torch.testing.assert_close(norm.running[0], expected.running_mean)
            torch.testing.assert_close(norm.running[1], expected.running_var)
            torch.testing.assert_close(weights[f"{name}.weight"], expected.weight.detach())
            torch.testing.assert_close(weights[f"{name}.bias"], expected.bias.detach())
            assert not torch.equal(expected.bias, classifier.get_submodule(name).bias)


def test_the_first_step_of_the_teacher_is_a_thousandth_of_the_students(classifier):
    # Adam's first step is lr = 1e-3 for every number that has a gradient, so the teacher's is 1e-6.
    model = classifier.double()
    adapter = adapter_of(model, capacity=4, update_every=4)
    for image in stream(4, seed=7):
        adapter(image.double())
    name = "layer2.1.bias"
    start = model.get_parameter(name)
    step, slow = adapter.weights[name] - start, adapter.teacher_weights[name] - start
    assert step.abs().max().item() == pytest.approx(1e-3, rel=1e-4)
    torch.testing.assert_close(slow, step * 1e-3, rtol=1e-6, atol=1e-15)


def test_the_student_sees_the_augmented_memory_and_the_teacher_the_memory_itself(
    classifier, monkeypatch
):
    seen = {}
    adapter = adapter_of(classifier, capacity=4, update_every=4, normalise=((0.5,), (0.2,)))
    real = bestta.adapters.rotta.augment

    def augment(images, generator, normalise):
        assert generator is adapter.generator
        assert normalise == ((0.5,), (0.2,))
        seen["memory"], seen["strong"] = images, real(images, generator, normalise)
        return seen["strong"]

    monkeypatch.setattr(bestta.adapters.rotta, "augment", augment)
    for name, role in (("student", adapter.student), ("teacher", adapter.teacher)):
        monkeypatch.setattr(role, "predict", spy(role.predict, seen, name))
    for image in stream(4, seed=7):
        adapter(image)
    assert torch.equal(seen["student"], seen["strong"])
    assert torch.equal(seen["teacher"], seen["memory"])
    assert torch.equal(seen["memory"], adapter.memory.images())
    assert not torch.equal(seen["strong"], seen["memory"])


def spy(function, seen, name):
    def call(image, weights, learning):
        seen[name] = image
        return function(image, weights, learning)

    return call


def test_nothing_is_learned_before_the_64th_image(classifier):
    adapter = adapter_of(classifier)
    start = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    images = stream(64, seed=7, size=4)
    for count, image in enumerate(images[:63], start=1):
        adapter(image)
        assert not adapter.last.adapted
        assert adapter.last.reason == f"collecting: {count} of 64 images until the next update"
    assert same(start, adapter.tensors())
    adapter(images[63])
    assert adapter.last.adapted
    now = adapter.tensors()
    assert not any(torch.equal(now[name], start[name]) for name in start if "/mean" in name)


def test_a_batch_across_the_boundary_updates_once_from_what_came_before_it(classifier, monkeypatch):
    # Six of eight are there. Of the next four, the first two complete them; the other two come
    # after the update, and count for the next.
    at_update: list[int] = []
    adapter = adapter_of(classifier, capacity=32, update_every=8)
    update = adapter.update

    def counted():
        at_update.append(int(adapter.collected))
        newest = [kept.image for kept in adapter.memory.items if kept.age == 1]
        assert torch.equal(newest[0], batch[1])
        return update()

    monkeypatch.setattr(adapter, "update", counted)
    for image in stream(3, seed=7, batch=2):
        adapter(image)
    batch = stream(1, seed=8, batch=4)[0]
    with torch.no_grad():
        before = adapter.teacher.predict(batch, adapter.teacher_weights, learning=False)
    logits = adapter(batch)
    assert at_update == [8]
    assert adapter.last.adapted
    assert torch.equal(logits, before)
    assert int(adapter.collected) == 10
    adapter(batch[:1])
    assert adapter.last.reason == "collecting: 3 of 8 images until the next update"


def test_a_batch_may_hold_several_updates(classifier):
    adapter = adapter_of(classifier, capacity=2, update_every=2)
    adapter(stream(1, seed=7, batch=5)[0])
    assert adapter.optimiser.tensors()["layer1.1.weight/steps"].item() == 2


def test_several_updates_of_one_call_under_autocast_are_those_of_several_calls(classifier):
    # Autocast keeps casts of weights, which would be old after an update. The teacher stands still
    # here, so that labels and targets are the same.
    settings = {"capacity": 2, "update_every": 2, "lr": 0.1, "teacher_rate": 0.0, "momentum": 0.0}
    together, apart = adapter_of(classifier, **settings), adapter_of(classifier, **settings)
    frames = torch.cat(stream(4, seed=7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        together(frames)
        apart(frames[:2])
        apart(frames[2:])
    for name, weight in together.weights.items():
        torch.testing.assert_close(weight, apart.weights[name])


# --- what it refuses, keeps and forgets -------------------------------------------------------


def test_segmentation_is_refused_with_the_reason():
    model = randomise(Segmenter(), seed=1)
    with pytest.raises(ValueError, match=r"not for segmentation.*whole images.*1\.6 GB"):
        adapter_of(model)
    adapter = adapter_of(model, preset="classification")
    with pytest.raises(ValueError, match=r"logits \(B, K\).*whole images"):
        adapter(stream(1, seed=7)[0])


def test_a_model_without_batch_norms_is_refused():
    with pytest.raises(ValueError, match="TokenClassifier has none"):
        adapter_of(randomise(TokenClassifier(), seed=1))


def test_another_size_is_refused_before_anything_changes(classifier):
    adapter = adapter_of(classifier)
    adapter(stream(1, seed=7)[0])
    before = adapter.state()
    with pytest.raises(ValueError, match=r"\(3, 12, 12\).*\(3, 10, 10\).*reset\(\)"):
        adapter(stream(1, seed=7, size=10)[0])
    assert same(before, adapter.state())
    adapter.reset()
    adapter(stream(1, seed=7, size=10)[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, r"lr must lie in \[0"),
        ({"beta1": 1.0}, r"beta1 must lie"),
        ({"capacity": 0}, "capacity must be a whole number from 1 on"),
        ({"update_every": 2.5}, "update_every must be a whole number"),
        ({"momentum": 1.5}, r"momentum must lie in \[0, 1\]"),
        ({"teacher_rate": -0.1}, r"teacher_rate must lie in \[0, 1\]"),
        ({"lambda_u": -1.0}, "lambda_u must lie"),
        ({"normalise": ((0.5,), (0.0,))}, "normalise is None, or the means"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_that_says_so(classifier, settings, words):
    with pytest.raises(ValueError, match=words):
        adapter_of(classifier, **settings)


def test_a_stream_stopped_between_updates_goes_on_bit_for_bit(classifier, tmp_path):
    images = stream(10, seed=7, batch=3)
    whole = adapter_of(classifier, capacity=6, update_every=7)
    predictions = [whole(image) for image in images]
    first = adapter_of(classifier, capacity=6, update_every=7)
    for image in images[:4]:
        first(image)
    first.save(tmp_path / "state")
    second = adapter_of(classifier, capacity=6, update_every=7)
    second.load(tmp_path / "state")
    assert all(torch.equal(second(x), y) for x, y in zip(images[4:], predictions[4:], strict=True))
    assert same(whole.state(), second.state())
    second.reset()
    assert same(second.state(), adapter_of(classifier, capacity=6, update_every=7).state())


def test_the_memory_is_not_the_users_tensor(classifier):
    adapter = adapter_of(classifier)
    image = stream(1, seed=7)[0]
    adapter(image)
    kept = adapter.state()["memory/images"]
    image.zero_()
    adapter.state()["memory/images"].zero_()
    assert torch.equal(adapter.state()["memory/images"], kept)
    assert bool(kept.any())


def test_another_capacity_is_refused_at_load(classifier, tmp_path):
    adapter_of(classifier).save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"capacity=64.*capacity=32"):
        adapter_of(classifier, capacity=32).load(tmp_path / "state")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("memory/ages"), "memory/ages is missing"),
        (lambda s: s.pop("memory/labels"), "memory/"),
        (lambda s: s.pop("collected"), "collected is missing"),
        (lambda s: s.update(collected=torch.tensor(1.0)), "no whole number"),
        (lambda s: s.update({"memory/labels": torch.tensor(1)}), r"memory/"),
        (lambda s: s.update({"memory/labels": torch.tensor([1, 0])}), "images by class"),
        (lambda s: s.update({"memory/images": torch.zeros(2, 12)}), "images by class"),
        (lambda s: s.update({"memory/images": torch.full((2, 3, 4, 4), math.nan)}), "damaged"),
        (lambda s: s.update({"memory/other": torch.zeros(1)}), "memory/other"),
        (lambda s: s.update({"other": torch.zeros(1)}), "other is"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(classifier, change, words):
    adapter = adapter_of(classifier, capacity=8)  # two places for each class
    adapter(stream(1, seed=7, batch=2)[0])
    assert len(adapter.memory.items) == 2
    before, state = adapter.state(), adapter.state()
    change(state)
    with pytest.raises(ValueError, match=words):
        adapter.load_state(state)
    assert same(before, adapter.state())


def test_an_absurd_image_in_the_memory_does_not_stop_it_for_good(classifier):
    adapter = adapter_of(classifier, capacity=4, update_every=4)
    images = stream(12, seed=7)
    adapter(images[0] * 1e25)  # its variance overflows, its prediction does not
    assert len(adapter.memory.items) == 1
    start = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    for image in images[1:4]:
        adapter(image)
    assert not adapter.last.adapted
    assert "memory emptied" in adapter.last.reason
    assert same(start, adapter.tensors())
    for image in images[4:8]:
        adapter(image)
    assert adapter.last.adapted


def test_statistics_of_a_model_in_half_precision_still_move():
    model = randomise(Classifier(), seed=2).to(torch.bfloat16)
    adapter = adapter_of(model, capacity=2, update_every=2)
    for image in stream(2, seed=7):
        adapter(image.to(torch.bfloat16))
    assert adapter.last.adapted
    mean = adapter.state()["student/layer1.1/mean"]
    assert mean.dtype == torch.float32
    assert not torch.equal(mean, mean.to(torch.bfloat16).float())
