"""Other views of an image: their sizes, and what the answers to several come to together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bestta.adapters.settings import is_number
from bestta.losses import entropy
from bestta.outputs import by_class, thinned

LOOKS = "looks/"
"""Names of what is remembered of views begin with this."""
SMALLEST_SIDE = 32
"""No view is smaller, unless the image is: many networks halve their input five times."""


def are_scales(scales: object) -> bool:
    """Whether they are sizes to see an image at, in terms of its own: numbers above 0."""
    return isinstance(scales, tuple | list) and all(
        is_number(scale) and 0 < scale < math.inf for scale in scales
    )


def view_size(image: Tensor, scale: float, step: int = 1) -> tuple[int, int]:
    """Height and width of ``image`` at ``scale``, in multiples of ``step``."""
    height, width = (
        max(round(scale * side / step) * step, min(SMALLEST_SIDE, side))
        for side in image.shape[-2:]
    )
    return height, width


def resized(x: Tensor, size: tuple[int, int], *, smoothly: bool = False) -> Tensor:
    """(B, C, H, W) at another size, bilinear; itself if it has that size.

    Args:
        x: Left as it is.
        size: Height and width.
        smoothly: A smaller one is of means of all pixels, not of every so-many-th.
    """
    if x.shape[-2:] == size:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    smaller = F.interpolate(wide, size, mode="bilinear", align_corners=False, antialias=smoothly)
    return smaller.to(x.dtype)


def unsureness(logits: Tensor) -> Tensor:
    """The mean entropy of the answer to each image, (B,), in nats."""
    return entropy(by_class(thinned(logits))).reshape(len(logits), -1).mean(1)


def agreed(answers: Sequence[Tensor], trust: float, unsure: Sequence[Tensor] = ()) -> Tensor:
    """What several answers to the same images come to: the mean of their logits, (B, K, ...).

    Of an image each counts by ``exp(−trust · entropy)``: the surer it is, the more. The mean of
    logits is the normalised product of the answers (Hinton's product of experts, 1999).

    Args:
        answers: To the same images, of one shape.
        trust: How much more a surer answer counts.
        unsure: The `unsureness` of each answer, (B,), if it is known already.

    Example:
        >>> sure, unsure = torch.tensor([[6.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> agreed([sure, unsure], trust=0.0)
        tensor([[3.0000, 0.5000]])
        >>> agreed([sure, unsure], trust=1e3)
        tensor([[6., 0.]])
    """
    found = torch.stack([*unsure] or [unsureness(answer) for answer in answers]).cpu().double()
    weights = (-trust * found).softmax(0)
    # One after another, each as its share of those so far. Where all agree, nothing is rounded.
    shares = (weights / weights.cumsum(0).clamp(min=torch.finfo(torch.float64).tiny)).tolist()
    total = answers[0].clone()
    for answer, share in zip(answers[1:], shares[1:], strict=True):
        for mean, one, weight in zip(total, answer.to(total.dtype), share, strict=True):
            mean.lerp_(one, weight)  # by a plain number: many times as fast in half precision
    return total


class Favourite:
    """Which of several sizes to see images at: the one whose answers have been the surest lately.

    All of them are compared on the first images after the style of the stream has moved, and on
    every so-many-th from there on; other images are seen at the favourite size alone. Compared are
    answers to the same images, for some are harder than others.
    """

    every = 8
    """All sizes are compared after so many images at the favourite one."""
    first = 2
    """And on so many after the style has moved."""
    decay = 0.7
    """How much of what is known stays at each comparison."""
    names = ("scales", "unsure", "compared", "since")
    _failed = 1e6
    """How unsure an answer is that there is none of."""

    def __init__(self, scales: Sequence[float]) -> None:
        self.scales = tuple(scales)
        self.unsure = [self._failed] * len(self.scales)
        """The moving average of how unsure the answers were, in nats, by size."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """The style has moved: what was the surest may be so no longer."""
        self.compared = 0
        """How often all were compared since."""
        self.since = 0
        """How many images it is since all were compared."""

    def chosen(self) -> list[int]:
        """Which of the sizes, by number, to see an image at."""
        if self.compared < self.first or self.since >= self.every:
            return [*range(len(self.scales))]
        return [self.best()]

    def best(self) -> int:
        """The surest one, by number; the first, if none is known to be."""
        return self.unsure.index(min(self.unsure))

    def seen(self, found: Mapping[int, float], compared: bool) -> None:
        """Take note of how unsure the answers were, by size; of a size that failed there is none.

        Args:
            found: By the size's number.
            compared: Whether the image was to be seen at all sizes.
        """
        if not compared:
            self.since = self.since + 1 if found else self.every
            return
        now = [found.get(size, self._failed) for size in range(len(self.scales))]
        stays = self.decay if self.compared else 0.0
        self.unsure = [
            one if self._failed in (one, known) else stays * known + (1 - stays) * one
            for one, known in zip(now, self.unsure, strict=True)
        ]
        self.since, self.compared = 0, min(self.compared + 1, self.first)

    def state(self) -> dict[str, Tensor]:
        """What is remembered, by name."""
        return {
            f"{LOOKS}scales": torch.tensor(self.scales, dtype=torch.float64),
            f"{LOOKS}unsure": torch.tensor(self.unsure, dtype=torch.float64),
            f"{LOOKS}compared": torch.tensor(self.compared),
            f"{LOOKS}since": torch.tensor(self.since),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; start anew with that of other sizes, or of none."""
        scales, unsure, compared, since = (state.get(f"{LOOKS}{name}") for name in self.names)
        self.unsure = [self._failed] * len(self.scales)
        self.begin_anew()
        if scales is None or unsure is None or compared is None or since is None:
            return
        if tuple(scales.tolist()) == self.scales:
            self.unsure, self.compared, self.since = unsure.tolist(), int(compared), int(since)


def favourite_shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """What a `Favourite` remembers, by name: of however many sizes ``state`` knows."""
    scales = state.get(f"{LOOKS}scales")
    sizes = torch.Size([1 if scales is None else max(1, scales.numel())])
    return {
        f"{LOOKS}{name}": sizes if name in ("scales", "unsure") else torch.Size()
        for name in Favourite.names
    }


def check_favourite(state: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a state from outside holds what no `Favourite` remembers."""
    kept = [value for name in Favourite.names if (value := state.get(f"{LOOKS}{name}")) is not None]
    if len(kept) not in (0, len(Favourite.names)) or any(bool((v < 0).any()) for v in kept):
        raise ValueError(
            "this state is damaged: "
            + ", ".join(f"{LOOKS}{name}" for name in Favourite.names)
            + " are not all there, or negative."
        )
