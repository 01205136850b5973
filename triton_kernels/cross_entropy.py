"""Cross-entropy of rows of logits and its gradient, which takes their place.

For one row z [V]; both results are 0 for rows that do not count:

    loss = logsumexp(z) - z[goal]
    dz   = softmax(z) - onehot(goal)         [V]

A program passes over a row twice: the first pass keeps a running maximum and sum in every lane
(arXiv:1805.02867); the second, which finds a small vocabulary in cache, writes dz over z. The
products around it are left to the vendor's library, a thousand tokens at a time, so no more logits
than theirs are ever stored: the scheme of Liger Kernel (arXiv:2410.10989), which would be a
dependency for this one kernel, needs CUDA to be imported, and has no multiplier of the logits.

Layout: z [M, V] contiguous; goal, keep, loss [M].
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's decorator adds the launch arguments and gives its own functions their types at compile
# time)
import triton
import triton.language as tl

from delta_trn.triton_kernels.launch import arithmetic, take_turns, tile
from delta_trn.triton_kernels.tiles import round_to
from delta_trn.triton_kernels.variants import Variant

TYPES = {"*x": "z", "*fp32": "keep loss", "*i64": "goal", "i32": "V"}


@triton.jit
def softmax_kernel(
    z, goal, keep, loss, V, BV: tl.constexpr, GRADIENT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes loss, and with GRADIENT writes dz over z; one program per row."""
    i_m = tl.program_id(0).to(tl.int64)
    p_z = z + i_m * V
    b_max = tl.full([BV], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BV], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_z = tl.load(p_z + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_max, b_z)
        # of a lane that has seen nothing yet: exp(-inf - -inf) would be NaN
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp(b_max - b_base) + tl.exp(b_z - b_base)
        b_max = b_new
    top = tl.max(b_max, axis=0)
    total = tl.log(tl.sum(b_sum * tl.exp(b_max - top), axis=0)) + top
    i_goal = tl.load(goal + i_m)
    counts = tl.load(keep + i_m).to(tl.float32)
    # a goal outside the vocabulary gives NaN, not another row's logit
    b_goal = tl.load(p_z + i_goal, mask=(i_goal >= 0) & (i_goal < V), other=float("nan")).to(
        tl.float32
    )
    tl.store(loss + i_m, (total - b_goal) * counts)
    if GRADIENT:
        # z[goal] is read by every warp and written by one: without a barrier, the loss could be
        # made of dz
        tl.debug_barrier()
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_z = tl.load(p_z + o_v, mask=o_v < V, other=0.0).to(tl.float32)
            b_dz = (tl.exp(b_z - total) - tl.where(o_v == i_goal, 1.0, 0.0)) * counts
            tl.store(p_z + o_v, round_to(b_dz, z.dtype.element_ty, DOT), mask=o_v < V)


@take_turns
def softmax_(z, goal, keep, loss, *, gradient):
    """Launches `softmax_kernel`: fills loss, and with `gradient` puts dz in place of z."""
    M, V = z.shape
    row = tile("cross_entropy", V)
    softmax_kernel[(M,)](
        z, goal, keep, loss, V, BV=row.columns, GRADIENT=gradient, DOT=arithmetic(),
        **row.options(),
    )  # fmt: skip


def variants(_: int, V: int, itemsize: int, quick: bool):
    """Yields what `compile_only` compiles of this module."""
    row = tile("cross_entropy", V)
    values = {"BV": row.columns, "GRADIENT": True, "DOT": "ieee"}
    yield Variant("cross_entropy", "", softmax_kernel, TYPES, row, values)
