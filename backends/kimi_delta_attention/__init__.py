"""Kimi Delta Attention: the gated delta rule with a decay for each channel of a key
(arXiv:2510.26692).

Contract, judge and backends are those of `backends.gated_delta_rule`, by the dimensions of g. NKI's
kernels compute float32 and bfloat16, Triton's float16, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from delta_trn.backends.checks import shape_of
from delta_trn.backends.divided import SEQUENCES, TOKENS, has_shards, on_shards
from delta_trn.backends.gated_delta_rule import (
    bounds_of,
    checks,
    choose_step,
    first_state,
    make_operators,
    run,
    run_step,
    scale_of,
    sizes,
)
from delta_trn.backends.gated_delta_rule.contract import Rule, Step

CHANNELS = " K"  # the last dimension of g, for the checks
SAFE = -5.0  # the least bound of flash-linear-attention's safe gate
NOTICE = (
    "kimi_delta_attention runs on this GPU as PyTorch operations, chunk by chunk, since Triton's "
    "kernels do "
    'not take this call (backend="triton" says why), and it is many times slower than they are; name '
    'backend="chunked" to say that you know'
)


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool = False,
    return_states_at: Sequence[int] | None = None,
    position: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Kimi Delta Attention over sequences (arXiv:2510.26692): `gated_delta_rule` with a decay per
    channel.

        S <- Diag(exp(g_t)) S ;  u = beta_t (v_t - S^T k_t) ;  S <- S + k_t u^T ;  o_t = scale S^T q_t

    Shapes and dtypes are those of `gated_delta_rule`, but for g [B, T, HV, K], the natural
    logarithm of the decay of each row of the state, -inf <= g <= 0; and so are scale, l2norm,
    sigmoid of beta, states, packed sequences, return_states_at, backend, resets, gradients and
    errors. With all channels of g equal it is that rule. The gates of g in the call, with x = g +
    dt_bias; A_log [HV], dt_bias [HV, K] or flat [HV K], both any float, dt_bias may be None:

        use_gate_in_kernel              g <- -exp(A_log) softplus(x)
        use_gate_in_kernel, lower_bound < 0     g <- lower_bound sigmoid(exp(A_log) x); A_log None:
                                                rate 1

    Where rows hold several sequences, position [B, T] int64 has each token's place in its own, as
    `cu_seqlens` would say it of one row: a token whose place is 0 forgets what was before it,
    initial_state included. Its g and what makes it have gradients of 0.

    Names and positions are those of chunk_kda of flash-linear-attention 0.6.0. safe_gate promises
    a bounded g. With a gate it is checked as there: lower_bound is -5 or more. Of a g that is given
    it says that each token of a value head has g >= -5, or -inf in all channels, which is a reset.
    In 16 bits on Hopper faster kernels take such a g; no other result changes. What breaks the
    promise is refused in check mode; elsewhere those kernels take it as -5, others as it is.
    cu_seqlens_cpu, disable_recompute and chunk_size, 32 or 64, change nothing.
    transpose_state_layout is another name of state_v_first. cp_context, return_intermediate_states,
    use_graph and max_num_seqs are refused.

        >>> import torch
        >>> from delta_trn import kimi_delta_attention
        >>> x, beta = torch.ones(1, 2, 1, 2), torch.ones(1, 2, 1)      # two tokens, one head of two channels
        >>> g = torch.tensor([0.0, -torch.inf]).expand(1, 2, 1, 2)     # the second one forgets at once
        >>> options = {"scale": 1.0, "output_final_state": True}
        >>> o, state = kimi_delta_attention(x, x, 2 * x[..., :1], g, beta / 2, **options)
        >>> o.flatten().tolist(), state.flatten().tolist()
        ([2.0, 2.0], [1.5, 0.5])
    """
    if has_shards(q):
        return on_shards(kimi_delta_attention, locals(), SEQUENCES)
    refused = {"return_intermediate_states": return_intermediate_states, "use_graph": use_graph}
    for name, value in (refused | {"max_num_seqs": max_num_seqs}).items():
        if value:
            more = "; return_states_at gives states inside of sequences" if "states" in name else ""
            raise ValueError(f"{name}={value!r} is not supported; leave it out{more}")
    if chunk_size not in (32, 64):
        raise ValueError(
            f"chunk_size is {chunk_size}; pass 32 or 64, which change nothing, or leave it out"
        )
    v_first = state_v_first or transpose_state_layout
    initial_state = first_state(initial_state, q, v_first)
    checks.arguments(q, k, v, g, beta, initial_state, cu_seqlens, cp_context, CHANNELS)
    if position is not None:
        checks.places(position, q, cu_seqlens)
    A_log, dt_bias, lower_bound, beta_max = _gates(
        q, v.shape[2], use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate,
        use_beta_sigmoid_in_kernel, allow_neg_eigval,
    )  # fmt: skip
    tensors, packed = (
        (q, k, v, g, beta, A_log, dt_bias, initial_state),
        ["packed"] * (cu_seqlens is not None),
    )
    name, save = OPERATOR.choose(tensors, sizes(q, v), backend, *packed)
    _notice(q, backend, name)
    call = Rule(
        *tensors,
        bounds_of(cu_seqlens),
        position,
        scale_of(q, scale),
        beta_max,
        l2norm=use_qk_l2norm_in_kernel,
        output_final_state=output_final_state,
        lower_bound=lower_bound,
    )
    positions = checks.positions(return_states_at, q.shape[1], output_final_state)
    return run(OPERATOR, call, positions, save, name, v_first)


def kimi_delta_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    backend: str | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_indices: Tensor | None = None,
    accepted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of Kimi Delta Attention per sequence; see `kimi_delta_attention`,
    `gated_delta_rule_step`.

    g is [B, HV, K]; all other shapes, a pool of states, what is returned and the errors are those
    of `gated_delta_rule_step`.

        >>> import torch
        >>> from delta_trn import kimi_delta_attention_step
        >>> x, one = torch.ones(1, 1, 1), torch.ones(1, 1)
        >>> o, state = kimi_delta_attention_step(x, x, 3 * x, 0 * x, one, torch.zeros(1, 1, 1, 1))
        >>> o.item(), state.item()
        (3.0, 3.0)
    """
    if has_shards(q):
        return on_shards(kimi_delta_attention_step, locals(), TOKENS)
    checks.step_arguments(q, k, v, g, beta, state, state_indices, accepted, CHANNELS)
    A_log, dt_bias, lower_bound, beta_max = _gates(
        q, v.shape[-2], use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate,
        use_beta_sigmoid_in_kernel, allow_neg_eigval,
    )  # fmt: skip
    call = Step(
        q,
        k,
        v,
        g,
        beta,
        state,
        A_log,
        dt_bias,
        state_indices,
        accepted,
        scale_of(q, scale),
        beta_max,
        use_qk_l2norm_in_kernel,
        lower_bound,
    )
    operator, name, save = choose_step(call, OPERATORS, backend)
    _notice(q, backend, name)
    return run_step(call, operator, name, save)


def _gates(
    q: Tensor,
    HV: int,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    safe_gate: bool,
    use_sigmoid: bool,
    allow_neg_eigval: bool,
) -> tuple[Tensor | None, Tensor | None, float | None, float]:
    """Returns A_log, dt_bias [HV, K], lower_bound and beta_max. Raises for what does not fit.

    lower_bound is that of the gate; without a gate it is what safe_gate promises of g, or None.
    """
    K = q.shape[-1]
    if use_gate and lower_bound is not None:
        if not -math.inf < lower_bound < 0:
            raise ValueError(
                f"lower_bound is {lower_bound}; the gate is lower_bound sigmoid(exp(A_log) (g + "
                "dt_bias)), between it and 0: pass the finite number below 0 that the layer was "
                "trained with, or leave lower_bound out if its gate is -exp(A_log) softplus(g + "
                "dt_bias)"
            )
        A_log = torch.zeros(HV, device=q.device) if A_log is None else A_log
    if use_gate and safe_gate and not (lower_bound is not None and lower_bound >= SAFE):
        raise ValueError(
            f"safe_gate=True with lower_bound={lower_bound}; it promises g in [-5, 0), which a "
            "lower_bound from -5 to 0 keeps: leave safe_gate out, which changes no number here, "
            "or pass the lower_bound that the layer was trained with (without one its gate is "
            "another, of softplus)"
        )
    if isinstance(dt_bias, Tensor) and dt_bias.dim() == 1:
        if dt_bias.shape[0] != HV * K:
            raise ValueError(
                f"dt_bias {shape_of(dt_bias)} has not HV K = {HV} * {K} = {HV * K} elements; there "
                "is a bias for each channel of each value head: pass [HV, K], or that flat"
            )
        dt_bias = dt_bias.view(HV, K)
    beta_max = checks.gate_arguments(
        q, HV, use_gate, A_log, dt_bias, use_sigmoid, allow_neg_eigval, CHANNELS
    )
    if not use_gate:
        lower_bound = SAFE if safe_gate else None
    return A_log, dt_bias, lower_bound, beta_max


def _notice(q: Tensor, backend: str | None, chosen: str) -> None:
    """Warns, once in a process, where nobody has asked for PyTorch's operations on a GPU."""
    if backend is None and chosen == "chunked" and q.is_cuda and not torch.compiler.is_compiling():
        warnings.warn(NOTICE, stacklevel=3)


OPERATORS = OPERATOR, _, _ = make_operators("kimi_delta_attention")
