"""Storages and the tensors that view them.

A Storage is one allocation: a NumPy array filled with poison, and a code for each element that says
who wrote it last (nobody, a matmul, any other instruction). An NkiTensor is a NumPy view of a
storage with NKI's rules of indexing: on chip, axis 0 is the partition axis and never disappears; a
slice out of bounds is an error; nothing copies.
"""

import functools
from dataclasses import dataclass, field
from enum import Enum
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from nki_simulator.core.dtypes import DType, dtype_of
from nki_simulator.core.errors import StrictError, require

UNWRITTEN, BY_MATMUL, BY_OTHER = 0, 1, 2


class MemoryRegion(Enum):
    """The memories of a NeuronCore, under NKI's names."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    hbm = private_hbm  # another name of it
    shared_hbm = "shared_hbm"


SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)
ON_CHIP = (SBUF, PSUM)


def region_of(buffer: object) -> MemoryRegion:
    """Return the memory that a kernel names by a constant or by a string."""
    if isinstance(buffer, MemoryRegion):
        return buffer
    if isinstance(buffer, str) and buffer in MemoryRegion.__members__:
        return MemoryRegion[buffer]
    raise TypeError(
        f"buffer {buffer!r} is not one of nl.sbuf, nl.psum, nl.hbm, nl.private_hbm, nl.shared_hbm"
    )


@dataclass(frozen=True)
class DynamicSlice:
    """A slice that is given by its start and its size: nl.ds(start, size)."""

    start: int
    size: int


@dataclass(slots=True)
class Life:
    """From when to when an allocation is live. A Life outlives its storage,
    whose memory Python frees.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    buffer: MemoryRegion
    free_bytes: int
    first: int | None = None  # index of the first instruction that writes it
    last: int = -1  # index of the last instruction that touches it


@dataclass(slots=True, eq=False)
class Storage:
    """One allocation. `writer` is one code for all elements,
    or an array of codes once they differ.
    """

    base: np.ndarray
    dtype: DType
    buffer: MemoryRegion
    name: str
    number: int
    writer: int | np.ndarray = UNWRITTEN
    address: tuple[int, int] | None = None
    life: Life = field(init=False)
    pointer: int = field(init=False)

    def __post_init__(self) -> None:
        free_bytes = prod(self.base.shape[1:]) * self.base.itemsize
        self.life = Life(self.name, self.base.shape, self.dtype, self.buffer, free_bytes)
        self.pointer = self.base.__array_interface__["data"][0]

    @property
    def free_bytes(self) -> int:
        return self.life.free_bytes

    def writers(self, view: np.ndarray) -> int | np.ndarray:
        """Return who last wrote the elements of `view`: one code,
        or an array of codes in its shape.
        """
        if isinstance(self.writer, int):
            return self.writer
        codes = self._codes(view)
        first = int(codes.flat[0])
        return first if (codes == first).all() else codes

    def mark(self, view: np.ndarray, code: int) -> None:
        """Remember who wrote the elements of `view`."""
        if self.writer is code:
            return
        if view.size == self.base.size and 0 not in view.strides:
            self.writer = code
            return
        if isinstance(self.writer, int):
            self.writer = np.full(self.base.nbytes // self.dtype.itemsize, self.writer, np.uint8)
        self._codes(view)[...] = code
        first = int(self.writer[0])
        if first == code and (self.writer == first).all():
            self.writer = first

    def _codes(self, view: np.ndarray) -> np.ndarray:
        """Return the codes of the elements of `view`, as a view of all codes."""
        assert isinstance(self.writer, np.ndarray)
        unit = self.dtype.itemsize
        start = (view.__array_interface__["data"][0] - self.pointer) // unit
        return as_strided(self.writer[start:], view.shape, [step // unit for step in view.strides])


def _view_method(make):
    """Note on the view that `make` returns that releases before 0.5.0 have no such method."""

    @functools.wraps(make)
    def view(self, *args, **options):
        made = make(self, *args, **options)
        made.form = made.form or "a view method"
        return made

    return view


class NkiTensor:
    """A view of a storage. Views share storage; only instructions move data."""

    __slots__ = (
        "array",
        "buffer",
        "dtype",
        "form",
        "indirection",
        "partition",
        "sliced",
        "storage",
    )

    def __init__(
        self, array: np.ndarray, storage: Storage, partition: int = 0, dtype: DType | None = None
    ) -> None:
        self.array = array
        self.storage = storage
        self.buffer = storage.buffer
        self.dtype = dtype or storage.dtype
        self.partition = partition  # first partition, on chip
        self.sliced = False  # a view of part of the storage, or in another order
        self.form = ""  # the rule of `releases` that the way to this view breaks in some release
        # of a gather or scatter: all elements of the storage, and the index of each element of the
        # view
        self.indirection: tuple[np.ndarray, np.ndarray] | None = None

    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)
    size = property(lambda self: self.array.size)
    name = property(lambda self: self.storage.name)
    on_chip = property(lambda self: self.buffer in ON_CHIP)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides, counted in elements."""
        return tuple(step // self.array.itemsize for step in self.array.strides)

    @property
    def offset(self) -> int:
        """Says how many elements lie between the start of the storage and this tensor's first."""
        return (
            self.array.__array_interface__["data"][0] - self.storage.pointer
        ) // self.array.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """Its first byte, and the one behind its last: in a partition on chip,
        else in the storage.
        """
        begin, first = self.offset * self.array.itemsize, 0
        if self.on_chip:
            begin, first = begin % self.storage.free_bytes, 1
        steps = zip(self.array.strides[first:], self.shape[first:], strict=True)
        return begin, begin + sum(step * (count - 1) for step, count in steps) + self.array.itemsize

    def __repr__(self) -> str:
        where = self.buffer.value
        return f"NkiTensor({self.name}, shape={self.shape}, dtype={self.dtype}, buffer={where})"

    def __bool__(self) -> bool:
        raise TypeError(
            "a tensor has no value while the kernel is built; compute with nisa and select on chip"
        )

    def __len__(self) -> int:
        return self.shape[0]

    def _like(
        self, array: np.ndarray, partition: int | None = None, sliced: bool = True
    ) -> "NkiTensor":
        view = NkiTensor(
            array, self.storage, self.partition if partition is None else partition, self.dtype
        )
        view.indirection = self.indirection
        return self._derive(view, sliced)

    def _derive(self, view: "NkiTensor", sliced: bool = True) -> "NkiTensor":
        """Notes on a view how it came from this tensor."""
        view.sliced = sliced
        view.form = "a view of a view" if self.sliced else self.form
        return view

    # Indexing

    def __getitem__(self, key: object) -> "NkiTensor":
        keys = key if isinstance(key, tuple) else (key,)
        dots = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
        if dots is not None:
            keys = keys[:dots] + (slice(None),) * (self.ndim - len(keys) + 1) + keys[dots + 1 :]
        require(
            len(keys) <= self.ndim,
            f"tensor `{self.name}` of shape {self.shape} indexed with {len(keys)} axes",
        )
        index = [self._slice(axis, k) for axis, k in enumerate(keys)]
        view = self.array[tuple(index)]
        # An integer drops its axis, but a tile keeps its partition axis and one free axis, HBM one
        # axis.
        first, least = (1, 2) if self.on_chip else (0, 1)
        for axis in reversed(range(first, len(keys))):
            if isinstance(keys[axis], (int, np.integer)) and view.ndim > least:
                view = view.squeeze(axis=axis)
        view = self._like(view, self.partition + (index[0].start if self.on_chip else 0))
        if self.on_chip and isinstance(keys[0], (int, np.integer)):
            view.form = view.form or "an integer index of the partition axis"
        return view

    def _slice(self, axis: int, k: object) -> slice:
        """Return one axis's index as a slice within bounds, or refuse it."""
        size = self.array.shape[axis]
        if isinstance(k, slice):
            start, stop, step = k.start, k.stop, 1 if k.step is None else int(k.step)
            start = 0 if start is None else int(start)
            stop = size if stop is None else int(stop)
        elif isinstance(k, DynamicSlice):
            start, stop, step = int(k.start), int(k.start) + int(k.size), 1
        elif isinstance(k, (int, np.integer)):
            i = int(k) + size if k < 0 else int(k)
            require(
                0 <= i < size,
                f"Out-of-bound access for tensor `{self.name}` on dimension {axis}: "
                f"index {k} exceed dimension size of {size}",
            )
            return slice(i, i + 1)
        else:
            raise TypeError(
                f"tensors are indexed by integers, slices, ... and nl.ds, got {type(k).__name__}"
            )
        start = start + size if start < 0 else start
        stop = stop + size if stop < 0 else stop
        require(
            step >= 1,
            f"slice step {step} on dimension {axis} of tensor `{self.name}` is not positive",
        )
        require(
            0 <= start < stop <= size,
            f"Out-of-bound access for tensor `{self.name}` on dimension {axis}: "
            f"index range [{start}, {stop - 1}] exceed dimension size of {size}",
        )
        return slice(start, stop, step)

    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError(
            "nki.language, which is not imported, has the instructions that assign to a tensor"
        )

    # Views

    def ap(
        self,
        pattern,
        offset: int | None = None,
        scalar_offset=None,
        vector_offset=None,
        indirect_dim: int = 0,
        dtype: object = None,
    ) -> "NkiTensor":
        """View elements of the storage by the raw access pattern [[stride, count], ...].

        `offset` counts from the start of the storage, also where this tensor is a slice of it;
        without an offset the view begins where this tensor does.
        """
        element = self.dtype if dtype is None else dtype_of(dtype)
        flat = self.storage.base.reshape(-1).view(element.numpy)
        own = self.offset * self.dtype.itemsize // element.itemsize
        start = own if offset is None else int(offset)
        pairs = [(int(stride), int(count)) for stride, count in pattern]
        partition = self.partition
        free = self.storage.free_bytes // element.itemsize
        if self.on_chip:
            require(
                pairs[0][0] == free or pairs[0][1] == 1,
                f"ap() pattern has invalid partition stride. Partition step {pairs[0][0]} "
                f"must equal tensor free dimension size {free}",
            )
            pairs[0] = (free, pairs[0][1])
            partition = start // free
            inside = start % free + sum(stride * (count - 1) for stride, count in pairs[1:])
            require(
                inside < free and partition + pairs[0][1] <= self.storage.base.shape[0],
                f"Out-of-bound access for tensor `{self.name}`: {pattern} with offset {start} "
                f"reaches element {inside} of {free} in a partition and partition "
                f"{partition + pairs[0][1] - 1}",
            )
            if len(pairs) == 1:
                pairs.append((1, 1))
        array, where = _take_strided(
            self, flat, start, pairs, scalar_offset, vector_offset, indirect_dim
        )
        tensor = NkiTensor(array, self.storage, partition, element)
        tensor.indirection = None if where is None else (flat, where)
        return self._derive(tensor)

    def reshape(self, shape) -> "NkiTensor":
        shape = tuple(int(n) for n in shape)
        require(
            prod(shape) == self.size,
            f"cannot reshape tensor `{self.name}` of shape {self.shape} into {shape}: {self.size} "
            f"elements against {prod(shape)}",
        )
        P = self.shape[0]
        kept = not self.on_chip or shape[0] == P
        require(
            kept, f"reshape keeps the partition axis on chip: {P} partitions, asked for {shape[0]}"
        )
        view = self.array.reshape(shape)
        require(
            np.may_share_memory(view, self.array),
            f"reshape of tensor `{self.name}` from {self.shape} to {shape} would copy: "
            "its view is not contiguous",
        )
        return self._like(view, sliced=self.sliced)

    @_view_method
    def permute(self, dims) -> "NkiTensor":
        known = sorted(dims) == list(range(self.ndim))
        require(known, f"permute needs a permutation of {self.ndim} axes, got {dims}")
        require(
            not self.on_chip or dims[0] == 0, "permute keeps the partition axis outermost on chip"
        )
        return self._like(self.array.transpose(dims))

    def _free_axis(self, dim: int, what: str, one: bool = False) -> None:
        """Refuse the partition axis, and if `one` an axis of another size than 1."""
        require(not self.on_chip or dim != 0, what)
        if one:
            word = what.split()[0]
            size = self.shape[dim]
            require(size == 1, f"{word} needs an axis of size 1, axis {dim} has size {size}")

    def repeat(self, dim: int, size: int) -> "NkiTensor":
        """View an axis of size 1 as one of `size`. No kernel calls it;
        that is what `broadcast` is for.
        """
        self._free_axis(
            dim, "broadcast of the partition axis is not a view; use a ones matmul", one=True
        )
        return self._like(
            np.broadcast_to(self.array, (*self.shape[:dim], size, *self.shape[dim + 1 :]))
        )

    def insert_axis(self, dim: int) -> "NkiTensor":
        """View the tensor with one more axis. No kernel calls it;
        that is what `expand_dim` is for.
        """
        self._free_axis(dim, "expand_dim cannot insert before the partition axis")
        return self._like(np.expand_dims(self.array, dim))

    broadcast, expand_dim = _view_method(repeat), _view_method(insert_axis)

    @_view_method
    def squeeze_dim(self, dim: int) -> "NkiTensor":
        self._free_axis(dim, "squeeze_dim cannot remove the partition axis", one=True)
        return self._like(self.array.squeeze(axis=dim))

    @_view_method
    def reshape_dim(self, dim: int, shape) -> "NkiTensor":
        shape = list(shape)
        if -1 in shape:
            rest = -prod(shape)
            shape[shape.index(-1)] = self.shape[dim] // rest
        size = self.shape[dim]
        require(prod(shape) == size, f"reshape_dim of axis {dim} with size {size} into {shape}")
        return self.reshape((*self.shape[:dim], *shape, *self.shape[dim + 1 :]))

    @_view_method
    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        require(
            not self.on_chip or start_dim > 0,
            "flatten_dims cannot merge the partition axis on chip",
        )
        merged = prod(self.shape[start_dim : end_dim + 1])
        return self.reshape((*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :]))

    @_view_method
    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    @_view_method
    def select(self, dim: int, index) -> "NkiTensor":
        if isinstance(index, (int, np.integer)):
            return self[(slice(None),) * dim + (int(index),)]
        pattern = self.get_pattern()
        dropped = [pair for axis, pair in enumerate(pattern) if axis != dim]
        return self.ap(pattern=dropped, scalar_offset=index, indirect_dim=dim)

    @_view_method
    def vector_select(self, dim: int, vector_offset: "NkiTensor") -> "NkiTensor":
        require(dim == 0 and not self.on_chip, "vector_select works on axis 0 of HBM tensors")
        pattern = self.get_pattern()
        pattern[0][1] = vector_offset.shape[0]
        return self.ap(pattern=pattern, vector_offset=vector_offset, indirect_dim=0)

    @_view_method
    def rearrange(self, src_pattern, dst_pattern, fixed_sizes=None) -> "NkiTensor":
        """Split, permute and merge axes as einops does, with tuples:
        ('b', ('h', 'w')) -> ('b', 'w', 'h').
        """
        sizes = dict(fixed_sizes or {})
        src, dst = (
            [(group,) if isinstance(group, str) else tuple(group) for group in pattern]
            for pattern in (src_pattern, dst_pattern)
        )
        for axis, names in enumerate(src):
            known = prod(sizes[n] for n in names if n in sizes)
            for n in names:
                sizes.setdefault(n, self.shape[axis] // known)
        order = [n for names in src for n in names]
        split = self.reshape([sizes[n] for n in order])
        permuted = split.permute([order.index(n) for names in dst for n in names])
        return permuted.reshape([prod(sizes[n] for n in names) for names in dst])

    def view(self, dtype: object) -> "NkiTensor":
        element = dtype_of(dtype)
        require(
            self.array.strides[-1] == self.array.itemsize,
            "view(dtype) needs a contiguous last axis",
        )
        return self._derive(
            NkiTensor(self.array.view(element.numpy), self.storage, self.partition, element)
        )

    reinterpret_cast = view

    def indirect(self, index: "NkiTensor", num_elem: int | None = None) -> "NkiTensor":
        raise StrictError(
            "tensor indirection needs NeuronCore-v4 and is not simulated; use "
            ".ap(vector_offset=...)"
        )

    def is_contiguous(self) -> bool:
        shape, strides, expected = self.shape, self.strides, 1
        for axis in range(self.ndim - 1, 0 if self.on_chip else -1, -1):
            if shape[axis] != 1 and strides[axis] != expected:
                return False
            expected *= shape[axis]
        return True

    def is_indirect(self) -> bool:
        return self.indirection is not None

    def get_pattern(self) -> list[list[int]]:
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]


def _take_strided(tensor, flat, start, pairs, scalar_offset, vector_offset, indirect_dim):
    """Return the NumPy view of an access pattern;
    for a gather or scatter also the elements' indices.
    """
    require(
        scalar_offset is None or vector_offset is None,
        "scalar_offset and vector_offset exclude each other",
    )
    shape = tuple(count for _, count in pairs)
    strides = [stride for stride, _ in pairs]
    unit = prod(tensor.shape[indirect_dim + 1 :])
    if scalar_offset is not None:
        register = isinstance(scalar_offset, NkiTensor)
        start += unit * int(scalar_offset.array.flat[0] if register else scalar_offset)
    reach = start + sum(stride * (count - 1) for stride, count in pairs)
    if vector_offset is None:
        require(
            start >= 0 and reach < flat.size,
            f"Out-of-bound access for tensor `{tensor.name}`: element {reach} of {flat.size}",
        )
        return as_strided(flat[start:], shape, [step * flat.itemsize for step in strides]), None
    rows = vector_offset.array.reshape(-1).astype(np.int64)
    where = np.full(shape, start, np.int64)
    for axis, (stride, count) in enumerate(pairs):
        step = np.arange(count) * stride if axis else rows[:count] * unit
        where += step.reshape([-1 if a == axis else 1 for a in range(len(pairs))])
    return np.broadcast_to(flat[:1], shape), where
