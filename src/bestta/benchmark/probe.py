"""Look at the features inside a running adapter, whatever the method, without its knowing.

A method runs the model itself or a skeleton of it, once per image or dozens of times. While an
adapter is called, a probe notices each such forward as it begins, and hangs a hook on the layer
there and then: behind everything the method has put on it, so that it sees what the rest of the
network sees. When the call is over nothing hangs anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bestta.adapters.base import Adapter
from bestta.bein import channel_axis
from bestta.insertion import check_batch, check_ran_once, find_module, inserted
from bestta.moments import instance_moments
from bestta.outputs import select_logits
from bestta.profile import SourceProfile


@dataclass(frozen=True)
class Observation:
    """What one call of an adapter answered, and what lay behind the answer."""

    logits: Tensor
    """What the adapter returned, (B, K) or (B, K, H, W)."""
    features: Tensor
    """The layer's output in the forward that made the prediction, (B, C, H, W) or (B, N, C)."""


class Probe:
    """``probe(image)`` calls the adapter, which adapts as ever, and shows features at ``layer``.

    Example:
        >>> import bestta
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()
        >>> probe = Probe(bestta.adapt(model, method="tent"), layer="1")
        >>> image = torch.rand(1, 3, 8, 8)
        >>> seen = probe(image)
        >>> seen.logits.shape, seen.features.shape
        (torch.Size([1, 2, 6, 6]), torch.Size([1, 4, 6, 6]))
        >>> torch.equal(seen.features, probe.plain(image))
        False
    """

    def __init__(self, adapter: Adapter, layer: str) -> None:
        find_module(adapter.model, layer)
        self.adapter, self.layer = adapter, layer

    def __call__(self, image: Tensor) -> Observation:
        """Predict ``image`` (B, C, H, W) and adapt to it, exactly as the adapter alone does.

        Where the prediction is no single forward's (CoTTA averages over views), the features are
        those of the forward of the image itself whose prediction is nearest to it.
        """
        with _watched(self.adapter, self.layer, image) as forwards:
            logits = self.adapter(image)
        return Observation(logits, _features_behind(logits, forwards, self.layer))

    def plain(self, image: Tensor) -> Tensor:
        """What the source model alone has at the layer, (B, C, H, W) or (B, N, C)."""
        kept: list[Tensor] = []

        def see(features: Tensor) -> None:
            check_batch(features, image, self.layer)
            kept.append(features.detach().clone())

        model = self.adapter.model
        with torch.inference_mode(False), torch.no_grad():
            given = (image.clone() if image.is_inference() else image).to(self.adapter.device)
            with inserted(model, {self.layer: see}) as runs:
                self.adapter.predict_source(given)
        check_ran_once(runs, [self.layer], model)
        return kept[0]


def default_layer(profile: SourceProfile) -> str:
    """The last layer of the profile: behind all BeINs, where what was adapted is to be seen."""
    if not profile.layers:
        raise ValueError(
            "this profile was prepared for a method and holds no layers to look at: collect one "
            "with bestta.SourceProfile.collect(model, images, layers=[…])."
        )
    return list(profile.layers)[-1]


def pooled(features: Tensor, channel_dim: int | None = None) -> Tensor:
    """The mean of each channel of each image, (B, C), in fp32 or wider."""
    return instance_moments(features, channel_axis(features, channel_dim))[0]


@dataclass(frozen=True)
class _Forward:
    """One forward of the model or of a skeleton of it."""

    rows: Sequence[int | None]
    """For each image of the call, which row of this forward it was; None if it was none."""
    same_shape: bool
    """Whether the forward was of as many images, of the same size."""
    logits: Tensor
    features: Tensor

    @property
    def of_the_image(self) -> bool:
        return any(row is not None for row in self.rows)


@contextmanager
def _watched(adapter: Adapter, layer: str, image: Tensor) -> Iterator[list[_Forward]]:
    """While the context lasts, forwards of the image, or of something of its shape, are noted."""
    model, thread = adapter.model, threading.get_ident()
    names = [name for name, _ in model.named_modules()]
    forwards: list[_Forward] = []

    def begin(module: nn.Module, inputs: Any) -> None:
        # Choice: a skeleton is told by how it is built, not by where the method keeps it. No part
        # of a model has all of its modules, so that none is taken for the whole.
        if type(module) is not type(model) or threading.get_ident() != thread:
            return
        if [name for name, _ in module.named_modules()] != names:
            return
        hooks.close()  # of a forward that raised, if any
        given = inputs[0] if inputs else None
        if isinstance(given, Tensor):
            rows, same_shape = _rows_of(image, given), given.shape == image.shape
            if same_shape or any(row is not None for row in rows):
                hooks.enter_context(_noted(module, given, rows, same_shape))

    @contextmanager
    def _noted(
        root: nn.Module, given: Tensor, rows: Sequence[int | None], same_shape: bool
    ) -> Iterator[None]:
        kept: list[Tensor] = []

        def see(features: Tensor) -> None:
            check_batch(features, given, layer)
            kept.append(features.detach().clone())  # the network may change it in place

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() != thread:
                return  # somebody else is running the model at the same time
            check_ran_once(runs, [layer], module)
            logits = select_logits(output, adapter.config.output).detach()
            done = _Forward(rows, same_shape, logits, kept[0])
            if not done.of_the_image:  # of views, the last will do
                forwards[:] = [forward for forward in forwards if forward.of_the_image]
            forwards.append(done)
            hooks.close()

        handle = root.register_forward_hook(end)
        try:
            with inserted(root, {layer: see}) as runs:
                yield
        finally:
            handle.remove()

    with ExitStack() as hooks:
        watch = register_module_forward_pre_hook(begin)
        try:
            yield forwards
        finally:
            watch.remove()


def _rows_of(image: Tensor, given: Tensor) -> list[int | None]:
    """Which row of ``given`` (N, C, H, W) each image (B, C, H, W) is, to the bit; None if none."""
    if (given.shape[1:], given.dtype) != (image.shape[1:], image.dtype):
        return [None] * len(image)
    if given.shape == image.shape and torch.equal(given, image.to(given.device)):
        return list(range(len(image)))
    places = {key: row for row, key in enumerate(_keys(given))}
    return [places.get(key) for key in _keys(image)]


def _keys(images: Tensor) -> list[bytes]:
    raw = images.detach().contiguous().flatten(1).view(torch.uint8).cpu().numpy()
    return [row.tobytes() for row in raw]


def _features_behind(logits: Tensor, forwards: Sequence[_Forward], layer: str) -> Tensor:
    """The features of each image, in the forward that made its prediction or came nearest to it."""
    rows = []
    for index, answer in enumerate(logits):
        # The last of equals comes first: min takes that one.
        own = [
            (forward, row)
            for forward in reversed(forwards)
            if (row := forward.rows[index]) is not None
        ]
        other = [(forward, index) for forward in reversed(forwards) if forward.same_shape]
        if not own + other:
            raise ValueError(
                f"no features were seen at {layer!r}: the adapter ran its model on nothing of the "
                "image's own size."
            )
        made = min(own or other[:1], key=lambda pair: _gap(pair[0].logits[pair[1]], answer))
        rows.append(made[0].features[made[1]])
    return torch.stack(rows)


def _gap(logits: Tensor, answer: Tensor) -> float:
    """How far apart two predictions (K, ...) are: −1 if equal, or else in probability."""
    if logits.shape != answer.shape:
        return 2.0
    if torch.equal(logits, answer):
        return -1.0
    wide = torch.promote_types(logits.dtype, torch.float32)
    return float((logits.to(wide).softmax(0) - answer.to(wide).softmax(0)).abs().max())
