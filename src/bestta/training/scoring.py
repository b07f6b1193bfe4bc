"""Score a network over samples, batch by batch, as it is used: in eval mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bestta.data.samples import Pixels, Sample
from bestta.data.tensors import Normalisation
from bestta.metrics import Metric, metric_for
from bestta.progress import Progress
from bestta.protocols import Frame

Precision = Literal["bf16", "fp32"]

_BATCH = {"classification": 100, "segmentation": 4}

Labelled = TypeVar("Labelled", bound=Sample | Frame)


class Scored(Protocol):
    """What is scored: a `Recipe` or a `Card`."""

    @property
    def task(self) -> str: ...  # noqa: D102
    @property
    def classes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def normalise(self) -> Normalisation: ...  # noqa: D102


@torch.no_grad()
def score(
    model: nn.Module,
    samples: Iterable[Sample] | Iterable[Frame],
    what: Scored,
    *,
    precision: Precision = "fp32",
    progress: Progress | None = None,
) -> Metric:
    """The metric of ``model`` over labelled samples, in eval mode; its mode is put back.

    Args:
        model: Takes images as ``what`` normalises them.
        samples: Anything with ``image`` and ``label``.
        what: Task, classes and normalisation.
        precision: ``"fp32"``, or ``"bf16"`` where that is safe: two to three times as fast.
        progress: Advanced by each sample.
    """
    was_training = model.training
    model.eval()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        metric: Metric = metric_for(what.task, len(what.classes))
        scored = 0
        for batch in batched(samples, _BATCH[what.task]):
            inputs = normalised(np.stack([sample.image for sample in batch]), what.normalise)
            labels = np.stack([np.asarray(sample.label) for sample in batch])
            inputs = inputs.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(inputs)
            metric.add(logits.float().cpu(), torch.from_numpy(labels))
            scored += len(batch)
            if progress is not None:
                progress.advance(len(batch))
        if not scored:
            raise ValueError("nothing to score: no image that can be read and has a label.")
    finally:
        model.train(was_training)
    return metric


def normalised(images: Pixels, normalise: Normalisation) -> Tensor:
    """Images (B, H, W, 3) in bytes as a network wants them: (B, 3, H, W), channels last."""
    mean, deviation = (torch.tensor(values, dtype=torch.float32) for values in normalise)
    scaled = torch.from_numpy(images).float().div_(255).sub_(mean).div_(deviation)
    return scaled.permute(0, 3, 1, 2)


def batched(samples: Iterable[Labelled], size: int) -> Iterator[list[Labelled]]:
    """Samples in lists of ``size`` at most, each of images of one size.

    A sample without a label is left out, with a warning that names it.
    """
    batch: list[Labelled] = []
    for sample in samples:
        if sample.label is None:
            warnings.warn(f"skipped {sample.name}: no label to score it by", stacklevel=2)
            continue
        if batch and (len(batch) == size or batch[0].image.shape != sample.image.shape):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
