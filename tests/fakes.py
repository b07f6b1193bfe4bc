"""Records as the benchmark writes them, made up: for tests of what is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bestta.data.classes import CLASSES
from bestta.data.sheets import colour

WEATHER = ("fog", "night", "rain", "snow")


def fake_record(
    method: str = "bestta",
    *,
    label: str | None = None,
    seed: int = 0,
    level: float = 45.0,
    rounds: int = 3,
    conditions: tuple[str, ...] = WEATHER,
    task: str = "segmentation",
    **changes: Any,
) -> dict[str, Any]:
    """A record whose scores lie round ``level``; ``changes`` replace whole entries of it."""
    draw = np.random.default_rng([seed, sum(method.encode())])
    segments = task == "segmentation"
    frames = 5
    blocks = [
        {
            "index": r * len(conditions) + c,
            "name": name,
            "round": r,
            "frames": frames,
            "score": round(level + 2 * c - r * 0.5 + float(draw.normal()), 6),
            "per_class": [round(float(v), 6) for v in draw.uniform(20, 80, 19 if segments else 2)],
        }
        for r in range(rounds)
        for c, name in enumerate(conditions)
    ]
    scores = [block["score"] for block in blocks]
    count = len(blocks) * frames
    each = draw.normal(level, 8, count).clip(0, 100).round(3).tolist()
    record: dict[str, Any] = {
        "kind": "bestta record",
        "format": 1,
        "id": f"streets-continual-{method}-s{seed}-{sum(method.encode()):08x}",
        "protocol": "streets-continual",
        "published": "acdc-continual",
        "method": method,
        "label": label or method.upper(),
        "told_of_changes": method == "tent_reset",
        "study": None,
        "seed": seed,
        "task": task,
        "metric": "mIoU" if segments else "error",
        "higher_is_better": segments,
        "classes": list(CLASSES) if segments else ["cat", "dog"],
        "stream": {
            "key": "0123456789abcdef",
            "model": "streets",
            "fingerprint": "f" * 16,
            "set": "streets",
            "size": [256, 128],
            "rounds": rounds,
            "conditions": list(conditions),
            "severity": 3,
            "frames": count,
            "every": 1,
            "batch": 1,
            "precision": "fp32",
            "names": "d" * 16,
        },
        "config": {},
        "settings": {"seed": seed},
        "parameters": {"trained": 0 if method == "source" else 512, "model": 912_345},
        "blocks": blocks,
        "score": sum(scores) / len(scores),
        "rounds": [
            sum(b["score"] for b in blocks if b["round"] == r) / len(conditions)
            for r in range(rounds)
        ],
        "conditions": {
            name: sum(b["score"] for b in blocks if b["name"] == name) / rounds
            for name in conditions
        },
        "source_set": {"set": "streets", "split": "val", "images": 40, "names": "5" * 16},
        "source_scores": [
            {"round": r, "score": 85.0 - r * (method == "tent")} for r in range(rounds + 1)
        ],
        "frames": {
            "position": list(range(count)),
            "block": [n // frames for n in range(count)],
            "score": each if segments else [100.0 * (v < level) for v in each],
        },
        "traced_every": 1,
        "traces": {
            "step": list(range(count)),
            "entropy": draw.uniform(0, 1, count).round(4).tolist(),
            "gamma": np.linspace(0, 0.2, count).round(4).tolist(),
            "gamma_mean": np.linspace(0, 0.05, count).round(4).tolist(),
            "direction": draw.uniform(-1, 1, count).round(4).tolist(),
            "target": draw.uniform(0, 1, count).round(4).tolist(),
            "source": draw.uniform(0, 1, count).round(4).tolist(),
        },
        "events": {"adapted": count, "skipped": 0, "rolled_back": 0, "reasons": {}},
        "embeddings": _embeddings(draw, conditions),
        "pictures": {
            "conditions": [
                {
                    "name": name,
                    "frame": f"streets/val/{n:05}",
                    "image": f"{name}.jpg",
                    "truth": f"{name}-truth.png",
                    "prediction": f"{name}-prediction.png",
                    "label": None,
                    "predicted": None,
                }
                for n, name in enumerate(conditions)
            ],
            "worst": [
                {
                    "name": "fog",
                    "round": 1,
                    "frame": "streets/val/00003",
                    "score": 12.5,
                    "image": "worst-1.jpg",
                    "truth": "worst-1-truth.png",
                    "prediction": "worst-1-prediction.png",
                    "label": None,
                    "predicted": None,
                }
            ],
        },
        "skipped": [],
        "provenance": {
            "bestta": "0.1.0",
            "commit": "b7f4d51",
            "versions": {
                **{"python": "3.11.9", "torch": "2.13.0", "numpy": "2.3.0"},
                **{"opencv": "4.12.0", "pillow": "12.0.0"},
            },
            "machine": {
                **{"processor": "x86_64", "cpu": "Test CPU", "cores": 2, "threads": 1},
                **{"device": "cpu", "gpu": None},
            },
        },
        "cost": {
            "call_ms": {"median": 10.0 + len(method), "p95": 20.0 + len(method)},
            "predict_ms": {"median": 9.0, "p95": 11.0},
            "adapt_ms": {"median": 1.0 + len(method), "p95": 9.0 + len(method)},
            "timed": count,
            "peak_bytes": 500_000_000 + 10_000_000 * len(method),
            "over_model_bytes": 50_000_000 + 10_000_000 * len(method),
            "memory": "process",
            "load": [0.5, 0.9],
            "started": "2026-01-01T00:00:00+00:00",
            "finished": "2026-01-01T00:01:00+00:00",
            "seconds": 60.0,
            "sittings": 1,
            "looked": False,
        },
    }
    return record | changes


def older(record: dict[str, Any]) -> dict[str, Any]:
    """The record without what earlier versions did not write."""
    kept = {k: v for k, v in record.items() if k not in ("source_set", "traced_every")}
    origin = record["provenance"]
    machine = {k: v for k, v in origin["machine"].items() if k not in ("device", "gpu")}
    return kept | {
        "provenance": origin | {"machine": machine},
        "cost": {k: v for k, v in record["cost"].items() if k != "looked"},
    }


def _embeddings(draw: np.random.Generator, conditions: tuple[str, ...]) -> dict[str, Any]:
    channels, bins = [3, 17, 40], 20

    def counts(shift: float) -> list[list[int]]:
        return [
            np.histogram(draw.normal(shift, 1, 500), bins=bins, range=(-4, 4))[0].tolist()
            for _ in channels
        ]

    return {
        "layer": "backbone.layer4",
        "channels": channels,
        "edges": [np.linspace(-4, 4, bins + 1).tolist() for _ in channels],
        "source": counts(0.0),
        "target": {name: counts(1.5) for name in conditions},
        "adapted": {name: counts(0.3) for name in conditions},
        "distance": {
            "target": dict.fromkeys(conditions, 1.5),
            "adapted": dict.fromkeys(conditions, 0.3),
        },
    }


def fake_pictures(folder: Path, record: dict[str, Any]) -> None:
    """Write the record and the pictures it names below ``folder``."""
    from PIL import Image

    place = folder / f"{record['id']}.pictures"
    place.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for entry in (*record["pictures"]["conditions"], *record["pictures"]["worst"]):
        Image.fromarray(draw.integers(0, 256, (32, 64, 3), dtype=np.uint8)).save(
            place / entry["image"]
        )
        for key in ("truth", "prediction"):
            if entry[key] is not None:
                ids = draw.integers(0, 19, (32, 64), dtype=np.uint8)
                Image.fromarray(colour(ids)).save(place / entry[key])
    (folder / f"{record['id']}.json").write_text(json.dumps(record))
