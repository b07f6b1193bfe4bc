"""Adapt a classifier: a Wide ResNet on 32x32 images, with the settings for classification.

    python examples/classification.py [checkpoint.pt]

With a checkpoint of RobustBench's "Standard" WRN-28-10 its weights are loaded; without one a small
network with random weights shows the calls.
"""

from __future__ import annotations

import sys

import torch

import bestta
from bestta.models import WideResNet, load_weights


def main() -> None:
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = WideResNet(depth=28, width=10)
        print(load_weights(model, sys.argv[1]))
    else:
        model = WideResNet(depth=10, width=1)
    model.eval()

    source_images = [torch.rand(8, 3, 32, 32) for _ in range(10)]  # yours: training images
    profile = bestta.SourceProfile.collect(model, source_images, layers=["block1"])

    # (B, K) logits: the classification preset is chosen by itself.
    adapter = bestta.adapt(model, profile)
    print("settings:", {k: adapter.settings[k] for k in ("rho", "lr", "style", "lambda_entropy")})
    for _ in range(5):
        corrupted = torch.rand(1, 3, 32, 32) * 0.4
        label = adapter(corrupted).argmax(1).item()
        did = f"entropy {adapter.last.losses['entropy']:.3f}" if adapter.last.losses else ""
        print(f"class {label}: {did or adapter.last.reason}")


if __name__ == "__main__":
    main()
