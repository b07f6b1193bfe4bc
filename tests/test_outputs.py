"""Finding the logits: what is unclear is an error that says what the model returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from bestta.outputs import select_logits


@dataclass
class Output:
    logits: torch.Tensor
    loss: float = 0.0


def test_attributes_are_entries_too():
    logits = torch.zeros(1, 3)
    assert select_logits(Output(logits)) is logits
    assert select_logits(Output(logits), "logits") is logits


def test_the_logits_of_a_named_tuple_are_found_by_name():
    class Named(NamedTuple):
        features: torch.Tensor
        logits: torch.Tensor

    output = Named(torch.zeros(1, 3), torch.zeros(1, 5))
    assert select_logits(output) is output.logits
    assert select_logits(output, "features") is output.features
    assert select_logits(output, 0) is output.features


def test_logits_come_before_out():
    output = {"out": torch.zeros(1, 3), "logits": torch.zeros(1, 5)}
    assert select_logits(output) is output["logits"]


@pytest.mark.parametrize(
    ("output", "key", "words"),
    [
        ({"a": torch.zeros(1, 2), "b": torch.zeros(1, 2)}, None, "keys 'a', 'b'.*output="),
        ({"a": torch.zeros(1, 2)}, "out", "no entry 'out'.*keys 'a'"),
        ((torch.zeros(1, 2),), 3, "no entry 3.*tuple of 1"),
        (torch.zeros(1, 2), "out", "no entry 'out'.*float32 tensor"),
        (None, None, "cannot tell.*NoneType"),
        (("x", 1), None, "cannot tell.*tuple of 2"),
        (torch.zeros(2, 3, 4), None, r"\(B, K\).*\(2, 3, 4\)"),
        (torch.zeros(2, 3).long(), None, "int64 tensor.*not a tensor of logits"),
        ({"out": 5}, "out", "'out' is a int"),
    ],
)
def test_an_unclear_output_is_an_error_that_says_what_was_returned(output, key, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        select_logits(output, key)
