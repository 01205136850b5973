"""Computes the gradients of a layer's mixer in one kernel: of its norm, the rule, and the
convolution.

    u = conv(x)    q, k, v = SiLU(u)    o = gated_delta_rule(q, k, v, g, beta)    y = RMSNorm(o) w SiLU(z)

Forward leaves q, k, v and o, u as [channels, tokens], and the state before each chunk but the
first. u is float32, since SiLU'(u) may be near 0. Chunks are taken from the last one to the first.
The equations of the stages are in `nki_kernels.gated_rms_norm`, `nki_kernels.gated_delta_rule_bwd`
and `nki_kernels.gated_delta_layer.convolution`. What one hands to the next stays on chip: dO leaves
the norm for the rule, and dq, dk and dv leave PSUM as du = dq SiLU'(u).
"""

from delta_trn.nki_kernels.chunk import load_chunk
from delta_trn.nki_kernels.chunk_gradients import compute_writes
from delta_trn.nki_kernels.chunk_tiles import Chunk
from delta_trn.nki_kernels.gated_delta_layer.bwd_chunk import differentiate_rows
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
    store_channels,
    store_prefix,
    store_sums,
    sum_taps,
)
from delta_trn.nki_kernels.gated_delta_layer.fwd import NORM_STAGES
from delta_trn.nki_kernels.gated_delta_layer.records import LayerStream, LayerTiles
from delta_trn.nki_kernels.gated_delta_rule_bwd import STAGES as RULE_STAGES
from delta_trn.nki_kernels.gated_delta_rule_bwd import (
    apply_inverse,
    build_gradient_constants,
    differentiate_chunk,
    load_kept_state,
    prepare_again,
    scale_again,
    solve_residual,
)
from delta_trn.nki_kernels.gated_delta_rule_fwd import load_state, store_state
from delta_trn.nki_kernels.gated_rms_norm import check_eps, copy_to_psum, load_everywhere
from delta_trn.nki_kernels.language import nki, nl
from delta_trn.nki_kernels.orders import ORDERS
from delta_trn.nki_kernels.plan import (
    BACKWARD_BUNDLES,
    PARTITIONS,
    count_slots,
    list_waves,
    pad_to_rows,
    split,
    split_evenly,
)
from delta_trn.nki_kernels.schedule import Stage, list_steps, list_work, rank
from delta_trn.nki_kernels.short_convolution import check
from delta_trn.nki_kernels.tiles import (
    build_identity,
    build_norm,
    normals,
    psum,
    rule_inputs,
    take_corners,
)
from delta_trn.nki_kernels.triangular import (
    INVERSE,
    allocate_workspace,
    build_block_constants,
    invert_chunks,
)

OWN_STAGES = (
    Stage("load", makes=("qk", "v", "g", "beta")),
    Stage("load state", makes=("kept",)),
    Stage("R", needs=("kept", "k_t", "beta_v"), makes=("R",)),
    Stage("load rows", makes=("o", "z", "dy")),
    *NORM_STAGES,
    Stage("h", needs=("o", "r"), makes=("h",)),
    Stage("gate", needs=("dy", "z"), makes=("m",)),
    Stage("slope of z", needs=("dy", "z"), makes=("dy slope",)),
    Stage("multiply rows", needs=("m", "h"), makes=("n", "nh")),
    Stage("dz", needs=("h", "dy slope")),
    Stage("do", needs=("h", "n", "nh"), makes=("do",)),
    Stage("load u", makes=("u",)),
    Stage("du", needs=("u", "dqk", "dR", "gates"), makes=("du",)),
    Stage("load taps", makes=("taps",)),
    Stage("multiply taps", needs=("du",), follows=("taps",), makes=("products of taps",)),
    Stage("sum taps", follows=("products of taps",), makes=("sums of taps",)),
    Stage("store dx", follows=("sums of taps",)),
)


# the layer has them in another form
NOT_THE_RULES = {stage.name for stage in OWN_STAGES} | {"store"}
STAGES = (*OWN_STAGES, *(stage for stage in RULE_STAGES if stage.name not in NOT_THE_RULES))
ORDER = rank("gated_delta_layer_bwd", STAGES, ORDERS["LAYER_BACKWARD"])
CONVOLUTION = ("load taps", "multiply taps", "sum taps", "store dx")


def run_stage(stage, share, shares, stream, index, call):
    """Runs a share of a stage of chunk number `index`."""
    bundle, parts, own, chunk = (
        stream.bundle,
        call["parts"],
        stream.own[index],
        stream.chunks[index],
    )
    if stage in CONVOLUTION:
        run_convolution(stage, share, shares, stream, own, call)
    elif stage in INVERSE:
        invert_chunks(stage, share, shares, [chunk], [stream.spaces], True, call["blocks"])
    elif stage == "load":
        table = take_corners(call["constants"], own.rows)
        stream.chunks[index] = load_chunk(call["inputs"], bundle, own.start, own.tokens, table)
    elif stage == "load state":
        own.kept = load_kept_state(
            call["initial_state"],
            call["states"],
            index,
            bundle,
            parts,
            call["V"],
            call["has_state"],
        )
    elif stage == "gates":
        chunk.do = own.do
        scale_again(chunk, (own.r,), bundle, call["scale"])
    elif stage == "apply T":
        apply_inverse(chunk, bundle, parts, False)
    elif stage == "R":
        solve_residual(chunk, own.kept, bundle)
    elif stage == "U":
        compute_writes(chunk, call["constants"])
    else:
        differentiate_rows(stage, chunk, own, stream, call)
        prepare_again(stage, chunk, stream, call)
        differentiate_chunk(stage, chunk, stream, call)


def run_convolution(stage, share, shares, stream, own, call):
    """Runs a share of a stage of the convolution: cell by cell, `AT_ONCE` taps in a step."""
    spans = split(call["W"], AT_ONCE)
    cells = stream.plan["cells"]
    per_cell = 1 if stage == "store dx" else len(spans)
    first, stop = list_steps(len(cells) * per_cell, share, shares)
    for step in range(first, stop):
        c = step // per_cell
        taps = spans[step - c * per_cell]
        if stage == "load taps":
            own.taps.append(load_taps(own, stream, cells[c], taps, call))
        elif stage == "multiply taps":
            if step == 0:
                allocate_leaving(own, stream, call)
                if call["packed"]:
                    load_masks(own, stream, call)
            own.products.append(multiply_taps(own, stream, c, taps, own.taps[step], call))
        elif stage == "sum taps":
            sum_taps(own, stream, c, taps, own.products[step], call)
        else:
            store_channels(call["dx"], own.dx_sums[c], stream, c, own.start)


def open_stream(bundle, largest, call):
    """Returns what a bundle has before its first chunk."""
    stream = LayerStream(bundle=bundle, chunks=[], own=[])
    for span in split(call["x"].shape[1], call["C"]):
        start, stop = span
        own = LayerTiles(start=start, tokens=stop - start, rows=pad_to_rows(stop - start))
        own.index = len(stream.own)
        own.taps, own.products, own.dx_sums = [], [], []
        stream.own.append(own)
        stream.chunks.append(Chunk())
    stream.plan = outline(bundle, call["H"], call["K"], call["V"], call["W"])
    stream.dS = load_state(call["dstate"], bundle, call["parts"], call["V"], call["has_dstate"])
    stream.spaces = allocate_workspace(largest, bundle["lanes"])
    stream.weights = load_weights(call["weight_t"], stream.plan, largest)
    stream.counts = build_counts(stream.plan, largest)
    stream.sums = psum((stream.plan["rows"], stream.plan["cells"][0][1]))
    return stream


@nki.jit
def gated_delta_layer_bwd(
    dy,
    x,
    weight_t,
    q,
    k,
    v,
    o,
    u,
    g,
    beta,
    z,
    gain,
    position,
    packed,
    prefix,
    continued,
    dstate,
    has_dstate,
    initial_state,
    has_state,
    states,
    scale,
    eps,
    C,
    lanes,
    width,
):
    """Computes the gradients of `gated_delta_layer_fwd`, called with save and the same C.

    Args:
        dy              like y
        weight_t        [W, channels] float32
        q, k, v, o, u, states   as forward left them; states: any tensor if there is but one chunk
        dstate          of the final state [N, HV, K, V] float32, read if `has_dstate`; else any
                        tensor
        the others      as in forward; no group of value heads is larger than `width`

    Returns:
        dx, dg, dbeta, dz   like their inputs
        dweight             [N, W, channels] float32, of each sequence
        dgain               [N, HV V] float32, of each sequence and head
        dinitial_state      [N, HV, K, V] float32
        dprefix             like prefix, only if `continued`

    Pseudocode, chunk by chunk:
        for wave in waves:
            dS = dstate
            for chunk in chunks, from the last:
                do, dz = the gradients of RMSNorm(o) gain SiLU(z)
                dq, dk, dv, dg, dbeta, dS = gated_delta_rule_bwd of the chunk, from its kept state
                du = (dq, dk, dv) SiLU'(u)
                dx = the gradient of conv, of which W - 1 tokens cross into the chunk before
            dinitial_state = dS
    """
    N, T, channels = x.shape
    H, K, HV, V, W = q.shape[2], q.shape[3], z.shape[2], z.shape[3], weight_t.shape[0]
    check(N, W, packed, continued)
    check_eps(eps)
    assert count_slots(H, HV, width) == H, (
        f"{HV // H} value heads per key head exceed a bundle of {width}"
    )
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
        "dy": dy,
        "x": x,
        "weight_t": weight_t,
        "inputs": (q, k, v, g, beta),
        "o": o,
        "u": u,
        "z": z,
        "position": position,
        "packed": packed,
        "prefix": prefix,
        "continued": continued,
        "dstate": dstate,
        "has_dstate": has_dstate,
        "initial_state": initial_state,
        "has_state": has_state,
        "states": states,
        "H": H,
        "K": K,
        "V": V,
        "W": W,
        "C": C,
        "scale": scale,
        "parts": split_evenly(K),
        "value_parts": split_evenly(V),
        "in_psum": False,  # which sums over all tokens fill
        "sums_on_vector": False,  # which has the convolution, too
        "dx": dx,
        "dz": dz,
        "gradients": (dx, dx, dx, dg, dbeta),
        "gain": copy_to_psum(load_everywhere(gain)),
        "norm": build_norm(eps),
        "eye": build_identity(PARTITIONS, nl.float32),
        "constants": constants,
        "blocks": build_block_constants(largest),
        "shifts": build_shifts(max(largest, W - 1), W),
        "l2norm": True,
    }
    work = list_work(ORDER, chunks)
    for wave in list_waves(N, H, HV, width, lanes, BACKWARD_BUNDLES):
        streams = []
        for bundle in wave:
            streams.append(open_stream(bundle, largest, call))
        for entry in work:
            stage, bundles, back, share, shares = entry
            for b in range(bundles, len(streams), 2):
                run_stage(stage, share, shares, streams[b], chunks - 1 - back, call)
        for stream in streams:
            store_state(dinitial_state, stream.dS, stream.bundle, call["parts"])
            store_sums(dweight, dgain, stream, W, V)
            if continued:
                store_prefix(dprefix, stream, call)
    if continued:
        return dx, dweight, dg, dbeta, dz, dgain, dinitial_state, dprefix
    return dx, dweight, dg, dbeta, dz, dgain, dinitial_state


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
        dy,
        x,
        weight_t,
        q,
        k,
        v,
        o,
        u,
        g,
        beta,
        z,
        gain,
        x,
        False,
        x,
        False,
        beta,
        False,
        beta,
        False,
        states,
        K**-0.5,
        1e-5,
        C,
        lanes,
        width,
    )
