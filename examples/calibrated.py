"""Choose the layer without labels, then drive through fog under the guard's eye.

    python examples/calibrated.py

A real calibration takes some hundreds of images and every condition; this one is made short.
"""

from __future__ import annotations

from typing import Any

import torch

import bestta
from bestta import models
from bestta.data import Streets
from bestta.data.tensors import to_tensor
from bestta.data.weather import simulate


def main() -> None:
    torch.set_num_threads(1)
    model, card = models.load("streets"), models.card("streets")
    scenes = [sample.image for sample in Streets(10)]
    images = [to_tensor(scene, card.normalise) for scene in scenes]

    stages = ["backbone.layer1", "backbone.layer2", "backbone.layer4"]
    # What is named stays as it is, and is not searched for: here all but the layers.
    fixed: dict[str, Any] = {"rho": 0.7, "statistics_decay": 0.0, "lr": 0.0}
    profile = bestta.calibrate(model, images, layers=stages, conditions=["clear", "fog"], **fixed)
    found = profile.provenance["calibration"]
    for candidate in found["candidates"]:
        print(f"{candidate['name']}: {candidate['gain']:+.1f} points of agreement")
    print(f"chosen: {', '.join(profile.layers)}, {profile.settings['bestta']}")

    adapter = bestta.adapt(model, profile)
    for number, scene in enumerate(scenes[:8]):
        foggy = simulate(scene, "fog", 3, seed=number) if number >= 3 else scene
        adapter(to_tensor(foggy, card.normalise))
        decided = adapter.last.guard or "the adapter answers"
        print(f"{'fog' if number >= 3 else 'clear'}: {decided}")


if __name__ == "__main__":
    main()
