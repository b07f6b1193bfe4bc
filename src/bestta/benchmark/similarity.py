"""The style-transfer numbers of one image (Sec. 3.3): direction, target, source, entropy.

The paper holds them against the score of the image. They are measured here for any method, from
the features that the source model and the adapted one have at a layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bestta.benchmark.probe import pooled
from bestta.losses import cosine, entropy_loss
from bestta.profile import Embedding, SourceProfile

NAMES = ("direction", "target", "source", "entropy")
AVERAGE = "target_average"


class Similarities:
    """Similarities of an adapted image with what it was, and with the source.

    - direction: ``cos(E'(x) − E(x), mean source embedding − A)``, A the moving average of E(x);
    - target: ``cos(E'(x), E(x))``;
    - source: ``cos(mean source embedding, E'(x))``;
    - entropy: of the prediction, averaged over its pixels.

    A follows the images that are shown here, and only these.

    Args:
        profile: Holds the mean source embedding.
        layer: A layer of the profile.
        decay: Of A. The image enters A before A is used, and the first is its start, as in BESTTA.
        target: What the target similarity compares: channel vectors or whole feature maps.
    """

    def __init__(
        self,
        profile: SourceProfile,
        layer: str,
        decay: float = 0.9,
        # Choice: the paper calls E(x) an embedding in every formula, and a feature in the sentence
        # on this one. Pooled, the three similarities are of the same vectors.
        target: Embedding = "pooled",
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), not {decay}.")
        if target not in ("pooled", "map"):
            raise ValueError(f"target is 'pooled' or 'map', not {target!r}.")
        known = profile.select([layer])[layer]
        self.layer, self.decay, self.target = layer, decay, target
        self.channel_dim = known.channel_dim
        self.source_embedding = known.mu.float()
        self.target_average: Tensor | None = None
        """A, (C,), fp32; None before the first image."""

    @torch.no_grad()
    def update(self, plain: Tensor, adapted: Tensor, logits: Tensor) -> dict[str, float]:
        """Take a batch in. Returns each number, averaged over the images.

        What is not finite has no similarities: it leaves no trace in A, and they are missing.

        Args:
            plain: The source model's features, (B, C, H, W) or (B, N, C).
            adapted: The adapted model's, of the same shape.
            logits: The adapted model's prediction, (B, K) or (B, K, H, W).
        """
        if plain.shape != adapted.shape:
            raise ValueError(
                f"the plain features are {tuple(plain.shape)}, the adapted ones "
                f"{tuple(adapted.shape)}: give those of the same images at {self.layer!r}."
            )
        before, after = (pooled(x, self.channel_dim).float().cpu() for x in (plain, adapted))
        source = self.source_embedding
        if before.shape[1:] != source.shape:
            raise ValueError(
                f"the profile holds {source.numel()} channels at {self.layer!r}; these features, "
                f"{tuple(plain.shape)}, have {before.shape[1]}."
            )
        numbers: dict[str, Tensor] = {}
        if bool(before.isfinite().all() and after.isfinite().all()):
            direction = (source - self._track(before)).unsqueeze(0)
            contents = (before, after) if self.target == "pooled" else (plain, adapted)
            numbers = {
                "direction": cosine(after - before, direction).mean(),
                "target": cosine(*contents).mean(),
                "source": cosine(after, source.unsqueeze(0)).mean(),
            }
        numbers["entropy"] = entropy_loss(logits)
        return {name: float(value) for name, value in numbers.items() if value.isfinite()}

    def _track(self, unadapted: Tensor) -> Tensor:
        current = unadapted.mean(0)
        so_far = current if self.target_average is None else self.target_average
        self.target_average = current.lerp(so_far, self.decay)
        return self.target_average

    def tensors(self) -> dict[str, Tensor]:
        """A copy of all that is remembered; nothing before the first image."""
        return {} if self.target_average is None else {AVERAGE: self.target_average.clone()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` returned, exactly."""
        average = tensors.get(AVERAGE)
        if average is not None and (average.shape, average.dtype) != (
            self.source_embedding.shape,
            torch.float32,
        ):
            raise ValueError(
                f"{AVERAGE} is {average.dtype} {tuple(average.shape)}; at {self.layer!r} it is "
                f"torch.float32 {tuple(self.source_embedding.shape)}."
            )
        self.target_average = None if average is None else average.clone()
