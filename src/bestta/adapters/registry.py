"""Which methods there are, and how one is made from a name, a preset and settings."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from bestta._version import __version__
from bestta.adapters.base import Adapter, AdapterConfig
from bestta.adapters.settings import is_number
from bestta.insertion import check_model, freeze, unfreeze
from bestta.outputs import OutputKey, Task, select_logits, task_of
from bestta.profile import ModelIdentity, SourceProfile

TASKS: tuple[str, ...] = get_args(Task)

_methods: dict[str, type[Adapter]] = {}

AnyAdapter = TypeVar("AnyAdapter", bound=Adapter)


def register_adapter(name: str) -> Callable[[type[AnyAdapter]], type[AnyAdapter]]:
    """Make a method known as ``bestta.adapt(model, method=name)``."""

    def register(adapter: type[AnyAdapter]) -> type[AnyAdapter]:
        if name in _methods:
            raise ValueError(f"there is a method {name!r} already: {_methods[name].__name__}.")
        adapter.name = name
        _methods[name] = adapter
        return adapter

    return register


def methods() -> list[str]:
    """Names of the methods that `adapt` knows."""
    return sorted(_methods)


def method_class(name: str) -> type[Adapter]:
    """The class behind the name of a method, or a ValueError that says which ones there are."""
    found: type[Adapter] = _lookup(name, _methods, "method")
    return found


def adapt(
    model: nn.Module,
    profile: SourceProfile | str | os.PathLike[str] | None = None,
    *,
    method: str = "bestta",
    preset: str | None = None,
    **settings: Any,
) -> Adapter:
    """Wrap ``model`` so that it adapts to every image it predicts.

    Args:
        model: Any model in eval mode. Its parameters are frozen and never change.
        profile: What is known of the source (`SourceProfile`), or the file it was saved to.
            A method that needs nothing from the source takes none.
        method: One of `methods`.
        preset: ``"segmentation"`` or ``"classification"``; by default told from the model's logits.
            Or a form of the method that is not its usual one: ``"paper"`` for BESTTA as published,
            ``"single"`` for the same with relative, bounded γ and the guard.
        **settings: Any setting of the method by name. What is named here wins over the
            profile's settings, and those win over the preset's.

    Returns:
        The adapter: ``adapter(image)`` predicts, and has adapted.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
        >>> profile = SourceProfile.collect(model, torch.rand(5, 3, 8, 8), layers=["1"])
        >>> adapter = adapt(model, profile)
        >>> adapter(torch.rand(1, 3, 8, 8)).shape, adapter.last.adapted
        (torch.Size([1, 2, 6, 6]), True)
    """
    check_model(model)
    known = method_class(method)
    profile = _opened(profile)
    if profile is None and known.needs_profile:
        raise ValueError(
            f"method {method!r} needs a source profile: "
            "bestta.SourceProfile.collect(model, images, layers=[…]) makes one."
        )
    return known(model, profile, configured(known, model, profile, preset, settings))


def prepare(
    model: nn.Module,
    images: Iterable[Any],
    *,
    method: str,
    profile: SourceProfile | str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    preset: str | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> SourceProfile:
    """Let a method learn from source images what it needs, once, before deployment.

    Args:
        model: The source model, in eval mode. It is left as it is.
        images: Batches (B, 3, H, W) normalised as the model wants them, or tuples that begin with
            one. Where a tuple goes on with labels, methods that train on the source use them;
            without, the model's own predictions stand in. Where a method goes through them several
            times (PETAL, EcoTTA), a list or a DataLoader, not a generator.
        method: One that prepares itself: ``"eata"``, ``"ecotta"``, ``"petal"``.
        profile: A profile to add it to, or its file; without, a new one is made.
        checkpoint: A file that keeps what was learned so far. Stopped, by Ctrl-C (a
            KeyboardInterrupt) or otherwise, the same call goes on from it, to the bit if the
            images come in the same order. Remove it once the profile is saved.
        preset: As in `adapt`.
        progress: Show how far it is; by default on a terminal.
        **settings: Any setting of the method by name.

    Returns:
        The profile, to be saved and given to `adapt`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        >>> profile = prepare(model, torch.rand(5, 3, 8, 8), method="eata")
        >>> sorted(profile.prepared["eata"])
        ['1.bias', '1.weight']
        >>> adapter = adapt(model, profile, method="eata")
    """
    check_model(model)
    known = method_class(method)
    if known.Preparation is None:
        able = [name for name in methods() if _methods[name].Preparation is not None]
        raise ValueError(
            f"method {method!r} learns nothing from source images beforehand: "
            f"bestta.adapt(…, method={method!r}) is all. Those that do: {', '.join(able)}."
        )
    profile = _opened(profile)
    if profile is not None:
        profile.check(model)
    config = configured(known, model, profile, preset, settings)
    identity = ModelIdentity.of(model)
    reads = known.Preparation.reads
    about = {
        "method": method,
        "bestta": __version__,
        "model": vars(identity),
        "settings": json.loads(
            json.dumps({k: v for k, v in asdict(config).items() if k in (reads or asdict(config))})
        ),
    }
    freeze(model)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            preparation = known.Preparation(model, config)
            count, image = preparation.run(images, about, checkpoint, show=progress)
            with torch.no_grad():
                logits = select_logits(model(image), config.output)
            learned = {name: t.detach().cpu().clone() for name, t in preparation.result().items()}
    finally:
        unfreeze(model)
    note = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "images": count,
        "labels": preparation.labelled,
        **about,
    }
    if profile is None:
        profile = SourceProfile(
            layers={},
            images=count,
            model=identity,
            task=task_of(logits),
            input_channels=image.shape[1],
            output=config.output,
            prepared={method: learned},
        )
    return replace(
        profile,
        prepared={**profile.prepared, method: learned},
        settings={
            **profile.settings,
            method: {**profile.settings.get(method, {}), **preparation.settings()},
        },
        provenance={
            **profile.provenance,
            "prepared": {**profile.provenance.get("prepared", {}), method: note},
        },
    )


def _opened(profile: Any) -> SourceProfile | None:
    if isinstance(profile, str | os.PathLike):
        return SourceProfile.load(profile)
    if profile is not None and not isinstance(profile, SourceProfile):
        raise ValueError(f"profile must be a SourceProfile, not {type(profile).__name__}.")
    return profile


def configured(
    known: type[Adapter],
    model: nn.Module,
    profile: SourceProfile | None,
    preset: str | None,
    settings: Mapping[str, Any],
) -> AdapterConfig:
    """The settings in force: the call's over the profile's over those of the task.

    The model is asked for its task only if neither ``preset`` nor the profile says it.
    """
    if preset is not None:
        _lookup(preset, dict.fromkeys((*TASKS, *known.forms)), f"preset of {known.name!r}")
    form = preset if preset in known.forms else None
    task = preset if form is None and preset else (profile.task if profile is not None else None)
    output = settings.get("output", profile.output if profile is not None else None)
    if task is None and (known.presets or set(known.tasks) != set(TASKS)):
        task = probe_task(model, output)
    if task is not None and task not in known.tasks:
        raise ValueError(
            f"method {known.name!r} is defined for {' and '.join(known.tasks)}, not for {task}: "
            f"{known.why_not}"
        )
    presets = known.presets if form is None else known.forms[form]
    chosen: dict[str, Any] = {"output": output, **presets.get(task or "", {})}
    if profile is not None:
        whose = known.name if form is None else f"{known.name}-{form}"
        chosen.update(profile.settings.get(whose, {}))
    chosen.update(settings)
    for name in chosen:
        _lookup(name, {f.name: f for f in fields(known.Config)}, f"setting of {known.name!r}")
    seed, margin = chosen.get("seed", 0), chosen.get("guard_margin")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, not {seed!r}.")
    if margin is not None and not (is_number(margin) and math.isfinite(margin)):
        raise ValueError(f"guard_margin is a number of points, not {margin!r}.")
    return known.Config(**chosen)


def probe_task(model: nn.Module, output: OutputKey) -> Task:
    """What the model's logits say it does, told from a blank image of a usual size."""
    convolution = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    channels = 3 if convolution is None else convolution.in_channels
    like = next(model.parameters(), torch.empty(0))
    with torch.inference_mode(False), torch.no_grad():
        for side in (64, 32, 224, 512):
            try:
                blank = torch.zeros(1, channels, side, side, dtype=like.dtype, device=like.device)
                returned = model(blank)
            except Exception:  # whatever it says of an image it is not made for
                continue
            return task_of(select_logits(returned, output))
    raise ValueError(
        f"cannot tell what {type(model).__name__} does from a blank image: say it with "
        "preset='classification' or preset='segmentation'."
    )


def _lookup(name: str, table: Any, what: str) -> Any:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name).lower(), list(table), n=1)
    raise ValueError(
        f"no {what} is called {name!r}."
        + (f" Did you mean {near[0]!r}?" if near else "")
        + f" There are: {', '.join(table) or 'none'}."
    )
