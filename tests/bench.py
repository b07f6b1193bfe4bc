"""Benchmarks of a second: streams of a few small frames, and what their records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from bestta.benchmark import worker
from bestta.benchmark.config import Method, Protocol, Run, read_method
from bestta.benchmark.runner import Progress, Stopped, execute
from bestta.data import Streets

SIZE = (64, 32)


def protocol(**changes: Any) -> Protocol:
    """Two streets of 64x32 pixels in fog, then at night; ``changes`` are a protocol's fields."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "set": "streets",
        "split": "val",
        "size": SIZE,
        "images": 2,
        "conditions": ("fog", "night"),
        "model": "streets",
    }
    return Protocol(**settings | changes)


def run_of(method: str | Method = "source", *, run: dict[str, Any] | None = None, **changes: Any):
    """A run of `protocol`; ``run`` are fields of the run, ``changes`` those of the protocol."""
    chosen = read_method(method) if isinstance(method, str) else method
    return Run(protocol=protocol(**changes), method=chosen, **(run or {}))


def no_number(word: str) -> NoReturn:
    raise AssertionError(f"{word} is no JSON")


def read(path: Path) -> dict[str, Any]:
    """A record, as a reader takes it who knows nothing but JSON."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_number)
    return record


def played(run: Run, out: Path, **how: Any) -> dict[str, Any]:
    """The record of ``run``, done here without measuring memory."""
    return read(execute(run, out, **{"measure_memory": False} | how))


def played_in_parts(run: Run, out: Path, stops: set[int] | None = None) -> tuple[dict, int]:
    """The record of ``run`` stopped at the frames ``stops``, or after every batch; and how often.

    Each part begins as a new process would: nothing is handed on but what lies in ``out``.
    """
    stopped = 0
    while True:
        at = [0]

        def tell(progress: Progress, at: list[int] = at) -> None:
            at[0] = progress.position

        def stopping(at: list[int] = at) -> bool:
            return at[0] > 0 and (stops is None or at[0] in stops)

        try:
            return played(run, out, tell=tell, stopping=stopping), stopped
        except Stopped:
            stopped += 1
            assert stopped < 100, "it does not get on"


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    """All of a record but what it took."""
    return {name: value for name, value in record.items() if name != "cost"}


def pictures(out: Path, record: dict[str, Any]) -> dict[str, bytes]:
    """The files beside a record, by name."""
    folder = out / f"{record['id']}.pictures"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


def save(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def photographs(root: Path, count: int = 3, broken: tuple[int, ...] = ()) -> dict[str, Any]:
    """Write streets and their label maps as files; fields of a protocol and the run's data.

    Files of numbers in ``broken`` are cut in the middle.
    """
    scenes = Streets(count, size=SIZE, split="val")
    for number in range(count):
        scene = scenes[number]
        path = save(root / "images" / f"{number}.png", scene.image)
        save(root / "labels" / f"{number}.png", np.asarray(scene.label))
        if number in broken:
            path.write_bytes(path.read_bytes()[:200])
    return {
        "set": "folder",
        "split": None,
        "options": {"labels": str(root / "labels")},
        "images": None,
        "run": {"data": str(root / "images")},
    }


PLUGIN = '''\
"""Methods of somebody's own."""

from bestta.adapters.registry import register_adapter
from bestta.adapters.source import Source


@register_adapter("steady")
class Steady(Source):
    """The source model under another name."""


@register_adapter("brittle")
class Brittle(Source):
    """Fails at the third image."""

    def step(self, image):
        if self.images_seen == 2:
            raise ArithmeticError("the third image is one too many")
        return super().step(image)
'''


def drive_here(text: str, out: Path, say: Any, stop: Any) -> None:
    """What `sweep.drive` does, in this process: starting one and loading torch takes seconds."""
    worker.work(text, out, say, lambda: bool(stop.flipped))
