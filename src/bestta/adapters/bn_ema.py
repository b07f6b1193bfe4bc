"""BN-EMA: the running statistics of batch norms follow the stream, with the momentum of training.

Each batch moves them by ``momentum`` towards its own, and is then normalised by where they are:
as in batch norm's training mode for the buffers (but for the variance, see batchnorm.py), as in
eval mode for what is normalised by. There is no gradient. Nobody's paper, but what remains of many
methods when learning is taken away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.batchnorm import (
    AdaptiveNorm,
    check_batch_norms,
    replace_norms,
    values_per_channel,
)
from bestta.adapters.network import Network
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import fraction
from bestta.moments import moments


@dataclass(frozen=True, kw_only=True)
class BnEmaConfig(AdapterConfig):
    """Settings of BN-EMA."""

    momentum: float = 0.1
    """Weight of the batch in the running statistics."""

    def __post_init__(self) -> None:
        fraction(self, "momentum")


class FollowingNorm(AdaptiveNorm):
    """A batch norm whose running statistics, a copy, go on running."""

    def __init__(self, norm: _BatchNorm, momentum: float) -> None:
        super().__init__(norm)
        self.momentum = momentum
        if self.running_mean is not None and self.running_var is not None:
            # In fp32 at least: a tenth of a small difference is nothing in half precision.
            wide = torch.promote_types(self.running_mean.dtype, torch.float32)
            self.running_mean = self.running_mean.to(wide, copy=True)
            self.running_var = self.running_var.to(wide, copy=True)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take the batch in, and normalise by what has become of the statistics."""
        source = self.source
        if source is None:
            return None if values_per_channel(x) > 1 else moments(x)
        if values_per_channel(x) > 1:
            for running, now in zip(source, moments(x), strict=True):
                running.lerp_(now.to(running.dtype), self.momentum)
        return source


@register_adapter("bn_ema")
class BnEma(Adapter):
    """The source model with batch norms that follow the stream."""

    Config = BnEmaConfig
    config: BnEmaConfig

    def prepare(self) -> None:
        """Have every batch norm follow."""
        check_batch_norms(self.model, self.name)
        self.network = Network(self.model, self.config.output)
        self.norms = replace_norms(
            self.network, lambda norm: FollowingNorm(norm, self.config.momentum)
        )

    @torch.no_grad()
    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict, and follow."""
        return self.network(image), StepReport(
            reason="the statistics follow the stream; no parameter is trained"
        )

    def tensors(self) -> dict[str, Tensor]:
        """The running statistics of every batch norm."""
        return {
            f"{name}/{kind}": value
            for name, norm in self.norms.items()
            for kind, value in (("mean", norm.running_mean), ("variance", norm.running_var))
            if value is not None
        }
