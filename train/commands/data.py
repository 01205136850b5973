"""Makes token shards, and looks at them.

delta-trn data prepare SOURCE [key=value ...]        delta-trn data info DIR [...]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from delta_trn.train.data.dataset import TokenDataset, open_dataset
from delta_trn.train.data.preparation import prepare
from delta_trn.train.data.readers import SEPARATOR
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import change, parse, read_arguments
from delta_trn.train.settings.schema import DataSection, RunConfig, declaration

PREPARE = """Tokenize the text of SOURCE into shards. If it is stopped, the same command continues.

Of a folder every file below it is read that is UTF-8 (.txt, .md, .py, any name) and not hidden: .jsonl, .csv,
.tsv and .parquet by their text field, each other file as one document, cut at {separator} and when it is
long. All but .parquet may be packed as .gz, .zst, .bz2 or .xz."""


def main(arguments: Sequence[str]) -> int:
    """Runs one `data` command. Returns 0 when it is done, 130 when it was interrupted."""
    actions = {"prepare": _prepare, "info": _info}
    if arguments and arguments[0] in actions:
        return actions[arguments[0]](arguments[1:])
    parser = argparse.ArgumentParser(
        prog="delta-trn data", description="Make and look at token shards."
    )
    parser.add_argument(
        "command", choices=tuple(actions), help="`delta-trn data COMMAND --help` says more"
    )
    parser.parse_args(arguments)
    return 2  # argparse has refused it before


def _prepare(arguments: Sequence[str]) -> int:
    # a loader's order and a document's boundaries are no part of a preparation
    others = ("source", "loader", "boundaries")
    keys = [f"data.{name}" for name in DataSection.model_fields if name not in others]
    width = max(map(len, keys)) + 2
    parser = argparse.ArgumentParser(
        prog="delta-trn data prepare",
        description=PREPARE.format(separator=SEPARATOR),
        epilog="\n".join(
            ["keys", *(f"  {key:{width}}{declaration(key).description}" for key in keys)]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help=declaration("data.source").description)
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="keys to change, those below"
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    asked = read_arguments(parser, arguments, section="data")
    changes, began = parse(asked.changes), time.monotonic()
    data = change(RunConfig(), {"data.source": asked.source, **changes}).data
    if idle := [key for key in changes if key not in keys]:
        raise UsageError(
            f"{idle[0]} changes nothing in `data prepare`, whose keys are {', '.join(keys)}"
        )
    try:
        folder = prepare(data, show=not asked.quiet)
    except KeyboardInterrupt:
        print("interrupted; nothing of it was kept, the same command begins anew", file=sys.stderr)
        return 130
    _print(open_dataset(folder))
    print(f"{folder} is ready after {time.monotonic() - began:.1f} s")
    return 0


def _info(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="delta-trn data info", description="What a folder holds.")
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--check", action="store_true", help="read every token and compare hashes")
    asked = parser.parse_args(arguments)
    dataset = open_dataset(asked.directory)
    _print(dataset)
    if asked.check:
        dataset.check_tokens()
        print("every shard has the hash it was written with, and every id is below vocab_size")
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
