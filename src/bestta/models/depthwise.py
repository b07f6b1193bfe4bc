"""Depthwise convolutions whose backward pass costs about what their forward pass costs.

PyTorch's own backward of a depthwise convolution on a CPU leaves the fast path where the kernel is
larger than 3x3, where it is dilated, and in bf16 where it strides: 10 to 60 times the time of the
forward pass, more than half of a training step of a small encoder. Both gradients can be put in
terms that have a fast path:

- to the input, as the convolution of the output's gradient with the turned kernel, after zeros are
  put between the rows and columns that a stride skipped;
- to a 5x5 kernel, from four 3x3 ones: taps -2, -1, 0 and 0, 1, 2 of each axis;
- under dilation, on the ``dilation**2`` grids of pixels that never meet in one window, as a batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FAST_KERNEL = 3
_MOST_GRIDS = 4
"""Grids of a higher dilation hold too few pixels to be worth the copies."""


def depthwise_conv2d(
    x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0, dilation: int = 1
) -> Tensor:
    """What ``F.conv2d(x, weight, groups=C)`` returns, with gradients that come as quickly.

    On a CPU only; elsewhere, and where no gradient is wanted, it is ``F.conv2d`` itself.

    Args:
        x: Maps, (B, C, H, W).
        weight: One filter per channel, (C, 1, k, k) with k odd.
        stride, padding, dilation: As in ``F.conv2d``, the same for both axes.
    """
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    if not wanted or traced or x.device.type != "cpu":
        return F.conv2d(x, weight, None, stride, padding, dilation, groups=x.shape[1])
    if torch.is_autocast_enabled("cpu") and x.dtype != torch.float64:
        # What autocast does to F.conv2d.
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
    out: Tensor = _Depthwise.apply(x, weight, stride, padding, dilation)  # type: ignore[no-untyped-call]
    return out


class DepthwiseConv2d(nn.Conv2d):
    """``nn.Conv2d`` with one filter per channel, computed by `depthwise_conv2d`."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H', W')."""
        stride, dilation = self.stride[0], self.dilation[0]
        out = depthwise_conv2d(x, self.weight, stride, int(self.padding[0]), dilation)
        return out if self.bias is None else out + self.bias.view(-1, 1, 1)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int) -> Tensor:
        return F.conv2d(x, weight, None, stride, padding, dilation, groups=x.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, *ctx.geometry = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.size = x.shape[2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = None
        with torch.autocast("cpu", enabled=False):  # precision was settled in the forward pass
            if ctx.needs_input_grad[0]:
                to_x = gradient_to_input(gradient, weight, ctx.size, *ctx.geometry)
            if ctx.needs_input_grad[1]:
                to_weight = gradient_to_weight(gradient, x, weight, *ctx.geometry)
        return to_x, to_weight, None, None, None


def gradient_to_input(
    gradient: Tensor,
    weight: Tensor,
    size: tuple[int, int],
    stride: int,
    padding: int,
    dilation: int,
) -> Tensor:
    """Gradient (B, C, H, W) to the input of ``size`` (H, W), given that to the output."""
    reach = dilation * (weight.shape[-1] - 1)
    height, width = size
    if stride > 1:
        # As if the convolution had not strided: a zero wherever an output was skipped.
        rows, columns = height + 2 * padding - reach, width + 2 * padding - reach
        spread = torch.empty(
            (*gradient.shape[:2], rows, columns),
            dtype=gradient.dtype,
            memory_format=torch.channels_last,
        ).zero_()
        spread[:, :, ::stride, ::stride] = gradient
        gradient = spread
    margin = reach - padding
    if margin < 0:  # windows that lay wholly in the padding
        gradient, margin = F.pad(gradient, (margin,) * 4), 0
    turned = weight.flip(2, 3)
    return F.conv2d(gradient, turned, None, 1, margin, dilation, groups=weight.shape[0])


def gradient_to_weight(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int
) -> Tensor:
    """Gradient (C, 1, k, k) to the kernel, given that to the output and the input."""
    kernel = weight.shape[-1]
    if stride == 1 and dilation > 1 and dilation**2 <= _MOST_GRIDS:
        x = F.pad(x, (padding,) * 4)
        x, gradient = _grids(x, gradient, dilation)
        padding, dilation = 0, 1
    if dilation > 1 or kernel % 2 == 0 or kernel > 2 * _FAST_KERNEL - 1:
        # No shorter way, but single precision is several times quicker here than bf16.
        fast = torch.promote_types(weight.dtype, torch.float32)
        gradient, x, kernels = gradient.to(fast), x.to(fast), weight.to(fast)
        return _stock(gradient, x, kernels, stride, padding, dilation).to(weight.dtype)
    if kernel <= _FAST_KERNEL:
        return _stock(gradient, x, weight, stride, padding, dilation)
    x = F.pad(x, (padding,) * 4)
    rows = (gradient.shape[2] - 1) * stride + _FAST_KERNEL
    columns = (gradient.shape[3] - 1) * stride + _FAST_KERNEL
    part = weight[:, :, :_FAST_KERNEL, :_FAST_KERNEL]
    whole = torch.empty_like(weight)
    last = kernel - _FAST_KERNEL
    for top in (0, last):
        for left in (0, last):
            window = x[:, :, top : top + rows, left : left + columns]
            taps = _stock(gradient, window, part, stride, 0, 1)
            whole[:, :, top : top + _FAST_KERNEL, left : left + _FAST_KERNEL] = taps
    return whole


def _grids(x: Tensor, gradient: Tensor, dilation: int) -> tuple[Tensor, Tensor]:
    """Every ``dilation``-th pixel from each start, as one batch; of padded input and output alike.

    Sizes that ``dilation`` does not divide are filled up with zeros, which add nothing.
    """
    rows, columns = (-(-side // dilation) for side in gradient.shape[2:])
    more = (x.shape[2] - gradient.shape[2]) // dilation  # the taps beyond the first, per axis

    def split(maps: Tensor, rows: int, columns: int) -> Tensor:
        below, right = rows * dilation - maps.shape[2], columns * dilation - maps.shape[3]
        maps = F.pad(maps, (0, right, 0, below))
        starts = [(i, j) for i in range(dilation) for j in range(dilation)]
        return torch.cat([maps[:, :, i::dilation, j::dilation] for i, j in starts])

    return split(x, rows + more, columns + more), split(gradient, rows, columns)


def _stock(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int
) -> Tensor:
    pair = [[value, value] for value in (stride, padding, dilation)]
    gradients = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, *pair, False, [0, 0], weight.shape[0], [False, True, False]
    )
    to_weight: Tensor = gradients[1]
    return to_weight
