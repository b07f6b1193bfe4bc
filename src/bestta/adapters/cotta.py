"""CoTTA: learn from an averaged teacher, and forget a little at every step (Wang et al., 2022).

Wang, Fink, Van Gool and Dai, "Continual Test-Time Domain Adaptation". Three networks of one shape:
a student, all of whose weights are trained; a teacher, the moving average of the student; an
anchor, the source itself. Where the anchor is unsure, the teacher is asked about many views of the
image and its answers are averaged, else about the image as it is. The student learns to say the
same, the teacher follows it, and a hundredth of the student's weights, drawn anew at each step,
goes back to the source. The prediction is the teacher's.

Classification: 32 random views, decided for the batch as a whole, logits averaged, soft targets,
batch norms that see the batch. Segmentation: seven sizes of the image, each also flipped, decided
per pixel, probabilities averaged, hard targets, batch norms of the source.

Deviations: the published programs compute, at every step, answers that are then not read.
``form="lean"`` leaves them out, with the same results to the bit; ``"published"`` is there to be
timed. They train what is called weight or bias; here every parameter is trained and restored, which
makes no difference in a convolutional network. In segmentation sizes are those of the image given,
at least 32 pixels a side, and answers are brought to the size of the answer to the image as it is.
The published segmentation makes a new optimiser at each domain change, which nobody in the field
would tell it of: see ``rebuild_optimiser``, off by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.adapters.augment import Normalisation, augment, check_normalise
from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.batchnorm import images_apart, mixing_network, share_of_batch
from bestta.adapters.network import Weights, follow, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import (
    at_least_one,
    fraction,
    not_negative,
    one_of,
    prior_strength,
    within,
)
from bestta.adapters.views import are_scales, resized, view_size
from bestta.losses import cross_entropy
from bestta.outputs import task_of

PIXELS_AT_ONCE = 2**16
"""Random views of one image go through the network together up to so many pixels: small ones are
answered in less time, and no forward needs more memory than that of an image of so many."""


@dataclass(frozen=True, kw_only=True)
class CottaConfig(AdapterConfig):
    """Settings of CoTTA: the published ones, here of classification."""

    lr: float = 1e-3
    """Step size of Adam; 7.5e-6 in segmentation."""
    beta1: float = 0.9
    beta2: float = 0.999
    """Decays of Adam's moments."""
    teacher_decay: float = 0.999
    """How much of the teacher stays at each step; the rest is the student."""
    restore_probability: float = 0.01
    """With which each number of the student goes back to the source after a step."""
    confidence: float = 0.92
    """The anchor is unsure below: on average over a batch in classification, at a pixel in
    segmentation, where it is 0.69."""
    views: Literal["augment", "scales"] = "augment"
    """What the teacher is shown where the anchor is unsure: random changes, which only
    classification can average over, or several sizes and flips, in segmentation."""
    augmentations: int = 32
    """How many random views."""
    scales: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    """Sizes relative to the image; each is shown as it is and flipped."""
    prior: float = 0.0
    """In batch norms the source's statistics count as so many images against the batch: 0 in
    classification as published, infinity for the source's alone in segmentation."""
    normalise: Normalisation | None = None
    """Mean and deviation per channel by which pixels in [0, 1] were normalised, for the random
    views; None takes the range of the batch for that of pixels."""
    form: Literal["lean", "published"] = "lean"
    """``"published"`` also computes what is never read, to be timed. Results are the same."""
    rebuild_optimiser: bool = False
    """Whether Adam's moments are forgotten at each domain change: published for segmentation, but
    somebody has to know of the changes."""

    def __post_init__(self) -> None:
        not_negative(self, "lr", "confidence")
        within(self, 0, 1, "beta1", "beta2")
        fraction(self, "teacher_decay", "restore_probability")
        one_of(self, "views", "augment", "scales")
        one_of(self, "form", "lean", "published")
        at_least_one(self, "augmentations")
        if not are_scales(self.scales) or not self.scales:
            raise ValueError(f"scales are numbers above 0, at least one, not {self.scales!r}.")
        object.__setattr__(self, "scales", tuple(self.scales))
        prior_strength(self, "prior")
        if not isinstance(self.rebuild_optimiser, bool):
            raise ValueError(f"rebuild_optimiser is True or False, not {self.rebuild_optimiser!r}.")
        check_normalise(self.normalise)


@register_adapter("cotta")
class Cotta(Adapter):
    """Student, averaged teacher and source, with many views and a little forgetting."""

    Config = CottaConfig
    config: CottaConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "classification": {
            "lr": 1e-3,
            "confidence": 0.92,
            "views": "augment",
            "prior": 0.0,
        },
        "segmentation": {
            "lr": 7.5e-6,
            "confidence": 0.69,
            "views": "scales",
            "prior": math.inf,
        },
    }

    def prepare(self) -> None:
        """Make the student and the teacher; the anchor is the network with its own weights."""
        config = self.config
        self.network = mixing_network(self.model, config.output, share_of_batch(config.prior))
        self.student = self.network.weights()
        if not self.student:
            raise ValueError(
                f"method {self.name!r} trains a model's parameters, and "
                f"{type(self.model).__name__} has none."
            )
        self.teacher = {name: weight.detach().clone() for name, weight in self.student.items()}
        self.optimiser = Optimiser.adam(self.student, config.lr, (config.beta1, config.beta2))
        self.needs_domain_changes = config.rebuild_optimiser
        self.together: bool | None = None
        """Whether the network can answer several images at once; None until it was tried."""

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The student: every parameter of the model."""
        return self.student

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Ask the teacher, teach the student, have the teacher follow, forget a little."""
        anchor = self.ask(image, None)
        self.check_task(anchor)
        of_images = anchor.dim() == 2
        target = self.image_target(image, anchor) if of_images else self.map_target(image, anchor)
        logits = self.network(image, self.student)
        losses = {"cross_entropy": disagreement(logits, target)}
        total = self.total(losses)
        slopes = gradients(total, self.student)
        self.optimiser.step(slopes)
        follow(self.teacher, self.student, self.config.teacher_decay)
        self.restore_student(slopes)
        report = {**losses, "total": total}
        return target.to(logits.dtype), StepReport(
            adapted=True, losses={name: loss.item() for name, loss in report.items()}
        )

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """What the student descends along; a method built on this one adds losses of its own."""
        return losses["cross_entropy"]

    @torch.no_grad()
    def ask(self, image: Tensor, weights: Weights | None) -> Tensor:
        """The logits under ``weights`` (None: the anchor's), in fp32 at least."""
        logits = self.network(image, weights)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    # --- classification -------------------------------------------------------------------

    @torch.no_grad()
    def image_target(self, image: Tensor, anchor: Tensor) -> Tensor:
        """The teacher's logits (B, K): of the images, or averaged over views of them."""
        sure = bool(top_probability(anchor).mean() >= self.config.confidence)
        if self.config.form == "published":
            self.compute_unread_answers(image, sure)
        return self.ask(image, self.teacher) if sure else self.average_over_augmentations(image)

    def average_over_augmentations(self, image: Tensor) -> Tensor:
        """The mean of the teacher's logits over random views."""
        count, normalise = self.config.augmentations, self.config.normalise
        # Views of several images are batches, with statistics of their own.
        at_once = max(1, PIXELS_AT_ONCE // image[0, 0].numel()) if len(image) == 1 else 1
        answers: list[Tensor] = []
        while len(answers) < count:
            some = min(at_once, count - len(answers))
            views = [augment(image, self.generator, normalise) for _ in range(some)]
            answers += self.answers_to(views)
        return torch.stack(answers).mean(0)

    def answers_to(self, views: list[Tensor]) -> list[Tensor]:
        """The teacher's logits of each view, of one image if there are several views."""
        if len(views) > 1 and self.together is not False:
            together = self.answers_together(views)
            if self.together and together:
                return together
            # The first time it is seen whether this network can tell images apart.
            apart = [self.ask(view, self.teacher) for view in views]
            self.together = all_alike(together, apart)
            return together if self.together else apart
        return [self.ask(view, self.teacher) for view in views]

    def answers_together(self, views: list[Tensor]) -> list[Tensor]:
        """The same in one forward, each view as if it came alone; none if that fails."""
        try:
            with images_apart(self.network, len(views)):
                return [*torch.split(self.ask(torch.cat(views), self.teacher), 1)]
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return []  # written for a single image, perhaps

    def compute_unread_answers(self, image: Tensor, sure: bool) -> None:
        """What the published program computes and then leaves; draws are taken back."""
        if not sure:
            self.ask(image, self.teacher)
            return
        before = self.generator.get_state()
        self.average_over_augmentations(image)
        self.generator.set_state(before)

    # --- segmentation ---------------------------------------------------------------------

    @torch.no_grad()
    def map_target(self, image: Tensor, anchor: Tensor) -> Tensor:
        """Logs of the teacher's probabilities (B, K, H, W), averaged where the anchor is unsure."""
        sure = top_probability(anchor).unsqueeze(1) > self.config.confidence
        plain = self.ask(image, self.teacher).softmax(1)
        merged = plain
        if self.config.form == "published" or not bool(sure.all()):
            average = self.average_over_scales(image, self.teacher, plain)
            merged = torch.where(sure, plain, average)
        if self.config.form == "published":
            # The published program asks the anchor about every view and reads one answer.
            self.average_over_scales(image, None, anchor.softmax(1))
        # A probability may be too small for its type; its log must not be infinite.
        return merged.clamp(min=torch.finfo(merged.dtype).tiny).log()

    def average_over_scales(self, image: Tensor, weights: Weights | None, plain: Tensor) -> Tensor:
        """The mean of the probabilities over sizes and flips.

        Args:
            image: (B, C, H, W).
            weights: Whose.
            plain: Probabilities of the image as it is, (B, K, h, w): one of the views, usually.
        """
        total = torch.zeros_like(plain)
        for scale in self.config.scales:
            for flipped in (False, True):
                if scale == 1 and not flipped:
                    total += plain
                    continue
                view = resized(image, view_size(image, scale))
                logits = self.ask_about(view.flip(-1) if flipped else view, image, weights)
                logits = resized(logits, (plain.shape[-2], plain.shape[-1]))
                total += (logits.flip(-1) if flipped else logits).softmax(1)
        return total / (2 * len(self.config.scales))

    def ask_about(self, view: Tensor, image: Tensor, weights: Weights | None) -> Tensor:
        """The logits of a view of ``image``, of another size perhaps."""
        try:
            return self.ask(view, weights)
        except (RuntimeError, ValueError, AssertionError) as error:
            if view.shape == image.shape:
                raise
            raise ValueError(
                f"{type(self.model).__name__} fails on a view of {tuple(view.shape[2:])} pixels of "
                f"an image of {tuple(image.shape[2:])} ({error}). If it takes one size only, "
                "scales=(1.0,) keeps to that."
            ) from error

    # --- memory ---------------------------------------------------------------------------

    @torch.no_grad()
    def restore_student(self, slopes: Weights) -> None:
        """Set each number of the student back to the source's with a small probability.

        Args:
            slopes: The gradients of the step; not needed here.
        """
        probability = self.config.restore_probability
        if probability == 0:
            return
        for name, weight in self.student.items():
            drawn = torch.rand(weight.shape, generator=self.generator) < probability
            self.back_to_source(name, drawn)

    def back_to_source(self, name: str, chosen: Tensor) -> None:
        """Set the chosen numbers (a mask) of one of the student's weights to the source's."""
        weight = self.student[name]
        source = self.network.source[name].to(weight.dtype)
        weight.copy_(torch.where(chosen.to(weight.device), source, weight))

    def domain_changed(self) -> None:
        """Forget Adam's moments, if that was asked for; what was learned stays."""
        if self.config.rebuild_optimiser:
            self.optimiser.forget()

    def tensors(self) -> dict[str, Tensor]:
        """Student, teacher, and Adam's moments."""
        return {
            **{f"student/{name}": weight for name, weight in self.student.items()},
            **{f"teacher/{name}": weight for name, weight in self.teacher.items()},
            **{f"optimiser/{name}": moment for name, moment in self.optimiser.tensors().items()},
        }

    def check_task(self, logits: Tensor) -> None:
        """Raise a ValueError unless the views are those of the task."""
        if logits.shape[1] == 1:
            raise ValueError(
                f"method {self.name!r} compares classes, and the logits {tuple(logits.shape)} are "
                "of one: have the model return two channels, of 0 and of the logit."
            )
        task = task_of(logits)
        fitting = self.presets[task]["views"]
        if self.config.views != fitting:
            raise ValueError(
                f"views={self.config.views!r} do not serve {task}, which the model's logits "
                f"{tuple(logits.shape)} say it does: use views={fitting!r}, or preset={task!r} "
                "for all of its settings."
            )


def disagreement(logits: Tensor, target: Tensor) -> Tensor:
    """The student's loss: cross entropy with soft targets for images, with hard ones for pixels."""
    if logits.dim() == 2:
        return cross_entropy(logits, target).mean()
    return F.cross_entropy(logits.to(target.dtype), target.argmax(1))


def all_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether answers are the same but for rounding, in half precision perhaps."""
    if [one.shape for one in some] != [other.shape for other in others]:
        return False
    one, other = torch.cat([*some]), torch.cat([*others])
    return bool((one - other).abs().max() <= 0.02 * other.abs().max())


def top_probability(logits: Tensor) -> Tensor:
    """How sure each prediction is: (B,) of (B, K), (B, H, W) of (B, K, H, W)."""
    return logits.softmax(1).amax(1)
