"""What the methods see, as one picture: a column a condition, a row a method.

    bestta demo
    python benchmarks/pictures.py demo/records --out docs/results-pictures.png

Of records whose images are rendered, and of no others: those of a data set are not ours to show.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from bestta.data.samples import Pixels
from bestta.data.sheets import grid, save_sheet
from bestta.reports import groups, read_records
from bestta.reports.records import Entry

OURS_TO_SHOW = "streets"


def sheet(records: Path, cell_width: int = 256) -> Pixels:
    """The image, the truth and every method's answer, in the last round, with its mean score."""
    try:
        found = groups(read_records([records]))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if len(found) > 1:
        raise SystemExit(
            f"{records} holds records of {len(found)} streams: name a folder with one of them."
        )
    shown = found[0].entries
    data = shown[0].record["config"]["protocol"]["set"]
    if data != OURS_TO_SHOW:
        raise SystemExit(f"these records are of {data}, whose images are not ours to show.")
    conditions = list(pictures_of(shown[0]))
    rows = {kind: [picture(shown[0], c, kind) for c in conditions] for kind in ("image", "truth")}
    for entry in shown:
        name = f"{entry.label} {entry.score:.1f}".replace("α", "alpha")  # Pillow's font has none
        rows[name] = [picture(entry, c, "prediction") for c in conditions]
    return grid(
        list(rows.values()),
        row_names=list(rows),
        column_names=conditions,
        cell_width=cell_width,
    )


def pictures_of(entry: Entry) -> dict[str, dict[str, str]]:
    """The files of each condition's pictures, by kind."""
    found = entry.record["pictures"].get("conditions")
    if not found:
        raise SystemExit(f"the record of {entry.label} was kept without pictures.")
    return {str(one["name"]): one for one in found}


def picture(entry: Entry, condition: str, kind: str) -> Pixels:
    """One of the pictures that a record names."""
    files = pictures_of(entry).get(condition)
    if files is None:
        raise SystemExit(f"the record of {entry.label} has no picture of {condition}.")
    path = entry.records[0].pictures / files[kind]
    if not path.exists():
        raise SystemExit(f"{path} is not there.")
    with Image.open(path) as found:
        return np.asarray(found.convert("RGB"))


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("records", type=Path, help="Folder of one run's records.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    save_sheet(sheet(args.records), args.out, colours=256)
    print(f"{args.out}: look at it.")


if __name__ == "__main__":
    main()
