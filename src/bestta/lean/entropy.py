"""The entropy of a segmentation and its gradient, strip by strip: without a copy of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bestta.lean.functions import once

_STRIP = 1 << 16
"""Logits taken at a time: few enough to stay in the cache of a core."""

_LOWEST = -80.0


def lean_entropy_loss(logits: Tensor, channels_last: bool = False) -> Tensor:
    """The mean entropy of predictions (B, K, H, W); its gradient is made in the same pass.

    ``channels_last``: whether the gradient may lie in memory in that order, whatever that of the
    logits is; the gradient of an upsampling then takes a third of the time.

    With ``p`` the softmax of the logits ``z`` of a pixel and ``H = -Σ p log p``, the gradient
    is ``dH/dz = -p (log p + H)``.
    """
    loss: Tensor = _Entropy.apply(logits, channels_last)  # type: ignore[no-untyped-call]
    return loss


class _Entropy(torch.autograd.Function):
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
                log_p = strip.to(torch.promote_types(strip.dtype, torch.float32)).log_softmax(0)
                # What is left out is nothing, but numbers that small take many times as long.
                log_p.clamp_(min=_LOWEST)
                p = log_p.exp()
                negative = (p * log_p).sum(0)
                total -= negative.sum()
                if gradient is not None:
                    torch.sub(negative, log_p, out=log_p)
                    gradient[sample, :, top : top + rows] = log_p.mul_(p).mul_(1 / pixels)
        ctx.save_for_backward(gradient)
        return (total / pixels).to(torch.promote_types(logits.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        once()
        (to_logits,) = ctx.saved_tensors
        scaled: Tensor = to_logits.mul_(gradient)  # nobody else holds it
        return scaled, None
