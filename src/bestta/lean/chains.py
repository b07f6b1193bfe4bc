"""Which operations of a model follow each other so closely that they can be done in one go.

A convolution whose result only a batch norm reads, whose result only a ReLU reads, is one
operation. To know that nobody else reads the maps in between, a model is watched once: each map
must be read exactly once, and be gone when the forward is over.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bestta.lean.operations import Activation, Add, Convolve, Follow, Follower, Norm, Sum, read

QUERIES = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "requires_grad")
    ),
}
"""Calls that ask about a tensor and not for its values."""

_LAYOUT = {
    # PyTorch's gradient of it is wrong for one image whose gradient has its channels last.
    F.instance_norm,
    torch.instance_norm,
    torch.as_strided,
    Tensor.as_strided,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.set_,
}
"""Calls whose answer, or gradient, depends on how the values lie in memory."""

_BATCH_NORMS = {F.batch_norm, torch.batch_norm}
"""By the batch's own statistics, an instance norm in disguise; in eval mode, as any other call."""


@dataclass(frozen=True)
class Plan:
    """What is known of a model from watching it."""

    chains: Mapping[int, tuple[Tensor, tuple[Follower, ...]]] = field(default_factory=dict)
    """By the identity of the weights (or running mean) that an operation has to itself: those
    weights, and what follows it."""
    any_layout: bool = False
    """Whether the model never asks how its maps lie in memory."""

    def after(self, weights: Tensor) -> tuple[Follower, ...]:
        """What follows the operation with these weights."""
        held, chain = self.chains.get(id(weights), (None, ()))
        return chain if held is weights else ()

    def without(self, weights: Tensor) -> Plan:
        """The same with nothing behind the operation with these weights."""
        left = {key: chain for key, chain in self.chains.items() if key != id(weights)}
        return Plan(left, self.any_layout)


@dataclass(eq=False)
class _Map:
    """A map that an operation made, and who read it."""

    value: weakref.ref[Tensor]
    weights: Tensor | None
    readers: list[tuple[Follower | None, _Map | None]] = field(default_factory=list)
    overwritten: bool = False

    @property
    def next(self) -> tuple[Follower | None, _Map | None]:
        """The one reader, if it was one, and the map is gone."""
        alone = len(self.readers) == 1 and (self.overwritten or self.value() is None)
        return self.readers[0] if alone else (None, None)


class Watch(TorchFunctionMode):
    """Runs a model as it is, without gradients, and sees which operation reads what."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[int, _Map] = {}
        self._roots: list[_Map] = []
        self._uses: Counter[int] = Counter()
        self._any_layout = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the call, and leave it to PyTorch."""
        named = kwargs or {}
        out = func(*args, **named)
        if func in QUERIES:
            return out
        operation = read(func, args, named)
        if func in _LAYOUT or (func in _BATCH_NORMS and operation is None):
            self._any_layout = False
        step: Follower | None = None
        weights: Tensor | None = None
        if isinstance(operation, Convolve):
            weights = operation.weight
        elif isinstance(operation, Follow):
            step = operation.step
            weights = step.mean if isinstance(step, Norm) else None
        elif isinstance(operation, Add):
            step = Sum()
        made = None
        if isinstance(out, Tensor) and operation is not None:
            made = _Map(weakref.ref(out), weights)
            if weights is not None:
                self._uses[id(weights)] += 1
                self._roots.append(made)
        del operation  # it holds on to the maps
        for read_map, tensor in self._read(args, named):
            read_map.readers.append((step, made))
            read_map.overwritten |= tensor is out
        if made is not None:
            self._maps[id(out)] = made
        elif isinstance(out, Tensor):
            self._maps.pop(id(out), None)
        return out

    def _read(self, args: Any, named: Mapping[str, Any]) -> Iterator[tuple[_Map, Tensor]]:
        """The known maps among the arguments of a call."""
        for tensor in tensors_in(args, named):
            known = self._maps.get(id(tensor))
            if known is not None and known.value() is tensor:
                yield known, tensor

    def plan(self) -> Plan:
        """What was seen; to be asked when the forward is over."""
        chains = {}
        for root in self._roots:
            weights = root.weights
            if weights is None or self._uses[id(weights)] > 1:
                continue
            chain = tuple(_chain(root))
            if chain:
                chains[id(weights)] = (weights, chain)
        return Plan(chains, self._any_layout)


def _chain(root: _Map) -> Iterator[Follower]:
    """What follows: at most a batch norm, a sum and an activation, in this order."""
    allowed: tuple[type, ...] = (Norm, Sum, Activation)
    if _is_norm(root):
        allowed = (Sum, Activation)
    step, made = root.next
    while step is not None and made is not None and isinstance(step, allowed):
        yield step
        allowed = allowed[allowed.index(type(step)) + 1 :]
        step, made = made.next


def _is_norm(made: _Map) -> bool:
    return made.weights is not None and made.weights.dim() == 1


def tensors_in(args: Any, named: Mapping[str, Any] | None = None) -> Iterator[Tensor]:
    """Every tensor among the arguments of a call, in lists and dicts, too."""
    for value in (*args, *(named or {}).values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in((), value)
