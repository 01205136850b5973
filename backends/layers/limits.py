"""Says in sentences which calls the kernels of a layer's small operations do not take."""

from __future__ import annotations

from collections.abc import Iterator

from delta_trn.backends.dispatch import Call


def triton_convolution(call: Call) -> Iterator[str]:
    """Yields why Triton's convolution does not take a call."""
    if call["W"] > 8:
        yield f"W={call['W']} is above 8"


def triton_norm(call: Call) -> Iterator[str]:
    """Yields why Triton's norms do not take a call."""
    if call["N"] > 8192:
        yield f"N={call['N']} is above 8192: a program holds whole rows in registers, or spills"


def nki_convolution(call: Call) -> Iterator[str]:
    """Yields why the NKI convolution does not take a call."""
    if call["W"] > 32:
        yield f"W={call['W']} is above 32: a diagonal and a mask per tap lie in SBUF"
    if "linear" in call.options:
        yield "computes silu; this call is linear"


def nki_norm(call: Call) -> Iterator[str]:
    """Yields why the NKI norm does not take a call."""
    if call["N"] > 4096:
        yield f"N={call['N']} is above 4096: the sums of dweight fill the 8 banks of PSUM"


def nki_readout(call: Call) -> Iterator[str]:
    """Yields why the NKI cross-entropy does not take a call."""
    if call["d"] > 1024:
        yield f"d={call['d']} is above 1024: dweight of 256 words fills four banks of PSUM"
    if call["vocabulary"] > 2**24:
        yield f"vocabulary={call['vocabulary']} is above {2**24}: a target is compared as a float32"
