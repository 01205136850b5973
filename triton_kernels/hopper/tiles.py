"""Pieces of Gluon kernels for Hopper: tiles of 64 rows whose layout in registers is placed by hand.

A tile [64, N] of four warps lies as wgmma leaves its result: warp w has rows 16 w to 16 w + 15; of
each 8 x 8 of them a lane has row lane / 4, and columns 2 (lane % 4) and the next. So cuts and joins
of columns, and the left operand of a product, move nothing between lanes; a block of 16 x 16 on the
diagonal is in one warp, in columns that no other of its lanes' rows has; the right operand of a
product lies in shared memory.

These are functions of Gluon, which compiles for NVIDIA's compute capability 9 and has no
interpreter.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false,
# reportIndexIssue=false (Gluon's decorator gives its own functions their types at compile time)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ACC16, ACC32, ACC64 = (
    gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]))
    for columns in (16, 32, 64)
)
ROW = gl.constexpr(gl.SliceLayout(1, ACC16.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, ACC16.value))
# one element per lane: of four blocks of rows, eight rows and four pairs of columns
LANE = gl.constexpr(gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
# start_copy(tile in shared memory, pointers, mask); newer releases have it by the first name
start_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# of float32, stored as ACC32 lies: eight columns of four rows next to each other lie in different
# banks
HELD = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def add(a, b):
    """Returns a + b, for associative_scan."""
    return a + b


@gluon.jit
def exp2(x):
    """Returns 2^x; 0 where that is below 2^-126."""
    form: gl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(form, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def larger(x, y):
    """Returns the larger one of two numbers, for `gl.reduce`."""
    return gl.maximum(x, y)


@gluon.jit
def halves(x, ACC: gl.constexpr):
    """Returns the left and the right half of the columns of x."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1] // 2
    left, right = gl.permute(gl.reshape(x, [M, 2, N]), [0, 2, 1]).split()
    return gl.convert_layout(left, ACC, assert_trivial=True), gl.convert_layout(
        right, ACC, assert_trivial=True
    )


@gluon.jit
def beside(left, right, ACC: gl.constexpr):
    """Returns the tile whose halves are left and right."""
    x = gl.permute(gl.join(left, right), [0, 2, 1])
    x = gl.reshape(x, [left.shape[0], 2 * left.shape[1]])
    return gl.convert_layout(x, ACC, assert_trivial=True)


@gluon.jit
def number_of_warp(o_row):
    """Returns the number of the warp that has each row.

    Where the compiler knows it to be the same in all lanes, it moves every comparison between two
    kinds of registers, so it is told nothing.
    """
    thread = gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [o_row], gl.int32, is_pure=True, pack=1
    )
    return thread // 32


@gluon.jit
def cut(x, i_w):
    """Returns of x [64, 64] each warp's block on the diagonal,
    and the first three parts of 16 columns.
    """
    left, right = halves(x, ACC32)
    x0, x1 = halves(left, ACC16)
    x2, x3 = halves(right, ACC16)
    own = gl.where(i_w == 0, x0, gl.where(i_w == 1, x1, gl.where(i_w == 2, x2, x3)))
    return own, x0, x1, x2


@gluon.jit
def sum_diagonal(own, b_below):
    """Returns the diagonal [64] of blocks on it; b_below:
    how far an element is below the diagonal.
    """
    return gl.sum(gl.where(b_below == 0, own, 0.0), axis=1)


@gluon.jit
def load_of_own_columns(s_x):
    """Returns s_x [4, 16] in shared memory as a tile [64, 16]:
    in each warp's rows, its own 16 values.
    """
    zeros = gl.reshape(gl.zeros([64, 16], gl.float32, ACC16), [4, 16, 16])
    x = s_x.load(gl.SliceLayout(1, zeros.type.layout))[:, None, :] + zeros
    return gl.convert_layout(gl.reshape(x, [64, 16]), ACC16, assert_trivial=True)


@gluon.jit
def choose(mask, a, b):
    """Returns a where mask is -1 and b where it is 0, of 16 bits:
    two elements by one instruction.
    """
    form: gl.constexpr = (
        "{.reg .b32 c; not.b32 c, $1; and.b32 c, c, $4; and.b32 $0, $1, $3; or.b32 $0,c,$0;}"
    )
    return gl.inline_asm_elementwise(
        form, "=&r,r,r,r,r", [mask, a, b], a.dtype, is_pure=True, pack=2
    )


@gluon.jit
def split_words(x, dtype: gl.constexpr):
    """Splits float32 x into two numbers of 16 bits, the first of them x rounded to nearest."""
    if dtype == gl.bfloat16:  # two elements at once, which the compiler does not find
        words: gl.constexpr = "{.reg .b32 a, b; cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 a, $0, 16; "
        rest: gl.constexpr = "and.b32 b, $0, 0xffff0000; sub.f32 a, $2, a; sub.f32 b, $3, b; "
        form: gl.constexpr = words + rest + "cvt.rn.bf16x2.f32 $1, b, a;}"
        high, low = gl.inline_asm_elementwise(
            form, "=&r,=r,r,r", [x], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        high = x.to(dtype)
        low = (x - high.to(gl.float32)).to(dtype)
    return high, low


@gluon.jit
def store_words(high, low):
    """Stores words in shared memory, as right operands."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [high.shape[0], high.shape[1]], high.dtype
    )
    s_high = gl.allocate_shared_memory(high.dtype, [high.shape[0], high.shape[1]], SHARED, high)
    s_low = gl.allocate_shared_memory(high.dtype, [high.shape[0], high.shape[1]], SHARED, low)
    return s_high, s_low


@gluon.jit
def start_product(a_high, a_low, s_high, s_low, start: gl.constexpr, ACC: gl.constexpr):
    """Starts a b, of three products of words; b:
    the square of the stored tile from row `start` on.
    """
    N: gl.constexpr = s_high.shape[1]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    a_high = gl.convert_layout(a_high, LEFT, assert_trivial=True)
    a_low = gl.convert_layout(a_low, LEFT, assert_trivial=True)
    b_high, b_low = s_high.slice(start, N, 0), s_low.slice(start, N, 0)
    x = gl.zeros([64, N], gl.float32, ACC)
    x = warpgroup_mma(a_high, b_high, x, use_acc=False, is_async=True)
    x = warpgroup_mma(a_low, b_high, x, is_async=True)
    return warpgroup_mma(a_high, b_low, x, is_async=True)


@gluon.jit
def _from_lane(x, lane):
    """Returns the x of another lane of the warp."""
    form: gl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    return gl.inline_asm_elementwise(form, "=f,f,r", [x, lane], gl.float32, is_pure=True, pack=1)


@gluon.jit
def invert_blocks(M):
    """Returns (I - M)^-1 of the four strictly lower blocks of 16 in M [64, 16], exactly as float32
    adds.

    Column by column, as tiles._invert_diagonal_blocks: T <- T + M_:j T_j:. A block is cut into four
    of 8 x 8, and these into even and odd columns, so that a lane has one element of each of the
    eight parts: the element of a column comes from another lane of its row, that of row j from lane
    j of its column.
    """
    parts = gl.permute(gl.reshape(M, [4, 2, 8, 2, 4, 2]), [0, 2, 4, 5, 3, 1])
    above, below = parts.split()
    m00, _ = above.split()
    m10, m11 = below.split()
    m00e, m00o = m00.split()
    m10e, m10o = m10.split()
    m11e, m11o = m11.split()
    o_row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LANE)))[None, :, None]
    o_pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LANE)))[None, None, :]
    zero = gl.zeros([4, 8, 4], gl.float32, LANE)
    first = zero.to(gl.int32) + 4 * o_row
    pair = zero.to(gl.int32) + o_pair
    t00e = gl.where(first == 8 * pair, 1.0, zero)
    t00o = gl.where(first == 8 * pair + 4, 1.0, zero)
    t11e, t11o, t10e, t10o = t00e, t00o, zero, zero
    for j in gl.static_range(8):  # rows of the upper two
        m = _from_lane(
            gl.convert_layout(m10o if j % 2 else m10e, LANE, assert_trivial=True), first + j // 2
        )
        te, to = _from_lane(t00e, pair + 4 * j), _from_lane(t00o, pair + 4 * j)
        t10e += m * te
        t10o += m * to
        if j < 7:
            m = _from_lane(
                gl.convert_layout(m00o if j % 2 else m00e, LANE, assert_trivial=True),
                first + j // 2,
            )
            t00e += m * te
            t00o += m * to
    for j in gl.static_range(7):  # rows of the lower two
        m = _from_lane(
            gl.convert_layout(m11o if j % 2 else m11e, LANE, assert_trivial=True), first + j // 2
        )
        row = pair + 4 * j
        t10e += m * _from_lane(t10e, row)
        t10o += m * _from_lane(t10o, row)
        t11e += m * _from_lane(t11e, row)
        t11o += m * _from_lane(t11o, row)
    above = gl.join(gl.join(t00e, t00o), gl.join(zero, zero))
    below = gl.join(gl.join(t10e, t10o), gl.join(t11e, t11o))
    t = gl.reshape(gl.permute(gl.join(above, below), [0, 5, 1, 4, 2, 3]), [64, 16])
    return gl.convert_layout(t, ACC16, assert_trivial=True)


@gluon.jit
def invert(own, M0, M1, M2, i_w, dtype: gl.constexpr):
    """Returns T = (I - M)^-1 [64, 64] in dtype, of a strictly lower M that is cut as by `cut`.

    By halves. With T_a and T_b the inverses of two blocks next to each other on the diagonal, that
    of both has T_b M_ba T_a below: first for blocks of 16, in warps 1 and 3, then for those of 32.
    What other warps compute, nobody reads.
    """
    t_high, t_low = split_words(invert_blocks(own), dtype)
    s_high, s_low = store_words(t_high, t_low)
    m_high, m_low = split_words(gl.where(i_w < 2, M0, M2), dtype)
    fence_async_shared()
    b_0 = start_product(m_high, m_low, s_high, s_low, 0, ACC16)
    b_2 = start_product(m_high, m_low, s_high, s_low, 32, ACC16)
    b_0, b_2 = warpgroup_mma_wait(0, deps=(b_0, b_2))
    n_high, n_low = split_words(gl.where(i_w < 2, b_0, b_2), dtype)
    s_high, s_low = store_words(n_high, n_low)
    fence_async_shared()
    b_0 = start_product(t_high, t_low, s_high, s_low, 16, ACC16)
    b_2 = start_product(t_high, t_low, s_high, s_low, 48, ACC16)
    b_0, b_2 = warpgroup_mma_wait(0, deps=(b_0, b_2))
    n_high, n_low = split_words(gl.where(i_w < 2, b_0, b_2), dtype)
    odd = -(i_w % 2)
    zero = gl.zeros([64, 16], dtype, ACC16)
    t_high = beside(choose(odd, n_high, t_high), choose(odd, t_high, zero), ACC32)
    t_low = beside(choose(odd, n_low, t_low), choose(odd, t_low, zero), ACC32)

    s_high, s_low = store_words(t_high, t_low)
    m_high, m_low = split_words(beside(M0, M1, ACC32), dtype)
    fence_async_shared()
    b_0 = warpgroup_mma_wait(0, deps=(start_product(m_high, m_low, s_high, s_low, 0, ACC32),))
    n_high, n_low = split_words(b_0, dtype)
    s_high, s_low = store_words(n_high, n_low)
    fence_async_shared()
    b_0 = warpgroup_mma_wait(0, deps=(start_product(t_high, t_low, s_high, s_low, 32, ACC32),))
    lower = gl.convert_layout(-(i_w // 2), ACC32, assert_trivial=True)
    return beside(
        choose(lower, b_0.to(dtype), t_high), choose(lower, t_high, gl.zeros_like(t_high)), ACC64
    )
