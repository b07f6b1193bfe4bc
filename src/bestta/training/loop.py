"""Train a recipe: one loop, which can be killed at any moment and goes on where it was."""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.data.samples import IGNORED, ImageSet, Sample, UnreadableImage
from bestta.data.seeds import generator
from bestta.files import held, load_tensors, save_tensors
from bestta.interrupt import stop_requests
from bestta.progress import Progress, span
from bestta.provenance import provenance
from bestta.training.recipes import Recipe, Splits
from bestta.training.scoring import normalised, score

KIND = "training checkpoint"
CHECKPOINT = "checkpoint.safetensors"
_BALANCE_SAMPLE = 300
"""So many training images tell how common each class is."""

_RAREST = 1e-4
"""Classes rarer than this among the pixels count as if they were this common."""


@dataclass
class History:
    """What happened so far."""

    seconds: float = 0.0
    """Time spent in training, over all runs."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean loss since the entry before)."""
    scores: list[tuple[int, float]] = field(default_factory=list)
    """(step, score on the held-out images)."""
    recent: list[float] = field(default_factory=list)
    """Losses since the last entry of ``losses``."""


class Training:
    """A recipe under way: a network, its optimiser, and how far it has come.

    What a step does depends on the recipe, the step's number and the tensors in the checkpoint, and
    on nothing else: images are drawn and altered by generators named after the epoch and the image,
    and PyTorch's own generator is seeded for every step, and put back. So a run that was killed
    repeats the steps after its last checkpoint to the bit, on the same CPU with as many threads.

    Args:
        recipe: What to train.
        folder: Where the checkpoint is, or will be.
        data: Folder of the data set, for recipes that need one.
        init: File of pretrained weights, for recipes that start from some.
        device: Where to compute.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: str | os.PathLike[str],
        *,
        data: str | os.PathLike[str] | None = None,
        init: str | os.PathLike[str] | None = None,
        device: str = "cpu",
    ) -> None:
        if recipe.needs_data and data is None:
            raise ValueError(f"{recipe.name} is trained on files: name their folder with --data.")
        if data is not None and not recipe.needs_data:
            raise ValueError(f"{recipe.name} makes its own images and takes no --data.")
        if init is not None and recipe.init is None:
            raise ValueError(f"{recipe.name} starts from random weights and takes no --init.")
        self.recipe, self.device = recipe, usable(device)
        self.folder = Path(folder)
        self.splits: Splits = recipe.splits(Path(data) if data is not None else None)
        self.steps_per_epoch = len(self.splits.train) // recipe.batch
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"{len(self.splits.train)} training images do not fill one batch of {recipe.batch}."
            )
        self.steps = self.steps_per_epoch * recipe.epochs
        self.step = 0
        self.interrupted = False
        self.sittings: list[dict[str, Any]] = []
        self.history = History()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = recipe.build()
        self.origin = ""
        checkpoint = self.folder / CHECKPOINT
        if recipe.init is not None and not checkpoint.exists():
            self.origin = recipe.init(self.model, Path(init) if init is not None else None)
        self.model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimiser = torch.optim.SGD(
            _parameter_groups(self.model, recipe), momentum=recipe.momentum, nesterov=True
        )
        self.class_weights: Tensor | None = None
        if checkpoint.exists():
            self._load(checkpoint)
        elif recipe.class_balance:
            self.class_weights = class_weights(
                self.splits.train, len(recipe.classes), recipe.class_balance
            ).to(self.device)

    @property
    def done(self) -> bool:
        """Whether the last step has been taken."""
        return self.step >= self.steps

    @property
    def epoch(self) -> float:
        """How many times the training images have been seen."""
        return self.step / self.steps_per_epoch

    def run(
        self, *, seconds: float | None = None, checkpoint_every: float = 180.0, show: bool = True
    ) -> bool:
        """Train to the end, for ``seconds``, or until Ctrl-C; each ends with a checkpoint.

        Ctrl-C and SIGTERM stop it after the step that is under way (``interrupted`` tells); a
        second one stops it at once, and the steps since the last checkpoint will be repeated.

        Args:
            seconds: Stop after so long, with a checkpoint.
            checkpoint_every: Seconds between checkpoints.
            show: Whether to show progress.

        Returns:
            Whether the training is done.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        name = self.recipe.name
        with (
            held(self.folder),
            Progress(f"{name}: steps", self.steps, show=show, done=self.step) as progress,
            stop_requests(show) as requests,
            closing(self._batches()) as batches,
        ):
            for left in self.folder.glob(f".{CHECKPOINT}.*.tmp"):
                left.unlink(missing_ok=True)  # by a run that was killed while it wrote
            self._sit_down()
            started = saved = turned = time.monotonic()
            for images, labels in batches:
                self._note(self._learn(images, labels))
                self.step += 1
                if self.history.losses:
                    progress.what = f"{name}: loss {self.history.losses[-1][1]:.3f}, steps"
                if self.step % self.steps_per_epoch == 0:
                    progress.say(self._watch())
                now = time.monotonic()
                self.history.seconds += now - turned
                turned = now
                stop = bool(requests) or (seconds is not None and now - started >= seconds)
                if stop or self.done or now - saved >= checkpoint_every:
                    self.save()
                    saved = now
                progress.advance()
                if stop:
                    break
            self.interrupted = bool(requests)
        return self.done

    def _sit_down(self) -> None:
        """Note with what this sitting trains; warn where its bits will differ from the last's."""
        if self.done:
            return
        now = {**provenance(), "device": self.device.type, "from_step": self.step}
        then = _deciding(self.sittings[-1] if self.sittings else now)
        self.sittings.append(now)
        differing = [
            f"{what} was {then[what]} and is {value}"
            for what, value in _deciding(now).items()
            if then.get(what, value) != value
        ]
        if differing:
            warnings.warn(
                f"{', '.join(differing)} as training goes on: what comes out will be as good, "
                "but not the same to the bit.",
                stacklevel=3,
            )

    def _note(self, loss: float) -> None:
        """Keep the mean of the losses of each tenth of an epoch."""
        every = max(1, self.steps_per_epoch // 10)
        self.history.recent.append(loss)
        if len(self.history.recent) == every:
            self.history.losses.append((self.step + 1, sum(self.history.recent) / every))
            self.history.recent.clear()

    def _batches(self) -> Generator[tuple[Tensor, Tensor]]:
        """The batches from the current step to the last, each prepared while one is learned."""
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.batch, self.step)
            for step in range(self.step, self.steps):
                batch = ahead.result()
                if step + 1 < self.steps:
                    ahead = pool.submit(self.batch, step + 1)
                yield batch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) and labels of a step: a function of the recipe and the number."""
        recipe = self.recipe
        epoch, place = divmod(step, self.steps_per_epoch)
        order = generator(recipe.seed, "order", epoch).permutation(len(self.splits.train))
        chosen = order[place * recipe.batch : (place + 1) * recipe.batch]
        images, labels = [], []
        for index in chosen.tolist():
            sample = self._readable(index)
            dice = generator(recipe.seed, "augment", epoch, index)
            assert sample.label is not None
            image, label = recipe.augment(sample.image, sample.label, dice)
            images.append(image)
            labels.append(np.asarray(label))
        return (
            normalised(np.stack(images), recipe.normalise).to(self.device),
            torch.from_numpy(np.stack(labels).astype(np.int64)).to(self.device),
        )

    def _readable(self, index: int) -> Sample:
        """Training image ``index``, or the next one that can be used: one broken file is no end."""
        train = self.splits.train
        for other in range(index, index + len(train)):
            other %= len(train)
            try:
                sample = train[other]
            except UnreadableImage as error:
                train.skip(train.name(other), str(error))
                continue
            if sample.label is not None:
                return sample
            train.skip(sample.name, "no label to learn from")
        raise ValueError(f"no image of {train!r} can be used for training.")

    def _learn(self, images: Tensor, labels: Tensor) -> float:
        """One step of SGD; the loss before it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_number(self.recipe.seed, "step", self.step))
            return self._descend(images, labels)

    def _descend(self, images: Tensor, labels: Tensor) -> float:
        recipe = self.recipe
        rate = learning_rate(self.step / self.steps, recipe.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.lr * group["factor"] * rate
        self.model.train()
        bf16 = recipe.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = self.model(images)
        if recipe.loss_stride > 1:
            row, column = torch.randint(recipe.loss_stride, (2,)).tolist()
            every = slice(row, None, recipe.loss_stride), slice(column, None, recipe.loss_stride)
            logits, labels = logits[:, :, *every], labels[:, *every]
        loss = F.cross_entropy(
            logits.float(), labels, weight=self.class_weights, ignore_index=IGNORED
        )
        if not bool((labels != IGNORED).any()):
            loss = 0 * logits.float().sum()  # the mean over nothing would be no number
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss of step {self.step} is {value}: training has diverged. The checkpoint "
                "holds the last state that was saved; try a smaller lr, into another folder."
            )
        self.optimiser.step()
        return value

    def _watch(self) -> str:
        """Score the held-out images; a line that tells how they fared."""
        metric = score(self.model, self.splits.held_out, self.recipe)
        self.history.scores.append((self.step, metric.score()))
        loss = self.history.losses[-1][1] if self.history.losses else math.nan
        return (
            f"epoch {self.epoch:.0f} of {self.recipe.epochs}: loss {loss:.3f}, "
            f"{metric.name} on held-out images {metric.score():.2f} %, "
            f"{span(self.history.seconds)} of training"
        )

    def save(self) -> Path:
        """Write the checkpoint, whole or not at all."""
        path = self.folder / CHECKPOINT
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            velocity = self.optimiser.state[parameter].get("momentum_buffer")
            if velocity is not None:
                tensors[f"velocity.{name}"] = velocity
        if self.class_weights is not None:
            tensors["class_weights"] = self.class_weights
        about = {
            "kind": KIND,
            "recipe": self.recipe.name,
            "settings": self._settings(),
            "step": self.step,
            "origin": self.origin,
            "sittings": self.sittings,
            "history": asdict(self.history),
        }
        save_tensors(path, tensors, about)
        return path

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that goes on from it."""
        return {**self.recipe.settings(), "training images": len(self.splits.train)}

    def _load(self, path: Path) -> None:
        tensors, about = load_tensors(path, KIND)
        now, then = self._settings(), about.get("settings", {})
        differing = [
            f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
            for name in sorted(now.keys() | then.keys())
            if now.get(name) != then.get(name)
        ]
        if differing:
            raise ValueError(
                f"{path} was begun with other settings: {'; '.join(differing)}. "
                "Go on with those, or train into another folder."
            )
        try:
            self._restore(tensors, about)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{path} was written by another version of bestta and cannot be gone on from "
                f"({type(error).__name__}: {' '.join(str(error).split())}). "
                "Train into another folder."
            ) from error

    def _restore(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        state = {
            name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }
        self.model.load_state_dict(state)
        for name, parameter in self.model.named_parameters():
            if f"velocity.{name}" in tensors:
                velocity = torch.empty_like(parameter)
                velocity.copy_(tensors[f"velocity.{name}"])
                self.optimiser.state[parameter]["momentum_buffer"] = velocity
        if "class_weights" in tensors:
            # A copy: what was read may be the file itself, mapped into memory.
            self.class_weights = tensors["class_weights"].to(self.device, copy=True)
        self.sittings = about["sittings"]
        self.step, self.origin = about["step"], about["origin"]
        self.history = History(
            seconds=about["history"]["seconds"],
            recent=about["history"]["recent"],
            losses=[tuple(entry) for entry in about["history"]["losses"]],
            scores=[tuple(entry) for entry in about["history"]["scores"]],
        )


def _deciding(sitting: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a sitting's last bits, as far as it was noted."""
    known = {
        "device": sitting.get("device"),
        "CPU": sitting.get("machine", {}).get("cpu"),
        "number of threads": sitting.get("machine", {}).get("threads"),
        "torch": sitting.get("versions", {}).get("torch"),
        "numpy": sitting.get("versions", {}).get("numpy"),
    }
    return {what: value for what, value in known.items() if value}


def learning_rate(progress: float, warmup: float) -> float:
    """Factor on the step size after a share ``progress`` of all steps.

    >>> [round(learning_rate(at, 0.2), 2) for at in (0.1, 0.2, 0.6, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def class_weights(images: ImageSet, classes: int, power: float) -> Tensor:
    """What each class counts in the loss, (K,): ``share ** -power``, 1 on average over pixels."""
    counts = np.zeros(256, np.int64)
    some = images[:: max(1, len(images) // _BALANCE_SAMPLE)]
    with Progress("images whose classes are counted", len(some)) as progress:
        for sample in some:
            if sample.label is not None:
                counts += np.bincount(np.asarray(sample.label).ravel(), minlength=256)
            progress.advance()
    shares = np.maximum(counts[:classes] / counts[:classes].sum(), _RAREST)
    weights = shares**-power
    return torch.from_numpy(weights / (shares * weights).sum()).float()


def usable(device: str) -> torch.device:
    """The device called so, or a ValueError if there is none here."""
    try:
        return torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot compute on {device!r}: {str(error).splitlines()[0]}") from error


def _number(*words: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=4).digest(), "big")


def _parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameters by step size and decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        pretrained = bool(recipe.pretrained) and name.startswith(f"{recipe.pretrained}.")
        decay = recipe.weight_decay if parameter.ndim > 1 else 0.0
        key = (recipe.lr_pretrained if pretrained else 1.0, decay)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "factor": factor, "weight_decay": decay, "lr": 0.0}
        for (factor, decay), parameters in groups.items()
    ]
