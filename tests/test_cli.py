"""The command line: that its commands do what they say, and that errors help."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

import bestta
from bestta.cli import main
from bestta.data import kinds


def width_and_height(path):
    with Image.open(path) as image:
        return image.size


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command as its entry point does, in this process: importing torch takes a second."""

    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["bestta", *map(str, words)])
        with pytest.raises(SystemExit) as done:
            main()
        return Done(done.value.code or 0, *capsys.readouterr())

    return run


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
    ],
)
def test_mistakes_are_explained_without_a_traceback(run, words, expected):
    done = run(*words)
    assert done.returncode != 0
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None\nfrom bestta.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip install 'bestta[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
