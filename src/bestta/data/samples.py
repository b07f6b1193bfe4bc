"""What every data set here is: samples in a stable order, each read when it is asked for."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image, ImageFile, ImageOps

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
"""An RGB image (H, W, 3) or a map of class ids (H, W), as bytes."""

IGNORED = 255
"""The class id of pixels that count neither for nor against."""

MOST_PIXELS = 89_000_000
"""Larger images are refused before they are decoded: no camera of ours makes them, and a few
kilobytes of file can unpack to gigabytes. Just below Pillow's own limit, so that what Pillow would
warn of is what is refused here."""

_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM")

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm")

Size = tuple[int, int]
"""(width, height) in pixels."""


class UnreadableImage(ValueError):
    """One image of a set cannot be used: it is broken, too large, or does not fit its labels."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One image with what is known of it.

    Attributes:
        name: Where it comes from, unique within its set and the same on every machine.
        image: (H, W, 3) bytes, RGB.
        label: Class ids, (H, W) bytes with 255 ignored; one class id for the whole image; or None.
    """

    name: str
    image: Pixels
    label: Pixels | int | None = None


@dataclass(frozen=True)
class Skipped:
    """An image that was left out, and why."""

    name: str
    reason: str


class ImageSet(ABC):
    """Samples in a stable order: ``len``, ``[i]``, ``[a:b]`` and iteration.

    ``[i]`` raises :class:`UnreadableImage` for a sample that cannot be used. Iteration warns of it
    by name, leaves it out and notes it in ``skipped``, so one broken file never ends a long run.
    A set that is iterated again neither warns of the same sample again nor notes it twice.

    A set describes itself: ``kind`` (the name it is opened by), ``classes`` (their names, in the
    order of the class ids; empty without labels).
    """

    kind: str = "images"
    classes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.skipped: list[Skipped] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What sample ``index`` is called, without reading it."""

    @abstractmethod
    def read(self, index: int) -> Sample:
        """Sample ``index``, 0 ≤ index < len; :class:`UnreadableImage` if it cannot be used."""

    def peek(self, index: int) -> Size | None:
        """(width, height) of sample ``index`` if it is known without decoding the sample.

        Raises :class:`UnreadableImage` where ``read`` would, as far as that can be told so early.
        """
        return None

    def missing(self) -> tuple[str, ...]:
        """What the published set has and this copy has not, a phrase each."""
        return ()

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> ImageSet: ...
    def __getitem__(self, index: int | slice) -> Sample | ImageSet:
        if isinstance(index, slice):
            return Selection(self, range(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"no sample {index} in a set of {len(self)}")
        return self.read(index % len(self))

    def some(self, count: int) -> ImageSet:
        """At most ``count`` of the samples, evenly spread over the whole set."""
        count = min(count, len(self))
        return Selection(self, [number * len(self) // count for number in range(count)])

    def __iter__(self) -> Iterator[Sample]:
        for index in range(len(self)):
            try:
                yield self.read(index)
            except UnreadableImage as error:
                self.skip(self.name(index), str(error))

    def skip(self, name: str, reason: str) -> None:
        """Note that ``name`` is left out and warn of it, the first time."""
        skipped = Skipped(name, reason)
        if skipped not in self.skipped:
            self.skipped.append(skipped)
            warnings.warn(f"skipped {name}: {reason}", stacklevel=3)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} images, {len(self.classes)} classes>"


class Selection(ImageSet):
    """Some samples of another set, in a given order: what slicing returns."""

    def __init__(self, of: ImageSet, indices: range | list[int]) -> None:
        super().__init__()
        self.of, self.indices = of, indices
        self.kind, self.classes = of.kind, of.classes

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        """What sample ``index`` is called in the set it comes from."""
        return self.of.name(self.indices[index])

    def read(self, index: int) -> Sample:
        """Sample ``index`` of the selection."""
        return self.of.read(self.indices[index])

    def peek(self, index: int) -> Size | None:
        """(width, height) of sample ``index`` of the selection, if that is known."""
        return self.of.peek(self.indices[index])


def read_image(path: Path) -> Pixels:
    """The image at ``path`` as RGB bytes (H, W, 3); :class:`UnreadableImage` if that fails.

    A photograph that says which way up it was taken is turned that way.
    """
    with _opened(path) as image:
        if image.mode == "F" or image.mode.startswith("I"):
            # Pillow would clip these to 0…255: a picture of sixteen bits would come out white.
            raise UnreadableImage(f"{path}: more than 8 bits a pixel (mode {image.mode})")
        image.load()
        if _may_be_turned(image):
            image = ImageOps.exif_transpose(image)
        # Copied out of Pillow's bytes, which nobody may write to.
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def read_label(path: Path) -> Pixels:
    """The label map at ``path``: (H, W) class ids, or (H, W, 3) colours where it is a picture.

    A palette image gives its indices, for these are the class ids.
    """
    with _opened(path) as image:
        # Pillow spreads grey values of two and four bits over 0…255; ids are not grey values.
        stored = [str(tile[3]) for tile in getattr(image, "tile", [])]
        step = 85 if "L;2" in stored else 17 if "L;4" in stored else 1
        if image.mode == "F":
            raise UnreadableImage(f"{path}: class ids are whole numbers, these have fractions")
        if image.mode not in ("L", "P", "1") and not image.mode.startswith("I"):
            return np.array(image.convert("RGB"))
        image.load()
        ids = np.array(image)
        if ids.size and (ids.min() < 0 or ids.max() > IGNORED):
            raise UnreadableImage(
                f"{path}: class ids from {ids.min()} to {ids.max()}, 0 to {IGNORED} fit"
            )
        return (ids // step).astype(np.uint8)


def image_size(path: Path) -> Size:
    """(width, height) of the image at ``path``, as ``read_image`` gives it, from the header."""
    with _opened(path) as image:
        width, height = image.size
        on_its_side = _may_be_turned(image) and image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
        return (height, width) if on_its_side else (width, height)


def check_size(image: Pixels, label: Pixels, path: Path) -> None:
    """Refuse a label map that does not lie pixel on pixel over its image."""
    if image.shape[:2] != label.shape[:2]:
        (h, w), (label_h, label_w) = image.shape[:2], label.shape[:2]
        raise UnreadableImage(f"{path}: labels are {label_w}×{label_h}, their image is {w}×{h}")


_ORIENTATION = 0x0112
"""The EXIF entry that says how a camera was held: 5 to 8 are pictures lying on their side."""


def _may_be_turned(image: Image.Image) -> bool:
    # Asking a PNG costs decoding it, for the answer may stand behind the pixels.
    return image.format in ("JPEG", "MPO")


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """The image at ``path``, not yet decoded; whatever goes wrong inside is its fault, by name."""
    trusting, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        # Other formats are not asked: some decode, or start other programs, before a size is known.
        with Image.open(path, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise UnreadableImage(
                    f"{path}: {width}×{height} pixels, more than the {MOST_PIXELS:,} that are read"
                )
            yield image
    except (UnreadableImage, MemoryError):
        raise
    except FileNotFoundError as error:
        raise UnreadableImage(f"{path}: no such file") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableImage(
            f"{path}: more pixels than the {MOST_PIXELS:,} that are read"
        ) from error
    except Exception as error:
        # Decoders meet broken bytes with nearly any exception there is, and all mean the same.
        size = os.path.getsize(path) if os.path.isfile(path) else None
        reason = "the file is empty" if size == 0 else str(error) or type(error).__name__
        raise UnreadableImage(f"{path}: {reason.removesuffix(f' {str(path)!r}')}") from error
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = trusting
