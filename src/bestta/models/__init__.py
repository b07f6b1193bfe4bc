"""Networks to adapt, with the names of the public checkpoints, and trained ones to start from."""

from bestta.models.cards import Card, card, load, load_profile, names
from bestta.models.deeplabv3plus import DeepLabV3Plus
from bestta.models.efficientnet_lite import EfficientNetLite0
from bestta.models.resnet import ResNet50
from bestta.models.small_resnet import SmallResNet
from bestta.models.weights import LoadReport, load_weights
from bestta.models.wide_resnet import WideResNet

__all__ = [
    "Card",
    "DeepLabV3Plus",
    "EfficientNetLite0",
    "LoadReport",
    "ResNet50",
    "SmallResNet",
    "WideResNet",
    "card",
    "load",
    "load_profile",
    "load_weights",
    "names",
]
