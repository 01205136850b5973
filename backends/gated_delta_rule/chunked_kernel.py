"""Runs the C++ kernels of the chunked backend, one for each delta rule; float64 stays with PyTorch.

The one of the gated delta rule is chunked_kernel.cpp here; Kimi Delta Attention has its own in its
folder. float16 and bfloat16 inputs are converted to float32 before, and results back after. Forward
saves E, what each token finds missing [B, T, HV, V], and the first state of each chunk but a
sequence's first.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array, c_double, c_int64
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from delta_trn.backends import compiler
from delta_trn.backends.gated_delta_rule.contract import Gradients, Rule, Shapes, Step

# `struct Call` of chunked_kernel.cpp: the tensors' addresses, strides of some, then numbers, each
# in 8 bytes
POINTERS = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "initial_state",
    "bounds",
    "saved",
    "o",
    "E",
    "states",
    "final_state",
    "d_o",
    "dfinal_state",
    "dq",
    "dk",
    "dv",
    "dg",
    "dbeta",
    "dinitial_state",
)
STRIDED = ("q", "k", "v", "g", "beta", "d_o")
NUMBERS = ("N", "T", "H", "HV", "K", "V", "C", "normalize", "threads")
FOLDER = Path(__file__).parent
HEADERS = (
    FOLDER / "chunked_head.h",
    FOLDER / "chunked_products.h",
    FOLDER.parent / "exponential.h",
)
Arguments = c_int64 * (len(POINTERS) + 3 * len(STRIDED) + len(NUMBERS))


def takes(call: Rule | Step) -> bool:
    """Returns whether the kernel computes a call. Warns once where it should, and is not there."""
    dtype, device = call.q.dtype, call.q.device.type
    if device == "cpu" and dtype != torch.float64:
        compiler.warn_once(library(call.has_channels))
    return refusal(dtype, device, call.has_channels) is None


def refusal(dtype: torch.dtype, device: str, channels: bool = False) -> str | None:
    """Returns why PyTorch computes calls of a dtype on a device; None if the kernel does."""
    if device != "cpu":
        return f"PyTorch, since the C++ kernel is for CPUs and tensors are on {device}"
    if dtype == torch.float64:
        return "PyTorch, since the C++ kernel computes in float32 and tensors are float64"
    compiled = library(channels)
    return None if compiled.functions is not None else compiled.note


@cache
def library(channels: bool) -> compiler.Library:
    """Returns the compiled kernel, that of decays per channel or the other,
    or why there is none.
    """
    folder = FOLDER.parent / "kimi_delta_attention" if channels else FOLDER
    return compiler.load(folder / "chunked_kernel.cpp", HEADERS)


def saved_shapes(call: Rule, C: int) -> Shapes:
    """Returns the shapes of E and of the first states of all chunks but each sequence's first."""
    (B, T, _, K), (HV, V) = call.q.shape, call.v.shape[2:]
    # the data of cu_seqlens is not looked at: n tokens have (n - 1) // C, all together no more than
    # T // C
    saved = B * ((T - 1) // C) if call.cu_seqlens is None else T // C
    return [((B, T, HV, V), torch.float32), ((saved, HV, K, V), torch.float32)]


def forward(call: Rule, C: int, *, save: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Does what an adapter's `forward` does, in chunks of C tokens."""
    o, final_state = call.v.new_empty(call.v.shape, dtype=torch.float32), None
    E, states = [o.new_empty(shape) for shape, _ in saved_shapes(call, C)] if save else (None, None)
    if call.output_final_state:
        final_state = o.new_empty(
            (call.sequences, call.v.shape[2], call.q.shape[3], call.v.shape[3])
        )
    outputs = {"o": o, "E": E, "states": states, "final_state": final_state}
    numbers = _pack(call, call.initial_state, C, outputs)
    _function("forward", call)(numbers, c_double(call.scale))
    return o.to(call.v.dtype), final_state, [] if E is None or states is None else [E, states]


def backward(
    do: Tensor, dstate: Tensor | None, call: Rule, saved: list[Tensor], C: int
) -> Gradients:
    """Does what an adapter's `backward` does."""
    (B, T, H, K), HV = call.q.shape, call.v.shape[2]
    E, states = saved
    dq, dk, dv = E.new_empty((B, T, HV, K)), E.new_empty((B, T, HV, K)), torch.empty_like(E)
    dg, dbeta = E.new_empty(call.g.shape), E.new_empty((B, T, HV))
    dinitial = None if call.initial_state is None else E.new_empty(call.initial_state.shape)
    tensors = {"E": E, "states": states, "d_o": _rows(do), "dinitial_state": dinitial}
    tensors |= {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta}
    tensors["dfinal_state"] = None if dstate is None else dstate.contiguous()
    numbers = _pack(call, call.initial_state, C, tensors)
    _function("backward", call)(numbers, c_double(call.scale))
    if H != HV:
        dq, dk = (x.unflatten(2, (H, HV // H)).sum(3) for x in (dq, dk))
    like = ((dq, call.q), (dk, call.k), (dv, call.v), (dg, call.g), (dbeta, call.beta))
    return Gradients(*(dx.to(x.dtype) for dx, x in like), initial_state=dinitial)


def step(call: Step) -> tuple[Tensor, Tensor]:
    """Does what an adapter's `step` does."""
    state = call.state.new_empty(call.state.shape)
    o = state.new_empty(call.v.shape)
    tensors: dict[str, Tensor | None] = {"o": o, "final_state": state}
    numbers = _pack(call, call.state, 1, tensors)
    _function("step", call)(numbers, c_double(call.scale))
    return o.to(call.v.dtype), state


def _function(name: str, call: Rule | Step) -> Callable[..., None]:
    rule = "kimi_delta_attention" if call.has_channels else "gated_delta_rule"
    return getattr(library(call.has_channels).functions, f"{rule}_{name}")


def _pack(
    call: Rule | Step, initial_state: Tensor | None, C: int, tensors: dict[str, Tensor | None]
) -> Array[c_int64]:
    """Returns the kernel's `Call`; adds the call's tensors in float32 to `tensors`,
    which keep them alive.
    """
    q, k, v, g, beta = (
        _rows(call.q),
        _rows(call.k),
        _rows(call.v),
        call.g.float(),
        call.beta.float(),
    )
    g = _rows(g) if call.has_channels else g
    tensors |= {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if initial_state is not None:
        tensors["initial_state"] = initial_state.contiguous()
    N, *times, H, K = q.shape
    cu_seqlens = getattr(call, "cu_seqlens", None)
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1
        tensors["bounds"] = cu_seqlens.contiguous()
        saved = (cu_seqlens.diff() - 1).clamp(min=0) // C
        tensors["saved"] = torch.nn.functional.pad(saved.cumsum(0), (1, 0))
    fields = [0 if (x := tensors.get(word)) is None else x.data_ptr() for word in POINTERS]
    for word in STRIDED:
        x = tensors.get(word)
        strides = (0, 0, 0) if x is None else x.stride()
        fields += strides[:3] if times or x is None else (strides[0], 0, strides[1])
    fields += (N, times[0] if times else 1, H, v.shape[-2], K, v.shape[-1], C)
    fields += (call.l2norm, torch.get_num_threads())
    return Arguments(*fields)


def _rows(x: Tensor) -> Tensor:
    """Returns x in float32, with a contiguous last dimension."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
