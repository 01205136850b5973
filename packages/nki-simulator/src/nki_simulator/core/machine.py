"""The state of one run of a kernel: its memory, its trace, and what may be in use at once."""

import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from nki_simulator.core.chip import CHIP, OPEN, SUMS, Sums, place_of, rules_on
from nki_simulator.core.cores import Pair
from nki_simulator.core.dtypes import DType, dtype_of
from nki_simulator.core.errors import NkiWarning, StrictError, require
from nki_simulator.core.memory import (
    BY_OTHER,
    ON_CHIP,
    PSUM,
    SBUF,
    Life,
    MemoryRegion,
    NkiTensor,
    Storage,
)
from nki_simulator.core.releases import rules_of
from nki_simulator.core.tables import MOST_SETS, Tables
from nki_simulator.core.targets import PARTITIONS, PSUM_BANK, PSUM_BANKS, Target


class Engine(Enum):
    """The engines of a NeuronCore, under NKI's names and numbers."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


@dataclass(frozen=True)
class Region:
    """The part of a storage that an operand touches:
    half-open ranges of partitions and of bytes in each.
    """

    storage: int
    partitions: tuple[int, int]
    span: tuple[int, int]


@dataclass(frozen=True)
class Operand:
    """One operand of an executed instruction."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: DType
    buffer: MemoryRegion
    region: Region
    run: int  # length in bytes of its contiguous pieces; one DMA descriptor moves one piece

    @property
    def free(self) -> int:
        """Elements per partition."""
        return prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """One executed instruction, as the trace keeps it."""

    index: int
    op: str
    engine: Engine
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Numerics:
    """How exact the engines are. Settings other than the default show how sensitive a kernel is.

    matmul      "bfloat16" or "tfloat32" rounds float32 operands before they are multiplied. Public
                measurements disagree on whether the Tensor engine's float32 products are exact.
    functions   "measured:SEED" gives the Scalar engine's functions the errors that exp was measured
                to have on Trn1 (`core.function_errors`); "exact" are those of float32.

    >>> Numerics(functions="measured:3").seed, Numerics().seed
    (3, None)
    """

    matmul: str = "float32"
    functions: str = "exact"

    def __post_init__(self) -> None:
        kind, _, seed = self.functions.partition(":")
        if self.functions != "exact" and not (kind == "measured" and seed.isdigit()):
            raise ValueError(
                f"functions={self.functions!r} is neither exact nor measured:SEED, such as measured:1"
            )

    @property
    def seed(self) -> int | None:
        """The seed of the functions' errors, None where there are none."""
        return None if self.functions == "exact" else int(self.functions.partition(":")[2])


EXACT = Numerics()


class Machine:
    """The state of one simulated core during one kernel call."""

    def __init__(
        self,
        target: Target,
        *,
        strict: bool,
        trace: bool,
        numerics: Numerics,
        nki: str | None = None,
        without: Iterable[str] = (),
    ) -> None:
        self.target = target
        self.strict = strict
        self.nki = nki
        self.rules = rules_of(nki) if strict else {}
        own = rules_on(target.generation, without)  # names an unknown rule, strict or not
        self.chip_rules = own if strict else frozenset()
        self.sums: dict[int, Sums] = defaultdict(Sums)  # of each PSUM tensor
        self.numerics = numerics
        self.count = 0
        self.lives: list[Life] = []
        self.trace: list[Record] | None = [] if trace else None
        self.forms: set[tuple[str, str, str]] = set()  # of instructions, as `precedents` has them
        self.tables = Tables()
        self.scalar_registers = np.zeros((PARTITIONS, 1), np.float32)
        self.vector_registers = np.zeros((PARTITIONS, 1), np.float32)
        self.rng = np.random.default_rng(0)
        self.core = 0
        self.cores = 1
        self.pair: Pair | None = None
        self._shared = 0  # shared allocations so far
        self.partial_reads: list[str] = []
        self.copied: list[tuple[np.ndarray, NkiTensor]] = []  # arguments that were not contiguous

    def allocate(
        self,
        shape: Iterable[int],
        dtype: object,
        buffer: MemoryRegion,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """Return a new tensor whose elements are unwritten;
        refuse one that is larger than its memory.
        """
        shape = tuple(int(n) for n in shape)
        element = dtype_of(dtype)
        require(all(n > 0 for n in shape), f"tensor shape {shape} must have positive sizes only")
        if buffer in ON_CHIP:
            require(
                len(shape) >= 2,
                "SBUF and PSUM tensors must have at least 2 dimensions (partition-dim and "
                f"free-dim), got shape {shape}",
            )
            limit = self.target.sbuf if buffer is SBUF else self.target.psum
            size = prod(shape[1:]) * element.itemsize
            if self.strict and size > limit:
                raise StrictError(
                    f"{buffer.value} capacity exceeded: tensor `{name}` of shape {shape} {element} "
                    f"takes {size} bytes per partition, {self.target.name} has {limit}"
                )

        def make(number: int) -> Storage:
            unwritten = np.full(shape, element.poison, element.numpy)
            return Storage(unwritten, element, buffer, name or f"t{number}", number)

        if self.pair is not None and buffer is MemoryRegion.shared_hbm:
            # Shared tensors have negative numbers, so that no private tensor of either core has the
            # same one.
            storage = self.pair.storage(self._shared, lambda: make(-1 - self._shared))
            self._shared += 1
        else:
            storage = make(len(self.lives))
        tensor = NkiTensor(storage.base, storage)
        if address is not None:
            storage.address = address
            tensor.partition = int(address[0])
        self.lives.append(storage.life)
        return tensor

    def refuse(self, rule: str, where: str) -> None:
        """Raise StrictError, or warn, if the rule holds in the run's releases;
        `where` is what breaks it.
        """
        if rule not in self.rules:
            return
        message = f"{where}: {rule} {self.rules[rule]}"
        if not self.rules[rule].only_warns(self.nki):
            raise StrictError(message)
        warnings.warn(message, NkiWarning, stacklevel=2)

    def refuse_on_chip(self, rule: str, where: str) -> None:
        """Raise StrictError if the rule of the target holds; `where` is what breaks it."""
        if rule in self.chip_rules:
            found = CHIP[rule]
            raise StrictError(
                f"{where} on {self.target.name}: {found.instead} ({found.source}; rule {rule!r})"
            )

    def follow_product(self, tensor: NkiTensor, index: int, adds: bool, where: str) -> None:
        """Follow what a product adds to, and refuse what loses terms on the chip."""
        sums = self.sums[tensor.storage.number]
        own = sums.add(place_of(tensor), index, adds)
        if own[1] < sums.last_read < index and own[3] > 1:
            self.refuse_on_chip(
                OPEN,
                f"{where} adds to a sum in `{tensor.name}` that instruction {sums.last_read} has read",
            )
        if own[3] == 2 and sums.long > 1:
            self.refuse_on_chip(
                SUMS,
                f"{where} makes another sum of several products in the PSUM tensor `{tensor.name}`",
            )

    def argument(self, array: np.ndarray, name: str) -> NkiTensor:
        """Return `array`, not copied, as a written tensor in shared HBM."""
        number = len(self.lives)
        storage = Storage(
            array, dtype_of(array.dtype), MemoryRegion.shared_hbm, name, number, BY_OTHER
        )
        self.lives.append(storage.life)
        return NkiTensor(array, storage)

    def peaks(self) -> tuple[int, int]:
        """Return the largest number of live bytes per partition of SBUF, and of live banks of PSUM.

        A tile lives from the first instruction that writes it to the last that touches it, in
        program order. Tiles that use different partitions still count one beside the other. Tiles
        of PSUM share banks where they fit.
        """
        return self._peak(SBUF)[0], self._peak(PSUM)[0]

    def check_capacity(self) -> None:
        """Refuse a run whose live tiles do not fit into SBUF or PSUM,
        or that uses too many tables.
        """
        for buffer, limit, unit in (
            (SBUF, self.target.sbuf, "bytes per partition"),
            (PSUM, PSUM_BANKS, "banks of 2 KiB per partition"),
        ):
            peak, index, live = self._peak(buffer)
            if peak > limit:
                largest = sorted(live, key=lambda s: -s.free_bytes)[:6]
                names = ", ".join(f"`{s.name}` {s.shape} {s.dtype}" for s in largest)
                raise StrictError(
                    f"{buffer.value} capacity exceeded: {peak} {unit} live at instruction {index}, "
                    f"{self.target.name} has {limit}; {len(live)} tiles are live, the largest: "
                    f"{names}"
                )
        if len(sets := self.tables.names()) > MOST_SETS:
            raise StrictError(
                f"activation functions of {len(sets)} tables ({', '.join(sets)}), and a program "
                f"may use {MOST_SETS} (NCC_INLA001); compute some functions from others, or on "
                "another engine"
            )

    def _peak(self, buffer: MemoryRegion) -> tuple[int, int, list[Life]]:
        """Return the peak, the instruction where it is reached,
        and the tiles that are live there.
        """
        tiles = [s for s in self.lives if s.buffer is buffer and s.first is not None]
        peak, busiest = _pack_banks(tiles) if buffer is PSUM else _add_bytes(tiles)
        return peak, busiest, [s for s in tiles if (s.first or 0) <= busiest <= s.last]


def _add_bytes(tiles: Iterable[Life]) -> tuple[int, int]:
    """Return the most bytes that are live at once, and at which instruction."""
    begins = [(s.first or 0, 0, s.free_bytes) for s in tiles]
    ends = [(s.last, 1, -s.free_bytes) for s in tiles]
    live = peak = busiest = 0
    for index, _, change in sorted(begins + ends):
        live += change
        if live > peak:
            peak, busiest = live, index
    return peak, busiest


def _pack_banks(tiles: Iterable[Life]) -> tuple[int, int]:
    """Return the most banks that hold anything at once, and at which instruction.

    A tile of at most a bank lies in one bank, beside others where these leave room: in the first
    bank that has a gap for it. Tiles are placed as they are first written and stay there. A larger
    tile has whole banks.
    """
    banks: list[list[tuple[int, int, int]]] = []  # of each bank: (first byte, the one behind, last)
    peak = busiest = 0
    for tile in sorted(tiles, key=lambda s: s.first or 0):
        now, size = tile.first or 0, tile.free_bytes
        banks = [[own for own in bank if own[2] >= now] for bank in banks]
        if size > PSUM_BANK:
            whole = -(-size // PSUM_BANK)
            free = [bank for bank in banks if not bank][:whole]
            new: list[list[tuple[int, int, int]]] = [[] for _ in range(whole - len(free))]
            banks += new
            for bank in (*free, *new):
                bank.append((0, PSUM_BANK, tile.last))
        else:
            for bank in banks:
                at = _find_gap(bank, size)
                if at is not None:
                    break
            else:
                bank, at = [], 0
                banks.append(bank)
            bank.append((at, at + size, tile.last))
            bank.sort()
        live = sum(bool(bank) for bank in banks)
        if live > peak:
            peak, busiest = live, now
    return peak, busiest


def _find_gap(bank: Iterable[tuple[int, int, int]], size: int) -> int | None:
    """Return where a bank has room for so many bytes, or None."""
    at = 0
    for begin, end, _ in bank:
        if begin - at >= size:
            return at
        at = end
    return at if PSUM_BANK - at >= size else None


class _Running(threading.local):
    machine: Machine | None = None  # that of the kernel that runs in this thread


running = _Running()


def current() -> Machine:
    """Return the machine of the kernel that runs in this thread."""
    machine = running.machine
    if machine is None:
        raise RuntimeError(
            "NKI instructions run inside a kernel: call it, or nki.simulate(kernel)(...)"
        )
    return machine
