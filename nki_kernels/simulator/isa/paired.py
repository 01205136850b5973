"""Instructions between the two cores of a logical core: core_barrier and sendrecv."""

from delta_trn.nki_kernels.simulator.core.cores import Pair
from delta_trn.nki_kernels.simulator.core.errors import ConstraintError, require
from delta_trn.nki_kernels.simulator.core.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.core.memory import HBM, SBUF, NkiTensor
from delta_trn.nki_kernels.simulator.isa.enums import dma_engine as dma_engines
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines


def _pair(run: Instruction) -> Pair:
    """Return what the two cores share; refuse an instruction on one core."""
    run.needs_generation(3, run.op)
    if run.machine.pair is None:
        raise ConstraintError(f"{run.op} needs two cores; launch the kernel with kernel[2]")
    return run.machine.pair


def core_barrier(
    data: NkiTensor, cores: tuple[int, int], engine: engines = engines.gpsimd, name: str | None = None
) -> Handle:
    """Wait until both cores have arrived; data is the shared HBM tensor that they wait for."""
    run = Instruction("core_barrier", engine)
    pair = _pair(run)
    require(tuple(cores) == (0, 1), f"core_barrier cores must be (0, 1), got {cores}")
    require(data.buffer in HBM, f"core_barrier data must be in shared HBM, got {data.buffer.value}")
    pair.meet()
    return run.done()


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engines = dma_engines.dma,
    name: str | None = None,
) -> Handle:
    """Send src to the other core's dst and receive its src into ours."""
    run = Instruction("sendrecv", Engine.dma)
    pair = _pair(run)
    values = run.read("src", src, (SBUF,))
    out = run.dst("dst", dst, (SBUF,))
    require(
        src.shape == out.shape and src.dtype == out.dtype,
        f"sendrecv src and dst must share shape and dtype, got {src.shape} {src.dtype} and {out.shape} "
        f"{out.dtype}",
    )
    for role, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        require(rank in (0, 1), f"sendrecv {role} must be 0 or 1, got {rank}")
    pair.mail[pipe_id, send_to_rank] = values.copy()
    pair.meet()
    received = pair.mail[pipe_id, run.machine.core]
    pair.meet()
    run.write(out, received)
    return run.done(bytes=src.size * src.dtype.itemsize)
