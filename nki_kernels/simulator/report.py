"""The cost model's estimate as a table."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from delta_trn.nki_kernels.simulator.core.memory import HBM
from delta_trn.nki_kernels.simulator.core.tables import LOAD_US
from delta_trn.nki_kernels.simulator.cost import Estimate
from delta_trn.nki_kernels.simulator.kernel import Run

LABEL = "ESTIMATE from the instruction trace, not a measurement"
ROWS = ("tensor", "vector", "scalar", "gpsimd", "dma")


def table(name: str, shape: str, run: Run, readings: Sequence[Estimate]) -> str:
    """Return the estimates of one kernel call, one for each reading of the cost model, as a Markdown table.

    Shares, and what binds, are those of the last reading, which is the slowest.
    """
    slow, target = readings[-1], readings[-1].target
    whole = slow.lower or 1
    counts = Counter(step.engine for step in slow.steps)

    def times(of: Callable[[Estimate], float]) -> str:
        return " | ".join(f"{of(e):.1f}" for e in readings)

    lines = [
        f"## {name} {shape} on one core of {target.name}",
        "",
        f"_{LABEL}. Microseconds under each reading of the Tensor engine's rate; the slower one counts._",
        "",
        f"| | {' | '.join(e.reading.name for e in readings)} | share of lower bound | instructions |",
        f"| --- |{' ---: |' * len(readings)} ---: | ---: |",
    ]
    rows: list[tuple[str, Callable[[Estimate], float], str]] = [
        (engine, lambda e, engine=engine: e.engines[engine], str(counts[engine])) for engine in ROWS[:-1]
    ]
    rows.append(("dma", lambda e: e.dma, str(counts["dma"])))
    rows += [(f"{p}, in turns on gen2", lambda e, p=p: e.ports[p], "") for p in slow.ports]
    rows.append(("dependency path", lambda e: e.path, ""))
    lines += [f"| {row} | {times(of)} | {of(slow) / whole:.0%} | {n} |" for row, of, n in rows]
    lines += [
        f"| **lower bound** (set by {slow.binding}) | {times(lambda e: e.lower)} | | {run.instructions} |",
        f"| **in program order** | {times(lambda e: e.schedule)} | {slow.schedule / whole:.0%} | |",
        f"| **upper bound** (no overlap) | {times(lambda e: e.upper)} | | |",
        "",
        f"HBM: {slow.hbm_read:,} bytes read, {slow.hbm_written:,} written. "
        f"Matmul: {slow.multiply_adds:,} multiply-adds. "
        f"Peak live SBUF: {run.sbuf_peak:,} of {target.sbuf:,} bytes per partition; "
        f"PSUM: {run.psum_peak} of 8 banks. "
        f"The Scalar engine loads {slow.loads} tables ({', '.join(slow.tables) or 'none'}), "
        f"{slow.loads * LOAD_US:.1f} us of its time.",
        f"Forms that no public kernel has: {', '.join(run.unprecedented) or 'none'}.",
        "",
        "| instruction | count | | longest path | count | time, us |",
        "| --- | ---: | --- | --- | ---: | ---: |",
    ]
    issued = [f"| {op} | {count} |" for op, count in slow.instructions.items()]
    longest = [f" | {op} | {count} | {time:.1f} |" for op, (count, time) in slow.critical.items()]
    for left, right in zip_longest(issued, longest):
        lines.append((left or "| | |") + (right or " | | | |"))
    return "\n".join(lines)


def traffic(run: Run, arguments: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes moved to and from HBM, and the fewest: each input and output once.

    A row that goes to all partitions counts once.
    """
    accesses = [o for r in run.trace for o in (*r.reads, *r.writes) if o.buffer in HBM]
    moved = sum(min(o.bytes, o.region.span[1] - o.region.span[0]) for o in accesses)
    outputs = run.outputs if isinstance(run.outputs, tuple) else (run.outputs,)
    arrays = {id(x): x for x in (*arguments, *outputs) if isinstance(x, np.ndarray)}
    return moved, sum(x.nbytes for x in arrays.values())
