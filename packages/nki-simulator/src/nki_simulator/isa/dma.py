"""The DMA engines: copies between HBM and SBUF, with casts, gathers and scatters."""

from functools import reduce

import numpy as np

from nki_simulator.core.chip import TRANSPOSE
from nki_simulator.core.dtypes import store, to_float32
from nki_simulator.core.instruction import Instruction, instruction
from nki_simulator.core.memory import BY_OTHER, HBM, SBUF, UNWRITTEN, NkiTensor
from nki_simulator.core.operators import Operator
from nki_simulator.isa.enums import dge_mode as dge_modes
from nki_simulator.isa.enums import engine as engines
from nki_simulator.isa.enums import oob_mode as oob_modes

__all__ = ["dma_compute", "dma_copy", "dma_transpose"]

DMA_MEMORY = (SBUF, *HBM)


@instruction(engines.dma)
def dma_copy(
    run: Instruction, dst: NkiTensor, src: NkiTensor, priority: int | None = None,
    oob_mode: oob_modes = oob_modes.error, dge_mode: dge_modes = dge_modes.unknown,
    engine: engines = engines.unknown,
):  # fmt: skip
    """Copy src to dst between HBM and SBUF; different dtypes are cast through float32."""
    if priority is not None:
        run.needs_generation(4, "dma_copy priority")
    if dge_mode is dge_modes.hwdge:
        run.needs_generation(3, "dma_copy dge_mode.hwdge")
    out = run.dst("dst", dst, DMA_MEMORY)
    keep = None
    if isinstance(src, NkiTensor) and src.indirection is not None:
        keep = _in_bounds(run, src, oob_mode)
        flat, where = src.indirection
        src.indirection = (flat, np.where(keep, where, 0))
        values = run.read("src", src, DMA_MEMORY)
        src.indirection = (flat, where)
    else:
        values = run.read("src", src, DMA_MEMORY)
    run.require(
        out.size == src.size,
        f"requires src and dst to have the same number of elements, got {src.shape} and "
        f"{out.shape}",
    )
    if out.dtype != src.dtype:
        values = to_float32(values)
    if out.indirection is not None:
        _scatter(run, out, values, oob_mode)
    elif keep is not None and not keep.all():
        run.write(out, np.where(keep.reshape(out.shape), values.reshape(out.shape), out.array))
    else:
        run.write(out, values)


def _in_bounds(run: Instruction, tensor: NkiTensor, oob_mode: oob_modes) -> np.ndarray:
    """Return which indices of a gather or scatter are inside;
    refuse others unless they are skipped.
    """
    assert tensor.indirection is not None
    flat, where = tensor.indirection
    inside = (where >= 0) & (where < flat.size)
    if oob_mode is oob_modes.error and not inside.all():
        bad = int(where[~inside].flat[0])
        run.require(
            False, f"indirect access out of bounds: element {bad} of {flat.size} in `{tensor.name}`"
        )
    return inside


def _scatter(run: Instruction, out: NkiTensor, values: np.ndarray, oob_mode: oob_modes) -> None:
    keep = _in_bounds(run, out, oob_mode)
    assert out.indirection is not None
    flat, where = out.indirection
    rounded = np.empty(values.shape, out.array.dtype)
    store(rounded, out.dtype, values)
    flat[where[keep]] = rounded.reshape(where.shape)[keep]
    storage, life = out.storage, out.storage.life
    life.first = run.index if life.first is None else life.first
    life.last = run.index
    if storage.writer is UNWRITTEN:
        storage.writer = np.zeros(storage.base.size, np.uint8)
    if not isinstance(storage.writer, int):
        storage.writer[where[keep]] = BY_OTHER


@instruction(engines.dma)
def dma_transpose(
    run: Instruction, dst: NkiTensor, src: NkiTensor, axes: tuple[int, ...] | None = None,
    priority: int | None = None, dge_mode: dge_modes = dge_modes.unknown,
    oob_mode: oob_modes = oob_modes.error,
):  # fmt: skip
    """Copy src with its axes permuted to dst, which must have the permuted shape;
    None swaps two axes.
    """
    if dge_mode is dge_modes.hwdge:
        run.needs_generation(3, "dma_transpose dge_mode.hwdge")
    values = run.read("src", src, DMA_MEMORY)
    default = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
    order = tuple(axes) if axes is not None else default.get(src.ndim, ())
    run.require(sorted(order) == list(range(src.ndim)), f"axes {order} do not permute {src.shape}")
    moved = values.transpose(order)
    out = run.dst("dst", dst, DMA_MEMORY)
    run.require(out.shape == moved.shape, f"dst shape must be {moved.shape}, got {out.shape}")
    run.has_dtype("dst", out, src.dtype)
    if src.buffer is SBUF and out.buffer is SBUF:
        run.machine.refuse_on_chip(TRANSPOSE, f"dma_transpose of `{src.name}` from SBUF to SBUF")
    run.write(out, moved)


@instruction(engines.dma)
def dma_compute(
    run: Instruction,
    dst: NkiTensor,
    srcs: list[NkiTensor],
    reduce_op: Operator,
    scales: list[float] | None = None,
    unique_indices: bool = True,
    oob_mode: oob_modes = oob_modes.error,
):
    """Reduce the scaled srcs to dst, computed in float32 by the DMA engines."""
    op = run.one_of("reduce_op", reduce_op, ("add", "multiply", "maximum", "minimum"))
    factors = [1.0] * len(srcs) if scales is None else scales
    out = run.dst("dst", dst, DMA_MEMORY)
    terms = []
    for i, (src, factor) in enumerate(zip(srcs, factors, strict=True)):
        run.require(src.size == out.size, f"srcs[{i}] has shape {src.shape}, dst has {out.shape}")
        values = to_float32(run.read(f"srcs[{i}]", src, DMA_MEMORY))
        terms.append(values.reshape(out.shape) * np.float32(factor))
    assert op.alu is not None
    run.write(out, reduce(op.alu, terms))
