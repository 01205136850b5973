"""The gated delta rule forward: chunk by chunk, several heads side by side. `nki_kernels.chunk` has the
equations.

A chunk's inverse is a chain of log2(C) merges that leaves the Tensor engine waiting. Between its levels
stand what the chunk before still owes (its output and its state) and the next chunk's first products, which
do not depend on it.

    S <- exp(g_t) S    u = beta_t (v_t - S^T k_t)    S <- S + k_t u^T    o_t = scale S^T q_t

arXiv:2412.06464. Value head j reads query and key of head j // (HV / H).
"""

from delta_trn.nki_kernels.chunk import begin, combined, next_state, residual, scaled_heads, views, writing
from delta_trn.nki_kernels.examples import inputs
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.tiles import (
    chunk_rows,
    constants,
    copied,
    cut,
    psum,
    sbuf,
    spans,
    transposed,
    waves,
)
from delta_trn.nki_kernels.triangular import identities, level_count, merge, pair_masks, workspace


def first_state(states, bundle, parts, V, given):
    """S of a bundle, per part of K a tile [f, lanes, V]: from HBM [N, HV, K, V], or 0."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    S = []
    for part in parts:
        start, stop = part
        tile = sbuf((stop - start, lanes, V))
        if given:
            for lane in range(lanes):
                nisa.dma_copy(dst=tile[:, lane, :], src=states[n, first + lane, start:stop, :])
        else:
            nisa.memset(dst=tile, value=0.0)
        S.append(tile)
    return S


def store_state(states, S, bundle, parts):
    """S of a bundle to HBM [N, HV, K, V]."""
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    for part in range(len(parts)):
        start, stop = parts[part]
        for lane in range(lanes):
            nisa.dma_copy(dst=states[n, first + lane, start:stop, :], src=S[part][:, lane, :])


def output(x, S, Ht, residuals, bundle, rows, parts, dtype):
    """O = scale diag(gamma) Q S + H V': one sum in PSUM per lane."""
    lanes = bundle["lanes"]
    V = residuals.shape[2]
    out = sbuf((rows, lanes, V), dtype)
    for lane in range(lanes):
        ps = psum((rows, V))
        for part in range(len(parts)):
            nisa.nc_matmul(dst=ps, stationary=x["q_gamma_t"][part][:, lane, :], moving=S[part][:, lane, :])
        nisa.nc_matmul(dst=ps, stationary=Ht[:, lane, :], moving=residuals[:, lane, :])
        copied(out[:, lane, :], ps)
    return out


def begun(q, k, v, g, beta, bundle, start, tokens, parts, scale, l2norm, full):
    """`chunk.begin`, and scale diag(gamma) Q, transposed."""
    rows = chunk_rows(tokens)
    table = cut(full, rows)
    x = begin(q, k, v, g, beta, bundle, start, tokens, rows, parts, scale, l2norm, table)
    q_gamma = scaled_heads(x["qk"], 0, x["gamma_scale"], bundle, rows)
    x["q_gamma_t"] = transposed(views(q_gamma, bundle["lanes"]), rows, parts, table["identity"])
    return x


def finished(stage, y, S, bundle, parts, states, every, o):
    """A part of what a chunk does once its state is known; returns the state of the bundle.

    Stages in their order: 0 V', and the state to HBM if it is to be kept; 1 the output; 2 the next state.
    """
    n, first, lanes = bundle["n"], bundle["first"], bundle["lanes"]
    x, rows = y["x"], y["rows"]
    if stage == 0:
        if every > 0 and y["chunk"] > 0 and y["chunk"] % max(every, 1) == 0:
            stretch = y["chunk"] // every - 1
            for part in range(len(parts)):
                low, high = parts[part]
                nisa.dma_copy(dst=states[n, stretch, low:high, first : first + lanes, :], src=S[part])
        y["residual"] = residual(x, S, bundle, rows, parts)
    if stage == 1:
        start, tokens = y["start"], y["tokens"]
        out = output(x, S, y["Ht"], y["residual"], bundle, rows, parts, o.dtype)
        nisa.dma_copy(dst=o[n, start : start + tokens, first : first + lanes, :], src=out[0:tokens])
    if stage == 2:
        return next_state(x, S, y["W"], y["residual"], bundle, parts)
    return S


@nki.jit
def gated_delta_rule_fwd(q, k, v, g, beta, initial_state, scale, l2norm, given, every, C, lanes, width):
    """(o, final_state), or (o, final_state, states) for backward, where there are any to keep.

    q, k            [N, T, H, K] float32 or bfloat16, any T; 1 <= K <= 256
    v               [N, T, HV, V], 1 <= V <= 512; o has its shape and dtype
    g, beta         [N, T, HV]; g <= 0 float32
    initial_state   [N, HV, K, V] float32, read if `given`; else None
    scale, l2norm   of q; normalize q and k by rsqrt(sum of squares + 1e-6)
    every           0, or keep the state before every such chunk but the first, whose state backward is given:
                    states [N, (chunks - 1) // every, K, HV, V] float32
    C               tokens a chunk, a power of two up to 128
    lanes, width    value heads in turn, and of these in one instruction (at most 4)
    """
    N, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    parts = spans(K)
    chunks = (T + C - 1) // C
    o = nl.ndarray((N, T, HV, V), dtype=v.dtype, buffer=nl.shared_hbm)
    final = nl.ndarray((N, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    states = final
    kept = (chunks - 1) // every if every > 0 else 0
    if kept > 0:
        states = nl.ndarray((N, kept, K, HV, V), dtype=nl.float32, buffer=nl.shared_hbm)
    largest = min(C, chunk_rows(T))
    full = constants(largest)
    masks = pair_masks(largest)
    for wave in waves(N, H, HV, width, lanes):
        count = len(wave)
        S = []
        spaces = []
        coming = []
        for bundle in wave:
            S.append(first_state(initial_state, bundle, parts, V, given))
            spaces.append(workspace(largest, bundle["lanes"]))
            coming.append(begun(q, k, v, g, beta, bundle, 0, min(C, T), parts, scale, l2norm, full))
        owing = []
        for chunk in range(chunks + 1):
            xs = coming
            coming = []
            work = []
            for b in range(len(owing)):
                work.append((0, b))
            if chunk + 1 < chunks:
                for b in range(count):
                    work.append((3, b))
            for b in range(len(owing)):
                work.append((1, b))
                work.append((2, b))
            levels = 1
            tokens = min(C, T - chunk * C)
            rows = chunk_rows(tokens)
            Ts = []
            Tts = []
            Gts = []
            if chunk < chunks:
                for x in xs:
                    Gts.append(x["Gt"])
                levels = level_count(rows)
                Ts, Tts = identities(Gts, cut(full, rows), rows)
            at_a_level = (len(work) + levels - 1) // levels
            for level in range(levels):
                if chunk < chunks:
                    merge(Gts, Ts, Tts, spaces, masks, rows, level, False)
                for i in range(level * at_a_level, min(len(work), (level + 1) * at_a_level)):
                    stage, b = work[i]
                    if stage == 3:
                        start = (chunk + 1) * C
                        later = min(C, T - start)
                        coming.append(
                            begun(q, k, v, g, beta, wave[b], start, later, parts, scale, l2norm, full)
                        )
                    else:
                        S[b] = finished(stage, owing[b], S[b], wave[b], parts, states, every, o)
            owing = []
            if chunk < chunks:
                for b in range(count):
                    Ht = combined(Ts[b], xs[b]["Pt"], wave[b], rows)
                    W = writing(Ts[b], xs[b], wave[b], rows)
                    owing.append(
                        {
                            "x": xs[b], "Ht": Ht, "W": W, "chunk": chunk, "start": chunk * C,
                            "tokens": tokens, "rows": rows,
                        }
                    )  # fmt: skip
        for b in range(count):
            store_state(final, S[b], wave[b], parts)
    if kept > 0:
        return o, final, states
    return o, final


def example(
    B=1, T=256, H=2, K=64, V=128, HV=0, dtype="float32", every=2, C=128, lanes=8, width=4
):  # fmt: skip
    """The kernel and arguments as training passes them: no initial state, l2norm; every=0: as inference."""
    q, k, v, g, beta, _ = inputs(B, T, H, HV or H, K, V, dtype)
    return gated_delta_rule_fwd, (q, k, v, g, beta, None, K**-0.5, True, False, every, C, lanes, width)


def between(arguments, outputs):
    """The states, which are no output of the operation."""
    return outputs[2:]
