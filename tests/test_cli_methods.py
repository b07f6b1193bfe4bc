"""``bestta methods`` and ``bestta prepare``: what they print, write and end with."""

from __future__ import annotations

import pytest
import torch

import bestta
from bestta.data import Streets
from bestta.data.samples import ImageSet, Sample
from bestta.data.tensors import LabelledBatches, to_batches

SMALL = ("--images", 4, "--batch", 2)


def test_methods_are_listed_with_what_they_ask_for(run):
    done = run("methods")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for name in bestta.methods():
        assert sum(line.split()[:1] == [name] for line in lines) == 1
    place = next(i for i, line in enumerate(lines) if line.startswith("eata"))
    assert "bestta prepare … --method eata" in lines[place + 1]


def test_prepare_writes_a_profile_that_adapt_takes(run, tmp_path):
    path = tmp_path / "profile.safetensors"
    done = run("prepare", "streets", "--method", "eata", "--out", path, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "eata learned from 4 images" in done.stdout
    assert not path.with_suffix(".part").exists()
    profile = bestta.SourceProfile.load(path)
    assert set(profile.layers) == set(bestta.models.load_profile("streets").layers)
    assert profile.provenance["prepared"]["eata"]["images"] == 4
    bestta.adapt(bestta.models.load("streets"), path, method="eata")


def test_a_second_method_is_added_to_the_same_file(run, tmp_path):
    path = tmp_path / "profile.safetensors"
    run("prepare", "streets", "--method", "eata", "--out", path, *SMALL)
    done = run(
        "prepare", "streets", "--method", "ecotta", "--out", path,
        "--set", "warmup_epochs=1", "--set", "parts=backbone.layer1", *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    profile = bestta.SourceProfile.load(path)
    assert set(profile.prepared) == {"eata", "ecotta"}
    assert profile.settings["ecotta"]["parts"] == ["backbone.layer1"]
    assert profile.provenance["prepared"]["ecotta"]["settings"]["warmup_epochs"] == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("streets", "--method", "tent"), "learns nothing from source images"),
        (("streets", "--method", "eatta"), "Did you mean 'eata'"),
        (("cityscapes", "--method", "eata"), "name their folder with --data"),
        (("streets", "--method", "eata", "--set", "margin"), "--set takes name=value"),
        (("streets", "--method", "eata", "--set", "margn=1"), "Did you mean 'margin'"),
        (("nowhere", "--method", "eata"), "nowhere"),
    ],
)
def test_what_cannot_be_prepared_is_an_error_of_one_line(run, tmp_path, words, error):
    done = run("prepare", *words, "--out", tmp_path / "p", *SMALL)
    assert done.returncode == 1
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "p").exists()


class Mixed(ImageSet):
    """Streets of two sizes, one of them without a label."""

    def __len__(self) -> int:
        return 5

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> Sample:
        size = (64, 32) if index < 3 else (32, 32)
        street = Streets(1, size=size)[0]
        return Sample(str(index), street.image, None if index == 1 else street.label)


def test_labelled_batches_are_of_one_size_and_leave_out_what_has_no_label():
    shapes = [(tuple(i.shape), tuple(y.shape)) for i, y in LabelledBatches(Mixed(), size=2)]
    assert shapes == [((2, 3, 32, 64), (2, 32, 64)), ((2, 3, 32, 32), (2, 32, 32))]


def test_labelled_batches_can_be_gone_through_twice_and_hold_the_images_of_to_batches():
    batches = LabelledBatches(Streets(3, size=(64, 32)), size=2)
    first, second = list(batches), list(batches)
    expected = list(to_batches(Streets(3, size=(64, 32)), size=2))
    for (image, label), (again, _), plain in zip(first, second, expected, strict=True):
        assert torch.equal(image, again)
        assert torch.equal(image, plain)
        assert label.dtype == torch.int64


def test_a_batch_of_none_is_refused():
    with pytest.raises(ValueError, match="size=0"):
        LabelledBatches(Streets(1), size=0)
