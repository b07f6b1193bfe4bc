"""Putting layers behind modules, listing modules, freezing: and leaving no trace."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn

import bestta
from bestta.insertion import freeze, inserted, unfreeze
from nets import Segmenter, TokenClassifier, randomise


def test_layers_lists_stages_and_blocks(segmenter):
    assert bestta.layers(segmenter) == ["layer1", "layer2", "layer3", "layer4"]


def test_layers_lists_single_operations_where_there_are_no_blocks():
    assert bestta.layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())) == ["0", "1"]


def test_layers_lists_single_operations_when_asked(segmenter):
    assert {"layer1", "layer1.0", "layer4.2", "head"} <= set(bestta.layers(segmenter, leaves=True))


def test_layers_with_an_image_lists_only_what_can_host_bein():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 1))
            self.unused = nn.Sequential(nn.Conv2d(3, 4, 1))
            self.shared = nn.Sequential(nn.Conv2d(4, 4, 1))
            self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(self.shared(self.shared(self.body(x))))

    model = Mixed().eval()
    assert bestta.layers(model) == ["body", "unused", "shared", "pool"]
    assert bestta.layers(model, torch.randn(1, 3, 8, 8)) == ["body"]


def test_lists_of_modules_never_run_and_are_not_listed():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 3, 1))])
    assert bestta.layers(model) == ["blocks.0"]


def test_an_inserted_layer_works_while_the_context_lasts_and_not_longer(segmenter):
    image = torch.randn(1, 3, 12, 12)
    plain = segmenter(image)
    with inserted(segmenter, {"layer2": lambda x: x + 1}) as runs:
        changed = segmenter(image)
    assert runs == {"layer2": 1}
    assert not torch.equal(changed, plain)
    assert torch.equal(segmenter(image), plain)


def test_an_error_in_the_forward_leaves_no_layer_behind(segmenter):
    with (
        pytest.raises(RuntimeError),
        inserted(segmenter, {"layer1": lambda x: x, "layer2": lambda x: x}),
    ):
        segmenter(torch.randn(1, 5, 12, 12))
    assert not any(m._forward_hooks for m in segmenter.modules())


def test_a_tuple_that_begins_with_features_keeps_its_other_entries():
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
            return x, "kept"

    model = nn.Sequential(Pair())
    with inserted(model, {"0": lambda x: x * 2}):
        features, word = model(torch.ones(1, 2, 3, 3))
    assert word == "kept"
    assert bool((features == 2).all())


def test_freezing_gives_back_exactly_what_was_trainable(segmenter):
    segmenter.head.weight.requires_grad_(False)
    before = [p.requires_grad for p in segmenter.parameters()]
    freeze(segmenter)
    freeze(segmenter)
    assert not any(p.requires_grad for p in segmenter.parameters())
    unfreeze(segmenter)
    assert not any(p.requires_grad for p in segmenter.parameters())
    unfreeze(segmenter)
    assert [p.requires_grad for p in segmenter.parameters()] == before


def test_a_missing_module_is_an_error_that_lists_the_layers(segmenter):
    with (
        pytest.raises(ValueError, match=r"(?s)'layer5' in Segmenter.*layer1, layer2, layer3"),
        inserted(segmenter, {"layer5": lambda x: x}),
    ):
        pass


def test_tokens_are_features_too():
    model = randomise(TokenClassifier(), seed=3)
    assert "block" in bestta.layers(model, torch.randn(1, 3, 12, 12))


def test_an_inserted_layer_is_not_seen_by_other_threads():
    """The main thread runs the model while another one is in the middle of its own forward."""
    inside, done = threading.Event(), threading.Event()

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert done.wait(timeout=30)
            return x

    model = nn.Sequential(Gate(), nn.Identity())
    seen: list[torch.Tensor] = []

    def work() -> None:
        with inserted(model, {"1": lambda x: x + 1}) as runs:
            seen.append(model(torch.zeros(1, 1, 2, 2)))
            assert runs == {"1": 1}

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(timeout=30)
    plain = model(torch.zeros(1, 1, 2, 2))
    done.set()
    thread.join()
    assert torch.equal(plain, torch.zeros(1, 1, 2, 2))
    assert torch.equal(seen[0], torch.ones(1, 1, 2, 2))


def test_a_compiled_model_is_refused_with_advice(segmenter):
    with pytest.raises(ValueError, match=r"compiled \(OptimizedModule\).*before torch.compile"):
        bestta.SourceProfile.collect(torch.compile(segmenter), [], layers="layer1")


def test_a_model_compiled_in_place_is_refused_with_advice(segmenter):
    segmenter.compile()
    with pytest.raises(ValueError, match="is compiled"):
        bestta.layers(segmenter, torch.randn(1, 3, 12, 12))


def test_a_model_born_in_inference_mode_is_refused_with_advice():
    with torch.inference_mode():
        model = Segmenter().eval()
    with pytest.raises(ValueError, match=r"inference_mode.*outside of it"):
        bestta.layers(model, torch.randn(1, 3, 12, 12))


def test_listing_layers_never_runs_a_model_in_training_mode(segmenter):
    with pytest.raises(ValueError, match="training mode"):
        bestta.layers(segmenter.train(), torch.randn(1, 3, 12, 12))


def test_a_module_is_found_under_each_of_its_names(segmenter):
    segmenter.alias = segmenter.layer2
    with inserted(segmenter, {"alias": lambda x: x}) as runs:
        segmenter(torch.randn(1, 3, 12, 12))
    assert runs == {"alias": 1}


def test_features_whose_first_axis_is_not_the_images_are_refused():
    """Tokens laid out as (N, B, C), as transformers do without batch_first."""

    class TokensFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(3, 3))

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.block(image.flatten(2).permute(2, 0, 1)).mean(0)

    model, image = TokensFirst().eval(), torch.randn(2, 3, 4, 4)
    with pytest.raises(
        ValueError, match=r"(?s)'block' returned features \(16, 2, 3\) for 2 images"
    ):
        bestta.SourceProfile.collect(model, [image], layers="block")
    assert bestta.layers(model, image) == []


def test_a_named_tuple_is_no_features_and_the_error_says_so():
    class Pair(NamedTuple):
        low: torch.Tensor
        high: torch.Tensor

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(x, x)

    model = nn.Sequential(Two())
    with (
        pytest.raises(ValueError, match="returned no tensor but a Pair of Tensor, Tensor"),
        inserted(model, {"0": lambda x: x}),
    ):
        model(torch.ones(1, 2, 3, 3))


def test_two_models_freeze_apart():
    first, second = Segmenter(), Segmenter()
    freeze(first)
    assert all(p.requires_grad for p in second.parameters())
    unfreeze(first)
