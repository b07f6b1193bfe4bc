"""``bestta adapt``: a trained model on anybody's street photos, left alone and adapted."""

from __future__ import annotations

import html
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from torch import Tensor

import bestta
from bestta import models
from bestta.adapters.base import Adapter
from bestta.adapters.registry import method_class
from bestta.cli.data import parsed_size
from bestta.cli.methods import parsed
from bestta.cli.models import PrecisionName
from bestta.data import Folder
from bestta.data.folder import resized, resized_label
from bestta.data.samples import ImageSet, Pixels, Sample, Selection, Size, UnreadableImage
from bestta.data.sheets import colour, grid
from bestta.data.tensors import to_tensor
from bestta.files import held, write_whole
from bestta.interrupt import stop_requests
from bestta.losses import entropy_loss
from bestta.progress import Progress
from bestta.provenance import lacks_bf16, provenance

RECORD, PAGE, STATE = "adapted.json", "index.html", "state.safetensors"
PREDICTIONS, OVERLAYS, COMPARE = "predictions", "overlays", "compare"
KIND, FORMAT = "bestta adapted photos", 1

STEP = 32
"""Sides of what the model is given are multiples of this, as its strides are."""

LONGEST = 4096
"""Longest side that --size takes: a model at 4096×4096 already asks for tens of gigabytes."""

LONGEST_JPEG = 65_500
"""Longest side of a JPEG, so of an overlay."""

AT_ONCE = 2**23
"""Numbers held while logits are brought to a photo's size: 32 MB, whatever the photo."""

CELL = (512, 1024)
"""Largest width and height of one picture among those to compare."""

AT_LOAD = 40
"""Pictures that the page loads at once, some megabytes: those left for when one scrolls to them
are blank in print and in screenshots."""


def adapt(
    images: Annotated[Path, typer.Option(help="Folder of photos, taken in natural order.")],
    out: Annotated[Path, typer.Option(help="Folder for what is made of them.")] = Path("adapted"),
    model: Annotated[
        str, typer.Option(help="A segmentation model that ships, or the folder of one.")
    ] = "cityscapes",
    method: Annotated[str, typer.Option(help="`bestta methods` names them.")] = "bestta",
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the method, as lr=0.01.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="What photos are resized to for the model, such as 1024x512."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Go on from this file, which an earlier run wrote; with OUT/state.safetensors, "
            "photos done before are passed over."
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="The first so many photos.")] = None,
    precision: Annotated[
        PrecisionName, typer.Option(help="bf16 is faster where the CPU has it.")
    ] = PrecisionName.fp32,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch.")] = 1,
) -> None:
    """Run a model over a folder of street photos, adapting as it goes, beside the plain model.

    OUT gets class ids (predictions/), the photo with them over it (overlays/), both models side by
    side (compare/), index.html to look at, adapted.json, and state.safetensors for --state.
    Photos keep their shape; without --size they get about the area that the model was trained on.
    """
    torch.set_num_threads(threads)
    given_size = _checked_size(size)
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file; --out names a folder.")
    if state is not None and not state.is_file():
        raise FileNotFoundError(_no_state(state, out))
    photos = _photos(images, out, count)
    card = models.card(model)
    adapter = _adapter(model, card, method, dict(map(parsed, setting or [])))
    if precision is PrecisionName.bf16 and lacks_bf16():
        typer.echo("This CPU has no bf16: --precision fp32 is faster.", err=True)
    if state is not None:
        adapter.load(state)
    seen_before = adapter.images_seen
    out.mkdir(parents=True, exist_ok=True)
    with held(out):
        about = {
            "kind": KIND,
            "format": FORMAT,
            "model": {"name": card.name, "about": card.about, "terms": card.terms},
            "classes": list(card.classes),
            "method": method,
            "settings": adapter.settings,
            "parameters": {"trained": sum(p.numel() for p in adapter.trainable.values())},
            "size": None if given_size is None else list(given_size),
            "precision": precision.value,
        }
        goes_on = state is not None and _same_file(state, out / STATE)
        done = _done(out, about) if goes_on else []
        done_before = len(done)
        stopped = _run(
            adapter, card, photos, out, about, done, given_size, precision is PrecisionName.bf16
        )
    if state is not None:
        _tell_start(state, seen_before, done_before, len(done) - done_before)
    _tell(images, photos, out, card, done, stopped)
    if stopped:
        raise typer.Exit(130)


def model_size(photo: Size, usual: Size) -> Size:
    """(width, height) that a photo is resized to for a model that is used to ``usual``.

    Choice: of all sizes with sides that are multiples of `STEP`, the one nearest to the usual area
    and to the photo's own shape, a distortion counting twice as much as a change of area.

    >>> model_size((2048, 1024), usual=(512, 256)), model_size((1080, 1920), usual=(512, 256))
    ((512, 256), (288, 512))
    """
    area, shape = usual[0] * usual[1], photo[0] / photo[1]
    most = max(1, area // STEP**2)  # of so many steps one side is, when the other is one

    def cost(size: tuple[int, int]) -> float:
        columns, rows = size
        return abs(math.log(columns * rows * STEP**2 / area)) + 2 * abs(
            math.log(columns / rows / shape)
        )

    sizes = ((min(most, max(1, round(rows * shape))), rows) for rows in range(1, most + 1))
    columns, rows = min(sizes, key=cost)
    return columns * STEP, rows * STEP


def class_ids(logits: Tensor, size: Size, at_once: int = AT_ONCE) -> Pixels:
    """The most likely class of each pixel of a photo: logits (K, h, w) as ids (H, W).

    Logits are interpolated bilinearly, then compared; some rows after another, since those of a
    large photo take gigabytes.

    Args:
        logits: Of the photo as the model saw it.
        size: (width, height) of the photo.
        at_once: How many interpolated numbers are held at a time, and at least one row.
    """
    classes, seen_height, _ = logits.shape
    width, height = size
    places = (torch.arange(height, dtype=torch.float64) + 0.5) * (seen_height / height) - 0.5
    places = places.clamp(0, seen_height - 1)
    above = places.long()
    below = (above + 1).clamp(max=seen_height - 1)
    share = (places - above).to(logits.dtype)[:, None]
    ids = np.empty((height, width), np.uint8)
    step = max(1, at_once // (classes * width))
    for start in range(0, height, step):
        rows = slice(start, start + step)
        block = torch.lerp(logits[:, above[rows]], logits[:, below[rows]], share[rows])
        wide = F.interpolate(
            block[None], size=(block.shape[1], width), mode="bilinear", align_corners=False
        )
        ids[rows] = wide[0].max(0).indices.numpy()
    return ids


# --- what it starts from ----------------------------------------------------------------------


def _checked_size(text: str | None) -> Size | None:
    size = parsed_size(text)
    if size is not None and not all(STEP <= side <= LONGEST for side in size):
        raise ValueError(
            f"--size {text}: sides of {STEP} to {LONGEST} pixels are taken, such as 1024x512. "
            "Predictions have the photo's own size whatever the model is given."
        )
    return size


def _no_state(state: Path, out: Path) -> str:
    """What is wrong with a state that is not there, and the command that does without it."""
    words, written = _without(sys.argv[1:], "--state"), out / STATE
    if written.is_file():
        again = _command([*words, "--state", str(written)])
        return f"no file {state} to go on from. A run in {out} has written {written}:\n  {again}"
    return (
        f"no file {state} to go on from. A first run needs no --state; it writes {written}, which "
        f"later runs may go on from:\n  {_command(words)}"
    )


def _photos(images: Path, out: Path, count: int | None) -> ImageSet:
    """The photos in a folder, without pictures that an earlier run has put inside it."""
    folder = Folder(images)
    own = [i for i in range(len(folder)) if not _is_made(folder.image_path(i), out.resolve())]
    if not own:
        raise ValueError(
            f"no photo in {images} but pictures of the kind that this command makes. "
            "Name the folder of the photos themselves."
        )
    return Selection(folder, own[:count])


def _is_made(picture: Path, out: Path) -> bool:
    """Whether a picture lies where a run, this one or another, puts what it makes."""
    place = picture.parent.resolve()
    return any(
        folder.name in (PREDICTIONS, OVERLAYS, COMPARE)
        and (folder.parent == out or (folder.parent / RECORD).is_file())
        for folder in (place, *place.parents)
    )


def _adapter(name: str, card: models.Card, method: str, settings: dict[str, Any]) -> Adapter:
    able = [m for m in models.names() if models.card(m).task == "segmentation"]
    if card.task != "segmentation":
        raise ValueError(
            f"{card.name} names what a whole image shows ({card.task}); photos are coloured pixel "
            f"by pixel. Models that do: {', '.join(able)}; or the folder of one."
        )
    known = method_class(method)
    profile = models.load_profile(name)
    fit = [
        m
        for m in bestta.methods()
        if (other := method_class(m)).Preparation is None
        and "segmentation" in other.tasks
        and not other.needs_domain_changes
    ]
    try:
        adapter = bestta.adapt(models.load(name), profile, method=method, **settings)
    except ValueError as error:
        if known.Preparation is None or method in profile.prepared:
            raise
        raise ValueError(f"{error}\nMethods that need nothing beforehand: {', '.join(fit)}.") from (
            error
        )
    if adapter.needs_domain_changes:
        raise ValueError(
            f"method {method!r} with these settings has to be told when the weather changes, and "
            f"nobody knows that of a folder of photos. Methods that are not: {', '.join(fit)}."
        )
    return adapter


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _done(out: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an earlier run in ``out`` has done, which this one goes on with."""
    path = out / RECORD
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        photos: list[dict[str, Any]] = found["photos"]
        before = {name: found[name] for name in about}
        _page(found)  # all that is needed of it is there
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what bestta adapt writes ({error!r}), so where to go on is not known. "
            f"Start anew in another --out, from the same --state."
        ) from error
    fault = _difference(before, json.loads(json.dumps(about)))
    if fault:
        raise ValueError(
            f"{path} tells of a run with {fault}. Go on as it was, or in another --out."
        )
    return photos


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is the first thing that two runs do not share, in words; nothing if they are alike."""
    for name in now:
        if before.get(name) == now[name]:
            continue
        if isinstance(now[name], dict) and isinstance(before.get(name), dict):
            return _difference(before[name], now[name]) or f"other {name}"
        return f"{name} {json.dumps(before.get(name))}, this one has {json.dumps(now[name])}"
    return ""


# --- photo after photo ------------------------------------------------------------------------


def _run(
    adapter: Adapter,
    card: models.Card,
    photos: ImageSet,
    out: Path,
    about: dict[str, Any],
    done: list[dict[str, Any]],
    size: Size | None,
    bf16: bool,
) -> bool:
    """Go through the photos that are not yet in ``done``, and add them. Returns: was it stopped?"""
    names = {entry["name"] for entry in done}
    taken = {entry["stem"].casefold() for entry in done}
    left = [index for index in range(len(photos)) if photos.name(index) not in names]
    learned_before = adapter.images_seen
    try:
        with (
            Progress("photos", len(photos), done=len(photos) - len(left)) as progress,
            stop_requests(tell=True) as requests,
        ):
            for index in left:
                if requests:
                    return True
                try:
                    sample = _checked_photo(photos.read(index))
                except UnreadableImage as error:
                    photos.skip(photos.name(index), str(error))
                else:
                    given = size or model_size(_size_of(sample.image), card.size)
                    entry, alone, adapted = _looked_at(adapter, card, sample, given, bf16)
                    entry["stem"] = _stem(sample.name, taken)
                    taken.add(entry["stem"].casefold())
                    _write_pictures(out, sample, alone, adapted, card.classes, entry)
                    done.append(entry)
                progress.advance()
    finally:
        if adapter.images_seen > learned_before and done:
            _write(adapter, photos, out, about, done)
    return False


def _checked_photo(sample: Sample) -> Sample:
    width, height = _size_of(sample.image)
    if max(width, height) > LONGEST_JPEG:
        raise UnreadableImage(
            f"{width}×{height} pixels, and the overlays are JPEGs, which have at most "
            f"{LONGEST_JPEG:,} a side"
        )
    return sample


def _looked_at(
    adapter: Adapter, card: models.Card, sample: Sample, given: Size, bf16: bool
) -> tuple[dict[str, Any], Pixels, Pixels]:
    """What there is to say of a photo, and its class ids: of the model left alone, and adapted."""
    image = to_tensor(resized(sample.image, given), card.normalise)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        plain = adapter.predict_source(image).float()
        answered = adapter(image).float()
    size = _size_of(sample.image)
    alone, adapted = class_ids(plain[0], size), class_ids(answered[0], size)
    last = asdict(adapter.last)
    time_ms = last.pop("time_ms")
    last["losses"] = {name: _number(value) for name, value in last["losses"].items()}
    entry = {
        "name": sample.name,
        "size": list(size),
        "model_size": list(given),
        "changed_percent": 100 * float(np.mean(alone != adapted)),
        "entropy": {
            "alone": _number(float(entropy_loss(plain))),
            "adapted": _number(float(entropy_loss(answered))),
        },
        "shares_percent": {
            "alone": _shares(alone, card.classes),
            "adapted": _shares(adapted, card.classes),
        },
        "time_ms": time_ms,
        "last": last,
    }
    return entry, alone, adapted


def _size_of(image: Pixels) -> Size:
    return image.shape[1], image.shape[0]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other numbers


def _shares(ids: Pixels, classes: Sequence[str]) -> dict[str, float]:
    """How much of a photo each class takes, in percent; those that take none are left out."""
    counts = np.bincount(ids.ravel(), minlength=len(classes))
    return {
        name: 100 * int(count) / ids.size
        for name, count in zip(classes, counts, strict=True)
        if count
    }


def _stem(name: str, taken: Iterable[str]) -> str:
    """What a photo's pictures are called: as itself, and otherwise where ``a.jpg`` meets ``a.png``.

    Upper and lower case are one, as some systems have it.
    """
    stem, number = str(PurePosixPath(name).with_suffix("")), 1
    while stem.casefold() in taken:
        stem, number = name if number == 1 else f"{name}-{number}", number + 1
    return stem


# --- what it writes ---------------------------------------------------------------------------


def _write_pictures(
    out: Path,
    sample: Sample,
    alone: Pixels,
    adapted: Pixels,
    classes: Sequence[str],
    entry: dict[str, Any],
) -> None:
    paths = _pictures(entry["stem"])
    for path in paths.values():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(adapted).save(out / paths["prediction"])
    overlay = _blended(sample.image, colour(adapted, classes))
    overlay.save(out / paths["overlay"], quality=88, subsampling=0)
    small = _shrunk(sample.image)
    maps = (resized_label(ids, _size_of(small)) for ids in (alone, adapted))
    cells = [small, *(np.asarray(_blended(small, colour(ids, classes), 0.75)) for ids in maps)]
    sheet = Image.fromarray(
        grid(
            [[_padded(cell) for cell in cells]],
            captions=[["photo", "left alone", "adapted"]],
            cell_width=CELL[0],
        )
    )
    sheet.save(out / paths["compare"], quality=88, subsampling=0)
    entry["compare_size"] = list(sheet.size)


def _pictures(stem: str) -> dict[str, str]:
    return {
        "prediction": f"{PREDICTIONS}/{stem}.png",
        "overlay": f"{OVERLAYS}/{stem}.jpg",
        "compare": f"{COMPARE}/{stem}.jpg",
    }


def _blended(photo: Pixels, colours: Pixels, share: float = 0.5) -> Image.Image:
    return Image.blend(Image.fromarray(photo), Image.fromarray(colours), share)


def _shrunk(photo: Pixels) -> Pixels:
    width, height = _size_of(photo)
    scale = min(1.0, CELL[0] / width, CELL[1] / height)
    return resized(photo, (max(1, round(width * scale)), max(1, round(height * scale))))


def _padded(picture: Pixels) -> Pixels:
    """A very tall picture with white beside it: a sheet's cells have one width and any height."""
    height, width = picture.shape[:2]
    missing = max(0, math.ceil(height * CELL[0] / CELL[1]) - width)
    sides = ((0, 0), (missing // 2, missing - missing // 2), (0, 0))
    return np.pad(picture, sides, constant_values=255)


def _write(
    adapter: Adapter,
    photos: ImageSet,
    out: Path,
    about: dict[str, Any],
    done: list[dict[str, Any]],
) -> None:
    record = {
        **about,
        "photos": done,
        "skipped": [asdict(skipped) for skipped in photos.skipped],
        "provenance": provenance(),
    }
    adapter.save(out / STATE)
    write_whole(out / RECORD, f"{json.dumps(record, indent=1)}\n".encode())
    write_whole(out / PAGE, _page(record).encode("utf-8", "replace"))


def _tell_start(state: Path, seen_before: int, done_before: int, new: int) -> None:
    """Say what a run with --state did not have to do or to learn again."""
    if done_before:
        _say(f"{_counted(done_before)} done before, {new} new; started from {state}.")
    else:
        _say(f"Started from {state}, where {_counted(seen_before)} had been seen.")


def _tell(
    images: Path,
    photos: ImageSet,
    out: Path,
    card: models.Card,
    done: list[dict[str, Any]],
    stopped: bool,
) -> None:
    """Say what there is now, and what to do with it."""
    if photos.skipped:
        _say(f"Skipped {len(photos.skipped)}, which could not be read:")
        for skipped in photos.skipped:
            _say(f"  {skipped.name}: {skipped.reason}")
    if not done and not stopped:
        raise ValueError(f"none of the {len(photos)} images could be read, so nothing was written.")
    again = [*_without(sys.argv[1:], "--state"), "--state", str(out / STATE)]
    if done:
        changed = sum(entry["changed_percent"] for entry in done) / len(done)
        refused = sum(bool(entry["last"]["reason"]) for entry in done)
        _say(
            f"{_counted(len(done))} in {out}: {_percent(changed)} of the pixels changed class"
            + (f"; {refused} not learned from, {RECORD} says why." if refused else ".")
        )
    if stopped:
        begun = f"Stopped after {len(done)} of {_counted(len(photos))}."
        _say(f"{begun} This goes on:\n  {_command(again)}" if done else f"{begun} Nothing is kept.")
    if done:
        _say(f"Next: open {out / PAGE} in a browser.")
        if not stopped:
            later = _command(_without(again, "--count"))
            _say(
                f"When there are more photos in {images}, this does the new ones only, with what "
                f"has been learned so far:\n  {later}\n"
                "Without --state, all are done again, by a model that has learned nothing yet."
            )
        _say(f"Terms of {card.name}: {card.terms}")


def _counted(photos: int) -> str:
    return f"{photos} photo{'' if photos == 1 else 's'}"


def _command(words: Sequence[str]) -> str:
    return shlex.join(["bestta", *words])


def _without(words: Sequence[str], option: str) -> list[str]:
    """A command line without an option and its value."""
    kept: list[str] = []
    drop = False
    for word in words:
        if drop or word == option:
            drop = not drop
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _say(text: str) -> None:
    # A file's name may hold bytes that are no letters, and a terminal takes none of them.
    typer.echo(text.encode("utf-8", "replace").decode())


def _percent(value: float) -> str:
    return f"{value:.1f} %"


# --- the page ---------------------------------------------------------------------------------


def _page(record: Mapping[str, Any]) -> str:
    """The page to look at: everything in it but the pictures, which lie beside it."""
    classes, photos = record["classes"], record["photos"]
    colours = {name: _colour_of(i, classes) for i, name in enumerate(classes)}
    legend = "".join(f"<li>{_swatch(colours[name])}{_text(name)}</li>" for name in classes)
    changed = sum(photo["changed_percent"] for photo in photos) / max(1, len(photos))
    learned = sum(photo["last"]["adapted"] for photo in photos)
    facts = (
        f"{_counted(len(photos))}, one after another, by {_text(record['model']['about'])}: left "
        f"alone, and adapted by {_text(record['method'])}. On average {_percent(changed)} of the "
        f"pixels changed class; {_counted(learned)} taught it something."
    )
    skipped = "".join(
        f"<li><b>{_text(entry['name'])}</b>: {_text(entry['reason'])}</li>"
        for entry in record["skipped"]
    )
    if skipped:
        skipped = f"<section><h2>Skipped</h2><ul>{skipped}</ul></section>"
    settings = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(json.dumps(value))}</td></tr>"
        for name, value in record["settings"].items()
    )
    made = record["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Adapted photos</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>Adapted photos</h1>
<p>{facts}</p>
<ul class="legend" aria-label="Colours of the classes">{legend}</ul>
</header>
<main>
{"".join(_article(photo, colours, i < AT_LOAD) for i, photo in enumerate(photos))}
{skipped}
</main>
<footer>
<p>No truth is known of these photos: what changed class may have become better or worse. Look.</p>
<p>Entropy is the mean over the pixels, in nats; less means surer, not righter. Times are of the
adapted model on one photo, without reading and writing.</p>
<details><summary>Settings of {_text(record["method"])}</summary><table>{settings}</table></details>
<p>bestta {_text(made["bestta"])}, {_text(versions)}, {_text(record["precision"])}.
Written {_text(made["measured"])}; the numbers are in <a href="{RECORD}">{RECORD}</a>.</p>
<p>Terms of {_text(record["model"]["name"])}: {_text(record["model"]["terms"])}</p>
</footer>
</body>
</html>
"""


def _article(photo: Mapping[str, Any], colours: Mapping[str, str], at_load: bool) -> str:
    links = {name: _link(path) for name, path in _pictures(photo["stem"]).items()}
    last, shares, entropy = photo["last"], photo["shares_percent"], photo["entropy"]
    what = "learned from" if last["adapted"] else "not learned from"
    if last["reason"]:
        what += f": {last['reason']}"
    width, height = photo["compare_size"]
    how = "" if at_load else ' loading="lazy" decoding="async"'
    alt = f"{photo['name']}: the photo, the model left alone, the model adapted"
    both = sorted(
        {*shares["alone"], *shares["adapted"]},
        key=lambda name: -max(shares["alone"].get(name, 0), shares["adapted"].get(name, 0)),
    )
    rows = "".join(
        f"<tr><th>{_swatch(colours[name])}{_text(name)}</th>"
        f"<td>{_percent(shares['alone'].get(name, 0))}</td>"
        f"<td>{_percent(shares['adapted'].get(name, 0))}</td></tr>"
        for name in both
    )
    size = "×".join(map(str, photo["size"]))
    given = "×".join(map(str, photo["model_size"]))
    return f"""<article>
<h2>{_text(photo["name"])}</h2>
<p><b>{_percent(photo["changed_percent"])}</b> of the pixels changed class · {_text(what)} ·
entropy {_nats(entropy["alone"])} alone, {_nats(entropy["adapted"])} adapted ·
{photo["time_ms"]:.0f} ms</p>
<a href="{links["compare"]}"><img src="{links["compare"]}" width="{width}"
height="{height}"{how} alt="{_text(alt)}"></a>
<div class="shares">{_bar("alone", shares["alone"], colours)}
{_bar("adapted", shares["adapted"], colours)}</div>
<details><summary>Shares of the classes</summary>
<table><tr><th></th><th>alone</th><th>adapted</th></tr>{rows}</table></details>
<p class="small">{size} pixels, to the model {given} ·
<a href="{links["overlay"]}">overlay</a> · <a href="{links["prediction"]}">class ids</a></p>
</article>
"""


def _bar(title: str, shares: Mapping[str, float], colours: Mapping[str, str]) -> str:
    """How the classes share the photo, as a bar in their colours, in the order of their ids."""
    parts = "".join(
        f'<i style="flex:{shares[name]:.3f};background:{colours[name]}" '
        f'title="{_text(name)} {_percent(shares[name])}"></i>'
        for name in colours
        if name in shares
    )
    return f'<span>{title}</span><div class="bar">{parts}</div>'


def _colour_of(index: int, classes: Sequence[str]) -> str:
    red, green, blue = colour(np.array([[index]], np.uint8), classes)[0, 0]
    return f"#{red:02x}{green:02x}{blue:02x}"


def _swatch(code: str) -> str:
    return f'<i class="swatch" style="background:{code}"></i>'


def _nats(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _text(value: object) -> str:
    return html.escape(str(value))


def _link(path: str) -> str:
    """A relative address of a file, whatever its name: spaces, # and stray bytes are spelt out."""
    return quote(os.fsencode(path))


_STYLE = """
:root { --ink: #1c1e21; --faint: #5c6370; --paper: #fafafa; --card: #fff; --line: #d9dce1;
  --link: #0b57d0 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --faint: #a2a9b4; --paper: #14161a;
  --card: #1d2025; --line: #363b44; --link: #8ab4f8 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 80rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0.5rem 0 }
h2 { font-size: 1rem; margin: 0; overflow-wrap: anywhere }
a { color: var(--link) }
p { margin: 0.4rem 0 }
ul { padding-left: 1.2rem }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; list-style: none; padding: 0;
  margin: 1rem 0; font-size: 0.9rem }
.swatch { display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.4em;
  border: 1px solid var(--line); border-radius: 2px; vertical-align: -0.1em }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 0.8rem; margin: 1rem 0; break-inside: avoid }
img { display: block; width: 100%; height: auto; border-radius: 4px }
.shares { display: grid; grid-template-columns: auto 1fr; gap: 0.25rem 0.6rem; margin: 0.6rem 0;
  font-size: 0.85rem; line-height: 1.1rem }
.bar { display: flex; height: 1.1rem; border-radius: 3px; overflow: hidden }
table { border-collapse: collapse; font-size: 0.9rem; margin: 0.4rem 0 }
th { text-align: left; font-weight: normal; padding: 0.1rem 1rem 0.1rem 0 }
td { text-align: right; padding: 0.1rem 0 0.1rem 1rem; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
.small, footer { color: var(--faint); font-size: 0.85rem }
"""
