"""The model a benchmark is about: one that ships, one that was trained here, or one of your own.

A model of your own is a Python file with a function ``subject()``::

    import torch
    from bestta import SourceProfile
    from bestta.benchmark import Subject
    from bestta.data.classes import CLASSES
    from bestta.models import DeepLabV3Plus, load_weights

    def subject():
        model = DeepLabV3Plus(encoder="resnet50", classes=19)
        load_weights(model, "deeplabv3plus_resnet50_cityscapes.pth")
        return Subject(
            name="deeplab-r50", model=model.eval(), classes=CLASSES, size=(2048, 1024),
            profile="deeplab-r50-profile.safetensors",
        )

    bestta bench acdc-continual --data ACDC --model my_model.py
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from torch import nn

from bestta import SourceProfile, models
from bestta.data.tensors import IMAGENET, Normalisation
from bestta.metrics import metric_for
from bestta.models import Card
from bestta.models.cards import PROFILE, WEIGHTS
from bestta.profile import ModelIdentity


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model of your own, and what a benchmark must know of it."""

    name: str
    """What tables call it."""
    model: nn.Module
    """In eval mode."""
    classes: tuple[str, ...]
    """In the order of its logits."""
    task: Literal["segmentation", "classification"] = "segmentation"
    size: tuple[int, int]
    """(width, height) that source images are shown in."""
    normalise: Normalisation = IMAGENET
    """Channel means and deviations, of values 0…1, that images are normalised with."""
    profile: SourceProfile | str | Path | None = None
    """What is known of the source, or its file; methods that need none run without."""
    train: Callable[[], Iterable[Any]] | None = None
    """Batches of training images, for methods that learn from them first: what `bestta.prepare`
    takes."""


def card_of(model: str) -> Card:
    """What is known of a model: the card of one that ships or was trained, or one made up."""
    if not is_file(model):
        return models.card(model)
    subject = subject_of(model)
    mean, deviation = subject.normalise
    identity = ModelIdentity.of(subject.model)
    return Card(
        name=subject.name,
        about=f"{identity.architecture} from {Path(model).name}",
        network=identity.architecture,
        arguments={},
        task=subject.task,
        classes=tuple(subject.classes),
        normalise=(tuple(mean), tuple(deviation)),
        size=subject.size,
        layers=(),
        parameters=identity.parameters,
        data="",
        terms="",
        command="",
        recipe={},
        metric=metric_for(subject.task, len(subject.classes)).name,
        sha256={WEIGHTS: identity.fingerprint},
    )


def model_of(model: str) -> nn.Module:
    """The model itself, in eval mode."""
    return subject_of(model).model if is_file(model) else models.load(model)


def profile_of(model: str) -> SourceProfile | None:
    """What is known of its source."""
    if not is_file(model):
        return models.load_profile(model)
    profile = subject_of(model).profile
    if not isinstance(profile, str | Path):
        return profile
    beside = Path(model).parent / profile
    for place in (Path(profile), beside):
        if place.is_file():
            return SourceProfile.load(place)
    raise ValueError(
        f"no source profile {profile}, neither here nor beside {model}. Make one: "
        "bestta.SourceProfile.collect(model, images, layers=[…]).save(path); or leave it out for "
        "methods that need none."
    )


def profile_digest(model: str) -> str:
    """What tells the source profile of a model from another; empty if there is none."""
    if not is_file(model):
        return models.card(model).sha256.get(PROFILE, "")[:16]
    profile = profile_of(model)
    if profile is None:
        return ""
    found = hashlib.sha256(json.dumps(profile.settings, sort_keys=True, default=str).encode())
    for name, layer in profile.layers.items():
        found.update(name.encode())
        for tensor in (layer.mu, layer.sigma, layer.embedding("pooled")):
            found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    for method, tensors in sorted(profile.prepared.items()):
        for name, tensor in sorted(tensors.items()):
            found.update(f"{method}/{name}".encode())
            found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def is_file(model: str) -> bool:
    """Whether a model is named by a Python file."""
    return model.endswith(".py")


@cache
def subject_of(path: str) -> Subject:
    """What the ``subject()`` of a file returns; made once a process."""
    module = import_file(path)
    make = getattr(module, "subject", None)
    if not callable(make):
        raise ValueError(f"{path} has no function subject() that returns a Subject.")
    subject = make()
    if not isinstance(subject, Subject):
        raise ValueError(
            f"subject() of {path} returned {type(subject).__name__}, "
            "not a bestta.benchmark.Subject."
        )
    return subject


def import_file(path: str) -> ModuleType:
    """A Python file as a module, once a process, whatever else has its name."""
    if not Path(path).is_file():
        raise ValueError(f"no file {path} to import.")
    name = module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file.")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f", line {lines[-1]}" if lines else ""
        raise ValueError(
            f"{path}{where} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


def module_name(path: str) -> str:
    """What a file is called among the modules."""
    return f"bestta_file_{Path(path).resolve().as_posix()}"
