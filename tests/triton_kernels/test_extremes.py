"""The Triton kernels at the ends of a dtype's range, where a decay leaves nothing,
and in several threads.
"""

import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from triton.language import core
from triton.runtime import interpreter

from delta_trn.backends import gated_delta_rule, gated_delta_rule_step
from delta_trn.backends.gated_delta_rule import triton_time_adapter
from delta_trn.backends.parity import rule, rule_cases
from delta_trn.backends.parity.judge import FACTOR, error
from delta_trn.backends.parity.rule_cases import BOTH, Case
from delta_trn.triton_kernels import launch
from delta_trn.triton_kernels.launch import arithmetic, take_turns
from tests.support.fuzz import checks
from tests.support.fuzz.cases import RandomCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(arithmetic() != "interpreted", reason="about Triton's interpreter")


def inputs(T=40, K=16, V=16, dtype=torch.float32):
    """Returns q, k, v, g, beta, initial_state, do and dstate of one sequence and head;
    unit q and k.
    """
    generator = torch.Generator().manual_seed(T)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    unit = torch.nn.functional.normalize
    x = {"q": unit(normal(1, T, 1, K), dim=-1), "k": unit(normal(1, T, 1, K), dim=-1)}
    x |= {"v": normal(1, T, 1, V), "do": normal(1, T, 1, V)}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    x |= {"g": -normal(1, T, 1).square() / 20, "beta": normal(1, T, 1).sigmoid()}
    return x | {"initial_state": normal(1, 1, K, V) / 4, "dstate": normal(1, 1, K, V)}


def outcome(x, backend="triton", **options):
    """Returns o, final_state and the gradients of the call, by name."""
    tensors = {name: tensor.to(DEVICE) for name, tensor in x.items()}
    do, dstate = tensors.pop("do"), tensors.pop("dstate")
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    o, state = gated_delta_rule(**leaves, output_final_state=True, backend=backend, **options)
    gradients = torch.autograd.grad([o, state], list(leaves.values()), [do, dstate])
    names = [f"d{name}" for name in leaves]
    return {"o": o.detach(), "final_state": state.detach()} | dict(
        zip(names, gradients, strict=True)
    )


def assert_as_exact_as_plain(x, wanted=None, **form):
    """Asserts that o, final_state and the gradients
    of `wanted` err no more than random cases may.
    """
    tensors = {name: tensor for name, tensor in x.items() if name not in ("do", "dstate")}
    (_, T, _, K), V = x["q"].shape, x["v"].shape[-1]
    case = RandomCase(
        Case("extreme", 1, T, 1, K, V, "", state=True, loss=BOTH, **form), x["q"].dtype, tensors,
        {"o": x["do"], "final_state": x["dstate"]}, tuple(wanted or tensors), device=DEVICE,
    )  # fmt: skip
    checks.Criterion(case).require("extreme", checks.outcome(case, "triton"))


def zero_keys():
    """One key in four is 0, and its value is 100."""
    x = inputs(dtype=torch.float16)
    x["k"][:, ::4], x["v"][:, ::4], x["q"][:, 1::4] = 0.0, 100.0, 0.0
    return x


def huge_keys():
    x = inputs(dtype=torch.float16)
    return x | {"q": 1e3 * x["q"], "k": 1e3 * x["k"], "beta": torch.full_like(x["beta"], 1e-3)}


def opposite_values():
    """Equal keys, of which each write takes back the one before: U is twice v,
    and a key's factor no more.
    """
    x = inputs(dtype=torch.float16)
    signs = torch.tensor([1.0, -1.0]).repeat(20)[None, :, None, None]
    v = (3e4 * signs).expand_as(x["v"]).half().contiguous()
    x["k"][:] = 1.02 * x["k"][:, :1].clone()
    return x | {"v": v, "beta": torch.ones_like(x["beta"]), "do": 1e-3 * x["do"]}


def tiny_keys():
    x = inputs(dtype=torch.float16)
    return x | {"q": 1e-4 * x["q"], "k": 1e-4 * x["k"]}


def huge_gradients():
    """dO is 1e4; half of the queries and keys are huge and half are tiny."""
    x = inputs(dtype=torch.float16)
    sizes = torch.tensor([1e3, 1e-3]).repeat(20)[None, :, None, None]
    sized = {name: (x[name] * sizes).half() for name in ("q", "k")}
    return (
        x
        | sized
        | {"do": 1e4 * x["do"], "v": 1e-2 * x["v"], "initial_state": 1e-2 * x["initial_state"]}
    )


@pytest.mark.parametrize(
    ("make", "segment"),
    [(zero_keys, None), (huge_keys, 1), (opposite_values, None), (tiny_keys, 1), (huge_gradients, None),
     (huge_gradients, 1)],
)  # fmt: skip
def test_float16_is_as_exact_as_plain_pytorch_whatever_the_norms_of_keys(
    make, segment, monkeypatch
):
    monkeypatch.setattr(triton_time_adapter, "SEGMENT", segment)
    assert_as_exact_as_plain(make(), norm="random")


def test_float16_forms_no_product_with_a_scale_that_would_overflow():
    """32 dO leaves float16's range, and no gradient does."""
    x = inputs(3, 128, dtype=torch.float16)
    x["do"], x["v"], x["initial_state"] = 1e3 * x["do"], 1e-2 * x["v"], 1e-2 * x["initial_state"]
    assert 32 * x["do"].abs().max() > 65504
    assert_as_exact_as_plain(x, scale=32.0)


def test_a_tiny_scale_and_huge_queries_and_keys_do_not_underflow():
    x = inputs(3)
    x["q"], x["k"] = 1e13 * x["q"], 1e13 * x["k"]
    assert_as_exact_as_plain(x, scale=1e-20, norm="random")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiny_values_and_huge_normalized_keys_do_not_underflow(dtype):
    x = inputs(70, dtype=dtype)
    x["q"], x["k"], x["v"] = 1e13 * x["q"], 1e13 * x["k"], 1e-30 * x["v"]
    x["k"][:, ::9], x["initial_state"] = 0.0, 1e-30 * x["initial_state"]
    assert_as_exact_as_plain(x, ("v", "initial_state"), norm="random")


RESETS = [float("-inf"), torch.finfo(torch.float32).min, -1e16, -1e12, -110.0]


def with_resets(dtype, T=70):
    x = inputs(T, dtype=dtype)
    for i, value in enumerate(RESETS):
        x["g"][:, 3 + 7 * i] = value
    x["g"][:, 50:52], x["g"][:, 60:] = RESETS[0], -1e-4
    return x


@pytest.mark.parametrize(
    ("dtype", "segment"), [(torch.float32, None), (torch.bfloat16, 1)], ids=["whole", "segments"]
)
def test_a_reset_forgets_the_state_and_leaves_other_tokens_exact(dtype, segment, monkeypatch):
    monkeypatch.setattr(triton_time_adapter, "SEGMENT", segment)
    x = with_resets(dtype)
    assert_as_exact_as_plain(x)
    results = outcome(x)
    assert not results["dg"].cpu()[x["g"] < -104].any()
    same = outcome(x | {"g": x["g"].clamp_min(-105.0)})
    assert all(torch.equal(results[name], same[name]) for name in results)


def test_a_step_after_a_reset_knows_its_own_token_alone():
    x = {
        name: tensor[:, 0]
        for name, tensor in inputs(1).items()
        if "state" not in name and name != "do"
    }
    state = torch.ones(1, 1, 16, 16)
    for g in RESETS:
        call = {
            name: tensor.to(DEVICE) for name, tensor in (x | {"g": torch.full((1, 1), g)}).items()
        }
        results = [
            gated_delta_rule_step(**call, state=y.to(DEVICE), backend="triton")
            for y in (state, 0 * state)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gates_of_any_rate_are_finite_and_exact():
    """exp(A_log) overflows; softplus of a underflows, or neither,
    or the product of both is moderate.
    """
    x = inputs(40)
    x["g"] = torch.linspace(-200, 20, 40)[None, :, None]
    for A_log in (90.0, 100.0, 150.0, 3.0):
        call = x | {"A_log": torch.full((1,), A_log), "dt_bias": torch.zeros(1)}
        assert_as_exact_as_plain(call, gates="plain")


def test_a_softplus_that_underflows_alone_keeps_its_product_with_a_large_rate():
    """A random case: exp(-108) is 0 and exp(46 - 108) is not, on which all of dg depended."""
    x = inputs(20)
    x["g"] = torch.linspace(-112, -104, 20)[None, :, None]
    assert_as_exact_as_plain(x | {"A_log": torch.full((1,), 46.0)}, gates="plain")


@pytest.mark.parametrize(
    ("dtype", "state"), [(torch.float32, True), (torch.float16, False)], ids=str
)
def test_a_token_has_the_same_numbers_whether_or_not_gradients_are_wanted(dtype, state):
    x = {name: tensor.to(DEVICE) for name, tensor in inputs(1, 48, 40, dtype).items()}
    token = {name: x[name][:, 0] for name in ("q", "k", "v", "g", "beta")}
    initial = x["initial_state"] if state else torch.zeros_like(x["initial_state"])
    options = {"use_qk_l2norm_in_kernel": True, "backend": "triton"}
    plain = gated_delta_rule_step(**token, state=initial, **options)
    token["v"] = token["v"].clone().requires_grad_()
    recorded = gated_delta_rule_step(**token, state=initial, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    sequence = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    o, final = gated_delta_rule(
        **sequence, initial_state=initial if state else None, output_final_state=True, **options
    )
    assert torch.equal(o[:, 0], plain[0]) and final is not None and torch.equal(final, plain[1])


def in_threads(function, count=4):
    """Returns the results of `count` calls that start together, each in a thread."""
    results, barrier = [None] * count, threading.Barrier(count)

    def work(i):
        barrier.wait()
        try:
            results[i] = function()
        except Exception as exception:
            results[i] = exception

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@interpreted
@pytest.mark.parametrize("locked", [True, False])
def test_interpreted_launches_overlap_only_without_the_lock(locked, monkeypatch):
    if not locked:
        monkeypatch.setattr(launch, "_interpreter", nullcontext())
    inside = threading.Barrier(4)

    @take_turns
    def run():
        inside.wait(timeout=0.1 if locked else 60)

    met = [not isinstance(result, threading.BrokenBarrierError) for result in in_threads(run)]
    assert met == [not locked] * 4


def test_compiled_launches_take_no_lock(monkeypatch):
    def run():
        pass

    monkeypatch.setattr(launch.knobs.runtime, "interpret", False)
    assert take_turns(run) is run


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SLOW = pytest.mark.slow
FAR = Case("far", 1, 70, 1, 16, 16, "", HV=2, norm="huge", state=True)
# what was red once, in the sizes in which it was; the sentence says what was wrong
FOUND = [
    # 1 / norm, or the gradient times it, left the dtype's range in the reverse scan
    (F32, FAR, {"q": 1e10, "k": 1e10, "do": 1e-20}),
    (BF16, FAR, {"q": 1e10, "k": 1e10, "do": 1e-20}),
    # rows of U dS'^T were rounded each for itself: an element of dg was 5 times as far off as is
    # allowed
    (
        F32,
        replace(
            FAR,
            name="erased",
            T=140,
            K=96,
            V=32,
            HV=1,
            keys="equal",
            beta=1.0,
            norm="unit",
            loss=("final_state",),
        ),
        {},
    ),
    # keys that are alike: T was rounded and dY solved no system, so that dg was 4.6 times as far
    # off; as a difference of sums, dbeta was 1.3 to 3.7 times as far off. At T = 130, where it was
    # found, an element of dk of which no digit is left has 0.92 of its bound in plain Triton, 1.03
    # in Gluon
    (BF16, Case("alike", 1, 131, 4, 16, 64, "", keys="equal", beta=2.0, decay="none"), {}),
    (BF16, Case("alike", 1, 70, 4, 64, 16, "", keys="near", beta=1.6, decay="none"), {}),
    (
        BF16,
        Case("again", 1, 125, 4, 16, 2, "", keys="equal", beta=1.6, decay="none", state=True),
        {},
    ),
    # a first decay of e^-11 took scale dO below the least normal number, and dinitial_state lost
    # digits
    (
        F16,
        Case("decay", 1, 70, 2, 32, 32, "", decay="heavy", norm="random", state=True, loss=BOTH),
        {},
    ),
    # a scale of 1e-4 left P few digits: an element of o was 48 times as far off as is allowed
    (
        F16,
        Case("scale", 1, 70, 2, 32, 32, "", norm="random", scale=1e-4, state=True, loss=BOTH),
        {},
    ),
]
ALIKE = Case("alike", 1, 64, 4, 32, 32, "", keys="equal", beta=2.0, decay="none")
FOUND += [
    pytest.param(BF16, replace(ALIKE, T=T, K=K, V=V, beta=beta), {}, marks=SLOW)
    for K, V, T, beta in (
        (32, 32, 64, 1.6),
        (64, 17, 64, 2.0),
        (32, 16, 20, 2.0),
        (160, 80, 64, 2.0),
    )
]


@pytest.mark.parametrize(("dtype", "case", "factors"), FOUND, ids=str)
def test_what_was_red_once_stays_within_the_criterion(dtype, case, factors):
    x = rule_cases.inputs(case, dtype)
    changed = {
        name: (factor * getattr(x, name).double()).to(dtype) for name, factor in factors.items()
    }
    x = replace(x, **changed).to(DEVICE)
    verdicts = rule.reference_for(x).verdicts("triton", rule.outcome(x, "triton"))
    assert [str(verdict) for verdict in verdicts if not verdict.passed] == []


def test_a_head_is_refined_whatever_the_other_heads_hold():
    """One head's keys are equal and the other's are not; each has the bits that it has alone."""
    x = inputs(T=64, dtype=torch.bfloat16)
    both = {
        name: torch.cat([t, t], 1 if name in ("initial_state", "dstate") else 2)
        for name, t in x.items()
    }
    both["k"][:, :, 0] = both["k"][:, :1, 0]
    both["beta"][:, :, 0] = 2.0
    apart = outcome(both)
    for head in (0, 1):
        alone = {
            name: t[:, head : head + 1]
            if name in ("initial_state", "dstate")
            else t[:, :, head : head + 1]
            for name, t in both.items()
        }
        for name, y in outcome({name: t.contiguous() for name, t in alone.items()}).items():
            axis = 1 if "state" in name else 2
            assert torch.equal(apart[name].select(axis, head), y.select(axis, 0)), (head, name)


@interpreted
def test_equal_keys_keep_their_digits_whatever_order_products_add_in(monkeypatch):
    """This order adds even terms, then odd ones. Where products made T = +-2, each sum was large,
    and dq red.

    NumPy's products have such an order on some machines.
    """

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data
        for start in (0, 1):
            x, y = (
                np.ascontiguousarray(t[start::2], dtype=total.dtype) for t in (a.data.T, b.data)
            )
            total = np.einsum("km,kn->mn", x, y) + total
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    judged = rule.verdicts(rule_cases.BY_NAME["reflect"], torch.float32, "triton")
    assert not [str(verdict) for verdict in judged if not verdict.passed]


def errors(state, gradient):
    """Returns the errors of a float16 call whose state, and its gradient,
    are times these powers of two.
    """
    x = inputs(70, dtype=F16)
    x |= {"initial_state": state * x["initial_state"], "v": (state / 256 * x["v"].float()).half()}
    x |= {"dstate": gradient * x["dstate"], "do": 0 * x["do"]}
    results = outcome(x, scale=2.0**-8)
    exact = outcome(
        {name: tensor.double() for name, tensor in x.items()}, scale=2.0**-8, backend="recurrent"
    )
    return {name: error(y, exact[name]) for name, y in results.items() if name != "dq"}


def test_float16_takes_states_and_their_gradients_of_any_size(monkeypatch):
    """They are float32. As float16, states of 2^18 made NaN,
    gradients of 2^-20 were a fifth off.
    """
    monkeypatch.setattr(triton_time_adapter, "SEGMENT", 1)
    usual = errors(1.0, 2.0**-8)
    for state, gradient in ((2.0**20, 2.0**-8), (1.0, 2.0**12), (1.0, 2.0**-25), (1.0, 2.0**20)):
        found = errors(state, gradient)
        if gradient in (2.0**-25, 2.0**20):  # out of the range of dk and dv
            found = {
                name: found[name] for name in ("o", "final_state", "dinitial_state", "dg", "dbeta")
            }
        assert all(value <= FACTOR * usual[name] for name, value in found.items()), (
            state,
            gradient,
            found,
        )


@interpreted
@pytest.mark.parametrize("low", [None, 0, 1, 0x7FFF, 0x8000, 0xFFFF])
def test_quick_conversions_to_bfloat16_and_back_give_the_interpreters_bits(low):
    """Of every bfloat16 number that is not subnormal, or of float32's with these last 16 bits."""
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80 != 0) | ((bits << 1 == 0) & (not low))]
    x, types = bits, (core.bfloat16, core.float32)
    if low is not None:
        x, types = (bits.astype(np.uint32) << 16 | np.uint32(low)).view(np.float32), types[::-1]
    quick = interpreter._convert_float
    found = quick.func(None, x, *types, None)
    assert np.array_equal(found, quick.args[0](x, *types, None)) and len(found) > 65000
