"""``bestta calibrate``: choose layers and settings for a model from its source images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import bestta
from bestta.benchmark.subjects import card_of, is_file, model_of, subject_of
from bestta.calibration.checks import check_file
from bestta.data import Folder
from bestta.data.samples import ImageSet
from bestta.data.tensors import LabelledBatches, to_batches
from bestta.models import Card
from bestta.models.cards import SHIPPED
from bestta.profile import first
from bestta.reports.calibration import ranked, sentences, unit
from bestta.training import recipes

SHOWN = 6
"""So many candidates are listed at the end."""


def calibrate(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model that ships, the folder of one, or a Python file with subject().",
        ),
    ],
    data: Annotated[Path | None, typer.Option(help="Folder of its data set.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of source photos, instead of its training images.")
    ] = None,
    expected: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of photos in a condition to expect; may be given again."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The profile; <model>-calibrated.safetensors if none.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="A page on what was tried.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Begin nothing more after so long; take the best so far. The pass over the "
            "images is done in any case."
        ),
    ] = None,
    count: Annotated[
        int, typer.Option(min=8, help="So many source images, spread over the set.")
    ] = 300,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    labels: Annotated[
        bool, typer.Option(help="Compare with the training labels, not with its own predictions.")
    ] = False,
    layers: Annotated[
        str | None, typer.Option(help="Layers to choose among, with commas between.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch.")] = 1,
) -> None:
    """Choose layers and settings for a model from its source images; stopped, it goes on.

    Writes a profile that holds the choice and the statistics it needs.
    """
    torch.set_num_threads(threads)
    card = card_of(name)
    path = out or Path(f"{card.name}-calibrated.safetensors")
    checkpoint = path.with_suffix(".part")
    check_file("--out", path, "profile.safetensors")
    if path == checkpoint:
        raise ValueError(f"{path} is where what was found so far is kept; --out ends otherwise.")
    if path.resolve().is_relative_to(SHIPPED.resolve()):
        raise ValueError(f"{path} is where the library itself lies; name another file with --out.")
    source = _source(name, card, data, images, count, labels)
    model = model_of(name)
    black, white = (
        tuple((value - m) / d for m, d in zip(*card.normalise, strict=True)) for value in (0.0, 1.0)
    )
    try:
        profile = bestta.calibrate(
            model,
            source,
            expected=_expected(expected or [], card) or None,
            layers=None if layers is None else [part.strip() for part in layers.split(",")],
            pixels=(black, white),
            minutes=minutes,
            seed=seed,
            checkpoint=checkpoint,
            report=report,
            progress=True,
        )
    except KeyboardInterrupt as stopped:
        typer.echo(f"{stopped or 'Stopped.'} The same command goes on from there.")
        raise typer.Exit(130) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    told = profile.provenance["calibration"]
    if not told["cut_short"]:
        checkpoint.unlink(missing_ok=True)
    typer.echo(_table(told))
    for sentence in sentences(told):
        typer.echo(sentence)
    if told["cut_short"]:
        typer.echo(f"{checkpoint} keeps all of it: the same command with more minutes goes on.")
    typer.echo(f"\nProfile: {path}" + ("" if report is None else f"\nReport: {report}"))
    typer.echo(f"Next: bestta.adapt(model, {str(path)!r})")


def _source(
    name: str, card: Card, data: Path | None, images: Path | None, count: int, labels: bool
) -> Iterable[Any]:
    """The source images as batches of one."""
    if images is not None:
        if data is not None or labels:
            raise ValueError("--images is a folder of photos alone: without --data and --labels.")
        return to_batches(Folder(images, size=card.size).some(count), 1, card.normalise)
    if is_file(name):
        train = subject_of(name).train
        if train is None:
            raise ValueError(
                f"{name} says nothing of training images: give its Subject train=…, or a folder "
                "of source photos with --images."
            )
        return _first_of(train(), count, labels)
    recipe = recipes().get(str(card.recipe.get("name")))
    if recipe is None:
        raise ValueError(
            f"the card of {card.name!r} names no recipe of this version of bestta, so its training "
            "images are not known. Name a folder of source photos with --images."
        )
    if recipe.needs_data and data is None:
        raise ValueError(
            f"{card.name} learned from files: name their folder with --data, or a folder of "
            "source photos with --images."
        )
    return _batches(recipe.splits(data).train.some(count), card, labels)


def _batches(samples: ImageSet, card: Card, labels: bool) -> Iterable[Any]:
    if labels:
        return LabelledBatches(samples, 1, card.normalise)
    return to_batches(samples, 1, card.normalise)


def _first_of(batches: Iterable[Any], count: int, labels: bool) -> Iterator[Any]:
    """So many images of batches that somebody else makes."""
    seen = 0
    for item in batches:
        if seen >= count:
            return
        seen += len(first(item))
        yield item if labels else first(item)


def _expected(folders: list[Path], card: Card) -> dict[str, Iterable[Any]]:
    """Photos by the name of their folder."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"two folders of --expected have one name: {', '.join(names)}.")
    return {
        name: to_batches(Folder(folder, size=card.size), 1, card.normalise)
        for name, folder in zip(names, folders, strict=True)
    }


def _table(told: dict[str, Any]) -> str:
    """The best candidates, one a line; those that saw all frames first."""
    best = ranked(told)[:SHOWN]
    heading = "Layer alone"
    width = max(len(heading), *(len(c["name"]) for c in best))
    lines = [f"{heading:<{width}}  frames  points of {unit(told)} over the source model"]
    for candidate in best:
        chosen = " (chosen)" if candidate["name"] in told["chosen"]["layers"] else ""
        gain = f"{candidate['gain']:+6.1f} ± {candidate['error']:.1f}"
        lines.append(f"{candidate['name']:<{width}}  {candidate['frames']:>6}  {gain}{chosen}")
    if len({c["frames"] for c in best}) > 1:
        lines.append("Gains over different numbers of frames do not compare.")
    return "\n".join(lines) + "\n"
