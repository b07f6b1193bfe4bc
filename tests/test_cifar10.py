"""CIFAR-10 in its two forms, CIFAR-10-C, and files that only claim to be one of them."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bestta.data import Cifar10, Cifar10C, LayoutError
from bestta.data.cifar10 import CLASSES, CORRUPTIONS

ROWS = 10_000


def batch(seed: int) -> tuple[np.ndarray, list[int]]:
    """Images (10000, 32, 32, 3), random where tests look and black elsewhere, and labels."""
    rng = np.random.default_rng(seed)
    images = np.zeros((ROWS, 32, 32, 3), np.uint8)
    images[[0, 1, 42, ROWS - 1]] = rng.integers(0, 256, (4, 32, 32, 3))
    return images, rng.integers(0, 10, ROWS).tolist()


def planes(images: np.ndarray) -> np.ndarray:
    """Rows of 1024 reds, 1024 greens and 1024 blues, as the home page of CIFAR-10 has it."""
    return np.stack([images[..., c].reshape(-1, 1024) for c in range(3)], 1).reshape(-1, 3072)


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """What cPickle of Python 2 wrote, opcode by opcode: its strings are bytes of no encoding."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    kind = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    array += number(0) + b"\x85" + text(b"b") + b"\x87R"
    shape = number(data.shape[0]) + number(data.shape[1]) + b"\x86"
    raw = b"T" + struct.pack("<I", data.size) + data.tobytes()
    array += b"(" + number(1) + shape + kind + b"\x89" + raw + b"tb"
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    items = text(b"batch_label") + text(b"testing batch 1 of 1") + text(b"data") + array
    return b"\x80\x02}(" + items + text(b"labels") + listed + b"u."


@pytest.fixture
def tmp_path(tmp_path):
    """Batches are 30 MB each, and pytest would keep those of three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def ten_thousand() -> tuple[np.ndarray, list[int]]:
    return batch(0)


@pytest.fixture(scope="module")
def official(tmp_path_factory, ten_thousand) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("official") / "cifar-10-batches-py"
    folder.mkdir()
    images, labels = ten_thousand
    (folder / "test_batch").write_bytes(python2_pickle(planes(images), labels))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def package(tmp_path_factory, ten_thousand) -> Iterator[Path]:
    """The npm form of the same test images, and two different batches to train on."""
    folder = tmp_path_factory.mktemp("npm") / "package"
    folder.mkdir()
    train = [batch(i % 2 + 1) for i in range(5)]
    named = {"test_batch": ten_thousand, **{f"data_batch_{i + 1}": b for i, b in enumerate(train)}}
    for name, (images, _) in named.items():
        picture = Image.fromarray(images.reshape(ROWS, 1024, 3))
        picture.save(folder / f"{name}.png", compress_level=1)
    (folder / "test_lables.json").write_text(json.dumps(ten_thousand[1]))
    (folder / "train_lables.json").write_text(json.dumps([x for _, ls in train for x in ls]))
    yield folder
    shutil.rmtree(folder)


# Both forms


@pytest.mark.parametrize("form", ["official", "package"])
@pytest.mark.parametrize("parent", [False, True])
def test_both_forms_give_the_images_and_labels_that_went_in(form, parent, request, ten_thousand):
    folder = request.getfixturevalue(form)
    images = Cifar10(folder.parent if parent else folder)
    assert len(images) == ROWS
    assert (images.kind, images.classes) == ("cifar10", CLASSES)
    for i in (0, 1, 42, ROWS - 1):
        sample = images[i]
        assert sample.name == f"test/{i:05d}"
        assert np.array_equal(sample.image, ten_thousand[0][i])
        assert sample.image.flags.c_contiguous
        assert sample.label == ten_thousand[1][i]
        assert type(sample.label) is int


def test_train_is_the_five_batches_in_order_with_their_labels(package):
    images = Cifar10(package, "train")
    assert len(images) == 5 * ROWS
    for number in range(5):
        pixels, labels = batch(number % 2 + 1)
        sample = images[number * ROWS + 42]
        assert sample.name == f"train/{number * ROWS + 42:05d}"
        assert np.array_equal(sample.image, pixels[42])
        assert sample.label == labels[42]


def test_a_batch_is_read_when_first_needed_and_once(package, monkeypatch):
    from bestta.data import cifar10

    read: list[str] = []
    original = cifar10._read_batch

    def noting(path: Path, *rest):
        read.append(path.name)
        return original(path, *rest)

    monkeypatch.setattr(cifar10, "_read_batch", noting)
    images = Cifar10(package, "train")
    assert read == []
    for i in (ROWS, 3, ROWS + 1, 5):
        images[i]
    assert read == ["data_batch_2.png", "data_batch_1.png"]


def test_what_a_user_does_to_an_image_stays_with_that_image(official):
    images = Cifar10(official)
    before = images[42].image.copy()
    images[42].image[:] = 0
    assert np.array_equal(images[42].image, before)


def test_a_pickled_set_takes_its_paths_along_and_not_its_images(official):
    images = Cifar10(official)
    expected = images[42]
    data = pickle.dumps(images)
    assert len(data) < 2000
    assert np.array_equal(pickle.loads(data)[42].image, expected.image)


def test_an_unknown_split_is_refused(official):
    with pytest.raises(ValueError, match="no split 'val' in CIFAR-10; it has train, test"):
        Cifar10(official, "val")


def test_missing_batches_are_named_and_the_trees_shown(official, tmp_path):
    with pytest.raises(LayoutError, match="no data_batch_1, data_batch_2") as caught:
        Cifar10(official, "train")
    assert "test_batch" in str(caught.value).split("found")[1]
    with pytest.raises(LayoutError, match="CIFAR-10 is expected as"):
        Cifar10(tmp_path / "absent")


# Pickles


def test_what_these_tests_take_for_a_pickle_of_python_2_is_one_to_numpy(official, ten_thousand):
    with (official / "test_batch").open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the name numpy.core
        stored = pickle.load(file, encoding="bytes")
    assert np.array_equal(stored[b"data"], planes(ten_thousand[0]))
    assert stored[b"labels"] == ten_thousand[1]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_batch(folder: Path, content: object, protocol: int = 2) -> Path:
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol)
    (folder / "test_batch").write_bytes(data)
    # What follows a pickle is not read; a file so short would be refused before it is opened.
    os.truncate(folder / "test_batch", max(len(data), 31_000_000))
    return folder


def test_code_in_a_batch_is_refused_by_name_and_not_run(tmp_path):
    target = tmp_path / "made by the pickle"
    write_batch(tmp_path, {"data": Evil(target), "labels": []})
    with pytest.raises(LayoutError, match=r"asks for (posix|nt)\.mkdir.*was not run"):
        Cifar10(tmp_path)[0]
    assert not target.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [("builtins", "eval"), ("__builtin__", "getattr"), ("os", "system"), ("numpy", "load"),
     ("codecs", "encode"), ("numpy.core.multiarray", "scalar"), ("numpy", "ndarray.tofile")],
)  # fmt: skip
def test_names_beyond_the_few_that_batches_need_are_refused(tmp_path, module, name):
    write_batch(tmp_path, f"\x80\x02c{module}\n{name}\n.".encode("latin1"))
    with pytest.raises(LayoutError, match=f"asks for {module}.{name}"):
        Cifar10(tmp_path)[0]


def test_names_with_dots_do_not_reach_into_what_is_allowed(tmp_path):
    """Protocol 4 looks up ``a.b.c`` step by step: from a stand-in one could climb anywhere."""
    dotted = b"\x80\x04\x8c\x05numpy\x8c\x15ndarray.__init__.__globals__\x93."
    write_batch(tmp_path, dotted.replace(b"\x15", bytes([len("ndarray.__init__.__globals__")])))
    with pytest.raises(LayoutError, match=r"asks for numpy\.ndarray\.__init__"):
        Cifar10(tmp_path)[0]


@pytest.mark.parametrize(("protocol", "core"), [(2, "core"), (2, "_core"), (3, "core"), (5, None)])
def test_batches_that_python_3_wrote_again_are_read(tmp_path, protocol, core, ten_thousand):
    images, labels = ten_thousand
    data = pickle.dumps({"data": planes(images), "labels": labels}, protocol)
    if core:  # NumPy 2 moved numpy.core, and a file has the name of its day
        start, end = data.index(b"cnumpy."), data.index(b".multiarray\n")
        data = data[:start] + f"cnumpy.{core}".encode() + data[end:]
    sample = Cifar10(write_batch(tmp_path, data))[42]
    assert np.array_equal(sample.image, images[42])
    assert sample.label == labels[42]


def good() -> dict[str, object]:
    return {"data": np.zeros((ROWS, 3072), np.uint8), "labels": [0] * ROWS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros((9, 3072), np.uint8)}, "data is 9×3072, expected 10000×3072"),
        ({"data": np.zeros((ROWS, 3072), np.int8)}, "data is no array of bytes"),
        ({"data": np.zeros((20, 3072), np.float32)}, "data is no array of bytes"),
        ({"data": np.array([["a"]], dtype=object)}, "data is no array of bytes"),
        ({"data": [0, 1]}, "data is no array of bytes"),
        ({"labels": [0] * 9_999}, "9999 labels, expected 10000"),
        ({"labels": "cat"}, "no list of labels"),
        ({"labels": [10] * ROWS}, "no class ids 0 to 9"),
        ({"labels": ["0"] * ROWS}, "no class ids 0 to 9"),
    ],
)
def test_a_batch_that_is_not_as_it_should_be_says_how(tmp_path, change, message):
    write_batch(tmp_path, {**good(), **change})
    with pytest.raises(LayoutError, match=message):
        Cifar10(tmp_path)[0]


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x02]q.", b"\x80\x02}q\x00("])
def test_a_file_that_is_no_batch_is_a_clear_error(tmp_path, content):
    with pytest.raises(LayoutError, match="test_batch"):
        Cifar10(write_batch(tmp_path, content))[0]


def test_a_batch_cut_short_is_a_clear_error(tmp_path, official):
    whole = (official / "test_batch").read_bytes()
    (tmp_path / "test_batch").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LayoutError, match="more than 30,720,000"):  # on opening, not amid a run
        Cifar10(tmp_path)
    with pytest.raises(LayoutError, match="no batch of CIFAR-10"):
        Cifar10(write_batch(tmp_path, whole[: len(whole) // 2]))[0]


def test_a_picture_cut_short_is_refused_on_opening(tmp_path):
    path = write_pictures(tmp_path) / "test_batch.png"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LayoutError, match=r"test_batch\.png: the picture does not end"):
        Cifar10(tmp_path)


def test_the_split_that_is_not_there_is_told(official, package):
    assert Cifar10(official).missing()[0].startswith("split 'train': no data_batch_1")
    assert Cifar10(package).missing() == ()


def test_a_broken_batch_ends_a_loop_at_once(tmp_path):
    """All its images are gone, so it is no case of leaving one out: 10,000 warnings help nobody."""
    with pytest.raises(LayoutError):
        list(Cifar10(write_batch(tmp_path, b"no pickle")))


# Pictures


def write_pictures(folder: Path, size: tuple[int, int] = (1024, ROWS), labels: object = None):
    Image.new("RGB", size).save(folder / "test_batch.png", compress_level=1)
    (folder / "test_lables.json").write_text(json.dumps([1] * ROWS if labels is None else labels))
    return folder


def test_a_picture_of_another_size_is_refused_on_opening(tmp_path):
    with pytest.raises(LayoutError, match="1024×99 pixels, expected 1024×10000"):
        Cifar10(write_pictures(tmp_path, (1024, 99)))


def test_a_picture_that_is_none_is_refused_on_opening(tmp_path):
    write_pictures(tmp_path, (1, 1))
    (tmp_path / "test_batch.png").write_bytes(b"")
    with pytest.raises(LayoutError, match=r"test_batch\.png: the file is empty"):
        Cifar10(tmp_path)


def test_labels_that_are_too_few_or_none_are_refused(tmp_path):
    for labels, message in [
        ([1, 2], "2 labels, expected 10000"),
        ({"a": 1}, "dict labels, expected 10000"),
        ([True] * ROWS, "no class ids"),
    ]:
        with pytest.raises(LayoutError, match=message):
            Cifar10(write_pictures(tmp_path, labels=labels))[0]
    (tmp_path / "test_lables.json").write_text("[1, 2")
    with pytest.raises(LayoutError, match=r"test_lables\.json"):
        Cifar10(tmp_path)[0]
    (tmp_path / "test_lables.json").unlink()
    with pytest.raises(LayoutError, match=r"no test_lables\.json"):
        Cifar10(tmp_path)


# CIFAR-10-C


@pytest.fixture(scope="module")
def corrupted(tmp_path_factory) -> Iterator[Path]:
    """Files of full length that take no space: only the images that tests look at are written."""
    folder = tmp_path_factory.mktemp("c") / "CIFAR-10-C"
    folder.mkdir()
    for name in ("fog", "gaussian_noise"):
        array = np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=(5 * ROWS, 32, 32, 3)
        )
        for severity in range(1, 6):
            array[(severity - 1) * ROWS + 42] = severity
    labels = np.tile(np.arange(ROWS) % 10, 5).astype(np.uint8)
    np.save(folder / "labels.npy", labels)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_severities_are_stacked_from_one_to_five(corrupted, severity):
    images = Cifar10C(corrupted.parent, "fog", severity)
    assert len(images) == ROWS
    assert (images.kind, images.classes) == ("cifar10c", CLASSES)
    sample = images[42]
    assert sample.name == f"fog/{severity}/00042"
    assert (sample.image == severity).all()
    assert sample.label == 2
    assert images[41].image.max() == 0


def test_corrupted_images_are_copies_that_can_be_written_to(corrupted):
    image = Cifar10C(corrupted, "fog")[42].image
    image[:] = 0
    assert type(image) is np.ndarray
    assert (Cifar10C(corrupted, "fog")[42].image == 5).all()


def test_the_file_is_mapped_and_not_read(corrupted):
    assert isinstance(Cifar10C(corrupted, "fog")._images, np.memmap)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04garbage", b"\x93NUMPY\x01\x00\x00\x20" + b"(" * 8192]
)
def test_an_array_that_is_broken_in_any_way_is_a_clear_error(tmp_path, corrupted, content):
    (tmp_path / "labels.npy").symlink_to(corrupted / "labels.npy")
    (tmp_path / "fog.npy").write_bytes(content)
    with pytest.raises(LayoutError, match=r"fog\.npy: (no array of NumPy|an archive)"):
        Cifar10C(tmp_path, "fog")


def test_a_pickled_map_is_opened_again_and_not_sent(corrupted):
    images = Cifar10C(corrupted, "fog", 3)
    data = pickle.dumps(images)
    assert len(data) < 2 * ROWS
    assert (pickle.loads(data)[42].image == 3).all()


def test_a_corruption_that_is_not_there_is_answered_with_those_that_are(corrupted):
    with pytest.raises(LayoutError, match=r"Did you mean 'fog'.*There are: fog, gaussian_noise"):
        Cifar10C(corrupted, "fogg")


@pytest.mark.parametrize("severity", [0, 6, "high"])
def test_a_severity_that_is_none_is_refused(corrupted, severity):
    with pytest.raises(ValueError, match="severity is 1 to 5"):
        Cifar10C(corrupted, "fog", severity)


def test_corruptions_without_a_file_are_told(corrupted):
    missing = Cifar10C(corrupted, "fog").missing()
    assert len(missing) == len(CORRUPTIONS) - 2 == 13
    assert "corruption 'snow'" in missing
    assert "corruption 'fog'" not in missing


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((9, 32, 32, 3), np.uint8), "9×32×32×3, expected 50000×32×32×3"),
        (np.array([{}], dtype=object), "no array of NumPy"),
        (b"", "no array of NumPy"),
        (b"404", "no array of NumPy"),
    ],
)
def test_a_file_of_wrong_content_is_refused_with_what_was_expected(tmp_path, array, message):
    if isinstance(array, bytes):
        (tmp_path / "fog.npy").write_bytes(array)
    else:
        np.save(tmp_path / "fog.npy", array)
    with pytest.raises(LayoutError, match=message):
        Cifar10C(tmp_path, "fog")


def test_floats_a_file_cut_short_and_an_archive_are_refused(tmp_path, corrupted):
    shape = (5 * ROWS, 32, 32, 3)
    np.lib.format.open_memmap(tmp_path / "fog.npy", mode="w+", dtype=np.float16, shape=shape)
    with pytest.raises(LayoutError, match="float16, expected uint8"):
        Cifar10C(tmp_path, "fog")
    with (corrupted / "fog.npy").open("rb") as file:
        (tmp_path / "fog.npy").write_bytes(file.read(10_000))
    with pytest.raises(LayoutError, match="not all of it"):
        Cifar10C(tmp_path, "fog")
    archive = io.BytesIO()
    np.savez(archive, a=np.zeros(3))
    (tmp_path / "fog.npy").write_bytes(archive.getvalue())
    with pytest.raises(LayoutError, match="an archive, expected"):
        Cifar10C(tmp_path, "fog")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "no labels.npy"),
        (np.zeros(ROWS, np.uint8), "10000, expected 50000"),
        (np.full(5 * ROWS, 10), "expected class ids 0 to 9"),
        (np.zeros(5 * ROWS), "float64"),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path, corrupted, labels, message):
    (tmp_path / "fog.npy").symlink_to(corrupted / "fog.npy")
    if labels is not None:
        np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(LayoutError, match=message):
        Cifar10C(tmp_path, "fog")


def test_a_folder_without_arrays_is_answered_with_both_trees(tmp_path):
    with pytest.raises(LayoutError, match=r"no \.npy file") as caught:
        Cifar10C(tmp_path, "fog")
    assert "labels.npy" in str(caught.value)


def test_reading_batches_imports_nothing_that_a_pickle_names(tmp_path):
    write_batch(tmp_path, b"\x80\x02cthis\ns\n.")
    with pytest.raises(LayoutError, match=r"asks for this\.s"):
        Cifar10(tmp_path)[0]
    assert "this" not in sys.modules
