"""The step of learning at the time and memory of a prediction, on any frozen model."""

from bestta.lean.entropy import lean_entropy, lean_entropy_loss
from bestta.lean.forward import LeanModel

__all__ = ["LeanModel", "lean_entropy", "lean_entropy_loss"]
