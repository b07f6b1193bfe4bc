"""Adapt a segmentation network: DeepLabV3+ with BeIN behind one stage of its encoder, or several.

    python examples/segmentation.py [encoder-checkpoint.pth]

Images come from the embedded street scenes. With a checkpoint of an EfficientNet-Lite0 encoder its
weights are loaded; the decoder is random here, so that the calls are the point and not the picture.
"""

from __future__ import annotations

import sys

import torch

import bestta
from bestta.data import Streets
from bestta.data.tensors import to_batches, to_tensor
from bestta.data.weather import simulate
from bestta.models import DeepLabV3Plus, load_weights


def main() -> None:
    torch.manual_seed(0)
    model = DeepLabV3Plus("efficientnet_lite0", classes=19)
    if len(sys.argv) > 1:
        print(load_weights(model, sys.argv[1]))
    model.eval()

    streets = Streets(12, size=(128, 64))  # yours: training images
    stages = [f"backbone.layer{i}" for i in range(1, 5)]
    profile = bestta.SourceProfile.collect(model, to_batches(streets[:6]), layers=stages)

    foggy = to_tensor(simulate(streets[6].image, "fog", severity=4))
    for layers in (["backbone.layer3"], ["backbone.layer1", "backbone.layer2"]):
        with bestta.adapt(model, profile, layers=layers) as adapter:
            logits = adapter(foggy)
            losses = {name: round(value, 3) for name, value in adapter.last.losses.items()}
            print(f"BeIN behind {' and '.join(layers)}: {tuple(logits.shape)}, {losses}")


if __name__ == "__main__":
    main()
