"""The benchmark that holds calibration against a search with labels, and its table."""

from __future__ import annotations

import json

import pytest
from torch import nn

from nets import Segmenter, TokenClassifier
from scripts import load

calibration = load("calibration")
tables = load("calibration_table")


class Stub:
    name, task, train, test = "stub", "segmentation", range(30), range(4)
    model = Segmenter()


class Profile:
    layers = ("one", "two")
    settings = {"bestta": {"rho": 0.7}}  # noqa: RUF012


def summed(chosen: float, best: float = 60.0, source: float = 50.0):
    scores = {"source": source, "one": best, "two": 30.0, "calibrated layers": chosen}
    rows = {
        "fog": {name: score - 10 for name, score in scores.items()},
        "rain": {name: score + 10 for name, score in scores.items()},
    }
    for row in rows.values():
        row["calibrated"] = row["calibrated, guarded"] = row["calibrated layers"]
    report = {"seconds": 90.0, "sure": None}
    return calibration.summary(Stub, rows, ["one", "two"], Profile, report)


@pytest.mark.parametrize(
    ("chosen", "share", "met"),
    [
        (60.0, 100.0, True),
        (59.0, 90.0, True),  # nine tenths of ten points
        (58.9, 89.0, False),
        (62.0, 120.0, True),
    ],
)
def test_the_bar_is_nine_tenths_of_the_best_single_layers_gain(chosen, share, met):
    done = summed(chosen)
    assert done["best_single"] == "one"
    assert done["share_percent"] == pytest.approx(share)
    assert done["met"] is met


def test_three_tenths_of_a_point_less_will_do_where_there_is_little_to_gain():
    assert summed(50.2, best=50.5)["met"]
    assert not summed(50.1, best=50.5)["met"]
    assert summed(50.0, best=49.0)["share_percent"] is None
    assert summed(50.0, best=49.0)["met"]


def test_the_norm_of_a_network_is_told_from_its_modules():
    assert calibration.norm(Segmenter()) == "batch norm"
    assert calibration.norm(TokenClassifier()) == "layer norm"
    assert calibration.norm(nn.GroupNorm(1, 2)) == "group norm"


def test_the_table_says_what_was_chosen_and_whether_the_bar_was_met():
    record = {"models": [summed(60.0), summed(55.0)], "provenance": {"commit": "abc1234"}}
    page = tables.written("Before\n<!-- proof -->\nold\n<!-- /proof -->\nafter", record)
    assert "old" not in page
    assert page.startswith("Before\n")
    assert page.endswith("after")
    assert "| stub | batch norm | 50.0 | `one` 60.0 | `one`, `two` 60.0 | 100 % |" in page
    assert "Met by 1 of 2" in page
    assert "abc1234" in page


def test_a_page_without_a_place_for_the_table_is_an_error():
    with pytest.raises(ValueError, match="no place"):
        tables.written("nothing", {"models": [], "provenance": {"commit": ""}})


def test_the_docs_hold_the_figures_of_the_record():
    if not tables.RECORD.exists():
        pytest.skip("nothing recorded yet")
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.written(page, json.loads(tables.RECORD.read_text(encoding="utf-8"))) == page
