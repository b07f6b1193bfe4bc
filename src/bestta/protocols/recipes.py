"""Recipes for streams: the paper's protocols and their relatives.

A protocol says which domains follow each other, how often, and in which order their images come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bestta.data.acdc import Acdc
from bestta.data.cifar10 import Cifar10C
from bestta.data.corruptions import CORRUPTIONS, Corruption, Family
from bestta.data.samples import ImageSet
from bestta.data.seeds import generator
from bestta.data.weather import CONDITIONS, Weather
from bestta.protocols.stream import Domain, Stream

Plan = np.ndarray[Any, np.dtype[np.int64]]

GRADUAL = ("brightness", "fog", "frost", "snow")
"""The corruptions of the paper's gradual protocol, in its order."""

UP_AND_DOWN = (1, 2, 3, 4, 5, 4, 3, 2, 1)
"""The severities that each of them goes through."""


def single(images: ImageSet, name: str | None = None) -> Stream:
    """One block: the images as they are, in their order."""
    return continual([Domain(name or images.kind, images)], rounds=1)


def continual(
    domains: Iterable[Domain],
    *,
    rounds: int = 10,
    shuffle: bool = False,
    seed: int = 0,
    redraw: bool = False,
) -> Stream:
    """The domains one after another, and all over again ``rounds`` times.

    The paper's continual protocol is fog → night → rain → snow, ten rounds, unshuffled.

    Args:
        domains: The conditions, in order; see :func:`weather`, :func:`corruptions` and
            :func:`acdc`.
        rounds: How often the list is gone through.
        shuffle: Whether the images of each block come in a random order (of ``seed`` and block).
        seed: What shuffling and rendering draw from.
        redraw: Whether each round draws its weather anew; else every round shows the same frames.
    """
    domains = _some(domains)
    _at_least_one(rounds)
    blocks = []
    for round_ in range(rounds):
        for number, domain in enumerate(domains):
            order = np.arange(len(domain.images))
            if shuffle:
                generator(seed, "order", round_, number).shuffle(order)
            blocks.append((domain.name, round_, _plan(number, order)))
    return Stream(domains, blocks, seed=seed, redraw=redraw)


def gradual(
    images: ImageSet,
    corruptions: Sequence[str] = GRADUAL,
    *,
    severities: Sequence[int] = UP_AND_DOWN,
    family: Family = "imagenet",
    seed: int = 0,
) -> Stream:
    """Each corruption swells and fades: severities 1 to 5 and back, then the next one.

    The paper's: brightness, fog, frost, snow over Cityscapes, nine blocks each. A sample looks the
    same on the way down as on the way up.
    """
    domains = [
        Domain(f"{name}-{severity}", images, Corruption(name, severity, family))
        for name in _list(corruptions)
        for severity in severities
    ]
    return continual(domains, rounds=1, seed=seed)


def mixed(
    domains: Iterable[Domain], *, rounds: int = 1, seed: int = 0, redraw: bool = False
) -> Stream:
    """All images of all domains in one random order: the condition changes with every frame.

    Each round is one block, shuffled in its own way; a frame's ``domain`` tells where it is from.
    """
    domains = _some(domains)
    _at_least_one(rounds)
    everything = np.concatenate(
        [_plan(number, np.arange(len(domain.images))) for number, domain in enumerate(domains)]
    )
    blocks = [
        ("mixed", round_, generator(seed, "mixed", round_).permutation(everything))
        for round_ in range(rounds)
    ]
    return Stream(domains, blocks, seed=seed, redraw=redraw)


def cifar10c(
    images: ImageSet | str | Path,
    *,
    severity: int = 5,
    order: Sequence[str] = CORRUPTIONS,
    seed: int = 0,
) -> Stream:
    """The 15 corruptions of CIFAR-10-C in the paper's order, one block each, one pass.

    Args:
        images: A folder with the official CIFAR-10-C files; or clean images, such as
            ``Cifar10(path)``, from which the corruptions are rendered with the same constants.
        severity: 1 to 5; the paper reports 5.
        order: The corruptions, in order.
        seed: What rendering draws from; the official files are as they are.
    """
    if isinstance(images, ImageSet):
        domains = corruptions(images, order, severity=severity, family="cifar")
    else:
        domains = [Domain(name, Cifar10C(images, name, severity)) for name in _list(order)]
    return continual(domains, rounds=1, seed=seed)


def weather(
    images: ImageSet, conditions: Sequence[str] = CONDITIONS, *, severity: int = 3
) -> list[Domain]:
    """The images in simulated fog, night, rain and snow."""
    return [Domain(name, images, Weather(name, severity)) for name in _list(conditions)]


def corruptions(
    images: ImageSet,
    names: Sequence[str] = CORRUPTIONS,
    *,
    severity: int = 5,
    family: Family = "imagenet",
) -> list[Domain]:
    """The images under each corruption."""
    return [Domain(name, images, Corruption(name, severity, family)) for name in _list(names)]


def acdc(
    root: str | Path,
    conditions: Sequence[str] = CONDITIONS,
    *,
    split: str = "train",
    size: tuple[int, int] | None = None,
) -> list[Domain]:
    """ACDC's conditions in the paper's order: photographs, nothing rendered."""
    return [Domain(name, Acdc(root, name, split, size=size)) for name in _list(conditions)]


def _plan(domain: int, order: Plan) -> Plan:
    return np.stack([np.full_like(order, domain), order], axis=1)


def _some(domains: Iterable[Domain]) -> list[Domain]:
    if isinstance(domains, ImageSet):
        raise TypeError(
            f"expected domains, got {domains!r}; weather(images), corruptions(images) or "
            "[Domain(name, images)] make domains of a set"
        )
    domains = list(domains)
    if not domains:
        raise ValueError("a stream needs at least one domain, got none")
    for domain in domains:
        if not isinstance(domain, Domain):
            raise TypeError(f"expected domains, got {type(domain).__name__}: {domain!r:.80}")
    return domains


def _list(names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str):
        raise TypeError(f"expected a list of names, got one name; [{names!r}] is a list of one")
    return names


def _at_least_one(rounds: int) -> None:
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, got {rounds}")
