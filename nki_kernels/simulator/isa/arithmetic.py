"""What several instructions do alike: apply and fold an operator, choose an engine, read registers."""

from enum import Enum
from typing import Any

import numpy as np

from delta_trn.nki_kernels.simulator.core.errors import StrictError
from delta_trn.nki_kernels.simulator.core.instruction import Instruction
from delta_trn.nki_kernels.simulator.core.memory import NkiTensor
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines
from delta_trn.nki_kernels.simulator.isa.enums import reduce_cmd as commands
from delta_trn.nki_kernels.simulator.isa.operators import Operator


def alu_operator(run: Instruction, op: object, role: str = "op") -> Operator:
    """Return `op` if it is an ALU operator; raise TypeError otherwise."""
    if not isinstance(op, Operator):
        raise TypeError(f"{run.op} {role} must be an nl operator such as nl.add, got {op!r}")
    if op.alu is None:
        raise TypeError(f"{run.op} {role} must be an ALU operator, which {op!r} is not")
    return op


def activation_function(run: Instruction, op: object) -> Operator:
    """Return `op` if one Scalar instruction computes it; raise TypeError otherwise."""
    if not isinstance(op, Operator) or op.activation is None or op.composed:
        raise TypeError(f"{run.op} op must be an activation function such as nl.exp, got {op!r}")
    return op


def one_of(run: Instruction, role: str, op: object, names: tuple[str, ...]) -> Operator:
    """Return `op` if it is an operator of one of these names; refuse others."""
    listed = " or ".join(f"nl.{name}" for name in names)
    run.require(isinstance(op, Operator) and op.name in names, f"{role} must be {listed}, got {op!r}")
    assert isinstance(op, Operator)
    return op


def bits(run: Instruction, op: Operator, *tensors: NkiTensor) -> None:
    """Require integer tensors: bitwise operators cast nothing."""
    for t in tensors:
        if isinstance(t, NkiTensor):
            run.require(t.dtype.integer, f"with {op!r} needs integer tensors, got {t.dtype}")


def number(values: np.ndarray) -> np.ndarray:
    """Turn NumPy's booleans into what comparisons give on the engines, 1.0 and 0.0."""
    return values.astype(np.float32) if values.dtype == np.bool_ else values


def combine(op: Operator, a: Any, b: Any, reverse: bool = False) -> np.ndarray:
    """Return a op b, or b op a if reversed; unary operators ignore b."""
    assert op.alu is not None
    if op.arity == 1:
        return number(op.alu(a))
    return number(op.alu(b, a) if reverse else op.alu(a, b))


def fold(op: Operator, values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Fold `op` over trailing axes. Differences subtract every later element from the first."""
    assert op.alu is not None
    if op.name == "add":
        return values.sum(axis=axes, dtype=values.dtype)
    if op.name in ("maximum", "minimum", "multiply", "bitwise_and", "bitwise_or", "bitwise_xor"):
        return op.alu.reduce(values, axis=axes)  # pyright: ignore[reportFunctionMemberAccess]
    flat = values.reshape(*values.shape[: values.ndim - len(axes)], -1)
    result = flat[..., 0]
    for i in range(1, flat.shape[-1]):
        result = number(op.alu(result, flat[..., i]))
    return result


def check_member(run: Instruction, enumeration: str, member: object, *allowed: Enum) -> None:
    """Refuse what is no member of an enumeration of nisa, or none that the instruction takes."""
    if not isinstance(member, type(allowed[0])):
        raise TypeError(f"{run.op} {enumeration} must be a member of nisa.{enumeration}, got {member!r}")
    names = ", ".join(m.name for m in allowed)
    run.require(member in allowed, f"{enumeration} must be one of {names}, got {member.name}")


def pick(run: Instruction, engine: engines, *allowed: engines) -> None:
    """Let the engine that the kernel names, if it names one, run the instruction."""
    if engine is not engines.unknown:
        check_member(run, "engine", engine, *allowed)
        run.engine = engine


def open_registers(registers: np.ndarray, command: commands, identity: Any, initial: Any = None) -> None:
    """Reset or load an engine's reduction registers, if the command says so."""
    if command is commands.load_reduce:
        registers[:] = initial
    elif command in (commands.reset, commands.reset_reduce):
        registers[:] = identity


def read_registers(run: Instruction, reduce_res: NkiTensor | None, registers: np.ndarray) -> dict[str, Any]:
    """Write an engine's (P, 1) reduction registers to `reduce_res`, if the kernel wants them."""
    if reduce_res is not None:
        run.write_columns("reduce_res", reduce_res, registers)
    return {"reduces": reduce_res is not None}


def check_range(run: Instruction, function: Operator, values: np.ndarray) -> None:
    """Refuse inputs outside the only range that is documented for a function, the Scalar engine's."""
    if function.valid is None or not run.strict:
        return
    low, high = function.valid
    magnitude = np.abs(values) if function.name == "reciprocal" else values
    outside = (magnitude < np.float32(low)) | (magnitude > np.float32(high))
    if outside.any():
        where = [int(i) for i in np.argwhere(outside)[0]]
        what = f"no other range is documented for the {run.engine.name} engine"
        if run.engine is engines.scalar:
            what = "the Scalar engine returns wrong values outside it"
        raise StrictError(
            f"{run.op} {function!r} is valid for inputs in [{low:.3g}, {high:.3g}], got "
            f"{values[tuple(where)]:.6g} at {where}; {what}: scale the input into that range"
        )
