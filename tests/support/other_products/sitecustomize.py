"""Makes torch's matrix products on the CPU by NumPy's BLAS: the sums of another machine.

A test whose tolerance holds for one order of summation only turns red. `pytest --other-products`
puts this folder on PYTHONPATH, so that the processes that tests start compute so, too.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def product(a: Any, b: Any) -> Any:
    """Returns a @ b by NumPy, summed in float32 at least and rounded once to the dtype of a."""
    import numpy as np
    import torch

    full = a.dtype if a.dtype in (torch.float64, torch.float32) else torch.float32
    if a.is_complex() or not a.is_floating_point():
        full = a.dtype
    # copies, since torch cannot resize memory that NumPy has seen, as FSDP does
    x, y = (z.detach().to(full, copy=True).numpy() for z in (a, b))
    return torch.from_numpy(np.matmul(x, y)).clone()


def multiply(a: Any, b: Any) -> Any:
    return product(a, b).to(a.dtype)


def multiply_into(a: Any, b: Any, *, out: Any) -> Any:
    return out.resize_(*a.shape[:-1], b.shape[-1]).copy_(product(a, b))


def add(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Returns beta x + alpha a @ b; x is not read where beta is 0, as torch promises."""
    y = product(a, b)
    y = y * alpha if alpha != 1 else y
    return (y if beta == 0 else y + beta * x.to(y.dtype)).to(a.dtype)


def add_into(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1, out: Any) -> Any:
    return out.resize_(*a.shape[:-1], b.shape[-1]).copy_(add(x, a, b, beta=beta, alpha=alpha))


def add_in_place(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return x.copy_(add(x, a, b, beta=beta, alpha=alpha))


def replace_products() -> None:
    """Puts NumPy's products in place of torch's, for forward and backward."""
    import warnings

    import torch

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that these kernels exist
        for name in ("mm", "bmm"):
            library.impl(name, multiply, "CPU")
            library.impl(f"{name}.out", multiply_into, "CPU")
        for name in ("addmm", "baddbmm"):
            library.impl(name, add, "CPU")
            library.impl(f"{name}.out", add_into, "CPU")
            library.impl(f"{name}_", add_in_place, "CPU")
    torch._other_products = library  # type: ignore[attr-defined]  # dies with the process, not before


class _AfterTorch(MetaPathFinder, Loader):
    """Replaces the products as soon as torch has been imported, without importing it itself."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        replace_products()


if "torch" in sys.modules:
    replace_products()
else:
    sys.meta_path.insert(0, _AfterTorch())
