"""Networks to adapt, with the module names of the public checkpoints, and their loader."""

from bestta.models.deeplabv3plus import DeepLabV3Plus
from bestta.models.efficientnet_lite import EfficientNetLite0
from bestta.models.resnet import ResNet50
from bestta.models.weights import LoadReport, load_weights
from bestta.models.wide_resnet import WideResNet

__all__ = [
    "DeepLabV3Plus",
    "EfficientNetLite0",
    "LoadReport",
    "ResNet50",
    "WideResNet",
    "load_weights",
]
