"""A folder of images of your own, driven through the weather of the paper's protocol.

    python examples/weather_stream.py [folder]

Without a folder some street scenes are rendered and stand in for it. The stream knows which weather
it shows; the adapter is handed images. It can be entered anywhere: the second half is played in a
loop of its own, as after a restart.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import bestta
from bestta import protocols
from bestta.data import Folder, Streets
from bestta.data.tensors import to_batches, to_tensor


def main() -> None:
    torch.manual_seed(0)
    images = Folder(sys.argv[1]) if len(sys.argv) > 1 else Streets(8, size=(128, 64))
    model = nn.Sequential(  # yours: a model trained on such images
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 19, 1)
    ).eval()
    profile = bestta.SourceProfile.collect(model, to_batches(images), layers=["2"])
    adapter = bestta.adapt(model, profile)

    stream = protocols.continual(protocols.weather(images, severity=3), rounds=2)
    print(stream)
    middle = len(stream) // 2
    for start, stop in ((0, middle), (middle, len(stream))):
        for frame in stream.frames(start, stop, workers=1):
            adapter(to_tensor(frame.image))
            if frame.position == frame.block.start:
                done = adapter.last  # a step that learned has losses, another says why not
                told = f"style loss {done.losses['style']:.3f}" if done.losses else done.reason
                print(f"frame {frame.position:3}: {frame.block.name:6} {told}")
    print(f"{adapter.images_seen} frames seen, {len(stream.skipped)} skipped")


if __name__ == "__main__":
    main()
