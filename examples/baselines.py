"""Nine methods in one loop: the same model, the same images, one after another.

    python examples/baselines.py [number of images]

The model and the street scenes ship with the library. A handful of images in fog shows how the
methods are used, not which is best: docs/methods.md says when to prefer which.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import bestta
from bestta.data import Streets
from bestta.data.tensors import LabelledBatches, to_tensor
from bestta.data.weather import simulate
from bestta.metrics import MeanIoU

METHODS: dict[str, dict[str, Any]] = {
    "source": {},
    "bn_stats": {},
    "alpha_bn": {},
    "bn_ema": {},
    "tent": {},
    "eata": {},
    "sar": {},
    "cotta": {},
    "bestta": {"lr": 0.0},
}


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    model, card = bestta.models.load("streets"), bestta.models.card("streets")

    # What EATA wants to know of the source, learned once and kept in the profile.
    source = LabelledBatches(Streets(8, size=card.size), size=4, normalise=card.normalise)
    profile = bestta.models.load_profile("streets")
    profile = bestta.prepare(model, source, method="eata", profile=profile)

    streets = list(Streets(count, size=card.size, split="val"))
    foggy = [simulate(street.image, "fog", severity=3, seed=i) for i, street in enumerate(streets)]
    print(
        f"{'method':<10}{'trains':>10}{'mIoU':>8}{'ms':>8}   {count} streets in fog, one at a time"
    )
    for method, settings in METHODS.items():
        # A profile is for those that need one; the others take what they want of it.
        with bestta.adapt(model, profile, method=method, **settings) as adapter:
            metric, started = MeanIoU(len(card.classes)), time.perf_counter()
            for street, image in zip(streets, foggy, strict=True):
                logits = adapter(to_tensor(image, card.normalise))
                metric.add(logits, torch.from_numpy(street.label)[None])
            each = (time.perf_counter() - started) * 1e3 / count
            trained = sum(p.numel() for p in adapter.trainable.values())
            print(f"{method:<10}{trained:>10,}{metric.score():>8.1f}{each:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
