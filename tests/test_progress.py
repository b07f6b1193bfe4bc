"""The line that says how far long work has come: when it speaks, and what it counts."""

from __future__ import annotations

import sys
import time

import pytest

from bestta.progress import Progress, span


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def work(progress: Progress, clock: Clock, steps: int, seconds: float) -> None:
    """Steps that take ``seconds`` each."""
    for _ in range(steps):
        clock.now += seconds
        progress.advance()


def test_work_that_ends_within_a_second_shows_nothing(clock, capsys):
    with Progress("images", 9, show=True) as progress:
        work(progress, clock, 9, 0.1)
    assert capsys.readouterr() == ("", "")


def test_work_that_is_not_to_be_shown_shows_nothing_however_long_it_is(clock, capsys):
    with Progress("images", 9, show=False) as progress:
        work(progress, clock, 9, 100.0)
    with Progress("images", 9) as progress:  # no terminal here
        work(progress, clock, 9, 100.0)
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_a_line_after_a_second_then_every_ten_and_one_at_the_end(clock, capsys):
    with Progress("images", 50, show=True) as progress:
        work(progress, clock, 50, 0.5)
    lines = capsys.readouterr().err.splitlines()
    # Two steps a second: due after 1 s, 11 s and 21 s, and the last word after 25 s.
    assert lines == [
        "images: 2 of 50, 2.0 a second, 24 s to go",
        "images: 22 of 50, 2.0 a second, 14 s to go",
        "images: 42 of 50, 2.0 a second, 4 s to go",
        "images: 50 of 50, 2.0 a second, 0 s to go",
    ]


def test_the_rate_counts_the_steps_of_this_run_only(clock, capsys):
    with Progress("steps", 1000, show=True, done=900) as progress:
        work(progress, clock, 1, 2.0)
    # One step in two seconds and 99 left: 198 s. With the 900 of before it would be 0 s.
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "steps: 901 of 1000, 0.5 a second, 3 min to go"


def test_several_steps_may_be_told_at_once_and_the_total_may_be_unknown(clock, capsys):
    with Progress("images", show=True) as progress:
        clock.now += 2.0
        progress.advance(8)
    assert capsys.readouterr().err.splitlines()[0] == "images: 8, 4.0 a second"


def test_a_terminal_has_one_line_rewritten_five_times_a_second(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("images", 20, show=None) as progress:
        work(progress, clock, 20, 0.125)
    shown = capsys.readouterr().err
    # Due at 1 s; then the first step 0.2 s or more later is 0.25 s later: 1.25, 1.5, … 2.5 s are
    # six more, and the end.
    assert shown.count("\r") == 8
    assert shown.count("\n") == 1
    assert shown.endswith("\x1b[K\n")


def test_an_error_inside_passes_through(clock):
    with pytest.raises(RuntimeError, match="ours"), Progress("images", 2, show=True):
        raise RuntimeError("ours")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (150.1, "3 min"),
        (7100, "118 min"),
        (7200, "2 h 0 min"),
        (9000, "2 h 30 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_a_span_is_said_in_seconds_minutes_or_hours(seconds, said):
    assert span(seconds) == said


def test_a_line_that_stays_clears_the_one_that_is_rewritten(clock, capsys):
    progress = Progress("steps", 10, show=True)
    progress.terminal = True
    progress.say("epoch 1")
    assert capsys.readouterr().err == "\r\x1b[Kepoch 1\n"
    progress.terminal = False
    progress.say("epoch 2")
    Progress("steps", 10, show=False).say("epoch 3")
    assert capsys.readouterr().err == "epoch 2\n"
