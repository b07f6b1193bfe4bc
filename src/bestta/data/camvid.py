"""CamVid: drives through Cambridge, 701 labelled frames (Brostow et al., 2009)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from bestta.data.folder import PairedFiles, by_key, check_flag, id_table, translate
from bestta.data.samples import IGNORED, IMAGE_SUFFIXES, Pixels, Size, UnreadableImage
from bestta.data.trees import files_below, layout_error, locate

CLASSES = (
    "Sky",
    "Building",
    "Pole",
    "Road",
    "Pavement",
    "Tree",
    "SignSymbol",
    "Fence",
    "Car",
    "Pedestrian",
    "Bicyclist",
)
"""The eleven classes that are scored, in the order of SegNet (Badrinarayanan et al., 2017)."""

COLOURS: dict[tuple[int, int, int], tuple[str, str | None]] = {
    (128, 128, 128): ("Sky", "Sky"),
    (0, 128, 64): ("Bridge", "Building"),
    (128, 0, 0): ("Building", "Building"),
    (64, 192, 0): ("Wall", "Building"),
    (64, 0, 64): ("Tunnel", "Building"),
    (192, 0, 128): ("Archway", "Building"),
    (192, 192, 128): ("Column_Pole", "Pole"),
    (0, 0, 64): ("TrafficCone", "Pole"),
    (128, 64, 128): ("Road", "Road"),
    (128, 0, 192): ("LaneMkgsDriv", "Road"),
    (192, 0, 64): ("LaneMkgsNonDriv", "Road"),
    (0, 0, 192): ("Sidewalk", "Pavement"),
    (64, 192, 128): ("ParkingBlock", "Pavement"),
    (128, 128, 192): ("RoadShoulder", "Pavement"),
    (128, 128, 0): ("Tree", "Tree"),
    (192, 192, 0): ("VegetationMisc", "Tree"),
    (192, 128, 128): ("SignSymbol", "SignSymbol"),
    (128, 128, 64): ("Misc_Text", "SignSymbol"),
    (0, 64, 64): ("TrafficLight", "SignSymbol"),
    (64, 64, 128): ("Fence", "Fence"),
    (64, 0, 128): ("Car", "Car"),
    (64, 128, 192): ("SUVPickupTruck", "Car"),
    (192, 128, 192): ("Truck_Bus", "Car"),
    (192, 64, 128): ("Train", "Car"),
    (128, 64, 64): ("OtherMoving", "Car"),
    (64, 64, 0): ("Pedestrian", "Pedestrian"),
    (192, 128, 64): ("Child", "Pedestrian"),
    (64, 0, 192): ("CartLuggagePram", "Pedestrian"),
    (64, 128, 64): ("Animal", "Pedestrian"),
    (0, 128, 192): ("Bicyclist", "Bicyclist"),
    (192, 0, 192): ("MotorcycleScooter", "Bicyclist"),
    (0, 0, 0): ("Void", None),
}
"""The 32 colours of the original label maps (label_colors.txt), what they stand for there, and the
class they count for. The grouping is the one in common use, from the CamVid example of MATLAB."""

COUNTS = {"train": 367, "val": 101, "test": 233, "all": 701}
"""Images of SegNet's splits, and of the original set."""

_VOID = len(CLASSES)
_STILLS, _LABELLED = "701_StillsRaw_full", "LabeledApproved_full"

_TREE = f"""
<folder>/                      as SegNet has it: split train, val or test
  <split>/*.png
  <split>annot/*.png           class ids, 11 for void
or
<folder>/                      as it was published: split all
  {_STILLS}/*.png
  {_LABELLED}/*_L.png  colours
"""


class CamVid(PairedFiles):
    """CamVid in either of its two forms, with the eleven classes that are scored.

    Names are ``<split>/<file>`` in SegNet's form and the file names in the original one.

    Args:
        root: The folder that holds the folders of the splits, or the two original folders.
        split: ``train``, ``val`` or ``test`` of SegNet's form; ``all`` of the original, which came
            without splits.
        size: (width, height) to resize images and labels to.
        labels: Whether to read labels; without, label maps need not be there.
    """

    kind = "camvid"

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "test",
        *,
        size: Size | None = None,
        labels: bool = True,
    ) -> None:
        root = Path(root).expanduser()
        self.split = split
        if split not in COUNTS:
            raise ValueError(f"no split {split!r} in CamVid; it has {', '.join(COUNTS)}")
        folder = _folder(root, split)
        if folder is None:
            other = [name for name in COUNTS if _folder(root, name)]
            hint = f" There is: {', '.join(other)}." if other else ""
            raise layout_error("CamVid", root, _TREE, f"no split {split!r} in {root}.{hint}")
        # Names below the folder of the original set are those of its files alone.
        below = "" if split == "all" else f"{split}/"
        images = folder if split == "all" else folder.parent
        frames = by_key(files_below(folder, IMAGE_SUFFIXES, recursive=False), IMAGE_SUFFIXES)

        ending, labelled = ("_L.png", _LABELLED) if split == "all" else (".png", f"{split}annot")
        label_root = None
        if check_flag(labels):
            beside = folder.parent / labelled
            label_root = beside if beside.is_dir() else locate(root, labelled)
        maps: dict[str, str] = {}
        if label_root is not None:
            maps = by_key(files_below(label_root, [ending], recursive=False), [ending])
        if labels and not frames.keys() & maps.keys():
            raise layout_error(
                "CamVid",
                root,
                _TREE,
                f"no label map in {labelled} for any of the {len(frames)} images; "
                "labels=False reads the images alone.",
            )
        pairs = [(below + image, maps.get(key)) for key, image in frames.items()]
        super().__init__(images, label_root, pairs, classes=CLASSES, size=size)

    def class_ids(self, stored: Pixels, path: Path) -> Pixels:
        """Class ids (H, W) of a label map with ids, or (H, W, 3) of one with colours."""
        if self.split == "all":
            return _from_colours(stored, path)
        return translate(stored, _TABLE, path)

    def missing(self) -> tuple[str, ...]:
        """Images, label maps and other splits that are not there."""
        count = COUNTS[self.split]
        short = f"{count - len(self)} of the {count} images of split {self.split!r}"
        root = self.images.parent if self.split == "all" else self.images
        others = () if self.split == "all" else ("train", "val", "test")
        return (
            *((short,) if len(self) < count else ()),
            *self._unlabelled(),
            *(f"split {split!r}" for split in others if not _folder(root, split)),
        )


def _folder(root: Path, split: str) -> Path | None:
    """The folder with the images of a split; one without any, as other sets have, is none."""
    folder = locate(root, _STILLS if split == "all" else split)
    return folder if folder and files_below(folder, IMAGE_SUFFIXES, recursive=False) else None


_TABLE = id_table({**{i: i for i in range(_VOID)}, _VOID: IGNORED})


def _from_colours(stored: Pixels, path: Path) -> Pixels:
    if stored.ndim != 3:
        raise UnreadableImage(f"{path}: one channel, the original label maps are RGB colours")
    # Every channel of every colour is 0, 64, 128 or 192, so two bits of each tell colours apart.
    codes = stored >> 6
    ids: Pixels = _BY_CODE[(codes[..., 0] << 4) | (codes[..., 1] << 2) | codes[..., 2]]
    unknown = (stored & 63).any(axis=2) | (ids == _NO_CLASS)
    if unknown.any():
        colours = np.unique(stored[unknown], axis=0)
        shown = ", ".join(str(tuple(colour)) for colour in colours[:4].tolist())
        raise UnreadableImage(
            f"{path}: colours {shown}{' and more' if len(colours) > 4 else ''} are none of "
            "CamVid's 32; were the labels resized or saved as JPEG?"
        )
    return ids


_NO_CLASS = 254


def _codes() -> Pixels:
    table = np.full(64, _NO_CLASS, np.uint8)
    for (red, green, blue), (_, name) in COLOURS.items():
        code = red >> 6 << 4 | green >> 6 << 2 | blue >> 6
        table[code] = IGNORED if name is None else CLASSES.index(name)
    return table


_BY_CODE = _codes()
