"""The Tensor engine: nc_matmul and the transpositions."""

import numpy as np

from nki_simulator.core.chip import TILES
from nki_simulator.core.dtypes import FLOAT8, MATMUL, round_to, to_float32
from nki_simulator.core.errors import StrictError
from nki_simulator.core.instruction import Instruction, instruction, lack
from nki_simulator.core.memory import (
    BY_MATMUL,
    BY_OTHER,
    ON_CHIP,
    PSUM,
    SBUF,
    UNWRITTEN,
    NkiTensor,
)
from nki_simulator.core.targets import PARTITIONS, PSUM_BANK
from nki_simulator.isa.enums import engine as engines
from nki_simulator.isa.enums import matmul_perf_mode

__all__ = ["nc_matmul", "nc_matmul_mx", "nc_transpose", "quantize_mx"]

WIDE = ("float32", "tfloat32")


@instruction(engines.tensor)
def nc_matmul(
    run: Instruction,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, int] | tuple[()] = (),
    tile_size: tuple[int, int] | tuple[()] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
):
    """Compute dst[M, N] = stationary[K, M].T @ moving[K, N], or add it to dst, in float32.

    K is the partition axis of both inputs in SBUF; dst is in PSUM. accumulate=False overwrites,
    True adds to what a matmul wrote, None overwrites the first time and adds afterwards.
    """
    K = stationary.shape[0] if isinstance(stationary, NkiTensor) else 0
    run.require(K <= PARTITIONS, f"Matmul contraction dimension {K} exceeds pmax={PARTITIONS}")
    s_values = run.read("stationary", stationary, (SBUF,))
    m_values = run.read("moving", moving, (SBUF,))
    if perf_mode is not matmul_perf_mode.none:
        run.needs_generation(3, "nc_matmul perf_mode")
        run.has_dtype("stationary", stationary, *FLOAT8)
        run.has_dtype("moving", moving, *FLOAT8)
        run.require(
            stationary.shape[1] == 2 and moving.shape[1] == 2,
            "double_row splits the contraction over a first free axis of 2, got "
            f"{stationary.shape} and {moving.shape}",
        )
        s_values = np.concatenate([s_values[:, 0], s_values[:, 1]])
        m_values = np.concatenate([m_values[:, 0], m_values[:, 1]])
    elif max(stationary.array.ndim, moving.array.ndim) > 2:
        role = "stationary" if stationary.array.ndim > 2 else "moving"
        run.machine.refuse("a matmul operand of three dimensions", f"nc_matmul {role}")
    lhs = to_float32(s_values.reshape(s_values.shape[0], -1))
    rhs = to_float32(m_values.reshape(m_values.shape[0], -1))
    _check_shapes(run, K, moving.shape[0], lhs.shape[1], rhs.shape[1], tile_position, tile_size)
    _check_dtypes(run, dst, stationary, moving)
    if run.strict:
        _check_onezero("stationary", is_stationary_onezero, lhs)
        _check_onezero("moving", is_moving_onezero, rhs)
    out = run.dst("dst", dst, (PSUM,))
    column = tile_position[1] if tile_position else 0
    run.forbid(
        out.partition != column,
        f"dst `{out.name}` starts at partition {out.partition}, but column {column} of the array "
        f"writes partition {column}; set tile_position and tile_size to the columns above dst",
    )
    rounding = run.machine.numerics.matmul
    if rounding != "float32" and stationary.dtype == "float32":
        lhs, rhs = round_to(lhs, rounding), round_to(rhs, rounding)
    product = down_the_rows(lhs, rhs)
    if product.shape != out.shape:
        _check_output(out, product)
        product = product.reshape(out.shape)
    _check_bank(run, out)
    adds = _accumulates(run, out, accumulate)
    run.machine.follow_product(out, run.index, adds, "nc_matmul")
    if K <= 64 and 16 < lhs.shape[1] <= 32:
        run.machine.refuse_on_chip(
            TILES, f"nc_matmul stationary of {K} rows and {lhs.shape[1]} columns"
        )
    run.write(out, to_float32(out.array) + product if adds else product, BY_MATMUL)
    wide = stationary.dtype == "float32" or moving.dtype == "float32"
    return {
        "K": K, "M": lhs.shape[1], "N": rhs.shape[1], "fp32": wide,
        "onezero": is_stationary_onezero or is_moving_onezero, "accumulate": adds,
    }  # fmt: skip


def down_the_rows(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Return lhs.T @ rhs, with one float32 sum per element, to which the rows are added in their
    order.

    On the chip, partial sums move down the array from row to row. A BLAS adds the rows in several
    sums at once, which at 128 rows is up to twice as exact, and where terms cancel their neighbors,
    as with keys that repeat, up to three times less exact.
    """
    if lhs.shape[1] == rhs.shape[1] == 1:  # einsum would add these terms in several sums
        return np.add.accumulate(lhs[:, 0] * rhs[:, 0], dtype=np.float32)[-1:].reshape(1, 1)
    return np.einsum("km,kn->mn", np.ascontiguousarray(lhs), np.ascontiguousarray(rhs))


def _check_shapes(run, K, K_moving, M, N, tile_position, tile_size) -> None:
    rows, columns = PARTITIONS, PARTITIONS
    given = bool(tile_position) == bool(tile_size)
    run.require(given, "tile_position and tile_size must both be given")
    if tile_size:
        rows, columns = tile_size
        least = 64 if run.target.generation == 2 else 32
        sizes = tuple(n for n in (32, 64, 128) if n >= least)
        run.require(
            rows in sizes and columns in sizes,
            f"tile_size {tile_size} must be of {', '.join(map(str, sizes))} on {run.target.name}",
        )
        run.require(
            all(
                0 <= p < 128 and p % size == 0
                for p, size in zip(tile_position, tile_size, strict=True)
            ),
            f"tile_position {tile_position} must be multiples of tile_size {tile_size} below 128",
        )
    run.require(
        K_moving == K,
        f"Matmul contraction dimension mismatch: stationary[0]={K} != moving[0]={K_moving}",
    )
    run.require(rows >= K, f"Matmul contraction dimension {K} exceeds the tile's rows={rows}")
    run.require(
        columns >= M, f"Matmul stationary free dimension {M} exceeds gemm_stationary_fmax={columns}"
    )
    limit = run.target.moving_fmax
    run.require(limit >= N, f"Matmul moving free dimension {N} exceeds gemm_moving_fmax={limit}")


def _check_dtypes(
    run: Instruction, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor
) -> None:
    generation = run.target.generation
    for role, t in (("stationary", stationary), ("moving", moving)):
        run.has_dtype(role, t, *MATMUL)
        if t.dtype == "float8_e4m3fn":
            run.needs_generation(4, f"nc_matmul {role} dtype float8_e4m3fn")
    run.require(
        (stationary.dtype in WIDE) == (moving.dtype in WIDE),
        f"operands must both be float32/tfloat32 or neither, got stationary {stationary.dtype} and "
        f"moving {moving.dtype}",
    )
    if isinstance(dst, NkiTensor) and dst.buffer is PSUM:
        allowed = ("float32",) if generation < 4 else ("float32", "bfloat16")
        names = " or ".join(allowed)
        run.require(
            dst.dtype in allowed, f"dst dtype must be {names} on gen{generation}, got {dst.dtype}"
        )


def _check_onezero(role: str, declared: bool, values: np.ndarray) -> None:
    if declared and not ((values == 0) | (values == 1)).all():
        bad = values[(values != 0) & (values != 1)].flat[0]
        raise StrictError(f"nc_matmul is_{role}_onezero is declared, but {role} holds {bad}")


def _check_output(out: NkiTensor, product: np.ndarray) -> None:
    if out.size != product.size or out.shape[0] != product.shape[0]:
        raise ValueError(f"cannot reshape the result of shape {product.shape} into {out.shape}")


def _check_bank(run: Instruction, out: NkiTensor) -> None:
    if run.target.generation >= 4 or out.storage.free_bytes <= PSUM_BANK:
        return
    begin, end = out.span
    first, last = begin // PSUM_BANK, (end - 1) // PSUM_BANK
    run.forbid(
        first != last,
        f"dst `{out.name}` spans psum banks {first} to {last}; one output must fit one bank of "
        f"{PSUM_BANK} bytes per partition on {run.target.name}",
    )


def _accumulates(run: Instruction, out: NkiTensor, accumulate: bool | None) -> bool:
    if accumulate is not None and not isinstance(accumulate, (bool, np.bool_)):
        raise TypeError(f"nc_matmul accumulate must be True, False or None, got {accumulate!r}")
    if accumulate is False:
        return False
    codes = out.storage.writers(out.array)
    writers = {int(code) for code in np.unique(codes)}
    if accumulate is None and writers == {UNWRITTEN}:
        return False
    if not run.strict:
        return accumulate is True or writers != {BY_OTHER}
    zeros = writers == {BY_OTHER} and not out.array.any()
    if UNWRITTEN in writers:
        what = (
            "uninitialized PSUM" if writers == {UNWRITTEN} else "PSUM that is only partly written"
        )
        raise StrictError(
            f"nc_matmul accumulates onto {what} in `{out.name}` {out.shape}; start with "
            "accumulate=False"
        )
    if accumulate is None and zeros:
        return False  # on zeros of a memset, overwriting and adding give the same
    if zeros and run.target.generation < 4:
        run.machine.refuse(
            "accumulation onto zeros of another instruction", f"nc_matmul dst `{out.name}`"
        )
    elif BY_OTHER in writers and run.target.generation < 4:
        raise StrictError(
            f"nc_matmul accumulates onto PSUM `{out.name}` that a non-matmul instruction wrote "
            f"last; on gen{run.target.generation} that is undefined, pass accumulate=False or add "
            "on the Vector engine"
        )
    return True


@instruction(engines.tensor)
def nc_transpose(
    run: Instruction, dst: NkiTensor, data: NkiTensor, engine: engines = engines.unknown
):
    """Transpose data[P, F], its free axes flattened, to dst[F, P].

    The Tensor engine takes up to 128 x 128 from SBUF to PSUM, the Vector engine up to 32 x 32 in
    any on-chip memory.
    """
    shape = data.shape if isinstance(data, NkiTensor) else (0,)
    F = int(np.prod(shape[1:]))
    in_psum = isinstance(dst, NkiTensor) and dst.buffer is PSUM
    from_sbuf = isinstance(data, NkiTensor) and data.buffer is SBUF
    if shape[0] <= 32 and F <= 32 and not (in_psum and from_sbuf):
        run.engine = engines.vector
    run.pick(engine, engines.tensor, engines.vector)
    tensor = run.engine is engines.tensor
    values = run.read("data", data, (SBUF,) if tensor else ON_CHIP)
    out = run.dst("dst", dst, (PSUM,) if tensor else ON_CHIP)
    limit = 128 if tensor else 32
    run.require(
        shape[0] <= limit and limit >= F,
        f"on the {run.engine.name} engine takes up to {limit} x {limit}, got {shape[0]} x {F}",
    )
    widens = tensor and run.target.generation == 2 and str(data.dtype) == "bfloat16"
    if widens and out.dtype == "float32":
        run.machine.refuse("a transposition into a wider dtype", "nc_transpose of bfloat16")
        values = to_float32(values)
    else:
        run.has_dtype("dst", out, data.dtype)
    flat = values.reshape(shape[0], F).T
    _check_output(out, flat)
    if tensor and run.strict:
        _check_tensor_transpose(run, out, data, values)
    if tensor:
        run.machine.follow_product(out, run.index, False, "nc_transpose")
    run.write(out, flat, BY_MATMUL if tensor else BY_OTHER)
    return {"P": shape[0], "F": F, "fp32": data.dtype == "float32"}


def _check_tensor_transpose(
    run: Instruction, out: NkiTensor, data: NkiTensor, values: np.ndarray
) -> None:
    _check_bank(run, out)
    if run.target.generation > 2:
        return
    run.forbid(
        data.dtype != "float32" and out.dtype != "float32",
        f"of {data.dtype} on the Tensor engine would write {data.dtype} to psum, a matmul's output "
        "must be float32 on gen2; transpose float32, or use nc_matmul with an identity",
    )
    if not np.isfinite(values).all():
        where = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
        raise StrictError(
            f"nc_transpose data `{data.name}` holds {values[tuple(where)]} at {where}; on gen2 the "
            "Tensor engine multiplies by an identity, and NaN or Inf poison whole rows"
        )


# gen4's products of packed tiles, 4 and 8 bits, which have no dtype here
nc_matmul_mx = lack("nc_matmul_mx", 4, "multiply bfloat16 tiles with nc_matmul")
quantize_mx = lack("quantize_mx", 4, "keep bfloat16 tiles")
