"""Kimi Delta Attention: names of its release, what is refused,
the scalar rule inside of it, planted bugs.
"""

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from delta_trn.backends import (
    BackendRefusal,
    checking,
    gated_delta_rule_step,
    kimi_delta_attention,
    kimi_delta_attention_step,
)
from delta_trn.backends.dispatch import BACKENDS, Call, adapter, choose
from delta_trn.backends.gated_delta_rule.contract import log_decay, make_gates
from delta_trn.backends.parity import channel_cases, rule, rule_cases
from delta_trn.backends.parity.rule_cases import BOTH, Case, inputs
from tests.support.planted_bugs import RULE, Bug, planted

B, T, H, HV, K, V = 2, 3, 2, 4, 8, 5
MODULE = "backends.kimi_delta_attention"


def arguments(**changes: Any) -> dict[str, Any]:
    """Returns valid arguments; `changes` replaces some,
    by name=value or name=function of the tensor.
    """
    x = inputs(
        Case("arguments", B, T, H, K, V, "", HV=HV, op="kimi_delta_attention"), torch.float32
    )
    tensors: dict[str, Any] = {name: getattr(x, name) for name in ("q", "k", "v", "g", "beta")}
    return tensors | {
        n: change(tensors[n]) if callable(change) else change for n, change in changes.items()
    }


def test_names_and_positions_are_those_of_flash_linear_attention():
    parameters = inspect.signature(kimi_delta_attention).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
        *(
            "use_qk_l2norm_in_kernel",
            "use_gate_in_kernel",
            "use_beta_sigmoid_in_kernel",
            "allow_neg_eigval",
        ),
        *(
            "safe_gate",
            "lower_bound",
            "disable_recompute",
            "return_intermediate_states",
            "state_v_first",
        ),
        *("cu_seqlens", "cu_seqlens_cpu", "cp_context", "use_graph", "max_num_seqs"),
    ]
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    ours = {"return_states_at", "position", "backend"}
    assert keywords == ours | {"A_log", "dt_bias", "chunk_size", "transpose_state_layout"}


GATE: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)}
# fmt: off
BAD = [
    ({"g": lambda x: x[..., 0]}, ValueError, "g [2, 3, 4] has 3 dimensions, expected [B, T, HV, K]"),
    ({"g": lambda x: x[..., :7]}, ValueError, "g [2, 3, 4, 7] is [B, T, HV, K] with K=7, but K of q"),
    ({"beta": lambda x: x[..., None]}, ValueError, "beta [2, 3, 4, 1] has 4 dimensions, expected [B, T, HV]"),
    ({"A_log": torch.zeros(HV)}, ValueError, "leave A_log out if g is finished, or pass use_gate"),
    ({"A_log": torch.zeros(HV)}, ValueError, "softplus, or the sigmoid of a lower_bound"),
    ({"use_gate_in_kernel": True}, ValueError, "pass A_log [HV], and dt_bias [HV, K] if"),
    ({**GATE, "dt_bias": torch.zeros(HV)}, ValueError, "dt_bias [4] has not HV K = 4 * 8 = 32 elements"),
    ({**GATE, "dt_bias": torch.zeros(HV, 3)}, ValueError, "dt_bias [4, 3] is [HV, K] with K=3"),
    ({**GATE, "lower_bound": 0.0}, ValueError, "lower_bound is 0.0; the gate is"),
    ({**GATE, "lower_bound": 5.0}, ValueError, "trained with, or leave lower_bound out if"),
    ({**GATE, "lower_bound": float("-inf")}, ValueError, "lower_bound is -inf; the gate is"),
    ({**GATE, "safe_gate": True}, ValueError, "safe_gate=True with lower_bound=None"),
    ({**GATE, "safe_gate": True}, ValueError, "leave safe_gate out, which changes no number"),
    ({**GATE, "safe_gate": True, "lower_bound": -6.0}, ValueError, "safe_gate=True with lower_bound=-6.0"),
    ({"allow_neg_eigval": True}, ValueError, "leave allow_neg_eigval out if beta is finished, or pass"),
    ({"chunk_size": 16}, ValueError, "chunk_size is 16; pass 32 or 64"),
    ({"cp_context": object()}, ValueError, "cp_context is a object; no sequence is divided"),
    ({"return_intermediate_states": True}, ValueError, "return_intermediate_states=True is not supported"),
    ({"use_graph": True}, ValueError, "use_graph=True is not supported"),
    ({"max_num_seqs": 8}, ValueError, "max_num_seqs=8 is not supported"),
    ({"A_lgo": torch.zeros(HV)}, TypeError, "A_lgo"),
    ({"position": torch.zeros(B, T)}, TypeError, "position is torch.float32, not torch.int64"),
    ({"position": torch.zeros(1, T).long()}, ValueError, "position [1, 3] is [B, T] with B=1"),
    ({"position": torch.zeros(B, T).long(), "cu_seqlens": torch.tensor([0, T])}, ValueError,
     "packed sequences lie end to end in one row"),
    ({"initial_state": torch.zeros(B, HV, V, K)}, ValueError, "initial_state [2, 4, 5, 8] is [N, HV, K, V]"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[row[2][:30] for row in BAD])
def test_bad_arguments_are_named_before_any_work(changes, error, message, monkeypatch):
    monkeypatch.setattr(adapter("chunked", "kimi_delta_attention"), "forward", None)
    with pytest.raises(error, match=re.escape(message)):
        kimi_delta_attention(**arguments(**changes))


def test_bad_arguments_of_a_step_are_named():
    token: dict[str, Any] = {name: x[:, 0] for name, x in arguments().items()} | {
        "state": torch.zeros(B, HV, K, V)
    }
    with pytest.raises(
        ValueError, match=re.escape("g [2, 4] has 2 dimensions, expected [B, HV, K]")
    ):
        kimi_delta_attention_step(**token | {"g": token["g"][..., 0]})
    with pytest.raises(ValueError, match="safe_gate=True with lower_bound=None"):
        kimi_delta_attention_step(**token, **GATE, safe_gate=True)


def test_check_mode_reads_every_channel():
    late = arguments()["g"].clone()
    late[1, 2, 3, 7] = 0.5
    with (
        checking(),
        pytest.raises(ValueError, match=r"g at \(1, 2, 3, 7\) is 0.5, which is above 0"),
    ):
        kimi_delta_attention(**arguments(g=late))
    with checking():
        kimi_delta_attention(**arguments(g=lambda g: torch.full_like(g, -torch.inf)))


def test_check_mode_holds_a_safe_gate_to_its_promise():
    g = -5 * torch.rand(B, T, HV, K, generator=torch.Generator().manual_seed(0))
    g[1, 2, 3] = -torch.inf
    below, some = g.clone(), g.clone()
    below[0, 1, 2, 4], some[1, 2, 3, 0] = -5.1, -1.0
    with checking():
        kimi_delta_attention(**arguments(g=g), safe_gate=True)
        kimi_delta_attention(**arguments(g=below))
        for broken, message in (
            (below, r"g at \(0, 1, 2, 4\) is -5.1, which is below -5, and safe_gate=True promises"),
            (
                some,
                r"g at \(1, 2, 3, 1\) is -inf, which is a reset, and other channels of its head",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                kimi_delta_attention(**arguments(g=broken), safe_gate=True)


def test_check_mode_names_a_place_that_does_not_count():
    places = torch.tensor([[4, 5, 0], [0, 1, 3]])
    with (
        checking(),
        pytest.raises(ValueError, match=r"position at \(1, 2\) is 3, which neither is"),
    ):
        kimi_delta_attention(**arguments(), position=places)
    with checking():
        kimi_delta_attention(**arguments(), position=places.where(places != 3, 2))


FORMS: dict[str, dict[str, Any]] = {
    "given": {},
    "safe": {"safe_gate": True},
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "lower_bound": -5.0},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["chunked", "recurrent", "triton", "nki-simulator"])
def test_places_in_rows_are_bounds_of_packed_sequences(backend, form):
    """Of two rows that begin apart; the second one's first document continues from a state."""
    if reason := BACKENDS[backend].unavailable("cpu"):
        pytest.skip(reason)
    length, lengths = 40, ((17, 1, 22), (9, 31))
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV, K), "beta": (HV,)}
    x = {n: torch.randn(2, length, *y, generator=generator) for n, y in shapes.items()}
    x["beta"] = x["beta"].sigmoid()
    if "gate" not in form and form in ("given", "safe"):
        x["g"] = -5 * x["g"].sigmoid()
    state, options = torch.randn(2, HV, K, V, generator=generator), dict(FORMS[form])
    do, dstate = torch.randn(2, length, HV, V, generator=generator), torch.cos(state)
    position = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    position[1, :9] += 4
    common: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "backend": backend}
    gates = options.get("use_gate_in_kernel")
    if gates:
        common["A_log"] = torch.linspace(-1, 2, HV)

    def gradients(x, state, do, dstate, **places):
        leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
        leaves["initial_state"] = state.clone().requires_grad_()
        o, final = kimi_delta_attention(
            **leaves, **common, **options, **places, output_final_state=True
        )
        assert final is not None
        return [o, final, *torch.autograd.grad([o, final], list(leaves.values()), [do, dstate])]

    together = gradients(x, state, do, dstate, position=position)
    for b, row in enumerate(lengths):
        bounds = torch.tensor([0, *row]).cumsum(0)
        first, last = torch.zeros(len(row), HV, K, V), torch.zeros(len(row), HV, K, V)
        first[0], last[-1] = state[b] * b, dstate[b]
        one = {name: y[b : b + 1] for name, y in x.items()}
        o, final, *grads, dfirst = gradients(one, first, do[b : b + 1], last, cu_seqlens=bounds)
        expected = [o, final[-1:], *grads, dfirst[:1] * b]
        for ours, theirs in zip(together, expected, strict=True):
            torch.testing.assert_close(ours[b : b + 1], theirs, rtol=1e-4, atol=2e-5)
    assert not together[5][position == 0].any(), "g of a document's first token has no gradient"


def test_states_inside_of_a_row_of_documents_are_those_of_shorter_ones():
    places = torch.tensor([[0, 1, 0], [2, 0, 1]])
    states: Any = kimi_delta_attention(**arguments(), return_states_at=(1, T), position=places)[1]
    for n, count in enumerate((1, T)):
        short: dict[str, Any] = {name: x[:, :count] for name, x in arguments().items()}
        short |= {"position": places[:, :count], "output_final_state": True}
        torch.testing.assert_close(states[:, n], kimi_delta_attention(**short)[1])


def test_other_devices_say_what_computes_it(monkeypatch):
    call = Call("kimi_delta_attention", "xla", torch.float32)
    with pytest.raises(BackendRefusal) as refusal:
        choose(call)
    assert 'runs on xla only when asked for: backend="chunked"' in str(refusal.value)
    assert "nki            needs torch_xla and nki" in str(refusal.value)
    on_gpu = choose(replace(call, device="cuda", capability=(9, 0)))
    assert on_gpu is BACKENDS["triton"]
    assert (
        choose(replace(call, device="cuda", dtype=torch.float64, capability=(9, 0)))
        is BACKENDS["chunked"]
    )
    x = SimpleNamespace(is_cuda=True)
    with pytest.warns(
        UserWarning, match="as PyTorch operations, chunk by chunk, since Triton's kernels do not"
    ):
        _notice(x, None, "chunked")
    _notice(x, "chunked", "chunked")  # asked for: no warning, which would be an error here
    _notice(x, None, "triton")


_notice: Any = inspect.unwrap(kimi_delta_attention).__globals__["_notice"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["mixed", "reflect", "reset_packed", "gates", "gva_2"])
def test_equal_channels_are_the_gated_delta_rule(name, dtype):
    """Judged by what the scalar rule is judged by; its dg is the sum over channels."""
    case = rule_cases.BY_NAME[name]
    reference = rule.reference(case, dtype)

    def spread(q, k, v, g, beta, *, A_log=None, dt_bias=None, **options):
        bias = None if dt_bias is None else dt_bias[:, None].expand(-1, q.shape[-1])
        g = g[..., None].expand(*g.shape, q.shape[-1])
        return kimi_delta_attention(q, k, v, g, beta, A_log=A_log, dt_bias=bias, **options)

    judged = reference.verdicts("chunked", rule.outcome(inputs(case, dtype), "chunked", spread))
    assert [str(verdict) for verdict in judged if not verdict.passed] == []


def test_equal_channels_of_a_step_are_the_gated_delta_rule():
    token: dict[str, Any] = {name: x[:, 0] for name, x in arguments().items()} | {
        "state": torch.ones(B, HV, K, V)
    }
    scalar = token["g"][..., 0]
    ours = kimi_delta_attention_step(**token | {"g": scalar[..., None].expand(B, HV, K)})
    for x, y in zip(ours, gated_delta_rule_step(**token | {"g": scalar}), strict=True):
        torch.testing.assert_close(x, y)


def test_options_that_mean_nothing_change_nothing_and_others_have_two_names():
    tensors = arguments()
    o, state = kimi_delta_attention(**tensors, output_final_state=True)
    ignored: dict[str, Any] = {
        "disable_recompute": True,
        "chunk_size": 32,
        "cu_seqlens_cpu": torch.zeros(2),
        "safe_gate": True,
    }
    again, turned = kimi_delta_attention(
        **tensors, output_final_state=True, transpose_state_layout=True, lower_bound=-5.0, **ignored
    )
    assert state is not None and turned is not None
    assert torch.equal(o, again) and torch.equal(state, turned.mT)
    bias = torch.randn(HV, K, generator=torch.Generator().manual_seed(0))
    gate: dict[str, Any] = GATE | {"lower_bound": -3.0}
    forms: list[Any] = [
        {"dt_bias": bias},
        {"dt_bias": bias.flatten()},
        {"dt_bias": bias, "A_log": None},
    ]
    ours = [kimi_delta_attention(**tensors, **{**gate, **form})[0] for form in forms]
    assert torch.equal(ours[0], ours[1]) and torch.equal(ours[0], ours[2])
    g = -3.0 * torch.sigmoid(tensors["g"] + bias)
    torch.testing.assert_close(ours[0], kimi_delta_attention(**arguments(g=g))[0])


def test_states_inside_of_a_sequence_are_those_of_shorter_ones():
    tensors = arguments()
    states: Any = kimi_delta_attention(**tensors, return_states_at=(1, T))[1]
    short: dict[str, Any] = {name: x[:, :1] for name, x in tensors.items()}
    for n, x in enumerate((short, tensors)):
        torch.testing.assert_close(
            states[:, n], kimi_delta_attention(**x, output_final_state=True)[1]
        )


def test_it_compiles_to_one_graph():
    leaves = [x.requires_grad_() for x in arguments().values()]

    def loss(*tensors):
        return kimi_delta_attention(*tensors)[0].square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for x, y in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("A_log", [-100.0, 0.0, 90.0, 300.0])
def test_the_bounded_gate_of_any_rate_is_finite_and_so_are_its_gradients(A_log):
    a = torch.tensor([-1e30, -40.0, 0.0, 1e-3, 40.0, 1e30], requires_grad=True)
    rate = torch.full((6,), A_log, requires_grad=True)
    g = log_decay(a, rate, lower_bound=-5.0)
    assert ((g <= 0) & (g >= -5)).all() and g[2] == -2.5
    assert all(x.isfinite().all() for x in torch.autograd.grad(g.sum(), [a, rate]))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_gates_of_a_token_have_the_same_bits_alone(lower_bound):
    """Of so many channels that they are made in several pieces."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 9, 160, generator=generator)
    A_log, dt_bias = torch.randn(9, generator=generator), torch.randn(9, 160, generator=generator)
    together, alone = (
        torch.cat(
            [make_gates(x, x[..., 0], A_log, dt_bias, 0.0, lower_bound)[0] for x in a.split(n)]
        )
        for n in (40, 1)
    )
    assert torch.equal(together, alone)
    expected = log_decay(a, A_log[:, None], dt_bias, lower_bound)
    torch.testing.assert_close(together, expected)


WHOLE = Case(
    "kimi planted",
    1,
    70,
    2,
    16,
    24,
    "",
    HV=4,
    decay="split",
    reflect=True,
    norm="random",
    state=True,
    loss=BOTH,
    op="kimi_delta_attention",
)
GATES, BOUND = replace(WHOLE, gates="plain"), replace(WHOLE, gates="plain", lower_bound=-5.0)
CHUNKED, JUDGE = f"{RULE}.chunked", f"{RULE}.recurrent"
STRONG, DEEP = channel_cases.BY_NAME["kimi_strong"], channel_cases.BY_NAME["kimi_deep"]
# fmt: off
BUGS = [
    (Bug("the state does not decay", f"{CHUNKED}:compute_channels",
         "gam[..., -1, :, None] * S", "S", ""), WHOLE),
    (Bug("keys read what has not decayed", f"{CHUNKED}:compute_channels",
         "(k * gam) @ S", "k @ S", ""), WHOLE),
    (Bug("queries read what has not decayed", f"{CHUNKED}:compute_channels",
         "(q * gam) @ S", "q @ S", ""), WHOLE),
    (Bug("writes do not decay", f"{CHUNKED}:compute_channels", "(k * lam).mT @ U", "k.mT @ U", ""), WHOLE),
    (Bug("beta is left out of L", f"{CHUNKED}:compute_channels", "beta * kk", "kk", ""), WHOLE),
    (Bug("a token does not read its own write", f"{CHUNKED}:multiply_pairs", "(q * k).sum(-1)",
         "0 * (q * k).sum(-1)", ""), WHOLE),
    (Bug("the cut is no decay", f"{CHUNKED}:multiply_pairs",
         "upto_right.exp()", "after_right.exp()", ""), WHOLE),
    (Bug("left halves do not decay", f"{CHUNKED}:multiply_pairs",
         "k_left * after_left.exp()", "k_left", ""), WHOLE),
    (Bug("right halves begin anew", f"{CHUNKED}:multiply_pairs",
         "upto_right + before", "upto_right", ""), WHOLE),
    (Bug("left halves end at once", f"{CHUNKED}:multiply_pairs",
         "after_left + behind", "after_left", ""), WHOLE),
    (Bug("decays are quotients", f"{CHUNKED}:multiply_pairs", "P, kk = pairs.squeeze(-3).unbind()",
         "b = g.cumsum(-2); P, kk = ((x * b.exp()) @ (k * (-b).exp()).mT).unbind(); kk = "
         "kk.tril(-1)",
         ""), STRONG),
    (Bug("sums of g are rounded", f"{CHUNKED}:compute_channels", "(g.cumsum(-2), behind)",
         "(g.bfloat16().cumsum(-2), behind)", ""), WHOLE),
    (Bug("a step decays all channels alike", f"{CHUNKED}:step", "decay if call.has_channels",
         "decay.mean(-2, keepdim=True) if call.has_channels", ""), "decode_kimi_split"),
    (Bug("judge: dg of a row is that of the head", f"{JUDGE}:backward",
         "by_row if _has_channels(call) else", "by_row.sum(-1, keepdim=True) + 0 * by_row if True else", ""),
     WHOLE),
    (Bug("no bias", f"{RULE}.contract:_make_channels",
         "bias = None if dt_bias is None else", "bias = None and", ""),
     GATES),
    (Bug("rates in turns", f"{RULE}.contract:_make_channels",
         "A_log[h].repeat_interleave(K)", "A_log[h].repeat(K)",
         ""), GATES),
    (Bug("the bound is left out", f"{RULE}.contract:log_decay",
         "return lower_bound *", "return -1.0 *", ""), BOUND),
    (Bug("the rate is left out", f"{RULE}.contract:log_decay", "log_rate.clamp(max=80.0).exp() * x",
         "log_rate.exp() * 0 + x", ""), BOUND),
    (Bug("judge: the bounded gate's rate", f"{JUDGE}:_gradients_of_gates", "by_rate, dg = y * dy,",
         "by_rate, dg = x * dy,", ""), BOUND),
    (Bug("operation: the bound is lost", f"{MODULE}:_gates",
         "return A_log, dt_bias, lower_bound,", "return A_log, dt_bias, None,", ""), BOUND),
]
# fmt: on


def is_green(case):
    if isinstance(case, str):
        judged = rule.step_verdicts(channel_cases.STEPS[case], torch.float32, "chunked")
    else:
        judged = rule.verdicts(case, torch.float32, "chunked")
    return all(verdict.passed and verdict.baseline < 1e-4 for verdict in judged)


@pytest.mark.parametrize(("bug", "case"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_turns_parity_red(bug, case, without_cpu_kernel):
    rule.reference.cache_clear()
    with planted(bug):
        assert not is_green(case)
    rule.reference.cache_clear()


def test_parity_is_green_without_them(without_cpu_kernel):
    assert all(map(is_green, (WHOLE, GATES, BOUND, STRONG, DEEP, "decode_kimi_split")))


@pytest.mark.parametrize("shape", [(1, 1, 8, 16), (1, 3000, 2, 128)], ids=str)
def test_gradients_of_short_parameters_are_rounded_once(shape):
    """Sums over channels and over pieces of tokens in bfloat16 were several times as far off."""
    generator = torch.Generator().manual_seed(0)
    a, dg = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    parameters = [torch.randn(x, generator=generator).bfloat16() for x in (shape[2:3], shape[2:])]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves: Any = [x.to(dtype).requires_grad_() for x in parameters]
        full = torch.promote_types(dtype, torch.float32)
        g, _ = make_gates(a.to(full), a[..., 0].to(full), leaves[0], leaves[1], 0.0)
        results.append(torch.autograd.grad(g, leaves, dg.to(full)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2**-8, atol=0.0)
