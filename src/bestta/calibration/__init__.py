"""Choose layers and settings for a model from source images alone."""

from bestta.calibration.candidates import Candidate
from bestta.calibration.conditions import Condition
from bestta.calibration.run import calibrate

__all__ = ["Candidate", "Condition", "calibrate"]
