"""Computes a delta rule of DTensors on each process's own part, where these belong together.

Rows and heads do not meet in a delta rule. So where all tensors of a call are divided by rows, or
all by heads, or are whole on every process, each process computes its part alone, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends.checks import BackendRefusal, shape_of
from delta_trn.backends.stand_ins import is_divided

ROWS, HEADS = 0, 1
# the dimensions of rows and heads of each tensor of a call over sequences; None: it has none
SEQUENCES: Mapping[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("q", "k", "v", "g", "beta"), (0, 2)),
    "initial_state": (0, 1),
    "A_log": (None, 0),
    "dt_bias": (None, 0),
    "position": (0, None),
}
# and of a step of one token
TOKENS = {
    **dict.fromkeys(("q", "k", "v", "g", "beta"), (0, 1)),
    "state": (0, 1),
    "A_log": (None, 0),
    "dt_bias": (None, 0),
}


def has_shards(q: Tensor) -> bool:
    """Returns whether a call whose queries are q is one of DTensors, now and not in a graph."""
    return type(q) is not Tensor and not torch.compiler.is_compiling() and is_divided(q)


def on_shards(
    function: Callable[..., Any],
    named: dict[str, Any],
    places: Mapping[str, tuple[int | None, int | None]],
) -> tuple[Any, Any]:
    """Returns o and the state of a call, as DTensors, computed on this process's parts.

    named   the arguments by name
    places  the dimensions of rows and heads of each tensor; o's are v's

    Raises BackendRefusal for DTensors that do not belong together.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    tensors: dict[str, Any] = {
        name: x for name, x in named.items() if isinstance(x, Tensor) and x.is_floating_point()
    }
    for name, x in tensors.items():
        if not is_divided(x) or name not in places:
            raise _refuse(
                function, name, x, "a plain tensor, and others are divided over processes"
            )
    x: Any = named["q"]
    if named.get("state_indices") is not None:
        raise _refuse(function, "q", x, "divided, and a pool's slots are numbered as a whole")
    mesh, how = x.device_mesh, []
    for axis in range(mesh.ndim):
        found = {name: y.placements[axis] for name, y in tensors.items()}
        kinds = (kind for kind in (None, ROWS, HEADS) if _fits(found["q"], places["q"], kind))
        kind = next(kinds, None)
        how.append(kind)
        for name, y in tensors.items():
            if y.device_mesh != mesh or not _fits(found[name], places[name], kind):
                raise _refuse(function, name, y, f"{found[name]} beside q of {found['q']}")
            dim = None if kind is None else places[name][kind]
            if dim is not None and y.shape[dim] % mesh.size(axis):
                parts = f"of {y.shape[dim]} rows or heads over {mesh.size(axis)} processes"
                raise _refuse(function, name, y, parts)
    if ROWS in how and named.get("cu_seqlens") is not None:
        raise _refuse(function, "q", x, "divided by rows, and packed sequences lie in one row")
    local = dict(named)
    for name, y in tensors.items():
        # what all have, and each uses for its own part, has a gradient from each
        gradients = [
            Partial() if kind is not None and places[name][kind] is None else placement
            for kind, placement in zip(how, y.placements, strict=True)
        ]
        local[name] = y.to_local(grad_placements=gradients)
    position = named.get("position")
    if position is not None and is_divided(position):
        local["position"] = position.to_local()
    o, state = function(**local)
    at = (places["v"], (0, 2 if named.get("return_states_at") is not None else 1))

    def whole(y: Any, dims: tuple[int | None, int | None]) -> Any:
        placements = [Replicate() if kind is None else Shard(dims[kind]) for kind in how]
        return DTensor.from_local(y, mesh, placements, run_check=False)

    return whole(o, at[0]), None if state is None else whole(state, at[1])


def _fits(placement: Any, dims: tuple[int | None, int | None], kind: int | None) -> bool:
    """Returns whether a tensor is divided by rows, or by heads, or not at all, on an axis."""
    dim = None if kind is None else dims[kind]
    return placement.is_replicate() if dim is None else placement.is_shard(dim)


def _refuse(function: Callable[..., Any], name: str, x: Tensor, why: str) -> BackendRefusal:
    return BackendRefusal(
        f"{function.__name__} was given DTensors that do not belong together: {name} {shape_of(x)} is "
        f"{why}; divide all of its tensors by rows, or all by heads with A_log and dt_bias, or none, "
        "by x.redistribute(...), into equal parts, or pass x.to_local() of each"
    )
