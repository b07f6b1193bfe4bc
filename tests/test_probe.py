"""Looking inside an adapter: what is seen is what was run, and looking changes nothing."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as torch_module

import bestta
from bestta import SourceProfile
from bestta.adapters.network import skeleton
from bestta.benchmark.probe import Probe, default_layer, pooled
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, stream
from test_contract import FOG, NETS, PAIRS, case_of, home, refused


def hooks(adapter) -> int:
    """How many hooks hang on all modules there are, and on those of the model."""
    everywhere = len(torch_module._global_forward_pre_hooks)
    return everywhere + sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in adapter.model.modules()
    )


@pytest.fixture(params=[1, 3], ids=["batch 1", "batch 3"])
def batch(request) -> int:
    return request.param


@pytest.fixture(params=[pair for pair in PAIRS if not refused(*pair)], ids="-".join)
def case(request, batch):
    method, net = request.param
    build, layers, _ = NETS[net]
    case = case_of(method, randomise(build(), seed=11), layers)
    case.batch = batch
    return case


def test_an_adapter_looked_at_does_the_same_bit_for_bit(case):
    alone, observed = case.adapt(), case.adapt()
    probe = Probe(observed, default_layer(case.profile))
    for image in case.stream(5, seed=7, **FOG):
        expected = alone(image)
        probe.plain(image)
        seen = probe(image)
        assert torch.equal(seen.logits, expected)
        assert (observed.last.losses, observed.last.reason) == (
            alone.last.losses,
            alone.last.reason,
        )
        assert not seen.features.requires_grad
    assert same(alone.state(), observed.state())
    assert torch.equal(alone.generator.get_state(), observed.generator.get_state())
    assert hooks(observed) == 0


def test_features_come_for_every_image_in_the_shape_of_the_plain_ones(case):
    probe = Probe(case.adapt(), default_layer(case.profile))
    for image in case.stream(3, seed=7, **FOG):
        plain = probe.plain(image)
        assert probe(image).features.shape == plain.shape
        assert len(plain) == case.batch


@pytest.mark.parametrize("net", [Classifier, TokenClassifier, Segmenter])
def test_the_rest_of_the_network_makes_the_logits_of_the_features(net):
    """By hand: the layers behind the probed one, on the features, give the prediction."""
    tails = {
        Classifier: ("layer2", lambda m, x, image: m.fc(x.mean((2, 3)))),
        TokenClassifier: ("block", lambda m, x, image: m.fc(x.mean(1))),
        Segmenter: (
            "head",
            lambda m, x, image: nn.functional.interpolate(x, size=(12, 12), mode="bilinear"),
        ),
    }
    layer, tail = tails[net]
    model = randomise(net(), seed=11)
    case = case_of("bestta", model, [{Segmenter: "layer3"}.get(net, layer)])
    probe = Probe(case.adapt(lr=0.05), layer)
    for image in stream(4, seed=7, batch=2, **FOG):
        seen = probe(image)
        with torch.no_grad():
            torch.testing.assert_close(tail(model, seen.features, image), seen.logits)
            assert not torch.allclose(seen.logits, model(image))


def test_where_bein_sits_features_are_seen_behind_it(segmenter, profile):
    """The expected ones: BeIN as a function, on the plain features and with γ as it is."""
    adapter = bestta.adapt(segmenter, profile, layers="layer2", lr=0.1)
    probe = Probe(adapter, "layer2")
    for image in stream(4, seed=7, **FOG):
        style, source = adapter.bein["layer2"], profile.layers["layer2"]
        expected = bestta.bein(
            probe.plain(image),
            source.mu.float(),
            (source.sigma**2 + 1e-5).sqrt().float(),
            style.gamma_mu.detach().clone(),
            style.gamma_sigma.detach().clone(),
            rho=0.7,
            relative=True,
            slope_min=0.1,
            slope_max=10.0,
        )
        torch.testing.assert_close(probe(image).features, expected)
    assert bool(style.gamma_mu.detach().any())


def test_the_prediction_after_the_update_has_the_features_after_the_update(segmenter, profile):
    before = Probe(bestta.adapt(segmenter, profile, layers="layer2", lr=0.1), "layer2")
    after = Probe(
        bestta.adapt(segmenter, profile, layers="layer2", lr=0.1, predict="after"), "layer2"
    )
    first, second = stream(1, seed=7, **FOG) * 2
    seen = after(first)
    assert not torch.equal(seen.features, before(first).features)
    assert torch.equal(seen.features, before(second).features)  # γ is now what it was there


def test_features_of_tent_are_those_of_its_weights_and_of_the_batch(segmenter):
    """The expected ones: a skeleton whose batch norms count the batch, with TENT's weights put in.

    In training mode a batch norm of torch normalises by the batch's own statistics.
    """
    adapter = bestta.adapt(segmenter, method="tent", lr=0.05)
    probe = Probe(adapter, "layer3")
    root = skeleton(segmenter)
    for norm in root.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.train()
            norm.momentum = 0.0
    kept = []
    root.layer3.register_forward_hook(lambda module, inputs, output: kept.append(output))
    for image in stream(4, seed=7, batch=2, **FOG):
        weights = {name: w.detach().clone() for name, w in adapter.trainable.items()}
        with torch.no_grad():
            functional_call(root, weights, (image,))
        torch.testing.assert_close(probe(image).features, kept[-1], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(kept[-1], probe.plain(image), atol=0.1)


def through(net: nn.Module, weights, image: torch.Tensor, layer: str) -> torch.Tensor:
    """The features at ``layer`` of a copy of ``net`` with other weights."""
    root, kept = skeleton(net), []
    root.get_submodule(layer).register_forward_hook(lambda m, i, output: kept.append(output))
    with torch.no_grad():
        functional_call(root, dict(weights), (image,))
    return kept[0]


def test_features_of_cotta_are_its_teachers():
    """The returned prediction is the teacher's average over views, and no forward's own."""
    case = case_of("cotta", randomise(Segmenter(), seed=11), ["layer3"])
    adapter = case.adapt(lr=0.01, teacher_decay=0.5, confidence=1.0)
    probe = Probe(adapter, "layer3")
    for image in stream(4, seed=7, **FOG):
        state = adapter.state()
        weights = {
            who: {n.removeprefix(f"{who}/"): w for n, w in state.items() if n.startswith(f"{who}/")}
            for who in ("student", "teacher")
        }
        seen = probe(image).features
        expected = {who: through(case.model, w, image, "layer3") for who, w in weights.items()}
        assert torch.equal(seen, expected["teacher"])
    assert not torch.allclose(seen, expected["student"], atol=1e-4)
    assert not torch.allclose(seen, probe.plain(image), atol=1e-4)


def test_features_of_memo_are_put_together_image_by_image():
    """It predicts each image of a batch with weights of its own."""
    case = case_of("memo", randomise(Classifier(), seed=11), ["layer2"])
    images = stream(3, seed=7, **FOG)
    together = Probe(case.adapt(lr=0.5), "layer2")(torch.cat(images))
    single = Probe(case.adapt(lr=0.5), "layer2")
    apart = [single(image) for image in images]
    assert torch.equal(together.logits, torch.cat([seen.logits for seen in apart]))
    assert torch.equal(together.features, torch.cat([seen.features for seen in apart]))
    assert not torch.allclose(together.features, single.plain(torch.cat(images)), atol=1e-3)


def test_features_of_sar_are_those_before_it_climbs():
    """It runs the image at its weights, which predict, and once more uphill."""
    case = case_of("sar", randomise(Segmenter(), seed=11), ["layer3"])
    still, climbing = (Probe(case.adapt(rho=rho), "layer3") for rho in (0.0, 5.0))
    image = stream(1, seed=7, **FOG)[0]
    assert torch.equal(climbing(image).features, still(image).features)


def test_rottas_memory_is_not_taken_for_the_image():
    """It holds the image as well, and teacher and student run on it after the prediction."""
    case = case_of("rotta", randomise(Classifier(), seed=11), ["layer2"])
    adapter = case.adapt(momentum=0.5)
    probe = Probe(adapter, "layer2")
    for image in stream(3, seed=7, **FOG):
        seen = probe(image)
        with torch.no_grad():
            torch.testing.assert_close(
                nn.functional.linear(
                    seen.features.mean((2, 3)), case.model.fc.weight, case.model.fc.bias
                ),
                seen.logits,
            )


def test_paused_and_for_bad_pixels_the_features_are_the_plain_ones(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, method="tent")
    probe = Probe(adapter, "layer4")
    image, bad = stream(2, seed=7, **FOG)
    with adapter.paused():
        assert torch.equal(probe(image).features, probe.plain(image))
    bad[0, 0, 3, 3] = float("nan")
    torch.testing.assert_close(probe(bad).features, probe.plain(bad), equal_nan=True)
    assert adapter.last.skipped


def test_what_the_network_does_in_place_behind_the_layer_is_not_seen():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Conv2d(3, 4, 1)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.layer1(image).mul_(0).add_(7)

    model = randomise(InPlace(), seed=1)
    probe = Probe(bestta.adapt(model, method="source"), "layer1")
    image = stream(1, seed=7)[0]
    expected = nn.functional.conv2d(image, model.layer1.weight, model.layer1.bias)
    torch.testing.assert_close(probe(image).features, expected)
    torch.testing.assert_close(probe.plain(image), expected)


def test_a_layer_that_returns_a_tuple_is_seen_by_its_first():
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
            return x * 2, "and more"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"aux": image, "out": self.norm(self.pair(image)[0])}

    probe = Probe(bestta.adapt(randomise(Net(), seed=1), method="tent"), "pair")
    image = stream(1, seed=7)[0]
    assert torch.equal(probe(image).features, image * 2)
    assert torch.equal(probe.plain(image), image * 2)


def test_modules_of_the_models_own_class_inside_it_are_not_taken_for_it():
    inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model = randomise(nn.Sequential(inner, nn.Conv2d(3, 2, 1)), seed=1)
    probe = Probe(bestta.adapt(model, method="tent"), "0")
    image = stream(1, seed=7)[0]
    seen = probe(image)
    assert seen.features.shape == (1, 3, 12, 12)
    with torch.no_grad():
        torch.testing.assert_close(model[1](seen.features), seen.logits)


@pytest.mark.parametrize("method", ["source", "bestta", "tent", "cotta"])
def test_an_exception_leaves_no_hook_behind(method):
    class Breaks(Segmenter):
        broken = False

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            low = self.layer1(image)
            if Breaks.broken:
                raise KeyboardInterrupt
            return super().forward(image) + 0 * low.sum()

    case = case_of(method, randomise(Breaks(), seed=11), ["layer2"])
    adapter = case.adapt()
    networks = [n.module for n in [getattr(adapter, "network", None)] if n is not None]
    before = [sum(len(m._forward_hooks) for m in root.modules()) for root in networks]
    probe, other = Probe(adapter, "layer2"), Probe(case.adapt(), "layer2")
    image = stream(1, seed=7)[0]
    Breaks.broken = True
    with pytest.raises(KeyboardInterrupt):
        probe(image)
    with pytest.raises(KeyboardInterrupt):
        probe.plain(image)
    Breaks.broken = False
    assert hooks(adapter) == 0
    assert before == [sum(len(m._forward_hooks) for m in root.modules()) for root in networks]
    assert torch.equal(probe(image).features, other(image).features)


def test_a_forward_that_failed_and_was_tried_again_is_seen():
    """As a method may that tries a size first."""

    class Fussy(Segmenter):
        failures = 1

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            logits = super().forward(image)
            if Fussy.failures:
                Fussy.failures -= 1
                raise RuntimeError("not yet")
            return logits

    class Twice(type(bestta.adapt(randomise(Segmenter(), seed=1), method="source"))):
        def step(self, image):
            try:
                return super().step(image)
            except RuntimeError:
                return super().step(image)

    model = randomise(Fussy(), seed=11)
    adapter = Twice(model, None, Twice.Config())
    probe = Probe(adapter, "layer3")
    image = stream(1, seed=7)[0]
    seen = probe(image).features
    assert torch.equal(seen, probe.plain(image))


def test_another_thread_may_run_the_model_meanwhile(segmenter):
    """Its forwards are its own, and leave nothing in what is seen here."""
    foreign = stream(1, seed=9)[0]

    class Asks(Segmenter):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            if not torch.equal(image, foreign):
                with torch.no_grad():
                    asked = threading.Thread(target=lambda: self(foreign))
                    asked.start()
                    asked.join()
            return super().forward(image)

    model = randomise(Asks(), seed=1)
    probe = Probe(bestta.adapt(model, method="source"), "layer2")
    image = stream(1, seed=7)[0]
    expected = segmenter.layer2(segmenter.layer1(image)).detach()  # the same weights
    assert torch.equal(probe(image).features, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_looks_where_gradients_are_off(method, mode):
    case = case_of(method, randomise(home(method)(), seed=11), ["layer2"])
    usual, off = Probe(case.adapt(), "layer2"), Probe(case.adapt(), "layer2")
    for image in stream(2, seed=7, **FOG):
        expected = usual(image)
        with mode():
            seen = off(image * 1)
            plain = off.plain(image * 1)
        assert torch.equal(seen.features, expected.features)
        assert torch.equal(plain, usual.plain(image))


@pytest.fixture(params=["bestta", "tent", "cotta"])
def method(request) -> str:
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_looks_at_half_precision(method, dtype):
    images = [image.to(dtype) for image in stream(3, seed=7)]
    case = case_of(method, randomise(home(method)(), seed=11).to(dtype), ["layer2"], images)
    probe = Probe(case.adapt(), "layer2")
    assert probe(images[0]).features.dtype == dtype


# --- errors ---------------------------------------------------------------------------------


def test_a_layer_that_is_not_there_is_named_beside_those_that_are(segmenter):
    with pytest.raises(ValueError, match=r"no module named 'layer5'.*layer4"):
        Probe(bestta.adapt(segmenter, method="source"), "layer5")


def test_a_layer_that_runs_twice_is_refused_and_the_step_undone():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.norm(self.norm(image))

    adapter = bestta.adapt(randomise(Twice(), seed=1), method="tent")
    probe, image, before = Probe(adapter, "norm"), stream(1, seed=7)[0], adapter.state()
    with pytest.raises(ValueError, match="'norm' ran 2 times"):
        probe(image)
    with pytest.raises(ValueError, match="'norm' ran 2 times"):
        probe.plain(image)
    assert same(before, adapter.state())
    assert hooks(adapter) == 0


def test_a_method_that_never_runs_the_image_says_so(segmenter):
    class Half(type(bestta.adapt(segmenter, method="source"))):
        def step(self, image):
            return super().step(image[..., ::2, ::2])

    with pytest.raises(ValueError, match="no features were seen at 'layer2'"):
        Probe(Half(segmenter, None, Half.Config()), "layer2")(stream(1, seed=7)[0])


def test_a_method_that_alters_the_image_is_seen_by_its_last_forward_of_that_size(segmenter):
    class Brighter(type(bestta.adapt(segmenter, method="source"))):
        def step(self, image):
            super().step(image * 3)
            logits, report = super().step(image + 1)
            return logits * 2, report

    image = stream(1, seed=7)[0]
    probe = Probe(Brighter(segmenter, None, Brighter.Config()), "layer2")
    assert torch.equal(probe(image).features, probe.plain(image + 1))


def test_the_default_layer_is_the_last_of_the_profile(segmenter, profile):
    assert default_layer(profile) == "layer4"
    images = stream(2, seed=3)
    without = bestta.prepare(segmenter, images, method="eata", margin=1.1, redundancy=1.1)
    with pytest.raises(ValueError, match="holds no layers"):
        default_layer(without)


def test_pooling_follows_the_channels():
    maps = torch.arange(24.0).view(1, 2, 3, 4)
    assert pooled(maps).tolist() == [[5.5, 17.5]]
    assert pooled(maps.permute(0, 2, 3, 1), channel_dim=-1).tolist() == [[5.5, 17.5]]
    assert pooled(maps.view(1, 2, 12).mT).tolist() == [[5.5, 17.5]]  # tokens


def test_the_profile_and_the_probe_see_the_same_features(segmenter):
    images = stream(5, seed=3)
    profile = SourceProfile.collect(segmenter, images, layers=["layer3"])
    probe = Probe(bestta.adapt(segmenter, method="source"), "layer3")
    means = torch.cat([pooled(probe.plain(image)) for image in images]).double().mean(0)
    torch.testing.assert_close(means, profile.layers["layer3"].mu)
