"""What the figures of a report share: the methods as they are shown, legends, panels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bestta.reports.comparable import alike
from bestta.reports.records import OWN, Entry
from bestta.reports.svg import (
    DASHES,
    MARKERS,
    Canvas,
    Style,
    escape,
    line_path,
    marker_path,
)

WIDE, NARROW, PANEL, SMALL = 960.0, 344.0, 320.0, 250.0
"""Widths drawn for: a screen, a phone, one of three plots in a row, one of four."""

PLAIN = "source"
COLOWN = (2, 3, 6, 4, 5, 7)
"""Colours of methods that are neither ours nor the plain source model, in the order given."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """An entry as figures show it: with a style, and its star in its label."""

    entry: Entry
    style: Style

    @property
    def label(self) -> str:
        """What it is called; starred if it was told of domain changes."""
        return self.entry.label + "*" * self.entry.starred

    @property
    def method(self) -> str:
        """The method's name in the library."""
        return self.entry.method

    @property
    def records(self) -> list[Record]:
        """Its runs, one a seed."""
        return [loaded.record for loaded in self.entry.records]

    @property
    def first(self) -> Record:
        """The run of the first seed, for what cannot be averaged."""
        return self.entry.record

    @property
    def score(self) -> float | None:
        """Mean score over the seeds."""
        return self.mean("score")

    def mean(self, *keys: str) -> float | None:
        """Mean over the seeds of the number at the end of ``keys``."""
        return self.entry.mean(lambda record: dig(record, *keys))


@dataclass(frozen=True)
class Figure:
    """A figure: its HTML, and the words under it."""

    name: str
    heading: str
    body: str
    caption: str


def styles(labels: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """A style for each label, given with its method, in the order they first appear.

    Ours is strong and warm, the plain source model grey; the others share the remaining
    colours, and once these run out differ by dash and marker.
    """
    found: dict[str, Style] = {}
    others = 0
    for label, method in labels:
        if label in found:
            continue
        used = {style.colour for style in found.values()}
        if method == PLAIN and 0 not in used:
            found[label] = Style(0, dash=1, marker=5)
        elif method == OWN and 1 not in used:
            found[label] = Style(1, marker=0, strong=True)
        else:
            lap, place = divmod(others, len(COLOWN))
            # The disc and the cross, which ours and the source have, come last.
            marker = (1, 2, 3, 4, 0, 5)[(others + lap) % MARKERS]
            found[label] = Style(COLOWN[place], dash=(2 * lap) % DASHES, marker=marker)
            others += 1
    return found


def comparable(
    shown: Sequence[Shown], key: Callable[[dict[str, Any]], Any]
) -> tuple[list[Shown], list[Entry]]:
    """Those of which ``key`` makes what it makes of most (see `alike`), and the others."""
    kept, left = alike((one.entry for one in shown), key)
    labels = {entry.label for entry in kept}
    return [one for one in shown if one.entry.label in labels], left


def dig(record: Any, *keys: str) -> float | None:
    """The number at the end of ``keys``; None where there is none, or none that is finite."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    if isinstance(record, bool) or not isinstance(record, int | float):
        return None
    return float(record) if math.isfinite(record) else None


def percent(value: float | None, metric: str = "") -> str:
    """A score as it is said in words."""
    return "no score" if value is None else f"{value:.1f}\u00a0%{f' {metric}' if metric else ''}"


def milliseconds(value: float | None) -> str:
    """A time per image."""
    if value is None:
        return "time not measured"
    return f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"


def megabytes(value: float | None) -> str:
    """An amount of memory, in millions of bytes."""
    if value is None:
        return "memory not measured"
    if abs(value) >= 9.995e8:
        return f"{value / 1e9:.2f} GB"
    return f"{value / 1e6:.0f} MB"


def metric_of(shown: Sequence[Shown]) -> tuple[str, bool]:
    """The score's name and whether more of it is better."""
    record = shown[0].first
    return str(record.get("metric", "score")), bool(record.get("higher_is_better", True))


def metric_title(shown: Sequence[Shown], what: str = "") -> str:
    """What to write on an axis that shows the score."""
    metric, up = metric_of(shown)
    way = "higher" if up else "lower"
    return f"{f'{what} ' if what else ''}{metric}, % ({way} is better)"


def for_screen_and_phone(draw: Callable[[float], str]) -> str:
    """The same figure for two widths; the page shows the one that fits."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


def legend(shown: Sequence[Shown], classes: str = "") -> str:
    """Which line is which method."""
    items = []
    for one in shown:
        canvas = Canvas(30, 12)
        canvas.add("path", d="M1 6h28", class_=f"line {one.style.classes}")
        path = marker_path(one.style.marker, 15, 6, 3.6)
        canvas.add("path", d=path, class_=f"mark {one.style.classes}")
        items.append(f"<li>{_unnamed(canvas)}{escape(one.label)}</li>")
    return f'<ul class="legend {classes}">{"".join(items)}</ul>'


def _unnamed(canvas: Canvas) -> str:
    """A drawing that says nothing its neighbouring text does not say."""
    return (
        f'<svg aria-hidden="true" class="plot key" width="{canvas.width:g}" '
        f'height="{canvas.height:g}" viewBox="0 0 {canvas.width:g} {canvas.height:g}">'
        + "".join(canvas.parts)
        + "</svg>"
    )


def draw_line(
    canvas: Canvas,
    points: Sequence[tuple[float, float | None]],
    style: Style,
    titles: Sequence[str] = (),
) -> None:
    """A line, and a marker at each point that has a title."""
    path = line_path(points)
    if not path:
        return
    canvas.add("path", d=path, class_=f"line {style.classes}")
    size = 4.0 if style.strong else 3.4
    for (x, y), title in zip(points, titles, strict=False):
        if y is not None and math.isfinite(y):
            canvas.add(
                "path",
                d=marker_path(style.marker, x, y, size),
                class_=f"mark {style.classes}",
                title=title,
            )


def panel(heading: str, drawing: str, more: str = "") -> str:
    """One of several small plots, with its heading (and ``more``, which is HTML)."""
    return f'<div class="panel"><h4>{escape(heading)}{more}</h4>{drawing}</div>'


def panels(parts: Iterable[str], classes: str = "") -> str:
    """Small plots side by side, as many as fit."""
    return f'<div class="{f"panels {classes}".strip()}">{"".join(parts)}</div>'
