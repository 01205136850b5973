"""A folder of prepared tokens: meta.json, the shards that it lists,
and the tokenizer that made them.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ValidationError

from delta_trn.train.data.shards import LAYOUT, ShardRecord, Split, check_shard, map_tokens
from delta_trn.train.data.tokenizer import TextTokenizer, load_tokenizer
from delta_trn.train.files import sha256_of
from delta_trn.train.settings.errors import ShardError

FORMAT = 1


class SplitMeta(BaseModel, frozen=True, extra="forbid"):
    """One split. `tokens` counts BOS and EOS; `bytes` counts the documents' UTF-8 alone."""

    tokens: int
    bytes: int
    documents: int
    shards: tuple[ShardRecord, ...]


class TokenizerMeta(BaseModel, frozen=True, extra="forbid"):
    """The tokenizer. `lossless` says whether every held-out document came back
    from its ids unchanged, `altered` how many did not.
    """

    kind: str
    size: int
    lossless: bool
    altered: int | None = None  # None: prepared by an earlier version
    sha256: str


# How documents lie in a shard: one after another, never cut at its end
PACKING = {"kind": "concatenated", "document": "BOS tokens EOS", "straddle_shards": False}


class Meta(BaseModel, frozen=True, extra="forbid"):
    """The content of meta.json, which is written last: a folder that has it is complete."""

    format: Literal[1] = FORMAT
    name: str
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    bos_id: int
    eos_id: int
    pad_id: int
    tokenizer: TokenizerMeta
    splits: dict[Split, SplitMeta]
    skipped: dict[str, int]
    left_out: dict[str, list[str]] = {}  # the first names of files, by a reason in `skipped`
    settings: dict[str, Any]
    packing: dict[str, Any] = PACKING
    datafile: dict[str, int] = LAYOUT


def some_of(names: Sequence[str], count: int) -> str:
    """Returns names in brackets, and an ellipsis where they are fewer than `count`; "" without."""
    more = ", ..." if len(names) < count else ""
    return f" ({', '.join(map(repr, names))}{more})" if names else ""


def read_meta(directory: Path) -> Meta:
    """Reads meta.json of a complete folder. ShardError if it is missing or damaged."""
    path = directory / "meta.json"
    if not path.is_file():
        raise ShardError(
            f"{path} is missing, so nothing was prepared there to its end; make it with `delta-trn "
            f"data prepare SOURCE data.folder={directory}`"
        )
    try:
        return Meta.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ShardError(
            f"{path} cannot be used: {where}: {first['msg'].lower()}; prepare the data again"
        ) from error


@dataclass(frozen=True)
class TokenDataset:
    """The checked shards of one preparation. `fingerprint` identifies the tokens."""

    path: Path
    meta: Meta

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens and their meaning: equal fingerprints give equal batches."""
        meta = self.meta
        shards = {split: [shard.sha256 for shard in x.shards] for split, x in meta.splits.items()}
        identity = [
            meta.vocab_size,
            meta.dtype,
            meta.bos_id,
            meta.eos_id,
            meta.tokenizer.sha256,
            shards,
        ]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        tokenizer = load_tokenizer(self.path)
        if tokenizer.sha256 != self.meta.tokenizer.sha256:
            raise ShardError(
                f"{self.path / 'tokenizer.json'} is not the one the shards were made with; prepare "
                "again"
            )
        return tokenizer

    def split(self, split: Split) -> SplitMeta:
        if split not in self.meta.splits:
            raise ShardError(
                f"no split {split!r} in {self.path}; expected one of {sorted(self.meta.splits)}"
            )
        return self.meta.splits[split]

    def shards(self, split: Split) -> list[np.ndarray]:
        """Returns the split's tokens, one read-only map per shard. [tokens_i]"""
        return [
            map_tokens(self.path / shard.file, self.meta.dtype)
            for shard in self.split(split).shards
        ]

    @property
    def loss_of_text(self) -> str | None:
        """Says how much of the held-out text the tokenizer loses; None if it loses nothing."""
        if self.meta.tokenizer.lossless:
            return None
        documents, altered = self.split("val").documents, self.meta.tokenizer.altered
        how_many = "some" if altered is None else f"{altered:,}"
        return (
            f"the tokenizer loses text: {how_many} of {documents:,} held-out documents do not come "
            "back from their tokens, so there are no bits per byte; data.tokenizer=bytebpe and "
            "bytes lose nothing"
        )

    def bits_per_byte(self, nats_per_token: float) -> float | None:
        """Converts nats per token to bits per byte of the held-out text.
        BOS and EOS are paid for.

        None if the tokenizer loses text: its tokens do not pay for those bytes.
        """
        if not self.meta.tokenizer.lossless:
            return None
        meta = self.split("val")
        return nats_per_token / math.log(2) * meta.tokens / meta.bytes

    def nats_per_token(self, bits_per_byte: float) -> float:
        """Inverts `bits_per_byte`."""
        meta = self.split("val")
        return bits_per_byte * math.log(2) * meta.bytes / meta.tokens

    def check_tokens(self) -> None:
        """Reads every token and raises ShardError for a wrong hash or id.
        It takes seconds per GB.
        """
        for split in self.meta.splits:
            for shard, tokens in zip(self.split(split).shards, self.shards(split), strict=True):
                path = self.path / shard.file
                for start in range(0, len(tokens), 1 << 24):
                    check_ids(tokens[start : start + (1 << 24)], self.meta.vocab_size, path, start)
                if sha256_of(path) != shard.sha256:
                    raise ShardError(
                        f"{path} changed since it was prepared (sha256 differs); prepare the data "
                        "again"
                    )


def open_dataset(path: str | Path) -> TokenDataset:
    """Opens a folder that `prepare` made, and checks every shard's header and size; no token is
    read.

    Raises ShardError if meta.json or a shard is missing or cut short, or a split is empty.
    """
    directory = Path(path).expanduser()
    meta = read_meta(directory)
    for split in ("train", "val"):
        if (
            split not in meta.splits
            or not meta.splits[split].tokens
            or not meta.splits[split].bytes
        ):
            raise ShardError(
                f"{directory} has no tokens in split {split!r}; prepare the data again"
            )
        for shard in meta.splits[split].shards:
            check_shard(directory / shard.file, meta.dtype, shard.tokens)
    return TokenDataset(directory, meta)


def check_ids(tokens: np.ndarray, vocab_size: int, path: Path, start: int) -> None:
    """Raises ShardError if an id is not below vocab_size. `start`:
    place of the first one in its file.
    """
    if tokens.size and int(tokens.max()) >= vocab_size:
        first = int(np.argmax(tokens >= vocab_size))
        raise ShardError(
            f"{path} has token id {int(tokens[first])} at position {start + first}, but vocab_size "
            f"is {vocab_size}; these tokens are of another tokenizer: prepare the data again"
        )
