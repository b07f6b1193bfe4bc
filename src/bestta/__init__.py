"""Single-image continual test-time adaptation: vision models that survive the weather.

profile = bestta.SourceProfile.collect(model, images, layers=["backbone.layer3"])
adapter = bestta.adapt(model, profile)
logits = adapter(image)
"""

from __future__ import annotations

import importlib
from typing import Any

from bestta._version import __version__
from bestta.adapters import adapt, methods, prepare
from bestta.bein import BeIN, bein
from bestta.calibration import calibrate
from bestta.insertion import layers
from bestta.profile import SourceProfile

__all__ = [
    "BeIN",
    "SourceProfile",
    "__version__",
    "adapt",
    "bein",
    "calibrate",
    "layers",
    "methods",
    "prepare",
]

_PARTS = ("data", "metrics", "models", "protocols", "training")


def __getattr__(name: str) -> Any:
    """``bestta.models`` and its like, imported when they are first asked for."""
    if name in _PARTS:
        return importlib.import_module(f"bestta.{name}")
    raise AttributeError(f"module 'bestta' has no attribute {name!r}")
