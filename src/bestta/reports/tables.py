"""The tables of a report: shaped like the paper's, published figures beside the measured ones.

Every table is of one group of records that compare, except that by batch size, which puts groups
side by side that differ in nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from bestta.reports.beside import Beside, batch_of, beside_of, bound_of, has_similarities
from bestta.reports.comparable import (
    alike,
    is_looked_at,
    other_images,
    source_images,
    thinned,
)
from bestta.reports.correlation import correlations, correlations_within, share_above
from bestta.reports.notes import (
    all_blocks,
    clean,
    differences,
    direction,
    looked_notes,
    machines_of,
    main_notes,
    memory_notes,
    notes_of,
    span,
)
from bestta.reports.records import (
    Entry,
    Group,
    block_score,
    condition_score,
    marks_in_words,
    name_of,
    place,
    round_score,
    title_of,
    words,
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
    beside = beside_of(group)
    if group.study is not None:
        made = [_study(group, beside)]
    else:
        made = [_gradual(group, beside) if _swells(group) else _main(group, beside)]
    if _swells(group):
        made.append(_severities(group))
    others = (
        _rounds(group, beside),
        _per_class(group),
        _cost(group),
        _gap(group, beside),
        forgetting_table(group),
        distance_table(group),
        correlation_table(group),
    )
    return made + [table for table in others if table is not None]


def summary(group: Group) -> Table:
    """One table that says it all in little room: conditions, mean, gain, time, memory.

    For the terminal and for a README; `bestta.reports.table.terminal` leaves out what does not fit.
    """
    sketch: Sketch = []
    for name, figure in _conditions(group):
        sketch.append(_scores(group, Column(words(name), spare=2), figure, spread=False))
    sketch.append(_mean(group))
    rivals = group.source is not None and len(group.entries) > 1
    if rivals:
        sketch.append((Column("Gain over source"), lambda entry: _gain_cell(group, entry)))
    sketch.append(_time(Column("Time (ms)")))
    sketch.append((Column("× plain", spare=1), _times_forward))
    sketch += [_memory(Column("Memory (MB)")), _trained(Column("Trained", spare=3))]
    notes = [
        f"{direction(group)} Mean over {all_blocks(group)}"
        + (", gain in percentage points" if rivals else "")
        + "; time per image: median, and as a multiple of the plain model's forward on the same "
        "images in the same run; memory: peak over the model's own.",
        *looked_notes(group),
        *notes_of(group),
    ]
    table = _table(group, "summary", group.title, sketch, [*notes, *differences(group)])
    rows = [
        replace(row, label=_spelt_out(row.label, entry))
        for row, entry in zip(table.rows, group.entries, strict=True)
    ]
    return replace(table, rows=tuple(rows))


def _spelt_out(label: str, entry: Entry) -> str:
    """A row's letter with what is on in it: there are no columns of marks to tell it by."""
    marks = entry.study.get("marks")
    lettered = label == entry.study.get("row") and re.fullmatch(r"\(?[a-z]\)?", label)
    return f"{label} {marks_in_words(marks)}" if lettered and marks else label


# --- the paper's tables ---------------------------------------------------------------------


def _main(group: Group, beside: Beside) -> Table:
    """Cost, then block after block, as the paper's first tables have it."""
    sketch = _costs_in_short()
    rounds = len(group.record["rounds"])
    picked = rounds_shown(rounds)
    one_each = len(group.blocks) == rounds
    for n, block in enumerate(group.blocks):
        if block["round"] not in picked:
            continue
        title, heading = words(block["name"]), f"Round {block['round'] + 1}" if rounds > 1 else ""
        if one_each and rounds > 1:
            title, heading = heading, title
        sketch.append(_scores(group, Column(title, heading), block_score(n), spread=False))
    sketch += [_mean(group), *_published_mean(beside)]
    notes = main_notes(group, beside.notes(group))
    if len(picked) < rounds:
        listed = ", ".join(str(number + 1) for number in picked)
        notes.insert(1, f"Of {rounds} rounds these are shown: {listed}.")
    return _table(group, "main", group.title, sketch, notes)


def _gradual(group: Group, beside: Beside) -> Table:
    """A column for each corruption that swells and fades."""
    sketch = _costs_in_short()
    for name, figure in _conditions(group):
        sketch.append(_scores(group, Column(words(name)), figure))
    sketch += [_mean(group), *_published_mean(beside)]
    notes = main_notes(group, beside.notes(group))
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
        column = Column(f"{severity} ↓" if fades else str(severity), words(name))
        sketch.append(_scores(group, column, block_score(n), spread=False))
    sketch.append(_mean(group))
    notes = [
        f"{direction(group)} Columns are severities, in the stream's order; ↓: it fades.",
        *notes_of(group),
    ]
    return _table(group, "severities", f"{group.title}: every severity", sketch, notes)


def _study(group: Group, beside: Beside) -> Table:
    """What is switched on or off in each row, and what comes of it."""
    names = dict.fromkeys(n for e in group.entries for n in (e.study.get("marks") or {}))
    above = words(group.study or "") if len(names) > 1 else ""
    sketch: Sketch = [(Column(words(name), above), _mark_of(name)) for name in names]
    for name, figure in _conditions(group):
        sketch.append(_scores(group, Column(words(name), "Conditions"), figure, spread=False))
    rounds = len(group.record["rounds"])
    if rounds > 1:
        for number in rounds_shown(rounds):
            column = Column(str(number + 1), "Round")
            sketch.append(_scores(group, column, round_score(number), spread=False))
    sketch += [_mean(group), *_published_mean(beside)]
    notes = main_notes(group, beside.notes(group), costs=False)
    return _table(group, "main", group.title, sketch, notes)


def _mark_of(name: str) -> Callable[[Entry], Cell]:
    return lambda entry: mark((entry.study.get("marks") or {}).get(name))


def rounds_shown(rounds: int) -> list[int]:
    """Four rounds at most: the first, the last and two between; of ten the paper's 1, 4, 7, 10.

    >>> rounds_shown(10), rounds_shown(3)
    ([0, 3, 6, 9], [0, 1, 2])
    """
    return list(range(rounds)) if rounds <= 4 else [round(n * (rounds - 1) / 3) for n in range(4)]


# --- the others -----------------------------------------------------------------------------


def _rounds(group: Group, beside: Beside) -> Table | None:
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
    notes = [f"{direction(group)} Means over the blocks of each round.", *notes_of(group)]
    notes += beside.notes(group) if printed else []
    return _table(group, "rounds", f"{group.title}: round by round", sketch, notes)


def _per_class(group: Group) -> Table | None:
    """Which classes gain and which lose."""
    names = list(group.record.get("classes") or [])
    if not any(block.get("per_class") for r in group.records for block in r.record["blocks"]):
        return None
    sketch: Sketch = [
        _scores(group, Column(words(name)), _class_score(n), spread=False)
        for n, name in enumerate(names)
    ]
    sketch.append(_mean(group))
    way = "higher" if group.higher_is_better else "lower"
    segments = group.record["task"] == "segmentation"
    what = "IoU of each class" if segments else "Error among the images of each class"
    notes = [
        f"{what} in %, {way} is better: the mean over the blocks in which it occurs. "
        f"Mean is that of the {group.metric} of {all_blocks(group)}, as in the main table.",
        *notes_of(group),
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
        (Column("plain forward, mean", "×"), _times_forward_in_the_mean),
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
        "is surer than one between runs; in the mean, what is done on few images counts, too."
        + _of_sampled_calls(group),
        f"Plain forwards timed on {span([f'{count:,}' for count in timed])} images a run."
        if timed
        else "",
        *looked_notes(group),
        *memory_notes(group),
        *notes_of(group, brief=False),
    ]
    return _table(group, "cost", f"{group.title}: time and memory", sketch, notes)


def _gap(group: Group, beside: Beside) -> Table | None:
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
        *notes_of(group),
        *beside.notes(group),
        *beside.remarks(),
    ]
    title = f"{group.title}: gain over the source model, measured and published"
    return _table(group, "gap", title, sketch, notes, entries=entries)


def forgetting_table(group: Group) -> Table | None:
    """What is left of the source model's score on source images; None where none was asked."""
    told = (entry for entry in group.entries if entry.record.get("source_scores"))
    entries, left = alike(told, source_images)
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
        _source_note(entries[0]),
        other_images(left),
        *notes_of(group),
    ]
    title = f"{group.title}: what is forgotten of the source"
    return _table(group, "forgetting", title, sketch, notes, entries=entries)


def _source_note(entry: Entry) -> str:
    """Which source images were scored, where the record says so."""
    about = entry.record.get("source_set") or {}
    parts = [str(about[key]) for key in ("set", "split") if about.get(key)]
    if about.get("images") is None:
        return ""
    where = f" ({', '.join(parts)})" if parts else ""
    return f"{about['images']:,} source images{where}."


def distance_table(group: Group) -> Table | None:
    """How far embeddings lie from the source's, without and with adaptation; None without any."""
    told = (entry for entry in group.entries if _conditions_away(entry))
    here, left = alike(told, source_images)
    entries, elsewhere = alike(here, _layer_of)
    if not entries:
        return None
    names = list(dict.fromkeys(name for entry in entries for name in _conditions_away(entry)))
    sketch: Sketch = []
    for name in names:
        for column, kind in _DISTANCES:
            # Of many conditions a terminal has room for the mean alone.
            spare = column.spare if len(names) > 1 else 0
            column = replace(column, group=words(name), spare=spare)
            sketch.append(_distance(column, kind, [name]))
    if len(names) > 1:
        sketch += [
            _distance(replace(column, group="Mean", spare=0), kind, names)
            for column, kind in _DISTANCES
        ]
    others = ", ".join(f"{entry.label} ({_layer_of(entry.record)})" for entry in elsewhere)
    notes = [
        f"Distance of the embeddings at {_layer_of(entries[0].record)} from those of source "
        "images: |mean − source mean| in source deviations, averaged over all channels; lower is "
        "better. Before: the images without adaptation; after: what the method made of them.",
        _source_note(entries[0]),
        other_images(left),
        f"Left out, for embeddings of other layers do not compare: {others}." if others else "",
        *notes_of(group),
    ]
    title = f"{group.title}: distance of the embeddings"
    return _table(group, "distances", title, sketch, notes, entries=entries)


_DISTANCES = (
    (Column("before", spare=2), "target"),
    (Column("after", higher_is_better=False, spare=1), "adapted"),
)
"""The columns of a condition, and what a record calls what they hold."""


def _distance(
    column: Column, kind: str, names: Sequence[str]
) -> tuple[Column, Callable[[Entry], Cell]]:
    """A column of mean distances over the conditions ``names``."""

    def figure(record: dict[str, Any]) -> float | None:
        found = _distances_of(record).get(kind) or {}
        known = [value for name in names if (value := found.get(name)) is not None]
        return fmean(known) if len(known) == len(names) else None

    return column, lambda entry: shown(entry.mean(figure), 2, entry.deviation(figure))


def _distances_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return (record.get("embeddings") or {}).get("distance") or {}


def _conditions_away(entry: Entry) -> list[str]:
    """The conditions of which distances are there."""
    found = _distances_of(entry.record)
    return list(dict.fromkeys(n for _, kind in _DISTANCES for n in found.get(kind) or {}))


def _layer_of(record: Mapping[str, Any]) -> str:
    return str((record.get("embeddings") or {}).get("layer") or "an unnamed layer")


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
        if not has_similarities(entry):
            continue
        within = correlations_within(record)
        for trace, found in correlations(record).items():
            bound = bound_of(record["task"], trace) if beside else ""
            label = SIMILARITIES[trace]
            name = label if len(group.entries) == 1 else f"{entry.label}: {label.lower()}"
            cells = [shown(found.r, 2), shown(found.low, 2), shown(found.high, 2)]
            cells += [shown(found.n, 0), shown(within.get(trace), 2), Cell(bound or MISSING)]
            rows.append(Row(name, tuple(cells), entry.starred))
    if not rows:
        return None
    columns = [Column("r"), Column("from", "95 %"), Column("to", "95 %"), Column("Frames")]
    columns += [Column("r within blocks"), Column("published r", published=True)]
    shares = [
        f"{100 * share:.1f} % of the target similarities of {entry.label} are above 0.9."
        for entry in group.entries
        if (share := share_above(entry.records[0].record, "target", 0.9)) is not None
    ]
    notes = [
        "Pearson's r of a frame's similarity (or entropy) with its own score, which here counts up "
        "where it is better; interval by Fisher's transformation. Within blocks: without what "
        "tells one condition from another.",
        *shares,
        *thinned(filter(has_similarities, group.entries)),
        *notes_of(group),
    ]
    title = f"{group.title}: what goes with the score"
    return Table(
        f"{group.name}-correlation", title, tuple(columns), tuple(rows), clean(notes), "Quantity"
    )


def _source_score(number: int) -> Figure:
    return lambda record: next(
        (s.get("score") for s in record.get("source_scores") or [] if s["round"] == number), None
    )


def _by_batch(groups: Sequence[Group]) -> list[Table]:
    """Methods against batch sizes, of groups that differ in nothing else."""
    members_of: dict[str, list[Group]] = {}
    for group in groups:
        rest = {k: v for k, v in group.stream.items() if k not in ("key", "batch")}
        about = (group.protocol, group.study, group.metric, rest)
        members_of.setdefault(json.dumps(about, sort_keys=True, default=str), []).append(group)
    made: list[Table] = []
    for members in members_of.values():
        by_size = {batch_of(group): group for group in sorted(members, key=batch_of)}
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
            rows.setdefault((entry.method, group.label_of(entry)), {})[size] = entry
    first = next(iter(groups.values()))
    besides = [beside_of(group) for group in groups.values()]
    beside = next((b for b in besides if b.has_batches()), Beside(None, 1))
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
        highlighted = entry.highlighted and not first.is_ablation
        made.append(Row(label, tuple(cells), entry.starred, highlighted))
    said = {size: [*notes_of(group), *differences(group)] for size, group in groups.items()}
    shared = [
        note for note in said[batch_of(first)] if all(note in notes for notes in said.values())
    ]
    notes = [f"{direction(first)} Mean over {all_blocks(first)}.", *shared]
    for size, own in said.items():
        notes += [f"Batch size {size}: {note}" for note in own if note not in shared]
    notes += beside.notes(first) if printed else []
    record = first.record | {"stream": first.stream | {"batch": 1}}
    name, title = f"{name_of(record)}-by-batch", f"{title_of(record)}: by batch size"
    return ranked(Table(name, title, tuple(columns), tuple(made), clean(notes)))


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
) -> Table:
    rows = [
        Row(
            group.label_of(entry),
            tuple(make(entry) for _, make in sketch),
            entry.starred,
            # In an ablation every row is the project's own.
            entry.highlighted and not group.is_ablation,
        )
        for entry in (group.entries if entries is None else entries)
    ]
    columns = tuple(column for column, _ in sketch)
    first = "Row" if group.is_ablation else "Method"
    full = f"{group.name}-{name}"
    return ranked(Table(full, title, columns, tuple(rows), clean(notes), first))


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


def _published_mean(beside: Beside) -> Sketch:
    """The published means, in a column of their own; none where there are none."""
    if beside.table is None:
        return []
    column = Column(f"published mean ({beside.about()})", published=True)
    return [(column, _shown(beside.mean))]


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
    """How many percentage points better than the source model, over the seeds both have."""
    source = group.source
    if source is None:
        return None
    return entry.lead(source, higher_is_better=group.higher_is_better)


def _gain_cell(group: Group, entry: Entry) -> Cell:
    return shown(None) if entry is group.source else signed(gain(group, entry))


def _times_source(group: Group, entry: Entry) -> Cell:
    """Time of a call by that of the source's; missing where the two do not compare."""
    source = group.source
    if source is None or machines_of([source]) != machines_of([entry]):
        return shown(None)
    if is_looked_at(source.record) != is_looked_at(entry.record):
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


def _times_forward_in_the_mean(entry: Entry) -> Cell:
    """The mean time of all calls by that of plain forwards, or what older records have of it."""
    if not _has_mean_times(entry):
        return shown(entry.mean(_cost_of("mean_ratio")), 2)
    return _ratio(*(entry.mean(_cost_of(name, "mean")) for name in ("call_ms", "predict_ms")))


def _has_mean_times(entry: Entry) -> bool:
    return entry.mean(_cost_of("call_ms", "mean")) is not None


def _of_sampled_calls(group: Group) -> str:
    """Which means are of another kind."""
    older = [
        e.label
        for e in group.entries
        if not _has_mean_times(e) and e.mean(_cost_of("mean_ratio")) is not None
    ]
    if not older:
        return ""
    return (
        f" For {', '.join(older)} it is the mean of sampled images' ratios, which noise makes a "
        "little larger."
    )


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
