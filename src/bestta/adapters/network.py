"""The user's model as a function of an image and of weights.

A method that trains the model's own parameters, or has its batch norms count differently, works on
a skeleton of the model: a copy of its modules that holds the very same tensors. Nothing is copied
but Python objects, whatever is done to the skeleton is not done to the model, and several weights
(a student's, a teacher's, the source's) run through one skeleton.

What is changed later in the model's Python attributes, as opposed to its tensors, the skeleton does
not see: make the adapter when the model is as it shall be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from bestta.insertion import skeleton
from bestta.outputs import OutputKey, select_logits

Weights = Mapping[str, Tensor]


class Network:
    """``network(image, weights) → logits``: weights by the model's names, the rest the source's.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(1), nn.Linear(32, 5)).eval()
        >>> network = Network(model)
        >>> weights = network.weights(["2.bias"])
        >>> image = torch.rand(1, 3, 4, 4)
        >>> bool((network(image, weights) == model(image)).all())
        True
        >>> with torch.no_grad():
        ...     _ = weights["2.bias"].add_(1)
        >>> torch.allclose(network(image, weights), model(image) + 1)
        True
    """

    def __init__(self, model: nn.Module, output: OutputKey = None) -> None:
        self.module = skeleton(model)
        self.output = output
        self.running = False
        self.norms: Mapping[str, nn.Module] = {}
        """What does the work of its batch norms, by name, where something else does."""
        for module in self.module.modules():
            if isinstance(module, nn.DataParallel):
                raise ValueError(
                    "nn.DataParallel copies weights by itself and cannot be run with others: give "
                    "the model inside it, model.module."
                )
            computed = isinstance(module, ParametrizationList)  # runs whenever it is looked at
            if (module._parameters or is_parametrized(module)) and not computed:
                module.register_forward_pre_hook(self._check_running)
        self.source: dict[str, Tensor] = dict(model.named_parameters())
        """The source's own parameters, by name: never written to."""

    def __call__(self, image: Tensor, weights: Weights | None = None) -> Tensor:
        """The logits (B, K) or (B, K, H, W) of ``image`` under ``weights``."""
        torch.clear_autocast_cache()  # it would keep weights as they were before they learned
        cast = {name: w.to(self.source[name].dtype) for name, w in (weights or {}).items()}
        self.running = True
        try:
            return select_logits(functional_call(self.module, cast, (image,)), self.output)
        finally:
            self.running = False

    def _check_running(self, module: nn.Module, inputs: object) -> None:
        """Weights are in place during a forward alone: a backward must not run modules again."""
        if not self.running:
            raise ValueError(
                f"{type(module).__name__} was run again in the backward: this model recomputes its "
                "activations (torch.utils.checkpoint), by then with other weights. Turn that off."
            )

    def weights(self, names: Iterable[str] | None = None) -> dict[str, nn.Parameter]:
        """Copies of the source's parameters to train, by default of all of them.

        They are in fp32 at least: a step of a thousandth is lost in half precision.
        """
        if names is None:
            names = [name for name, p in self.source.items() if p.is_floating_point()]
        chosen = list(names)
        for name in chosen:
            if name not in self.source:
                raise ValueError(
                    f"no parameter is called {name!r}. There are: {', '.join(self.source)}."
                )
        return {name: nn.Parameter(self.copy_of(name)) for name in chosen}

    def copy_of(self, name: str) -> Tensor:
        """A copy of one of the source's parameters, in fp32 at least."""
        source = self.source[name].detach()
        return source.to(torch.promote_types(source.dtype, torch.float32), copy=True)


def gradients(loss: Tensor, weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradient of ``loss`` for each weight; zero for one that it does not depend on."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(weight) for name, weight in weights.items()}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {
        name: torch.zeros_like(weight) if gradient is None else gradient
        for (name, weight), gradient in zip(weights.items(), found, strict=True)
    }


@torch.no_grad()
def follow(average: Weights, weights: Weights, decay: float) -> None:
    """Move a teacher: ``average ← decay · average + (1 − decay) · weights``, in place."""
    for name, value in weights.items():
        average[name].lerp_(value, 1 - decay)


@torch.no_grad()
def assign(weights: Weights, values: Weights) -> None:
    """Set ``weights`` to ``values``, in place."""
    for name, weight in weights.items():
        weight.copy_(values[name])
