"""oneDNN's convolutions, asked for directly.

PyTorch leaves oneDNN out of 1x1 convolutions on one thread, where it is a fifth faster, gives it
the weights of larger ones in an order that it has to change once more, and does a ReLU in a pass of
its own. Where a build of PyTorch does not have these functions, nobody is told to use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Clip = tuple[float, float | None]
"""The least and the greatest of values; None with 0 for those of a ReLU."""


def takes(x: Tensor) -> bool:
    """Whether there is a oneDNN for maps like this one, (B, C, H, W) on a CPU."""
    cpu = x.device.type == "cpu" and x.dim() == 4 and x.numel() > 0
    return cpu and x.dtype in _TYPES and bool(torch.backends.mkldnn.enabled)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    clip: Clip | None = None,
) -> Tensor:
    """A convolution of (B, C, H, W) with its channels last, its result kept within bounds."""
    then: str = "none"
    bounds: list[float] = []
    if clip is not None:
        low, high = clip
        then, bounds = ("relu", []) if high is None else ("hardtanh", [low, high])
    y: Tensor = torch.ops.mkldnn._convolution_pointwise(
        x, weight, bias, list(padding), list(stride), list(dilation), groups, then, bounds, ""
    )
    return y


def packed(
    weight: Tensor,
    size: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Weights (C', C, k, l) in the order that suits maps of ``size`` (B, C, H, W) best."""
    opaque = weight.contiguous().to_mkldnn()
    packed: Tensor = _pack(opaque, list(padding), list(stride), list(dilation), 1, list(size))
    return packed


def _types() -> tuple[torch.dtype, ...]:
    """Numbers that this build of PyTorch, on this machine, hands to oneDNN; perhaps none."""
    known = _pack is not None and hasattr(torch.ops.mkldnn, "_convolution_pointwise")
    if not known or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ()
    half = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return (torch.float32, torch.bfloat16) if half() else (torch.float32,)


_pack: Any = getattr(torch._C._nn, "mkldnn_reorder_conv2d_weight", None)
_TYPES = _types()
