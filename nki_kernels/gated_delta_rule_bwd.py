"""Computes the gradients of the gated delta rule: from the states that forward kept, last chunk
first.

`nki_kernels.chunk` and `nki_kernels.chunk_gradients` have the equations, the letters, and the tiles
in a chunk's dict. Forward kept the state every `every` chunks. Between two kept states lies a
stretch of chunks. A stretch is solved again from its start, and its matrices stay on chip until the
gradients, going backward, have used them. The first stretch starts from the call's own initial
state, or 0.
"""

from delta_trn.nki_kernels.chunk import (
    build_diagonals,
    compute_gates,
    compute_residual,
    decay_and_add,
    invert_key_squares,
    load_chunk,
    load_lanes,
    multiply_keys,
    multiply_lanes_at_once,
    round_state,
    round_tile,
    scale_heads,
    scale_lanes,
    spread_decays,
    store_lanes,
    sum_decays,
    sum_key_squares,
    transpose_keys,
)
from delta_trn.nki_kernels.chunk_gradients import (
    LEAST_STRENGTH,
    compute_key_gradients,
    compute_pair_gradients,
    compute_residual_gradient,
    compute_sums,
    compute_writes,
    divide_norms,
    finish_key_gradients,
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
from delta_trn.nki_kernels.chunk_tiles import Stream
from delta_trn.nki_kernels.gated_delta_rule_fwd import load_state, store_state, take_table
from delta_trn.nki_kernels.kimi_delta_attention.chunk import build_levels, prepare_channels
from delta_trn.nki_kernels.kimi_delta_attention.chunk_gradients import differentiate_channels
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.orders import ORDERS
from delta_trn.nki_kernels.plan import (
    PARTITIONS,
    count_slots,
    list_waves,
    pad_to_rows,
    split_evenly,
)
from delta_trn.nki_kernels.schedule import Stage, list_steps, list_work, rank
from delta_trn.nki_kernels.tiles import (
    add_product,
    build_constants,
    copy_scaled,
    multiply_elements,
    normals,
    psum,
    rule_inputs,
    sbuf,
    transpose,
)
from delta_trn.nki_kernels.triangular import (
    INVERSE,
    INVERTING,
    allocate_workspace,
    build_block_constants,
    invert_chunks,
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


STAGES = (
    # of a stretch, of all its chunks at once
    Stage("load", makes=("qk", "v", "g", "beta", "do", "kept")),
    Stage("square keys", needs=("qk",), makes=("squares",)),
    Stage("invert norms", needs=("squares", "beta"), makes=("raw norms", "raised beta")),
    Stage("sum decays", needs=("g", "qk"), makes=("factors",)),
    Stage("choose factors", needs=("raw norms",), makes=("shortening", "inverse_norms")),
    Stage("shorten keys", needs=("qk", "shortening"), makes=("short qk",)),
    Stage(
        "gates",
        needs=("v", "do", "g", "factors", "raised beta", "inverse_norms", "short qk"),
        makes=("gates", "lambda_k", "beta_v", "scaled do"),
    ),
    Stage("transpose keys", needs=("short qk", "gates"), makes=("k_t", "q_t", "D_t")),
    Stage("L, P", needs=("k_t", "q_t", "D_t"), makes=("minus_L_t", "P_t", "block_columns")),
    *INVERTING,
    # of a chunk, the first one first
    Stage("apply T", needs=("T", "P_t", "gates"), makes=("applied",)),
    Stage("R", needs=("kept", "k_t", "beta_v"), before=("S",), makes=("R",)),
    Stage("U", follows=("applied", "R"), makes=("U", "S")),
    # of a chunk, the last one first
    Stage("dR", needs=("applied", "U", "scaled do"), before=("dS",), makes=("dR",)),
    Stage("dS", follows=("dR",), makes=("dS",)),
    Stage("transpose gradients", needs=("U",), follows=("dR",), makes=("transposes",)),
    Stage("transpose states", needs=("R",), follows=("dR",), makes=("transposed states",)),
    Stage("dP, dL", follows=("transposes",), makes=("E_t", "terms of F")),
    Stage("transpose pairs", follows=("E_t",), makes=("E",)),
    Stage("read states", follows=("transposes", "transposed states"), makes=("read", "dots")),
    Stage("dq, dk", follows=("E", "read"), makes=("raw dqk",)),
    Stage("sum crossing pairs", follows=("terms of F",), makes=("crossing", "read_sums")),
    Stage("sum along keys", follows=("raw dqk", "dots", "read_sums"), makes=("along",)),
    Stage("differentiate norms", follows=("along",), makes=("dqk",)),
    Stage("store", follows=("dqk",)),
    Stage("multiply terms", needs=("R",), follows=("dots", "dR"), makes=("terms",)),
    Stage("sum terms", follows=("terms",), makes=("sums",)),
    Stage("dbeta", follows=("sums",), makes=("scaled sums",)),
    Stage("dg", follows=("scaled sums", "crossing")),
)  # fmt: skip
ORDER = rank("gated_delta_rule_bwd", STAGES, ORDERS["RULE_BACKWARD"])
MOST_EVERY = 2  # chunks of a stretch: "R" and "U" of one come before those of the next
FORWARD = ("apply T", "R", "U")  # of a chunk, and of its stretch the first one first


def invert_beta(chunk):
    """Raises beta [rows, lanes] to LEAST_STRENGTH at least; adds 1 / beta, and `share`, beta over
    that.

    So U / beta is known where a token writes nothing. What `share` multiplies is of the beta that
    was given: all but dbeta.
    """
    beta_sb = chunk.beta
    chunk.inverse_beta, chunk.share = sbuf(beta_sb.shape), sbuf(beta_sb.shape)
    nisa.tensor_scalar(
        dst=chunk.share, data=beta_sb, op0=nl.multiply, operand0=1 / LEAST_STRENGTH, op1=nl.minimum,
        operand1=1.0,
    )  # fmt: skip
    nisa.tensor_scalar(dst=beta_sb, data=beta_sb, op0=nl.maximum, operand0=LEAST_STRENGTH)
    nisa.reciprocal(dst=chunk.inverse_beta, data=beta_sb)


def load_again(inputs, do, bundle, start, stop, table):
    """Loads what the gradients take of tokens start .. stop, but the state; returns a `Chunk`."""
    chunk = load_chunk(inputs, bundle, start, stop - start, table)
    chunk.do = load_lanes(do, bundle, start, stop - start, table["rows"], table["products"])
    return chunk


def scale_again(chunk, scales, bundle, scale):
    """Adds gates, what they scale, and what waits for products. scales:
    what else multiplies dO, or ().
    """
    table = chunk.table
    compute_gates(chunk, bundle, scale)
    chunk.spread = spread_decays(chunk.g, table)
    chunk.diagonals = build_diagonals(chunk.minus_strength, table)
    chunk.lambda_k = scale_heads(chunk.qk, 1, chunk.lambda_, bundle, nl.float32)
    chunk.beta_v = scale_lanes(chunk.v, chunk.value_scale)
    chunk.dv_scale = multiply_elements(chunk.value_scale, chunk.share)
    columns = chunk.read_scale
    if len(scales) > 0:
        columns = multiply_elements(columns, scales[0])
    chunk.do = scale_lanes(chunk.do, columns, table["products"])


def list_runs(chunks):
    """Lists the chunks that are inverted at once: (first, stop).
    A shorter last one is inverted alone.
    """
    last = len(chunks) - 1
    if chunks[0].table["rows"] != chunks[last].table["rows"]:
        return [(0, last), (last, last + 1)]
    return [(0, last + 1)]


def apply_inverse(chunk, bundle, parts, goes_on):
    """Adds what T and gates per token make, W only where another chunk of the stretch follows."""
    table = chunk.table
    products, T_sb = table["products"], chunk.T
    if products == nl.float32:
        chunk.P = transpose(chunk.P_t, [(0, table["rows"])], table)[0]
    else:
        chunk.W_t = transpose_writes(T_sb, chunk, parts, products)
        chunk.PT = multiply_lanes_at_once(chunk.P_t, T_sb, 0, T_sb.shape[0], products)
    chunk.T_t_rounded = round_tile(chunk.T_t, products)
    if goes_on:
        chunk.W = sbuf(chunk.lambda_k.shape)
        for lane in range(T_sb.shape[1]):
            W_ps = psum((T_sb.shape[0], chunk.W.shape[2]))
            add_product(W_ps, T_sb[:, lane, :], chunk.lambda_k[:, lane, :])
            copy_scaled(chunk.W[:, lane, :], W_ps, chunk.share[:, lane : lane + 1])
    if len(chunk.gamma.shape) == 2:
        chunk.gamma_q = scale_heads(chunk.qk, 0, chunk.gamma, bundle, products)
        chunk.erased_k = scale_heads(chunk.qk, 1, chunk.minus_strength_gamma, bundle, products)


def solve_residual(chunk, S, bundle):
    """Computes R from the state S."""
    chunk.S = S
    chunk.S_rounded = round_state(S, chunk.table["products"])
    chunk.R = compute_residual(chunk, chunk.S_rounded, bundle)


def differentiate_residual(chunk, dS, bundle):
    """Computes dR from the gradient dS of the state that a chunk leaves; rounds both.

    The rounded dR is multiplied by `share`: it is 0 where beta is 0, and so is all that is made of
    it.
    """
    products = chunk.table["products"]
    chunk.dS = dS
    chunk.dS_rounded = round_state(dS, products)
    chunk.dR = compute_residual_gradient(chunk, chunk.dS_rounded, bundle)
    chunk.dR_rounded = scale_lanes(chunk.dR, chunk.share, products)


def differentiate_state(chunk, parts):
    """Returns the gradient of the state that a chunk meets."""
    pairs = [(chunk.gamma_q, chunk.do), (chunk.erased_k, chunk.dR_rounded)]
    return decay_and_add(chunk.dS, chunk.carry, pairs, parts)


def prepare_again(stage, chunk, stream, call):
    """Runs a stage of a chunk that needs neither T nor a state."""
    table, l2norm = chunk.table, call["l2norm"]
    if stage == "square keys":
        if l2norm:
            chunk.squares = sum_key_squares(chunk.qk, table)
    elif stage == "invert norms":
        if l2norm:
            chunk.inverse_norms = invert_key_squares(chunk.squares, table)
        invert_beta(chunk)
    elif stage == "sum decays":
        chunk.factors, chunk.carry_factors = sum_decays(chunk.g, chunk.qk.shape[3], table)
    elif stage == "choose factors":
        chunk.shortening = divide_norms(chunk.inverse_norms)
    elif stage == "shorten keys":
        shorten_vectors(chunk.qk, chunk.shortening)
    elif stage == "transpose keys":
        transpose_keys(chunk, call["parts"], table)
    elif stage == "L, P":
        multiply_keys(chunk, stream.bundle, call["blocks"], table)


def differentiate_chunk(stage, chunk, stream, call):
    """Runs a stage of a chunk's gradients."""
    bundle, parts, value_parts = stream.bundle, call["parts"], call["value_parts"]
    table, gradients = chunk.table, call["gradients"]
    if stage == "dR":
        differentiate_residual(chunk, stream.dS, bundle)
    elif stage == "dS":
        stream.dS = differentiate_state(chunk, parts)
    elif stage == "transpose gradients":
        transpose_gradients(chunk, value_parts, table)
    elif stage == "transpose states":
        transpose_states(chunk, parts, value_parts, table)
    elif stage == "dP, dL":
        compute_pair_gradients(chunk, bundle, table)
    elif stage == "transpose pairs":
        transpose_pair_gradients(chunk, table)
    elif stage == "read states":
        read_states(chunk, bundle, table)
    elif stage == "dq, dk":
        compute_key_gradients(chunk, bundle, table, call["in_psum"])
    elif stage == "sum crossing pairs":
        chunk.crossing = sum_crossing_pairs(chunk, table)
    elif stage == "sum along keys":
        if call["l2norm"]:
            sum_along(chunk, bundle)
    elif stage == "differentiate norms":
        finish_key_gradients(chunk, call["l2norm"])
    elif stage == "store":
        store_key_gradients(chunk, bundle, gradients)
    elif stage == "multiply terms":
        multiply_terms(chunk, bundle, parts, table)
    elif stage == "sum terms":
        compute_sums(chunk, call["sums_on_vector"])
    elif stage == "dbeta":
        scale_sums(chunk)
        store_lanes(gradients[4], chunk.dbeta, bundle, chunk.start, chunk.tokens)
    elif stage == "dg":
        dg_sb = sum_decay_gradient(chunk, bundle, parts, table)
        store_lanes(gradients[3], dg_sb, bundle, chunk.start, chunk.tokens)


def load_stretch(stream, stretch, call):
    """Loads the chunks of a stretch, and the state before it."""
    C, T, every = call["C"], call["T"], call["every"]
    for start in range(stretch * every * C, min((stretch + 1) * every * C, T), C):
        stop = min(start + C, T)
        table = take_table(call, stop - start)
        chunk = load_again(call["inputs"], call["do"], stream.bundle, start, stop, table)
        stream.chunks[stretch].append(chunk)
    stream.S[stretch] = load_kept_state(
        call["initial_state"], call["states"], stretch, stream.bundle, call["parts"], call["V"],
        call["has_state"],
    )  # fmt: skip


def run_stage(stage, share, shares, stream, stretch, call):
    """Runs a share of a stage of a stretch of a bundle."""
    if stage == "load":
        load_stretch(stream, stretch, call)
        return
    chunks, count = stream.chunks[stretch], len(stream.chunks[stretch])
    if stage in INVERSE:
        for run in list_runs(chunks):
            first, stop = run
            invert_chunks(
                stage,
                share,
                shares,
                chunks[first:stop],
                stream.spaces[first:stop],
                True,
                call["blocks"],
            )
        return
    first, stop = list_steps(count, share, shares)
    for step in range(first, stop):
        index = step if stage in FORWARD or shares == 1 else count - 1 - step
        chunk, goes_on = chunks[index], index + 1 < count
        if stage == "gates":
            scale_again(chunk, (), stream.bundle, call["scale"])
        elif stage == "apply T":
            apply_inverse(chunk, stream.bundle, call["parts"], goes_on)
        elif stage == "R":
            solve_residual(chunk, stream.S[stretch], stream.bundle)
        elif stage == "U":
            if goes_on:
                stream.S[stretch] = decay_and_add(
                    chunk.S, chunk.carry, [(chunk.W, chunk.R)], call["parts"]
                )
            compute_writes(chunk, call["constants"])
        else:
            if stage == "strengths":
                invert_beta(chunk)
            if call["channels"]:
                prepare_channels(stage, chunk, stream.bundle, call)
                differentiate_channels(stage, chunk, stream, call)
            else:
                prepare_again(stage, chunk, stream, call)
            differentiate_chunk(stage, chunk, stream, call)


@nki.jit
def gated_delta_rule_bwd(
    q,
    k,
    v,
    g,
    beta,
    do,
    dstate,
    initial_state,
    states,
    scale,
    l2norm,
    has_dstate,
    has_state,
    every,
    C,
    lanes,
    width,
):
    """Computes the gradients of `gated_delta_rule_fwd`, with the same C and every.

    Args:
        q, k, v, g, beta    as in forward
        do                  like v
        dstate              of the final state [N, HV, K, V] float32, read if `has_dstate`; else any
                            tensor
        initial_state       like dstate, read if `has_state`; else any tensor
        states              as forward returned them; any tensor if it returned none
        every               1 or 2; the other options as in forward

    Returns:
        dq, dk              [N, T, slots, K]: one head per key head in q's dtype or, where a group
                            of value heads is larger than `width`, float32 parts whose consecutive
                            slots / H sum to it
        dv, dg, dbeta       [N, T, HV, ...] like v, g, beta
        dinitial_state      [N, HV, K, V] float32

    Notes:
        A turn issues stages of three stretches, in the order RULE_BACKWARD of orders.json.

    Pseudocode, stretch by stretch:
        dS = dstate
        for stretch, from the last:
            S = the state kept before it
            of all chunks at once: load, the stages up to "L, P", T = (I + L)^-1
            for chunk in stretch:
                W, P T = "apply T"
                R = diag(beta) (V - diag(gamma) K S);  U = T R
                S = gamma_C S + W^T R
            for chunk in stretch, from the last:
                dR = (P T)^T dO + W dS
                the gradients of q, k, v, g and beta, of S, dS, U, dO and dR
                dS = the gradient of the state that the chunk meets
        dinitial_state = dS
    """
    options = (scale, l2norm, has_dstate, has_state, every, C, lanes, width)
    work = list_work(ORDER, (q.shape[1] + C * every - 1) // (C * every))
    return run_backward((q, k, v, g, beta), do, dstate, initial_state, states, options, work, False)


def run_backward(inputs, do, dstate, initial_state, states, options, work, channels):
    """Allocates outputs and runs what `list_work` returns;
    channels says whether decays are per channel.
    """
    scale, l2norm, has_dstate, has_state, every, C, lanes, width = options
    q, v, g, beta = inputs[0], inputs[2], inputs[3], inputs[4]
    N, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    assert every <= MOST_EVERY, (
        f"every={every} exceeds the {MOST_EVERY} chunks of a stretch that the order has shares for"
    )
    parts = split_evenly(K)
    chunks = (T + C - 1) // C
    heads = count_slots(H, HV, width)
    key_dtype = q.dtype if heads == H else nl.float32
    dq = nl.ndarray((N, T, heads, K), dtype=key_dtype, buffer=nl.shared_hbm)
    dk = nl.ndarray((N, T, heads, K), dtype=key_dtype, buffer=nl.shared_hbm)
    dv = nl.ndarray((N, T, HV, V), dtype=v.dtype, buffer=nl.shared_hbm)
    dg = nl.ndarray(g.shape if channels else (N, T, HV), dtype=g.dtype, buffer=nl.shared_hbm)
    dbeta = nl.ndarray((N, T, HV), dtype=beta.dtype, buffer=nl.shared_hbm)
    dinitial_state = nl.ndarray((N, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    largest = min(C, pad_to_rows(T))
    call = {
        "inputs": inputs,
        "do": do,
        "initial_state": initial_state,
        "has_state": has_state,
        "states": states,
        "scale": scale,
        "l2norm": l2norm,
        "every": every,
        "C": C,
        "T": T,
        "V": V,
        "parts": parts,
        "value_parts": split_evenly(V),
        "in_psum": K <= PARTITIONS,  # of larger ones several chunks do not fit
        "sums_on_vector": True,
        "gradients": (dq, dk, dv, dg, dbeta),
        "constants": build_gradient_constants(largest, q.dtype),
        "blocks": build_block_constants(largest),
        "channels": channels,
        "both": True,
    }
    if channels:
        call["levels"] = build_levels(call["constants"], True)
    stretches = (chunks + every - 1) // every
    for wave in list_waves(N, H, HV, width, lanes):
        streams = []
        for bundle in wave:
            stream = Stream(bundle=bundle, chunks=[], S=[], spaces=[])
            stream.dS = load_state(dstate, bundle, parts, V, has_dstate)
            for _ in range(min(every, chunks)):
                stream.spaces.append(allocate_workspace(largest, bundle["lanes"]))
            for _ in range(stretches):
                stream.chunks.append([])
                stream.S.append([])
            streams.append(stream)
        for entry in work:
            stage, bundles, back, share, shares = entry
            for b in range(bundles, len(wave), 2):
                run_stage(stage, share, shares, streams[b], stretches - 1 - back, call)
        for stream in streams:
            store_state(dinitial_state, stream.dS, stream.bundle, parts)
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
