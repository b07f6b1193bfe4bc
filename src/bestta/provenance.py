"""Where a number comes from: version, commit, libraries, machine, time."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bestta._version import __version__


def provenance() -> dict[str, Any]:
    """What a reader needs in order to judge, and repeat, a measurement made now.

    >>> sorted(provenance())
    ['bestta', 'commit', 'machine', 'measured', 'versions']
    """
    return {
        "bestta": __version__,
        "commit": commit(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


def commit() -> str | None:
    """The commit of the repository that this file lies in; None where it lies in none."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:  # no git on this machine
        return None
    return described.stdout.strip() or None
