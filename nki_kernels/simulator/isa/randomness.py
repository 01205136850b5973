"""Random numbers. The generator is NumPy's, seeded for each kernel call.

Distributions agree with the chip, bits do not.
"""

import numpy as np

from delta_trn.nki_kernels.simulator.core.dtypes import to_float32
from delta_trn.nki_kernels.simulator.core.instruction import Instruction, instruction
from delta_trn.nki_kernels.simulator.core.memory import NkiTensor
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines

__all__ = ["dropout", "rand2", "rand_get_state", "rand_set_state", "rng", "set_rng_seed"]


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
    out = run.dst("dst", dst)
    run.same_elements(out, data)
    run.has_dtype("dst", out, data.dtype)
    drawn = run.machine.rng.random((P, data.size // P), dtype=np.float32)
    run.write(out, np.where((drawn < rate).reshape(values.shape), np.zeros((), values.dtype), values))


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
    """Write words to dst. `rand_set_state` with them makes the generator repeat what it draws next."""
    _needs_xorwow(run, engine, "dst", dst)
    words = run.machine.rng.integers(0, 2**32, dst.shape, dtype=np.uint32)
    run.write(run.dst("dst", dst), words)
    run.machine.rng = np.random.default_rng(words.reshape(-1))


def _needs_xorwow(run: Instruction, engine: engines, role: str, state: NkiTensor) -> None:
    """Require a generation that has the XORWOW generator on this engine, and a state of its size."""
    run.engine = engine
    run.needs_generation(4 if engine is engines.vector else 3, f"{run.op} on the {engine.name} engine")
    words = 24 if engine is engines.vector else 6
    run.require(
        state.dtype == "uint32" and state.size == words * state.shape[0],
        f"{role} must be uint32 with {words} elements per partition, got {state.dtype} {state.shape}",
    )
