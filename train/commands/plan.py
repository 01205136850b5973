"""delta-trn plan RECIPE [key=value ...] [--cores N] [--json]"""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from delta_trn.train.recipes import announced
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply, parse, read_arguments

if TYPE_CHECKING:
    from delta_trn.train.neuron.step_time import Part
    from delta_trn.train.parallel.plan import Size
    from delta_trn.train.settings.schema import RunConfig


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn plan",
        description="Memory, FLOPs and bytes sent in a step on 1 to 1024 workers of Trn1 and H100, computed "
        "from sizes and data sheets: bounds, not measurements. Then what a step takes on N NeuronCores of "
        "Trn1, part by part, by the simulator's calibrated cost model.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run; `delta-trn` lists them")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="keys to change")
    parser.add_argument(
        "--cores",
        type=int,
        default=32,
        metavar="N",
        help="NeuronCores of the step's parts (default: 32); 0: none",
    )
    parser.add_argument(
        "--json", action="store_true", help="a list of objects: workers, then the step's parts"
    )
    options = read_arguments(parser, arguments)
    if options.cores < 0:
        raise ConfigError(f"--cores={options.cores}: expected 0 or more; 32 is a trn1.32xlarge")
    config = apply(announced(options.recipe), parse(options.changes))

    from delta_trn.train.parallel.plan import WORKERS, rows, size_of

    size = size_of(config)
    found = rows(config, size)
    pieces, refusal = _parts(config, size, options.cores)
    if options.json:
        step = [
            {"worker": "trn1", "workers": options.cores, "part": p.name, "low_s": p.low, "high_s": p.high}
            for p in pieces
        ]
        print(json.dumps([row.as_dict() for row in found] + step, indent=1))
        return 0
    print(
        f"COMPUTED, not measured. {config.name}: {size.parameters:,} parameters, mode "
        f"{config.distribution.mode}, {config.batch.sequences} x {config.batch.length} tokens a step"
    )
    for worker in WORKERS:
        print(f"{worker.name}: {worker.source}")
    print(
        f"{'worker':7}{'n':>5}{'seqs':>6}{'TFLOP':>9}{'state GB':>10}{'act. GB':>9}{'sent GB':>9}"
        f"{'compute ms':>12}{'network ms':>12}{'efficiency':>12}  limit"
    )
    for r in found:
        print(
            f"{r.worker:7}{r.workers:5}{r.sequences:6}{r.flops / 1e12:9.2f}{r.state_bytes / 1e9:10.2f}"
            f"{r.activation_bytes / 1e9:9.2f}{r.collective_bytes / 1e9:9.2f}{1e3 * r.compute_s:12.2f}"
            f"{1e3 * r.network_s:12.2f}{r.efficiency:12.0%}  {r.limit}"
        )
    if options.cores:
        _print_parts(pieces, refusal, options.cores, size, config)
    return 0


def _parts(config: "RunConfig", size: "Size", cores: int) -> "tuple[list[Part], str]":
    """Returns the step's parts, or none and why the kernels do not take the model."""
    from delta_trn.backends.checks import BackendRefusal
    from delta_trn.train.neuron.step_time import parts

    try:
        return (parts(config, size, cores) if cores else []), ""
    except BackendRefusal as refusal:
        return [], str(refusal)


def _print_parts(pieces: "list[Part]", refusal: str, cores: int, size: "Size", config: "RunConfig") -> None:
    from delta_trn.train.parallel.plan import WORKERS, step_flops

    if refusal:
        print(f"\nNo estimate of a step on Trn1: {refusal}")
        return
    sequences = -(-config.batch.sequences // cores)
    print(
        f"\nESTIMATED, not measured: a step on {cores} NeuronCores of Trn1, {sequences} sequences of "
        f"{config.batch.length} tokens on each, ms (train/neuron/step_time.py says what a range is)"
    )
    low, high = sum(p.low for p in pieces), sum(p.high for p in pieces)
    for p in pieces:
        print(f"{p.name:24}{1e3 * p.low:10.1f}{1e3 * p.high:10.1f}{p.high / high:8.0%}")
    print(f"{'sum':24}{1e3 * low:10.1f}{1e3 * high:10.1f}")
    peak = next(worker.flops for worker in WORKERS if worker.name == "trn1")
    flops = step_flops(size, sequences * config.batch.length)
    print(
        f"{'of the data sheet':24}{flops / peak / low:10.0%}{flops / peak / high:10.0%}   FLOPs of the step "
        f"at {peak / 1e12:.0f} TFLOP/s"
    )
