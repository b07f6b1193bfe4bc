"""How the features of a layer are spread: in the source, in each condition, and once adapted.

For a few channels the values themselves are counted; for all of them it is measured how far their
means lie from the source's. Bins and channels are decided by the source profile alone, so that the
histograms of all methods lie over each other and no target image has a say in what is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from bestta.bein import channel_axis
from bestta.benchmark.probe import pooled
from bestta.profile import SourceProfile

REACH = 6.0
"""Bins span this many source deviations on either side of the source mean."""
SILENT = 1e-3
"""A channel whose deviation is below this part of the largest one says nothing."""
POSITIONS = 4096
"""At most so many positions of a map are counted."""

Side = Literal["target", "adapted"]


class Histograms:
    """Counts of feature values at one layer.

    Args:
        profile: Decides bins, channels, and what "far" means.
        layer: A layer of the profile.
        channels: How many channels are counted; fewer if there are not as many that say something.
        bins: How many bins span ``REACH`` deviations on either side; the first and last take
            what lies beyond, so that every value is counted.
    """

    def __init__(
        self, profile: SourceProfile, layer: str, channels: int = 6, bins: int = 40
    ) -> None:
        if channels < 1 or bins < 1:
            raise ValueError(f"at least one channel and one bin, not {channels} and {bins}.")
        known = profile.select([layer])[layer]
        self.layer, self.bins, self.channel_dim = layer, bins, known.channel_dim
        self.mu, self.sigma = known.mu.double(), known.sigma.double()
        self.live = self.sigma > SILENT * self.sigma.max()
        self.channels = spread_channels(self.sigma, self.live, channels)
        steps = torch.linspace(-REACH, REACH, bins + 1, dtype=torch.float64)
        middle, unit = (s[self.channels].unsqueeze(1) for s in (self.mu, self.sigma))
        self.edges = middle + unit * steps
        """(channels, bins + 1), float64."""
        self.source = self._no_counts()
        self.conditions: dict[str, _Condition] = {}
        """In the order they were first seen."""

    def add_source(self, features: Tensor) -> None:
        """Count the source model's features of source images, (B, C, H, W) or (B, N, C)."""
        self._check(features)
        keep = _finite(features)
        if bool(keep.any()):
            self.source += self._counts(features[keep])

    def add(self, condition: str, plain: Tensor, adapted: Tensor) -> Tensor | None:
        """Count features of images of a condition; images with any that is not finite are not.

        Args:
            condition: What the images are of.
            plain: The source model's features, (B, C, H, W) or (B, N, C).
            adapted: The adapted model's, of the same shape.

        Returns:
            What they add, for `include` to add it again; None if that is nothing.
        """
        if plain.shape != adapted.shape:
            raise ValueError(
                f"the plain features are {tuple(plain.shape)}, the adapted ones "
                f"{tuple(adapted.shape)}: give those of the same images at {self.layer!r}."
            )
        self._check(plain)
        keep = _finite(plain) & _finite(adapted)
        if not bool(keep.any()):
            return None
        found = {"images": keep.sum()}
        for side, features in (("target", plain[keep]), ("adapted", adapted[keep])):
            found[f"{side}_counts"] = self._counts(features)
            found[f"{side}_sums"] = pooled(features, self.channel_dim).double().sum(0)
        # In one piece, as float64: counts are whole numbers in it, too.
        spread = torch.cat([found[kind].double().cpu().flatten() for kind in self._no_condition()])
        self.include(condition, spread)
        return spread

    def include(self, condition: str, spread: Tensor) -> None:
        """Add what `add` returned."""
        entry = self.conditions.setdefault(condition, self._no_condition())
        start = 0
        for kind in self._no_condition():  # in this order; a file may return them in another
            sum_ = entry[kind]
            more = spread[start : start + sum_.numel()]
            sum_ += more.view_as(sum_).to(sum_.dtype)
            start += sum_.numel()

    def distance(self, condition: str, side: Side) -> float:
        """Mean over the channels of ``|mean − μ̄_s| / σ̄_s``, silent channels left out."""
        entry = self.conditions[condition]
        mean = entry[f"{side}_sums"] / entry["images"]
        return float(((mean - self.mu).abs() / self.sigma)[self.live].mean())

    def result(self) -> dict[str, Any]:
        """The entry ``embeddings`` of a record."""
        names = list(self.conditions)
        return {
            "layer": self.layer,
            "channels": self.channels.tolist(),
            "edges": self.edges.tolist(),
            "source": self.source.tolist(),
            "target": {name: self.conditions[name]["target_counts"].tolist() for name in names},
            "adapted": {name: self.conditions[name]["adapted_counts"].tolist() for name in names},
            "distance": {
                "target": {name: self.distance(name, "target") for name in names},
                "adapted": {name: self.distance(name, "adapted") for name in names},
            },
        }

    def tensors(self) -> dict[str, Tensor]:
        """A copy of everything counted so far, by name."""
        found = {"source": self.source.clone()}
        for place, (condition, entry) in enumerate(self.conditions.items()):
            # The place is in the name: a file may return its tensors in another order.
            found |= {f"{place}/{kind}/{condition}": t.clone() for kind, t in entry.items()}
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` returned, exactly."""
        fresh = self._no_condition()
        entries: dict[tuple[int, str], _Condition] = {}
        for name, tensor in tensors.items():
            if name == "source":
                expected = self.source
            else:
                place, _, rest = name.partition("/")
                kind, _, condition = rest.partition("/")
                if not place.isdigit() or kind not in fresh:
                    raise ValueError(f"these are no histograms: a tensor is called {name!r}.")
                expected = fresh[kind]
                entries.setdefault((int(place), condition), {})[kind] = tensor.clone()
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; with {len(self.channels)} "
                    f"channels of {self.layer!r} and {self.bins} bins it is {expected.dtype} "
                    f"{tuple(expected.shape)}."
                )
        for (_, condition), entry in entries.items():
            if entry.keys() != fresh.keys():
                missing = ", ".join(kind for kind in fresh if kind not in entry)
                raise ValueError(
                    f"these histograms are incomplete: {condition!r} has no {missing}."
                )
        if "source" not in tensors:
            raise ValueError("these histograms are incomplete: there is no 'source'.")
        self.source = tensors["source"].clone()
        self.conditions = {name: entries[place, name] for place, name in sorted(entries)}

    # --- inside ---------------------------------------------------------------------------

    def _counts(self, features: Tensor) -> Tensor:
        """How many values lie in each bin, (channels, bins), int64."""
        axis = channel_axis(features, self.channel_dim)
        chosen = features.detach().index_select(axis, self.channels.to(features.device))
        values = chosen.movedim(axis, 1).flatten(2)  # (B, channels, positions)
        if values.shape[2] > POSITIONS:
            values = values[:, :, _some_positions(values.shape[2]).to(values.device)]
        values = values.cpu().double().movedim(1, 0).flatten(1).contiguous()
        place = torch.searchsorted(self.edges, values, right=True) - 1
        rows = torch.arange(len(self.channels)).unsqueeze(1)
        cells = rows * self.bins + place.clamp(0, self.bins - 1)
        counts = torch.bincount(cells.flatten(), minlength=self.source.numel())
        return counts.view_as(self.source)

    def _check(self, features: Tensor) -> None:
        axis = channel_axis(features, self.channel_dim)
        if features.shape[axis] != self.mu.numel():
            raise ValueError(
                f"the profile holds {self.mu.numel()} channels at {self.layer!r}; these features, "
                f"{tuple(features.shape)}, have {features.shape[axis]}."
            )

    def _no_counts(self) -> Tensor:
        return torch.zeros(len(self.channels), self.bins, dtype=torch.int64)

    def _no_condition(self) -> _Condition:
        return {
            "images": torch.tensor(0),
            "target_counts": self._no_counts(),
            "adapted_counts": self._no_counts(),
            "target_sums": torch.zeros_like(self.mu),
            "adapted_sums": torch.zeros_like(self.mu),
        }


_Condition = dict[str, Tensor]
"""Of one condition: ``images``, int64; counts per side, (channels, bins), int64; and per side the
sum over the images of their channel means, (C,), float64."""


def spread_channels(sigma: Tensor, live: Tensor, count: int) -> Tensor:
    """``count`` of the live channels, from quiet to loud ones, by number; all if there are fewer.

    The live channels, sorted by deviation, are cut into as many equal parts, and the middle of each
    is taken.

    Args:
        sigma: Source deviations, (C,).
        live: Which channels say something, (C,).
        count: How many.
    """
    order = torch.argsort(sigma, stable=True)
    order = order[live[order]]
    if not len(order):
        raise ValueError("every channel of this layer is silent in the source: choose another.")
    count = min(count, len(order))
    middles = [(2 * part + 1) * len(order) // (2 * count) for part in range(count)]
    return order[middles].sort().values


@lru_cache(maxsize=8)
def _some_positions(count: int) -> Tensor:
    """The positions that are counted of so many, in order: scattered, and the same every time."""
    generator = torch.Generator().manual_seed(count)
    return torch.randperm(count, generator=generator)[:POSITIONS].sort().values


def _finite(features: Tensor) -> Tensor:
    """Which images have finite features only, (B,)."""
    return features.isfinite().flatten(1).all(1)
