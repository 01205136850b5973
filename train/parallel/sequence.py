"""Exact context parallelism: one sequence over several processes, joined at the delta rule's
states.

A segment of tokens maps the state that it begins with to the one that it ends with, S -> A S + B,
since each step is S <- exp(g) (I - beta k k^T) S + beta k v^T. Every process computes A [K, K] and
B [K, V] of its own segment, all A and B are gathered, and each composes those before its own.
Nothing is approximated, and nothing waits for the segment before: two scans instead of one, and one
gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from delta_trn.models import DeltaForCausalLM
from delta_trn.models.cache import LayerCache
from delta_trn.models.convolution import ShortConvolution
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.sequence import Sequences

Rule = Callable[..., tuple[Tensor, Tensor | None]]


def pass_states_on(model: DeltaForCausalLM, mesh: DeviceMesh) -> None:
    """Makes every layer continue from the segment before. With a cache, layers work as they did."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.scan = _Scan(module.rule, mesh)
        elif isinstance(module, ShortConvolution):
            module.forward = _Convolution(module, mesh)  # type: ignore[method-assign]


def gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns all processes' x as [n, *x.shape].
    The gradient of x is the sum of all processes' gradients.
    """
    parts = DTensor.from_local(x[None].contiguous(), mesh, [Shard(0)], run_check=False)
    return parts.full_tensor(grad_placements=[Partial()])


def segment_map(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Returns A [B, HV, K, K] and B [B, HV, K, V]: a segment that starts with the state S ends with
    A S + B.

    Arguments and options are those of the rule. One scan with values [v, 0] from the state [0, I]
    computes both: the two do not meet, because the columns of a state do not.
    """
    K, V = q.shape[-1], v.shape[-1]
    wide = F.pad(v, (0, K))
    full = torch.float64 if v.dtype == torch.float64 else torch.float32
    begin = F.pad(torch.eye(K, dtype=full, device=v.device), (V, 0)).expand(
        v.shape[0], v.shape[2], K, V + K
    )
    _, end = rule(
        q, k, wide, g, beta, initial_state=begin.contiguous(), output_final_state=True, **options
    )
    assert end is not None
    return end[..., V:], end[..., :V]


def state_before(A: Tensor, B: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the state with which this process's segment begins: zero on the first."""
    both = gather(torch.cat([A, B], dim=-1), mesh)
    K = A.shape[-1]
    S = _zero_of(both[-1, ..., K:])
    for segment in both[: mesh.get_local_rank()]:
        S = segment[..., :K] @ S + segment[..., K:]
    return S


def _zero_of(x: Tensor) -> Tensor:
    """Returns zeros whose gradient for x is zero, whatever x is: 0 * x would be NaN where x
    overflowed.

    The first process needs nothing of what was gathered. It must take part in the gather's gradient
    all the same, because the others wait for it there.
    """
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)


class _Scan:
    """Computes a layer's rule of this process's segment; stands in its `scan`."""

    def __init__(self, rule: Rule, mesh: DeviceMesh):
        self.rule, self.mesh = rule, mesh

    def __call__(
        self, *inputs: Any, initial_state: Tensor | None, output_final_state: bool, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if output_final_state:  # a cache is filled: every process has the whole text
            return self.rule(
                *inputs, initial_state=initial_state, output_final_state=True, **options
            )
        with torch.autocast(inputs[0].device.type, enabled=False):
            S = state_before(*segment_map(self.rule, *inputs, **options), self.mesh)
        return self.rule(*inputs, initial_state=S, **options)


class _Convolution:
    """Puts the last W - 1 inputs of the segment before in the place
    of the zeros before a sequence.
    """

    def __init__(self, module: ShortConvolution, mesh: DeviceMesh):
        self.module, self.mesh = module, mesh

    def __call__(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        if cache is not None:
            return ShortConvolution.forward(self.module, x, sequences, cache)
        before = self.module.weight.shape[1] - 1
        ends = gather(x[:, x.shape[1] - before :], self.mesh)
        me = self.mesh.get_local_rank()
        tail = ends[me - 1] if me > 0 else _zero_of(ends[-1])
        if sequences.begins is not None:
            # tokens that join the row in front see nothing, and what is before a document's first
            # is not seen
            joined = replace(sequences, position=F.pad(sequences.position, (before, 0)))
            return ShortConvolution.forward(self.module, torch.cat([tail, x], 1), joined)[
                :, before:
            ]
        memory: Any = LayerCache()
        memory.convolution = tail
        return ShortConvolution.forward(self.module, x, sequences, memory)
