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
    four dimensions     instructions with an operand on chip of more than three free dimensions

The exit status is 1 if a count is not 0. `nki-simulator check` counts in any kernel what the
simulator refuses; here the first two are wider: kernels need neither.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

from nki_simulator import record
from nki_simulator.core.chip import DIMENSIONS, GPSIMD, OPEN, SUMS, Sums
from nki_simulator.core.machine import Engine, Record
from nki_simulator.core.memory import PSUM
from nki_simulator.scan import scan as scan_for_refused

ON_GPSIMD = frozenset({"memset", "iota", "affine_select"})
COUNTED = (GPSIMD, SUMS, OPEN, DIMENSIONS)  # and not refused; the chip's other rules hold


@dataclass
class Findings:
    """Holds what was counted in some traces."""

    calls: int = 0
    instructions: int = 0
    gpsimd: int = 0
    sums_at_risk: int = 0
    open_sums_read: int = 0
    four_dimensions: int = 0

    @property
    def passed(self) -> bool:
        return not (self.gpsimd or self.sums_at_risk or self.open_sums_read or self.four_dimensions)

    def add(self, other: "Findings") -> None:
        """Adds the counts of further traces."""
        for own in fields(self):
            setattr(self, own.name, getattr(self, own.name) + getattr(other, own.name))


def scan(trace: Sequence[Record]) -> Findings:
    """Counts the forms in the trace of one call."""
    refused = scan_for_refused(trace)
    sums: dict[int, Sums] = defaultdict(Sums)
    for i, entry in enumerate(trace):
        for operand in entry.writes if entry.engine is Engine.tensor else ():
            if operand.buffer is PSUM:
                place = (operand.region.partitions, operand.region.span)
                adds = bool(entry.flags.get("accumulate"))
                sums[operand.region.storage].add(place, i, adds)
    gpsimd = sum(x.engine is Engine.gpsimd and x.op not in ON_GPSIMD for x in trace)
    at_risk = sum(own.long for own in sums.values() if len(own.made) > 1)
    return Findings(1, len(trace), gpsimd, at_risk, refused.open_reads, refused.wide_accesses)


def check(kernel: Any, *arguments: Any, **options: Any) -> tuple[Findings, Any]:
    """Runs a kernel, and returns what was counted and the kernel's outputs."""
    run = record(kernel, *arguments, check_source=False, without=COUNTED, **options)
    return scan(run.trace), run.outputs


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
    heading = ("calls", "instructions", "GpSimd", "sums at risk", "open sums read", "four dims")
    yield f"{'kernel':26}" + "".join(f"{text:>15}" for text in heading)
    for name, own in sorted(found.items()):
        figures = (
            own.calls, own.instructions, own.gpsimd, own.sums_at_risk, own.open_sums_read,
            own.four_dimensions,
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
