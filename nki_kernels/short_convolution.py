"""Computes the short convolution: causal, depthwise, over time, then SiLU; forward and backward.

    z_t = sum_j w_j x_{t - W + 1 + j}     y = SiLU(z)              W taps

    dz = dy SiLU'(z)     dx_t = sum_j w_j dz_{t + W - 1 - j}     dw_j = sum_t dz_t x_{t - W + 1 + j}

Layout: x, y, dy, dx [B, T, C]; weight, dweight [C, W]; position [T], of each token in its packed
sequence (B is 1 then): tap j reads from its own sequence where position >= W - 1 - j. Before a
sequence there are zeros or, where a call continues what an earlier one began, prefix [B, W - 1, C],
the inputs before x. The gradient of the prefix is dx at the times before 0.

Time is the partition axis of x in HBM, and nothing shifts along partitions. So a cell, 128 channels
of up to 512 tokens, is transposed, which makes a tap a slice of the free axis. Most taps are
products of diag(w_j) with a slice, which add up in PSUM; the Vector engine adds the last one, so
that no engine is busy alone. The sum is rounded to the dtype of x and transposed back. A cell
continues the one before it: the last W - 1 columns of x and of dz are copied from there. So dx lags
W - 1 tokens behind dz. Backward computes z again, as forward leaves nothing but y.

A float32 product takes four passes of the Tensor engine, a bfloat16 one takes one. For bfloat16
inputs w is therefore a sum of bfloat16 numbers, and each of them costs a pass: two for y, which is
rounded to bfloat16 anyway, and three, which hold all digits, for the z of backward. For dx, dz is a
sum of two such numbers, too, as terms of dx may cancel. dweight is as exact as in float32.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import PARTITIONS, list_due
from delta_trn.nki_kernels.tiles import (
    add,
    add_product,
    add_transposed,
    allocate_tokens,
    build_identity,
    copy_scaled,
    cut_cells,
    cut_returns,
    load,
    load_tokens,
    multiply,
    normals,
    psum,
    sbuf,
    scale_and_add,
    store_returns,
    store_tokens,
    subtract,
    sum_rows,
    transpose_back,
    transpose_tokens,
)

MOST_W = 32
ON_VECTOR = 1  # taps of z that the Vector engine takes; none of dx

# How many cells a stage is behind the first one; see the pseudocode of the kernels.
WINDOWS, SUMS, SILU, RESULTS = 0, 1, 2, 3
SLOPES, GRADIENTS, RETURNS, PRODUCTS, STORES, TOTALS = 2, 3, 4, 5, 6, 7


@nki.jit
def short_convolution_fwd(x, weight, position, packed, prefix, continued):
    """Computes y [B, T, C] in x's dtype.

    Args:
        x, weight       as the module says
        position        read if `packed`, else any tensor
        prefix          in x's dtype, read if `continued`, else any tensor

    Notes:
        A cell passes four stages, and four cells are on their way, each a stage behind the one
        before: an engine that runs its instructions in order then waits for none of the others.

    Pseudocode:
        for cell:
            WINDOWS     window = x of the cell and W - 1 tokens before, transposed
            SUMS        z = sum over taps of w_j window_j
            SILU        y = SiLU(z)
            RESULTS     y, transposed back
    """
    B, T, C = x.shape
    W = weight.shape[1]
    check(B, W, packed, continued)
    y = nl.ndarray((B, T, C), dtype=x.dtype, buffer=nl.shared_hbm)
    eye = build_identity(PARTITIONS, x.dtype)
    cells = cut_cells(B, T, C, W)
    n = len(cells)
    taps = []  # per group of channels
    x_sb, keep, y_sb = [], [], []  # per bank and stretch of tokens
    windows, z, y_t = [], [], []  # per cell
    for i in range(n + RESULTS):
        for j in list_due(i - WINDOWS, n):
            cell = cells[j]
            if cell["group"] == len(taps):
                taps.append(load_taps(weight, cell, 2, max(1, W - ON_VECTOR), eye))
            if cell["part"] == 0:
                x_sb.append(load_tokens(x, cell))
                keep.append(build_masks(position, packed, cell["t0"], cell["t1"], W))
            windows.append(
                load_window(x_sb[cell["unit"]], prefix, continued, cell, windows, W, eye)
            )
        for j in list_due(i - SUMS, n):
            cell = cells[j]
            slices = slice_window(windows[j], keep[cell["unit"]], W)
            z.append(sbuf(slices[0].shape))
            sum_taps(z[j], [slices], taps[cell["group"]], ON_VECTOR, 2)
        for j in list_due(i - SILU, n):
            y_t.append(sbuf(z[j].shape, x.dtype))
            nisa.activation(dst=y_t[j], op=nl.silu, data=z[j])
        for j in list_due(i - RESULTS, n):
            cell = cells[j]
            count = cell["t1"] - cell["t0"]
            if cell["part"] == 0:
                y_sb.append(allocate_tokens(cell, count, x.dtype))
            transpose_back(y_sb[cell["unit"]], y_t[j], cell, eye)
            if cell["part"] == cell["parts"] - 1:
                store_tokens(y, y_sb[cell["unit"]], cell, cell["t0"], count)
    return y


@nki.jit
def short_convolution_bwd(dy, x, weight, position, packed, prefix, continued):
    """Computes dx [B, T, C], dweight [C, W] and, if `continued`, dprefix [B, W - 1, C]; dtypes of
    inputs.

    Notes:
        Eight cells are on their way, each a stage behind the one before.

    Pseudocode:
        for cell:
            WINDOWS     window = x of the cell and W - 1 tokens before, transposed
            SUMS        z = sum over taps of w_j window_j
            SLOPES      slope = SiLU'(z)
            GRADIENTS   dz = slope dy, transposed
            RETURNS     returns = dz as each tap sees it, and W - 1 tokens before
            PRODUCTS    products_j = dz window_j;  dx = sum over taps of w_j returns_j
            STORES      sums_j = sum over time of products_j;  dx, transposed back
            TOTALS      dw_j += sums_j
    """
    B, T, C = x.shape
    W = weight.shape[1]
    check(B, W, packed, continued)
    dx = nl.ndarray((B, T, C), dtype=x.dtype, buffer=nl.shared_hbm)
    dprefix = dx
    if continued:
        dprefix = nl.ndarray((B, W - 1, C), dtype=x.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((C, W), dtype=weight.dtype, buffer=nl.shared_hbm)
    eye = build_identity(PARTITIONS, x.dtype)
    cells = cut_cells(B, T, C, W)
    n = len(cells)
    taps, totals = [], []  # per group of channels
    x_sb, dy_sb, keep, dx_sb = [], [], [], []  # per bank and stretch of tokens
    windows, slices, z, slopes, dz, returns, products, dx_t, sums = (
        [],
        [],
        [],
        [],
        [],
        [],
        [],
        [],
        [],
    )
    for i in range(n + TOTALS):
        for j in list_due(i - PRODUCTS, n):
            products.append(multiply_slices(slices[j], dz[j]))
        for j in list_due(i - RETURNS, n):
            cell = cells[j]
            returns.append(collect_returns(dz[j], keep[cell["unit"]], cell, returns, W, x.dtype))
        for j in list_due(i - WINDOWS, n):
            cell = cells[j]
            if cell["group"] == len(taps):
                taps.append(load_taps(weight, cell, 3, W, eye))
                totals.append(sbuf((cell["a1"] - cell["a0"], W)))
                nisa.memset(dst=totals[cell["group"]], value=0.0)
            if cell["part"] == 0:
                x_sb.append(load_tokens(x, cell))
                dy_sb.append(load_tokens(dy, cell))
                keep.append(build_masks(position, packed, cell["t0"], cell["t1"], W))
            windows.append(
                load_window(x_sb[cell["unit"]], prefix, continued, cell, windows, W, eye)
            )
        for j in list_due(i - PRODUCTS, n):
            cell = cells[j]
            dx_t.append([])
            for piece in cut_returns(cell, W, continued):
                u0, count = piece
                wanted = slice_returns(returns[j], u0 - cell["t0"], count)
                dx_t[j].append(sbuf(wanted[0][0].shape, x.dtype))
                sum_taps(dx_t[j][len(dx_t[j]) - 1], wanted, taps[cell["group"]], 0, 2)
        for j in list_due(i - STORES, n):
            cell = cells[j]
            pieces = cut_returns(cell, W, continued)
            if cell["part"] == 0:
                dx_sb.append([])
            for k in range(len(pieces)):
                u0, count = pieces[k]
                if cell["part"] == 0:
                    dx_sb[cell["unit"]].append(allocate_tokens(cell, count, x.dtype))
                transpose_back(dx_sb[cell["unit"]][k], dx_t[j][k], cell, eye)
                if cell["part"] == cell["parts"] - 1:
                    store_returns(dx, dprefix, dx_sb[cell["unit"]][k], cell, u0, count)
        for j in list_due(i - SUMS, n):
            cell = cells[j]
            slices.append(slice_window(windows[j], keep[cell["unit"]], W))
            z.append(sbuf(slices[j][0].shape))
            sum_taps(z[j], [slices[j]], taps[cell["group"]], ON_VECTOR, 3)
        for j in list_due(i - GRADIENTS, n):
            dz.append(sbuf(slopes[j].shape))
            dy_ps = transpose_tokens(dy_sb[cells[j]["unit"]], cells[j], eye)
            multiply(dz[j], slopes[j], dy_ps)
        for j in list_due(i - SLOPES, n):
            slopes.append(sbuf(z[j].shape))
            nisa.activation(dst=slopes[j], op=nl.silu_dx, data=z[j])
        for j in list_due(i - STORES, n):
            sums.append(sum_products(products[j]))
        for j in list_due(i - TOTALS, n):
            add_total(dweight, totals[cells[j]["group"]], sums[j], cells[j])
    if continued:
        return dx, dweight, dprefix
    return dx, dweight


def check(B, W, packed, continued):
    """Refuses what the kernels do not hold."""
    assert W <= MOST_W, f"W={W} exceeds {MOST_W} taps: a mask and a diagonal per tap lie in SBUF"
    assert W > 1 or not continued, "W=1 looks back at nothing: leave the prefix out"
    assert not (packed and continued), "packed sequences begin with zeros: leave the prefix out"
    assert B == 1 or not packed, f"B={B} rows cannot be packed: position is that of one row"


def load_taps(weight, cell, parts, count, eye):
    """Loads the w of a cell's channels, and builds what products with its first `count` taps need.

    w           [channels, W] float32
    diagonals   [channels, count, channels]: diag(w_j) in float32 or, for bfloat16 inputs, `parts`
                of it in bfloat16: the first is w rounded, each further one the rounded rest
    """
    C, W = cell["a1"] - cell["a0"], weight.shape[1]
    start = cell["c0"] + cell["a0"]
    w_sb = load(weight[start : start + C, :], nl.float32)
    factors = [w_sb]
    if eye.dtype != nl.float32:
        for k in range(parts - 1):
            rounded_sb, rest_sb = sbuf((C, W), eye.dtype), sbuf((C, W))
            nisa.tensor_copy(dst=rounded_sb, src=factors[k])
            subtract(rest_sb, factors[k], rounded_sb)
            factors.append(rest_sb)
    diagonals = []
    for k in range(len(factors)):
        diagonals_sb = sbuf((C, count, C), eye.dtype)
        for j in range(count):
            factor, corner = factors[k][:, j : j + 1], eye[0:C, 0:C]
            if k == 1:  # the Scalar and the Vector engine share the work
                copy_scaled(diagonals_sb[:, j, :], corner, factor)
            else:
                nisa.tensor_scalar(
                    dst=diagonals_sb[:, j, :], data=corner, op0=nl.multiply, operand0=factor
                )
        diagonals.append(diagonals_sb)
    return {"w": w_sb, "diagonals": diagonals}


def build_masks(position, packed, t0, t1, W):
    """Builds masks [128, t1 - t0] for the taps 0 to W - 2:
    1 where a tap stays in the token's sequence.
    """
    masks = []
    if not packed:
        return masks
    position_sb = sbuf((PARTITIONS, t1 - t0))  # the same on all partitions
    nisa.dma_copy(
        dst=position_sb, src=position.ap(pattern=[[0, PARTITIONS], [1, t1 - t0]], offset=t0)
    )
    for j in range(W - 1):
        keep_sb = sbuf((PARTITIONS, t1 - t0))
        nisa.tensor_scalar(
            dst=keep_sb, data=position_sb, op0=nl.greater_equal, operand0=float(W - 1 - j)
        )
        masks.append(keep_sb)
    return masks


def load_window(x_sb, prefix, continued, cell, windows, W, eye):
    """Transposes x of a cell, and of the W - 1 tokens before it: [channels, W - 1 + tokens]."""
    C, count = cell["a1"] - cell["a0"], cell["t1"] - cell["t0"]
    window_sb = sbuf((C, W - 1 + count), x_sb.dtype)
    copy_scaled(window_sb[:, W - 1 : W - 1 + count], transpose_tokens(x_sb, cell, eye))
    if W == 1:
        return window_sb
    if cell["t0"] > 0:
        copy_tail(window_sb, windows[len(windows) - cell["parts"]], W - 1)
    elif continued:
        start = cell["c0"] + cell["a0"]
        prefix_sb = load(prefix[cell["b"], :, start : start + C], window_sb.dtype)
        prefix_ps = psum((C, W - 1))
        add_transposed(prefix_ps, prefix_sb, eye[0 : W - 1, 0 : W - 1])
        nisa.tensor_copy(dst=window_sb[:, 0 : W - 1], src=prefix_ps)
    else:
        nisa.memset(dst=window_sb[:, 0 : W - 1], value=0.0)
    return window_sb


def copy_tail(dst, before, count):
    """Copies the last `count` columns of the tile before to the first ones of dst."""
    columns = before.shape[1]
    nisa.tensor_copy(dst=dst[:, 0:count], src=before[:, columns - count : columns])


def slice_window(window_sb, masks, W):
    """Returns what each tap reads, [channels, tokens]."""
    count = window_sb.shape[1] - (W - 1)
    slices = []
    for j in range(W):
        if j < len(masks):
            masked_sb = sbuf((window_sb.shape[0], count), window_sb.dtype)
            multiply(masked_sb, window_sb[:, j : j + count], masks[j][0 : window_sb.shape[0], :])
            slices.append(masked_sb)
        else:
            slices.append(window_sb[:, j : j + count])
    return slices


def collect_returns(dz_sb, masks, cell, returns, W, dtype):
    """Returns dz as each tap sees it, with that of the W - 1 tokens before: [part][tap][C, W - 1 +
    tokens].

    In bfloat16 it has two parts: dz rounded, and the rounded rest. Before a row dz is 0 and, in W -
    1 columns more, behind it.
    """
    C, count = dz_sb.shape
    columns = 2 * (W - 1) + count if cell["final"] else W - 1 + count
    parts = [[]] if dtype == nl.float32 else [[], []]
    for j in range(W):
        seen_sb = dz_sb
        if j < len(masks):
            seen_sb = sbuf((C, count))
            multiply(seen_sb, dz_sb, masks[j][0:C, :])
        for k in range(len(parts)):
            if j > len(masks):
                parts[k].append(parts[k][j - 1])  # what no mask changes is the same for all of them
                continue
            tap_sb = sbuf((C, columns), dtype)
            inside = tap_sb[:, W - 1 : W - 1 + count]
            if k == 0:
                copy_scaled(inside, seen_sb)
            else:
                rounded = parts[0][j][:, W - 1 : W - 1 + count]
                subtract(inside, seen_sb, rounded)
            if W > 1 and cell["t0"] == 0:
                nisa.memset(dst=tap_sb[:, 0 : W - 1], value=0.0)
            elif W > 1:
                copy_tail(tap_sb, returns[len(returns) - cell["parts"]][k][j], W - 1)
            if W > 1 and cell["final"]:
                nisa.memset(dst=tap_sb[:, W - 1 + count : columns], value=0.0)
            parts[k].append(tap_sb)
    return parts


def slice_returns(returns, offset, count):
    """Returns the dz that each tap gives back to `count` tokens, the first one `offset` behind the
    cell's.

    Tap j gives the dz of token t to token t - (W - 1) + j.
    """
    parts = []
    for k in range(len(returns)):
        W = len(returns[k])
        slices = []
        for j in range(W):
            start = offset + 2 * (W - 1) - j
            slices.append(returns[k][j][:, start : start + count])
        parts.append(slices)
    return parts


def sum_taps(dst, slices, taps, on_vector, parts):
    """Sets dst [C, tokens] to the sum over taps of w_j slices_j, in float32 before the last
    rounding.

    slices, [part][tap], and w have parts for bfloat16 inputs, each 2^-8 of the one before; the
    products of parts whose numbers add up to less than `parts` count. The Vector engine takes the
    last `on_vector` taps, but never all.
    """
    W = len(slices[0])
    on_tensor = max(1, W - on_vector)
    total, adds = psum(slices[0][0].shape), False
    for j in range(on_tensor):
        for k in range(len(slices)):
            for m in range(min(parts - k, len(taps["diagonals"]))):
                add_product(total, taps["diagonals"][m][:, j, :], slices[k][j], adds)
                adds = True
    for j in range(on_tensor, W):
        out_sb = dst if j == W - 1 else sbuf(dst.shape)
        scale_and_add(out_sb, slices[0][j], taps["w"][:, j : j + 1], total)
        total = out_sb
    if on_tensor == W:
        copy_scaled(dst, total)


def multiply_slices(slices, dz_sb):
    """Computes dz times what each tap saw, [channels, tokens] per tap."""
    products = []
    for j in range(len(slices)):
        product_sb = sbuf(dz_sb.shape)
        multiply(product_sb, slices[j], dz_sb)
        products.append(product_sb)
    return products


def sum_products(products):
    """Sums the products over time: dw [channels, W] of a cell."""
    out_sb = sbuf((products[0].shape[0], len(products)))
    for j in range(len(products)):
        sum_rows(out_sb[:, j : j + 1], products[j], nl.copy)
    return out_sb


def add_total(dweight, total_sb, sum_sb, cell):
    """Adds a cell's dw [channels, W] to that of its channels,
    and stores that after their last cell.
    """
    add(total_sb, total_sb, sum_sb)
    if cell["latest"]:
        start = cell["c0"] + cell["a0"]
        dweight_sb = sbuf(total_sb.shape, dweight.dtype)
        nisa.tensor_copy(dst=dweight_sb, src=total_sb)
        nisa.dma_copy(dst=dweight[start : start + total_sb.shape[0], :], src=dweight_sb)


def example(B=1, T=1024, C=3072, W=4, dtype="float32", backward=0):
    """Returns (kernel, arguments) for the simulator's report; backward=1 for the gradients."""
    x, dy = normals(dtype, (B, T, C), (B, T, C))
    weight = normals("float32", (C, W))[0]
    if backward:
        return short_convolution_bwd, (dy, x, weight, x, False, x, False)
    return short_convolution_fwd, (x, weight, x, False, x, False)
