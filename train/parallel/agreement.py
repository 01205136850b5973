"""Refuses processes that were given different runs, before they join: each would train its own,
unseen.

Two learning rates, for example, part the replicas' weights, and what is saved is the first
process's.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delta_trn.train.parallel.team import picklable
from delta_trn.train.settings.errors import ConfigError, TrainError
from delta_trn.train.settings.schema import OF_ONE_NODE, RunConfig, flatten

# What `auto` becomes on each process's own device
RESOLVED = frozenset(("device", "backend", "precision"))
REMEDY = (
    "give every process the same recipe, keys and environment variables, and name the value where "
    "it follows from auto"
)


@dataclass(frozen=True)
class Given:
    """What one process was given.

    values      by key, as it will train with them
    paths       keys whose values are paths that this process finds on its own disks
    failure     why it cannot train; None: it can
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    paths: frozenset[str] = frozenset()
    failure: Exception | None = None


def given(
    config: RunConfig | None, *, resolved: bool, also: Mapping[str, Any], failure: Exception | None
) -> Given:
    """Returns what this process was given. data.folder is left out: it only says where tokens lie.

    config      None: there is none, for which `failure` is the reason
    resolved    whether the configuration has no `auto` left
    also        further values that must be the same, by the name that a message has for them
    """
    left_out = {"data.folder"} if resolved else {"data.folder", *RESOLVED}
    values = {key: x for key, x in flatten(config) if key not in left_out} if config else {}
    paths = frozenset(key for key in OF_ONE_NODE & values.keys() if _is_path(values[key]))
    return Given({**values, **also}, paths, failure and picklable(failure))


def require_same(ranks: Sequence[Given]) -> None:
    """Raises ConfigError naming every key that differs, its values and their ranks.

    Paths may differ, since nodes may keep their copies of the text in different places: the tokens
    are compared once they are there. Where nothing differs, the first process's failure is raised
    that has one.
    """
    found = []
    for key in dict.fromkeys(key for one in ranks for key in one.values):
        holders = [rank for rank, one in enumerate(ranks) if key in one.values]
        if all(key in ranks[rank].paths for rank in holders):
            continue
        groups: list[tuple[Any, list[int]]] = []
        for rank in holders:
            value = ranks[rank].values[key]
            same = next((members for other, members in groups if other == value), None)
            if same is None:
                groups.append((value, [rank]))
            else:
                same.append(rank)
        if len(groups) > 1:
            found.append(
                f"{key} is " + ", ".join(f"{_show(x)} on {name_ranks(of)}" for x, of in groups)
            )
    if found:
        raise ConfigError(
            f"{len(ranks)} processes were given different runs: {'; '.join(found)}; {REMEDY}"
        )
    failures = {rank: one.failure for rank, one in enumerate(ranks) if one.failure is not None}
    for rank, failure in failures.items():
        if isinstance(failure, TrainError) and len(failures) < len(ranks):
            raise type(failure)(f"on rank {rank}: {failure}")
        raise failure


def name_ranks(ranks: Sequence[int]) -> str:
    """Names ascending ranks, such as `rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"


def _is_path(value: Any) -> bool:
    # what cannot be a path is none: an error here would be this process's alone, and the others
    # would wait
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return isinstance(value, str) and Path(value).expanduser().exists()
    return False


def _show(value: Any) -> str:
    return "none" if value is None else str(value)
