"""Mean and variance of features, quickly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PIECE = 2048
"""So many values of a channel are summed in single precision at most."""


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (C,) of the values of each channel of (B, C, ...), in fp32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
        variance, mean = torch.var_mean(x.to(dtype), [0, *range(2, x.dim())], correction=0)
        return mean, variance
    # What batch norm itself uses: many times as fast as var_mean, but it knows no gradient, and
    # with channels last it sums in single precision: so it gets a few thousand values at a time.
    if x.is_contiguous():
        mean, variance = torch.batch_norm_update_stats(x.to(dtype), None, None, 0.0)
        return mean, variance
    pieces = torch.split(x.movedim(1, -1).flatten(0, -2), _PIECE)
    seen = [torch.batch_norm_update_stats(piece.to(dtype), None, None, 0.0) for piece in pieces]
    if len(seen) == 1:
        return seen[0]
    means, variances = (torch.stack(values).double() for values in zip(*seen, strict=True))
    sizes = torch.tensor([len(piece) for piece in pieces], dtype=torch.float64).unsqueeze(1)
    shares = sizes / sizes.sum()
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean) ** 2)).sum(0)
    return mean.to(dtype), variance.to(dtype)


def instance_moments(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Mean and (population) variance of each channel of each sample, (B, C), in fp32 or wider.

    Args:
        x: Features, (B, C, H, W), (B, N, C) or any other with the batch first.
        axis: Where the channels lie.
    """
    if x.device.type != "cpu":
        return _stock(x, axis)
    if torch.is_grad_enabled() and x.requires_grad:
        found: tuple[Tensor, Tensor] = _InstanceMoments.apply(x, axis)  # type: ignore[no-untyped-call]
        return found
    with torch.no_grad():
        return _per_sample(x, axis)


def _stock(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    over = [d for d in range(1, x.dim()) if d != axis]
    variance, mean = torch.var_mean(values, dim=over, correction=0)
    return mean, variance


def _per_sample(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    samples = x.movedim(axis, 1)
    if len(x) > 1 and x.numel() <= _PIECE * len(x) * x.shape[axis]:  # small maps: in one go
        mean, variance = moments(samples.reshape(1, -1, *samples.shape[2:]))
        return mean.view(len(x), -1), variance.view(len(x), -1)
    found = [moments(sample.unsqueeze(0)) for sample in samples]
    means, variances = zip(*found, strict=True)
    return torch.stack(means), torch.stack(variances)


class _InstanceMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        mean, variance = _per_sample(x, axis)
        ctx.save_for_backward(x, mean)
        ctx.axis = axis
        return mean, variance

    @staticmethod
    def backward(ctx: Any, to_mean: Tensor, to_variance: Tensor) -> tuple[Tensor, None]:
        # Of n values: d mean / dx = 1 / n, d variance / dx = 2 (x - mean) / n.
        x, mean = ctx.saved_tensors
        shape = [1] * x.dim()
        shape[0], shape[ctx.axis] = mean.shape
        count = x.numel() // mean.numel()
        slope = (to_variance * (2 / count)).view(shape)
        offset = ((to_mean / count) - to_variance * mean * (2 / count)).view(shape)
        return torch.addcmul(offset, slope, x).to(x.dtype), None
