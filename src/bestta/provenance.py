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
            "cpu": cpu().get("cpu_name") or platform.processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


def cpu() -> dict[str, Any]:
    """What PyTorch knows of this CPU: its name and its instructions; older versions know none."""
    return dict(getattr(torch.cpu, "get_capabilities", dict)())


def lacks_bf16() -> bool:
    """Whether PyTorch knows this CPU to have no bf16 instructions, so that fp32 is faster."""
    known = cpu()
    return known.get("architecture") == "x86_64" and not (
        known.get("avx512_bf16") or known.get("amx_bf16")
    )


def commit() -> str | None:
    """The commit of the repository that this file belongs to; None where it belongs to none.

    A copy installed below somebody's own repository lies in it without belonging to it.
    """
    file = Path(__file__)
    if _git("ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git("describe", "--always", "--dirty")


def _git(*words: str) -> str | None:
    """What git answers in this file's folder; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
