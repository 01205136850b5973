"""The NKI decode step on the simulator against the literal recurrence in float64."""

import math

import pytest
import torch

from delta_trn.backends import gated_delta_rule, gated_delta_rule_step
from delta_trn.backends.gated_delta_rule import nki_adapter, recurrent
from delta_trn.backends.gated_delta_rule.contract import Step
from delta_trn.backends.parity.judge import error
from delta_trn.nki_kernels import gated_delta_rule_step as module
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.gated_delta_rule_step import example
from tests.support.nki_judge import (
    DTYPES,
    ROUNDED_PRODUCTS,
    assert_close,
    normal,
    record_run,
    run,
)

# B, H, HV, K, V: one head; every size of the models; sizes that divide nothing; heads that share a
# tile, the last one half empty; groups of rows of unequal size; key heads shared by 2, 8 and by
# more than a group
SHAPES = [
    (1, 1, 1, 32, 32),
    (2, 2, 2, 32, 64),
    (1, 3, 3, 64, 128),
    (1, 2, 2, 96, 192),
    (1, 2, 2, 128, 256),
    (1, 1, 1, 192, 384),
    (1, 3, 3, 256, 512),
    (1, 2, 2, 256, 32),
    (1, 3, 3, 60, 100),
    (2, 1, 1, 33, 7),
    (1, 1, 1, 131, 16),
    (3, 3, 3, 32, 16),
    (5, 7, 7, 64, 32),
    (1, 2, 4, 32, 32),
    (2, 1, 8, 64, 32),
    (1, 2, 80, 32, 16),
    (1, 5, 30, 128, 64),
    (1, 1, 2, 131, 512),
    (1, 3, 15, 131, 51),
]
HARD = (
    "zero keys",
    "huge keys",
    "tiny keys",
    "no decay",
    "strong decay",
    "a reset",
    "beta 2",
    "beta 0",
    "known",
    "fresh",
)


def inputs(shape, dtype, hard=""):
    B, H, HV, K, V = shape
    generator = torch.Generator().manual_seed(sum(shape))
    q, k, v = normal(generator, B, H, K), normal(generator, B, H, K), normal(generator, B, HV, V)
    g, beta = -torch.rand((B, HV), generator=generator), torch.rand((B, HV), generator=generator)
    state = normal(generator, B, HV, K, V) / K**0.5
    k = k * {"zero keys": 0.0, "huge keys": 1e17, "tiny keys": 1e-4}.get(hard, 1.0)
    decay = {"no decay": 0.0, "strong decay": -20.0, "a reset": -math.inf}
    g = torch.full_like(g, decay[hard]) if hard in decay else g
    beta = beta * 0 + {"beta 2": 2.0, "beta 0": 0.0}[hard] if hard.startswith("beta") else beta
    if hard == "known":  # the state returns k's value already: v - S^T k cancels
        q = k
        unit = (k / k.norm(dim=-1, keepdim=True)).repeat_interleave(HV // H, dim=1)
        state, g = 30 * unit[..., None] * v[..., None, :], g * 0
        v = 30 * v
    state = state * (hard != "fresh")
    return [x.to(dtype) for x in (q, k, v)] + [g, beta.to(dtype), state]


def reference(tensors, l2norm, dtype):
    K = tensors[0].shape[-1]
    call = Step(*(x.to(dtype) for x in tensors), scale=K**-0.5, l2norm=l2norm)
    o, state = recurrent.step(call)
    return {"o": o, "state": state}


def check(shape, dtype, l2norm, hard=""):
    tensors = inputs(shape, dtype, hard)
    o, state = nki_adapter.step(Step(*tensors, scale=shape[3] ** -0.5, l2norm=l2norm))
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    judge, baseline = (reference(tensors, l2norm, d) for d in (torch.float64, torch.float32))
    assert_close({"o": o, "state": state}, judge, baseline, terms=2 * shape[3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(shape, dtype):
    check(shape, dtype, l2norm=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(8, 6, 6, 128, 256), (2, 16, 32, 128, 128), (4, 6, 6, 256, 512)], ids=str
)
def test_sizes_of_models_agree_with_float64(shape, dtype):
    check(shape, dtype, l2norm=True)


@pytest.mark.parametrize("hard", HARD)
def test_hard_inputs_agree_with_float64(hard):
    check((2, 2, 4, 64, 64), torch.float32, True, hard)


@pytest.mark.parametrize("hard", [hard for hard in HARD if hard != "huge keys"])
def test_hard_inputs_agree_with_float64_without_the_norm(hard):
    check((2, 2, 4, 64, 64), torch.float32, False, hard)


def test_the_state_decays_exactly_whatever_products_round_to():
    """A decay of 0.999 is 1 in bfloat16: rounded once a token, it would never be forgotten."""
    q, k, v, g, beta, state = inputs((1, 4, 4, 32, 64), torch.float32)
    _, after = run(
        module.gated_delta_rule_step, q, k, v, g / 1000, 0 * beta, state, 1.0, True,
        numerics=ROUNDED_PRODUCTS,
    )  # fmt: skip
    assert error(after, (g.double() / 1000).exp()[..., None, None] * state.double()) < 2**-22


def test_decoding_token_by_token_equals_prefill():
    """Token by token through the step, and at once through the chunked kernel, on one backend."""
    B, T, H, HV, K, V = 2, 37, 2, 4, 32, 64
    generator = torch.Generator().manual_seed(0)
    q, k = normal(generator, B, T, H, K), normal(generator, B, T, H, K)
    v, state = normal(generator, B, T, HV, V), normal(generator, B, HV, K, V) / K**0.5
    g, beta = (
        -torch.rand((B, T, HV), generator=generator),
        2 * torch.rand((B, T, HV), generator=generator),
    )

    def whole(backend, dtype):
        o, last = gated_delta_rule(
            *(x.to(dtype) for x in (q, k, v, g, beta)), initial_state=state.to(dtype),
            output_final_state=True, use_qk_l2norm_in_kernel=True, backend=backend,
        )  # fmt: skip
        return {"o": o, "state": last}

    def stepwise():
        outs, S = [], state
        for t in range(T):
            o, S = gated_delta_rule_step(
                *(x[:, t] for x in (q, k, v, g, beta)),
                S,
                use_qk_l2norm_in_kernel=True,
                backend="nki-simulator",
            )
            outs.append(o)
        return {"o": torch.stack(outs, dim=1), "state": S}

    judge, baseline = whole("recurrent", torch.float64), whole("recurrent", torch.float32)
    for result in (stepwise(), whole("nki-simulator", torch.float32)):
        assert_close(result, judge, baseline, terms=K + V + T)


def test_a_batch_of_many_heads_is_cut_without_changing_results(monkeypatch):
    """More heads than a kernel call takes: the pieces are those of one call,
    but for the order of sums.
    """
    tensors = inputs((5, 1, 2, 32, 16), torch.float32)
    once = gated_delta_rule_step(*tensors, backend="nki-simulator")
    monkeypatch.setattr(plan, "STEP_HEADS", 4)
    for cut, whole in zip(
        gated_delta_rule_step(*tensors, backend="nki-simulator"), once, strict=True
    ):
        assert error(cut, whole) < 2**-20


def test_a_step_refuses_sizes_that_do_not_fit():
    kernel, arguments = example(B=1, H=1, HV=1, K=131, V=512)
    with pytest.raises(AssertionError, match="K=131 has no divisor"):
        record_run(kernel, *arguments)
    kernel, arguments = example(B=1, H=2, HV=2, K=32, V=520)
    with pytest.raises(AssertionError, match="V=520 exceeds 512"):
        record_run(kernel, *arguments)
    kernel, arguments = example(B=1, H=2, HV=3, K=32, V=32)
    with pytest.raises(AssertionError, match="HV=3 is not a multiple of H=2"):
        record_run(kernel, *arguments)
