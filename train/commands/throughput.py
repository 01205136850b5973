"""delta-trn throughput RECIPE|--family NAME [key=value ...] [--peer hf|fla] [--json FILE]"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from delta_trn.train.recipes import announced
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply, parse, read_arguments, whole_number

if TYPE_CHECKING:
    import torch

    from delta_trn.train.studies.throughput import Measured

OF_FAMILIES = {
    "width": "256", "layers": "4", "sequences": "1", "length": "1024", "device": "cpu", "backend": "",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn throughput",
        description="Tokens/s and memory of a training step, beside the same model with a peer's operator, "
        "behind a green parity.",
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
    parser.add_argument("--rounds", type=int, default=20, help="steps of each (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add one JSON object a contender")
    given = read_arguments(parser, arguments)
    if given.rounds < 2:
        raise ConfigError(f"--rounds={given.rounds}: expected at least 2")
    if given.family:
        _time_families(given)
    elif given.recipe:
        _time_recipe(given)
    else:
        raise ConfigError("name a recipe (`delta-trn` lists them), or pass --family NAME")
    return 0


def _time_recipe(given: argparse.Namespace) -> None:
    """Times a recipe's step, with peers that are here."""
    config = apply(announced(given.recipe), parse(given.changes))

    from delta_trn.backends.bench.peers import PEERS
    from delta_trn.train.studies.throughput import Workload, measure, require_parity

    workload = Workload(config)
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
    found = measure(workload, [name for name in absent if not absent[name]], given.rounds)
    about = {"recipe": c.name, "width": c.model.width, "sequences": c.batch.sequences}
    about |= {"length": c.batch.length, "precision": c.precision, "backend": workload.backend}
    _report(found, given.json, about, workload.device)


def _time_families(given: argparse.Namespace) -> None:
    """Times transformers' models of one family, or of all, with our operations and without."""
    from transformers import __version__

    from delta_trn.train.studies.throughput import FAMILIES, THEIRS, Family, measure

    keys = OF_FAMILIES | parse([*filter(None, [given.recipe]), *given.changes])
    if unknown := keys.keys() - OF_FAMILIES.keys():
        raise ConfigError(f"--family has no key {min(unknown)!r}; its keys: {', '.join(OF_FAMILIES)}")
    if given.family not in (*FAMILIES, "all"):
        raise ConfigError(f"--family={given.family}: expected all, {', '.join(FAMILIES)}")
    sizes = {key: whole_number(key, keys[key]) for key in ("width", "layers", "sequences", "length")}
    for name in FAMILIES if given.family == "all" else [given.family]:
        workload = Family(name, sizes, keys["device"], keys["backend"] or None)
        found = measure(workload, (THEIRS,), given.rounds)
        print(f"{name}, transformers {__version__}: " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
        _report(found, given.json, {"family": name, "transformers": __version__, **sizes}, workload.device)


def _report(
    rows: "Sequence[Measured]",
    file: Path | None,
    about: Mapping[str, object],
    device: "torch.device",
) -> None:
    """Prints a line per contender, and adds it to the file as JSON."""
    from delta_trn.backends.machine import facts

    for row in rows:
        beside = "" if row.ratio is None else f"   {row.ratio} times ours"
        print(
            f"{row.contender:12}{row.tokens_per_s:12,.0f} tokens/s   {row.ms} ms a step   "
            f"{row.peak_bytes / 2**30:.2f} GiB{beside}",
            flush=True,
        )
        if file is not None:
            with file.open("a") as lines:
                lines.write(json.dumps({**about, **asdict(row), **facts(device)}) + "\n")
