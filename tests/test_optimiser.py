"""The optimisers against PyTorch's own, and what becomes of their state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import bestta
from bestta.adapters.base import is_finite
from bestta.adapters.optimiser import Optimiser
from nets import same

Weights = dict[str, nn.Parameter]
Build = Callable[[Weights], Optimiser]

OURS: dict[str, Build] = {
    "adam": lambda w: Optimiser.adam(w, lr=0.1),
    "adam, other decays": lambda w: Optimiser.adam(w, 0.01, (0.5, 0.9)),
    "sgd": lambda w: Optimiser.sgd(w, lr=0.1),
    "sgd with momentum": lambda w: Optimiser.sgd(w, lr=0.1, momentum=0.9),
}
TORCHS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam, other decays": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.9)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.fixture(params=OURS)
def kind(request) -> str:
    return request.param


def fresh(dtype: torch.dtype = torch.float32) -> Weights:
    draw = torch.Generator().manual_seed(1)
    shapes = {"a.weight": (3, 2), "a.bias": (3,), "scale": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
        for name, shape in shapes.items()
    }


def slopes(turn: int, weights: Weights) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 + turn)
    return {n: torch.randn(w.shape, generator=draw).to(w.dtype) for n, w in weights.items()}


def walk(optimiser: Optimiser, turns: range) -> None:
    for turn in turns:
        optimiser.step(slopes(turn, optimiser.weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_takes_the_steps_of_pytorchs_own(kind, dtype):
    ours, theirs = fresh(dtype), fresh(dtype)
    optimiser, other = OURS[kind](ours), TORCHS[kind](theirs.values())
    for turn in range(5):
        optimiser.step(slopes(turn, ours))
        for name, slope in slopes(turn, theirs).items():
            theirs[name].grad = slope
        other.step()
        assert same(dict(ours), dict(theirs)), turn


def test_the_state_is_there_from_the_start_and_stays_the_same_tensors(kind):
    optimiser = OURS[kind](fresh())
    before = optimiser.tensors()
    walk(optimiser, range(3))
    after = optimiser.tensors()
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert {name.split("/")[0] for name in before} == (set() if kind == "sgd" else set(fresh()))


def test_from_saved_tensors_it_goes_on_identically(kind):
    whole, first = OURS[kind](fresh()), OURS[kind](fresh())
    walk(whole, range(6))
    walk(first, range(3))
    saved = {name: tensor.detach().clone() for name, tensor in first.tensors().items()}
    weights = {name: weight.detach().clone() for name, weight in first.weights.items()}
    second = OURS[kind](fresh())
    walk(second, range(40, 44))  # something else before
    with torch.no_grad():
        for name, tensor in second.tensors().items():
            tensor.copy_(saved[name])
        for name, weight in second.weights.items():
            weight.copy_(weights[name])
    walk(second, range(3, 6))
    assert same(dict(whole.weights), dict(second.weights))
    assert same(whole.tensors(), second.tensors())


def test_after_forgetting_it_is_as_fresh(kind):
    ours = OURS[kind](fresh())
    walk(ours, range(3))
    ours.forget()
    new = OURS[kind]({n: nn.Parameter(w.detach().clone()) for n, w in ours.weights.items()})
    assert same(ours.tensors(), new.tensors())
    walk(ours, range(3, 6))
    walk(new, range(3, 6))
    assert same(dict(ours.weights), dict(new.weights))


def test_another_step_size_is_for_one_step(kind):
    # Expected: PyTorch's optimiser with its group's rate set for the second of three steps.
    ours, theirs = fresh(), fresh()
    optimiser, other = OURS[kind](ours), TORCHS[kind](theirs.values())
    usual = other.param_groups[0]["lr"]
    for turn, rate in enumerate((None, 0.5, None)):
        optimiser.step(slopes(turn, ours), lr=rate)
        for name, slope in slopes(turn, theirs).items():
            theirs[name].grad = slope
        other.param_groups[0]["lr"] = rate or usual
        other.step()
    assert same(dict(ours), dict(theirs))


def test_a_step_of_size_0_moves_no_weight_but_the_moments():
    optimiser = Optimiser.adam(fresh(), lr=0.1)
    optimiser.step(slopes(0, optimiser.weights), lr=0.0)
    assert same(dict(optimiser.weights), dict(fresh()))
    assert optimiser.tensors()["scale/steps"].item() == 1


def test_the_usual_step_size_is_back_after_a_step_that_raised(kind):
    optimiser, spared = OURS[kind](fresh()), OURS[kind](fresh())
    incomplete = slopes(0, optimiser.weights)
    del incomplete["scale"]
    with pytest.raises(KeyError):
        optimiser.step(incomplete, lr=100.0)
    assert all(weight.grad is None for weight in optimiser.weights.values())
    walk(optimiser, range(3))
    walk(spared, range(3))
    assert same(dict(optimiser.weights), dict(spared.weights))


def test_no_gradient_is_left_on_the_weights(kind):
    optimiser = OURS[kind](fresh())
    walk(optimiser, range(2))
    assert all(weight.grad is None for weight in optimiser.weights.values())


class Believes(TorchFunctionMode):
    """Takes whatever is asked of a tensor without values for true."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is torch.Tensor.__bool__ and arguments[0].device.type == "meta":
            return True
        return function(*arguments, **(options or {}))


def test_numbers_of_two_devices_are_checked_together():
    """Adam counts its steps on the CPU, wherever the weights are; here they are nowhere."""
    with Believes():
        assert is_finite(torch.ones(2, device="meta"), torch.tensor(1.0))
        assert not is_finite(torch.ones(2, device="meta"), torch.tensor(float("nan")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_adam_steps_where_the_weights_are_on_cuda():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).cuda().eval()
    adapter = bestta.adapt(model, method="tent")
    for _ in range(2):
        adapter(torch.randn(2, 3, 8, 8))
        assert adapter.last.adapted
