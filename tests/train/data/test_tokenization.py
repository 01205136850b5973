"""Text survives a round trip, ids mean what is said of them,
and training a tokenizer has one result.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from delta_trn.train.data.sources import named_source
from delta_trn.train.data.tokenizer import (
    BOS,
    EOS,
    PAD,
    byte_alphabet,
    load_tokenizer,
    make_tokenizer,
    plain_bytes,
    tokenizer_settings,
    train_byte_bpe,
)
from delta_trn.train.settings.errors import TokenizerError
from tests.support.corpus import prepare_text

NASTY = [
    "",
    " ",
    "plain words, twice: plain words",
    "\r\n\t  trailing spaces   \n\n\n",
    "ünïcödé 漢字 🙂 e\u0301 \u200d \ufeff \x00\x7f",
    "text that says <|endoftext|> and <|bos|> and <|pad|> without meaning it",
    "".join(map(chr, range(1, 600))),
]
TRAINING = [
    f"def function_{i % 7}(argument):\n    return argument + {i}\n" for i in range(200)
] + NASTY


@pytest.fixture(scope="module")
def bpe():
    return train_byte_bpe(iter(TRAINING), 320)


@pytest.fixture
def gpt2_like():
    """A tokenizer.json with GPT-2's size, its EOS where GPT-2 has it, and no merges."""
    vocab = {char: i for i, char in enumerate(byte_alphabet())}
    vocab.update({f"unused{i}": i for i in range(256, 50256)})
    like = plain_bytes().tokenizer
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer, made.decoder = like.pre_tokenizer, like.decoder
    made.add_special_tokens([EOS])
    return made


@pytest.mark.parametrize("kind", ["bytebpe", "bytes"])
def test_any_text_survives_tokenizing(bpe, kind):
    tokenizer = bpe if kind == "bytebpe" else plain_bytes()
    for text, ids in zip(NASTY, tokenizer.encode_documents(NASTY), strict=True):
        assert ids[0] == tokenizer.bos and ids[-1] == tokenizer.eos
        assert not {tokenizer.bos, tokenizer.eos, tokenizer.pad} & set(ids[1:-1].tolist())
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(10) == tokenizer.decode([10])
        assert tokenizer.encode(text) == ids[:-1].tolist()


def test_ids_mean_what_is_said_of_them(bpe):
    tokenizer = plain_bytes()
    assert tokenizer.encode("aé漢\x00") == [256, *"aé漢\x00".encode()]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (256, 257, 258)
    assert (tokenizer.size, tokenizer.vocab_size) == (259, 320)
    assert (bpe.bos, bpe.eos, bpe.pad) == (0, 1, 2) and bpe.size == bpe.vocab_size == 320
    assert len(bpe.encode("def function_3(argument):")) < len("def function_3(argument):") / 2
    short = train_byte_bpe(iter(["too little text leaves rows unused"]), 4096)
    assert short.size < 300 and short.vocab_size == 4096


def test_only_the_first_bytes_train_a_bpe(monkeypatch):
    monkeypatch.setattr("delta_trn.train.data.tokenizer.TRAINING_BYTES", 100)
    left = iter(["x" * 60] * 10)
    train_byte_bpe(left, 300)
    assert len(list(left)) >= 7


SCRIPT = """
import sys
from delta_trn.train.data.tokenizer import train_byte_bpe
sys.stdout.write(train_byte_bpe(iter(sys.argv[1:]), 1024).sha256)
"""


def test_training_a_bpe_has_one_result_on_any_number_of_threads():
    """In another process the seeds of hashes and the number of threads differ,
    as between machines.
    """
    library = named_source("python-stdlib")
    texts = [text[:5000] for _, text in zip(range(60), library.documents(Counter()), strict=False)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *texts],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
        env={
            **os.environ,
            "RAYON_NUM_THREADS": "1",
            "PYTHONHASHSEED": "1",
            "PYTHONPATH": ":".join(sys.path),
        },
    )
    assert done.stdout == train_byte_bpe(iter(texts), 1024).sha256


# -- files -----------------------------------------------------------------------------------------


def test_a_saved_tokenizer_loads_unchanged_here_and_in_transformers(bpe, tmp_path):
    bpe.save(tmp_path)
    loaded, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    specials = (bpe.bos, bpe.eos, bpe.pad)
    assert (loaded.bos, loaded.eos, loaded.pad, loaded.vocab_size) == (*specials, bpe.vocab_size)
    assert loaded.sha256 == bpe.sha256
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == specials
    text = "def function_1(argument): ünïcödé"
    assert theirs(text)["input_ids"] == bpe.encode(text)
    assert theirs.decode(bpe.encode(text), skip_special_tokens=True) == text
    # generate() continues each row's last token, which must not be padding
    rows = theirs(["one", "one two three"], padding=True)["input_ids"]
    assert theirs.padding_side == "left" and rows[0][0] == bpe.pad and rows[0][-1] != bpe.pad
    assert theirs.decode(rows[0], skip_special_tokens=True) == "one"


# -- GPT-2 and others' -----------------------------------------------------------------------------


def test_gpt2_out_of_reach_says_at_once_what_to_pass_instead(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=unreachable))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)  # it would try six times
    message = r"out of reach \(ConnectionError\); .*data.tokenizer=bytebpe, .*data.tokenizer=PATH"
    (tmp_path / "text.txt").write_text("a\n<|endoftext|>\nb")
    with pytest.raises(TokenizerError, match=message):
        prepare_text(tmp_path / "text.txt", tmp_path / "out", tokenizer="gpt2")
    assert not (tmp_path / "out").exists()


def test_gpt2_comes_from_the_hub_and_then_its_cache_and_gets_a_bos_of_its_own(
    gpt2_like, tmp_path, monkeypatch
):
    path = str(tmp_path / "tokenizer.json")
    gpt2_like.save(path)
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.get_session", lambda: SimpleNamespace(head=lambda *a, **k: None)
    )
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *names: asked.append(names) or path
    )
    tokenizer = make_tokenizer("gpt2", None, iter([]))
    # GPT-2's own configuration names one token for both ends; a document's start and its end must
    # differ
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size) == (
        50257,
        50256,
        50258,
        50304,
    )
    assert tokenizer.decode(tokenizer.encode(NASTY[4])) == NASTY[4]
    assert len(asked) == 1
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: path)
    assert make_tokenizer("gpt2", None, iter([])).sha256 == tokenizer.sha256
    assert len(asked) == 1, "what is there needs no network"


def test_a_tokenizer_of_somebody_else_keeps_its_special_tokens(tmp_path):
    tokenizer = Tokenizer(
        models.WordLevel({"<s>": 0, "</s>": 1, "word": 2, "<unk>": 3}, unk_token="<unk>")
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = make_tokenizer(str(tmp_path), None, iter([]))
    assert (made.bos, made.eos) == (0, 1)
    assert made.pad == 4 and made.tokenizer.id_to_token(4) == PAD
    assert made.vocab_size == 64
    assert BOS not in made.tokenizer.get_vocab()


def test_tokenizer_settings_identify_a_tokenizer(tmp_path, bpe):
    assert tokenizer_settings("bytebpe", None)["vocab_size"] == 4096
    bpe.save(tmp_path)
    expected = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer_settings(str(tmp_path), None) == {
        "kind": "file",
        "vocab_size": None,
        "sha256": expected,
    }
    assert tokenizer_settings(str(tmp_path / "tokenizer.json"), None)["sha256"] == expected


# -- bad input -------------------------------------------------------------------------------------


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(bpe, tmp_path):
    with pytest.raises(
        TokenizerError, match=r"vocab_size=258 is smaller than the tokenizer\'s 259 ids"
    ):
        train_byte_bpe(iter(TRAINING), 258)
    bpe.save(tmp_path)
    with pytest.raises(
        TokenizerError, match=r"vocab_size=256 is smaller than the tokenizer's 320 ids"
    ):
        make_tokenizer(str(tmp_path), 256, iter([]))


DAMAGES = [
    ("tokenizer.json", None, r"cannot be read as a tokenizer\.json \(No such file"),
    ("tokenizer.json", '{"version": "1.0", ', r"cannot be read as a tokenizer\.json \(EOF"),
    (
        "tokenizer_config.json",
        '{"eos_token": "</s>"}',
        r"lacks model_vocab_size: it was not written by",
    ),
    ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGES)
def test_load_tokenizer_names_damaged_files(bpe, tmp_path, name, content, message):
    bpe.save(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)
