"""What a set holds, whether all of it can be read, and what is missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from bestta.data.folder import spread
from bestta.data.samples import IGNORED, ImageSet, Sample, Size, Skipped, UnreadableImage
from bestta.progress import Progress

MOST_LINES = 20
"""How many samples that cannot be used are named before the rest is counted."""

MOST_SAMPLES = 50
"""How many samples a quick look decodes."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What :func:`describe` found.

    Attributes:
        kind: The kind of the set.
        count: How many samples it lists.
        sizes: How many samples have which (width, height), of those whose size was looked at.
        classes: Names of the classes.
        decoded: How many samples were read whole.
        labelled: How many of these came with a label.
        shares: The share of each class that was seen: of labelled pixels, or of images where a
            label is one class id.
        ignored: The share of pixels that count neither for nor against.
        never_seen: Classes that no label has, among those read.
        unreadable: Samples that cannot be used, and why.
        missing: What the published set has and this copy has not, a phrase each.
    """

    kind: str
    count: int
    sizes: dict[Size, int]
    classes: tuple[str, ...]
    decoded: int
    labelled: int
    shares: dict[str, float]
    ignored: float
    never_seen: tuple[str, ...]
    unreadable: tuple[Skipped, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        looked = "all" if self.decoded == self.count else f"{self.decoded} of them"
        lines = [f"{self.kind}: {self.count} images, {looked} decoded"]
        lines += [f"  {w}×{h}: {count} images" for (w, h), count in self.sizes.items()]
        if self.labelled:
            unit = f"over {self.labelled} labels, {self.ignored:.1%} ignored"
            lines.append(f"classes: {len(self.classes) or len(self.shares)}, {unit}")
            width = max(map(len, self.shares), default=0)
            lines += [f"  {name:<{width}}  {share:6.2%}" for name, share in self.shares.items()]
            if self.never_seen:
                where = "" if self.decoded == self.count else " among these"
                lines.append(f"  never seen{where}: {', '.join(self.never_seen)}")
        else:
            lines.append("no labels")
        lines += [f"missing: {phrase}" for phrase in self.missing]
        shown = self.unreadable[:MOST_LINES]
        lines += [f"cannot be used: {image.name}: {image.reason}" for image in shown]
        if len(shown) < len(self.unreadable):
            lines.append(f"cannot be used: {len(self.unreadable) - len(shown)} more")
        return "\n".join(lines)


def describe(images: ImageSet, *, full: bool = False) -> Description:
    """Look a set over.

    The quick look goes through all headers and decodes at most fifty samples spread over the set; a
    full one decodes every sample. Nothing is left in the ``skipped`` of the set.

    Args:
        images: Any set.
        full: Whether to decode everything.
    """
    sizes: Counter[Size] = Counter()
    unreadable: list[Skipped] = []
    pixels = np.zeros(256, np.int64)
    decoded = labelled = 0
    chosen = set(range(len(images)) if full else spread(len(images), MOST_SAMPLES))
    with Progress("images", len(images)) as progress:
        for index in range(len(images)):
            try:
                if index in chosen:
                    sample = images.read(index)
                    decoded += 1
                    labelled += sample.label is not None
                    pixels += _ids(sample)
                # A reader may resize: the header has the size of the file.
                size = images.peek(index)
                if size is None and index in chosen:
                    size = (sample.image.shape[1], sample.image.shape[0])
                if size is not None:
                    sizes[size] += 1
            except UnreadableImage as error:
                unreadable.append(Skipped(images.name(index), str(error)))
            progress.advance()

    total = max(int(pixels[:IGNORED].sum()), 1)
    names = images.classes or tuple(f"class {i}" for i in range(IGNORED))
    seen = {name: int(pixels[i]) / total for i, name in enumerate(names) if pixels[i]}
    return Description(
        kind=images.kind,
        count=len(images),
        sizes=dict(sizes.most_common()),
        classes=images.classes,
        decoded=decoded,
        labelled=labelled,
        shares=seen,
        ignored=int(pixels[IGNORED]) / max(int(pixels.sum()), 1),
        never_seen=tuple(n for n in images.classes if n not in seen) if labelled else (),
        unreadable=tuple(unreadable),
        missing=images.missing(),
    )


def _ids(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How often each id is in a label, (256,)."""
    if sample.label is None:
        return np.zeros(256, np.int64)
    return np.bincount(np.ravel(sample.label), minlength=256)
