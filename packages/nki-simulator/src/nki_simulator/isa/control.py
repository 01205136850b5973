"""What controls a run: scalar registers of the engines' sequencers,
and the two cores of a logical core.
"""

import numpy as np

from nki_simulator.core.cores import Pair
from nki_simulator.core.errors import require
from nki_simulator.core.instruction import Instruction, instruction
from nki_simulator.core.memory import HBM, SBUF, NkiTensor
from nki_simulator.isa.enums import dma_engine as dma_engines
from nki_simulator.isa.enums import engine as engines

__all__ = [
    "VirtualRegister",
    "core_barrier",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "sendrecv",
]


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


def _pair(run: Instruction) -> Pair:
    """Return what the two cores share; refuse an instruction on one core."""
    run.needs_generation(3, run.op)
    run.require(run.machine.pair, "needs two cores; launch the kernel with kernel[2]")
    assert run.machine.pair is not None
    return run.machine.pair


@instruction(engines.gpsimd)
def core_barrier(
    run: Instruction, data: NkiTensor, cores: tuple[int, int], engine: engines = engines.gpsimd
):
    """Wait until both cores have arrived; data is the shared HBM tensor that they wait for."""
    run.engine = engine
    pair = _pair(run)
    run.require(tuple(cores) == (0, 1), f"cores must be (0, 1), got {cores}")
    run.require(data.buffer in HBM, f"data must be in shared HBM, got {data.buffer.value}")
    pair.meet()


@instruction(engines.dma)
def sendrecv(
    run: Instruction,
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engines = dma_engines.dma,
):
    """Send src to the other core's dst and receive its src into ours."""
    pair = _pair(run)
    values = run.read("src", src, (SBUF,))
    out = run.dst("dst", dst, (SBUF,))
    run.require(
        src.shape == out.shape, f"src and dst must share a shape, got {src.shape} and {out.shape}"
    )
    run.has_dtype("dst", out, src.dtype)
    for role, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        run.require(rank in (0, 1), f"{role} must be 0 or 1, got {rank}")
    pair.mail[pipe_id, send_to_rank] = values.copy()
    pair.meet()
    received = pair.mail[pipe_id, run.machine.core]
    pair.meet()
    run.write(out, received)
