"""muP for any model: learning rates, and initial values,
that a small base model hands to a large one.
"""

from delta_trn.models.ecosystem.roles import save_base
from delta_trn.models.ecosystem.widths import draw_taps, initialize, parameter_groups, scale_readout

__all__ = ["draw_taps", "initialize", "parameter_groups", "save_base", "scale_readout"]
