"""Computes the gradients of the gated delta rule: from the states that forward kept, last chunk first.

`nki_kernels.chunk` and `nki_kernels.chunk_gradients` have the equations, the letters, and the tiles in a
chunk's dict. Forward kept the state every `every` chunks. Between two kept states lies a stretch of chunks.
A stretch is solved again from its start, and its matrices stay on chip until the gradients, going backward,
have used them. The first stretch starts from the call's own initial state, or 0.
"""

from delta_trn.nki_kernels.chunk import (
    compute_decays,
    compute_residual,
    decay_and_add,
    load_lanes,
    multiply_lanes,
    multiply_lanes_at_once,
    prepare_chunk,
    scale_lanes,
    store_lanes,
)
from delta_trn.nki_kernels.chunk_gradients import (
    compute_beta_gradient,
    compute_decay_gradient,
    compute_key_gradients,
    compute_pair_gradients,
    compute_residual_gradient,
    compute_state_gradient,
    differentiate_norm,
    sum_crossing_pairs,
    transpose_state,
    transpose_writes,
)
from delta_trn.nki_kernels.examples import normals, rule_inputs
from delta_trn.nki_kernels.gated_delta_rule_fwd import load_state, store_state
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import count_slots, list_waves, pad_to_rows, split_evenly
from delta_trn.nki_kernels.tiles import build_constants, sbuf, take_corners, transpose
from delta_trn.nki_kernels.triangular import allocate_workspace, build_pair_masks, invert


def load_kept_state(initial_state, states, stretch, bundle, parts, V, has_state):
    """Loads a bundle's state at the start of a stretch, a tile [f, lanes, V] per part of K."""
    if stretch == 0:
        return load_state(initial_state, bundle, parts, V, has_state)
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    S = []
    for span in parts:
        start, stop = span
        tile_sb = sbuf((stop - start, lanes, V))
        nisa.dma_copy(dst=tile_sb, src=states[n, stretch - 1, start:stop, first : first + lanes, :])
        S.append(tile_sb)
    return S


def solve_again(inputs, do, S, wave, start, tokens, parts, scale, l2norm, spaces, masks, table, goes_on):
    """Solves a chunk of each bundle forward; returns the chunks, and the next states if `goes_on`."""
    chunks = []
    minus_L_ts = []
    for b in range(len(wave)):
        chunk = prepare_chunk(inputs, wave[b], start, tokens, parts, scale, l2norm, table)
        chunk["do"] = load_lanes(do, wave[b], start, tokens, table["rows"])
        chunk["D_strict_t"] = compute_decays(chunk["g_triangles"], table, "drop_lower")
        chunk["S"] = S[b]
        chunks.append(chunk)
        minus_L_ts.append(chunk["minus_L_t"])
    inverses = invert(minus_L_ts, spaces, masks, table, True)
    residuals = []
    for b in range(len(wave)):
        T_sb = inverses[b]["T"]
        chunks[b]["PT"] = multiply_lanes_at_once(chunks[b]["P_t"], T_sb, 0, table["rows"])
        chunks[b]["W_t"] = transpose_writes(T_sb, chunks[b], parts)
        residuals.append(compute_residual(chunks[b], S[b], wave[b]))
    for b in range(len(wave)):
        chunks[b]["U"] = multiply_lanes(inverses[b]["T_t"], residuals[b])
    following = S
    if goes_on:
        following = []
        for b in range(len(wave)):
            W_sb = multiply_lanes(inverses[b]["T"], chunks[b]["lambda_k"])
            following.append(decay_and_add(S[b], chunks[b]["carry"], [(W_sb, residuals[b])], parts))
    return chunks, following


def multiply_gradients(chunk, dS, dR_sb, bundle, parts, value_parts, scale, table):
    """Issues a chunk's large products; returns the gradient of its state, and leaves in its dict

    dqk, dots       as `compute_key_gradients` returns them
    dR, dS          the gradients of R and of the state that the chunk leaves
    crossing        as `sum_crossing_pairs` returns it
    """
    identity_sb = table["identity"]
    do_t = transpose(chunk["do"], value_parts, identity_sb)
    U_t = transpose(chunk["U"], value_parts, identity_sb)
    dR_t = transpose(dR_sb, value_parts, identity_sb)
    S_t = transpose_state(chunk["S"], parts, value_parts, table)
    dS_t = transpose_state(dS, parts, value_parts, table)
    compute_pair_gradients(chunk, do_t, U_t, dR_t, bundle, scale, table)
    earlier_dS = compute_state_gradient(chunk, dS, dR_sb, bundle, parts)
    dqk_sb, dots_sb = compute_key_gradients(chunk, do_t, U_t, dR_t, S_t, dS_t, bundle)
    chunk["dqk"] = dqk_sb
    chunk["dots"] = dots_sb
    chunk["dR"] = dR_sb
    chunk["dS"] = dS
    chunk["crossing"] = sum_crossing_pairs(chunk, table)
    return earlier_dS


def store_gradients(chunk, bundle, gradients, parts, l2norm, table):
    """Computes the rest of a chunk's gradients, dot products and sums, and stores all of them."""
    dq, dk, dv, dg, dbeta = gradients
    n, start, tokens = bundle["n"], chunk["start"], chunk["tokens"]
    low, stop = bundle["slot"], start + tokens
    high = low + bundle["key_heads"]
    dqk_sb, dR_sb, dots_sb = chunk["dqk"], chunk["dR"], chunk["dots"]
    if l2norm:
        dqk_sb = differentiate_norm(chunk, dqk_sb)
    nisa.dma_copy(dst=dq[n, start:stop, low:high, :], src=dqk_sb[0:tokens, :, 0, :])
    nisa.dma_copy(dst=dk[n, start:stop, low:high, :], src=dqk_sb[0:tokens, :, 1, :])
    store_lanes(dv, scale_lanes(dR_sb, chunk["beta"], dv.dtype), bundle, start, tokens)
    store_lanes(dbeta, compute_beta_gradient(chunk, dR_sb, dots_sb), bundle, start, tokens)
    dg_sb = compute_decay_gradient(chunk, chunk["crossing"], chunk["dS"], dots_sb, bundle, parts, table)
    store_lanes(dg, dg_sb, bundle, start, tokens)


@nki.jit
def gated_delta_rule_bwd(
    q, k, v, g, beta, do, dstate, initial_state, states, scale, l2norm, has_dstate, has_state, every, C,
    lanes, width,
):  # fmt: skip
    """Computes the gradients of `gated_delta_rule_fwd`, with the same C and every.

    Args:
        q, k, v, g, beta    as in forward
        do                  like v
        dstate              of the final state [N, HV, K, V] float32, read if `has_dstate`; else any tensor
        initial_state       like dstate, read if `has_state`; else any tensor
        states              as forward returned them; any tensor if it returned none
        every               at least 1; the other options as in forward

    Returns:
        dq, dk              [N, T, slots, K]: one head per key head in q's dtype or, where a group of value
                            heads is larger than `width`, float32 parts whose consecutive slots / H sum to it
        dv, dg, dbeta       [N, T, HV, ...] like v, g, beta
        dinitial_state      [N, HV, K, V] float32

    Notes:
        The last gradients of a chunk wait for the Vector engine, and the products of the bundles behind would
        wait with them. So the products of all bundles are issued first, then what is left of each.

    Pseudocode:
        for wave in waves:
            dS = dstate
            for stretch, from the last:
                S = the state kept before it
                for chunk in stretch: solve chunk forward from S;  S = its next state
                for chunk in stretch, from the last:
                    dR = compute_residual_gradient(chunk, dS)
                    dS = multiply_gradients(chunk, dS, dR)
                    store_gradients(chunk)
            dinitial_state = dS
    """
    N, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    parts, value_parts = split_evenly(K), split_evenly(V)
    chunks = (T + C - 1) // C
    inputs = (q, k, v, g, beta)
    heads = count_slots(H, HV, width)
    key_dtype = q.dtype if heads == H else nl.float32
    dq = nl.ndarray((N, T, heads, K), dtype=key_dtype, buffer=nl.shared_hbm)
    dk = nl.ndarray((N, T, heads, K), dtype=key_dtype, buffer=nl.shared_hbm)
    dv = nl.ndarray((N, T, HV, V), dtype=v.dtype, buffer=nl.shared_hbm)
    dg = nl.ndarray((N, T, HV), dtype=g.dtype, buffer=nl.shared_hbm)
    dbeta = nl.ndarray((N, T, HV), dtype=beta.dtype, buffer=nl.shared_hbm)
    dinitial_state = nl.ndarray((N, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    gradients = (dq, dk, dv, dg, dbeta)
    largest = min(C, pad_to_rows(T))
    constants = build_constants(largest)
    masks = build_pair_masks(largest)
    for wave in list_waves(N, H, HV, width, lanes):
        dS = []
        spaces = []
        for bundle in wave:
            dS.append(load_state(dstate, bundle, parts, V, has_dstate))
            spaces.append(allocate_workspace(largest, bundle["lanes"]))
        for back in range((chunks + every - 1) // every):
            stretch = (chunks + every - 1) // every - 1 - back
            first_chunk = stretch * every
            last_chunk = min(first_chunk + every, chunks)
            S = []
            for bundle in wave:
                S.append(load_kept_state(initial_state, states, stretch, bundle, parts, V, has_state))
            solved = []
            for index in range(first_chunk, last_chunk):
                tokens = min(C, T - index * C)
                table = take_corners(constants, pad_to_rows(tokens))
                bundle_chunks, S = solve_again(
                    inputs, do, S, wave, index * C, tokens, parts, scale, l2norm, spaces, masks, table,
                    index + 1 < last_chunk,
                )  # fmt: skip
                solved.append(bundle_chunks)
            for back_in_stretch in range(last_chunk - first_chunk):
                bundle_chunks = solved[last_chunk - first_chunk - 1 - back_in_stretch]
                table = take_corners(constants, pad_to_rows(bundle_chunks[0]["tokens"]))
                dR = []
                for b in range(len(wave)):
                    dR.append(compute_residual_gradient(bundle_chunks[b], dS[b]))
                for b in range(len(wave)):
                    dS[b] = multiply_gradients(
                        bundle_chunks[b], dS[b], dR[b], wave[b], parts, value_parts, scale, table
                    )
                for b in range(len(wave)):
                    store_gradients(bundle_chunks[b], wave[b], gradients, parts, l2norm, table)
        for b in range(len(wave)):
            store_state(dinitial_state, dS[b], wave[b], parts)
    return dq, dk, dv, dg, dbeta, dinitial_state


def example(
    B=1, T=256, H=2, K=64, V=128, HV=0, dtype="float32", every=2, C=128, lanes=8, width=4
):  # fmt: skip
    """Returns the kernel and arguments as in training: no gradient of the final state, l2norm."""
    HV = HV or H
    kept = (-(-T // C) - 1) // every
    inputs = rule_inputs(B, T, H, HV, K, V, dtype)
    states = normals("float32", (B, kept, K, HV, V))[0] * K**-0.5 if kept else inputs[4]
    arguments = (
        *inputs, inputs[4], inputs[4], states, K**-0.5, True, False, False, every, C,
        lanes, width,
    )  # fmt: skip
    return gated_delta_rule_bwd, arguments


def between(arguments, outputs):
    """Returns the kept states, which are no input of the operation."""
    states = arguments[8]
    return (states,) if states.ndim == 5 else ()
