"""Runs the cases of the gated delta rule on a backend, by the judge, and by the baseline.

    judge       the literal recurrence (`gated_delta_rule.recurrent`) in float64
    baseline    `parity.baseline`, chunk by chunk. In float32 the literal recurrence is a second one: it errs
                less where the triangular inverse is badly conditioned, and more where a state is overwritten
                often. The larger error counts.

A result has passed sums over K, over V and over a chunk of tokens. In a shorter dtype it has been rounded
four times (into K S, into T X, into P U, and as a result). Evenly spread mantissas make that .38 u, since
roundings add in squares; the floor allows u / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule import gated_delta_rule
from delta_trn.backends.gated_delta_rule.contract import make_gates
from delta_trn.backends.parity import baseline
from delta_trn.backends.parity.judge import Reference, Verdict, error
from delta_trn.backends.parity.rule_cases import PER_HEAD, Case, Inputs, inputs

GRADIENTS: Mapping[str, str] = {
    "dq": "q",
    "dk": "k",
    "dv": "v",
    "dg": "g",
    "dbeta": "beta",
    "dh0": "initial_state",
    "dA_log": "A_log",
    "ddt_bias": "dt_bias",
}
TENSORS = ("o", "final_state", *GRADIENTS)


@dataclass(frozen=True)
class RuleReference(Reference):
    """Holds what a case of the rule is judged by, with the inputs for which that is so."""

    inputs: Inputs | None = None


def terms(case: Case) -> int:
    """Returns how many float32 terms a result of the case has added up: over K, V and a chunk of tokens."""
    return case.K + case.V + min(case.T, baseline.CHUNK)


def outcome(x: Inputs, backend: str) -> dict[str, Tensor]:
    """Computes o, final_state and every gradient by the public operation on one backend."""
    leaves = _leaves(x)
    o, final_state = gated_delta_rule(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=leaves.get("initial_state"),
        output_final_state=True,
        backend=backend,
        **replace(x, **leaves).arguments(),
    )
    assert final_state is not None
    return _with_gradients(x, leaves, o, final_state)


def baseline_outcome(x: Inputs) -> dict[str, Tensor]:
    """Computes the same by the baseline."""
    leaves, case = _leaves(x), x.case
    q, k, v, g, beta = (leaves[name] for name in ("q", "k", "v", "g", "beta"))
    beta_max = 0.0 if case.gates is None else 2.0 if case.reflect else 1.0
    g, beta = make_gates(g, beta, leaves.get("A_log"), leaves.get("dt_bias"), beta_max)
    o, final_state = baseline.gated_delta_rule(
        q, k, v, g, beta, leaves.get("initial_state"), x.cu_seqlens, case.K**-0.5, case.normalized_inside
    )
    return _with_gradients(x, leaves, o, final_state)


def _leaves(x: Inputs) -> dict[str, Tensor]:
    tensors = x.tensors()
    return {name: tensors[name].detach().requires_grad_() for name in GRADIENTS.values() if name in tensors}


def _with_gradients(
    x: Inputs, leaves: Mapping[str, Tensor], o: Tensor, final_state: Tensor
) -> dict[str, Tensor]:
    pairs = [(y, dy) for y, dy in ((o, x.do), (final_state, x.dstate)) if dy is not None]
    outputs, douts = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, list(leaves.values()), douts, materialize_grads=True)
    names = {source: name for name, source in GRADIENTS.items()}
    results = {"o": o.detach(), "final_state": final_state.detach()}
    return results | {names[name]: grad for name, grad in zip(leaves, grads, strict=True)}


@lru_cache(maxsize=4)
def reference(case: Case, dtype: torch.dtype, device: str = "cpu") -> RuleReference:
    """Computes what a case is judged by, on a `device` that has float64."""
    x = inputs(case, dtype).to(device)
    if "bench" in case.tags and case.B > 2:
        # sequences do not depend on each other, so the first and the last stand for the batch
        x = x.rows([0, case.B - 1])
    judge = outcome(x.double(), "recurrent")
    for name, exact in judge.items():
        assert exact.isfinite().all(), f"the judge's {name} of case {case.name} is not finite"
    baselines = [baseline_outcome(x)] + ([outcome(x, "recurrent")] if dtype == torch.float32 else [])
    errors = {name: max(error(one[name], exact) for one in baselines) for name, exact in judge.items()}
    assert all(map(math.isfinite, errors.values())), (
        f"the baseline of case {case.name} is not finite: {errors}"
    )
    return RuleReference(case.op, case.name, dtype, judge, errors, terms(case), dtype, inputs=x)


def verdicts(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> list[Verdict]:
    """Runs a backend on a case and judges every tensor. Raises BackendRefusal where it refuses."""
    expected = reference(case, dtype, "cuda" if device.startswith("cuda") else "cpu")
    results = outcome(inputs(case, dtype).to(device), backend)
    assert expected.inputs is not None
    if expected.inputs.q.shape[0] != case.B:
        rows = [0, case.B - 1]
        shared = {f"d{name}" for name in PER_HEAD} & set(results)
        results = {name: x[rows] for name, x in results.items() if name not in shared}
        if shared:
            # the judge sums their gradients over these two sequences alone
            part = outcome(expected.inputs.to(device), backend)
            results |= {name: part[name] for name in shared}
    return expected.verdicts(backend, results)
