"""``bestta data``: what sets there are, whether one is whole, and what it looks like."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bestta.data import ImageSet, LayoutError, describe, kinds, open_set
from bestta.data.corruptions import CORRUPTIONS
from bestta.data.sheets import corruption_sheet, sample_sheet, save_sheet, weather_sheet
from bestta.data.weather import CONDITIONS

app = typer.Typer(help="List, check and preview data sets.", no_args_is_help=True)


class Of(StrEnum):
    """What a preview shows."""

    samples = "samples"
    corruptions = "corruptions"
    weather = "weather"


class FamilyName(StrEnum):
    """Whose constants the corruptions take."""

    imagenet = "imagenet"
    cifar = "cifar"


Kind = Annotated[str, typer.Argument(help="The kind of set; `bestta data list` names them.")]
Root = Annotated[Path | None, typer.Argument(help="Its folder; the embedded set needs none.")]
Split = Annotated[str | None, typer.Option(help="train, val, test, ... as the set has them.")]
Condition = Annotated[str | None, typer.Option(help="acdc: fog, night, rain or snow.")]
FileCorruption = Annotated[
    str | None, typer.Option("--corruption", help="cifar10c: which of its files.")
]
Severity = Annotated[int | None, typer.Option(help="cifar10c: 1 to 5.")]
Labels = Annotated[Path | None, typer.Option(help="folder: where its label maps are.")]
IgnoreFringes = Annotated[
    bool, typer.Option("--ignore-fringes", help="cityscapes: ignore borders that were blurred.")
]
Size = Annotated[str | None, typer.Option(help="Resize on reading, such as 1024x512.")]


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help="List the samples of this set.")] = None,
    root: Root = None,
    split: Split = None,
    condition: Condition = None,
    corruption: FileCorruption = None,
    severity: Severity = None,
    labels: Labels = None,
) -> None:
    """Name the kinds of sets; or the samples of one, in their order."""
    if kind is None:
        width = max(map(len, kinds()))
        for name, description in kinds().items():
            typer.echo(f"{name:<{width}}  {description}")
        typer.echo("\nNext: bestta data check <kind> <path>")
        return
    images = _open(kind, root, split, condition, corruption, severity, labels)
    for index in range(len(images)):
        typer.echo(images.name(index))


@app.command()
def check(
    kind: Kind,
    root: Root = None,
    split: Split = None,
    condition: Condition = None,
    corruption: FileCorruption = None,
    severity: Severity = None,
    labels: Labels = None,
    ignore_fringes: IgnoreFringes = False,
    full: Annotated[bool, typer.Option(help="Read every image, not only a sample.")] = False,
) -> None:
    """Tell what is there, how much of it, in which sizes, and what is missing.

    Of acdc every condition is checked and of cifar10c every corruption, unless one is named. Ends
    with status 1 if an image cannot be read or a part is not there.
    """
    parts: list[tuple[str | None, str | None]] = [(condition, corruption)]
    if kind == "acdc" and condition is None:
        parts = [(name, None) for name in CONDITIONS]
    if kind == "cifar10c" and corruption is None:
        parts = [(None, name) for name in CORRUPTIONS]
    opened: list[ImageSet | LayoutError] = []
    for part in parts:
        try:
            opened.append(_open(kind, root, split, *part, severity, labels, ignore_fringes))
        except LayoutError as error:
            opened.append(error)
    faults = {str(part) if isinstance(part, LayoutError) else "" for part in opened}
    if isinstance(opened[0], LayoutError) and len(faults) == 1:
        raise opened[0]  # the same fault for all: the folder's, and the error shows its tree
    whole = True
    for part, images in zip(parts, opened, strict=True):
        if len(parts) > 1:
            typer.echo(f"== {part[0] or part[1]}")
        if isinstance(images, LayoutError):
            typer.echo(f"missing: {str(images).splitlines()[0]}")
            whole = False
        else:
            description = describe(images, full=full)
            typer.echo(str(description))
            whole = whole and not description.unreadable
    if not whole:
        raise typer.Exit(1)


@app.command()
def preview(
    kind: Kind,
    root: Root = None,
    out: Annotated[Path, typer.Option(help="The picture to write, a PNG.")] = Path("sheet.png"),
    show: Annotated[Of, typer.Option(help="What to draw.")] = Of.samples,
    count: Annotated[int, typer.Option(min=1, help="How many samples.")] = 16,
    index: Annotated[int, typer.Option(help="Which sample the effects are shown on.")] = 0,
    family: Annotated[FamilyName | None, typer.Option(help="Constants of the corruptions.")] = None,
    seed: Annotated[int, typer.Option(help="What the effects draw from.")] = 0,
    width: Annotated[int, typer.Option(min=16, max=4096, help="Width of each picture.")] = 256,
    colours: Annotated[
        int | None,
        typer.Option(min=2, max=256, help="Reduce to so many: a smaller file."),
    ] = None,
    split: Split = None,
    condition: Condition = None,
    corruption: FileCorruption = None,
    severity: Severity = None,
    labels: Labels = None,
    ignore_fringes: IgnoreFringes = False,
    size: Size = None,
) -> None:
    """Draw a contact sheet: samples with their labels, or one sample in every condition."""
    if out.suffix.lower() != ".png":
        raise ValueError(f"the sheet is a PNG; --out {out} should end in .png")
    images = _open(kind, root, split, condition, corruption, severity, labels, ignore_fringes, size)
    if show is Of.samples:
        sheet = sample_sheet(images, count, cell_width=width)
    elif show is Of.weather:
        sheet = weather_sheet(images[index].image, seed=seed, cell_width=width)
    else:
        chosen = family or (FamilyName.cifar if kind.startswith("cifar") else FamilyName.imagenet)
        sheet = corruption_sheet(
            images[index].image, family=chosen.value, seed=seed, cell_width=width
        )
    save_sheet(sheet, out, colours=colours)
    height, width, _ = sheet.shape
    typer.echo(f"{out}: {width}×{height} pixels. Open it to see {show.value} of {images!r}.")


def _open(
    kind: str,
    root: Path | None,
    split: str | None = None,
    condition: str | None = None,
    corruption: str | None = None,
    severity: int | None = None,
    labels: Path | None = None,
    ignore_fringes: bool = False,
    size: str | None = None,
) -> ImageSet:
    given: dict[str, Any] = {
        "split": split,
        "condition": condition,
        "corruption": corruption,
        "severity": severity,
        "labels": labels,
        "ignore_fringes": ignore_fringes or None,
        "size": parsed_size(size),
    }
    return open_set(kind, root, **{name: v for name, v in given.items() if v is not None})


def parsed_size(text: str | None) -> tuple[int, int] | None:
    """``1024x512`` as width and height; None of nothing."""
    if text is None:
        return None
    width, _, height = text.lower().replace("×", "x").partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ValueError(f"--size is width x height, such as 1024x512; got {text!r}")
    return int(width), int(height)
