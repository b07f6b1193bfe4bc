"""Write the figures of docs/guard.md, and draw docs/guard.svg, from the guard's record.

python benchmarks/guard_table.py results/measured/guard.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bestta.files import write_whole
from bestta.reports.svg import Canvas, Scale, Style, axes, fit, line_path, short, text_width

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guard.md"
PICTURE = PAGE.with_suffix(".svg")
RECORD = ROOT / "results" / "measured" / "guard.json"
START, END = "<!-- figures -->", "<!-- end of the figures -->"

BELOW = 1.0
"""Points below the source model that the guard may end up at,"""
SHARE = 99.0
"""in all but so many percent of the cells;"""
COST = 0.3
"""points that it may cost where nothing goes wrong;"""
SOON = 50
"""and frames after which a collapsed stream is back."""
WORST = 10
"""Cells that are listed."""

Result = Mapping[str, Any]


# --- figures ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What a number of cells say together; in points over the source model."""

    cells: int
    within_percent: Mapping[str, float]
    """Cells no more than a point below the source model, unguarded and guarded."""
    worst: Mapping[str, float]
    mean: Mapping[str, float]
    cost: float | None
    """Mean of unguarded minus guarded where unguarded is no more than a point below the source."""
    cost_of_gains: float | None
    """The same where unguarded is no worse than the source."""
    costly_percent: float | None
    """Of the cells that the cost is of, those where it is more than a point."""
    look_percent: float
    """Images that the guard looked at."""


def gain(result: Result, how: str) -> float:
    """Points over the source model, ``how`` being guarded or unguarded."""
    return float(result[how]["score"] - result["source"])


def summary(cells: Sequence[Result]) -> Summary:
    """Of at least one cell, run both ways."""
    gains = {how: [gain(cell, how) for cell in cells] for how in ("unguarded", "guarded")}
    pairs = list(zip(gains["unguarded"], gains["guarded"], strict=True))
    fine = [loose - kept for loose, kept in pairs if loose >= -BELOW]
    good = [loose - kept for loose, kept in pairs if loose >= 0]
    return Summary(
        cells=len(cells),
        within_percent={
            how: 100 * fmean(value >= -BELOW for value in own) for how, own in gains.items()
        },
        worst={how: min(own) for how, own in gains.items()},
        mean={how: fmean(own) for how, own in gains.items()},
        cost=fmean(fine) if fine else None,
        cost_of_gains=fmean(good) if good else None,
        costly_percent=100 * fmean(cost > BELOW for cost in fine) if fine else None,
        look_percent=100
        * sum(cell["guarded"]["looks"] for cell in cells)
        / sum(cell["length"] for cell in cells),
    )


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share seen in ``count`` draws, in percent.

    By hand, of 9 in 10: (0.9 + 0.1921 ± 1.96 √(0.009 + 0.0096)) / 1.3842.

    >>> [round(bound, 1) for bound in interval(90.0, 10)]
    [59.6, 98.2]
    """
    part, square = share / 100, 1.96**2
    middle = part + square / (2 * count)
    reach = 1.96 * math.sqrt(part * (1 - part) / count + square / (4 * count**2))
    whole = 1 + square / count
    return 100 * (middle - reach) / whole, 100 * (middle + reach) / whole


def points(value: float | None) -> str:
    """With its sign, and none on what prints as zero.

    >>> points(-0.031), points(-0.001), points(None)
    ('-0.03', '0.00', '–')
    """
    if value is None:
        return "–"
    return f"{value:+.2f}" if abs(value) >= 0.005 else "0.00"


def lost(cost: float | None) -> str:
    """Points lost, so more is worse.

    >>> lost(0.126), lost(-0.2)
    ('0.13', '-0.20')
    """
    return "–" if cost is None else f"{cost:.2f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0f} %"


def figures(record: Result) -> str:
    """The tables, the picture and where they come from, as Markdown."""
    parts: list[str] = []
    if record["cells"]:
        parts += [*summary_part(record), ""]
    if record["stress"]:
        parts += [*stress_part(record["stress"]), ""]
    if record["baselines"]:
        parts += [*baselines_part(record["baselines"]), ""]
    if record["cost"]:
        parts += [*cost_part(record["cost"]), ""]
    machine = record["provenance"]["machine"]
    cpu = machine.get("cpu") or machine["processor"]
    parts.append(
        f"[Record](../results/measured/guard.json): seed {record['seed']}, {cpu}, commit "
        f"{', '.join(record['commits'])}."
    )
    return "\n".join(parts)


def summary_part(record: Result) -> list[str]:
    """What the cells say, by model and together, and the worst of them."""
    cells = record["cells"]
    whole = summary(cells)
    names = list(dict.fromkeys(cell["model"] for cell in cells))
    rows = {"all": whole}
    if len(names) > 1:
        rows |= {name: summary([c for c in cells if c["model"] == name]) for name in names}
    lines = [
        "![Points over the source model of every cell, with the guard and without](guard.svg)",
        "",
        f"{whole.cells} cells of {record['frames']} frames; points of mIoU or accuracy over the "
        "source model, without the guard → with it.",
        "",
        "| | cells | at most 1 point below | worst | mean | cost where nothing goes wrong | "
        "more than 1 point of it | cost where adapting helps | images looked at |",
        "| :--- |" + " ---: |" * 8,
    ]
    for name, row in rows.items():
        within, worst, mean = row.within_percent, row.worst, row.mean
        lines.append(
            f"| {name} | {row.cells} | {within['unguarded']:.1f} % → {within['guarded']:.1f} % | "
            f"{points(worst['unguarded'])} → {points(worst['guarded'])} | "
            f"{points(mean['unguarded'])} → {points(mean['guarded'])} | "
            f"{lost(row.cost)} | {percent(row.costly_percent)} | {lost(row.cost_of_gains)} | "
            f"{percent(row.look_percent)} |"
        )
    kept = whole.within_percent["guarded"]
    low, high = interval(kept, whole.cells)
    beyond = round(whole.cells * (1 - kept / 100))
    lines += [
        "",
        "Nothing goes wrong where the unguarded run is no more than 1 point below the source, and "
        "adapting helps where it is no worse; cost is what is lost there by guarding, on average, "
        "less what is won: where learning went astray above the source, guarding wins. The column "
        "behind it counts the cells that lose more than a point.",
        "",
        verdict(
            kept >= SHARE,
            f"at least {SHARE:.0f} % of the cells at most {BELOW:g} point below the source model",
            f"{kept:.1f} % ({beyond} further below; a draw of this size leaves the share between "
            f"{low:.1f} and {high:.1f} %, with 95 % confidence)",
        ),
        verdict(
            whole.cost is None or whole.cost <= COST,
            f"no more than {COST} points lost where nothing goes wrong",
            lost(whole.cost),
        ),
        "",
        f"The worst with the guard; bold, those more than {BELOW:g} point below:",
        "",
        "| model | condition | layer | lr | γ | source | unguarded | guarded |",
        "| :--- | :--- | :--- | ---: | :--- | ---: | ---: | ---: |",
    ]
    for cell in sorted(cells, key=lambda c: gain(c, "guarded"))[:WORST]:
        place = "clear" if not cell["severity"] else f"{cell['condition']} {cell['severity']}"
        mark = "" if gain(cell, "guarded") >= -BELOW else "**"
        lines.append(
            f"| {cell['model']} | {place} | {cell['layer']} | {cell['lr']:g} | {cell['gamma']} | "
            f"{cell['source']:.2f} | {points(gain(cell, 'unguarded'))} | "
            f"{mark}{points(gain(cell, 'guarded'))}{mark} |"
        )
    return lines


def verdict(met: bool, bar: str, figure: str) -> str:
    return f"- {'Met' if met else '**Not met**'}: {bar}: {figure}"


def stress_part(cases: Sequence[Result]) -> list[str]:
    """Every stress case, and whether the worst of them, and the collapsed ones, are all right."""
    lines = [
        "Stress cases, at the usual learning rate and at a hundred times that; points over the "
        "source model, and what the guard did:",
        "",
        "| model | case | lr | source | unguarded | guarded | looks | by the source | "
        "rolled back |",
        "| :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in cases:
        lines.append(
            f"| {case['model']} | {case['case']} | {case['lr']:g} | {case['source']:.2f} | "
            f"{points(gain(case, 'unguarded'))} | {points(gain(case, 'guarded'))} | "
            f"{did(case)} |"
        )
    worst = min(cases, key=lambda case: gain(case, "guarded"))
    told = f"{points(gain(worst, 'guarded'))} ({worst['model']}, {worst['case']}, {worst['lr']:g})"
    bar = f"every stress case at most {BELOW:g} point below the source model"
    lines += ["", verdict(gain(worst, "guarded") >= -BELOW, bar, told)]
    collapsed = [case for case in cases if "back_after" in case]
    if collapsed:
        after = {how: [c["back_after"][how] for c in collapsed] for how in ("guarded", "unguarded")}
        met = all(frames is not None and frames <= SOON for frames in after["guarded"])
        told = f"{listed(after['guarded'])} frames; unguarded {listed(after['unguarded'])}"
        lines.append(verdict(met, f"a collapsed stream is back within {SOON} frames", told))
    return lines


def listed(frames: Sequence[int | None]) -> str:
    """Numbers of frames, or never.

    >>> listed([10, None])
    '10, never'
    """
    return ", ".join("never" if one is None else str(one) for one in frames)


def did(result: Result) -> str:
    """What the guard did in a run, as cells of a table."""
    run, length = result["guarded"], result["length"]
    return f"{run['looks']} of {length} | {run['skipped']} | {run['rolled_back']}"


def baselines_part(baselines: Sequence[Result]) -> list[str]:
    """Other methods with and without the guard."""
    lines = [
        "Other methods, one image at a time, with `guard=True` and without; points over the source "
        "model:",
        "",
        "| model | condition | method | source | plain | guarded | looks | by the source | "
        "rolled back |",
        "| :--- | :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in baselines:
        place = "clear" if not one["severity"] else f"{one['condition']} {one['severity']}"
        lines.append(
            f"| {one['model']} | {place} | {one['method']} | {one['source']:.2f} | "
            f"{points(gain(one, 'unguarded'))} | {points(gain(one, 'guarded'))} | {did(one)} |"
        )
    return lines


def cost_part(timings: Sequence[Result]) -> list[str]:
    """What the guard costs in time."""
    lines = [
        "Time of a call over the plain forward, one thread, 256x128, median (mean):",
        "",
        "| model | condition | unguarded | guarded | images looked at |",
        "| :--- | :--- | ---: | ---: | ---: |",
    ]
    for one in timings:
        times = [
            f"{one[how]['median_ratio']:.2f} ({one[how]['mean_ratio']:.2f})"
            for how in ("unguarded", "guarded")
        ]
        looked = f"{100 * one['looks'] / one['length']:.0f} %"
        place = "clear" if not one["severity"] else f"{one['condition']} {one['severity']}"
        lines.append(f"| {one['model']} | {place} | {' | '.join(times)} | {looked} |")
    return lines


# --- the picture --------------------------------------------------------------------------

WIDTH, HEIGHT, HEAD = 900.0, 330.0, 46.0
CLOSE_UP = (-4.0, 8.0)
"""Points between which the second panel shows the same curves."""
STYLES = {"unguarded": Style(1, 1), "guarded": Style(0, 0, strong=True)}
# A picture of its own, not part of a page: it brings its colours along, on white.
CSS = """
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.head{font-size:15px;font-weight:600}
.tick,.name,.legend{font-size:11px}
.tick,.name{fill:#57606a}
.grid{stroke:#e4e8ec;fill:none}
.axis{stroke:#8c959f;fill:none}
.one{stroke:#57606a;stroke-dasharray:2 3;fill:none}
.line{fill:none;stroke-width:2}
.d1.line{stroke-dasharray:7 4}
.c0.line{stroke:#0b62c4}.c1.line{stroke:#b4540a}
""".strip()


def draw(cells: Sequence[Result]) -> str:
    """Points over the source of every cell, sorted, both ways; as an SVG file's text."""
    gains = {how: sorted(gain(cell, how) for cell in cells) for how in STYLES}
    canvas = Canvas(WIDTH, HEAD + HEIGHT)
    canvas.add("style", CSS)
    canvas.add("rect", width="100%", height="100%", fill="#fff")
    canvas.text(12, 22, f"{len(cells)} cells, from the worst to the best", "head")
    left = 14.0
    for how, style in STYLES.items():
        canvas.add("path", d=f"M{short(left)} 36h26", class_=f"{style.classes} line")
        name = {"unguarded": "without the guard", "guarded": "with it"}[how]
        canvas.text(left + 32, 40, name, "legend")
        left += 46 + text_width(name, 11.0)
    half = WIDTH / 2
    for number, panel in enumerate([curves(gains, half - 20), curves(gains, half - 20, CLOSE_UP)]):
        place = f"translate({short(12 + number * half)} {short(HEAD)})"
        canvas.add("g", "".join(panel.parts), transform=place)
    worst = {how: points(own[0]) for how, own in gains.items()}
    svg = canvas.finish(
        f"Points over the source model of {len(cells)} cells, sorted: the worst is "
        f"{worst['unguarded']} without the guard and {worst['guarded']} with it"
    )
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def curves(
    gains: Mapping[str, Sequence[float]],
    width: float,
    bounds: tuple[float, float] | None = None,
) -> Canvas:
    """Both curves, or what lies between ``bounds`` of them."""
    canvas = Canvas(width, HEIGHT)
    left, right, top, bottom = 34.0, width - 8, 24.0, HEIGHT - 40
    every = [value for own in gains.values() for value in own]
    y = fit([*every, -BELOW, 0.0], bottom, top) if bounds is None else Scale(*bounds, bottom, top)
    x = Scale(0.0, 100.0, left, right)
    title = "points over the source model" + ("" if bounds is None else "; close-up")
    axes(canvas, x, y, x_title="cells, in percent", y_title=title)
    for level in (-BELOW, 0.0):
        canvas.line(left, y(level), right, y(level), "one" if level else "axis")
    canvas.text(right, y(-BELOW) + 13, f"−{BELOW:g}", "tick", "end")
    for how, own in gains.items():
        low, high = (y.low, y.high)
        places = [
            (x(100 * (n + 0.5) / len(own)), y(value) if low <= value <= high else None)
            for n, value in enumerate(own)
        ]
        canvas.add("path", d=line_path(places), class_=f"{STYLES[how].classes} line")
    return canvas


# --- the page -----------------------------------------------------------------------------


def written(page: str, inside: str) -> str:
    """The page with other figures in it."""
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    return f"{head}{START}\n{inside}\n{END}{tail}"


def read(path: Path) -> Result:
    """The record of benchmarks/guard.py, or an error that says what to run."""
    if not path.exists():
        raise SystemExit(
            f"there is no record {path}: python benchmarks/guard.py --all --out {path} writes one."
        )
    try:
        record: Result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{path} is no JSON file: {error}.") from None
    kind = record.get("benchmark") if isinstance(record, dict) else None
    if kind != "guard":
        raise SystemExit(f"{path} is a record of {kind!r}, not of benchmarks/guard.py.")
    half = [cell["name"] for cell in record["cells"] if "unguarded" not in cell]
    if half:
        raise SystemExit(
            f"{path} has {len(half)} cells without an unguarded run, such as {half[0]}: "
            "run benchmarks/guard.py without --guarded-only."
        )
    return record


def renewed(page: str, record: Path = RECORD) -> str:
    """The page with the figures as the record has them."""
    return written(page, figures(read(record)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    told = "what benchmarks/guard.py has written"
    parser.add_argument("record", type=Path, nargs="?", default=RECORD, help=told)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    record = read(asked.record)
    page = asked.page.read_text(encoding="utf-8") if asked.page.exists() else ""
    if START not in page or END not in page:
        raise SystemExit(f"{asked.page} has no place for the figures: {START} … {END}.")
    write_whole(asked.page, written(page, figures(record)).encode())
    if record["cells"]:
        write_whole(asked.page.with_suffix(".svg"), draw(record["cells"]).encode())
    print(f"{asked.page} holds the figures of {asked.record}. Look at the picture in a browser.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
