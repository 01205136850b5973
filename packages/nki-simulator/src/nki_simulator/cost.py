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

An instruction that waits for another engine is busy for `Costs.wait` longer: its engine tests a
semaphore, and its pipeline starts empty. Where its engine has waited for that instruction already,
or for a later one of the same engine, there is nothing to wait for. Engines wait for whole tensors,
as the compiler tracks dependencies, not for the bytes that an instruction touches; within one
engine, bytes count.

Sources: cycles from the instruction pages of NKI Beta 1 (SDK 2.26), which later pages dropped;
clocks and bandwidths from the architecture guides; latencies from both and from the performance
guide (100 cycles between dependent Vector instructions, 264 Scalar cycles per small dependent
activation, 64 cycles to fill the Tensor engine's array, 60 to reach SBUF or PSUM). Three costs are
inferred: a DMA descriptor costs at least 512 bytes of bandwidth; a table of functions is loaded as
soon as the Scalar engine is free; elementwise work on GpSimd costs 150 cycles, and one more per
element, or four for roots and powers (NKI's documentation has a root there four times as slow as
the Scalar engine's).

`Costs` has what published measurements on Trn1 decide, most of them by `tools/probe_engine_rates.py`
of foxl-ai/kiln (trn1.2xlarge, nki 0.6.0), which times one more instruction of a kind, at 2.8 GHz of
the Tensor, 1.12 GHz of the Vector and 1.4 GHz of the Scalar engine:

    Tensor      a column takes a sixth longer than documented: 78.6 TFLOPS, as a second source has
                it for large products. float32 takes three passes and a part that grows with the
                columns; fewer than 16 stationary columns, or fewer than 128 rows, make it dearer
    Vector      38 cycles beside the elements; a second input costs a little more than the first
                where both are in SBUF (between the probe and AccelOpt), and nothing where one is in
                PSUM
    Scalar      32 cycles beside the elements
    waiting     0.11 microseconds on each of these engines, by the busy times of kiln's kernels
    reciprocal  3 cycles per element on the Vector engine, not 8 (AccelOpt)
    scan        1 cycle per element on the Vector engine, not 2 as other instructions with two full
                inputs (AccelOpt)

`nki-simulator calibrate` prints the model beside each published point. What is outside of a kernel
is in no estimate: `LAUNCH_US` for a graph, `CALL_US` more for every kernel in it. For Trn2 and Trn3
no time is estimated (`Target.refused`).
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
SLOW = 4  # cycles per element of roots and powers on GpSimd
SBUF_PORT = "vector+gpsimd on SBUF"
PSUM_PORT = "vector+scalar on PSUM"
LAUNCH_US = 140.0  # of a graph, measured on trn1 by foxl-ai/kiln: 137 to 145
CALL_US = 210.0  # of each NKI call in a graph, beside its own work, by the same source

TWO_INPUTS = (
    "tensor_tensor", "scalar_tensor_tensor", "tensor_copy_predicated", "select_reduce",
)  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """What published measurements decide, in cycles of the engine that is named first.

    >>> round(COSTS.product(512, 128, 128)), round(COSTS.product(512, 128, 128, fp32=True))
    (597, 3227)
    """

    tensor_column: float = 7 / 6
    tensor_fp32: float = 3.2  # passes of a float32 product,
    tensor_fp32_column: float = 0.0043  # and of a pass more for each column
    tensor_narrow: float = 0.0019  # of the price more, for each column, below 16 stationary ones
    tensor_short: float = 0.0056  # of the price more, for each row fewer than 128
    vector_overhead: float = 38.0
    vector_second: float = 1.15  # cycles per element of a second input, if both are in SBUF
    vector_reciprocal: float = 3.0  # cycles per element
    scalar_overhead: float = 32.0
    sum_overhead: float = 110.0  # of an instruction that sums as well, on either engine
    tensor_wait: float = 0.11  # microseconds more of an instruction that waits for another engine
    vector_wait: float = 0.11
    scalar_wait: float = 0.11

    def product(self, columns: float, rows: int, stationary: int, fp32: bool = False) -> float:
        """Returns the cycles of one product of moving `columns` on the Tensor engine."""
        cycles = self.tensor_column * columns
        if fp32:
            cycles *= self.tensor_fp32 + columns * self.tensor_fp32_column
        if stationary < 16:
            cycles *= 1 + columns * self.tensor_narrow
        return cycles * (1 + self.tensor_short * (128 - rows))

    def wait(self, engine: Engine) -> float:
        """Returns how much longer an instruction is busy that waits for another engine."""
        waits = {
            Engine.tensor: self.tensor_wait,
            Engine.scalar: self.scalar_wait,
            Engine.vector: self.vector_wait,
        }
        return waits.get(engine, 0.0)


COSTS = Costs()


@dataclass(frozen=True)
class Step:
    """One instruction in the estimated schedule, with times in microseconds."""

    record: Record
    engine: str
    start: float
    busy: float
    latency: float


@dataclass(frozen=True)
class Traffic:
    """What a kernel call issues and moves, of which nothing is estimated."""

    instructions: dict[str, int]
    engines: dict[str, int]  # instructions by engine
    hbm_read: int
    hbm_written: int
    multiply_adds: int
    tables: tuple[str, ...]  # sets that the Scalar engine loads
    loads: int


@dataclass(frozen=True)
class Place:
    """Where an instruction stands among the others, whatever they cost."""

    queues: tuple[str, ...]  # its own, and the ports that it occupies
    loads: bool  # a table of functions
    needs: tuple[tuple[int, bool], ...]  # what it waits for, and whether its sums stream on
    waits: bool  # for another engine


@dataclass(frozen=True)
class Layout:
    """The places of a trace, and its traffic."""

    places: tuple[Place, ...]
    traffic: Traffic


@dataclass(frozen=True)
class Estimate:
    """Estimated times of one kernel call in microseconds, and its traffic."""

    target: Target
    engines: dict[str, float]
    ports: dict[str, float]
    dma: float
    path: float
    lower: float
    schedule: float
    upper: float
    traffic: "Traffic"
    critical: dict[str, tuple[int, float]]  # op -> count and time on the longest path
    steps: tuple[Step, ...]

    @property
    def instructions(self) -> dict[str, int]:
        return self.traffic.instructions

    @property
    def tables(self) -> tuple[str, ...]:
        """The sets of functions that the Scalar engine loads."""
        return self.traffic.tables

    @property
    def loads(self) -> int:
        """How often it loads one."""
        return self.traffic.loads

    @property
    def binding(self) -> str:
        """The name of what sets the lower bound."""
        times = {**self.engines, **self.ports, "dma": self.dma, "dependency path": self.path}
        return max(times, key=lambda name: times[name])

    @property
    def tensor_share(self) -> float:
        """The share of the lower bound in which the Tensor engine is busy."""
        return self.engines.get("tensor", 0.0) / self.lower if self.lower else 0.0


def estimate(
    trace: Sequence[Record], target: Target, costs: Costs = COSTS,
    layout: "Layout | None" = None, prices: Sequence[tuple[float, float]] | None = None,
) -> Estimate:  # fmt: skip
    """Estimate the time that a traced kernel call takes on one core of the target.

    `layout` is what `lay_out` returns, and `prices` what `instruction_cost` returns for each
    instruction, where they are known. Raises ValueError for a target whose
    times are not calibrated.

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
    if target.refused:
        raise ValueError(f"no time is estimated for {target.name}: {target.refused}")
    layout = lay_out(trace, target) if layout is None else layout
    steps: list[Step] = []
    free: dict[str, float] = defaultdict(float)
    busy_of: dict[str, float] = defaultdict(float)
    ports: dict[str, float] = defaultdict(float)
    ends: list[float] = []  # of each instruction in the schedule
    path_ends: list[float] = []  # of each instruction if only its dependencies delay it
    causes: list[int | None] = []  # which instruction delays it most on that path
    transfers: list[tuple[float, float]] = []
    upper = 0.0
    prices = [instruction_cost(r, target, costs) for r in trace] if prices is None else prices
    for record, place, (busy, latency) in zip(trace, layout.places, prices, strict=True):
        if place.waits:
            busy += costs.wait(record.engine)
        engine = record.engine.name
        if place.loads:
            free[engine] += LOAD_US
            busy_of[engine] += LOAD_US
            upper += LOAD_US
        start, longest, cause = max(free[q] for q in place.queues), 0.0, None
        for j, streams in place.needs:
            wait = 0.0 if streams else steps[j].latency
            start = max(start, ends[j] + wait)
            if path_ends[j] + wait > longest:
                longest, cause = path_ends[j] + wait, j
        if record.engine is Engine.dma:
            start = _reserve(transfers, start, busy)
        for queue in place.queues:
            free[queue] = start + busy
            ports[queue] += busy
        busy_of[engine] += busy
        ends.append(start + busy)
        path_ends.append(longest + busy)
        causes.append(cause)
        steps.append(Step(record, engine, start, busy, latency))
        upper += busy + latency
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
        engines=engines,
        ports=shared,
        dma=dma,
        path=path,
        lower=max([*engines.values(), *shared.values(), dma, path]),
        schedule=max((s.start + s.busy + s.latency for s in steps), default=0.0),
        upper=upper,
        traffic=layout.traffic,
        critical=_critical(steps, causes, finish),
        steps=tuple(steps),
    )


def lay_out(trace: Sequence[Record], target: Target) -> Layout:
    """Return what waits for what in a traced kernel call, and what it issues and moves."""
    tables, places = Tables(), []
    known: dict[tuple[str, str], int] = {}  # the last that a queue has waited for, by queue
    queues = [find_queue(record) for record in trace]
    read = written = macs = 0
    for i, needs in enumerate(list_dependencies(trace)):
        record = trace[i]
        function = record.flags.get("function", "copy")
        loads = record.engine is Engine.scalar and tables.load_for(function)
        # An accumulation group streams through the array without waiting for its own sums.
        waits = tuple((j, accumulates(trace[j], record)) for j in sorted(needs))
        others = False
        for j in needs:
            if queues[j] != queues[i] and j > known.get((queues[i], queues[j]), -1):
                known[queues[i], queues[j]] = j
                others = True
        own = (*list_ports(record, target), queues[i])
        places.append(Place(own, loads, waits, others))
        read += sum(o.bytes for o in record.reads if o.buffer in HBM)
        written += sum(o.bytes for o in record.writes if o.buffer in HBM)
        if record.op == "nc_matmul":
            macs += record.flags["K"] * record.flags["M"] * record.flags["N"]
    counts = Counter(record.op for record in trace).most_common()
    engines = Counter(record.engine.name for record in trace)
    traffic = Traffic(
        dict(counts), dict(engines), read, written, macs, tables.names(), tables.loads
    )
    return Layout(tuple(places), traffic)


def instruction_cost(record: Record, target: Target, costs: Costs = COSTS) -> tuple[float, float]:
    """Return what one instruction costs in microseconds, where it waits for nothing:
    (busy, latency).
    """
    operands, flags = (*record.reads, *record.writes), record.flags
    if record.engine is Engine.dma:  # its data, and at least DESCRIPTOR_BYTES per contiguous piece
        size, run = max(o.bytes for o in operands), max(1, min(o.run for o in operands))
        size = max(size, -(-size // run) * DESCRIPTOR_BYTES)
        return size / (target.dma_gb_s * 1e3), target.dma_latency_us
    engine = record.engine if record.engine in LATENCY else Engine.vector
    F = max((o.free for o in (*record.reads[:1], *record.writes[:1])), default=1)
    summing = costs.sum_overhead if flags.get("reduces") else 0
    if record.op == "nc_matmul":
        K, M, N, fp32 = flags["K"], flags["M"], flags["N"], flags["fp32"]
        cycles = costs.product(max(MIN_CYCLES, N), min(K, 128), M, fp32)
        if fp32 and flags["onezero"]:
            cycles /= 2
    elif engine is Engine.tensor:
        P = flags["P"]
        cycles = costs.product(max(MIN_CYCLES, P), P, flags["F"], flags["fp32"])
    elif engine is Engine.scalar:
        cycles = max(MIN_CYCLES, F + costs.scalar_overhead) + summing
    elif engine is Engine.gpsimd:
        cycles = 150 + (SLOW * F if flags.get("slow") else F)
    elif record.op == "reciprocal":
        cycles = costs.vector_overhead + costs.vector_reciprocal * F
    elif record.op in TWO_INPUTS and not any(o.buffer is PSUM for o in record.reads):
        cycles = costs.vector_overhead + (1 + costs.vector_second) * F
    else:
        cycles = max(MIN_CYCLES, costs.vector_overhead + F) + summing
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

    Between engines a whole tensor is waited for, and of each engine its last such instruction, as
    it runs in order; within an engine, or a queue of DMA, the bytes decide. This holds on chip and
    in HBM alike, except that two writes to HBM never wait for each other: there the tiles of
    different heads interleave without overlapping.
    """
    writers: dict[int, dict[str, int]] = defaultdict(dict)  # the last of each queue
    readers: dict[int, dict[str, int]] = defaultdict(dict)
    wrote: dict[tuple[int, str], list[tuple[Operand, int]]] = defaultdict(list)  # within a queue
    read: dict[tuple[int, str], list[tuple[Operand, int]]] = defaultdict(list)
    result: list[set[int]] = []
    for i, record in enumerate(trace):
        needs: set[int] = set()
        queue = find_queue(record)
        for operand in record.reads:
            key = operand.region.storage
            needs.update(j for other, j in writers[key].items() if other != queue)
            needs.update(j for other, j in wrote[key, queue] if _overlap(operand, other))
            readers[key][queue] = i
            read[key, queue].append((operand, i))
        for operand in record.writes:
            key = operand.region.storage
            if operand.buffer not in HBM:
                for users in (writers[key], readers[key]):
                    needs.update(j for other, j in users.items() if other != queue)
                mine = (*wrote[key, queue], *read[key, queue])
                needs.update(j for other, j in mine if j != i and _overlap(operand, other))
                for users in (wrote, read):
                    left = [(o, j) for o, j in users[key, queue] if not _covers(operand, o)]
                    users[key, queue] = left
            writers[key][queue] = i
            wrote[key, queue].append((operand, i))
        needs.discard(i)
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
