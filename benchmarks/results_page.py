"""Write docs/results.md and its figures from the records of the paper's tables, and their summary.

    make readme

Each section below names a folder of results/measured that `benchmarks/keep_records.py` filled, the
commands that fill it anew, and what is to be known of it. A section without records is left out, so
the page shows what was measured and nothing else. What stands outside the two marks is written by
hand. The README gets one table of the means.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import unescape
from itertools import pairwise
from pathlib import Path

from bestta.benchmark.config import read_study
from bestta.files import write_whole
from bestta.reports import groups, read_records
from bestta.reports.figures import Figure, Shown, styles
from bestta.reports.figures_inside import correlation_plots, embeddings
from bestta.reports.figures_scores import bubbles, forgetting, over_time, study
from bestta.reports.records import Entry, Group, place
from bestta.reports.svg import Canvas
from bestta.reports.table import Table
from bestta.reports.tables import tables as every_table
from bestta.reports.tables import tables_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
MEASURED = ROOT / "results" / "measured"
README = ROOT / "README.md"
BEGIN, END = "<!-- the tables: make readme -->", "<!-- end of the tables -->"
OURS = "bestta+"

Draw = Callable[[Sequence[Shown]], Figure | None]
OVER_A_STREAM: tuple[Draw, ...] = (over_time, bubbles, forgetting)


@dataclass(frozen=True)
class Section:
    """A table of the paper, or a study of our own."""

    folder: str
    heading: str
    about: str
    commands: tuple[str, ...]
    tables: tuple[str, ...] = ()
    """Which tables of the group are shown, by the end of their titles; the first always is."""
    figures: tuple[Draw, ...] = ()
    bars: bool = False
    """Whether it is one of the tables in which ours is to lead."""
    as_listed: bool = False
    """Whether rows come in the order of the study, and not in that of the paper's tables."""


WEATHER = "bestta bench weather-continual --data CITYSCAPES --precision bf16"
GRADUAL = "bestta bench cityscapes-gradual --data CITYSCAPES --size 512x256 --precision bf16"
CIFAR = "bestta bench cifar10c-rendered --data CIFAR-10 --precision bf16"
EVERY_8TH = (
    "CoTTA and PETAL take seconds an image. They and EcoTTA run in their lean form on every 8th "
    "frame of each block, and all others are scored on just those frames as well, so that like is "
    'compared with like. Three looks: `looks="all"`, not the usual form.'
)
DRAWING = "--study methods-costly --only CoTTA --only PETAL --seeds 3"
"""Those that draw random numbers."""
GAIN = "gain over the source model, measured and published"
SHORTENED = "Over table 2's stream, shortened to two rounds."

SECTIONS = (
    Section(
        "gradual",
        "Table 1: corruptions that swell and fade over Cityscapes",
        "Brightness, fog, frost and snow in turn, each at severities 1 2 3 4 5 4 3 2 1, over the "
        "233 val images at hand, at 512x256.",
        (f"{GRADUAL} --study methods --jobs 2",),
        ("every severity", GAIN, "time and memory"),
        OVER_A_STREAM,
        bars=True,
    ),
    Section(
        "gradual-costly",
        "Table 1 with the costly methods, every 8th frame",
        EVERY_8TH,
        (f"{GRADUAL} --study methods-costly --jobs 2", f"{GRADUAL} {DRAWING} --jobs 2"),
        ("time and memory",),
        (bubbles,),
        bars=True,
    ),
    Section(
        "weather",
        "Table 2: fog, night, rain and snow over Cityscapes, ten rounds",
        "The weather is our own simulation ([data.md](data.md)), not ACDC, which the paper drives "
        "through, and the model is a small one: levels do not compare with the paper's.",
        (f"{WEATHER} --study methods --jobs 2",),
        ("round by round", GAIN, "what is forgotten of the source", "time and memory"),
        OVER_A_STREAM,
        bars=True,
    ),
    Section(
        "weather-costly",
        "Table 2 with the costly methods, every 8th frame, three rounds",
        EVERY_8TH,
        (
            f"{WEATHER} --rounds 3 --study methods-costly --jobs 2",
            f"{WEATHER} --rounds 3 {DRAWING} --jobs 2",
        ),
        ("what is forgotten of the source", "time and memory"),
        (bubbles,),
        bars=True,
    ),
    Section(
        "mixed",
        "Table 2, another weather with every frame",
        "The same images in the same weathers, in random order; three orders.",
        (
            "bestta bench weather-mixed --data CITYSCAPES --precision bf16 --rounds 1 --seeds 3 "
            "--study methods --jobs 2",
        ),
    ),
    Section(
        "cifar10",
        "Table 3: 15 corruptions of CIFAR-10, one image at a time",
        "Rendered from the clean test images by the constants of CIFAR-10-C, severity 5, 10,000 "
        "images each.",
        (f"{CIFAR} --study methods-classification --jobs 2",),
        (GAIN, "time and memory"),
        (over_time, bubbles),
        bars=True,
    ),
    Section(
        "cifar10-costly",
        "Table 3 with the costly methods, every 8th image",
        "MEMO looks at 32 altered copies of each image, CoTTA and PETAL at those of each that the "
        "source model is unsure of. They and EcoTTA run on every 8th image of each corruption, and "
        "all others are scored on just those images as well. MEMO begins anew with each image, so "
        "that one run of it draws as often as several would: it has one seed.",
        (
            f"{CIFAR} --study methods-costly-classification --jobs 2",
            f"{CIFAR} --study methods-costly-classification --only CoTTA --only PETAL --only RoTTA "
            "--seeds 3 --jobs 2",
        ),
        ("time and memory",),
        (bubbles,),
    ),
    Section(
        "parts",
        "What the parts of bestta+ are worth",
        SHORTENED,
        (f"{WEATHER} --rounds 2 --study parts --jobs 2",),
        ("time and memory",),
        (study,),
        as_listed=True,
    ),
    Section(
        "rho",
        "How far to the source's style: ρ",
        f"{SHORTENED} bestta+ without its guard.",
        (f"{WEATHER} --rounds 2 --study rho --jobs 2",),
        (),
        (study,),
    ),
    Section(
        "losses",
        "The paper's ablation of losses",
        f"{SHORTENED} One layer, each image by its own statistics, no guard; relative γ.",
        (f"{WEATHER} --rounds 2 --study losses --jobs 2",),
        (),
        (study,),
    ),
    Section(
        "positions",
        "The paper's ablation of positions",
        f"{SHORTENED} Each image by its own statistics, no guard; relative γ.",
        (f"{WEATHER} --rounds 2 --study positions --jobs 2",),
        (),
        (study,),
    ),
    Section(
        "batch-sizes",
        "The paper's ablation of batch sizes",
        f"{SHORTENED} Every 8th frame of it, for CoTTA and PETAL are among them.",
        (f"{WEATHER} --rounds 2 --every 8 --study batch-sizes --jobs 2",),
    ),
    Section(
        "paper-form",
        "Why the paper's form gains what it gains",
        "One thing put otherwise at a time, over five rounds of images that no table reports: "
        "training images that the model was not trained on, in weather of severity 2. Behind "
        "`layer3` unless it says otherwise.",
        (
            "bestta bench tuning-weather --data CITYSCAPES --precision bf16 --rounds 5 "
            "--study paper-form --jobs 2",
        ),
        (),
        (study,),
        as_listed=True,
    ),
    Section(
        "paper-form-cifar10",
        "Why the paper's form collapses in classification",
        "Likewise, over 1,000 training images of each extra corruption, behind `conv1`.",
        (
            "bestta bench tuning-cifar10 --data CIFAR-10 --precision bf16 "
            "--study paper-form-classification --jobs 2",
        ),
        (),
        (study,),
        as_listed=True,
    ),
    Section(
        "correlation",
        "What goes with a good prediction (the paper's Figure 3)",
        "Through α-BN with N = 8, as in the paper, over one round of the weather: each frame's own "
        "mIoU against the similarities that BESTTA's losses are about, and against the entropy.",
        (f"{WEATHER} --study correlation",),
        ("what goes with the score",),
        (correlation_plots,),
    ),
    Section(
        "correlation-cifar10",
        "The same in classification",
        "Over 500 images of each corruption.",
        (f"{CIFAR} --images 500 --study correlation",),
        ("what goes with the score",),
        (correlation_plots,),
    ),
    Section(
        "embeddings",
        "Where the features lie (the paper's Figure 4)",
        "At `backbone.layer4`, over every 8th frame of one round of the weather; TENT and CoTTA "
        "with their published settings. The picture is of bestta+: a row a condition, with the "
        "distance before and after, and six channels. Grey ground: source images; dashed: images "
        "in the weather as they are; solid: adapted.",
        (f"{WEATHER} --every 8 --study embeddings",),
        ("distance of the embeddings",),
        (embeddings,),
    ),
)

TUNING = (
    ("Segmentation", ("tuning/weather", "tuning/corruptions")),
    ("Segmentation, blocks of 75 images", ("tuning/weather-blocks",)),
    ("Segmentation, ten rounds of weather", ("tuning/weather-long",)),
    (
        "Segmentation, costly methods, every 4th frame",
        ("tuning/weather-costly", "tuning/corruptions-costly"),
    ),
    ("Classification", ("tuning/cifar10",)),
    ("Classification, 5,000 images of each corruption", ("tuning/cifar10-long",)),
    ("Classification, costly methods, every 8th image", ("tuning/cifar10-costly",)),
)
"""What settings were chosen by; where two speak of the same method of a task, the later one."""


def tables(measured: Path = MEASURED, figures_at: Path | None = None) -> str:
    """All that is made from records, in Markdown; figures go to ``figures_at`` if given."""
    parts: list[str] = []
    for section in SECTIONS:
        if _any(measured / section.folder):
            parts += written(section, measured / section.folder, figures_at)
    parts += tuning(measured)
    return "\n\n".join(parts)


def renewed(text: str, made: str, name: str = PAGE.name) -> str:
    """A page with other tables in it."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{name} has no place for the tables: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def written(section: Section, folder: Path, figures_at: Path | None) -> list[str]:
    """A section: the main table, the bars, more tables, figures, commands."""
    parts = [f"## {section.heading}", section.about]
    found = groups(read_records([folder]))
    if section.as_listed:
        found = [listed(group) for group in found]
    for group in found:
        first, *others = tables_of(group)
        parts.append(first.markdown().strip())
        parts += to_come(group, section.commands)
        if section.bars:
            parts += bars(group)
        for table in others:
            if table.title.endswith(section.tables):
                parts.append(short(table, group))
        if figures_at is not None:
            parts += drawn(section, group, figures_at)
    # Where groups differ in the size of batches alone, one table has them side by side.
    joint = every_table(found)[sum(len(tables_of(group)) for group in found) :]
    parts += [table.markdown().strip() for table in joint]
    parts.append("```\n" + "\n".join(section.commands) + "\n```")
    return parts


def short(table: Table, group: Group) -> str:
    """A further table of a group: without what the main one says of all of them."""
    title = table.title.removeprefix(f"{group.title}: ")
    return replace(table, title=title.capitalize(), notes=table.notes[:1]).markdown().strip()


def rows_of(group: Group) -> list[str]:
    """The labels of its study, in order."""
    return [v.label or "" for v in read_study(group.study).variants] if group.study else []


def listed(group: Group) -> Group:
    """The group with its rows in the order of its study."""
    order = rows_of(group)
    at = {label: n for n, label in enumerate(order)}
    ordered = sorted(group.entries, key=lambda entry: at.get(entry.label, len(order)))
    return replace(group, entries=tuple(ordered))


def to_come(group: Group, commands: Sequence[str] = ()) -> list[str]:
    """Which rows of the study, and which seeds of them, there are no records of yet."""
    measured = {entry.label: len(entry.seeds) for entry in group.entries}
    wanted = dict.fromkeys(filter(None, rows_of(group)), 1)
    for command in commands:
        words = shlex.split(command)
        if "--seeds" in words:
            rows = [row for at, row in pairwise(words) if at == "--only"] or list(wanted)
            wanted |= dict.fromkeys(rows, int(words[words.index("--seeds") + 1]))
    missing = [label for label in wanted if label not in measured]
    more = [
        f"{label} with {count - measured[label]} more seeds"
        for label, count in wanted.items()
        if 0 < measured.get(label, count) < count
    ]
    return [f"Still to be measured: {', '.join(missing + more)}."] if missing + more else []


def bars(group: Group) -> list[str]:
    """What ours was to reach, and whether it does."""
    by_label = {entry.label: entry for entry in group.entries}
    ours, source = by_label.get(OURS), by_label.get("Source")
    if ours is None or source is None or ours.score is None or source.score is None:
        return []
    sign = 1 if group.higher_is_better else -1
    told = [
        f"**{OURS}** {ours.score:.1f}: {sign * (ours.score - source.score):+.1f} points over the "
        "source"
    ]
    rivals = [e for e in rivals_in(group.entries) if e.score is not None]
    if rivals:
        best = max(rivals, key=lambda e: sign * (e.score or 0.0))
        lead = sign * (ours.score - (best.score or 0.0))
        told[0] += (
            f", {abs(lead):.1f} {'over' if lead > 0 else 'behind'} the best other method "
            f"({best.label}, {best.score:.1f})"
        )
    told[0] += "."
    rounds = [score for score in ours.round_scores if score is not None]
    if len(rounds) > 2:
        told.append(f"From round 2 to the last: {rounds[1]:.2f} to {rounds[-1]:.2f}.")
    kept = [float(look["score"]) for look in ours.record["source_scores"]]
    if kept:
        told.append(f"Source images: {kept[0]:.1f} before, {kept[-1]:.1f} after the last round.")
    return [" ".join(told)]


def rivals_in(entries: Sequence[Entry]) -> list[Entry]:
    """The rows that are neither ours nor the plain model's."""
    return [e for e in entries if "bestta" not in e.label and e.label != "Source"]


def drawn(section: Section, group: Group, to: Path) -> list[str]:
    """Figures of a group as files, and the lines that show them."""
    # The first of a method has its strong colour: ours, not its variants.
    ours_first = sorted(group.entries, key=lambda entry: entry.label != OURS)
    looks = styles((entry.label, entry.method) for entry in ours_first)
    shown = [Shown(entry, looks[entry.label]) for entry in group.entries]
    lines = []
    for draw in section.figures:
        figure = draw(shown)
        if figure is not None:
            name = f"results-{section.folder}-{figure.name}.svg"
            write_whole(to / name, alone(figure).encode())
            caption = figure.caption.replace(" Hover for the range of values.", "")
            lines.append(f"![{figure.heading}]({name})\n\n{caption}")
    return lines


def alone(figure: Figure) -> str:
    """The drawing of a figure as a file of its own, in the light colours of the page."""
    rows = drawings(figure)
    drawing = rows[0][0][1] if len(rows) == 1 == len(rows[0]) else together(rows, figure.heading)
    sheet = (ROOT / "src" / "bestta" / "reports" / "page.css").read_text(encoding="utf-8")
    colours = re.search(r":root \{.*?\n\}", sheet, re.DOTALL)
    assert colours is not None
    wanted = (".plot ", ".c0", ".c4", ".histogram.", ".over")
    rules = [line for line in sheet.splitlines() if line.startswith(wanted)]
    style = "\n".join([colours.group(0).replace("light dark", "light"), *rules])
    opening, rest = drawing.split(">", 1)
    opening = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{opening}><style>{style}</style>{ground}{rest}\n"


def drawings(figure: Figure) -> list[list[tuple[str, str]]]:
    """The drawings of a figure in rows, each with what stands above it.

    Of a figure that the page shows once for each method, those of the first; of one that it has
    for screen and phone, that for the screen.
    """
    body = figure.body.split("</details>")[0]
    panels = re.findall(r'<div class="panel"><h4>(.*?)</h4>(<svg .*?</svg>)', body, re.DOTALL)
    if panels:
        named = [(heading.replace(" <span", "\n<span"), svg) for heading, svg in panels]
        named = [("\n".join(map(plain, heading.split("\n"))), svg) for heading, svg in named]
        return [named[n : n + 2] for n in range(0, len(named), 2)]
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', body, re.DOTALL)
    if rows:
        return [
            [
                (plain(name) if n == 0 else "", svg)
                for n, svg in enumerate(re.findall(r"<svg .*?</svg>", cells, re.DOTALL))
            ]
            for name, cells in rows
        ]
    found = re.search(r'<svg role="img".*?</svg>', body, re.DOTALL)
    assert found is not None
    return [[("", found.group(0))]]


def together(rows: list[list[tuple[str, str]]], label: str) -> str:
    """Several drawings as one, in rows."""
    line, between = 16.0, 16.0
    above = 6 + line * max(len(heading.splitlines()) for row in rows for heading, _ in row)
    sizes = [[size_of(svg) for _, svg in row] for row in rows]
    width = max(sum(w + between for w, _ in row) for row in sizes)
    height = sum(max(h for _, h in row) + above + between for row in sizes)
    canvas = Canvas(width, height)
    top = 0.0
    for row, row_sizes in zip(rows, sizes, strict=True):
        left = 0.0
        for (heading, svg), (wide, _) in zip(row, row_sizes, strict=True):
            for n, words in enumerate(heading.splitlines()):
                canvas.text(left + 4, top + 15 + line * n, words, "tick" if n else "name")
            canvas.parts.append(svg.replace("<svg ", f'<svg x="{left:g}" y="{top + above:g}" ', 1))
            left += wide + between
        top += max(h for _, h in row_sizes) + above + between
    return canvas.finish(label)


def size_of(svg: str) -> tuple[float, float]:
    """Width and height of a drawing."""
    width, height = (
        float(re.findall(rf' {name}="([\d.]+)"', svg)[0]) for name in ("width", "height")
    )
    return width, height


def plain(html: str) -> str:
    """The words of some HTML."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def tuning(measured: Path) -> list[str]:
    """What each setting did on images that no table reports, best of each method in bold."""
    parts: list[str] = []
    decided: set[tuple[str, str]] = set()
    for heading, folders in reversed(TUNING):
        task = heading.partition(",")[0]
        places = [measured / folder for folder in folders]
        if not all(map(_any, places)):
            continue
        found = [groups(read_records([place])) for place in places]
        columns = [{e.label: e for group in some for e in group.entries} for some in found]
        labels = sorted(label for label in columns[0] if all(label in c for c in columns))
        if not labels:
            continue
        higher = columns[0][labels[0]].record["higher_is_better"]
        best: dict[str, float] = {}
        mean = {label: mean_of([column[label] for column in columns]) for label in labels}
        for label in labels:
            name, one = label.partition(" (")[0], mean[label]
            # What has one setting here stands there to be compared with, as ours and the plain one.
            settings = sum(other.partition(" (")[0] == name for other in labels)
            if name not in (OURS, "Source") and settings > 1 and (task, name) not in decided:
                best[name] = (max if higher else min)(best.get(name, one), one)
        decided |= {(task, name) for name in best}
        heads = [place.name for place in places] + (["mean"] if len(places) > 1 else [])
        lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
        for label in labels:
            cells = [f"{score_of(column[label]):.1f}" for column in columns]
            if len(places) > 1:
                cells.append(f"{mean[label]:.1f}")
            if mean[label] == best.get(label.partition(" (")[0]):
                cells[-1] = f"**{cells[-1]}**"
            lines.append(f"| {label} | {' | '.join(cells)} |")
        parts = [f"### {heading}", "\n".join(lines), *to_come(found[0][0]), *parts]
    if not parts:
        return []
    about = (
        "For every method the setting in bold is the one in the tables. The images are training "
        "images that the model was not trained on; weather of severity 2 and the four corruptions "
        "that no table reports. How long to remember is chosen in longer blocks, and how large a "
        "step on every image may be over more rounds, or in longer blocks if the method is reset "
        "after each: nearer to the tables' in length."
    )
    commands = (
        "```\nbestta bench tuning-weather --data CITYSCAPES --study settings --precision bf16\n"
        "bestta bench tuning-corruptions --data CITYSCAPES --study settings --precision bf16\n"
        "bestta bench tuning-weather --data CITYSCAPES --study settings-long --precision bf16\n"
        "bestta bench tuning-weather --data CITYSCAPES --study settings-blocks --precision bf16\n"
        "bestta bench tuning-weather --data CITYSCAPES --study settings-costly --precision bf16\n"
        "bestta bench tuning-corruptions --data CITYSCAPES --study settings-costly "
        "--precision bf16\n"
        "bestta bench tuning-cifar10 --data CIFAR-10 --study settings-classification "
        "--precision bf16\n"
        "bestta bench tuning-cifar10 --data CIFAR-10 --study settings-memory --precision bf16\n"
        "bestta bench tuning-cifar10 --data CIFAR-10 --study settings-costly-classification "
        "--precision bf16\n```"
    )
    return ["## How the settings were chosen", about, *parts, commands]


def score_of(entry: Entry) -> float:
    """The mean over all blocks."""
    return float("nan") if entry.score is None else entry.score


def mean_of(entries: list[Entry]) -> float:
    """The mean of their scores."""
    return sum(map(score_of, entries)) / len(entries)


HEADLINE = (
    ("gradual", "corruptions that swell and fade, mIoU"),
    ("weather", "ten rounds of weather, mIoU"),
    ("cifar10", "CIFAR-10-C (rendered), error"),
)
"""The tables of which the README has the means."""


def headline(measured: Path = MEASURED) -> str:
    """The mean of every method in every table of the paper that there are records of."""
    columns: dict[str, dict[str, Entry]] = {}
    higher: dict[str, bool] = {}
    for folder, words in HEADLINE:
        if not _any(measured / folder):
            continue
        (group,) = groups(read_records([measured / folder]))
        columns[words] = {e.label: e for e in group.entries if e.score is not None}
        higher[words] = group.higher_is_better
    rows = {label: entry for column in columns.values() for label, entry in column.items()}
    lines = [
        f"| one image at a time | {' | '.join(columns)} |",
        f"| :--- |{' ---: |' * len(columns)}",
    ]
    best = {
        words: (max if higher[words] else min)(score_of(e) for e in column.values())
        for words, column in columns.items()
    }
    for label in sorted(rows, key=lambda label: place(rows[label])):
        cells = []
        for words, column in columns.items():
            cell = f"{score_of(column[label]):.1f}" if label in column else "–"
            at_best = cell == f"{best[words]:.1f}" and rivals_in(list(column.values()))
            cells.append(f"**{cell}**" if at_best else cell)
        star = r"\*" if rows[label].starred else ""
        lines.append(f"| {label}{star} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _any(folder: Path) -> bool:
    return any(folder.glob("*.json"))


def main() -> None:
    """Put the tables of the records there are into the page, and their means into the README."""
    for path, made in ((PAGE, tables(figures_at=PAGE.parent)), (README, headline())):
        write_whole(path, renewed(path.read_text(encoding="utf-8"), made, path.name).encode())
        print(f"{path.name} holds the tables of {MEASURED.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
