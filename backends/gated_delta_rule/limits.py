"""Says in sentences which calls the kernels of the gated delta rule do not take."""

from __future__ import annotations

from collections.abc import Iterator

from delta_trn.backends.dispatch import Call

MOST_K = 256
NKI_MOST_V = 512


def triton(call: Call) -> Iterator[str]:
    """Yields why Triton's kernels do not take a call."""
    if call["K"] > MOST_K:
        yield f"K={call['K']} is above {MOST_K}"


def nki(call: Call) -> Iterator[str]:
    """Yields why the NKI kernels do not take a call."""
    for name, most in (("K", MOST_K), ("V", NKI_MOST_V)):
        if call[name] > most:
            yield (
                f"{name}={call[name]} is above {most}: 2 K or V float32 columns must fit one bank of 2 KiB "
                "of trn1's PSUM"
            )
