"""Serves models that others wrote: our operations inside them,
their weights, and checks of both.
"""

from delta_trn.models.ecosystem.heads import check_weights
from delta_trn.models.ecosystem.packing import check_packing
from delta_trn.models.ecosystem.patching import patch_transformers
from delta_trn.models.ecosystem.untouched import complete_weights
from delta_trn.models.ecosystem.weights import load_model, save_model
from delta_trn.models.head_numbers import separate_numbers

__all__ = [
    "check_packing",
    "check_weights",
    "complete_weights",
    "load_model",
    "patch_transformers",
    "save_model",
    "separate_numbers",
]
