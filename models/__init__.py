"""Delta-rule language models as `transformers` models: the Auto classes know them.

Importing this package loads neither torch nor transformers: a name is loaded when it is first used.

    >>> from delta_trn.models import DeltaConfig
    >>> DeltaConfig(hidden_size=512).head_dim_k
    64
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_trn.models.backbone import DeltaModel as DeltaModel
    from delta_trn.models.cache import DeltaCache as DeltaCache
    from delta_trn.models.config import DeltaConfig as DeltaConfig
    from delta_trn.models.language_model import DeltaForCausalLM as DeltaForCausalLM
    from delta_trn.models.language_model import (
        DeltaForSequenceClassification as DeltaForSequenceClassification,
    )

_HOMES = {
    "DeltaCache": "cache",
    "DeltaConfig": "config",
    "DeltaForCausalLM": "language_model",
    "DeltaForSequenceClassification": "language_model",
    "DeltaModel": "backbone",
}


def __getattr__(name: str) -> object:
    """Loads a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; public: {', '.join(_HOMES)}"
        )
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
