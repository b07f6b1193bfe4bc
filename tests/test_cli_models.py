"""``bestta train`` and ``bestta models``: what they print, write and end with."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bestta
from bestta import provenance
from bestta.cli import models as cli_models
from bestta.cli import train as cli_train
from bestta.models import cards
from bestta.models.cards import CARD, PROFILE, READABLE, WEIGHTS
from bestta.training import Shift, Training, publish, shift
from bestta.training.loop import CHECKPOINT
from bestta.training.publish import CURVES, add_shift
from tiny import Colours, colours


def files():
    """A recipe that needs a folder of data and a file of weights."""
    return colours(name="files", needs_data=True, init=lambda model, path: path.name)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch, tmp_path):
    """The recipes of a second, two corruptions, and a folder of one's own to work in."""
    table = {"colours": colours(), "files": files()}
    monkeypatch.setattr(cli_train, "recipes", lambda: table)
    monkeypatch.setattr(cli_models, "recipes", lambda: table)
    monkeypatch.setattr(shift, "CORRUPTIONS", ("gaussian_noise", "contrast"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A finished, published training; not to be changed."""
    torch.set_num_threads(1)
    training = Training(colours(), tmp_path_factory.mktemp("colours"))
    training.run(show=False)
    publish(training, command="bestta train colours", show=False)
    return training.folder


@pytest.fixture
def folder(model_folder, tmp_path):
    """A published model of one's own, named as a user would: from where they are."""
    shutil.copytree(model_folder, tmp_path / "mine")
    return tmp_path / "mine"


TRAIN = ("train", "colours", "--threads", "1")


# bestta train


def test_train_trains_publishes_and_says_what_comes_next(run, tmp_path):
    done = run(*TRAIN)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "colours"
    files = {path.name for path in folder.iterdir()}
    assert files == {CHECKPOINT, WEIGHTS, PROFILE, CARD, READABLE, CURVES}
    card = bestta.models.card(folder)
    assert card.command == "bestta train colours --threads 1"
    lines = done.stdout.splitlines()
    assert lines[0] == colours().about
    # 16 images in batches of 4, twice.
    assert lines[1] == (
        "16 training images, 6 held out; 8 steps of 4 images, 2 epochs, bf16, threads: 1."
    )
    assert lines[2] == "Checkpoint: runs/colours/checkpoint.safetensors"
    assert lines[3] == f"error on the test images: {card.scores['clean']:.2f} %"
    assert lines[-1] == "Next: bestta models score runs/colours"
    bestta.models.load_profile(folder).check(bestta.models.load(folder))


def test_train_stops_when_its_time_is_up_and_the_same_command_goes_on(run, tmp_path, model_folder):
    words = (*TRAIN, "--out", "mine", "--minutes", "0")
    for step in range(1, 8):
        done = run(*words)
        assert done.returncode == 0
        assert f"Time is up after step {step} of 8. The same command goes on" in done.stdout
        assert ("Going on after step" in done.stdout) == (step > 1)
        assert not (tmp_path / "mine" / CARD).exists()
    done = run(*words)
    assert "Going on after step 7." in done.stdout
    assert "Next: bestta models score mine" in done.stdout
    # All these pieces are the run in one go.
    weights = (tmp_path / "mine" / WEIGHTS).read_bytes()
    assert weights == (model_folder / WEIGHTS).read_bytes()


def test_a_finished_folder_says_so_and_is_left_alone(run, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = run(*TRAIN, "--out", "mine")
    assert done.returncode == 0
    assert done.stdout.startswith(f"{colours().about}\nmine is finished.")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_training_that_ended_before_it_was_published_is_published(run, folder):
    for file in (WEIGHTS, PROFILE, CARD, READABLE, CURVES):
        (folder / file).unlink()
    done = run(*TRAIN, "--out", "mine")
    assert done.returncode == 0
    assert "Next: bestta models score mine" in done.stdout
    bestta.models.load(folder)


def test_damaged_weights_are_published_again_by_the_command_that_the_error_names(run, folder):
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:1000])
    assert "train the model again" in run("models", "show", "mine").stderr
    done = run(*TRAIN, "--out", "mine")
    assert "Next: bestta models score mine" in done.stdout
    assert (folder / WEIGHTS).read_bytes() == weights
    assert run("models", "show", "mine").returncode == 0


@pytest.mark.parametrize("known", [{"avx512_bf16": False, "amx_bf16": False}, {"amx_bf16": True}])
def test_a_cpu_without_bf16_is_told(run, monkeypatch, known):
    monkeypatch.setattr(provenance, "cpu", lambda: {"architecture": "x86_64", **known})
    said = "This CPU has no bf16: --precision fp32 is faster"
    slow = not any(known.values())
    assert (said in run(*TRAIN, "--minutes", 0).stderr) == slow
    fp32 = run(*TRAIN, "--minutes", 0, "--precision", "fp32", "--out", "single")
    assert said not in fp32.stderr


@pytest.mark.parametrize(
    "words", [("--minutes", "10"), ("--minutes=10", "--checkpoint-minutes", "0.5")]
)
def test_the_command_on_the_card_is_not_that_of_one_sitting(run, words):
    done = run(*TRAIN[:2], *words, *TRAIN[2:], "--out", "mine")
    assert done.returncode == 0, done.stderr
    assert bestta.models.card("mine").command == "bestta train colours --threads 1 --out mine"


@pytest.mark.parametrize("step", [2, 7])
def test_ctrl_c_stops_after_the_step_before_publishing_and_ends_with_130(
    run, tmp_path, monkeypatch, step
):
    learn = Training._learn

    def interrupted(self, images, labels):
        if self.step == step:
            signal.raise_signal(signal.SIGINT)
        return learn(self, images, labels)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_learn", interrupted)
        done = run(*TRAIN, "--out", "mine")
    assert done.returncode == 130
    assert f"Stopped after step {step + 1} of 8. The same command goes on" in done.stdout
    assert not (tmp_path / "mine" / CARD).exists()
    assert "Next: bestta models score mine" in run(*TRAIN, "--out", "mine").stdout


def test_options_take_the_place_of_the_recipes_settings(run, tmp_path):
    done = run(
        *TRAIN, "--out", "mine", "--epochs", 1, "--batch", 8, "--lr", 0.01, "--seed", 5,
        "--precision", "fp32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    recipe = bestta.models.card(tmp_path / "mine").recipe
    assert (
        recipe
        == replace(colours(), epochs=1, batch=8, lr=0.01, seed=5, precision="fp32").settings()
    )


def test_minutes_are_of_sixty_seconds_and_threads_are_those_of_pytorch(run, monkeypatch):
    told = {}
    monkeypatch.setattr(Training, "run", lambda self, **how: told.update(how))
    words = ("--minutes", 2, "--checkpoint-minutes", 0.5, "--threads", 2)
    done = run("train", "colours", *words)
    assert told == {"seconds": 120, "checkpoint_every": 30}
    assert "bf16, threads: 2." in done.stdout
    assert torch.get_num_threads() == 2
    run("train", "colours", "--threads", 1)
    assert told == {"seconds": None, "checkpoint_every": 180}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "colour"], "no recipe is called 'colour'. There are: colours, files."),
        (["train", "files"], "files is trained on files: name their folder with --data."),
        (["train", "colours", "--precision", "fp16"], "--precision"),
        (["train", "colours", "--data", "."], "colours makes its own images and takes no --data"),
        (["train", "colours", "--init", "."], "starts from random weights and takes no --init"),
        (["train", "colours", "--device", "nowhere"], "cannot compute on 'nowhere'"),
        (["train", "colours", "--lr", "0"], "lr must be a number above 0"),
        (["train", "colours", "--epochs", "0"], "--epochs"),
        (["train", "colours", "--batch", "17"], "16 training images do not fill one batch of 17"),
        (["train"], "Missing argument"),
        (["models", "show", "nowhere"], "no model is called 'nowhere'"),
        (["models", "score", "nowhere"], "no model is called 'nowhere'"),
        (["models", "show", "."], "it has no card.json"),
        (["models", "show"], "Missing argument"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(run, words, expected):
    done = run(*words)
    assert done.returncode != 0
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_of_other_settings_is_refused_by_name(run, folder):
    done = run(*TRAIN, "--out", "mine", "--lr", 0.01)
    assert done.returncode == 1
    assert "lr was 0.05 and is 0.01" in done.stderr


def test_a_training_that_diverges_says_so_without_a_traceback(run, folder, monkeypatch):
    def diverged(self, images, labels):
        raise FloatingPointError("the loss of step 0 is nan: training has diverged.")

    monkeypatch.setattr(Training, "_learn", diverged)
    monkeypatch.setattr(provenance, "cpu", dict)  # or a CPU without bf16 is told of, too
    done = run(*TRAIN, "--out", "other")
    assert done.returncode == 1
    assert done.stderr == "error: the loss of step 0 is nan: training has diverged.\n"


@pytest.mark.parametrize("way", ["two words", "one word"])
def test_the_command_on_the_card_names_no_path_of_this_machine(run, tmp_path, way):
    data, init = tmp_path / "data", tmp_path / "init.pth"
    if way == "two words":
        words, expected = ["--data", data, "--init", init], "--data PATH --init PATH"
    else:
        words, expected = [f"--data={data}", f"--init={init}"], "--data=PATH --init=PATH"
    done = run("train", "files", *words, "--out", "mine", "--threads", 1)
    assert done.returncode == 0, done.stderr
    command = bestta.models.card("mine").command
    assert command == f"bestta train files {expected} --out mine --threads 1"
    for file in (CARD, READABLE):
        assert str(tmp_path) not in (tmp_path / "mine" / file).read_text()
    # What is printed is for this machine, and can be typed as it is.
    assert f"Next: bestta models score mine --data {data}" in done.stdout


@pytest.mark.parametrize("way", ["--out {}", "--out={}"])
def test_an_absolute_folder_of_the_result_is_not_on_the_card(run, tmp_path, way):
    done = run(*TRAIN, *way.format(tmp_path / "a").split())
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in (tmp_path / "a" / CARD).read_text()


# bestta models


@pytest.fixture
def shipped(folder, monkeypatch, tmp_path):
    """Two models that ship: one measured, one not."""
    place = tmp_path / "files"
    for name in ("first", "second"):
        shutil.copytree(folder, place / name)
    scores = {"gaussian_noise": [1.0, 2.0, 3.0, 4.0, 40.0], "contrast": [9.0, 80.0, 7.0, 6.0, 50.0]}
    add_shift(place / "second", Shift("error", 9, "bf16", 12.0, scores, {}))
    monkeypatch.setattr(cards, "SHIPPED", place)
    monkeypatch.setattr(cli_models, "SHIPPED", place)
    return place


@pytest.mark.usefixtures("shipped")
def test_models_lists_what_ships_in_columns(run, folder):
    done = run("models")
    assert done.returncode == 0, done.stderr
    head, first, second, blank, end = done.stdout.splitlines()
    titles = ["name", "clean", "worst", "size", "terms", "what"]
    assert head.split() == titles
    assert blank == ""
    assert end.startswith("Next: bestta models show NAME")
    starts = [head.index(title) for title in titles]

    def cells(row):
        return [row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]

    clean = bestta.models.card(folder).scores["clean"]
    size = f"{(folder / WEIGHTS).stat().st_size / 1e6:.1f} MB"
    about = colours().about
    clean = f"{clean:.1f} error"
    assert cells(first) == ["first", clean, "not measured", size, "Apache-2.0", about]
    # The worst at severity 5: of errors the largest, though 80 stands at severity 2.
    assert cells(second) == ["second", clean, "50.0 (contrast)", size, "Apache-2.0", about]


def test_of_mean_ious_the_worst_is_the_smallest(run, shipped):
    card = json.loads((shipped / "second" / CARD).read_text())
    card |= {"metric": "mIoU", "task": "segmentation"}
    (shipped / "second" / CARD).write_text(json.dumps(card))
    assert "40.0 (gaussian_noise)" in run("models").stdout


def test_without_any_model_the_list_has_titles_alone(run, monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "SHIPPED", tmp_path / "none")
    done = run("models")
    assert done.returncode == 0
    assert done.stdout.split()[:6] == ["name", "clean", "worst", "size", "terms", "what"]


def test_show_prints_the_card_of_a_name_and_of_a_folder(run, folder, shipped):
    assert run("models", "show", folder).stdout.strip() == (folder / READABLE).read_text().strip()
    shown = run("models", "show", "second").stdout.strip()
    assert shown == (shipped / "second" / READABLE).read_text().strip()
    assert "| contrast | 9.0 | 80.0 | 7.0 | 6.0 | 50.0 |" in shown


@pytest.mark.parametrize("file", [WEIGHTS, PROFILE])
def test_show_does_not_show_the_card_of_a_damaged_model(run, folder, file):
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])
    done = run("models", "show", folder)
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "damaged, cut short or of another kind" in done.stderr
    assert done.stdout == ""


def test_score_of_a_few_images_leaves_the_card_alone(run, folder):
    before = (folder / CARD).read_text()
    done = run("models", "score", "mine", "--count", 2, "--workers", 0)
    assert done.returncode == 0, done.stderr
    held = json.loads((folder / "shift-2.json").read_text())
    assert held["images"] == 2
    assert (folder / CARD).read_text() == before
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["gaussian_noise", "contrast", "clean"]
    assert rows[1][1:] == [f"{value:.1f}" for value in held["corruptions"]["contrast"]]
    assert rows[2][1] == f"{held['clean']:.1f}"
    assert done.stdout.rstrip().endswith("All of it: mine/shift-2.json")


def test_the_few_images_are_spread_over_the_test_set(run, folder, monkeypatch):
    seen = []
    read = Colours.read

    def watched(self, index):
        seen.append((self.seed, index))
        return read(self, index)

    monkeypatch.setattr(Colours, "read", watched)
    run("models", "score", "mine", "--count", 5, "--workers", 0)
    # Nine test images, of seed 2; the numbers below 5, stretched by 9 / 5 and rounded down.
    assert set(seen) == {(2, 0), (2, 1), (2, 3), (2, 5), (2, 7)}


def test_score_of_all_images_goes_on_the_card(run, folder):
    done = run("models", "score", "mine", "--workers", 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine/card.md holds the scores now.")
    scores = bestta.models.card(folder).scores
    held = json.loads((folder / "shift.json").read_text())
    assert scores["images"] == 9
    assert scores["corruptions"] == held["corruptions"]
    assert "| contrast |" in (folder / READABLE).read_text()
    sittings = scores["sittings"]
    # What was measured once is not measured again.
    measured = (folder / "shift.json").stat().st_mtime_ns
    assert run("models", "score", "mine", "--workers", 0).returncode == 0
    assert (folder / "shift.json").stat().st_mtime_ns == measured
    assert bestta.models.card(folder).scores["sittings"] == sittings, "nobody sat down"


@pytest.mark.usefixtures("shipped")
def test_score_of_a_shipped_model_goes_to_a_file_here_or_where_it_is_asked_to(run, tmp_path):
    assert run("models", "score", "first", "--count", 1, "--workers", 0).returncode == 0
    assert (tmp_path / "colours-shift-1.json").exists()
    out = tmp_path / "a" / "b.json"
    words = ("models", "score", "first", "--count", 1, "--workers", 0, "--out", out)
    assert run(*words).returncode == 0
    assert json.loads(out.read_text())["images"] == 1


def test_score_asks_for_the_folder_of_a_model_that_needs_one(run, folder):
    card = json.loads((folder / CARD).read_text())
    card["recipe"]["name"] = "files"
    (folder / CARD).write_text(json.dumps(card))
    done = run("models", "score", "mine")
    assert done.returncode == 1
    assert "with --data" in done.stderr
    assert run("models", "score", "mine", "--data", ".", "--count", 1).returncode == 0


def test_a_try_on_few_images_does_not_stand_in_the_way_of_all(run, folder):
    assert run("models", "score", folder, "--count", 2, "--workers", 0).returncode == 0
    done = run("models", "score", folder, "--workers", 0)
    assert done.returncode == 0, done.stderr


def test_a_model_of_an_unknown_recipe_is_refused_by_name(run, folder, monkeypatch):
    monkeypatch.setattr(cli_models, "recipes", dict)
    done = run("models", "score", folder)
    assert done.returncode == 1
    assert "'colours' names no recipe" in done.stderr


@pytest.mark.usefixtures("shipped")
def test_the_next_step_names_the_folder_where_a_shipped_model_has_its_name(run, tmp_path):
    done = run(*TRAIN, "--out", "first")
    assert done.stdout.rstrip().endswith("Next: bestta models score ./first")
    assert Path("first").is_dir()
    assert bestta.models.card("./first").command == "bestta train colours --threads 1 --out first"
