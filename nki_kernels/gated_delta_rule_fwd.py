"""Computes the gated delta rule forward: chunk by chunk, several heads side by side.

    S <- exp(g_t) S    u = beta_t (v_t - S^T k_t)    S <- S + k_t u^T    o_t = scale S^T q_t

Source: arXiv:2412.06464. Value head j reads query and key of head j // (HV / H). `nki_kernels.chunk` has the
equations of a chunk, the letters, and the tiles in a chunk's dict.
"""

from delta_trn.nki_kernels.chunk import (
    build_diagonals,
    compute_decays,
    compute_gates,
    compute_residual,
    decay_and_add,
    find_key_head,
    invert_key_squares,
    load_keys,
    load_lanes,
    multiply_lanes,
    multiply_lanes_at_once,
    multiply_pairs,
    multiply_parts,
    round_state,
    round_tile,
    scale_heads,
    scale_lanes,
    spread_decays,
    store_lanes,
    sum_decays,
    sum_key_squares,
    transpose_side,
    weight_decays,
)
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import list_waves, pad_to_rows, split_evenly
from delta_trn.nki_kernels.tiles import (
    build_constants,
    choose_factors,
    copy_scaled,
    multiply_elements,
    psum,
    rule_inputs,
    sbuf,
    take_corners,
    transpose,
)
from delta_trn.nki_kernels.triangular import (
    BLOCK,
    allocate_workspace,
    begin_solutions,
    build_block_constants,
    count_levels,
    list_block_columns,
    multiply_corners,
    place_blocks,
    spread_blocks,
    substitute,
    transpose_blocks,
    update_blocks,
)

# The stages of a chunk, and what they make.
LOAD = 0  # tiles of the inputs
DECAYS = 1  # sums of g, and what D's products add
NORMS = 2  # of q and k, of KEY_SQUARES
GATES = 3  # gamma, lambda, and all that has one number per token
SCALE_K = 4  # lambda_k
SCALE_V = 5  # beta_v
SCALE_Q = 6  # gamma_q
TRANSPOSE_K = 7  # k_t
TRANSPOSE_Q = 8  # q_t
MATRIX_D = 9  # D_t
TRANSPOSE_GAMMA_Q = 10  # gamma_q_t
WEIGHT = 11  # D_t diag(beta)
MATRIX_L = 12  # minus_L_t
MATRIX_P = 13  # P_t
COLUMNS = 14  # of L's blocks of 16
SPREAD = 15  # the same, on all partitions of their blocks
SOLVE = 16  # three stages, of five columns each: the inverses of the blocks
MERGE = 19  # three stages for each of three levels: T
MULTIPLY_W = 28  # W
MULTIPLY_PT = 29  # PT_t
RESIDUAL = 30  # R, and the state to HBM where it is to be kept
OUTPUT = 31  # O
STATE = 32  # the next state
KEY_SQUARES = 33  # squared norms of q and k

# The bundles that run a stage: every other one, or all side by side
EVEN = 0
ODD = 1
ALL = 2

AHEAD = 6  # chunks by which LOAD is ahead of STATE, at most


def list_stages():
    """Lists what is issued in one turn, (stage, bundles, chunks ahead), in order.

    Each engine runs its instructions in order, and waits where an operand is not there yet. So a turn holds
    stages of several chunks, and what a stage makes is used a while later. The order is the best that
    simulated annealing found by the cost model's time in program order, over four shapes at once: it has no
    other reason, but that a stage comes after those that it needs.
    """
    return (
        (COLUMNS, ODD, 2), (SCALE_Q, ODD, 3), (LOAD, ODD, 6), (TRANSPOSE_Q, ODD, 5), (MERGE, ALL, 1),
        (MERGE + 8, ALL, 0), (MATRIX_L, EVEN, 2), (KEY_SQUARES, EVEN, 4), (WEIGHT, ODD, 3),
        (MERGE + 1, ALL, 1), (MULTIPLY_PT, EVEN, 0), (TRANSPOSE_GAMMA_Q, EVEN, 2), (NORMS, ODD, 4),
        (COLUMNS, EVEN, 2), (MERGE + 2, ALL, 1), (RESIDUAL, ODD, 0), (MATRIX_P, ODD, 0), (GATES, EVEN, 3),
        (SPREAD, ALL, 2), (TRANSPOSE_K, ODD, 5), (MERGE + 3, ALL, 1), (NORMS, EVEN, 4),
        (MULTIPLY_W, EVEN, 0), (GATES, ODD, 4), (SOLVE, ALL, 2), (MATRIX_D, EVEN, 3), (OUTPUT, EVEN, 0),
        (MATRIX_D, ODD, 4), (KEY_SQUARES, ODD, 5), (SCALE_V, ODD, 1), (MATRIX_L, ODD, 3), (SCALE_K, ODD, 2),
        (MERGE + 4, ALL, 1), (SOLVE + 1, ALL, 2), (TRANSPOSE_K, EVEN, 3), (SCALE_V, EVEN, 3),
        (MULTIPLY_W, ODD, 0), (MERGE + 5, ALL, 1), (DECAYS, EVEN, 4), (DECAYS, ODD, 5), (SCALE_K, EVEN, 2),
        (STATE, EVEN, 0), (MULTIPLY_PT, ODD, 0), (SOLVE + 2, ALL, 2), (MERGE + 6, ALL, 1), (OUTPUT, ODD, 0),
        (TRANSPOSE_GAMMA_Q, ODD, 3), (MATRIX_P, EVEN, 1), (MERGE + 7, ALL, 1), (SCALE_Q, EVEN, 3),
        (RESIDUAL, EVEN, 1), (WEIGHT, EVEN, 3), (STATE, ODD, 0), (TRANSPOSE_Q, EVEN, 3), (LOAD, EVEN, 5),
    )  # fmt: skip


def load_state(states, bundle, parts, V, present):
    """Loads a bundle's state [N, HV, K, V], or 0 unless `present`: a tile [f, lanes, V] per part of K."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    S = []
    for span in parts:
        start, stop = span
        tile_sb = sbuf((stop - start, lanes, V))
        if present:
            for lane in range(lanes):
                nisa.dma_copy(dst=tile_sb[:, lane, :], src=states[n, first + lane, start:stop, :])
        else:
            nisa.memset(dst=tile_sb, value=0.0)
        S.append(tile_sb)
    return S


def store_state(states, S, bundle, parts):
    """Stores a bundle's state to HBM [N, HV, K, V]."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    for part in range(len(parts)):
        start, stop = parts[part]
        for lane in range(lanes):
            nisa.dma_copy(dst=states[n, first + lane, start:stop, :], src=S[part][:, lane, :])


def compute_output(chunk, dtype):
    """Computes O = scale diag(gamma) Q S + (P T) R, [rows, lanes, V]: one sum in PSUM per lane."""
    rows, lanes, V = chunk["R"].shape
    out_sb = sbuf((rows, lanes, V), dtype)
    for lane in range(lanes):
        O_ps = psum((rows, V))
        multiply_parts(O_ps, chunk["gamma_q_t"], chunk["S_rounded"], lane, lane)
        nisa.nc_matmul(dst=O_ps, stationary=chunk["PT_t"][:, lane, :], moving=chunk["R_rounded"][:, lane, :])
        copy_scaled(out_sb[:, lane, :], O_ps, chunk["read_scale"][:, lane : lane + 1])
    return out_sb


def load_forward(stream, index, call):
    """Runs LOAD for chunk number `index` of a stream."""
    q, k, v, g, beta = call["inputs"]
    start, bundle = index * call["C"], stream["bundle"]
    tokens = min(call["C"], q.shape[1] - start)
    table = take_corners(call["constants"], pad_to_rows(tokens))
    return {
        "start": start, "tokens": tokens, "table": table,
        "g": load_lanes(g, bundle, start, tokens, table["rows"]),
        "beta": load_lanes(beta, bundle, start, tokens, table["rows"]),
        "qk": load_keys(q, k, bundle, start, tokens, table),
        "v": load_lanes(v, bundle, start, tokens, table["rows"], v.dtype),
    }  # fmt: skip


def enlarge_residual(chunk, bundle):
    """Divides what R is made of, value_scale and minus_strength_gamma, by f of k; returns f per lane."""
    if len(chunk["norms"]) == 0:
        return ()
    rows, lanes = chunk["gamma"].shape
    heads = bundle["key_heads"]
    per_head = (rows, heads, lanes // heads)
    factors_sb, growth_sb = choose_factors(chunk["norms"][0][:, 1, :])
    growth = growth_sb.ap(pattern=[[heads, rows], [1, heads], [0, lanes // heads]], offset=0)
    for name in ("value_scale", "minus_strength_gamma"):
        columns = chunk[name].reshape(per_head)
        nisa.scalar_tensor_tensor(
            dst=columns, data=growth, op0=nl.maximum, operand0=1.0, op1=nl.multiply, operand1=columns
        )
    factors = []
    for lane in range(lanes):
        h = find_key_head(bundle, lane)
        factors.append(factors_sb[:, h : h + 1])
    return factors


def prepare(stage, chunk, bundle, call):
    """Runs a stage before SPREAD: nothing of it needs T or the state."""
    table, parts = chunk["table"], call["parts"]
    if stage == DECAYS:
        chunk["sums"] = sum_decays(chunk["g"], chunk["qk"].shape[3], table)
        chunk["spread"] = spread_decays(chunk["g"], table)
    elif stage == KEY_SQUARES:
        if call["l2norm"]:
            chunk["squares"] = sum_key_squares(chunk["qk"], table)
    elif stage == NORMS:
        chunk["norms"] = invert_key_squares(chunk["squares"], table) if call["l2norm"] else ()
    elif stage == GATES:
        factors_sb, carry_factors_sb = chunk["sums"]
        gates = compute_gates(
            factors_sb, carry_factors_sb, chunk["beta"], chunk["norms"], bundle, call["scale"]
        )
        for name in ("value_scale", "read_scale", "minus_strength_gamma", "gamma", "lambda", "carry"):
            chunk[name] = gates[name]
        chunk["shortening"] = enlarge_residual(chunk, bundle)
        chunk["diagonals"] = build_diagonals(gates["minus_strength"], table)
    elif stage == SCALE_K:
        chunk["lambda_k"] = scale_heads(chunk["qk"], 1, chunk["lambda"], bundle, nl.float32)
    elif stage == SCALE_V:
        chunk["beta_v"] = scale_lanes(chunk["v"], chunk["value_scale"])
    elif stage == SCALE_Q:
        chunk["gamma_q"] = scale_heads(chunk["qk"], 0, chunk["gamma"], bundle, table["products"])
    elif stage == TRANSPOSE_K:
        chunk["k_t"] = transpose_side(chunk["qk"], 1, parts, table)
    elif stage == TRANSPOSE_Q:
        chunk["q_t"] = transpose_side(chunk["qk"], 0, parts, table)
    elif stage == MATRIX_D:
        chunk["D_t"] = compute_decays(chunk["spread"], table)
    elif stage == TRANSPOSE_GAMMA_Q:
        chunk["gamma_q_t"] = transpose(chunk["gamma_q"], parts, table)
    elif stage == WEIGHT:
        chunk["weighted_D_t"] = weight_decays(chunk["D_t"], chunk["diagonals"], table)
    elif stage == MATRIX_L:
        products_ps = multiply_pairs(chunk["k_t"], chunk["k_t"], bundle)
        chunk["minus_L_t"] = multiply_elements(products_ps, chunk["weighted_D_t"])
    elif stage == MATRIX_P:
        products_ps = multiply_pairs(chunk["k_t"], chunk["q_t"], bundle)
        chunk["P_t"] = multiply_elements(products_ps, chunk["D_t"], table["products"])
    elif stage == COLUMNS:
        chunk["block_columns"] = list_block_columns(chunk["minus_L_t"], call["blocks"])


def invert(stage, chunks, streams, call):
    """Runs a stage of SPREAD to MERGE for chunks of several streams, side by side."""
    blocks, table = call["blocks"], chunks[0]["table"]
    minus_L_ts, columns, solutions, inverses, spaces = [], [], [], [], []
    for i in range(len(chunks)):
        minus_L_ts.append(chunks[i]["minus_L_t"])
        spaces.append(streams[i]["spaces"])
        if stage == SPREAD:
            columns.append(chunks[i]["block_columns"])
        elif stage < MERGE:
            columns.append(chunks[i]["columns"])
        else:
            inverses.append(chunks[i]["inverse"])
        if stage > SOLVE and stage < MERGE:
            solutions.append(chunks[i]["solution"])
    if stage == SPREAD:
        columns = spread_blocks(columns, blocks)
        for i in range(len(chunks)):
            chunks[i]["columns"] = columns[i]
    elif stage < MERGE:
        if stage == SOLVE:
            solutions = begin_solutions(minus_L_ts, blocks)
            for i in range(len(chunks)):
                chunks[i]["solution"] = solutions[i]
        last = min(BLOCK, table["rows"]) - 1
        start = (stage - SOLVE) * 5
        substitute(solutions, columns, min(start, last), min(start + 5, last))
        if stage == MERGE - 1:
            inverses = place_blocks(minus_L_ts, solutions, blocks, table)
            for i in range(len(chunks)):
                chunks[i]["inverse"] = inverses[i]
    else:
        level, third = (stage - MERGE) // 3, (stage - MERGE) % 3
        if level < count_levels(table["rows"]):
            if third == 0:
                transpose_blocks(inverses, blocks, level, table, False)
            elif third == 1:
                multiply_corners(inverses, spaces, blocks, level, table)
            else:
                update_blocks(inverses, spaces, level, table, False)


def keep_state(stream, index, call):
    """Stores the state before a chunk to HBM where it is to be kept."""
    bundle, every, parts = stream["bundle"], call["every"], call["parts"]
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    if every > 0 and index > 0 and index % max(every, 1) == 0:
        stretch = index // every - 1
        for part in range(len(parts)):
            low, high = parts[part]
            nisa.dma_copy(
                dst=call["states"][n, stretch, low:high, first : first + lanes, :], src=stream["S"][part]
            )


def advance(stage, chunk, stream, index, call):
    """Runs a stage that needs T or the state."""
    products = chunk["table"]["products"]
    if stage == MULTIPLY_W:
        chunk["W"] = multiply_lanes(chunk["inverse"]["T"], chunk["lambda_k"], chunk["shortening"])
    elif stage == MULTIPLY_PT:
        T_sb = round_tile(chunk["inverse"]["T"], products)
        if len(chunk["shortening"]) > 0:
            chunk["PT_t"] = multiply_lanes(T_sb, chunk["P_t"], chunk["shortening"], products)
        else:
            chunk["PT_t"] = multiply_lanes_at_once(T_sb, chunk["P_t"], 0, T_sb.shape[2], products)
    elif stage == RESIDUAL:
        keep_state(stream, index, call)
        chunk["S_rounded"] = round_state(stream["S"], products)
        chunk["R"] = compute_residual(chunk, chunk["S_rounded"], stream["bundle"])
        chunk["R_rounded"] = round_tile(chunk["R"], products)
    elif stage == OUTPUT:
        out_sb = compute_output(chunk, call["o"].dtype)
        store_lanes(call["o"], out_sb, stream["bundle"], chunk["start"], chunk["tokens"])
    else:
        stream["S"] = decay_and_add(stream["S"], chunk["carry"], [(chunk["W"], chunk["R"])], call["parts"])


def run_stage(stage, streams, index, call):
    """Runs a stage of chunk number `index` of each of these streams."""
    chunks = []
    for stream in streams:
        if stage == LOAD:
            stream["chunks"].append(load_forward(stream, index, call))
        chunks.append(stream["chunks"][index])
    if stage >= SPREAD and stage < MULTIPLY_W:
        invert(stage, chunks, streams, call)
    else:
        for i in range(len(streams)):
            if stage < SPREAD or stage == KEY_SQUARES:
                prepare(stage, chunks[i], streams[i]["bundle"], call)
            else:
                advance(stage, chunks[i], streams[i], index, call)


@nki.jit
def gated_delta_rule_fwd(q, k, v, g, beta, initial_state, scale, l2norm, has_state, every, C, lanes, width):
    """Computes the gated delta rule over whole sequences.

    Dimensions:
        N sequences, T tokens, H query and key heads, HV value heads; 1 <= K <= 256, 1 <= V <= 512

    Args:
        q, k            [N, T, H, K] float32 or bfloat16
        v               [N, T, HV, V]
        g               [N, T, HV, 2]: what `plan.split_decays` makes of the decay's logarithm, -1e4 to 0
        beta            [N, T, HV]
        initial_state   [N, HV, K, V] float32, read if `has_state`; else any tensor
        scale, l2norm   of q; normalize q and k by rsqrt(sum of squares + 1e-6)
        every           keep the state before each chunk whose number is a multiple of it, but chunk 0, whose
                        state backward has anyway; 0 keeps none
        C               tokens per chunk, a power of two up to 128
        lanes, width    lanes per wave, and per bundle (at most 4)

    Returns:
        o               [N, T, HV, V] in v's dtype
        final_state     [N, HV, K, V] float32
        states          [N, (chunks - 1) // every, K, HV, V] float32, only if there are any

    Notes:
        A chunk's inverse is a chain of steps, each too short for the engine that runs it. So stages of seven
        chunks are issued in turn (`list_stages`): most of them need no state, and run up to six turns ahead.
        A bundle's tiles are in its stream, a dict: bundle, chunks (dicts), S, and spaces for the inverse.

    Pseudocode, without that overlap:
        for wave in waves:
            S = initial_state
            for chunk in chunks:
                D, L, P = LOAD .. COLUMNS
                T = (I + L)^-1 by SPREAD .. MERGE;  PT = P T;  W = T^T diag(lambda) K
                R = RESIDUAL(chunk, S)
                o[chunk] = OUTPUT(chunk, S, PT, R)
                S = STATE(S, W, R)
            final_state = S
    """
    N, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    parts = split_evenly(K)
    chunks = (T + C - 1) // C
    inputs = (q, k, v, g, beta)
    o = nl.ndarray((N, T, HV, V), dtype=v.dtype, buffer=nl.shared_hbm)
    final_state = nl.ndarray((N, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    states = final_state
    kept = (chunks - 1) // every if every > 0 else 0
    if kept > 0:
        states = nl.ndarray((N, kept, K, HV, V), dtype=nl.float32, buffer=nl.shared_hbm)
    largest = min(C, pad_to_rows(T))
    call = {
        "inputs": inputs, "constants": build_constants(largest, q.dtype),
        "blocks": build_block_constants(largest), "parts": parts, "scale": scale, "l2norm": l2norm,
        "every": every, "C": C, "o": o, "states": states,
    }  # fmt: skip
    stages = list_stages()
    for wave in list_waves(N, H, HV, width, lanes):
        groups = [[], [], []]  # streams: EVEN, ODD, ALL
        for b in range(len(wave)):
            stream = {
                "bundle": wave[b], "chunks": [], "S": load_state(initial_state, wave[b], parts, V, has_state),
                "spaces": allocate_workspace(largest, wave[b]["lanes"]),
            }  # fmt: skip
            groups[b % 2].append(stream)
            groups[ALL].append(stream)
        for turn in range(chunks + AHEAD):
            for i in range(len(stages)):
                stage, group, ahead = stages[i]
                index = turn - AHEAD + ahead
                if index >= 0 and index < chunks and len(groups[group]) > 0:
                    run_stage(stage, groups[group], index, call)
        for stream in groups[ALL]:
            store_state(final_state, stream["S"], stream["bundle"], parts)
    if kept > 0:
        return o, final_state, states
    return o, final_state


def example(
    B=1, T=256, H=2, K=64, V=128, HV=0, dtype="float32", every=2, C=128, lanes=8, width=4
):  # fmt: skip
    """Returns the kernel and arguments as in training: no initial state, l2norm; every=0: as in inference."""
    q, k, v, g, beta, _ = rule_inputs(B, T, H, HV or H, K, V, dtype)
    return gated_delta_rule_fwd, (q, k, v, g, beta, beta, K**-0.5, True, False, every, C, lanes, width)


def between(arguments, outputs):
    """Returns the kept states, which are no output of the operation."""
    return outputs[2:]
