"""Instructions that Trn1 does not have: range_select (gen3), exponential and activate2 (gen4).

Three are refused: nc_matmul_mx and quantize_mx (gen4), whose packed tiles of 4 and 8 bits have no dtype here,
and topk, because the documentation does not say which partitions hold its result.
"""

from collections.abc import Callable

import numpy as np

from delta_trn.nki_kernels.simulator.core.errors import ConstraintError
from delta_trn.nki_kernels.simulator.core.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.core.memory import NkiTensor
from delta_trn.nki_kernels.simulator.isa.arithmetic import combine, open_registers, read_registers
from delta_trn.nki_kernels.simulator.isa.enums import reduce_cmd as commands
from delta_trn.nki_kernels.simulator.isa.operators import (
    Operator,
    activation_function,
    add,
    alu_operator,
    maximum,
)

FP32_MIN = float(np.finfo(np.float32).min)
RANGE_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
PIPELINES = {
    ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
    ("subtract", "bypass"), ("bypass", "bypass"),
}  # fmt: skip


def _accumulate(run, registers, op: Operator, result, command, reduce_res, initial=None) -> Handle:
    """Fold result along the free axis into the engine's registers, read them out, and finish."""
    if command is not commands.idle:
        open_registers(registers, command, op.identity, initial)
        if command is not commands.reset:
            folded = result[:, :1]
            for i in range(1, result.shape[1]):
                folded = combine(op, folded, result[:, i : i + 1])
            registers[:] = combine(op, registers, folded)
    read_registers(run, reduce_res, registers)
    return run.done(reduces=reduce_res is not None)


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Operator,
    comp_op1: Operator,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: commands = commands.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Operator = maximum,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> Handle:
    """Keep on_true_tile where index comp_op0 bound0 and index comp_op1 bound1; reduce to the row maximum.

    Elsewhere dst = on_false_value, the least float32 unless the kernel says otherwise.
    """
    run = Instruction("range_select", Engine.vector)
    run.needs_generation(3, "range_select")
    for role, op in (("comp_op0", comp_op0), ("comp_op1", comp_op1)):
        if not isinstance(op, Operator) or op.name not in RANGE_COMPARISONS:
            raise ConstraintError(
                f"range_select {role} must be one of {', '.join(RANGE_COMPARISONS)}, got {op!r}"
            )
    if reduce_op.name != "maximum":
        raise ConstraintError(f"range_select reduce_op must be nl.maximum, got {reduce_op!r}")
    P = on_true_tile.shape[0]
    values = run.rows("on_true_tile", on_true_tile)
    index = range_start + np.arange(values.shape[1], dtype=np.float32)[None, :]
    low, high = run.scalar_operand("bound0", bound0, P), run.scalar_operand("bound1", bound1, P)
    keep = combine(comp_op0, index, low) * combine(comp_op1, index, high)
    result = np.where(keep != 0, values, np.float32(on_false_value))
    run.write_like(dst, result, on_true_tile, "on_true_tile")
    registers = run.machine.vector_registers[:P]
    return _accumulate(run, registers, reduce_op, result, reduce_cmd, reduce_res)


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: object = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    reduce_init: object = 0.0,
    name: str | None = None,
) -> Handle:
    """Compute dst = exp(src - max_value) on the Vector engine, optionally with the row sum."""
    run = Instruction("exponential", Engine.vector)
    run.needs_generation(4, "exponential")
    P = src.shape[0]
    values = run.rows("src", src)
    result = np.exp(values - run.scalar_operand("max_value", max_value, P))
    run.write_like(dst, result, src, "src")
    initial = run.scalar_operand("reduce_init", reduce_init, P)
    registers = run.machine.vector_registers[:P]
    return _accumulate(run, registers, add, result, reduce_cmd, reduce_res, initial)


def activate2(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    imm0: object,
    imm1: object,
    op0: Operator,
    op1: Operator,
    relu_param: object = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Operator | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    name: str | None = None,
) -> Handle:
    """Compute dst = op((data op0 imm0) op1 imm1) on the Scalar engine."""
    run = Instruction("activate2", Engine.scalar)
    run.needs_generation(4, "activate2")
    function = activation_function("activate2", op)
    first, second = alu_operator("activate2", op0, "op0"), alu_operator("activate2", op1, "op1")
    if (first.name, second.name) not in PIPELINES:
        raise ConstraintError(f"activate2 does not support op0 {first!r} with op1 {second!r}")
    P = data.shape[0]
    values = run.rows("data", data)
    for alu, imm, reverse, role in ((first, imm0, reverse0, "imm0"), (second, imm1, reverse1, "imm1")):
        if alu.name != "bypass":
            values = combine(alu, values, run.scalar_operand(role, imm, P), reverse)
    assert function.activation is not None
    result = function.activation(values)
    run.write_like(dst, result, data, "data")
    registers = run.machine.scalar_registers[:P]
    return _accumulate(run, registers, reduce_op or add, result, reduce_cmd, reduce_res)


def _refused(name: str, generation: int, instead: str) -> Callable[..., Handle]:
    def instruction(*operands: object, **options: object) -> Handle:
        Instruction(name, Engine.unknown).needs_generation(generation, name)
        raise NotImplementedError(f"{name} is not simulated; {instead}")

    return instruction


nc_matmul_mx = _refused("nc_matmul_mx", 4, "multiply bfloat16 tiles with nc_matmul")
quantize_mx = _refused("quantize_mx", 4, "keep bfloat16 tiles")
topk = _refused("topk", 2, "take max8 and nc_match_replace8 in turn")
