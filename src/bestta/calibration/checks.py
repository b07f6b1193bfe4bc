"""Checks at the door: what a calibration cannot do is said before the images are gone through."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bestta.adapters.settings import is_number
from bestta.calibration.conditions import Condition


def _can_be_gone_through(value: Any) -> bool:
    # Not iter(value): it starts the workers of a DataLoader, and draws from its generator.
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def _are_images(value: Any) -> bool:
    return _can_be_gone_through(value) and not isinstance(value, str | bytes | Mapping)


def _are_expected(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return value is None or _are_images(value)
    return all(isinstance(name, str) and _are_images(images) for name, images in value.items())


CALL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "images": (_are_images, "are batches (B, 3, H, W), such as a DataLoader's"),
    "expected": (_are_expected, "are batches of images, or such by the name of a condition"),
    "conditions": (
        lambda v: v is None or isinstance(v, Condition) or _can_be_gone_through(v),
        "are names, such as ['clear', 'haze'], or bestta.calibration.Condition of your own",
    ),
    "minutes": (
        lambda v: v is None or (is_number(v) and v > 0),
        "must be a number above 0, or None for as long as it takes",
    ),
    "seed": (lambda v: isinstance(v, int) and is_number(v), "is a whole number"),
}
"""What `bestta.calibrate` may be called with: how that is told, and how it is said."""


def check_call(**given: Any) -> None:
    """Raise a ValueError for the first that is not what it should be."""
    for name, value in given.items():
        fits, wanted = CALL[name]
        if not fits(value):
            raise ValueError(f"{name} {wanted}; got {value!r:.80}.")


def check_file(name: str, path: Any, such_as: str) -> None:
    """Raise an error unless a file can be written at ``path``, whose folders may be yet to come.

    Args:
        name: What the caller knows it by.
        path: Where it shall be.
        such_as: A file's name to propose where ``path`` is a folder.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"{name} is the path of a file, such as {such_as!r}; got {path!r}.")
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"{name} names a file, and {path} is a folder; name one in it, such as "
            f"{path / such_as}."
        )
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{name} {path} lies in no folder: {there} is a file.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{name} {path} cannot be written: there is no permission to write in {there}. Name a "
            "file in another folder."
        )
