"""Serves models that others wrote: our operations inside them,
their weights, and checks of both.

Importing this package loads neither torch nor transformers: a name is loaded when it is first used.
So `delta_trn.mup`, whose modules lie here, needs torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_trn.models.ecosystem.heads import check_weights as check_weights
    from delta_trn.models.ecosystem.packing import check_packing as check_packing
    from delta_trn.models.ecosystem.patching import patch_transformers as patch_transformers
    from delta_trn.models.ecosystem.untouched import complete_weights as complete_weights
    from delta_trn.models.ecosystem.weights import load_model as load_model
    from delta_trn.models.ecosystem.weights import save_model as save_model
    from delta_trn.models.head_numbers import separate_numbers as separate_numbers

_HOMES = {
    "check_packing": "ecosystem.packing",
    "check_weights": "ecosystem.heads",
    "complete_weights": "ecosystem.untouched",
    "load_model": "ecosystem.weights",
    "patch_transformers": "ecosystem.patching",
    "save_model": "ecosystem.weights",
    "separate_numbers": "head_numbers",
}


def __getattr__(name: str) -> object:
    """Loads a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; public: {', '.join(_HOMES)}"
        )
    value = getattr(import_module(f"delta_trn.models.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
