"""Gated delta rule, backward, the reverse scan over the chunks: dU, dY and dS of
gated_delta_rule_bwd.

Symbols, equations and layout are those of that file. The scan is serial, so it reads and writes as
little as it can: sums over one chunk, <dY, V> and <dS', S> among them, are left to the gradients,
although dY and dS' are rounded there. In float32 it sums `writes`, of the very K dS' that went into
dU: where equal keys leave nothing of K dS' but its rounding, what that does to `writes` and to E
cancels, as roundings of rows of U dS'^T would not. In bfloat16, `gated_delta_rule_refine` comes
between.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Triton's decorator adds the launch arguments and gives its own functions
# their types at compile time)
from math import frexp

import triton
import triton.language as tl

from delta_trn.triton_kernels.chunks import Chunks
from delta_trn.triton_kernels.launch import Config, config, power_of_two, row_stride, take_turns
from delta_trn.triton_kernels.tiles import (
    ROWS,
    add_from_left,
    by_column,
    by_row,
    invert_power,
    locate_sequence,
    multiply_from_left,
    round_to,
    split_power,
)
from delta_trn.triton_kernels.variants import FEW, Variant, by_heads, layouts, of_tile, rows_of

TYPES = {
    "*x": "q k do T P S U dY dS kl",
    "*fp32": "rows units last initial_state dstate writes carry dinitial_state",
    "*i64": "cu_seqlens chunk_offsets",
    "fp32": "scale power unit",
    "i32": "tokens NT NS span",
}


@triton.jit(do_not_specialize=["tokens", "NT", "NS", "span"])
def reverse_scan_kernel(
    q,
    k,
    do,
    T,
    P,
    rows,
    units,
    kl,
    last,
    S,
    U,
    initial_state,
    dstate,
    dY,
    dS,
    writes,
    carry,
    dinitial_state,
    cu_seqlens,
    chunk_offsets,
    scale,
    power,
    unit,
    tokens,
    NT,
    NS,
    span,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    QR: tl.constexpr,
    KR: tl.constexpr,
    UPRIGHT: tl.constexpr,
    ALONE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Walks over the chunks from last to first; one program per (sequence, value head, BV columns
    of V).

    Writes dY and dS unless dY is None, writes unless that is None, carry at first chunks unless
    initial_state is None, and dinitial_state unless that is None. power is a power of two, as large
    as scale; unit is that of P. kl and last: None, or kimi_delta_attention's. Tiles are as in the
    equations if UPRIGHT, else transposed; ALONE: see tiles.accumulate_alone.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v = (pid % NV).to(tl.int32)
    i_h = (pid // NV) % HV
    i_n = pid // (NV * HV)
    i_hk = i_h // (HV // H)
    start, length, first = locate_sequence(i_n, tokens, NT, NS, span, cu_seqlens, chunk_offsets, C)

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_state = by_row(m_k, UPRIGHT) & by_column(m_v, UPRIGHT)
    o_tv = by_row(o_c, UPRIGHT) * (HV * V) + by_column(o_v, UPRIGHT)
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_state = by_row(o_k, UPRIGHT) * V + by_column(o_v, UPRIGHT)
    dtype = k.dtype.element_ty

    b_dS = tl.zeros(o_state.shape, dtype=tl.float32)
    if dstate is not None:
        p_state = dstate + (i_n * HV + i_h) * (K * V)
        b_dS = tl.load(p_state + o_state, mask=m_state, other=0.0).to(tl.float32)
    if units is not None:
        state_unit = tl.load(units + (first * HV + i_h) * 2, mask=length > 0, other=1.0)
        gradient_unit = tl.load(units + (first * HV + i_h) * 2 + 1, mask=length > 0, other=1.0)
        inverse_unit = invert_power(gradient_unit)
        b_dS *= inverse_unit
        # dO itself stays as it is: what is made of it comes into the unit with these
        scale *= inverse_unit
        power *= inverse_unit
        unit *= inverse_unit

    chunks = tl.cdiv(length, C).to(tl.int32)
    for r in range(0, chunks):
        i = chunks - 1 - r
        t = start + i * C
        tile = (first + i) * HV + i_h
        m_t = o_c < tl.minimum(length - i * C, C).to(tl.int32)
        m_ck = m_t[:, None] & m_k[None, :]
        p_rows = rows + tile * (ROWS * C)
        b_last = tl.exp2(tl.load(p_rows + C - 1))
        if last is not None:
            b_last = by_row(tl.load(last + tile * K + o_k, mask=m_k, other=0.0), UPRIGHT)
        b_dSd = round_to(b_dS, dtype, DOT)
        if dS is not None:
            tl.store(dS + tile * (V * K) + o_state, b_dSd, mask=m_state)
        # not one condition: the first is decided when the kernel is compiled, the second when it
        # runs
        if initial_state is not None and dinitial_state is not None:  # noqa: SIM102
            if i == 0:
                # what rounding took, in 16 bits: all of 32 would pass through more shared memory
                # than is left
                b_low = round_to(b_dS - b_dSd.to(tl.float32), tl.bfloat16, DOT).to(tl.float32)
                tl.store(dinitial_state + (i_n * HV + i_h) * (K * V) + o_state, b_low, mask=m_state)

        p_q = q + t * QR + i_hk * K + o_c[:, None] * QR + o_k[None, :]
        p_k = k + t * KR + i_hk * K + o_c[:, None] * KR + o_k[None, :]
        b_q = tl.load(p_q, mask=m_ck, other=0.0)
        b_k = tl.load(p_k, mask=m_ck, other=0.0)
        m_tv = by_row(m_t, UPRIGHT) & by_column(m_v, UPRIGHT)
        b_do = tl.load(do + (t * HV + i_h) * V + o_tv, mask=m_tv, other=0.0)
        b_T = tl.load(T + tile * (C * C) + o_cc)
        b_P = tl.load(P + tile * (C * C) + o_cc)
        b_kl = b_k
        if kl is not None:
            b_kl = tl.load(
                kl + t * KR + i_hk * K + o_c[:, None] * KR + o_k[None, :], mask=m_ck, other=0.0
            )
        b_dU = multiply_from_left(b_kl, b_dSd, length > 0, UPRIGHT, ALONE, DOT)
        b_to_end = tl.load(p_rows + 6 * C + o_c)
        if dtype == tl.float16:
            b_to_end /= unit
        b_dU *= by_row(b_to_end, UPRIGHT)
        p_cv = tile * (C * V) + by_row(o_c, UPRIGHT) * V + by_column(o_v, UPRIGHT)
        if writes is not None:
            b_U = tl.load(U + p_cv, mask=by_column(m_v, UPRIGHT), other=0.0)
            tl.store(
                writes + (tile * NV + i_v) * C + o_c, tl.sum(b_U * b_dU, axis=1 if UPRIGHT else 0)
            )
        b_dU += multiply_from_left(tl.trans(b_P), b_do, length > 0, UPRIGHT, ALONE, DOT)
        if dtype == tl.float16:
            b_dU *= unit
        b_dY = multiply_from_left(
            tl.trans(b_T), round_to(b_dU, dtype, DOT), length > 0, UPRIGHT, ALONE, DOT
        )
        if dY is not None:
            tl.store(dY + p_cv, round_to(b_dY, dtype, DOT), mask=by_column(m_v, UPRIGHT))
        b_dO = b_do.to(tl.float32) * by_row(tl.load(p_rows + 5 * C + o_c), UPRIGHT)
        b_dY *= by_row(tl.load(p_rows + 4 * C + o_c), UPRIGHT)
        if dtype == tl.float16:
            # scale dO may leave float16's range at either end, and what the first token's decay
            # leaves of it and of dY at the lower. In this order the product adds b_dS, or registers
            # spill
            most, _ = split_power(tl.exp2(tl.maximum(tl.load(p_rows), -87.0)))
            inverse = invert_power(most)
            b_dO *= inverse * (scale / power)
            b_dS *= b_last * inverse / power
            b_dS = add_from_left(b_dS, tl.trans(b_q), round_to(b_dO, dtype, DOT), UPRIGHT, DOT)
            b_dS *= power
            b_dS = add_from_left(
                b_dS, tl.trans(b_k), round_to(-b_dY * inverse, dtype, DOT), UPRIGHT, DOT
            )
            b_dS *= most
        else:
            b_dS *= b_last
            b_dS = add_from_left(
                b_dS, tl.trans(b_q), round_to(scale * b_dO, dtype, DOT), UPRIGHT, DOT
            )
            b_dS = add_from_left(b_dS, tl.trans(b_k), round_to(-b_dY, dtype, DOT), UPRIGHT, DOT)

    if initial_state is not None:  # noqa: SIM102
        if chunks > 0:
            # the first state is known unrounded, and dinitial_state holds what its gradient lost so
            # far
            tl.debug_barrier()
            tile = first * HV + i_h
            o_first = (i_n * HV + i_h) * (K * V) + o_state
            b_S = tl.load(S + tile * (V * K) + o_state, mask=m_state, other=0.0).to(tl.float32)
            b_first = tl.load(dS + tile * (V * K) + o_state, mask=m_state, other=0.0).to(tl.float32)
            b_initial = tl.load(initial_state + o_first, mask=m_state, other=0.0).to(tl.float32)
            if units is not None:
                b_initial *= invert_power(state_unit)
            b_lost = (b_initial - b_S) * b_first
            if dinitial_state is not None:
                b_lost += b_initial * tl.load(dinitial_state + o_first, mask=m_state, other=0.0)
                tl.debug_barrier()
            if last is not None:
                b_lost = tl.sum(b_lost, axis=1 if UPRIGHT else 0)
                tl.store(carry + (tile * NV + i_v) * K + o_k, b_lost, mask=m_k)
            else:
                tl.store(carry + tile * NV + i_v, tl.sum(tl.sum(b_lost, axis=1), axis=0))
    if dinitial_state is not None:
        if units is not None:
            b_dS *= gradient_unit
        tl.store(dinitial_state + (i_n * HV + i_h) * (K * V) + o_state, b_dS, mask=m_state)


@take_turns
def reverse_scan(
    q,
    k,
    do,
    T,
    P,
    rows,
    S,
    U,
    initial_state,
    dstate,
    *,
    dY,
    dS,
    writes,
    carry,
    dinitial_state,
    scale,
    unit,
    units=None,
    kl=None,
    last=None,
    chunks: Chunks,
    config: Config,
):
    """Launches `reverse_scan_kernel`, which says what it fills."""
    H, K = q.shape[2:]
    HV, V = do.shape[2:]
    tile = config.reverse
    power = 2.0 ** max(-60, frexp(scale)[1])
    reverse_scan_kernel[(chunks.sequences * HV * -(-V // tile.columns),)](
        q, k, do, T, P, rows, units, kl, last, S, U, initial_state, dstate, dY, dS, writes, carry,
        dinitial_state, chunks.cu_seqlens, chunks.offsets, scale, power, unit, chunks.tokens,
        chunks.per_sequence, chunks.segments, chunks.span, H=H, HV=HV, K=K, KP=power_of_two(K), V=V,
        BV=tile.columns, C=chunks.size, QR=row_stride(q), KR=row_stride(k), UPRIGHT=tile.upright,
        ALONE=tile.warps > 4, DOT=config.dot, **tile.options(),
    )  # fmt: skip


def variants(K: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row, tiles = config(K, V, itemsize=itemsize), by_heads("reverse", K, V, itemsize)
    sizes = {"K": K, "KP": power_of_two(K), "V": V, "C": row.C, "DOT": row.dot} | rows_of(
        2, 4, K, V
    )
    sizes |= dict.fromkeys(("units", "kl", "last"))

    def variant(options: str, heads: str, values: dict) -> Variant:
        values = values | of_tile(tiles[heads])
        return Variant(
            "reverse_scan", options + heads, reverse_scan_kernel, TYPES, tiles[heads], values
        )

    for layout, tables in layouts(quick).items():
        states = ("dstate", "initial_state", "dinitial_state", "carry") if layout == "dense" else ()
        if itemsize < 4:
            states += ("writes",)
        for heads in tiles:
            yield variant(layout, heads, sizes | tables | dict.fromkeys(states))
        absent = ("dstate", "initial_state", "S", "dY", "dS", "writes", "carry")
        heads = FEW if FEW in tiles else ""
        yield variant(f"{layout} segments", heads, sizes | tables | dict.fromkeys(absent))
