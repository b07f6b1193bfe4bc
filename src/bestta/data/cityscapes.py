"""Cityscapes: streets of fifty cities in clear weather (Cordts et al., 2016)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from bestta.data.classes import CLASSES
from bestta.data.folder import PairedFiles, by_key, check_flag, id_table, spread, translate
from bestta.data.samples import IGNORED, Pixels, Size, UnreadableImage, read_label
from bestta.data.trees import files_below, folders_in, layout_error, locate

TRAIN_IDS = {
    7: 0, 8: 1, 11: 2, 12: 3, 13: 4, 17: 5, 19: 6, 20: 7, 21: 8, 22: 9, 23: 10, 24: 11, 25: 12,
    26: 13, 27: 14, 28: 15, 31: 16, 32: 17, 33: 18,
}  # fmt: skip
"""Train ids of the nineteen label ids that count; labels.py of the official scripts has them."""

LABEL_IDS = range(34)
"""The ids that label maps are stored with; those without a train id are ignored."""

SPLITS: dict[str, tuple[int, str]] = {
    "train": (
        2975,
        "aachen bochum bremen cologne darmstadt dusseldorf erfurt hamburg hanover jena krefeld "
        "monchengladbach strasbourg stuttgart tubingen ulm weimar zurich",
    ),
    "val": (500, "frankfurt lindau munster"),
    "test": (1525, "berlin bielefeld bonn leverkusen mainz munich"),
}
"""Images and cities of the published splits."""

_IMAGES = ("_leftImg8bit.png", "_leftImg8bit.jpg", "_leftImg8bit.jpeg")
_STORED_IDS, _STORED_TRAIN_IDS = "_gtFine_labelIds.png", "_gtFine_labelTrainIds.png"

_TREE = """
<folder>/
  leftImg8bit/<split>/<city>/*_leftImg8bit.png (or .jpg)
  gtFine/<split>/<city>/*_gtFine_labelIds.png (or *_gtFine_labelTrainIds.png)
"""


class Cityscapes(PairedFiles):
    """One split of Cityscapes, at any size, with the nineteen classes that are scored.

    Names are paths below ``leftImg8bit``, such as
    ``val/lindau/lindau_000000_000019_leftImg8bit.png``, sorted by city, then by name. The archives
    may be unpacked into one folder or each into its own.

    Args:
        root: The folder that holds ``leftImg8bit`` and ``gtFine``.
        split: ``train``, ``val`` or ``test``, whose labels are not public; or any other folder.
        size: (width, height) to resize images and labels to.
        labels: Whether to read labels; without, ``gtFine`` need not be there.
        ignore_fringes: Whether to ignore label pixels that may be averages of their neighbours.
            Copies of the set whose label maps were shrunk with interpolation have a fringe of
            foreign classes round every object: between road (7) and car (26) stands a pole (17).
            :meth:`missing`, and so ``bestta data check``, tells of such copies.
    """

    kind = "cityscapes"

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "val",
        *,
        size: Size | None = None,
        labels: bool = True,
        ignore_fringes: bool = False,
    ) -> None:
        root = Path(root).expanduser()
        self.split, self.ignore_fringes = split, ignore_fringes
        images = locate(root, "leftImg8bit")
        if images is None:
            problem = f"no folder leftImg8bit in {root}."
            raise layout_error("Cityscapes", root, _TREE, problem)
        splits = folders_in(images)
        if split not in splits:
            problem = f"no split {split!r} in {images}; there are: {', '.join(splits) or 'none'}."
            raise layout_error("Cityscapes", root, _TREE, problem)
        frames = by_key(files_below(images / split, _IMAGES), _IMAGES)
        if not frames:
            problem = f"no *_leftImg8bit image in {images / split}."
            raise layout_error("Cityscapes", root, _TREE, problem)

        # The test split comes with label maps that ignore every pixel: as good as none.
        label_root = locate(root, "gtFine") if check_flag(labels) and split != "test" else None
        maps: dict[str, str] = {}
        if label_root is not None and (label_root / split).is_dir():
            endings = (_STORED_IDS, _STORED_TRAIN_IDS)
            maps = by_key(files_below(label_root / split, endings), endings)
        if labels and split != "test" and not frames.keys() & maps.keys():
            raise layout_error(
                "Cityscapes",
                root,
                _TREE,
                f"no label map in gtFine/{split} for any of the {len(frames)} images of split "
                f"{split!r}; labels=False reads the images alone.",
            )
        pairs = [
            (f"{split}/{image}", f"{split}/{maps[key]}" if key in maps else None)
            for key, image in frames.items()
        ]
        super().__init__(images, label_root, pairs, classes=CLASSES, size=size)

    def class_ids(self, stored: Pixels, path: Path) -> Pixels:
        """Train ids (H, W) of a label map with label ids or, by its name, train ids."""
        if path.name.lower().endswith(_STORED_TRAIN_IDS.lower()):
            return super().class_ids(stored, path)
        ids = translate(stored, _TABLE, path)
        if self.ignore_fringes:
            ids[fringe(stored)] = IGNORED
        return ids

    def missing(self) -> tuple[str, ...]:
        """Cities and images that are not there, clean or any label maps, and other splits."""
        missing: list[str] = []
        if self.split in SPLITS:
            count, cities = SPLITS[self.split]
            if len(self) < count:
                there = {image.split("/")[1] for image, _ in self.pairs}
                gone = [city for city in cities.split() if city not in there]
                missing.append(f"{count - len(self)} of the {count} images of split {self.split!r}")
                missing += [f"the images of {', '.join(gone)}"] if gone else []
        missing += self._unlabelled()
        if not self.ignore_fringes and self._interpolated():
            missing.append(
                "labels as they were drawn: these were shrunk with interpolation, so foreign "
                "classes fringe every object; ignore_fringes (--ignore-fringes) ignores them"
            )
        there = set(folders_in(self.images))
        return (*missing, *(f"split {split!r}" for split in SPLITS if split not in there))

    def _interpolated(self) -> bool:
        """Whether the label maps were shrunk as if ids were grey values.

        Guard rails, bridges, tunnels, groups of poles, caravans and trailers are rare. Where most
        of their pixels lie on a fringe, they are no such things but averages of others.
        """
        rare = on_fringe = 0
        for index in spread(len(self), _LABEL_MAPS):
            try:
                path = self.label_path(index)
                if path is None or not path.name.lower().endswith(_STORED_IDS.lower()):
                    continue
                stored = read_label(path)
            except UnreadableImage:
                continue  # named when it is read
            if stored.ndim == 2:
                seldom = np.isin(stored, _SELDOM)
                rare += int(seldom.sum())
                on_fringe += int((seldom & fringe(stored)).sum())
        return on_fringe > rare / 2


def fringe(ids: Pixels) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Where an id lies strictly between those of two opposite neighbours, (H, W).

    Averages of two ids are there, and so is the odd thin object whose id happens to lie between.

    Example:
        >>> fringe(np.array([[7, 7, 17, 26, 26]], np.uint8))
        array([[False, False,  True, False, False]])
    """
    padded = np.pad(ids, 1, mode="edge")
    height, width = ids.shape
    between = np.zeros((height, width), np.bool_)
    for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1)):
        before = padded[1 - dy : 1 - dy + height, 1 - dx : 1 - dx + width]
        after = padded[1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]
        between |= (np.minimum(before, after) < ids) & (ids < np.maximum(before, after))
    return between


_LABEL_MAPS = 9
"""How many label maps are looked at to tell how the set was resized."""

_SELDOM = (14, 15, 16, 18, 29, 30)
"""Label ids of guard rail, bridge, tunnel, polegroup, caravan and trailer."""

_TABLE = id_table({i: TRAIN_IDS.get(i, IGNORED) for i in LABEL_IDS})
