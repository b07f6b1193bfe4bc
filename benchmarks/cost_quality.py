"""What the cheaper forms of BESTTA's step cost in score, over a stream of weather.

    python benchmarks/cost_quality.py                                   the embedded streets
    python benchmarks/cost_quality.py --data CITYSCAPES --images 50 --rounds 2

Source, BESTTA and its cheaper forms run as `bestta bench` runs them, one record each in --work:
stopped in any way, the same command goes on, and what is recorded already is not run again. The
table is made of the records alone; `bestta report` reads them, too.

Time is over the plain forward, and a record holds the median over its sampled calls. Where only
some frames are adapted to, that median hides the dear ones, so the mean of auto's calls is also put
together from other rows: the adapted share times BESTTA's median, the rest times that of γ = 0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from bestta.benchmark import Method, Protocol, read_method, read_protocol, runs
from bestta.cli.bench import run_all
from bestta.cli.data import parsed_size
from bestta.files import write_whole
from bestta.provenance import lacks_bf16, provenance

SOURCE, ALWAYS, STILL, AUTO = "source", "bestta", "bestta-still", "bestta-auto"
APPROXIMATE = {"bestta-bf16": "bf16", "bestta-half": "half"}
METHODS = (SOURCE, ALWAYS, STILL, AUTO, *APPROXIMATE)
"""Files in configs/methods, in the order of the table."""

LEAST_KEPT, MOST_TIME = 95.0, 1.05
"""The bar for auto: percent of the gain, and mean time over the plain forward."""
NO_GAIN = 0.005
"""Points of mIoU: a gain below this prints as 0.00, and shares of it say nothing."""

Record = Mapping[str, Any]


# --- from records to a table --------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One method's score and what it took; times are over the plain forward."""

    method: str
    record: str
    score: float
    kept_percent: float | None
    """Of BESTTA's gain over the source; None if there is no gain to keep."""
    adapted_share: float
    time_median: float | None
    time_mean: float | None
    time_composed: float | None
    """An estimate of the mean over all calls, where frames of two costs mix; see `composed`."""
    over_model_bytes: int | None
    timed: int
    load: tuple[float | None, ...]


def rows(records: Mapping[str, Record]) -> list[Row]:
    """The table, from the records by method.

    Raises:
        ValueError: If source or BESTTA is missing, a score is, or the streams are not the same.
    """
    check(records)
    source, best = (float(records[name]["score"]) for name in (SOURCE, ALWAYS))
    table = []
    for name in (name for name in METHODS if name in records):
        record = records[name]
        table.append(
            Row(
                method=name,
                record=record["id"],
                score=record["score"],
                kept_percent=kept(record["score"], source, best),
                adapted_share=record["events"]["adapted_share"],
                time_median=record["cost"].get("ratio"),
                time_mean=record["cost"].get("mean_ratio"),
                time_composed=composed(records) if name == AUTO else None,
                over_model_bytes=record["cost"]["over_model_bytes"],
                timed=record["cost"]["timed"],
                load=tuple(record["cost"]["load"]),
            )
        )
    return table


def check(records: Mapping[str, Record]) -> None:
    for name in (SOURCE, ALWAYS):
        if name not in records:
            there = ", ".join(records) or "none"
            raise ValueError(
                f"no record of {name!r}: without it there is no gain to compare with. Records "
                f"there are: {there}. The same command runs what is missing."
            )
    for name, record in records.items():
        if record["score"] is None:
            raise ValueError(f"{record['id']} ({name}) has no score: its images have no labels.")
    streams = {name: record["stream"]["key"] for name, record in records.items()}
    if len(set(streams.values())) > 1:
        seen = ", ".join(f"{name} {key}" for name, key in streams.items())
        raise ValueError(f"records of different streams do not compare: {seen}.")


def kept(score: float, source: float, best: float) -> float | None:
    """Percent of the gain from ``source`` to ``best`` that ``score`` keeps; None without a gain.

    >>> kept(48.0, 40.0, 50.0)
    80.0
    >>> kept(48.0, 50.0, 50.0) is None
    True
    """
    gain = best - source
    return None if gain < NO_GAIN else 100 * (score - source) / gain


def composed(records: Mapping[str, Record]) -> float | None:
    """Mean time of auto's calls over the plain forward, put together from the medians of others.

    Frames with a backward pass cost what BESTTA's do, frames without what those of γ = 0 do. None
    where a record lacks what it takes.
    """
    if STILL not in records:
        return None
    # A median over frames of which most were skipped would be that of a skipped frame.
    if records[ALWAYS]["events"]["adapted_share"] <= 0.5:
        return None
    always, still = (records[name]["cost"].get("ratio") for name in (ALWAYS, STILL))
    if always is None or still is None:
        return None
    share: float = records[AUTO]["events"]["adapted_share"]
    return float(share * always + (1 - share) * still)


def printed_table(table: Sequence[Row]) -> str:
    head = f"{'':<14}{'mIoU':>7}{'of the gain':>13}{'adapted':>9}{'median':>9}{'mean':>9}{'MB':>6}"
    lines = [head]
    for row in table:
        percent = "-" if row.kept_percent is None else f"{row.kept_percent:.1f} %"
        memory = "-" if row.over_model_bytes is None else f"{row.over_model_bytes / 1e6:.0f}"
        lines.append(
            f"{row.method:<14}{row.score:>7.2f}{percent:>13}{100 * row.adapted_share:>7.1f} %"
            f"{times(row.time_median):>9}{times(row.time_mean):>9}{memory:>6}"
        )
    lines.append(
        "adapted: frames with a backward pass. median, mean: time of a call over the plain"
    )
    lines.append("forward, of sampled calls. MB: peak over the loaded model, in the first steps.")
    return "\n".join(lines)


def times(ratio: float | None, digits: int = 2) -> str:
    return "-" if ratio is None else f"{ratio:.{digits}f}x"


# --- the bar ------------------------------------------------------------------------------


def verdicts(table: Sequence[Row]) -> list[str]:
    """What the table says of auto, of learning at all, and of what computes something else."""
    by_method = {row.method: row for row in table}
    best = by_method[ALWAYS]
    found = []
    if AUTO in by_method:
        found.append(auto_verdict(by_method[AUTO], by_method))
    if STILL in by_method:
        found.append(still_verdict(by_method[STILL], best))
    for name, word in APPROXIMATE.items():
        if name in by_method:
            change = by_method[name].score - best.score
            found.append(f"{word} changes the score by {points(change)} points")
    missing = [name for name in METHODS if name not in by_method]
    if missing:
        found.append(f"cannot tell of {', '.join(missing)}: no record")
    return found


def auto_verdict(auto: Row, by_method: Mapping[str, Row]) -> str:
    bar = (
        f"auto keeps at least {LEAST_KEPT:.0f} % of the gain at no more than {MOST_TIME}x the time"
    )
    if auto.kept_percent is None:
        gain = points(by_method[ALWAYS].score - by_method[SOURCE].score)
        change = points(auto.score - by_method[ALWAYS].score)
        return (
            f"{bar}: cannot tell: BESTTA gains {gain} points here, there is no gain to keep "
            f"(auto against BESTTA: {change} points; {times(auto.time_composed)})"
        )
    mean, composed = (times(ratio, digits=3) for ratio in (auto.time_mean, auto.time_composed))
    figures = f"{auto.kept_percent:.1f} %, {mean} on average, "
    figures += f"{composed} from {ALWAYS}'s and {STILL}'s by the adapted share"
    known = [ratio for ratio in (auto.time_mean, auto.time_composed) if ratio is not None]
    if not known:
        return f"{bar}: cannot tell: no mean time ({figures})"
    met = auto.kept_percent >= LEAST_KEPT and max(known) <= MOST_TIME
    return f"{bar}: {'met' if met else 'NOT MET'} ({figures})"


def still_verdict(still: Row, best: Row) -> str:
    """How much of the gain is learned, and so at stake where fewer frames are learned from."""
    learned = f"learning adds {points(best.score - still.score)} points to that of γ = 0"
    if still.kept_percent is None:
        return learned
    text = f"{learned}, which keeps {still.kept_percent:.1f} % of the gain without any"
    if still.kept_percent >= LEAST_KEPT:
        text += ": here the bar of auto's score is met without learning, and says nothing of when"
    return text


def points(difference: float) -> str:
    """With its sign, and no sign on what prints as zero.

    >>> points(-0.031), points(-0.001)
    ('-0.03', '0.00')
    """
    return f"{difference:+.2f}" if abs(difference) >= NO_GAIN else "0.00"


def warnings_of(records: Mapping[str, Record]) -> list[str]:
    """What a reader of the times must know."""
    found = []
    commits = {record["provenance"]["commit"] for record in records.values()}
    if len(commits) > 1:
        listed = ", ".join(sorted(map(str, commits)))
        found.append(f"The records are of different commits ({listed}): --again runs all anew.")
    elif str(*commits).endswith("-dirty"):
        found.append("Recorded with uncommitted changes: --again if the step changed in between.")
    if "bestta-bf16" in records and lacks_bf16():
        found.append("This CPU has no bf16 instructions: the time of bf16 says little.")
    return found


# --- the run ------------------------------------------------------------------------------


def protocol_of(asked: argparse.Namespace) -> Protocol:
    """The weather stream: over Cityscapes if its folder is named, else over the streets."""
    # Only the score and the cost are looked at here.
    changes: dict[str, Any] = {"source": None, "forgetting": False, "embeddings": False}
    if asked.data is None:
        # Small images would not run lean.
        changes.update(size=(512, 256), images=24, rounds=2)
    given = {
        "images": asked.images,
        "rounds": asked.rounds,
        "every": asked.every,
        "size": parsed_size(asked.size),
    }
    changes.update({name: value for name, value in given.items() if value is not None})
    name = "streets-continual" if asked.data is None else "weather-continual"
    return read_protocol(name, **changes)


def form_of(name: str) -> Method:
    """A method as it is compared here: learning from every image, unless that is what differs."""
    method = read_method(ALWAYS, when="auto") if name == AUTO else read_method(name)
    if name == SOURCE:
        return method
    return replace(
        method, preset="single", settings={"layers": ["backbone.layer1"], **method.settings}
    )


def recorded(protocol: Protocol, asked: argparse.Namespace) -> dict[str, Record]:
    """Run what is not recorded yet; the records there are, by method."""
    data = None if asked.data is None else str(asked.data)
    every = runs(protocol, [form_of(name) for name in METHODS], data=data)
    done = run_all(every, asked.work, jobs=asked.jobs, again=asked.again)
    found: dict[str, Record] = {}
    for name, job in zip(METHODS, done, strict=True):
        path = asked.work / f"{job.name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def summary(protocol: Protocol, records: Mapping[str, Record], table: Sequence[Row]) -> Record:
    """What goes to --out."""
    return {
        "benchmark": "cost_quality",
        "protocol": protocol.name,
        "stream": records[SOURCE]["stream"],
        "rows": [asdict(row) for row in table],
        "time_composed": f"adapted share x {ALWAYS}'s time_median + the rest x {STILL}'s",
        "verdicts": verdicts(table),
        "warnings": warnings_of(records),
        "bf16_instructions": not lacks_bf16(),
        "records": {name: record["id"] for name, record in records.items()},
        "commits": {name: record["provenance"]["commit"] for name, record in records.items()},
        "provenance": provenance(),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="folder of Cityscapes; the streets if none")
    parser.add_argument("--images", type=int, help="of each weather (streets: 24)")
    parser.add_argument("--rounds", type=int, help="through the weathers (streets: 2)")
    parser.add_argument("--every", type=int, help="only every so-many-th frame of each block")
    parser.add_argument("--size", metavar="WxH", help="of the images (512x256)")
    parser.add_argument("--work", type=Path, default=Path("runs/cost-quality"), help="the records")
    parser.add_argument("--out", type=Path, help="write the table to this JSON file")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; times suffer from more")
    parser.add_argument("--again", action="store_true", help="also what is recorded already")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        protocol = protocol_of(asked)
        records = recorded(protocol, asked)
        table = rows(records)
    except typer.Exit as stopped:
        raise SystemExit(stopped.exit_code) from None
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from None
    print(f"\n{titled(records[SOURCE])}\n{printed_table(table)}\n")
    print("\n".join([*verdicts(table), *warnings_of(records)]))
    out = asked.out or asked.work / "cost-quality.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary(protocol, records, table), indent=1, ensure_ascii=False)
    write_whole(out, f"{text}\n".encode())
    print(f"\nThe table: {out}\nNext: bestta report {asked.work} shows the same runs by weather;")
    print("      python benchmarks/cost.py measures the time of a step more closely.")
    return 0 if len(records) == len(METHODS) else 1


def titled(record: Record) -> str:
    """Which stream it was.

    >>> titled({"stream": {"set": "streets", "size": [512, 256], "frames": 192, "rounds": 2},
    ...         "protocol": "streets-continual"})
    'streets-continual: streets at 512x256, 192 frames in 2 rounds'
    """
    stream = record["stream"]
    size = "x".join(map(str, stream["size"])) if stream["size"] else "their own size"
    rounds = "1 round" if stream["rounds"] == 1 else f"{stream['rounds']} rounds"
    what = f"{stream['set']} at {size}, {stream['frames']} frames in {rounds}"
    return f"{record['protocol']}: {what}"


if __name__ == "__main__":
    raise SystemExit(main())
