"""Ctrl-C that is obeyed between two steps of long work, and workers that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_requests(tell: bool) -> Iterator[list[int]]:
    """The signals that asked to stop so far: SIGINT and SIGTERM are noted instead of raised.

    A step that is interrupted half way has moved some parameters and not others.
    """
    requests: list[int] = []

    def note(number: int, frame: object) -> None:
        if requests:
            raise KeyboardInterrupt
        requests.append(number)
        if tell:  # past Python's buffers, which may be in use where the signal came
            os.write(2, b"\nStopping after this step, with a checkpoint; again to stop at once.\n")

    if threading.current_thread() is not threading.main_thread():
        yield requests  # signals are the main thread's
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Have this process, one of several workers, end when its parent is gone, even if killed."""

    def follow() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
