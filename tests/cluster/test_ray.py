"""A cluster gives the records that one machine gives: two nodes of Ray, here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bestta.benchmark import config
from bestta.benchmark.cluster import sweep_on_ray, with_absolute_paths
from bestta.benchmark.sweep import Job, Silent, jobs_of, sweep

# Ray's own modules warn of what they will do in later versions, and leave sockets to the collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

METHODS = ("source", "bn_stats", "tent", "bestta")

PROTOCOL = """\
set: streets
split: val
size: [128, 64]
images: 6
rounds: 2
conditions: [fog, night]
model: streets
methods: [source, bn_stats, tent, bestta]
"""

FAILING = """\
from bestta.adapters.registry import register_adapter
from bestta.adapters.tent import Tent

@register_adapter("failing")
class Failing(Tent):
    def step(self, image):
        raise RuntimeError("this method always fails")
"""


@pytest.fixture(scope="module", autouse=True)
def _alike() -> Iterator[None]:
    """What nodes and this machine share: no commit may come in between, and one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_DIR", os.devnull)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        yield


@pytest.fixture(scope="module")
def address(_alike) -> Iterator[str]:
    """Of a cluster of two nodes with room for one run each."""
    from ray.cluster_utils import Cluster  # missing, it must not pass for a cluster that works

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def protocol(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("protocol") / "tiny.yaml"
    path.write_text(PROTOCOL, encoding="utf-8")
    return path


def content(out: Path) -> dict[str, bytes]:
    """Every file that readers of ``out`` see, records without what they cost."""
    found = {}
    for path in sorted(out.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".json":
                data, mark, _ = data.partition(b'\n "cost": {')
                assert mark, path
            found[str(path.relative_to(out))] = data
    return found


@pytest.fixture(scope="module")
def local(protocol, tmp_path_factory, _alike) -> dict[str, bytes]:
    """What the sweep leaves on this machine alone."""
    out = tmp_path_factory.mktemp("local")
    jobs = jobs_of(config.runs(config.read_protocol(protocol)), out)
    sweep(jobs, out, at_once=2)
    assert [job.state for job in jobs] == ["recorded"] * len(METHODS), [j.reason for j in jobs]
    return content(out)


class Listener(Silent):
    """Remembers all that is said."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.nodes: dict[str, str] = {}

    def begun(self, job: Job) -> None:
        self.events.append((job.name, "begun"))

    def said(self, job: Job, what: dict[str, Any]) -> None:
        if "node" in what:
            self.nodes[job.name] = what["node"]
        elif "at" in what:
            self.events.append((job.name, "said"))

    def ended(self, job: Job) -> None:
        self.events.append((job.name, job.state))

    def stopping(self) -> None:
        self.events.append(("all", "stopping"))


def test_a_cluster_writes_the_records_that_one_machine_writes(protocol, address, local, tmp_path):
    jobs = jobs_of(config.runs(config.read_protocol(protocol)), tmp_path)
    listener = Listener()
    sweep_on_ray(jobs, tmp_path, address=address, listener=listener)
    assert [job.state for job in jobs] == ["recorded"] * len(METHODS), [j.reason for j in jobs]
    assert content(tmp_path) == local
    assert len(set(listener.nodes.values())) == 2
    for job in jobs:
        told = [what for name, what in listener.events if name == job.name]
        assert (told[0], told[-1]) == ("begun", "recorded")
        assert "said" in told


def test_a_run_that_fails_stops_no_other_and_recorded_ones_are_skipped(protocol, address, tmp_path):
    plugin = tmp_path / "failing.py"
    plugin.write_text(FAILING, encoding="utf-8")
    words = ["--method", "source", "--method", "failing", "--method", "bestta"]
    out = tmp_path / "out"
    # Plugins are part of a record's config: the local sweep has them too.
    alone = tmp_path / "alone"
    more = ["--plugin", str(plugin)]
    here = bench(protocol, alone, *words, *more)
    there = bench(protocol, out, *words, *more, "--on", "ray", "--address", address)
    for done in (here, there):
        assert done.returncode == 1, done.stdout
        assert "failed: failing: RuntimeError: this method always fails" in done.stdout
    records = sorted(name for name in content(out) if name.endswith(".json"))
    assert len(records) == 2
    assert {n: d for n, d in content(out).items() if not n.endswith(".txt")} == {
        n: d for n, d in content(alone).items() if not n.endswith(".txt")
    }
    before = {name: (out / name).stat().st_mtime_ns for name in records}
    again = bench(protocol, out, *words, *more, "--on", "ray", "--address", address)
    assert again.returncode == 1
    assert "Recorded before, with the same settings: Source, BESTTA." in again.stdout
    assert {name: (out / name).stat().st_mtime_ns for name in records} == before


def bench(protocol: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(protocol, out, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


def command(protocol: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "bestta", "bench", str(protocol), "--out", str(out), *more]


def test_the_command_writes_the_same_records_on_a_cluster(protocol, address, local, tmp_path):
    done = bench(protocol, tmp_path, "--on", "ray", "--address", address)
    assert done.returncode == 0, done.stdout
    assert content(tmp_path) == local
    assert "Next: bestta report" in done.stdout


LONG = ("--images", "20", "--method", "tent", "--method", "bestta")
"""Runs of several seconds: how soon a cluster hears of a stop is a second or two."""


@pytest.fixture(scope="module")
def long_ones(protocol, tmp_path_factory, _alike) -> dict[str, bytes]:
    """What those leave on this machine alone."""
    out = tmp_path_factory.mktemp("long")
    done = bench(protocol, out, *LONG, "--jobs", "2")
    assert done.returncode == 0, done.stdout
    return content(out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_on_a_cluster_that_is_stopped_goes_on_from_its_checkpoints(
    number, protocol, address, long_ones, tmp_path
):
    words = command(protocol, tmp_path, *LONG, "--on", "ray", "--address", address)
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        limit = time.monotonic() + 120
        while len(list(tmp_path.glob(".tiny-*"))) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.02)
        process.send_signal(number)
        text, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, text
    assert "The same command goes on from there" in text
    assert len(list(tmp_path.glob(".tiny-*/*.checkpoint"))) == 2, text
    assert not list(tmp_path.glob("*.json")), text
    done = bench(protocol, tmp_path, *LONG, "--on", "ray", "--address", address)
    assert done.returncode == 0, done.stdout
    assert content(tmp_path) == long_ones


def test_runs_that_have_not_begun_when_a_sweep_is_stopped_do_not_begin(protocol, address, tmp_path):
    jobs = jobs_of(config.runs(config.read_protocol(protocol), seeds=3), tmp_path)

    class Impatient(Listener):
        def begun(self, job: Job) -> None:
            super().begun(job)
            os.kill(os.getpid(), signal.SIGINT) if len(self.events) == 1 else None

    with pytest.raises(KeyboardInterrupt):
        sweep_on_ray(jobs, tmp_path, address=address, listener=Impatient())
    states = [job.state for job in jobs]
    assert set(states) <= {"stopped", "recorded"}
    assert sum("before it began" in job.reason for job in jobs) >= len(jobs) - 4


def test_paths_are_made_absolute_before_they_leave_and_the_record_keeps_its_name(
    protocol, tmp_path, monkeypatch
):
    (run,) = config.runs(
        config.read_protocol(protocol),
        [config.read_method("source")],
        data="here",
        source_data=None,
    )
    monkeypatch.chdir(tmp_path)
    sent = with_absolute_paths(run)
    assert (sent.data, sent.source_data) == (str(tmp_path / "here"), None)
    assert sent.protocol.model == "streets"
    assert sent.resolved() == run.resolved()


def test_without_ray_the_command_says_what_to_install(protocol, tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails, as if it were not there
    done = run("bench", protocol, "--out", tmp_path, "--on", "ray")
    assert done.returncode == 1
    assert "error: --on ray needs Ray: pip install 'bestta[cluster]'" in done.stderr
    assert "Traceback" not in done.stderr
