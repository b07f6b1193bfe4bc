"""The method at work, in under a minute: a small network meets weather it has never seen.

    make demo

Everything is made here: street scenes with labels drawn by a few lines of code, a network of some
thousand parameters trained on them in clear weather, and then a camera that drives through fog,
night and snow. The network stays frozen; BESTTA learns a few numbers beside it.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestta
from bestta.progress import Progress

CLASSES = ("sky", "building", "tree", "road", "car")
HEIGHT, WIDTH = 48, 96
HORIZON = 26
FRAMES = 60  # per weather


def scene(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A street in clear weather: image (1, 3, H, W) with values 0 to 1, labels (1, H, W)."""

    def draw(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    def tint(colour: tuple[float, float, float], spread: float) -> Tensor:
        return torch.tensor(colour).view(3, 1, 1) + spread * torch.randn(
            3, 1, 1, generator=generator
        )

    labels = torch.zeros(HEIGHT, WIDTH, dtype=torch.long)
    image = tint((0.5, 0.7, 0.95), 0.03).expand(3, HEIGHT, WIDTH).clone()
    noise = torch.randn(1, HEIGHT, WIDTH, generator=generator)

    def fill(kind: str, top: float, bottom: float, left: float, right: float, look: Tensor) -> None:
        rows, columns = slice(int(top), int(bottom)), slice(max(int(left), 0), int(right))
        image[:, rows, columns] = look[:, rows, columns]
        labels[rows, columns] = CLASSES.index(kind)

    windows = torch.zeros(1, HEIGHT, WIDTH)
    windows[:, ::4, :] = windows[:, :, ::4] = 1
    left = draw(-8, 0)
    while left < WIDTH:
        right = left + draw(6, 18)
        if draw(0, 1) < 0.6:
            wall = tint((0.55, 0.45, 0.4), 0.08) + 0.12 * windows
            fill("building", draw(2, HORIZON - 6), HORIZON + 2, left, right, wall)
        left = right
    for _ in range(3):
        left, crown = draw(0, WIDTH - 8), tint((0.2, 0.4, 0.15), 0.03) + 0.1 * noise
        fill("tree", draw(8, 18), HORIZON + 2, left, left + draw(5, 12), crown)
    road = tint((0.33, 0.33, 0.35), 0.02) + 0.03 * noise
    fill("road", HORIZON + 2, HEIGHT, 0, WIDTH, road)
    for _ in range(3):
        top, left = draw(HORIZON, HEIGHT - 12), draw(0, WIDTH - 12)
        car = tint((0.5, 0.3, 0.3), 0.25).expand(3, HEIGHT, WIDTH)
        fill("car", top, top + 0.3 * (top - HORIZON) + 6, left, left + draw(8, 20), car)
    return (image + 0.02 * noise).clamp(0, 1)[None], labels[None]


def weather(image: Tensor, name: str, generator: torch.Generator) -> Tensor:
    """The same scene in another weather."""
    rows = torch.arange(HEIGHT).view(HEIGHT, 1)
    if name == "fog":  # thicker towards the horizon
        clear = 0.25 + 0.03 * (rows - HORIZON).abs()
        return clear.clamp(max=0.8) * image + (1 - clear.clamp(max=0.8)) * 0.75
    noise = torch.randn(image.shape, generator=generator)
    if name == "night":
        blue = torch.tensor([0.0, 0.01, 0.06]).view(3, 1, 1)
        return (0.4 * image + blue + 0.02 * noise).clamp(0, 1)
    if name == "snow":  # whitened, more so on the ground, with flakes
        flakes = (torch.rand(1, 1, HEIGHT, WIDTH, generator=generator) < 0.04).float()
        white = 0.3 + 0.25 * (rows > HORIZON)
        return ((1 - white) * image + white * 0.95).lerp(torch.ones(()), flakes).clamp(0, 1)
    return image


class Network(nn.Module):
    """Three stages and a head: logits (B, 5, H, W)."""

    def __init__(self) -> None:
        super().__init__()

        def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

        self.layer1, self.layer2, self.layer3 = stage(3, 16, 1), stage(16, 32, 2), stage(32, 48, 2)
        self.head = nn.Conv2d(48 + 16, len(CLASSES), 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        low = self.layer1(image)
        high = F.interpolate(self.layer3(self.layer2(low)), size=low.shape[2:], mode="bilinear")
        logits: Tensor = self.head(torch.cat([low, high], 1))
        return logits


def train(steps: int = 150) -> Network:
    """The source model: trained on clear scenes only."""
    torch.manual_seed(0)
    model, generator = Network().train(), torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    with Progress("training steps", total=steps, show=True) as progress:
        for _ in range(steps):
            images, labels = zip(*[scene(generator) for _ in range(8)], strict=True)
            light = 0.7 + 0.6 * torch.rand(8, 1, 1, 1, generator=generator)
            loss = F.cross_entropy(model(torch.cat(images) * light), torch.cat(labels))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            progress.advance()
    return model.eval()


def miou(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Mean over the classes of intersection over union, both summed over the frames."""
    predictions, labels = (torch.cat(part) for part in zip(*pairs, strict=True))
    counts = torch.bincount((labels * len(CLASSES) + predictions).flatten(), minlength=25)
    table = counts.view(len(CLASSES), len(CLASSES)).double()
    hits = table.diag()
    return (hits / (table.sum(0) + table.sum(1) - hits)).mean().item()


def main() -> None:
    torch.set_num_threads(1)  # the network is too small for more to pay
    print("Training a small network on street scenes in clear weather ...", flush=True)
    model = train()
    source = torch.Generator().manual_seed(2)
    unlabelled = (scene(source)[0] for _ in range(100))
    profile = bestta.SourceProfile.collect(model, unlabelled, layers=["layer1"])
    adapter = bestta.adapt(model, profile)
    still = bestta.adapt(model, profile, lr=0.0)  # the same model: adapters do not meet
    learned = sum(p.numel() for p in adapter.trainable.values())
    frozen = sum(p.numel() for p in model.parameters())
    print(f"{frozen:,} parameters, now frozen; BeIN behind layer1 learns {learned} numbers.\n")
    print(f"mIoU of {FRAMES} frames each, one at a time, no labels, no word when it changes:\n")
    print(f"{'weather':<8}{'left alone':>12}{'BeIN, γ = 0':>13}{'BESTTA':>9}")

    camera = torch.Generator().manual_seed(3)
    seconds = {"plain": 0.0, "adapted": 0.0}
    for name in ("clear", "fog", "night", "snow", "fog", "night", "snow", "clear"):
        answers: dict[str, list[tuple[Tensor, Tensor]]] = {"alone": [], "still": [], "adapted": []}
        for _ in range(FRAMES):
            image, labels = scene(camera)
            image = weather(image, name, camera)
            answers["still"].append((still(image).argmax(1), labels))
            start = time.perf_counter()
            with torch.no_grad():
                answers["alone"].append((model(image).argmax(1), labels))
            middle = time.perf_counter()
            answers["adapted"].append((adapter(image).argmax(1), labels))
            seconds["plain"] += middle - start
            seconds["adapted"] += time.perf_counter() - middle
        alone, held, adapted = (100 * miou(pairs) for pairs in answers.values())
        bar = "█" * round(alone / 3) + "▒" * (round(adapted / 3) - round(alone / 3))
        print(f"{name:<8}{alone:>12.1f}{held:>13.1f}{adapted:>9.1f}  {bar}", flush=True)

    losses = ", ".join(f"{name} {value:.3f}" for name, value in adapter.last.losses.items())
    largest = max(p.abs().max().item() for p in adapter.trainable.values())
    print(f"\nThe last of {adapter.images_seen} steps: {losses}; largest |γ| {largest:.3f}.")
    ratio = seconds["adapted"] / seconds["plain"]
    print(f"Adapting took {ratio:.1f}x the time of the plain forward on this tiny network.")
    print("\nNext: examples/your_own_model.py wraps a model you have, examples/camera_state.py")
    print("keeps what one camera has learned, and README.md has the rest.")


if __name__ == "__main__":
    main()
