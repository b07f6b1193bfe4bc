"""Many runs: each in a process of its own, several at once, here or on a cluster.

A run that is recorded already is skipped, one that fails does not stop the others, and all of them
can be stopped at any time: the same sweep goes on where it was.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from bestta.benchmark.checkpoints import Checkpoints
from bestta.benchmark.config import Run
from bestta.benchmark.parts import identity, load_plugins
from bestta.benchmark.streams import stream_of
from bestta.benchmark.worker import STOPPED, Say

ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""Has glibc keep what is freed: networks ask for the same large blocks again and again, and getting
them anew from the system costs up to a third of a forward. Other systems do not read it."""

LAST_LINES = 5
"""So much of what a process said is shown if it ended without a word to us."""


@dataclass
class Job:
    """A run on its way to a record.

    Attributes:
        run: What it does.
        name: Its record's name.
        frames: How many frames it has.
        state: How it stands.
        reason: Why it failed or stopped.
        trace: Where in the code it failed, for those who want to know.
        again: Whether it was recorded already and shall not count.
    """

    run: Run
    name: str
    frames: int
    state: Literal["waiting", "recorded before", "running", "recorded", "failed", "stopped"] = (
        "waiting"
    )
    reason: str = ""
    trace: str = ""
    again: bool = False

    def hear(self, said: dict[str, Any]) -> None:
        """Take in what the process that does it says."""
        if "record" in said:
            self.state = "recorded"
        elif "stopped" in said:
            self.state, self.reason = "stopped", said["stopped"]
        elif "failed" in said:
            self.state, self.reason = "failed", said["failed"]
            self.trace = said.get("trace", "")


class Listener(Protocol):
    """Whoever shows how a sweep goes."""

    def begun(self, job: Job) -> None:
        """``job`` runs now."""

    def said(self, job: Job, what: dict[str, Any]) -> None:
        """``job`` said something: how far it is, or a warning."""

    def ended(self, job: Job) -> None:
        """``job`` is over; its state says how."""

    def stopping(self) -> None:
        """All of them were asked to stop."""


class Silent:
    """Nobody looks."""

    def begun(self, job: Job) -> None:
        """Nothing."""

    def said(self, job: Job, what: dict[str, Any]) -> None:
        """Nothing."""

    def ended(self, job: Job) -> None:
        """Nothing."""

    def stopping(self) -> None:
        """Nothing."""


def jobs_of(runs: Sequence[Run], out: Path, *, again: bool = False) -> list[Job]:
    """The jobs of a sweep; what is recorded already is marked so, or forgotten if ``again``.

    Listing the files of each data set shows here, before anything runs, what is not there.
    """
    jobs: dict[str, Job] = {}
    for run in runs:
        load_plugins(run.plugins)
        stream = stream_of(run)
        job = Job(run, identity(run, stream), len(stream))
        if (out / f"{job.name}.json").exists():
            if again:
                Checkpoints(out / f".{job.name}").clear()  # of a run killed after its record
                (out / f"{job.name}.json").unlink()
                job.again = True
            else:
                job.state = "recorded before"
        jobs.setdefault(job.name, job)  # the same method named twice is one run
    return list(jobs.values())


def sweep(
    jobs: Sequence[Job], out: Path, *, at_once: int = 1, listener: Listener | None = None
) -> None:
    """Do what is waiting, ``at_once`` runs at a time, each in its own process on this machine.

    Ctrl-C, or SIGTERM, stops all of them after their current step, each with a checkpoint; a second
    one stops them at once. Either way KeyboardInterrupt is raised when all have ended.
    """
    if at_once < 1:
        raise ValueError(f"jobs must be 1 or more, not {at_once}.")
    listener = listener or Silent()
    out.mkdir(parents=True, exist_ok=True)
    waiting = [job for job in jobs if job.state == "waiting"]
    heard: queue.Queue[tuple[Job, dict[str, Any] | None]] = queue.Queue()
    stop = StopSwitch()
    running = 0
    heeded = 0
    with noted_signals() as signals:
        while running or (waiting and not heeded):
            if len(signals) > heeded:
                heeded = len(signals)
                stop.flip(at_once=heeded > 1)
                listener.stopping()
            while waiting and running < at_once and not heeded:
                job = waiting.pop(0)
                job.state = "running"
                listener.begun(job)
                threading.Thread(target=_drive, args=(job, out, heard, stop), daemon=True).start()
                running += 1
            try:
                job, said = heard.get(timeout=0.2)
            except queue.Empty:
                continue
            if said is not None:
                job.hear(said)
                listener.said(job, said)
            else:
                running -= 1
                listener.ended(job)
    if heeded:
        raise KeyboardInterrupt


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The SIGINTs and SIGTERMs so far, noted instead of raised: they may come at any moment."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # signals are the main thread's
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


ASK = signal.SIGTERM
"""What a process is asked to stop with; SIGINT does not reach those that Ray starts."""


class StopSwitch:
    """Processes that are to stop when it is flipped: after their step, or at once."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.flipped = False
        self.lock = threading.Lock()

    def add(self, process: subprocess.Popen[str]) -> None:
        """Have ``process`` stop as well."""
        with self.lock:
            self.processes.append(process)
            if self.flipped:
                process.send_signal(ASK)

    def flip(self, *, at_once: bool = False) -> None:
        """Stop them all."""
        with self.lock:
            self.flipped = True
            for process in self.processes:
                if process.poll() is None:
                    process.kill() if at_once else process.send_signal(ASK)


def _drive(
    job: Job,
    out: Path,
    heard: queue.Queue[tuple[Job, dict[str, Any] | None]],
    stop: StopSwitch,
) -> None:
    try:
        drive(job.run.to_json(), out, lambda said: heard.put((job, said)), stop)
    except Exception as error:  # of the starting itself: no memory, no interpreter
        heard.put((job, {"failed": f"{type(error).__name__}: {error}"}))
    finally:
        heard.put((job, None))


def drive(text: str, out: Path, say: Say, stop: StopSwitch) -> None:
    """Have a process do the run ``text`` and pass on what it says, until it ends."""
    threads = str(json.loads(text)["threads"])
    environment = {
        **ALLOCATION,
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "bestta.benchmark.worker", str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches it through us, and not half way through a step
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stop.add(process)
    complaints: list[str] = []
    listening = threading.Thread(target=lambda: complaints.extend(process.stderr or ()))
    listening.start()
    last: dict[str, Any] = {}
    try:
        process.stdin.write(f"{text}\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it is gone already; its exit code says so
    for line in process.stdout:
        try:
            last = json.loads(line)
        except ValueError:
            complaints.append(line)
            continue
        say(last)
    code = process.wait()
    listening.join()
    process.stdin.close()
    process.stdout.close()
    process.stderr.close()
    if not last.keys() & {"record", "failed", "stopped"}:
        say(_last_word(code, complaints, stop.flipped))


def _last_word(code: int, complaints: list[str], asked: bool) -> dict[str, Any]:
    """What to make of a process that ended without telling how."""
    if code == STOPPED or (asked and code):
        return {"stopped": "stopped at once; it goes on from its last checkpoint"}
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    killed = getattr(signal, "SIGKILL", None)  # Windows has none
    hint = " Out of memory, perhaps." if killed is not None and code == -killed else ""
    lines = "".join(complaints[-LAST_LINES:]).strip()
    return {"failed": f"its process ended with {what}.{hint} {lines}".strip()}
