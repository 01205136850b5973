"""The Scalar engine: dst = op(data * scale + bias), and a running sum along the free axis."""

import numpy as np

from delta_trn.nki_kernels.simulator.core.dtypes import to_float32
from delta_trn.nki_kernels.simulator.core.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.core.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.core.memory import NkiTensor
from delta_trn.nki_kernels.simulator.isa.arithmetic import check_range, open_registers, read_registers
from delta_trn.nki_kernels.simulator.isa.enums import reduce_cmd as commands
from delta_trn.nki_kernels.simulator.isa.operators import Operator, activation_function


def activation(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    bias: object = None,
    scale: object = 1.0,
    reduce_op: Operator | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    name: str | None = None,
) -> Handle:
    """Compute dst = op(data * scale + bias) in float32, and optionally sum it along the free axis.

    scale   a number or a float32 tile (P, 1)
    bias    a tile (P, 1), None for zero, or from gen3 on a number

    Each lane has one register for the sum. reduce_cmd resets it, adds to it, or both; reduce_res (P, 1)
    receives it.
    """
    return _activate("activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def activation_reduce(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    reduce_op: Operator,
    reduce_res: NkiTensor,
    bias: object = None,
    scale: object = 1.0,
    name: str | None = None,
) -> Handle:
    """Run activation with reduce_cmd=reset_reduce."""
    return _activate(
        "activation_reduce", dst, op, data, bias, scale, reduce_op, reduce_res, commands.reset_reduce
    )


def _activate(instruction, dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd) -> Handle:
    function = activation_function(instruction, op)
    run = Instruction(instruction, Engine.scalar)
    values = run.rows("data", data)
    P = data.shape[0]
    if isinstance(scale, NkiTensor) or scale != 1.0:
        values = values * run.scalar_operand("scale", scale, P)
    if bias is not None:
        values = values + _bias(run, bias, P)
        if run.target.generation == 2 and function.name == "reciprocal" and run.strict:
            raise StrictError("activation reciprocal takes no bias on gen2")
    if function.valid is not None and run.strict:
        check_range(run, function, values)
    assert function.activation is not None
    run.machine.tables.load_for(function.name)
    result = function.activation(values)
    ulps = run.machine.numerics.activation_ulps
    if ulps and function.name != "copy":
        draws = run.machine.rng.uniform(-ulps, ulps, result.shape)
        result = result * (1 + draws * 2.0**-23).astype(np.float32)
    run.write_like(dst, result, data, "data")
    _reduce(run, result, P, reduce_op, reduce_cmd)
    read_registers(run, reduce_res, run.machine.scalar_registers[:P])
    return run.done(reduces=reduce_res is not None, function=function.name)


def _bias(run: Instruction, bias: object, P: int) -> object:
    if not isinstance(bias, NkiTensor):
        if run.target.generation == 2:
            raise ConstraintError(f"{run.op} bias must be a (P, 1) tile on gen2, got the number {bias!r}")
        return run.scalar_operand("bias", bias, P)
    values = run.read("bias", bias)
    run.has_columns("bias", bias, P)
    require(bias.dtype != "tfloat32", f"{run.op} bias dtype cannot be tfloat32")
    return to_float32(values).reshape(P, 1)


def _reduce(run: Instruction, result: np.ndarray, P: int, reduce_op: object, reduce_cmd: object) -> None:
    """Reset the registers, add the rows' sums to them, or both."""
    if not isinstance(reduce_cmd, commands):
        raise TypeError(f"{run.op} reduce_cmd must be a member of nisa.reduce_cmd, got {reduce_cmd!r}")
    if reduce_cmd is commands.load_reduce:
        raise ConstraintError(
            f"{run.op} reduce_cmd must be idle, reset, reduce or reset_reduce, got load_reduce"
        )
    registers = run.machine.scalar_registers
    open_registers(registers, reduce_cmd, 0)
    if reduce_cmd in (commands.reduce, commands.reset_reduce):
        require(
            isinstance(reduce_op, Operator) and reduce_op.name == "add",
            f"{run.op} reduce_op must be nl.add, got {reduce_op!r}",
        )
        registers[:P] += result.sum(axis=1, keepdims=True, dtype=np.float32)
