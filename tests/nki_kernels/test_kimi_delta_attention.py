"""What holds for the NKI kernels of Kimi Delta Attention beside parity:
sizes, times, cuts, refusals.
"""

from dataclasses import replace

import pytest
import torch

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.dispatch import Call, choose
from delta_trn.backends.gated_delta_rule import gated_delta_rule, nki_adapter
from delta_trn.backends.kimi_delta_attention import kimi_delta_attention, kimi_delta_attention_step
from delta_trn.backends.parity.channel_cases import BY_NAME
from delta_trn.backends.parity.judge import FACTOR, error, floor
from delta_trn.backends.parity.rule import outcome, reference_for, terms
from delta_trn.backends.parity.rule_cases import Case, inputs
from delta_trn.nki_kernels import (
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    plan,
)
from delta_trn.nki_kernels.kimi_delta_attention import bwd, fwd
from nki_simulator.cost import estimate
from tests.support.nki_judge import record_run

NAME = "nki-simulator"


# the largest of each plan, with bundles full, and groups of heads that share a key
@pytest.mark.slow
@pytest.mark.parametrize(
    ("K", "V", "H", "HV"),
    [
        (128, 256, 4, 4),
        (128, 256, 1, 4),
        (128, 512, 2, 2),
        (128, 512, 1, 2),
    ],
)
def test_every_planned_size_fits_on_chip(K, V, H, HV):
    how = plan.choose(1, H, HV, K, V, channels=True)
    for module in (fwd, bwd):
        kernel, arguments = module.example(
            T=2 * how.every * how.C,
            H=H,
            HV=HV,
            K=K,
            V=V,
            every=how.every,
            C=how.C,
            lanes=how.lanes,
            width=how.width,
        )
        run_record = record_run(kernel, *arguments, trace=False)
        assert run_record.sbuf_peak <= 0.95 * 176 * 1024 and run_record.psum_peak <= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "scalar", "most"),
    [
        (fwd, gated_delta_rule_fwd, 2.0),
        (bwd, gated_delta_rule_bwd, 2.5),
    ],
)
def test_a_decay_per_channel_keeps_its_price(ours, scalar, most):
    """By the estimate in program order, at the size that Kimi's heads have."""

    def time(module, **sizes):
        kernel, arguments = module.example(T=1024, H=4, K=128, V=128, dtype="bfloat16", **sizes)
        run_record = record_run(kernel, *arguments)
        return estimate(run_record.trace, run_record.target).schedule

    assert time(ours, lanes=4, width=2) <= most * time(scalar, lanes=4, width=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_channels_are_the_gated_delta_rule(dtype):
    x = inputs(Case("equal", 1, 140, 1, 32, 32, "", HV=2, norm="random", state=True), dtype)
    assert x.initial_state is not None and x.do is not None
    tensors = [y.clone().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta, x.initial_state)]
    q, k, v, g, beta, state = tensors
    spread = g[..., None].expand(*g.shape, 32)
    o, last = kimi_delta_attention(q, k, v, spread, beta, None, state, True, True, backend=NAME)
    found = [o.detach(), last, *torch.autograd.grad(o, tensors, x.do)]
    q, k, v, g, beta, state = (y.double() for y in tensors)
    o, last = gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        backend="recurrent",
    )
    exact = [o, last, *torch.autograd.grad(o, tensors, x.do.double())]
    most = floor(terms(x.case), torch.float32) * FACTOR if dtype == torch.float32 else 2.0**-6
    for a, b in zip(found, exact, strict=True):
        assert a is not None and b is not None and error(a, b.double()) <= most


FADING = Case("fading", 1, 128, 8, 32, 32, "", norm="random", state=True, op="kimi_delta_attention")


def errors_of_a_fading_state():
    """Returns the errors of a state that fades to 1e-14 by those that parity allows,
    as the scalar rule's.
    """
    x = inputs(FADING, torch.float32)
    g = -0.5 * torch.rand(x.g.shape, generator=torch.Generator().manual_seed(0))
    x = replace(x, v=1e-30 * x.v, g=g)
    judged = reference_for(x).verdicts(NAME, outcome(x, NAME), ("final_state", "dh0"))
    return max(verdict.ratio for verdict in judged)


def test_a_state_that_fades_keeps_its_digits():
    assert errors_of_a_fading_state() <= 1.0


def test_a_call_cut_in_time_computes_the_same(monkeypatch):
    x = inputs(replace(BY_NAME["kimi_gva"], T=300), torch.float32)
    whole = outcome(x, NAME)
    monkeypatch.setattr(plan, "LANE_CHUNKS", 2)
    assert [len(group) for group in nki_adapter.pieces(x.q, x.v, None)] == [2]
    parts = outcome(x, NAME)
    assert all(
        error(parts[name], y) <= floor(terms(x.case), torch.float32) for name, y in whole.items()
    )


def test_packed_sequences_without_states_are_one_call(monkeypatch):
    x = inputs(replace(BY_NAME["kimi_packed"], state=False, loss=("o",)), torch.float32)
    tensors = (x.q, x.k, x.v, x.g, x.beta)
    q, k, v, g, beta = (y.double() for y in tensors)
    exact, _ = kimi_delta_attention(q, k, v, g, beta, cu_seqlens=x.cu_seqlens, backend="recurrent")
    monkeypatch.setattr(nki_adapter, "_bounds", None)  # lengths are not read
    o, _ = kimi_delta_attention(*tensors, cu_seqlens=x.cu_seqlens, backend=NAME)
    assert error(o, exact) <= floor(terms(x.case), torch.float32)


def test_one_channel_is_decoded_with_its_decay():
    """Nothing tells a decay per channel from one per head then,
    so a channel of zeros stands beside it.
    """
    q, k, v, g, beta = (torch.rand(2, 3, 1) for _ in range(5))
    state = torch.rand(2, 3, 1, 1)
    found = kimi_delta_attention_step(q, k, v, -g, beta[..., 0], state, backend=NAME)
    exact = kimi_delta_attention_step(q, k, v, -g, beta[..., 0], state, backend="chunked")
    torch.testing.assert_close(found, exact)


def test_more_than_128_channels_are_refused_with_the_reason():
    call = Call("kimi_delta_attention", "cpu", torch.float32, {"K": 129, "V": 64})
    with pytest.raises(
        BackendRefusal, match="K=129 is above 128: a partition holds the decays of one channel"
    ):
        choose(call, NAME)
    assert choose(replace(call, op="kimi_delta_attention_step"), NAME).name == NAME
