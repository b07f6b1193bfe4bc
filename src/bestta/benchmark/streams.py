"""From a protocol's config to its stream, its source images, and what makes two streams alike."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from bestta import protocols
from bestta.benchmark.config import CLEAR, Protocol, Run, digest, portable
from bestta.benchmark.subjects import card_of
from bestta.data import ImageSet, open_set
from bestta.data.corruptions import Corruption
from bestta.data.weather import Weather
from bestta.protocols import Domain, Stream
from bestta.training.recipes import recipes

KEPT_BYTES = 2**29
"""Room for rendered frames, which come again in the next round."""

HELD_OUT = "held-out"
"""The split of the training images that the model itself has not seen: for choosing settings."""

STREETS = 60
"""Scenes of a condition where the embedded set is not told how many."""


def stream_of(run: Run) -> Stream:
    """The frames of a run, in order. Files are listed, none is read."""
    protocol = run.protocol
    if protocol.recipe == "gradual":
        images = _images(protocol, run.data)
        stream = protocols.gradual(
            images,
            protocol.conditions,
            severities=protocol.severities,
            family=protocol.family,
            seed=run.seed,
        )
    else:
        domains = [_domain(protocol, name, run.data) for name in protocol.conditions]
        if protocol.recipe == "mixed":
            stream = protocols.mixed(
                domains, rounds=protocol.rounds, seed=run.seed, redraw=protocol.redraw
            )
        else:
            stream = protocols.continual(
                domains,
                rounds=protocol.rounds,
                shuffle=protocol.shuffle,
                seed=run.seed,
                redraw=protocol.redraw,
            )
    for domain in stream.domains:
        _check_classes(domain.images, protocol)
    return stream.every(protocol.every).keeping(0 if run.workers else KEPT_BYTES)


def source_images(run: Run) -> ImageSet | None:
    """The source images that a run looks at, if any."""
    source = run.protocol.source
    if source is None or not (run.protocol.forgetting or run.protocol.embeddings):
        return None
    kind = source.set or run.protocol.set
    same = kind == run.protocol.set
    options = dict(run.protocol.options) if same else {}
    root = run.source_data or (run.data if same else None)
    if root is None and kind not in ("streets",):
        raise ValueError(
            f"protocol {run.protocol.name!r} looks at source images of {kind}: "
            "name their folder with --source-data, or leave them out with --no-source."
        )
    if source.split is not None:
        options["split"] = source.split
    if "cifar" not in kind:
        options["size"] = card_of(run.protocol.model).size
    images = _opened(kind, root, options, source.images)
    _check_classes(images, run.protocol)
    return images


def describe(run: Run, stream: Stream) -> dict[str, Any]:
    """What must agree for two runs to be compared, and the key that says whether it does."""
    protocol, card = run.protocol, card_of(run.protocol.model)
    of_one_severity = protocol.effect != "photographs" or protocol.set == "cifar10c"
    about: dict[str, Any] = {
        "protocol": protocol.name,
        "recipe": protocol.recipe,
        "model": card.name,
        "weights": card.sha256.get("weights.safetensors", "")[:16],
        "set": protocol.set,
        "split": protocol.split,
        "options": portable(protocol.options),
        "size": None if protocol.size is None else list(protocol.size),
        "effect": protocol.effect,
        "conditions": list(protocol.conditions),
        "severity": protocol.severity if of_one_severity and protocol.recipe != "gradual" else None,
        "severities": list(protocol.severities) if protocol.recipe == "gradual" else None,
        "family": protocol.family if protocol.effect == "corruptions" else None,
        "rounds": stream.rounds,
        "shuffle": protocol.shuffle,
        "redraw": protocol.redraw,
        "frames": len(stream),
        "every": protocol.every,
        "batch": protocol.batch,
        "precision": protocol.precision,
        "names": _names(stream),
    }
    return {"key": digest(about), **about}


def digest_of_names(images: ImageSet) -> str:
    """What tells a set of images from another, by their names."""
    found = hashlib.sha256()
    for index in range(len(images)):
        found.update(f"{images.name(index)}\n".encode())
    return found.hexdigest()[:16]


def _names(stream: Stream) -> str:
    """A digest of the names of all images the stream draws from, whatever their order."""
    found = hashlib.sha256()
    for domain in stream.domains:
        for index in range(len(domain.images)):
            found.update(f"{domain.name}/{domain.images.name(index)}\n".encode())
    return found.hexdigest()[:16]


def _domain(protocol: Protocol, name: str, data: str | None) -> Domain:
    if protocol.effect == "photographs":
        option = {"acdc": "condition", "cifar10c": "corruption"}.get(protocol.set)
        extra: dict[str, Any] = {} if option is None else {option: name}
        if protocol.set == "cifar10c":
            extra["severity"] = protocol.severity
        return Domain(name, _images(protocol, data, **extra))
    images = _images(protocol, data)
    if name == CLEAR:
        return Domain(name, images)
    effect = (
        Weather(name, protocol.severity)
        if protocol.effect == "weather"
        else Corruption(name, protocol.severity, protocol.family)
    )
    return Domain(name, images, effect)


def _images(protocol: Protocol, data: str | None, **extra: Any) -> ImageSet:
    if protocol.split == HELD_OUT:
        return _held_out(protocol, data)
    options = {**protocol.options, **extra}
    if protocol.split is not None:
        options["split"] = protocol.split
    if protocol.size is not None:
        options["size"] = protocol.size
    return _opened(protocol.set, data, options, protocol.images)


def _held_out(protocol: Protocol, data: str | None) -> ImageSet:
    """The training images that the protocol's model was never trained on."""
    recipe = recipes().get(card_of(protocol.model).name)
    if recipe is None or protocol.set != recipe.name:
        raise ValueError(
            f"protocol {protocol.name!r}: only a model trained by `bestta train` has images held "
            f"out from its training, of its own set: {', '.join(recipes())}."
        )
    if data is None and recipe.needs_data:
        raise ValueError(f"{protocol.set} is read from files: name their folder with --data.")
    if protocol.size not in (None, recipe.size) or protocol.options:
        raise ValueError(
            f"protocol {protocol.name!r}: held-out images are read as they were for training: "
            "without options, and without another size."
        )
    images = recipe.splits(None if data is None else Path(data)).held_out
    count = protocol.images
    return images if count is None or count >= len(images) else images.some(count)


def _check_classes(images: ImageSet, protocol: Protocol) -> None:
    """Labels of other classes would be counted as if they were the model's."""
    card = card_of(protocol.model)
    if images.classes and images.classes != card.classes:
        raise ValueError(
            f"protocol {protocol.name!r}: {images.kind} has the {len(images.classes)} classes "
            f"{', '.join(images.classes)}; the model {card.name!r} knows others: "
            f"{', '.join(card.classes)}. Name another set, or a model that learned these classes."
        )


def _opened(kind: str, root: str | None, options: dict[str, Any], count: int | None) -> ImageSet:
    if kind == "streets":
        return open_set(kind, **{"count": count or STREETS, **options})
    if root is None:
        raise ValueError(f"{kind} is read from files: name their folder with --data.")
    images = open_set(kind, Path(root), **options)
    return images if count is None or count >= len(images) else images.some(count)
