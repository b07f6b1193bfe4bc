"""Tensors and a description in one safetensors file: written whole or not at all, no pickle."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

if sys.platform != "win32":
    import fcntl

KEY = "bestta"


class Busy(ValueError):
    """A folder is in use by another process."""


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> None:
    """Write ``tensors`` and the JSON-able ``about`` to ``path``, which is replaced in one move.

    An interrupted write leaves the file of before; a device that loses power never
    comes back to half a state.
    """
    whole: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        # Two names of one tensor become two tensors: safetensors refuses them otherwise.
        whole[name] = value.clone() if value.data_ptr() in places else value
        places.add(value.data_ptr())
    data = safetensors.torch.save(whole, metadata={KEY: json.dumps(about)})
    write_whole(Path(path), data)


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` in one move: whoever looks finds the old file or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have ``folder`` to oneself; `Busy` if another process, or another part of this one, has it.

    The system lets go of it when the process ends, however that comes about. On systems
    without such locks nobody is kept out.
    """
    if sys.platform == "win32":
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(
                f"another process works in {folder}. Wait for it, stop it, or use another folder."
            ) from error
        yield
    finally:
        os.close(place)


def load_tensors(
    path: str | os.PathLike[str], kind: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; ``kind`` is what ``about["kind"]`` must say."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no {kind} at {path}.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(metadata[KEY])
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is no {kind}: it is no safetensors file written by bestta ({error})."
        ) from error
    seen = about.get("kind") if isinstance(about, dict) else None
    if seen != kind:
        raise ValueError(f"{path} is no {kind}: it holds {seen!r}.")
    return tensors, about
