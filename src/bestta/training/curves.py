"""A training drawn: loss and held-out score over epochs, as an SVG of a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bestta.models.cards import Card

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 52, 28, 36
_LOSS, _SCORE, _GRID, _INK = "#c2410c", "#1d4ed8", "#e5e7eb", "#374151"

Points = Sequence[tuple[float, float]]


def curves(card: Card) -> str:
    """The picture of a card's history: loss on the left axis, held-out score on the right."""
    history = card.history
    losses, scores = history.get("losses", ()), history.get("scores", ())
    epochs = card.recipe.get("epochs", 1)
    last = max((step for step, _ in (*losses, *scores)), default=1)
    per_epoch = last / epochs if epochs else 1
    loss = [(step / per_epoch, value) for step, value in losses if math.isfinite(value)]
    held_out = [(step / per_epoch, value) for step, value in scores if math.isfinite(value)]
    inside_width, inside_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 16, f"{card.name}: training loss", _LOSS),
        _text(_WIDTH - _RIGHT, 16, f"{card.metric} on held-out images, %", _SCORE, "end"),
    ]
    for epoch in range(0, epochs + 1, max(1, math.ceil(epochs / 10))):
        x = _LEFT + inside_width * epoch / epochs
        parts.append(_text(x, _HEIGHT - _BOTTOM + 16, str(epoch), _INK, "middle"))
    parts.append(_text(_LEFT + inside_width / 2, _HEIGHT - 6, "epoch", _INK, "middle"))
    for points, colour, side in ((loss, _LOSS, "left"), (held_out, _SCORE, "right")):
        ticks = _ticks([value for _, value in points])
        low, high = ticks[0], ticks[-1]
        for tick in ticks:
            y = _TOP + inside_height * (high - tick) / (high - low)
            if side == "left":
                parts.append(
                    f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                    f'stroke="{_GRID}"/>'
                )
                parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", colour, "end"))
            else:
                parts.append(_text(_WIDTH - _RIGHT + 6, y + 4, f"{tick:g}", colour))
        places = " ".join(
            f"{_LEFT + inside_width * epoch / epochs:.1f},"
            f"{_TOP + inside_height * (high - value) / (high - low):.1f}"
            for epoch, value in points
        )
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, four to eight of them, that enclose ``values``."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        high = low + 1
    unit = 10 ** math.floor(math.log10(high - low))
    step = next(unit * f for f in (0.2, 0.5, 1.0, 2.0) if (high - low) / (unit * f) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * number, 10) for number in range(first, last + 1)]


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
