"""nki.language, imported as `nl`: dtypes, buffers, operators,
tensors and tile functions, named as in NKI.
"""

# ruff: noqa: F401, F403 (a namespace: every imported name is part of nl)

import builtins
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from nki_simulator.core import dtypes as _dtypes
from nki_simulator.core import operators as _operators
from nki_simulator.core.dtypes import DType, dtype_of
from nki_simulator.core.errors import StrictError, require
from nki_simulator.core.machine import current
from nki_simulator.core.memory import (
    HBM,
    PSUM,
    SBUF,
    DynamicSlice,
    MemoryRegion,
    NkiTensor,
    region_of,
)
from nki_simulator.core.operators import Operator
from nki_simulator.core.targets import PARTITIONS, PSUM_BANK, PSUM_BANKS
from nki_simulator.isa.dma import dma_copy
from nki_simulator.isa.elementwise import memset, tensor_copy
from nki_simulator.isa.generate import dropout as _isa_dropout
from nki_simulator.isa.search import nc_n_gather
from nki_simulator.tile_functions import *
from nki_simulator.tile_functions import apply, issue, reduce, transpose

globals().update(MemoryRegion.__members__)  # sbuf, psum, hbm, private_hbm, shared_hbm


def _view(region: MemoryRegion, dtype: object, shape: Any = None, size: Any = None) -> NkiTensor:
    """Return a new tensor in a memory, as `sbuf.view(dtype=..., shape=...)` of AWS's quickstart of
    SDK 2.27 and 2.28 does; others write size= for shape=.
    """
    if (shape is None) == (size is None):
        raise TypeError(f"{region.value}.view needs either shape= or size=")
    return current().allocate(shape if size is None else size, dtype, region)


MemoryRegion.view = _view  # pyright: ignore[reportAttributeAccessIssue]


class TileOperator(Operator):
    """An operator that is also a function of tiles, as in nl.add(x, y)."""

    def __init__(self, operator: Operator) -> None:
        vars(self).update(vars(operator))

    def __call__(self, *operands: Any, dtype: object = None) -> Any:
        return apply(self, operands, dtype)


# nl.float32, nl.add and so on: every dtype and every operator under its own name.
globals().update({str(dtype): dtype for dtype in _dtypes.ALL})
globals().update({operator.name: TileOperator(operator) for operator in _operators.OPERATORS})


class NKIObject:
    """Base of a kernel's configuration classes, whose fields become constructor arguments as in
    NKI.

    To the compiler, class attributes without annotations are fields too. They get annotations here,
    so that a
    @dataclass decorator sees them.
    """

    def __init_subclass__(cls) -> None:
        notes = inspect.get_annotations(cls)
        fields = {name: note for name, note in notes.items() if name not in vars(cls)}
        for name, default in vars(cls).items():
            if not (name.startswith("__") or callable(default) or hasattr(default, "__get__")):
                fields[name] = notes.get(name, Any)
        cls.__annotations__ = fields

    def __init__(self, *values: Any, **fields: Any) -> None:
        declared: dict[str, Any] = {}
        for cls in reversed(type(self).__mro__[:-1]):
            declared.update({name: vars(cls).get(name) for name in inspect.get_annotations(cls)})
        arguments = dict(zip(declared, values, strict=False)) | fields
        unknown = sorted(set(arguments) - set(declared))
        if unknown or len(values) > len(declared):
            raise TypeError(
                f"{type(self).__name__} has no field {', '.join(unknown) or len(values)}"
            )
        for name, default in declared.items():
            setattr(self, name, arguments.get(name, default))
        self.__post_init__()

    def __post_init__(self) -> None:
        pass


class _TileSize:
    """The hardware's maxima for one tile."""

    pmax = PARTITIONS
    psum_fmax = psum_bank_fmax = PSUM_BANK // 4
    psum_bank_fmax_bytes = PSUM_BANK
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512  # gen4 takes more, where one output may span banks
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 1
    psum_num_banks = PSUM_BANKS
    sbuf_fmax_bytes = total_available_sbuf_size = property(lambda self: current().target.sbuf)
    sbuf_fmax = property(lambda self: current().target.sbuf // 4)
    sbuf_size_bytes = property(lambda self: current().target.sbuf * PARTITIONS)


tile_size = _TileSize()


# Tensors


def ndarray(
    shape: Any,
    dtype: Any,
    buffer: Any = SBUF,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """Return a tensor with undefined contents (poison: NaN, or 4 for integers)."""
    return current().allocate(shape, dtype, region_of(buffer), name, address)


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    out = ndarray(shape, dtype, buffer, name)
    value = int(fill_value) if out.dtype.integer else float(fill_value)
    if out.on_chip:
        memset(dst=out, value=value)
    else:
        dma_copy(dst=out, src=shared_constant(np.full(out.shape, value, out.dtype.numpy)))
    return out


def zeros(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    return full(shape, 1, dtype, buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: Any) -> NkiTensor:
    """Return a compile-time array as a tensor in HBM."""
    array = np.load(constant) if isinstance(constant, str) else np.array(constant)
    return current().argument(array.astype(dtype_of(array.dtype).numpy), "constant")


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """Return the n x n identity in SBUF; the default dtype is uint8, as in NKI."""
    out = ndarray((n, n), dtype, SBUF, "identity") if dst is None else dst
    dma_copy(dst=out, src=shared_constant(np.eye(n, dtype=out.dtype.numpy)))
    return out


def _assign(self: NkiTensor, key: object, value: Any) -> None:
    """Write a tensor, or a number, to a part of a tensor by the instruction that can:
    tensor[key] = value.
    """
    dst = self[key]
    if not isinstance(value, NkiTensor):
        memset(dst=dst, value=value)
    elif dst.on_chip and value.on_chip:
        tensor_copy(dst=dst, src=value)
    else:
        dma_copy(dst=dst, src=value)


NkiTensor.__setitem__ = _assign  # not in memory, which knows no instructions


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Copy a tensor in HBM to a new SBUF tile."""
    require(src.buffer in HBM, f"load reads HBM, got {src.buffer.value}")
    if src.ndim == 1 and src.size > PARTITIONS and current().strict:
        raise StrictError(
            f"load of `{src.name}` {src.shape} takes a partition for each element on the chip, and "
            f"{src.size} exceed {PARTITIONS}: give it as (1, {src.size})"
        )
    shape = src.shape if src.ndim > 1 else (1, *src.shape)
    return issue(dma_copy, shape, dtype or src.dtype, src=src)


def store(dst: NkiTensor, value: Any) -> NkiTensor:
    """Copy an SBUF tile to HBM and return dst."""
    require(dst.buffer in HBM, f"store writes HBM, got {dst.buffer.value}")
    if isinstance(value, NkiTensor) and value.buffer is PSUM:
        raise StrictError("store cannot read psum; copy the tile to sbuf first")
    dma_copy(dst=dst, src=value)
    return dst


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Copy a matrix in HBM, transposed, to a new SBUF tile, in blocks of at most 128 rows."""
    rows = src.shape[0]
    if rows <= PARTITIONS:
        return transpose(load(src), dtype or src.dtype)
    out = ndarray((src.size // rows, rows), dtype or src.dtype, SBUF)
    for start in range(0, rows, PARTITIONS):
        block = src[start : builtins.min(start + PARTITIONS, rows)]
        block.form = src.form  # the kernel wrote no slice of a slice
        tensor_copy(
            dst=out[:, start : start + block.shape[0]], src=transpose(load(block), out.dtype)
        )
    return out


def gather_flattened(
    data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None
) -> NkiTensor:
    """Return data[p, indices[p, i]] with the free axes of data flattened."""
    require(axis == 0, f"gather_flattened flattens the free axes, axis must be 0, got {axis}")
    return issue(nc_n_gather, indices.shape, dtype or data.dtype, data=data, indices=indices)


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """Zero elements with probability rate; the others are not rescaled."""
    return issue(_isa_dropout, x.shape, dtype or x.dtype, data=x, prob=rate)


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    return x.insert_axis(axis + x.ndim + 1 if axis < 0 else axis)


ds = DynamicSlice


def is_hbm(buffer: Any) -> bool:
    return region_of(buffer) in HBM


def is_sbuf(buffer: Any) -> bool:
    return region_of(buffer) is SBUF


def is_psum(buffer: Any) -> bool:
    return region_of(buffer) is PSUM


def is_on_chip(buffer: Any) -> bool:
    return not is_hbm(buffer)


def _reduction(operator: Operator) -> Callable[..., NkiTensor]:
    def along(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
        return reduce(operator, x, axis, dtype, keepdims)

    return along


sum, prod = _reduction(_operators.add), _reduction(_operators.multiply)
max, min = _reduction(_operators.maximum), _reduction(_operators.minimum)
all = _reduction(_operators.logical_and)


def negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return apply(_operators.multiply, (x, -1.0), dtype or x.dtype)


# Control


def par_dim(size: int) -> int:
    """Return the size of the axis that a shape of NKI Beta 1 marks as the partition axis: it has to
    be the first.
    """
    return size


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Return the range of a fully unrolled loop; the other range names mean the same."""
    return range(start) if stop is None else range(start, stop, step)


sequential_range = static_range = affine_range
dynamic_range = (
    affine_range  # a hardware loop of NKI 0.3 to 0.6, also over registers; it is gone in 0.7
)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[int], None], step: int = 1) -> None:
    """Run a hardware loop (NKI 0.6 and newer)."""
    for i in range(int(lower), int(upper), step):
        body_fun(i)


def while_loop(init: Any, body_fun: Callable[[Any], Any]) -> Any:
    """Run a hardware loop while its register is not zero (NKI 0.6 and newer)."""
    state = init
    while int(state) != 0:
        state = body_fun(state)
    return state


def no_reorder() -> Any:
    """Return a context that changes nothing: instructions run in program order here anyway."""
    return contextlib.nullcontext()


def program_id(axis: int = 0) -> int:
    return current().core


def num_programs(axes: Any = 0) -> int:
    return current().cores


def program_ndim() -> int:
    return 0 if current().cores == 1 else 1


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    print(print_prefix, tensor, tensor.array)


def random_seed(seed: int) -> None:
    current().rng = np.random.default_rng(seed)


def rand(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    """Return uniform numbers in [0, 1), not from the chip's generator."""
    out = ndarray(shape, dtype, buffer, name)
    dma_copy(dst=out, src=shared_constant(current().rng.random(out.shape, dtype=np.float32)))
    return out


def __getattr__(name: str) -> Any:
    raise AttributeError(f"nki.language has no {name!r} in the simulator")
