"""Time and memory of one step of adaptation over the plain forward.

    make bench                                              DeepLabV3+-R50 at 512x1024, one thread
    python benchmarks/step_cost.py --size 256 512 --rounds 9
    python benchmarks/step_cost.py --methods --encoder efficientnet_lite0 --size 256 512

The first two look at BESTTA, the third at every method that segments, CoTTA in both forms; `source`
is the plain forward, and `tent_reset` costs what `tent` does.

The contenders run in turn, round after round, in one process with one thread, so that a busy
neighbour slows them all; the ratio is taken within each round. Memory is the peak over what the
process held before its first forward at full size, each contender in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bestta
from bestta.models import DeepLabV3Plus
from bestta.progress import Progress
from bestta.provenance import commit

Step = Callable[[Tensor], Tensor]

BESTTA: dict[str, dict[str, Any] | None] = {
    "plain forward": None,
    "BeIN layer3, γ still": {"layers": ["backbone.layer3"], "lr": 0.0},
    "BESTTA layer3, no entropy": {"layers": ["backbone.layer3"], "lambda_entropy": 0.0},
    "BESTTA layer3": {"layers": ["backbone.layer3"]},
    "BESTTA layer1": {"layers": ["backbone.layer1"]},
    "BESTTA layer1+layer2": {"layers": ["backbone.layer1", "backbone.layer2"]},
}
METHODS: dict[str, dict[str, Any] | None] = {
    "plain forward": None,
    "bn_stats": {"method": "bn_stats"},
    "alpha_bn": {"method": "alpha_bn"},
    "bn_ema": {"method": "bn_ema"},
    "bestta layer1, γ still": {"layers": ["backbone.layer1"], "lr": 0.0},
    "bestta layer1": {"layers": ["backbone.layer1"]},
    "bestta layer3": {"layers": ["backbone.layer3"]},
    "tent": {"method": "tent"},
    # Random weights are unsure of everything: these would learn from nothing, and cost less.
    "eata": {"method": "eata", "margin": 1.1, "redundancy": 1.1},
    "sar": {"method": "sar", "margin": 1.1, "recover_below": 0.0},
    "ecotta": {"method": "ecotta", "margin": 1.1},
    "memo": {"method": "memo"},
    "cotta": {"method": "cotta"},
    "cotta, published form": {"method": "cotta", "form": "published"},
    "petal": {"method": "petal"},
}
PREPARED: dict[str, dict[str, Any]] = {
    "eata": {},
    "ecotta": {"warmup_epochs": 1},
    "petal": {"swag_epochs": 1},
}


def build(encoder: str, contenders: Iterable[str]) -> tuple[nn.Module, bestta.SourceProfile]:
    """A network with random weights (they cost the same), and a profile of its stages."""
    torch.manual_seed(0)
    model = DeepLabV3Plus(encoder).eval()  # type: ignore[arg-type]
    stages = [f"backbone.layer{i}" for i in range(1, 5)]
    images = [torch.randn(2, 3, 64, 64)]
    profile = bestta.SourceProfile.collect(model, images, layers=stages)
    for method in sorted(PREPARED.keys() & set(contenders)):
        profile = bestta.prepare(model, images, method=method, profile=profile, **PREPARED[method])
    return model, profile


def contender(name: str, model: nn.Module, profile: bestta.SourceProfile) -> Step:
    settings = {**BESTTA, **METHODS}[name]
    if settings is not None:
        return bestta.adapt(model, profile, **settings)

    def plain(image: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(image)
            return logits

    return plain


def measure_times(
    contenders: Iterable[str], encoder: str, size: tuple[int, int], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each contender in each round; one round before them warms up."""
    model, profile = build(encoder, contenders)
    steps = {name: contender(name, model, profile) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in steps}
    with Progress("timed steps", total=(rounds + 1) * len(steps), show=True) as progress:
        for turn in range(rounds + 1):
            image = torch.randn(1, 3, *size)
            for name, step in steps.items():
                start = time.perf_counter()
                step(image)
                if turn:
                    times[name].append((time.perf_counter() - start) * 1e3)
                progress.advance()
    return times


def measure_memory(name: str, encoder: str, size: tuple[int, int]) -> int:
    """Peak bytes over the process before its first full-size forward (Linux)."""
    model, profile = build(encoder, [name])
    step = contender(name, model, profile)
    step(torch.randn(1, 3, 64, 64))  # load what is loaded once
    image = torch.randn(1, 3, *size)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(3):
        step(image)
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def memory_in_own_process(name: str, arguments: argparse.Namespace) -> int | None:
    if not Path("/proc/self/clear_refs").exists():
        return None
    size = [str(side) for side in arguments.size]
    command = [sys.executable, __file__, "--encoder", arguments.encoder, "--size", *size]
    # Large blocks go back to the system when they are freed, so that the peak is what was in use
    # at once and not what the C library kept for later.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command += ["--memory-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--encoder", default="resnet50", choices=["resnet50", "efficientnet_lite0"])
    parser.add_argument("--size", type=int, nargs=2, default=(512, 1024), metavar=("H", "W"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", action="store_true", help="all methods, and not BESTTA alone")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = (arguments.size[0], arguments.size[1])
    torch.set_num_threads(1)
    if arguments.memory_of:
        print(measure_memory(arguments.memory_of, arguments.encoder, size))
        return

    print(f"DeepLabV3+ with {arguments.encoder}, one image of {size[0]}x{size[1]}, one thread")
    contenders = METHODS if arguments.methods else BESTTA
    times = measure_times(contenders, arguments.encoder, size, arguments.rounds)
    plain_ms = times["plain forward"]
    memory: dict[str, int | None] = {}
    print(f"\n{'':<28}{'time':>8}{'ms':>9}{'memory':>9}{'MB':>8}")
    for name in contenders:
        memory[name] = peak = memory_in_own_process(name, arguments)
        ratio = statistics.median(a / b for a, b in zip(times[name], plain_ms, strict=True))
        row = f"{name:<28}{ratio:>7.2f}x{statistics.median(times[name]):>9.0f}"
        plain_bytes = memory["plain forward"]
        if peak is not None and plain_bytes:
            row += f"{peak / plain_bytes:>8.2f}x{peak / 1e6:>8.0f}"
        print(row, flush=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if not arguments.methods:
        print("\nThe paper's step, on a GPU at 1920x1080: 2.15x the time, 4.98x the memory.")
    record = {
        "benchmark": "step_cost",
        "encoder": arguments.encoder,
        "size": size,
        "settings": contenders,
        "time_ms": times,
        "peak_bytes": memory,
        "threads": 1,
        "load": load,
        "seed": 0,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"bestta": bestta.__version__, "torch": torch.__version__},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(f"Written: {arguments.out}")
    else:
        page = "methods" if arguments.methods else "bestta"
        print(f"Next: --out FILE keeps the record; docs/{page}.md tells what costs what.")


if __name__ == "__main__":
    main()
