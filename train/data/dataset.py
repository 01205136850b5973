"""A folder of prepared tokens: meta.json, the shards it lists, and the tokenizer that made them."""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from delta_trn.train.data.shards import (
    HEADER_BYTES,
    HEADER_INTS,
    MAGIC,
    VERSION,
    check_shard,
    map_tokens,
    sha256_of,
)
from delta_trn.train.data.tokenizer import TextTokenizer, load_tokenizer
from delta_trn.train.settings.errors import ShardError

Split = Literal["train", "val"]
FORMAT = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardMeta(_Frozen):
    file: str
    tokens: int
    sha256: str


class SplitMeta(_Frozen):
    """`tokens` counts BOS and EOS; `bytes` counts the UTF-8 of the documents, which hold neither."""

    tokens: int
    bytes: int
    documents: int
    shards: tuple[ShardMeta, ...]


class TokenizerMeta(_Frozen):
    """`lossless`: every held-out document came back from its ids as it was."""

    kind: str
    size: int
    lossless: bool
    sha256: str


class Packing(_Frozen):
    """How documents lie in a shard: one after the other, never cut at a shard's end."""

    kind: Literal["concatenated"] = "concatenated"
    document: str = "BOS tokens EOS"
    straddle_shards: bool = False


class Datafile(_Frozen):
    magic: int = MAGIC
    version: int = VERSION
    header_ints: int = HEADER_INTS
    header_bytes: int = HEADER_BYTES


class Meta(_Frozen):
    """meta.json. It is written last: a folder that has it is complete."""

    format: int = FORMAT
    name: str
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    bos_id: int
    eos_id: int
    pad_id: int
    tokenizer: TokenizerMeta
    splits: dict[Split, SplitMeta]
    skipped: dict[str, int]
    settings: dict[str, Any]
    packing: Packing = Packing()
    datafile: Datafile = Datafile()

    @property
    def fingerprint(self) -> str:
        """Of the tokens and their meaning: equal fingerprints, equal batches."""
        shards = {split: [shard.sha256 for shard in meta.shards] for split, meta in self.splits.items()}
        identity = [self.vocab_size, self.dtype, self.bos_id, self.eos_id, self.tokenizer.sha256, shards]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def read_meta(directory: Path) -> Meta:
    """meta.json of a complete folder. ShardError if there is none, or it is not ours."""
    path = directory / "meta.json"
    if not path.is_file():
        if (directory / "progress.json").exists():
            raise ShardError(
                f"{directory} is prepared only in part; run the same `python -m train data prepare` again, "
                "it continues"
            )
        raise ShardError(
            f"{path} is missing; make it with `python -m train data prepare SOURCE --out {directory}`"
        )
    try:
        meta = Meta.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ShardError(
            f"{path} cannot be used: {where}: {first['msg'].lower()}; prepare the data again"
        ) from error
    if meta.format != FORMAT:
        raise ShardError(f"{path} has format {meta.format}, this code reads {FORMAT}; prepare the data again")
    return meta


@dataclass(frozen=True)
class TokenDataset:
    """Checked shards of one preparation. `fingerprint` identifies the tokens."""

    path: Path
    meta: Meta

    @property
    def fingerprint(self) -> str:
        return self.meta.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.meta.vocab_size

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        tokenizer = load_tokenizer(self.path)
        if tokenizer.sha256 != self.meta.tokenizer.sha256:
            raise ShardError(
                f"{self.path / 'tokenizer.json'} is not the one the shards were made with; prepare again"
            )
        return tokenizer

    @cached_property
    def _maps(self) -> dict[str, np.ndarray]:
        return {
            shard.file: map_tokens(self.path / shard.file, self.meta.dtype)
            for split in self.meta.splits.values()
            for shard in split.shards
        }

    def split(self, split: Split) -> SplitMeta:
        if split not in self.meta.splits:
            raise ShardError(f"no split {split!r} in {self.path}; expected one of {sorted(self.meta.splits)}")
        return self.meta.splits[split]

    def shards(self, split: Split) -> list[np.ndarray]:
        """The split's tokens, one read-only map a shard. [tokens_i]"""
        return [self._maps[shard.file] for shard in self.split(split).shards]

    def bits_per_byte(self, nats_per_token: float, split: Split = "val") -> float:
        """Cross-entropy a token in nats as bits a byte of the split's text, BOS and EOS paid for."""
        meta = self.split(split)
        return nats_per_token / math.log(2) * meta.tokens / meta.bytes

    def nats_per_token(self, bits_per_byte: float, split: Split = "val") -> float:
        """The inverse of `bits_per_byte`."""
        meta = self.split(split)
        return bits_per_byte * math.log(2) * meta.bytes / meta.tokens

    def check_tokens(self) -> None:
        """Read everything: hashes as recorded, ids below vocab_size. Seconds a GB, so only on request."""
        for split in self.meta.splits:
            for shard, tokens in zip(self.split(split).shards, self.shards(split), strict=True):
                path = self.path / shard.file
                for start in range(0, len(tokens), 1 << 24):
                    check_ids(tokens[start : start + (1 << 24)], self.vocab_size, path, start)
                if sha256_of(path) != shard.sha256:
                    raise ShardError(
                        f"{path} changed since it was prepared (sha256 differs); prepare the data again"
                    )


def open_dataset(path: str | Path) -> TokenDataset:
    """The dataset in a folder that `prepare` made. Checks every shard's header and size, and reads no token.

    Raises ShardError: no meta.json; a shard missing, truncated, of another dtype, or no shard; an empty
    split.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ShardError(
            f"{directory} is not a folder; make it with `python -m train data prepare SOURCE --out DIR`"
        )
    meta = read_meta(directory)
    for split in ("train", "val"):
        if split not in meta.splits or not meta.splits[split].tokens or not meta.splits[split].bytes:
            raise ShardError(f"{directory} has no tokens in split {split!r}; prepare the data again")
        for shard in meta.splits[split].shards:
            check_shard(directory / shard.file, meta.dtype, shard.tokens)
        total = sum(shard.tokens for shard in meta.splits[split].shards)
        if total != meta.splits[split].tokens:
            raise ShardError(
                f"{directory / 'meta.json'} counts {meta.splits[split].tokens} tokens in {split!r}, its "
                f"shards {total}; prepare the data again"
            )
    return TokenDataset(directory, meta)


def check_ids(tokens: np.ndarray, vocab_size: int, path: Path, start: int) -> None:
    """ShardError if an id is not below vocab_size. `start` is where in the file's tokens these begin."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        at = int(np.argmax(tokens >= vocab_size))
        raise ShardError(
            f"{path} has token id {int(tokens[at])} at position {start + at}, but vocab_size is "
            f"{vocab_size}; these tokens are of another tokenizer: prepare the data again"
        )
