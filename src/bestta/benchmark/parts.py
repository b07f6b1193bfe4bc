"""What a run is made of: the model, what is known of the source, the adapter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bestta
from bestta import SourceProfile
from bestta.adapters import Adapter
from bestta.adapters.registry import method_class
from bestta.benchmark.config import Run, digest
from bestta.benchmark.subjects import (
    card_of,
    import_file,
    is_file,
    model_of,
    profile_of,
    subject_of,
)
from bestta.data.tensors import LabelledBatches
from bestta.files import Busy, held
from bestta.models import Card
from bestta.protocols import Frame
from bestta.training import recipes
from bestta.training.loop import usable
from bestta.training.scoring import normalised

Note = Callable[[str], None]


@dataclass
class Parts:
    """A model, its card, and an adapter on it."""

    run: Run
    card: Card
    model: nn.Module
    profile: SourceProfile | None
    adapter: Adapter

    def tensor(self, frames: list[Frame]) -> Tensor:
        """Frames as the model wants them: (B, 3, H, W)."""
        images = np.stack([frame.image for frame in frames])
        return normalised(images, self.card.normalise).to(self.adapter.device)

    def precision(self) -> AbstractContextManager[object]:
        """What the model computes in."""
        return torch.autocast(
            self.adapter.device.type,
            torch.bfloat16,
            enabled=self.run.protocol.precision == "bf16",
        )

    def wait(self) -> None:
        """Until the device is done with what it was given."""
        if self.adapter.device.type == "cuda":
            torch.cuda.synchronize(self.adapter.device)


def assemble(
    run: Run,
    out: Path,
    stopping: Callable[[], bool] = lambda: False,
    note: Note = lambda text: None,
) -> Parts:
    """Load the model, prepare the method if it learns from source images, make the adapter.

    Args:
        run: What to assemble for.
        out: Where what was prepared is kept.
        stopping: Asked between batches of preparing.
        note: Told how far preparing is.
    """
    torch.set_num_threads(run.threads)
    load_plugins(run.plugins)
    card = card_of(run.protocol.model)
    model = model_of(run.protocol.model).to(usable(run.device))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    profile = _profile(run, model, card, out, stopping, note)
    known = method_class(run.method.method)
    settings = {"seed": run.seed, **run.method.settings}
    if "normalise" in known.Config.__dataclass_fields__:
        settings.setdefault("normalise", tuple(map(tuple, card.normalise)))
    adapter = bestta.adapt(model, profile, method=known.name, preset=card.task, **settings)
    return Parts(run, card, model, profile, adapter)


def load_plugins(paths: tuple[str, ...]) -> None:
    """Import Python files by their path, each once: they register methods."""
    for path in paths:
        import_file(path)


def _profile(
    run: Run, model: nn.Module, card: Card, out: Path, stopping: Callable[[], bool], note: Note
) -> SourceProfile | None:
    """What is known of the source; what a method learns of it is learned once, and kept."""
    profile = profile_of(run.protocol.model)
    method = run.method.method
    if method_class(method).Preparation is None:
        return profile
    chosen = run.method.prepare
    weights = card.sha256.get("weights.safetensors", "")
    settings = {**run.method.settings, **chosen.settings, "seed": run.seed}
    named = digest([method, chosen.images, chosen.batch, settings, weights])
    path = out / "profiles" / f"{card.name}-{method}-{named}.safetensors"
    turn = path.with_suffix(".turn")
    while not path.exists():
        if stopping():
            raise KeyboardInterrupt(f"stopped before {method!r} was prepared.")
        turn.mkdir(parents=True, exist_ok=True)
        try:
            with held(turn):
                if not path.exists():
                    batches = Watched(_training_batches(run, card), stopping, note)
                    _prepare(run, model, card, profile, batches, path)
        except Busy:
            note("waiting for another run that prepares the same")
            time.sleep(1.0)
    return SourceProfile.load(path)


class Watched:
    """Batches that tell how many have been asked for, and end when they are to."""

    def __init__(self, batches: Iterable[Any], stopping: Callable[[], bool], note: Note) -> None:
        self.batches, self.stopping, self.note = batches, stopping, note
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        total = f" of {len(self.batches)}" if isinstance(self.batches, Sized) else ""
        for number, batch in enumerate(self.batches, 1):
            if self.stopping():
                raise KeyboardInterrupt("stopped while it learned from source images.")
            self.note(f"learning from source images: batch {number}{total}, pass {self.passes}")
            yield batch


def _prepare(
    run: Run,
    model: nn.Module,
    card: Card,
    profile: SourceProfile | None,
    batches: Iterable[Any],
    path: Path,
) -> None:
    checkpoint = path.with_suffix(".part")
    prepared = bestta.prepare(
        model,
        batches,
        method=run.method.method,
        profile=profile,
        checkpoint=checkpoint,
        preset=card.task,
        **{"seed": run.seed, **run.method.settings, **run.method.prepare.settings},
    )
    prepared.save(path)
    checkpoint.unlink(missing_ok=True)


def _training_batches(run: Run, card: Card) -> Iterable[Any]:
    """Training images of the model, in batches, with labels where there are any."""
    method = run.method.method
    if is_file(run.protocol.model):
        train = subject_of(run.protocol.model).train
        if train is None:
            raise ValueError(
                f"method {method!r} learns from source images, and the subject {card.name!r} has "
                "none: give it some, Subject(…, train=lambda: batches)."
            )
        return train()
    recipe = recipes().get(str(card.recipe.get("name")))
    if recipe is None:
        raise ValueError(
            f"method {method!r} learns from source images, and the card of {card.name!r} names no "
            "recipe of this version of bestta that would say which."
        )
    root = run.source_data or run.data
    if recipe.needs_data and root is None:
        raise ValueError(
            f"method {method!r} learns from the training images of {card.name}: name their folder "
            "with --source-data."
        )
    images = recipe.splits(None if root is None else Path(root)).train
    chosen = run.method.prepare
    if chosen.images is not None and chosen.images < len(images):
        images = images.some(chosen.images)
    return LabelledBatches(images, chosen.batch, card.normalise)
