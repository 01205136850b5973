"""Computes a layer's mixer as `fwd` does, and its projections and gates in the same kernel.

    x = W h     z = W_z h       g and beta as `gates` makes them of a and b
    y as `gated_delta_layer_fwd` makes it of x, z, g and beta

The Tensor engine, which waits for the others in `fwd`, makes x and z meanwhile.
"""

from delta_trn.nki_kernels.gated_delta_layer.fwd import compute_layer
from delta_trn.nki_kernels.gated_delta_layer.gates import start as start_gates
from delta_trn.nki_kernels.gated_delta_layer.projection import start
from delta_trn.nki_kernels.language import nki, nl
from delta_trn.nki_kernels.plan import list_weight_cells
from delta_trn.nki_kernels.tiles import normals


@nki.jit
def projected_delta_layer_fwd(
    hidden, projection, gate_projection, weight, a, b, A_log, dt_bias, biased, gain, position, packed, K,
    scale, eps, beta_max, save, every, C, lanes, width,
):  # fmt: skip
    """Computes a layer's mixer over whole sequences, of hidden states.

    Dimensions are those of `gated_delta_layer_fwd`; d, a multiple of 128, is the width of hidden states.

    Args:
        hidden              [N, T, d]
        projection          [cells, 128, d / 128, 128]: W as `projection` has it
        gate_projection     [d, HV V]: W_z, transposed
        save                keep what `gated_delta_layer_bwd` takes
        a, b                [N, T, HV] float32
        A_log, dt_bias      [HV]; dt_bias is read if `biased`, and may else be any tensor
        weight, gain, position, packed, K, scale, eps, every, C, lanes, width   as in
                            `gated_delta_layer_fwd`

    Returns:
        y               [N, T, HV, V] in hidden's dtype
        q, k, v, o, u, states   as `gated_delta_layer_fwd` with save = 2, only with `save`
        x, z                    [N, T, channels] and [N, T, HV, V] in hidden's dtype, only with `save`
        g, beta, slopes         as `gates` has them, only with `save`
    """
    N, T, d = hidden.shape
    HV, V, channels = a.shape[2], gain.shape[0], weight.shape[0]
    H = (channels - HV * V) // (2 * K)
    assert d % 128 == 0, f"d={d} is no multiple of 128, the rows of a product"
    cells = list_weight_cells(H, HV, K, V, width)
    if save:
        z = nl.ndarray((N, T, HV, V), dtype=hidden.dtype, buffer=nl.shared_hbm)
        x = nl.ndarray((N, T, channels), dtype=hidden.dtype, buffer=nl.shared_hbm)
    else:
        z = nl.ndarray((N, T, HV, V), dtype=hidden.dtype, buffer=nl.private_hbm)
        x = z
    own = start(hidden, projection, cells, gate_projection, x, z.reshape((N, T, HV * V)))
    gates = start_gates(a, b, A_log, dt_bias, biased, beta_max, position, packed, save)
    own["gates"] = gates
    made = compute_layer(
        x, weight, gates["g"], gates["beta"], z, gain, position, packed, weight, False, weight, False, own, K,
        scale, eps, 2 if save else 0, every, C, lanes, width,
    )  # fmt: skip
    if save:
        q, k, v = made["saved"]
        g, beta, slopes = gates["g"], gates["beta"], gates["slopes"]
        if made["kept"] > 0:
            return made["y"], q, k, v, made["o"], made["u"], made["states"], x, z, g, beta, slopes
        return made["y"], q, k, v, made["o"], made["u"], x, z, g, beta, slopes
    return made["y"]


def example(
    B=1, T=1024, H=6, K=128, V=256, HV=0, W=4, d=1024, dtype="bfloat16", save=0, C=128, lanes=6, width=3
):  # fmt: skip
    """Returns the kernel and its arguments, as in evaluation, or as in training with save=1."""
    HV = HV or H
    channels, cells = 2 * H * K + HV * V, len(list_weight_cells(H, HV, K, V, width))
    hidden, projection, gate = normals(dtype, (B, T, d), (cells, 128, d // 128, 128), (d, HV * V))
    weight, gain, a, b, A_log, dt_bias = normals(
        "float32", (channels, W), (V,), (B, T, HV), (B, T, HV), (HV,), (HV,)
    )
    return projected_delta_layer_fwd, (
        hidden, projection, gate, weight, a, b, A_log, dt_bias, True, gain, weight, False, K, K**-0.5, 1e-5,
        1.0, save > 0, save, C, lanes, width,
    )  # fmt: skip
