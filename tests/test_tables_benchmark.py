"""`benchmarks/tables.py`: what the page of results lacks is run, kept and written, and no more."""

from __future__ import annotations

import json
import shlex

import pytest

import scripts
from bestta.benchmark.config import read_protocol, read_study

PROTOCOL = """
set: streets
split: val
size: [32, 32]
images: 1
conditions: [fog]
model: streets
"""


@pytest.fixture(scope="module")
def tables():
    return scripts.load("tables")


def test_every_command_of_the_page_names_a_protocol_and_a_study_there_are(tables):
    page = scripts.load("results_page")
    data = {"cityscapes": "A", "cifar10": "B"}
    for section in page.SECTIONS:
        for command in section.commands:
            words = tables.arguments(command, data, 1, scripts.ROOT)
            assert {"CITYSCAPES", "CIFAR-10"}.isdisjoint(words)
            assert words.count("--jobs") == 1
            assert words[1:4] == ["-m", "bestta", "bench"]
            read_protocol(words[4])
            read_study(words[words.index("--study") + 1])


def test_a_command_whose_data_is_not_named_is_left_out_and_told(tables, tmp_path, capfd):
    command = "bestta bench weather-continual --data CITYSCAPES --study methods"
    data = {"cityscapes": None, "cifar10": "B"}
    assert not tables.fill("weather", [command], data, jobs=1, work=tmp_path, measured=tmp_path)
    assert "its data set is not named" in capfd.readouterr().out


def test_what_was_run_is_kept_and_what_was_kept_is_not_run_again(tables, tmp_path, capfd):
    protocol = tmp_path / "tiny.yaml"
    protocol.write_text(PROTOCOL)
    place, again = (tmp_path / name for name in ("measured", "work again"))
    methods = "--method source --method bn_stats"
    first = f"bestta bench {shlex.quote(str(protocol))} --method source --jobs 2"
    whole = f"bestta bench {shlex.quote(str(protocol))} {methods} --jobs 2"
    how = {"jobs": 1, "measured": place}
    assert tables.fill("tiny", [first], {}, work=tmp_path / "work", **how)
    (kept,) = (place / "tiny").glob("*.json")
    record = json.loads(kept.read_text())
    assert record["method"] == "source"
    assert not record["pictures"]  # as `keep_records` leaves it

    # Elsewhere, as after a fresh clone: the row that is in the repository stays as it is.
    changed = json.dumps({**record, "score": 12.5})
    kept.write_text(changed)
    capfd.readouterr()
    assert tables.fill("tiny", [whole], {}, work=again, **how)
    assert kept.read_text() == changed
    assert len(list((place / "tiny").glob("*.json"))) == 2
    told = capfd.readouterr().err
    assert "BN Stats Adapt: starting" in told
    assert "Source: starting" not in told


STUDY = """
variants:
  - {method: source, label: Source}
  - {method: alpha_bn, label: α-BN, settings: {prior: 2.0}}
"""


def test_a_row_of_a_study_that_has_its_record_is_not_run_again_whatever_settings_came_since(
    tables, tmp_path, capfd
):
    protocol, study = tmp_path / "tiny.yaml", tmp_path / "two.yaml"
    protocol.write_text(PROTOCOL)
    study.write_text(STUDY)
    command = shlex.join(["bestta", "bench", str(protocol), "--study", str(study)])
    how = {"jobs": 1, "measured": tmp_path / "measured"}
    assert tables.fill("tiny", [f"{command} --only Source"], {}, work=tmp_path / "work", **how)
    (kept,) = (tmp_path / "measured" / "tiny").glob("*.json")
    # A setting that is new to the method gives its runs another name; the record keeps its own.
    kept.rename(kept.with_name("tiny-source-s0-00000000.json"))
    capfd.readouterr()
    assert tables.fill("tiny", [command], {}, work=tmp_path / "again", **how)
    told = capfd.readouterr().err
    assert "α-BN: starting" in told
    assert "Source: starting" not in told
    assert len(list(kept.parent.glob("*.json"))) == 2

    study.write_text(STUDY.replace("2.0", "3.0"))  # as another setting was chosen
    assert tables.lacking(shlex.split(command), kept.parent) == ["α-BN"]
    seeds = shlex.split(f"{command} --seeds 2")
    assert tables.lacking(seeds, kept.parent) == ["Source", "α-BN"]
    assert tables.lacking([*seeds, "--only", "Source"], kept.parent) == ["Source"]


def test_a_command_that_names_rows_is_asked_for_those_of_them_that_lack_a_record(tables):
    words = ["bench", "--only", "one", "--seeds", "3", "--only", "two"]
    assert tables.asking_for(["two"], words) == ["bench", "--seeds", "3", "--only", "two"]
    assert tables.asking_for(None, words) == words


def test_a_command_that_fails_is_no_success(tables, tmp_path):
    command = "bestta bench no-such-protocol"
    how = {"jobs": 1, "measured": tmp_path / "measured"}
    assert not tables.fill("tiny", [command], {}, work=tmp_path / "work", **how)
    assert not (tmp_path / "measured").exists()
