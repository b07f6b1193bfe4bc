"""``bestta bench``: methods over a protocol, one record each; ``bestta report``: what they say."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bestta.benchmark import config
from bestta.benchmark.parts import load_plugins
from bestta.benchmark.sweep import Job, jobs_of, sweep
from bestta.cli.data import parsed_size
from bestta.cli.display import Display, title
from bestta.cli.methods import parsed
from bestta.cli.models import PrecisionName


class Where(StrEnum):
    """Where runs run."""

    here = "here"
    ray = "ray"


def bench(
    protocol: Annotated[
        str | None, typer.Argument(help="Its name or YAML file; without, all are listed.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method's name or YAML file; several times for several."),
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="Compare a study's variants instead: losses, positions …")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the study, this row alone: its label, letter or method; several for several."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data set.")] = None,
    source_data: Annotated[
        Path | None, typer.Option(help="Folder of the source's data set, if that is another.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the records; runs/<protocol> if none.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the methods, as lr=0.01.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Each run with so many seeds.")] = 1,
    every: Annotated[
        int | None, typer.Option(min=1, help="Only every so-many-th frame of each block.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="So many images of each condition.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="So many rounds.")] = None,
    severity: Annotated[int | None, typer.Option(min=1, max=5, help="Of the weather.")] = None,
    size: Annotated[str | None, typer.Option(help="Resize images on reading, as 960x540.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="So many images at a time.")] = None,
    model: Annotated[
        str | None, typer.Option(help="One that ships, the folder of one, or a Python file.")
    ] = None,
    precision: Annotated[PrecisionName | None, typer.Option(help="fp32 or bf16.")] = None,
    source: Annotated[
        bool, typer.Option(help="Look at source images too, where the protocol says so.")
    ] = True,
    jobs: Annotated[int, typer.Option(min=1, help="So many runs at once.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch, of each run.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Processes of each run that render.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    on: Annotated[Where, typer.Option(help="Here, or on a Ray cluster.")] = Where.here,
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster.")] = None,
    plugin: Annotated[
        list[Path] | None, typer.Option(help="A Python file to import first: a method of yours.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also what is recorded already.")] = False,
) -> None:
    """Run methods over a protocol, one record each. Stopped in any way, the same command goes on.

    What is recorded already is skipped; what fails is told at the end and stops nothing else.
    """
    if protocol is None:
        list_()
        return
    plugins = tuple(str(path.resolve()) for path in plugin or ())
    load_plugins(plugins)
    given: dict[str, Any] = {
        "every": every,
        "images": images,
        "rounds": rounds,
        "severity": severity,
        "size": parsed_size(size),
        "batch": batch,
        "model": model,
        "precision": None if precision is None else precision.value,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if not source:
        changes.update(source=None, forgetting=False, embeddings=False)
    chosen = config.read_protocol(protocol, **changes)
    if severity is not None and chosen.recipe == "gradual":
        raise ValueError("a gradual protocol goes through severities of its own.")
    if severity is not None and chosen.set == "acdc":
        raise ValueError("photographs of the weather are as severe as they are: no --severity.")
    if data is not None and chosen.set == "streets":
        raise ValueError("streets are rendered, not read: no --data.")
    if on is Where.here and address is not None:
        raise ValueError("--address is that of a Ray cluster: say --on ray.")
    if on is Where.ray and jobs > 1:
        raise ValueError("a Ray cluster runs as many at once as it has room for: no --jobs.")
    compared = None if study is None else config.read_study(study)
    if compared is not None:
        if not source:
            raise ValueError("a study says itself whether it looks at source images.")
        kept = {name: v for name, v in compared.changes.items() if name not in changes}
        compared = replace(compared, changes=kept)  # what is said here wins
        compared = compared.only(only) if only else compared
    elif only:
        raise ValueError("--only is for the rows of a study: name one with --study.")
    settings = dict(map(parsed, setting or []))
    if settings and not method:
        raise ValueError("--set is for the methods that --method names: name one.")
    all_runs = config.runs(
        chosen,
        [config.read_method(name, **settings) for name in method] if method else None,
        study=compared,
        seeds=seeds,
        threads=threads,
        workers=workers,
        device=device,
        data=None if data is None else str(data),
        source_data=None if source_data is None else str(source_data),
        plugins=plugins,
    )
    names = (chosen.name, None if compared is None else compared.name)
    place = out or Path("runs") / "-".join(filter(None, names))
    finished = run_all(all_runs, place, jobs=jobs, on=on, address=address, again=again)
    show_summary(place, [job.name for job in finished])
    typer.echo(f"\nRecords: {place}\nNext: bestta report {place}")
    if any(job.state == "failed" for job in finished):
        raise typer.Exit(1)


def run_all(
    runs: list[config.Run],
    place: Path,
    *,
    jobs: int = 1,
    on: Where = Where.here,
    address: str | None = None,
    again: bool = False,
) -> list[Job]:
    """Do the runs with a live display; leave with 130 if stopped."""
    found = jobs_of(runs, place, again=again)
    before = [job for job in found if job.state == "recorded before"]
    if before:
        names = ", ".join(title(job) for job in before)
        typer.echo(f"Recorded before, with the same settings: {names}. (--again runs them anew.)")
    try:
        with Display(found) as display:
            if on is Where.ray:
                from bestta.benchmark.cluster import sweep_on_ray

                sweep_on_ray(found, place, address=address, listener=display)
            else:
                sweep(found, place, at_once=jobs, listener=display)
    except KeyboardInterrupt:
        typer.echo("Stopped; what is done is put down. The same command goes on from there.")
        raise typer.Exit(130) from None
    for job in found:
        if job.state == "failed":
            typer.echo(f"failed: {title(job)}: {job.reason}", err=True)
            if job.trace:
                log = place / f"{job.name}.failed.txt"
                log.write_text(job.trace, encoding="utf-8")
                typer.echo(f"        all of it: {log}", err=True)
        elif job.state == "recorded":
            (place / f"{job.name}.failed.txt").unlink(missing_ok=True)  # of a try before
    return found


def show_summary(place: Path, names: list[str]) -> None:
    """Print the tables of these records: scores and cost, and what a study is about."""
    from bestta.reports.records import groups, read_records
    from bestta.reports.table import terminal
    from bestta.reports.tables import (
        correlation_table,
        distance_table,
        forgetting_table,
        summary,
    )

    paths = [place / f"{name}.json" for name in names if (place / f"{name}.json").exists()]
    for group in groups(read_records(paths)) if paths else ():
        about = {"forgetting": forgetting_table, "embeddings": distance_table}.get(
            group.study or "", correlation_table
        )
        for table in filter(None, (summary(group), about(group))):
            typer.echo(f"\n{terminal(table, 100)}")


def report(
    records: Annotated[list[Path], typer.Argument(help="Records, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("report"),
    title: Annotated[str | None, typer.Option(help="What stands above it.")] = None,
) -> None:
    """Write one HTML page from records, and its tables as Markdown, CSV and LaTeX.

    Only like is compared with like: records of other streams get tables of their own.
    """
    from bestta.reports.page import write_report

    written = write_report(records, out, title=title)
    typer.echo(f"{len(written)} files in {out}\nLook at {written[0]}: it opens in any browser.")


def list_() -> None:
    """Name the protocols, the studies and the methods there are files for."""
    for what in ("protocols", "studies", "methods"):
        typer.echo(f"{what.capitalize()}:")
        names = config.shipped(what)
        width = max(map(len, names), default=0)
        for name in names:
            if what == "methods":
                about = config.read_method(name).label
            elif what == "protocols":
                about = config.read_protocol(name).about
            else:
                about = config.read_study(name).about
            typer.echo(f"  {name:<{width}}  {about}")
        typer.echo()
    typer.echo("Next: bestta bench PROTOCOL [--method NAME …] [--study NAME] [--data PATH]")
