"""The operations: what they compute, in which shapes, and who runs them."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from delta_trn.backends import checks, registry
from delta_trn.backends.gated_delta_rule import autograd
from delta_trn.backends.gated_delta_rule.gates import AS_GIVEN, Gates


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""The gated delta rule over sequences (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464).

        S <- exp(g_t) S ;  u = beta_t (v_t - S^T k_t) ;  S <- S + k_t u^T ;  o_t = scale S^T q_t

    Shapes, with B batch, T time, H query and key heads, HV value heads (a multiple of H: value head j reads
    query and key head j // (HV / H)), K and V head sizes, N sequences:

        q, k            [B, T, H, K]    float64, float32, bfloat16, float16; |k| <= 1, or see below
        v               [B, T, HV, V]   dtype of q
        g               [B, T, HV]      natural logarithm of the decay, <= 0; float32, or the dtype of q
        beta            [B, T, HV]      write strength in [0, 2]; float32, or the dtype of q
        initial_state   [N, HV, K, V]   float32, float64 with float64 inputs; zeros when None
        cu_seqlens      [N + 1]         int64, from 0 to T: N sequences in B = 1; some may be empty
        returns o       [B, T, HV, V]   dtype of q
            final_state [N, HV, K, V]   like initial_state, after the last token; None if not asked for

    scale defaults to K**-0.5. use_qk_l2norm_in_kernel replaces q and k by x * rsqrt(sum(x^2) + 1e-6) over
    K. Without cu_seqlens, N = B. Differentiable once in all tensors but cu_seqlens, through o and through
    final_state.

    g and beta may be what a layer projects, of any sign, and are then made here, by kernels that can at no
    extra pass over memory, else by PyTorch (Mamba-2's decay, arXiv:2405.21060):

        use_gate_in_kernel          g <- -exp(A_log) softplus(g + dt_bias); A_log, dt_bias [HV], any float,
                                    dt_bias may be None
        use_beta_sigmoid_in_kernel  beta <- sigmoid(beta), with allow_neg_eigval 2 sigmoid(beta)

    Numerics: products in the dtype of q, also under autocast; states, decay sums, exponentials and the
    triangular inverse in float32 on every backend (float64 for float64 inputs).

    backend names one ("chunked", "recurrent", "triton", ...); None takes the process's default
    (`backends.use`), else the one for the tensors' device. Raises BackendRefusal, with every reason, and
    never substitutes; TypeError and ValueError for arguments that do not fit. Names and order are those of
    flash-linear-attention's chunk_gated_delta_rule.
    """
    checks.arguments(q, k, v, g, beta, initial_state, cu_seqlens)
    gates = checks.gate_arguments(
        q, v.shape[2], use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval
    )
    gradients = _gradients_wanted(q, k, v, g, beta, initial_state, A_log, dt_bias)
    name = _chosen("gated_delta_rule", q, v, cu_seqlens is not None, gradients, backend)
    g, beta, gates = _made(gates, g, beta, "gated_delta_rule", name)
    factor = float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
    return autograd.gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        gates.A_log,
        gates.dt_bias,
        initial_state,
        cu_seqlens,
        factor,
        gates.beta_max,
        use_qk_l2norm_in_kernel,
        output_final_state,
        gradients,
        name,
    )


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
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule per sequence, for generation; see `gated_delta_rule`.

        q, k            [B, H, K]
        v               [B, HV, V]
        g, beta         [B, HV]
        state           [B, HV, K, V]   float32, float64 with float64 inputs; not changed in place
        returns o       [B, HV, V]      dtype of q
            state       [B, HV, K, V]   after the token

    Where gradients are wanted it is `gated_delta_rule` with T = 1 on the same backend; it raises alike.
    """
    checks.step_arguments(q, k, v, g, beta, state)
    gates = checks.gate_arguments(
        q, v.shape[1], use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval
    )
    if _gradients_wanted(q, k, v, g, beta, state, A_log, dt_bias):
        o, final_state = gated_delta_rule(
            *(x[:, None] for x in (q, k, v, g, beta)),
            scale=scale,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            backend=backend,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
        )
        assert final_state is not None
        return o[:, 0], final_state
    name = _chosen("gated_delta_rule_step", q, v, packed=False, gradients=False, backend=backend)
    g, beta, gates = _made(gates, g, beta, "gated_delta_rule_step", name)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return autograd.gated_delta_rule_step(
        q,
        k,
        v,
        g,
        beta,
        gates.A_log,
        gates.dt_bias,
        state,
        scale,
        gates.beta_max,
        use_qk_l2norm_in_kernel,
        name,
    )


def _made(gates: Gates, g: Tensor, beta: Tensor, op: str, name: str) -> tuple[Tensor, Tensor, Gates]:
    """g, beta and what is left to make of them, once PyTorch has made what the backend's kernels do not."""
    if not gates.given or registry.makes_gates(op, name):
        return g, beta, gates
    return *gates.applied(g, beta), AS_GIVEN


def _gradients_wanted(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _chosen(op: str, q: Tensor, v: Tensor, packed: bool, gradients: bool, backend: str | None) -> str:
    selection = registry.SELECTION
    name = selection.name if backend is None else backend
    # index(): head sizes are constants of a compiled graph, even of one with dynamic shapes
    sizes = (index(q.shape[-2]), index(v.shape[-2]), index(q.shape[-1]), index(v.shape[-1]))
    return registry.chosen_name(op, q.device.type, q.dtype, sizes, packed, gradients, name, selection.allow)
