"""Contact sheets: many small pictures on one, to look at data before trusting it."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bestta.data.classes import CLASSES, PALETTE
from bestta.data.corruptions import CORRUPTIONS, EXTRA, Corruption, Family
from bestta.data.folder import spread
from bestta.data.samples import ImageSet, Pixels, Sample, Selection
from bestta.data.seeds import Seed
from bestta.data.weather import CONDITIONS, Weather

SEVERITIES = (1, 2, 3, 4, 5)
BACKGROUND, INK = (255, 255, 255), (32, 32, 32)
GAP = 4

Cell = TypeVar("Cell")


def sample_sheet(
    images: ImageSet, count: int = 16, *, columns: int = 4, cell_width: int = 256
) -> Pixels:
    """``count`` samples spread over the set, each with its label map beneath or its class named."""
    samples = list(Selection(images, spread(len(images), count)))
    if not samples:
        raise ValueError(f"nothing to show: no readable image in {images!r}")
    names = images.classes
    cells = [_cell(sample, names) for sample in samples]
    captions = [_caption(sample, names) for sample in samples]
    return grid(_rows(cells, columns), captions=_rows(captions, columns), cell_width=cell_width)


def corruption_sheet(
    image: Pixels,
    names: Sequence[str] = CORRUPTIONS + EXTRA,
    *,
    family: Family = "imagenet",
    seed: Seed = 0,
    cell_width: int = 256,
) -> Pixels:
    """One image under every corruption (rows) at every severity (columns)."""
    return _effect_sheet(
        image, names, lambda name, severity: Corruption(name, severity, family), seed, cell_width
    )


def weather_sheet(
    image: Pixels,
    conditions: Sequence[str] = CONDITIONS,
    *,
    seed: Seed = 0,
    cell_width: int = 256,
) -> Pixels:
    """One image in every weather (rows) at every severity (columns)."""
    return _effect_sheet(image, conditions, Weather, seed, cell_width)


def _effect_sheet(
    image: Pixels,
    names: Sequence[str],
    effect: Callable[[str, int], Callable[[Pixels, Seed], Pixels]],
    seed: Seed,
    cell_width: int,
) -> Pixels:
    rows = [
        [image, *(effect(name, severity)(image, seed) for severity in SEVERITIES)] for name in names
    ]
    columns = ["clear", *(f"severity {severity}" for severity in SEVERITIES)]
    return grid(rows, row_names=names, column_names=columns, cell_width=cell_width)


def colour(label: Pixels, classes: Sequence[str] = CLASSES) -> Pixels:
    """A label map (H, W) in colours (H, W, 3); ignored pixels are black."""
    palette = np.zeros((256, 3), np.uint8)
    if tuple(classes) == CLASSES:
        palette[: len(PALETTE)] = PALETTE
    else:
        # Hues a golden ratio of the circle apart: neighbours in the list differ clearly.
        hues = np.arange(255) * 0.618034 % 1 * 179
        hsv = np.stack([hues, np.full(255, 170), np.full(255, 210)], axis=1)
        rgb = cv2.cvtColor(hsv[None].astype(np.uint8), cv2.COLOR_HSV2RGB)
        palette[:255] = rgb[0]
    coloured: Pixels = palette[label]
    return coloured


def grid(
    rows: Sequence[Sequence[Pixels]],
    *,
    row_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
    captions: Sequence[Sequence[str]] = (),
    cell_width: int = 256,
) -> Pixels:
    """Pictures in rows and columns, with names beside, above and beneath them.

    All are scaled to ``cell_width``; each row is as high as its highest picture.
    """
    rows = [[_scaled(picture, cell_width) for picture in row] for row in rows]
    text_height = max(10, cell_width // 16)
    font = ImageFont.load_default(text_height)
    line = text_height + 2 * GAP
    left = max((round(font.getlength(name)) for name in row_names), default=-2 * GAP) + 2 * GAP
    top = line if column_names else 0
    foot = line if captions else 0
    heights = [max(picture.shape[0] for picture in row) + foot for row in rows]
    width = left + max(len(row) for row in rows) * (cell_width + GAP) + GAP
    sheet = Image.new("RGB", (width, top + sum(heights) + GAP * (len(rows) + 1)), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for column, name in enumerate(column_names):
        draw.text((left + GAP + column * (cell_width + GAP), GAP), name, INK, font)
    y = top + GAP
    for number, row in enumerate(rows):
        if row_names:
            draw.text((GAP, y), row_names[number], INK, font)
        for column, picture in enumerate(row):
            x = left + GAP + column * (cell_width + GAP)
            sheet.paste(Image.fromarray(picture), (x, y))
            if captions:
                text = _shortened(captions[number][column], font, cell_width)
                draw.text((x, y + picture.shape[0] + GAP), text, INK, font)
        y += heights[number] + GAP
    return np.asarray(sheet)


def save_sheet(sheet: Pixels, path: str | Path, *, colours: int | None = None) -> None:
    """Write a sheet as PNG, whole or not at all.

    Args:
        sheet: (H, W, 3) bytes.
        path: Where to; the folder is made if need be.
        colours: Reduce it to so many colours: noisy pictures take a third of the space.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder; name a file in it, such as {path / 'sheet.png'}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(sheet)
    if colours is not None:
        picture = picture.quantize(colours, dither=Image.Dither.NONE)
    unfinished = path.with_name(path.name + ".part")
    try:
        picture.save(unfinished, format="PNG", optimize=True)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _cell(sample: Sample, classes: Sequence[str]) -> Pixels:
    if isinstance(sample.label, np.ndarray):
        return np.concatenate([sample.image, colour(sample.label, classes)])
    return sample.image


def _caption(sample: Sample, classes: Sequence[str]) -> str:
    name = Path(sample.name).stem
    if isinstance(sample.label, int):
        return f"{classes[sample.label] if classes else sample.label} ({name})"
    return name


def _rows(cells: list[Cell], columns: int) -> list[list[Cell]]:
    return [cells[start : start + columns] for start in range(0, len(cells), columns)]


def _scaled(picture: Pixels, width: int) -> Pixels:
    height = max(1, math.floor(picture.shape[0] * width / picture.shape[1] + 0.5))
    if picture.shape[1] == width:
        return picture
    # Small images keep their pixels visible; large ones are averaged, not sampled.
    how = cv2.INTER_AREA if picture.shape[1] > width else cv2.INTER_NEAREST
    return cv2.resize(picture, (width, height), interpolation=how)  # type: ignore[return-value]


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    text = _legible(text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength("..." + text) > width:
        text = text[1:]
    return "..." + text


def _legible(text: str) -> str:
    """``text`` in the letters that Pillow's own font has: plain ones, without their accents."""
    spelt = text.replace("ß", "ss").replace("ł", "l").replace("ø", "o").replace("æ", "ae")
    letters = unicodedata.normalize("NFKD", spelt)
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    return plain.encode("ascii", "replace").decode()
