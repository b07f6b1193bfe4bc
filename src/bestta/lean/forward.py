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

from bestta.insertion import inserted, skeleton
from bestta.lean.chains import QUERIES, Plan, Watch, tensors_in
from bestta.lean.functions import (
    Block,
    Part,
    add,
    is_channels_last,
    only_channels_last,
    parts_of,
    pool,
    run,
)
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

_LARGE = 192 * 192
"""From so many pixels on, of all images of a batch, it pays: below, what PyTorch keeps for the
backward pass is little beside the weights, and its own way is quicker."""
_FEW_CHANNELS = 32
_MOST_PARTS = 8


def _nothing() -> None:
    """Like a reference to something that is gone."""


_NOTHING: tuple[Callable[[], None], int, tuple[()]] = (_nothing, 0, ())


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
    given: weakref.ref[Tensor] | None = None
    """What the model was handed for it."""


class LeanForward(TorchFunctionMode):
    """While in force, frozen operations keep for the backward pass only what it needs.

    Of a chain that is done in one go, the model is handed stand-ins for the maps in between: of
    their shape, without values. Whoever reads one all the same is a `Surprise`. One that does so
    where no call is seen, as a scripted function would, finds a tensor on no device, and fails.
    """

    def __init__(self, plan: Plan, channels_last: bool = False, logits_first: bool = False) -> None:
        super().__init__()
        self._plan = plan
        self._channels_last = channels_last
        self._logits_first = logits_first
        self._gradients = torch.is_grad_enabled()
        self.used = 0
        """How many chains of the plan were met with."""
        self._expected: dict[int, _Expected] = {}
        self._spent: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        """Maps that nobody may read any more, and the weights that their chain begins with."""
        self.enlarged: Callable[[], Tensor | None] = _nothing
        """The last map that was interpolated, while it is there."""
        self._joined: tuple[Callable[[], Tensor | None], int, tuple[Part, ...]] = _NOTHING

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer a call of the model."""
        named = kwargs or {}
        if func in QUERIES:
            expected = self._waiting(args[0]) if args else None
            if expected is not None:
                args = (expected.value, *args[1:])
            elif self._spent:
                self._check(args, named)
            return func(*args, **named)
        operation = read(func, args, named)
        # Inside of an autograd function, which has a backward pass of its own for what it does,
        # gradients are off: nothing is done in advance there, nor was it.
        outside = torch.is_grad_enabled() == self._gradients
        if outside and isinstance(operation, Follow):
            expected = self._waiting(operation.x)
            if expected is not None and expected.ahead and expected.steps[0].same(operation.step):
                return self._go_on(expected, operation.x)
        elif outside and isinstance(operation, Add):
            done = self._add(operation)
            if done is not None:
                return done
        if self._expected or self._spent:
            self._check(args, named)
        if isinstance(operation, Convolve):
            block = Block(operation, channels_last=self._channels_last)
            return self._start(operation.x, block, operation.weight, outside)
        if isinstance(operation, Follow):
            if isinstance(operation.step, Norm):
                block = Block(norm=operation.step)
                return self._start(operation.x, block, operation.step.mean, outside)
            if _wanted(operation.x) and not operation.x._is_view():
                block = Block(activation=operation.step)
                return run(operation.x, block, inplace=operation.inplace)
        if isinstance(operation, Pool) and _wanted(operation.x):
            return pool(operation)
        if isinstance(operation, Join) and torch.is_grad_enabled():
            joined = self._join(operation, func, args, named)
            parts = parts_of(operation.tensors)
            if 0 < len(parts) <= _MOST_PARTS:
                self._joined = weakref.ref(joined), joined._version, parts
            return joined
        if func is F.interpolate and self._channels_last and args:
            if self._logits_first:
                args = (_few_channels_first(args[0]), *args[1:])
            larger = func(*args, **named)
            self.enlarged = weakref.ref(larger) if isinstance(larger, Tensor) else _nothing
            if isinstance(larger, Tensor) and _wanted(larger) and only_channels_last(larger):
                # Its gradient, perhaps a part of a larger one, takes long unless it lies so, too.
                larger.register_hook(_channels_last)  # type: ignore[no-untyped-call]
            return larger
        return func(*args, **named)

    def _join(self, operation: Join, func: Any, args: Any, named: Any) -> Tensor:
        """Maps put together; with their channels last if those of some lie so, which is quicker."""
        maps = operation.tensors
        lying = [is_channels_last(x) for x in maps]
        if self._channels_last and any(map(only_channels_last, maps)) and not all(lying):
            return torch.cat([x.contiguous(memory_format=torch.channels_last) for x in maps], 1)
        joined: Tensor = func(*args, **named)
        return joined

    def finish(self) -> None:
        """Raise a `Surprise` if a call that was done in advance never came, or a map lives on."""
        for expected in self._expected.values():
            if expected.ahead:
                raise Surprise(expected.weights)
        for value, weights in self._spent.values():
            if value() is not None:
                raise Surprise(weights)

    def _start(self, x: Tensor, block: Block, weights: Tensor, outside: bool) -> Tensor:
        """Do an operation, and with it as much of what follows as needs nothing else."""
        steps = list(self._plan.after(weights)) if outside else []
        self.used += bool(steps)
        ahead = 0
        if steps and isinstance(steps[0], Norm):
            block = block._replace(norm=steps[0])
            ahead = 1
        if len(steps) > ahead and isinstance(step := steps[ahead], Activation):
            block = block._replace(activation=step)
            ahead += 1
        joined, version, parts = self._joined
        # Of what was put together last, if this is it and as it was: no other gradients are wanted.
        own = joined() is x and x._version == version and _is_whole(block)
        y = run(x, block, parts=parts if own else ())
        if own:
            self._joined = _NOTHING
        return self._hand_out(_Expected(weights, y, steps, ahead))

    def _go_on(self, expected: _Expected, given: Tensor) -> Tensor:
        """Answer a call that was done in advance."""
        del self._expected[id(given)]
        expected.steps.pop(0)
        expected.ahead -= 1
        return self._hand_out(expected)

    def _hand_out(self, expected: _Expected) -> Tensor:
        """The map itself if its values are those of the last call, or else something like it."""
        y = expected.value
        given = self._stand_in(y, expected.weights) if expected.ahead else y
        if expected.steps:
            expected.given = weakref.ref(given)
            self._expected[id(given)] = expected
        return given

    def _waiting(self, x: Any) -> _Expected | None:
        """What is expected to be done to this very tensor, not to one that was at its place."""
        expected = self._expected.get(id(x))
        there = expected is not None and expected.given is not None and expected.given() is x
        return expected if there else None

    def _stand_in(self, y: Tensor, weights: Tensor) -> Tensor:
        given = torch.empty_like(y, device="meta", requires_grad=y.requires_grad)
        self._spend(given, weights)
        return given

    def _spend(self, x: Tensor, weights: Tensor) -> None:
        """Nobody may read ``x`` from now on, but for the call that is expected."""
        key, spent = id(x), self._spent
        spent[key] = weakref.ref(x, lambda _: spent.pop(key, None)), weights

    def _add(self, operation: Add) -> Tensor | None:
        """A sum, written over an operand of which it is known that nobody else reads it."""
        for x, other in ((operation.x, operation.other), (operation.other, operation.x)):
            expected = self._waiting(x)
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
            y = add(x, other, activation if not operation.inplace else None, operation.inplace)
            if operation.inplace:
                return y
            self._spend(x, expected.weights)
            x.data = x.new_empty(0)  # who reads it unseen finds nothing, and fails
            return self._hand_out(
                _Expected(expected.weights, y, rest, ahead=int(activation is not None))
            )
        return None

    def _check(self, args: Any, named: Any) -> None:
        """Nobody may read a map that is ahead of the model, or no more what it was."""
        for tensor in tensors_in(args, named):
            expected = self._waiting(tensor)
            if expected is not None:
                del self._expected[id(tensor)]
                if expected.ahead:
                    raise Surprise(expected.weights)
            spent = self._spent.get(id(tensor))
            if spent is not None and spent[0]() is tensor:
                raise Surprise(spent[1])


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


def _channels_last(gradient: Tensor | None) -> Tensor | None:
    """For a hook: who wants no gradient of a map hands on None."""
    return None if gradient is None else gradient.contiguous(memory_format=torch.channels_last)


def _wanted(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


@dataclass
class _Known:
    """What is known of a model with layers at given places."""

    plan: Plan
    given_up: list[weakref.ref[Tensor]]
    """Weights of chains that surprised even right after the model was watched."""
    unused: bool = False
    """Whether the plan before this one met with none of its chains."""
    given_channels_last: bool = False
    """How the image lay in memory, when the model was watched,"""
    answers_channels_last: bool = False
    """and how the answer of the model itself did,"""
    weight: weakref.ref[nn.Parameter] | None = None
    """and one of its weights that lay so, if any did."""

    def answers_last(self, image: Tensor) -> bool:
        """Whether the model itself would answer with channels last, as far as is known."""
        weight = None if self.weight is None else self.weight()
        return (
            self.answers_channels_last
            and only_channels_last(image) == self.given_channels_last
            and (self.weight is None or (weight is not None and only_channels_last(weight)))
        )


class LeanModel:
    """Runs one model lean, with layers inserted; learns on the first image what goes together."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...]) -> None:
        self.model, self.layers = model, layers
        self.enlarged: Callable[[], Tensor | None] = _nothing
        """The map that the last forward interpolated last, while it is there. The gradient of it
        may lie in memory with channels last, in which order it is quickest."""
        self.owner_channels_last = False
        """Whether the answer of the model itself would have lain so."""

    def __call__(self, image: Tensor, forward: Callable[[Tensor], Answer]) -> Answer:
        """``forward(image)``, lean. It may be called again, and must then begin anew."""
        self.enlarged = _nothing
        if image[:, 0].numel() < _LARGE:
            self.owner_channels_last = True  # whatever it answers is its own
            return forward(image)
        drawn = torch.get_rng_state()
        known = _known.setdefault(self.model, {})
        fresh = self.layers not in known
        own = known[self.layers] if not fresh else self._watched(image)
        laid_out = own.plan.any_layout
        while True:
            known[self.layers] = own
            try:
                answer, used = self._run(image, own, forward)
                break
            except Surprise as surprise:
                if fresh:
                    own.given_up.append(weakref.ref(surprise.weights))
                    own.plan = own.plan.without(surprise.weights)
                else:  # the model has changed, perhaps
                    own, fresh = self._watched(image, own), True
            except RuntimeError:
                if not own.plan.any_layout:
                    own.plan = replace(own.plan, any_layout=laid_out)  # it was not the layout
                    raise
                # Perhaps written for maps that lie row by row: if so, those of this model do now.
                own.plan = replace(own.plan, any_layout=False)
            torch.set_rng_state(drawn)
        if own.plan.chains and not used and not own.unused:
            # Other weights than those it knows: to be watched anew, but not with every image.
            own.unused = True
            known[self.layers] = self._watched(image, own)
        return answer

    def _run(
        self, image: Tensor, known: _Known, forward: Callable[[Tensor], Answer]
    ) -> tuple[Answer, int]:
        last = known.plan.any_layout and image.dim() == 4 and image.device.type == "cpu"
        self.owner_channels_last = known.answers_last(image)
        first = last and not self.owner_channels_last
        with LeanForward(known.plan, channels_last=last, logits_first=first) as lean:
            answer = forward(image)
            lean.finish()
        self.enlarged = lean.enlarged
        return answer, lean.used

    def _watched(self, image: Tensor, before: _Known | None = None) -> _Known:
        """The model, watched on a part of the image, which shows as much in less time and memory.

        What is watched is a copy of its modules that shares all tensors, so that a model that keeps
        something from one image for the next keeps nothing of this.
        """
        try:
            model = skeleton(self.model)
        except ValueError:  # something in it cannot be copied
            model = self.model
        try:
            plan, answers_last = self._watch(model, _corner(image))
        except Exception:  # a model of one size
            plan, answers_last = self._watch(model, image)
        lying_last = filter(only_channels_last, self.model.parameters())
        given_up = [] if before is None else before.given_up
        for weights in given_up:
            held = weights()
            plan = plan if held is None else plan.without(held)
        return _Known(
            plan,
            given_up,
            unused=before is not None and before.unused,
            given_channels_last=only_channels_last(image),
            answers_channels_last=answers_last,
            weight=next((weakref.ref(w) for w in lying_last), None),
        )

    def _watch(self, model: nn.Module, image: Tensor) -> tuple[Plan, bool]:
        """What goes together in the model, and whether it answers with channels last."""
        watch = Watch()
        functions = dict.fromkeys(self.layers, torch.clone)
        drawing = torch.random.fork_rng(devices=[image.device] if image.is_cuda else [])
        with torch.no_grad(), drawing, inserted(model, functions), watch:
            before = torch.get_rng_state()
            answer = model(image)
            random = not torch.equal(before, torch.get_rng_state())
        maps = [x for x in tensors_in((answer,)) if x.dim() == 4]
        answers_last = bool(maps) and all(map(only_channels_last, maps))
        del answer, maps
        plan = watch.plan()
        # Which value a random number falls on depends on how they lie in memory.
        return replace(plan, any_layout=False) if random else plan, answers_last


def _corner(image: Tensor) -> Tensor:
    """The middle of one image, at least 128 pixels of it each way, in multiples of 64."""
    height, width = (max(128, side // 128 * 64) for side in image.shape[-2:])
    top, left = ((image.shape[2] - height) // 2, (image.shape[3] - width) // 2)
    part = image[:1, :, max(0, top) :, max(0, left) :][:, :, :height, :width]
    last = only_channels_last(image)
    return part.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


_known: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], _Known]] = WeakKeyDictionary()
"""What is known of each model, with layers at given places."""
