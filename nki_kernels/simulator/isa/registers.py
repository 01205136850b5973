"""Scalar registers of the engines' sequencers, for dynamic addresses and loop bounds."""

import numpy as np

from delta_trn.nki_kernels.simulator.core.errors import require
from delta_trn.nki_kernels.simulator.core.instruction import Instruction, instruction
from delta_trn.nki_kernels.simulator.core.memory import HBM, SBUF, NkiTensor
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines

__all__ = ["VirtualRegister", "register_alloc", "register_load", "register_move", "register_store"]


class VirtualRegister:
    """A scalar that the chip holds: a scalar_offset of .ap, or a loop bound."""

    def __init__(self, value: int | None) -> None:
        self.content = value

    def __index__(self) -> int:
        require(self.content is not None, "register is read before anything was moved into it")
        assert self.content is not None
        return self.content

    def __bool__(self) -> bool:
        return int(self) != 0


def register_alloc(x: int | None = None) -> VirtualRegister:
    """Return a new register, which holds x if x is not None."""
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: int | VirtualRegister) -> None:
    """Copy a constant or another register to dst."""
    dst.content = int(src)


@instruction(engines.sync)
def register_load(run: Instruction, dst: VirtualRegister, src: NkiTensor):
    """Copy the one element of an HBM or SBUF tensor to dst."""
    values = run.read("src", src, (SBUF, *HBM))
    run.require(src.size == 1, f"src must have one element, got {src.shape}")
    dst.content = int(values.reshape(()))


@instruction(engines.sync)
def register_store(run: Instruction, dst: NkiTensor, src: VirtualRegister):
    """Copy a register to the one element of dst."""
    out = run.dst("dst", dst, (SBUF, *HBM))
    run.require(out.size == 1, f"dst must have one element, got {out.shape}")
    run.write(out, np.full(out.shape, int(src)))
