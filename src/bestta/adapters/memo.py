"""MEMO: one step on many views of one image, then back (Zhang, Levine and Finn, 2022).

"MEMO: Test Time Robustness via Adaptation and Augmentation". Every image is adapted to on its own.
All parameters take one step of gradient descent on the entropy of the prediction averaged over
random views of the image: the views shall agree, and with certainty. The stepped weights predict
the image itself, and the source's weights are put back. Nothing is carried to the next image.

Views are made by AugMix (Hendrycks et al., 2020, "AugMix: A Simple Data Processing Method to
Improve Robustness and Uncertainty"): a random crop and flip, mixed with three chains of one to
three simple operations on it, all of them mild.

Published, as seen in the authors' code. CIFAR-10: a network with group norms, SGD 0.005, 32 views,
crops of the image padded by an eighth in black. ImageNet, ResNet-50: SGD 0.00025, 64 views, crops
of random size and shape, and batch norms that mix: the source counts N = 16 times, what is seen
once, be it all the views or the one image; no gradient flows through the mixture. The preset for
classification is the first, with the batch norms of the second.

Deviations: the borders that turning, shearing and moving lay bare are mid-grey (published: the
number 128, which Pillow takes for a dark red). The variance of what is seen divides by the number
of values, as in every method here (published: by one less).
Choice: without ``normalise`` the image's smallest value stands for black, its largest for white.
Choice, segmentation, of which the paper does not speak: views that move the image do not line up
with it. So views are the operations on colours, and flips, whose predictions are flipped back.
There are 8, one at a time, which takes two passes but the memory of a single view. The entropy is
that of each pixel's average prediction, averaged over pixels. The step size is ImageNet's, 0.00025.
Larger steps pay or cost, by network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.adapters.augment import Normalisation, black_and_span, check_normalise
from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.batchnorm import mixing_network
from bestta.adapters.network import assign, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import at_least_one, not_negative, prior_strength


@dataclass(frozen=True, kw_only=True)
class MemoConfig(AdapterConfig):
    """Settings of MEMO; those that differ by task are in its presets."""

    lr: float = 5e-3
    """Size of the one step of gradient descent."""
    views: int = 32
    """How many random views of an image."""
    prior: float = 16.0
    """N: a batch norm's source statistics count so many times against those of what it sees, all
    views together or the image, which count once; infinity for the source's alone."""
    chunk: int | None = None
    """How many views go through the model at once; None for all of them. With fewer, a second pass
    replaces the memory: the gradient is the same, but that batch norms see only so many views."""
    geometric: bool = True
    """Whether views are cropped, turned, sheared and moved as well; not where each pixel counts."""
    normalise: Normalisation | None = None
    """Means and deviations that turned pixels in [0, 1] into images; None for their own range."""

    def __post_init__(self) -> None:
        not_negative(self, "lr")
        at_least_one(self, "views")
        if not isinstance(self.geometric, bool):
            raise ValueError(f"geometric is True or False, not {self.geometric!r}.")
        if self.chunk is not None:
            at_least_one(self, "chunk")
        prior_strength(self, "prior")
        check_normalise(self.normalise)


@register_adapter("memo")
class Memo(Adapter):
    """All parameters, for one step on one image, and back."""

    Config = MemoConfig
    config: MemoConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "classification": {},
        "segmentation": {"lr": 2.5e-4, "views": 8, "chunk": 1, "geometric": False},
    }

    def prepare(self) -> None:
        """Have batch norms, if there are any, mix; make copies of all parameters to step with."""
        share = 1 / (self.config.prior + 1)
        self.network = mixing_network(self.model, self.config.output, lambda n: share)
        self.weights = self.network.weights()
        self.optimiser = Optimiser.sgd(self.weights, self.config.lr)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """All parameters. Between calls they are the source's."""
        return self.weights

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Adapt to each image of the batch alone, and predict it."""
        logits, entropies = zip(*(self.adapt_and_predict(one) for one in image), strict=True)
        losses = {"marginal_entropy": sum(entropies) / len(entropies)}
        return torch.cat(logits), StepReport(adapted=True, losses=losses)

    def adapt_and_predict(self, image: Tensor) -> tuple[Tensor, float]:
        """Logits (1, K, ...) of an image (C, H, W) after a step on it, and the entropy before."""
        config = self.config
        views, flipped = views_of(
            image, config.views, self.generator, config.geometric, config.normalise
        )
        try:
            entropy, slope = self.differentiate(views, flipped)
            self.optimiser.step(slope)
            with torch.no_grad():
                return self.network(image.unsqueeze(0), self.weights), entropy
        finally:
            assign(self.weights, self.network.source)

    def differentiate(self, views: Tensor, flipped: Tensor) -> tuple[float, dict[str, Tensor]]:
        """The entropy of the average prediction of ``views`` (V, C, H, W), and its gradient.

        In chunks: ``H = −Σ p log p`` changes by ``−Σ (log p + 1) dp``, and Σ dp is 0. So the
        average p, from a first pass without gradients, is all that a view must know of the others:
        ``∇H = Σ_i ∇⟨−log p / V, p_i⟩``.
        """
        count = self.config.chunk or len(views)
        chunks = list(zip(torch.split(views, count), torch.split(flipped, count), strict=True))
        if len(chunks) == 1:
            log_p = self.log_probabilities(*chunks[0]).logsumexp(0) - math.log(len(views))
            entropy = mean_entropy(log_p)
            return entropy.item(), gradients(entropy, self.weights)
        with torch.no_grad():
            sums = (self.log_probabilities(*chunk).logsumexp(0) for chunk in chunks)
            log_p = functools.reduce(torch.logaddexp, sums) - math.log(len(views))
            factor = -log_p / (len(views) * log_p[0].numel())
        total = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        for chunk in chunks:
            part = (factor * self.log_probabilities(*chunk).exp()).sum()
            for name, slope in gradients(part, self.weights).items():
                total[name] += slope
        return mean_entropy(log_p).item(), total

    def log_probabilities(self, views: Tensor, flipped: Tensor) -> Tensor:
        """Of each view (V, K) or (V, K, H, W), pixels where they are in the image itself."""
        logits = self.network(views, self.weights)
        if logits.dim() == 4 and self.config.geometric:
            raise ValueError(
                f"the model gives logits for each pixel, {tuple(logits.shape)}, and with "
                "geometric=True the pixels of the views are not the same: set geometric=False, or "
                "make the adapter with preset='segmentation'."
            )
        if logits.dim() == 4:
            back = flipped.to(logits.device).view(-1, 1, 1, 1)
            logits = torch.where(back, logits.flip(-1), logits)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)


def mean_entropy(log_p: Tensor) -> Tensor:
    """The entropy of (K, ...) log probabilities, averaged over the pixels if there are any."""
    return -(log_p.exp() * log_p).sum(0).mean()


# --- AugMix: on images (C, H, W) in whole numbers from 0 to 255, as they come from a file --------

CHAINS, DEPTH = 3, 3
"""How many chains are mixed, and of how many operations each at most."""
PADDING = 8
"""Crops are cut out of the image with one part in so many added on each side."""
SEVERITY, SEVERITIES = 1.0, 10.0
"""The strength of an operation is drawn from [0.1, 1), on a scale that ends at 10."""


def views_of(
    image: Tensor,
    count: int,
    generator: torch.Generator,
    geometric: bool,
    normalise: Normalisation | None = None,
) -> tuple[Tensor, Tensor]:
    """Random views (V, C, H, W) of an image (C, H, W), and which of them are flipped (V,)."""
    wide = image.to(torch.promote_types(image.dtype, torch.float32))
    black, span = black_and_span(wide, normalise)
    levels = ((wide - black) / span * 255).clamp(0, 255)
    views, flips = [], []
    for _ in range(count):
        view = random_crop(levels, generator) if geometric else levels
        flips.append(_uniform(generator) < 0.5)
        views.append(augmix(view.flip(-1) if flips[-1] else view, generator, geometric))
    stacked = torch.stack(views) / 255 * span + black
    return stacked.to(image.dtype), torch.tensor(flips)


def augmix(image: Tensor, generator: torch.Generator, geometric: bool = True) -> Tensor:
    """A mixture of the image and of three chains of operations on it, by random weights."""
    operations = COLOURS + SHAPES if geometric else COLOURS
    # Dirichlet(1, 1, 1), as exponential variables over their sum; and Beta(1, 1), the uniform.
    weights = torch.empty(CHAINS).exponential_(generator=generator)
    weights = weights / weights.sum()
    kept = _uniform(generator)
    mixture = torch.zeros_like(image)
    for weight in weights.tolist():
        changed = image.round()
        for _ in range(1 + _below(DEPTH, generator)):
            operation = operations[_below(len(operations), generator)]
            strength = 0.1 + (SEVERITY - 0.1) * _uniform(generator)
            sign = 1 if _uniform(generator) < 0.5 else -1
            changed = operation(changed, strength / SEVERITIES, sign)
        mixture = mixture + weight * changed
    return kept * image + (1 - kept) * mixture


def random_crop(image: Tensor, generator: torch.Generator) -> Tensor:
    """The image padded in black, cut to its size again elsewhere."""
    height, width = image.shape[-2:]
    down, right = height // PADDING, width // PADDING
    padded = F.pad(image, (right, right, down, down))
    top, left = _below(2 * down + 1, generator), _below(2 * right + 1, generator)
    return padded[..., top : top + height, left : left + width]


def autocontrast(image: Tensor, strength: float = 0, sign: int = 1) -> Tensor:
    """Each channel stretched to the whole range."""
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    stretched = ((image - low) * 255).div((high - low).clamp(min=1), rounding_mode="floor")
    return torch.where(high > low, stretched, image)


def equalise(image: Tensor, strength: float = 0, sign: int = 1) -> Tensor:
    """Each channel with its values spread evenly: a value goes where its rank is."""
    return torch.stack([_equalise_channel(channel) for channel in image])


def _equalise_channel(channel: Tensor) -> Tensor:
    values = channel.long()
    histogram = torch.bincount(values.flatten(), minlength=256)
    # The brightest value does not count: it is where the last step leads.
    step = (values.numel() - int(histogram[values.max()])) // 255
    if step == 0:
        return channel
    below = histogram.cumsum(0) - histogram
    table = ((below + step // 2) // step).clamp(max=255)
    return table[values].to(channel.dtype)


def posterise(image: Tensor, strength: float, sign: int = 1) -> Tensor:
    """Only the highest bits of each value: 4, or fewer where strong."""
    step = float(1 << (4 + int(strength * 4)))
    return image.div(step, rounding_mode="floor") * step


def solarise(image: Tensor, strength: float, sign: int = 1) -> Tensor:
    """Values from a threshold on inverted."""
    return torch.where(image < 256 - int(strength * 256), image, 255 - image)


def rotate(image: Tensor, strength: float, sign: int) -> Tensor:
    """Turned about its centre by up to 30 whole degrees, anticlockwise if ``sign`` is 1."""
    angle = -math.radians(sign * int(strength * 30))
    height, width = image.shape[-2:]
    cos, sin = math.cos(angle), math.sin(angle)
    right = width / 2 - cos * width / 2 - sin * height / 2
    down = height / 2 + sin * width / 2 - cos * height / 2
    return warp(image, ((cos, sin, right), (-sin, cos, down)))


def shear_x(image: Tensor, strength: float, sign: int) -> Tensor:
    """Rows shifted by up to 0.3 of how far down they are."""
    return warp(image, ((1, sign * strength * 0.3, 0), (0, 1, 0)))


def shear_y(image: Tensor, strength: float, sign: int) -> Tensor:
    """Columns shifted by up to 0.3 of how far right they are."""
    return warp(image, ((1, 0, 0), (sign * strength * 0.3, 1, 0)))


def translate_x(image: Tensor, strength: float, sign: int) -> Tensor:
    """Moved to the side by whole pixels, up to a third of the width."""
    return warp(image, ((1, 0, sign * int(strength * image.shape[-1] / 3)), (0, 1, 0)))


def translate_y(image: Tensor, strength: float, sign: int) -> Tensor:
    """Moved up or down by whole pixels, up to a third of the height."""
    return warp(image, ((1, 0, 0), (0, 1, sign * int(strength * image.shape[-2] / 3))))


Operation = Callable[[Tensor, float, int], Tensor]
"""Of an image, how strong in [0, 1], and which way, 1 or −1."""
COLOURS: list[Operation] = [autocontrast, equalise, posterise, solarise]
SHAPES: list[Operation] = [rotate, shear_x, shear_y, translate_x, translate_y]


def warp(image: Tensor, rows: tuple[tuple[float, float, float], ...]) -> Tensor:
    """The image whose pixel (x, y) is that at ``rows · (x, y, 1)`` of ``image`` (C, H, W).

    Bilinear, in whole numbers, mid-grey beyond the border. x and y count from the upper left
    corner, so that the first pixel's centre is at ½.
    """
    height, width = image.shape[-2:]
    y, x = (
        torch.arange(size, dtype=image.dtype, device=image.device) + 0.5 for size in (height, width)
    )
    (a, b, c), (d, e, f) = rows
    across, along = a * x[None, :] + b * y[:, None] + c, d * x[None, :] + e * y[:, None] + f
    grid = torch.stack([across * 2 / width - 1, along * 2 / height - 1], -1)
    moved = F.grid_sample((image - 128).unsqueeze(0), grid.unsqueeze(0), align_corners=False)
    return (moved.squeeze(0) + 128).round().clamp(0, 255)


def _uniform(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator).item()


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))
