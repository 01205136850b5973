"""States in a pool, as serving has them: in place, by index, several tokens with rollback, in bfloat16."""

import math
from itertools import product

import pytest
import torch
from torch.nn.functional import normalize

from delta_trn.backends import dispatch, gated_delta_rule_step, kimi_delta_attention_step

DEVICES = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
RUNNABLE = [
    name
    for name, backend in dispatch.BACKENDS.items()
    if not backend.unavailable(DEVICES.get(name, "cpu"))
]
# H, HV, K, V: groups, sizes that are no power of two, the largest keys
SIZES = {"groups": (2, 4, 32, 48), "odd": (1, 3, 20, 24), "wide": (1, 1, 256, 16)}
B, T, N = 3, 3, 12
SLOTS = torch.tensor([[7, 2, 9], [0, 11, 4], [5, 3, 8]])


def draw(size="groups", tokens=(B, T), *, channels=False, made=False, dtype=torch.float32, device="cpu"):
    """Returns q, k, v, g, beta and options of a step, with a reset and beta = 2, and a pool."""
    (H, HV, K, V), generator = SIZES[size], torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    x = {"q": normal(*tokens, H, K), "k": normal(*tokens, H, K), "v": normal(*tokens, HV, V)}
    x |= {"g": normal(*tokens, HV, *[K] * channels), "beta": normal(*tokens, HV)}
    options = {"use_qk_l2norm_in_kernel": made}
    if made:
        options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
        options |= {"A_log": normal(HV).float(), "dt_bias": normal(HV, *[K] * channels).float()}
    else:
        x |= {"k": normalize(x["k"], dim=-1), "g": -x["g"].abs(), "beta": 2 * x["beta"].sigmoid()}
        x["g"][-1, 1:2], x["beta"][0] = -math.inf, 2.0
    x = {name: y.to(dtype) for name, y in x.items()}
    return x, options, normal(N, HV, K, V).to(torch.float64 if dtype == torch.float64 else torch.float32)


def step(x, state, **options):
    run = kimi_delta_attention_step if x["g"].dim() == x["q"].dim() else gated_delta_rule_step
    return run(**x, state=state, **options)


def at(x, *place):
    return {name: y[place] for name, y in x.items()}


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


FORMS = [*product(["groups"], [False, True], [False, True]), ("odd", False, True), ("wide", True, False)]


@pytest.mark.parametrize(("size", "channels", "made"), FORMS)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_pool_has_the_bits_of_plain_states_and_nothing_else_changes(backend, size, channels, made):
    """One token in int32 slots; then three after each possible number of accepted tokens."""
    if "nki" in backend and channels and size == "wide":
        pytest.skip("NKI's kernels of Kimi Delta Attention take K up to 128")
    device = DEVICES.get(backend, "cpu")
    x, options, pool = draw(size, channels=channels, made=made, device=device)
    options |= {"backend": backend}
    slots, before = SLOTS.to(device), pool.clone()
    o, state = step(at(x, slice(None), 0), before[slots[:, 0]], **options)
    found, returned = step(at(x, slice(None), 0), pool, state_indices=slots[:, 0].int(), **options)
    assert returned is pool
    assert_same(found, o)
    before[slots[:, 0]] = state
    assert_same(pool, before)
    for accepted in range(1, T + 1):
        kept = torch.tensor([accepted, 1, T], device=device)
        states = before[slots.gather(1, kept[:, None] - 1)[:, 0]]
        found, _ = step(x, pool, state_indices=slots, accepted=kept, **options)
        for t in range(T):
            o, states = step(at(x, slice(None), t), states, **options)
            before[slots[:, t]] = states
            assert_same(found[:, t], o)
        assert_same(pool, before)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_skipped_tokens_read_and_write_nothing(backend, channels):
    """One sequence is padding, one has two tokens of three, and unused memory is full of NaN."""
    device = DEVICES.get(backend, "cpu")
    x, options, pool = draw(channels=channels, device=device)
    slots = torch.tensor([[-1, 3, -2], [6, 1, -1], [2, 8, 4]], device=device)
    pool[[0, 3, 11]] = math.nan
    expected, options = pool.clone(), options | {"backend": backend}
    o = torch.zeros_like(x["v"])
    o[1, :2] = step(at(x, slice(1, 2), slice(2)), expected, state_indices=slots[1:2, :2], **options)[0][0]
    o[2] = step(at(x, slice(2, 3)), expected, state_indices=slots[2:], **options)[0][0]
    for y in x.values():
        y[0], y[1, 2] = math.nan, math.nan
    assert_same(step(x, pool, state_indices=slots, **options)[0], o)
    assert_same(pool, expected)
    none = torch.full_like(slots[:, 0], -1)
    assert not step(at(x, slice(None), 0), pool, state_indices=none, **options)[0].any()
    assert_same(pool, expected)
