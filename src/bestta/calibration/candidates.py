"""Which layers of a model are worth trying: stages first, then what lies inside them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from bestta.bein import channel_axis
from bestta.insertion import (
    FeatureFunction,
    check_batch,
    check_model,
    check_ran_once,
    find_module,
    inserted,
    layers,
)
from bestta.outputs import OutputKey, select_logits

LEAST_POSITIONS = 16
"""Over fewer positions the statistics of one image are mostly chance."""

ENOUGH = 4
"""With fewer stages and blocks than this, single operations are tried as well."""


@dataclass(frozen=True)
class Candidate:
    """A layer that BeIN could be put behind."""

    name: str
    channels: int
    positions: int
    """Over how many positions the statistics of one image are taken."""
    depth: float
    """The share of the model's modules that had run when this one was done, 0 to 1."""
    level: int
    """0 for a stage, which lies inside no other candidate; 1 for what lies in one; and so on."""


def candidates(
    model: nn.Module, image: Tensor, most: int = 24, output: OutputKey = None
) -> list[Candidate]:
    """The layers of ``model`` that are worth trying, in the order they run.

    Modules that run once and return features of several positions, one name for each place: of a
    stage and its last block, which return the same tensor, the stage. Neither the logits nor what
    already has their channels at the model's end. Where there are more than ``most``, stages
    before blocks, and these spread over the model.

    Args:
        model: Any model in eval mode.
        image: An example input, (B, C, H, W).
        most: How many at most.
        output: Where the model keeps its logits, if it is not plain.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
        >>> [found.name for found in candidates(model, torch.zeros(1, 3, 8, 8))]
        ['0', '1']
    """
    check_model(model)
    seen = _seen(model, image, output)
    blocks = [n for n in seen if _has_children(model, n)]
    chosen = [n for n in seen if n in blocks or len(blocks) < ENOUGH or _beside(n, blocks)]
    levels = {name: _level(name, chosen) for name in chosen}
    kept: list[str] = []
    for level in sorted(set(levels.values())):
        here = [name for name in chosen if levels[name] == level]
        kept += spread(here, max(most - len(kept), 0))
    return [
        Candidate(name, *seen[name], level=levels[name]) for name in chosen if name in set(kept)
    ]


def named(model: nn.Module, image: Tensor, names: Sequence[str]) -> list[Candidate]:
    """The layers called ``names``, in the order they run; a ValueError if one cannot be used."""
    for name in names:
        find_module(model, name)
    done: dict[str, tuple[int, int]] = {}

    def look(name: str) -> FeatureFunction:
        def see(features: Tensor) -> None:
            check_batch(features, image, name)
            channels = features.shape[channel_axis(features)]
            done[name] = channels, features.numel() // (features.shape[0] * channels)

        return see

    with torch.no_grad(), inserted(model, {n: look(n) for n in names}) as runs:
        model(image)
    check_ran_once(runs, names, model)
    return [
        Candidate(name, *done[name], depth=(n + 1) / len(done), level=0)
        for n, name in enumerate(done)
    ]


def _seen(model: nn.Module, image: Tensor, output: OutputKey) -> dict[str, tuple[int, int, float]]:
    """Channels, positions and depth of every place there is, in the order they run."""
    names = layers(model, leaves=True)
    done: list[tuple[str, int, int]] = []
    """Name, channels and positions of what has run."""
    holders: list[weakref.ref[Tensor]] = []

    def look(name: str) -> FeatureFunction:
        def see(features: Tensor) -> None:
            holders.append(weakref.ref(features))
            done.append((name, 0, 0))
            check_batch(features, image, name)
            channels = features.shape[channel_axis(features)]
            positions = features.numel() // (features.shape[0] * channels)
            done[-1] = name, channels, positions
            for before in range(len(done) - 1):
                # The same tensor under another name: a stage and its last block, a ReLU in place.
                if holders[before]() is features and done[before][1]:
                    shorter = done[before][0].count(".") < name.count(".")
                    place = len(done) - 1 if shorter else before
                    done[place] = done[place][0], 0, 0

        return see

    with torch.no_grad(), inserted(model, {n: look(n) for n in names}, lenient=True) as runs:
        logits = select_logits(model(image), output)
    total = max(len(done), 1)
    classes = logits.shape[1]
    found = {
        name: (channels, positions, (n + 1) / total)
        for n, (name, channels, positions) in enumerate(done)
        if positions >= LEAST_POSITIONS and runs[name] == 1
    }
    for name in reversed(list(found)):
        if found[name][0] != classes:
            break
        del found[name]
    for (before, *_), (name, *_) in pairwise(done):
        if name in found and before in found and _same_to_bein(model, before, name):
            del found[name]
    return found


def _same_to_bein(model: nn.Module, before: str, name: str) -> bool:
    """Whether ``name`` is the batch norm of ``before``.

    At rest it is one affine map per channel: BeIN behind it does what it does before it.
    """
    norm = isinstance(find_module(model, name), nn.modules.batchnorm._BatchNorm)
    return norm and before.rpartition(".")[0] == name.rpartition(".")[0]


def _has_children(model: nn.Module, name: str) -> bool:
    return any(True for _ in find_module(model, name).children())


def _beside(name: str, blocks: Sequence[str]) -> bool:
    """Whether a single operation stands beside stages, as the first convolution does."""
    parent = name.rpartition(".")[0]
    least = min(block.count(".") for block in blocks)
    return name.count(".") <= least + 1 and any(b.rpartition(".")[0] == parent for b in blocks)


def _level(name: str, among: Sequence[str]) -> int:
    return sum(name.startswith(f"{other}.") for other in among)


def spread(items: Sequence[str], most: int) -> list[str]:
    """At most ``most`` of ``items``, as evenly spread as can be, in their order.

    >>> spread(["a", "b", "c", "d", "e"], 3)
    ['a', 'c', 'e']
    """
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[:most])
    step = (len(items) - 1) / (most - 1)
    return [items[round(n * step)] for n in range(most)]
