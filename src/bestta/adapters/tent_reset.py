"""TENT*: TENT that starts anew at every domain change (Wang et al., 2021, as the paper stars it).

It must be told of domain changes, which no camera announces. Whoever runs the stream calls
``domain_changed()`` (or ``reset()``), and its row is starred in every table.
"""

from __future__ import annotations

from bestta.adapters.registry import register_adapter
from bestta.adapters.tent import Tent


@register_adapter("tent_reset")
class TentReset(Tent):
    """TENT, with model and optimiser reset at domain changes."""

    needs_domain_changes = True
