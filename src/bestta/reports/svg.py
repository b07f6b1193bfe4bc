"""Drawing basics: scales, ticks, lines, markers and labels as SVG, coloured by the page's CSS.

Nothing here knows of methods or records. Colours are classes (``c0``, ``c1``, ...), so that one
drawing serves light, dark and paper.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

FONT = 12.0
"""Size of a figure's text, in the drawing's units."""

MARKERS = 6
DASHES = 4

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def escape(text: object) -> str:
    """``text`` so that it can stand between tags and inside quotes."""
    return html.escape(str(text), quote=True)


def known(values: Iterable[float | None]) -> list[float]:
    """The finite numbers among ``values``."""
    return [v for v in values if v is not None and math.isfinite(v)]


def short(value: float) -> str:
    """A coordinate to a tenth of a unit, without needless digits."""
    return f"{value:.1f}".removesuffix(".0").replace("-0.", "-.").removeprefix("0") or "0"


def text_width(text: str, size: float = FONT) -> float:
    """Roughly how wide ``text`` is in a system font; rather too much than too little."""
    return 0.58 * size * len(text)


@dataclass(frozen=True)
class Scale:
    """From values to places: ``low`` lies at ``start``, ``high`` at ``stop``."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of ``value``."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(at, 1e-12))
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About ``count`` round values inside the scale."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), tuple(map(float, range(1, 10)))):
                found = [s * 10.0**p for p in range(first, last + 1) for s in steps]
                found = [v for v in found if self.low <= v <= self.high]
                if len(found) >= min(count, 4):
                    return found
            if len(found) > 1:
                return found
        step = _round_step((self.high - self.low) / max(count, 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return power * next(s for s in (1.0, 2.0, 5.0, 10.0) if s * power >= raw * 0.999)


def fit(
    values: Iterable[float | None],
    start: float,
    stop: float,
    *,
    pad: float = 0.08,
    log: bool = False,
    least: float = 0.0,
) -> Scale:
    """The scale that holds all of ``values`` with some room round them.

    Args:
        least: Range below which the scale does not zoom in, so that noise stays small.
    """
    seen = known(values)
    if log:
        seen = [v for v in seen if v > 0]
        low, high = (min(seen), max(seen)) if seen else (1.0, 10.0)
        room = max((high / low) ** pad, 1.15)
        return Scale(low / room, high * room, start, stop, log=True)
    low, high = (min(seen), max(seen)) if seen else (0.0, 1.0)
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    room = (high - low) * pad
    return Scale(low - room, high + room, start, stop)


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """A tick's value with as many digits as telling its neighbours apart takes."""
    gaps = [abs(b - a) for a, b in pairwise(ticks)]
    smallest = min(gaps, default=abs(value) or 1.0) or 1.0
    digits = max(0, -math.floor(math.log10(smallest) + 1e-9))
    return f"{value:.{min(digits, 6)}f}".replace("-", "−")


@dataclass(frozen=True)
class Style:
    """What tells one series from the others: colour, dash and marker, so never colour alone."""

    colour: int
    dash: int = 0
    marker: int = 0
    strong: bool = False

    @property
    def classes(self) -> str:
        """The CSS classes of the series."""
        return f"c{self.colour} d{self.dash}" + (" strong" if self.strong else "")


def marker_path(marker: int, x: float, y: float, size: float) -> str:
    """Outline of a marker of half-width ``size``: disc, square, two triangles, diamond, cross."""
    kind = marker % MARKERS
    if kind == 0:
        return (
            f"M{short(x - size)} {short(y)}a{short(size)} {short(size)} 0 1 0 {short(2 * size)} 0"
            f"a{short(size)} {short(size)} 0 1 0 {short(-2 * size)} 0z"
        )
    third = size * 0.4
    corners = {
        1: [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        2: [(0.0, -1.15), (1.1, 0.85), (-1.1, 0.85)],
        3: [(0.0, -1.25), (1.25, 0.0), (0.0, 1.25), (-1.25, 0.0)],
        4: [(0.0, 1.15), (1.1, -0.85), (-1.1, -0.85)],
    }.get(kind)
    if corners is not None:
        points = [(x + a * size, y + b * size) for a, b in corners]
    else:
        arm = 1.15 * size
        points = [
            (x + a, y + b)
            for a, b in (
                (-third, -arm),
                (third, -arm),
                (third, -third),
                (arm, -third),
                (arm, third),
                (third, third),
                (third, arm),
                (-third, arm),
                (-third, third),
                (-arm, third),
                (-arm, -third),
                (-third, -third),
            )
        ]
    return "M" + "L".join(f"{short(a)} {short(b)}" for a, b in points) + "z"


def line_path(points: Iterable[tuple[float, float | None]]) -> str:
    """A path through ``points``; one without a height breaks the line."""
    parts, pen_down = [], False
    for x, y in points:
        if y is None or not math.isfinite(y):
            pen_down = False
            continue
        parts.append(f"{'L' if pen_down else 'M'}{short(x)} {short(y)}")
        pen_down = True
    return "".join(parts)


@dataclass
class Canvas:
    """A drawing that grows by one element at a time."""

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def add(self, tag: str, body: str = "", title: str = "", **attributes: object) -> None:
        """One element; ``title`` is what hovering over it shows."""
        written = []
        for name, value in attributes.items():
            shown = short(value) if isinstance(value, float) else escape(value)
            written.append(f' {name.rstrip("_").replace("_", "-")}="{shown}"')
        inside = body + (f"<title>{escape(title)}</title>" if title else "")
        end = f">{inside}</{tag}>" if inside else "/>"
        self.parts.append(f"<{tag}{''.join(written)}{end}")

    def line(self, x1: float, y1: float, x2: float, y2: float, classes: str) -> None:
        """A straight line."""
        self.add("path", d=f"M{short(x1)} {short(y1)}L{short(x2)} {short(y2)}", class_=classes)

    def text(
        self, x: float, y: float, text: str, classes: str = "", anchor: str = "", turn: float = 0.0
    ) -> None:
        """A line of text with its base line at ``y``; ``anchor`` is start, middle or end."""
        more: dict[str, object] = {}
        if classes:
            more["class_"] = classes
        if anchor and anchor != "start":
            more["text_anchor"] = anchor
        if turn:
            more["transform"] = f"rotate({short(turn)} {short(x)} {short(y)})"
        self.add("text", escape(text), "", x=float(x), y=float(y), **more)

    def finish(self, label: str) -> str:
        """The drawing as an ``svg`` element that tells a screen reader ``label``."""
        return (
            f'<svg role="img" aria-label="{escape(label)}" class="plot"'
            f' viewBox="0 0 {short(self.width)} {short(self.height)}"'
            f' width="{short(self.width)}" height="{short(self.height)}">'
            + "".join(self.parts)
            + "</svg>"
        )


def axes(
    canvas: Canvas,
    x: Scale,
    y: Scale,
    *,
    x_title: str = "",
    y_title: str = "",
    x_ticks: Sequence[tuple[float, str]] | None = None,
    y_count: int = 5,
    x_count: int = 5,
) -> None:
    """Grid lines with their values, and what the axes mean.

    Args:
        x_ticks: Values and words to put along the bottom; round numbers if None, none if empty.
    """
    left, right = min(x.start, x.stop), max(x.start, x.stop)
    bottom = max(y.start, y.stop)
    ticks = y.ticks(y_count)
    for value in ticks:
        at = y(value)
        canvas.line(left, at, right, at, "grid")
        canvas.text(left - 6, at + 4, tick_text(value, ticks), "tick", "end")
    if x_ticks is None:
        ticks = x.ticks(x_count)
        x_ticks = [(v, f"{v:g}" if x.log else tick_text(v, ticks)) for v in ticks]
    for value, word in x_ticks:
        canvas.line(x(value), bottom, x(value), bottom + 4, "axis")
        canvas.text(x(value), bottom + 17, word, "tick", "middle")
    canvas.line(left, bottom, right, bottom, "axis")
    if x_title:
        canvas.text((left + right) / 2, canvas.height - 5, x_title, "name", "middle")
    if y_title:
        # Above the axis instead of turned beside it: nobody has to tilt their head.
        canvas.text(0.0, 12.0, y_title, "name")


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights as near to ``wanted`` as they can be with ``gap`` between them, inside the bounds."""
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    # Neighbours that would overlap form clusters, each centred on where its members want to be.
    clusters: list[list[int]] = []
    centres: list[float] = []

    def centre(members: list[int]) -> float:
        mean = sum(wanted[n] for n in members) / len(members)
        half = (len(members) - 1) * gap / 2
        return max(low + half, min(high - half, mean))

    for n in order:
        clusters.append([n])
        centres.append(centre([n]))
        while len(clusters) > 1:
            reach = (len(clusters[-1]) + len(clusters[-2])) * gap / 2
            if centres[-1] - centres[-2] >= reach - 1e-9:
                break
            last = clusters.pop()
            centres.pop()
            clusters[-1] += last
            centres[-1] = centre(clusters[-1])
    placed = [0.0] * len(wanted)
    for members, middle in zip(clusters, centres, strict=True):
        for k, n in enumerate(members):
            placed[n] = middle + (k - (len(members) - 1) / 2) * gap
    return placed


def overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    return max(wide, 0.0) * max(high, 0.0)


def place_labels(
    discs: Sequence[tuple[float, float, float]], texts: Sequence[str], bounds: Box
) -> list[tuple[float, float]]:
    """Where each disc's label goes (left end of the base line) so that nothing covers another.

    Tries places round each disc, near ones first, and takes the one that covers least.

    Args:
        discs: Centre and radius of each disc.
    """
    boxes = [(x - r, y - r, x + r, y + r) for x, y, r in discs]
    taken: list[Box] = []
    placed: dict[int, tuple[float, float]] = {}
    # Large discs leave the fewest places, so their labels choose first.
    for n in sorted(range(len(discs)), key=lambda n: -discs[n][2]):
        x, y, r = discs[n]
        wide, high = text_width(texts[n]), FONT
        best, least = (x + r + 4, y + 4), math.inf
        for ring in range(12):
            away = r + 4 + ring * 6
            for turn in (0, 180, 270, 90, 315, 45, 225, 135, 292, 248, 68, 112):
                dx, dy = math.cos(math.radians(turn)), math.sin(math.radians(turn))
                cx = x + dx * away + (dx * wide / 2)
                cy = y + dy * away + (dy * high / 2)
                box = (cx - wide / 2, cy - high / 2 - 1, cx + wide / 2, cy + high / 2 + 1)
                outside = wide * (high + 2) - overlap(box, bounds)
                cost = 8 * outside + 4 * sum(overlap(box, b) for b in taken)
                cost += sum(overlap(box, b) for b in boxes) + ring * 3
                if cost < least - 1e-9:
                    best, least = (cx - wide / 2, cy + high / 2 - 2), cost
        placed[n] = best
        taken.append((best[0], best[1] - high, best[0] + wide, best[1] + 3))
    return [placed[n] for n in range(len(discs))]
