"""PETAL: CoTTA with a prior around the source, forgetting by gradient (Brahma and Rai, 2023).

"A Probabilistic Framework for Lifelong Test-Time Adaptation". Two things are added to `Cotta`:

- The source's training is summed up as a Gaussian over the weights, a mean and a variance for each
  (SWAG's diagonal), and the student pays for leaving it: ``½ Σ (θ − θ_SWA)² / (variance + 1e-6)``.
- Instead of weights drawn at random, those go back to the source whose squared gradient of the
  step's whole loss, the Fisher information of one batch, lies below its 0.03 quantile over all
  weights.

The Gaussian is learned by `SwagPreparation` from source images: a few passes of gradient descent
with momentum from the source on, collecting the weights as they go.

The quantile is the published one: sorted, at place ``0.03 · (n − 1)``, linear between neighbours,
and strictly below it. Absolute values are compared instead of squares: the same weights are chosen,
and no square is too small to count. Where so many gradients are exactly zero that the quantile is,
nothing lies below it and nothing goes back, as published.

Deviations: student, teacher and anchor start from the model as it is; the published program starts
them from θ_SWA. It collects four snapshots, one per epoch, with weight decay, a step size that
rises to 0.01, and batch norms in training; here weights are collected after each step (or as often
as said), at one small step size, and batch norms keep the source's statistics.
Choice: published for classification alone. In segmentation the same is added to what CoTTA does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bestta.adapters.cotta import Cotta, CottaConfig
from bestta.adapters.network import Network, Weights, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.preparation import Preparation, source_loss
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import at_least_one, not_negative, within

DAMPING = 1e-6
"""Added to the variance: a weight that never moved may still move a little."""
MOMENTUM = 0.9
"""Of the gradient descent on source images."""


@dataclass(frozen=True, kw_only=True)
class PetalConfig(CottaConfig):
    """Settings of PETAL: CoTTA's, and these."""

    prior_weight: float = 1e-9
    """Weight of the Gaussian around the source in the loss; it has nothing to do with ``prior``."""
    restore_quantile: float = 0.03
    """The share of all numbers, those of the smallest gradients, that goes back to the source."""
    restore_probability: float = 0.0
    """CoTTA's random restoring, beside: 0.01 with ``restore_quantile=0`` is the paper's S-Res."""
    swag_lr: float = 8e-4
    """Step size on source images: that at which the published run begins, the last of the source's
    own training. It shall wander around where it is, and not leave."""
    swag_epochs: int = 5
    """How often the source images are gone through."""
    swag_every: int = 1
    """Weights are collected after each so many steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "prior_weight", "swag_lr")
        within(self, 0, 1, "restore_quantile")
        at_least_one(self, "swag_epochs", "swag_every")


class SwagPreparation(Preparation):
    """Mean and variance of the weights on a walk around the source's."""

    config: PetalConfig
    reads = ("swag_lr", "swag_epochs", "swag_every", "output")

    def __init__(self, model: nn.Module, config: PetalConfig) -> None:
        super().__init__(model, config)
        self.epochs = self.config.swag_epochs
        self.network = Network(model, self.config.output)
        self.weights = self.network.weights()
        self.optimiser = Optimiser.sgd(self.weights, self.config.swag_lr, MOMENTUM)
        self.mean = {name: torch.zeros_like(w.detach()) for name, w in self.weights.items()}
        self.spread = {name: torch.zeros_like(w.detach()) for name, w in self.weights.items()}
        self.steps, self.collected = torch.tensor(0), torch.tensor(0)

    def see(self, image: Tensor, label: Tensor | None) -> float:
        """One step along the source's loss; the weights are collected."""
        loss = source_loss(self.network(image, self.weights), label)
        self.optimiser.step(gradients(loss, self.weights))
        self.steps += 1
        if int(self.steps) % self.config.swag_every == 0:
            self.collect()
        return loss.item()

    @torch.no_grad()
    def collect(self) -> None:
        """Move the moments (Welford, 1962: squares of large numbers are never subtracted)."""
        self.collected += 1
        for name, weight in self.weights.items():
            before = weight - self.mean[name]
            self.mean[name] += before / int(self.collected)
            self.spread[name] += before * (weight - self.mean[name])

    def tensors(self) -> dict[str, Tensor]:
        """The walk, the moments, and how far they are."""
        return {
            **{f"weights/{name}": weight for name, weight in self.weights.items()},
            **{f"optimiser/{name}": moment for name, moment in self.optimiser.tensors().items()},
            **{f"mean/{name}": mean for name, mean in self.mean.items()},
            **{f"spread/{name}": spread for name, spread in self.spread.items()},
            "steps": self.steps,
            "collected": self.collected,
        }

    def result(self) -> dict[str, Tensor]:
        """Mean and variance of each weight."""
        if not int(self.collected):
            raise ValueError(
                f"no weights were collected: swag_every={self.config.swag_every}, and there were "
                f"only {int(self.steps)} batches in all. Give more, or a smaller swag_every."
            )
        spread = {name: value / int(self.collected) for name, value in self.spread.items()}
        return {
            **{f"mean/{name}": mean for name, mean in self.mean.items()},
            **{f"variance/{name}": value.clamp(min=0) for name, value in spread.items()},
        }


@register_adapter("petal")
class Petal(Cotta):
    """CoTTA, held by a Gaussian around the source, restoring by the size of gradients."""

    Config = PetalConfig
    Preparation = SwagPreparation
    config: PetalConfig

    def prepare(self) -> None:
        """CoTTA's networks, and the Gaussian."""
        learned = self.prepared(without="Method 'cotta' does without.")
        super().prepare()
        self.mean = {name: learned[f"mean/{name}"] for name in self.student}
        self.variance = {name: learned[f"variance/{name}"] for name in self.student}

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """CoTTA's loss, and what leaving the source costs."""
        loss = super().total(losses)
        if self.config.prior_weight == 0:
            return loss
        losses["prior"] = self.distance_to_source()
        return loss + self.config.prior_weight * losses["prior"]

    def distance_to_source(self) -> Tensor:
        """``½ Σ (θ − θ_SWA)² / (variance + 1e-6)`` over all of the student's numbers."""
        distances = [
            ((weight - self.mean[name]) ** 2 / (self.variance[name] + DAMPING)).sum()
            for name, weight in self.student.items()
        ]
        return 0.5 * torch.stack(distances).sum()

    @torch.no_grad()
    def restore_student(self, slopes: Weights) -> None:
        """Set the numbers back to the source's whose gradients were the smallest."""
        super().restore_student(slopes)
        if self.config.restore_quantile == 0:
            return
        sizes = {name: slope.abs() for name, slope in slopes.items()}
        # A weight that the answer does not depend on (an auxiliary head's) has no gradient to rank.
        ranked = [size.flatten() for size in sizes.values() if bool(size.any())]
        if not ranked:
            return
        threshold = quantile(torch.cat(ranked), self.config.restore_quantile)
        for name, size in sizes.items():
            self.back_to_source(name, size < threshold)


def quantile(values: Tensor, share: float) -> Tensor:
    """The ``share`` quantile of (N,), linear between neighbours; of any number of values.

    >>> quantile(torch.tensor([4.0, 0.0, 1.0, 2.0, 3.0]), 0.3)
    tensor(1.2000)
    """
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    # torch.quantile ends at 16 million values.
    low, high = (values.kthvalue(rank + 1).values for rank in (below, above))
    return low + (high - low) * (place - below)
