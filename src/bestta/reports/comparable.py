"""What of the entries of a group compares: source images, machines, ways of timing and tracing.

One stream makes their scores compare; what was measured beside them has conditions of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bestta.reports.records import Entry, ordinal


def alike(
    entries: Iterable[Entry], key: Callable[[dict[str, Any]], Any]
) -> tuple[list[Entry], list[Entry]]:
    """The entries of which ``key`` makes what it makes of most, and the others.

    Where an entry's seeds differ, all that they have counts. Of two that are as common the one
    that comes first is taken.
    """
    entries = list(entries)
    found = [frozenset(key(loaded.record) for loaded in entry.records) for entry in entries]
    most = max(found, key=found.count, default=None)
    pairs = list(zip(entries, found, strict=True))
    return [e for e, each in pairs if each == most], [e for e, each in pairs if each != most]


def source_images(record: Mapping[str, Any]) -> str | None:
    """The digest of the source images that a record looked at; None if it does not say."""
    names = (record.get("source_set") or {}).get("names")
    return None if names is None else str(names)


def other_images(left: Sequence[Entry]) -> str:
    """Says which entries do not compare for their source images; empty if there are none."""
    if not left:
        return ""
    rows = []
    for entry in left:
        about = entry.record.get("source_set") or {}
        count = f"{about['images']:,} images" if about.get("images") is not None else None
        parts = [str(part) for part in (about.get("set"), about.get("split"), count) if part]
        rows.append(f"{entry.label} ({', '.join(parts) or 'which is not recorded'})")
    return f"Left out, for other source images do not compare: {'; '.join(rows)}."


def machine_of(record: Mapping[str, Any]) -> str:
    """The machine that a run computed on, in words: times of another do not compare."""
    machine = record["provenance"].get("machine") or {}
    config, memory = record.get("config") or {}, record["cost"].get("memory")
    device = (
        machine.get("device") or config.get("device") or ("cuda" if memory == "cuda" else "cpu")
    )
    counts = [
        f"{machine[key]} {key if machine[key] != 1 else key[:-1]}"
        for key in ("cores", "threads")
        if machine.get(key) is not None
    ]
    told = {"cpu", "processor", "cores", "threads", "device", "gpu"}
    more = [f"{key} {value}" for key, value in sorted(machine.items()) if key not in told]
    inside = ", ".join(filter(None, (machine.get("processor"), *counts, *more)))
    words = f"{machine.get('cpu') or 'unknown machine'} ({inside})"
    # A graphics card that did not compute does not matter.
    kind = str(device).partition(":")[0]
    return (
        words if kind == "cpu" else f"{machine.get('gpu') or f'unknown {kind} device'} on {words}"
    )


def is_looked_at(record: Mapping[str, Any]) -> bool:
    """Whether its times include looking at features."""
    return bool(record["cost"].get("looked"))


def traced(record: Mapping[str, Any]) -> int:
    """Of how many steps its traces hold one."""
    every = record.get("traced_every")
    return every if isinstance(every, int) and every > 1 else 1


def thinned(entries: Iterable[Entry]) -> list[str]:
    """Says whose traces hold only some of the steps."""
    by_every: dict[int, list[str]] = {}
    for entry in entries:
        by_every.setdefault(traced(entry.record), []).append(entry.label)
    by_every.pop(1, None)
    return [
        f"The traces hold every {ordinal(every)} step ({', '.join(labels)})."
        for every, labels in by_every.items()
    ]
