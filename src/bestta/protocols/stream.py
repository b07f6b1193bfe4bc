"""A stream: images in order, one domain block after another, each rendered when it is due.

The stream knows what the adapter must not: labels, domains, where blocks begin. Any position can be
asked for without rendering what lies before it, so a stopped run goes on where it was.
"""

from __future__ import annotations

import bisect
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from bestta.data.samples import ImageSet, Pixels, Skipped, UnreadableImage
from bestta.data.seeds import Seed
from bestta.interrupt import end_with_parent

Effect = Callable[[Pixels, Seed], Pixels]
"""What a condition does to an image: ``effect(image, seed)``, a pure function of the two."""

AHEAD = 4
"""Frames that each worker process may be ahead of the consumer."""


@dataclass(frozen=True, eq=False)
class Domain:
    """A condition: the images that show it, or clear images and the effect that brings it about.

    Attributes:
        name: What tables call it, such as "fog" or "snow-5".
        images: The images, in order.
        effect: What is done to each of them; None leaves them as they are.
    """

    name: str
    images: ImageSet
    effect: Effect | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.images, ImageSet):
            raise TypeError(
                "a domain draws from a set of images, such as Folder(path); "
                f"got {self.images!r:.80}"
            )


@dataclass(frozen=True)
class Block:
    """A stretch of a stream that is scored as one.

    Attributes:
        index: Its number in the stream, from 0.
        name: The domain's name; "mixed" where several take turns.
        round: How often the whole list of domains has come before, from 0.
        start, stop: Its positions in the stream, ``start <= position < stop``.
    """

    index: int
    name: str
    round: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Frame:
    """One position of a stream. Only ``image`` is for the adapter.

    Attributes:
        position: Its place in the stream, from 0.
        block: The block it belongs to.
        domain: The name of its domain: the block's, but for mixed blocks.
        name: The name of the sample it was made from.
        image: (H, W, 3) bytes, RGB.
        label: As the sample's: (H, W) class ids, one class id, or None.
    """

    position: int
    block: Block
    domain: str
    name: str
    image: Pixels
    label: Pixels | int | None


class Stream:
    """Frames in order, in blocks.

    Recipes for streams are in :mod:`bestta.protocols.recipes`; this class plays them.

    ``stream[i]`` renders frame ``i`` and no other. The bytes of a frame depend on the sample it is
    made from, on its domain and on the stream's seed alone: neither on the order in which frames
    are asked for nor on the process that renders them. The same sample under the same condition
    looks the same in every round, as in a recorded data set, unless ``redraw`` is set.

    Iterating over a stream plays all of it, as :meth:`frames` does. ``skipped`` lists the frames
    that were left out because their files are broken, each time they were due; a warning names each
    file once.

    Args:
        domains: What the blocks draw from.
        blocks: Name, round, and the domain and sample number of each frame, (n, 2), per block.
        seed: What all randomness of rendering begins with.
        redraw: Whether each round draws its weather anew.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        blocks: Sequence[tuple[str, int, np.ndarray[Any, np.dtype[np.int64]]]],
        *,
        seed: int = 0,
        redraw: bool = False,
    ) -> None:
        self.domains, self.seed, self.redraw = tuple(domains), seed, redraw
        self.blocks: list[Block] = []
        start = 0
        for index, (name, round_, plan) in enumerate(blocks):
            self.blocks.append(Block(index, name, round_, start, start + len(plan)))
            start += len(plan)
        if not start:
            raise ValueError("a stream needs at least one frame; every domain given is empty")
        self._plan = np.concatenate([plan for _, _, plan in blocks])
        self._kept: dict[tuple[int, int], tuple[str, Pixels, Pixels | int | None]] = {}
        self._room = 0
        self._starts = [block.start for block in self.blocks]
        self.skipped: list[Skipped] = []

    def __len__(self) -> int:
        return len(self._plan)

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(block.name for block in self.blocks))
        return f"<Stream: {len(self)} frames in {len(self.blocks)} blocks: {names}>"

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return self.blocks[-1].round + 1

    def every(self, step: int) -> Stream:
        """A stream of every ``step``-th frame of each block, from its first; each looks the same.

        >>> from bestta.data import Streets
        >>> from bestta.protocols import single
        >>> len(single(Streets(5)).every(2))
        3
        """
        if step < 1:
            raise ValueError(f"every 1st frame or every so-many-th, got {step}")
        blocks = [(b.name, b.round, self._plan[b.start : b.stop : step]) for b in self.blocks]
        return Stream(self.domains, blocks, seed=self.seed, redraw=self.redraw)

    def keeping(self, most_bytes: int) -> Stream:
        """The same stream, which keeps what it renders for the rounds to come.

        Args:
            most_bytes: Room for it; what does not fit is rendered anew each time. Nothing is kept
                where each round draws its weather anew, nor by worker processes.
        """
        blocks = [(b.name, b.round, self._plan[b.start : b.stop]) for b in self.blocks]
        stream = Stream(self.domains, blocks, seed=self.seed, redraw=self.redraw)
        stream._room = 0 if self.redraw or self.rounds == 1 else most_bytes
        return stream

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": {}, "_room": 0}

    def name_at(self, position: int) -> tuple[str, str]:
        """The names of the domain and of the sample at ``position``, without rendering it."""
        self._check(position)
        domain, sample = self._source(position)
        return domain.name, domain.images.name(sample)

    def block_at(self, position: int) -> Block:
        """The block that ``position`` lies in."""
        self._check(position)
        return self.blocks[bisect.bisect_right(self._starts, position) - 1]

    def __iter__(self) -> Iterator[Frame]:
        return self.frames()

    def __getitem__(self, position: int) -> Frame:
        """Frame ``position``; :class:`~bestta.data.UnreadableImage` if its file is broken."""
        block = self.block_at(position)
        number, sample_index = map(int, self._plan[position])
        domain = self.domains[number]
        found = self._kept.get((number, sample_index))
        if found is None:
            sample = domain.images.read(sample_index)
            image = sample.image
            if domain.effect is not None:
                drawn_in = block.round if self.redraw else 0
                image = domain.effect(image, (self.seed, drawn_in, sample.name))
            found = sample.name, image, sample.label
            size = image.nbytes + getattr(sample.label, "nbytes", 0)
            if size <= self._room:
                self._room -= size
                self._kept[number, sample_index] = found
        name, image, label = found
        return Frame(position, block, domain.name, name, image, label)

    def frames(
        self, start: int = 0, stop: int | None = None, *, workers: int = 0
    ) -> Iterator[Frame]:
        """Frames ``start`` up to ``stop``, in order.

        A frame whose file cannot be read is left out, with a warning that names it and an entry in
        ``skipped``; the others keep their positions.

        Args:
            start: The first position; what lies before it is not rendered.
            stop: The position to end before; by default the end of the stream.
            workers: Processes that render ahead of the consumer; with 0 each frame is rendered when
                it is asked for. The frames are the same for any number.
        """
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"frames {start} to {stop} of a stream of {len(self)}")
        if workers < 0:
            raise ValueError(f"workers must be 0 or more, got {workers}")
        return self._readable(range(start, stop), workers)

    def images(
        self, start: int = 0, stop: int | None = None, *, workers: int = 0
    ) -> Iterator[Pixels]:
        """As :meth:`frames`, but only what an adapter may see: images (H, W, 3)."""
        return (frame.image for frame in self.frames(start, stop, workers=workers))

    def _readable(self, positions: range, workers: int) -> Iterator[Frame]:
        for frame in self._rendered(positions, workers):
            if isinstance(frame, Frame):
                yield frame
                continue
            if frame not in self.skipped:
                warnings.warn(f"skipped {frame.name}: {frame.reason}", stacklevel=2)
            self.skipped.append(frame)

    def _rendered(self, positions: range, workers: int) -> Iterator[Frame | Skipped]:
        if not workers:
            yield from map(self._render, positions)
            return
        pool = ProcessPoolExecutor(workers, initializer=_begin, initargs=(self,))
        due: deque[Future[Frame | Skipped]] = deque()
        given = 0
        try:
            for position in positions:
                due.append(pool.submit(_render, position))
                if len(due) == workers * AHEAD:
                    yield due.popleft().result()
                    given += 1
            while due:
                yield due.popleft().result()
                given += 1
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that renders frames ended on its own; was it killed, for want of memory "
                f"perhaps? The first frame not handed out is {positions[given]}: go on from there"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)

    def _render(self, position: int) -> Frame | Skipped:
        """Frame ``position``; a broken file is an answer, not an exception."""
        try:
            return self[position]
        except UnreadableImage as error:
            domain, sample = self._source(position)
            return Skipped(domain.images.name(sample), str(error))

    def _source(self, position: int) -> tuple[Domain, int]:
        domain, sample = self._plan[position]
        return self.domains[domain], int(sample)

    def _check(self, position: int) -> None:
        if not isinstance(position, int | np.integer):
            raise TypeError(
                f"a stream is indexed by one position, got {position!r}; "
                "frames(start, stop) plays a part of it"
            )
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a stream of {len(self)} frames")


_stream: Stream
"""The stream that this worker process renders."""


def _begin(stream: Stream) -> None:
    """What a worker process does first."""
    global _stream
    _stream = stream
    # Each worker is one of several; threads of their own would only get in each other's way.
    cv2.setNumThreads(0)
    # Ctrl-C is for the consumer, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _render(position: int) -> Frame | Skipped:
    return _stream._render(position)
