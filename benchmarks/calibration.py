"""Does calibration, without labels, choose layers as well as a search with labels does?

    python benchmarks/calibration.py --cityscapes DIR --cifar10 DIR
    python benchmarks/calibration.py --models streets

Each model is calibrated on unlabelled source images. Then every candidate layer alone, with γ held
still and the preset's ρ, runs over labelled streams that calibration never saw: test images under
the published corruptions and in weather of other seeds. The best of them on these very streams is
the bar; the layers that calibration chose run over the same streams, with the same settings and
with their own.

What is done is kept in --work: stopped, the same command goes on. The two networks without batch
norm are trained by benchmarks/other_models.py first.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bestta
from bestta import models
from bestta.calibration.candidates import candidates
from bestta.data.cityscapes import Cityscapes
from bestta.data.corruptions import CORRUPTIONS, Corruption
from bestta.data.samples import ImageSet, Pixels
from bestta.data.streets import Streets
from bestta.data.weather import CONDITIONS, Weather
from bestta.files import write_whole
from bestta.metrics import metric_for
from bestta.progress import Progress
from bestta.provenance import provenance
from bestta.training.recipes import recipes
from bestta.training.scoring import normalised

ENOUGH_PERCENT, ENOUGH_POINTS = 90.0, 0.3
"""The bar: this share of the best single layer's gain, or no more than so many points less."""

OTHERS = ("groupnorm", "tokens")
MODELS = ("streets", "cityscapes", "cifar10", *OTHERS)
SOURCE_IMAGES = {"segmentation": 300, "classification": 600}
TEST_IMAGES = {"segmentation": 30, "classification": 200}
GRADUAL = ("brightness", "fog", "frost", "snow")
"""The corruptions of the paper's gradual protocol."""
SEVERITY = {"segmentation": 3, "classification": 5}

ONE_LOOK: dict[str, Any] = {"scales": ()}
"""Layers and settings are compared, as calibration does it: by one look at each image."""

Frame = tuple[Tensor, Tensor]


class Subject:
    """A model, its source images, and labelled streams of test images by name."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        if name in OTHERS:
            sys.path.insert(0, str(Path(__file__).parent))
            trained = importlib.import_module("other_models")
            self.model, self.card = trained.load(name, args.others)
        else:
            self.model, self.card = models.load(name), models.card(name)
        self.task = self.card.task
        train, test = self._images(getattr(args, name, None))
        self.train = train.some(SOURCE_IMAGES[self.task])
        self.test = test.some(TEST_IMAGES[self.task])

    def _images(self, data: Path | None) -> tuple[ImageSet, ImageSet]:
        if self.name == "cityscapes":
            assert data is not None
            return (
                Cityscapes(data, "train", size=self.card.size, ignore_fringes=True),
                Cityscapes(data, "val", size=self.card.size, ignore_fringes=True),
            )
        if self.name == "cifar10":
            splits = recipes()["cifar10"].splits(data)
            return splits.train, splits.test
        return Streets(SOURCE_IMAGES["segmentation"]), Streets(60, split="val")

    def tensor(self, image: Pixels) -> Tensor:
        return normalised(image[None], self.card.normalise)

    def source(self) -> Iterator[Tensor]:
        """Source images, without their labels."""
        for sample in self.train:
            yield self.tensor(sample.image)

    def streams(self) -> dict[str, Callable[[Pixels, Any], Pixels]]:
        severity = SEVERITY[self.task]
        if self.task == "classification":
            return {name: Corruption(name, severity, "cifar") for name in CORRUPTIONS}
        weathers = {name: Weather(name, severity) for name in CONDITIONS}
        return {
            **{f"weather: {name}": weather for name, weather in weathers.items()},
            **{name: Corruption(name, severity, "imagenet") for name in GRADUAL},
        }

    def frames(self, paint: Callable[[Pixels, Any], Pixels]) -> list[Frame]:
        return [
            (
                self.tensor(paint(sample.image, ("proof", number))),
                torch.as_tensor(np.asarray(sample.label))[None].long(),
            )
            for number, sample in enumerate(self.test)
        ]

    def score(self, frames: Sequence[Frame], answer: Callable[[Tensor], Tensor]) -> float:
        """In percent, higher being better."""
        metric = metric_for(self.task, len(self.card.classes))
        for image, label in frames:
            metric.add(answer(image), label)
        score = float(metric.score())
        return score if metric.higher_is_better else 100 - score


def measured(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model; what is on file already is not done again."""
    place = args.work / subject.name
    place.mkdir(parents=True, exist_ok=True)
    profile = calibrated(subject, place)
    report = dict(profile.provenance["calibration"])
    names = [c.name for c in candidates(subject.model, next(subject.source()))]
    every = every_layer(subject, place, names)
    chosen = list(profile.layers)
    options: dict[str, dict[str, Any]] = {name: {"layers": [name]} for name in names}
    options["calibrated layers"] = {"layers": chosen}
    rows: dict[str, dict[str, float]] = {}
    file = place / "scores.json"
    if file.exists():
        rows = json.loads(file.read_text())
    streams = subject.streams()
    with Progress(f"{subject.name}: streams", len(streams), show=True) as shown:
        for stream, paint in streams.items():
            shown.advance()
            if stream in rows:
                continue
            frames = subject.frames(paint)
            row = {}
            with torch.no_grad():
                row["source"] = subject.score(frames, subject.model)
            for option, settings in options.items():
                still_too = {"lr": 0.0, "guard": False, **ONE_LOOK, **settings}
                with bestta.adapt(subject.model, every, **still_too) as still:
                    row[option] = subject.score(frames, still)
            for option, guard in (("calibrated", False), ("calibrated, guarded", True)):
                with bestta.adapt(subject.model, profile, guard=guard, **ONE_LOOK) as adapter:
                    row[option] = subject.score(frames, adapter)
            rows[stream] = row
            write_whole(file, json.dumps(rows, indent=1).encode())
    return summary(subject, rows, names, profile, report)


def calibrated(subject: Subject, place: Path) -> bestta.SourceProfile:
    path = place / "profile.safetensors"
    if path.exists():
        return bestta.SourceProfile.load(path, subject.model)
    print(f"{subject.name}: calibrating on {len(subject.train)} source images")
    profile = bestta.calibrate(
        subject.model,
        subject.source(),
        checkpoint=place / "calibration.json",
        report=place / "calibration.html",
        progress=True,
    )
    profile.save(path)
    return profile


def every_layer(subject: Subject, place: Path, names: Sequence[str]) -> bestta.SourceProfile:
    path = place / "every-layer.safetensors"
    if not path.exists():
        bestta.SourceProfile.collect(subject.model, subject.source(), layers=names).save(path)
    return bestta.SourceProfile.load(path, subject.model)


def summary(
    subject: Subject,
    rows: dict[str, dict[str, float]],
    names: Sequence[str],
    profile: bestta.SourceProfile,
    report: dict[str, Any],
) -> dict[str, Any]:
    mean = {
        key: float(np.mean([row[key] for row in rows.values()])) for key in rows[next(iter(rows))]
    }
    best = max(names, key=lambda name: mean[name])
    gain, bar = mean["calibrated layers"] - mean["source"], mean[best] - mean["source"]
    share = 100 * gain / bar if bar > 0 else None
    return {
        "model": subject.name,
        "norm": norm(subject.model),
        "task": subject.task,
        "streams": rows,
        "mean": mean,
        "best_single": best,
        "chosen": list(profile.layers),
        "settings": dict(profile.settings["bestta"]),
        "share_percent": share,
        "met": gain >= bar - ENOUGH_POINTS or (share is not None and share >= ENOUGH_PERCENT),
        "candidates": len(names),
        "calibration_seconds": report.get("seconds"),
        "sure": report.get("sure"),
        "source_images": len(subject.train),
        "test_images": len(subject.test),
        "severity": SEVERITY[subject.task],
    }


def norm(model: nn.Module) -> str:
    kinds = {
        nn.BatchNorm2d: "batch norm", nn.GroupNorm: "group norm", nn.LayerNorm: "layer norm"
    }  # fmt: skip
    found = {word for kind, word in kinds.items() for m in model.modules() if isinstance(m, kind)}
    return " and ".join(sorted(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {','.join(MODELS)}")
    parser.add_argument("--cityscapes", type=Path)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--others", type=Path, default=Path("runs/other-models"))
    parser.add_argument("--work", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--out", type=Path, help="the record, when all models are done")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = args.models.split(",")
    unknown = [name for name in wanted if name not in MODELS]
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; there are {', '.join(MODELS)}.")
    results = []
    for name in wanted:
        if name in ("cityscapes", "cifar10") and getattr(args, name) is None:
            print(f"{name} is left out: name its data with --{name}.")
            continue
        done = measured(Subject(name, args), args)
        results.append(done)
        mean = done["mean"]
        print(
            f"{name}: source {mean['source']:.2f}, best single layer {done['best_single']} "
            f"{mean[done['best_single']]:.2f}, chosen {', '.join(done['chosen'])} "
            f"{mean['calibrated layers']:.2f}, with its settings {mean['calibrated']:.2f}, guarded "
            f"{mean['calibrated, guarded']:.2f}: {'met' if done['met'] else 'MISSED'}",
            flush=True,
        )
    if args.out is not None:
        record = {"models": results, "provenance": provenance()}
        write_whole(args.out, f"{json.dumps(record, indent=1)}\n".encode())
        print(f"{args.out}: next, python benchmarks/calibration_table.py")


if __name__ == "__main__":
    main()
