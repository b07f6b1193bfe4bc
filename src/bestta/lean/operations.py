"""The operations of a frozen network that are known by heart, as they are called by a model.

`read` turns a call of PyTorch into one of them, or into None where it is another operation or a
form of it that is not known; whoever asks then leaves the call to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Everything about a convolution but its weights."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Norm:
    """A batch norm in eval mode: one slope and one offset per channel."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def same(self, other: object) -> bool:
        """Whether the other one is made of the very same tensors."""
        return (
            isinstance(other, Norm)
            and self.mean is other.mean
            and self.variance is other.variance
            and self.weight is other.weight
            and self.bias is other.bias
            and self.eps == other.eps
        )

    def affine(self) -> tuple[Tensor, Tensor]:
        """Slope and offset, (C,), in fp32 or wider, of the values as they are now."""
        wide = torch.promote_types(self.mean.dtype, torch.float32)
        slope = (self.variance.to(wide) + self.eps).rsqrt_()
        if self.weight is not None:
            slope.mul_(self.weight)
        mean = self.mean.to(wide)
        if self.bias is None:
            return slope, -mean * slope
        return slope, torch.addcmul(self.bias.to(wide), mean, slope, value=-1)


@dataclass(frozen=True, eq=False)
class Activation:
    """A function of each value."""

    kind: Literal["relu", "clip", "leaky", "prelu", "silu", "gelu"]
    low: float = 0.0
    high: float = 0.0
    slope: float = 0.0
    weight: Tensor | None = None
    approximate: str = "none"

    def same(self, other: object) -> bool:
        """Whether the other one is the same function."""
        return (
            isinstance(other, Activation)
            and self.weight is other.weight
            and (self.kind, self.low, self.high, self.slope, self.approximate)
            == (other.kind, other.low, other.high, other.slope, other.approximate)
        )


@dataclass(frozen=True)
class Sum:
    """The sum of two maps of one shape."""

    def same(self, other: object) -> bool:
        """Sums are all alike."""
        return isinstance(other, Sum)


Follower = Norm | Activation | Sum
"""What can be done to a map in the same go as what made it."""


@dataclass(frozen=True)
class Convolve:
    """A convolution, transposed or not, of any dimension."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry


@dataclass(frozen=True)
class Follow:
    """A batch norm or an activation of ``x``."""

    x: Tensor
    step: Norm | Activation
    inplace: bool = False


@dataclass(frozen=True)
class Add:
    """``x + other``, of one shape and dtype."""

    x: Tensor
    other: Tensor
    inplace: bool = False


@dataclass(frozen=True)
class Pool:
    """A pooling of which the gradient needs the size of ``x`` only, or which value it took."""

    x: Tensor
    kind: Literal["max", "average", "adaptive"]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Join:
    """Maps put one behind the other by their channels."""

    tensors: tuple[Tensor, ...]


Operation = Convolve | Follow | Add | Pool | Join


def read(
    call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> Operation | None:
    """The operation that a call asks for, or None where it is not one of those known."""
    reader = _READERS.get(call)
    if reader is None:
        return None
    try:
        operation = reader(*arguments, **named)
    except TypeError:  # written in a way that is not known here, or not at all
        return None
    if operation is None or not all(map(_is_plain, _tensors_of(operation))):
        return None
    return operation


def _is_plain(x: Any) -> bool:
    """Whether this is a tensor of the usual kind, of numbers that gradients exist of."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.layout == torch.strided
        and x.is_floating_point()
    )


def _tensors_of(operation: Operation) -> list[Any]:
    """Every tensor of an operation; a frozen one must be frozen indeed."""
    if isinstance(operation, Add):
        return [operation.x, operation.other]
    if isinstance(operation, Join):
        return list(operation.tensors)
    frozen: list[Any] = []
    if isinstance(operation, Convolve):
        frozen = [operation.weight, operation.bias]
    elif isinstance(operation, Follow) and isinstance(operation.step, Norm):
        norm = operation.step
        frozen = [norm.mean, norm.variance, norm.weight, norm.bias]
    elif isinstance(operation, Follow):
        frozen = [operation.step.weight]
    return [operation.x, *(None if t.requires_grad else t for t in frozen if t is not None)]


# --- readers: one per way of calling, with PyTorch's own names of the arguments -----------------


def _convolution(axes: int) -> Callable[..., Convolve | None]:
    def reader(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Convolve | None:
        if input.dim() != axes + 2:
            return None
        dilation = _per_axis(dilation, axes)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            if any(r % 2 for r in reach):
                return None
            padding = [r // 2 for r in reach]
        geometry = Geometry(_per_axis(stride, axes), _per_axis(padding, axes), dilation, groups)
        return Convolve(input, weight, bias, geometry)

    return reader


def _transposed(axes: int) -> Callable[..., Convolve | None]:
    def reader(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Convolve | None:
        if input.dim() != axes + 2:
            return None
        stride, padding, dilation, output_padding = (
            _per_axis(value, axes) for value in (stride, padding, dilation, output_padding)
        )
        geometry = Geometry(stride, padding, dilation, groups, True, output_padding)
        return Convolve(input, weight, bias, geometry)

    return reader


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Follow | None:
    if training or running_mean is None or running_var is None:
        return None
    return Follow(input, Norm(running_mean, running_var, weight, bias, eps))


def _relu(input: Tensor, inplace: bool = False) -> Follow:
    return Follow(input, Activation("relu"), inplace)


def _relu_(input: Tensor) -> Follow:
    return Follow(input, Activation("relu"), True)


def _relu6(input: Tensor, inplace: bool = False) -> Follow:
    return Follow(input, Activation("clip", 0.0, 6.0), inplace)


def _hardtanh(
    input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Follow:
    return Follow(input, Activation("clip", float(min_val), float(max_val)), inplace)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Follow:
    return Follow(input, Activation("leaky", slope=float(negative_slope)), inplace)


def _prelu(input: Tensor, weight: Tensor) -> Follow:
    return Follow(input, Activation("prelu", weight=weight))


def _silu(input: Tensor, inplace: bool = False) -> Follow:
    return Follow(input, Activation("silu"), inplace)


def _gelu(input: Tensor, approximate: str = "none") -> Follow:
    return Follow(input, Activation("gelu", approximate=approximate))


def _add(input: Any, other: Any, *, alpha: float = 1) -> Add | None:
    alike = (
        isinstance(input, Tensor)
        and isinstance(other, Tensor)
        and alpha == 1
        and input.shape == other.shape
        and input.dtype == other.dtype
        and input.device == other.device
    )
    return Add(input, other) if alike else None


def _add_(input: Any, other: Any, *, alpha: float = 1) -> Add | None:
    found = _add(input, other, alpha=alpha)
    return None if found is None else Add(found.x, found.other, True)


def _cat(tensors: Any, dim: int = 0) -> Join | None:
    maps = tuple(tensors)
    return Join(maps) if dim == 1 and all(x.dim() == 4 for x in maps) else None


def _max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Pool | None:
    if return_indices or input.dim() != 4:
        return None
    kernel = _per_axis(kernel_size, 2)
    step = _per_axis(stride, 2) if stride is not None and stride != () else kernel
    arguments = (kernel, step, _per_axis(padding, 2), _per_axis(dilation, 2), ceil_mode)
    return Pool(input, "max", arguments)


def _avg_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Pool | None:
    if input.dim() != 4:
        return None
    kernel = _per_axis(kernel_size, 2)
    step = _per_axis(stride, 2) if stride is not None and stride != () else kernel
    padding = _per_axis(padding, 2)
    arguments = (kernel, step, padding, ceil_mode, count_include_pad, divisor_override)
    return Pool(input, "average", arguments)


def _adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Pool | None:
    if input.dim() != 4:
        return None
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size,) * 2
    if len(sizes) != 2:
        return None
    wanted = tuple(
        side if want is None else int(want)
        for want, side in zip(sizes, input.shape[2:], strict=True)
    )
    return Pool(input, "adaptive", (wanted,))


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return tuple(int(v) for v in (values * axes if len(values) == 1 else values))


_READERS: dict[Any, Callable[..., Operation | None]] = {
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
    torch.conv_transpose1d: _transposed(1),
    torch.conv_transpose2d: _transposed(2),
    torch.conv_transpose3d: _transposed(3),
    F.batch_norm: _batch_norm,
    F.relu: _relu,
    torch.relu: lambda input: Follow(input, Activation("relu")),
    Tensor.relu: lambda input: Follow(input, Activation("relu")),
    torch.relu_: _relu_,
    Tensor.relu_: _relu_,
    F.relu6: _relu6,
    F.hardtanh: _hardtanh,
    F.leaky_relu: _leaky_relu,
    torch.prelu: _prelu,
    F.silu: _silu,
    F.gelu: _gelu,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.add_: _add_,
    Tensor.__iadd__: _add_,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.max_pool2d: _max_pool2d,
    F.max_pool2d: _max_pool2d,
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
}
