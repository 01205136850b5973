"""Published signatures of the functions of AWS and torch_xla that training calls, and a check
against them.

The stand-ins in tests/shims are held to published.json; where torch_xla is installed, so is the
table itself. The keyword arguments of MpDeviceLoader go to ParallelLoader; NeuronZero1Optimizer's
arguments are those of torch_xla's ZeroRedundancyOptimizer.
"""

import inspect
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

XLA = "torch_xla 2.9.0, which torch-neuronx 2.9 (Neuron SDK 2.28.1) takes"
NXD = "github.com/aws-neuron/neuronx-distributed at v2.28.0 (0.17.0), src/neuronx_distributed/"

PUBLISHED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def signature(function: Callable[..., Any]) -> str:
    """Returns names, kinds and defaults of a function's parameters, or those of a class; no types.

    >>> signature(lambda a, *, b=1: a)
    '(a, *, b=1)'
    """
    kept = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in kept.parameters.values()]
    return str(kept.replace(parameters=parameters, return_annotation=kept.empty))


def differences(source: str) -> list[str]:
    """Returns each name of a source
    that can be imported here under another signature than the published.
    """
    lines = []
    for name, expected in PUBLISHED[source].items():
        module, _, function = name.partition(":")
        found = signature(getattr(import_module(module), function))
        if found != expected:
            lines.append(f"{name} has {found}; published by {source}: {expected}")
    return lines
