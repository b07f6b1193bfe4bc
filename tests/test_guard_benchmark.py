"""benchmarks/guard.py: what is drawn, what is made of it, and how it goes on after a stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bestta
from nets import stream
from processes import end_within
from scripts import load

guard, table = load("guard"), load("guard_table")

LAYERS = {"streets": ("a", "b", "c"), "cityscapes": ("d", "e"), "cifar10": ("f",)}


def asked(work, *words: str) -> Any:
    return guard.parser().parse_args(["--work", str(work), *words])


def cell(unguarded: float, guarded: float, **more: Any) -> dict[str, Any]:
    """A made-up result of a cell, in points over a source model of 50."""
    runs = {"unguarded": unguarded, "guarded": guarded}
    named = {"model": "streets", "condition": "fog", "severity": 3, "layer": "a", "lr": 0.1}
    return {
        "name": "x", **named, "gamma": "relative", "source": 50.0, "length": 100,
        **{
            how: {"score": 50 + gain, "looks": 20, "skipped": 3, "rolled_back": 1, "seconds": 1.0}
            for how, gain in runs.items()
        },
        **more,
    }  # fmt: skip


def record(**parts: Any) -> dict[str, Any]:
    empty = {kind: [] for kind in guard.KINDS}
    machine = {"cpu": "Abacus", "processor": "wood"}
    about = {"benchmark": "guard", "frames": 100, "seed": 3, "commits": ["abc"]}
    return {**about, **empty, "provenance": {"machine": machine}, **parts}


# --- cells -----------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_cells_and_another_one_others():
    first, again, other = (guard.drawn(60, seed, LAYERS) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first != guard.drawn(60, 0, LAYERS, tune=True)


def test_300_cells_are_all_different_and_leave_nothing_out():
    cells = guard.drawn(300, 0, LAYERS)
    assert len({c.name for c in cells}) == 300
    assert Counter(c.model for c in cells) == dict.fromkeys(LAYERS, 100)
    for model, layers in LAYERS.items():
        own = [c for c in cells if c.model == model]
        assert {c.layer for c in own} == set(layers)
        assert {c.lr for c in own} == {1e-4, 1e-3, 1e-2, 1e-1, 1.0}
        assert {c.gamma for c in own} == {"relative", "absolute"}
        assert {c.severity for c in own} >= {1, 3, 5}
        assert any(c.condition.startswith("weather-") for c in own) == (model != "cifar10")
    # 15 corruptions, 4 weathers, and clear.
    assert len({c.condition for c in cells}) == 20


def test_what_is_tuned_on_shares_no_corruption_with_what_is_reported():
    tuned, reported = (
        {name for name, _ in guard.conditions("cifar10", tune)} for tune in (True, False)
    )
    assert tuned & reported == {"clear"}


def test_more_cells_than_there_are_is_an_error_and_not_an_endless_draw():
    # CIFAR-10: 46 conditions, one layer, five rates, two kinds of γ.
    with pytest.raises(ValueError, match="460 at most"):
        guard.drawn(461, 0, {"cifar10": ("f",)})


def test_jobs_of_a_stream_stay_together_and_none_is_left_out():
    cells = guard.drawn(60, 0, LAYERS)
    mixed = [*cells[::2], *cells[1::2]]
    streams = guard.by_stream(mixed)
    assert sorted((c for own in streams for c in own), key=cells.index) == cells
    assert len(streams) == len({c.place for c in cells}) < len(cells)
    # A stress case and a baseline are of other streams, even where the place is the same.
    assert len(guard.by_stream([guard.Case("streets", "clear", 1),
                                guard.Baseline("streets", "clear", 0, "tent")])) == 2  # fmt: skip


def test_every_stress_case_is_run_at_both_learning_rates():
    cases = guard.planned("stress", ["streets", "cifar10"], 1, 0, False)
    assert len({c.name for c in cases}) == len(cases) == 2 * 10 * 2


# --- streams -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streets() -> Any:
    return guard.subject("streets", None, frames=8, source_images=4)


def test_blank_frames_stand_in_the_middle_and_are_not_scored(streets):
    frames = guard.stressing(streets, "white")
    assert [label is None for _, label in frames] == [False] * 4 + [True] + [False] * 4
    # (1 - mean) / deviation of the green channel, by the card of the model.
    assert frames[4][0][0, 1].unique().tolist() == pytest.approx([(1 - 0.456) / 0.224])


def test_one_class_only_is_the_frames_with_most_road_again_and_again(streets):
    frames = guard.stressing(streets, "one class, clear")
    assert len(frames) == 20  # two of eight, ten times
    shares = [float((label == 0).float().mean()) for _, label in frames]
    every = sorted((float(np.mean(s.label == 0)) for s in streets.images), reverse=True)
    assert shares == pytest.approx(every[:2] * 10)


def test_a_flash_is_nine_tenths_white():
    image = np.array([[[0, 100, 255]]], dtype=np.uint8)
    assert guard.whitened(image).tolist() == [[[230, 240, 255]]]  # 229.5 goes to even


def test_a_wrecked_adapter_holds_nothing_but_tens(segmenter):
    images = stream(4, seed=0)
    profile = bestta.SourceProfile.collect(segmenter, images, layers=["layer1"], progress=False)
    adapter = bestta.adapt(segmenter, profile)
    guard.wreck(adapter)
    learned = torch.cat([*adapter.trainable.values(), *adapter.velocity.values()])
    assert learned.unique().tolist() == [-10, 10]


def test_a_stream_is_back_when_ten_frames_after_the_collapse_are_as_good():
    def score(counts):
        return float(sum(counts)) / len(counts)

    whole = [50.0] * 40
    wrecked = [50.0] * 10 + [0.0] * 3 + [49.5] * 27
    # Frames 13 to 22 are the first ten of which none is broken: 13 frames after frame 10.
    assert guard.back_after(score, wrecked, whole, 10) == 13
    assert guard.back_after(score, whole, whole, 10) == 10
    assert guard.back_after(score, [50.0] * 10 + [48.0] * 30, whole, 10) is None


# --- tables --------------------------------------------------------------------------------------


def test_the_summary_is_that_of_a_hand_count():
    cells = [cell(-30, -0.5), cell(-1, -1.5), cell(2, 0.5), cell(0, 0)]
    found = table.summary(cells)
    assert found.within_percent == {"unguarded": 75, "guarded": 75}
    assert found.worst == {"unguarded": -30, "guarded": -1.5}
    assert found.mean == {"unguarded": -29 / 4, "guarded": -1.5 / 4}
    assert found.cost == pytest.approx((0.5 + 1.5 + 0) / 3)
    assert found.cost_of_gains == pytest.approx(1.5 / 2)
    assert found.costly_percent == pytest.approx(100 / 3)
    assert found.look_percent == 20


def test_a_share_of_few_cells_is_told_with_its_interval():
    # Of none or all of n, Wilson's interval is z² / (n + z²) wide: set p = 0 in its formula.
    assert table.interval(0.0, 10) == pytest.approx((0, 100 * 3.8416 / 13.8416))
    assert table.interval(100.0, 10) == pytest.approx((100 * 10 / 13.8416, 100))
    # Its bounds are the shares p for which 297 of 300 is 1.96 deviations of the draw away.
    for bound in table.interval(99.0, 300):
        p = bound / 100
        assert abs(0.99 - p) == pytest.approx(1.96 * (p * (1 - p) / 300) ** 0.5)
    text = table.figures(record(cells=[cell(0, -2), *[cell(0, 0)] * 9]))
    assert "90.0 % (1 further below; a draw of this size leaves the share between 59.6 and" in text


def test_the_page_says_which_promises_are_kept():
    text = table.figures(record(cells=[cell(-30, -0.5), cell(2, 1.9, model="cifar10")]))
    assert "| all | 2 | 50.0 % → 100.0 % | -30.00 → -0.50 |" in text
    assert "| cifar10 | 1 | 100.0 % → 100.0 % |" in text
    assert "| 0.10 | 0 % | 0.10 | 20 % |" in text
    assert "- Met: at least 99 % of the cells" in text
    assert "- Met: no more than 0.3 points lost where nothing goes wrong: 0.10" in text
    bad = table.figures(record(cells=[cell(2, -1.5)]))
    assert "**Not met**: at least 99 %" in bad
    assert "**Not met**: no more than 0.3 points" in bad
    assert "seed 3, Abacus, commit abc" in bad


def test_only_the_ten_worst_cells_are_listed_the_worst_first():
    cells = [cell(1, n / 10, layer=f"layer{n}") for n in range(15)]
    text = table.figures(record(cells=cells[::-1]))
    places = [text.index(f"| layer{n} |") for n in range(10)]
    assert places == sorted(places)
    assert "| layer10 |" not in text


def test_the_stress_table_tells_of_a_stream_that_never_came_back():
    after = {"guarded": 12, "unguarded": None}
    cases = [cell(-20, 1, case="collapse", back_after=after), cell(-3, -1.2, case="flashes")]
    text = table.figures(record(stress=cases))
    assert "| streets | collapse | 0.1 | 50.00 | -20.00 | +1.00 | 20 of 100 | 3 | 1 |" in text
    assert "**Not met**: every stress case at most 1 point below the source model: -1.20" in text
    assert "- Met: a collapsed stream is back within 50 frames: 12 frames; unguarded never" in text
    late = [cell(0, 0, case="collapse", back_after={"guarded": 51, "unguarded": 10})]
    assert "**Not met**: a collapsed stream" in table.figures(record(stress=late))


def test_other_methods_and_time_have_their_tables():
    ratio = {"median_ratio": 1.5, "mean_ratio": 1.75}
    timing = {"model": "streets", "condition": "clear", "severity": 0, "length": 50, "looks": 5}
    timing |= {"unguarded": ratio, "guarded": ratio}
    text = table.figures(record(baselines=[cell(-9, 0, method="tent")], cost=[timing]))
    assert "| streets | fog 3 | tent | 50.00 | -9.00 | 0.00 |" in text
    assert "| streets | clear | 1.50 (1.75) | 1.50 (1.75) | 10 % |" in text


def test_figures_replace_figures_and_nothing_else():
    page = f"before\n{table.START}\nold\n{table.END}\nafter\n"
    new = table.written(page, "new")
    assert new == page.replace("old", "new")
    assert table.written(new, "new") == new


def test_the_picture_tells_the_worst_of_both():
    picture = table.draw([cell(-30, -0.5), cell(2, 1)])
    assert "-30.00 without the guard and -0.50 with it" in picture
    assert picture.count(' line"') == 2 + 4  # the legend, and both curves in both panels


def test_a_record_of_something_else_is_refused(tmp_path):
    other = tmp_path / "cost.json"
    with pytest.raises(SystemExit, match="there is no record"):
        table.read(other)
    for wrong, said in (
        ('{"benchmark": "cost"}', "a record of 'cost'"),
        ("[1]", "a record of None"),
        ("1 2", "no JSON file"),
    ):
        other.write_text(wrong)
        with pytest.raises(SystemExit, match=said):
            table.read(other)
        with pytest.raises(SystemExit, match=said):
            guard.main(["--models", "streets", "--cells", "2", "--from", str(other)])


def test_the_page_on_the_guard_holds_the_figures_of_its_record():
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.START in page
    assert table.END in page
    if table.RECORD.exists():
        assert table.renewed(page) == page, "python benchmarks/guard_table.py renews it"


# --- the script -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "cityscapes"], "none was given: --cityscapes DIR"),
        (["--cifar10", "/nowhere/at/all"], "there is no folder /nowhere/at/all: --cifar10 DIR"),
        (["--models", "imagenet"], "no model 'imagenet' ships; there are: streets"),
        (["--frames", "0"], "1 at least"),
        (["--jobs", "0"], "1 at least"),
    ],
)
def test_what_cannot_be_run_is_told_before_anything_is(tmp_path, words, said):
    with pytest.raises(SystemExit, match=said):
        guard.main(["--work", str(tmp_path / "work"), *words])
    assert not (tmp_path / "work").exists()


def test_a_folder_without_the_data_is_told_with_what_was_expected_in_it(tmp_path):
    with pytest.raises(SystemExit, match="leftImg8bit"):
        guard.main(["--work", str(tmp_path / "work"), "--cityscapes", str(tmp_path)])


@pytest.mark.guarded
def test_two_cells_are_run_and_gathered_and_nothing_is_run_twice(tmp_path, capsys, monkeypatch):
    out, work = tmp_path / "record.json", tmp_path / "work"
    words = ["--models", "streets", "--cells", "2", "--frames", "6", "--source", "4"]
    words += ["--work", str(work), "--out", str(out)]
    whole = guard.Bench.__call__

    def stopped_before_the_second(bench, job):
        if list(work.glob("*.json")):
            raise KeyboardInterrupt
        return whole(bench, job)

    monkeypatch.setattr(guard.Bench, "__call__", stopped_before_the_second)
    assert guard.main(words) == 130
    assert "the same command goes on" in capsys.readouterr().out
    assert not out.exists()
    first = {path: path.read_bytes() for path in work.glob("*.json")}
    assert len(first) == 1
    monkeypatch.setattr(guard.Bench, "__call__", whole)
    assert guard.main(words) == 0
    assert all(path.read_bytes() == before for path, before in first.items())
    found = json.loads(out.read_text())
    assert found["missing"] == {"cells": 0, "stress": 20, "baselines": 18, "cost": 2}
    assert len(found["cells"]) == len(list(work.glob("*.json"))) == 2
    for one in found["cells"]:
        assert one["length"] == 6
        assert one["guarded"]["looks"] >= 4  # the first four images are always looked at
        assert one["unguarded"]["looks"] == 0
        assert 0 < one["source"] < 100
    assert found["provenance"]["versions"]["torch"] == torch.__version__
    assert table.summary(found["cells"]).cells == 2

    monkeypatch.setattr(guard.Bench, "__call__", None)
    out.unlink()
    capsys.readouterr()
    code = guard.commit()
    monkeypatch.setattr(guard, "commit", lambda: "another")
    assert guard.main(words) == 0
    said = capsys.readouterr().out
    assert f"2 runs are in {work} already, of commit {code}.\nThis is commit another" in said
    out.unlink()
    monkeypatch.setattr(guard, "commit", lambda: code)
    assert guard.main(words) == 0
    assert json.loads(out.read_text())["cells"] == found["cells"]
    # Elsewhere, from the record alone.
    out.rename(tmp_path / "earlier.json")
    words[words.index(str(work))] = str(tmp_path / "elsewhere")
    assert guard.main([*words, "--from", str(tmp_path / "earlier.json")]) == 0
    assert "2 results taken over" in capsys.readouterr().out
    assert json.loads(out.read_text())["cells"] == found["cells"]
    words[words.index("--frames") + 1] = "7"
    with pytest.raises(SystemExit, match="'frames': 6"):
        guard.main([*words, "--from", str(tmp_path / "earlier.json")])
    # A damaged file is as good as none, and with other settings they are other results.
    timing = guard.Timing("streets", "fog", 3)
    guard.path_of(timing, work).write_text('{"name":')
    assert guard.recorded(timing, asked(work, "--frames", "6", "--source", "4")) is None
    cells = guard.drawn(2, 0, {"streets": guard.layers_of("streets")})
    assert guard.recorded(cells[0], asked(work, "--frames", "6", "--source", "4")) is not None
    assert guard.recorded(cells[0], asked(work, "--frames", "7", "--source", "4")) is None


@pytest.mark.guarded
def test_two_processes_find_what_one_does(tmp_path):
    words = ["--models", "streets", "--cells", "3", "--frames", "5", "--source", "4"]
    ways = {n: ["--work", str(tmp_path / n), "--out", str(tmp_path / f"{n}.json")] for n in "12"}
    assert guard.main([*words, *ways["1"]]) == 0
    done = subprocess.run(
        [sys.executable, guard.__file__, *words, *ways["2"], "--jobs", "2"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": source ") == 3
    records = [json.loads((tmp_path / f"{n}.json").read_text())["cells"] for n in ways]
    for one in [*records[0], *records[1]]:
        for how in ("guarded", "unguarded"):
            del one[how]["seconds"]
    assert len(records[0]) == 3
    assert records[0] == records[1]


@pytest.mark.usefixtures("_python_hears_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_its_processes_end_with_it(tmp_path, number):
    code = (
        "import multiprocessing, os, sys, threading, time\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import guard\n"
        "def strike():\n"
        "    while len(workers := multiprocessing.active_children()) < 2:\n"
        "        time.sleep(0.01)\n"
        "    print(*(worker.pid for worker in workers), flush=True)\n"
        "    os.kill(os.getpid(), int(sys.argv[2]))\n"
        "threading.Thread(target=strike, daemon=True).start()\n"
        "sys.exit(guard.main(sys.argv[3:]))\n"
    )
    words = ["--models", "streets", "--cells", "6", "--frames", "400", "--source", "4"]
    words += ["--work", str(tmp_path / "work"), "--jobs", "2"]
    command = [sys.executable, "-c", code, str(Path(guard.__file__).parent), str(int(number))]
    # Not through pipes: their ends would be held by the workers.
    with (tmp_path / "said").open("w") as out:
        done = subprocess.run(
            [*command, *words], stdout=out, stderr=subprocess.STDOUT, check=False, timeout=120
        )
    first, *rest = (tmp_path / "said").read_text().splitlines()
    workers = [int(pid) for pid in first.split()]
    assert len(workers) == 2
    assert end_within(60, workers)
    if number == signal.SIGINT:
        assert done.returncode == 130
        told = f"Stopped. What was run is in {tmp_path / 'work'}; the same command goes on."
        assert rest == [told]
