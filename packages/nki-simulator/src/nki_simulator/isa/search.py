"""Instructions that search and gather within partitions."""

import numpy as np

from nki_simulator.core.errors import StrictError
from nki_simulator.core.instruction import Instruction, instruction, lack
from nki_simulator.core.memory import SBUF, NkiTensor
from nki_simulator.isa.enums import engine as engines

__all__ = [
    "local_gather",
    "max8",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_n_gather",
    "nonzero_with_count",
    "sequence_bounds",
    "topk",
]

LEAST, MOST = 8, 16384


def _searchable(run: Instruction, role: str, tensor: NkiTensor) -> np.ndarray:
    """Check an input operand and its length, and return its rows in float32."""
    values = run.rows(role, tensor)
    count = values.shape[1]
    run.require(
        LEAST <= count <= MOST,
        f"{role} must have {LEAST} to {MOST} elements per partition, got {count}",
    )
    return values


@instruction(engines.vector)
def max8(run: Instruction, dst: NkiTensor, src: NkiTensor):
    """Write the eight largest elements of each partition to dst[P, 8], largest first."""
    values = _searchable(run, "src", src)
    run.write_columns("dst", dst, -np.sort(-values, axis=1)[:, :8])


def _eight(run: Instruction, vals: NkiTensor) -> np.ndarray:
    """Check the eight values per partition that an instruction looks for, and return them."""
    run.has_columns("vals", vals, vals.shape[0], 8)
    return run.rows("vals", vals)


@instruction(engines.vector)
def nc_find_index8(run: Instruction, dst: NkiTensor, data: NkiTensor, vals: NkiTensor):
    """Write to dst[P, 8] where each of vals[P, 8] occurs first in data;
    equal vals get successive places.
    """
    values = _searchable(run, "data", data)
    wanted = _eight(run, vals)
    out = run.dst("dst", dst)
    run.has_columns("dst", out, out.shape[0], 8)
    run.has_dtype("dst", out, "uint16", "uint32")
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


@instruction(engines.vector)
def nc_match_replace8(
    run: Instruction, dst: NkiTensor, data: NkiTensor, vals: NkiTensor, imm: float,
    dst_idx: NkiTensor | None = None,
):  # fmt: skip
    """Copy data to dst with the first occurrence of each of vals[P, 8],
    the last val first, set to imm.
    """
    result = _searchable(run, "data", data).copy()
    wanted = _eight(run, vals)
    positions = np.full(wanted.shape, -1, np.int64)
    taken = np.zeros(result.shape, bool)
    for p in range(result.shape[0]):
        for i in range(7, -1, -1):
            places = np.flatnonzero((result[p] == wanted[p, i]) & ~taken[p])
            if len(places):
                positions[p, i] = places[0]
                taken[p, places[0]] = True
    result[taken] = imm
    run.write_like(dst, result, data)
    if dst_idx is not None:
        run.write_columns("dst_idx", dst_idx, positions)


@instruction(engines.gpsimd)
def nc_n_gather(run: Instruction, dst: NkiTensor, data: NkiTensor, indices: NkiTensor):
    """Gather dst[p, i] = data[p, indices[p, i]], free axes flattened."""
    values = run.read("data", data, (SBUF,)).reshape(data.shape[0], -1)
    where = run.read("indices", indices, (SBUF,)).reshape(indices.shape[0], -1)
    run.has_dtype("indices", indices, "uint32")
    last, count = int(where.max()), values.shape[1]
    run.require(last < count, f"index {last} exceeds the {count} elements of a partition")
    gathered = np.take_along_axis(values, where.astype(np.int64), axis=1)
    run.write_like(dst, gathered, indices, (SBUF,), data.dtype)


@instruction(engines.gpsimd)
def local_gather(
    run: Instruction,
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
):
    """Gather free offsets of src_buffer in every group of 16 partitions.

    The group's slice of index lists the offsets, partition by partition first.
    """
    values = run.read("src_buffer", src_buffer, (SBUF,)).reshape(src_buffer.shape[0], -1)
    where = run.read("index", index, (SBUF,)).reshape(index.shape[0], -1)
    P = src_buffer.shape[0]
    run.require(
        index.shape[0] == P and P % 16 == 0,
        f"src_buffer and index must share a multiple of 16 partitions, got {P} and "
        f"{index.shape[0]}",
    )
    run.has_dtype("index", index, "uint16")
    run.require(
        num_elem_per_idx in (1, 2, 4, 8, 16, 32),
        f"num_elem_per_idx must be 1, 2, 4, 8, 16 or 32, got {num_elem_per_idx}",
    )
    valid = where.shape[1] * 16 if num_valid_indices is None else num_valid_indices
    parts = []
    for start in range(0, P, 16):
        picks = where[start : start + 16].T.reshape(-1)[:valid].astype(np.int64) * num_elem_per_idx
        columns = (picks[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        last = int(columns.max())
        run.require(
            last < values.shape[1], f"reads element {last} of {values.shape[1]} in a partition"
        )
        parts.append(values[start : start + 16][:, columns])
    out = run.dst("dst", dst, (SBUF,))
    run.has_dtype("dst", out, src_buffer.dtype)
    gathered = np.concatenate(parts)
    run.require(out.size == gathered.size, f"dst must hold {gathered.shape}, got {out.shape}")
    run.write(out, gathered)


@instruction(engines.gpsimd)
def sequence_bounds(run: Instruction, dst: NkiTensor, segment_ids: NkiTensor):
    """Write begin and end of the run of equal ids around each element to dst[1, 2, n].

    Padding, whose id is 0, gets n and -1.
    """
    run.require(segment_ids.shape[0] == 1, f"works on one partition, got {segment_ids.shape[0]}")
    ids = run.read("segment_ids", segment_ids, (SBUF,)).reshape(-1)
    n = len(ids)
    edges = np.flatnonzero(np.diff(ids)) + 1
    starts = np.concatenate([[0], edges])
    ends = np.concatenate([edges, [n]])
    group = np.searchsorted(edges, np.arange(n), side="right")
    first, last = np.where(ids == 0, n, starts[group]), np.where(ids == 0, -1, ends[group])
    out = run.dst("dst", dst, (SBUF,))
    run.require(out.size == 2 * n, f"dst must hold (1, 2, {n}), got {out.shape}")
    run.write(out, np.stack([first, last]))


@instruction(engines.gpsimd)
def nonzero_with_count(
    run: Instruction, dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1
):
    """Write the indices of nonzero elements, padding, and their count to partitions 0, 16, 32, ...

    The count is the last element of a partition.
    """
    run.needs_generation(3, "nonzero_with_count")
    values = run.read("src", src, (SBUF,)).reshape(src.shape[0], -1)
    out = run.dst("dst", dst, (SBUF,))
    n = values.shape[1]
    run.has_dtype("dst", out, "int32")
    run.has_columns("dst", out, out.shape[0], n + 1)
    if src.partition % 16 or out.partition % 16:
        raise StrictError("nonzero_with_count operands must start at a multiple of 16 partitions")
    result = out.array.reshape(out.shape[0], -1).copy()
    for p in range(0, values.shape[0], 16):
        hits = np.flatnonzero(values[p])
        result[p] = padding_val
        result[p, : len(hits)] = hits + index_offset
        result[p, n] = len(hits)
    run.write(out, result)


# the documentation does not say which partitions hold its result
topk = lack("topk", 2, "take max8 and nc_match_replace8 in turn")
