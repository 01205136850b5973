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
    LEAST_STRENGTH,
    compute_key_gradients,
    compute_pair_gradients,
    compute_residual_gradient,
    compute_sums,
    compute_writes,
    differentiate_norm,
    divide_norms,
    multiply_pair_gradients,
    multiply_terms,
    read_states,
    scale_sums,
    shorten_vectors,
    store_key_gradients,
    sum_along,
    sum_crossing_pairs,
    sum_decay_gradient,
    transpose_gradients,
    transpose_pair_gradients,
    transpose_states,
    transpose_writes,
)
from delta_trn.nki_kernels.gated_delta_rule_fwd import load_state, store_state
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import count_slots, list_waves, pad_to_rows, split_evenly
from delta_trn.nki_kernels.tiles import (
    build_constants,
    copy_scaled,
    multiply_elements,
    normals,
    psum,
    rule_inputs,
    sbuf,
    take_corners,
    transpose,
)
from delta_trn.nki_kernels.triangular import (
    allocate_workspace,
    build_block_constants,
    count_levels,
    multiply_corners,
    solve_blocks,
    spread_blocks,
    transpose_blocks,
    update_blocks,
)


def build_gradient_constants(C, products):
    """Builds what `build_constants` does, and minus_identity, [C, C] of dtype products."""
    constants = build_constants(C, products)
    constants["minus_identity"] = sbuf((C, C), products)
    copy_scaled(constants["minus_identity"], constants["identity"], -1.0)
    return constants


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


LEVELS = 3  # merges of blocks of 16 to 128 rows

# The stages of a stretch, of all its chunks at once
LOAD = 0  # inputs, norms, sums of decays
FACTORS = 1  # that shorten long q and k
SHORTEN = 2
SCALE = 3  # gates, and what they scale
TRANSPOSE_KEYS = 4  # of q and k, and D
MULTIPLY = 5  # L and P
SPREAD = 6  # the inverse: blocks of 16
SUBSTITUTE = 7
EVEN = 8  # its merges, three stages each
CORNERS = 9
UPDATE = 10
# The stages of a chunk
APPLY = 11  # what T and the gates make, no state yet
RESIDUAL = 12  # R
SOLVE = 13  # U, and the next state
READ = 14  # dR
STATE = 15  # dS
TRANSPOSE = 16  # of dO, U, dR, S and dS
MULTIPLY_PAIRS = 17  # U dO^T and U dR^T
PAIRS = 18  # E_t, Z_t and the terms of F
TRANSPOSE_PAIRS = 19
STATES = 20  # what states do to dQ and dK
KEYS = 21  # the rest of dQ and dK of raw keys
CROSS = 22  # sums of F
ALONG = 23  # <x, dx> of the norms
NORM = 24
STORE = 25  # dq, dk and dv
TERMS = 26  # products whose rows are summed
SUM = 27
STRENGTH = 28  # dbeta
DECAY = 29  # dg


# When a stage is issued: its slot in a bundle's first stretch, if that has two chunks, and how many slots
# later it is for the next level of a merge, chunk forward, chunk backward, and stretch. A search found these
# numbers to be the fastest by the cost model; results/2026-11-23_simulated_nki-speed says how.
SLOTS = (
    0, 5, 8, 11, 20, 63, 67, 81, 99, 106, 118, 186, 175, 209, 241, 285,
    261, 264, 266, 281, 271, 301, 314, 322, 351, 379, 298, 344, 362, 751,
)  # fmt: skip
NEXT_LEVEL, NEXT_FORWARD, NEXT_BACKWARD, NEXT_STRETCH = 34, 48, 66, 353


def find_slot(stage, i, count):
    """Returns when a stage of a stretch of `count` chunks is issued, for chunk (or level) i."""
    if stage < EVEN:
        return SLOTS[stage]
    if stage <= UPDATE:
        return SLOTS[stage] + i * NEXT_LEVEL
    if stage <= SOLVE:
        return SLOTS[stage] + i * NEXT_FORWARD
    return SLOTS[stage] + (count - 1 - i) * NEXT_BACKWARD + (count - 2) * NEXT_FORWARD


def count_stretch_slots(every):
    """Returns how many slots a stretch is behind the one before."""
    return NEXT_STRETCH + (every - 2) * (NEXT_FORWARD + NEXT_BACKWARD)


def list_work(chunks, every):
    """Lists per slot what a bundle is to do there: (stage, stretch, chunk or level)."""
    work = []
    stretches = (chunks + every - 1) // every
    for stage in range(LOAD, DECAY + 1):
        for back in range(stretches):
            stretch = stretches - 1 - back
            count = min(every, chunks - stretch * every)
            times = count
            if stage < EVEN:
                times = 1
            elif stage <= UPDATE:
                times = LEVELS
            for i in range(times):
                slot = back * count_stretch_slots(every) + find_slot(stage, i, count)
                while len(work) <= slot:
                    work.append([])
                work[slot].append((stage, stretch, i))
    return work


def invert_beta(chunk):
    """Raises beta [rows, lanes] to LEAST_STRENGTH at least; adds 1 / beta, and `share`, beta over that.

    So U / beta is known where a token writes nothing. What `share` multiplies is of the beta that was given:
    all but dbeta.
    """
    beta_sb = chunk["beta"]
    chunk["inverse_beta"], chunk["share"] = sbuf(beta_sb.shape), sbuf(beta_sb.shape)
    nisa.tensor_scalar(
        dst=chunk["share"], data=beta_sb, op0=nl.multiply, operand0=1 / LEAST_STRENGTH, op1=nl.minimum,
        operand1=1.0,
    )  # fmt: skip
    nisa.tensor_scalar(dst=beta_sb, data=beta_sb, op0=nl.maximum, operand0=LEAST_STRENGTH)
    nisa.reciprocal(dst=chunk["inverse_beta"], data=beta_sb)


def load_again(inputs, do, bundle, spans, l2norm, constants):
    """Runs LOAD: loads the chunks of spans [(start, stop)]."""
    chunks = []
    for span in spans:
        start, stop = span
        table = take_corners(constants, pad_to_rows(stop - start))
        chunk = load_chunk(inputs, bundle, start, stop - start, l2norm, table)
        chunk["do"] = load_lanes(do, bundle, start, stop - start, table["rows"], table["products"])
        invert_beta(chunk)
        chunks.append(chunk)
    return chunks


def scale_again(chunks, scales, bundle, scale, constants):
    """Runs SCALE: puts chunks with their gates and what they scale in place of loaded ones.

    scales has for each chunk what multiplies dO [rows, lanes], besides its read_scale; or it is ().
    """
    for i in range(len(chunks)):
        loaded, table = chunks[i], take_corners(constants, pad_to_rows(chunks[i]["tokens"]))
        chunk = scale_chunk(loaded, bundle, scale, table)
        chunk["inverse_beta"], chunk["share"] = loaded["inverse_beta"], loaded["share"]
        chunk["dv_scale"] = multiply_elements(chunk["value_scale"], loaded["share"])
        columns = chunk["read_scale"]
        if len(scales) > 0:
            columns = multiply_elements(columns, scales[i])
        chunk["do"] = scale_lanes(loaded["do"], columns, table["products"])
        chunks[i] = chunk


def multiply_again(stage, chunks, bundle, parts, blocks, constants):
    """Runs TRANSPOSE_KEYS or MULTIPLY: adds what needs neither T nor a state."""
    for chunk in chunks:
        table = take_corners(constants, pad_to_rows(chunk["tokens"]))
        if stage == TRANSPOSE_KEYS:
            transpose_keys(chunk, parts, table)
        else:
            multiply_keys(chunk, bundle, blocks, table)


def list_runs(chunks):
    """Lists the chunks that are inverted at once: (first, stop). A shorter last one is inverted alone."""
    last = len(chunks) - 1
    if pad_to_rows(chunks[0]["tokens"]) != pad_to_rows(chunks[last]["tokens"]):
        return [(0, last), (last, last + 1)]
    return [(0, last + 1)]


def list_tiles(chunks, name, run):
    """Lists one tile of each chunk of a run."""
    first, stop = run
    tiles = []
    for i in range(first, stop):
        tiles.append(chunks[i][name])
    return tiles


def invert_step(chunks, stage, level, spaces, blocks, constants):
    """Runs SPREAD, SUBSTITUTE, or a stage of a merge."""
    for run in list_runs(chunks):
        first, stop = run
        table = take_corners(constants, pad_to_rows(chunks[first]["tokens"]))
        if stage == SPREAD:
            columns = spread_blocks(list_tiles(chunks, "block_columns", run), blocks)
            for i in range(first, stop):
                chunks[i]["columns"] = columns[i - first]
        elif stage == SUBSTITUTE:
            minus_L_ts = list_tiles(chunks, "minus_L_t", run)
            inverses = solve_blocks(minus_L_ts, list_tiles(chunks, "columns", run), blocks, table)
            for i in range(first, stop):
                chunks[i]["inverse"] = inverses[i - first]
        elif level < count_levels(table["rows"]):
            inverses = list_tiles(chunks, "inverse", run)
            if stage == EVEN:
                transpose_blocks(inverses, blocks, level, table, True)
            elif stage == CORNERS:
                multiply_corners(inverses, spaces[first:stop], blocks, level, table)
            else:
                update_blocks(inverses, spaces[first:stop], level, table, True)


def apply_inverse(chunk, bundle, parts, goes_on, constants):
    """Runs APPLY: adds what T and the gates make, W only where another chunk follows in the stretch."""
    products, table = constants["products"], take_corners(constants, pad_to_rows(chunk["tokens"]))
    T_sb = chunk["inverse"]["T"]
    if products == nl.float32:
        chunk["P"] = transpose(chunk["P_t"], [(0, table["rows"])], table)[0]
    else:
        chunk["W_t"] = transpose_writes(T_sb, chunk, parts, products)
        chunk["PT"] = multiply_lanes_at_once(chunk["P_t"], T_sb, 0, T_sb.shape[0], products)
    chunk["T_t_rounded"] = round_tile(chunk["inverse"]["T_t"], products)
    if goes_on:
        chunk["W"] = sbuf(chunk["lambda_k"].shape)
        for lane in range(T_sb.shape[1]):
            W_ps = psum((T_sb.shape[0], chunk["W"].shape[2]))
            nisa.nc_matmul(dst=W_ps, stationary=T_sb[:, lane, :], moving=chunk["lambda_k"][:, lane, :])
            copy_scaled(chunk["W"][:, lane, :], W_ps, chunk["share"][:, lane : lane + 1])
    chunk["gamma_q"] = scale_heads(chunk["qk"], 0, chunk["gamma"], bundle, products)
    chunk["erased_k"] = scale_heads(chunk["qk"], 1, chunk["minus_strength_gamma"], bundle, products)


def solve_residual(chunk, S, bundle, products):
    """Runs RESIDUAL: computes R from the state S."""
    chunk["S"] = S
    chunk["S_rounded"] = round_state(S, products)
    chunk["R"] = compute_residual(chunk, chunk["S_rounded"], bundle)


def solve_state(chunk, parts, goes_on, constants):
    """Runs SOLVE: computes U; returns the next state if another chunk follows in the stretch."""
    S = chunk["S"]
    if goes_on:
        S = decay_and_add(S, chunk["carry"], [(chunk["W"], chunk["R"])], parts)
    compute_writes(chunk, constants)
    return S


def differentiate_residual(chunk, dS, bundle, products):
    """Runs READ: from the gradient dS of the state that a chunk leaves, computes dR; rounds both.

    The rounded dR is multiplied by `share`: it is 0 where beta is 0, and so is all that is made of it.
    """
    chunk["dS"] = dS
    chunk["dS_rounded"] = round_state(dS, products)
    chunk["dR"] = compute_residual_gradient(chunk, chunk["dS_rounded"], bundle)
    chunk["dR_rounded"] = scale_lanes(chunk["dR"], chunk["share"], products)


def differentiate_state(chunk, parts):
    """Runs STATE: returns the gradient of the state that a chunk meets."""
    pairs = [(chunk["gamma_q"], chunk["do"]), (chunk["erased_k"], chunk["dR_rounded"])]
    return decay_and_add(chunk["dS"], chunk["carry"], pairs, parts)


def differentiate_chunk(stage, chunk, bundle, gradients, parts, value_parts, l2norm, constants):
    """Runs a stage of a chunk's gradients, from TRANSPOSE on."""
    table = take_corners(constants, pad_to_rows(chunk["tokens"]))
    if stage == TRANSPOSE:
        transpose_gradients(chunk, value_parts, table)
        transpose_states(chunk, parts, value_parts, table)
    elif stage == MULTIPLY_PAIRS:
        multiply_pair_gradients(chunk, bundle)
    elif stage == PAIRS:
        compute_pair_gradients(chunk, table)
    elif stage == TRANSPOSE_PAIRS:
        transpose_pair_gradients(chunk, table)
    elif stage == STATES:
        read_states(chunk, bundle, table)
    elif stage == KEYS:
        compute_key_gradients(chunk, bundle, table)
    elif stage == CROSS:
        chunk["crossing"] = sum_crossing_pairs(chunk, table)
    elif stage == ALONG:
        if l2norm:
            sum_along(chunk, bundle)
    elif stage == NORM:
        if l2norm:
            differentiate_norm(chunk, table)
    elif stage == STORE:
        store_key_gradients(chunk, bundle, gradients)
    elif stage == TERMS:
        multiply_terms(chunk, bundle, parts, table)
    elif stage == SUM:
        compute_sums(chunk)
    elif stage == STRENGTH:
        scale_sums(chunk)
        store_lanes(gradients[4], chunk["dbeta"], bundle, chunk["start"], chunk["tokens"])
    else:
        dg_sb = sum_decay_gradient(chunk, bundle, parts, table)
        store_lanes(gradients[3], dg_sb, bundle, chunk["start"], chunk["tokens"])


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
        Each engine runs its instructions in order. So a stage's operands have to be there when it is issued,
        or engines stand still. So `list_work` spreads a stretch's stages; the next one begins before its end;
        and the bundles of a wave take turns, each by a part of a stretch behind the one before.

    Pseudocode, for a bundle:
        dS = dstate
        for stretch, from the last:
            S = the state kept before it
            LOAD, SCALE, TRANSPOSE_KEYS, MULTIPLY all chunks of the stretch
            SPREAD, SUBSTITUTE;  for level in range(LEVELS): EVEN, CORNERS, UPDATE     T of all of them
            for chunk in stretch: APPLY(chunk);  R = RESIDUAL(chunk, S);  S = SOLVE(chunk, R)
            for chunk in stretch, from the last: dR = READ(chunk, dS);  dS = STATE(chunk, dS, dR)
            for chunk in stretch: TRANSPOSE and what follows: the other gradients
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
    constants = build_gradient_constants(largest, q.dtype)
    blocks = build_block_constants(largest)
    for wave in list_waves(N, H, HV, width, lanes):
        work = list_work(chunks, every)
        streams = []
        for bundle in wave:
            dS = load_state(dstate, bundle, parts, V, has_dstate)
            streams.append({"bundle": bundle, "dS": dS, "spaces": [], "stretches": [], "states": []})
            for _ in range(min(every, chunks)):
                streams[len(streams) - 1]["spaces"].append(allocate_workspace(largest, bundle["lanes"]))
            for _ in range((chunks + every - 1) // every):
                streams[len(streams) - 1]["stretches"].append([])
                streams[len(streams) - 1]["states"].append([])
        delay = count_stretch_slots(every) // len(wave)
        for slot in range(len(work) + delay * (len(wave) - 1)):
            for b in range(len(wave)):
                own = slot - b * delay
                for item in range(len(work[own]) if own >= 0 and own < len(work) else 0):
                    stage, stretch, i = work[own][item]
                    stream, bundle = streams[b], wave[b]
                    if stage == LOAD:
                        spans = []
                        for index in range(stretch * every, min((stretch + 1) * every, chunks)):
                            spans.append((index * C, min((index + 1) * C, T)))
                        stream["stretches"][stretch] = load_again(
                            inputs, do, bundle, spans, l2norm, constants
                        )
                        stream["states"][stretch] = load_kept_state(
                            initial_state, states, stretch, bundle, parts, V, has_state
                        )
                    solved = stream["stretches"][stretch]
                    goes_on = i + 1 < len(solved)
                    if stage in (FACTORS, SHORTEN):
                        for chunk in solved:
                            if stage == FACTORS:
                                chunk["shortening"] = divide_norms(chunk["inverse_norms"])
                            else:
                                shorten_vectors(chunk["qk"], chunk["shortening"])
                    elif stage == SCALE:
                        scale_again(solved, (), bundle, scale, constants)
                    elif stage in (TRANSPOSE_KEYS, MULTIPLY):
                        multiply_again(stage, solved, bundle, parts, blocks, constants)
                    elif stage >= SPREAD and stage <= UPDATE:
                        invert_step(solved, stage, i, stream["spaces"], blocks, constants)
                    elif stage == APPLY:
                        apply_inverse(solved[i], bundle, parts, goes_on, constants)
                    elif stage == RESIDUAL:
                        solve_residual(solved[i], stream["states"][stretch], bundle, q.dtype)
                    elif stage == SOLVE:
                        stream["states"][stretch] = solve_state(solved[i], parts, goes_on, constants)
                    elif stage == READ:
                        differentiate_residual(solved[i], stream["dS"], bundle, q.dtype)
                    elif stage == STATE:
                        stream["dS"] = differentiate_state(solved[i], parts)
                    elif stage >= TRANSPOSE:
                        differentiate_chunk(
                            stage, solved[i], bundle, gradients, parts, value_parts, l2norm, constants
                        )
        for b in range(len(wave)):
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
