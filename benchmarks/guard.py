"""Does the guard keep its promise: never more than a point below the source model?

    python benchmarks/guard.py --models streets --cells 40           the embedded streets alone
    python benchmarks/guard.py --cityscapes DIR --cifar10 DIR --all --out record.json

- cells (unless another is asked for): a seeded sample of shipped models x candidate layers x
  learning rates x absolute and relative γ x corruptions and weathers, each a stream of --frames
  images, run by the source model, by BESTTA without the guard and with it;
- --stress: streams made to break things, with each model's usual layers, at its usual learning
  rate and at a hundred times that;
- --baselines: other methods, one image at a time, with and without the guard;
- --cost: the time of a step with and without it, over the plain forward.

Every run is a file in --work: stopped in any way, the same command goes on. --jobs 2 shares the
work between two processes. --out gathers the files when what was asked for is complete, and --from
takes over what an earlier record holds: cells today, stress tomorrow.
benchmarks/guard_table.py makes tables of it.

With --tune the images are training images under the extra corruptions and weathers of other seeds:
what the guard's constants were chosen on. Without, validation images: what is reported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import bestta
from bestta import models
from bestta.adapters import Adapter
from bestta.calibration.candidates import candidates
from bestta.data.cityscapes import Cityscapes
from bestta.data.corruptions import CORRUPTIONS, EXTRA, Corruption
from bestta.data.samples import ImageSet, Pixels, Sample
from bestta.data.seeds import generator
from bestta.data.streets import Streets
from bestta.data.weather import Weather
from bestta.files import write_whole
from bestta.interrupt import end_with_parent
from bestta.metrics import Metric, metric_for
from bestta.progress import Progress
from bestta.provenance import commit, provenance
from bestta.training.recipes import recipes
from bestta.training.scoring import normalised

MODELS = ("streets", "cityscapes", "cifar10")
RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
GAMMAS = ("relative", "absolute")
SEVERITIES = (1, 3, 5)
WEATHERS = ("fog", "night", "rain", "snow")
SIZE = (256, 128)
MOST_LAYERS = 10
"""Candidate layers of each model."""

FORM = {"preset": "single"}
"""The form that is watched: the one that can do most harm."""
STAGE = {"streets": "backbone.layer1", "cityscapes": "backbone.layer1", "cifar10": "block1"}
"""Where a layer does well that is taken without looking for a better one."""
KINDS = ("cells", "stress", "baselines", "cost")
BLANKS = ("black", "white", "noise")
CASES = (
    "one class, clear", "one class, fog", "one frame, clear", "one frame, fog", *BLANKS,
    "a new domain at every frame", "flashes", "collapse",
)  # fmt: skip
FACTORS = (1, 100)
"""Of the learning rate, in stress cases."""
FLASH = 0.9
"""How much of a flash is white."""
WRECKED = 10.0
"""What γ and its velocity are filled with in a collapse, either sign."""
RUNNING = 10
"""Frames that a stream's running score is taken over."""
NEAR = 1.0
"""Points: a stream that was collapsed is back when it is as near to one that was not."""

METHODS = ("bn_stats", "alpha_bn", "tent", "eata", "sar", "cotta")
BASELINE_MODELS = ("streets", "cifar10")

Frame = tuple[Tensor, Tensor | None]
"""An image (1, 3, H, W), and its label, (1,) or (1, H, W), if it counts for the score."""
Result = dict[str, Any]
Place = tuple[str, str, int]
"""Model, condition and severity: what decides a stream."""


# --- what there is to run -----------------------------------------------------------------


class Job(Protocol):
    """One result, in a file of its own."""

    kind: ClassVar[str]

    @property
    def model(self) -> str: ...
    @property
    def place(self) -> Place: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Cell:
    """A stream, and how BESTTA is set for it."""

    kind: ClassVar[str] = "cells"
    model: str
    condition: str
    severity: int
    layer: str
    lr: float
    gamma: str

    @property
    def place(self) -> Place:
        return self.model, self.condition, self.severity

    @property
    def name(self) -> str:
        return (
            f"{self.model} {self.condition}-{self.severity} {self.layer} {self.lr:g} {self.gamma}"
        )


@dataclass(frozen=True)
class Case:
    """A stream made to break things."""

    kind: ClassVar[str] = "stress"
    model: str
    case: str
    factor: int
    """Of the usual learning rate."""

    @property
    def place(self) -> Place:
        return self.model, self.case, 0

    @property
    def name(self) -> str:
        return f"stress {self.model} {self.case} x{self.factor}"


@dataclass(frozen=True)
class Baseline:
    """Another method, in its published settings but for what `run_baseline` says."""

    kind: ClassVar[str] = "baselines"
    model: str
    condition: str
    severity: int
    method: str

    @property
    def place(self) -> Place:
        return self.model, self.condition, self.severity

    @property
    def name(self) -> str:
        return f"baseline {self.model} {self.condition}-{self.severity} {self.method}"


@dataclass(frozen=True)
class Timing:
    """The time of a step with the guard and without."""

    kind: ClassVar[str] = "cost"
    model: str
    condition: str
    severity: int

    @property
    def place(self) -> Place:
        return self.model, self.condition, self.severity

    @property
    def name(self) -> str:
        return f"cost {self.model} {self.condition}-{self.severity}"


Found = tuple[Job, Result]


def conditions(model: str, tune: bool) -> list[tuple[str, int]]:
    """What the streams of a model may look like."""
    names: tuple[str, ...] = EXTRA if tune else CORRUPTIONS
    if model != "cifar10":  # images of 32 pixels have no horizon for a weather to act on
        names += tuple(f"weather-{name}" for name in WEATHERS)
    return [*((name, severity) for name in names for severity in SEVERITIES), ("clear", 0)]


def foggy(model: str) -> tuple[str, int]:
    return ("fog", 3) if model == "cifar10" else ("weather-fog", 3)


def drawn(
    count: int, seed: int, layers: Mapping[str, Sequence[str]], tune: bool = False
) -> list[Cell]:
    """A seeded sample: models in turn, everything else at random.

    Args:
        layers: The candidates of each model.
    """
    rng = generator("guard cells", seed, int(tune))
    room = min(
        len(conditions(model, tune)) * len(own) * len(RATES) * len(GAMMAS)
        for model, own in layers.items()
    )
    if count > room * len(layers):
        raise ValueError(
            f"{count} cells were asked for, and there are {room} of a model: "
            f"--cells {room * len(layers)} at most."
        )
    cells: dict[str, Cell] = {}
    names = sorted(layers)
    while len(cells) < count:
        model = names[len(cells) % len(names)]
        places = conditions(model, tune)
        condition, severity = places[rng.integers(len(places))]
        layer = layers[model][int(rng.integers(len(layers[model])))]
        lr = RATES[rng.integers(len(RATES))]
        cell = Cell(model, condition, severity, layer, lr, GAMMAS[rng.integers(len(GAMMAS))])
        cells[cell.name] = cell
    return sorted(cells.values(), key=lambda c: (c.place, c.name))


def planned(kind: str, names: Sequence[str], cells: int, seed: int, tune: bool) -> Sequence[Job]:
    """Everything of a kind there is to run with these models."""
    if kind == "cells":
        return drawn(cells, seed, {name: layers_of(name) for name in names}, tune)
    if kind == "stress":
        return [Case(m, case, factor) for m in names for case in CASES for factor in FACTORS]
    if kind == "baselines":
        return [
            Baseline(m, *place, method)
            for m in names
            if m in BASELINE_MODELS
            for place in (("clear", 0), foggy(m), ("gaussian_noise", 3))
            for method in METHODS
        ]
    return [Timing("streets", *place) for place in (("clear", 0), foggy("streets"))] * (
        "streets" in names
    )


def by_stream(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs of the same stream together, so that it is rendered once; the first met come first."""
    streams: dict[tuple[str, Place], list[Job]] = {}
    for job in jobs:
        streams.setdefault((job.kind, job.place), []).append(job)
    return list(streams.values())


@cache
def layers_of(model: str) -> tuple[str, ...]:
    """Stages and blocks of a shipped model, harmful ones among them."""
    width, height = models.card(model).size if model == "cifar10" else SIZE
    image = torch.zeros(1, 3, height, width)
    return tuple(c.name for c in candidates(models.load(model), image, most=MOST_LAYERS))


# --- models and streams -------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model, the images of its streams, and its profile at every candidate layer."""

    name: str
    model: nn.Module
    card: models.Card
    pool: ImageSet
    """All there are, of which a stream has some."""
    frames: int
    source: Sequence[Tensor]
    """Training images, which the profile is collected from."""
    profile: bestta.SourceProfile
    usual: Mapping[str, Any]
    """Settings that the model ships with."""
    tune: bool = False

    @property
    def images(self) -> ImageSet:
        return self.pool.some(self.frames)

    def tensor(self, image: Pixels) -> Tensor:
        return normalised(image[None], self.card.normalise)

    def frame(self, sample: Sample, image: Pixels) -> Frame:
        return self.tensor(image), torch.as_tensor(np.asarray(sample.label))[None].long()

    def metric(self) -> Metric:
        return metric_for(self.card.task, len(self.card.classes))

    def score(self, counts: Iterable[Tensor]) -> float:
        """Points, higher being better: mIoU, or the share of images with the right class."""
        metric = self.metric()
        metric.counts = torch.stack(list(counts)).sum(0)
        return metric.score() if metric.higher_is_better else 100 - metric.score()


def image_sets(name: str, folder: Path | None, tune: bool) -> tuple[ImageSet, ImageSet]:
    """Training images, and those that streams are made of.

    Raises:
        ValueError: If ``folder`` is none, or does not hold the data.
    """
    if name == "streets":
        return Streets(200, seed=0), Streets(500, seed=5) if tune else Streets(
            500, seed=7, split="val"
        )
    if folder is None or not folder.is_dir():
        seen = "none was given" if folder is None else f"there is no folder {folder}"
        raise ValueError(f"model {name!r} needs the folder of its data, and {seen}: --{name} DIR.")
    if name == "cityscapes":
        train, val = (
            Cityscapes(folder, split, size=SIZE, ignore_fringes=True) for split in ("train", "val")
        )
        return train, train if tune else val
    splits = recipes()["cifar10"].splits(folder)
    return splits.train, splits.held_out if tune else splits.test


def subject(
    name: str, folder: Path | None, frames: int, tune: bool = False, source_images: int = 200
) -> Subject:
    """A shipped model with what its runs need."""
    card, model = models.card(name), models.load(name)
    train, pool = image_sets(name, folder, tune)
    source = [normalised(s.image[None], card.normalise) for s in train.some(source_images)]
    usual = {**FORM, "layers": (STAGE[name],)}
    layers = list(dict.fromkeys((*layers_of(name), *usual["layers"])))
    profile = bestta.SourceProfile.collect(model, source, layers=layers, progress=False)
    return Subject(name, model, card, pool, frames, source, profile, usual, tune)


def painter(model: str, condition: str, severity: int) -> Callable[[Pixels, Any], Pixels]:
    """The effect that brings a condition about."""
    if condition == "clear":
        return lambda image, seed: image
    if condition.startswith("weather-"):
        return Weather(condition.removeprefix("weather-"), severity)
    return Corruption(condition, severity, "cifar" if model == "cifar10" else "imagenet")


def rendered(
    about: Subject, condition: str, severity: int, samples: Iterable[Sample] | None = None
) -> list[Frame]:
    """A stream in one condition, of the model's images or of others."""
    paint = painter(about.name, condition, severity)
    return [
        about.frame(sample, paint(sample.image, (int(about.tune), number)))
        for number, sample in enumerate(about.images if samples is None else samples)
    ]


def stressing(about: Subject, case: str) -> list[Frame]:
    """The stream of a stress case; lengths are for 200 frames, and in proportion for others."""
    fog = foggy(about.name)
    if case.startswith(("one class", "one frame")):
        place = fog if case.endswith("fog") else ("clear", 0)
        return one_class(about, place) if case.startswith("one class") else one_frame(about, place)
    if case in BLANKS:
        frames = rendered(about, *fog)
        middle = len(frames) // 2
        shape = about.pool[0].image.shape
        blank = [
            (about.tensor(blank_image(case, shape, n)), None)
            for n in range(max(1, about.frames // 10))
        ]
        return [*frames[:middle], *blank, *frames[middle:]]
    if case == "a new domain at every frame":
        places = [p for p in conditions(about.name, about.tune) if p[1] in (0, 3)]
        paints = [painter(about.name, *place) for place in places]
        return [
            about.frame(s, paints[n % len(paints)](s.image, (int(about.tune), n)))
            for n, s in enumerate(about.images)
        ]
    if case == "flashes":
        paint = painter(about.name, *fog)
        frames = []
        for number, sample in enumerate(about.images):
            image = paint(sample.image, (int(about.tune), number))
            frames.append(about.frame(sample, whitened(image) if number % 5 == 4 else image))
        return frames
    return rendered(about, *fog)


def one_class(about: Subject, place: tuple[str, int]) -> list[Frame]:
    """500 images of the first class; of streets, the 50 with most road, ten times."""
    if about.card.task == "classification":
        count = about.frames * 5 // 2
        of_class: list[Sample] = []
        for sample in about.pool:
            if sample.label == 0:
                of_class.append(sample)
            if len(of_class) == count:
                break
        return rendered(about, *place, of_class)
    shares = [(float(np.mean(np.asarray(s.label) == 0)), n) for n, s in enumerate(about.images)]
    richest = sorted(shares, reverse=True)[: max(1, about.frames // 4)]
    return rendered(about, *place, [about.images[n] for _, n in richest]) * 10


def one_frame(about: Subject, place: tuple[str, int]) -> list[Frame]:
    """300 times the same."""
    for sample in about.images:
        frame = rendered(about, *place, [sample])[0]
        # An image that the plain model gets wrong leaves nothing to lose.
        if about.card.task == "segmentation" or source_score(about, [frame]) == 100:
            break
    return [frame] * (about.frames * 3 // 2)


def blank_image(case: str, shape: tuple[int, ...], number: int) -> Pixels:
    if case == "noise":
        return generator("guard noise", number).integers(0, 256, shape, dtype=np.uint8)
    return np.full(shape, 255 if case == "white" else 0, dtype=np.uint8)


def whitened(image: Pixels) -> Pixels:
    """A flash: nearly all of the image is white."""
    return np.round((1 - FLASH) * image + FLASH * 255).astype(np.uint8)


# --- runs ---------------------------------------------------------------------------------


def tallied(
    about: Subject, frames: Sequence[Frame], answer: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """What the metric counts of each frame."""
    found = []
    for image, label in frames:
        metric = about.metric()
        logits = answer(image)
        if label is not None:
            metric.add(logits, label)
        found.append(metric.counts)
    return found


def source_score(about: Subject, frames: Sequence[Frame]) -> float:
    with torch.no_grad():
        return about.score(tallied(about, frames, about.model))


@dataclass
class Run:
    """One way through a stream."""

    score: float = 0.0
    looks: int = 0
    skipped: int = 0
    """Images that the plain model answered."""
    rolled_back: int = 0
    """Times that the guard undid what was learned."""
    seconds: float = 0.0


def run(
    about: Subject,
    frames: Sequence[Frame],
    settings: Mapping[str, Any],
    wreck_at: int | None = None,
    profile: bestta.SourceProfile | None = None,
) -> tuple[Run, list[Tensor]]:
    """Send a stream through an adapter; also returns what is counted of each frame.

    Args:
        settings: Of `bestta.adapt`, with the method.
        wreck_at: Before which frame what was learned is destroyed.
        profile: Another one than the subject's.
    """
    done = Run()
    started = time.perf_counter()
    with bestta.adapt(about.model, profile or about.profile, **settings) as adapter:
        passed = 0

        def answer(image: Tensor) -> Tensor:
            nonlocal passed
            if passed == wreck_at:
                wreck(adapter)
            passed += 1
            logits = adapter(image)
            done.skipped += adapter.last.skipped
            # A refused image is rolled back, too, which is nothing of the guard's.
            done.rolled_back += adapter.last.guard.startswith("guard, rolled back")
            return logits

        counts = tallied(about, frames, answer)
        done.looks = adapter.guard.looks if adapter.guard is not None else 0
    done.score, done.seconds = about.score(counts), time.perf_counter() - started
    return done, counts


@torch.no_grad()
def wreck(adapter: Adapter) -> None:
    """Fill what BESTTA has learned, and where it is heading, with nonsense."""
    rng = torch.Generator().manual_seed(0)
    state = adapter.state()
    for name, parameter in adapter.trainable.items():
        for key in (name, f"{name}/velocity"):
            signs = torch.randint(0, 2, parameter.shape, generator=rng)
            state[key] = WRECKED * (2.0 * signs - 1).to(parameter)
    adapter.load_state(state)


def back_after(
    score: Callable[[Sequence[Tensor]], float],
    wrecked: Sequence[Tensor],
    unharmed: Sequence[Tensor],
    at: int,
) -> int | None:
    """Frames after ``at`` until the running score is near that of the unharmed stream; or None.

    Only frames behind the collapse count, so `RUNNING` is the least there can be.
    """
    for end in range(at + RUNNING, len(wrecked) + 1):
        window = slice(end - RUNNING, end)
        if score(wrecked[window]) >= score(unharmed[window]) - NEAR:
            return end - at
    return None


def run_case(about: Subject, case: Case, frames: Sequence[Frame]) -> Result:
    """A stress case with and without the guard."""
    with bestta.adapt(about.model, about.profile, **about.usual) as adapter:
        lr = case.factor * adapter.settings["lr"]
    settings = {**about.usual, "lr": lr}
    wreck_at = about.frames // 4 if case.case == "collapse" else None
    unguarded, loose = run(about, frames, {**settings, "guard": False}, wreck_at)
    guarded, kept = run(about, frames, {**settings, "guard": True}, wreck_at)
    result = {"lr": lr, "unguarded": asdict(unguarded), "guarded": asdict(guarded)}
    if wreck_at is not None:
        unharmed, whole = run(about, frames, {**settings, "guard": True})
        result["unharmed"] = asdict(unharmed)
        result["back_after"] = {
            "guarded": back_after(about.score, kept, whole, wreck_at),
            "unguarded": back_after(about.score, loose, whole, wreck_at),
        }
    return result


def run_baseline(about: Subject, job: Baseline, frames: Sequence[Frame]) -> Result:
    """Another method with and without the guard."""
    settings: dict[str, Any] = {"method": job.method}
    profile = about.profile
    if job.method == "eata":
        few = about.source[:100]
        profile = bestta.prepare(about.model, few, method="eata", profile=profile, progress=False)
    if job.method == "cotta":
        # Fewer views than published: the guard is what is looked at, and time is short.
        settings |= {"augmentations": 4, "scales": (0.5, 1.0, 1.5)}
        settings["normalise"] = about.card.normalise
    plain, guarded = (
        run(about, frames, {**settings, "guard": guard}, profile=profile)[0]
        for guard in (False, True)
    )
    return {"unguarded": asdict(plain), "guarded": asdict(guarded)}


def run_timing(about: Subject, frames: Sequence[Frame]) -> Result:
    """Time of a call over the plain forward of the same image, taken in turns."""
    times: dict[str, list[float]] = {"plain": [], "unguarded": [], "guarded": []}
    with (
        bestta.adapt(about.model, about.profile, **about.usual, guard=False) as unguarded,
        bestta.adapt(about.model, about.profile, **about.usual, guard=True) as guarded,
        torch.no_grad(),
    ):
        calls: dict[str, Callable[[Tensor], Any]] = {
            "plain": about.model, "unguarded": unguarded, "guarded": guarded
        }  # fmt: skip
        about.model(frames[0][0])
        for image, _ in frames:
            for name, call in calls.items():
                started = time.perf_counter()
                call(image)
                times[name].append(time.perf_counter() - started)
        assert guarded.guard is not None
        looks = guarded.guard.looks
    result: Result = {"looks": looks}
    for name in ("unguarded", "guarded"):
        ratios = [mine / plain for mine, plain in zip(times[name], times["plain"], strict=True)]
        mean = sum(times[name]) / sum(times["plain"])
        result[name] = {"median_ratio": median(ratios), "mean_ratio": mean}
    return result


class Bench:
    """Runs jobs, and keeps the last model and the last stream for the next of them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.about: Subject | None = None
        self.place: Place | None = None
        self.frames: list[Frame] = []
        self.source = 0.0

    def __call__(self, job: Job) -> Result:
        """What a job finds out."""
        asked = self.asked
        if self.about is None or self.about.name != job.model:
            self.about = subject(
                job.model, data(asked, job.model), asked.frames, asked.tune, asked.source
            )
        about = self.about
        if self.place != job.place:
            self.frames = []  # two streams at once are much for a small machine
            stress = isinstance(job, Case)
            _, condition, severity = job.place
            self.frames = (
                stressing(about, condition) if stress else rendered(about, condition, severity)
            )
            self.source = source_score(about, self.frames)
            self.place = job.place
        found: Result = {"source": self.source, "length": len(self.frames)}
        if isinstance(job, Cell):
            settings = {**FORM, "layers": (job.layer,), "lr": job.lr, "gamma": job.gamma}
            found["guarded"] = asdict(run(about, self.frames, {**settings, "guard": True})[0])
            if not asked.guarded_only:
                loose, _ = run(about, self.frames, {**settings, "guard": False})
                found["unguarded"] = asdict(loose)
        elif isinstance(job, Case):
            found |= run_case(about, job, self.frames)
        elif isinstance(job, Baseline):
            found |= run_baseline(about, job, self.frames)
        else:
            found |= run_timing(about, self.frames)
        return found


# --- files --------------------------------------------------------------------------------


def data(asked: argparse.Namespace, model: str) -> Path | None:
    found: Path | None = getattr(asked, model, None)
    return found


def stamp(asked: argparse.Namespace) -> Result:
    """What decides a result beside its job; a file with another one is run anew."""
    return {"frames": asked.frames, "tune": asked.tune, "source_images": asked.source}


def path_of(job: Job, work: Path) -> Path:
    return work / f"{job.name.replace(',', '').replace(' ', '_')}.json"


def recorded(job: Job, asked: argparse.Namespace) -> Result | None:
    """The result of a job, if it is there and was run as asked."""
    path = path_of(job, asked.work)
    if not path.exists():
        return None
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # damaged
    whole = asked.guarded_only or "unguarded" in result
    return result if whole and result["stamp"] == stamp(asked) else None


def work(jobs: Sequence[Job], asked: argparse.Namespace) -> Iterator[Found]:
    """Run what is not there yet, and write each result as it comes."""
    left = [job for job in jobs if recorded(job, asked) is None]
    untimed = by_stream([job for job in left if job.kind != "cost"])
    timed = by_stream([job for job in left if job.kind == "cost"])
    with Progress("runs", len(jobs), show=True, done=len(jobs) - len(left)) as progress:
        # Times are taken last, when no other process is at work.
        for found in chain(side_by_side(untimed, asked), in_turn(timed, asked)):
            progress.advance()
            yield found


def in_turn(
    streams: Sequence[Sequence[Job]], asked: argparse.Namespace, bench: Bench | None = None
) -> Iterator[Found]:
    """Run the jobs of these streams here, one after another."""
    bench = bench or Bench(asked)
    for job in chain.from_iterable(streams):
        result = {**asdict_of(job), **bench(job), "stamp": stamp(asked), "commit": asked.commit}
        write_whole(path_of(job, asked.work), json.dumps(result).encode())
        yield job, result


def side_by_side(streams: Sequence[Sequence[Job]], asked: argparse.Namespace) -> Iterator[Found]:
    """Run the jobs of these streams in as many processes as asked for, a stream at a time."""
    if asked.jobs == 1:
        yield from in_turn(streams, asked)
        return
    # Spawned, for a forked copy of torch's threads may wait for ever.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, spawn, initializer=begin, initargs=(asked,)) as pool:
        try:
            with ctrl_c_waits():  # processes start with it, and leave Ctrl-C to their parent
                waiting = [pool.submit(one_of_several, stream, asked) for stream in streams]
            for done in as_completed(waiting):
                yield from done.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Put Ctrl-C off to the end; processes that are started meanwhile never hear it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


OWN_BENCH: list[Bench] = []
"""Of a process of several: it keeps its model from one stream to the next."""


def begin(asked: argparse.Namespace) -> None:
    """Make this process one of several, of one thread, which ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(1)
    OWN_BENCH.append(Bench(asked))


def one_of_several(stream: Sequence[Job], asked: argparse.Namespace) -> list[Found]:
    """What the jobs of a stream find out."""
    return list(in_turn([stream], asked, OWN_BENCH[0]))


def asdict_of(job: Job) -> Result:
    assert isinstance(job, Cell | Case | Baseline | Timing)
    return {"name": job.name, **asdict(job)}


def gathered(plan: Mapping[str, Sequence[Job]], asked: argparse.Namespace) -> Result:
    """The record of all that is there; `missing` counts by kind what is not."""
    record: Result = {"benchmark": "guard", "seed": asked.seed, **stamp(asked)}
    commits: set[str] = set()
    missing = {}
    for kind, jobs in plan.items():
        found = [result for job in jobs if (result := recorded(job, asked)) is not None]
        commits |= {str(result["commit"]) for result in found}
        for result in found:
            del result["stamp"]
        record[kind], missing[kind] = found, len(jobs) - len(found)
    return {
        **record, "missing": missing, "commits": sorted(commits), "provenance": provenance()
    }  # fmt: skip


def read(path: Path) -> Result:
    """A record of this benchmark.

    Raises:
        ValueError: If the file is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}.") from None
    kind = record.get("benchmark") if isinstance(record, dict) else None
    if kind != "guard" or not set(KINDS) <= set(record):
        raise ValueError(f"{path} is a record of {kind!r}, not of benchmarks/guard.py.")
    return dict(record)


def take_over(path: Path, plan: Mapping[str, Sequence[Job]], asked: argparse.Namespace) -> int:
    """Write what a record holds of the plan to --work; returns how many results these are.

    Raises:
        ValueError: If it is a record of other streams.
    """
    record = read(path)
    own = {name: record.get(name) for name in stamp(asked)}
    if own != stamp(asked):
        raise ValueError(f"{path} is of {own}, and this is of {stamp(asked)}: leave --from away.")
    asked.work.mkdir(parents=True, exist_ok=True)
    count = 0
    for kind, jobs in plan.items():
        known = {result["name"]: result for result in record[kind]}
        for job in jobs:
            if job.name in known and recorded(job, asked) is None:
                result = {**known[job.name], "stamp": stamp(asked)}
                write_whole(path_of(job, asked.work), json.dumps(result).encode())
                count += 1
    return count


def told(job: Job, result: Result) -> str:
    """One line on a result."""
    if job.kind == "cost":
        ratios = [f"{how} {result[how]['median_ratio']:.2f}x" for how in ("unguarded", "guarded")]
        return f"{job.name}: {', '.join(ratios)}, {result['looks']} looks"
    line = f"{job.name}: source {result['source']:.2f}"
    for how in ("unguarded", "guarded"):
        if how in result:
            line += f", {how} {result[how]['score'] - result['source']:+.2f}"
    one = result["guarded"]
    line += f" ({one['looks']} looks, {one['skipped']} skipped, {one['rolled_back']} rolled back)"
    if "back_after" in result:
        line += f", back after {result['back_after']['guarded']} frames"
    return line


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", default="", help="some of streets,cityscapes,cifar10; those with data if none")
    add("--cityscapes", type=Path, metavar="DIR", help="folder of Cityscapes")
    add("--cifar10", type=Path, metavar="DIR", help="folder of CIFAR-10")
    for kind in KINDS[1:]:
        add(f"--{kind}", action="store_true", help=f"run {kind} instead of cells")
    add("--all", action="store_true", help="run cells and all others")
    add("--cells", type=int, default=300, help="how many (300)")
    add("--frames", type=int, default=200, help="of a stream (200)")
    add("--source", type=int, default=200, help="training images for the profile (200)")
    add("--seed", type=int, default=0, help="of the draw of cells")
    add("--jobs", type=int, default=1, help="processes that share the work, one thread each (1)")
    add("--tune", action="store_true", help="other images and conditions than those reported")
    add("--guarded-only", action="store_true", help="no unguarded runs of cells")
    add("--work", type=Path, default=Path("runs/guard"), help="folder of the results")
    add("--from", type=Path, dest="record", metavar="RECORD", help="go on from this record")
    add("--out", type=Path, help="write the record to this JSON file once it is complete")
    return parser


def chosen(asked: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Models and kinds to run, after a look at the data of the models."""
    if asked.models:
        names = asked.models.split(",")
    else:
        names = [m for m in MODELS if m == "streets" or data(asked, m) is not None]
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ValueError(f"no model {unknown[0]!r} ships; there are: {', '.join(MODELS)}.")
    if min(asked.cells, asked.frames, asked.source, asked.jobs) < 1:
        raise ValueError("--cells, --frames, --source and --jobs are 1 at least.")
    for name in names:
        image_sets(name, data(asked, name), asked.tune)
    kinds = [kind for kind in KINDS[1:] if asked.all or getattr(asked, kind)]
    return names, (["cells", *kinds] if asked.all or not kinds else kinds)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        names, kinds = chosen(asked)
        plan = {kind: planned(kind, names, asked.cells, asked.seed, asked.tune) for kind in KINDS}
        jobs = [job for kind in kinds for job in plan[kind]]
        if asked.record is not None:
            print(f"{take_over(asked.record, plan, asked)} results taken over from {asked.record}.")
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    asked.work.mkdir(parents=True, exist_ok=True)
    asked.commit = commit()
    there = Counter(str(r["commit"]) for job in jobs if (r := recorded(job, asked)) is not None)
    for code, count in there.items():
        print(f"{count} runs are in {asked.work} already, of commit {code}.", flush=True)
    if set(there) - {str(asked.commit)}:
        print(f"This is commit {asked.commit}; another --work runs them anew.", flush=True)
    try:
        for job, result in work(jobs, asked):
            print(told(job, result), flush=True)
    except KeyboardInterrupt:
        print(f"Stopped. What was run is in {asked.work}; the same command goes on.")
        return 130
    except BrokenProcessPool:
        print("A process was killed, for want of memory perhaps; the same command goes on.")
        return 1
    record = gathered(plan, asked)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(asked.out, f"{json.dumps(record, indent=1, ensure_ascii=False)}\n".encode())
        print(f"The record: {asked.out}. Next: python benchmarks/guard_table.py {asked.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
