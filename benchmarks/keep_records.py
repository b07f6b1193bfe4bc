"""Put records into the repository, without what does not belong there.

    python benchmarks/keep_records.py runs/weather-continual-methods --out results/measured/weather

Pictures stay out, for they are the data set's; so does the score of every single frame, which is
most of a long record. Scores by block, class and round, costs, settings and provenance stay as
they are. Records whose similarities were traced keep every frame: correlations are made of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bestta.benchmark.runner import compact
from bestta.files import write_whole
from bestta.reports.correlation import NAMES

TRACED = 250
"""So many entries of a trace are kept: a curve, not every step."""


def kept(record: dict[str, Any]) -> dict[str, Any]:
    """What of a record goes into the repository."""
    record = {**record, "pictures": {}}
    if not any(record["traces"].get(name) for name in NAMES[:-1]):
        record["frames"] = {}
        stride = -(-len(record["traces"].get("step", ())) // TRACED) or 1
        record["traces"] = {name: values[::stride] for name, values in record["traces"].items()}
        record["traced_every"] = record["traced_every"] * stride
    return record


def keep(path: Path, out: Path) -> None:
    """Read, shorten, write; what is there already under the same name is replaced."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("kind") != "bestta record":
        raise SystemExit(f"{path} is no record of `bestta bench`.")
    text = compact(json.dumps(kept(record), indent=1, ensure_ascii=False))
    write_whole(out / path.name, f"{text}\n".encode())


def main() -> None:
    """Keep what is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("records", nargs="+", type=Path, help="Records, or folders of them.")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    paths = [
        p
        for place in args.records
        for p in ([place] if place.is_file() else sorted(place.glob("*.json")))
    ]
    if not paths:
        raise SystemExit(f"no records in {', '.join(map(str, args.records))}.")
    args.out.mkdir(parents=True, exist_ok=True)
    for path in paths:
        keep(path, args.out)
    print(f"{len(paths)} records in {args.out}.")


if __name__ == "__main__":
    main()
