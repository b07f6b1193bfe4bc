"""The method in a plain loop, in half a minute: a network meets weather it has never seen.

    python examples/drive.py

Everything comes with the library: street scenes with labels, rendered here, and the model
`streets`, trained on such scenes in clear weather alone. A camera drives through fog, night, rain
and snow; the network stays frozen, and BESTTA learns a few numbers beside it.
"""

from __future__ import annotations

import time

import torch

import bestta
from bestta import protocols
from bestta.data import Streets
from bestta.data.sheets import colour, grid, save_sheet
from bestta.data.tensors import to_tensor
from bestta.metrics import MeanIoU

SIZE = (256, 128)
CLASSES = 19
FRAMES = 12  # per weather
SEVERITY = 3
PICTURE = "drive.png"


def main() -> None:
    torch.set_num_threads(1)  # the network is too small for more to pay
    model = bestta.models.load("streets")
    profile = bestta.models.load_profile("streets")
    adapter = bestta.adapt(model, profile)
    still = bestta.adapt(model, profile, lr=0.0)  # the same model: adapters do not meet
    learned = sum(p.numel() for p in adapter.trainable.values())
    frozen = sum(p.numel() for p in model.parameters())
    where = " and ".join(adapter.settings["layers"])
    print(f"{bestta.models.card('streets').about}.")
    print(f"{frozen:,} parameters, frozen; BeIN behind {where} learns {learned} numbers.\n")
    print(f"mIoU of {FRAMES} frames each, one at a time, no labels, no word when it changes:\n")
    print(f"{'weather':<8}{'left alone':>12}{'BeIN, γ = 0':>13}{'BESTTA':>9}")

    streets = Streets(FRAMES, size=SIZE, split="val")
    clear = protocols.Domain("clear", streets)
    weather = protocols.weather(streets, severity=SEVERITY)
    stream = protocols.continual([clear, *weather], rounds=2)
    frames = stream.frames(workers=1)
    seconds = {"plain": 0.0, "adapted": 0.0}
    pictures = []
    for block in stream.blocks:
        scores = {name: MeanIoU(CLASSES) for name in ("alone", "still", "adapted")}
        for _ in range(len(block)):
            frame = next(frames)
            image, label = to_tensor(frame.image), torch.from_numpy(frame.label)
            guesses = {"still": still(image).argmax(1)[0]}
            start = time.perf_counter()
            with torch.no_grad():
                guesses["alone"] = model(image).argmax(1)[0]
            middle = time.perf_counter()
            guesses["adapted"] = adapter(image).argmax(1)[0]
            seconds["plain"] += middle - start
            seconds["adapted"] += time.perf_counter() - middle
            for name, guess in guesses.items():
                scores[name].add_predictions(guess, label)
            if block.round == 1 and frame.position == (block.start + block.stop) // 2:
                maps = [label, guesses["alone"], guesses["adapted"]]
                pictures.append([frame.image, *(colour(ids.byte().numpy()) for ids in maps)])
        alone, held, adapted = (score.score() for score in scores.values())
        bar = "█" * round(alone / 3) + "▒" * (round(adapted / 3) - round(alone / 3))
        print(f"{block.name:<8}{alone:>12.1f}{held:>13.1f}{adapted:>9.1f}  {bar}", flush=True)

    save_sheet(
        grid(
            pictures,
            row_names=[block.name for block in stream.blocks if block.round == 1],
            column_names=["camera", "truth", "left alone", "BESTTA"],
        ),
        PICTURE,
    )
    losses = ", ".join(f"{name} {value:.3f}" for name, value in adapter.last.losses.items())
    losses = losses or adapter.last.reason  # a step that learns nothing has none
    largest = max(p.abs().max().item() for p in adapter.trainable.values())
    print(f"\nThe last of {adapter.images_seen} steps: {losses}; largest |γ| {largest:.3f}.")
    ratio = seconds["adapted"] / seconds["plain"]
    print(f"Adapting took {ratio:.1f}x the time of the plain forward on this small network.")
    print(f"\nLook at {PICTURE}: what the camera saw, the truth, and both predictions.")
    print("Next: `. .venv/bin/activate`, then `bestta models` lists what ships and `bestta data")
    print("preview streets` shows the scenes; examples/your_own_model.py wraps a model you have,")
    print("and README.md has the rest.")


if __name__ == "__main__":
    main()
