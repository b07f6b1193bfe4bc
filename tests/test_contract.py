"""What every registered method promises, on a classifier, a segmenter and a token model.

A new method is tested by being registered.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import bestta
from bestta import SourceProfile
from bestta.adapters.base import is_finite
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream

NETS = {
    "segmenter": (Segmenter, ["layer1", "layer3"], (5, 12, 12)),
    "classifier": (Classifier, ["layer2"], (4,)),
    "tokens": (TokenClassifier, ["block"], (4,)),
}
FOG = {"shift": 1.5, "scale": 0.4}


@pytest.fixture(params=bestta.methods())
def method(request) -> str:
    return request.param


@pytest.fixture(params=NETS)
def net(request) -> tuple[nn.Module, SourceProfile, tuple[int, ...]]:
    build, layers, shape = NETS[request.param]
    model = randomise(build(), seed=11)
    return model, SourceProfile.collect(model, stream(6, seed=3), layers=layers), shape


@pytest.mark.parametrize("batch", [1, 4])
def test_it_returns_logits_without_a_graph(method, net, batch):
    model, profile, shape = net
    adapter = bestta.adapt(model, profile, method=method)
    logits = adapter(stream(1, seed=7, batch=batch, **FOG)[0])
    assert logits.shape == (batch, *shape)
    assert not logits.requires_grad


@pytest.mark.parametrize("batch", [1, 4])
def test_it_leaves_the_model_untouched(method, net, batch):
    model, profile, _ = net
    before, image = snapshot(model), stream(1, seed=5)[0]
    plain = model(image)
    adapter = bestta.adapt(model, profile, method=method)
    for frame in stream(5, seed=7, batch=batch, **FOG):
        adapter(frame)
    adapter.remove()
    assert same(before, snapshot(model))
    assert torch.equal(model(image), plain)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(m.training for m in model.modules())


def test_paused_it_is_the_source_model_bit_for_bit(method, net):
    model, profile, _ = net
    images = stream(4, seed=7, **FOG)
    with torch.no_grad():
        plain = [model(image) for image in images]
    adapter = bestta.adapt(model, profile, method=method)
    adapter(images[0])
    state = adapter.state()
    with adapter.paused():
        assert all(torch.equal(adapter(x), y) for x, y in zip(images, plain, strict=True))
        assert adapter.last.skipped
        assert adapter.last.reason == "paused"
        with torch.no_grad():
            assert torch.equal(model(images[1]), plain[1])
    assert same(state, adapter.state())


def test_pauses_may_be_nested(method, net):
    model, profile, _ = net
    adapter = bestta.adapt(model, profile, method=method)
    with adapter.paused():
        with adapter.paused():
            pass
        adapter(stream(1, seed=7)[0])
        assert adapter.last.reason == "paused"
    adapter(stream(1, seed=7)[0])
    assert adapter.last.reason != "paused"


def test_only_the_parameters_it_lists_are_trained(method, net):
    model, profile, _ = net
    adapter = bestta.adapt(model, profile, method=method)
    for image in stream(5, seed=7, **FOG):
        adapter(image)
    listed = set(map(id, adapter.trainable.values()))
    others = [p for p in model.parameters() if id(p) not in listed]
    assert not any(p.requires_grad for p in others)
    assert adapter.last.adapted == bool(adapter.trainable)


def test_a_stopped_stream_goes_on_as_if_it_had_not_been(method, net, tmp_path):
    model, profile, _ = net
    images = stream(8, seed=7, **FOG)
    whole = bestta.adapt(model, profile, method=method)
    predictions = [whole(image) for image in images]
    first = bestta.adapt(model, profile, method=method, seed=5)
    torch.rand(7, generator=first.generator)  # as a method that draws would
    for image in images[:3]:
        first(image)
    first.save(tmp_path / "state")
    second = bestta.adapt(model, profile, method=method)
    second.load(tmp_path / "state")
    assert torch.equal(first.generator.get_state(), second.generator.get_state())
    rest = [second(image) for image in images[3:]]
    assert all(torch.equal(a, b) for a, b in zip(predictions[3:], rest, strict=True))
    assert same(whole.state(), second.state())


def test_reset_is_the_exact_starting_point(method, net):
    model, profile, _ = net
    adapter = bestta.adapt(model, profile, method=method)
    start = adapter.state()
    first = [adapter(image) for image in stream(4, seed=7, **FOG)]
    adapter.reset()
    assert same(start, adapter.state())
    assert adapter.last.reason == "reset"
    second = [adapter(image) for image in stream(4, seed=7, **FOG)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_adapts_the_same_where_gradients_are_off(method, net, mode):
    model, profile, _ = net
    usual = bestta.adapt(model, profile, method=method)
    off = bestta.adapt(model, profile, method=method)
    for image in stream(3, seed=7, **FOG):
        expected = usual(image)
        with mode():
            # A tensor born in inference mode cannot be differentiated through.
            assert torch.equal(off(image * 1), expected)
        assert off.last.adapted == usual.last.adapted
    assert same(usual.state(), off.state())


class Skip(nn.Module):
    """Multiplies features with the image itself, so that the backward needs the image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 3, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layer1(image) * image


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_everything_may_happen_where_gradients_are_off(method, mode, tmp_path):
    model = randomise(Skip(), seed=11)
    with mode():
        images = [torch.randn(1, 3, 8, 8) for _ in range(4)]
        profile = SourceProfile.collect(model, images, layers=["layer1"])
        adapter = bestta.adapt(model, profile, method=method)
        for image in images:
            adapter(image)
            assert adapter.last.adapted == bool(adapter.trainable)
        adapter.save(tmp_path / "state")
        adapter.reset()
        adapter.load(tmp_path / "state")
        adapter(images[0])
    adapter(torch.randn(1, 3, 8, 8))
    assert adapter.last.adapted == bool(adapter.trainable)


def test_a_frame_with_bad_pixels_leaves_no_trace(method, net):
    model, profile, _ = net
    adapter = bestta.adapt(model, profile, method=method)
    for image in stream(2, seed=7, **FOG):
        adapter(image)
    state = adapter.state()
    bad = stream(1, seed=7)[0]
    bad[0, 0, 0, 0] = float("nan")
    answer = adapter(bad)
    assert torch.equal(answer.nan_to_num(), model(bad).nan_to_num())
    assert adapter.last.skipped
    assert same(state, adapter.state())


@pytest.mark.parametrize("factor", [0.0, 1e20, 1e37])
def test_a_finite_frame_never_leaves_a_state_that_is_not(method, net, factor):
    model, profile, _ = net
    images = stream(6, seed=7, **FOG)
    adapter = bestta.adapt(model, profile, method=method)
    for image in images[:3]:
        adapter(image)
    before = adapter.state()
    adapter(images[0] * factor)
    if adapter.last.rolled_back:
        assert same(before, adapter.state())
    assert all(bool(v.isfinite().all()) for v in adapter.state().values())
    for image in images[3:]:
        assert bool(adapter(image).isfinite().all())


def test_an_error_in_the_model_leaves_the_state_as_it_was(method):
    class Breaks(Segmenter):
        broken = False

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise KeyboardInterrupt
            return super().forward(image)

    model = randomise(Breaks(), seed=11)
    profile = SourceProfile.collect(model, stream(6, seed=3), layers="layer2")
    adapter = bestta.adapt(model, profile, method=method)
    adapter(stream(1, seed=7)[0])
    before, report = adapter.state(), adapter.last
    model.broken = True
    with pytest.raises(KeyboardInterrupt):
        adapter(stream(1, seed=8)[0])
    assert same(before, adapter.state())
    assert (adapter.images_seen, adapter.last) == (1, report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_runs_in_the_models_own_precision(method, dtype):
    model = randomise(Segmenter(), seed=11).to(dtype)
    images = [x.to(dtype) for x in stream(4, seed=3)]
    profile = SourceProfile.collect(model, images, layers=["layer2"])
    adapter = bestta.adapt(model, profile, method=method)
    for image in images:
        logits = adapter(image)
        assert logits.dtype == dtype
        assert adapter.last.adapted == bool(adapter.trainable)


def test_it_runs_under_autocast(method):
    model = randomise(Segmenter(), seed=11)
    profile = SourceProfile.collect(model, stream(4, seed=3), layers=["layer2"])
    adapter = bestta.adapt(model, profile, method=method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for image in stream(3, seed=7):
            adapter(image)
    assert adapter.last.adapted == bool(adapter.trainable)
    assert all(p.dtype == torch.float32 for p in adapter.trainable.values())


def test_memory_format_does_not_matter(method):
    model = randomise(Segmenter(), seed=11)
    profile = SourceProfile.collect(model, stream(4, seed=3), layers=["layer2"])
    plain, last = (bestta.adapt(model, profile, method=method) for _ in range(2))
    for image in stream(3, seed=7):
        torch.testing.assert_close(
            last(image.to(memory_format=torch.channels_last)), plain(image), rtol=1e-4, atol=1e-4
        )


class Wrapped(nn.Module):
    def __init__(self, net: nn.Module, wrap) -> None:
        super().__init__()
        self.net, self.wrap = net, wrap

    def forward(self, x: torch.Tensor):
        return self.wrap(self.net(x))


@pytest.mark.parametrize(
    ("wrap", "output"),
    [
        (lambda y: {"out": y, "aux": y * 0}, None),
        (lambda y: {"loss": None, "logits": y, "hidden": y * 0}, None),
        (lambda y: {"prediction": y}, None),
        (lambda y: {"a": y * 0, "b": y}, "b"),
        (lambda y: (y, y * 0), None),
        (lambda y: [None, y], None),
        (lambda y: (y * 0, y), 1),
        (lambda y: (y * 0, y), -1),
    ],
)
def test_the_logits_are_found_in_what_the_model_returns(method, wrap, output):
    net = randomise(Segmenter(), seed=11)
    plain = SourceProfile.collect(net, stream(4, seed=3), layers=["layer2"])
    model = Wrapped(net, wrap).eval()
    wrapped = SourceProfile.collect(model, stream(4, seed=3), layers=["net.layer2"], output=output)
    usual, ours = (
        bestta.adapt(net, plain, method=method),
        bestta.adapt(model, wrapped, method=method),
    )
    for image in stream(3, seed=7, **FOG):
        assert torch.equal(ours(image), usual(image))


# --- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.randn(3, 12, 12), r"shape \(3, 12, 12\).*unsqueeze"),
        (torch.randn(12, 12), r"shape \(12, 12\)"),
        (torch.randn(0, 3, 12, 12), "at least one"),
        (torch.randn(1, 1, 12, 12), r"3 channels are expected.*\(1, 1, 12, 12\)"),
        (torch.zeros(1, 3, 12, 12, dtype=torch.uint8), "torch.uint8"),
        ([[0.0]], "not list"),
        (torch.randn(1, 3, 12, 12).double(), "torch.float64.*model is torch.float32"),
    ],
)
def test_a_wrong_image_is_an_error_that_says_why_and_changes_nothing(method, net, image, words):
    model, profile, _ = net
    adapter = bestta.adapt(model, profile, method=method)
    adapter(stream(1, seed=7)[0])
    state = adapter.state()
    with pytest.raises(ValueError, match=f"(?s){words}"):
        adapter(image)
    assert same(state, adapter.state())


def test_a_profile_of_another_model_is_refused(method, net):
    model, _, _ = net
    other = randomise(Segmenter(), seed=12)
    profile = SourceProfile.collect(other, stream(2, seed=3), layers="layer1")
    with pytest.raises(ValueError, match="belongs to another model"):
        bestta.adapt(model, profile, method=method)
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_in_training_mode_is_refused_then_and_later(method, net):
    model, profile, _ = net
    model.train()
    with pytest.raises(ValueError, match=r"training mode.*model.eval\(\)"):
        bestta.adapt(model, profile, method=method)
    adapter = bestta.adapt(model.eval(), profile, method=method)
    model.train()
    with pytest.raises(ValueError, match=r"training mode.*model.eval\(\)"):
        adapter(stream(1, seed=7)[0])


def test_a_state_of_another_method_is_refused(method, net, tmp_path):
    model, profile, _ = net
    other = next(name for name in bestta.methods() if name != method)
    bestta.adapt(model, profile, method=other).save(tmp_path / "state")
    with pytest.raises(ValueError, match=f"'{other}'.*'{method}'"):
        bestta.adapt(model, profile, method=method).load(tmp_path / "state")


def test_what_is_no_model_is_refused(method):
    with pytest.raises(ValueError, match=r"torch.nn.Module, not function"):
        bestta.adapt(lambda x: x, method=method)


def test_a_removed_adapter_says_so(method, net):
    model, profile, _ = net
    with bestta.adapt(model, profile, method=method) as adapter:
        adapter(stream(1, seed=7)[0])
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(RuntimeError, match="removed"):
        adapter(stream(1, seed=7)[0])


def test_an_adapter_that_is_no_longer_used_lets_go_of_the_model(method, net):
    model, profile, _ = net
    adapter = bestta.adapt(model, profile, method=method)
    adapter(stream(1, seed=7)[0])
    other = bestta.adapt(model, profile, method=method)
    del adapter
    gc.collect()
    assert not any(p.requires_grad for p in model.parameters())  # the other one is in use
    other.remove()
    other.remove()
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_that_was_moved_says_what_to_do(method, net):
    model, profile, _ = net
    adapter = bestta.adapt(model, profile, method=method)
    model.to("meta")
    with pytest.raises(ValueError, match="moved from cpu to meta"):
        adapter(stream(1, seed=7)[0])


def test_an_adapter_is_not_copied_but_told_how_to_make_another(method, net):
    model, profile, _ = net
    with pytest.raises(TypeError, match="make another one"):
        copy.deepcopy(bestta.adapt(model, profile, method=method))


def test_a_sum_that_overflows_is_not_an_infinite_value():
    assert is_finite(torch.full((10,), 3e38), torch.ones(2))
    assert not is_finite(torch.ones(2), torch.tensor([1.0, float("inf")]))
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


def test_a_report_says_what_the_step_did(method, net):
    model, profile, _ = net
    adapter = bestta.adapt(model, profile, method=method)
    assert adapter.last.reason == "no image yet"
    for count, image in enumerate(stream(3, seed=7), start=1):
        adapter(image)
        assert adapter.last.images_seen == adapter.images_seen == count
        assert adapter.last.time_ms > 0
        assert adapter.last.adapted or adapter.last.reason
    assert type(model).__name__ in repr(adapter)
