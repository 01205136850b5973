"""Computes the mixer of a layer forward in one kernel: convolution, gated delta rule, gated RMS
norm.

    q, k, v = SiLU(conv(x))     o = gated_delta_rule(q, k, v, g, beta)     y = RMSNorm(o) w SiLU(z)

The stages are those of the three kernels that do the same one after the other. What one hands to
the next stays in SBUF: the convolution's results lie there as [channels, tokens], until the chunk
that they belong to takes them, and o goes from PSUM to the norm. So engines that wait in one of the
kernels work for another.

The convolution runs ahead of the rule, by stretches of tokens. A cell is what `nki_kernels.tiles`
calls one: up to 128 channels of a stretch. Cells are listed in the order in which chunks need them,
and as many are computed in each turn of the rule as let the next turn find what it loads.
"""

from delta_trn.nki_kernels.chunk import load_lanes, store_keys, store_lanes
from delta_trn.nki_kernels.chunk_tiles import Chunk
from delta_trn.nki_kernels.gated_delta_layer.cells import CONVOLUTION, list_cells, list_layer_work
from delta_trn.nki_kernels.gated_delta_layer.records import LayerStream, LayerTiles
from delta_trn.nki_kernels.gated_delta_rule_fwd import STAGES as RULE_STAGES
from delta_trn.nki_kernels.gated_delta_rule_fwd import (
    compute_output,
    load_state,
    run_stage,
    store_state,
)
from delta_trn.nki_kernels.gated_rms_norm import (
    check_eps,
    copy_to_psum,
    invert_squares,
    load_everywhere,
    normalize_rows,
    repeat_row,
    sum_slots,
)
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.orders import ORDERS
from delta_trn.nki_kernels.plan import (
    BANK,
    PARTITIONS,
    list_waves,
    pad_to_rows,
    split,
    split_evenly,
)
from delta_trn.nki_kernels.schedule import ALL, Stage, rank
from delta_trn.nki_kernels.short_convolution import (
    ON_VECTOR,
    build_masks,
    check,
    copy_tail,
    load_taps,
    load_window,
    slice_window,
    sum_taps,
)
from delta_trn.nki_kernels.tiles import (
    add_transposed,
    build_constants,
    build_norm,
    copy_scaled,
    load_tokens,
    multiply,
    normals,
    psum,
    rule_inputs,
    sbuf,
    take_corners,
)
from delta_trn.nki_kernels.triangular import allocate_workspace, build_block_constants

NORM_STAGES = (
    Stage("square o", needs=("o",), makes=("o_squares",)),
    Stage("invert norm of o", needs=("o_squares",), makes=("r",)),
)
STAGES = (
    *RULE_STAGES,
    *NORM_STAGES,
    Stage("gate", needs=("v",), makes=("gate",)),
    Stage("y", needs=("o", "r", "gate")),
    # What these need, and that what "load" needs of them is there, `list_layer_work` sees to
    Stage("window"),
    Stage("taps"),
    Stage("silu"),
)
ORDER = rank("gated_delta_layer_fwd", STAGES, ORDERS["LAYER_FORWARD"])


def convolve(stage, step, cells, streams, call):
    """Runs a stage of the convolution's step: "window" of that cell,
    or another one of a cell before.
    """
    at = step
    for kind in range(len(CONVOLUTION)):
        if CONVOLUTION[kind] == stage:
            at = step - kind
    if at < 0 or at >= len(cells):
        return
    cell = cells[at]
    stream = streams[cell["stream"]]
    if stage == "window":
        open_window(cell, stream, call)
    elif stage == "taps":
        cell["z"] = sbuf(cell["slices"][0].shape)
        sum_taps(cell["z"], [cell["slices"]], stream.taps[cell["group"]], ON_VECTOR, 2)
    else:
        activate(cell, stream, call)


def open_window(cell, stream, call):
    """Loads x of a cell, and of the tokens before it, as [channels, tokens]."""
    x, W, eye = call["x"], call["W"], call["constants"]["eye"]
    if cell["group"] == len(stream.taps):
        stream.taps.append(load_taps(call["weight"], cell, 2, max(1, W - ON_VECTOR), eye))
    if cell["group"] == 0:
        stream.keep = build_masks(call["position"], call["packed"], cell["t0"], cell["t1"], W)
    if cell["part"] == 0:
        stream.x = load_tokens(x, cell)
    window_sb = load_window(stream.x, call["prefix"], call["continued"], cell, stream.tails, W, eye)
    tail_sb = window_sb
    if cell["t1"] < call["y"].shape[1]:
        tail_sb = sbuf((window_sb.shape[0], W - 1), x.dtype)
        copy_tail(tail_sb, window_sb, W - 1)
    stream.tails.append(tail_sb)
    cell["slices"] = slice_window(window_sb, stream.keep, W)


def activate(cell, stream, call):
    """Applies SiLU to what the convolution made of a cell, [channels, tokens].

    Where a head's channels fill whole cells, those of q and k become what the rule takes as q_t and
    k_t.
    """
    z, C, K = cell["z"], call["C"], call["K"]
    if call["save"]:
        first = cell["c0"] + cell["a0"]
        nisa.dma_copy(
            dst=call["u"][cell["b"], first : first + z.shape[0], cell["t0"] : cell["t1"]], src=z
        )
    if not call["whole"] or cell["side"] == 2:
        y_t_sb = sbuf(z.shape, call["x"].dtype)
        nisa.activation(dst=y_t_sb, op=nl.silu, data=z)
        stream.y_t.append((cell, y_t_sb))
        return
    heads, parts = stream.bundle["key_heads"], K // PARTITIONS
    at = cell["group"] - cell["side"] * heads * parts
    transposed = stream.transposed[cell["side"]]
    for start in range(cell["t0"], cell["t1"], C):
        tokens = min(C, cell["t1"] - start)
        if at == 0:
            tiles = []
            for _ in range(parts):
                tile_sb = sbuf((PARTITIONS, heads, pad_to_rows(tokens)), call["x"].dtype)
                if tokens < pad_to_rows(tokens):
                    nisa.memset(dst=tile_sb, value=0.0)
                tiles.append(tile_sb)
            transposed.append(tiles)
        nisa.activation(
            dst=transposed[start // C][at % parts][:, at // parts, 0:tokens], op=nl.silu,
            data=z[:, start - cell["t0"] : start - cell["t0"] + tokens],
        )  # fmt: skip


def list_transposed(sides, stream, index, tokens, call):
    """Lists views [channels, tokens] of what the convolution left of a chunk's q and k, or v."""
    start = index * call["C"]
    views = []
    if call["whole"] and sides[0] == 0:
        for side in sides:
            tiles = stream.transposed[side][index]
            for h in range(stream.bundle["key_heads"]):
                for part in range(len(tiles)):
                    views.append(tiles[part][:, h, 0:tokens])
        return views
    for entry in stream.y_t:
        cell, y_t_sb = entry
        if cell["side"] in sides and cell["t0"] <= start and start < cell["t1"]:
            views.append(y_t_sb[:, start - cell["t0"] : start - cell["t0"] + tokens])
    return views


def transpose_views(views, first, eye):
    """Transposes views x [channels, tokens] from number `first` on, as many as fill a bank of PSUM;
    returns the number behind the last and a tile [tokens, channels].
    """
    stop, width, tokens = first, 0, views[first].shape[1]
    while stop < len(views) and width + views[stop].shape[0] <= BANK:
        width = width + views[stop].shape[0]
        stop = stop + 1
    out_ps = psum((tokens, width))
    at = 0
    for i in range(first, stop):
        C = views[i].shape[0]
        add_transposed(out_ps[:, at : at + C], views[i], eye[0:C, 0:C])
        at = at + C
    return stop, out_ps


def collect_rows(out_sb, views, eye):
    """Sets out [rows, channels] to views x [channels, tokens]; a bank of PSUM is read at once."""
    low, first = 0, 0
    while first < len(views):
        first, out_ps = transpose_views(views, first, eye)
        tokens, width = out_ps.shape
        copy_scaled(out_sb[0:tokens, low : low + width], out_ps)
        low = low + width


def load_layer(stream, index, call):
    """Loads a chunk: g and beta from HBM, q, k and v from the convolution."""
    g, beta = call["g"], call["beta"]
    start, bundle = index * call["C"], stream.bundle
    tokens = min(call["C"], g.shape[1] - start)
    table = take_corners(call["constants"], pad_to_rows(tokens))
    rows, K, V, eye = table["rows"], call["K"], call["V"], table["eye"]
    qk_sb = sbuf((rows, 2, bundle["key_heads"], K), table["products"])
    v_sb = sbuf((rows, bundle["lanes"], V), table["products"])
    if tokens < rows:
        nisa.memset(dst=qk_sb, value=0.0)
        nisa.memset(dst=v_sb, value=0.0)
    collect_rows(
        qk_sb.reshape((rows, 2 * bundle["key_heads"] * K)),
        list_transposed((0, 1), stream, index, tokens, call), eye,
    )  # fmt: skip
    collect_rows(
        v_sb.reshape((rows, bundle["lanes"] * V)),
        list_transposed((2,), stream, index, tokens, call),
        eye,
    )
    if call["save"]:
        q, k, v = call["saved"]
        store_keys(q, k, qk_sb, bundle["n"], start, tokens, bundle["key_first"])
        store_lanes(v, v_sb, bundle, start, tokens)
    chunk = Chunk(start=start, tokens=tokens, table=table, qk=qk_sb, v=v_sb)
    chunk.g = load_lanes(g, bundle, start, tokens, rows)
    chunk.beta = load_lanes(beta, bundle, start, tokens, rows)
    if call["whole"]:
        chunk.q_t = stream.transposed[0][index]
        chunk.k_t = stream.transposed[1][index]
    stream.chunks.append(chunk)
    stream.own.append(LayerTiles(start=start, tokens=tokens, rows=rows))


def normalize(stage, own, call):
    """Runs a stage of the norm of o, in forward or in backward: its squares,
    r of their sums, or h = o r.
    """
    if stage == "square o":
        own.o_squares = sum_slots(own.o, nl.square)
    elif stage == "invert norm of o":
        own.r = invert_squares(own.o_squares, call["V"], call["norm"])
    elif stage == "h":
        own.h = sbuf(own.o.shape)
        normalize_rows(own.h, own.o, own.r)


def finish(stage, chunk, own, bundle, call):
    """Runs a stage that makes o, or y of it."""
    start, tokens = own.start, own.tokens
    normalize(stage, own, call)
    if stage == "O":
        own.o = compute_output(chunk, call["y"].dtype)
        if call["save"]:
            store_lanes(call["o"], own.o, bundle, start, tokens)
    elif stage == "gate":
        z_sb = load_lanes(call["z"], bundle, start, tokens, own.rows, call["z"].dtype)
        own.gate = sbuf(z_sb.shape)
        nisa.activation(dst=own.gate, op=nl.silu, data=z_sb)
        multiply(own.gate, own.gate, repeat_row(call["gain"], own.rows, bundle["lanes"]))
    elif stage == "y":
        y_sb = sbuf(own.o.shape, call["y"].dtype)
        for span in split(bundle["lanes"], max(1, BANK // call["V"])):
            first, last = span
            h_ps = psum((own.rows, last - first, call["V"]))
            normalize_rows(h_ps, own.o, own.r, first)
            multiply(y_sb[:, first:last, :], h_ps, own.gate[:, first:last, :])
        store_lanes(call["y"], y_sb, bundle, start, tokens)


def run_layer_stage(stage, share, shares, streams, index, call):
    """Runs a share of a stage of chunk number `index`: one of the rule's, or the layer's own."""
    if stage in ("O", "square o", "invert norm of o", "gate", "y"):
        for stream in streams:
            finish(stage, stream.chunks[index], stream.own[index], stream.bundle, call)
    elif stage == "load":
        for stream in streams:
            load_layer(stream, index, call)
    elif not call["whole"] or stage not in ("transpose k", "transpose q"):
        run_stage(stage, share, shares, streams, index, call)


@nki.jit
def gated_delta_layer_fwd(
    x,
    weight,
    g,
    beta,
    z,
    gain,
    position,
    packed,
    prefix,
    continued,
    initial_state,
    has_state,
    K,
    scale,
    eps,
    save,
    C,
    lanes,
    width,
):
    """Computes a layer's mixer over whole sequences.

    Dimensions are those of `gated_delta_rule_fwd`; channels = 2 H K + HV V, W taps.

    Args:
        x               [N, T, channels]: q, k and v side by side, before the convolution
        weight          [channels, W], W >= 2
        g, beta         as in `gated_delta_rule_fwd`
        z, gain, eps    gate [N, T, HV, V] and gain [V] of the norm
        position, packed, prefix, continued     as in `short_convolution_fwd`
        initial_state, has_state, scale, C, lanes, width    as in `gated_delta_rule_fwd`
        save            bool: return what `gated_delta_layer_bwd` takes

    Returns:
        y               [N, T, HV, V] in x's dtype
        final_state     [N, HV, K, V] float32
        q, k, v, o      as the rule takes and leaves them, in x's dtype; only if save, like all that
                        follow
        u               conv(x) [N, channels, T] float32
        states          before each chunk but the first, as of `gated_delta_rule_fwd`, only if there
                        are any

    Pseudocode, chunk by chunk:
        for wave in waves:
            S = initial_state
            for chunk in chunks:
                q, k, v = SiLU(conv(x)), computed some stretches of tokens ahead
                o, S = gated_delta_rule_fwd of the chunk
                y[chunk] = RMSNorm(o) gain SiLU(z)
            final_state = S
    """
    N, T, HV, V = z.shape
    channels, W = weight.shape
    H = (channels - HV * V) // (2 * K)
    check(N, W, packed, continued)
    check_eps(eps)
    parts = split_evenly(K)
    chunks = (T + C - 1) // C
    y = nl.ndarray((N, T, HV, V), dtype=x.dtype, buffer=nl.shared_hbm)
    final_state = nl.ndarray((N, HV, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    states, saved, o, u = final_state, (y, y, y), y, y
    if save and chunks > 1:
        states = nl.ndarray((N, chunks - 1, K, HV, V), dtype=nl.float32, buffer=nl.shared_hbm)
    if save:
        q = nl.ndarray((N, T, H, K), dtype=x.dtype, buffer=nl.shared_hbm)
        k = nl.ndarray((N, T, H, K), dtype=x.dtype, buffer=nl.shared_hbm)
        v = nl.ndarray((N, T, HV, V), dtype=x.dtype, buffer=nl.shared_hbm)
        o = nl.ndarray((N, T, HV, V), dtype=x.dtype, buffer=nl.shared_hbm)
        saved = (q, k, v)
        u = nl.ndarray((N, channels, T), dtype=nl.float32, buffer=nl.shared_hbm)
    largest = min(C, pad_to_rows(T))
    call = {
        "x": x,
        "weight": weight,
        "g": g,
        "beta": beta,
        "z": z,
        "position": position,
        "packed": packed,
        "prefix": prefix,
        "continued": continued,
        "W": W,
        "H": H,
        "K": K,
        "V": V,
        "gain": copy_to_psum(load_everywhere(gain)),
        "norm": build_norm(eps),
        "save": save,
        "saved": saved,
        "u": u,
        "constants": build_constants(largest, x.dtype),
        "channels": False,
        "blocks": build_block_constants(largest),
        "parts": parts,
        "scale": scale,
        "l2norm": True,
        "every": 1 if save else 0,
        "C": C,
        "o": o,
        "y": y,
        "states": states,
        "whole": K % PARTITIONS == 0,
    }
    for wave in list_waves(N, H, HV, width, lanes):
        groups = [[], [], []]  # streams: EVEN, ODD, ALL
        for b in range(len(wave)):
            stream = LayerStream(bundle=wave[b], chunks=[], own=[], taps=[], tails=[], y_t=[])
            stream.transposed = [[], []]
            stream.S = load_state(initial_state, wave[b], parts, V, has_state)
            stream.spaces = allocate_workspace(largest, wave[b]["lanes"])
            groups[b % 2].append(stream)
            groups[ALL].append(stream)
        cells = list_cells(wave, T, call, ORDER)
        for entry in list_layer_work(ORDER, cells, chunks):
            stage, bundles, index, share, shares = entry
            if stage in CONVOLUTION:
                convolve(stage, index, cells, groups[ALL], call)
            elif len(groups[bundles]) > 0:
                run_layer_stage(stage, share, shares, groups[bundles], index, call)
        for stream in groups[ALL]:
            store_state(final_state, stream.S, stream.bundle, parts)
    if not save:
        return y, final_state
    q, k, v = saved
    if chunks > 1:
        return y, final_state, q, k, v, o, u, states
    return y, final_state, q, k, v, o, u


def example(
    B=1, T=1024, H=6, K=128, V=256, HV=0, W=4, dtype="bfloat16", save=0, C=128, lanes=6, width=3
):  # fmt: skip
    """Returns the kernel and its arguments, as in evaluation, or as in training with save=1."""
    HV = HV or H
    _, _, _, g, beta, z = rule_inputs(B, T, H, HV, K, V, dtype)
    channels = 2 * H * K + HV * V
    x = normals(dtype, (B, T, channels))[0]
    weight, gain = normals("float32", (channels, W), (V,))
    return gated_delta_layer_fwd, (
        x, weight, g, beta, z, gain, x, False, x, False, beta, False, K, K**-0.5, 1e-5,
        bool(save), C, lanes, width,
    )  # fmt: skip
