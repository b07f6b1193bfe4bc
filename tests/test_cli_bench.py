"""``bestta bench`` and ``bestta report``: what they print, write, and say of mistakes."""

from __future__ import annotations

import re

import pytest

from bench import PLUGIN, drive_here, read
from bestta.adapters import registry
from bestta.benchmark import runner
from bestta.benchmark import sweep as sweep_module
from bestta.benchmark.config import shipped

TINY = ("bench", "streets-quick", "--size", "64x32", "--images", "1")


@pytest.fixture
def own_methods(monkeypatch):
    """Methods that are registered meanwhile are forgotten afterwards."""
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Runs in this process and in an empty folder; none of them measures memory."""
    monkeypatch.setattr(sweep_module, "drive", drive_here)
    monkeypatch.setattr(runner, "peak_memory", lambda run, out: runner._UNKNOWN_MEMORY)
    monkeypatch.chdir(tmp_path)


def records(folder):
    return [read(path) for path in sorted(folder.glob("*.json"))]


def test_without_a_protocol_everything_there_is_is_listed(run):
    done = run("bench")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed == [*shipped("protocols"), *shipped("studies"), *shipped("methods")]
    assert "Next: bestta bench PROTOCOL" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["street-quick"], "no protocol is called 'street-quick'. Did you mean 'streets-quick'?"),
        (["streets-quick", "--method", "tant"], "no method is called 'tant'. Did you mean 'tent'?"),
        (["streets-quick", "--study", "loses"], "no study is called 'loses'. Did you mean"),
        (["streets-quick", "--set", "lr=1"], "--set is for the methods that --method names"),
        (
            ["streets-quick", "--method", "tent", "--set", "lrr=1"],
            "no setting of 'tent' is called 'lrr'. Did you mean 'lr'?",
        ),
        (["streets-quick", "--method", "tent", "--set", "lr"], "--set takes name=value"),
        (
            ["streets-quick", "--study", "losses", "--method", "tent"],
            "name a study or methods, not both.",
        ),
        (["streets-quick", "--study", "losses", "--no-source"], "a study says itself"),
        (["streets-quick", "--study", "losses", "--set", "lr=1"], "--set is for the methods"),
        (["streets-quick", "--model", "street"], "no model is called 'street'. Did you mean"),
        (["streets-quick", "--size", "big"], "such as 1024x512; got 'big'"),
        (["streets-quick", "--plugin", "nowhere.py"], "nowhere.py"),
        (["acdc-continual"], "acdc is read from files: name their folder with --data."),
        (["acdc-continual", "--data", "nowhere"], "nowhere"),
        (["cifar10c", "--data", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_works(run, here, tmp_path, words, message):
    done = run("bench", *words)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    # A tree that is expected is drawn below its line; all else is the line.
    assert done.stderr.count("\n") == 1 or "nowhere" in words


@pytest.mark.parametrize("option", ["--seeds", "--every", "--images", "--rounds", "--batch"])
def test_numbers_that_make_no_sense_are_refused_by_the_option(run, option):
    done = run("bench", "streets-quick", option, "0")
    assert done.returncode == 2
    assert option in done.stderr


def test_a_bench_prints_its_table_and_what_comes_next_and_a_report_follows(run, here, tmp_path):
    done = run(*TINY, "--method", "source", "--method", "bestta", "--method", "source")
    assert done.returncode == 0, done.stderr
    found = {record["method"]: record for record in records(tmp_path / "runs/streets-quick")}
    assert found.keys() == {"source", "bestta"}
    for record in found.values():
        row = next(line for line in done.stdout.splitlines() if record["label"] in line)
        assert f"{record['score']:.1f}" in row
        assert record["stream"]["size"] == [64, 32]
        assert record["stream"]["frames"] == 4
    assert "Next: bestta report runs/streets-quick" in done.stdout
    assert "[2/2] BESTTA recorded" in done.stderr
    done = run("report", "runs/streets-quick", "--out", "page", "--title", "Two rows")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page/report.html").read_text(encoding="utf-8")
    assert "Two rows" in page
    assert "BESTTA" in page
    assert f"{found['bestta']['score']:.1f}" in page
    assert str(tmp_path / "runs") not in page
    assert "report.html" in done.stdout


def test_what_is_recorded_is_said_and_shown_and_again_runs_it(run, here, tmp_path):
    words = (*TINY, "--method", "source", "--out", "out")
    run(*words)
    (path,) = (tmp_path / "out").glob("*.json")
    before = path.stat().st_mtime_ns
    done = run(*words)
    assert done.returncode == 0
    assert "Recorded before, with the same settings: Source." in done.stdout
    assert f"{read(path)['score']:.1f}" in done.stdout
    assert path.stat().st_mtime_ns == before
    done = run(*words, "--again")
    assert "Recorded before" not in done.stdout
    assert path.stat().st_mtime_ns > before


def test_options_change_the_protocol_and_settings_the_methods(run, here, tmp_path):
    words = ("--method", "bestta", "--set", "rho=0.25", "--rounds", "2", "--every", "2")
    more = ("--severity", "5", "--batch", "2", "--precision", "bf16", "--images", "2")
    done = run("bench", "streets-quick", "--size", "64x32", *words, *more)
    assert done.returncode == 0, done.stderr
    (record,) = records(tmp_path / "runs/streets-quick")
    assert record["settings"]["rho"] == 0.25
    stream = record["stream"]
    assert (stream["rounds"], stream["every"], stream["severity"]) == (2, 2, 5)
    assert (stream["batch"], stream["precision"], stream["frames"]) == (2, "bf16", 8)


def test_seeds_give_a_mean_and_how_far_they_spread(run, here, tmp_path):
    done = run(*TINY, "--method", "source", "--seeds", "2", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    scores = [record["score"] for record in records(tmp_path / "runs/streets-quick")]
    assert len(scores) == 2
    mean = sum(scores) / 2
    spread = abs(scores[0] - scores[1]) / 2**0.5  # the sample standard deviation of two
    assert f"{mean:.1f} ± {spread:.1f}" in done.stdout
    assert "Source (seed 1)" in done.stderr


def test_what_fails_is_told_at_the_end_and_in_the_exit_code(run, here, own_methods, tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    words = ("--plugin", "mine.py", "--method", "brittle", "--method", "steady")
    done = run(*TINY, *words)
    assert done.returncode == 1
    assert "failed: brittle: ArithmeticError: the third image is one too many" in done.stderr
    assert "Traceback" not in done.stderr
    (record,) = records(tmp_path / "runs/streets-quick")
    assert record["method"] == "steady"
    assert record["config"]["plugins"] == ["mine.py"]
    assert "steady" in done.stdout
    (log,) = (tmp_path / "runs/streets-quick").glob("*.failed.txt")
    assert "Traceback" in log.read_text()
    assert str(log.name) in done.stderr


def test_a_study_of_ones_own_has_a_folder_of_its_own(run, here, tmp_path):
    (tmp_path / "studies").mkdir()
    path = tmp_path / "studies" / "two.yaml"
    path.write_text(
        "variants:\n"
        "  - {method: bestta, row: (a), marks: {rho: 0.0}, settings: {rho: 0.0}}\n"
        "  - {method: bestta, row: (b), marks: {rho: 1.0}, settings: {rho: 1.0}}\n"
    )
    done = run(*TINY, "--study", path)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "runs/streets-quick-two")
    assert [record["study"]["row"] for record in found] == ["(a)", "(b)"]
    assert [record["settings"]["rho"] for record in found] == [0.0, 1.0]
    assert {record["study"]["name"] for record in found} == {"two"}
    assert "Next: bestta report runs/streets-quick-two" in done.stdout


def test_a_row_of_a_study_runs_alone_and_a_row_that_is_none_is_named(run, here, tmp_path):
    words = (*TINY, "--study", "rho", "--only", "ρ = 0.2", "--only", "ρ = 0.9")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "runs/streets-quick-rho")
    assert sorted(record["settings"]["rho"] for record in found) == [0.2, 0.9]
    done = run(*TINY, "--study", "rho", "--only", "ρ=0.2")
    assert done.returncode != 0
    assert "Did you mean 'ρ = 0.2'?" in done.stderr
    done = run(*TINY, "--only", "ρ = 0.2")
    assert done.returncode != 0
    assert "--study" in done.stderr


def test_source_images_are_looked_at_unless_they_are_not_wanted(run, here, tmp_path):
    small = ("bench", "streets-continual", "--size", "64x32", "--images", "1", "--rounds", "1")
    done = run(*small, "--method", "source", "--no-source")
    assert done.returncode == 0, done.stderr
    (record,) = records(tmp_path / "runs/streets-continual")
    assert record["source_scores"] == []
    assert record["embeddings"] is None
    assert record["config"]["protocol"]["source"] is None


def test_stopped_it_leaves_with_130_and_the_same_command_goes_on(run, here, tmp_path, monkeypatch):
    def stop(jobs, out, **how):
        raise KeyboardInterrupt

    words = (*TINY, "--method", "source")
    with monkeypatch.context() as patch:
        patch.setattr("bestta.cli.bench.sweep", stop)
        done = run(*words)
    assert done.returncode == 130
    assert "The same command goes on from there." in done.stdout
    assert run(*words).returncode == 0


def test_a_report_of_nothing_is_a_mistake_in_one_line(run, tmp_path):
    done = run("report", tmp_path, "--out", tmp_path / "page")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_help_names_every_option_once(run):
    text = run("bench", "--help").stdout
    options = re.findall(r"^ +(--[a-z-]+)", text, re.MULTILINE)
    assert len(options) == len(set(options)) > 20
    assert {"--method", "--study", "--data", "--source-data", "--seeds", "--again"} <= set(options)


def test_what_is_said_on_the_command_line_wins_over_a_study(run, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("bestta.cli.bench.run_all", lambda runs, *_, **__: seen.extend(runs) or [])
    run("bench", "streets-quick", "--study", "correlation", "--rounds", 4)
    assert {one.protocol.rounds for one in seen} == {4}
    assert all(one.protocol.similarities for one in seen)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--rounds", 2), "one round of severities"),
        (("--severity", 2), "severities of its own"),
    ],
)
def test_a_gradual_protocol_refuses_what_it_does_not_have(run, words, reason):
    done = run("bench", "cityscapes-gradual", *words)
    assert done.returncode == 1
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("streets-quick", "--data", "somewhere"), "rendered, not read"),
        (("streets-quick", "--address", "auto"), "say --on ray"),
        (("streets-quick", "--on", "ray", "--jobs", 2), "no --jobs"),
        (("acdc-continual", "--severity", 2), "no --severity"),
    ],
)
def test_options_that_would_be_ignored_are_refused(run, words, reason):
    done = run("bench", *words)
    assert done.returncode == 1
    assert reason in done.stderr
