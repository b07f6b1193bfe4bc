"""`bestta.calibrate`: from some hundreds of source images to layers, settings and statistics."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bestta._version import __version__
from bestta.adapters.bestta import Bestta, BesttaConfig
from bestta.adapters.preparation import IGNORED
from bestta.adapters.registry import configured
from bestta.calibration.candidates import Candidate, candidates, named
from bestta.calibration.checks import check_call, check_file
from bestta.calibration.conditions import EXPECTED, Condition, conditions_for, look_of
from bestta.calibration.evaluations import Evaluations
from bestta.calibration.scoring import LEAST_MARGIN, Judge
from bestta.calibration.search import Evaluation, Lengths, Search, plain
from bestta.calibration.streams import Memory, Picture, Pixels, Streams, digest
from bestta.guard import CLASSIFICATION
from bestta.insertion import check_model, device_of
from bestta.interrupt import stop_requests
from bestta.outputs import OutputKey, Task, by_class, select_logits, task_of
from bestta.profile import (
    ModelIdentity,
    SourceProfile,
    batches,
    check_image,
    first,
    layer_names,
)
from bestta.progress import Progress

LEAST_IMAGES = 8
MOST_KEPT = {"segmentation": 48, "classification": 600}
"""Images that streams are made of; the others enter the statistics alone."""
MOST_EXPECTED = 40
MOST_FRAME_BYTES = 2**30

BEYOND = 0.02
"""Images may go beyond black and white by this share of what lies between."""
NARROW = 0.1
"""Images that use less than this share of it are hardly what was meant."""

PROVEN = 0.0
"""Points that adapting must seem to be worth to the guard, where calibration has seen it help."""

TRIED = ("rho", "lr", "statistics_decay", "lambda_entropy")
"""Settings that are searched for, unless they are given."""


@torch.inference_mode(False)
def calibrate(
    model: nn.Module,
    images: Iterable[Any],
    *,
    expected: Mapping[str, Iterable[Any]] | Iterable[Any] | None = None,
    layers: Sequence[str] | str | None = None,
    method: str = "bestta",
    output: OutputKey = None,
    pixels: tuple[Any, Any] | None = None,
    minutes: float | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    conditions: Sequence[str | Condition] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> SourceProfile:
    """Choose layers and settings for ``model`` from source images, and collect its statistics.

    The images are put in simulated conditions, and settings are scored by how far the adapted
    predictions agree with those of the model on the images as they were; no label is needed.

    Args:
        model: The source model, in eval mode. It is left as it is.
        images: Some hundreds of source images: batches (B, 3, H, W) normalised as the model wants
            them, or tuples that begin with one. Where a tuple goes on with labels, these are what
            predictions are compared with. Gone through once.
        expected: Images of conditions that are to be expected, or several such sets by name:
            source images are given their look. With labels they are a stream of their own.
        layers: Layers to choose among; by default the stages and blocks of the model.
        method: ``"bestta"``, the one method that has layers to choose.
        output: Where the model keeps its logits, if it is not plain.
        pixels: The values of black and white, numbers or one a channel; by default the smallest
            and largest of all images.
        minutes: Begin nothing more after so long, and take the best so far. The pass over the
            images comes first and is never cut short, and one setting is tried in any case; the
            time they take counts.
        seed: Of every draw. The same images and seed give the same choice.
        checkpoint: A file that keeps what was found so far. Stopped, by Ctrl-C (a
            KeyboardInterrupt) or otherwise, the same call goes on from it.
        report: Where to write a page on what was tried and chosen.
        conditions: Names of the conditions to simulate, or `Condition` of your own; by default all.
        progress: Show how far it is; by default on a terminal.
        **settings: Settings of the method that shall be as they are given.

    Returns:
        The profile of the chosen layers, with the settings in it; how they were found is in
        ``provenance["calibration"]``. ``bestta.adapt(model, profile)`` takes it from there.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
        >>> profile = calibrate(model, torch.rand(8, 3, 16, 16), conditions=["haze"], lr=0.0)
        >>> set(profile.layers) <= {"0", "1"}
        True
    """
    began = time.monotonic()
    if method != "bestta":
        raise ValueError(
            f"calibrate chooses layers and settings of 'bestta'; method {method!r} has none to "
            "choose."
        )
    if report is not None:
        check_file("report", report, "page.html")
    if checkpoint is not None:
        check_file("checkpoint", checkpoint, "kept.part")
    check_call(images=images, expected=expected, conditions=conditions, minutes=minutes, seed=seed)
    check_model(model)
    _check_settings(settings)
    source, example = _peeked(images)
    with torch.no_grad():
        logits = select_logits(model(example[:1].to(device_of(model))), output)
    task = task_of(logits)
    config = configured(Bestta, model, None, task, {"output": output, **settings})
    found = _candidates(model, example[:1].to(device_of(model)), layers, output)
    simulated = conditions_for(task, example.shape[1:], conditions)
    given = None if pixels is None else _black_and_white(pixels, example.shape[1])

    memory = Memory(MOST_KEPT[task])
    profile = SourceProfile.collect(
        model,
        memory.watch(source),
        [c.name for c in found],
        output=output,
        note="calibrated",
        progress=progress,
    )
    if memory.count < LEAST_IMAGES:
        raise ValueError(
            f"{memory.count} images are too few to choose by; some hundreds are wanted, and "
            f"{LEAST_IMAGES} are the least."
        )
    # Layers in the order they run, which is the candidates'.
    profile = replace(profile, layers={c.name: profile.layers[c.name] for c in found})
    pictures = memory.kept()
    labelled = _labelled(pictures, by_class(logits))
    black_and_white = _pixels(given, memory)
    looks, recorded, digests = _expected(expected, black_and_white, by_class(logits))
    for name in (*(look.name for look in looks), *recorded):
        if name in {c.name for c in simulated}:
            raise ValueError(
                f"the expected condition {name!r} is called like a simulated one: call yours "
                f"something else, such as {f'my {name}'!r}."
            )
    lengths = _lengths(task, pictures[0].image, len(simulated) + len(looks) + len(recorded))
    streams = Streams(
        model,
        task,
        pictures,
        [*simulated, *looks],
        black_and_white,
        recorded=recorded,
        labels=labelled,
        seed=seed,
        output=output,
        dtype=example.dtype,
    )
    weights = {c.name: c.weight for c in (*simulated, *looks)} | dict.fromkeys(recorded, EXPECTED)
    about = {
        "bestta": __version__,
        "model": ModelIdentity.of(model).fingerprint,
        "images": [memory.count, digest(pictures)],
        "expected": digests,
        "conditions": weights,
        "labels": labelled,
        "pixels": [list(black_and_white.low), list(black_and_white.high)],
        "lengths": vars(lengths),
        "settings": plain(settings),
        "preset": plain(Bestta.presets[task]),
        "seed": seed,
        "output": output,
        # A condition of one's own is known by what it does.
        "conditions' looks": digest(Picture(streams.picture(name)) for name in streams.names),
    }
    evaluations = Evaluations(checkpoint, about)
    base = {n: getattr(config, n) for n in (*TRIED, "lambda_style", "lambda_content", "lambda_l2")}
    with ExitStack() as stack:
        shown = stack.enter_context(Progress("calibration: settings tried", show=progress))
        # Without a checkpoint a stop at once loses no more than one after the step.
        stops = [] if checkpoint is None else stack.enter_context(stop_requests(shown.show))
        search = Search(
            model,
            profile,
            streams,
            Judge(task, weights, seed),
            evaluations,
            base=base,
            fixed=settings,
            lengths=lengths,
            deadline=None if minutes is None else began + 60 * minutes,
            stop=stops,
            progress=shown,
        )
        try:
            best = search.run(found)
        except KeyboardInterrupt:
            if checkpoint is None:
                raise
            raise KeyboardInterrupt(
                f"stopped after {len(evaluations.found)} settings; {checkpoint} goes on from there."
            ) from None
    told = {
        **_told(search, best, found),
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "images": memory.count,
        "frames": vars(lengths),
        "weights": weights,
        "labels": labelled,
        "pixels": about["pixels"],
        "task": task,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": minutes,
        "model": str(profile.model),
    }
    told["chosen"]["settings"].update(plain(settings))  # where time was up before they were tried
    if told["helps"] and "guard_margin" not in settings:
        # The guard need not ask for proof of what is proven.
        told["chosen"]["settings"]["guard_margin"] = PROVEN
    elif not told["helps"] and task == "classification" and "guard_margin" not in settings:
        told["chosen"]["settings"]["guard_margin"] = CLASSIFICATION.margin
    chosen = replace(
        profile,
        layers={name: profile.layers[name] for name in best.layers},
        settings={**profile.settings, method: told["chosen"]["settings"]},
        provenance={**profile.provenance, "calibration": told},
    )
    if report is not None:
        _report(report, told, streams)
    return chosen


# --- what it starts from --------------------------------------------------------------------


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError for what is no setting, before any work is done."""
    known = [f.name for f in fields(BesttaConfig) if f.name not in ("layers", "output", "seed")]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"calibrate takes no setting {name!r}. Settings of BESTTA that it can hold as they "
                f"are: {', '.join(known)}."
            )
    if settings.get("embedding") == "map":
        raise ValueError(
            "calibrate takes no embedding='map': it would keep a whole map of every candidate. "
            "Calibrate with pooled embeddings, then collect a profile at the layers chosen with "
            "SourceProfile.collect(…, embedding='map')."
        )


def _peeked(images: Iterable[Any]) -> tuple[Iterable[Any], Tensor]:
    """The images, to be gone through once, and the first batch of them."""
    items = iter(batches(images))
    item = next(items, None)
    if item is None:
        raise ValueError(
            "no images to calibrate with: give some hundreds of the source's, "
            "normalised as the model wants them."
        )
    return chain([item], items), check_image(first(item))


def _candidates(
    model: nn.Module, image: Tensor, layers: Sequence[str] | str | None, output: OutputKey
) -> list[Candidate]:
    if layers is None:
        found = candidates(model, image, output=output)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no layer whose features have several positions and "
                "run once, of which one could be chosen. Name some with layers=[…]: "
                "bestta.layers(model, image) lists what BeIN can be put behind."
            )
        return found
    names = layer_names(layers)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"layers are one or more different names; got {list(names)}.")
    return named(model, image, names)


def _labelled(pictures: Sequence[Picture], logits: Tensor, of: str = "images") -> bool:
    """Whether all have labels, which must be such as the model could predict."""
    labels = [p.label for p in pictures if p.label is not None]
    if len(labels) < len(pictures):
        if labels:
            warnings.warn(
                f"{len(labels)} of {len(pictures)} {of} have labels: they are left aside, and the "
                "model's own predictions are what is compared with.",
                stacklevel=3,
            )
        return False
    task, classes = task_of(logits), logits.shape[1]
    wanted = {"classification": 0, "segmentation": 2}[task]
    seen: set[int] = set()
    for label in labels:
        if label.dim() != wanted:
            shape = "one number" if label.dim() == 0 else f"maps of shape {tuple(label.shape)}"
            raise ValueError(
                f"labels of the {of} are {shape}, and the model does {task}, whose labels are "
                f"{'whole numbers (B,)' if wanted == 0 else 'maps (B, H, W)'}. Give the images "
                "alone to have the model's own predictions."
            )
        seen |= set(np.unique(label.numpy()).tolist())
    if task == "segmentation" and classes <= IGNORED:
        seen.discard(IGNORED)
        if not seen:
            raise ValueError(f"every label of the {of} is {IGNORED}, which is left out.")
    wrong = sorted(number for number in seen if not 0 <= number < classes)
    if wrong:
        raise ValueError(
            f"labels of the {of} name class {wrong[0]}; the model has {classes}, 0 to "
            f"{classes - 1}" + (f", and {IGNORED} is left out." if task == "segmentation" else ".")
        )
    return True


def _black_and_white(given: tuple[Any, Any], channels: int) -> tuple[Tensor, Tensor]:
    """Black and white as given, (C,) each."""
    try:
        low, high = (
            torch.as_tensor(value, dtype=torch.float32).expand(channels) for value in given
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"pixels are (black, white), each a number or {channels} of them, one a channel; got "
            f"{given!r}."
        ) from error
    _check_below(low, high)
    return low, high


def _check_below(low: Tensor, high: Tensor) -> None:
    if not bool((high > low).all()):
        raise ValueError(
            f"black {low.tolist()} is not below white {high.tolist()} in every channel: give "
            "pixels=(black, white), as the images are normalised."
        )


def _pixels(given: tuple[Tensor, Tensor] | None, memory: Memory) -> Pixels:
    """Black and white: as given, or the darkest and the brightest that was seen."""
    assert memory.low is not None
    assert memory.high is not None
    low, high = given or (memory.low, memory.high)
    _check_below(low, high)
    seen = f"the images go from {_rounded(memory.low)} to {_rounded(memory.high)}"
    beyond = torch.maximum(low - memory.low, memory.high - high) / (high - low)
    if bool((beyond > BEYOND).any()):
        raise ValueError(
            f"pixels=(black, white) are {_rounded(low)} and {_rounded(high)}, and {seen}: give the "
            "values that black and white have once an image is normalised (a subject's come from "
            "its normalise=)."
        )
    if bool(((memory.high - memory.low) / (high - low) < NARROW).all()):
        warnings.warn(
            f"{seen}, a small part of pixels={_rounded(low)}, {_rounded(high)}: conditions will "
            "hardly show. Are these the values of black and white once an image is normalised?",
            stacklevel=3,
        )
    return Pixels(tuple(low.tolist()), tuple(high.tolist()))


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in values.tolist()]


def _expected(
    expected: Mapping[str, Iterable[Any]] | Iterable[Any] | None, pixels: Pixels, logits: Tensor
) -> tuple[list[Condition], dict[str, list[Picture]], dict[str, str]]:
    """What the user expects: as looks, or with labels as streams of their own; and digests."""
    if expected is None:
        return [], {}, {}
    sets = expected if isinstance(expected, Mapping) else {"expected": expected}
    looks: list[Condition] = []
    recorded: dict[str, list[Picture]] = {}
    digests: dict[str, str] = {}
    for name, images in sets.items():
        seen = Memory(MOST_EXPECTED)
        for _ in seen.watch(images):
            pass
        pictures = seen.kept()
        if not pictures:
            raise ValueError(f"no images of the expected condition {name!r}.")
        if pictures[0].image.shape[0] != len(pixels.low):
            raise ValueError(
                f"images of the expected condition {name!r} have {pictures[0].image.shape[0]} "
                f"channels; the source's have {len(pixels.low)}."
            )
        digests[name] = digest(pictures)
        if _labelled(pictures, logits, f"images of the expected condition {name!r}"):
            recorded[name] = pictures
        else:
            shown = [pixels.shown(p.image).clamp(0, 1) for p in pictures]
            looks.append(Condition(name, look_of(shown), EXPECTED))
    return looks, recorded, digests


def _lengths(task: Task, image: Tensor, conditions: int) -> Lengths:
    """How many frames, by the size of the images and the memory they take."""
    size = image[0].numel()
    if task == "classification":
        short, full, long = (50, 200, 100) if size <= 64 * 64 else (20, 60, 60)
    elif size <= 256 * 128:
        short, full, long = 3, 10, 20
    else:
        short, full, long = (2, 6, 12) if size <= 512 * 512 else (2, 4, 8)
    # Half of the conditions are played as long as ``long``.
    room = MOST_FRAME_BYTES // (image.numel() * 4 * max(conditions, 1) * 2)
    full = max(2, min(full, room))
    return Lengths(min(short, full), full, max(2, min(long, 2 * room)))


# --- what comes of it -----------------------------------------------------------------------


def _told(search: Search, best: Evaluation, found: Sequence[Candidate]) -> dict[str, Any]:
    """All that was found out, as JSON has it."""
    singles = {e.layers[0]: e for e in search.best_of("one layer", layers=1)}
    told = []
    for candidate in found:
        about = {**vars(candidate), "depth": round(candidate.depth, 3)}
        if candidate.name in singles:
            alone = singles[candidate.name].told()
            about |= {k: alone[k] for k in ("gain", "error", "frames", "conditions")}
        elif candidate.name in search.failed:
            about["failed"] = search.failed[candidate.name]
        told.append(about)
    source = {name: search.streams.known_source(name) for name in search.streams.names}
    return {
        "chosen": {
            "layers": list(best.layers),
            "settings": {k: v for k, v in plain(best.settings).items() if k != "layers"},
            "gain": round(best.gain.value, 3),
            "error": round(best.gain.error, 3),
            "stream": best.stream,
            "frames": best.frames,
            "conditions": best.told()["conditions"],
        },
        "helps": bool(best.gain.value > max(LEAST_MARGIN, best.gain.error)),
        "sure": search.sure(best),
        "candidates": told,
        "steps": [done.told() for done in search.log],
        "source": {
            name: round(float(search.judge.scores(name, frames)[0]), 2)
            for name, frames in source.items()
        },
        "continual": list(search.continual_names),
        "cut_short": search.cut_short,
        "played": search.played,
        "resumed": search.evaluations.before,
    }


def _report(path: str | os.PathLike[str], told: Mapping[str, Any], streams: Streams) -> None:
    """Write the page on a calibration, with a picture of every condition."""
    from bestta.reports.calibration import write_calibration

    shown = {
        name: (streams.picture(name) * 255).round().byte().permute(1, 2, 0).numpy()
        for name in streams.names
        if len(streams.pixels.low) == 3
    }
    write_calibration(told, Path(path), shown)
