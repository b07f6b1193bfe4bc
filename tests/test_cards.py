"""Trained models as others get them: folders, cards, and everything that can be wrong with one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from itertools import chain, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bestta
from bestta.data import Streets
from bestta.data.tensors import to_tensor
from bestta.data.weather import simulate
from bestta.files import save_tensors
from bestta.models import Card, WideResNet, cards
from bestta.models.cards import CARD, PROFILE, READABLE, SHIPPED, WEIGHTS, save_weights, sha256
from bestta.training import Training, publish, score
from bestta.training.curves import _ticks, curves
from bestta.training.publish import (
    _PROFILED,
    CURVES,
    add_shift,
    published,
    readable,
    renew_profile,
)
from bestta.training.recipes import Splits
from bestta.training.shift import Shift
from tiny import Colours, card, colours, scenes, streets

RECIPES = {"colours": colours, "streets": streets}


@pytest.fixture(scope="module")
def published_models(tmp_path_factory):
    """Finished trainings by recipe, published; the folders are not to be changed."""
    torch.set_num_threads(1)
    trainings = {}
    for name, recipe in RECIPES.items():
        training = Training(recipe(), tmp_path_factory.mktemp(name))
        training.run(show=False)
        publish(training, command=f"bestta train {name}", show=False)
        trainings[name] = training
    return trainings


@pytest.fixture(params=RECIPES)
def training(request, published_models):
    return published_models[request.param]


@pytest.fixture
def folder(published_models, tmp_path):
    """A published model of one's own, to be damaged."""
    return Path(shutil.copytree(published_models["colours"].folder, tmp_path / "model"))


def an_image(training):
    """A test image as the network wants it."""
    return to_tensor(training.splits.test[0].image, training.recipe.normalise)


# What is published is what was trained


def test_the_loaded_model_predicts_as_the_trained_one_within_the_rounding_of_fp16(training):
    loaded = bestta.models.load(training.folder)
    assert not any(module.training for module in loaded.modules())
    x = an_image(training)
    with torch.no_grad():
        seen = loaded(x)
        # fp16 keeps 11 bits, 0.05 % a weight; logits are sums over a handful of layers.
        scale = float(seen.abs().max())
        torch.testing.assert_close(training.model.eval()(x), seen, rtol=0, atol=0.01 * scale)
        # And no further than that: the trained weights rounded by NumPy give the same.
        rounded = training.recipe.build().eval()
        rounded.load_state_dict(
            {
                name: torch.from_numpy(value.numpy().astype("float16").astype("float32"))
                if value.ndim > 1
                else value
                for name, value in training.model.state_dict().items()
            }
        )
        torch.testing.assert_close(rounded(x), seen)


def test_the_file_holds_convolutions_in_fp16_and_everything_else_as_it_was(training):
    stored = safetensors.torch.load_file(training.folder / WEIGHTS)
    trained = training.model.state_dict()
    assert stored.keys() == trained.keys()
    matrices = {
        f"{name}.weight"
        for name, module in training.model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    }
    for name, tensor in stored.items():
        if name in matrices:
            assert tensor.dtype == torch.float16, name
        else:
            assert tensor.dtype == trained[name].dtype, name
            assert torch.equal(tensor, trained[name]), name
    others = {stored[name].dtype for name in stored.keys() - matrices}
    assert others == {torch.float32, torch.int64}  # the counters of batch norms


def test_the_profile_is_the_loaded_models_and_covers_the_layers_of_the_recipe(training):
    model = bestta.models.load(training.folder)
    profile = bestta.models.load_profile(training.folder)
    profile.check(model)
    assert tuple(profile.layers) == training.recipe.layers
    assert profile.images == len(training.splits.train)
    assert profile.task == training.recipe.task


def test_the_profile_is_of_training_images_as_they_are(training):
    """Against means taken with a hook, image by image."""
    model = bestta.models.load(training.folder)
    layer = training.recipe.default_layers[0]
    means = []
    model.get_submodule(layer).register_forward_hook(
        lambda _, __, out: means.append(out[0].double().mean((1, 2)))
    )
    with torch.no_grad():
        for sample in training.splits.train:
            model(to_tensor(sample.image, training.recipe.normalise))
    seen = bestta.models.load_profile(training.folder).layers[layer].mu
    torch.testing.assert_close(seen, torch.stack(means).mean(0), rtol=1e-5, atol=1e-6)


def test_the_model_adapts_at_its_default_layers(training):
    model = bestta.models.load(training.folder)
    adapter = bestta.adapt(model, bestta.models.load_profile(training.folder))
    logits = adapter(an_image(training))
    assert adapter.config.layers == training.recipe.default_layers
    assert adapter.last.adapted
    assert bool(logits.isfinite().all())
    other = bestta.adapt(
        model, bestta.models.load_profile(training.folder), layers=training.recipe.layers[:1]
    )
    assert other.config.layers == training.recipe.layers[:1]


def test_the_card_tells_of_the_training(training):
    known, recipe = bestta.models.card(training.folder), training.recipe
    for name in ("name", "about", "task", "classes", "size", "layers", "data", "terms", "notes"):
        assert getattr(known, name) == getattr(recipe, name), name
    assert known.normalise == tuple(map(tuple, recipe.normalise))
    assert known.recipe == recipe.settings()
    assert known.command == f"bestta train {recipe.name}"
    assert known.metric == {"segmentation": "mIoU", "classification": "error"}[recipe.task]
    assert known.parameters == sum(p.numel() for p in training.model.parameters())
    assert known.history["losses"] == [list(entry) for entry in training.history.losses]
    assert known.history["scores"] == [list(entry) for entry in training.history.scores]
    (sitting,) = known.history["sittings"]
    assert sitting["versions"]["torch"] == torch.__version__
    assert (sitting["device"], sitting["from_step"]) == ("cpu", 0)
    assert known.sha256 == {file: sha256(training.folder / file) for file in (WEIGHTS, PROFILE)}
    assert ("per_class" in known.scores) == (recipe.task == "segmentation")


def test_the_clean_score_is_that_of_the_stored_weights_on_the_test_images(published_models):
    """Counted one image at a time."""
    training = published_models["colours"]
    model = bestta.models.load(training.folder)
    with torch.no_grad():
        wrong = [
            int(model(to_tensor(sample.image, training.recipe.normalise)).argmax()) != sample.label
            for sample in Colours(9, seed=2)
        ]
    known = bestta.models.card(training.folder)
    assert known.scores["clean"] == pytest.approx(100 * sum(wrong) / 9)


def test_an_unfinished_training_is_not_published(tmp_path):
    training = Training(colours(), tmp_path)
    training.run(show=False, seconds=0)
    # One of eight steps, four an epoch.
    with pytest.raises(ValueError, match=r"come 0\.2 of 2 epochs: finish it first"):
        publish(training, command="bestta train colours", show=False)
    assert not (tmp_path / CARD).exists()
    assert not (tmp_path / WEIGHTS).exists()


def test_a_folder_counts_as_published_only_once_all_of_it_is_there(folder, tmp_path):
    assert published(folder)
    card = json.loads((folder / CARD).read_text())
    del card["sha256"][PROFILE]  # as it is while the test images are being scored
    (folder / CARD).write_text(json.dumps(card))
    assert not published(folder)
    (folder / CARD).write_text("{")
    assert not published(folder)
    assert not published(tmp_path)


def test_weights_that_score_otherwise_once_stored_are_refused(
    published_models, folder, monkeypatch
):
    training = published_models["colours"]
    monkeypatch.setattr(training, "folder", folder)
    scores = iter([50.0, 50.2])  # as trained, as stored: further apart than a tenth of a point

    class Judged:
        def __init__(self):
            self.value = next(scores)

        def score(self):
            return self.value

    monkeypatch.setitem(publish.__globals__, "score", lambda *_, **__: Judged())
    with pytest.raises(ValueError, match=r"as stored score 50\.20, as trained 50\.00"):
        publish(training, command="bestta train colours", show=False)
    assert not published(folder)


# Cards


FULL = {
    "scores": {
        "clean": 12.34,
        "images": 2000,
        "precision": "bf16",
        "clean_in_bf16": 12.41,
        "weather": {"fog": [1.0, 2.0, 3.0, 4.0, 5.0], "night": [3.0, 4.0, 5.0, 6.0, 7.6]},
        "corruptions": {"snow": [21.1, 22.2, 23.3, 24.4, None]},
        "per_class": {"red": 61.5, "green": 62.6, "blue": None},
    },
    "history": {
        "seconds": 600.0,
        "origin": "lite0.pth",
        "losses": [[1, 2.0], [8, 1.0]],
        "scores": [[4, 50.0], [8, 75.0]],
        "sittings": [
            {
                "commit": commit,
                "device": "cpu",
                "machine": {"threads": 1},
                "versions": {"torch": "2.6"},
            }
            for commit in ("abc1234", "def5678")
        ],
    },
    "notes": ("Mind the gap.",),
    "sha256": {WEIGHTS: "a" * 64, PROFILE: "b" * 64},
}


def test_a_card_comes_back_as_it_was_written(tmp_path):
    full = card(**FULL)
    full.write(tmp_path, "to read")
    assert Card.read(tmp_path) == full
    assert (tmp_path / READABLE).read_text() == "to read"


def test_fields_that_a_later_version_may_add_to_a_card_are_passed_over(tmp_path):
    card().write(tmp_path, "")
    values = json.loads((tmp_path / CARD).read_text())
    (tmp_path / CARD).write_text(json.dumps(values | {"colour": "red"}))
    assert Card.read(tmp_path) == card()


def test_the_readable_card_holds_terms_command_checksums_and_every_score():
    text = readable(card(**FULL))
    assert f"**{colours().terms}**" in text
    assert colours().data in text
    assert "`bestta train colours`" in text
    assert f"| SHA-256 of {WEIGHTS} | `{'a' * 64}` |" in text
    assert f"| SHA-256 of {PROFILE} | `{'b' * 64}` |" in text
    assert "**12.34** (2,000 images)." in text
    assert "below in bf16, in which the clean images score 12.41." in text
    assert "error in percent, lower is better" in text
    assert "| fog | 1.0 | 2.0 | 3.0 | 4.0 | 5.0 |" in text
    assert "| night | 3.0 | 4.0 | 5.0 | 6.0 | 7.6 |" in text
    assert "| mean | 2.0 | 3.0 | 4.0 | 5.0 | 6.3 |" in text
    assert "| snow | 21.1 | 22.2 | 23.3 | 24.4 | – |" in text
    assert "red 61.5, green 62.6, blue –." in text
    assert "Mind the gap." in text
    assert (
        "10 min on cpu with 1 thread(s) in 2 sitting(s); commit abc1234, def5678, torch 2.6; "
        "encoder from lite0.pth" in text
    )
    assert f"({CURVES})" in text
    assert "dirty" not in text
    dirty = {"sittings": [{"commit": "abc1234-dirty"}, {"commit": None}]}
    told = "commit abc1234-dirty, None (dirty: with changes that were not committed)"
    assert told in readable(card(**FULL | {"history": dirty}))
    assert "higher is better" in readable(card(**FULL | {"task": "segmentation"}))


def test_the_published_card_to_read_is_that_of_the_card(training):
    known = bestta.models.card(training.folder)
    assert (training.folder / READABLE).read_text() == readable(known)
    assert f"**{known.scores['clean']:.2f}**" in readable(known)


def test_scores_in_weather_are_added_to_card_and_reading(folder):
    before = bestta.models.card(folder)
    shift = Shift("error", 9, "bf16", 11.5, {"snow": [1.0, 2.0, 3.0, 4.0, 55.5]}, {})
    add_shift(folder, shift)
    after = bestta.models.card(folder)
    assert after.scores["clean"] == before.scores["clean"]  # which is in fp32
    assert after.scores["clean_in_bf16"] == 11.5
    assert after.scores["images"] == 9
    assert after.scores["corruptions"] == {"snow": [1.0, 2.0, 3.0, 4.0, 55.5]}
    assert replace(after, scores={}) == replace(before, scores={})
    assert "| snow | 1.0 | 2.0 | 3.0 | 4.0 | 55.5 |" in (folder / READABLE).read_text()
    bestta.models.load(folder)


def test_no_path_of_this_machine_is_on_a_card(training):
    for file in (CARD, READABLE, CURVES):
        text = (training.folder / file).read_text().replace("http://www.w3.org/2000/svg", "")
        assert str(training.folder.parent) not in text
        assert str(Path(bestta.__file__).parent) not in text
        # A path that begins at the root: after a space or a quotation mark, not after a letter.
        assert re.findall(r"""(?:^|[\s"'`=(])(/\w+)""", text) == []


# The picture of a training


def polylines(svg):
    """Size of the picture and the points of its curves."""
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    width, height = map(float, root.get("viewBox").split()[2:])
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter(f"{space}polyline")
    ]
    return (width, height), lines


def test_the_curves_are_two_lines_inside_their_picture(training):
    (width, height), lines = polylines((training.folder / CURVES).read_text())
    assert [len(points) for points in lines] == [
        len(training.history.losses),
        len(training.history.scores),
    ]
    for x, y in chain(*lines):
        assert 0 < x < width
        assert 0 < y < height


def test_curves_go_down_with_the_loss_up_with_the_score_and_to_the_right():
    _, (loss, scores) = polylines(curves(card(**FULL)))
    # A picture's y grows downwards: 2.0 lies above 1.0, and 50 below 75.
    assert loss[0][1] < loss[1][1]
    assert scores[0][1] > scores[1][1]
    # Steps 1, 4 and 8 of 8: the last of both at the right end, step 4 in the middle.
    left = loss[1][0] - 8 / 7 * (loss[1][0] - loss[0][0])
    assert scores[1][0] == loss[1][0]
    assert scores[0][0] == pytest.approx((left + loss[1][0]) / 2, abs=0.2)


def test_names_that_mean_something_in_xml_are_escaped():
    ElementTree.fromstring(curves(card(**FULL | {"name": "a<b & c"})))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_ticks_enclose_the_values_in_few_even_steps(values):
    ticks = _ticks(values)
    span = max(values) - min(values)
    slack = 1e-6 * max(1.0, span)
    assert ticks[0] <= min(values) + slack
    assert ticks[-1] >= max(values) - slack
    if span > 1e-3:
        assert 4 <= len(ticks) <= 8
        steps = [b - a for a, b in pairwise(ticks)]
        assert max(steps) == pytest.approx(min(steps))


# Folders that are not whole


def test_weights_that_were_cut_short_are_named_with_what_was_seen(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])
    seen, expected = sha256(folder / WEIGHTS), bestta.models.card(folder).sha256[WEIGHTS]
    with pytest.raises(ValueError, match="is damaged, cut short or of another kind") as caught:
        bestta.models.load(folder)
    message = str(caught.value)
    assert str(folder / WEIGHTS) in message
    assert f"{len(whole) - 100:,} bytes" in message
    assert seen[:12] in message
    assert expected[:12] in message
    assert "bestta train colours" in message


def test_one_changed_bit_is_enough(folder):
    whole = bytearray((folder / WEIGHTS).read_bytes())
    whole[-1] ^= 1
    (folder / WEIGHTS).write_bytes(whole)
    with pytest.raises(ValueError, match="another file than its card tells of"):
        bestta.models.load(folder)


def test_weights_and_profiles_of_another_model_are_named_as_such(folder, published_models):
    for file, load in ((WEIGHTS, bestta.models.load), (PROFILE, bestta.models.load_profile)):
        shutil.copy(published_models["streets"].folder / file, folder / file)
        with pytest.raises(ValueError, match=f"{file} is another file than its card tells of"):
            load(folder)


def test_a_profile_that_was_cut_short_is_named(folder):
    (folder / PROFILE).write_bytes((folder / PROFILE).read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{PROFILE} is damaged, cut short"):
        bestta.models.load_profile(folder)


@pytest.mark.parametrize(
    ("file", "load", "named"),
    [
        (WEIGHTS, bestta.models.load, "weights.safetensors is missing: the model 'colours'"),
        (PROFILE, bestta.models.load_profile, "profile.safetensors is missing"),
        (CARD, bestta.models.load, "no trained model in .*model: it has no card.json"),
    ],
)
def test_a_missing_file_is_named(folder, file, load, named):
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=named):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", "null", '{"name": "colours"}'])
def test_a_damaged_card_is_named(folder, text):
    (folder / CARD).write_text(text)
    with pytest.raises(ValueError, match=r"card\.json is no card of a trained model \(.+\)"):
        bestta.models.load(folder)


def test_a_card_that_is_no_text_is_named(folder):
    (folder / CARD).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"card\.json is no card of a trained model"):
        bestta.models.card(folder)


def changed(folder, **values):
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps(card | values))


def test_an_unknown_network_is_named_with_the_known_ones(folder):
    changed(folder, network="VisionTransformer")
    with pytest.raises(
        ValueError, match=r"'colours' names the network 'VisionTransformer'.*DeepLabV3Plus, WideRes"
    ):
        bestta.models.load(folder)


def test_weights_that_do_not_fit_the_network_of_the_card_are_named(folder):
    changed(folder, arguments={"depth": 10, "width": 2, "classes": 3})
    with pytest.raises(ValueError, match=r"weights\.safetensors does not fit WideResNet"):
        bestta.models.load(folder)


def test_a_file_of_another_kind_with_the_right_checksum_is_still_refused(folder):
    save_tensors(folder / WEIGHTS, {"a": torch.zeros(1)}, {"kind": "adapter state"})
    changed(folder, sha256={WEIGHTS: sha256(folder / WEIGHTS)})
    with pytest.raises(ValueError, match="no source model: it holds 'adapter state'"):
        bestta.models.load(folder)


def test_an_unknown_name_is_answered_with_the_nearest_and_with_all(folder, monkeypatch):
    monkeypatch.setattr(cards, "SHIPPED", folder.parent)
    shutil.copytree(folder, folder.parent / "other")
    assert bestta.models.names() == ["model", "other"]
    with pytest.raises(ValueError, match=r"called 'modle'\. Did you mean 'model'\? .*model, other"):
        bestta.models.load("modle")
    with pytest.raises(ValueError, match=r"called 'xyz'\. There are: model, other; or name the"):
        bestta.models.load_profile("xyz")
    assert bestta.models.card("other").name == "colours"


def test_a_name_wins_over_a_folder_of_the_same_name(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "SHIPPED", folder.parent)
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert bestta.models.card("model").name == "colours"


def test_values_that_fp16_cannot_hold_are_refused_by_name(tmp_path):
    model = WideResNet(10, 1, classes=3)
    with torch.no_grad():
        model.block1.layer[0].conv1.weight[0, 0, 0, 0] = 70_000  # fp16 ends at 65,504
    with pytest.raises(ValueError, match=r"block1\.layer\.0\.conv1\.weight has values that fp16"):
        save_weights(model, tmp_path / WEIGHTS)
    assert not (tmp_path / WEIGHTS).exists()
    with torch.no_grad():
        model.block1.layer[0].conv1.weight[0, 0, 0, 0] = 0
        model.bn1.running_var[0] = 1e-9  # nothing to fp16, which ends at 6e-8 below
        model.bn1.running_var[1] = 1e9
    save_weights(model, tmp_path / WEIGHTS)
    stored = safetensors.torch.load_file(tmp_path / WEIGHTS)
    assert torch.equal(stored["bn1.running_var"], model.bn1.running_var)


# Models that come with the library


SHIPPED_NAMES = {"cifar10", "cityscapes", "streets"}


def test_the_shipped_models_are_these():
    assert set(bestta.models.names()) == SHIPPED_NAMES


@pytest.fixture(params=sorted(SHIPPED_NAMES))
def name(request):
    """Each model that ships."""
    return request.param


def test_a_shipped_model_loads_and_predicts(name):
    known, model = bestta.models.card(name), bestta.models.load(name)
    assert known.name == name
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) == known.parameters
    width, height = known.size
    with torch.no_grad():
        logits = model(torch.zeros(1, 3, height, width))
    assert logits.shape[:2] == (1, len(known.classes))
    assert logits.ndim == {"segmentation": 4, "classification": 2}[known.task]
    assert bool(logits.isfinite().all())


def test_a_shipped_model_is_small_and_its_files_are_those_of_its_card(name):
    folder, known = SHIPPED / name, bestta.models.card(name)
    assert (folder / WEIGHTS).stat().st_size < (5e6 if name == "streets" else 20e6)
    assert known.sha256 == {file: sha256(folder / file) for file in (WEIGHTS, PROFILE)}
    assert (folder / READABLE).read_text(encoding="utf-8") == readable(known)
    files = {path.name for path in folder.iterdir()}
    assert {WEIGHTS, PROFILE, CARD, READABLE} <= files <= {WEIGHTS, PROFILE, CARD, READABLE, CURVES}


def test_a_shipped_profile_belongs_to_its_model(name):
    model, profile = bestta.models.load(name), bestta.models.load_profile(name)
    profile.check(model)
    known = bestta.models.card(name)
    assert tuple(profile.layers) == known.layers
    assert profile.task == known.task
    adapter = bestta.adapt(model, profile)
    assert set(adapter.config.layers) <= set(known.layers)
    paper = bestta.adapt(model, profile, preset="paper")
    assert len(paper.config.layers) == 1, "the paper puts BeIN behind one layer"


def test_a_shipped_card_is_filled_in(name):
    known = bestta.models.card(name)
    empty = [entry.name for entry in fields(known) if not getattr(known, entry.name)]
    assert set(empty) <= {"notes"}
    assert {"clean", "images", "corruptions"} <= known.scores.keys()
    assert all(sitting["commit"] for sitting in known.history["sittings"])
    if known.task == "segmentation":
        assert known.scores["weather"]
    for table in ("corruptions", "weather"):
        for scores in known.scores.get(table, {}).values():
            assert len(scores) == 5
            assert None not in scores
    if name == "cityscapes":
        assert "non-commercial" in known.terms.lower()
    assert re.findall(r"""(?:^|[\s"'`=(])(/\w+)""", known.command) == []


# How it is reached


def test_models_are_reached_from_a_bare_import_and_a_wrong_name_is_an_attribute_error():
    """In a process of its own: here other tests have imported everything."""
    code = (
        "import sys, bestta\n"
        "assert 'bestta.models' not in sys.modules\n"
        "assert callable(bestta.models.load)\n"
        "try:\n"
        "    bestta.nonsense\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "module 'bestta' has no attribute 'nonsense'", done.stderr


def test_the_parts_of_the_package_are_attributes_of_it():
    for part in ("data", "metrics", "models", "protocols", "training"):
        assert getattr(bestta, part).__name__ == f"bestta.{part}"
    with pytest.raises(AttributeError, match="no attribute 'modles'"):
        _ = bestta.modles


def test_a_scene_of_the_streets_is_scored_as_it_was_when_published(published_models):
    """The test images of the card are rendered anew: 64x32, split val, seed 0."""
    training = published_models["streets"]
    model, known = bestta.models.load(training.folder), bestta.models.card(training.folder)
    counts = torch.zeros(19, 19, dtype=torch.int64)
    with torch.no_grad():
        for sample in scenes(2, "val"):
            seen = model(to_tensor(sample.image, known.normalise))[0].argmax(0)
            for truth, guess in zip(sample.label.ravel(), seen.ravel().tolist(), strict=True):
                if truth != 255:
                    counts[int(truth), guess] += 1
    unions = counts.sum(0) + counts.sum(1) - counts.diagonal()
    ious = [100 * float(h) / float(u) for h, u in zip(counts.diagonal(), unions, strict=True) if u]
    assert known.scores["clean"] == pytest.approx(sum(ious) / len(ious), abs=0.05)


@pytest.mark.parametrize(
    "values",
    [
        {"normalise": None},
        {"size": [1]},
        {"classes": None},
        {"sha256": None},
        {"arguments": {"depht": 3}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_card_with_a_damaged_field_is_named(folder, values):
    whole = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps(whole | values))
    with pytest.raises(ValueError, match=r"card\.json"):
        bestta.models.load(folder)


def test_a_path_means_a_folder_and_a_name_a_model_that_ships(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "SHIPPED", folder.parent)
    other = shutil.copytree(folder, tmp_path / "here" / "model")
    values = json.loads((other / CARD).read_text())
    (other / CARD).write_text(json.dumps(values | {"about": "another"}))
    monkeypatch.chdir(other.parent)
    assert bestta.models.card("model").about == colours().about
    assert bestta.models.card(Path("model")).about == "another"
    assert bestta.models.card("./model").about == "another"
    with pytest.raises(FileNotFoundError, match=r"no folder elsewhere.*by a string: model"):
        bestta.models.card(Path("elsewhere"))


def test_publishing_leaves_out_a_broken_training_image(tmp_path):
    training = Training(colours(Colours(8, broken={3})), tmp_path)
    with pytest.warns(UserWarning, match="skipped"):
        training.run(show=False)
    with pytest.warns(UserWarning, match="skipped"):
        publish(training, command="", show=False)
    assert bestta.models.load_profile(tmp_path).images == 7


def test_the_profile_is_of_images_from_all_of_the_training_set(tmp_path, monkeypatch):
    train, seen = Colours(16), []
    training = Training(colours(train), tmp_path)
    training.run(show=False)
    read = Colours.read

    def watched(self, index):
        seen.extend([index] if self is train else [])
        return read(self, index)

    monkeypatch.setattr(Colours, "read", watched)
    monkeypatch.setitem(_PROFILED, "classification", 6)
    publish(training, command="", show=False)
    # The numbers below 6, stretched by 16 / 6 and rounded down.
    assert seen == [0, 2, 5, 8, 10, 13]


def test_weights_with_terms_of_their_own_are_in_the_licence_of_the_package():
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    others = {name for name in SHIPPED_NAMES if "Apache-2.0" not in bestta.models.card(name).terms}
    licences = set(project["license"].split(" AND "))
    assert licences == {"Apache-2.0"} | {f"LicenseRef-{name.title()}-weights" for name in others}
    for name in others:
        assert f"LICENSE-{name}-weights" in project["license-files"]
        assert f'"{name}"' in (root / f"LICENSE-{name}-weights").read_text()


@pytest.mark.parametrize("name", sorted(SHIPPED_NAMES))
def test_the_readme_tells_what_the_card_tells(name):
    rows = (Path(__file__).parent.parent / "README.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith(f"| [{name}]")]
    known = bestta.models.card(name)
    assert f"{known.scores['clean']:.1f} {known.metric}" in row
    assert ("non-commercial" in row.lower()) == ("non-commercial" in known.terms.lower())
    for table, severity in (("weather", 3), ("corruptions", 5)):
        if values := known.scores.get(table):
            mean = sum(v[severity - 1] for v in values.values()) / len(values)
            assert f"{mean:.1f} ({table}, {severity})" in row


def test_the_shipped_streets_model_knows_its_streets_and_loses_a_third_in_the_worst_weather():
    # Scenes that are in no split of the recipe; above 75 is what it was made for.
    model, card = bestta.models.load("streets"), bestta.models.card("streets")
    scenes = list(Streets(16, seed=2, split="val"))
    clear = score(model, scenes, card).score()
    assert clear > 75
    foggy = [
        replace(scene, image=simulate(scene.image, "fog", 5, seed=number))
        for number, scene in enumerate(scenes)
    ]
    assert score(model, foggy, card).score() < clear * 2 / 3


def test_loading_a_model_draws_nothing_from_pytorchs_generator(folder):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    bestta.models.load(folder)
    assert torch.rand(3).equal(expected)


def test_the_card_tells_what_the_test_images_lack(tmp_path):
    class Some(Colours):
        def missing(self):
            return ("267 of the 500 images of split 'val'", "the images of ulm", "split 'test'")

    splits = Splits(Colours(16), Colours(6), Some(3))
    training = Training(colours(splits=lambda root: splits), tmp_path)
    training.run(show=False)
    publish(training, command="", show=False)
    note = "The test images lack 267 of the 500 images of split 'val' and the images of ulm."
    assert bestta.models.card(tmp_path).notes[-1] == note
    assert note in (tmp_path / READABLE).read_text()


def test_a_class_of_one_pixel_is_noted_with_the_mean_without_it(tmp_path):
    scene, train = scenes(2, "val", 0)[0], Streets.classes.index("train")

    class Accident(Colours):
        """64 streets of 2,048 pixels: one of 131,072 pixels is labelled as a train."""

        def read(self, index):
            label = scene.label.copy()
            label[0, 0] = label[0, 0] if index else train
            return replace(scene, name=self.name(index), label=label)

    splits = Splits(scenes(8, "train"), scenes(2, "val", 1), Accident(64))
    training = Training(streets(epochs=1, splits=lambda root: splits), tmp_path)
    training.run(show=False)
    publish(training, command="", show=False)
    known = bestta.models.card(tmp_path)
    others = [iou for name, iou in known.scores["per_class"].items() if name != "train"]
    others = [iou for iou in others if iou is not None]
    assert known.notes[-1].startswith(
        "The test images have next to none of class 'train' (pixels: 1)"
    )
    assert known.notes[-1].endswith(f"Without: {sum(others) / len(others):.2f}.")


def test_a_profile_of_an_older_version_is_renewed_and_the_card_knows_its_checksum(
    training, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(training.folder, folder)
    expected = bestta.SourceProfile.load(folder / PROFILE)
    replace(expected, answers=None).save(folder / PROFILE)
    assert not published(folder)
    renew_profile(folder, training.recipe, training.splits.train, show=False)
    renewed = bestta.SourceProfile.load(folder / PROFILE)
    assert published(folder)
    assert torch.equal(renewed.answers.histogram, expected.answers.histogram)
    assert all(torch.equal(renewed.layers[n].mu, p.mu) for n, p in expected.layers.items())
    assert renewed.settings == expected.settings


def test_what_ships_knows_how_it_answers_at_home():
    for name in bestta.models.names():
        answers = bestta.models.load_profile(name).answers
        assert answers is not None
        assert float(answers.histogram.sum()) == pytest.approx(1, abs=1e-5)
        assert 0 < float(answers.entropy) < 1
