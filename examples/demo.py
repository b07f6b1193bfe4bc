"""The method at work, in about a minute: a small network meets weather it has never seen.

    make demo

Everything is made here: street scenes with labels from the embedded set, a network of some
thousand parameters trained on them in clear weather, and then a camera that drives through fog,
night, rain and snow. The network stays frozen; BESTTA learns a few numbers beside it.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestta
from bestta import protocols
from bestta.data import Streets
from bestta.data.sheets import colour, grid, save_sheet
from bestta.data.tensors import to_batches, to_tensor
from bestta.progress import Progress

SIZE = (128, 64)
CLASSES = 19
STEPS, BATCH = 240, 8
FRAMES = 40  # per weather
SEVERITY = 3
PICTURE = "demo.png"


class Network(nn.Module):
    """Three stages and a head: logits (B, 19, H, W)."""

    def __init__(self) -> None:
        super().__init__()

        def stage(inputs: int, outputs: int, stride: int, dilation: int = 1) -> nn.Sequential:
            convolution = nn.Conv2d(
                inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False
            )
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

        self.layer1 = nn.Sequential(stage(3, 16, 2), stage(16, 24, 1))
        self.layer2 = nn.Sequential(stage(24, 48, 2), stage(48, 48, 1))
        self.layer3 = nn.Sequential(stage(48, 64, 2), stage(64, 64, 1, 2), stage(64, 64, 1, 4))
        self.head = nn.Conv2d(24 + 48 + 64, CLASSES, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.layer1(image)
        middle = self.layer2(fine)
        coarse = self.layer3(middle)
        size = fine.shape[2:]
        wider = [F.interpolate(maps, size=size, mode="bilinear") for maps in (middle, coarse)]
        logits = self.head(torch.cat([fine, *wider], 1))
        return F.interpolate(logits, size=image.shape[2:], mode="bilinear")


def train() -> Network:
    """The source model: trained on clear scenes only, rendered by a second process."""
    torch.manual_seed(0)
    model = Network().train()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.01, total_steps=STEPS)
    frames = protocols.single(Streets(STEPS * BATCH, size=SIZE)).frames(workers=1)
    with Progress("training steps", total=STEPS, show=True) as progress:
        for batch in zip(*[frames] * BATCH, strict=True):
            images = torch.cat([to_tensor(frame.image) for frame in batch])
            labels = torch.from_numpy(np.stack([frame.label for frame in batch])).long()
            loss = F.cross_entropy(model(images), labels, ignore_index=255)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            progress.advance()
    return model.eval()


class Score:
    """Intersections and unions, summed over frames."""

    def __init__(self) -> None:
        self.table = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)

    def add(self, prediction: Tensor, label: Tensor) -> None:
        """Count one frame: class ids (H, W) each, 255 ignored."""
        counts = label.long() * CLASSES + prediction
        counts = torch.bincount(counts[label != 255], minlength=CLASSES**2)
        self.table += counts.view(CLASSES, CLASSES)

    def miou(self) -> float:
        """Mean over the classes present, in per cent."""
        hits, union = self.table.diag(), self.table.sum(0) + self.table.sum(1) - self.table.diag()
        present = self.table.sum(1) > 0
        return 100 * (hits / union)[present].mean().item()


def main() -> None:
    torch.set_num_threads(1)  # the network is too small for more to pay
    print("Training a small network on street scenes in clear weather ...", flush=True)
    model = train()
    source = Streets(200, size=SIZE)
    profile = bestta.SourceProfile.collect(model, to_batches(source), layers=["layer1"])
    adapter = bestta.adapt(model, profile)
    still = bestta.adapt(model, profile, lr=0.0)  # the same model: adapters do not meet
    learned = sum(p.numel() for p in adapter.trainable.values())
    frozen = sum(p.numel() for p in model.parameters())
    print(f"{frozen:,} parameters, now frozen; BeIN behind layer1 learns {learned} numbers.\n")
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
        scores = {"alone": Score(), "still": Score(), "adapted": Score()}
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
                scores[name].add(guess, label)
            if block.round == 1 and frame.position == (block.start + block.stop) // 2:
                maps = [label, guesses["alone"], guesses["adapted"]]
                pictures.append([frame.image, *(colour(ids.byte().numpy()) for ids in maps)])
        alone, held, adapted = (score.miou() for score in scores.values())
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
    largest = max(p.abs().max().item() for p in adapter.trainable.values())
    print(f"\nThe last of {adapter.images_seen} steps: {losses}; largest |γ| {largest:.3f}.")
    ratio = seconds["adapted"] / seconds["plain"]
    print(f"Adapting took {ratio:.1f}x the time of the plain forward on this tiny network.")
    print(f"\nLook at {PICTURE}: what the camera saw, the truth, and both predictions.")
    print("Next: examples/your_own_model.py wraps a model you have, `bestta data preview streets`")
    print("shows the scenes, docs/data.md the data, and README.md has the rest.")


if __name__ == "__main__":
    main()
