"""SAR: entropy of reliable samples, made low all around (Niu et al., 2023).

"Towards Stable Test-Time Adaptation in Dynamic Wild World". The weights and biases of batch, layer
and group norms descend along the entropy of reliable samples: those whose entropy is below
``E0 = margin · ln K``. The gradient is taken not where the weights are but a step of length ρ
uphill, along the first gradient; samples that are no longer reliable there are left out. So the
weights go to where the entropy is low all around. An average of the entropy uphill tells when the
model has collapsed: once it is below ``recover_below``, all goes back to the source. Norms near the
output stay as they are. Batch norms take the batch's statistics. The prediction is that of before
the step.

Deviations: where no sample is reliable, or none stays so uphill, nothing moves. The authors' code
takes the mean of nothing there: the loss is NaN, its gradient zero, and the momentum moves the
weights on. After a recovery the average and the velocity begin anew. Their code keeps both, and
recovers at every step until the old average has risen.

Choice: the paper leaves out the last stage of a ResNet-50, and the last three blocks and the last
norm of a ViT-B: 19 and 28 % of the norms. For any model it is the last quarter, rounded down, in
the order in which the modules are defined; ``layers`` names norms to train instead.
As in the authors' code for ResNets, batches below 32 take smaller steps, in proportion, but single
images twice that; for ViTs theirs are ``lr=1e-3, lr_batch=64``.
Choice: in segmentation a pixel is a sample. One image has thousands: its step is a whole one.
Choice: 0.2 is kept for both tasks, though it was published for 1000 classes. With few classes, or
sure pixels, a healthy model may be below it: then a recovery undoes every step, and what is left is
the source under the batch's statistics. The state counts ``recoveries``; if they keep pace with
the images, lower ``recover_below``, to 0 for never.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.batchnorm import (
    affine_names,
    check_affine,
    mixing_network,
    share_of_batch,
)
from bestta.adapters.network import assign, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import at_least_one, not_negative, prior_strength, within
from bestta.lean import lean_entropy

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True, kw_only=True)
class SarConfig(AdapterConfig):
    """Settings of SAR: the published ones."""

    lr: float = 2.5e-4
    """Step size of SGD, for batches of ``lr_batch`` and more."""
    lr_batch: int = 32
    """A smaller batch of n takes a step of ``n / lr_batch`` of it, a single image one of
    ``2 / lr_batch``; 1 for whole steps always."""
    momentum: float = 0.9
    """Of SGD."""
    margin: float = 0.4
    """A sample is reliable if its entropy is below so much of the greatest there is, ln K."""
    rho: float = 0.05
    """ρ: how far up the hill the gradient is taken; the length over all parameters."""
    recover_below: float = 0.2
    """Back to the source once the average entropy is below this; 0 for never."""
    decay: float = 0.9
    """Of the average entropy."""
    frozen_share: float = 0.25
    """The last norms are not trained: so much of them, rounded down."""
    layers: tuple[str, ...] = ()
    """Norms to train instead, by their names or those of modules that hold them."""
    prior: float = 0.0
    """In batch norms the source's statistics count as so many images against the batch: 0 as
    published, infinity for the source's alone."""

    def __post_init__(self) -> None:
        layers = (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)
        object.__setattr__(self, "layers", layers)
        not_negative(self, "lr", "margin", "rho", "recover_below")
        within(self, 0, 1, "momentum", "decay", "frozen_share")
        at_least_one(self, "lr_batch")
        prior_strength(self, "prior")


@register_adapter("sar")
class Sar(Adapter):
    """Sharpness-aware entropy minimisation on reliable samples, through norms of any kind."""

    Config = SarConfig
    config: SarConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "classification": {},
        "segmentation": {"lr_batch": 1},
    }

    def prepare(self) -> None:
        """Choose norms, copy their weights and biases, and have batch norms look at the batch."""
        config = self.config
        norms = affine_norms(self.model, self.name)
        if config.layers:
            norms = named_norms(norms, config.layers)
        else:
            norms = first_norms(norms, config.frozen_share)
        self.network = mixing_network(self.model, config.output, share_of_batch(config.prior))
        self.weights = self.network.weights(affine_names(norms))
        self.optimiser = Optimiser.sgd(self.weights, config.lr, config.momentum)
        # How many steps the average holds tells whether there is one: a state has no NaN.
        self.average = torch.zeros((), device=self.device)
        self.averaged = torch.zeros((), dtype=torch.int64, device=self.device)
        self.recoveries = torch.zeros((), dtype=torch.int64, device=self.device)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Weight and bias of the chosen norms."""
        return self.weights

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict, climb, take the gradient there and the step here; recover if need be."""
        logits = self.network(image, self.weights)
        ceiling = self.config.margin * math.log(logits.shape[1])
        below = lean_entropy(logits)
        reliable = below.detach() < ceiling
        if not bool(reliable.any()):
            return logits, StepReport(reason="no sample is reliable")
        loss = below[reliable].mean()
        climbed = climb(self.weights, gradients(loss, self.weights), self.config.rho)

        above = lean_entropy(self.network(image, climbed))
        reliable &= above.detach() < ceiling
        losses = {"entropy": loss.item()}
        if not bool(reliable.any()):
            return logits, StepReport(losses=losses, reason="no sample stays reliable uphill")
        loss = above[reliable].mean()
        losses["entropy_uphill"] = loss.item()
        self.optimiser.step(gradients(loss, climbed), self.step_size(len(image)))

        if self.follow_entropy(loss.detach()) < self.config.recover_below:
            reason = f"recovered: the average entropy {self.average.item():.3g} is below "
            self.recover()
            return logits, StepReport(losses=losses, reason=f"{reason}{self.config.recover_below}")
        return logits, StepReport(adapted=True, losses=losses)

    def step_size(self, batch: int) -> float:
        """The learning rate of a batch: in proportion to its size, up to ``lr_batch``."""
        counts = 2 if batch == 1 else batch
        return self.config.lr * min(1.0, counts / self.config.lr_batch)

    @torch.no_grad()
    def follow_entropy(self, loss: Tensor) -> float:
        """Take a step's entropy into the average, which the first one sets; returns it."""
        decay = self.config.decay if self.averaged.item() else 0.0
        self.average.lerp_(loss.to(self.average.dtype), 1 - decay)
        self.averaged += 1
        return self.average.item()

    def recover(self) -> None:
        """Weights, velocity and average back to the start."""
        assign(self.weights, self.network.source)
        self.optimiser.forget()
        self.average.zero_()
        self.averaged.zero_()
        self.recoveries += 1

    def tensors(self) -> dict[str, Tensor]:
        """The weights, their velocity, the average entropy, and the number of recoveries."""
        return {
            **self.weights,
            **self.optimiser.tensors(),
            "entropy/average": self.average,
            "entropy/averaged": self.averaged,
            "recoveries": self.recoveries,
        }


@torch.no_grad()
def climb(
    weights: Mapping[str, nn.Parameter], slope: Mapping[str, Tensor], rho: float
) -> dict[str, nn.Parameter]:
    """Copies of ``weights`` a step of length ρ along ``slope``; where it is flat, no step."""
    lengths = torch.stack([torch.linalg.vector_norm(gradient) for gradient in slope.values()])
    scale = rho / (torch.linalg.vector_norm(lengths) + 1e-12)
    return {name: nn.Parameter(w + scale * slope[name]) for name, w in weights.items()}


def affine_norms(model: nn.Module, method: str) -> dict[str, nn.Module]:
    """The norms of ``model`` that have a weight or a bias, by name, in its own order."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, NORMS)}
    if not norms:
        kinds = sorted({type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__})
        raise ValueError(
            f"method {method!r} works on batch, layer and group norms, and "
            f"{type(model).__name__} has none"
            + (f" (it has {', '.join(kinds)})" if kinds else "")
            + ". These do without: bestta, source, cotta, petal, memo, and ecotta where there are "
            "feature maps."
        )
    check_affine(affine_names(norms), model, method)
    return {name: norm for name, norm in norms.items() if affine_names({name: norm})}


def first_norms(norms: Mapping[str, nn.Module], frozen_share: float) -> dict[str, nn.Module]:
    """All but the last, at least one."""
    count = max(1, len(norms) - math.floor(frozen_share * len(norms)))
    return dict(list(norms.items())[:count])


def named_norms(norms: Mapping[str, nn.Module], layers: tuple[str, ...]) -> dict[str, nn.Module]:
    """Those that are, or lie in, one of ``layers``; a ValueError for a name without any."""
    for layer in layers:
        if not any(lies_in(name, layer) for name in norms):
            raise ValueError(
                f"no norm to train is called {layer!r} or lies in it. There are: "
                f"{', '.join(norms)}."
            )
    return {
        name: norm for name, norm in norms.items() if any(lies_in(name, layer) for layer in layers)
    }


def lies_in(name: str, layer: str) -> bool:
    """Whether the module ``name`` is ``layer`` or inside of it."""
    return f"{name}.".startswith(f"{layer}.")
