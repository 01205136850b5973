"""Published signatures of the functions of torch_xla that training calls, and a check against them.

The stand-in in tests/shims is held to this table; where torch_xla is installed, so is the table itself.
"""

import inspect
from importlib import import_module

SOURCE = "torch_xla 2.9.0, which torch-neuronx 2.9 (Neuron SDK 2.28.1) takes"
PUBLISHED = {
    "torch_xla:sync": "(wait=False, reset_scope=True)",
    "torch_xla.runtime:world_size": "()",
    "torch_xla.runtime:global_ordinal": "()",
    "torch_xla.core.xla_model:all_reduce": "(reduce_type, inputs, scale=1.0, groups=None, pin_layout=True)",
    "torch_xla.core.xla_model:collective_broadcast": (
        "(tensors, root_ordinal=0, groups=None, pin_layout=True)"
    ),
}


def differences() -> list[str]:
    """Returns each name that can be imported here under another signature than the published."""
    lines = []
    for name, expected in PUBLISHED.items():
        module, _, function = name.partition(":")
        kept = inspect.signature(getattr(import_module(module), function))
        parameters = [p.replace(annotation=p.empty) for p in kept.parameters.values()]
        found = str(kept.replace(parameters=parameters, return_annotation=kept.empty))
        if found != expected:
            lines.append(f"{name} has {found}; published by {SOURCE}: {expected}")
    return lines
