"""Times one token of generation for `backends.bench`, and judges it before.

A step reads and writes every state, 8 K V bytes per head, and does little else; for one sequence the launch
takes most of the time. Every round starts from the same state, since the time does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.gated_delta_rule import gated_delta_rule_step
from delta_trn.backends.parity import baseline
from delta_trn.backends.parity.judge import Reference, Spread, Verdict, absolute
from delta_trn.backends.parity.rule_cases import Case, Inputs, inputs

OPERATION = "gated_delta_rule_step"
SAMPLES = 12


def ours(backend: str, x: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """Returns the public operation on one backend, without arguments; the peers take q as [B, 1, H, K]."""
    assert x.initial_state is not None
    q, k, v, g, beta = (y[:, 0] for y in (x.q, x.k, x.v, x.g, x.beta))
    state, normalize = x.initial_state, x.case.normalized_inside
    return lambda: gated_delta_rule_step(
        q, k, v, g, beta, state, use_qk_l2norm_in_kernel=normalize, backend=backend
    )


def step_call(name: str, x: Inputs) -> Callable[[], None]:
    """Returns a call without arguments that takes one step, by a peer or by one of our backends."""
    run = partial(PEERS[name].step(), x) if name in PEERS else ours(name, x)

    def call() -> None:
        with torch.no_grad():
            run()

    return call


def step_verdicts(case: Case, dtype: torch.dtype, backend: str, device: str) -> list[Verdict]:
    """Judges o and the state after one token.

    The literal step is the judge in float64. In `dtype` it is one sample, and the baseline's are the others.
    """
    x = inputs(case, dtype).to(device)

    def outcome(name: str, x: Inputs) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(("o", "state"), ours(name, x)(), strict=True))

    judge = outcome("recurrent", x.double())
    limits = {"o": absolute(dtype), "state": absolute(torch.float32)}
    spreads = {name: Spread(exact, absolute=limits[name]) for name, exact in judge.items()}
    for sample in (outcome("recurrent", x), *_samples(x)):
        for name, spread in spreads.items():
            spread.add([sample[name]])
    expected = Reference(OPERATION, case.name, dtype, judge, spreads, case.K)
    return expected.verdicts(backend, outcome(backend, x))


def _samples(x: Inputs) -> Iterator[dict[str, Tensor]]:
    """Yields results by the baseline, in float32 at least: a step has no matrix products to round."""
    noise, full = baseline.Noise(SAMPLES, x.q.device), torch.promote_types(x.q.dtype, torch.float32)
    q, k, v, g, beta = (y.to(full) for y in (x.q, x.k, x.v, x.g, x.beta))
    options = (None, x.case.exact_scale, x.case.normalized_inside)
    for _ in range(SAMPLES):
        with torch.no_grad():
            o, state = baseline.gated_delta_rule(q, k, v, g, beta, x.initial_state, *options, noise=noise)
        yield {"o": o[:, 0].to(x.q.dtype), "state": state}
