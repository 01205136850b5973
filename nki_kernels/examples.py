"""Makes seeded arguments for `delta-trn simulator report`; the `example` of each kernel uses them."""

import ml_dtypes
import numpy as np

from delta_trn.nki_kernels.plan import split_decays

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
    """Returns q, k, v, g, beta, do of a layer at initialization: decays of .43 to 1, beta in [0, 1).

    g is [B, T, HV, 2], as the rule's kernels take it.
    """
    if HV % H:
        raise ValueError(f"HV={HV} is not a multiple of H={H}; give value heads in groups of equal size")
    q, k, v, do = normals(dtype, (B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV, V))
    g, beta = np.split(uniforms(2 * B, T, HV), 2)
    return q, k, v, np.stack(split_decays(-(g**3)), -1), beta.astype(DTYPES[dtype]), do
