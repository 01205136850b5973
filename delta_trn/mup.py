"""muP for any model: learning rates, and initial values,
that a small base model hands to a large one.

It imports torch and the standard library alone.
"""

from delta_trn.models.ecosystem.plans import load_plan, plan
from delta_trn.models.ecosystem.roles import save_base
from delta_trn.models.ecosystem.widths import draw_taps, initialize, parameter_groups, scale_readout

__all__ = [
    "draw_taps",
    "initialize",
    "load_plan",
    "parameter_groups",
    "plan",
    "save_base",
    "scale_readout",
]
