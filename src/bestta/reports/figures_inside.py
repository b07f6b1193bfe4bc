"""Figures of what goes on inside: losses and γ, similarities, embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bestta.reports.comparable import other_images, source_images, thinned
from bestta.reports.correlation import (
    NAMES,
    Correlation,
    correlate,
    frame_scores,
    line,
    share_above,
)
from bestta.reports.figures import (
    PANEL,
    SMALL,
    Figure,
    Shown,
    comparable,
    dig,
    draw_line,
    for_screen_and_phone,
    legend,
    metric_of,
    panel,
    panels,
)
from bestta.reports.records import words
from bestta.reports.svg import (
    FONT,
    Canvas,
    Scale,
    axes,
    escape,
    fit,
    known,
    line_path,
    marker_path,
    short,
    text_width,
    tick_text,
)

TRACES = {
    "style": "Style loss",
    "content": "Content loss",
    "entropy": "Entropy of the prediction, nats",
    "cross_entropy": "Cross-entropy",
    "l2": "L2 loss",
    "total": "Total loss",
    "gamma": "Largest |γ|",
    "gamma_mean": "Mean |γ|",
}
"""What the traces are called, in the order in which they are shown."""

SIMILARITIES = {
    "direction": "Direction similarity",
    "target": "Target similarity",
    "source": "Source similarity",
    "entropy": "Entropy, nats",
}

POINTS = 160
"""Points a line is thinned to; more cannot be told apart in a small plot."""

DOTS = 800


def traces(shown: Sequence[Shown]) -> Figure | None:
    """Losses and γ along the stream, smoothed, one small plot each."""
    named = [*TRACES, *sorted(_other_traces(shown))]
    parts, drawn = [], []
    for name in named:
        lines = [(one, *_smoothed(one.first, name)) for one in shown]
        lines = [entry for entry in lines if known(entry[2])]
        # One value is no course: it is shown beside others' lines, and not alone.
        if any(len(known(values)) > 1 for _, _, values in lines):
            title = TRACES.get(name, words(name).capitalize())
            parts.append(panel(title, _trace(lines, title)))
            drawn += [one for one, _, _ in lines]
    if not parts:
        return None
    caption = (
        "Along the stream, as running means over a fortieth of it; grey lines part the rounds. "
        "A γ that settles is a method that has found its place, one that keeps growing is not. "
        "Methods that do not compute a quantity are not in its plot."
    )
    if any(len(one.records) > 1 for one in shown):
        caption += " Of several seeds the first is shown."
    kept = [one for one in shown if one in drawn]
    caption = " ".join([caption, *thinned(one.entry for one in kept)])
    return Figure("traces", "Losses and γ", legend(kept) + panels(parts), caption)


def _other_traces(shown: Sequence[Shown]) -> set[str]:
    """Quantities that a method traces beyond those we know; similarities have their own figure."""
    names = {name for one in shown for name in one.first.get("traces") or {}}
    return {n for n in names if n != "step" and n not in TRACES and n not in SIMILARITIES}


def _smoothed(record: Mapping[str, Any], name: str) -> tuple[list[float], list[float | None]]:
    """Where a trace was taken and its running mean there, at no more than POINTS places."""
    found = record.get("traces") or {}
    steps, values = found.get("step") or [], found.get(name) or []
    if not steps or len(steps) != len(values):
        return [], []
    numbers = np.array([_number(v) for v in values], dtype=float)
    there = np.isfinite(numbers)
    half = max(len(numbers) // 80, 0)
    sums = np.concatenate([[0.0], np.cumsum(np.where(there, numbers, 0.0))])
    counts = np.concatenate([[0], np.cumsum(there)])
    at = np.unique(np.linspace(0, len(numbers) - 1, min(POINTS, len(numbers))).round().astype(int))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(numbers))
    count = counts[high] - counts[low]
    total = sums[high] - sums[low]
    smooth = [float(t / c) if c else None for t, c in zip(total, count, strict=True)]
    return [float(steps[n]) for n in at], smooth


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _trace(lines: Sequence[tuple[Shown, list[float], list[float | None]]], title: str) -> str:
    canvas = Canvas(PANEL, 178.0)
    bottom = 142.0
    x = fit((v for _, at, _ in lines for v in at), 44, PANEL - 8, pad=0.0)
    y = fit((v for _, _, values in lines for v in values), bottom, 10)
    for edge in _round_edges(lines[0][0].first):
        if x.low < edge < x.high:
            canvas.line(x(edge), 10, x(edge), bottom, "edge")
    axes(canvas, x, y, y_count=4, x_count=4)
    canvas.text(PANEL - 8, bottom + 32, "frame", "tick", "end")
    for one, at, values in lines:
        points = [(x(a), None if v is None else y(v)) for a, v in zip(at, values, strict=True)]
        alone = len(known(values)) == 1
        # A path of one point is invisible; a marker is not.
        draw_line(canvas, points, one.style, [one.label] * len(points) if alone else ())
    return canvas.finish(f"{title} along the stream, by method")


def _round_edges(record: Mapping[str, Any]) -> list[int]:
    """The frames at which a round begins, but for the first."""
    frames = record.get("frames") or {}
    blocks = record["blocks"]
    edges, before = [], None
    for position, block in zip(frames.get("position", ()), frames.get("block", ()), strict=False):
        current = blocks[block]["round"] if 0 <= block < len(blocks) else before
        if before is not None and current != before:
            edges.append(position)
        before = current
    return edges


def correlation_plots(shown: Sequence[Shown]) -> Figure | None:
    """Each similarity against the score of the same frame, with a line and its 95 % band."""
    asked = [one for one in shown if _has_similarities(one.first)]
    # Ours in full view; the others folded away, for they are many.
    parts = []
    for n, one in enumerate(sorted(asked, key=lambda one: not one.entry.highlighted)):
        plots = [_correlation(one, name) for name in NAMES]
        body = panels((plot for plot in plots if plot), "four")
        parts.append(_folded(one.label, body, unfolded=n == 0, alone=len(asked) == 1))
    if not parts:
        return None
    _, up = metric_of(shown)
    score = "mIoU" if up else "accuracy (0 or 100 for one image)"
    caption = (
        f"Each dot is one frame: does the similarity tell its {score} without a label? The line is "
        "the least-squares fit, the band its 95 % confidence band; r is Pearson's correlation with "
        "its 95 % interval. An interval that holds 0 shows no correlation."
    )
    high = [share_above(one.first, "target", 0.9) for one in asked]
    for one, share in zip(asked, high, strict=True):
        if share is not None and share > 0.8 and one.entry.highlighted:
            caption += (
                f" {100 * share:.0f} % of {one.label}'s target similarities lie above 0.9, which "
                "leaves little to correlate with."
            )
    caption = " ".join([caption, *thinned(one.entry for one in asked)])
    return Figure("correlations", "What goes with a good prediction", "".join(parts), caption)


def _has_similarities(record: Mapping[str, Any]) -> bool:
    found = record.get("traces") or {}
    return any(known(found.get(name) or ()) for name in ("direction", "target", "source"))


def _correlation(one: Shown, name: str) -> str:
    record = one.first
    values = record["traces"].get(name)
    scores = frame_scores(record)
    if not values or len(values) != len(scores):
        return ""
    pairs = [
        (v, s)
        for v, s in zip(values, scores, strict=True)
        if v is not None and s is not None and math.isfinite(v) and math.isfinite(s)
    ]
    if not pairs:
        return ""
    xs, ys = [v for v, _ in pairs], [s for _, s in pairs]
    found = correlate(xs, ys)
    canvas = Canvas(SMALL, 200.0)
    bottom = 176.0
    x = fit(xs, 34, SMALL - 6, pad=0.04)
    y = fit(ys, bottom, 22, pad=0.05)
    accuracy = "" if record["higher_is_better"] else "accuracy, %"
    axes(canvas, x, y, x_count=4, y_title=accuracy or f"{record['metric']} of the frame, %")
    kept = pairs[:: max(1, math.ceil(len(pairs) / DOTS))]
    dots = "".join(f"M{short(x(v))} {short(y(s))}h0" for v, s in kept)
    canvas.add("path", d=dots, class_=f"dots {one.style.classes}")
    if found.r is not None:
        low, high = min(xs), max(xs)
        at = [low + (high - low) * n / 24 for n in range(25)]
        middle, under, over = line(xs, ys, at)
        around = [*zip(at, over, strict=True), *zip(at[::-1], under[::-1], strict=True)]
        inside = [(x(a), _clip(y(float(b)), y)) for a, b in around]
        canvas.add("path", d=line_path(inside) + "z", class_=f"band {one.style.classes}")
        path = line_path((x(a), _clip(y(float(b)), y)) for a, b in zip(at, middle, strict=True))
        canvas.add("path", d=path, class_=f"line fit {one.style.classes}")
    said = _r_words(found)
    drawing = canvas.finish(f"{one.label}: {SIMILARITIES[name]} against the score; {said}")
    return panel(SIMILARITIES[name], drawing, f' <span class="aside">{escape(said)}</span>')


def _clip(at: float, scale: Scale) -> float:
    return min(max(at, min(scale.start, scale.stop)), max(scale.start, scale.stop))


def _r_words(found: Correlation) -> str:
    if found.r is None or found.low is None or found.high is None:
        return f"no r ({found.n} frames)"
    said = f"r = {found.r:.2f} [{found.low:.2f}, {found.high:.2f}], n = {found.n:,}"
    return said.replace("-", "−")


def _folded(summary: str, body: str, *, unfolded: bool, alone: bool) -> str:
    """``body`` under a heading that folds it away; without one where there is nothing else."""
    if alone:
        return body
    mark = " open" if unfolded else ""
    return f"<details{mark}><summary>{escape(summary)}</summary>{body}</details>"


def distances(shown: Sequence[Shown]) -> Figure | None:
    """How far each method's embeddings are from the source's, condition by condition."""
    found = {one.label: _distances(one) for one in shown}
    drawn, left = comparable([one for one in shown if found[one.label]], source_images)
    if not drawn:
        return None
    conditions = list(dict.fromkeys(name for one in drawn for name in found[one.label]))
    # A lane a method, so that markers at one distance do not hide each other.
    lane = 9.0 if len(drawn) < 10 else 7.0
    pitch = max(lane * len(drawn), FONT + 4) + 12

    def draw(width: float) -> str:
        left = max(text_width(words(name)) for name in conditions) + 14
        bottom = 8 + pitch * len(conditions)
        canvas = Canvas(width, bottom + 40)
        every = [v for one in drawn for pair in found[one.label].values() for v in known(pair)]
        x = Scale(0.0, max([*every, 1e-6]) * 1.04, left, width - 12)
        for n in range(0, len(conditions), 2):
            canvas.add(
                "rect",
                x=left,
                y=8 + pitch * n,
                width=width - 12 - left,
                height=pitch,
                class_="shade",
            )
        ticks = x.ticks(4 if width < 500 else 8)
        for value in ticks:
            canvas.line(x(value), 8, x(value), bottom, "grid")
            canvas.text(x(value), bottom + 15, tick_text(value, ticks), "tick", "middle")
        title = "distance from the source, in its deviations"
        canvas.text((left + width - 12) / 2, canvas.height - 4, title, "name", "middle")
        for n, name in enumerate(conditions):
            top = 8 + pitch * n
            canvas.text(left - 8, top + pitch / 2 + 4, words(name), "tick", "end")
            for k, one in enumerate(drawn):
                if name in found[one.label]:
                    at = top + pitch / 2 + (k - (len(drawn) - 1) / 2) * lane
                    _distance(canvas, x, at, one, name, *found[one.label][name])
        return canvas.finish(
            "distance of the embeddings from the source's, by condition and method"
        )

    layer = drawn[0].first["embeddings"].get("layer", "")
    caption = (
        f"How far the embeddings at {layer} lie from those of the source set: |mean − source mean| "
        "in source deviations, averaged over all channels. The upright stroke is the image without "
        "adaptation, the marker what the method made of it. At 0 the means agree; a method that "
        "moves away from 0 makes things worse."
    )
    caption += f" {other_images(left)}" if left else ""
    body = legend(drawn) + for_screen_and_phone(draw)
    return Figure("distances", "Distance of the embeddings", body, caption)


def _distance(
    canvas: Canvas,
    x: Scale,
    at: float,
    one: Shown,
    name: str,
    target: float | None,
    adapted: float | None,
) -> None:
    """A stroke without adaptation, a marker with it, a line between them."""
    if target is not None:
        canvas.line(x(target), at - 3.5, x(target), at + 3.5, "unadapted")
    if adapted is None:
        return
    if target is not None:
        canvas.line(x(target), at, x(adapted), at, f"lead {one.style.classes}")
    said = "" if target is None else f"; without adaptation {target:.2f}"
    canvas.add(
        "path",
        d=marker_path(one.style.marker, x(adapted), at, 4.0),
        class_=f"mark {one.style.classes}",
        title=f"{one.label}, {words(name)}: {adapted:.2f} deviations{said}",
    )


def _distances(one: Shown) -> dict[str, tuple[float | None, float | None]]:
    """Distance without and with adaptation, by condition."""
    both = (one.first.get("embeddings") or {}).get("distance") or {}
    target, adapted = both.get("target") or {}, both.get("adapted") or {}
    found = {n: (dig(target, n), dig(adapted, n)) for n in dict.fromkeys([*target, *adapted])}
    return {name: pair for name, pair in found.items() if pair != (None, None)}


def embeddings(shown: Sequence[Shown]) -> Figure | None:
    """Histograms of single channels: source, target, adapted; a row a condition."""
    asked = [one for one in shown if (one.first.get("embeddings") or {}).get("channels")]
    parts = []
    for n, one in enumerate(sorted(asked, key=lambda one: not one.entry.highlighted)):
        body = _histogram_grid(one)
        parts.append(_folded(one.label, body, unfolded=n == 0, alone=len(asked) == 1))
    if not parts:
        return None
    layer = asked[0].first["embeddings"].get("layer", "")
    key = (
        '<ul class="legend"><li><span class="swatch source"></span>source images</li>'
        '<li><span class="swatch target"></span>target images, not adapted</li>'
        '<li><span class="swatch adapted"></span>target images, adapted</li></ul>'
    )
    caption = (
        f"Values of single channels at {layer}; the channels were chosen by the source alone, "
        "spread from quiet to lively. Adapting well moves the solid outline from the dashed one "
        "onto the grey ground; an outline that shrinks to a spike has collapsed. "
        "Heights are square roots, and the ends take what lies beyond them. Hover for the range of "
        "values."
    )
    body = key + "".join(parts)
    return Figure("embeddings", "Distributions of the embeddings", body, caption)


def _histogram_grid(one: Shown) -> str:
    found = one.first["embeddings"]
    channels, edges = found["channels"], found.get("edges") or []
    away = _distances(one)
    head = "".join(f'<th scope="col">channel {escape(c)}</th>' for c in channels)
    rows = []
    for name in dict.fromkeys([*(found.get("target") or {}), *(found.get("adapted") or {})]):
        cells = []
        for n, channel in enumerate(channels):
            counts = [
                _nth(found.get("source"), n),
                _nth((found.get("target") or {}).get(name), n),
                _nth((found.get("adapted") or {}).get(name), n),
            ]
            # Behind a ReLU half of the bins are empty: what nobody has is not drawn.
            first, last = _occupied(counts)
            counts = [each[first : last + 1] for each in counts]
            span = _nth(edges, n)[first : last + 2]
            label = f"{one.label}, {words(name)}, channel {channel}: source, target and adapted"
            ends = f"{words(name)}, channel {channel}"
            if len(span) > 1:
                ends += f": {span[0]:.3g} to {span[-1]:.3g}"
            cells.append(f"<td>{_histogram(counts, label, ends)}</td>")
        target, adapted = away.get(name, (None, None))
        beside = ""
        if target is not None and adapted is not None:
            beside = f'<span class="aside">{target:.2f} → {adapted:.2f}</span>'
        rows.append(f'<tr><th scope="row">{escape(words(name))}{beside}</th>{"".join(cells)}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="histograms">'
        f'<table class="histograms"><thead><tr><th scope="col">distance</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _occupied(counts: Iterable[Sequence[float]]) -> tuple[int, int]:
    """The first and the last bin that any of the histograms has something in."""
    filled = [n for each in counts for n, count in enumerate(each) if count]
    return (min(filled), max(filled)) if filled else (0, 0)


def _nth(lists: Any, n: int) -> list[float]:
    return list(lists[n]) if lists and n < len(lists) and lists[n] else []


def _histogram(counts: Iterable[Sequence[float]], label: str, hint: str) -> str:
    """Three outlines on one ground, of shares, so that numbers of images do not matter.

    Heights are square roots: a channel that is mostly silent is one spike otherwise.
    """
    canvas = Canvas(120.0, 56.0)
    shares = [[math.sqrt(c / (sum(each) or 1)) for c in each] for each in counts]
    # The source sets the height, so that a spike is cut off and not the others flattened.
    most = max(shares[0], default=0.0) * 1.25 or max(
        (max(s, default=0.0) for s in shares), default=0
    )
    for each, name in zip(shares, ("source", "target", "adapted"), strict=True):
        if not each or most <= 0:
            continue
        wide = 120 / len(each)
        tops = [54 - 52 * min(share / most, 1.0) for share in each]
        path = f"M0 54V{short(tops[0])}" + "".join(
            f"H{short((n + 1) * wide)}" + (f"V{short(tops[n + 1])}" if n + 1 < len(tops) else "")
            for n in range(len(tops))
        )
        canvas.add("path", d=path + "V54", class_=f"histogram {name}")
    canvas.add("path", d="M0 54H120", class_="axis", title="")
    canvas.add("rect", x=0.0, y=0.0, width=120.0, height=56.0, class_="over", title=hint)
    return canvas.finish(label)
