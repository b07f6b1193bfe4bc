"""Checks of settings, made when a config is: what was wrong, and what would be right."""

from __future__ import annotations

from typing import Any


def is_number(value: Any) -> bool:
    """Whether it is a whole or a real number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def one_of(config: Any, name: str, *choices: str) -> None:
    """Raise a ValueError unless the setting ``name`` is one of ``choices``."""
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}, not {value!r}.")


def within(config: Any, low: float, high: float, *names: str) -> None:
    """Raise a ValueError unless each setting lies in ``[low, high)``."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not low <= value < high:
            raise ValueError(f"{name} must lie in [{low}, {high}), not {value!r}.")


def not_negative(config: Any, *names: str) -> None:
    """Raise a ValueError unless each setting is a number from 0 on."""
    within(config, 0, float("inf"), *names)


def fraction(config: Any, *names: str) -> None:
    """Raise a ValueError unless each setting lies from 0 to 1, both included."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not 0 <= value <= 1:
            raise ValueError(f"{name} must lie in [0, 1], not {value!r}.")


def prior_strength(config: Any, *names: str) -> None:
    """Raise a ValueError unless each setting is a number from 0 to infinity, included."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not value >= 0:
            raise ValueError(f"{name} must lie in [0, inf], not {value!r}.")


def at_least_one(config: Any, *names: str) -> None:
    """Raise a ValueError unless each setting is a whole number from 1 on."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}.")
