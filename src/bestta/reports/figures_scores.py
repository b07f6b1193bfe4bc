"""Figures of scores: over the stream, against cost, on the source set, across a study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bestta.reports.comparable import is_looked_at, machine_of, other_images, source_images
from bestta.reports.figures import (
    Figure,
    Shown,
    comparable,
    dig,
    draw_line,
    for_screen_and_phone,
    legend,
    megabytes,
    metric_of,
    metric_title,
    milliseconds,
    percent,
)
from bestta.reports.records import marks_in_words, words
from bestta.reports.svg import (
    FONT,
    Canvas,
    Scale,
    Style,
    apart,
    axes,
    fit,
    known,
    marker_path,
    place_labels,
    text_width,
)

LEAST_RANGE = 4.0
"""Percentage points an axis of scores spans at least, so that a tenth does not look like much."""


SYMBOLS = {"rho": "ρ"}
"""Settings that the paper has a letter for."""


def over_time(shown: Sequence[Shown]) -> Figure | None:
    """The score of every block, in the order of the stream."""
    blocks = shown[0].first["blocks"]
    if len(blocks) < 2:
        return None
    scores = {one.label: one.entry.block_scores for one in shown}
    if not known(v for values in scores.values() for v in values):
        return None

    def draw(width: float) -> str:
        narrow = width < 500
        right = 8.0 if narrow else 16 + max(text_width(one.label) for one in shown)
        names = [words(block["name"]) for block in blocks]
        step = (width - 44 - right) / len(blocks)
        turned = max(map(text_width, names)) > step - 4
        many_rounds = len({block["round"] for block in blocks}) > 1
        named = step >= FONT + 1 or not turned or not many_rounds
        depth = (text_width(max(names, key=len)) if turned else FONT) if named else 0.0
        bottom = 300.0
        height = bottom + 12 + depth + (FONT + 8 if many_rounds else 0)
        canvas = Canvas(width, height)
        x = Scale(-0.5, len(blocks) - 0.5, 44, width - right)
        every = (v for values in scores.values() for v in values)
        y = fit(every, bottom, 28, least=LEAST_RANGE)
        _shade_rounds(canvas, blocks, x, bottom, height, many_rounds)
        axes(canvas, x, y, y_title=metric_title(shown), x_ticks=())
        if named:
            _name_blocks(canvas, names, x, bottom, step, turned)
        for one in shown:
            values = scores[one.label]
            points = [(x(n), None if v is None else y(v)) for n, v in enumerate(values)]
            titles = [
                f"{one.label}, round {block['round'] + 1}, {words(block['name'])}: {percent(value)}"
                for block, value in zip(blocks, values, strict=True)
            ]
            draw_line(canvas, points, one.style, titles if step > 9 else ())
        if not narrow:
            _name_ends(canvas, shown, scores, y, x(len(blocks) - 1), width - right, bottom)
        return canvas.finish(f"{metric_of(shown)[0]} of each block of the stream, by method")

    seeds = max(len(one.records) for one in shown)
    rounds = len({block["round"] for block in blocks})
    caption = (
        f"The {metric_of(shown)[0]} of each of the {len(blocks)} blocks, in the order in which the "
        "methods met them. "
    )
    if rounds > 1:
        first = [words(block["name"]) for block in blocks if block["round"] == blocks[0]["round"]]
        caption += (
            f"Each round shows the same frames again ({', '.join(first)}): a line that sinks from "
            "round to round is a method that loses what it knew. "
        )
    if seeds > 1:
        caption += f"Means over up to {seeds} seeds. "
    caption += "The axis spans the scores."
    body = for_screen_and_phone(draw) + legend(shown, "narrow")
    return Figure("over-time", "Score over time", body, caption)


def _shade_rounds(
    canvas: Canvas,
    blocks: Sequence[Mapping[str, Any]],
    x: Scale,
    bottom: float,
    height: float,
    named: bool,
) -> None:
    """Every other round on a faint ground, and the rounds' numbers at the foot."""
    rounds: dict[int, list[int]] = {}
    for n, block in enumerate(blocks):
        rounds.setdefault(int(block["round"]), []).append(n)
    for r, members in rounds.items():
        left, right = x(members[0] - 0.5), x(members[-1] + 0.5)
        if r % 2:
            canvas.add(
                "rect", x=left, y=20.0, width=right - left, height=bottom - 20, class_="shade"
            )
        if named:
            roomy = right - left > 56
            text = f"round {r + 1}" if roomy else str(r + 1)
            canvas.text((left + right) / 2, height - 5, text, "name", "middle")


def _name_blocks(
    canvas: Canvas, names: Sequence[str], x: Scale, bottom: float, step: float, turned: bool
) -> None:
    """The conditions along the axis; every second, third ... one where there is no room."""
    stride = 1 if not turned else max(1, math.ceil((FONT + 1) / step))
    for n in range(0, len(names), stride):
        canvas.line(x(n), bottom, x(n), bottom + 4, "axis")
        if turned:
            canvas.text(x(n) + 4, bottom + 8, names[n], "tick", "end", turn=-90.0)
        else:
            canvas.text(x(n), bottom + 17, names[n], "tick", "middle")


def _name_ends(
    canvas: Canvas,
    shown: Sequence[Shown],
    values: Mapping[str, Sequence[float | None]],
    y: Scale,
    end: float,
    right: float,
    bottom: float,
) -> None:
    """Each line's name beside its last point, moved apart where lines end together."""
    named = [(one, known(values[one.label])) for one in shown]
    last = [(one, y(seen[-1])) for one, seen in named if seen]
    places = apart([at for _, at in last], FONT + 3, 24, bottom)
    for (one, at), place in zip(last, places, strict=True):
        canvas.line(end + 6, at, right + 2, place, f"lead {one.style.classes}")
        canvas.text(right + 6, place + 4, one.label, f"label {one.style.classes}")


def bubbles(shown: Sequence[Shown]) -> Figure | None:
    """The paper's first figure: score against time per image, with memory as area."""
    scored = [one for one in shown if one.score is not None and _time(one) > 0]
    timed, left = comparable(scored, lambda record: (machine_of(record), is_looked_at(record)))
    if not timed:
        return None
    over_model = all(one.mean("cost", "over_model_bytes") is not None for one in timed)
    amount_of = "over_model_bytes" if over_model else "peak_bytes"
    memory = {one.label: one.mean("cost", amount_of) for one in timed}
    most = max(known(memory.values()), default=0.0)
    times = [_time(one) for one in timed]
    log = max(times) > 10 * min(times)

    def draw(width: float) -> str:
        narrow = width < 500
        canvas = Canvas(width, 330.0 if narrow else 400.0)
        bottom, largest = canvas.height - 42, 20.0 if narrow else 32.0
        x = fit(times, 46, width - 10, log=log, pad=0.16 if narrow else 0.1)
        y = fit((one.score for one in timed), bottom, 30, pad=0.16, least=LEAST_RANGE)
        scale = " (logarithmic)" if log else ""
        axes(canvas, x, y, x_title=f"time per image, ms{scale}", y_title=metric_title(shown))
        discs, texts = [], []
        for one, time in zip(timed, times, strict=True):
            amount = memory[one.label]
            share = max(amount or 0.0, 0.0) / most if most > 0 else 0.0
            discs.append((x(time), y(one.score or 0.0), max(largest * math.sqrt(share), 4.0)))
            told = amount is not None and not narrow
            texts.append(f"{one.label} · {megabytes(amount)}" if told else one.label)
        places = place_labels(discs, texts, (46, 18, width - 2, bottom - 2))
        drawn = list(zip(timed, times, discs, texts, places, strict=True))
        # Large ones first, so that none hides a smaller one.
        for one, time, (cx, cy, r), _, (tx, ty) in sorted(drawn, key=lambda d: -d[2][2]):
            near_x = min(max(cx, tx), tx + text_width(texts[timed.index(one)]))
            away = math.hypot(near_x - cx, ty - 4 - cy)
            if away > r + 18:
                rim_x, rim_y = cx + (near_x - cx) * r / away, cy + (ty - 4 - cy) * r / away
                canvas.line(rim_x, rim_y, near_x, ty - 4, f"lead {one.style.classes}")
            title = (
                f"{one.label}: {percent(one.score)}, {milliseconds(time)} per image, "
                f"{megabytes(memory[one.label])}"
            )
            hollow = " hollow" if memory[one.label] is None else ""
            canvas.add(
                "circle",
                cx=cx,
                cy=cy,
                r=r,
                class_=f"bubble{hollow} {one.style.classes}",
                title=title,
            )
        for one, _, _, text, (tx, ty) in drawn:
            canvas.text(tx, ty, text, f"label {one.style.classes}")
        return canvas.finish(f"{metric_of(shown)[0]} against time per image, by method")

    _, up = metric_of(shown)
    of = "peak memory on top of the model" if over_model else "peak memory"
    caption = (
        f"Mean {metric_of(shown)[0]} against the median time from an image to its prediction, "
        f"adaptation included; the area of a disc is {of}. "
        f"The best place is {'at the top' if up else 'at the bottom'} on the left, with a small "
        "disc."
    )
    if is_looked_at(timed[0].first):
        caption += " Times include looking at features, which the method does not need."
    if left:
        rows = "; ".join(f"{entry.label}, {_timed_how(entry.record)}" for entry in left)
        caption += (
            f" Left out, for their times do not compare with those of most "
            f"({_timed_how(timed[0].first)}): {rows}."
        )
    untimed = [one.label for one in shown if one not in scored]
    if untimed:
        caption += f" Not shown, for want of a score or a time: {', '.join(untimed)}."
    return Figure("cost", "Accuracy against time and memory", for_screen_and_phone(draw), caption)


def _time(one: Shown) -> float:
    return one.mean("cost", "call_ms", "median") or 0.0


def _timed_how(record: Mapping[str, Any]) -> str:
    looked = ", features looked at" if is_looked_at(record) else ""
    return f"{machine_of(record)}{looked}"


def forgetting(shown: Sequence[Shown]) -> Figure | None:
    """The score on the source set before any adaptation and after each round."""
    curves: dict[str, dict[int, float]] = {}
    told = [one for one in shown if one.first.get("source_scores")]
    compared, left = comparable(told, source_images)
    for one in compared:
        per_seed = [_source_scores(record) for record in one.records]
        shared = sorted(set.intersection(*map(set, per_seed)))
        if len(shared) > 1:
            curves[one.label] = {r: fmean(seed[r] for seed in per_seed) for r in shared}
    if not curves:
        return None
    drawn = [one for one in shown if one.label in curves]
    last = max(r for curve in curves.values() for r in curve)

    def draw(width: float) -> str:
        narrow = width < 500
        right = 10.0 if narrow else 16 + max(text_width(one.label) for one in drawn)
        canvas = Canvas(width, 300.0)
        bottom = 258.0
        x = Scale(-0.2, last + 0.2, 44, width - right)
        values = (v for curve in curves.values() for v in curve.values())
        y = fit(values, bottom, 28, least=LEAST_RANGE)
        stride = max(1, math.ceil((last + 1) * 24 / (width - 44 - right)))
        ticks = [(float(r), str(r) if r else "0") for r in range(0, last + 1, stride)]
        axes(
            canvas,
            x,
            y,
            x_ticks=ticks,
            x_title="after so many rounds of adaptation",
            y_title=metric_title(drawn, "source-set"),
        )
        series: dict[str, list[float | None]] = {}
        for one in drawn:
            curve = curves[one.label]
            series[one.label] = [curve.get(r) for r in range(last + 1)]
            points = [(x(r), y(v)) for r, v in curve.items()]
            titles = [f"{one.label}, after {r} rounds: {percent(v)}" for r, v in curve.items()]
            draw_line(canvas, points, one.style, titles)
        if not narrow:
            _name_ends(canvas, drawn, series, y, x(last), width - right, bottom)
        return canvas.finish("score on the source set after each round, by method")

    _, up = metric_of(shown)
    changes = {
        label: (curve[max(curve)] - curve[min(curve)]) * (1 if up else -1)
        for label, curve in curves.items()
    }
    worst = min(changes, key=lambda label: changes[label])
    caption = (
        "What adapting costs at home. Clear images of the source set are each answered by what was "
        "learned up to then; a method may adapt to that one image, and all of it is undone before "
        "the stream goes on. A level line forgets nothing. "
    )
    caption += (
        f"{worst} loses most, {-changes[worst]:.1f} percentage points."
        if changes[worst] < -0.05
        else "No method loses anything to speak of."
    )
    caption += f" {other_images(left)}" if left else ""
    body = for_screen_and_phone(draw) + legend(drawn, "narrow")
    return Figure("forgetting", "Forgetting", body, caption)


def _source_scores(record: Mapping[str, Any]) -> dict[int, float]:
    found = {int(e["round"]): dig(e, "score") for e in record.get("source_scores") or ()}
    return {r: value for r, value in found.items() if value is not None}


def study(shown: Sequence[Shown]) -> Figure | None:
    """The rows of a study: a line where they differ in one number, dots otherwise."""
    scored = [one for one in shown if one.score is not None]
    if not scored:
        return None
    marks = [_marks(one) for one in scored]
    keys = {key for mark in marks for key in mark}
    if len(keys) == 1 and len(scored) > 2:
        (key,) = keys
        numbers = [dig(mark, key) for mark in marks]
        if None not in numbers and len(set(numbers)) == len(numbers):
            return _study_line(scored, key, known(numbers))
    return _study_dots(scored)


def _marks(one: Shown) -> Mapping[str, Any]:
    marks = one.entry.study.get("marks")
    return marks if isinstance(marks, Mapping) else {}


def _study_line(scored: Sequence[Shown], key: str, numbers: Sequence[float]) -> Figure:
    order = sorted(range(len(numbers)), key=lambda n: numbers[n])
    symbol = SYMBOLS.get(key, words(key))

    def draw(width: float) -> str:
        canvas = Canvas(width, 320.0)
        x = fit(numbers, 44, width - 14, pad=0.04)
        y = fit((one.score for one in scored), 278, 28, least=LEAST_RANGE, pad=0.14)
        axes(canvas, x, y, x_title=symbol, y_title=metric_title(scored))
        points = [(x(numbers[n]), y(scored[n].score or 0.0)) for n in order]
        titles = [f"{symbol} = {numbers[n]:g}: {percent(scored[n].score)}" for n in order]
        # One method at several settings is one line, in our colour.
        draw_line(canvas, points, Style(1, strong=True), titles)
        best = _best(scored)
        cx, cy = x(numbers[scored.index(best)]), y(best.score or 0.0)
        canvas.text(cx, cy - 10, f"{best.score:.1f}", "label c1 strong", "middle")
        return canvas.finish(f"{metric_of(scored)[0]} by {symbol}")

    best = _best(scored)
    caption = (
        f"Mean {metric_of(scored)[0]} by {symbol}. Best: {percent(best.score)} at "
        f"{symbol} = {numbers[scored.index(best)]:g}. The axis spans the scores."
    )
    return Figure("study", f"Score by {symbol}", for_screen_and_phone(draw), caption)


def _study_dots(scored: Sequence[Shown]) -> Figure:
    names = list(row_names(scored).values())
    best = _best(scored)

    def draw(width: float) -> str:
        longest = int((width * (0.42 if width < 500 else 0.35)) / (0.58 * FONT))
        texts = [name if len(name) <= longest else name[: longest - 1] + "…" for name in names]
        left = max(map(text_width, texts)) + 14
        pitch = 24.0
        canvas = Canvas(width, 30 + pitch * len(scored) + 38)
        bottom = 30 + pitch * len(scored)
        spread = [v for one in scored for v in (one.score, *_rounds(one))]
        x = fit(spread, left, width - 46, least=LEAST_RANGE)
        for value in x.ticks(4 if width < 500 else 7):
            canvas.line(x(value), 22, x(value), bottom, "grid")
            canvas.text(x(value), bottom + 15, f"{value:g}", "tick", "middle")
        canvas.text(
            (left + width - 46) / 2, canvas.height - 5, metric_title(scored), "name", "middle"
        )
        for n, (one, text) in enumerate(zip(scored, texts, strict=True)):
            at = 30 + pitch * (n + 0.5)
            score = one.score or 0.0
            classes = "c1 strong" if one is best else "c2"
            canvas.text(left - 10, at + 4, text, "tick", "end")
            canvas.line(left, at, width - 46, at, "grid")
            for r, value in enumerate(_rounds(one)):
                title = f"{names[n]}, round {r + 1}: {percent(value)}"
                canvas.add("circle", cx=x(value), cy=at, r=2.5, class_="faint c0", title=title)
            path = marker_path(0, x(score), at, 5)
            canvas.add(
                "path", d=path, class_=f"mark {classes}", title=f"{names[n]}: {percent(score)}"
            )
            canvas.text(width - 40, at + 4, f"{score:.1f}", f"label {classes}")
        return canvas.finish(f"{metric_of(scored)[0]} of each row of the study")

    caption = f"Mean {metric_of(scored)[0]} of each row"
    if any(len(_rounds(one)) > 1 for one in scored):
        caption += " (large), and of its rounds (small, grey)"
    caption += f". Best: {names[scored.index(best)]}, {percent(best.score)}. "
    caption += "The axis spans the scores."
    return Figure("study", "The rows compared", for_screen_and_phone(draw), caption)


def _rounds(one: Shown) -> list[float]:
    """Mean of each round, if there are several."""
    found = known(one.entry.round_scores)
    return found if len(found) > 1 else []


def row_names(shown: Sequence[Shown]) -> dict[str, str]:
    """What the rows of a study are called, by label: the letter, and what is on in each.

    A number that varies says enough; where several rows have it, the label comes before it.
    """
    names = [_row_name(one) for one in shown]
    return {
        one.label: f"{one.label}, {name}" if names.count(name) > 1 and name != one.label else name
        for one, name in zip(shown, names, strict=True)
    }


def _row_name(one: Shown) -> str:
    letter = str(one.entry.study.get("row") or "")
    marks = _marks(one)
    if len(marks) == 1:
        ((key, value),) = marks.items()
        if not isinstance(value, bool):
            return f"{SYMBOLS.get(key, words(key))} = {value}"
    said = marks_in_words(marks) if marks else one.label
    return f"{letter} {said}".strip()


def _best(scored: Sequence[Shown]) -> Shown:
    _, up = metric_of(scored)
    return max(scored, key=lambda one: (one.score or 0.0) * (1 if up else -1))
