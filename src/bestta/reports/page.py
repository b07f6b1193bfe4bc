"""One page that tells what records hold: words, tables, figures, pictures, all in one file.

    write_report(["results/streets"], "report")

The page carries its style, script, drawings and pictures, and asks nothing of any network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bestta.reports import figures_inside, figures_scores, pictures
from bestta.reports.comparable import machine_of
from bestta.reports.figures import Figure, Shown, megabytes, styles
from bestta.reports.headline import headline, study_headline
from bestta.reports.notes import bound
from bestta.reports.records import OWN, Entry, Group, groups, ordinal, read_records, size_text
from bestta.reports.svg import Style, escape
from bestta.reports.table import Cell, Column, Row, Table
from bestta.reports.tables import tables, tables_of

TITLE = "Test-time adaptation, measured"
MOST_VARIANTS = 8
"""Variants of one method that can be told apart where each is a line."""

MOST_BEFORE_MEAN = 12
"""Columns of scores that the page shows before their mean."""

FORMATS = (("md", "Markdown"), ("csv", "CSV"), ("tex", "LaTeX"))


def write_report(
    paths: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> list[Path]:
    """Write ``report.html`` and its tables as Markdown, CSV and LaTeX.

    Args:
        paths: Records, or folders that hold some.
        out: The folder to write to; made if it is not there.
        title: What stands at the top of the page.

    Returns:
        The files written, the page first.
    """
    found = groups(read_records([Path(path) for path in paths]))
    folder = Path(out)
    every = tables(found)
    page = folder / "report.html"
    _write(page, render(found, title=title))
    written = [page]
    for table, name in zip(every, _file_names(every), strict=True):
        for ending, _ in FORMATS:
            path = folder / "tables" / f"{name}.{ending}"
            _write(path, _written(table, ending))
            written.append(path)
    return written


def _write(path: Path, text: str) -> None:
    """Write ``text`` in one move: whoever looks finds the old file or the new one.

    Nothing is forced to disk: what a power cut takes can be made again from the records.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Half of a surrogate pair, which JSON can hold, is no text; it is shown as "?".
        unfinished.write_bytes(text.encode("utf-8", "replace"))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _file_names(every: Sequence[Table]) -> list[str]:
    """A file name for each table: its own, in plain letters, with a number where two agree."""
    names: list[str] = []
    for table in every:
        base = _slug(table.name) or "table"
        name, n = base, 2
        while name in names:
            name, n = f"{base}-{n}", n + 1
        names.append(name)
    return names


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:100]


def _written(table: Table, ending: str) -> str:
    return {"md": table.markdown, "csv": table.csv, "tex": table.latex}[ending]()


# --- the page -------------------------------------------------------------------------------


def render(found: Sequence[Group], *, title: str | None = None) -> str:
    """The page of these groups, as HTML."""
    looks = _looks(found)
    counter = _Counter()
    sections = [_section(group, n, looks, counter) for n, group in enumerate(found)]
    own = {table.name for group in found for table in tables_of(group)}
    across = [table for table in tables(found) if table.name not in own]
    if across:
        inside = "".join(table_html(table) for table in across)
        sections.append(f'<section id="across"><h2>Across streams</h2>{inside}</section>')
    heading = title or TITLE
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    return (
        head(heading, style, policy)
        + f"<body><header><h1>{escape(heading)}</h1>{_overview(found)}{_contents(found, across)}"
        f"</header>\n<main>{''.join(sections)}</main>\n"
        f"<footer>{_versions(found)}</footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _looks(found: Sequence[Group]) -> dict[str, Style]:
    """A style for each label of the page; the strong one is not for a variant in an ablation."""
    first = sorted(found, key=lambda group: group.is_ablation)
    compared = [group for group in found if not group.is_ablation]
    own = {entry.label for group in compared for entry in group.entries if entry.highlighted}

    def is_variant(entry: Entry) -> bool:
        return entry.method == OWN and entry.label not in own

    return styles(
        (entry.label, "" if group.is_ablation or is_variant(entry) else entry.method)
        for group in first
        for entry in group.entries
    )


class _Counter:
    """Numbers the figures of a page."""

    def __init__(self) -> None:
        self.figures = 0

    def next(self) -> int:
        self.figures += 1
        return self.figures


def _asset(name: str) -> str:
    return (files("bestta.reports") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """What a Content-Security-Policy knows inline text by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _overview(found: Sequence[Group]) -> str:
    runs = sum(len(group.records) for group in found)
    streams = f"{len(found)} groups of runs that compare" if len(found) > 1 else "one stream"
    return (
        f'<p class="overview">{runs} run{"s" * (runs != 1)} on {streams}. Every figure on this '
        "page was measured, but for columns that say <q>published</q>.</p>"
    )


def _contents(found: Sequence[Group], across: Sequence[Table]) -> str:
    if len(found) < 2:
        return ""
    items = [
        f'<li><a href="#group-{n}">{escape(group.title)}</a></li>' for n, group in enumerate(found)
    ]
    if across:
        items.append('<li><a href="#across">Across streams</a></li>')
    return f'<nav aria-label="Contents"><ol>{"".join(items)}</ol></nav>'


def _versions(found: Sequence[Group]) -> str:
    versions = {
        str(loaded.record["provenance"].get("bestta", "?"))
        for group in found
        for loaded in group.records
    }
    return f"<p>Made from records of bestta {escape(', '.join(sorted(versions)))}.</p>"


def _section(group: Group, number: int, looks: Mapping[str, Style], counter: _Counter) -> str:
    shown = [Shown(entry, looks[entry.label]) for entry in group.entries]
    made = tables_of(group)
    words = study_headline(shown) if group.study else headline(shown)
    parts = [
        f'<section id="group-{number}"><h2>{escape(group.title)}</h2>',
        f'<div class="headline"><p class="lead">{escape(words[0])}</p>',
        f"<p>{escape(' '.join(words[1:]))}</p></div>" if words[1:] else "</div>",
        _facts(group),
        "".join(f'<p class="note">{escape(note)}</p>' for note in group.notes),
    ]
    # Their titles begin as the section's does, which stands above them already.
    parts += [table_html(table, titled=False) for table in made[:1]]
    for figure in _figures(group, shown):
        parts.append(_figure(figure, f"group-{number}-{figure.name}", counter.next()))
    if made[1:]:
        parts.append("<h3>More tables</h3>")
        parts += [
            f"<details><summary>{escape(_short_title(table, group))}</summary>"
            f"{table_html(table, titled=False)}</details>"
            for table in made[1:]
        ]
    parts += [_provenance(shown), "</section>"]
    return "\n".join(part for part in parts if part)


def _short_title(table: Table, group: Group) -> str:
    short = table.title.removeprefix(f"{group.title}: ")
    return short[:1].upper() + short[1:]


def _figures(group: Group, shown: Sequence[Shown]) -> list[Figure]:
    """The figures that the records of a group have the data for, in the order of the page."""
    # A line, a disc or a row of pictures each: too many variants of one method look alike.
    if group.is_ablation and len(shown) > MOST_VARIANTS:
        made = [figures_scores.study(shown), figures_scores.forgetting(shown)]
    else:
        made = [
            figures_scores.study(shown) if group.study else None,
            figures_scores.over_time(shown),
            figures_scores.bubbles(shown),
            pictures.conditions_grid(shown),
            pictures.worst_frames(shown),
            figures_scores.forgetting(shown),
            figures_inside.traces(shown),
        ]
    made += [
        figures_inside.correlation_plots(shown),
        figures_inside.distances(shown),
        figures_inside.embeddings(shown),
    ]
    return [figure for figure in made if figure is not None]


def _figure(figure: Figure, name: str, number: int) -> str:
    return (
        f'<figure id="{escape(name)}" class="{escape(figure.name)}">'
        f"<h3>{escape(figure.heading)}</h3>"
        f"{figure.body}<figcaption><b>Figure {number}.</b> {escape(bound(figure.caption))}"
        "</figcaption></figure>"
    )


def _facts(group: Group) -> str:
    """What the stream was, at a glance."""
    stream = group.stream
    batch = stream.get("batch") or 1
    every = stream.get("every") or 1
    frames = stream.get("frames")
    frames = f"{frames:,}" if isinstance(frames, int) else frames
    facts = [
        ("protocol", group.protocol),
        ("model", stream.get("model")),
        ("data", stream.get("set")),
        ("size", size_text(stream.get("size"))),
        ("blocks", len(group.blocks)),
        (
            "frames",
            f"{frames} (every {ordinal(every)} frame of each block)" if every > 1 else frames,
        ),
        ("at a time", "one image" if batch == 1 else f"{batch} images"),
        ("severity", stream.get("severity")),
        ("precision", stream.get("precision")),
    ]
    items = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts
        if value not in (None, "")
    ]
    return f'<dl class="facts">{"".join(items)}</dl>'


# --- tables ---------------------------------------------------------------------------------


def table_html(table: Table, *, titled: bool = True) -> str:
    """A table that scrolls inside itself, sorts where scripts run, and can be taken along."""
    name = _slug(table.name) or "table"
    seen = _mean_in_sight(table)
    caption = escape(table.title)
    hidden = "" if titled else ' class="hidden"'
    # For print, where nothing scrolls.
    many = " many" if len(table.columns) > 17 else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    links = "".join(
        f'<a class="take" download="{name}.{ending}" '
        f'href="data:text/plain;charset=utf-8,{quote(_written(table, ending), errors="replace")}">'
        f"{kind}</a>"
        for ending, kind in FORMATS
    )
    return (
        f'<div class="table"><div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
        f'<table class="numbers{many}"><caption{hidden}>{caption}</caption>'
        f"<thead>{_head(seen)}</thead>"
        f"<tbody>{''.join(_row(row, seen.columns) for row in seen.rows)}</tbody></table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + f'<p class="takes">Take this table: {links}</p></div>'
    )


def _mean_in_sight(table: Table) -> Table:
    """The table, its mean before the scores where these are so many that one scrolls to it."""
    scores = [n for n, column in enumerate(table.columns) if column.higher_is_better is not None]
    mean = next((n for n in scores if table.columns[n].heading == "Mean"), None)
    if mean is None or len(scores) - 1 <= MOST_BEFORE_MEAN:
        return table
    order = [n for n in range(len(table.columns)) if n != mean]
    order.insert(order.index(next(n for n in scores if n != mean)), mean)
    rows = [replace(row, cells=tuple(row.cells[n] for n in order)) for row in table.rows]
    columns = tuple(table.columns[n] for n in order)
    return replace(table, columns=columns, rows=tuple(rows))


def _head(table: Table) -> str:
    grouped = any(column.group for column in table.columns)
    first = f'<th scope="col" data-sort="text"{" rowspan=2" * grouped}>{escape(table.first)}</th>'
    top, below = [first], []
    n = 0
    while n < len(table.columns):
        column = table.columns[n]
        size = 1
        while (
            column.group
            and n + size < len(table.columns)
            and (table.columns[n + size].group == column.group)
        ):
            size += 1
        if column.group:
            top.append(
                f'<th scope="colgroup" colspan="{size}" class="group">{escape(column.group)}</th>'
            )
            below += [_heading(c, "") for c in table.columns[n : n + size]]
            below[-size] = below[-size].replace('class="', 'class="begins ', 1)
        else:
            top.append(_heading(column, ' rowspan="2"' * grouped))
        n += size
    rows = f"<tr>{''.join(top)}</tr>"
    return rows + (f"<tr>{''.join(below)}</tr>" if grouped else "")


def _heading(column: Column, span: str) -> str:
    way = {True: "up", False: "down", None: ""}[column.higher_is_better]
    classes = "number" + (" published" if column.published else "")
    return (
        f'<th scope="col" class="{classes}" data-sort="number" data-better="{way}"{span}>'
        f"{escape(column.title)}</th>"
    )


def _row(row: Row, columns: Sequence[Column]) -> str:
    star = '<span class="star" title="told of domain changes">*</span>' if row.starred else ""
    cells = []
    before = ""
    for cell, column in zip(row.cells, columns, strict=True):
        cells.append(_cell(cell, column, begins=bool(column.group) and column.group != before))
        before = column.group
    mark = ' class="ours"' if row.highlighted else ""
    long = ' class="long"' if len(row.label) > 20 else ""
    return f'<tr{mark}><th scope="row"{long}>{escape(row.label)}{star}</th>{"".join(cells)}</tr>'


def _cell(cell: Cell, column: Column, *, begins: bool) -> str:
    classes = [
        *(["published"] if column.published else []),
        *(["begins"] if begins else []),
        *{1: ["best"], 2: ["second"]}.get(cell.rank, []),
    ]
    text = escape(cell.text)
    text = {1: f"<b>{text}</b>", 2: f"<u>{text}</u>"}.get(cell.rank, text)
    mark = f' class="{" ".join(classes)}"' if classes else ""
    value = f' data-value="{cell.value!r}"' if cell.value is not None else ""
    return f"<td{mark}{value}>{text}</td>"


# --- where the numbers come from ------------------------------------------------------------


def head(title: str, style: str, policy: str) -> str:
    """All of a page before its body: what it may load is told by ``policy``, and is nothing."""
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
    )


def _events(events: Mapping[str, Any]) -> str:
    """How many calls did what, and which share of all was adapted to where that is not all."""
    words = []
    for key in ("adapted", "skipped", "rolled_back"):
        if events.get(key):
            share = events.get("adapted_share", 1.0) if key == "adapted" else 1.0
            part = f" ({100 * share:.0f} %)" if share < 1 else ""
            words.append(f"{events[key]} {key.replace('_', ' ')}{part}")
    decided = (events.get("guard") or {}).get("frames", {})
    words += [f"guard: {decision} {frames}" for decision, frames in decided.items()]
    return ", ".join(words) or "–"


def _provenance(shown: Sequence[Shown]) -> str:
    """Settings, seed, commit, machine and versions of every run, folded away."""
    rows = []
    for one in shown:
        for loaded in one.entry.records:
            record = loaded.record
            about, cost = record["provenance"], record["cost"]
            events = record.get("events") or {}
            cells = [
                str(record["seed"]),
                str(about.get("commit") or "not known"),
                ", ".join(
                    f"{key} {value}"
                    for key, value in (
                        ("bestta", about.get("bestta")),
                        *_pairs(about.get("versions")),
                    )
                ),
                machine_of(record),
                " to ".join(f"{v:.2g}" for v in cost.get("load") or () if v is not None) or "–",
                str(cost.get("finished") or "–"),
                _duration(cost),
                _events(events),
            ]
            inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            rows.append(f'<tr><th scope="row">{escape(one.label)}</th>{inside}</tr>')
    head = "".join(
        f'<th scope="col">{word}</th>'
        for word in (
            "method",
            "seed",
            "commit",
            "versions",
            "machine",
            "load",
            "finished",
            "took",
            "frames",
        )
    )
    settings = "".join(
        f"<details><summary>{escape(one.label)}</summary>"
        f"<pre>{escape(_settings(one.first))}</pre></details>"
        for one in shown
    )
    return (
        "<h3>Where the numbers come from</h3>"
        "<details><summary>Commit, seed, machine and versions of every run</summary>"
        '<div class="scroll" tabindex="0" role="region" aria-label="provenance">'
        f'<table class="words"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        f"</div></details><details><summary>Settings</summary>{settings}</details>"
    )


def _pairs(mapping: Any) -> list[tuple[str, Any]]:
    return list(mapping.items()) if isinstance(mapping, Mapping) else []


def _duration(cost: Mapping[str, Any]) -> str:
    seconds, sittings = cost.get("seconds"), cost.get("sittings")
    if not isinstance(seconds, int | float):
        return "–"
    text = f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
    text += f" in {sittings} sittings" if isinstance(sittings, int) and sittings > 1 else ""
    peak = cost.get("peak_bytes")
    return text + (f", peak {megabytes(peak)}" if isinstance(peak, int | float) else "")


def _settings(record: Mapping[str, Any]) -> str:
    kept = {
        "id": record["id"],
        "settings": record.get("settings"),
        "config": record.get("config"),
        "stream": record.get("stream"),
        "source_set": record.get("source_set"),
        "events": record.get("events"),
        "skipped": record.get("skipped"),
    }
    return json.dumps(kept, indent=1, ensure_ascii=False, default=str)
