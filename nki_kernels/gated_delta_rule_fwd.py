"""Computes the gated delta rule forward: chunk by chunk, several heads side by side.

    S <- exp(g_t) S    u = beta_t (v_t - S^T k_t)    S <- S + k_t u^T    o_t = scale S^T q_t

Source: arXiv:2412.06464. Value head j reads query and key of head j // (HV / H).
`nki_kernels.chunk` has the equations of a chunk and the letters, `nki_kernels.chunk_tiles` its
tiles.
"""

from delta_trn.nki_kernels.chunk import (
    build_diagonals,
    compute_decays,
    compute_gates,
    compute_residual,
    decay_and_add,
    find_key_head,
    invert_key_squares,
    load_chunk,
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
    weigh_pairs,
    weight_decays,
)
from delta_trn.nki_kernels.chunk_tiles import Stream
from delta_trn.nki_kernels.kimi_delta_attention.chunk import build_levels, prepare_channels
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.orders import ORDERS
from delta_trn.nki_kernels.plan import list_waves, pad_to_rows, split_evenly
from delta_trn.nki_kernels.schedule import ALL, Stage, list_work, rank
from delta_trn.nki_kernels.tiles import (
    add_product,
    build_constants,
    choose_factors,
    copy_scaled,
    psum,
    rule_inputs,
    sbuf,
    take_corners,
    transpose,
)
from delta_trn.nki_kernels.triangular import (
    INVERSE,
    INVERTING,
    allocate_workspace,
    build_block_constants,
    invert_chunks,
    list_block_columns,
)

STAGES = (
    Stage("load", makes=("g", "beta", "qk", "v")),
    Stage("sum decays", needs=("g", "qk"), makes=("factors", "spread")),
    Stage("square keys", needs=("qk",), makes=("squares",)),
    Stage("invert norms", needs=("squares",), makes=("inverse_norms",)),
    Stage("gates", needs=("factors", "beta", "inverse_norms"), makes=("gates", "diagonals")),
    Stage("scale k", needs=("qk", "gates"), makes=("lambda_k",)),
    Stage("scale v", needs=("v", "gates"), makes=("beta_v",)),
    Stage("scale q", needs=("qk", "gates"), makes=("gamma_q",)),
    Stage("transpose k", needs=("qk",), makes=("k_t",)),
    Stage("transpose q", needs=("qk",), makes=("q_t",)),
    Stage("transpose scaled q", needs=("gamma_q",), makes=("gamma_q_t",)),
    Stage("D", needs=("spread",), makes=("D_t",)),
    Stage("weight D", needs=("D_t", "diagonals"), makes=("weighted_D_t",)),
    Stage("L", needs=("k_t", "weighted_D_t"), makes=("minus_L_t",)),
    Stage("P", needs=("k_t", "q_t", "D_t"), makes=("P_t",)),
    Stage("list columns", needs=("minus_L_t",), makes=("block_columns",)),
    *INVERTING,
    Stage("W", needs=("T", "lambda_k", "gates"), makes=("W",)),
    Stage("P T", needs=("T", "P_t", "gates"), makes=("PT_t",)),
    Stage("R", needs=("k_t", "beta_v"), before=("S",), makes=("R",)),
    Stage("O", needs=("gamma_q_t", "PT_t", "R"), makes=("o",)),
    Stage("S", needs=("W", "R"), before=("S",), makes=("S",)),
)
ORDER = rank("gated_delta_rule_fwd", STAGES, ORDERS["RULE_FORWARD"])


def load_state(states, bundle, parts, V, present):
    """Loads a bundle's state [N, HV, K, V], or 0 unless `present`:
    a tile [f, lanes, V] per part of K.
    """
    lanes, S = bundle["lanes"], []
    for span in parts:
        start, stop = span
        tile_sb = sbuf((stop - start, lanes, V))
        if present:
            for lane in range(lanes):
                src = view_state(states, bundle, lane, start, stop)
                nisa.dma_copy(dst=tile_sb[:, lane : lane + 1, :], src=src)
        else:
            nisa.memset(dst=tile_sb, value=0.0)
        S.append(tile_sb)
    return S


def store_state(states, S, bundle, parts):
    """Stores a bundle's state to HBM [N, HV, K, V]."""
    for part in range(len(parts)):
        start, stop = parts[part]
        for lane in range(bundle["lanes"]):
            dst = view_state(states, bundle, lane, start, stop)
            nisa.dma_copy(dst=dst, src=S[part][:, lane : lane + 1, :])


def view_state(states, bundle, lane, start, stop):
    """Views rows start .. stop of a lane's state in HBM [N, HV, K, V] as [rows, 1, V]."""
    _, HV, K, V = states.shape
    head = bundle["n"] * HV + bundle["first"] + lane
    return states.ap(pattern=[[V, stop - start], [K * V, 1], [1, V]], offset=(head * K + start) * V)


def compute_output(chunk, dtype):
    """Computes O = scale diag(gamma) Q S + (P T) R, [rows, lanes, V]: one sum in PSUM per lane."""
    rows, lanes, V = chunk.R.shape
    out_sb = sbuf((rows, lanes, V), dtype)
    for lane in range(lanes):
        O_ps = psum((rows, V))
        multiply_parts(O_ps, chunk.gamma_q_t, chunk.S_rounded, lane, lane)
        add_product(O_ps, chunk.PT_t[:, lane, :], chunk.R_rounded[:, lane, :], True)
        copy_scaled(out_sb[:, lane, :], O_ps, chunk.read_scale[:, lane : lane + 1])
    return out_sb


def take_table(call, tokens):
    """Returns the constants for a chunk of tokens;
    with a decay per channel all chunks have as many rows.
    """
    rows = call["constants"]["rows"] if call["channels"] else pad_to_rows(tokens)
    return take_corners(call["constants"], rows)


def load_forward(stream, index, call):
    """Loads chunk number `index` of a stream."""
    q = call["inputs"][0]
    start = index * call["C"]
    tokens = min(call["C"], q.shape[1] - start)
    return load_chunk(call["inputs"], stream.bundle, start, tokens, take_table(call, tokens))


def enlarge_residual(chunk, bundle):
    """Divides what R is made of, value_scale and minus_strength_gamma,
    by f of k; returns f per lane.
    """
    if len(chunk.inverse_norms) == 0:
        return ()
    rows, lanes = chunk.gamma.shape
    heads = bundle["key_heads"]
    per_head = (rows, heads, lanes // heads)
    factors_sb, growth_sb = choose_factors(chunk.inverse_norms[0][:, 1, :])
    growth = growth_sb.ap(pattern=[[heads, rows], [1, heads], [0, lanes // heads]], offset=0)
    for scale_sb in (chunk.value_scale, chunk.minus_strength_gamma):
        columns = scale_sb.reshape(per_head)
        # growth is 0, or so large a power of two that float32 rounds the 1 away: the sum is their
        # maximum
        nisa.scalar_tensor_tensor(
            dst=columns, data=growth, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=columns
        )
    factors = []
    for lane in range(lanes):
        h = find_key_head(bundle, lane)
        factors.append(factors_sb[:, h : h + 1])
    return factors


def prepare(stage, chunk, bundle, call):
    """Runs a stage that needs neither T nor the state."""
    table, parts = chunk.table, call["parts"]
    if stage == "sum decays":
        chunk.factors, chunk.carry_factors = sum_decays(chunk.g, chunk.qk.shape[3], table)
        chunk.spread = spread_decays(chunk.g, table)
    elif stage == "square keys":
        if call["l2norm"]:
            chunk.squares = sum_key_squares(chunk.qk, table)
    elif stage == "invert norms":
        if call["l2norm"]:
            chunk.inverse_norms = invert_key_squares(chunk.squares, table)
    elif stage == "gates":
        compute_gates(chunk, bundle, call["scale"])
        chunk.growth = enlarge_residual(chunk, bundle)
        chunk.diagonals = build_diagonals(chunk.minus_strength, table)
    elif stage == "scale k":
        chunk.lambda_k = scale_heads(chunk.qk, 1, chunk.lambda_, bundle, nl.float32)
    elif stage == "scale v":
        chunk.beta_v = scale_lanes(chunk.v, chunk.value_scale)
    elif stage == "scale q":
        chunk.gamma_q = scale_heads(chunk.qk, 0, chunk.gamma, bundle, table["products"])
    elif stage == "transpose k":
        chunk.k_t = transpose_side(chunk.qk, 1, parts, table)
    elif stage == "transpose q":
        chunk.q_t = transpose_side(chunk.qk, 0, parts, table)
    elif stage == "transpose scaled q":
        chunk.gamma_q_t = transpose(chunk.gamma_q, parts, table)
    elif stage == "D":
        chunk.D_t = compute_decays(chunk.spread, table)
    elif stage == "weight D":
        chunk.weighted_D_t = weight_decays(chunk.D_t, chunk.diagonals, table)
    elif stage == "L":
        pairs = multiply_pairs(chunk.k_t, chunk.k_t, bundle)
        chunk.minus_L_t = weigh_pairs(pairs, chunk.weighted_D_t)
    elif stage == "P":
        pairs = multiply_pairs(chunk.k_t, chunk.q_t, bundle)
        chunk.P_t = weigh_pairs(pairs, chunk.D_t, table["products"])
    elif stage == "list columns":
        chunk.block_columns = list_block_columns(chunk.minus_L_t, call["blocks"])


def keep_state(stream, index, call):
    """Stores the state before a chunk to HBM where it is to be kept."""
    bundle, every, parts = stream.bundle, call["every"], call["parts"]
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    if every > 0 and index > 0 and index % max(every, 1) == 0:
        kept = index // every - 1
        for part in range(len(parts)):
            low, high = parts[part]
            nisa.dma_copy(
                dst=call["states"][n, kept, low:high, first : first + lanes, :], src=stream.S[part]
            )


def advance(stage, chunk, stream, index, call):
    """Runs a stage that needs T or the state."""
    products = chunk.table["products"]
    if stage == "W":
        chunk.W = multiply_lanes(chunk.T, chunk.lambda_k, chunk.growth)
    elif stage == "P T":
        T_sb = round_tile(chunk.T, products)
        if len(chunk.growth) > 0:
            chunk.PT_t = multiply_lanes(T_sb, chunk.P_t, chunk.growth, products)
        else:
            chunk.PT_t = multiply_lanes_at_once(T_sb, chunk.P_t, 0, T_sb.shape[2], products)
    elif stage == "R":
        keep_state(stream, index, call)
        chunk.S_rounded = round_state(stream.S, products)
        chunk.R = compute_residual(chunk, chunk.S_rounded, stream.bundle)
        chunk.R_rounded = round_tile(chunk.R, products)
    elif stage == "O":
        out_sb = compute_output(chunk, call["o"].dtype)
        store_lanes(call["o"], out_sb, stream.bundle, chunk.start, chunk.tokens)
    elif stage == "S":
        stream.S = decay_and_add(stream.S, chunk.carry, [(chunk.W, chunk.R)], call["parts"])


def run_stage(stage, share, shares, streams, index, call):
    """Runs a share of a stage of chunk number `index` of each of these streams."""
    chunks, spaces = [], []
    for stream in streams:
        if stage == "load":
            stream.chunks.append(load_forward(stream, index, call))
        chunks.append(stream.chunks[index])
        spaces.append(stream.spaces)
    if stage in INVERSE:
        invert_chunks(stage, share, shares, chunks, spaces, False, call["blocks"])
        return
    for i in range(len(streams)):
        if call["channels"]:
            prepare_channels(stage, chunks[i], streams[i].bundle, call)
        else:
            prepare(stage, chunks[i], streams[i].bundle, call)
        advance(stage, chunks[i], streams[i], index, call)


@nki.jit
def gated_delta_rule_fwd(
    q, k, v, g, beta, initial_state, scale, l2norm, has_state, every, C, lanes, width
):
    """Computes the gated delta rule over whole sequences.

    Dimensions:
        N sequences, T tokens, H query and key heads, HV value heads; 1 <= K <= 256, 1 <= V <= 512

    Args:
        q, k            [N, T, H, K] float32 or bfloat16
        v               [N, T, HV, V]
        g               [N, T, HV, 2]: what `plan.split_decays` makes of the decay's logarithm, -1e4
                        to 0
        beta            [N, T, HV]
        initial_state   [N, HV, K, V] float32, read if `has_state`; else any tensor
        scale, l2norm   of q; normalize q and k by rsqrt(sum of squares + 1e-6)
        every           keep the state before each chunk whose number is a multiple of it, but chunk
                        0, whose state backward has anyway; 0 keeps none
        C               tokens per chunk, a power of two up to 128
        lanes, width    lanes per wave, and per bundle (at most 4)

    Returns:
        o               [N, T, HV, V] in v's dtype
        final_state     [N, HV, K, V] float32
        states          [N, (chunks - 1) // every, K, HV, V] float32, only if there are any

    Notes:
        A chunk's inverse is a chain of steps, each too short for the engine that runs it. So a turn
        issues stages of seven chunks, in the order RULE_FORWARD of orders.json.

    Pseudocode, chunk by chunk:
        for wave in waves:
            S = initial_state
            for chunk in chunks:
                q, k, v, g, beta = load(chunk)
                D, L, P = the stages from "sum decays" to "list columns"
                T = (I + L)^-1, by "spread columns", "substitute" and "merge"
                W = T^T diag(lambda) K;  PT = P T
                R = diag(beta) (V - diag(gamma) K S)
                o[chunk] = scale diag(gamma) Q S + PT R
                S = gamma_C S + W^T R
            final_state = S
    """
    work = list_work(ORDER, (q.shape[1] + C - 1) // C)
    options = (scale, l2norm, has_state, every, C, lanes, width)
    return run_forward((q, k, v, g, beta), initial_state, options, work, False)


def run_forward(inputs, initial_state, options, work, channels):
    """Allocates outputs and runs what `list_work` returns;
    channels says whether decays are per channel.
    """
    scale, l2norm, has_state, every, C, lanes, width = options
    q, v = inputs[0], inputs[2]
    N, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    parts = split_evenly(K)
    chunks = (T + C - 1) // C
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
        "every": every, "C": C, "o": o, "states": states, "channels": channels, "both": False,
    }  # fmt: skip
    if channels:
        call["levels"] = build_levels(call["constants"], False)
    for wave in list_waves(N, H, HV, width, lanes):
        groups = [[], [], []]  # streams: EVEN, ODD, ALL
        for b in range(len(wave)):
            stream = Stream(
                bundle=wave[b], chunks=[], spaces=allocate_workspace(largest, wave[b]["lanes"])
            )
            stream.S = load_state(initial_state, wave[b], parts, V, has_state)
            groups[b % 2].append(stream)
            groups[ALL].append(stream)
        for entry in work:
            stage, bundles, index, share, shares = entry
            if len(groups[bundles]) > 0:
                run_stage(stage, share, shares, groups[bundles], index, call)
        for stream in groups[ALL]:
            store_state(final_state, stream.S, stream.bundle, parts)
    if kept > 0:
        return o, final_state, states
    return o, final_state


def example(
    B=1, T=256, H=2, K=64, V=128, HV=0, dtype="float32", every=2, C=128, lanes=8, width=4
):  # fmt: skip
    """Returns the kernel and arguments as in training: no initial state,
    l2norm; every=0: as in inference.
    """
    q, k, v, g, beta, _ = rule_inputs(B, T, H, HV or H, K, V, dtype)
    return gated_delta_rule_fwd, (
        q,
        k,
        v,
        g,
        beta,
        beta,
        K**-0.5,
        True,
        False,
        every,
        C,
        lanes,
        width,
    )
