"""The page of results: made of records alone, and records kept without what is not ours to give."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import scripts
from bench import played, run_of
from bestta.benchmark.config import read_method, read_study

ROOT = Path(__file__).parents[1]

CLASSIFYING = ("settings-classification", "methods-classification")


@pytest.fixture(scope="module")
def keep():
    return runpy.run_path(str(ROOT / "benchmarks" / "keep_records.py"))["kept"]


@pytest.fixture(scope="module")
def page():
    return runpy.run_path(str(ROOT / "benchmarks" / "results_page.py"))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Two short runs: the plain model, and ours by the name the page knows it by."""
    out = tmp_path_factory.mktemp("records")
    ours = read_method("bestta", guard=False)
    found = []
    for method, label in ((read_method("source"), "Source"), (ours, "bestta+")):
        run = run_of(method, size=(32, 32), rounds=3, images=2)
        record = played(run, out)
        found.append({**record, "label": label})
    return found


def test_what_is_kept_has_no_pictures_and_every_score(keep, records):
    for record in records:
        assert record["pictures"]["conditions"]  # there is something to leave out
        assert record["frames"]["score"]
        kept = keep(record)
        assert not kept["pictures"]
        assert not kept["frames"]
        for name in ("blocks", "score", "rounds", "settings", "provenance", "source_scores"):
            assert kept[name] == record[name]


def test_a_long_trace_is_thinned_evenly_and_says_so(keep, records):
    steps = list(range(0, 10_000, 2))
    record = {**records[0], "traces": {"step": steps, "entropy": steps}, "traced_every": 2}
    kept = keep(record)
    assert len(kept["traces"]["step"]) <= 250
    apart = kept["traces"]["step"][1] - kept["traces"]["step"][0]
    assert kept["traced_every"] == apart
    assert kept["traces"]["entropy"] == kept["traces"]["step"]


def test_a_record_with_similarities_keeps_its_frames(keep, records):
    record = {**records[0], "traces": {"step": [0], "direction": [0.5]}}
    assert keep(record)["frames"] == record["frames"]


def test_the_page_says_by_how_much_ours_leads_or_trails(page, keep, records, tmp_path):
    place = tmp_path / "weather"
    place.mkdir()
    rival = {**records[0], "label": "Rival", "id": "rival", "method": "tent", "score": 40.0}
    for number, record in enumerate((*records, rival)):
        changed = {**keep(record), "id": f"r{number}"}
        changed["score"] = {"Source": 30.0, "bestta+": 38.5, "Rival": 40.0}[record["label"]]
        (place / f"r{number}.json").write_text(json.dumps(changed))
    text = page["tables"](tmp_path)
    assert "+8.5 points over the source, 1.5 behind the best other method (Rival, 40.0)" in text


def test_the_page_says_which_rows_and_seeds_are_still_to_come(page, keep, records, tmp_path):
    """Of the costly table CoTTA is asked for with three seeds: here it has one, PETAL none."""
    place = tmp_path / "weather-costly"
    place.mkdir()
    for number, label in enumerate(("Source", "CoTTA")):
        record = {**keep(records[0]), "label": label, "id": f"r{number}"}
        record["study"] = {"name": "methods-costly", "row": "", "marks": {}}
        (place / f"r{number}.json").write_text(json.dumps(record))
    (line,) = [
        line for line in page["tables"](tmp_path).splitlines() if line.startswith("Still to be")
    ]
    assert line.endswith(", PETAL, bestta+ (three looks), CoTTA with 2 more seeds.")
    assert "Source" not in line


def test_a_table_that_was_not_measured_is_not_on_the_page(page, tmp_path):
    assert page["tables"](tmp_path) == ""


def test_the_page_and_its_figures_are_what_the_records_say(page, tmp_path):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page["renewed"](text, page["tables"](figures_at=tmp_path)) == text
    shipped = {path.name: path.read_bytes() for path in (ROOT / "docs").glob("results-*.svg")}
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")} == shipped
    assert "How the settings were chosen" in text


def test_the_readme_has_the_means_of_the_records(page):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page["renewed"](text, page["headline"]()) == text
    (ours,) = [
        json.loads(path.read_text(encoding="utf-8"))["score"]
        for path in (ROOT / "results" / "measured" / "weather").glob("*.json")
        if json.loads(path.read_text(encoding="utf-8"))["label"] == "bestta+"
    ]
    assert f"{ours:.1f}" in page["headline"]().splitlines()[-1]


def test_a_figure_of_several_drawings_becomes_one(page):
    """Four panels in two rows, each drawing inside the whole and where the one before it ends."""
    svg = '<svg role="img" class="plot" viewBox="0 0 30 20" width="30" height="20"><path/></svg>'
    panel = f'<div class="panel"><h4>one &lt; two <span>n = 5</span></h4>{svg}</div>'
    figure = page["Figure"]("many", "Many", f"<div>{panel * 4}</div></details>{panel}", "")
    rows = page["drawings"](figure)
    assert [[heading for heading, _ in row] for row in rows] == [["one < two\nn = 5"] * 2] * 2
    made = ElementTree.fromstring(page["alone"](figure))
    inside = made.findall("{http://www.w3.org/2000/svg}svg")
    places = [(float(one.get("x")), float(one.get("y"))) for one in inside]
    # 16 between them; above, 16 for each of two lines and 6.
    assert places == [(0, 38), (46, 38), (0, 112), (46, 112)]
    assert (float(made.get("width")), float(made.get("height"))) == (92, 148)


@pytest.mark.parametrize(
    ("task", "grid", "tables", "least"),
    [("Segmentation", "settings", "methods", 6), ("Classification", *CLASSIFYING, 8)],
)
def test_the_settings_in_the_tables_are_those_that_did_best(task, grid, tables, least):
    """The rows in bold, by method, against the study that runs the tables: one for each method."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    sections = [part for part in text.split("\n### ")[1:] if part.startswith(task)]
    text = "\n".join(part.partition("\n#")[0] for part in sections)
    bold = [
        line.split("|")[1].strip() for line in text.splitlines() if re.search(r"\*\* \|$", line)
    ]
    chosen = {label.partition(" (")[0]: label for label in bold if " (" in label}
    assert len(chosen) == sum(" (" in label for label in bold)
    classifies = task == "Classification"
    costly = "settings-costly-classification" if classifies else "settings-costly"
    longer = ("settings-memory",) if classifies else ("settings-long", "settings-blocks")
    grids = (grid, *longer, costly)
    every = {v.label: (v.method, v.settings) for name in grids for v in read_study(name).variants}
    costly = "methods-costly-classification" if classifies else "methods-costly"
    checked = 0
    for variant in (*read_study(tables).variants, *read_study(costly).variants):
        if variant.label in chosen and not variant.label.startswith("bestta"):
            assert every[chosen[variant.label]] == (variant.method, variant.settings)
            checked += 1
    assert checked >= least


@pytest.fixture(scope="module")
def pictures():
    return scripts.load("pictures")


def holds(sheet, part) -> bool:
    """Whether a picture is somewhere in a larger one, pixel for pixel."""
    windows = np.lib.stride_tricks.sliding_window_view(sheet, part.shape)[:, :, 0]
    return bool((windows == part).all((2, 3, 4)).any())


def test_the_picture_of_the_methods_has_what_each_of_them_answered(pictures, tmp_path):
    for method in ("source", "bn_stats"):
        played(run_of(read_method(method), size=(64, 32), images=1), tmp_path)
    sheet = pictures.sheet(tmp_path, cell_width=64)
    answers = sorted(tmp_path.glob("*.pictures/*-prediction.png"))
    answers = [path for path in answers if not path.name.startswith("worst")]
    assert len(answers) == 4  # two methods, in fog and at night
    found = [np.asarray(Image.open(path).convert("RGB")) for path in answers]
    assert all(holds(sheet, part) for part in found)
    assert not holds(sheet, np.roll(found[0], 7, axis=1))  # it is not that anything would do


def test_images_of_a_data_set_are_not_put_into_a_picture(pictures, tmp_path):
    played(run_of(read_method("source"), size=(32, 32), images=1), tmp_path)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    record["config"]["protocol"]["set"] = "cityscapes"
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="of cityscapes, whose images are not ours"):
        pictures.sheet(tmp_path)


def test_records_that_were_kept_without_pictures_are_told(pictures, keep, tmp_path):
    played(run_of(read_method("source"), size=(32, 32), images=1), tmp_path)
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps(keep(json.loads(path.read_text()))))
    with pytest.raises(SystemExit, match="without pictures"):
        pictures.sheet(tmp_path)


def test_a_folder_that_makes_no_picture_is_told(pictures, tmp_path):
    with pytest.raises(SystemExit, match="no records found"):
        pictures.sheet(tmp_path)
    for size in ((32, 32), (64, 32)):
        played(run_of(read_method("source"), size=size, images=1), tmp_path)
    with pytest.raises(SystemExit, match="of 2 streams"):
        pictures.sheet(tmp_path)
