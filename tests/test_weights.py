"""Loading checkpoints: every wrapping, every prefix, and every way to go wrong."""

import os
import pickle
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bestta.models import DeepLabV3Plus, EfficientNetLite0, ResNet50, WideResNet, load_weights
from test_models import (
    Shapes,
    lite0_public_shapes,
    lite0_shapes,
    resnet50_shapes,
    wide_resnet_shapes,
)

State = dict[str, Tensor]


def random_state(shapes: Shapes, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=generator)
        if not name.endswith("num_batches_tracked")
        else torch.tensor(seed + 7)
        for name, shape in shapes.items()
    }


def copy_of(model: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []


def small_network(seed: int = 0, classes: int = 3) -> WideResNet:
    torch.manual_seed(seed)
    return WideResNet(depth=10, width=1, classes=classes)


@pytest.fixture
def small() -> WideResNet:
    return small_network()


@pytest.fixture
def small_state() -> State:
    """A checkpoint for `small`, made without it."""
    return random_state(wide_resnet_shapes(blocks=1, width=1, classes=3), seed=1)


@pytest.fixture(scope="module")
def torchvision_state() -> State:
    """What torchvision would have saved for ResNet-50: all names, random values."""
    return random_state(resnet50_shapes() | {"fc.weight": (1000, 2048), "fc.bias": (1000,)})


@pytest.fixture(scope="module")
def lite0_state() -> State:
    return random_state(lite0_public_shapes())


# Forms that load


WRAPPERS = {
    "bare": lambda state: state,
    "ordered": OrderedDict,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model": lambda state: {"model": state, "optimizer": {"lr": 0.1}},
    "model_state": lambda state: {"model_state": state},
    "model_state_dict": lambda state: {"model_state_dict": state, "loss": 0.5},
    "nested": lambda state: {"model": {"state_dict": state}},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("suffix", [None, ".pt", ".pth", ".pth.tar", ".ckpt", ".bin"])
def test_a_checkpoint_loads_from_every_wrapper(small, small_state, wrapper, suffix, tmp_path):
    source = WRAPPERS[wrapper](small_state)
    if suffix is not None:
        path = tmp_path / f"checkpoint{suffix}"
        torch.save(source, path)
        source = path
    report = load_weights(small, source)
    assert_same(small.state_dict(), small_state)
    assert set(report.matched) == set(small_state)
    assert report.missing == report.unexpected == report.mismatched == ()


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "module.model.", "_orig_mod.module."]
)
def test_a_checkpoint_loads_under_every_prefix(small, small_state, prefix, tmp_path):
    path = str(tmp_path / "checkpoint.safetensors")
    save_file({prefix + name: tensor for name, tensor in small_state.items()}, path)
    report = load_weights(small, path)
    assert_same(small.state_dict(), small_state)
    assert report.source == path


def test_a_saved_network_gives_the_same_logits_once_loaded(tmp_path):
    saved, loaded = small_network(seed=1).eval(), small_network(seed=2).eval()
    torch.save(saved.state_dict(), tmp_path / "saved.pt")
    load_weights(loaded, tmp_path / "saved.pt")
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(x), saved(x))


def test_torchvision_file_loads_into_resnet50_without_its_classifier(torchvision_state, tmp_path):
    path = tmp_path / "resnet50-0676ba61.pth"
    torch.save(torchvision_state, path)
    model = ResNet50(output_stride=16)
    report = load_weights(model, path)
    assert_same(model.state_dict(), {name: torchvision_state[name] for name in resnet50_shapes()})
    # 53 convolutions and 53 batch norms of five tensors each.
    assert (
        str(report)
        == f"318 of 318 tensors of ResNet50 loaded from {path}; ignored fc.weight, fc.bias"
    )


def test_bare_resnet50_goes_to_the_backbone_of_deeplab_and_nowhere_else(torchvision_state):
    model = DeepLabV3Plus("resnet50")
    before = copy_of(model)
    report = load_weights(model, torchvision_state)
    after = model.state_dict()
    for name in before:
        expected = before[name]
        if name.startswith("backbone."):
            expected = torchvision_state[name.removeprefix("backbone.")]
        assert torch.equal(after[name], expected), name
    assert set(report.matched) == {f"backbone.{name}" for name in resnet50_shapes()}
    assert report.untouched == ("aspp", "decoder")
    assert "318 of 318 tensors of DeepLabV3Plus.backbone (ResNet50)" in str(report)
    assert "aspp and decoder keep their initial values" in str(report)


def test_public_lite0_file_loads_under_the_encoders_own_names(lite0_state, tmp_path):
    path = tmp_path / "efficientnet-lite0.pth"
    torch.save(lite0_state, path)
    model = EfficientNetLite0()
    report = load_weights(model, path)
    # `lite0_shapes` lists the same tensors in the same order, head left out.
    head = [key for key in lite0_state if key.startswith(("_conv_head.", "_bn1.", "_fc."))]
    values = [tensor for key, tensor in lite0_state.items() if key not in head]
    assert_same(model.state_dict(), dict(zip(lite0_shapes(), values, strict=True)))
    # 48 convolutions (the stem, 2 in the first block, 3 in each of the 15 others) and as many
    # batch norms of five tensors each.
    assert len(report.matched) == 48 * 6
    assert list(report.ignored) == head
    assert len(head) == 8


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "encoder.", "model.encoder."])
def test_public_lite0_goes_to_the_backbone_of_deeplab_under_any_prefix(lite0_state, prefix):
    model = DeepLabV3Plus("efficientnet_lite0")
    report = load_weights(model, {prefix + key: value for key, value in lite0_state.items()})
    assert len(report.matched) == 48 * 6
    assert report.missing == report.unexpected == ()
    loaded = model.backbone.layer4[4].project_conv.weight
    assert torch.equal(loaded, lite0_state["_blocks.15._project_conv.weight"])


def test_deeplab_round_trips_whole_and_its_encoder_can_be_taken_out(tmp_path):
    torch.manual_seed(1)
    saved = DeepLabV3Plus("efficientnet_lite0", classes=4)
    path = tmp_path / "deeplab.safetensors"
    save_file(saved.state_dict(), path)

    whole = DeepLabV3Plus("efficientnet_lite0", classes=4)
    report = load_weights(whole, path)
    assert_same(whole.state_dict(), saved.state_dict())
    assert report.untouched == ()

    encoder = EfficientNetLite0(output_stride=8)
    report = load_weights(encoder, path)
    assert_same(encoder.state_dict(), saved.backbone.state_dict())
    assert all(name.startswith(("aspp.", "decoder.")) for name in report.unexpected)
    assert report.unexpected != ()


def test_batch_counters_that_old_files_lack_are_ignored(small, small_state):
    old = {name: value for name, value in small_state.items() if "num_batches" not in name}
    counters = set(small_state) - set(old)
    report = load_weights(small, old)
    assert report.missing == ()
    assert set(report.ignored) == counters
    assert all(int(small.state_dict()[name]) == 0 for name in counters)


def test_the_unused_branch_of_some_robustbench_files_is_ignored(small, small_state):
    extra = {"sub_block1.layer.0.conv1.weight": torch.zeros(1)}
    assert load_weights(small, small_state | extra).ignored == tuple(extra)


def test_entries_that_are_no_tensors_are_ignored(small, small_state):
    assert load_weights(small, {**small_state, "epoch": 3}).ignored == ("epoch",)


def test_half_precision_files_load_into_single_precision(small, small_state):
    load_weights(small, {name: tensor.half() for name, tensor in small_state.items()})
    assert small.fc.weight.dtype == torch.float32
    assert torch.equal(small.fc.weight, small_state["fc.weight"].half().float())


def test_any_module_can_be_loaded():
    report = load_weights(nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    assert str(report) == "2 of 2 tensors of Linear loaded from a state dict"


# Checkpoints that do not fit


def without_a_tensor(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name != "block2.layer.0.bn1.bias"}


def with_other_classes(state: State) -> State:
    return state | {"fc.weight": torch.zeros(7, 64), "fc.bias": torch.zeros(7)}


def of_a_deeper_network(state: State) -> State:
    return random_state(wide_resnet_shapes(blocks=2, width=1, classes=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_tensor, r"Missing from the file: block2\.layer\.0\.bn1\.bias\."),
        (with_other_classes, r"fc\.weight is \(7, 64\) in the file but \(3, 64\) here"),
        (of_a_deeper_network, r"Only in the file: block1\.layer\.1\..*larger network\?"),
    ],
)
def test_strict_loading_names_the_misfit_and_leaves_the_model_bit_identical(
    small, small_state, change, message
):
    before = copy_of(small)
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(small, change(small_state))
    assert "strict=False" in str(caught.value)
    assert_same(small.state_dict(), before)


def test_lenient_loading_takes_what_fits_and_reports_the_rest(small, small_state):
    before = copy_of(small)
    changed = with_other_classes(without_a_tensor(small_state)) | {"extra.weight": torch.ones(1)}
    report = load_weights(small, changed, strict=False)
    assert report.missing == ("block2.layer.0.bn1.bias",)
    assert report.unexpected == ("extra.weight",)
    assert [tuple(misfit) for misfit in report.mismatched] == [
        ("fc.weight", (7, 64), (3, 64)),
        ("fc.bias", (7,), (3,)),
    ]
    kept = {"block2.layer.0.bn1.bias", "fc.weight", "fc.bias"}
    assert set(report.matched) == set(small_state) - kept
    for name, tensor in small.state_dict().items():
        expected = before[name] if name in kept else small_state[name]
        assert torch.equal(tensor, expected), name
    total = len(small_state)
    assert str(report).startswith(f"{total - 3} of {total} tensors of WideResNet loaded")


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_another_network_is_always_refused_with_both_sides_keys(small, strict):
    before = copy_of(small)
    with pytest.raises(ValueError, match="belongs to WideResNet") as caught:
        load_weights(small, {"stages.0.gamma": torch.ones(2)}, strict=strict)
    assert "The checkpoint holds: stages.0.gamma." in str(caught.value)
    assert "WideResNet expects: conv1.weight, block1.layer.0.bn1.weight" in str(caught.value)
    assert_same(small.state_dict(), before)


def test_a_checkpoint_in_which_every_shape_differs_is_refused():
    with pytest.raises(ValueError, match=r"weight is \(3, 2\) in the file but \(1, 2\) here"):
        load_weights(nn.Linear(2, 1, bias=False), {"weight": torch.ones(3, 2)}, strict=False)


def test_two_keys_for_one_tensor_are_refused(small, small_state):
    with pytest.raises(ValueError, match=r"twice, as 'fc\.bias' and 'module\.fc\.bias'"):
        load_weights(small, small_state | {"module.fc.bias": torch.zeros(3)})


def test_a_deeplab_of_other_classes_is_refused_by_shape_and_not_taken_for_an_encoder():
    model = DeepLabV3Plus("efficientnet_lite0", classes=4)
    other = DeepLabV3Plus("efficientnet_lite0", classes=19).state_dict()
    with pytest.raises(ValueError, match=r"decoder\.classifier\.weight is \(19, 256, 1, 1\) in"):
        load_weights(model, other)


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, {"state_dict": {}}])
def test_a_checkpoint_without_tensors_is_refused(small, content):
    with pytest.raises(ValueError, match="holds no tensors"):
        load_weights(small, content)


def test_sparse_tensors_are_refused_before_anything_changes(small, small_state):
    before = copy_of(small)
    small_state["fc.weight"] = small_state["fc.weight"].to_sparse()
    with pytest.raises(ValueError, match=r"'fc\.weight' in a state dict is a sparse"):
        load_weights(small, small_state)
    assert_same(small.state_dict(), before)


# Files that are no checkpoints


class RunsCode:
    """Creates a folder when unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return (os.mkdir, (self.folder,))


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_code_in_a_file_is_refused_and_never_run(small, small_state, writer, tmp_path):
    path, trace = tmp_path / "checkpoint.pt", tmp_path / "code-was-run"
    content = {"state_dict": small_state, "trap": RunsCode(trace)}
    if writer == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match=r"holds Python objects.* could run any code"):
        load_weights(small, path)
    assert not trace.exists()


def test_a_pickled_module_is_refused_and_its_class_named(small, tmp_path):
    torch.save(small, tmp_path / "whole.pt")
    with pytest.raises(ValueError, match=r"\(bestta\.models\.wide_resnet\.WideResNet\)"):
        load_weights(small, tmp_path / "whole.pt")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".tar", ".safetensors"])
@pytest.mark.parametrize("content", ["empty", "text", "cut"])
def test_damaged_files_are_refused(small, small_state, suffix, content, tmp_path):
    path = tmp_path / f"damaged{suffix}"
    if suffix == ".safetensors":
        save_file(small_state, path)
    else:
        torch.save(small_state, path)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"hello, checkpoint", "cut": whole[:-900]}[content])
    before = copy_of(small)
    with pytest.raises(ValueError, match="damaged"):
        load_weights(small, path)
    assert_same(small.state_dict(), before)


def test_a_file_that_holds_a_list_is_refused(small, tmp_path):
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, not a state dict"):
        load_weights(small, tmp_path / "list.pt")


def test_a_missing_file_is_named(small, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere\.pt"):
        load_weights(small, tmp_path / "nowhere.pt")


def test_folders_and_other_suffixes_are_refused_with_the_ones_that_work(small, tmp_path):
    with pytest.raises(ValueError, match=r"is a folder\. .*\.safetensors, \.pt, \.pth, \.tar"):
        load_weights(small, tmp_path)
    (tmp_path / "weights.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"ends in '\.npz'\. .*\.safetensors"):
        load_weights(small, tmp_path / "weights.npz")


def test_a_source_of_another_type_is_refused(small):
    with pytest.raises(TypeError, match="a path or a state dict; got WideResNet"):
        load_weights(small, small)
