"""Peak memory of a method's step, measured in a process of its own.

    python -m bestta.benchmark.memory < run.json

A process that has run a benchmark holds caches of all that went before; one that does three steps
and nothing else shows what they take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from bestta.benchmark.config import Run

STEPS = 3


def peak_memory(run: Run, out: Path) -> dict[str, Any]:
    """Peak bytes of the process, and of them what steps need over the loaded model.

    The system forgets the peak of loading where it can (Linux); elsewhere the second is unknown.
    """
    # Large blocks go back to the system when they are freed, so that the peak is what was in use
    # at once and not what the C library kept for later.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(
        [sys.executable, "-m", "bestta.benchmark.memory", str(out)],
        input=run.to_json(),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"peak_bytes": None, "over_model_bytes": None, "memory": None, "reason": reason}
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(run: Run, out: Path) -> dict[str, Any]:
    """In this process: load, then three steps."""
    import torch

    from bestta.benchmark.parts import assemble
    from bestta.benchmark.streams import stream_of

    stream = stream_of(run)
    frames = list(islice(stream.frames(), run.protocol.batch))
    parts = assemble(run, out)
    image = parts.tensor(frames)
    on_gpu = parts.adapter.device.type == "cuda"
    before = _status("VmRSS")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(parts.adapter.device)
    elif before is not None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(STEPS):
        with parts.precision():
            parts.adapter(image)
    parts.wait()
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(parts.adapter.device)
        model = sum(p.numel() * p.element_size() for p in parts.model.parameters())
        return {"peak_bytes": peak, "over_model_bytes": peak - model, "memory": "cuda"}
    now = _status("VmHWM")
    if now is None or before is None:
        return {"peak_bytes": _portable_peak(), "over_model_bytes": None, "memory": "process"}
    return {"peak_bytes": now, "over_model_bytes": max(0, now - before), "memory": "process"}


def _status(key: str) -> int | None:
    """A figure of Linux's on this process, in bytes; None elsewhere."""
    place = Path("/proc/self/status")
    if not place.exists() or not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    for line in place.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _portable_peak() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    print(json.dumps(measure(Run.from_json(sys.stdin.read()), Path(sys.argv[1]))))
