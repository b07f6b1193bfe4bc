"""What methods learn from source images beforehand, and which settings a name stands for."""

from __future__ import annotations

import copy
import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bestta
from bestta import SourceProfile
from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.network import Network, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.preparation import KIND, Preparation, label_of, source_loss
from bestta.adapters.registry import _methods, method_class, probe_task, register_adapter
from bestta.adapters.settings import at_least_one, not_negative, one_of, within
from bestta.files import load_tensors, save_tensors
from bestta.interrupt import stop_requests
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream


@dataclass(frozen=True, kw_only=True)
class LearnsConfig(AdapterConfig):
    lr: float = 0.1
    epochs: int = 1
    enough: int | None = None
    flavour: str = "plain"


class Learns(Preparation):
    """Trains the last layer's bias on the source, by Adam, and writes down what it was shown."""

    shown: list[tuple[Tensor, Tensor | None]]

    def __init__(self, model: nn.Module, config: LearnsConfig) -> None:
        super().__init__(model, config)
        self.epochs, self.enough = config.epochs, config.enough
        self.network = Network(model, config.output)
        self.begun = 0
        Learns.shown = []

    def begin(self, image: Tensor) -> None:
        name = [n for n, _ in self.model.named_parameters()][-1]
        self.weights = {"bias": self.network.weights([name])[name]}
        self.full = name
        self.optimiser = Optimiser.adam(self.weights, self.config.lr)
        self.begun += 1

    def see(self, image: Tensor, label: Tensor | None) -> float:
        Learns.shown.append((image, label))
        logits = self.network(image, {self.full: self.weights["bias"]})
        loss = source_loss(logits, label)
        self.optimiser.step(gradients(loss, self.weights))
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        return {**self.weights, **self.optimiser.tensors()}

    def result(self) -> dict[str, Tensor]:
        return {"bias": self.weights["bias"] * 1, "nested/name.of": torch.ones(1)}

    def settings(self) -> dict[str, Any]:
        return {"flavour": self.config.flavour}


class Uses(Adapter):
    """Pulls a scale towards what was prepared, so that the backward needs it."""

    Config = LearnsConfig
    Preparation = Learns
    presets = {"classification": {"lr": 0.2}, "segmentation": {"lr": 0.3}}  # noqa: RUF012

    def prepare(self) -> None:
        self.goal = self.prepared()["bias"]
        self.scale = nn.Parameter(torch.ones(()))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {"scale": self.scale}

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        loss = ((self.scale * self.goal - 1) ** 2).sum()
        slope = gradients(loss, self.trainable)
        with torch.no_grad():
            self.scale.sub_(1e-3 * slope["scale"])
        return self.predict_source(image), StepReport(adapted=True)

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale}


@pytest.fixture(autouse=True)
def _method() -> Iterator[None]:
    register_adapter("learns")(Uses)
    yield
    del _methods["learns"]


@pytest.fixture
def model() -> Classifier:
    return randomise(Classifier(), seed=1)


def prepare(model: nn.Module, images: Iterable[Any], **options: Any) -> SourceProfile:
    return bestta.prepare(model, images, method="learns", **options)


def learned(profile: SourceProfile) -> Tensor:
    return profile.prepared["learns"]["bias"]


# --- what is shown -----------------------------------------------------------------------------


def test_the_result_is_that_of_training_on_the_images_by_hand(model):
    # Expected: PyTorch's Adam on the bias of a copy, along the cross entropy with the labels.
    batches = [(image, torch.tensor([1, 3])) for image in stream(3, seed=2, batch=2)]
    twin = copy.deepcopy(model).requires_grad_(False)
    adam = torch.optim.Adam([twin.fc.bias.requires_grad_()], lr=0.1)
    for image, label in batches:
        nn.functional.cross_entropy(twin(image), label).backward()
        adam.step()
        adam.zero_grad()
    profile = prepare(model, batches, lr=0.1)
    torch.testing.assert_close(learned(profile), twin.fc.bias.detach())
    assert (profile.images, profile.task, profile.input_channels) == (6, "classification", 3)
    assert profile.layers == {}


def test_a_tensor_of_images_is_shown_one_by_one(model):
    images = torch.cat(stream(5, seed=2))
    assert prepare(model, images).images == 5
    assert [len(image) for image, _ in Learns.shown] == [1] * 5


def test_a_data_loader_of_a_labelled_set_works_as_it_is(model):
    images, labels = torch.cat(stream(5, seed=2)), torch.arange(5) % 4
    assert prepare(model, DataLoader(TensorDataset(images, labels), batch_size=2)).images == 5
    assert [label.tolist() for _, label in Learns.shown] == [[0, 1], [2, 3], [0]]


def test_a_data_loader_that_does_not_know_its_length_works(model):
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            yield from torch.cat(stream(5, seed=2))

    assert prepare(model, DataLoader(Endless(), batch_size=2)).images == 5


def test_each_epoch_shows_all_images_and_counts_them_once(model):
    images = stream(3, seed=2, batch=2)
    profile = prepare(model, images, epochs=3)
    assert profile.images == 6
    assert [torch.equal(a, b) for (a, _), b in zip(Learns.shown, images * 3, strict=True)] == (
        [True] * 9
    )


def test_a_generator_is_refused_where_it_would_have_to_start_again(model):
    with pytest.raises(ValueError, match=r"3 times.*a list or a DataLoader instead of a generator"):
        prepare(model, (image for image in stream(3, seed=2)), epochs=3)
    assert prepare(model, (image for image in stream(3, seed=2))).images == 3


@pytest.mark.parametrize("epochs", [1, 2])
def test_no_more_images_are_shown_than_are_enough(model, epochs):
    batches = [(image, torch.tensor([0, 1, 2, 3])) for image in stream(3, seed=2, batch=4)]
    assert prepare(model, batches, enough=6, epochs=epochs).images == 6
    assert [label.tolist() for _, label in Learns.shown] == [[0, 1, 2, 3], [0, 1]] * epochs
    assert torch.equal(Learns.shown[1][0], batches[1][0][:2])


def test_enough_that_is_more_than_there_is_takes_all(model):
    assert prepare(model, stream(3, seed=2, batch=2), enough=100).images == 6


def test_no_image_beyond_what_is_enough_is_asked_for(model):
    def images() -> Iterator[Tensor]:
        yield from stream(2, seed=2, batch=2)
        raise AssertionError("one too many")

    assert prepare(model, images(), enough=4).images == 4


def test_an_endless_source_ends_where_it_is_enough(model):
    def images() -> Iterator[Tensor]:
        while True:
            yield stream(1, seed=2)[0]

    assert prepare(model, images(), enough=3).images == 3


@pytest.mark.parametrize(
    ("label", "kept"),
    [
        (torch.tensor([1, 2]), True),
        (torch.tensor([1, 2], dtype=torch.uint8), True),
        (torch.zeros(2, 12, 12, dtype=torch.int32), True),
        (torch.zeros(2, 1, 12, 12, dtype=torch.int32), True),
        (np.array([1, 2]), True),
        ([1, 2], True),
        (["a.png", "b.png"], False),
        ("name", False),
        (None, False),
    ],
)
def test_labels_are_whole_numbers_that_follow_the_images(label, kept):
    found = label_of((torch.rand(2, 3, 12, 12), label))
    assert (found is not None) == kept
    if kept:
        assert found.dtype == torch.int64
        assert found.dim() in (1, 3)


@pytest.mark.parametrize("label", [torch.tensor([0.1, 0.2]), torch.zeros(2, 5, dtype=torch.int64)])
def test_what_cannot_be_labels_is_not_passed_over_in_silence(label):
    with pytest.raises(ValueError, match="labels are whole numbers"):
        label_of((torch.rand(2, 3, 12, 12), label))


def test_labels_at_the_images_size_serve_a_model_that_predicts_at_a_quarter_of_it():
    """Against enlarging the logits by hand, as the losses of such models do."""
    logits = torch.randn(2, 5, 4, 4)
    label = torch.randint(0, 5, (2, 16, 16))
    label[0, :3] = 255
    large = torch.nn.functional.interpolate(logits, size=(16, 16), mode="bilinear")
    log_p = large.log_softmax(1)
    chosen = log_p.gather(1, label.clamp(max=4).unsqueeze(1)).squeeze(1)
    expected = -chosen[label != 255].mean()
    torch.testing.assert_close(source_loss(logits, label), expected)


def test_a_checkpoint_of_other_images_is_told_and_the_profile_says_whether_there_were_labels(
    model, tmp_path
):
    images, path = stream(4, seed=2), tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        prepare(model, Stops(images, at=2), checkpoint=path)
    with pytest.warns(UserWarning, match="first batch is not the one that .*checkpoint was begun"):
        profile = prepare(model, images[::-1], checkpoint=path)
    assert profile.provenance["prepared"]["learns"]["labels"] is False
    labelled = prepare(model, [(image, torch.tensor([1])) for image in images])
    assert labelled.provenance["prepared"]["learns"]["labels"] is True


def test_images_without_labels_have_none():
    assert label_of(torch.rand(2, 3, 4, 4)) is None
    assert label_of([torch.rand(2, 3, 4, 4)]) is None


def test_images_with_bad_pixels_are_left_out_with_their_labels_and_a_warning(model):
    batches = [(image, torch.tensor([0, 1, 2])) for image in stream(2, seed=2, batch=3)]
    batches[0][0][1, 0, 0, 0] = math.nan
    batches[1][0][:] = math.inf
    with pytest.warns(UserWarning, match="4 images hold NaN or infinite pixels, left out"):
        profile = prepare(model, batches, epochs=2)
    assert profile.images == 2
    assert [label.tolist() for _, label in Learns.shown] == [[0, 2]] * 2


@pytest.mark.parametrize("checkpoint", [False, True])
def test_nothing_to_learn_from_is_an_error(model, checkpoint, tmp_path):
    path = tmp_path / "checkpoint" if checkpoint else None
    with pytest.raises(ValueError, match="nothing to prepare from: no images given"):
        prepare(model, [], checkpoint=path)
    with pytest.raises(ValueError, match="all images hold NaN"):
        prepare(model, [image * math.nan for image in stream(2, seed=2)], checkpoint=path)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([torch.rand(3, 12, 12)], "unsqueeze"),
        ([torch.zeros(1, 3, 12, 12, dtype=torch.uint8)], "uint8"),
        (["street.png"], "not str"),
    ],
)
def test_what_is_no_image_is_an_error(model, images, words):
    with pytest.raises(ValueError, match=words):
        prepare(model, images)
    assert all(p.requires_grad for p in model.parameters())


def test_labels_of_another_number_than_the_images_are_a_clear_error(model):
    with pytest.raises(ValueError, match="label"):
        prepare(model, [(stream(1, seed=2, batch=2)[0], torch.tensor([0, 1, 2]))])


def test_what_is_not_finite_in_the_end_is_an_error(model):
    class Explodes(Learns):
        def see(self, image: Tensor, label: Tensor | None) -> float:
            with torch.no_grad():
                self.weights["bias"].fill_(math.inf)
            return 0.0

    Uses.Preparation = Explodes
    try:
        with pytest.raises(FloatingPointError, match=r"'learns'.*smaller learning rate"):
            prepare(model, stream(2, seed=2))
    finally:
        Uses.Preparation = Learns


# --- the model ----------------------------------------------------------------------------------


def test_the_model_is_left_as_it_is(model):
    before = snapshot(model)
    model.fc.weight.requires_grad_(False)
    prepare(model, stream(3, seed=2))
    assert same(before, snapshot(model))
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["fc.weight"]
    assert all(p.grad is None for p in model.parameters())


def test_the_model_is_frozen_while_it_is_looked_at_and_unfrozen_after_an_error(model):
    def images() -> Iterator[Tensor]:
        yield stream(1, seed=2)[0]
        assert not any(p.requires_grad for p in model.parameters())
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        prepare(model, images())
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_that_an_adapter_holds_stays_frozen(model):
    adapter = bestta.adapt(model, method="tent")
    prepare(model, stream(2, seed=2))
    assert not any(p.requires_grad for p in model.parameters())
    adapter.remove()
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_in_training_mode_is_refused(model):
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        prepare(model.train(), stream(2, seed=2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_where_gradients_are_off_and_what_it_gives_can_be_used(model, mode, tmp_path):
    usual = prepare(model, stream(3, seed=2))
    with mode():
        off = prepare(model, [image * 1 for image in stream(3, seed=2)])
    assert torch.equal(learned(usual), learned(off))
    with mode():
        bestta.adapt(model, off, method="learns")(stream(1, seed=2)[0])
    adapter = bestta.adapt(model, off, method="learns")
    adapter(stream(1, seed=2)[0])
    assert adapter.last.adapted


def test_what_is_begun_with_can_be_differentiated_through_in_inference_mode(model):
    class Looks(Learns):
        def begin(self, image: Tensor) -> None:
            super().begin(image)
            weights = self.network.weights(["layer1.0.weight"])
            gradients(self.network(image, weights).sum(), weights)

    Uses.Preparation = Looks
    try:
        with torch.inference_mode():
            prepare(model, [image * 1 for image in stream(2, seed=2)])
    finally:
        Uses.Preparation = Learns


def test_what_was_prepared_is_the_adapters_own_copy(model):
    profile = prepare(model, stream(2, seed=2))
    before = learned(profile).clone()
    bestta.adapt(model, profile, method="learns").goal.zero_()
    assert torch.equal(learned(profile), before)


def test_weights_that_learn_under_autocast_are_cast_anew_for_every_batch(model):
    # Expected: autocast without its cache, which casts every time.
    class Trains(Learns):
        def begin(self, image: Tensor) -> None:
            self.full = "layer1.0.weight"
            self.weights = {"bias": self.network.weights([self.full])[self.full]}
            self.optimiser = Optimiser.sgd(self.weights, lr=1.0)

    Uses.Preparation = Trains
    try:
        results = []
        for cache in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                results.append(learned(prepare(model, stream(4, seed=2, batch=2))))
    finally:
        Uses.Preparation = Learns
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_works_in_the_models_own_precision(model, dtype):
    profile = prepare(model.to(dtype), [image.to(dtype) for image in stream(3, seed=2)])
    assert bool(learned(profile).isfinite().all())


# --- checkpoints --------------------------------------------------------------------------------


class Stops(list):
    """Images that press Ctrl-C before the one at ``at`` is given out, counted over epochs."""

    def __init__(self, images: list[Any], at: int, number: int = signal.SIGINT) -> None:
        super().__init__(images)
        self.left, self.number = at, number

    def __iter__(self) -> Iterator[Any]:
        for image in super().__iter__():
            if self.left == 0:
                signal.raise_signal(self.number)
            self.left -= 1
            yield image


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 2, 5, 7])
def test_stopped_and_begun_again_it_ends_with_the_same_bits(model, tmp_path, at, number):
    images = [(image, torch.tensor([1, 2])) for image in stream(4, seed=2, batch=2)]
    whole = prepare(model, images, epochs=2)
    path = tmp_path / "folder" / "checkpoint"
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match=f"stopped after batch {at + 1}"):
        prepare(model, Stops(images, at, number), epochs=2, checkpoint=path)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert len(Learns.shown) == at + 1
    assert all(p.requires_grad for p in model.parameters())
    resumed = prepare(model, images, epochs=2, checkpoint=path)
    assert len(Learns.shown) == 8 - (at + 1)
    assert torch.equal(learned(whole), learned(resumed))
    assert resumed.images == whole.images == 8
    again = prepare(model, images, epochs=2, checkpoint=path)  # finished already
    assert Learns.shown == []
    assert torch.equal(learned(whole), learned(again))
    assert os.listdir(path.parent) == ["checkpoint"]


def test_stopped_twice_it_still_ends_with_the_same_bits(model, tmp_path):
    images = stream(6, seed=2, batch=2)
    images[1][0, 0, 0, 0] = math.nan
    path = tmp_path / "checkpoint"
    for at in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            prepare(model, Stops(images, at), checkpoint=path)
    with pytest.warns(UserWarning, match="1 images hold NaN"):
        resumed = prepare(model, images, checkpoint=path)
    with pytest.warns(UserWarning, match="1 images hold NaN"):
        whole = prepare(model, images)
    assert torch.equal(learned(whole), learned(resumed))
    assert resumed.images == whole.images == 11


@pytest.mark.usefixtures("_python_hears_ctrl_c")
def test_without_a_checkpoint_ctrl_c_stops_at_once(model):
    with pytest.raises(KeyboardInterrupt):
        prepare(model, Stops(stream(4, seed=2), at=2))
    assert len(Learns.shown) == 2
    assert all(p.requires_grad for p in model.parameters())


def test_a_stop_that_comes_after_the_last_batch_is_not_swallowed(model, tmp_path):
    def images() -> Iterator[Tensor]:
        yield from stream(2, seed=2)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        prepare(model, images(), checkpoint=tmp_path / "checkpoint")


def test_a_stop_while_a_run_before_is_caught_up_with_is_obeyed_and_loses_nothing(model, tmp_path):
    images, path = stream(6, seed=2), tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt, match="after batch 5"):
        prepare(model, Stops(images, at=4), checkpoint=path)
    kept = path.read_bytes()
    asked: list[int] = []

    def slow() -> Iterator[Tensor]:
        for number, image in enumerate(images):
            asked.append(number)
            if number == 1:
                signal.raise_signal(signal.SIGINT)
            yield image

    with pytest.raises(KeyboardInterrupt, match="after batch 5"):
        prepare(model, slow(), checkpoint=path)
    assert asked == [0, 1]
    assert path.read_bytes() == kept
    assert torch.equal(
        learned(prepare(model, images, checkpoint=path)), learned(prepare(model, images))
    )


def test_an_error_leaves_the_checkpoint_of_before(model, tmp_path):
    images, path = stream(4, seed=2), tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        prepare(model, Stops(images, at=1), checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="uint8"):
        prepare(model, [*images[:3], torch.zeros(1, 3, 4, 4, dtype=torch.uint8)], checkpoint=path)
    assert path.read_bytes() == before
    assert torch.equal(
        learned(prepare(model, images, checkpoint=path)), learned(prepare(model, images))
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.7}, r"something else: lr was 0.2 and is 0.7. Remove"),
        ({"seed": 5}, r"something else: seed was 0 and is 5. Remove"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_and_kept(model, tmp_path, change, words):
    images, path = stream(3, seed=2), tmp_path / "checkpoint"
    prepare(model, images, checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=words):
        prepare(model, images, checkpoint=path, **change)
    assert path.read_bytes() == before


def test_a_checkpoint_of_another_model_or_method_is_refused(model, tmp_path):
    images, path = stream(3, seed=2), tmp_path / "checkpoint"
    prepare(model, images, checkpoint=path)
    with pytest.raises(ValueError, match=r"fingerprint was .*Remove it"):
        prepare(randomise(Classifier(), seed=9), images, checkpoint=path)

    class Other(Uses):
        pass

    register_adapter("learns_too")(Other)
    try:
        with pytest.raises(ValueError, match="method was 'learns' and is 'learns_too'"):
            bestta.prepare(model, images, method="learns_too", checkpoint=path)
    finally:
        del _methods["learns_too"]


def test_a_checkpoint_of_another_version_is_refused(model, tmp_path):
    images, path = stream(3, seed=2), tmp_path / "checkpoint"
    prepare(model, images, checkpoint=path)
    tensors, about = load_tensors(path, KIND)
    save_tensors(path, tensors, {**about, "bestta": "0.0.1"})
    with pytest.raises(ValueError, match=r"bestta was '0\.0\.1'"):
        prepare(model, images, checkpoint=path)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "kind", "tensor", "count", "words"])
def test_a_damaged_checkpoint_is_refused_by_its_name_and_kept(model, tmp_path, damage):
    images, path = stream(3, seed=2), tmp_path / "checkpoint"
    prepare(model, images, checkpoint=path)
    tensors, about = load_tensors(path, KIND)
    if damage in ("cut", "empty", "text"):
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[:-9], "empty": b"", "text": b"hello, world"}[damage])
    elif damage == "kind":
        save_tensors(path, tensors, {**about, "kind": "source profile"})
    elif damage == "tensor":
        del tensors["bias"]
        save_tensors(path, tensors, about)
    elif damage == "count":
        save_tensors(path, tensors, {k: v for k, v in about.items() if k != "done"})
    else:
        save_tensors(path, tensors, {**about, "done": "many"})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=str(path)):
        prepare(model, images, checkpoint=path)
    assert path.read_bytes() == before
    assert all(p.requires_grad for p in model.parameters())


def test_stop_requests_are_noted_once_and_obeyed_the_second_time():
    before = signal.getsignal(signal.SIGINT)
    with stop_requests(tell=False) as requests:
        assert requests == []
        signal.raise_signal(signal.SIGINT)
        assert requests == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_first_stop_request_says_what_comes(capfd):
    with stop_requests(tell=True) as requests:
        signal.raise_signal(signal.SIGTERM)
    assert requests == [signal.SIGTERM]
    assert "again to stop at once" in capfd.readouterr().err


def test_another_thread_leaves_signals_alone(model, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    found: list[Any] = []

    def work() -> None:
        with stop_requests(tell=False) as requests:
            found.append((requests, signal.getsignal(signal.SIGINT)))
        found.append(prepare(model, stream(2, seed=2), checkpoint=tmp_path / "checkpoint").images)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [([], handler), 2]


# --- the profile --------------------------------------------------------------------------------


def test_what_was_learned_survives_in_the_file(model, tmp_path):
    profile = prepare(model, stream(3, seed=2), flavour="sweet")
    profile.save(tmp_path / "profile")
    loaded = SourceProfile.load(tmp_path / "profile", model)
    assert loaded.prepared.keys() == {"learns"}
    assert same(dict(loaded.prepared["learns"]), dict(profile.prepared["learns"]))
    assert loaded.settings == {"learns": {"flavour": "sweet"}}
    note = loaded.provenance["prepared"]["learns"]
    assert (note["images"], note["settings"]["flavour"]) == (3, "sweet")
    assert "prepared for learns" in str(loaded)
    a, b = (bestta.adapt(model, p, method="learns") for p in (profile, tmp_path / "profile"))
    assert torch.equal(a.goal, b.goal)
    assert a.config.flavour == "sweet"


def test_it_is_added_to_a_profile_without_loss(model, tmp_path):
    collected = SourceProfile.collect(model, stream(6, seed=3), layers=["layer2"], note="sunny")
    collected = replace(collected, settings={"bestta": {"lr": 0.5}, "learns": {"seed": 4}})
    collected.save(tmp_path / "profile")
    both = prepare(model, stream(3, seed=2), profile=tmp_path / "profile")
    assert torch.equal(both.layers["layer2"].mu, collected.layers["layer2"].mu)
    assert both.images == 6
    assert both.settings == {"bestta": {"lr": 0.5}, "learns": {"seed": 4, "flavour": "plain"}}
    assert both.provenance["note"] == "sunny"
    assert "learns" not in collected.prepared
    both.save(tmp_path / "both")
    loaded = SourceProfile.load(tmp_path / "both")
    assert torch.equal(learned(loaded), learned(both))
    image = stream(1, seed=5)[0]
    with_it, without = (bestta.adapt(model, p) for p in (loaded, replace(collected, settings={})))
    assert with_it(image).shape == without(image).shape


def test_what_other_methods_have_learned_stays(model):
    first = prepare(model, stream(3, seed=2))
    others = replace(first, prepared={"another": {"x": torch.ones(2)}})
    both = prepare(model, stream(3, seed=2), profile=others)
    assert both.prepared.keys() == {"another", "learns"}
    assert torch.equal(both.prepared["another"]["x"], torch.ones(2))


def test_prepared_anew_it_replaces_what_was(model):
    first = prepare(model, stream(3, seed=2))
    second = prepare(model, stream(3, seed=8), profile=first)
    assert not torch.equal(learned(first), learned(second))
    assert torch.equal(learned(second), learned(prepare(model, stream(3, seed=8))))


def test_a_profile_of_another_model_is_refused(model):
    profile = prepare(randomise(Classifier(), seed=9), stream(2, seed=2))
    with pytest.raises(ValueError, match="belongs to another model"):
        prepare(model, stream(2, seed=2), profile=profile)
    with pytest.raises(ValueError, match="SourceProfile, not dict"):
        prepare(model, stream(2, seed=2), profile={})


def test_profiles_with_something_prepared_do_not_merge(model):
    plain = SourceProfile.collect(model, stream(6, seed=3), layers=["layer2"])
    both = prepare(model, stream(3, seed=2), profile=plain)
    for a, b in ((plain, both), (both, plain)):
        with pytest.raises(ValueError, match=r"\(learns\) does not merge: merge first"):
            a.merge(b)


def test_a_profile_of_before_there_were_preparations_loads(model, tmp_path):
    # As version 0.1 wrote it: no "prepared" in the description.
    profile = SourceProfile.collect(model, stream(6, seed=3), layers=["layer2"])
    layer = profile.layers["layer2"]
    about = {
        "kind": "source profile",
        "format": 1,
        "layers": {"layer2": {"channel_dim": None}},
        "images": 6,
        "model": vars(profile.model),
        "task": "classification",
        "input_channels": 3,
        "output": None,
        "settings": {},
        "provenance": {"bestta": "0.1.0"},
    }
    save_tensors(tmp_path / "old", {"layer2/mu": layer.mu, "layer2/sigma": layer.sigma}, about)
    old = SourceProfile.load(tmp_path / "old", model)
    assert old.prepared == {}
    assert torch.equal(old.layers["layer2"].mu, layer.mu)
    assert learned(prepare(model, stream(2, seed=2), profile=old)).shape == (4,)
    with pytest.raises(ValueError, match="this profile holds nothing for it"):
        bestta.adapt(model, old, method="learns")


def test_a_profile_without_layers_does_not_serve_a_method_that_needs_them(model):
    with pytest.raises(ValueError, match="holds no layers"):
        bestta.adapt(model, prepare(model, stream(2, seed=2)), method="bestta")


def test_a_method_that_finds_nothing_prepared_says_how_to(model):
    with pytest.raises(ValueError, match=r"there is no profile for it: profile = bestta.prepare\("):
        bestta.adapt(model, method="learns")
    assert all(p.requires_grad for p in model.parameters())


def test_methods_without_a_preparation_and_unknown_ones_are_errors(model):
    with pytest.raises(ValueError, match=r"'tent' learns nothing.*Those that do: .*learns"):
        bestta.prepare(model, stream(2, seed=2), method="tent")
    with pytest.raises(ValueError, match=r"no method is called 'lerns'. Did you mean 'learns'"):
        bestta.prepare(model, stream(2, seed=2), method="lerns")
    with pytest.raises(ValueError, match=r"no setting of 'learns' is called 'rate'"):
        prepare(model, stream(2, seed=2), rate=1)


# --- the loss on the source ---------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_with_the_labels():
    # −log softmax of (0, log 3) is log 4 and log 4/3.
    logits = torch.tensor([[0.0, math.log(3)]] * 2)
    loss = source_loss(logits, torch.tensor([0, 1]))
    assert loss.item() == pytest.approx((math.log(4) + math.log(4 / 3)) / 2)


def test_without_labels_the_models_own_predictions_stand_in():
    logits = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]], requires_grad=True)
    loss = source_loss(logits, None)
    assert loss.item() == pytest.approx(math.log(4 / 3))
    loss.backward()
    # softmax − one-hot, over two samples: (1/4, 3/4) − (0, 1).
    torch.testing.assert_close(logits.grad[0], torch.tensor([0.125, -0.125]))


def test_255_is_ignored_in_segmentation():
    logits = torch.zeros(1, 4, 1, 2)
    logits[0, 1, 0, 1] = 50.0
    loss = source_loss(logits, torch.tensor([[[0, 255]]]))
    assert loss.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("shape", [(2, 300), (2, 300, 1, 1)])
def test_255_is_a_class_where_there_are_as_many(shape):
    label = torch.full((shape[0], *shape[2:]), 255)
    assert source_loss(torch.zeros(shape), label).item() == pytest.approx(math.log(300))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_where_all_is_ignored_the_loss_and_its_gradient_are_zero(dtype):
    logits = torch.full((1, 3, 2, 2), 6e4, dtype=dtype).requires_grad_()
    loss = source_loss(logits, torch.full((1, 2, 2), 255))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize(
    ("shape", "label", "words"),
    [
        ((2, 4), torch.tensor([0, 4]), r"4 classes lie in 0 to 3.* 4\b"),
        ((2, 4), torch.tensor([0, -1]), r"0 to 3.* -1\b"),
        ((2, 4), torch.tensor([0, 255]), r"0 to 3.* 255\b"),
        ((1, 4, 1, 2), torch.tensor([[[255, 19]]]), r"0 to 3.* 19\b"),
        ((2, 4), torch.zeros(2, 1, 1, dtype=torch.long), r"shape \(2,\).*got \(2, 1, 1\)"),
        ((1, 4, 8, 8), torch.zeros(1, 4, 4, dtype=torch.long), r"\(1, 8, 8\).*\(1, 4, 4\)"),
    ],
)
def test_labels_that_do_not_fit_are_errors_that_say_so(shape, label, words):
    with pytest.raises(ValueError, match=words):
        source_loss(torch.zeros(shape), label)


def test_labels_that_do_not_fit_stop_a_preparation(model):
    with pytest.raises(ValueError, match=r"0 to 3.* 7\b"):
        prepare(model, [(stream(1, seed=2)[0], torch.tensor([7]))])
    assert all(p.requires_grad for p in model.parameters())


def test_half_logits_give_a_loss_in_fp32():
    logits = torch.tensor([[0.0, 1.0]], dtype=torch.float16)
    assert source_loss(logits, torch.tensor([0])).dtype == torch.float32


# --- which settings are in force ----------------------------------------------------------------


class Fixed(nn.Module):
    """Takes images of one size only, and says so in its own way."""

    def __init__(self, side: int, error: type[Exception] = ValueError, inputs: int = 3) -> None:
        super().__init__()
        self.side, self.error = side, error
        self.conv = nn.Conv2d(inputs, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        if image.shape[2] != self.side:
            raise self.error(f"images of {self.side} only")
        return self.conv(image).mean((2, 3))


def test_the_task_is_told_from_a_blank_image():
    assert probe_task(randomise(Classifier(), 1), None) == "classification"
    assert probe_task(randomise(Segmenter(), 1), None) == "segmentation"
    assert probe_task(TokenClassifier().eval(), None) == "classification"
    assert probe_task(randomise(Classifier(), 1).bfloat16(), None) == "classification"
    assert probe_task(Fixed(64, inputs=1).eval(), None) == "classification"


@pytest.mark.parametrize("side", [32, 64, 224, 512])
@pytest.mark.parametrize("error", [ValueError, RuntimeError, AssertionError, KeyError])
def test_a_model_of_one_usual_size_tells_its_task_whatever_it_raises(side, error):
    assert probe_task(Fixed(side, error).eval(), None) == "classification"


def test_a_linear_model_of_one_size_tells_its_task():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    assert probe_task(model, None) == "classification"


def test_a_model_whose_first_four_dimensional_parameter_is_no_convolution_tells_its_task():
    class Positioned(Segmenter):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.zeros(1, 6, 1, 1))

        def forward(self, image: Tensor) -> Tensor:
            return super().forward(image) + self.place.sum()

    model = randomise(Positioned(), seed=1)
    assert next(p for p in model.parameters() if p.dim() == 4).shape == (1, 6, 1, 1)
    assert probe_task(model, None) == "segmentation"


def test_a_model_that_takes_no_blank_image_asks_for_the_preset(model):
    fussy = Fixed(97).eval()
    with pytest.raises(ValueError, match="preset='classification' or preset='segmentation'"):
        bestta.prepare(fussy, [torch.rand(1, 3, 97, 97)], method="learns")
    assert prepare(fussy, [torch.rand(1, 3, 97, 97)], preset="classification").images == 1


def test_logits_that_cannot_be_found_ask_for_output():
    class Two(Classifier):
        def forward(self, image: Tensor) -> dict[str, Tensor]:
            return {"a": super().forward(image), "b": super().forward(image)}

    with pytest.raises(ValueError, match="output="):
        probe_task(randomise(Two(), 1), None)
    assert probe_task(randomise(Two(), 1), "b") == "classification"


def test_telling_the_task_leaves_the_model_as_it_is(model):
    before = snapshot(model)
    with torch.inference_mode():
        probe_task(model, None)
    assert same(before, snapshot(model))


def test_a_method_without_presets_takes_one_and_does_not_look(model):
    class Blind(Classifier):
        def forward(self, image: Tensor) -> Tensor:
            raise AssertionError("not to be run")

    bestta.adapt(randomise(Blind(), seed=1), method="tent")
    a, b = (bestta.adapt(model, method="tent", preset=p) for p in (None, "segmentation"))
    assert a.settings == b.settings


@pytest.mark.parametrize("preset", ["segmentaton", "detection", ""])
def test_an_unknown_preset_is_refused(model, preset):
    words = r"no preset of 'tent' is called.*There are: .*segmentation"
    with pytest.raises(ValueError, match=words):
        bestta.adapt(model, method="tent", preset=preset)


@pytest.mark.parametrize(
    ("preset", "profiled", "said", "lr"),
    [
        (None, {}, {}, 0.2),  # a classifier
        ("segmentation", {}, {}, 0.3),
        ("segmentation", {"lr": 0.4}, {}, 0.4),
        (None, {"lr": 0.4}, {"lr": 0.5}, 0.5),
        (None, {}, {"lr": 0.5}, 0.5),
        ("segmentation", {"seed": 3}, {}, 0.3),
    ],
)
def test_the_call_wins_over_the_profile_and_that_over_the_preset(model, preset, profiled, said, lr):
    profile = replace(prepare(model, stream(2, seed=2)), settings={"learns": profiled})
    adapter = bestta.adapt(model, profile, method="learns", preset=preset, **said)
    assert adapter.config.lr == lr
    assert adapter.config.seed == profiled.get("seed", 0)


def test_the_profiles_task_spares_a_look_at_the_model():
    class Counts(Segmenter):
        runs = 0

        def forward(self, image: Tensor) -> Tensor:
            Counts.runs += 1
            return super().forward(image)

    model = randomise(Counts(), seed=1)
    profile = prepare(model, stream(2, seed=2))
    runs = Counts.runs
    assert bestta.adapt(model, profile, method="learns").config.lr == 0.3
    assert Counts.runs == runs


def test_a_method_that_is_not_for_the_task_says_why(model):
    class OnlyStreets(Uses):
        tasks = ("segmentation",)
        why_not = "it cuts streets into pieces."

    register_adapter("only_streets")(OnlyStreets)
    try:
        for preset in (None, "classification"):
            with pytest.raises(ValueError, match=r"defined for segmentation, not for.*pieces"):
                bestta.adapt(model, method="only_streets", preset=preset)
    finally:
        del _methods["only_streets"]


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="a method 'learns' already: Uses"):
        register_adapter("learns")(Uses)
    assert method_class("learns") is Uses


# --- checks of settings -------------------------------------------------------------------------


@dataclass
class Some:
    value: Any


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1", None])
def test_what_is_no_number_from_0_on_is_refused(value):
    with pytest.raises(ValueError, match=r"^value must lie in"):
        not_negative(Some(value), "value")


@pytest.mark.parametrize("value", [0, 0.0, 3, 1e30])
def test_numbers_from_0_on_pass(value):
    not_negative(Some(value), "value")


def test_the_upper_end_is_not_within():
    within(Some(0), 0, 1, "value")
    with pytest.raises(ValueError, match=r"\[0, 1\), not 1"):
        within(Some(1), 0, 1, "value")


@pytest.mark.parametrize("value", [0, 1.0, True, "1", None])
def test_what_is_no_whole_number_from_1_on_is_refused(value):
    with pytest.raises(ValueError, match="whole number from 1 on"):
        at_least_one(Some(value), "value")


def test_a_choice_names_the_others():
    one_of(Some("a"), "value", "a", "b")
    with pytest.raises(ValueError, match="value is one of 'a', 'b', not 'c'"):
        one_of(Some("c"), "value", "a", "b")
