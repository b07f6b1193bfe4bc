"""The BESTTA adapter: it learns γ and nothing else, as the paper says, and survives bad frames."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import nn

import bestta
import oracle
from bestta import SourceProfile
from bestta.adapters.network import gradients
from bestta.files import load_tensors, save_tensors
from bestta.insertion import inserted
from nets import Segmenter, randomise, same, snapshot, stream

LAYERS = ["layer1", "layer2", "layer3", "layer4"]
FOG = {"shift": 1.5, "scale": 0.4}
WEIGHTS = (0.3, 1.0, 0.3, 0.04)


def gammas(adapter) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in adapter.trainable.items()}


# --- steps of many images ---------------------------------------------------------------------


def gathering(model, profile, **settings):
    """γ by absolute steps, of losses whose gradient at γ = 0 depends on one image alone."""
    usual = {"layers": ["layer2"], "lambda_style": 0.0, "momentum": 0.0, "gamma_bound": None}
    return bestta.adapt(model, profile, **{**usual, "lr": 0.05, **settings})


def test_a_step_of_many_images_is_one_along_their_mean_gradient(segmenter, profile):
    """Each gradient alone, from an adapter that has seen nothing else, is what is averaged."""
    images = stream(5, seed=7, **FOG)
    alone = []
    for image in images:
        single = gathering(segmenter, profile)
        single(image)
        alone.append(gammas(single))
    adapter = gathering(segmenter, profile, images_per_step=5)
    for number, image in enumerate(images):
        assert not any(bool(g.any()) for g in gammas(adapter).values()), number
        adapter(image)
    assert adapter.last.adapted
    for name, gamma in gammas(adapter).items():
        expected = torch.stack([g[name] for g in alone]).mean(0)
        assert expected.abs().max() > 1e-5
        torch.testing.assert_close(gamma, expected)


def test_a_batch_counts_as_its_images(segmenter, profile):
    images = stream(6, seed=7, **FOG)
    one, many = (gathering(segmenter, profile, images_per_step=6) for _ in range(2))
    for image in images:
        one(image)
    for batch in (torch.cat(images[:4]), torch.cat(images[4:])):
        many(batch)
    assert one.last.adapted
    assert many.last.adapted
    for name, gamma in gammas(one).items():
        torch.testing.assert_close(gammas(many)[name], gamma)


def test_an_image_before_the_step_says_what_is_waited_for(segmenter, profile):
    adapter = gathering(segmenter, profile, images_per_step=3)
    adapter(stream(1, seed=7, **FOG)[0])
    assert adapter.last.reason == "collecting: 1 of 3 images until the next step"
    assert not adapter.last.adapted
    assert adapter.last.losses["total"] > 0


def held_against(adapter, build) -> tuple[dict[str, nn.Parameter], list[int]]:
    """γ as an optimiser of torch's moves it along the adapter's own gradients; its steps."""
    twins = {n: nn.Parameter(p.detach().clone()) for n, p in adapter.trainable.items()}
    optimiser, update, steps = build(twins.values()), adapter.update, []

    def follow(gradients):
        for name, twin in twins.items():
            twin.grad = gradients[name].clone()
        optimiser.step()
        update(gradients)
        steps.append(len(steps))

    adapter.update = follow
    return twins, steps


def test_adam_is_torchs(segmenter, profile):
    """The independent implementation is torch.optim.Adam, fed with the adapter's own gradients."""
    settings = {"optimiser": "adam", "momentum": 0.8, "lr": 0.01, "images_per_step": 2}
    adapter = gathering(segmenter, profile, **settings)
    twins, steps = held_against(adapter, partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.999)))
    for image in stream(12, seed=7, **FOG):
        adapter(image)
    assert len(steps) == 6
    for name, parameter in adapter.trainable.items():
        torch.testing.assert_close(parameter, twins[name], rtol=1e-5, atol=1e-8)


def test_what_was_learned_fades_by_a_fraction_at_each_step(segmenter, profile):
    """A step of the same size on the same image, and of both γ a quarter less."""
    image = stream(1, seed=7, **FOG)[0]
    kept, faded = gathering(segmenter, profile), gathering(segmenter, profile, forgetting=0.25)
    kept(image)
    faded(image)
    for name, gamma in gammas(kept).items():
        torch.testing.assert_close(gammas(faded)[name], 0.75 * gamma)


def test_the_bound_holds_after_a_step_of_adam(segmenter, profile):
    adapter = gathering(segmenter, profile, optimiser="adam", lr=1.0, gamma_bound=0.3)
    for image in stream(3, seed=7, **FOG):
        adapter(image)
    assert max(float(g.abs().max()) for g in gammas(adapter).values()) == pytest.approx(0.3)


@pytest.mark.usual
@pytest.mark.parametrize("stop", [3, 5, 11])
def test_a_stream_saved_between_steps_goes_on_to_the_bit(classifier, tmp_path, stop):
    """In the usual form of a classifier, with steps of fewer images so that there are some."""
    profile = SourceProfile.collect(classifier, stream(6, seed=3), layers=["layer1", "layer2"])
    settings = {"images_per_step": 2, "lambda_style": 1.0}
    images = stream(16, seed=7, **FOG)
    whole, first, second = (bestta.adapt(classifier, profile, **settings) for _ in range(3))
    for image in images:
        whole(image)
    for image in images[:stop]:
        first(image)
    first.save(tmp_path / "camera")
    second.load(tmp_path / "camera")
    for image in images[stop:]:
        second(image)
    assert any(bool(g.any()) for g in gammas(whole).values())
    assert same(whole.state(), second.state())


def test_unlearning_forgets_what_was_gathered_for_the_next_step(segmenter, profile):
    adapter = gathering(segmenter, profile, images_per_step=2, optimiser="adam")
    for image in stream(3, seed=7, **FOG):
        adapter(image)
    assert {"step/gradient", "step/images", "step/square", "step/steps"} <= adapter.state().keys()
    adapter.unlearn()
    assert not [name for name in adapter.state() if name.startswith("step/")]
    assert not any(bool(g.any()) for g in gammas(adapter).values())


@pytest.mark.parametrize("forgets", [True, False])
def test_gamma_begins_anew_with_the_memory_of_the_stream(segmenter, profile, forgets):
    """After forty images of one style, some of another: γ is 0 exactly when the memory is young."""
    settings = {"statistics": "weighed", "statistics_decay": 0.99, "lr": 0.01}
    adapter = bestta.adapt(segmenter, profile, forget_at_changes=forgets, **settings)
    for image in stream(40, seed=7, shift=0.8):
        adapter(image)
    assert adapter.learned_size() > 0
    reasons = []
    for image in stream(20, seed=8, shift=-0.8, scale=0.5):
        adapter(image)
        reasons.append(adapter.last.reason)
        if "begins anew" in reasons[-1]:
            assert adapter.learned_size() == 0
            assert not any(bool(v.any()) for v in adapter.velocity.values())
    assert (
        any(r == "γ begins anew: the style of the stream has changed" for r in reasons) is forgets
    )


@pytest.mark.guarded
def test_what_is_forgotten_at_a_change_is_gone_whatever_the_guard_has_slowed_down(
    segmenter, profile, monkeypatch
):
    """At a quarter of the pace all of γ is forgotten, and the guard's good state with it."""
    settings = {"statistics": "weighed", "statistics_decay": 0.99, "forget_at_changes": True}
    adapter = bestta.adapt(segmenter, profile, lr=0.01, guard_margin=-1e6, **settings)
    for image in stream(12, seed=7, shift=0.8):
        adapter(image)
    with torch.no_grad():
        for gamma in adapter.trainable.values():
            gamma.fill_(0.2)
    adapter.guard.mode, adapter.guard.pace, adapter.guard.good = "learning", 0.25, adapter.state()
    adapter.guard.looks_left, adapter.guard.wait = 0, 10
    monkeypatch.setattr(adapter, "style_moved", lambda: True)
    adapter(stream(1, seed=8, shift=0.8)[0])
    assert adapter.last.reason.startswith("γ begins anew")
    assert adapter.learned_size() == 0
    good = adapter.guard.good or {}
    assert not any(bool(good[name].any()) for name in adapter.trainable if name in good)


def test_all_images_of_a_step_were_learned_from(segmenter, profile):
    adapter = gathering(segmenter, profile, images_per_step=3, when=2)
    for image in stream(7, seed=7, **FOG):
        adapter(image)
    assert adapter.images_adapted == 3
    assert adapter.last.adapted_share == pytest.approx(3 / 7)


def test_adam_begins_without_a_velocity_that_is_not_its_own(segmenter, profile):
    """A first step of Adam is as long as its rate in every channel, whatever SGD left behind."""
    before = gathering(segmenter, profile, momentum=0.9)
    for image in stream(4, seed=7, **FOG):
        before(image)
    state = {
        n: torch.zeros_like(v) if "gamma" in n and "velocity" not in n else v
        for n, v in before.state().items()
    }
    adapter = gathering(segmenter, profile, momentum=0.9, optimiser="adam", lr=0.01)
    adapter.load_state(state)
    adapter(stream(1, seed=8, **FOG)[0])
    for gamma in gammas(adapter).values():
        assert gamma.abs().max() <= 0.01 * (1 + 1e-5)
    assert adapter.learned_size() > 0


def test_a_classifier_of_one_class_for_hours_learns_nothing_from_it(classifier):
    """Its answers are the usual one, which is worth nothing: the gradient is zero."""
    with torch.no_grad():
        classifier.fc.weight.mul_(100)  # as sure as can be
    profile = SourceProfile.collect(classifier, stream(6, seed=3), layers=["layer2"])
    settings = {"certainty": "likelihood", "lambda_style": 0.0, "answer_decay": 0.5, "lr": 0.01}
    adapter = bestta.adapt(classifier, profile, **settings)
    image = stream(1, seed=7, **FOG)[0]
    for _ in range(10):
        adapter(image)
    learned = gammas(adapter)
    for _ in range(10):
        adapter(image)
    assert adapter.last.losses["entropy"] == 0
    assert same(gammas(adapter), learned)


@pytest.mark.parametrize(
    "damage",
    [
        {"step/gradient": None},
        {"step/steps": None},
        {"step/images": torch.tensor(0)},
        {"step/square": torch.full((16,), -1.0)},
        {"step/answer": torch.tensor([0.5, -0.5, 0.4, 0.3, 0.3])},
    ],
    ids=str,
)
def test_a_state_of_half_a_step_that_is_damaged_is_refused(segmenter, profile, damage):
    adapter = gathering(
        segmenter, profile, images_per_step=2, optimiser="adam", certainty="likelihood"
    )
    for image in stream(3, seed=7, **FOG):
        adapter(image)
    whole = adapter.state()
    assert whole["step/square"].shape == (16,)
    adapter.load_state(whole)
    state = {k: v for k, v in {**whole, **damage}.items() if v is not None}
    with pytest.raises(ValueError, match="damaged"):
        adapter.load_state(state)
    assert same(whole, adapter.state())


# --- the paper ------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [["layer3"], ["layer1", "layer3"], LAYERS])
@pytest.mark.parametrize("gamma", ["absolute", "relative"])
def test_gradient_of_every_gamma_equals_the_oracles(chosen, gamma):
    """The oracle runs the network stage by stage in float64 with the literal equations between.

    With several BeINs it includes the way through the statistics of the later layers. It is
    taken after three steps, so that γ, A and the L2 norm are away from their starting points.
    """
    model = randomise(Segmenter(), seed=1).double()
    images = [x.double() for x in stream(4, seed=7, **FOG)]
    profile = SourceProfile.collect(model, [x.double() for x in stream(8, seed=3)], layers=LAYERS)
    unbounded = {"slope_min": 1e-9, "slope_max": 1e9, "gamma_bound": None}
    adapter = bestta.adapt(model, profile, layers=chosen, gamma=gamma, lr=0.02, **unbounded)
    for bein in adapter.bein.values():  # in float64 throughout, to be compared closely
        bein.double()
    adapter.source_embedding = {n: profile.layers[n].mu for n in chosen}
    adapter.velocity = {n: v.double() for n, v in adapter.velocity.items()}
    adapter.track = lambda name, unadapted: track(adapter, name, unadapted)

    averages: dict[str, torch.Tensor] = {}
    for step, image in enumerate(images):
        expected_loss, expected = oracle_gradients(adapter, image, averages, gamma == "relative")
        if step < 3:
            adapter(image)
            continue
        logits, passes = adapter.forward(image)
        total = bestta.adapters.bestta.total_loss(
            adapter.losses(logits, passes), adapter.config.weights
        )
        torch.testing.assert_close(total, expected_loss, rtol=1e-9, atol=1e-9)
        ours = gradients(total, adapter.trainable)
        assert list(ours) == list(expected)
        for name in expected:
            assert expected[name].abs().max() > 1e-4  # there is something to compare
            torch.testing.assert_close(ours[name], expected[name], rtol=1e-6, atol=1e-9)


def track(adapter, name: str, unadapted: torch.Tensor) -> torch.Tensor:
    """A in float64: the adapter itself keeps it in fp32."""
    current = unadapted.detach().mean(0)
    before = adapter.target_embedding.get(name, current)
    adapter.target_embedding[name] = 0.9 * before + 0.1 * current
    return adapter.target_embedding[name]


def oracle_gradients(adapter, image, averages, relative):
    """The loss and gradients of one image, from the equations; moves ``averages`` (A) along."""
    model, profile, config = adapter.model, adapter.profile, adapter.config
    parameters = {n: p.detach().double().requires_grad_() for n, p in adapter.trainable.items()}
    passes, pairs = [], []

    def stage(name: str, x: torch.Tensor) -> torch.Tensor:
        x = getattr(model, name)(x)
        if name not in config.layers:
            return x
        mu_s = profile.layers[name].mu
        sigma_s = (profile.layers[name].sigma ** 2 + config.eps).sqrt().float().double()
        pair = parameters[f"{name}/gamma_mu"], parameters[f"{name}/gamma_sigma"]
        unit = sigma_s if relative else 1
        y = oracle.bein(x, mu_s.float().double(), sigma_s, pair[0] * unit, pair[1] * unit, 0.7)
        now = x.detach().mean((0, 2, 3))
        averages[name] = 0.9 * averages.get(name, now) + 0.1 * now
        passes.append((mu_s, averages[name], x, y))
        pairs.append(pair)
        return y

    low = stage("layer2", stage("layer1", image))
    high = stage("layer4", stage("layer3", low))
    logits = model.head(torch.cat([low, high], 1))
    logits = nn.functional.interpolate(logits, size=image.shape[2:], mode="bilinear")
    # γ = 0 has no L2 gradient: keep the oracle's root off zero there.
    weights = WEIGHTS if pairs[0][0].abs().sum() > 0 else (*WEIGHTS[:3], 0.0)
    loss = oracle.total_loss(logits, passes, pairs, weights)
    found = torch.autograd.grad(loss, list(parameters.values()))
    return loss, dict(zip(parameters, found, strict=True))


def test_updates_are_those_of_torch_sgd_with_momentum(segmenter, profile):
    """The independent implementation is torch.optim.SGD, fed with the adapter's own gradients."""
    adapter = bestta.adapt(segmenter, profile, layers=["layer2"], lr=0.05, gamma_bound=None)
    twins, steps = held_against(adapter, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    for image in stream(6, seed=7, **FOG):
        adapter(image)
    assert len(steps) == 6
    for name, parameter in adapter.trainable.items():
        torch.testing.assert_close(parameter, twins[name])


def test_presets_hold_the_papers_figures(segmenter, classifier, profile):
    """Sec. 4.1 and the supplement's section C."""
    segmentation = bestta.adapt(segmenter, profile, preset="paper").config
    profile = SourceProfile.collect(classifier, stream(2, seed=1), layers="layer1")
    classification = bestta.adapt(classifier, profile, preset="paper").config

    def figures(c):
        lambdas = (c.lambda_style, c.lambda_content, c.lambda_entropy, c.lambda_l2)
        return lambdas, c.rho, c.lr, c.style

    assert figures(segmentation) == ((0.3, 1.0, 0.3, 0.04), 0.7, 0.001, "directional")
    assert segmentation.momentum == 0.9
    assert figures(classification) == ((1.0, 0.0, 1.0, 0.0), 0.9, 0.1, "source")
    for settings in (segmentation, classification):  # one image, and every one
        assert (settings.statistics_decay, settings.when) == (0.0, "always")


@pytest.mark.usual
def test_the_usual_form_leaves_clear_images_alone_and_moves_foggy_ones(segmenter, profile):
    """Of the style of the first layer, in source deviations: how far from the source it ends."""

    def moved(images):
        adapter = bestta.adapt(segmenter, profile)
        assert adapter.settings["statistics"] == "weighed"
        found = []
        for image in images:
            adapter(image)
            _, passes = adapter.forward(image, learning=False)
            done = passes["layer1"].done
            found.append(float((done.adapted_mean - done.mean).abs().mean()))
        return sum(found) / len(found)

    clear = moved(stream(10, seed=7))
    assert moved(stream(10, seed=7, **FOG)) > 10 * clear


@pytest.mark.parametrize(
    "chosen", [c for n in range(1, 5) for c in combinations(LAYERS, n)], ids="+".join
)
def test_every_combination_of_layers_adapts(segmenter, profile, chosen):
    """The 15 rows of the paper's table on layers."""
    adapter = bestta.adapt(segmenter, profile, layers=chosen)
    for image in stream(3, seed=7, **FOG):
        adapter(image)
        assert adapter.last.adapted
    assert {name.split("/")[0] for name in adapter.trainable} == set(chosen)
    assert all(p.abs().max() > 0 for p in adapter.trainable.values())


def test_only_gamma_moves_in_a_thousand_steps(segmenter, profile):
    before = snapshot(segmenter)
    adapter = bestta.adapt(segmenter, profile, layers=["layer2"], statistics_decay=0.9)
    start = gammas(adapter)
    for image in stream(20, seed=7, size=6, **FOG) * 50:
        adapter(image)
    assert same(before, snapshot(segmenter))
    assert all(not torch.equal(v, start[n]) for n, v in gammas(adapter).items())
    assert all(p.grad is None for p in segmenter.parameters())


def test_the_style_moves_to_the_source(segmenter, profile):
    """Behind BeIN the channel means lie nearer to the source's than before it, by about 1 - ρ."""
    adapter = bestta.adapt(segmenter, profile, layers=["layer2"], lr=0.0)
    image = stream(1, seed=7, **FOG)[0]
    _, passes = adapter.forward(image)
    unadapted, adapted = passes["layer2"].embeddings(None)
    source = adapter.source_embedding["layer2"]
    ratio = (adapted - source).norm() / (unadapted - source).norm()
    assert ratio.item() == pytest.approx(0.3, abs=1e-4)


def test_the_prediction_is_that_of_the_forward_trained_on(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, lr=0.1)
    image = stream(1, seed=7, **FOG)[0]
    still = bestta.adapt(segmenter, profile, lr=0.0)
    assert torch.equal(adapter(image), still(image))


def test_the_prediction_may_be_taken_after_the_update(segmenter, profile):
    after = bestta.adapt(segmenter, profile, predict="after", lr=0.1)
    before = bestta.adapt(segmenter, profile, predict="before", lr=0.1)
    probe = bestta.adapt(segmenter, profile, lr=0.0)
    for image in stream(3, seed=7, **FOG):
        late, early = after(image), before(image)
        assert not torch.equal(late, early)
        assert same(gammas(after), gammas(before))
        probe.load_state(after.state())
        assert torch.equal(probe(image), late)


def test_predicting_after_the_update_advances_the_streams_statistics_once(segmenter, profile):
    states = []
    for predict in ("before", "after"):
        adapter = bestta.adapt(
            segmenter, profile, layers=["layer1"], predict=predict, statistics_decay=0.5
        )
        for image in stream(3, seed=7, **FOG):
            adapter(image)
        states.append(adapter.state())
    assert same(*states)


def test_a_batch_equals_its_images_one_by_one_when_gamma_is_fixed():
    model = randomise(Segmenter(), seed=1).double()
    source = [x.double() for x in stream(8, seed=3)]
    adapter = bestta.adapt(model, SourceProfile.collect(model, source, layers=LAYERS), lr=0.0)
    for parameter in adapter.trainable.values():
        nn.init.uniform_(parameter, -0.2, 0.2)
    batch = stream(1, seed=7, batch=5, **FOG)[0].double()
    together = adapter(batch)
    alone = torch.cat([adapter(image) for image in batch.split(1)])
    torch.testing.assert_close(together, alone)


def test_a_batch_takes_one_step(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile)
    logits = adapter(stream(1, seed=7, batch=3, **FOG)[0])
    assert logits.shape == (3, 5, 12, 12)
    assert adapter.last.adapted
    assert adapter.images_seen == 3


def test_gamma_of_two_numbers_in_all(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, layers=["layer3"], gamma_shape="scalar")
    adapter(stream(1, seed=7, **FOG)[0])
    assert sum(p.numel() for p in adapter.trainable.values()) == 2
    assert all(p.item() != 0 for p in adapter.trainable.values())


def test_relative_gamma_stays_within_its_bound(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, lr=100.0, gamma_bound=0.25)
    for image in stream(5, seed=7, **FOG):
        adapter(image)
    assert max(p.abs().max().item() for p in adapter.trainable.values()) == 0.25


def test_absolute_gamma_is_not_bounded_as_in_the_paper(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, lr=1.0, gamma="absolute", gamma_bound=0.25)
    for image in stream(5, seed=7, **FOG):
        adapter(image)
    assert max(p.abs().max().item() for p in adapter.trainable.values()) > 0.25


def test_source_style_may_come_from_the_batch_norm(segmenter):
    with torch.no_grad():
        segmenter.layer2[1].weight[0] = -1.5  # a deviation is its size
    profile = SourceProfile.collect(segmenter, stream(2, seed=1), layers=["layer2.1"])
    adapter = bestta.adapt(segmenter, profile, source_style="batchnorm", eps=1e-12)
    norm = segmenter.layer2[1]
    bein = adapter.bein["layer2.1"]
    torch.testing.assert_close(bein.mu_s, norm.bias.detach())
    torch.testing.assert_close(bein.sigma_s, norm.weight.detach().abs())


def test_a_state_learned_with_another_source_style_is_refused(segmenter, tmp_path):
    profile = SourceProfile.collect(segmenter, stream(2, seed=1), layers=["layer2.1"])
    bestta.adapt(segmenter, profile).save(tmp_path / "camera")
    with pytest.raises(ValueError, match="saved with source_style='collected'"):
        bestta.adapt(segmenter, profile, source_style="batchnorm").load(tmp_path / "camera")


def test_source_style_from_a_batch_norm_needs_one(segmenter, profile):
    with pytest.raises(ValueError, match=r"'layer1'.*ends in ReLU"):
        bestta.adapt(segmenter, profile, source_style="batchnorm")


# --- losses that are off cost nothing -------------------------------------------------------


class CountBackward(torch.autograd.Function):
    count = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        CountBackward.count += 1
        return gradient


@pytest.mark.parametrize("chosen", [["layer2"], ["layer1", "layer2"]])
def test_without_the_entropy_nothing_behind_the_last_bein_is_differentiated(
    segmenter, profile, chosen
):
    adapter = bestta.adapt(segmenter, profile, layers=chosen, lambda_entropy=0.0)
    image = stream(1, seed=7, **FOG)[0]
    CountBackward.count = 0
    with inserted(segmenter, {"layer3": CountBackward.apply}):
        logits, _ = adapter.forward(image)
        adapter(image)
    assert not logits.requires_grad
    assert CountBackward.count == 0
    assert all(p.abs().max() > 0 for p in adapter.trainable.values())


def test_with_the_entropy_the_gradient_comes_through_the_rest(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, layers=["layer2"])
    CountBackward.count = 0
    with inserted(segmenter, {"layer3": CountBackward.apply}):
        adapter(stream(1, seed=7, **FOG)[0])
    assert CountBackward.count == 1


def test_nothing_before_the_first_bein_is_differentiated(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, layers=["layer2"])
    CountBackward.count = 0
    with inserted(segmenter, {"layer1": CountBackward.apply}):
        adapter(stream(1, seed=7, **FOG)[0])
    assert CountBackward.count == 0


@pytest.mark.parametrize("name", ["style", "content", "entropy", "l2"])
def test_a_loss_without_weight_is_not_computed(segmenter, profile, name):
    adapter = bestta.adapt(segmenter, profile, **{f"lambda_{name}": 0.0})
    adapter(stream(1, seed=7, **FOG)[0])
    assert set(adapter.last.losses) == {"style", "content", "entropy", "l2", "total"} - {name}


def test_without_a_learning_rate_there_is_no_backward_and_style_is_still_transferred(
    segmenter, profile
):
    adapter = bestta.adapt(segmenter, profile, lr=0.0)
    image = stream(1, seed=7, **FOG)[0]
    CountBackward.count = 0
    graphs = []
    with inserted(segmenter, {"layer3": lambda x: graphs.append(x.requires_grad)}):
        logits = adapter(image)
    assert set(graphs) == {False}
    assert not adapter.last.adapted
    assert "held still" in adapter.last.reason
    assert not torch.equal(logits, segmenter(image))


# --- embeddings -----------------------------------------------------------------------------


def test_whole_maps_as_embeddings_follow_equation_9(segmenter):
    profile = SourceProfile.collect(segmenter, stream(4, seed=3), layers="layer2", embedding="map")
    adapter = bestta.adapt(segmenter, profile, embedding="map", embedding_decay=0.8)
    average = None
    for image in stream(3, seed=7, **FOG):
        with torch.no_grad():
            _, passes = adapter.forward(image)
        unadapted, adapted = passes["layer2"].embeddings(None)
        average = unadapted if average is None else 0.8 * average + 0.2 * unadapted
        source = profile.layers["layer2"].embedding_map.float()
        expected = 1 - oracle.cosine(source - average[0], adapted - unadapted)
        adapter(image)
        assert adapter.last.losses["style"] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("start", ["first", "source"])
def test_the_average_of_target_embeddings_starts_where_it_is_told(segmenter, profile, start):
    """By hand, with decay 0.8: 0.8 of what was and 0.2 of the image, the image entering first."""
    adapter = bestta.adapt(
        segmenter, profile, layers=["layer1"], embedding_decay=0.8, embedding_start=start
    )
    images = stream(3, seed=7, **FOG)
    with torch.no_grad():
        seen = [segmenter.layer1(image).mean((0, 2, 3)) for image in images]
    average = seen[0] if start == "first" else profile.layers["layer1"].mu.float()
    for image, embedding in zip(images, seen, strict=True):
        average = 0.8 * average + 0.2 * embedding
        adapter(image)
        torch.testing.assert_close(adapter.target_embedding["layer1"], average)


@pytest.mark.parametrize("inplace", [False, True])
def test_whole_maps_are_those_bein_returned_whatever_the_model_makes_of_them(inplace):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=inplace), nn.Conv2d(4, 2, 1))
    model = randomise(model, seed=5)
    profile = SourceProfile.collect(model, stream(4, seed=3), layers="0", embedding="map")
    adapter = bestta.adapt(model, profile, embedding="map")
    _, passes = adapter.forward(stream(1, seed=7)[0])
    _, adapted = passes["0"].embeddings(None)
    assert adapted.min() < 0  # before the ReLU


def test_whole_maps_refuse_another_image_size_and_go_on(segmenter):
    profile = SourceProfile.collect(segmenter, stream(4, seed=3), layers="layer2", embedding="map")
    adapter = bestta.adapt(segmenter, profile, embedding="map")
    adapter(stream(1, seed=7)[0])
    before = adapter.state()
    with pytest.raises(ValueError, match=r"(?s)\(8, 6, 6\).*\(8, 8, 8\).*pooled"):
        adapter(stream(1, seed=7, size=16)[0])
    assert same(before, adapter.state())
    adapter(stream(1, seed=8)[0])
    assert adapter.last.adapted


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_whole_maps_are_averaged_in_fp32(dtype):
    model = randomise(Segmenter(), seed=1).to(dtype)
    images = [x.to(dtype) for x in stream(4, seed=3)]
    profile = SourceProfile.collect(model, images, layers="layer2", embedding="map")
    adapter = bestta.adapt(model, profile, embedding="map")
    for image in images:
        adapter(image)
        assert adapter.last.adapted
    assert adapter.target_embedding["layer2"].dtype == torch.float32


def test_pooled_embeddings_take_any_image_size(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile)
    for size in (8, 13, 20):
        adapter(stream(1, seed=7, size=size)[0])
        assert adapter.last.adapted


# --- streams --------------------------------------------------------------------------------


def run(adapter, images) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    return [adapter(image) for image in images], adapter.state()


SETTINGS = [
    {},
    {"statistics_decay": 0.8, "lr": 0.05},
    {"statistics_decay": 0.8, "statistics": "weighed"},
    {"statistics_decay": 0.99, "statistics": "weighed"},
    {"gamma": "absolute", "gamma_shape": "scalar", "predict": "after"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_save_load_continue_equals_never_having_stopped(segmenter, profile, tmp_path, settings):
    images = stream(9, seed=7, **FOG)
    whole = run(bestta.adapt(segmenter, profile, **settings), images)
    first = bestta.adapt(segmenter, profile, **settings)
    run(first, images[:4])
    first.save(tmp_path / "camera.safetensors")
    second = bestta.adapt(segmenter, profile, **settings)
    second.load(tmp_path / "camera.safetensors")
    rest = run(second, images[4:])
    assert all(torch.equal(a, b) for a, b in zip(whole[0][4:], rest[0], strict=True))
    assert same(whole[1], rest[1])
    assert second.images_seen == 9


@pytest.mark.parametrize("settings", SETTINGS)
def test_reset_goes_back_to_the_exact_start(segmenter, profile, settings):
    adapter = bestta.adapt(segmenter, profile, **settings)
    images = stream(4, seed=7, **FOG)
    first = run(adapter, images)
    adapter.reset()
    assert adapter.images_seen == 0
    second = run(adapter, images)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert same(first[1], second[1])


def test_the_same_seed_gives_the_same_stream_of_gamma(segmenter, profile):
    def stream_of_gamma(seed):
        torch.manual_seed(torch.seed() % 1000)  # the global generator plays no part
        adapter = bestta.adapt(segmenter, profile, seed=seed)
        return [adapter(image) is None or gammas(adapter) for image in stream(5, seed=7, **FOG)]

    for a, b in zip(stream_of_gamma(3), stream_of_gamma(3), strict=True):
        assert same(a, b)


def test_two_cameras_share_one_model_without_meeting(segmenter, profile):
    fog, night = stream(4, seed=7, **FOG), stream(4, seed=8, shift=-2.0)
    alone = [run(bestta.adapt(segmenter, profile, lr=0.05), images) for images in (fog, night)]
    first = bestta.adapt(segmenter, profile, lr=0.05)
    second = bestta.adapt(segmenter, profile, lr=0.05)
    mixed: list[list[torch.Tensor]] = [[], []]
    for a, b in zip(fog, night, strict=True):
        mixed[0].append(first(a))
        mixed[1].append(second(b))
    for (predictions, state), together, adapter in zip(alone, mixed, (first, second), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(predictions, together, strict=True))
        assert same(state, adapter.state())


def test_a_state_is_saved_and_taken_up_after_whichever_image(segmenter, profile, tmp_path):
    """After a look the guard holds the very state that is in force."""
    first, second = (
        bestta.adapt(segmenter, profile, statistics_decay=0.99, statistics="weighed", guard=True)
        for _ in range(2)
    )
    for image in stream(6, seed=7, **FOG):
        first(image)
        first.save(tmp_path / "camera.safetensors")
        second.load(tmp_path / "camera.safetensors")
        assert same(first.whole_state(), second.whole_state())


def test_a_saved_state_is_kilobytes(segmenter, profile, tmp_path):
    adapter = bestta.adapt(segmenter, profile)
    adapter(stream(1, seed=7)[0])
    adapter.save(tmp_path / "camera.safetensors")
    assert (tmp_path / "camera.safetensors").stat().st_size < 10_000


def test_a_state_with_other_meaning_is_refused(segmenter, profile, tmp_path):
    path = tmp_path / "camera.safetensors"
    bestta.adapt(segmenter, profile, layers=["layer1"]).save(path)
    for other in (
        {"layers": ["layer2"]},
        {"gamma": "absolute"},
        {"gamma_shape": "scalar"},
    ):
        adapter = bestta.adapt(segmenter, profile, **({"layers": ["layer1"]} | other))
        with pytest.raises(ValueError, match=f"saved with {next(iter(other))}="):
            adapter.load(path)


def test_a_state_of_another_model_is_refused(segmenter, profile, tmp_path):
    bestta.adapt(segmenter, profile).save(tmp_path / "camera")
    other = randomise(Segmenter(), seed=77)
    theirs = SourceProfile.collect(other, stream(2, seed=3), layers=LAYERS)
    with pytest.raises(ValueError, match="another model"):
        bestta.adapt(other, theirs).load(tmp_path / "camera")


def test_a_damaged_state_is_refused_and_changes_nothing(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, layers=["layer1"])
    adapter(stream(1, seed=7)[0])
    before = adapter.state()
    nan = {**before, "layer1/gamma_mu": torch.full((6,), float("nan"))}
    wide = {**before, "layer1/gamma_mu": torch.zeros(7)}
    lacking = {k: v for k, v in before.items() if k != "layer1/gamma_sigma"}
    extra = {**before, "layer9/gamma_mu": torch.zeros(6)}
    for state, words in [
        (nan, "damaged"),
        (wide, r"\(7,\), expected \(6,\)"),
        (lacking, "layer1/gamma_sigma is missing"),
        (extra, "layer9/gamma_mu.*nothing of that name"),
    ]:
        with pytest.raises(ValueError, match=words):
            adapter.load_state(state)
        assert same(before, adapter.state())


def test_a_damaged_state_file_is_refused_and_changes_nothing(segmenter, profile, tmp_path):
    adapter = bestta.adapt(segmenter, profile, layers=["layer1"], statistics_decay=0.5)
    adapter(stream(1, seed=7)[0])
    path = tmp_path / "camera"
    adapter.save(path)
    tensors, about = load_tensors(path, "adapter state")
    adapter(stream(1, seed=8)[0])
    before = adapter.state()

    def without(mapping, key):
        return {k: v for k, v in mapping.items() if k != key}

    for damaged in (
        (without(tensors, "images_seen"), about),
        (without(tensors, "generator"), about),
        ({**tensors, "images_seen": torch.zeros(2)}, about),
        ({**tensors, "generator": tensors["generator"][:-1]}, about),
        (without(tensors, "layer1/mu_x"), about),
        ({**tensors, "layer1/seen": torch.tensor(3.0)}, about),
        ({**tensors, "layer1/sigma_x": -tensors["layer1/sigma_x"]}, about),
        (tensors, without(about, "settings")),
        (tensors, {**about, "model": {"name": "?"}}),
    ):
        save_tensors(path, *damaged)
        with pytest.raises(ValueError, match="damaged"):
            adapter.load(path)
        assert same(before, adapter.state())
        assert adapter.images_seen == 2


def test_statistics_are_weighed_only_with_a_profile_that_knows_how_images_differ(
    segmenter, profile, tmp_path
):
    path = tmp_path / "profile"
    profile.save(path)
    tensors, about = load_tensors(path, "source profile")
    old = {name: t for name, t in tensors.items() if not name.endswith("_spread")}
    save_tensors(path, old, about)
    bestta.adapt(segmenter, path, statistics_decay=0.9)
    with pytest.raises(ValueError, match="Collect it anew"):
        bestta.adapt(segmenter, path, statistics_decay=0.9, statistics="weighed")


def test_the_order_in_which_layers_are_named_means_nothing(segmenter, profile, tmp_path):
    path = tmp_path / "camera"
    bestta.adapt(segmenter, profile, layers=["layer3", "layer1"]).save(path)
    adapter = bestta.adapt(segmenter, profile, layers=["layer1", "layer3"])
    adapter.load(path)
    assert list(adapter.bein) == ["layer1", "layer3"]


# --- bad frames -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_frame_with_bad_pixels_leaves_no_trace(segmenter, profile, value):
    images = stream(6, seed=7, **FOG)
    bad = images[0].clone()
    bad[0, 1, 2, 3] = value
    clean = run(bestta.adapt(segmenter, profile, statistics_decay=0.5), images)
    adapter = bestta.adapt(segmenter, profile, statistics_decay=0.5)
    predictions, _ = run(adapter, images[:3])
    answer = adapter(bad)
    assert torch.equal(answer.nan_to_num(), segmenter(bad).detach().nan_to_num())
    assert adapter.last.skipped
    assert not adapter.last.adapted
    assert "1 pixel values are NaN or infinite" in adapter.last.reason
    rest, state = run(adapter, images[3:])
    assert all(torch.equal(a, b) for a, b in zip(clean[0], predictions + rest, strict=True))
    assert same(clean[1], state)


class Fragile(nn.Module):
    """A segmenter whose head has an infinite gradient, or output, when ``broken`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1))
        self.broken = ""
        self.calls = self.calls_before = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if self.broken == "gradient":  # √0: 0 forward, ∞·0 backward
            return y + (y * 0).sqrt()
        if self.broken == "adapted output" and y.mean() < 0:
            return y / 0
        if self.broken == "error":
            raise RuntimeError("out of memory, say")
        if self.broken == "interrupt":
            raise KeyboardInterrupt
        self.calls += 1
        if self.broken == "second call" and self.calls == self.calls_before + 2:
            return y / 0
        return y


@pytest.fixture
def fragile() -> tuple[Fragile, SourceProfile]:
    model = randomise(Fragile(), seed=4)
    profile = SourceProfile.collect(model, stream(4, seed=3), layers="body")
    model.calls_before = model.calls
    return model, profile


def test_a_gradient_that_is_not_finite_changes_nothing_and_says_so(fragile):
    model, profile = fragile
    adapter = bestta.adapt(model, profile, statistics_decay=0.5)
    images = stream(3, seed=7, **FOG)
    adapter(images[0])
    before = adapter.state()
    model.broken = "gradient"
    prediction = adapter(images[1])
    assert adapter.last.rolled_back
    assert not adapter.last.adapted
    assert "gradient is not finite" in adapter.last.reason
    assert bool(prediction.isfinite().all())
    assert same(before, adapter.state())
    model.broken = ""
    adapter(images[2])
    assert adapter.last.adapted


def test_an_adapted_prediction_that_is_not_finite_gives_way_to_the_source_models():
    """The network breaks on features of negative mean, which only the adapted ones have."""
    model = randomise(Fragile(), seed=4)
    with torch.no_grad():
        model.body[0].weight.fill_(0.1)
        model.body[0].bias.zero_()
    profile = SourceProfile.collect(model, stream(4, seed=3, shift=-5.0), layers="body")
    adapter = bestta.adapt(model, profile)
    model.broken = "adapted output"
    image = stream(1, seed=7, shift=1.0)[0]
    start = adapter.state()
    prediction = adapter(image)
    assert torch.equal(prediction, model(image))
    assert adapter.last.skipped
    assert adapter.last.rolled_back
    assert "prediction is not finite" in adapter.last.reason
    assert same(start, adapter.state())


@pytest.mark.parametrize("error", ["error", "interrupt"])
def test_a_frame_that_raises_leaves_the_stream_as_it_was(fragile, error):
    model, profile = fragile
    adapter = bestta.adapt(model, profile, statistics_decay=0.5)
    adapter(stream(1, seed=7)[0])
    before = adapter.state()
    model.broken = error
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        adapter(stream(1, seed=8)[0])
    assert same(before, adapter.state())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("settings", [{}, {"statistics_decay": 0.5}, {"gamma": "absolute"}])
@pytest.mark.parametrize(
    "glitch",
    [
        torch.zeros_like,
        lambda x: torch.full_like(x, -2.1),
        lambda x: torch.tensor([2.2, 2.4, 2.6]).view(1, 3, 1, 1).expand_as(x),
        lambda x: x * 1e4,
        lambda x: x * 1e25,
        lambda x: x * 1e37,
        lambda x: x + 1e5,
    ],
    ids=["grey", "black", "white", "x 1e4", "x 1e25", "x 1e37", "+ 1e5"],
)
def test_a_frame_out_of_reach_is_answered_and_forgotten(segmenter, profile, glitch, settings):
    """Finite pixels, but no picture: blank, over-exposed, or scaled by a broken camera."""
    images = stream(6, seed=7, **FOG)
    clean = run(bestta.adapt(segmenter, profile, **settings), images)
    adapter = bestta.adapt(segmenter, profile, **settings)
    first, _ = run(adapter, images[:3])
    adapter(glitch(images[0]))
    assert not adapter.last.adapted
    assert adapter.last.rolled_back
    assert "out of reach" in adapter.last.reason or "not finite" in adapter.last.reason
    rest, state = run(adapter, images[3:])
    assert all(torch.equal(a, b) for a, b in zip(clean[0], first + rest, strict=True))
    assert same(clean[1], state)


def test_a_stream_does_not_lock_itself_out():
    """Behind the first BeIN features hold what was learned; judged by them, good frames are far.

    One dark frame fills the stream's statistics; ordinary frames must be learned from again.
    """
    locked = 0
    for seed in range(12):
        model = randomise(Segmenter(), seed=seed)
        profile = SourceProfile.collect(model, stream(8, seed=3), layers=LAYERS)
        adapter = bestta.adapt(model, profile, lr=0.0, statistics_decay=0.99)
        adapter(stream(1, seed=7, scale=0.2, shift=-1.0)[0])
        for image in stream(3, seed=8):
            adapter(image)
            locked += adapter.last.rolled_back
    assert locked == 0


class Plain(nn.Module):
    """One linear layer: what is done to the image is done to its features."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, channels, 1, bias=False))
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image))


@pytest.mark.parametrize(
    ("glitch", "reached"),
    [
        (lambda x: x, True),
        (lambda x: x * 5, True),
        (lambda x: x / 5, True),
        (lambda x: x - x.mean((2, 3), keepdim=True) + 1000, False),  # only the mean
        (lambda x: (x - x.mean((2, 3), keepdim=True)) * 30, False),  # only the contrast, up
        (lambda x: (x - x.mean((2, 3), keepdim=True)) / 30, False),  # only the contrast, down
    ],
)
@pytest.mark.parametrize("position", [0, 1])
def test_reach_is_measured_by_mean_and_by_contrast_of_every_sample(glitch, reached, position):
    model = randomise(Plain(), seed=1)
    profile = SourceProfile.collect(model, stream(8, seed=3), layers="body")
    adapter = bestta.adapt(model, profile)
    batch = stream(1, seed=7, batch=2)[0]
    batch[position] = glitch(batch[position : position + 1])[0]
    adapter(batch)
    assert adapter.last.adapted == reached
    assert ("out of reach" in adapter.last.reason) != reached


def test_channels_silent_in_the_source_do_not_hide_a_glitch():
    model = randomise(Plain(channels=9), seed=1)
    with torch.no_grad():
        model.body[0].weight[:6] = 0
    profile = SourceProfile.collect(model, stream(8, seed=3), layers="body")
    adapter = bestta.adapt(model, profile, statistics_decay=0.9)
    image = stream(1, seed=7)[0]
    for glitch in (image * 1e4, image * 1e8, torch.zeros_like(image)):
        adapter(glitch)
        assert "out of reach" in adapter.last.reason
    adapter(image)
    assert adapter.last.adapted


def test_a_model_silent_throughout_is_left_to_learn_nothing():
    model = randomise(Plain(), seed=1)
    nn.init.zeros_(model.body[0].weight)
    profile = SourceProfile.collect(model, stream(4, seed=3), layers="body")
    adapter = bestta.adapt(model, profile)
    adapter(stream(1, seed=7)[0])
    assert not adapter.last.rolled_back
    assert all(bool(v.isfinite().all()) for v in adapter.state().values())


@pytest.mark.parametrize("noise", [0.1, 0.01])
def test_a_camera_that_sees_the_source_itself_is_not_driven_away(segmenter, noise):
    """One scene in clear weather, day in, day out: there is no style to transfer.

    With the plain cosine of Eq. 9 the direction is noise, its gradient huge, and γ wanders off.
    """
    scene = stream(1, seed=1, size=32)[0]
    frames = [scene + noise * x for x in stream(90, seed=2, size=32)]
    profile = SourceProfile.collect(segmenter, frames[:30], layers="layer2")
    agreement = {}
    for floor in (0.1, 0.0):
        adapter = bestta.adapt(segmenter, profile, style_floor=floor)
        for frame in frames[30:]:
            prediction = adapter(frame).argmax(1)
        agreement[floor] = (prediction == segmenter(frame).argmax(1)).float().mean().item()
    assert agreement[0.1] > 0.98
    assert agreement[0.1] > agreement[0.0]


def test_features_that_stop_being_one_per_image_are_refused(tmp_path):
    """Windows folded into the batch: one per small image, four of a larger one."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Conv2d(3, 3, 1))

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            tiles = image.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5)
            return self.block(tiles.flatten(0, 2)).mean((2, 3)).view(len(image), -1, 3).mean(1)

    model = randomise(Windows(), seed=1)
    profile = SourceProfile.collect(model, stream(4, seed=3, size=8), layers="block")
    adapter = bestta.adapt(model, profile)
    adapter(stream(1, seed=7, size=8)[0])
    before = adapter.state()
    with pytest.raises(ValueError, match=r"features \(4, 3, 8, 8\) for 1 images"):
        adapter(stream(1, seed=7, size=16)[0])
    assert same(before, adapter.state())


def test_fog_and_night_are_within_reach(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile)
    for weather in ({"shift": 2.0, "scale": 0.25}, {"shift": -1.0, "scale": 0.2}, {"scale": 3.0}):
        adapter(stream(1, seed=7, **weather)[0])
        assert adapter.last.adapted


@pytest.mark.parametrize("lr", [0.0, 0.001])
def test_without_reach_a_frame_still_never_leaves_a_state_that_is_not_finite(
    segmenter, profile, lr
):
    adapter = bestta.adapt(segmenter, profile, lr=lr, statistics_decay=0.9, reach=None)
    images = stream(3, seed=7, **FOG)
    adapter(images[0])
    before = adapter.state()
    adapter(images[1] * 1e25)  # the variance of its features overflows
    assert not adapter.last.adapted
    assert same(before, adapter.state())
    adapter(images[2])
    assert not adapter.last.rolled_back


def test_a_step_too_large_for_numbers_is_undone(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, gamma="absolute", lr=1e30, lambda_entropy=1e10)
    for image in stream(4, seed=7, **FOG):
        adapter(image)
        assert all(bool(v.isfinite().all()) for v in adapter.state().values())
    assert adapter.last.rolled_back


def test_a_loss_that_is_not_finite_is_named(segmenter, profile):
    adapter = bestta.adapt(segmenter, profile, lambda_entropy=1e39)  # too large for fp32
    before = adapter.state()
    adapter(stream(1, seed=7, scale=3.0)[0])
    assert adapter.last.losses["total"] == float("inf")
    assert adapter.last.reason == "the loss is not finite"
    assert same(before, adapter.state())


def test_a_second_forward_that_is_not_finite_undoes_the_step(fragile):
    model, profile = fragile
    adapter = bestta.adapt(model, profile, predict="after")
    before = adapter.state()
    model.broken = "second call"
    image = stream(1, seed=7, **FOG)[0]
    prediction = adapter(image)
    assert adapter.last.rolled_back
    assert "prediction is not finite" in adapter.last.reason
    assert torch.equal(prediction, model(image))
    assert same(before, adapter.state())


@pytest.mark.parametrize("level", [0.0, 1.0, -3.0, 1e4])
def test_constant_frames_neither_break_nor_poison_a_stream(segmenter, profile, level):
    adapter = bestta.adapt(segmenter, profile, statistics_decay=0.5)
    for _ in range(10):
        logits = adapter(torch.full((1, 3, 12, 12), level))
        assert bool(logits.isfinite().all())
    assert all(bool(v.isfinite().all()) for v in adapter.state().values())


# --- settings -------------------------------------------------------------------------------


def test_named_settings_win_over_the_profiles_and_those_over_the_presets(segmenter, profile):
    profile = replace(profile, settings={"bestta": {"rho": 0.2, "lr": 0.5, "layers": ["layer4"]}})
    config = bestta.adapt(segmenter, profile, lr=0.01).config
    assert (config.lr, config.rho, config.layers, config.momentum) == (0.01, 0.2, ("layer4",), 0.9)


def test_no_layers_named_means_all_of_the_profile(segmenter, profile):
    assert bestta.adapt(segmenter, profile, layers=None).config.layers == tuple(LAYERS)


def test_a_preset_may_be_named(segmenter, profile):
    assert bestta.adapt(segmenter, profile, preset="classification").config.rho == 0.9


def test_the_papers_form_wins_over_the_profiles_settings_and_the_call_over_both(segmenter, profile):
    ours = {"rho": 0.2, "statistics_decay": 0.9, "layers": ["layer1", "layer4"], "eps": 1e-3}
    profile = replace(profile, settings={"bestta": ours, "bestta-paper": {"layers": ["layer3"]}})
    config = bestta.adapt(segmenter, profile, preset="paper", lr=0.5).config
    assert (config.rho, config.statistics_decay, config.layers) == (0.7, 0.0, ("layer3",))
    assert (config.gamma, config.guard, config.style_floor) == ("absolute", False, 0.0)
    assert (config.lr, config.eps) == (0.5, 1e-5)
    assert bestta.adapt(segmenter, profile).config.rho == 0.2


def test_the_papers_form_follows_the_equations(segmenter, profile):
    """One step, against Eq. 6-8 transcribed: no bound, no floor, nothing of the stream's."""
    adapter = bestta.adapt(segmenter, profile, preset="paper", layers=["layer1"])
    image = stream(1, seed=7, **FOG)[0]
    layer = profile.layers["layer1"]
    sigma = (layer.sigma**2 + 1e-5).sqrt().float()
    zero = torch.zeros_like(sigma)
    with torch.no_grad():
        moved = oracle.bein(segmenter.layer1(image), layer.mu.float(), sigma, zero, zero, 0.7)
        low = segmenter.layer2(moved)
        logits = segmenter.head(torch.cat([low, segmenter.layer4(segmenter.layer3(low))], 1))
        expected = torch.nn.functional.interpolate(logits, image.shape[2:], mode="bilinear")
    torch.testing.assert_close(adapter(image).detach(), expected, rtol=1e-4, atol=1e-5)


def test_a_profile_may_be_given_as_its_file(segmenter, profile, tmp_path):
    profile.save(tmp_path / "p.safetensors")
    assert bestta.adapt(segmenter, str(tmp_path / "p.safetensors")).config.layers == tuple(LAYERS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lrr": 0.1}, "no setting of 'bestta' is called 'lrr'. Did you mean 'lr'"),
        ({"preset": "detection"}, "no preset of 'bestta' is called 'detection'"),
        ({"method": "bestia"}, "no method is called 'bestia'. Did you mean 'bestta'"),
        ({"layers": ["layer7"]}, "no layer 'layer7'.*collected at layer1, layer2"),
        ({"layers": ["layer1", "layer1"]}, "named twice"),
        ({"rho": 1.1}, "rho must lie in"),
        ({"lr": -1.0}, "lr must lie in"),
        ({"lr": float("nan")}, "lr must lie in"),
        ({"momentum": 1.0}, "momentum must lie in"),
        ({"lambda_style": -0.1}, "lambda_style must lie in"),
        ({"gamma": "both"}, "gamma is one of 'relative', 'absolute'"),
        ({"gamma_bound": 0.0}, "gamma_bound must be positive"),
        ({"gamma_bound": "x"}, "gamma_bound must be positive or None, not 'x'"),
        ({"reach": "x"}, "reach must be above 1 or None, not 'x'"),
        ({"rho": "x"}, r"rho must lie in \[0, 1\], not 'x'"),
        ({"eps": "x"}, r"eps must lie in \[0, inf\), not 'x'"),
        ({"slope_min": None}, r"slope_min must lie in \[0, inf\), not None"),
        ({"layers": 3}, "layers are named as .* lists them, one or several; got 3"),
        ({"embedding": "map"}, "holds pooled embeddings only"),
        ({"slope_min": 2.0}, "0 < slope_min < 1"),
        ({"reach": 1.0}, "reach must be above 1"),
    ],
)
def test_bad_settings_are_told_what_would_work(segmenter, profile, settings, words):
    with pytest.raises(ValueError, match=words):
        bestta.adapt(segmenter, profile, **settings)
    assert all(p.requires_grad for p in segmenter.parameters())  # nothing is left frozen


def test_bestta_without_a_profile_says_how_to_make_one(segmenter):
    with pytest.raises(ValueError, match=r"needs a source profile.*SourceProfile.collect"):
        bestta.adapt(segmenter)


def test_every_loss_without_weight_holds_gamma_still(segmenter, profile):
    off = {f"lambda_{n}": 0.0 for n in ("style", "content", "entropy", "l2")}
    adapter = bestta.adapt(segmenter, profile, **off)
    adapter(stream(1, seed=7)[0])
    assert "held still" in adapter.last.reason
