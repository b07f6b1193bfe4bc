"""Write the figures of docs/cost.md from the records they come from.

python benchmarks/cost_table.py results/measured/cost.json results/measured/cost_quality.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cost.md"
RECORDS = tuple(ROOT / "results" / "measured" / f"{n}.json" for n in ("cost", "cost_quality"))
START, END = "<!-- figures -->", "<!-- end of the figures -->"


def figures(cost: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    """The tables, the plot and where they come from, as Markdown."""
    parts = [
        "![Time and memory of a step of every method, and how they grow](cost.svg)",
        "",
        "Multiples of the plain forward of the same network, time / memory; the paper's own "
        "beside, measured on a GPU at 1920x1080.",
        "",
        *cost_table(cost),
        "",
        f"`make bench-cost`: one thread, {about(cost)} ([record](../results/measured/cost.json)). "
        "The time of `auto` is that of a settled frame, its memory that of its first, learning "
        "ones. CoTTA and PETAL were timed once. A lean step does not apply at 32x32, see below.",
        "",
        *verdicts(cost),
        "",
        "What the cheap forms do to the score:",
        "",
        *quality_table(quality),
        "",
        f"`python benchmarks/cost_quality.py --data CITYSCAPES`: {stream(quality)}, "
        f"{about(quality)} ([record](../results/measured/cost_quality.json)). Time is over the "
        "plain forward, the mean of sampled calls.",
        "",
        *(f"- {line}" for line in quality["verdicts"]),
    ]
    return "\n".join(parts)


def cost_table(cost: Mapping[str, Any]) -> list[str]:
    """One row per contender, one column per network and image size."""
    subjects = [s for s in cost["subjects"].values() if s["subject"] != "growth"]
    names = list(dict.fromkeys(row["contender"] for s in subjects for row in s["rows"]))
    found = [{row["contender"]: row for row in s["rows"]} for s in subjects]
    titles = [s["title"].partition(" (")[0].replace("DeepLabV3+-", "") for s in subjects]
    lines = [
        f"| | {' | '.join(titles)} | paper |",
        f"| :--- |{' ---: |' * len(titles)} ---: |",
    ]
    for name in names:
        rows = [own.get(name) or own.get(in_wrn(name)) for own in found]
        if not any(own.get(name) for own in found[:-1]) and name.count("block"):
            continue  # the same place, by another network's name
        paper = next((row for row in rows if row and row["paper_time_ratio"] is not None), None)
        beside = (
            "" if paper is None else ratios(paper["paper_time_ratio"], paper["paper_memory_ratio"])
        )
        cells = [ratios(r["time_ratio"], r["memory_ratio"]) if r else "–" for r in rows]
        lines.append(f"| {name} | {' | '.join(cells)} | {beside} |")
    return lines


def in_wrn(name: str) -> str:
    """What a contender is called where stages are blocks."""
    return name.replace("layer", "block")


def ratios(time: float, memory: float | None) -> str:
    """Time and memory of a step.

    >>> ratios(1.234, 36.7)
    '1.23 / 36.7'
    """
    return f"{figure(time)} / {'–' if memory is None else figure(memory)}"


def figure(ratio: float) -> str:
    """Three digits are all that such a ratio is good for."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def verdicts(cost: Mapping[str, Any]) -> list[str]:
    """What was asked for, and whether it was met."""
    return [
        f"- {'Met' if v['met'] else '**Not met**'}: {v['subject']}: {v['bar']}: {v['figure']}"
        for v in cost["verdicts"]
        if not v["subject"].startswith("WRN")
    ]


def quality_table(quality: Mapping[str, Any]) -> list[str]:
    """Score, kept gain, adapted frames, time and memory of each form."""
    lines = [
        "| | mIoU | of the gain | adapted frames | time | MB over the model |",
        "| :--- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in quality["rows"]:
        kept = "–" if row["kept_percent"] is None else f"{row['kept_percent']:.1f} %"
        mean = "–" if row["time_mean"] is None else figure(row["time_mean"])
        memory = row["over_model_bytes"]
        megabytes = "–" if memory is None else f"{memory / 1e6:.0f}"
        lines.append(
            f"| {row['method']} | {row['score']:.2f} | {kept} | {100 * row['adapted_share']:.0f} % "
            f"| {mean} | {megabytes} |"
        )
    return lines


def stream(quality: Mapping[str, Any]) -> str:
    """What was driven through."""
    one = quality["stream"]
    size = "x".join(map(str, one["size"])) if one["size"] else "as they are"
    names = ", ".join(one["conditions"])
    return f"model {one['model']}, {one['frames']} frames of {size} in {names}"


def about(record: Mapping[str, Any]) -> str:
    """Where and when a record was made."""
    came = record["provenance"]
    machine = came["machine"]
    cpu = machine.get("cpu") or machine["processor"]
    commit = record.get("code", {}).get("commit") or came["commit"]
    return f"{cpu}, {machine['cores']} cores shared with others, commit {commit}"


def written(page: str, inside: str) -> str:
    """The page with other figures in it."""
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    return f"{head}{START}\n{inside}\n{END}{tail}"


def renewed(page: str) -> str:
    """The page with the figures as the records have them."""
    cost, quality = (json.loads(path.read_text(encoding="utf-8")) for path in RECORDS)
    return written(page, figures(cost, quality))


def main() -> None:
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} holds the figures of {RECORDS[0].parent.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
