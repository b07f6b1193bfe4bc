"""`benchmarks/cost_quality.py`: what its table says of records, on made-up ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import drive_here
from bestta.benchmark import sweep
from fakes import fake_record
from scripts import load

cost_quality = load("cost_quality")

# score, adapted share, median time over the plain forward
FIGURES: dict[str, tuple[float, float, float | None]] = {
    "source": (40.0, 0.0, 1.0),
    "bestta": (50.0, 1.0, 1.4),
    "bestta-still": (44.0, 0.0, 1.02),
    "bestta-auto": (49.6, 0.05, 1.01),
    "bestta-bf16": (49.97, 1.0, 1.2),
    "bestta-half": (50.0, 1.0, 1.3),
}


def made_up(**changed: tuple[float, float, float | None]) -> dict[str, dict[str, Any]]:
    """Records with the figures above; ``changed`` names a method with _ for -."""
    figures = FIGURES | {name.replace("_", "-"): value for name, value in changed.items()}
    records = {}
    for name, (score, share, ratio) in figures.items():
        record = fake_record(name, score=score)
        record["events"] = record["events"] | {"adapted_share": share}
        record["cost"] = record["cost"] | {"ratio": ratio}
        records[name] = record
    return records


def row_of(records: dict[str, dict[str, Any]], name: str) -> Any:
    return next(row for row in cost_quality.rows(records) if row.method == name)


def test_shares_are_of_the_gain_over_the_source() -> None:
    found = {row.method: row.kept_percent for row in cost_quality.rows(made_up())}
    # By hand: the gain is 50 - 40 = 10 points; auto has 9.6 of them, γ = 0 has 4.
    assert found == pytest.approx(
        {
            "source": 0.0,
            "bestta": 100.0,
            "bestta-still": 40.0,
            "bestta-auto": 96.0,
            "bestta-bf16": 99.7,
            "bestta-half": 100.0,
        }
    )


def test_autos_few_dear_frames_count_in_its_time() -> None:
    row = row_of(made_up(), "bestta-auto")
    # By hand: 0.05 * 1.4 + 0.95 * 1.02 = 0.07 + 0.969.
    assert row.time_composed == pytest.approx(1.039)
    assert row.time_median == 1.01


def test_only_auto_has_a_time_that_is_put_together() -> None:
    table = cost_quality.rows(made_up())
    assert [row.method for row in table if row.time_composed is not None] == ["bestta-auto"]


def test_a_mean_time_above_the_bar_is_not_met_whatever_the_other_rows_say() -> None:
    records = made_up()
    records["bestta-auto"]["cost"]["mean_ratio"] = 1.2
    table = cost_quality.rows(records)
    assert "1.05x the time: NOT MET (" in cost_quality.verdicts(table)[0]
    assert "1.20x" in cost_quality.printed_table(table)


@pytest.mark.parametrize(
    ("auto", "word"),
    [
        ((49.6, 0.05, 1.01), "met"),  # 96 %, 1.039
        ((49.6, 0.2, 1.01), "NOT MET"),  # 0.2 * 1.4 + 0.8 * 1.02 = 1.096: the median hides it
        ((49.4, 0.05, 1.01), "NOT MET"),  # 94 %
    ],
)
def test_the_bar_asks_for_gain_and_mean_time_alike(auto: Any, word: str) -> None:
    verdict = cost_quality.verdicts(cost_quality.rows(made_up(bestta_auto=auto)))[0]
    assert f"1.05x the time: {word} (" in verdict


@pytest.mark.parametrize("score", [40.0, 38.0])
def test_without_a_gain_there_is_none_to_keep(score: float) -> None:
    table = cost_quality.rows(made_up(bestta=(score, 1.0, 1.4)))
    assert {row.kept_percent for row in table} == {None}
    verdict = cost_quality.verdicts(table)[0]
    assert "no gain to keep" in verdict
    assert "met" not in verdict.lower().partition("cannot tell")[2]
    assert "%" not in cost_quality.printed_table(table).splitlines()[1].replace("0.0 %", "")


def test_a_gain_that_needs_no_learning_is_said_to_say_nothing_of_auto() -> None:
    learned = cost_quality.verdicts(cost_quality.rows(made_up()))[1]
    assert "learning adds +6.00 points" in learned
    assert "says nothing" not in learned
    # 49.8 is 98 % of the gain.
    unlearned = cost_quality.verdicts(cost_quality.rows(made_up(bestta_still=(49.8, 0.0, 1.02))))[1]
    assert "keeps 98.0 %" in unlearned
    assert "says nothing" in unlearned


def test_other_forms_are_told_in_points() -> None:
    found = cost_quality.verdicts(cost_quality.rows(made_up()))
    assert "bf16 changes the score by -0.03 points" in found
    assert "half changes the score by 0.00 points" in found


@pytest.mark.parametrize("name", ["source", "bestta"])
def test_a_missing_reference_is_named(name: str) -> None:
    records = made_up()
    del records[name]
    with pytest.raises(ValueError, match=f"no record of '{name}'.*bestta-auto"):
        cost_quality.rows(records)


def test_a_missing_form_leaves_the_others_and_is_named() -> None:
    records = made_up()
    del records["bestta-still"]
    table = cost_quality.rows(records)
    assert row_of(records, "bestta-auto").time_composed is None
    found = cost_quality.verdicts(table)
    assert "cannot tell: no mean time" in found[0]
    assert "cannot tell of bestta-still: no record" in found


def test_no_mean_is_made_of_medians_that_are_not_those_of_adapted_frames() -> None:
    assert row_of(made_up(bestta=(50.0, 0.4, 1.02)), "bestta-auto").time_composed is None
    assert row_of(made_up(bestta=(50.0, 1.0, None)), "bestta-auto").time_composed is None


def test_records_of_other_streams_do_not_compare() -> None:
    records = made_up()
    other = records["bestta-auto"]
    other["stream"] = other["stream"] | {"key": "another"}
    with pytest.raises(ValueError, match=r"different streams.*bestta-auto another"):
        cost_quality.rows(records)


def test_records_of_different_commits_are_pointed_at() -> None:
    records = made_up()
    assert not any("commits" in text for text in cost_quality.warnings_of(records))
    origin = records["bestta-auto"]["provenance"]
    records["bestta-auto"]["provenance"] = origin | {"commit": "0000000"}
    assert any("0000000, b7f4d51" in text for text in cost_quality.warnings_of(records))


def test_the_streets_are_large_enough_to_run_lean_unless_asked_otherwise() -> None:
    parse = cost_quality.parser().parse_args
    usual = cost_quality.protocol_of(parse([]))
    assert (usual.name, usual.size, usual.images, usual.rounds) == (
        "streets-continual",
        (512, 256),
        24,
        2,
    )
    asked = cost_quality.protocol_of(parse(["--size", "64x32", "--images", "3", "--every", "2"]))
    assert (asked.size, asked.images, asked.every, asked.rounds) == ((64, 32), 3, 2, 2)
    assert cost_quality.protocol_of(parse(["--data", "x"])).name == "weather-continual"


def test_a_second_call_reads_the_records_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "drive", drive_here)
    monkeypatch.setattr(
        "bestta.benchmark.runner.peak_memory",
        lambda run, out: {"peak_bytes": 3, "over_model_bytes": 2_000_000, "memory": "process"},
    )
    monkeypatch.setattr(cost_quality, "METHODS", ("source", "bestta"))
    command = ["--images", "1", "--rounds", "1", "--size", "64x32", "--work", str(tmp_path)]
    assert cost_quality.main(command) == 0
    first = json.loads((tmp_path / "cost-quality.json").read_text())
    assert cost_quality.main([*command, "--out", str(tmp_path / "deep" / "t.json")]) == 0
    second = json.loads((tmp_path / "deep" / "t.json").read_text())
    assert "Recorded before" in capsys.readouterr().out
    assert first["rows"] == second["rows"]  # times and all: nothing ran again
    assert first["stream"]["frames"] == 4  # one image in each of four weathers
    for name, record in first["records"].items():
        kept = json.loads((tmp_path / f"{record}.json").read_text())
        row = next(row for row in first["rows"] if row["method"] == name)
        assert (row["score"], row["over_model_bytes"]) == (kept["score"], 2_000_000)
    assert first["provenance"]["versions"]["torch"]


def test_a_folder_that_is_not_there_is_a_clear_end(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere"):
        cost_quality.main(["--data", str(tmp_path / "nowhere"), "--work", str(tmp_path)])
