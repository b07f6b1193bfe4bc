"""α-BN: batch norms mix the source's statistics with the batch's (Schneider et al., 2020).

"Improving robustness against common corruptions by covariate shift adaptation". The source counts
as N images, the batch as the n it has: ``λ · source + (1 − λ) · batch`` with ``λ = N / (N + n)``.
Means and variances are mixed, not deviations. No gradient, no state. At one image and N = 8 the
image's own statistics weigh a ninth: among methods that learn nothing, the one made for single
images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.batchnorm import check_batch_norms, mixing_network, share_of_batch
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import fraction, prior_strength


@dataclass(frozen=True, kw_only=True)
class AlphaBnConfig(AdapterConfig):
    """Settings of α-BN."""

    prior: float = 8.0
    """N: the source's statistics count as so many images."""
    weight: float | None = None
    """Weight of the batch, 1 − λ, whatever its size; None for n / (N + n)."""

    def __post_init__(self) -> None:
        prior_strength(self, "prior")
        if self.weight is not None:
            fraction(self, "weight")


@register_adapter("alpha_bn")
class AlphaBn(Adapter):
    """The source model with batch norms between the source and the batch."""

    Config = AlphaBnConfig
    config: AlphaBnConfig
    remembers = False

    def prepare(self) -> None:
        """Have every batch norm mix."""
        check_batch_norms(self.model, self.name)
        weight = self.config.weight
        counts = share_of_batch(self.config.prior) if weight is None else lambda n: float(weight)
        self.network = mixing_network(self.model, self.config.output, counts)

    @torch.no_grad()
    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict."""
        return self.network(image), StepReport(reason="no parameter is trained")
