"""The methods that only look at statistics: BN Stats, α-BN and BN-EMA."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import bestta
from bestta.adapters.batchnorm import batch_norms
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, stream

NETS = {"classifier": Classifier, "segmenter": Segmenter}


@pytest.fixture(params=NETS)
def model(request) -> nn.Module:
    return randomise(NETS[request.param](), seed=1)


def looking_at_the_batch(model: nn.Module) -> nn.Module:
    """A copy whose batch norms are in training mode."""
    model = copy.deepcopy(model)
    for norm in batch_norms(model).values():
        norm.train()
    return model


class Mixes(nn.Module):
    """α-BN's layer written out: λ · source + (1 − λ) · batch, means and variances."""

    def __init__(self, norm: nn.BatchNorm2d, own: float) -> None:
        super().__init__()
        self.norm, self.own = norm, own

    def forward(self, x: Tensor) -> Tensor:
        mean = self.own * x.mean((0, 2, 3)) + (1 - self.own) * self.norm.running_mean
        variance = (
            self.own * x.var((0, 2, 3), correction=0) + (1 - self.own) * self.norm.running_var
        )
        mean, variance, weight, bias = (
            v.view(1, -1, 1, 1) for v in (mean, variance, self.norm.weight, self.norm.bias)
        )
        return (x - mean) / (variance + self.norm.eps).sqrt() * weight + bias


def mixing(model: nn.Module, own: float) -> nn.Module:
    model = copy.deepcopy(model)
    for name, norm in batch_norms(model).items():
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)[int(child)] = Mixes(norm, own)
    return model


# --- BN Stats -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_bn_stats_is_the_model_with_batch_norms_in_training_mode(model, batch):
    adapter = bestta.adapt(model, method="bn_stats")
    for image in stream(3, seed=2, batch=batch, shift=1.0):
        torch.testing.assert_close(adapter(image), looking_at_the_batch(model)(image).detach())
    assert adapter.state() == {}
    assert not adapter.last.adapted
    assert adapter.last.reason


def test_bn_stats_remembers_nothing(model):
    adapter = bestta.adapt(model, method="bn_stats")
    first, *others = stream(4, seed=2, batch=2)
    before = adapter(first)
    for image in others:
        adapter(image * 5)
    assert torch.equal(adapter(first), before)


# --- α-BN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "own"), [(1, 1 / 9), (4, 1 / 3), (8, 1 / 2)])
def test_a_source_of_eight_images_is_the_default(model, batch, own):
    image = stream(1, seed=2, batch=batch, shift=1.0)[0]
    ours = bestta.adapt(model, method="alpha_bn")(image)
    torch.testing.assert_close(ours, mixing(model, own)(image).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("prior", "batch", "own"), [(1.0, 1, 0.5), (16, 4, 0.2), (0.0, 3, 1.0)])
def test_the_prior_is_counted_in_images(model, prior, batch, own):
    image = stream(1, seed=2, batch=batch, shift=1.0)[0]
    ours = bestta.adapt(model, method="alpha_bn", prior=prior)(image)
    torch.testing.assert_close(ours, mixing(model, own)(image).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_fixed_weight_does_not_ask_for_the_batch_size(model, batch):
    image = stream(1, seed=2, batch=batch, shift=1.0)[0]
    ours = bestta.adapt(model, method="alpha_bn", weight=0.3)(image)
    torch.testing.assert_close(ours, mixing(model, 0.3)(image).detach(), rtol=1e-4, atol=1e-5)


def test_all_weight_on_the_batch_is_bn_stats_and_none_is_the_source(model):
    all_of_it, stats, none, source = (
        bestta.adapt(model, method=method, **settings)
        for method, settings in (
            ("alpha_bn", {"weight": 1.0}),
            ("bn_stats", {}),
            ("alpha_bn", {"weight": 0}),
            ("source", {}),
        )
    )
    endless = bestta.adapt(model, method="alpha_bn", prior=math.inf)
    for image in stream(3, seed=2, batch=2, shift=1.0):
        assert torch.equal(all_of_it(image), stats(image))
        assert torch.equal(none(image), source(image))
        assert torch.equal(endless(image), source(image))


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": -0.1},
        {"weight": 1.1},
        {"weight": math.nan},
        {"weight": "half"},
        {"prior": -1},
        {"prior": math.nan},
        {"prior": "eight"},
    ],
)
def test_a_setting_of_alpha_bn_that_makes_no_sense_is_named(settings):
    ((name, _),) = settings.items()
    with pytest.raises(ValueError, match=f"^{name} must "):
        bestta.adapt(randomise(Classifier(), seed=1), method="alpha_bn", **settings)


# --- BN-EMA -------------------------------------------------------------------------------------


def one_norm(mean: float = 0.0, variance: float = 1.0) -> nn.Sequential:
    """A batch norm of one channel, without weight or bias or eps: what it gives is x normalised."""
    model = nn.Sequential(nn.BatchNorm2d(1, eps=0.0, affine=False), nn.Identity()).eval()
    model[0].running_mean.fill_(mean)
    model[0].running_var.fill_(variance)
    return model


def batch(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, 1, 1, -1)


def test_three_batches_by_hand():
    # Momentum 0.5 from N(0, 1). Batches: (1, 3): mean 2, variance 1. (5, 5): 5, 0. (0, 4): 2, 4.
    # Mean: 1, 3, 2.5. Variance: 1, 0.5, 2.25. Each batch is normalised by what it has led to.
    adapter = bestta.adapt(one_norm(), method="bn_ema", momentum=0.5)
    torch.testing.assert_close(adapter(batch(1, 3)), batch(0, 2))
    torch.testing.assert_close(adapter(batch(5, 5)), batch(2, 2) / math.sqrt(0.5))
    torch.testing.assert_close(adapter(batch(0, 4)), batch(-2.5, 1.5) / 1.5)
    assert adapter.state()["0/mean"].item() == 2.5
    assert adapter.state()["0/variance"].item() == 2.25
    assert not adapter.last.adapted


def test_the_default_momentum_is_that_of_training():
    # PyTorch's own running mean, in training mode; its variance would divide by one less.
    model, images = one_norm(), [batch(1, 3), batch(5, 7), batch(-2, 4)]
    adapter, twin = bestta.adapt(model, method="bn_ema"), copy.deepcopy(model).train()
    twin[0].eps = 1.0  # training mode takes no 0; the running statistics know nothing of it
    for image in images:
        adapter(image)
        twin(image)
        torch.testing.assert_close(adapter.state()["0/mean"], twin[0].running_mean)
    # 0.9³ · 1 + 0.1 · (0.81 · 1 + 0.9 · 1 + 9), by hand.
    assert adapter.state()["0/variance"].item() == pytest.approx(0.729 + 1.071, rel=1e-6)


@pytest.mark.parametrize("size", [1, 4])
def test_it_is_the_model_with_statistics_moved_layer_by_layer(model, size):
    # Expected: a copy whose buffers are set, norm by norm, before each one runs.
    adapter, twin = bestta.adapt(model, method="bn_ema", momentum=0.2), copy.deepcopy(model)

    def move(norm: nn.BatchNorm2d, inputs: tuple[Tensor]) -> None:
        x = inputs[0].detach()
        norm.running_mean.mul_(0.8).add_(0.2 * x.mean((0, 2, 3)))
        norm.running_var.mul_(0.8).add_(0.2 * x.var((0, 2, 3), correction=0))

    for norm in batch_norms(twin).values():
        norm.register_forward_pre_hook(move)
    for image in stream(4, seed=2, batch=size, shift=1.0, scale=2.0):
        torch.testing.assert_close(adapter(image), twin(image).detach(), rtol=1e-4, atol=1e-5)


def test_momentum_0_is_the_source_and_1_is_bn_stats(model):
    still, source, all_of_it, stats = (
        bestta.adapt(model, method=method, **settings)
        for method, settings in (
            ("bn_ema", {"momentum": 0.0}),
            ("source", {}),
            ("bn_ema", {"momentum": 1.0}),
            ("bn_stats", {}),
        )
    )
    for image in stream(3, seed=2, batch=2, shift=1.0):
        assert torch.equal(still(image), source(image))
        torch.testing.assert_close(all_of_it(image), stats(image), rtol=1e-4, atol=1e-5)


def test_what_was_followed_is_put_back_saved_and_left_alone_while_paused(model, tmp_path):
    adapter = bestta.adapt(model, method="bn_ema")
    start, images = adapter.state(), stream(4, seed=2, shift=1.0)
    first = [adapter(image) for image in images[:2]]
    moved = adapter.state()
    assert not same(start, moved)
    with adapter.paused():
        adapter(images[2])
    assert same(moved, adapter.state())
    adapter.save(tmp_path / "state")
    rest = [adapter(image) for image in images[2:]]
    other = bestta.adapt(model, method="bn_ema")
    other.load(tmp_path / "state")
    assert all(torch.equal(other(x), y) for x, y in zip(images[2:], rest, strict=True))
    adapter.reset()
    assert same(start, adapter.state())
    assert all(torch.equal(adapter(x), y) for x, y in zip(images[:2], first, strict=True))


def test_a_step_that_fails_half_way_leaves_no_layer_moved():
    class Breaks(Classifier):
        def forward(self, image: Tensor) -> Tensor:
            features = self.layer1(image)  # its batch norm has followed by now
            if image.shape[0] == 3:
                raise RuntimeError("no batches of three")
            return self.fc(self.layer2(features).mean((2, 3)))

    adapter = bestta.adapt(randomise(Breaks(), seed=1), method="bn_ema")
    adapter(stream(1, seed=2, batch=2)[0])
    before = adapter.state()
    with pytest.raises(RuntimeError, match="no batches of three"):
        adapter(stream(1, seed=2, batch=3)[0])
    assert same(before, adapter.state())


def test_one_value_per_channel_moves_nothing():
    model = randomise(Classifier(), seed=1)
    adapter = bestta.adapt(model, method="bn_ema")
    before, image = adapter.state(), stream(1, seed=2, size=1)[0]
    assert torch.equal(adapter(image), model(image))
    assert same(before, adapter.state())


def test_batch_norms_without_source_statistics_have_none_to_follow():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    adapter, image = bestta.adapt(model, method="bn_ema"), stream(1, seed=2, batch=2)[0]
    torch.testing.assert_close(adapter(image), model(image))
    assert adapter.state() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_moves_gather_in_half_precision(dtype):
    # A constant stream: after 500 batches at 0.01 less than a hundredth of the way is left.
    model = one_norm().to(dtype)
    adapter = bestta.adapt(model, method="bn_ema", momentum=0.01)
    image = batch(0.0, 3.0).to(dtype)
    for _ in range(500):
        adapter(image)
    assert adapter.state()["0/mean"].item() == pytest.approx(1.5, rel=0.02)
    assert adapter.state()["0/variance"].item() == pytest.approx(2.25, rel=0.02)


@pytest.mark.parametrize("momentum", [-0.1, 1.1, math.nan, "slow"])
def test_a_momentum_that_makes_no_sense_is_named(momentum):
    with pytest.raises(ValueError, match=r"^momentum must lie in"):
        bestta.adapt(randomise(Classifier(), seed=1), method="bn_ema", momentum=momentum)


# --- all three ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["bn_stats", "alpha_bn", "bn_ema"])
def test_a_model_without_batch_norms_is_told_what_would_work(method):
    with pytest.raises(ValueError, match=f"{method!r} works on batch norms.*LayerNorm.*bestta"):
        bestta.adapt(TokenClassifier().eval(), method=method)


@pytest.mark.parametrize("method", ["bn_stats", "alpha_bn", "bn_ema"])
def test_a_domain_change_is_nothing_to_them(method):
    adapter = bestta.adapt(randomise(Classifier(), seed=1), method=method)
    adapter(stream(1, seed=2, batch=2)[0])
    before = adapter.state()
    adapter.domain_changed()
    assert same(before, adapter.state())
    assert adapter.images_seen == 2
