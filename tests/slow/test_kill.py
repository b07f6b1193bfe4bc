"""A run survives anything: killed, stopped, torn, out of room, or met by another, it goes on.

What comes out is held against the record of a run that nobody disturbed: all of its bytes up to
``cost``, which it ends with, and every picture.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bestta.benchmark.checkpoints import read
from bestta.benchmark.config import Run, read_method, read_protocol, runs
from bestta.benchmark.runner import Progress, Stopped, execute

SEED = int(os.environ.get("BESTTA_KILL_SEED", "6"))
"""Of all moments and damages below; another one looks elsewhere."""

PROTOCOL = """\
set: streets
split: val
size: [128, 64]
images: 6
rounds: 2
conditions: [fog, night, rain]
model: streets
source: {split: val, images: 3}
forgetting: true
similarities: true
embeddings: true
"""

# A commit made while the tests run would be told in the records, and rightly.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GIT_DIR": os.devnull,
}

PATIENCE = 120.0


@dataclass(frozen=True)
class Case:
    """A method, and how it is run: between them they take every path through the runner."""

    method: str
    images: int = 6
    batch: int = 1
    workers: int = 0


CASES = [
    Case("bestta"),
    Case("tent", workers=2),
    Case("tent_reset", batch=4),
    Case("cotta", images=1),
    Case("eata"),
]


@pytest.fixture(scope="module")
def protocol(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("protocol") / "tiny.yaml"
    path.write_text(PROTOCOL, encoding="utf-8")
    return path


def run_of(protocol: Path, case: Case) -> Run:
    method = read_method(case.method)
    method = replace(method, prepare=replace(method.prepare, images=24))
    chosen = read_protocol(protocol, images=case.images, batch=case.batch)
    (run,) = runs(chosen, [method], workers=case.workers, checkpoint_seconds=0.0)
    return run


# --- a worker, watched --------------------------------------------------------------------


@dataclass
class Worker:
    """A process that does a run, and what it has said so far."""

    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def started(cls, run: Run, out: Path, **how: Any) -> Worker:
        process = subprocess.Popen(
            [sys.executable, "-m", "bestta.benchmark.worker", str(out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            **how,
        )
        worker = cls(process)
        process.stdin.write(f"{run.to_json()}\n")
        process.stdin.flush()
        worker.readers = [
            threading.Thread(target=lambda: worker.lines.extend(map(json.loads, process.stdout))),
            threading.Thread(target=lambda: worker.complaints.extend(process.stderr)),
        ]
        for reader in worker.readers:
            reader.start()
        return worker

    @property
    def position(self) -> int:
        return next((s["at"]["position"] for s in reversed(self.lines) if "at" in s), 0)

    def wait_for(self, moment: Callable[[Worker], bool]) -> None:
        """Until it is ``moment``, or it has ended."""
        limit = time.monotonic() + PATIENCE
        while self.process.poll() is None and not moment(self):
            assert time.monotonic() < limit, (self.lines[-1:], self.complaints)
            time.sleep(1e-3)

    def kill(self) -> bool:
        """With SIGKILL; whether it was in time."""
        self.process.kill()
        return self.ended() == -signal.SIGKILL

    def ended(self) -> int:
        code = self.process.wait(PATIENCE)
        for reader in self.readers:
            reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        return code

    def told(self) -> str:
        return f"{self.lines[-1:]} {''.join(self.complaints)}"


def finish(run: Run, out: Path) -> float:
    """Do the rest of a run. Returns how long it took."""
    worker = Worker.started(run, out)
    assert worker.ended() == 0, worker.told()
    return time.monotonic() - worker.began


def content(out: Path) -> dict[str, bytes]:
    """Every file that readers of ``out`` see, records without what they cost."""
    found = {}
    for path in sorted(out.rglob("*")):
        place = path.relative_to(out)
        if place.parts[0] == "profiles" or not path.is_file():
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            data, mark, cost = data.partition(b'\n "cost": {')
            assert mark, path
            assert b'"sittings"' in cost, path
        found[str(place)] = data
    assert found
    return found


@dataclass
class Undisturbed:
    seconds: float
    content: dict[str, bytes]


@pytest.fixture(scope="module")
def undisturbed(protocol, tmp_path_factory) -> Callable[[Case], Undisturbed]:
    """What a run leaves that nobody disturbs; each is done once."""
    known: dict[Case, Undisturbed] = {}

    def of(case: Case) -> Undisturbed:
        if case not in known:
            out = tmp_path_factory.mktemp("undisturbed")
            seconds = finish(run_of(protocol, case), out)
            known[case] = Undisturbed(seconds, content(out))
        return known[case]

    return of


def checkpoints_in(out: Path) -> list[Path]:
    """Latest first."""
    return sorted(out.glob(".*/*.checkpoint"), reverse=True)


# --- SIGKILL ------------------------------------------------------------------------------

Moment = Callable[[Worker], bool]


def moments(chance: random.Random, out: Path, case: Case) -> Iterator[tuple[str, Moment]]:
    """Moments to kill at: those of the stream from front to back, those at the very end last.

    Each also comes, at the latest, when all frames are seen: then memory is being measured.
    """
    total = 2 * 3 * case.images

    def after(seconds: float) -> Moment:
        limit: list[float] = []

        def over(worker: Worker) -> bool:
            limit[:] = limit or [time.monotonic() + seconds]
            return time.monotonic() >= limit[0]

        return over

    def all_seen(worker: Worker) -> bool:
        return worker.position == total or any(out.glob(f".*/{total:010}.checkpoint"))

    def in_start(part: float) -> Moment:
        return after(chance.uniform(0, 3))

    def in_preparation(part: float) -> Moment:
        pause = after(chance.uniform(0, 1))
        return lambda worker: (out / "profiles").exists() and pause(worker)

    def at_frame(part: float) -> Moment:
        first, pause = 1 + int(part * (total - 2)), after(chance.uniform(0, 0.2))
        return lambda worker: worker.position >= first and pause(worker)

    def in_checkpoint(part: float) -> Moment:
        first = int(part * (total - 2))

        def writing(worker: Worker) -> bool:
            if worker.position < first:
                return False
            return any(out.glob(".*/.*.checkpoint.*.tmp")) or all_seen(worker)

        return writing

    def in_memory(part: float) -> Moment:
        pause = after(chance.uniform(0, 3))
        return lambda worker: all_seen(worker) and pause(worker)

    def in_record(part: float) -> Moment:
        pause = after(chance.uniform(0, 0.02))
        return lambda worker: any(out.glob("*.pictures")) and pause(worker)

    kinds = [in_start, at_frame, at_frame, in_checkpoint, in_checkpoint]
    chance.shuffle(kinds)
    if case.method == "eata":
        kinds.insert(0, in_preparation)
    for number, kind in enumerate(kinds):
        yield kind.__name__, kind(chance.uniform(number, number + 1) / len(kinds))
    yield "in_memory", in_memory(1.0)
    yield "in_record", in_record(1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method)
def test_a_run_killed_at_any_moments_ends_in_the_record_of_one_that_never_was(
    case, protocol, undisturbed, tmp_path
):
    expected = undisturbed(case).content
    chance = random.Random(f"{SEED} {case}")
    run = run_of(protocol, case)
    kills = []
    for name, moment in moments(chance, tmp_path, case):
        worker = Worker.started(run, tmp_path)
        worker.wait_for(moment)
        where = worker.position
        if worker.kill():
            kills.append((name, where))
        else:
            assert worker.process.returncode == 0, worker.told()
    finish(run, tmp_path)
    print(f"seed {SEED}, {case.method}: killed {len(kills)} times, at {kills}")
    assert len(kills) >= 5  # of five methods, this makes twenty-five
    assert content(tmp_path) == expected


# --- asked to stop ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "end of input"])
def test_a_worker_that_is_asked_to_stop_leaves_a_checkpoint_and_130(
    how, protocol, undisturbed, tmp_path
):
    case = CASES[0]
    run = replace(run_of(protocol, case), checkpoint_seconds=1e6)
    worker = Worker.started(run, tmp_path)
    worker.wait_for(lambda worker: worker.position >= 5)
    if how == "end of input":
        worker.process.stdin.close()
    else:
        worker.process.send_signal(signal.Signals[how])
    assert worker.ended() == 130, worker.told()
    assert "stopped at frame" in worker.lines[-1]["stopped"]
    (checkpoint,) = checkpoints_in(tmp_path)
    assert int(checkpoint.stem) >= 5
    finish(run, tmp_path)
    assert content(tmp_path) == undisturbed(case).content


@pytest.mark.parametrize("how", ["SIGINT", "end of input"])
def test_a_worker_stops_in_the_midst_of_a_preparation_too(how, protocol, tmp_path):
    run = run_of(protocol, Case("eata"))
    run = replace(run, method=replace(run.method, prepare=replace(run.method.prepare, images=2000)))
    worker = Worker.started(run, tmp_path)
    turns = tmp_path / "profiles"
    worker.wait_for(lambda worker: turns.exists())
    time.sleep(1.0)
    asked = time.monotonic()
    if how == "end of input":
        worker.process.stdin.close()
    else:
        worker.process.send_signal(signal.SIGINT)
    assert worker.ended() == 130, worker.told()
    assert time.monotonic() - asked < 10
    assert list(turns.glob("*.part"))
    assert not list(turns.glob("*.safetensors"))


def test_a_run_that_comes_from_a_file_does_not_take_its_end_for_a_stop(protocol, tmp_path):
    run = run_of(protocol, CASES[0])
    file = tmp_path / "run.json"
    file.write_text(f"{run.to_json()}\n", encoding="utf-8")
    with file.open() as text:
        done = subprocess.run(
            [sys.executable, "-m", "bestta.benchmark.worker", str(tmp_path / "out")],
            stdin=text,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=PATIENCE,
        )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    assert len(list((tmp_path / "out").glob("*.json"))) == 1


# --- torn checkpoints ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_done(protocol, tmp_path_factory) -> tuple[Run, Path]:
    """A run that was stopped in its second round, with two checkpoints."""
    run = run_of(protocol, CASES[0])
    out = tmp_path_factory.mktemp("half")
    seen: list[int] = []

    def stopping() -> bool:
        return len(checkpoints_in(out)) == 2 and seen[-1] > 20

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_DIR", os.devnull)
        with pytest.raises(Stopped):
            execute(run, out, tell=lambda at: seen.append(at.position), stopping=stopping)
    assert len(checkpoints_in(out)) == 2
    return run, out


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def zeros(data: bytes, chance: random.Random) -> bytes:
    kept = chance.randrange(len(data) - 1)
    return data[:kept] + bytes(len(data) - kept)


def flipped(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def empty(data: bytes, chance: random.Random) -> bytes:
    return b""


def goes_on(run: Run, out: Path) -> int:
    """Do the rest of a run in this process. Returns the first position that it told of."""
    told: list[Progress] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_DIR", os.devnull)
        execute(run, out, tell=told.append, measure_memory=False)
    return told[0].position


@pytest.mark.parametrize("damage", [cut, zeros, flipped, empty], ids=lambda d: d.__name__)
def test_a_torn_checkpoint_is_not_believed_and_the_one_before_it_is(
    damage, half_done, undisturbed, tmp_path
):
    run, stopped = half_done
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    latest, before = checkpoints_in(out)
    data = latest.read_bytes()
    chance = random.Random(f"{SEED} {damage.__name__}")
    for _ in range(200):
        latest.write_bytes(damage(data, chance))
        assert read(latest) is None
    assert goes_on(run, out) == int(before.stem) + 1
    assert content(out) == undisturbed(CASES[0]).content


def test_a_run_whose_checkpoints_are_all_torn_starts_anew(half_done, undisturbed, tmp_path):
    run, stopped = half_done
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    chance = random.Random(SEED)
    for path in checkpoints_in(out):
        path.write_bytes(cut(path.read_bytes(), chance))
    assert goes_on(run, out) == 1
    assert content(out) == undisturbed(CASES[0]).content


def test_half_written_files_do_no_harm(half_done, undisturbed, tmp_path):
    run, stopped = half_done
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    latest = checkpoints_in(out)[0]
    name = latest.parent.name.removeprefix(".")
    pictures = out / f"{name}.pictures"
    pictures.mkdir()
    for place in (
        latest.with_name(f".{int(latest.stem) + 1:010}.checkpoint.1.tmp"),
        latest.with_name(".adapter.safetensors.1.tmp"),
        latest.with_name("adapter.safetensors"),
        pictures / ".fog.jpg.1.tmp",
        pictures / "fog.jpg",
        out / f".{name}.json.1.tmp",
    ):
        place.write_bytes(b"half")
    assert goes_on(run, out) == int(latest.stem) + 1
    assert content(out) == undisturbed(CASES[0]).content


def test_a_torn_checkpoint_does_not_take_the_place_of_a_whole_one(half_done, tmp_path):
    run, stopped = half_done
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    latest = checkpoints_in(out)[0]
    far = latest.with_name("0000009999.checkpoint")
    far.write_bytes(b"torn")
    steps: list[int] = []
    with pytest.raises(Stopped):
        execute(run, out, stopping=lambda: len(steps) == 2 or steps.append(1))
    assert [read(path) is not None for path in checkpoints_in(out)] == [True, True]


# --- no room ------------------------------------------------------------------------------


def test_a_run_that_may_not_write_enough_says_so_and_goes_on_when_it_may(
    protocol, undisturbed, tmp_path
):
    run = run_of(protocol, CASES[0])

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    worker = Worker.started(run, tmp_path, preexec_fn=little_room)
    assert worker.ended() == 1
    assert os.strerror(errno.EFBIG) in worker.lines[-1]["failed"], worker.told()
    assert not list(tmp_path.glob("*.json"))
    assert not list(tmp_path.rglob("*.tmp"))
    finish(run, tmp_path)
    assert content(tmp_path) == undisturbed(CASES[0]).content


@pytest.mark.parametrize("when", ["first checkpoint", "last checkpoint", "picture", "record"])
def test_a_disk_that_is_full_leaves_no_broken_record(
    when, protocol, undisturbed, tmp_path, monkeypatch
):
    run = run_of(protocol, CASES[0])
    monkeypatch.setenv("GIT_DIR", os.devnull)
    marks = {
        "first checkpoint": ".checkpoint.",
        "last checkpoint": "0000000036.checkpoint.",
        "picture": "night-truth.png",
        "record": ".json.",
    }
    sync = os.fsync

    def full(number: int) -> None:
        name = os.readlink(f"/proc/self/fd/{number}")
        if marks[when] in Path(name).name:
            os.truncate(number, os.fstat(number).st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    with monkeypatch.context() as patch:
        patch.setattr("bestta.files.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            execute(run, tmp_path, measure_memory=False)
    assert not list(tmp_path.glob("*.json"))
    assert not list(tmp_path.rglob("*.tmp"))
    execute(run, tmp_path, measure_memory=False)
    assert content(tmp_path) == undisturbed(CASES[0]).content


# --- `bestta bench`, and two of them ------------------------------------------------------

METHODS = ("bestta", "tent")


def bench(protocol: Path, out: Path, *more: str, methods=METHODS) -> subprocess.Popen[str]:
    words = [word for method in methods for word in ("--method", method)]
    return subprocess.Popen(
        [sys.executable, "-m", "bestta", "bench", str(protocol), *words, "--out", str(out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, "TERM": "dumb"},
    )


def workers_of(parent: int) -> list[int]:
    """The processes that ``parent`` has started, as Linux lists them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        state, of = text.rpartition(")")[2].split()[:2]
        if int(of) == parent and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_alive(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def swept(protocol, tmp_path_factory) -> dict[str, bytes]:
    """What a sweep leaves that nobody disturbs."""
    out = tmp_path_factory.mktemp("swept")
    process = bench(protocol, out, "--jobs", "2")
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    return content(out)


def stop_midway(process: subprocess.Popen[str], out: Path, number: signal.Signals) -> list[int]:
    """Send ``number`` when both runs are under way. Returns their processes."""
    limit = time.monotonic() + PATIENCE
    while len([p for p in out.glob(".*") if p.is_dir()]) < len(METHODS):
        assert time.monotonic() < limit
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    workers = workers_of(process.pid)
    assert len(workers) == len(METHODS)
    process.send_signal(number)
    return workers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_stopped_leaves_checkpoints_and_no_process_and_goes_on(
    number, protocol, swept, tmp_path
):
    process = bench(protocol, tmp_path, "--jobs", "2")
    workers = stop_midway(process, tmp_path, number)
    text, _ = process.communicate(timeout=PATIENCE)
    killed = number == signal.SIGKILL
    assert process.returncode == (-signal.SIGKILL if killed else 130), text
    limit = time.monotonic() + 15
    while killed and any(map(is_alive, workers)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
    assert not list(tmp_path.glob("*.json"))
    assert len(checkpoints_in(tmp_path)) == len(METHODS)

    process = bench(protocol, tmp_path, "--jobs", "2")
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    assert content(tmp_path) == swept


def test_two_sweeps_at_once_keep_out_of_each_others_way(protocol, swept, tmp_path):
    both = [
        bench(protocol, tmp_path, methods=METHODS),
        bench(protocol, tmp_path, methods=tuple(reversed(METHODS))),
    ]
    texts = [process.communicate(timeout=PATIENCE)[0] for process in both]
    for process, text in zip(both, texts, strict=True):
        assert process.returncode in (0, 1), text
        assert (process.returncode == 1) == ("another process works in" in text), text
    records = {name: data for name, data in content(tmp_path).items() if name.endswith(".json")}
    assert records == {name: data for name, data in swept.items() if name.endswith(".json")}


def test_a_sweep_that_meets_another_does_what_the_other_does_not(protocol, swept, tmp_path):
    name = next(n for n in swept if n.endswith(".json") and "-bestta-" in n)
    other = bench(protocol, tmp_path, methods=("bestta",))
    while not (tmp_path / f".{Path(name).stem}").exists():
        assert other.poll() is None
        time.sleep(0.01)
    os.kill(*workers_of(other.pid), signal.SIGSTOP)
    stopped = workers_of(other.pid)
    try:
        process = bench(protocol, tmp_path)
        text, _ = process.communicate(timeout=PATIENCE)
    finally:
        for number in stopped:
            os.kill(number, signal.SIGCONT)
    assert process.returncode == 1, text
    assert "failed: BESTTA: Busy: another process works in" in text
    assert "failed: TENT" not in text
    text, _ = other.communicate(timeout=PATIENCE)
    assert other.returncode == 0, text
    left = {n: data for n, data in content(tmp_path).items() if not n.endswith(".failed.txt")}
    assert left == swept
