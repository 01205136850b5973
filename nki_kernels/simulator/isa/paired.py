"""Instructions between the two cores of a logical core: core_barrier and sendrecv."""

from delta_trn.nki_kernels.simulator.core.cores import Pair
from delta_trn.nki_kernels.simulator.core.instruction import Instruction, instruction
from delta_trn.nki_kernels.simulator.core.memory import HBM, SBUF, NkiTensor
from delta_trn.nki_kernels.simulator.isa.enums import dma_engine as dma_engines
from delta_trn.nki_kernels.simulator.isa.enums import engine as engines

__all__ = ["core_barrier", "sendrecv"]


def _pair(run: Instruction) -> Pair:
    """Return what the two cores share; refuse an instruction on one core."""
    run.needs_generation(3, run.op)
    run.require(run.machine.pair, "needs two cores; launch the kernel with kernel[2]")
    assert run.machine.pair is not None
    return run.machine.pair


@instruction(engines.gpsimd)
def core_barrier(run: Instruction, data: NkiTensor, cores: tuple[int, int], engine: engines = engines.gpsimd):
    """Wait until both cores have arrived; data is the shared HBM tensor that they wait for."""
    run.engine = engine
    pair = _pair(run)
    run.require(tuple(cores) == (0, 1), f"cores must be (0, 1), got {cores}")
    run.require(data.buffer in HBM, f"data must be in shared HBM, got {data.buffer.value}")
    pair.meet()


@instruction(engines.dma)
def sendrecv(
    run: Instruction, src: NkiTensor, dst: NkiTensor, send_to_rank: int, recv_from_rank: int, pipe_id: int,
    dma_engine: dma_engines = dma_engines.dma,
):  # fmt: skip
    """Send src to the other core's dst and receive its src into ours."""
    pair = _pair(run)
    values = run.read("src", src, (SBUF,))
    out = run.dst("dst", dst, (SBUF,))
    run.require(src.shape == out.shape, f"src and dst must share a shape, got {src.shape} and {out.shape}")
    run.has_dtype("dst", out, src.dtype)
    for role, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        run.require(rank in (0, 1), f"{role} must be 0 or 1, got {rank}")
    pair.mail[pipe_id, send_to_rank] = values.copy()
    pair.meet()
    received = pair.mail[pipe_id, run.machine.core]
    pair.meet()
    run.write(out, received)
