"""The commands, gathered; errors that a user can mend are shown without a traceback."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from bestta._version import __version__
from bestta.cli.adapt import adapt
from bestta.cli.bench import bench, report
from bestta.cli.calibrate import calibrate
from bestta.cli.data import app as data
from bestta.cli.demo import demo
from bestta.cli.methods import methods, prepare
from bestta.cli.models import app as models
from bestta.cli.train import train

app = typer.Typer(
    help="Single-image continual test-time adaptation: vision models that survive the weather.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")
app.add_typer(models, name="models")
app.command()(train)
app.command()(methods)
app.command()(prepare)
app.command()(calibrate)
app.command()(demo)
app.command()(adapt)
app.command()(bench)
app.command()(report)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bestta {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command as a whole."""


def run() -> None:
    """Run the command named on the command line."""
    with warnings.catch_warnings():
        # One line for each skipped image, without the line of code that noticed it.
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: typer.echo(f"warning: {message}", err=True)
        try:
            app()
        except (ValueError, TypeError, IndexError, ArithmeticError, OSError, MemoryError) as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(1)
