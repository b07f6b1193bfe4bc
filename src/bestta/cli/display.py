"""How a sweep goes: on a terminal one line a run, rewritten; in a log a line now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from bestta.benchmark.sweep import Job
from bestta.progress import span

EVERY_SECONDS = 10.0
"""Between two lines on one run in a log."""


class Display:
    """Shows block, running score, time per image and time left of every run."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.width = max((len(title(job)) for job in jobs), default=0)
        self.total = sum(job.state == "waiting" for job in jobs)
        self.over = 0
        self.lines: dict[str, TaskID] = {}
        self.told: dict[str, float] = {}
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[at]}", markup=False),
            console=self.console,
            transient=True,
        )

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:  # elsewhere it would leave an empty line
            self.bars.stop()

    def begun(self, job: Job) -> None:
        """A line for the run."""
        self.told[job.name] = time.monotonic()
        if self.console.is_terminal:
            self.lines[job.name] = self.bars.add_task(
                f"{title(job):<{self.width}}", total=job.frames, at="starting"
            )
        else:
            self.put(f"{title(job)}: starting, {job.frames} frames")

    def said(self, job: Job, what: dict[str, Any]) -> None:
        """How far it is."""
        if "warning" in what:
            self.put(f"{title(job)}: warning: {what['warning']}")
        if not what.keys() & {"at", "note", "event"}:
            return
        at = what.get("at")
        text = what.get("note", what.get("event")) if at is None else describe(at)
        if self.console.is_terminal:
            if job.name in self.lines:
                done = {} if at is None else {"completed": at["position"]}
                self.bars.update(self.lines[job.name], at=text, **done)
        elif "event" in what or time.monotonic() - self.told[job.name] >= EVERY_SECONDS:
            self.told[job.name] = time.monotonic()
            how_far = "" if at is None else f"{at['position']}/{at['total']} "
            self.put(f"{title(job)}: {how_far}{text}")

    def ended(self, job: Job) -> None:
        """It is over: one line that stays."""
        if job.name in self.lines:
            self.bars.remove_task(self.lines.pop(job.name))
        self.over += 1
        how = job.state if job.state == "recorded" else f"{job.state}: {job.reason}"
        self.put(f"[{self.over}/{self.total}] {title(job):<{self.width}} {how}")

    def stopping(self) -> None:
        """Say that it was heard."""
        self.put("Stopping after the images under way, with checkpoints; again to stop at once.")

    def put(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)


def title(job: Job) -> str:
    """What the display calls a run."""
    seed = f" (seed {job.run.seed})" if job.run.seed else ""
    return f"{job.run.method.label}{seed}"


def describe(at: dict[str, Any]) -> str:
    """Block, score so far, time per image, time left.

    >>> describe({"block": "fog", "round": 0, "rounds": 3, "score": 47.31, "milliseconds": 12.4,
    ...           "seconds_left": 75.0})
    'fog (round 1 of 3) 47.3, 12 ms an image, 75 s left'
    """
    where = f"{at['block']} (round {at['round'] + 1} of {at['rounds']})"
    score = "" if at["score"] is None else f" {at['score']:.1f}"
    each = f"{at['milliseconds']:.0f} ms an image, {span(at['seconds_left'])} left"
    return f"{where}{score}, {each}"
