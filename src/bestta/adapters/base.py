"""What every method has in common: a model, a step per image, and state that can be seen and kept.

A method is one file: a config (a frozen dataclass), and an `Adapter` with

- ``prepare()``, once: what is built or switched;
- ``step(image)``, per image: predict, measure, update;
- ``tensors()``: the tensors it learns in, by name. (Where what is learned grows and shrinks,
  ``state()`` and ``restore(state)`` instead.)

The rest is here. A step is a transaction: if it raises, or leaves anything that is not finite, the
state is put back as it was. Labels and domain names never reach an adapter; a method that must be
told of domain changes declares it, and whoever runs the stream calls its ``domain_changed()``.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn

from bestta._version import __version__
from bestta.adapters.preparation import Preparation
from bestta.files import load_tensors, save_tensors
from bestta.guard import GOOD, NOT_FINITE, PREFIX, Guard, glance_at
from bestta.insertion import check_model, device_of, freeze, unfreeze
from bestta.outputs import OutputKey, Task, select_logits
from bestta.profile import ModelIdentity, SourceProfile, check_image

KIND = "adapter state"
FORMAT = 1
COUNTERS = ("images_seen", "images_adapted")


@dataclass(frozen=True)
class StepReport:
    """What one call of an adapter did."""

    images_seen: int = 0
    """How many images the adapter has answered since its start or last reset, with this call's."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Value of each loss that was computed, unweighted; where several are weighed against each
    other, also their weighted ``total``."""
    adapted: bool = False
    """Whether the method's parameters were updated."""
    skipped: bool = False
    """Whether the method was passed over: the prediction is the source model's."""
    rolled_back: bool = False
    """Whether the image was refused or its step undone: the state is that of before the image."""
    reason: str = ""
    """Why nothing was adapted, if so."""
    guard: str = ""
    """What the guard has decided, if it did not let the method be."""
    learned_from: int = 0
    """Of how many images an update was, if not of this call's: those gathered before it count."""
    adapted_share: float = 0.0
    """Fraction of the images seen, with this call's, from which the parameters were updated."""
    time_ms: float = 0.0
    """Wall time of the call."""

    @classmethod
    def undone(cls, reason: str, losses: Mapping[str, float] | None = None) -> StepReport:
        """What a step returns that must leave no trace; the adapter then puts the state back."""
        return cls(rolled_back=True, reason=reason, losses=losses or {})


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Settings that every method takes."""

    output: OutputKey = None
    """Where the model keeps its logits: a key or position, if it returns a dict or a tuple."""
    seed: int = 0
    """Start of the generator that every random choice of a method draws from."""
    guard: bool = False
    """Watch the answers, undo what does harm, and let the plain model answer where adapting does
    not seem worth it: see `bestta.guard`."""
    guard_margin: float | None = None
    """Points of score that adapting must seem to be worth, or else the plain model answers; by
    default 0.5 in segmentation and 1 in classification, where it is -1 for BESTTA with weighed
    statistics, which leave images like the source's as they are."""


class Adapter(ABC):
    """A method wrapped round a model: ``(B, 3, H, W) → logits``, adapting as it predicts."""

    name: ClassVar[str]
    """The name it is registered under."""
    Config: ClassVar[type[AdapterConfig]] = AdapterConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings by task."""
    forms: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {}
    """Other forms of the method, by name: settings by task in place of the preset's. Of a profile
    they take what it has for ``<method>-<form>``, such as the layers, not for the usual form."""
    tasks: ClassVar[tuple[Task, ...]] = ("classification", "segmentation")
    """What it is defined for."""
    why_not: ClassVar[str] = ""
    """Why it is not defined for the other task."""
    needs_profile: ClassVar[bool] = False
    Preparation: ClassVar[type[Preparation] | None] = None
    """What it learns from source images beforehand, by `bestta.prepare`, if anything."""
    needs_domain_changes: bool = False
    """Whether ``domain_changed()`` has to be called at each domain change, by someone who knows of
    it; for most methods that is a ``reset()``."""
    has_still: ClassVar[bool] = False
    """Whether it adapts without what it has learned, by `unlearn`, better than not at all."""
    remembers: ClassVar[bool] = True
    """Whether an answer depends on anything but its image: on what came before, or on chance."""
    state_settings: ClassVar[tuple[str, ...]] = ()
    """Settings without which a saved state has no meaning: they must agree when it is loaded."""

    @torch.inference_mode(False)
    def __init__(
        self, model: nn.Module, profile: SourceProfile | None, config: AdapterConfig
    ) -> None:
        check_model(model)
        if profile is not None:
            profile.check(model)
        self.model, self.profile, self.config = model, profile, config
        self.device = device_of(model)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.last = StepReport(reason="no image yet")
        self.images_seen = 0
        self.images_adapted = 0
        self._pauses = 0
        self.holding = False
        """While true, nothing is learned, by a method that has a still form."""
        self.forgot = False
        """Whether the last step has forgotten what was learned, by itself."""
        self.guard: Guard | None = None
        if not isinstance(config.guard, bool):
            raise ValueError(f"guard is True or False, not {config.guard!r}.")
        if config.guard:
            home = profile.answers if profile is not None else None
            if home is None:
                warnings.warn(
                    f"the guard does not know how {type(model).__name__} answers source images, "
                    "and may leave gains alone: give a profile of "
                    "bestta.SourceProfile.collect(model, images, layers=[…]), any layer will do, "
                    "or guard=False.",
                    stacklevel=3,
                )
            self.guard = Guard(home, config.guard_margin, trusting=self.leaves_home_alone)
        freeze(model)
        # Called by remove(), or when the adapter is no longer used; once.
        self._release = weakref.finalize(self, unfreeze, model)
        self._release.atexit = False
        try:
            self.prepare()
        except BaseException:
            self._release()
            raise
        self._start = compact(self.whole_state())

    # --- what a method writes -------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> None:
        """Build, switch or inject what the method needs; the model is frozen already."""

    @abstractmethod
    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict, measure, update. ``image`` is finite, (B, C, H, W); gradients are enabled."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything the method learns in, by name: the tensors themselves, the same every time."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """A copy of everything the method has learned; missing means not yet begun.

        With the counters, the generator and the guard it is all that later answers may depend on:
        saved states and resumed runs rely on it, and so do runs that know a block by how it begins.
        """
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    def snapshot(self) -> dict[str, Tensor]:
        """The state, to go back to; it may share what a step never changes in place."""
        return self.state()

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over (a copy of) what `state` returned."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state[name])

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ValueError if a state from outside does not fit."""
        for name, tensor in state.items():
            if not is_finite(tensor):
                raise ValueError(f"this state is damaged: {name} holds NaN or infinite numbers.")
        if type(self).restore is Adapter.restore:
            check_shapes(state, {name: t.shape for name, t in self.tensors().items()})

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters the method trains, by name."""
        return {}

    def unlearn(self) -> None:
        """Forget what was learned; by default everything, as at the start."""
        own = {n: t for n, t in self._start.items() if n not in (*COUNTERS, "generator")}
        self.restore({n: t for n, t in own.items() if not n.startswith(PREFIX)})

    def relearn(self, state: Mapping[str, Tensor]) -> None:
        """Take over what was learned, from what `state` returned."""
        self.restore(state)

    def learned_size(self) -> float:
        """Size of what was learned, in source deviations, where it is measured in them."""
        return 0.0

    def predict_unlearned(self, image: Tensor) -> Tensor | None:
        """The logits without what was learned; None if that makes no difference, or is no form."""
        return None

    def domain_changed(self) -> None:
        """What happens at a domain change, to a method that asks to be told of it."""
        if self.needs_domain_changes:
            self.reset()

    def prepared(self, without: str = "") -> Mapping[str, Tensor]:
        """What `bestta.prepare` has left in the profile for this method, or a ValueError.

        Args:
            without: What would do without it, if anything does.
        """
        found = self.profile.prepared.get(self.name) if self.profile is not None else None
        if found is None:
            raise ValueError(
                f"method {self.name!r} learns from source images beforehand, and "
                + ("there is no profile" if self.profile is None else "this profile holds nothing")
                + f" for it: profile = bestta.prepare(model, images, method={self.name!r})"
                + (f". {without}" if without else ".")
            )
        return {name: tensor.to(self.device, copy=True) for name, tensor in found.items()}

    # --- what a user calls ----------------------------------------------------------------

    def __call__(self, image: Tensor) -> Tensor:
        """Predict ``image`` (B, C, H, W), and adapt to it. Returns the logits, detached.

        What the call did is in ``self.last``. An image with NaN or infinite pixels is answered
        by the source model and leaves no trace in the state.
        """
        if not self._release.alive:
            raise RuntimeError("this adapter was removed from its model; make a new one.")
        check_model(self.model)
        if device_of(self.model) != self.device:
            raise ValueError(
                f"the model was moved from {self.device} to {device_of(self.model)} after this "
                "adapter was made; save its state, make one where the model is, and load it."
            )
        check_image(image)
        weights = next(self.model.parameters(), image)
        if image.dtype == torch.float64 and weights.dtype != torch.float64:
            raise ValueError(
                f"the image is torch.float64, as NumPy's arrays are by default, and the model is "
                f"{weights.dtype}: give image.to({weights.dtype})."
            )
        if self.profile is not None and image.shape[1] != self.profile.input_channels:
            raise ValueError(
                f"images of {self.profile.input_channels} channels are expected, as the profile "
                f"was collected from; this has shape {tuple(image.shape)}."
            )
        started = time.perf_counter()
        # Streams often run under no_grad or inference_mode; a step needs gradients all the same.
        with torch.inference_mode(False), torch.enable_grad():
            torch.clear_autocast_cache()  # it would keep weights as they were before they learned
            image = (image.clone() if image.is_inference() else image).to(self.device)
            reason = self._reason_to_skip(image)
            if reason:
                report = StepReport(skipped=True, reason=reason)
                prediction = self.predict_source(image)
            else:
                prediction, report = self.answered(image)
        self.images_seen += len(image)
        self.images_adapted += (report.learned_from or len(image)) if report.adapted else 0
        elapsed = (time.perf_counter() - started) * 1e3
        self.last = replace(
            report,
            images_seen=self.images_seen,
            adapted_share=self.images_adapted / self.images_seen,
            time_ms=elapsed,
        )
        return prediction.detach()

    def answered(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """One image: a step, watched by the guard if there is one; all of it, or nothing."""
        if self.guard is None:
            return self._transaction(image)
        before = self.whole_state()
        try:
            return self._guarded(image)
        except BaseException:
            self.restore_whole(before)
            raise

    def predict_source(self, image: Tensor) -> Tensor:
        """The logits of the plain source model; nothing adapts."""
        with torch.no_grad():
            return select_logits(self.model(image), self.config.output)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the context lasts, calls are answered by the plain source model, exactly."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What happens while the context lasts leaves no trace: the state is put back afterwards.

        To see how the adapter would answer images that are not its stream's: each of them in a
        trial of its own is answered by what was learned up to now.
        """
        with torch.inference_mode(False):
            before, last = self.whole_state(), self.last
        try:
            yield
        finally:
            with torch.inference_mode(False):
                self.restore_whole(before)
            self.last = last

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Back to the exact starting point: as if no image had been seen."""
        self.restore_whole(self._start)
        self.last = StepReport(reason="reset")

    def remove(self) -> None:
        """Let go of the model, whose parameters get back the ``requires_grad`` they had."""
        self._release()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything learned so far as one safetensors file; the model is not in it."""
        about = {
            "kind": KIND,
            "format": FORMAT,
            "method": self.name,
            "bestta": __version__,
            "model": vars(self._identity()),
            "settings": self.settings,
        }
        save_tensors(path, self.whole_state(), about)

    @torch.inference_mode(False)
    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote, with the same model, method and settings.

        Settings that only steer what happens next (a learning rate, say) may differ; those that
        give the numbers their meaning (``state_settings``) may not.
        """
        state, about = load_tensors(path, KIND)
        try:
            method, version, settings = about["method"], about["format"], dict(about["settings"])
            saved = ModelIdentity(**about["model"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged {KIND}: {error!r}.") from error
        if version != FORMAT or method != self.name:
            raise ValueError(
                f"{path} holds a state of method {method!r} (format {version}); "
                f"this adapter is {self.name!r} (format {FORMAT})."
            )
        if saved.fingerprint != self._identity().fingerprint:
            saved.check(self.model, KIND)
        for name in self.state_settings:
            ours, theirs = self.settings[name], settings.get(name)
            if ours != theirs:
                raise ValueError(
                    f"{path} was saved with {name}={theirs!r}, this adapter has {name}={ours!r}; "
                    f"make one with the saved value: bestta.adapt(…, {name}={theirs!r})."
                )
        # States of before images_adapted was counted have none.
        state.setdefault("images_adapted", torch.tensor(0))
        ours = self.generator.get_state()
        generator = state.get("generator", torch.empty(0))
        counters = [state.get(name, torch.empty(0)) for name in COUNTERS]
        if any((c.dtype, c.dim()) != (torch.int64, 0) for c in counters) or (
            (generator.dtype, generator.shape) != (ours.dtype, ours.shape)
        ):
            raise ValueError(f"{path} is a damaged {KIND}: its counter or generator is not one.")
        own = {k: v for k, v in state.items() if k not in (*COUNTERS, "generator")}
        self.check_state({k: v for k, v in own.items() if not k.startswith(PREFIX)})
        if self.guard is not None:
            self.guard.check(own)
            good = {k.removeprefix(GOOD): v for k, v in own.items() if k.startswith(GOOD)}
            if good:
                self.check_state(good)
        self.restore_whole(state)

    def whole_state(self) -> dict[str, Tensor]:
        """Everything that later answers depend on: what is learned, counters, chance, the guard's.

        To go back to by `restore_whole`, and to be read only: it may share tensors.
        """
        return {
            **self.snapshot(),
            **{name: torch.tensor(getattr(self, name)) for name in COUNTERS},
            "generator": self.generator.get_state(),
            **(self.guard.state() if self.guard is not None else {}),
        }

    def restore_whole(self, state: Mapping[str, Tensor]) -> None:
        """Go back to what `whole_state` returned."""
        own = dict(state)
        for name in COUNTERS:
            setattr(self, name, int(own.pop(name)))
        self.generator.set_state(own.pop("generator"))
        guarding = {name: own.pop(name) for name in list(own) if name.startswith(PREFIX)}
        if self.guard is not None:
            self.guard.restore(guarding)
        self.restore(own)

    @torch.inference_mode(False)
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned. Raises a ValueError, and changes nothing, if unfit."""
        self.check_state(state)
        self.restore(state)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting in force, as JSON has it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.config).items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an adapter is not copied: make another one, and load this one's state.")

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.trainable.values())
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {count} trainable numbers, "
            f"{self.images_seen} images seen)"
        )

    # --- inside ---------------------------------------------------------------------------

    def _reason_to_skip(self, image: Tensor) -> str:
        if self._pauses:
            return "paused"
        if not is_finite(image):
            return f"{int((~image.isfinite()).sum())} pixel values are NaN or infinite"
        return ""

    def _guarded(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """A step under the guard's eye, answered by whoever deserves it."""
        guard = self.guard
        assert guard is not None
        due, source = guard.due, None
        if guard.mode == "source" and not due:
            source = self.predict_source(image)
            if is_blank(image) or not guard.passed(glance_at(source), self.learned_size()):
                return source, self._left_alone(StepReport(), guard.words())
            due = True
        self.holding = guard.mode != "learning"
        still = self.predict_unlearned(image) if due and not self.holding else None
        prediction, report = self._transaction(image)
        if self.forgot:
            guard.begin_anew(self)
        # One change counts once, however many layers tell of it one after another.
        if not (report.rolled_back or guard.looks_left) and self.style_moved():
            guard.look_closely()
        # A blank image tells nothing, however many of them come.
        blank = report.rolled_back and is_blank(image)
        if blank or guard.shrugs(refused=report.rolled_back) or report.skipped:
            if report.skipped or (guard.looks > 0 and guard.mode != "source"):
                return prediction, replace(report, guard=guard.words())
            source = self.predict_source(image) if source is None else source
            return source, replace(report, skipped=True, guard=guard.words())
        if not due:
            if not guard.passed(glance_at(prediction), self.learned_size()):
                return prediction, replace(report, guard=guard.words())
            # Nobody knew before the step that it would be asked for.
            still = None if self.holding else self.predict_unlearned(image)
        source = self.predict_source(image) if source is None else source
        return self._looked_at(source, prediction, report, still)

    def _looked_at(
        self, source: Tensor, adapted: Tensor, report: StepReport, still: Tensor | None
    ) -> tuple[Tensor, StepReport]:
        """Who answers an image that the guard compares the answers to."""
        assert self.guard is not None
        verdict = self.guard.look(self, source, adapted, still, self.learned_size())
        report = replace(report, guard=verdict.words)
        if verdict.returned:
            report = replace(report, adapted=False, reason="what was learned before is back")
        if verdict.rolled_back:
            report = replace(report, adapted=False, rolled_back=True, reason=verdict.words)
        if verdict.answered_by == "source" and verdict.words == NOT_FINITE:
            return source, replace(report, skipped=True)
        if verdict.answered_by == "source":
            if not self.has_still:
                self.unlearn()  # it learned from this image, and there is no form that does not
            return source, self._left_alone(report, verdict.words)
        if verdict.answered_by == "still" and still is not None:
            return still, report
        if verdict.rolled_back and not self.has_still:
            return source, replace(report, skipped=True)
        return adapted, report

    def _left_alone(self, report: StepReport, words: str) -> StepReport:
        """The report of an image that the plain model has answered, and why."""
        return replace(report, adapted=False, skipped=True, reason=words, guard=words)

    @property
    def leaves_home_alone(self) -> bool:
        """Whether images like the source's are left as they are, by the method itself."""
        return False

    def style_moved(self) -> bool:
        """Whether the last image that was adapted to tells of another style."""
        return False

    @contextmanager
    def _slowed_down(self) -> Iterator[None]:
        """Of what is trained while the context lasts, only the part that the guard lets happen."""
        pace = 1.0 if self.guard is None else self.guard.pace
        before = [(p, p.detach().clone()) for p in self.trainable.values()] if pace < 1 else []
        self.forgot = False
        yield
        if self.forgot:
            return  # all at once
        with torch.no_grad():
            for parameter, value in before:
                parameter.lerp_(value, 1 - pace)

    def _transaction(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """A step of which nothing remains if it raises or is not finite."""
        before = self.whole_state()
        try:
            with self._slowed_down():
                prediction, report = self.step(image)
            finite = is_finite(prediction)
            if not finite:
                report = StepReport.undone("the adapted prediction is not finite", report.losses)
            elif not report.rolled_back and not is_finite(*self._learned()):
                report = StepReport.undone("the state after the step is not finite", report.losses)
        except BaseException:
            self.restore_whole(before)
            raise
        if report.rolled_back:
            self.restore_whole(before)
        if not finite:
            prediction, report = self.predict_source(image), replace(report, skipped=True)
        return prediction, report

    def _learned(self) -> list[Tensor]:
        """Every tensor of the state, without a copy where there is no need of one."""
        whole = type(self).state is Adapter.state
        return list(self.tensors().values() if whole else self.snapshot().values())

    def _identity(self) -> ModelIdentity:
        return self.profile.model if self.profile else ModelIdentity.of(self.model)


def warn_caller(text: str) -> None:
    """A UserWarning at the line that called the library, from however deep inside of it."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "bestta",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def check_shapes(
    state: Mapping[str, Tensor],
    needed: Mapping[str, torch.Size],
    optional: Mapping[str, torch.Size] | None = None,
) -> None:
    """Raise a ValueError unless ``state`` holds what is needed, each in its shape, and no more."""
    known = {**needed, **(optional or {})}
    for name in (*needed, *state):
        if name not in state or name not in known or state[name].shape != known[name]:
            seen = tuple(state[name].shape) if name in state else "missing"
            wanted = tuple(known[name]) if name in known else "nothing of that name"
            raise ValueError(
                f"this state does not fit the adapter: {name} is {seen}, expected {wanted}."
            )


def compact(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, to be read only: zeros take no room, and equal ones are held once.

    So a student, its teacher and their moments, at the start, take the room of one of them.
    """
    kept: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
    held = {}
    for name, tensor in state.items():
        if not bool(tensor.any()):
            held[name] = tensor.new_zeros(()).expand(tensor.shape)
            continue
        alike = kept.setdefault((tensor.shape, tensor.dtype, tensor.device), [])
        held[name] = next((other for other in alike if torch.equal(other, tensor)), tensor)
        if held[name] is tensor:
            alike.append(tensor)
    return held


def is_finite(*tensors: Tensor) -> bool:
    """Whether no value is NaN or infinite; at the cost of a sum of each when all is well."""
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:  # Adam counts its steps on the CPU, wherever the weights are
        sums.setdefault(tensor.device, []).append(tensor.detach().sum(dtype=torch.float32))
    if all(bool(torch.stack(some).isfinite().all()) for some in sums.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def is_blank(image: Tensor) -> bool:
    """Whether some image of (B, C, H, W) shows nothing: a lens cap, a dead sensor, a white-out.

    Features do not tell: where a convolution pads, they have edges.
    """
    for seen in (image[:, :, ::16, ::16], image):  # nearly always, the first is enough
        if bool((seen.amax((2, 3)) > seen.amin((2, 3))).any(1).all()):
            return False
    return True
