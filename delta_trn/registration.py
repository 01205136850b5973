"""Registers the models with transformers, without importing transformers for it.

`AutoModelForCausalLM` must know our models once `delta_trn` is imported, but a kernel package or the
simulator must load without torch and transformers. So the registration waits for transformers' module of
configuration names. It also waits until no module of transformers or of the models is half loaded:
registering needs them whole, and one of them may be what imports the names.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Registers the models now if transformers' names are loaded, otherwise as soon as they are."""
    if NAMES in sys.modules:
        _register_models()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register_models() -> None:
    """Tells the Auto classes of transformers which of our classes they make from our configuration."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    from delta_trn.models import DeltaConfig, DeltaForCausalLM, DeltaForSequenceClassification, DeltaModel

    AutoConfig.register(DeltaConfig.model_type, DeltaConfig, exist_ok=True)
    AutoModel.register(DeltaConfig, DeltaModel, exist_ok=True)
    AutoModelForCausalLM.register(DeltaConfig, DeltaForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(DeltaConfig, DeltaForSequenceClassification, exist_ok=True)


class _Waiting(MetaPathFinder):
    """Finds transformers' modules and the models' as Python does, and counts those that are half loaded."""

    def __init__(self) -> None:
        self.depth = 0

    def find_spec(self, fullname: str, path=None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(("transformers", "delta_trn.models")):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((s for finder in others if (s := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Counting(spec.loader, self)
        return spec


class _Counting(Loader):
    """Executes a module by its own loader, and registers the models after the outermost module."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self.loader, self.waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        self.waiting.depth += 1
        try:
            self.loader.exec_module(module)
        finally:
            self.waiting.depth -= 1
        if self.waiting.depth == 0 and NAMES in sys.modules and self.waiting in sys.meta_path:
            sys.meta_path.remove(self.waiting)
            register()
