"""Streams of images whose conditions change, and the recipes they follow.

>>> from bestta import protocols
>>> from bestta.data import Streets
>>> streets = Streets(20, split="val")
>>> stream = protocols.continual(protocols.weather(streets, severity=3), rounds=2)
>>> stream
<Stream: 160 frames in 8 blocks: fog, night, rain, snow>
>>> frame = stream[133]  # renders this one frame
>>> frame.domain, frame.block.round, frame.image.shape
('rain', 1, (128, 256, 3))
"""

from bestta.protocols.recipes import (
    acdc,
    cifar10c,
    continual,
    corruptions,
    gradual,
    mixed,
    single,
    weather,
)
from bestta.protocols.stream import Block, Domain, Frame, Stream

__all__ = [
    "Block",
    "Domain",
    "Frame",
    "Stream",
    "acdc",
    "cifar10c",
    "continual",
    "corruptions",
    "gradual",
    "mixed",
    "single",
    "weather",
]
