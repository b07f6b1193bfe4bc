"""``bestta demo``: what adaptation does, seen in a few minutes, on streets that come with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bestta import models
from bestta.benchmark import config
from bestta.benchmark.sweep import jobs_of
from bestta.cli.bench import run_all, show_summary


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer frames and methods: under a minute.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the records and the report.")] = Path("demo"),
    jobs: Annotated[int | None, typer.Option(min=1, help="So many runs at once.")] = None,
) -> None:
    """Drive a small network through fog, night, rain and snow, with six methods side by side.

    The street scenes are rendered here, the network comes with the library: nothing is fetched.
    """
    from bestta.reports.page import write_report

    protocol = config.read_protocol("streets-quick" if quick else "streets-continual")
    runs = config.runs(protocol)
    folder = out / "quick" if quick else out
    place = folder / "records"
    card = models.card(protocol.model)
    # The costliest first, or one core waits for it in the end.
    runs.sort(key=lambda run: run.method.method != "cotta")
    found = jobs_of(runs, place)
    frames = found[0].frames
    rounds = "one round" if protocol.rounds == 1 else f"{protocol.rounds} rounds"
    typer.echo(
        f"{card.about}: trained in clear weather, {card.scores['clean']:.1f} {card.metric} there.\n"
        f"Now it drives through {', '.join(protocol.conditions)}, {rounds}, {frames} frames one at "
        f"a time, no labels, no word when the weather changes; {len(runs)} methods side by side."
    )
    measured_before = all(job.state == "recorded before" for job in found)
    finished = run_all(runs, place, jobs=jobs or min(2, os.cpu_count() or 1), again=measured_before)
    show_summary(place, [job.name for job in finished])
    page = write_report([place], folder, title="Streets in the weather: the demo of bestta")[0]
    typer.echo(
        f"\nLook at {page}: the same as a page, with curves, costs and pictures.\n"
        "Next: bestta adapt --images FOLDER      your own street photos\n"
        "      bestta bench                      every protocol, method and study there is\n"
        "      examples/your_own_model.py        a model you have"
    )
    if any(job.state == "failed" for job in finished):
        raise typer.Exit(1)
