"""What every registered method promises, on a classifier, a segmenter and a token model.

A new method is tested by being registered.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import bestta
from bestta import SourceProfile
from bestta.adapters import Adapter
from bestta.adapters.base import compact, is_finite
from bestta.adapters.registry import method_class
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream

NETS = {
    "segmenter": (Segmenter, ["layer1", "layer3"], (5, 12, 12)),
    "classifier": (Classifier, ["layer2"], (4,)),
    "tokens": (TokenClassifier, ["block"], (4,)),
}
FOG = {"shift": 1.5, "scale": 0.4}

pytestmark = pytest.mark.usual

SETTINGS: dict[str, dict[str, Any]] = {
    # Every step shall learn, from these nets' hopeless predictions, and be quick.
    "cotta": {"augmentations": 2, "scales": (0.5, 1.0)},
    "petal": {"augmentations": 2, "scales": (0.5, 1.0), "swag_epochs": 1},
    "eata": {"margin": 1.1, "redundancy": 1.1},
    "sar": {"margin": 1.1, "recover_below": 0.0},
    "ecotta": {"margin": 1.1, "warmup_epochs": 1, "warmup_lr": 1e-3},
    "rotta": {"capacity": 4, "update_every": 1},
    "memo": {"views": 3},
    "bestta": {"when": "always", "images_per_step": 1},
}
"""What a method is given here beside its defaults."""

NEEDS_BATCH_NORM = {"bn_stats", "alpha_bn", "bn_ema", "tent", "tent_reset", "eata", "rotta"}
NEEDS_FEATURE_MAPS = {"ecotta"}
ONLY_CLASSIFIES = {"rotta"}


def refused(method: str, net: str) -> str:
    """The words with which a method refuses a net; empty if it shall work."""
    if method in ONLY_CLASSIFIES and net == "segmenter":
        return "defined for classification"
    if method in NEEDS_BATCH_NORM and net == "tokens":
        return "works on batch norms, and TokenClassifier has none .it has LayerNorm"
    if method in NEEDS_FEATURE_MAPS and net == "tokens":
        return "parts"
    return ""


@dataclass
class Case:
    """A method and a model for it."""

    method: str
    model: nn.Module
    profile: SourceProfile
    shape: tuple[int, ...] = ()
    batch: int = 1

    def stream(self, length: int, seed: int, **weather: float) -> list[torch.Tensor]:
        return stream(length, seed, batch=self.batch, **weather)

    def adapt(self, **settings: Any) -> Adapter:
        return bestta.adapt(
            self.model,
            self.profile,
            method=self.method,
            **{**SETTINGS.get(self.method, {}), **settings},
        )


def case_of(
    method: str,
    model: nn.Module,
    layers: list[str],
    images: list[torch.Tensor] | None = None,
    output: str | int | None = None,
) -> Case:
    """A model with all that the method wants to know of the source."""
    images = stream(6, seed=3) if images is None else images
    profile = SourceProfile.collect(model, images, layers=layers, output=output)
    if method_class(method).Preparation is not None:
        settings = SETTINGS.get(method, {})
        profile = bestta.prepare(model, images[:3], method=method, profile=profile, **settings)
    return Case(method, model, profile)


@pytest.fixture(params=bestta.methods())
def method(request) -> str:
    return request.param


PAIRS = [(m, n) for m in bestta.methods() for n in NETS]


@pytest.fixture(params=[1, 4], ids=["batch 1", "batch 4"])
def batch(request) -> int:
    return request.param


@pytest.fixture(params=[pair for pair in PAIRS if not refused(*pair)], ids="-".join)
def case(request, batch) -> Case:
    method, net = request.param
    build, layers, shape = NETS[net]
    case = case_of(method, randomise(build(), seed=11), layers)
    case.shape, case.batch = shape, batch
    return case


def home(method: str) -> type[nn.Module]:
    """A net with batch norms and stages that the method is made for."""
    return Classifier if method in ONLY_CLASSIFIES else Segmenter


@pytest.mark.parametrize(("method", "net"), [pair for pair in PAIRS if refused(*pair)])
def test_what_a_method_is_not_made_for_is_refused_with_a_reason(method, net):
    model = randomise(NETS[net][0](), seed=11)
    if method_class(method).Preparation is not None:
        call = partial(bestta.prepare, model, stream(2, seed=3))
    else:
        call = partial(bestta.adapt, model)
    with pytest.raises(ValueError, match=refused(method, net)):
        call(method=method, **SETTINGS.get(method, {}))
    assert all(p.requires_grad for p in model.parameters())


def test_it_returns_logits_without_a_graph(case):
    adapter = case.adapt()
    logits = adapter(case.stream(1, seed=7, **FOG)[0])
    assert logits.shape == (case.batch, *case.shape)
    assert not logits.requires_grad


def test_it_leaves_the_model_untouched(case):
    before, image = snapshot(case.model), case.stream(1, seed=5)[0]
    plain = case.model(image)
    adapter = case.adapt()
    for frame in case.stream(5, seed=7, **FOG):
        adapter(frame)
    adapter.remove()
    assert same(before, snapshot(case.model))
    assert torch.equal(case.model(image), plain)
    assert all(p.requires_grad and p.grad is None for p in case.model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in case.model.modules())
    assert not any(m.training for m in case.model.modules())


def test_paused_it_is_the_source_model_bit_for_bit(case):
    images = case.stream(4, seed=7, **FOG)
    with torch.no_grad():
        plain = [case.model(image) for image in images]
    adapter = case.adapt()
    adapter(images[0])
    state = adapter.state()
    with adapter.paused():
        assert all(torch.equal(adapter(x), y) for x, y in zip(images, plain, strict=True))
        assert adapter.last.skipped
        assert adapter.last.reason == "paused"
        with torch.no_grad():
            assert torch.equal(case.model(images[1]), plain[1])
    assert same(state, adapter.state())


def test_pauses_may_be_nested(case):
    adapter = case.adapt()
    with adapter.paused():
        with adapter.paused():
            pass
        adapter(case.stream(1, seed=7)[0])
        assert adapter.last.reason == "paused"
    adapter(case.stream(1, seed=7)[0])
    assert adapter.last.reason != "paused"


def test_only_the_parameters_it_lists_are_trained(case):
    adapter = case.adapt()
    for image in case.stream(5, seed=7, **FOG):
        adapter(image)
    listed = set(map(id, adapter.trainable.values()))
    learns = [t for t in adapter.tensors().values() if t.requires_grad]
    assert all(id(tensor) in listed for tensor in learns)
    assert not any(p.requires_grad for p in case.model.parameters())
    assert adapter.last.adapted == bool(adapter.trainable)


def test_every_parameter_it_lists_learns(case):
    """But MEMO's, which are the source's again after each image."""
    adapter = case.adapt()
    start = {name: p.detach().clone() for name, p in adapter.trainable.items()}
    for image in case.stream(6, seed=7, **FOG):
        adapter(image)
    still = [name for name, p in adapter.trainable.items() if torch.equal(p, start[name])]
    assert still == (list(start) if case.method == "memo" else [])


def test_a_domain_change_resets_those_that_ask_for_it_and_nobody_else(case):
    adapter = case.adapt()
    start = adapter.state()
    for image in case.stream(3, seed=7, **FOG):
        adapter(image)
    before = adapter.state()
    adapter.domain_changed()
    assert same(adapter.state(), start if adapter.needs_domain_changes else before)


def test_a_stopped_stream_goes_on_as_if_it_had_not_been(case, tmp_path):
    images = case.stream(8, seed=7, **FOG)
    whole = case.adapt()
    predictions = [whole(image) for image in images]
    first = case.adapt()
    for image in images[:3]:
        first(image)
    first.save(tmp_path / "state")
    second = case.adapt(seed=5)  # the generator goes on from where the first's was
    second.load(tmp_path / "state")
    assert torch.equal(first.generator.get_state(), second.generator.get_state())
    rest = [second(image) for image in images[3:]]
    assert all(torch.equal(a, b) for a, b in zip(predictions[3:], rest, strict=True))
    assert same(whole.state(), second.state())


def test_a_trial_is_answered_by_what_was_learned_and_leaves_no_trace(case):
    first, second, other = case.stream(3, seed=7, **FOG)
    with case.adapt() as adapter:
        adapter(first)
        expected, last = adapter(second), adapter.last.losses
    adapter = case.adapt()
    adapter(first)
    for _ in range(2):
        with adapter.trial():
            tried = adapter(second)
    with contextlib.suppress(ZeroDivisionError), adapter.trial():
        adapter(other)
        raise ZeroDivisionError
    assert adapter.images_seen == case.batch
    assert torch.equal(adapter(second), expected)
    assert torch.equal(tried, expected)
    assert adapter.last.losses == last


def test_reset_is_the_exact_starting_point(case):
    adapter = case.adapt()
    start = adapter.state()
    first = [adapter(image) for image in case.stream(4, seed=7, **FOG)]
    adapter.reset()
    assert same(start, adapter.state())
    assert adapter.last.reason == "reset"
    second = [adapter(image) for image in case.stream(4, seed=7, **FOG)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_adapts_the_same_where_gradients_are_off(case, mode):
    usual = case.adapt()
    off = case.adapt()
    for image in case.stream(3, seed=7, **FOG):
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
        self.layer1 = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layer1(image) * image


class PooledSkip(Skip):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image).mean((2, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_everything_may_happen_where_gradients_are_off(method, mode, tmp_path):
    build = PooledSkip if method in ONLY_CLASSIFIES else Skip
    model = randomise(build(), seed=11)
    with mode():
        images = [torch.randn(1, 3, 8, 8) for _ in range(4)]
        adapter = case_of(method, model, ["layer1"], images).adapt()
        for image in images:
            adapter(image)
            assert adapter.last.adapted == bool(adapter.trainable)
        adapter.save(tmp_path / "state")
        adapter.reset()
        adapter.load(tmp_path / "state")
        adapter(images[0])
    adapter(torch.randn(1, 3, 8, 8))
    assert adapter.last.adapted == bool(adapter.trainable)


def test_a_frame_with_bad_pixels_leaves_no_trace(case):
    adapter = case.adapt()
    for image in case.stream(2, seed=7, **FOG):
        adapter(image)
    state = adapter.state()
    bad = case.stream(1, seed=7)[0]
    bad[0, 0, 0, 0] = float("nan")
    answer = adapter(bad)
    assert torch.equal(answer.nan_to_num(), case.model(bad).nan_to_num())
    assert adapter.last.skipped
    assert same(state, adapter.state())


@pytest.mark.parametrize("factor", [0.0, 1e20, 1e37])
def test_a_finite_frame_never_leaves_a_state_that_is_not(case, factor):
    images = case.stream(6, seed=7, **FOG)
    adapter = case.adapt()
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
    class Breaks(home(method)):
        broken = False

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            if Breaks.broken:
                raise KeyboardInterrupt
            return super().forward(image)

    adapter = case_of(method, randomise(Breaks(), seed=11), ["layer2"]).adapt()
    adapter(stream(1, seed=7)[0])
    before, report = adapter.state(), adapter.last
    Breaks.broken = True
    with pytest.raises(KeyboardInterrupt):
        adapter(stream(1, seed=8)[0])
    assert same(before, adapter.state())
    assert (adapter.images_seen, adapter.last) == (1, report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_runs_in_the_models_own_precision(method, dtype):
    model = randomise(home(method)(), seed=11).to(dtype)
    images = [x.to(dtype) for x in stream(4, seed=3)]
    adapter = case_of(method, model, ["layer2"], images).adapt()
    for image in images:
        logits = adapter(image)
        assert logits.dtype == dtype
        assert adapter.last.adapted == bool(adapter.trainable)


def test_it_runs_under_autocast(method):
    adapter = case_of(method, randomise(home(method)(), seed=11), ["layer2"]).adapt()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for image in stream(3, seed=7):
            adapter(image)
    assert adapter.last.adapted == bool(adapter.trainable)
    assert all(p.dtype == torch.float32 for p in adapter.trainable.values())


def test_it_learns_the_same_in_one_autocast_as_in_one_for_each_image(method):
    """Autocast keeps the weights it has cast until it ends, and these learn meanwhile."""
    case = case_of(method, randomise(home(method)(), seed=11), ["layer2"])
    one, many = case.adapt(), case.adapt()
    images = stream(4, seed=7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        together = [one(image) for image in images]
    for image, expected in zip(images, together, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(many(image), expected)


def test_memory_format_does_not_matter(method):
    case = case_of(method, randomise(home(method)(), seed=11), ["layer2"])
    plain, last = case.adapt(), case.adapt()
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
    net = randomise(home(method)(), seed=11)
    plain = case_of(method, net, ["layer2"]).adapt()
    model = Wrapped(net, wrap).eval()
    ours = case_of(method, model, ["net.layer2"], output=output).adapt()
    for image in stream(3, seed=7, **FOG):
        assert torch.equal(ours(image), plain(image))


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
def test_a_wrong_image_is_an_error_that_says_why_and_changes_nothing(case, image, words):
    adapter = case.adapt()
    adapter(case.stream(1, seed=7)[0])
    state = adapter.state()
    with pytest.raises(ValueError, match=f"(?s){words}"):
        adapter(image)
    assert same(state, adapter.state())


def test_a_profile_of_another_model_is_refused(case):
    other = randomise(Segmenter(), seed=12)
    profile = SourceProfile.collect(other, case.stream(2, seed=3), layers="layer1")
    with pytest.raises(ValueError, match="belongs to another model"):
        bestta.adapt(case.model, profile, method=case.method, preset="classification")
    assert all(p.requires_grad for p in case.model.parameters())


def test_a_model_in_training_mode_is_refused_then_and_later(case):
    case.model.train()
    with pytest.raises(ValueError, match=r"training mode.*model.eval\(\)"):
        case.adapt()
    case.model.eval()
    adapter = case.adapt()
    case.model.train()
    with pytest.raises(ValueError, match=r"training mode.*model.eval\(\)"):
        adapter(case.stream(1, seed=7)[0])


def test_a_state_of_another_method_is_refused(case, tmp_path):
    other = "bestta" if case.method == "source" else "source"
    bestta.adapt(case.model, case.profile, method=other).save(tmp_path / "state")
    with pytest.raises(ValueError, match=f"'{other}'.*'{case.method}'"):
        case.adapt().load(tmp_path / "state")


def test_what_is_no_model_is_refused(method):
    with pytest.raises(ValueError, match=r"torch.nn.Module, not function"):
        bestta.adapt(lambda x: x, method=method)


def test_a_removed_adapter_says_so(case):
    with case.adapt() as adapter:
        adapter(case.stream(1, seed=7)[0])
    assert all(p.requires_grad for p in case.model.parameters())
    with pytest.raises(RuntimeError, match="removed"):
        adapter(case.stream(1, seed=7)[0])


def test_an_adapter_that_is_no_longer_used_lets_go_of_the_model(case):
    adapter = case.adapt()
    adapter(case.stream(1, seed=7)[0])
    other = case.adapt()
    del adapter
    gc.collect()
    assert not any(p.requires_grad for p in case.model.parameters())  # the other one is in use
    other.remove()
    other.remove()
    assert all(p.requires_grad for p in case.model.parameters())


def test_a_model_that_was_moved_says_what_to_do(case):
    adapter = case.adapt()
    case.model.to("meta")
    with pytest.raises(ValueError, match="moved from cpu to meta"):
        adapter(case.stream(1, seed=7)[0])


def test_an_adapter_is_not_copied_but_told_how_to_make_another(case):
    with pytest.raises(TypeError, match="make another one"):
        copy.deepcopy(case.adapt())


def test_a_sum_that_overflows_is_not_an_infinite_value():
    assert is_finite(torch.full((10,), 3e38), torch.ones(2))
    assert not is_finite(torch.ones(2), torch.tensor([1.0, float("inf")]))
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


def test_the_start_that_is_kept_holds_equal_tensors_once_and_zeros_for_nothing():
    a, b = torch.rand(100), torch.rand(100)
    held = compact({"a": a, "b": b, "c": a.clone(), "zeros": torch.zeros(100), "other": a.double()})
    assert held["c"] is held["a"]
    assert held["zeros"].untyped_storage().nbytes() == 4
    for name, expected in {"a": a, "b": b, "c": a, "zeros": a * 0, "other": a.double()}.items():
        assert torch.equal(held[name], expected)
        assert held[name].dtype == expected.dtype


def test_a_report_says_what_the_step_did(case):
    adapter = case.adapt()
    assert adapter.last.reason == "no image yet"
    for count, image in enumerate(case.stream(3, seed=7), start=1):
        adapter(image)
        assert adapter.last.images_seen == adapter.images_seen == count * case.batch
        assert adapter.last.time_ms > 0
        assert adapter.last.adapted or adapter.last.reason
    assert type(case.model).__name__ in repr(adapter)
