"""On which images a method learns: on each, on every so-many-th, or where it pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

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

    names: ClassVar[tuple[str, ...]] = ("count",)
    """What it remembers."""

    def __init__(self, every: int = 1, prefix: str = SCHEDULE) -> None:
        self.every = every
        self.prefix = prefix
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
        return {f"{self.prefix}{name}": value.clone() for name, value in self.memory.items()}

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Take over what `state` returned; start anew with that of another schedule, or none."""
        own = {name: state.get(f"{self.prefix}{name}") for name in self.names}
        found = {
            name: value.to(device, torch.float32 if value.is_floating_point() else None, copy=True)
            for name, value in own.items()
            if value is not None
        }
        self.memory = found if len(found) == len(own) else {}


class Settling(Schedule):
    """Learn from ``settle`` images after the style of the stream has moved, and then no more.

    The style has moved if one image is ``jump`` times as far from the mean style since the last
    move as images of this stream scatter, or if the last few, together, are ``drift`` times as far.
    How they scatter is measured from those few, so that it does not grow as the stream moves.
    """

    settle = 4
    jump = 3.0
    drift = 1.1
    names = ("mean", "recent", "scatter", "since")
    _recent = 0.35
    """Weight of an image in the mean of the last few."""
    _slow = 0.1
    """Weight of an image in how images scatter, at least."""
    _least = 0.02
    """A scatter, in source deviations, that is none: a camera that shows one picture for hours."""

    def __init__(self, prefix: str = SCHEDULE) -> None:
        super().__init__(prefix=prefix)

    @property
    def since_moved(self) -> int:
        """Which image the last one was of those since the style last moved, from 1."""
        return int(self.memory["since"]) if self.memory else 1

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
        scatter = max(float(memory["scatter"]), self._least)
        recent = memory["recent"].lerp(style, self._recent)
        return (
            _distance(style, memory["mean"]) > self.jump * scatter
            or _distance(recent, memory["mean"]) > self.drift * scatter
        )

    def seen(self, style: Tensor) -> None:
        """Take the image's style into what the next ones are compared with."""
        memory = self.memory
        new = not memory or (int(memory["since"]) >= self.settle and self.moved(style))
        style = _bounded(style)
        if new:
            scatter = memory.get("scatter", torch.zeros((), device=style.device))
            self.memory = {
                "mean": style,
                "recent": style,
                "scatter": scatter,
                "since": torch.tensor(1),
            }
            return
        since = int(memory["since"])
        distance = torch.tensor(_distance(style, memory["recent"]), device=style.device)
        known = bool(memory["scatter"] > 0)
        # The mean of the last few scatters itself, the more the fewer there are.
        distance = distance / (1 + self._recent / (2 - self._recent) if since > 1 else 2) ** 0.5
        if known:  # one odd image must not make the others look alike
            distance = distance.clamp(max=self.jump * max(float(memory["scatter"]), self._least))
        self.memory = {
            "mean": memory["mean"].lerp(style, 1 / (since + 1)),
            "recent": memory["recent"].lerp(style, self._recent),
            "scatter": memory["scatter"].lerp(distance, self._slow) if known else distance,
            "since": torch.tensor(since + 1),
        }


def check_schedule(state: Mapping[str, Tensor], prefix: str = SCHEDULE) -> None:
    """Raise a ValueError if a state from outside holds what no schedule remembers."""
    least = {"count": 0, "since": 1, "scatter": 0}
    for name, low in least.items():
        value = state.get(f"{prefix}{name}")
        if value is not None and bool(value < low):
            raise ValueError(f"this state is damaged: {prefix}{name} is {float(value)}.")


def shapes(channels: int, prefix: str = SCHEDULE) -> dict[str, tuple[int, ...]]:
    """All that schedules may remember at a first BeIN of so many channels, by name."""
    return {
        f"{prefix}{name}": (2, channels) if name in ("mean", "recent") else ()
        for name in (*Schedule.names, *Settling.names)
    }


def _bounded(style: Tensor) -> Tensor:
    """The mean style of a batch, (2, C); no single channel counts for more than a few."""
    return style.float().mean(0).clamp(-4, 4)


def _distance(one: Tensor, other: Tensor) -> float:
    """Between two styles, (2, C), in source deviations: the root of the mean square."""
    return float((one - other).square().mean().sqrt())
