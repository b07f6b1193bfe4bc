"""Write the table of docs/calibration.md from the record of benchmarks/calibration.py.

python benchmarks/calibration_table.py results/measured/calibration.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bestta.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "calibration.md"
RECORD = ROOT / "results" / "measured" / "calibration.json"
START, END = "<!-- proof -->", "<!-- /proof -->"

Record = Mapping[str, Any]


def table(record: Record) -> str:
    """The table and what it is of, in Markdown."""
    lines = [
        "| model | norm | source | best single layer, found with labels | chosen without "
        "| of its gain | with the settings chosen | and the guard | minutes |",
        "| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [row(model) for model in record["models"]]
    met = sum(bool(model["met"]) for model in record["models"])
    about = record["provenance"]
    lines += [
        "",
        f"Met by {met} of {len(record['models'])}: the layers chosen reach 90 % of the gain of the "
        "best single layer, or come within 0.3 points of it. mIoU or accuracy in %, the mean over "
        "streams that calibration never saw: for segmentation, test images in simulated fog, "
        "night, rain and snow and under the corruptions brightness, fog, frost and snow, severity "
        "3; for classification the 15 corruptions of CIFAR-10-C at severity 5. The first scores "
        "are with γ held still and the preset's ρ.",
        "",
        f"{numbers(record)} `python benchmarks/calibration.py`, commit {about['commit']}.",
    ]
    return "\n".join(lines)


def row(model: Record) -> str:
    mean = model["mean"]
    best, chosen = model["best_single"], ", ".join(f"`{name}`" for name in model["chosen"])
    share = model["share_percent"]
    seconds = model["calibration_seconds"]
    return (
        f"| {model['model']} | {model['norm']} | {mean['source']:.1f} | `{best}` {mean[best]:.1f} "
        f"| {chosen} {mean['calibrated layers']:.1f} | "
        + (f"{share:.0f} %" if share is not None else "–")
        + f" | {mean['calibrated']:.1f} | {mean['calibrated, guarded']:.1f} | "
        + (f"{seconds / 60:.1f}" if seconds is not None else "–")
        + " |"
    )


def numbers(record: Record) -> str:
    words = [
        f"{model['model']}: {model['source_images']} source images, {model['candidates']} "
        f"candidates, {len(model['streams'])} streams of {model['test_images']} images"
        for model in record["models"]
    ]
    return f"{'; '.join(words)}."


def written(page: str, record: Record) -> str:
    """The page with its table made anew."""
    before, found, rest = page.partition(START)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"the page has no place for the table: {START} … {END}.")
    return f"{before}{START}\n{table(record)}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, nargs="?", default=RECORD)
    record = json.loads(parser.parse_args().record.read_text(encoding="utf-8"))
    write_whole(PAGE, written(PAGE.read_text(encoding="utf-8"), record).encode())
    print(f"{PAGE.relative_to(ROOT)} is written.")


if __name__ == "__main__":
    main()
