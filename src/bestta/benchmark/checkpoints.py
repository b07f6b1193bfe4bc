"""What a run has done so far, in one file that is whole or is not believed.

A file opens with the SHA-256 of all that follows it. One that was cut short, or filled with zeros
by a disk that lost power, does not fit its own sum: it is passed over, and the one before it used.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from bestta.files import write_whole

KEPT = 2
"""How many checkpoints lie in a folder: the last, and the one before it."""

_MAGIC = b"bestta checkpoint 1\n"
_SUM = 64


class Checkpoints:
    """The checkpoints of one run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, position: int, progress: dict[str, Any], blobs: dict[str, bytes]) -> None:
        """Put down how far a run is: words and numbers, and files by name."""
        sizes = {name: len(blob) for name, blob in blobs.items()}
        head = json.dumps({"progress": progress, "sizes": sizes}).encode()
        body = b"".join((len(head).to_bytes(8, "big"), head, *blobs.values()))
        total = hashlib.sha256(body).hexdigest().encode()
        place = self.folder / f"{position:010}.checkpoint"
        write_whole(place, _MAGIC + total + body)
        paths = self._paths()
        now = paths.index(place)
        # What claims to be further was not believed, or this would not be where the run is.
        for path in (*paths[:now], *paths[now + KEPT :]):
            path.unlink(missing_ok=True)

    def load(self) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """The latest that is whole; None if there is none."""
        for path in self._paths():
            found = read(path)
            if found is not None:
                return found
        return None

    def clear(self) -> None:
        """Remove them all, and their folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _paths(self) -> list[Path]:
        """Latest first."""
        return sorted(self.folder.glob("*.checkpoint"), reverse=True)


def read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """What `Checkpoints.save` wrote to ``path``; None unless it is whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    total, body = data[len(_MAGIC) :][:_SUM], data[len(_MAGIC) + _SUM :]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).hexdigest().encode() != total:
        return None
    length = int.from_bytes(body[:8], "big")
    head = json.loads(body[8 : 8 + length])
    blobs, start = {}, 8 + length
    for name, size in head["sizes"].items():
        blobs[name] = body[start : start + size]
        start += size
    return head["progress"], blobs
