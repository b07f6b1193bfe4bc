"""Many runs: what fails stops nothing else, what is recorded is skipped, and how it is shown."""

from __future__ import annotations

import io
import os
import signal
import time
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from bench import PLUGIN, drive_here, lasting, played, protocol, read, run_of
from bestta.adapters import registry
from bestta.benchmark import runner
from bestta.benchmark import sweep as sweep_module
from bestta.benchmark.config import Source, read_method, runs
from bestta.benchmark.sweep import Job, StopSwitch, jobs_of, sweep
from bestta.cli import display
from bestta.cli.display import Display, describe, title


@pytest.fixture
def own_methods(monkeypatch):
    """Methods that are registered meanwhile are forgotten afterwards."""
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))


@pytest.fixture
def here(monkeypatch):
    """Runs in this process, and none of them measures memory."""
    monkeypatch.setattr(sweep_module, "drive", drive_here)
    monkeypatch.setattr(runner, "peak_memory", lambda run, out: runner._UNKNOWN_MEMORY)


@pytest.fixture
def plugin(tmp_path, own_methods):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return str(path)


class Heard:
    """Notes what happens in a sweep."""

    def __init__(self, act=None):
        self.events, self.act = [], act

    def begun(self, job):
        self.events.append((job.run.method.method, "begun"))

    def said(self, job, what):
        self.events.append((job.run.method.method, *what))
        if self.act is not None:
            self.act(job, what)

    def ended(self, job):
        self.events.append((job.run.method.method, "ended", job.state))

    def stopping(self):
        self.events.append(("all", "stopping"))


def states(jobs):
    return [job.state for job in jobs]


def own(plugin, *names):
    """Runs of methods of the plugin, and of others."""
    sweep_module.load_plugins((plugin,))
    return runs(protocol(), [read_method(name) for name in names], plugins=(plugin,))


# In processes of their own


def test_a_method_that_fails_is_reported_and_the_others_are_recorded(plugin, tmp_path):
    """Two processes at once, which import the methods' file themselves."""
    out = tmp_path / "out"
    jobs = jobs_of(own(plugin, "brittle", "steady"), out)
    heard = Heard()
    sweep(jobs, out, at_once=2, listener=heard)
    brittle, steady = jobs
    assert states(jobs) == ["failed", "recorded"]
    assert brittle.reason == "ArithmeticError: the third image is one too many"
    assert "in step" in brittle.trace
    assert read(out / f"{steady.name}.json")["cost"]["memory"] is not None
    assert not (out / f"{brittle.name}.json").exists()
    assert [event for event in heard.events[:2] if event[1] == "begun"] == [
        ("brittle", "begun"),
        ("steady", "begun"),
    ]  # both, before either says a word
    assert ("brittle", "ended", "failed") in heard.events
    assert ("steady", "at") in heard.events
    # What it records is what a run in this process does.
    assert lasting(read(out / f"{steady.name}.json")) == lasting(
        played(steady.run, tmp_path / "here")
    )


def test_a_process_that_is_killed_is_reported_and_a_later_sweep_completes_it(tmp_path, monkeypatch):
    processes = []
    add = StopSwitch.add

    def added(switch, process):
        processes.append(process)
        add(switch, process)

    monkeypatch.setattr(StopSwitch, "add", added)
    out = tmp_path / "out"
    run = run_of("bestta")
    jobs = jobs_of([run], out)
    # At the first word; there is no record before memory is measured, seconds later.
    sweep(jobs, out, listener=Heard(lambda job, what: processes[0].kill()))
    assert states(jobs) == ["failed"]
    assert f"signal {int(signal.SIGKILL)}" in jobs[0].reason
    assert "Out of memory, perhaps." in jobs[0].reason
    assert not (out / f"{jobs[0].name}.json").exists()
    monkeypatch.setattr(sweep_module, "drive", drive_here)
    monkeypatch.setattr(runner, "peak_memory", lambda run, out: runner._UNKNOWN_MEMORY)
    jobs = jobs_of([run], out)
    sweep(jobs, out)
    assert states(jobs) == ["recorded"]
    assert lasting(read(out / f"{jobs[0].name}.json")) == lasting(played(run, tmp_path / "whole"))


# In this one


def test_what_is_recorded_is_skipped_and_again_runs_it_anew(here, tmp_path):
    found = runs(protocol(), [read_method("source"), read_method("bn_stats")])
    first = jobs_of(found[:1], tmp_path)
    sweep(first, tmp_path)
    record = tmp_path / f"{first[0].name}.json"
    before = record.stat().st_mtime_ns
    jobs, heard = jobs_of(found, tmp_path), Heard()
    assert states(jobs) == ["recorded before", "waiting"]
    sweep(jobs, tmp_path, listener=heard)
    assert states(jobs) == ["recorded before", "recorded"]
    assert {event[0] for event in heard.events} == {"bn_stats"}
    assert record.stat().st_mtime_ns == before
    jobs = jobs_of(found, tmp_path, again=True)
    assert states(jobs) == ["waiting", "waiting"]
    sweep(jobs, tmp_path)
    assert states(jobs) == ["recorded", "recorded"]
    assert record.stat().st_mtime_ns != before


def test_again_does_not_take_up_what_a_killed_process_left_beside_its_record(here, tmp_path):
    jobs = jobs_of([run_of()], tmp_path)
    sweep(jobs, tmp_path)
    work = tmp_path / f".{jobs[0].name}"
    work.mkdir()
    (work / "0000000004.checkpoint").write_bytes(b"all of it")
    jobs_of([run_of()], tmp_path, again=True)
    assert not work.exists()


def test_the_same_method_twice_is_one_run_and_seeds_are_runs_of_their_own(tmp_path):
    twice = [read_method("source"), read_method("source")]
    jobs = jobs_of(runs(protocol(), twice, seeds=3), tmp_path)
    assert [job.run.seed for job in jobs] == [0, 1, 2]
    assert len({job.name for job in jobs}) == 3
    assert {job.frames for job in jobs} == {4}


def test_what_is_not_there_is_told_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="name their folder with --data"):
        jobs_of([run_of(), run_of(set="cityscapes")], tmp_path)
    asked = run_of(source=Source(set="cityscapes"), forgetting=True)
    with pytest.raises(ValueError, match="--source-data"):
        jobs_of([asked], tmp_path)
    with pytest.raises(ValueError, match="no file"):
        jobs_of([replace(run_of(), plugins=("nowhere.py",))], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_stops_the_run_under_way_and_begins_no_other(here, tmp_path, monkeypatch):
    def wait_for_the_switch(text, out, say, stop):
        def told(what):
            say(what)
            deadline = time.monotonic() + 30
            while "at" in what and not stop.flipped and time.monotonic() < deadline:
                time.sleep(0.01)

        drive_here(text, out, told, stop)

    monkeypatch.setattr(sweep_module, "drive", wait_for_the_switch)
    found = runs(protocol(), [read_method("bestta"), read_method("source")])

    def interrupt(job, what):
        if "at" in what and what["at"]["position"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    jobs = jobs_of(found, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        sweep(jobs, tmp_path, listener=Heard(interrupt))
    assert states(jobs) == ["stopped", "waiting"]
    assert "stopped at frame 1" in jobs[0].reason
    monkeypatch.setattr(sweep_module, "drive", drive_here)
    jobs = jobs_of(found, tmp_path)
    sweep(jobs, tmp_path)
    assert states(jobs) == ["recorded", "recorded"]
    assert read(tmp_path / f"{jobs[0].name}.json")["cost"]["sittings"] == 2


def test_a_run_is_one_at_a_time_at_least(tmp_path):
    with pytest.raises(ValueError, match="jobs must be 1 or more, not 0"):
        sweep([], tmp_path, at_once=0)


def test_a_process_that_cannot_be_started_is_a_failure_of_its_run(tmp_path, monkeypatch):
    def broken(*arguments):
        raise OSError("no room for another process")

    monkeypatch.setattr(sweep_module, "drive", broken)
    jobs = jobs_of([run_of()], tmp_path)
    sweep(jobs, tmp_path)
    assert states(jobs) == ["failed"]
    assert "no room for another process" in jobs[0].reason


# How it is shown


AT = {
    "position": 2,
    "total": 4,
    "block": "fog",
    "round": 1,
    "rounds": 3,
    "score": 47.31,
    "milliseconds": 12.4,
    "seconds_left": 75.0,
}


@pytest.fixture
def jobs():
    mine = replace(read_method("tent"), label="TENT [mine]")
    return [
        Job(run_of(mine, run={"seed": 1}), "one", 4),
        Job(run_of("source"), "two", 4),
        Job(run_of("bestta"), "three", 4, state="recorded before"),
    ]


def test_how_far_a_run_is_takes_one_line():
    assert describe(AT) == "fog (round 2 of 3) 47.3, 12 ms an image, 75 s left"
    assert describe({**AT, "score": None}).startswith("fog (round 2 of 3), 12 ms")


def test_a_run_is_called_by_its_label_and_its_seed_if_that_is_not_the_first(jobs):
    assert [title(job) for job in jobs] == ["TENT [mine] (seed 1)", "Source", "BESTTA"]


def test_a_log_has_a_line_when_runs_begin_and_end_and_now_and_then_between(
    jobs, capsys, monkeypatch
):
    first, second, _ = jobs
    with Display(jobs) as shown:
        shown.begun(first)
        shown.said(first, {"at": AT})  # too soon after the last line
        monkeypatch.setattr(display, "EVERY_SECONDS", 0.0)
        shown.said(first, {"at": AT})
        shown.said(first, {"warning": "skipped 3.png"})
        first.state = "recorded"
        shown.ended(first)
        shown.begun(second)
        second.hear({"failed": "ValueError: so it is"})
        shown.ended(second)
    assert capsys.readouterr().err.splitlines() == [
        "TENT [mine] (seed 1): starting, 4 frames",
        f"TENT [mine] (seed 1): 2/4 {describe(AT)}",
        "TENT [mine] (seed 1): warning: skipped 3.png",
        "[1/2] TENT [mine] (seed 1) recorded",
        "Source: starting, 4 frames",
        "[2/2] Source               failed: ValueError: so it is",
    ]


def test_a_terminal_shows_a_line_of_each_run_and_leaves_those_that_ended(jobs, monkeypatch):
    file = io.StringIO()
    console = partial(Console, file=file, force_terminal=True, width=120)
    monkeypatch.setattr(display, "Console", lambda stderr, highlight: console(highlight=highlight))
    first = jobs[0]
    with Display(jobs) as shown:
        shown.begun(first)
        shown.said(first, {"at": AT})
        shown.bars.refresh()
        drawn = file.getvalue()
        assert "2/4" in drawn
        assert "fog (round 2 of 3) 47.3" in drawn
        first.state = "recorded"
        shown.ended(first)
        assert shown.lines == {}
    assert "[1/2] TENT [mine] (seed 1) recorded" in file.getvalue()


def test_a_job_hears_how_its_process_ended(jobs):
    first = jobs[0]
    first.hear({"at": AT})
    assert first.state == "waiting"
    first.hear({"stopped": "at frame 2"})
    assert (first.state, first.reason) == ("stopped", "at frame 2")
    first.hear({"failed": "so it is", "trace": "there"})
    assert (first.state, first.reason, first.trace) == ("failed", "so it is", "there")
    first.hear({"record": "there"})
    assert first.state == "recorded"
