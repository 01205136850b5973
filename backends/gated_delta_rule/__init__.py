"""The gated delta rule: what it computes, in which shapes, and the notation of all its backends.

Per value head, with state S [K, V]:

    S <- exp(g_t) S ;  u = beta_t (v_t - S^T k_t) ;  S <- S + k_t u^T ;  o_t = scale S^T q_t

Backends that work chunk by chunk (PyTorch, Triton, NKI, and parity's baseline) share these letters.
Q, K, V are the chunk's rows, `.` is the elementwise product, C the number of tokens in a chunk:

    b       running sum of g inside the chunk               [C]
    D       exp(b_i - b_j) for i >= j, else 0               [C, C]
    L       strict lower triangle of diag(beta) K K^T . D   [C, C]
    T       (I + L)^-1                                      [C, C]
    P       scale * lower(Q K^T) . D                        [C, C]
    R, dR   what the state lacks of V: V - diag(gam) K S,
            with gam_i = exp(b_i); and its gradient         [C, V]
    U       what the chunk writes                           [C, V]
    S, dS   the state and its gradient                      [K, V]
    A       a segment's transition: S -> A S + ...          [K, K]

Products are in the dtype of q, also under autocast; states, decay sums, exponentials and the
triangular inverse are float32 on every backend, float64 for float64 inputs.

`contract` says what a backend is; `recurrent` is the equation itself, and the judge of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends import dispatch, stand_ins
from delta_trn.backends.divided import SEQUENCES, TOKENS, has_shards, on_shards
from delta_trn.backends.gated_delta_rule import checks, contract
from delta_trn.backends.gated_delta_rule.contract import AnyCall, Gradients, Rule, Step, state_dtype
from delta_trn.backends.gated_delta_rule.once import once
from delta_trn.backends.gated_delta_rule.states import compute_states, step_in_pool
from delta_trn.backends.operator import Operator, gradients_wanted


def gated_delta_rule(
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
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    return_states_at: Sequence[int] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""The gated delta rule over sequences (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464).

        S <- exp(g_t) S ;  u = beta_t (v_t - S^T k_t) ;  S <- S + k_t u^T ;  o_t = scale S^T q_t

    Shapes, with B batch, T time, H query and key heads, HV value heads (a multiple of H: value head
    j reads query and key head j // (HV / H)), K and V head sizes, N sequences:

        q, k            [B, T, H, K]    float64, float32, bfloat16, float16; |k| <= 1, or see below
        v               [B, T, HV, V]   dtype of q
        g               [B, T, HV]      natural logarithm of the decay, -inf <= g <= 0; float32, or
                                        the dtype of q
        beta            [B, T, HV]      write strength in [0, 2]; float32, or the dtype of q
        initial_state   [N, HV, K, V]   float32, or the dtype of q; zeros when None
        cu_seqlens      [N + 1]         int64 or int32, from 0 to T: N sequences in B = 1; some may
                                        be empty. On an accelerator a tensor is read once, until an
                                        operation of torch writes to it: what writes to x.data, or
                                        by another library, has to pass a new tensor
        returns o       [B, T, HV, V]   dtype of q
            final_state [N, HV, K, V]   float32 or float64, after the last token; None if not asked
                                        for

    scale defaults to K**-0.5. use_qk_l2norm_in_kernel replaces q and k by x * rsqrt(sum(x^2) +
    1e-6) over K. Without cu_seqlens, N = B. B or T may be 0. state_v_first: states are [N, HV, V,
    K]. Differentiable once in all tensors but cu_seqlens, through o and final_state. A g below -104
    (float32), a mask's -1e9 or
    -inf, is a reset with gradient 0: the state is forgotten, and the tokens around it keep their accuracy.

    g and beta may be a layer's projections, of any sign. Kernels that can, else PyTorch, make the
    gates:

        use_gate_in_kernel          g <- -exp(A_log) softplus(g + dt_bias); A_log, dt_bias [HV], any
                                    float, dt_bias may be None
        use_beta_sigmoid_in_kernel  beta <- sigmoid(beta), with allow_neg_eigval 2 sigmoid(beta)

    return_states_at replaces the final state by the states after these numbers of tokens of each
    row, rising, from 1 to T: [B, P, HV, K, V]. Of packed sequences each is the state of the
    sequence that the token belongs to.

    Names and positions are those of flash-linear-attention 0.6.0. cu_seqlens_cpu, chunk_indices and
    chunk_size change nothing here; a cp_context is refused. backend names one ("chunked", "triton",
    ...); None takes the default backend (`default_backend`), else the one for the tensors' device.
    Raises BackendRefusal, with every reason, and never substitutes; TypeError and ValueError for
    arguments that do not fit.

        >>> import torch
        >>> from delta_trn import gated_delta_rule
        >>> x = torch.ones(1, 2, 1, 1)                          # two tokens, one head of size 1
        >>> g, beta = torch.full((1, 2, 1), 0.5).log(), torch.ones(1, 2, 1)
        >>> o, state = gated_delta_rule(x, x, 2 * x, g, beta, output_final_state=True)
        >>> o.flatten().tolist(), state.item()
        ([2.0, 2.0], 2.0)
    """
    if has_shards(q):
        return on_shards(gated_delta_rule, locals(), SEQUENCES)
    initial_state = first_state(initial_state, q, state_v_first)
    checks.arguments(q, k, v, g, beta, initial_state, cu_seqlens, cp_context)
    beta_max = checks.gate_arguments(
        q,
        v.shape[2],
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    name, save = OPERATOR.choose(
        tensors, sizes(q, v), backend, *(() if cu_seqlens is None else ("packed",))
    )
    call = Rule(
        *tensors,
        bounds_of(cu_seqlens),
        None,
        scale=scale_of(q, scale),
        beta_max=beta_max,
        l2norm=use_qk_l2norm_in_kernel,
        output_final_state=output_final_state,
    )
    positions = checks.positions(return_states_at, q.shape[1], output_final_state)
    return run(OPERATOR, call, positions, save, name, state_v_first)


def gated_delta_rule_step(
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
    state_indices: Tensor | None = None,
    accepted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule per sequence, for generation; see `gated_delta_rule`.

        q, k            [B, H, K]
        v               [B, HV, V]
        g, beta         [B, HV]
        state           [B, HV, K, V]   float32, float64 with float64 inputs; not changed in place
        returns o       [B, HV, V]      dtype of q
            state       [B, HV, K, V]   after the token

    Where gradients are wanted it is `gated_delta_rule` with T = 1 on the same backend. It raises
    the same errors. For serving, states lie in a pool, which is written in place and returned:

        state           [N, HV, K, V]   also bfloat16: computed in float32, rounded where a state is
                                        stored
        state_indices   [B]             each sequence's slot, int64 or int32; of its own
        or              [B, T]          with q, k, v, g, beta, o [B, T, ...]: the state after each
                                        of T tokens goes to the token's slot. It starts from the
                                        slot of token
        accepted        [B]             1 to T of the last call, the last one that it keeps; None:
                                        the first

    A token whose slot is negative is skipped: its o is 0, and no state is read or written. So are
    all of a sequence that would start from one. Slots are checked on CPUs, and elsewhere in check
    mode only, since a look at them waits for the device: there a slot that is not in the pool is
    out of bounds. No gradients.

        >>> import torch
        >>> from delta_trn import gated_delta_rule_step
        >>> x, one = torch.ones(1, 1, 1), torch.ones(1, 1)
        >>> o, state = gated_delta_rule_step(x, x, 3 * x, 0 * one, one, torch.zeros(1, 1, 1, 1))
        >>> o.item(), state.item()
        (3.0, 3.0)
        >>> x, one, pool = torch.ones(2, 1, 1), torch.ones(2, 1), torch.zeros(3, 1, 1, 1)
        >>> o, _ = gated_delta_rule_step(x, x, 3 * x, 0 * one, one, pool, state_indices=torch.tensor([2, -1]))
        >>> o.flatten().tolist(), pool.flatten().tolist()
        ([3.0, 0.0], [0.0, 0.0, 3.0])
    """
    if has_shards(q):
        return on_shards(gated_delta_rule_step, locals(), TOKENS)
    checks.step_arguments(q, k, v, g, beta, state, state_indices, accepted)
    beta_max = checks.gate_arguments(
        q,
        v.shape[-2],
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
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
    )
    return run_step(call, *choose_step(call, OPERATORS, backend))


def choose_step(
    call: Step, operators: Sequence[Operator], backend: str | None
) -> tuple[Operator, str, bool]:
    """Returns which operator takes the call, that of sequences where gradients are wanted, by which
    backend.

    The last value says whether they are.
    """
    tensors = (call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.state)
    wanted, pooled = gradients_wanted(*tensors), call.indices is not None
    if wanted and pooled:
        raise ValueError(
            "state_indices with tensors that require grad; the step writes over states that "
            "gradients would need: call it under torch.no_grad(), and differentiate "
            "gated_delta_rule"
        )
    operator = operators[0 if wanted else 1]
    name, save = operator.choose(tensors, sizes(call.q, call.v), backend)
    return (
        operators[2] if pooled and _says("TAKES_POOL", operator.name, name) else operator,
        name,
        save,
    )


def run_step(call: Step, operator: Operator, name: str, save: bool) -> tuple[Tensor, Tensor]:
    """Returns o and the state after one token, by what `choose_step` returns."""
    if call.indices is not None:
        step = partial(operator, save=False, backend=name)
        return step_in_pool(
            _with_gates(operator, call, name), step, bool(operator.writes)
        ), call.state
    if not save:
        o, state = operator(_with_gates(operator, call, name), save=False, backend=name)
        return o, state
    o, state = run(operator, call.as_sequence(), None, save, name, False)
    assert state is not None
    return o[:, 0], state


def run(
    operator: Operator,
    call: Rule,
    positions: tuple[int, ...] | None,
    save: bool,
    name: str,
    v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns o, and the final state or those at positions; `name` is the backend's."""
    if positions is not None:
        call = _widen_parameters(call)
    made, compute = _with_gates(operator, call, name), partial(operator, save=save, backend=name)
    if positions is None:
        o, state = compute(made)
        state = state if call.output_final_state else None
    else:
        if stand_ins.may_read(call.q):
            checks.values(made)  # of the whole, before its first piece runs
        o, state = compute_states(made, positions, compute)
    return o, None if state is None else state.mT.contiguous() if v_first else state


def _widen_parameters(call: Rule) -> Rule:
    """Returns the call with A_log and dt_bias in full precision, which is exact.

    A call that is cut has a gradient of each piece, and their sum is rounded once then.
    """
    full = state_dtype(call.q.dtype)
    A_log, dt_bias = (
        None if x is None else x.to(torch.promote_types(x.dtype, full))
        for x in (call.A_log, call.dt_bias)
    )
    return replace(call, A_log=A_log, dt_bias=dt_bias)


def _with_gates(operator: Operator, call: AnyCall, backend: str) -> AnyCall:
    """Returns the call as the backend takes it:
    g and beta are made by PyTorch where it cannot make them.
    """
    makes = _says("MAKES_GATES", operator.name, backend)
    if isinstance(call, Rule) and not _says("TAKES_PLACES", operator.name, backend):
        call = contract.spread_places(call, makes_gates=makes)
    return call if makes else contract.make_call_gates(call)


@torch.compiler.assume_constant_result
def _says(flag: str, op: str, backend: str) -> bool:
    """Returns whether a backend says of itself what a flag of `Adapter` means."""
    return getattr(dispatch.adapter(backend, op), flag, False)


def first_state(state: Tensor | None, q: Tensor, v_first: bool) -> Tensor | None:
    """Returns the state [N, HV, K, V], contiguous, so that forward and backward read one copy at
    most; one in the dtype of q is widened, which is exact.
    """
    if not isinstance(state, Tensor):
        return state
    state = state.mT if v_first else state
    same = isinstance(q, Tensor) and state.dtype == q.dtype
    return (state.to(state_dtype(q.dtype)) if same else state).contiguous()


def bounds_of(cu_seqlens: Tensor | None) -> Tensor | None:
    """Returns cu_seqlens as int64, the same tensor in every layer."""
    if cu_seqlens is None or cu_seqlens.dtype == torch.int64:
        return cu_seqlens
    if not stand_ins.may_read(cu_seqlens):
        return cu_seqlens.long()
    return once(cu_seqlens, "int64", cu_seqlens.long)


def scale_of(q: Tensor, scale: float | None) -> float:
    """Returns the scale, 1 / sqrt(K) where none is given."""
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)


def sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    """Returns the sizes by which a backend is chosen."""
    return {"H": q.shape[-2], "HV": v.shape[-2], "K": q.shape[-1], "V": v.shape[-1]}


def _outputs_like(call: Rule) -> tuple[Tensor, Tensor | None]:
    """Returns uninitialized tensors like o and final_state."""
    q, v, final_state = call.q, call.v, None
    if call.output_final_state:
        shape = (call.sequences, v.shape[2], q.shape[3], v.shape[3])
        final_state = q.new_empty(shape, dtype=state_dtype(q.dtype))
    return v.new_empty(v.shape), final_state


def _empty_outputs(call: Rule) -> tuple[Tensor, Tensor | None]:
    """Returns o without elements, and the sequences' states as they were."""
    o, final_state = _outputs_like(call)
    if final_state is not None:
        final_state = (
            torch.zeros_like(final_state) if call.initial_state is None else call.initial_state
        )
    return o, final_state


def make_operators(name: str) -> tuple[Operator, Operator, Operator]:
    """Returns what takes calls to an adapter: of an operation,
    of the one for a token, of that in a pool.
    """
    scan = Operator(
        name,
        Rule,
        fakes=_outputs_like,
        outputs=("o", "final_state?"),
        gradients=[(word,) for word in Gradients._fields],
        values=checks.values,
        empty=_empty_outputs,
    )
    options: dict[str, Any] = {"forward": "step", "gradients": (), "values": checks.values}
    step = Operator(
        f"{name}_step",
        Step,
        fakes=lambda call: (call.v.new_empty(call.v.shape), call.state.new_empty(call.state.shape)),
        outputs=("o", "state"),
        **options,
    )
    pool = Operator(
        f"{name}_step",
        Step,
        fakes=lambda call: (call.v.new_empty(call.v.shape), None),
        outputs=("o", "state?"),
        writes="state",
        **options,
    )
    return scan, step, pool


OPERATORS = OPERATOR, STEP_OPERATOR, _ = make_operators("gated_delta_rule")
