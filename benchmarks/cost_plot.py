"""Draw the record of `benchmarks/cost.py`: every method's cost, and how BESTTA's grows.

    python benchmarks/cost_plot.py results/measured/cost.json --out docs/cost.svg

Above, each method as a point: time and memory over the plain forward's, both on logarithmic axes,
and the paper's BESTTA beside ours; those near the plain forward once more in a close-up. Below,
time and memory over the image size, the place of the one BeIN, and the number of BeINs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestta.files import write_whole
from bestta.reports.svg import (
    Canvas,
    Style,
    axes,
    fit,
    known,
    line_path,
    marker_path,
    place_labels,
    short,
    text_width,
)

WIDTH = 900.0
CLOUD = 420.0
"""Height of the upper panel."""
CURVE = 220.0
"""Height of each of the lower ones."""
HEAD = 44.0
CLOSE = 2.0
"""Points within this many plain forwards are crowded: they have a close-up, and their names there.
"""

STYLES = {
    "BESTTA lean": Style(0, 0, 0, strong=True),
    "BESTTA stock": Style(1, 1, 1),
    "tent": Style(2, 2, 2),
    "other methods": Style(2, 0, 2),
    "plain forward": Style(3, 0, 3),
    "BESTTA in the paper": Style(4, 0, 4),
}
# A picture of its own, not part of a page: it brings its colours along, on white.
CSS = """
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.head{font-size:15px;font-weight:600}
.tick,.name{fill:#57606a;font-size:11px}
.legend,.label{font-size:11px}
.label{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}
.grid{stroke:#e4e8ec;fill:none}
.axis{stroke:#8c959f;fill:none}
.one{stroke:#57606a;stroke-dasharray:2 3;fill:none}
.leader{stroke:#aab2bb;fill:none}
.line{fill:none;stroke-width:2}
.d1.line{stroke-dasharray:7 4}
.d2.line{stroke-dasharray:2 3}
.c0.line{stroke:#0b62c4}.c1.line{stroke:#7d4bc2}.c2.line{stroke:#b4540a}
.c0.mark{fill:#0b62c4}.c1.mark{fill:#7d4bc2}.c2.mark{fill:#b4540a}
.c3.mark{fill:#1f2328}.c4.mark{fill:#fff;stroke:#7d4bc2;stroke-width:2}
""".strip()


def group(contender: str) -> str:
    """Which of the `STYLES` a contender is drawn in."""
    for name in ("BESTTA lean", "BESTTA stock", "plain forward"):
        if contender.startswith(name):
            return name
    return "other methods"


def label(contender: str) -> str:
    """What stands beside a point; its colour says that it is BESTTA.

    >>> label("BESTTA lean layer3"), label("tent")
    ('lean layer3', 'tent')
    """
    return contender.removeprefix("BESTTA ")


@dataclass(frozen=True)
class Point:
    """One contender's cost, to be drawn."""

    name: str
    kind: str
    time: float
    memory: float

    @property
    def near(self) -> bool:
        """Whether it is in the close-up."""
        return max(self.time, self.memory) <= CLOSE


def points_of(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The contenders of which both are known, and the paper's BESTTA."""
    points = []
    for row in rows:
        name, kind = row["contender"], group(row["contender"])
        if len(found := known([row["time_ratio"], row["memory_ratio"]])) == 2:
            points.append(Point(label(name), kind, *found))
        published = known([row["paper_time_ratio"], row["paper_memory_ratio"]])
        if kind == "BESTTA stock" and len(published) == 2:
            points.append(Point("BESTTA in the paper", "BESTTA in the paper", *published))
    return points


def cloud(points: Sequence[Point], labelled: Sequence[Point], width: float) -> Canvas:
    """Every point at its time and memory ratio, some with their names.

    Where all have theirs, it is the close-up.
    """
    whole = len(labelled) < len(points)
    canvas = Canvas(width, CLOUD)
    left, right, top, bottom = 40.0, width - 8, 26.0, CLOUD - 40
    x = fit([1.0, *(p.time for p in points)], left, right, log=whole, pad=0.08)
    y = fit([1.0, *(p.memory for p in points)], bottom, top, log=whole, pad=0.08)
    axes(
        canvas,
        x,
        y,
        x_title="time of a step, in plain forwards" + (" (logarithmic)" if whole else ""),
        y_title="peak memory, in plain forwards" + (" (logarithmic)" if whole else "; close-up"),
    )
    canvas.line(x(1.0), bottom, x(1.0), top, "one")
    canvas.line(left, y(1.0), right, y(1.0), "one")
    if whole:
        corner = (min(x(CLOSE), right), max(y(CLOSE), top))
        canvas.line(corner[0], bottom, corner[0], corner[1], "leader")
        canvas.line(left, corner[1], corner[0], corner[1], "leader")
    discs = [(x(p.time), y(p.memory), 5.0) for p in [*labelled, *points]]
    texts = [p.name for p in labelled] + [""] * len(points)
    places = place_labels(discs, texts, (left + 2, top, right, bottom - 2))[: len(labelled)]
    names: list[tuple[float, float, str, str]] = []
    for point, (px, py, _), (start, base) in zip(labelled, discs, places, strict=False):
        # Text is narrower than reckoned: it keeps to the end that faces its point.
        end = start + text_width(point.name)
        anchor = "end" if (start + end) / 2 < px - 8 else "start"
        width_shown = 0.9 * text_width(point.name, 11.0)
        first = end - width_shown if anchor == "end" else start
        near = (min(max(px, first), first + width_shown), base - 4)
        if math.dist(near, (px, py)) > 16:
            canvas.line(px, py, *near, "leader")
        names.append((end if anchor == "end" else start, base, point.name, anchor))
    for point in points:
        style = STYLES[point.kind]
        canvas.add(
            "path",
            title=f"{point.name}: {point.time:.2f}x the time, {point.memory:.2f}x the memory",
            d=marker_path(style.marker, x(point.time), y(point.memory), 5.0),
            class_=f"{style.classes} mark",
        )
    for at, base, text, anchor in names:
        canvas.text(at, base, text, "label", anchor)
    return canvas


def curves(
    series: Mapping[str, Sequence[Mapping[str, Any]]], ratio: str, title: str, width: float
) -> Canvas:
    """One ratio of each contender over the points of its curve."""
    canvas = Canvas(width, CURVE)
    shown = {n: points for n, points in series.items() if n != "plain forward" and points}
    every = [point for points in shown.values() for point in points]
    ticks: dict[str, float] = {}
    words: dict[str, str] = {}
    for point in every:
        name, pixels = point["label"], point.get("pixels")
        ticks.setdefault(name, math.log(pixels) if pixels else float(len(ticks)))
        words[name] = f"{pixels / 1e6:.2g}" if pixels else name
    x = fit(ticks.values(), 34.0, width - 12, pad=0.1)
    y = fit([1.0, *(p[ratio] for p in every)], CURVE - 34, 26.0, pad=0.06)
    axes(
        canvas,
        x,
        y,
        y_title=title,
        x_ticks=[(at, words[name]) for name, at in ticks.items()],
        y_count=4,
    )
    canvas.line(34.0, y(1.0), width - 12, y(1.0), "one")
    for name, points in shown.items():
        style = STYLES["tent" if name == "tent" else group(name)]
        places = [(x(ticks[p["label"]]), None if p[ratio] is None else y(p[ratio])) for p in points]
        canvas.add("path", d=line_path(places), class_=f"{style.classes} line")
        for (px, py), point in zip(places, points, strict=True):
            if py is not None:
                canvas.add(
                    "path",
                    title=f"{name}, {point['label']}: {point[ratio]:.2f}x",
                    d=marker_path(style.marker, px, py, 4.0),
                    class_=f"{style.classes} mark",
                )
    return canvas


def legend(canvas: Canvas, names: Sequence[str], left: float, base: float, lines: bool) -> None:
    for name in names:
        style = STYLES[name]
        if lines:
            path = f"M{short(left)} {short(base - 4)}h26"
            canvas.add("path", d=path, class_=f"{style.classes} line")
        outline = marker_path(style.marker, left + (13 if lines else 5), base - 4, 4.5)
        canvas.add("path", d=outline, class_=f"{style.classes} mark")
        left += 32 if lines else 15
        canvas.text(left, base, name, "legend")
        left += text_width(name, 11.0) + 14


def place(canvas: Canvas, panel: Canvas, left: float, top: float) -> None:
    canvas.add("g", "".join(panel.parts), transform=f"translate({short(left)} {short(top)})")


def draw(record: Mapping[str, Any]) -> str:
    """The whole picture as an SVG file's text."""
    tables = [s for s in record["subjects"].values() if s["subject"] != "growth"]
    if not tables:
        raise SystemExit(
            "this record holds no table: run benchmarks/cost.py without --only growth."
        )
    # The paper's figures are those of the largest images.
    # The one with most methods in it; of those the largest image.
    subject = max(tables, key=lambda s: (len(s["rows"]), math.prod(s["size"])))
    growth = {what: record["growth"][what] for what in ("size", "depth", "number")}
    grows = any(any(series.values()) for series in growth.values())
    below = HEAD + CLOUD + 40
    canvas = Canvas(WIDTH, below + 20 + 2 * (CURVE + 8) if grows else HEAD + CLOUD + 20)
    canvas.add("style", CSS)
    canvas.add("rect", width="100%", height="100%", fill="#fff")
    canvas.text(12, 22, f"a  One step, {subject['title']}, one thread of a CPU", "head")
    kinds = [name for name in STYLES if name != "tent"]
    legend(canvas, kinds, 14.0, 40.0, lines=False)
    points = points_of(subject["rows"])
    close = [p for p in points if p.near]
    half = WIDTH / 2
    far = [p for p in points if not p.near]
    place(canvas, cloud(points, far, half - 20), 12.0, HEAD + 16)
    place(canvas, cloud(close, close, half - 20), half + 8, HEAD + 16)
    if grows:
        legend(canvas, ["BESTTA lean", "BESTTA stock", "tent"], 14.0, below + 10, lines=True)
        third = WIDTH / 3
        over = {
            "size": "b  {} over image size (megapixels)",
            "depth": "c  {} over BeIN's place",
            "number": "d  {} over number of BeINs",
        }
        for column, (what, words) in enumerate(over.items()):
            for line, (ratio, name) in enumerate(
                [("time_ratio", "time"), ("memory_ratio", "memory")]
            ):
                panel = curves(growth[what], ratio, words.format(name), third - 14)
                place(canvas, panel, 12 + column * third, below + 24 + line * (CURVE + 8))
    about = f"Time and memory of adaptation over the plain forward, {subject['title']}"
    svg = canvas.finish(about)
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    written = Path("runs/cost/record.json")
    told = "what benchmarks/cost.py has written"
    parser.add_argument("record", type=Path, nargs="?", default=written, help=told)
    parser.add_argument("--out", type=Path, default=Path("docs/cost.svg"))
    asked = parser.parse_args()
    if not asked.record.exists():
        raise SystemExit(
            f"there is no record {asked.record}: python benchmarks/cost.py writes one."
        )
    record = json.loads(asked.record.read_text(encoding="utf-8"))
    if record.get("benchmark") != "cost":
        raise SystemExit(
            f"{asked.record} is a record of {record.get('benchmark')!r}, not of benchmarks/cost.py."
        )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(asked.out, draw(record).encode())
    print(f"Drawn: {asked.out}. Look at it in a browser, on light and dark.")


if __name__ == "__main__":
    main()
