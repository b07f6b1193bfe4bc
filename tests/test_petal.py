"""PETAL: the Gaussian around the source, what goes back to it, and how the Gaussian is learned."""

from __future__ import annotations

import copy
import signal
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestta
from bestta.adapters import cotta
from bestta.adapters.petal import quantile
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream

FOG = {"shift": 1.5, "scale": 0.4}


def darker(image: Tensor, draw=None, normalise=None) -> Tensor:
    """A view that draws nothing."""
    return image * 0.5 - torch.linspace(0, 1, image.shape[-1])


def labelled(length: int, classes: int = 4, batch: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (image, torch.randint(classes, (batch,), generator=draw))
        for image in stream(length, seed=3, batch=batch)
    ]


def gaussian_around(model: nn.Module, mean_shift: float, variance: float) -> bestta.SourceProfile:
    """A profile with a Gaussian that is known: its mean beside the source, one variance for all."""
    profile = bestta.prepare(model, stream(1, seed=3), method="petal", swag_epochs=1)
    learned = {}
    for name, weight in model.named_parameters():
        learned[f"mean/{name}"] = weight.detach() + mean_shift
        learned[f"variance/{name}"] = torch.full_like(weight.detach(), variance)
    return replace(profile, prepared={"petal": learned})


class Tiny(nn.Module):
    """Two weights on two features, straight to two logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25]))

    def forward(self, image: Tensor) -> Tensor:
        return image.mean((2, 3))[:, :2] * self.weight


# --- the update ---------------------------------------------------------------------------------


def test_without_prior_and_restoring_it_is_cotta():
    for net in (Classifier, Segmenter):
        model = randomise(net(), seed=11)
        profile = bestta.prepare(model, stream(2, seed=3), method="petal")
        settings = {"augmentations": 3, "restore_probability": 0.0}
        plain = bestta.adapt(model, method="cotta", **settings)
        petal = bestta.adapt(
            model, profile, method="petal", prior_weight=0.0, restore_quantile=0.0, **settings
        )
        for image in stream(3, seed=7, **FOG):
            assert torch.equal(plain(image), petal(image))
        assert same(plain.state(), petal.state())


def test_its_settings_by_task_are_cottas():
    model = randomise(Segmenter(), seed=11)
    profile = bestta.prepare(model, stream(2, seed=3), method="petal")
    ours = bestta.adapt(model, profile, method="petal").settings
    theirs = bestta.adapt(model, method="cotta").settings
    differing = {name for name, value in theirs.items() if ours[name] != value}
    assert differing == {"restore_probability"}


def test_the_prior_is_half_the_squared_distance_over_the_damped_variance():
    # By hand: two weights, each 0.01 away from the mean, variance 0: ½ · 2 · 1e-4 / 1e-6 = 100.
    model = Tiny().eval()
    adapter = bestta.adapt(model, gaussian_around(model, 0.01, 0.0), method="petal")
    adapter(stream(1, seed=7)[0])
    losses = adapter.last.losses
    assert losses["prior"] == pytest.approx(100, rel=1e-4)
    assert losses["total"] == pytest.approx(losses["cross_entropy"] + 1e-9 * 100)


def test_the_prior_pulls_towards_the_mean_by_distance_over_variance():
    # By hand: the gradient of the prior is (θ − mean) / (variance + 1e-6) = −0.5 / 0.100001.
    # A sure anchor and a teacher that equals the student leave no other gradient.
    model = Tiny().eval()
    adapter = bestta.adapt(
        model,
        gaussian_around(model, 0.5, 0.1),
        method="petal",
        confidence=0.0,
        prior_weight=2.0,
        restore_quantile=0.0,
    )
    adapter(stream(1, seed=7)[0])
    # Adam's first moment holds a tenth of the gradient.
    moment = adapter.tensors()["optimiser/weight/mean"]
    torch.testing.assert_close(moment, torch.full((2,), 0.1 * 2 * -0.5 / 0.100001))
    assert bool((adapter.student["weight"] > model.weight).all())


def petal_for_images(model: nn.Module, profile, images: list[Tensor]):
    """The published rule, in place on copies; views as ``darker`` makes them, prior weight 1e-3."""
    student, teacher, anchor = (copy.deepcopy(model).requires_grad_(False) for _ in range(3))
    student.requires_grad_(True)
    for net in (student, teacher, anchor):
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.train()
                norm.track_running_stats = False
                norm.running_mean = norm.running_var = None
    learned = profile.prepared["petal"]
    adam = torch.optim.Adam(student.parameters(), lr=1e-3)
    answers = []
    for image in images:
        assert anchor(image).softmax(1).max(1).values.mean() < 0.92
        target = teacher(darker(image))
        loss = -(target.softmax(1) * student(image).log_softmax(1)).sum(1).mean()
        for name, weight in student.named_parameters():
            distance = (weight - learned[f"mean/{name}"]).square()
            loss = loss + 1e-3 * 0.5 * (distance / (learned[f"variance/{name}"] + 1e-6)).sum()
        adam.zero_grad()
        loss.backward()
        fisher = {name: weight.grad.square() for name, weight in student.named_parameters()}
        threshold = torch.cat([f.flatten() for f in fisher.values()]).quantile(0.03)
        adam.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.copy_(0.999 * slow + 0.001 * fast)
            for name, weight in student.named_parameters():
                weight[fisher[name] < threshold] = anchor.get_parameter(name)[
                    fisher[name] < threshold
                ]
        answers.append(target)
    return answers, student, teacher


def test_three_steps_are_the_published_ones(monkeypatch):
    monkeypatch.setattr(cotta, "augment", darker)
    model = randomise(Classifier().double(), seed=11)
    sources = [(image.double(), label) for image, label in labelled(4)]
    profile = bestta.prepare(model, sources, method="petal")
    images = [image.double() for image in stream(3, seed=7, batch=4, **FOG)]
    expected, student, teacher = petal_for_images(model, profile, images)
    adapter = bestta.adapt(model, profile, method="petal", prior_weight=1e-3)
    for image, answer in zip(images, expected, strict=True):
        torch.testing.assert_close(adapter(image), answer)
    for name, weight in student.named_parameters():
        torch.testing.assert_close(adapter.student[name], weight)
    for name, weight in teacher.named_parameters():
        torch.testing.assert_close(adapter.teacher[name], weight)
    assert adapter.last.adapted


def test_the_numbers_with_the_smallest_gradients_of_all_weights_go_back():
    model = randomise(TokenClassifier(), seed=11)
    profile = bestta.prepare(model, stream(2, seed=3), method="petal", swag_epochs=1)
    adapter = bestta.adapt(model, profile, method="petal")
    with torch.no_grad():
        for weight in adapter.student.values():
            weight.add_(1)
    # Gradients 0, 1, 2, … over all weights, the signs taking turns: of n of them, below the place
    # 0.03 · (n − 1) lie the first ones up to it.
    slopes, first = {}, 0
    for name, weight in adapter.student.items():
        ranks = torch.arange(first, first + weight.numel()).float().view(weight.shape)
        slopes[name], first = ranks * (-1) ** ranks, first + weight.numel()
    adapter.restore_student(slopes)
    for name, weight in adapter.student.items():
        back = slopes[name].abs() < 0.03 * (first - 1)
        source = adapter.network.source[name]
        assert torch.equal(weight, torch.where(back, source, source + 1))
    restored = sum(int((w == adapter.network.source[n]).sum()) for n, w in adapter.student.items())
    assert restored == int(0.03 * (first - 1)) + 1


def test_nothing_goes_back_where_the_quantile_is_shared_by_many():
    # Strictly below: with all gradients the same there is nothing below.
    model = randomise(TokenClassifier(), seed=11)
    profile = bestta.prepare(model, stream(2, seed=3), method="petal", swag_epochs=1)
    adapter = bestta.adapt(model, profile, method="petal")
    with torch.no_grad():
        for weight in adapter.student.values():
            weight.add_(1)
    before = adapter.state()
    adapter.restore_student({name: torch.zeros_like(w) for name, w in adapter.student.items()})
    assert same(before, adapter.state())


def test_restoring_at_random_is_there_as_well(monkeypatch):
    monkeypatch.setattr(cotta, "augment", darker)
    model = randomise(Classifier(), seed=11)
    profile = bestta.prepare(model, stream(2, seed=3), method="petal")
    adapter = bestta.adapt(
        model, profile, method="petal", restore_quantile=0.0, restore_probability=0.5, seed=3
    )
    adapter(stream(1, seed=7, batch=4)[0])
    draw = torch.Generator().manual_seed(3)
    for name, source in model.named_parameters():
        mask = torch.rand(source.shape, generator=draw) < 0.5
        assert torch.equal(adapter.student[name][mask], source[mask])


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1001])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.99])
def test_the_quantile_is_torchs(count, share):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count))
    torch.testing.assert_close(quantile(values, share), values.quantile(share))


def test_there_may_be_more_weights_than_torchs_quantile_takes():
    values = torch.zeros(17_000_000)
    values[::2] = 1
    assert quantile(values, 0.25) == 0
    assert quantile(values, 0.75) == 1


# --- the preparation ----------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_mean_and_variance_are_those_of_the_walk(every):
    # The walk again: SGD with momentum on a copy in eval mode, every place of it kept.
    model = randomise(Classifier(), seed=11)
    images = labelled(5)
    walker = copy.deepcopy(model)
    sgd = torch.optim.SGD(walker.parameters(), lr=0.01, momentum=0.9)
    walk = []
    for image, label in images * 2:
        sgd.zero_grad()
        F.cross_entropy(walker(image), label).backward()
        sgd.step()
        walk.append({name: w.detach().clone() for name, w in walker.named_parameters()})
    profile = bestta.prepare(
        model, images, method="petal", swag_epochs=2, swag_lr=0.01, swag_every=every
    )
    learned = profile.prepared["petal"]
    assert len(learned) == 2 * len(list(model.parameters()))
    for name in walk[0]:
        places = torch.stack([place[name] for place in walk[every - 1 :: every]])
        torch.testing.assert_close(learned[f"mean/{name}"], places.mean(0))
        variance = places.double().var(0, correction=0).float()
        torch.testing.assert_close(learned[f"variance/{name}"], variance, rtol=1e-3, atol=1e-9)
        assert variance.max() > 0


def test_a_large_weight_that_hardly_moves_has_its_small_variance():
    # In fp32 the mean of squares minus the square of the mean, at 1000, has no digit of this left.
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([1000.0, 1000.0]))

        def forward(self, image: Tensor) -> Tensor:
            return image.mean((2, 3))[:, :2] + self.bias

    # The loss of label 0 at equal logits has the gradient (−½, ½): one step of lr 0.02 goes ±0.01,
    # the next, with momentum 0.9, ±0.019 further. Places 0.01 and 0.029: variance 0.0095².
    image = torch.zeros(1, 3, 2, 2)
    profile = bestta.prepare(
        Large().eval(),
        [(image, torch.tensor([0]))] * 2,
        method="petal",
        swag_epochs=1,
        swag_lr=0.02,
    )
    variance = profile.prepared["petal"]["variance/bias"]
    torch.testing.assert_close(variance, torch.full((2,), 0.0095**2), rtol=0.03, atol=0.0)


def test_the_model_and_its_batch_norms_stay_as_they_are():
    model = randomise(Classifier(), seed=11)
    before = snapshot(model)
    bestta.prepare(model, labelled(2), method="petal")
    assert same(before, snapshot(model))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("stop_at", [3, 7])
def test_a_stopped_preparation_goes_on_as_if_it_had_not_been(stop_at, tmp_path):
    model = randomise(Classifier(), seed=11)
    images = labelled(5)
    settings = {"method": "petal", "swag_epochs": 2, "swag_every": 2, "swag_lr": 0.01}
    whole = bestta.prepare(model, images, **settings)

    class Stopping:
        """Asks to stop, as Ctrl-C does, before it hands out a certain batch."""

        def __init__(self) -> None:
            self.handed_out = 0

        def __iter__(self):
            for item in images:
                self.handed_out += 1
                if self.handed_out == stop_at:
                    signal.raise_signal(signal.SIGINT)
                yield item

    checkpoint = tmp_path / "petal.safetensors"
    with pytest.raises(KeyboardInterrupt, match=f"stopped after batch {stop_at}"):
        bestta.prepare(model, Stopping(), checkpoint=checkpoint, **settings)
    resumed = bestta.prepare(model, images, checkpoint=checkpoint, **settings)
    assert same(dict(whole.prepared["petal"]), dict(resumed.prepared["petal"]))


def test_what_was_learned_survives_the_profiles_file(tmp_path):
    model = randomise(Segmenter(), seed=11)
    profile = bestta.prepare(model, stream(2, seed=3), method="petal")
    profile.save(tmp_path / "profile")
    first, second = (
        bestta.adapt(model, source, method="petal") for source in (profile, tmp_path / "profile")
    )
    image = stream(1, seed=7, **FOG)[0]
    assert torch.equal(first(image), second(image))
    assert same(first.state(), second.state())


def test_unprepared_it_says_what_to_do():
    model = randomise(Classifier(), seed=11)
    with pytest.raises(ValueError, match=r"bestta.prepare\(model, images, method='petal'\).*cotta"):
        bestta.adapt(model, method="petal")
    assert all(p.requires_grad for p in model.parameters())


def test_too_few_batches_to_collect_anything_are_an_error():
    with pytest.raises(ValueError, match=r"swag_every=10.*only 2 batches"):
        bestta.prepare(
            randomise(Classifier(), seed=11),
            stream(2, seed=3),
            method="petal",
            swag_epochs=1,
            swag_every=10,
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prior_weight": -1.0}, "prior_weight must lie in"),
        ({"restore_quantile": 1.0}, "restore_quantile must lie in"),
        ({"swag_lr": float("inf")}, "swag_lr must lie in"),
        ({"swag_epochs": 0}, "swag_epochs must be a whole number"),
        ({"swag_every": 0.5}, "swag_every must be a whole number"),
        ({"teacher_decay": 2.0}, "teacher_decay must lie in"),
    ],
)
def test_settings_without_sense_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        bestta.prepare(
            randomise(Classifier(), seed=11), stream(1, seed=3), method="petal", **settings
        )


def test_weights_that_no_answer_depends_on_do_not_keep_the_others_from_going_back():
    """An auxiliary head has no gradient at all; its zeros would be the whole of the quantile."""

    class WithAuxiliaryHead(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.auxiliary = nn.Linear(8, 400)

    model = randomise(WithAuxiliaryHead(), seed=1)
    images = stream(3, seed=2, batch=4)
    profile = bestta.prepare(model, images, method="petal", swag_epochs=1)
    settings = {"method": "petal", "confidence": 0.0, "lr": 0.1, "augmentations": 1}
    restores = bestta.adapt(model, profile, restore_quantile=0.3, **settings)
    keeps = bestta.adapt(model, profile, restore_quantile=0.0, **settings)
    for adapter in (restores, keeps):
        # The first step has nothing to learn: the teacher is the student.
        with torch.no_grad():
            adapter.teacher["fc.weight"].add_(1.0)
        adapter(images[0])

    def back(adapter) -> int:
        used = [n for n in adapter.student if not n.startswith("auxiliary")]
        source = dict(model.named_parameters())
        return sum(int((adapter.student[n] == source[n]).sum()) for n in used)

    numbers = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("auxiliary"))
    assert back(restores) >= back(keeps) + 0.25 * numbers
