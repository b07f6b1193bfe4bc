"""Images with labels: readers of data sets, scenes made on the fly, corruptions and weather.

images = open_set("cityscapes", "data/cityscapes", split="val")
for sample in images[:10]:
    print(sample.name, sample.image.shape)
"""

from __future__ import annotations

import difflib
import inspect
import os
from typing import Any

try:
    import cv2 as _cv2  # noqa: F401
    import PIL as _pillow  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"bestta.data needs Pillow and OpenCV ({error}): pip install 'bestta[data]'"
    ) from error

from bestta.data.acdc import Acdc
from bestta.data.camvid import CamVid
from bestta.data.check import Description, describe
from bestta.data.cifar10 import Cifar10, Cifar10C
from bestta.data.cityscapes import Cityscapes
from bestta.data.folder import Folder
from bestta.data.samples import ImageSet, Sample, Skipped, UnreadableImage
from bestta.data.streets import Streets
from bestta.data.trees import LayoutError

__all__ = [
    "Acdc",
    "CamVid",
    "Cifar10",
    "Cifar10C",
    "Cityscapes",
    "Description",
    "Folder",
    "ImageSet",
    "LayoutError",
    "Sample",
    "Skipped",
    "Streets",
    "UnreadableImage",
    "describe",
    "kinds",
    "open_set",
]


_READERS: dict[str, tuple[type[ImageSet], str]] = {
    "streets": (Streets, "street scenes rendered from a seed, no files needed; 19 classes"),
    "cityscapes": (Cityscapes, "streets of fifty cities in clear weather; 19 classes"),
    "acdc": (Acdc, "streets in fog, at night, in rain and in snow; 19 classes"),
    "camvid": (CamVid, "drives through Cambridge; 11 classes"),
    "cifar10": (Cifar10, "small images of ten classes, from the official or the npm files"),
    "cifar10c": (Cifar10C, "test images of CIFAR-10 under corruptions of five severities"),
    "folder": (Folder, "any folder of images, with or without a folder of label maps"),
}


def kinds() -> dict[str, str]:
    """The kinds of sets :func:`open_set` opens, with a line on each."""
    return {kind: description for kind, (_, description) in _READERS.items()}


def open_set(kind: str, root: str | os.PathLike[str] | None = None, **options: Any) -> ImageSet:
    """Open a set by the name of its kind.

    Args:
        kind: One of :func:`kinds`.
        root: Where its files are; None for a set without files.
        options: What its class takes: a split, a size, a condition.

    Raises:
        ValueError: If there is no such kind, or it takes no such option or needs another.
        LayoutError: If ``root`` does not hold such a set.

    Example:
        >>> open_set("streets", count=3)
        <Streets: 3 images, 19 classes>
    """
    if kind not in _READERS:
        near = difflib.get_close_matches(str(kind), _READERS, n=1)
        raise ValueError(
            f"no kind of set is called {kind!r}."
            + (f" Did you mean {near[0]!r}?" if near else "")
            + f" There are: {', '.join(_READERS)}."
        )
    reader = _READERS[kind][0]
    parameters = inspect.signature(reader).parameters
    if ("root" in parameters) != (root is not None):
        raise ValueError(
            f"{kind} is read from files: say in which folder they are."
            if root is None
            else f"{kind} has no files, so it takes no folder; got {os.fspath(root)!r}."
        )
    takes = [name for name in parameters if name != "root"]
    for name in options:
        if name not in takes:
            near = difflib.get_close_matches(name, takes, n=1)
            raise ValueError(
                f"{kind} has no option {name!r}."
                + (f" Did you mean {near[0]!r}?" if near else "")
                + f" It takes: {', '.join(takes)}."
            )
    for name in takes:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise ValueError(f"{kind} needs the option {name!r}. It takes: {', '.join(takes)}.")
    return reader(**({} if root is None else {"root": root}), **options)
