"""Says in sentences which calls the kernels of `delta_residual` do not take."""

from __future__ import annotations

from collections.abc import Iterator

from delta_trn.backends.dispatch import Call


def nki(call: Call) -> Iterator[str]:
    """Yields why the NKI kernels do not take a call."""
    if call["D"] > 12288:
        yield f"D={call['D']} is above 12288: the keys of 128 tokens stay on chip whole"
