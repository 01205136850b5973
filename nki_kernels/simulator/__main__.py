"""python -m nki_kernels.simulator report KERNEL SHAPE [SHAPE ...] [--target trn1] [--png FILE] [--jsonl FILE]

KERNEL   a module of nki_kernels (gated_delta_rule_fwd) that has a function example(...) returning
         (kernel, arguments), or MODULE:FUNCTION for any other kernel
SHAPE    for an example, its keywords: B=1,T=256,H=2,K=64,V=128
         for MODULE:FUNCTION, one array per argument: 128x512,128x64:bfloat16
--design NAME=N,...    constants of the kernel's module to replace, to see what a decision is worth
--jsonl FILE           append the numbers, a line per shape; beside the estimate memory peaks, hbm_moved and
                       hbm_least: bytes of the inputs and outputs once each

Everything that it prints is an estimate.
"""

import argparse
import dataclasses
import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from delta_trn.nki_kernels.simulator.core.dtypes import BY_NAME
from delta_trn.nki_kernels.simulator.core.targets import TARGETS
from delta_trn.nki_kernels.simulator.cost import Estimate, estimate
from delta_trn.nki_kernels.simulator.kernel import Run, record
from delta_trn.nki_kernels.simulator.report import LABEL, table, timeline, traffic


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nki_kernels.simulator", description="estimates of NKI kernels"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="cost estimate of one kernel and shape")
    report.add_argument("kernel")
    report.add_argument("shape", nargs="+")
    report.add_argument("--target", default="trn1", choices=list(TARGETS))
    report.add_argument("--design", default="", help="constants of the kernel's module: NAME=N,...")
    report.add_argument(
        "--png",
        type=Path,
        help="where to draw the timeline (default: KERNEL-SHAPE-TARGET.png, or nowhere with --jsonl)",
    )
    report.add_argument("--jsonl", type=Path, help="append the numbers there, a line per shape")
    options = parser.parse_args(argv)
    module = _module(options.kernel)
    for word in filter(None, options.design.split(",")):
        name, _, value = word.partition("=")
        if not hasattr(module, name):
            raise SystemExit(f"{module.__name__} has no constant {name}; see --help")
        setattr(module, name, _number(value))
    for shape in options.shape:
        kernel, arguments = load(module, options.kernel, shape)
        run = record(kernel, *arguments, target=options.target)
        costs = estimate(run.trace, run.target)
        print(table(options.kernel, shape, run, costs))
        between = module.between(arguments, run.outputs) if hasattr(module, "between") else ()
        if options.jsonl:
            title = {"kernel": options.kernel, "shape": shape, "design": options.design}
            with options.jsonl.open("a") as lines:
                lines.write(json.dumps(title | numbers(run, costs, arguments, between)) + "\n")
        if options.png or not options.jsonl:
            words = f"{options.kernel}-{shape}-{options.target}".translate(str.maketrans(":,", "--", "="))
            picture = timeline(options.kernel, shape, costs, options.png or Path(words + ".png"))
            print(f"\ntimeline: {picture}")
    return 0


def _module(kernel: str) -> ModuleType:
    name, _, function = kernel.partition(":")
    return import_module(name if function or "." in name else f"nki_kernels.{name}")


def load(module: ModuleType, kernel: str, shape: str) -> tuple[Any, tuple[Any, ...]]:
    """The kernel and its arguments."""
    name = kernel.partition(":")[2]
    if name:
        return getattr(module, name), tuple(_array(word) for word in shape.split(","))
    if not hasattr(module, "example"):
        raise SystemExit(
            f"{module.__name__} has no function example(...); name the kernel as MODULE:FUNCTION"
        )
    keywords = dict(word.split("=", 1) for word in shape.split(",") if word)
    return module.example(**{key: _number(value) for key, value in keywords.items()})


def _number(word: str) -> int | str:
    return int(word) if word.lstrip("-").isdigit() else word


def _array(word: str) -> np.ndarray:
    """128x512:bfloat16 -> seeded normal numbers."""
    sizes, _, dtype = word.partition(":")
    shape = tuple(int(n) for n in sizes.split("x"))
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return values.astype(BY_NAME[dtype or "float32"].numpy)


def numbers(run: Run, costs: Estimate, arguments: Any, between: Any = ()) -> dict[str, Any]:
    """The estimate without its steps, and what the call takes, ready for JSON.

    between: arrays that a kernel hands to another one; no input or output of the operation.
    """
    fields = {
        f.name: getattr(costs, f.name) for f in dataclasses.fields(costs) if f.name not in ("steps", "target")
    }
    moved, least = traffic(run, arguments, between)
    return {
        "label": LABEL,
        "unit": "microseconds",
        "target": costs.target.name,
        **fields,
        "binding": costs.binding,
        "tensor_share": costs.tensor_share,
        "count": run.instructions,
        "sbuf_peak": run.sbuf_peak,
        "psum_peak": run.psum_peak,
        "hbm_moved": moved,
        "hbm_least": least,
    }


if __name__ == "__main__":
    raise SystemExit(main())
