"""The recurrent backend, which judges the others: equations,
closed forms and Hugging Face's two forms.
"""

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import normalize
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from delta_trn.backends import gated_delta_rule
from delta_trn.backends.gated_delta_rule.recurrent import SEGMENT
from delta_trn.backends.machine import ROOT
from delta_trn.backends.parity.judge import error
from delta_trn.backends.parity.rule import GRADIENTS, reference
from delta_trn.backends.parity.rule_cases import BY_NAME
from tests.support.tiny_run import SPREAD

FORMS = {
    "recurrent": qwen3_next.torch_recurrent_gated_delta_rule,
    "chunk": qwen3_next.torch_chunk_gated_delta_rule,
}


def by_the_equations(q, k, v, g, beta, initial_state):
    """Computes the recurrence one head and one token at a time, for PyTorch to differentiate."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    o, states = torch.zeros_like(v), []
    for b in range(B):
        for j in range(HV):
            i = j // (HV // H)
            S = q.new_zeros(K, V) if initial_state is None else initial_state[b, j]
            for t in range(T):
                S = g[b, t, j].exp() * S
                u = beta[b, t, j] * (v[b, t, j] - S.T @ k[b, t, i])
                S = S + torch.outer(k[b, t, i], u)
                o[b, t, j] = K**-0.5 * S.T @ q[b, t, i]
            states.append(S)
    return o, torch.stack(states).view(B, HV, K, V)


def tensors(B=2, T=5, H=1, HV=2, K=3, V=4, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    leaves = [
        normalize(normal(B, T, H, K), dim=-1),
        normalize(normal(B, T, H, K), dim=-1),
        normal(B, T, HV, V),
        -normal(B, T, HV).abs(),
        2 * normal(B, T, HV).sigmoid(),
        normal(B, HV, K, V),
    ]
    return [x.requires_grad_() for x in leaves]


@pytest.mark.parametrize("T", [1, 2, 7, SEGMENT + 3])
@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
def test_outputs_and_gradients_of_the_judge_are_those_of_the_equations(T, grouped):
    """T = SEGMENT + 3 crosses a checkpoint of the backward pass."""
    q, k, v, g, beta, S = leaves = tensors(B=1, T=T, H=1, HV=2 if grouped else 1)
    expected = by_the_equations(*leaves)
    outputs = gated_delta_rule(
        q, k, v, g, beta, initial_state=S, output_final_state=True, backend="recurrent"
    )
    weights = [
        torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
        for y in expected
    ]
    expected_gradients = torch.autograd.grad(expected, leaves, weights)
    gradients = torch.autograd.grad(outputs, leaves, weights)
    for x, y in zip((*outputs, *gradients), (*expected, *expected_gradients), strict=True):
        assert error(x, y) < 1e-14


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize(
    "name", ["seam_129", "no_decay", "norm", "carry", "wide_v", "gva_8", "reflect_random"]
)
def test_the_judge_agrees_with_hugging_face(form, name):
    """Judges two implementations that share no line with ours by parity's criterion for float32.

    The chunk form computes the decay's gradient as a difference of sums, with up to 3.5 times the
    baseline's error on one CPU, so that it may have SPREAD times as much.
    """
    expected = reference(BY_NAME[name], torch.float32)
    tensors, case = expected.inputs, expected.inputs.case
    leaves = {
        n: x.clone().requires_grad_()
        for n, x in tensors.tensors().items()
        if n in GRADIENTS.values()
    }
    group = case.value_heads // case.H
    o, state = FORMS[form](
        *(leaves[name].repeat_interleave(group, dim=2) for name in ("q", "k")),
        leaves["v"],
        leaves["g"],
        leaves["beta"],
        initial_state=leaves.get("initial_state"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=case.normalized_inside,
    )
    pairs = [(y, dy) for y, dy in ((o, tensors.do), (state, tensors.dstate)) if dy is not None]
    gradients = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs]
    )
    names = {source: tensor for tensor, source in GRADIENTS.items()}
    results = {"o": o, "final_state": state} | {
        names[n]: d for n, d in zip(leaves, gradients, strict=True)
    }
    for verdict in expected.verdicts("huggingface", results):
        if (form, verdict.tensor) == ("chunk", "dg"):
            assert verdict.error <= SPREAD * verdict.baseline, str(verdict)
        else:
            assert verdict.passed, str(verdict)


def test_the_judge_keeps_few_of_2048_states_in_memory():
    """2048 states in float64 are 268 MB; segments keep 32 + 64 of them,
    13 MB, beside 30 MB of inputs.
    """
    code = (
        "import torch\n"
        "from delta_trn.backends import machine\n"
        "from delta_trn.backends.parity.rule import outcome\n"
        "from delta_trn.backends.parity.rule_cases import BY_NAME, inputs\n"
        "cpu = torch.device('cpu')\n"
        "outcome(inputs(BY_NAME['one'], torch.float32).double(), 'recurrent')\n"
        "long = inputs(BY_NAME['long'], torch.float32).double()\n"
        "before = machine.peak_memory(cpu)\n"
        "outcome(long, 'recurrent')\n"
        "print(machine.peak_memory(cpu) - before)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert int(process.stdout) < 100e6
