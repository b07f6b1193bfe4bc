"""RoTTA: a student taught from a memory of balanced classes (Yuan, Xie and Li, 2023).

"Robust Test-Time Adaptation in Dynamic Scenarios". A stream rarely brings its classes evenly mixed.
So images are collected in a small memory that holds the predicted classes in balance, and prefers
images that are recent and were predicted with certainty. After every 64 images the student learns
from that memory: strongly augmented, it is to predict what the teacher predicts of the images as
they are, and an item counts less the older it is. The weights and biases of batch norms learn. The
teacher follows the student slowly, and predicts. Each has batch-norm statistics of its own, which
move a little towards the memory's at every update, and are what is normalised by.

Deviations: layers other than batch norms stay in eval mode in an update (published: in training
mode, which differs where there is dropout). The entropy is exact, without the published 1e-6 in its
logarithm. An update that leaves anything not finite is undone and the memory emptied: one absurd
image in it would otherwise spoil every update to come.
Choice: where a batch norm sees one value per channel (a memory of one image, pooled to a vector),
its running statistics stay where they are.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bestta.adapters.augment import Normalisation, augment, check_normalise
from bestta.adapters.base import Adapter, AdapterConfig, StepReport, check_shapes, is_finite
from bestta.adapters.batchnorm import (
    AdaptiveNorm,
    batch_norm_weights,
    replace_norms,
    values_per_channel,
)
from bestta.adapters.network import Network, assign, follow, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import at_least_one, fraction, not_negative, within
from bestta.losses import cross_entropy, entropy
from bestta.moments import moments


@dataclass(frozen=True, kw_only=True)
class RottaConfig(AdapterConfig):
    """Settings of RoTTA: the published ones."""

    lr: float = 1e-3
    """Step size of Adam."""
    beta1: float = 0.9
    beta2: float = 0.999
    """Decays of Adam's moments."""
    capacity: int = 64
    """How many images the memory holds."""
    update_every: int = 64
    """An update after every so many images."""
    momentum: float = 0.05
    """α: weight of the memory in the running statistics, at each update."""
    teacher_rate: float = 1e-3
    """ν: how far the teacher goes towards the student, at each update."""
    lambda_t: float = 1.0
    """Weight of age in the score by which an item is dropped."""
    lambda_u: float = 1.0
    """Weight of uncertainty in it."""
    normalise: Normalisation | None = None
    """What turned pixels in [0, 1] into images, for the augmentation: see `augment`."""

    def __post_init__(self) -> None:
        not_negative(self, "lr", "lambda_t", "lambda_u")
        within(self, 0, 1, "beta1", "beta2")
        at_least_one(self, "capacity", "update_every")
        fraction(self, "momentum", "teacher_rate")
        check_normalise(self.normalise)


# --- robust batch normalisation ---------------------------------------------------------------


class RobustNorm(AdaptiveNorm):
    """Normalises by running statistics of its own, which move only while it is ``learning``."""

    learns_through_statistics = True

    def __init__(self, norm: _BatchNorm, momentum: float) -> None:
        super().__init__(norm)
        self.momentum, self.learning = momentum, False
        # In fp32 at least: a twentieth of a small difference is lost in half precision.
        self.running = None if self.source is None else tuple(_wide_copy(s) for s in self.source)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The running mean and variance; first moved towards those of ``x`` while learning.

        Gradients flow through the share that ``x`` has in them.
        """
        if self.running is None:
            return None if values_per_channel(x) > 1 else moments(x)
        mean, variance = self.running
        if self.learning and values_per_channel(x) > 1:
            now_mean, now_variance = (now.to(mean.dtype) for now in moments(x))
            mean = mean.lerp(now_mean, self.momentum)
            variance = variance.lerp(now_variance, self.momentum)
            self.running[0].copy_(mean.detach())
            self.running[1].copy_(variance.detach())
        return mean, variance


class Role:
    """A network with batch-norm statistics of its own: the student's, or the teacher's."""

    def __init__(self, model: nn.Module, config: RottaConfig) -> None:
        self.network = Network(model, config.output)
        self.norms = replace_norms(self.network, lambda norm: RobustNorm(norm, config.momentum))

    def predict(self, image: Tensor, weights: Mapping[str, Tensor], learning: bool) -> Tensor:
        """The logits of ``image``; while ``learning``, the statistics move towards its own."""
        try:
            for norm in self.norms.values():
                norm.learning = learning
            return self.network(image, weights)
        finally:
            for norm in self.norms.values():
                norm.learning = False

    def tensors(self) -> dict[str, Tensor]:
        """The running statistics, by name of the batch norm."""
        return {
            f"{name}/{kind}": value
            for name, norm in self.norms.items()
            if norm.running is not None
            for kind, value in zip(("mean", "variance"), norm.running, strict=True)
        }


# --- the memory -------------------------------------------------------------------------------


@dataclass
class Item:
    """An image that is remembered."""

    image: Tensor
    """(C, H, W)."""
    label: int
    """The class the teacher predicted when it came."""
    uncertainty: float
    """The entropy of that prediction."""
    age: int = 0
    """How many images have come since, itself included."""


class Memory:
    """Category-balanced sampling with timeliness and uncertainty: which images are worth keeping.

    Each of K classes has a share of ``capacity / K``. An image of a class that has less than its
    share takes a free place or, if there is none, that of an item of the classes that hold most;
    one of a class that has its share, that of an item of its own class. The item with the highest
    score goes, and only if it scores higher than the newcomer: the old and uncertain go first.
    """

    def __init__(self, capacity: int, lambda_t: float, lambda_u: float) -> None:
        self.capacity, self.lambda_t, self.lambda_u = capacity, lambda_t, lambda_u
        self.items: list[Item] = []
        """Class by class, within a class in the order they came."""

    def add(self, item: Item, classes: int) -> None:
        """Take in ``item``, or refuse it; either way everything grows older by one."""
        if self._make_room(item, classes):
            insort(self.items, item, key=lambda kept: kept.label)
        for kept in self.items:
            kept.age += 1

    def _make_room(self, newcomer: Item, classes: int) -> bool:
        held = Counter(item.label for item in self.items)
        if held[newcomer.label] >= self.capacity / classes:
            candidates = [item for item in self.items if item.label == newcomer.label]
        elif len(self.items) < self.capacity:
            return True
        else:
            most = max(held.values())
            candidates = [item for item in self.items if held[item.label] == most]
        # Of equal scores the last one, as published.
        worst = max(reversed(candidates), key=lambda item: self.score(item, classes))
        if self.score(worst, classes) <= self.score(newcomer, classes):
            return False
        self.items = [item for item in self.items if item is not worst]
        return True

    def score(self, item: Item, classes: int) -> float:
        """How little an item is worth: ``λ_t / (1 + exp(−age / capacity)) + λ_u · H / ln K``."""
        timeliness = 1 / (1 + math.exp(-item.age / self.capacity))
        # A model of one class is never uncertain, and ln 1 is nothing to divide by.
        uncertainty = item.uncertainty / math.log(max(classes, 2))
        return self.lambda_t * timeliness + self.lambda_u * uncertainty

    def importance(self) -> Tensor:
        """Weight of items in the loss, (N,): ``exp(−a) / (1 + exp(−a))``, a = age / capacity."""
        return torch.sigmoid(-torch.tensor([item.age / self.capacity for item in self.items]))

    def images(self) -> Tensor:
        """All images, (N, C, H, W)."""
        return torch.stack([item.image for item in self.items])

    def state(self) -> dict[str, Tensor]:
        """A copy, as tensors; nothing while it is empty."""
        if not self.items:
            return {}
        return {
            "images": self.images(),
            "labels": torch.tensor([item.label for item in self.items]),
            "ages": torch.tensor([item.age for item in self.items]),
            "uncertainties": torch.tensor(
                [item.uncertainty for item in self.items], dtype=torch.float64
            ),
        }

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Take over (a copy of) what `state` returned."""
        self.items = []
        if state:
            images = state["images"].to(device, copy=True)
            numbers = (state[name].tolist() for name in ("labels", "uncertainties", "ages"))
            self.items = [Item(*values) for values in zip(images, *numbers, strict=True)]

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ValueError unless ``state`` is one of such a memory."""
        if not state:
            return
        count = state["labels"].numel() if "labels" in state else 0
        images = state.get("images", torch.empty(0))
        check_shapes(
            {f"memory/{name}": value for name, value in state.items()},
            {
                "memory/images": torch.Size((count, *images.shape[1:])),
                **{f"memory/{n}": torch.Size([count]) for n in ("labels", "ages", "uncertainties")},
            },
        )
        labels = state["labels"]
        kinds = [labels.dtype, state["ages"].dtype] == [torch.int64] * 2
        kinds = kinds and images.is_floating_point() and state["uncertainties"].is_floating_point()
        ordered = kinds and bool((labels.diff() >= 0).all())
        if not (ordered and images.dim() == 4 and 0 < count <= self.capacity):
            raise ValueError(
                f"this state does not fit the adapter: its memory, {count} images of shape "
                f"{tuple(images.shape[1:])}, is not one of up to {self.capacity} images by class."
            )


# --- the method -------------------------------------------------------------------------------


@register_adapter("rotta")
class Rotta(Adapter):
    """A student of batch-norm weights and biases, a teacher that predicts, and a memory."""

    Config = RottaConfig
    config: RottaConfig
    tasks = ("classification",)
    why_not = (
        "its memory holds whole images by predicted class, which an image of many classes does not "
        "have, and 64 images of 1920x1080 are 1.6 GB in fp32."
    )
    state_settings = ("capacity",)

    def prepare(self) -> None:
        """Two networks with batch norms that learn, the weights of each, and an empty memory."""
        names = batch_norm_weights(self.model, self.name)
        config = self.config
        self.student, self.teacher = Role(self.model, config), Role(self.model, config)
        self.weights = self.student.network.weights(names)
        self.teacher_weights = {name: self.teacher.network.copy_of(name) for name in names}
        self.optimiser = Optimiser.adam(self.weights, config.lr, (config.beta1, config.beta2))
        self.memory = Memory(config.capacity, config.lambda_t, config.lambda_u)
        self.collected = torch.tensor(0)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The student's weight and bias of every batch norm."""
        return self.weights

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict by the teacher; remember image by image, and learn when it is time."""
        self.check_size(image)
        with torch.no_grad():
            logits = self.teacher.predict(image, self.teacher_weights, learning=False)
        if logits.dim() != 2:
            raise ValueError(
                f"method {self.name!r} is defined for logits (B, K), not for "
                f"{tuple(logits.shape)}: {self.why_not}"
            )
        every, losses, reason = self.config.update_every, [], ""
        uncertainty, labels = entropy(logits).tolist(), logits.argmax(1).tolist()
        for single, label, doubt in zip(image.detach(), labels, uncertainty, strict=True):
            self.memory.add(Item(single.clone(), label, doubt), classes=logits.shape[1])
            self.collected += 1
            if self.collected % every == 0:
                loss = self.update()
                if loss is None:
                    reason = "the update was not finite; it was undone and the memory emptied"
                else:
                    losses.append(loss)
        if losses:
            average = sum(losses) / len(losses)
            return logits, StepReport(adapted=True, losses={"cross_entropy": average})
        done = self.collected.item() % every
        reason = reason or f"collecting: {done} of {every} images until the next update"
        return logits, StepReport(reason=reason)

    def check_size(self, image: Tensor) -> None:
        """Raise a ValueError unless ``image`` has the size of the images in the memory."""
        held = self.memory.items[0].image.shape if self.memory.items else image.shape[1:]
        if image.shape[1:] != held:
            raise ValueError(
                f"the memory holds images of shape {tuple(held)}, which are learned from as one "
                f"batch; these have shape {tuple(image.shape[1:])}. Give all images one size, or "
                "reset() in between."
            )

    def update(self) -> float | None:
        """Teach the student from the memory, and let the teacher follow; None if it failed."""
        before = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        images = self.memory.images()
        strong = augment(images, self.generator, self.config.normalise)
        with torch.no_grad():
            target = self.teacher.predict(images, self.teacher_weights, learning=True)
        logits = self.student.predict(strong, self.weights, learning=True)
        loss = (self.memory.importance().to(self.device) * cross_entropy(logits, target)).mean()
        self.optimiser.step(gradients(loss, self.weights))
        follow(self.teacher_weights, self.weights, decay=1 - self.config.teacher_rate)
        if not is_finite(loss, *self.tensors().values()):
            assign(self.tensors(), before)
            self.memory.items.clear()
            return None
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and statistics of both, and Adam's moments."""
        groups: dict[str, Mapping[str, Tensor]] = {
            "student": {**self.weights, **self.student.tensors()},
            "teacher": {**self.teacher_weights, **self.teacher.tensors()},
            "optimiser": self.optimiser.tensors(),
        }
        return {
            f"{group}/{n}": tensor for group, found in groups.items() for n, tensor in found.items()
        }

    def state(self) -> dict[str, Tensor]:
        """A copy of these, of the memory, and of how many images were collected."""
        memory = {f"memory/{name}": value for name, value in self.memory.state().items()}
        return {**super().state(), "collected": self.collected.clone(), **memory}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over (a copy of) what `state` returned."""
        super().restore(state)
        self.collected = state["collected"].clone()
        self.memory.restore(_memory_of(state), self.device)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ValueError if a state from outside does not fit."""
        super().check_state(state)
        memory = _memory_of(state)
        needed = {name: tensor.shape for name, tensor in self.tensors().items()}
        check_shapes(
            {name: value for name, value in state.items() if not name.startswith("memory/")},
            {**needed, "collected": torch.Size([])},
        )
        if state["collected"].dtype != torch.int64:
            raise ValueError("this state does not fit the adapter: collected is no whole number.")
        self.memory.check(memory)


def _memory_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = "memory/"
    return {n.removeprefix(start): value for n, value in state.items() if n.startswith(start)}


def _wide_copy(statistic: Tensor) -> Tensor:
    return statistic.to(torch.promote_types(statistic.dtype, torch.float32), copy=True)
