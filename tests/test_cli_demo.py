"""The demo: what it runs, prints and writes; and the README's table, which is one of its runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from bench import drive_here, read
from bestta.benchmark import config, runner
from bestta.benchmark import sweep as sweep_module

ROOT = Path(__file__).parents[1]


@pytest.fixture
def short(monkeypatch, tmp_path):
    """The demo with one street a weather, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_module, "drive", drive_here)
    monkeypatch.setattr(runner, "peak_memory", lambda run, out: runner._UNKNOWN_MEMORY)
    whole = config.read_protocol
    monkeypatch.setattr(config, "read_protocol", lambda name: whole(name, images=1, size=(64, 32)))


def test_the_demo_ends_with_a_table_and_a_page(run, short, tmp_path):
    done = run("demo", "--quick", "--jobs", 1)
    assert done.returncode == 0, done.stderr
    for method in ("Source", "BN Stats Adapt", "α-BN", "TENT-continual", "BESTTA"):
        assert f"\n{method}" in done.stdout
    assert "Look at demo/quick/report.html" in done.stdout
    assert (
        "<!doctype html>" in (tmp_path / "demo" / "quick" / "report.html").read_text().lower()[:100]
    )


def test_what_the_demo_prints_is_what_it_measured(run, short, tmp_path):
    done = run("demo", "--quick", "--jobs", 1)
    for path in (tmp_path / "demo" / "quick" / "records").glob("*.json"):
        record = read(path)
        (line,) = [ln for ln in done.stdout.splitlines() if ln.startswith(record["label"] + " ")]
        assert f" {record['score']:.1f}" in line


def test_the_demo_measures_again_when_it_is_run_again(run, short, tmp_path):
    run("demo", "--quick", "--jobs", 1)
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "demo/quick/records").glob("*.json")
    }
    run("demo", "--quick", "--jobs", 1)
    assert before
    assert all(path.stat().st_mtime_ns > moment for path, moment in before.items())


def test_the_full_demo_has_the_six_methods_and_three_rounds_of_four_weathers():
    protocol = config.read_protocol("streets-continual")
    assert protocol.methods == ("source", "bn_stats", "alpha_bn", "tent", "cotta", "bestta")
    assert (protocol.rounds, protocol.batch, protocol.model) == (3, 1, "streets")
    assert protocol.conditions == ("fog", "night", "rain", "snow")
    assert config.read_method("cotta").settings == {}  # whose default form is the lean one


def test_the_readmes_table_is_that_of_its_records():
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme_table.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script["renewed"](readme) == readme
