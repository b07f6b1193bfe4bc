"""SAR: two gradients per step, reliable samples only, and the way back after a collapse.

The oracle below changes a copy of the network in place, in the paper's own setting: training mode,
batch norms without running statistics, PyTorch's SGD, the climb added to the weights and undone.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import bestta
import bestta.adapters.sar as sar
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream

K = 4


class Given(nn.Module):
    """The logits are the first pixel's channels, through a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(K, eps=1e-9)

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(image)[:, :, 0, 0]


def given(**settings) -> sar.Sar:
    """On `Given` by the source's statistics, which are 0 and 1: the image is the logits."""
    settings = {"prior": float("inf"), "preset": "classification"} | settings
    return bestta.adapt(Given().eval(), method="sar", **settings)


def image_of(*probabilities: list[float]) -> Tensor:
    """Images (B, K, 1, 1) whose prediction under `given` has these probabilities."""
    return torch.tensor(probabilities).log()[:, :, None, None]


def entropy_of(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p)


SURE, SURER, UNSURE = [0.94, 0.02, 0.02, 0.02], [0.97, 0.01, 0.01, 0.01], [0.4, 0.3, 0.2, 0.1]


def grouped() -> nn.Module:
    """Group norm, then layer norm."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(1),
        nn.LayerNorm(24),
        nn.Linear(24, K),
    )


def sharp(build) -> nn.Module:
    """Random weights, and a last layer that makes about half of the predictions reliable."""
    net = randomise(build(), seed=4)
    last = [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]
    with torch.no_grad():
        logits = Oracle(net, []).net(stream(1, seed=9, batch=64, size=8)[0])
        logits = logits.movedim(1, -1).flatten(0, -2)
        last.bias -= logits.mean(0)
        logits, factor, share = logits - logits.mean(0), 1.0, 0.0
        while share < 0.5:
            factor *= 1.2
            p = (factor * logits).softmax(1)
            reliable = -(p * p.log()).sum(1) < 0.4 * math.log(p.shape[1])
            share = reliable.double().mean().item()
        last.weight *= factor
        last.bias *= factor
    return net


class Oracle:
    """The published step on a network that it changes."""

    def __init__(self, net: nn.Module, trained: list[str], rho=0.05, lr=2.5e-4) -> None:
        self.net = copy.deepcopy(net).train().requires_grad_(False)
        for module in self.net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = False
                module.running_mean = module.running_var = None
        self.parameters = {n: p for n, p in self.net.named_parameters() if n in trained}
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        if trained:
            self.sgd = torch.optim.SGD(self.parameters.values(), lr=lr, momentum=0.9)
        self.rho = rho
        self.average: float | None = None
        self.unreliable = self.dropped = 0

    def __call__(self, image: Tensor) -> Tensor:
        weights = list(self.parameters.values())
        logits = self.net(image)
        ceiling = 0.4 * math.log(logits.shape[1])
        first = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).flatten()
        reliable = [i for i, h in enumerate(first) if h < ceiling]
        self.unreliable += len(first) - len(reliable)
        self.sgd.zero_grad()
        first[reliable].mean().backward()
        length = torch.cat([w.grad.flatten() for w in weights]).norm()
        old = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for w in weights:
                w += self.rho * w.grad / (length + 1e-12)
        self.sgd.zero_grad()
        second = self.net(image)
        second = -(second.softmax(1) * second.log_softmax(1)).sum(1).flatten()
        still = [i for i in reliable if second[i] < ceiling]
        self.dropped += len(reliable) - len(still)
        loss = second[still].mean()
        loss.backward()
        with torch.no_grad():
            for w, o in zip(weights, old, strict=True):
                w.copy_(o)
        self.sgd.step()
        new = loss.item()
        self.average = new if self.average is None else 0.9 * self.average + 0.1 * new
        return logits.detach()


NORMS = {
    Classifier: ["layer1.1", "layer2.1"],
    Segmenter: ["layer1.1", "layer2.1", "layer3.1"],  # not the fourth, the last quarter
    TokenClassifier: ["block.norm1", "block.norm2"],
    grouped: ["1", "5"],
}


@pytest.mark.parametrize("rho", [None, 0.3])
@pytest.mark.parametrize("build", NORMS)
def test_every_update_is_the_published_one(build, rho):
    """Over three steps, so that momentum counts; with the published ρ and one that climbs far."""
    net = sharp(build).double()
    batch = 2 if build is Segmenter else 64
    settings = {"recover_below": 0.0} | ({} if rho is None else {"rho": rho})
    adapter = bestta.adapt(net, method="sar", **settings)
    names = [f"{norm}.{kind}" for norm in NORMS[build] for kind in ("weight", "bias")]
    assert list(adapter.trainable) == names
    oracle = Oracle(net, names, *([] if rho is None else [rho]))
    for image in stream(3, seed=6, batch=batch, size=8):
        before = {n: w.detach().clone() for n, w in adapter.weights.items()}
        torch.testing.assert_close(adapter(image.double()), oracle(image.double()))
        assert adapter.last.adapted
        for name, weight in adapter.weights.items():
            expected = oracle.parameters[name].detach()
            # The steps are small: what is compared is how far they went.
            torch.testing.assert_close(
                weight.detach() - before[name], expected - before[name], rtol=1e-6, atol=1e-12
            )
        state = adapter.state()
        assert state["entropy/average"].item() == pytest.approx(oracle.average, rel=1e-5)
    assert oracle.unreliable > 0
    assert oracle.dropped > 0 or rho is None
    assert not same(before, {n: p.detach() for n, p in net.named_parameters() if n in before})


def test_the_climb_has_the_length_rho_over_all_parameters_together():
    weights = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.zeros(2, 2))}
    slope = {"a": torch.tensor([3.0, 0.0, 0.0]), "b": torch.full((2, 2), 2.0)}
    climbed = sar.climb(weights, slope, 0.05)
    # The slope has the length √(9 + 4 · 4) = 5; a tenth of a half of it is 0.05.
    torch.testing.assert_close(climbed["a"].detach(), torch.tensor([1.03, 1.0, 1.0]))
    torch.testing.assert_close(climbed["b"].detach(), torch.full((2, 2), 0.02))
    torch.testing.assert_close(weights["a"].detach(), torch.ones(3))


def test_the_published_climb_is_five_hundredths_long(monkeypatch):
    seen = []
    climb = sar.climb
    monkeypatch.setattr(sar, "climb", lambda w, g, rho: seen.append(climb(w, g, rho)) or seen[-1])
    net = sharp(Classifier)
    adapter = bestta.adapt(net, method="sar")
    adapter(stream(1, seed=6, batch=64, size=8)[0])
    source = dict(net.named_parameters())
    moved = [(w.detach() - source[name].detach()).flatten() for name, w in seen[0].items()]
    assert torch.cat(moved).norm().item() == pytest.approx(0.05, rel=1e-4)


def test_on_flat_ground_there_is_no_climb():
    weights = {"a": nn.Parameter(torch.ones(3))}
    climbed = sar.climb(weights, {"a": torch.zeros(3)}, 0.05)
    assert torch.equal(climbed["a"].detach(), torch.ones(3))


# --- which samples ---------------------------------------------------------------------------


def test_a_sample_is_reliable_below_four_tenths_of_the_greatest_entropy():
    # Solved numerically, the entropy of (1 − 3x, x, x, x) is 0.4 · ln 4 at x = 0.04618.
    adapter = given(rho=0.0)
    for x, reliable in ((0.0463, False), (0.0461, True)):
        adapter(image_of([1 - 3 * x, x, x, x]))
        assert adapter.last.adapted == reliable


def test_the_loss_is_the_mean_over_reliable_samples():
    adapter = given(rho=0.0)
    adapter(image_of(SURE, UNSURE, SURER))
    expected = (entropy_of(SURE) + entropy_of(SURER)) / 2
    assert adapter.last.losses["entropy"] == pytest.approx(expected, rel=1e-5)
    assert adapter.last.losses["entropy_uphill"] == pytest.approx(expected, rel=1e-5)


def test_where_no_sample_is_reliable_nothing_moves_not_even_by_momentum():
    adapter = given()
    adapter(image_of(SURE))
    assert adapter.last.adapted
    before = adapter.state()
    adapter(image_of(UNSURE))
    assert not adapter.last.adapted
    assert not adapter.last.rolled_back
    assert adapter.last.reason == "no sample is reliable"
    assert same(before, adapter.state())


def test_where_no_sample_stays_reliable_uphill_nothing_moves():
    adapter = given(rho=2.0)
    before = adapter.state()
    adapter(image_of([1 - 3 * 0.0461, 0.0461, 0.0461, 0.0461]))
    assert not adapter.last.adapted
    assert adapter.last.reason == "no sample stays reliable uphill"
    assert same(before, adapter.state())


def test_a_pixel_is_a_sample():
    class Pixels(Given):
        def forward(self, image: Tensor) -> Tensor:
            return self.norm(image)

    settings = {"prior": float("inf"), "preset": "segmentation", "rho": 0.0}
    adapter = bestta.adapt(Pixels().eval(), method="sar", **settings)
    adapter(torch.tensor([[SURE, UNSURE], [SURER, UNSURE]]).log().permute(2, 0, 1)[None])
    expected = (entropy_of(SURE) + entropy_of(SURER)) / 2
    assert adapter.last.losses["entropy"] == pytest.approx(expected, rel=1e-5)


# --- recovery --------------------------------------------------------------------------------


@pytest.mark.parametrize(("average", "recovers"), [(0.2030, True), (0.2040, False)])
def test_it_recovers_once_the_average_entropy_is_below_a_fifth(average, recovers):
    # H of SURER is 0.1677: 0.9 · 0.2030 + 0.1 · 0.1677 is 0.1995, with 0.2040 it is 0.2004.
    assert entropy_of(SURER) == pytest.approx(0.1677, abs=1e-4)
    adapter = given(rho=0.0)
    start = adapter.state()
    adapter(image_of(SURE))
    assert adapter.last.adapted
    moved = adapter.state()
    assert not torch.equal(moved["norm.weight"], start["norm.weight"])
    adapter.load_state({**moved, "entropy/average": torch.tensor(average)})
    adapter(image_of(SURER))
    state = adapter.state()
    assert adapter.last.adapted != recovers
    assert adapter.last.rolled_back is False
    assert state["recoveries"].item() == recovers
    if recovers:
        assert adapter.last.reason == "recovered: the average entropy 0.199 is below 0.2"
        assert same({**start, "recoveries": torch.tensor(1)}, state)
    else:
        assert state["entropy/average"].item() == pytest.approx(0.2004, abs=1e-4)
        assert state["entropy/averaged"].item() == 2


def test_after_a_recovery_it_goes_on_as_from_the_start_and_keeps_count():
    adapter, fresh = given(), given()
    adapter(image_of(SURER))  # the first entropy sets the average, and is below 0.2 already
    assert adapter.last.reason.startswith("recovered: ")
    for batch in (image_of(SURE), image_of(SURE, UNSURE)):
        assert torch.equal(adapter(batch), fresh(batch))
        assert adapter.last.adapted
    assert same({**fresh.state(), "recoveries": torch.tensor(1)}, adapter.state())


def test_the_first_entropy_sets_the_average_and_later_ones_count_a_tenth():
    adapter = given(rho=0.0, lr=0.0)
    adapter(image_of(SURE))
    first, second = entropy_of(SURE), entropy_of([0.9, 0.05, 0.04, 0.01])
    assert adapter.state()["entropy/average"].item() == pytest.approx(first, rel=1e-5)
    adapter(image_of([0.9, 0.05, 0.04, 0.01]))
    expected = 0.9 * first + 0.1 * second
    assert adapter.state()["entropy/average"].item() == pytest.approx(expected, rel=1e-5)


def test_told_never_to_recover_it_does_not():
    adapter = given(recover_below=0.0)
    for _ in range(3):
        adapter(image_of([0.9997, 0.0001, 0.0001, 0.0001]))
        assert adapter.last.adapted
    assert adapter.state()["recoveries"].item() == 0


# --- step size -------------------------------------------------------------------------------


def step_of(batch: int, **settings) -> Tensor:
    """How far the weight goes on ``batch`` copies of one image, whose mean gradient is its own."""
    adapter = given(**settings)
    adapter(image_of(*[SURE] * batch))
    assert adapter.last.adapted
    return adapter.optimiser.weights["norm.weight"].detach() - 1


def test_a_small_batch_takes_a_step_in_proportion():
    settings = {"lr": 10.0}  # so that a step is not lost beside the weight's 1
    whole = step_of(64, **settings)
    assert whole.abs().max() > 0.1
    for batch, share in ((1, 1 / 16), (2, 1 / 16), (16, 1 / 2), (32, 1.0), (128, 1.0)):
        torch.testing.assert_close(step_of(batch, **settings), share * whole, rtol=1e-3, atol=1e-5)


def test_with_another_batch_to_measure_by_steps_are_in_proportion_to_that():
    whole = step_of(64, lr=10.0)
    torch.testing.assert_close(step_of(4, lr=10.0, lr_batch=64), whole / 16, rtol=1e-3, atol=1e-5)


def test_in_segmentation_a_single_image_takes_a_whole_step():
    net = sharp(Segmenter)
    one, whole = (bestta.adapt(net, method="sar", **s) for s in ({}, {"lr_batch": 1}))
    small = bestta.adapt(net, method="sar", lr_batch=64)
    image = stream(1, seed=6, size=8)[0]
    for adapter in (one, whole, small):
        adapter(image)
    assert same(one.state(), whole.state())
    assert not same(one.state(), small.state())


# --- which norms -----------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "trained"), [(1, 1), (3, 3), (4, 3), (7, 6), (8, 6), (53, 40)])
def test_the_last_quarter_of_the_norms_rounded_down_is_left_out(count, trained):
    model = nn.Sequential(*[nn.GroupNorm(1, 3) for _ in range(count)], nn.Flatten(1)).eval()
    adapter = bestta.adapt(model, method="sar")
    names = [f"{i}.{kind}" for i in range(trained) for kind in ("weight", "bias")]
    assert list(adapter.trainable) == names


def test_one_norm_is_always_trained():
    net = sharp(Segmenter)
    assert set(bestta.adapt(net, method="sar", frozen_share=0.99).trainable) == {
        "layer1.1.weight",
        "layer1.1.bias",
    }
    assert len(bestta.adapt(net, method="sar", frozen_share=0.0).trainable) == 8


def test_norms_without_parameters_are_not_counted():
    norms = [nn.GroupNorm(1, 3), *[nn.GroupNorm(1, 3, affine=False) for _ in range(4)]]
    model = nn.Sequential(*norms, nn.GroupNorm(1, 3), nn.Flatten(1)).eval()
    adapter = bestta.adapt(model, method="sar")
    assert {name.split(".")[0] for name in adapter.trainable} == {"0", "5"}


@pytest.mark.parametrize(
    ("layers", "trained"),
    [
        (("layer4",), {"layer4.1"}),
        ("layer2.1", {"layer2.1"}),
        (["layer1", "layer4.1"], {"layer1.1", "layer4.1"}),
    ],
)
def test_layers_name_the_norms_to_train(layers, trained):
    adapter = bestta.adapt(sharp(Segmenter), method="sar", layers=layers)
    assert {name.rpartition(".")[0] for name in adapter.trainable} == trained


@pytest.mark.parametrize("layer", ["layer", "layer1.0", "head"])
def test_a_layer_without_norms_is_an_error_that_lists_them(layer):
    with pytest.raises(ValueError, match=rf"'{layer}'.*There are: layer1.1, layer2.1, layer3.1"):
        bestta.adapt(sharp(Segmenter), method="sar", layers=("layer2", layer))


def test_norms_left_out_take_the_batchs_statistics_all_the_same():
    net = sharp(Segmenter)
    adapter = bestta.adapt(net, method="sar", frozen_share=0.9)
    image = stream(1, seed=6, batch=2, size=8, shift=1.0)[0]
    with torch.no_grad():
        expected = Oracle(net, []).net(image)
    torch.testing.assert_close(adapter(image), expected)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(1)), r"Sequential has none\. These do"),
        (nn.Sequential(nn.InstanceNorm2d(3, affine=True)), r"has none \(it has InstanceNorm2d\)"),
        (nn.Sequential(nn.GroupNorm(1, 3, affine=False)), "affine=False"),
    ],
)
def test_a_model_without_norms_to_train_is_told_so(model, words):
    with pytest.raises(ValueError, match=words):
        bestta.adapt(model.eval(), method="sar", preset="classification")
    assert all(p.requires_grad for p in model.parameters())


# --- settings and state ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rho": -0.1}, "rho must lie in"),
        ({"margin": float("nan")}, "margin must lie in"),
        ({"lr_batch": 0}, "lr_batch must be a whole number"),
        ({"momentum": 1.0}, "momentum must lie in"),
        ({"frozen_share": 1.0}, "frozen_share must lie in"),
        ({"recover_below": -1}, "recover_below must lie in"),
        ({"decay": 1.0}, "decay must lie in"),
        ({"prior": -1.0}, "prior must lie in"),
    ],
)
def test_a_bad_setting_says_what_would_be_right(settings, words):
    with pytest.raises(ValueError, match=words):
        bestta.adapt(sharp(Classifier), method="sar", **settings)


@pytest.mark.parametrize("build", NORMS)
def test_it_goes_on_exactly_from_a_saved_state_and_leaves_the_model_alone(build, tmp_path):
    net = sharp(build)
    before, images = snapshot(net), stream(5, seed=6, batch=4, size=8)
    whole, first, second = (bestta.adapt(net, method="sar") for _ in range(3))
    start, expected = whole.state(), [whole(image) for image in images]
    for image in images[:2]:
        first(image)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    rest = [second(image) for image in images[2:]]
    assert all(torch.equal(a, b) for a, b in zip(expected[2:], rest, strict=True))
    assert same(whole.state(), second.state())
    assert not same(start, whole.state())
    whole.reset()
    assert same(start, whole.state())
    assert same(before, snapshot(net))
    assert all(p.grad is None for p in net.parameters())
