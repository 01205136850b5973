"""delta-trn throughput RECIPE|--family NAME [key=value ...] [--peer hf|fla] [--documents N] [--json FILE]"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from delta_trn.train.recipes import announced
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply, parse, read_arguments, whole_number

if TYPE_CHECKING:
    from delta_trn.train.studies.throughput import Measured

OF_FAMILIES = {
    "width": "256", "layers": "4", "sequences": "1", "length": "1024", "device": "cpu", "backend": "",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn throughput",
        description="Tokens/s and memory of a training step, beside the same model with a peer's operator, "
        "and where the time goes; behind a green parity.",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a named run; `delta-trn` lists them")
    parser.add_argument(
        "--family",
        metavar="NAME",
        help="instead: forward and backward of transformers' models of this family, or of `all`, with "
        "patch_transformers and without, in turns. Keys: width=256 layers=4 sequences=1 length=1024 "
        "device=cpu backend=NAME",
    )
    parser.add_argument("changes", nargs="*", metavar="key=value", help="keys to change")
    parser.add_argument("--peer", action="append", choices=("hf", "fla"), default=[], help="may be repeated")
    parser.add_argument(
        "--documents", type=int, default=0, metavar="N", help="also with a new document every N tokens"
    )
    parser.add_argument("--rounds", type=int, default=20, help="steps of each (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add one JSON object a contender")
    given = read_arguments(parser, arguments)
    if given.rounds < 2:
        raise ConfigError(f"--rounds={given.rounds}: expected at least 2")
    if given.family:
        return _time_families(given)
    if not given.recipe:
        raise ConfigError("name a recipe (`delta-trn` lists them), or pass --family NAME")
    if given.documents < 0:
        raise ConfigError(f"--documents={given.documents}: expected 0 for none, or the tokens of each")
    config = apply(announced(given.recipe), parse(given.changes))

    from delta_trn.backends.bench.peers import PEERS
    from delta_trn.backends.machine import facts
    from delta_trn.train.studies.throughput import DOCUMENTS, OURS, Workload, measure, require_parity, shares

    workload = Workload(config, given.documents)
    c = workload.config
    print(
        f"{c.name}: width {c.model.width}, {c.batch.sequences} x {c.batch.length} tokens a step, "
        f"{c.precision}, delta rule by {workload.backend} on {workload.device}"
    )
    absent = {name: PEERS[name].absent(workload.device.type) for name in given.peer}
    for name, reason in absent.items():
        if reason:
            print(f"peer {name}: not yet run, {reason}")
    require_parity(workload)
    bounded = (DOCUMENTS,) if given.documents else ()
    peers = tuple(name for name in absent if not absent[name])
    found = measure(workload, (*bounded, *peers), given.rounds)
    _print(found)
    parts = shares(workload)
    for part, share in parts.items():
        print(f"{share:6.1%}  {part}")
    if given.json:
        about = {"recipe": c.name, "width": c.model.width, "sequences": c.batch.sequences}
        about |= {"length": c.batch.length, "precision": c.precision, "backend": workload.backend}
        with given.json.open("a") as file:
            for row in found:
                line = asdict(row) | {"shares": parts if row.contender == OURS else None}
                file.write(json.dumps(about | line | facts(workload.device)) + "\n")
    return 0


def _print(rows: "Sequence[Measured]") -> None:
    for row in rows:
        beside = "" if row.ratio is None else f"   {row.ratio} times ours"
        print(
            f"{row.contender:12}{row.tokens_per_s:12,.0f} tokens/s   {row.ms} ms a step   "
            f"{row.peak_bytes / 2**30:.2f} GiB{beside}",
            flush=True,
        )


def _time_families(given: argparse.Namespace) -> int:
    """Times transformers' models of one family, or of all, with our operations and without."""
    from transformers import __version__

    from delta_trn.backends.machine import facts
    from delta_trn.train.studies.families import FAMILIES, THEIRS, Family
    from delta_trn.train.studies.throughput import measure

    keys = OF_FAMILIES | parse([*filter(None, [given.recipe]), *given.changes])
    if unknown := keys.keys() - OF_FAMILIES.keys():
        raise ConfigError(f"--family has no key {min(unknown)!r}; its keys: {', '.join(OF_FAMILIES)}")
    if given.family not in (*FAMILIES, "all"):
        raise ConfigError(f"--family={given.family}: expected all, {', '.join(FAMILIES)}")
    sizes = {key: whole_number(key, keys[key]) for key in ("width", "layers", "sequences", "length")}
    for name in FAMILIES if given.family == "all" else [given.family]:
        workload = Family(name, **sizes, device=keys["device"], backend=keys["backend"] or None)
        found = measure(workload, (THEIRS,), given.rounds)
        print(f"{name}, transformers {__version__}: " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
        _print(found)
        if given.json:
            about = {"family": name, "transformers": __version__, **sizes}
            with given.json.open("a") as file:
                file.writelines(
                    json.dumps(about | asdict(row) | facts(workload.device)) + "\n" for row in found
                )
    return 0
