"""One run: that its numbers are those of a plain loop, and that it can be stopped anywhere."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import signal
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import bestta
from bench import (
    SIZE,
    lasting,
    photographs,
    pictures,
    played,
    played_in_parts,
    protocol,
    read,
    run_of,
    save,
)
from bestta import models
from bestta.adapters import registry
from bestta.adapters.registry import method_class
from bestta.benchmark import passages, runner, tally
from bestta.benchmark.checkpoints import Checkpoints
from bestta.benchmark.config import (
    Method,
    Preparation,
    Run,
    Source,
    Variant,
    read_method,
    read_protocol,
)
from bestta.benchmark.parts import assemble, identity
from bestta.benchmark.runner import Stopped, batches, compact, execute, fitted, sampled, strict
from bestta.benchmark.streams import describe, stream_of
from bestta.benchmark.subjects import import_file
from bestta.data import Folder, Streets
from bestta.data.corruptions import CORRUPTIONS
from bestta.data.sheets import colour
from bestta.files import Busy, held
from bestta.protocols import Block, Frame, Stream, continual, mixed, weather
from bestta.provenance import provenance

pytestmark = pytest.mark.usual


@pytest.fixture(autouse=True, scope="module")
def _asked_once():
    """Git is asked once and not twice a run: it takes as long as a frame."""
    known = provenance()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "provenance", lambda: copy.deepcopy(known))
        yield


SMALL = {"scales": [0.5, 1.0]}
"""Of the many views that CoTTA and PETAL look at, two."""


def method(name):
    """A method as it ships, learning from fewer images and looking at fewer views."""
    less = {
        "cotta": (SMALL, {}),
        "petal": (SMALL, {"swag_epochs": 1}),
        "memo": ({"views": 2}, {}),
        "ecotta": ({}, {"warmup_epochs": 1}),
        "tent": ({"lr": 0.02}, {}),
        "tent_reset": ({"lr": 0.02}, {}),
        "rotta": ({"capacity": 2, "update_every": 2}, {}),
    }
    settings, prepared = less.get(name, ({}, {}))
    found = read_method(name, **settings)
    return replace(found, prepare=Preparation(images=2, batch=1, settings=prepared))


# An independent reckoning


def miou(pairs):
    """Mean IoU in percent of (label, prediction) pairs, class by class, by sets of pixels."""
    ious = []
    for number in range(19):
        hit = union = 0
        for label, predicted in pairs:
            counted = label != 255
            truth, said = (label == number) & counted, (predicted == number) & counted
            hit += int((truth & said).sum())
            union += int((truth | said).sum())
        if union:
            ious.append(100 * hit / union)
    return sum(ious) / len(ious)


def adapter_of(name, seed=0):
    card = models.card("streets")
    model = models.load("streets").to(memory_format=torch.channels_last)
    chosen = method(name)
    return bestta.adapt(
        model,
        models.load_profile("streets"),
        method=chosen.method,
        preset=card.task,
        seed=seed,
        **chosen.settings,
    )


def tensor(*images):
    """Images as the card of streets wants them: (B, 3, H, W)."""
    mean, deviation = (np.array(v, np.float32) for v in models.card("streets").normalise)
    scaled = (np.stack(images).astype(np.float32) / np.float32(255) - mean) / deviation
    return torch.from_numpy(scaled).permute(0, 3, 1, 2)


def by_hand(adapter, stream, batch=1, resets=False):
    """Label and prediction of every frame, by block: a loop, an adapter and nothing else."""
    blocks = []
    for block in stream.blocks:
        if resets:
            adapter.reset()
        pairs = []
        for start in range(block.start, block.stop, batch):
            frames = [stream[i] for i in range(start, min(start + batch, block.stop))]
            predicted = adapter(tensor(*(frame.image for frame in frames))).argmax(1).numpy()
            pairs += [(f.label, p) for f, p in zip(frames, predicted, strict=True)]
        blocks.append(pairs)
    return blocks


def weathers(images=2, rounds=1, seed=0, conditions=("fog", "night")):
    scenes = Streets(images, size=SIZE, split="val")
    return continual(weather(scenes, conditions, severity=3), rounds=rounds, seed=seed)


@pytest.mark.parametrize(
    ("name", "batch"), [("source", 1), ("bestta", 1), ("bestta", 2), ("tent", 1), ("tent_reset", 1)]
)
def test_scores_are_those_of_a_plain_loop(name, batch, tmp_path):
    record = played(run_of(method(name), images=3, rounds=2, batch=batch), tmp_path)
    blocks = by_hand(adapter_of(name), weathers(3, 2), batch, resets=name == "tent_reset")
    assert [b["score"] for b in record["blocks"]] == pytest.approx([miou(b) for b in blocks])
    assert record["frames"]["score"] == pytest.approx([miou([p]) for b in blocks for p in b])
    assert record["frames"]["position"] == list(range(12))
    assert record["frames"]["block"] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [(b["index"], b["name"], b["round"], b["frames"]) for b in record["blocks"]] == [
        (0, "fog", 0, 3),
        (1, "night", 0, 3),
        (2, "fog", 1, 3),
        (3, "night", 1, 3),
    ]
    # Batches never straddle blocks: three images in twos are two and one.
    assert record["traces"]["step"] == ([0, 2, 3, 5, 6, 8, 9, 11] if batch == 2 else [*range(12)])
    steps, adapted = len(record["traces"]["step"]), record["events"]["adapted"]
    if name == "bestta":  # learns while the style moves: at every change of the weather at least
        assert 4 <= adapted <= steps
    else:
        assert adapted == (steps if name != "source" else 0)


def test_the_share_of_adapted_frames_is_recorded_whether_or_not_the_run_was_stopped(tmp_path):
    """Twelve frames one at a time, of which γ learns on the first of every four."""
    rarely = read_method("bestta", when=4)
    long = {"images": 3, "rounds": 2}
    whole = played(run_of(rarely, **long), tmp_path / "whole")
    assert whole["events"]["adapted"] == 3
    assert whole["events"]["adapted_share"] == 0.25
    parts, stopped = played_in_parts(run_of(rarely, **long), tmp_path / "parts", stops={1, 6})
    assert stopped == 2
    assert parts["events"] == whole["events"]


def test_only_methods_that_ask_for_it_are_told_of_domain_changes(tmp_path):
    """What would make the loop above idle: TENT as good as new at each block."""
    told, continuing = (
        played(run_of(method(name), images=3, rounds=2), tmp_path)
        for name in ("tent_reset", "tent")
    )
    assert told["told_of_changes"]
    assert not continuing["told_of_changes"]
    assert told["blocks"][0] == continuing["blocks"][0]
    assert told["blocks"][2] == {**told["blocks"][0], "index": 2, "round": 1}
    assert told["blocks"][1:] != continuing["blocks"][1:]


def test_means_are_over_blocks_rounds_and_conditions(tmp_path):
    record = played(run_of("bestta", images=3, rounds=2), tmp_path)
    a, b, c, d = (block["score"] for block in record["blocks"])
    assert len({a, b, c, d}) > 2
    assert record["score"] == pytest.approx((a + b + c + d) / 4)
    assert record["rounds"] == pytest.approx([(a + b) / 2, (c + d) / 2])
    assert record["conditions"] == pytest.approx({"fog": (a + c) / 2, "night": (b + d) / 2})


def test_the_score_of_each_class_is_in_the_record(tmp_path):
    record = played(run_of("source"), tmp_path)
    pairs = by_hand(adapter_of("source"), weathers())[0]
    labels, predicted = (np.stack(some) for some in zip(*pairs, strict=True))
    for number, iou in enumerate(record["blocks"][0]["per_class"]):
        truth, said = labels == number, (predicted == number) & (labels != 255)
        union = (truth | said).sum()
        assert iou == (pytest.approx(100 * (truth & said).sum() / union) if union else None)
    assert record["classes"][0] == "road"
    assert (record["metric"], record["higher_is_better"]) == ("mIoU", True)


def test_a_seed_is_another_stream_and_another_adapter(tmp_path):
    record = played(run_of("bestta", run={"seed": 5}), tmp_path)
    blocks = by_hand(adapter_of("bestta", seed=5), weathers(seed=5))
    assert [b["score"] for b in record["blocks"]] == pytest.approx([miou(b) for b in blocks])
    assert record["settings"]["seed"] == record["seed"] == 5
    other = played(run_of("bestta"), tmp_path)
    assert other["frames"]["score"] != record["frames"]["score"]
    assert other["stream"]["key"] == record["stream"]["key"]


def test_every_second_frame_scores_as_it_does_by_hand(tmp_path):
    record = played(run_of("bestta", images=3, every=2), tmp_path)
    blocks = by_hand(adapter_of("bestta"), weathers(3).every(2))
    assert [len(block) for block in blocks] == [2, 2]
    assert [b["score"] for b in record["blocks"]] == pytest.approx([miou(b) for b in blocks])


def test_a_mixed_stream_is_one_block_a_round_with_a_picture_of_each_condition(tmp_path):
    record = played(run_of("source", recipe="mixed", rounds=2), tmp_path)
    scenes = Streets(2, size=SIZE, split="val")
    stream = mixed(weather(scenes, ("fog", "night"), severity=3), rounds=2, seed=0)
    blocks = by_hand(adapter_of("source"), stream)
    assert [b["score"] for b in record["blocks"]] == pytest.approx([miou(b) for b in blocks])
    assert record["conditions"].keys() == {"mixed"}
    shown = record["pictures"]["conditions"]
    assert sorted(entry["name"] for entry in shown) == ["fog", "night"]
    assert {entry["round"] for entry in shown} == {1}


def test_losses_and_gammas_are_traced_as_the_adapter_tells_them(tmp_path):
    record = played(run_of("bestta", images=3), tmp_path)
    adapter = adapter_of("bestta")
    totals, largest, mean = [], [], []
    for frame in weathers(3):
        adapter(tensor(frame.image))
        totals.append(adapter.last.losses["total"])
        every = torch.cat([p.detach().flatten().abs() for p in adapter.trainable.values()])
        largest.append(float(every.max()))
        mean.append(float(every.mean()))
    traces = record["traces"]
    assert traces["total"] == pytest.approx(totals, rel=1e-5)
    assert traces["gamma"] == pytest.approx(largest, rel=1e-5)
    assert traces["gamma_mean"] == pytest.approx(mean, rel=1e-5)
    assert {len(values) for values in traces.values()} == {6}
    assert largest[-1] > 0


# Stopped and gone on


def test_what_a_method_learns_first_is_learned_once_for_all_settings_it_does_not_depend_on(
    tmp_path,
):
    """EATA's Fisher information depends on how batch norms see an image, not on the step size."""
    for settings in ({"lr": 1e-3}, {"lr": 1e-4}, {"lr": 1e-4, "prior": 4.0}):
        chosen = replace(method("eata"), settings=settings)
        assemble(run_of(chosen, size=(32, 32), images=1), tmp_path)
    assert len(list((tmp_path / "profiles").glob("*.safetensors"))) == 2


def test_a_method_may_be_run_in_another_form(tmp_path):
    run = run_of(read_method("bestta-paper"), size=(64, 32), images=1)
    config = assemble(run, tmp_path).adapter.config
    assert (config.gamma, config.guard, config.layers) == ("absolute", False, ("backbone.layer3",))
    record = read(execute(run, tmp_path))
    assert record["settings"]["gamma"] == "absolute"
    with pytest.raises(ValueError, match="no preset of 'tent' is called 'paper'"):
        replace(read_method("tent"), preset="paper")


QUICK = [
    "source",
    "bn_stats",
    "alpha_bn",
    "bn_ema",
    "tent",
    "tent_reset",
    "eata",
    "cotta",
    "ecotta",
    "petal",
    "sar",
    "memo",
    "bestta",
    "bestta-still-single",
]


@pytest.mark.parametrize("name", ["source", "bn_stats", "alpha_bn"])
def test_what_remembers_nothing_answers_the_frames_of_later_rounds_once(
    name, tmp_path, stepped, monkeypatch
):
    known, calls = method_class(name), stepped(name)
    run = run_of(
        method(name),
        size=(32, 32),
        rounds=3,
        images=4,
        source=None,
        embeddings=False,
        forgetting=False,
    )
    once, few = played(run, tmp_path / "once"), len(calls)
    calls.clear()
    monkeypatch.setattr(known, "remembers", True)
    always = played(run, tmp_path / "always")
    frames = once["stream"]["frames"]
    assert len(calls) == frames
    # Of each block's four frames two are timed, and so answered in any case.
    assert frames * (1 / 2 + 1 / 6) <= few < frames
    assert lasting(once) == lasting(always)
    monkeypatch.setattr(known, "remembers", False)
    parts, stopped = played_in_parts(run, tmp_path / "parts", stops={3, frames - 2})
    assert stopped == 2
    assert lasting(parts) == lasting(always)


@pytest.mark.parametrize(
    "stream",
    [
        {"recipe": "mixed", "rounds": 4, "images": 6},  # other frames are timed in each round
        {
            "recipe": "gradual",
            "effect": "corruptions",
            "conditions": ("fog", "snow"),
            "severities": (1, 2, 1),
            "rounds": 1,
            "images": 4,
        },
    ],
    ids=["mixed", "gradual"],
)
def test_a_frame_counts_the_same_whenever_it_is_shown_again(stream, tmp_path, monkeypatch):
    plain = {"source": None, "embeddings": False, "forgetting": False}
    run = run_of(method("source"), size=(32, 32), **plain, **stream)
    once = played(run, tmp_path / "once")
    monkeypatch.setattr(method_class("source"), "remembers", True)
    assert lasting(once) == lasting(played(run, tmp_path / "always"))


@pytest.mark.parametrize("name", QUICK)
def test_a_run_stopped_after_every_frame_equals_one_in_one_go(name, tmp_path):
    run = run_of(method(name), size=(32, 32), rounds=2, images=1)
    whole = played(run, tmp_path / "whole")
    if (tmp_path / "whole" / "profiles").exists():  # what it learned first takes longest
        shutil.copytree(tmp_path / "whole" / "profiles", tmp_path / "parts" / "profiles")
    parts, stopped = played_in_parts(run, tmp_path / "parts")
    assert stopped == 4  # after each frame, block borders and the last one among them
    assert lasting(parts) == lasting(whole)
    assert pictures(tmp_path / "parts", parts) == pictures(tmp_path / "whole", whole)
    assert (whole["cost"]["sittings"], parts["cost"]["sittings"]) == (1, 5)
    left = sorted(path.name for path in (tmp_path / "parts").iterdir() if path.name != "profiles")
    assert left == [f"{parts['id']}.json", f"{parts['id']}.pictures"]


def stopped_at(stop, run, out):
    """Where ``run`` was after each batch until it was stopped at frame ``stop``."""
    at = []
    with pytest.raises(Stopped, match=f"stopped at frame {stop}"):
        played(
            run,
            out,
            tell=lambda progress: at.append(progress.position),
            stopping=lambda: at[-1:] == [stop],
        )
    return at


INSTRUMENTS = {
    "source": Source(split="val", images=1),
    "forgetting": True,
    "similarities": True,
    "embeddings": True,
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run in one go with every instrument on: two rounds of two blocks of three, in twos."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("watched")
    run = run_of("bestta", images=3, rounds=2, batch=2, **INSTRUMENTS)
    return run, played(run, out), out


@pytest.fixture
def stepped(monkeypatch):
    """How often a method was made to step, by name."""

    def counted(name):
        known, calls = method_class(name), []
        step = known.step

        def counting(self, image):
            calls.append(image)
            return step(self, image)

        monkeypatch.setattr(known, "step", counting)
        return calls

    return counted


ALONE = {"similarities": False}
"""Each similarity depends on the frames before: with them every frame is played."""

RETURNING = {
    # Reset at each change, every round but the first is the first over again.
    "tent_reset": (read_method("tent_reset", lr=0.02), {"rounds": 3}, 1 / 3),
    "guarded": (read_method("tent_reset", lr=0.02, guard=True), {"rounds": 3}, 1 / 3),
    # What swells fades: each corruption at 1, 2 and then at 1 once more.
    "tent_reset, gradual": (
        read_method("tent_reset", lr=0.02),
        {
            "recipe": "gradual",
            "effect": "corruptions",
            "conditions": ("fog", "snow"),
            "severities": (1, 2, 1),
            "rounds": 1,
        },
        2 / 3,
    ),
}


@pytest.mark.parametrize("case", RETURNING)
def test_a_block_that_begins_as_an_equal_one_did_is_not_played_again(
    case, tmp_path, stepped, monkeypatch
):
    chosen, changes, share = RETURNING[case]
    run = run_of(chosen, size=(32, 32), images=5, **INSTRUMENTS | ALONE | changes)
    calls = stepped(chosen.method)

    def steps(out):
        calls.clear()
        record = played(run, out)
        looks = len(record["source_scores"])  # each at one image
        return record, len(calls) - looks

    few, made = steps(tmp_path / "few")
    monkeypatch.setattr(passages, "LARGE", -1)  # none is kept
    every, needed = steps(tmp_path / "every")
    assert needed == few["stream"]["frames"]
    assert made == pytest.approx(share * needed)
    assert lasting(few) == lasting(every)
    assert pictures(tmp_path / "few", few) == pictures(tmp_path / "every", every)
    monkeypatch.undo()
    # Stopped within the first block and at the end of the second.
    parts, stopped = played_in_parts(run, tmp_path / "parts", {2, 10})
    assert stopped == 2
    assert lasting(parts) == lasting(every)
    assert pictures(tmp_path / "parts", parts) == pictures(tmp_path / "every", every)


def test_a_block_that_is_not_played_can_be_stopped_within(tmp_path):
    run = run_of(method("tent_reset"), size=(32, 32), images=3, rounds=2, **INSTRUMENTS | ALONE)
    whole = played(run, tmp_path / "whole")
    at = []
    with pytest.raises(Stopped, match="stopped at frame 6"):  # where the second round begins
        played(
            run,
            tmp_path,
            tell=lambda progress: at.append(progress.position),
            stopping=lambda: at[-1:] == [8],
        )
    seen = []
    record = played(run, tmp_path, tell=lambda progress: seen.append(progress.position))
    assert seen[0] == 7
    assert lasting(record) == lasting(whole)


@pytest.mark.parametrize("hidden", ["counter", "chance"])
def test_a_block_is_played_again_by_a_method_with_more_to_it_than_its_state(
    hidden, tmp_path, stepped, monkeypatch
):
    """Of a plugin, say: one that counts changes, or draws where we do not look."""
    known = method_class("tent_reset")
    calls = stepped("tent_reset")
    step = known.step

    def drawing(self, image):
        random.random()
        return step(self, image)

    def counting(self):
        self.reset()
        self.changes = getattr(self, "changes", 0) + 1

    if hidden == "chance":
        monkeypatch.setattr(known, "step", drawing)
    else:
        monkeypatch.setattr(known, "domain_changed", counting)
    plain = {"source": None, "embeddings": False, "forgetting": False}
    run = run_of(method("tent_reset"), size=(32, 32), rounds=2, images=2, **plain)
    record = played(run, tmp_path)
    assert len(calls) == record["stream"]["frames"]


@pytest.mark.parametrize("lost", [0, 1, 2], ids=["first", "middle", "last"])
def test_images_that_change_while_they_are_played_are_told_of(lost, tmp_path, monkeypatch):
    monkeypatch.setattr(Stream, "keeping", lambda self, most_bytes: self)  # each is read anew
    made = photographs(tmp_path, 3)
    run = run_of(method("tent_reset"), rounds=2, **made)
    image = tmp_path / "images" / f"{lost}.png"

    def tell(progress):
        if progress.position == 5 and image.stat().st_size > 200:  # the first round is read
            image.write_bytes(image.read_bytes()[:200])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(passages.Changed, match="Run it again"):
            played(run, tmp_path / "out", tell=tell)
        again = played(run, tmp_path / "out")
    assert [block["frames"] for block in again["blocks"]] == [3, 3, 2, 2]


def test_a_method_that_goes_on_learning_answers_every_frame(tmp_path, stepped):
    calls = stepped("tent")
    plain = {"source": None, "embeddings": False, "forgetting": False}
    record = played(run_of(method("tent"), size=(32, 32), rounds=3, images=2, **plain), tmp_path)
    assert len(calls) == record["stream"]["frames"]


@pytest.mark.parametrize("stops", [{3}, {6}, {8}, {12}, {2, 3, 6, 9, 12}], ids=str)
def test_a_run_with_every_instrument_stopped_anywhere_equals_one_in_one_go(
    stops, watched, tmp_path
):
    """Frames 3, 6 and 9 begin blocks, 6 a round too, and at 12 all is done but the record."""
    run, whole, out = watched
    seen = 0
    for stop in sorted(stops):
        seen += len(stopped_at(stop, run, tmp_path))
    record = played(run, tmp_path)
    assert lasting(record) == lasting(whole)
    assert pictures(tmp_path, record) == pictures(out, whole)
    assert record["cost"]["sittings"] == len(stops) + 1
    assert record["cost"]["timed"] == whole["cost"]["timed"]
    assert seen <= 8  # no batch is played twice


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": "mixed"},
        {"shuffle": True, "redraw": True},
        {"precision": "bf16"},
        {"every": 2, "images": 3},
    ],
    ids=str,
)
def test_other_streams_are_stopped_and_gone_on_with_too(change, tmp_path):
    run = run_of("bestta", rounds=2, **change)
    whole = played(run, tmp_path / "whole")
    parts, stopped = played_in_parts(run, tmp_path / "parts", {1, 4, 6})
    assert stopped == 3
    assert lasting(parts) == lasting(whole)


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, 2), (1000.0, 0)])
def test_a_run_that_crashed_goes_on_from_its_last_checkpoint(seconds, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SAVING", 0.0)  # however long a checkpoint takes
    run = run_of("bestta", run={"checkpoint_seconds": seconds})
    whole = played(run_of("bestta"), tmp_path / "whole")

    def crash(progress):
        if progress.position == 3:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        played(run, tmp_path, tell=crash)
    again = []
    record = played(run, tmp_path, tell=lambda progress: again.append(progress.position))
    assert again == list(range(kept + 1, 5))
    assert lasting(record) == lasting(whole)


def test_a_checkpoint_that_is_damaged_is_passed_over_for_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SAVING", 0.0)
    run = run_of("bestta", run={"checkpoint_seconds": 0.0})
    whole = played(run_of("bestta"), tmp_path / "whole")
    work = tmp_path / f".{whole['id']}"
    assert stopped_at(3, run, tmp_path) == [1, 2, 3]
    last, before = sorted(work.glob("*.checkpoint"), reverse=True)
    last.write_bytes(last.read_bytes()[:-10])
    assert Checkpoints(work).load()[0]["tally"]["position"] == 2
    again = []
    record = played(run, tmp_path, tell=lambda progress: again.append(progress.position))
    assert again == [3, 4]
    assert lasting(record) == lasting(whole)
    assert before.name.startswith("0000000002")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heeded_after_the_step(number, tmp_path):
    run = run_of("bestta")
    whole = played(run, tmp_path / "whole")

    def send(progress):
        if progress.position == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(Stopped, match="stopped at frame 2"):
        played(run, tmp_path, tell=send)
    assert lasting(played(run, tmp_path)) == lasting(whole)


def test_a_run_that_is_recorded_is_not_run_again(tmp_path):
    path = execute(run_of(), tmp_path, measure_memory=False)
    before = path.read_bytes()

    def never(progress):
        raise AssertionError("it ran")

    assert execute(run_of(), tmp_path, tell=never) == path
    assert path.read_bytes() == before


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path):
    run = run_of()
    work = tmp_path / f".{identity(run, stream_of(run))}"
    work.mkdir()
    with held(work), pytest.raises(Busy, match="another process works in"):
        played(run, tmp_path)
    assert played(run, tmp_path)["frames"]["position"] == [0, 1, 2, 3]


def test_workers_that_render_change_nothing(tmp_path):
    alone = played(run_of("bestta"), tmp_path / "alone")
    helped = played(run_of("bestta", run={"workers": 1}), tmp_path / "helped")
    assert lasting(helped) == lasting(alone)


# What is looked at beside the stream


def test_forgetting_is_the_score_of_source_images_by_what_was_learned(tmp_path):
    """By another adapter, which is handed the state anew before each source image."""
    asked = {"source": Source(split="val", images=1), "forgetting": True}
    record = played(run_of(method("tent"), rounds=2, **asked), tmp_path)
    adapter, other = adapter_of("tent"), adapter_of("tent")
    images = [*Streets(1, size=(256, 128), split="val")]

    def score():
        learned, pairs = adapter.state(), []
        for sample in images:
            other.load_state(learned)
            pairs.append((sample.label, other(tensor(sample.image))[0].argmax(0).numpy()))
        return miou(pairs)

    expected = [score()]
    stream = weathers(rounds=2)
    for frame in stream:
        adapter(tensor(frame.image))
        if frame.position in (3, 7):
            expected.append(score())
    assert [entry["round"] for entry in record["source_scores"]] == [0, 1, 2]
    assert [entry["score"] for entry in record["source_scores"]] == pytest.approx(expected)
    assert len(set(expected)) == 3


@pytest.mark.parametrize("name", ["tent", "bn_ema", "bestta"])
def test_looking_changes_nothing_in_the_stream(name, tmp_path):
    plain = played(run_of(method(name), rounds=2), tmp_path)
    looked = played(run_of(method(name), rounds=2, **INSTRUMENTS), tmp_path)
    assert looked["id"] != plain["id"]
    for part in ("blocks", "frames", "events", "stream", "score"):
        assert looked[part] == plain[part]
    for loss, values in plain["traces"].items():
        if loss != "entropy":  # which similarities reckon of any prediction
            assert looked["traces"][loss] == values
    assert plain["source_scores"] == []
    assert plain["embeddings"] is None
    assert len(looked["source_scores"]) == 3
    assert looked["embeddings"]["target"].keys() == {"fog", "night"}
    assert {"direction", "target", "source"} <= looked["traces"].keys()
    assert not {"direction", "target", "source"} & plain["traces"].keys()


def test_the_source_model_forgets_nothing(tmp_path):
    asked = {"source": Source(split="val", images=1), "forgetting": True}
    scores = played(run_of(rounds=2, **asked), tmp_path)["source_scores"]
    assert len({entry["score"] for entry in scores}) == 1
    assert scores[0]["score"] > 0


# Images that cannot be read, and that have no labels


def test_broken_images_are_left_out_and_named_without_their_folder(tmp_path):
    made = photographs(tmp_path, 4, broken=(2,))
    label = tmp_path / "labels" / "3.png"
    label.write_bytes(label.read_bytes()[:60])
    with pytest.warns(UserWarning, match=r"skipped [23].png"):
        record = played(run_of("bestta", rounds=2, **made), tmp_path / "out")
    assert [entry["name"] for entry in record["skipped"]] == ["2.png", "3.png"]
    assert all(entry["reason"] for entry in record["skipped"])
    assert str(tmp_path) not in (tmp_path / "out" / f"{record['id']}.json").read_text()
    assert record["frames"]["position"] == [0, 1, 4, 5, 8, 9, 12, 13]
    assert [block["frames"] for block in record["blocks"]] == [2, 2, 2, 2]
    images = Folder(tmp_path / "images", labels=tmp_path / "labels")
    adapter, stream = adapter_of("bestta"), continual(weather(images, ("fog", "night")), rounds=2)
    expected = []
    for frame in map(stream.__getitem__, record["frames"]["position"]):
        predicted = adapter(tensor(frame.image))[0].argmax(0).numpy()
        expected.append(miou([(frame.label, predicted)]))
    assert record["frames"]["score"] == pytest.approx(expected)


def test_a_domain_change_is_told_even_if_the_first_image_after_it_is_broken(tmp_path):
    made = photographs(tmp_path, 3, broken=(0,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = played(run_of(method("tent_reset"), rounds=2, **made), tmp_path / "out")
        apart = played(run_of(method("tent"), rounds=2, **made), tmp_path / "out")
    blocks = record["blocks"]
    # Reset at each change, the second round is the first over again; TENT goes on learning.
    assert [b["score"] for b in blocks[:2]] == [b["score"] for b in blocks[2:]]
    assert [b["score"] for b in apart["blocks"][:2]] != [b["score"] for b in apart["blocks"][2:]]


def test_a_run_over_broken_images_is_stopped_and_gone_on_with(tmp_path):
    made = photographs(tmp_path, 4, broken=(0, 2, 3))
    run = run_of(method("tent_reset"), **made, batch=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = played(run, tmp_path / "whole")
        parts, stopped = played_in_parts(run, tmp_path / "parts")
    assert stopped == 2
    assert lasting(parts) == lasting(whole)
    assert [entry["name"] for entry in parts["skipped"]] == ["0.png", "2.png", "3.png"]


def test_frames_without_labels_are_adapted_to_and_not_scored(tmp_path):
    made = photographs(tmp_path, 2)
    made["options"] = {}
    record = played(run_of("bestta", **made), tmp_path / "out")
    assert record["frames"]["score"] == [None] * 4
    assert [block["score"] for block in record["blocks"]] == [None, None]
    assert (record["score"], record["rounds"]) == (None, [None])
    assert record["events"]["adapted"] == 4
    assert record["pictures"]["worst"] == []
    assert [entry["truth"] for entry in record["pictures"]["conditions"]] == [None, None]


def test_a_block_without_a_readable_image_has_no_score_and_the_others_count(tmp_path):
    draw = np.random.default_rng(0)
    for condition in ("fog", "night"):
        for part, end, shape in (
            ("rgb_anon", "rgb_anon", (32, 64, 3)),
            ("gt", "gt_labelTrainIds", (32, 64)),
        ):
            folder = tmp_path / "acdc" / part / condition / "train" / "GOPR01"
            path = folder / f"GOPR01_frame_000001_{end}.png"
            save(path, draw.integers(0, 19, shape, np.uint8))
            if (part, condition) == ("rgb_anon", "fog"):
                path.write_bytes(b"no picture")
    run = run_of(
        "bestta",
        set="acdc",
        split="train",
        effect="photographs",
        images=None,
        run={"data": str(tmp_path / "acdc")},
    )
    with pytest.warns(UserWarning, match="skipped fog/train"):
        record = played(run, tmp_path / "out")
    fog, night = record["blocks"]
    assert (fog["score"], fog["frames"]) == (None, 0)
    assert record["score"] == night["score"] > 0
    assert [entry["name"] for entry in record["pictures"]["conditions"]] == ["night"]


# Pictures


def test_the_worst_frames_are_those_with_the_lowest_scores_each_scene_once(tmp_path):
    record = played(run_of(method("tent"), images=3, rounds=2), tmp_path)
    stream = weathers(3, 2)
    lowest = {}
    for position, score in zip(*(record["frames"][k] for k in ("position", "score")), strict=True):
        scene = stream.name_at(position)
        if scene not in lowest or score < lowest[scene][0]:
            lowest[scene] = (score, stream.block_at(position).round)
    expected = sorted((score, name, round_) for name, (score, round_) in lowest.items())[:4]
    worst = record["pictures"]["worst"]
    assert [(w["score"], (w["name"], w["frame"]), w["round"]) for w in worst] == expected
    assert len(lowest) == 6
    kept = pictures(tmp_path, record)
    named = [w[key] for w in worst for key in ("image", "truth", "prediction")]
    named += [
        c[key] for c in record["pictures"]["conditions"] for key in ("image", "truth", "prediction")
    ]
    assert sorted(kept) == sorted(named)  # those of frames that were worst for a while are gone


def test_a_picture_of_each_condition_shows_image_truth_and_prediction(tmp_path):
    record = played(run_of("source", images=3), tmp_path)
    kept = pictures(tmp_path, record)
    stream = weathers(3)
    blocks = by_hand(adapter_of("source"), stream)
    shown = record["pictures"]["conditions"]
    assert [entry["name"] for entry in shown] == ["fog", "night"]
    for entry, block, pairs in zip(shown, stream.blocks, blocks, strict=True):
        frame = next(
            stream[p]
            for p in range(block.start, block.stop)
            if stream.name_at(p)[1] == entry["frame"]
        )
        label, predicted = pairs[frame.position - block.start]
        photo, truth, prediction = (
            np.asarray(Image.open(io.BytesIO(kept[entry[key]])).convert("RGB"))
            for key in ("image", "truth", "prediction")
        )
        assert photo.shape == (32, 64, 3)
        assert np.abs(photo.astype(int) - frame.image).mean() < 8  # a JPEG of it
        assert np.array_equal(truth, colour(label))
        assert np.array_equal(prediction, colour(predicted.astype(np.uint8)))


def test_large_pictures_are_kept_384_wide(tmp_path):
    run = run_of(size=(400, 200), images=1, conditions=("fog",))
    record = played(run, tmp_path)
    for data in pictures(tmp_path, record).values():
        assert Image.open(io.BytesIO(data)).size == (384, 192)


# What else a record says


def test_a_record_says_what_was_run_and_by_what(tmp_path):
    variant = Variant(method="bestta", row="(a)", marks={"rho": 0.1})
    run = run_of(read_method("bestta", rho=0.1), published="acdc-continual")
    run = replace(run, study="own", variant=variant)
    record = played(run, tmp_path)
    adapter = adapter_of("bestta")
    model = adapter.model
    assert (record["kind"], record["format"]) == ("bestta record", 1)
    assert (tmp_path / f"{record['id']}.json").exists()
    assert (record["protocol"], record["published"]) == ("tiny", "acdc-continual")
    assert (record["method"], record["label"]) == ("bestta", "BESTTA")
    assert record["study"] == {"name": "own", "row": "(a)", "marks": {"rho": 0.1}}
    assert record["config"] == run.resolved()
    assert record["settings"] == {**adapter.settings, "rho": 0.1}
    assert record["parameters"] == {
        "trained": sum(p.numel() for p in adapter.trainable.values()),
        "model": sum(p.numel() for p in model.parameters()),
    }
    assert record["parameters"]["trained"] > 0
    stream = record["stream"]
    assert stream["fingerprint"] == models.load_profile("streets").model.fingerprint
    assert (stream["set"], stream["size"], stream["frames"]) == ("streets", [64, 32], 4)
    assert (stream["batch"], stream["every"], stream["rounds"]) == (1, 1, 1)
    known = provenance()
    about = record["provenance"]
    assert (about["commit"], about["bestta"]) == (str(known["commit"]), bestta.__version__)
    assert about["versions"]["torch"] == torch.__version__
    assert "measured" not in about  # that is the cost's


def test_a_record_says_what_it_took(tmp_path):
    cost = played(run_of("bestta", images=3), tmp_path)["cost"]
    for name in ("call_ms", "predict_ms", "adapt_ms"):
        assert 0 < cost[name]["median"] <= cost[name]["p95"]
        assert cost[name]["mean"] > 0
    assert cost["predict_ms"]["median"] < cost["call_ms"]["p95"]
    assert cost["timed"] == 4  # of three frames a block the first and the last
    assert cost["seconds"] > 6 * 1e-3 * cost["predict_ms"]["median"]
    assert cost["started"] <= cost["finished"]
    assert (cost["sittings"], len(cost["load"])) == (1, 1)
    assert cost["peak_bytes"] is None  # was not asked for


def test_the_mean_time_is_that_of_every_call_but_the_first(tmp_path, monkeypatch):
    """Also of calls that were not held against a plain forward: here the second of each block."""
    given: dict[str, list[list[float]]] = {"median": [], "mean": []}

    def noting(name):
        return lambda times: given[name].append(list(times)) or 1.0

    changed = {name: noting(name) for name in given}
    monkeypatch.setattr(runner, "np", SimpleNamespace(**{**vars(np), **changed}))
    played(run_of("source", images=3), tmp_path)
    assert [len(times) for times in given["median"][:3]] == [6, 4, 4]  # call, predict, adapt
    assert given["mean"][:3] == [times[1:] for times in given["median"][:3]]


def test_the_seconds_of_all_sittings_are_counted(tmp_path):
    run = run_of("source")
    parts, stopped = played_in_parts(run, tmp_path, {2})
    assert stopped == 1
    with pytest.raises(Stopped):
        played(run_of("source", run={"seed": 1}), tmp_path, stopping=lambda: True)
    work = next(tmp_path.glob(".tiny-source-s1-*"))
    sittings = Checkpoints(work).load()[0]["tally"]["sittings"]
    assert sittings[0]["seconds"] > 0
    assert parts["cost"]["sittings"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak of some steps")
def test_peak_memory_is_measured_in_a_process_of_its_own(tmp_path):
    run = run_of("bestta", size=(512, 256), images=1, conditions=("fog",))
    cost = played(run, tmp_path, measure_memory=True)["cost"]
    assert cost["memory"] == "process"
    # A process with torch in it takes 100 MB at least; features of 512x256 pixels some MB.
    assert 100e6 < cost["peak_bytes"] < 4e9
    assert 1e6 < cost["over_model_bytes"] < cost["peak_bytes"] / 2


def test_settings_without_end_are_words_in_the_record(tmp_path):
    record = played(run_of(read_method("alpha_bn", prior=float("inf"))), tmp_path)
    assert record["settings"]["prior"] == "inf"
    assert record["config"]["method"]["settings"]["prior"] == "inf"
    # An infinite prior is the source's own statistics.
    source = played(run_of("source"), tmp_path)
    assert record["score"] == pytest.approx(source["score"], abs=0.5)


def test_words_stand_for_numbers_that_json_lacks_and_for_no_others():
    values = {"a": [float("inf"), 1.5, (float("-inf"), True)], "b": {"c": float("nan"), "d": None}}
    assert strict(values) == {"a": ["inf", 1.5, ["-inf", True]], "b": {"c": "nan", "d": None}}


def test_lists_of_numbers_stand_on_one_line_and_words_are_left_alone():
    value = {"numbers": [1, 2.5, None], "words": "a [ b ]\n[ c ]", "lists": [[1], [2, 3]], "e": []}
    text = compact(json.dumps(value, indent=1))
    assert json.loads(text) == value
    assert '"numbers": [1, 2.5, null]' in text
    assert "[2, 3]" in text


# Batches and logits


def frame(position, block, shape=(4, 8, 3)):
    return Frame(position, block, block.name, str(position), np.zeros(shape, np.uint8), None)


def test_batches_end_with_their_block_and_where_sizes_change():
    first, second = Block(0, "fog", 0, 0, 5), Block(1, "night", 0, 5, 7)
    frames = [frame(i, first, (4, 8, 3) if i < 3 else (8, 4, 3)) for i in range(5)]
    frames += [frame(i, second, (8, 4, 3)) for i in (5, 6)]
    found = [[f.position for f in batch] for batch in batches(iter(frames), 2)]
    assert found == [[0, 1], [2], [3, 4], [5, 6]]
    found = [[f.position for f in batch] for batch in batches(iter(frames), 9)]
    assert found == [[0, 1, 2], [3, 4], [5, 6]]


def test_logits_of_a_coarser_grid_are_brought_to_the_size_of_the_labels():
    block = Block(0, "fog", 0, 0, 1)
    coarse = torch.arange(2.0).view(1, 2, 1, 1).expand(1, 2, 2, 4)
    fine = fitted(coarse, [frame(0, block)])
    assert fine.shape == (1, 2, 4, 8)
    assert torch.equal(fine[0, :, 0, 0], torch.tensor([0.0, 1.0]))
    assert fitted(torch.zeros(3, 10), [frame(0, block)]).shape == (3, 10)


# Classification


@pytest.fixture(scope="module")
def cifar10c(tmp_path_factory):
    """Files of full length that take no space: three images of each corruption are written."""
    folder = tmp_path_factory.mktemp("c") / "CIFAR-10-C"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name in CORRUPTIONS:
        array = np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3)
        )
        for severity in (4, 5):
            for index in (0, 3333, 5000, 6666):
                array[(severity - 1) * 10_000 + index] = draw.integers(0, 256, (32, 32, 3))
        del array
    np.save(folder / "labels.npy", np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    yield folder
    for path in folder.iterdir():
        path.unlink()


def cifar(data, name, **changes):
    chosen = read_protocol("cifar10c", images=2, **changes)
    return Run(protocol=chosen, method=method(name), data=str(data))


def test_the_cifar_protocol_is_15_corruptions_scored_by_their_error(cifar10c, tmp_path):
    record = played(cifar(cifar10c, "source"), tmp_path)
    card, model = models.card("cifar10"), models.load("cifar10").eval()
    assert [block["name"] for block in record["blocks"]] == list(CORRUPTIONS)
    assert (record["metric"], record["higher_is_better"]) == ("error", False)
    assert record["stream"]["severity"] == 5
    expected, sure = [], {}
    mean, deviation = (np.array(v, np.float32) for v in card.normalise)
    for name in CORRUPTIONS:
        images = np.load(cifar10c / f"{name}.npy", mmap_mode="r")
        for index in (0, 5000):  # two of 10,000, spread
            image = (images[40_000 + index].astype(np.float32) / 255 - mean) / deviation
            with torch.no_grad():
                logits = model(torch.from_numpy(image).permute(2, 0, 1)[None])[0]
            wrong = int(logits.argmax()) != index % 10
            expected.append(100.0 if wrong else 0.0)
            if wrong:
                sure[name, index] = float(logits.softmax(0).max())
    assert record["frames"]["score"] == expected
    scores = [block["score"] for block in record["blocks"]]
    assert scores == [(a + b) / 2 for a, b in zip(expected[::2], expected[1::2], strict=True)]
    # Both images are of class 0, so the block's error is that class's, and no other was there.
    assert [block["per_class"] for block in record["blocks"]] == [[s] + [None] * 9 for s in scores]
    # The worst are wrong, and surest of it.
    surest = sorted(sure, key=lambda scene: -sure[scene])[:4]
    worst = record["pictures"]["worst"]
    assert [(w["name"], int(w["frame"].split("/")[-1])) for w in worst] == surest
    assert {w["label"] for w in worst} <= {card.classes[0]}  # 0 and 5000 are of class 0
    assert all(w["predicted"] != w["label"] and w["prediction"] is None for w in worst)
    assert len(record["pictures"]["conditions"]) == 15


def test_severities_of_files_are_streams_of_their_own(cifar10c, tmp_path):
    both = [
        played(cifar(cifar10c, "source", severity=severity, conditions=["fog"]), tmp_path)
        for severity in (4, 5)
    ]
    assert [record["stream"]["severity"] for record in both] == [4, 5]
    assert both[0]["stream"]["key"] != both[1]["stream"]["key"]


@pytest.mark.parametrize("name", ["rotta", "bestta", "bn_ema"])
def test_a_classifier_stopped_after_every_batch_equals_one_in_one_go(name, cifar10c, tmp_path):
    run = cifar(cifar10c, name, conditions=["fog", "snow"], similarities=name == "bestta")
    whole = played(run, tmp_path / "whole")
    parts, stopped = played_in_parts(run, tmp_path / "parts")
    assert stopped == 4
    assert lasting(parts) == lasting(whole)
    assert pictures(tmp_path / "parts", parts) == pictures(tmp_path / "whole", whole)


# The paper's other protocols, on trees of their shape


def test_the_gradual_protocol_plays_with_a_picture_of_each_corruption_at_its_strongest(tmp_path):
    draw = np.random.default_rng(0)
    stem = "val/lindau/lindau_000001_000019"
    root = tmp_path / "cityscapes"
    save(
        root / f"leftImg8bit/{stem}_leftImg8bit.png",
        draw.integers(0, 256, (32, 64, 3), np.uint8),
    )
    save(root / f"gtFine/{stem}_gtFine_labelTrainIds.png", draw.integers(0, 19, (32, 64), np.uint8))
    chosen = read_protocol("cityscapes-gradual", size=SIZE)
    run = Run(protocol=chosen, method=method("bestta"), data=str(root))
    record = played(run, tmp_path / "out")
    assert len(record["blocks"]) == len(record["frames"]["score"]) == 36
    assert [entry["name"] for entry in record["pictures"]["conditions"]] == [
        "brightness-5",
        "fog-5",
        "frost-5",
        "snow-5",
    ]
    assert len(record["conditions"]) == 20  # the way down adds no names to those of the way up


def test_a_method_that_a_task_is_not_for_says_so(tmp_path):
    with pytest.raises(ValueError, match="rotta"):
        played(run_of("rotta"), tmp_path)


def test_a_strict_reader_reads_every_record(tmp_path):
    path = execute(run_of("bestta", **INSTRUMENTS), tmp_path, measure_memory=False)
    record = read(path)  # refuses NaN and Infinity
    assert record["id"] == path.stem
    assert protocol(**INSTRUMENTS).layer is None
    assert record["embeddings"]["layer"] == "decoder.refine"  # the last of the profile


# --- what is timed is not looked into -------------------------------------------------------


@pytest.mark.parametrize(("frames", "batch"), [(1, 1), (2, 1), (7, 2), (40, 1), (400, 4), (401, 1)])
def test_a_batch_is_timed_or_looked_into_and_of_each_there_are_enough(frames, batch):
    block = Block(index=0, name="fog", round=0, start=10, stop=10 + frames)
    positions = range(10, 10 + frames, batch)
    chosen = [sampled(block, position, batch) for position in positions]
    timed, looked = (sum(each) for each in zip(*chosen, strict=True))
    count = len(positions)
    assert timed >= min(10, -(-count // 2))
    assert looked >= min(10, count // 2)
    if count > 1:
        assert not any(both == (True, True) for both in chosen)


def test_times_of_frames_that_are_looked_into_do_not_count(tmp_path):
    plain = played(run_of("source", images=4), tmp_path / "plain")
    source = Source(split="val", images=1)
    looking = run_of("source", images=4, source=source, embeddings=True)
    execution = {}
    whole = runner.Execution.write

    def write(self, path, memory):
        execution["calls"] = len(self.tally.times["call"])
        whole(self, path, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.Execution, "write", write)
        record = played(looking, tmp_path / "looking")
    assert plain["blocks"] == record["blocks"]
    assert execution["calls"] == 4  # of eight frames, four were looked into
    assert record["cost"]["timed"] == 4
    assert not record["cost"]["looked"]


# --- whatever a method draws from -----------------------------------------------------------

DRAWING = """
from dataclasses import dataclass
import torch
from bestta.adapters.base import Adapter, StepReport
from bestta.adapters.registry import register_adapter

@register_adapter("drawing")
class Drawing(Adapter):
    def prepare(self):
        pass

    def step(self, image):
        logits = self.predict_source(image)
        return logits + torch.rand_like(logits), StepReport(losses={"drawn": float(torch.rand(()))})
"""


def test_a_method_that_draws_from_pytorchs_own_generator_goes_on_to_the_bit(tmp_path):
    path = tmp_path / "drawing.py"
    path.write_text(DRAWING)
    import_file(str(path))
    try:
        run = run_of(Method(method="drawing"), run={"plugins": (str(path),), "seed": 3})
        whole = played(run, tmp_path / "whole")
        torch.rand(7)  # whatever else went on in between
        parts, stopped = played_in_parts(run, tmp_path / "parts", {1, 2})
        assert stopped == 2
        assert lasting(whole) == lasting(parts)
        assert len(set(whole["traces"]["drawn"])) == 4
    finally:
        registry._methods.pop("drawing")


# --- what decides a run, and what does not --------------------------------------------------


def name_of(run):
    return identity(run, stream_of(run))


def test_a_record_is_of_the_plugin_as_it_was(tmp_path):
    path = tmp_path / "drawing.py"
    path.write_text(DRAWING)
    import_file(str(path))
    try:
        run = run_of(Method(method="drawing"), run={"plugins": (str(path),)})
        before = name_of(run)
        assert name_of(run) == before
        path.write_text(DRAWING.replace("logits + ", "logits - "))
        assert name_of(run) != before
    finally:
        registry._methods.pop("drawing")


def test_a_record_is_of_the_settings_in_force_defaults_included(monkeypatch):
    run = run_of("bestta")
    before = name_of(run)
    monkeypatch.setitem(method_class("bestta").presets["segmentation"], "rho", 0.55)
    assert name_of(run) != before


def test_a_record_is_of_the_source_images_it_looked_at():
    def run(count, **more):
        return run_of("source", source=Source(split="val", images=count), **more)

    assert name_of(run(2, forgetting=True)) != name_of(run(3, forgetting=True))
    record_of = {count: run(count, forgetting=True) for count in (2, 3)}
    keys = {describe(r, stream_of(r))["key"] for r in record_of.values()}
    assert len(keys) == 1  # the stream is the same


def test_a_record_tells_which_source_images_it_looked_at(tmp_path):
    source = Source(split="val", images=2)
    record = played(run_of("source", source=source, forgetting=True), tmp_path)
    expected = {"set": "streets", "split": "val", "images": 2}
    assert {k: v for k, v in record["source_set"].items() if k != "names"} == expected
    assert played(run_of("source"), tmp_path)["source_set"] is None


def test_what_stands_beside_a_result_does_not_decide_it():
    assert name_of(run_of("source", published="acdc-continual")) == name_of(run_of("source"))
    assert name_of(run_of("source", severities=(1, 2))) == name_of(run_of("source"))


def test_a_setting_of_a_wrong_kind_is_noticed_before_anything_runs():
    with pytest.raises(ValueError, match="style is one of"):
        name_of(run_of(read_method("bestta", style="none")))


def test_device_and_libraries_are_in_the_record(tmp_path):
    about = played(run_of("source"), tmp_path)["provenance"]
    assert (about["machine"]["device"], about["machine"]["gpu"]) == ("cpu", None)
    assert {"torch", "numpy", "opencv", "pillow"} <= set(about["versions"])


def test_long_traces_are_thinned_evenly_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tally, "TRACED", 3)
    record = played(run_of("bestta", images=4), tmp_path)
    assert record["traced_every"] == 3
    assert record["traces"]["step"] == [0, 3, 6]
    assert len(record["frames"]["score"]) == 8
    whole = played(run_of("bestta", images=4, similarities=True), tmp_path)
    assert (whole["traced_every"], len(whole["traces"]["step"])) == (1, 8)


# --- stopped while it looks at source images ------------------------------------------------


@pytest.mark.parametrize("looks", [1, 2, 3, 4, 5])
def test_a_run_stopped_while_it_looks_at_source_images_goes_on_as_one_that_was_not(looks, tmp_path):
    """Three looks of two images: before the stream, and after each of two rounds."""
    source = Source(split="val", images=2)
    run = run_of("tent", rounds=2, images=1, source=source, forgetting=True)
    whole = played(run, tmp_path / "whole")
    seen = []

    def note(text):
        if text.startswith("looking"):
            seen.append(text)

    with pytest.raises(Stopped):
        played(run, tmp_path / "parts", note=note, stopping=lambda: len(seen) == looks)
    assert len(seen) == looks
    assert lasting(played(run, tmp_path / "parts")) == lasting(whole)
    assert [entry["round"] for entry in whole["source_scores"]] == [0, 1, 2]


def test_a_resumed_run_says_where_it_goes_on(tmp_path):
    said = []
    with pytest.raises(Stopped):
        played(run_of("source"), tmp_path, stopping=lambda: True)
    played(run_of("source"), tmp_path, note=said.append)
    assert said[0] == "going on at frame 1 of 4"


def test_an_edited_plugin_leaves_other_methods_records_alone(tmp_path):
    path = tmp_path / "drawing.py"
    path.write_text(DRAWING)
    import_file(str(path))
    try:
        run = run_of("source", run={"plugins": (str(path),)})
        assert name_of(run) == name_of(run_of("source"))
    finally:
        registry._methods.pop("drawing")


def test_a_method_that_never_stepped_has_trained_nothing(tmp_path):
    still = played(run_of(read_method("bestta", lr=0.0)), tmp_path)
    assert still["parameters"]["trained"] == 0
    assert played(run_of("bestta"), tmp_path)["parameters"]["trained"] > 0
