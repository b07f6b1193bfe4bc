"""On which images a method learns: on each, on every so-many-th, or where it pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

When = Literal["always", "auto"] | int
SCHEDULE = "schedule/"
"""Names of what a schedule remembers begin with this."""


def check_when(when: object) -> None:
    """Raise a ValueError unless this names a schedule."""
    whole = isinstance(when, int) and not isinstance(when, bool) and when >= 1
    if not whole and when not in ("always", "auto"):
        raise ValueError(f"when is 'always', 'auto' or a whole number from 1 on, not {when!r}.")


def schedule_of(when: When) -> Schedule:
    """The schedule of that name."""
    if when == "auto":
        return Settling()
    return Schedule(1 if when == "always" else int(when))


class Schedule:
    """Learn from every ``every``-th image, the first one included."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.memory: dict[str, Tensor] = {}

    @property
    def reason(self) -> str:
        """Why there was nothing to learn from an image."""
        return f"γ learns on one image in {self.every}"

    def due(self, style: Tensor) -> bool:
        """Whether to learn from an image of this style, (B, 2, C); changes nothing."""
        return int(self.memory.get("count", 0)) % self.every == 0

    def seen(self, style: Tensor) -> None:
        """Take note of an image that was answered."""
        if self.every > 1:
            count = int(self.memory.get("count", 0)) + 1
            self.memory = {"count": torch.tensor(count % self.every)}

    def state(self) -> dict[str, Tensor]:
        """What is remembered, by name."""
        return {f"{SCHEDULE}{name}": value.clone() for name, value in self.memory.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; start anew with what is not there."""
        own = {name.removeprefix(SCHEDULE): t for name, t in state.items() if SCHEDULE in name}
        self.memory = {name: own[name].clone() for name in self.shapes(0) if name in own}

    def shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """What may be remembered of a first BeIN of so many channels, and in which shape."""
        return {"count": ()}


class Settling(Schedule):
    """Learn from ``settle`` images after the style of the stream has moved, and then no more.

    What a style is compared with is the mean style since the last move. It has moved if one image
    is ``jump`` times as far from it as images of this stream usually are, or if a few in a row,
    together, are ``drift`` times as far: that is beyond what single images scatter.
    """

    settle = 8
    jump = 2.5
    drift = 1.0
    _recent = 0.35
    """Weight of an image in the mean of the last few."""
    _slow = 0.05
    """Weight of an image in the mean since the last move, and in the usual distance, at least."""
    _least = 0.02
    """A distance, in source deviations, that is none: a camera that shows one picture for hours."""

    def __init__(self) -> None:
        super().__init__()

    @property
    def reason(self) -> str:
        """Why there was nothing to learn from an image."""
        return "settled: the style of the stream has not moved"

    def due(self, style: Tensor) -> bool:
        """Whether the stream is new, has just moved, or moves with this image."""
        return not self.memory or int(self.memory["since"]) < self.settle or self.moved(style)

    def moved(self, style: Tensor) -> bool:
        """Whether the style of the stream moves with this image."""
        memory, style = self.memory, _bounded(style)
        usual = max(float(memory["usual"]), self._least)
        recent = memory["recent"].lerp(style, self._recent)
        return (
            _distance(style, memory["mean"]) > self.jump * usual
            or _distance(recent, memory["mean"]) > self.drift * usual
        )

    def seen(self, style: Tensor) -> None:
        """Take the image's style into what the next ones are compared with."""
        memory = self.memory
        if not memory:
            style = _bounded(style)
            nothing = torch.zeros((), device=style.device)
            self.memory = {
                "mean": style,
                "recent": style,
                "usual": nothing,
                "since": torch.tensor(1),
            }
            return
        since = int(memory["since"])
        moved = since >= self.settle and self.moved(style)
        style = _bounded(style)
        if moved:
            self.memory = {**memory, "mean": style, "recent": style, "since": torch.tensor(1)}
            return
        weight = max(1 / (since + 1), self._slow)
        distance = torch.tensor(_distance(style, memory["mean"]), device=style.device)
        # The first distance is from a single image, which is as far off again as that one itself.
        usual = distance / 2**0.5 if since == 1 else distance
        known = bool(memory["usual"] > 0)
        self.memory = {
            "mean": memory["mean"].lerp(style, weight),
            "recent": memory["recent"].lerp(style, self._recent),
            "usual": memory["usual"].lerp(usual, max(weight, 0.1)) if known else usual,
            "since": torch.tensor(since + 1),
        }

    def shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """What may be remembered of a first BeIN of so many channels, and in which shape."""
        return {"mean": (2, channels), "recent": (2, channels), "usual": (), "since": ()}


def _bounded(style: Tensor) -> Tensor:
    """The mean style of a batch, (2, C); no single channel counts for more than a few."""
    return style.mean(0).clamp(-4, 4)


def _distance(one: Tensor, other: Tensor) -> float:
    """Between two styles, (2, C), in source deviations: the root of the mean square."""
    return float((one - other).square().mean().sqrt())
