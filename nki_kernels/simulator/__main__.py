"""python -m nki_kernels.simulator report KERNEL SHAPE [--target trn1] [--png FILE] [--json FILE]

KERNEL   a module of nki_kernels (gated_delta_rule_fwd) that has a function example(...) returning
         (kernel, arguments), or MODULE:FUNCTION for any other kernel
SHAPE    for an example, its keywords: B=1,T=256,H=2,K=64,V=128
         for MODULE:FUNCTION, one array per argument: 128x512,128x64:bfloat16

Everything that it prints is an estimate.
"""

import argparse
import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .cost import Estimate, estimate
from .dtypes import BY_NAME
from .kernel import record
from .report import LABEL, table, timeline
from .targets import TARGETS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nki_kernels.simulator", description="estimates of NKI kernels"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="cost estimate of one kernel and shape")
    report.add_argument("kernel")
    report.add_argument("shape")
    report.add_argument("--target", default="trn1", choices=list(TARGETS))
    report.add_argument(
        "--png", type=Path, help="where to draw the timeline (default: KERNEL-SHAPE-TARGET.png)"
    )
    report.add_argument("--json", type=Path, help="write the numbers there too")
    options = parser.parse_args(argv)
    kernel, arguments = load(options.kernel, options.shape)
    run = record(kernel, *arguments, target=options.target)
    costs = estimate(run.trace, run.target)
    print(table(options.kernel, options.shape, run, costs))
    words = (
        f"{options.kernel}-{options.shape}-{options.target}".replace(":", "-")
        .replace(",", "-")
        .replace("=", "")
    )
    print(
        f"\ntimeline: {timeline(options.kernel, options.shape, costs, options.png or Path(words + '.png'))}"
    )
    if options.json:
        options.json.write_text(json.dumps(numbers(costs), indent=2) + "\n")
    return 0


def load(kernel: str, shape: str) -> tuple[Any, tuple[Any, ...]]:
    """The kernel and its arguments."""
    module, _, name = kernel.partition(":")
    if name:
        return getattr(import_module(module), name), tuple(_array(word) for word in shape.split(","))
    loaded = import_module(module if "." in module else f"nki_kernels.{module}")
    if not hasattr(loaded, "example"):
        raise SystemExit(
            f"{loaded.__name__} has no function example(...); name the kernel as MODULE:FUNCTION"
        )
    keywords = dict(word.split("=", 1) for word in shape.split(",") if word)
    return loaded.example(**{key: _number(value) for key, value in keywords.items()})


def _number(word: str) -> int | str:
    return int(word) if word.lstrip("-").isdigit() else word


def _array(word: str) -> np.ndarray:
    """128x512:bfloat16 -> seeded normal numbers."""
    sizes, _, dtype = word.partition(":")
    shape = tuple(int(n) for n in sizes.split("x"))
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return values.astype(BY_NAME[dtype or "float32"].numpy)


def numbers(costs: Estimate) -> dict[str, Any]:
    """The estimate without its steps, ready for JSON."""
    fields = {
        f.name: getattr(costs, f.name) for f in dataclasses.fields(costs) if f.name not in ("steps", "target")
    }
    return {
        "label": LABEL,
        "unit": "microseconds",
        "target": costs.target.name,
        **fields,
        "binding": costs.binding,
    }


if __name__ == "__main__":
    raise SystemExit(main())
