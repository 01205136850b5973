"""Tensors without memory: floating-point numbers are not computed, integers are.

So a call at full size takes no memory and little time, while what decides its course is there:
tokens, positions, lengths of packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from delta_trn.backends.gpu_stand_in.cuda import CPU, is_cuda

ALIGNED = 512  # bytes, of torch's allocator


def address(x: Tensor) -> int:
    """Returns where a tensor would begin: storages at multiples of 512, as torch's allocator has
    them.
    """
    if not isinstance(x, FakeTensor):
        return x.data_ptr()
    return x.untyped_storage()._cdata * ALIGNED + x.storage_offset() * x.element_size()


def _convert(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Changes the dtypes of a module's tensors, as `nn.Module.to` does; all are on the device.

    torch would swap each with its successor, and cannot while something refers to it weakly.
    """
    for child in module.children() if recurse else ():
        _convert(child, change)
    tables: Any = (module._parameters, module._buffers)
    for own in tables:
        for name, x in own.items():
            if x is not None and (y := change(x)).dtype != x.dtype:
                own[name] = nn.Parameter(y, x.requires_grad) if name in module._parameters else y
    return module


class Weightless(TorchDispatchMode):
    """Within `with`, new tensors of floating-point numbers have shapes, strides and dtypes alone.

    Whole numbers and truth values that follow from them are 1, and so is a number that is read, such
    as a loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fakes, self.inside, self.patch = (
            FakeTensorMode(allow_non_fake_inputs=True),
            0,
            ExitStack(),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # autograd comes here past what makes tensors say that they are on a device
        self.inside += 1
        try:
            with torch._C.DisableTorchFunction():
                return self._run(func, args, kwargs or {})
        finally:
            self.inside -= 1

    def __enter__(self) -> Weightless:
        """Lets fake tensors, too, say that they are on the device."""
        place, own = torch.device("cuda", 0), cast(Any, FakeTensor.device).fget
        told = property(lambda x: own(x) if self.inside else place)
        self.patch.enter_context(mock.patch.object(FakeTensor, "device", told))
        self.patch.enter_context(mock.patch.object(nn.Module, "_apply", _convert))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.patch.close()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if tensors and not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        try:
            with self.fakes:
                made = func(*args, **kwargs)
        except DataDependentOutputException:
            return torch.ones((), dtype=tensors[0].dtype).item()
        if not tensors and isinstance(made, Tensor) and not made.is_floating_point():
            return func(*args, **kwargs)
        first = args[0] if args else None
        in_place = func._schema.name.endswith("_") and isinstance(first, Tensor)
        if in_place and not isinstance(first, FakeTensor):
            return first
        return tree_map(_whole, made)


def _whole(x: Any) -> Any:
    """Returns ones in place of whole numbers, and of truth values, that numbers without memory give."""
    if not isinstance(x, FakeTensor) or x.is_floating_point() or x.is_complex():
        return x
    return torch.ones(tuple(x.shape), dtype=x.dtype)
