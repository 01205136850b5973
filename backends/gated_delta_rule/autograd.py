"""How the gated delta rule reaches its backend: eagerly, under torch.compile, on lazy tensors.

Under torch.compile it is the custom operators `delta_trn::gated_delta_rule`, `..._backward` and `..._step`,
whose shapes PyTorch learns from the adapters' `saved_shapes`; the backend's name is an argument. Otherwise it
is a plain autograd.Function: around an adapter that did nothing, a call took 290 us forward and 530 with
backward as a custom operator, 85 and 210 as a function (one core, medians of 1000), and a small layer's
kernels take less. Inside a custom operator, besides, lazy tensors are no longer functionalized (torch 2.9): a
write into a view does not reach what it is a view of, and the chunked adapter returned zeros.

Adapters run with autocast off: an operation computes in the dtype it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from delta_trn.backends import checks
from delta_trn.backends.gated_delta_rule.gates import Gates
from delta_trn.backends.registry import Options, adapter

Outcome = tuple[Tensor, Tensor | None, list[Tensor]]

_OPTIONS = "float scale, float beta_max, bool use_qk_l2norm_in_kernel, bool output_final_state"
_GATES = "Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias"
_INPUTS = f"Tensor q, Tensor k, Tensor v, {_GATES}, Tensor? initial_state, Tensor? cu_seqlens"
# of _INPUTS, and of what follows them in a call
TENSORS, REST = 9, 6


def gated_delta_rule(*given: Any) -> tuple[Tensor, Tensor | None]:
    """o and final_state (None where not asked for), from what the schema of `delta_trn::gated_delta_rule`
    names, in its order.
    """
    if torch.compiler.is_compiling():
        o, state, _ = _rule_operator(*given)
        return o, state if given[TENSORS + 3] else None
    if not given[TENSORS + 4]:
        return run(*given)[:2]
    return _Rule.apply(*given)  # type: ignore[return-value]


def gated_delta_rule_step(*given: Any) -> tuple[Tensor, Tensor]:
    """o and the new state after one token, no gradients, from what the schema of the step names."""
    return (_step_operator if torch.compiler.is_compiling() else run_step)(*given)


def run(
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
) -> Outcome:
    """o, final_state, and what backward reads (nothing unless `save`), by the adapter."""
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
        return adapter(backend).forward(
            q, k, v, g, beta, _dense(initial_state), cu_seqlens, options, save=save
        )


def differentiate(
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
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dg, dbeta, and the gradients of A_log, dt_bias and initial_state (None without one)."""
    gates = Gates(A_log, dt_bias, beta_max)
    options = Options(scale, use_qk_l2norm_in_kernel, output_final_state, cu_seqlens is not None, gates)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, dg, dbeta, dinitial, *dgates = adapter(backend).backward(
            do, _dense(dstate), q, k, v, g, beta, _dense(initial_state), cu_seqlens, saved, options
        )
    dA_log, ddt_bias = dgates or (None, None)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial


def run_step(
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
    """o and the new state after one token, by the adapter."""
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
        return adapter(backend).step(q, k, v, g, beta, state.contiguous(), options)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        o, state, saved = run(*given)
        ctx.save_for_backward(*given[:TENSORS], *saved)
        ctx.options = *given[TENSORS:-2], given[-1]
        ctx.set_materialize_grads(False)
        return o, state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept = ctx.saved_tensors  # once: checkpointing recomputes for the first look alone
        given, saved = kept[:TENSORS], list(kept[TENSORS:])
        douts = given[2].new_zeros(given[2].shape) if do is None else do, dstate
        back = _RuleBackward.apply if torch.is_grad_enabled() else differentiate
        return *back(*douts, *given, saved, *ctx.options), *[None] * (1 + REST)  # type: ignore[misc]


class _RuleBackward(torch.autograd.Function):
    """A function of its own, so that a derivative of it can be refused by name."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        return differentiate(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        _refuse_second_derivative(ctx, *grads)


def _present(x: Tensor | None, absent: Tensor) -> Tensor:
    """What the fake implementations promise: dense outputs, and an empty tensor for one that is not there."""
    return absent.new_empty(0) if x is None else x.contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    """States are small and reach adapters contiguous, as they come from a cache or from the step before."""
    return None if x is None else x.contiguous()


def _rule(*given: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    o, state, saved = run(*given)
    return o.contiguous(), _present(state, given[3]), [x.contiguous() for x in saved]


def _rule_backward(*given: Any) -> tuple[Tensor, ...]:
    return tuple(_present(x, given[5]) for x in differentiate(*given))


def _step(*given: Any) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in run_step(*given))


_rule_operator = torch.library.custom_op(
    "delta_trn::gated_delta_rule",
    _rule,
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}, bool save, str backend) -> (Tensor, Tensor, Tensor[])",
)
_rule_backward_operator = torch.library.custom_op(
    "delta_trn::gated_delta_rule_backward",
    _rule_backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dstate, {_INPUTS}, Tensor[] saved, {_OPTIONS}, str backend)"
    f" -> ({', '.join(['Tensor'] * 8)})",
)
_step_operator = torch.library.custom_op(
    "delta_trn::gated_delta_rule_step",
    _step,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_GATES}, Tensor state, float scale, float beta_max, "
    "bool use_qk_l2norm_in_kernel, str backend) -> (Tensor, Tensor)",
)


@_rule_operator.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    q, _, v, g, _, _, _, initial_state, cu_seqlens, scale, _, normalize, final, save, backend = given
    options = Options(scale, normalize, final, cu_seqlens is not None)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = g.new_empty(0)
    if final:
        state = q.new_empty((N, v.shape[2], q.shape[3], v.shape[3]), dtype=state_dtype)
    shapes = adapter(backend).saved_shapes(q, v, initial_state, cu_seqlens, options) if save else []
    saved = [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return v.new_empty(v.shape), state, saved


@_rule_backward_operator.register_fake
def _(*given: Any) -> tuple[Tensor, ...]:
    like = given[2:10]  # q, k, v, g, beta, A_log, dt_bias, initial_state
    return tuple(given[5].new_empty(0) if x is None else x.new_empty(x.shape) for x in like)


@_step_operator.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    v, state = given[2], given[7]
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    ctx.options, ctx.saves = (*inputs[TENSORS:-2], inputs[-1]), inputs[-2]
    saved = output[2]
    ctx.save_for_backward(*inputs[:TENSORS], *saved)
    # without this, autograd would allocate zeros for the gradients of everything saved
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)


def _differentiate(
    ctx: Any, do: Tensor | None, dstate: Tensor | None, dsaved: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors
    given, saved = kept[:TENSORS], list(kept[TENSORS:])
    if not ctx.saves:
        raise RuntimeError(
            "gated_delta_rule was called with save=False and is now asked for gradients; "
            "call backends.gated_delta_rule, which saves whenever an input requires grad"
        )
    if do is None:
        do = given[2].new_zeros(given[2].shape)
    _, _, _, output_final_state, _ = ctx.options
    grads = _rule_backward_operator(do, dstate if output_final_state else None, *given, saved, *ctx.options)
    like = given[: TENSORS - 1]
    return *(None if x is None else dx for x, dx in zip(like, grads, strict=True)), *[None] * (1 + REST)


_rule_operator.register_autograd(_differentiate, setup_context=_keep)


def _refuse_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "gated_delta_rule has no second derivative; drop create_graph=True, "
        "or write the recurrence in PyTorch operations"
    )


_rule_backward_operator.register_autograd(_refuse_second_derivative)
