"""The cost model's estimate as a table and as a picture of the engines' timeline."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from delta_trn.nki_kernels.simulator.core.memory import HBM
from delta_trn.nki_kernels.simulator.cost import Estimate
from delta_trn.nki_kernels.simulator.kernel import Run

LABEL = "ESTIMATE from the instruction trace, not a measurement"
ROWS = ("tensor", "vector", "scalar", "gpsimd", "dma")
COLORS = {
    "tensor": "#4269d0",
    "vector": "#efb118",
    "scalar": "#ff725c",
    "gpsimd": "#6cc5b0",
    "dma": "#9498a0",
}


def table(name: str, shape: str, run: Run, estimate: Estimate) -> str:
    """Return the estimate of one kernel call as a Markdown table."""
    target, whole = estimate.target, estimate.lower or 1
    counts = Counter(step.engine for step in estimate.steps)
    times = {**estimate.engines, "dma": estimate.dma}
    rows = [(engine, times[engine], str(counts[engine])) for engine in ROWS]
    rows += [(f"{port}, in turns on gen2", time, "") for port, time in estimate.ports.items()]
    rows.append(("dependency path", estimate.path, ""))
    lines = [
        f"## {name} {shape} on one core of {target.name}",
        "",
        f"_{LABEL}._",
        "",
        "| | time, us | share of lower bound | instructions |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {row} | {time:.1f} | {time / whole:.0%} | {count} |" for row, time, count in rows),
        f"| **lower bound** (set by {estimate.binding}) | **{estimate.lower:.1f}** | | {run.instructions} |",
        f"| in program order | {estimate.schedule:.1f} | {estimate.schedule / whole:.0%} | |",
        f"| **upper bound** (no overlap) | **{estimate.upper:.1f}** | | |",
        "",
        f"HBM: {estimate.hbm_read:,} bytes read, {estimate.hbm_written:,} written. "
        f"Matmul: {estimate.multiply_adds:,} multiply-adds. "
        f"Peak live SBUF: {run.sbuf_peak:,} of {target.sbuf:,} bytes per partition; "
        f"PSUM: {run.psum_peak} of 8 banks.",
        "",
        "| instruction | count | | longest path | count | time, us |",
        "| --- | ---: | --- | --- | ---: | ---: |",
    ]
    issued = [f"| {op} | {count} |" for op, count in estimate.instructions.items()]
    longest = [f" | {op} | {count} | {time:.1f} |" for op, (count, time) in estimate.critical.items()]
    for left, right in zip_longest(issued, longest):
        lines.append((left or "| | |") + (right or " | | | |"))
    return "\n".join(lines)


def traffic(run: Run, arguments: Sequence[Any], between: Sequence[Any] = ()) -> tuple[int, int]:
    """Return the bytes moved to and from HBM, and the fewest: each input and output once.

    `between` are arrays that one kernel hands to another; the fewest bytes leave them out. A row that goes to
    all partitions counts once.
    """
    accesses = [o for r in run.trace for o in (*r.reads, *r.writes) if o.buffer in HBM]
    moved = sum(min(o.bytes, o.region.span[1] - o.region.span[0]) for o in accesses)
    outputs = run.outputs if isinstance(run.outputs, tuple) else (run.outputs,)
    arrays = {id(x): x for x in (*arguments, *outputs) if isinstance(x, np.ndarray)}
    least = sum(x.nbytes for x in arrays.values())
    return moved, least - sum(x.nbytes for x in between)


def timeline(name: str, shape: str, estimate: Estimate, path: Path) -> Path:
    """Draw to a PNG when each engine is busy in the program-order schedule, and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 3.2))
    for row, engine in enumerate(reversed(ROWS)):
        spans = [(s.start, max(s.busy, 1e-3)) for s in estimate.steps if s.engine == engine]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=COLORS[engine], linewidth=0)
    axes.set_yticks(range(len(ROWS)), list(reversed(ROWS)))
    axes.set_xlabel("time, us (estimate)")
    axes.set_xlim(0, estimate.schedule)
    axes.axvline(estimate.lower, color="black", linestyle=":", linewidth=1)
    where = f"one core of {estimate.target.name}, program order; dotted: lower bound"
    axes.set_title(f"{name} {shape}, {where}\n{LABEL}", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
