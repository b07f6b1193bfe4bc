"""Find the logits in whatever a model returns, and tell the task by their shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

Task = Literal["classification", "segmentation"]
OutputKey = str | int | None

USUAL_KEYS = ("logits", "out")
"""Where segmentation and transformer models keep their main output."""


def select_logits(output: Any, key: OutputKey = None) -> Tensor:
    """The logits, (B, K) or (B, K, H, W), in a model's ``output``.

    Args:
        output: A tensor, a tuple or list, a dict, or an object with attributes.
        key: Which entry: the name in a dict or object, the position in a tuple. By default
            ``"logits"``, or else ``"out"``, of a dict, named tuple or object, the only tensor of a
            dict, and the first tensor of a tuple.
    """
    logits = _entry(output, key)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise ValueError(
            f"the model's output{_at(key)} is {_describe(logits)}, not a tensor of logits."
            f" The model returned {_describe(output)}; choose with output=…"
        )
    if logits.dim() not in (2, 4):
        raise ValueError(
            f"logits are (B, K) for classification or (B, K, H, W) for segmentation; the "
            f"model's output{_at(key)} has shape {tuple(logits.shape)}. Choose with output=…"
        )
    return logits


def task_of(logits: Tensor) -> Task:
    """Classification for (B, K), segmentation for (B, K, H, W)."""
    return "classification" if logits.dim() == 2 else "segmentation"


def by_class(logits: Tensor) -> Tensor:
    """``logits`` with an entry for every class: a single channel says yes or no.

    Example:
        >>> import torch
        >>> by_class(torch.tensor([[2.0]]))
        tensor([[0., 2.]])
    """
    return (
        F.pad(logits, (0,) * (2 * (logits.dim() - 2)) + (1, 0)) if logits.shape[1] == 1 else logits
    )


def _entry(output: Any, key: OutputKey) -> Any:
    if key is None:
        return _usual_entry(output)
    try:
        if isinstance(key, str) and not isinstance(output, Mapping):
            return getattr(output, key)
        return output[key]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the model's output has no entry {key!r}: it returned {_describe(output)}."
        ) from error


def _usual_entry(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        tensors = [name for name, value in output.items() if isinstance(value, Tensor)]
        for name in (*USUAL_KEYS, *(tensors if len(tensors) == 1 else ())):
            if name in tensors:
                return output[name]
    else:
        for name in USUAL_KEYS:
            if isinstance(getattr(output, name, None), Tensor):
                return getattr(output, name)
    if isinstance(output, tuple | list):
        for value in output:
            if isinstance(value, Tensor):
                return value
    raise ValueError(
        f"cannot tell where the logits are: the model returned {_describe(output)}. "
        "Name them with output=…, a key or a position."
    )


def _at(key: OutputKey) -> str:
    return "" if key is None else f" {key!r}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def thinned(logits: Tensor) -> Tensor:
    """Of a large map, (B, K, H, W), every so-many-th pixel: some thousand tell what it is like."""
    if logits.dim() != 4:
        return logits
    stride = max(1, int(math.sqrt(logits.shape[2] * logits.shape[3] / 4096)))
    return logits[:, :, ::stride, ::stride]
