"""Text comes out of every kind of source as it went in, in one order."""

import itertools
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from delta_trn.train.data import readers, sources
from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.data.entropies import documents
from delta_trn.train.data.sources import SECTION, FileSource, HubSource, find_source
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import DataSection
from tests.support.corpus import PACKERS, pack, prepare_text, write_jsonl

TEXTS = [
    "plain",
    "two\nlines\r\nand a carriage return",
    "ünïcödé – 漢字 🙂",
    "",
    "tab\there",
    "last",
]


def source_of(path, **options):
    return find_source(DataSection(source=str(path), **options))


def read(source) -> list[str]:
    return list(source.documents(Counter()))


def write_parquet(path: Path, texts):
    table = pyarrow.table({"text": list(texts), "n": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=4)
    return path


@pytest.fixture
def folder(tmp_path):
    """Three kinds of files, a nested one, and four that are to be left alone."""
    root = tmp_path / "corpus [1]"  # brackets are a pattern to `datasets`
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    write_jsonl(root / "b.jsonl", TEXTS)
    write_parquet(root / "c.parquet", TEXTS)
    (root / "a.txt").write_text("first file", encoding="utf-8")
    (root / "sub" / "d.md").write_text("nested", encoding="utf-8")
    (root / ".git" / "config").write_text("hidden")
    (root / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF")
    (root / "latin1.txt").write_bytes(b"text " * 2000 + b"caf\xe9\n")
    (root / "zero.bin").write_bytes(bytes(100))
    return root


def test_a_folder_is_read_in_the_order_of_names_packed_or_not(folder):
    def found():
        skipped: Counter[str] = Counter()
        assert list(source_of(folder).documents(skipped)) == [
            "first file",
            *TEXTS,
            *TEXTS,
            "nested",
        ]
        return skipped

    assert found() == {"files that are not text in UTF-8": 3}
    for name, kind in (("a.txt", "gz"), ("b.jsonl", "zst"), ("sub/d.md", "xz")):
        pack(folder / name, kind)
        (folder / name).unlink()
    pack(folder / "zero.bin", "gz")
    assert found() == {"files that are not text in UTF-8": 4}


def test_local_text_asks_no_network_and_leaves_nothing_in_the_users_folders(folder, tmp_path):
    """In a process of its own, whose every connection is refused, and whose home is empty."""
    script = """
import socket, sys
def refuse(*names, **options): raise AssertionError("it asked the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from tests.support.corpus import prepare_text
prepare_text(sys.argv[1], sys.argv[2])
"""
    home = tmp_path / "home"
    subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "out")],
        env={"HOME": str(home), "PYTHONPATH": ":".join(sys.path)}, check=True, timeout=200,
    )  # fmt: skip
    assert not home.exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]


def test_text_of_jsonl_is_what_its_strings_say(tmp_path):
    """Other fields differ from row to row, null is empty,
    and half of a surrogate pair is replaced.
    """
    path = tmp_path / "rows.jsonl"
    lines = [
        '{"text": "2020-01-01", "m": 1}',
        '{"m": {"a": []}, "text": null}',
        "",
        '{"text": "a\\ud800b"}',
    ]
    path.write_text("\n".join(lines))
    assert read(source_of(path)) == ["2020-01-01", "", "a\ufffdb"]


def test_endoftext_separates_the_documents_of_a_text_file(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\nthree")
    assert read(source_of(path)) == ["one", "two\nlines", "three"]


PARAGRAPHS = "".join(
    f"paragraph {i} " + "word " * (i % 40) + "\n" + "\n" * (i % 3) for i in range(2000)
)


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        (PARAGRAPHS, "paragraph", "\n\n"),
        (PARAGRAPHS.replace("\n", "\r\n"), "paragraph", "\n\r\n"),
        (("y" * 99 + "\n") * 2000, "y", "\n"),
        ("word " * 40_000, " word", "word"),
        ("x" * 200_000, "x", "x"),
        ("漢字" * 100_000, "", ""),
    ],
    ids=["blank lines", "CRLF", "lines", "words", "a long word", "no space at all"],
)
def test_a_long_text_is_cut_without_loss_at_the_best_place(tmp_path, text, start, end):
    path = tmp_path / "book.txt"
    path.write_bytes(text.encode())
    pieces = read(source_of(path))
    assert "".join(pieces) == text and len(pieces) > 4
    assert all(SECTION <= len(piece) <= 2 * SECTION for piece in pieces[:-1])
    assert len(pieces[-1]) < 2 * SECTION + len(readers.SEPARATOR)
    assert all(piece.startswith(start) for piece in pieces[1:])
    assert all(piece.endswith(end) for piece in pieces[:-1])


def test_a_separator_is_never_cut_though_half_of_it_was_read(tmp_path):
    path = tmp_path / "line.txt"
    for first, second in itertools.product(range(88, 100), range(86, 100)):
        path.write_text("x" * first + " " + "x" * second + "<|endoftext|>" + "y" * 300)
        pieces = list(readers.read_text(path, 50))
        assert "".join(pieces) == path.read_text().replace("<|endoftext|>", "")
        assert not any("x" in piece and "y" in piece for piece in pieces)


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.csv"])
def test_a_truncated_or_damaged_archive_is_refused_and_named(tmp_path, kind, name):
    path = tmp_path / name
    numbers = [str(random.Random(i).random()) for i in range(1000)]
    path.write_text("\n".join(["text", *numbers]))
    if name == "x.jsonl":
        write_jsonl(path, numbers)
    packed = pack(path, kind)
    whole = packed.read_bytes()
    for content in (
        whole[: len(whole) * 2 // 3],
        b"no such format, and long enough to be seen as none" * 10,
    ):
        packed.write_bytes(content)
        with pytest.raises(
            SourceError, match=rf"{name}\.{kind} cannot be read \(.*or copy it again"
        ):
            read(source_of(packed))


def test_source_settings_depend_on_the_text_and_not_on_its_place(folder, tmp_path):
    before = source_of(folder).settings()
    elsewhere = tmp_path / "elsewhere" / folder.name
    shutil.copytree(folder, elsewhere)
    assert source_of(elsewhere).settings() == before
    for name, content in (("a.txt", "First file"), ("latin1.txt", "text " * 3000)):
        (elsewhere / name).write_text(content)
        assert source_of(elsewhere).settings() != before
        shutil.copyfile(folder / name, elsewhere / name)


# -- Hugging Face datasets -------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A dataset by its name, as the library reads it from a local folder: 3 files, 30 rows."""
    root = tmp_path / "somebody" / "stories"
    root.mkdir(parents=True)
    for i in range(3):
        write_parquet(root / f"train-{i}.parquet", [f"story {10 * i + j}" for j in range(10)])
    write_parquet(root / "validation-0.parquet", ["held out 1", "held out 2"])
    load = datasets.load_dataset
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *names, **options: None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *rest, **options: load(str(root), *rest, **options)
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return SimpleNamespace(name="somebody/stories", rows=[f"story {i}" for i in range(30)])


def test_of_a_hub_dataset_in_parquet_only_the_text_is_read(hub):
    """Otherwise rows would have `n`, too. A column
    that is not there is named beside those that are.
    """
    rows = HubSource(hub.name)._rows
    assert [rows.column_names, *rows] == [["text"], *({"text": row} for row in hub.rows)]
    with pytest.raises(
        SourceError, match=r"row 1 has no text in field 'body': \{'text': 'story 0', 'n'"
    ):
        read(HubSource(hub.name, text_field="body"))


def test_a_name_with_a_slash_is_a_dataset_unless_it_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = source_of("HuggingFaceFW/fineweb-edu", subset="sample-10BT")
    assert found == HubSource("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert found.name == "fineweb-edu-sample-10bt"
    (tmp_path / "HuggingFaceFW" / "fineweb-edu").mkdir(parents=True)
    assert isinstance(source_of("HuggingFaceFW/fineweb-edu"), FileSource)


def test_a_dataset_that_cannot_be_read_is_named_and_leaves_no_folder(hub, tmp_path, monkeypatch):
    def gone(*names, **options):
        yield {"text": "one"}
        raise ConnectionError("gone")

    with pytest.raises(
        SourceError, match=r"split 'test', cannot be read \(ValueError: .*train.*check the"
    ):
        read(HubSource(hub.name, split="test"))
    for place, name in ((sources, "stream"), (huggingface_hub.HfApi, "dataset_info")):
        monkeypatch.setattr(place, name, lambda *names, **options: list(gone()))
        with pytest.raises(
            SourceError, match=r"cannot be read \(ConnectionError: gone\).* pass its folder"
        ):
            prepare_text(hub.name, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_validation_may_be_a_split_of_the_same_dataset(hub, monkeypatch):
    out = prepare_text(hub.name, None, validation="validation")
    dataset = open_dataset(out)
    assert out.name.startswith("stories-bytes-")
    texts = {
        s: [dataset.tokenizer.decode(ids) for ids in documents(dataset, s)]
        for s in dataset.meta.splits
    }
    assert texts == {"val": ["held out 1", "held out 2"], "train": hub.rows}
    monkeypatch.setattr(datasets, "load_dataset", None)  # complete: the Hub is not asked again
    assert prepare_text(hub.name, None, validation="validation") == out


# -- bad input -------------------------------------------------------------------------------------


# fmt: off
BAD = [
    ("x.jsonl", b'{"text": "good"}\nnot json\n', r"x\.jsonl:2 is not JSON"),
    ("x.jsonl", b'{"a": "b", "id": 1}\n', r"row 1 has no text in field 'text': \{'a': 'b', 'id': 1\}; "),
    ("x.jsonl", b'{"text": ["a"]}\n', r"x\.jsonl row 1 has no text in field 'text': \{'text': \['a'\]\}"),
    ("x.jsonl", b'["a"]\n', r"x\.jsonl row 1 has no text in field 'text': \['a'\]"),
    ("x.csv", b"title,body\na,b\n", r"x\.csv .*\['text'\].* rows in UTF-8 with 'text', which"),
    ("x.csv", b'text\nfine\n"never closed\n', r"x\.csv cannot be read .* row 2\); .*: mend it"),
    ("x.csv", b"text\ncaf\xe9\n", r"x\.csv cannot be read .* expected rows in UTF-8"),
    ("x.parquet", b"PAR0 and no more", r"x\.parquet cannot be read .*not a parquet file"),
    ("x.txt", b"caf\xe9 au lait\n", r"x\.txt cannot be read .* position 3: .*expected text in UTF-8: mend"),
    ("x.tar", b"name" + bytes(100) + b"text", r"x\.tar cannot be read .*NUL characters.*unpack an archive"),
    ("meta.json", b"{}", r"holds prepared shards, not text"),
    ("missing.txt", None, r"no source .*missing\.txt': expected an existing folder"),
]
# fmt: on


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_bad_sources_say_where_and_what_to_do(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if name == "meta.json":
        (tmp_path / "x_val_000000.bin").write_bytes(bytes(1024))
        path = tmp_path
    with pytest.raises(SourceError, match=message):
        read(source_of(path))


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_words_that_elsewhere_mean_a_missing_value_are_text(name, tmp_path):
    texts = ["NA", "null", "nan", "None", "N/A", "true", "1.50", "-inf"]
    (tmp_path / name).write_text("\n".join(["text", *texts]) + "\n")
    assert read(FileSource("x", tmp_path, (name,))) == texts
