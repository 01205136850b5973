"""A cost model over the instruction trace. Everything that it says is an estimate; nothing was
measured here.

Each instruction has two costs: `busy`, the time that it occupies its engine, and `latency`, how
much longer an instruction waits that needs its result. From them and the dependencies of the trace:

    engine    sum of busy, for each engine
    port      sum of busy on gen2's shared ports, where engines take turns: Vector and GpSimd at
              SBUF, Vector and Scalar at PSUM
    dma       sum of bytes / bandwidth
    path      the longest chain of dependent instructions, latencies included
    lower     max(engine, port, dma, path): everything overlaps
    schedule  every engine runs in program order, each instruction waits for its operands; loads and
              stores are two queues that share the DMA bandwidth
    upper     one instruction after the other

Sources: cycles from the instruction pages of NKI Beta 1 (SDK 2.26), which later pages dropped;
clocks and bandwidths from the architecture guides; latencies from both and from the performance
guide (100 cycles between dependent Vector instructions, 264 Scalar cycles per small dependent
activation, 64 cycles to fill the Tensor engine's array, 60 to reach SBUF or PSUM). Three costs are
inferred: a DMA descriptor costs at least 512 bytes of bandwidth; a float32 transposition on the
Tensor engine costs four passes; elementwise work on GpSimd costs 150 cycles, and one more per
element, or four for roots and powers (NKI's documentation has a root there four times as slow as
the Scalar engine's).

Four constants differ from the documentation, because published measurements do:

    Tensor      512 columns take a sixth longer than documented, in bfloat16 and in float32. Nobody
                has published what fewer columns take on Trn1, so there are two `READINGS`, which
                agree at 512:
                    rate    every column takes 7/6 cycle, as if the clock were 2.4 GHz
                    issue   every pass takes 85 cycles more, as if loading weights were not hidden
                The issue reading is the slower one at every size, and the default.
    Scalar      an instruction takes 55 cycles more than its elements
    reciprocal  3 cycles per element on the Vector engine, not 8
    scan        1 cycle per element on the Vector engine, not 2 as other instructions with two full
                inputs

Beside its instructions, the Scalar engine loads tables of functions (`core.tables`): as soon as it
is free, as the compiler moves loads forward, before the first instruction whose function the
resident table lacks.
"""

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nki_simulator.core.machine import Engine, Operand, Record
from nki_simulator.core.memory import HBM, PSUM, SBUF
from nki_simulator.core.tables import LOAD_US, Tables
from nki_simulator.core.targets import Target

# cycles; what is none of these runs on the Vector engine, as do reads and writes of registers
LATENCY = {Engine.tensor: 64 + 60, Engine.vector: 100, Engine.scalar: 264 - 64, Engine.gpsimd: 100}
DESCRIPTOR_BYTES = 512
MIN_CYCLES = 64  # of any instruction
SCALAR_OVERHEAD = 55  # cycles of each Scalar instruction beside its elements
RECIPROCAL = 3  # cycles per element on the Vector engine
SLOW = 4  # cycles per element of roots and powers on GpSimd
SBUF_PORT = "vector+gpsimd on SBUF"
PSUM_PORT = "vector+scalar on PSUM"

TWO_INPUTS = (
    "tensor_tensor", "scalar_tensor_tensor", "tensor_copy_predicated", "select_reduce",
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How the Tensor engine's measured rate at 512 columns is taken to hold for fewer columns."""

    name: str
    per_column: float  # cycles per moving column
    per_pass: float  # cycles beside the columns; float32 takes four passes

    def cycles(self, columns: float, passes: int) -> float:
        """Return the cycles of one Tensor instruction.

        >>> round(RATE.cycles(512, 1)), round(ISSUE.cycles(512, 1)), round(ISSUE.cycles(64, 4))
        (597, 597, 597)
        """
        return passes * (self.per_column * columns + self.per_pass)


RATE = Reading("rate", 7 / 6, 0.0)
ISSUE = Reading("issue", 1.0, 512 / 6)
READINGS = (RATE, ISSUE)  # the slower one comes last


@dataclass(frozen=True)
class Step:
    """One instruction in the estimated schedule, with times in microseconds."""

    record: Record
    engine: str
    start: float
    busy: float
    latency: float


@dataclass(frozen=True)
class Estimate:
    """Estimated times of one kernel call in microseconds, the bytes that it moves,
    and instruction counts.
    """

    target: Target
    reading: Reading
    engines: dict[str, float]
    ports: dict[str, float]
    dma: float
    path: float
    lower: float
    schedule: float
    upper: float
    instructions: dict[str, int]
    hbm_read: int
    hbm_written: int
    multiply_adds: int
    critical: dict[str, tuple[int, float]]  # op -> count and time on the longest path
    loads: int  # of the Scalar engine's tables
    tables: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def binding(self) -> str:
        """The name of what sets the lower bound."""
        times = {**self.engines, **self.ports, "dma": self.dma, "dependency path": self.path}
        return max(times, key=lambda name: times[name])

    @property
    def tensor_share(self) -> float:
        """The share of the lower bound in which the Tensor engine is busy."""
        return self.engines.get("tensor", 0.0) / self.lower if self.lower else 0.0


def estimates(trace: Sequence[Record], target: Target) -> tuple[Estimate, ...]:
    """Estimate a traced kernel call under each of READINGS, the slower reading last.

    >>> from nki_simulator import TARGETS
    >>> [costs.reading.name for costs in estimates([], TARGETS["trn1"])]
    ['rate', 'issue']
    """
    dependencies = list_dependencies(trace)
    return tuple(estimate(trace, target, reading, dependencies) for reading in READINGS)


def estimate(
    trace: Sequence[Record], target: Target, reading: Reading = ISSUE,
    dependencies: Sequence[set[int]] | None = None,
) -> Estimate:  # fmt: skip
    """Estimate the time that a traced kernel call takes on one core of the target.

    `dependencies` are what `list_dependencies` returns, where that is known.

    >>> from nki_simulator import nl, record
    >>> def ones():
    ...     out = nl.ndarray((128, 512), nl.float32, nl.shared_hbm)
    ...     nl.store(out, nl.ones((128, 512), nl.float32))
    ...     return out
    >>> run = record(ones, nki="0.7.0")
    >>> costs = estimate(run.trace, run.target)
    >>> costs.binding, costs.instructions, 3.4 < costs.lower < 3.6
    ('dependency path', {'memset': 1, 'dma_copy': 1}, True)
    """
    dependencies = list_dependencies(trace) if dependencies is None else dependencies
    steps: list[Step] = []
    free: dict[str, float] = defaultdict(float)
    busy_of: dict[str, float] = defaultdict(float)
    ports: dict[str, float] = defaultdict(float)
    ends: list[float] = []  # of each instruction in the schedule
    path_ends: list[float] = []  # of each instruction if only its dependencies delay it
    causes: list[int | None] = []  # which instruction delays it most on that path
    transfers: list[tuple[float, float]] = []
    read = written = macs = 0
    upper = 0.0
    tables = Tables()
    for i, record in enumerate(trace):
        busy, latency = instruction_cost(record, target, reading)
        engine = record.engine.name
        if record.engine is Engine.scalar and tables.load_for(record.flags.get("function", "copy")):
            free[engine] += LOAD_US
            busy_of[engine] += LOAD_US
            upper += LOAD_US
        queues = (*list_ports(record, target), find_queue(record))
        start, longest, cause = max(free[q] for q in queues), 0.0, None
        for j in dependencies[i]:
            # An accumulation group streams through the array without waiting for its own sums.
            wait = steps[j].latency if not accumulates(trace[j], record) else 0.0
            start = max(start, ends[j] + wait)
            if path_ends[j] + wait > longest:
                longest, cause = path_ends[j] + wait, j
        if record.engine is Engine.dma:
            start = _reserve(transfers, start, busy)
        for queue in queues:
            free[queue] = start + busy
            ports[queue] += busy
        busy_of[engine] += busy
        ends.append(start + busy)
        path_ends.append(longest + busy)
        causes.append(cause)
        steps.append(Step(record, engine, start, busy, latency))
        upper += busy + latency
        read += sum(o.bytes for o in record.reads if o.buffer in HBM)
        written += sum(o.bytes for o in record.writes if o.buffer in HBM)
        if record.op == "nc_matmul":
            macs += record.flags["K"] * record.flags["M"] * record.flags["N"]
    engines = {
        e.name: busy_of[e.name]
        for e in (Engine.tensor, Engine.vector, Engine.scalar, Engine.gpsimd)
    }
    dma = busy_of["dma"]
    shared = {name: ports[name] for name in (SBUF_PORT, PSUM_PORT) if name in ports}
    finish = [end + step.latency for end, step in zip(path_ends, steps, strict=True)]
    path = max(finish, default=0.0)
    return Estimate(
        target=target,
        reading=reading,
        engines=engines,
        ports=shared,
        dma=dma,
        path=path,
        lower=max([*engines.values(), *shared.values(), dma, path]),
        schedule=max((s.start + s.busy + s.latency for s in steps), default=0.0),
        upper=upper,
        instructions=dict(Counter(r.op for r in trace).most_common()),
        hbm_read=read,
        hbm_written=written,
        multiply_adds=macs,
        critical=_critical(steps, causes, finish),
        loads=tables.loads,
        tables=tables.names(),
        steps=tuple(steps),
    )


def instruction_cost(
    record: Record, target: Target, reading: Reading = ISSUE
) -> tuple[float, float]:
    """Return what one instruction costs in microseconds: (busy, latency)."""
    operands, flags = (*record.reads, *record.writes), record.flags
    if record.engine is Engine.dma:  # its data, and at least DESCRIPTOR_BYTES per contiguous piece
        size, run = max(o.bytes for o in operands), max(1, min(o.run for o in operands))
        size = max(size, -(-size // run) * DESCRIPTOR_BYTES)
        return size / (target.dma_gb_s * 1e3), target.dma_latency_us
    engine = record.engine if record.engine in LATENCY else Engine.vector
    F = max((o.free for o in (*record.reads[:1], *record.writes[:1])), default=1)
    summing = MIN_CYCLES if flags.get("reduces") else 0
    if record.op == "nc_matmul":
        passes = (2 if flags["onezero"] else 4) if flags["fp32"] else 1
        cycles = reading.cycles(max(min(MIN_CYCLES, flags["M"]), flags["N"]), passes)
    elif engine is Engine.tensor:
        cycles = reading.cycles(
            max(flags["P"], min(MIN_CYCLES, flags["F"])), 4 if flags["fp32"] else 1
        )
    elif engine is Engine.scalar:
        cycles = max(MIN_CYCLES, F + SCALAR_OVERHEAD) + summing
    elif engine is Engine.gpsimd:
        cycles = 150 + (SLOW * F if flags.get("slow") else F)
    elif record.op == "reciprocal":
        cycles = max(MIN_CYCLES, RECIPROCAL * F)
    elif record.op in TWO_INPUTS:
        cycles = max(MIN_CYCLES, 2 * F)
    else:
        cycles = max(MIN_CYCLES, F) + summing
    clock = getattr(target, f"{engine.name}_ghz")
    return cycles / clock / 1e3, LATENCY[engine] / clock / 1e3


def list_ports(record: Record, target: Target) -> tuple[str, ...]:
    """Return which of gen2's shared ports the instruction occupies."""
    if target.generation > 2 or record.engine not in (Engine.vector, Engine.gpsimd, Engine.scalar):
        return ()
    memories = {o.buffer for o in (*record.reads, *record.writes)}
    sbuf = (SBUF_PORT,) if record.engine is not Engine.scalar and SBUF in memories else ()
    psum = (PSUM_PORT,) if record.engine is not Engine.gpsimd and PSUM in memories else ()
    return (*sbuf, *psum)


def find_queue(record: Record) -> str:
    """Return the in-order queue that issues the instruction."""
    if record.engine is Engine.dma and any(o.buffer in HBM for o in record.writes):
        return "dma stores"
    return record.engine.name


def _reserve(transfers: list[tuple[float, float]], earliest: float, busy: float) -> float:
    """Add a transfer to `transfers` (begin, end) in the first gap that holds it, and return its
    begin.

    A load that is issued behind a store need not wait for what the store waits for, but both
    together never have more than the whole bandwidth.
    """
    start = earliest
    for begin, end in transfers[max(0, bisect_right(transfers, (earliest,)) - 1) :]:
        if begin >= start + busy:
            break
        start = max(start, end)
    insort(transfers, (start, start + busy))
    return start


def accumulates(first: Record, second: Record) -> bool:
    """Return whether the second matmul adds to what the first one wrote."""
    if first.op != "nc_matmul" or second.op != "nc_matmul" or not second.flags["accumulate"]:
        return False
    return first.writes[0].region == second.writes[0].region


def list_dependencies(trace: Sequence[Record]) -> list[set[int]]:
    """Return which instructions each one waits for: writers of what it reads, users of what it
    overwrites.

    This holds on chip and in HBM alike, except that two writes to HBM never wait for each other:
    there the tiles of different heads interleave without overlapping.
    """
    writers: dict[int, list[tuple[Operand, int]]] = defaultdict(list)
    readers: dict[int, list[tuple[Operand, int]]] = defaultdict(list)
    result: list[set[int]] = []
    for i, record in enumerate(trace):
        needs: set[int] = set()
        for operand in record.reads:
            key = operand.region.storage
            needs.update(j for other, j in writers[key] if _overlap(operand, other))
            readers[key].append((operand, i))
        for operand in record.writes:
            key = operand.region.storage
            if operand.buffer in HBM:
                writers[key].append((operand, i))
                continue
            needs.update(
                j
                for other, j in (*writers[key], *readers[key])
                if j != i and _overlap(operand, other)
            )
            writers[key] = [(o, j) for o, j in writers[key] if not _covers(operand, o)] + [
                (operand, i)
            ]
            readers[key] = [(o, j) for o, j in readers[key] if j == i or not _covers(operand, o)]
        result.append(needs)
    return result


def _overlap(a: Operand, b: Operand) -> bool:
    """Return whether two operands of one storage may touch the same bytes."""
    (p0, p1), (q0, q1) = a.region.partitions, b.region.partitions
    (s0, s1), (t0, t1) = a.region.span, b.region.span
    return p0 < q1 and q0 < p1 and s0 < t1 and t0 < s1


def _covers(a: Operand, b: Operand) -> bool:
    """Return whether `a` touches every byte that `b` touches."""
    (p0, p1), (q0, q1) = a.region.partitions, b.region.partitions
    (s0, s1), (t0, t1) = a.region.span, b.region.span
    dense = a.free * a.dtype.itemsize == s1 - s0
    return dense and p0 <= q0 and q1 <= p1 and s0 <= t0 and t1 <= s1


def _critical(steps: Sequence[Step], causes: Sequence[int | None], finish: Sequence[float]) -> dict:
    """Return count and time of each instruction on the longest path, the longest time first."""
    totals: dict[str, tuple[int, float]] = {}
    last = max(range(len(steps)), key=lambda i: finish[i]) if steps else None
    while last is not None:
        step = steps[last]
        count, time = totals.get(step.record.op, (0, 0.0))
        totals[step.record.op] = (count + 1, time + step.busy + step.latency)
        last = causes[last]
    return dict(sorted(totals.items(), key=lambda item: -item[1][1]))
