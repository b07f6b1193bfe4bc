"""ACDC: streets in fog, at night, in rain and in snow (Sakaridis et al., 2021)."""

from __future__ import annotations

import os
from pathlib import Path

from bestta.data.classes import CLASSES
from bestta.data.folder import PairedFiles, by_key, check_flag
from bestta.data.samples import Size
from bestta.data.trees import files_below, folders_in, layout_error, locate

CONDITIONS = ("fog", "night", "rain", "snow")

COUNTS = {"train": 400, "val": 100, "test": 500}
"""Images of a condition in the published splits; ``val`` has 106 of the night."""

_IMAGES = tuple(
    ending + suffix
    for ending in ("_rgb_anon", "_rgb_ref_anon")
    for suffix in (".png", ".jpg", ".jpeg")
)
_LABELS = ("_gt_labelTrainIds.png", "_gt_ref_labelTrainIds.png")

_TREE = """
<folder>/
  rgb_anon/<condition>/<split>/<sequence>/*_rgb_anon.png (or .jpg)
  gt/<condition>/<split>/<sequence>/*_gt_labelTrainIds.png
"""


class Acdc(PairedFiles):
    """One condition and split of ACDC, with the nineteen classes of Cityscapes.

    Names are paths below ``rgb_anon``, such as
    ``fog/train/GOPR0475/GOPR0475_frame_000041_rgb_anon.png``, sorted by sequence, then by name:
    the order the streams of the papers have. The archives may be unpacked into one folder or each
    into its own.

    Args:
        root: The folder that holds ``rgb_anon`` and ``gt``.
        condition: ``fog``, ``night``, ``rain`` or ``snow``.
        split: ``train``, ``val``, ``test`` without public labels, or one of the same streets in
            clear weather, ``train_ref``, ``val_ref`` and ``test_ref``, labelled or not.
        size: (width, height) to resize images and labels to.
        labels: Whether to read labels; without, ``gt`` need not be there.
    """

    kind = "acdc"

    def __init__(
        self,
        root: str | os.PathLike[str],
        condition: str,
        split: str = "train",
        *,
        size: Size | None = None,
        labels: bool = True,
    ) -> None:
        root = Path(root).expanduser()
        self.condition, self.split = condition, split
        if condition not in CONDITIONS:
            raise ValueError(f"no condition {condition!r} in ACDC; it has {', '.join(CONDITIONS)}")
        images = locate(root, "rgb_anon")
        if images is None:
            raise layout_error("ACDC", root, _TREE, f"no folder rgb_anon in {root}.")
        below = f"{condition}/{split}"
        splits = folders_in(images / condition)
        if split not in splits:
            problem = (
                f"no {below} in {images}; splits of {condition}: {', '.join(splits) or 'none'}."
            )
            raise layout_error("ACDC", root, _TREE, problem)
        frames = by_key(files_below(images / below, _IMAGES), _IMAGES)
        if not frames:
            raise layout_error("ACDC", root, _TREE, f"no *_rgb_anon image in {images / below}.")

        label_root = locate(root, "gt") if check_flag(labels) else None
        maps: dict[str, str] = {}
        if label_root is not None and (label_root / below).is_dir():
            maps = by_key(files_below(label_root / below, _LABELS), _LABELS)
        if not frames.keys() & maps.keys():
            if labels and split in ("train", "val"):
                raise layout_error(
                    "ACDC",
                    root,
                    _TREE,
                    f"no label map in gt/{below} for any of the {len(frames)} images of {below}; "
                    "labels=False reads the images alone.",
                )
            label_root = None
        pairs = [
            (f"{below}/{image}", f"{below}/{maps[key]}" if key in maps else None)
            for key, image in frames.items()
        ]
        super().__init__(images, label_root, pairs, classes=CLASSES, size=size)

    def missing(self) -> tuple[str, ...]:
        """Images, label maps, splits and other conditions that are not there."""
        missing: list[str] = []
        count = COUNTS.get(self.split, 0)
        count += 6 if (self.condition, self.split) == ("night", "val") else 0
        if len(self) < count:
            missing.append(f"{count - len(self)} of the {count} images of this condition and split")
        missing += self._unlabelled()
        splits = folders_in(self.images / self.condition)
        missing += [f"{self.condition}/{split}" for split in COUNTS if split not in splits]
        there = set(folders_in(self.images))
        return (*missing, *(f"condition {name!r}" for name in CONDITIONS if name not in there))
