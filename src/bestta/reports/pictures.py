"""The pictures of a report: what each method makes of the same frame, and its worst frames."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bestta.reports.figures import Figure, Shown, metric_of, percent
from bestta.reports.records import OWN, Loaded, words
from bestta.reports.svg import escape

LARGEST_BYTES = 150_000
"""Picture files above this are made smaller, for all of them travel inside the page."""

LARGEST_WIDTH = 640

HEADING = "What the methods see"
LOST = (
    '<p class="note">The pictures that the records name are not beside them; they lie in folders '
    "that end in <q>.pictures</q>.</p>"
)

_KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


def data_uri(folder: Path, name: Any) -> str | None:
    """The picture ``name`` of ``folder`` as an address that holds it; None if there is none.

    Only files that lie in the folder itself and begin as PNG or JPEG do are taken: a record may
    come from anywhere.
    """
    if not isinstance(name, str) or Path(name).name != name:
        return None
    try:
        data = (folder / name).read_bytes()
    except (OSError, ValueError):
        return None
    kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), None)
    if kind is None:
        return None
    if len(data) > LARGEST_BYTES:
        data = _smaller(data, kind)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _smaller(data: bytes, kind: str) -> bytes:
    """The picture at LARGEST_WIDTH at most; as it was where Pillow is not there or cannot."""
    try:
        from PIL import Image

        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            scale = min(LARGEST_WIDTH / picture.width, 1.0)
            size = (round(picture.width * scale), max(round(picture.height * scale), 1))
            text = io.BytesIO()
            if kind == "image/png":
                # Colours are classes here, and a mixture of two is a third.
                picture.convert("RGB").resize(size, Image.Resampling.NEAREST).quantize(256).save(
                    text, "PNG", optimize=True
                )
            else:
                picture.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(
                    text, "JPEG", quality=85
                )
    except (ImportError, OSError, ValueError):
        return data
    return text.getvalue()


def _picture(folder: Path, name: Any, said: str) -> str:
    """An image, or the place where it should be."""
    uri = data_uri(folder, name)
    if uri is None:
        return '<span class="missing">no picture</span>'
    return f'<img src="{uri}" alt="{escape(said)}" decoding="async">'


def conditions_grid(shown: Sequence[Shown]) -> Figure | None:
    """The image, the truth and every method's prediction, a column a condition."""
    names = list(
        dict.fromkeys(
            str(entry["name"]) for one in shown for entry in _entries(one.first, "conditions")
        )
    )
    if not names:
        return None
    leaders = {name: _leader(shown, name) for name in names}
    head = "".join(f'<th scope="col">{escape(words(name))}</th>' for name in names)
    rows = [_row("image", [_cell(leaders[n], "image", f"{words(n)}: image") for n in names])]
    if any(entry.get("truth") or entry.get("label") for _, entry in leaders.values()):
        rows.append(
            _row("truth", [_cell(leaders[n], "truth", f"{words(n)}: truth") for n in names])
        )
    rivals = any(one.method != OWN for one in shown)
    for one in shown:
        cells = []
        for name in names:
            own = _find(one.entry.records[0], name)
            frame = leaders[name][1].get("frame")
            if own is None or own[1].get("frame") != frame:
                cells.append('<span class="missing">not recorded</span>')
            else:
                cells.append(_cell(own, "prediction", f"{words(name)}: {one.label}"))
        rows.append(_row(one.label, cells, ours=one.entry.highlighted and rivals))
    body = _grid(head, rows, "predictions by condition", shown) + _class_colours(shown)
    if not any("<img" in row for row in rows):
        return Figure("pictures", HEADING, LOST, "One frame of each condition, by method.")
    frames = {name: str(leaders[name][1].get("frame")) for name in names}
    if len(set(frames.values())) == 1:
        which = frames[names[0]]
    else:
        which = ", ".join(f"{words(name)}: {frames[name]}" for name in names[:8])
        which += ", …" if len(names) > 8 else ""
    caption = (
        "One frame of each condition, and what each method, at that point of the stream, makes of "
        f"it ({which})."
    )
    return Figure("pictures", HEADING, body, caption)


def worst_frames(shown: Sequence[Shown]) -> Figure | None:
    """The frames on which each method does worst."""
    parts: list[str] = []
    for one in sorted(shown, key=lambda one: not one.entry.highlighted):
        loaded = one.entry.records[0]
        entries = _entries(loaded.record, "worst")
        if not entries:
            continue
        rows = []
        segments = any(entry.get("prediction") for entry in entries)
        for entry in entries:
            said = f"{words(entry.get('name'))}, round {_round(entry)}"
            score = entry.get("score")
            if segments:
                said += f": {percent(score if isinstance(score, int | float) else None)}"
            pair = (loaded, entry)
            cells = [_cell(pair, "image", f"{said}: image")]
            cells += [_cell(pair, "truth", "truth"), _cell(pair, "prediction", one.label)]
            rows.append(_row(said, cells, note=str(entry.get("frame") or "")))
        head = "".join(f'<th scope="col">{w}</th>' for w in ("image", "truth", "prediction"))
        grid = _grid(head, rows, f"worst frames of {one.label}", shown)
        mark = "" if parts else " open"
        parts.append(f"<details{mark}><summary>{escape(one.label)}</summary>{grid}</details>")
    if not any("<img" in part for part in parts):
        return None
    metric, _ = metric_of(shown)
    caption = (
        f"The frames with the worst {metric} of their own, worst first: where to look for faults."
    )
    return Figure("worst", "The worst frames of each method", "".join(parts), caption)


def _round(entry: Mapping[str, Any]) -> str:
    number = entry.get("round")
    return str(number + 1) if isinstance(number, int) else "?"


def _entries(record: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    found = (record.get("pictures") or {}).get(kind) or []
    return [entry for entry in found if isinstance(entry, Mapping)]


def _find(loaded: Loaded, name: str) -> tuple[Loaded, Mapping[str, Any]] | None:
    entries = _entries(loaded.record, "conditions")
    return next(((loaded, entry) for entry in entries if str(entry.get("name")) == name), None)


def _leader(shown: Sequence[Shown], name: str) -> tuple[Loaded, Mapping[str, Any]]:
    """The record whose image and truth are shown: the first that has the image's file."""
    found = [pair for one in shown if (pair := _find(one.entry.records[0], name)) is not None]
    for loaded, entry in found:
        if data_uri(loaded.pictures, entry.get("image")) is not None:
            return loaded, entry
    return found[0]


def _cell(pair: tuple[Loaded, Mapping[str, Any]], kind: str, alternative: str) -> str:
    """One picture, or the class in words where images have one class each."""
    loaded, entry = pair
    if entry.get("label") is not None and kind in ("truth", "prediction"):
        said = str(entry["label"] if kind == "truth" else entry.get("predicted") or "–")
        wrong = kind == "prediction" and said != str(entry["label"])
        mark = '<span class="wrong">✗ wrong</span>' if wrong else ""
        return f'<span class="said">{escape(said)}</span>{mark}'
    return _picture(loaded.pictures, entry.get(kind), alternative)


def _row(label: str, cells: Sequence[str], *, ours: bool = False, note: str = "") -> str:
    below = f'<span class="aside">{escape(note)}</span>' if note else ""
    mark = ' class="ours"' if ours else ""
    inside = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr{mark}><th scope="row">{escape(label)}{below}</th>{inside}</tr>'


def _grid(head: str, rows: Sequence[str], label: str, shown: Sequence[Shown]) -> str:
    size = "" if shown[0].first.get("task") == "segmentation" else " small"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table class="pictures{size}"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _class_colours(shown: Sequence[Shown]) -> str:
    """Which colour is which class, for label maps."""
    record = shown[0].first
    classes = record.get("classes") or []
    if record.get("task") != "segmentation" or not 0 < len(classes) <= 64:
        return ""
    try:
        import numpy as np

        from bestta.data.sheets import colour
    except ImportError:
        # Without the extra "data" there is no palette to show; the pictures still are.
        return ""
    colours = colour(np.arange(len(classes), dtype=np.uint8)[None], tuple(classes))[0]
    items = [
        f'<li><svg aria-hidden="true" width="14" height="14"><rect width="14" height="14" rx="2" '
        f'fill="#{r:02x}{g:02x}{b:02x}"/></svg>{escape(name)}</li>'
        for name, (r, g, b) in zip(classes, colours.tolist(), strict=True)
    ]
    return f'<ul class="legend classes">{"".join(items)}</ul>'
