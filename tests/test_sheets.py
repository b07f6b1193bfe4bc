"""Contact sheets and tensors: what is shown and what a model is given is what was read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import ImageDraw

from bestta.data import ImageSet, Sample, Streets
from bestta.data.classes import CLASSES, PALETTE
from bestta.data.corruptions import corrupt
from bestta.data.samples import read_image
from bestta.data.sheets import colour, corruption_sheet, grid, sample_sheet, save_sheet
from bestta.data.tensors import CIFAR10, IMAGENET, to_batches, to_tensor


class Plain(ImageSet):
    """Images of one grey each, in two sizes."""

    def __len__(self) -> int:
        return 6

    def name(self, index: int) -> str:
        return f"plain/{index}"

    def read(self, index: int) -> Sample:
        height = 8 if index < 4 else 10
        return Sample(self.name(index), np.full((height, 16, 3), 40 * index, np.uint8))


def holds(sheet: np.ndarray, picture: np.ndarray) -> bool:
    """Whether ``picture`` lies somewhere on ``sheet``, pixel for pixel."""
    h, w = picture.shape[:2]
    starts = sheet[: len(sheet) - h + 1, : sheet.shape[1] - w + 1] == picture[0, 0]
    corners = np.argwhere(starts.all(-1))
    return any(np.array_equal(sheet[y : y + h, x : x + w], picture) for y, x in corners)


def test_every_picture_lies_on_the_grid_unchanged():
    numbers = np.random.default_rng(0)
    rows = [[numbers.integers(0, 256, (9, 24, 3), np.uint8) for _ in range(3)] for _ in range(2)]
    sheet = grid(rows, row_names=["one", "another"], column_names=["a", "b", "c"], cell_width=24)
    assert all(holds(sheet, picture) for row in rows for picture in row)


def test_a_sheet_of_samples_shows_images_and_their_labels():
    streets = Streets(40)
    sheet = sample_sheet(streets, 4, columns=2)
    for index in (0, 13, 26, 39):  # spread over the set, first and last among them
        assert holds(sheet, streets[index].image)
        assert holds(sheet, colour(streets[index].label))


def test_a_sheet_of_corruptions_shows_every_severity():
    image = Streets(1)[0].image
    sheet = corruption_sheet(image, ["contrast", "snow"], seed=4)
    for severity in (1, 5):
        assert holds(sheet, corrupt(image, "snow", severity, seed=4))


def test_labels_take_the_colours_of_their_classes():
    label = np.array([[0, 10, 255]], np.uint8)
    expected = [PALETTE[CLASSES.index("road")], PALETTE[CLASSES.index("sky")], (0, 0, 0)]
    assert colour(label)[0].tolist() == [list(rgb) for rgb in expected]
    others = colour(np.arange(11, dtype=np.uint8)[None], [str(n) for n in range(11)])[0]
    assert len({tuple(rgb) for rgb in others.tolist()}) == 11


def test_a_saved_sheet_reads_back_the_same(tmp_path):
    sheet = grid([[Streets(1)[0].image]])
    save_sheet(sheet, tmp_path / "new" / "sheet.png")
    assert np.array_equal(read_image(tmp_path / "new" / "sheet.png"), sheet)
    save_sheet(sheet, tmp_path / "few.png", colours=16)
    few = read_image(tmp_path / "few.png")
    assert few.shape == sheet.shape
    assert len(np.unique(few.reshape(-1, 3), axis=0)) <= 16
    assert [p.name for p in tmp_path.rglob("*.part")] == []


def test_an_empty_set_has_no_sheet():
    with pytest.raises(ValueError, match="nothing to show"):
        sample_sheet(Plain()[:0])


def test_tensors_are_planes_normalised_channel_by_channel():
    image = np.random.default_rng(1).integers(0, 256, (5, 7, 3), np.uint8)
    tensor = to_tensor(image, CIFAR10)
    assert tensor.shape == (1, 3, 5, 7)
    assert tensor.dtype == torch.float32
    for channel, (mean, deviation) in enumerate(zip(*CIFAR10, strict=True)):
        expected = (image[2, 3, channel] / 255 - mean) / deviation
        assert tensor[0, channel, 2, 3].item() == pytest.approx(expected, abs=1e-6)


def test_batches_hold_every_image_once_and_never_mix_sizes():
    identity = ((0, 0, 0), (1, 1, 1))
    batches = list(to_batches(Plain(), 3, identity))
    assert [tuple(batch.shape) for batch in batches] == [
        (3, 3, 8, 16), (1, 3, 8, 16), (2, 3, 10, 16),
    ]  # fmt: skip
    greys = torch.cat([batch[:, 0, 0, 0] for batch in batches]) * 255
    assert greys.round().tolist() == [40.0 * index for index in range(6)]


def test_names_are_written_beside_the_pictures_in_letters_the_font_has(monkeypatch):
    written = []
    text = ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        ImageDraw.ImageDraw,
        "text",
        lambda self, place, words, *rest: (written.append(words), text(self, place, words, *rest)),
    )
    picture = np.zeros((9, 200, 3), np.uint8)
    captions = [["Straße łódź", "second"]]
    grid([[picture, picture]], row_names=["row"], column_names=["a", "b"], captions=captions)
    assert written == ["a", "b", "row", "Strasse lodz", "second"]


def test_a_caption_too_long_keeps_its_end():
    picture = np.zeros((9, 60, 3), np.uint8)
    sheet = grid([[picture]], captions=[["a_very_long_name_of_a_file_000019"]], cell_width=60)
    assert sheet.shape[1] == 60 + 2 * 4  # the caption did not widen it
    assert (sheet[9 + 4 :, :4] == 255).all()


def test_large_pictures_are_averaged_and_small_ones_keep_their_pixels():
    checks = np.indices((64, 64)).sum(0)[..., None].repeat(3, 2) % 2 * np.uint8(255)
    small = grid([[checks.astype(np.uint8)]], cell_width=32)[4:36, 4:36]
    assert set(np.unique(small)) <= {127, 128}  # halves of black and white
    large = grid([[checks.astype(np.uint8)]], cell_width=128)[4:132, 4:132]
    assert set(np.unique(large)) == {0, 255}


def test_a_sheet_is_not_written_over_a_folder_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        save_sheet(np.zeros((2, 2, 3), np.uint8), tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_the_usual_normalisations_are_those_published():
    """Of ImageNet as torchvision's documentation has them, of CIFAR-10 from its training images."""
    assert IMAGENET == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert CIFAR10 == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def test_a_batch_of_none_is_refused():
    with pytest.raises(ValueError, match="1 image or more, got size=0"):
        list(to_batches(Plain(), 0))
