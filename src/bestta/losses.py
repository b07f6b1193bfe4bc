"""The style-guided losses of BESTTA (Sec. 3.3): style, content, entropy, L2 and their total.

Embeddings are (B, ...): a pooled channel vector or a whole feature map per sample. Every
loss is the mean over the samples, computed in fp32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def cosine(u: Tensor, v: Tensor, floor: float = 0.0) -> Tensor:
    """Cosine similarity of each sample of ``u`` with that of ``v``, both (B, ...), as (B,).

    A vector shorter than ``floor`` counts by its length over ``floor``, not as a unit vector.

    A zero vector has no direction: its similarity is 0, and so is the gradient, which the
    usual form, dividing by a tiny number instead, makes enormous.
    """
    u, v = _flat(u), _flat(v)
    u_inverse, v_inverse = (_inverse_root((w * w).sum(1).clamp(min=floor**2)) for w in (u, v))
    return (u * v).sum(1) * u_inverse * v_inverse


def directional_style_loss(
    source: Tensor,
    target_average: Tensor,
    adapted: Tensor,
    unadapted: Tensor,
    floor: float = 0.0,
) -> Tensor:
    """Eq. 9: does the adaptation move the embedding from the target towards the source?

    ``1 - cos(mean source embedding - A, E'(x) - E(x))``.

    Args:
        source: Mean source embedding, (...).
        target_average: A, the moving average of the target embeddings, (...).
        adapted, unadapted: E'(x) and E(x), (B, ...).
        floor: Length below which a direction fades instead of counting fully: see `cosine`.
    """
    direction = (source - target_average).unsqueeze(0)
    return (1 - cosine(_flat(adapted) - _flat(unadapted), direction, floor)).mean()


def source_style_loss(source: Tensor, adapted: Tensor) -> Tensor:
    """The style loss of the classification part: ``1 - cos(mean source embedding, E'(x))``."""
    return (1 - cosine(adapted, source.unsqueeze(0))).mean()


def content_loss(unadapted: Tensor, adapted: Tensor) -> Tensor:
    """Eq. 10: ``1 - cos(E(x), E'(x))`` over the whole feature maps, (B, ...)."""
    return (1 - cosine(unadapted, adapted)).mean()


def content_loss_of_affine(mean: Tensor, variance: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Eq. 10 for ``E'(x) = a E(x) + b``, from the moments of E(x) alone: no pass over the map.

    Per channel, with everything divided by the number of positions, ``<E, E'>`` is
    ``a m2 + b m`` and ``<E', E'>`` is ``a² m2 + 2ab m + b²``, where ``m2 = variance + mean²``.

    Args:
        mean, variance: Moments of E(x) per channel, (B, C).
        a, b: The affine map, (B, C).
    """
    mean_square = variance + mean**2
    product = (a * mean_square + b * mean).sum(1)
    unadapted = mean_square.sum(1)
    # As a sum of squares, which rounding cannot make negative.
    adapted = (a**2 * variance + (a * mean + b) ** 2).sum(1)
    return (1 - product * _inverse_root(unadapted) * _inverse_root(adapted)).mean()


def entropy(logits: Tensor) -> Tensor:
    """The entropy of each prediction: (B,) of (B, K), (B, H, W) of (B, K, H, W)."""
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def entropy_loss(logits: Tensor) -> Tensor:
    """Eq. 12: the entropy of the prediction, (B, K) or (B, K, H, W), averaged over it."""
    return entropy(logits).mean()


USUAL = 0.9
"""Cosine from which on an answer is the usual one: of ten classes, that of two images in five."""
SURE = 1e-3
"""An answer that leaves less than this to all other classes is sure enough."""


def likelihood_ratio(logits: Tensor) -> Tensor:
    """Minus the expected log-odds of each prediction: ``−Σ p log(p / (1 − p))``.

    Lowest where the entropy is (Mummadi et al., 2021). But the entropy's slope vanishes as an
    answer gets sure, and so it learns from those that are least so; this one's does not, up to
    `SURE`.
    """
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
    p = log_p.exp()
    return -(p * (log_p.clamp(max=math.log1p(-SURE)) - (1 - p).clamp(min=SURE).log())).sum(1)


def worth(logits: Tensor, usual: Tensor) -> Tensor:
    """How much each prediction is worth learning from, 1 to 20, or 0; it has no gradient.

    The more, the surer it is and the less it is like the usual one (Marsden et al., 2024; they
    scale both within a batch, which a single image does not have: here one class alone, held
    against all of them alike, is as unlike as it gets). One that is the `USUAL` one teaches
    nothing: a camera that sees one class for hours would learn that there is no other.

    Args:
        logits: (B, K) or (B, K, H, W).
        usual: The mean of the probabilities before, (K,).
    """
    p = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).softmax(1)
    sure = (-entropy(logits.detach())).exp()
    usual = usual.view(1, -1, *[1] * (p.dim() - 2))
    alike = (p * usual).sum(1) / ((p * p).sum(1) * (usual * usual).sum(1)).sqrt()
    unlike = ((1 - alike) / max(1 - p.shape[1] ** -0.5, 1e-6)).clamp(max=1.0)
    value = (3 * sure * unlike).exp()
    return torch.where(alike > USUAL, 0.0, value)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """``−Σ softmax(target) · log softmax(logits)`` of each prediction; both are logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return -(target.to(wide).softmax(1) * logits.to(wide).log_softmax(1)).sum(1)


def l2_loss(gamma_mu: Tensor, gamma_sigma: Tensor) -> Tensor:
    """Eq. 11: ``||γ_μ|| + ||γ_σ||``, a norm and not its square; its gradient at zero is zero."""
    norms = [torch.linalg.vector_norm(gamma) for gamma in (gamma_mu, gamma_sigma)]
    return torch.stack(norms).sum()


def total_loss(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Eq. 13: the weighted sum of the losses at hand."""
    if not losses:
        raise ValueError("there is no loss to sum: every weight is 0.")
    return torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()


def average(losses: Iterable[Tensor]) -> Tensor:
    """The mean of one loss over several BeINs.

    Choice: with several layers the paper does not say how they combine; the mean keeps
    the λ of one layer in proportion to the entropy, of which there is only one.
    """
    return torch.stack(list(losses)).mean()


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))


def _inverse_root(square: Tensor) -> Tensor:
    """``1 / sqrt(square)`` of a squared norm, and a constant 0 where there is no length."""
    zero = square <= 1e-24
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).rsqrt())
