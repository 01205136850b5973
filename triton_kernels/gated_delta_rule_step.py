"""Gated delta rule, one token: the decode step.

    u  = beta (v - (exp(g) S)^T k)                 [V]
    S' = exp(g) S + k u^T                          [K, V]
    o  = scale * S'^T q                            [V]

g and beta are given as they are, or computed here from what a layer projects, by
gated_delta_rule_fwd's formulas.

Source: arXiv:2412.06464. The state is read once and written once, 8 K V bytes per head, which
bounds the time; a program holds K x BV of it in registers and sums over K itself.

Layout: q, k [B, H, K]; v, o [B, HV, V]; g, beta [B, HV]; state [B, HV, K, V]; A_log, dt_bias [HV].
QR, KR, VR, GR, BR are the elements from a sequence of q, k, v, g, beta to the next: these may be
parts of wider rows. CHANNELS: Kimi Delta Attention, a decay for each row of the state, g [B, HV, K]
and dt_bias [HV, K].

With `indices` [B, T] state is a pool [N, HV, K, V] whose slots lie SR elements apart, and their
rows and columns SK and SV. Each sequence has T tokens, one behind the other in q, k, v, g, beta, o.
It starts from the slot of its token accepted - 1, of its first one without `accepted` [B], and each
token's state goes to the token's slot. The state stays in registers, in float32, from token to
token. A token whose slot is negative is skipped, and so are all of a sequence that would start from
one.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile
# time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.launch import Tile, arithmetic, power_of_two, take_turns, tile
from delta_trn.triton_kernels.tiles import compute_gates, exp, load_decays, load_rate, round_to
from delta_trn.triton_kernels.variants import Variant, gates

SLICES = {2: 64, 4: 16}  # bytes of a state's element -> channels of a slice, see `slices_of`
TYPES = {
    "*x": "q k v o",
    "*fp32": "g beta A_log dt_bias state new_state",
    "*i32": "indices accepted",
    "fp32": "scale beta_max",
    "i32": "QR KR VR GR BR SR T",
}


@triton.jit(do_not_specialize=["T"])
def step_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    state,
    o,
    new_state,
    indices,
    accepted,
    scale,
    beta_max,
    lower_bound,
    QR,
    KR,
    VR,
    GR,
    BR,
    SR,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KO: tl.constexpr,
    KI: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    SK: tl.constexpr,
    SV: tl.constexpr,
    L2NORM: tl.constexpr,
    CHANNELS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes o and new_state; one program per (sequence, value head, BV columns of V).

    state None: it is zero. new_state None: it is not written. The tile of the state is [KO, KI, BV],
    KO times KI channels: see `slices_of`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v = (pid % NV).to(tl.int32)
    i_nh = pid // NV  # sequence and value head
    i_n, i_h = i_nh // HV, i_nh % HV
    i_hk = i_h // (HV // H)
    o_k = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    p_state = i_h * (K * V) + o_k[:, :, None] * SK + o_v[None, None, :] * SV
    m_kv = m_k[:, :, None] & m_v[None, None, :]
    row, first = HV * K * V, i_n
    if indices is not None:
        row, first = SR, find_first(indices, accepted, i_n, T)
        m_kv = m_kv & (first >= 0)
    b_S = tl.zeros([KO, KI, BV], dtype=tl.float32)
    if state is not None:
        b_S += tl.load(state + (first * row + p_state), mask=m_kv, other=0.0).to(tl.float32)
    for i_t in range(1 if T is None else T):
        i_x, slot, there = i_n, first, True
        if indices is not None:
            i_x = i_n * T + i_t
            slot = tl.load(indices + i_x).to(tl.int64)
            there = (slot >= 0) & (first >= 0)
        m_x = m_k & there  # zeros in place of a skipped token, whatever lies there
        b_q = tl.load(q + i_x * QR + i_hk * K + o_k, mask=m_x, other=0.0).to(tl.float32)
        b_k = tl.load(k + i_x * KR + i_hk * K + o_k, mask=m_x, other=0.0).to(tl.float32)
        b_v = tl.load(v + i_x * VR + i_h * V + o_v, mask=m_v & there, other=0.0).to(tl.float32)
        b_beta = tl.load(beta + i_x * BR + i_h, mask=there, other=0.0).to(tl.float32)
        if CHANNELS:
            _, b_beta = compute_gates(b_beta, b_beta, None, None, i_h, beta_max)
            p_g, o_bias = i_x * GR + i_h * K + o_k[:, :, None], i_h * K + o_k[:, :, None]
            rate = None if A_log is None else load_rate(A_log, lower_bound, i_h)
            b_g, _ = load_decays(
                g, rate, dt_bias, lower_bound, p_g, o_bias, m_x[:, :, None], m_x[:, :, None]
            )
        else:
            b_g = tl.load(g + i_x * GR + i_h, mask=there, other=0.0).to(tl.float32)
            b_g, b_beta = compute_gates(b_g, b_beta, A_log, dt_bias, i_h, beta_max)
        if L2NORM:
            b_q *= tl.rsqrt(tl.sum(tl.sum(b_q * b_q, axis=0), axis=0) + 1e-6)
            b_k *= tl.rsqrt(tl.sum(tl.sum(b_k * b_k, axis=0), axis=0) + 1e-6)
        if state is not None:
            b_S = b_S * tl.where(there, exp(b_g), 1.0)
        # the first of a sum's products, fused or not, has the same bits: those of a pool are those
        # without
        b_u = b_beta * (b_v - sum_channels(tl.fma(b_S, b_k[:, :, None], 0.0)))
        b_S = tl.fma(b_k[:, :, None], b_u[None, None, :], b_S)
        b_o = scale * sum_channels(tl.fma(b_S, b_q[:, :, None], 0.0))
        tl.store(
            o + i_x * (HV * V) + i_h * V + o_v, round_to(b_o, o.dtype.element_ty, DOT), mask=m_v
        )
        if new_state is not None:
            b_new = round_to(b_S, new_state.dtype.element_ty, DOT)
            tl.store(new_state + (slot * row + p_state), b_new, mask=m_kv & there)


@triton.jit
def sum_channels(x):
    """Returns the sums [BV] over the channels of x [KO, KI, BV], first those of a thread."""
    return tl.sum(tl.sum(x, axis=0), axis=0)


@triton.jit
def find_first(indices, accepted, i_n, T):
    """Returns the slot from which sequence i_n starts."""
    at = i_n * T
    if accepted is not None:
        at += tl.load(accepted + i_n) - 1
    return tl.load(indices + at).to(tl.int64)


def is_turned(inner: tuple[int, int]) -> bool:
    """Returns whether a state is [V, K] in memory; inner: the elements from a channel to the next,
    and from a value to the next.
    """
    return inner[0] == 1 and inner[1] > 1


def tile_of(K: int, V: int, inner: tuple[int, int]) -> Tile:
    """Returns the launch for a state that lies so."""
    return tile("step_values_first", V, K) if is_turned(inner) else tile("step", V)


def slices_of(K: int, inner: tuple[int, int], itemsize: int = 4) -> dict[str, int]:
    """Returns KO and KI, which divide a tile's channels.

    Where channels lie next to each other, which is how engines keep states, the compiler gives a
    thread some of them, and the next ones to the next thread. In slices, a thread has some of each
    slice, so that most of a sum over channels is its own.
    """
    KP = power_of_two(K)
    KI = min(KP, SLICES[itemsize]) if is_turned(inner) else KP
    return {"KO": KP // KI, "KI": KI}


@take_turns
def step(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    state,
    o,
    new_state,
    *,
    scale,
    l2norm,
    beta_max,
    lower_bound=None,
    indices=None,
    accepted=None,
):
    """Launches `step_kernel`: fills o and new_state, which may be state itself. beta_max 0: beta is
    given.

    state None: it is zero. new_state None: it is not filled.
    """
    B, H, K = q.shape
    HV, V = v.shape[1:]
    strides = [x.stride(0) if B > 1 else x.shape[1:].numel() for x in (q, k, v, g, beta)]
    N, pool, inner = B, (None, None), (V, 1)
    if indices is not None:
        N, pool, inner = len(indices), (state.stride(0), indices.shape[1]), state.stride()[2:]
    row = tile_of(K, V, inner)
    step_kernel[(N * HV * -(-V // row.columns),)](
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        state,
        o,
        new_state,
        indices,
        accepted,
        scale,
        beta_max or None,
        lower_bound,
        *strides,
        *pool,
        H=H,
        HV=HV,
        K=K,
        **slices_of(K, inner, 4 if state is None else state.element_size()),
        V=V,
        BV=row.columns,
        SK=inner[0],
        SV=inner[1],
        L2NORM=l2norm,
        CHANNELS=g.dim() == 3,
        DOT=arithmetic(),
        **row.options(),
    )


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = tile("step", V)
    values = {
        "H": 2,
        "HV": 4,
        "K": K,
        "V": V,
        "BV": row.columns,
        "L2NORM": True,
    }
    values |= slices_of(K, (V, 1))
    values |= {"lower_bound": None, "CHANNELS": False, "SK": V, "SV": 1, "DOT": "ieee"}
    alone = dict.fromkeys(("indices", "accepted", "SR", "T"))
    for form, arguments in gates(quick).items():
        own, multiples = values | arguments, ("QR", "KR", "VR", "SR")
        yield Variant("step", form, step_kernel, TYPES, row, own | alone, multiples)
        if form == "gates made":
            yield Variant("step", f"{form}, pool", step_kernel, TYPES, row, own, multiples)
            inner = (1, K)
            turned = own | slices_of(K, inner) | dict(zip(("SK", "SV"), inner, strict=True))
            name, launch = f"{form}, pool, values first", tile_of(K, V, inner)
            turned |= {"BV": launch.columns}
            yield Variant("step", name, step_kernel, TYPES, launch, turned, multiples)
        if itemsize == 2 or not quick:
            own |= {"CHANNELS": True} | ({"lower_bound": -5.0} if form == "gates made" else {})
            yield Variant(
                "step", f"{form}, channels", step_kernel, TYPES, row, own | alone, multiples
            )
