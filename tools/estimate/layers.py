"""Lists what a layer's other kernels launch, and a token of decoding: sizes, turns of loops, bytes
to move.

    layers_1024     a layer of d = 1,024 with the heads of arXiv:2412.06464, 30 sequences of 1,024
                    tokens: convolution, gated norm, norm of the residual stream, and 1,024 tokens'
                    cross-entropy
    decode_*        a token of Qwen3-Next's layer for so many sequences, with a float32 state

Beside them stand the same bytes alone, read and written once: no compiler's kernel takes less. And
where flash-linear-attention is installed, its kernels, which `layer_peers` lists.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from delta_trn.triton_kernels import (
    cross_entropy,
    gated_delta_rule_step,
    rms_norm,
    short_convolution,
)
from delta_trn.triton_kernels.variants import Variant
from tools.estimate.simulate import Work
from tools.estimate.work import ITEM, Launch

B, T, H, K, V, W = 30, 1024, 6, 128, 256, 4
D, TARGETS, VOCABULARY = 1024, 1024, 32768
CHANNELS = 2 * H * K + H * V
HEADS = {"H": 16, "HV": 32, "K": 128, "V": 128}  # of Qwen3-Next
SEQUENCES = {"decode_1": 1, "decode_16": 16, "decode_256": 256}
MULTIPLES = ("C", "V")  # integers that are multiples of 16 here, and may be known to be
NAMES = ("layers_1024", *SEQUENCES)


def launches(name: str) -> Iterator[Launch]:
    """Yields our launches. `name` is one of NAMES."""
    if name in SEQUENCES:
        yield _step(SEQUENCES[name])
        return
    yield from _convolution()
    yield from norm("gated norm", B * T * H, V, "gated", (2, 3), (1, 2))
    yield from norm("norm of the stream", B * T, D, "sum", (2, 3), (2, 1))
    yield _softmax()


def bytes_alone(name: str) -> Iterator[Launch]:
    """Yields the same, of which only the bytes count."""
    for x in launches(name):
        yield Launch(x.name, x.backward, None, Work(0, x.work.load_bytes + x.written))


def _variant(module: ModuleType, sizes: tuple[int, int], options: str, **values: int) -> Variant:
    found = next(x for x in module.variants(*sizes, ITEM, False) if x.options == options)
    return replace(found, values=found.values | values, multiples=(*MULTIPLES, *found.multiples))


def _convolution() -> Iterator[Launch]:
    size = B * T * CHANNELS * ITEM
    for back in (False, True):
        name, form = (
            ("convolution, backward", "backward dense")
            if back
            else ("convolution", "forward dense")
        )
        launched = "short_convolution" if back else "short_convolution_forward"
        variant = _variant(short_convolution, (CHANNELS, W), form)
        across = -(-CHANNELS // variant.tile.columns)
        mask = CHANNELS / (across * variant.tile.columns)
        P, tiles = short_convolution.parts(B, T, CHANNELS, W, prefix=False, kernel=launched)
        work = Work(P * across, (1 + back) * size, others=(tiles,), mask=mask)
        yield Launch(name, back, variant, work, written=size)


def norm(
    name: str, M: int, N: int, form: str, read: tuple[int, int], written: tuple[int, int]
) -> Iterator[Launch]:
    """Yields forward and backward; read and written are tensors [M, N] of each."""
    forward, size = _variant(rms_norm, (N, 0), f"forward {form}"), M * N * ITEM
    mask = N / forward.tile.columns
    work = Work(-(-M // forward.tile.rows), read[0] * size, mask=mask)
    yield Launch(name, False, forward, work, written=written[0] * size)
    P, tiles = rms_norm.parts(M, N)
    backward = _variant(rms_norm, (N, 0), f"backward {form}")
    work = Work(P, read[1] * size, others=(-(-tiles // P),), mask=mask)
    yield Launch(f"{name}, backward", True, backward, work, written=written[1] * size)


def _softmax() -> Launch:
    variant = _variant(cross_entropy, (0, VOCABULARY), "")
    turns, size = -(-VOCABULARY // variant.tile.columns), TARGETS * VOCABULARY * ITEM
    work = Work(TARGETS, size, others=(turns, turns))
    return Launch("cross-entropy and its gradient", True, variant, work, written=size)


def _step(sequences: int) -> Launch:
    sizes = HEADS["K"], HEADS["V"]
    variant = _variant(gated_delta_rule_step, sizes, "gates made", **HEADS)
    programs = sequences * HEADS["HV"] * -(-sizes[1] // variant.tile.columns)
    read, written = state(sequences)
    return Launch("token", False, variant, Work(programs, read), written=written)


def state(sequences: int) -> tuple[float, float]:
    """Returns the bytes of a token that are read and written."""
    keys = 2 * sequences * HEADS["H"] * HEADS["K"] * ITEM
    values = sequences * HEADS["HV"] * HEADS["V"] * ITEM
    state = 4 * sequences * HEADS["HV"] * HEADS["K"] * HEADS["V"]
    return state + keys + values, state + values
