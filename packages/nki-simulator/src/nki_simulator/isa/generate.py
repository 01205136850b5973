"""Instructions that make values: affine patterns (iota and affine_select), and random numbers.

The generator of random numbers is NumPy's, seeded for each kernel call: distributions agree with
the chip, bits do not.
"""

from math import prod

import numpy as np

from nki_simulator.core.dtypes import to_float32
from nki_simulator.core.instruction import Instruction, instruction
from nki_simulator.core.memory import SBUF, NkiTensor
from nki_simulator.core.operators import Operator, equal
from nki_simulator.isa.enums import engine as engines

__all__ = [
    "affine_select",
    "dropout",
    "iota",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "rng",
    "set_rng_seed",
]

COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


def _affine(
    run: Instruction, pattern, offset: int, channel_multiplier: int, dst: NkiTensor
) -> np.ndarray:
    """Return offset + p * channel_multiplier + sum(step_d * i_d)
    for each element, a row per partition.
    """
    pairs = [(int(step), int(count)) for step, count in pattern]
    P, free, count = dst.shape[0], dst.size // dst.shape[0], prod(count for _, count in pairs)
    run.require(len(pairs) <= 4, f"pattern has {len(pairs)} dimensions, the limit is 4")
    run.require(
        count == free, f"pattern {pattern} has {count} elements, dst has {free} per partition"
    )
    line = np.zeros(1, np.int64)
    for step, count in pairs:
        line = (line[:, None] + step * np.arange(count)).reshape(-1)
    grid = offset + channel_multiplier * np.arange(P)[:, None] + line
    run.forbid((np.abs(grid) > 2**31 - 1).any(), "pattern leaves the range of int32")
    return grid


@instruction(engines.gpsimd)
def iota(run: Instruction, dst: NkiTensor, pattern, offset: int = 0, channel_multiplier: int = 0):
    """Compute dst[p, i...] = offset + p * channel_multiplier + sum(step_d * i_d),
    cast to dst's dtype.
    """
    out = run.dst("dst", dst, (SBUF,))
    run.write(out, _affine(run, pattern, offset, channel_multiplier, out))


@instruction(engines.gpsimd)
def affine_select(
    run: Instruction, dst: NkiTensor, pattern, channel_multiplier: int, on_true_tile: NkiTensor,
    on_false_value: float, cmp_op: Operator = equal, offset: int = 0,
):  # fmt: skip
    """Copy on_true_tile where cmp_op(n, 0) with iota's n, and write on_false_value elsewhere.

    n = offset + p * channel_multiplier + sum(step_d * i_d)
    """
    op = run.one_of("cmp_op", cmp_op, COMPARISONS)
    if not isinstance(on_false_value, (int, float, np.number)):
        raise TypeError(
            f"affine_select on_false_value must be a number, got {type(on_false_value).__name__}"
        )
    values = run.read("on_true_tile", on_true_tile, (SBUF,))
    out = run.dst("dst", dst, (SBUF,))
    run.same_elements(out, on_true_tile)
    assert op.alu is not None
    keep = op.alu(_affine(run, pattern, offset, channel_multiplier, out), 0)
    if out.dtype != on_true_tile.dtype:
        values = to_float32(values)
    run.write(out, np.where(keep, values.reshape(keep.shape), np.float32(on_false_value)))


@instruction(engines.vector)
def rng(run: Instruction, dst: NkiTensor, engine: engines = engines.vector):
    """Draw 32 random bits per element, truncated to dst's integer dtype."""
    run.engine = engine
    if engine is engines.gpsimd:
        run.needs_generation(3, "rng on the GpSimd engine")
    out = run.dst("dst", dst)
    run.require(out.dtype.integer, f"dst dtype must be an integer, got {out.dtype}")
    drawn = run.machine.rng.integers(0, 2**32, out.shape, dtype=np.uint32)
    run.write(out, drawn.astype(np.dtype(f"u{out.dtype.itemsize}")).view(out.dtype.numpy))


@instruction(engines.vector)
def dropout(run: Instruction, dst: NkiTensor, data: NkiTensor, prob: object):
    """Zero each element with probability prob; the others are not rescaled."""
    values = run.read("data", data)
    P = data.shape[0]
    rate = run.scalar_operand("prob", prob, P)
    drawn = run.machine.rng.random((P, data.size // P), dtype=np.float32)
    kept = np.where((drawn < rate).reshape(values.shape), np.zeros((), values.dtype), values)
    run.write_like(dst, kept, data, dtype=data.dtype)


@instruction(engines.vector)
def rand2(run: Instruction, dst: NkiTensor, min: object, max: object):
    """Draw uniformly from [min, max]."""
    run.needs_generation(4, "rand2")
    out = run.dst("dst", dst)
    P = out.shape[0]
    low, high = run.scalar_operand("min", min, P), run.scalar_operand("max", max, P)
    drawn = run.machine.rng.random((P, out.size // P), dtype=np.float32)
    run.write(out, low + (high - low) * drawn)


@instruction(engines.vector)
def set_rng_seed(run: Instruction, src_seeds: NkiTensor):
    """Seed the generator from the first element of a tile."""
    seeds = run.read("src_seeds", src_seeds)
    run.machine.rng = np.random.default_rng(int(to_float32(seeds).flat[0]))


@instruction(engines.gpsimd)
def rand_set_state(run: Instruction, src_seeds: NkiTensor, engine: engines = engines.gpsimd):
    """Seed the generator from a tile of uint32, 6 words per partition (Vector: 24)."""
    _needs_xorwow(run, engine, "src_seeds", src_seeds)
    run.machine.rng = np.random.default_rng(run.read("src_seeds", src_seeds).reshape(-1))


@instruction(engines.gpsimd)
def rand_get_state(run: Instruction, dst: NkiTensor, engine: engines = engines.gpsimd):
    """Write words to dst. `rand_set_state`
    with them makes the generator repeat what it draws next.
    """
    _needs_xorwow(run, engine, "dst", dst)
    words = run.machine.rng.integers(0, 2**32, dst.shape, dtype=np.uint32)
    run.write(run.dst("dst", dst), words)
    run.machine.rng = np.random.default_rng(words.reshape(-1))


def _needs_xorwow(run: Instruction, engine: engines, role: str, state: NkiTensor) -> None:
    """Require a generation that has the XORWOW generator on this engine,
    and a state of its size.
    """
    run.engine = engine
    run.needs_generation(
        4 if engine is engines.vector else 3, f"{run.op} on the {engine.name} engine"
    )
    words = 24 if engine is engines.vector else 6
    run.require(
        state.dtype == "uint32" and state.size == words * state.shape[0],
        f"{role} must be uint32 with {words} elements per partition, got {state.dtype} "
        f"{state.shape}",
    )
