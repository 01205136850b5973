"""Computes the gated delta rule forward: chunk by chunk, several heads side by side.

    S <- exp(g_t) S    u = beta_t (v_t - S^T k_t)    S <- S + k_t u^T    o_t = scale S^T q_t

Source: arXiv:2412.06464. Value head j reads query and key of head j // (HV / H). `nki_kernels.chunk` has the
equations of a chunk, the letters, and the tiles in a chunk's dict.
"""

from delta_trn.nki_kernels.chunk import (
    compute_residual,
    decay_and_add,
    multiply_lanes,
    multiply_lanes_at_once,
    multiply_parts,
    prepare_chunk,
    scale_heads,
    store_lanes,
)
from delta_trn.nki_kernels.examples import rule_inputs
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import list_waves, pad_to_rows, split_evenly
from delta_trn.nki_kernels.tiles import build_constants, copy_scaled, psum, sbuf, take_corners, transpose
from delta_trn.nki_kernels.triangular import (
    allocate_workspace,
    build_pair_masks,
    count_levels,
    merge,
    start_inverses,
)

# The stages of a chunk that run between the levels of another one's inverse.
PREPARE = 0  # what needs no state: D, L, P
RESIDUAL = 1  # R, and the state to HBM where it is to be kept
OUTPUT = 2  # O
STATE = 3  # the next state


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


def compute_output(chunk, S, dtype):
    """Computes O = scale diag(gamma) Q S + (P T) R, [rows, lanes, V]: one sum in PSUM per lane."""
    R_sb = chunk["R"]
    rows, lanes, V = R_sb.shape
    out_sb = sbuf((rows, lanes, V), dtype)
    for lane in range(lanes):
        O_ps = psum((rows, V))
        multiply_parts(O_ps, chunk["scale_gamma_q_t"], S, lane, lane)
        nisa.nc_matmul(dst=O_ps, stationary=chunk["PT_t"][:, lane, :], moving=R_sb[:, lane, :])
        copy_scaled(out_sb[:, lane, :], O_ps)
    return out_sb


def prepare_forward(inputs, bundle, index, C, parts, scale, l2norm, constants):
    """Runs PREPARE for chunk number `index`: `prepare_chunk`, and `scale_gamma_q_t`, a tile per part of K."""
    start = index * C
    tokens = min(C, inputs[0].shape[1] - start)
    table = take_corners(constants, pad_to_rows(tokens))
    chunk = prepare_chunk(inputs, bundle, start, tokens, parts, scale, l2norm, table)
    chunk["index"] = index
    scale_gamma_q_sb = scale_heads(chunk["qk"], 0, chunk["scale_gamma"], bundle)
    chunk["scale_gamma_q_t"] = transpose(scale_gamma_q_sb, parts, table["identity"])
    return chunk


def run_stage(stage, chunk, S, bundle, parts, states, every, o):
    """Runs RESIDUAL, OUTPUT or STATE of a chunk that meets the state S; returns the state of the bundle."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    if stage == RESIDUAL:
        if every > 0 and chunk["index"] > 0 and chunk["index"] % max(every, 1) == 0:
            stretch = chunk["index"] // every - 1
            for part in range(len(parts)):
                low, high = parts[part]
                nisa.dma_copy(dst=states[n, stretch, low:high, first : first + lanes, :], src=S[part])
        chunk["R"] = compute_residual(chunk, S, bundle)
    if stage == OUTPUT:
        store_lanes(o, compute_output(chunk, S, o.dtype), bundle, chunk["start"], chunk["tokens"])
    if stage == STATE:
        return decay_and_add(S, chunk["carry"], [(chunk["W"], chunk["R"])], parts)
    return S


def list_work(bundles, inverted, coming):
    """Lists (stage, bundle) in the order in which they are issued.

    The stages that await a state are those of the chunk that is inverted, PREPARE is that of the coming one,
    if there are such chunks.
    """
    work = []
    if inverted:
        for b in range(bundles):
            work.append((RESIDUAL, b))
    if coming:
        for b in range(bundles):
            work.append((PREPARE, b))
    if inverted:
        for b in range(bundles):
            work.append((OUTPUT, b))
            work.append((STATE, b))
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
        A chunk's inverse is a chain of log2(C) merges that leaves the Tensor engine waiting. So work of two
        other chunks is spread over its levels: what the chunk before still has to do with its state, and the
        next chunk's PREPARE, which depends on no state.

    Pseudocode, without that overlap:
        for wave in waves:
            S = initial_state
            for chunk in chunks:
                D, L, P = PREPARE(chunk)
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
    constants = build_constants(largest)
    masks = build_pair_masks(largest)
    for wave in list_waves(N, H, HV, width, lanes):
        count = len(wave)
        S = []
        spaces = []
        coming = []
        for bundle in wave:
            S.append(load_state(initial_state, bundle, parts, V, has_state))
            spaces.append(allocate_workspace(largest, bundle["lanes"]))
            coming.append(prepare_forward(inputs, bundle, 0, C, parts, scale, l2norm, constants))
        inverted = []
        for index in range(chunks + 1):  # a turn more: the last chunk's stages that await its state
            current = coming
            coming = []
            work = list_work(count, index > 0, index + 1 < chunks)
            levels = 1
            minus_L_ts = []
            inverses = []
            if index < chunks:
                rows = pad_to_rows(current[0]["tokens"])
                for chunk in current:
                    minus_L_ts.append(chunk["minus_L_t"])
                levels = count_levels(rows)
                inverses = start_inverses(minus_L_ts, take_corners(constants, rows))
            per_level = (len(work) + levels - 1) // levels
            for level in range(levels):
                if index < chunks:
                    merge(inverses, spaces, masks, level, False)
                for i in range(level * per_level, min(len(work), (level + 1) * per_level)):
                    stage, b = work[i]
                    if stage == PREPARE:
                        coming.append(
                            prepare_forward(inputs, wave[b], index + 1, C, parts, scale, l2norm, constants)
                        )
                    else:
                        S[b] = run_stage(stage, inverted[b], S[b], wave[b], parts, states, every, o)
            inverted = current
            for b in range(len(current)):
                T_sb = inverses[b]["T"]
                current[b]["PT_t"] = multiply_lanes_at_once(T_sb, current[b]["P_t"], 0, T_sb.shape[2])
                current[b]["W"] = multiply_lanes(T_sb, current[b]["lambda_k"])
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
