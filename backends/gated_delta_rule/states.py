"""States at chosen positions of a call: what a prefix cache keeps, and what is computed from there again.

The sequence is cut there, and its pieces run one after the other on the call's backend, each from the state
that the one before left. A piece of packed sequences is packed, too: those that it has no token of are empty
in it, and hand their states on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from delta_trn.backends.gated_delta_rule.contract import Rule, state_dtype


def compute_states(
    call: Rule, positions: Sequence[int], compute: Callable[[Rule], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor]:
    """Returns o, and the states [B, P, HV, K, V] after the first `positions` tokens of each row."""
    (B, T, _, K), (HV, V), cu_seqlens = call.q.shape, call.v.shape[2:], call.cu_seqlens
    bounds = [0, *positions, *([] if positions and positions[-1] == T else [T])]
    outputs, states, S = [], [call.q.new_zeros((B, 0, HV, K, V), dtype=state_dtype(call.q.dtype))], None
    for first, last in pairwise(bounds):
        tokens = {name: getattr(call, name)[:, first:last] for name in ("q", "k", "v", "g", "beta")}
        piece = replace(call, **tokens, output_final_state=len(outputs) < len(positions))
        if cu_seqlens is not None:
            # the last piece has all that follows, so that bounds beyond T are found
            piece = replace(piece, cu_seqlens=cu_seqlens.clamp(first, None if last == T else last) - first)
        o, S = compute(piece if S is None else replace(piece, initial_state=S))
        outputs.append(o)
        if S is not None and len(states) <= len(positions):
            # of packed sequences, the one that the token before the position belongs to
            n = None if cu_seqlens is None else (cu_seqlens[1:] < last).sum()[None]
            states.append((S if n is None else S.index_select(0, n))[:, None])
    return torch.cat(outputs, 1), torch.cat(states, 1)
