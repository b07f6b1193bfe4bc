"""The report: complete in itself, honest in words, safe with strange text, and drawn right."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bestta.reports import figures_inside, figures_scores, svg
from bestta.reports.figures import Shown, styles
from bestta.reports.headline import headline, study_headline
from bestta.reports.page import _looks, table_html, write_report
from bestta.reports.pictures import conditions_grid, data_uri
from bestta.reports.records import Loaded, groups, read_records
from bestta.reports.tables import tables
from fakes import fake_pictures, fake_record, older

METHODS = ("source", "bn_stats", "tent_reset", "tent", "cotta", "bestta")
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its text, and whether tags match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def inside(self, tag: str) -> str:
        return "".join(text for where, text in self.texts if where == tag)

    @property
    def words(self) -> str:
        return "".join(text for where, text in self.texts if where not in ("style", "script"))

    @property
    def figures(self) -> set[str | None]:
        return {figure["class"] for figure in self.all("figure")}


def written(folder: Path, *records: dict[str, Any], pictures: bool = False) -> Page:
    """The page of these records."""
    for record in records:
        if pictures:
            fake_pictures(folder, record)
        else:
            (folder / f"{record['id']}.json").write_text(json.dumps(record))
    return Page(write_report([folder], folder / "out")[0].read_text())


def shown(*records: dict[str, Any]) -> list[Shown]:
    (group,) = groups([Loaded(Path(f"{record['id']}.json"), record) for record in records])
    looks = styles((entry.label, entry.method) for entry in group.entries)
    return [Shown(entry, looks[entry.label]) for entry in group.entries]


def scored(method: str, score: float | None, **changes: Any) -> dict[str, Any]:
    """A record of one round in which every block has the score, so that the mean is known."""
    record = fake_record(method, rounds=1, **changes)
    for block in record["blocks"]:
        block["score"] = score
    record["score"], record["rounds"] = score, [score]
    record["conditions"] = dict.fromkeys(record["conditions"], score)
    return record


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    folder = tmp_path_factory.mktemp("records")
    page = written(folder, *(fake_record(method) for method in METHODS), pictures=True)
    return folder, page


# --- the page as a file ---------------------------------------------------------------------


def test_every_tag_is_closed_where_it_should_be(full):
    assert full[1].wrong == []
    assert full[1].open == []


def test_the_page_points_at_nothing_outside_itself(full):
    _, page = full
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    ]
    assert len(addresses) > 50
    assert all(a is not None and a.startswith(("data:", "#")) for a in addresses)
    assert not re.search(r"url\(|@import", page.inside("style"))


def test_the_policy_allows_this_style_and_this_script_and_nothing_else(full):
    _, page = full
    (policy,) = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    parts = dict(part.strip().split(" ", 1) for part in (policy or "").split(";"))
    assert parts.pop("default-src") == "'none'"
    assert parts.pop("img-src") == "data:"
    assert {parts.pop("base-uri"), parts.pop("form-action")} == {"'none'"}
    for name, tag in (("style-src", "style"), ("script-src", "script")):
        digest = hashlib.sha256(page.inside(tag).encode()).digest()
        assert parts.pop(name) == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert parts == {}
    # An attribute that the policy would silence must not be relied upon.
    assert not any(
        name == "style" or name.startswith("on")
        for _, attributes in page.elements
        for name in attributes
    )


def test_every_id_stands_for_one_element_and_every_link_finds_its_own(tmp_path):
    one, other = fake_record("bestta"), fake_record("tent")
    other["stream"] = other["stream"] | {"key": "f" * 16, "every": 2}
    page = written(tmp_path, one, other)
    names = [a["id"] for _, a in page.elements if "id" in a]
    assert len(names) == len(set(names))
    inner = [a["href"] for a in page.all("a") if (a["href"] or "").startswith("#")]
    assert len(inner) == 2
    assert {str(link)[1:] for link in inner} <= set(map(str, names))


def test_streams_that_differ_get_sections_of_their_own(tmp_path):
    records = [fake_record("source"), fake_record("bestta")]
    records[1]["stream"] = records[1]["stream"] | {"key": "f" * 16}
    assert len(written(tmp_path, *records).all("section")) == 2


def test_one_stream_needs_no_contents(full):
    assert len(full[1].all("section")) == 1
    assert full[1].all("nav") == []


def test_tables_lie_beside_the_page_in_three_formats(full):
    folder, _ = full
    found = {path.name: path.read_text() for path in (folder / "out" / "tables").iterdir()}
    every = tables(groups(read_records([folder])))
    expected = {f(t) for t in every for f in (lambda t: t.markdown(), lambda t: t.csv())}
    assert len(found) == 3 * len(every)
    assert expected <= set(found.values())
    assert {Path(name).suffix for name in found} == {".md", ".csv", ".tex"}


def test_the_links_carry_the_tables(full):
    folder, page = full
    links = {a["download"]: a["href"] for a in page.all("a") if "download" in a}
    for path in (folder / "out" / "tables").iterdir():
        _, text = str(links[path.name]).split(",", 1)
        assert unquote(text) == path.read_text()


def test_all_files_written_are_named_and_nothing_else_is_left(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(fake_record()))
    files = write_report([tmp_path / "r.json"], tmp_path / "out")
    assert files[0] == tmp_path / "out" / "report.html"
    assert set(files) == {p for p in (tmp_path / "out").rglob("*") if p.is_file()}


def test_a_write_that_fails_leaves_the_page_of_before(tmp_path, monkeypatch):
    (tmp_path / "r.json").write_text(json.dumps(fake_record()))
    page = write_report([tmp_path / "r.json"], tmp_path / "out", title="before")[0]
    before = page.read_text()

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write_report([tmp_path / "r.json"], tmp_path / "out", title="after")
    assert page.read_text() == before
    assert [p.name for p in page.parent.iterdir() if p.name.startswith(".")] == []


def test_the_title_is_the_one_given(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(fake_record()))
    page = Page(write_report([tmp_path], tmp_path / "out", title="Fog & <night>")[0].read_text())
    assert page.inside("h1") == "Fog & <night>"


def test_the_share_of_adapted_frames_is_told_where_it_is_not_all_of_them(tmp_path):
    auto = fake_record("bestta", label="auto")
    auto["events"] = {"adapted": 12, "skipped": 1, "rolled_back": 0, "adapted_share": 0.254}
    (tmp_path / "auto.json").write_text(json.dumps(auto))
    text = write_report([tmp_path], tmp_path / "out")[0].read_text()
    assert "12 adapted (25 %), 1 skipped" in text


# --- strange records ------------------------------------------------------------------------

HOSTILE = "</script></style></svg>\"'><script>alert(1)</script><img src=x onerror=alert(1)>&amp;"


def test_a_hostile_label_stays_text(tmp_path):
    record = fake_record(label=HOSTILE, conditions=(HOSTILE, "fog"))
    record["pictures"] = {"conditions": [], "worst": []}
    record["protocol"] = record["stream"]["model"] = HOSTILE
    record["settings"] = record["config"] = {HOSTILE: HOSTILE}
    record["provenance"]["commit"] = record["embeddings"]["layer"] = HOSTILE
    record["classes"] = [HOSTILE] * 19
    page = written(tmp_path, record, fake_record("source"))
    assert page.wrong == []
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert HOSTILE in page.words


def test_pictures_outside_the_records_folder_are_not_read(tmp_path):
    record = fake_record()
    record["pictures"]["conditions"][0]["image"] = "../secret.png"
    record["pictures"]["conditions"][1]["image"] = str(tmp_path / "secret.png")
    secret = np.full((4, 4, 3), 7, np.uint8)
    folder = tmp_path / f"{record['id']}.pictures"
    folder.mkdir()
    Image.fromarray(secret).save(tmp_path / "secret.png")
    assert data_uri(tmp_path, "secret.png") is not None
    assert data_uri(folder, "../secret.png") is None
    assert data_uri(folder, str(tmp_path / "secret.png")) is None
    assert written(tmp_path, record).all("img") == []


def test_a_file_that_is_no_picture_is_not_shown_as_one(tmp_path):
    (tmp_path / "fog.jpg").write_text("<svg onload=alert(1)>")
    assert data_uri(tmp_path, "fog.jpg") is None
    assert data_uri(tmp_path, None) is None
    assert data_uri(tmp_path, "\0") is None


def test_a_missing_picture_leaves_a_place_for_it(tmp_path):
    record = fake_record()
    fake_pictures(tmp_path, record)
    (tmp_path / f"{record['id']}.pictures" / "fog-prediction.png").unlink()
    page = Page(write_report([tmp_path], tmp_path / "out")[0].read_text())
    # Four conditions and one worst frame, each with image, truth and prediction, less one.
    assert len(page.all("img")) == 14
    assert page.words.count("no picture") == 1


def test_a_large_picture_is_made_smaller(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (800, 1600, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.jpg", quality=95)
    uri = data_uri(tmp_path, "large.jpg")
    assert uri is not None
    assert len(uri) < (tmp_path / "large.jpg").stat().st_size / 2


def test_a_prediction_of_another_frame_is_not_compared(tmp_path):
    source, ours = fake_record("source"), fake_record("bestta")
    ours["pictures"]["conditions"][2]["frame"] = "another"
    page = written(tmp_path, source, ours, pictures=True)
    assert page.words.count("not recorded") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"embeddings": None},
        {"pictures": {"conditions": [], "worst": []}},
        {"source_scores": []},
        {"traces": {"step": []}},
        {"traces": {}},
        {"skipped": [{"name": "a", "reason": "torn"}]},
        {"frames": {"position": [], "block": [], "score": []}, "traces": {}},
    ],
    ids=["embeddings", "pictures", "source_scores", "no steps", "traces", "skipped", "frames"],
)
def test_a_record_without_extras_gives_a_page_without_their_figures(tmp_path, changes):
    page = written(tmp_path, fake_record(**changes), pictures="pictures" not in changes)
    gone = {
        "embeddings": {"embeddings", "distances"},
        "pictures": {"pictures", "worst"},
        "source_scores": {"forgetting"},
        "traces": {"traces", "correlations"},
    }
    absent = set().union(*(gone.get(name, set()) for name in changes))
    every = set(map(str, full_figures()))
    assert page.figures == every - absent
    assert page.wrong == []


def full_figures() -> set[str]:
    return {
        "over-time", "cost", "pictures", "worst", "forgetting", "traces", "correlations",
        "distances", "embeddings",
    }  # fmt: skip


def test_full_records_give_every_figure_with_a_caption(full):
    _, page = full
    assert page.figures == full_figures()
    assert len(page.all("figcaption")) == len(page.all("figure"))
    drawings = [a for a in page.all("svg") if a.get("aria-hidden") != "true"]
    assert all(a.get("role") == "img" and a.get("aria-label") for a in drawings if "class" in a)


def test_a_record_without_any_score_still_gives_a_page(tmp_path):
    record = scored("bestta", None)
    record["frames"]["score"] = [None] * len(record["frames"]["score"])
    record["cost"]["call_ms"] = {"median": None, "p95": None}
    record["cost"]["over_model_bytes"] = None
    page = written(tmp_path, record)
    assert "no block could be scored" in page.words
    assert not {"over-time", "cost"} & page.figures
    assert not re.search(r"\b(nan|inf|None)\b", page.words.split("Settings")[0])


def test_one_block_needs_no_course_over_time(tmp_path):
    record = fake_record(rounds=1, conditions=("fog",))
    record["pictures"] = {"conditions": [], "worst": []}
    assert "over-time" not in written(tmp_path, record).figures


def test_no_coordinate_is_anything_but_a_number(full):
    _, page = full
    names = ("d", "x", "y", "cx", "cy", "r", "width", "height", "points", "transform", "viewbox")
    for tag, attributes in page.elements:
        for name in names:
            assert not re.search(
                r"nan|inf|None|e", (attributes.get(name) or "").replace("rotate", "")
            ), (
                tag,
                name,
            )


def sweep(rows: int) -> list[dict[str, Any]]:
    """A study of ρ, whose scores rise with it."""
    records = []
    for n in range(rows):
        rho = n / (rows - 1)
        study = {"name": "rho", "row": "", "marks": {"rho": rho}}
        record = scored("bestta", 40.0 + n, label=f"ρ = {rho:.2f}", study=study)
        record["id"] += str(n)
        records.append(record)
    return records


def test_a_study_is_shown_as_its_rows_and_then_as_everything_else_is(tmp_path):
    page = written(tmp_path, *sweep(3), pictures=True)
    assert page.all("figure")[0]["class"] == "study"
    assert page.figures == full_figures() | {"study"}
    assert "Best of 3 rows: ρ = 1.0, with 42.0\u00a0% mean mIoU" in page.words


def test_the_strong_line_is_our_method_and_no_variant_of_it(tmp_path):
    records = [*sweep(3), fake_record("source"), fake_record("bestta")]
    found = groups([Loaded(Path(f"{record['id']}.json"), record) for record in records])
    assert [group.study for group in found] == ["rho", None]
    looks = _looks(found)
    assert [label for label, style in looks.items() if style.strong] == ["BESTTA"]
    assert not any(style.strong for style in _looks(found[:1]).values())
    # Nor is any row of an ablation set off from the others, for all are ours.
    assert all(
        a.get("class") != "ours" for a in written(tmp_path, *sweep(3), pictures=True).all("tr")
    )


def variants() -> list[dict[str, Any]]:
    """Our method between two variants of it."""
    made = [fake_record("source")]
    for n, label in enumerate(("BESTTA small", "BESTTA", "BESTTA wide")):
        made.append(fake_record("bestta", label=label, settings={"n": n}, id=f"variant-{n}"))
    return made


def test_of_several_variants_the_plain_one_is_strong_and_the_others_are_not(tmp_path):
    def strong(*records: dict[str, Any]) -> list[str]:
        looks = _looks(groups([Loaded(Path("x.json"), record) for record in records]))
        return [label for label, style in looks.items() if style.strong]

    source, small, plain, wide = variants()
    assert strong(source, small, plain, wide) == ["BESTTA"]
    assert strong(source, small, wide) == ["BESTTA wide"]
    written(tmp_path, source, small, plain, wide)
    text = (tmp_path / "out" / "report.html").read_text()
    ours = re.findall(r"<tr class=.ours.><th[^>]*>(.*?)<", text)
    assert set(ours) == {"BESTTA"}
    opened = re.findall(r"<details open><summary>(.*?)<", text)
    assert set(opened) == {"BESTTA"}


def test_a_mean_behind_many_columns_comes_before_them_on_the_page_alone():
    def headings(blocks: int) -> list[str]:
        names = tuple(f"c{chr(97 + n)}" for n in range(blocks))
        (group,) = groups(
            [Loaded(Path("x.json"), fake_record(m, rounds=1, conditions=names)) for m in ("tent",)]
        )
        table = tables([group])[0]
        assert [c.title for c in table.columns][3:5] == ["ca", "cb"]
        html = table_html(table)
        return re.findall(r'<th scope="col" class="number"[^>]*>(.*?)</th>', html)

    assert headings(12)[3:5] == ["ca", "cb"]
    assert headings(13)[3:6] == ["Mean", "ca", "cb"]


def test_a_trace_of_one_value_is_a_dot_beside_lines_and_no_plot_alone():
    def only(method: str, values: list[float | None]) -> dict[str, Any]:
        return fake_record(method, traces={"step": [0, 1, 2], "cross_entropy": values})

    assert figures_inside.traces(shown(only("bestta", [None, 1.0, None]))) is None
    figure = figures_inside.traces(
        shown(only("tent", [1.0, 2.0, 3.0]), only("bestta", [None, 1.0, None]))
    )
    assert figure is not None
    assert "<h4>Cross-entropy</h4>" in figure.body
    drawing = figure.body.partition('class="panels')[2]
    assert drawing.count('class="mark') == 1


def test_conditions_are_written_without_underscores_in_figures(tmp_path):
    conditions = ("gaussian_noise", "motion_blur")
    page = written(tmp_path, fake_record("bestta", conditions=conditions), pictures=True)
    drawn = [text for where, text in page.texts if where in ("text", "title", "th", "figcaption")]
    assert any("motion blur" in text for text in drawn)
    assert not any("motion_blur" in text for text in drawn)
    assert not any("motion_blur" in (image["alt"] or "") for image in page.all("img"))


def test_a_frame_that_all_conditions_share_is_named_once(tmp_path):
    record = fake_record("bestta")
    for entry in record["pictures"]["conditions"]:
        entry["frame"] = "streets/val/00007"
    fake_pictures(tmp_path, record)
    (group,) = groups(read_records([tmp_path]))
    figure = conditions_grid([Shown(group.entries[0], svg.Style(1))])
    assert figure is not None
    assert figure.caption.count("streets/val/00007") == 1


def test_a_long_ablation_has_no_figure_in_which_its_rows_would_look_alike(tmp_path):
    page = written(tmp_path, *sweep(9), pictures=True)
    crowded = {"over-time", "cost", "pictures", "worst", "traces"}
    assert page.figures == (full_figures() | {"study"}) - crowded
    assert page.all("img") == []


@pytest.mark.parametrize(
    ("name", "part", "empty", "figures"),
    [
        ("correlation", "traces", {}, {"correlations", "traces"}),
        ("forgetting", "source_scores", [], {"forgetting"}),
        ("embeddings", "embeddings", None, {"embeddings", "distances"}),
    ],
)
def test_a_study_shows_what_it_was_made_for(tmp_path, name, part, empty, figures):
    study = {"name": name, "row": "", "marks": {}}
    record = fake_record("alpha_bn", study=study)
    shown = written(tmp_path, record)
    assert figures | {"study"} <= shown.figures
    gone = written(tmp_path, record | {part: empty})
    assert gone.figures == shown.figures - figures


def test_a_study_of_many_methods_has_the_figures_of_a_plain_group(tmp_path):
    methods = (*METHODS, "eata", "sar", "rotta", "memo")
    study = {"name": "batch-sizes", "row": "", "marks": {"batch": 1}}
    page = written(tmp_path, *(fake_record(m, study=study) for m in methods), pictures=True)
    assert page.figures == full_figures() | {"study"}


def test_records_of_earlier_versions_give_the_same_figures(tmp_path):
    page = written(tmp_path, *(older(fake_record(m)) for m in METHODS), pictures=True)
    assert page.figures == full_figures()
    assert "None" not in page.words.split("Settings")[0]


def test_wrong_classes_are_marked(tmp_path):
    record = fake_record(task="classification")
    for n, entry in enumerate(record["pictures"]["conditions"]):
        entry.update(truth=None, prediction=None, label="cat", predicted="dog" if n == 1 else "cat")
    record["pictures"]["worst"] = []
    page = written(tmp_path, record, pictures=True)
    assert page.words.count("✗ wrong") == 1


# --- tables ---------------------------------------------------------------------------------


def test_published_columns_are_set_apart_and_measured_ones_are_not(full):
    _, page = full
    marked = [a for a in page.all("th") if "published" in (a.get("class") or "")]
    every = tables(groups(read_records([full[0]])))
    assert len(marked) == sum(column.published for table in every for column in table.columns) > 0


def test_best_and_second_best_are_marked_as_the_tables_say(full):
    _, page = full
    every = tables(groups(read_records([full[0]])))
    ranks = [cell.rank for table in every for row in table.rows for cell in row.cells]
    for rank, name in ((1, "best"), (2, "second")):
        marked = [a for a in page.all("td") if name in (a.get("class") or "").split()]
        assert len(marked) == ranks.count(rank) > 0


def test_cells_sort_by_full_values(full):
    _, page = full
    values = [float(a["data-value"]) for a in page.all("td") if a.get("data-value")]
    every = tables(groups(read_records([full[0]])))
    # In another order: the page has the mean of many columns before them.
    assert sorted(values) == sorted(
        cell.value
        for table in every
        for row in table.rows
        for cell in row.cells
        if cell.value is not None
    )


def test_a_method_told_of_changes_is_starred(full):
    _, page = full
    assert "TENT_RESET*" in page.words
    assert "TENT*" not in page.words


# --- words ----------------------------------------------------------------------------------


def said(*records: dict[str, Any]) -> str:
    return " ".join(headline(shown(*records)))


def test_the_headline_names_the_best_method_and_its_gain():
    words = said(scored("source", 40.0), scored("tent", 42.0), scored("bestta", 45.5))
    assert words.startswith(
        "BESTTA has the highest mean mIoU, 45.5\u00a0%: 5.5 points above the source"
    )
    assert "worse" not in words


def test_the_headline_admits_that_the_source_wins():
    words = said(scored("source", 46.0), scored("tent", 42.0), scored("bestta", 45.5))
    assert words.startswith("No method improves on the source model: left alone it has 46.0\u00a0%")
    assert "0.5 points better than the next, BESTTA" in words


def test_the_headline_admits_that_a_rival_wins():
    words = said(scored("source", 40.0), scored("tent", 46.0), scored("bestta", 39.0))
    assert words.startswith("TENT has the highest mean mIoU, 46.0\u00a0%")
    assert "BESTTA comes 3rd of 3, 7.0 points behind and 1.0 points worse than the source" in words


def test_the_headline_names_methods_that_adapting_makes_worse():
    words = said(scored("source", 40.0), scored("tent", 30.0), scored("bestta", 41.0))
    assert "TENT (10.0) does worse than no adaptation" in words


def test_the_headline_calls_a_tie_a_tie():
    words = said(scored("source", 40.0), scored("tent", 45.02), scored("bestta", 45.0))
    assert words.startswith("TENT and BESTTA share the highest mean mIoU, 45.0\u00a0%")
    words = said(scored("source", 45.0), scored("bestta", 45.04))
    assert words.startswith("No method improves on the source model")
    assert "and so has BESTTA" in words


def test_lower_error_is_better_in_the_headline():
    kind = {"task": "classification"}
    words = said(scored("source", 43.0, **kind), scored("bestta", 20.0, **kind))
    assert words.startswith(
        "BESTTA has the lowest mean error, 20.0\u00a0%: 23.0 points below the source"
    )


def test_one_method_alone_is_compared_with_nothing():
    assert "nothing to compare it with" in said(scored("bestta", 45.0))


def test_the_headline_tells_the_price():
    ours, source = scored("bestta", 45.0), scored("source", 40.0)
    ours["cost"]["call_ms"]["median"], ours["cost"]["predict_ms"]["median"] = 15.0, 10.0
    ours["cost"]["over_model_bytes"] = 90_000_000
    ours["parameters"] = {"trained": 512, "model": 1_024_000}
    words = said(source, ours)
    assert (
        "15.0 ms (median), 1.5 times the plain model's forward on the same images, and 90 MB"
        in words
    )
    assert "trains 512 parameters, 0.05\u00a0% of the model's" in words


def test_a_lead_within_the_spread_of_seeds_may_be_chance():
    runs = [scored("bestta", 45.0 + 2 * seed, seed=seed) for seed in (0, 1)]
    runs += [scored("tent", 45.0 + 2 * seed, seed=seed) for seed in (0, 1)]
    for run in runs[2:]:
        run["score"] -= 0.5
    # Two seeds 2 apart: the sample standard deviation is √2.
    assert "smaller than the spread over seeds (± 1.4 points)" in said(*runs)
    assert "one seed" in said(runs[0], runs[2])


def test_gains_in_the_headline_are_over_the_seeds_that_both_have():
    # The source with seed 0 alone has 40; BESTTA has 42 there, and 50 with seed 1: not 6 points.
    source = scored("source", 40.0)
    ours = [scored("bestta", 42.0, seed=0), scored("bestta", 50.0, seed=1)]
    words = said(source, *ours)
    assert "46.0\u00a0%: 2.0 points above the source" in words
    assert "differences are over those that both sides have" in words
    # A rival of seeds 0 and 1 with 45 and 49: 47 on the whole, 1 above ours where both have seeds.
    rival = [scored("tent", 45.0, seed=0), scored("tent", 49.0, seed=1)]
    assert "BESTTA comes 2nd of 3, 1.0 points behind" in said(source, *ours, *rival)
    apart = said(source, scored("bestta", 45.0, seed=1))
    assert "points above" not in apart
    assert "was run with other seeds" in apart


def test_rows_of_one_seed_are_named_beside_rows_of_several():
    several = [scored("bestta", 45.0 + seed, seed=seed) for seed in (0, 1)]
    several += [scored("tent", 35.0 + seed, seed=seed) for seed in (0, 1)]
    assert "one seed" not in said(*several)
    words = said(*several, scored("source", 30.0), scored("cotta", 60.0), scored("eata", 59.0))
    assert "Some were run with one seed: COTTA, EATA and SOURCE." in words
    assert "All were" not in words


def test_the_headline_follows_methods_through_the_rounds():
    ours, tent = fake_record("bestta", level=50), fake_record("tent", level=40)
    ours["rounds"], tent["rounds"] = [49.0, 50.0, 51.5], [43.0, 41.0, 36.0]
    words = said(ours, tent)
    assert "From the first round to the last, BESTTA gains 2.5 points and TENT loses 7.0" in words


def test_a_study_tells_what_the_choice_is_worth():
    marks = [{"style": True, "l2": False}, {"style": True, "l2": True}]
    rows = [
        scored("bestta", 40.0 + 3 * n, study={"name": "losses", "row": f"({r})", "marks": marks[n]})
        for n, r in enumerate("ab")
    ]
    words = " ".join(study_headline(shown(*rows)))
    assert "(b) style + l2, with 43.0\u00a0%" in words
    assert "worth 3.0 points" in words


def test_rows_that_share_a_number_are_told_apart_by_their_method():
    study = {"name": "batch-sizes", "row": "", "marks": {"batch": 2}}
    rows = [scored("tent", 40.0, study=study), scored("bestta", 45.0, study=study)]
    words = study_headline(shown(*rows))[0]
    assert words.startswith("Best of 2 rows: BESTTA, batch = 2, with 45.0\u00a0%")
    assert "The last, TENT, batch = 2, has 40.0\u00a0%" in words
    figure = figures_scores.study(shown(*rows))
    assert figure is not None
    assert "Best: BESTTA, batch = 2, 45.0\u00a0%" in figure.caption
    alone = [scored("tent", 40.0, study=study | {"marks": {"batch": n}}) for n in (1, 2)]
    assert study_headline(shown(*alone))[0].startswith("Best of 2 rows: batch = 1 and batch = 2")


def test_every_second_frame_is_told_in_words(tmp_path):
    record = fake_record()
    record["stream"] = record["stream"] | {"every": 2}
    assert "60 (every 2nd frame of each block)" in written(tmp_path, record).inside("dd")


# --- drawing --------------------------------------------------------------------------------


def circles(drawing: str) -> list[dict[str, float]]:
    page = Page(drawing)
    return [{k: float(c[k] or 0) for k in ("cx", "cy", "r")} for c in page.all("circle")]


def test_four_times_the_memory_is_four_times_the_area():
    records = [scored(m, 40.0) for m in ("source", "bestta")]
    for record, memory, time in zip(records, (100e6, 400e6), (10.0, 20.0), strict=True):
        record["cost"]["over_model_bytes"] = memory
        record["cost"]["call_ms"]["median"] = time
    figure = figures_scores.bubbles(shown(*records))
    assert figure is not None
    large, small = circles(figure.body)[:2]
    assert large["r"] / small["r"] == pytest.approx(2, rel=0.02)
    assert large["cx"] > small["cx"]


def test_times_of_the_rarer_machine_are_left_out_and_named():
    records = [scored(m, 40.0) for m in ("source", "tent", "bestta")]
    machine = records[1]["provenance"]["machine"]
    machine |= {"device": "cuda", "gpu": "A100"}
    figure = figures_scores.bubbles(shown(*records))
    assert figure is not None
    # One for a screen and one for a phone.
    assert len(circles(figure.body)) == 2 * 2
    assert "TENT" not in figure.body
    assert "(Test CPU (x86_64, 2 cores, 1 thread)): TENT, A100 on Test CPU" in figure.caption
    machine["device"] = "cpu"
    figure = figures_scores.bubbles(shown(*records))
    assert figure is not None
    assert len(circles(figure.body)) == 2 * 3
    assert "Left out" not in figure.caption


def test_a_time_that_includes_looking_is_not_drawn_beside_one_that_does_not():
    records = [scored(m, 40.0) for m in ("source", "tent", "bestta")]
    for looked, drawn in ((1, 2), (3, 3)):
        for record in records[:looked]:
            record["cost"]["looked"] = True
        figure = figures_scores.bubbles(shown(*records))
        assert figure is not None
        assert len(circles(figure.body)) == 2 * drawn
        assert ("Left out" in figure.caption) is (drawn < 3)
        assert ("include looking at features" in figure.caption) is (looked == 3)


@pytest.mark.parametrize("draw", [figures_scores.forgetting, figures_inside.distances])
def test_other_source_images_have_no_place_in_a_figure_that_compares(draw):
    records = [fake_record(m) for m in ("source", "tent", "bestta")]
    everybody = draw(shown(*records))
    assert "TENT" in everybody.body
    assert "Left out" not in everybody.caption
    records[1]["source_set"] = {"set": "camvid", "split": None, "images": 9, "names": "6" * 16}
    figure = draw(shown(*records))
    assert "TENT" not in figure.body
    assert "BESTTA" in figure.body
    assert "do not compare: TENT (camvid, 9 images)." in figure.caption


def test_forgetting_is_not_said_to_be_measured_without_adapting():
    figure = figures_scores.forgetting(shown(fake_record()))
    assert figure is not None
    assert "without adapting" not in figure.caption
    assert "undone" in figure.caption


def test_thinned_traces_are_told_under_their_figure():
    figure = figures_inside.traces(shown(fake_record("tent", traced_every=4), fake_record()))
    assert figure is not None
    assert figure.caption.endswith("The traces hold every 4th step (TENT).")
    figure = figures_inside.traces(shown(fake_record("tent"), fake_record()))
    assert figure is not None
    assert "step" not in figure.caption


def test_the_axis_of_time_is_logarithmic_only_where_times_are_far_apart():
    records = [scored(m, 40.0) for m in ("source", "bestta")]
    for slowest, word in ((99.0, False), (101.0, True)):
        records[0]["cost"]["call_ms"]["median"] = 10.0
        records[1]["cost"]["call_ms"]["median"] = slowest
        figure = figures_scores.bubbles(shown(*records))
        assert figure is not None
        assert ("logarithmic" in figure.body) is word


def test_the_best_place_of_errors_is_at_the_bottom():
    figure = figures_scores.bubbles(shown(scored("bestta", 40.0, task="classification")))
    assert figure is not None
    assert "at the bottom on the left" in figure.caption


def test_a_score_half_way_is_drawn_half_way():
    record = fake_record(rounds=1, conditions=("a", "b", "c"))
    for block, score in zip(record["blocks"], (30.0, 40.0, 50.0), strict=True):
        block["score"] = score
    figure = figures_scores.over_time(shown(record))
    assert figure is not None
    path = next(a["d"] for a in Page(figure.body).all("path") if "line c" in (a.get("class") or ""))
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", str(path))[1:]]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 == pytest.approx((x1 + x3) / 2, abs=0.1)
    assert y2 == pytest.approx((y1 + y3) / 2, abs=0.1)
    assert y1 > y3


def test_a_block_without_a_score_breaks_the_line():
    assert svg.line_path([(0, 1), (1, None), (2, math.nan), (3, 2), (4, 2)]) == "M0 1M3 2L4 2"


def test_running_means_pass_over_what_is_missing():
    # 240 steps: a window of 3 to either side. Ones and twos in turn, and a gap.
    values: list[float | None] = [1.0 + n % 2 for n in range(240)]
    values[100:103] = [None, None, None]
    record = fake_record(traces={"step": list(range(240)), "style": values})
    at, smooth = figures_inside._smoothed(record, "style")
    assert (at[0], at[-1]) == (0, 239)
    assert smooth[0] == pytest.approx((1 + 2 + 1 + 2) / 4)
    assert len(at) > 100
    for place, mean in zip(map(int, at), smooth, strict=True):
        window = [v for v in values[max(place - 3, 0) : place + 4] if v is not None]
        assert mean == pytest.approx(sum(window) / len(window))
    assert figures_inside._smoothed(fake_record(traces={}), "style") == ([], [])


def test_histograms_of_different_numbers_of_images_have_the_same_height():
    one = figures_inside._histogram([[1, 2, 1], [10, 20, 10], []], "label", "hint")
    paths = [a["d"] for a in Page(one).all("path") if "histogram" in (a.get("class") or "")]
    assert len(paths) == 2
    assert paths[0] == paths[1]


def test_fourteen_methods_all_look_different():
    looks = styles((name.upper(), name) for name in ("source", *map(str, range(12)), "bestta"))
    assert len({(s.colour, s.dash, s.marker) for s in looks.values()}) == 14
    assert looks["BESTTA"].strong
    assert sum(s.strong for s in looks.values()) == 1


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 100, 5, [0, 20, 40, 60, 80, 100]),
        (0.031, 0.079, 5, [0.04, 0.05, 0.06, 0.07]),
        (-1.02, 1.02, 4, [-1, 0, 1]),
    ],
)
def test_ticks_are_round(low, high, count, expected):
    assert svg.Scale(low, high, 0, 1).ticks(count) == pytest.approx(expected)


def test_ticks_of_a_logarithmic_scale_are_evenly_apart_and_inside():
    scale = svg.Scale(8, 300, 0, 100, log=True)
    assert scale.ticks() == pytest.approx([10, 30, 100, 300])
    assert scale(8) == pytest.approx(0)
    # Half way on a logarithmic scale is the geometric mean.
    assert scale(math.sqrt(8 * 300)) == pytest.approx(50)


def test_equal_and_missing_values_still_have_a_scale():
    for values in ([], [None], [math.nan], [5.0], [0.0, 0.0], [-3.0, -3.0]):
        scale = svg.fit(values, 0, 100)
        assert scale.low < scale.high
        assert len(scale.ticks()) > 1


def test_ticks_tell_their_neighbours_apart():
    ticks = [0.04, 0.05, 0.06]
    assert [svg.tick_text(v, ticks) for v in ticks] == ["0.04", "0.05", "0.06"]
    assert svg.tick_text(-20.0, [-20.0, 0.0]) == "−20"


@given(st.floats(-5000, 5000))
def test_a_short_coordinate_is_within_half_a_tenth(value):
    assert float(svg.short(value)) == pytest.approx(value, abs=0.0501)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_names_beside_lines_keep_their_distance_and_their_order(wanted):
    placed = svg.apart(wanted, 12, 0, 100)
    ordered = sorted(range(len(wanted)), key=lambda n: wanted[n])
    assert all(placed[b] - placed[a] >= 12 - 1e-6 for a, b in pairwise(ordered))
    assert min(placed) >= -1e-6
    assert max(placed) <= 100 + 1e-6


def test_names_that_have_room_stay_where_they_are():
    assert svg.apart([10, 50, 90], 12, 0, 100) == [10, 50, 90]
    assert svg.apart([50, 50], 12, 0, 100) == [44, 56]


def test_labels_of_discs_cover_neither_discs_nor_each_other():
    discs = [(100.0, 100.0, 20.0), (150.0, 105.0, 5.0), (160.0, 100.0, 4.0), (380.0, 40.0, 10.0)]
    texts = ["first method", "second", "third", "a method at the edge"]
    places = svg.place_labels(discs, texts, (0, 0, 400, 200))
    boxes = [
        (x, y - svg.FONT + 2, x + svg.text_width(t), y + 2)
        for (x, y), t in zip(places, texts, strict=True)
    ]
    for n, box in enumerate(boxes):
        assert box[0] >= 0
        assert box[2] <= 400
        assert all(svg.overlap(box, other) == 0 for other in boxes[n + 1 :])
        assert all(svg.overlap(box, (x - r, y - r, x + r, y + r)) == 0 for x, y, r in discs)


def test_bins_that_nobody_has_are_not_drawn():
    assert figures_inside._occupied([[0, 0, 3, 1, 0], [0, 2, 0, 0, 0], []]) == (1, 3)
    assert figures_inside._occupied([[0, 0], []]) == (0, 0)


def test_heights_of_histograms_are_square_roots():
    one = figures_inside._histogram([[1, 9], [], []], "label", "hint")
    (path,) = [a["d"] for a in Page(one).all("path") if "histogram" in (a.get("class") or "")]
    low, high = (54 - float(v) for v in re.findall(r"V([0-9.]+)", path)[:2])
    assert high == pytest.approx(3 * low, rel=0.02)  # nine times as many
