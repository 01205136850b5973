"""Scalar registers of the engines' sequencers, for dynamic addresses and loop bounds."""

import numpy as np

from delta_trn.nki_kernels.simulator.core.errors import require
from delta_trn.nki_kernels.simulator.core.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.core.memory import HBM, SBUF, NkiTensor


class VirtualRegister:
    """A scalar that the chip holds: a scalar_offset of .ap, or a loop bound."""

    def __init__(self, value: int | None) -> None:
        self._value = value

    @property
    def value(self) -> int:
        require(self._value is not None, "register is read before anything was moved into it")
        assert self._value is not None
        return self._value

    @value.setter
    def value(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self.value

    def __bool__(self) -> bool:
        return self.value != 0


def register_alloc(x: int | None = None) -> VirtualRegister:
    """Return a new register, which holds x if x is not None."""
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: int | VirtualRegister) -> None:
    """Copy a constant or another register to dst."""
    dst.value = src.value if isinstance(src, VirtualRegister) else int(src)


def register_load(dst: VirtualRegister, src: NkiTensor) -> Handle:
    """Copy the one element of an HBM or SBUF tensor to dst."""
    run = Instruction("register_load", Engine.sync)
    values = run.read("src", src, (SBUF, *HBM))
    require(src.size == 1, f"register_load src must have one element, got {src.shape}")
    dst.value = int(values.reshape(()))
    return run.done()


def register_store(dst: NkiTensor, src: VirtualRegister) -> Handle:
    """Copy a register to the one element of dst."""
    run = Instruction("register_store", Engine.sync)
    out = run.dst("dst", dst, (SBUF, *HBM))
    require(out.size == 1, f"register_store dst must have one element, got {out.shape}")
    run.write(out, np.full(out.shape, src.value))
    return run.done()
