"""Small networks and streams for the tests, with random weights: no test needs good ones."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Net = TypeVar("Net", bound=nn.Module)


def stage(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Segmenter(nn.Module):
    """Four stages and a head; a skip past the last two, so that stages meet again."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.layer1 = stage(3, 6)
        self.layer2 = stage(6, 8, stride=2)
        self.layer3 = stage(8, 8)
        self.layer4 = stage(8, 10)
        self.head = nn.Conv2d(18, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        low = self.layer2(self.layer1(image))
        logits = self.head(torch.cat([low, self.layer4(self.layer3(low))], 1))
        return nn.functional.interpolate(logits, size=image.shape[2:], mode="bilinear")


class Classifier(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.layer1 = stage(3, 6)
        self.layer2 = stage(6, 8, stride=2)
        self.fc = nn.Linear(8, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(image)).mean((2, 3)))


class TokenClassifier(nn.Module):
    """Patches as tokens (B, N, C), one block of attention, layer norm throughout; no batch norm."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.fc = nn.Linear(8, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.block(self.patch(image).flatten(2).mT).mean(1))


def randomise(model: Net, seed: int) -> Net:
    """Random weights and batch-norm statistics, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.copy_(torch.randn(module.num_features, generator=generator))
                module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
                module.weight.add_(1)
    return model.eval()


def stream(
    length: int,
    seed: int,
    *,
    shift: float = 0.0,
    scale: float = 1.0,
    size: int = 12,
    batch: int = 1,
) -> list[Tensor]:
    """Random images; ``shift`` and ``scale`` are the weather."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, 3, size, size)
    return [torch.randn(shape, generator=generator) * scale + shift for _ in range(length)]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors agree, names and bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
