"""A simulator of NKI, AWS's kernel language for Trainium, for everyone who writes NKI kernels
without a chip.

In Python it runs a kernel on NumPy arrays and refuses what the instruction set, the compiler or the
chip would refuse; README.md shows how. From the command line it runs a kernel on seeded
inputs, with the same checks, and prints how long each engine is busy, what binds, the peak memory
and the instructions:

    nki-simulator report KERNEL SHAPE [SHAPE ...] [--target trn2]
    nki-simulator check KERNEL SHAPE [SHAPE ...]    # forms that Trn1 refuses or gets wrong
    nki-simulator calibrate         # the model against published measurements

    KERNEL   MODULE:FUNCTION for any kernel, or a module whose function example(...) returns
             (kernel, arguments); with --package a module of that package by its last name
    SHAPE    for MODULE:FUNCTION one array per argument: 128x512,128x64:bfloat16
             for a module the keywords of its example: B=1,T=256,H=2,K=64,V=128

Every time is an estimate for Trn1, and lacks the launch of the graph and the call of the kernel.
Nothing was ever measured on a chip here. For Trn2 and Trn3 instructions, bytes and memory are
printed, and no time.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import numpy as np

from nki_simulator import subset
from nki_simulator.calibration import compare
from nki_simulator.core.chip import CHIP
from nki_simulator.core.dtypes import BY_NAME
from nki_simulator.core.memory import HBM
from nki_simulator.core.releases import RELEASES
from nki_simulator.core.tables import LOAD_US
from nki_simulator.core.targets import TARGETS
from nki_simulator.cost import CALL_US, LAUNCH_US, Estimate, Layout, estimate, lay_out
from nki_simulator.kernel import Run, record
from nki_simulator.scan import scan

LABEL = "ESTIMATE from the instruction trace, not a measurement"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nki-simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--package", default="", help="where a KERNEL without a dot is looked for: a package's name"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="estimates time and memory of one kernel")
    report.add_argument("kernel", help="MODULE:FUNCTION, or a module with an example")
    report.add_argument(
        "shape", nargs="+", help="128x512,128x64:bfloat16, or B=1,T=256,H=2,K=64,V=128"
    )
    report.add_argument("--target", choices=TARGETS, default="trn1", help="the chip (%(default)s)")
    report.add_argument(
        "--nki", choices=RELEASES, help="holds to this release's rules, not to those of all"
    )
    report.add_argument(
        "--jsonl",
        type=Path,
        help="appends the numbers to this file, a line per shape; hbm_moved and hbm_least are the bytes that "
        "move and the fewest that could: each input and output once",
    )
    check = commands.add_parser(
        "check", help="counts forms that Trn1 refuses or gets wrong; ends with 1 if there are any"
    )
    check.add_argument("kernel", help="as of report")
    check.add_argument("shape", nargs="+", help="as of report")
    check.add_argument("--nki", choices=RELEASES, help="as of report")
    calibrate = commands.add_parser(
        "calibrate", help="compares the model with published measurements"
    )
    calibrate.add_argument(
        "--kernels",
        type=Path,
        metavar="DIR",
        help="a folder with delta_rule.py, delta_rule_v2.py and kda_decode.py of kiln/kernels of "
        "github.com/foxl-ai/kiln (f5a7faf3): their published times join the points",
    )
    options = parser.parse_args(argv)
    if options.command == "calibrate":
        return compare.main(options.kernels)
    sys.path.insert(0, str(Path.cwd()))  # a console script does not look there by itself
    module = _module(options.kernel, options.package)
    if options.command == "check":
        return check_shapes(module, options.kernel, options.shape, options.nki)
    for shape in options.shape:
        kernel, arguments = load(module, options.kernel, shape)
        run = record(kernel, *arguments, target=options.target, nki=options.nki)
        layout = lay_out(run.trace, run.target)
        costs = None if run.target.refused else estimate(run.trace, run.target, layout=layout)
        print(table(options.kernel, shape, run, layout, costs))
        if options.jsonl:
            title = {"kernel": options.kernel, "shape": shape}
            with options.jsonl.open("a") as lines:
                lines.write(json.dumps(title | numbers(run, layout, costs, arguments)) + "\n")
    return 0


def check_shapes(module: ModuleType, name: str, shapes: Sequence[str], nki: str | None) -> int:
    """Print what `scan` finds in a kernel at each shape on Trn1, and what its source has that some
    release refuses. Return 1 if there is anything.
    """
    found = False
    for shape in shapes:
        kernel, arguments = load(module, name, shape)
        run = record(kernel, *arguments, target="trn1", nki=nki, without=CHIP, check_source=False)
        counted, refused = scan(run.trace), subset.findings(kernel, nki)
        found |= bool(counted) or bool(refused)
        print(f"{name} {shape}: {counted}", *refused, sep="\n  ")
    return int(found)


def _module(kernel: str, package: str = "") -> ModuleType:
    """Return the module of KERNEL; SystemExit that names the nearest where there is none.

    A name without a function and without a dot is looked for in `package`, if there is one.
    """
    name, _, function = kernel.partition(":")
    inside = bool(package) and not function and "." not in name
    whole = f"{package}.{name}" if inside else name
    try:
        return import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:
            raise  # something that a module of this name imports
        known = iter_modules(import_module(package).__path__) if inside else ()
        near = get_close_matches(name, [module.name for module in known], n=1)
        where = f", expected one of {package}, or MODULE:FUNCTION" if inside else ""
        hint = f"; did you mean {near[0]}" if near else ""
        raise SystemExit(f"no module {name!r}{where}{hint}") from None


def load(module: ModuleType, kernel: str, shape: str) -> tuple[Any, tuple[Any, ...]]:
    """Return the kernel and its arguments."""
    name = kernel.partition(":")[2]
    if name:
        return getattr(module, name), tuple(_array(word) for word in shape.split(","))
    if not hasattr(module, "example"):
        raise SystemExit(
            f"{module.__name__} has no function example(...); name the kernel as MODULE:FUNCTION"
        )
    return module.example(**_keywords(shape))


def _keywords(words: str) -> dict[str, int | str]:
    """Parse "B=1,T=256" to {"B": 1, "T": 256}."""
    pairs = (word.partition("=") for word in words.split(",") if word)
    return {key: int(value) if value.lstrip("-").isdigit() else value for key, _, value in pairs}


def _array(word: str) -> np.ndarray:
    """Return seeded normal numbers of a shape and dtype such as "128x512:bfloat16"."""
    sizes, _, dtype = word.partition(":")
    shape = tuple(int(n) for n in sizes.split("x"))
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return values.astype(BY_NAME[dtype or "float32"].numpy)


def numbers(run: Run, layout: Layout, costs: Estimate | None, arguments: Any) -> dict[str, Any]:
    """Return the estimate without its steps, memory peaks and traffic; without a time where the
    target has none.
    """
    times: dict[str, Any] = {"refused": run.target.refused}
    if costs is not None:
        times = {"unit": "microseconds", **vars(costs)}
        for name in ("steps", "target", "traffic"):
            del times[name]
        times |= {"binding": costs.binding, "tensor_share": costs.tensor_share}
        times |= {"launch_beside": LAUNCH_US, "call_beside": CALL_US}
    moved, least = traffic(run, arguments)
    return {
        "label": LABEL,
        "target": run.target.name,
        **times,
        **vars(layout.traffic),
        **({"engines": times["engines"]} if costs is not None else {}),
        "engine_instructions": layout.traffic.engines,
        "count": run.instructions,
        "sbuf_peak": run.sbuf_peak,
        "psum_peak": run.psum_peak,
        "hbm_moved": moved,
        "hbm_least": least,
    }


def table(name: str, shape: str, run: Run, layout: Layout, costs: Estimate | None) -> str:
    """Return what a kernel call takes as a Markdown table, without times where the target has
    none.
    """
    target, own = run.target, layout.traffic
    lines = [f"## {name} {shape} on one core of {target.name}", "", f"_{LABEL}._", ""]
    if costs is None:
        lines += [
            f"No time is estimated for {target.name}: {target.refused}.",
            "",
            "| | instructions |",
            "| --- | ---: |",
        ]
        lines += [f"| {engine} | {n} |" for engine, n in own.engines.items()]
        lines.append(f"| **all** | {run.instructions} |")
    else:
        whole = costs.lower or 1
        lines += [
            "| | microseconds | share of lower bound | instructions |",
            "| --- | ---: | ---: | ---: |",
        ]
        rows = [
            (engine, time, own.engines.get(engine, 0)) for engine, time in costs.engines.items()
        ]
        rows.append(("dma", costs.dma, own.engines.get("dma", 0)))
        rows += [(f"{port}, in turns on gen2", time, "") for port, time in costs.ports.items()]
        rows.append(("dependency path", costs.path, ""))
        lines += [f"| {row} | {time:.1f} | {time / whole:.0%} | {n} |" for row, time, n in rows]
        lines += [
            f"| **lower bound** (set by {costs.binding}) | {costs.lower:.1f} | | "
            f"{run.instructions} |",
            f"| **in program order** | {costs.schedule:.1f} | {costs.schedule / whole:.0%} | |",
            f"| **upper bound** (no overlap) | {costs.upper:.1f} | | |",
            "",
            f"Beside it, not included: {LAUNCH_US:.0f} us for the launch of a graph, {CALL_US:.0f} us "
            "for each kernel that is called in one.",
        ]
    lines += [
        "",
        f"HBM: {own.hbm_read:,} bytes read, {own.hbm_written:,} written. "
        f"Matmul: {own.multiply_adds:,} multiply-adds. "
        f"Peak live SBUF: {run.sbuf_peak:,} of {target.sbuf:,} bytes per partition; "
        f"PSUM: {run.psum_peak} of 8 banks. "
        f"The Scalar engine loads {own.loads} tables ({', '.join(own.tables) or 'none'})"
        + (f", {own.loads * LOAD_US:.1f} us of its time." if costs is not None else "."),
        f"Forms that no public kernel has: {', '.join(run.unprecedented) or 'none'}.",
        "",
        "| instruction | count | | longest path | count | time, us |",
        "| --- | ---: | --- | --- | ---: | ---: |",
    ]
    issued = [f"| {op} | {count} |" for op, count in own.instructions.items()]
    path = costs.critical.items() if costs is not None else ()
    longest = [f" | {op} | {count} | {time:.1f} |" for op, (count, time) in path]
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


if __name__ == "__main__":
    raise SystemExit(main())
