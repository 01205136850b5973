"""The public functions refuse bad arguments by name, run the backend asked for,
and keep what they promise.
"""
# ruff: noqa: E501  the tables of bad arguments are read by column

import inspect
import re

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from delta_trn.backends import (
    BackendRefusal,
    checking,
    default_backend,
    gated_delta_rule,
    gated_delta_rule_step,
)
from delta_trn.backends.checks import is_checking
from delta_trn.backends.dispatch import BACKENDS, adapter

B, T, H, HV, K, V = 2, 3, 2, 4, 8, 5


def arguments(**changes):
    """Returns valid arguments; `changes` replaces some,
    by name=value or name=function of the tensor.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {
        "q": normalize(normal(B, T, H, K), dim=-1),
        "k": normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
        "g": -normal(B, T, HV).abs(),
        "beta": normal(B, T, HV).sigmoid(),
    }
    for name, change in changes.items():
        tensors[name] = change(tensors[name]) if callable(change) else change
    return tensors


def set_at(index, value):
    """Returns a function that changes one element of a copy."""

    def change(x):
        x = x.clone()
        x[index] = value
        return x

    return change


def packed(*bounds):
    return torch.tensor(bounds)


one_row = {name: (lambda x: x[:1]) for name in ("q", "k", "v", "g", "beta")}

# fmt: off
BAD = [
    # what is wrong                changes                                                       error       message
    ("rank of q",                  {"q": lambda x: x[0]},                                        ValueError, "q [3, 2, 8] has 3 dimensions, expected [B, T, H, K]"),
    ("rank of g",                  {"g": lambda x: x[..., None]},                                ValueError, "g [2, 3, 4, 1] has 4 dimensions, expected [B, T, HV]"),
    ("not a tensor",               {"beta": 0.5},                                                TypeError,  "beta is a float; pass a torch.Tensor"),
    ("T of v",                     {"v": lambda x: x[:, :2]},                                    ValueError, "v [2, 2, 4, 5] is [B, T, HV, V] with T=2, but T of q [2, 3, 2, 8] is 3"),
    ("B of beta",                  {"beta": lambda x: x[:1]},                                    ValueError, "beta [1, 3, 4] is [B, T, HV] with B=1, but B of q [2, 3, 2, 8] is 2"),
    ("K of k",                     {"k": lambda x: x[..., :7]},                                  ValueError, "k [2, 3, 2, 7] is [B, T, H, K] with K=7, but K of q [2, 3, 2, 8] is 8"),
    ("heads of g",                 {"g": lambda x: x[..., :2]},                                  ValueError, "g [2, 3, 2] is [B, T, HV] with HV=2, but HV of v [2, 3, 4, 5] is 4"),
    ("groups",                     {name: (lambda x: x[:, :, :3]) for name in ("v", "g", "beta")}, ValueError, "HV=3 is not a multiple of H=2"),
    ("heads of size 0",            {"v": lambda x: x[..., :0]},                                  ValueError, "H=2, HV=4, K=8, V=0 in q [2, 3, 2, 8], v [2, 3, 4, 0]; all must be at least 1"),
    ("integers",                   {"q": lambda x: x.long()},                                    TypeError,  "q is torch.int64; pass floating point tensors"),
    ("dtype of v",                 {"v": lambda x: x.bfloat16()},                                TypeError,  "v is torch.bfloat16, q is torch.float32; cast q, k and v to one dtype"),
    ("dtype of g",                 {"g": lambda x: x.double()},                                  TypeError,  "g is torch.float64 beside torch.float32 q; it must be float32: cast it"),
    ("device of k",                {"k": lambda x: x.to("meta")},                                ValueError, "k is on meta, q is on cpu; move all tensors to one device"),
    ("shape of the state",         {"initial_state": torch.zeros(B, H, K, V)},                   ValueError, "initial_state [2, 2, 8, 5] is [N, HV, K, V] with HV=2, but HV is 4"),
    ("transposed state",           {"initial_state": torch.zeros(B, HV, V, K)},                  ValueError, "initial_state [2, 4, 5, 8] is [N, HV, K, V] with K=5, but K is 8"),
    ("dtype of the state",         {"initial_state": torch.zeros(B, HV, K, V).bfloat16()},       TypeError,  "initial_state is torch.bfloat16; with torch.float32 q it is torch.float32: states keep full precision"),
    ("packed and batched",         {"cu_seqlens": packed(0, T)},                                 ValueError, "B=2 with cu_seqlens; packed sequences lie end to end in one row: reshape to B=1"),
    ("float bounds",               {**one_row, "cu_seqlens": packed(0, T).float()},              TypeError,  "cu_seqlens is torch.float32; pass int64 or int32"),
    ("divided over processes",     {"cp_context": object()},                                     ValueError, "cp_context is a object; no sequence is divided over processes here"),
    ("a list of bounds",           {**one_row, "cu_seqlens": [0, T]},                            TypeError,  "cu_seqlens is a list; pass an int64 tensor [N + 1]"),
    ("no bounds",                  {**one_row, "cu_seqlens": packed(0)},                         ValueError, "cu_seqlens [1] is not [N + 1] with N >= 1"),
    ("bounds that start late",     {**one_row, "cu_seqlens": packed(1, T)},                      ValueError, "cu_seqlens runs from 1 to 3; it must run from 0 to T=3"),
    ("bounds that end early",      {**one_row, "cu_seqlens": packed(0, 2)},                      ValueError, "cu_seqlens runs from 0 to 2; it must run from 0 to T=3"),
    ("bounds that fall",           {**one_row, "cu_seqlens": packed(0, 2, 1, T)},                ValueError, "cu_seqlens falls from 2 at 1 to 1 at 2; pass the running sum of the lengths"),
    ("states of too few sequences", {**one_row, "cu_seqlens": packed(0, 1, T), "initial_state": torch.zeros(1, HV, K, V)}, ValueError, "initial_state [1, 4, 8, 5] is [N, HV, K, V] with N=1, but N is 2"),
]
BAD_DATA = [
    ("NaN",                        {"v": set_at((1, 2, 3, 4), float("nan"))},                    "v at (1, 2, 3, 4) is nan, which is not finite"),
    ("infinity",                   {"q": set_at((0, 0, 1, 7), float("-inf"))},                   "q at (0, 0, 1, 7) is -inf, which is not finite"),
    ("NaN in g",                   {"g": set_at((1, 2, 3), float("nan"))},                       "g at (1, 2, 3) is nan, which is not finite"),
    ("a state with NaN",           {"initial_state": torch.full((B, HV, K, V), float("nan"))},   "initial_state at (0, 0, 0, 0) is nan"),
    ("alpha for log(alpha)",       {"g": set_at((1, 0, 2), 0.9)},                                "g at (1, 0, 2) is 0.9, which is above 0; g is the logarithm of a decay in (0, 1]: pass log(alpha), not alpha"),
    ("beta below 0",               {"beta": set_at((0, 1, 0), -0.25)},                           "beta at (0, 1, 0) is -0.25, which is outside [0, 2]"),
    ("beta above 2",               {"beta": set_at((0, 1, 3), 2.5)},                             "beta at (0, 1, 3) is 2.5, which is outside [0, 2]"),
    ("long keys",                  {"k": lambda x: 3 * x},                                       "the norm of k at (0, 0, 0) is 3, which is above 1"),
]
# fmt: on


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
@pytest.mark.parametrize(
    ("changes", "error", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_bad_arguments_are_named_before_any_work(changes, error, message, backend, monkeypatch):
    def no_work(*args, **kwargs):
        raise AssertionError("the backend was called")

    monkeypatch.setattr(adapter(backend), "forward", no_work)
    with pytest.raises(error, match=re.escape(message)):
        gated_delta_rule(**arguments(**changes), backend=backend)


@pytest.mark.parametrize(
    ("changes", "message"), [row[1:] for row in BAD_DATA], ids=[row[0] for row in BAD_DATA]
)
def test_check_mode_names_bad_data_and_its_place(changes, message):
    bad = arguments(**changes)
    with checking(), pytest.raises(ValueError, match=re.escape(message)):
        gated_delta_rule(**bad)
    # data is read in check mode only: on an accelerator, reading waits for the device
    gated_delta_rule(**bad)


def test_check_mode_accepts_data_at_its_bounds():
    at_bounds = arguments(
        g=set_at((0, 1, 2), float("-inf")), beta=lambda x: torch.full_like(x, 2.0)
    )
    with checking():
        gated_delta_rule(**at_bounds)
        gated_delta_rule(**{name: x.bfloat16() for name, x in at_bounds.items()})
        # the operation normalizes these keys itself
        gated_delta_rule(**arguments(k=lambda x: 3 * x), use_qk_l2norm_in_kernel=True)


def test_check_mode_lasts_for_its_block_and_blocks_nest():
    bad = arguments(g=lambda x: -x + 1)
    with checking(False):
        gated_delta_rule(**bad)
    with checking():
        with checking(False), pytest.raises(ValueError, match="is above 0"):
            gated_delta_rule(**bad)
        with pytest.raises(ValueError, match="is above 0"):
            gated_delta_rule(**bad)
    gated_delta_rule(**bad)


def test_check_mode_ends_with_its_block_even_if_one_object_is_entered_twice():
    mode = checking()
    with mode, mode:
        assert is_checking()
    assert not is_checking()


def test_check_mode_holds_inside_a_compiled_function():
    compiled = torch.compile(gated_delta_rule, backend="eager", fullgraph=True)
    compiled(**arguments())
    with checking(), pytest.raises(ValueError, match=r"beta at .* is outside"):
        compiled(**arguments(beta=lambda x: x + 3))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": lambda x: x[:, None]},
            ValueError,
            "q [2, 1, 2, 8] has 4 dimensions, expected [B, H, K]",
        ),
        (
            {"state": lambda x: x.mT},
            ValueError,
            "state [2, 4, 5, 8] is [B, HV, K, V] with K=5, but K is 8",
        ),
        (
            {"state": lambda x: x.bfloat16()},
            TypeError,
            "state is torch.bfloat16; with torch.float32 q it is",
        ),
        (
            {"beta": lambda x: x[:1]},
            ValueError,
            "beta [1, 4] is [B, HV] with B=1, but B of q [2, 2, 8] is 2",
        ),
        ({"state": None}, TypeError, "state is a NoneType; pass a torch.Tensor"),
    ],
)
def test_bad_arguments_of_a_step_are_named(changes, error, message):
    token = {name: x[:, 0] for name, x in arguments().items()} | {"state": torch.zeros(B, HV, K, V)}
    token |= {name: change(token[name]) if change else None for name, change in changes.items()}
    with pytest.raises(error, match=re.escape(message)):
        gated_delta_rule_step(**token)


def test_an_unknown_backend_of_the_rule_is_refused():
    with pytest.raises(BackendRefusal, match="no backend is named 'fast'"):
        gated_delta_rule(**arguments(), backend="fast")


@pytest.fixture
def spy(monkeypatch):
    """Lists the names of the adapters whose forward or step ran."""
    ran = []
    for name in ("chunked", "recurrent"):
        for function in ("forward", "step"):
            inner = getattr(adapter(name), function)

            def wrapped(*args, _inner=inner, _name=name, **kwargs):
                ran.append(_name)
                return _inner(*args, **kwargs)

            monkeypatch.setattr(adapter(name), function, wrapped)
    return ran


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_the_backend_asked_for_is_the_one_that_runs(backend, spy):
    gated_delta_rule(**arguments(), backend=backend)
    with default_backend(backend):
        gated_delta_rule(**arguments())
        step = {name: x[:, 0] for name, x in arguments().items()}
        gated_delta_rule_step(**step, state=torch.zeros(B, HV, K, V))
    assert spy == [backend] * 3


class TestFlashLinearAttention:
    """Calls written for chunk_gated_delta_rule of flash-linear-attention 0.6.0 run as they are."""

    def test_names_and_positions_are_those_of_its_release(self):
        positions = [
            *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
            *(
                "use_qk_l2norm_in_kernel",
                "use_beta_sigmoid_in_kernel",
                "allow_neg_eigval",
                "state_v_first",
            ),
            *("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context"),
        ]
        parameters = inspect.signature(gated_delta_rule).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positions
        keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert keywords == {
            "use_gate_in_kernel",
            "A_log",
            "dt_bias",
            "chunk_size",
            "return_states_at",
            "backend",
        }

    def test_positional_options_equal_keywords(self):
        tensors = arguments()
        state = torch.ones(B, HV, K, V)
        o, final = gated_delta_rule(*tensors.values(), 0.3, state, True, True)
        expected = gated_delta_rule(
            **tensors,
            scale=0.3,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])

    def test_bounds_of_32_bits_equal_those_of_64_and_what_means_nothing_changes_nothing(self):
        tensors = {name: x[:1] for name, x in arguments().items()}
        o, _ = gated_delta_rule(**tensors, cu_seqlens=packed(0, 1, T))
        bounds = packed(0, 1, T).int()
        ignored = {
            "cu_seqlens_cpu": bounds,
            "chunk_indices": torch.zeros(2, 2).long(),
            "chunk_size": 64,
        }
        again, _ = gated_delta_rule(**tensors, cu_seqlens=bounds, **ignored)
        assert torch.equal(o, again)

    @pytest.mark.parametrize("way", ["numpy", "data", "another memory", "in place", "set"])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_bounds_that_are_written_anew_are_read_anew(self, dtype, way):
        """A loader refills the buffer that it made the tensor of."""
        tensors = {name: x[:1] for name, x in arguments().items()}
        first, second = packed(0, 1, T).to(dtype), packed(0, 2, T).to(dtype)
        buffer = first.numpy().copy()
        bounds = torch.from_numpy(buffer)
        expected = [gated_delta_rule(**tensors, cu_seqlens=x.clone())[0] for x in (first, second)]
        assert not torch.equal(*expected)
        assert torch.equal(gated_delta_rule(**tensors, cu_seqlens=bounds)[0], expected[0])
        if way == "numpy":
            buffer[1] = 2
        elif way == "data":
            bounds.data[1] = 2
        elif way == "another memory":
            bounds.data = second
        elif way == "in place":
            bounds[1] = 2
        else:
            bounds.set_(second)
        assert torch.equal(gated_delta_rule(**tensors, cu_seqlens=bounds)[0], expected[1])

    def test_states_with_values_first_are_the_transposed_ones_and_their_gradients_too(self):
        tensors, state = (
            arguments(),
            torch.randn(B, HV, K, V, generator=torch.Generator().manual_seed(1)),
        )
        results = []
        for first in (False, True):
            initial = (state.mT if first else state).clone().requires_grad_()
            options = {"initial_state": initial, "output_final_state": True, "state_v_first": first}
            o, final = gated_delta_rule(**tensors, **options)
            (gradient,) = torch.autograd.grad(o.sum() + final.square().sum(), initial)
            results.append((o, *(x.mT if first else x for x in (final, gradient))))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))

    def test_a_strided_state_is_copied_once_for_forward_and_backward(self):
        if reason := BACKENDS["triton"].unavailable("cpu"):
            pytest.skip(reason)
        state = torch.randn(B, HV, V, K, generator=torch.Generator().manual_seed(1))
        copies = []

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, given=(), named=None):
                if function is torch.ops.aten.clone.default and given[0].shape == state.mT.shape:
                    copies.append(given[0].stride())
                return function(*given, **(named or {}))

        state.requires_grad_()
        with Copies():
            o, _ = gated_delta_rule(
                **arguments(), initial_state=state, state_v_first=True, backend="triton"
            )
            torch.autograd.grad(o.sum(), state)
        assert copies == [state.mT.stride()]

    @pytest.mark.parametrize("backend", ["chunked", "recurrent", "triton", "nki-simulator"])
    def test_values_come_first_also_where_no_state_is_given(self, backend):
        if reason := BACKENDS[backend].unavailable("cpu"):
            pytest.skip(reason)
        options = {"output_final_state": True, "backend": backend}
        plain, turned = (
            gated_delta_rule(**arguments(), state_v_first=first, **options)[1]
            for first in (False, True)
        )
        assert plain is not None and turned is not None
        assert turned.shape == (B, HV, V, K) and torch.equal(plain, turned.mT)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_state_in_the_dtype_of_q_is_widened_and_the_last_is_float32(self, dtype):
        tensors = {name: x.to(dtype) for name, x in arguments().items()}
        state = (
            torch.randn(B, HV, K, V, generator=torch.Generator().manual_seed(1))
            .to(dtype)
            .requires_grad_()
        )
        results = []
        for initial in (state, state.float()):
            o, final = gated_delta_rule(**tensors, initial_state=initial, output_final_state=True)
            (gradient,) = torch.autograd.grad(o.float().sum() + final.sum(), state)
            results.append((o, final, gradient))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
        assert results[0][1].dtype == torch.float32

    def test_unknown_keywords_still_raise(self):
        with pytest.raises(TypeError, match="scal"):
            gated_delta_rule(**arguments(), scal=1.0)
