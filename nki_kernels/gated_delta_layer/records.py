"""Names what a layer's kernels hold on chip beside the tiles of the rule:
per chunk, and per bundle.
"""

from typing import Any

from delta_trn.nki_kernels.language import nl


class LayerTiles(nl.NKIObject):
    """Has the tiles of the norm and the convolution of one chunk of one bundle;
    stages fill them in.
    """

    index: Any = 0  # of the chunk
    start: Any = 0  # its first token
    tokens: Any = 0
    rows: Any = 0
    # The gated norm, in the letters of `nki_kernels.gated_rms_norm`: tiles [rows, lanes, V]
    o: Any = None
    o_squares: Any = None  # their sums [rows, lanes]
    r: Any = None  # [rows, lanes]
    h: Any = None
    gate: Any = None  # forward: SiLU(z) times the gain; backward: m = dy SiLU(z)
    z: Any = None
    dy: Any = None
    slope: Any = None  # dy SiLU'(z)
    n: Any = None  # m w, in the place of m
    nh: Any = None
    do: Any = None
    # The convolution, backward
    kept: Any = None  # the state that the chunk meets, as forward kept it
    u: Any = None  # views [channels, tokens]
    du: Any = None  # SiLU'(u), then du [rows, columns]
    taps: Any = None  # per step what taps read of x
    products: Any = None  # per step what `multiply_taps` returns
    leaving: Any = None  # what `allocate_leaving` makes, for the chunk before
    dx_sums: Any = None  # per cell dx, in PSUM
    keep: Any = None  # of packed sequences, what `load_masks` returns
    counts: Any = None


class LayerStream(nl.NKIObject):
    """Has what a bundle keeps from chunk to chunk."""

    bundle: Any = None  # one of `plan.list_bundles`
    chunks: Any = None  # a list of `Chunk`
    own: Any = None  # a list of `LayerTiles`
    spaces: Any = None  # of `triangular.allocate_workspace`
    S: Any = None  # forward: the state, a tile [f, lanes, V] per part of K
    taps: Any = None  # forward: per group of channels what `load_taps` returns
    tails: Any = None  # forward: per cell the last columns of its window, for the next stretch
    keep: Any = None  # forward: what `build_masks` returns for a stretch
    x: Any = None  # forward: what is loaded of x, for several cells
    y_t: Any = None  # forward: [(cell, what the convolution made [channels, tokens])]
    transposed: Any = None  # forward: per chunk q_t, and k_t, where heads fill whole cells
    dS: Any = None  # backward, like all that follow: the state's gradient
    plan: Any = None  # what `convolution.outline` returns
    weights: Any = None  # what `load_weights` returns
    counts: Any = None  # what `build_counts` returns
    sums: Any = None  # of taps and of the gain, in PSUM
    begun: Any = False  # whether `sums` has a product yet
