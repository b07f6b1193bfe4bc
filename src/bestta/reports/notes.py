"""The notes below tables: the stream, the seeds, the machine, and what does not compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bestta.reports.comparable import is_looked_at, machine_of
from bestta.reports.records import Entry, Group, ordinal, size_text


def clean(notes: Iterable[str]) -> tuple[str, ...]:
    """The notes that say something, each once."""
    return tuple(dict.fromkeys(bound(note) for note in notes if note))


def bound(text: str) -> str:
    r"""``text`` with every figure kept on one line with the % behind it.

    >>> bound("45.3 % mean mIoU in %")
    '45.3\xa0% mean mIoU in %'
    """
    return re.sub(r"(?<=\d) %", "\u00a0%", text)


def direction(group: Group) -> str:
    """The metric, and which way is up."""
    return f"{group.metric} in %, {'higher' if group.higher_is_better else 'lower'} is better."


def all_blocks(group: Group) -> str:
    """How many blocks a mean is over: ``all 12 blocks``."""
    return f"all {len(group.blocks)} blocks" if len(group.blocks) > 1 else "the one block"


def main_notes(group: Group, published: Sequence[str], *, costs: bool = True) -> list[str]:
    """The notes of a group's first table; ``published`` tells of the figures beside its own."""
    rows = len(group.entries)
    marked = "Best and second best are marked" if rows > 2 else "The best is marked"
    notes = [
        f"{direction(group)} Mean: arithmetic mean of {all_blocks(group)}."
        + (f" {marked} by the figures as they are shown." if rows > 1 else "")
    ]
    if costs:
        notes.append("Time: median of a call, per image. Time and memory are not ranked.")
        notes += [*looked_notes(group), *memory_notes(group)]
    return [*notes, *notes_of(group, brief=False), *published]


def notes_of(group: Group, *, brief: bool = True) -> list[str]:
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
    return notes if brief else [*notes, *differences(group)]


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
    each = f", {span([f'{n:,}' for n in sorted(set(frames))])} each" if len(blocks) > 1 else ""
    many = f"{len(blocks)} blocks" if len(blocks) > 1 else "one block"
    return f"{', '.join(filter(None, parts))}; {sum(frames):,} frames in {many}{each}."


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
        + (" Gains are over the seeds that a row shares with the source." if group.source else "")
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


def looked_notes(group: Group) -> list[str]:
    """Whose times hold more than the method needs."""
    looked = [
        group.label_of(entry)
        for entry in group.entries
        if any(is_looked_at(loaded.record) for loaded in entry.records)
    ]
    if not looked:
        return []
    return [
        "Times include looking at features, which the method does not need "
        f"({', '.join(looked)}): they compare with no others."
    ]


def memory_notes(group: Group) -> list[str]:
    """What the memory is that was measured."""
    kinds = {
        "process": "the peak of the process on the CPU",
        "cuda": "the peak that CUDA counts",
    }
    by_kind = _by(group, lambda entry: entry.record["cost"].get("memory"))
    known = {kind: labels for kind, labels in by_kind.items() if kind in kinds}
    if len(known) == 1:
        return [
            f"Memory over the model: {kinds[next(iter(known))]}, less the loaded model; "
            "1 MB is a million bytes."
        ]
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
    machines = sorted(machines_of(group.entries))
    costs = [loaded.record["cost"] for loaded in group.records]
    loads = [load for cost in costs for load in cost.get("load") or () if load is not None]
    days = [str(cost[k])[:10] for cost in costs for k in ("started", "finished") if cost.get(k)]
    text += f"; {' and '.join(machines)}"
    text += f", load {span(sorted(loads))}" if loads else ""
    text += f"; {span(sorted(set(days)), ' to ')}" if days else ""
    return f"{text}."


def differences(group: Group) -> list[str]:
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
    machines = _by(group, lambda entry: " and ".join(sorted(machines_of([entry]))))
    if len(machines_of(group.entries)) > 1:
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


def machines_of(entries: Iterable[Entry]) -> set[str]:
    """The machines that the entries ran on, each in words."""
    return {machine_of(loaded.record) for entry in entries for loaded in entry.records}


def _by(group: Group, key: Callable[[Entry], Any]) -> dict[Any, list[str]]:
    """The labels of the entries, by what ``key`` makes of them."""
    found: dict[Any, list[str]] = {}
    for entry in group.entries:
        found.setdefault(key(entry), []).append(group.label_of(entry))
    return found


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


def span(values: Sequence[Any], joint: str = "–") -> str:
    """The first of sorted values, and the last if it is another."""
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}{joint}{values[-1]}"
