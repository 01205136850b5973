"""One pair of custom operators per operation, over any backend's forward and backward.

torch.compile sees `delta_trn::gated_delta_rule`, `delta_trn::gated_delta_rule_backward` and
`delta_trn::gated_delta_rule_step`, whose shapes it learns from the adapters' `saved_shapes`; the backend's
name is an argument. Adapters run with autocast off: an operation computes in the dtype it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backends import checks
from backends.gates import Gates
from backends.registry import Options, adapter

_OPTIONS = "float scale, float beta_max, bool use_qk_l2norm_in_kernel, bool output_final_state"
_GATES = "Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias"
_INPUTS = f"Tensor q, Tensor k, Tensor v, {_GATES}, Tensor? initial_state, Tensor? cu_seqlens"


def _present(x: Tensor | None, absent: Tensor) -> Tensor:
    """What the fake implementations promise: dense outputs, and an empty tensor for one that is not there."""
    return absent.new_empty(0) if x is None else x.contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    """States are small and reach adapters contiguous, as they come from a cache or from the step before."""
    return None if x is None else x.contiguous()


@torch.library.custom_op(
    "delta_trn::gated_delta_rule",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}, bool save, str backend) -> (Tensor, Tensor, Tensor[])",
)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    beta_max: float,
    use_qk_l2norm_in_kernel: bool,
    output_final_state: bool,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, final_state (empty where not asked for), and what backward reads (nothing unless `save`)."""
    gates = Gates(A_log, dt_bias, beta_max)
    checks.values(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state},
        cu_seqlens,
        normalized_inside=use_qk_l2norm_in_kernel,
        T=q.shape[1],
        gates=gates,
    )
    options = Options(scale, use_qk_l2norm_in_kernel, output_final_state, cu_seqlens is not None, gates)
    with torch.autocast(q.device.type, enabled=False):
        o, state, saved = adapter(backend).forward(
            q, k, v, g, beta, _dense(initial_state), cu_seqlens, options, save=save
        )
    return o.contiguous(), _present(state, g), [x.contiguous() for x in saved]


@gated_delta_rule.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    beta_max: float,
    use_qk_l2norm_in_kernel: bool,
    output_final_state: bool,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    options = Options(scale, use_qk_l2norm_in_kernel, output_final_state, cu_seqlens is not None)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = g.new_empty(0)
    if output_final_state:
        state = q.new_empty((N, v.shape[2], q.shape[3], v.shape[3]), dtype=state_dtype)
    shapes = adapter(backend).saved_shapes(q, v, initial_state, cu_seqlens, options) if save else []
    saved = [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return v.new_empty(v.shape), state, saved


@torch.library.custom_op(
    "delta_trn::gated_delta_rule_backward",
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dstate, {_INPUTS}, Tensor[] saved, {_OPTIONS}, str backend)"
    f" -> ({', '.join(['Tensor'] * 8)})",
)
def gated_delta_rule_backward(
    do: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    scale: float,
    beta_max: float,
    use_qk_l2norm_in_kernel: bool,
    output_final_state: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dbeta, and the gradients of A_log, dt_bias and initial_state (empty without one)."""
    gates = Gates(A_log, dt_bias, beta_max)
    options = Options(scale, use_qk_l2norm_in_kernel, output_final_state, cu_seqlens is not None, gates)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, dg, dbeta, dinitial, *dgates = adapter(backend).backward(
            do, _dense(dstate), q, k, v, g, beta, _dense(initial_state), cu_seqlens, saved, options
        )
    dq, dk, dv, dg, dbeta = (x.contiguous() for x in (dq, dk, dv, dg, dbeta))
    dA_log, ddt_bias = (_present(x, g) for x in dgates or (None, None))
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, _present(dinitial, g)


@gated_delta_rule_backward.register_fake
def _(
    do: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    scale: float,
    beta_max: float,
    use_qk_l2norm_in_kernel: bool,
    output_final_state: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    absent = g.new_empty(0)
    dA_log, ddt_bias, dinitial = (
        absent if x is None else x.new_empty(x.shape) for x in (A_log, dt_bias, initial_state)
    )
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial


@torch.library.custom_op(
    "delta_trn::gated_delta_rule_step",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_GATES}, Tensor state, float scale, float beta_max, "
    "bool use_qk_l2norm_in_kernel, str backend) -> (Tensor, Tensor)",
)
def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    scale: float,
    beta_max: float,
    use_qk_l2norm_in_kernel: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """o and the new state after one token; no gradients."""
    gates = Gates(A_log, dt_bias, beta_max)
    checks.values(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state},
        None,
        normalized_inside=use_qk_l2norm_in_kernel,
        T=1,
        gates=gates,
    )
    options = Options(scale, use_qk_l2norm_in_kernel, output_final_state=True, packed=False, gates=gates)
    with torch.autocast(q.device.type, enabled=False):
        o, new_state = adapter(backend).step(q, k, v, g, beta, state.contiguous(), options)
    return o.contiguous(), new_state.contiguous()


@gated_delta_rule_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    scale: float,
    beta_max: float,
    use_qk_l2norm_in_kernel: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    *tensors, ctx.scale, ctx.beta_max, ctx.l2norm, ctx.output_final_state, ctx.saves, ctx.backend = inputs
    saved = output[2]
    ctx.save_for_backward(*tensors, *saved)
    # without this, autograd would allocate zeros for the gradients of everything saved
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)


def _differentiate(
    ctx: Any, do: Tensor | None, dstate: Tensor | None, dsaved: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *saved = ctx.saved_tensors
    if not ctx.saves:
        raise RuntimeError(
            "gated_delta_rule was called with save=False and is now asked for gradients; "
            "call backends.gated_delta_rule, which saves whenever an input requires grad"
        )
    if do is None:
        do = v.new_zeros(v.shape)
    *grads, dA_log, ddt_bias, dinitial = gated_delta_rule_backward(
        do,
        dstate if ctx.output_final_state else None,
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        saved,
        ctx.scale,
        ctx.beta_max,
        ctx.l2norm,
        ctx.output_final_state,
        ctx.backend,
    )
    optional = zip((A_log, dt_bias, initial_state), (dA_log, ddt_bias, dinitial), strict=True)
    return *grads, *(None if x is None else dx for x, dx in optional), *[None] * 7


gated_delta_rule.register_autograd(_differentiate, setup_context=_keep)


def _refuse_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "gated_delta_rule has no second derivative; drop create_graph=True, "
        "or write the recurrence in PyTorch operations"
    )


gated_delta_rule_backward.register_autograd(_refuse_second_derivative)
