"""delta-trn plan RECIPE [key=value ...] [--json]"""

import argparse
import json
from collections.abc import Sequence

from delta_trn.train.recipes import announced
from delta_trn.train.settings.overrides import apply, parse, read_arguments


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn plan",
        description="Memory, FLOPs and bytes sent in a step on 1 to 1024 workers of Trn1 and H100, computed "
        "from sizes and data sheets: bounds, not measurements.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run; `delta-trn` lists them")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="keys to change")
    parser.add_argument("--json", action="store_true", help="a list of objects")
    options = read_arguments(parser, arguments)
    config = apply(announced(options.recipe), parse(options.changes))

    from delta_trn.train.parallel.plan import WORKERS, rows, size_of

    size = size_of(config)
    found = rows(config, size)
    if options.json:
        print(json.dumps([row.as_dict() for row in found], indent=1))
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
    return 0
