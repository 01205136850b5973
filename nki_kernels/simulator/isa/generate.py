"""The GpSimd engine's affine patterns: iota and affine_select."""

from math import prod

import numpy as np

from delta_trn.nki_kernels.simulator.core.dtypes import to_float32
from delta_trn.nki_kernels.simulator.core.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.core.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.core.memory import SBUF, NkiTensor
from delta_trn.nki_kernels.simulator.isa.operators import Operator, equal

COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


def _affine(run: Instruction, pattern, offset: int, channel_multiplier: int, dst: NkiTensor) -> np.ndarray:
    """Return offset + p * channel_multiplier + sum(step_d * i_d) for each element, a row per partition."""
    pairs = [(int(step), int(count)) for step, count in pattern]
    P, free = dst.shape[0], dst.size // dst.shape[0]
    require(len(pairs) <= 4, f"{run.op} pattern has {len(pairs)} dimensions, the limit is 4")
    require(
        prod(count for _, count in pairs) == free,
        f"{run.op} pattern {pattern} has {prod(c for _, c in pairs)} elements, dst has {free} per partition",
    )
    line = np.zeros(1, np.int64)
    for step, count in pairs:
        line = (line[:, None] + step * np.arange(count)).reshape(-1)
    grid = offset + channel_multiplier * np.arange(P)[:, None] + line
    if run.strict and (np.abs(grid) > 2**31 - 1).any():
        raise StrictError(f"{run.op} pattern leaves the range of int32")
    return grid


def iota(
    dst: NkiTensor, pattern, offset: int = 0, channel_multiplier: int = 0, name: str | None = None
) -> Handle:
    """Compute dst[p, i...] = offset + p * channel_multiplier + sum(step_d * i_d), cast to dst's dtype."""
    run = Instruction("iota", Engine.gpsimd)
    out = run.dst("dst", dst, (SBUF,))
    run.write(out, _affine(run, pattern, offset, channel_multiplier, out))
    return run.done()


def affine_select(
    dst: NkiTensor,
    pattern,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Operator = equal,
    offset: int = 0,
    name: str | None = None,
) -> Handle:
    """Copy on_true_tile where cmp_op(n, 0) with iota's n, and write on_false_value elsewhere.

    n = offset + p * channel_multiplier + sum(step_d * i_d)
    """
    run = Instruction("affine_select", Engine.gpsimd)
    if not isinstance(cmp_op, Operator) or cmp_op.name not in COMPARISONS:
        raise ConstraintError(
            f"affine_select cmp_op must be a comparison such as nl.greater_equal, got {cmp_op!r}"
        )
    if not isinstance(on_false_value, (int, float, np.number)):
        raise TypeError(f"affine_select on_false_value must be a number, got {type(on_false_value).__name__}")
    values = run.read("on_true_tile", on_true_tile, (SBUF,))
    out = run.dst("dst", dst, (SBUF,))
    run.same_elements(out, on_true_tile, "dst", "on_true_tile")
    assert cmp_op.alu is not None
    keep = cmp_op.alu(_affine(run, pattern, offset, channel_multiplier, out), 0)
    if out.dtype != on_true_tile.dtype:
        values = to_float32(values)
    run.write(out, np.where(keep, values.reshape(keep.shape), np.float32(on_false_value)))
    return run.done()
