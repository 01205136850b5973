"""Instructions that search and gather within partitions: the eight largest, where they are, gathers by "
"index."""

import numpy as np

from delta_trn.nki_kernels.simulator.dtypes import to_float32
from delta_trn.nki_kernels.simulator.errors import ConstraintError, StrictError, require
from delta_trn.nki_kernels.simulator.machine import Engine, Handle, Instruction
from delta_trn.nki_kernels.simulator.memory import SBUF, NkiTensor

LEAST, MOST = 8, 16384


def _rows(run: Instruction, role: str, tensor: NkiTensor) -> np.ndarray:
    values = to_float32(run.read(role, tensor)).reshape(tensor.shape[0], -1)
    count = values.shape[1]
    require(
        LEAST <= count <= MOST,
        f"{run.op} {role} must have {LEAST} to {MOST} elements per partition, got {count}",
    )
    return values


def _eight(run: Instruction, role: str, tensor: NkiTensor) -> None:
    require(
        tensor.size == 8 * tensor.shape[0],
        f"{run.op} {role} must have 8 elements per partition, got {tensor.shape}",
    )


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> Handle:
    """dst[P, 8] = the eight largest elements of each partition, descending."""
    run = Instruction("max8", Engine.vector)
    values = _rows(run, "src", src)
    out = run.dst("dst", dst)
    _eight(run, "dst", out)
    run.write(out, -np.sort(-values, axis=1)[:, :8])
    return run.done()


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> Handle:
    """dst[P, 8] = where each of vals[P, 8] occurs first in data; duplicates take successive places."""
    run = Instruction("nc_find_index8", Engine.vector)
    values = _rows(run, "data", data)
    _eight(run, "vals", vals)
    wanted = to_float32(run.read("vals", vals)).reshape(vals.shape[0], 8)
    out = run.dst("dst", dst)
    _eight(run, "dst", out)
    require(
        out.dtype in ("uint16", "uint32"),
        f"nc_find_index8 dst dtype must be uint16 or uint32, got {out.dtype}",
    )
    missing = (1 << (8 * out.dtype.itemsize)) - 1
    result = np.full((values.shape[0], 8), missing, np.int64)
    for p, row in enumerate(values):
        seen: dict[float, int] = {}
        for i, value in enumerate(wanted[p]):
            places = np.flatnonzero(row == value)
            nth = seen.get(float(value), 0)
            seen[float(value)] = nth + 1
            if nth < len(places):
                result[p, i] = places[nth]
    run.write(out, result)
    return run.done()


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> Handle:
    """dst = data with the first occurrence of each of vals[P, 8] replaced by imm; vals are taken from the "
    "last."""
    run = Instruction("nc_match_replace8", Engine.vector)
    result = _rows(run, "data", data).copy()
    _eight(run, "vals", vals)
    wanted = to_float32(run.read("vals", vals)).reshape(vals.shape[0], 8)
    found = np.full(wanted.shape, -1, np.int64)
    taken = np.zeros(result.shape, bool)
    for p in range(result.shape[0]):
        for i in range(7, -1, -1):
            places = np.flatnonzero((result[p] == wanted[p, i]) & ~taken[p])
            if len(places):
                found[p, i] = places[0]
                taken[p, places[0]] = True
    result[taken] = imm
    out = run.dst("dst", dst)
    run.same_elements(out, data, "dst", "data")
    run.write(out, result)
    if dst_idx is not None:
        index = run.dst("dst_idx", dst_idx)
        _eight(run, "dst_idx", index)
        run.write(index, found.astype(index.array.dtype))
    return run.done()


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> Handle:
    """dst[p, i] = data[p, indices[p, i]], free axes flattened."""
    run = Instruction("nc_n_gather", Engine.gpsimd)
    values = run.read("data", data, (SBUF,)).reshape(data.shape[0], -1)
    where = run.read("indices", indices, (SBUF,)).reshape(indices.shape[0], -1)
    require(indices.dtype == "uint32", f"nc_n_gather indices dtype must be uint32, got {indices.dtype}")
    out = run.dst("dst", dst, (SBUF,))
    require(out.dtype == data.dtype, f"nc_n_gather dst dtype must be {data.dtype}, got {out.dtype}")
    run.same_elements(out, indices, "dst", "indices")
    require(
        int(where.max()) < values.shape[1],
        f"nc_n_gather index {int(where.max())} exceeds the {values.shape[1]} elements of a partition",
    )
    run.write(out, np.take_along_axis(values, where.astype(np.int64), axis=1))
    return run.done()


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> Handle:
    """Every group of 16 partitions gathers free offsets of src_buffer, listed partition-first in its slice "
    "of index."""
    run = Instruction("local_gather", Engine.gpsimd)
    values = run.read("src_buffer", src_buffer, (SBUF,)).reshape(src_buffer.shape[0], -1)
    where = run.read("index", index, (SBUF,)).reshape(index.shape[0], -1)
    P = src_buffer.shape[0]
    require(
        index.shape[0] == P and P % 16 == 0,
        f"local_gather src_buffer and index must share a multiple of 16 partitions, got {P} and "
        f"{index.shape[0]}",
    )
    require(index.dtype == "uint16", f"local_gather index dtype must be uint16, got {index.dtype}")
    require(
        num_elem_per_idx in (1, 2, 4, 8, 16, 32),
        f"local_gather num_elem_per_idx must be 1, 2, 4, 8, 16 or 32, got {num_elem_per_idx}",
    )
    valid = where.shape[1] * 16 if num_valid_indices is None else num_valid_indices
    parts = []
    for start in range(0, P, 16):
        picks = where[start : start + 16].T.reshape(-1)[:valid].astype(np.int64) * num_elem_per_idx
        columns = (picks[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        if columns.max() >= values.shape[1]:
            raise ConstraintError(
                f"local_gather reads element {int(columns.max())} of {values.shape[1]} in a partition"
            )
        parts.append(values[start : start + 16][:, columns])
    out = run.dst("dst", dst, (SBUF,))
    require(
        out.dtype == src_buffer.dtype, f"local_gather dst dtype must be {src_buffer.dtype}, got {out.dtype}"
    )
    gathered = np.concatenate(parts)
    require(out.size == gathered.size, f"local_gather dst must hold {gathered.shape}, got {out.shape}")
    run.write(out, gathered)
    return run.done()


def sequence_bounds(dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> Handle:
    """dst[1, 2, n] = first index and end of the run of equal ids around each element; padding (0) gives n "
    "and -1."""
    run = Instruction("sequence_bounds", Engine.gpsimd)
    require(segment_ids.shape[0] == 1, f"sequence_bounds works on one partition, got {segment_ids.shape[0]}")
    ids = run.read("segment_ids", segment_ids, (SBUF,)).reshape(-1)
    n = len(ids)
    edges = np.flatnonzero(np.diff(ids)) + 1
    starts = np.concatenate([[0], edges])
    ends = np.concatenate([edges, [n]])
    group = np.searchsorted(edges, np.arange(n), side="right")
    first, last = np.where(ids == 0, n, starts[group]), np.where(ids == 0, -1, ends[group])
    out = run.dst("dst", dst, (SBUF,))
    require(out.size == 2 * n, f"sequence_bounds dst must hold (1, 2, {n}), got {out.shape}")
    run.write(out, np.stack([first, last]))
    return run.done()


def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> Handle:
    """Partitions 0, 16, 32, ...: indices of nonzero elements, padding, and their count as the last "
    "element."""
    run = Instruction("nonzero_with_count", Engine.gpsimd)
    run.needs_generation(3, "nonzero_with_count")
    values = run.read("src", src, (SBUF,)).reshape(src.shape[0], -1)
    out = run.dst("dst", dst, (SBUF,))
    n = values.shape[1]
    if out.dtype != "int32" or out.size != out.shape[0] * (n + 1):
        raise ConstraintError(
            f"nonzero_with_count dst must be int32 with {n + 1} elements, got {out.dtype} {out.shape}"
        )
    if src.partition % 16 or out.partition % 16:
        raise StrictError("nonzero_with_count operands must start at a multiple of 16 partitions")
    result = out.array.reshape(out.shape[0], -1).copy()
    for p in range(0, values.shape[0], 16):
        hits = np.flatnonzero(values[p])
        result[p] = padding_val
        result[p, : len(hits)] = hits + index_offset
        result[p, n] = len(hits)
    run.write(out, result)
    return run.done()
