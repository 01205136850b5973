"""Computes Deep Delta Learning's residual update, one rank-1 correction per token; forward and
backward.

For one token, X [D, DV], k [D], v [DV], scalar beta; y = r k with r = (k.k + k_eps^2)^-1/2, or r =
1 where the operation does not normalize:

    p  = X^T y                    [DV]      what the stream holds along y
    X' = X + beta y (v - p)^T     [D, DV]

Backward, from dX', with s = dX'^T y and e = v - p [DV]:

    dX = dX' - beta y s^T     dv = beta s     dbeta = s . e
    a  = dX' e - X s          [D]
    dk = r beta a - k r^2 beta (dbeta - p . s)          (without normalization: dk = beta a)

for dy = beta a, dk = r (dy - y (y . dy)) and y . dy = beta (s . e - p . s). Source: "Deep Delta
Learning", the delta operator with a value row; the gradients are derived here. Sums are float32.

Layout: x [M, D, DV]; k [M, D]; v [M, DV]; beta [M]; M tokens, 128 at a time, one per partition.
Every product is then between numbers of one partition. The Vector engine needs 4 D DV cycles
forward (2 for X k, 2 for X + k w), while the Scalar engine sums over D, and 6 D DV backward. There
`a` would take 4 more; the Tensor engine is idle, so it sums dX'_j diag(e_j) - X_j diag(s_j) over
the columns j, in float32 like everything else. X stays on chip between the two passes over D where
D DV fits; where not, it is read twice.
"""

from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, split
from delta_trn.nki_kernels.tiles import (
    add,
    add_product,
    build_identity,
    build_norm,
    invert_norms,
    load,
    multiply,
    multiply_elements,
    multiply_rows,
    normals,
    psum,
    sbuf,
    scale_and_add,
    scale_twice,
    subtract,
    sum_rows,
    uniforms,
)

RESIDENT = 8 * 1024  # numbers of X per partition, forward: 32 of 176 KiB, and as much for X k
RESIDENT_BACKWARD = 5 * 1024  # of X, and of dX': 20 of 176 KiB each, and a bfloat16 copy
BANKS = 4  # of PSUM's 8 for a block of a
MOST_D = 12 * 1024
LEAST_EPS = 2.0**-43  # its square is above 2^-87, from where on rsqrt is right


@nki.jit
def delta_residual_fwd(x, k, v, beta, k_eps):
    """Computes X' [M, D, DV] in x's dtype; with k_eps = 0, k stays as it is."""
    M, D, DV = x.shape
    check(D, k_eps)
    out = nl.ndarray((M, D, DV), dtype=x.dtype, buffer=nl.shared_hbm)
    beta = beta.reshape((M, 1))
    blocks = split(D, choose_block(D, DV, RESIDENT))
    for span in split(M, PARTITIONS):
        start, stop = span
        k_sb = load(k[start:stop, :], k.dtype)
        v_sb = load(v[start:stop, :], v.dtype)
        beta_sb = load(beta[start:stop, :], nl.float32)
        resident = []
        p_sb, w_sb = sbuf((stop - start, DV)), sbuf((stop - start, DV))
        for block in blocks:
            d0, d1 = block
            x_sb = load(x[start:stop, d0:d1, :], x.dtype)
            add_projection(p_sb, x_sb, k_sb, d0)
            resident.append(x_sb)
        # w = beta r (v - r p), so that X' = X + k w^T
        r_sb = invert_key_norms(k_sb, k_eps)
        nisa.scalar_tensor_tensor(
            dst=w_sb,
            data=p_sb,
            op0=nl.multiply,
            operand0=r_sb,
            op1=nl.subtract,
            operand1=v_sb,
            reverse1=True,
        )
        scale_twice(w_sb, w_sb, beta_sb, r_sb)
        for block in blocks:
            d0, d1 = block
            x_sb = resident[0]
            if len(resident) > 1:
                x_sb = load(x[start:stop, d0:d1, :], x.dtype)
            add_outer(x_sb, x_sb, k_sb, w_sb, d0)
            nisa.dma_copy(dst=out[start:stop, d0:d1, :], src=x_sb)
    return out


@nki.jit
def delta_residual_bwd(dout, x, k, v, beta, k_eps):
    """Computes (dx, dk, dv, dbeta), each shaped and typed like its input."""
    M, D, DV = x.shape
    check(D, k_eps)
    dx = nl.ndarray((M, D, DV), dtype=x.dtype, buffer=nl.shared_hbm)
    dk = nl.ndarray((M, D), dtype=k.dtype, buffer=nl.shared_hbm)
    dv = nl.ndarray((M, DV), dtype=v.dtype, buffer=nl.shared_hbm)
    dbeta = nl.ndarray((M,), dtype=beta.dtype, buffer=nl.shared_hbm)
    beta, dbeta_rows = beta.reshape((M, 1)), dbeta.reshape((M, 1))
    eye_sb = build_identity(PARTITIONS, nl.float32)
    blocks = split(D, choose_block(D, DV, min(RESIDENT_BACKWARD, BANKS * BANK * DV)))
    for span in split(M, PARTITIONS):
        start, stop = span
        count = stop - start
        k_sb = load(k[start:stop, :], k.dtype)
        v_sb = load(v[start:stop, :], v.dtype)
        beta_sb = load(beta[start:stop, :], nl.float32)
        resident = []
        p_sb, s_sb, e_sb, w_sb = (
            sbuf((count, DV)),
            sbuf((count, DV)),
            sbuf((count, DV)),
            sbuf((count, DV)),
        )
        for block in blocks:
            d0, d1 = block
            x_sb = load_float32(x[start:stop, d0:d1, :])
            dout_sb = load_float32(dout[start:stop, d0:d1, :])
            add_projection(p_sb, x_sb, k_sb, d0)
            add_projection(s_sb, dout_sb, k_sb, d0)
            resident.append((x_sb, dout_sb))

        r_sb, beta_r_sb = invert_key_norms(k_sb, k_eps), sbuf((count, 1))
        nisa.tensor_scalar(dst=p_sb, data=p_sb, op0=nl.multiply, operand0=r_sb)
        nisa.tensor_scalar(dst=s_sb, data=s_sb, op0=nl.multiply, operand0=r_sb)
        multiply(beta_r_sb, beta_sb, r_sb)
        subtract(e_sb, v_sb, p_sb)
        dbeta_sb = multiply_rows(s_sb, e_sb)
        along_sb = sbuf((count, 1))  # -r^2 beta (s . e - p . s): what dk has along k
        subtract(along_sb, multiply_rows(p_sb, s_sb), dbeta_sb)
        scale_twice(along_sb, along_sb, beta_r_sb, r_sb)
        if k_eps == 0:
            nisa.memset(dst=along_sb, value=0.0)
        dv_sb, rounded_sb = sbuf((count, DV), v.dtype), sbuf((count, 1), beta.dtype)
        nisa.tensor_scalar(dst=dv_sb, data=s_sb, op0=nl.multiply, operand0=beta_sb)
        nisa.dma_copy(dst=dv[start:stop, :], src=dv_sb)
        nisa.tensor_copy(dst=rounded_sb, src=dbeta_sb)
        nisa.dma_copy(dst=dbeta_rows[start:stop, :], src=rounded_sb)

        # w = -beta r s, so that dX = dX' + k w^T
        scale_twice(w_sb, s_sb, beta_r_sb, -1.0)
        for block in blocks:
            d0, d1 = block
            x_sb, dout_sb = resident[0]
            if len(resident) > 1:
                x_sb = load_float32(x[start:stop, d0:d1, :])
                dout_sb = load_float32(dout[start:stop, d0:d1, :])
            sums = []  # of a, one per bank of PSUM
            for bank in split(d1 - d0, BANK):
                low, high = bank
                sums.append((low, high, psum((count, high - low))))
            for j in range(DV):
                e_diagonal_sb = build_diagonal(e_sb[:, j : j + 1], eye_sb, 1.0)
                s_diagonal_sb = build_diagonal(s_sb[:, j : j + 1], eye_sb, -1.0)
                for entry in sums:
                    low, high, a_ps = entry
                    add_product(a_ps, e_diagonal_sb, dout_sb[:, low:high, j], j > 0)
                    add_product(a_ps, s_diagonal_sb, x_sb[:, low:high, j], True)
            dx_sb = sbuf((count, d1 - d0, DV), x.dtype)
            add_outer(dx_sb, dout_sb, k_sb, w_sb, d0)  # meanwhile the Tensor engine sums
            nisa.dma_copy(dst=dx[start:stop, d0:d1, :], src=dx_sb)
            for entry in sums:
                low, high, a_ps = entry
                dk_sb, k_part_sb = sbuf((count, high - low), k.dtype), sbuf((count, high - low))
                nisa.tensor_scalar(
                    dst=k_part_sb,
                    data=k_sb[:, d0 + low : d0 + high],
                    op0=nl.multiply,
                    operand0=along_sb,
                )
                scale_and_add(dk_sb, a_ps, beta_r_sb, k_part_sb)
                nisa.dma_copy(dst=dk[start:stop, d0 + low : d0 + high], src=dk_sb)
    return dx, dk, dv, dbeta


def check(D, k_eps):
    """Refuses keys that fill SBUF, and an epsilon that rsqrt would get wrong."""
    assert D <= MOST_D, f"D={D} exceeds {MOST_D}: keys stay on chip whole"
    if k_eps != 0:
        assert k_eps >= LEAST_EPS, (
            f"k_eps={k_eps} is below {LEAST_EPS}, where rsqrt of its square is wrong"
        )


def invert_key_norms(k_sb, k_eps):
    """Computes r of the keys, [P, 1]; 1 where k_eps is 0."""
    if k_eps > 0:
        return invert_norms(k_sb, build_norm(k_eps * k_eps))
    r_sb = sbuf((k_sb.shape[0], 1))
    nisa.memset(dst=r_sb, value=1.0)
    return r_sb


def choose_block(D, DV, most):
    """Returns how much of D goes into a block of at most `most` numbers of X."""
    return min(D, max(1, most // DV))


def add_projection(p_sb, x_sb, k_sb, d0):
    """Adds X^T k over one block of D, which begins at d0, to p [P, DV];
    the first block (d0 = 0) sets p.
    """
    count, size, DV = x_sb.shape
    # k [count, D], its block from d0 on, seen as [count, size, DV]: the same for each column, a
    # stride of 0
    repeated = k_sb.ap(pattern=[[k_sb.shape[1], count], [1, size], [0, DV]], offset=d0)
    product_sb = multiply_elements(x_sb, repeated)
    part_sb = p_sb if d0 == 0 else sbuf((count, DV))
    for j in range(DV):
        sum_rows(part_sb[:, j : j + 1], product_sb[:, :, j], nl.copy)
    if d0 > 0:
        add(p_sb, p_sb, part_sb)


def add_outer(out_sb, x_sb, k_sb, w_sb, d0):
    """Sets out = X + k w^T over one block of D, which begins at d0; out may be x."""
    size, DV = x_sb.shape[1], x_sb.shape[2]
    for j in range(DV):
        scale_and_add(out_sb[:, :, j], k_sb[:, d0 : d0 + size], w_sb[:, j : j + 1], x_sb[:, :, j])


def load_float32(src):
    """Loads src and converts it on the Scalar engine:
    the Tensor engine takes no bfloat16 beside float32.
    """
    out_sb = load(src, src.dtype)
    if src.dtype == nl.float32:
        return out_sb
    wide_sb = sbuf(src.shape)
    nisa.activation(dst=wide_sb, op=nl.copy, data=out_sb)
    return wide_sb


def build_diagonal(x_sb, eye_sb, sign):
    """Builds diag(sign x) [P, P] from x [P, 1]."""
    count = x_sb.shape[0]
    out_sb = sbuf((count, count))
    scale_twice(out_sb, eye_sb[0:count, 0:count], x_sb, sign)
    return out_sb


def example(M=256, D=768, DV=4, dtype="float32", backward=0):
    """Returns (kernel, arguments) for the simulator's report; backward=1 for the gradients."""
    x, dout, k, v = normals(dtype, (M, D, DV), (M, D, DV), (M, D), (M, DV))
    if backward:
        return delta_residual_bwd, (dout, x, k, v, 2 * uniforms(M), 1e-5)
    return delta_residual_fwd, (x, k, v, 2 * uniforms(M), 1e-5)
