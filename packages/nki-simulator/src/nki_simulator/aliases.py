"""Let `import nki` find the simulator, so that kernel files written for the real package run
unmodified.

from nki_simulator.aliases import as_nki

with as_nki():
    from some_kernel_file import kernel
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nki_simulator import isa, kernel, language
from nki_simulator.core.dtypes import DType


class _Anything:
    """Stands for nki.typing's annotations, which mean nothing at run time."""

    def __getitem__(self, item: Any) -> "_Anything":
        return self

    def __call__(self, *args: Any) -> "_Anything":
        return self


class _Collectives(ModuleType):
    """Stands for nki.collectives. Groups of ranks can be made,
    but its functions connect devices.
    """

    class ReplicaGroup(language.NKIObject):
        groups: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"nki.collectives.{name} is not simulated; run the kernel for one device"
        )


@contextmanager
def as_nki() -> Iterator[None]:
    """Put the simulator in the place of `nki` and its modules, even where nki is installed."""
    nki: Any = ModuleType("nki")
    typing: Any = ModuleType("nki.typing")
    typing.tensor = typing.mutable_tensor = _Anything()
    nki.__path__ = []
    nki.__spec__ = ModuleSpec("nki", None, is_package=True)  # who asks for a spec gets one
    nki.dtype = DType
    nki.jit, nki.simulate = kernel.jit, kernel.simulate
    nki.isa, nki.language, nki.typing = isa, language, typing
    modules = {
        "nki": nki,
        "nki.isa": isa,
        "nki.isa.constants": isa.constants,
        "nki.language": language,
    }
    modules |= {"nki.typing": typing, "nki.collectives": _Collectives("nki.collectives")}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)  # at the end of Python the table may be empty already
            else:
                sys.modules[name] = module
