"""BN Stats Adapt: batch norms take the statistics of the test batch (Nado et al., 2020).

"Evaluating Prediction-Time Batch Normalization for Robustness under Covariate Shift". No gradient,
no state: each batch is normalised by its own mean and variance. It needs large and varied batches;
one small image is a poor estimate of its domain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bestta.adapters.base import Adapter, StepReport
from bestta.adapters.batchnorm import check_batch_norms, mixing_network, share_of_batch
from bestta.adapters.registry import register_adapter


@register_adapter("bn_stats")
class BnStats(Adapter):
    """The source model with batch norms that look at the batch alone."""

    remembers = False

    def prepare(self) -> None:
        """Have every batch norm take the batch's statistics."""
        check_batch_norms(self.model, self.name)
        self.network = mixing_network(self.model, self.config.output, share_of_batch(prior=0))

    @torch.no_grad()
    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict."""
        return self.network(image), StepReport(reason="no parameter is trained")
