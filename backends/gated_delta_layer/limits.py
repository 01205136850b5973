"""Says in sentences which calls a layer's kernels do not take."""

from __future__ import annotations

from collections.abc import Iterator

from delta_trn.backends.checks import is_checking
from delta_trn.backends.dispatch import Call

CHUNK = 128  # tokens


def nki(call: Call) -> Iterator[str]:
    """Yields why the NKI kernels do not take a call; tiles of a chunk must fit SBUF beside each other."""
    size, packed = call.dtype.itemsize, "packed" in call.options
    K, V = call["K"], call["V"]
    most_K, most_V = 256 // size, (384 if packed else 512) // size
    if is_checking():
        yield "check mode looks at what each of the three parts is given"
    if most_K < K:
        yield f"K={K} is above {most_K}, which fits SBUF"
    if most_V < V:
        yield f"V={V} is above {most_V}, which fits SBUF{' beside masks of packed sequences' * packed}"
    if packed and K * V * size > 36864:
        yield f"K V={K * V} is above {36864 // size}, which fits SBUF beside masks of packed sequences"
    if call["W"] == 1 or call["W"] > 4:
        yield f"W={call['W']} is not 2, 3 or 4, for which the convolution's taps are laid out"
    if call["HV"] > 4 * call["H"]:
        yield f"{call['HV'] // call['H']} value heads per key head are above 4, which one bundle holds"
    chunks = call["HV"] * -(-call["T"] // CHUNK)
    if chunks > 64:
        yield f"{chunks} chunks of {CHUNK} tokens over all value heads are above 64: a call grows with them"
    if call["T"] > 1024 and call["HV"] >= 6:
        yield f"T={call['T']} is above 1024 with six value heads or more, whose tiles fill SBUF"
