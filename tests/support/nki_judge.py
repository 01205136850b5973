"""Runs NKI kernels on tensors in the simulator, and applies the criterion."""

import math

import pytest
import torch

from delta_trn.backends.nki_runtime_adapter import simulate, to_array, to_tensor
from delta_trn.backends.parity.judge import FACTOR, error
from delta_trn.nki_kernels.language import RUNTIME
from nki_simulator import Numerics, record

DTYPES = (torch.float32, torch.bfloat16)
EXACT = Numerics()
# the Tensor engine has been seen to round float32 so
ROUNDED_PRODUCTS = Numerics(matmul="bfloat16")


def normal(generator, *shape):
    return torch.randn(shape, generator=generator)


def run(kernel, *args, target="trn1", numerics=EXACT):
    """Returns the kernel's outputs, with every strict check on but that of the source.

    The check of the source has a test of its own. Its findings are cached, and a planted fault must
    not enter that cache. Where AWS's nki is installed, kernels use its language and its simulator
    runs them.
    """
    arrays = [to_array(x) if isinstance(x, torch.Tensor) else x for x in args]
    if RUNTIME == "neuron":
        if target != "trn1" or numerics is not EXACT:
            pytest.skip("AWS's nki is installed: its simulator runs for one target, and exactly")
        outputs = simulate(kernel, *arrays)
    else:
        outputs = record_run(
            kernel, *arrays, target=target, trace=False, check_source=False, numerics=numerics
        ).outputs
    return tuple(map(to_tensor, outputs)) if isinstance(outputs, tuple) else to_tensor(outputs)


def record_run(kernel, *args, **options):
    """Returns a run with its trace and memory peaks, which only our simulator has."""
    if RUNTIME == "neuron":
        pytest.skip("AWS's nki is installed: its simulator keeps no trace and counts no memory")
    return record(kernel, *args, **options)


def assert_close(outcome, judge, baseline, terms):
    """Asserts the rule of `backends.parity.judge` for sums kept in float32, for every tensor of the
    judge.

    The allowed error is twice that of the baseline, but at least the cost of adding that many
    terms. Rounding once to the result's dtype is allowed on top. Where the judge is 0 everywhere,
    so must the result be.
    """
    assert outcome.keys() == judge.keys()
    for name, exact in judge.items():
        result, allowed = outcome[name], 0.0
        if exact.any():
            allowed = max(FACTOR * error(baseline[name], exact), math.sqrt(terms) * 2.0**-24)
            allowed += (
                error(exact.to(result.dtype), exact) if result.dtype != torch.float32 else 0.0
            )
        assert error(result, exact) <= allowed, (
            f"{name}: error {error(result, exact):.3g} above {allowed:.3g}"
        )


def assert_passed(verdicts):
    """Asserts that all verdicts passed, and names those that failed."""
    failed = [str(verdict) for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join(failed)
