"""Faults planted in Triton's kernels of Kimi Delta Attention turn parity red.
Its grid is in tests/parity.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.gated_delta_rule import triton_adapter as rule_adapter
from delta_trn.backends.gated_delta_rule.contract import Rule
from delta_trn.backends.kimi_delta_attention import kimi_delta_attention, triton_adapter
from delta_trn.backends.parity import channel_cases, rule
from delta_trn.backends.parity.rule_cases import BOTH, Case, inputs
from delta_trn.triton_kernels.kimi_delta_attention import prepare_hopper
from delta_trn.triton_kernels.launch import Card, assume, config
from tests.support.planted_bugs import Bug, planted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# two chunks of 32 tokens, two slices of K, the second half empty, two tiles of V
WHOLE = Case(
    "kimi planted",
    1,
    40,
    1,
    24,
    20,
    "",
    HV=2,
    decay="split",
    reflect=True,
    norm="random",
    state=True,
    loss=BOTH,
    op="kimi_delta_attention",
)
PLAIN = replace(WHOLE, decay="plain")
GATES, BOUND = replace(WHOLE, gates="plain"), replace(WHOLE, gates="plain", lower_bound=-5.0)
TWO_KEYS = replace(PLAIN, H=2, HV=2, T=20)
PACKED = replace(GATES, T=45, lengths=(0, 3, 0, 40, 2))
DOCUMENTS = replace(GATES, T=45, documents=(3, 40, 2))
ONE = channel_cases.BY_NAME["kimi_packed_single"]
TWO_TILES = replace(ONE, V=130)  # of at most 128 columns, in the reverse scan
STEP = "decode_kimi_gates"
KERNELS = "triton_kernels.kimi_delta_attention."
RULE = "triton_kernels.gated_delta_rule_"
SCAN, REVERSE, STEPS = (
    f"{RULE}fwd:scan_kernel",
    f"{RULE}reverse:reverse_scan_kernel",
    f"{RULE}step:step_kernel",
)
PREPARE, GRADIENTS = f"{KERNELS}fwd:prepare_kernel", f"{KERNELS}bwd:gradients_kernel"
COPIES = f"{KERNELS}fwd:copies_kernel"
BETWEEN, ADDED = f"{KERNELS}fwd:lies_between", f"{KERNELS}fwd:add_cuts"
CUTS, PRODUCTS = f"{KERNELS}bwd:differentiate_cuts", f"{KERNELS}bwd:products_kernel"
FORGET = "triton_kernels.tiles:forget_before"
WIDEN = "backends.kimi_delta_attention.triton_adapter:_widen"
COMBINE, GATE = f"{RULE}bwd:sum_heads_kernel", f"{KERNELS}bwd:differentiate_gates"
# fmt: off
BUGS = (
    ("the first pairs have no cut", PREPARE, "o_j, 0, 4,", "o_j, 1, 4,", PLAIN),
    ("the widest cut is left out", PREPARE, "C // 32 + 4", "C // 32 + 3", PLAIN),
    ("a token does not read its own write", PREPARE, "tl.sum(b_qs * b_ks", "0.0 * tl.sum(b_qs * b_ks", PLAIN),
    ("beta is left out of L", PREPARE, "b_kk * b_beta[:, None]", "b_kk", PLAIN),
    ("kl decays like kg", f"{KERNELS}fwd:store_copies", "b_k * b_lam", "b_k * b_gam", PLAIN),
    ("keys that backward makes again have the norm of queries", COPIES, "p_rows + 3 * C", "p_rows + 2 * C",
     PLAIN),
    ("queries that backward makes again are those of the first key head", COPIES,
     "i_h // (HV // H) * K", "0 * i_h", TWO_KEYS),
    ("pairs of a level without a cut between them", ADDED, "== 1", "<= 1", PLAIN),
    ("dg without a token right of a cut", BETWEEN, "(right, i + 1, start", "(right, i, start", PLAIN),
    ("dg with a token left of a cut", BETWEEN, "(right, start, i + 1)", "(right, start, i)", PLAIN),
    ("keys left of a cut are halved", CUTS, "b_beta, 1.0)", "b_beta, 0.5)", PLAIN),
    ("keys left of a cut read nothing", PRODUCTS, "tl.trans(-b_YU)", "0.0 * b_YU", PLAIN),
    ("sums of g have one word", f"{KERNELS}fwd:find_factors", "b_g.to(tl.float64",
     "b_g.to(tl.bfloat16).to(tl.float64", PLAIN),
    ("no bias", "triton_kernels.tiles:load_decays", "b_x += tl.load(dt_bias",
     "b_x += 0.0 * tl.load(dt_bias", GATES),
    ("rows of the state decay alike", SCAN, "if last is not None:", "if False:", PLAIN),
    ("the gradient's rows decay alike", REVERSE, "b_last = by_row(", "b_last *= by_row(", PLAIN),
    ("keys in place of what decays to the end", REVERSE, "if kl is not None:", "if False:", PLAIN),
    ("what rounding took of the first state is lost", REVERSE, "i_v) * K + o_k, b_lost",
     "i_v) * K + o_k, 0.0 * b_lost", ONE),
    ("what rounding took of the first state is that of one tile", PRODUCTS, "range(0, TILES)",
     "range(0, 1)", TWO_TILES),
    ("dg without the state carried through", GRADIENTS, "(b_last * b_SdS)[None, :]",
     "(0.0 * b_SdS)[None, :]", PLAIN),
    ("dg with a token's own write", GRADIENTS, "o_r[:, None] > o_c[None, :], b_k * b_dk",
     "o_r[:, None] >= o_c[None, :], b_k * b_dk", PLAIN),
    ("dg without the keys of cuts", CUTS, "+ b_k * b_row_k", "+ 0.0 * b_row_k", PLAIN),
    ("dk without beta", GRADIENTS, "+= b_rowk * b_beta[:, None]", "+= b_rowk", PLAIN),
    ("dbeta without what keys read", GRADIENTS, "b_dbeta += tl.sum(", "b_dbeta += 0.0 * tl.sum(", PLAIN),
    ("dbeta is not divided", GRADIENTS, "b_written / b_beta", "b_written", PLAIN),
    ("dA_log of one slice", GRADIENTS, "dA += tl.sum", "dA = tl.sum", GATES),
    ("softplus has no derivative", GATE, "sigmoid(b_x)", "sigmoid(0.0 * b_x)", GATES),
    ("the bounded gate without its rate", GATE, "b_rate * b_dy", "b_dy", BOUND),
    ("a document does not forget the one before", FORGET, "b_place == 0", "b_place < 0", DOCUMENTS),
    ("one value head of a group", COMBINE, "range(0, HV // H)", "range(0, 1)", PLAIN),
    ("dq keeps its part along q", COMBINE, "b_dx - b_x * tl.sum", "b_dx - 0.0 * b_x * tl.sum", PLAIN),
    ("a step decays by its first channel", STEPS, "exp(b_g), 1", "exp(tl.max(tl.max(b_g, 0), 0)), 1", STEP),
    ("a step's decays are those of one head", STEPS, "i_x * GR + i_h * K", "i_x * GR + 0 * i_h * K", STEP),
)
# fmt: on


# what Gluon prepares where kernels are compiled: two chunks, the second ragged, and two slices
BOUNDED = replace(BOUND, name="bounded", T=70, K=96, V=16, norm="random")
HOPPER = f"{KERNELS}prepare_hopper:prepare_kernel"
HOPPERS_BUGS = (
    ("a token does not read its own write", "s_own.load(ROW)", "0.0 * s_own.load(ROW)"),
    (
        "the second half reads from the first one's end",
        "b_start - (b_0 + b_1 + b_2)",
        "b_start - (b_0 + b_1)",
    ),
    ("keys of the second 16 tokens decay twice", "block % 2 == 0", "block >= 0"),
    ("kl decays over its own 16 tokens twice", "b_all - b_start - b_s", "b_all - b_start"),
    ("no bias", "b_bias.to(gl.float32)", "0.0 * b_bias.to(gl.float32)"),
    ("tokens behind the end decay", "gl.where(m_t, b_g, 0.0)", "gl.where(m_t | True, b_g, 0.0)"),
    ("one slice alone", "for i in range(SLICES)", "for i in range(1)"),
)
# several documents in 16 tokens, one that begins in the second chunk, and one at its last token
PLACES = replace(BOUNDED, name="places", documents=(3, 1, 18, 47, 1))
SAFE_GATE = replace(BOUNDED, name="safe", gates=None, lower_bound=None, decay="bounded")
RESET_BUGS = (
    ("pairs of two documents see each other", "m_P & together", "m_P", PLACES),
    ("keys of two documents do", "m_L & together", "m_L", PLACES),
    (
        "the state before passes into a document",
        "gl.where(b_first < 0, 1.0, 0.0)",
        "gl.where(b_first < 64, 1.0, 0.0)",
        PLACES,
    ),
    (
        "a document before the last one writes the state",
        "gl.where(b_first == b_end, 1.0, 0.0)",
        "gl.where(b_first < 64, 1.0, 0.0)",
        PLACES,
    ),
    ("the state stays behind the chunk", "gl.where(b_end_n < 0, b_last, 0.0)", "b_last", PLACES),
    ("-inf is no reset", 'b_given == -float("inf")', "b_given > 0.0", SAFE_GATE),
    ("a g that is given is that of a gate", "b_x) * LOG2E", "0.5 * b_x) * LOG2E", SAFE_GATE),
)


def is_green(case):
    dtype = torch.bfloat16 if case in (ONE, TWO_TILES) else torch.float32
    if isinstance(case, str):
        judged = rule.step_verdicts(channel_cases.STEPS[case], dtype, "triton", DEVICE)
    else:
        judged = rule.verdicts(case, dtype, "triton", DEVICE)
    return all(
        verdict.passed and verdict.baseline < (1e-4 if dtype == torch.float32 else 0.1)
        for verdict in judged
    )


@pytest.mark.parametrize(
    ("name", "place", "line", "mistake", "case"), BUGS, ids=[bug[0] for bug in BUGS]
)
def test_a_planted_bug_turns_parity_red(name, place, line, mistake, case):
    with planted(Bug(name, place, line, mistake, "")):
        assert not is_green(case)


@pytest.mark.parametrize(
    "case",
    [WHOLE, PLAIN, GATES, BOUND, PACKED, DOCUMENTS, ONE, TWO_TILES, STEP],
    ids=str,
)
def test_parity_is_green_without_them(case):
    assert is_green(case)


# a gate's bound, A_log, and x: exp(A_log) x is infinite, and g is -inf
ENDS = {"with a bound": (-5.0, 80.0, 1e5), "softplus": (None, 100.0, 3.0)}


def gradients_at_the_ends(name, dtype):
    """Returns those of g, A_log and dt_bias where every gate is at an end."""
    lower_bound, rate, x = ENDS[name]
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 1, 16, generator=make).to(DEVICE, dtype) for _ in range(3))
    signs = torch.randn(1, 20, 1, 16, generator=make).sign()
    a, A_log, dt_bias = (
        y.to(DEVICE).requires_grad_()
        for y in (x * signs, torch.full((1,), rate), torch.zeros(1, 16))
    )
    o, _ = kimi_delta_attention(
        q,
        k,
        v,
        a,
        torch.full((1, 20, 1), 0.5, dtype=dtype, device=DEVICE),
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        backend="triton",
    )
    return torch.autograd.grad(o.float().square().sum(), (a, A_log, dt_bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ENDS)
def test_gates_at_their_ends_have_no_gradients(name, dtype):
    assert all(y.abs().max() < 1e-6 for y in gradients_at_the_ends(name, dtype))


@pytest.mark.parametrize(
    ("name", "line", "mistake"),
    [
        ("with a bound", "tl.minimum(tl.maximum(b_y, -100.0), 100.0)", "b_y"),
        ("softplus", "kept = b_g > RESET", "kept = b_g > -1e30"),
    ],
    ids=["infinity times 0", "a reset has a gradient"],
)
def test_a_bug_planted_at_the_ends_of_gates_is_seen(name, line, mistake):
    with planted(Bug(name, GATE, line, mistake, "")):
        assert any(y.isnan().any() for y in gradients_at_the_ends(name, torch.float32))


def error_from_a_large_state():
    """Returns how far a float16 call is from PyTorch's; its states are beyond float16's range."""
    x, results = inputs(WHOLE, torch.float16).to(DEVICE), []
    assert x.initial_state is not None
    for backend in ("triton", "chunked"):
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta)]
        _, state = kimi_delta_attention(
            *leaves, initial_state=1e6 * x.initial_state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, backend=backend,
        )  # fmt: skip
        assert state is not None
        results.append((state, *torch.autograd.grad(state.square().mean().sqrt(), leaves[3:])))
    return max(((y - z).norm() / z.norm()).item() for y, z in zip(*results, strict=True))


def test_float16_has_states_beyond_its_range():
    assert error_from_a_large_state() < 0.01
    with planted(Bug("", WIDEN, "call.q.dtype != torch.float16", "True", "")):
        assert not error_from_a_large_state() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_saved_tensors_have_the_declared_shapes_and_dtypes(dtype, monkeypatch):
    """A compiled graph is told them before the call; float16 is computed in float32."""
    monkeypatch.setattr(rule_adapter, "KEPT_BYTES", 2**30)
    monkeypatch.setattr(rule_adapter, "FIXED_SHAPES", SimpleNamespace(get=lambda: True))
    x = inputs(WHOLE, dtype)
    call = Rule(x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, l2norm=True)
    saved = triton_adapter.forward(call, save=True)[2]
    assert [(tuple(y.shape), y.dtype) for y in saved] == triton_adapter.saved_shapes(call)


def test_float64_is_refused_with_what_is_computed():
    x = torch.ones(1, 2, 1, 16).double()
    with pytest.raises(
        BackendRefusal, match="computes bfloat16, float16, float32; tensors are float64"
    ):
        kimi_delta_attention(x, x, x, -x, x[..., 0], backend="triton")


ROW = config(96, 16, itemsize=2, rule="kimi_")
compiled = pytest.mark.skipif(
    not ROW.prepare.gluon or ROW.dot == "interpreted", reason="Gluon runs compiled, on Hopper"
)


def bounded_is_green(case=BOUNDED, **changes):
    judged = rule.verdicts(replace(case, **changes), torch.bfloat16, "triton", DEVICE)
    return all(verdict.passed for verdict in judged)


@compiled
@pytest.mark.parametrize(
    ("name", "line", "mistake"), HOPPERS_BUGS, ids=[bug[0] for bug in HOPPERS_BUGS]
)
def test_a_planted_bug_of_gluons_kernel_turns_parity_red(name, line, mistake):
    with planted(Bug(name, HOPPER, line, mistake, "")):
        assert not bounded_is_green()


@compiled
@pytest.mark.parametrize(
    ("name", "line", "mistake", "case"), RESET_BUGS, ids=[bug[0] for bug in RESET_BUGS]
)
def test_a_planted_bug_of_resets_in_gluons_kernel_turns_parity_red(name, line, mistake, case):
    with planted(Bug(name, HOPPER, line, mistake, "")):
        assert not bounded_is_green(case)


@compiled
@pytest.mark.parametrize("case", [PLACES, SAFE_GATE], ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"K": 128, "state": True}, {"T": 1, "documents": None}], ids=str
)
def test_gluons_kernel_forgets_where_the_judge_does(case, changes, monkeypatch):
    ran, kernel = [], prepare_hopper.prepare_kernel

    class Watched:
        def __getitem__(self, grid):
            ran.append(grid)
            return kernel[grid]

    monkeypatch.setattr(prepare_hopper, "prepare_kernel", Watched())
    assert bounded_is_green(case, **changes) and ran


@compiled
@pytest.mark.skipif(DEVICE == "cuda", reason="orders are those of the emulator")
@pytest.mark.parametrize("order", [0, 1, 2], ids=["ascending", "descending", "shuffled"])
@pytest.mark.parametrize("case", [PLACES, SAFE_GATE], ids=str)
def test_gluons_kernel_forgets_in_every_order_of_warps_with_all_checks(case, order):
    from tests.support.emulator import driver

    with driver.options(check=1, order=order, quantum=7 if order == 2 else 0) as reports:
        assert bounded_is_green(case, HV=1, V=16)
    assert not reports, "\n".join(reports)


@compiled
def test_a_broken_promise_of_a_safe_gate_stays_finite():
    x = inputs(replace(SAFE_GATE, decay="deep"), torch.bfloat16).to(DEVICE)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta)]
    o, _ = kimi_delta_attention(
        *leaves, safe_gate=True, use_qk_l2norm_in_kernel=True, backend="triton"
    )
    gradients = torch.autograd.grad(o.float().square().sum(), leaves)
    assert all(y.isfinite().all() for y in (o, *gradients))


@compiled
def test_gluon_leaves_keys_as_they_are_that_the_call_does_not_normalize(monkeypatch):
    x = inputs(replace(BOUNDED, norm="unit"), torch.bfloat16).to(DEVICE)

    def error():
        o, judge = (
            kimi_delta_attention(
                x.q / 2, x.k / 2, x.v, x.g, x.beta, A_log=x.A_log, dt_bias=x.dt_bias,
                lower_bound=-5.0, use_gate_in_kernel=True, backend=backend,
            )[0].float()
            for backend in ("triton", "chunked")
        )  # fmt: skip
        return (o - judge).norm() / judge.norm()

    assert error() < 0.02
    with planted(Bug("", f"{KERNELS}fwd:prepare", "l2norm and hopper.takes", "hopper.takes", "")):
        assert error() > 0.1


@compiled
@pytest.mark.parametrize(
    "changes",
    [{}, {"K": 128, "T": 64, "keys": "near", "beta": 2.0}, {"K": 32, "lengths": (0, 3, 64, 1, 2)}, {"T": 1},
     {"gates": "wide", "lower_bound": -1e-3}, {"gates": "wide"}],
    ids=str,
)  # fmt: skip
def test_gluons_kernel_agrees_with_the_judge(changes):
    assert bounded_is_green(**changes)


def test_gluon_takes_what_its_factors_hold():
    q = torch.ones(1, 1, 1, 96, dtype=torch.bfloat16)
    row = replace(config(96, 16, itemsize=2, rule="kimi_"), dot="tf32")
    takes = prepare_hopper.takes
    assert takes(q, q, q, -5.0, row) and takes(q, q, q.float(), -1.0, row)
    assert not any(takes(q, q, q, bound, row) for bound in (-5.1, None))
    assert not takes(q[..., :20], q, q, -5.0, row) and not takes(q, q, q.double(), -5.0, row)
    with assume(Card(8)):
        others = [config(96, 16, itemsize=2, rule="kimi_")]
    others += [config(K, 16, itemsize=size, rule="kimi_") for K, size in ((96, 4), (192, 2))]
    assert not any(takes(q, q, q, -5.0, replace(row, dot="tf32")) for row in others)
    assert not takes(q, q, q, -5.0, replace(row, dot="interpreted"))
    odd = torch.ones(97, dtype=torch.bfloat16)[1:].view(1, 1, 1, 96)
    assert not takes(q, odd, q, -5.0, row)


def test_a_call_keeps_at_most_140_mebibytes_beside_its_inputs(monkeypatch):
    """With states, at 4,096 tokens and 32 heads of 128:128 in bfloat16; it kept 230."""
    monkeypatch.setattr(rule_adapter, "KEPT_BYTES", 2**62)
    shapes = {"q": (32, 128), "k": (32, 128), "v": (32, 128), "g": (32, 128), "beta": (32,)}
    x = {name: torch.empty(1, 4096, *y, dtype=torch.bfloat16) for name, y in shapes.items()}
    kept = triton_adapter.saved_shapes(Rule(**x, l2norm=True))
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in kept)
    assert 64 * 2**20 < size < 140 * 2**20
