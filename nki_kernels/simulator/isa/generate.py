"""The GpSimd engine's affine patterns: iota and affine_select."""

from math import prod

import numpy as np

from delta_trn.nki_kernels.simulator.core.dtypes import to_float32
from delta_trn.nki_kernels.simulator.core.instruction import Instruction, instruction
from delta_trn.nki_kernels.simulator.core.memory import SBUF, NkiTensor
from delta_trn.nki_kernels.simulator.isa.arithmetic import one_of
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines
from delta_trn.nki_kernels.simulator.isa.operators import Operator, equal

__all__ = ["affine_select", "iota"]

COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


def _affine(run: Instruction, pattern, offset: int, channel_multiplier: int, dst: NkiTensor) -> np.ndarray:
    """Return offset + p * channel_multiplier + sum(step_d * i_d) for each element, a row per partition."""
    pairs = [(int(step), int(count)) for step, count in pattern]
    P, free, count = dst.shape[0], dst.size // dst.shape[0], prod(count for _, count in pairs)
    run.require(len(pairs) <= 4, f"pattern has {len(pairs)} dimensions, the limit is 4")
    run.require(count == free, f"pattern {pattern} has {count} elements, dst has {free} per partition")
    line = np.zeros(1, np.int64)
    for step, count in pairs:
        line = (line[:, None] + step * np.arange(count)).reshape(-1)
    grid = offset + channel_multiplier * np.arange(P)[:, None] + line
    run.forbid((np.abs(grid) > 2**31 - 1).any(), "pattern leaves the range of int32")
    return grid


@instruction(engines.gpsimd)
def iota(run: Instruction, dst: NkiTensor, pattern, offset: int = 0, channel_multiplier: int = 0):
    """Compute dst[p, i...] = offset + p * channel_multiplier + sum(step_d * i_d), cast to dst's dtype."""
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
    op = one_of(run, "cmp_op", cmp_op, COMPARISONS)
    if not isinstance(on_false_value, (int, float, np.number)):
        raise TypeError(f"affine_select on_false_value must be a number, got {type(on_false_value).__name__}")
    values = run.read("on_true_tile", on_true_tile, (SBUF,))
    out = run.dst("dst", dst, (SBUF,))
    run.same_elements(out, on_true_tile)
    assert op.alu is not None
    keep = op.alu(_affine(run, pattern, offset, channel_multiplier, out), 0)
    if out.dtype != on_true_tile.dtype:
        values = to_float32(values)
    run.write(out, np.where(keep, values.reshape(keep.shape), np.float32(on_false_value)))
