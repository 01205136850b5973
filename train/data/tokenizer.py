"""Text to token ids and back: GPT-2, byte-level BPE trained on the text, plain bytes, or any
tokenizer.json.

Every tokenizer has three ids that no text produces: BOS before a document, EOS after it, and PAD.
Text that contains "<|endoftext|>" is tokenized like any other text.

These are Hugging Face's `tokenizers`, without the classes of transformers around them: importing
those takes seconds and loads torch, and their `save_pretrained` writes other bytes with every
version.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from delta_trn.train.files import write_file
from delta_trn.train.settings.errors import TokenizerError

BOS, EOS, PAD = "<|bos|>", "<|endoftext|>", "<|pad|>"
# as a tokenizer's configuration names them
OURS = {"eos_token": EOS, "bos_token": BOS, "pad_token": PAD}
GPT2_REPOSITORY = "openai-community/gpt2"
HUB_SECONDS = 5.0  # in which the Hub answers, if it does
VOCAB_MULTIPLE = (
    64  # GPT-2's 50257 ids become 50304 rows: a size for matrix units, and that of the papers
)
# more text hardly changes the merges, and takes an hour rather than a minute
TRAINING_BYTES = 2**26
DEFAULT_BPE_VOCAB = 4096
NAMED = ("gpt2", "bytebpe", "bytes")  # others are paths


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and what a model must know of it.

    >>> tokenizer = plain_bytes()
    >>> tokenizer.encode("aé"), tokenizer.decode([256, 97, 195, 169, 257])
    ([256, 97, 195, 169], 'aé')

    vocab_size   rows of the embedding; ids from `size` on never occur
    size         number of ids, special ones included
    """

    tokenizer: Tokenizer
    vocab_size: int
    bos: int
    eos: int
    pad: int

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns BOS and the text's ids, as a prompt needs them: no EOS follows."""
        with _unknown_characters():
            return [self.bos, *self.tokenizer.encode(text, add_special_tokens=False).ids]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns BOS, ids, EOS of each text, computed on all cores. uint32 [n_i]"""
        with _unknown_characters():
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            np.array([self.bos, *encoding.ids, self.eos], dtype=np.uint32) for encoding in encodings
        ]

    def decode(self, ids: int | Iterable[int]) -> str:
        """Returns the text of the ids. Bytes that do not form UTF-8, as at a cut, become U+FFFD.

        One id may come alone: transformers' streamer, from 5.24 on, asks so for the end of a line.
        """
        several = [ids] if isinstance(ids, int) else ids
        return self.tokenizer.decode([int(i) for i in several], skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        """Writes what `transformers.AutoTokenizer.from_pretrained(directory)`
        and `load_tokenizer` read.
        """
        names = {
            "bos_token": self.tokenizer.id_to_token(self.bos),
            "eos_token": self.tokenizer.id_to_token(self.eos),
            "pad_token": self.tokenizer.id_to_token(self.pad),
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,
            # a prompt's last token must be its own, for generate() goes on from it
            "padding_side": "left",
            "model_vocab_size": self.vocab_size,
            **names,
        }
        write_file(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        write_file(directory / "special_tokens_map.json", json.dumps(names, indent=2) + "\n")
        write_file(directory / "tokenizer.json", self.tokenizer.to_str(pretty=True) + "\n")


@contextmanager
def _unknown_characters() -> Iterator[None]:
    """Raises TokenizerError where a tokenizer has no token for some text, nor one for the unknown."""
    try:
        yield
    except Exception as error:  # the binding raises bare Exception
        raise TokenizerError(
            f"the tokenizer cannot tokenize the text ({error}); take one that knows every byte, such "
            "as data.tokenizer=bytebpe, or add its token for unknown text to its tokenizer.json"
        ) from error


def load_tokenizer(directory: str | Path) -> TextTokenizer:
    """Loads the tokenizer that `TextTokenizer.save` wrote into the directory."""
    directory = Path(directory)
    config = _read_config(directory / "tokenizer_config.json")
    if "model_vocab_size" not in config:
        raise TokenizerError(
            f"{directory / 'tokenizer_config.json'} lacks model_vocab_size: it was not written by "
            f"`delta-trn data prepare`; prepare the data again with data.tokenizer={directory}"
        )
    return adopt(_read(directory / "tokenizer.json"), config, config["model_vocab_size"])


def tokenizer_settings(name: str, vocab_size: int | None) -> dict[str, str | int | None]:
    """Returns what identifies the tokenizer in a preparation's settings.
    Nothing is trained or fetched.
    """
    if name == "bytebpe":
        vocab_size = vocab_size or DEFAULT_BPE_VOCAB
    if name in NAMED:
        return {"kind": name, "vocab_size": vocab_size, "sha256": None}
    digest = hashlib.sha256(_tokenizer_file(name).read_bytes()).hexdigest()
    return {"kind": "file", "vocab_size": vocab_size, "sha256": digest}


def make_tokenizer(name: str, vocab_size: int | None, documents: Iterator[str]) -> TextTokenizer:
    """Makes the tokenizer called gpt2, bytebpe or bytes, or loads the one at a path.

    vocab_size   rows of the embedding; None: 4096 for bytebpe, else the size up to a multiple of 64
    documents    what bytebpe is trained on; the others do not read them
    """
    if name == "bytebpe":
        return train_byte_bpe(documents, vocab_size or DEFAULT_BPE_VOCAB)
    if name == "bytes":
        return plain_bytes(vocab_size)
    if name == "gpt2":
        return adopt(fetch_gpt2(), {}, vocab_size)
    path = _tokenizer_file(name)
    return adopt(_read(path), _read_config(path.with_name("tokenizer_config.json")), vocab_size)


def train_byte_bpe(documents: Iterator[str], vocab_size: int) -> TextTokenizer:
    """Trains GPT-2's kind of byte-level BPE on the first 64 MiB of the documents.

    The same text gives the same merges. Ids: BOS 0, EOS 1, PAD 2, the 256 bytes, merges. Any text
    survives a round trip.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(documents, TRAINING_BYTES), trainer)
    return adopt(tokenizer, OURS, vocab_size)


def plain_bytes(vocab_size: int | None = None) -> TextTokenizer:
    """Returns the tokenizer with one token per byte: id = byte, then BOS 256, EOS 257, PAD 258."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    return adopt(tokenizer, OURS, vocab_size)


def byte_alphabet() -> list[str]:
    """Returns GPT-2's printable character for every byte: itself if printable,
    else the next from U+0100.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def fetch_gpt2() -> Tokenizer:
    """Loads GPT-2's tokenizer from the Hub's local cache, or else from the Hub."""
    import huggingface_hub as hub

    try:
        if not isinstance(
            path := hub.try_to_load_from_cache(GPT2_REPOSITORY, "tokenizer.json"), str
        ):
            # the download would try six times, in half a minute, what this tries once
            url = hub.hf_hub_url(GPT2_REPOSITORY, "tokenizer.json")
            hub.get_session().head(url, timeout=HUB_SECONDS)
            path = hub.hf_hub_download(GPT2_REPOSITORY, "tokenizer.json")
    except Exception as error:  # the client's exceptions vary by version: it is out of reach
        raise TokenizerError(
            f"GPT-2's tokenizer is not on this machine, and {GPT2_REPOSITORY} on the Hugging Face "
            f"Hub is out of reach ({type(error).__name__}); train one on your text with "
            "data.tokenizer=bytebpe, or copy its tokenizer.json here and give data.tokenizer=PATH"
        ) from error
    return _read(Path(path))


def adopt(tokenizer: Tokenizer, config: dict[str, Any], vocab_size: int | None) -> TextTokenizer:
    """Takes over any tokenizer with the special tokens that its configuration names, and adds those
    it lacks.

    A BOS that is also the EOS, as in GPT-2, counts as missing: a document's start and its end must
    differ. All have in common: no padding, BOS before a prompt, special tokens spelled out.
    """
    ids: dict[str, int] = {}
    for key, usual in OURS.items():
        name = config.get(key)
        name = name.get("content") if isinstance(name, dict) else name
        token = tokenizer.token_to_id(name) if isinstance(name, str) else None
        if token is None or token in ids.values():
            tokenizer.add_special_tokens([AddedToken(usual, special=True, normalized=False)])
            token = tokenizer.token_to_id(usual)
            assert token is not None
        ids[key] = token
    eos, bos, pad = ids.values()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if vocab_size is None:
        vocab_size = -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if vocab_size < size:
        raise TokenizerError(
            f"vocab_size={vocab_size} is smaller than the tokenizer's {size} ids; leave it out, or "
            f"give {size} or more"
        )
    name = tokenizer.id_to_token(bos)
    # so that transformers' tokenizer(prompt) starts as a document does
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A $B:1", special_tokens=[(name, bos)]
    )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # in text, a special token's name is text
    return TextTokenizer(tokenizer, vocab_size, bos, eos, pad)


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _first_bytes(documents: Iterator[str], limit: int) -> Iterator[str]:
    size = 0
    for text in documents:
        if size >= limit:
            return
        size += len(text.encode())
        yield text


def _tokenizer_file(name: str) -> Path:
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(
            f"no tokenizer {name!r}: expected gpt2, bytebpe, bytes, or the path of a "
            "tokenizer.json or of its folder"
        )
    return file


def _read(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        raise TokenizerError(
            f"{path} cannot be read as a tokenizer.json ({error}); copy it again, or prepare again"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise TokenizerError(
            f"{path} is not JSON ({error}); copy it again, or prepare again"
        ) from error
