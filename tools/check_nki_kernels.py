"""Looks in the NKI kernels for forms that others measured to fail on a Trn1, over parity's grid.

    python -m tools.check_nki_kernels                   every case, in every dtype: half an hour
    python -m tools.check_nki_kernels --quarter         a case of each kernel
    python -m tools.check_nki_kernels --case gva_8      that case; may be given again

It runs each case on `nki-simulator`, judges no number, and counts in the traces

    GpSimd              instructions of GpSimd but memset, iota and affine_select: neuronx-cc 2.27
                        has compiled no tensor_tensor, tensor_scalar or scalar_tensor_tensor there
    sums at risk        sums of two or more products whose PSUM tensor holds something else too:
                        where it holds another such sum, a Trn1 lost terms without a word
    open sums read      instructions that read a PSUM tensor between two products of a sum
    free dimensions     of an operand on chip, at most; dimensions that lie one in the other count
                        once

The exit status is 1 if a count is not 0, or a fourth free dimension was found.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from nki_simulator import record
from nki_simulator.core.instruction import Instruction
from nki_simulator.core.machine import Engine, Record
from nki_simulator.core.memory import PSUM, NkiTensor

ON_GPSIMD = frozenset({"memset", "iota", "affine_select"})
MOST_DIMENSIONS = 3


@dataclass
class Findings:
    """Holds what was counted in some traces."""

    calls: int = 0
    instructions: int = 0
    gpsimd: int = 0
    sums_at_risk: int = 0
    open_sums_read: int = 0
    dimensions: int = 0

    @property
    def passed(self) -> bool:
        return (
            not (self.gpsimd or self.sums_at_risk or self.open_sums_read)
            and self.dimensions <= MOST_DIMENSIONS
        )

    def add(self, other: "Findings") -> None:
        """Adds the counts of further traces."""
        self.dimensions = max(self.dimensions, other.dimensions)
        for name in ("calls", "instructions", "gpsimd", "sums_at_risk", "open_sums_read"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Products:
    """Names products of the Tensor engine that add up: the first, the last, and how many."""

    first: int
    last: int
    count: int = 1


def list_sums(trace: Sequence[Record]) -> dict[int, list[Products]]:
    """Returns the sums of each PSUM tensor, single products among them, by the tensor's number."""
    sums: dict[int, list[Products]] = defaultdict(list)
    open_sums: dict[tuple[Any, ...], Products] = {}
    for i, entry in enumerate(trace):
        for operand in entry.writes if entry.engine is Engine.tensor else ():
            if operand.buffer is not PSUM:
                continue
            region = operand.region
            key = (region.storage, region.partitions, region.span)
            if entry.flags.get("accumulate") and key in open_sums:
                open_sums[key].last = i
                open_sums[key].count += 1
            else:
                open_sums[key] = Products(i, i)
                sums[region.storage].append(open_sums[key])
    return sums


def scan(trace: Sequence[Record], dimensions: int = 0) -> Findings:
    """Counts the forms in the trace of one call."""
    sums = list_sums(trace)
    gpsimd = sum(x.engine is Engine.gpsimd and x.op not in ON_GPSIMD for x in trace)
    at_risk = sum(x.count > 1 for own in sums.values() if len(own) > 1 for x in own)
    read = 0
    for i, entry in enumerate(trace):
        storages = {operand.region.storage for operand in entry.reads if operand.buffer is PSUM}
        read += any(x.first < i < x.last for storage in storages for x in sums.get(storage, ()))
    return Findings(1, len(trace), gpsimd, at_risk, read, dimensions)


def count_free_dimensions(tensor: NkiTensor) -> int:
    """Returns how many free dimensions an operand has; two that lie one in the other are one."""
    count, before = 0, None
    for size, stride in zip(tensor.array.shape[1:], tensor.array.strides[1:], strict=True):
        if size == 1:
            continue
        count += before is None or before != stride * size
        before = stride
    return count


@contextmanager
def watch_dimensions() -> Iterator[list[int]]:
    """Gives a list to which the free dimensions of every operand on chip are appended."""
    seen: list[int] = []
    operand = Instruction._operand  # pyright: ignore[reportPrivateUsage]

    def watched(self: Any, role: str, tensor: Any, regions: Any) -> NkiTensor:
        found = operand(self, role, tensor, regions)
        if found.on_chip and self.engine is not Engine.dma:
            seen.append(count_free_dimensions(found))
        return found

    with mock.patch.object(Instruction, "_operand", watched):
        yield seen


def check(kernel: Any, *arguments: Any, **options: Any) -> tuple[Findings, Any]:
    """Runs a kernel, and returns what was counted and the kernel's outputs."""
    with watch_dimensions() as seen:
        run = record(kernel, *arguments, check_source=False, **options)
    return scan(run.trace, max(seen, default=0)), run.outputs


def check_calls(work: Callable[[], object]) -> dict[str, Findings]:
    """Checks every kernel that `work` calls on `nki-simulator`: kernel -> what was counted."""
    from delta_trn.backends import nki_runtime_adapter

    found: dict[str, Findings] = {}

    def checked(kernel: Any, *arguments: Any) -> Any:
        own, outputs = check(kernel, *arguments, target="trn1")
        found.setdefault(kernel.__name__, Findings()).add(own)
        return outputs

    with mock.patch.object(nki_runtime_adapter, "simulate", checked):
        work()
    return found


def list_works(
    names: Sequence[str] | None, dtype_names: Sequence[str]
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Lists (case, dtype, what runs it on `nki-simulator`) of parity's grid, or of the cases named.

    Raises ValueError for a name that no case has.
    """
    from delta_trn.backends.checks import dtype_name
    from delta_trn.backends.parity import layer_cases, mixer_cases, rule, rule_cases
    from delta_trn.backends.parity.__main__ import GRIDS, Subject

    subject = Subject("nki-simulator", "cpu")
    known = {name for grid in GRIDS.values() for name in grid.cases}
    for name in names or ():
        if name not in known:
            raise ValueError(f"no case of parity is named {name!r}; see backends/parity")
    for grid, cases in subject.cases(names, slow=False, whole=True).items():
        for case in cases:
            for dtype in subject.dtypes(case.op):
                if dtype_name(dtype) not in dtype_names:
                    continue

                def work(grid: str = grid, case: Any = case, dtype: Any = dtype) -> object:
                    if grid in ("layers", "mixer"):
                        module = layer_cases if grid == "layers" else mixer_cases
                        own = module.inputs(case, dtype)
                        return layer_cases.OPERATIONS[case.op].outcome(own, subject.backend)
                    own = rule_cases.inputs(case, dtype)
                    run = rule.decode if "step" in grid else rule.outcome
                    return run(own, subject.backend)

                yield case.name, dtype_name(dtype), work


def report(found: dict[str, Findings]) -> Iterable[str]:
    """Lists the lines of the table, a line a kernel."""
    heading = ("calls", "instructions", "GpSimd", "sums at risk", "open sums read", "free dims")
    yield f"{'kernel':26}" + "".join(f"{text:>15}" for text in heading)
    for name, own in sorted(found.items()):
        figures = (
            own.calls, own.instructions, own.gpsimd, own.sums_at_risk, own.open_sums_read,
            own.dimensions,
        )  # fmt: skip
        yield f"{name:26}" + "".join(f"{figure:>15,}" for figure in figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    from delta_trn.backends.checks import BackendRefusal
    from delta_trn.backends.parity.__main__ import QUARTER

    parser = argparse.ArgumentParser(prog="python -m tools.check_nki_kernels")
    parser.add_argument("--case", action="append", metavar="NAME", help="a case of parity's grid")
    parser.add_argument("--quarter", action="store_true", help="a case of each kernel")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    options = parser.parse_args(arguments)
    names = list(QUARTER) if options.quarter else options.case
    found: dict[str, Findings] = {}
    refused: Counter[str] = Counter()
    try:
        for case, dtype, work in list_works(names, options.dtype or ("float32", "bfloat16")):
            try:
                own = check_calls(work)
            except BackendRefusal as refusal:
                refused[str(refusal)] += 1
                continue
            for name, findings in own.items():
                found.setdefault(name, Findings()).add(findings)
                if not findings.passed:
                    print(f"{case} in {dtype}: {name} {findings}", flush=True)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(report(found)))
    for text, count in refused.items():
        print(f"not run, {count}: {text}")
    passed = all(own.passed for own in found.values())
    print("passed" if passed else "failed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
