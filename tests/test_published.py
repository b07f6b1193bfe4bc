"""The published tables: what was printed was copied, and what does not fit is said."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from statistics import fmean

import pytest

from bestta.data.corruptions import CORRUPTIONS
from bestta.protocols.recipes import GRADUAL, UP_AND_DOWN
from bestta.reports.published import Published, PublishedRow, names, published

module = importlib.import_module("bestta.reports.published")

WEATHER = ("fog", "night", "rain", "snow")
TABLES = (
    "ablation-losses",
    "ablation-positions",
    "acdc-continual",
    "batch-sizes",
    "cifar10c",
    "cifar10c-batch-200",
    "cityscapes-gradual",
    "correlations",
)
# Entries and mean are rounded to 0.1 each, so they may part by 0.05 + 0.05.
ROUNDING = 0.1 + 1e-9


def row(table: str, name: str) -> PublishedRow:
    found = published(table).row(name)
    assert found is not None
    return found


def with_blocks() -> list[tuple[Published, PublishedRow]]:
    tables = [published(name) for name in ("acdc-continual", "cityscapes-gradual", "cifar10c")]
    return [(table, row) for table in tables for row in table.rows]


def test_the_tables_are_those_of_the_paper_and_one_more():
    assert names() == TABLES


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_called_like_its_file_and_says_where_it_is_from(name):
    table = published(name)
    assert table.name == name
    assert ("Cho, Kim and Lee" in table.source) == (name != "cifar10c-batch-200")
    assert table.metric in ("mIoU", "error", "correlation")
    expected = {"mIoU": True, "error": False, "correlation": None}
    assert table.higher_is_better is expected[table.metric]
    assert all(isinstance(note, str) and note.endswith(".") for note in table.notes)


@pytest.mark.parametrize("name", TABLES)
def test_every_method_is_one_of_this_library_and_no_row_comes_twice(name):
    from bestta import methods

    rows = published(name).rows
    assert {row.method for row in rows} <= set(methods())
    assert len({row.row or row.method for row in rows}) == len(rows)
    assert [row.method for row in rows if row.told_of_changes] == (
        ["tent_reset"] if name == "acdc-continual" else []
    )


@pytest.mark.parametrize("name", TABLES)
def test_what_is_read_is_what_the_file_holds(name):
    """No figure is lost on the way: those of the dataclasses, counted, are those of the file."""

    def figures(value: object) -> list[float]:
        if isinstance(value, dict):
            return [number for inner in value.values() for number in figures(inner)]
        if isinstance(value, list):
            return [number for inner in value for number in figures(inner)]
        return [value] if isinstance(value, float) else []

    file = json.loads((module.PLACES[1] / f"{name}.json").read_text(encoding="utf-8"))
    read: list[float] = []
    for row in published(name).rows:
        read += [b.score for b in row.blocks]
        read += [*row.rounds.values(), *row.conditions.values(), *row.batches.values()]
        read += [v for v in (row.memory_gb, row.time_ms, row.mean) if v is not None]
    assert sorted(read) == sorted(figures(file))


# Counts from the captions: 9 methods through 4 conditions in 10 rounds; 4 through 4 corruptions
# of 9 severities; 6 through 15 corruptions; losses (a) to (l), positions (a) to (o).
@pytest.mark.parametrize(
    ("name", "rows", "blocks"),
    [
        ("acdc-continual", 9, 40),
        ("cityscapes-gradual", 4, 36),
        ("cifar10c", 6, 15),
        ("ablation-losses", 12, 0),
        ("ablation-positions", 15, 0),
        ("batch-sizes", 7, 0),
        ("correlations", 6, 0),
        ("cifar10c-batch-200", 7, 0),
    ],
)
def test_tables_are_as_long_as_printed(name, rows, blocks):
    table = published(name)
    assert len(table.rows) == rows
    assert all(len(row.blocks) == blocks for row in table.rows)


def test_blocks_are_called_as_the_protocols_call_them():
    expected = {
        "acdc-continual": [(r, name) for r in range(10) for name in WEATHER],
        "cityscapes-gradual": [(0, f"{name}-{s}") for name in GRADUAL for s in UP_AND_DOWN],
        "cifar10c": [(0, name) for name in CORRUPTIONS],
    }
    for table, row in with_blocks():
        assert [(b.round, b.name) for b in row.blocks] == expected[table.name]
        assert [b.index for b in row.blocks] == list(range(len(row.blocks)))


def test_printed_means_follow_from_the_blocks():
    for table, row in with_blocks():
        mean = fmean(b.score for b in row.blocks)
        assert row.mean == pytest.approx(mean, abs=ROUNDING), (table.name, row.label)


def test_printed_means_of_rounds_follow_from_their_blocks():
    for row in published("acdc-continual").rows:
        assert list(row.rounds) == list(range(1, 11))
        for number, printed in row.rounds.items():
            mean = fmean(b.score for b in row.blocks if b.round == number - 1)
            assert printed == pytest.approx(mean, abs=ROUNDING), (row.label, number)


def test_printed_means_of_corruptions_follow_from_their_severities():
    for row in published("cityscapes-gradual").rows:
        assert tuple(row.conditions) == GRADUAL
        for name, printed in row.conditions.items():
            mean = fmean(b.score for b in row.blocks if b.name.startswith(f"{name}-"))
            assert printed == pytest.approx(mean, abs=ROUNDING), (row.label, name)


def test_means_that_rounding_moves_to_another_digit_are_named_in_the_notes():
    """A mean of the blocks further than half a digit from the printed one is told of."""
    moved = set()
    for table, row in with_blocks():
        groups = [(row.mean, [b.score for b in row.blocks])]
        groups += [(p, [b.score for b in row.blocks if b.round == n - 1])
                   for n, p in row.rounds.items()]  # fmt: skip
        groups += [(p, [b.score for b in row.blocks if b.name.startswith(f"{n}-")])
                   for n, p in row.conditions.items()]  # fmt: skip
        for printed, scores in groups:
            assert printed is not None
            if abs(fmean(scores) - printed) > 0.05 + 1e-9:
                moved.add((table.name, row.label.lower(), str(printed)))
    assert moved  # else nothing below is looked at
    for name, label, printed in moved:
        assert any(label in n.lower() and printed in n for n in published(name).notes), printed


def test_means_over_conditions_agree_with_means_over_rounds_where_bein_is_moved():
    for row in published("ablation-positions").rows:
        assert row.mean == pytest.approx(fmean(row.conditions.values()), abs=ROUNDING), row.row


@pytest.mark.parametrize("name", ["ablation-losses", "ablation-positions"])
def test_means_of_ablations_fit_the_rounds_printed(name):
    """The six rounds in between lie between their neighbours, if scores rise or fall throughout."""
    for row in published(name).rows:
        assert list(row.rounds) == [1, 4, 7, 10]
        seen = list(row.rounds.values())
        pairs = list(pairwise(seen))
        low = (sum(seen) + 2 * sum(min(pair) for pair in pairs)) / 10
        high = (sum(seen) + 2 * sum(max(pair) for pair in pairs)) / 10
        assert row.mean is not None
        assert low - ROUNDING <= row.mean <= high + ROUNDING, row.row


def test_each_combination_of_marks_comes_once():
    for name in ("ablation-losses", "ablation-positions"):
        rows = published(name).rows
        assert len({tuple(row.marks.items()) for row in rows}) == len(rows)
        # Of 16 combinations "none" is left out; so are content, L2, and the two of them alone.
        left_out = 16 - len(rows)
        assert left_out == (4 if name == "ablation-losses" else 1)
        counts = [sum(bool(on) for on in row.marks.values()) for row in rows]
        assert counts == sorted(counts)


def test_the_ablations_full_rows_are_the_main_tables():
    main = row("acdc-continual", "bestta")
    for table, letter in (("ablation-losses", "(l)"), ("ablation-positions", "(c)")):
        again = row(table, letter)
        assert again.mean == main.mean
        assert again.rounds == {number: main.rounds[number] for number in (1, 4, 7, 10)}
    for name, printed in row("ablation-positions", "(c)").conditions.items():
        mean = fmean(b.score for b in main.blocks if b.name == name)
        assert printed == pytest.approx(mean, abs=ROUNDING)


def test_the_supplements_ablations_agree_with_the_main_papers():
    """Typed from Tables 4 (rounds 1, 4, 7, 10, mean) and 5 (mean), which print part of the rows."""
    losses = {
        "(a)": [21.2, 5.3, 4.5, 4.2, 6.7],
        "(c)": [37.1, 32.3, 30.2, 28.9, 31.8],
        "(h)": [40.1, 39.2, 37.9, 37.3, 38.6],
        "(l)": [40.8, 43.5, 43.6, 43.6, 43.2],
    }
    for letter, printed in losses.items():
        again = row("ablation-losses", letter)
        assert [*again.rounds.values(), again.mean] == printed, letter
    positions = {
        (1,): 41.7, (2,): 40.9, (3,): 43.2, (4,): 36.0,
        (1, 3): 43.0, (2, 3): 41.7, (3, 4): 41.4,
    }  # fmt: skip
    means = {
        tuple(n for n in (1, 2, 3, 4) if row.marks[f"layer{n}"]): row.mean
        for row in published("ablation-positions").rows
    }
    assert {chosen: means[chosen] for chosen in positions} == positions


# Typed from the paper's tables.
@pytest.mark.parametrize(
    ("table", "name", "index", "score"),
    [
        ("acdc-continual", "bestta", 0, 47.8),  # round 1, fog
        ("acdc-continual", "tent", 37, 8.7),  # round 10, night
        ("acdc-continual", "petal", 6, 43.8),  # round 2, rain
        ("acdc-continual", "cotta", 33, 20.1),  # round 9, night
        ("acdc-continual", "eata", 30, 39.7),  # round 8, rain
        ("acdc-continual", "ecotta", 16, 34.4),  # round 5, fog
        ("acdc-continual", "bn_stats", 23, 36.3),  # round 6, snow
        ("cityscapes-gradual", "source", 4, 57.2),  # brightness 5
        ("cityscapes-gradual", "tent", 9, 53.5),  # fog 1, going up
        ("cityscapes-gradual", "petal", 26, 6.0),  # frost 1, coming down
        ("cityscapes-gradual", "bestta", 35, 30.7),  # snow 1, coming down
        ("cifar10c", "bestta", 10, 9.1),  # brightness
        ("cifar10c", "source", 11, 49.9),  # contrast
        ("cifar10c", "petal", 0, 51.1),  # Gaussian noise
        ("cifar10c", "cotta", 13, 53.9),  # pixelate
    ],
)
def test_blocks_are_copied_right(table, name, index, score):
    assert row(table, name).score_of(index) == score


def test_other_figures_are_copied_right():
    """Typed from the paper's tables, figures' captions and text; batch 200 from its own source."""
    petal = row("acdc-continual", "petal")
    assert (petal.memory_gb, petal.time_ms, petal.mean) == (18.51, 5120, 38.5)
    bestta = row("acdc-continual", "bestta")
    assert (bestta.memory_gb, bestta.time_ms, bestta.rounds[2]) == (8.77, 291.8, 43.2)
    entropy_and_l2 = row("ablation-losses", "(e)")
    assert [name for name, on in entropy_and_l2.marks.items() if on] == ["entropy", "l2"]
    assert entropy_and_l2.rounds == {1: 13.8, 4: 5.0, 7: 5.0, 10: 5.0}
    three = row("ablation-positions", "(m)")
    assert [name for name, on in three.marks.items() if on] == ["layer1", "layer3", "layer4"]
    assert three.conditions == {"fog": 53.2, "night": 25.3, "rain": 47.3, "snow": 46.3}
    assert row("batch-sizes", "eata").batches == {1: 37.4, 2: 39.2, 4: 39.6}
    assert row("correlations", "segmentation source").bound == "= 0.18"
    assert row("correlations", "segmentation direction").bound == "> 0.5"
    assert row("correlations", "classification target").bound == "< 0.05"
    means = {row.method: row.mean for row in published("cifar10c-batch-200").rows}
    assert means == {
        "source": 43.5, "bn_stats": 20.4, "tent": 20.0, "eata": 17.9,
        "sar": 20.4, "cotta": 16.5, "rotta": 19.3,
    }  # fmt: skip
    sizes = {name: published(name).size for name in ("acdc-continual", "cityscapes-gradual")}
    assert sizes == {"acdc-continual": (1920, 1080), "cityscapes-gradual": (2048, 1024)}
    assert published("batch-sizes").size == (960, 540)


def test_the_doubtful_source_row_is_kept_and_told_of():
    assert row("cifar10c", "source").mean == 77.1
    assert any("77.1" in note and "43.5" in note for note in published("cifar10c").notes)


def test_a_block_of_a_record_finds_its_score():
    bestta = row("acdc-continual", "bestta")
    assert bestta.score_of({"name": "night", "round": 1, "index": 5, "score": 1.0}) == 26.3
    # Another order of conditions: name and round count, not the place in the stream.
    assert bestta.score_of({"name": "night", "round": 1, "index": 4}) == 26.3
    assert bestta.score_of({"name": "hail", "round": 1}) is None
    assert bestta.score_of({"name": "fog", "round": 10}) is None
    assert bestta.score_of(40) is None


def test_a_name_that_comes_twice_needs_its_index():
    bestta = row("cityscapes-gradual", "bestta")
    assert bestta.score_of({"name": "frost-2", "round": 0, "index": 19}) == 38.4
    assert bestta.score_of({"name": "frost-2", "round": 0, "index": 25}) == 30.1
    assert bestta.score_of({"name": "frost-2", "round": 0}) is None
    assert bestta.score_of({"name": "frost-5", "round": 0}) == 17.9


def test_a_method_the_paper_leaves_out_has_no_row():
    assert published("acdc-continual").row("alpha_bn") is None


def test_a_method_with_several_rows_must_be_named_by_letter():
    with pytest.raises(ValueError, match=r"12 rows of 'bestta'.*'\(a\)'"):
        published("ablation-losses").row("bestta")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("acdc", "acdc-continual"), ("ablation-loss", "ablation-losses"), ("CIFAR10C", "cifar10c")],
)
def test_an_unknown_name_is_told_the_nearest_one(name, meant):
    with pytest.raises(ValueError, match=f"called '{name}'. Did you mean '{meant}'"):
        published(name)


def test_a_path_is_no_name():
    with pytest.raises(ValueError, match="no published table"):
        published("../published/cifar10c")


def test_an_installed_package_reads_its_own_files(tmp_path, monkeypatch):
    inside = tmp_path / "bestta" / "published"
    monkeypatch.setattr(module, "PLACES", (inside, module.PLACES[1]))
    assert names() == TABLES  # no folder in the package: the repository's
    inside.mkdir(parents=True)
    text = (module.PLACES[1] / "cifar10c.json").read_text(encoding="utf-8")
    (inside / "cifar10c.json").write_text(text, encoding="utf-8")
    assert names() == ("cifar10c",)
    assert row("cifar10c", "bestta").mean == 36.1


def test_missing_files_are_missed_aloud(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PLACES", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(FileNotFoundError, match="published tables are missing"):
        names()
