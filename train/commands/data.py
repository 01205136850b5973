"""python -m train data prepare SOURCE [...]        python -m train data info DIR [...]"""

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
from delta_trn.train.settings.errors import TrainError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `data` command: 0 done; 2 refused, and stderr says why; 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130


def _prepare(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    directory = prepare(
        arguments.source,
        arguments.out,
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        subset=arguments.subset,
        split=arguments.split,
        revision=arguments.revision,
        text_field=arguments.text_field,
        validation=arguments.validation,
        val_fraction=arguments.val_fraction,
        shard_tokens=arguments.shard_tokens,
        max_documents=arguments.max_documents,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        show=not arguments.quiet,
    )
    _print(open_dataset(directory))
    print(f"{directory} is ready after {time.monotonic() - began:.1f} s")
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
        table.add_row(
            name,
            f"{split.documents:,}",
            f"{split.bytes:,}",
            f"{split.tokens:,}",
            f"{split.bytes / split.tokens:.3f}",
            str(len(split.shards)),
        )
    console = Console()
    console.print(table)
    for reason, count in meta.skipped.items():
        console.print(f"left out: {count:,} {reason}")


def _print_baselines(dataset: TokenDataset) -> None:
    table = Table(title=f"{dataset.meta.name}: what held-out text costs")
    for column in ("baseline", "nats/token", "bits/byte", "on bytes", "saw before"):
        table.add_column(column, justify="left" if column in ("baseline", "saw before") else "right")
    found = baselines(dataset)
    for name, cost in found.items():
        table.add_row(
            name, f"{cost.nats_per_token:.4f}", f"{cost.bits_per_byte:.4f}", f"{cost.bytes:,}", cost.saw
        )
    console = Console()
    console.print(table)
    if "zlib" not in found:
        console.print("no compressors: this tokenizer does not give the text back as it was")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train data", description="Make and look at token shards."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    make = commands.add_parser(
        "prepare", help="tokenize text into shards; killed, the same command continues"
    )
    make.set_defaults(run=_prepare)
    make.add_argument(
        "source",
        help="folder, .txt, .jsonl or .parquet file, python-stdlib, or a Hugging Face dataset's name",
    )
    make.add_argument("--out", type=Path, help="folder to write (default: data/NAME-TOKENIZER-HASH)")
    make.add_argument(
        "--tokenizer", default="bytebpe", help="gpt2, bytebpe, bytes, or a tokenizer.json (%(default)s)"
    )
    make.add_argument("--vocab-size", type=int, help="rows of the embedding (default: 4096 for bytebpe)")
    make.add_argument("--subset", help="of a Hugging Face dataset, such as sample-10BT")
    make.add_argument("--split", default="train", help="of a Hugging Face dataset (%(default)s)")
    make.add_argument("--revision", help="commit or tag of a Hugging Face dataset")
    make.add_argument("--text-field", default="text", help="field or column with the text (%(default)s)")
    make.add_argument("--validation", help="held-out text: a path, or a split of the same dataset")
    make.add_argument(
        "--val-fraction", type=float, default=0.05, help="share held out otherwise (%(default)s)"
    )
    make.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens in a shard (%(default)s)")
    make.add_argument("--max-documents", type=int, help="read so many documents")
    make.add_argument("--max-tokens", type=int, help="stop after the document that makes so many tokens")
    make.add_argument("--seed", type=int, default=0, help="of the choice of held-out documents (%(default)s)")
    make.add_argument("--quiet", action="store_true", help="no progress")

    info = commands.add_parser("info", help="what a folder holds")
    info.set_defaults(run=_info)
    info.add_argument("directory", type=Path)
    info.add_argument("--json", action="store_true", help="print meta.json")
    info.add_argument("--check", action="store_true", help="read every token and compare hashes")
    info.add_argument("--baselines", action="store_true", help="entropies of the held-out text")
    info.add_argument("--sample", type=int, default=0, metavar="N", help="decode N tokens of held-out text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
