"""EATA: which samples are learned from, how much each counts, and what holds the weights back.

The oracle below changes a copy of the network in place, in the paper's own setting: batch norms in
training mode without running statistics, PyTorch's optimisers, one sample after the other.
"""

from __future__ import annotations

import copy
import math
import signal

import pytest
import torch
from torch import Tensor, nn

import bestta
import bestta.adapters.eata as eata
from bestta import SourceProfile
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream

K = 4
E0 = 0.4 * math.log(K)
MANY = 10
"""With few classes even an average of all of them is close to each."""


class Given(nn.Module):
    """The logits are the first pixel's channels, through a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(K, eps=1e-9)

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(image)[:, :, 0, 0]


class Two(nn.Module):
    """Convolution, batch norm, and a linear layer sharp enough for some predictions to be sure."""

    def __init__(self, pixels: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, MANY, 1)
        self.pixels = pixels

    def forward(self, image: Tensor) -> Tensor:
        maps = self.norm(self.conv(image)).relu()
        return self.head(maps if self.pixels else maps.mean((2, 3), keepdim=True)).squeeze(
            (2, 3) if not self.pixels else ()
        )


def two(pixels: bool = False) -> Two:
    net = randomise(Two(pixels), seed=4)
    with torch.no_grad():
        net.head.weight.mul_(4 if pixels else 30)
        # No class is preferred, so that both filters have work.
        logits = training(net)(stream(1, seed=9, batch=64, size=6)[0])
        net.head.bias -= logits.movedim(1, -1).reshape(-1, MANY).mean(0)
    return net


def given(**settings) -> eata.Eata:
    """On `Given` by the source's statistics, which are 0 and 1: the image is the logits."""
    settings = {"fisher_weight": 0.0, "prior": float("inf"), "preset": "classification"} | settings
    return bestta.adapt(Given().eval(), method="eata", **settings)


def image_of(probabilities: list[list[float]]) -> Tensor:
    """Images (B, K, 1, 1) whose prediction under `given` has these probabilities."""
    return torch.tensor(probabilities).log()[:, :, None, None]


def entropy_of(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p)


SURE_A, SURE_B = [0.97, 0.01, 0.01, 0.01], [0.01, 0.97, 0.01, 0.01]
UNSURE = [0.4, 0.3, 0.2, 0.1]


# --- which samples, and how much -------------------------------------------------------------


def test_a_sample_is_reliable_below_four_tenths_of_the_greatest_entropy():
    # Solved numerically, the entropy of (1 − 3x, x, x, x) is 0.4 · ln 4 at x = 0.04618.
    just, beyond = ([1 - 3 * x, x, x, x] for x in (0.0461, 0.0463))
    assert entropy_of(just) < E0 < entropy_of(beyond)
    adapter = given()
    adapter(image_of([beyond]))
    assert not adapter.last.adapted
    assert adapter.last.reason == "no sample is reliable"
    adapter(image_of([just]))
    assert adapter.last.adapted


def test_a_sample_counts_by_how_far_it_is_below_the_margin():
    adapter = given()
    adapter(image_of([SURE_A, UNSURE, [0.02, 0.02, 0.94, 0.02]]))
    # By hand: the mean over the two that are reliable of H · exp(E0 − H).
    sure = [entropy_of(SURE_A), entropy_of([0.02, 0.02, 0.94, 0.02])]
    expected = sum(h * math.exp(E0 - h) for h in sure) / 2
    assert adapter.last.losses["entropy"] == pytest.approx(expected, rel=1e-5)


def test_no_gradient_goes_through_the_weight_of_a_sample():
    h = torch.tensor([0.1, 0.5], requires_grad=True)
    eata.weighted_entropy(h, ceiling=0.6).backward()
    # d/dH of c · H / 2 with c = exp(0.6 − H) held fixed.
    torch.testing.assert_close(h.grad, torch.tensor([math.exp(0.5) / 2, math.exp(0.1) / 2]))


def test_a_sample_that_points_where_the_average_does_is_redundant():
    adapter = given(lr=0.0)
    adapter(image_of([SURE_A]))
    assert adapter.last.adapted  # the first has nothing to be compared with
    adapter(image_of([SURE_A]))
    assert not adapter.last.adapted
    assert adapter.last.reason == "no reliable sample is new"
    adapter(image_of([SURE_B]))  # its cosine to SURE_A is 0.0208
    assert adapter.last.adapted


@pytest.mark.parametrize(("redundancy", "kept"), [(0.39, False), (0.41, True)])
def test_redundancy_is_judged_by_the_cosine(redundancy, kept):
    adapter = given(lr=0.0, redundancy=redundancy, margin=0.6)
    adapter(image_of([[0.997, 0.001, 0.001, 0.001]]))
    # (a, 1 − a − 2e, e, e) against (1, 0, 0, 0), nearly: the cosine is 0.4004 at a = 0.303.
    other = [0.3025, 0.6955, 0.001, 0.001]
    u, v = torch.tensor([0.997, 0.001, 0.001, 0.001]), torch.tensor(other)
    assert 0.39 < float(u @ v / (u.norm() * v.norm())) < 0.41
    adapter(image_of([other]))
    assert adapter.last.adapted == kept


def test_the_published_redundancy_lies_between():
    """ε = 0.4 by behaviour: cosines of 0.39 and 0.41 to the average fall on either side of it."""
    for a, kept in ((0.297, True), (0.310, False)):
        adapter = given(lr=0.0, margin=0.6)
        adapter(image_of([[0.997, 0.001, 0.001, 0.001]]))
        adapter(image_of([[a, 0.998 - a, 0.001, 0.001]]))
        assert adapter.last.adapted == kept


def test_the_average_follows_those_learned_from_and_no_others():
    adapter = given(lr=0.0)
    c = [0.01, 0.01, 0.97, 0.01]
    adapter(image_of([SURE_A, UNSURE, SURE_A]))
    # The first batch sets it to the mean of what passed.
    torch.testing.assert_close(adapter.state()[eata.AVERAGE], torch.tensor(SURE_A))
    adapter(image_of([SURE_A, SURE_B, UNSURE, c]))
    # SURE_A is redundant now and UNSURE unreliable: 0.9 · SURE_A + 0.1 · (SURE_B + c) / 2.
    expected = [0.9 * a + 0.05 * (b + d) for a, b, d in zip(SURE_A, SURE_B, c, strict=True)]
    torch.testing.assert_close(adapter.state()[eata.AVERAGE], torch.tensor(expected))


def test_where_no_sample_survives_nothing_moves_and_nothing_is_differentiated(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a backward pass")

    adapter = given()
    adapter(image_of([SURE_A]))
    before = adapter.state()
    monkeypatch.setattr(eata, "gradients", refuse)
    for batch in ([SURE_A], [UNSURE]):
        adapter(image_of(batch))
        assert not adapter.last.adapted
        assert not adapter.last.rolled_back
    assert same(before, adapter.state())


def test_before_any_sample_was_learned_from_none_is_redundant():
    adapter = given(lr=0.0)
    adapter(image_of([UNSURE]))
    assert eata.AVERAGE not in adapter.state()
    adapter(image_of([SURE_A, SURE_A]))
    torch.testing.assert_close(adapter.state()[eata.AVERAGE], torch.tensor(SURE_A))


# --- the anchor ------------------------------------------------------------------------------


def fishers(net: Two, batches: list[Tensor]) -> dict[str, Tensor]:
    """Unfused: the mean over batches of squared gradients, labels being the network's own."""
    net = training(net)
    sums = {"norm.weight": torch.zeros(6), "norm.bias": torch.zeros(6)}
    for batch in batches:
        net.zero_grad()
        logits = net(batch)
        nn.functional.cross_entropy(logits, logits.argmax(1)).backward()
        sums["norm.weight"] += net.norm.weight.grad**2
        sums["norm.bias"] += net.norm.bias.grad**2
    return {name: total / len(batches) for name, total in sums.items()}


def training(net: Two) -> Two:
    """A copy whose batch norm takes the batch's statistics and keeps none."""
    net = copy.deepcopy(net).requires_grad_(False)
    net.norm.requires_grad_(True)
    net.norm.train()
    net.norm.track_running_stats = False
    net.norm.running_mean = net.norm.running_var = None
    return net


@pytest.mark.parametrize("pixels", [False, True])
def test_fisher_is_the_mean_over_batches_of_squared_gradients(pixels):
    net, batches = two(pixels), stream(3, seed=5, batch=4)
    profile = bestta.prepare(net, batches, method="eata")
    for name, expected in fishers(net, batches).items():
        torch.testing.assert_close(profile.prepared["eata"][name], expected)


def test_given_labels_do_not_matter_to_fisher():
    net, batches = two(), stream(2, seed=5, batch=4)
    labelled = [(batch, torch.tensor([3, 2, 1, 0])) for batch in batches]
    plain, other = (bestta.prepare(net, b, method="eata") for b in (batches, labelled))
    assert same(plain.prepared["eata"], other.prepared["eata"])


def test_so_many_images_are_enough_for_fisher():
    net, batches = two(), stream(3, seed=5, batch=4)
    profile = bestta.prepare(net, batches, method="eata", fisher_images=6)
    assert profile.images == 6
    expected = fishers(net, [batches[0], batches[1][:2]])
    torch.testing.assert_close(profile.prepared["eata"]["norm.bias"], expected["norm.bias"])


def test_two_thousand_images_are_enough_by_default():
    counted = 0

    def images():
        nonlocal counted
        for _ in range(30):
            counted += 100
            yield torch.randn(100, K, 1, 1)

    assert bestta.prepare(Given().eval(), images(), method="eata").images == 2000
    assert counted == 2000


def test_the_anchor_pulls_by_twice_beta_fisher_and_distance():
    net = two()
    profile = bestta.prepare(net, stream(2, seed=5, batch=4), method="eata")
    adapter = bestta.adapt(net, profile, method="eata", fisher_weight=7.0)
    moved = {"norm.weight": 0.3, "norm.bias": -0.2}
    with torch.no_grad():
        for name, distance in moved.items():
            adapter.weights[name] += distance
    (7.0 * adapter.distance_from_source()).backward()
    for name, distance in moved.items():
        fisher = profile.prepared["eata"][name]
        torch.testing.assert_close(adapter.weights[name].grad, 2 * 7.0 * fisher * distance)


def test_what_fisher_was_learned_under_is_what_it_is_used_under():
    net = two()
    profile = bestta.prepare(net, stream(2, seed=5, batch=4), method="eata", prior=3.0)
    assert bestta.adapt(net, profile, method="eata").config.prior == 3.0


def test_a_prepared_profile_from_a_file_is_the_same(tmp_path):
    net = two()
    profile = bestta.prepare(net, stream(2, seed=5, batch=4), method="eata")
    profile.save(tmp_path / "profile")
    ours, theirs = (
        bestta.adapt(net, p, method="eata", fisher_weight=50.0)
        for p in (profile, SourceProfile.load(tmp_path / "profile"))
    )
    pulls = 0
    for image in stream(4, seed=6, batch=24, size=6):
        assert torch.equal(ours(image), theirs(image))
        pulls += ours.last.losses.get("fisher", 0) > 0
    assert pulls
    assert same(ours.state(), theirs.state())


@pytest.mark.parametrize("with_profile", [False, True])
def test_without_fisher_it_says_how_to_get_one(with_profile):
    net = two()
    profile = SourceProfile.collect(net, stream(2, seed=5), layers=["norm"])
    with pytest.raises(ValueError, match=r"bestta\.prepare\(.*'eata'\).*fisher_weight=0"):
        bestta.adapt(net, profile if with_profile else None, method="eata")
    assert all(p.requires_grad for p in net.parameters())
    assert bestta.adapt(net, profile, method="eata", fisher_weight=0.0).trainable


def test_a_stopped_preparation_goes_on_as_if_it_had_not_been(tmp_path):
    net, batches = two(), stream(5, seed=5, batch=3)

    def stopping():
        for count, batch in enumerate(batches):
            if count == 2:
                signal.raise_signal(signal.SIGINT)
            yield batch

    before, path = snapshot(net), tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt, match="after batch 3"):
        bestta.prepare(net, stopping(), method="eata", checkpoint=path)
    seen = []
    see = eata.FisherPreparation.see
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eata.FisherPreparation, "see", lambda *a: (seen.append(1), see(*a))[1])
        resumed = bestta.prepare(net, batches, method="eata", checkpoint=path)
    assert len(seen) == 2
    whole = bestta.prepare(net, batches, method="eata")
    assert same(resumed.prepared["eata"], whole.prepared["eata"])
    assert resumed.images == whole.images == 15
    assert same(before, snapshot(net))
    assert all(p.requires_grad for p in net.parameters())


# --- the whole step --------------------------------------------------------------------------


class Oracle:
    """The published step, sample by sample, on a network that it changes."""

    def __init__(self, net: Two, optimiser, epsilon: float, beta: float, fisher) -> None:
        self.net = training(net)
        self.parameters = {"norm.weight": self.net.norm.weight, "norm.bias": self.net.norm.bias}
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimiser = optimiser(list(self.parameters.values()))
        self.epsilon, self.beta, self.fisher = epsilon, beta, fisher
        self.average: Tensor | None = None
        self.learned = 0

    def __call__(self, image: Tensor) -> Tensor:
        logits = self.net(image)
        terms, passed, ceiling = [], [], 0.4 * math.log(MANY)
        for sample in logits.movedim(1, -1).reshape(-1, MANY):
            p = sample.softmax(0)
            h = -(p * p.log()).sum()
            if h >= ceiling:
                continue
            p = p.detach()
            if self.average is not None:
                cosine = (p @ self.average) / (p.norm() * self.average.norm())
                if cosine.abs() >= self.epsilon:
                    continue
            passed.append(p)
            terms.append(h / torch.exp(h.detach() - ceiling))
        if terms:
            self.learned += len(terms)
            mean = sum(passed) / len(passed)
            old = self.average
            self.average = mean if old is None else 0.9 * old + 0.1 * mean
            loss = sum(terms) / len(terms)
            for name, p in self.parameters.items():
                loss = loss + self.beta * (self.fisher[name] * (p - self.start[name]) ** 2).sum()
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
        return logits.detach()


CIFAR = ({}, lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.9, 0.999)), 0.4, 1.0)
# Of the ImageNet settings all but ε, which 10 classes are too few for.
IMAGENET = (
    {"optimiser": "sgd", "lr": 2.5e-4, "fisher_weight": 2000.0, "redundancy": 0.5},
    lambda p: torch.optim.SGD(p, lr=2.5e-4, momentum=0.9),
    0.5,
    2000.0,
)


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("published", [CIFAR, IMAGENET], ids=["cifar", "imagenet"])
def test_every_update_is_the_published_one(published, pixels):
    settings, optimiser, epsilon, beta = published
    net = two(pixels).double()
    batches = [x.double() for x in stream(4, seed=6, batch=2 if pixels else 24, size=6)]
    profile = bestta.prepare(net, batches, method="eata", **settings)
    adapter = bestta.adapt(net, profile, method="eata", **settings)
    oracle = Oracle(net, optimiser, epsilon, beta, profile.prepared["eata"])
    total = 0
    for count, image in enumerate(batches):
        before = {n: w.detach().clone() for n, w in adapter.weights.items()}
        learned = oracle.learned
        torch.testing.assert_close(adapter(image), oracle(image))
        assert adapter.last.adapted == (oracle.learned > learned)
        if count < 2:
            assert adapter.last.adapted
            assert not same(before, {n: w.detach() for n, w in adapter.weights.items()})
        for name, weight in adapter.weights.items():
            torch.testing.assert_close(weight.detach(), oracle.parameters[name].detach())
        torch.testing.assert_close(adapter.state()[eata.AVERAGE], oracle.average)
        total += image.numel() // 3 if pixels else len(image)
    assert 0 < oracle.learned < total / 2


def test_the_prediction_is_that_of_before_the_update():
    net, image = two(), stream(1, seed=6, batch=24, size=6)[0]
    adapter = bestta.adapt(net, method="eata", fisher_weight=0.0)
    torch.testing.assert_close(adapter(image), training(net)(image).detach())
    assert adapter.last.adapted


def test_in_segmentation_each_pixel_is_judged_on_its_own():
    class Pixels(Given):
        def forward(self, image: Tensor) -> Tensor:
            return self.norm(image)

    adapter = bestta.adapt(
        Pixels().eval(),
        method="eata",
        fisher_weight=0.0,
        prior=float("inf"),
        preset="segmentation",
        lr=0.0,
    )
    pixels = torch.tensor([[SURE_A, UNSURE], [SURE_A, SURE_B]]).log().permute(2, 0, 1)[None]
    adapter(pixels)
    # Three of the four pixels are reliable, two of them alike.
    expected = [(2 * a + b) / 3 for a, b in zip(SURE_A, SURE_B, strict=True)]
    torch.testing.assert_close(adapter.state()[eata.AVERAGE], torch.tensor(expected))


# --- state and settings ----------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_state_goes_on_exactly_with_and_without_an_average(optimiser, tmp_path):
    net = two()
    settings = {"fisher_weight": 0.0, "optimiser": optimiser}
    images = stream(6, seed=6, batch=24, size=6)
    whole = bestta.adapt(net, method="eata", **settings)
    start = whole.state()
    for stop in (0, 3):
        whole.reset()
        assert same(start, whole.state())
        first, second = (bestta.adapt(net, method="eata", **settings) for _ in range(2))
        for image in images[:stop]:
            first(image)
        first.save(tmp_path / "state")
        second(images[5])  # what it knew before is gone
        second.load(tmp_path / "state")
        assert same(first.state(), second.state())
        expected = [whole(image) for image in images]
        rest = [second(image) for image in images[stop:]]
        assert all(torch.equal(a, b) for a, b in zip(expected[stop:], rest, strict=True))
        assert same(whole.state(), second.state())


def test_a_state_of_the_other_optimiser_is_refused(tmp_path):
    net = two()
    bestta.adapt(net, method="eata", fisher_weight=0.0).save(tmp_path / "state")
    sgd = bestta.adapt(net, method="eata", fisher_weight=0.0, optimiser="sgd")
    with pytest.raises(ValueError, match="optimiser='adam'"):
        sgd.load(tmp_path / "state")


@pytest.mark.parametrize("shape", [(K + 1,), (K, 1), ()])
def test_an_average_that_is_none_is_refused(shape):
    adapter = given()
    adapter(image_of([SURE_A]))
    state = adapter.state()
    with pytest.raises(ValueError, match=r"average/probabilities is .*expected \(4,\)"):
        adapter.load_state({**state, eata.AVERAGE: torch.ones(shape)})
    with pytest.raises(ValueError, match="nothing of that name"):
        adapter.load_state({**state, "other": torch.ones(1)})
    assert same(state, adapter.state())
    fresh = given()
    if len(shape) != 1:
        with pytest.raises(ValueError, match="average/probabilities"):
            fresh.load_state({**state, eata.AVERAGE: torch.ones(shape)})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"margin": -0.1}, "margin must lie in"),
        ({"redundancy": -1}, "redundancy must lie in"),
        ({"decay": 1.0}, "decay must lie in"),
        ({"fisher_weight": float("inf")}, "fisher_weight must lie in"),
        ({"fisher_images": 0}, "fisher_images must be a whole number"),
        ({"optimiser": "lion"}, "optimiser is one of 'adam', 'sgd', not 'lion'"),
        ({"momentum": 1.5}, "momentum must lie in"),
        ({"prior": -1.0}, "prior must lie in"),
    ],
)
def test_a_bad_setting_says_what_would_be_right(settings, words):
    with pytest.raises(ValueError, match=words):
        bestta.adapt(two(), method="eata", **settings)


def test_a_model_without_batch_norms_is_told_what_does_without():
    tokens = randomise(TokenClassifier(), seed=1)
    with pytest.raises(ValueError, match=r"works on batch norms.*LayerNorm.*sar"):
        bestta.adapt(tokens, method="eata", fisher_weight=0.0)
    with pytest.raises(ValueError, match="works on batch norms"):
        bestta.prepare(tokens, stream(1, seed=1), method="eata")


@pytest.mark.parametrize("build", [Classifier, Segmenter])
def test_the_model_is_left_as_it_was(build):
    model = randomise(build(), seed=3)
    before = snapshot(model)
    profile = bestta.prepare(model, stream(2, seed=5, batch=4), method="eata")
    adapter = bestta.adapt(model, profile, method="eata", margin=0.99, redundancy=1.1)
    for image in stream(3, seed=6, batch=4):
        adapter(image)
        assert adapter.last.adapted
    adapter.remove()
    assert same(before, snapshot(model))
    assert all(p.grad is None for p in model.parameters())


def test_fisher_information_of_other_statistics_is_refused():
    model = randomise(Classifier(), seed=1)
    profile = bestta.prepare(model, stream(2, seed=2), method="eata", prior=8.0)
    assert bestta.adapt(model, profile, method="eata").config.prior == 8.0
    with pytest.raises(ValueError, match=r"learned with prior=8.0.*prior=0.0: prepare anew"):
        bestta.adapt(model, profile, method="eata", prior=0.0)
    bestta.adapt(model, profile, method="eata", prior=0.0, fisher_weight=0.0)
