"""Run a frozen model so that a step of learning costs little more than a prediction.

While a `LeanForward` is in force, calls of PyTorch's functions are answered by `functions` where
they are known, and left to PyTorch where not. The model itself is never touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bestta.insertion import inserted
from bestta.lean.chains import QUERIES, Plan, Watch, tensors_in
from bestta.lean.functions import Block, Part, add, parts_of, pool, run
from bestta.lean.operations import (
    Activation,
    Add,
    Convolve,
    Follow,
    Follower,
    Join,
    Norm,
    Pool,
    Sum,
    read,
)

Answer = TypeVar("Answer")

_FEW_CHANNELS = 32
_MOST_PARTS = 8


def _nothing() -> None:
    """Like a reference to something that is gone."""


_NOTHING: tuple[Callable[[], None], tuple[()]] = (_nothing, ())


class Surprise(BaseException):
    """A model read a map that, when it was watched, nobody read; and whose chain it belongs to.

    Not an `Exception`: a model's own ``except`` clauses have no business with it.
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights


@dataclass
class _Expected:
    """A map that holds the result of some calls which the model has yet to make."""

    weights: Tensor
    """Of the operation that the chain begins with."""
    value: Tensor
    steps: list[Follower]
    ahead: int
    """How many of the steps its values have in them already."""


class LeanForward(TorchFunctionMode):
    """While in force, frozen operations keep for the backward pass only what it needs."""

    def __init__(self, plan: Plan, channels_last: bool = False) -> None:
        super().__init__()
        self._plan = plan
        self._channels_last = channels_last
        self._gradients = torch.is_grad_enabled()
        self._expected: dict[int, _Expected] = {}
        self._joined: tuple[Callable[[], Tensor | None], tuple[Part, ...]] = _NOTHING

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer a call of the model."""
        named = kwargs or {}
        if func in QUERIES:
            return func(*args, **named)
        operation = read(func, args, named)
        if isinstance(operation, Follow):
            expected = self._expected.get(id(operation.x))
            if expected is not None and expected.ahead and expected.steps[0].same(operation.step):
                return self._go_on(expected)
        elif isinstance(operation, Add):
            done = self._add(operation)
            if done is not None:
                return done
        if self._expected:
            self._check(args, named)
        if isinstance(operation, Convolve):
            return self._start(
                operation.x, Block(operation, channels_last=self._channels_last), operation.weight
            )
        if isinstance(operation, Follow):
            if isinstance(operation.step, Norm):
                return self._start(operation.x, Block(norm=operation.step), operation.step.mean)
            if _wanted(operation.x) and not operation.x._is_view():
                return run(operation.x, Block(activation=operation.step), inplace=operation.inplace)
        if isinstance(operation, Pool) and _wanted(operation.x):
            return pool(operation)
        if isinstance(operation, Join) and torch.is_grad_enabled():
            joined = func(*args, **named)
            parts = parts_of(operation.tensors)
            if 0 < len(parts) <= _MOST_PARTS:
                self._joined = weakref.ref(joined), parts
            return joined
        if func is F.interpolate and self._channels_last:
            args = (_few_channels_first(args[0]), *args[1:]) if args else args
        return func(*args, **named)

    def finish(self) -> None:
        """Raise a `Surprise` if a call that was answered in advance never came."""
        for expected in self._expected.values():
            if expected.ahead:
                raise Surprise(expected.weights)

    def _start(self, x: Tensor, block: Block, weights: Tensor) -> Tensor:
        """Do an operation, and with it as much of what follows as needs nothing else."""
        # Inside of an autograd function, which has a backward pass of its own for what it does,
        # gradients are off: what follows it is not to be done there.
        outside = torch.is_grad_enabled() == self._gradients
        steps = list(self._plan.after(weights)) if outside else []
        ahead = 0
        if steps and isinstance(steps[0], Norm):
            block = block._replace(norm=steps[0])
            ahead = 1
        if len(steps) > ahead and isinstance(step := steps[ahead], Activation):
            block = block._replace(activation=step)
            ahead += 1
        joined, parts = self._joined
        # Of what was put together last, if this is it: gradients to nothing else are wanted.
        y = run(x, block, parts=parts if joined() is x and _is_whole(block) else ())
        if joined() is x:
            self._joined = _NOTHING
        self._expect(weights, y, steps, ahead)
        return y

    def _go_on(self, expected: _Expected) -> Tensor:
        """Answer a call that was done in advance."""
        expected.steps.pop(0)
        expected.ahead -= 1
        if not expected.steps:
            del self._expected[id(expected.value)]
        return expected.value

    def _add(self, operation: Add) -> Tensor | None:
        """A sum, written over an operand of which it is known that nobody else reads it."""
        for x, other in ((operation.x, operation.other), (operation.other, operation.x)):
            expected = self._expected.get(id(x))
            if expected is None or expected.ahead or x is other:
                continue
            del self._expected[id(x)]
            if not isinstance(expected.steps[0], Sum) or (
                # The sum in place of the other operand must change that one.
                operation.inplace and x is not operation.x
            ):
                continue
            self._check((other,), {})
            rest = expected.steps[1:]
            activation = rest[0] if rest and isinstance(rest[0], Activation) else None
            y = add(x, other, activation)
            self._expect(expected.weights, y, rest, ahead=int(activation is not None))
            return y
        return None

    def _expect(self, weights: Tensor, y: Tensor, steps: list[Follower], ahead: int) -> None:
        if steps:
            self._expected[id(y)] = _Expected(weights, y, steps, ahead)

    def _check(self, args: Any, named: Any) -> None:
        """Nobody may read a map that is ahead of the model."""
        for tensor in tensors_in(args, named):
            expected = self._expected.pop(id(tensor), None)
            if expected is not None and expected.ahead:
                raise Surprise(expected.weights)


def _is_whole(block: Block) -> bool:
    """Whether the block begins with a convolution that sees all channels at once."""
    convolve = block.convolve
    return (
        convolve is not None and convolve.geometry.groups == 1 and not convolve.geometry.transposed
    )


def _few_channels_first(x: Any) -> Any:
    """A map of few channels, as logits are, with them first: what follows is pixel by pixel."""
    few = isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] < _FEW_CHANNELS
    return x.contiguous() if few else x


def _wanted(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class LeanModel:
    """Runs one model lean, with layers inserted; learns on the first image what goes together."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...]) -> None:
        self.model, self.layers = model, layers

    def __call__(self, image: Tensor, forward: Callable[[Tensor], Answer]) -> Answer:
        """``forward(image)``, lean. It may be called again, and must then begin anew."""
        while True:
            plan = self._plan(image)
            try:
                return self._run(image, plan, forward)
            except Surprise as surprise:
                self._keep(plan.without(surprise.weights))
            except RuntimeError:
                if not plan.any_layout:
                    raise
                # Perhaps written for maps that lie row by row: if so, those of this model do now.
                plan = replace(plan, any_layout=False)
                answer = self._run(image, plan, forward)
                self._keep(plan)
                return answer

    def _run(self, image: Tensor, plan: Plan, forward: Callable[[Tensor], Answer]) -> Answer:
        last = plan.any_layout and image.dim() == 4 and image.device.type == "cpu"
        with LeanForward(plan, channels_last=last) as lean:
            answer = forward(image)
            lean.finish()
        return answer

    def _plan(self, image: Tensor) -> Plan:
        known = _plans.get(self.model, {})
        if self.layers not in known:
            watch = Watch()
            functions = dict.fromkeys(self.layers, torch.clone)
            with torch.no_grad(), inserted(self.model, functions), watch:
                self.model(image)
            self._keep(watch.plan())
        return _plans[self.model][self.layers]

    def _keep(self, plan: Plan) -> None:
        _plans.setdefault(self.model, {})[self.layers] = plan


_plans: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], Plan]] = WeakKeyDictionary()
"""What is known of each model, with layers at given places."""
