"""Reading one image or label map, sets of them, and folders that are not what they should be."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import warnings
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from bestta.data import samples
from bestta.data.samples import (
    ImageSet,
    Sample,
    UnreadableImage,
    check_size,
    image_size,
    read_image,
    read_label,
)
from bestta.data.trees import files_below, found, layout_error, locate, natural_order


def picture(height: int = 5, width: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(path: Path, pixels: np.ndarray, mode: str | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def header_of_png(width: int, height: int) -> bytes:
    """The first bytes of a greyscale PNG, as the PNG specification has them: signature and IHDR."""
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    end = b"IEND"
    chunks = [(13, ihdr), (0, end)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", size) + body + struct.pack(">I", zlib.crc32(body))
        for size, body in chunks
    )


class Numbers(ImageSet):
    """Samples that are their own index; those listed are broken."""

    kind = "numbers"
    classes = ("zero", "one")

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"number/{index}"

    def read(self, index: int) -> Sample:
        if index in self.broken:
            raise UnreadableImage(f"{index} is broken")
        return Sample(self.name(index), np.full((1, 1, 3), index, np.uint8), index)

    def peek(self, index: int) -> tuple[int, int]:
        return index, 1


# Images


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".ppm"])
def test_lossless_images_come_back_as_they_were(tmp_path, suffix):
    pixels = picture()
    read = read_image(saved(tmp_path / f"a{suffix}", pixels))
    assert np.array_equal(read, pixels)
    assert read.dtype == np.uint8
    assert read.flags.c_contiguous
    assert read.flags.writeable


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "CMYK", "LA"])
def test_images_of_any_eight_bit_mode_become_rgb(tmp_path, mode):
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    assert read_image(saved(path, picture(), mode)).shape == (5, 7, 3)


def test_a_grey_image_of_sixteen_bits_is_refused_rather_than_clipped_to_white(tmp_path):
    path = saved(tmp_path / "deep.png", np.full((4, 4), 300, np.uint16))
    with pytest.raises(UnreadableImage, match="more than 8 bits"):
        read_image(path)


def test_a_photograph_taken_sideways_comes_upright_and_its_header_agrees(tmp_path):
    """EXIF orientation 6: what is stored as the left column is seen as the top row."""
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(tmp_path / "phone.jpg", pixels, exif=exif, quality=100)
    read = read_image(path)
    assert read.shape == (32, 16, 3)
    assert image_size(path) == (16, 32)
    assert read[:6].min() > 200
    assert read[10:].max() < 50


def broken_files(folder: Path) -> dict[str, Path]:
    png = saved(folder / "whole.png", picture(40, 40)).read_bytes()
    jpg = saved(folder / "whole.jpg", picture(40, 40)).read_bytes()
    content = {
        "broken.png": png[:60] + bytes(40) + png[100:],
        "truncated.png": png[: len(png) // 2],
        "truncated.jpg": jpg[: len(jpg) // 2],
        "empty.png": b"",
        "text.png": b"404: not found\n" * 20,
        "only_header.jpg": jpg[:40],
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    (folder / "folder.png").mkdir()
    paths = {name: folder / name for name in content}
    return {**paths, "folder.png": folder / "folder.png", "absent.png": folder / "absent.png"}


def test_every_kind_of_broken_file_is_unreadable_by_name(tmp_path):
    for name, path in broken_files(tmp_path).items():
        for read in (read_image, read_label):
            with pytest.raises(UnreadableImage) as caught:
                read(path)
            assert name in str(caught.value)
            assert str(caught.value).count(str(path)) == 1, "the path is named once"


def test_the_reason_is_plain_where_it_is_known(tmp_path):
    paths = broken_files(tmp_path)
    for name, reason in [("empty.png", "is empty"), ("absent.png", "no such file")]:
        with pytest.raises(UnreadableImage, match=reason):
            read_image(paths[name])


@given(st.sampled_from(["png", "jpg", "bmp", "webp", "tif", "ppm"]), st.data())
def test_damaged_bytes_give_an_image_or_unreadable_and_nothing_else(tmp_path_factory, suffix, data):
    folder = tmp_path_factory.mktemp("damaged")
    path = saved(folder / f"a.{suffix}", picture(8, 8))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    for read in (read_image, read_label, image_size):
        with contextlib.suppress(UnreadableImage):
            read(path)


@pytest.mark.parametrize("side", [9_450, 12_000, 50_000])
def test_an_image_too_large_is_refused_before_it_is_decoded(tmp_path, side):
    """The file has no pixels at all, so decoding would fail for another reason.

    Below Pillow's limit, above it (where Pillow warns), and above twice that (where it raises).
    """
    assert side**2 > samples.MOST_PIXELS
    path = tmp_path / "bomb.png"
    path.write_bytes(header_of_png(side, side))
    for read in (read_image, read_label, image_size):
        with pytest.raises(UnreadableImage, match=r"bomb\.png.*89,000,000") as caught:
            read(path)
        assert str(caught.value).count("bomb.png") == 1


def test_the_header_alone_tells_the_size(tmp_path):
    path = tmp_path / "header.png"
    path.write_bytes(header_of_png(640, 480))
    assert image_size(path) == (640, 480)


def test_a_warning_shown_once_is_not_shown_again_for_every_image_read(tmp_path):
    """Python forgets what it has shown whenever warning filters are changed, even for a moment."""
    path = saved(tmp_path / "a.png", picture())
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("once", stacklevel=1)
            read_image(path)
    assert len(shown) == 1


# Label maps


def test_a_palette_label_map_gives_its_indices(tmp_path):
    ids = np.arange(12, dtype=np.uint8).reshape(3, 4)
    image = Image.fromarray(ids)
    image.putpalette([value for i in range(256) for value in (255 - i, i, 7)])
    image.save(tmp_path / "palette.png")
    with Image.open(tmp_path / "palette.png") as stored:
        assert stored.mode == "P"
    assert np.array_equal(read_label(tmp_path / "palette.png"), ids)


def test_a_label_map_of_sixteen_bits_is_read_if_its_ids_fit_in_eight(tmp_path):
    ids = np.array([[0, 18], [33, 255]], np.uint16)
    read = read_label(saved(tmp_path / "deep.png", ids))
    assert read.dtype == np.uint8
    assert np.array_equal(read, ids)


def test_a_label_map_with_ids_beyond_a_byte_is_refused_and_not_wrapped(tmp_path):
    path = saved(tmp_path / "instances.png", np.array([[7, 24_001]], np.uint16))
    with pytest.raises(UnreadableImage, match="24001"):
        read_label(path)


def test_a_label_map_with_negative_ids_is_refused_and_not_wrapped(tmp_path):
    path = saved(tmp_path / "negative.tif", np.array([[-5, 3]], np.int32))
    with pytest.raises(UnreadableImage, match="-5"):
        read_label(path)


def test_a_label_map_of_fractions_is_refused(tmp_path):
    path = saved(tmp_path / "fractions.tif", np.array([[0.5, 3]], np.float32))
    with pytest.raises(UnreadableImage, match="fractions"):
        read_label(path)


def test_a_label_map_of_one_bit_has_the_ids_zero_and_one(tmp_path):
    path = saved(tmp_path / "mask.png", np.array([[0, 255, 0]], np.uint8), "1")
    assert read_label(path).tolist() == [[0, 1, 0]]


def test_a_picture_as_label_map_gives_colours(tmp_path):
    pixels = picture()
    assert np.array_equal(read_label(saved(tmp_path / "colours.png", pixels)), pixels)


def test_labels_of_another_size_are_refused_with_both_sizes():
    with pytest.raises(UnreadableImage, match=r"4×2, their image is 8×6"):
        check_size(np.zeros((6, 8, 3), np.uint8), np.zeros((2, 4), np.uint8), Path("l.png"))


# Sets


def test_iteration_leaves_broken_samples_out_by_name_and_counts_them():
    numbers = Numbers(5, broken=(1, 4))
    with pytest.warns(UserWarning, match="skipped number/") as warned:
        seen = [sample.label for sample in numbers]
    assert seen == [0, 2, 3]
    assert [skipped.name for skipped in numbers.skipped] == ["number/1", "number/4"]
    assert [str(w.message) for w in warned] == [
        "skipped number/1: 1 is broken",
        "skipped number/4: 4 is broken",
    ]
    assert all(w.filename == __file__ for w in warned), "the warning points at the loop"


def test_a_second_pass_counts_no_broken_sample_twice():
    numbers = Numbers(3, broken=(1,))
    with pytest.warns(UserWarning, match="number/1"):
        list(numbers)
    assert [sample.label for sample in numbers] == [0, 2]
    assert len(numbers.skipped) == 1


def test_indexing_a_broken_sample_raises():
    with pytest.raises(UnreadableImage, match="2 is broken"):
        Numbers(3, broken=(2,))[2]


@given(st.integers(0, 12), st.integers(-15, 15))
def test_indices_are_those_of_a_list(count, index):
    expected = list(range(count))
    try:
        value = expected[index]
    except IndexError:
        with pytest.raises(IndexError, match=f"no sample {index} in a set of {count}"):
            Numbers(count)[index]
    else:
        assert Numbers(count)[index].label == value


slices = st.slices(12)


@given(st.integers(0, 12), slices, slices)
def test_slices_and_slices_of_slices_are_those_of_a_list(count, first, second):
    numbers = Numbers(count)
    expected = list(range(count))[first]
    assert [sample.label for sample in numbers[first]] == expected
    assert [sample.label for sample in numbers[first][second]] == expected[second]
    assert [numbers[first].name(i) for i in range(len(expected))] == [
        f"number/{i}" for i in expected
    ]


def test_a_slice_describes_itself_as_its_set_and_counts_its_own_skipped():
    numbers = Numbers(6, broken=(3,))
    part = numbers[2:5]
    assert (part.kind, part.classes, len(part)) == ("numbers", ("zero", "one"), 3)
    with pytest.warns(UserWarning, match="number/3"):
        assert [sample.label for sample in part] == [2, 4]
    assert [skipped.name for skipped in part.skipped] == ["number/3"]
    assert numbers.skipped == []
    assert part[-1].label == 4
    assert part.peek(2) == (4, 1)


def test_a_slice_goes_through_pickle():
    part = pickle.loads(pickle.dumps(Numbers(6)[::2]))
    assert [sample.label for sample in part] == [0, 2, 4]


# Folders


def test_numbers_in_names_sort_by_value_and_folders_first_come_first():
    names = ["b/1.png", "a10.png", "a2.png", "a/x.png", "A2.png", "a02.png", "a2/1.png"]
    expected = ["a/x.png", "a2/1.png", "A2.png", "a02.png", "a2.png", "a10.png", "b/1.png"]
    # "a2" and "a02" are one number: the letters decide, upper case and zero first.
    assert sorted(names, key=natural_order) == expected


@given(st.lists(st.text("aAb01/._²", min_size=1, max_size=6), unique=True), st.randoms())
def test_the_order_depends_on_the_names_alone(names, random):
    shuffled = random.sample(names, len(names))
    assert sorted(names, key=natural_order) == sorted(shuffled, key=natural_order)


def test_what_systems_leave_behind_is_no_file_of_ours(tmp_path):
    kept = ["a.png", "b/c.PNG"]
    litter = ["._a.png", ".DS_Store", "Thumbs.db", "__MACOSX/a.png", ".hidden/a.png", "b/._c.PNG"]
    for name in (*kept, *litter, "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert files_below(tmp_path, [".png"]) == kept
    assert files_below(tmp_path, [".png"], recursive=False) == ["a.png"]


def test_links_are_followed_but_never_in_circles(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.png").write_bytes(b"")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real/up").symlink_to(tmp_path)
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    assert files_below(tmp_path, [".png"]) == ["gone.png", "linked/a.png", "real/a.png"]


def test_a_folder_is_located_at_the_top_or_one_level_down(tmp_path):
    (tmp_path / "archive/gt/gt").mkdir(parents=True)
    assert locate(tmp_path, "gt") == tmp_path / "archive/gt"
    assert locate(tmp_path / "archive", "gt") == tmp_path / "archive/gt"
    assert locate(tmp_path, "rgb") is None
    assert locate(tmp_path / "absent", "gt") is None


def test_the_error_shows_the_tree_that_was_expected_and_the_one_found(tmp_path):
    (tmp_path / "images/city").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("")
    for i in range(12):
        (tmp_path / "images" / f"{i:02}.png").write_text("")
    text = str(layout_error("Some set", tmp_path, "\n<folder>/\n  frames/\n", "no frames."))
    assert text.splitlines()[0] == "no frames."
    assert "Some set is expected as\n  <folder>/\n    frames/\n" in text
    assert f"found\n  {tmp_path}/\n    images/\n      city/\n      00.png\n" in text
    assert "      ... and 5 more\n    notes.txt" in text, "13 entries, 8 shown"


def test_a_folder_that_does_not_exist_is_shown_with_what_lies_beside_it(tmp_path):
    (tmp_path / "cityscapes").mkdir()
    assert "does not exist, but there is cityscapes" in found(tmp_path / "cityscape")
    assert "a file" in found(saved(tmp_path / "a.png", picture()))


def test_a_format_that_decodes_before_its_size_is_known_is_refused(tmp_path):
    """Pillow unpacks icons as it opens them: too late to refuse one that is a bomb."""
    icon = io.BytesIO()
    Image.new("RGBA", (16, 16)).save(icon, format="ICO")
    (tmp_path / "a.png").write_bytes(icon.getvalue())
    with pytest.raises(UnreadableImage, match="cannot identify"):
        image_size(tmp_path / "a.png")


def grey_png(path, rows, bits):
    """A greyscale PNG of few bits a pixel, written by hand: Pillow saves none."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), bits, 0, 0, 0, 0)
    packed = b""
    for row in rows:
        text = "".join(f"{value:0{bits}b}" for value in row)
        text += "0" * (-len(text) % 8)
        packed += b"\0" + bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(packed)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_class_ids_of_few_bits_are_the_ids_and_not_grey_values(tmp_path, bits):
    ids = [[0, 1, 2**bits - 1], [1, 1, 0]]
    grey_png(tmp_path / "label.png", ids, bits)
    assert read_label(tmp_path / "label.png").tolist() == ids


def test_truncated_images_are_refused_even_if_another_library_trusts_them(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableImage):
        read_image(tmp_path / "a.png")
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_a_set_that_lacks_a_part_is_refused_when_it_is_made_and_not_when_it_is_read():
    class Nameless(ImageSet):
        def __len__(self):
            return 1

        def read(self, index):
            return Sample("a", np.zeros((1, 1, 3), np.uint8))

    with pytest.raises(TypeError, match="name"):
        Nameless()


@given(size=st.integers(0, 300), count=st.integers(1, 300))
def test_some_of_a_set_are_spread_over_all_of_it(size, count):
    some = Numbers(size).some(count)
    assert len(some) == min(size, count)
    places = [int(some.name(i).removeprefix("number/")) for i in range(len(some))]
    # With the set's end as one more place, no two gaps differ by more than one.
    gaps = {b - a for a, b in pairwise([*places, size])}
    assert not gaps or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)
    assert places[:1] == ([0] if size else [])
