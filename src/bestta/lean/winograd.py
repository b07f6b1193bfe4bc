"""3x3 convolutions with half the multiplications, after Winograd (Lavin and Gray, 2016).

Four rows of the result of a kernel of three rows can be had from six products per column of the
kernel instead of twelve: the six rows they are made of are mixed by `_BEFORE`, the kernel's three
by `_KERNEL`, and what comes out is mixed by `_AFTER`. Each of the six products is a convolution
along the rows, by oneDNN. Here only rows are treated so, not columns: it needs no gathering of
tiles, and rounding errors stay about twice those of the plain way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bestta.lean import onednn

# The minimal algorithm for four outputs of three taps at the points 0, ±1, ±2 and infinity.
_BEFORE = (
    (4.0, 0.0, -5.0, 0.0, 1.0, 0.0),
    (0.0, -4.0, -4.0, 1.0, 1.0, 0.0),
    (0.0, 4.0, -4.0, -1.0, 1.0, 0.0),
    (0.0, -2.0, -1.0, 2.0, 1.0, 0.0),
    (0.0, 2.0, -1.0, -2.0, 1.0, 0.0),
    (0.0, 4.0, 0.0, -5.0, 0.0, 1.0),
)
_KERNEL = (
    (1 / 4, 0.0, 0.0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0.0, 0.0, 1.0),
)
_AFTER = (
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.0),
    (0.0, 1.0, -1.0, 2.0, -2.0, 0.0),
    (0.0, 1.0, 1.0, 4.0, 4.0, 0.0),
    (0.0, 1.0, -1.0, 8.0, -8.0, 1.0),
)
_STRIP = 2
"""Groups of four rows that are worked on at a time: small enough for a cache."""

_FEWEST_CHANNELS = 64
_FEWEST_ROWS = 12
_MOST_DILATION = 2
"""Beyond, much of the kernel lies in the padding, which oneDNN leaves out."""
_FEWEST_PIXELS = 1536
"""Of a smaller map, to mix the weights takes what is saved."""


def suits(x: Tensor, weight: Tensor, padding: tuple[int, ...], dilation: tuple[int, ...]) -> bool:
    """Whether a stride-1 convolution of ``x`` (B, C, H, W) pays this way."""
    rows = x.shape[2] + 2 * padding[0] - 2 * dilation[0]
    return (
        tuple(weight.shape[2:]) == (3, 3)
        and x.dtype == torch.float32
        and min(weight.shape[:2]) >= _FEWEST_CHANNELS
        and max(dilation) <= _MOST_DILATION
        and rows >= _FEWEST_ROWS * dilation[0]
        and len(x) * rows * x.shape[3] >= _FEWEST_PIXELS
    )


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    clip: onednn.Clip | None,
) -> Tensor:
    """A 3x3 convolution with stride 1, its result kept within bounds.

    Args:
        x: (B, C, H, W) in fp32 with the channels last in memory.
        weight: (C', C, 3, 3).
        bias: (C',) or None.
        padding, dilation: Of rows and columns.
        clip: The bounds, if any.
    """
    before, kernel, after = (
        torch.tensor(matrix, dtype=x.dtype) for matrix in (_BEFORE, _KERNEL, _AFTER)
    )
    rows = x.shape[2] + 2 * padding[0] - 2 * dilation[0]
    columns = x.shape[3] + 2 * padding[1] - 2 * dilation[1]
    size = (_STRIP, x.shape[1], 1, x.shape[3])
    mixed = torch.einsum("ik,ockl->iocl", kernel, weight).unsqueeze(3)
    along = (0, padding[1]), (1, 1), (1, dilation[1])
    packed = [onednn.packed(row, size, *along) for row in mixed]
    del mixed
    y = x.new_empty((len(x), rows, columns, weight.shape[0]))
    for sample, result in zip(x.permute(0, 2, 3, 1), y, strict=True):
        # Under dilation, rows that far apart form a picture of their own.
        for first in range(dilation[0]):
            own = result[first :: dilation[0]]
            for top in range(0, len(own), 4 * _STRIP):
                strip = own[top : top + 4 * _STRIP]
                start = first - padding[0] + dilation[0] * top
                groups = -(-len(strip) // 4)
                source = _rows(sample, start, 4 * groups + 2, dilation[0])
                _strip(source, strip, packed, before, after, padding[1], dilation[1])
                if bias is not None:
                    strip.add_(bias)
                if clip is not None:
                    strip.clamp_(*clip)
    return y.permute(0, 3, 1, 2)


def _strip(
    source: Tensor,
    result: Tensor,
    packed: list[Tensor],
    before: Tensor,
    after: Tensor,
    padding: int,
    dilation: int,
) -> None:
    """Some groups of four rows, ``result`` (R, W', C'), of ``source`` (4 groups + 2, W, C)."""
    _, width, channels = source.shape
    groups = len(source) // 4
    mixed = source.new_empty((6, groups, width * channels))
    for group in range(groups):
        six = source[4 * group : 4 * group + 6].flatten(1)
        torch.mm(before, six, out=mixed[:, group])
    products = result.new_empty((6, groups, result.shape[1] * result.shape[2]))
    for index, kernel in enumerate(packed):
        line = mixed[index].view(groups, 1, width, channels).permute(0, 3, 1, 2)
        found = onednn.convolve(line, kernel, None, (0, padding), (1, 1), (1, dilation))
        products[index] = found.permute(0, 2, 3, 1).reshape(groups, -1)
    for group in range(groups):
        four = result[4 * group : 4 * group + 4].flatten(1)
        if len(four) == 4 and four.data_ptr() == result[4 * group].data_ptr():
            torch.mm(after, products[:, group], out=four)
        else:  # the last rows, or rows that do not lie one behind the other
            done = after @ products[:, group]
            result[4 * group : 4 * group + 4] = done[: len(four)].view(-1, *result.shape[1:])


def _rows(sample: Tensor, start: int, count: int, step: int) -> Tensor:
    """Every ``step``-th row of (H, W, C) from ``start`` on; zeros beyond the edges."""
    stop = start + step * (count - 1) + 1
    if start >= 0 and stop <= len(sample):
        return sample[start:stop:step]
    inside = [row for row in range(count) if 0 <= start + step * row < len(sample)]
    rows = sample.new_zeros((count, *sample.shape[1:]))
    if inside:
        low, high = inside[0], inside[-1]
        rows[low : high + 1] = sample[start + step * low : start + step * high + 1 : step]
    return rows
