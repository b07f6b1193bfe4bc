"""Run what docs/results.md still lacks, and write it there: the paper's tables, row by row.

    make bench-tables CITYSCAPES=… CIFAR10=…
    python benchmarks/tables.py --cityscapes … --only weather --jobs 2

Goes through the sections of the page in their order and runs the commands that stand below each.
A row that has its records in results/measured is not run again, even if settings were added since;
to have one measured anew, take its record out of there. Each section is kept and the page written
when its commands end, in whichever way, so Ctrl-C loses nothing: rows that are done are in the
page, and the one under way goes on next time. All of it is days on two cores.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from bestta.benchmark.config import read_study

HERE = Path(__file__).parent
MEASURED = HERE.parent / "results" / "measured"
PLACES = {"CITYSCAPES": "cityscapes", "CIFAR-10": "cifar10"}
"""What the page calls the folders of data sets, and the options that name them here."""


def script(name: str) -> dict[str, Any]:
    """What another script of this folder defines."""
    return runpy.run_path(str(HERE / f"{name}.py"))


def arguments(command: str, data: dict[str, str | None], jobs: int, out: Path) -> list[str] | None:
    """What to run for a command of the page; None if its data set is not at hand."""
    words = shlex.split(command)
    assert words[:2] == ["bestta", "bench"]
    if "--jobs" in words:
        at = words.index("--jobs")
        del words[at : at + 2]
    for word, option in PLACES.items():
        if word in words:
            place = data.get(option)
            if place is None:
                return None
            words[words.index(word)] = place
    return [sys.executable, "-m", *words, "--jobs", str(jobs), "--out", str(out)]


def lacking(words: Sequence[str], place: Path) -> list[str] | None:
    """The rows a command asks for without a record for each seed; None if it is of no study."""
    if "--study" not in words:
        return None
    study = read_study(words[words.index("--study") + 1])
    if named := [row for at, row in pairwise(words) if at == "--only"]:
        study = study.only(named)
    seeds = int(words[words.index("--seeds") + 1]) if "--seeds" in words else 1
    configs = [json.loads(path.read_text("utf-8"))["config"] for path in place.glob("*.json")]
    rows = [config["variant"] for config in configs if config["study"] == study.name]
    return [v.row or v.label for v in study.variants if rows.count(asdict(v)) < seeds]


def asking_for(rows: Sequence[str] | None, words: Sequence[str]) -> list[str]:
    """The command for these rows in place of those it names; as it is if there are none."""
    if rows is None:
        return [*words]
    before = ["", *words]
    rest = [word for at, word in pairwise(before) if "--only" not in (at, word)]
    return [*rest, *(word for row in rows for word in ("--only", row))]


def fill(
    folder: str,
    commands: Sequence[str],
    data: dict[str, str | None],
    *,
    jobs: int,
    work: Path,
    measured: Path = MEASURED,
) -> bool:
    """Run the commands of a section and keep what they record. Returns whether all went well."""
    out = work / folder
    out.mkdir(parents=True, exist_ok=True)
    for known in (measured / folder).glob("*.json"):
        if not (out / known.name).exists():
            shutil.copy(known, out)
    well = True
    try:
        for command in commands:
            words = arguments(command, data, jobs, out)
            if words is None:
                print(f"{folder}: left out, its data set is not named. {command}", flush=True)
                well = False
                continue
            print(f"{folder}: {command}", flush=True)
            rows = lacking(words, measured / folder)
            if rows == []:
                continue
            well &= run(asking_for(rows, words)) == 0
    finally:
        keep(out, measured / folder)
    return well


def run(words: Sequence[str]) -> int:
    """Its exit code. Ctrl-C reaches it as well: then there is a checkpoint to wait for."""
    with subprocess.Popen(words) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise


def keep(out: Path, measured: Path) -> None:
    """Put what is new among the records into the repository."""
    for path in sorted(out.glob("*.json")):
        if not (measured / path.name).exists():
            measured.mkdir(parents=True, exist_ok=True)
            script("keep_records")["keep"](path, measured)
            print(f"{path.name} is in {measured}.", flush=True)


def main() -> None:
    """Fill one section after another."""
    page = script("results_page")
    sections = {section.folder: section for section in page["SECTIONS"]}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for option in PLACES.values():
        parser.add_argument(f"--{option}", help="Its folder; without, its tables are left out.")
    parser.add_argument("--only", nargs="+", choices=sections, help="These sections.")
    parser.add_argument("--jobs", type=int, default=2, help="So many runs at once.")
    parser.add_argument("--work", type=Path, default=Path("runs/tables"))
    args = parser.parse_args()
    failed = []
    try:
        for folder in args.only or sections:
            commands = sections[folder].commands
            if not fill(folder, commands, vars(args), jobs=args.jobs, work=args.work):
                failed.append(folder)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on.") from None
    finally:
        page["main"]()
    if failed:
        raise SystemExit(f"not all of these could be measured: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
