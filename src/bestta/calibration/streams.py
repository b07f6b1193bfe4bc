"""Short streams out of source images: which frames there are, and what should come out of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.adapters.preparation import label_of
from bestta.calibration.conditions import Condition, drawing
from bestta.calibration.scoring import Numbers, count
from bestta.insertion import device_of
from bestta.outputs import OutputKey, Task, by_class, select_logits
from bestta.profile import batches, check_image, first

MOST_BYTES = 2**29
"""Of pictures held, of source images and of frames each."""

SMALL = 64 * 64
"""Images of up to so many pixels are predicted many at once, where nothing is remembered."""
AT_ONCE = 50


@dataclass(frozen=True)
class Picture:
    """One image as the model wants it, and its label if it has one."""

    image: Tensor
    """(C, H, W)."""
    label: Tensor | None = None
    """(H, W), or one number."""


def _split(item: Any) -> list[Picture]:
    """The images of a batch one by one, those that are not finite left out."""
    image, label = check_image(first(item)), label_of(item)
    if label is not None and len(label) != len(image):
        raise ValueError(f"{len(label)} labels came with {len(image)} images.")
    found = []
    for n, one in enumerate(image):
        if bool(one.isfinite().all()):
            kept = one.detach().to("cpu", torch.float32, copy=True)
            found.append(Picture(kept, None if label is None else label[n].cpu()))
    return found


class Memory:
    """Lets images by, and keeps some of them, evenly spread, with the range of all pixels."""

    def __init__(self, most: int) -> None:
        self.most, self.every = most, 1
        self.count = 0
        self.pictures: list[Picture] = []
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def watch(self, images: Iterable[Any]) -> Iterator[Any]:
        """The images, unchanged."""
        for item in batches(images):
            for picture in _split(item):
                self._see(picture)
            yield item

    def _see(self, picture: Picture) -> None:
        low, high = picture.image.amin((1, 2)), picture.image.amax((1, 2))
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        if self.count % self.every == 0:
            self.pictures.append(picture)
            room = MOST_BYTES // (picture.image.numel() * picture.image.element_size())
            # Twice as many as are wanted, then half of them: spread, however many there will be.
            if len(self.pictures) > min(2 * self.most, max(2 * room, 8)):
                self.pictures = self.pictures[::2]
                self.every *= 2
        self.count += 1

    def kept(self) -> list[Picture]:
        """So many as were wanted, from the first to the last."""
        n = min(self.most, len(self.pictures))
        step = (len(self.pictures) - 1) / max(n - 1, 1)
        return [self.pictures[round(k * step)] for k in range(n)]


def digest(pictures: Iterable[Picture]) -> str:
    """What tells these images from others."""
    found = hashlib.sha256()
    for picture in pictures:
        for tensor in (picture.image, picture.label):
            if tensor is not None:
                found.update(f"{tuple(tensor.shape)}".encode())
                found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Pixels:
    """Between images as the model wants them and pixels from 0 (black) to 1 (white)."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    def shown(self, image: Tensor) -> Tensor:
        """``image`` (C, H, W) as pixels."""
        low, span = self._scale()
        return (image - low) / span

    def normalised(self, pixels: Tensor) -> Tensor:
        """``pixels`` (C, H, W) as the model wants them."""
        low, span = self._scale()
        return pixels * span + low

    def _scale(self) -> tuple[Tensor, Tensor]:
        low = torch.tensor(self.low).view(-1, 1, 1)
        return low, torch.tensor(self.high).view(-1, 1, 1) - low


@dataclass(frozen=True)
class Frame:
    """One frame of a stream."""

    image: Tensor
    """(1, C, H, W)."""
    target: Tensor
    """What should come out: (H, W), or one number."""


class Streams:
    """The frames of every condition, made when they are first asked for, and what they show."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        pictures: Sequence[Picture],
        conditions: Sequence[Condition],
        pixels: Pixels,
        *,
        recorded: Mapping[str, Sequence[Picture]] | None = None,
        labels: bool = False,
        seed: int = 0,
        output: OutputKey = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Streams over ``pictures``.

        Args:
            model: The source model.
            task: What it does.
            pictures: Source images.
            conditions: What they are shown in.
            pixels: Black and white of the images.
            recorded: Streams of their own, with labels, by name.
            labels: Whether labels say what should come out, or what the model makes of the
                image in clear weather.
            seed: Of every draw.
            output: Where the model keeps its logits.
            dtype: Of the images that the model takes.
        """
        self.dtype = dtype
        self.model, self.task, self.pictures, self.pixels = model, task, pictures, pixels
        self.conditions = {c.name: c for c in conditions}
        self.recorded = dict(recorded or {})
        self.labels, self.seed, self.output = labels, seed, output
        self.device = device_of(model)
        self.classes = 0
        self._frames: dict[tuple[str, int, int], Frame] = {}
        self._clear: dict[int, Tensor] = {}
        self._source: dict[tuple[str, int], list[Numbers]] = {}
        self._orders = {
            name: drawing(seed, "order", name).permutation(len(pictures))
            for name in self.conditions
        }

    @property
    def names(self) -> list[str]:
        """The conditions, in the order they are played in."""
        return [*self.conditions, *self.recorded]

    def length(self, name: str, wanted: int) -> int:
        """How many of the ``wanted`` frames a condition has."""
        return min(wanted, len(self.recorded[name])) if name in self.recorded else wanted

    def frame(self, name: str, n: int, spell: int = 0) -> Frame:
        """The ``n``-th frame of a condition.

        Args:
            name: The condition.
            n: Which frame.
            spell: For how many frames the weather stays as it is: a real stream's does not jump
                from frame to frame. 0: drawn for each frame, so that few show many.
        """
        if (name, n, spell) not in self._frames:
            self._frames[name, n, spell] = self._made(name, n, spell)
        return self._frames[name, n, spell]

    def _made(self, name: str, n: int, spell: int) -> Frame:
        if name in self.recorded:
            picture = self.recorded[name][n]
            assert picture.label is not None
            return Frame(picture.image[None].to(self.dtype), picture.label)
        turn, place = divmod(n, len(self.pictures))
        index = int(self._orders[name][place])
        picture = self.pictures[index]
        pixels = self.pixels.shown(picture.image)
        words = ("spell", n // spell) if spell else (index, turn)
        changed = self.conditions[name](pixels, self.seed, *words)
        if changed.shape != pixels.shape or not bool(changed.isfinite().all()):
            raise ValueError(
                f"the condition {name!r} made {tuple(changed.shape)} of pixels "
                f"{tuple(pixels.shape)}, {int((~changed.isfinite()).sum())} of them not finite: an "
                "effect returns as many pixels as it is given, 0 to 1."
            )
        if picture.label is not None and self.labels:
            target = picture.label
        else:
            if index not in self._clear:
                self._clear[index] = self.predicted(
                    self._logits(picture.image[None].to(self.dtype)), None
                )
            target = self._clear[index]
        return Frame(self.pixels.normalised(changed)[None].to(self.dtype), target)

    def _logits(self, image: Tensor) -> Tensor:
        with torch.no_grad():
            logits = select_logits(self.model(image.to(self.device)), self.output).cpu()
        self.classes = logits.shape[1]
        return logits

    def predicted(self, logits: Tensor, target: Tensor | None) -> Tensor:
        """The classes of one image's ``logits`` (1, K, …), in the size of the target."""
        if self.task == "segmentation" and target is not None:
            size = target.shape[-2:]
            if logits.shape[2:] != size:
                # Some models predict at a quarter of the image's size.
                logits = F.interpolate(logits.float(), size, mode="bilinear")
        classes = by_class(logits).argmax(1)[0]
        return classes.to(torch.uint8) if logits.shape[1] < 255 else classes

    def counted(self, name: str, n: int, logits: Tensor, spell: int = 0) -> Numbers:
        """What ``logits`` (1, K, …) are worth on the ``n``-th frame of a condition."""
        target = self.frame(name, n, spell).target
        return count(self.task, self.predicted(logits, target), target, max(2, logits.shape[1]))

    def source(self, name: str, frames: int, spell: int = 0) -> list[Numbers]:
        """What the source model is worth on the first ``frames`` of a condition."""
        known = self._source.setdefault((name, spell), [])
        known += self.play(self._logits, name, len(known), frames, spell=spell, together=True)
        return known[:frames]

    def known_source(self, name: str) -> list[Numbers]:
        """What the source model is worth on all frames of a condition that were played."""
        return self.source(name, max(1, len(self._source.get((name, 0), ()))))

    def play(
        self,
        predict: Callable[[Tensor], Tensor],
        name: str,
        begin: int,
        end: int,
        *,
        spell: int = 0,
        together: bool,
    ) -> list[Numbers]:
        """What ``predict`` is worth on the frames ``begin`` to ``end`` of a condition.

        Args:
            predict: (B, C, H, W) to logits.
            name: The condition.
            begin: The first frame.
            end: One past the last.
            spell: As in `frame`.
            together: Whether small images may be predicted many at once.
        """
        found: list[Numbers] = []
        while begin < end:
            batch = [self.frame(name, begin, spell).image]
            while (
                together
                and begin + len(batch) < end
                and len(batch) < AT_ONCE
                and batch[0][0, 0].numel() <= SMALL
                and self.frame(name, begin + len(batch), spell).image.shape == batch[0].shape
            ):
                batch.append(self.frame(name, begin + len(batch), spell).image)
            logits = predict(torch.cat(batch)).cpu()
            found += [
                self.counted(name, begin + k, logits[k : k + 1], spell) for k in range(len(batch))
            ]
            begin += len(batch)
        return found

    def picture(self, name: str) -> Tensor:
        """The first frame of a condition as pixels (C, H, W), 0 to 1."""
        return self.pixels.shown(self.frame(name, 0).image[0].float()).clamp(0, 1)
