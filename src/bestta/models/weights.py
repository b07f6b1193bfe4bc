"""Load public checkpoints: whatever they are wrapped in, whatever prefix their keys carry.

A checkpoint is read as plain tensors only; code inside a file is never run.
"""

import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from bestta.models.deeplabv3plus import DeepLabV3Plus
from bestta.models.efficientnet_lite import EfficientNetLite0
from bestta.models.resnet import ResNet50

_TORCH_SUFFIXES = (".pt", ".pth", ".tar", ".ckpt", ".bin")
_WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model")
_DEEPEST_WRAPPING = 4
_PREFIXES = ("module.", "_orig_mod.", "model.")
_BACKBONE_PREFIXES = ("backbone.", "encoder.")
_BATCH_COUNTER = "num_batches_tracked"
_SHOWN = 4


class Mismatch(NamedTuple):
    """A tensor whose shape in the file is not its shape in the model."""

    name: str
    shape_in_file: tuple[int, ...]
    shape_in_model: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} is {self.shape_in_file} in the file but {self.shape_in_model} here"


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `load_weights` did with each tensor."""

    source: str
    """The file, or "a state dict"."""
    network: str
    """What was loaded: the model, or its backbone."""
    matched: tuple[str, ...]
    """Tensors of the model that were loaded."""
    missing: tuple[str, ...]
    """Tensors of the loaded network that the file does not hold."""
    unexpected: tuple[str, ...]
    """Tensors of the file, by its own names, that the network does not have."""
    mismatched: tuple[Mismatch, ...]
    """Tensors that both have, in different shapes."""
    ignored: tuple[str, ...]
    """Known leftovers: the head of a classifier, batch counters that old files lack."""
    untouched: tuple[str, ...]
    """Parts of the model outside the loaded network; they keep their values."""

    def __str__(self) -> str:
        total = len(self.matched) + len(self.missing) + len(self.mismatched)
        notes = [
            f"{len(self.matched)} of {total} tensors of {self.network} loaded from {self.source}"
        ]
        if self.untouched:
            notes.append(f"{' and '.join(self.untouched)} keep their initial values")
        for word in ("missing", "unexpected", "mismatched", "ignored"):
            names = getattr(self, word)
            if names:
                notes.append(f"{word} {_first_few(names)}")
        return "; ".join(notes)


def load_weights(
    model: nn.Module, source: str | Path | Mapping[str, Any], *, strict: bool = True
) -> LoadReport:
    """Load a checkpoint into a network of `bestta.models`, or into any other module.

    The checkpoint may be a state dict or hold one under ``state_dict``,
    ``model_state_dict``, ``model_state`` or ``model``; its keys may start with
    ``module.``, ``_orig_mod.`` or ``model.`` and, for a backbone, ``backbone.`` or
    ``encoder.``. A network class may translate the names of its public checkpoint
    with a static method ``rename_public_key(key)``, which returns the name in the
    network, or None for a tensor to ignore.

    The checkpoint of a bare encoder, given to a `DeepLabV3Plus`, goes to its ``backbone``.

    Args:
        model: Changed in place, or left exactly as it was if this raises.
        source: A ``.safetensors`` file, a file of PyTorch (``.pt``, ``.pth``, ``.tar``, ``.ckpt``,
            ``.bin``), or a state dict.
        strict: Refuse a checkpoint that leaves part of the network without
            weights, has other shapes, or is of a larger network of the same kind.

    Returns:
        What was loaded, left out and ignored; ``str(report)`` sums it up.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no checkpoint of plain tensors, if none of its
            tensors fits, or if ``strict`` and not all do.
    """
    tensors, other_entries, label = _read_source(source)
    network, prefix = _choose_network(model, tensors)
    own_tensors = network.state_dict()
    name = type(network).__name__
    if prefix:
        name = f"{type(model).__name__}.{prefix.removesuffix('.')} ({name})"

    key_of: dict[str, str] = {}  # name in the network -> key in the file
    unexpected: list[str] = []
    ignored = list(other_entries)
    surplus: list[str] = []  # unexpected, and inside a module that the network has
    children = {child for child, _ in network.named_children()}
    resolve = _key_resolver(network)
    for key in tensors:
        resolved = resolve(key)
        if resolved is None:
            ignored.append(key)
        elif resolved in key_of:
            raise ValueError(
                f"{label} holds {resolved!r} of {name} twice, as {key_of[resolved]!r} and {key!r}. "
                "Pass a state dict with only one of the two."
            )
        elif resolved in own_tensors:
            key_of[resolved] = key
        else:
            unexpected.append(key)
            if resolved.split(".")[0] in children:
                surplus.append(key)

    matched: list[str] = []
    missing: list[str] = []
    mismatched: list[Mismatch] = []
    for own_name, own in own_tensors.items():
        full_name = prefix + own_name
        if own_name not in key_of:
            is_counter = own_name.split(".")[-1] == _BATCH_COUNTER
            (ignored if is_counter else missing).append(full_name)
            continue
        given = tensors[key_of[own_name]]
        if given.shape == own.shape:
            matched.append(full_name)
        else:
            mismatched.append(Mismatch(full_name, tuple(given.shape), tuple(own.shape)))

    if not matched:
        raise ValueError(_nothing_fits(label, name, tensors, own_tensors, mismatched))
    if strict and (missing or mismatched or surplus):
        raise ValueError(_does_not_fit(label, name, missing, mismatched, surplus))

    with torch.no_grad():
        for full_name in matched:
            own_name = full_name.removeprefix(prefix)
            own_tensors[own_name].copy_(tensors[key_of[own_name]])
    return LoadReport(
        source=label,
        network=name,
        matched=tuple(matched),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        ignored=tuple(ignored),
        untouched=_parts_outside(model, network),
    )


def _choose_network(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[nn.Module, str]:
    """The network to load, and the prefix of its names in the model.

    A checkpoint of which nothing belongs to pyramid or decoder is that of an encoder.
    """
    if not isinstance(model, DeepLabV3Plus):
        return model, ""
    resolve = _key_resolver(model)
    outside_backbone = {name for name in model.state_dict() if not name.startswith("backbone.")}
    if any(resolve(key) in outside_backbone for key in tensors):
        return model, ""
    return model.backbone, "backbone."


def _key_resolver(network: nn.Module) -> Callable[[str], str | None]:
    """Function from a key of the file to a name in the network; None for a known leftover."""
    own_names = set(network.state_dict())
    is_backbone = isinstance(network, ResNet50 | EfficientNetLite0)
    prefixes = _PREFIXES + _BACKBONE_PREFIXES if is_backbone else _PREFIXES
    rename = getattr(network, "rename_public_key", None)

    def resolve(key: str) -> str | None:
        while key not in own_names:
            prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
            if prefix is None:
                renamed: str | None = key if rename is None else rename(key)
                return renamed
            key = key.removeprefix(prefix)
        return key

    return resolve


def _parts_outside(model: nn.Module, network: nn.Module) -> tuple[str, ...]:
    if network is model:
        return ()
    return tuple(name for name, child in model.named_children() if child is not network)


def _read_source(
    source: str | Path | Mapping[str, Any],
) -> tuple[dict[str, Tensor], list[str], str]:
    """Tensors by key, names of entries that are not tensors, and a name for messages."""
    content: Any
    if isinstance(source, Mapping):
        content, label = source, "a state dict"
    elif isinstance(source, str | Path):
        content, label = _read_file(Path(source)), str(source)
    else:
        raise TypeError(
            f"weights are loaded from a path or a state dict; got {type(source).__name__}."
        )
    for _ in range(_DEEPEST_WRAPPING):
        if not isinstance(content, Mapping):
            break
        wrapper = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if wrapper is None:
            break
        content = content[wrapper]
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{label} holds a {type(content).__name__}, not a state dict (tensors by name). "
            "Save one with torch.save(model.state_dict(), path)."
        )
    tensors = {
        key: value
        for key, value in content.items()
        if isinstance(key, str) and isinstance(value, Tensor)
    }
    if not tensors:
        raise ValueError(
            f"{label} holds no tensors. Its entries: {_first_few(map(repr, content)) or 'none'}. "
            f"Expected tensors by name, directly or under one of {', '.join(_WRAPPERS)}."
        )
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(
                f"{key!r} in {label} is a sparse, quantised or empty (meta) tensor. "
                "Convert it to a plain one first."
            )
    return tensors, [str(key) for key in content if key not in tensors], label


def _read_file(path: Path) -> Any:
    """Content of a checkpoint file, made of plain tensors and containers only."""
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path} (looked in {path.absolute().parent}).")
    suffix = path.suffix.lower()
    if path.is_dir() or suffix not in (".safetensors", *_TORCH_SUFFIXES):
        seen = "is a folder" if path.is_dir() else f"ends in {path.suffix!r}"
        raise ValueError(
            f"{path} {seen}. Checkpoints are files that end in .safetensors, "
            f"{', '.join(_TORCH_SUFFIXES)}."
        )
    try:
        if suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        objects = f" ({named[1]})" if named else ""
        # The cause is not chained: its text advises to run the file's code.
        raise ValueError(
            f"{path} is damaged, or holds Python objects{objects} besides tensors. Loading these "
            "could run any code, so bestta does not. Where you trust the file, save its tensors "
            "alone: torch.save(model.state_dict(), path)."
        ) from None
    except OSError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in the parser
        raise ValueError(
            f"{path} is not a readable checkpoint ({type(error).__name__}: {error}). "
            "It may be damaged or only partly downloaded."
        ) from error


def _nothing_fits(
    label: str,
    name: str,
    tensors: Mapping[str, Tensor],
    own_tensors: Mapping[str, Tensor],
    mismatched: list[Mismatch],
) -> str:
    if mismatched:
        return f"no tensor of {label} has the shape it has in {name}. {_first_few(mismatched)}."
    return (
        f"no tensor of {label} belongs to {name}.\n"
        f"The checkpoint holds: {_first_few(tensors)}.\n"
        f"{name} expects: {_first_few(own_tensors)}."
    )


def _does_not_fit(
    label: str, name: str, missing: list[str], mismatched: list[Mismatch], surplus: list[str]
) -> str:
    lines = [f"{label} does not fit {name}; the model was left as it was."]
    if missing:
        lines.append(f"Missing from the file: {_first_few(missing)}.")
    if mismatched:
        lines.append(f"Other shapes: {_first_few(mismatched)}.")
    if surplus:
        lines.append(f"Only in the file: {_first_few(surplus)}. Is it of a larger network?")
    lines.append("With strict=False, the tensors that do fit are loaded.")
    return "\n".join(lines)


def _first_few(names: Iterable[object]) -> str:
    """The first names, and how many more there are."""
    texts = [str(name) for name in names]
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
