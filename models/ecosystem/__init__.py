"""Serves models that others wrote: our operations inside them, and a check of their packing."""

from delta_trn.models.ecosystem.packing import check_packing
from delta_trn.models.ecosystem.patching import patch_transformers

__all__ = ["check_packing", "patch_transformers"]
