"""Folders of data: what lies in them, in which order, and errors that show them.

The order of files never depends on the file system: it is the one people expect, where ``2.png``
comes before ``10.png``. What systems and archivers leave behind is no data: hidden files and
folders, among them the ``._*`` files of macOS, and ``__MACOSX``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST_ENTRIES = 8
"""How many entries of one folder are shown before the rest is counted."""


class LayoutError(ValueError):
    """A folder does not hold the data set it was said to hold."""


def layout_error(what: str, root: Path, expected: str, problem: str) -> LayoutError:
    """An error for ``root``: what is wrong, the tree that was expected, and the tree that is there.

    Args:
        what: The data set, as a user would call it.
        root: The folder that was given.
        expected: The tree that would have worked, one entry a line.
        problem: What is wrong, in one sentence.
    """
    indented = "\n".join(f"  {line}" for line in expected.strip("\n").splitlines())
    return LayoutError(f"{problem}\n{what} is expected as\n{indented}\nfound\n{found(root)}")


def files_below(folder: Path, endings: Iterable[str], *, recursive: bool = True) -> list[str]:
    """Files below ``folder`` as relative POSIX paths in natural order.

    Args:
        folder: Where to look; links to other folders are followed.
        endings: What a file name may end with; upper and lower case are one.
        recursive: Whether to look into its folders, too.
    """
    return sorted(
        _files(folder, "", tuple(ending.lower() for ending in endings), recursive, frozenset()),
        key=natural_order,
    )


def natural_order(path: str) -> tuple[object, ...]:
    """A key to sort paths by: folder by folder, numbers by value, then by letter.

    Example:
        >>> sorted(["b/1", "a10", "a2", "a/3"], key=natural_order)
        ['a/3', 'a2', 'a10', 'b/1']
    """
    return (*(_words(part) for part in path.split("/")), (), path)


def _words(name: str) -> tuple[str | int, ...]:
    # Split at runs of digits: texts and numbers take turns, so like is compared with like.
    return tuple(
        int(word) if place % 2 else word.casefold()
        for place, word in enumerate(re.split("([0-9]+)", name))
    )


def _files(
    folder: Path, prefix: str, endings: tuple[str, ...], recursive: bool, above: frozenset[str]
) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:  # a link to a folder it lies in
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_litter(entry.name):
                continue
            if entry.is_dir():
                if recursive:
                    below = f"{prefix}{entry.name}/"
                    yield from _files(Path(entry.path), below, endings, True, above | {real})
            elif entry.name.lower().endswith(endings) and (entry.is_file() or entry.is_symlink()):
                # A link that leads nowhere stays, to be named when it is read.
                yield prefix + entry.name


def folders_in(folder: Path) -> list[str]:
    """Names of the folders in ``folder``, in natural order; none if it is not there."""
    if not folder.is_dir():
        return []
    names = (path.name for path in _entries(folder) if path.is_dir() and not _is_litter(path.name))
    return sorted(names, key=natural_order)


def locate(root: Path, name: str) -> Path | None:
    """The folder ``name`` in ``root`` or in one of its folders, where archives often unpack to."""
    for parent in (root, *(root / folder for folder in folders_in(root))):
        if (parent / name).is_dir():
            return parent / name
    return None


def _is_litter(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def found(root: Path, depth: int = 2) -> str:
    """The first entries below ``root``, as a tree ``depth`` levels deep."""
    if not root.exists():
        parent = root.parent
        beside = f", but there is {_listing(parent)}" if parent.is_dir() else ""
        return f"  nothing: {root} does not exist{beside}"
    if not root.is_dir():
        return f"  a file: {root}"
    return "\n".join([f"  {root}/", *_tree(root, depth, "    ")])


def _tree(folder: Path, depth: int, indent: str) -> list[str]:
    entries = _entries(folder)
    lines = []
    for path in entries[:MOST_ENTRIES]:
        lines.append(f"{indent}{path.name}{'/' if path.is_dir() else ''}")
        if path.is_dir() and depth > 1:
            lines += _tree(path, depth - 1, indent + "  ")
    if len(entries) > MOST_ENTRIES:
        lines.append(f"{indent}... and {len(entries) - MOST_ENTRIES} more")
    return lines or [f"{indent}(empty)"]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name))
    except PermissionError:
        return []


def _listing(folder: Path) -> str:
    names = [path.name for path in _entries(folder)]
    shown = ", ".join(names[:MOST_ENTRIES]) or "nothing beside it"
    return shown + (f" and {len(names) - MOST_ENTRIES} more" if len(names) > MOST_ENTRIES else "")
