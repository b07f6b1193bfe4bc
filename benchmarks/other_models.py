"""Two small networks without batch norm, for what must hold of models other than the shipped ones.

    python benchmarks/other_models.py --out runs/other-models
    python benchmarks/other_models.py --out runs/other-models --only tokens

``groupnorm`` is a residual network with group norms, ``tokens`` a transformer after SegFormer (Xie
et al., 2021) with layer norms; both learn the rendered streets as the model ``streets`` does. What
is finished is left alone, what was stopped goes on; OMP_NUM_THREADS sets the number of threads.
Each ends as a folder that `load` takes, with weights, profile, card and curves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.models import cards
from bestta.models.cards import NETWORKS, Card
from bestta.models.common import check_images, initialise
from bestta.training import Recipe, Training, publish, recipes
from bestta.training.publish import published

_CHANNELS_PER_GROUP = 8
_CHECKPOINT_EVERY = 120.0


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // _CHANNELS_PER_GROUP, channels)


def _resize(x: Tensor, size: Iterable[int]) -> Tensor:
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions added to a shortcut, each with a group norm behind it."""

    def __init__(self, in_channels: int, channels: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(
            in_channels, channels, 3, stride, padding=dilation, dilation=dilation, bias=False
        )
        self.norm1 = _group_norm(channels)
        self.conv2 = nn.Conv2d(
            channels, channels, 3, padding=dilation, dilation=dilation, bias=False
        )
        self.norm2 = _group_norm(channels)
        same = in_channels == channels and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, channels, H / stride, W / stride)."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class GroupNormNet(nn.Module):
    """A residual encoder with group norms, and a decoder that also sees its first stage.

    Args:
        classes: Number of classes.
    """

    def __init__(self, classes: int = 19) -> None:
        super().__init__()
        # The first stage keeps half the image's size: a pole is one pixel wide at 256x128.
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, padding=1, bias=False), _group_norm(24), nn.ReLU()
        )
        self.layer1 = nn.Sequential(ResidualBlock(24, 32))
        self.layer2 = nn.Sequential(ResidualBlock(32, 64, stride=2))
        self.layer3 = nn.Sequential(ResidualBlock(64, 96, stride=2), ResidualBlock(96, 96))
        self.layer4 = nn.Sequential(
            ResidualBlock(96, 96, dilation=2), ResidualBlock(96, 96, dilation=4)
        )
        self.narrow = nn.Sequential(nn.Conv2d(96, 48, 1, bias=False), _group_norm(48), nn.ReLU())
        self.decoder = nn.Sequential(
            nn.Conv2d(48 + 32, 48, 3, padding=1, bias=False),
            _group_norm(48),
            nn.ReLU(),
            nn.Conv2d(48, classes, 1),
        )
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes, H, W) of normalised images (B, 3, H, W)."""
        check_images(images, type(self).__name__)
        low = self.layer1(self.stem(images))
        high = self.narrow(self.layer4(self.layer3(self.layer2(low))))
        both = torch.cat([_resize(high, low.shape[2:]), low], dim=1)
        return _resize(self.decoder(both), images.shape[2:])


def _to_map(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """Tokens (B, N, C) as a map (B, C, h, w) with N = h * w."""
    return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, *size)


def _to_tokens(features: Tensor) -> Tensor:
    """A map (B, C, h, w) as tokens (B, h * w, C)."""
    return features.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Attention of every token to a map of keys and values that is ``reduction`` times smaller."""

    def __init__(self, channels: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(channels, channels)
        self.key_value = nn.Linear(channels, 2 * channels)
        self.project = nn.Linear(channels, channels)
        self.reduce: nn.Conv2d | None = None
        if reduction > 1:
            self.reduce = nn.Conv2d(channels, channels, reduction, reduction)
            self.norm = nn.LayerNorm(channels)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Map tokens (B, h * w, C) to as many; ``size`` is (h, w)."""
        seen = tokens
        if self.reduce is not None and min(size) >= self.reduce.stride[0]:
            seen = self.norm(_to_tokens(self.reduce(_to_map(tokens, size))))
        query = self._by_head(self.query(tokens))
        key, value = map(self._by_head, self.key_value(seen).chunk(2, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, C) as (B, heads, N, C / heads)."""
        batch, count, channels = tokens.shape
        return tokens.view(batch, count, self.heads, channels // self.heads).transpose(1, 2)


class MixFFN(nn.Module):
    """Two linear layers with a depthwise 3x3 convolution between, which tells tokens their place.

    Args:
        channels: Width of the tokens.
        expansion: Width inside, over that of the tokens.
    """

    def __init__(self, channels: int, expansion: int) -> None:
        super().__init__()
        width = expansion * channels
        self.widen = nn.Linear(channels, width)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.narrow = nn.Linear(width, channels)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Map tokens (B, h * w, C) to as many; ``size`` is (h, w)."""
        mixed = self.depthwise(_to_map(self.widen(tokens), size))
        out: Tensor = self.narrow(F.gelu(_to_tokens(mixed)))
        return out


class TokenBlock(nn.Module):
    """Attention and Mix-FFN, each behind a layer norm and added to what came in."""

    def __init__(self, channels: int, heads: int, reduction: int, expansion: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attention = Attention(channels, heads, reduction)
        self.norm2 = nn.LayerNorm(channels)
        self.ffn = MixFFN(channels, expansion)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Map tokens (B, h * w, C) to as many; ``size`` is (h, w)."""
        tokens = tokens + self.attention(self.norm1(tokens), size)
        out: Tensor = tokens + self.ffn(self.norm2(tokens), size)
        return out


class TokenStage(nn.Module):
    """Overlapping patches of a map as tokens, blocks over these, and a map again.

    Args:
        in_channels, channels: Channel counts.
        kernel, stride: Size and distance of the patches.
        blocks, heads, reduction, expansion: Of the attention and the Mix-FFN.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        kernel: int,
        stride: int,
        blocks: int,
        heads: int,
        reduction: int,
        expansion: int = 4,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2)
        self.embed_norm = nn.LayerNorm(channels)
        self.blocks = nn.ModuleList(
            TokenBlock(channels, heads, reduction, expansion) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, channels, H / stride, W / stride)."""
        patches = self.embed(x)
        size = (patches.shape[2], patches.shape[3])
        tokens = self.embed_norm(_to_tokens(patches))
        for block in self.blocks:
            tokens = block(tokens, size)
        return _to_map(self.norm(tokens), size)


class TokenNet(nn.Module):
    """Four stages of tokens, and a decoder of linear layers over all four.

    Args:
        classes: Number of classes.
    """

    WIDTH = 64

    def __init__(self, classes: int = 19) -> None:
        super().__init__()
        self.stage1 = TokenStage(3, 32, kernel=7, stride=4, blocks=2, heads=1, reduction=4)
        self.stage2 = TokenStage(32, 64, kernel=3, stride=2, blocks=2, heads=2, reduction=2)
        self.stage3 = TokenStage(64, 96, kernel=3, stride=2, blocks=2, heads=3, reduction=1)
        self.stage4 = TokenStage(96, 128, kernel=3, stride=2, blocks=1, heads=4, reduction=1)
        # A linear layer over the channels of a map is a 1x1 convolution.
        self.same_width = nn.ModuleList(nn.Conv2d(c, self.WIDTH, 1) for c in (32, 64, 96, 128))
        self.decoder = nn.Sequential(
            nn.Conv2d(4 * self.WIDTH, self.WIDTH, 1), nn.ReLU(), nn.Conv2d(self.WIDTH, classes, 1)
        )
        self.apply(_draw)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes, H, W) of normalised images (B, 3, H, W)."""
        check_images(images, type(self).__name__)
        maps = [self.stage1(images)]
        for stage in (self.stage2, self.stage3, self.stage4):
            maps.append(stage(maps[-1]))
        finest = maps[0].shape[2:]
        alike = [
            _resize(narrow(x), finest) for narrow, x in zip(self.same_width, maps, strict=True)
        ]
        return _resize(self.decoder(torch.cat(alike, dim=1)), images.shape[2:])


def _draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


class Lion(torch.optim.Optimizer):
    """Steps of one size along the sign of an averaged gradient (Chen et al., 2023).

    Choice: this and not AdamW, which token networks are usually trained with: its one average per
    parameter is what the checkpoints of `Training` hold.

    Args:
        parameters: Parameter groups with ``lr`` and ``weight_decay``.
        betas: How much of the average stays: in the direction of a step, and from step to step.
    """

    def __init__(self, parameters: Iterable[Any], betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": 0.0, "weight_decay": 0.0})
        self.betas = betas

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        now, later = self.betas
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                direction = torch.lerp(parameter.grad, average, now).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(direction, alpha=group["lr"])
                average.lerp_(parameter.grad, 1 - later)


class LionTraining(Training):
    """A training that steps by `Lion`."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__(recipe, folder)
        read = self.optimiser.state
        # Its type is that of the library's own optimiser, of which only this much is used.
        self.optimiser = cast(torch.optim.SGD, Lion(self.optimiser.param_groups))
        self.optimiser.state.update(read)


NETWORKS.update({"GroupNormNet": GroupNormNet, "TokenNet": TokenNet})

STREETS = recipes()["streets"]
GROUPNORM = replace(
    STREETS,
    name="groupnorm",
    about="residual network with group norms, rendered streets at 256x128, 19 classes (12 occur)",
    network="GroupNormNet",
    arguments={"classes": 19},
    layers=("layer1", "layer2", "layer3", "layer4"),
    default_layers=("layer1",),
    form_layers={"paper": ("layer1",), "single": ("layer1",)},
    epochs=8,
)
TOKENS = replace(
    STREETS,
    name="tokens",
    about="transformer with layer norms, rendered streets at 256x128, 19 classes (12 occur)",
    network="TokenNet",
    arguments={"classes": 19},
    notes=("Trained with Lion: momentum and Nesterov's step are not used.",),
    lr=7e-4,
    weight_decay=0.1,
    layers=("stage1", "stage2", "stage3", "stage4"),
    default_layers=("stage1",),
    form_layers={"paper": ("stage1",), "single": ("stage1",)},
)
TRAININGS: dict[str, tuple[Recipe, Callable[[Recipe, Path], Training]]] = {
    "groupnorm": (GROUPNORM, Training),
    "tokens": (TOKENS, LionTraining),
}


def load(name: str, folder: Path) -> tuple[nn.Module, Card]:
    """A trained network in eval mode, and its card: ``normalise``, ``size``, ``classes``, ``task``.

    Args:
        name: ``"groupnorm"`` or ``"tokens"``.
        folder: What the script was given as ``--out``.
    """
    _check(name)
    place = folder / name
    if not published(place):
        raise FileNotFoundError(
            f"no trained network in {place}. "
            f"Make it with: python benchmarks/other_models.py --out {folder} --only {name}"
        )
    return cards.load(place), cards.card(place)


def train(name: str, folder: Path) -> Card | None:
    """Train a network to its end, from where it was; its card, or None if it was interrupted."""
    _check(name)
    recipe, kind = TRAININGS[name]
    place = folder / name
    if published(place):
        return cards.card(place)
    training = kind(recipe, place)
    print(f"{name}: {recipe.about}; {training.steps:,} steps, after step {training.step:,}")
    if not training.run(checkpoint_every=_CHECKPOINT_EVERY):
        return None
    return publish(training, command=f"python benchmarks/other_models.py --only {name}")


def _check(name: str) -> None:
    if name not in TRAININGS:
        raise ValueError(f"no network is called {name!r}. There are: {', '.join(TRAININGS)}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/other-models"))
    parser.add_argument("--only", choices=sorted(TRAININGS), help="one of the two")
    chosen = parser.parse_args()
    for name in [chosen.only] if chosen.only else TRAININGS:
        card = train(name, chosen.out)
        if card is None:
            print("Stopped. The same command goes on from there.")
            return 130
        print(
            f"{name}: {card.metric} {card.scores['clean']:.2f} % on the clean test images, "
            f"{card.parameters:,} parameters, {card.history['seconds']:.0f} s of training, "
            f"in {chosen.out / name}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
