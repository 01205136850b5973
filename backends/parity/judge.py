"""How wrong a backend is, and how wrong it may be.

    judge       the literal recurrence (`backends.recurrent`) in float64, on the inputs rounded to the dtype
    baseline    an honest PyTorch implementation at the same precision: `backends.baseline`, chunk by chunk.
                In float32 the literal recurrence is another; it errs less where the triangular inverse is
                badly conditioned, more where a state is overwritten often. The larger error counts
    error       root mean square of the difference to the judge, over the root mean square of the judge
    allowed     FACTOR times the baseline's error, and never below the floor

The floor is for what the baseline happens to get right to the last bit. Roundings in a row add in squares.
A sum of n float32 terms of either sign costs about sqrt(n) u32, u32 = 2^-24, and a result has passed one
over K, one over V and one over a chunk of tokens. Rounding to a shorter dtype costs u / 2 (root mean
square; .38 u for evenly spread mantissas), and a result has passed four: into K S, into T X, into P U, and
its own.

Where the judge is exactly 0 everywhere (the gradient of q when only the final state is used) the backend
must be, too.
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
from delta_trn.backends.parity.rule_cases import PER_HEAD, Case, Inputs, inputs

FACTOR = 2.0
DTYPES = (torch.float32, torch.bfloat16)

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
class Verdict:
    """One tensor of one case: passed if error <= allowed. A NaN never passes."""

    case: str
    dtype: torch.dtype
    tensor: str
    backend: str
    error: float
    baseline: float
    allowed: float
    op: str = "gated_delta_rule"

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """error / allowed; what is above 1 failed, and what is no number is worst."""
        if self.error == 0.0:
            return 0.0
        ratio = self.error / self.allowed if self.allowed else math.inf
        return math.inf if math.isnan(ratio) else ratio

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        verb = "within" if self.passed else "above"
        return (
            f"{self.backend} {self.case} {dtype} {self.tensor}: error {self.error:.3g} {verb} "
            f"allowed {self.allowed:.3g} (baseline {self.baseline:.3g})"
        )


@dataclass(frozen=True)
class Reference:
    """What a case is judged by: its inputs, the judge's tensors, and the baseline's errors."""

    inputs: Inputs
    judge: Mapping[str, Tensor]
    baseline: Mapping[str, float]
    dtype: torch.dtype

    def verdicts(self, backend: str, outcome: Mapping[str, Tensor]) -> list[Verdict]:
        """One for every tensor of the judge. Raises ValueError if `outcome` lacks one."""
        case, found = self.inputs.case, []
        missing = sorted(set(self.judge) - set(outcome))
        if missing:
            raise ValueError(f"{backend} gave no {', '.join(missing)} for case {case.name}")
        for tensor, right in self.judge.items():
            allowed = 0.0
            if right.any():
                allowed = max(FACTOR * self.baseline[tensor], floor(case, self.dtype))
            found.append(
                Verdict(
                    case=case.name,
                    dtype=self.dtype,
                    tensor=tensor,
                    backend=backend,
                    error=error(outcome[tensor], right),
                    baseline=self.baseline[tensor],
                    allowed=allowed,
                )
            )
        return found


def error(x: Tensor, judge: Tensor) -> float:
    """Relative root-mean-square error; where the judge is 0 everywhere: 0 for a 0, else infinity. NaN stays
    NaN.
    """
    if x.shape != judge.shape:
        raise ValueError(f"shape {tuple(x.shape)} differs from the judge's {tuple(judge.shape)}")
    judge = judge.double()
    difference = (x.to(judge.device).double() - judge).square().mean().sqrt().item()
    size = judge.square().mean().sqrt().item()
    if size == 0.0:
        return difference if math.isnan(difference) else (0.0 if difference == 0.0 else math.inf)
    return difference / size


def floor(case: Case, dtype: torch.dtype) -> float:
    """The error that no honest implementation can be sure to stay below; the module says why."""
    terms = case.K + case.V + min(case.T, baseline.CHUNK)
    single = math.sqrt(terms) * torch.finfo(torch.float32).eps / 2
    return single if dtype == torch.float32 else single + math.sqrt(4) * torch.finfo(dtype).eps / 4


def judged(
    case: str,
    op: str,
    dtype: torch.dtype,
    backend: str,
    found: Mapping[str, Tensor],
    honest: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    terms: int,
) -> list[Verdict]:
    """Of an operation without a state, whose sums are all float32: allowed is FACTOR times the honest error,
    and never less than `terms` float32 roundings and one of the result.
    """
    single = math.sqrt(terms) * torch.finfo(torch.float32).eps / 2
    rows = []
    for name, expected in right.items():
        rounding = 0.0 if found[name].dtype == torch.float32 else torch.finfo(found[name].dtype).eps / 2
        base = error(honest[name], expected)
        allowed = max(FACTOR * base, single + rounding) if expected.any() else 0.0
        rows.append(Verdict(case, dtype, name, backend, error(found[name], expected), base, allowed, op=op))
    return rows


def outcome(given: Inputs, backend: str) -> dict[str, Tensor]:
    """o, final_state and every gradient, by the public operation on one backend."""
    leaves = _leaves(given)
    o, final_state = gated_delta_rule(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=leaves.get("initial_state"),
        output_final_state=True,
        backend=backend,
        **replace(given, **leaves).arguments(),
    )
    assert final_state is not None
    return _with_gradients(given, leaves, o, final_state)


def baseline_outcome(given: Inputs) -> dict[str, Tensor]:
    """The same from the baseline."""
    leaves = _leaves(given)
    case = given.case
    q, k, v, g, beta = (leaves[name] for name in ("q", "k", "v", "g", "beta"))
    beta_max = 0.0 if case.gates is None else 2.0 if case.reflect else 1.0
    g, beta = make_gates(g, beta, leaves.get("A_log"), leaves.get("dt_bias"), beta_max)
    o, final_state = baseline.gated_delta_rule(
        q, k, v, g, beta, leaves.get("initial_state"), given.cu_seqlens, case.K**-0.5, case.normalized_inside
    )
    return _with_gradients(given, leaves, o, final_state)


def _leaves(given: Inputs) -> dict[str, Tensor]:
    tensors = given.tensors()
    return {name: tensors[name].detach().requires_grad_() for name in GRADIENTS.values() if name in tensors}


def _with_gradients(
    given: Inputs, leaves: Mapping[str, Tensor], o: Tensor, final_state: Tensor
) -> dict[str, Tensor]:
    pairs = [(y, dy) for y, dy in ((o, given.do), (final_state, given.dstate)) if dy is not None]
    outputs, douts = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, list(leaves.values()), douts, materialize_grads=True)
    names = {source: name for name, source in GRADIENTS.items()}
    found = {"o": o.detach(), "final_state": final_state.detach()}
    return found | {names[name]: grad for name, grad in zip(leaves, grads, strict=True)}


@lru_cache(maxsize=4)
def reference(case: Case, dtype: torch.dtype, device: str = "cpu") -> Reference:
    """The judge's and the baseline's word on one case, on `device` (one that has float64)."""
    given = inputs(case, dtype).to(device)
    if "bench" in case.tags and case.B > 2:
        # sequences do not know of each other, so the first and the last stand for the batch
        given = given.rows([0, case.B - 1])
    judge = outcome(given.double(), "recurrent")
    for name, right in judge.items():
        assert right.isfinite().all(), f"the judge's {name} of case {case.name} is not finite"
    honest = [baseline_outcome(given)] + ([outcome(given, "recurrent")] if dtype == torch.float32 else [])
    errors = {name: max(error(one[name], right) for one in honest) for name, right in judge.items()}
    assert all(map(math.isfinite, errors.values())), (
        f"the baseline of case {case.name} is not finite: {errors}"
    )
    return Reference(given, judge, errors, dtype)


def verdicts(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> list[Verdict]:
    """Runs a backend on a case and judges every tensor. Raises BackendRefusal where it refuses."""
    judged_on = "cuda" if device.startswith("cuda") else "cpu"
    right = reference(case, dtype, judged_on)
    found = outcome(inputs(case, dtype).to(device), backend)
    if right.inputs.q.shape[0] != case.B:
        rows = [0, case.B - 1]
        shared = {f"d{name}" for name in PER_HEAD} & set(found)
        found = {name: x[rows] for name, x in found.items() if name not in shared}
        if shared:
            # the judge's are sums over these two sequences alone
            part = outcome(right.inputs.to(device), backend)
            found |= {name: part[name] for name in shared}
    return right.verdicts(backend, found)
