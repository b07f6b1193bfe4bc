"""What a run is made of: the model, what is known of the source, the adapter."""

from __future__ import annotations

import importlib.util
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import bestta
from bestta import SourceProfile, models
from bestta.adapters import Adapter
from bestta.adapters.registry import method_class
from bestta.benchmark.config import Run, digest
from bestta.data.tensors import LabelledBatches
from bestta.files import Busy, held
from bestta.models import Card
from bestta.protocols import Frame
from bestta.training import recipes
from bestta.training.loop import usable
from bestta.training.scoring import normalised


@dataclass
class Parts:
    """A model, its card, and an adapter on it."""

    run: Run
    card: Card
    model: nn.Module
    profile: SourceProfile
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


def assemble(run: Run, out: Path) -> Parts:
    """Load the model, prepare the method if it learns from source images, make the adapter."""
    torch.set_num_threads(run.threads)
    load_plugins(run.plugins)
    card = models.card(run.protocol.model)
    model = models.load(run.protocol.model).to(usable(run.device))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    profile = _profile(run, model, card, out)
    known = method_class(run.method.method)
    settings = {"seed": run.seed, **run.method.settings}
    if "normalise" in known.Config.__dataclass_fields__:
        settings.setdefault("normalise", tuple(map(tuple, card.normalise)))
    adapter = bestta.adapt(model, profile, method=known.name, preset=card.task, **settings)
    return Parts(run, card, model, profile, adapter)


def load_plugins(paths: tuple[str, ...]) -> None:
    """Import Python files by their path, each once: they register methods."""
    for path in paths:
        name = f"bestta_plugin_{digest(str(Path(path).resolve()))}"
        if name in sys.modules:
            continue
        if not Path(path).is_file():
            raise ValueError(f"no file {path} to import.")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{path} is no Python file.")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


def _profile(run: Run, model: nn.Module, card: Card, out: Path) -> SourceProfile:
    """What is known of the source; what a method learns of it is learned once, and kept."""
    profile = models.load_profile(run.protocol.model)
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
        turn.mkdir(parents=True, exist_ok=True)
        try:
            with held(turn):
                if not path.exists():
                    _prepare(run, model, card, profile, path)
        except Busy:
            time.sleep(1.0)  # another run prepares the same
    return SourceProfile.load(path)


def _prepare(run: Run, model: nn.Module, card: Card, profile: SourceProfile, path: Path) -> None:
    recipe = recipes().get(str(card.recipe.get("name")))
    if recipe is None:
        raise ValueError(
            f"method {run.method.method!r} learns from source images, and the card of "
            f"{card.name!r} names no recipe of this version of bestta that would say which."
        )
    root = run.source_data or run.data
    if recipe.needs_data and root is None:
        raise ValueError(
            f"method {run.method.method!r} learns from the training images of {card.name}: name "
            "their folder with --source-data."
        )
    train = recipe.splits(None if root is None else Path(root)).train
    chosen = run.method.prepare
    if chosen.images is not None and chosen.images < len(train):
        train = train.some(chosen.images)
    checkpoint = path.with_suffix(".part")
    prepared = bestta.prepare(
        model,
        LabelledBatches(train, chosen.batch, card.normalise),
        method=run.method.method,
        profile=profile,
        checkpoint=checkpoint,
        preset=card.task,
        **{"seed": run.seed, **run.method.settings, **chosen.settings},
    )
    prepared.save(path)
    checkpoint.unlink(missing_ok=True)
