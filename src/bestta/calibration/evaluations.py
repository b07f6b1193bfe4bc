"""What was found out so far, in one file: a calibration that was stopped goes on from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bestta.calibration.scoring import Numbers
from bestta.files import write_whole

KIND = "calibration checkpoint"


class Evaluations:
    """Counts by settings, condition and frame; kept in a file, if there is one."""

    def __init__(self, path: str | os.PathLike[str] | None, about: Mapping[str, Any]) -> None:
        """Evaluations, with those in ``path``.

        Args:
            path: Where they are kept.
            about: What they hold for: model, images, conditions. A file of other ones is refused.
        """
        self.path = None if path is None else Path(path)
        self.about: dict[str, Any] = json.loads(json.dumps({"kind": KIND, **about}))
        self.found: dict[str, dict[str, list[Numbers]]] = {}
        self.before = 0
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            about = kept["about"]
            found = {
                key: {name: [np.array(f) for f in frames] for name, frames in counts.items()}
                for key, counts in kept["found"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no {KIND} ({error!r}). Remove it, or name another file."
            ) from error
        differing = [
            f"{name} was {_short(about.get(name))} and is {_short(value)}"
            for name, value in self.about.items()
            if about.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"{path} was begun with something else: {'; '.join(differing)}. "
                "Remove it to begin anew, or name another file."
            )
        self.found, self.before = found, len(found)

    def counts(self, key: str) -> dict[str, list[Numbers]]:
        """What is known of some settings, by condition; empty if nothing is."""
        return {name: list(frames) for name, frames in self.found.get(key, {}).items()}

    def put(self, key: str, counts: Mapping[str, list[Numbers]]) -> None:
        """Note what was found, and keep it."""
        self.found[key] = dict(counts)
        if self.path is None:
            return
        found = {
            key: {name: [f.tolist() for f in frames] for name, frames in counts.items()}
            for key, counts in self.found.items()
        }
        text = json.dumps({"about": self.about, "found": found}, separators=(",", ":"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, text.encode())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
