"""The skeleton of a model and the weights that run through it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import bestta
from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.network import Network, assign, follow, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.insertion import skeleton
from bestta.losses import entropy_loss
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream


class Nested(nn.Module):
    """Containers of every kind, buffers that are saved and not, and a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()) for _ in "ab"])
        self.heads = nn.ModuleDict({"x": nn.Conv2d(3, 3, 1), "y": nn.Conv2d(3, 3, 1)})
        self.heads["y"].weight = self.heads["x"].weight
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(1)) for _ in "ab"])
        self.register_buffer("grid", torch.rand(3, 1, 1))
        self.register_buffer("cache", torch.rand(3, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        for layer, scale in zip(self.stages, self.scales, strict=True):
            image = layer(image) * scale
        return self.heads["y"](self.heads["x"](image + self.grid * self.cache))


@pytest.fixture
def nested() -> Nested:
    return randomise(Nested(), seed=1)


def pointers(model: nn.Module) -> dict[str, int]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in tensors}


@pytest.mark.parametrize("build", [Nested, Classifier, Segmenter, TokenClassifier])
def test_a_skeleton_shares_every_tensor_and_no_module(build):
    model = randomise(build(), seed=1)
    copied = skeleton(model)
    assert pointers(copied) == pointers(model)
    assert not set(map(id, model.modules())) & set(map(id, copied.modules()))


def test_a_skeleton_of_a_traced_model_shares_too():
    model = torch.fx.symbolic_trace(randomise(Classifier(), seed=1)).eval()
    assert pointers(skeleton(model)) == pointers(model)
    traced = bestta.adapt(model, method="tent")
    plain = bestta.adapt(randomise(Classifier(), seed=1), method="tent")
    for image in stream(3, seed=2, batch=4):
        assert torch.equal(traced(image), plain(image))


def test_what_is_done_to_the_skeleton_is_not_done_to_the_model(nested):
    image = stream(1, seed=2)[0]
    plain, names = nested(image), [name for name, _ in nested.named_modules()]
    copied = skeleton(nested)
    copied.stages[0] = nn.Identity()
    copied.heads["z"] = nn.Conv2d(3, 3, 1)
    copied.stages[1].register_forward_hook(lambda *_: torch.zeros(()))
    del copied.cache
    copied.train()
    assert [name for name, _ in nested.named_modules()] == names
    assert torch.equal(nested(image), plain)
    assert not any(module.training for module in nested.modules())


def test_without_weights_the_network_is_the_model(nested):
    image = stream(1, seed=2)[0]
    assert torch.equal(Network(nested)(image), nested(image))
    assert torch.equal(Network(nested)(image, Network(nested).weights()), nested(image))


@pytest.mark.parametrize("name", ["stages.0.0.weight", "heads.x.bias", "scales.1"])
def test_a_weight_reaches_the_module_of_its_name(nested, name):
    # Expected: a deep copy of the model, changed in place.
    image = stream(1, seed=2)[0]
    network = Network(nested)
    weights = network.weights([name])
    changed = copy.deepcopy(nested)
    with torch.no_grad():
        weights[name].add_(0.5)
        changed.get_parameter(name).add_(0.5)
    assert torch.equal(network(image, weights), changed(image))
    assert not torch.equal(network(image, weights), nested(image))


def test_a_tied_weight_is_one_weight_and_reaches_both_places(nested):
    image = stream(1, seed=2)[0]
    network = Network(nested)
    weights = network.weights()
    assert [n for n in weights if n in ("heads.x.weight", "heads.y.weight")] == ["heads.x.weight"]
    changed = copy.deepcopy(nested)  # keeps the tie
    with torch.no_grad():
        weights["heads.x.weight"].mul_(2)
        changed.heads["x"].weight.mul_(2)
    assert changed.heads["y"].weight is changed.heads["x"].weight
    assert torch.equal(network(image, weights), changed(image))
    found = gradients(network(image, weights).sum(), weights)
    changed(image).sum().backward()
    torch.testing.assert_close(found["heads.x.weight"], changed.heads["x"].weight.grad)


def test_gradients_arrive_at_the_given_weights_alone(nested):
    adapter = bestta.adapt(nested, method="source")  # freezes the model, as every adapter does
    network = Network(nested)
    weights = network.weights(["stages.0.0.weight", "scales.0"])
    network(stream(1, seed=2)[0], weights).sum().backward()
    assert all(bool(weight.grad.abs().sum() > 0) for weight in weights.values())
    assert all(p.grad is None for p in nested.parameters())
    adapter.remove()


def test_the_model_keeps_its_numbers_when_weights_are_trained(nested):
    before = snapshot(nested)
    network = Network(nested)
    weights = network.weights()
    optimiser = Optimiser.sgd(weights, lr=0.1)
    for image in stream(3, seed=2):
        optimiser.step(gradients(network(image, weights).square().mean(), weights))
    assert same(before, snapshot(nested))
    assert not torch.equal(weights["scales.0"], nested.scales[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_a_half_model_are_fp32_and_cast_on_their_way(dtype):
    model = randomise(Classifier(), seed=1).to(dtype)
    network = Network(model)
    weights = network.weights()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    image = stream(1, seed=2)[0].to(dtype)
    assert torch.equal(network(image, weights), model(image))
    with torch.no_grad():
        weights["fc.bias"].add_(1e-6)  # too little for half precision to tell
    assert torch.equal(network(image, weights), model(image))
    assert weights["fc.bias"].dtype == torch.float32
    assert not torch.equal(weights["fc.bias"], model.fc.bias.float())
    found = gradients(network(image, weights).float().sum(), weights)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}


def test_weights_of_a_double_model_stay_double():
    network = Network(randomise(Classifier(), seed=1).double())
    assert {weight.dtype for weight in network.weights().values()} == {torch.float64}


def test_two_sets_of_weights_run_through_one_network(nested):
    image = stream(1, seed=2)[0]
    network = Network(nested)
    student, teacher = network.weights(), network.weights()
    with torch.no_grad():
        student["scales.0"].mul_(3)
    assert torch.equal(network(image, teacher), nested(image))
    assert not torch.equal(network(image, student), nested(image))


@pytest.mark.parametrize(
    ("wrap", "output"),
    [
        (lambda y: {"a": y * 0, "b": y}, "b"),
        (lambda y: (y * 0, y), 1),
        (lambda y: {"out": y, "aux": y * 0}, None),
    ],
)
def test_the_logits_are_found_where_output_says(wrap, output):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = randomise(Classifier(), seed=1)

        def forward(self, image: Tensor) -> object:
            return wrap(self.net(image))

    model, image = Wrapped().eval(), stream(1, seed=2)[0]
    assert torch.equal(Network(model, output)(image), model.net(image))


def test_a_model_that_cannot_be_copied_is_a_clear_error_and_unfrozen_again():
    model = randomise(Classifier(), seed=1)
    model.layer1.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"(?s)Classifier cannot be copied.*lock"):
        bestta.adapt(model, method="tent")
    assert all(p.requires_grad for p in model.parameters())


def test_a_tensor_with_a_history_on_a_module_is_a_clear_error():
    model = randomise(Classifier(), seed=1)
    model.last_features = model.fc.weight * 2
    with pytest.raises(ValueError, match="cannot be copied"):
        Network(model)


def test_a_forward_wrapped_on_the_instance_is_not_silently_the_source():
    """The wrapper holds on to the model itself, past the skeleton: work, or say so."""
    model, image = randomise(Classifier(), seed=1), stream(1, seed=2, batch=4)[0]
    usual = bestta.adapt(randomise(Classifier(), seed=1), method="bn_stats")(image)
    inner = model.forward
    model.forward = lambda x: inner(x)
    try:
        ours = bestta.adapt(model, method="bn_stats")(image)
    except ValueError as error:
        assert "forward" in str(error)  # noqa: PT017
        return
    torch.testing.assert_close(ours, usual)


def test_a_forward_bound_to_the_instance_is_taken_over():
    def doubled(self: Classifier, image: Tensor) -> Tensor:
        return 2 * Classifier.forward(self, image)

    model, image = randomise(Classifier(), seed=1), stream(1, seed=2, batch=4)[0]
    usual = bestta.adapt(model, method="bn_stats")(image)
    model.forward = doubled.__get__(model)
    torch.testing.assert_close(bestta.adapt(model, method="bn_stats")(image), 2 * usual)


def test_features_that_are_computed_again_for_the_backward_are_so_by_the_weights_given():
    """Activation checkpoints run modules once more in the backward, when the call is over.

    Expected: the same model without them. To refuse such a model, by a ValueError, would do too.
    """

    class Checkpointed(Classifier):
        def forward(self, image: Tensor) -> Tensor:
            features = checkpoint(self.layer2, self.layer1(image), use_reentrant=False)
            return self.fc(features.mean((2, 3)))

    ours, plain = (Network(randomise(build(), seed=1)) for build in (Checkpointed, Classifier))
    weights = plain.weights(["layer2.0.weight", "layer2.1.weight"])
    with torch.no_grad():
        for weight in weights.values():
            weight.mul_(-2)
    image, slopes = stream(1, seed=2, batch=2)[0], []
    for network in (ours, plain):
        try:
            slopes.append(gradients(entropy_loss(network(image, weights)), weights))
        except ValueError as error:
            assert "checkpoint" in str(error)  # noqa: PT017
            return
    for name in weights:
        torch.testing.assert_close(slopes[0][name], slopes[1][name])


def test_a_model_in_data_parallel_is_refused_when_the_adapter_is_made():
    model = nn.DataParallel(randomise(Classifier(), seed=1)).eval()
    with pytest.raises(ValueError, match="DataParallel"):
        bestta.adapt(model, method="tent")


def test_an_adapter_costs_what_it_trains_and_not_what_the_model_weighs():
    class Heavy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
            self.fc = nn.Linear(8, 4)
            self.unused = nn.Linear(3600, 3600)  # 52 MB
            self.register_buffer("table", torch.zeros(1_000_000))

        def forward(self, image: Tensor) -> Tensor:
            return self.fc(self.norm(self.conv(image)).mean((2, 3)))

    def storages() -> dict[int, int]:
        gc.collect()
        found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
        kept = [x.untyped_storage() for x in found if x.layout is torch.strided]
        return {storage.data_ptr(): storage.nbytes() for storage in kept}

    model = Heavy().eval()
    before = storages()
    adapter = bestta.adapt(model, method="tent")
    adapter(stream(1, seed=2, batch=2)[0])
    new = {place: size for place, size in storages().items() if place not in before}
    assert sum(before.values()) > 50_000_000
    assert sum(new.values()) < 10_000


# --- hooks of the user's own --------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.calls = 0

    def hook(self, *_: object) -> None:
        self.calls += 1


@pytest.mark.parametrize("place", ["", "layer1", "layer1.0", "layer1.1", "fc"])
@pytest.mark.parametrize("kind", ["function", "method"])
def test_hooks_of_the_user_keep_firing(place, kind):
    model, recorder = randomise(Classifier(), seed=1), Recorder()
    hook = recorder.hook if kind == "method" else lambda *_: recorder.hook()
    model.get_submodule(place).register_forward_hook(hook)
    adapter = bestta.adapt(model, method="bn_stats")
    before = recorder.calls
    adapter(stream(1, seed=2, batch=4)[0])
    assert recorder.calls == before + 1


def test_a_hook_that_changes_what_a_batch_norm_returns_goes_on_doing_so():
    model, image = randomise(Classifier(), seed=1), stream(1, seed=2, batch=4)[0]
    model.layer1[1].register_forward_hook(lambda module, inputs, output: output * 2)
    unmixed = bestta.adapt(model, method="alpha_bn", weight=0.0)
    torch.testing.assert_close(unmixed(image), model(image))


# --- parametrised modules ---------------------------------------------------------------------


def test_parametrised_modules_work_and_their_parts_are_trained():
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()

    model = randomise(build(), seed=1)
    weight_norm(model[0])
    model.eval()
    image, network = stream(1, seed=2)[0], Network(model)
    weights = network.weights()
    assert "0.parametrizations.weight.original0" in weights
    assert torch.equal(network(image, weights), model(image))
    # Expected: the gradient that backward leaves in a deep copy.
    twin = copy.deepcopy(model)
    entropy_loss(twin(image)).backward()
    found = gradients(entropy_loss(network(image, weights)), weights)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_tent_gives_the_same_where_weight_norm_is_folded_in():
    model = randomise(Classifier(), seed=1)
    parametrised = copy.deepcopy(model)
    weight_norm(parametrised.layer2[0])
    a, b = (bestta.adapt(m.eval(), method="tent") for m in (model, parametrised))
    for image in stream(3, seed=2, batch=4):
        torch.testing.assert_close(a(image), b(image))


# --- functions ----------------------------------------------------------------------------------


def test_a_weight_the_loss_does_not_depend_on_has_a_zero_gradient():
    weights = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3))}
    found = gradients((weights["a"] ** 2).sum(), weights)
    assert torch.equal(found["a"], torch.tensor([2.0, 2.0]))
    assert torch.equal(found["b"], torch.zeros(3))


def test_a_loss_that_depends_on_no_weight_has_zero_gradients():
    weights = {"a": nn.Parameter(torch.ones(2))}
    assert torch.equal(gradients(torch.tensor(1.0), weights)["a"], torch.zeros(2))


def test_a_teacher_moves_by_the_rest_of_its_decay():
    teacher, student = {"a": torch.tensor([1.0])}, {"a": nn.Parameter(torch.tensor([3.0]))}
    follow(teacher, student, decay=0.75)
    assert teacher["a"].item() == 1.5  # 0.75 · 1 + 0.25 · 3
    follow(teacher, student, decay=1.0)
    assert teacher["a"].item() == 1.5
    assign(student, teacher)
    assert student["a"].item() == 1.5
    assert student["a"].data_ptr() != teacher["a"].data_ptr()


# --- threads and neighbours ---------------------------------------------------------------------


def test_two_adapters_in_two_threads_give_what_they_give_alone():
    model = randomise(Classifier(), seed=1)
    streams = [stream(12, seed=seed, batch=4, shift=seed) for seed in (2, 3)]
    methods = ["tent", "bn_ema"]

    def predictions(method: str, images: list[Tensor]) -> list[Tensor]:
        adapter = bestta.adapt(model, method=method)
        return [adapter(image) for image in images]

    alone = [predictions(*pair) for pair in zip(methods, streams, strict=True)]
    together: dict[str, list[Tensor]] = {}
    threads = [
        threading.Thread(target=lambda m=m, s=s: together.update({m: predictions(m, s)}))
        for m, s in zip(methods, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for method, expected in zip(methods, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(together[method], expected, strict=True))


def test_adapters_of_several_methods_take_turns_on_one_model_without_influence():
    methods = ["tent", "bn_ema", "alpha_bn", "bn_stats", "source", "tent_reset"]
    images = stream(4, seed=2, batch=2, shift=1.0)
    expected = {}
    for method in methods:
        with bestta.adapt(randomise(Classifier(), seed=1), method=method) as adapter:
            expected[method] = [adapter(image) for image in images]
    model = randomise(Classifier(), seed=1)
    adapters = {method: bestta.adapt(model, method=method) for method in methods}
    for turn, image in enumerate(images):
        for method, adapter in adapters.items():
            assert torch.equal(adapter(image), expected[method][turn]), method


# --- autocast -----------------------------------------------------------------------------------


class Descends(Adapter):
    """Trains a convolution along the entropy; predicts before the step."""

    name = "descends"

    def prepare(self) -> None:
        self.network = Network(self.model)
        self.weights = self.network.weights(["layer1.0.weight"])
        self.optimiser = Optimiser.sgd(self.weights, lr=1.0)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return self.weights

    def descend(self, image: Tensor) -> Tensor:
        logits = self.network(image, self.weights)
        self.optimiser.step(gradients(entropy_loss(logits), self.weights))
        return logits

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        return self.descend(image), StepReport(adapted=True)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.weights)


class PredictsAfter(Descends):
    """Predicts by the weights the step has led to."""

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        self.descend(image)
        with torch.no_grad():
            return self.network(image, self.weights), StepReport(adapted=True)


class LooksFirst(Descends):
    """Runs without gradients before it runs with them."""

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        with torch.no_grad():
            self.network(image, self.weights)
        return super().step(image)


@pytest.mark.parametrize("build", [Descends, PredictsAfter, LooksFirst])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_autocast_has_cast_once_is_not_used_for_weights_that_moved(build, dtype):
    # Expected: autocast without its cache, which casts every time.
    model, images = randomise(Segmenter(), seed=1), stream(3, seed=2)

    def run(adapter: Adapter, cache: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
            return [adapter(image) for image in images], adapter.state()

    ours, expected = (run(build(model, None, AdapterConfig()), cache) for cache in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(ours[0], expected[0], strict=True))
    assert same(ours[1], expected[1])
    assert not torch.equal(ours[1]["layer1.0.weight"], model.layer1[0].weight)
    apart = build(model, None, AdapterConfig())
    for image, prediction in zip(images, ours[0], strict=True):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(apart(image), prediction)


def test_modules_that_refuse_to_be_copied_are_refused_by_name():
    """As a scripted function does, which hangs on a module."""

    class Refuses:
        def __deepcopy__(self, memo):
            raise pickle.PickleError("ScriptFunction cannot be pickled")

    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model.extra = Refuses()
    with pytest.raises(ValueError, match=r"cannot be copied.*ScriptFunction"):
        skeleton(model)
