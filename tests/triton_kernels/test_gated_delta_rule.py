"""The Triton kernels of the gated delta rule, run by Triton's interpreter (on the GPU where there is one).

The interpreter executes the kernels' arithmetic, masks and addresses, not the layouts the compiler chooses.
The grid of named cases runs through `backends.parity`; here stands what a table of errors cannot say.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

triton = pytest.importorskip("triton", reason="the triton extra is not installed")

import triton.language as tl  # noqa: E402

from delta_trn.backends.gated_delta_rule import triton_adapter  # noqa: E402
from delta_trn.backends.gated_delta_rule.triton_time_adapter import chunk_tables, split_sequences  # noqa: E402
from delta_trn.backends.registry import Options  # noqa: E402
from delta_trn.triton_kernels import gated_delta_rule_bwd, gated_delta_rule_fwd  # noqa: E402
from delta_trn.triton_kernels.chunks import Chunks  # noqa: E402
from delta_trn.triton_kernels.launch import arithmetic, config  # noqa: E402
from delta_trn.triton_kernels.tiles import invert_unit_lower, round_to, softplus  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate"]


@pytest.fixture(autouse=True)
def settings_are_reset():
    yield
    triton_adapter.keep_states("auto")
    split_sequences("auto")


def inputs(*, B=1, T=70, H=1, HV=2, K=32, V=32, N=None, g=None, beta=None, dtype=torch.float32):
    """q, k, v, g, beta, initial_state, do, dstate; k of any length: the operation normalizes."""
    generator = torch.Generator().manual_seed(T * K + V)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    decay = -torch.nn.functional.softplus(normal(B, T, HV)) if g is None else torch.full((B, T, HV), float(g))
    strength = torch.sigmoid(normal(B, T, HV)) if beta is None else torch.full((B, T, HV), float(beta))
    state, do, dstate = normal(N or B, HV, K, V), normal(B, T, HV, V), normal(N or B, HV, K, V)
    narrow = [x.to(dtype) for x in (q, k, v)]
    return [x.to(DEVICE) for x in (*narrow, decay, strength, state, do.to(dtype), dstate)]


def options(K, *, packed=False):
    return Options(K**-0.5, use_qk_l2norm_in_kernel=True, output_final_state=True, packed=packed)


def run(q, k, v, g, beta, state, do, dstate, cu_seqlens=None):
    """Forward and backward through the adapter, as a dictionary over NAMES."""
    chosen = options(q.shape[-1], packed=cu_seqlens is not None)
    o, final, saved = triton_adapter.forward(q, k, v, g, beta, state, cu_seqlens, chosen, save=True)
    gradients = triton_adapter.backward(do, dstate, q, k, v, g, beta, state, cu_seqlens, saved, chosen)
    return dict(zip(NAMES, [o, final, *gradients], strict=True))


def literal(q, k, v, g, beta, state, do, dstate, cu_seqlens=None, *, dtype):
    """The recurrence token by token in `dtype`, gradients by autograd, as a dictionary over NAMES."""
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta, state)]
    q, k, v, g, beta, state = leaves
    groups = v.shape[2] // q.shape[2]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    T = q.shape[1]
    ends = [(b, 0, T) for b in range(q.shape[0])]
    if cu_seqlens is not None:
        ends = [(0, a, e) for a, e in pairwise(cu_seqlens.tolist())]
    outputs: dict[int, list[torch.Tensor]] = {b: [] for b in range(q.shape[0])}
    finals = []
    for n, (b, start, end) in enumerate(ends):
        S = state[n]
        for t in range(start, end):
            S = S * g[b, t].exp()[:, None, None]
            u = beta[b, t][:, None] * (v[b, t] - torch.einsum("hk,hkv->hv", k[b, t], S))
            S = S + torch.einsum("hk,hv->hkv", k[b, t], u)
            outputs[b].append(q.shape[-1] ** -0.5 * torch.einsum("hk,hkv->hv", q[b, t], S))
        finals.append(S)
    o, final = torch.stack([torch.stack(rows) for rows in outputs.values()]), torch.stack(finals)
    total = (o * do.to(dtype)).sum() + (final * dstate.to(dtype)).sum()
    return dict(zip(NAMES, [o, final, *torch.autograd.grad(total, leaves)], strict=True))


def error(x, judge):
    """Root mean square of the difference over that of the judge."""
    return ((x.double() - judge).norm() / judge.norm().clamp_min(1e-300)).item()


def worst(found, tensors):
    """Errors over the allowed ones: twice those of the recurrence in float32, 2^-21 at least."""
    judge, honest = (literal(*tensors, dtype=dtype) for dtype in (torch.float64, torch.float32))
    ratios = {}
    for name in NAMES:
        allowed = max(2 * error(honest[name], judge[name]), 2**-21)
        ratios[name] = error(found[name], judge[name]) / allowed
    return ratios


HARD = {
    "ragged, grouped heads, V no multiple of anything": {"B": 2, "T": 37, "V": 40},
    "one token": {"T": 1},
    "K no power of two": {"T": 33, "K": 96, "HV": 1},
    "nothing survives a token": {"g": -20.0},
    "nothing is written": {"beta": 0.0, "g": -0.01, "T": 35},
    "reflections": {"beta": 2.0, "g": -0.01},
}


@pytest.mark.parametrize("case", HARD)
def test_every_tensor_agrees_with_the_float64_recurrence(case):
    tensors = inputs(**HARD[case])
    ratios = worst(run(*tensors), tensors)
    assert max(ratios.values()) <= 1, ratios


def test_the_agreement_fails_when_the_state_is_kept_in_bfloat16(monkeypatch):
    tensors = inputs(T=70)
    original = gated_delta_rule_fwd.scan

    def lossy(*arguments, S, U, **named):
        original(*arguments, S=S, U=U, **named)
        S.copy_(S.bfloat16())

    monkeypatch.setattr(gated_delta_rule_fwd, "scan", lossy)
    assert worst(run(*tensors), tensors)["dq"] > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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


def test_tokens_of_another_sequence_are_never_read():
    q, k, v, g, beta, state, do, dstate = inputs(T=64, N=2)
    cu_seqlens = torch.tensor([0, 20, 64], device=DEVICE)
    clean = run(q, k, v, g, beta, state, do, dstate, cu_seqlens)
    for x in (q, k, v, g, beta, do):
        x[:, 20:] = float("nan")
    dirty = run(q, k, v, g, beta, state, do, dstate, cu_seqlens)
    assert all(torch.equal(dirty[n][:, :20], clean[n][:, :20]) for n in NAMES if "state" not in n)
    assert dirty["o"][:, 20:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recomputed_states_give_the_same_bits_as_kept_ones(dtype):
    tensors = inputs(T=130, dtype=dtype)
    results = []
    for save_h in (True, False):
        triton_adapter.keep_states(save_h)
        results.append(run(*tensors))
    assert all(torch.equal(results[0][name], results[1][name]) for name in NAMES)


def kept(shapes):
    """How many of them are not empty."""
    return sum(0 not in shape for shape, _ in shapes)


def test_what_is_saved_follows_save_h_and_is_foretold():
    q, k, v, g, beta, state, *_ = inputs()
    chosen = options(q.shape[-1])
    counts = {}
    for save_h in (True, False, "auto"):
        triton_adapter.keep_states(save_h)
        saved = triton_adapter.forward(q, k, v, g, beta, state, None, chosen, save=True)[2]
        foretold = triton_adapter.saved_shapes(q.to("meta"), v.to("meta"), None, None, chosen)
        assert [(tuple(x.shape), x.dtype) for x in saved] == foretold
        counts[save_h] = kept(foretold)
    assert counts == {True: 5, False: 3, "auto": 5}
    assert triton_adapter.forward(q, k, v, g, beta, state, None, chosen, save=False)[2] == []


def test_an_unknown_save_h_is_named():
    with pytest.raises(ValueError, match="save_h='yes' is none of 'auto', True, False; pass one of them"):
        triton_adapter.keep_states("yes")  # pyright: ignore[reportArgumentType]


def test_auto_stops_keeping_states_at_its_bound():
    chosen = options(128)
    q = torch.empty(1, 2**19, 8, 128, dtype=torch.bfloat16, device="meta")
    split_sequences(None)
    assert kept(triton_adapter.saved_shapes(q, q, None, None, chosen)) == 3
    assert kept(triton_adapter.saved_shapes(q[:, : 2**16], q[:, : 2**16], None, None, chosen)) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_element_is_written(dtype, monkeypatch):
    tensors = inputs(B=2, T=70, K=48, V=40, dtype=dtype)
    clean = run(*tensors)

    def poisoned(allocate):
        return lambda *a, **named: allocate(*a, **named).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    dirty = run(*tensors)
    assert all(torch.equal(clean[name], dirty[name]) for name in NAMES)
    assert torch.empty_like(tensors[0]).isnan().all(), "the poison works"


def test_equal_inputs_give_equal_bits():
    tensors = inputs(dtype=torch.bfloat16)
    first, second = run(*tensors), run(*tensors)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_one_step_at_a_time_is_the_sequence():
    q, k, v, g, beta, state, *_ = inputs(B=2, T=5, H=2, HV=4, K=48, V=40)
    chosen = options(48)
    o, final, _ = triton_adapter.forward(q, k, v, g, beta, state, None, chosen, save=False)
    for t in range(5):
        o_t, state = triton_adapter.step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state, chosen)
        assert error(o_t, o[:, t].double()) < 2**-20
    assert final is not None and error(state, final.double()) < 2**-20


class Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **__: None


def test_launches_beyond_65535_programs_use_the_first_axis_alone(monkeypatch):
    """CUDA allows 65,535 programs along axes 1 and 2, and 2^31 - 1 along axis 0."""
    recorder = Recorder()
    for module, name in [
        (gated_delta_rule_fwd, "prepare_kernel"),
        (gated_delta_rule_fwd, "scan_kernel"),
        (gated_delta_rule_bwd, "reverse_scan_kernel"),
        (gated_delta_rule_bwd, "gradients_kernel"),
    ]:
        monkeypatch.setattr(module, name, recorder)
    split_sequences(None)
    q = torch.empty(1, 2**22, 8, 32, dtype=torch.bfloat16, device="meta")
    g = torch.empty(1, 2**22, 8, dtype=torch.float32, device="meta")
    run(q, q, q, g, g, torch.empty(1, 8, 32, 32, device="meta"), q, torch.empty(1, 8, 32, 32, device="meta"))
    assert all(len(grid) == 1 for grid in recorder.grids)
    assert max(grid[0] for grid in recorder.grids) == 2**22 // 64 * 8 == 524288


@triton.jit
def _inverse_kernel(L, out, C: tl.constexpr):
    o = tl.arange(0, C)
    o_cc = o[:, None] * C + o[None, :]
    tl.store(out + o_cc, invert_unit_lower(tl.load(L + o_cc), C))


@pytest.mark.parametrize("C", [16, 32, 64])
def test_the_inverse_keeps_its_digits_where_a_power_series_loses_them(C):
    """Correlation 0.99, beta 0.99: the inverse's entries stay below 1, the powers reach 1e9 at C = 64."""
    L = torch.tril(torch.full((C, C), 0.99 * 0.99, device=DEVICE), -1)
    out = torch.full_like(L, float("nan"))
    _inverse_kernel[(1,)](L, out, C)
    exact = torch.linalg.inv(torch.eye(C, device=DEVICE, dtype=torch.float64) + L.double())
    assert error(out, exact) < 2**-20
    series, power = torch.eye(C, device=DEVICE), -L
    for _ in range(6):
        series, power = series + power @ series, power @ power
    assert C < 64 or error(series, exact) > 1


@triton.jit
def _rounding_kernel(x, out, DOT: tl.constexpr):
    o = tl.arange(0, 1024)
    tl.store(out + o, round_to(tl.load(x + o), tl.bfloat16, DOT))


def test_bfloat16_is_rounded_to_nearest_even():
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[:512] = x[:512].bfloat16().float() * (1 + 2**-8)  # half of these are ties or beside one
    out = torch.empty(1024, dtype=torch.bfloat16, device=DEVICE)
    _rounding_kernel[(1,)](x, out, arithmetic())
    assert torch.equal(out, x.bfloat16())


@triton.jit
def _softplus_kernel(z, out):
    o = tl.arange(0, 4096)
    tl.store(out + o, softplus(tl.load(z + o)))


def test_softplus_keeps_its_digits_where_the_plain_form_loses_them():
    z = torch.linspace(-80, 80, 4096, device=DEVICE)
    out = torch.empty_like(z)
    _softplus_kernel[(1,)](z, out)
    exact = torch.logaddexp(z.double(), torch.zeros_like(z).double())
    # exp itself is good to 2^-24 |z|: its argument's rounding
    allowed = (2**-21 + 2**-23 * z.abs().double()) * exact
    assert ((out.double() - exact).abs() <= allowed).all()
    plain = (1 + z.exp()).log()
    assert not ((plain.double() - exact).abs() <= allowed).all()


def test_chunk_tables_cover_every_token_once():
    cuts = torch.tensor([0, 0, 3, 67, 67, 130], device=DEVICE)
    row = config(32, 32, itemsize=4)
    chunks = chunk_tables(torch.empty(1, 130, 1, 32), cuts, row.C)
    covered = torch.cat(
        [
            torch.arange(s, s + n)
            for s, n in zip(chunks.start.tolist(), chunks.length.tolist(), strict=True)
            if n > 0
        ]
    )
    assert torch.equal(covered, torch.arange(130))
    assert isinstance(chunks, Chunks) and replace(chunks, start=None).start is None
