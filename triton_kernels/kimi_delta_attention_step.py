"""Kimi Delta Attention, one token: the decode step.

    S' = Diag(exp(g)) S,  u = beta (v - S'^T k)                             [K, V], [V]
    S  = S' + k u^T,      o = scale S^T q                                   [K, V], [V]

Gates are those of kimi_delta_attention_fwd, and all else is as in gated_delta_rule_step: the state is read
once and written once, and a program holds K x BV of it in registers.

Layout: q, k [B, H, K]; v, o [B, HV, V]; g [B, HV, K]; beta [B, HV]; state [B, HV, K, V]; A_log [HV];
dt_bias [HV, K].
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.kimi_delta_attention_fwd import gates_of, load_decays
from delta_trn.triton_kernels.launch import arithmetic, power_of_two, take_turns, tile
from delta_trn.triton_kernels.tiles import round_to
from delta_trn.triton_kernels.variants import Variant

TYPES = {
    "*x": "q k v o",
    "*fp32": "g beta A_log dt_bias state new_state",
    "fp32": "scale beta_max lower_bound",
}


@triton.jit
def step_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, o, new_state, scale, beta_max, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes o and new_state; one program per (sequence, value head, BV columns of V)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v = (pid % NV).to(tl.int32)
    i_nh = pid // NV  # sequence and value head
    i_h = i_nh % HV
    i_hk = (i_nh // HV) * H + i_h // (HV // H)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    b_q = tl.load(q + i_hk * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_hk * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_nh * V + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_beta = tl.load(beta + i_nh).to(tl.float32)
    if beta_max is not None:
        b_beta = beta_max * tl.sigmoid(b_beta)
    p_g = i_nh * K + o_k[:, None]
    b_g, _ = load_decays(g, A_log, dt_bias, lower_bound, p_g, i_h * K + o_k[:, None], m_k[:, None], i_h)
    if L2NORM:
        b_q *= tl.rsqrt(tl.sum(b_q * b_q, axis=0) + 1e-6)
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, axis=0) + 1e-6)
    p_state = i_nh * (K * V) + o_k[:, None] * V + o_v[None, :]
    m_kv = m_k[:, None] & m_v[None, :]
    b_S = tl.load(state + p_state, mask=m_kv, other=0.0) * tl.exp(b_g)
    b_u = b_beta * (b_v - tl.sum(b_S * b_k[:, None], axis=0))
    b_S += b_k[:, None] * b_u[None, :]
    b_o = scale * tl.sum(b_S * b_q[:, None], axis=0)
    tl.store(o + i_nh * V + o_v, round_to(b_o, o.dtype.element_ty, DOT), mask=m_v)
    tl.store(new_state + p_state, b_S, mask=m_kv)


@take_turns
def step(q, k, v, g, beta, A_log, dt_bias, state, o, new_state, *, scale, l2norm, beta_max, lower_bound):
    """Launches `step_kernel`: fills o and new_state, which may be state itself. beta_max 0: beta is given."""
    B, H, K = q.shape
    HV, V = v.shape[1:]
    row = tile("step", V)
    step_kernel[(B * HV * -(-V // row.columns),)](
        q, k, v, g, beta, A_log, dt_bias, state, o, new_state, scale, beta_max or None, lower_bound,
        H=H, HV=HV, K=K, KP=power_of_two(K), V=V, BV=row.columns, L2NORM=l2norm, DOT=arithmetic(),
        num_warps=row.warps, num_stages=row.stages,
    )  # fmt: skip


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = tile("step", V)
    values = {"H": 2, "HV": 4, "K": K, "KP": power_of_two(K), "V": V, "BV": row.columns, "L2NORM": True}
    for form, arguments in gates_of(quick).items():
        yield Variant("kimi_step", form, step_kernel, TYPES, row, values | arguments | {"DOT": "ieee"})
