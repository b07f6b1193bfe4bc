"""The paper's equations, transcribed one by one without folding or fusing: slow, plain, the judge.

Statistics are those of instance norm: population variance, with eps under the root.
"""

from __future__ import annotations

import torch
from torch import Tensor


def instance_statistics(x: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """μ_x and σ_x of maps (B, C, H, W), shaped to go with them."""
    mu_x = x.mean(dim=(2, 3), keepdim=True)
    variance = ((x - mu_x) ** 2).mean(dim=(2, 3), keepdim=True)
    return mu_x, (variance + eps).sqrt()


def bein(
    x: Tensor,
    mu_s: Tensor,
    sigma_s: Tensor,
    gamma_mu: Tensor,
    gamma_sigma: Tensor,
    rho: float,
    eps: float = 1e-5,
) -> Tensor:
    """Eq. 6-8 on maps (B, C, H, W)."""
    mu_x, sigma_x = instance_statistics(x, eps)
    mu_s, sigma_s, gamma_mu, gamma_sigma = (
        v.reshape(1, -1, 1, 1) for v in (mu_s, sigma_s, gamma_mu, gamma_sigma)
    )
    sigma_t = sigma_s * sigma_x / (rho * sigma_s + (1 - rho) * sigma_x + gamma_sigma)  # Eq. 7
    mu_t = rho * sigma_t / sigma_x * mu_x + (1 - rho) * sigma_t / sigma_s * mu_s + gamma_mu  # Eq. 8
    return sigma_s * (x - mu_t) / sigma_t + mu_s  # Eq. 6


def cosine(u: Tensor, v: Tensor) -> Tensor:
    return (u * v).sum() / (u.pow(2).sum().sqrt() * v.pow(2).sum().sqrt())


def total_loss(
    logits: Tensor,
    passes: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    gammas: list[tuple[Tensor, Tensor]],
    weights: tuple[float, float, float, float],
) -> Tensor:
    """Eq. 9-13 for one image, the losses at the BeINs averaged over them.

    Args:
        logits: (1, K, H, W).
        passes: At each BeIN: mean source embedding (C,), A (C,), E(x) and E'(x) as maps.
        gammas: γ_μ and γ_σ of each BeIN.
        weights: λ1 … λ4.
    """
    style = content = l2 = torch.zeros((), dtype=logits.dtype)
    for source, target_average, unadapted, adapted in passes:
        moved = adapted.mean((0, 2, 3)) - unadapted.mean((0, 2, 3))
        style = style + 1 - cosine(source - target_average, moved)  # Eq. 9
        content = content + 1 - cosine(unadapted, adapted)  # Eq. 10
    for gamma_mu, gamma_sigma in gammas:
        l2 = l2 + gamma_mu.pow(2).sum().sqrt() + gamma_sigma.pow(2).sum().sqrt()  # Eq. 11
    p = logits.softmax(1)
    entropy = -(p * p.log()).sum(1).mean()  # Eq. 12
    count = len(passes)
    losses = (style / count, content / count, entropy, l2 / count)
    return sum(
        (weight * loss for weight, loss in zip(weights, losses, strict=True)),
        torch.zeros((), dtype=logits.dtype),
    )  # Eq. 13
