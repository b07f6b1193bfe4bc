"""Time and memory of every method's step over the plain forward, and how BESTTA's cost grows.

    make bench-cost                                         all of it: a few hours
    python benchmarks/cost.py --only wrn                    one subject (or several)
    python benchmarks/cost.py --quick                       small networks and images, to try it

Time: the contenders run in turn, round after round, in one process with one thread, so that a busy
neighbour slows them all; the ratio to the plain forward is taken within each round. Those that cost
more than ten plain forwards are timed once, beside a plain forward of the same process.

Memory: the peak over what the process held before the contender was made, copies of weights and
folded weights included, each contender in a process of its own.

Every part is put down as it is finished: after Ctrl-C the same command goes on from there.
`benchmarks/cost_plot.py` draws the record.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bestta
from bestta.files import Busy, held, write_whole
from bestta.models import DeepLabV3Plus, WideResNet
from bestta.progress import Progress
from bestta.provenance import lacks_bf16, provenance

Step = Callable[[Tensor], Tensor]
Settings = dict[str, Any] | None
"""What `bestta.adapt` is called with; None for the plain forward."""

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "results" / "published" / "acdc-continual.json"

PLAIN = "plain forward"
SUBJECTS = ("512x1024", "1088x1920", "wrn", "growth")
"""What ``--only`` takes; with ``--quick`` the sizes are smaller and the names stay."""
EXPENSIVE = ("cotta", "cotta, published form", "petal")
"""More than ten plain forwards each."""
FRAMES_TO_SETTLE = 40
PREPARED: dict[str, dict[str, Any]] = {
    "eata": {},
    "ecotta": {"warmup_epochs": 1},
    "petal": {"swag_epochs": 1},
}
OTHERS: dict[str, Settings] = {
    "bn_stats": {"method": "bn_stats"},
    "alpha_bn": {"method": "alpha_bn"},
    "tent": {"method": "tent"},
    # Random weights are unsure of everything: these would learn from nothing, and cost less.
    "eata": {"method": "eata", "margin": 1.1, "redundancy": 1.1},
    "ecotta": {"method": "ecotta", "margin": 1.1},
    "sar": {"method": "sar", "margin": 1.1, "recover_below": 0.0},
    "cotta": {"method": "cotta"},
    "cotta, published form": {"method": "cotta", "form": "published"},
    "petal": {"method": "petal"},
}
WITH_BACKWARD = ("tent", "eata", "ecotta", "sar", *EXPENSIVE)
IN_THE_PAPER = {
    PLAIN: "source",
    "BESTTA stock layer3": "bestta",
    "bn_stats": "bn_stats",
    "tent": "tent",
    "eata": "eata",
    "ecotta": "ecotta",
    "cotta, published form": "cotta",
    "petal": "petal",
}

TIMING = {
    # What is freed is kept: otherwise the kernel's clearing of fresh pages is timed, too.
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
}
BLOCK = {"DeepLabV3Plus": 2**20, "WideResNet": 2**17}
"""Blocks from this size on go back to the system when they are freed, so that the peak is what was
in use at once and not what the C library kept for later. The maps of a 32x32 image are small."""


# --- what is measured ---------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Contenders on one network at one image size: a table, or points of a curve."""

    key: str
    title: str
    subject: str
    network: dict[str, Any]
    size: tuple[int, int]
    rounds: int
    contenders: dict[str, Settings]

    @property
    def timed_in_turn(self) -> dict[str, Settings]:
        return {n: s for n, s in self.contenders.items() if n not in EXPENSIVE}


def bein(network: Mapping[str, Any], form: str, *numbers: int, **more: Any) -> dict[str, Settings]:
    """BESTTA with one BeIN behind each of the stages of these numbers, and what it is called.

    >>> bein({"stages": ["block1", "block2"]}, "lean", 1, 2)
    {'BESTTA lean block1+2': {'preset': 'single', 'lean': True, 'layers': ['block1', 'block2']}}
    """
    stages = [network["stages"][number - 1] for number in numbers]
    first = stages[0].rpartition(".")[2]
    where = first + "".join(f"+{number}" for number in numbers[1:])
    auto = " auto" if more.get("when") == "auto" else ""
    name = f"BESTTA {form}{auto} {where}"
    if "entropy_stride" in more:
        name += f", entropy stride {more['entropy_stride']}"
    if "precision" in more:
        name += f", {more['precision']}"
    # A step that learns; in the usual form few do.
    return {name: {"preset": "single", "lean": form == "lean", "layers": stages, **more}}


def table_contenders(network: Mapping[str, Any]) -> dict[str, Settings]:
    every: dict[str, Settings] = {PLAIN: None}
    for numbers in ((3,), (2,), (1,), (1, 2)):
        every |= bein(network, "lean", *numbers)
    every |= bein(network, "stock", 3) | bein(network, "stock", 1)
    every |= bein(network, "lean", 3, when="auto")
    if network["class"] == "DeepLabV3Plus":  # a classifier's logits have no resolution to halve
        every |= bein(network, "lean", 3, entropy_stride=2)
    return every | bein(network, "lean", 3, precision="bf16") | OTHERS


def size_contenders(network: Mapping[str, Any]) -> dict[str, Settings]:
    """Those whose cost is followed over the image size."""
    ours = bein(network, "lean", 3) | bein(network, "stock", 3)
    return {PLAIN: None, **ours, "tent": OTHERS["tent"]}


def place_contenders(network: Mapping[str, Any]) -> dict[str, Settings]:
    """BeIN behind each stage, and behind ever more of them."""
    every: dict[str, Settings] = {}
    for numbers in ((1,), (2,), (3,), (4,), (1, 2), (1, 2, 3), (1, 2, 3, 4)):
        every |= bein(network, "lean", *numbers) | bein(network, "stock", *numbers)
    return every


def plan(quick: bool, rounds: int) -> list[Measurement]:
    """Everything there is to measure, in order."""
    stages = [f"backbone.layer{i}" for i in range(1, 5)]
    deeplab = {"class": "DeepLabV3Plus", "encoder": "resnet50", "stages": stages, "side": 64}
    wrn: dict[str, Any] = {"class": "WideResNet", "depth": 28, "width": 10, "side": 16}
    wrn["stages"] = [f"block{i}" for i in range(1, 4)]
    sizes = [(512, 1024), (1088, 1920), (256, 512), (384, 768)]
    name = "R50"
    if quick:
        deeplab, name = {**deeplab, "encoder": "small", "side": 32}, "small"
        wrn = {**wrn, "depth": 10, "width": 2}
        sizes = [(128, 256), (160, 320), (64, 128), (96, 192)]
    network = f"DeepLabV3+-{name}"

    def streets(subject: str, size: tuple[int, int], times: int, *some: Settings) -> Measurement:
        pixels = f"{size[0]}x{size[1]}"
        contenders: dict[str, Settings] = {}
        for more in some:
            contenders |= more or {}
        key, title = f"deeplab-{name}-{pixels}".lower(), f"{network} at {pixels}"
        return Measurement(key, title, subject, deeplab, size, times, contenders)

    wide = f"wrn-{wrn['depth']}-{wrn['width']}"
    small = rounds if quick else 5 * rounds  # steps of a tenth of a second: noisy, and cheap
    return [
        streets("512x1024", sizes[0], rounds, table_contenders(deeplab)),
        # A minute a step, and ten for some: long enough for noise to even out within it.
        streets("1088x1920", sizes[1], max(1, rounds // 3), table_contenders(deeplab)),
        Measurement(
            wide,
            f"{wide.upper()} at 32x32 (lean does not apply to images so small)",
            "wrn",
            wrn,
            (32, 32),
            small,
            table_contenders(wrn),
        ),
        streets(
            "growth",
            sizes[2],
            rounds if quick else 2 * rounds,
            size_contenders(deeplab),
            place_contenders(deeplab),
        ),
        streets("growth", sizes[3], rounds, size_contenders(deeplab)),
    ]


# --- measuring, in processes of their own -------------------------------------------------


def build(
    network: Mapping[str, Any], contenders: Iterable[Settings]
) -> tuple[nn.Module, bestta.SourceProfile]:
    """A network with random weights (they cost the same), and a profile of its stages."""
    torch.manual_seed(0)
    model: nn.Module
    if network["class"] == "WideResNet":
        model = WideResNet(network["depth"], network["width"]).eval()
    else:
        model = DeepLabV3Plus(network["encoder"]).eval()
    images = [torch.randn(2, 3, 64, 64)]
    profile = bestta.SourceProfile.collect(model, images, layers=network["stages"])
    methods = {settings.get("method") for settings in contenders if settings}
    for method in sorted(PREPARED.keys() & methods):
        profile = bestta.prepare(model, images, method=method, profile=profile, **PREPARED[method])
    return model, profile


def contender(settings: Settings, model: nn.Module, profile: bestta.SourceProfile) -> Step:
    if settings is not None:
        # The step itself: what a guard adds is measured by benchmarks/guard.py --cost.
        return bestta.adapt(model, profile, **{"guard": False, **settings})

    def plain(image: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(image)
            return logits

    return plain


def adapted(step: Step) -> bool | None:
    """Whether the last call ran a backward pass; None for the plain forward."""
    last = getattr(step, "last", None)
    return None if last is None else bool(last.adapted)


def milliseconds(step: Step, image: Tensor) -> float:
    start = time.perf_counter()
    step(image)
    return (time.perf_counter() - start) * 1e3


def interleaved(
    steps: Mapping[str, Step], image: Tensor, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[bool | None]]]:
    """Milliseconds of each contender in each round, and whether it adapted.

    One round before them warms up.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    learned: dict[str, list[bool | None]] = {name: [] for name in steps}
    with Progress("timed steps", total=(rounds + 1) * len(steps), show=True) as progress:
        for turn in range(rounds + 1):
            for name, step in steps.items():
                took = milliseconds(step, image)
                if turn:
                    times[name].append(took)
                    learned[name].append(adapted(step))
                progress.advance()
    return times, learned


def settle(step: Step, image: Tensor) -> int | None:
    """How many frames of the same image it takes until one is not adapted to; None: too many."""
    for frames in range(1, FRAMES_TO_SETTLE + 1):
        step(image)
        if not adapted(step):
            return frames
    return None


def measure_times(job: Mapping[str, Any]) -> dict[str, Any]:
    """The times of all contenders, in turn, on one image that repeats."""
    contenders: dict[str, Settings] = job["contenders"]
    model, profile = build(job["network"], contenders.values())
    steps = {name: contender(s, model, profile) for name, s in contenders.items()}
    image = torch.randn(1, 3, *job["size"])
    settled = {
        name: settle(steps[name], image)
        for name, settings in contenders.items()
        if settings and settings.get("when") == "auto"
    }
    times, learned = interleaved(steps, image, job["rounds"])
    return {"time_ms": times, "adapted": learned, "settled_after": settled}


def measure_memory(job: Mapping[str, Any]) -> dict[str, Any]:
    """Peak bytes of a contender over the process before it was made (Linux).

    ``held_bytes`` of them it keeps between frames; ``step_bytes`` is the peak over the process
    after a first small step, so without copies of weights that were made by then.
    """
    model, profile = build(job["network"], [job["settings"]])
    small = torch.randn(1, 3, job["network"]["side"], job["network"]["side"])
    image = torch.randn(1, 3, *job["size"])

    # What is loaded once is loaded by a spare, which takes its copies of weights along.
    spare = contender(job["settings"], copy.deepcopy(model), profile)
    spare(small)
    del spare
    give_back()

    before = start_peak()
    step = contender(job["settings"], model, profile)
    step(small)
    making = peak_bytes()
    give_back()
    after = start_peak()
    took = [milliseconds(step, image) for _ in range(job["steps"])]
    learned = adapted(step)
    peak = peak_bytes()
    plain = milliseconds(contender(None, model, profile), image) if job["timed"] else None
    found: dict[str, Any] = {"steps_ms": took, "adapted": learned, "plain_ms": plain}
    if before is None or after is None or making is None or peak is None:
        return {**found, "peak_bytes": None, "held_bytes": None, "step_bytes": None}
    return {
        **found,
        "peak_bytes": max(making, peak) - before,
        "held_bytes": after - before,
        "step_bytes": peak - after,
    }


def give_back() -> None:
    """Free what nobody holds, to the system and not to the C library's store."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def start_peak() -> int | None:
    """The peak starts anew, at what the process holds now; None on systems that cannot tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_bytes() -> int | None:
    return status_bytes("VmHWM") if Path("/proc/self/clear_refs").exists() else None


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def in_own_process(job: Mapping[str, Any]) -> dict[str, Any]:
    """What `measure_times` or `measure_memory` finds in a process with one thread."""
    blocks = {"MALLOC_MMAP_THRESHOLD_": str(job.get("block"))}
    environment = {**os.environ, **(TIMING if job["kind"] == "times" else blocks)}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode == -signal.SIGKILL and job["kind"] == "memory":
        return {"killed": True}
    if done.returncode:
        raise SystemExit(
            f"Measuring failed with exit code {done.returncode}"
            + (": too little memory, probably" if done.returncode == -signal.SIGKILL else "")
            + ". The parts before it are kept; --only leaves subjects out."
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- parts, put down as they are finished -------------------------------------------------


def code() -> dict[str, Any]:
    """What a part's numbers depend on besides its job: commit, sources, libraries, machine."""
    sums = hashlib.sha256()
    package = Path(bestta.__file__).parent
    for path in [*sorted(package.rglob("*.py")), Path(__file__)]:
        sums.update(path.read_bytes())
    known = provenance()
    return {
        "commit": known["commit"],
        "sources": sums.hexdigest()[:16],
        "torch": known["versions"]["torch"],
        "cpu": known["machine"]["cpu"],
    }


class Parts:
    """Results of jobs by name, in a folder; a job that is done already is not done again."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        measure: Callable[[Mapping[str, Any]], dict[str, Any]] = in_own_process,
    ) -> None:
        self.folder, self.identity, self.measure = folder, dict(identity), measure
        self.measured = 0

    def path(self, name: str, job: Mapping[str, Any]) -> Path:
        """Where a job's part lies: other rounds or contenders do not overwrite it."""
        digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:8]
        words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        return self.folder / f"{words}-{digest}.json"

    def found(self, name: str, job: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was put down for exactly this job by exactly this code, if anything."""
        try:
            part: dict[str, Any] = json.loads(self.path(name, job).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        same = part.get("code") == self.identity and part.get("job") == job
        return part if same else None

    def get(self, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        """The part: as it was put down, or measured now and put down."""
        job = json.loads(json.dumps(job))  # tuples become lists, as in the file
        part = self.found(name, job)
        if part is not None:
            return part
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        part = {
            "code": self.identity,
            "job": job,
            "load": load,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "result": self.measure(job),
        }
        self.measured += 1
        if not part["result"].get("killed"):  # it may fit another time
            write_whole(self.path(name, job), json_bytes(part))
        return part


def jobs(measurement: Measurement) -> dict[str, dict[str, Any]]:
    """Everything to be done for a measurement, by name: the times, and each contender's memory."""
    at = {"network": measurement.network, "size": list(measurement.size)}
    found: dict[str, dict[str, Any]] = {
        f"{measurement.key} times": {
            "kind": "times",
            **at,
            "contenders": measurement.timed_in_turn,
            "rounds": measurement.rounds,
        }
    }
    for name, settings in measurement.contenders.items():
        once = name in EXPENSIVE
        found[f"{measurement.key} memory of {name}"] = {
            "kind": "memory",
            **at,
            "settings": settings,
            "block": BLOCK[measurement.network["class"]],
            "steps": 1 if once else 2,  # the first step counts: what it sets up is needed, too
            "timed": once,
        }
    return found


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


# --- from times to tables -----------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One contender's cost; ratios are to the plain forward."""

    contender: str
    time_ratio: float
    time_range: tuple[float, float]
    """The least and the greatest ratio of a round: how far one round can be trusted."""
    time_ms: float
    memory_ratio: float | None
    peak_bytes: int | None
    held_bytes: int | None
    once: bool
    note: str = ""
    paper_time_ratio: float | None = None
    paper_memory_ratio: float | None = None


def time_ratio(times: Sequence[float], plain: Sequence[float]) -> float:
    """Median over the rounds of the ratio within each round.

    >>> time_ratio([20.0, 90.0, 20.0], [10.0, 30.0, 8.0])
    2.5
    """
    return statistics.median(round_ratios(times, plain))


def round_ratios(times: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(times, plain, strict=True)]


def rows(measurement: Measurement, found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The table of a measurement from the results of its `jobs`."""
    timing = found[f"{measurement.key} times"]
    plain_memory = found[f"{measurement.key} memory of {PLAIN}"].get("peak_bytes")
    published = paper_ratios() if measurement.network["class"] == "DeepLabV3Plus" else {}
    table = []
    for name in measurement.contenders:
        memory = found[f"{measurement.key} memory of {name}"]
        notes = []
        if name in timing["time_ms"]:
            times = timing["time_ms"][name]
            ratio, took = time_ratio(times, timing["time_ms"][PLAIN]), statistics.median(times)
            ratios = round_ratios(times, timing["time_ms"][PLAIN])
            learned = timing["adapted"][name]
        elif memory.get("killed"):
            ratio, took, learned = float("nan"), float("nan"), [None]
            ratios = [ratio]
        else:
            took = memory["steps_ms"][0]
            ratio, learned = took / memory["plain_ms"], [memory["adapted"]]
            ratios = [ratio]
        if name in timing["settled_after"]:
            frames = timing["settled_after"][name]
            notes.append(
                f"settled after {frames} frames"
                if frames is not None
                else f"not settled after {FRAMES_TO_SETTLE} frames"
            )
            if any(learned):
                notes.append(f"adapted on {sum(map(bool, learned))} of {len(learned)} frames")
        elif runs_backward(name) and not all(learned) and not memory.get("killed"):
            notes.append(f"no backward on {len(learned) - sum(map(bool, learned))} frames")
        if memory.get("killed"):
            notes.append("killed: did not fit into this machine's memory")
        peak = memory.get("peak_bytes")
        paper = published.get(IN_THE_PAPER.get(name, ""), (None, None))
        table.append(
            Row(
                name,
                ratio,
                (min(ratios), max(ratios)),
                took,
                peak / plain_memory if peak is not None and plain_memory else None,
                peak,
                memory.get("held_bytes"),
                name in EXPENSIVE,
                "; ".join(notes),
                *paper,
            )
        )
    return table


def runs_backward(name: str) -> bool:
    return name.startswith("BESTTA") or name in WITH_BACKWARD


def paper_ratios() -> dict[str, tuple[float, float]]:
    """Time and memory of each method over the source model's, as the paper gives them."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]
    by_method = {row["method"]: (row["time_ms"], row["memory_gb"]) for row in published}
    source = by_method["source"]
    return {m: (ms / source[0], gb / source[1]) for m, (ms, gb) in by_method.items()}


def printed_table(title: str, table: Sequence[Row]) -> str:
    lines = [
        title,
        f"{'':<36}{'time':>8}{'of rounds':>12}{'ms':>8}{'memory':>9}{'MB':>7}{'held':>6}   paper's",
    ]
    for row in table:
        spread = "" if row.once else f"{row.time_range[0]:.2f}-{row.time_range[1]:.2f}"
        line = f"{row.contender:<36}{row.time_ratio:>7.2f}x{spread:>12}{row.time_ms:>8.0f}"
        if row.memory_ratio is not None and row.peak_bytes is not None:
            line += f"{row.memory_ratio:>8.2f}x{row.peak_bytes / 1e6:>7.0f}"
            line += f"{max(row.held_bytes or 0, 0) / 1e6:>6.0f}"
        else:
            line += f"{'-':>9}{'-':>7}{'-':>6}"
        paper = ""
        if row.paper_time_ratio is not None:
            paper = f"{row.paper_time_ratio:.2f}x {row.paper_memory_ratio:.2f}x"
        notes = "; ".join(filter(None, ["once" if row.once else "", row.note]))
        lines.append(f"{line}   {paper:<14}{notes}".rstrip())
    return "\n".join(lines)


# --- growth -------------------------------------------------------------------------------


def growth(tables: Mapping[str, Sequence[Row]], every: Sequence[Measurement]) -> dict[str, Any]:
    """Curves: cost over the image size, over BeIN's place, and over the number of BeINs.

    Only what has been measured is in them.

    Returns:
        For each of ``size``, ``depth`` and ``number`` the points of each contender:
        ``{"label", "time_ratio", "memory_ratio"}``, a size's with its ``pixels``.
    """

    def point(key: str, name: str, label: str, **more: Any) -> list[dict[str, Any]]:
        for row in tables.get(key, ()):
            if row.contender == name:
                ratios = {"time_ratio": row.time_ratio, "memory_ratio": row.memory_ratio}
                return [{"label": label, **ratios, **more}]
        return []

    streets = [m for m in every if m.network["class"] == "DeepLabV3Plus"]
    streets.sort(key=lambda m: m.size)
    small, network = streets[0], streets[0].network
    curves: dict[str, Any] = {"size": {}, "depth": {}, "number": {}}
    for name in size_contenders(network):
        curves["size"][name] = [
            p
            for m in streets
            for p in point(m.key, name, f"{m.size[0]}x{m.size[1]}", pixels=m.size[0] * m.size[1])
        ]
    for form in ("lean", "stock"):
        curves["depth"][f"BESTTA {form}"] = [
            p
            for n in range(1, 5)
            for p in point(small.key, next(iter(bein(network, form, n))), f"layer{n}")
        ]
        curves["number"][f"BESTTA {form}"] = [
            p
            for n in range(1, 5)
            for p in point(small.key, next(iter(bein(network, form, *range(1, n + 1)))), str(n))
        ]
    return curves


GROWTH_TITLES = {
    "size": "How cost grows with the image size",
    "depth": "with the place of the one BeIN",
    "number": "with the number of BeINs (behind layer1, layer1+2, ...)",
}


def printed_growth(curves: Mapping[str, Any]) -> str:
    lines = []
    for what, title in GROWTH_TITLES.items():
        labels = [p["label"] for p in next(iter(curves[what].values()))]
        lines.append(f"\n{title}: time and memory\n{'':<24}" + "".join(f"{w:>15}" for w in labels))
        for name, points in curves[what].items():
            cells = {
                p["label"]: f"{p['time_ratio']:.2f}x "
                + (f"{p['memory_ratio']:.2f}x" if p["memory_ratio"] is not None else "-")
                for p in points
            }
            row = "".join(f"{cells.get(word, '-'):>15}" for word in labels)
            lines.append(f"{name:<24}{row}")
    return "\n".join(lines).lstrip("\n")


# --- the bar ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One thing asked for, what was measured, and whether that meets it."""

    subject: str
    bar: str
    figure: str
    met: bool


def verdicts(measurement: Measurement, table: Sequence[Row]) -> list[Verdict]:
    """The bars, held against one table."""
    by_name = {row.contender: row for row in table}
    found: list[Verdict] = []

    def at_most(name: str, time_bar: float, memory_bar: float | None = None) -> None:
        row = by_name.get(name)
        if row is None:
            return
        low, high = row.time_range
        bar = f"{name}: at most {time_bar}x the time"
        figure = f"{row.time_ratio:.2f}x (rounds {low:.2f}-{high:.2f})"
        met = row.time_ratio <= time_bar
        if memory_bar is not None:
            bar += f", {memory_bar:.2f}x the memory"
            figure += f", {shown(row.memory_ratio)}"
            met = met and row.memory_ratio is not None and row.memory_ratio <= memory_bar
        found.append(Verdict(measurement.title, bar, figure, met))

    stage = measurement.network["stages"][2].rpartition(".")[2]
    ours, auto = f"BESTTA lean {stage}", f"BESTTA lean auto {stage}"
    if measurement.network["class"] == "DeepLabV3Plus":
        at_most(ours, 1.35, 1.10)
        for where in ("layer2", "layer1", "layer1+2"):
            at_most(f"BESTTA lean {where}", 1.7)
    at_most(auto, 1.05)
    if ours in by_name:
        found.append(against_others(measurement.title, by_name, ours))
    if auto in by_name:
        row = by_name[auto]
        met = row.time_ratio < 1 and row.memory_ratio is not None and row.memory_ratio < 1
        figure = f"{row.time_ratio:.2f}x, {shown(row.memory_ratio)}"
        bar = f"stretch, {auto}: time and memory below 1.0x"
        found.append(Verdict(measurement.title, bar, figure, met))
    return found


def against_others(title: str, by_name: Mapping[str, Row], ours: str) -> Verdict:
    """Faster and smaller than every other method on the frames where it runs a backward pass.

    What was not measured, or on frames without one, is not beaten by that: it is named.
    """
    own = by_name[ours]
    beaten, unbeaten, unknown = [], [], []
    for row in (by_name[name] for name in WITH_BACKWARD if name in by_name):
        if own.memory_ratio is None or row.memory_ratio is None or row.note:
            unknown.append(f"{row.contender} ({row.note or shown(None)})")
        elif own.time_ratio < row.time_ratio and own.memory_ratio < row.memory_ratio:
            beaten.append(row.contender)
        else:
            figures = f"{row.time_ratio:.2f}x, {shown(row.memory_ratio)}"
            unbeaten.append(f"{row.contender} ({figures})")
    figure = f"{len(beaten)} of {len(beaten) + len(unbeaten) + len(unknown)}"
    if unbeaten:
        figure += "; not " + ", ".join(unbeaten)
    if unknown:
        figure += "; cannot tell of " + ", ".join(unknown)
    bar = f"{ours}: faster and smaller than every other method with a backward pass"
    return Verdict(title, bar, figure, bool(beaten) and not unbeaten and not unknown)


def shown(ratio: float | None) -> str:
    return "memory not measured" if ratio is None else f"{ratio:.2f}x"


def printed_verdicts(found: Sequence[Verdict]) -> str:
    lines = ["The bar, in this run"]
    for verdict in found:
        word = "met    " if verdict.met else "NOT MET"
        lines.append(f"{word}  {verdict.subject}: {verdict.bar}: {verdict.figure}")
    lines.append(
        "not here  auto keeps at least 95 % of the gain in mIoU: that is a matter of a stream, "
        "not of a step"
    )
    return "\n".join(lines)


# --- the run ------------------------------------------------------------------------------


def narrowed(
    every: Sequence[Measurement], only: Sequence[str], contenders: Sequence[str]
) -> list[Measurement]:
    """The measurements asked for, with the contenders asked for; empty for all.

    A measurement whose contenders are all left out is left out.
    """
    chosen = []
    names = {name: None for m in every for name in m.contenders}  # in order, each once
    for name in contenders:
        if name not in names:
            raise SystemExit(f"no contender is called {name!r}. There are: {'; '.join(names)}.")
    for m in every:
        kept = {
            n: s for n, s in m.contenders.items() if not contenders or n in (PLAIN, *contenders)
        }
        if (not only or m.subject in only) and (len(kept) > 1 or not contenders):
            chosen.append(Measurement(**{**vars(m), "contenders": kept}))
    return chosen


def measure(
    every: Sequence[Measurement], wanted: Sequence[Measurement], parts: Parts
) -> dict[str, Any]:
    """Do what is not done yet, print the tables, and return the record."""
    todo = {m.key: jobs(m) for m in wanted}
    tables: dict[str, list[Row]] = {}
    record: dict[str, Any] = {
        "benchmark": "cost",
        "threads": 1,
        "seed": 0,
        "bf16_instructions": not lacks_bf16(),
        "code": parts.identity,
        "subjects": {},
    }
    judged: list[Verdict] = []
    total = sum(map(len, todo.values()))
    with Progress("parts", total=total, show=True) as progress:
        for m in wanted:
            done = {}
            for name, job in todo[m.key].items():
                before = parts.measured
                if parts.found(name, job) is None:
                    progress.say(f"[{progress.done + 1}/{total}] {name}")
                done[name] = parts.get(name, job)
                progress.advance()
                if parts.measured == before:
                    progress.done_before += 1  # not measured: it says nothing of the rate
            results = {name: part["result"] for name, part in done.items()}
            tables[m.key] = table = rows(m, results)
            record["subjects"][m.key] = {
                "title": m.title,
                "subject": m.subject,
                "network": m.network,
                "size": list(m.size),
                "rounds": m.rounds,
                "settings": m.contenders,
                "rows": [asdict(row) for row in table],
                "parts": {
                    name: {key: part[key] for key in ("load", "measured", "result")}
                    for name, part in done.items()
                },
            }
            if m.subject != "growth":
                judged += verdicts(m, table)
                print("\n" + printed_table(m.title, table) + "\n", flush=True)
    # The curves take what an earlier call has measured of the other sizes, too.
    for m in every:
        if m.key not in tables:
            earlier = {name: parts.found(name, job) for name, job in jobs(m).items()}
            there = {name: part["result"] for name, part in earlier.items() if part is not None}
            if len(there) == len(earlier):
                tables[m.key] = rows(m, there)
    record["growth"] = curves = growth(tables, every)
    record["verdicts"] = [asdict(verdict) for verdict in judged]
    record["provenance"] = provenance()
    if any(m.subject == "growth" for m in wanted):
        print("\n" + printed_growth(curves) + "\n")
    if judged:
        print(printed_verdicts(judged))
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, help="timed rounds (3; 1 with --quick)")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=[], metavar="SUBJECT")
    parser.add_argument("--contenders", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--quick", action="store_true", help="small networks and images")
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    parser.add_argument("--work", type=Path, default=Path("runs/cost"), help="finished parts")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.job:
        torch.set_num_threads(1)
        job = json.loads(asked.job)
        print(json.dumps((measure_times if job["kind"] == "times" else measure_memory)(job)))
        return

    rounds = asked.rounds if asked.rounds is not None else 1 if asked.quick else 3
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, not {rounds}")
    every = plan(asked.quick, rounds)
    wanted = narrowed(every, asked.only, asked.contenders)
    asked.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take the measuring process along
    identity = code()
    with held(asked.work):
        record = measure(every, wanted, Parts(asked.work, identity))
        if code() != identity:
            print("The code changed while it was measured: the parts belong to no one state of it.")
        kept = asked.out or asked.work / "record.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json_bytes(record))
    print(f"\nThe record: {kept}")
    print(f"Next: python benchmarks/cost_plot.py {kept} --out docs/cost.svg draws it;")
    print("      docs/cost.md tells how the cost is kept low.")


if __name__ == "__main__":
    try:
        main()
    except Busy as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        if "--job" not in sys.argv:
            print("\nStopped. What was finished is kept; the same command goes on from there.")
        raise SystemExit(130) from None
