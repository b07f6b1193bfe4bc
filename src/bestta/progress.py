"""A line that says how far long work has come, on the error stream, and silent when it is short."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """Counts steps of some work and shows the count, the rate and the time to go.

    On a terminal one line is rewritten several times a second; in a log file a new line is added
    every ten seconds. Work that ends within a second shows nothing.

    Example:
        >>> with Progress("images", total=100) as progress:
        ...     for _ in range(100):
        ...         progress.advance()
    """

    def __init__(
        self, what: str, total: int | None = None, *, show: bool | None = None, done: int = 0
    ) -> None:
        self.what, self.total, self.done = what, total, done
        self.done_before = done  # by an earlier run, which says nothing of the rate of this one
        self.terminal = sys.stderr.isatty()
        self.show = self.terminal if show is None else show
        self.started = time.monotonic()
        self.shown: float | None = None

    def advance(self, steps: int = 1) -> None:
        """Say that ``steps`` more are done."""
        self.done += steps
        now = time.monotonic()
        wait = 0.2 if self.terminal else 10.0
        due = now - self.shown >= wait if self.shown is not None else now - self.started >= 1.0
        if self.show and due:
            self.shown = now
            self._print(now - self.started)

    def say(self, text: str) -> None:
        """Put a line that stays above the one that is rewritten."""
        if self.show:
            clear = "\r\x1b[K" if self.terminal else ""
            print(f"{clear}{text}", file=sys.stderr, flush=True)

    def _print(self, seconds: float) -> None:
        rate = (self.done - self.done_before) / seconds
        text = f"{self.what}: {self.done}"
        if self.total:
            left = (self.total - self.done) / rate if rate else 0.0
            text += f" of {self.total}, {rate:.1f} a second, {span(left)} to go"
        else:
            text += f", {rate:.1f} a second"
        ends = ("\r", "\x1b[K") if self.terminal else ("", "\n")
        print(f"{ends[0]}{text}", end=ends[1], file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown is not None:
            self._print(time.monotonic() - self.started)
            if self.terminal:
                print(file=sys.stderr)


def span(seconds: float) -> str:
    """A time as people say it.

    >>> span(42), span(600), span(9000)
    ('42 s', '10 min', '2 h 30 min')
    """
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
