"""Yes or no per value in one bit of memory: what a ReLU's gradient needs to know of its input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_EIGHT = [1 << bit for bit in range(7, -1, -1)]


@dataclass(frozen=True)
class Shape:
    """How the values of a dense tensor lie in memory."""

    sizes: torch.Size
    strides: tuple[int, ...]


def pack_above(x: Tensor, low: float, high: float | None = None) -> tuple[Tensor, Shape]:
    """`pack` of which values of ``x`` lie above ``low`` and, if it is given, below ``high``."""
    x = x.detach()
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        mask = x > low
        return pack(mask if high is None else mask & (x < high))
    if not _is_dense(x):
        x = x.contiguous()
    values = x.as_strided((x.numel(),), (1,)).numpy()  # compares several times as fast as PyTorch
    with np.errstate(invalid="ignore"):
        yes = values > low
        if high is not None:
            np.logical_and(yes, values < high, out=yes)
    return torch.from_numpy(np.packbits(yes)), Shape(x.shape, x.stride())


def pack(mask: Tensor) -> tuple[Tensor, Shape]:
    """The bits of a boolean tensor, one after the other as they lie in memory, and their shape."""
    if not _is_dense(mask):
        mask = mask.contiguous()
    flat = mask.as_strided((mask.numel(),), (1,))
    shape = Shape(mask.shape, mask.stride())
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy())), shape
    eights = torch.nn.functional.pad(flat.to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
    return (eights * eights.new_tensor(_EIGHT)).sum(1, dtype=torch.uint8), shape


def unpack(bits: Tensor, shape: Shape) -> Tensor:
    """What `pack` was given, as bytes 0 and 1, in the same memory format."""
    if bits.device.type == "cpu":
        flat = torch.from_numpy(np.unpackbits(bits.numpy()))
    else:
        flat = (bits.unsqueeze(1) & bits.new_tensor(_EIGHT)).ne(0).to(torch.uint8).flatten()
    return flat.as_strided(shape.sizes, shape.strides)


def _is_dense(x: Tensor) -> bool:
    """Whether the values fill their memory without gaps, in whatever order."""
    expected = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda axis: axis[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
