"""Other views of an image: their sizes, and what the answers to several come to together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bestta.adapters.settings import is_number
from bestta.losses import entropy
from bestta.outputs import by_class, thinned

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


def agreed(answers: Sequence[Tensor], trust: float) -> Tensor:
    """What several answers to the same images come to: the mean of their logits, (B, K, ...).

    Of an image each counts by ``exp(−trust · entropy)``: the surer it is, the more. The mean of
    logits is the normalised product of the answers (Hinton's product of experts, 1999).

    Example:
        >>> sure, unsure = torch.tensor([[6.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> agreed([sure, unsure], trust=0.0)
        tensor([[3.0000, 0.5000]])
        >>> agreed([sure, unsure], trust=1e3)
        tensor([[6., 0.]])
    """
    weights = (-trust * torch.stack([unsureness(answer) for answer in answers])).softmax(0)
    # In fp32 at least: PyTorch is slow where a sum is of several kinds of numbers.
    wide = torch.promote_types(answers[0].dtype, torch.float32)
    shape = (-1,) + (1,) * (answers[0].dim() - 1)
    first = answers[0].to(wide)
    total = first.clone()
    for answer, weight in zip(answers[1:], weights[1:].to(wide), strict=True):
        # What is added is the difference: where all agree, nothing is rounded.
        total.addcmul_(answer.to(wide) - first, weight.view(shape))
    return total.to(answers[0].dtype)
