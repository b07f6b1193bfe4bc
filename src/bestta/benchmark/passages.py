"""Blocks that need not be played again: one that begins as an equal one began ends as that did.

Rounds show the same frames, and what swells fades again. A method that begins a block in the very
state in which it began an earlier block of the same frames, because it is reset at each change,
answers them as it did then, to the bit. So the run takes over what came of them, and the state that
the earlier block left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bestta.adapters.base import Adapter, StepReport

LARGE = 4 << 20
"""Of a method whose state takes more bytes no block is kept: forty of them would fill the memory.
Such methods train whole networks, most of them by chance, and do not come back to a state."""


@dataclass
class Answered:
    """What came of a frame."""

    report: StepReport
    values: Mapping[str, float | None]
    """What is traced of it."""
    counted: bool
    """Whether it has a label, and so a row in `Passage.counts`."""
    spread: Tensor | None = None
    """What it adds to the histograms of features, if it was looked into."""
    predicted: Tensor | None = None
    """The classes, of a frame that is shown."""


@dataclass
class Passage:
    """A block that was played, or is."""

    beginning: bytes
    """What it began with: a digest of `beginning_of`."""
    answers: dict[int, Answered] = field(default_factory=dict)
    """By the place of the frame in the block; those that could not be read are missing."""
    counts: Tensor | None = None
    """What each frame counts for the score. All of them in one piece of memory: thousands of small
    ones, made between the large ones of a forward, keep glibc from using the room of those."""
    end: dict[str, Tensor] = field(default_factory=dict)
    random: Tensor | None = None

    def keep(self, place: int, answer: Answered, counts: Tensor | None, length: int) -> None:
        """Keep what came of the frame at ``place`` of a block of ``length``."""
        if counts is not None:
            if self.counts is None:
                self.counts = counts.new_empty(length, *counts.shape)
            self.counts[place] = counts
        self.answers[place] = answer

    def close(self, adapter: Adapter) -> None:
        """The block is over: keep what it has left."""
        looked_into = [a for a in self.answers.values() if a.spread is not None]
        spreads = [a.spread for a in looked_into if a.spread is not None]
        for answer, spread in zip(
            looked_into, torch.stack(spreads) if spreads else (), strict=True
        ):
            answer.spread = spread  # in one piece, as the counts
        self.end, self.random = adapter.whole_state(), torch.get_rng_state()

    def leave(self, adapter: Adapter) -> None:
        """Put ``adapter`` into the state that the block has left."""
        assert self.random is not None
        with torch.inference_mode(False):
            adapter.restore_whole(self.end)
        torch.set_rng_state(self.random)


def beginning_of(adapter: Adapter, frames: Iterable[tuple[str, str]]) -> bytes | None:
    """A digest of all that the answers to ``frames`` depend on; None of a state that is large.

    Args:
        adapter: As it is before the first of them.
        frames: Domain and name of each.
    """
    state = adapter.whole_state()
    if sum(tensor.numel() * tensor.element_size() for tensor in state.values()) > LARGE:
        return None
    digest = hashlib.sha256()
    for name, tensor in (*sorted(state.items()), ("random", torch.get_rng_state())):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    for domain, name in frames:
        digest.update(f"{domain}\0{name}\0".encode())
    return digest.digest()
