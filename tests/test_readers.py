"""Opening sets by kind, and looking them over."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import bestta.data
from bestta.data import (
    CamVid,
    Folder,
    ImageSet,
    LayoutError,
    Sample,
    UnreadableImage,
    describe,
    kinds,
    open_set,
)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def camvid(root: Path, count: int = 3) -> Path:
    """Label maps of 4×2 pixels: half sky, a quarter road, a quarter void."""
    for i in range(count):
        save(root / f"test/{i}.png", np.full((2, 4, 3), i, np.uint8))
        save(root / f"testannot/{i}.png", np.array([[0, 0, 0, 0], [3, 3, 11, 11]], np.uint8))
    return root


# Opening


def test_every_kind_is_that_of_a_reader_that_is_exported():
    exported = {getattr(bestta.data, name) for name in bestta.data.__all__}
    readers = {r for r in exported if isinstance(r, type) and issubclass(r, ImageSet)} - {ImageSet}
    assert {reader.kind for reader in readers} == set(kinds())


def test_every_kind_has_a_description_of_one_line():
    assert all(text and "\n" not in text for text in kinds().values())


def test_a_set_is_opened_by_kind_with_the_options_of_its_class(tmp_path):
    images = open_set("camvid", camvid(tmp_path), split="test", size=(8, 4))
    assert isinstance(images, CamVid)
    assert images[0].image.shape == (4, 8, 3)
    assert isinstance(open_set("folder", str(tmp_path)), Folder)


def test_the_embedded_set_needs_no_folder_and_takes_none(tmp_path):
    assert len(open_set("streets", count=3)) == 3
    with pytest.raises(ValueError, match="streets has no files"):
        open_set("streets", tmp_path)
    with pytest.raises(ValueError, match="camvid is read from files"):
        open_set("camvid")


def test_an_unknown_kind_is_answered_with_the_nearest_and_all():
    with pytest.raises(ValueError, match=r"'cityscape'\. Did you mean 'cityscapes'\?.*acdc"):
        open_set("cityscape", "anywhere")


def test_an_unknown_option_is_answered_with_those_of_the_kind(tmp_path):
    with pytest.raises(ValueError, match=r"no option 'splt'\. Did you mean 'split'\?.*size"):
        open_set("camvid", tmp_path, splt="test")
    with pytest.raises(ValueError, match=r"no option 'condition'.*It takes: split, size"):
        open_set("cityscapes", tmp_path, condition="fog")


def test_an_option_that_is_needed_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match="acdc needs the option 'condition'"):
        open_set("acdc", tmp_path)


def test_a_folder_that_is_not_there_is_a_layout_error_for_every_kind(tmp_path):
    options = {"acdc": {"condition": "fog"}, "cifar10c": {"corruption": "fog"}}
    for kind in kinds():
        if kind != "streets":
            with pytest.raises(LayoutError, match="does not exist"):
                open_set(kind, tmp_path / "absent", **options.get(kind, {}))


@pytest.mark.parametrize("package", ["cv2", "PIL"])
def test_without_its_extra_the_package_says_how_to_get_it(monkeypatch, package):
    for name in [name for name in sys.modules if name.split(".")[:2] == ["bestta", "data"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'bestta\[data\]'"):
        importlib.import_module("bestta.data")


# Looking over


def test_shares_sizes_and_what_is_missing_are_counted(tmp_path):
    """By hand: of 8 pixels 4 are sky, 2 road and 2 ignored, so sky has 4 of the 6 that count."""
    found = describe(CamVid(camvid(tmp_path)))
    assert (found.kind, found.count, found.decoded, found.labelled) == ("camvid", 3, 3, 3)
    assert found.sizes == {(4, 2): 3}
    assert found.shares == pytest.approx({"Sky": 4 / 6, "Road": 2 / 6})
    assert found.ignored == pytest.approx(2 / 8)
    assert found.never_seen == tuple(c for c in found.classes if c not in ("Sky", "Road"))
    assert found.unreadable == ()
    assert found.missing == (
        "230 of the 233 images of split 'test'", "split 'train'", "split 'val'",
    )  # fmt: skip


def test_a_quick_look_decodes_few_but_knows_every_header(tmp_path):
    camvid(tmp_path, 120)
    (tmp_path / "test/7.png").write_bytes(b"")
    (tmp_path / "testannot/11.png").unlink()
    save(tmp_path / "test/13.png", np.zeros((9, 9, 3), np.uint8))
    found = describe(CamVid(tmp_path))
    assert found.decoded <= 50
    assert found.sizes == {(4, 2): 117}
    assert [image.name for image in found.unreadable] == [
        "test/7.png",
        "test/11.png",
        "test/13.png",
    ]


def test_a_full_look_finds_what_headers_do_not_tell(tmp_path):
    camvid(tmp_path, 120)
    images = CamVid(tmp_path)
    hidden = next(i for i in range(len(images)) if i not in bestta.data.folder.spread(120, 50))
    path = images.image_path(hidden)
    save(tmp_path / "noise.png", np.random.default_rng(0).integers(0, 255, (2, 4, 3), np.uint8))
    path.write_bytes((tmp_path / "noise.png").read_bytes()[:-30])
    assert describe(images).unreadable == ()
    found = describe(images, full=True)
    assert [image.name for image in found.unreadable] == [images.name(hidden)]
    assert found.decoded == 119
    assert images.skipped == []


def test_images_with_one_class_each_are_counted_by_image():
    class Pets(ImageSet):
        kind = "pets"
        classes = ("cat", "dog", "fish")

        def __len__(self) -> int:
            return 4

        def name(self, index: int) -> str:
            return str(index)

        def read(self, index: int) -> Sample:
            if index == 3:
                raise UnreadableImage("3: gone")
            return Sample(str(index), np.zeros((2, 5, 3), np.uint8), min(index, 1))

    found = describe(Pets())
    assert found.shares == pytest.approx({"cat": 1 / 3, "dog": 2 / 3})
    assert found.never_seen == ("fish",)
    assert found.sizes == {(5, 2): 3}, "nobody knows sizes but by reading"
    assert [image.reason for image in found.unreadable] == ["3: gone"]


def test_a_set_without_labels_or_names_describes_itself(tmp_path):
    save(tmp_path / "images/a.png", np.zeros((2, 4, 3), np.uint8))
    save(tmp_path / "labels/a.png", np.full((2, 4), 7, np.uint8))
    assert "no labels" in str(describe(Folder(tmp_path / "images")))
    found = describe(Folder(tmp_path / "images", tmp_path / "labels"))
    assert found.shares == {"class 7": 1.0}


def test_the_text_says_all_that_was_found(tmp_path):
    camvid(tmp_path)
    (tmp_path / "test/1.png").write_bytes(b"")
    text = str(describe(CamVid(tmp_path)))
    for words in (
        "camvid: 3 images, 2 of them decoded",
        "4×2: 2 images",
        "classes: 11, over 2 labels, 25.0% ignored",
        "Sky   66.67%",
        "never seen among these: Building, Pole",
        "missing: 230 of the 233 images",
        "cannot be used: test/1.png",
    ):
        assert words in text


def test_a_slice_can_be_looked_over(tmp_path):
    camvid(tmp_path, 120)
    (tmp_path / "test/77.png").write_bytes(b"")
    found = describe(CamVid(tmp_path)[76:])
    assert (found.count, found.sizes, found.missing) == (44, {(4, 2): 43}, ())
    found = describe(CamVid(tmp_path)[::-1][:50][40:])
    assert [image.name for image in found.unreadable] == ["test/77.png"]


def test_the_labels_of_the_npm_package_are_not_read_as_a_batch(tmp_path):
    """A folder that has everything but the images is told what it lacks."""
    (tmp_path / "test_lables.json").write_text(json.dumps([0]))
    with pytest.raises(LayoutError, match="no test_batch"):
        open_set("cifar10", tmp_path)
