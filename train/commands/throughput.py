"""delta-trn throughput RECIPE [key=value ...] [--peer hf|fla] [--json FILE]"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from delta_trn.train.recipes import announce
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply, parse, read_arguments


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn throughput",
        description="Tokens/s and memory of a training step, beside the same model with a peer's operator, "
        "behind a green parity.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run; `delta-trn` lists them")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="keys to change")
    parser.add_argument(
        "--peer", action="append", choices=("hf", "fla"), default=[], help="may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=20, help="steps of each (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add one JSON object a contender")
    given = read_arguments(parser, arguments)
    if given.rounds < 2:
        raise ConfigError(f"--rounds={given.rounds}: expected at least 2")
    config = apply(announce(given.recipe), parse(given.changes))

    from delta_trn.backends.bench.peers import PEERS
    from delta_trn.backends.machine import facts
    from delta_trn.train.studies.throughput import Workload, measure, require_parity

    workload = Workload(config)
    c, device = workload.config, workload.device
    print(
        f"{c.name}: width {c.model.width}, {c.batch.sequences} x {c.batch.length} tokens a step, "
        f"{c.precision}, delta rule by {c.backend} on {device}"
    )
    channels = c.model.mixer == "kimi_delta_attention"
    absent = {name: PEERS[name].absent(device.type, channels) for name in given.peer}
    for name, reason in absent.items():
        if reason:
            print(f"peer {name}: not yet run, {reason}")
    require_parity(c, device)
    about = {"recipe": c.name, "width": c.model.width, "sequences": c.batch.sequences}
    about |= {"length": c.batch.length, "precision": c.precision, "backend": c.backend}
    for row in measure(workload, [name for name in absent if not absent[name]], given.rounds):
        beside = "" if row["ratio"] is None else f"   {row['ratio']} times ours"
        print(
            f"{row['contender']:12}{row['tokens_per_s']:12,.0f} tokens/s   {row['ms']} ms a step   "
            f"{row['peak_bytes'] / 2**30:.2f} GiB{beside}"
        )
        if given.json is not None:
            with given.json.open("a") as lines:
                lines.write(json.dumps({**about, **row, **facts(device)}, default=asdict) + "\n")
    return 0
