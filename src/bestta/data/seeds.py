"""Randomness that depends on what is drawn, never on when or where it is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

Seed = int | str | Sequence[int | str]
"""Names a draw: a whole number, a word, or a sequence of them such as ``(7, "lindau_000001")``."""


def generator(*words: Seed) -> np.random.Generator:
    """A random generator that is a function of ``words`` alone.

    Frames are rendered in any order by any number of processes, so each gets a generator of its
    own, named by what it is for. Two lists of words that differ anywhere give independent streams;
    how they are nested makes no difference.

    Args:
        words: Whole numbers and strings, or sequences of them: a seed, a name, a severity.

    Example:
        >>> a, b = generator(7, "fog", 3), generator(7, "fog", 3)
        >>> bool((a.random(5) == b.random(5)).all())
        True
    """
    # In ASCII: what repr leaves unescaped depends on the letters a version of Python knows.
    digest = hashlib.blake2b(ascii(_flat(words)).encode(), digest_size=32).digest()
    # SFC64 is the quickest of NumPy's generators, and noise is most of what is drawn here.
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(list(_words32(digest)))))


def _flat(words: Seed | Sequence[Seed]) -> tuple[int | str, ...]:
    if isinstance(words, str):
        return (str(words),)
    if isinstance(words, int | np.integer) and not isinstance(words, bool):
        return (int(words),)
    if not isinstance(words, Sequence) or isinstance(words, bytes | bytearray | memoryview):
        raise TypeError(
            f"a seed is a whole number, a word, or a sequence of them such as (7, 'fog'); "
            f"this is {words!r}, a {type(words).__name__}"
        )
    return tuple(flat for word in words for flat in _flat(word))


def _words32(digest: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.frombuffer(digest, dtype="<u4")
