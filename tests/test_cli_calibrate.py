"""``bestta calibrate``: what it prints, writes and ends with."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import bestta
from bestta.calibration import run as calibration
from bestta.calibration.evaluations import Evaluations
from bestta.calibration.search import Lengths
from bestta.cli.calibrate import _table

SUBJECT = """
import torch
from bestta.benchmark import Subject
from nets import Classifier, randomise

def images():
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        yield 4 * torch.rand(2, 3, 16, 16, generator=generator) - 2, torch.zeros(2).long()

def subject():
    return Subject(
        name="small", model=randomise(Classifier(), seed=2), classes=tuple("abcd"),
        task="classification", size=(16, 16), train=TRAIN, normalise=((0.5,) * 3, (0.25,) * 3),
    )
"""


@pytest.fixture(autouse=True)
def _few_frames(monkeypatch):
    monkeypatch.setattr(calibration, "_lengths", lambda *_: Lengths(short=1, full=2, long=2))


@pytest.fixture
def subject(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SUBJECT.replace("TRAIN", "images"))
    return path


def test_a_shipped_model_is_calibrated_to_a_profile_that_adapt_takes(run, tmp_path):
    path, page = tmp_path / "out" / "profile.safetensors", tmp_path / "page.html"
    done = run(
        "calibrate", "streets", "--count", 8, "--layers", "backbone.layer1", "--minutes", 0.001,
        "--out", path, "--report", page,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "backbone.layer1" in done.stdout
    assert f"Next: bestta.adapt(model, '{path}')" in done.stdout
    assert "cut short by its time limit" in done.stdout
    assert page.read_text().count("data:image/png") == 12
    model = bestta.models.load("streets")
    with bestta.adapt(model, path) as adapter:
        assert adapter.config.layers == ("backbone.layer1",)


def test_a_model_of_ones_own_is_calibrated_with_its_own_batches(run, tmp_path, subject):
    done = run("calibrate", subject, "--out", tmp_path / "p.safetensors", "--count", 8, "--labels")
    assert done.returncode == 0, done.stderr
    about = bestta.SourceProfile.load(tmp_path / "p.safetensors").provenance["calibration"]
    assert about["images"] == 8
    assert about["labels"]
    assert "(chosen)" in done.stdout


def test_photos_in_folders_are_source_and_expected_conditions(run, tmp_path, subject):
    draw = np.random.default_rng(0)
    for folder in ("photos", "dusk"):
        (tmp_path / folder).mkdir()
        for n in range(8):
            picture = draw.integers(0, 255, (20, 24, 3)).astype(np.uint8)
            Image.fromarray(picture).save(tmp_path / folder / f"{n}.png")
    done = run(
        "calibrate", subject, "--images", tmp_path / "photos", "--expected", tmp_path / "dusk",
        "--out", tmp_path / "p.safetensors", "--minutes", 0.001,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    about = bestta.SourceProfile.load(tmp_path / "p.safetensors").provenance["calibration"]
    assert about["weights"]["dusk"] == 2
    # Black and white are those of bytes, normalised as the model wants them (ImageNet's, in red).
    assert about["pixels"][0][0] == pytest.approx((0 - 0.5) / 0.25)
    assert about["pixels"][1][0] == pytest.approx((1 - 0.5) / 0.25)


def test_stopped_it_ends_with_130_and_the_same_command_goes_on(run, tmp_path, subject, monkeypatch):
    put = Evaluations.put

    def stop_later(self, key, counts):
        put(self, key, counts)
        if len(self.found) == 3:
            raise KeyboardInterrupt

    words = ("calibrate", subject, "--out", tmp_path / "p.safetensors")
    monkeypatch.setattr(Evaluations, "put", stop_later)
    done = run(*words)
    assert done.returncode == 130
    assert "The same command goes on from there" in done.stdout
    monkeypatch.setattr(Evaluations, "put", put)
    done = run(*words)
    assert done.returncode == 0, done.stderr
    about = bestta.SourceProfile.load(tmp_path / "p.safetensors").provenance["calibration"]
    assert about["resumed"] == 3


def test_cut_short_by_its_time_limit_it_goes_on_with_more_minutes(run, tmp_path, subject):
    path = tmp_path / "p.safetensors"
    done = run("calibrate", subject, "--out", path, "--minutes", 1e-6)
    assert done.returncode == 0, done.stderr
    kept = path.with_suffix(".part")
    assert f"{kept} keeps all of it: the same command with more minutes" in done.stdout
    done = run("calibrate", subject, "--out", path, "--minutes", 100)
    assert done.returncode == 0, done.stderr
    about = bestta.SourceProfile.load(path).provenance["calibration"]
    assert about["resumed"] == 1
    assert not about["cut_short"]
    assert "more minutes" not in done.stdout
    assert not kept.exists()


def test_a_profile_that_cannot_be_written_is_an_error_before_any_work(
    run, tmp_path, subject, monkeypatch
):
    monkeypatch.setattr(bestta, "calibrate", lambda *_, **__: pytest.fail("worked"))
    (tmp_path / "file").touch()
    for out, error in {
        "": f"--out names a file, and {tmp_path} is a folder",
        "file/p.safetensors": "file is a file",
        "p.part": "--out ends otherwise",
    }.items():
        done = run("calibrate", subject, "--out", tmp_path / out)
        assert done.returncode == 1
        assert error in done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("nowhere",), "nowhere"),
        (("cityscapes",), "name their folder with --data"),
        (("streets", "--layers", "layer9"), "no module named 'layer9'"),
        (("streets", "--minutes", "0"), "minutes must be a number above 0"),
        (("streets", "--images", "nofolder"), "no folder"),
        (("streets", "--images", ".", "--labels"), "without --data and --labels"),
    ],
)
def test_what_cannot_be_calibrated_is_an_error_of_one_line(run, tmp_path, words, error):
    done = run("calibrate", *words, "--count", 8, "--out", tmp_path / "p.safetensors")
    assert done.returncode == 1
    assert error in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_says_nothing_of_training_images_needs_photos(run, tmp_path):
    path = tmp_path / "bare.py"
    path.write_text(SUBJECT.replace("TRAIN", "None"))
    done = run("calibrate", path, "--out", tmp_path / "p.safetensors")
    assert done.returncode == 1
    assert "--images" in done.stderr


def test_images_that_the_subjects_normalisation_does_not_fit_are_an_error_that_names_it(
    run, tmp_path, subject
):
    subject.write_text(subject.read_text().replace("(0.25,) * 3", "(0.5,) * 3"))
    done = run("calibrate", subject, "--out", tmp_path / "p.safetensors", "--count", 8)
    assert done.returncode == 1
    assert "normalise=" in done.stderr


def test_layers_that_saw_all_frames_stand_above_those_that_were_sorted_out():
    tried = [("b1", 17.4, 3), ("p1", 13.6, 10), ("b2", 9.1, 10)]
    told = {
        "task": "segmentation",
        "chosen": {"layers": ["p1"]},
        "candidates": [
            {"name": name, "gain": gain, "error": 1.0, "frames": frames}
            for name, gain, frames in tried
        ],
    }
    lines = [line.split() for line in _table(told).splitlines()]
    assert [line[:3] for line in lines[1:4]] == [
        ["p1", "10", "+13.6"], ["b2", "10", "+9.1"], ["b1", "3", "+17.4"],
    ]  # fmt: skip
