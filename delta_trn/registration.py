"""Registers the models with transformers, without importing transformers for it.

`AutoModelForCausalLM` must know our models once `delta_trn` is imported, but a kernel package or the
simulator must load without torch and transformers. So the registration waits for transformers' module of
model names. If it is loaded already, the models are registered at once; otherwise as soon as it is.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AUTO = "transformers.models.auto.modeling_auto"


def register() -> None:
    """Registers the models now if transformers' names are loaded, otherwise as soon as they are."""
    if AUTO in sys.modules:
        import delta_trn.models.language_model  # noqa: F401 - registers them
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Finds `AUTO` as Python does, once, and has the models registered after it has been executed."""

    def find_spec(self, fullname: str, path=None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """Executes a module by its own loader, then registers the models."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        import delta_trn.models.language_model  # noqa: F401 - registers them
