"""Images in files, with label maps in other files: plain folders, and what street sets build on."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import cv2
import numpy as np

from bestta.data.samples import (
    IGNORED,
    IMAGE_SUFFIXES,
    MOST_PIXELS,
    ImageSet,
    Pixels,
    Sample,
    Size,
    UnreadableImage,
    check_size,
    image_size,
    read_image,
    read_label,
)
from bestta.data.trees import files_below, layout_error

LABEL_SUFFIXES = (".png", ".bmp", ".tif", ".tiff")
"""Formats that keep class ids as they are; JPEG blurs them."""

LABEL_ENDINGS = ("", "_label", "_labels", "_gt", "_mask")
"""What the label map of ``street.jpg`` may have after ``street``."""

_UNKNOWN = 254
"""What a table gives for an id that is none of the set's; so a set has at most 254 classes."""

_STRETCH = 0.02
"""How much wider or narrower than the others an image may be that is resized with them."""

_HEADERS = 9
"""How many images are asked for their size to learn that of the set."""


class PairedFiles(ImageSet):
    """Images and label maps in files, paired by whoever builds the set.

    Args:
        images: The folder that image paths are relative to.
        labels: The folder that label paths are relative to; None for a set without labels.
        pairs: For each sample the relative POSIX path of its image, and that of its label map or
            None where it is missing.
        classes: Names of the classes.
        size: (width, height) that images and labels are resized to; None leaves them as they are.
        same_size: Whether one camera made all frames, so that an image of another size is a fault.
    """

    kind = "files"

    def __init__(
        self,
        images: Path,
        labels: Path | None,
        pairs: Sequence[tuple[str, str | None]],
        *,
        classes: tuple[str, ...] = (),
        size: Size | None = None,
        same_size: bool = True,
    ) -> None:
        super().__init__()
        self.images, self.labels, self.pairs = images, labels, tuple(pairs)
        self.classes = classes if labels is not None else ()
        self.size = None if size is None else _checked(size)
        self.frame_size = _common_size(self) if same_size else None

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        """The path of image ``index`` below the folder of images."""
        # macOS takes accents apart in the names of files; elsewhere they are one character.
        return unicodedata.normalize("NFC", self.pairs[index][0])

    def image_path(self, index: int) -> Path:
        """Where image ``index`` is."""
        return self.images / self.pairs[index][0]

    def label_path(self, index: int) -> Path | None:
        """Where the label map of image ``index`` is; None in a set without labels."""
        if self.labels is None:
            return None
        label = self.pairs[index][1]
        if label is None:
            image = self.image_path(index)
            raise UnreadableImage(f"{image}: no label map for it in {self.labels}")
        return self.labels / label

    def read(self, index: int) -> Sample:
        """Sample ``index``, resized if the set was opened with a size."""
        path, label_path = self.image_path(index), self.label_path(index)
        image = read_image(path)
        self._check_frame((image.shape[1], image.shape[0]), path)
        label = None
        if label_path is not None:
            stored = read_label(label_path)
            check_size(image, stored, label_path)
            label = self.class_ids(stored, label_path)
        if self.size is not None:
            image = resized(image, self.size)
            label = None if label is None else resized_label(label, self.size)
        return Sample(self.name(index), image, label)

    def peek(self, index: int) -> Size:
        """(width, height) of image ``index`` in its file, from the header."""
        self.label_path(index)
        path = self.image_path(index)
        size = image_size(path)
        self._check_frame(size, path)
        return size

    def class_ids(self, stored: Pixels, path: Path) -> Pixels:
        """Class ids (H, W) of a label map as it is stored: here, the same."""
        return translate(stored, id_table({i: i for i in range(len(self.classes))}), path)

    def _check_frame(self, size: Size, path: Path) -> None:
        if self.frame_size is None or size == self.frame_size:
            return
        if self.size is None:
            raise UnreadableImage(
                f"{path}: {_by(size)}, the frames of this set are {_by(self.frame_size)}; "
                f"opened with size={self.frame_size}, the set brings all images to one size"
            )
        if abs(size[0] * self.frame_size[1] / (size[1] * self.frame_size[0]) - 1) > _STRETCH:
            raise UnreadableImage(
                f"{path}: {_by(size)} is of another shape than the frames of this set, which are "
                f"{_by(self.frame_size)}"
            )

    def _unlabelled(self) -> tuple[str, ...]:
        """A phrase on images whose label map is not there, for :meth:`missing`."""
        count = sum(label is None for _, label in self.pairs) if self.labels is not None else 0
        return (f"label maps of {count} of {len(self)} images",) if count else ()


class Folder(PairedFiles):
    """A folder of images in natural order, and perhaps one of label maps beside it.

    The label map of ``more/street.jpg`` is ``more/street.png`` in the folder of labels, or has
    ``_label``, ``_labels``, ``_gt`` or ``_mask`` before its ending. It holds class ids as grey
    values or palette indices, 255 ignored. Images may differ in size.

    Args:
        root: The folder of images.
        labels: The folder of label maps; it may lie inside ``root``.
        classes: Names of the classes, in the order of the ids. With names, a label map with other
            ids is refused; without, any id is taken.
        size: (width, height) to resize to.
        recursive: Whether to look into folders inside ``root``, too.

    Example::

        for sample in Folder("dashcam", labels="dashcam-labels"):
            print(sample.name, sample.image.shape)
    """

    kind = "folder"

    def __init__(
        self,
        root: str | os.PathLike[str],
        labels: str | os.PathLike[str] | None = None,
        *,
        classes: Sequence[str] = (),
        size: Size | None = None,
        recursive: bool = True,
    ) -> None:
        images = Path(root).expanduser()
        if not images.is_dir():
            raise layout_error("a folder of images", images, _TREE, f"{images} is no folder.")
        if len(classes) > _UNKNOWN:
            raise ValueError(f"{len(classes)} classes, label maps of bytes hold {_UNKNOWN}")
        names = files_below(images, IMAGE_SUFFIXES, recursive=recursive)
        label_root = None if labels is None else Path(labels).expanduser()
        if label_root is not None:
            if not label_root.is_dir():
                raise layout_error(
                    "a folder of label maps", label_root, _TREE, f"{label_root} is no folder."
                )
            names = _outside(names, images, label_root)
        if not names:
            raise layout_error(
                "a folder of images", images, _TREE, f"no image in {images}: {_SUFFIXES} are read."
            )
        pairs: list[tuple[str, str | None]] = [(name, None) for name in names]
        if label_root is not None:
            maps = {_stem(name): name for name in files_below(label_root, LABEL_SUFFIXES)}
            pairs = [(name, _label_of(name, maps)) for name in names]
            if not any(label for _, label in pairs):
                raise layout_error(
                    "a folder of label maps",
                    label_root,
                    _LABEL_TREE,
                    f"no label map in {label_root} is named like one of the {len(names)} images.",
                )
        super().__init__(
            images, label_root, pairs, classes=tuple(classes), size=size, same_size=False
        )

    def class_ids(self, stored: Pixels, path: Path) -> Pixels:
        """Class ids (H, W) of a label map: as they are, and any of them if classes have no name."""
        if not self.classes and stored.ndim == 2:
            return stored
        return super().class_ids(stored, path)

    def missing(self) -> tuple[str, ...]:
        """How many images have no label map."""
        return self._unlabelled()


_SUFFIXES = ", ".join(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)

_TREE = """
<folder>/
  first.png
  more/second.jpg
"""

_LABEL_TREE = """
<folder of labels>/
  first.png            for first.png or first.jpg among the images
  more/second_gt.png   for more/second.jpg; also _label, _labels, _mask
"""


def by_key(names: Iterable[str], endings: Sequence[str]) -> dict[str, str]:
    """Files by what is left of their paths without their ending.

    Where two files are left with the same, the one whose ending stands first in ``endings`` counts.
    A name that fits several endings is cut by the first.

    Example:
        >>> by_key(["a/x_rgb.jpg", "a/x_rgb.png", "a/y.txt"], ["_rgb.png", "_rgb.jpg"])
        {'a/x': 'a/x_rgb.png'}
    """
    chosen: dict[str, tuple[int, str]] = {}
    for name in names:
        for place, ending in enumerate(endings):
            if name.lower().endswith(ending.lower()):
                key = name[: len(name) - len(ending)]
                if key not in chosen or chosen[key][0] > place:
                    chosen[key] = (place, name)
                break
    return {key: name for key, (_, name) in chosen.items()}


def id_table(ids: Mapping[int, int]) -> Pixels:
    """The table (256,) from stored ids to class ids; 255 stays 255, all others are unknown."""
    table = np.full(256, _UNKNOWN, np.uint8)
    table[list(ids)] = list(ids.values())
    table[IGNORED] = IGNORED
    return table


def translate(stored: Pixels, table: Pixels, path: Path) -> Pixels:
    """Class ids (H, W) of a label map; :class:`UnreadableImage` names the ids without a class."""
    if stored.ndim != 2:
        raise UnreadableImage(
            f"{path}: labels are colours; class ids in a greyscale or palette image are expected"
        )
    ids = np.asarray(cv2.LUT(stored, table), dtype=np.uint8)
    if (ids == _UNKNOWN).any():
        unknown = np.unique(stored[ids == _UNKNOWN]).tolist()
        known = np.flatnonzero(table[:IGNORED] != _UNKNOWN).tolist()
        raise UnreadableImage(
            f"{path}: class ids {_some(unknown)} are none of this set's; "
            f"it has {known[0]} to {known[-1]} and {IGNORED} for ignored pixels"
        )
    return ids


def check_flag(labels: bool) -> bool:
    """Refuse a path where a set finds its labels by itself and only asks whether to read them."""
    if not isinstance(labels, bool):
        raise ValueError(f"labels is True or False for a set with labels of its own; got {labels}")
    return labels


def resized(image: Pixels, size: Size) -> Pixels:
    """``image`` at (width, height): averaged where it shrinks, interpolated where it grows."""
    height, width = image.shape[:2]
    if (width, height) == size:
        return image
    shrinks = size[0] <= width and size[1] <= height
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, size, interpolation=method), dtype=np.uint8)


def resized_label(label: Pixels, size: Size) -> Pixels:
    """``label`` at (width, height): of the nearest pixel, for class ids have no average."""
    if (label.shape[1], label.shape[0]) == size:
        return label
    # INTER_NEAREST takes the pixel to the upper left: a drift against the image. EXACT does not.
    method = cv2.INTER_NEAREST_EXACT
    return np.asarray(cv2.resize(label, size, interpolation=method), dtype=np.uint8)


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the indices below ``count``, first and last among them, evenly spread."""
    places = np.linspace(0, count - 1, min(count, most)).round()
    return sorted({int(place) for place in places})


def _common_size(files: PairedFiles) -> Size | None:
    """The size that most of a few images have, spread over the set; None if none can be read."""
    seen: Counter[Size] = Counter()
    for index in spread(len(files), _HEADERS):
        try:
            seen[image_size(files.image_path(index))] += 1
        except UnreadableImage:
            continue  # named when it is read
    return seen.most_common(1)[0][0] if seen else None


def _checked(size: Size) -> Size:
    try:
        width, height = (int(side) for side in size)
    except (TypeError, ValueError):
        width = height = 0
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise ValueError(
            "size is (width, height) in pixels, such as (1024, 512), and at most "
            f"{MOST_PIXELS:,} pixels in all; got {size!r}"
        )
    return width, height


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def _label_of(image: str, maps: Mapping[str, str]) -> str | None:
    named = (maps.get(_stem(image) + ending) for ending in LABEL_ENDINGS)
    return next((label for label in named if label is not None), None)


def _outside(names: list[str], images: Path, labels: Path) -> list[str]:
    """Images that are not label maps in a folder of labels inside the folder of images."""
    inside = Path(os.path.relpath(labels.resolve(), images.resolve()))
    if inside == Path():
        raise ValueError(f"images and labels share {images}: labels need a folder of their own")
    if inside.parts[0] == os.pardir:
        return names
    return [name for name in names if not PurePosixPath(name).is_relative_to(inside.as_posix())]


def _by(size: Size) -> str:
    return f"{size[0]}×{size[1]}"


def _some(values: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, values[:most]))
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
