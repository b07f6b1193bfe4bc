"""The entropy of a segmentation and its gradient, strip by strip: without a copy of the logits.

With ``p`` the softmax of the logits ``z`` of a pixel and ``H = -Σ p log p``, the gradient is
``dH/dz = -p (log p + H)``. It is made in the pass that makes H.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bestta.lean.functions import once, only_channels_last
from bestta.losses import entropy

_STRIP = 1 << 16
"""Logits taken at a time: few enough to stay in the cache of a core."""

_LOWEST = -80.0


def lean_entropy_loss(logits: Tensor, channels_last: bool = False) -> Tensor:
    """The mean entropy of predictions (B, K, H, W).

    ``channels_last``: whether the gradient may lie in memory in that order, whatever that of the
    logits is; the gradient of an upsampling then takes a third of the time.
    """
    loss: Tensor = _MeanEntropy.apply(logits, channels_last)  # type: ignore[no-untyped-call]
    return loss


def lean_entropy(logits: Tensor) -> Tensor:
    """The entropy of each prediction: (B,) of (B, K), (B, H, W) of (B, K, H, W).

    The gradient lies in memory as the logits do, is in their dtype before it is multiplied, and can
    be asked for once. A class that is impossible, of a logit of −∞, has its limit: it adds nothing.
    Small maps, and those that are not on a CPU, go the plain way, which is quicker for them.
    """
    if logits.dim() != 4 or logits.device.type != "cpu" or logits[:1].numel() < _STRIP:
        return entropy(logits)
    each: Tensor = _Entropy.apply(logits)  # type: ignore[no-untyped-call]
    return each


class _MeanEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, channels_last: bool) -> Tensor:
        layout = torch.channels_last if channels_last else torch.preserve_format
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = torch.empty_like(logits, memory_format=layout)
        pixels = logits.numel() // logits.shape[1]
        rows = max(1, _STRIP // (logits.shape[1] * logits.shape[3]))
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for sample in range(len(logits)):
            for top in range(0, logits.shape[2], rows):
                strip = logits[sample, :, top : top + rows]
                negative, log_p, p = _of_strip(strip, 0)
                total -= negative.sum()
                if gradient is not None:
                    slope = torch.sub(negative, log_p, out=log_p).mul_(p)
                    gradient[sample, :, top : top + rows] = slope.mul_(1 / pixels)
        ctx.save_for_backward(gradient)
        return (total / pixels).to(_wide(logits))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        once()
        (to_logits,) = ctx.saved_tensors
        scaled: Tensor = to_logits.mul_(gradient)  # nobody else holds it
        return scaled, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        last = only_channels_last(logits)
        layout = torch.channels_last if last else torch.contiguous_format
        ctx.axis = 1 if last else 0
        each = torch.empty_like(logits[:, :1], dtype=_wide(logits), memory_format=layout)
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = torch.empty_like(logits, memory_format=layout)
        strips = _strips(ctx.axis, logits, each, each if gradient is None else gradient)
        for strip, entropies, slopes in strips:
            negative, log_p, p = _of_strip(strip, ctx.axis)
            entropies.copy_(-negative)
            if gradient is not None:
                slopes.copy_(torch.sub(negative, log_p, out=log_p).mul_(p))
        ctx.save_for_backward(gradient)
        return each.squeeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        once()
        to_logits: Tensor
        (to_logits,) = ctx.saved_tensors  # nobody else holds it
        for slopes, by in _strips(ctx.axis, to_logits, gradient.unsqueeze(1)):
            slopes.copy_(slopes.to(by.dtype).mul_(by))
        return to_logits


def _strips(axis: int, *maps: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few pixels of each of some maps (B, C, H, W) at a time: (C, n), or (n, C) for axis 1."""
    pixels = max(1, _STRIP // maps[0].shape[1])
    for samples in zip(*maps, strict=True):
        flat = (x.flatten(1) if axis == 0 else x.flatten(1).T for x in samples)
        yield from zip(*(x.split(pixels, 1 - axis) for x in flat), strict=True)


def _of_strip(strip: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """``Σ p log p``, over classes on ``axis``, which stays; ``log p``; ``p``."""
    log_p = strip.to(_wide(strip)).log_softmax(axis)
    # What is left out is nothing, but numbers that small take many times as long.
    log_p.clamp_(min=_LOWEST)
    p = log_p.exp()
    return (p * log_p).sum(axis, keepdim=True), log_p, p


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
