"""``bestta methods``, ``bestta prepare``: what there is to adapt with, and what it learns first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import bestta
from bestta import models
from bestta.adapters.registry import method_class
from bestta.data.tensors import LabelledBatches
from bestta.models.cards import SHIPPED, folder_of
from bestta.training import recipes
from bestta.training.loop import usable


def methods() -> None:
    """List the methods, each with its paper and what it asks for."""
    width = max(map(len, bestta.methods()))
    for name in bestta.methods():
        known = method_class(name)
        about = (sys.modules[known.__module__].__doc__ or "").splitlines()[0]
        needs = [
            "needs a source profile" if known.needs_profile else "",
            f"learns from source images first: bestta prepare … --method {name}"
            if known.Preparation
            else "",
            "is told of domain changes" if known.needs_domain_changes else "",
            f"{known.tasks[0]} only" if len(known.tasks) == 1 else "",
        ]
        typer.echo(f"{name:<{width}}  {about}")
        for need in filter(None, needs):
            typer.echo(f"{'':<{width}}  ({need})")
    typer.echo("\nNext: docs/methods.md compares them; bestta.adapt(model, profile, method=NAME).")


def prepare(
    name: Annotated[str, typer.Argument(help="A model that ships, or the folder of one.")],
    method: Annotated[str, typer.Option(help="eata, ecotta or petal.")],
    data: Annotated[Path | None, typer.Option(help="Folder of its data set.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The profile; <model>-<method>.safetensors if none.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="So many training images, spread over the set.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 8,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, as warmup_epochs=3.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch.")] = 1,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
) -> None:
    """Let a method learn from a model's training images what it needs; stopped, it goes on.

    Adds it to the profile of the model, or to OUT if that is there already.
    """
    torch.set_num_threads(threads)
    card = models.card(name)
    recipe = recipes().get(str(card.recipe.get("name")))
    if recipe is None:
        raise ValueError(
            f"the card of {card.name!r} names no recipe of this version of bestta, so its training "
            "images are not known. In Python: bestta.prepare(model, images, method=…)."
        )
    if recipe.needs_data and data is None:
        raise ValueError(f"{card.name} learned from files: name their folder with --data.")
    train = recipe.splits(data).train
    if images is not None and images < len(train):
        train = train.some(images)
    place = folder_of(name)
    path = out or Path(f"{card.name}-{method}.safetensors")
    if place.parent == SHIPPED and path.resolve().is_relative_to(SHIPPED.resolve()):
        raise ValueError(f"{path} is where the library itself lies; name another file with --out.")
    model = models.load(name).to(usable(device))
    try:
        profile = bestta.prepare(
            model,
            LabelledBatches(train, batch, card.normalise),
            method=method,
            profile=path if path.exists() else models.load_profile(name),
            checkpoint=path.with_suffix(".part"),
            progress=True,
            **dict(map(parsed, setting or [])),
        )
    except KeyboardInterrupt as stopped:
        typer.echo(f"{stopped or 'Stopped.'} The same command goes on from there.")
        raise typer.Exit(130) from None
    profile.save(path)
    path.with_suffix(".part").unlink(missing_ok=True)
    typer.echo(
        f"{path}: {method} learned from {profile.provenance['prepared'][method]['images']} images. "
        f"Prepared for {', '.join(profile.prepared)}.\n"
        f"Next: bestta.adapt(bestta.models.load({name!r}), {str(path)!r}, method={method!r})"
    )


def parsed(setting: str) -> tuple[str, Any]:
    """A setting and its value: JSON where it is any, or infinity, words otherwise."""
    name, equals, value = setting.partition("=")
    if not equals:
        raise ValueError(f"--set takes name=value, such as warmup_epochs=3, not {setting!r}.")
    if value in ("inf", "infinity"):
        return name, float("inf")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
