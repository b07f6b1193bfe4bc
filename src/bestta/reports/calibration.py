"""The page on a calibration: what was tried, what was chosen, and how sure that is.

It is made from ``profile.provenance["calibration"]`` and pictures of the conditions, and carries
all of it: nothing is asked of any network.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bestta.reports.page import _asset, _digest, _write, head
from bestta.reports.svg import Canvas, escape, fit, text_width, tick_text

Pictures = Mapping[str, np.ndarray[Any, np.dtype[np.uint8]]]
"""RGB bytes (H, W, 3) by condition."""

WIDTH, BAR, LONGEST_NAME = 720.0, 22.0, 34
THUMBNAIL = 240
"""Largest width of a picture, in pixels."""

STYLE = """
.bars .bar { fill: var(--c0); fill-opacity: .45; }
.bars .chosen { fill: var(--c1); fill-opacity: .85; }
.bars .few { fill-opacity: .18; }
.bars .whisker { stroke: var(--ink); stroke-width: 1.2; fill: none; }
.bars .zero { stroke: var(--soft); }
.heat td { text-align: right; padding: .2rem .45rem; border-bottom: 1px solid var(--faint); }
.numbers.heat .g1 { background: color-mix(in srgb, var(--c2) 12%, transparent); }
.numbers.heat .g2 { background: color-mix(in srgb, var(--c2) 28%, transparent); }
.numbers.heat .g3 { background: color-mix(in srgb, var(--c2) 48%, transparent); }
.numbers.heat .l1 { background: color-mix(in srgb, var(--c1) 12%, transparent); }
.numbers.heat .l2 { background: color-mix(in srgb, var(--c1) 28%, transparent); }
.numbers.heat .l3 { background: color-mix(in srgb, var(--c1) 48%, transparent); }
.looks { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); }
.looks img { display: block; width: 100%; border-radius: 3px; }
.looks .tiny { image-rendering: pixelated; }
.looks figcaption { margin-top: .2rem; }
"""


def write_calibration(told: Mapping[str, Any], path: Path, pictures: Pictures) -> None:
    """Write the page.

    Args:
        told: What `bestta.calibrate` left in the profile's provenance.
        path: The file, replaced in one move.
        pictures: One of every condition.
    """
    _write(path, render(told, pictures))


def render(told: Mapping[str, Any], pictures: Pictures) -> str:
    """The page as HTML."""
    style = _asset("page.css") + STYLE
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'"
    )
    parts = [
        _section("Layers, one at a time", _bars(told)),
        _section("In each condition", _heat(told)),
        _section("The other settings", _steps(told)),
        _section("What was simulated", _looks(told, pictures)),
        _section("Next", _next(told)),
    ]
    title = "Calibration"
    return (
        head(title, style, policy)
        + f"<body><header><h1>{title}</h1><p class=overview>{escape(told['model'])}</p></header>\n"
        f"<main>{_summary(told)}{''.join(parts)}</main>\n"
        f"<footer><p>{escape(told['when'])}, seed {told['seed']}.</p></footer></body></html>\n"
    )


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{body}</section>" if body else ""


# --- in words -------------------------------------------------------------------------------


def _summary(told: Mapping[str, Any]) -> str:
    lead, *more = sentences(told)
    facts = [
        ("source images", f"{told['images']:,}"),
        ("settings tried", _tried(told)),
        ("conditions", len(told["weights"])),
        ("frames of each", f"{told['frames']['short']} to {told['frames']['long']}"),
        ("compared with", "labels" if told["labels"] else "the model's own clear predictions"),
        ("time", f"{told['seconds'] / 60:.1f} min"),
    ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    rest = "".join(f"<p>{escape(sentence)}</p>" for sentence in more)
    return (
        f'<section class="headline"><p class="lead">{escape(lead)}</p>{rest}'
        f'<dl class="facts">{items}</dl></section>'
    )


def _tried(told: Mapping[str, Any]) -> int:
    return len({str((s["settings"], s["stream"])) for s in told["steps"]})


def sentences(told: Mapping[str, Any]) -> list[str]:
    """What was chosen and how sure that is, the most important first."""
    chosen, sure, points = told["chosen"], told["sure"], unit(told)
    settings = chosen["settings"]
    layers = _listed(chosen["layers"])
    gain = f"{_signed(chosen['gain'])} ± {chosen['error']:.1f} points of {points}"
    if told["helps"]:
        lead = f"BeIN behind {layers}: {gain} over the source model in simulated conditions."
    else:
        lead = (
            f"Nothing that was tried beats the source model by more than chance. The most harmless "
            f"is BeIN behind {layers}: {gain}."
        )
    learns = (
        f"γ learns at a rate of {settings['lr']:g}"
        + ("" if settings["lambda_entropy"] else ", without the entropy loss")
        if settings["lr"]
        else "γ is held still, so that no backward pass is needed: learning gained no more than "
        "chance"
        if any(s["step"] == "lr" for s in told["steps"])
        else "γ is held still"
    )
    decay = settings["statistics_decay"]
    statistics = f"the stream (decay {decay:g})" if decay else "the image itself"
    found = [lead, f"ρ is {settings['rho']:g}, with statistics of {statistics}; {learns}."]
    if sure["share"] is not None:
        found.append(
            f"How sure: in {100 * sure['share']:.0f} % of {_RESAMPLES} resamples of the frames "
            f"these layers beat the best others tried beside them, {_listed(sure['runner_up'])} "
            f"({_signed(sure['ahead'])} ± {sure['error']:.1f} points)."
        )
    if told["cut_short"]:
        found.append(
            "The search was cut short by its time limit: this is the best of what was tried."
        )
    return found


_RESAMPLES = 200


def unit(told: Mapping[str, Any]) -> str:
    """What gains are points of."""
    return "mean IoU" if told["task"] == "segmentation" else "accuracy"


def ranked(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The candidates that were tried: those that saw the most frames first, of these the best.

    Few frames sort out, and flatter some: a gain over them says nothing against one over all.
    """
    tried = [c for c in told["candidates"] if "gain" in c]
    return sorted(tried, key=lambda c: (-c["frames"], -c["gain"]))


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _next(told: Mapping[str, Any]) -> str:
    return (
        "<pre>profile.save(&quot;profile.safetensors&quot;)\n"
        "adapter = bestta.adapt(model, &quot;profile.safetensors&quot;)\n"
        "logits = adapter(image)</pre>"
        "<p class=note>The profile holds the layers, their statistics and the settings. Gains here "
        "are in simulated conditions, on this model's own source images: they rank choices, and "
        "do not foretell scores in the world.</p>"
    )


# --- figures --------------------------------------------------------------------------------


def _bars(told: Mapping[str, Any]) -> str:
    """The gain of each candidate alone, in the order they run, with one standard error."""
    shown = [c for c in told["candidates"] if "gain" in c]
    if not shown:
        return ""
    names = [_cut(c["name"]) for c in shown]
    left = max(map(text_width, names)) + 12
    height = BAR * len(shown) + 52
    canvas = Canvas(WIDTH, height)
    ends = [c["gain"] + way * c["error"] for c in shown for way in (-1, 1)]
    x = fit([0.0, *ends], left, WIDTH - 16)
    ticks = x.ticks(6)
    for value in ticks:
        canvas.line(x(value), 4.0, x(value), height - 44, "zero" if value == 0 else "grid")
        canvas.text(x(value), height - 28, tick_text(value, ticks), "tick", "middle")
    for n, (candidate, name) in enumerate(zip(shown, names, strict=True)):
        top = 6 + n * BAR
        chosen = candidate["name"] in told["chosen"]["layers"]
        start, end = sorted((x(0.0), x(candidate["gain"])))
        few = candidate["frames"] < told["frames"]["full"]
        said = (
            f"{_signed(candidate['gain'])} ± {candidate['error']:.1f} "
            f"over {candidate['frames']} frames"
        )
        canvas.text(left - 8, top + 15, name, "" if chosen else "tick", "end")
        canvas.add(
            "rect",
            title=f"{candidate['name']}: {said}, {candidate['channels']} channels",
            x=start,
            y=top + 3,
            width=max(end - start, 0.5),
            height=BAR - 7,
            class_=("chosen" if chosen else "bar") + (" few" if few else ""),
        )
        low, high = (x(candidate["gain"] + way * candidate["error"]) for way in (-1, 1))
        canvas.line(low, top + BAR / 2 - 0.5, high, top + BAR / 2 - 0.5, "whisker")
    canvas.text(left, height - 6, f"points of {unit(told)} over the source model", "name")
    drawing = canvas.finish("Gain of each candidate layer alone, with standard errors")
    pale = sum(c["frames"] < told["frames"]["full"] for c in shown)
    caption = (
        "Gain of BeIN behind each candidate alone, γ held still, weighted over the conditions; "
        "lines are one standard error. Chosen layers stand out. "
        + (
            f"The {pale} pale ones did not see all {told['frames']['full']} frames: gains over "
            "different numbers of frames do not compare."
            if pale
            else ""
        )
    )
    return f'<figure class="bars">{drawing}<figcaption>{escape(caption)}</figcaption></figure>'


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _heat(told: Mapping[str, Any]) -> str:
    """Gains by candidate and condition, as `ranked`; the last row is what was chosen."""
    shown = ranked(told)
    names = list(told["weights"])
    if not shown:
        return ""
    head = "".join(
        f"<th>{escape(name)}<span class=aside>{told['weights'][name]:g} ×</span></th>"
        for name in names
    )
    source = "".join(_plain(told["source"].get(name)) for name in names)
    rows = [f"<tr><th>the source model itself</th><td></td><td></td>{source}</tr>"]
    for candidate in shown:
        ours = ' class="ours"' if candidate["name"] in told["chosen"]["layers"] else ""
        cells = "".join(_shade(candidate["conditions"].get(name)) for name in names)
        rows.append(
            f"<tr{ours}><th>{escape(candidate['name'])}</th>"
            f"<td>{candidate['frames']}</td>"
            f"<td><b>{_signed(candidate['gain'])}</b></td>{cells}</tr>"
        )
    chosen = told["chosen"]
    cells = "".join(_shade(chosen["conditions"].get(name)) for name in names)
    rows.append(
        f'<tr class="ours"><th>chosen together<span class=aside>'
        f"{escape(' + '.join(chosen['layers']))}</span></th>"
        f"<td>{chosen['frames']}</td>"
        f"<td><b>{_signed(chosen['gain'])}</b></td>{cells}</tr>"
    )
    played = "in one stream that goes on through them" if chosen["stream"] == "continual" else ""
    note = (
        f"Points of {unit(told)} over the source model, whose own score is in the first row"
        + ("" if told["labels"] else " (agreement with itself on the images as they were)")
        + ". Below the names: how much a condition counts. Rows of as many frames compare."
        + (f" The last row was played {played}, through some conditions." if played else "")
    )
    return (
        '<div class="table"><div class="scroll" tabindex="0" role="region" '
        'aria-label="Gains by condition"><table class="numbers heat"><thead>'
        f"<tr><th>Layer</th><th>frames</th><th>all</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f'</div><p class="note">{escape(note)}</p></div>'
    )


def _plain(value: float | None) -> str:
    return f"<td>{'' if value is None else f'{value:.0f}'}</td>"


def _shade(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    strength = sum(abs(value) >= least for least in (0.5, 3, 10))
    shade = f' class="{"g" if value > 0 else "l"}{strength}"' if strength else ""
    return f"<td{shade}>{_signed(value)}</td>"


STEPS = {
    "more layers": ("Several layers", "layers"),
    "rho": ("ρ: how much is transferred", "rho"),
    "statistics_decay": ("Decay of the statistics", "statistics_decay"),
    "other layers": ("Other layers, with these settings", "layers"),
    "lr": ("Learning rate of γ", "lr"),
    "losses": ("Weight of the entropy loss", "lambda_entropy"),
}


def _steps(told: Mapping[str, Any]) -> str:
    """A small drawing for each step of the search: gain by what was tried."""
    panels = []
    for step, (heading, name) in STEPS.items():
        tried: dict[str, Mapping[str, Any]] = {}
        for done in told["steps"]:
            value = done["settings"][name]
            label = " + ".join(map(_tail, value)) if name == "layers" else f"{value:g}"
            longer = done["frames"] >= tried.get(label, done)["frames"]
            if longer and _belongs(done, step, name, told["steps"]):
                tried[label] = done
        if tried:
            ordered = sorted(tried) if name != "layers" else list(tried)
            if name != "layers":
                ordered.sort(key=float)
            panels.append(_panel(told, heading, [(label, tried[label]) for label in ordered]))
    return f'<div class="panels">{"".join(panels)}</div>' if panels else ""


def _belongs(
    done: Mapping[str, Any], step: str, name: str, steps: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether this was tried in a step, or is what that step started from."""
    if done["step"] == step or name == "layers":
        return bool(done["step"] == step)

    def rest(one: Mapping[str, Any]) -> tuple[Any, ...]:
        return one["stream"], {k: v for k, v in one["settings"].items() if k != name}

    return any(one["step"] == step and rest(one) == rest(done) for one in steps)


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _panel(
    told: Mapping[str, Any], heading: str, tried: Sequence[tuple[str, Mapping[str, Any]]]
) -> str:
    rows = []
    chosen = {"layers": told["chosen"]["layers"], **told["chosen"]["settings"]}
    for label, done in tried:
        ours = all(chosen.get(name) == value for name, value in done["settings"].items())
        rows.append(
            f"<tr{' class=ours' if ours else ''}><th class=long>{escape(label)}</th>"
            f"<td>{_signed(done['gain'])} ± {done['error']:.1f}</td>"
            f"<td>{done['frames']}</td></tr>"
        )
    return (
        f'<div class="panel"><h4>{escape(heading)}</h4><table class="numbers"><thead><tr>'
        f"<th></th><th>gain</th><th>frames</th></tr></thead><tbody>{''.join(rows)}"
        "</tbody></table></div>"
    )


# --- pictures -------------------------------------------------------------------------------


def _looks(told: Mapping[str, Any], pictures: Pictures) -> str:
    figures = []
    for name, picture in pictures.items():
        small = picture[:: max(1, -(-picture.shape[1] // THUMBNAIL))]
        small = small[:, :: max(1, -(-picture.shape[1] // THUMBNAIL))]
        tiny = " class=tiny" if picture.shape[1] < 100 else ""
        uri = f"data:image/png;base64,{base64.b64encode(png(small)).decode()}"
        counts = told["weights"].get(name, 1)
        figures.append(
            f'<figure><img{tiny} src="{uri}" alt="{escape(name)}">'
            f"<figcaption>{escape(name)}, counts {counts:g} ×</figcaption></figure>"
        )
    return f'<div class="looks">{"".join(figures)}</div>' if figures else ""


def png(picture: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """RGB bytes (H, W, 3) as a PNG file: the page needs no imaging library.

    >>> png(np.zeros((2, 3, 3), np.uint8))[1:4]
    b'PNG'
    """
    height, width, _ = picture.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )
