"""What a method learns from source images beforehand: one pass or several, which may be stopped.

A method that needs it has a `Preparation` in its file, and `bestta.prepare` runs it. Batches are
counted, everything learned so far is tensors, and both go into the checkpoint: a preparation that
was stopped goes on where it was, to the bit, if the images come in the same order.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.files import load_tensors, save_tensors
from bestta.insertion import device_of
from bestta.interrupt import stop_requests
from bestta.profile import batches, check_image, first
from bestta.progress import Progress

KIND = "preparation checkpoint"

CHECKPOINT_SECONDS = 60.0
"""How long it takes from one checkpoint to the next."""

IGNORED = 255
"""Pixels of this label are left out, as Cityscapes and its relatives have it."""


class Preparation(ABC):
    """Learns from source batches what a method needs."""

    epochs: int = 1
    """How often the images are gone through."""
    enough: int | None = None
    """So many images of each epoch will do; None for all of them."""
    uses_labels: bool = True
    """Whether labels are looked at."""
    reads: tuple[str, ...] | None = None
    """The settings that decide what is learned, which a checkpoint must share; None for all."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        """``model`` is frozen and in eval mode; ``config`` is the method's."""
        self.model, self.config = model, config

    def begin(self, image: Tensor) -> None:  # noqa: B027
        """Build what depends on the images' shape; called once, with the first batch."""

    @abstractmethod
    def see(self, image: Tensor, label: Tensor | None) -> float:
        """Learn from one batch (B, C, H, W), with its labels if there are any; its loss."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything learned so far: the tensors themselves, the same every time."""

    @abstractmethod
    def result(self) -> dict[str, Tensor]:
        """What the profile shall hold."""

    def settings(self) -> dict[str, Any]:
        """Settings of the method that what was learned belongs to."""
        return {}

    def run(
        self,
        images: Iterable[Any],
        about: Mapping[str, Any],
        checkpoint: str | os.PathLike[str] | None,
        *,
        show: bool | None = None,
    ) -> tuple[int, Tensor]:
        """Go through the images; returns how many there were, and one batch of them.

        Args:
            images: As `bestta.prepare` takes them.
            about: What a checkpoint must share with the run that goes on from it.
            checkpoint: Where progress is kept, if anywhere.
            show: Whether to show progress; by default on a terminal.
        """
        if self.epochs > 1 and isinstance(images, Iterator):
            raise ValueError(
                f"the images are gone through {self.epochs} times, and these can be only once: "
                "give a list or a DataLoader instead of a generator, or ask for one epoch."
            )
        path = None if checkpoint is None else Path(checkpoint)
        kept, done, began = _checkpoint(path, about)
        length = _length(images)
        total = None if length is None or self.enough is not None else self.epochs * length
        what = f"{about['method']}: batches"
        count, seen, skipped, example = 0, 0, 0, None
        self.labelled = False
        self.began = ""
        with ExitStack() as stack:
            progress = stack.enter_context(Progress(what, total, show=show, done=done))
            requests = [] if path is None else stack.enter_context(stop_requests(progress.show))
            saved = time.monotonic()
            for epoch, image, label in self._batches(images):
                good = image.isfinite().flatten(1).all(1)
                if not count:
                    self.began = _mark(image)
                    if done and began != self.began:
                        warnings.warn(
                            f"the first batch is not the one that {path} was begun with. Remove it "
                            "if these are other images; if they only come in another order, what "
                            "comes out will be as good, but not the same to the bit.",
                            stacklevel=3,
                        )
                self.labelled |= label is not None
                if example is None and bool(good.any()):
                    example = image[good]
                    self.begin(example)
                    _restore(self.tensors(), kept, path)
                skipped += int((~good).sum()) * (epoch == 0)
                seen += int(good.sum()) * (epoch == 0)
                count += 1
                if count <= done:  # by a run before
                    if requests:
                        break
                    continue
                if bool(good.any()):
                    loss = self.see(image[good], None if label is None else label[good])
                    progress.what = f"{about['method']}: loss {loss:.3f}, batches"
                due = time.monotonic() - saved > CHECKPOINT_SECONDS
                if path is not None and due and example is not None:
                    self._save(path, about, count)
                    saved = time.monotonic()
                progress.advance()
                if requests:
                    break
            if path is not None and count > done and example is not None:
                self._save(path, about, count)
            if requests:
                after = max(count, done)
                raise KeyboardInterrupt(f"stopped after batch {after}; {path} goes on from it.")
        if example is None or not seen:
            raise ValueError(
                "nothing to prepare from: "
                + ("all images hold NaN or infinite pixels." if skipped else "no images given.")
            )
        if not all(bool(tensor.isfinite().all()) for tensor in self.tensors().values()):
            raise FloatingPointError(
                f"what {about['method']!r} learned from the source images is not finite; "
                "try a smaller learning rate."
            )
        if skipped:
            warnings.warn(f"{skipped} images hold NaN or infinite pixels, left out.", stacklevel=3)
        return seen, example

    def _batches(self, images: Iterable[Any]) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        device = device_of(self.model)
        for epoch in range(self.epochs):
            seen = 0
            for item in batches(images):
                image = check_image(first(item)).to(device)
                label = label_of(item) if self.uses_labels else None
                image = image.clone() if image.is_inference() else image
                if label is not None and len(label) != len(image):
                    raise ValueError(f"{len(label)} labels came with {len(image)} images.")
                if self.enough is not None:
                    keep = min(len(image), self.enough - seen)
                    image, label = image[:keep], None if label is None else label[:keep]
                seen += len(image)
                yield epoch, image, None if label is None else label.to(device)
                if self.enough is not None and seen >= self.enough:
                    break

    def _save(self, path: Path, about: Mapping[str, Any], done: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        more = {"kind": KIND, "done": done, "began": self.began}
        save_tensors(path, self.tensors(), {**about, **more})


def _length(images: Iterable[Any]) -> int | None:
    try:
        return len(images)  # type: ignore[arg-type]
    except TypeError:  # a DataLoader has a length to ask for and may yet have none to tell
        return None


def label_of(item: Any) -> Tensor | None:
    """The labels of a batch, (B,) or (B, H, W): the second of a tuple, if that is numbers."""
    if not isinstance(item, tuple | list) or len(item) < 2:
        return None
    label = item[1]
    if isinstance(label, int) and not isinstance(label, bool):
        label = [label]
    listed = isinstance(label, list | tuple) and all(isinstance(x, int) for x in label)
    if isinstance(label, np.ndarray) or (listed and label):
        label = torch.as_tensor(label)
    if not isinstance(label, Tensor):
        return None  # names of files, say
    if label.dim() == 4 and label.shape[1] == 1:
        label = label[:, 0]
    if label.dim() not in (1, 3) or label.is_floating_point():
        raise ValueError(
            f"labels are whole numbers (B,) or (B, H, W); these are {label.dtype} of shape "
            f"{tuple(label.shape)}. Give the images alone to have the model's own predictions."
        )
    return label.long()


def source_loss(logits: Tensor, label: Tensor | None) -> Tensor:
    """Cross entropy with the labels, or with the model's own where there are none."""
    if label is None:
        label = logits.detach().argmax(1)
    elif logits.dim() == 4 and label.dim() == 3 and _is_larger(label, logits):
        # Some models predict at a quarter of the image's size, and leave it to others to enlarge.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = F.interpolate(wide, label.shape[1:], mode="bilinear", align_corners=False)
    expected = (logits.shape[0], *logits.shape[2:])
    if label.shape != expected:
        raise ValueError(f"labels of shape {expected} are expected, got {tuple(label.shape)}.")
    classes = logits.shape[1]
    ignored = IGNORED if logits.dim() == 4 and classes <= IGNORED else -100
    wrong = (label != ignored) & ((label < 0) | (label >= classes))
    if bool(wrong.any()):
        raise ValueError(
            f"labels of {classes} classes lie in 0 to {classes - 1}, not {int(label[wrong][0])}"
            + (f"; {IGNORED} is left out." if ignored == IGNORED else ".")
        )
    if not bool((label != ignored).any()):
        return 0 * logits.float().sum()  # the mean over nothing would be no number
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, label, ignore_index=ignored)


def _is_larger(label: Tensor, logits: Tensor) -> bool:
    height, width = logits.shape[2:]
    return (
        label.shape[1] >= height and label.shape[2] >= width and label.shape[1:] != (height, width)
    )


def _checkpoint(path: Path | None, about: Mapping[str, Any]) -> tuple[dict[str, Tensor], int, str]:
    """What a run before has left, how many batches it had seen, and the mark of the first."""
    if path is None or not path.exists():
        return {}, 0, ""
    kept, then = load_tensors(path, KIND)
    before, now = _flat(then), _flat(about)
    differing = [
        f"{name} was {before.get(name)!r} and is {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"{path} was begun with something else: {'; '.join(differing)}. "
            "Remove it to begin anew, or name another file."
        )
    done = then.get("done")
    if not isinstance(done, int):
        raise ValueError(f"{path} is a damaged {KIND}: it counts {done!r} batches. Remove it.")
    return kept, done, str(then.get("began"))


def _flat(about: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of entries by their own names, so that only what differs need be told."""
    flat: dict[str, Any] = {}
    for name, value in about.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def _mark(image: Tensor) -> str:
    """What tells a batch from another."""
    return hashlib.sha256(image.float().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


@torch.no_grad()
def _restore(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor], path: Path | None) -> None:
    if not kept:
        return
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in kept.items()}:
        raise ValueError(f"{path} was written by another version of bestta. Remove it.")
    for name, tensor in tensors.items():
        tensor.copy_(kept[name])
