"""From images as bytes to tensors as models want them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from bestta.data.samples import ImageSet, Pixels, Sample

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Channel means and deviations that most public models were trained with."""

CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
"""Channel means and deviations of CIFAR-10's training images."""

Normalisation = tuple[Sequence[float], Sequence[float]]


def to_tensor(image: Pixels, normalise: Normalisation = IMAGENET) -> Tensor:
    """One image (H, W, 3) as a batch of one: (1, 3, H, W), scaled to 0…1 and normalised.

    Args:
        image: RGB bytes.
        normalise: Channel means and deviations, of values 0…1; ``((0, 0, 0), (1, 1, 1))`` leaves
            these as they are.

    Example:
        >>> import numpy as np
        >>> white = np.full((2, 4, 3), 255, np.uint8)
        >>> to_tensor(white, ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))[0, :, 0, 0]
        tensor([2., 2., 2.])
    """
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in normalise)
    planes = torch.from_numpy(image.copy()).permute(2, 0, 1).contiguous()
    return ((planes / 255 - mean) / deviation)[None]


def to_batches(
    samples: Iterable[Sample], size: int = 8, normalise: Normalisation = IMAGENET
) -> Iterator[Tensor]:
    """Samples as batches (B, 3, H, W), for collecting a profile; a new size starts a new batch.

    Example:
        >>> from bestta.data import Streets
        >>> [tuple(batch.shape) for batch in to_batches(Streets(5), size=3)]
        [(3, 3, 128, 256), (2, 3, 128, 256)]
    """
    if size < 1:
        raise ValueError(f"a batch holds 1 image or more, got size={size}")
    batch: list[Tensor] = []
    for sample in samples:
        image = to_tensor(sample.image, normalise)
        if batch and (len(batch) == size or batch[0].shape != image.shape):
            yield torch.cat(batch)
            batch = []
        batch.append(image)
    if batch:
        yield torch.cat(batch)


class LabelledBatches:
    """Samples as batches of images and labels, as often as they are asked for.

    What `bestta.prepare` and training loops take: ``(B, 3, H, W)`` and class ids ``(B,)`` or
    ``(B, H, W)``. A new size starts a new batch; a sample without a label is left out.

    Example:
        >>> from bestta.data import Streets
        >>> batches = LabelledBatches(Streets(5), size=3)
        >>> [(tuple(image.shape), tuple(label.shape)) for image, label in batches]
        [((3, 3, 128, 256), (3, 128, 256)), ((2, 3, 128, 256), (2, 128, 256))]
        >>> len(batches)
        2
    """

    def __init__(
        self, samples: ImageSet, size: int = 8, normalise: Normalisation = IMAGENET
    ) -> None:
        if size < 1:
            raise ValueError(f"a batch holds 1 image or more, got size={size}")
        self.samples, self.size, self.normalise = samples, size, normalise

    def __len__(self) -> int:
        """How many batches there are, if all images have one size and a label."""
        return -(-len(self.samples) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images: list[Tensor] = []
        labels: list[Tensor] = []
        for sample in self.samples:
            if sample.label is None:
                continue
            image = to_tensor(sample.image, self.normalise)
            if images and (len(images) == self.size or images[0].shape != image.shape):
                yield torch.cat(images), torch.stack(labels)
                images, labels = [], []
            images.append(image)
            labels.append(torch.as_tensor(np.array(sample.label, dtype=np.int64)))
        if images:
            yield torch.cat(images), torch.stack(labels)
