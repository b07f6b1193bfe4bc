"""``bestta train``: make a source model, in as many sittings as it takes."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bestta.cli.models import PrecisionName
from bestta.models import names
from bestta.provenance import lacks_bf16
from bestta.training import Training, publish, recipes
from bestta.training.loop import CHECKPOINT
from bestta.training.publish import published


def train(
    recipe: Annotated[str, typer.Argument(help="cityscapes, cifar10 or streets.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the data set.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where it goes; runs/<recipe> if none.")] = None,
    init: Annotated[
        Path | None, typer.Option(help="cityscapes: file of the encoder's ImageNet weights.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Other than the recipe's.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Other than the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Other than the recipe's.")] = None,
    precision: Annotated[PrecisionName | None, typer.Option(help="Not the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Other than the recipe's.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of PyTorch, if not its own choice.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so long; the same command goes on.")
    ] = None,
    checkpoint_minutes: Annotated[float, typer.Option(min=0, help="Between checkpoints.")] = 3.0,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
) -> None:
    """Train a source model; killed or stopped, the same command goes on where it was.

    Ends with weights, a source profile, a model card and the curves in one folder, which
    `bestta.models.load(folder)` takes.
    """
    known = recipes()
    if recipe not in known:
        raise ValueError(f"no recipe is called {recipe!r}. There are: {', '.join(known)}.")
    given: dict[str, Any] = {
        "epochs": epochs, "batch": batch, "lr": lr, "seed": seed,
        "precision": precision.value if precision else None,
    }  # fmt: skip
    chosen = replace(known[recipe], **{k: v for k, v in given.items() if v is not None})
    folder = out or Path("runs") / recipe
    if threads is not None:
        torch.set_num_threads(threads)
    typer.echo(chosen.about)
    resumed = (folder / CHECKPOINT).exists()
    training = Training(chosen, folder, data=data, init=init, device=device)
    if training.done and published(folder):
        typer.echo(f"{folder} is finished. Train into another folder, or remove this one first.")
        return
    typer.echo(
        f"{len(training.splits.train):,} training images, {len(training.splits.held_out):,} held "
        f"out; {training.steps:,} steps of {chosen.batch} images, {chosen.epochs} epochs, "
        f"{chosen.precision}, threads: {torch.get_num_threads()}.\n"
        + (f"Going on after step {training.step:,}. " if resumed else "")
        + f"Checkpoint: {folder / CHECKPOINT}"
    )
    if chosen.precision == "bf16" and training.device.type == "cpu" and lacks_bf16():
        typer.echo(
            "This CPU has no bf16: --precision fp32 is faster, into its own --out.", err=True
        )
    training.run(
        seconds=None if minutes is None else 60 * minutes,
        checkpoint_every=60 * checkpoint_minutes,
    )
    if training.interrupted or not training.done:
        typer.echo(
            f"{'Stopped' if training.interrupted else 'Time is up'} after step {training.step:,} "
            f"of {training.steps:,}. The same command goes on from there."
        )
        raise typer.Exit(130 if training.interrupted else 0)
    card = publish(training, command=_command())
    place = f"./{folder}" if str(folder) in names() else str(folder)
    typer.echo(
        f"{card.metric} on the test images: {card.scores['clean']:.2f} %\n"
        f"In {folder}: weights, profile, card.md to read, curves.svg to look at.\n"
        f"Next: bestta models score {place}" + (f" --data {data}" if data else "")
    )


def _command() -> str:
    """What was typed, without the paths of this machine and the length of this sitting."""
    words = ["bestta"]
    left_out = False
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        if left_out or option in _SITTING:
            left_out = not left_out and not equals
            continue
        if words[-1] in _PATHS or Path(word).is_absolute():
            word = "PATH"
        elif option in _PATHS or (equals and Path(value).is_absolute()):
            word = f"{option}=PATH" if equals else option
        words.append(word)
    return shlex.join(words)


_PATHS = ("--data", "--init")
"""Options whose values say where things are on one machine."""

_SITTING = ("--minutes", "--checkpoint-minutes")
"""Options of one sitting, which change nothing of what comes out."""
