"""The command line: that its commands do what they say, and that errors help."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import bestta
from bestta.data import Folder, Streets, kinds
from bestta.data.samples import read_image
from bestta.data.sheets import corruption_sheet, sample_sheet, weather_sheet


def width_and_height(path):
    with Image.open(path) as image:
        return image.size


@pytest.fixture
def photographs(tmp_path):
    """Five photographs, the fourth of them cut short."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for index in range(5):
        pixels = numbers.integers(0, 256, (24, 48, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    whole = (folder / "3.png").read_bytes()
    (folder / "3.png").write_bytes(whole[: len(whole) // 2])
    return folder


def test_the_version_is_that_of_the_package():
    command = [sys.executable, "-m", "bestta", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"bestta {bestta.__version__}"


def test_list_names_every_kind(run):
    lines = run("data", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines[: len(kinds())]] == list(kinds())


def test_list_names_the_samples_of_a_set_in_order(run, photographs):
    done = run("data", "list", "folder", photographs)
    assert done.stdout.split() == ["0.png", "1.png", "2.png", "3.png", "4.png"]


def test_check_counts_and_names_what_cannot_be_read(run, photographs):
    done = run("data", "check", "folder", photographs, "--full")
    assert done.returncode == 1
    assert "5 images" in done.stdout
    assert "48×24" in done.stdout
    assert "3.png" in done.stdout
    (photographs / "3.png").unlink()
    done = run("data", "check", "folder", photographs)
    assert done.returncode == 0
    assert "4 images" in done.stdout


def test_check_goes_through_every_condition_of_acdc_and_names_those_missing(run, tmp_path):
    for part, end in (("rgb_anon", "rgb_anon"), ("gt", "gt_labelTrainIds")):
        for condition in ("fog", "rain"):
            folder = tmp_path / part / condition / "train" / "GOPR0475"
            folder.mkdir(parents=True)
            pixels = np.zeros((24, 48) if part == "gt" else (24, 48, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"GOPR0475_frame_000041_{end}.png")
    done = run("data", "check", "acdc", tmp_path)
    headings = [line for line in done.stdout.splitlines() if line.startswith("==")]
    assert headings == ["== fog", "== night", "== rain", "== snow"]
    after = done.stdout.split("== night\n")[1].splitlines()[0]
    assert after.startswith("missing: ")
    assert done.stdout.count("acdc: 1 images") == 2
    assert done.returncode == 1
    assert run("data", "check", "acdc", tmp_path, "--condition", "rain").returncode == 0


def test_preview_draws_what_can_be_read(run, photographs, tmp_path):
    out = tmp_path / "sheet.png"
    done = run("data", "preview", "folder", photographs, "--out", out, "--width", 48)
    assert done.returncode == 0
    assert "warning: skipped 3.png" in done.stderr
    assert width_and_height(out)[0] > 4 * 48


@pytest.mark.parametrize("show", ["weather", "corruptions"])
def test_preview_draws_the_embedded_set_in_every_condition(run, show, tmp_path):
    out = tmp_path / "sheet.png"
    done = run("data", "preview", "streets", "--show", show, "--out", out, "--width", 32)
    assert done.returncode == 0, done.stderr
    rows = {"weather": 4, "corruptions": 19}[show]
    assert width_and_height(out)[1] > rows * 16


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data", "check", "citiscapes", "."], "cityscapes"),
        (["data", "check", "cityscapes", "nowhere"], "leftImg8bit"),
        (["data", "check", "cityscapes"], "in which folder"),
        (["data", "check", "folder", ".", "--condition", "fog"], "condition"),
        (["data", "preview", "streets", "--out", "sheet.gif"], ".png"),
        (["data", "preview", "cityscapes", ".", "--size", "big"], "1024x512"),
        (["data", "preview", "streets", "--show", "weather", "--index", "1000"], "no sample 1000"),
        (["data", "preview", "streets", "--count", "1", "--out", "/dev/null/sheet.png"], "null"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(run, words, expected):
    done = run(*words)
    assert done.returncode != 0
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("module", "extra"), [("typer", "cli"), ("cv2", "data")])
def test_without_the_extra_the_command_says_what_to_install(module, extra):
    code = f"import sys; sys.modules['{module}'] = None\nfrom bestta.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"pip install 'bestta[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def drawn(run, path, *words):
    """The sheet that ``bestta data preview`` draws."""
    done = run("data", "preview", *words, "--out", path)
    assert done.returncode == 0, done.stderr
    return read_image(path)


def test_preview_takes_the_sample_the_seed_and_the_family_that_are_asked_for(run, tmp_path):
    image = Streets(1000)[3].image
    words = ("streets", "--index", 3, "--seed", 5, "--width", 32)
    sheet = drawn(run, tmp_path / "a.png", *words, "--show", "weather")
    assert np.array_equal(sheet, weather_sheet(image, seed=5, cell_width=32))
    sheet = drawn(run, tmp_path / "b.png", *words, "--show", "corruptions", "--family", "cifar")
    assert np.array_equal(sheet, corruption_sheet(image, family="cifar", seed=5, cell_width=32))


def test_preview_resizes_labels_and_reduces_as_asked(run, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 48, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "images" / "a.png")
    Image.fromarray(pixels[..., 0] % 5).save(tmp_path / "labels" / "a.png")
    words = ("folder", tmp_path / "images", "--labels", tmp_path / "labels")
    sheet = drawn(run, tmp_path / "a.png", *words, "--size", "32x64", "--width", 32)
    images = Folder(tmp_path / "images", tmp_path / "labels", size=(32, 64))
    assert np.array_equal(sheet, sample_sheet(images, cell_width=32))
    few = drawn(run, tmp_path / "b.png", *words, "--width", 48, "--colours", 8)
    assert len(np.unique(few.reshape(-1, 3), axis=0)) <= 8
    assert "class 4" in run("data", "check", *words).stdout


def test_check_ends_with_one_if_any_part_is_broken_and_goes_through_all(run, tmp_path):
    np.save(tmp_path / "labels.npy", np.zeros(50_000, np.uint8))
    for name in ("gaussian_noise", "jpeg_compression"):
        empty = np.lib.format.open_memmap(
            tmp_path / f"{name}.npy", "w+", np.uint8, (50_000, 32, 32, 3)
        )
        del empty
    done = run("data", "check", "cifar10c", tmp_path, "--severity", 2)
    assert done.returncode == 1
    assert done.stdout.count("cifar10c: 10000 images") == 2
    assert done.stdout.count("missing: no corruption") == 13
    assert run("data", "check", "cifar10c", tmp_path, "--corruption", "fgo").returncode == 1
    (tmp_path / "labels.npy").unlink()
    assert "labels.npy" in run("data", "check", "cifar10c", tmp_path).stdout
