"""Trainings of a second: small recipes, and images that are held in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from bestta.data import ImageSet, Streets
from bestta.data.samples import Sample, UnreadableImage
from bestta.data.tensors import CIFAR10
from bestta.models import Card
from bestta.training import Augment, Recipe, recipes
from bestta.training.recipes import Kept, Splits


class Colours(ImageSet):
    """Noise in which one of three colours is stronger than the others: which one, is the class.

    Args:
        count: How many images.
        seed: Another seed is another set; it is part of the names.
        broken: Numbers of the images that cannot be read.
    """

    kind = "colours"
    classes = ("red", "green", "blue")

    def __init__(self, count: int, seed: int = 0, broken: Collection[int] = ()) -> None:
        super().__init__()
        self.count, self.seed, self.broken = count, seed, broken

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"colours/{self.seed}/{index:03}"

    def read(self, index: int) -> Sample:
        if index in self.broken:
            raise UnreadableImage(f"{self.name(index)}: cut short")
        image = np.random.default_rng([self.seed, index]).integers(0, 156, (32, 32, 3))
        image[:, :, index % 3] += 100
        return Sample(self.name(index), image.astype(np.uint8), index % 3)


def colours(train: ImageSet | None = None, **changes: Any) -> Recipe:
    """A classifier of `Colours`, with dropout; ``changes`` are fields of the recipe."""
    train = train if train is not None else Colours(16)
    settings: dict[str, Any] = {
        "name": "colours",
        "about": "WideResNet-10-1, squares of noise at 32x32, 3 classes",
        "network": "WideResNet",
        "arguments": {"depth": 10, "width": 1, "classes": 3, "dropout": 0.2},
        "task": "classification",
        "classes": Colours.classes,
        "splits": lambda root: Splits(train, Colours(6, seed=1), Colours(9, seed=2)),
        "needs_data": False,
        "data": "Squares of coloured noise, drawn as they are needed",
        "terms": "Apache-2.0, as the library: it has seen nothing but noise.",
        "notes": ("Scores of coloured noise say nothing of photographs.",),
        "size": (32, 32),
        "normalise": CIFAR10,
        "augment": Augment(crop=(32, 32), margin=2),
        "epochs": 2,
        "batch": 4,
        "lr": 0.05,
        "weight_decay": 5e-4,
        "warmup": 0.15,
        "layers": ("conv1", "block1", "block2"),
        "default_layers": ("block1",),
    }
    return Recipe(**settings | changes)


STREET = (64, 32)


@cache
def scenes(count: int, split: str, seed: int = 0) -> ImageSet:
    """Rendered streets of 64x32 pixels: rendering is the slow part, so once a session."""
    return Kept(Streets(count, size=STREET, split=split, seed=seed))


def streets(**changes: Any) -> Recipe:
    """The recipe of the shipped streets, small: dropout, class weights and a loss of stride 2."""
    settings: dict[str, Any] = {
        "epochs": 2,
        "batch": 4,
        "size": STREET,
        "augment": Augment(crop=STREET, scale=(1.0, 1.25), jitter=0.1),
        "splits": lambda root: Splits(scenes(8, "train"), scenes(2, "val", 1), scenes(2, "val", 0)),
    }
    return replace(recipes()["streets"], **settings | changes)


def card(**changes: Any) -> Card:
    """A card of `colours` as no training has written it; ``changes`` are its fields."""
    recipe = colours()
    settings: dict[str, Any] = {
        "name": recipe.name,
        "about": recipe.about,
        "network": recipe.network,
        "arguments": dict(recipe.arguments),
        "task": recipe.task,
        "classes": recipe.classes,
        "normalise": recipe.normalise,
        "size": recipe.size,
        "layers": recipe.layers,
        "parameters": 77_000,
        "data": recipe.data,
        "terms": recipe.terms,
        "command": "bestta train colours",
        "recipe": recipe.settings(),
        "metric": "error",
        "sha256": {"weights.safetensors": "0" * 64},
    }
    return Card(**settings | changes)
