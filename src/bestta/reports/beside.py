"""The published table that stands beside a group's figures, and which of its rows is whose."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from bestta.reports.published import Published, PublishedRow, published
from bestta.reports.records import Entry, Group, size_text

BATCH = "batch"
"""The mark of a study of batch sizes."""


@dataclass(frozen=True)
class Beside:
    """The published table that stands beside a group's figures, if there is one.

    Attributes:
        table: The published table.
        batch: The batch size of the group, for tables that have a figure for each.
        problems: Why there is none though the records name one.
    """

    table: Published | None
    batch: int
    problems: tuple[str, ...] = ()

    def row(self, entry: Entry) -> PublishedRow | None:
        """The row that is the entry's: by marks or letter in an ablation, else by method."""
        if self.table is None:
            return None
        marks, letter = entry.study.get("marks") or {}, entry.study.get("row")
        if not any(row.marks or row.row for row in self.table.rows):
            # A table of methods knows none of the settings that a study may vary, but the batch.
            if set(marks) - {BATCH}:
                return None
            rows = [row for row in self.table.rows if row.method == entry.method]
            return rows[0] if len(rows) == 1 else None
        for row in self.table.rows:
            if row.marks and dict(row.marks) == marks:
                return row
        # The same study of another model: its layers have other names.
        same_length = [r for r in self.table.rows if len(r.marks) == len(marks)]
        return next((row for row in same_length if letter and row.row == letter), None)

    def mean(self, entry: Entry) -> float | None:
        """The mean of the entry's row, or that for its batch size."""
        if (row := self.row(entry)) is None:
            return None
        return row.mean if row.mean is not None else row.batches.get(self._batch_of(entry))

    def _batch_of(self, entry: Entry) -> int:
        size = (entry.study.get("marks") or {}).get(BATCH)
        return size if isinstance(size, int) else self.batch

    def round_of(self, number: int) -> Callable[[Entry], float | None]:
        """The mean of one round, counted from 1."""
        return lambda entry: None if (row := self.row(entry)) is None else row.rounds.get(number)

    def has_batches(self, size: int | None = None) -> bool:
        """Whether there are figures by batch size, or for this one."""
        rows = () if self.table is None else self.table.rows
        return any(row.batches and size in (None, *row.batches) for row in rows)

    def about(self) -> str:
        """Data, model and size, for a heading."""
        if self.table is None:
            return ""
        model = self.table.model.replace(" with ResNet-", " R")
        return ", ".join(filter(None, (self.table.data, model, size_text(self.table.size))))

    def heading(self) -> str:
        """What stands above several published columns."""
        return "" if self.table is None else f"published ({self.table.data})"

    def notes(self, group: Group) -> list[str]:
        """Whose the published figures are, and in what they differ from the measured ones."""
        if self.table is None:
            return list(self.problems)
        table, stream = self.table, group.stream
        notes = [f"Published figures: {table.source}. They are not ranked."]
        here: list[str] = []
        if table.protocol != group.protocol:
            here.append(f"data: {table.data} there, {group.protocol} ({stream.get('set')}) here")
        if not _same_model(table.model, str(stream.get("model"))):
            here.append(f"model: {table.model} there, {stream.get('model')} here")
        size = stream.get("size")
        if table.size and size and tuple(table.size) != tuple(size):
            here.append(f"size: {size_text(table.size)} there, {size_text(size)} here")
        if table.batch is not None and table.batch != (stream.get("batch") or 1):
            here.append(f"batches: {table.batch} there, {stream.get('batch')} here")
        rounds = max((number for row in table.rows for number in row.rounds), default=None)
        if rounds is not None and rounds != len(group.record["rounds"]):
            here.append(f"rounds: {rounds} there, {len(group.record['rounds'])} here")
        if here:
            notes.append(
                f"What was published is of another setting ({'; '.join(here)}): "
                "levels do not compare, gains over the source roughly at best."
            )
        if twice := self._shared(group):
            notes.append(
                f"The published figure of {', '.join(twice)} stands beside each of its variants; "
                "it is of the paper's settings."
            )
        return notes

    def _shared(self, group: Group) -> list[str]:
        """Methods of which one published figure stands beside several rows."""
        found = [
            (entry.method, row.row, self._batch_of(entry))
            for entry in group.entries
            if (row := self.row(entry)) is not None
        ]
        return sorted({each[0] for each in found if found.count(each) > 1})

    def remarks(self) -> list[str]:
        """What is to be known of the published figures themselves."""
        return [f"On what was published: {n}" for n in self.table.notes] if self.table else []


def beside_of(group: Group) -> Beside:
    """The published table that the group's records name."""
    batch = batch_of(group)
    name = next((n for r in group.records if (n := r.record.get("published"))), None)
    if name is None:
        return Beside(None, batch)
    try:
        table = published(name)
    except (ValueError, OSError) as error:
        return Beside(None, batch, (f"No published figures: {error}",))
    if table.metric == "correlation" and any(map(has_similarities, group.entries)):
        # They have a table of their own, beside the correlations measured.
        return Beside(None, batch)
    if table.metric != group.metric:
        problem = f"No published figures: {name} is in {table.metric}, this is in {group.metric}."
        return Beside(None, batch, (problem,))
    return Beside(table, batch)


def batch_of(group: Group) -> int:
    """How many images at a time the group's methods were given."""
    return int(group.stream.get("batch") or 1)


def has_similarities(entry: Entry) -> bool:
    """Whether similarities were traced, so that there is something to correlate."""
    return "direction" in (entry.record.get("traces") or {})


def bound_of(task: str, trace: str) -> str:
    """What the paper prints of a correlation; empty if nothing."""
    marks = {"task": task, "trace": trace}
    rows = published("correlations").rows
    return next((row.bound or "" for row in rows if row.marks == marks), "")


def _same_model(published_name: str, name: str) -> bool:
    """Whether two names of a model say the same, however they are spelt."""
    spelt = (n.lower().replace("+", "plus").replace(" with ", "") for n in (published_name, name))
    there, here = (re.sub(r"[^a-z0-9]", "", text) for text in spelt)
    return there == here
