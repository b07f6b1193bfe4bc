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


def spawned_by(parent: int) -> list[int]:
    """The workers that a process has spawned; on Linux."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in command(pid)]


def command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
