"""Checks of the rule's arguments, made before any work.

`arguments`, `step_arguments` and `gate_arguments` read shapes, dtypes and devices only. `values`
reads data: the bounds of packed sequences on CPU always, everything else only in check mode, since
on an accelerator a look at data waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, arange, bfloat16, compiler, dtype, inf, int32, int64

from delta_trn.backends.checks import (
    in_brackets,
    is_checking,
    refuse_where,
    require_dtypes,
    require_finite,
    require_one_device,
    require_shapes,
    require_short_keys,
    require_strengths,
    require_tensors,
    shape_of,
)
from delta_trn.backends.gated_delta_rule.contract import (
    RESET,
    Rule,
    Step,
    gates_of,
    make_gates,
    state_dtype,
)


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_context: object = None,
    channels: str = "",
) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices fit the operation.

    channels    " K" where each channel of a key has a decay, g [B, T, HV, K]
    """
    if cp_context is not None:
        raise ValueError(
            f"cp_context is a {type(cp_context).__name__}; no sequence is divided over processes "
            "here: pass None, and train with distribution.context=N"
        )
    sizes = _tensors("B T ", q, k, v, g, beta, channels)
    sequences = sizes["B"]
    if cu_seqlens is not None:
        _packed_shapes(q, cu_seqlens)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        _state("initial_state", initial_state, q, sizes | {"N": sequences}, "N HV K V")


def step_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    indices: Tensor | None,
    accepted: Tensor | None,
    channels: str = "",
) -> None:
    """Raises TypeError or ValueError unless shapes,
    dtypes and devices fit the operation for one token.
    """
    if indices is None:
        if accepted is not None:
            raise ValueError(
                "accepted passed without state_indices; pass both, and a pool as state"
            )
        _state("state", state, q, _tensors("B ", q, k, v, g, beta, channels), "B HV K V")
        return
    given = {"state_indices": indices} | ({} if accepted is None else {"accepted": accepted})
    require_tensors(given)
    lead = "B T " if indices.dim() == 2 else "B "
    sizes = _tensors(lead, q, k, v, g, beta, channels)
    require_shapes({"state_indices": lead, "accepted": "B"}, given, sizes)
    for name, x in given.items():
        if x.dtype not in (int64, int32):
            raise TypeError(f"{name} is {x.dtype}; pass int64 or int32")
    require_one_device(q, "q", given)
    _state("state", state, q, sizes, "N HV K V", bfloat16)
    if not (state[:1].is_contiguous() or state[:1].mT.is_contiguous()):
        raise ValueError(
            f"state {shape_of(state)} has strides {state.stride()}; a pool is written in place, so "
            "each of its slots must be contiguous: [HV, K, V], or [HV, V, K] passed as pool.mT"
        )


def places(position: Tensor, q: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raises TypeError or ValueError unless `position` fits a call of `kimi_delta_attention`."""
    if cu_seqlens is not None:
        raise ValueError(
            "position and cu_seqlens exclude each other; both say where sequences begin: pass one"
        )
    B, T = q.shape[:2]
    require_shapes({"position": "B T"}, {"position": position}, {"B": B, "T": T})
    if position.dtype != int64:
        raise TypeError(
            f"position is {position.dtype}, not torch.int64; convert it once with .long()"
        )
    require_one_device(q, "q", {"position": position})
    if not (compiler.is_compiling() or position.is_meta) and is_checking():
        expected = F.pad(position[:, :-1] + 1, (1, 0))
        expected[:, :1] = position[:, :1].clamp(min=0)
        why = "neither is 0 nor follows the token before; it counts a sequence's tokens from 0 on"
        refuse_where((position != expected) & (position != 0), "position", position, why)


def slots(indices: Tensor, accepted: Tensor | None, N: int) -> None:
    """Raises ValueError for slots outside of a pool of N, or of two rows,
    and for impossible `accepted`.
    """
    if not (is_checking() or indices.device.type == "cpu"):
        return
    why = (
        f"is not in a pool of N={N} slots; pass 0 to {N - 1}, or a negative number to skip a token"
    )
    refuse_where(indices >= N, "state_indices", indices, why)
    rows = arange(len(indices), device=indices.device)[:, None].expand_as(indices)
    places = indices.long().where(indices >= 0, N)
    others = (rows.new_empty(N + 1).index_put_((places,), rows)[places] != rows) & (places < N)
    why = (
        "another row has, too, and both would write that state; give each sequence slots of its own"
    )
    refuse_where(others, "state_indices", indices, why)
    if accepted is not None:
        T = indices.shape[1]
        why = f"is outside of 1 to T={T}; pass how many of the last call's tokens are kept"
        refuse_where((accepted < 1) | (accepted > T), "accepted", accepted, why)


def gate_arguments(
    q: Tensor,
    HV: int,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    channels: str = "",
) -> float:
    """Returns beta_max; 0 where beta is a strength.
    Raises TypeError or ValueError for what does not fit.
    """
    if use_gate_in_kernel and A_log is None:
        raise ValueError(
            "use_gate_in_kernel=True without A_log; it makes the decay of what a layer projects, "
            "at a rate of exp(A_log): pass A_log [HV], and dt_bias "
            f"{in_brackets(('HV' + channels).split())} if the layer has one, or leave "
            "use_gate_in_kernel out if g is finished, the logarithm of the decay"
        )
    parameters = {name: x for name, x in (("A_log", A_log), ("dt_bias", dt_bias)) if x is not None}
    if parameters and not use_gate_in_kernel:
        given = " and ".join(parameters)
        ends = "softplus, or the sigmoid of a lower_bound" if channels else "softplus"
        raise ValueError(
            f"{given} passed with use_gate_in_kernel=False, which takes g as it is, the finished "
            f"logarithm of the decay; leave {given} out if g is finished, or pass "
            "use_gate_in_kernel=True and, as g, what the layer projects, before dt_bias and "
            f"{ends}: of a finished g the call would make a gate again"
        )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval=True with use_beta_sigmoid_in_kernel=False, which takes beta as it "
            "is, a finished write strength from 0 to 2; leave allow_neg_eigval out if beta is "
            "finished, or pass use_beta_sigmoid_in_kernel=True and, as beta, what the layer "
            "projects, before the sigmoid that allow_neg_eigval doubles"
        )
    for name, x in parameters.items():
        letters = "HV" + (channels if name == "dt_bias" else "")
        require_shapes({name: letters}, {name: x}, {"HV": HV, "K": q.shape[-1]})
        if not x.is_floating_point():
            raise TypeError(f"{name} is {x.dtype}; pass a floating point tensor")
    require_one_device(q, "q", parameters)
    return (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else 0.0


def positions(
    return_states_at: Sequence[int] | None, T: int, output_final_state: bool
) -> tuple[int, ...] | None:
    """Returns the positions whose states are wanted.
    Raises TypeError or ValueError for what does not fit.
    """
    if return_states_at is None:
        return None
    if not isinstance(return_states_at, Sequence) or not all(
        isinstance(p, int) for p in return_states_at
    ):
        raise TypeError(
            f"return_states_at is a {type(return_states_at).__name__}; pass a tuple of ints, such "
            "as tuple(x.tolist()) of a tensor x: a call is cut there, before it looks at any data"
        )
    if output_final_state:
        raise ValueError(
            "return_states_at with output_final_state=True; these states are returned in place of "
            f"the last one: leave it out, and name {T}, or the end of each packed sequence, among "
            "the positions"
        )
    for before, p in pairwise((0, *return_states_at)):
        if not before < p <= T:
            raise ValueError(
                f"return_states_at has {p} after {before}; positions are numbers of tokens and "
                f"rise from 1 to T={T}: sort them, and take the state before the first token from "
                "initial_state"
            )
    return tuple(return_states_at)


def _tensors(
    lead: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, channels: str
) -> dict[str, int]:
    """Returns the sizes of the tensors that all calls have;
    `lead` names the dimensions before the heads.
    """
    last = {"q": "H K", "k": "H K", "v": "HV V", "g": "HV" + channels, "beta": "HV"}
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    sizes = require_shapes({name: lead + words for name, words in last.items()}, tensors)
    H, HV, K, V = (sizes[letter] for letter in ("H", "HV", "K", "V"))
    if min(H, HV, K, V) == 0:
        raise ValueError(
            f"H={H}, HV={HV}, K={K}, V={V} in q {shape_of(q)}, v {shape_of(v)}; all must be at "
            "least 1"
        )
    if HV % H:
        raise ValueError(
            f"HV={HV} is not a multiple of H={H}; value head j reads query head j // (HV / H)"
        )
    require_dtypes(q, "q", {"k": k, "v": v}, {"g": g, "beta": beta})
    require_one_device(q, "q", {"k": k, "v": v, "g": g, "beta": beta})
    return sizes


def _packed_shapes(q: Tensor, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"cu_seqlens is a {type(cu_seqlens).__name__}; pass an int64 tensor [N + 1]"
        )
    if cu_seqlens.dtype not in (int64, int32):
        raise TypeError(
            f"cu_seqlens is {cu_seqlens.dtype}; pass int64 or int32, the running sum of lengths"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens {shape_of(cu_seqlens)} is not [N + 1] with N >= 1; pass [0, end of 1st, "
            "..., T]"
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"B={q.shape[0]} with cu_seqlens; packed sequences lie end to end in one row: reshape "
            "to B=1"
        )
    require_one_device(q, "q", {"cu_seqlens": cu_seqlens})


def _state(
    name: str,
    state: Tensor,
    q: Tensor,
    sizes: dict[str, int],
    letters: str,
    other: dtype | None = None,
) -> None:
    require_shapes({name: letters}, {name: state}, sizes)
    full = state_dtype(q.dtype)
    if state.dtype not in (full, other):
        wanted = (
            f"{full}: states keep full precision"
            if other is None
            else f"{full} or {other}: convert it"
        )
        raise TypeError(f"{name} is {state.dtype}; with {q.dtype} q it is {wanted}")
    require_one_device(q, "q", {name: state})


def values(call: Rule | Step) -> None:
    """Raises ValueError for data outside the rule's domain;
    the module's docstring says when data is read.
    """
    cu_seqlens = call.cu_seqlens if isinstance(call, Rule) else None
    if cu_seqlens is not None and (is_checking() or cu_seqlens.device.type == "cpu"):
        _bounds(cu_seqlens, call.q.shape[1])
    if not is_checking():
        return
    others = ("cu_seqlens", "position")
    tensors = {
        name: x for name, x in vars(call).items() if isinstance(x, Tensor) and name not in others
    }
    if isinstance(call, Step) and call.indices is not None:
        del tensors["state"]  # slots that are not in use may hold anything
    if call.A_log is None:
        tensors["g"] = call.g.clamp(min=RESET)  # -infinity is a reset; NaN stays
    require_finite(tensors)
    g, beta = make_gates(*gates_of(call))
    refuse_where(
        g > 0,
        "g",
        g,
        "is above 0; g is the logarithm of a decay in (0, 1]: pass log(alpha), not alpha, or, if "
        "it is what a layer projects, also use_gate_in_kernel=True and the layer's A_log and "
        "dt_bias",
    )
    require_strengths(beta, "sigmoid(b) or 2 sigmoid(b)")
    if call.A_log is None and call.lower_bound is not None:
        _promise(call.g, call.lower_bound)
    if not call.l2norm:
        require_short_keys(call.k, "use_qk_l2norm_in_kernel=True")


def _promise(g: Tensor, least: float) -> None:
    """Raises ValueError where a g that is given breaks what safe_gate promises of it."""
    resets = g == -inf
    why = (
        f"is below {least:g}, and safe_gate=True promises that none is: pass -inf in all channels "
        "for a reset, or leave safe_gate out"
    )
    refuse_where((g < least) & ~resets, "g", g, why)
    why = (
        "is a reset, and other channels of its head are none; safe_gate=True promises that all "
        "are: leave it out"
    )
    refuse_where(resets & ~resets.all(-1, keepdim=True), "g", g, why)


def _bounds(cu_seqlens: Tensor, T: int) -> None:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T:
        raise ValueError(
            f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to T={T}"
        )
    for n in range(len(bounds) - 1):
        if bounds[n] > bounds[n + 1]:
            raise ValueError(
                f"cu_seqlens falls from {bounds[n]} at {n} to {bounds[n + 1]} at {n + 1}; "
                "pass the running sum of the lengths"
            )
