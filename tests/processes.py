"""What tests ask of other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that ended stays listed until its parent, here the system's first, asks for it.
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def end_within(seconds: float, pids: Iterable[int]) -> bool:
    """Whether all of these are gone by then."""
    left, deadline = list(pids), time.monotonic() + seconds
    while (left := [pid for pid in left if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left
