"""Says in sentences which calls the kernels of a backend do not take:
functions that `dispatch` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from delta_trn.backends.checks import is_checking
from delta_trn.backends.dispatch import Call

MOST_K = 256
NKI_MOST_V = 512
CHUNK = 128  # tokens of a chunk of the layer's kernels


def _at_most(**sizes: tuple[int, str]) -> Callable[[Call], Iterator[str]]:
    """Returns a function that yields a sentence for each size
    that is above the most that kernels take.
    """

    def refuse(call: Call) -> Iterator[str]:
        for name, (most, why) in sizes.items():
            if call[name] > most:
                yield f"{name}={call[name]} is above {most}" + (f": {why}" if why else "")

    return refuse


_BANK = "2 K or V float32 columns must fit one bank of 2 KiB of trn1's PSUM"
rule_triton = _at_most(K=(MOST_K, ""))
rule_nki = _at_most(K=(MOST_K, _BANK), V=(NKI_MOST_V, _BANK))
channels_nki = _at_most(
    K=(128, "a partition holds the decays of one channel"), V=(NKI_MOST_V, _BANK)
)
residual_nki = _at_most(D=(12288, "the keys of 128 tokens stay on chip whole"))
triton_convolution = _at_most(W=(8, ""))
triton_norm = _at_most(N=(8192, "a program holds whole rows in registers, or spills"))
nki_taps = _at_most(W=(32, "a diagonal and a mask per tap lie in SBUF"))
nki_norm = _at_most(N=(4096, "the sums of dweight fill the 8 banks of PSUM"))
nki_readout = _at_most(
    d=(1024, "dweight of 256 words fills four banks of PSUM"),
    vocabulary=(2**24, "a target is compared as a float32"),
)


def nki_convolution(call: Call) -> Iterator[str]:
    """Yields why the NKI convolution does not take a call."""
    yield from nki_taps(call)
    if "linear" in call.options:
        yield "computes silu; this call is linear"


def layer_nki(call: Call) -> Iterator[str]:
    """Yields why the NKI kernels do not take a call;
    tiles of a chunk must fit SBUF beside each other.
    """
    size, packed = call.dtype.itemsize, "packed" in call.options
    K, V = call["K"], call["V"]
    most_K, most_V = 256 // size, (384 if packed else 512) // size
    if is_checking():
        yield "check mode looks at what each of the three parts is given"
    if most_K < K:
        yield f"K={K} is above {most_K}, which fits SBUF"
    if most_V < V:
        yield (
            f"V={V} is above {most_V}, which fits "
            f"SBUF{' beside masks of packed sequences' * packed}"
        )
    if packed and K * V * size > 36864:
        yield (
            f"K V={K * V} is above {36864 // size}, which fits SBUF beside masks of packed "
            "sequences"
        )
    if call["W"] == 1 or call["W"] > 4:
        yield f"W={call['W']} is not 2, 3 or 4, for which the convolution's taps are laid out"
    if call["HV"] > 4 * call["H"]:
        yield (
            f"{call['HV'] // call['H']} value heads per key head are above 4, which one bundle "
            "holds"
        )
    chunks = call["HV"] * -(-call["T"] // CHUNK)
    if chunks > 64:
        yield (
            f"{chunks} chunks of {CHUNK} tokens over all value heads are above 64: a call grows "
            "with them"
        )
    if call["T"] > 1024 and call["HV"] >= 6:
        yield f"T={call['T']} is above 1024 with six value heads or more, whose tiles fill SBUF"
