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
# PEFT's tables of the maps that get adapters where nobody names any
TARGETS = "peft.utils.constants"
NORMS = ["mixer_norm", "mlp_norm", "norm"]  # as those of a Llama are called here


def register_targets() -> None:
    """Adds our models to PEFT's tables: now if they are loaded, otherwise as soon as they are."""
    if TARGETS not in sys.modules:
        if not any(isinstance(finder, _WaitingForPeft) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WaitingForPeft())
        return
    for name, table in vars(sys.modules[TARGETS]).items():
        if name.endswith("_MODULES_MAPPING") and "llama" in table:
            # our maps have the names of a Llama's
            table.setdefault("delta_trn", NORMS if "_LNTUNING_" in name else table["llama"])


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
        return _find_watched(self, fullname, path, target)

    def execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        self.depth += 1
        try:
            execute(module)
        finally:
            self.depth -= 1
        if self.depth == 0 and NAMES in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            register()


class _WaitingForPeft(MetaPathFinder):
    """Finds PEFT's tables as Python does, and adds our models once they are there."""

    def find_spec(
        self, fullname: str, path=None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return _find_watched(self, fullname, path, target) if fullname == TARGETS else None

    def execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        sys.meta_path.remove(self)
        register_targets()


def _find_watched(
    watcher: _Waiting | _WaitingForPeft, fullname: str, path, target: ModuleType | None
) -> ModuleSpec | None:
    """Finds a module as Python does, which the watcher then executes."""
    others = (finder for finder in sys.meta_path if finder is not watcher)
    spec = next((s for finder in others if (s := finder.find_spec(fullname, path, target))), None)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module = partial(watcher.execute, spec.loader.exec_module)
    return spec
