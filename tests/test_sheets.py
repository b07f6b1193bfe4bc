"""Contact sheets and tensors: what is shown and what a model is given is what was read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bestta.data import ImageSet, Sample, Streets
from bestta.data.classes import CLASSES, PALETTE
from bestta.data.corruptions import corrupt
from bestta.data.samples import read_image
from bestta.data.sheets import colour, corruption_sheet, grid, sample_sheet, save_sheet
from bestta.data.tensors import CIFAR10, to_batches, to_tensor


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
    for index in (0, 10, 20, 30):  # spread over the set
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
