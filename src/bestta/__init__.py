"""Single-image continual test-time adaptation: vision models that survive the weather.

profile = bestta.SourceProfile.collect(model, images, layers=["backbone.layer3"])
adapter = bestta.adapt(model, profile)
logits = adapter(image)
"""

from bestta._version import __version__
from bestta.adapters import adapt, methods
from bestta.bein import BeIN, bein
from bestta.insertion import layers
from bestta.profile import SourceProfile

__all__ = ["BeIN", "SourceProfile", "__version__", "adapt", "bein", "layers", "methods"]
