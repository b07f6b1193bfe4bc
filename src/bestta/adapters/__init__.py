"""The methods, one file each. Importing this package registers them all."""

from bestta.adapters import (
    alpha_bn,
    bestta,
    bn_ema,
    bn_stats,
    cotta,
    eata,
    ecotta,
    memo,
    petal,
    rotta,
    sar,
    source,
    tent,
    tent_reset,
)
from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.registry import adapt, methods, prepare, register_adapter

__all__ = [
    "Adapter",
    "AdapterConfig",
    "StepReport",
    "adapt",
    "alpha_bn",
    "bestta",
    "bn_ema",
    "bn_stats",
    "cotta",
    "eata",
    "ecotta",
    "memo",
    "methods",
    "petal",
    "prepare",
    "register_adapter",
    "rotta",
    "sar",
    "source",
    "tent",
    "tent_reset",
]
