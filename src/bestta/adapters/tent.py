"""TENT: minimise the entropy of predictions through the batch norms (Wang et al., 2021).

"Tent: Fully Test-Time Adaptation by Entropy Minimization". Batch norms take the batch's statistics;
their weights and biases descend along the entropy of the prediction, averaged over images and
pixels. One step per batch, and the prediction is that of before the step.

This is TENT-continual: it never goes back. ``tent_reset`` does, at domain changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.batchnorm import batch_norm_weights, mixing_network, share_of_batch
from bestta.adapters.network import gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import not_negative, prior_strength, within
from bestta.lean import lean_entropy


@dataclass(frozen=True, kw_only=True)
class TentConfig(AdapterConfig):
    """Settings of TENT: the published ones, for both tasks."""

    lr: float = 1e-3
    """Step size of Adam."""
    beta1: float = 0.9
    beta2: float = 0.999
    """Decays of Adam's moments."""
    prior: float = 0.0
    """The source's statistics count as so many images against the batch: 0 as published, infinity
    for the source's alone."""

    def __post_init__(self) -> None:
        not_negative(self, "lr")
        within(self, 0, 1, "beta1", "beta2")
        prior_strength(self, "prior")


@register_adapter("tent")
class Tent(Adapter):
    """Entropy minimisation through the weights and biases of batch norms."""

    Config = TentConfig
    config: TentConfig

    def prepare(self) -> None:
        """Have batch norms look at the batch; make copies of their weights and biases to train."""
        names = batch_norm_weights(self.model, self.name)
        share = share_of_batch(self.config.prior)
        self.network = mixing_network(self.model, self.config.output, share)
        self.weights = self.network.weights(names)
        betas = (self.config.beta1, self.config.beta2)
        self.optimiser = Optimiser.adam(self.weights, self.config.lr, betas)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Weight and bias of every batch norm."""
        return self.weights

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict, and descend along the entropy."""
        logits = self.network(image, self.weights)
        entropy = lean_entropy(logits).mean()
        self.optimiser.step(gradients(entropy, self.weights))
        return logits, StepReport(adapted=True, losses={"entropy": entropy.item()})

    def tensors(self) -> dict[str, Tensor]:
        """The weights, and Adam's moments."""
        return {**self.weights, **self.optimiser.tensors()}
