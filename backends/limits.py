"""Says in sentences which calls the kernels of a backend do not take: a function for each of its limits."""

from __future__ import annotations

from collections.abc import Iterator

from delta_trn.backends.checks import is_checking
from delta_trn.backends.dispatch import Call

MOST_K = 256
NKI_MOST_V = 512
NKI_MOST_CHANNELS = 128
CHUNK = 128  # tokens of a chunk of the layer's kernels


def rule_triton(call: Call) -> Iterator[str]:
    """Yields why Triton's kernels do not take a call."""
    if call["K"] > MOST_K:
        yield f"K={call['K']} is above {MOST_K}"


def rule_nki(call: Call) -> Iterator[str]:
    """Yields why the NKI kernels do not take a call."""
    for name, most in (("K", MOST_K), ("V", NKI_MOST_V)):
        if call[name] > most:
            yield (
                f"{name}={call[name]} is above {most}: 2 K or V float32 columns must fit one bank of 2 KiB "
                "of trn1's PSUM"
            )
    if call.op == "kimi_delta_attention" and MOST_K >= call["K"] > NKI_MOST_CHANNELS:
        yield f"K={call['K']} is above {NKI_MOST_CHANNELS}: a partition holds the decays of one channel"


def residual_nki(call: Call) -> Iterator[str]:
    """Yields why the NKI kernels do not take a call."""
    if call["D"] > 12288:
        yield f"D={call['D']} is above 12288: the keys of 128 tokens stay on chip whole"


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


def layer_nki(call: Call) -> Iterator[str]:
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
