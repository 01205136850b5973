"""Runs the stages of `gated_delta_layer_bwd` that norm and convolution have beside the rule's, for a chunk.

`own` is the dict of what they make of it.
"""

from delta_trn.nki_kernels.chunk import load_keys, load_lanes, store_lanes
from delta_trn.nki_kernels.gated_delta_layer.bwd_stages import (
    DZ,
    GATE,
    GATE_SLOPE,
    LOAD_ROWS,
    PRODUCTS,
    ROOT,
    ROWS,
    UNIT,
)
from delta_trn.nki_kernels.gated_delta_layer.convolution import sum_gain
from delta_trn.nki_kernels.gated_delta_layer.fwd import collect_rows, normalize
from delta_trn.nki_kernels.gated_rms_norm import normalize_rows, project, repeat_row
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import PARTITIONS
from delta_trn.nki_kernels.tiles import copy_scaled, multiply_on_gpsimd, sbuf


def load_channels(u, n, first, width, start, tokens):
    """Loads channels first .. first + width of u [N, channels, T]: views [128 or fewer, tokens]."""
    _, channels, T = u.shape
    whole = width // PARTITIONS
    rest = width - whole * PARTITIONS
    views = []
    if whole > 0:
        tile_sb = sbuf((PARTITIONS, whole, tokens), u.dtype)
        nisa.dma_copy(
            dst=tile_sb,
            src=u.ap(
                pattern=[[T, PARTITIONS], [PARTITIONS * T, whole], [1, tokens]],
                offset=(n * channels + first) * T + start,
            ),
        )
        for i in range(whole):
            views.append(tile_sb[:, i, :])
    if rest > 0:
        tile_sb = sbuf((rest, tokens), u.dtype)
        nisa.dma_copy(
            dst=tile_sb, src=u[n, first + whole * PARTITIONS : first + width, start : start + tokens]
        )
        views.append(tile_sb)
    return views


def differentiate_rows(stage, own, stream, call):
    """Runs a stage of the norm: LOAD_ROWS, ROWS, ROOT, UNIT, GATE, GATE_SLOPE, PRODUCTS, DZ or REST.

    Of h, dy, SiLU(z) and SiLU'(z), PRODUCTS makes m = dy SiLU(z), n = m w and n h, in the letters of
    `nki_kernels.gated_rms_norm`, and leaves n in `m`, n h in `nh`, and dy SiLU'(z) in `slope`.
    """
    bundle, start, tokens, rows = stream["bundle"], own["start"], own["tokens"], own["rows"]
    if stage == LOAD_ROWS:
        for name in ("o", "z", "dy"):
            own[name] = load_lanes(call[name], bundle, start, tokens, rows, call[name].dtype)
    elif stage in (ROWS, ROOT, UNIT):
        normalize(stage, own, call)
    elif stage == GATE:
        own["m"] = sbuf(own["z"].shape)
        nisa.activation(dst=own["m"], op=nl.silu, data=own["z"])
    elif stage == GATE_SLOPE:
        own["slope"] = sbuf(own["z"].shape)
        nisa.activation(dst=own["slope"], op=nl.silu_dx, data=own["z"])
    elif stage == PRODUCTS:
        dy_sb, m_sb, lanes = own["dy"], own["m"], bundle["lanes"]
        gain = repeat_row(call["gain"], rows, lanes)
        multiply_on_gpsimd(own["slope"], dy_sb, own["slope"])
        multiply_on_gpsimd(m_sb, dy_sb, m_sb)
        slots = max(lanes, (stream["sums"].shape[1] + call["V"] - 1) // call["V"])  # that fill a view of sums
        mh_sb = sbuf((rows, slots, call["V"]))
        own["nh"] = mh_sb
        if slots > lanes:
            nisa.memset(dst=mh_sb[:, lanes:slots, :], value=0.0)
            own["nh"] = sbuf(dy_sb.shape)
        multiply_on_gpsimd(mh_sb[:, 0:lanes, :], m_sb, own["h"])
        sum_gain(mh_sb, stream)
        multiply_on_gpsimd(own["nh"], mh_sb[:, 0:lanes, :], gain)
        multiply_on_gpsimd(m_sb, m_sb, gain)
    elif stage == DZ:
        hw_sb, dz_sb = sbuf(own["h"].shape), sbuf(own["h"].shape, call["dz"].dtype)
        multiply_on_gpsimd(hw_sb, own["h"], repeat_row(call["gain"], rows, bundle["lanes"]))
        multiply_on_gpsimd(dz_sb, own["slope"], hw_sb)
        store_lanes(call["dz"], dz_sb, bundle, start, tokens)
        own["dz"] = dz_sb
    else:
        own["do"] = sbuf(own["h"].shape)
        normalize_rows(own["do"], own["h"], project(own["nh"]))
        nisa.tensor_tensor(
            dst=own["do"], data1=own["do"], data2=own["m"], op=nl.add, engine=nisa.engine.gpsimd
        )


def load_u(own, stream, call):
    """Runs LOAD_U: loads u of a chunk, views [channels, tokens]."""
    own["u"] = []
    for segment in stream["plan"]["segments"]:
        low, high, channel = segment
        own["u"] = own["u"] + load_channels(
            call["u"], stream["bundle"]["n"], channel, high - low, own["start"], own["tokens"]
        )


def compute_slopes(own, stream, call):
    """Runs SLOPE: SiLU'(u) of the bundle's channels, [rows, columns], in `du`."""
    plan, rows, tokens = stream["plan"], own["rows"], own["tokens"]
    own["du"] = sbuf((rows, plan["columns"]))
    if tokens < rows or plan["columns"] > plan["channels"]:
        nisa.memset(dst=own["du"], value=0.0)
    collect_rows(own["du"], own["u"], call["eye"], nl.silu_dx)


def load_gradient_chunk(own, bundle, call, table):
    """Runs LOAD: what the rule's gradients take of a chunk, but the state."""
    q, k, v, g, beta = call["inputs"]
    start, tokens, rows = own["start"], own["tokens"], table["rows"]
    return {
        "start": start, "tokens": tokens, "qk": load_keys(q, k, bundle, start, tokens, table),
        "v": load_lanes(v, bundle, start, tokens, rows, v.dtype),
        "g": load_lanes(g, bundle, start, tokens, rows),
        "beta": load_lanes(beta, bundle, start, tokens, rows),
    }  # fmt: skip


def multiply_slopes(chunk, own, stream, call):
    """Runs DU: multiplies SiLU'(u) by the gradients of q, k and v."""
    du_sb, heads, first = own["du"], stream["bundle"]["key_heads"], 0
    K, lanes, V, plan = call["K"], stream["bundle"]["lanes"], call["V"], stream["plan"]
    gradient_sb = sbuf((du_sb.shape[0], plan["channels"]))
    for tile in chunk["dqk"]:
        last = first + tile.shape[2]
        for side in range(2):
            for h in range(first, last):
                i = side * heads + h
                copy_scaled(
                    gradient_sb[:, i * K : (i + 1) * K], tile[:, side, h - first, :],
                    chunk["shortening"][0][:, i : i + 1],
                )  # fmt: skip
        first = last
    for lane in range(lanes):
        low = 2 * heads * K + lane * V
        copy_scaled(
            gradient_sb[:, low : low + V], chunk["dR"][:, lane, :], chunk["dv_scale"][:, lane : lane + 1]
        )
    channels = du_sb[:, 0 : plan["channels"]]
    multiply_on_gpsimd(channels, channels, gradient_sb)
