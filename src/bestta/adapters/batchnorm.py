"""Batch norms that take their statistics elsewhere than from the source.

`replace_norms` has stand-ins do the work of the batch norms of a `Network`. The modules stay where
they are, so that weights and hooks reach them as before; a stand-in decides by ``statistics(x)``
what features are normalised by.

Choice: the variance of a batch is the one of its values (divided by their number), in every
method; PyTorch's running variance divides by one less. So a batch that counts alone is normalised
exactly as by batch norm in training.
Choice: where a batch norm sees one value per channel (one image, pooled to a vector), a batch
has no statistics, and the source's are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bestta.adapters.network import Network
from bestta.moments import instance_moments, moments
from bestta.outputs import OutputKey


class AdaptiveNorm(nn.Module, ABC):
    """Stands in for a batch norm; a method says by what it normalises."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.eval()

    learns_through_statistics = False
    """Whether gradients flow through them; features in half precision are then widened first."""

    @abstractmethod
    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and variance (C,), in fp32 at least, to normalise ``x`` (B, C, ...) by.

        None for its own; (B, C) where each image has its own. ``x`` may be in half precision.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, C, ...) and apply weight and bias."""
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The same with another weight and bias, (C,)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
        wide = x.to(dtype) if self.learns_through_statistics else x
        chosen = self.statistics(wide)
        if chosen is None:
            out = F.batch_norm(x.to(dtype), None, None, weight, bias, True, 0.0, self.eps)
            return out.to(x.dtype)
        mean, variance = (value.to(dtype) for value in chosen)
        if mean.requires_grad or variance.requires_grad or mean.dim() > 1:
            return _affine(wide.to(dtype), mean, variance, weight, bias, self.eps).to(x.dtype)
        # Features in half precision go in as they are: they are widened on the way, value by value.
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, self.eps)

    @property
    def source(self) -> tuple[Tensor, Tensor] | None:
        """The source's mean and variance (C,), if the batch norm has kept any."""
        if self.running_mean is None or self.running_var is None:
            return None
        return self.running_mean, self.running_var


class MixedNorm(AdaptiveNorm):
    """Normalises by ``share · batch + (1 − share) · source``: means and variances, linearly.

    The share is a function of the batch size. Gradients flow through the statistics of a batch that
    counts alone, as in batch norm's training mode, and through no mixture.
    """

    apart = 0
    """If not 0, each of so many images is normalised as if it came alone; without gradients."""

    def __init__(self, norm: _BatchNorm, share: Callable[[int], float]) -> None:
        super().__init__(norm)
        self.share = share

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The mixture."""
        if self.apart and len(x) != self.apart:
            raise RuntimeError(f"{len(x)} samples of {self.apart} images cannot be told apart.")
        batch = 1 if self.apart else len(x)
        together = len(x) // max(1, batch)
        source = self.source
        share = 1.0 if source is None else self.share(batch)
        lone = values_per_channel(x) == together
        if source is not None and (share == 0 or lone):
            return source
        if share == 1 and not self.apart and not lone:
            return None
        with torch.no_grad():
            mean, variance = instance_moments(x, 1) if self.apart else moments(x)
            if source is None or share == 1:
                return mean, variance
            return source[0].to(mean).lerp(mean, share), source[1].to(mean).lerp(variance, share)


def share_of_batch(prior: float) -> Callable[[int], float]:
    """``n / (N + n)`` of a batch of n against a source that counts as N images.

    >>> share_of_batch(8)(1) == 1 / 9, share_of_batch(0)(1), share_of_batch(float("inf"))(4)
    (True, 1.0, 0.0)
    """
    return lambda n: 0.0 if prior == float("inf") else n / (prior + n)


def mixing_network(model: nn.Module, output: OutputKey, share: Callable[[int], float]) -> Network:
    """``model`` with batch norms, if it has any, that mix the source and the batch."""
    network = Network(model, output)
    network.norms = replace_norms(network, lambda norm: MixedNorm(norm, share))
    return network


@contextmanager
def images_apart(network: Network, images: int) -> Iterator[None]:
    """Within, ``network`` answers each of so many images as if it came alone; without gradients.

    For networks by `mixing_network`. A batch norm that sees samples of another number, such as
    windows of the images, raises a RuntimeError.
    """
    mixed = [norm for norm in network.norms.values() if isinstance(norm, MixedNorm)]
    try:
        for norm in mixed:
            norm.apart = images
        with torch.no_grad():
            yield
    finally:
        for norm in mixed:
            norm.apart = 0


AnyNorm = TypeVar("AnyNorm", bound=AdaptiveNorm)


def replace_norms(network: Network, build: Callable[[_BatchNorm], AnyNorm]) -> dict[str, AnyNorm]:
    """Have a stand-in do the work of each batch norm of ``network``; returns them by name.

    A batch norm of a class with a forward of its own (one that ends in an activation, say) is
    handed features moved so that the statistics it knows are the right ones.
    """
    standins: dict[str, AnyNorm] = {}
    for name, norm in batch_norms(network.module).items():
        standins[name] = build(norm)
        if type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            norm.forward = _stand_in(standins[name], norm)  # type: ignore[method-assign, assignment]
        else:
            norm.register_forward_pre_hook(_restyle(standins[name]))
    return standins


def _stand_in(standin: AdaptiveNorm, norm: _BatchNorm) -> Callable[[Tensor], Tensor]:
    """The stand-in with the weight and bias that the batch norm has at the time."""
    return lambda input: standin.normalise(input, norm.weight, norm.bias)


def _restyle(standin: AdaptiveNorm) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    """Moves features to where the batch norm behind does what the stand-in would."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        x = inputs[0]
        known_mean, known_variance = module.running_mean, module.running_var
        if not isinstance(known_mean, Tensor) or not isinstance(known_variance, Tensor):
            return x
        wide = _wide(x)
        mean, variance = standin.statistics(wide) or moments(wide)
        deviation = (known_variance.to(wide.dtype) + standin.eps).sqrt()
        moved = _affine(wide, mean, variance, deviation, known_mean.to(wide.dtype), standin.eps)
        return moved.to(x.dtype)

    return hook


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of ``model``, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}


def check_batch_norms(model: nn.Module, method: str) -> None:
    """Raise a ValueError unless ``model`` has batch norms."""
    if not batch_norms(model):
        kinds = sorted({type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__})
        raise ValueError(
            f"method {method!r} works on batch norms, and {type(model).__name__} has none"
            + (f" (it has {', '.join(kinds)})" if kinds else "")
            + ". These do without: bestta, source, cotta, petal, memo, ecotta where there are "
            "feature maps, and sar where there are layer or group norms."
        )


def affine_names(norms: Mapping[str, nn.Module]) -> list[str]:
    """Names of the weights and biases of ``norms``; one that several share has the first's."""
    found: dict[int, str] = {}
    for name, norm in norms.items():
        for kind in ("weight", "bias"):
            parameter = getattr(norm, kind, None)
            if isinstance(parameter, nn.Parameter):  # and not computed from others
                found.setdefault(id(parameter), f"{name}.{kind}" if name else kind)
    return list(found.values())


def batch_norm_weights(model: nn.Module, method: str) -> list[str]:
    """Names of the weights and biases of batch norms, or a ValueError if there are none."""
    check_batch_norms(model, method)
    return check_affine(affine_names(batch_norms(model)), model, method)


def check_affine(names: Iterable[str], model: nn.Module, method: str) -> list[str]:
    """``names``, or a ValueError if there is none."""
    names = list(names)
    if not names:
        raise ValueError(
            f"method {method!r} trains the weights and biases of norms, and those of "
            f"{type(model).__name__} have none (affine=False)."
        )
    return names


def values_per_channel(x: Tensor) -> int:
    """How many values of (B, C, ...) a channel has."""
    return x.numel() // max(1, x.shape[1])


def _affine(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    shape = (-1, x.shape[1], *[1] * (x.dim() - 2))
    slope = (variance + eps).rsqrt() * (1 if weight is None else weight)
    offset = (0 if bias is None else bias) - mean * slope
    return x * slope.view(shape) + offset.view(shape)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
