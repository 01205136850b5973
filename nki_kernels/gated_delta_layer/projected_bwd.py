"""Computes the gradients of a layer's mixer as `bwd` does, and those of its hidden states and gates.

    x = W h     z = W_z h       dh = dx W + dz W_z, rows are tokens
    da = dg dg/da               db = dbeta dbeta/db, of the slopes that forward left

The Tensor engine, which waits for the others in `bwd`, makes dh meanwhile. dW and dW_z are sums over all
tokens, and so products of their own, of the dx and dz that the kernel leaves.
"""

from delta_trn.nki_kernels.gated_delta_layer import bwd
from delta_trn.nki_kernels.gated_delta_layer.bwd import compute_gradients
from delta_trn.nki_kernels.gated_delta_layer.projection_bwd import start
from delta_trn.nki_kernels.language import nki
from delta_trn.nki_kernels.tiles import normals, uniforms


@nki.jit
def projected_delta_layer_bwd(
    dy, projection, gate_projection, x, weight_t, q, k, v, o, u, g, beta, slopes, z, gain, position, packed,
    states, scale, eps, C, lanes, width,
):  # fmt: skip
    """Computes the gradients of `projected_delta_layer_fwd`, called with save = 1, every = 1 and the same C.

    Args:
        dy                  like y
        projection          [channels, d]: W
        gate_projection     [HV V, d]: W_z
        x, z, q, k, v, o, u, g, beta, slopes, states    as forward left them; states: any tensor if there is
                            but one chunk
        the others          as in `gated_delta_layer_bwd`; a wave holds all bundles of a sequence

    Returns:
        dhidden             [N, T, d] in W's dtype
        dx, dweight, dz, dgain      as `gated_delta_layer_bwd` returns them
        dgates              [N, T, HV, 2] float32: of a, and each token's share of that of A_log
        db                  [N, T, HV] float32
    """
    own = start(projection, gate_projection, slopes, x.shape[0], x.shape[1])
    made = compute_gradients(
        dy, x, weight_t, q, k, v, o, u, g, beta, z, gain, position, packed, weight_t, False, gain, False,
        gain, False, states, own, scale, eps, C, lanes, width,
    )  # fmt: skip
    return (
        made["projection"]["dhidden"], made["dx"], made["dweight"], made["dg"], made["dbeta"], made["dz"],
        made["dgain"],
    )  # fmt: skip


def example(
    B=1, T=1024, H=6, K=128, V=256, HV=0, W=4, d=1024, dtype="bfloat16", C=128, lanes=6, width=3
):  # fmt: skip
    """Returns the kernel and its arguments as in training."""
    _, given = bwd.example(B=B, T=T, H=H, K=K, V=V, HV=HV, W=W, dtype=dtype, C=C, lanes=lanes, width=width)
    dy, x, g = given[0], given[1], given[8]
    projection, gate_projection = normals(dtype, (x.shape[2], d), ((HV or H) * V, d))
    beta, slopes = uniforms(*g.shape[:3]), -uniforms(*g.shape[:3], 3)
    return projected_delta_layer_bwd, (
        dy, projection, gate_projection, x, *given[2:9], beta, slopes, *given[10:14], *given[20:]
    )  # fmt: skip
