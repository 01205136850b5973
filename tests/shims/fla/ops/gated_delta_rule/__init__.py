"""FLA's entry points over `backends.gated_delta_rule` with the Triton backend."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from delta_trn import backends


def _under_its_old_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """state_v_first was transpose_state_layout; its tests want a warning for that, and one name at a time."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if "transpose_state_layout" in named:
            if "state_v_first" in named:
                raise ValueError("state_v_first and its old name, transpose_state_layout, are both given")
            warnings.warn("transpose_state_layout is state_v_first now", DeprecationWarning, stacklevel=2)
            named["state_v_first"] = named.pop("transpose_state_layout")
        return function(*arguments, **named)

    return call


@_under_its_old_name
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's arguments; chunk_size and cu_seqlens_cpu are hints that our function has no use for."""
    if initial_state is not None:
        # ours are float32 and key-first; theirs come in any dtype
        initial_state = (initial_state.transpose(-1, -2) if state_v_first else initial_state).float()
    o, state = backends.gated_delta_rule(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        g.float(),
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        backend="triton",
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval and use_beta_sigmoid_in_kernel,
    )
    return o, state.transpose(-1, -2) if state is not None and state_v_first else state


@_under_its_old_name
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gk: None = None,
    gv: None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's forward-only recurrence: dense inputs walk token by token through our decode step."""
    assert beta is not None and gk is None and gv is None
    with torch.no_grad():
        if state_v_first and initial_state is not None:
            initial_state = initial_state.transpose(-1, -2)
        T, (HV, V), K = q.shape[1], v.shape[2:], q.shape[3]
        ends = [(slice(None), 0, T)]
        if cu_seqlens is not None:
            bounds = cu_seqlens.tolist()
            ends = [(slice(n, n + 1), bounds[n], bounds[n + 1]) for n in range(len(bounds) - 1)]
        sequences = q.shape[0] if cu_seqlens is None else len(ends)
        state = (
            q.new_zeros((sequences, HV, K, V), dtype=torch.float32)
            if initial_state is None
            else initial_state
        )
        state, o = state.float().clone(), torch.empty_like(v)
        for rows, start, end in ends:
            for t in range(start, end):
                tokens = (x[:, t] for x in (q.to(v.dtype), k.to(v.dtype), v, g.float(), beta))
                o[:, t], state[rows] = backends.gated_delta_rule_step(
                    *tokens,
                    state[rows].contiguous(),
                    scale=scale,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                    backend="triton",
                    use_gate_in_kernel=use_gate_in_kernel,
                    A_log=A_log,
                    dt_bias=dt_bias,
                    use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                    allow_neg_eigval=allow_neg_eigval and use_beta_sigmoid_in_kernel,
                )
    state = state.transpose(-1, -2) if state_v_first else state
    return o, state if output_final_state else None
