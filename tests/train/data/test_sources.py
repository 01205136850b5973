"""Text comes out of every kind of source as it went in, in one order."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import httpx
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from delta_trn.train.data import open_dataset, readers
from delta_trn.train.data.entropies import documents
from delta_trn.train.data.sources import SECTION, FileSource, HubSource, find_source
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import DataSection
from tests.support.corpus import PACKERS, pack, prepare_text, write_jsonl

TEXTS = ["plain", "two\nlines\r\nand a carriage return", "ünïcödé – 漢字 🙂", "", "tab\there", "last"]


def source_of(path, **options):
    return find_source(DataSection(source=str(path), **options))


def read(source) -> list[str]:
    return list(source.documents(Counter()))


def skipped(source) -> Counter[str]:
    found: Counter[str] = Counter()
    list(source.documents(found))
    return found


def write_parquet(path: Path, texts, row_group_size=4):
    table = pyarrow.table({"text": list(texts), "n": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
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


def test_a_folder_is_read_in_the_order_of_names(folder):
    source = source_of(folder)
    assert read(source) == ["first file", *TEXTS, *TEXTS, "nested"]
    assert skipped(source) == {"files that are not text": 2, "files that are not UTF-8": 1}


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


def test_jsonl_null_is_empty_text_and_half_a_surrogate_pair_is_replaced(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": null}\n\n{"text": "a\\ud800b"}\n')
    assert read(source_of(path)) == ["", "a\ufffdb"]


def test_other_fields_of_jsonl_may_differ_from_row_to_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"text": "2020-01-01", "m": 1}\n{"m": {"a": []}, "text": "b"}\n{"text": "c", "m": "x"}\n'
    )
    assert read(source_of(path)) == ["2020-01-01", "b", "c"]


def test_endoftext_separates_the_documents_of_a_text_file(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\nthree")
    assert read(source_of(path)) == ["one", "two\nlines", "three"]


def test_a_single_text_file_is_cut_at_blank_lines_without_loss(tmp_path):
    text = "".join(f"paragraph {i} " + "word " * (i % 40) + "\n" + "\n" * (i % 3) for i in range(2000))
    path = tmp_path / "book.txt"
    path.write_text(text)
    pieces = read(source_of(path))
    assert "".join(pieces) == text
    assert len(pieces) > 10
    assert all(SECTION <= len(piece) < 2 * SECTION + 300 for piece in pieces[:-1])
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


def test_text_without_blank_lines_is_cut_after_twice_the_section(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("x" * 99 + "\n" + ("y" * 99 + "\n") * 2000)
    pieces = read(source_of(path))
    assert {len(piece) for piece in pieces[:-1]} == {2 * SECTION + 32}  # the next multiple of 100


@pytest.mark.parametrize("line", ["word " * 40_000 + "\n", "x" * 200_000, "漢字" * 100_000])
def test_a_text_of_one_line_is_cut_into_documents_without_loss(tmp_path, line):
    path = tmp_path / "line.txt"
    path.write_text(line, encoding="utf-8")
    pieces = read(source_of(path))
    assert "".join(pieces) == line
    assert len(pieces) > 4 and all(len(piece) <= 4 * SECTION for piece in pieces)
    assert all(piece.startswith(" ") for piece in pieces[1:]) or "x" in line or "漢" in line
    prepare_text(path, tmp_path / "out")


def test_a_separator_in_a_long_line_of_words_is_never_cut(tmp_path):
    for margin in range(40):
        path = tmp_path / "line.txt"
        path.write_text("x " * 40 + "x" * margin + "<|endoftext|>" + "y " * 300)
        pieces = list(readers.read_text(path, 50))
        assert "".join(pieces) == path.read_text().replace("<|endoftext|>", "")
        assert not any("x" in piece and "y" in piece for piece in pieces)


def test_a_packed_file_of_a_folder_is_read_under_its_name(folder):
    whole = read(source_of(folder))
    for name, kind in (("a.txt", "gz"), ("b.jsonl", "zst"), ("sub/d.md", "xz")):
        pack(folder / name, kind)
        (folder / name).unlink()
    pack(folder / "zero.bin", "gz")
    source = source_of(folder)
    assert read(source) == whole
    assert skipped(source) == {"files that are not text": 3, "files that are not UTF-8": 1}


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.csv"])
def test_a_truncated_or_damaged_archive_is_refused_and_named(tmp_path, kind, name):
    path = tmp_path / name
    numbers = [str(random.Random(i).random()) for i in range(5000)]
    path.write_text("\n".join(["text", *numbers]))
    if name == "x.jsonl":
        write_jsonl(path, numbers)
    packed = pack(path, kind)
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(SourceError, match=rf"{name}\.{kind} is cut short \(.*copy it again"):
        read(source_of(packed))
    packed.write_bytes(b"no such format, and long enough to be seen as none" * 10)
    with pytest.raises(SourceError, match=rf"{name}\.{kind} cannot be unpacked as \.{kind} \("):
        read(source_of(packed))


def test_source_settings_depend_on_the_text_and_not_on_its_place(folder, tmp_path):
    import shutil

    before = source_of(folder).settings()
    elsewhere = tmp_path / "elsewhere" / folder.name
    shutil.copytree(folder, elsewhere)
    assert source_of(elsewhere).settings() == before
    (elsewhere / "a.txt").write_text("First file")
    assert source_of(elsewhere).settings() != before


def test_a_large_file_is_known_by_its_size_and_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("delta_trn.train.data.sources.WHOLE_HASH_LIMIT", 1000)
    monkeypatch.setattr("delta_trn.train.data.sources.HASH_BLOCK", 10)
    path = tmp_path / "large.txt"
    path.write_bytes(b"a" * 5000)
    before = source_of(path).settings()
    path.write_bytes(b"a" * 4999 + b"b")  # the last block is always among those read
    assert source_of(path).settings() != before


# -- Hugging Face datasets ---------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A dataset by its name, as the library reads it from a local folder: 3 files, 30 rows."""
    root = tmp_path / "somebody" / "stories"
    root.mkdir(parents=True)
    for i in range(3):
        write_parquet(root / f"train-{i}.parquet", [f"story {i} {j}" for j in range(10)])
    write_parquet(root / "validation-0.parquet", ["held out 1", "held out 2"])
    load = datasets.load_dataset
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *names, **options: None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *rest, **options: load(str(root), *rest, **options)
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return SimpleNamespace(
        name="somebody/stories", rows=[f"story {i} {j}" for i in range(3) for j in range(10)]
    )


def test_a_hub_dataset_is_streamed_split_by_split(hub):
    assert read(HubSource(hub.name)) == hub.rows
    assert read(HubSource(hub.name, split="validation")) == ["held out 1", "held out 2"]


def test_of_a_hub_dataset_in_parquet_only_the_text_is_read(hub):
    """Otherwise rows would have `n`, too. A column that is not there is named beside those that are."""
    rows = HubSource(hub.name)._rows
    assert [rows.column_names, *rows.take(2)] == [["text"], *({"text": row} for row in hub.rows[:2])]
    with pytest.raises(SourceError, match=r"row 1 has no field 'body'; it has \['n', 'text'\]"):
        read(HubSource(hub.name, text_field="body"))


def test_a_name_with_a_slash_is_a_dataset_unless_it_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = source_of("HuggingFaceFW/fineweb-edu", subset="sample-10BT")
    assert found == HubSource("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert found.name == "fineweb-edu-sample-10bt"
    (tmp_path / "HuggingFaceFW" / "fineweb-edu").mkdir(parents=True)
    (tmp_path / "HuggingFaceFW" / "fineweb-edu" / "a.txt").write_text("local")
    assert isinstance(source_of("HuggingFaceFW/fineweb-edu"), FileSource)


def test_an_unreachable_hub_says_what_to_pass_instead_and_leaves_no_folder(tmp_path):
    command = [sys.executable, "-m", "delta_trn.train", "data", "prepare", "roneneldan/TinyStories"]
    done = subprocess.run(
        [*command, "data.folder=out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)},
        timeout=200,
    )
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "Traceback" not in done.stderr
    assert "cannot reach dataset 'roneneldan/TinyStories'" in done.stderr
    assert "(HF_HUB_OFFLINE is set)" in done.stderr and "pass the local folder, .parquet" in done.stderr


def test_what_goes_wrong_with_a_dataset_is_told_apart(hub, monkeypatch):
    with pytest.raises(SourceError, match=r"no subset None with split 'test'.*train"):
        read(HubSource(hub.name, split="test"))

    monkeypatch.setattr(datasets, "load_dataset", _raising(ConnectionError()))
    with pytest.raises(SourceError, match=r"cannot reach dataset .*\(ConnectionError\)"):
        read(HubSource(hub.name))
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    missing = RepositoryNotFoundError("404", response=response)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", _raising(missing))
    with pytest.raises(SourceError, match="the Hub has no dataset 'some/body'"):
        read(HubSource("some/body"))


def _raising(error: Exception):
    def fail(*names, **options):
        raise error

    return fail


def test_a_network_that_goes_away_ends_a_preparation_and_leaves_nothing(hub, tmp_path, monkeypatch):
    source = HubSource(hub.name)

    def rows():
        yield {"text": "one"}
        raise ConnectionError("gone")

    source.__dict__["_rows"] = rows()
    with pytest.raises(SourceError, match=r"reading .* stopped \(ConnectionError: gone\); run the same"):
        read(source)


def test_validation_may_be_a_split_of_the_same_dataset(hub, monkeypatch):
    out = prepare_text(hub.name, None, validation="validation")
    dataset = open_dataset(out)
    assert out.name.startswith("stories-bytes-")
    assert [dataset.tokenizer.decode(ids) for ids in documents(dataset, "val")] == [
        "held out 1",
        "held out 2",
    ]
    assert [dataset.tokenizer.decode(ids) for ids in documents(dataset, "train")] == hub.rows
    monkeypatch.setattr(datasets, "load_dataset", None)  # complete: the Hub is not asked again
    assert prepare_text(hub.name, None, validation="validation") == out


# -- bad input ---------------------------------------------------------------------------------------------


def _not_json(path):
    (path / "x.jsonl").write_text('{"text": "good"}\nnot json\n')
    return path / "x.jsonl"


def _no_field(path):
    (path / "x.jsonl").write_text('{"content": "a", "id": 1}\n')
    return path / "x.jsonl"


def _not_text(path):
    return write_jsonl(path / "x.jsonl", [["a"]])


def _a_list(path):
    (path / "x.jsonl").write_text('["a"]\n')
    return path / "x.jsonl"


def _no_column(path):
    return write_parquet(path / "x.parquet", ["a"]).rename(path / "y.parquet")


def _no_csv_column(path):
    (path / "x.csv").write_text("title,body\na,b\n")
    return path / "x.csv"


def _open_quote(path):
    (path / "x.csv").write_text('text\nfine\n"never closed\n')
    return path / "x.csv"


def _not_utf8_csv(path):
    (path / "x.csv").write_bytes(b"text\ncaf\xe9\n")
    return path / "x.csv"


def _tar(path):
    (path / "x.tar.gz").write_bytes(b"")
    return path / "x.tar.gz"


def _not_parquet(path):
    (path / "x.parquet").write_bytes(b"PAR0 and no more")
    return path / "x.parquet"


def _not_utf8(path):
    (path / "x.txt").write_bytes(b"caf\xe9 au lait\n")
    return path / "x.txt"


def _binaries_only(path):
    (path / "x.png").write_bytes(b"\x89PNG\0")
    return path


def _shards(path):
    (path / "meta.json").write_text("{}")
    (path / "x_val_000000.bin").write_bytes(bytes(1024))
    return path


# fmt: off
BAD = [
    (_not_json,      {},                          r"x\.jsonl:2 is not JSON"),
    (_no_field,      {},                         r"no field 'text'; it has \['content', 'id'\]: choose"),
    (_not_text,      {},                          r"x\.jsonl row 1: field 'text' is list, expected text"),
    (_a_list,        {},                          r"x\.jsonl row 1 has no field 'text'; it has list"),
    (_no_column,     {"text_field": "body"},      r"y\.parquet row 1 has no field 'body'; it has .'n'"),
    (_no_csv_column, {},                          r"x\.csv .*not found: \['text'\].* choose data.text_field"),
    (_open_quote,    {},                          r"x\.csv cannot be read .* row 2\); .* or rename it"),
    (_not_utf8_csv,  {},                          r"x\.csv cannot be read .* expected rows in UTF-8"),
    (_tar,           {},                          r"x\.tar\.gz cannot be read as it is; unpack it"),
    (_not_parquet,   {},                          r"x\.parquet cannot be read .*not a parquet file"),
    (_not_utf8,      {},                          r"x\.txt is not UTF-8: .* near byte 3; convert it"),
    (_binaries_only, {},                          r"has no text file .*1 other files"),
    (_shards,        {},                          r"holds prepared shards, not text"),
    (lambda path: path,  {},                          r"has no text file .*; 0 other files"),
    (lambda path: path / "missing.txt", {},       r"no source .*missing\.txt': expected an existing folder"),
    (lambda path: "tinystories", {},              r"no source 'tinystories': .*roneneldan/TinyStories"),
    (lambda path: path, {"subset": "sample-10BT"}, r"subset='sample-10BT' belongs to Hugging Face datasets"),
]
# fmt: on


@pytest.mark.parametrize(("damage", "options", "message"), BAD, ids=lambda x: getattr(x, "__name__", None))
def test_bad_sources_say_where_and_what_to_do(tmp_path, damage, options, message):
    with pytest.raises(SourceError, match=message):
        read(source_of(damage(tmp_path), **options))
