"""Names the tiles of a chunk: a record that the stages of the gated delta rule's kernels fill in.

Every release of NKI from 0.2.0 on takes an `NKIObject` whose fields helpers set; AWS's own kernels
hold their buffers so. The letters are those of `nki_kernels.chunk` and, backward, of
`nki_kernels.chunk_gradients`.
"""

from typing import Any

from delta_trn.nki_kernels.language import nl


class Chunk(nl.NKIObject):
    """Has the tiles of one chunk of one bundle; stages fill them in."""

    start: Any = 0  # its first token
    tokens: Any = 0
    table: Any = None  # the constants for its rows
    # What is loaded
    qk: Any = None  # raw q and k [rows, 2, key heads, K]; backward multiplies long ones by f
    v: Any = None  # raw V [rows, lanes, V]
    g: Any = None  # [rows, lanes, 2]
    beta: Any = None  # [rows, lanes]; backward raises it to LEAST_STRENGTH
    do: Any = None  # dO, rounded [rows, lanes, V]
    # Sums, and numbers per token
    factors: Any = None  # of gamma and lambda [rows, 2, lanes, 2]
    carry_factors: Any = None  # of carry [min(K, 128), lanes, 2]
    spread: Any = None  # what D's sums add: two tiles [rows, lanes, rows]
    squares: Any = None  # squared norms of q and k [rows, 2, key heads]
    inverse_norms: Any = ()  # (r_q and r_k [rows, 2, key heads],), or () if not normalized
    gamma: Any = None  # [rows, lanes], like all up to minus_strength_gamma
    lambda_: Any = None
    value_scale: Any = None  # beta r_k
    read_scale: Any = None  # scale r_q
    minus_strength: Any = None  # -beta r_k^2
    minus_strength_gamma: Any = None
    carry: Any = None  # gamma_C on as many partitions as a state has [min(K, 128), lanes]
    growth: Any = ()  # forward: f of k, a column [rows, 1] per lane, or ()
    shortening: Any = ()  # backward: (f of q and k [rows, 2 key heads],), or ()
    diagonals: Any = None  # diag(-beta r_k^2) [rows, lanes, rows]
    # Matrices
    k_t: Any = None  # K^T, a tile [f, key heads, rows] per part of K
    q_t: Any = None  # Q^T
    lambda_k: Any = None  # diag(lambda) K [rows, lanes, K]
    beta_v: Any = None  # diag(beta r_k) V [rows, lanes, V]
    gamma_q: Any = None  # diag(gamma) Q, rounded [rows, lanes, K]
    gamma_q_t: Any = None  # its transpose, a tile [f, lanes, rows] per part of K
    D_t: Any = None  # D^T [rows, lanes, rows], like all up to P_t
    weighted_D_t: Any = None  # D^T diag(-beta)
    minus_L_t: Any = None
    P_t: Any = None
    block_columns: Any = None  # of L, what `spread_blocks` takes
    columns: Any = None  # of L's blocks, of all chunks that are inverted at the same time
    solution: Any = None  # of the substitution in these blocks, of all these chunks
    first_lane: Any = 0  # of this chunk in `columns` and in `solution`
    T_t: Any = None  # [rows, lanes, rows], like T
    T: Any = None
    odd: Any = None  # of T_t, what `list_odd_columns` returns
    # A decay per channel, `nki_kernels.kimi_delta_attention`; gamma is [rows, lanes, K] there
    keys: Any = None  # normalized q and k of each lane [rows, 2, lanes, K]
    qk_t: Any = None  # their transposes [K, 2, lanes, rows]
    own: Any = None  # forward <q_i, k_i>, backward <dO_i, U_i> [rows, lanes]
    exponentials: Any = None  # of gamma and of lambda, two factors each, the second one in PSUM
    channel_lambda: Any = None  # lambda [rows, lanes, K]
    scaled: Any = None  # what `multiply_factors` makes
    pairs: Any = None  # P^T and kk^T [rows, lanes, 2, rows]
    halves: Any = None  # what `round_pair_gradients` makes, and `mask_pair_gradients`
    masked: Any = None
    level_tiles: Any = None  # what `differentiate_levels` has made of the last level
    dg_ps: Any = None  # dg in PSUM [rows, lanes K]
    dqk_ps: Any = None  # dq and dk in PSUM, a tile [rows, lanes K] each
    # What T and the state make
    W: Any = None  # [rows, lanes, K]
    PT_t: Any = None  # forward: (P T)^T, rounded [rows, lanes, rows]
    S_rounded: Any = None
    R: Any = None  # [rows, lanes, V]
    R_rounded: Any = None
    # Backward alone
    inverse_beta: Any = None  # 1 / the raised beta [rows, lanes]
    share: Any = None  # the given beta over the raised one, 1 but where beta is tiny [rows, lanes]
    dv_scale: Any = None  # beta r_k [rows, lanes]
    P: Any = None  # in float32 alone [rows, lanes, rows]
    PT: Any = None  # P T, rounded; not in float32 [rows, lanes, rows]
    W_t: Any = None  # W^T, rounded, a tile [f, lanes, rows] per part of K; not in float32
    T_t_rounded: Any = None
    erased_k: Any = None  # diag(-beta gamma) K, rounded [rows, lanes, K]
    S: Any = None  # the state that the chunk meets, a tile [f, lanes, V] per part of K
    U: Any = None  # rounded [rows, lanes, V]
    U_exact: Any = None  # U / beta, float32, of the raised beta: not 0 where beta is 0, as U is
    dS: Any = None  # dS', of the state that the chunk leaves
    dS_rounded: Any = None
    dR: Any = None  # [rows, lanes, V]
    dR_rounded: Any = None
    do_t: Any = None  # transposes, a tile [f, lanes, rows] per part of V
    U_t: Any = None
    dR_t: Any = None
    S_t: Any = None  # a tile [f, lanes, K] per part of V
    dS_t: Any = None
    E: Any = None  # rounded [rows, lanes, rows]
    E_t: Any = None
    weighted_Z: Any = None  # diag(beta) Z, rounded [rows, lanes, rows]
    weighted_Z_t: Any = None
    reads_t: Any = None  # the two terms of F^T [rows, lanes, rows]
    erasures_t: Any = None
    crossing: Any = None  # sums of F [rows, lanes, rows]
    read_sums: Any = None  # sums of the rows of dO U^T . P [rows, lanes]
    read: Any = None  # per lane gamma dO S^T and -diag(beta) gamma dR S^T, rounded [rows, 2, K]
    written: Any = None  # per lane diag(lambda) U dS'^T, rounded [rows, K]
    dots: Any = None  # of rows of q and k with those of `read` [rows, lanes, 2]
    raw_dqk: Any = None  # dq and dk before the norms' gradients, two tiles [rows, K] per key head
    dqk: Any = None  # dq and dk [rows, 2, key heads, K], with a decay per channel of each lane
    along: Any = None  # -r^2 <x, dx> [rows, 2, key heads]
    reads: Any = None  # r, the reads of the state [rows, lanes]
    U_KdS: Any = None  # U . K dS' [rows, lanes, V]
    dS_S: Any = None  # dS' . S, a tile [f, lanes, V] per part of K
    dbeta: Any = None  # [rows, lanes]
    writes: Any = None  # w, what is written to the next state [rows, lanes]
    carried: Any = None  # gamma_C <dS', S>, not summed over K yet: a tile [f, lanes] per part of K


class Stream(nl.NKIObject):
    """Has what a bundle keeps from chunk to chunk."""

    bundle: Any = None  # one of `plan.list_bundles`
    chunks: Any = None  # a list of `Chunk`
    S: Any = None  # the state, a tile [f, lanes, V] per part of K
    dS: Any = None  # backward: the state's gradient
    spaces: Any = (
        None  # of `triangular.allocate_workspace`, for each chunk that is inverted at the same time
    )
