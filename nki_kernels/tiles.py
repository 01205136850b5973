"""Holds what the kernels share on chip: tiles, loads, identities and triangles, transpositions,
sums of rows.

These are plain functions that a kernel inlines. At the end stand seeded arguments, for the
`example` of each kernel in `delta-trn simulator report`.

Two decisions are made here for all kernels, by what others have measured on a Trn1 (neuronx-cc
2.27, October 2026):

    engines   What works element by element on two tensors is the Vector engine's, by `combine`:
              none of it compiles on GpSimd. An operand that the Tensor engine made is read in PSUM,
              where it lies: with one operand there an instruction takes half the time.
    sums      A PSUM tensor holds one sum of two or more products and nothing else, or any number
              of single products, each in a slice of its own. Where several sums lay in one tensor,
              the chip lost the first products of all but the last, without an error. Nothing reads
              a sum before its last product. Where NKI knows accumulate=, each product says whether
              it adds; nki 0.2.0 decides by the view, so all products of a sum name the same one.
"""

from typing import Any

import ml_dtypes
import numpy as np

from delta_trn.nki_kernels.language import SAYS_SUMS, nisa, nl
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, choose_square_scale, split, split_decays

L2NORM_EPS = 1e-6
# rsqrt takes norms up to 2^62, which `choose_factors` brings to 2^-22 to 2^27. Below LONG, decays
# of e^-80 times a shortened q would underflow, and values of 1e-30 times two reciprocal norms do
# not yet
LONG = 2.0**13
SHORTENING = 2.0**-35


def sbuf(shape, dtype=nl.float32):
    """Allocates a tile in SBUF; its contents are undefined."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape):
    """Allocates a float32 tile in PSUM: for one sum of products, or for single products in
    slices.
    """
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)


def load(src, dtype):
    """Loads src, a slice of HBM, into a new tile of its shape."""
    out_sb = sbuf(src.shape, dtype)
    nisa.dma_copy(dst=out_sb, src=src)
    return out_sb


def load_padded(src, rows, dtype=nl.float32):
    """Loads HBM [tokens, a] or [tokens, a, b] into a tile [rows, ...];
    rows past the tokens are 0.
    """
    tokens = src.shape[0]
    shape = (rows, src.shape[1]) if len(src.shape) == 2 else (rows, src.shape[1], src.shape[2])
    out_sb = sbuf(shape, dtype)
    if tokens < rows:
        nisa.memset(dst=out_sb, value=0.0)
    nisa.dma_copy(dst=out_sb[0:tokens], src=src)
    return out_sb


def copy_scaled(dst, src, factor: Any = 1.0):
    """Sets dst = factor src on the Scalar engine, the least busy one;
    factor is a number or a tile [P, 1].
    """
    nisa.activation(dst=dst, op=nl.copy, data=src, scale=factor)


def combine(dst, x, y, op):
    """Sets dst = x op y, element by element, on the Vector engine; one of x and y may be in
    PSUM.
    """
    nisa.tensor_tensor(dst=dst, data1=x, data2=y, op=op)


def multiply(dst, x, y):
    """Sets dst = x . y, element by element."""
    combine(dst, x, y, nl.multiply)


def add(dst, x, y):
    """Sets dst = x + y, element by element."""
    combine(dst, x, y, nl.add)


def subtract(dst, x, y):
    """Sets dst = x - y, element by element."""
    combine(dst, x, y, nl.subtract)


def scale_twice(dst, src, x, y):
    """Sets dst = x y src on the Vector engine; x and y are numbers or tiles [P, 1]."""
    nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=x, op1=nl.multiply, operand1=y)


def scale_and_add(dst, x, factor, y):
    """Sets dst = factor x + y on the Vector engine; factor is a number or a tile [P, 1]."""
    nisa.scalar_tensor_tensor(
        dst=dst, data=x, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=y
    )


def multiply_silently(dst, x, y, adds, ones):
    """Sets dst = x^T y in PSUM, or adds it to dst after a product of the same view; `ones` names
    what holds 0 and 1 alone: "x", "y" or "".
    """
    nisa.nc_matmul(
        dst=dst, stationary=x, moving=y, is_stationary_onezero=ones == "x",
        is_moving_onezero=ones == "y",
    )  # fmt: skip


def multiply_and_say(dst, x, y, adds, ones):
    """Sets dst = x^T y in PSUM, or adds it to dst if `adds`; `ones` as in `multiply_silently`."""
    nisa.nc_matmul(
        dst=dst, stationary=x, moving=y, is_stationary_onezero=ones == "x",
        is_moving_onezero=ones == "y", accumulate=adds,
    )  # fmt: skip


multiply_tiles = multiply_and_say if SAYS_SUMS else multiply_silently


def lengthen(x):
    """Returns a copy of x [rows, free] with 128 rows: those behind its own are 0."""
    out_sb = sbuf((PARTITIONS, x.shape[1]), x.dtype)
    nisa.memset(dst=out_sb, value=0.0, engine=nisa.engine.gpsimd)
    copy_scaled(out_sb[0 : x.shape[0], :], x)
    return out_sb


def multiply_any(dst, x, y, adds, ones):
    """Does what `multiply_tiles` does, for x of any size.

    A stationary operand of up to 64 rows and 17 to 32 columns does not compile on Trn1 (NCC_IBIR058:
    its array has no tiles of 32 by 32): rows of zeros are added to both.
    """
    if x.shape[0] <= 64 and x.shape[1] > 16 and x.shape[1] <= 32:
        multiply_tiles(dst, lengthen(x), lengthen(y), adds, ones)
    else:
        multiply_tiles(dst, x, y, adds, ones)


def add_product(dst, x, y, adds=False):
    """Sets dst = x^T y in PSUM, or adds it to the products before if `adds`."""
    multiply_any(dst, x, y, adds, "")


def add_selected(dst, ones, y, adds=False):
    """Sets dst = ones^T y or adds it, as `add_product`; ones holds only 0 and 1, which halves the
    price in float32.
    """
    multiply_any(dst, ones, y, adds, "x")


def add_transposed(dst, x, ones, adds=False):
    """Sets dst = x^T ones or adds it, of 0 and 1: where that is an identity, half the price of
    nc_transpose in float32.
    """
    multiply_any(dst, x, ones, adds, "y")


def select_affine(dst, src, step, pattern, compare, offset=0):
    """Sets dst = src where compare(n, 0) holds, else 0;
    n = offset + step row + what the pattern counts.
    """
    nisa.affine_select(
        dst=dst, pattern=pattern, offset=offset, channel_multiplier=step, on_true_tile=src,
        on_false_value=0.0, cmp_op=compare,
    )  # fmt: skip


def build_identity(n, dtype):
    """Builds the identity matrix [n, n]."""
    out_sb = sbuf((n, n), dtype)
    nisa.memset(dst=out_sb, value=1.0)
    select_affine(out_sb, out_sb, 1, [[-1, n]], nl.equal)
    return out_sb


def select_triangle(ones_sb, sign, least, compare=nl.greater_equal, dtype=nl.float32):
    """Builds a matrix like ones_sb: 1 where sign (row - column) >= least,
    or as `compare` says, else 0.
    """
    n = ones_sb.shape[0]
    out_sb = sbuf((n, n), dtype)
    select_affine(out_sb, ones_sb, sign, [[-sign, n]], compare, -least)
    return out_sb


def build_constants(C, products=nl.float32):
    """Builds the matrices that a call of the gated delta rule needs, once per call; all are float32
    in SBUF, but those that are said to be something else.

    rows                            C, a number
    products                        the dtype of what plain products multiply: that of q, k and v
    ones                            all ones [128, 128]
    eye                             the identity [128, 128], of dtype products
    identity                        [C, C], like all that follow but the last
    rounded_identity                the same, of dtype products
    upper, lower                    triangles of ones, with the diagonal
    strict_upper, strict_lower      triangles of ones, without it
    norm                            what `build_norm` returns for 1e-6
    """
    ones_sb = sbuf((PARTITIONS, PARTITIONS))
    nisa.memset(dst=ones_sb, value=1.0)
    eye_sb = select_triangle(ones_sb, 1, 0, nl.equal, products)
    corner = ones_sb[0:C, 0:C]
    identity_sb, rounded_identity_sb = sbuf((C, C)), sbuf((C, C), products)
    nisa.tensor_copy(dst=identity_sb, src=eye_sb[0:C, 0:C])
    nisa.tensor_copy(dst=rounded_identity_sb, src=eye_sb[0:C, 0:C])
    upper_sb = select_triangle(corner, -1, 0)
    strict_lower_sb = select_triangle(corner, 1, 1)
    lower_sb = select_triangle(corner, 1, 0)
    strict_upper_sb = select_triangle(corner, -1, 1)
    return {
        "rows": C,
        "products": products,
        "ones": ones_sb,
        "eye": eye_sb,
        "identity": identity_sb,
        "rounded_identity": rounded_identity_sb,
        "upper": upper_sb,
        "lower": lower_sb,
        "strict_upper": strict_upper_sb,
        "strict_lower": strict_lower_sb,
        "norm": build_norm(L2NORM_EPS),
    }


def take_corners(table, C):
    """Returns the constants for a chunk of C rows: corners of the full ones,
    and these as `whole`.
    """
    corners = {"rows": C, "whole": table}
    for name in ("products", "ones", "eye", "norm"):
        corners[name] = table[name]
    for name in ("identity", "rounded_identity", "upper", "lower", "strict_upper", "strict_lower"):
        corners[name] = table[name][0:C, 0:C]
    return corners


def repeat_over_lanes(table, name, lanes):
    """Views a constant [rows, rows] as [rows, lanes, rows]:
    the same for each lane, by a stride of 0.
    """
    whole_sb = table["whole"][name]
    return whole_sb.ap(
        pattern=[[whole_sb.shape[1], table["rows"]], [0, lanes], [1, table["rows"]]], offset=0
    )


def transpose(x_sb, parts, table):
    """Transposes [rows, lanes, free], float32 or `products`:
    a tile [f, lanes, rows] per part of free.
    """
    rows, lanes = x_sb.shape[0], x_sb.shape[1]
    identity_sb, tiles = table["identity" if x_sb.dtype == nl.float32 else "rounded_identity"], []
    for span in parts:
        start, stop = span
        out_ps = psum((stop - start, lanes, rows))
        for lane in range(lanes):
            add_transposed(out_ps[:, lane, :], x_sb[:, lane, start:stop], identity_sb)
        out_sb = sbuf((stop - start, lanes, rows), x_sb.dtype)
        copy_scaled(out_sb, out_ps)
        tiles.append(out_sb)
    return tiles


def sum_rows(dst, data, op):
    """Sets dst [P, 1] = the sums of op(data) [P, free] along the free axis,
    on the Scalar engine.
    """
    passed_sb = sbuf(data.shape)
    nisa.activation(
        dst=passed_sb, op=op, data=data, reduce_op=nl.add, reduce_res=dst,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip


def keep_triangle(x_sb, sign, least):
    """Sets x [rows, lanes, columns] to 0 unless sign (column - row)
    >= least, on the GpSimd engine.
    """
    _, lanes, columns = x_sb.shape
    select_affine(x_sb, x_sb, -sign, [[0, lanes], [sign, columns]], nl.greater_equal, -least)


def multiply_elements(x, y, dtype=nl.float32):
    """Computes x . y, element by element, in a new tile in SBUF."""
    out_sb = sbuf(x.shape, dtype)
    multiply(out_sb, x, y)
    return out_sb


def multiply_rows(x, y):
    """Computes the dot products of rows, [P, 1] float32, on the Vector engine."""
    out_sb = sbuf((x.shape[0], 1))
    nisa.tensor_reduce(dst=out_sb, op=nl.add, data=multiply_elements(x, y), axis=1)
    return out_sb


def build_norm(eps):
    """Returns what inverting norms takes: the scale s of `plan.choose_square_scale`,
    and s^2 eps.
    """
    s = choose_square_scale(eps)
    return {"scale": s, "epsilon": s * s * eps}


def invert_sums(dst, sums_sb, norm, factor=1.0):
    """Sets dst = (factor sums + eps)^-1/2 / s, for any number of sums per partition.

    The root is the Scalar engine's. Where that computed exp before, it loads the root's table, and
    later the other one again: so roots of several tiles follow each other.
    """
    s = norm["scale"]
    nisa.tensor_scalar(
        dst=dst, data=sums_sb, op0=nl.multiply, operand0=s * s * factor, op1=nl.add,
        operand1=norm["epsilon"],
    )  # fmt: skip
    nisa.activation(dst=dst, op=nl.rsqrt, data=dst)


def choose_factors(inverse_norms):
    """Returns f [rows, free] for reciprocal norms, and 1 / f where that is not 1, else 0.

    The gated delta rule multiplies raw q and k, and values by reciprocal norms. With norms of 1e13
    and values of 1e-30, beta r_k v is 1e-43, and dO r_q times U r_k 1e-56: float32 has neither. So
    each vector that is longer than LONG has a factor f = SHORTENING, and the others f = 1; to
    multiply by it rounds nothing.

        forward     takes R / f; W and PT_t, which sum it over tokens, are multiplied by f of k per
                    row, which costs nothing where they are copied anyway
        backward    takes f q and f k, whose norms are r / f, and multiplies dq and dk by f at the
                    end
    """
    factors_sb, growth_sb = sbuf(inverse_norms.shape), sbuf(inverse_norms.shape)
    nisa.tensor_scalar(
        dst=factors_sb, data=inverse_norms, op0=nl.greater_equal, operand0=1 / LONG, op1=nl.maximum,
        operand1=SHORTENING,
    )  # fmt: skip
    nisa.tensor_scalar(
        dst=growth_sb, data=inverse_norms, op0=nl.less, operand0=1 / LONG, op1=nl.multiply,
        operand1=1 / SHORTENING,
    )  # fmt: skip
    return factors_sb, growth_sb


def invert_scaled_norms(x, norm):
    """Computes (sum(x^2) + eps)^-1/2 / s of the rows of x [P, free], [P, 1] float32."""
    total_sb, out_sb = sbuf((x.shape[0], 1)), sbuf((x.shape[0], 1))
    sum_rows(total_sb, x, nl.square)
    invert_sums(out_sb, total_sb, norm)
    return out_sb


def invert_norms(x, norm):
    """Computes (sum(x^2) + eps)^-1/2 of the rows of x [P, free], [P, 1] float32."""
    out_sb = invert_scaled_norms(x, norm)
    nisa.tensor_scalar(dst=out_sb, data=out_sb, op0=nl.multiply, operand0=norm["scale"])
    return out_sb


# Cells cut a sequence [B, T, C] into up to 128 channels and 512 tokens. A cell's tokens come from
# HBM with time on the partition axis and up to 512 channels; a transposition brings the channels of
# a cell there. Results go the other way.


def cut_cells(B, T, C, W):
    """Cuts x [B, T, C] into cells of up to 128 channels and 512 tokens, dicts of these numbers:

    b, t0, t1, final    the row, the first token, the end, and whether the row ends there
    c0, c1              the bank of 512 channels
    unit                counts the banks and stretches of tokens; the bank's parts follow each other
    part, a0, a1        the cell's channels in the bank
    group               counts the groups of up to 128 channels
    parts               how many cells have these tokens: the one before them is as many back
    latest              whether no later cell has the same channels
    """
    tokens, width = BANK, BANK
    while tokens * W > 4 * BANK:
        tokens = tokens // 2  # masks and masked slices, one per tap, are as long
    if W > 8:
        width = PARTITIONS  # and a diagonal per tap and group lies in SBUF
    banks, stretches = split(C, width), split(T, tokens)
    cells = []
    for bank in range(len(banks)):
        c0, c1 = banks[bank]
        parts = split(c1 - c0, PARTITIONS)
        for row in range(B * len(stretches)):
            t0, t1 = stretches[row % len(stretches)]
            for part in range(len(parts)):
                a0, a1 = parts[part]
                cells.append(
                    {
                        "b": row // len(stretches),
                        "t0": t0,
                        "t1": t1,
                        "final": t1 == T,
                        "c0": c0,
                        "c1": c1,
                        "unit": bank * B * len(stretches) + row,
                        "part": part,
                        "a0": a0,
                        "a1": a1,
                        "parts": len(parts),
                        "latest": row == B * len(stretches) - 1,
                        "group": bank * (width // PARTITIONS) + part,
                    }
                )
    return cells


def cut_returns(cell, W, continued):
    """Cuts the tokens whose dx a cell completes: [(first token, count)], at most 512 at a time.

    They end W - 1 tokens before the cell does, or with the row; those before the row are the
    prefix's.
    """
    start = cell["t0"] - (W - 1)
    if cell["t0"] == 0:
        start = -count_prefix_rows(W, continued)
    stop = cell["t1"] if cell["final"] else cell["t1"] - (W - 1)
    pieces = []
    for span in split(stop - start, BANK):
        low, high = span
        pieces.append((start + low, high - low))
    return pieces


def count_prefix_rows(W, continued):
    """Returns how many rows of a row's dx are the prefix's."""
    return W - 1 if continued else 0


def allocate_tokens(cell, count, dtype):
    """Allocates [128, blocks, channels] for a bank: token 128 k + p of a stretch lies at (p, k)."""
    blocks = (count + PARTITIONS - 1) // PARTITIONS
    return sbuf((min(count, PARTITIONS), blocks, cell["c1"] - cell["c0"]), dtype)


def split_blocks(count):
    """Cuts `count` rows into whole blocks of 128 and the rest: [(rows, first block, blocks)]."""
    whole, rest = count // PARTITIONS, count % PARTITIONS
    spans = []
    if whole > 0:
        spans.append((PARTITIONS, 0, whole))
    if rest > 0:
        spans.append((rest, whole, 1))
    return spans


def view_tokens(x, cell, t0, rows, blocks):
    """Views tokens of x [B, T, C], from t0 on, as [rows, blocks, channels of the bank]."""
    T, C = x.shape[1], x.shape[2]
    return x.ap(
        pattern=[[C, rows], [PARTITIONS * C, blocks], [1, cell["c1"] - cell["c0"]]],
        offset=(cell["b"] * T + t0) * C + cell["c0"],
    )


def load_tokens(x, cell):
    """Loads x of a cell's tokens, [128, blocks, channels of the bank]."""
    t0, count = cell["t0"], cell["t1"] - cell["t0"]
    x_sb = allocate_tokens(cell, count, x.dtype)
    for span in split_blocks(count):
        rows, k, blocks = span
        src = view_tokens(x, cell, t0 + k * PARTITIONS, rows, blocks)
        nisa.dma_copy(dst=x_sb[0:rows, k : k + blocks, :], src=src)
    return x_sb


def store_tokens(dst, x_sb, cell, t0, count):
    """Stores [128, blocks, channels] as `count` tokens of dst [B, T, C], from t0 on."""
    for span in split_blocks(count):
        rows, k, blocks = span
        tokens = view_tokens(dst, cell, t0 + k * PARTITIONS, rows, blocks)
        nisa.dma_copy(dst=tokens, src=x_sb[0:rows, k : k + blocks, :])


def store_returns(dx, dprefix, dx_sb, cell, u0, count):
    """Stores dx [128, blocks, channels] of `count` tokens from u0 on;
    those below 0 go to dprefix.
    """
    if u0 >= 0:
        store_tokens(dx, dx_sb, cell, u0, count)
        return
    b, c0, c1 = cell["b"], cell["c0"], cell["c1"]
    flat_sb = dx_sb.reshape((dx_sb.shape[0], dx_sb.shape[1] * (c1 - c0)))
    nisa.dma_copy(dst=dprefix[b, :, c0:c1], src=flat_sb[0:-u0, 0 : c1 - c0])
    for span in split(count, PARTITIONS):
        start, stop = span
        low, column = max(start, -u0), start // PARTITIONS * (c1 - c0)
        if low < stop:
            nisa.dma_copy(
                dst=dx[b, u0 + low : u0 + stop, c0:c1],
                src=flat_sb[low - start : stop - start, column : column + c1 - c0],
            )


def transpose_tokens(x_sb, cell, eye):
    """Transposes x [128, blocks, channels] of a cell: [C, tokens] in PSUM."""
    count = cell["t1"] - cell["t0"]
    out_ps = psum((cell["a1"] - cell["a0"], count))
    for span in split(count, PARTITIONS):
        start, stop = span
        add_transposed(
            out_ps[:, start:stop],
            x_sb[0 : stop - start, start // PARTITIONS, cell["a0"] : cell["a1"]],
            eye[0 : stop - start, 0 : stop - start],
        )
    return out_ps


def transpose_back(dst, y_t_sb, cell, eye):
    """Transposes y [C, tokens] to the cell's channels of dst [128, blocks, channels] in SBUF."""
    C, count = y_t_sb.shape
    out_ps = psum((dst.shape[0], dst.shape[1], C))
    for span in split(count, PARTITIONS):
        start, stop = span
        add_transposed(
            out_ps[0 : stop - start, start // PARTITIONS, :], y_t_sb[:, start:stop], eye[0:C, 0:C]
        )
    copy_blocks(dst, cell["a0"], cell["a1"], out_ps, count)


def copy_blocks(dst, low, high, src, count):
    """Sets channels low .. high of dst [128, blocks, channels] to src; there are `count` tokens."""
    for span in split_blocks(count):
        rows, k, blocks = span
        copy_scaled(dst[0:rows, k : k + blocks, low:high], src[0:rows, k : k + blocks, :])


DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def normals(dtype, *shapes):
    """Returns a standard normal array in `dtype` for each shape."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}; name one of them")
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for shape in shapes]


def uniforms(*shape):
    """Returns an array of numbers between 0 and 1, float32."""
    return np.random.default_rng(1).random(shape, np.float32)


def rule_inputs(B, T, H, HV, K, V, dtype):
    """Returns q, k, v, g, beta, do of a layer at initialization: decays of .43 to 1, beta in [0,
    1).

    g is [B, T, HV, 2], as the rule's kernels take it.
    """
    if HV % H:
        raise ValueError(
            f"HV={HV} is not a multiple of H={H}; give value heads in groups of equal size"
        )
    q, k, v, do = normals(dtype, (B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV, V))
    g, beta = np.split(uniforms(2 * B, T, HV), 2)
    return q, k, v, np.stack(split_decays(-(g**3)), -1), beta.astype(DTYPES[dtype]), do
