"""The methods, one file each. Importing this package registers them all."""

from bestta.adapters import bestta, source
from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.registry import adapt, methods, register_adapter

__all__ = [
    "Adapter",
    "AdapterConfig",
    "StepReport",
    "adapt",
    "bestta",
    "methods",
    "register_adapter",
    "source",
]
