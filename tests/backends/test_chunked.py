"""The chunked backend where the grid of cases does not look: lengths, packing, saved shapes, speed, memory.

Its planted faults are in `faults.py`, and `test_parity.py` shows that each turns parity red.
"""

import statistics
import time

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from delta_trn.backends import gated_delta_rule, gated_delta_rule_step
from delta_trn.backends.gated_delta_rule import chunked
from delta_trn.backends.gated_delta_rule.contract import Rule
from delta_trn.backends.gated_delta_rule.triangular import triangular_inverse
from delta_trn.backends.parity.judge import error

# a float64 result has passed sums over K, V and a chunk, up to 230 terms: their roundoff, 20 for the inverse
EXACT = 20 * 230**0.5 * torch.finfo(torch.float64).eps / 2


def made(B, T, H, K, V, *, HV=None, N=None, decay=1.0, seed=0, dtype=torch.float64):
    """q, k, v, g, beta, initial_state; then gradients of o and of the final state."""
    random = torch.Generator().manual_seed(seed)
    HV, N = HV or H, N or B

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    def uniform():
        return torch.rand(B, T, HV, generator=random, dtype=torch.float64).to(dtype)

    q, k = normalize(normal(B, T, H, K), dim=-1), normalize(normal(B, T, H, K), dim=-1)
    inputs = [q, k, normal(B, T, HV, V), -decay * uniform(), 2 * uniform(), normal(N, HV, K, V)]
    return inputs, [normal(B, T, HV, V), normal(N, HV, K, V)]


def outcome(inputs, douts, backend, **options) -> list[Tensor]:
    """o, the final state and the six gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = gated_delta_rule(
        *leaves[:5], initial_state=leaves[5], output_final_state=True, backend=backend, **options
    )
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, leaves, douts))


def agree(found, right, allowed):
    errors = [error(x, y) for x, y in zip(found, right, strict=True)]
    assert max(errors) <= allowed, errors


@pytest.mark.parametrize("T", [*range(1, 18), 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 129, 130])
def test_every_length_is_the_recurrence(T):
    given, douts = made(1, T, 1, 8, 12, HV=2, seed=T)
    for normalized_inside in (False, True):
        options = {"use_qk_l2norm_in_kernel": normalized_inside}
        agree(
            outcome(given, douts, "chunked", **options), outcome(given, douts, "recurrent", **options), EXACT
        )


@pytest.mark.parametrize("K, V", [(32, 64), (96, 40), (1, 1), (3, 200)])
@pytest.mark.parametrize("decay", [0.0, 16.0, 1000.0])
def test_every_decay_and_head_size_is_the_recurrence(K, V, decay):
    given, douts = made(2, 70, 1, K, V, decay=decay)
    found, right = (outcome(given, douts, backend) for backend in ("chunked", "recurrent"))
    # D holds exponentials of differences of decay sums, and those have the roundoff of the sums
    agree(found, right, EXACT + 70 * decay * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e-3])
def test_every_scale_is_the_recurrence(scale):
    """q carries the scale through the chunks, which a gradient through its norm takes out again."""
    given, douts = made(1, 40, 1, 8, 12)
    options = {"scale": scale, "use_qk_l2norm_in_kernel": True}
    found, right = (outcome(given, douts, backend, **options) for backend in ("chunked", "recurrent"))
    agree(found, right, EXACT)


def test_packed_sequences_are_separate_ones():
    bounds = [0, 0, 5, 70, 70, 71, 135, 135]
    given, douts = made(1, 135, 2, 16, 24, HV=4, N=len(bounds) - 1)
    found = outcome(given, douts, "chunked", cu_seqlens=torch.tensor(bounds))
    for n in range(len(bounds) - 1):
        tokens = slice(bounds[n], bounds[n + 1])
        alone = [x[:, tokens] for x in given[:5]] + [given[5][n : n + 1]]
        dalone = [douts[0][:, tokens], douts[1][n : n + 1]]
        mine = [
            found[0][:, tokens],
            found[1][n : n + 1],
            *(x[:, tokens] for x in found[2:7]),
            found[7][n : n + 1],
        ]
        if tokens.start == tokens.stop:
            assert mine[1].equal(given[5][n : n + 1]) and mine[7].equal(douts[1][n : n + 1])
        else:
            agree(mine, outcome(alone, dalone, "chunked"), EXACT)


def test_gradients_are_those_of_finite_differences():
    given, _ = made(1, 37, 1, 3, 2, HV=2)

    def function(*x):
        return gated_delta_rule(*x[:5], initial_state=x[5], output_final_state=True, backend="chunked")

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in given], fast_mode=True)


def test_agrees_with_transformers():
    """An implementation by others, of the same operation: Qwen3-Next's, in float32."""
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given, (do, _) = made(2, 150, 2, 32, 64, dtype=torch.float32)
    right = []
    for function, options in (
        (theirs.torch_chunk_gated_delta_rule, {}),
        (gated_delta_rule, {"backend": "chunked"}),
    ):
        leaves = [x.detach().clone().requires_grad_() for x in given[:5]]
        o, _ = function(*leaves, use_qk_l2norm_in_kernel=True, **options)
        right.append([o.detach(), *torch.autograd.grad(o, leaves, do)])
    agree(right[1], right[0], 40 * torch.finfo(torch.float32).eps)


def test_a_step_is_one_token():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        (q, k, v, g, beta, state), _ = made(3, 1, 2, 16, 20, HV=4)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        if dtype != torch.float64:
            g, beta, state = g.float(), beta.float(), state.float()
        before = state.clone()
        for inside in (False, True):
            o, after = gated_delta_rule_step(
                *(x[:, 0] for x in (q, k, v, g, beta)),
                state,
                use_qk_l2norm_in_kernel=inside,
                backend="chunked",
            )
            right = gated_delta_rule_step(
                *(x[:, 0] for x in (q, k, v, g, beta)),
                state,
                use_qk_l2norm_in_kernel=inside,
                backend="recurrent",
            )
            assert o.dtype == dtype and after.dtype == state.dtype and state.equal(before)
            single = EXACT if dtype == torch.float64 else 1e-6
            agree((o, after), right, single if dtype != torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("C", [1, 2, 16, 32, 64, 128])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_the_inverse_with_equal_keys(C, beta):
    """Equal unit keys: L is beta below the diagonal; what lies on and above it must not matter."""
    L = torch.full((3, C, C), beta)
    L += torch.full((C, C), float("nan")).triu(1).nan_to_num(7.0) + 5 * torch.eye(C)
    right = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + L.double().tril(-1))
    found = triangular_inverse(L)
    assert found.triu(1).count_nonzero() == 0 and (found.double() - right).abs().max() < 1e-6


@pytest.mark.parametrize("lengths", [None, (0, 70, 1, 0, 64), (135,)])
@pytest.mark.parametrize("K", [32, 96])
def test_what_is_saved_has_the_promised_shapes(lengths, K):
    given, _ = made(1, 135, 1, K, 8, HV=2, N=1 if lengths is None else len(lengths))
    cut = None if lengths is None else torch.tensor((0, *lengths)).cumsum(0)
    call = Rule(*given[:5], initial_state=given[5], cu_seqlens=cut, l2norm=True)
    *_, saved = chunked.forward(call, save=True)
    promised = chunked.saved_shapes(call)
    assert [(tuple(x.shape), x.dtype) for x in saved] == promised
    assert chunked.forward(call, save=False)[2] == []


def trained(function, B, T, H=6, K=32, V=64, **options):
    """A forward and a backward at the size that a CPU user trains."""
    given, (do, _) = made(B, T, H, K, V, dtype=torch.float32)
    given[3], given[4] = given[3] ** 3, given[4] / 2

    def run():
        leaves = [x.detach().requires_grad_() for x in given[:5]]
        o, _ = function(*leaves, use_qk_l2norm_in_kernel=True, **options)
        o.backward(do)

    return run


def seconds(*runs, repeats, clock=time.perf_counter):
    """The shortest time of each, taken in turns; other processes only ever add to a time."""
    times = [[] for _ in runs]
    for _ in range(repeats):
        for run, found in zip(runs, times, strict=True):
            start = clock()
            run()
            found.append(clock() - start)
    return [min(found) for found in times], [statistics.median(found) for found in times]


def peak(run) -> int:
    """Most bytes of tensors alive at once during a run, beyond those before it, by the profiler."""
    run()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    now = most = 0
    events = [x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"]
    for event in sorted(events, key=lambda x: x.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert most > 0
    return most


@pytest.mark.serial
def test_faster_and_smaller_than_transformers():
    """Forward and backward at B=8 T=512 H=6 K=32 V=64, float32, take less time and less memory.

    How much less time depends on the CPU; `python -m backends.bench` prints the ratio. Other processes only
    add to a time, so the shortest of twenty turns counts, and a busy host gets up to sixty.
    """
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    ours = trained(gated_delta_rule, 8, 512, backend="chunked")
    other = trained(theirs.torch_chunk_gated_delta_rule, 8, 512)
    mine = reference = float("inf")
    for _ in range(3):
        (least, theirs_least), medians = seconds(ours, other, repeats=20)
        mine, reference = min(mine, least), min(reference, theirs_least)
        if mine < reference:
            break
    assert mine < reference, (mine, reference, medians)
    assert peak(ours) < peak(other)


@pytest.mark.serial
def test_time_and_memory_are_linear():
    """8192 to 65536 tokens: 8 times the memory, and time far from the 64 of a quadratic part."""
    short, long = (trained(gated_delta_rule, 1, T, H=1, backend="chunked") for T in (8192, 65536))
    (few, many), _ = seconds(short, long, repeats=3, clock=time.process_time)
    assert many < 16 * few
    assert peak(long) < 8.5 * peak(short)
