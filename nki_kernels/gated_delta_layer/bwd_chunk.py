"""Runs the stages of `gated_delta_layer_bwd` that belong to the norm, and those that make du."""

from delta_trn.nki_kernels.chunk import load_lanes, store_lanes
from delta_trn.nki_kernels.gated_delta_layer.convolution import sum_gain
from delta_trn.nki_kernels.gated_delta_layer.fwd import normalize, transpose_views
from delta_trn.nki_kernels.gated_rms_norm import normalize_rows, project, repeat_row
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import PARTITIONS
from delta_trn.nki_kernels.tiles import add, multiply, sbuf, split_blocks


def load_channels(u, n, first, width, start, tokens):
    """Loads channels first .. first + width of u [N, channels, T]: views [128 or fewer, tokens]."""
    _, channels, T = u.shape
    views = []
    for span in split_blocks(width):
        rows, k, blocks = span
        tile_sb = sbuf((rows, blocks, tokens), u.dtype)
        nisa.dma_copy(
            dst=tile_sb,
            src=u.ap(
                pattern=[[T, rows], [PARTITIONS * T, blocks], [1, tokens]],
                offset=(n * channels + first + k * PARTITIONS) * T + start,
            ),
        )
        for i in range(blocks):
            views.append(tile_sb[:, i, :])
    return views


def differentiate_rows(stage, chunk, own, stream, call):
    """Runs a stage of the gradients of the norm, as `gated_rms_norm` has them,
    or one that makes du.
    """
    bundle, start, tokens, rows = stream.bundle, own.start, own.tokens, own.rows
    normalize(stage, own, call)
    if stage == "load rows":
        own.o = load_lanes(call["o"], bundle, start, tokens, rows, call["o"].dtype)
        own.z = load_lanes(call["z"], bundle, start, tokens, rows, call["z"].dtype)
        own.dy = load_lanes(call["dy"], bundle, start, tokens, rows, call["dy"].dtype)
    elif stage == "gate":
        own.gate = multiply_by_function(own.dy, own.z, nl.silu)
    elif stage == "slope of z":
        own.slope = multiply_by_function(own.dy, own.z, nl.silu_dx)
    elif stage == "multiply rows":
        multiply_rows_of_norm(own, stream, call)
    elif stage == "dz":
        hw_sb, dz_sb = sbuf(own.h.shape), sbuf(own.h.shape, call["dz"].dtype)
        multiply(hw_sb, own.h, repeat_row(call["gain"], rows, bundle["lanes"]))
        multiply(dz_sb, own.slope, hw_sb)
        store_lanes(call["dz"], dz_sb, bundle, start, tokens)
    elif stage == "do":
        own.do = sbuf(own.h.shape)
        normalize_rows(own.do, own.h, project(own.nh))
        add(own.do, own.do, own.n)
    elif stage == "load u":
        own.u = []
        for segment in stream.plan["segments"]:
            low, high, channel = segment
            own.u = own.u + load_channels(
                call["u"], bundle["n"], channel, high - low, start, tokens
            )
    elif stage == "du":
        multiply_slopes(chunk, own, stream, call)


def multiply_by_function(x_sb, z_sb, op):
    """Computes x . op(z) [rows, lanes, V] in a new tile."""
    out_sb = sbuf(z_sb.shape)
    nisa.activation(dst=out_sb, op=op, data=z_sb)
    multiply(out_sb, x_sb, out_sb)
    return out_sb


def multiply_rows_of_norm(own, stream, call):
    """Makes n and n h of m = dy SiLU(z), and adds m h to the gradient of the gain."""
    m_sb, lanes, V = own.gate, stream.bundle["lanes"], call["V"]
    gain = repeat_row(call["gain"], own.rows, lanes)
    slots = max(lanes, (stream.sums.shape[1] + V - 1) // V)  # that fill a view of sums
    mh_sb = sbuf((own.rows, slots, V))
    own.nh = mh_sb
    if slots > lanes:
        nisa.memset(dst=mh_sb[:, lanes:slots, :], value=0.0)
        own.nh = sbuf(m_sb.shape)
    multiply(mh_sb[:, 0:lanes, :], m_sb, own.h)
    sum_gain(mh_sb, stream)
    multiply(own.nh, mh_sb[:, 0:lanes, :], gain)
    multiply(m_sb, m_sb, gain)
    own.n = m_sb


def multiply_slopes(chunk, own, stream, call):
    """Makes du [rows, columns]: SiLU'(u), transposed in PSUM, times the gradients of q, k and v."""
    plan, tokens, eye = stream.plan, own.tokens, call["eye"]
    own.du = sbuf((own.rows, plan["columns"]))
    if tokens < own.rows or plan["columns"] > plan["channels"]:
        nisa.memset(dst=own.du, value=0.0)
    pieces = list_gradients(chunk, stream.bundle, call["K"], call["V"])
    low, first = 0, 0
    while first < len(own.u):
        stop, slopes_ps = transpose_views(own.u, first, eye)
        nisa.activation(dst=slopes_ps, op=nl.silu_dx, data=slopes_ps)
        high = low + slopes_ps.shape[1]
        for piece in pieces:
            start, gradients_sb, factors_sb, i = piece
            begin, end = max(start, low), min(start + gradients_sb.shape[2], high)
            if begin < end:
                nisa.scalar_tensor_tensor(
                    dst=own.du[0:tokens, begin:end], data=slopes_ps[:, begin - low : end - low],
                    op0=nl.multiply, operand0=factors_sb[0:tokens, i : i + 1], op1=nl.multiply,
                    operand1=gradients_sb[0:tokens, i, begin - start : end - start],
                )  # fmt: skip
        low, first = high, stop


def list_gradients(chunk, bundle, K, V):
    """Lists the gradients of q, k and v as columns of du: [(first column, gradients [rows, heads,
    K or V], factors [rows, heads], head)].
    """
    heads, pieces = bundle["key_heads"], []
    dqk = chunk.dqk.reshape((chunk.dqk.shape[0], 2 * heads, K))
    for i in range(2 * heads):
        pieces.append((i * K, dqk, chunk.shortening[0], i))
    for lane in range(bundle["lanes"]):
        pieces.append((2 * heads * K + lane * V, chunk.dR, chunk.dv_scale, lane))
    return pieces
