"""States at chosen positions of a call, which a prefix cache keeps, and in a pool, as serving has
them.

The sequence is cut there, and its pieces run one after the other on the call's backend, each from
the state that the one before left. A piece of packed sequences is packed, too: those that it has no
token of are empty in it, and hand their states on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from delta_trn.backends import stand_ins
from delta_trn.backends.gated_delta_rule import checks
from delta_trn.backends.gated_delta_rule.contract import Rule, Step, state_dtype


def compute_states(
    call: Rule, positions: Sequence[int], compute: Callable[[Rule], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor]:
    """Returns o, and the states [B, P, HV, K, V] after the first `positions` tokens of each row."""
    (B, T, _, K), (HV, V), cu_seqlens = call.q.shape, call.v.shape[2:], call.cu_seqlens
    bounds = [0, *positions, *([] if positions and positions[-1] == T else [T])]
    outputs, states, S = (
        [],
        [call.q.new_zeros((B, 0, HV, K, V), dtype=state_dtype(call.q.dtype))],
        None,
    )
    for first, last in pairwise(bounds):
        tokens = {name: getattr(call, name)[:, first:last] for name in ("q", "k", "v", "g", "beta")}
        if call.position is not None:
            tokens["position"] = call.position[:, first:last]
        piece = replace(call, **tokens, output_final_state=len(outputs) < len(positions))
        if cu_seqlens is not None:
            # the last piece has all that follows, so that bounds beyond T are found
            piece = replace(
                piece, cu_seqlens=cu_seqlens.clamp(first, None if last == T else last) - first
            )
        o, S = compute(piece if S is None else replace(piece, initial_state=S))
        outputs.append(o)
        if S is not None and len(states) <= len(positions):
            # of packed sequences, the one that the token before the position belongs to
            n = None if cu_seqlens is None else (cu_seqlens[1:] < last).sum()[None]
            states.append((S if n is None else S.index_select(0, n))[:, None])
    return torch.cat(outputs, 1), torch.cat(states, 1)


def step_in_pool(call: Step, step: Callable[[Step], tuple[Tensor, ...]], native: bool) -> Tensor:
    """Returns o, and writes the state after each token into the pool; `native` says whether `step`
    does.

    The call's tensors are the caller's, [B, ...] or [B, T, ...]. Nothing here depends on data, so
    that it is one graph under torch.compile, and no device is waited for.
    """
    pool, indices, accepted = call.state, call.indices, call.accepted
    assert indices is not None
    many = indices.dim() == 2
    indices = indices if many else indices[:, None]
    if call.v.numel() == 0:
        return torch.zeros_like(call.v)
    if stand_ins.may_read(indices):
        checks.slots(indices, accepted, len(pool))
    tokens = {name: getattr(call, name) for name in ("q", "k", "v", "g", "beta")}
    if native:
        tokens = {name: x.flatten(0, 1) if many else x for name, x in tokens.items()}
        return step(replace(call, **tokens, indices=indices))[0].view(call.v.shape)
    first = indices[:, :1] if accepted is None else indices.gather(1, accepted.long()[:, None] - 1)
    outputs = []
    S = pool[first[:, 0].long().clamp(min=0)].to(state_dtype(call.q.dtype))
    for t, slots in enumerate(indices.long().where(first >= 0, -1).unbind(1)):
        used = slots >= 0
        # a skipped row does again what another one does; if all are skipped, slot 0 keeps what it
        # has
        rows = torch.arange(len(used), device=used.device).where(used, used.int().argmax())
        slots = slots.clamp(min=0)[rows]
        token = {name: (x[:, t] if many else x)[rows] for name, x in tokens.items()}
        o, new = step(replace(call, **token, state=S[rows], indices=None, accepted=None))
        outputs.append(o.where(used[:, None, None], 0))
        S = new.where(used[:, None, None, None], S)
        pool.index_copy_(0, slots, torch.where(used.any(), new.to(pool.dtype), pool[slots]))
    return torch.stack(outputs, 1) if many else outputs[0]
