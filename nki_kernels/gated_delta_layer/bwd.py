"""Computes the gradients of a layer's mixer in one kernel: of its norm, the rule, and the convolution.

    u = conv(x)    q, k, v = SiLU(u)    o = gated_delta_rule(q, k, v, g, beta)    y = RMSNorm(o) w SiLU(z)

Forward leaves q, k, v and o, u as [channels, tokens], and the state before each chunk but the first. u is
float32, since SiLU'(u) may be near 0. Chunks are taken from the last one to the first. The equations of the
stages are in `nki_kernels.gated_rms_norm`, `nki_kernels.gated_delta_rule_bwd` and
`nki_kernels.gated_delta_layer.convolution`. What one hands to the next stays on chip: dO leaves the norm for
the rule, and dq, dk and dv leave PSUM as du = dq SiLU'(u).
"""

from delta_trn.nki_kernels.chunk import invert_key_squares, sum_decays, sum_key_squares
from delta_trn.nki_kernels.chunk_gradients import (
    divide_norms,
    shorten_vectors,
    transpose_gradients,
    transpose_states,
)
from delta_trn.nki_kernels.gated_delta_layer.bwd_chunk import (
    compute_slopes,
    differentiate_rows,
    load_gradient_chunk,
    load_u,
    multiply_slopes,
)
from delta_trn.nki_kernels.gated_delta_layer.bwd_stages import (
    DECAYS,
    DU,
    DZ,
    GATE,
    GATE_SLOPE,
    KEPT,
    LOAD_ROWS,
    LOAD_TAPS,
    LOAD_U,
    MERGE,
    NORMS,
    PRODUCTS,
    REST,
    ROOT,
    ROWS,
    SLOPE,
    SQUARES,
    STORE_DX,
    TAPS,
    TRANSPOSE_STATES,
    UNIT,
    list_gradient_stages,
    rank_shares,
)
from delta_trn.nki_kernels.gated_delta_layer.convolution import (
    AT_ONCE,
    allocate_leaving,
    build_counts,
    build_shifts,
    load_masks,
    load_taps,
    load_weights,
    multiply_taps,
    outline,
    store_dx,
    store_prefix,
    store_sums,
    sum_taps,
)
from delta_trn.nki_kernels.gated_delta_rule_bwd import (
    APPLY,
    EVEN,
    FACTORS,
    LOAD,
    MULTIPLY,
    READ,
    RESIDUAL,
    SCALE,
    SHORTEN,
    SOLVE,
    SPREAD,
    STATE,
    SUBSTITUTE,
    TRANSPOSE,
    TRANSPOSE_KEYS,
    apply_inverse,
    build_gradient_constants,
    differentiate_chunk,
    differentiate_residual,
    differentiate_state,
    invert_beta,
    invert_step,
    load_kept_state,
    multiply_again,
    scale_again,
    solve_residual,
    solve_state,
)
from delta_trn.nki_kernels.gated_delta_rule_fwd import load_state, store_state
from delta_trn.nki_kernels.gated_rms_norm import check as check_eps
from delta_trn.nki_kernels.gated_rms_norm import (
    load_everywhere,
)
from delta_trn.nki_kernels.language import nki, nl
from delta_trn.nki_kernels.plan import (
    BACKWARD_BUNDLES,
    PARTITIONS,
    count_slots,
    list_waves,
    pad_to_rows,
    split,
    split_evenly,
)
from delta_trn.nki_kernels.short_convolution import check
from delta_trn.nki_kernels.tiles import (
    build_identity,
    build_norm,
    normals,
    psum,
    rule_inputs,
    take_corners,
)
from delta_trn.nki_kernels.triangular import allocate_workspace, build_block_constants


def run_gradient_stage(stage, stream, index, call):
    """Runs a stage of a chunk's gradients.

    A chunk has two dicts: `chunk` is the rule's, and `own` has what norm and convolution make, some of whose
    stages may come before LOAD.
    """
    bundle, parts, constants, V = stream["bundle"], call["parts"], call["constants"], call["V"]
    products, own, chunk = constants["products"], stream["own"][index], stream["chunks"][index]
    table = take_corners(constants, own["rows"])
    if stage == LOAD:
        stream["chunks"][index] = load_gradient_chunk(own, bundle, call, table)
    elif stage == SQUARES:
        chunk["squares"] = sum_key_squares(chunk["qk"], table)
    elif stage == NORMS:
        chunk["inverse_norms"] = invert_key_squares(chunk["squares"], table)
        invert_beta(chunk)
    elif stage == DECAYS:
        factors_sb, carry_factors_sb = sum_decays(chunk["g"], call["K"], table)
        chunk["factors"], chunk["carry_factors"] = factors_sb, carry_factors_sb
    elif stage == LOAD_U:
        load_u(own, stream, call)
    elif stage == KEPT:
        own["kept"] = load_kept_state(
            call["initial_state"], call["states"], index, bundle, parts, V, call["has_state"]
        )
    elif stage == FACTORS:
        chunk["shortening"] = divide_norms(chunk["inverse_norms"])
    elif stage == SHORTEN:
        shorten_vectors(chunk["qk"], chunk["shortening"])
    elif stage in (LOAD_ROWS, ROWS, ROOT, UNIT, GATE, GATE_SLOPE, PRODUCTS, DZ, REST):
        differentiate_rows(stage, own, stream, call)
    elif stage == SCALE:
        chunk["do"] = own["do"]
        scaled = [chunk]
        scale_again(scaled, (own["r"],), bundle, call["scale"], constants)
        stream["chunks"][index] = scaled[0]
    elif stage in (TRANSPOSE_KEYS, MULTIPLY):
        multiply_again(stage, [chunk], bundle, parts, call["blocks"], constants)
    elif stage in (SPREAD, SUBSTITUTE):
        invert_step([chunk], stage, 0, [stream["space"]], call["blocks"], constants)
    elif stage == TRANSPOSE:
        transpose_gradients(chunk, call["value_parts"], table)
    elif stage == TRANSPOSE_STATES:
        transpose_states(chunk, parts, call["value_parts"], constants)
    elif stage >= MERGE:
        level = (stage - MERGE) // 3
        invert_step(
            [chunk], EVEN + stage - MERGE - 3 * level, level, [stream["space"]], call["blocks"], constants
        )
    elif stage == APPLY:
        apply_inverse(chunk, bundle, parts, False, constants)
    elif stage == RESIDUAL:
        solve_residual(chunk, own["kept"], bundle, products)
    elif stage == SOLVE:
        solve_state(chunk, parts, False, constants)
    elif stage == READ:
        differentiate_residual(chunk, stream["dS"], bundle, products)
    elif stage == STATE:
        stream["dS"] = differentiate_state(chunk, parts)
    elif stage == SLOPE:
        compute_slopes(own, stream, call)
    elif stage == DU:
        multiply_slopes(chunk, own, stream, call)
    else:
        differentiate_chunk(
            stage, chunk, bundle, call["gradients"], parts, call["value_parts"], True, constants
        )


def convolve_again(stage, step, stream, index, call):
    """Runs LOAD_TAPS, TAPS or SUM_TAPS of a chunk: of cell and taps number `step`; or STORE_DX of a cell."""
    own, W = stream["own"][index], call["W"]
    if stage == STORE_DX:
        store_dx(own, stream, step, call["dx"])
        return
    spans = split(W, AT_ONCE)
    c = step // len(spans)
    taps, cell = spans[step - c * len(spans)], stream["plan"]["cells"][c]
    if stage == LOAD_TAPS:
        own["taps"].append(
            load_taps(
                call["x"], call["prefix"], call["continued"], stream["plan"], cell, taps,
                stream["bundle"]["n"], own["start"], own["tokens"], W,
            )
        )  # fmt: skip
    elif stage == TAPS:
        if step == 0:
            own["leaving"] = allocate_leaving(own, stream["plan"], W)
            own["arriving"] = stream["leaving"]
            stream["leaving"] = [own["leaving"]]
            if call["packed"]:
                keep_sb, counts = load_masks(
                    call["position"], own["start"], own["tokens"], stream["counts"], W
                )
                own["keep"], own["counts"] = keep_sb, counts
        own["products"].append(multiply_taps(own, stream, cell, taps, own["taps"][step], call))
    else:
        sum_taps(own, stream, c, taps, own["products"][step], call)


def run_share(stage, rank, shares, stream, index, call):
    """Runs a share, number `rank` of all, of a stage of SHARED of a chunk."""
    count = len(stream["plan"]["cells"])
    if stage != STORE_DX:
        count = count * len(split(call["W"], AT_ONCE))
    for step in range(count * (rank - 1) // shares, count * rank // shares):
        convolve_again(stage, step, stream, index, call)


def open_stream(bundle, largest, call):
    """Builds the dict of what a bundle has besides its chunks."""
    plan = outline(bundle, call["H"], call["K"], call["V"], call["W"])
    chunks, own = [], []
    for span in split(call["x"].shape[1], call["C"]):
        start, stop = span
        chunks.append({})
        own.append(
            {
                "start": start, "tokens": stop - start, "rows": pad_to_rows(stop - start), "taps": [],
                "products": [], "dx_sums": [], "dx_cells": [],
            }
        )  # fmt: skip
    return {
        "bundle": bundle, "plan": plan, "chunks": chunks, "own": own, "leaving": [],
        "dS": load_state(call["dstate"], bundle, call["parts"], call["V"], call["has_dstate"]),
        "space": allocate_workspace(largest, bundle["lanes"]),
        "weights": load_weights(call["weight_t"], plan, largest), "counts": build_counts(plan, largest),
        "sums": psum((plan["rows"], plan["cells"][0][1])),
    }  # fmt: skip


@nki.jit
def gated_delta_layer_bwd(
    dy, x, weight_t, q, k, v, o, u, g, beta, z, gain, position, packed, prefix, continued, dstate, has_dstate,
    initial_state, has_state, states, scale, eps, C, lanes, width,
):  # fmt: skip
    """Computes the gradients of `gated_delta_layer_fwd`, called with every = 1 and the same C.

    Args:
        dy              like y
        weight_t        [W, channels] float32
        q, k, v, o, u, states   as forward left them; states: any tensor if there is but one chunk
        dstate          of the final state [N, HV, K, V] float32, read if `has_dstate`; else any tensor
        the others      as in forward; no group of value heads is larger than `width`

    Returns:
        dx, dg, dbeta, dz   like their inputs
        dweight             [N, W, channels] float32, of each sequence
        dgain               [N, HV V] float32, of each sequence and head
        dinitial_state      [N, HV, K, V] float32
        dprefix             like prefix, only if `continued`
    """
    made = compute_gradients(
        dy, x, weight_t, q, k, v, o, u, g, beta, z, gain, position, packed, prefix, continued, dstate,
        has_dstate, initial_state, has_state, states, scale, eps, C, lanes, width,
    )  # fmt: skip
    dx, dweight, dg, dbeta, dz = made["dx"], made["dweight"], made["dg"], made["dbeta"], made["dz"]
    if continued:
        return dx, dweight, dg, dbeta, dz, made["dgain"], made["dinitial_state"], made["dprefix"]
    return dx, dweight, dg, dbeta, dz, made["dgain"], made["dinitial_state"]


def compute_gradients(
    dy, x, weight_t, q, k, v, o, u, g, beta, z, gain, position, packed, prefix, continued, dstate, has_dstate,
    initial_state, has_state, states, scale, eps, C, lanes, width,
):  # fmt: skip
    """Computes what `gated_delta_layer_bwd` returns, and returns it in a dict."""
    N, T, channels = x.shape
    H, K, HV, V, W = q.shape[2], q.shape[3], z.shape[2], z.shape[3], weight_t.shape[0]
    check(N, W, packed, continued)
    check_eps(eps)
    assert count_slots(H, HV, width) == H, f"{HV // H} value heads per key head exceed a bundle of {width}"
    chunks = (T + C - 1) // C
    dx = nl.ndarray((N, T, channels), dtype=x.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((N, W, channels), dtype=nl.float32, buffer=nl.shared_hbm)
    dg = nl.ndarray((N, T, HV), dtype=g.dtype, buffer=nl.shared_hbm)
    dbeta = nl.ndarray((N, T, HV), dtype=beta.dtype, buffer=nl.shared_hbm)
    dz = nl.ndarray((N, T, HV, V), dtype=z.dtype, buffer=nl.shared_hbm)
    dgain = nl.ndarray((N, HV * V), dtype=nl.float32, buffer=nl.shared_hbm)
    dinitial_state = nl.ndarray((N, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    dprefix = dx
    if continued:
        dprefix = nl.ndarray((N, W - 1, channels), dtype=x.dtype, buffer=nl.shared_hbm)
    largest = min(C, pad_to_rows(T))
    constants = build_gradient_constants(largest, x.dtype)
    call = {
        "dy": dy, "x": x, "weight_t": weight_t, "inputs": (q, k, v, g, beta), "o": o, "u": u, "z": z,
        "position": position, "packed": packed, "prefix": prefix, "continued": continued, "dstate": dstate,
        "has_dstate": has_dstate, "initial_state": initial_state, "has_state": has_state, "states": states,
        "H": H, "K": K, "V": V, "W": W, "C": C, "scale": scale, "parts": split_evenly(K),
        "value_parts": split_evenly(V), "dx": dx, "dz": dz, "gradients": (dx, dx, dx, dg, dbeta),
        "gain": load_everywhere(gain), "norm": build_norm(eps),
        "eye": build_identity(PARTITIONS, nl.float32), "constants": constants,
        "blocks": build_block_constants(largest), "shifts": build_shifts(max(largest, W - 1), W),
        "dweight": dweight, "dg": dg, "dbeta": dbeta, "dgain": dgain, "dinitial_state": dinitial_state,
        "dprefix": dprefix,
    }  # fmt: skip
    stages = list_gradient_stages()
    ranks, shares, behind = rank_shares(stages)
    for wave in list_waves(N, H, HV, width, lanes, BACKWARD_BUNDLES):
        streams = []
        for bundle in wave:
            streams.append(open_stream(bundle, largest, call))
        for turn in range(chunks + behind):
            for i in range(len(stages)):
                stage, parity, late = stages[i]
                index = chunks - 1 - (turn - late)
                if index < 0 or index >= chunks:
                    continue
                for b in range(parity, len(streams), 2):
                    if ranks[i] > 0:
                        run_share(stage, ranks[i], shares[i], streams[b], index, call)
                    else:
                        run_gradient_stage(stage, streams[b], index, call)
        for stream in streams:
            store_state(dinitial_state, stream["dS"], stream["bundle"], call["parts"])
            store_sums(dweight, dgain, stream, W, V)
            if continued:
                store_prefix(dprefix, stream["leaving"][0], stream, call)
    return call


def example(
    B=1, T=1024, H=6, K=128, V=256, HV=0, W=4, dtype="bfloat16", C=128, lanes=6, width=3
):  # fmt: skip
    """Returns the kernel and its arguments as in training: no gradient of the final state."""
    HV = HV or H
    _, _, _, g, beta, z = rule_inputs(B, T, H, HV, K, V, dtype)
    channels = 2 * H * K + HV * V
    x, dy, o, q, k, v = normals(
        dtype, (B, T, channels), z.shape, z.shape, (B, T, H, K), (B, T, H, K), z.shape
    )
    kept = -(-T // C) - 1
    u, weight_t, gain = normals("float32", (B, channels, T), (W, channels), (V,))
    states = normals("float32", (B, kept, K, HV, V))[0] * K**-0.5 if kept else beta
    return gated_delta_layer_bwd, (
        dy, x, weight_t, q, k, v, o, u, g, beta, z, gain, x, False, x, False, beta, False, beta, False,
        states, K**-0.5, 1e-5, C, lanes, width,
    )  # fmt: skip
