"""muP for any model: learning rates, and initial values, that a small base model hands to a large one."""

from delta_trn.models.ecosystem.widths import initialize, parameter_groups

__all__ = ["initialize", "parameter_groups"]
