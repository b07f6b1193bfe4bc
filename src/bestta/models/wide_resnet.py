"""Wide ResNet (Zagoruyko and Komodakis, 2016) for 32x32 images.

Module names are those of RobustBench's "Standard" CIFAR-10 network, so its
checkpoint loads as it is. That network takes pixels in [0, 1], not normalised.
"""

from torch import Tensor, nn

from bestta.models.common import check_images, initialise


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU, added to a shortcut.

    Where channels change, the shortcut is a 1x1 convolution of the activated
    input; where they do not, it is the raw input.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.convShortcut: nn.Conv2d | None = None
        if in_channels != out_channels:
            self.convShortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        activated = self.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        out = self.relu(self.bn2(self.conv1(activated)))
        out = self.conv2(self.dropout(out))
        summed: Tensor = shortcut + out
        return summed


class BlockGroup(nn.Module):
    """The blocks of one resolution; the first carries the stride and the new width."""

    def __init__(
        self, blocks: int, in_channels: int, out_channels: int, stride: int, dropout: float
    ) -> None:
        super().__init__()
        first = PreActivationBlock(in_channels, out_channels, stride, dropout)
        others = [
            PreActivationBlock(out_channels, out_channels, 1, dropout) for _ in range(blocks - 1)
        ]
        self.layer = nn.Sequential(first, *others)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """Wide ResNet classifier; depth 28 and width 10 is RobustBench's "Standard".

    Args:
        depth: Number of convolutions and linear layers on the main path, 6n + 4.
        width: Factor on the channels 16, 32 and 64 of the three groups.
        classes: Number of classes.
        dropout: Probability of dropping an activation inside a block in training.
    """

    def __init__(
        self, depth: int = 28, width: int = 10, classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(
                f"depth {depth} is not available: it must be 6n + 4 with n >= 1, "
                "that is 10, 16, 22, 28, 34, 40, ..."
            )
        if width < 1 or classes < 1:
            raise ValueError(
                f"width and classes must be at least 1; got width={width}, classes={classes}."
            )
        blocks = (depth - 4) // 6
        self.depth, self.width, self.classes = depth, width, classes
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = BlockGroup(blocks, 16, 16 * width, 1, dropout)
        self.block2 = BlockGroup(blocks, 16 * width, 32 * width, 2, dropout)
        self.block3 = BlockGroup(blocks, 32 * width, 64 * width, 2, dropout)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(64 * width, classes)
        initialise(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, H, W)."""
        check_images(images, type(self).__name__)
        x = self.block3(self.block2(self.block1(self.conv1(images))))
        pooled = self.relu(self.bn1(x)).mean(dim=(2, 3))
        logits: Tensor = self.fc(pooled)
        return logits

    @staticmethod
    def rename_public_key(key: str) -> str | None:
        """Name here of a tensor in a RobustBench checkpoint.

        Returns:
            None for ``sub_block1``, which some of its networks carry and never
            use; the key itself otherwise.
        """
        return None if key.startswith("sub_block1.") else key
