"""What the timed cases launch on a GPU, within a stand-in of that GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from delta_trn.backends.bench.__main__ import ONE_DECAY, contender, inputs_of, pass_call, step_call
from delta_trn.backends.bench.figures import passes
from delta_trn.backends.parity.rule import decode, outcome
from delta_trn.backends.parity.rule_cases import Case, Inputs

BACKEND = "triton"


def shapes_of(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """Returns a case's tensors with nothing in them, but for the bounds of packed sequences."""
    H, HV, tokens = case.H, case.value_heads, (case.B, case.T)
    full = torch.float32

    def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    bounds = None
    if case.lengths is not None:
        bounds = torch.tensor(np.cumsum((0, *case.lengths)), device=device)
    states = (case.sequences, HV, case.K, case.V)
    gates = case.gates is not None
    return Inputs(
        case,
        q=make(*tokens, H, case.K),
        k=make(*tokens, H, case.K),
        v=make(*tokens, HV, case.V),
        g=make(*tokens, *case.per_head, kind=full),
        beta=make(*tokens, HV),
        initial_state=make(*states, kind=full) if case.state else None,
        cu_seqlens=bounds,
        do=make(*tokens, HV, case.V) if "o" in case.loss else None,
        dstate=make(*states, kind=full) if "final_state" in case.loss else None,
        A_log=make(HV, kind=full) if gates else None,
        dt_bias=make(*case.per_head, kind=full) if gates else None,
    )


def launch(cases: Sequence[Case], dtype: torch.dtype, device: str = "cuda") -> None:
    """Does what `bench` does with the cases: what it judges, what it times, what it measures."""
    for case in cases:
        x = shapes_of(case, dtype, device)
        if "step" in case.tags or case.op.endswith("_step"):
            decode(x, BACKEND)
            if "step" in case.tags:
                step_call(BACKEND, x)()
            continue
        outcome(x, BACKEND)
        if "bench" not in case.tags:  # judged, and not timed
            continue
        for name in (BACKEND, *([BACKEND + ONE_DECAY] if case.has_channels else [])):
            for phase in passes(case):
                pass_call(contender(name), inputs_of(name, x), phase)()
