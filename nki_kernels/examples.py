"""Arguments for `python -m nki_kernels.simulator report`: seeded inputs of a layer at initialization."""

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def inputs(B, T, H, HV, K, V, dtype):
    """q, k, v, g, beta, do: normal, g and do float32 and like v, decays of .43 to 1, beta in [0, 1)."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}; name one of them")
    if HV % H:
        raise ValueError(f"HV={HV} is not a multiple of H={H}; give value heads in groups of equal size")
    rng = np.random.default_rng(0)
    kind = DTYPES[dtype]
    q, k = (rng.standard_normal((B, T, H, K), np.float32).astype(kind) for _ in range(2))
    v, do = (rng.standard_normal((B, T, HV, V), np.float32).astype(kind) for _ in range(2))
    g = -(rng.random((B, T, HV), np.float32) ** 3)
    beta = rng.random((B, T, HV), np.float32).astype(kind)
    return q, k, v, g, beta, do
