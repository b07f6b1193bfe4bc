"""Seeds name draws: the same words give the same stream anywhere, other words another."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

import bestta
from bestta.data.seeds import generator


def first(*words) -> list[int]:
    """The first numbers of a stream, enough to tell two apart."""
    return generator(*words).integers(2**32, size=4).tolist()


def test_the_same_words_give_the_same_stream():
    assert first(7, "fog", 3) == first(7, "fog", 3)


@pytest.mark.parametrize(
    "other",
    [
        (8, "fog", 3),
        (7, "Fog", 3),
        (7, "fog"),
        (7, "fog", 3, 0),
        (),
        ("fog", 7, 3),
        (3, "fog", 7),
        ("7", "fog", 3),
        (7, "fog", "3"),
        (7, "fo", "g", 3),
        ("7, 'fog', 3",),
        (-7, "fog", 3),
        (7 + 2**64, "fog", 3),
    ],
)
def test_any_difference_gives_another_stream(other):
    assert first(*other) != first(7, "fog", 3)


@pytest.mark.parametrize("nested", [((7, "fog"), 3), ([7, ["fog"]], 3), (7, ("fog", (3,)), [])])
def test_how_words_are_nested_makes_no_difference(nested):
    assert first(*nested) == first(7, "fog", 3)


def test_numbers_and_words_of_numpy_are_taken_for_what_they_say():
    for number in (np.int64(7), np.uint8(7), np.int16(7)):
        assert first(number, np.str_("fog"), 3) == first(7, "fog", 3)


# The package itself imports PyTorch, which takes seconds and is not needed here.
FIRST = """
import sys, types
sys.modules["bestta"] = types.ModuleType("bestta")
sys.modules["bestta"].__path__ = [sys.argv[1]]
from bestta.data.seeds import generator
generator("anything else").random(10)
print(generator(7, "fog", 3).integers(2**32, size=4).tolist())
"""


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_with_other_hashes_gives_the_same_stream(hash_seed):
    done = subprocess.run(
        [sys.executable, "-c", FIRST, *bestta.__path__],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(first(7, "fog", 3))


@pytest.mark.parametrize(
    ("seed", "seen"),
    [
        (1.5, r"1\.5, a float"),
        (None, "None, a NoneType"),
        (True, "True, a bool"),
        (b"fog", "b'fog', a bytes"),
        (bytearray(b"fog"), "a bytearray"),
        ({1, 2}, "a set"),
        ((7, None), "None, a NoneType"),
        (("a", [np.float32(2)]), "a float32"),
    ],
)
def test_what_is_no_seed_is_refused_with_what_a_seed_is(seed, seen):
    with pytest.raises(
        TypeError, match=rf"(?s)whole number, a word, or a sequence.*this is.*{seen}"
    ):
        generator(seed)


def test_letters_younger_than_some_versions_of_python_draw_the_same_in_all():
    """U+1FAE8 came with Unicode 15: Python 3.12 prints it, 3.11 escapes it.

    The expected numbers come from the digest of the escaped text, as both versions write it.
    """
    text = b"('\\U0001fae8.png',)"
    words = np.frombuffer(hashlib.blake2b(text, digest_size=32).digest(), "<u4")
    expected = np.random.Generator(np.random.SFC64(np.random.SeedSequence(list(words))))
    assert generator("\U0001fae8.png").integers(2**62) == expected.integers(2**62)
