"""The gates that a layer's kernel makes of their projections: they are exact, and need exp alone."""

from functools import partial

import pytest
import torch

from delta_trn.backends import default_backend, projected_delta_layer
from delta_trn.backends.gated_delta_layer import nki_adapter
from delta_trn.backends.gated_delta_rule import contract
from delta_trn.backends.parity import mixer_cases
from delta_trn.nki_kernels import gated_delta_layer, plan
from delta_trn.nki_kernels.gated_delta_layer import gates
from delta_trn.nki_kernels.language import nki
from delta_trn.nki_kernels.simulator.cost import estimate
from tests.support.nki_judge import record_run, run
from tests.support.planted_bugs import Bug, planted

BOUND = 6.2e-7  # of g, as the module derives it
MEASURED = 4e-7  # of g, beta and slopes in the simulator, whose exponentials are exact to one rounding
LEAST = 2.0**-126  # normal number of float32


@nki.jit
def gates_alone(a, b, A_log, dt_bias, biased, beta_max, position, packed):
    own = gates.start(a, b, A_log, dt_bias, biased, beta_max, position, packed, True)
    gates.load_gates(own)
    gates.make_gates(own)
    return own["g"], own["beta"], own["slopes"]


def make(a, b, A_log=None, dt_bias=None, beta_max=1.0, position=None):
    """Returns g in two words, beta and slopes by the kernel."""
    A_log = torch.zeros(a.shape[2]) if A_log is None else A_log
    bias, where = A_log if dt_bias is None else dt_bias, A_log if position is None else position
    return run(gates_alone, a, b, A_log, bias, dt_bias is not None, beta_max, where, position is not None)


def expect(a, b, A_log, dt_bias, beta_max):
    """Returns g, beta and slopes in float64, of the float32 sum of a and dt_bias; g is not limited."""
    x = (a if dt_bias is None else a + dt_bias).double()
    rate, y = A_log.double().exp(), b.double()
    g = -rate * (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())))
    slopes = torch.stack([-rate * x.sigmoid(), g, beta_max * y.sigmoid() * (-y).sigmoid()], -1)
    return g, beta_max * y.sigmoid(), slopes


def errors(result, exact):
    """Returns relative errors, and those of numbers below the least normal one relative to that."""
    return (result.double() - exact).abs() / exact.abs().clamp(min=LEAST)


def dense():
    """Returns numbers from -86 to 100, close to each other around 0, where softplus bends, as [1, T, 2]."""
    x = torch.cat([torch.linspace(-86, 100, 3000), torch.linspace(-3, 3, 2998), torch.tensor([0.0, -0.0])])
    return x.view(1, -1, 2)


def is_exact(beta_max=1.0):
    """Returns whether g, beta and slopes are as exact as they are measured to be."""
    a, A_log = dense(), torch.tensor([0.0, -1.3])
    words, beta, slopes = make(a, a, A_log, beta_max=beta_max)
    g, exact_beta, exact_slopes = expect(a, a, A_log, None, beta_max)
    pairs = [(words.sum(-1), g), (beta, exact_beta), (slopes, exact_slopes)]
    return all(errors(result, exact).max() < MEASURED for result, exact in pairs)


@pytest.mark.parametrize("beta_max", [1.0, 2.0])
def test_gates_and_slopes_are_exact_to_a_few_roundings(beta_max):
    assert MEASURED < BOUND and is_exact(beta_max)


def test_far_from_zero_gates_are_0_or_reset_and_nothing_is_infinite():
    x = torch.tensor([-1e20, -1e4, -104.0, -90.0, 1e4, 1e20, 3e38])
    a = x.view(1, -1, 1).repeat(1, 1, 2)
    words, beta, slopes = make(a, a, torch.tensor([0.0, 200.0]))
    g = words.sum(-1)[0]
    assert (g[:4, 0].abs() < LEAST).all() and (g[4:] == gates.RESET).all() and (g[:2, 1] == 0).all()
    assert torch.equal(beta[0, :, 0] > 0.5, x > 0) and (beta[0, :2] == 0).all()
    assert (
        torch.isfinite(slopes).all()
        and (slopes[0, 4:, :, :2] == 0).all()
        and (slopes[0, 4:, :, 2] == 0).all()
    )


def test_a_rate_near_the_end_of_float32_is_exact():
    a, A_log = torch.tensor([-85.0, -84.0, -86.0]).view(1, -1, 1).repeat(1, 1, 2), torch.tensor([85.0, 88.5])
    words, _, slopes = make(a, a, A_log)
    g, _, exact_slopes = expect(a, a, A_log, None, 1.0)
    assert (g > gates.RESET).all()
    assert errors(words.sum(-1), g).max() < MEASURED and errors(slopes, exact_slopes).max() < MEASURED


def has_the_words_of_plan():
    """Returns whether both words of g are `plan.split_decays` of it, ties of the first one included."""
    ties = torch.arange(20, 60, 1 / 512).view(1, -1, 2)  # g = -x there, and every second x is half way
    for a in (dense(), ties):
        words = make(a, a)[0]
        g = words.sum(-1)
        if not torch.equal(words, torch.stack(plan.split_decays(g), -1)):
            return False
    return torch.equal(g, -ties)


def test_g_has_the_words_that_pytorch_would_make():
    assert has_the_words_of_plan()


def limits_decays():
    """Returns whether a reset is RESET and no variable, by a and by position, and by no others."""
    assert contract.RESET == gates.RESET
    a = torch.full((1, 9, 2), 0.5)
    a[0, 3, 0] = 1e20
    position = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2], dtype=torch.int32)
    words, _, slopes = make(a, a, position=position)
    resets = (position == 0)[None, :, None] | (a > 1)
    g = words.sum(-1)
    moves = (slopes[..., :2] != 0).all(-1)
    return (
        torch.equal(g == gates.RESET, resets)
        and torch.equal(moves, ~resets)
        and bool((g[~resets] > -1).all())
    )


def test_a_reset_is_no_variable():
    assert limits_decays()


@pytest.mark.parametrize(
    ("N", "T", "HV"), [(1, 1, 1), (8, 1, 2), (33, 3, 1), (2, 70, 3), (1, 131, 2), (1, 600, 1), (3, 128, 6)]
)
def test_gates_of_all_shapes_are_those_of_pytorch(N, T, HV):
    generator = torch.Generator().manual_seed(N + T)
    normal = partial(torch.randn, generator=generator)
    a, b, A_log, dt_bias = normal(N, T, HV), normal(N, T, HV), normal(HV), normal(HV)
    words, beta, slopes = make(a, b, A_log, dt_bias, 2.0)
    g, strength = contract.make_gates(a, b, A_log, dt_bias, 2.0)
    assert torch.allclose(words.sum(-1), g, rtol=1e-6, atol=0) and torch.allclose(beta, strength, rtol=1e-6)
    assert errors(slopes, expect(a, b, A_log, dt_bias, 2.0)[2]).max() < MEASURED


MISTAKES = (
    (
        Bug("the bias is forgotten", "evaluate_exponentials", 'if own["biased"]:', "if False:", ""),
        lambda: test_gates_of_all_shapes_are_those_of_pytorch(2, 70, 3),
    ),
    (Bug("two terms less", "coefficient", "0.25**k", "(k < 5) * 0.25**k", ""), is_exact),
    (Bug("x is taken for |x|", "compute_softplus", "op0=nl.maximum", "op0=nl.abs_max", ""), is_exact),
    (Bug("a reset varies", "store_slopes", "operand0=RESET", "operand0=2 * RESET", ""), limits_decays),
    (Bug("no reset by position", "compute_decays", 'not own["packed"]', "True", ""), limits_decays),
    (Bug("words of 2^-7", "store_words", "operand0=256.0", "operand0=128.0", ""), has_the_words_of_plan),
    (
        Bug("a strength without beta_max", "scale_strengths", '!= 1.0', "> 9.0", ""),
        partial(is_exact, 2.0),
    ),
)  # fmt: skip


@pytest.mark.parametrize(("bug", "check"), MISTAKES, ids=lambda x: getattr(x, "name", ""))
def test_a_mistake_in_the_gates_is_found(bug, check):
    place = f"nki_kernels.gated_delta_layer.gates:{bug.place}"
    with planted(Bug(bug.name, place, bug.line, bug.mistake, "")):
        assert not passes(check)
    assert passes(check)


def passes(check):
    """Returns whether a check returns something else than False, and no assertion of it fails."""
    try:
        return check() is not False
    except AssertionError:
        return False


@pytest.mark.parametrize("shape", [{"save": 1}, {"save": 0}, {"backward": 1}], ids=str)
def test_the_scalar_engine_loads_no_table_for_the_gates(shape):
    """They need exp alone, once, before the first SiLU; backward's slopes need none."""
    sizes = {"T": 140, "H": 2, "K": 32, "V": 48, "C": 128, "lanes": 2, "width": 1, "d": 128}
    run = record_run(*unpack(gated_delta_layer.example(**sizes, **shape)))
    tables = set(estimate(run.trace, run.target).tables)
    assert tables == ({"exp", "silu", "silu_dx"} if "backward" in shape else {"exp", "silu"})


def unpack(example):
    kernel, arguments = example
    return kernel, *arguments


def gradients(name, monkeypatch, whole):
    """Returns the gradients of a case: behind the kernel, or by PyTorch of what it leaves."""
    if not whole:
        monkeypatch.setattr(nki_adapter, "_is_hidden_differentiated", lambda call: False)
    case = mixer_cases.BY_NAME[name]
    x = mixer_cases.inputs(case, torch.bfloat16)
    leaves = {n: y.requires_grad_() for n, y in x.tensors.items() if y.is_floating_point()}
    with default_backend("nki-simulator"):
        y = projected_delta_layer(**x.tensors, **case.options())
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), x.douts["y"]), strict=True))


def test_pytorch_takes_the_slopes_where_the_kernel_does_not(monkeypatch):
    """The gradients of the gates are the same numbers, by both ways."""
    by_kernel = gradients("projected_gates", monkeypatch, True)
    by_pytorch = gradients("projected_gates", monkeypatch, False)
    assert by_kernel["a"].dtype == torch.bfloat16 and "dt_bias" not in by_kernel
    for name in ("a", "b", "A_log"):
        scale = by_kernel[name].float().abs().max()
        assert scale > 0 and (by_kernel[name].float() - by_pytorch[name].float()).abs().max() <= 1e-5 * scale


def test_what_forward_saves_has_the_shapes_that_the_adapter_says():
    for name in ("projected_gates", "projected_one_key"):
        case = mixer_cases.BY_NAME[name]
        x = mixer_cases.inputs(case, torch.bfloat16).tensors
        x = {word: y for word, y in x.items() if word != "cu_seqlens"}
        call = nki_adapter.ProjectedLayer(**x, K=case.K, scale=0.25, beta_max=2.0)
        _, saved = nki_adapter.projected_forward(call, save=True)
        shapes = [(tuple(shape), dtype) for shape, dtype in nki_adapter.projected_saved_shapes(call)]
        assert [(tuple(y.shape), y.dtype) for y in saved] == shapes
