"""A model that ships with the library, kept working in the weather: three lines.

    python examples/source_model.py [name]

Any of `bestta models` will do, or a folder that `bestta train` filled. The images here are the
embedded street scenes, so the scores mean something for `streets` alone.
"""

from __future__ import annotations

import sys

import torch

import bestta
from bestta.data import Streets
from bestta.data.tensors import to_tensor
from bestta.data.weather import simulate
from bestta.metrics import MeanIoU


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "streets"
    model = bestta.models.load(name)
    profile = bestta.models.load_profile(name)
    adapter = bestta.adapt(model, profile, lr=0.0)  # style transfer alone, the safe start

    card = bestta.models.card(name)
    print(f"{card.about}\nterms: {card.terms}\nprofile: {', '.join(profile.layers)}")
    if card.task != "segmentation":
        logits = adapter(to_tensor(Streets(1, size=(32, 32))[0].image, card.normalise))
        print(f"a street, to a network of {len(card.classes)} classes: {tuple(logits.shape)}")
        return
    alone, adapted = MeanIoU(len(card.classes)), MeanIoU(len(card.classes))
    for number, street in enumerate(Streets(20, size=card.size, split="val")):
        rain = simulate(street.image, "rain", severity=3, seed=number)
        image, label = to_tensor(rain, card.normalise), torch.from_numpy(street.label)[None]
        with adapter.paused():
            alone.add(adapter(image), label)
        adapted.add(adapter(image), label)
    print(f"mIoU of 20 streets in rain: {alone.score():.1f} left alone, {adapted.score():.1f} here")
    if name != "streets":
        print("(the streets are rendered: for a model of photographs that says little)")


if __name__ == "__main__":
    main()
