"""Computes the RMS norm of rows, times a gain, times SiLU of a gate; forward and backward.

    r = (mean(x^2) + eps)^-1/2     h = r x     y = h w SiLU(z)       (y = h w without a gate)

    m = dy SiLU(z)     n = m w     dw = sum over rows of m h     dz = dy h w SiLU'(z)
    dx = r (n - h mean(n h))

Layout: x, z, y and their gradients [..., V], M rows: tokens times heads; w [V].

A partition takes several rows, side by side on its free axis, so that a descriptor of DMA moves
kilobytes at V = 64 too. h and the gate never go to HBM: 3 M V numbers travel forward, 5 backward. A
product of two tensors takes the Vector engine two cycles per element, and one where an operand is
in PSUM: so w lies there. Numbers per row are the Scalar engine's.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import BANK, LEAST_RSQRT, PARTITIONS, list_due, split
from delta_trn.nki_kernels.tiles import (
    add_selected,
    build_norm,
    copy_scaled,
    invert_sums,
    load,
    multiply,
    normals,
    psum,
    sbuf,
    scale_and_add,
    sum_rows,
)

WIDTH, WIDTH_BACKWARD = 2048, 1024  # numbers of x per partition
MOST_AT_ONCE = 2048  # numbers per row with which several tiles of backward fit into SBUF
MOST_V = 8 * BANK


@nki.jit
def gated_rms_norm_fwd(x, z, weight, eps, gated):
    """Computes y [..., V] in x's dtype; z is read only if `gated`, and may else be any tensor.

    Notes:
        The sums of a tile's squares are one tile ahead of the rest, so that an engine, which runs
        its instructions in order, does not wait for the others.
    """
    check_eps(eps)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    x, y = flatten(x), flatten(out)
    if gated:
        z = flatten(z)
    M, V = x.shape
    w_sb = load_everywhere(weight)
    norm = build_norm(eps)
    cuts = cut_rows(M, V, WIDTH)
    tiles, r = [], []
    for i in range(len(cuts) + 1):
        if i < len(cuts):
            start, P, slots = cuts[i]
            tiles.append(load_rows(x, start, P, slots))
            r.append(invert_rms(tiles[i], norm))
        if i > 0:
            start, P, slots = cuts[i - 1]
            y_sb = sbuf((P, slots, V), x.dtype)
            if gated:
                gate_sb, h_sb = sbuf((P, slots, V)), sbuf((P, slots, V))
                nisa.activation(dst=gate_sb, op=nl.silu, data=load_rows(z, start, P, slots))
                scale_rows(h_sb, tiles[i - 1], r[i - 1], w_sb)
                multiply(y_sb, h_sb, gate_sb)
            else:
                scale_rows(y_sb, tiles[i - 1], r[i - 1], w_sb)
            store_rows(y, y_sb, start)
    return out


@nki.jit
def gated_rms_norm_bwd(dy, x, z, weight, eps, gated):
    """Computes (dx, dz, dweight), each shaped and typed like its input; (dx, dweight) where not
    `gated`.

    Notes:
        Four tiles are on their way, each a stage behind the one before, but rows of more than 2,048
        numbers fill SBUF one by one.

    Pseudocode:
        for tile:
            INPUTS      r;  SiLU(z) and SiLU'(z)
            PRODUCTS    h, m, n, dz and n h;  dw += m h
            SUMS        n - h mean(n h)
            RESULTS     dx
    """
    check_eps(eps)
    V = x.shape[len(x.shape) - 1]
    assert V <= MOST_V, f"V={V} exceeds {MOST_V}: dweight is summed in PSUM, one bank per {BANK}"
    dx_out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((V,), dtype=weight.dtype, buffer=nl.shared_hbm)
    dz_out = dx_out
    if gated:
        dz_out = nl.ndarray(z.shape, dtype=z.dtype, buffer=nl.shared_hbm)
        z = flatten(z)
    x, dy, dx, dz = flatten(x), flatten(dy), flatten(dx_out), flatten(dz_out)
    M = x.shape[0]
    w_sb = copy_to_psum(load_everywhere(weight))
    norm = build_norm(eps)
    ones_sb = sbuf((PARTITIONS, 1))
    nisa.memset(dst=ones_sb, value=1.0)
    sums = []  # of dweight, one per bank of PSUM
    for span in split(V, BANK):
        low, high = span
        sums.append((low, high, psum((1, high - low))))
    cuts = cut_rows(M, V, WIDTH_BACKWARD)
    lag = 1 if V <= MOST_AT_ONCE else 0
    x_sb, dy_sb, r, m, slope, h, n, nh, rest = [], [], [], [], [], [], [], [], []  # per tile
    for i in range(len(cuts) + 3 * lag):
        if lag > 0:  # RESULTS
            for j in list_due(i - 3 * lag, len(cuts)):
                store_results(dx, rest[j], r[j], cuts[j])
        else:  # INPUTS, where tiles are not on their way together
            load_inputs(x, dy, z, gated, cuts[i], norm, x_sb, dy_sb, r, m, slope)
        for j in list_due(i - lag, len(cuts)):  # PRODUCTS
            start, P, slots = cuts[j]
            w = repeat_row(w_sb, P, slots)
            h.append(sbuf((P, slots, V)))
            normalize_rows(h[j], x_sb[j], r[j])
            if gated:
                hw_sb, dz_sb = sbuf((P, slots, V)), sbuf((P, slots, V), z.dtype)
                multiply(slope[j], dy_sb[j], slope[j])
                multiply(m[j], dy_sb[j], m[j])
                multiply(hw_sb, h[j], w)
                multiply(dz_sb, slope[j], hw_sb)
                store_rows(dz, dz_sb, start)
            mh_sb = sbuf((P, slots, V))
            multiply(mh_sb, m[j], h[j])
            add_columns(sums, ones_sb, mh_sb, j > 0)
            nh.append(sbuf((P, slots, V)))
            multiply(nh[j], mh_sb, w)
            n.append(sbuf((P, slots, V)))
            multiply(n[j], m[j], w)
        for j in list_due(i - 2 * lag, len(cuts)):  # SUMS
            rest.append(subtract_projection(n[j], h[j], project(nh[j])))
        if lag == 0:
            store_results(dx, rest[i], r[i], cuts[i])
        elif i < len(cuts):
            load_inputs(x, dy, z, gated, cuts[i], norm, x_sb, dy_sb, r, m, slope)
    dweight_sb = sbuf((1, V), weight.dtype)
    for entry in sums:
        low, high, sum_ps = entry
        nisa.tensor_copy(dst=dweight_sb[:, low:high], src=sum_ps)
    nisa.dma_copy(dst=dweight.reshape((1, V)), src=dweight_sb)
    if not gated:
        return dx_out, dweight
    return dx_out, dz_out, dweight


def flatten(x):
    """Views x [..., V] in HBM as rows [M, V]."""
    last = len(x.shape) - 1
    M = 1
    for i in range(last):
        M = M * x.shape[i]
    return x.reshape((M, x.shape[last]))


def load_inputs(x, dy, z, gated, cut, norm, x_sb, dy_sb, r, m, slope):
    """Appends a tile's x, dy, r, SiLU(z) as m (dy without a gate)
    and SiLU'(z) to the lists of tiles.
    """
    start, P, slots = cut
    x_tile, dy_tile = load_rows(x, start, P, slots), load_rows(dy, start, P, slots)
    x_sb.append(x_tile)
    dy_sb.append(dy_tile)
    r.append(invert_rms(x_tile, norm))
    if not gated:
        m.append(dy_tile)
        return
    z_sb = load_rows(z, start, P, slots)
    gate_sb, slope_sb = sbuf(z_sb.shape), sbuf(z_sb.shape)
    turned = len(m) % 2 == 1  # every other tile begins with the function whose table is still there
    if not turned:
        nisa.activation(dst=gate_sb, op=nl.silu, data=z_sb)
    nisa.activation(dst=slope_sb, op=nl.silu_dx, data=z_sb)
    if turned:
        nisa.activation(dst=gate_sb, op=nl.silu, data=z_sb)
    m.append(gate_sb)
    slope.append(slope_sb)


def check_eps(eps):
    """Refuses an epsilon that rsqrt would get wrong."""
    assert eps >= LEAST_RSQRT, f"eps={eps} is below {LEAST_RSQRT}, where rsqrt is wrong"


def cut_rows(M, V, width):
    """Cuts the rows into whole tiles of `width` numbers per partition, the rest, and the last rows
    singly.

    Returns [(first row, partitions, rows per partition)].
    """
    slots = max(1, width // V)
    cuts = []
    start = 0
    while start < M:
        here = slots if M - start >= slots else 1
        P = min(PARTITIONS, (M - start) // here)
        cuts.append((start, P, here))
        start += P * here
    return cuts


def load_rows(x, start, P, slots):
    """Loads rows of x [M, V], from `start` on, as [P, slots, V]:
    `slots` consecutive rows per partition.
    """
    return load(view_rows(x, start, P, slots), x.dtype)


def store_rows(dst, x_sb, start):
    """Stores [P, slots, V] as rows of dst [M, V], from `start` on."""
    P, slots, _ = x_sb.shape
    nisa.dma_copy(dst=view_rows(dst, start, P, slots), src=x_sb)


def view_rows(x, start, P, slots):
    """Views rows of x [M, V], from `start` on, as [P, slots, V]."""
    V = x.shape[1]
    return x.ap(pattern=[[slots * V, P], [V, slots], [1, V]], offset=start * V)


def load_everywhere(weight):
    """Loads w [V] to all partitions, [128, V] float32."""
    V = weight.shape[0]
    out_sb = sbuf((PARTITIONS, V))
    nisa.dma_copy(dst=out_sb, src=weight.ap(pattern=[[0, PARTITIONS], [1, V]], offset=0))
    return out_sb


def copy_to_psum(w_sb):
    """Copies w [128, V] to PSUM, from where the Vector engine multiplies by it in half the time;
    returns it as it is where it is longer than a bank.
    """
    if w_sb.shape[1] > BANK:
        return w_sb
    out_ps = psum(w_sb.shape)
    copy_scaled(out_ps, w_sb)
    return out_ps


def sum_slots(x_sb, op):
    """Sums op(x) of every row, [P, slots]."""
    out_sb = sbuf((x_sb.shape[0], x_sb.shape[1]))
    for i in range(x_sb.shape[1]):
        sum_rows(out_sb[:, i : i + 1], x_sb[:, i, :], op)
    return out_sb


def invert_rms(x_sb, norm):
    """Computes r = (mean(x^2) + eps)^-1/2 of every row, [P, slots]."""
    return invert_squares(sum_slots(x_sb, nl.square), x_sb.shape[2], norm)


def invert_squares(squares_sb, V, norm):
    """Computes r of sums of V squares."""
    r_sb = sbuf(squares_sb.shape)
    invert_sums(r_sb, squares_sb, norm, 1.0 / V)
    nisa.tensor_scalar(dst=r_sb, data=r_sb, op0=nl.multiply, operand0=norm["scale"])
    return r_sb


def scale_rows(out_sb, x_sb, r_sb, w_sb):
    """Sets out = x r w: r [P, slots] is a number per row, w [128, V] the same for all."""
    P, slots = r_sb.shape
    for i in range(slots):
        nisa.scalar_tensor_tensor(
            dst=out_sb[:, i, :], data=x_sb[:, i, :], op0=nl.multiply, operand0=r_sb[:, i : i + 1],
            op1=nl.multiply, operand1=w_sb[0:P, :],
        )  # fmt: skip


def normalize_rows(out_sb, x_sb, r_sb, first=0):
    """Sets out = x r, of slots of x from `first` on: r [P, slots] is a number per row."""
    for i in range(out_sb.shape[1]):
        at = first + i
        copy_scaled(out_sb[:, i, :], x_sb[:, at, :], r_sb[:, at : at + 1])


def repeat_row(w_sb, P, slots):
    """Views w [128, V] as [P, slots, V]: the same for each slot, by a stride of 0."""
    V = w_sb.shape[1]
    return w_sb.ap(pattern=[[V, P], [0, slots], [1, V]], offset=0)


def add_columns(sums, ones_sb, x_sb, adds):
    """Adds the sums over rows of x [P, slots, V] to `sums`, in PSUM, or begins these unless
    `adds`.
    """
    for i in range(x_sb.shape[1]):
        for entry in sums:
            low, high, sum_ps = entry
            add_selected(sum_ps, ones_sb[0 : x_sb.shape[0], :], x_sb[:, i, low:high], adds or i > 0)


def project(nh_sb):
    """Computes -mean(n h) of every row, [P, slots]: what dx has along h."""
    out_sb = sum_slots(nh_sb, nl.copy)
    nisa.tensor_scalar(dst=out_sb, data=out_sb, op0=nl.multiply, operand0=-1.0 / nh_sb.shape[2])
    return out_sb


def subtract_projection(n_sb, h_sb, along_sb):
    """Computes n + h along of every row."""
    rest_sb = sbuf(n_sb.shape)
    for i in range(n_sb.shape[1]):
        scale_and_add(rest_sb[:, i, :], h_sb[:, i, :], along_sb[:, i : i + 1], n_sb[:, i, :])
    return rest_sb


def store_results(dx, rest_sb, r_sb, cut):
    """Stores dx = r rest of a tile, rounded."""
    dx_sb = sbuf(rest_sb.shape, dx.dtype)
    normalize_rows(dx_sb, rest_sb, r_sb)
    store_rows(dx, dx_sb, cut[0])


def example(M=6144, V=256, dtype="float32", backward=0):
    """Returns (kernel, arguments) for the simulator's report; backward=1 for the gradients."""
    x, z, dy = normals(dtype, (M, V), (M, V), (M, V))
    weight = normals("float32", (V,))[0]
    if backward:
        return gated_rms_norm_bwd, (dy, x, z, weight, 1e-5, True)
    return gated_rms_norm_fwd, (x, z, weight, 1e-5, True)
