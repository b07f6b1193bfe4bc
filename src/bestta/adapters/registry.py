"""Which methods there are, and how one is made from a name, a preset and settings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from torch import nn

from bestta.adapters.base import Adapter
from bestta.insertion import check_model
from bestta.profile import SourceProfile

_methods: dict[str, type[Adapter]] = {}

AnyAdapter = TypeVar("AnyAdapter", bound=Adapter)


def register_adapter(name: str) -> Callable[[type[AnyAdapter]], type[AnyAdapter]]:
    """Make a method known as ``bestta.adapt(model, method=name)``."""

    def register(adapter: type[AnyAdapter]) -> type[AnyAdapter]:
        if name in _methods:
            raise ValueError(f"there is a method {name!r} already: {_methods[name].__name__}.")
        adapter.name = name
        _methods[name] = adapter
        return adapter

    return register


def methods() -> list[str]:
    """Names of the methods that `adapt` knows."""
    return sorted(_methods)


def adapt(
    model: nn.Module,
    profile: SourceProfile | str | os.PathLike[str] | None = None,
    *,
    method: str = "bestta",
    preset: str | None = None,
    **settings: Any,
) -> Adapter:
    """Wrap ``model`` so that it adapts to every image it predicts.

    Args:
        model: Any model in eval mode. Its parameters are frozen and never change.
        profile: What is known of the source (`SourceProfile`), or the file it was saved to.
            A method that needs nothing from the source takes none.
        method: One of `methods`.
        preset: ``"segmentation"`` or ``"classification"``; by default told from the model's logits.
        **settings: Any setting of the method by name. What is named here wins over the
            profile's settings, and those win over the preset's.

    Returns:
        The adapter: ``adapter(image)`` predicts, and has adapted.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
        >>> profile = SourceProfile.collect(model, torch.rand(5, 3, 8, 8), layers=["1"])
        >>> adapter = adapt(model, profile)
        >>> adapter(torch.rand(1, 3, 8, 8)).shape, adapter.last.adapted
        (torch.Size([1, 2, 6, 6]), True)
    """
    check_model(model)
    known: type[Adapter] = _lookup(method, _methods, "method")
    if isinstance(profile, str | os.PathLike):
        profile = SourceProfile.load(profile)
    if profile is None and known.needs_profile:
        raise ValueError(
            f"method {method!r} needs a source profile: "
            "bestta.SourceProfile.collect(model, images, layers=[…]) makes one."
        )
    if profile is not None and not isinstance(profile, SourceProfile):
        raise ValueError(f"profile must be a SourceProfile, not {type(profile).__name__}.")
    names = [f.name for f in fields(known.Config)]
    chosen: dict[str, Any] = {}
    if preset is None and profile is not None and profile.task in known.presets:
        preset = profile.task
    if preset is not None:
        chosen.update(_lookup(preset, known.presets, f"preset of {method!r}"))
    if profile is not None:
        chosen.update(output=profile.output)
        chosen.update(profile.settings.get(method, {}))
    chosen.update(settings)
    for name in chosen:
        _lookup(name, dict.fromkeys(names), f"setting of {method!r}")
    return known(model, profile, known.Config(**chosen))


def _lookup(name: str, table: Any, what: str) -> Any:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), list(table), n=1)
    raise ValueError(
        f"no {what} is called {name!r}."
        + (f" Did you mean {near[0]!r}?" if near else "")
        + f" There are: {', '.join(table) or 'none'}."
    )
