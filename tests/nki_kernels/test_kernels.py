"""What holds for every NKI kernel: its source compiles under every release,
later chips compute the same.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from delta_trn.backends.nki_runtime_adapter import KERNELS, to_tensor
from delta_trn.nki_kernels import (
    cross_entropy,
    delta_residual,
    gated_delta_layer,
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_step,
    gated_rms_norm,
    short_convolution,
)
from delta_trn.nki_kernels.kimi_delta_attention import bwd, fwd
from nki_simulator import TARGETS, nisa
from nki_simulator.__main__ import traffic
from nki_simulator.core.machine import Machine
from nki_simulator.core.memory import HBM, NkiTensor
from nki_simulator.cost import estimate
from nki_simulator.subset import findings
from tests.support.nki_judge import record_run, run
from tools import first_hour_trn1

DOCS = Path(__file__).parents[2] / "docs" / "trainium.md"
RULE = {"B": 1, "T": 40, "H": 1, "HV": 2, "K": 48, "V": 96, "C": 32, "dtype": "bfloat16"}
RESIDUAL = {"M": 3, "D": 96, "dtype": "bfloat16"}
NORM = {"M": 300, "V": 96, "dtype": "bfloat16"}
READOUT: dict[str, Any] = {"N": 130, "d": 140, "V": 600}
LAYER = {"T": 40, "H": 3, "K": 32, "V": 48, "C": 32, "lanes": 3, "width": 2}
CONVOLUTION = {"T": 130, "C": 48, "dtype": "bfloat16"}


def with_prefix(example):
    """Returns an example of the convolution's gradients that continue a sequence."""
    kernel, (dy, x, weight, *rest) = example
    return kernel, (dy, x, weight, *rest[:2], x[:, : weight.shape[1] - 1].copy(), True)


def with_state_and_prefix(example):
    """Returns an example of a layer's gradients that continue a sequence."""
    kernel, arguments = example
    x, states = arguments[1], arguments[20]
    state = states[:, 0].swapaxes(1, 2).copy()
    changes = {14: x[:, :3].copy(), 15: True, 16: state, 17: True, 18: state, 19: True}
    return kernel, tuple(changes.get(i, value) for i, value in enumerate(arguments))


EXAMPLES = [
    gated_delta_rule_fwd.example(**RULE, every=1),
    gated_delta_rule_bwd.example(**RULE, every=1),
    gated_delta_rule_step.example(H=2, HV=4, K=96, V=192),
    fwd.example(**RULE, every=1),
    bwd.example(**RULE, every=1),
    gated_delta_rule_step.example(H=2, HV=4, K=96, V=192, channels=1),
    delta_residual.example(**RESIDUAL),
    delta_residual.example(**RESIDUAL, backward=1),
    gated_rms_norm.example(**NORM),
    gated_rms_norm.example(**NORM, backward=1),
    short_convolution.example(**CONVOLUTION),
    short_convolution.example(**CONVOLUTION, backward=1),
    gated_delta_layer.example(**LAYER, save=1),
    gated_delta_layer.example(**LAYER, backward=1),
    with_state_and_prefix(gated_delta_layer.example(**LAYER, backward=1)),
    with_prefix(short_convolution.example(**CONVOLUTION, backward=1)),
    cross_entropy.example(**READOUT),
    cross_entropy.example(**READOUT, backward=0),
    (first_hour_trn1.products, first_hour_trn1.operands()),
    (first_hour_trn1.apply_in_turns, (np.ones((128, 8), np.float32), 2, True)),
]


def name(value):
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("kernel", "arguments"), EXAMPLES, ids=name)
def test_every_release_takes_the_kernel(kernel, arguments, monkeypatch):
    """Without the name of a release, the rules of all hold;
    nor does a kernel do what has failed on Trn1.
    """
    assert findings(kernel) == ()
    made, indexed = watch(monkeypatch)
    run = record_run(kernel, *arguments, check_source=False)
    outputs = run.outputs if isinstance(run.outputs, tuple) else (run.outputs,)
    assert all(any(x is y for y in outputs) for x in made), (
        "HBM that is no output (aws-neuron-sdk 1311)"
    )
    assert not indexed, f"copies to or from {indexed} with an integer index (aws-neuron-sdk 1281)"
    rows = re.findall(r"^\| `(\w+ \w+=\w+)` \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    listed = {form for form, kernels in rows if kernel.__name__ in kernels.split(", ")}
    assert set(run.unprecedented) == listed, "docs/trainium.md lists them"


def watch(monkeypatch):
    """Lists the HBM that kernels allocate, and the tiles that dma_copy takes
    with an integer index.
    """
    made, indexed, views = [], [], []
    allocate, getitem, copy = Machine.allocate, NkiTensor.__getitem__, nisa.dma_copy

    def allocated(self, shape, dtype, buffer, *rest, **options):
        tensor = allocate(self, shape, dtype, buffer, *rest, **options)
        made.extend([tensor.array] if buffer in HBM else [])
        return tensor

    def taken(self, key):
        view = getitem(self, key)
        if self.on_chip and any(
            isinstance(k, int) for k in (key if isinstance(key, tuple) else (key,))
        ):
            views.append(view)
        return view

    def copied(dst, src, **options):
        indexed.extend(x.name for x in (dst, src) if any(x is view for view in views))
        return copy(dst=dst, src=src, **options)

    monkeypatch.setattr(Machine, "allocate", allocated)
    monkeypatch.setattr(NkiTensor, "__getitem__", taken)
    monkeypatch.setattr(nisa, "dma_copy", copied)
    return made, indexed


def test_every_kernel_that_a_backend_calls_has_an_example():
    assert {kernel for kernel, _ in KERNELS} <= {kernel for kernel, _ in EXAMPLES}


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize(("kernel", "arguments"), EXAMPLES, ids=name)
def test_later_generations_compute_the_same(kernel, arguments, target):
    arguments = [to_tensor(x) if hasattr(x, "dtype") else x for x in arguments]
    first, later = run(kernel, *arguments), run(kernel, *arguments, target=target)
    pairs: Any = zip(first, later, strict=True) if isinstance(first, tuple) else [(first, later)]
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("example", "tables", "most"),
    [
        (gated_delta_rule_fwd.example(T=512, dtype="bfloat16"), {"exp", "rsqrt"}, 10),
        (gated_delta_rule_bwd.example(T=512, dtype="bfloat16"), {"exp", "rsqrt"}, 5),
        (gated_delta_rule_step.example(H=2, HV=4, K=96, V=192), {"exp", "rsqrt"}, 2),
        (delta_residual.example(**RESIDUAL), {"rsqrt"}, 1),
        (
            gated_delta_layer.example(**LAYER | {"T": 512, "C": 128}, save=1),
            {"exp", "rsqrt", "silu"},
            40,
        ),
        (
            gated_delta_layer.example(**LAYER | {"T": 512, "C": 128}, backward=1),
            {"exp", "rsqrt", "silu", "silu_dx"},
            58,
        ),
    ],
    ids=lambda value: value[0].__name__ if isinstance(value, tuple) else "",
)
def test_kernels_change_tables_seldom(example, tables, most):
    """The rule loads the table of roots and that of exp again once a turn, and a layer few more
    than its turns need.
    """
    kernel, arguments = example
    trace = record_run(kernel, *arguments).trace
    costs = estimate(trace, TARGETS["trn1"])
    assert set(costs.tables) == tables and costs.loads <= most


# the example, what it may move beside its inputs and outputs once each, as a number of bytes and as
# a share
TRAFFIC = {
    "norm": (gated_rms_norm.example(M=1000, V=256), 0, 0),
    "norm's gradients": (gated_rms_norm.example(M=1000, V=256, backward=1), 0, 0),
    "convolution": (short_convolution.example(T=1000, C=96), 0, 0),
    "convolution's gradients": (short_convolution.example(T=1000, C=96, backward=1), 0, 0),
    "residual": (delta_residual.example(M=128, D=1024, DV=4), 0, 0),
    "residual's gradients": (delta_residual.example(M=128, D=1024, DV=4, backward=1), 0, 0),
    "cross-entropy, whose weight is read twice": (
        cross_entropy.example(N=256, d=64, V=1200),
        153_600,
        0,
    ),
    # a key row goes to each of its value heads
    "step": (gated_delta_rule_step.example(B=1, H=2, HV=6, K=96, V=192), 0, 0.02),
    "step, K = 256": (gated_delta_rule_step.example(B=1, H=2, HV=6, K=256, V=512), 0, 0.02),
}


@pytest.mark.parametrize(("example", "more", "share"), TRAFFIC.values(), ids=TRAFFIC)
def test_inputs_and_outputs_travel_once(example, more, share):
    kernel, arguments = example
    moved, least = traffic(record_run(kernel, *arguments), arguments)
    assert least <= moved - more <= (1 + share) * least
