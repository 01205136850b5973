"""The C++ kernel of the layers' operations: where it runs, its bits,
its extremes, and PyTorch without it.
"""

from itertools import chain

import pytest
import torch
from torch._subclasses import FakeTensorMode

from delta_trn.backends import add_rms_norm, gated_rms_norm, linear_cross_entropy, short_convolution
from delta_trn.backends.layers import cpu_kernel
from delta_trn.backends.parity.layer_cases import CASES, verdicts

pytestmark = pytest.mark.skipif(
    cpu_kernel.library().functions is None, reason=cpu_kernel.library().note
)


def gradients(function, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns what a function computes of tensors, and the gradients of the sum of its squares."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = torch.autograd.grad(sum(y.square().sum() for y in outputs), inputs)
    return [y.detach() for y in chain(outputs, grads)]


def everything(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Returns all operations' results and gradients, at sizes that no vector divides."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 150, 203, generator=draw, dtype=dtype) for _ in range(2))
    taps, gain = (
        torch.randn(203, 4, generator=draw, dtype=dtype),
        torch.randn(203, generator=draw, dtype=dtype),
    )
    targets = torch.randint(150, (300,), generator=draw)
    return [
        *gradients(short_convolution, x, taps),
        *gradients(lambda x, y, w: gated_rms_norm(x, y, w, eps=1e-6), x, y, gain),
        *gradients(
            lambda x, y, w: gated_rms_norm(x, y, w, eps=1e-6, activation="sigmoid"), x, y, gain
        ),
        *gradients(lambda x, y, w: add_rms_norm(x, y, w, eps=1e-6), x, y, gain),
        *gradients(lambda h, w: linear_cross_entropy(h, w, targets), x.flatten(0, 1), y[0]),
    ]


@pytest.fixture
def without(monkeypatch):
    """Computes in PyTorch, as where there is no compiler."""
    monkeypatch.setattr(cpu_kernel, "takes", lambda *tensors: False)


def test_float32_runs_in_the_kernel_and_other_dtypes_do_not(monkeypatch):
    ran, run = [], cpu_kernel._run
    monkeypatch.setattr(
        cpu_kernel, "_run", lambda name, *rest: ran.append(name) or run(name, *rest)
    )
    everything(torch.float64)
    assert not ran
    everything()
    names = (
        "convolution_forward",
        "convolution_backward",
        "norm_forward",
        "norm_backward",
        "softmax",
    )
    assert set(ran) == set(names)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op != "delta_residual"], ids=lambda case: case.name
)
def test_pytorch_passes_the_criterion_where_there_is_no_kernel(without, case):
    assert not [str(v) for v in verdicts(case, torch.float32, "chunked") if not v.passed]


def test_results_are_the_same_bits_with_one_thread_and_with_two():
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(everything())
    finally:
        torch.set_num_threads(threads)
    # products are PyTorch's, and their order of summation may depend on threads
    assert all(torch.equal(a, b) for a, b in list(zip(*results, strict=True))[:-3])


def test_a_loss_has_the_same_bits_whether_gradients_are_wanted_or_not():
    """Where none were, the losses of most vocabularies ended in other bits (20261122300:1629)."""
    draw, keep = torch.Generator().manual_seed(0), torch.ones(20, 1)
    for N in range(1, 70):
        logits = 3 * torch.randn(20, N, generator=draw)
        targets = torch.randint(N, (20, 1), generator=draw)
        losses = [
            cpu_kernel.softmax_(logits.clone(), targets, keep, save)[0] for save in (True, False)
        ]
        assert torch.equal(*losses), N


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_extreme_gates_logits_and_nan_come_out_as_in_pytorch(activation, monkeypatch):
    z = torch.tensor([[-3e38, -1e4, -90.0, -30.0, -0.0, 1e-30, 30.0, 90.0, 1e4, 3e38]])
    x, w = torch.ones_like(z), torch.ones(10)
    hidden, targets = torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 3])

    def results() -> list[torch.Tensor]:
        # of 1, lest the squares overflow
        y, gate = x.clone().requires_grad_(), z.clone().requires_grad_()
        out = gated_rms_norm(y, gate, w, eps=0.0, activation=activation)
        out.sum().backward()
        losses = [
            linear_cross_entropy(h[None], z[0, 2:8, None], t[None])
            for h, t in zip(hidden, targets, strict=True)
        ]
        return [out.detach(), gate.grad, *losses]  # type: ignore[list-item]

    rows = [results()]
    monkeypatch.setattr(cpu_kernel, "takes", lambda *tensors: False)
    rows.append(results())
    # PyTorch's derivative of a sigmoid is s (1 - s), which is 0 from z = 17 on
    atol = 1e-36 if activation == "swish" else 2**-24
    for mine, theirs in zip(*rows, strict=True):
        assert torch.allclose(mine, theirs, rtol=2**-20, atol=atol, equal_nan=True)
    if activation == "sigmoid":
        slopes = rows[0][1][0, [3, 6]]
        assert torch.allclose(slopes, torch.tensor(30.0).neg().exp().expand(2), rtol=2**-20)
    assert rows[0][-1].isnan() and rows[0][0].isfinite().all()


def test_a_tensor_without_a_pointer_is_left_to_pytorch():
    """Weights that FSDP2 and tensor parallelism divide are DTensors, whose pointers are null."""

    class Elsewhere(torch.Tensor):
        pass

    x, weight = torch.ones(2, 8), torch.ones(8)
    assert cpu_kernel.takes(x, weight) and cpu_kernel.takes(x, torch.nn.Parameter(weight))
    assert not cpu_kernel.takes(x, weight.as_subclass(Elsewhere))
    with FakeTensorMode() as mode:
        assert cpu_kernel.takes(mode.from_tensor(x), mode.from_tensor(weight)), (
            "as torch.compile's real ones"
        )
