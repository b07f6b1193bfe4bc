"""``bestta models``: the trained models at hand, their cards, and how far weather throws them."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from bestta import models
from bestta.metrics import metric_for
from bestta.models.cards import READABLE, SHIPPED, WEIGHTS, folder_of
from bestta.training import measure, recipes
from bestta.training.loop import usable
from bestta.training.publish import add_shift

app = typer.Typer(help="List, show and score trained models.", invoke_without_command=True)


class PrecisionName(StrEnum):
    """What a model computes in."""

    fp32 = "fp32"
    bf16 = "bf16"


Name = Annotated[str, typer.Argument(help="A model that ships, or the folder of one.")]


@app.callback()
def list_(context: typer.Context) -> None:
    """List the models that come with the library, or run one of the commands."""
    if context.invoked_subcommand is not None:
        return
    rows = [("name", "clean", "worst", "size", "terms", "what")]
    for name in models.names():
        card = models.card(name)
        size = (SHIPPED / name / WEIGHTS).stat().st_size / 1e6
        clean = f"{card.scores['clean']:.1f} {card.metric}"
        terms = re.split(r"[:,]|\. ", card.terms)[0]
        rows.append((name, clean, _worst(card), f"{size:.1f} MB", terms, card.about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
    typer.echo(
        "\nNext: bestta models show NAME, or in Python: bestta.models.load(NAME). "
        "Worst is left alone, at severity 5."
    )


@app.command()
def show(name: Name) -> None:
    """Print a model's card: data, terms, recipe, scores, checksums, command."""
    models.load(name)  # its weights are what the card says,
    models.load_profile(name)  # and so is its profile
    typer.echo((folder_of(name) / READABLE).read_text(encoding="utf-8"))


@app.command()
def score(
    name: Name,
    data: Annotated[Path | None, typer.Option(help="Folder of its data set.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file of the scores; else in its folder, here for one that ships."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="So many test images, spread over the set.")
    ] = None,
    precision: Annotated[
        PrecisionName, typer.Option(help="bf16 is two to three times as fast.")
    ] = PrecisionName.fp32,
    workers: Annotated[int, typer.Option(min=0, help="Processes that render weather.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch.")] = 1,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
) -> None:
    """Score a model left alone: clean, under every corruption and weather, at each severity.

    Each score is written as soon as it is there; stopped, the same command goes on.
    """
    torch.set_num_threads(threads)
    card, model = models.card(name), models.load(name)
    folder = folder_of(name)
    own = folder if folder.parent != SHIPPED else None
    recipe = recipes().get(str(card.recipe.get("name")))
    if recipe is None:
        raise ValueError(
            f"the card of {card.name!r} names no recipe of this version of bestta, so its test "
            f"images are not known. Recipes: {', '.join(recipes())}."
        )
    if recipe.needs_data and data is None:
        raise ValueError(f"{card.name} is scored on files: name their folder with --data.")
    images = recipe.splits(data).test
    if count is not None and count < len(images):
        images = images.some(count)
    some = "" if count is None else f"-{len(images)}"
    path = out or (own / f"shift{some}.json" if own else Path(f"{card.name}-shift{some}.json"))
    model.to(usable(device), memory_format=torch.channels_last)  # type: ignore[call-overload]
    shift = measure(model, card, images, path, precision=precision.value, workers=workers)
    if own is not None and out is None and count is None:
        add_shift(own, shift)
        typer.echo(f"{own / READABLE} holds the scores now.")
    for table in ("weather", "corruptions"):
        for condition, values in getattr(shift, table).items():
            typer.echo(f"{condition:<20}" + "".join(f"{value:8.1f}" for value in values))
    typer.echo(f"{'clean':<20}{shift.clean:8.1f}   {card.metric}, %. All of it: {path}")


def _worst(card: models.Card) -> str:
    """The worst score of all conditions at the highest severity, and which it is."""
    scores = {
        name: values[-1]
        for table in ("weather", "corruptions")
        for name, values in card.scores.get(table, {}).items()
        if values[-1] is not None
    }
    if not scores:
        return "not measured"
    choose = min if metric_for(card.task, 1).higher_is_better else max
    name = choose(scores, key=lambda condition: scores[condition])
    return f"{scores[name]:.1f} ({name})"
