"""Functions of one argument, with a running sum along the free axis:
on Trn1 the Scalar engine's alone.
"""

from typing import Any

import numpy as np

from nki_simulator.core.chip import BIAS
from nki_simulator.core.dtypes import to_float32
from nki_simulator.core.function_errors import err
from nki_simulator.core.instruction import Instruction, instruction
from nki_simulator.core.memory import NkiTensor
from nki_simulator.core.operators import Operator, add, add_in_order, combine
from nki_simulator.isa.enums import engine as engines
from nki_simulator.isa.enums import reduce_cmd as commands
from nki_simulator.isa.reduction import accumulate, open_registers, read_registers

__all__ = ["activate2", "activation", "activation_reduce", "exponential"]

# what activate2 applies before its function
PIPELINES = {
    ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
    ("subtract", "bypass"), ("bypass", "bypass"),
}  # fmt: skip


@instruction(engines.scalar)
def activation(
    run: Instruction,
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    bias: object = None,
    scale: object = 1.0,
    reduce_op: Operator | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
):
    """Compute dst = op(data * scale + bias) in float32, and optionally sum it along the free axis.

    scale   a number or a float32 tile (P, 1)
    bias    a tile (P, 1), None for zero, or from gen3 on a number

    Each lane has one register for the sum. reduce_cmd resets it, adds to it, or both; reduce_res
    (P, 1) receives it.
    """
    return _activate(run, dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


@instruction(engines.scalar)
def activation_reduce(
    run: Instruction, dst: NkiTensor, op: Operator, data: NkiTensor, reduce_op: Operator,
    reduce_res: NkiTensor, bias: object = None, scale: object = 1.0,
):  # fmt: skip
    """Run activation with reduce_cmd=reset_reduce."""
    return _activate(run, dst, op, data, bias, scale, reduce_op, reduce_res, commands.reset_reduce)


def _activate(
    run: Instruction, dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd
) -> dict[str, Any]:
    function = run.activation_function(op)
    values = run.rows("data", data)
    P = data.shape[0]
    if isinstance(scale, NkiTensor) or scale != 1.0:
        values = values * run.scalar_operand("scale", scale, P)
    if bias is not None:
        if function.name == "copy" and isinstance(bias, NkiTensor):
            run.machine.refuse_on_chip(
                BIAS, f"activation(copy) with the tile `{bias.name}` as bias"
            )
        values = values + _bias(run, bias, P)
        no_bias = run.target.generation == 2 and function.name == "reciprocal"
        run.forbid(no_bias, "reciprocal takes no bias on gen2")
    run.check_range(function, values)
    assert function.activation is not None
    run.machine.tables.load_for(function.name)
    result = function.activation(values)
    if run.machine.numerics.seed is not None:
        result = err(function.name, values, result, run.machine.numerics.seed)
    run.write_like(dst, result, data)
    known = (commands.idle, commands.reset, commands.reduce, commands.reset_reduce)
    run.check_member("reduce_cmd", reduce_cmd, *known)
    registers = run.machine.scalar_registers
    open_registers(registers, reduce_cmd, 0)
    if reduce_cmd in (commands.reduce, commands.reset_reduce):
        run.one_of("reduce_op", reduce_op, ("add",))
        registers[:P] += add_in_order(result)[:, None]
    return {**read_registers(run, reduce_res, registers[:P]), "function": function.name}


def _bias(run: Instruction, bias: object, P: int) -> object:
    if not isinstance(bias, NkiTensor):
        tile = run.target.generation == 2
        run.require(not tile, f"bias must be a (P, 1) tile on gen2, got the number {bias!r}")
        return run.scalar_operand("bias", bias, P)
    values = run.read("bias", bias)
    run.has_columns("bias", bias, P)
    run.require(bias.dtype != "tfloat32", "bias dtype cannot be tfloat32")
    return to_float32(values).reshape(P, 1)


@instruction(engines.scalar)
def activate2(
    run: Instruction,
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
):
    """Compute dst = op((data op0 imm0) op1 imm1) on the Scalar engine."""
    run.needs_generation(4, "activate2")
    function = run.activation_function(op)
    first, second = run.alu_operator(op0, "op0"), run.alu_operator(op1, "op1")
    known = (first.name, second.name) in PIPELINES
    run.require(known, f"does not support op0 {first!r} with op1 {second!r}")
    P = data.shape[0]
    values = run.rows("data", data)
    for alu, imm, reverse, role in (
        (first, imm0, reverse0, "imm0"),
        (second, imm1, reverse1, "imm1"),
    ):
        if alu.name != "bypass":
            values = combine(alu, values, run.scalar_operand(role, imm, P), reverse)
    assert function.activation is not None
    result = function.activation(values)
    run.write_like(dst, result, data)
    registers = run.machine.scalar_registers[:P]
    return accumulate(run, registers, reduce_op or add, result, reduce_cmd, reduce_res)


@instruction(engines.vector)
def exponential(
    run: Instruction,
    dst: NkiTensor,
    src: NkiTensor,
    max_value: object = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    reduce_init: object = 0.0,
):
    """Compute dst = exp(src - max_value) on the Vector engine, optionally with the row sum."""
    run.needs_generation(4, "exponential")
    P = src.shape[0]
    values = run.rows("src", src)
    result = np.exp(values - run.scalar_operand("max_value", max_value, P))
    run.write_like(dst, result, src)
    initial = run.scalar_operand("reduce_init", reduce_init, P)
    return accumulate(
        run, run.machine.vector_registers[:P], add, result, reduce_cmd, reduce_res, initial
    )
