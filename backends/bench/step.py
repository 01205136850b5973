"""One token of generation, for `backends.bench`: what is timed, and the parity before it.

A step reads and writes every state, 8 K V bytes a head, and does little else; for one sequence it is the
launch that takes the time. The state is the same in every round: steps do not depend on what it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.gated_delta_rule import gated_delta_rule_step
from delta_trn.backends.parity.judge import Verdict, judged
from delta_trn.backends.parity.rule_cases import Case, Inputs, inputs

Step = Callable[[Inputs], tuple[Tensor, Tensor]]
OPERATION = "gated_delta_rule_step"


def ours(backend: str) -> Step:
    """The public operation on one backend."""

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        assert x.initial_state is not None
        q, k, v, g, beta = (y[:, 0] for y in (x.q, x.k, x.v, x.g, x.beta))
        normalize = x.case.normalized_inside
        return gated_delta_rule_step(
            q, k, v, g, beta, x.initial_state, use_qk_l2norm_in_kernel=normalize, backend=backend
        )

    return run


def contender(name: str) -> Step:
    """By name: a peer's, or one of our backends."""
    return PEERS[name].step() if name in PEERS else ours(name)


def prepared(name: str, given: Inputs) -> Callable[[], None]:
    """A call without arguments that takes one step."""
    run = contender(name)

    def call() -> None:
        with torch.no_grad():
            run(given)

    return call


def step_verdicts(case: Case, dtype: torch.dtype, backend: str, device: str) -> list[Verdict]:
    """o and the state after one token: the literal step in float64 judges, in `dtype` it is the baseline."""
    given = inputs(case, dtype).to(device)

    def taken(name: str, x: Inputs) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(("o", "state"), ours(name)(x), strict=True))

    right, honest = taken("recurrent", given.double()), taken("recurrent", given)
    found = taken(backend, given)
    return judged(case.name, OPERATION, dtype, backend, found, honest, right, case.K)
