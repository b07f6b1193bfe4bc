"""Blocks that need not be played again: one that begins as an equal one began ends as that did.

Rounds show the same frames, and what swells fades again. A method that is reset at each change
begins a block in the very state in which it began an earlier block of the same frames, and answers
them as it did then, to the bit. So the run takes over what came of them, and the state that the
earlier block left.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bestta.adapters.base import Adapter, StepReport

LARGE = 4 << 20
"""Of a method whose state takes more bytes no block is kept: it trains a whole network, and dozens
of them would fill the memory."""


class Changed(RuntimeError):
    """A file could be read in one round and not in another."""

    def __init__(self) -> None:
        super().__init__(
            "a frame could be read in one round and not in another: the images changed while they "
            "were played. Run it again, and it goes on from the start of this block."
        )


@dataclass
class Answered:
    """What came of a frame."""

    report: StepReport
    values: Mapping[str, float | None]
    """What is traced of it."""
    spread: Tensor | None = None
    """What it adds to the histograms of features, if it was looked into."""
    predicted: Tensor | None = None
    """The classes, of a frame that is shown."""
    counts: Tensor | None = None
    """What it counts for the score, if it has a label."""


@dataclass
class Passage:
    """A block that was played, or is."""

    beginning: bytes
    """What it began with, by `beginning_of`."""
    answers: dict[int, Answered] = field(default_factory=dict)
    """By the place of the frame in the block; those that could not be read are missing."""
    end: dict[str, Tensor] = field(default_factory=dict)
    chance: Tensor | None = None

    def close(self, adapter: Adapter) -> None:
        """The block is over: keep what it has left."""
        answers = list(self.answers.values())
        # Of each kind in one piece of memory: thousands of small ones, made between the large ones
        # of a forward, keep glibc from using the room of those again.
        for kind in ("counts", "spread"):
            some = [answer for answer in answers if getattr(answer, kind) is not None]
            if some:
                whole = torch.stack([getattr(answer, kind) for answer in some])
                for answer, row in zip(some, whole, strict=True):
                    setattr(answer, kind, row)
        self.end = {name: tensor.clone() for name, tensor in adapter.whole_state().items()}
        self.chance = torch.get_rng_state()

    def leave(self, adapter: Adapter) -> None:
        """Put ``adapter`` into the state that the block has left."""
        assert self.chance is not None
        with torch.inference_mode(False):
            adapter.restore_whole(self.end)
        torch.set_rng_state(self.chance)


class Passages:
    """The blocks that were played, and the one under way."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.known: dict[bytes, Passage] = {}
        self.under_way: Passage | None = None
        """Is played, and kept."""
        self.repeated: Passage | None = None
        """Is not played: the earlier one that it is a repetition of."""
        self.due: list[int] = []
        """The places of the frames that are still to come in it."""

    @staticmethod
    def serve(adapter: Adapter) -> bool:
        """Whether there is anything in them for a method.

        Only a reset brings the counter of images back, too; what else a method does at a change is
        not for us to see. Chance is known of the CPU's.
        """
        resets = type(adapter).domain_changed is Adapter.domain_changed
        return adapter.needs_domain_changes and resets and adapter.device.type == "cpu"

    def open(self, frames: Iterable[tuple[str, str]]) -> None:
        """A block begins; ``frames`` are domain and name of each."""
        beginning = beginning_of(self.adapter, frames)
        if beginning is None:
            return
        self.repeated = self.known.get(beginning)
        if self.repeated is None:
            self.under_way = Passage(beginning)
        else:
            self.due = list(self.repeated.answers)

    def keep(self, place: int, answer: Answered) -> None:
        """What came of the frame at ``place`` of the block under way."""
        if self.under_way is not None:
            self.under_way.answers[place] = answer

    def take(self, place: int) -> Answered:
        """What came of it before; with the last frame the block is over."""
        assert self.repeated is not None
        if self.due[:1] != [place]:
            raise Changed
        del self.due[0]
        answer = self.repeated.answers[place]
        if not self.due:
            self.repeated.leave(self.adapter)
            self.repeated = None
        return answer

    def close(self) -> None:
        """The block under way is over, if there is one."""
        if self.repeated is not None:  # its last frames have not come
            raise Changed
        if self.under_way is not None:
            self.under_way.close(self.adapter)
            self.known[self.under_way.beginning] = self.under_way
            self.under_way = None


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
    for name, tensor in (*sorted(state.items()), ("chance", torch.get_rng_state())):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    # A method that draws from these does not come back to where it was.
    of_numpy = [np.asarray(part).tolist() for part in np.random.get_state()]  # noqa: NPY002
    digest.update(repr((random.getstate(), of_numpy)).encode())
    for domain, name in frames:
        digest.update(f"{domain}\0{name}\0".encode())
    return digest.digest()
