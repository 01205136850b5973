"""Instructions that Trn1 does not have: range_select (gen3), exponential and activate2 (gen4).

Three are refused: nc_matmul_mx and quantize_mx (gen4), whose packed tiles of 4 and 8 bits have no dtype here,
and topk, because the documentation does not say which partitions hold its result.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from delta_trn.nki_kernels.simulator.core.instruction import Handle, Instruction, instruction
from delta_trn.nki_kernels.simulator.core.memory import NkiTensor
from delta_trn.nki_kernels.simulator.core.operators import Operator, add, combine, maximum
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines
from delta_trn.nki_kernels.simulator.isa.enums import reduce_cmd as commands
from delta_trn.nki_kernels.simulator.isa.reduction import open_registers, read_registers

__all__ = ["activate2", "exponential", "nc_matmul_mx", "quantize_mx", "range_select", "topk"]

FP32_MIN = float(np.finfo(np.float32).min)
RANGE_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
PIPELINES = {
    ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
    ("subtract", "bypass"), ("bypass", "bypass"),
}  # fmt: skip


def _accumulate(
    run: Instruction, registers, op: Operator, result, command, reduce_res, initial=None
) -> dict[str, Any]:
    """Fold result along the free axis into the engine's registers, and read them out."""
    open_registers(registers, command, op.identity, initial)
    if command not in (commands.idle, commands.reset):
        folded = result[:, :1]
        for i in range(1, result.shape[1]):
            folded = combine(op, folded, result[:, i : i + 1])
        registers[:] = combine(op, registers, folded)
    return read_registers(run, reduce_res, registers)


@instruction(engines.vector)
def range_select(
    run: Instruction, dst: NkiTensor, on_true_tile: NkiTensor, comp_op0: Operator, comp_op1: Operator,
    bound0: NkiTensor, bound1: NkiTensor, reduce_cmd: commands = commands.reset_reduce,
    reduce_res: NkiTensor | None = None, reduce_op: Operator = maximum, range_start: int = 0,
    on_false_value: float = FP32_MIN,
):  # fmt: skip
    """Keep on_true_tile where index comp_op0 bound0 and index comp_op1 bound1; reduce to the row maximum.

    Elsewhere dst = on_false_value, the least float32 unless the kernel says otherwise.
    """
    run.needs_generation(3, "range_select")
    first = run.one_of("comp_op0", comp_op0, RANGE_COMPARISONS)
    second = run.one_of("comp_op1", comp_op1, RANGE_COMPARISONS)
    run.one_of("reduce_op", reduce_op, ("maximum",))
    P = on_true_tile.shape[0]
    values = run.rows("on_true_tile", on_true_tile)
    index = range_start + np.arange(values.shape[1], dtype=np.float32)[None, :]
    low, high = run.scalar_operand("bound0", bound0, P), run.scalar_operand("bound1", bound1, P)
    keep = combine(first, index, low) * combine(second, index, high)
    result = np.where(keep != 0, values, np.float32(on_false_value))
    run.write_like(dst, result, on_true_tile)
    return _accumulate(run, run.machine.vector_registers[:P], reduce_op, result, reduce_cmd, reduce_res)


@instruction(engines.vector)
def exponential(
    run: Instruction, dst: NkiTensor, src: NkiTensor, max_value: object = 0.0,
    reduce_res: NkiTensor | None = None, reduce_cmd: commands = commands.idle, reduce_init: object = 0.0,
):  # fmt: skip
    """Compute dst = exp(src - max_value) on the Vector engine, optionally with the row sum."""
    run.needs_generation(4, "exponential")
    P = src.shape[0]
    values = run.rows("src", src)
    result = np.exp(values - run.scalar_operand("max_value", max_value, P))
    run.write_like(dst, result, src)
    initial = run.scalar_operand("reduce_init", reduce_init, P)
    return _accumulate(run, run.machine.vector_registers[:P], add, result, reduce_cmd, reduce_res, initial)


@instruction(engines.scalar)
def activate2(
    run: Instruction, dst: NkiTensor, op: Operator, data: NkiTensor, imm0: object, imm1: object,
    op0: Operator, op1: Operator, relu_param: object = 0.0, reverse0: bool = False, reverse1: bool = False,
    reduce_op: Operator | None = None, reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
):  # fmt: skip
    """Compute dst = op((data op0 imm0) op1 imm1) on the Scalar engine."""
    run.needs_generation(4, "activate2")
    function = run.activation_function(op)
    first, second = run.alu_operator(op0, "op0"), run.alu_operator(op1, "op1")
    known = (first.name, second.name) in PIPELINES
    run.require(known, f"does not support op0 {first!r} with op1 {second!r}")
    P = data.shape[0]
    values = run.rows("data", data)
    for alu, imm, reverse, role in ((first, imm0, reverse0, "imm0"), (second, imm1, reverse1, "imm1")):
        if alu.name != "bypass":
            values = combine(alu, values, run.scalar_operand(role, imm, P), reverse)
    assert function.activation is not None
    result = function.activation(values)
    run.write_like(dst, result, data)
    registers = run.machine.scalar_registers[:P]
    return _accumulate(run, registers, reduce_op or add, result, reduce_cmd, reduce_res)


def _refuse(name: str, generation: int, instead: str) -> Callable[..., Handle]:
    def refuse(run: Instruction, **options: object):
        run.needs_generation(generation, name)
        raise NotImplementedError(f"{name} is not simulated; {instead}")

    return instruction(engines.unknown)(refuse)


nc_matmul_mx = _refuse("nc_matmul_mx", 4, "multiply bfloat16 tiles with nc_matmul")
quantize_mx = _refuse("quantize_mx", 4, "keep bfloat16 tiles")
topk = _refuse("topk", 2, "take max8 and nc_match_replace8 in turn")
