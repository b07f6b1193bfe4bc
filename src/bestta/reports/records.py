"""Records read from disk, and put together like with like.

A record is one run of one method. Runs compare only if their stream is the same one; those that
differ in nothing but the seed are one entry, with a mean and a spread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

KIND = "bestta record"
FORMAT = 1

ORDER = (
    "source",
    "bn_stats",
    "alpha_bn",
    "bn_ema",
    "tent_reset",
    "tent",
    "eata",
    "cotta",
    "ecotta",
    "petal",
    "sar",
    "rotta",
    "memo",
)
"""Methods in the order of the paper's tables; others follow, and BESTTA comes last."""

OWN = "bestta"
"""The method that the tables highlight."""
USUAL = f"{OWN}+"
"""What its usual form is called where the paper's stands beside it."""

_NEEDED: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "protocol": str,
    "method": str,
    "label": str,
    "seed": int,
    "task": str,
    "metric": str,
    "higher_is_better": bool,
    "stream": dict,
    "settings": dict,
    "parameters": dict,
    "blocks": list,
    "rounds": list,
    "conditions": dict,
    "provenance": dict,
    "cost": dict,
}


@dataclass(frozen=True)
class Loaded:
    """A record, where it was read, and what is to be said of the reading."""

    path: Path
    record: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def pictures(self) -> Path:
        """The folder of the pictures that the record names; it need not be there."""
        return self.path.with_name(f"{self.record['id']}.pictures")


@dataclass(frozen=True)
class Entry:
    """A method with its settings: one row of a table, over one or several seeds.

    Figures are means over the seeds; where one of them lacks a figure there is none.

    Attributes:
        label: What it is called, unlike any other entry of its group.
        method: The method's name in the library.
        starred: Whether it was told of domain changes.
        records: Its runs, by seed.
        highlighted: Whether it is the project's own method, and not a variant beside it.
    """

    label: str
    method: str
    starred: bool
    records: tuple[Loaded, ...]
    highlighted: bool = False

    def mean(self, figure: Callable[[dict[str, Any]], float | None]) -> float | None:
        """The mean of ``figure(record)`` over the seeds."""
        figures = self._figures(figure)
        return fmean(figures) if figures else None

    def deviation(self, figure: Callable[[dict[str, Any]], float | None]) -> float | None:
        """The sample standard deviation of ``figure(record)``; None for a single seed."""
        figures = self._figures(figure)
        return stdev(figures) if len(figures) > 1 else None

    def _figures(self, figure: Callable[[dict[str, Any]], float | None]) -> list[float]:
        figures = [figure(loaded.record) for loaded in self.records]
        known = [value for value in figures if value is not None]
        return known if len(known) == len(figures) else []

    @property
    def record(self) -> dict[str, Any]:
        """The record of the first seed."""
        return self.records[0].record

    @property
    def seeds(self) -> list[int]:
        """The seeds it was run with."""
        return [loaded.record["seed"] for loaded in self.records]

    @property
    def score(self) -> float | None:
        """The mean over all blocks."""
        return self.mean(lambda record: record.get("score"))

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of the score over the seeds."""
        return self.deviation(lambda record: record.get("score"))

    @cached_property
    def block_scores(self) -> list[float | None]:
        """A score for each block, in the stream's order."""
        return [self.mean(block_score(n)) for n in range(len(self.record["blocks"]))]

    @cached_property
    def round_scores(self) -> list[float | None]:
        """A score for each round."""
        return [self.mean(round_score(n)) for n in range(len(self.record["rounds"]))]

    @cached_property
    def condition_scores(self) -> dict[str, float | None]:
        """A score for each condition, over all rounds."""
        return {name: self.mean(condition_score(name)) for name in self.record["conditions"]}

    @property
    def study(self) -> dict[str, Any]:
        """Which row of a study it is; empty if it is of none."""
        return self.record.get("study") or {}

    def lead(self, other: Entry, *, higher_is_better: bool) -> float | None:
        """How many percentage points better than ``other``, over the seeds that both have.

        None where they share no seed: what is left of a difference then may be the seeds'.
        """
        shared = set(self.seeds) & set(other.seeds)
        here, there = self._of_seeds(shared).score, other._of_seeds(shared).score
        if here is None or there is None:
            return None
        return here - there if higher_is_better else there - here

    def _of_seeds(self, seeds: set[int]) -> Entry:
        """The entry with these of its runs alone."""
        kept = tuple(loaded for loaded in self.records if loaded.record["seed"] in seeds)
        return replace(self, records=kept)


def block_score(index: int) -> Callable[[dict[str, Any]], float | None]:
    """The figure that is the score of one block."""
    return lambda record: record["blocks"][index].get("score")


def round_score(index: int) -> Callable[[dict[str, Any]], float | None]:
    """The figure that is the mean of one round."""
    return lambda record: record["rounds"][index]


def condition_score(name: str) -> Callable[[dict[str, Any]], float | None]:
    """The figure that is the mean of one condition."""
    return lambda record: record["conditions"].get(name)


@dataclass(frozen=True)
class Group:
    """Entries that compare: one stream, and one study if any.

    Attributes:
        name: Short, for files; unlike any other group's.
        title: In words; unlike any other group's.
        stream: What the entries have in common.
        entries: In the order of the paper's tables.
        notes: What was left out when the records were put together.
    """

    name: str
    title: str
    stream: dict[str, Any]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    @property
    def record(self) -> dict[str, Any]:
        """Any of its records, for what they share."""
        return self.entries[0].record

    @property
    def records(self) -> list[Loaded]:
        """All of its records."""
        return [loaded for entry in self.entries for loaded in entry.records]

    @property
    def protocol(self) -> str:
        """The protocol's name."""
        return str(self.record["protocol"])

    @property
    def study(self) -> str | None:
        """The study's name, if its entries are of one."""
        return self.entries[0].study.get("name")

    @property
    def metric(self) -> str:
        """What the scores are, in percent."""
        return str(self.record["metric"])

    @property
    def higher_is_better(self) -> bool:
        """Which way is up."""
        return bool(self.record["higher_is_better"])

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The blocks of its stream."""
        return list(self.record["blocks"])

    @property
    def source(self) -> Entry | None:
        """The model left alone, if it was run."""
        return next((entry for entry in self.entries if entry.method == "source"), None)

    @property
    def is_ablation(self) -> bool:
        """Whether its entries are variants of one method; a study may be of methods, too."""
        told_apart = len(self.entries) > 1 or any(map(self.entries[0].study.get, ("row", "marks")))
        return bool(self.study and told_apart and len({e.method for e in self.entries}) == 1)

    def label_of(self, entry: Entry) -> str:
        """What a row is called: by its letter in a study, if it has one and no other has it."""
        row = entry.study.get("row")
        alone = sum(other.study.get("row") == row for other in self.entries) == 1
        return str(row) if row and alone else entry.label


# --- reading --------------------------------------------------------------------------------


def read_records(paths: Iterable[str | Path]) -> list[Loaded]:
    """The records in ``paths``: files, and folders that are searched to the bottom.

    Other JSON in a folder is passed over. Of several records with one id the latest is taken.

    Raises:
        ValueError: If a record is torn or of an unknown format, a file named is not a record, or
            there is none at all.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    places = [Path(path) for path in paths]
    found: dict[Path, Loaded] = {}
    for path in places:
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*.json")) if file.is_file()]
        elif path.exists():
            files = [path]
        else:
            raise ValueError(f"no such file or folder: {path}")
        for file in files:
            if (record := _read(file, named=file == path)) is not None:
                found.setdefault(file.resolve(), Loaded(file, record))
    if not found:
        looked = ", ".join(map(str, places)) or "nowhere: no path was given"
        raise ValueError(
            f"no records found; looked in {looked}. "
            "Records are the JSON files that 'bestta bench' writes."
        )
    return _latest_by_id(found.values())


def _read(path: Path, *, named: bool) -> dict[str, Any] | None:
    """The record in ``path``; None for a file in a folder that is something else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    try:
        # NaN and infinities are no JSON and no score: nothing is known there.
        content = json.loads(data.decode(), parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        # What a power cut leaves of a record: its beginning, nothing, or zeros.
        if named or KIND.encode() in data[:1000] or not data.strip(b"\0 \r\n"):
            raise ValueError(
                f"{path} is torn or not JSON ({error}). Run its benchmark again, or remove it."
            ) from error
        return None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        if not named:
            return None
        seen = f"kind {content.get('kind')!r}" if isinstance(content, dict) else type(content)
        raise ValueError(f"{path} is not a record: it has {seen}, a record has kind {KIND!r}")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a record of format {content.get('format')!r}; this version of bestta "
            f"reads format {FORMAT}"
        )
    _check(path, content)
    return content


def _check(path: Path, record: dict[str, Any]) -> None:
    """Raise if what every table needs is not there."""
    wrong = [name for name, kind in _NEEDED.items() if not isinstance(record.get(name), kind)]
    if not wrong and not isinstance(record["stream"].get("key"), str):
        wrong = ["stream.key"]
    if not wrong and not record["blocks"]:
        wrong = ["blocks"]
    if wrong:
        raise ValueError(
            f"{path} is a record in which these entries are missing, empty or of another type: "
            f"{', '.join(wrong)}"
        )


def _finished(loaded: Loaded) -> datetime:
    """When the run ended; long ago if it does not say."""
    try:
        time = datetime.fromisoformat(loaded.record["cost"]["finished"])
    except (KeyError, TypeError, ValueError):
        return datetime.min.replace(tzinfo=UTC)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _latest_by_id(found: Iterable[Loaded]) -> list[Loaded]:
    by_id: dict[str, list[Loaded]] = {}
    for loaded in found:
        by_id.setdefault(loaded.record["id"], []).append(loaded)
    kept = []
    for name, copies in by_id.items():
        latest = max(copies, key=_finished)
        if len(copies) > 1:
            note = f"{name} was there {len(copies)} times; the latest was taken ({_day(latest)})."
            latest = replace(latest, notes=(*latest.notes, note))
        kept.append(latest)
    return kept


def _day(loaded: Loaded) -> str:
    finished = _finished(loaded)
    return f"{finished:%Y-%m-%d %H:%M}" if finished.year > 1 else "of unknown date"


# --- grouping -------------------------------------------------------------------------------


def groups(records: Iterable[Loaded]) -> list[Group]:
    """The records in groups of one stream (and study) each, in the order they came."""
    by_stream: dict[Any, list[Loaded]] = {}
    for loaded in records:
        by_stream.setdefault(_stream_of(loaded.record), []).append(loaded)
    made = [_group(members) for members in by_stream.values()]
    names, titles = [group.name for group in made], [group.title for group in made]
    for n, group in enumerate(made):
        key = group.stream["key"][:8]
        if names.count(group.name) > 1:
            made[n] = replace(made[n], name=f"{group.name}-{key}")
        if titles.count(group.title) > 1:
            made[n] = replace(made[n], title=f"{group.title}, stream {key}")
    return made


def entries_of(records: Iterable[Loaded]) -> tuple[list[Entry], list[str]]:
    """Runs that differ in the seed alone put together, labels made distinct, rows in order.

    Returns:
        The entries, and notes on runs that were left out.
    """
    runs_by: dict[Any, dict[int, Loaded]] = {}
    notes = []
    for loaded in records:
        record = loaded.record
        seeds = runs_by.setdefault(_entry_of(record), {})
        if (other := seeds.get(record["seed"])) is not None:
            loaded, left = sorted((other, loaded), key=_finished, reverse=True)
            notes.append(
                f"{left.record['id']} was left out: {loaded.record['id']} has the same method, "
                "settings and seed, and is later."
            )
        seeds[record["seed"]] = loaded
    entries = []
    for seeds in runs_by.values():
        runs = tuple(seeds[seed] for seed in sorted(seeds))
        first = runs[0].record
        entries.append(
            Entry(first["label"], first["method"], bool(first.get("told_of_changes")), runs)
        )
    return _own_highlighted(sorted(_distinct(entries), key=place)), notes


def _own_highlighted(entries: list[Entry]) -> list[Entry]:
    """The entries, one of the project's own method marked: its usual form, else the last."""
    own = [n for n, entry in enumerate(entries) if entry.method == OWN]
    named = [[n for n in own if entries[n].label.casefold() == name] for name in (USUAL, OWN)]
    chosen = (named[0] or named[1] or own)[-1:]
    return [replace(entry, highlighted=n in chosen) for n, entry in enumerate(entries)]


def _group(members: list[Loaded]) -> Group:
    entries, notes = entries_of(members)
    notes += [note for loaded in members for note in loaded.notes]
    record = entries[0].record
    return Group(
        name_of(record),
        title_of(record),
        record["stream"],
        tuple(entries),
        tuple(dict.fromkeys(notes)),
    )


def _stream_of(record: Mapping[str, Any]) -> Any:
    """What two records must have in common to be compared.

    The key alone should do; metric and blocks are there against records that were edited, for
    their columns would not line up.
    """
    study = (record.get("study") or {}).get("name")
    blocks = tuple((block.get("round"), block.get("name")) for block in record["blocks"])
    return record["stream"]["key"], study, record["metric"], blocks


def _entry_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What two records of a group must have in common to be one row."""
    settings = {k: v for k, v in record["settings"].items() if k != "seed"}
    study = record.get("study") or {}
    about = (settings, study.get("row"), study.get("marks"), _preparation(record))
    return (record["method"], record["label"], json.dumps(about, sort_keys=True, default=str))


def _preparation(record: Mapping[str, Any]) -> Any:
    """How a method learned from source images beforehand; None if it did not, or does not say."""
    method = (record.get("config") or {}).get("method")
    return method.get("prepare") if isinstance(method, Mapping) else None


def place(entry: Entry) -> tuple[Any, ...]:
    """Where an entry stands among the others of its group."""
    if entry.method == OWN:
        method = len(ORDER) + 1
    else:
        method = ORDER.index(entry.method) if entry.method in ORDER else len(ORDER)
    marks = entry.study.get("marks") or {}
    numbers = [float(m) for m in marks.values() if isinstance(m, int | float)]
    label = entry.label.casefold()
    # The paper's form, then variants of the usual one, and that one itself last.
    own = (label == USUAL, label.startswith(USUAL))
    return (_natural(str(entry.study.get("row") or "")), numbers, method, own)


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A key by which row 2 comes before row 10."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, those of one label told apart by the settings in which they differ."""
    result = list(entries)
    by_label: dict[str, list[int]] = {}
    for n, entry in enumerate(entries):
        by_label.setdefault(entry.label, []).append(n)
    for label, places in by_label.items():
        if len(places) == 1:
            continue
        named = _differences([entries[n] for n in places])
        for n, words in zip(places, named, strict=True):
            result[n] = replace(entries[n], label=f"{label} ({words})")
    return result


def _differences(entries: Sequence[Entry]) -> list[str]:
    """What tells entries of one label apart, in words for each."""
    settings = [
        _flat(entry.record["settings"]) | _flat({"prepare": _preparation(entry.record) or {}})
        for entry in entries
    ]
    names = [
        name
        for name in dict.fromkeys(name for each in settings for name in each)
        if name != "seed"
        and len({json.dumps(each.get(name), default=str) for each in settings}) > 1
    ]
    if len({entry.method for entry in entries}) > 1:
        words = [[entry.method] for entry in entries]
    else:
        words = [
            [f"{name}={_short(each[name])}" for name in names[:3] if name in each]
            for each in settings
        ]
    for each, entry in zip(words, entries, strict=True):
        if row := entry.study.get("row"):
            each.insert(0, str(row))
    texts = [", ".join(each) or "otherwise as usual" for each in words]
    return [
        f"{text}, variant {texts[: n + 1].count(text)}" if texts.count(text) > 1 else text
        for n, text in enumerate(texts)
    ]


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings within settings under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[above + name] = value
    return flat


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        value = "+".join(map(_short, value)) or "none"
    text = str(value)
    return text if len(text) <= 30 else text[:29] + "…"


# --- names ----------------------------------------------------------------------------------


def words(name: Any) -> str:
    """A condition, class or setting as it is written for readers."""
    return str(name).replace("_", " ")


def marks_in_words(marks: Mapping[str, Any]) -> str:
    """What is on in a row of a study.

    >>> marks_in_words({"entropy": True, "style": True, "l2": False})
    'entropy + style'
    """
    said = [words(key) for key, value in marks.items() if value is True]
    said += [f"{words(key)} = {v}" for key, v in marks.items() if not isinstance(v, bool)]
    return " + ".join(said) or "none"


def size_text(size: Sequence[int] | None) -> str:
    """Width and height: ``256×128``; empty if not known."""
    return "×".join(map(str, size)) if size else ""


def name_of(record: Mapping[str, Any]) -> str:
    """What a record's group is called in file names, if no other is called so."""
    stream, study = record["stream"], record.get("study") or {}
    parts = [str(record["protocol"])]
    if study:
        parts.append(str(study.get("name")))
    if (stream.get("every") or 1) != 1:
        parts.append(f"every-{stream['every']}")
    if (stream.get("batch") or 1) != 1:
        parts.append(f"batch-{stream['batch']}")
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def title_of(record: Mapping[str, Any]) -> str:
    """What a record's group is called in words, if no other is called so."""
    stream, study = record["stream"], record.get("study") or {}
    title = f"{record['protocol']}, study of {study['name']}" if study else str(record["protocol"])
    about = [
        f"model {stream['model']}" if stream.get("model") else "",
        size_text(stream.get("size")),
    ]
    rounds = stream.get("rounds") or 1
    about.append(f"{rounds} rounds" if rounds > 1 else "")
    about.append(f"severity {stream['severity']}" if stream.get("severity") is not None else "")
    if (stream.get("every") or 1) != 1:
        about.append(f"every {ordinal(stream['every'])} frame")
    if (stream.get("batch") or 1) != 1:
        about.append(f"batches of {stream['batch']}")
    if stream.get("precision") not in (None, "fp32"):
        about.append(str(stream["precision"]))
    words = ", ".join(filter(None, about))
    return f"{title}: {words}" if words else title


def ordinal(number: int) -> str:
    """A number as a place in a row.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 22)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd']
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
