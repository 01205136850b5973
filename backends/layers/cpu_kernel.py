"""Runs cpu_kernel.cpp: the layers' operations in C++ for float32 tensors on a CPU.

`pytorch` calls these functions where `takes` says so, and computes all else by itself.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from delta_trn.backends import compiler
from delta_trn.backends.layers.contract import Convolution, GatedNorm, SumNorm

ROWS = 64  # of cpu_kernel.cpp


@cache
def library() -> compiler.Library:
    """Returns the compiled kernel, or why there is none."""
    source = Path(__file__).with_suffix(".cpp")
    return compiler.load(source, [source.parent.parent / "exponential.h"])


def takes(*tensors: Tensor | None) -> bool:
    """Returns whether the kernel computes with these tensors: they are float32 and on a CPU.

    Warns once where they are, and there is no kernel.
    """
    known = [x for x in tensors if x is not None]
    plain = all(x.dtype == torch.float32 and compiler.lies_in_memory(x) for x in known)
    if plain:
        compiler.warn_once(library())
    return plain and library().functions is not None


def takes_convolution(call: Convolution) -> bool:
    """Returns whether the kernel computes this call: it knows nothing of a prefix."""
    return call.prefix is None and takes(call.x, call.weight)


def convolution_forward(call: Convolution) -> Tensor:
    """Returns y."""
    x, (B, T, C), W = call.x.contiguous(), call.x.shape, call.weight.shape[1]
    y = torch.empty_like(x)
    _run(
        "convolution_forward",
        x,
        _taps(call),
        call.position,
        y,
        B,
        T,
        C,
        W,
        call.activation == "silu",
    )
    return y


def convolution_backward(dy: Tensor, call: Convolution) -> tuple[Tensor, Tensor, None]:
    """Returns dx, dweight, and None for the prefix."""
    x, (B, T, C), W = call.x.contiguous(), call.x.shape, call.weight.shape[1]
    dx, dtaps = torch.empty_like(x), x.new_empty((B, W, C))
    silu = call.activation == "silu"
    inputs = dy.contiguous(), x, _taps(call), call.position
    _run("convolution_backward", *inputs, dx, dtaps, B, T, C, W, silu)
    return dx, dtaps.sum(0).t(), None


def norm_forward(call: GatedNorm | SumNorm) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns y, the total or None, and the reciprocal norms [..., 1]."""
    x, gate, residual = (
        call.x.contiguous(),
        getattr(call, "gate", None),
        getattr(call, "residual", None),
    )
    silu = getattr(call, "activation", "swish") == "swish"
    y, r = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))
    total = None if residual is None else torch.empty_like(x)
    inputs = (
        x,
        *(None if z is None else z.contiguous() for z in (gate, residual)),
        call.weight.contiguous(),
    )
    _run("norm_forward", *inputs, y, total, r, r.numel(), x.shape[-1], silu, float(call.eps))
    return y, total, r


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    r: Tensor,
    *,
    silu: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the gradient of x, to which dtotal is added, dgate or None, and dweight.

    silu    whether the gate is multiplied as SiLU of it, or as its sigmoid
    """
    dy, x = dy.contiguous(), x.contiguous()
    gate, dtotal = (None if z is None else z.contiguous() for z in (gate, dtotal))
    dx, dgate = torch.empty_like(x), None if gate is None else torch.empty_like(x)
    dweight = x.new_empty((-(-r.numel() // ROWS), x.shape[-1]))
    inputs = dy, dtotal, x, gate, weight.contiguous(), r
    _run("norm_backward", *inputs, dx, dgate, dweight, r.numel(), x.shape[-1], silu)
    return dx, dgate, dweight.sum(0)


def softmax_(
    logits: Tensor, target: Tensor, keep: Tensor, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns what `pytorch.tokenwise_cross_entropy` asks of its softmax_,
    in the place of the logits.
    """
    losses = logits.new_empty(logits.shape[0])
    inputs = logits, target.contiguous(), keep.contiguous(), losses
    _run("softmax", *inputs, *logits.shape, save)
    return losses.sum(), logits if save else None


def _taps(call: Convolution) -> Tensor:
    return call.weight.t().contiguous()


def _run(name: str, *arguments: Tensor | int | float | None) -> None:
    """Calls a function of the kernel; its last argument is the number of threads."""
    functions = library().functions
    assert functions is not None
    words: list[object] = []
    for x in (*arguments, torch.get_num_threads()):
        if x is None or isinstance(x, Tensor):
            words.append(ctypes.c_void_p(None if x is None else x.data_ptr()))
        else:
            words.append(ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(int(x)))
    functions[name](*words)
