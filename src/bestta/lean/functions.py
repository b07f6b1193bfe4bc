"""Frozen operations that keep for the backward pass only what the gradient to their input needs.

Of a convolution that is its weights, which are there anyway; of a batch norm its slope; of a ReLU
one bit per value; of a pooling the size of its input. PyTorch's own keep whole maps for all four.
None keeps a copy of weights from one image to the next: where a batch norm folds into a
convolution, it does so as the convolution runs, into the weights or into the result, whichever has
fewer numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bestta.lean import onednn, winograd
from bestta.lean.bits import Shape, pack_above, unpack
from bestta.lean.onednn import Clip
from bestta.lean.operations import Activation, Convolve, Geometry, Norm, Pool

_FIXED = 1 << 14
"""Derivatives of smooth activations, between -0.2 and 1.2, are kept as 16 bit multiples of this
fraction: an error of 3e-5, against 4e-3 of bf16."""

_FEW_PIXELS = 200
"""A convolution of so few pixels is quicker channels first: it is mostly its weights."""


class Block(NamedTuple):
    """What is done to a map in one go: a convolution, a batch norm, an activation; each if any."""

    convolve: Convolve | None = None
    norm: Norm | None = None
    activation: Activation | None = None
    channels_last: bool = False
    """Whether maps may lie in memory in that order, which convolutions on a CPU like best."""


class Part(NamedTuple):
    """A range of the channels of a map that was put together from several, and its graph."""

    link: Tensor
    start: int
    stop: int


def run(x: Tensor, block: Block, *, inplace: bool = False, parts: tuple[Part, ...] = ()) -> Tensor:
    """``block`` of ``x``.

    Args:
        x: Features, (B, C, ...).
        block: What to do.
        inplace: Whether an activation alone overwrites ``x``.
        parts: What gradients are wanted to, if not to all of ``x``.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        with torch.no_grad():
            return _forward(x, block, inplace, keep=False).y
    if parts:
        ranges = [(part.start, part.stop) for part in parts]
        links = [part.link for part in parts]
        y: Tensor = _Frozen.apply(x.detach(), block, False, ranges, *links)  # type: ignore[no-untyped-call]
        return y
    y = _Frozen.apply(x, block, inplace, None)  # type: ignore[no-untyped-call]
    return y


def parts_of(tensors: Sequence[Tensor]) -> tuple[Part, ...]:
    """Those of the maps, put one behind the other by channels, that gradients are wanted to."""
    parts = []
    start = 0
    for x in tensors:
        if x.requires_grad:
            link: Tensor = _Link.apply(x)  # type: ignore[no-untyped-call]
            parts.append(Part(link, start, start + x.shape[1]))
        start += x.shape[1]
    return tuple(parts)


def add(x: Tensor, other: Tensor, activation: Activation | None, inplace: bool) -> Tensor:
    """``x + other``, activated, in the memory of ``x``, in place or nobody reads that again."""
    if not (torch.is_grad_enabled() and (x.requires_grad or other.requires_grad)):
        with torch.no_grad():
            y = (x if inplace else _alias(x)).add_(other)
            return y if activation is None else _activate(y, activation, True, keep=False).y
    out: Tensor = _Sum.apply(x, other, activation, inplace)  # type: ignore[no-untyped-call]
    return out


def pool(operation: Pool) -> Tensor:
    """A pooling whose gradient is wanted."""
    out: Tensor = _Pool.apply(operation.x, operation.kind, operation.arguments)  # type: ignore[no-untyped-call]
    return out


class _Kept(NamedTuple):
    """A result, and what the gradient needs of how it came about."""

    y: Tensor
    kept: Tensor | None
    shape: Shape | None
    slope: Tensor | None


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        block: Block,
        inplace: bool,
        ranges: list[tuple[int, int]] | None,
        *links: Tensor,
    ) -> Tensor:
        done = _forward(x, block, inplace, keep=True)
        ctx.save_for_backward(done.kept, done.slope)
        ctx.kept_shape = done.shape
        ctx.activation = block.activation
        ctx.ranges = ranges
        ctx.convolution = None
        if block.convolve is not None:
            # Not the operation itself: that holds on to its input.
            ctx.convolution = block.convolve.weight.detach(), block.convolve.geometry
        ctx.shape = x.shape
        ctx.layout = torch.channels_last if is_channels_last(done.y) else torch.contiguous_format
        if done.y is x:
            ctx.mark_dirty(x)
        return done.y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        once()
        kept, slope = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            gradient = gradient.contiguous(memory_format=ctx.layout)
            if ctx.activation is not None:
                gradient = _activation_gradient(gradient, ctx.activation, kept, ctx.kept_shape)
            if ctx.convolution is None:
                if slope is not None:
                    gradient = gradient * _spread(slope.to(gradient.dtype), gradient)
                return gradient, None, None, None
            weight, geometry = ctx.convolution
            weight = weight.to(gradient.dtype)
            if slope is not None and weight.numel() <= gradient.numel():
                weight = _scaled(weight, slope, geometry)
            elif slope is not None:
                gradient = gradient * _spread(slope.to(gradient.dtype), gradient)
            if ctx.ranges is None:
                whole = _gradient_to_input(gradient, weight, geometry, ctx.shape, ctx.layout)
                return whole, None, None, None
            parts = []
            for start, stop in ctx.ranges:
                shape = (ctx.shape[0], stop - start, *ctx.shape[2:])
                own = weight[:, start:stop].contiguous()
                parts.append(_gradient_to_input(gradient, own, geometry, shape, ctx.layout))
            return None, None, None, None, *parts


class _Link(torch.autograd.Function):
    """The graph of a map without the map: something gradients can be given to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(1).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        once()
        return gradient


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor, activation: Activation | None, inplace: bool
    ) -> Tensor:
        y = (x if inplace else _alias(x)).add_(other)
        if inplace:
            ctx.mark_dirty(x)
        ctx.activation = activation
        if activation is None:
            return y
        done = _activate(y, activation, True, keep=True)
        ctx.save_for_backward(done.kept)
        ctx.kept_shape = done.shape
        return done.y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        once()
        if ctx.activation is not None:
            (kept,) = ctx.saved_tensors
            gradient = _activation_gradient(gradient, ctx.activation, kept, ctx.kept_shape)
        return gradient, gradient, None, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, arguments: tuple[Any, ...]) -> Tensor:
        ctx.shape, ctx.kind, ctx.arguments = x.shape, kind, arguments
        ctx.layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
        if kind == "adaptive":
            return F.adaptive_avg_pool2d(x, arguments[0])
        if kind == "average":
            return F.avg_pool2d(x, *arguments)
        y, indices = torch.ops.aten.max_pool2d_with_indices(x, *arguments)
        small = x.shape[2] * x.shape[3] < 2**31
        ctx.save_for_backward(indices.to(torch.int32) if small else indices)
        out: Tensor = y
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        once()
        # The size of the input is all that is read of it: its memory is never touched.
        unread = torch.empty(
            ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=ctx.layout
        )
        back = torch.ops.aten
        if ctx.kind == "adaptive":
            found = back._adaptive_avg_pool2d_backward(gradient, unread)
        elif ctx.kind == "average":
            found = back.avg_pool2d_backward(gradient, unread, *ctx.arguments)
        else:
            (indices,) = ctx.saved_tensors
            wide = indices.to(torch.int64)
            found = back.max_pool2d_with_indices_backward(gradient, unread, *ctx.arguments, wide)
        return found.contiguous(memory_format=ctx.layout), None, None


def once() -> None:
    """Raise a RuntimeError if the gradient is itself to be differentiated: it keeps too little."""
    if torch.is_grad_enabled():
        raise RuntimeError("the gradient of a gradient is wanted")


# --- forward ------------------------------------------------------------------------------------


def _forward(x: Tensor, block: Block, inplace: bool, keep: bool) -> _Kept:
    slope = None
    activated = False
    y = x
    if block.convolve is not None:
        if block.channels_last and x.dim() == 4:
            few = _size_of_result(x, block.convolve.weight, block.convolve.geometry)
            few //= max(1, block.convolve.weight.shape[0])
            order = torch.contiguous_format if few < _FEW_PIXELS else torch.channels_last
            x = x.contiguous(memory_format=order)
        y, slope, activated = _convolve_and_norm(x, block)
    elif block.norm is not None:
        norm = block.norm
        y = F.batch_norm(
            x, norm.mean, norm.variance, norm.weight, norm.bias, training=False, eps=norm.eps
        )
        slope = norm.affine()[0] if keep else None
    if block.activation is None:
        return _Kept(y, None, None, slope)
    done = _activate(y, block.activation, inplace or y is not x, keep, activated)
    return _Kept(done.y, done.kept, done.shape, slope)


class _Convolved(NamedTuple):
    y: Tensor
    slope: Tensor | None
    activated: bool
    """Whether the activation of the block is done already."""


def _convolve_and_norm(x: Tensor, block: Block) -> _Convolved:
    """The convolution of a block and its batch norm, and its activation where that costs nothing.

    Args:
        x: (B, C, ...).
        block: One with a convolution.
    """
    convolve, norm = block.convolve, block.norm
    assert convolve is not None
    weight, bias, geometry = convolve.weight.detach(), convolve.bias, convolve.geometry
    if norm is None:
        y, activated = _convolve(x, weight, bias, geometry, block.activation)
        return _Convolved(y, None, activated)
    slope, offset = norm.affine()
    if bias is not None:
        offset = offset + bias.detach().to(offset.dtype) * slope
    wide = weight.dtype in (torch.float32, torch.float64)
    if wide and weight.numel() <= _size_of_result(x, weight, geometry):
        weight = _scaled(weight, slope, geometry)
        y, activated = _convolve(x, weight, offset.to(weight.dtype), geometry, block.activation)
        return _Convolved(y, slope, activated)
    y, _ = _convolve(x, weight, None, geometry, None)
    if y.dtype == slope.dtype:
        y = torch.addcmul(_spread(offset, y), _spread(slope, y), y, out=y)
    else:
        y = torch.addcmul(_spread(offset, y), _spread(slope, y), y).to(y.dtype)
    return _Convolved(y, slope, False)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, then: Activation | None
) -> tuple[Tensor, bool]:
    """A convolution, and whether what is to be done ``then`` is done already."""
    g = geometry
    wide = x.dtype == torch.float64  # which autocast leaves alone
    if x.device.type == "cpu" and not wide and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if _onednn(x, weight, geometry):
        clip = _clip_of(then)
        return _convolve_onednn(x, weight, bias, geometry, clip), clip is not None
    output_padding = g.output_padding or (0,) * len(g.stride)
    y = torch.convolution(
        x, weight, bias, g.stride, g.padding, g.dilation, g.transposed, output_padding, g.groups
    )
    return y, False


def _clip_of(activation: Activation | None) -> Clip | None:
    """The bounds that an activation keeps values within, if that is all it does."""
    if activation is None or activation.kind not in ("relu", "clip"):
        return None
    return (0.0, None) if activation.kind == "relu" else (activation.low, activation.high)


def _convolve_onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, clip: Clip | None
) -> Tensor:
    """A convolution by oneDNN itself, or with half its multiplications where that pays."""
    g = geometry
    if max(g.stride) == 1 and g.groups == 1 and winograd.suits(x, weight, g.padding, g.dilation):
        return winograd.convolve(x, weight, bias, g.padding, g.dilation, clip)
    if weight.shape[2:].numel() > 1 and g.groups == 1:
        weight = onednn.packed(weight, x.shape, g.padding, g.stride, g.dilation)
    return onednn.convolve(x, weight, bias, g.padding, g.stride, g.dilation, g.groups, clip)


def _onednn(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether oneDNN can be asked for this convolution."""
    plain = geometry.groups == 1 and not geometry.transposed
    if _is_depthwise(weight, geometry):  # PyTorch has a way of its own that is quicker if dilated
        plain = max(geometry.dilation) == 1
    return plain and weight.dtype == x.dtype and is_channels_last(x) and onednn.takes(x)


def _is_depthwise(weight: Tensor, geometry: Geometry) -> bool:
    """Whether there is one kernel per channel, and not several."""
    alone = geometry.groups == weight.shape[0] and weight.shape[1] == 1
    return alone and not geometry.transposed


def _activate(
    y: Tensor, activation: Activation, inplace: bool, keep: bool, done: bool = False
) -> _Kept:
    """An activation, over its input if ``inplace``; and what its gradient needs, if ``keep``.

    ``done``: ``y`` has been clipped already.
    """
    kind = activation.kind
    kept, shape = None, None
    if kind == "relu":
        if not done:
            y = y.relu_() if inplace else y.relu()
        kept, shape = pack_above(y, 0) if keep else (None, None)
    elif kind == "clip":
        if not done:
            y = F.hardtanh(y, activation.low, activation.high, inplace)
        kept, shape = pack_above(y, activation.low, activation.high) if keep else (None, None)
    elif kind in ("leaky", "prelu"):
        kept, shape = pack_above(y, 0) if keep else (None, None)
        if activation.weight is None:
            y = F.leaky_relu(y, activation.slope, inplace)
        else:
            y = torch.prelu(y, activation.weight.to(y.dtype))
    else:
        if keep:
            kept = _derivative(y, activation)
            if kept.dtype == torch.float32:
                kept = kept.mul_(_FIXED).round_().to(torch.int16)
        smooth = activation.approximate
        y = F.silu(y, inplace) if kind == "silu" else F.gelu(y, approximate=smooth)
    return _Kept(y, kept, shape, None)


def _derivative(x: Tensor, activation: Activation) -> Tensor:
    ones = torch.ones_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    back = torch.ops.aten
    found: Tensor = (
        back.silu_backward(ones, x.to(ones.dtype))
        if activation.kind == "silu"
        else back.gelu_backward(ones, x.to(ones.dtype), approximate=activation.approximate)
    )
    return found


def _size_of_result(x: Tensor, weight: Tensor, geometry: Geometry) -> int:
    """About how many numbers a convolution returns."""
    size = x.shape[0] * (weight.shape[1 if geometry.transposed else 0])
    for side, stride in zip(x.shape[2:], geometry.stride, strict=True):
        size *= side * stride if geometry.transposed else -(-side // stride)
    return int(size)


# --- backward -----------------------------------------------------------------------------------


def _activation_gradient(
    gradient: Tensor, activation: Activation, kept: Tensor, shape: Shape | None
) -> Tensor:
    if shape is None:
        whole = kept.is_floating_point()
        return gradient * (kept if whole else kept.to(gradient.dtype).mul_(1 / _FIXED))
    mask = unpack(kept, shape)
    if activation.kind in ("relu", "clip"):
        return gradient * mask  # several times as fast as torch.where
    factor = mask.to(gradient.dtype)
    if activation.weight is None:
        return gradient * factor.mul_(1 - activation.slope).add_(activation.slope)
    weight = _spread(activation.weight.detach().to(gradient.dtype), gradient)
    return gradient * (factor * (1 - weight) + weight)


def _gradient_to_input(
    gradient: Tensor,
    weight: Tensor,
    geometry: Geometry,
    shape: tuple[int, ...],
    layout: torch.memory_format,
) -> Tensor:
    g = geometry
    gradient = gradient.contiguous(memory_format=layout)
    depthwise = _is_depthwise(weight, geometry) and gradient.device.type == "cpu"
    if max(g.stride) == 1 and (depthwise or _onednn(gradient, weight, geometry)):
        # Then the gradient is a convolution, too, with the kernels turned round.
        padding = tuple(
            d * (k - 1) - p for d, k, p in zip(g.dilation, weight.shape[2:], g.padding, strict=True)
        )
        single = weight.shape[2:].numel() == 1 and not any(padding)
        opposite = Geometry(g.stride, padding, g.dilation, g.groups)
        if depthwise and min(padding) >= 0:
            axes = tuple(range(2, weight.dim()))
            return _convolve(gradient, weight.flip(axes), None, opposite, None)[0]
        suits = min(padding) >= 0 and winograd.suits(gradient, weight, padding, g.dilation)
        if not depthwise and (single or suits):
            return _convolve_onednn(gradient, _turned(weight), None, opposite, None)
    unread = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=layout)
    found: Tensor = torch.ops.aten.convolution_backward(
        gradient,
        unread,
        weight,
        None,
        g.stride,
        g.padding,
        g.dilation,
        g.transposed,
        g.output_padding or (0,) * len(g.stride),
        g.groups,
        (True, False, False),
    )[0]
    return found


def _turned(weight: Tensor) -> Tensor:
    """(C, C', k, k) of (C', C, k, k), each kernel turned by half a circle."""
    outer, inner, *kernel = weight.shape
    # Across and back as one matrix: many times as fast as to copy a transposed view.
    across = weight.flip(2, 3).reshape(outer, -1).t().contiguous()
    return across.view(inner, *kernel, outer).movedim(-1, 1)


# --- common -------------------------------------------------------------------------------------


def _scaled(weight: Tensor, slope: Tensor, geometry: Geometry) -> Tensor:
    """The weights of a convolution whose result is scaled by ``slope`` per channel."""
    if not geometry.transposed:
        return weight * slope.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1))
    # Transposed: (C, C' / groups, ...), and each group of C has its own share of the C' channels.
    per_group = slope.to(weight.dtype).view(geometry.groups, 1, -1)
    split = weight.reshape(geometry.groups, -1, *weight.shape[1:])
    return (split * per_group.view(*per_group.shape, *[1] * (weight.dim() - 2))).view_as(weight)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """One value per channel, or one for all, as a factor of ``like`` (B, C, ...)."""
    return values if values.numel() == 1 else values.view(1, -1, *[1] * (like.dim() - 2))


def _alias(x: Tensor) -> Tensor:
    """Another tensor in the memory of ``x``, of which autograd knows nothing, to write to."""
    x = x.detach()
    x[:0].zero_()  # who has kept x for a gradient of its own is told, and raises
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a map lie last in memory; a map of one pixel lies both ways."""
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def only_channels_last(x: Tensor) -> bool:
    """Whether the channels of a map lie last in memory and not first as well."""
    return is_channels_last(x) and not x.is_contiguous()
