"""Registers the models with transformers, without importing transformers for it.

`AutoModelForCausalLM` must know our models once `delta_trn` is imported, but a kernel package or
the simulator must load without torch and transformers. So the registration waits for transformers'
module of configuration names. It also waits until no module of transformers or of the models is
half loaded: registering needs them whole, and one of them may be what imports the names.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Registers the models now if transformers' names are loaded, otherwise as soon as they are."""
    if NAMES not in sys.modules:
        if not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Waiting())
        return
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    from delta_trn.models import (
        DeltaConfig,
        DeltaForCausalLM,
        DeltaForSequenceClassification,
        DeltaModel,
    )

    AutoConfig.register(DeltaConfig.model_type, DeltaConfig, exist_ok=True)
    AutoModel.register(DeltaConfig, DeltaModel, exist_ok=True)
    AutoModelForCausalLM.register(DeltaConfig, DeltaForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(
        DeltaConfig, DeltaForSequenceClassification, exist_ok=True
    )


class _Waiting(MetaPathFinder):
    """Finds transformers' modules and the models' as Python does,
    and registers after the outermost one.
    """

    def __init__(self) -> None:
        self.depth = 0  # how many of these modules are half loaded

    def find_spec(
        self, fullname: str, path=None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(("transformers", "delta_trn.models")):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(
            (s for finder in others if (s := finder.find_spec(fullname, path, target))), None
        )
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        self.depth += 1
        try:
            execute(module)
        finally:
            self.depth -= 1
        if self.depth == 0 and NAMES in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            register()
