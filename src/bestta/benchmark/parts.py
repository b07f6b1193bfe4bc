"""What a run is made of: the model, what is known of the source, the adapter."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bestta
from bestta import SourceProfile
from bestta.adapters import Adapter, AdapterConfig
from bestta.adapters.registry import configured, method_class
from bestta.benchmark.config import Run, digest
from bestta.benchmark.streams import describe, digest_of_names, source_images
from bestta.benchmark.subjects import (
    card_of,
    import_file,
    is_file,
    model_of,
    module_name,
    profile_digest,
    profile_of,
    subject_of,
)
from bestta.data import ImageSet
from bestta.data.tensors import LabelledBatches
from bestta.files import Busy, held
from bestta.models import Card
from bestta.protocols import Frame, Stream
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
        stopping: Asked while another run prepares the same; preparing itself heeds signals, and
            puts down how far it is.
        note: Told how far preparing is.
    """
    torch.set_num_threads(run.threads)
    load_plugins(run.plugins)
    card = card_of(run.protocol.model)
    model = model_of(run.protocol.model).to(usable(run.device))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    profile = _profile(run, model, card, out, stopping, note)
    adapter = bestta.adapt(
        model,
        profile,
        method=run.method.method,
        preset=_preset(run, card),
        **_given(run, card),
    )
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
    preparation = method_class(method).Preparation
    if preparation is None:
        return profile
    chosen = run.method.prepare
    weights = card.sha256.get("weights.safetensors", "")
    settings = {**run.method.settings, **chosen.settings, "seed": run.seed}
    if preparation.reads is not None:  # others make no difference: what is learned serves them all
        settings = {name: v for name, v in settings.items() if name in preparation.reads}
    images = "" if is_file(run.protocol.model) else digest_of_names(training_images(run))
    named = digest([method, images, chosen.batch, settings, weights])
    path = out / "profiles" / f"{card.name}-{method}-{named}.safetensors"
    turn = path.with_suffix(".turn")
    while not path.exists():
        if stopping():
            raise KeyboardInterrupt(f"stopped before {method!r} was prepared.")
        turn.mkdir(parents=True, exist_ok=True)
        try:
            with held(turn):
                if not path.exists():
                    batches = Watched(_training_batches(run, card), note)
                    _prepare(run, model, card, profile, batches, path)
        except Busy:
            note("waiting for another run that prepares the same")
            time.sleep(1.0)
    return SourceProfile.load(path)


class Watched:
    """Batches that tell how many have been asked for."""

    def __init__(self, batches: Iterable[Any], note: Note) -> None:
        self.batches, self.note = batches, note
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        total = f" of {len(self.batches)}" if isinstance(self.batches, Sized) else ""
        for number, batch in enumerate(self.batches, 1):
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
        preset=_preset(run, card),
        **{"seed": run.seed, **run.method.settings, **run.method.prepare.settings},
    )
    prepared.save(path)
    checkpoint.unlink(missing_ok=True)


def _training_batches(run: Run, card: Card) -> Iterable[Any]:
    """Training images of the model, in batches, with labels where there are any."""
    if is_file(run.protocol.model):
        train = subject_of(run.protocol.model).train
        if train is None:
            raise ValueError(
                f"method {run.method.method!r} learns from source images, and the subject "
                f"{card.name!r} has none: give it some, Subject(…, train=lambda: batches)."
            )
        return train()
    return LabelledBatches(training_images(run), run.method.prepare.batch, card.normalise)


def training_images(run: Run) -> ImageSet:
    """The training images that a method learns from before the stream; listed, not read."""
    card, method = card_of(run.protocol.model), run.method.method
    recipe = recipes().get(str(card.recipe.get("name")))
    if recipe is None:
        raise ValueError(
            f"method {method!r} learns from source images, and the card of {card.name!r} names no "
            "recipe of this version of bestta that would say which."
        )
    # A recipe is called after its set.
    root = run.source_data or (run.data if recipe.name == run.protocol.set else None)
    if recipe.needs_data and root is None:
        raise ValueError(
            f"method {method!r} learns from the training images of {card.name}: name their folder "
            "with --source-data."
        )
    images = recipe.splits(None if root is None else Path(root)).train
    chosen = run.method.prepare.images
    return images if chosen is None or chosen >= len(images) else images.some(chosen)


def decided(run: Run, stream: Stream) -> dict[str, Any]:
    """All that decides what a run finds, and nothing that does not."""
    known = method_class(run.method.method)
    config, protocol = run.resolved(), run.protocol
    config["protocol"].pop("published")  # stands beside the result
    config.pop("plugins")  # only the one that has the method counts, and by what it says
    if protocol.recipe != "gradual":
        config["protocol"].pop("severities")
    source = source_images(run)
    trained_on = None
    if known.Preparation is not None and not is_file(protocol.model):
        trained_on = digest_of_names(training_images(run))
    return {
        "config": config,
        "settings": {k: str(v) for k, v in asdict(_settings(run)).items()},
        "stream": describe(run, stream)["key"],
        "profile": profile_digest(protocol.model),
        "source": None if source is None else digest_of_names(source),
        "trained on": trained_on,
        "code": _own_code(run),
    }


def _own_code(run: Run) -> str:
    """A digest of the plugin that the method comes from; empty for the library's methods."""
    home = method_class(run.method.method).__module__
    texts = [Path(path).read_bytes() for path in run.plugins if module_name(path) == home]
    return hashlib.sha256(texts[0]).hexdigest() if texts else ""


def identity(run: Run, stream: Stream) -> str:
    """The name of a run's record: what it is for people, and a digest of all that decides it."""
    row = "" if run.variant is None else "".join(filter(str.isalnum, run.variant.row))
    named = digest(decided(run, stream))[:8]
    parts = [run.protocol.name, run.method.method, row, f"s{run.seed}", named]
    return "-".join(filter(None, parts))


def _settings(run: Run) -> AdapterConfig:
    """Every setting of the method, defaults and all; a wrong one is noticed here."""
    known, card = method_class(run.method.method), card_of(run.protocol.model)
    profile = profile_of(run.protocol.model)
    return configured(known, nn.Identity(), profile, _preset(run, card), _given(run, card))


def _preset(run: Run, card: Card) -> str:
    """The form of the method that the run is about, or its usual one for the model's task."""
    return run.method.preset or card.task


def _given(run: Run, card: Card) -> dict[str, Any]:
    """The settings that are handed to the method."""
    known = method_class(run.method.method)
    settings = {"seed": run.seed, **run.method.settings}
    if "normalise" in known.Config.__dataclass_fields__:
        settings.setdefault("normalise", tuple(map(tuple, card.normalise)))
    return settings
