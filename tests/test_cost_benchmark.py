"""`make bench-cost`: how its ratios come about, how it goes on after a stop, and its picture."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts import ROOT, load

cost, cost_plot = load("cost"), load("cost_plot")
CODE = {"commit": "abc", "sources": "0"}


class Pretend:
    """Answers jobs with made-up figures, and keeps what it was asked for."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.stop_at = stop_at

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(job)
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        if job["kind"] == "memory":
            settings = job["settings"]
            peak = 100 if settings is None else 105 if settings.get("lean") else 260
            return {
                "peak_bytes": peak * 10**6,
                "held_bytes": 10**6,
                "step_bytes": peak * 10**6,
                "steps_ms": [4000.0],
                "plain_ms": 100.0,
                "adapted": True,
            }
        names = list(job["contenders"])
        return {
            "time_ms": {n: [100.0 + 10 * k] * job["rounds"] for k, n in enumerate(names)},
            "adapted": {n: [" auto " not in n] * job["rounds"] for n in names},
            "settled_after": {n: 7 for n in names if " auto " in n},
        }


def record_of(folder: Path, pretend: Pretend, rounds: int = 2, code: Any = None) -> dict[str, Any]:
    every = cost.plan(quick=True, rounds=rounds)
    found: dict[str, Any] = cost.measure(every, every, cost.Parts(folder, code or CODE, pretend))
    return found


def test_a_ratio_is_taken_within_each_round():
    # By hand: 20/10 = 2, 90/30 = 3, 20/8 = 2.5, whose median is 2.5. The medians' ratio is 20/10:
    # what slowed the second round threefold would decide which times are compared.
    assert cost.time_ratio([20.0, 90.0, 20.0], [10.0, 30.0, 8.0]) == 2.5


def test_contenders_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []

    def named(name: str) -> Any:
        return lambda image: order.append(name)

    names = ["a", "b", "c"]
    times, learned = cost.interleaved({n: named(n) for n in names}, torch.zeros(1), rounds=2)
    assert order == names * 3
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2, "c": 2}
    assert learned["a"] == [None, None]


@pytest.mark.parametrize(("learns", "frames"), [(0, 1), (3, 4), (39, 40), (40, None)])
def test_a_stream_has_settled_at_its_first_frame_that_is_not_adapted_to(learns, frames):
    class Step:
        seen = 0

        def __call__(self, image: Any) -> None:
            self.seen += 1
            self.last = SimpleNamespace(adapted=self.seen <= learns)

    assert cost.settle(Step(), torch.zeros(1)) == frames  # of 40 at most


def test_the_table_is_that_of_the_rounds():
    measurement = cost.narrowed(cost.plan(quick=True, rounds=3), ["wrn"], ["tent", "cotta"])[0]
    found = {
        f"{measurement.key} times": {
            "time_ms": {"plain forward": [10.0, 30.0, 8.0], "tent": [20.0, 90.0, 20.0]},
            "adapted": {"plain forward": [None] * 3, "tent": [True, False, True]},
            "settled_after": {},
        },
        f"{measurement.key} memory of plain forward": {"peak_bytes": 200, "held_bytes": 0},
        f"{measurement.key} memory of tent": {"peak_bytes": 500, "held_bytes": 40},
        # 300 ms beside the 12 ms of its own process, whatever the other process took.
        f"{measurement.key} memory of cotta": {
            "peak_bytes": 900,
            "held_bytes": 700,
            "steps_ms": [300.0],
            "plain_ms": 12.0,
            "adapted": True,
        },
    }
    plain, tent, cotta = cost.rows(measurement, found)
    assert (plain.time_ratio, plain.memory_ratio) == (1.0, 1.0)
    assert (tent.time_ratio, tent.time_ms, tent.memory_ratio) == (2.5, 20.0, 2.5)
    assert tent.time_range == (2.0, 3.0)
    assert tent.note == "no backward on 1 frames"
    assert (cotta.time_ratio, cotta.memory_ratio, cotta.once) == (25.0, 4.5, True)


def test_a_finished_run_is_not_measured_again(tmp_path):
    first, second = Pretend(), Pretend()
    before = record_of(tmp_path, first)
    after = record_of(tmp_path, second)
    assert len(first.asked) == sum(len(cost.jobs(m)) for m in cost.plan(quick=True, rounds=2))
    assert second.asked == []
    assert {k: v for k, v in after.items() if k != "provenance"} == {
        k: v for k, v in before.items() if k != "provenance"
    }


def test_a_stopped_run_goes_on_behind_what_it_had_finished(tmp_path):
    stopped, resumed, whole = Pretend(stop_at=9), Pretend(), Pretend()
    with pytest.raises(KeyboardInterrupt):
        record_of(tmp_path, stopped)
    record_of(tmp_path, resumed)
    record_of(tmp_path, whole, code={**CODE, "commit": "def"})
    assert stopped.asked[:8] + resumed.asked == whole.asked


def test_other_code_and_other_settings_are_measured_anew(tmp_path):
    record_of(tmp_path, Pretend())
    other_code, more_rounds = Pretend(), Pretend()
    record_of(tmp_path, other_code, code={**CODE, "commit": "def"})
    every = sum(len(cost.jobs(m)) for m in cost.plan(quick=True, rounds=2))
    assert len(other_code.asked) == every
    record_of(tmp_path, more_rounds, rounds=3, code={**CODE, "commit": "def"})
    assert {job["kind"] for job in more_rounds.asked} == {"times"}  # memory knows no rounds


def test_a_part_that_was_torn_is_measured_again(tmp_path):
    record_of(tmp_path, Pretend())
    part = sorted(tmp_path.glob("*memory-of-tent*.json"))[0]
    part.write_text(part.read_text()[:50])
    again = Pretend()
    record_of(tmp_path, again)
    assert len(again.asked) == 1


def test_every_subject_has_every_method_the_issue_of_cost_is_about():
    tables = [m for m in cost.plan(quick=False, rounds=3) if m.subject != "growth"]
    assert [m.size for m in tables] == [(512, 1024), (1088, 1920), (32, 32)]
    others = {"bn_stats", "alpha_bn", "tent", "eata", "ecotta", "sar", *cost.EXPENSIVE}
    for measurement in tables:
        assert {cost.PLAIN, *others} <= measurement.contenders.keys()
        ours = [s for n, s in measurement.contenders.items() if n.startswith("BESTTA")]
        assert {s["lean"] for s in ours} == {True, False}
        assert {s.get("when") for s in ours} == {None, "auto"}


def test_growth_covers_four_sizes_four_places_and_four_numbers(tmp_path):
    curves = record_of(tmp_path, Pretend())["growth"]
    assert [p["label"] for p in curves["size"]["tent"]] == [
        "64x128",
        "96x192",
        "128x256",
        "160x320",
    ]
    places = [p["label"] for p in curves["depth"]["BESTTA lean"]]
    assert places == ["layer1", "layer2", "layer3", "layer4"]
    assert [p["label"] for p in curves["number"]["BESTTA stock"]] == ["1", "2", "3", "4"]


def test_a_bar_that_is_not_met_is_called_so():
    measurement = cost.plan(quick=False, rounds=3)[0]

    def row(name: str, time: float, memory: float) -> Any:
        return cost.Row(name, time, (time, time), 100 * time, memory, 100, 0, False)

    table = [row("BESTTA lean layer3", 1.34, 1.11), row("tent", 2.5, 5.0), row("eata", 1.2, 5.0)]
    table.append(row("BESTTA lean auto layer3", 0.98, 0.97))
    found = {v.bar.split(":")[0]: v.met for v in cost.verdicts(measurement, table)[:2]}
    assert found == {"BESTTA lean layer3": False, "BESTTA lean auto layer3": True}
    others, stretch = cost.verdicts(measurement, table)[2:]
    assert not others.met
    assert others.figure.startswith("1 of 2; not eata")
    assert stretch.met
    assert "NOT MET" in cost.printed_verdicts([others])


def test_what_was_not_measured_does_not_count_as_beaten():
    measurement = cost.plan(quick=False, rounds=3)[0]
    ours = cost.Row("BESTTA lean layer3", 1.3, (1.3, 1.3), 130, 1.05, 105, 0, False)
    tent = cost.Row("tent", 2.5, (2.5, 2.5), 250, 5.0, 500, 0, False)
    idle = cost.Row("eata", 2.5, (1.0, 2.5), 250, 5.0, 500, 0, False, "no backward on 1 frames")
    killed = cost.Row("petal", math.nan, (math.nan, math.nan), math.nan, None, None, None, True)
    assert cost.verdicts(measurement, [ours, tent])[-1].met
    assert not cost.verdicts(measurement, [ours, tent, idle])[-1].met
    assert not cost.verdicts(measurement, [ours, tent, killed])[-1].met


def test_the_papers_ratios_are_its_figures_over_its_source_model():
    # Table 2: 291.8 and 135.9 ms, 8.77 and 1.76 GB.
    time, memory = cost.paper_ratios()["bestta"]
    assert (round(time, 2), round(memory, 2)) == (2.15, 4.98)
    assert math.isclose(cost.paper_ratios()["cotta"][0], 4337 / 135.9)


def test_the_picture_names_every_contender(tmp_path):
    record = record_of(tmp_path, Pretend())
    picture = cost_plot.draw(json.loads(json.dumps(record)))
    table = record["subjects"]["deeplab-small-160x320"]["rows"]
    assert len(table) == 19
    for row in table:
        assert f">{cost_plot.label(row['contender'])}</text>" in picture
    assert ">BESTTA in the paper</text>" in picture
    for words in ("over image size", "over BeIN", "over number of BeINs"):
        assert picture.count(words) == 2  # time and memory


def test_a_small_run_measures_in_processes_of_its_own_and_writes_its_record(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "cost.py"), "--quick", "--only", "wrn"]
    command += ["--contenders", "tent", "BESTTA lean block3"]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "record.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    (subject,) = record["subjects"].values()
    rows = {row["contender"]: row for row in subject["rows"]}
    assert list(rows) == ["plain forward", "BESTTA lean block3", "tent"]
    assert rows["tent"]["time_ratio"] > 0
    timing = subject["parts"]["wrn-10-2 times"]["result"]
    assert timing["adapted"] == {
        "plain forward": [None],
        "BESTTA lean block3": [True],
        "tent": [True],
    }
    if Path("/proc/self/clear_refs").exists():
        assert rows["tent"]["memory_ratio"] > 1
    assert "Next:" in done.stdout


def test_the_page_on_cost_holds_the_figures_of_its_records() -> None:
    root = Path(__file__).parents[1]
    script = runpy.run_path(str(root / "benchmarks" / "cost_table.py"))
    page = (root / "docs" / "cost.md").read_text(encoding="utf-8")
    assert script["renewed"](page) == page, "make readme renews it"
    record = json.loads((root / "results" / "measured" / "cost.json").read_text(encoding="utf-8"))
    for subject in record["subjects"].values():
        for row in subject["rows"]:
            if subject["subject"] != "growth" and "block" not in row["contender"]:
                assert f"| {row['contender']} |" in page
