"""`benchmarks/other_models.py`: the two networks without batch norm, and their training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import bestta
from bestta.data.tensors import IMAGENET
from bestta.files import load_tensors
from bestta.training import Recipe, Training
from bestta.training.loop import CHECKPOINT, KIND
from scripts import load
from tiny import STREET, streets

other_models = load("other_models")

NAMES = ("groupnorm", "tokens")
STAGES = {
    "groupnorm": ("layer1", "layer2", "layer3", "layer4"),
    "tokens": ("stage1", "stage2", "stage3", "stage4"),
}
BLOCKS = {
    # Blocks per stage, by hand from the classes: 1, 1, 2, 2 and 2, 2, 2, 1.
    "groupnorm": [f"layer{s}.{b}" for s, n in ((1, 1), (2, 1), (3, 2), (4, 2)) for b in range(n)],
    "tokens": [
        f"stage{s}.blocks.{b}" for s, n in ((1, 2), (2, 2), (3, 2), (4, 1)) for b in range(n)
    ],
}


def network(name: str) -> nn.Module:
    """The network with random weights, in eval mode."""
    return other_models.TRAININGS[name][0].build().eval()


def images(count: int = 1, height: int = 32, width: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def small(name: str, **changes: Any) -> Recipe:
    """The recipe of a network, on eight streets of 64x32 for two epochs of two steps."""
    tiny = streets()
    return replace(
        other_models.TRAININGS[name][0],
        epochs=tiny.epochs,
        batch=tiny.batch,
        size=tiny.size,
        augment=tiny.augment,
        splits=tiny.splits,
        **changes,
    )


def training(name: str, folder: Path) -> Training:
    made: Training = other_models.TRAININGS[name][1](small(name), folder)
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(32, 64), (45, 70), (128, 256)])
def test_logits_are_as_large_as_the_images(name, size):
    with torch.no_grad():
        assert network(name)(images(2, *size)).shape == (2, 19, *size)


@pytest.mark.parametrize(("name", "norm"), [("groupnorm", nn.GroupNorm), ("tokens", nn.LayerNorm)])
def test_every_norm_is_of_the_one_kind_and_none_a_batch_norm(name, norm):
    model = network(name)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__ and not list(m.children())]
    assert norms
    assert all(type(m) is norm for m in norms)
    assert not any(isinstance(m, _BatchNorm) for m in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_a_network_is_small(name):
    assert 0.5e6 < sum(p.numel() for p in network(name).parameters()) < 0.9e6


@pytest.mark.parametrize("name", NAMES)
def test_an_image_gets_the_same_logits_alone_and_in_a_batch(name):
    model, batch = network(name), images(3)
    with torch.no_grad():
        together = model(batch)
        alone = torch.cat([model(image[None]) for image in batch])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_stages_and_blocks_are_found(name):
    found = bestta.layers(network(name), images())
    assert {*STAGES[name], *BLOCKS[name]} <= set(found)


def test_blocks_of_tokens_return_tokens_and_stages_maps():
    model = network("tokens")
    seen: dict[str, tuple[int, ...]] = {}
    for name in (*STAGES["tokens"], *BLOCKS["tokens"]):
        model.get_submodule(name).register_forward_hook(
            lambda module, given, out, name=name: seen.update({name: tuple(out.shape)})
        )
    with torch.no_grad():
        model(images(2))
    # 32x64 pixels at strides 4, 8, 16 and 32, with the widths of the four stages.
    assert [seen[name] for name in STAGES["tokens"]] == [
        (2, 32, 8, 16), (2, 64, 4, 8), (2, 96, 2, 4), (2, 128, 1, 2)
    ]  # fmt: skip
    assert seen["stage1.blocks.1"] == (2, 128, 32)
    assert seen["stage4.blocks.0"] == (2, 2, 128)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", ["first stage", "last block"])
def test_bestta_adapts_behind_a_layer_and_leaves_the_weights_alone(name, at):
    model = network(name)
    layer = STAGES[name][0] if at == "first stage" else BLOCKS[name][-1]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    profile = bestta.SourceProfile.collect(model, [images(2, seed=s) for s in (1, 2)], [layer])
    adapter = bestta.adapt(model, profile, layers=[layer])
    start = {key: value.detach().clone() for key, value in adapter.trainable.items()}
    darker = 0.3 * images(seed=3) - 1
    for _ in range(2):
        logits = adapter(darker)
    assert logits.shape == (1, 19, 32, 64)
    assert bool(logits.isfinite().all())
    assert start
    assert all(not torch.equal(value, start[key]) for key, value in adapter.trainable.items())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_attention_without_reduction_is_that_of_pytorch():
    ours = other_models.Attention(16, heads=4, reduction=1)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
        theirs.out_proj.load_state_dict(ours.project.state_dict())
        tokens = torch.randn(2, 6, 16)
        torch.testing.assert_close(ours(tokens, (2, 3)), theirs(tokens, tokens, tokens)[0])


def test_lion_steps_by_signs():
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    groups = [{"params": [weight], "lr": 0.1, "weight_decay": 0.5}]
    optimiser = other_models.Lion(groups)
    # By hand: weights shrink by the factor 1 - 0.1 * 0.5 = 0.95, then move by 0.1 against the sign
    # of 0.9 * average + 0.1 * gradient; the average becomes 0.99 * average + 0.01 * gradient.
    weight.grad = torch.tensor([[3.0, -1.0]])
    optimiser.step()  # 0.95 - 0.1, -1.9 + 0.1; averages 0.03, -0.01
    torch.testing.assert_close(weight.detach(), torch.tensor([[0.85, -1.8]]))
    weight.grad = torch.tensor([[-0.2, 0.2]])
    optimiser.step()  # 0.9 * 0.03 - 0.02 > 0 and -0.9 * 0.01 + 0.02 > 0
    torch.testing.assert_close(weight.detach(), torch.tensor([[0.7075, -1.81]]))
    average = optimiser.state[weight]["momentum_buffer"]
    torch.testing.assert_close(average, torch.tensor([[0.0277, -0.0079]]))


@pytest.mark.parametrize("name", NAMES)
def test_a_training_stopped_half_way_goes_on_to_the_same_bits(name, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert training(name, whole).run(show=False)
    while not training(name, parts).run(seconds=0, show=False):
        pass
    left, about = load_tensors(whole / CHECKPOINT, KIND)
    right, _ = load_tensors(parts / CHECKPOINT, KIND)
    # 8 images in batches of 4, twice.
    assert about["step"] == 4
    assert left.keys() == right.keys()
    assert any(key.startswith("velocity.") for key in left)
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_trained_can_be_loaded_and_is_not_trained_again(
    name, tmp_path, monkeypatch, capsys
):
    kind = other_models.TRAININGS[name][1]
    monkeypatch.setitem(other_models.TRAININGS, name, (small(name), kind))
    monkeypatch.setattr("sys.argv", ["other_models.py", "--out", str(tmp_path), "--only", name])
    assert other_models.main() == 0
    model, card = other_models.load(name, tmp_path)
    assert not model.training
    assert (card.size, card.task, len(card.classes)) == (STREET, "segmentation", 19)
    assert card.normalise == IMAGENET
    assert f"mIoU {card.scores['clean']:.2f} %" in capsys.readouterr().out
    monkeypatch.setitem(other_models.TRAININGS, name, (small(name), None))
    assert other_models.train(name, tmp_path) == card


def test_what_is_not_there_is_named_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"other_models\.py --out .* --only tokens"):
        other_models.load("tokens", tmp_path)
    with pytest.raises(ValueError, match=r"'resnet'.*groupnorm, tokens"):
        other_models.load("resnet", tmp_path)
