"""Published figures, to stand beside measured ones: the tables of BESTTA's paper as data.

They are kept as they were printed; where a paper does not fit itself, its table's notes say so.

    >>> from bestta.reports.published import published
    >>> table = published("acdc-continual")
    >>> table.row("bestta").mean, table.row("source").mean
    (43.2, 36.6)
    >>> table.row("bestta").score_of({"name": "fog", "round": 9})
    54.5
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLACES = (
    Path(__file__).parents[1] / "published",
    Path(__file__).parents[3] / "results" / "published",
)
"""Where the files are: in an installed package, and in the repository."""


@dataclass(frozen=True, kw_only=True)
class PublishedBlock:
    """One stretch of a stream in one condition, and the score printed for it."""

    index: int
    round: int
    """From 0, as in records."""
    name: str
    score: float


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A row of a published table; what the table does not print is empty or None."""

    method: str
    """Its name in this library."""
    label: str
    told_of_changes: bool
    row: str | None = None
    """What tells it from other rows of the same method, such as "(a)"."""
    marks: Mapping[str, bool | str] = field(default_factory=dict)
    """What is switched on in this row of an ablation."""
    memory_gb: float | None = None
    time_ms: float | None = None
    blocks: tuple[PublishedBlock, ...] = ()
    rounds: Mapping[int, float] = field(default_factory=dict)
    """The means of those rounds that are printed, by the paper's number: the first is 1."""
    conditions: Mapping[str, float] = field(default_factory=dict)
    batches: Mapping[int, float] = field(default_factory=dict)
    """The means by batch size."""
    mean: float | None = None
    bound: str | None = None
    """What is said of a figure that is not printed itself, such as "> 0.5"."""

    def score_of(self, block: Mapping[str, Any] | int) -> float | None:
        """The score printed for a block; None if there is none, or if it could be one of several.

        Args:
            block: Its index, or a block as in records. Its name and round (0 if not said) count;
                its index decides between blocks that have both in common.
        """
        if isinstance(block, int):
            found = [b for b in self.blocks if b.index == block]
        else:
            key = (block["name"], block.get("round", 0))
            found = [b for b in self.blocks if (b.name, b.round) == key]
            if len(found) > 1:
                found = [b for b in found if b.index == block.get("index")]
        return found[0].score if found else None


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published table."""

    name: str
    title: str
    source: str
    """Whose figures they are, and where they stand."""
    metric: str
    """``"mIoU"`` or ``"error"``, in percent; ``"correlation"``."""
    higher_is_better: bool | None
    protocol: str | None
    """The protocol of this library that it belongs to."""
    data: str
    model: str
    size: tuple[int, int] | None
    """(width, height) of the images."""
    batch: int | None
    """Images in a batch; None if the table compares several sizes, or does not say."""
    notes: tuple[str, ...]
    rows: tuple[PublishedRow, ...]

    def row(self, name: str) -> PublishedRow | None:
        """The row of a method, or that with a letter such as "(a)"; None if there is none.

        Raises:
            ValueError: If several rows are of that method, as in ablations.
        """
        found = [row for row in self.rows if row.row == name]
        found = found or [row for row in self.rows if row.method == name]
        if len(found) > 1:
            raise ValueError(
                f"{self.name} has {len(found)} rows of {name!r}. Name one of them: "
                + ", ".join(repr(row.row) for row in found)
                + "."
            )
        return found[0] if found else None


def names() -> tuple[str, ...]:
    """The published tables there are."""
    return tuple(sorted(path.stem for path in _folder().glob("*.json")))


def published(name: str) -> Published:
    """A published table by name; `names` lists them."""
    known = names()
    if name not in known:
        near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.4)
        raise ValueError(
            f"no published table is called {name!r}."
            + (f" Did you mean {near[0]!r}?" if near else "")
            + f" There are: {', '.join(known)}."
        )
    table = json.loads((_folder() / f"{name}.json").read_text(encoding="utf-8"))
    table["notes"] = tuple(table["notes"])
    table["size"] = tuple(table["size"]) if table["size"] else None
    table["rows"] = tuple(_row(row) for row in table["rows"])
    return Published(**table)


def _row(row: dict[str, Any]) -> PublishedRow:
    row["blocks"] = tuple(PublishedBlock(**block) for block in row.get("blocks", ()))
    for key in ("rounds", "batches"):
        row[key] = {int(number): score for number, score in row.get(key, {}).items()}
    return PublishedRow(**row)


def _folder() -> Path:
    for place in PLACES:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"the published tables are missing: neither {PLACES[0]} nor {PLACES[1]} is there. "
        "Install bestta anew, or run it from a whole checkout."
    )
