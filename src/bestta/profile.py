"""SourceProfile: what is known of the source at each chosen layer, in one small file.

Before deployment the model sees unlabelled source images once. Kept are, per layer, the source
style (μ̄_s, σ̄_s), how much it varies between images, and the mean source embedding, averaged over
the images as they come: neither the images nor their features stay. On board the profile stands in
for the source data.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bestta._version import __version__
from bestta.bein import channel_axis
from bestta.files import load_tensors, save_tensors
from bestta.insertion import (
    FeatureFunction,
    check_batch,
    check_model,
    check_ran_once,
    device_of,
    find_module,
    inserted,
)
from bestta.moments import instance_moments
from bestta.outputs import OutputKey, Task, by_class, select_logits, task_of
from bestta.progress import Progress

KIND = "source profile"
FORMAT = 1
PREPARED = "prepared:"
"""What the names of tensors begin with that methods have learned: no name of a layer does."""
ANSWERS = "answers:"
"""Likewise for how the model answers."""

Embedding = Literal["pooled", "map"]


@dataclass(frozen=True)
class ModelIdentity:
    """Which model a profile or a state belongs to."""

    architecture: str
    """Class name of the model."""
    parameters: int
    """Number of its parameters."""
    fingerprint: str
    """Digest of the names, shapes and values of its parameters and buffers."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelIdentity:
        """Identify ``model``.

        The values enter rounded to bfloat16: the same weights in fp32 and in bf16, on any
        device and in any memory format, are the same model. Counters of training steps
        (integer buffers) and what a model only caches (buffers it does not save) do not enter.
        """
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            values = tensor.detach().to("cpu", torch.bfloat16).contiguous().flatten()
            digest.update(values.view(torch.uint8).numpy().data if values.numel() else b"")
        count = sum(p.numel() for p in model.parameters())
        return cls(type(model).__name__, count, digest.hexdigest()[:16])

    def __str__(self) -> str:
        return f"{self.architecture} ({self.parameters:,} parameters, {self.fingerprint})"

    def check(self, model: nn.Module, what: str) -> None:
        """Raise a ValueError that names both sides unless ``model`` is this one."""
        other = ModelIdentity.of(model)
        if other.fingerprint == self.fingerprint:
            return
        same = (other.architecture, other.parameters) == (self.architecture, self.parameters)
        raise ValueError(
            f"this {what} belongs to another model.\n"
            f"  {what}: {self}\n  model given: {other}\n"
            + ("Same architecture, other weights: " if same else "")
            + f"load the weights the {what} was made with, or make a new one for this model, "
            "in the precision it will run in."
        )


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The source style at one layer. Every tensor is an average or a variance over images."""

    mu: Tensor
    """μ̄_s, the mean of the images' channel means, (C,), float64; also the mean pooled embedding."""
    sigma: Tensor
    """σ̄_s, the mean of the images' channel deviations, (C,), float64."""
    channel_dim: int | None = None
    """Where the channels lie, if not at the usual place."""
    embedding_map: Tensor | None = None
    """The mean source embedding as a whole map, if asked for, shaped like the features, fp32."""
    mu_spread: Tensor | None = None
    """Variance of the images' channel means, (C,), float64: how much they differ by what they
    show. Profiles of before this was kept have none."""
    sigma_spread: Tensor | None = None
    """Likewise of their channel deviations."""

    @property
    def spread(self) -> tuple[Tensor, Tensor] | None:
        """Both variances between images, if they are known."""
        if self.mu_spread is None or self.sigma_spread is None:
            return None
        return self.mu_spread, self.sigma_spread

    def embedding(self, kind: Embedding) -> Tensor:
        """The mean source embedding: (C,) if pooled, otherwise shaped like the features."""
        if kind == "pooled":
            return self.mu
        if self.embedding_map is None:
            raise ValueError(
                "this profile holds pooled embeddings only; for embedding='map' collect it with "
                "SourceProfile.collect(…, embedding='map')."
            )
        return self.embedding_map

    def merged(self, other: LayerProfile, weight: float) -> LayerProfile:
        """The average of both, ``other`` counting with ``weight`` (0 to 1)."""
        maps = None
        if self.embedding_map is not None and other.embedding_map is not None:
            if self.embedding_map.shape != other.embedding_map.shape:
                raise ValueError(
                    "embedding='map' needs images of one size: maps of shape "
                    f"{tuple(self.embedding_map.shape)} and {tuple(other.embedding_map.shape)}. "
                    "Pooled embeddings take any."
                )
            maps = self.embedding_map.lerp(other.embedding_map, weight)
        mu_spread = sigma_spread = None
        if self.spread is not None and other.spread is not None:
            # Within either set of images, and between the two.
            gaps = (self.mu - other.mu, self.sigma - other.sigma)
            mu_spread, sigma_spread = (
                one.lerp(two, weight) + weight * (1 - weight) * gap**2
                for one, two, gap in zip(self.spread, other.spread, gaps, strict=True)
            )
        return replace(
            self,
            mu=self.mu.lerp(other.mu, weight),
            sigma=self.sigma.lerp(other.sigma, weight),
            embedding_map=maps,
            mu_spread=mu_spread,
            sigma_spread=sigma_spread,
        )


@dataclass(frozen=True, eq=False)
class AnswerProfile:
    """How the source model answers source images. Every tensor is an average over images."""

    histogram: Tensor
    """How often each class is predicted, softly: the mean probability, (K,), float64."""
    entropy: Tensor
    """Mean entropy of the predictions, (), float64."""

    @classmethod
    def of(cls, logits: Tensor) -> AnswerProfile:
        """Of one batch of logits, (B, K) or (B, K, H, W)."""
        logits = by_class(logits)
        log_p = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
        p = log_p.exp()
        rest = (0, *range(2, p.dim()))
        return cls(p.mean(rest).cpu().double(), -(p * log_p).sum(1).mean().cpu().double())

    @property
    def is_finite(self) -> bool:
        """Whether no logit of the answers was NaN or infinite."""
        return bool(self.histogram.isfinite().all() and self.entropy.isfinite())

    def merged(self, other: AnswerProfile, weight: float) -> AnswerProfile:
        """The average of both, ``other`` counting with ``weight`` (0 to 1)."""
        return AnswerProfile(
            self.histogram.lerp(other.histogram, weight), self.entropy.lerp(other.entropy, weight)
        )


@dataclass(frozen=True)
class SourceProfile:
    """What is known of the source, collected in one pass over unlabelled source images.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
        >>> profile = SourceProfile.collect(model, torch.rand(5, 3, 8, 8), layers=["0"])
        >>> profile.images, profile.task, profile.layers["0"].mu.shape
        (5, 'segmentation', torch.Size([4]))
    """

    layers: Mapping[str, LayerProfile]
    """The source style by name of layer, in the order the layers run."""
    images: int
    """How many images went in."""
    model: ModelIdentity
    """The model it was collected from."""
    task: Task
    """Told from the model's logits."""
    input_channels: int
    """Channels of the images."""
    output: OutputKey = None
    """Where the model keeps its logits."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings by method that `bestta.adapt` takes unless it is told otherwise."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """When and with what it was made, and whatever its maker noted."""
    prepared: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """What other methods learned from source images, by method: see `bestta.prepare`."""
    answers: AnswerProfile | None = None
    """How the model answers source images: what the guard measures answers on board against."""

    def __post_init__(self) -> None:
        if not (self.layers or self.prepared) or self.images < 1:
            raise ValueError(
                f"an empty profile: {len(self.layers)} layers, {self.images} images. Collect one "
                "with SourceProfile.collect(model, images, layers)."
            )

    @classmethod
    def collect(
        cls,
        model: nn.Module,
        images: Iterable[Any],
        layers: Sequence[str] | str,
        *,
        embedding: Embedding = "pooled",
        output: OutputKey = None,
        channel_dim: int | Mapping[str, int] | None = None,
        note: str = "",
        progress: bool | None = None,
    ) -> SourceProfile:
        """Collect the profile of ``model`` at ``layers`` in one pass over ``images``.

        Args:
            model: The source model, in eval mode. It is left as it is.
            images: Batches (B, 3, H, W) normalised as the model wants them, or tuples that begin
                with one: a DataLoader over a labelled set works as it is. Sizes may differ.
            layers: Names of modules, as `bestta.layers` lists them.
            embedding: ``"pooled"`` keeps a channel vector per layer; ``"map"`` keeps the mean
                feature map as well (megabytes, and images of one size only).
            output: Where the model keeps its logits, if it is not plain.
            channel_dim: Where the channels of a layer's features lie, if not at the usual place.
            note: Anything worth remembering, kept in the provenance.
            progress: Show how far it is; by default on a terminal.
        """
        names = list(layer_names(layers))
        if not names:
            raise ValueError("no layers given: name at least one, as bestta.layers(model) lists.")
        check_model(model)
        modules = {name: find_module(model, name) for name in names}
        if len(set(map(id, modules.values()))) < len(names):
            raise ValueError(f"the layers {', '.join(names)} are not different modules.")
        if embedding not in ("pooled", "map"):
            raise ValueError(f"embedding is 'pooled' or 'map', not {embedding!r}.")
        places: Mapping[str, int | None] = (
            channel_dim if isinstance(channel_dim, Mapping) else dict.fromkeys(names, channel_dim)
        )
        device = device_of(model)
        identity = ModelIdentity.of(model)

        total: SourceProfile | None = None
        sizes: dict[str, int] = {}
        skipped = 0
        with (
            Progress("source images", show=progress) as shown,
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            for item in batches(images):
                image = check_image(first(item)).to(device)
                shown.advance(len(image))
                good = image.isfinite().flatten(1).all(1)
                if bool(good.any()):
                    seen, logits = _look(model, image[good], names, embedding, places, output)
                    keep = torch.stack([layer.finite for layer in seen.values()]).all(0)
                    keep &= logits.isfinite().flatten(1).all(1).to(keep.device)
                    kept = int(keep.sum())
                else:
                    kept = 0
                skipped += len(image) - kept
                if not kept:
                    continue
                averages = {name: layer.average(keep) for name, layer in seen.items()}
                batch = cls(
                    averages,
                    kept,
                    identity,
                    task_of(logits),
                    image.shape[1],
                    output,
                    answers=AnswerProfile.of(logits[keep.to(logits.device)]),
                )
                total = batch if total is None else total._averaged(batch)
                size = f"{image.shape[3]}x{image.shape[2]}"
                sizes[size] = sizes.get(size, 0) + kept
        if skipped:
            warnings.warn(
                f"{skipped} source images gave NaN or infinite values and were left out.",
                stacklevel=2,
            )
        if total is None:
            raise ValueError(
                "a profile of no images: "
                + ("all of them gave NaN or infinite values." if skipped else "none were given.")
            )
        provenance = {
            "collected": datetime.now(UTC).isoformat(timespec="seconds"),
            "bestta": __version__,
            "torch": torch.__version__,
            "sizes": sizes,
            "skipped": skipped,
            "note": note,
        }
        return replace(total, provenance=provenance)

    def merge(self, other: SourceProfile) -> SourceProfile:
        """The profile of both sets of images together, as if collected in one pass."""
        if self.model.fingerprint != other.model.fingerprint:
            raise ValueError(
                f"profiles of two models do not merge: {self.model} and {other.model}."
            )
        if set(self.layers) != set(other.layers):
            raise ValueError(
                "profiles merge when they hold the same layers; these hold "
                f"{', '.join(self.layers)} and {', '.join(other.layers)}."
            )
        if self.prepared or other.prepared:
            raise ValueError(
                "what methods have learned from source images "
                f"({', '.join({**self.prepared, **other.prepared})}) does not merge: "
                "merge first, then bestta.prepare(…, profile=…) on all of the images."
            )
        return replace(
            self._averaged(other),
            provenance={"merged": [dict(self.provenance), dict(other.provenance)]},
        )

    def _averaged(self, other: SourceProfile) -> SourceProfile:
        images = self.images + other.images
        weight = other.images / images
        layers = {n: p.merged(other.layers[n], weight) for n, p in self.layers.items()}
        answers = None
        if self.answers is not None and other.answers is not None:
            answers = self.answers.merged(other.answers, weight)
        return replace(self, layers=layers, images=images, answers=answers)

    def check(self, model: nn.Module) -> None:
        """Raise a ValueError that names both sides unless this is the profile of ``model``."""
        self.model.check(model, KIND)

    def select(self, names: Iterable[str]) -> dict[str, LayerProfile]:
        """The layers called ``names``, or a ValueError that says which ones there are."""
        chosen = {}
        for name in names:
            if name not in self.layers:
                raise ValueError(
                    f"this profile has no layer {name!r}; it was collected at "
                    f"{', '.join(self.layers)}. Collect it anew with the layer you want."
                )
            chosen[name] = self.layers[name]
        return chosen

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as one safetensors file."""
        tensors = {}
        for name, layer in self.layers.items():
            tensors[f"{name}/mu"], tensors[f"{name}/sigma"] = layer.mu, layer.sigma
            if layer.spread is not None:
                tensors[f"{name}/mu_spread"], tensors[f"{name}/sigma_spread"] = layer.spread
            if layer.embedding_map is not None:
                tensors[f"{name}/embedding_map"] = layer.embedding_map
        for method, learned in self.prepared.items():
            tensors |= {f"{PREPARED}{method}/{name}": value for name, value in learned.items()}
        if self.answers is not None:
            tensors |= {f"{ANSWERS}{name}": value for name, value in vars(self.answers).items()}
        about = {
            "kind": KIND,
            "format": FORMAT,
            "layers": {name: {"channel_dim": p.channel_dim} for name, p in self.layers.items()},
            "images": self.images,
            "model": vars(self.model),
            "task": self.task,
            "input_channels": self.input_channels,
            "output": self.output,
            "settings": {name: dict(values) for name, values in self.settings.items()},
            "provenance": dict(self.provenance),
            "prepared": list(self.prepared),
        }
        save_tensors(path, tensors, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> SourceProfile:
        """Read a profile; with ``model``, raise a ValueError unless it is that model's."""
        tensors, about = load_tensors(path, KIND)
        if about.get("format") != FORMAT:
            raise ValueError(
                f"{path} is a {KIND} of format {about.get('format')}; "
                f"this version of bestta reads format {FORMAT}."
            )
        try:
            layers = {
                name: LayerProfile(
                    tensors[f"{name}/mu"],
                    tensors[f"{name}/sigma"],
                    more["channel_dim"],
                    tensors.get(f"{name}/embedding_map"),
                    tensors.get(f"{name}/mu_spread"),
                    tensors.get(f"{name}/sigma_spread"),
                )
                for name, more in about["layers"].items()
            }
            profile = cls(
                layers=layers,
                images=about["images"],
                model=ModelIdentity(**about["model"]),
                task=about["task"],
                input_channels=about["input_channels"],
                output=about["output"],
                settings=about["settings"],
                provenance=about["provenance"],
                prepared={
                    method: _under(f"{PREPARED}{method}/", tensors)
                    for method in about.get("prepared", ())
                },
                # Profiles of before answers were kept have none.
                answers=AnswerProfile(**answers) if (answers := _under(ANSWERS, tensors)) else None,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is a damaged {KIND}: {error!r}.") from error
        if model is not None:
            profile.check(model)
        return profile

    def __str__(self) -> str:
        layers = ", ".join(f"{name} ({p.mu.numel()})" for name, p in self.layers.items())
        return (
            f"source profile of {self.model}: {self.images} images, {self.task}"
            + (f", at {layers}" if layers else "")
            + (f", prepared for {', '.join(self.prepared)}" if self.prepared else "")
        )


def layer_names(layers: Any) -> tuple[str, ...]:
    """One name or several as a tuple of them, or a ValueError that says what was seen."""
    listed = isinstance(layers, Iterable) and not isinstance(layers, str)
    names = tuple(layers) if listed else (layers,)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"layers are named as bestta.layers(model) lists them, one or several; got {layers!r}."
        )
    return names


def check_image(image: Any) -> Tensor:
    """``image`` as a batch (B, C, H, W) of floating-point pixels, or a ValueError."""
    if not isinstance(image, Tensor):
        if isinstance(image, Mapping):
            keys = ", ".join(map(repr, image))
            hint = f"; of a dict with keys {keys} give the images, or a tuple of images and labels."
        elif isinstance(image, str | os.PathLike):
            hint = f" ({image}); bestta.data has readers for folders of images."
        else:
            hint = "; turn arrays into tensors with torch.from_numpy(array).float()."
        raise ValueError(f"images are tensors (B, 3, H, W), not {type(image).__name__}{hint}")
    if image.dim() != 4 or image.numel() == 0:
        hint = " Add the batch axis: image.unsqueeze(0)." if image.dim() == 3 else ""
        raise ValueError(
            f"images are batches (B, 3, H, W) of at least one; "
            f"this has shape {tuple(image.shape)}.{hint}"
        )
    if not image.is_floating_point():
        raise ValueError(
            f"images are floating-point, normalised as the model wants them; this is {image.dtype}."
        )
    return image


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def batches(images: Iterable[Any]) -> Iterable[Any]:
    """One tensor of many images goes through one image at a time."""
    return torch.split(images, 1) if isinstance(images, Tensor) and images.dim() == 4 else images


def first(item: Any) -> Any:
    """What a batch begins with: its images."""
    return item[0] if isinstance(item, tuple | list) and item else item


class _Seen(NamedTuple):
    """What one batch showed at one layer, image by image."""

    mean: Tensor
    """(B, C), float64."""
    sigma: Tensor
    """(B, C), float64."""
    maps: Tensor | None
    """The features themselves, if their average is wanted."""
    channel_dim: int | None

    @property
    def finite(self) -> Tensor:
        """Which images gave finite statistics, (B,)."""
        return self.mean.isfinite().all(1) & self.sigma.isfinite().all(1)

    def average(self, keep: Tensor) -> LayerProfile:
        """The profile of the images to ``keep``, (B,) of booleans."""
        return LayerProfile(
            self.mean[keep].mean(0),
            self.sigma[keep].mean(0),
            self.channel_dim,
            None if self.maps is None else self.maps[keep].mean(0),
            self.mean[keep].var(0, correction=0),
            self.sigma[keep].var(0, correction=0),
        )


def _look(
    model: nn.Module,
    image: Tensor,
    names: Sequence[str],
    embedding: Embedding,
    channel_dim: Mapping[str, int | None],
    output: OutputKey,
) -> tuple[dict[str, _Seen], Tensor]:
    """One forward of the source model: what it showed at each layer, and its logits."""
    seen: dict[str, _Seen] = {}

    def look(name: str) -> FeatureFunction:
        def see(x: Tensor) -> None:
            check_batch(x, image, name)
            place = channel_dim.get(name)
            mean, variance = instance_moments(x, channel_axis(x, place))
            seen[name] = _Seen(
                mean.cpu().double(),
                variance.cpu().double().sqrt(),
                x.cpu().float() if embedding == "map" else None,
                place,
            )

        return see

    with inserted(model, {name: look(name) for name in names}) as runs:
        logits = select_logits(model(image), output)
    check_ran_once(runs, names, model)
    return seen, logits
