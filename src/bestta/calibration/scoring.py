"""What settings are worth: gains over the source model, and how far chance could move them.

Counts are kept per frame. A score is that of their sum over the frames of a condition; the frames
drawn anew, with replacement, show how much of it is chance. All settings are scored on the same
draws, so that two of them are compared frame by frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bestta.adapters.preparation import IGNORED
from bestta.calibration.conditions import drawing
from bestta.outputs import Task

Numbers = np.ndarray[Any, np.dtype[Any]]
Counts = Mapping[str, Sequence[Numbers]]
"""By condition, for each of its frames what `count` returned."""

RESAMPLES = 200
SMALLEST_SHARE = 1 / 2000
"""Choice: a class with fewer of the pixels says more about chance than about a setting."""

LEAST_MARGIN = 0.1
"""In points: a smaller gain is none, however sure."""
DEAR_MARGIN = 0.5
"""The same of what needs a backward pass, which makes a frame cost up to twice as much."""


def count(task: Task, predicted: Tensor, target: Tensor, classes: int) -> Numbers:
    """Right, wanted and predicted, by class, of one frame: (3, K).

    Args:
        task: Of classification only whether it is right counts, and K is 1.
        predicted: Classes (H, W), or one.
        target: The same; 255 is left out.
        classes: How many there are.
    """
    if task == "classification":
        return np.array([[int(predicted == target)], [1], [1]])
    counted = target != IGNORED if classes <= IGNORED else torch.ones_like(target, dtype=torch.bool)
    target, predicted = target[counted].long(), predicted[counted].long()
    right = target[target == predicted]
    return np.stack([torch.bincount(t, minlength=classes) for t in (right, target, predicted)])


@dataclass(frozen=True)
class Gain:
    """What a setting gains over the source model, in points."""

    total: Numbers
    """The weighted mean over the conditions: first as it is, then in each resample, (1 + R,)."""
    conditions: Mapping[str, float]

    @property
    def value(self) -> float:
        """The gain."""
        return float(self.total[0])

    @property
    def error(self) -> float:
        """Its standard error."""
        return float(self.total[1:].std())

    def over(self, other: Gain) -> tuple[float, float]:
        """By how much this is above ``other``, and the standard error of that."""
        difference = self.total - other.total
        return float(difference[0]), float(difference[1:].std())

    def beats(self, other: Gain, dear: bool = False) -> bool:
        """Whether it is above ``other`` by more than chance, and by enough to matter.

        What is ``dear`` has to be so beyond doubt.
        """
        difference, error = self.over(other)
        return difference > (max(DEAR_MARGIN, 2 * error) if dear else max(LEAST_MARGIN, error))


class Judge:
    """Scores settings against the source model on the same frames."""

    def __init__(self, task: Task, weights: Mapping[str, float], seed: int) -> None:
        self.task, self.weights, self.seed = task, dict(weights), seed

    def scores(self, name: str, frames: Sequence[Numbers]) -> Numbers:
        """The score of frames of one condition in percent, and in each resample, (1 + R,)."""
        counts = np.stack(list(frames))
        n = len(counts)
        draws = drawing(self.seed, "resamples", name, n).integers(n, size=(RESAMPLES, n))
        # How often each frame is in each resample: sums over frames are then one product.
        times = np.stack([np.bincount(draw, minlength=n) for draw in draws])
        times = np.concatenate([np.ones((1, n), times.dtype), times])
        summed = np.einsum("rn,nck->rck", times, counts).astype(float)
        right, wanted, predicted = summed[:, 0], summed[:, 1], summed[:, 2]
        if self.task == "classification":
            found: Numbers = 100 * right[:, 0] / wanted[:, 0]
            return found
        whole = wanted[0]
        kept = whole >= max(1.0, SMALLEST_SHARE * whole.sum())
        union = np.maximum(wanted + predicted - right, 1)
        there = (wanted > 0) & kept
        score: Numbers = 100 * (right / union * there).sum(1) / np.maximum(there.sum(1), 1)
        return score

    def gain(self, counts: Counts, source: Counts) -> Gain:
        """What ``counts`` gain over ``source``: the same conditions and frames."""
        total, weight = np.zeros(1 + RESAMPLES), 0.0
        conditions = {}
        for name, frames in counts.items():
            more = self.scores(name, frames) - self.scores(name, source[name][: len(frames)])
            conditions[name] = float(more[0])
            total += self.weights[name] * more
            weight += self.weights[name]
        return Gain(total / weight, conditions)

    def level(self, counts: Counts) -> float:
        """The weighted mean of the scores themselves."""
        weights = [self.weights[name] for name in counts]
        scores = [float(self.scores(name, frames)[0]) for name, frames in counts.items()]
        return float(np.average(scores, weights=weights))
