"""BESTTA: style transfer guided single-image continual adaptation (Cho et al., CVPR 2024).

One BeIN layer behind one or several named modules moves the style of each image's features to the
source style. Its γ alone are trained, on the style-guided losses of the very forward that
predicts. Where the paper leaves a choice open, the setting that decides it says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.adapters.base import (
    Adapter,
    AdapterConfig,
    StepReport,
    check_shapes,
    is_blank,
    is_finite,
    warn_caller,
)
from bestta.adapters.network import gradients
from bestta.adapters.registry import register_adapter
from bestta.adapters.schedule import (
    SCHEDULE,
    Settling,
    check_schedule,
    check_when,
    schedule_of,
    shapes,
)
from bestta.adapters.settings import (
    at_least_one,
    fraction,
    is_number,
    not_negative,
    one_of,
    within,
)
from bestta.adapters.views import (
    LOOKS,
    SMALLEST_SIDE,
    Favourite,
    agreed,
    are_scales,
    check_favourite,
    favourite_shapes,
    resized,
    unsureness,
    view_size,
)
from bestta.bein import (
    ODD_ONE,
    RECENT_FEW,
    SPREAD,
    STREAM,
    BeIN,
    GammaShape,
    Transfer,
    apply_affine,
    channel_axis,
)
from bestta.insertion import FeatureFunction, check_batch, check_ran_once, find_module, inserted
from bestta.lean import LeanModel, lean_entropy_loss
from bestta.lean.functions import only_channels_last
from bestta.losses import (
    average,
    content_loss_of_affine,
    directional_style_loss,
    entropy_loss,
    l2_loss,
    likelihood_ratio,
    source_style_loss,
    total_loss,
    worth,
)
from bestta.outputs import select_logits
from bestta.profile import Embedding, LayerProfile, SourceProfile, layer_names


@dataclass(frozen=True, kw_only=True)
class BesttaConfig(AdapterConfig):
    """Settings of BESTTA. Presets hold what differs by task, `forms` the paper's way."""

    guard: bool = True
    """On by default, unlike for the baselines, which are to be what they were published as."""

    layers: tuple[str, ...] = ()
    """Modules to put BeIN behind; by default every layer of the profile."""

    rho: float = 0.7
    """Weight of the image's own statistics. The paper's text calls it the ratio of the source
    statistics, but Eq. 7-8 make it this; the formula is followed."""

    lr: float = 0.001
    """Step size. With ``gamma="relative"`` it is in units of the source deviation. 0 holds γ
    still: each image's style is transferred all the same, without a backward pass."""
    momentum: float = 0.9
    """Of SGD; with Adam, the decay of the mean of its gradients."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """SGD as in the paper, or Adam, whose steps have one size whatever the losses weigh."""
    images_per_step: int = 1
    """1: a step after each image, as in the paper. More: the gradients of so many are added up, as
    they are predicted, for one step. No image is kept, and a step costs no more memory."""
    forgetting: float = 0.0
    """Fraction of γ that is forgotten at each step, so that only what goes on to be learned stays.
    0 as in the paper, whose L2 loss does a little of it."""
    forget_at_changes: bool = False
    """γ begins anew when a long memory of the stream's statistics does (weighed, and with a decay
    above 0.9): what was learned in one style does harm in the next."""

    lambda_style: float = 0.3
    lambda_content: float = 1.0
    lambda_entropy: float = 0.3
    lambda_l2: float = 0.04
    """λ1 … λ4 of Eq. 13. A loss whose weight is 0 is not computed."""

    certainty: Literal["entropy", "likelihood"] = "entropy"
    """What λ3 weighs: the entropy of the prediction (Eq. 12), or its likelihood ratio, which also
    learns from answers that are sure, and from these the more, the less they are like the usual
    one: see `likelihood_ratio` and `worth` in `bestta.losses`."""
    answer_decay: float = 0.998
    """Decay, an image learned from, of the moving average of answers that tells the usual one."""
    style: Literal["directional", "source"] = "directional"
    """Directional style loss (Eq. 9), or the source cosine of the classification part."""
    style_floor: float = 0.1
    """Below this length, in source deviations, the two directions of Eq. 9 count by their length
    and not as unit vectors; 0 for the plain cosine of the paper. In weather like the source's they
    are noise, and the gradient of a plain cosine grows without limit as they get shorter."""

    gamma: Literal["relative", "absolute"] = "relative"
    """Learn γ in units of σ̄_s, or absolutely as Eq. 7-8 are written. The supplement derives
    γ_σ = σ̄_s γ' itself, and σ̄_s differs by orders of magnitude between channels: with absolute γ,
    one learning rate is far too large for some channels and nothing for others."""
    gamma_shape: GammaShape = "channel"
    """One γ per channel, or one number ("two parameters" in all). The paper speaks of two
    parameters, yet takes their L2 norm."""
    gamma_bound: float | None = 0.5
    """Relative γ is kept within ± this many σ̄_s after each step; None for no bound. Absolute γ is
    never bound, as in the paper."""

    source_style: Literal["collected", "batchnorm"] = "collected"
    """(μ̄_s, σ̄_s) as collected on source images (the paper's main text), or (β, |α|) of the batch
    norm that the layer ends in (its supplement; it does not fit behind a residual sum)."""
    embedding: Embedding = "pooled"
    """What the style loss compares: channel vectors (kilobytes, any image size), or whole feature
    maps (megabytes, one size only). The content loss always compares whole maps."""
    embedding_decay: float = 0.9
    """Decay of A, the moving average of the target embeddings (not given in the paper). The
    current image enters A before it is used."""
    embedding_start: Literal["first", "source"] = "first"
    """Where A starts (not given either): at the first image, so that it is the target's from the
    beginning, or at the mean source embedding, so that it gets there slowly."""
    statistics_decay: float = 0.0
    """0: normalise by the image's own statistics, as in the paper. Above: by their moving average
    over the stream, with this decay."""
    statistics: Literal["average", "weighed"] = "average"
    """With a decay: normalise by the average itself; or, ``"weighed"``, by the best estimate that
    average, image and source make together: nearer to the image's own statistics where images of
    the stream differ more from each other than source images do and where the weather has just
    changed, and nearer to the source's the less they are away from it, so that images like the
    source's are left as they are. The average begins anew with two images that are unlike those
    before them and like each other; with a decay above 0.9, when the last few are of another style.
    The profile must know how much source images differ."""

    predict: Literal["before", "after"] = "before"
    """Return the prediction of the forward that was trained on, or of one more after the update."""

    scales: tuple[float, ...] = ()
    """Sizes, in terms of the image's own, at which images are looked at once more, mirrored. The
    answers are averaged, the surer ones counting for more. Costs a forward at each size: at half
    the size a quarter of one. None as in the paper."""
    looks: Literal["all", "surest"] = "all"
    """Look at each image at all of these sizes, or, ``"surest"``, at the one whose answers have
    been the surest lately: all are compared when the style moves, and on every ninth image."""
    trust: float = 16.0
    """How much more a surer look counts: an answer by exp(−trust · its mean entropy, in nats)."""

    when: Literal["always", "auto"] | int = "always"
    """On which images γ learns: on each, on every so-many-th, or, ``"auto"``, on none while the
    stream is settled and again at once when its style moves. BeIN follows every image in any case:
    without a backward pass the style is still transferred, by γ as it is."""
    lean: bool = True
    """Run the model so that a step costs little more time and memory than a prediction: the same
    results to rounding. False: plain autograd."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the model's convolutions and matrix products. BeIN and the losses are always in fp32."""
    entropy_stride: int = 1
    """2: the entropy of a segmentation at half its resolution, of the logits' 2x2 means; and so
    on. The prediction is not affected."""

    eps: float = 1e-5
    """Added to variances, as in instance norm, of the image and of the source alike."""
    slope_min: float = 0.1
    slope_max: float = 10.0
    """Bounds of BeIN's slope, so that it never inverts features. γ_μ acts times the slope: a
    channel that is silent in this image would otherwise blow up what little was learned."""
    reach: float | None = 10.0
    """Learn from an image only if, in most channels, its deviation is within this factor of the
    source's and its mean within this many source deviations. A blank or broken frame is predicted
    like any other and forgotten. None: learn from every image."""

    def __post_init__(self) -> None:
        layers = layer_names(self.layers if self.layers is not None else ())
        object.__setattr__(self, "layers", layers)
        if len(set(layers)) != len(layers):
            raise ValueError(f"a layer is named twice: {', '.join(layers)}.")
        one_of(self, "optimiser", "sgd", "adam")
        one_of(self, "certainty", "entropy", "likelihood")
        one_of(self, "style", "directional", "source")
        one_of(self, "gamma", "relative", "absolute")
        one_of(self, "source_style", "collected", "batchnorm")
        one_of(self, "embedding", "pooled", "map")
        one_of(self, "embedding_start", "first", "source")
        one_of(self, "statistics", "average", "weighed")
        one_of(self, "predict", "before", "after")
        one_of(self, "precision", "fp32", "bf16")
        one_of(self, "looks", "all", "surest")
        check_when(self.when)
        for name in ("lean", "forget_at_changes"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is True or False, not {getattr(self, name)!r}.")
        if not are_scales(self.scales):
            raise ValueError(
                "scales is a tuple of numbers above 0, such as (0.625,), or () for none, not "
                f"{self.scales!r}."
            )
        object.__setattr__(self, "scales", tuple(self.scales))
        at_least_one(self, "entropy_stride", "images_per_step")
        not_negative(self, "lr", "style_floor", "trust")
        not_negative(self, "lambda_style", "lambda_content", "lambda_entropy", "lambda_l2")
        within(self, 0, 1, "momentum", "embedding_decay", "statistics_decay")
        within(self, 0, 1, "answer_decay", "forgetting")
        fraction(self, "rho")
        not_negative(self, "eps", "slope_min", "slope_max")
        bound = self.gamma_bound
        if bound is not None and not (is_number(bound) and bound > 0):
            raise ValueError(f"gamma_bound must be positive or None, not {self.gamma_bound!r}.")
        if self.reach is not None and not (is_number(self.reach) and self.reach > 1):
            raise ValueError(f"reach must be above 1 or None, not {self.reach!r}.")

    @property
    def weights(self) -> dict[str, float]:
        """λ of each loss that is computed."""
        every = {
            "style": self.lambda_style,
            "content": self.lambda_content,
            "entropy": self.lambda_entropy,
            "l2": self.lambda_l2,
        }
        return {name: weight for name, weight in every.items() if weight > 0}


SUM, ADAM = ("step/gradient", "step/images"), ("step/square", "step/steps")
ANSWER = "step/answer"
LOOKS_WATCH = f"{LOOKS}style/"
GATHERED = (*SUM, *ADAM, ANSWER)
"""What a step may depend on beside γ and its velocity: the sum of the gradients since the last one,
of all γ in a row, (P,), and of how many images it is, (); Adam's mean square of gradients, (P,),
and of how many steps it is, (); the usual answer, (K,). Missing where it is not kept or has not
begun."""

PAPER: Mapping[str, Mapping[str, Any]] = {
    "segmentation": {
        "rho": 0.7,
        "lr": 0.001,
        "momentum": 0.9,
        "style": "directional",
        "lambda_style": 0.3,
        "lambda_content": 1.0,
        "lambda_entropy": 0.3,
        "lambda_l2": 0.04,
    },
    "classification": {
        "rho": 0.9,
        "lr": 0.1,
        # Choice: the paper gives a momentum for segmentation only.
        "momentum": 0.0,
        "style": "source",
        "lambda_style": 1.0,
        "lambda_content": 0.0,
        "lambda_entropy": 1.0,
        "lambda_l2": 0.0,
    },
}
"""The paper's figures: its section 4.1 and the supplement's section C."""

AS_WRITTEN: Mapping[str, Any] = {
    "gamma": "absolute",
    "gamma_bound": None,
    "style_floor": 0.0,
    "slope_min": 1e-6,
    "slope_max": 1e6,
    "reach": None,
    "guard": False,
}
"""Eq. 6-13 without what we added to them."""

SINGLE: Mapping[str, Mapping[str, Any]] = {
    "segmentation": PAPER["segmentation"],
    # Choice: at the paper's learning rate the entropy of single images drives γ to any bound there
    # is; from about 0.1 on, the classifiers tried collapsed.
    "classification": {**PAPER["classification"], "gamma_bound": 0.02},
}
"""The paper's figures with relative, bounded γ and the guard: each image by its own statistics, and
learned from."""

OURS: Mapping[str, Mapping[str, Any]] = {
    "segmentation": {
        **SINGLE["segmentation"],
        "rho": 0.6,
        "statistics": "weighed",
        "statistics_decay": 0.9,
        "when": "auto",
        "scales": (0.625, 1.25),
        "looks": "surest",
    },
    "classification": {
        **SINGLE["classification"],
        "rho": 1.0,
        "statistics": "weighed",
        "statistics_decay": 0.998,
        # One image of one class teaches little: half of them are learned from, 32 in a step.
        "when": 2,
        "images_per_step": 32,
        "optimiser": "adam",
        "lr": 0.002,
        "momentum": 0.9,
        "forgetting": 0.01,
        "forget_at_changes": True,
        "certainty": "likelihood",
        "lambda_style": 0.0,
        "gamma_bound": 0.5,
    },
}
"""What did best on training images, in weather and corruptions that no table reports; one set a
task. In segmentation the paper's figures but for ρ, weighed statistics of the stream, relative and
bounded γ, a second look, and learning only while the style moves: on every image, γ drifts over
thousands of them.
In classification γ learns all the time, from many images at once, and forgets."""


@register_adapter("bestta")
class Bestta(Adapter):
    """BeIN behind the chosen layers, whose γ learn from the images as they are predicted."""

    Config = BesttaConfig
    config: BesttaConfig
    profile: SourceProfile
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = OURS
    forms: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
        "paper": {task: {**AS_WRITTEN, **figures} for task, figures in PAPER.items()},
        "single": SINGLE,
    }
    needs_profile = True
    has_still = True
    state_settings = ("layers", "gamma", "gamma_shape", "source_style", "embedding")

    # --- prepare --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Build a BeIN for each layer from its source style."""
        if not self.profile.layers:
            raise ValueError(
                "this profile was prepared for another method and holds no layers: collect one "
                "with bestta.SourceProfile.collect(model, images, layers=[…])."
            )
        chosen = self.profile.select(self.config.layers or self.profile.layers)
        layers = {name: layer for name, layer in self.profile.layers.items() if name in chosen}
        self.config = replace(self.config, layers=tuple(layers))
        self.bein = {name: self._build(name, layer) for name, layer in layers.items()}
        self.source_embedding = {
            name: layer.embedding(self.config.embedding).to(torch.float32).to(self.device)
            for name, layer in layers.items()
        }
        # One source deviation in every channel, and at every position of a map, has this length.
        self.floor = {
            name: self.config.style_floor
            * float(bein.sigma_s.norm())
            * (self.source_embedding[name].numel() / bein.channels) ** 0.5
            for name, bein in self.bein.items()
        }
        self.target_embedding: dict[str, Tensor] = {}
        self.lean: LeanModel | None = None
        if self.config.lean:
            self.lean = LeanModel(self.model, tuple(layers))
        self.scales = self.config.scales
        # Sizes of views that the model takes, by the image's and the scale: no part of the state.
        self.view_sizes: dict[tuple[int, int, float], list[tuple[int, int]]] = {}
        self.schedule = schedule_of(self.config.when)
        several = len(self.scales) > 1 and self.config.looks == "surest"
        self.favourite = Favourite(self.scales) if several else None
        # What tells the favourite that the style has moved: one and the same watch where γ has one.
        own = self.schedule if isinstance(self.schedule, Settling) else Settling(LOOKS_WATCH)
        self.watch = own if several else None
        self.velocity = {name: torch.zeros_like(p) for name, p in self.trainable.items()}
        self.gathered: dict[str, Tensor] = {}

    def _build(self, name: str, layer: LayerProfile) -> BeIN:
        config = self.config
        module = find_module(self.model, name)
        if config.source_style == "batchnorm":
            mu_s, sigma_s = batchnorm_style(module, name, channels=layer.mu.numel())
        else:
            mu_s, sigma_s = layer.mu, layer.sigma
        weighed = config.statistics == "weighed" and config.statistics_decay > 0
        if weighed and layer.spread is None:
            raise ValueError(
                f"statistics='weighed' needs to know how much source images differ at {name!r}; "
                "this profile was collected before that was kept. Collect it anew."
            )
        return BeIN(
            mu_s.float(),
            # σ_x has eps in it, so σ̄_s must: a channel silent in both then keeps its scale.
            (sigma_s.double() ** 2 + config.eps).sqrt().float(),
            config.rho,
            gamma_shape=config.gamma_shape,
            relative=config.gamma == "relative",
            statistics_decay=config.statistics_decay,
            spread=layer.spread if weighed else None,
            eps=config.eps,
            slope_min=config.slope_min,
            slope_max=config.slope_max,
            channel_dim=layer.channel_dim,
        ).to(self.device)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """γ_μ and γ_σ of each BeIN, by layer."""
        return {
            f"{name}/{key}": parameter
            for name, bein in self.bein.items()
            for key, parameter in bein.named_parameters()
        }

    # --- step -----------------------------------------------------------------------------

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """One image: forward through BeIN, losses, one step on γ, or a part of one."""
        if self.lean is None:
            return self.one_step(image)
        before, drawn = self.snapshot(), torch.get_rng_state()
        try:
            return self.one_step(image)
        except RuntimeError as error:
            # Perhaps something that only plain autograd can do; if not, it raises there as well.
            self.restore(before)
            torch.set_rng_state(drawn)
            lean, self.lean = self.lean, None
            try:
                done = self.one_step(image)
            except BaseException:
                self.lean = lean
                raise
            warn_caller(
                f"{type(self.model).__name__} does not run lean, and this adapter goes on with "
                "plain autograd (lean=False says so from the start). "
                + str(error).partition("\n")[0]
            )
            return done

    def one_step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """The step itself, by whichever way the model is run."""
        learning = self.config.lr > 0 and bool(self.config.weights) and not self.holding
        logits, passes = self.forward(image, learning)
        far = self.out_of_reach(passes)
        if self.config.reach is not None and is_blank(image):
            far = "out of reach: every pixel of the image is the same"
        if far:
            return logits, StepReport.undone(far)
        if learning and self.config.forget_at_changes and self.style_moved():
            self.unlearn()
            self.forgot = True
            return logits, StepReport(reason="γ begins anew: the style of the stream has changed")
        first = next(iter(passes))
        done = passes[first].done
        style = self.bein[first].style(done.mean, done.variance)
        self.schedule.seen(style)
        if self.watch is not None and self.watch is not self.schedule:
            self.watch.seen(style)
        if not learning:
            why = "by the guard" if self.holding else "no learning rate or no loss"
            return logits, StepReport(reason=f"γ is held still: {why}")
        if not all(through.learns for through in passes.values()):
            if "style" in self.config.weights and self.config.style == "directional":
                for name in self.bein:
                    self.check_embedding(name, passes[name].unadapted)
                    self.track(name, passes[name].unadapted)
            return logits, StepReport(reason=self.schedule.reason)

        losses = self.losses(logits, passes)
        total = total_loss(losses, self.config.weights)
        numbers = torch.stack([*losses.values(), total]).tolist()
        values = dict(zip((*losses, "total"), numbers, strict=True))
        if not is_finite(total):
            return logits, StepReport.undone("the loss is not finite", values)
        slopes = gradients(total, self.trainable)
        if not is_finite(*slopes.values()):
            return logits, StepReport.undone("the gradient is not finite", values)
        gathered, images = self.collect(slopes, len(image))
        if images < self.config.images_per_step:
            reason = (
                f"collecting: {images} of {self.config.images_per_step} images until the next step"
            )
            return logits, StepReport(losses=values, reason=reason)
        self.update(gathered)
        if self.config.predict == "after":
            # The second forward sees the stream's statistics as the first one did.
            self.restyle(passes)
            with torch.no_grad():
                logits, _ = self.forward(image, learning=False)
        return logits, StepReport(adapted=True, losses=values, learned_from=images)

    def forward(self, image: Tensor, learning: bool = True) -> tuple[Tensor, dict[str, Pass]]:
        """The model with BeIN in it: its logits, and what went through each BeIN.

        Whether this image is one to learn from is decided at the first BeIN, by its style there:
        nothing before it needs a graph, and if not, nothing behind it does either.
        """
        statistics = {name: bein.remembered() for name, bein in self.bein.items()}
        passes: dict[str, Pass] = {}
        learns = False
        whole_maps = self.config.embedding == "map"

        def through(name: str) -> FeatureFunction:
            def put(x: Tensor) -> Tensor:
                nonlocal learns
                check_batch(x, image, name)
                bein = self.bein[name]
                found = bein.moments(x)
                if not passes:
                    learns = learning and self.schedule.due(bein.style(*found))
                with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                    y, done = bein.transfer(x, found)
                passes[name] = Pass(done, x if whole_maps else None, statistics[name], learns)
                # Without the entropy no loss looks behind the last BeIN: the graph ends there.
                last = len(passes) == len(self.bein)
                return y.detach() if last and not self.config.lambda_entropy else y

            return put

        def run(pixels: Tensor) -> Tensor:
            self.restyle(passes)
            passes.clear()
            functions = {name: through(name) for name in self.bein}
            with inserted(self.model, functions) as runs, self.precision():
                output = self.model(pixels)
            check_ran_once(runs, self.bein, self.model)
            return select_logits(output, self.config.output)

        if self.lean is None:
            logits = run(image)
        else:
            logits = self.lean(image, run)
            if not self.lean.owner_channels_last:
                logits = logits.contiguous()
        return logits if self.config.precision == "fp32" else logits.float(), passes

    # --- second looks ---------------------------------------------------------------------

    def answered(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """A step, and second looks at an image that BeIN has answered; nothing is learned there.

        They see what the first one saw: γ as it was before the step, or none where the step was
        undone, and the stream as it was before this image, whose place they take.
        """
        if not self.scales:
            return super().answered(image)
        before, moved_before = self.whole_state(), self.since_moved()
        prediction, report = super().answered(image)
        if self.favourite is not None and self.since_moved() < moved_before:
            self.favourite.begin_anew()
        if report.skipped:
            return prediction, report
        chosen = [*range(len(self.scales))]
        if self.favourite is not None:
            # Of a step that was undone nothing remains, nor would a comparison.
            undone = report.rolled_back
            chosen = [self.favourite.best()] if undone else self.favourite.chosen()
        left = before
        try:
            now = self.whole_state()
            self.restore_whole(before)
            if report.rolled_back:
                self.unlearn()
            elif self.config.predict == "after":
                self.relearn(now)
            prediction, unsure = self.look_again(image, prediction, chosen)
            left = now
        finally:
            self.restore_whole(left)
        if self.favourite is not None and not report.rolled_back:
            self.favourite.seen(unsure, len(chosen) == len(self.scales))
        return prediction, report

    def since_moved(self) -> int:
        """Which image the last one was of those since the style last moved, from 1."""
        return 1 if self.watch is None else self.watch.since_moved

    @torch.no_grad()
    def look_again(
        self, image: Tensor, prediction: Tensor, chosen: Sequence[int]
    ) -> tuple[Tensor, dict[int, float]]:
        """What the prediction and those of the image in other sizes, mirrored, come to together.

        Args:
            image: (B, C, H, W).
            prediction: Of the image as it is.
            chosen: Which of the sizes, by number.

        Returns:
            The logits, and how unsure each size's answer was, on average over the images.
        """
        answers, unsure = [prediction], [unsureness(prediction)]
        found = {}
        for which in chosen:
            answer = self.second_look(image, self.scales[which])
            if answer is not None and answer.dim() == 4:
                answer = resized(answer.flip(-1), (prediction.shape[2], prediction.shape[3]))
            if answer is not None and is_finite(answer):
                answers.append(answer)
                unsure.append(unsureness(answer))
                found[which] = float(unsure[-1].mean())
        return agreed(answers, self.config.trust, unsure), found

    def second_look(self, image: Tensor, scale: float) -> Tensor | None:
        """The logits of the image at another size, mirrored; None if the model takes none such."""
        key = (image.shape[2], image.shape[3], scale)
        # One that halves its input, and adds up what came of it, may need multiples of 32.
        tried = [view_size(image, scale), view_size(image, scale, SMALLEST_SIDE)]
        sizes = self.view_sizes.get(key, tried)
        for size in sizes:
            try:
                view = resized(image, size, smoothly=True).flip(-1)
                if only_channels_last(image):  # then answers of both lie in memory alike
                    view = view.contiguous(memory_format=torch.channels_last)
                answer = self.glimpse(view)
            except Exception as error:
                failed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if isinstance(error, torch.OutOfMemoryError):
                    return None  # of this moment, not of the model
            else:
                self.view_sizes[key] = [size]
                return answer
        if sizes is tried:
            self.view_sizes[key] = []
            warn_caller(
                f"{type(self.model).__name__} fails on views of {' and '.join(map(str, tried))} "
                f"pixels of an image of {key[:2]}, and this adapter goes on without them "
                f"(scales=() says so from the start). {failed}"
            )
        return None

    def glimpse(self, view: Tensor) -> Tensor:
        """The logits of a view; what is known of the stream stays as it is."""
        before = {name: bein.remembered() for name, bein in self.bein.items()}

        def asked() -> Tensor:
            try:
                return self.forward(view, learning=False)[0]
            finally:
                for name, statistics in before.items():
                    self.bein[name].remember(statistics)

        lean = self.lean
        try:
            return asked()
        except RuntimeError:
            if lean is None:
                raise
            self.lean = None  # perhaps it is too small to run so as it is, and its view is not
            try:
                return asked()
            finally:
                self.lean = lean

    def precision(self) -> AbstractContextManager[Any]:
        """Lower precision while the context lasts, if asked for; else as it is."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def restyle(self, passes: Mapping[str, Pass]) -> None:
        """Put the stream's statistics back to what they were before a forward."""
        for name, through in passes.items():
            self.bein[name].remember(through.before)

    def out_of_reach(self, passes: Mapping[str, Pass]) -> str:
        """Why these features are too far from the source to learn from; empty if they are not.

        Measured at the first BeIN, where features are the image's alone: behind it they hold what
        was learned as well, and a stream that judged them could lock itself out.
        """
        reach = self.config.reach
        name = next(iter(passes))
        bein, done = self.bein[name], passes[name].done
        live = bein.sigma_s**2 > 2 * bein.eps  # channels silent in the source say nothing
        if reach is None or not bool(live.any()):
            return ""
        contrast = ((done.variance + bein.eps).sqrt() / bein.sigma_s)[:, live].median(1).values
        shift = ((done.mean - bein.mu_s).abs() / bein.sigma_s)[:, live].median(1).values
        for ratio, away in torch.stack([contrast, shift], 1).tolist():
            if not (1 / reach <= ratio <= reach and away <= reach):
                return (
                    f"out of reach: at {name!r} the image's deviation is {ratio:.3g} times the "
                    f"source's and its mean {away:.3g} source deviations away (medians over the "
                    f"channels; reach={reach})"
                )
        return ""

    def losses(self, logits: Tensor, passes: Mapping[str, Pass]) -> dict[str, Tensor]:
        """Each loss that has a weight, from one forward."""
        weights = self.config.weights
        losses = {}
        if "style" in weights:
            losses["style"] = average(self.style_loss(name, passes[name]) for name in self.bein)
        if "content" in weights:
            losses["content"] = average(
                content_loss_of_affine(p.done.mean, p.done.variance, p.done.slope, p.done.offset)
                for p in passes.values()
            )
        if "entropy" in weights:
            losses["entropy"] = self.entropy(logits)
        if "l2" in weights:
            losses["l2"] = average(l2_loss(b.gamma_mu, b.gamma_sigma) for b in self.bein.values())
        return losses

    def entropy(self, logits: Tensor) -> Tensor:
        """Eq. 12 or what stands in its place, at the resolution that was asked for."""
        stride = self.config.entropy_stride
        if logits.dim() == 4 and stride > 1:
            logits = F.avg_pool2d(logits, stride, ceil_mode=True, count_include_pad=False)
        if self.config.certainty == "likelihood":
            return (worth(logits, self.usual_answer(logits)) * likelihood_ratio(logits)).mean()
        if logits.dim() == 4 and self.lean:
            return lean_entropy_loss(logits, channels_last=logits is self.lean.enlarged())
        return entropy_loss(logits)

    @torch.no_grad()
    def usual_answer(self, logits: Tensor) -> Tensor:
        """The moving average of the answers before this one, (K,), which then is taken into it."""
        p = logits.detach().float().softmax(1)
        now = p.mean((0, *range(2, p.dim())))
        before = self.gathered.get(ANSWER, torch.full_like(now, 1 / len(now)))
        self.gathered[ANSWER] = now.lerp(before, self.config.answer_decay ** len(p))
        return before

    def style_loss(self, name: str, through: Pass) -> Tensor:
        """The style loss at one layer; the directional one first takes the image into A."""
        unadapted, adapted = through.embeddings(self.bein[name].channel_dim)
        self.check_embedding(name, unadapted)
        source = self.source_embedding[name]
        if self.config.style == "source":
            return source_style_loss(source, adapted)
        average_so_far = self.track(name, unadapted)
        return directional_style_loss(
            source, average_so_far, adapted, unadapted, floor=self.floor[name]
        )

    def check_embedding(self, name: str, unadapted: Tensor) -> None:
        """Raise a ValueError unless E(x), (B, ...), is of the size of the source's."""
        source = self.source_embedding[name]
        if unadapted.shape[1:] != source.shape:
            raise ValueError(
                f"embedding='map' keeps whole maps of one size: the profile's at {name!r} is "
                f"{tuple(source.shape)}, this image gives {tuple(unadapted.shape[1:])}. Use images "
                "of the size the profile was collected from, or embedding='pooled' for any size."
            )

    def track(self, name: str, unadapted: Tensor) -> Tensor:
        """Take E(x) into A, the moving average of the target embeddings, and return A."""
        current = unadapted.detach().float().mean(0)
        start = current if self.config.embedding_start == "first" else self.source_embedding[name]
        so_far = self.target_embedding.get(name, start)
        self.target_embedding[name] = current.lerp(so_far, self.config.embedding_decay)
        return self.target_embedding[name]

    @torch.no_grad()
    def collect(
        self, slopes: Mapping[str, Tensor], images: int
    ) -> tuple[Mapping[str, Tensor], int]:
        """The mean gradient of these images and those gathered before, and how many they are.

        If they are not enough for a step they stay gathered, and there is no gradient yet.
        """
        wanted = self.config.images_per_step
        if wanted == 1:
            return slopes, images
        so_far, count = (self.gathered.pop(name, None) for name in SUM)
        total = torch.cat([slope.flatten() for slope in slopes.values()]) * images
        if so_far is not None and count is not None:
            total, images = total + so_far, images + int(count)
        if images < wanted:
            self.gathered |= zip(SUM, (total, torch.tensor(images)), strict=True)
            return {}, images
        return self._apart(total / images), images

    @torch.no_grad()
    def update(self, slopes: Mapping[str, Tensor]) -> None:
        """One step on γ, of which a part is forgotten; relative γ stays within its bound."""
        config = self.config
        bound = config.gamma_bound if config.gamma == "relative" else None
        steps = self.adam(slopes) if config.optimiser == "adam" else self.sgd(slopes)
        for name, parameter in self.trainable.items():
            parameter.sub_(config.lr * steps[name])
            if config.forgetting:
                parameter.mul_(1 - config.forgetting)
            if bound is not None:
                parameter.clamp_(-bound, bound)

    def sgd(self, slopes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The direction of SGD with momentum."""
        for name, velocity in self.velocity.items():
            velocity.mul_(self.config.momentum).add_(slopes[name])
        return self.velocity

    def adam(self, slopes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The direction of Adam (Kingma and Ba, 2015): the mean gradient over its mean size."""
        momentum, memory = self.config.momentum, 0.999
        if ADAM[0] not in self.gathered:  # a velocity of SGD's, from a state of before
            for velocity in self.velocity.values():
                velocity.zero_()
        for name, velocity in self.velocity.items():
            velocity.lerp_(slopes[name], 1 - momentum)
        now = torch.cat([slope.flatten() for slope in slopes.values()]) ** 2
        so_far, before = (self.gathered.get(name) for name in ADAM)
        square = (torch.zeros_like(now) if so_far is None else so_far).lerp(now, 1 - memory)
        steps = 1 if before is None else int(before) + 1
        self.gathered |= zip(ADAM, (square, torch.tensor(steps)), strict=True)
        # Both began at zero, which a mean of few still remembers.
        sizes = self._apart((square / (1 - memory**steps)).sqrt() + 1e-8)
        return {n: v / (1 - momentum**steps) / sizes[n] for n, v in self.velocity.items()}

    def _apart(self, joined: Tensor) -> dict[str, Tensor]:
        """Numbers of all γ in one row, (P,), as one tensor each."""
        parameters = self.trainable
        parts = torch.split(joined, [p.numel() for p in parameters.values()])
        pairs = zip(parameters.items(), parts, strict=True)
        return {name: part.view_as(p) for (name, p), part in pairs}

    # --- what the guard asks --------------------------------------------------------------

    @property
    def leaves_home_alone(self) -> bool:
        """Whether images like the source's stay as they are: where statistics are weighed."""
        return self.config.statistics == "weighed" and self.config.statistics_decay > 0

    def style_moved(self) -> bool:
        """Whether a layer's memory has begun anew now, and those of a quarter of them lately.

        A single one does so by chance now and then.
        """
        layers = self.bein.values()
        if not any(bein.began_anew for bein in layers):
            return False
        return 4 * sum(bein.is_young for bein in layers) >= len(layers)

    @torch.no_grad()
    def unlearn(self) -> None:
        """γ back to 0; what is only known of the stream stays: statistics, A, the usual answer."""
        for tensor in (*self.trainable.values(), *self.velocity.values()):
            tensor.zero_()
        self.gathered = {n: t for n, t in self.gathered.items() if n == ANSWER}

    @torch.no_grad()
    def relearn(self, state: Mapping[str, Tensor]) -> None:
        """γ and all that its next step depends on as they were."""
        for name, parameter in self.trainable.items():
            parameter.copy_(state[name])
            self.velocity[name].copy_(state[f"{name}/velocity"])
        self.gathered = {n: state[n].to(self.device, copy=True) for n in GATHERED if n in state}

    def learned_size(self) -> float:
        """The root mean square of γ, in source deviations, at the layer where it is largest."""
        return max(
            float(((g if bein.relative else g / bein.sigma_s) ** 2).mean().sqrt())
            for bein in self.bein.values()
            for g in (bein.gamma_mu.detach(), bein.gamma_sigma.detach())
        )

    def predict_unlearned(self, image: Tensor) -> Tensor | None:
        """The logits with γ = 0, and nothing of it kept; None if γ is 0."""
        if not any(bool(parameter.any()) for parameter in self.trainable.values()):
            return None
        before = self.snapshot()
        try:
            self.unlearn()
            with torch.no_grad():
                return self.forward(image, learning=False)[0]
        except RuntimeError:
            return None  # the step, which comes next, says what is wrong, or falls back
        finally:
            self.restore(before)

    # --- state ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """γ and its velocity, and once begun A, the stream's statistics and what is gathered."""
        return {name: tensor.clone() for name, tensor in self.snapshot().items()}

    def snapshot(self) -> dict[str, Tensor]:
        """The state; what a step puts another tensor in the place of is not copied."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            state[name] = parameter.detach().clone()
            state[f"{name}/velocity"] = self.velocity[name].clone()
        for name, bein in self.bein.items():
            kept = {
                **bein.remembered(),
                "target_embedding": self.target_embedding.get(name),
            }
            state.update({f"{name}/{k}": v for k, v in kept.items() if v is not None})
        watch = {} if self.watch is None else self.watch.state()
        looks = {} if self.favourite is None else self.favourite.state()
        return {**state, **self.gathered, **self.schedule.state(), **watch, **looks}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state of the same layers and widths."""
        self.relearn(state)
        for name, bein in self.bein.items():
            saved = {key: state.get(f"{name}/{key}") for key in STREAM}
            bein.remember(
                {k: None if v is None else v.to(self.device, copy=True) for k, v in saved.items()}
            )
        self.target_embedding = {
            name: state[f"{name}/target_embedding"].to(self.device, copy=True)
            for name in self.bein
            if f"{name}/target_embedding" in state
        }
        self.schedule.restore(state, self.device)
        if self.watch is not None and self.watch is not self.schedule:
            self.watch.restore(state, self.device)
        if self.favourite is not None:
            self.favourite.restore(state)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ValueError unless names and shapes fit, and every number is finite."""
        super().check_state(state)
        needed = {n: p.shape for n, p in self.trainable.items()}
        needed |= {f"{n}/velocity": p.shape for n, p in self.trainable.items()}
        optional = {
            f"{n}/{key}": torch.Size() if key == "seen" else b.mu_s.shape
            for n, b in self.bein.items()
            for key in STREAM
        }
        optional |= {f"{n}/target_embedding": e.shape for n, e in self.source_embedding.items()}
        every = torch.Size([sum(p.numel() for p in self.trainable.values())])
        for numbers, count in (SUM, ADAM):
            optional |= {numbers: every, count: torch.Size()}
        if ANSWER in state:  # of as many classes as the model has, if that is known
            home = self.profile.answers
            shape = state[ANSWER].flatten().shape
            optional[ANSWER] = shape if home is None else home.histogram.shape
        channels = next(iter(self.bein.values())).channels
        for prefix in (SCHEDULE, LOOKS_WATCH):
            optional |= {n: torch.Size(shape) for n, shape in shapes(channels, prefix).items()}
        optional |= favourite_shapes(state)
        check_shapes(state, needed, optional)
        check_schedule(state, SCHEDULE)
        check_schedule(state, LOOKS_WATCH)
        check_favourite(state)
        for numbers, count in (SUM, ADAM):
            both = {numbers, count} <= state.keys() and bool(state[count] >= 1)
            if not both and {numbers, count} & state.keys():
                raise ValueError(f"this state is damaged: {numbers} of no image or step.")
        for name in (ADAM[0], ANSWER):
            if name in state and bool((state[name] < 0).any()):
                raise ValueError(f"this state is damaged: {name} is negative.")
        for name in self.bein:
            kept = {key: v for key in STREAM if (v := state.get(f"{name}/{key}")) is not None}
            weighed = {"mu_x", "sigma_x", *SPREAD}
            whole = [set(), {"mu_x", "sigma_x"}, weighed]
            whole += [{*weighed, *RECENT_FEW}, {*weighed, *ODD_ONE}]
            positive = [v for key, v in kept.items() if key not in ("mu_x", "mu_recent", "mu_odd")]
            if set(kept) not in whole or any(value.min() < 0 for value in positive):
                raise ValueError(f"this state is damaged: the stream's statistics at {name!r}.")


@dataclass(frozen=True)
class Pass:
    """What one forward left behind at one BeIN."""

    done: Transfer
    features: Tensor | None
    """The whole input map, if the embeddings are whole maps."""
    before: dict[str, Tensor | None]
    """The stream's statistics before this image."""
    learns: bool
    """Whether the image is one to learn from."""

    @property
    def unadapted(self) -> Tensor:
        """E(x), (B, ...)."""
        return self.done.mean if self.features is None else self.features

    def embeddings(self, channel_dim: int | None) -> tuple[Tensor, Tensor]:
        """E(x) and E'(x), (B, ...): BeIN's input and output, pooled or as whole maps."""
        x, done = self.features, self.done
        if x is None:
            return done.mean, done.adapted_mean
        # Made anew: the model may have changed the map it was given in place.
        return x, apply_affine(x, done.slope, done.offset, channel_axis(x, channel_dim))


def batchnorm_style(module: nn.Module, name: str, channels: int) -> tuple[Tensor, Tensor]:
    """(β, |α|) of the batch norm that ``module`` is or ends in: the supplement's source style."""
    last = module
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if not isinstance(last, nn.modules.batchnorm._BatchNorm):
        raise ValueError(
            f"source_style='batchnorm' needs a layer that ends in a batch norm; {name!r} "
            f"({type(module).__name__}) ends in {type(last).__name__}. Name the batch norm "
            "itself, or use source_style='collected'."
        )
    if last.num_features != channels:
        raise ValueError(
            f"the profile holds {channels} channels at {name!r}; "
            f"its batch norm has {last.num_features}."
        )
    if last.weight is None or last.bias is None:
        return torch.zeros(channels), torch.ones(channels)
    return last.bias.detach().float(), last.weight.detach().float().abs()
