"""Makes token shards, mixes them, and looks at them.

delta-trn data prepare SOURCE [key=value ...]        delta-trn data mix DIR=WEIGHT ... data.folder=DIR [...]
delta-trn data info DIR [...]
"""

import argparse
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from delta_trn.train.data.dataset import TokenDataset, open_dataset
from delta_trn.train.data.entropies import baselines, documents
from delta_trn.train.data.mixture import mix
from delta_trn.train.data.preparation import prepare
from delta_trn.train.data.readers import SEPARATOR
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import change, parse, read_arguments
from delta_trn.train.settings.schema import DataSection, RunConfig, flatten, meaning

PREPARE = """Tokenize the text of SOURCE into shards.

Of a folder every file below it is read that is UTF-8 (.txt, .md, .py, any name) and not hidden: .jsonl, .csv,
.tsv and .parquet by their text field, each other file as one document, cut at {separator} and when it is
long. All but .parquet may be packed as .gz, .zst, .bz2 or .xz."""

# the keys of `data mix`, with what they mean there
MIX = {
    "data.folder": "folder to write",
    "data.seed": "of the order (0)",
    "data.max_tokens": "training tokens that are enough (none: all)",
    "data.shard_tokens": "tokens in a shard (100000000)",
}


def main(arguments: Sequence[str]) -> int:
    """Runs one `data` command. Returns 0 when it is done, 130 when it was interrupted."""
    actions = {"prepare": _prepare, "mix": _mix, "info": _info}
    if arguments and arguments[0] in actions:
        return actions[arguments[0]](arguments[1:])
    parser = argparse.ArgumentParser(prog="delta-trn data", description="Make and look at token shards.")
    parser.add_argument("command", choices=tuple(actions), help="`delta-trn data COMMAND --help` says more")
    parser.parse_args(arguments)
    return 2  # argparse has refused it before


def _prepare(arguments: Sequence[str]) -> int:
    # a loader's order and a document's boundaries are no part of a preparation
    others = ("source", "loader", "boundaries")
    keys = [f"data.{name}" for name in DataSection.model_fields if name not in others]
    parser = _parser("prepare", PREPARE.format(separator=SEPARATOR), {key: meaning(key) for key in keys})
    parser.add_argument("source", metavar="SOURCE", help=meaning("data.source"))
    parser.add_argument("changes", nargs="*", metavar="key=value", help="keys to change, those below")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    asked = read_arguments(parser, [_renamed(x) for x in arguments], section="data")
    began = time.monotonic()
    data = _changed("prepare", parse(asked.changes), keys, {"data.source": asked.source})
    try:
        folder = prepare(data, show=not asked.quiet)
    except KeyboardInterrupt:
        print("interrupted; nothing of it was kept, the same command begins anew", file=sys.stderr)
        return 130
    _print(open_dataset(folder))
    print(f"{folder} is ready after {time.monotonic() - began:.1f} s")
    return 0


def _parser(command: str, description: str, keys: Mapping[str, str]) -> argparse.ArgumentParser:
    """Returns the parser of a command that has these keys."""
    width = max(map(len, keys)) + 2
    return argparse.ArgumentParser(
        prog=f"delta-trn data {command}",
        description=description,
        epilog="\n".join(["keys", *(f"  {key:{width}}{text}" for key, text in keys.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _changed(
    command: str, changes: Mapping[str, str], keys: Collection[str], start: Mapping[str, str] | None = None
) -> DataSection:
    """Returns the section of data with `start` and these changes. UsageError for a key of no effect here."""
    data = change(RunConfig(), {**(start or {}), **changes}).data
    for key in changes:
        if key not in keys:
            raise UsageError(f"{key} changes nothing in `data {command}`, whose keys are {', '.join(keys)}")
    return data


def _renamed(word: str) -> str:
    """Returns the option that read_arguments refuses with its key's name: --out was data.folder."""
    return word.replace("--out", "--folder", 1) if word.partition("=")[0] == "--out" else word


def _mix(arguments: Sequence[str]) -> int:
    parser = _parser(
        "mix",
        "Mix prepared folders by tokens, and shuffle their documents: one folder alone, too.\n"
        "Each source has its share of the tokens.",
        MIX,
    )
    parser.add_argument(
        "parts", nargs="+", metavar="DIR=WEIGHT|key=value",
        help="folders prepared with one tokenizer, and keys: those below",
    )  # fmt: skip
    parser.add_argument("--in-order", action="store_true", help="keep the documents of each source in order")
    parser.add_argument(
        "--exhausted", choices=("stop", "repeat"), default="stop",
        help="what a source without further documents does: ends the mixture (stop), or starts again",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    asked = read_arguments(parser, [_renamed(word) for word in arguments], section="data")
    words, known = asked.parts, {key for key, _ in flatten(RunConfig())}
    settings = [word for word in words if word.partition("=")[0] in known and not Path(word).exists()]
    data = _changed("mix", parse(settings), MIX)
    if data.folder is None:
        raise UsageError("data mix needs the folder to write: data.folder=DIR")
    parts = []
    for text in (word for word in words if word not in settings):
        folder, _, weight = (text, "", "1") if Path(text).exists() else text.rpartition("=")
        try:
            parts.append((folder, float(weight)))
        except ValueError:
            raise UsageError(
                f"{text}: expected DIR or DIR=WEIGHT, such as data/a=0.7, or one of the keys {', '.join(MIX)}"
            ) from None
    out = mix(
        parts,
        data.folder,
        shuffle=not asked.in_order,
        seed=data.seed,
        max_tokens=data.max_tokens,
        exhausted=asked.exhausted,
        shard_tokens=data.shard_tokens,
        show=not asked.quiet,
    )
    _print(open_dataset(out))
    return 0


def _info(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="delta-trn data info", description="What a folder holds.")
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="print meta.json")
    parser.add_argument("--check", action="store_true", help="read every token and compare hashes")
    parser.add_argument("--baselines", action="store_true", help="costs of the held-out text without a model")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="decode N tokens of held-out text")
    asked = parser.parse_args(arguments)
    dataset = open_dataset(asked.directory)
    if asked.json:
        print(dataset.meta.to_json(), end="")
        return 0
    _print(dataset)
    if asked.check:
        dataset.check_tokens()
        print("every shard has the hash it was written with, and every id is below vocab_size")
    if asked.baselines:
        _print_baselines(dataset)
    if asked.sample:
        first = next(documents(dataset, "val"))
        print(dataset.tokenizer.decode(first[: asked.sample]))
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
