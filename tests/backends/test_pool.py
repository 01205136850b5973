"""States in a pool, as serving has them: in place, by index,
several tokens with rollback, in bfloat16.
"""

import math
import re
from itertools import product

import pytest
import torch
from torch.nn.functional import normalize

from delta_trn.backends import checking, dispatch, gated_delta_rule_step, kimi_delta_attention_step
from delta_trn.triton_kernels.launch import arithmetic
from tests.support.planted_bugs import Bug, planted

DEVICES = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
RUNNABLE = [x for x, y in dispatch.BACKENDS.items() if not y.unavailable(DEVICES.get(x, "cpu"))]
KERNELS = [name for name in RUNNABLE if name in ("chunked", "triton")]
# H, HV, K, V: groups, sizes that are no power of two, the largest keys
SIZES = {"groups": (2, 4, 32, 48), "odd": (1, 3, 20, 24), "wide": (1, 1, 256, 16)}
B, T, N = 3, 3, 12
SLOTS = torch.tensor([[7, 2, 9], [0, 11, 4], [5, 3, 8]])


def draw(size="groups", channels=False, made=False, device="cpu"):
    """Returns q, k, v, g, beta and options of a step, with a reset and beta = 2, and a pool."""
    (H, HV, K, V), generator = SIZES[size], torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    x = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    x |= {"g": normal(B, T, HV, *[K] * channels), "beta": normal(B, T, HV)}
    options = {"use_qk_l2norm_in_kernel": made}
    if made:
        options |= {
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": True,
        }
        options |= {"A_log": normal(HV), "dt_bias": normal(HV, *[K] * channels)}
    else:
        x |= {"k": normalize(x["k"], dim=-1), "g": -x["g"].abs(), "beta": 2 * x["beta"].sigmoid()}
        x["g"][-1, 1], x["beta"][0] = -math.inf, 2.0
    return x, options, normal(N, HV, K, V)


def step(x, state, **options):
    run = kimi_delta_attention_step if x["g"].dim() == x["q"].dim() else gated_delta_rule_step
    return run(**x, state=state, **options)


def at(x, *place):
    return {name: y[place] for name, y in x.items()}


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def agree(backend, size="groups", channels=False, made=True):
    """One token in int32 slots; then three after each possible number of accepted tokens."""
    device = DEVICES.get(backend, "cpu")
    x, options, pool = draw(size, channels, made, device)
    options |= {"backend": backend}
    slots, before = SLOTS.to(device), pool.clone()
    first = at(x, slice(None), 0)
    o, state = step(first, before[slots[:, 0]], **options)
    found, returned = step(first, pool, state_indices=slots[:, 0].int(), **options)
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


def skip(backend, channels=False):
    """One sequence is padding, one has two tokens, one leaves one out;
    unused memory is full of NaN.
    """
    device = DEVICES.get(backend, "cpu")
    x, options, pool = draw(channels=channels, made=True, device=device)
    slots = torch.tensor([[-1, 3, -2], [6, 1, -1], [2, -1, 4]], device=device)
    pool[[1, 3, 11]] = math.nan
    expected, options, o = pool.clone(), options | {"backend": backend}, torch.zeros_like(x["v"])
    for b, kept in ((1, [0, 1]), (2, [0, 2])):
        own = {name: y[b : b + 1, kept] for name, y in x.items()}
        o[b, kept] = step(own, expected, state_indices=slots[b : b + 1, kept], **options)[0][0]
    for y in x.values():
        y[0], y[1, 2], y[2, 1] = math.nan, math.nan, math.nan
    assert_same(step(x, pool, state_indices=slots, **options)[0], o)
    none = torch.full_like(slots[:, 0], -1)
    assert not step(at(x, slice(None), 0), pool, state_indices=none, **options)[0].any()
    assert_same(pool, expected)


FORMS = [
    *product(["groups"], [False, True], [False, True]),
    ("odd", False, True),
    ("wide", True, False),
]


@pytest.mark.parametrize(("size", "channels", "made"), FORMS)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_pool_has_the_bits_of_plain_states_and_nothing_else_changes(
    backend, size, channels, made
):
    if "nki" in backend and channels and size == "wide":
        pytest.skip("NKI's kernels of Kimi Delta Attention take K up to 128")
    agree(backend, size, channels, made)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_skipped_tokens_read_and_write_nothing(backend, channels):
    skip(backend, channels)


STEP, GENERIC = (
    "triton_kernels.gated_delta_rule_step",
    "backends.gated_delta_rule.states:step_in_pool",
)


@pytest.mark.parametrize(
    ("place", "line", "mistake", "check"),
    [
        (f"{STEP}:find_first", "tl.load(accepted + i_n) - 1", "0 * tl.load(accepted + i_n)", agree),
        (f"{STEP}:step_kernel", "i_x = i_n * T + i_t", "i_x = i_n * T", agree),
        (
            f"{STEP}:step_kernel",
            "(slot * row + p_state), b_new",
            "(first * row + p_state), b_new",
            agree,
        ),
        (f"{STEP}:step_kernel", "m_x = m_k & there", "m_x = m_k", skip),
        (f"{STEP}:step_kernel", "tl.where(there, exp(b_g), 1.0)", "exp(b_g)", skip),
        (GENERIC, "accepted is None", "True", agree),
        (GENERIC, "S = new.where(used[:, None, None, None], S)", "S = new", skip),
        (GENERIC, "used.any(), new", "used.any() | True, new", skip),
        (GENERIC, "slots.clamp(min=0)[rows]", "slots.clamp(min=0)", skip),
    ],
)
def test_a_planted_bug_is_found(place, line, mistake, check):
    backend = "chunked" if place == GENERIC else "triton"
    if backend not in RUNNABLE:
        pytest.skip("the triton extra is not installed")
    with (
        planted(Bug(place, place, line, mistake, "")),
        pytest.raises((AssertionError, RuntimeError)),
    ):
        check(backend)


@pytest.mark.parametrize("backend", KERNELS)
def test_compiled_calls_write_into_the_pool(backend):
    device = DEVICES.get(backend, "cpu")
    x, options, pool = draw(made=True, device=device)
    options |= {"backend": backend, "state_indices": SLOTS.to(device)}
    compiled = torch.compile(
        lambda x, pool: (2 * step(x, pool, **options)[0], pool.sum()),
        backend="aot_eager",
        fullgraph=True,
    )
    other = pool.clone()
    o, total = compiled(x, pool)
    assert_same(o, 2 * step(x, other, **options)[0])
    assert_same(pool, other)
    assert_same(total, pool.sum())
    assert (
        step(at(x, slice(0)), pool, **options | {"state_indices": SLOTS[:0].to(device)})[0].numel()
        == 0
    )


@pytest.mark.parametrize("backend", KERNELS)
def test_bfloat16_states_err_like_exact_ones_that_are_rounded_each_token(backend, capsys):
    """A head halves its state in 8 tokens, and one never does; the judge is float64."""
    tokens = 128 if arithmetic() == "interpreted" and backend == "triton" else 512
    HV, K, generator = 2, 32, torch.Generator().manual_seed(1)
    q, k, v = torch.randn((3, tokens, HV, K), generator=generator)
    q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    g = torch.tensor([-math.log(2) / 8, 0.0]).expand(tokens, HV)
    x = {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand((tokens, HV), generator=generator)}

    def decode(backend, dtype, states):
        device = DEVICES.get(backend, "cpu")
        pool, own = (
            torch.zeros((1, HV, K, K), dtype=states, device=device),
            torch.tensor([0], device=device),
        )
        token = {name: y.to(device, dtype) for name, y in x.items()}
        outs = [
            step(at(token, slice(t, t + 1)), pool, state_indices=own, backend=backend)[0]
            for t in range(tokens)
        ]
        return torch.cat(outs).cpu().double()

    exact = decode("recurrent", torch.float64, torch.float64)

    def error(backend, dtype, states):
        return (decode(backend, dtype, states) - exact).norm(dim=(0, 2)) / exact.norm(dim=(0, 2))

    found, control = (
        error(backend, torch.float32, torch.bfloat16),
        error("recurrent", torch.float64, torch.bfloat16),
    )
    full = error(backend, torch.float32, torch.float32)
    with capsys.disabled():
        print(f"\n{backend}: bfloat16 {found}, control {control}, float32 {full}")
    assert (full < 1e-6).all() and (found < 0.02).all()
    assert ((found / control - 1).abs() < 0.05).all(), found / control


INDICES = "state_indices"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {INDICES: None, "accepted": SLOTS[:, 0]},
            ValueError,
            "accepted passed without state_indices",
        ),
        ({INDICES: SLOTS[:2]}, ValueError, "state_indices [2, 3] is [B, T] with B=2, but B is 3"),
        (
            {INDICES: SLOTS[:, 0]},
            ValueError,
            "q [3, 3, 2, 32] has 4 dimensions, expected [B, H, K]",
        ),
        (
            {INDICES: SLOTS.float()},
            TypeError,
            "state_indices is torch.float32; pass int64 or int32",
        ),
        ({INDICES: SLOTS.tolist()}, TypeError, "state_indices is a list; pass a torch.Tensor"),
        (
            {INDICES: SLOTS + 1},
            ValueError,
            "state_indices at (1, 1) is 12, which is not in a pool of N=12",
        ),
        ({INDICES: SLOTS.where(SLOTS != 8, 7)}, ValueError, "is 7, which another row has, too"),
        (
            {"accepted": torch.tensor([1, 4, 3])},
            ValueError,
            "accepted at (1,) is 4, which is outside of 1",
        ),
        ({"accepted": SLOTS}, ValueError, "accepted [3, 3] has 2 dimensions, expected [B]"),
        (
            {"state": torch.zeros(N, 4, 32, 48).half()},
            TypeError,
            "it is torch.float32 or torch.bfloat16",
        ),
        (
            {"state": torch.zeros(N, 32, 4, 48).transpose(1, 2)},
            ValueError,
            "its slots must be contiguous",
        ),
        (
            {"v": torch.zeros(B, T, 4, 48).requires_grad_()},
            ValueError,
            "call it under torch.no_grad()",
        ),
    ],
)
def test_what_does_not_fit_a_pool_is_refused_before_any_work(changes, error, message):
    x, _, pool = draw()
    before = pool.clone()
    with pytest.raises(error, match=re.escape(message)):
        gated_delta_rule_step(**{**x, "state": pool, "state_indices": SLOTS} | changes)
    assert_same(pool, before)


@pytest.mark.parametrize("backend", KERNELS)
def test_slots_may_lie_apart_and_unused_ones_hold_anything(backend):
    """A page of an engine holds a layer's convolution, too; check mode looks at what is read."""
    device = DEVICES.get(backend, "cpu")
    x, options, pool = draw(device=device)
    options |= {"backend": backend, "state_indices": SLOTS.to(device)}
    pages = torch.full((N, pool[0].numel() + 16), math.nan, device=device)
    apart = pages[:, 16:].unflatten(1, pool.shape[1:])
    apart[SLOTS.flatten()] = pool[SLOTS.flatten()]
    with checking():
        found = step(x, apart, **options)[0]
    assert_same(found, step(x, pool, **options)[0])
    assert_same(apart[SLOTS.flatten()], pool[SLOTS.flatten()])
    assert pages[:, :16].isnan().all()
    turned = draw(device=device)[2].mT.contiguous()  # compiled, its sums end in other bits
    torch.testing.assert_close(step(x, turned.mT, **options)[0], found)
    torch.testing.assert_close(turned.mT, pool)
