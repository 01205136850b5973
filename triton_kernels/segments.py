"""Gated delta rule, few heads and long sequences: segments of chunks, scanned side by side.

A scan is serial in time: a sequence of 512 chunks and 8 heads keeps 16 programs busy on a GPU with
132 processors. But a chunk's last state is affine in its first one, and so is that of a segment, a
run of chunks. In the symbols of gated_delta_rule_fwd:

    S' = A_c S + B_c,   A_c = gam_C I - K^T diag(lam) T diag(beta gam) K        one chunk
    S_{s+1} = A_s S_s + B_s,   A_s the product of its chunks' A_c               segment s

Here A, A_c [K, K] are transitions and B, B_c [K, V] what a state of zero becomes. So forward has
three steps, exact in real numbers, of which only the second is serial over a whole sequence:

    1.  scan every segment from zero, which gives B_s, and from the identity with v = 0, which gives A_s
    2.  compute S_s for all s, one after the other: this file's kernel
    3.  scan every segment from its own S_s, which gives the outputs

Backward has the same steps, with the A_s of forward:

    dS_s = A_s^T dS_{s+1} + dB_s,   dB_s what the reverse scan of segment s gives from zero

A decay of -20 per token makes A_s zero, and keys of norm 1 keep its norm below 1 (for beta <= 2),
so nothing grows that does not grow in the scan itself. Steps 1 and 3 are `scan_kernel` and
`reverse_scan_kernel` on segments in place of sequences.

Source: derived here from the chunkwise equations of gated_delta_rule_fwd.

Layout, all float32, with NS segments in all sequences: A [NS, HV, K, K]; B, S, dB, dS [NS, HV, K,
V].
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile
# time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.chunks import Segments
from delta_trn.triton_kernels.launch import arithmetic, power_of_two, take_turns, tile
from delta_trn.triton_kernels.tiles import accumulate
from delta_trn.triton_kernels.variants import Variant

TYPES = {"*fp32": "A B initial states final", "*i64": "offsets", "i32": "NS"}


@triton.jit(do_not_specialize=["NS"])
def chain_kernel(
    A,
    B,
    initial,
    states,
    final,
    offsets,
    NS,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Walks over a sequence's segments; one program per (sequence, value head, BV columns of V).

    Stores in states[s] what segment s starts from. REVERSE: from the last segment to the first,
    with A^T.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v = (pid % NV).to(tl.int32)
    i_h = (pid // NV) % HV
    i_n = pid // (NV * HV)
    if offsets is not None:
        first = tl.load(offsets + i_n)
        count = (tl.load(offsets + i_n + 1) - first).to(tl.int32)
    else:
        first = i_n * NS
        count = NS

    o_k = tl.arange(0, KP)
    o_b = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    o_kv = o_k[:, None] * V + o_v[None, :]
    b_S = tl.zeros([KP, BV], dtype=tl.float32)
    if initial is not None:
        p_initial = initial + (i_n * HV + i_h) * (K * V)
        b_S = tl.load(p_initial + o_kv, mask=m_kv, other=0.0).to(tl.float32)
    for r in range(0, count):
        s = first + (count - 1 - r if REVERSE else r)
        p_s = (s * HV + i_h) * (K * V)
        p_A = A + (s * HV + i_h) * (K * K)
        tl.store(states + p_s + o_kv, b_S, mask=m_kv)
        # the product reads the state back by rows: all of [256, 256] float32 fits no program
        tl.debug_barrier()
        b_S = tl.load(B + p_s + o_kv, mask=m_kv, other=0.0)
        for i in range(0, tl.cdiv(K, BK)):
            o_i = i * BK + o_b
            m_i = o_i < K
            b_row = tl.load(
                states + p_s + o_i[:, None] * V + o_v[None, :],
                mask=m_i[:, None] & m_v[None, :],
                other=0.0,
            )
            o_A = o_k[:, None] + o_i[None, :] * K if REVERSE else o_k[:, None] * K + o_i[None, :]
            b_A = tl.load(p_A + o_A, mask=m_k[:, None] & m_i[None, :], other=0.0)
            b_S = accumulate(b_S, b_A, b_row, DOT)
    if final is not None:
        tl.store(final + (i_n * HV + i_h) * (K * V) + o_kv, b_S, mask=m_kv)


@take_turns
def chain(A, B, initial, *, states, final, segments: Segments, reverse: bool):
    """Launches `chain_kernel`: fills states, and final unless it is None.

    With `reverse`, initial is the gradient of a sequence's last state, B holds dB, and final
    becomes the gradient of its first state.
    """
    HV, K, V = B.shape[1:]
    row = tile("chain", V, K)
    chain_kernel[(segments.sequences * HV * -(-V // row.columns),)](
        A,
        B,
        initial,
        states,
        final,
        segments.offsets,
        segments.chunks.segments,
        HV=HV,
        K=K,
        KP=power_of_two(K),
        BK=row.rows,
        V=V,
        BV=row.columns,
        REVERSE=reverse,
        DOT=arithmetic(),
        **row.options(),
    )


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = tile("chain", V, K)
    values = {"HV": 4, "K": K, "KP": power_of_two(K), "BK": row.rows, "V": V, "BV": row.columns}
    for direction, reverse in {"forward": False, "backward": True}.items():
        yield Variant(
            "chain",
            direction,
            chain_kernel,
            TYPES,
            row,
            values | {"REVERSE": reverse, "DOT": "ieee"},
        )
