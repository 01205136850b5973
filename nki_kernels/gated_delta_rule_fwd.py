"""Computes the gated delta rule forward: chunk by chunk, several heads side by side.

    S <- exp(g_t) S    u = beta_t (v_t - S^T k_t)    S <- S + k_t u^T    o_t = scale S^T q_t

Source: arXiv:2412.06464. Value head j reads query and key of head j // (HV / H). `nki_kernels.chunk` has the
equations of a chunk, the letters, and the tiles in a chunk's dict.
"""

from delta_trn.nki_kernels.chunk import (
    compute_residual,
    decay_and_add,
    load_chunk,
    multiply_keys,
    multiply_lanes,
    multiply_lanes_at_once,
    multiply_parts,
    round_state,
    round_tile,
    scale_chunk,
    scale_heads,
    store_lanes,
    transpose_keys,
)
from delta_trn.nki_kernels.examples import rule_inputs
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import list_waves, pad_to_rows, split_evenly
from delta_trn.nki_kernels.tiles import build_constants, copy_scaled, psum, sbuf, take_corners, transpose
from delta_trn.nki_kernels.triangular import (
    allocate_workspace,
    build_block_constants,
    count_levels,
    merge,
    solve_blocks,
    spread_blocks,
)

# The stages of a chunk that run between the levels of another one's inverse.
LOAD = 0  # inputs, norms, sums of decays
SCALE = 1  # gates, and what they scale
TRANSPOSE = 2  # of q and k, and D
MULTIPLY = 3  # the rest of what needs no state: L, P
RESIDUAL = 4  # R, and the state to HBM where it is to be kept
APPLY = 5  # W and P T, once T is known
OUTPUT = 6  # O
STATE = 7  # the next state


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


def load_forward(inputs, bundle, index, C, l2norm, constants):
    """Runs LOAD for chunk number `index`."""
    start = index * C
    tokens = min(C, inputs[0].shape[1] - start)
    table = take_corners(constants, pad_to_rows(tokens))
    loaded = load_chunk(inputs, bundle, start, tokens, l2norm, table)
    loaded["index"] = index
    return loaded


def scale_forward(loaded, bundle, scale, constants):
    """Runs SCALE of what `load_forward` returns: `scale_chunk`, and `gamma_q`, diag(gamma) Q."""
    table = take_corners(constants, pad_to_rows(loaded["tokens"]))
    chunk = scale_chunk(loaded, bundle, scale, table)
    chunk["index"] = loaded["index"]
    chunk["gamma_q"] = scale_heads(chunk["qk"], 0, chunk["gamma"], bundle, table["products"])
    return chunk


def transpose_forward(chunk, parts, constants):
    """Runs TRANSPOSE of a chunk: `transpose_keys`, and `gamma_q_t`, a tile per part of K."""
    table = take_corners(constants, pad_to_rows(chunk["tokens"]))
    transpose_keys(chunk, parts, table)
    chunk["gamma_q_t"] = transpose(chunk["gamma_q"], parts, table)


def multiply_forward(chunk, bundle, blocks, constants):
    """Runs MULTIPLY of a chunk."""
    multiply_keys(chunk, bundle, blocks, take_corners(constants, pad_to_rows(chunk["tokens"])))


def keep_state(S, chunk, bundle, parts, states, every):
    """Stores the state before a chunk to HBM where it is to be kept."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    if every > 0 and chunk["index"] > 0 and chunk["index"] % max(every, 1) == 0:
        stretch = chunk["index"] // every - 1
        for part in range(len(parts)):
            low, high = parts[part]
            nisa.dma_copy(dst=states[n, stretch, low:high, first : first + lanes, :], src=S[part])


def solve_residual(chunk, S, bundle):
    """Runs RESIDUAL of a chunk that meets the state S: adds R, and S and R rounded."""
    products = chunk["k_t"][0].dtype
    chunk["S_rounded"] = round_state(S, products)
    chunk["R"] = compute_residual(chunk, chunk["S_rounded"], bundle)
    chunk["R_rounded"] = round_tile(chunk["R"], products)


def list_tiles(chunks, name):
    """Lists one tile of each bundle's chunk."""
    tiles = []
    for chunk in chunks:
        tiles.append(chunk[name])
    return tiles


def list_work(bundles, steps, index, chunks):
    """Lists (stage, bundle) in the order in which they are issued, a list per step of the inverse of a chunk.

    index is that chunk's number. TRANSPOSE and MULTIPLY are those of the next chunk, LOAD and SCALE of the
    one behind. APPLY, OUTPUT and STATE are those of the chunk before, so RESIDUAL can be that of the chunk
    itself.
    """
    work = []
    for _ in range(steps):
        work.append([])
    last = steps - 1
    for b in range(bundles):
        if index + 1 < chunks:
            work[0].append((TRANSPOSE, b))
        if index + 2 < chunks:
            work[min(1, last)].append((LOAD, b))
    for b in range(bundles):
        if index > 0:
            work[0].append((APPLY, b))
    for b in range(bundles):
        if index + 1 < chunks:
            work[0].append((MULTIPLY, b))
    for b in range(bundles):
        step = min(1 + b, last)
        if index > 0:
            work[step].append((OUTPUT, b))
            work[step].append((STATE, b))
        if index < chunks:
            work[min(2 + b, last)].append((RESIDUAL, b))
    for b in range(bundles):
        if index + 2 < chunks:
            work[last].append((SCALE, b))
    return work


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
        A chunk's inverse is a chain of steps that leaves the Tensor engine waiting. So work of two other
        chunks is spread over them: what the chunk before still has to do with its state, and what the
        next ones can do without a state.

    Pseudocode, without that overlap:
        for wave in waves:
            S = initial_state
            for chunk in chunks:
                LOAD(chunk);  SCALE(chunk);  D = TRANSPOSE(chunk);  L, P = MULTIPLY(chunk)
                T = (I + L)^-1;  PT = P T;  W = T^T diag(lambda) K
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
    constants = build_constants(largest, q.dtype)
    blocks = build_block_constants(largest)
    for wave in list_waves(N, H, HV, width, lanes):
        count = len(wave)
        S = []
        spaces = []
        for bundle in wave:
            S.append(load_state(initial_state, bundle, parts, V, has_state))
            spaces.append(allocate_workspace(largest, bundle["lanes"]))
        prepared = []  # chunks 0 and 1
        for index in range(min(2, chunks)):
            prepared.append([])
            for bundle in wave:
                prepared[index].append(load_forward(inputs, bundle, index, C, l2norm, constants))
            for b in range(count):
                prepared[index][b] = scale_forward(prepared[index][b], wave[b], scale, constants)
        for b in range(count):
            transpose_forward(prepared[0][b], parts, constants)
            multiply_forward(prepared[0][b], wave[b], blocks, constants)
        current = prepared[0]
        coming = prepared[1] if chunks > 1 else []
        columns = spread_blocks(list_tiles(current, "block_columns"), blocks)
        inverted = []
        for index in range(chunks + 1):  # a turn more: the last chunk's stages that await its state
            behind = []
            inverses = []
            steps = 1
            table = constants
            if index < chunks:
                table = take_corners(constants, pad_to_rows(current[0]["tokens"]))
                steps = 1 + count_levels(table["rows"])
            work = list_work(count, steps, index, chunks)
            for step in range(steps):
                if index < chunks:
                    if step == 0:
                        inverses = solve_blocks(list_tiles(current, "minus_L_t"), columns, blocks, table)
                    else:
                        merge(inverses, spaces, blocks, step - 1, table, False)
                for i in range(len(work[step])):
                    stage, b = work[step][i]
                    if stage == LOAD:
                        behind.append(load_forward(inputs, wave[b], index + 2, C, l2norm, constants))
                    elif stage == SCALE:
                        behind[b] = scale_forward(behind[b], wave[b], scale, constants)
                    elif stage == TRANSPOSE:
                        transpose_forward(coming[b], parts, constants)
                    elif stage == MULTIPLY:
                        multiply_forward(coming[b], wave[b], blocks, constants)
                    elif stage == RESIDUAL:
                        keep_state(S[b], current[b], wave[b], parts, states, every)
                        solve_residual(current[b], S[b], wave[b])
                    elif stage == APPLY:
                        chunk = inverted[b]
                        T_sb = chunk["T_rounded"]
                        chunk["W"] = multiply_lanes(chunk["T"], chunk["lambda_k"])
                        chunk["PT_t"] = multiply_lanes_at_once(T_sb, chunk["P_t"], 0, T_sb.shape[2], q.dtype)
                    elif stage == OUTPUT:
                        chunk = inverted[b]
                        store_lanes(
                            o, compute_output(chunk, o.dtype), wave[b], chunk["start"], chunk["tokens"]
                        )
                    else:
                        chunk = inverted[b]
                        S[b] = decay_and_add(S[b], chunk["carry"], [(chunk["W"], chunk["R"])], parts)
            if index + 1 < chunks:
                columns = spread_blocks(list_tiles(coming, "block_columns"), blocks)
            for b in range(len(inverses)):
                current[b]["T"] = inverses[b]["T"]
                current[b]["T_rounded"] = round_tile(inverses[b]["T"], q.dtype)
            inverted = current
            current = coming
            coming = behind
        for b in range(count):
            store_state(final_state, S[b], wave[b], parts)
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
