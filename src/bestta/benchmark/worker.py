"""One run in a process of its own: the config comes in, progress goes out, line by line.

    python -m bestta.benchmark.worker OUT < run.json

The first line of the input is the run. A pipe then stays open: when whoever holds its other end is
gone, however that came about, the input ends, and the run stops with a checkpoint.
"""

from __future__ import annotations

import _thread
import json
import os
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

Say = Callable[[dict[str, Any]], None]

APART = 0.1
"""Seconds between two words on how far it is."""

STOPPED = 130
"""Exit code of a run that was asked to stop, as shells have it."""


def work(text: str, out: Path, say: Say, stopping: Callable[[], bool]) -> int:
    """Do the run that ``text`` describes. Returns the exit code; what it is up to goes to ``say``.

    Args:
        text: A `Run` as JSON.
        out: Where records go.
        say: Told ``{"at": progress}`` or ``{"note": words}`` now and then, and at the end
            ``{"record": path}``, ``{"stopped": why}``, or ``{"failed": what, "trace": where}``.
        stopping: Whether to stop.
    """
    told = 0.0

    def tell(at: Any) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= APART or at.position == at.total:
            told = now
            say({"at": asdict(at)})

    doing = ""

    def note(text: str) -> None:
        nonlocal told, doing
        begun, doing = doing, text.partition(":")[0]
        if doing != begun:
            say({"event": text})
        elif time.monotonic() - told >= APART:
            told = time.monotonic()
            say({"note": text})

    try:
        # Here, for they take a second or two, in which it may be stopped as well.
        from bestta.benchmark.config import Run
        from bestta.benchmark.parts import load_plugins
        from bestta.benchmark.runner import execute

        load_plugins(tuple(json.loads(text).get("plugins", ())))
        run = Run.from_json(text)
        path = execute(run, out, tell=tell, note=note, stopping=stopping)
        say({"record": str(path)})
        return 0
    except KeyboardInterrupt as stopped:
        say({"stopped": str(stopped) or "stopped"})
        return STOPPED
    except Exception as error:
        say({"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
        return 1


def main() -> None:
    """Read the run, do it, say how it goes."""
    text = sys.stdin.readline()
    out = Path(sys.argv[1])
    alone = threading.Event()
    if not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode):  # nobody stands behind a file
        threading.Thread(target=_wait_for_end, args=(alone,), daemon=True).start()
    warnings.showwarning = lambda message, *_: _say({"warning": str(message)})
    code = work(text, out, _say, alone.is_set)
    os._exit(code)  # a thread may wait for input for ever


def _wait_for_end(alone: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    alone.set()
    _thread.interrupt_main()  # as Ctrl-C does: a preparation asks nobody whether to stop


def _say(what: dict[str, Any]) -> None:
    try:
        sys.stdout.write(f"{json.dumps(what)}\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        pass  # nobody listens any more; the run is stopping


if __name__ == "__main__":
    main()
