"""Kernels address tensors of more than 2^31 elements in launches of more than 65,535 programs.

Memory that nobody touches is only reserved, so such tensors fit a small machine: the interpreter
runs only a launch's last program, which must find its data behind 2^31 elements and give the same
bits as in a tensor of its own.
"""

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.gated_delta_rule import triton_adapter, triton_time_adapter
from delta_trn.backends.gated_delta_rule.contract import Rule, Step
from delta_trn.triton_kernels import delta_residual, rms_norm, short_convolution
from delta_trn.triton_kernels.launch import arithmetic, config, tile

interpreter = pytest.importorskip(
    "triton.runtime.interpreter", reason="this Triton has no interpreter"
)

pytestmark = pytest.mark.skipif(
    arithmetic() != "interpreted",
    reason="on a GPU memory is taken, not reserved: 60 GB for one case",
)
HALF = torch.bfloat16


class Launches:
    """Runs only the programs of a launch's last row; `rows` is the number of rows."""

    def __init__(self):
        self.rows, self.sizes = 1, []

    def __call__(self, executor, run, arguments, named):
        (size,) = executor.grid
        self.sizes.append(size)
        count = max(1, size // self.rows)
        executor.grid = (count,)
        with pytest.MonkeyPatch.context() as patch:

            def place(x, y, z):
                self.builder.set_grid_dim(size, 1, 1)
                index(self.wrap(x + size - count), y, z)

            index = self.builder.set_grid_idx
            patch.setattr(self.builder, "set_grid_idx", place)
            return run(executor, *arguments, **named)

    def wrap(self, program):
        return program

    @property
    def builder(self):
        return interpreter.interpreter_builder


@pytest.fixture
def launches(monkeypatch):
    recorder, run = Launches(), interpreter.GridExecutor.__call__
    monkeypatch.setattr(
        interpreter.GridExecutor,
        "__call__",
        lambda self, *a, **named: recorder(self, run, a, named),
    )
    # results lie where they were written; copying them onto themselves would touch all memory
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
    return recorder


def reserve(small, rows):
    """Returns untouched tensors of `rows` rows, of which the last is that of `small`."""
    tensors = []
    for one in small:
        try:
            tensors.append(torch.empty((rows, *one.shape[1:]), dtype=one.dtype))
        except RuntimeError as refusal:
            pytest.skip(f"this machine reserves no {rows * one.nbytes / 1e9:.1f} GB: {refusal}")
        tensors[-1][-1:] = one
    return tensors


def compare_last_row(launches, function, small, rows):
    """Asserts that `function` gives the same bits for the last of `rows` rows
    as for that row alone.
    """
    expected = function(*small)
    launches.rows, launches.sizes = rows, []
    results = function(*reserve(small, rows))
    assert max(x.numel() for x in results) > 2**31 and max(launches.sizes) > 65535
    for x, y in zip(results, expected, strict=True):
        if len(x) >= rows:
            assert torch.equal(x[len(x) - len(y) :], y)


def normal(*shape, dtype=HALF):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def rule(q, k, v, g, beta, state, do, dstate):
    """Returns everything that forward and backward give."""
    call = Rule(
        q, k, v, g, beta, initial_state=state, scale=0.1, l2norm=True, output_final_state=True
    )
    o, final, saved = triton_adapter.forward(call, save=True)
    gradients = triton_adapter.backward(do, dstate, call, saved)
    return o, final, *saved, *(x for x in gradients if x is not None)


@pytest.mark.parametrize(("K", "V"), [(64, 16), (16, 128)], ids=["keys", "values"])
@pytest.mark.parametrize("segment", [None, 1], ids=["whole", "segments"])
def test_rule_addresses_the_last_of_2_to_31_elements(K, V, segment, launches, monkeypatch):
    """Runs the last of more than 2^17 sequences of one chunk."""
    T = 64
    tensors = [normal(1, T, 1, K), normal(1, T, 1, K), normal(1, T, 1, V)]
    tensors += [
        -normal(1, T, 1, dtype=torch.float32).abs(),
        normal(1, T, 1, dtype=torch.float32).sigmoid(),
    ]
    state = normal(1, 1, K, V, dtype=torch.float32)
    tensors += [state, normal(1, T, 1, V), state + 1]
    monkeypatch.setattr(triton_time_adapter, "SEGMENT", segment)
    monkeypatch.setattr(triton_adapter, "KEPT_BYTES", 2**62)
    # one sequence alone would be scanned by other tiles, which round otherwise
    monkeypatch.setattr(
        triton_adapter,
        "config",
        lambda *sizes, itemsize, **of_call: config(*sizes, itemsize=itemsize),
    )
    compare_last_row(launches, rule, tensors, 2**31 // (T * max(K, V)) + 1)


def test_step_addresses_the_last_of_2_to_31_elements(launches):
    tensors = [normal(1, 1, 128)] * 3
    tensors += [
        -normal(1, 1, dtype=torch.float32).abs(),
        normal(1, 1, dtype=torch.float32).sigmoid(),
    ]
    tensors += [normal(1, 1, 128, 128, dtype=torch.float32)]

    def run(q, k, v, g, beta, state):
        return triton_adapter.step(Step(q, k, v, g, beta, state, scale=0.1, l2norm=True))

    compare_last_row(launches, run, tensors, 2**17 + 1)


def test_residual_addresses_the_last_of_2_to_31_elements(launches):
    def run(x, k, v, beta, dout):
        out, dx, dk, dv, dbeta = (torch.empty_like(y) for y in (x, x, k, v, beta))
        delta_residual.forward(x, k, v, beta, out, k_eps=1e-6)
        delta_residual.backward(dout, x, k, v, beta, dx=dx, dk=dk, dv=dv, dbeta=dbeta, k_eps=1e-6)
        return out, dx, dk, dv, dbeta

    x = normal(1, 1024, 4)
    tensors = [x, normal(1, 1024), normal(1, 4), normal(1, dtype=torch.float32), x + 1]
    compare_last_row(launches, run, tensors, 2**19 + 1)


def gated_norm(x, gate, dy):
    y, dx, dgate = (torch.empty_like(z) for z in (x, x, x))
    weight = normal(1, x.shape[1])[0]
    rms_norm.forward(x, gate, None, weight, y, None, eps=1e-6)
    P, _ = rms_norm.parts(*x.shape)
    dweight = x.new_empty((P, x.shape[1]), dtype=torch.float32)
    rms_norm.backward(dy, None, x, gate, weight, dx=dx, dgate=dgate, dweight=dweight, eps=1e-6)
    return y, dx, dgate


def norm_tensors():
    x = normal(1, 8192)
    return [x, x + 1, x - 1]


def test_norm_addresses_the_last_of_2_to_31_elements(launches):
    """Backward deals tiles of one row to 1024 programs in turn,
    so the last program has the last row.
    """
    compare_last_row(launches, gated_norm, norm_tensors(), 257 * 1024)


def test_convolution_addresses_the_last_of_2_to_31_elements(launches, monkeypatch):
    def one_span_each(B, T, C, *_, kernel="short_convolution", prefix):
        return B, -(-T // tile(kernel, C).rows)

    def run(x, dy):
        y, dx = torch.empty_like(x), torch.empty_like(x)
        weight = normal(4, 64)
        short_convolution.forward(x, weight, None, None, y, silu=True)
        dweight = x.new_empty((len(x), 4, 64), dtype=torch.float32)
        short_convolution.backward(
            dy, x, weight, None, None, dx=dx, dprefix=None, dweight=dweight, silu=True
        )
        return y, dx, dweight

    # one row alone would be cut in two
    monkeypatch.setattr(short_convolution, "parts", one_span_each)
    x = normal(1, 32, 64)
    compare_last_row(launches, run, [x, x + 1], 2**20 + 1)


def test_an_address_that_wraps_around_is_detected(launches):
    """A planted fault: programs past 2^31 elements work on the beginning,
    as 32-bit addresses would.
    """
    launches.wrap = lambda program: program * 8192 % 2**31 // 8192
    with pytest.raises(AssertionError):
        compare_last_row(launches, gated_norm, norm_tensors(), 257 * 1024)
