"""The emulator of compiled kernels is right about tiny kernels,
and sees what is wrong with others.
"""

import re
from itertools import product

import pytest
import torch

from delta_trn.backends.dispatch import TRITON_DEVICES

if "cpu" not in TRITON_DEVICES:
    pytest.skip(
        "compiled kernels run here with --emulate alone, as in make emulate",
        allow_module_level=True,
    )

import triton
import triton.language as tl

from delta_trn.triton_kernels import cross_entropy
from tests.support.emulator import driver
from tests.support.emulator.decode import Unsupported, decode

HALVES = (torch.bfloat16, torch.float16)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(x, exact):
    return ((x.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.fixture(params=[(1, 1), (0, 0)], ids=["late", "early"])
def checked(request):
    """Runs a test's kernels at the latest or the earliest time, all checks on,
    and expects no report.
    """
    copies, products = request.param
    with driver.options(check=1, late_copies=copies, late_products=products) as reports:
        yield
    assert not reports


@triton.jit
def add_kernel(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, mask=m, other=0.0) + tl.load(y + i, mask=m, other=0.0), mask=m)


@triton.jit
def reduce_kernel(
    x, sums, largest, sums_so_far, M: tl.constexpr, N: tl.constexpr, REVERSE: tl.constexpr
):
    i, j = tl.arange(0, M), tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(sums + i, tl.sum(a, axis=1))
    tl.store(largest + j, tl.max(a, axis=0))
    tl.store(sums_so_far + i[:, None] * N + j[None, :], tl.cumsum(a, axis=0, reverse=REVERSE))
    tl.store(
        sums_so_far + M * N + i[:, None] * N + j[None, :], tl.cumsum(a, axis=1, reverse=REVERSE)
    )


@triton.jit
def dot_kernel(
    a, b, c, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr,
    SCALED: tl.constexpr, ADDED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """o = a b, with a and b read transposed, a from registers, and c added."""
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    if TURNED:
        x = tl.trans(tl.load(a + k[:, None] * M + i[None, :]))
        y = tl.trans(tl.load(b + j[:, None] * K + k[None, :]))
    else:
        x = tl.load(a + i[:, None] * K + k[None, :])
        y = tl.load(b + k[:, None] * N + j[None, :])
    if SCALED:
        x = (x.to(tl.float32) * 2.0).to(x.dtype)
    z = tl.zeros([M, N], tl.float32)
    if ADDED:
        z = tl.load(c + i[:, None] * N + j[None, :])
    tl.store(o + i[:, None] * N + j[None, :], tl.dot(x, y, z, input_precision=P))


@triton.jit
def loop_kernel(
    a, b, o, s, T, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, READ: tl.constexpr
):
    """o = a b, K columns of a at a time; READ: also the sums of b's rows,
    of the tile that is multiplied.
    """
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    z = tl.zeros([M, N], tl.float32)
    r = tl.zeros([K], tl.float32)
    for t in range(T):
        x = tl.load(a + i[:, None] * (T * K) + t * K + k[None, :])
        y = tl.load(b + (t * K + k)[:, None] * N + j[None, :])
        z = tl.dot(x, y, z)
        if READ:
            r += tl.sum(y.to(tl.float32), axis=1)
    tl.store(o + i[:, None] * N + j[None, :], z)
    tl.store(s + k, r)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_sums_of_a_ragged_vector(dtype, checked):
    x, y, o = (
        normal(1000, dtype=dtype),
        normal(1000, dtype=dtype, seed=1),
        torch.empty(1000, dtype=dtype),
    )
    add_kernel[(8,)](x, y, o, 1000, B=128)
    assert torch.equal(o, x + y)


@pytest.mark.parametrize(
    ("M", "N", "warps"), [(16, 16, 1), (16, 128, 2), (64, 16, 4), (64, 128, 8)]
)
def test_sums_maxima_and_sums_so_far(M, N, warps, checked):
    x, sums, largest, so_far = normal(M, N), torch.empty(M), torch.empty(N), torch.empty(2, M, N)
    for reverse in (False, True):
        reduce_kernel[(1,)](x, sums, largest, so_far, M=M, N=N, REVERSE=reverse, num_warps=warps)
        assert distance(sums, x.double().sum(1)) < 1e-6 and torch.equal(largest, x.amax(0))
        for axis in (0, 1):
            exact = (
                x.double().flip(axis).cumsum(axis).flip(axis)
                if reverse
                else x.double().cumsum(axis)
            )
            assert distance(so_far[axis], exact) < 1e-6


SHAPES = [(64, 64, 64), (128, 32, 64), (64, 128, 32), (16, 32, 16), (128, 256, 16)]
TYPES = [
    *((dtype, "tf32", 1e-6) for dtype in HALVES),
    (torch.float32, "ieee", 1e-6),
    (torch.float32, "tf32", 2e-3),
]
# each shape in each type and number of warps, its flags by turns, so that all of these meet in some
# case
DOTS = [
    pytest.param(dtype, precision, tolerance, shape, warps, (3 * i + 5 * n + t) % 8,
                 id=f"{str(dtype)[6:]}-{precision}-{'x'.join(map(str, shape))}-{warps}")
    for t, (dtype, precision, tolerance) in enumerate(TYPES)
    for i, shape in enumerate(SHAPES)
    for n, warps in enumerate((1, 2, 4, 8))
    if warps >= 4 or shape[0] * shape[1] <= (512 if precision == "ieee" else 8192)
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "precision", "tolerance", "shape", "warps", "flags"), DOTS)
def test_products(dtype, precision, tolerance, shape, warps, flags, checked):
    (M, N, K), turned, scaled, added = shape, flags & 1, flags >> 1 & 1, flags >> 2
    a, b, c = normal(M, K, dtype=dtype), normal(K, N, dtype=dtype, seed=1), normal(M, N, seed=2)
    o = torch.full((M, N), float("nan"))
    given = [x.T.contiguous() if turned else x for x in (a, b)]
    sizes = {
        "M": M,
        "N": N,
        "K": K,
        "TURNED": turned,
        "SCALED": scaled,
        "ADDED": added,
        "P": precision,
    }
    dot_kernel[(1,)](*given, c, o, **sizes, num_warps=warps)
    exact = (1 + scaled) * a.double() @ b.double() + added * c
    assert distance(o, exact) < tolerance


def loop(T=5, stages=3, dtype=torch.bfloat16, warps=4, read=False):
    """Runs loop_kernel and returns how far its product is off."""
    a, b = normal(64, T * 64, dtype=dtype), normal(T * 64, 64, dtype=dtype, seed=1)
    o, s = torch.empty(64, 64), torch.empty(64)
    loop_kernel[(1,)](
        a, b, o, s, T, M=64, N=64, K=64, READ=read, num_warps=warps, num_stages=stages
    )
    return distance(o, a.double() @ b.double())


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "warps"), [(torch.bfloat16, 4), (torch.float32, 8)], ids=str)
def test_products_in_pipelined_loops(dtype, warps, stages, checked):
    assert loop(dtype=dtype, warps=warps, stages=stages) < (
        2e-3 if dtype == torch.float32 else 1e-6
    )


@pytest.mark.parametrize(("order", "quantum"), [(0, 0), (1, 0), (2, 7)])
@pytest.mark.parametrize(("copies", "products"), [*product((0, 1), repeat=2)])
def test_no_order_of_warps_and_no_legal_time_changes_a_bit(copies, products, order, quantum):
    first, late = loop(), {"late_copies": copies, "late_products": products}
    with driver.options(check=1, order=order, quantum=quantum, **late) as reports:
        assert loop() == first
    assert not reports


def test_a_pipelined_tile_that_is_multiplied_and_read_loses_a_race():
    """Triton 3.4 to 3.9 has a buffer too few here: a copy overwrites what wgmma may still read."""
    with driver.options(check=1, late_products=1) as reports:
        assert loop(read=True) > 0.1
    assert any(report.startswith("race with wgmma") for report in reports)
    with driver.options(check=1) as reports:
        assert loop(read=True, stages=1) < 1e-6
    assert not reports


def launched(call):
    """Returns the function of a kernel that `call` launches, and the arguments."""
    kept, run = [], driver.Function.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.Function, "__call__", lambda *given: kept.append(given) or run(*given))
        call()
    return kept[0]


def without(function, place):
    """Returns a function without the piece of its PTX that a pattern has found."""
    return driver.Function(
        function.text[: place.start()] + function.text[place.end() :], function.shared
    )


BARRIER = r"\tbar\.sync \t0;"


@pytest.mark.parametrize(
    ("pattern", "kind", "superfluous"),
    [
        (BARRIER, "race in shared memory", {0}),  # the first of two of the prologue
        (r"\tfence\.proxy\.async\.shared::cta;", "missing proxy fence", set()),
        (r"\tcp\.async\.wait_group \t\d+;", "race with cp.async.* reads it while", set()),
        (r"\twgmma\.wait_group\.sync\.aligned \d+;", "race with wgmma", set()),
        (r"\twgmma\.fence\.sync\.aligned;", "missing wgmma.fence", set()),
    ],
)
def test_each_wait_that_is_taken_out_is_reported_as_what_it_is(pattern, kind, superfluous):
    """But for those that others make superfluous."""
    function, *arguments = launched(loop)
    places, unseen = list(re.finditer(pattern, function.text)), set()
    assert places
    for n, place in enumerate(places):
        with driver.options(check=1) as reports:
            without(function, place)(*arguments)
        if not any(re.match(kind, report) for report in reports):
            unseen.add(n)
    assert unseen == superfluous


@triton.jit
def sum_twice_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    total = tl.sum(a)
    tl.store(o + i, tl.sum(a * total) + a)


def summed_twice(form=lambda function: function):
    """Returns the error of a kernel that uses the same shared memory twice, and the reports."""
    x, o = normal(256), torch.empty(256)
    function, grid, warps, types, values = launched(
        lambda: sum_twice_kernel[(1,)](x, o, 256, num_warps=8)
    )
    with driver.options(check=1, order=1) as reports:
        form(function)(grid, warps, types, values)
    a = x.double()
    return distance(o, (a * a.sum()).sum() + a), list(reports)


def test_a_write_after_a_read_is_a_race_in_shared_memory():
    """The second sum may overwrite what another warp still reads of the first."""
    error, reports = summed_twice()
    assert error < 1e-5 and not reports
    function, *_ = launched(
        lambda: sum_twice_kernel[(1,)](normal(256), normal(256), 256, num_warps=8)
    )
    places, found = list(re.finditer(BARRIER, function.text)), []
    for place in places:
        _, reports = summed_twice(lambda function, place=place: without(function, place))
        assert reports and all(x.startswith(("race in shared", "unwritten")) for x in reports)
        found += reports
    assert any(re.search(r"race in shared memory.*warp \d+ writes it", report) for report in found)


def test_shared_memory_that_nobody_wrote_is_reported():
    def forget(function):
        return without(function, re.search(r"\t(@%p\d+ )?st\.shared[^;]*;", function.text))

    error, reports = summed_twice(forget)
    assert not error < 1e-3  # NaN, or far off
    assert any(x.startswith("unwritten shared memory") for x in reports)


@triton.jit
def shift_kernel(x, SHIFT: tl.constexpr):
    i = tl.program_id(0) + 1
    tl.store(x + i, tl.load(x + i + SHIFT))


@pytest.mark.parametrize("shift", [1, 0, -1])
def test_a_program_that_reads_what_another_writes_is_a_race_of_programs(shift):
    """In either order of the two: before the other writes, or after."""
    x = normal(18)
    with driver.options(check=1) as reports:
        shift_kernel[(16,)](x, shift, num_warps=1)
    races = [report for report in reports if report.startswith("race of programs")]
    assert bool(races) == bool(shift) and len(races) == len(reports)


def test_softmax_without_its_barrier_is_reported():
    """A warp may write the gradient over the logit of the target before another has read it."""
    z, goal, keep, loss = (
        3 * normal(4, 300),
        torch.tensor([0, 7, 150, 299]),
        torch.ones(4),
        torch.empty(4),
    )
    function, grid, warps, types, values = launched(
        lambda: cross_entropy.softmax_(z.clone(), goal, keep, loss, gradient=True)
    )
    right = loss.clone()
    changed = without(function, list(re.finditer(BARRIER, function.text))[-1])
    with driver.options(check=1, order=1) as reports:
        changed(grid, warps, types, [z.clone(), *values[1:]])
    assert any(report.startswith("race in a tensor") for report in reports)
    assert not torch.allclose(loss, right)


@pytest.mark.parametrize("order", [0, 1])
def test_no_warp_reads_a_logit_of_a_small_vocabulary_after_another_wrote_its_gradient(order):
    z = normal(4, 50)
    with driver.options(check=1, order=order) as reports:
        cross_entropy.softmax_(z, torch.arange(4), torch.ones(4), torch.empty(4), gradient=True)
    assert not reports


@triton.jit
def wild_kernel(x, o, offset):
    i = tl.arange(0, 128)
    tl.store(o + i, tl.load(x + offset + i))


@pytest.mark.parametrize("offset", [1, -4])
def test_an_access_outside_of_every_tensor_raises(offset):
    """Also where it is beside a tensor in the same storage."""
    whole = normal(144)
    with pytest.raises(driver.Reported, match=r"out of bounds.*reads \d+ bytes, .* tensor 0"):
        wild_kernel[(1,)](whole[8:136], torch.empty(128), offset)


@pytest.mark.parametrize(
    "name", ["mbarrier.init.shared.b64", "atom.global.add.f32", "ld.local.b32"]
)
def test_an_unknown_instruction_is_refused_by_name(name):
    text = f".entry k(\n)\n{{\n.reg .b32 %r<3>;\n.reg .b64 %rd<3>;\n{name} %r1, [%rd1];\nret;\n}}\n"
    with pytest.raises(Unsupported, match=name):
        decode(text, driver.find)
