"""Keep what one camera has learned over a restart, with several cameras on one model.

python examples/camera_state.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import bestta


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 5, 1)
    ).eval()
    source_images = [torch.rand(1, 3, 32, 32) for _ in range(20)]
    profile = bestta.SourceProfile.collect(model, source_images, layers=["2"])

    # One frozen model, one adapter per camera: each has its own state.
    cameras = {name: bestta.adapt(model, profile) for name in ("north", "south")}
    foggy = [0.3 * torch.rand(1, 3, 32, 32) + 0.6 for _ in range(20)]
    dark = [0.2 * torch.rand(1, 3, 32, 32) for _ in range(20)]
    for fog, night in zip(foggy[:10], dark[:10], strict=True):
        cameras["north"](fog)
        cameras["south"](night)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "north.safetensors"
        cameras["north"].save(path)
        print(f"north has seen {cameras['north'].images_seen} images: {path.stat().st_size} bytes")

        # After a restart: the same model and profile, and the camera goes on where it was.
        restored = bestta.adapt(model, profile)
        restored.load(path)

    same = all(torch.equal(restored(image), cameras["north"](image)) for image in foggy[10:])
    print(f"restored, it predicts as if it had never stopped, bit for bit: {same}")
    restored.reset()
    print(f"reset, it has seen {restored.images_seen} images")


if __name__ == "__main__":
    main()
