"""Write docs/results.md and its figures from the records of the paper's tables.

    make readme

Each section below names a folder of results/measured that `benchmarks/keep_records.py` filled, the
commands that fill it anew, and what is to be known of it. A section without records is left out, so
the page shows what was measured and nothing else. What stands outside the two marks is written by
hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from bestta.files import write_whole
from bestta.reports import groups, read_records
from bestta.reports.figures import Figure, Shown, styles
from bestta.reports.figures_scores import bubbles, forgetting, over_time
from bestta.reports.records import Entry, Group
from bestta.reports.table import Table
from bestta.reports.tables import tables_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
MEASURED = ROOT / "results" / "measured"
BEGIN, END = "<!-- the tables: make readme -->", "<!-- end of the tables -->"
OURS = "bestta+"


@dataclass(frozen=True)
class Section:
    """A table of the paper, or a study of our own."""

    folder: str
    heading: str
    about: str
    commands: tuple[str, ...]
    tables: tuple[str, ...] = ()
    """Which tables of the group are shown, by the end of their titles; the first always is."""
    figures: bool = True


SECTIONS = (
    Section(
        "gradual",
        "Table 1: corruptions that swell and fade over Cityscapes",
        "Brightness, fog, frost and snow in turn, each at severities 1 2 3 4 5 4 3 2 1, over the "
        "233 val images at hand, at 512x256.",
        (
            "bestta bench cityscapes-gradual --data CITYSCAPES --size 512x256 --precision bf16 "
            "--study methods --jobs 2",
        ),
        ("severity by severity", "time and memory"),
    ),
    Section(
        "weather",
        "Table 2: fog, night, rain and snow over Cityscapes, ten rounds",
        "The weather is our own simulation ([data.md](data.md)), not ACDC, which the paper drives "
        "through, and the model is a small one: levels do not compare with the paper's.",
        (
            "bestta bench weather-continual --data CITYSCAPES --precision bf16 --study methods "
            "--jobs 2",
        ),
        ("round by round", "what is forgotten of the source", "time and memory"),
    ),
    Section(
        "mixed",
        "Table 2, another weather with every frame",
        "The same images in the same weathers, in random order; three orders.",
        (
            "bestta bench weather-mixed --data CITYSCAPES --precision bf16 --rounds 1 --seeds 3 "
            "--study methods --jobs 2",
        ),
        figures=False,
    ),
    Section(
        "cifar10",
        "Table 3: 15 corruptions of CIFAR-10, one image at a time",
        "Rendered from the clean test images by the constants of CIFAR-10-C, severity 5, 10,000 "
        "images each.",
        (
            "bestta bench cifar10c-rendered --data CIFAR-10 --precision bf16 "
            "--study methods-classification --jobs 2",
        ),
        ("time and memory",),
    ),
)

TUNING = (
    ("Segmentation", ("tuning/weather", "tuning/corruptions")),
    ("Classification", ("tuning/cifar10",)),
)


def tables(measured: Path = MEASURED, figures_at: Path | None = None) -> str:
    """All that is made from records, in Markdown; figures go to ``figures_at`` if given."""
    parts: list[str] = []
    for section in SECTIONS:
        if any((measured / section.folder).glob("*.json")):
            parts += written(section, measured / section.folder, figures_at)
    parts += tuning(measured)
    return "\n\n".join(parts)


def renewed(text: str, made: str) -> str:
    """The page with other tables in it."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE.name} has no place for the tables: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def written(section: Section, folder: Path, figures_at: Path | None) -> list[str]:
    """A section: the main table, the bars, more tables, figures, commands."""
    parts = [f"## {section.heading}", section.about]
    for group in groups(read_records([folder])):
        first, *others = tables_of(group)
        parts.append(first.markdown().strip())
        parts += bars(group)
        for table in others:
            if table.title.endswith(section.tables):
                parts.append(short(table, group))
        if section.figures and figures_at is not None:
            parts += drawn(section, group, figures_at)
    parts.append("```\n" + "\n".join(section.commands) + "\n```")
    return parts


def short(table: Table, group: Group) -> str:
    """A further table of a group: without what the main one says of all of them."""
    title = table.title.removeprefix(f"{group.title}: ")
    return replace(table, title=title.capitalize(), notes=table.notes[:1]).markdown().strip()


def bars(group: Group) -> list[str]:
    """What ours was to reach, and whether it does."""
    by_label = {entry.label: entry for entry in group.entries}
    ours, source = by_label.get(OURS), by_label.get("Source")
    if ours is None or source is None or ours.score is None or source.score is None:
        return []
    sign = 1 if group.higher_is_better else -1
    rivals = [e for e in group.entries if "bestta" not in e.label and e.score is not None]
    best = max(rivals, key=lambda e: sign * (e.score or 0.0))
    lead = sign * (ours.score - (best.score or 0.0))
    told = [
        f"**{OURS}** {ours.score:.1f}: {sign * (ours.score - source.score):+.1f} points over the "
        f"source, {lead:+.1f} over the best other method ({best.label}, {best.score:.1f})."
    ]
    rounds = [score for score in ours.round_scores if score is not None]
    if len(rounds) > 2:
        told.append(f"From round 2 to the last: {rounds[1]:.2f} to {rounds[-1]:.2f}.")
    kept = [float(look["score"]) for look in ours.record["source_scores"]]
    if kept:
        told.append(f"Source images: {kept[0]:.1f} before, {kept[-1]:.1f} after the last round.")
    return [" ".join(told)]


def drawn(section: Section, group: Group, to: Path) -> list[str]:
    """Figures of a group as files, and the lines that show them."""
    # The first of a method has its strong colour: ours, not its variants.
    ours_first = sorted(group.entries, key=lambda entry: entry.label != OURS)
    looks = styles((entry.label, entry.method) for entry in ours_first)
    shown = [Shown(entry, looks[entry.label]) for entry in group.entries]
    lines = []
    for figure in (over_time(shown), bubbles(shown), forgetting(shown)):
        if figure is not None:
            name = f"results-{section.folder}-{figure.name}.svg"
            write_whole(to / name, alone(figure).encode())
            lines.append(f"![{figure.heading}]({name})\n\n{figure.caption}")
    return lines


def alone(figure: Figure) -> str:
    """The drawing of a figure as a file of its own, in the light colours of the page."""
    found = re.search(r"<svg .*?</svg>", figure.body, re.DOTALL)
    assert found is not None
    sheet = (ROOT / "src" / "bestta" / "reports" / "page.css").read_text(encoding="utf-8")
    colours = re.search(r":root \{.*?\n\}", sheet, re.DOTALL)
    assert colours is not None
    rules = [line for line in sheet.splitlines() if line.startswith((".plot ", ".c0", ".c4"))]
    style = "\n".join([colours.group(0).replace("light dark", "light"), *rules])
    opening, rest = found.group(0).split(">", 1)
    opening = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{opening}><style>{style}</style>{ground}{rest}\n"


def tuning(measured: Path) -> list[str]:
    """What each setting did on images that no table reports, best of each method in bold."""
    parts: list[str] = []
    for task, folders in TUNING:
        places = [measured / folder for folder in folders]
        if not all(any(place.glob("*.json")) for place in places):
            continue
        columns = [
            {e.label: e for group in groups(read_records([place])) for e in group.entries}
            for place in places
        ]
        labels = sorted(label for label in columns[0] if all(label in c for c in columns))
        higher = columns[0][labels[0]].record["higher_is_better"]
        best: dict[str, float] = {}
        mean = {label: mean_of([column[label] for column in columns]) for label in labels}
        for label in labels:
            name, one = label.partition(" (")[0], mean[label]
            best[name] = (max if higher else min)(best.get(name, one), one)
        heads = [place.name for place in places] + (["mean"] if len(places) > 1 else [])
        lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
        for label in labels:
            cells = [f"{score_of(column[label]):.1f}" for column in columns]
            if len(places) > 1:
                cells.append(f"{mean[label]:.1f}")
            if mean[label] == best[label.partition(" (")[0]]:
                cells[-1] = f"**{cells[-1]}**"
            lines.append(f"| {label} | {' | '.join(cells)} |")
        parts += [f"### {task}", "\n".join(lines)]
    if not parts:
        return []
    about = (
        "For every method the setting in bold is the one in the tables. The images are training "
        "images that the model was not trained on; weather of severity 2 and the four corruptions "
        "that no table reports."
    )
    commands = (
        "```\nbestta bench tuning-weather --data CITYSCAPES --study settings --precision bf16\n"
        "bestta bench tuning-corruptions --data CITYSCAPES --study settings --precision bf16\n```"
    )
    return ["## How the settings were chosen", about, *parts, commands]


def score_of(entry: Entry) -> float:
    """The mean over all blocks."""
    return float("nan") if entry.score is None else entry.score


def mean_of(entries: list[Entry]) -> float:
    """The mean of their scores."""
    return sum(map(score_of, entries)) / len(entries)


def main() -> None:
    """Put the tables of the records there are into the page."""
    made = tables(figures_at=PAGE.parent)
    write_whole(PAGE, renewed(PAGE.read_text(encoding="utf-8"), made).encode())
    print(f"{PAGE.name} holds the tables of {MEASURED.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
