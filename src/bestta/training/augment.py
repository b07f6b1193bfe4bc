"""Ordinary augmentation: scale, crop, flip, mild colour jitter, and nothing like weather.

A source model that has seen blur, noise or fog in training has no shift left to adapt to, and
every figure of an adaptation method would be about its augmentation instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from bestta.data.samples import IGNORED, Pixels, Size

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What is done to each training image, each time with another draw."""

    crop: Size
    """(width, height) of what the network is shown."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Least and largest factor on the image's size; all between are equally likely in octaves."""
    margin: int = 0
    """Pixels added on every side before the crop, by mirroring."""
    flip: bool = True
    """Whether half of the images are mirrored left to right."""
    jitter: float = 0.0
    """Largest change of brightness, contrast and saturation, each as a share."""

    def __call__(
        self, image: Pixels, label: Pixels | int, dice: np.random.Generator
    ) -> tuple[Pixels, Pixels | int]:
        """An image (H, W, 3) and its label as the network is shown them in training.

        Args:
            image: RGB bytes.
            label: Class ids (H, W), which are moved with the image, or one for all of it.
            dice: All that is random.
        """
        labelled = isinstance(label, np.ndarray)
        ids: Pixels = label if isinstance(label, np.ndarray) else image[:, :, 0]
        factor = 2 ** dice.uniform(*np.log2(self.scale))
        if factor != 1.0:
            height, width = image.shape[:2]
            size = (max(1, round(width * factor)), max(1, round(height * factor)))
            way = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
            image = cv2.resize(image, size, interpolation=way).astype(np.uint8, copy=False)
            ids = cv2.resize(ids, size, interpolation=cv2.INTER_NEAREST_EXACT).astype(
                np.uint8, copy=False
            )
        image, ids = self._cropped(image, ids, dice)
        if self.flip and dice.random() < 0.5:
            image, ids = image[:, ::-1], ids[:, ::-1]
        if self.jitter:
            image = _jittered(image, dice.uniform(1 - self.jitter, 1 + self.jitter, 3))
        return image.copy(), ids.copy() if labelled else label

    def _cropped(
        self, image: Pixels, ids: Pixels, dice: np.random.Generator
    ) -> tuple[Pixels, Pixels]:
        if self.margin:
            around = ((self.margin, self.margin), (self.margin, self.margin))
            image = np.pad(image, (*around, (0, 0)), mode="reflect")
            ids = np.pad(ids, around, constant_values=IGNORED)
        width, height = self.crop
        short = (max(0, height - image.shape[0]), max(0, width - image.shape[1]))
        if any(short):
            # Smaller than the crop: filled up at the bottom and the right with ignored grey.
            around = ((0, short[0]), (0, short[1]))
            image = np.pad(image, (*around, (0, 0)), constant_values=128)
            ids = np.pad(ids, around, constant_values=IGNORED)
        top = int(dice.integers(image.shape[0] - height + 1))
        left = int(dice.integers(image.shape[1] - width + 1))
        window = slice(top, top + height), slice(left, left + width)
        return image[window], ids[window]


def _jittered(image: Pixels, factors: np.ndarray[Any, np.dtype[np.float64]]) -> Pixels:
    brightness, contrast, saturation = factors.astype(np.float32)
    colours = image.astype(np.float32) * brightness
    grey = colours @ _LUMA
    colours = (colours - grey[..., None]) * saturation + grey[..., None]
    middle = np.float32(grey.mean())
    colours = (colours - middle) * contrast + middle
    jittered: Pixels = np.clip(colours + 0.5, 0, 255).astype(np.uint8)
    return jittered
