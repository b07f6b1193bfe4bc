"""Scores of a block of images: mean IoU of segmentation, error of classification."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

IGNORED = 255
"""The label of pixels that count neither for nor against."""


class Metric(ABC):
    """Counts that add up: over images, over processes, over sessions.

    Attributes:
        name: What the score is called in tables.
        higher_is_better: Which way is up.
        counts: All that is known so far; ``a.counts + b.counts`` is the metric of both.
    """

    name: str
    higher_is_better: bool
    counts: Tensor

    @abstractmethod
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (B, K, ...) and class ids (B, ...), 255 ignored."""

    @abstractmethod
    def score(self) -> float:
        """The score in percent; not a number before anything was counted."""


class MeanIoU(Metric):
    """Mean intersection over union, from one confusion matrix summed over all images.

    The mean is over the classes that occur, in the labels or among the predictions: a class that
    is neither there nor seen says nothing. An average of each image's own score is another thing.

    >>> metric = MeanIoU(classes=3)
    >>> logits = torch.tensor([[[[9.0, 9.0, 0.0, 0.0]], [[0.0, 0.0, 9.0, 9.0]], [[0.0] * 4]]])
    >>> metric.add(logits, torch.tensor([[[0, 1, 1, 255]]]))
    >>> metric.per_class()
    [50.0, 50.0, None]
    """

    name, higher_is_better = "mIoU", True

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)
        """Pixels by (class in the label, class predicted)."""

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count the pixels of a batch: logits (B, K, H, W), labels (B, H, W)."""
        _check(logits, labels, self.classes)
        self.add_predictions(logits.argmax(1), labels)

    def add_predictions(self, predicted: Tensor, labels: Tensor) -> None:
        """Count pixels by the classes predicted for them, both (B, H, W)."""
        counted = _counted(labels, self.classes)
        truth, predicted = labels[counted].long(), predicted[counted].long()
        _check_ids(truth, self.classes, "label")
        _check_ids(predicted, self.classes, "prediction")
        pairs = torch.bincount(truth * self.classes + predicted, minlength=self.classes**2)
        self.counts += pairs.view(self.classes, self.classes).to(self.counts.device)

    def per_class(self) -> list[float | None]:
        """IoU of each class in percent; None for a class that is neither labelled nor predicted."""
        hit = self.counts.diagonal().double()
        union = self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal()
        return [100 * float(h) / float(u) if u else None for h, u in zip(hit, union, strict=True)]

    def score(self, only: Sequence[int] | None = None) -> float:
        """Mean IoU in percent, over the classes that occur; of these, ``only`` some if given."""
        ious = self.per_class()
        chosen = range(self.classes) if only is None else only
        seen = [iou for c in chosen if (iou := ious[c]) is not None]
        return sum(seen) / len(seen) if seen else float("nan")

    def pixel_accuracy(self) -> float:
        """Share of pixels with the right class, in percent."""
        total = int(self.counts.sum())
        return 100 * float(self.counts.diagonal().sum()) / total if total else float("nan")


class Errors(Metric):
    """Share of images with the wrong class.

    >>> metric = Errors()
    >>> metric.add(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    >>> metric.score()
    25.0
    """

    name, higher_is_better = "error", False

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64)
        """Images that were wrong, and all."""

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch of images: logits (B, K), labels (B,)."""
        if logits.ndim != 2:
            raise ValueError(f"an error is counted of logits (B, K); got {tuple(logits.shape)}.")
        _check(logits, labels, logits.shape[1])
        counted = _counted(labels, logits.shape[1])
        _check_ids(labels[counted], logits.shape[1], "label")
        wrong = (logits.argmax(1) != labels) & counted
        self.counts += torch.stack([wrong.sum(), counted.sum()]).to(self.counts.device)

    def score(self) -> float:
        """Error in percent."""
        wrong, total = self.counts.tolist()
        return 100 * wrong / total if total else float("nan")


def metric_for(task: str, classes: int) -> Metric:
    """The metric of ``"classification"`` or ``"segmentation"``, with nothing counted."""
    if task == "classification":
        return Errors()
    if task == "segmentation":
        return MeanIoU(classes)
    raise ValueError(f"no metric for {task!r}; tasks: classification, segmentation.")


def _counted(labels: Tensor, classes: int) -> Tensor:
    """Which labels count; among more than 255 classes, 255 is one of them."""
    return labels != IGNORED if classes <= IGNORED else torch.ones_like(labels, dtype=torch.bool)


def _check_ids(ids: Tensor, classes: int, what: str) -> None:
    if not ids.numel():
        return
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < classes:
            raise ValueError(
                f"a {what} says class {extreme}; there are {classes} classes, "
                f"0 to {classes - 1}, and {IGNORED} for ignored."
            )


def _check(logits: Tensor, labels: Tensor, classes: int) -> None:
    expected = (logits.shape[0], *logits.shape[2:])
    if logits.ndim < 2 or logits.shape[1] != classes or tuple(labels.shape) != expected:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not go with labels {tuple(labels.shape)}: "
            f"expected (B, {classes}, ...) and (B, ...)."
        )
