"""What a run has found out so far: all of a record but its head, and all of a checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bestta.adapters import StepReport
from bestta.data.samples import Pixels
from bestta.data.sheets import colour
from bestta.metrics import MeanIoU, Metric, metric_for
from bestta.models import Card
from bestta.protocols import Block, Frame

WORST = 4
"""How many of the frames that went worst are kept."""

TRACED = 5000
"""How many steps the traces of a record hold at most."""

CHANGES = 200
"""How many decisions of the guard a record holds at most."""

WIDTH = 384
"""Pictures are kept this wide at most."""


@dataclass
class Tally:
    """Scores, traces, events, pictures; counted frame by frame, put down and taken up again."""

    card: Card
    position: int = 0
    """The first frame that is not counted yet."""
    blocks: list[dict[str, Any]] = field(default_factory=list)
    frames: dict[str, list[Any]] = field(
        default_factory=lambda: {"position": [], "block": [], "score": []}
    )
    traces: dict[str, list[Any]] = field(default_factory=lambda: {"step": []})
    events: dict[str, Any] = field(
        default_factory=lambda: {"adapted": 0, "skipped": 0, "rolled_back": 0, "reasons": {}}
    )
    source_scores: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    conditions: list[dict[str, Any]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    times: dict[str, list[float]] = field(
        default_factory=lambda: {"call": [], "predict": [], "adapt": [], "ratio": []}
    )
    sittings: list[dict[str, Any]] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    by_class: list[list[int]] = field(default_factory=list)
    """Of the block under way, in classification: images that were wrong, and all, by true class."""

    def __post_init__(self) -> None:
        self.by_class = self.by_class or [[0, 0] for _ in self.card.classes]
        self.metric: Metric = metric_for(self.card.task, len(self.card.classes))
        """The block under way."""

    # --- counting -------------------------------------------------------------------------

    def count(self, frames: Sequence[Frame], logits: Tensor) -> list[Metric | None]:
        """Score a batch of frames, each by itself and all in their block; return what of each."""
        counted = []
        for frame, one in zip(frames, logits, strict=True):
            own = None
            if frame.label is not None:
                own = metric_for(self.card.task, len(self.card.classes))
                own.add(one[None], torch.as_tensor(np.asarray(frame.label))[None].long())
                self._remember_if_bad(frame, one, *self._badness(own, one))
            self.recount(frame, own)
            counted.append(own)
        return counted

    def recount(self, frame: Frame, own: Metric | None) -> None:
        """Count a frame that got the same answer before: ``own`` is what `count` returned then."""
        score = None
        if own is not None:
            self.metric.counts += own.counts
            score = finite(own.score())
            if score is not None and self.card.task == "classification":
                counts = self.by_class[int(np.asarray(frame.label))]
                counts[0] += score > 0
                counts[1] += 1
        self.frames["position"].append(frame.position)
        self.frames["block"].append(frame.block.index)
        self.frames["score"].append(score)
        self.position = frame.position + 1

    @staticmethod
    def _badness(own: Metric, logits: Tensor) -> tuple[float | None, float]:
        """A frame's own score, and how bad it is."""
        score = finite(own.score())
        if isinstance(own, MeanIoU):
            return score, -1.0 if score is None else 100.0 - score
        sure = float(logits.float().softmax(0).max())  # wrong, and sure of it, is worst
        return score, sure if score else -1.0

    def end_block(self, block: Block) -> None:
        """The block is over: its score, and by class."""
        metric = self.metric
        self.blocks.append(
            {
                "index": block.index,
                "name": block.name,
                "round": block.round,
                "frames": sum(1 for b in self.frames["block"] if b == block.index),
                "score": finite(metric.score()),
                "per_class": metric.per_class()
                if isinstance(metric, MeanIoU)
                else [100 * wrong / total if total else None for wrong, total in self.by_class],
            }
        )
        self.by_class = [[0, 0] for _ in self.card.classes]
        self.metric = metric_for(self.card.task, len(self.card.classes))

    def trace(self, step: int, values: Mapping[str, float | None]) -> None:
        """Values of one call; a name that is new has had none before."""
        before = len(self.traces["step"])
        self.traces["step"].append(step)
        for name, value in values.items():
            self.traces.setdefault(name, [None] * before).append(rounded(value))
        for values_so_far in self.traces.values():
            if len(values_so_far) == before:
                values_so_far.append(None)

    def note(self, report: StepReport) -> None:
        """What a call of the adapter did."""
        self.events["calls"] = self.events.get("calls", 0) + 1
        for name in ("adapted", "skipped", "rolled_back"):
            self.events[name] += bool(getattr(report, name))
        if report.reason:
            reason = report.reason.partition(":")[0]
            reasons = self.events["reasons"]
            reasons[reason] = reasons.get(reason, 0) + 1
        self._note_guard(report)

    def _note_guard(self, report: StepReport) -> None:
        """How often each decision of the guard was in force, and at which image it came to be."""
        decision = report.guard.partition(":")[0].removeprefix("guard, ")
        guard = self.events.get("guard")
        if guard is None and not decision:
            return
        guard = self.events.setdefault("guard", {"frames": {}, "changes": []})
        if decision:
            guard["frames"][decision] = guard["frames"].get(decision, 0) + 1
        before = guard["changes"][-1][1].partition(":")[0] if guard["changes"] else ""
        words = report.guard.removeprefix("guard, ") or "the method answers"
        if words.partition(":")[0] != before or report.rolled_back:
            if len(guard["changes"]) < CHANGES:
                guard["changes"].append([report.images_seen, words])
            else:
                guard["more_changes"] = guard.get("more_changes", 0) + 1

    # --- pictures -------------------------------------------------------------------------

    def show(self, frame: Frame, predicted: Tensor) -> None:
        """Keep a frame of a condition with the classes that were predicted for it."""
        stem = "".join(c if c.isalnum() else "-" for c in frame.domain)
        entry = {"name": frame.domain, "round": frame.block.round, "frame": frame.name}
        self.conditions.append({**entry, **self._pictures(stem, frame, predicted)})

    def _remember_if_bad(
        self, frame: Frame, logits: Tensor, score: float | None, badness: float
    ) -> None:
        if badness < 0:
            return
        # Each scene once, where it went worst: rounds repeat.
        same = [w for w in self.worst if (w["name"], w["frame"]) == (frame.domain, frame.name)]
        if any(w["badness"] >= badness for w in same):
            return
        if not same and len(self.worst) == WORST and badness <= self.worst[-1]["badness"]:
            return
        for entry in same or self.worst[WORST - 1 :]:
            self.worst.remove(entry)
            for key in ("image", "truth", "prediction"):
                self.pictures.pop(entry[key] or "", None)
        self.worst.append(
            {
                "name": frame.domain,
                "round": frame.block.round,
                "frame": frame.name,
                "score": score,
                "badness": badness,
                **self._pictures(f"worst-{frame.position}", frame, logits.argmax(0)),
            }
        )
        self.worst.sort(key=lambda entry: (-entry["badness"], entry["frame"], entry["name"]))

    def _pictures(self, stem: str, frame: Frame, predicted: Tensor) -> dict[str, Any]:
        entry: dict[str, Any] = dict.fromkeys(("truth", "prediction", "label", "predicted"))
        entry["image"] = self._keep(f"{stem}.jpg", frame.image)
        if self.card.task == "segmentation":
            ids = predicted.to(torch.uint8).cpu().numpy()
            classes = self.card.classes
            entry["prediction"] = self._keep(f"{stem}-prediction.png", colour(ids, classes))
            if frame.label is not None:
                label = np.asarray(frame.label, dtype=np.uint8)
                entry["truth"] = self._keep(f"{stem}-truth.png", colour(label, classes))
        else:
            entry["predicted"] = self.card.classes[int(predicted)]
            if isinstance(frame.label, int | np.integer):
                entry["label"] = self.card.classes[int(frame.label)]
        return entry

    def _keep(self, name: str, picture: Pixels) -> str:
        image = Image.fromarray(picture)
        photo = name.endswith(".jpg")
        if image.width > WIDTH:
            size = (WIDTH, max(1, round(image.height * WIDTH / image.width)))
            image = image.resize(
                size, Image.Resampling.LANCZOS if photo else Image.Resampling.NEAREST
            )
        if not photo:
            image = image.quantize(64)
        file = io.BytesIO()
        image.save(file, "JPEG" if photo else "PNG", **({"quality": 85} if photo else {}))
        self.pictures[name] = file.getvalue()
        return name

    # --- down and up ----------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All of it but the pictures."""
        kept = {name: value for name, value in vars(self).items() if name not in _NOT_JSON}
        return {**kept, "counts": self.metric.counts.tolist()}

    @classmethod
    def from_json(cls, card: Card, values: dict[str, Any], pictures: dict[str, bytes]) -> Tally:
        """What `to_json` gave."""
        counts = torch.tensor(values.pop("counts"), dtype=torch.int64)
        tally = cls(card, pictures=pictures, **values)
        tally.metric.counts = counts
        return tally

    def result(self, *, whole: bool = False) -> dict[str, Any]:
        """The part of a record that these are.

        Traces are of so many steps, evenly spread, that a record stays one that people can open;
        of all of them if ``whole``.
        """
        every = 1 if whole else max(1, -(-len(self.traces["step"]) // TRACED))
        scores = [b["score"] for b in self.blocks]
        names = list(dict.fromkeys(b["name"] for b in self.blocks))
        rounds = sorted({b["round"] for b in self.blocks})
        return {
            "blocks": self.blocks,
            "score": mean(scores),
            "rounds": [mean([b["score"] for b in self.blocks if b["round"] == r]) for r in rounds],
            "conditions": {
                name: mean([b["score"] for b in self.blocks if b["name"] == name]) for name in names
            },
            "source_scores": self.source_scores,
            "frames": self.frames,
            "traces": {name: values[::every] for name, values in self.traces.items()},
            "traced_every": every,
            "events": {
                **self.events,
                "adapted_share": self.events["adapted"]
                / max(1, self.events["adapted"], self.events.get("calls", 0)),
            },
            "pictures": {
                "conditions": self.conditions,
                "worst": [{k: v for k, v in w.items() if k != "badness"} for w in self.worst],
            },
            "skipped": self.skipped,
        }


_NOT_JSON = {"card", "metric", "pictures"}


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is there; None of nothing."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def finite(value: float) -> float | None:
    """``value``, or None if it is not a number."""
    return value if np.isfinite(value) else None


def rounded(value: float | None) -> float | None:
    """Six digits: traces are for looking at."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{value:.6g}")
