"""What tests of NKI kernels share: tensors in and out of the simulator, and how wrong a result may be."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from delta_trn.backends.gated_delta_rule import nki_adapter
from delta_trn.backends.parity.judge import FACTOR, error
from delta_trn.nki_kernels.language import RUNTIME
from delta_trn.nki_kernels.simulator import Numerics, record
from delta_trn.nki_kernels.simulator.report import traffic

DTYPES = (torch.float32, torch.bfloat16)
EXACT = Numerics()
ROUNDED_PRODUCTS = Numerics(matmul="bfloat16")  # what some have seen the Tensor engine do with float32


def normal(generator, *shape):
    return torch.randn(shape, generator=generator)


def array(x):
    """A tensor as the simulator takes it; anything else unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def tensor(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def run(kernel, *args, target="trn1", numerics=EXACT):
    """The kernel's outputs, every strict check on but that of the source, which has a test of its own:
    its findings are cached, and must not be those of a planted fault.

    Where AWS's nki is installed, kernels are made of its language, and its simulator runs them.
    """
    arrays = [array(x) for x in args]
    if RUNTIME == "neuron":
        if target != "trn1" or numerics is not EXACT:
            pytest.skip("AWS's nki is installed: its simulator runs for one target, and exactly")
        outputs = nki_adapter.simulate(kernel, *arrays)
    else:
        outputs = recorded(
            kernel, *arrays, target=target, trace=False, check_source=False, numerics=numerics
        ).outputs
    return tuple(map(tensor, outputs)) if isinstance(outputs, tuple) else tensor(outputs)


def recorded(kernel, *args, **how):
    """A run with its trace and memory peaks, which only our simulator has."""
    if RUNTIME == "neuron":
        pytest.skip("AWS's nki is installed: its simulator keeps no trace and counts no memory")
    return record(kernel, *args, **how)


def hbm_bytes(kernel, arguments):
    """(moved, least): what the kernel reads and writes, and its inputs and outputs once each."""
    return traffic(recorded(kernel, *arguments), arguments)


def allowed(judge, honest, dtype, terms):
    """The rule of `backends.judge` for sums kept in float32: twice the error of an honest float32
    implementation, never below what adding so many terms costs, plus one rounding to the result's dtype.
    """
    bound = max(FACTOR * error(honest, judge), math.sqrt(terms) * 2.0**-24)
    return bound + (error(judge.to(dtype), judge) if dtype != torch.float32 else 0.0)


def assert_close(found, judge, honest, terms):
    """Every tensor of the judge, by name; where the judge is 0 everywhere, so must the result be."""
    assert found.keys() == judge.keys()
    for name, right in judge.items():
        bound = allowed(right, honest[name], found[name].dtype, terms) if right.any() else 0.0
        wrong = error(found[name], right)
        assert wrong <= bound, f"{name}: error {wrong:.3g} above {bound:.3g}"
