"""The README's table, from the records it tells of.

    make readme

Reads the records in results/measured/demo, which `bestta demo` wrote, and puts their table between
two marks in README.md. The table in the README is thus what was measured, and a test checks it.
"""

from __future__ import annotations

from pathlib import Path

from bestta.reports import groups, read_records, summary

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "measured" / "demo"
BEGIN, END = "<!-- the demo's table: make readme -->", "<!-- end of the table -->"


def table() -> str:
    """The demo's table in Markdown."""
    (group,) = groups(read_records([RECORDS]))
    return summary(group).markdown()


def renewed(readme: str) -> str:
    """The README with the table as the records have it."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"README.md has no place for the table: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table().strip()}\n{END}{after}"


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"README.md holds the table of {RECORDS.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
