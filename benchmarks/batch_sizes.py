"""Every method on CIFAR-10-C, one corruption after another, at a batch size of your choice.

    python benchmarks/batch_sizes.py --data PATH --batch 200 --images 1000 --out FILE
    python benchmarks/batch_sizes.py --data PATH --batch 1 --images 100 --out FILE

Large batches are what most methods were published with: there the known order must appear. With
single images, batch statistics fall apart. Corruptions are rendered from the clean test images at
severity 5 with the constants of CIFAR-10-C; the model is `bestta.models.load("cifar10")`. Nothing
is tuned here: settings are the defaults, but for BESTTA, which does not learn, and for EcoTTA's
shorter warm-up. What a method learns from the source it learns from training images. Each method's
row is written as soon as it is there, and its state after each corruption: stopped, the same
command goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bestta
from bestta import protocols
from bestta.adapters.registry import method_class
from bestta.data import Cifar10
from bestta.data.tensors import LabelledBatches
from bestta.files import write_whole
from bestta.metrics import Errors
from bestta.progress import Progress
from bestta.provenance import provenance
from bestta.training.scoring import normalised

PUBLISHED = {  # error, WRN-28-10, batch 200, 10,000 images a corruption, continual
    "source": 43.5, "bn_stats": 20.4, "tent": 20.0, "eata": 17.9, "sar": 20.4, "cotta": 16.5,
    "rotta": 19.3,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "bestta": {"preset": "single", "layers": ["block1"], "lr": 0.0}
}
"""What differs from the defaults: BESTTA transfers the style and does not learn."""


def render(data: Path, count: int, cache: Path) -> list[tuple[str, Any, Any]]:
    """Name, images and labels of each corruption, rendered once and kept."""
    stream = protocols.cifar10c(Cifar10(data, "test").some(count))
    if not cache.exists():
        with Progress("frames rendered", len(stream), show=True) as progress:
            images, labels = [], []
            for frame in stream.frames(workers=2):
                images.append(frame.image)
                labels.append(frame.label)
                progress.advance()
        part = cache.with_name(f"part-{cache.name}")
        np.savez(part, images=np.stack(images), labels=np.array(labels))
        part.replace(cache)
    kept = np.load(cache)
    return [
        (b.name, kept["images"][b.start : b.stop], kept["labels"][b.start : b.stop])
        for b in stream.blocks
    ]


def profile_for(method: str, model: Any, card: Any, args: argparse.Namespace) -> Any:
    """What the method knows of the source; learned once, and kept beside the record."""
    profile = bestta.models.load_profile("cifar10")
    if method_class(method).Preparation is None:
        return profile
    path = args.out.with_name(f"{args.out.stem}-{method}-profile.safetensors")
    if not path.exists():
        train = Cifar10(args.data, "train").some(args.prepare)
        images = LabelledBatches(train, 64, card.normalise)
        settings = {"ecotta": {"warmup_epochs": args.warmup}}.get(method, {})
        bestta.prepare(
            model,
            images,
            method=method,
            profile=profile,
            checkpoint=path.with_suffix(".part"),
            progress=True,
            **settings,
        ).save(path)
    return bestta.SourceProfile.load(path)


def run(
    method: str,
    model: Any,
    card: Any,
    blocks: Sequence[tuple[str, Any, Any]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Error of each corruption in turn, the adapter going on from one to the next."""
    settings = dict(SETTINGS.get(method, {}))
    if "normalise" in method_class(method).Config.__dataclass_fields__:
        settings["normalise"] = tuple(map(tuple, card.normalise))
    adapter = bestta.adapt(model, profile_for(method, model, card, args), method=method, **settings)
    place: Path = args.out.with_name(f".{args.out.stem}-{method}")
    notes = place.with_suffix(".json")

    def state_after(blocks: int) -> Path:
        return place.with_name(f"{place.name}-{blocks}.safetensors")

    errors: dict[str, float] = {}
    seconds = 0.0
    if notes.exists():
        errors, seconds = json.loads(notes.read_text())
        adapter.load(state_after(len(errors)))
    total = sum(len(labels) for _, _, labels in blocks)
    done = sum(len(labels) for name, _, labels in blocks if name in errors)
    with Progress(f"{method}: images", total, show=True, done=done) as progress:
        for name, images, labels in blocks:
            if name in errors:
                continue
            adapter.domain_changed()  # heard by those that ask for it
            metric = Errors()
            for start in range(0, len(images), args.batch):
                batch = normalised(images[start : start + args.batch], card.normalise)
                began = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                    logits = adapter(batch)
                seconds += time.perf_counter() - began
                metric.add(logits.float(), torch.from_numpy(labels[start : start + args.batch]))
                progress.advance(len(batch))
            errors[name] = metric.score()
            adapter.save(state_after(len(errors)))  # first: notes without their state are useless
            write_whole(notes, json.dumps([errors, seconds]).encode())
            state_after(len(errors) - 1).unlink(missing_ok=True)
    notes.unlink()
    state_after(len(errors)).unlink()
    return {
        "errors": errors,
        "mean": sum(errors.values()) / len(errors),
        "ms_per_image": 1e3 * seconds / total,
        "starred": adapter.needs_domain_changes,
        "settings": adapter.settings,
        "provenance": provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--images", type=int, default=1000, help="of each corruption")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--methods", nargs="*", default=None, help="some, not all")
    parser.add_argument("--prepare", type=int, default=2000, help="training images to prepare on")
    parser.add_argument("--warmup", type=int, default=3, help="epochs of EcoTTA's warm-up")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the record")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "benchmark": "batch_sizes", "model": "cifar10", "batch": args.batch,
        "images": args.images, "severity": 5, "seed": 0, "precision": args.precision,
        "prepare": args.prepare, "warmup": args.warmup, "methods": {},
    }  # fmt: skip
    if args.out.exists():
        before = json.loads(args.out.read_text())
        differing = [k for k, v in record.items() if k != "methods" and before.get(k) != v]
        if differing:
            raise SystemExit(f"{args.out} holds another run: {', '.join(differing)} differ.")
        record = before
    model, card = bestta.models.load("cifar10"), bestta.models.card("cifar10")
    model.to(memory_format=torch.channels_last)
    cache = args.out.with_name(f"cifar10c-{args.images}.npz")
    blocks = render(args.data, args.images, cache)
    for method in args.methods or bestta.methods():
        if method not in record["methods"]:
            row = run(method, model, card, blocks, args)
            if args.out.exists():  # another process may have written rows meanwhile
                record = json.loads(args.out.read_text())
            record["methods"][method] = row
            write_whole(args.out, f"{json.dumps(record, indent=1)}\n".encode())
    rows = sorted(record["methods"].items(), key=lambda item: item[1]["mean"])
    print(f"\nError in %, mean of {len(blocks)} corruptions, batch {args.batch}")
    print(f"{'':<14}{'error':>8}{'published':>11}{'ms/image':>10}")
    for name, row in rows:
        published = PUBLISHED.get(name, "") if args.batch == 200 else ""
        star = "*" if row["starred"] else ""
        print(f"{name + star:<14}{row['mean']:>8.1f}{published:>11}{row['ms_per_image']:>10.1f}")
    print("published: WRN-28-10 and 10,000 images a corruption; * is told of domain changes")


if __name__ == "__main__":
    main()
