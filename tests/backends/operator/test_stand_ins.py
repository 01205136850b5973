# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false,
# reportOptionalMemberAccess=false
"""Calls of tensors that have no numbers in memory: computed by PyTorch's rules, or refused by name.

What could crash the process runs in another one: `python -m tests.backends.operator.test_stand_ins
CHECK`.
"""

import re
import sys
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from delta_trn.backends import (
    BackendRefusal,
    dispatch,
    gated_delta_rule,
    gated_delta_rule_step,
    kimi_delta_attention,
    kimi_delta_attention_step,
    linear_cross_entropy,
    short_convolution,
    stand_ins,
)
from tests.backends import test_operator
from tests.support.warm import run_python

B, T, H, K, V = 2, 3, 2, 4, 3
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # in make_fx
RUNNABLE = [name for name, backend in dispatch.BACKENDS.items() if not backend.unavailable("cpu")]
ON_SHARDS = ("rule", "step", "kimi", "kimi step")  # test_divided has them on two processes
IN_PYTORCH = (
    "residual", "convolution", "norm", "norm with a sigmoid", "norm without a gate", "sum",
)  # fmt: skip


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kimi(q, k, v, g, beta, A_log, dt_bias, state, **options):
    gate = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    options |= gate | {"initial_state": state, "output_final_state": True}
    return kimi_delta_attention(q, k, v, g, beta, **options)


def loss(hidden, weight, **options):
    # of the class of hidden
    targets = hidden.new_ones(hidden.shape[0], dtype=torch.int64).cumsum(0) % 5
    return (linear_cross_entropy(hidden, weight, targets, **options),)


def operations():
    """Returns a call of each operation, and its tensors."""
    found = test_operator.operations(B, T)
    q, k, v, _, beta, A_log, _, state = found["rule"][1]
    g = -normal(B, T, H, K).abs()
    found["loss"] = (loss, found["loss"][1])
    found["kimi"] = (kimi, [q, k, v, g, beta, A_log, normal(H, K), state])
    token = [x[:, 0] for x in (q, k, v, g, beta)]
    found["kimi step"] = (kimi_delta_attention_step, [*token, state])
    return {
        name: (call, [x.contiguous() for x in tensors]) for name, (call, tensors) in found.items()
    }


def leaves_of(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def results(call, leaves):
    """Returns a call's outputs and its gradients."""
    outputs = call(*leaves)
    return [*outputs, *torch.autograd.grad(sum(y.sum() for y in outputs), leaves)]


def check_fake(call, tensors, name):
    real = results(call, leaves_of(tensors))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        without = call(*fakes)
        made = results(call, [x.requires_grad_() for x in fakes])
    for x, y in zip([*made, *without], [*real, *real[: len(without)]], strict=True):
        assert type(x) is FakeTensor and (x.shape, x.dtype) == (y.shape, y.dtype)
    outside = call(*fakes)  # the tensors' own mode is asked
    assert all(type(x) is FakeTensor for x in outside)


def check_wrapped(call, tensors, name):
    """Each half of a TwoTensor is what the call gives of that half alone."""
    halves = tensors, [0.9 * x for x in tensors]
    twins = [TwoTensor(x.clone(), y.clone()) for x, y in zip(*halves, strict=True)]
    alone = [call(*half) for half in halves]
    for both, a, b in zip(call(*twins), *alone, strict=True):
        torch.testing.assert_close(both.a, a)
        torch.testing.assert_close(both.b, b)
    alone = [results(call, leaves_of(half)) for half in halves]
    for both, a, b in zip(results(call, [x.requires_grad_() for x in twins]), *alone, strict=True):
        torch.testing.assert_close(both.a, a)
        torch.testing.assert_close(both.b, b)


def check_mute(call, tensors, name):
    """A class that knows no custom operators is named,
    unless the operation is PyTorch's own for it.
    """
    mute = [Mute(x) for x in tensors]
    if name in IN_PYTORCH:
        for x, y in zip(call(*mute), call(*tensors), strict=True):
            torch.testing.assert_close(x.inner, y)
    else:
        with pytest.raises(
            BackendRefusal, match=r"was given a Mute \[.*pass the plain tensors that it holds"
        ):
            call(*mute)


def check_divided(call, tensors, name):
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    divided = [distribute_tensor(x, mesh(), [Replicate()]) for x in tensors]
    for leaves in (divided, [x.detach().requires_grad_() for x in divided]):
        for backend in ("chunked", *([] if "kimi" in name else RUNNABLE)):
            if name in ON_SHARDS and backend == "chunked":
                outputs = call(*leaves, backend=backend)
                for x, y in zip(outputs, call(*tensors), strict=True):
                    torch.testing.assert_close(x.full_tensor(), y)
                continue
            if name in ON_SHARDS:
                continue
            if name in IN_PYTORCH and backend in ("chunked", "recurrent"):
                outputs = call(*leaves, **({} if backend == "recurrent" else {"backend": backend}))
                for x, y in zip(outputs, call(*tensors), strict=True):
                    assert isinstance(x, DTensor)
                    torch.testing.assert_close(x.full_tensor(), y)
                continue
            with pytest.raises(BackendRefusal) as refusal:
                call(*leaves, backend=backend)
            if "no backend can run" not in str(refusal.value):
                assert "was given a DTensor [" in str(refusal.value)
                assert "pass x.to_local() of each of its tensors" in str(refusal.value)


class Mute(torch.Tensor):
    """Holds another tensor, and knows PyTorch's own operations alone."""

    @staticmethod
    def __new__(cls, inner):
        shape, strides = inner.shape, inner.stride()
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            return NotImplemented
        inner = torch.utils._pytree.tree_map_only(Mute, lambda x: x.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Mute, func(*inner[0], **inner[1]))


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


APART = {"fake": check_fake, "wrapped": check_wrapped, "mute": check_mute, "divided": check_divided}


def test_tensors_without_memory_do_not_reach_a_kernel():
    """A crash of the other process is a failure here."""
    ran = run_python(
        ["-m", "tests.backends.operator.test_stand_ins"], cwd=Path(__file__).parents[3], timeout=240
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    expected = [f"{check} {name}: right" for check in APART for name in operations()]
    assert ran.stdout.split("\n")[:-1] == expected


def main():
    """Runs every check, and says before each one which it is: a crash says nothing more."""
    wrong = False
    for check, run in APART.items():
        for name, (call, tensors) in operations().items():
            print(f"{check} {name}: ", end="", flush=True)
            try:
                run(call, tensors, name)
            except (Exception, pytest.fail.Exception):
                print(f"wrong\n{traceback.format_exc()}", flush=True)
                wrong = True
            else:
                print("right", flush=True)
    sys.exit(wrong)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", operations())
def test_make_fx_records_the_custom_operator(name, mode, pre_dispatch):
    call, tensors = operations()[name]
    others = [0.9 * x for x in tensors]
    traced = make_fx(lambda *x: call(*x), tracing_mode=mode, pre_dispatch=pre_dispatch)(*tensors)
    assert "delta_trn." in traced.code
    for x, y in zip(traced(*others), call(*others), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("name", operations())
def test_make_fx_records_gradients(name, mode):
    call, tensors = operations()[name]
    others = [0.9 * x for x in tensors]
    traced = make_fx(
        lambda *x: results(call, [y.detach().requires_grad_() for y in x]), tracing_mode=mode
    )
    traced = traced(*tensors)
    assert re.search(r"delta_trn\.\w+_backward", traced.code)
    for x, y in zip(traced(*others), results(call, leaves_of(others)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", operations())
def test_make_fx_records_the_gradients_of_a_call_before(name):
    """Forward was eager, and backward alone is recorded."""
    call, tensors = operations()[name]
    leaves = leaves_of(tensors)
    (y, *_) = call(*leaves)

    def backward(dy):
        return torch.autograd.grad(y, leaves, dy, retain_graph=True, allow_unused=True)

    dy = torch.ones_like(y)
    traced = make_fx(backward)(dy)
    assert re.search(r"delta_trn\.\w+_backward", traced.code)
    for x, z in zip(traced(2 * dy), backward(2 * dy), strict=True):
        assert (x is None and z is None) or torch.equal(x, z)


def test_a_packed_call_is_recorded_with_its_bounds():
    """Whether or not the same bounds were called with before:
    the graph follows those that it is given.
    """
    _, (q, k, v, _, beta, *_) = operations()["rule"]
    rows = [x[:1] for x in (q, k, v, -beta, beta)]
    first, second = (torch.tensor([0, n, T], dtype=torch.int32) for n in (1, 2))

    def packed(bounds, *rows):
        return gated_delta_rule(*rows, cu_seqlens=bounds, output_final_state=True)

    packed(first, *rows)
    traced = make_fx(packed)(first, *rows)
    for x, y in zip(traced(second, *rows), packed(second, *rows), strict=True):
        assert torch.equal(x, y)
    at = make_fx(lambda *rows: gated_delta_rule(*rows, return_states_at=(1, T)))(*rows)
    for x, y in zip(at(*rows), gated_delta_rule(*rows, return_states_at=(1, T)), strict=True):
        assert torch.equal(x, y)
    shapes = [x.shape for x in packed(first, *rows)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (first, *rows)]
        assert [x.shape for x in packed(*fakes)] == shapes
        assert packed(fakes[0], *(x[:, :0] for x in fakes[1:]))[0].shape == (1, 0, H, V)


def test_a_step_in_a_pool_is_recorded():
    _, (*token, _) = operations()["step"]
    pool, slots = normal(4, H, K, V), torch.tensor([2, 0])

    def step(pool, slots, *token):
        return gated_delta_rule_step(*token, pool, state_indices=slots)[0]

    traced = make_fx(step)(pool.clone(), slots, *token)
    pools = [pool.clone(), pool.clone()]
    other = torch.tensor([3, 1])
    assert torch.equal(traced(pools[0], other, *token), step(pools[1], other, *token))
    assert torch.equal(*pools) and not torch.equal(pools[0], pool)
    with FakeTensorMode() as mode:
        o = step(*(mode.from_tensor(x) for x in (pool, slots, *token)))
        assert type(o) is FakeTensor and o.shape == (B, H, V)


@pytest.mark.parametrize("name", operations())
def test_gradients_of_many_at_a_time_are_refused_in_plain_words(name):
    call, tensors = operations()[name]
    leaves = leaves_of(tensors)
    (y, *_) = call(*leaves)
    many = torch.ones(2, *y.shape)
    with pytest.raises(
        TypeError, match=r"asked for many at a time.*leave out is_grads_batched=True"
    ):
        torch.autograd.grad(y, leaves, many, is_grads_batched=True)

    def first(x):
        return call(x, *tensors[1:])[0]

    with pytest.raises(TypeError, match=r"asked for many at a time.*vectorize=True of jacobian"):
        torch.autograd.functional.jacobian(first, tensors[0], vectorize=True)
    (y, *_) = call(*leaves)
    with pytest.raises(TypeError, match="asked for many at a time"):
        torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy))(many)


@pytest.mark.parametrize("name", operations())
def test_tangents_are_refused_in_plain_words(name):
    """They were dropped without a word: a jacobian in forward mode was zero."""
    call, (x, *rest) = operations()[name]
    with forward_ad.dual_level():
        with pytest.raises(TypeError, match=r"compute no tangents; take gradients in reverse mode"):
            call(forward_ad.make_dual(x, x), *rest)
        call(x, *rest)
    jacobian = torch.autograd.functional.jacobian
    with pytest.raises(TypeError, match=r"compute no tangents; .*strategy=\"reverse-mode\""):
        jacobian(lambda x: call(x, *rest)[0], x, vectorize=True, strategy="forward-mode")


@pytest.mark.parametrize("name", operations())
def test_a_lazy_sign_is_taken_along(name):
    """The imaginary part of a conjugate is a view of x with a mark that says: read -x."""
    call, tensors = operations()[name]
    signed = [torch.complex(x, -x).conj().imag for x in tensors]
    assert all(x.is_neg() and torch.equal(x, y) for x, y in zip(signed, tensors, strict=True))
    for x, y in zip(call(*signed), call(*tensors), strict=True):
        assert torch.equal(x, y)
    leaves = leaves_of(tensors)
    (y, *_) = call(*leaves)
    seen = torch.autograd.grad(
        torch.complex(y, y).conj().imag.square().sum(), leaves, allow_unused=True
    )
    (y, *_) = call(*leaves)
    expected = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    for x, z in zip(seen, expected, strict=True):
        assert (x is None and z is None) or torch.equal(x, z)


def test_plain_tensors_are_told_from_others():
    class Named(torch.Tensor):
        pass

    x = torch.ones(2)
    assert stand_ins.is_plain([x, None, torch.nn.Parameter(x), x.as_subclass(Named)])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for other in (TwoTensor(x, x), Mute(x), fake, torch.complex(x, x).conj().imag):
        assert not stand_ins.is_plain([x, other])
    assert isinstance(stand_ins.find_wrapper([x, None, fake, TwoTensor(x, x)]), TwoTensor)
    assert stand_ins.find_wrapper([x, fake]) is None


def test_a_mode_that_counts_sees_what_is_computed():
    """tools and tests count what eager calls launch;
    a mode of a user's own changes no way of computing.
    """
    counted = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted[func.namespace] += 1
            return func(*args, **(kwargs or {}))

    call, tensors = operations()["rule"]
    with Counting():
        o, _ = call(*tensors)
    assert counted["aten"] and not counted["delta_trn"]
    assert torch.equal(o, call(*tensors)[0])


def test_a_subclass_with_memory_of_its_own_is_computed_eagerly():
    class Named(torch.Tensor):
        pass

    x, weight, _ = operations()["convolution"][1]
    y = short_convolution(x.as_subclass(Named), weight)
    torch.testing.assert_close(y.as_subclass(torch.Tensor), short_convolution(x, weight))


# what test_planted_bugs runs with a bug in place: a test, and its arguments
CHECKS = {
    "recorded calls": (test_make_fx_records_the_custom_operator, "rule", "real", False),
    "calls recorded early": (test_make_fx_records_the_custom_operator, "kimi", "real", True),
    "recorded gradients": (test_make_fx_records_the_gradients_of_a_call_before, "rule"),
    "recorded bounds": (test_a_packed_call_is_recorded_with_its_bounds,),
    "recorded pools": (test_a_step_in_a_pool_is_recorded,),
    "plain tensors": (test_plain_tensors_are_told_from_others,),
    "DTensors": (check_divided, *operations()["loss"], "loss"),
    "gradients of many": (test_gradients_of_many_at_a_time_are_refused_in_plain_words, "rule"),
    "tangents": (test_tangents_are_refused_in_plain_words, "rule"),
}

if __name__ == "__main__":
    main()
