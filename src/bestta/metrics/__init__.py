"""How good predictions are, by the conventions of the field."""

from bestta.metrics.scores import Errors, MeanIoU, Metric, metric_for

__all__ = ["Errors", "MeanIoU", "Metric", "metric_for"]
