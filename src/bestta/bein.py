"""BeIN, the BESTTA instance normalisation (Eq. 6-8): transfer an image's style to the source style.

The three equations fold into one affine map per channel, ``BeIN(x) = a * x + b``, so
the layer costs one reduction (the statistics of ``x``) and one pass over the features::

    σ̂_t = σ_s σ_x / (ρ σ_s + (1-ρ) σ_x + γ_σ)                               Eq. 7
    μ̂_t = ρ (σ̂_t/σ_x) μ_x + (1-ρ) (σ̂_t/σ_s) μ_s + γ_μ                       Eq. 8
    BeIN(x) = σ_s (x - μ̂_t) / σ̂_t + μ_s                                     Eq. 6

    a = σ_s / σ̂_t         = ρ σ_s/σ_x + (1-ρ) + γ_σ/σ_x
    b = μ_s - a μ̂_t       = ρ (μ_s - σ_s μ_x/σ_x) - a γ_μ

With both γ at zero, ρ=0 is the identity and ρ=1 is AdaIN to the source style.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bestta.moments import instance_moments

EPS = 1e-5
"""Added to the variance of the input, as instance norm does."""

SLOPE_MIN, SLOPE_MAX = 1e-3, 1e3
"""Default bounds of the slope ``a``. σ̂_t of Eq. 7 has a pole where ``a`` crosses zero,
behind which the features are inverted; the lower bound keeps ``a`` in front of it."""

GammaShape = Literal["channel", "scalar"]
Array = Any
"""Numbers of NumPy's or of PyTorch's, which take the same operators and methods."""

SPREAD = ("mu_spread", "sigma_spread", "seen")
RECENT_FEW = ("mu_recent", "sigma_recent")
ODD_ONE = ("mu_odd", "sigma_odd")
STREAM = ("mu_x", "sigma_x", *SPREAD, *RECENT_FEW, *ODD_ONE)
"""What a layer remembers of its stream: the statistics' averages, (C,), how much single images vary
round them, (C,), and how many there were, (); where the memory is long, the averages of the last
few, (C,); where it is short, the last image if it was unlike those before it, (C,)."""

UNLIKE = 2.0
"""An image is another style's if it is, squared, so many times as far from the stream's average as
its images usually are. Channels vary together: a single image is easily a little further."""

RECENT = 0.1
"""Weight of an image in the average of the last few. Where memory is longer than that, they tell
whether the stream has gone over to another style."""

MOVED = 6.0
"""It has if they are, squared, so many times as far from the average of all as chance has it.
Channels vary together, so chance alone now and then makes that four."""


def channel_axis(x: Tensor, channel_dim: int | None = None) -> int:
    """The axis of ``x`` that holds its channels.

    Maps (B, C, H, W) have it second and token sequences (B, N, C) last; ``channel_dim``
    says otherwise, for instance ``-1`` for maps laid out as (B, H, W, C).
    """
    if not x.is_floating_point():
        raise ValueError(f"BeIN needs floating-point features, not {x.dtype}.")
    if x.dim() not in (3, 4):
        raise ValueError(
            f"BeIN works on maps (B, C, H, W) and token sequences (B, N, C); "
            f"these features have shape {tuple(x.shape)}."
        )
    if x.numel() == 0:
        raise ValueError(f"BeIN was given no features at all: shape {tuple(x.shape)}.")
    axis = (1 if x.dim() == 4 else 2) if channel_dim is None else channel_dim % x.dim()
    if axis == 0:
        raise ValueError("channel_dim=0 is the batch; the channels must lie on another axis.")
    return axis


def bein_affine(
    mu_x: Tensor,
    sigma_x: Tensor,
    mu_s: Tensor,
    sigma_s: Tensor,
    gamma_mu: Tensor,
    gamma_sigma: Tensor,
    rho: float,
    *,
    slope_min: float = SLOPE_MIN,
    slope_max: float = SLOPE_MAX,
) -> tuple[Tensor, Tensor]:
    """Slope and offset of BeIN: Eq. 6-8 folded into one affine map ``a * x + b``.

    The slope is bounded twice: what the two styles ask for (``a0``), and what γ_σ makes
    of it. The offset is built from the bounded ``a0``, so that a bound changes how far the
    features spread and never where their mean lands, ``ρ μ_s + (1-ρ) μ_x``. Within the
    bounds this is exactly the offset of Eq. 6-8.

    Args:
        mu_x, sigma_x: Per-channel statistics of the input, (B, C).
        mu_s, sigma_s: Source style, (C,).
        gamma_mu, gamma_sigma: The learned parameters, (C,), scalar, or one for each image, (B, C).
        rho: Weight of the input's own statistics, 0 to 1.
        slope_min, slope_max: Bounds of the slope.

    Returns:
        ``a`` and ``b``, both (B, C), finite for finite statistics whatever the γ are.
    """
    # Whatever happened to γ, one poisoned channel must not become a NaN in every output.
    limit = torch.finfo(mu_x.dtype).max / 8
    gamma_sigma = torch.nan_to_num(gamma_sigma, nan=0.0)
    gamma_mu = torch.nan_to_num(gamma_mu, nan=0.0)
    a0 = (rho * sigma_s / sigma_x + (1 - rho)).clamp(slope_min, slope_max)
    a = (a0 + gamma_sigma / sigma_x).clamp(slope_min, slope_max)
    b = rho * mu_s + (1 - rho - a0) * mu_x - (a * gamma_mu).clamp(-limit, limit)
    return a, b


def apply_affine(x: Tensor, a: Tensor, b: Tensor, axis: int) -> Tensor:
    """``a * x + b`` with ``a`` and ``b`` (B, C) spread over the channels of ``x``, in its dtype."""
    shape = [1] * x.dim()
    shape[0], shape[axis] = a.shape
    y = torch.addcmul(b.view(shape), a.view(shape), x)
    if y.dtype == x.dtype:
        return y
    if x.dtype == torch.float16:  # holds less than the fp32 of the map: saturate, never overflow
        largest = torch.finfo(torch.float16).max
        y = y.clamp(-largest, largest)
    return y.to(x.dtype)


@dataclass(frozen=True)
class Transfer:
    """What one pass through BeIN did, in numbers per channel: all that the losses need of it."""

    mean: Tensor
    """The input's own mean per channel, (B, C): the pooled embedding E(x)."""
    variance: Tensor
    """The input's own variance per channel, (B, C)."""
    slope: Tensor
    """``a`` of ``a * x + b``, (B, C)."""
    offset: Tensor
    """``b`` of ``a * x + b``, (B, C)."""
    mu_x: Tensor
    """The mean that was normalised with, (B, C): the image's own, or blended with the stream's."""
    sigma_x: Tensor
    """The deviation that was normalised with, (B, C)."""

    @property
    def adapted_mean(self) -> Tensor:
        """Mean per channel of the output, (B, C): the pooled embedding E'(x), for free."""
        return self.slope * self.mean + self.offset


def transfer(
    x: Tensor,
    mu_s: Tensor,
    sigma_s: Tensor,
    gamma_mu: Tensor,
    gamma_sigma: Tensor,
    rho: float,
    *,
    relative: bool = False,
    eps: float = EPS,
    slope_min: float = SLOPE_MIN,
    slope_max: float = SLOPE_MAX,
    channel_dim: int | None = None,
    found: tuple[Tensor, Tensor] | None = None,
    style: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Transfer]:
    """`bein`, and what it did.

    ``found`` are mean and variance of ``x``, (B, C), if they are known; ``style`` are the
    statistics (μ_x, σ_x), (B, C), to normalise with, if not those.
    """
    axis = channel_axis(x, channel_dim)
    mean, variance = style_of(x, mu_s, axis) if found is None else found
    mu_x, sigma_x = (mean, (variance + eps).sqrt()) if style is None else style
    if relative:
        gamma_mu, gamma_sigma = sigma_s * gamma_mu, sigma_s * gamma_sigma
    a, b = bein_affine(
        mu_x,
        sigma_x,
        mu_s,
        sigma_s,
        gamma_mu,
        gamma_sigma,
        rho,
        slope_min=slope_min,
        slope_max=slope_max,
    )
    return apply_affine(x, a, b, axis), Transfer(mean, variance, a, b, mu_x, sigma_x)


def style_of(x: Tensor, mu_s: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (B, C) of features that are to be given the style ``mu_s`` is part of."""
    if x.shape[axis] != mu_s.numel():
        raise ValueError(
            f"BeIN holds a source style of {mu_s.numel()} channels; "
            f"these features, {tuple(x.shape)}, have {x.shape[axis]} (on axis {axis})."
        )
    return instance_moments(x, axis)


def _array(values: Tensor) -> Array:
    """The same numbers, for NumPy where they are on a CPU; it does not know bf16."""
    values = values.detach()
    values = values.float() if values.dtype == torch.bfloat16 else values
    return values.numpy() if values.device.type == "cpu" else values


def _tensor(values: Array) -> Tensor:
    """The same numbers, for PyTorch."""
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def believed(found: Array, chance: Array) -> Array:
    """How much of a squared distance to believe, 0 to 1, if chance alone makes one of ``chance``.

    Images differ by what they show, and a style is what is left of that. How much statistics vary
    by what is shown is known from source images; what is found beyond it is style. It is the weight
    of the best linear estimate if the two vary independently; James and Stein's, where it is pooled
    over the channels of one image.
    """
    return (1 - chance / found.clip(1e-12, None)).clip(0, 1)


def apart_by_chance(step: float) -> float:
    """Variance of the difference of two fading averages of the same images, of variance 1 each.

    One moves by `RECENT` with every image, the other by ``step``. While the latter is still a plain
    mean of few images this is a little more than there is.
    """
    together = RECENT + step - RECENT * step
    return RECENT / (2 - RECENT) + step / (2 - step) - 2 * RECENT * step / together


def bein(
    x: Tensor,
    mu_s: Tensor,
    sigma_s: Tensor,
    gamma_mu: Tensor | float,
    gamma_sigma: Tensor | float,
    rho: float,
    *,
    relative: bool = False,
    eps: float = EPS,
    slope_min: float = SLOPE_MIN,
    slope_max: float = SLOPE_MAX,
    channel_dim: int | None = None,
) -> Tensor:
    """BeIN (Eq. 6-8) as a function: each sample of ``x`` normalised by itself.

    Args:
        x: Features, (B, C, H, W) or (B, N, C), of any floating dtype and memory format.
        mu_s, sigma_s: Source style: mean and deviation of the source features, (C,).
        gamma_mu, gamma_sigma: The learned parameters of Eq. 7-8, (C,) or scalar.
        rho: Weight of the input's own statistics: 0 is the identity, 1 is AdaIN (for γ = 0).
        relative: Read both γ in units of ``sigma_s`` instead of absolutely as in Eq. 7-8.
        eps: Added to the variance of the input.
        slope_min, slope_max: Bounds of the slope ``a``, ``0 < slope_min < 1 < slope_max``.
        channel_dim: Where the channels lie, if not where `channel_axis` expects them.

    Returns:
        The transferred features, with the shape, dtype and memory format of ``x``.

    Example:
        >>> x = torch.randn(1, 2, 8, 8) * 3 + 5                   # an unfamiliar style
        >>> y = bein(x, torch.zeros(2), torch.ones(2), 0.0, 0.0, rho=1.0)
        >>> bool(y.mean().abs() < 1e-5), bool((y.std() - 1).abs() < 1e-2)
        (True, True)
    """
    mu_s, sigma_s = check_style(mu_s, sigma_s)
    check_range(rho, slope_min, slope_max, eps)
    y, _ = transfer(
        x,
        mu_s,
        sigma_s,
        check_gamma("gamma_mu", gamma_mu, mu_s),
        check_gamma("gamma_sigma", gamma_sigma, mu_s),
        rho,
        relative=relative,
        eps=eps,
        slope_min=slope_min,
        slope_max=slope_max,
        channel_dim=channel_dim,
    )
    return y


class BeIN(nn.Module):
    """BeIN as a layer: the source style, and the two parameters γ_μ and γ_σ that are learned.

    Args:
        mu_s, sigma_s: Source style, (C,).
        rho: Weight of the input's own statistics, 0 to 1.
        gamma_shape: ``"channel"`` for γ of shape (C,), ``"scalar"`` for two numbers in all.
        relative: Learn γ in units of ``sigma_s`` instead of absolutely as in Eq. 7-8.
        statistics_decay: 0 normalises each image by its own statistics, as in the paper; above 0,
            by their exponential moving average over the stream (``mu_x``, ``sigma_x``), which
            every forward then advances.
        spread: How much the statistics of single source images vary, two variances (C,), of their
            means and of their deviations. With it the average is weighed, as far as chance cannot
            explain what is found (see `believed`): towards the image's own statistics in channels
            that vary more than these from image to image, and in all of them if the image is unlike
            those before it; and then towards the source's, if it is not far from them. γ counts as
            far as it is: what was learned in the fog is for the fog. The memory begins anew with
            two images that are unlike those before them and like each other; a memory of more than
            the last few images, when those few are of another style.
        eps, slope_min, slope_max, channel_dim: As in `bein`.
    """

    mu_s: Tensor
    sigma_s: Tensor
    mu_x: Tensor | None
    sigma_x: Tensor | None
    mu_spread: Tensor | None
    sigma_spread: Tensor | None
    seen: Tensor | None
    mu_recent: Tensor | None
    sigma_recent: Tensor | None
    mu_odd: Tensor | None
    sigma_odd: Tensor | None
    home: Tensor
    spread: Tensor | None
    unit: Tensor

    def __init__(
        self,
        mu_s: Tensor,
        sigma_s: Tensor,
        rho: float = 0.7,
        *,
        gamma_shape: GammaShape = "channel",
        relative: bool = False,
        statistics_decay: float = 0.0,
        spread: tuple[Tensor, Tensor] | None = None,
        eps: float = EPS,
        slope_min: float = SLOPE_MIN,
        slope_max: float = SLOPE_MAX,
        channel_dim: int | None = None,
    ) -> None:
        super().__init__()
        mu_s, sigma_s = check_style(mu_s, sigma_s)
        check_range(rho, slope_min, slope_max, eps)
        if gamma_shape not in ("channel", "scalar"):
            raise ValueError(f"gamma_shape is 'channel' or 'scalar', not {gamma_shape!r}.")
        if not 0 <= statistics_decay < 1:
            raise ValueError(f"statistics_decay must lie in [0, 1), not {statistics_decay}.")
        self.rho = rho
        self.relative = relative
        self.statistics_decay = statistics_decay
        self.eps, self.slope_min, self.slope_max = eps, slope_min, slope_max
        self.channel_dim = channel_dim
        self.began_anew = False
        """Whether a long memory has done so with the last images."""
        self._pairs: dict[str, tuple[Tensor, Tensor, Array]] = {}
        self._arrays: tuple[Tensor, Array, Array, Array | None] | None = None
        self.register_buffer("mu_s", mu_s.detach().clone())
        self.register_buffer("sigma_s", sigma_s.detach().clone())
        # Not saved with the layer: like ρ, it is how it was built.
        both = None if spread is None else torch.stack(check_spread(spread, mu_s))
        self.register_buffer("spread", both, persistent=False)
        self._derive()
        for name in STREAM:
            self.register_buffer(name, None)
        start = torch.zeros_like(mu_s) if gamma_shape == "channel" else mu_s.new_zeros(())
        self.gamma_mu = nn.Parameter(start.detach().clone())
        self.gamma_sigma = nn.Parameter(start.detach().clone())

    @torch.inference_mode(False)
    def _derive(self) -> None:
        """What every image needs of the source: its style in one, (2, C), and 1 / σ̄_s², (C,)."""
        live = self.sigma_s**2 > 2 * self.eps  # a channel that is silent at home has no unit
        for name, value in (
            ("home", torch.stack([self.mu_s, self.sigma_s])),
            ("unit", torch.where(live, self.sigma_s**-2, 0.0)),
        ):
            self.register_buffer(name, value, persistent=False)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each channel of each sample of ``x``, (B, C)."""
        return style_of(x, self.mu_s, channel_axis(x, self.channel_dim))

    def style(self, mean: Tensor, variance: Tensor) -> Tensor:
        """How far features are from the source style, (B, 2, C), in units of its deviation.

        Of each channel the shift of its mean and the logarithm of its contrast; both 0 where the
        source itself is silent.
        """
        live = self.unit > 0
        shift = (mean.detach() - self.mu_s) / self.sigma_s
        contrast = 0.5 * ((variance.detach() + self.eps) / self.sigma_s**2).log()
        return torch.where(live, torch.stack([shift, contrast], 1), 0.0)

    def transfer(
        self, x: Tensor, found: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Transfer]:
        """BeIN(x), and what it did; advances the stream's statistics if they are kept.

        ``found`` is what `moments` returned for ``x``, if it was asked before.
        """
        found = self.moments(x) if found is None else found
        style, away, after = self._style(*found)
        y, done = transfer(
            x,
            self.mu_s,
            self.sigma_s,
            self.gamma_mu * away,
            self.gamma_sigma * away,
            self.rho,
            relative=self.relative,
            eps=self.eps,
            slope_min=self.slope_min,
            slope_max=self.slope_max,
            channel_dim=self.channel_dim,
            found=found,
            style=style,
        )
        self._buffers.update(after)  # past nn.Module's checks: on small images they take longer
        return y, done

    def _style(
        self, mean: Tensor, variance: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor | float, dict[str, Tensor | None]]:
        """What to normalise with, if not the images' own; how far from home; what to remember.

        The style is (B, C) each. How far the images are from the source's style, 0 to 1, (B, 1), is
        how far what was learned elsewhere is for them.
        """
        if self.statistics_decay == 0:
            return None, 1.0, {}
        # Means and deviations are treated alike, so they go together: (2, B, C).
        own = torch.stack([mean, (variance + self.eps).sqrt()])
        with np.errstate(all="ignore"):  # what is not finite is seen to
            follow, follow_all, keep, away, after = self._weigh(_array(own))
        style = torch.addcmul(keep, follow, own)
        if follow_all is not None:
            style = style + follow_all * own.mean(1, keepdim=True)
        mu, sigma = style.unbind()
        return (mu, sigma), away, after

    def _weigh(
        self, own: Array
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | float, dict[str, Tensor | None]]:
        """How far to go by the statistics of these images, (2, B, C).

        It is a matter of a few hundred numbers: on a CPU they are NumPy's, whose small operations
        take less time than PyTorch's, and which are spared where one image is a batch.

        Returns:
            The weights of each image's own statistics in a style, (2, B, C), and of their mean, if
            the latter is not the former; what is added to that; how far from home it is, (B, 1);
            what to remember.
        """
        xp = np if isinstance(own, np.ndarray) else torch
        batch = own.shape[1]
        home, unit, source = self._source()
        usable = None if bool(xp.isfinite(own).all()) else xp.isfinite(own).all(1).all(0)

        def so_long_as_usable(now: Array, else_: Array) -> Array:
            return now if usable is None else xp.where(usable, now, else_)

        def over_batch(x: Array) -> Array:
            """The mean of (2, B, C) over a batch, (2, C)."""
            return x[:, 0] if batch == 1 else x.mean(1)

        def pooled(squares: Array) -> Array:
            """Squares per channel, (2, B, C), in source deviations, added up: (B, 1)."""
            both = squares[0] + squares[1]
            # PyTorch multiplies matrices of one dtype only.
            return (both @ unit if xp is np else (both * unit).sum(1))[:, None]

        now, before = over_batch(own), self._pair("mu_x", "sigma_x")
        step, seen = 1 - self.statistics_decay, 0.0 if self.seen is None else float(self.seen)
        so_far = self._pair("mu_spread", "sigma_spread")
        odd: Array | None = None
        if source is not None:
            if not (self.remembers_long or before is None or so_far is None):
                last, odd = self._odd(now, before, so_far, pooled)
                if last is not None:  # go on as if the stream had begun with it
                    before, so_far, seen = last, source, 1.0
            # A mean of all images before it is one that fades: single ones are held against it.
            step = max(step, 1 / (seen + 1))
        if before is None:
            step, keep, average = 1.0, xp.zeros_like(home), now
        else:
            keep = (1 - step) * before
            average = keep + step * now
        after = so_long_as_usable(average, home if before is None else before)
        if source is None:
            share = _tensor(xp.zeros_like(home)[:, None] + step)
            return share, None, _tensor(keep[:, None]), 1.0, self._named(("mu_x", "sigma_x"), after)
        # How much images of the stream vary: at first as those of the source do. How far each is
        # unlike those before it, 0 to 1, (B, 1): the weather has changed.
        spread, unlike = source, xp.zeros_like(home[:1, :1])
        if before is not None and so_far is not None:
            apart = (own - before[:, None]) ** 2
            varied = so_far + step * (over_batch(apart) - so_far)
            spread = so_long_as_usable(varied, so_far)
            unlike = believed(pooled(apart), UNLIKE * pooled(so_far[:, None]))
        self.began_anew = False
        named = {}
        if self.remembers_long:
            recent, last_few = now, home
            if before is not None:
                # An image that is unlike those before it is brought as near as those usually are:
                # several must be of another style. `believed` is 1 - usual / found, squared.
                nearer = (1 - unlike) ** 0.5
                nearer = nearer if usable is None else xp.nan_to_num(nearer, nan=0.0)
                near = before + over_batch(nearer * (own - before[:, None]))
                known = self._pair("mu_recent", "sigma_recent")
                last_few = before if known is None else known  # the memory was shorter up to now
                recent = last_few + max(RECENT, 1 / (seen + 1)) * (near - last_few)
            recent = so_long_as_usable(recent, last_few)
            chance = pooled(spread[:, None]) * (apart_by_chance(step) / batch)
            moved = pooled((recent - after)[:, None] ** 2) > MOVED * chance
            if seen >= 2 / RECENT and bool(moved):
                self.began_anew = True
                keep, average, step, seen = xp.zeros_like(home), now, 1.0, 0.0
                after = recent = so_long_as_usable(now, recent)
            named = self._named(RECENT_FEW, recent)
        contrast = (after[1] / home[1]).clip(None, 1.0)
        # In fog all of an image is nearly alike: what is shown makes less of a difference.
        weight = xp.maximum(believed(spread, contrast**2 * source)[:, None], unlike)
        less = 1 - weight
        # Variance of the average, and its covariance with an image in it, for a variance of 1.
        rest = max(step / (2 - step), 1 / (seen + 1)) / batch
        both = (2 * step / batch) * weight * less
        chance = source[:, None] * (weight**2 + both + less**2 * rest)
        from_home = (average - home)[:, None] + weight * (own - average[:, None])
        away = believed(pooled(from_home**2), pooled(chance))
        named |= self._named(("mu_x", "sigma_x"), after) | self._named(SPREAD[:2], spread)
        named |= {"seen": self.mu_s.new_tensor(seen + 1), **dict.fromkeys(ODD_ONE)}
        named |= {} if odd is None else self._named(ODD_ONE, odd)
        # style = home + away * from_home, taken apart by what depends on the images.
        follow, follow_all = away * weight, away * less
        keep = follow_all * keep[:, None] + (1 - away) * home[:, None]
        if batch == 1:
            return _tensor(follow + step * follow_all), None, _tensor(keep), _tensor(away), named
        return _tensor(follow), _tensor(step * follow_all), _tensor(keep), _tensor(away), named

    def _source(self) -> tuple[Array, Array, Array | None]:
        """The source's style, (2, C), its unit, (C,), and how much its images vary, (2, C)."""
        if self._arrays is None or self._arrays[0] is not self.home:
            spread = None if self.spread is None else _array(self.spread)
            self._arrays = self.home, _array(self.home), _array(self.unit), spread
        return self._arrays[1:]

    @property
    def remembers_long(self) -> bool:
        """Whether more than the last few images are weighed, so that these can tell of a change."""
        return self.spread is not None and self.statistics_decay > 1 - RECENT

    @property
    def is_young(self) -> bool:
        """Whether a long memory is of twenty images at most: at first, and when it begins anew."""
        return self.remembers_long and (self.seen is None or float(self.seen) <= 2 / RECENT)

    def _odd(
        self, own: Array, before: Array, usual: Array, pooled: Callable[[Array], Array]
    ) -> tuple[Array | None, Array | None]:
        """The image before and this one, (2, C), if the stream begins with them or it may.

        Of one that is unlike those before it the next must tell: if that is unlike them as well and
        nearer to it than to them, the stream has gone over to another style. Else it was odd.
        """
        apart = pooled((own - before)[:, None] ** 2).item()
        if not UNLIKE * pooled(usual[:, None]).item() < apart < float("inf"):
            return None, None
        last = self._pair("mu_odd", "sigma_odd")
        if last is not None and pooled((own - last)[:, None] ** 2).item() < apart:
            return last, None
        return None, own

    def _pair(self, mu: str, sigma: str) -> Array | None:
        """Two vectors of what is remembered in one, (2, C), if there are any."""
        one, other = self._buffers[mu], self._buffers[sigma]
        if one is None or other is None:
            return None
        known = self._pairs.get(mu)
        if known is None or known[0] is not one or known[1] is not other:
            return _array(torch.stack([one, other]))
        return known[2]

    def _named(self, names: Sequence[str], pair: Array) -> dict[str, Tensor | None]:
        """The other way round; the pair is kept at hand for the next image."""
        mu, sigma = _tensor(pair).unbind()
        self._pairs[names[0]] = mu, sigma, pair
        return dict(zip(names, (mu, sigma), strict=True))

    def remembered(self) -> dict[str, Tensor | None]:
        """What is remembered of the stream, by the names in `STREAM`; never changed in place."""
        return {name: self._buffers[name] for name in STREAM}

    def remember(self, stream: Mapping[str, Tensor | None]) -> None:
        """Go on from what `remembered` returned."""
        self._buffers.update({name: stream[name] for name in STREAM})
        self._forget_what_is_not_kept_up()

    def _forget_what_is_not_kept_up(self) -> None:
        """A short memory has no averages of the last few and a long one no odd image."""
        self._buffers.update(dict.fromkeys(ODD_ONE if self.remembers_long else RECENT_FEW))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Make room for the stream's statistics, which a fresh layer does not have yet."""
        for name in STREAM:
            saved = state_dict.get(prefix + name)
            setattr(self, name, None if saved is None else torch.empty_like(saved))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._forget_what_is_not_kept_up()
        self._derive()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has arrays of its own to make."""
        return {**self.__dict__, "_pairs": {}, "_arrays": None}

    def _apply(self, *args: Any, **kwargs: Any) -> BeIN:
        """Moved or cast, it has other arrays."""
        self._pairs, self._arrays = {}, None
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    @property
    def channels(self) -> int:
        """How many channels the source style has."""
        return self.mu_s.numel()

    def forward(self, x: Tensor) -> Tensor:
        """BeIN(x), (B, C, H, W) or (B, N, C) as ``x``."""
        return self.transfer(x)[0]

    def extra_repr(self) -> str:
        """Shown by ``print(layer)``."""
        kind = "relative" if self.relative else "absolute"
        return f"{self.channels}, rho={self.rho}, {kind} gamma of {self.gamma_mu.numel()}"


def check_style(mu_s: Tensor, sigma_s: Tensor) -> tuple[Tensor, Tensor]:
    """The source style, in fp32 or wider, or a ValueError that says what is wrong with it."""
    if mu_s.dim() != 1 or mu_s.shape != sigma_s.shape or mu_s.numel() == 0:
        raise ValueError(
            f"the source style is two vectors of one number per channel; "
            f"seen: mu_s {tuple(mu_s.shape)}, sigma_s {tuple(sigma_s.shape)}."
        )
    if not bool((mu_s.isfinite() & sigma_s.isfinite() & (sigma_s >= 0)).all()):
        raise ValueError("the source style must be finite, and its deviations not negative.")
    dtype = torch.promote_types(mu_s.dtype, torch.float32)
    return mu_s.to(dtype), sigma_s.to(dtype)


def check_spread(spread: tuple[Tensor, Tensor], mu_s: Tensor) -> tuple[Tensor, Tensor]:
    """How much statistics vary between source images, beside ``mu_s``, or a ValueError."""
    for values in spread:
        if values.shape != mu_s.shape or not bool((values.isfinite() & (values >= 0)).all()):
            raise ValueError(
                "spread is two variances of one number per channel, finite and not negative; "
                f"seen: {tuple(values.shape)} beside {mu_s.numel()} channels."
            )
    return spread[0].to(mu_s), spread[1].to(mu_s)


def check_gamma(name: str, gamma: Tensor | float, mu_s: Tensor) -> Tensor:
    """γ as a tensor beside ``mu_s``, (C,) or scalar, or a ValueError."""
    gamma = torch.as_tensor(gamma, device=mu_s.device)
    if gamma.dim() > 1 or gamma.numel() not in (1, mu_s.numel()):
        raise ValueError(
            f"{name} is a scalar or one number per channel ({mu_s.numel()}); "
            f"its shape is {tuple(gamma.shape)}."
        )
    return gamma.to(torch.promote_types(gamma.dtype, mu_s.dtype))


def check_range(rho: float, slope_min: float, slope_max: float, eps: float) -> None:
    """Raise a ValueError unless the settings of BeIN make sense."""
    if not 0 <= rho <= 1:
        raise ValueError(f"rho must lie in [0, 1], not {rho}.")
    if not 0 < slope_min < 1 < slope_max < float("inf"):
        raise ValueError(
            f"the slope's bounds must satisfy 0 < slope_min < 1 < slope_max; "
            f"seen: ({slope_min}, {slope_max})."
        )
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps must be positive, not {eps}.")
