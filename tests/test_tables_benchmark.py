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


def test_a_command_that_fails_is_no_success(tables, tmp_path):
    command = "bestta bench no-such-protocol"
    how = {"jobs": 1, "measured": tmp_path / "measured"}
    assert not tables.fill("tiny", [command], {}, work=tmp_path / "work", **how)
    assert not (tmp_path / "measured").exists()
