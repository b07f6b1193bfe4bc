"""SGD and Adam of PyTorch, with a state that is there from the start and has names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Optimiser:
    """Moves weights by given gradients.

    The moments start at zero, where PyTorch would make them at the first step to the same effect:
    so they can be saved, restored and reset like any other tensor.

    Example:
        >>> weights = {"w": nn.Parameter(torch.ones(1))}
        >>> sgd = Optimiser.sgd(weights, lr=0.5, momentum=0.9)
        >>> for _ in range(2):
        ...     sgd.step({"w": torch.ones(1)})
        >>> round(weights["w"].item(), 6), sgd.tensors()["w/velocity"].item()
        (-0.45, 1.899999976158142)
    """

    def __init__(self, optimiser: torch.optim.Optimizer, weights: Mapping[str, nn.Parameter]):
        self.optimiser, self.weights = optimiser, weights

    @classmethod
    def adam(
        cls,
        weights: Mapping[str, nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> Optimiser:
        """Adam (Kingma and Ba, 2015)."""
        adam = torch.optim.Adam(weights.values(), lr=lr, betas=betas)
        for weight in weights.values():
            adam.state[weight] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        return cls(adam, weights)

    @classmethod
    def sgd(
        cls, weights: Mapping[str, nn.Parameter], lr: float, momentum: float = 0.0
    ) -> Optimiser:
        """Gradient descent with momentum."""
        sgd = torch.optim.SGD(weights.values(), lr=lr, momentum=momentum)
        if momentum:
            for weight in weights.values():
                sgd.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
        return cls(sgd, weights)

    def step(self, gradients: Mapping[str, Tensor], lr: float | None = None) -> None:
        """One step along ``gradients``, of another size than usual if ``lr`` is given."""
        usual = [group["lr"] for group in self.optimiser.param_groups]
        try:
            for name, weight in self.weights.items():
                weight.grad = gradients[name]
            for group in self.optimiser.param_groups:
                group["lr"] = group["lr"] if lr is None else lr
            self.optimiser.step()
        finally:
            self.optimiser.zero_grad(set_to_none=True)
            for group, rate in zip(self.optimiser.param_groups, usual, strict=True):
                group["lr"] = rate

    @torch.no_grad()
    def forget(self) -> None:
        """Back to a state without history."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The moments themselves, by name of weight."""
        words = {
            "momentum_buffer": "velocity",
            "exp_avg": "mean",
            "exp_avg_sq": "square",
            "step": "steps",
        }
        return {
            f"{name}/{words[key]}": tensor
            for name, weight in self.weights.items()
            for key, tensor in self.optimiser.state[weight].items()
        }
