"""Source: the model as it is, adapting nothing. The row every table starts with."""

from __future__ import annotations

from torch import Tensor

from bestta.adapters.base import Adapter, StepReport
from bestta.adapters.registry import register_adapter


@register_adapter("source")
class Source(Adapter):
    """The source model behind the adapter's interface."""

    remembers = False

    def prepare(self) -> None:
        """Nothing to prepare."""

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict."""
        return self.predict_source(image), StepReport(reason="the source model does not adapt")
