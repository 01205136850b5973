"""Random numbers. The generator is NumPy's, seeded for each kernel call.

Distributions agree with the chip, bits do not.
"""

import numpy as np

from delta_trn.nki_kernels.simulator.core.dtypes import to_float32
from delta_trn.nki_kernels.simulator.core.errors import require
from delta_trn.nki_kernels.simulator.core.machine import Engine, Handle, Instruction, current
from delta_trn.nki_kernels.simulator.core.memory import NkiTensor
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines


def rng(dst: NkiTensor, engine: engines = engines.vector, name: str | None = None) -> Handle:
    """Draw 32 random bits per element, truncated to dst's integer dtype."""
    run = Instruction("rng", engine)
    if engine is engines.gpsimd:
        run.needs_generation(3, "rng on the GpSimd engine")
    out = run.dst("dst", dst)
    require(out.dtype.integer, f"rng dst dtype must be an integer, got {out.dtype}")
    drawn = run.machine.rng.integers(0, 2**32, out.shape, dtype=np.uint32)
    run.write(out, drawn.astype(np.dtype(f"u{out.dtype.itemsize}")).view(out.dtype.numpy))
    return run.done()


def dropout(dst: NkiTensor, data: NkiTensor, prob: object, name: str | None = None) -> Handle:
    """Zero each element with probability prob; the others are not rescaled."""
    run = Instruction("dropout", Engine.vector)
    values = run.read("data", data)
    P = data.shape[0]
    rate = run.scalar_operand("prob", prob, P)
    out = run.dst("dst", dst)
    run.same_elements(out, data, "dst", "data")
    run.has_dtype("dst", out, data.dtype)
    drawn = run.machine.rng.random((P, data.size // P), dtype=np.float32)
    run.write(out, np.where((drawn < rate).reshape(values.shape), np.zeros((), values.dtype), values))
    return run.done()


def rand2(dst: NkiTensor, min: object, max: object, name: str | None = None) -> Handle:
    """Draw uniformly from [min, max]."""
    run = Instruction("rand2", Engine.vector)
    run.needs_generation(4, "rand2")
    out = run.dst("dst", dst)
    P = out.shape[0]
    low, high = run.scalar_operand("min", min, P), run.scalar_operand("max", max, P)
    drawn = run.machine.rng.random((P, out.size // P), dtype=np.float32)
    run.write(out, low + (high - low) * drawn)
    return run.done()


def set_rng_seed(src_seeds: NkiTensor, name: str | None = None) -> Handle:
    """Seed the generator from the first element of a tile."""
    run = Instruction("set_rng_seed", Engine.vector)
    seeds = run.read("src_seeds", src_seeds)
    current().rng = np.random.default_rng(int(to_float32(seeds).flat[0]))
    return run.done()


def rand_set_state(src_seeds: NkiTensor, engine: engines = engines.gpsimd, name: str | None = None) -> Handle:
    """Seed the generator from a tile of uint32, 6 words per partition (Vector: 24)."""
    run = Instruction("rand_set_state", engine)
    _needs_xorwow(run, engine, "src_seeds", src_seeds)
    current().rng = np.random.default_rng(run.read("src_seeds", src_seeds).reshape(-1))
    return run.done()


def rand_get_state(dst: NkiTensor, engine: engines = engines.gpsimd, name: str | None = None) -> Handle:
    """Write words to dst. `rand_set_state` with them makes the generator repeat what it draws next."""
    run = Instruction("rand_get_state", engine)
    _needs_xorwow(run, engine, "dst", dst)
    words = current().rng.integers(0, 2**32, dst.shape, dtype=np.uint32)
    run.write(run.dst("dst", dst), words)
    current().rng = np.random.default_rng(words.reshape(-1))
    return run.done()


def _needs_xorwow(run: Instruction, engine: engines, role: str, state: NkiTensor) -> None:
    """Require a generation that has the XORWOW generator on this engine, and a state of its size."""
    run.needs_generation(4 if engine is engines.vector else 3, f"{run.op} on the {engine.name} engine")
    words = 24 if engine is engines.vector else 6
    require(
        state.dtype == "uint32" and state.size == words * state.shape[0],
        f"{run.op} {role} must be uint32 with {words} elements per partition, "
        f"got {state.dtype} {state.shape}",
    )
