"""delta-trn data prepare SOURCE [...]        delta-trn data info DIR [...]"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from delta_trn.train.data.dataset import TokenDataset, open_dataset
from delta_trn.train.data.entropies import baselines, documents
from delta_trn.train.data.preparation import prepare
from delta_trn.train.data.readers import SEPARATOR
from delta_trn.train.settings.schema import DataSection, validated

# `data.folder` is --out here, and a loader's order is no part of a preparation
OPTIONS = [name for name in DataSection.model_fields if name not in ("source", "folder", "loader")]


def main(arguments: Sequence[str]) -> int:
    """Runs one `data` command. Returns 0 when it is done, 130 when it was interrupted."""
    parsed = _parser().parse_args(arguments)
    return parsed.run(parsed)


def _prepare(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    changes = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    data = validated({"data": {"source": arguments.source, "folder": arguments.out, **changes}}).data
    try:
        folder = prepare(data, show=not arguments.quiet)
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    _print(open_dataset(folder))
    print(f"{folder} is ready after {time.monotonic() - began:.1f} s")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    dataset = open_dataset(arguments.directory)
    if arguments.json:
        print(dataset.meta.to_json(), end="")
        return 0
    _print(dataset)
    if arguments.check:
        dataset.check_tokens()
        print("every shard has the hash it was written with, and every id is below vocab_size")
    if arguments.baselines:
        _print_baselines(dataset)
    if arguments.sample:
        first = next(documents(dataset, "val"))
        print(dataset.tokenizer.decode(first[: arguments.sample]))
    return 0


def _print(dataset: TokenDataset) -> None:
    meta = dataset.meta
    table = Table(title=f"{meta.name}: {meta.tokenizer.kind}, {meta.vocab_size} rows, {meta.dtype}")
    table.add_column("split")
    for column in ("documents", "bytes", "tokens", "bytes/token", "shards"):
        table.add_column(column, justify="right")
    for name, split in meta.splits.items():
        counts = (f"{count:,}" for count in (split.documents, split.bytes, split.tokens))
        table.add_row(name, *counts, f"{split.bytes / split.tokens:.3f}", str(len(split.shards)))
    console = Console()
    console.print(table)
    for reason, count in meta.skipped.items():
        console.print(f"left out: {count:,} {reason}")


def _print_baselines(dataset: TokenDataset) -> None:
    table = Table(title=f"{dataset.meta.name}: what held-out text costs")
    for column in ("baseline", "nats/token", "bits/byte", "on bytes", "saw before"):
        table.add_column(column, justify="left" if column in ("baseline", "saw before") else "right")
    costs = baselines(dataset)
    for name, cost in costs.items():
        table.add_row(
            name, f"{cost.nats_per_token:.4f}", f"{cost.bits_per_byte:.4f}", f"{cost.bytes:,}", cost.saw
        )
    console = Console()
    console.print(table)
    if "zlib" not in costs:
        console.print("no compressors: this tokenizer does not give the text back as it was")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="delta-trn data", description="Make and look at token shards.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    make = commands.add_parser(
        "prepare",
        help="tokenize text into shards; killed, the same command continues",
        epilog="Of a folder every file below it is read that is UTF-8 (.txt, .md, .py, any name) and not "
        "hidden: .jsonl, .csv, .tsv and .parquet by their text field, each other file as one document, "
        f"cut at {SEPARATOR} and when it is long. All but .parquet may be packed as .gz, .zst, .bz2 or .xz.",
    )
    make.set_defaults(run=_prepare)
    make.add_argument("source", help=DataSection.model_fields["source"].description)
    make.add_argument("--out", help="folder to write (default: data/NAME-TOKENIZER-HASH)")
    for name in OPTIONS:
        field = DataSection.model_fields[name]
        default = "" if field.default is None else f" ({field.default})"
        meaning = f"{field.description}{default}".replace("%", "%%")
        make.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=meaning)
    make.add_argument("--quiet", action="store_true", help="print no progress")

    info = commands.add_parser("info", help="what a folder holds")
    info.set_defaults(run=_info)
    info.add_argument("directory", type=Path)
    info.add_argument("--json", action="store_true", help="print meta.json")
    info.add_argument("--check", action="store_true", help="read every token and compare hashes")
    info.add_argument("--baselines", action="store_true", help="costs of the held-out text without a model")
    info.add_argument("--sample", type=int, default=0, metavar="N", help="decode N tokens of held-out text")
    return parser
