"""The Scalar engine: dst = op(data * scale + bias), with a running sum along the free axis."""

import numpy as np

from delta_trn.nki_kernels.simulator.dtypes import to_float32
from delta_trn.nki_kernels.simulator.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.isa.enums import reduce_cmd as commands
from delta_trn.nki_kernels.simulator.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.memory import NkiTensor
from delta_trn.nki_kernels.simulator.operators import Operator, activation_function


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
    """dst = op(data * scale + bias) in float32; optionally sums op's output along the free axis.

    scale: number or float32 (P, 1). bias: (P, 1), a number too from gen3 on, None for zero.
    The sum lives in one register per lane: reduce_cmd resets it, adds to it, or both; reduce_res (P, 1)
    reads it.
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
    """activation with reduce_cmd=reset_reduce."""
    return _activate(
        "activation_reduce", dst, op, data, bias, scale, reduce_op, reduce_res, commands.reset_reduce
    )


def _activate(instruction, dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd) -> Handle:
    function = activation_function(instruction, op)
    run = Instruction(instruction, Engine.scalar)
    values = to_float32(run.read("data", data))
    P = data.shape[0]
    free = values.reshape(P, -1)
    if isinstance(scale, NkiTensor) or scale != 1.0:
        free = free * run.scalar_operand("scale", scale, P)
    if bias is not None:
        free = free + _bias(run, bias, P)
        if run.target.generation == 2 and function.name == "reciprocal" and run.strict:
            raise StrictError("activation reciprocal takes no bias on gen2")
    if function.valid is not None and run.strict:
        _check_range(run, function, free)
    assert function.activation is not None
    result = function.activation(free)
    ulps = run.machine.numerics.activation_ulps
    if ulps and function.name != "copy":
        draws = run.machine.rng.uniform(-ulps, ulps, result.shape)
        result = result * (1 + draws * 2.0**-23).astype(np.float32)
    out = run.dst("dst", dst)
    run.same_elements(out, data, "dst", "data")
    run.write(out, result)
    _reduce(run, result, P, reduce_op, reduce_res, reduce_cmd)
    return run.done(reduces=reduce_res is not None, function=function.name)


def _bias(run: Instruction, bias: object, P: int) -> object:
    if not isinstance(bias, NkiTensor):
        if run.target.generation == 2:
            raise ConstraintError(f"{run.op} bias must be a (P, 1) tile on gen2, got the number {bias!r}")
        return run.scalar_operand("bias", bias, P)
    values = run.read("bias", bias)
    require(
        bias.shape[0] == P and bias.size == P,
        f"{run.op} bias must be a tile of shape ({P}, 1), got {bias.shape}",
    )
    require(bias.dtype != "tfloat32", f"{run.op} bias dtype cannot be tfloat32")
    return to_float32(values).reshape(P, 1)


def _check_range(run: Instruction, function: Operator, values: np.ndarray) -> None:
    assert function.valid is not None
    low, high = function.valid
    magnitude = np.abs(values) if function.name == "reciprocal" else values
    outside = (magnitude < np.float32(low)) | (magnitude > np.float32(high))
    if outside.any():
        where = [int(i) for i in np.argwhere(outside)[0]]
        raise StrictError(
            f"{run.op} {function!r} is valid for inputs in [{low:.3g}, {high:.3g}], got "
            f"{values[tuple(where)]:.6g} at "
            f"{where}; the Scalar engine returns wrong values there"
        )


def _reduce(run, result, P, reduce_op, reduce_res, reduce_cmd) -> None:
    if not isinstance(reduce_cmd, commands):
        raise TypeError(f"{run.op} reduce_cmd must be a member of nisa.reduce_cmd, got {reduce_cmd!r}")
    if reduce_cmd is commands.load_reduce:
        raise ConstraintError(
            f"{run.op} reduce_cmd must be idle, reset, reduce or reset_reduce, got load_reduce"
        )
    registers = run.machine.scalar_registers
    if reduce_cmd in (commands.reset, commands.reset_reduce):
        registers[:] = 0
    if reduce_cmd in (commands.reduce, commands.reset_reduce):
        require(
            isinstance(reduce_op, Operator) and reduce_op.name == "add",
            f"{run.op} reduce_op must be nl.add, got {reduce_op!r}",
        )
        registers[:P] += result.sum(axis=1, keepdims=True, dtype=np.float32)
    if reduce_res is not None:
        out = run.dst("reduce_res", reduce_res)
        require(
            out.shape[0] == P and out.size == P,
            f"{run.op} reduce_res must have shape ({P}, 1), got {out.shape}",
        )
        run.write(out, registers[:P])
