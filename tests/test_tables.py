"""Tables from records: like with like, marks by what is shown, the notes a reader needs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bestta.benchmark.config import read_method, read_study
from bestta.reports.records import Group, Loaded, groups, read_records
from bestta.reports.table import (
    Cell,
    Column,
    Row,
    Table,
    ranked,
    shown,
    signed,
    terminal,
)
from bestta.reports.tables import (
    correlation_table,
    distance_table,
    forgetting_table,
    summary,
    tables,
    tables_of,
)
from fakes import WEATHER, fake_record, older

GRADUAL = tuple(f"{name}-{n}" for name in ("fog", "snow") for n in (1, 2, 3, 2, 1))


def load(*records: dict[str, Any]) -> list[Loaded]:
    return [Loaded(Path(f"{record['id']}.json"), record) for record in records]


def group(*records: dict[str, Any]) -> Group:
    (only,) = groups(load(*records))
    return only


def scored(record: dict[str, Any], scores: list[float | None]) -> dict[str, Any]:
    """The record with these scores for its blocks, and the means that follow from them."""
    blocks = [b | {"score": s} for b, s in zip(record["blocks"], scores, strict=True)]

    def mean(chosen: list[float | None]) -> float | None:
        return None if None in chosen else sum(s for s in chosen if s is not None) / len(chosen)

    return record | {
        "blocks": blocks,
        "score": mean(scores),
        "rounds": [
            mean([b["score"] for b in blocks if b["round"] == r])
            for r in range(len(record["rounds"]))
        ],
        "conditions": {
            name: mean([b["score"] for b in blocks if b["name"] == name])
            for name in record["conditions"]
        },
    }


def simple(method: str, scores: list[float | None], **changes: Any) -> dict[str, Any]:
    """A record of one round whose blocks have these scores, and nothing published beside."""
    names = WEATHER[: len(scores)]
    made = fake_record(method, rounds=1, conditions=names, **({"published": None} | changes))
    return scored(made, scores)


def on_stream(record: dict[str, Any], **stream: Any) -> dict[str, Any]:
    return record | {"stream": record["stream"] | stream}


def titled(found: list[Table], end: str) -> Table:
    (only,) = [table for table in found if table.name.endswith(f"-{end}")]
    return only


def column(table: Table, heading: str) -> dict[str, Cell]:
    """The cells under a heading, by row."""
    (place,) = [n for n, c in enumerate(table.columns) if c.heading == heading]
    return {row.label: row.cells[place] for row in table.rows}


def texts(cells: dict[str, Cell]) -> dict[str, str]:
    return {label: cell.text for label, cell in cells.items()}


def ranks(cells: dict[str, Cell]) -> dict[str, int]:
    return {label: cell.rank for label, cell in cells.items()}


# --- reading --------------------------------------------------------------------------------


def write(folder: Path, record: dict[str, Any], name: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name or record['id']}.json"
    path.write_text(json.dumps(record))
    return path


def test_a_folder_is_searched_to_the_bottom_and_other_json_is_passed_over(tmp_path: Path):
    first = write(tmp_path, fake_record("source"))
    deep = write(tmp_path / "a" / "b", fake_record("tent"))
    (tmp_path / "other.json").write_text('{"kind": "card"}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "comments.json").write_text("// not JSON at all\n{}")
    (tmp_path / "notes.txt").write_text("bestta record")
    found = read_records([tmp_path])
    assert {loaded.path for loaded in found} == {first, deep}
    (tent,) = [loaded for loaded in found if loaded.path == deep]
    assert tent.pictures == tmp_path / "a" / "b" / f"{tent.record['id']}.pictures"


def test_a_file_that_is_named_and_lies_in_a_named_folder_counts_once(tmp_path: Path):
    path = write(tmp_path, fake_record())
    (only,) = read_records([tmp_path, path, str(path)])
    assert only.notes == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "card"}', "is not a record: it has kind 'card'"),
        ("[1]", "is not a record"),
        ("plain words", "torn or not JSON"),
        ('{"kind": "bestta record", "format": 2}', "format 2; this version of bestta reads format"),
        ('{"kind": "bestta record", "format": 1}', "missing, empty or of another type: id, proto"),
    ],
)
def test_a_named_file_that_is_no_record_is_an_error_that_names_it(
    tmp_path: Path, content: str, message: str
):
    path = tmp_path / "thing.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_records([path])
    assert str(path) in str(error.value)


@pytest.mark.parametrize("left", [500, 0])
def test_a_torn_record_in_a_folder_is_an_error_that_names_it(tmp_path: Path, left: int):
    write(tmp_path, fake_record("source"))
    path = write(tmp_path, fake_record("tent"))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_records([tmp_path])


def test_finding_nothing_says_where_it_was_looked_for(tmp_path: Path):
    with pytest.raises(ValueError, match=f"no records found.*{re.escape(str(tmp_path))}"):
        read_records([tmp_path])
    with pytest.raises(ValueError, match="no such file or folder"):
        read_records([tmp_path / "nowhere"])


def test_of_two_records_with_one_id_the_latest_is_taken_and_it_is_said(tmp_path: Path):
    # As text 09:30+02:00 sorts behind 08:00+00:00, though it is half an hour earlier.
    for folder, level, finished in (
        ("a", 50.0, "2026-01-02T08:00:00+00:00"),
        ("b", 40.0, "2026-01-02T09:30:00+02:00"),
    ):
        record = fake_record(level=level)
        write(tmp_path / folder, record | {"cost": record["cost"] | {"finished": finished}})
    (kept,) = read_records([tmp_path])
    assert kept.path.parent.name == "a"
    (made,) = groups([kept])
    assert any("2 times; the latest was taken" in note for note in tables_of(made)[0].notes)


def test_a_score_that_is_not_a_number_is_missing(tmp_path: Path):
    record = fake_record() | {"score": float("nan")}
    (loaded,) = read_records([write(tmp_path, record)])
    assert loaded.record["score"] is None


# --- like with like -------------------------------------------------------------------------


def test_records_of_different_streams_are_never_in_one_table():
    here = [fake_record("source"), fake_record("tent")]
    there = on_stream(fake_record("bestta"), key="fedcba9876543210", model="cityscapes")
    made = groups(load(here[0], there, here[1]))
    assert [[e.method for e in g.entries] for g in made] == [["source", "tent"], ["bestta"]]
    for table in tables(made):
        labels = {row.label for row in table.rows}
        assert not ("BESTTA" in labels and labels & {"SOURCE", "TENT"}), table.name
    names = [table.name for table in tables(made)]
    assert len(names) == len(set(names))


def test_groups_that_only_their_key_tells_apart_have_different_titles_and_names():
    other = on_stream(fake_record("tent"), key="fedcba9876543210")
    first, second = groups(load(fake_record("source"), other))
    assert first.title != second.title
    assert first.name != second.name


def test_every_second_frame_has_a_table_of_its_own_and_every_table_says_so():
    half = [
        on_stream(fake_record(method), key="fedcba9876543210", every=2)
        for method in ("source", "bestta")
    ]
    whole = [fake_record(method) for method in ("source", "bestta")]
    first, second = groups(load(*whole, *half))
    for table in (*tables_of(second), summary(second)):
        assert any("every 2nd frame" in note for note in table.notes), table.name
        assert "every 2nd frame" in table.markdown()
    for table in (*tables_of(first), summary(first)):
        assert "every 2nd frame" not in table.markdown()


def test_a_study_is_apart_from_the_other_records_of_its_stream():
    study = {"name": "rho", "row": None, "marks": {"rho": 0.5}}
    made = groups(load(fake_record("bestta"), fake_record("bestta", study=study)))
    assert [g.study for g in made] == [None, "rho"]


def test_rows_come_in_the_papers_order_with_bestta_last_and_highlighted():
    methods = ["bestta", "memo", "own_method", "tent", "tent_reset", "source", "alpha_bn", "cotta"]
    table = tables_of(group(*map(fake_record, methods)))[0]
    # The order is that of the paper's Table 2, its relatives added.
    assert [row.label for row in table.rows] == [
        *("SOURCE", "ALPHA_BN", "TENT_RESET", "TENT", "COTTA", "MEMO", "OWN_METHOD", "BESTTA")
    ]
    assert [row.highlighted for row in table.rows] == [False] * 7 + [True]


def test_the_usual_form_of_bestta_comes_last_and_is_highlighted_beside_the_papers():
    labels = ["bestta+", "BESTTA", "Source", "bestta+ (γ = 0)"]
    records = [
        fake_record("source" if label == "Source" else "bestta", label=label, settings={"lr": n})
        for n, label in enumerate(labels)
    ]
    rows = tables_of(group(*records))[0].rows
    assert [row.label for row in rows] == ["Source", "BESTTA", "bestta+ (γ = 0)", "bestta+"]
    assert [row.highlighted for row in rows] == [False, False, False, True]


def test_entries_of_one_label_are_told_apart_by_the_settings_that_differ():
    variants = [
        fake_record("bestta", label="BESTTA", settings={"seed": 0, "rho": 0.7, "lr": lr})
        for lr in (0.001, 0)
    ]
    labels = [entry.label for entry in group(*variants).entries]
    assert labels == ["BESTTA (lr=0.001)", "BESTTA (lr=0)"]


def prepared(images: int, **changes: Any) -> dict[str, Any]:
    method = {"method": "ecotta", "prepare": {"images": images, "batch": 8, "settings": {}}}
    return fake_record("ecotta", label="EcoTTA", config={"method": method}, **changes)


def test_what_a_method_learned_beforehand_tells_its_entries_apart():
    made = group(prepared(500), prepared(500, seed=1), prepared(100))
    assert {entry.label: entry.seeds for entry in made.entries} == {
        "EcoTTA (prepare.images=500)": [0, 1],
        "EcoTTA (prepare.images=100)": [0],
    }
    assert made.notes == ()


def test_the_same_run_under_two_ids_counts_once_and_it_is_said():
    record = fake_record("tent")
    later = {"id": "again", "cost": record["cost"] | {"finished": "2026-02-01T00:00:00+00:00"}}
    made = group(record, fake_record("tent", level=50.0, **later))
    (entry,) = made.entries
    assert [loaded.record["id"] for loaded in entry.records] == ["again"]
    assert f"{record['id']} was left out" in tables_of(made)[0].markdown()


# --- best and second best -------------------------------------------------------------------


def test_best_and_second_best_are_ranked_by_the_figures_as_shown():
    # 41.96 and 42.04 both read 42.0 and share the first place; 41.94 reads 41.9 and is second.
    figures = {"source": 41.96, "tent": 42.04, "eata": 41.94, "bestta": 30.0}
    table = tables_of(group(*(simple(m, [s, 1.0]) for m, s in figures.items())))[0]
    assert ranks(column(table, "fog")) == {"SOURCE": 1, "TENT": 1, "EATA": 2, "BESTTA": 0}
    # Everybody has 1.0 here: the best, all of them.
    assert ranks(column(table, "night")) == dict.fromkeys(("SOURCE", "TENT", "EATA", "BESTTA"), 1)


def test_of_errors_the_lowest_is_best():
    figures = {"source": 43.5, "tent": 20.1, "bestta": 18.0}
    records = [simple(m, [s], task="classification") for m, s in figures.items()]
    table = tables_of(group(*records))[0]
    assert ranks(column(table, "Mean")) == {"SOURCE": 0, "TENT": 2, "BESTTA": 1}
    assert "lower is better" in table.notes[0]


def test_thousands_are_ranked_as_numbers():
    rows = tuple(Row(str(v), (shown(v, 0),)) for v in (999.0, 1000.0, -5.0))
    table = ranked(Table("t", "t", (Column("c", higher_is_better=True),), rows))
    assert [row.cells[0].text for row in table.rows] == ["999", "1,000", "−5"]
    assert [row.cells[0].rank for row in table.rows] == [2, 1, 0]


def test_what_is_missing_is_shown_as_a_dash_and_never_best():
    # In errors a missing one taken for zero would win.
    records = [
        simple("source", [None, 40.0], task="classification"),
        simple("tent", [30.0, 20.0], task="classification"),
        simple("bestta", [50.0, 60.0], task="classification"),
    ]
    table = tables_of(group(*records))[0]
    fog, mean = column(table, "fog"), column(table, "Mean")
    assert fog["SOURCE"] == mean["SOURCE"] == Cell("–", None, 0)
    assert ranks(fog) == ranks(mean) == {"SOURCE": 0, "TENT": 1, "BESTTA": 0}
    assert next(csv.reader([table.csv().splitlines()[1]]))[4] == ""


def test_a_method_without_a_rival_is_not_called_the_best():
    table = tables_of(group(simple("bestta", [40.0, 50.0])))[0]
    assert {cell.rank for row in table.rows for cell in row.cells} == {0}


def test_published_figures_time_and_memory_are_not_ranked():
    for table in tables_of(group(*map(fake_record, ("source", "tent", "bestta")))):
        for n, which in enumerate(table.columns):
            if which.published or "(ms)" in which.title or "MB" in which.title:
                assert {row.cells[n].rank for row in table.rows} == {0}, which.heading


# --- stars and seeds ------------------------------------------------------------------------


def test_a_method_that_was_told_of_changes_is_starred_and_the_star_explained():
    made = group(fake_record("source"), fake_record("tent_reset"))
    for table in (*tables_of(made), summary(made)):
        starred = {row.label.partition(":")[0]: row.starred for row in table.rows}
        assert starred["TENT_RESET"]
        assert any(note.startswith("* was told") for note in table.notes)
    text = tables_of(made)[0]
    assert r"| TENT\_RESET\* |" in text.markdown()
    assert r"TENT\_RESET$^*$ &" in text.latex()
    assert "TENT_RESET*" in terminal(text)
    plain = group(fake_record("source"), fake_record("tent"))
    assert "was told" not in tables_of(plain)[0].markdown()


def test_seeds_are_one_row_with_mean_and_sample_deviation():
    # By hand: 40, 41, 45 have the mean 42 and the squared deviations 4 + 1 + 9 = 14, by two: 7;
    # the root of 7 is 2.6458.
    runs = [simple("bestta", [s, s + 2], seed=n) for n, s in enumerate((39.0, 40.0, 44.0))]
    made = group(*runs, simple("source", [30.0, 32.0]))
    (source, entry) = made.entries
    assert entry.score == pytest.approx(42.0)
    assert entry.spread == pytest.approx(7**0.5)
    assert source.spread is None
    assert entry.block_scores == pytest.approx([41.0, 43.0])
    table = tables_of(made)[0]
    assert texts(column(table, "Mean")) == {"SOURCE": "31.0", "BESTTA": "42.0 ± 2.6"}
    assert texts(column(table, "fog")) == {"SOURCE": "30.0", "BESTTA": "41.0"}
    assert ranks(column(table, "Mean")) == {"SOURCE": 0, "BESTTA": 1}
    (note,) = [note for note in table.notes if "eeds" in note]
    assert "0 (SOURCE); 0, 1, 2 (BESTTA)" in note
    assert "sample standard deviation" in note
    assert r"42.0 $\pm$ 2.6" in table.latex()
    (row,) = [r for r in csv.DictReader(io.StringIO(table.csv())) if r["Method"] == "BESTTA"]
    assert float(row["Mean spread"]) == pytest.approx(7**0.5)


def test_gains_are_over_the_seeds_shared_with_the_source():
    # Seed 0 alone is shared: 42 − 40, whatever seed 1 has; with none shared there is no gain.
    runs = [simple("tent", [42.0], seed=0), simple("tent", [50.0], seed=1)]
    made = group(simple("source", [40.0]), *runs, simple("bestta", [45.0], seed=1))
    gains = texts(column(summary(made), "Gain over source"))
    assert gains == {"SOURCE": "–", "TENT": "+2.0", "BESTTA": "–"}
    assert any("seeds that a row shares with the source" in note for note in summary(made).notes)


def test_the_gap_to_the_published_gain_is_over_shared_seeds():
    runs = [fake_record("source"), fake_record("bestta"), fake_record("bestta", seed=1, level=90.0)]
    gap = titled(tables_of(group(*runs)), "gap")
    alone = titled(tables_of(group(*runs[:2])), "gap")
    for heading in ("measured gain", "gain measured − published"):
        assert texts(column(gap, heading)) == texts(column(alone, heading))


def test_a_letter_is_spelt_out_where_there_are_no_marks_to_tell_it_by():
    marks = {"entropy": True, "style": True, "content": False}
    studies = [
        {"name": "losses", "row": "(a)", "marks": marks | {"style": False}},
        {"name": "losses", "row": "(c)", "marks": marks},
    ]
    made = group(*(fake_record("bestta", study=study) for study in studies))
    assert [row.label for row in summary(made).rows] == ["(a) entropy", "(c) entropy + style"]
    assert [row.label for row in tables_of(made)[0].rows] == ["(a)", "(c)"]


def test_distances_are_before_and_after_adaptation_by_condition():
    # The fake's: 1.5 everywhere before, 0.3 after.
    far = fake_record("tent")
    far["embeddings"]["distance"]["adapted"]["night"] = 0.7
    made = group(far, fake_record("bestta"))
    table = distance_table(made)
    assert table is not None
    assert table in tables_of(made)
    assert texts(column(table, "night before")) == {"TENT": "1.50", "BESTTA": "1.50"}
    assert texts(column(table, "night after")) == {"TENT": "0.70", "BESTTA": "0.30"}
    # (0.3 + 0.7 + 0.3 + 0.3) / 4
    assert texts(column(table, "Mean after")) == {"TENT": "0.40", "BESTTA": "0.30"}
    assert ranks(column(table, "Mean after")) == {"TENT": 0, "BESTTA": 1}
    assert distance_table(group(fake_record("tent", embeddings=None))) is None


def test_distances_at_another_layer_are_left_out_and_named():
    other = fake_record("tent")
    other["embeddings"]["layer"] = "backbone.layer2"
    table = distance_table(group(fake_record("source"), other, fake_record("bestta")))
    assert table is not None
    assert [row.label for row in table.rows] == ["SOURCE", "BESTTA"]
    assert any("TENT (backbone.layer2)" in note for note in table.notes)


def test_of_many_distances_a_terminal_shows_the_means_and_says_where_the_others_are():
    names = tuple(f"condition{n}" for n in range(15))
    table = distance_table(group(fake_record("tent", conditions=names, rounds=1)))
    assert table is not None
    text = terminal(table, 100)
    assert "Mean" in text.splitlines()[2]
    assert "condition3" not in "".join(text.splitlines()[:6])
    assert "condition14 after. `bestta report` has them." in " ".join(text.split())


def test_of_two_rows_none_is_called_second_best():
    two = group(simple("tent", [30.0]), simple("bestta", [40.0]))
    three = group(simple("source", [20.0]), simple("tent", [30.0]), simple("bestta", [40.0]))
    for made, second in ((two, False), (three, True)):
        main = tables_of(made)[0]
        assert ("econd best" in terminal(summary(made), 100)) is second
        assert ("econd best" in main.notes[0]) is second
        assert ("<u>" in main.markdown()) is second


def test_figures_in_notes_have_thousands_apart_and_keep_their_percent_sign():
    record = simple("alpha_bn", [40.0])
    record["blocks"][0]["frames"] = 12_345
    record["cost"]["timed"] = 1_234
    made = tables_of(group(record))
    assert any("12,345 frames" in note for note in made[0].notes)
    assert any("1,234 images" in note for note in titled(made, "cost").notes)
    notes = titled(made, "correlation")
    # Markdown, too, keeps the space that does not break.
    for text in ("\n".join(notes.notes), notes.markdown().partition("- ")[2]):
        assert re.search("\\d\u00a0%", text)
        assert not re.search(r"\d %", text)


def test_memory_is_said_to_be_what_is_over_the_loaded_model():
    notes = tables_of(group(fake_record("tent"), fake_record("bestta")))[0].notes
    assert any("Memory over the model" in n and "less the loaded model" in n for n in notes)


def test_without_source_scores_there_is_no_table_of_forgetting():
    assert forgetting_table(group(fake_record("tent", source_scores=[]))) is None
    assert forgetting_table(group(fake_record("tent"))) is not None


def test_a_figure_that_one_seed_lacks_is_missing():
    entry = group(simple("tent", [None, 1.0]), simple("tent", [3.0, 4.0], seed=1)).entries[0]
    assert entry.block_scores == [None, 2.5]
    assert entry.score is None
    assert entry.spread is None


# --- the paper's shapes ---------------------------------------------------------------------


def test_of_ten_rounds_the_papers_four_are_shown_and_the_mean_is_of_all():
    records = [fake_record(method, rounds=10) for method in ("source", "bestta")]
    table = tables_of(group(*records))[0]
    above = list(dict.fromkeys(c.group for c in table.columns if c.group))
    assert above == ["Round 1", "Round 4", "Round 7", "Round 10"]
    assert [c.title for c in table.columns if c.group == "Round 4"] == list(WEATHER)
    block = records[1]["blocks"][3 * 4 + 1]
    assert (block["name"], block["round"]) == ("night", 3)
    assert column(table, "Round 4 night")["BESTTA"].value == block["score"]
    every = [b["score"] for b in records[1]["blocks"]]
    assert column(table, "Mean")["BESTTA"].value == pytest.approx(sum(every) / 40)
    assert "Of 10 rounds these are shown: 1, 4, 7, 10." in table.notes


def test_published_means_stand_beside_with_their_setting_named():
    records = [fake_record(m) for m in ("source", "tent", "alpha_bn", "bestta")]
    table = tables_of(group(*records))[0]
    last = table.columns[-1]
    assert last.published
    assert last.heading == "published mean (ACDC, DeepLabV3+ R50, 1920×1080)"
    # Table 2 of the paper; it has no row for alpha-BN.
    assert texts(column(table, last.heading)) == {
        **{"SOURCE": "36.6", "ALPHA_BN": "–", "TENT": "22.3", "BESTTA": "43.2"}
    }
    (note,) = [note for note in table.notes if "another setting" in note]
    for part in ("1920×1080 there, 256×128 here", "streets here", "rounds: 10 there, 3 here"):
        assert part in note


def test_the_papers_own_setting_is_not_called_another():
    stream = {"model": "deeplabv3plus_resnet50", "size": [1920, 1080], "set": "acdc"}
    records = [
        on_stream(fake_record(m, rounds=10, protocol="acdc-continual"), **stream)
        for m in ("source", "bestta")
    ]
    notes = tables_of(group(*records))[0].notes
    assert any(note.startswith("Published figures: Cho, Kim and Lee") for note in notes)
    assert not any("another setting" in note for note in notes)


def test_a_published_table_that_is_not_known_is_named_in_a_note():
    table = tables_of(group(fake_record("source", published="acdc-continuall")))[0]
    assert not any(c.published for c in table.columns)
    assert any("'acdc-continuall'" in note for note in table.notes)


def test_rounds_stand_beside_the_published_ones():
    table = titled(tables_of(group(fake_record("source"), fake_record("bestta"))), "rounds")
    printed = [c.heading for c in table.columns if c.published]
    assert printed == [f"published (ACDC) Round {n}" for n in (1, 2, 3)]
    # Table D of the paper's supplement.
    assert column(table, "published (ACDC) Round 2")["BESTTA"].text == "43.2"
    assert column(table, "Round 2")["BESTTA"].value == fake_record("bestta")["rounds"][1]


def test_gains_are_measured_against_the_source_as_the_published_ones_are():
    records = [
        scored(fake_record(m, rounds=1), [s] * 4)
        for m, s in {"source": 50.0, "tent": 45.0, "bestta": 53.0}.items()
    ]
    table = titled(tables_of(group(*records)), "gap")
    assert texts(column(table, "measured gain")) == {"TENT": "−5.0", "BESTTA": "+3.0"}
    # 22.3 − 36.6 and 43.2 − 36.6 from Table 2 of the paper.
    assert texts(column(table, "published (ACDC) gain")) == {"TENT": "−14.3", "BESTTA": "+6.6"}
    assert texts(column(table, "gain measured − published")) == {"TENT": "+9.3", "BESTTA": "−3.6"}


def test_a_lower_error_is_a_gain():
    records = [
        simple(m, [s], task="classification", published="cifar10c")
        for m, s in {"source": 43.5, "bestta": 40.0}.items()
    ]
    made = group(*records)
    table = titled(tables_of(made), "gap")
    # Table 6 of the paper: 77.1 − 36.1.
    assert texts(column(table, "measured gain")) == {"BESTTA": "+3.5"}
    assert texts(column(table, "published (CIFAR-10-C) gain")) == {"BESTTA": "+41.0"}
    assert texts(column(summary(made), "Gain over source")) == {"SOURCE": "–", "BESTTA": "+3.5"}


def test_a_gradual_stream_has_a_column_for_each_corruption_and_a_table_of_severities():
    records = [
        scored(fake_record(m, rounds=1, conditions=GRADUAL, published=None), scores)
        for m, scores in {
            "source": [float(n) for n in range(10)],
            "bestta": [float(n) for n in range(10, 20)],
        }.items()
    ]
    main, severities, *_ = tables_of(group(*records))
    assert [c.heading for c in main.columns][-3:] == ["fog", "snow", "Mean"]
    # (0 + 1 + 2 + 3 + 4) / 5 and (15 + … + 19) / 5.
    assert column(main, "fog")["SOURCE"].value == pytest.approx(2.0)
    assert column(main, "snow")["BESTTA"].value == pytest.approx(17.0)
    assert [c.title for c in severities.columns if c.group == "fog"] == [
        "1",
        "2",
        "3",
        "2 ↓",
        "1 ↓",
    ]
    assert [cell.value for cell in severities.rows[0].cells[:10]] == [float(n) for n in range(10)]
    # The rows of a study go through the same severities.
    of_a_study = [{**record, "study": {"name": "methods"}} for record in records]
    assert tables_of(group(*of_a_study))[1].rows == severities.rows


def test_mixed_domains_have_a_column_for_each_round():
    table = tables_of(group(fake_record("source", conditions=("mixed",), published=None)))[0]
    headings = [c.heading for c in table.columns]
    assert headings[3:] == ["mixed Round 1", "mixed Round 2", "mixed Round 3", "Mean"]


def test_one_pass_through_corruptions_has_a_column_for_each():
    names = tuple(f"corruption_{n}" for n in range(15))
    record = fake_record("source", rounds=1, conditions=names, task="classification")
    found = tables_of(group(record | {"published": "cifar10c"}))
    assert [c.heading for c in found[0].columns][3:18] == [n.replace("_", " ") for n in names]
    assert found[0].rows[0].cells[-1].text == "77.1"  # Table 6 of the paper.
    assert not [t for t in found if t.name.endswith("-rounds")]


def losses(row: str, level: float, **marks: bool) -> dict[str, Any]:
    study = {"name": "losses", "row": row, "marks": marks}
    return fake_record(
        "bestta", label=f"losses {row}", level=level, study=study, published="ablation-losses"
    )


def test_a_study_shows_what_is_on_in_each_row_and_the_published_mean_of_that_row():
    records = [
        losses("(c)", 40.0, entropy=True, style=True, content=False, l2=False),
        losses("(a)", 30.0, entropy=True, style=False, content=False, l2=False),
    ]
    table = tables_of(group(*records))[0]
    assert table.first == "Row"
    assert [row.label for row in table.rows] == ["(a)", "(c)"]
    assert [cell.text for cell in table.rows[0].cells[:4]] == ["✓", "✗", "✗", "✗"]
    headings = [c.heading for c in table.columns]
    assert headings[:5] == [
        *("losses entropy", "losses style", "losses content", "losses l2", "Conditions fog")
    ]
    assert headings[8:12] == ["Round 1", "Round 2", "Round 3", "Mean"]
    # Table B of the paper's supplement.
    assert [row.cells[-1].text for row in table.rows] == ["6.7", "31.8"]
    assert r"\checkmark{}" in table.latex()


def test_a_study_of_a_number_is_ordered_by_it():
    records = [
        fake_record(
            label=f"ρ = {rho}",
            study={"name": "rho", "row": None, "marks": {"rho": rho}},
            published=None,
        )
        for rho in (1.0, 0.0, 0.5)
    ]
    table = tables_of(group(*records))[0]
    assert texts(column(table, "rho")) == {"ρ = 0.0": "0", "ρ = 0.5": "0.5", "ρ = 1.0": "1"}
    assert r"$\rho$ = 0.5 &" in table.latex()


def study_records(name: str) -> list[dict[str, Any]]:
    """A record of each variant of a study that ships, as the benchmark would label it."""
    study = read_study(name)
    records = []
    for variant in study.variants:
        batch = variant.batch or 1
        about = {"name": name, "row": variant.row, "marks": variant.marks}
        method = read_method(variant.method).method
        record = fake_record(method, label=variant.label, study=about, published=study.published)
        records.append(on_stream(record, key=f"{batch:016}", batch=batch))
    return records


def test_a_study_of_batch_sizes_has_the_published_figure_of_its_batch_beside_each_method():
    made = groups(load(*study_records("batch-sizes")))
    mains = [tables_of(each)[0] for each in made]
    # Table A of the paper's supplement; the sizes are those the study names.
    expected = {
        "Source": ["41.8", "41.8", "41.8"],
        "TENT-continual": ["37.3", "40.1", "41.3"],
        "BESTTA": ["44.2", "44.2", "44.1"],
    }
    for label, means in expected.items():
        assert [texts(column(t, t.columns[-1].heading))[label] for t in mains] == means
    assert not any("each of its variants" in note for table in mains for note in table.notes)
    across = titled(tables(made), "by-batch")
    (bestta,) = [row for row in across.rows if row.label == "BESTTA"]
    assert [cell.text for cell in bestta.cells[3:]] == expected["BESTTA"]
    assert bestta.highlighted


def test_a_row_of_a_study_says_its_batch_size_where_its_stream_does_not():
    study = {"name": "batch-sizes", "row": "", "marks": {"batch": 4}}
    record = on_stream(fake_record(study=study, published="batch-sizes"), batch=None)
    # Table A of the paper's supplement: 44.2 for one image, 44.1 for four.
    assert tables_of(group(record))[0].rows[0].cells[-1].text == "44.1"


def test_a_study_of_methods_has_the_published_figure_of_each_and_the_gain_over_the_source():
    made = group(*study_records("forgetting"))
    main = tables_of(made)[0]
    assert main.first == "Method"
    assert [row.label for row in main.rows] == ["Source", "TENT-continual", "BESTTA", "bestta+"]
    # Table 2 of the paper; BESTTA's stands beside each of its forms, and a note says so.
    assert [row.cells[-1].text for row in main.rows] == ["36.6", "22.3", "43.2", "43.2"]
    gap = titled(tables_of(made), "gap")
    assert [row.label for row in gap.rows] == ["TENT-continual", "BESTTA", "bestta+"]


def test_a_setting_that_the_paper_did_not_vary_has_no_published_figure():
    study = {"name": "rho", "row": "", "marks": {"rho": 0.5}}
    table = tables_of(group(fake_record(study=study, published="acdc-continual")))[0]
    assert table.columns[-1].published
    assert table.rows[0].cells[-1].text == "–"


# --- the other tables -----------------------------------------------------------------------


def test_a_class_that_is_absent_from_a_block_counts_in_the_others_only():
    record = fake_record("source", rounds=1, conditions=("fog", "night"))
    record["blocks"][0]["per_class"][:3] = [10.0, None, None]
    record["blocks"][1]["per_class"][:3] = [30.0, 50.0, None]
    table = titled(tables_of(group(record)), "classes")
    road, sidewalk, building = table.rows[0].cells[:3]
    assert (road.value, sidewalk.value) == (20.0, 50.0)
    assert building.text == "–"


def test_in_classification_the_class_with_the_fewest_errors_is_best():
    records = [
        simple(m, [s], task="classification") for m, s in {"source": 40.0, "bestta": 30.0}.items()
    ]
    for record, errors in zip(records, ([10.0, 70.0], [20.0, None]), strict=True):
        record["blocks"][0]["per_class"] = errors
    table = titled(tables_of(group(*records)), "classes")
    assert [c.title for c in table.columns] == ["cat", "dog", "Mean"]
    assert ranks(column(table, "cat")) == {"SOURCE": 1, "BESTTA": 0}
    assert texts(column(table, "dog")) == {"SOURCE": "70.0", "BESTTA": "–"}
    assert table.notes[0].startswith("Error among the images of each class in %, lower is better")
    assert "of the one block" in table.notes[0]
    bare = [record | {"blocks": [record["blocks"][0] | {"per_class": []}]} for record in records]
    assert not [t for t in tables_of(group(*bare)) if t.name.endswith("-classes")]


def timed(method: str, call: float, plain: float, **changes: Any) -> dict[str, Any]:
    record = fake_record(method)
    times = {
        "call_ms": {"median": call, "p95": 2 * call},
        "predict_ms": {"median": plain, "p95": plain},
    }
    return record | {"cost": record["cost"] | times} | changes


def test_cost_is_told_as_a_ratio_to_the_source_and_to_the_plain_forward():
    table = titled(tables_of(group(timed("source", 10, 8), timed("bestta", 25, 5))), "cost")
    assert texts(column(table, "× source's call")) == {"SOURCE": "1.00", "BESTTA": "2.50"}
    assert texts(column(table, "× plain forward")) == {"SOURCE": "1.25", "BESTTA": "5.00"}
    # The fake's bytes: 500 MB and ten more for each letter of the name.
    assert texts(column(table, "Memory peak (MB)")) == {"SOURCE": "560", "BESTTA": "560"}


def test_a_ratio_measured_image_by_image_wins_over_that_of_medians():
    record = timed("bestta", 25, 5)
    record["cost"]["ratio"] = 4.75  # the median of the images' own ratios need not be 25 / 5
    table = titled(tables_of(group(timed("source", 10, 8), record)), "cost")
    assert texts(column(table, "× plain forward")) == {"SOURCE": "1.25", "BESTTA": "4.75"}


def test_in_the_mean_all_calls_count_where_they_were_kept():
    """Two calls of 5 ms and one of 50 have a median of 5 and a mean of 20."""
    seldom, older = timed("bestta", 5, 5), timed("tent", 10, 5)
    seldom["cost"]["call_ms"]["mean"], seldom["cost"]["predict_ms"]["mean"] = 20.0, 5.0
    older["cost"]["mean_ratio"] = 2.25
    table = titled(tables_of(group(timed("source", 5, 5), seldom, older)), "cost")
    expected = {"SOURCE": "–", "BESTTA": "4.00", "TENT": "2.25"}
    assert texts(column(table, "× plain forward, mean")) == expected
    assert "For TENT it is the mean of sampled images' ratios" in table.notes[0]
    assert column(table, "× plain forward")["BESTTA"].text == "1.00"


def test_times_of_different_machines_are_not_set_against_each_other():
    origin = fake_record()["provenance"]
    other = {"provenance": origin | {"machine": origin["machine"] | {"cpu": "Other CPU"}}}
    made = group(timed("source", 10, 8), timed("bestta", 25, 5, **other))
    table = titled(tables_of(made), "cost")
    assert column(table, "× source's call")["BESTTA"].text == "–"
    for each in (table, tables_of(made)[0], summary(made)):
        (note,) = [note for note in each.notes if "machines differ" in note]
        assert "Other CPU (x86_64, 2 cores, 1 thread): BESTTA" in note


def on_device(record: dict[str, Any], device: str, gpu: str | None = None) -> dict[str, Any]:
    origin = record["provenance"]
    machine = origin["machine"] | {"device": device, "gpu": gpu}
    return record | {"provenance": origin | {"machine": machine}}


@pytest.mark.parametrize(
    ("here", "there", "compare"),
    [
        (("cpu", None), ("cuda", "A100"), False),
        (("cuda", "A100"), ("cuda", "H100"), False),
        (("cuda", "A100"), ("cuda", "A100"), True),
        # A card that did not compute does not matter.
        (("cpu", None), ("cpu", "A100"), True),
    ],
)
def test_times_compare_only_on_the_same_device(here: Any, there: Any, compare: bool):
    source = on_device(timed("source", 10, 8), *here)
    made = group(source, on_device(timed("bestta", 25, 5), *there))
    table = titled(tables_of(made), "cost")
    assert (column(table, "× source's call")["BESTTA"].text == "2.50") is compare
    assert any("machines differ" in note for note in table.notes) is not compare
    told = "\n".join(table.notes)
    assert "None" not in told
    assert ("A100 on Test CPU" in told) is (("cuda", "A100") in (here, there))


def test_a_record_that_does_not_name_its_device_ran_where_its_config_says():
    old, new = older(timed("source", 10, 8)), timed("bestta", 25, 5)
    made = titled(tables_of(group(old, new)), "cost")
    assert column(made, "× source's call")["BESTTA"].text == "2.50"
    made = titled(tables_of(group(old | {"config": {"device": "cuda:0"}}, new)), "cost")
    assert column(made, "× source's call")["BESTTA"].text == "–"
    assert any("unknown cuda device on Test CPU" in note for note in made.notes)


def test_times_that_include_looking_at_features_are_set_against_no_others():
    source, ours = timed("source", 10, 8), timed("bestta", 25, 5)
    ours["cost"]["looked"] = True
    made = group(source, ours)
    table = titled(tables_of(made), "cost")
    assert column(table, "× source's call")["BESTTA"].text == "–"
    for each in (table, tables_of(made)[0], summary(made)):
        (note,) = [note for note in each.notes if "looking at features" in note]
        assert "(BESTTA)" in note
    plain = tables_of(group(source, timed("bestta", 25, 5)))
    assert not any("looking at" in note for each in plain for note in each.notes)


def test_commits_that_differ_or_have_changes_are_told():
    origin = fake_record()["provenance"]
    same = tables_of(group(fake_record("source"), fake_record("bestta")))[0].markdown()
    assert "commit b7f4d51," in same
    assert "different commits" not in same
    assert "uncommitted" not in same
    other = fake_record("bestta", provenance=origin | {"commit": "abcdef0-dirty"})
    notes = tables_of(group(fake_record("source"), other))[0].notes
    assert (
        "The rows come from different commits: b7f4d51 (SOURCE); abcdef0-dirty (BESTTA)." in notes
    )
    assert any(n.startswith("Run with uncommitted") and n.endswith("BESTTA.") for n in notes)


def test_the_notes_tell_the_story_of_the_numbers():
    notes = "\n".join(tables_of(group(fake_record("source")))[0].notes)
    for part in (
        *("mIoU in %, higher is better", "256×128", "severity 3", "one image at a time", "fp32"),
        *("60 frames in 12 blocks, 5 each", "Seed 0.", "bestta 0.1.0", "torch 2.13.0"),
        *("Test CPU (x86_64, 2 cores, 1 thread)", "load 0.5–0.9", "2026-01-01"),
    ):
        assert part in notes


def test_forgetting_is_the_source_score_after_each_round():
    table = titled(tables_of(group(fake_record("source"), fake_record("tent"))), "forgetting")
    assert [c.title for c in table.columns] == [
        *("before", "after round 1", "after round 2", "after round 3", "change")
    ]
    # The fake's tent loses a point a round from 85.
    assert [cell.text for cell in table.rows[1].cells] == ["85.0", "84.0", "83.0", "82.0", "−3.0"]
    none = group(fake_record("source", source_scores=[]))
    assert not [t for t in tables_of(none) if t.name.endswith("-forgetting")]


def test_scores_on_other_source_images_are_left_out_and_named():
    records = [fake_record(m) for m in ("source", "tent", "bestta")]
    records[1]["source_set"] = records[1]["source_set"] | {"names": "6" * 16, "images": 7}
    table = titled(tables_of(group(*records)), "forgetting")
    assert [row.label for row in table.rows] == ["SOURCE", "BESTTA"]
    (note,) = [note for note in table.notes if note.startswith("Left out")]
    assert note.endswith("do not compare: TENT (streets, val, 7 images).")
    assert "40 source images (streets, val)." in table.notes
    # Records that do not say which they were compare with each other, and with no others.
    old = titled(tables_of(group(*map(older, records))), "forgetting")
    assert [row.label for row in old.rows] == ["SOURCE", "TENT", "BESTTA"]
    mixed = titled(
        tables_of(group(older(records[0]), records[2], fake_record("memo"))), "forgetting"
    )
    assert [row.label for row in mixed.rows] == ["MEMO", "BESTTA"]
    assert any("SOURCE (which is not recorded)" in note for note in mixed.notes)


def test_a_mean_over_one_block_is_not_called_one_over_all_of_them():
    one = group(simple("bestta", [40.0]))
    for table in (summary(one), tables_of(one)[0]):
        assert "the one block" in table.notes[0]
    two = group(simple("bestta", [40.0, 50.0]))
    for table in (summary(two), tables_of(two)[0]):
        assert "all 2 blocks" in table.notes[0]


def batches(size: int, published: str | None = "batch-sizes") -> list[dict[str, Any]]:
    return [
        on_stream(simple(m, [s + size], published=published), key=f"{size:016}", batch=size)
        for m, s in {"source": 40.0, "bestta": 44.0}.items()
    ]


def test_groups_that_differ_in_batch_size_alone_share_one_table():
    found = tables(groups(load(*batches(4), *batches(1), *batches(2))))
    table = titled(found, "by-batch")
    assert [c.heading for c in table.columns[:3]] == [f"Batch size {n}" for n in (1, 2, 4)]
    assert [cell.text for cell in table.rows[1].cells[:3]] == ["45.0", "46.0", "48.0"]
    # Table A of the paper's supplement.
    assert [cell.text for cell in table.rows[1].cells[3:]] == ["44.2", "44.2", "44.1"]
    assert "batches of" not in table.title
    # Each batch size has its own figure in its own main table, too.
    mains = {t.name: t.rows[1].cells[-1].text for t in found if t.name.endswith("-main")}
    assert mains["streets-continual-batch-4-main"] == "44.1"


def test_groups_that_differ_in_more_than_the_batch_size_share_no_table():
    larger = [on_stream(record, size=[512, 256]) for record in batches(2)]
    found = tables(groups(load(*batches(1), *larger)))
    assert not [table for table in found if table.name.endswith("-by-batch")]


def test_the_summary_has_conditions_mean_gain_time_and_memory():
    records = [
        scored(timed(m, call, 8), [s, s + 1, s + 2, s + 3] * 3)
        for m, s, call in (("source", 40.0, 10), ("bestta", 44.5, 12))
    ]
    table = summary(group(*records))
    assert [c.heading for c in table.columns] == [
        *WEATHER,
        *("Mean", "Gain over source", "Time (ms)", "× plain", "Memory (MB)", "Trained"),
    ]
    assert [cell.text for cell in table.rows[1].cells] == [
        *("44.5", "45.5", "46.5", "47.5", "46.0", "+4.5", "12.0", "1.50", "110", "512")
    ]


def test_correlations_stand_beside_what_the_paper_says_of_them():
    record = fake_record("alpha_bn", published="correlations")
    scores = record["frames"]["score"]
    record["traces"]["direction"] = scores  # as close as can be
    record["traces"]["source"] = [-score for score in scores]
    table = titled(tables_of(group(record)), "correlation")
    assert texts(column(table, "r"))["Direction similarity"] == "1.00"
    assert texts(column(table, "r"))["Source similarity"] == "−1.00"
    assert texts(column(table, "published r")) == {
        "Direction similarity": "> 0.5",
        "Target similarity": "> 0.5",
        "Source similarity": "= 0.18",
        "Entropy": "strong",
    }
    above = sum(value > 0.9 for value in record["traces"]["target"]) / len(scores)
    assert any(f"{100 * above:.1f}\u00a0% of the target" in note for note in table.notes)
    assert correlation_table(group(without(record, "direction"))) is None


def test_a_study_of_correlations_says_nothing_is_published_only_where_nothing_is_shown():
    (record,) = study_records("correlation")
    main, *others = tables_of(group(record))
    assert "published" not in main.markdown()
    assert any(c.published for t in others if t.name.endswith("-correlation") for c in t.columns)
    bare = tables_of(group(without(record, "direction")))[0]
    assert any(note.startswith("No published figures: correlations is in") for note in bare.notes)


def test_thinned_traces_are_told_where_they_are_correlated():
    made = group(fake_record("alpha_bn", traced_every=3), fake_record("bestta"))
    notes = titled(tables_of(made), "correlation").notes
    assert "The traces hold every 3rd step (ALPHA_BN)." in notes


def without(record: dict[str, Any], trace: str) -> dict[str, Any]:
    kept = {name: values for name, values in record["traces"].items() if name != trace}
    return record | {"traces": kept}


# --- as text --------------------------------------------------------------------------------

HOSTILE = "A|B & 50% of_x #1 {y} $z$ ~^\\ <b>*"


def small() -> Table:
    columns = (
        Column("mean", "all", higher_is_better=True),
        Column("words"),
        Column("printed", "other", published=True),
    )
    rows = (
        Row(HOSTILE, (shown(45.123456789), Cell("a|b"), shown(None)), starred=True),
        Row("[x]", (shown(50.0, spread=1.25), Cell("✓", 1), shown(7.0)), highlighted=True),
        Row("z", (shown(1.0), Cell("–"), signed(-3.0))),
    )
    return ranked(Table("small", "Title with_x", columns, rows, ("first | note", "100 %")))


def unescaped_pipes(line: str) -> int:
    return len(re.findall(r"(?<!\\)(?:\\\\)*\|", line))


def test_markdown_has_as_many_cells_in_every_row_whatever_the_labels_hold():
    lines = small().markdown().splitlines()
    assert lines[:3] == [r"**Title with\_x**", "", "| Method | all mean | words | other printed |"]
    assert lines[3] == "| :--- | ---: | ---: | ---: |"
    assert [unescaped_pipes(line) for line in lines[2:7]] == [5] * 5
    assert "<b>" not in lines[4].replace(r"\<b>", "")
    assert lines[5] == r"| \[x\] | **50.0 ± 1.2** | ✓ | 7.0 |"
    assert "<u>45.1</u>" in lines[4]
    assert lines[7:] == ["", r"- first \| note", "- 100 %"]


def test_csv_holds_full_precision_and_comes_back_through_the_csv_module():
    table = small()
    head, *rows = csv.reader(io.StringIO(table.csv()))
    assert head == ["Method", "all mean", "all mean spread", "words", "other printed"]
    assert rows == [
        [HOSTILE, "45.123456789", "", "a|b", ""],
        ["[x]", "50", "1.25", "1", "7"],
        ["z", "1", "", "", "-3"],
    ]
    made = tables_of(group(*map(fake_record, ("source", "bestta"))))[0]
    for row, line in zip(made.rows, csv.DictReader(io.StringIO(made.csv())), strict=True):
        for which, cell in zip(made.columns, row.cells, strict=True):
            assert float(line[which.heading]) == cell.value


def every_table() -> list[Table]:
    seeds = [fake_record("tent_reset", seed=n) for n in range(2)]
    found = tables(groups(load(*map(fake_record, ("source", "bestta")), *seeds)))
    study = losses("(a)", 30.0, entropy=True, style=False, content=False, l2=False)
    swelling = fake_record("source", rounds=1, conditions=GRADUAL)
    return [*found, *tables(groups(load(study))), *tables(groups(load(swelling))), small()]


def test_no_two_columns_of_a_table_have_one_heading():
    for table in every_table():
        headings = [which.heading for which in table.columns]
        assert len(headings) == len(set(headings)), table.name


def test_latex_is_balanced_and_has_as_many_cells_as_columns():
    for table in every_table():
        text = table.latex()
        assert "needs \\usepackage{booktabs,amssymb}" in text
        body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
        # With escapes gone, braces and dollars pair, and no sign that LaTeX reads is left over.
        bare = re.sub(r"\\[{}$&#_%]", "", body)
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        assert not set(bare) & set('%#~"')
        assert bare.isascii(), set(bare) - set(map(chr, range(128)))
        (spec,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", body)
        assert len(spec) == len(table.columns) + 1
        rows = [line for line in bare.splitlines() if line.endswith(r"\\")]
        assert len(rows) == len(table.rows) + 1 + any(c.group for c in table.columns)
        for row in rows:
            spans = [int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", row)]
            assert row.count("&") + 1 + sum(n - 1 for n in spans) == len(spec), row
        for word in (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"):
            assert word in body


def test_latex_keeps_a_bracket_that_begins_a_row_from_the_line_break_before_it():
    assert "\n{[x]} & " in small().latex()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_latex_compiles(tmp_path: Path):
    body = "\n\n".join(table.latex() for table in every_table())
    text = "\\documentclass{article}\\usepackage{booktabs,amssymb}\\begin{document}\n"
    (tmp_path / "t.tex").write_text(f"{text}{body}\n\\end{{document}}\n")
    subprocess.run(
        ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "t.tex"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )


def test_plain_text_fits_and_its_columns_stand_under_their_headings():
    records = [fake_record(m) for m in ("source", "bn_stats", "tent_reset", "cotta", "bestta")]
    for table in (summary(group(*records)), *every_table()):
        for width in (60, 80, 100):
            assert max(map(len, terminal(table, width).splitlines())) <= width
    lines = terminal(summary(group(*records))).splitlines()
    rule = next(n for n, line in enumerate(lines) if line.startswith("----"))
    body = lines[rule + 1 : rule + 6]
    assert [line.split()[0] for line in body] == [
        *("SOURCE", "BN_STATS", "TENT_RESET*", "COTTA", "BESTTA")
    ]
    # The last column is aligned to the right: all lines end where the rule does.
    assert {len(line) for line in body} == {len(lines[rule])}
    assert "¹ best, ² second best" in lines


def test_plain_text_marks_the_best_and_second_best():
    figures = {"source": 41.0, "tent": 42.0, "bestta": 45.0}
    text = terminal(summary(group(*(simple(m, [s, s]) for m, s in figures.items()))))
    assert [text.count(word) for word in ("45.0¹", "42.0²", "41.0¹", "41.0²")] == [3, 3, 0, 0]


def test_what_there_is_no_room_for_is_left_out_whole_and_named():
    names = tuple(f"corruption_{n}" for n in range(15))
    records = [
        fake_record(m, rounds=1, conditions=names, published=None) for m in ("source", "bestta")
    ]
    text = terminal(summary(group(*records)), 100)
    (line,) = [line for line in text.splitlines() if line.startswith("Not shown")]
    assert "corruption 0, corruption 1" in line
    head = text[: text.index("SOURCE")]
    assert "corruption" not in head
    for word in ("Mean", "Gain", "Time", "Memory", "Trained"):
        assert word in head
    wide = terminal(summary(group(*records)), 400)
    assert wide[: wide.index("SOURCE")].count("corruption") == 15


def test_a_row_with_too_few_cells_is_refused():
    with pytest.raises(ValueError, match="has 0 cells; it needs 1"):
        Table("t", "t", (Column("a"),), (Row("x", ()),))
