"""Source models ready to use: weights, what is known of them, and a source profile beside them.

A trained model is a folder of a few files, whether it ships with the library or comes out of
``bestta train``:

- ``weights.safetensors``: convolutions and linear layers in fp16, everything else in fp32;
- ``profile.safetensors``: the `SourceProfile` of its usual layers;
- ``card.json``: data, terms, recipe, scores, SHA-256 of the two, the command that made it;
- ``card.md``, ``curves.svg``: the same to read, and the training to look at.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bestta.files import load_tensors, save_tensors, write_whole
from bestta.models.deeplabv3plus import DeepLabV3Plus
from bestta.models.wide_resnet import WideResNet
from bestta.profile import SourceProfile

WEIGHTS, PROFILE, CARD, READABLE = (
    "weights.safetensors",
    "profile.safetensors",
    "card.json",
    "card.md",
)
KIND = "source model"
SHIPPED = Path(__file__).parent / "files"
"""Where the models that come with the library are."""

NETWORKS: dict[str, type[nn.Module]] = {"DeepLabV3Plus": DeepLabV3Plus, "WideResNet": WideResNet}


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of a trained model."""

    name: str
    about: str
    """One line: network, data, size."""
    network: str
    arguments: Mapping[str, Any]
    """What the network is built from: ``NETWORKS[network](**arguments)``."""
    task: str
    """``"segmentation"`` or ``"classification"``."""
    classes: tuple[str, ...]
    normalise: tuple[tuple[float, ...], tuple[float, ...]]
    """Channel means and deviations, of values 0…1, that images are normalised with."""
    size: tuple[int, int]
    """(width, height) of the images it was trained and scored on."""
    layers: tuple[str, ...]
    """The layers its profile covers."""
    parameters: int
    data: str
    terms: str
    """Under which terms the weights may be used, and why."""
    command: str
    """What made it."""
    recipe: Mapping[str, Any]
    """Every setting of its training."""
    metric: str
    """What its scores are: ``"mIoU"`` (higher is better) or ``"error"``, in percent."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """``clean``, and by condition the scores at severities 1 to 5, left alone."""
    notes: tuple[str, ...] = ()
    """What a reader of the scores should know."""
    history: Mapping[str, Any] = field(default_factory=dict)
    """Losses and held-out scores by step; seconds of training; machine and versions."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """By file name."""

    @classmethod
    def read(cls, folder: Path) -> Card:
        """The card in ``folder``; a ValueError says what is wrong with it."""
        path = folder / CARD
        if not path.is_file():
            raise FileNotFoundError(f"no trained model in {folder}: it has no {CARD}.")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {entry.name for entry in fields(cls)}
            card = cls(**{name: value for name, value in values.items() if name in known})
            mean, deviation = card.normalise
            width, height = card.size
            tuples = {
                "classes": tuple(card.classes),
                "normalise": (tuple(mean), tuple(deviation)),
                "size": (width, height),
                "layers": tuple(card.layers),
                "notes": tuple(card.notes),
                "sha256": dict(card.sha256),
            }
            return cls(**{**vars(card), **tuples})
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no card of a trained model ({error}).") from error

    def write(self, folder: Path, readable: str) -> None:
        """Write the card into ``folder``, and ``readable`` beside it."""
        text = json.dumps(vars(self), indent=1, ensure_ascii=False)
        write_whole(folder / CARD, f"{text}\n".encode())
        write_whole(folder / READABLE, readable.encode())

    def build(self) -> nn.Module:
        """The network, with weights drawn at random."""
        if self.network not in NETWORKS:
            raise ValueError(
                f"the card of {self.name!r} names the network {self.network!r}; "
                f"this version of bestta has {', '.join(NETWORKS)}."
            )
        try:
            return NETWORKS[self.network](**self.arguments)
        except TypeError as error:
            raise ValueError(
                f"the card of {self.name!r} ({CARD}) does not describe a {self.network}: {error}."
            ) from error


def names() -> list[str]:
    """The models that come with the library.

    >>> "streets" in names()
    True
    """
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CARD}"))


def card(name: str | os.PathLike[str]) -> Card:
    """What is known of a model that ships, or of the one in a folder.

    >>> card("streets").size
    (256, 128)
    """
    return Card.read(folder_of(name))


def load(name: str | os.PathLike[str]) -> nn.Module:
    """A trained model, in eval mode: one of `names`, or a folder that ``bestta train`` filled.

    >>> import torch
    >>> model = load("streets")
    >>> model(torch.zeros(1, 3, 128, 256)).shape
    torch.Size([1, 19, 128, 256])

    Images must be normalised with the card's ``normalise``.

    Raises:
        ValueError: If there is no such model, or its weights are not those its card tells of.
        FileNotFoundError: If its card or its weights are missing.
    """
    folder = folder_of(name)
    known = Card.read(folder)
    tensors, _ = _verified(folder, known, WEIGHTS, lambda path: load_tensors(path, KIND))
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are replaced at once
        model = known.build()
    try:
        model.load_state_dict({key: tensor.float() for key, tensor in tensors.items()})
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS} does not fit {known.network}: {error}") from error
    return model.eval()


def load_profile(name: str | os.PathLike[str]) -> SourceProfile:
    """The source profile that lies beside a trained model's weights.

    >>> list(load_profile("streets").layers)[:3]
    ['backbone.bn1', 'backbone.layer1', 'backbone.layer2']
    """
    folder = folder_of(name)
    profile: SourceProfile = _verified(folder, Card.read(folder), PROFILE, SourceProfile.load)
    return profile


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model's weights as they ship.

    Tensors of more than one axis go to fp16. Statistics and affine parameters of batch norms stay
    in fp32: a small variance would vanish in fp16, and they are few.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim > 1:
            stored = tensor.half()
            if not bool(stored.isfinite().all()):
                raise ValueError(f"{name} has values that fp16 cannot hold.")
            tensor = stored
        tensors[name] = tensor
    save_tensors(path, tensors, {"kind": KIND})


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_of(name: str | os.PathLike[str]) -> Path:
    """Where a model is: a name means one that ships; a path, or a name of none, a folder."""
    known = names()
    if isinstance(name, str) and name in known:
        return SHIPPED / name
    if Path(name).is_dir():
        return Path(name)
    if not isinstance(name, str):
        raise FileNotFoundError(
            f"no folder {name}. A model that ships is named by a string: {', '.join(known)}."
        )
    near = difflib.get_close_matches(name, known, n=1)
    raise ValueError(
        f"no model is called {name!r}."
        + (f" Did you mean {near[0]!r}?" if near else "")
        + f" There are: {', '.join(known) or 'none'}; or name the folder of one."
    )


def _verified(folder: Path, known: Card, file: str, read: Any) -> Any:
    """What ``read`` makes of a file, after a look at whether it is the one the card tells of."""
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the model {known.name!r} is not whole.")
    seen, expected = sha256(path), known.sha256.get(file)
    if seen != expected:
        size = path.stat().st_size
        try:
            read(path)
            fault = "another file than its card tells of"
        except ValueError as error:
            fault = f"damaged, cut short or of another kind ({error})"
        raise ValueError(
            f"{path} is {fault}: {size:,} bytes with SHA-256 {seen[:12]}…, expected "
            f"{str(expected)[:12]}…. Install bestta again, or train the model again with: "
            f"{known.command}"
        )
    return read(path)
