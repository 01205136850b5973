"""The Triton kernels of the gated delta rule: on a GPU, or compiled in the emulator, or
interpreted.

The grid of named cases runs through `backends.parity`; these tests check what a table of errors
cannot.
"""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

triton = pytest.importorskip("triton", reason="the triton extra is not installed")

import triton.language as tl  # noqa: E402

from delta_trn.backends import gated_delta_rule  # noqa: E402
from delta_trn.backends.dispatch import TRITON_DEVICES  # noqa: E402
from delta_trn.backends.gated_delta_rule import triton_adapter, triton_time_adapter  # noqa: E402
from delta_trn.backends.gated_delta_rule.contract import Rule  # noqa: E402
from delta_trn.triton_kernels import (  # noqa: E402
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_refine,
    gated_delta_rule_reverse,
    segments,
)
from delta_trn.triton_kernels.hopper import prepare as hopper_prepare  # noqa: E402
from delta_trn.triton_kernels.launch import arithmetic  # noqa: E402
from delta_trn.triton_kernels.tiles import exp, invert_unit_lower, round_to, sigmoid, softplus  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate"]


def inputs(*, B=1, T=70, H=1, HV=2, K=32, V=32, N=None, dtype=torch.float32):
    """Returns q, k, v, g, beta, initial_state, do, dstate; k of any length:
    the operation normalizes.
    """
    generator = torch.Generator().manual_seed(T * K + V)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    g, beta = -torch.nn.functional.softplus(normal(B, T, HV)), torch.sigmoid(normal(B, T, HV))
    state, do, dstate = normal(N or B, HV, K, V), normal(B, T, HV, V), normal(N or B, HV, K, V)
    narrow = [x.to(dtype) for x in (q, k, v)]
    return [x.to(DEVICE) for x in (*narrow, g, beta, state, do.to(dtype), dstate)]


def rule(q, k, v, g, beta, state, cu_seqlens=None):
    return Rule(
        q, k, v, g, beta, initial_state=state, cu_seqlens=cu_seqlens,
        scale=q.shape[-1] ** -0.5, l2norm=True, output_final_state=True,
    )  # fmt: skip


def run(q, k, v, g, beta, state, do, dstate, cu_seqlens=None):
    """Runs forward and backward through the adapter; returns a dictionary over NAMES."""
    call = rule(q, k, v, g, beta, state, cu_seqlens)
    o, final, saved = triton_adapter.forward(call, save=True)
    gradients = [x for x in triton_adapter.backward(do, dstate, call, saved) if x is not None]
    return dict(zip(NAMES, [o, final, *gradients], strict=True))


def error(x, judge):
    """Returns the root mean square of the difference over that of the judge."""
    return ((x.double() - judge).norm() / judge.norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_packed_sequences_equal_each_sequence_alone_bit_for_bit(dtype):
    cuts = [0, 0, 15, 15, 47, 112, 112]
    cu_seqlens = torch.tensor(cuts, device=DEVICE)
    q, k, v, g, beta, state, do, dstate = inputs(T=112, N=6, dtype=dtype)
    packed = run(q, k, v, g, beta, state, do, dstate, cu_seqlens)
    for n, (a, e) in enumerate(pairwise(cuts)):
        if a == e:
            assert torch.equal(packed["state"][n], state[n]), "an empty sequence hands its state on"
            assert torch.equal(packed["dstate"][n], dstate[n])
            continue
        pieces = [x[:, a:e] for x in (q, k, v, g, beta)]
        alone = run(*pieces, state[n : n + 1], do[:, a:e], dstate[n : n + 1])
        for name in NAMES:
            part = packed[name][n : n + 1] if "state" in name else packed[name][:, a:e]
            assert torch.equal(part, alone[name]), f"{name} of sequence {n}"


@pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("cuts", [None, [0, 20, 20, 130]], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_in_a_cuda_graph_give_the_bits_of_eager_calls(dtype, cuts):
    cu_seqlens = None if cuts is None else torch.tensor(cuts, device=DEVICE)
    tensors = inputs(T=130, N=None if cuts is None else len(cuts) - 1, dtype=dtype)
    run(*tensors, cu_seqlens)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*tensors, cu_seqlens)
    for factor in (1.0, 0.5):
        tensors[2].mul_(factor)  # the graph reads v where it lay
        for x in captured.values():
            x.fill_(float("nan"))
        graph.replay()
        eager = run(*tensors, cu_seqlens)
        assert all(torch.equal(captured[name], eager[name]) for name in NAMES)


def kept_and_recomputed(monkeypatch, dtype):
    """Returns the results with states that are kept, and with states that backward makes again.

    The first state is beyond float16's range, so that it is stored in units of a power of two.
    """
    tensors = inputs(T=130, dtype=dtype)
    tensors[5] *= 1e6
    for most in (2**30, 0):
        monkeypatch.setattr(triton_adapter, "KEPT_BYTES", most)
        yield run(*tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_recomputed_states_give_the_same_bits_as_kept_ones(dtype, monkeypatch):
    kept, again = kept_and_recomputed(monkeypatch, dtype)
    assert all(torch.equal(kept[name], again[name]) for name in NAMES)
    assert all(x.isfinite().all() for x in kept.values() if x.dtype == torch.float32)


def test_states_that_are_made_again_without_their_units_are_seen(monkeypatch):
    scan = gated_delta_rule_fwd.scan

    def without_units(*given, o, **how):
        return scan(*given, o=o, **how | ({"units": None} if o is None else {}))

    monkeypatch.setattr(gated_delta_rule_fwd, "scan", without_units)
    kept, again = kept_and_recomputed(monkeypatch, torch.float16)
    assert not all(torch.equal(kept[name], again[name]) for name in NAMES)


def test_calls_that_wait_for_backward_share_the_memory_for_states(monkeypatch):
    leaves = [x.requires_grad_() for x in inputs(T=130)[:5]]
    monkeypatch.setattr(triton_adapter, "kept_now", kept_now := WeakIdKeyDictionary())

    def call():
        return gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, backend="triton")[0]

    outputs, results = [call()], []
    monkeypatch.setattr(triton_adapter, "KEPT_BYTES", 2 * sum(kept_now.values()))
    outputs += [call(), call()]
    assert len(kept_now) == 2, "the third finds no room"
    # repeated by checkpointing, it finds the room that it did not find at first
    outputs.append(checkpoint(call, use_reentrant=False))
    while outputs:
        results.append(torch.autograd.grad(outputs.pop(0).square().sum(), leaves))
    assert not kept_now
    assert all(torch.equal(x, y) for same in zip(*results, strict=True) for x, y in pairwise(same))


def kept(shapes):
    """Counts the shapes that are not empty."""
    return sum(0 not in shape for shape, _ in shapes)


def test_saved_tensors_have_the_declared_shapes_with_and_without_kept_states(monkeypatch):
    tensors = inputs()[:6]
    # a compiled graph
    monkeypatch.setattr(triton_adapter, "FIXED_SHAPES", SimpleNamespace(get=lambda: True))
    for most, count in ((None, 5), (1000, 3)):
        monkeypatch.setattr(triton_adapter, "KEPT_BYTES", most)
        saved = triton_adapter.forward(rule(*tensors), save=True)[2]
        declared = triton_adapter.saved_shapes(rule(*(x.to("meta") for x in tensors)))
        assert [(tuple(x.shape), x.dtype) for x in saved] == declared and kept(declared) == count
    assert triton_adapter.forward(rule(*tensors), save=False)[2] == []


def test_each_call_of_a_compiled_graph_has_its_share_of_the_memory_for_states(monkeypatch):
    """Such a graph says what a call keeps before it runs, so no call can look at the others."""
    call = rule(*inputs()[:6])
    monkeypatch.setattr(triton_adapter, "KEPT_BYTES", 2**40)
    S, U = triton_adapter.saved_shapes(call)[5:7]
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in (S, U))
    for most, keeps in (
        (size * triton_adapter.FIXED_CALLS, True),
        (size * 15, False),
        (size, False),
    ):
        monkeypatch.setattr(triton_adapter, "KEPT_BYTES", most)
        assert (triton_adapter.saved_shapes(call)[5:7] == [S, U]) is keeps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_write_every_element_and_repeat_their_bits(dtype, poison):
    tensors = inputs(B=2, T=70, K=48, V=40, dtype=dtype)
    first, second = run(*tensors), run(*tensors)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)
    assert torch.empty_like(tensors[0]).isnan().all(), "the poison works"


@pytest.mark.parametrize("segment", [None, 1], ids=["whole", "segments"])
def test_launches_beyond_65535_programs_use_the_first_axis_alone(segment, monkeypatch):
    """CUDA allows 65,535 programs along axes 1 and 2, and 2^31 - 1 along axis 0."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    for module, name in [
        (gated_delta_rule_fwd, "prepare_kernel"),
        (hopper_prepare, "prepare_kernel"),
        (gated_delta_rule_fwd, "scan_kernel"),
        (gated_delta_rule_reverse, "reverse_scan_kernel"),
        (gated_delta_rule_bwd, "gradients_kernel"),
        (gated_delta_rule_refine, "refine_kernel"),
        (segments, "chain_kernel"),
    ]:
        monkeypatch.setattr(module, name, Recorder())
    monkeypatch.setattr(triton_time_adapter, "SEGMENT", segment)
    monkeypatch.setattr(triton_adapter, "KEPT_BYTES", 0)  # so backward scans once more
    q = torch.empty(1, 2**22, 8, 32, dtype=torch.bfloat16, device="meta")
    g = torch.empty(1, 2**22, 8, dtype=torch.float32, device="meta")
    run(
        q,
        q,
        q,
        g,
        g,
        torch.empty(1, 8, 32, 32, device="meta"),
        q,
        torch.empty(1, 8, 32, 32, device="meta"),
    )
    assert len(grids) == (6 if segment is None else 10) and all(len(grid) == 1 for grid in grids)
    assert max(grid[0] for grid in grids) == (
        2**22 // 64 * 8 if segment is None else 2**22 // 64 * 8 * 2
    )


@triton.jit
def _inverse_kernel(L, out, like, C: tl.constexpr, DOT: tl.constexpr):
    o = tl.arange(0, C)
    o_cc = o[:, None] * C + o[None, :]
    tl.store(out + o_cc, invert_unit_lower(tl.load(L + o_cc), C, like.dtype.element_ty, DOT))


def inverse(L, dtype, warps):
    out = torch.full_like(L, float("nan"))
    like = torch.empty(1, dtype=dtype, device=DEVICE)
    _inverse_kernel[(1,)](L, out, like, L.shape[0], arithmetic("tf32"), num_warps=warps)
    exact = torch.linalg.inv(torch.eye(L.shape[0], device=DEVICE, dtype=torch.float64) + L.double())
    return out, exact


# the interpreter knows no warps
WARPS = [1, 2, 4, 8] if DEVICE == "cuda" or DEVICE in TRITON_DEVICES else [4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("C", [16, 32, 64])
def test_triangular_inverse_keeps_digits_that_a_power_series_loses(C, dtype, warps):
    """Correlation 0.99, beta 0.99: the inverse's entries stay below 1,
    the powers reach 1e9 at C = 64.
    """
    L = torch.tril(torch.full((C, C), 0.99 * 0.99, device=DEVICE), -1)
    out, exact = inverse(L, dtype, warps)
    # of two words of bfloat16, the second keeps its 8 bits: 2^-16 of every product, of which three
    # in a row
    assert error(out, exact) < (2**-14 if dtype == torch.bfloat16 else 2**-20)
    series, power = torch.eye(C, device=DEVICE), -L
    for _ in range(6):
        series, power = series + power @ series, power @ power
    assert C < 64 or error(series, exact) > 1


@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_triangular_inverse_of_random_and_of_near_keys(beta, dtype, warps):
    """beta = 2 and keys correlated .999: the densest inverse,
    whose rows reach sums of 2 C = 128.
    """
    generator = torch.Generator().manual_seed(0)
    for correlation in (0.0, 0.999):
        keys = (1 - correlation) ** 0.5 * torch.randn(64, 64, generator=generator) / 8
        keys = torch.nn.functional.normalize(keys + correlation**0.5 * torch.eye(64)[0], dim=1)
        L = (beta * keys @ keys.T).tril(-1).to(DEVICE)
        out, exact = inverse(L, dtype, warps)
        # the scans read it rounded to dtype. In float32 it may err twice as much as an exact
        # inverse of an L whose numbers are off by an ulp; substitution in float32 was good to 2e-10
        # in one case, by luck
        controls = [exact.to(dtype)]
        if dtype == torch.float32:
            signs = torch.randn(8, 64, 64, generator=generator).sign().to(DEVICE)
            moved = L.double() * (1 + torch.finfo(dtype).eps * signs)
            controls = torch.linalg.inv(moved + torch.eye(64, dtype=torch.float64, device=DEVICE))
        allowed = max(error(control, exact) for control in controls)
        assert error(out, exact) < allowed * (2 if dtype == torch.float32 else 1)


@triton.jit
def _rounding_kernel(x, out, DOT: tl.constexpr):
    o = tl.arange(0, 1024)
    tl.store(out + o, round_to(tl.load(x + o), tl.bfloat16, DOT))


def test_kernels_round_to_bfloat16_to_nearest_even():
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[:512] = x[:512].bfloat16().float() * (1 + 2**-8)  # half of these are ties or beside one
    out = torch.empty(1024, dtype=torch.bfloat16, device=DEVICE)
    _rounding_kernel[(1,)](x, out, arithmetic())
    assert torch.equal(out, x.bfloat16())


@triton.jit
def _gates_kernel(z, out):
    o = tl.arange(0, 4096)
    tl.store(out + o, softplus(tl.load(z + o)))
    tl.store(out + 4096 + o, sigmoid(tl.load(z + o)))
    tl.store(out + 8192 + o, exp(tl.load(z + o)))


def test_exp_softplus_and_sigmoid_keep_the_digits_of_what_is_small():
    """Compiled, e^-58 by tl.exp is off by 3e-6, which random cases saw in dg."""
    z = torch.linspace(-80, 80, 4096, device=DEVICE)
    out = torch.empty(3, 4096, device=DEVICE)
    _gates_kernel[(1,)](z, out)
    exact = torch.logaddexp(z.double(), torch.zeros_like(z).double())
    allowed = 2**-21 * exact
    assert ((out[0].double() - exact).abs() <= allowed).all()
    plain = (1 + z.exp()).log()
    assert not ((plain.double() - exact).abs() <= allowed).all()
    for y, exact in ((out[1], z.double().sigmoid()), (out[2], z.double().exp())):
        assert ((y.double() - exact).abs() <= 2**-21 * exact).all()
