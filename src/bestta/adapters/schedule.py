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
        self.count = torch.zeros((), dtype=torch.int64)

    @property
    def reason(self) -> str:
        """Why there was nothing to learn from an image."""
        return f"γ learns on every {self.every}th image"

    def due(self, style: Tensor) -> bool:
        """Whether to learn from an image of this style, (B, 2, C); changes nothing."""
        return int(self.count) % self.every == 0

    def seen(self, style: Tensor, learned: bool) -> None:
        """Take note of an image that was answered."""
        self.count = self.count + 1

    def state(self) -> dict[str, Tensor]:
        """What is remembered, by name."""
        return {f"{SCHEDULE}count": self.count.clone()} if self.every > 1 else {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; start anew with what is not there."""
        self.count = state.get(f"{SCHEDULE}count", torch.zeros((), dtype=torch.int64)).clone()

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ValueError if a state from outside does not fit."""
        known = set(self.state())
        for name, tensor in state.items():
            if name.startswith(SCHEDULE) and (name not in known or tensor.dim() > 2):
                raise ValueError(f"this state does not fit the schedule: {name}.")


class Settling(Schedule):
    """Placeholder."""
