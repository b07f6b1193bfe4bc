"""How far a model falls in weather it was not trained for, left alone: the room to adapt in."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn

from bestta import protocols
from bestta.data.corruptions import CORRUPTIONS, Family
from bestta.data.samples import ImageSet
from bestta.data.weather import CONDITIONS
from bestta.files import write_whole
from bestta.metrics import MeanIoU
from bestta.models import Card
from bestta.progress import Progress
from bestta.protocols import Domain
from bestta.provenance import provenance
from bestta.training.scoring import Precision, score

SEVERITIES = (1, 2, 3, 4, 5)


@dataclass
class Shift:
    """Scores of one model over one set: clear, under corruptions and in weather.

    ``corruptions`` and ``weather`` hold by name the scores at severities 1 to 5, None where it has
    not been measured yet.
    """

    metric: str
    images: int
    precision: Precision = "fp32"
    clean: float | None = None
    corruptions: dict[str, list[float | None]] = field(default_factory=dict)
    weather: dict[str, list[float | None]] = field(default_factory=dict)
    per_class: dict[str, float | None] = field(default_factory=dict)
    """IoU of each class on the clean images; empty for classification."""
    provenance: dict[str, Any] = field(default_factory=dict)

    def missing(self) -> list[tuple[str, str, int]]:
        """What is yet to be measured: (table, name, severity)."""
        return [
            (table, name, severity)
            for table in ("corruptions", "weather")
            for name, scores in getattr(self, table).items()
            for severity, value in zip(SEVERITIES, scores, strict=True)
            if value is None
        ]


def measure(
    model: nn.Module,
    card: Card,
    images: ImageSet,
    path: str | os.PathLike[str] | None = None,
    *,
    weather: bool | None = None,
    seed: int = 0,
    precision: Precision = "fp32",
    workers: int = 0,
    show: bool = True,
) -> Shift:
    """Score ``model`` on ``images``, clear and under every corruption and weather.

    Args:
        model: In eval mode.
        card: What it is.
        images: With labels.
        path: A JSON file that each score is written to as soon as it is there. A run that finds
            some of them in it measures the others.
        weather: Whether to simulate weather too; by default for segmentation.
        seed: What corruptions and weather draw from.
        precision: What the model computes in.
        workers: Processes that render them.
        show: Whether to show progress.
    """
    path = Path(path) if path is not None else None
    weather = card.task == "segmentation" if weather is None else weather
    whole = {
        "corruptions": dict.fromkeys(CORRUPTIONS),
        "weather": dict.fromkeys(CONDITIONS if weather else ()),
    }
    shift = Shift(card.metric, len(images), precision)
    identity = {
        "model": card.name,
        "weights": card.sha256.get("weights.safetensors", ""),
        "images": len(images),
        "seed": seed,
        "precision": precision,
    }
    if path is not None and path.exists():
        shift = _resumed(path, identity)
    for table, names in whole.items():
        for name in names:
            getattr(shift, table).setdefault(name, [None] * len(SEVERITIES))
    todo = shift.missing()
    sittings = shift.provenance.get("sittings", [])
    if todo or shift.clean is None:
        sittings = [*sittings, provenance()]
    shift.provenance = {"identity": identity, "sittings": sittings}

    total = (len(todo) + (shift.clean is None)) * len(images)
    with Progress(f"{card.name}: images", total, show=show) as progress:
        if shift.clean is None:
            metric = score(model, images, card, precision=precision, progress=progress)
            shift.clean = metric.score()
            if isinstance(metric, MeanIoU):
                shift.per_class = dict(zip(card.classes, metric.per_class(), strict=True))
            _write(path, shift)
        if todo:
            # One stream for all of them, so that workers start once.
            domains = [_domain(images, card, *cell) for cell in todo]
            stream = protocols.continual(domains, rounds=1, seed=seed)
            blocks = groupby(stream.frames(workers=workers), lambda frame: frame.block)
            for (table, name, severity), (_, frames) in zip(todo, blocks, strict=True):
                metric = score(model, frames, card, precision=precision, progress=progress)
                getattr(shift, table)[name][severity - 1] = metric.score()
                _write(path, shift)
    return shift


def _domain(images: ImageSet, card: Card, table: str, name: str, severity: int) -> Domain:
    """The domain that the protocols of the same name are made of: the same draws."""
    if table == "weather":
        return protocols.weather(images, [name], severity=severity)[0]
    family: Family = "cifar" if card.task == "classification" else "imagenet"
    return protocols.corruptions(images, [name], severity=severity, family=family)[0]


def _write(path: Path | None, shift: Shift) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{json.dumps(vars(shift), indent=1)}\n".encode())


def _resumed(path: Path, identity: dict[str, Any]) -> Shift:
    try:
        shift = Shift(**json.loads(path.read_text(encoding="utf-8")))
        seen = shift.provenance["identity"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no scores of a model ({error!r}).") from error
    if seen != identity:
        differing = ", ".join(k for k in identity if seen.get(k) != identity[k])
        raise ValueError(
            f"{path} holds scores of something else: {differing} differ. "
            "Remove it to measure anew, or name another file."
        )
    return shift
