"""A table as data: what it says, and which cells stand out; written as Markdown, CSV or LaTeX."""

from __future__ import annotations

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

MISSING = "–"
"""What stands where there is no figure."""

YES, NO = "✓", "✗"


@dataclass(frozen=True)
class Column:
    """A column, and how its cells compare.

    Attributes:
        title: What stands above it.
        group: What stands above several columns next to each other, such as "Round 1".
        higher_is_better: Which way is up; None if its cells are not compared.
        published: Whether it holds figures from a paper, not measured here.
        spare: How easily it is spared where there is little room. Those with 0 stay; the others are
            let in from the smallest number up, all of one number or none.
    """

    title: str
    group: str = ""
    higher_is_better: bool | None = None
    published: bool = False
    spare: int = 0

    @property
    def heading(self) -> str:
        """Group and title in one."""
        return f"{self.group} {self.title}".strip()


@dataclass(frozen=True)
class Cell:
    """What stands in one place.

    Attributes:
        text: As it is shown, without marks.
        value: What it sorts by; None for words and for what is missing.
        rank: 1 for the best of its column, 2 for the second best, 0 for the others.
        spread: The sample standard deviation that the text names, over seeds; None without one.
    """

    text: str
    value: float | None = None
    rank: int = 0
    spread: float | None = None


@dataclass(frozen=True)
class Row:
    """One method, or one variant of it.

    Attributes:
        label: What it is called.
        cells: One a column.
        starred: Whether it was told of domain changes, which the others were not.
        highlighted: Whether it is the project's own.
    """

    label: str
    cells: tuple[Cell, ...]
    starred: bool = False
    highlighted: bool = False


@dataclass(frozen=True)
class Table:
    """Rows and columns with a title, and the notes a reader needs."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    first: str = "Method"

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"row {row.label!r} of table {self.name!r} has {len(row.cells)} cells; "
                    f"it needs {len(self.columns)}, one a column"
                )

    def markdown(self) -> str:
        """As GitHub shows it: best in bold, second best underlined, notes in a list below."""
        head = [self.first, *(column.heading for column in self.columns)]
        lines = [
            f"**{_markdown(self.title)}**",
            "",
            _piped(map(_markdown, head)),
            _piped([":---", *("---:" for _ in self.columns)]),
        ]
        for row in self.rows:
            label = _markdown(row.label) + r"\*" * row.starred
            lines.append(_piped([label, *map(_markdown_cell, row.cells)]))
        if self.notes:
            lines += ["", *(f"- {_markdown(note)}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Plain figures in full precision under one row of headings; what is missing is empty.

        A column whose figures have a spread is followed by one that holds it.
        """
        spreads = [
            any(row.cells[n].spread is not None for row in self.rows)
            for n in range(len(self.columns))
        ]
        head = [self.first]
        for column, spread in zip(self.columns, spreads, strict=True):
            head += [column.heading, f"{column.heading} spread"][: 1 + spread]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(head)
        for row in self.rows:
            line = [row.label]
            for cell, spread in zip(row.cells, spreads, strict=True):
                line += [_plain(cell), _number(cell.spread)][: 1 + spread]
            writer.writerow(line)
        return text.getvalue()

    def latex(self) -> str:
        r"""A ``tabular`` with booktabs' rules, to be put into a ``table`` of the reader's own.

        Title and notes come before it as comments. It needs the packages booktabs and amssymb.
        """
        comments = [self.title, "needs \\usepackage{booktabs,amssymb}", *self.notes]
        lines = [f"% {' '.join(comment.split())}" for comment in comments]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}", r"\toprule"]
        if any(column.group for column in self.columns):
            lines += self._latex_groups()
        head = [_latex(self.first)]
        head += [
            rf"\textit{{{_latex(c.title)}}}" if c.published else _latex(c.title)
            for c in self.columns
        ]
        lines += [_ampersands(head), r"\midrule"]
        for n, row in enumerate(self.rows):
            if n and row.highlighted and not self.rows[n - 1].highlighted:
                lines.append(r"\midrule")
            label = _latex(row.label) + "$^*$" * row.starred
            # Braces, for "[" and "*" at the beginning of a line belong to the "\\\\" before it.
            label = f"{{{label}}}" if label.startswith(("[", "*")) else label
            lines.append(_ampersands([label, *map(_latex_cell, row.cells)]))
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def _latex_groups(self) -> list[str]:
        """The row of groups, and the rules below them."""
        cells, rules, at = [""], [], 2
        for group, members in groupby(self.columns, key=lambda column: column.group):
            count = len(list(members))
            if group:
                cells.append(rf"\multicolumn{{{count}}}{{c}}{{{_latex(group)}}}")
                rules.append(rf"\cmidrule(lr){{{at}-{at + count - 1}}}")
            else:
                cells += [""] * count
            at += count
        return [_ampersands(cells), " ".join(rules)]


def shown(value: float | None, digits: int = 1, spread: float | None = None) -> Cell:
    """A figure with ``digits`` decimals and thousands apart, its spread beside it.

    >>> shown(45.26, spread=0.4).text
    '45.3 ± 0.4'
    >>> shown(None).text
    '–'
    """
    if value is None:
        return Cell(MISSING)
    text = _fixed(value, digits)
    if spread is not None:
        text += f" ± {spread:.{digits}f}"
    return Cell(text, value, spread=spread)


def signed(value: float | None, digits: int = 1) -> Cell:
    """A difference: with its sign, and none before what is shown as zero.

    >>> signed(1.25).text, signed(-3.0).text, signed(-0.01).text
    ('+1.2', '−3.0', '0.0')
    """
    if value is None:
        return Cell(MISSING)
    text = _fixed(value, digits)
    return Cell(text if text[0] == "−" or not float(text.replace(",", "")) else f"+{text}", value)


def mark(value: bool | float | str | None) -> Cell:
    """A setting of an experiment: ✓ or ✗, a number, or a word."""
    if value is None:
        return Cell(MISSING)
    if isinstance(value, bool):
        return Cell(YES if value else NO, int(value))
    if isinstance(value, int | float):
        return Cell(f"{value:g}".replace("-", "−"), value)
    return Cell(str(value))


def ranked(table: Table) -> Table:
    """The table with the best and second best of each compared column marked.

    Figures compare as they are *shown*: two that read the same share a rank, and what is next to
    them has the next. What is missing has none, and neither has a figure without a rival; of two
    only the best is marked.
    """
    ranks: list[dict[float, int]] = []
    for n, column in enumerate(table.columns):
        figures = [f for row in table.rows if (f := _as_shown(row.cells[n])) is not None]
        if column.higher_is_better is None or len(figures) < 2:
            ranks.append({})
            continue
        order = sorted(set(figures), reverse=column.higher_is_better)
        # Of two the other one needs no mark.
        marked = order[: 2 if len(figures) > 2 else 1]
        ranks.append({figure: place for place, figure in enumerate(marked, start=1)})
    rows = []
    for row in table.rows:
        cells = [
            replace(cell, rank=ranks[n].get(figure, 0))
            if (figure := _as_shown(cell)) is not None
            else cell
            for n, cell in enumerate(row.cells)
        ]
        rows.append(replace(row, cells=tuple(cells)))
    return replace(table, rows=tuple(rows))


def terminal(table: Table, width: int = 100) -> str:
    """The table as plain text of at most ``width`` columns: best ¹, second best ².

    Where it is too wide, columns that can be spared are left out and named below it; if that is not
    enough, the rest comes in several pieces under one another.
    """
    if width < 40:
        raise ValueError(f"a table needs 40 columns or more, got width={width}")
    labels = _labels(table, width)
    kept: list[int] = []
    for level in sorted({column.spare for column in table.columns}):
        added = [n for n, column in enumerate(table.columns) if column.spare == level]
        if level == 0 or _wide(table, labels, [*kept, *added]) <= width:
            kept = sorted([*kept, *added])
    lines = textwrap.wrap(table.title, width)
    for piece in _pieces(table, labels, kept, width):
        lines += ["", *_block(table, labels, piece)]
    notes = []
    ranks = {cell.rank for row in table.rows for n, cell in enumerate(row.cells) if n in kept}
    if ranks - {0}:
        notes.append("¹ best, ² second best" if 2 in ranks else "¹ best")
    if left_out := [c.heading for n, c in enumerate(table.columns) if n not in kept]:
        notes.append(
            f"Not shown for want of room: {', '.join(left_out)}. `bestta report` has them."
        )
    lines.append("")
    for note in (*notes, *table.notes):
        lines += textwrap.wrap(note, width, subsequent_indent="  ")
    return "\n".join(lines).rstrip() + "\n"


# --- figures --------------------------------------------------------------------------------


def _fixed(value: float, digits: int) -> str:
    """With so many decimals; no minus before a zero."""
    text = f"{value:,.{digits}f}"
    if not float(text.replace(",", "")):
        text = text.lstrip("-")
    return text.replace("-", "−")


def _as_shown(cell: Cell) -> float | None:
    """The figure that its reader sees: the text, not the value behind it."""
    if cell.value is None:
        return None
    number = cell.text.split(" ")[0].replace(",", "").replace("−", "-")
    try:
        return float(number)
    except ValueError:
        return cell.value


def _plain(cell: Cell) -> str:
    if cell.value is not None:
        return _number(cell.value)
    return "" if cell.text == MISSING else cell.text


def _number(value: float | None) -> str:
    """All digits that a number has; counts without a point."""
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(value)


# --- Markdown -------------------------------------------------------------------------------


def _markdown(text: str) -> str:
    """``text`` with what Markdown would read as its own signs made plain."""
    return re.sub(r"([\\`*_|<\[\]~#])", r"\\\1", re.sub(r"[^\S\u00a0]+", " ", text).strip())


def _markdown_cell(cell: Cell) -> str:
    text = _markdown(cell.text)
    return {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(cell.rank, text)


def _piped(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- LaTeX ----------------------------------------------------------------------------------

_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "{}$&#_%"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    '"': "''",
    MISSING: "--",
    "—": "---",
    "…": r"\dots{}",
    YES: r"\checkmark{}",
    NO: r"$\times$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "−": r"$-$",
    "→": r"$\rightarrow$",
    "↓": r"$\downarrow$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "∞": r"$\infty$",
    "²": "$^2$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "ρ": r"$\rho$",
    "σ": r"$\sigma$",
    "\N{NO-BREAK SPACE}": "~",
}


def _latex(text: str) -> str:
    """``text`` as LaTeX sets it; signs it has no letter for by default are named."""
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split(" ")))


def _latex_cell(cell: Cell) -> str:
    text = _latex(cell.text)
    return {1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}.get(cell.rank, text)


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


# --- plain text -----------------------------------------------------------------------------

GAP = 2
"""Spaces between two columns of plain text."""


def _labels(table: Table, width: int) -> list[str]:
    """The first column, heading first, none wider than two fifths of the whole."""
    labels = [table.first, *(row.label + "*" * row.starred for row in table.rows)]
    return [_cut(label, width * 2 // 5) for label in labels]


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    while _width(text) > width - 1:
        text = text[:-1]
    return text.rstrip() + "…"


def _width(text: str) -> int:
    """How many columns of a terminal ``text`` takes."""
    return sum(
        0 if unicodedata.combining(sign) else 1 + (unicodedata.east_asian_width(sign) in "WF")
        for sign in text
    )


def _column(table: Table, n: int) -> list[str]:
    """The cells of column ``n`` with their marks."""
    ranks = [row.cells[n].rank for row in table.rows]
    marks = ("", "¹", "²") if not any(ranks) else (" ", "¹", "²")
    return [row.cells[n].text + marks[rank] for row, rank in zip(table.rows, ranks, strict=True)]


def _heading(table: Table, n: int) -> list[str]:
    """The words above a column, in as many lines as keep it about as slim as its cells."""
    words = table.columns[n].heading
    width = max(8, *map(_width, _column(table, n)), *map(_width, words.split() or [""]))
    return textwrap.wrap(words, width, break_long_words=False) or [""]


def _column_width(table: Table, n: int) -> int:
    return max(map(_width, (*_heading(table, n), *_column(table, n))))


def _wide(table: Table, labels: list[str], kept: list[int]) -> int:
    return max(map(_width, labels)) + sum(GAP + _column_width(table, n) for n in kept)


def _pieces(table: Table, labels: list[str], kept: list[int], width: int) -> list[list[int]]:
    """The columns in groups that fit, as few as it takes."""
    pieces: list[list[int]] = [[]]
    for n in kept:
        if pieces[-1] and _wide(table, labels, [*pieces[-1], n]) > width:
            pieces.append([])
        pieces[-1].append(n)
    return pieces


def _block(table: Table, labels: list[str], columns: list[int]) -> list[str]:
    """The lines of one piece: headings, a rule, rows."""
    headings = {n: _heading(table, n) for n in columns}
    height = max((len(lines) for lines in headings.values()), default=1)
    first = max(map(_width, labels))
    widths = {n: _column_width(table, n) for n in columns}
    bodies = {n: _column(table, n) for n in columns}

    def line(label: str, cells: Iterable[tuple[int, str]]) -> str:
        text = label + " " * (first - _width(label))
        for n, cell in cells:
            text += " " * (GAP + widths[n] - _width(cell)) + cell
        return text.rstrip()

    lines = []
    for level in range(height):
        # Headings stand on the rule, however many lines they have.
        words = [(n, ([""] * (height - len(headings[n])) + headings[n])[level]) for n in columns]
        lines.append(line(labels[0] if level == height - 1 else "", words))
    lines.append("-" * (first + sum(GAP + widths[n] for n in columns)))
    for number, label in enumerate(labels[1:]):
        lines.append(line(label, [(n, bodies[n][number]) for n in columns]))
    return lines
