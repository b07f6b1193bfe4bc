"""TENT against an unfused transcription of the published update."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import bestta
from bestta.adapters.batchnorm import batch_norms
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream

NETS = {"classifier": Classifier, "segmenter": Segmenter}


@pytest.fixture(params=NETS)
def model(request) -> nn.Module:
    return randomise(NETS[request.param](), seed=1)


class Published:
    """TENT as its paper has it: the model itself is changed, by PyTorch's own means.

    Batch norms train and forget their running statistics; weight and bias descend by Adam along
    the mean of −Σ p log p; the prediction is the one the gradient was taken from.
    """

    def __init__(self, model: nn.Module, lr: float = 1e-3, betas=(0.9, 0.999)) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        parameters = []
        for norm in batch_norms(self.model).values():
            norm.train()
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = None
            norm.requires_grad_(True)
            parameters += [norm.weight, norm.bias]
        self.optimiser = torch.optim.Adam(parameters, lr=lr, betas=betas)

    def __call__(self, image: Tensor) -> Tensor:
        logits = self.model(image)
        self.entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        self.entropy.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return logits.detach()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"lr": 0.01, "beta1": 0.5, "beta2": 0.9}])
def test_updates_are_those_of_the_published_method(model, batch, settings):
    adapter = bestta.adapt(model, method="tent", **settings)
    betas = settings.get("beta1", 0.9), settings.get("beta2", 0.999)
    published = Published(model, settings.get("lr", 1e-3), betas)
    for image in stream(4, seed=2, batch=batch, shift=1.0):
        torch.testing.assert_close(adapter(image), published(image), rtol=1e-4, atol=1e-5)
        assert adapter.last.losses["entropy"] == pytest.approx(published.entropy.item(), rel=1e-5)
        for name, weight in adapter.trainable.items():
            torch.testing.assert_close(
                weight, published.model.get_parameter(name), rtol=1e-4, atol=1e-6
            )


def test_the_first_step_moves_every_weight_by_the_published_size(model):
    # Adam's first step is lr · g / (|g| + 1e-8), whatever the gradient: 0.001 as published.
    adapter = bestta.adapt(model, method="tent")
    before = adapter.state()
    adapter(stream(1, seed=2, batch=4)[0])
    for name, weight in adapter.trainable.items():
        moved = (weight.detach() - before[name]).abs()
        # A channel that the activation cuts off has no gradient, and one next to it a tiny one.
        assert bool((moved < 1.01e-3).all())
        assert moved.max().item() == pytest.approx(1e-3, rel=1e-2)


def test_the_prediction_is_from_before_the_update(model):
    fast, still = (bestta.adapt(model, method="tent", lr=lr) for lr in (0.5, 0.0))
    first, second = stream(2, seed=2, batch=4)
    assert torch.equal(fast(first), still(first))
    assert not torch.equal(fast(second), still(second))


def test_every_weight_and_bias_of_batch_norms_is_trained_and_nothing_else(model):
    norms = batch_norms(model)
    adapter = bestta.adapt(model, method="tent")
    expected = {f"{name}.{kind}" for name in norms for kind in ("weight", "bias")}
    assert set(adapter.trainable) == expected
    assert set(adapter.tensors()) == expected | {
        f"{name}/{moment}" for name in expected for moment in ("steps", "mean", "square")
    }


def test_a_source_that_counts_infinitely_leaves_its_statistics(model):
    # Expected: Adam along the entropy of the model in eval mode.
    adapter = bestta.adapt(model, method="tent", prior=math.inf)
    twin = copy.deepcopy(model).requires_grad_(False)
    parameters = [twin.get_parameter(name).requires_grad_() for name in adapter.trainable]
    adam = torch.optim.Adam(parameters, lr=1e-3)
    for image in stream(3, seed=2, batch=2, shift=1.0):
        logits = twin(image)
        (-(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()).backward()
        adam.step()
        adam.zero_grad()
        torch.testing.assert_close(adapter(image), logits.detach())


def test_a_prior_of_a_batchs_size_is_halfway(model):
    image = stream(1, seed=2, batch=4)[0]
    half = bestta.adapt(model, method="tent", prior=4)(image)
    torch.testing.assert_close(half, bestta.adapt(model, method="alpha_bn", weight=0.5)(image))


def test_entropy_falls_where_it_is_descended_along(model):
    adapter = bestta.adapt(model, method="tent", lr=0.01)
    image, entropies = stream(1, seed=2, batch=4)[0], []
    for _ in range(10):
        adapter(image)
        entropies.append(adapter.last.losses["entropy"])
    assert entropies == sorted(entropies, reverse=True)
    assert entropies[-1] < 0.98 * entropies[0]


def test_a_domain_change_is_nothing_to_tent_and_a_new_start_to_its_starred_form(model):
    tent, starred = (bestta.adapt(model, method=m) for m in ("tent", "tent_reset"))
    assert (tent.needs_domain_changes, starred.needs_domain_changes) == (False, True)
    start, images = starred.state(), stream(3, seed=2, batch=2)
    first = [starred(image) for image in images]
    assert all(torch.equal(tent(x), y) for x, y in zip(images, first, strict=True))
    learned = tent.state()
    assert same(learned, starred.state())
    tent.domain_changed()
    starred.domain_changed()
    assert same(learned, tent.state())
    assert same(start, starred.state())
    assert starred.images_seen == 0
    assert all(torch.equal(starred(x), y) for x, y in zip(images, first, strict=True))


def test_a_state_of_another_model_or_shape_is_refused_and_changes_nothing(model, tmp_path):
    adapter = bestta.adapt(model, method="tent")
    adapter(stream(1, seed=2, batch=2)[0])
    state = adapter.state()
    name = next(iter(adapter.trainable))
    for broken, words in (
        ({**state, name: torch.zeros(77)}, r"is \(77,\), expected"),
        ({**state, "more": torch.zeros(1)}, "nothing of that name"),
        ({k: v for k, v in state.items() if k != name}, "is missing"),
        ({**state, name: state[name] * math.nan}, f"damaged: {name}"),
    ):
        with pytest.raises(ValueError, match=words):
            adapter.load_state(broken)
        assert same(state, adapter.state())
    bestta.adapt(randomise(type(model)(), seed=9), method="tent").save(tmp_path / "other")
    with pytest.raises(ValueError, match="other weights"):
        adapter.load(tmp_path / "other")
    assert same(state, adapter.state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_is_not_lost_in_half_precision(dtype):
    # A weight near 1 cannot be moved by 0.0001 in either; it must gather over steps.
    model = randomise(Classifier(), seed=1).to(dtype)
    adapter = bestta.adapt(model, method="tent", lr=1e-4)
    for image in stream(5, seed=2, batch=4):
        adapter(image.to(dtype))
        assert adapter.last.adapted
    moved = [
        (weight.detach() - model.get_parameter(name).float()).abs().max().item()
        for name, weight in adapter.trainable.items()
    ]
    assert min(moved) > 1e-4


def test_batch_norms_without_weights_are_an_error_that_says_so():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)).eval()
    with pytest.raises(ValueError, match=r"trains the weights and biases.*affine=False"):
        bestta.adapt(model, method="tent")
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_without_batch_norms_is_told_what_would_work():
    with pytest.raises(ValueError, match=r"'tent_reset' works on batch norms.*LayerNorm.*sar"):
        bestta.adapt(TokenClassifier().eval(), method="tent_reset")


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": math.inf},
        {"lr": "fast"},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"prior": -1.0},
        {"prior": math.nan},
        {"prior": "much"},
    ],
)
def test_a_setting_that_makes_no_sense_is_named(settings):
    ((name, _),) = settings.items()
    with pytest.raises(ValueError, match=f"^{name} "):
        bestta.adapt(randomise(Classifier(), seed=1), method="tent", **settings)


def test_the_model_is_the_one_it_was_after_many_steps(model):
    before = snapshot(model)
    with bestta.adapt(model, method="tent", lr=0.1) as adapter:
        for image in stream(10, seed=2, batch=2):
            adapter(image)
    assert same(before, snapshot(model))
