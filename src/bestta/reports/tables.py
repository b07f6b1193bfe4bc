"""The tables of a report: shaped like the paper's, published figures beside the measured ones.

Every table is of one group of records that compare, except that by batch size, which puts groups
side by side that differ in nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from bestta.reports.correlation import correlations, share_above
from bestta.reports.published import Published, PublishedRow, published
from bestta.reports.records import (
    Entry,
    Group,
    block_score,
    condition_score,
    name_of,
    ordinal,
    place,
    round_score,
    size_text,
    title_of,
)
from bestta.reports.table import MISSING, Cell, Column, Row, Table, mark, ranked, shown, signed

Figure = Callable[[dict[str, Any]], float | None]
Sketch = list[tuple[Column, Callable[[Entry], Cell]]]
"""Columns, and what each makes of an entry."""


def tables(groups: Iterable[Group]) -> list[Table]:
    """All tables of all groups, and those by batch size where groups differ in that alone."""
    groups = list(groups)
    return [table for group in groups for table in tables_of(group)] + _by_batch(groups)


def tables_of(group: Group) -> list[Table]:
    """The tables of one group, the paper-shaped one first; the empty ones left out."""
    beside = _beside(group)
    if group.study is not None:
        made = [_study(group, beside)]
    elif _swells(group):
        made = [_gradual(group, beside), _severities(group)]
    else:
        made = [_main(group, beside)]
    others = (
        _rounds(group, beside),
        _per_class(group),
        _cost(group),
        _gap(group, beside),
        _forgetting(group),
        correlation_table(group),
    )
    return made + [table for table in others if table is not None]


def summary(group: Group) -> Table:
    """One table that says it all in little room: conditions, mean, gain, time, memory.

    For the terminal and for a README; `bestta.reports.table.terminal` leaves out what does not fit.
    """
    sketch: Sketch = []
    for name, figure in _conditions(group):
        sketch.append(_scores(group, Column(_words(name), spare=2), figure, spread=False))
    sketch.append(_mean(group))
    rivals = group.source is not None and len(group.entries) > 1
    if rivals:
        sketch.append((Column("Gain over source"), lambda entry: _gain_cell(group, entry)))
    sketch.append(_time(Column("Time (ms)")))
    sketch.append((Column("× plain", spare=1), _times_forward))
    sketch += [_memory(Column("Memory (MB)")), _trained(Column("Trained", spare=3))]
    notes = [
        f"{_direction(group)} Mean over all {len(group.blocks)} blocks"
        + (", gain in percentage points" if rivals else "")
        + "; time per image: median, and as a multiple of the plain model's forward on the same "
        "images in the same run; memory: peak over the model's own.",
        *_notes(group),
    ]
    return _table(group, "summary", group.title, sketch, [*notes, *_differences(group)])


# --- the paper's tables ---------------------------------------------------------------------


def _main(group: Group, beside: _Beside) -> Table:
    """Cost, then block after block, as the paper's first tables have it."""
    sketch = _costs_in_short()
    rounds = len(group.record["rounds"])
    picked = rounds_shown(rounds)
    one_each = len(group.blocks) == rounds
    for n, block in enumerate(group.blocks):
        if block["round"] not in picked:
            continue
        title, heading = _words(block["name"]), f"Round {block['round'] + 1}" if rounds > 1 else ""
        if one_each and rounds > 1:
            title, heading = heading, title
        sketch.append(_scores(group, Column(title, heading), block_score(n), spread=False))
    sketch += [_mean(group), *beside.mean_column()]
    notes = _main_notes(group, beside)
    if len(picked) < rounds:
        listed = ", ".join(str(number + 1) for number in picked)
        notes.insert(1, f"Of {rounds} rounds these are shown: {listed}.")
    return _table(group, "main", group.title, sketch, notes)


def _gradual(group: Group, beside: _Beside) -> Table:
    """A column for each corruption that swells and fades."""
    sketch = _costs_in_short()
    for name, figure in _conditions(group):
        sketch.append(_scores(group, Column(_words(name)), figure))
    sketch += [_mean(group), *beside.mean_column()]
    notes = _main_notes(group, beside)
    notes.insert(1, "A corruption's figure is the mean over its severities, up and down.")
    return _table(group, "main", group.title, sketch, notes)


def _severities(group: Group) -> Table:
    """Every block of a stream that swells and fades."""
    sketch: Sketch = []
    before = ("", 0)
    for n, block in enumerate(group.blocks):
        name, severity = _swelling(block["name"]) or (block["name"], 0)
        fades = name == before[0] and severity < before[1]
        before = (name, severity)
        column = Column(f"{severity} ↓" if fades else str(severity), _words(name))
        sketch.append(_scores(group, column, block_score(n), spread=False))
    sketch.append(_mean(group))
    notes = [
        f"{_direction(group)} Columns are severities, in the stream's order; ↓: it fades.",
        *_notes(group),
    ]
    return _table(group, "severities", f"{group.title}: every severity", sketch, notes)


def _study(group: Group, beside: _Beside) -> Table:
    """What is switched on or off in each row, and what comes of it."""
    names = dict.fromkeys(n for e in group.entries for n in (e.study.get("marks") or {}))
    above = _words(group.study or "") if len(names) > 1 else ""
    sketch: Sketch = [(Column(_words(name), above), _mark_of(name)) for name in names]
    for name, figure in _conditions(group):
        sketch.append(_scores(group, Column(_words(name), "Conditions"), figure, spread=False))
    rounds = len(group.record["rounds"])
    if rounds > 1:
        for number in rounds_shown(rounds):
            column = Column(str(number + 1), "Round")
            sketch.append(_scores(group, column, round_score(number), spread=False))
    sketch += [_mean(group), *beside.mean_column()]
    return _table(
        group, "main", group.title, sketch, _main_notes(group, beside, costs=False), first="Row"
    )


def _mark_of(name: str) -> Callable[[Entry], Cell]:
    return lambda entry: mark((entry.study.get("marks") or {}).get(name))


def rounds_shown(rounds: int) -> list[int]:
    """Four rounds at most: the first, the last and two between; of ten the paper's 1, 4, 7, 10.

    >>> rounds_shown(10), rounds_shown(3)
    ([0, 3, 6, 9], [0, 1, 2])
    """
    return list(range(rounds)) if rounds <= 4 else [round(n * (rounds - 1) / 3) for n in range(4)]


# --- the others -----------------------------------------------------------------------------


def _rounds(group: Group, beside: _Beside) -> Table | None:
    """Whether a method gains or falls apart over the rounds."""
    rounds = len(group.record["rounds"])
    if rounds < 2:
        return None
    sketch: Sketch = [
        _scores(group, Column(f"Round {number + 1}"), round_score(number))
        for number in range(rounds)
    ]
    sketch.append(_mean(group))
    printed = [
        number
        for number in range(1, rounds + 1)
        if any(beside.round_of(number)(entry) is not None for entry in group.entries)
    ]
    above = beside.heading()
    for number in printed:
        column = Column(f"Round {number}", above, published=True)
        sketch.append((column, _shown(beside.round_of(number))))
    notes = [f"{_direction(group)} Means over the blocks of each round.", *_notes(group)]
    notes += beside.notes(group) if printed else []
    return _table(group, "rounds", f"{group.title}: round by round", sketch, notes)


def _per_class(group: Group) -> Table | None:
    """Which classes gain and which lose."""
    names = list(group.record.get("classes") or [])
    if group.record["task"] != "segmentation" or not any(b.get("per_class") for b in group.blocks):
        return None
    sketch: Sketch = [
        _scores(group, Column(_words(name)), _class_score(n), spread=False)
        for n, name in enumerate(names)
    ]
    sketch.append(_mean(group))
    notes = [
        "IoU of each class in %, higher is better: the mean over the blocks in which it occurs. "
        f"Mean is that of the {len(group.blocks)} blocks' mIoU, as in the main table.",
        *_notes(group),
    ]
    return _table(group, "classes", f"{group.title}: class by class", sketch, notes)


def _class_score(number: int) -> Figure:
    def figure(record: dict[str, Any]) -> float | None:
        known = [
            score
            for block in record["blocks"]
            if number < len(block.get("per_class") or [])
            and (score := block["per_class"][number]) is not None
        ]
        return fmean(known) if known else None

    return figure


def _cost(group: Group) -> Table:
    """Time, memory and what is trained, in full."""
    sketch: Sketch = []
    parts = (("call_ms", "A call"), ("predict_ms", "Plain forward"), ("adapt_ms", "Adds"))
    for key, title in parts:
        for part in ("median", "p95"):
            sketch.append(_time(Column(f"{part} (ms)", title), key, part))
    if group.source is not None:
        sketch.append((Column("source's call", "×"), lambda entry: _times_source(group, entry)))
    sketch += [
        (Column("plain forward", "×"), _times_forward),
        (Column("peak (MB)", "Memory"), lambda entry: _mb(entry.mean(_cost_of("peak_bytes")))),
        _memory(Column("over the model (MB)", "Memory")),
        _trained(Column("trained", "Parameters")),
        (
            Column("of the model", "Parameters"),
            lambda entry: shown(entry.mean(lambda r: r["parameters"].get("model")), 0),
        ),
    ]
    timed = sorted({r.record["cost"].get("timed") for r in group.records} - {None})
    notes = [
        "Time per image. Plain forward: the source model alone on the same images, in the same "
        "run; adds: what the method needs beyond it. A ratio to the plain forward of the same run "
        "is surer than one between runs.",
        f"Timed on {_span(timed)} calls a run." if timed else "",
        *_memory_notes(group),
        *_notes(group, brief=False),
    ]
    return _table(group, "cost", f"{group.title}: time and memory", sketch, notes)


def _gap(group: Group, beside: _Beside) -> Table | None:
    """What each method gains over the source model, here and as published."""
    source = group.source
    base = beside.mean(source) if source is not None else None
    if source is None or base is None:
        return None
    others = [entry for entry in group.entries if entry is not source]
    entries = [entry for entry in others if beside.mean(entry) is not None]
    if not entries:
        return None
    sign = 1 if group.higher_is_better else -1

    def printed_gain(entry: Entry) -> float | None:
        return None if (mean := beside.mean(entry)) is None else sign * (mean - base)

    def difference(entry: Entry) -> float | None:
        here, there = gain(group, entry), printed_gain(entry)
        return None if here is None or there is None else here - there

    above = beside.heading()
    sketch: Sketch = [
        _scores(group, Column("mean", "measured"), lambda record: record.get("score")),
        (
            Column("gain", "measured", higher_is_better=True),
            lambda entry: _gain_cell(group, entry),
        ),
        (Column("mean", above, published=True), _shown(beside.mean)),
        (Column("gain", above, published=True), lambda entry: signed(printed_gain(entry))),
        (Column("measured − published", "gain"), lambda entry: signed(difference(entry))),
    ]
    notes = [
        f"Gain over the source model in percentage points of {group.metric}; positive is better. "
        f"The source model has {shown(source.score).text} here and {shown(base).text} there.",
        *_notes(group),
        *beside.notes(group),
        *beside.remarks(),
    ]
    title = f"{group.title}: gain over the source model, measured and published"
    return _table(group, "gap", title, sketch, notes, entries=entries)


def _forgetting(group: Group) -> Table | None:
    """What is left of the source model's score on source images."""
    entries = [entry for entry in group.entries if entry.record.get("source_scores")]
    if not entries:
        return None
    numbers = sorted({s["round"] for e in entries for s in e.record["source_scores"]})
    sketch: Sketch = []
    for number in numbers:
        column = Column(f"after round {number}") if number else Column("before")
        if number:
            sketch.append(_scores(group, column, _source_score(number)))
        else:
            # Nothing has been adapted yet: there is nothing to compare.
            sketch.append((column, lambda entry: shown(entry.mean(_source_score(0)))))
    if 0 in numbers and len(numbers) > 1:

        def change(record: dict[str, Any]) -> float | None:
            first, last = _source_score(0)(record), _source_score(numbers[-1])(record)
            return None if first is None or last is None else last - first

        sketch.append((Column("change"), lambda entry: signed(entry.mean(change))))
    notes = [
        f"{group.metric} in % on source images, before any adaptation and after each round of it.",
        *_notes(group),
    ]
    title = f"{group.title}: what is forgotten of the source"
    return _table(group, "forgetting", title, sketch, notes, entries=entries)


SIMILARITIES = {
    "direction": "Direction similarity",
    "target": "Target similarity",
    "source": "Source similarity",
    "entropy": "Entropy",
}


def correlation_table(group: Group) -> Table | None:
    """How similarities and entropy go with the score of a frame; None where none was traced.

    Every entry's first seed speaks for it: frames of several seeds are the same scenes.
    """
    beside = "correlations" in {r.record.get("published") for r in group.records}
    rows = []
    for entry in group.entries:
        record = entry.records[0].record
        if "direction" not in record["traces"]:
            continue
        for trace, found in correlations(record).items():
            marks = {"task": record["task"], "trace": trace}
            bound = _bound(marks) if beside else ""
            label = SIMILARITIES[trace]
            name = label if len(group.entries) == 1 else f"{entry.label}: {label.lower()}"
            cells = [shown(found.r, 2), shown(found.low, 2), shown(found.high, 2)]
            cells += [shown(found.n, 0), Cell(bound or MISSING)]
            rows.append(Row(name, tuple(cells), entry.starred))
    if not rows:
        return None
    columns = [Column("r"), Column("from", "95 %"), Column("to", "95 %"), Column("Frames")]
    columns.append(Column("published r", published=True))
    shares = [
        f"{100 * share:.1f} % of the target similarities of {entry.label} are above 0.9."
        for entry in group.entries
        if (share := share_above(entry.records[0].record, "target", 0.9)) is not None
    ]
    notes = [
        "Pearson's r of a frame's similarity (or entropy) with its own score, which here counts up "
        "where it is better; interval by Fisher's transformation.",
        *shares,
        *_notes(group),
    ]
    title = f"{group.title}: what goes with the score"
    return Table(
        f"{group.name}-correlation", title, tuple(columns), tuple(rows), _clean(notes), "Quantity"
    )


def _bound(marks: dict[str, str]) -> str:
    """What the paper prints of a correlation."""
    rows = published("correlations").rows
    return next((row.bound or "" for row in rows if row.marks == marks), "")


def _source_score(number: int) -> Figure:
    return lambda record: next(
        (s.get("score") for s in record.get("source_scores") or [] if s["round"] == number), None
    )


def _by_batch(groups: Sequence[Group]) -> list[Table]:
    """Methods against batch sizes, of groups that differ in nothing else."""
    alike: dict[str, list[Group]] = {}
    for group in groups:
        rest = {k: v for k, v in group.stream.items() if k not in ("key", "batch")}
        about = (group.protocol, group.study, group.metric, rest)
        alike.setdefault(json.dumps(about, sort_keys=True, default=str), []).append(group)
    made: list[Table] = []
    for members in alike.values():
        by_size = {_batch(group): group for group in sorted(members, key=_batch)}
        # Two groups of one batch size differ in something that only their key tells.
        if 1 < len(by_size) == len(members):
            made.append(_batches(by_size))
    names = [table.name for table in made]
    return [
        replace(table, name=f"{table.name}-{names[: n + 1].count(table.name)}")
        if names.count(table.name) > 1
        else table
        for n, table in enumerate(made)
    ]


def _batches(groups: dict[int, Group]) -> Table:
    rows: dict[tuple[str, str], dict[int, Entry]] = {}
    for size, group in groups.items():
        for entry in group.entries:
            rows.setdefault((entry.method, _row_label(group, entry)), {})[size] = entry
    first = next(iter(groups.values()))
    besides = [_beside(group) for group in groups.values()]
    beside = next((b for b in besides if b.has_batches()), _Beside(None, 1, ()))
    printed = [size for size in groups if beside.has_batches(size)]
    columns = [
        Column(str(s), "Batch size", higher_is_better=first.higher_is_better) for s in groups
    ]
    columns += [Column(str(s), f"{beside.heading()}, batch size", published=True) for s in printed]
    made = []
    for (_, label), entries in sorted(rows.items(), key=lambda row: place(_any(row[1]))):
        entry, nothing = _any(entries), shown(None)
        row = beside.row(entry)
        cells = [
            shown(entries[size].score, spread=entries[size].spread) if size in entries else nothing
            for size in groups
        ]
        cells += [shown(row.batches.get(size)) if row is not None else nothing for size in printed]
        highlighted = entry.highlighted and first.study is None
        made.append(Row(label, tuple(cells), entry.starred, highlighted))
    said = {size: [*_notes(group), *_differences(group)] for size, group in groups.items()}
    shared = [note for note in said[_batch(first)] if all(note in notes for notes in said.values())]
    notes = [f"{_direction(first)} Mean over all {len(first.blocks)} blocks.", *shared]
    for size, own in said.items():
        notes += [f"Batch size {size}: {note}" for note in own if note not in shared]
    notes += beside.notes(first) if printed else []
    record = first.record | {"stream": first.stream | {"batch": 1}}
    name, title = f"{name_of(record)}-by-batch", f"{title_of(record)}: by batch size"
    return ranked(Table(name, title, tuple(columns), tuple(made), _clean(notes)))


def _batch(group: Group) -> int:
    return int(group.stream.get("batch") or 1)


def _any(entries: Mapping[int, Entry]) -> Entry:
    return next(iter(entries.values()))


# --- columns --------------------------------------------------------------------------------


def _table(
    group: Group,
    name: str,
    title: str,
    sketch: Sketch,
    notes: Sequence[str],
    *,
    entries: Sequence[Entry] | None = None,
    first: str = "Method",
) -> Table:
    rows = [
        Row(
            _row_label(group, entry),
            tuple(make(entry) for _, make in sketch),
            entry.starred,
            # In a study every row is the project's own.
            entry.highlighted and group.study is None,
        )
        for entry in (group.entries if entries is None else entries)
    ]
    columns = tuple(column for column, _ in sketch)
    first = "Row" if group.study is not None else first
    full = f"{group.name}-{name}"
    return ranked(Table(full, title, columns, tuple(rows), _clean(notes), first))


def _row_label(group: Group, entry: Entry) -> str:
    """The method, or the letter of a study's row if there is one and no other has it."""
    row = entry.study.get("row")
    alone = sum(other.study.get("row") == row for other in group.entries) == 1
    return str(row) if row and alone else entry.label


def _scores(
    group: Group, column: Column, figure: Figure, *, spread: bool = True
) -> tuple[Column, Callable[[Entry], Cell]]:
    """A column of scores, compared in the metric's direction."""
    column = Column(
        column.title, column.group, higher_is_better=group.higher_is_better, spare=column.spare
    )
    return column, lambda entry: shown(
        entry.mean(figure), spread=entry.deviation(figure) if spread else None
    )


def _shown(figure: Callable[[Entry], float | None]) -> Callable[[Entry], Cell]:
    return lambda entry: shown(figure(entry))


def _mean(group: Group) -> tuple[Column, Callable[[Entry], Cell]]:
    return _scores(group, Column("Mean"), lambda record: record.get("score"))


def _costs_in_short() -> Sketch:
    return [
        _memory(Column("Memory (MB over the model)")),
        _time(Column("Time (ms)")),
        _trained(Column("Params trained")),
    ]


def _memory(column: Column) -> tuple[Column, Callable[[Entry], Cell]]:
    return column, lambda entry: _mb(entry.mean(_cost_of("over_model_bytes")))


def _time(
    column: Column, name: str = "call_ms", part: str = "median"
) -> tuple[Column, Callable[[Entry], Cell]]:
    return column, lambda entry: _ms(entry.mean(_cost_of(name, part)))


def _trained(column: Column) -> tuple[Column, Callable[[Entry], Cell]]:
    return column, lambda entry: shown(entry.mean(lambda r: r["parameters"].get("trained")), 0)


def _cost_of(name: str, part: str | None = None) -> Figure:
    def figure(record: dict[str, Any]) -> float | None:
        value = record["cost"].get(name)
        if part is not None:
            value = (value or {}).get(part)
        return None if value is None else float(value)

    return figure


def _mb(count: float | None) -> Cell:
    return shown(None) if count is None else shown(count / 1e6, 0)


def _ms(time_ms: float | None) -> Cell:
    return shown(time_ms, 1 if time_ms is None or time_ms < 100 else 0)


def gain(group: Group, entry: Entry) -> float | None:
    """How many percentage points better than the source model; None if that was not run."""
    source = group.source
    if source is None or source.score is None or entry.score is None:
        return None
    return entry.score - source.score if group.higher_is_better else source.score - entry.score


def _gain_cell(group: Group, entry: Entry) -> Cell:
    return shown(None) if entry is group.source else signed(gain(group, entry))


def _times_source(group: Group, entry: Entry) -> Cell:
    """Time of a call by that of the source's; missing where they ran on different machines."""
    source = group.source
    if source is None or _machines([source]) != _machines([entry]):
        return shown(None)
    return _ratio(
        entry.mean(_cost_of("call_ms", "median")), source.mean(_cost_of("call_ms", "median"))
    )


def _times_forward(entry: Entry) -> Cell:
    """Time of a call by that of the plain forward on the same image, in the same run."""
    measured = entry.mean(_cost_of("ratio"))
    if measured is not None:
        return shown(measured, 2)
    call, plain = _cost_of("call_ms", "median"), _cost_of("predict_ms", "median")
    return _ratio(entry.mean(call), entry.mean(plain))


def _ratio(part: float | None, whole: float | None) -> Cell:
    return shown(None) if part is None or not whole else shown(part / whole, 2)


# --- conditions -----------------------------------------------------------------------------


def _swelling(name: str) -> tuple[str, int] | None:
    """Corruption and severity of a block such as ``fog-3``."""
    found = re.fullmatch(r"(.+)-(\d+)", name)
    return (found[1], int(found[2])) if found else None


def _swells(group: Group) -> bool:
    """Whether the stream is a gradual one: each corruption in several severities."""
    parts = [_swelling(block["name"]) for block in group.blocks]
    known = [part for part in parts if part is not None]
    return len(known) == len(parts) and len(set(known)) > len({name for name, _ in known})


def _conditions(group: Group) -> list[tuple[str, Figure]]:
    """The conditions, each with the figure that is its mean over everything."""
    if not _swells(group):
        return [(name, condition_score(name)) for name in group.record["conditions"]]
    places: dict[str, list[int]] = {}
    for n, block in enumerate(group.blocks):
        name, _ = _swelling(block["name"]) or (block["name"], 0)
        places.setdefault(name, []).append(n)
    return [(name, _mean_of_blocks(which)) for name, which in places.items()]


def _mean_of_blocks(which: list[int]) -> Figure:
    def figure(record: dict[str, Any]) -> float | None:
        scores = [record["blocks"][n].get("score") for n in which]
        known = [score for score in scores if score is not None]
        return fmean(known) if known and len(known) == len(scores) else None

    return figure


def _words(name: str) -> str:
    return name.replace("_", " ")


# --- published figures ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Beside:
    """The published table that stands beside a group's figures, if there is one.

    Attributes:
        table: The published table.
        batch: The batch size of the group, for tables that have a figure for each.
        problems: Why there is none though the records name one.
    """

    table: Published | None
    batch: int
    problems: tuple[str, ...]

    def row(self, entry: Entry) -> PublishedRow | None:
        """The row that is the entry's: by marks or letter in a study, else by method."""
        if self.table is None:
            return None
        if not entry.study:
            rows = [row for row in self.table.rows if row.method == entry.method]
            return rows[0] if len(rows) == 1 else None
        marks, letter = entry.study.get("marks") or {}, entry.study.get("row")
        for row in self.table.rows:
            if row.marks and dict(row.marks) == marks:
                return row
        # The same study of another model: its layers have other names.
        same_length = [r for r in self.table.rows if len(r.marks) == len(marks)]
        return next((row for row in same_length if letter and row.row == letter), None)

    def mean(self, entry: Entry) -> float | None:
        """The mean of the entry's row, or that for the group's batch size."""
        if (row := self.row(entry)) is None:
            return None
        return row.mean if row.mean is not None else row.batches.get(self.batch)

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

    def mean_column(self) -> Sketch:
        """The published means, in a column of their own."""
        if self.table is None:
            return []
        column = Column(f"published mean ({self.about()})", published=True)
        return [(column, _shown(self.mean))]

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
                "its gains over the source may be compared, its levels not."
            )
        methods = [entry.method for entry in group.entries]
        twice = sorted({m for m in methods if methods.count(m) > 1})
        if twice and group.study is None:
            notes.append(
                f"The published figure of {', '.join(twice)} stands beside each of its variants; "
                "it is of the paper's settings."
            )
        return notes

    def remarks(self) -> list[str]:
        """What is to be known of the published figures themselves."""
        return [f"On what was published: {n}" for n in self.table.notes] if self.table else []


def _beside(group: Group) -> _Beside:
    batch = _batch(group)
    name = next((n for r in group.records if (n := r.record.get("published"))), None)
    if name is None:
        return _Beside(None, batch, ())
    try:
        table = published(name)
    except (ValueError, OSError) as error:
        return _Beside(None, batch, (f"No published figures: {error}",))
    if table.metric != group.metric:
        problem = f"No published figures: {name} is in {table.metric}, this is in {group.metric}."
        return _Beside(None, batch, (problem,))
    return _Beside(table, batch, ())


def _same_model(published_name: str, name: str) -> bool:
    """Whether two names of a model say the same, however they are spelt."""
    spelt = (n.lower().replace("+", "plus").replace(" with ", "") for n in (published_name, name))
    there, here = (re.sub(r"[^a-z0-9]", "", text) for text in spelt)
    return there == here


# --- notes ----------------------------------------------------------------------------------


def _clean(notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for note in notes if note))


def _direction(group: Group) -> str:
    return f"{group.metric} in %, {'higher' if group.higher_is_better else 'lower'} is better."


def _main_notes(group: Group, beside: _Beside, *, costs: bool = True) -> list[str]:
    notes = [
        f"{_direction(group)} Mean: arithmetic mean of all {len(group.blocks)} blocks. "
        "Best and second best are marked by the figures as they are shown."
    ]
    if costs:
        notes.append("Time: median of a call, per image. Time and memory are not ranked.")
        notes += _memory_notes(group)
    return [*notes, *_notes(group, brief=False), *beside.notes(group)]


def _notes(group: Group, *, brief: bool = True) -> list[str]:
    """What every table says: the stream, stars, seeds, what was left out, where it comes from."""
    notes = [_stream_note(group)]
    every = group.stream.get("every") or 1
    if every != 1:
        notes.append(
            f"Only every {ordinal(every)} frame of each block was adapted to and scored; figures "
            "compare only with others of that kind."
        )
    if any(entry.starred for entry in group.entries):
        notes.append("* was told when the domain changes; the other methods were not.")
    notes += _seed_notes(group)
    notes += _skipped_notes(group)
    notes += group.notes
    notes.append(_provenance_note(group, brief=brief))
    return notes if brief else [*notes, *_differences(group)]


def _stream_note(group: Group) -> str:
    stream, blocks = group.stream, group.blocks
    batch = stream.get("batch") or 1
    parts = [
        f"Model {stream.get('model') or 'unknown'} on {stream.get('set') or 'unknown data'}",
        size_text(stream.get("size")),
        f"severity {stream['severity']}" if stream.get("severity") is not None else "",
        "one image at a time" if batch == 1 else f"batches of {batch}",
        str(stream.get("precision") or ""),
    ]
    frames = [int(block.get("frames") or 0) for block in blocks]
    each = f", {_span(sorted(set(frames)))} each" if len(blocks) > 1 else ""
    many = f"{len(blocks)} blocks" if len(blocks) > 1 else "one block"
    return f"{', '.join(filter(None, parts))}; {sum(frames)} frames in {many}{each}."


def _seed_notes(group: Group) -> list[str]:
    by_seeds = _by(group, lambda entry: tuple(entry.seeds))
    if len(by_seeds) == 1:
        (seeds,) = by_seeds
        listed = _listed(seeds)
        if len(seeds) == 1:
            return [f"Seed {listed}."]
        return [
            f"Means over {len(seeds)} seeds ({listed}); ± is the sample standard deviation over "
            "them, given for means of several blocks."
        ]
    rows = "; ".join(
        f"{_listed(seeds)} ({', '.join(labels)})" for seeds, labels in by_seeds.items()
    )
    return [
        f"Seeds differ between rows: {rows}. Figures are means over a row's seeds, ± the sample "
        "standard deviation, given for means of several blocks."
    ]


def _skipped_notes(group: Group) -> list[str]:
    by_skipped = _by(
        group,
        lambda e: tuple(s.get("name") for r in e.records for s in r.record.get("skipped", ())),
    )
    return [
        f"Frames left out as unreadable ({', '.join(labels)}): {len(names)}, "
        f"{', '.join(map(str, names[:3]))}{' …' if len(names) > 3 else ''}."
        for names, labels in by_skipped.items()
        if names
    ]


def _memory_notes(group: Group) -> list[str]:
    kinds = {
        "process": "the peak of the process on the CPU",
        "cuda": "the peak that CUDA counts",
    }
    by_kind = _by(group, lambda entry: entry.record["cost"].get("memory"))
    known = {kind: labels for kind, labels in by_kind.items() if kind in kinds}
    if len(known) == 1:
        return [f"Memory is {kinds[next(iter(known))]}; 1 MB is a million bytes."]
    if known:
        rows = "; ".join(f"{kinds[kind]} ({', '.join(labels)})" for kind, labels in known.items())
        return [f"Memory is not the same thing in all rows, and does not compare: {rows}."]
    return []


def _provenance_note(group: Group, *, brief: bool) -> str:
    """Version, commit, libraries, machine, load and time, for all rows together."""
    origins = [loaded.record["provenance"] for loaded in group.records]
    versions = sorted({str(origin.get("bestta")) for origin in origins})
    commits = sorted({str(origin.get("commit") or "unknown") for origin in origins})
    text = f"bestta {', '.join(versions)}, commit {', '.join(commits)}"
    if brief:
        return f"{text}."
    libraries: dict[str, list[str]] = {}
    for origin in origins:
        for name, version in (origin.get("versions") or {}).items():
            libraries.setdefault(name, [])
            libraries[name] += [version] * (version not in libraries[name])
    text += "".join(f", {name} {' and '.join(found)}" for name, found in libraries.items())
    machines = sorted(_machines(group.entries))
    costs = [loaded.record["cost"] for loaded in group.records]
    loads = [load for cost in costs for load in cost.get("load") or () if load is not None]
    days = [str(cost[k])[:10] for cost in costs for k in ("started", "finished") if cost.get(k)]
    text += f"; {' and '.join(machines)}"
    text += f", load {_span(sorted(loads))}" if loads else ""
    text += f"; {_span(sorted(set(days)), ' to ')}" if days else ""
    return f"{text}."


def _differences(group: Group) -> list[str]:
    """In what the origins of the rows differ, and what does not compare for it."""
    notes = []
    commits = _by(group, lambda e: _listed({_commit(r.record) for r in e.records}))
    if len(commits) > 1:
        rows = "; ".join(f"{commit} ({', '.join(labels)})" for commit, labels in commits.items())
        notes.append(f"The rows come from different commits: {rows}.")
    elif len({_commit(r.record) for r in group.records}) > 1:
        notes.append(f"The seeds come from different commits: {next(iter(commits))}.")
    dirty = [
        entry.label
        for entry in group.entries
        if any(_commit(r.record).endswith("-dirty") for r in entry.records)
    ]
    if dirty:
        notes.append(f"Run with uncommitted changes, which no commit tells: {', '.join(dirty)}.")
    machines = _by(group, lambda entry: " and ".join(sorted(_machines([entry]))))
    if len(_machines(group.entries)) > 1:
        rows = "; ".join(f"{machine}: {', '.join(labels)}" for machine, labels in machines.items())
        notes.append(f"The machines differ, so times and memory of these do not compare ({rows}).")
    versions = _by(group, lambda e: _listed({_versions(r.record) for r in e.records}))
    if len(versions) > 1:
        rows = "; ".join(f"{which}: {', '.join(labels)}" for which, labels in versions.items())
        notes.append(f"The libraries differ ({rows}).")
    return notes


def _commit(record: Mapping[str, Any]) -> str:
    return str(record["provenance"].get("commit") or "unknown")


def _versions(record: Mapping[str, Any]) -> str:
    versions = record["provenance"].get("versions") or {}
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _machines(entries: Iterable[Entry]) -> set[str]:
    """The machines that the entries ran on, each in words."""
    found = set()
    for entry in entries:
        for loaded in entry.records:
            machine = loaded.record["provenance"].get("machine") or {}
            counts = [
                f"{machine[key]} {key if machine[key] != 1 else key[:-1]}"
                for key in ("cores", "threads")
                if machine.get(key) is not None
            ]
            known = {"cpu", "processor", "cores", "threads"}
            more = [f"{key} {value}" for key, value in sorted(machine.items()) if key not in known]
            inside = ", ".join(filter(None, (machine.get("processor"), *counts, *more)))
            found.add(f"{machine.get('cpu') or 'unknown machine'} ({inside})")
    return found


def _by(group: Group, key: Callable[[Entry], Any]) -> dict[Any, list[str]]:
    """The labels of the entries, by what ``key`` makes of them."""
    found: dict[Any, list[str]] = {}
    for entry in group.entries:
        found.setdefault(key(entry), []).append(_row_label(group, entry))
    return found


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


def _span(values: Sequence[Any], joint: str = "–") -> str:
    """The first of sorted values, and the last if it is another."""
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}{joint}{values[-1]}"
