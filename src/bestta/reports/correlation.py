"""Does a number that needs no label tell how good a prediction is? Correlations, and their bands.

The paper's question (Sec. 3.3): which of direction similarity, target similarity, source
similarity and entropy go with the score of an image? Everything here has 95 % intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = ("direction", "target", "source", "entropy")
CONFIDENCE = 0.95
NORMAL = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""

Numbers = Iterable[float | None]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Correlation:
    """Pearson's r with its 95 % interval; None where there is none."""

    r: float | None
    low: float | None
    high: float | None
    n: int
    """How many pairs there were."""


def correlate(x: Numbers, y: Numbers) -> Correlation:
    """Pearson's correlation of the pairs of which both are numbers.

    The interval is Fisher's: ``tanh(artanh r ± 1.96 / √(n − 3))``. With fewer than four pairs, or
    where one side does not vary, there is no r.

    Example:
        >>> correlate([1, 2, 3, 4, 5, None], [5, 4, 3, 2, 1, 9])
        Correlation(r=-1.0, low=-1.0, high=-1.0, n=5)
    """
    a, b = _pairs(x, y)
    n = len(a)
    if n < 4 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Correlation(None, None, None, n)
    # By the largest first: squares of small numbers would vanish.
    a, b = (v / np.abs(v).max() for v in (a - a.mean(), b - b.mean()))
    r = float(np.clip((a @ b) / math.sqrt((a @ a) * (b @ b)), -1, 1))
    if abs(r) == 1:
        return Correlation(r, r, r, n)
    z, reach = math.atanh(r), NORMAL / math.sqrt(n - 3)
    return Correlation(r, math.tanh(z - reach), math.tanh(z + reach), n)


def line(x: Numbers, y: Numbers, at: Iterable[float]) -> tuple[Array, Array, Array]:
    """The least-squares line through the pairs, and the 95 % band of where it runs.

    Args:
        x, y: The pairs; those of which one is no number are left out.
        at: Where the line is wanted, (M,).

    Returns:
        The line, and the lower and upper end of its band, each (M,).
    """
    a, b = _pairs(x, y)
    n = len(a)
    if n < 3 or np.ptp(a) == 0:
        raise ValueError(
            f"a line and its band need three pairs and two different x; there are {n} pairs"
            + (f", all at {a[0]:g}." if n else ".")
        )
    centre = a.mean()
    off = a - centre
    spread = off @ off
    slope = (off @ b) / spread
    left = b - b.mean() - slope * off
    deviation = math.sqrt(left @ left / (n - 2))
    away = np.asarray(list(at), dtype=np.float64) - centre
    fit = b.mean() + slope * away
    reach = student_quantile((1 + CONFIDENCE) / 2, n - 2) * deviation
    band = reach * np.sqrt(1 / n + away**2 / spread)
    return fit, fit - band, fit + band


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with ``freedom`` degrees, for a probability in (0, 1).

    With ``t = √f tan θ`` the density becomes ``c cosᶠ⁻¹ θ``, smooth on a bounded interval:
    a few points of Gauss and Legendre integrate it, and θ is found by halving.

    Example:
        >>> round(student_quantile(0.975, 10), 6)
        2.228139
    """
    if not 0 < probability < 1 or freedom < 1:
        raise ValueError(
            f"a probability between 0 and 1 and at least one degree of freedom are needed, not "
            f"{probability} and {freedom}."
        )
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    nodes, weights = np.polynomial.legendre.leggauss(64)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(math.pi)

    def between_zero_and(theta: float) -> float:
        cosines = np.cos(theta / 2 * (nodes + 1))
        return float(scale * theta / 2 * (weights @ cosines ** (freedom - 1)))

    # Of many degrees, all lies near zero, where the points have to be: within 40 deviations.
    low, high = 0.0, min(math.pi / 2, 40 / math.sqrt(freedom))
    for _ in range(80):
        middle = (low + high) / 2
        if between_zero_and(middle) < probability - 0.5:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def correlations(record: Mapping[str, Any]) -> dict[str, Correlation]:
    """Each similarity of a record, and the entropy, against the score of the same frames.

    What a record does not hold is missing. In classification a frame is right (100) or wrong (0):
    it is accuracy that is compared, so that the sign reads as in segmentation, and r is the
    point-biserial correlation. Where several frames were predicted at once, their mean counts.
    """
    traces, scores = record["traces"], frame_scores(record)
    return {name: correlate(traces[name], scores) for name in NAMES if traces.get(name)}


def correlations_within(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The same within conditions: r of what is left when each block's means are taken off.

    Where some conditions are harder than others, anything that tells conditions apart goes with
    the score. This is whether it tells a good prediction from a bad one in the same weather. A
    block that mixes conditions cannot tell: then there is none.
    """
    if any(block["name"] == "mixed" for block in record["blocks"]):
        return {}
    block_at = dict(zip(record["frames"]["position"], record["frames"]["block"], strict=True))
    blocks = [block_at.get(step) for step in record["traces"].get("step", [])]
    scores = frame_scores(record)
    found: dict[str, float | None] = {}
    for name in NAMES:
        values = record["traces"].get(name)
        if not values:
            continue
        left: tuple[list[float], list[float]] = ([], [])
        for block in dict.fromkeys(blocks):
            own = [n for n, other in enumerate(blocks) if other == block]
            pairs = _pairs([values[n] for n in own], [scores[n] for n in own])
            for side, numbers in zip(left, pairs, strict=True):
                varies = len(numbers) > 0 and np.ptp(numbers) > 0  # or rounding would be left
                side += (numbers - numbers.mean() if varies else 0 * numbers).tolist()
        found[name] = correlate(*left).r
    return found


def frame_scores(record: Mapping[str, Any]) -> list[float | None]:
    """For each entry of the traces, the mean score of its frames, higher being better.

    In classification: the accuracy, 0 to 100. None where no frame has a score.
    """
    frames, steps = record["frames"], record["traces"].get("step", [])
    batch = record["stream"].get("batch") or 1
    rows = list(zip(frames["position"], frames["block"], frames["score"], strict=True))
    index = {position: row for row, (position, _, _) in enumerate(rows)}
    ends = [*steps[1:], math.inf]
    found: list[float | None] = []
    for step, end in zip(steps, ends, strict=True):
        start = index.get(step)
        own = rows[start : start + batch] if start is not None else []
        # A batch ends with its block, and where the next one begins.
        scores = [s for p, block, s in own if p < end and block == own[0][1] and _is_number(s)]
        mean = sum(scores) / len(scores) if scores else None
        found.append(mean if mean is None or record["higher_is_better"] else 100 - mean)
    return found


def share_above(record: Mapping[str, Any], name: str, threshold: float) -> float | None:
    """Which part (0 to 1) of a trace's numbers lie above ``threshold``; None if there are none."""
    values = [v for v in record["traces"].get(name) or [] if _is_number(v)]
    return sum(v > threshold for v in values) / len(values) if values else None


def _pairs(x: Numbers, y: Numbers) -> tuple[Array, Array]:
    a, b = (np.array([np.nan if v is None else v for v in side], dtype=float) for side in (x, y))
    if len(a) != len(b):
        raise ValueError(f"pairs need as many x as y; there are {len(a)} and {len(b)}.")
    both = np.isfinite(a) & np.isfinite(b)
    return a[both], b[both]


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
