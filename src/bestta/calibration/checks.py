"""Checks at the door: what a calibration cannot do is said before the images are gone through."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


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
