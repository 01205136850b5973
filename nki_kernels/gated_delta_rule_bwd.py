"""Computes the gradients of the gated delta rule: from the states that forward kept, last chunk first.

`nki_kernels.chunk` and `nki_kernels.chunk_gradients` have the equations, the letters, and the tiles in a
chunk's dict. Forward kept the state every `every` chunks. Between two kept states lies a stretch of chunks.
A stretch is solved again from its start, and its matrices stay on chip until the gradients, going backward,
have used them. The first stretch starts from the call's own initial state, or 0.
"""

from delta_trn.nki_kernels.chunk import (
    compute_residual,
    decay_and_add,
    load_chunk,
    load_lanes,
    multiply_keys,
    multiply_lanes,
    multiply_lanes_at_once,
    round_state,
    round_tile,
    scale_chunk,
    scale_heads,
    scale_lanes,
    store_lanes,
    transpose_keys,
)
from delta_trn.nki_kernels.chunk_gradients import (
    compute_beta_gradient,
    compute_key_gradients,
    compute_pair_gradients,
    compute_residual_gradient,
    compute_sums,
    differentiate_norm,
    multiply_terms,
    sum_crossing_pairs,
    sum_decay_gradient,
    transpose_pair_gradients,
    transpose_state,
    transpose_writes,
)
from delta_trn.nki_kernels.examples import normals, rule_inputs
from delta_trn.nki_kernels.gated_delta_rule_fwd import load_state, store_state
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import count_slots, list_waves, pad_to_rows, split_evenly
from delta_trn.nki_kernels.tiles import build_constants, sbuf, take_corners, transpose
from delta_trn.nki_kernels.triangular import (
    allocate_workspace,
    build_block_constants,
    count_levels,
    merge,
    solve_blocks,
    spread_blocks,
)


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


# The stages of a bundle's stretch. Bundles are out of phase: while one solves again, another differentiates.
LOAD = 0
SCALE = 1
MULTIPLY = 2
INVERT = 3
SOLVE = 4
STATES = 5
TRANSPOSE = 6
PAIRS = 7
KEYS = 8
STORE = 9
STEPS = 4  # of the inverse: blocks of 16, and three merges to 128 rows


def list_work(chunks, every):
    """Lists a bundle's stages in the order in which they are issued: (stage, stretch, chunk or step)."""
    work = []
    stretches = (chunks + every - 1) // every
    for back in range(stretches):
        stretch = stretches - 1 - back
        count = min(every, chunks - stretch * every)
        for stage in (LOAD, SCALE, MULTIPLY):
            work.append((stage, stretch, 0))
        for step in range(STEPS):
            work.append((INVERT, stretch, step))
        for i in range(count):
            work.append((SOLVE, stretch, i))
        for i in range(count):
            work.append((STATES, stretch, count - 1 - i))
        for i in range(count):
            for stage in (TRANSPOSE, PAIRS, KEYS, STORE):
                work.append((stage, stretch, count - 1 - i))
    return work


def load_again(inputs, do, bundle, spans, l2norm, constants):
    """Runs LOAD: loads the chunks of spans [(start, stop)]."""
    chunks = []
    for span in spans:
        start, stop = span
        table = take_corners(constants, pad_to_rows(stop - start))
        chunk = load_chunk(inputs, bundle, start, stop - start, l2norm, table)
        chunk["do"] = load_lanes(do, bundle, start, stop - start, table["rows"], table["products"])
        chunks.append(chunk)
    return chunks


def scale_again(chunks, bundle, scale, constants):
    """Runs SCALE: puts chunks with their gates and what they scale in place of what `load_again` returns."""
    for i in range(len(chunks)):
        table = take_corners(constants, pad_to_rows(chunks[i]["tokens"]))
        do_sb = chunks[i]["do"]
        chunks[i] = scale_chunk(chunks[i], bundle, scale, table)
        chunks[i]["do"] = scale_lanes(do_sb, chunks[i]["read_scale"], table["products"])


def multiply_again(chunks, bundle, parts, blocks, constants):
    """Runs MULTIPLY: adds the rest of what needs no state but T."""
    for chunk in chunks:
        transpose_keys(chunk, parts, take_corners(constants, pad_to_rows(chunk["tokens"])))
    for chunk in chunks:
        multiply_keys(chunk, bundle, blocks, take_corners(constants, pad_to_rows(chunk["tokens"])))


def invert_step(stream, step, blocks, constants):
    """Runs a step of INVERT; a shorter chunk, the last one, is inverted alone after the others."""
    chunks = stream["chunks"]
    runs = [(0, len(chunks))]
    rows, last_rows = pad_to_rows(chunks[0]["tokens"]), pad_to_rows(chunks[len(chunks) - 1]["tokens"])
    if rows != last_rows:
        runs = [(0, len(chunks) - 1), (len(chunks) - 1, len(chunks))]
    for run in runs:
        first, stop = run
        table = take_corners(constants, pad_to_rows(chunks[first]["tokens"]))
        if step == 0:
            minus_L_ts = []
            block_columns = []
            for i in range(first, stop):
                minus_L_ts.append(chunks[i]["minus_L_t"])
                block_columns.append(chunks[i]["block_columns"])
            inverses = solve_blocks(minus_L_ts, spread_blocks(block_columns, blocks), blocks, table)
            for i in range(first, stop):
                chunks[i]["inverse"] = inverses[i - first]
        elif step <= count_levels(table["rows"]):
            inverses = []
            for i in range(first, stop):
                inverses.append(chunks[i]["inverse"])
            merge(inverses, stream["spaces"][first:stop], blocks, step - 1, table, True)


def solve_again(chunk, S, bundle, parts, goes_on, products):
    """Runs SOLVE: solves a chunk forward from the state S; returns the next state if `goes_on`."""
    T_sb = chunk["inverse"]["T"]
    chunk["S"] = S
    chunk["S_rounded"] = round_state(S, products)
    R_sb = compute_residual(chunk, chunk["S_rounded"], bundle)
    chunk["W_t"] = transpose_writes(T_sb, chunk, parts, products)
    T_rounded_sb, T_t_sb = round_tile(T_sb, products), round_tile(chunk["inverse"]["T_t"], products)
    chunk["PT"] = multiply_lanes_at_once(chunk["P_t"], T_rounded_sb, 0, T_sb.shape[0], products)
    chunk["U"] = multiply_lanes(T_t_sb, round_tile(R_sb, products), products)
    if not goes_on:
        return S
    W_sb = multiply_lanes(T_sb, chunk["lambda_k"])
    return decay_and_add(S, chunk["carry"], [(W_sb, R_sb)], parts)


def differentiate_state(chunk, dS, bundle, parts, products):
    """Runs STATES: returns the gradient of the state that a chunk meets, from that of the one that it leaves.

    In the chunk's dict it leaves dS, the gradient as given, and dR, the gradient of R, and both rounded.
    """
    gamma_q_sb = scale_heads(chunk["qk"], 0, chunk["gamma"], bundle, products)
    k_sb = scale_heads(chunk["qk"], 1, chunk["minus_strength_gamma"], bundle, products)
    chunk["dS"] = dS
    chunk["dS_rounded"] = round_state(dS, products)
    chunk["dR"] = compute_residual_gradient(chunk, chunk["dS_rounded"])
    chunk["dR_rounded"] = round_tile(chunk["dR"], products)
    pairs = [(gamma_q_sb, chunk["do"]), (k_sb, chunk["dR_rounded"])]
    return decay_and_add(dS, chunk["carry"], pairs, parts)


def transpose_gradients(chunk, parts, value_parts, constants):
    """Runs TRANSPOSE: adds transposes of dO, U, dR, S and dS, tiles per part of V."""
    table = take_corners(constants, pad_to_rows(chunk["tokens"]))
    chunk["do_t"] = transpose(chunk["do"], value_parts, table)
    chunk["U_t"] = transpose(chunk["U"], value_parts, table)
    chunk["dR_t"] = transpose(chunk["dR_rounded"], value_parts, table)
    chunk["S_t"] = transpose_state(chunk["S_rounded"], parts, value_parts, table)
    chunk["dS_t"] = transpose_state(chunk["dS_rounded"], parts, value_parts, table)


def store_key_gradients(chunk, bundle, gradients, parts, l2norm, constants):
    """Runs STORE: stores dq, dk and dv, and leaves what dbeta and dg sum over features."""
    dq, dk, dv, _, _ = gradients
    n, start, tokens = bundle["n"], chunk["start"], chunk["tokens"]
    low, stop = bundle["slot"], start + tokens
    high = low + bundle["key_heads"]
    store_lanes(dv, scale_lanes(chunk["dR"], chunk["value_scale"], dv.dtype), bundle, start, tokens)
    dqk_sb = differentiate_norm(chunk, chunk["dqk"]) if l2norm else chunk["dqk"]
    nisa.dma_copy(dst=dq[n, start:stop, low:high, :], src=dqk_sb[0:tokens, 0, :, :])
    nisa.dma_copy(dst=dk[n, start:stop, low:high, :], src=dqk_sb[0:tokens, 1, :, :])
    multiply_terms(chunk, bundle, parts, take_corners(constants, pad_to_rows(tokens)))


def store_strength_gradient(stream, dbeta):
    """Sums over features and stores dbeta, of the chunk that waits for it, if one does.

    The Scalar engine waits here for the Vector engine, so this is issued behind another stage.
    """
    stream["summed"] = stream["waiting"]
    for chunk in stream["waiting"]:
        compute_sums(chunk)
        dbeta_sb = compute_beta_gradient(chunk, stream["bundle"])
        store_lanes(dbeta, dbeta_sb, stream["bundle"], chunk["start"], chunk["tokens"])
    stream["waiting"] = []


def store_decay_gradient(stream, dg, parts, constants):
    """Sums over tokens and stores dg, of the chunk whose sums over features were issued a stage before."""
    for chunk in stream["summed"]:
        table = take_corners(constants, pad_to_rows(chunk["tokens"]))
        dg_sb = sum_decay_gradient(chunk, stream["bundle"], parts, table)
        store_lanes(dg, dg_sb, stream["bundle"], chunk["start"], chunk["tokens"])
    stream["summed"] = []


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
        Each engine runs its instructions in order, and a bundle's stages leave now one, now another waiting.
        So the bundles of a wave take turns, each by a part of a stretch behind the one before.

    Pseudocode, for a bundle:
        dS = dstate
        for stretch, from the last:
            S = the state kept before it
            LOAD, SCALE, MULTIPLY, INVERT all chunks of the stretch
            for chunk in stretch: S = SOLVE(chunk, S)
            for chunk in stretch, from the last: dS = STATES(chunk, dS)
            for chunk in stretch, from the last: TRANSPOSE, PAIRS, KEYS, STORE: the other gradients
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
    constants = build_constants(largest, q.dtype)
    blocks = build_block_constants(largest)
    for wave in list_waves(N, H, HV, width, lanes):
        work = list_work(chunks, every)
        streams = []
        for bundle in wave:
            dS = load_state(dstate, bundle, parts, V, has_dstate)
            streams.append({"bundle": bundle, "dS": dS, "spaces": [], "waiting": [], "summed": []})
            for _ in range(min(every, chunks)):
                streams[len(streams) - 1]["spaces"].append(allocate_workspace(largest, bundle["lanes"]))
        delay = max(1, len(work) // max(1, (chunks + every - 1) // every * len(wave)))
        for turn in range(len(work) + delay * (len(wave) - 1)):
            for b in range(len(wave)):
                own = turn - b * delay
                if own >= 0 and own < len(work):
                    stage, stretch, i = work[own]
                    stream, bundle = streams[b], wave[b]
                    if stage == LOAD:
                        stream["S"] = load_kept_state(
                            initial_state, states, stretch, bundle, parts, V, has_state
                        )
                        spans = []
                        for index in range(stretch * every, min((stretch + 1) * every, chunks)):
                            spans.append((index * C, min((index + 1) * C, T)))
                        stream["chunks"] = load_again(inputs, do, bundle, spans, l2norm, constants)
                    elif stage == SCALE:
                        scale_again(stream["chunks"], bundle, scale, constants)
                        store_strength_gradient(stream, dbeta)
                    elif stage == MULTIPLY:
                        multiply_again(stream["chunks"], bundle, parts, blocks, constants)
                        store_decay_gradient(stream, dg, parts, constants)
                    elif stage == INVERT:
                        invert_step(stream, i, blocks, constants)
                    elif stage == SOLVE:
                        goes_on = i + 1 < len(stream["chunks"])
                        stream["S"] = solve_again(
                            stream["chunks"][i], stream["S"], bundle, parts, goes_on, q.dtype
                        )
                    elif stage == STATES:
                        stream["dS"] = differentiate_state(
                            stream["chunks"][i], stream["dS"], bundle, parts, q.dtype
                        )
                    elif stage == TRANSPOSE:
                        transpose_gradients(stream["chunks"][i], parts, value_parts, constants)
                        store_strength_gradient(stream, dbeta)
                    elif stage == PAIRS:
                        table = take_corners(constants, pad_to_rows(stream["chunks"][i]["tokens"]))
                        compute_pair_gradients(stream["chunks"][i], bundle, table)
                        store_decay_gradient(stream, dg, parts, constants)
                        transpose_pair_gradients(stream["chunks"][i], table)
                    elif stage == KEYS:
                        table = take_corners(constants, pad_to_rows(stream["chunks"][i]["tokens"]))
                        compute_key_gradients(stream["chunks"][i], bundle)
                        stream["chunks"][i]["crossing"] = sum_crossing_pairs(stream["chunks"][i], table)
                    else:
                        store_key_gradients(stream["chunks"][i], bundle, gradients, parts, l2norm, constants)
                        stream["waiting"] = [stream["chunks"][i]]
        for b in range(len(wave)):
            store_strength_gradient(streams[b], dbeta)
            store_decay_gradient(streams[b], dg, parts, constants)
            store_state(dinitial_state, streams[b]["dS"], wave[b], parts)
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
