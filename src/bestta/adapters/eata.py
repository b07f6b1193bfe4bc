"""EATA: learn from reliable and new samples only, near the source (Niu et al., 2022).

"Efficient Test-Time Model Adaptation without Forgetting". Batch norms take the batch's statistics;
their weights and biases descend along the entropy of predictions, as in TENT, but not of all. A
sample is unreliable if its entropy is not below ``E0 = margin · ln K``. It is redundant if its
probabilities point where the average of those learned from so far points. What is left counts by
``exp(E0 − H)``, the surer the more. An anchor, ``β Σ F (θ − θ_source)²``, holds what matters on the
source: F is the Fisher information of source images under the model's own labels, learned
beforehand by ``bestta.prepare``. One step per batch; the prediction is that of before the step.

``fisher_weight=0`` is ETA: the filters without the anchor, and nothing to prepare. The defaults are
the published settings of CIFAR-10; those of ImageNet are ``redundancy=0.05, fisher_weight=2000,
optimiser="sgd", lr=2.5e-4, momentum=0.9``.

As published, F is the mean over batches of the squared gradient of a whole batch, so its size hangs
on that of the batches: single images give more than batches of 64, to which the published β belong.

Choice: in segmentation a pixel is a sample. The mean probabilities of street scenes are all alike:
decided by the image, every one after the first would be redundant.
Choice: the paper does not segment. The settings are those of CIFAR-10, whose 10 classes are closer
to the 19 of street scenes than 1000 are: among so many, most predictions point apart, and ε can be
as small as 0.05. Entropy and F are means over the pixels as over images, so β stays as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bestta.adapters.base import Adapter, AdapterConfig, StepReport, check_shapes
from bestta.adapters.batchnorm import batch_norm_weights, mixing_network, share_of_batch
from bestta.adapters.network import Network, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.preparation import Preparation, source_loss
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import at_least_one, not_negative, one_of, prior_strength, within
from bestta.lean import lean_entropy

AVERAGE = "average/probabilities"


@dataclass(frozen=True, kw_only=True)
class EataConfig(AdapterConfig):
    """Settings of EATA: those published for CIFAR-10, for both tasks."""

    margin: float = 0.4
    """A sample is reliable if its entropy is below so much of the greatest there is, ln K."""
    redundancy: float = 0.4
    """ε: a sample is new if the cosine of its probabilities to the average is below it. Beyond 1,
    all are. Once K classes are alike in the average, each has a cosine of ``1 / √K`` to it: with 6
    classes or fewer that is above 0.4, and nothing is new any more; take a greater ε then."""
    decay: float = 0.9
    """Of the average of probabilities."""
    fisher_weight: float = 1.0
    """β: weight of the anchor; 0 for none, which needs no preparation."""
    fisher_images: int = 2000
    """So many source images will do for the Fisher information."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """What takes the steps."""
    lr: float = 1e-3
    """Step size."""
    beta1: float = 0.9
    beta2: float = 0.999
    """Decays of Adam's moments."""
    momentum: float = 0.9
    """Of SGD."""
    prior: float = 0.0
    """The source's statistics count as so many images against the batch: 0 as published, infinity
    for the source's alone. The Fisher information is learned under the same."""

    def __post_init__(self) -> None:
        not_negative(self, "margin", "redundancy", "fisher_weight", "lr")
        within(self, 0, 1, "decay", "beta1", "beta2", "momentum")
        at_least_one(self, "fisher_images")
        one_of(self, "optimiser", "adam", "sgd")
        prior_strength(self, "prior")


def batch_network(model: nn.Module, config: EataConfig) -> tuple[Network, dict[str, nn.Parameter]]:
    """The model with batch norms that look at the batch, and copies of their parameters."""
    names = batch_norm_weights(model, Eata.name)
    network = mixing_network(model, config.output, share_of_batch(config.prior))
    return network, network.weights(names)


class FisherPreparation(Preparation):
    """The diagonal Fisher information of the trained parameters, on source images.

    The labels are the model's own, under the statistics of each batch as in the step; given ones
    are ignored, as published.
    """

    config: EataConfig
    uses_labels = False
    reads = ("prior", "fisher_images", "output")

    def __init__(self, model: nn.Module, config: EataConfig) -> None:
        super().__init__(model, config)
        self.enough = config.fisher_images
        self.network, self.weights = batch_network(model, config)
        self.squares = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.batches = torch.zeros((), dtype=torch.int64)

    def settings(self) -> dict[str, Any]:
        """What F was learned under, and holds for."""
        return {"prior": self.config.prior}

    def see(self, image: Tensor, label: Tensor | None) -> float:
        """Add the squared gradient of a batch; the loss is the cross entropy."""
        loss = source_loss(self.network(image, self.weights), None)
        for name, gradient in gradients(loss, self.weights).items():
            self.squares[name] += gradient**2
        self.batches += 1
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        """The sums so far, and of how many batches."""
        return {
            **{f"squares/{name}": square for name, square in self.squares.items()},
            "batches": self.batches,
        }

    def result(self) -> dict[str, Tensor]:
        """F of each parameter, by its name: the mean over the batches."""
        return {name: square / self.batches.item() for name, square in self.squares.items()}


@register_adapter("eata")
class Eata(Adapter):
    """Entropy minimisation on reliable, new samples, anchored by the Fisher information."""

    Config = EataConfig
    config: EataConfig
    Preparation = FisherPreparation
    state_settings = ("optimiser",)

    def prepare(self) -> None:
        """Have batch norms look at the batch; copy their parameters; fetch their Fisher."""
        config = self.config
        self.network, self.weights = batch_network(self.model, config)
        self.fisher: Mapping[str, Tensor] = {}
        if config.fisher_weight > 0:
            self.fisher = self.prepared(
                "Or fisher_weight=0, which is ETA: the filters without the anchor."
            )
            self.check_prior()
        if config.optimiser == "adam":
            betas = (config.beta1, config.beta2)
            self.optimiser = Optimiser.adam(self.weights, config.lr, betas)
        else:
            self.optimiser = Optimiser.sgd(self.weights, config.lr, config.momentum)
        self.average: Tensor | None = None

    def check_prior(self) -> None:
        """Raise a ValueError if F was learned under other statistics than it is used with."""
        then = self.profile.settings.get(self.name, {}).get("prior") if self.profile else None
        if then is not None and then != self.config.prior:
            raise ValueError(
                f"the Fisher information was learned with prior={then}, and this adapter has "
                f"prior={self.config.prior}: prepare anew with that, or leave it as it was."
            )

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Weight and bias of every batch norm."""
        return self.weights

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict, choose samples, and descend along their weighted entropy and the anchor."""
        logits = self.network(image, self.weights)
        uncertainty = lean_entropy(logits)
        probabilities = probabilities_of(logits)
        ceiling = self.config.margin * math.log(logits.shape[1])

        reliable = uncertainty.detach() < ceiling
        kept = reliable & self.is_new(probabilities)
        if not bool(kept.any()):
            which = "no reliable sample is new" if bool(reliable.any()) else "no sample is reliable"
            return logits, StepReport(reason=which)
        self.remember(probabilities[kept])

        losses = {"entropy": weighted_entropy(uncertainty[kept], ceiling)}
        total = losses["entropy"]
        if self.fisher:
            losses["fisher"] = self.distance_from_source()
            total = total + self.config.fisher_weight * losses["fisher"]
        self.optimiser.step(gradients(total, self.weights))
        losses["total"] = total
        return logits, StepReport(adapted=True, losses={k: v.item() for k, v in losses.items()})

    def is_new(self, probabilities: Tensor) -> Tensor:
        """Which samples (..., K) point elsewhere than the average; all, before there is one."""
        if self.average is None:
            return torch.ones_like(probabilities[..., 0], dtype=torch.bool)
        average = self.average.to(probabilities.dtype)
        lengths = ((probabilities**2).sum(-1) * (average**2).sum()).sqrt()
        # Never negative, as probabilities are: the paper's absolute value changes nothing.
        return (probabilities * average).sum(-1) / lengths < self.config.redundancy

    def remember(self, probabilities: Tensor) -> None:
        """Take the mean of the samples learned from, (N, K), into the average."""
        mean = probabilities.mean(0)
        if self.average is None:
            self.average = mean
        else:
            self.average = mean.to(self.average.dtype).lerp(self.average, self.config.decay)

    def distance_from_source(self) -> Tensor:
        """``Σ F (θ − θ_source)²``."""
        terms = [
            (self.fisher[name] * (weight - self.network.source[name].detach()) ** 2).sum()
            for name, weight in self.weights.items()
        ]
        return torch.stack(terms).sum()

    def tensors(self) -> dict[str, Tensor]:
        """The weights, and the optimiser's moments."""
        return {**self.weights, **self.optimiser.tensors()}

    def state(self) -> dict[str, Tensor]:
        """Those, and the average of probabilities once there is one."""
        state = super().state()
        return state if self.average is None else {**state, AVERAGE: self.average.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a copy."""
        super().restore(state)
        average = state.get(AVERAGE)
        self.average = None if average is None else average.to(self.device, copy=True)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Weights and moments must fit; an average, if there, has one number per class."""
        super().check_state(state)
        needed = {name: tensor.shape for name, tensor in self.tensors().items()}
        average = self.average
        if average is None:  # how many classes there are is not known yet
            average = state.get(AVERAGE, torch.empty(0)).flatten()
        check_shapes(state, needed, {AVERAGE: average.shape})


def probabilities_of(logits: Tensor) -> Tensor:
    """Probabilities of each sample, classes last and without a graph: (B, K) or (B, H, W, K)."""
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    return wide.softmax(1).movedim(1, -1)


def weighted_entropy(uncertainty: Tensor, ceiling: float) -> Tensor:
    """The mean over samples (N,) of ``exp(E0 − H) · H``; no gradient goes through the weight."""
    return ((ceiling - uncertainty.detach()).exp() * uncertainty).mean()
