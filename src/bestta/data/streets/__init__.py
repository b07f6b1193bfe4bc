"""Rendered street scenes with exact labels: a data set that needs no file.

A scene is a small world seen by one camera: a road that may bend, kerbs, pavements and verges on
the ground plane; buildings, hedges and rows of trees as upright walls; vehicles, people, trees and
street furniture standing on the ground. Ground and walls are ray-cast, which for upright walls is
one intersection per image column. Everything else is drawn over them from far to near. Label and
depth come out of the same geometry as the colours, so they fit to the pixel.

Scenes show a clear day. Bad weather is what :mod:`bestta.data.weather` adds.

Coordinates: X to the right, Y up, Z ahead, in metres, with the camera above (X, 0) and the road's
centre line leaving the origin. ``side`` is the signed distance from that line, right is positive.

Where to read on: :func:`render` below is the table of contents. ``scene`` is what all files share,
``light`` and ``view`` the day, the camera and the picture; ``plan`` lays out the street, ``walls``
and ``ground`` paint it; ``things`` is how something stands on it, ``vehicles`` and ``figures`` are
what does.

Example:
    >>> scene = render(7)
    >>> scene.image.shape, scene.label.shape, scene.depth.dtype
    ((128, 256, 3), (128, 256), dtype('float32'))
    >>> Streets(100, split="val")[3].name
    'streets-val/0/000003'
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from bestta.data.classes import CLASSES
from bestta.data.samples import ImageSet, Sample
from bestta.data.seeds import Seed, generator
from bestta.data.streets.figures import place_furniture, place_people, place_trees
from bestta.data.streets.ground import paint_ground
from bestta.data.streets.light import Light
from bestta.data.streets.plan import Street, Wall, plan_walls
from bestta.data.streets.scene import CLASSES_USED, SKY_DEPTH, Dice, Scene, Style
from bestta.data.streets.things import Crowd
from bestta.data.streets.vehicles import place_vehicles
from bestta.data.streets.view import Camera, View
from bestta.data.streets.walls import paint_sky, paint_walls

__all__ = [
    "CLASSES_USED",
    "LARGEST_SIZE",
    "SKY_DEPTH",
    "SMALLEST_SIZE",
    "Scene",
    "Split",
    "Streets",
    "Style",
    "render",
]

SMALLEST_SIZE = 32
"""Images narrower or lower than this are refused: nothing in them could be recognised."""

LARGEST_SIZE = 4096
"""Images wider or higher than this are refused: drawing works with fixed-point coordinates."""

Split = Literal["train", "val"]

_DEFAULT_STYLE = Style()


def render(seed: Seed, size: tuple[int, int] = (256, 128), style: Style = _DEFAULT_STYLE) -> Scene:
    """The street that ``seed`` stands for.

    The same seed gives the same bytes in any process and for any number of threads, and the same
    street, finer or coarser, at another size of the same proportions.

    Args:
        seed: An integer or a sequence of integers and strings.
        size: (width, height) in pixels.
        style: How varied and how hard the scene is.

    Example:
        >>> bool((render(7).image == render(7).image).all())
        True
    """
    width, height = _checked_size(size)
    # Who asks the dice in which order is what makes the scene: a line moved is another city.
    dice = Dice(generator("streets", seed))
    crowd, walls = _lay_out(dice, width, height, style)
    view = View(crowd.camera, crowd.light, style)
    paint_sky(view, dice)
    paint_walls(view, walls, crowd.street)
    paint_ground(view, dice, crowd.street, crowd.things)
    for thing in sorted(crowd.things, key=lambda thing: -thing.depth):
        thing.stand(view)
    label, depth = view.maps()
    return Scene(crowd.light.photograph(view.image, dice, style), label, depth)


def _lay_out(dice: Dice, width: int, height: int, style: Style) -> tuple[Crowd, list[Wall]]:
    """Everything that stands on a street and around it, before anything is painted."""
    camera = Camera.draw(dice, width, height, style)
    light = Light.draw(dice, style)
    street = Street.draw(dice)
    camera.x += street.camera_side
    walls = plan_walls(dice, street, style)
    crowd = Crowd(street, camera, light, style)
    place_vehicles(dice, crowd)
    place_trees(dice, crowd)
    place_furniture(dice, crowd)
    place_people(dice, crowd)
    return crowd, walls


class Streets(ImageSet):
    """Rendered street scenes with labels, ready without any download.

    Args:
        count: How many scenes.
        size: (width, height) in pixels.
        seed: Another seed is another city.
        style: How varied and how hard scenes are.
        split: ``"train"`` and ``"val"`` of the same seed have no scene in common.

    Example:
        >>> streets = Streets(10)
        >>> streets[3].name
        'streets/0/000003'
    """

    kind = "streets"
    classes = CLASSES

    def __init__(
        self,
        count: int = 1000,
        *,
        size: tuple[int, int] = (256, 128),
        seed: int = 0,
        style: Style = _DEFAULT_STYLE,
        split: Split = "train",
    ) -> None:
        super().__init__()
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"count is {count!r}; it takes a whole number from 1 up")
        if split not in get_args(Split):
            raise ValueError(f"no split {split!r}; there are {', '.join(get_args(Split))}")
        self.count, self.size, self.seed, self.split = int(count), _checked_size(size), seed, split
        self.style = style

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        """What scene ``index`` is called, such as ``streets/0/000042``."""
        folder = "streets" if self.split == "train" else f"streets-{self.split}"
        return f"{folder}/{self.seed}/{index:06d}"

    def scene(self, index: int) -> Scene:
        """Scene ``index`` with its depth."""
        return render((self.split, self.seed, index), self.size, self.style)

    def peek(self, index: int) -> tuple[int, int]:
        """(width, height), the same for all scenes."""
        return self.size

    def read(self, index: int) -> Sample:
        """Scene ``index`` as a sample."""
        scene = self.scene(index)
        return Sample(self.name(index), scene.image, scene.label)


def _checked_size(size: tuple[int, int]) -> tuple[int, int]:
    try:
        width, height = (int(side) for side in size)
        whole = (width, height) == tuple(size)
    except (TypeError, ValueError):
        whole = False
    if not whole or not all(SMALLEST_SIZE <= side <= LARGEST_SIZE for side in (width, height)):
        raise ValueError(
            f"size is {size!r}; it takes (width, height), each a whole number of pixels "
            f"from {SMALLEST_SIZE} to {LARGEST_SIZE}"
        )
    return width, height
