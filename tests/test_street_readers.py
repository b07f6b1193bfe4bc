"""Readers of images with label maps: Cityscapes, ACDC, CamVid and plain folders, on small trees."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from bestta.data import Acdc, CamVid, Cityscapes, Folder, LayoutError, UnreadableImage
from bestta.data.camvid import CLASSES as CAMVID_CLASSES
from bestta.data.camvid import COLOURS
from bestta.data.classes import CLASSES
from bestta.data.folder import spread

WIDTH, HEIGHT = 8, 4


def frame(seed: int = 0, size: tuple[int, int] = (WIDTH, HEIGHT)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)


def ids(*values: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> np.ndarray:
    """A label map that repeats ``values`` until it is full."""
    return np.resize(np.array(values, np.uint8), size[::-1])


def save(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def cityscapes(root: Path, split: str = "val", suffix: str = "png", labels: bool = True) -> Path:
    """Three frames of two cities, written in an order that is not the sorted one."""
    for seed, (city, number) in enumerate([("munster", 7), ("lindau", 12), ("lindau", 3)]):
        name = f"{split}/{city}/{city}_{number:06}_000019"
        save(root / f"leftImg8bit/{name}_leftImg8bit.{suffix}", frame(seed))
        if labels:
            save(root / f"gtFine/{name}_gtFine_labelIds.png", ids(7, 26, 0))
            save(root / f"gtFine/{name}_gtFine_color.png", frame(9))
            save(root / f"gtFine/{name}_gtFine_instanceIds.png", ids(1))
    return root


def names(images: Cityscapes | Acdc | CamVid | Folder) -> list[str]:
    return [images.name(i) for i in range(len(images))]


# Cityscapes


def test_cityscapes_comes_in_the_order_of_cities_and_names_with_train_ids(tmp_path):
    images = Cityscapes(cityscapes(tmp_path))
    assert names(images) == [
        "val/lindau/lindau_000003_000019_leftImg8bit.png",
        "val/lindau/lindau_000012_000019_leftImg8bit.png",
        "val/munster/munster_000007_000019_leftImg8bit.png",
    ]
    assert (images.kind, images.classes) == ("cityscapes", CLASSES)
    sample = images[0]
    assert sample.name == images.name(0)
    assert np.array_equal(sample.image, frame(2))
    assert np.array_equal(sample.label, ids(0, 13, 255))
    assert sample.label.dtype == np.uint8
    assert sample.label.flags.c_contiguous


def test_label_ids_become_the_train_ids_of_the_classes_they_name(tmp_path):
    """The label ids beside their names are those of the official table of Cityscapes."""
    official = {
        "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17,
        "traffic light": 19, "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23,
        "person": 24, "rider": 25, "car": 26, "truck": 27, "bus": 28, "train": 31,
        "motorcycle": 32, "bicycle": 33,
    }  # fmt: skip
    cityscapes(tmp_path)
    path = "gtFine/val/lindau/lindau_000003_000019_gtFine_labelIds.png"
    stored = np.array([*range(34), 255, 255], np.uint8).reshape(4, 9)
    save(tmp_path / path, stored)
    image = "leftImg8bit/val/lindau/lindau_000003_000019_leftImg8bit.png"
    save(tmp_path / image, frame(size=(9, 4)))
    images = Cityscapes(tmp_path)
    images.frame_size = None  # this one is of another shape than the rest, for the sake of the ids
    label = images[0].label
    expected = [
        next((CLASSES.index(name) for name, i in official.items() if i == value), 255)
        for value in stored.ravel().tolist()
    ]
    assert label.ravel().tolist() == expected


@pytest.mark.parametrize(("kind", "bad"), [("labelIds", 40), ("labelTrainIds", 19)])
def test_an_id_that_is_none_of_the_set_is_refused_by_number(tmp_path, kind, bad):
    cityscapes(tmp_path, labels=False)
    for path in (tmp_path / "leftImg8bit").rglob("*.png"):
        label = str(path).replace("leftImg8bit.png", f"gtFine_{kind}.png")
        save(Path(label.replace("leftImg8bit", "gtFine")), ids(8, bad, 255))
    with pytest.raises(UnreadableImage, match=f"class ids {bad} are none"):
        Cityscapes(tmp_path)[0]


def test_maps_of_train_ids_serve_only_where_label_ids_are_missing(tmp_path):
    cityscapes(tmp_path)
    stem = tmp_path / "gtFine/val/lindau/lindau_000003_000019_gtFine"
    save(Path(f"{stem}_labelTrainIds.png"), ids(18, 255))
    assert np.array_equal(Cityscapes(tmp_path)[0].label, ids(0, 13, 255))
    Path(f"{stem}_labelIds.png").unlink()
    assert np.array_equal(Cityscapes(tmp_path)[0].label, ids(18, 255))


def test_jpeg_frames_and_separate_archives_are_read(tmp_path):
    cityscapes(tmp_path, suffix="jpg")
    for name in ("leftImg8bit", "gtFine"):
        (tmp_path / f"{name}_trainvaltest").mkdir()
        (tmp_path / name).rename(tmp_path / f"{name}_trainvaltest" / name)
    images = Cityscapes(tmp_path)
    assert names(images)[0] == "val/lindau/lindau_000003_000019_leftImg8bit.jpg"
    assert images[0].image.shape == (HEIGHT, WIDTH, 3)


def test_a_frame_that_is_there_as_png_and_jpeg_counts_once(tmp_path):
    cityscapes(cityscapes(tmp_path), suffix="jpg")
    assert [name[-3:] for name in names(Cityscapes(tmp_path))] == ["png"] * 3


def test_the_test_split_has_no_labels_even_where_empty_ones_lie_about(tmp_path):
    images = Cityscapes(cityscapes(tmp_path, "test"), "test")
    assert [sample.label for sample in images] == [None] * 3
    assert images.classes == ()


def test_an_image_without_label_map_is_named_skipped_and_counted(tmp_path):
    cityscapes(tmp_path)
    (tmp_path / "gtFine/val/lindau/lindau_000012_000019_gtFine_labelIds.png").unlink()
    images = Cityscapes(tmp_path)
    assert len(images) == 3
    with pytest.warns(UserWarning, match="lindau_000012.*no label map"):
        assert len(list(images)) == 2
    assert [s.name for s in images.skipped] == ["val/lindau/lindau_000012_000019_leftImg8bit.png"]
    assert "label maps of 1 of 3 images" in images.missing()


def test_without_any_label_map_the_set_says_so_and_how_to_go_on(tmp_path):
    cityscapes(tmp_path, labels=False)
    with pytest.raises(LayoutError, match=r"no label map in gtFine/val.*labels=False"):
        Cityscapes(tmp_path)
    images = Cityscapes(tmp_path, labels=False)
    assert [sample.label for sample in images] == [None] * 3


def test_a_path_for_labels_is_refused_where_labels_have_their_place(tmp_path):
    with pytest.raises(ValueError, match="True or False"):
        Cityscapes(cityscapes(tmp_path), labels="elsewhere")


def test_a_wrong_folder_is_answered_with_both_trees(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(LayoutError, match="no folder leftImg8bit") as caught:
        Cityscapes(tmp_path)
    assert "leftImg8bit/<split>/<city>/*_leftImg8bit.png" in str(caught.value)
    assert "images/" in str(caught.value).split("found")[1]


def test_a_split_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    with pytest.raises(LayoutError, match=r"no split 'train'.*there are: val"):
        Cityscapes(cityscapes(tmp_path), "train")


def test_missing_cities_images_and_splits_are_told(tmp_path):
    assert Cityscapes(cityscapes(tmp_path)).missing() == (
        "497 of the 500 images of split 'val'",
        "the images of frankfurt",
        "split 'train'",
        "split 'test'",
    )


# One size for all frames


def test_a_frame_of_another_size_is_refused_with_both_sizes_unless_a_size_is_given(tmp_path):
    cityscapes(tmp_path)
    name = "val/lindau/lindau_000012_000019"
    save(tmp_path / f"leftImg8bit/{name}_leftImg8bit.png", frame(size=(6, 6)))
    save(tmp_path / f"gtFine/{name}_gtFine_labelIds.png", ids(7, size=(6, 6)))
    images = Cityscapes(tmp_path)
    for look in (images.read, images.peek):
        with pytest.raises(UnreadableImage, match=r"6×6, the frames of this set are 8×4"):
            look(1)
    assert images[0].image.shape == (4, 8, 3)
    with pytest.raises(UnreadableImage, match=r"6×6 is of another shape .* which are 8×4"):
        Cityscapes(tmp_path, size=(16, 8))[1]
    save(tmp_path / f"leftImg8bit/{name}_leftImg8bit.png", frame(size=(6, 3)))
    save(tmp_path / f"gtFine/{name}_gtFine_labelIds.png", ids(7, size=(6, 3)))
    assert [s.image.shape for s in Cityscapes(tmp_path, size=(16, 8))] == [(8, 16, 3)] * 3


def test_labels_of_another_size_than_their_image_are_refused_even_when_resizing(tmp_path):
    cityscapes(tmp_path)
    path = tmp_path / "gtFine/val/lindau/lindau_000003_000019_gtFine_labelIds.png"
    save(path, ids(7, size=(4, 2)))
    for size in (None, (16, 8)):
        with pytest.raises(UnreadableImage, match=r"labels are 4×2, their image is 8×4"):
            Cityscapes(tmp_path, size=size)[0]


def test_unreadable_headers_do_not_hinder_opening_a_set(tmp_path):
    cityscapes(tmp_path)
    for path in (tmp_path / "leftImg8bit").rglob("*lindau_*.png"):
        path.write_bytes(b"")
    images = Cityscapes(tmp_path)
    assert images.frame_size == (WIDTH, HEIGHT)
    with pytest.warns(UserWarning, match="is empty"):
        assert len(list(images)) == 1


def test_shrinking_averages_the_image_and_picks_labels(tmp_path):
    """By hand: a quarter of each side averages blocks of 4×4 and takes one label out of each."""
    cityscapes(tmp_path)
    stored = np.repeat(ids(7, 8, size=(2, 1)), 4, 1).repeat(4, 0)
    save(tmp_path / "gtFine/val/lindau/lindau_000003_000019_gtFine_labelIds.png", stored)
    sample = Cityscapes(tmp_path, size=(2, 1))[0]
    blocks = frame(2).reshape(1, 4, 2, 4, 3).mean((1, 3))
    assert np.abs(sample.image - blocks).max() <= 0.5, "the average, rounded"
    assert sample.label.tolist() == [[0, 1]]
    assert sample.image.flags.c_contiguous


def test_growing_invents_no_class_and_keeps_the_centres(tmp_path):
    cityscapes(tmp_path)
    sample = Cityscapes(tmp_path, size=(3 * WIDTH, 3 * HEIGHT))[0]
    assert sample.image.shape == (12, 24, 3)
    assert set(np.unique(sample.label)) <= {0, 13, 255}
    # Threefold, the middle of each block of 3×3 lies exactly on a pixel of the original.
    assert np.array_equal(sample.label[1::3, 1::3], ids(0, 13, 255))
    assert np.abs(sample.image[1::3, 1::3].astype(int) - frame(2)).max() <= 1


def test_resized_labels_do_not_drift_against_the_image(tmp_path):
    """The centre of pixel x of w lies at (x + ½)/w; of 9 columns shrunk to 3, those are 1, 4, 7."""
    stored = np.tile(np.arange(9, dtype=np.uint8), (3, 1))
    save(tmp_path / "images/a.png", np.repeat(stored[..., None], 3, 2))
    save(tmp_path / "labels/a.png", stored)
    sample = Folder(tmp_path / "images", tmp_path / "labels", size=(3, 1))[0]
    assert sample.label.tolist() == [[1, 4, 7]]
    assert sample.image[0, :, 0].tolist() == [1, 4, 7]


@pytest.mark.parametrize("size", [(0, 4), (4,), 512, "512x256", (-1, 2)])
def test_a_size_that_is_none_is_refused_at_the_door(tmp_path, size):
    with pytest.raises(ValueError, match=r"size is \(width, height\)"):
        Cityscapes(cityscapes(tmp_path), size=size)


def test_spread_indices_are_few_distinct_and_reach_both_ends():
    for count in (1, 2, 9, 50, 51, 2975):
        indices = spread(count, 50)
        assert indices == sorted(set(indices))
        assert len(indices) == min(count, 50)
        assert (indices[0], indices[-1]) == (0, count - 1)


# ACDC


def acdc(root: Path, condition: str = "fog", split: str = "train", ref: str = "") -> Path:
    for seed, (sequence, number) in enumerate([("GP010475", 41), ("GOPR0475", 122)]):
        name = f"{condition}/{split}/{sequence}/{sequence}_frame_{number:06}"
        save(root / f"rgb_anon/{name}_rgb{ref}_anon.png", frame(seed))
        if split in ("train", "val"):
            save(root / f"gt/{name}_gt_labelTrainIds.png", ids(0, 18, 255))
            save(root / f"gt/{name}_gt_labelIds.png", ids(7))
            save(root / f"gt/{name}_gt_invIds.png", ids(1))
    return root


def test_acdc_comes_in_the_order_of_sequences_with_its_train_ids(tmp_path):
    images = Acdc(acdc(tmp_path), "fog")
    assert names(images) == [
        "fog/train/GOPR0475/GOPR0475_frame_000122_rgb_anon.png",
        "fog/train/GP010475/GP010475_frame_000041_rgb_anon.png",
    ]
    assert (images.kind, images.classes) == ("acdc", CLASSES)
    assert np.array_equal(images[0].image, frame(1))
    assert np.array_equal(images[0].label, ids(0, 18, 255))


def test_acdc_is_found_where_its_archives_unpack_to(tmp_path):
    acdc(tmp_path)
    for folder, name in [("rgb_anon_trainvaltest", "rgb_anon"), ("gt_trainval", "gt")]:
        (tmp_path / folder).mkdir()
        (tmp_path / name).rename(tmp_path / folder / name)
    images = Acdc(tmp_path, "fog")
    assert names(images)[0] == "fog/train/GOPR0475/GOPR0475_frame_000122_rgb_anon.png"
    assert images[0].label is not None


@pytest.mark.parametrize(("split", "ref"), [("test", ""), ("train_ref", "_ref")])
def test_acdc_splits_without_public_labels_open_without(tmp_path, split, ref):
    acdc(acdc(tmp_path), "night", split, ref)
    images = Acdc(tmp_path, "night", split)
    assert [sample.label for sample in images] == [None, None]
    assert images.classes == ()


def test_acdc_without_gt_says_so(tmp_path):
    acdc(tmp_path)
    (tmp_path / "gt").rename(tmp_path / "elsewhere")
    with pytest.raises(LayoutError, match=r"no label map in gt/fog/train.*labels=False"):
        Acdc(tmp_path, "fog")
    assert Acdc(tmp_path, "fog", labels=False)[0].label is None


def test_acdc_refuses_conditions_and_splits_it_has_not(tmp_path):
    acdc(tmp_path)
    with pytest.raises(ValueError, match=r"no condition 'sun'.*fog, night, rain, snow"):
        Acdc(tmp_path, "sun")
    with pytest.raises(LayoutError, match=r"no fog/val.*splits of fog: train"):
        Acdc(tmp_path, "fog", "val")
    with pytest.raises(LayoutError, match=r"no snow/train.*splits of snow: none"):
        Acdc(tmp_path, "snow")


def test_acdc_tells_what_is_missing_of_the_published_counts(tmp_path):
    """The night has 106 validation images, the other conditions 100."""
    acdc(acdc(tmp_path, "night", "val"))
    assert Acdc(tmp_path, "night", "val").missing() == (
        "104 of the 106 images of this condition and split",
        "night/train",
        "night/test",
        "condition 'rain'",
        "condition 'snow'",
    )
    assert Acdc(tmp_path, "fog").missing()[0].startswith("398 of the 400")


# CamVid


def segnet(root: Path) -> Path:
    for split in ("train", "test"):
        for number in (30, 0):
            name = f"0001TP_{number:06}.png"
            save(root / split / name, frame(number))
            save(root / f"{split}annot" / name, ids(*range(12)))
    return root


def original(root: Path, labels: np.ndarray) -> Path:
    save(root / "701_StillsRaw_full/0001TP_006690.png", frame(3, labels.shape[1::-1]))
    save(root / "LabeledApproved_full/0001TP_006690_L.png", labels)
    return root


def test_camvid_of_segnet_has_eleven_classes_and_void_is_ignored(tmp_path):
    images = CamVid(segnet(tmp_path))
    assert names(images) == ["test/0001TP_000000.png", "test/0001TP_000030.png"]
    assert (images.kind, len(images.classes)) == ("camvid", 11)
    assert np.array_equal(images[1].image, frame(30))
    assert np.array_equal(images[0].label, ids(*range(11), 255))


def test_camvid_of_segnet_refuses_an_id_beyond_void(tmp_path):
    save(segnet(tmp_path) / "testannot/0001TP_000000.png", ids(12, 3))
    with pytest.raises(UnreadableImage, match="class ids 12 are none"):
        CamVid(tmp_path)[0]


def test_original_camvid_colours_become_the_class_of_their_group(tmp_path):
    """By hand, from the published list of colours: one row of members for each class."""
    rows = {
        "Sky": [(128, 128, 128)],
        "Building": [(128, 0, 0), (0, 128, 64), (64, 192, 0), (64, 0, 64), (192, 0, 128)],
        "Pole": [(192, 192, 128), (0, 0, 64)],
        "Road": [(128, 64, 128), (128, 0, 192), (192, 0, 64)],
        "Pavement": [(0, 0, 192), (64, 192, 128), (128, 128, 192)],
        "Tree": [(128, 128, 0), (192, 192, 0)],
        "SignSymbol": [(192, 128, 128), (128, 128, 64), (0, 64, 64)],
        "Fence": [(64, 64, 128)],
        "Car": [(64, 0, 128), (64, 128, 192), (192, 128, 192), (192, 64, 128), (128, 64, 64)],
        "Pedestrian": [(64, 64, 0), (192, 128, 64), (64, 0, 192), (64, 128, 64)],
        "Bicyclist": [(0, 128, 192), (192, 0, 192)],
        "void": [(0, 0, 0)],
    }
    expected = np.full((12, 5), 255, np.uint8)
    colours = np.zeros((12, 5, 3), np.uint8)
    for row, members in enumerate(rows.values()):
        colours[row, : len(members)] = members
        expected[row, : len(members)] = row if row < 11 else 255
    images = CamVid(original(tmp_path, colours), "all")
    assert tuple(rows)[:11] == images.classes
    assert np.array_equal(images[0].label, expected)
    assert names(images) == ["0001TP_006690.png"]


def test_the_32_colours_of_camvid_are_32_and_use_every_class():
    assert len(COLOURS) == 32
    assert {name for _, name in COLOURS.values()} == {*CAMVID_CLASSES, None}
    assert len({name for name, _ in COLOURS.values()}) == 32


@pytest.mark.parametrize("colour", [(129, 128, 128), (64, 64, 64), (255, 255, 255)])
def test_a_colour_that_is_none_of_camvids_is_refused(tmp_path, colour):
    labels = np.full((HEIGHT, WIDTH, 3), 128, np.uint8)
    labels[1, 2] = colour
    with pytest.raises(UnreadableImage, match=rf"colours \({colour[0]}, {colour[1]}"):
        CamVid(original(tmp_path, labels), "all")[0]


def test_camvid_says_which_splits_its_form_has(tmp_path):
    with pytest.raises(LayoutError, match=r"no split 'all'.*There is: train, test"):
        CamVid(segnet(tmp_path / "a"), "all")
    labels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    with pytest.raises(LayoutError, match=r"no split 'test'.*There is: all"):
        CamVid(original(tmp_path / "b", labels))
    with pytest.raises(ValueError, match="no split 'tset'"):
        CamVid(tmp_path / "a", "tset")


def test_camvid_without_labels_opens_when_asked_and_counts_what_is_missing(tmp_path):
    segnet(tmp_path)
    (tmp_path / "testannot").rename(tmp_path / "old")
    with pytest.raises(LayoutError, match="no label map in testannot"):
        CamVid(tmp_path)
    images = CamVid(tmp_path, labels=False)
    assert images[0].label is None
    assert images.missing() == ("231 of the 233 images of split 'test'", "split 'val'")


# Folders


def test_a_folder_comes_in_natural_order_with_mixed_sizes_and_kinds(tmp_path):
    for i, name in enumerate(["10.png", "9.jpg", "deep/er/1.bmp", "B.webp", "a.PNG"]):
        save(tmp_path / name, frame(i, size=(4 + i, 3)))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._9.jpg").write_bytes(b"\0" * 30)
    (tmp_path / "Thumbs.db").write_bytes(b"\0" * 30)
    images = Folder(tmp_path)
    assert names(images) == ["9.jpg", "10.png", "a.PNG", "B.webp", "deep/er/1.bmp"]
    assert [s.image.shape[1] for s in images] == [5, 4, 8, 7, 6]
    assert images[1].label is None
    assert names(Folder(tmp_path, recursive=False)) == ["9.jpg", "10.png", "a.PNG", "B.webp"]


@pytest.mark.parametrize("ending", ["", "_label", "_labels", "_gt", "_mask"])
def test_label_maps_are_matched_by_path_and_stem(tmp_path, ending):
    save(tmp_path / "images/day/a.jpg", frame(0))
    save(tmp_path / "images/night/a.jpg", frame(1))
    save(tmp_path / f"labels/day/a{ending}.png", ids(1))
    save(tmp_path / f"labels/night/a{ending}.png", ids(2))
    images = Folder(tmp_path / "images", tmp_path / "labels")
    assert [int(sample.label[0, 0]) for sample in images] == [1, 2]


def test_the_same_stem_wins_over_one_with_an_ending(tmp_path):
    save(tmp_path / "images/a.png", frame())
    save(tmp_path / "images/a_gt.png", frame())
    save(tmp_path / "labels/a.png", ids(1))
    save(tmp_path / "labels/a_gt.png", ids(2))
    images = Folder(tmp_path / "images", tmp_path / "labels")
    assert [int(sample.label[0, 0]) for sample in images] == [1, 2]


def test_labels_inside_the_folder_of_images_are_no_images(tmp_path):
    save(tmp_path / "a.png", frame())
    save(tmp_path / "labels/a.png", ids(1))
    save(tmp_path / "labels2/b.png", frame())
    save(tmp_path / "labels/labels2/b.png", ids(1))
    assert names(Folder(tmp_path, tmp_path / "labels")) == ["a.png", "labels2/b.png"]
    with pytest.raises(ValueError, match="folder of their own"):
        Folder(tmp_path, tmp_path)


def test_with_class_names_other_ids_are_refused_and_without_any_is_taken(tmp_path):
    save(tmp_path / "images/a.png", frame())
    save(tmp_path / "labels/a.png", ids(0, 2, 254, 255))
    where = (tmp_path / "images", tmp_path / "labels")
    assert np.array_equal(Folder(*where)[0].label, ids(0, 2, 254, 255))
    with pytest.raises(UnreadableImage, match="class ids 2, 254 are none"):
        Folder(*where, classes=["no", "yes"])[0]


def test_labels_of_colours_are_refused_where_ids_are_expected(tmp_path):
    save(tmp_path / "images/a.png", frame())
    save(tmp_path / "labels/a.png", frame())
    with pytest.raises(UnreadableImage, match="labels are colours"):
        Folder(tmp_path / "images", tmp_path / "labels")[0]


def test_folders_without_images_or_matching_labels_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(LayoutError, match="no image in"):
        Folder(tmp_path / "empty")
    with pytest.raises(LayoutError, match="is no folder"):
        Folder(tmp_path / "absent")
    save(tmp_path / "images/a.png", frame())
    save(tmp_path / "labels/b.png", ids(0))
    save(tmp_path / "blurred/a.jpg", frame())
    for labels in ("labels", "blurred"):
        with pytest.raises(LayoutError, match="named like one of the 1 images"):
            Folder(tmp_path / "images", tmp_path / labels)


def test_names_are_the_same_where_systems_take_accents_apart(tmp_path):
    save(tmp_path / "Mu\u0308nster.png", frame())
    images = Folder(tmp_path)
    assert names(images) == ["M\u00fcnster.png"]
    assert np.array_equal(images[0].image, frame())


# All of them


def test_readers_go_through_pickle_and_read_the_same(tmp_path):
    cityscapes(tmp_path / "cs"), acdc(tmp_path / "acdc"), segnet(tmp_path / "camvid")
    for images in (
        Cityscapes(tmp_path / "cs"),
        Acdc(tmp_path / "acdc", "fog"),
        CamVid(tmp_path / "camvid"),
        Folder(tmp_path / "camvid/test", tmp_path / "camvid/testannot"),
    ):
        copy = pickle.loads(pickle.dumps(images))
        for ours, theirs in zip(images, copy, strict=True):
            assert ours.name == theirs.name
            assert np.array_equal(ours.image, theirs.image)
            assert np.array_equal(ours.label, theirs.label)


def test_opening_a_set_reads_few_headers_and_no_pixels(tmp_path, monkeypatch):
    for i in range(40):
        save(tmp_path / f"test/{i}.png", frame())
        save(tmp_path / f"testannot/{i}.png", ids(0))
    opened: Counter[str] = Counter()
    open_image = Image.open

    def counting(path: Path) -> Image.Image:
        image = open_image(path)
        opened["headers"] += 1
        monkeypatch.setattr(image, "load", lambda: pytest.fail("pixels were decoded"))
        return image

    monkeypatch.setattr(Image, "open", counting)
    assert len(CamVid(tmp_path)) == 40
    assert opened["headers"] <= 10


def test_the_order_of_the_file_system_does_not_matter(tmp_path, monkeypatch):
    import os

    cityscapes(tmp_path)
    expected = names(Cityscapes(tmp_path))
    scandir = os.scandir

    class Backwards:
        def __init__(self, path: Path) -> None:
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr("bestta.data.trees.os.scandir", Backwards)
    assert names(Cityscapes(tmp_path)) == expected


def test_a_damaged_frame_among_good_ones_ends_nothing(tmp_path):
    cityscapes(tmp_path)
    path = tmp_path / "leftImg8bit/val/lindau/lindau_000012_000019_leftImg8bit.png"
    path.write_bytes(path.read_bytes()[:-40])
    images = Cityscapes(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert len(list(images)) == 2
    assert len(warned) == len(images.skipped) == 1
    assert "lindau_000012" in str(warned[0].message)


def _shrunk(method: int) -> np.ndarray:
    """Label ids of a car, a person and a building on a road, an eighth of their size."""
    ids = np.full((512, 1024), 7, np.uint8)
    ids[:200] = 11
    for left, id_ in ((37, 26), (301, 24), (555, 33), (781, 26)):
        cv2.ellipse(ids, (left, 260), (90, 120), 0, 0, 360, id_, -1)
    return np.asarray(cv2.resize(ids, (128, 64), interpolation=method), dtype=np.uint8)


def _with_labels(root: Path, ids: np.ndarray) -> Path:
    for part, end in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelIds")):
        folder = root / part / "val" / "lindau"
        folder.mkdir(parents=True)
        pixels = ids if part == "gtFine" else np.zeros((*ids.shape, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"lindau_000000_000019_{end}.png")
    return root


def test_labels_that_were_interpolated_are_told_and_their_fringes_can_be_ignored(tmp_path):
    clean = _with_labels(tmp_path / "clean", _shrunk(cv2.INTER_NEAREST))
    blurred = _with_labels(tmp_path / "blurred", _shrunk(cv2.INTER_AREA))
    assert not any("interpolation" in phrase for phrase in Cityscapes(clean).missing())
    assert any("interpolation" in phrase for phrase in Cityscapes(blurred).missing())
    mending = Cityscapes(blurred, ignore_fringes=True)
    assert not any("interpolation" in phrase for phrase in mending.missing())

    true = set(np.unique(Cityscapes(clean)[0].label))
    fringed = Cityscapes(blurred)[0].label
    mended = Cityscapes(blurred, ignore_fringes=True)[0].label
    foreign = [(~np.isin(label, [*true, 255])).sum() for label in (fringed, mended)]
    assert foreign[0] > 100
    assert foreign[1] < foreign[0] / 10
    kept = mended != 255
    assert kept.mean() > 0.85
    assert np.array_equal(mended[kept], fringed[kept])
