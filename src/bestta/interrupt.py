"""Ctrl-C that is obeyed between two steps of long work, and never inside one."""

from __future__ import annotations

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
