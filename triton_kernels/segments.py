"""Gated delta rule, few heads and long sequences: segments of chunks, scanned side by side.

A scan is serial in time: a sequence of 512 chunks and 8 heads keeps 16 programs busy on a GPU with 132
processors. But a chunk's last state is affine in its first one, and so is a segment's, some chunks in a row:

    S' = A_c S + B_c,     A_c = gam_C I - K^T diag(lam) N diag(beta gam) K          one chunk
    S_{s+1} = A_s S_s + B_s,   A_s the product of its chunks' A_c                   segment s

so forward is three steps, exact in real numbers, of which only the second is serial over a whole sequence:

    1.  every segment scanned from zero gives B_s; from the identity, with v = 0, A_s
    2.  S_s for all s, one after the other: this file's kernel
    3.  every segment scanned from its own S_s gives the outputs

and so is backward, with the A_s of forward:

    dS_s = A_s^T dS_{s+1} + dB_s,    dB_s what the reverse scan of segment s gives from zero

A decay of -20 a token makes A_s zero and keys of norm 1 keep its norm below 1 (for beta <= 2), so nothing
grows that does not grow in the scan itself. Steps 1 and 3 are `scan_kernel` and `reverse_scan_kernel` on
segments in place of sequences.

Source: derived here from the chunkwise equations of gated_delta_rule_fwd.

Layout: NS segments of all sequences; A [NS, HV, K, K], B, S, dB, dS [NS, HV, K, V], all float32.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.chunks import Segments
from delta_trn.triton_kernels.launch import arithmetic, power_of_two, tile
from delta_trn.triton_kernels.tiles import accumulate


@triton.jit(do_not_specialize=["NS"])
def chain_kernel(
    A, B, initial, states, final, offsets, NS,
    HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, WRITE_FINAL: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, value head, BV columns of V), over the sequence's segments.

    states[s] is what segment s starts from; REVERSE: from the last segment to the first, with A^T.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v = (pid % NV).to(tl.int32)
    i_h = (pid // NV) % HV
    i_n = pid // (NV * HV)
    if PACKED:
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
    if HAS_INITIAL:
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
                states + p_s + o_i[:, None] * V + o_v[None, :], mask=m_i[:, None] & m_v[None, :], other=0.0
            )
            o_A = o_k[:, None] + o_i[None, :] * K if REVERSE else o_k[:, None] * K + o_i[None, :]
            b_A = tl.load(p_A + o_A, mask=m_k[:, None] & m_i[None, :], other=0.0)
            b_S = accumulate(b_S, b_A, b_row, DOT)
    if WRITE_FINAL:
        tl.store(final + (i_n * HV + i_h) * (K * V) + o_kv, b_S, mask=m_kv)


def chain(A, B, initial, *, states, final, segments: Segments, reverse: bool):
    """Launch `chain_kernel`: fills states, and final unless it is None.

    reverse: initial is the gradient of a sequence's last state, B holds dB, and final becomes the gradient of
    its first.
    """
    HV, K, V = B.shape[1:]
    row = tile("chain", V, K)
    chain_kernel[(segments.sequences * HV * -(-V // row.columns),)](
        A, B, initial, states, final, segments.offsets, segments.chunks.segments,
        HV=HV, K=K, KP=power_of_two(K), BK=row.rows, V=V, BV=row.columns, PACKED=segments.offsets is not None,
        HAS_INITIAL=initial is not None, WRITE_FINAL=final is not None, REVERSE=reverse, DOT=arithmetic(),
        num_warps=row.warps, num_stages=row.stages,
    )  # fmt: skip
