"""Finds calls and tensors without numbers in memory: recorded, fake, wrapped, divided and batched
ones.

A kernel reads where a tensor's data_ptr says. These have no such place, or what a kernel does there
is lost:

    recorded graphs     torch.compile, torch.jit.trace, make_fx: they hold what PyTorch is asked to
                        do
    fake, meta tensors  have shapes and dtypes alone
    subclasses          of Tensor with a __torch_dispatch__: DTensor, TwoTensor; others hold their
                        numbers
    lazy signs          of a conjugate's imaginary part: a plain tensor whose memory holds -x
    batched gradients   of is_grads_batched=True and torch.vmap: one tensor stands for many

PyTorch gives a custom operator what it needs in all of them but the last, and but DTensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.nn import Parameter

PLAIN = frozenset({Tensor, Parameter, type(None)})
MODES = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")
)
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_recorded() -> bool:
    """Returns whether PyTorch records what is called, or makes fake tensors of it.

    A mode that a user wrote, such as one that counts operations, does not count: what it sees is
    computed.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, MODES)):
        return True
    return torch._C._dispatch_tls_is_dispatch_key_included(PRE_DISPATCH)


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Returns whether the numbers of every tensor lie where its data_ptr says."""
    present = [x for x in tensors if x is not None]
    if not PLAIN.issuperset(map(type, present)) and any(map(has_own_dispatch, present)):
        return False
    return True not in map(Tensor.is_neg, present)


def has_own_dispatch(x: Tensor) -> bool:
    """Returns whether x is of a class that decides itself what an operation does with it."""
    return torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)


def may_read(x: Tensor) -> bool:
    """Returns whether Python may look at the data of x now."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    if type(x) not in PLAIN and has_own_dispatch(x):
        return False
    return torch._C._is_tracing() or not is_recorded()


def find_wrapper(tensors: Iterable[Tensor | None]) -> Tensor | None:
    """Returns the first tensor whose numbers other tensors hold; None if there is none."""
    for x in tensors:
        if (
            x is not None
            and type(x) not in PLAIN
            and type(x) is not FakeTensor
            and has_own_dispatch(x)
        ):
            return x
    return None


def is_divided(x: Tensor) -> bool:
    """Returns whether x is a DTensor."""
    # slow to import; where nobody did, there is none
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_batched(gradients: Iterable[Tensor | None]) -> bool:
    """Returns whether a gradient stands for many."""
    if torch._C._are_functorch_transforms_active():
        return True
    return any(x is not None and is_legacy_batchedtensor(x) for x in gradients)


def has_tangents(tensors: Iterable[Tensor | None]) -> bool:
    """Returns whether forward-mode differentiation follows one of these tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
