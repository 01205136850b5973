"""The gated delta rule backward: from states that forward kept, chunk by chunk from the last.

`nki_kernels.chunk_gradients` has the equations. Every `every` chunks forward kept the state; between two
kept ones a stretch of chunks is solved again from its start, and its matrices stay on chip until the
gradients, going backward, have used them. The first state is the call's own initial state, or 0.
"""

import numpy as np

from delta_trn.nki_kernels.chunk import (
    begin,
    combined,
    decay_transposed,
    next_state,
    residual,
    solved,
    views,
    writing,
)
from delta_trn.nki_kernels.chunk_gradients import (
    beta_gradient,
    crossing_pairs,
    decay_gradient,
    key_gradients,
    pair_gradients,
    residual_gradient,
    state_gradient,
    state_transposed,
    through_norm,
    writing_transposed,
)
from delta_trn.nki_kernels.examples import inputs
from delta_trn.nki_kernels.gated_delta_rule_fwd import first_state, store_state
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.tiles import (
    chunk_rows,
    constants,
    copied,
    cut,
    loaded,
    sbuf,
    slots,
    spans,
    transposed,
    waves,
)
from delta_trn.nki_kernels.triangular import inverses, pair_masks, workspace


def kept_state(initial_state, states, stretch, bundle, parts, V, started):
    """S of a bundle at the start of a stretch, per part of K a tile [f, lanes, V]."""
    if stretch == 0:
        return first_state(initial_state, bundle, parts, V, started)
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    S = []
    for part in parts:
        start, stop = part
        tile = sbuf((stop - start, lanes, V))
        nisa.dma_copy(dst=tile, src=states[n, stretch - 1, start:stop, first : first + lanes, :])
        S.append(tile)
    return S


def solve_again(
    q, k, v, g, beta, do, S, wave, start, tokens, parts, scale, l2norm, spaces, masks, table, goes_on
):  # fmt: skip
    """One chunk of a wave, forward: dicts with H, W^T, U, S in them; the next states if it `goes_on`."""
    rows = chunk_rows(tokens)
    V = v.shape[3]
    xs = []
    Gts = []
    for b in range(len(wave)):
        bundle = wave[b]
        n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
        x = begin(q, k, v, g, beta, bundle, start, tokens, rows, parts, scale, l2norm, table)
        x["do"] = loaded(do[n, start : start + tokens, first : first + lanes, :], tokens, rows, (lanes, V))
        x["Et_strict"] = decay_transposed(x["weights"], lanes, rows, table, "drop_since")
        x["S"] = S[b]
        xs.append(x)
        Gts.append(x["Gt"])
    Ts, Tts = inverses(Gts, spaces, masks, table, rows, True)
    residuals = []
    for b in range(len(wave)):
        xs[b]["H"] = combined(xs[b]["Pt"], Ts[b], wave[b], rows)
        xs[b]["Wt"] = writing_transposed(Ts[b], xs[b], wave[b], rows, parts)
        residuals.append(residual(xs[b], S[b], wave[b], rows, parts))
    for b in range(len(wave)):
        xs[b]["U"] = solved(Tts[b], residuals[b], wave[b], rows)
    following = S
    if goes_on:
        following = []
        for b in range(len(wave)):
            W = writing(Ts[b], xs[b], wave[b], rows)
            following.append(next_state(xs[b], S[b], W, residuals[b], wave[b], parts))
    return xs, following


def store_tokens(dst, src, bundle, start, tokens):
    """[rows, lanes, ...] to HBM [N, T, HV, ...] at the bundle's lanes."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    nisa.dma_copy(dst=dst[n, start : start + tokens, first : first + lanes], src=src[0:tokens])


def settle(owed, outputs, full, parts, l2norm):
    """The rest of a chunk's gradients, after the large products of every bundle: dots, sums, and stores.

    They wait for the Vector engine, and with them would wait the products of the bundles behind.
    """
    dq, dk, dv, dg, dbeta = outputs
    for y in owed:
        x, bundle, start, tokens, rows = y["x"], y["bundle"], y["start"], y["tokens"], y["rows"]
        n, lanes = bundle["n"], bundle["lanes"]
        total = y["total"]
        if l2norm:
            total = through_norm(x, total, bundle, rows)
        low = bundle["slot"]
        high = low + bundle["key_heads"]
        stop = start + tokens
        nisa.dma_copy(dst=dq[n, start:stop, low:high, :], src=total[0:tokens, :, 0, :])
        nisa.dma_copy(dst=dk[n, start:stop, low:high, :], src=total[0:tokens, :, 1, :])
        dv_ = sbuf((rows, lanes, dv.shape[3]), dv.dtype)
        for lane in range(lanes):
            copied(dv_[:, lane, :], y["dres"][:, lane, :], x["beta"][:, lane : lane + 1])
        store_tokens(dv, dv_, bundle, start, tokens)
        store_tokens(dbeta, beta_gradient(x, y["dres"], y["dots"], bundle, rows), bundle, start, tokens)
        table = cut(full, rows)
        dg_ = decay_gradient(x, y["crossing"], x["S"], y["dS"], y["dots"], bundle, rows, parts, table)
        store_tokens(dg, dg_, bundle, start, tokens)


@nki.jit
def gated_delta_rule_bwd(
    q, k, v, g, beta, do, dstate, initial_state, states, scale, l2norm, given, started, every, C, lanes, width
):  # fmt: skip
    """(dq, dk, dv, dg, dbeta, dinitial_state), given `states` from forward with the same C and every.

    Shapes as in forward, states None if there are none; do like v; dstate [N, HV, K, V] float32 is read if
    `given`, initial_state if `started`, and each is None else. dq and dk [N, T, slots, K]: one head per key
    head in q's dtype, or, where a group of value heads is larger than `width`, float32 parts whose
    consecutive slots / H sum to it.
    """
    N, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    parts, value_parts = spans(K), spans(V)
    chunks = (T + C - 1) // C
    heads = slots(H, HV, width)
    wide = q.dtype if heads == H else nl.float32
    dq = nl.ndarray((N, T, heads, K), dtype=wide, buffer=nl.shared_hbm)
    dk = nl.ndarray((N, T, heads, K), dtype=wide, buffer=nl.shared_hbm)
    dv = nl.ndarray((N, T, HV, V), dtype=v.dtype, buffer=nl.shared_hbm)
    dg = nl.ndarray((N, T, HV), dtype=g.dtype, buffer=nl.shared_hbm)
    dbeta = nl.ndarray((N, T, HV), dtype=beta.dtype, buffer=nl.shared_hbm)
    dinitial = nl.ndarray((N, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    outputs = (dq, dk, dv, dg, dbeta)
    largest = min(C, chunk_rows(T))
    full = constants(largest)
    masks = pair_masks(largest)
    for wave in waves(N, H, HV, width, lanes):
        dS = []
        spaces = []
        for bundle in wave:
            dS.append(first_state(dstate, bundle, parts, V, given))
            spaces.append(workspace(largest, bundle["lanes"]))
        for back in range((chunks + every - 1) // every):
            stretch = (chunks + every - 1) // every - 1 - back
            first_chunk = stretch * every
            last_chunk = min(first_chunk + every, chunks)
            S = []
            for bundle in wave:
                S.append(kept_state(initial_state, states, stretch, bundle, parts, V, started))
            solved_chunks = []
            for chunk in range(first_chunk, last_chunk):
                start = chunk * C
                tokens = min(C, T - start)
                table = cut(full, chunk_rows(tokens))
                xs, S = solve_again(
                    q, k, v, g, beta, do, S, wave, start, tokens, parts, scale, l2norm, spaces, masks, table,
                    chunk + 1 < last_chunk,
                )  # fmt: skip
                solved_chunks.append(xs)
            for step in range(last_chunk - first_chunk):
                chunk = last_chunk - 1 - step
                xs = solved_chunks[chunk - first_chunk]
                start = chunk * C
                tokens = min(C, T - start)
                rows = chunk_rows(tokens)
                table = cut(full, rows)
                dres = []
                owed = []
                for b in range(len(wave)):
                    dres.append(residual_gradient(xs[b], dS[b], wave[b], rows, parts))
                for b in range(len(wave)):
                    bundle = wave[b]
                    x = xs[b]
                    count = bundle["lanes"]
                    identity = table["identity"]
                    do_t = transposed(views(x["do"], count), rows, value_parts, identity)
                    U_t = transposed(views(x["U"], count), rows, value_parts, identity)
                    dres_t = transposed(views(dres[b], count), rows, value_parts, identity)
                    S_t = state_transposed(x["S"], bundle, parts, value_parts, K, table)
                    dS_t = state_transposed(dS[b], bundle, parts, value_parts, K, table)
                    pairs = pair_gradients(x, do_t, U_t, dres_t, bundle, rows, value_parts, scale, table)
                    following = state_gradient(x, dS[b], dres[b], bundle, rows, parts)
                    total, dots = key_gradients(
                        x, pairs, do_t, U_t, dres_t, S_t, dS_t, bundle, rows, value_parts
                    )  # fmt: skip
                    owed.append(
                        {
                            "x": x, "bundle": bundle, "start": start, "tokens": tokens, "rows": rows,
                            "total": total, "dots": dots, "dres": dres[b], "dS": dS[b],
                            "crossing": crossing_pairs(pairs, bundle["lanes"], rows, table),
                        }
                    )  # fmt: skip
                    dS[b] = following
                settle(owed, outputs, full, parts, l2norm)
        for b in range(len(wave)):
            store_state(dinitial, dS[b], wave[b], parts)
    return dq, dk, dv, dg, dbeta, dinitial


def example(
    B=1, T=256, H=2, K=64, V=128, HV=0, dtype="float32", every=2, C=128, lanes=8, width=4
):  # fmt: skip
    """The kernel and arguments as training passes them: no gradient of the final state, l2norm."""
    HV = HV or H
    q, k, v, g, beta, do = inputs(B, T, H, HV, K, V, dtype)
    kept = (-(-T // C) - 1) // every
    states = np.random.default_rng(1).standard_normal((B, kept, K, HV, V), np.float32) * np.float32(K**-0.5)
    arguments = (
        q, k, v, g, beta, do, None, None, states if kept else None, K**-0.5, True, False, False, every, C,
        lanes, width,
    )  # fmt: skip
    return gated_delta_rule_bwd, arguments


def between(arguments, outputs):
    """The states, which are no input of the operation."""
    states = arguments[8]
    return () if states is None else (states,)
