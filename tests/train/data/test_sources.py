"""Text comes out of every kind of source as it went in, in one order; reading continues where it stopped."""

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from delta_trn.train.data import open_dataset, preparation, readers
from delta_trn.train.data.entropies import documents
from delta_trn.train.data.hub import HubReader, HubSource
from delta_trn.train.data.sources import SECTION, FileSource, find_source
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import DataSection
from tests.support.corpus import PACKERS, pack, prepare_text, write_jsonl

TEXTS = ["plain", "two\nlines\r\nand a carriage return", "ünïcödé – 漢字 🙂", "", "tab\there", "last"]


def source_of(path, **options):
    return find_source(DataSection(source=str(path), **options))


def write_parquet(path: Path, texts, row_group_size=4):
    table = pyarrow.table({"text": list(texts), "n": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.fixture
def folder(tmp_path):
    """Three kinds of files, a nested one, and four that are to be left alone."""
    root = tmp_path / "corpus"
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
    reader = source_of(folder).reader()
    assert list(reader) == ["first file", *TEXTS, *TEXTS, "nested"]
    assert reader.skipped == {"files that are not text": 2, "files that are not UTF-8": 1}
    assert reader.fraction() == 1.0


def test_jsonl_null_is_empty_text_and_half_a_surrogate_pair_is_replaced(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": null}\n\n{"text": "a\\ud800b"}\n')
    assert list(source_of(path).reader()) == ["", "a\ufffdb"]


def test_endoftext_separates_the_documents_of_a_text_file(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\nthree")
    assert list(source_of(path).reader()) == ["one", "two\nlines", "three"]


def test_a_single_text_file_is_cut_at_blank_lines_without_loss(tmp_path):
    text = "".join(f"paragraph {i} " + "word " * (i % 40) + "\n" + "\n" * (i % 3) for i in range(2000))
    path = tmp_path / "book.txt"
    path.write_text(text)
    pieces = list(source_of(path).reader())
    assert "".join(pieces) == text
    assert len(pieces) > 10
    assert all(SECTION <= len(piece) < 2 * SECTION + 300 for piece in pieces[:-1])
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


def test_text_without_blank_lines_is_cut_after_twice_the_section(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("x" * 99 + "\n" + ("y" * 99 + "\n") * 2000)
    pieces = list(source_of(path).reader())
    assert {len(piece) for piece in pieces[:-1]} == {2 * SECTION + 32}  # the next multiple of 100


@pytest.mark.parametrize("line", ["word " * 40_000 + "\n", "x" * 200_000, "漢字" * 100_000])
def test_a_text_of_one_line_is_cut_into_documents_without_loss(tmp_path, line):
    path = tmp_path / "line.txt"
    path.write_text(line, encoding="utf-8")
    pieces = list(source_of(path).reader())
    assert "".join(pieces) == line
    pieces = [piece for piece in pieces if piece.strip()]
    assert len(pieces) > 4
    assert all(2 * SECTION <= len(piece) < 2 * SECTION + 1024 for piece in pieces[:-1])
    assert all(piece.startswith(" ") for piece in pieces[1:]) or " " not in line, "cut where tokens begin"
    prepare_text(path, tmp_path / "out")
    # where nothing has to be held out of it, it stays one document
    assert list(source_of(path, validation="python-stdlib").reader()) == [line]


@pytest.mark.parametrize("before", ["", "a title\n", "x<|endoftext|>"])
def test_of_a_long_line_only_a_part_is_in_memory(tmp_path, monkeypatch, before):
    monkeypatch.setattr(readers, "LONG_LINE", 100_000)
    line = "".join(f"word{i} " for i in range(100_000))
    path = tmp_path / "line.txt"
    path.write_text(f"{before}{line}\nthe last line")
    reader = source_of(path).reader()
    first = list(islice(reader, 2))
    assert reader.fraction() < 0.2 and max(map(len, first)) < 5 * SECTION
    pieces = [*first, *reader]
    text = f"{before}{line}the last line".replace("<|endoftext|>", "")
    assert "".join(pieces).replace("\n", "") == text.replace("\n", "")
    assert max(map(len, pieces)) < 5 * SECTION


def test_a_separator_in_a_long_line_is_never_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONG_LINE", 1000)
    for margin in range(40):
        path = tmp_path / "line.txt"
        path.write_text("x" * (600 + margin) + "<|endoftext|>" + "y" * 3000)
        pieces = [text for text, _, _ in readers.read_text(path, 100)]
        assert "".join(pieces) == "x" * (600 + margin) + "y" * 3000
        assert not any("x" in piece and "y" in piece for piece in pieces)


def test_a_packed_file_of_a_folder_is_read_under_its_name(folder):
    whole = list(source_of(folder).reader())
    for name, kind in (("a.txt", "gz"), ("b.jsonl", "zst"), ("sub/d.md", "xz")):
        pack(folder / name, kind)
        (folder / name).unlink()
    reader = source_of(folder).reader()
    assert list(reader) == whole
    assert reader.skipped == {"files that are not text": 2, "files that are not UTF-8": 1}
    assert reader.fraction() == 1.0


def test_a_packed_binary_file_of_a_folder_is_left_out(folder):
    pack(folder / "zero.bin", "gz")
    assert source_of(folder).skipped == {"files that are not text": 3}


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
        list(source_of(packed).reader())
    packed.write_bytes(b"no such format, and long enough to be seen as none" * 10)
    with pytest.raises(SourceError, match=rf"{name}\.{kind} cannot be unpacked as \.{kind} \("):
        list(source_of(packed).reader())


def test_reading_continues_after_any_document(folder):
    pack(folder / "b.jsonl", "gz")
    source = source_of(folder)
    whole = list(source.reader())
    for stop in range(len(whole) + 1):
        reader = source.reader()
        before = list(islice(reader, stop))
        position = json.loads(json.dumps(reader.position()))
        rest = source.reader(position)
        assert before + list(rest) == whole
        assert rest.skipped == {"files that are not text": 2, "files that are not UTF-8": 1}


ENDS = ("<|endoftext|>", "<|endoftext|>\n", " <|endoftext|> <|endoftext|>x\n", "\r\n", "\r", "\n\n", "\n", "")


@pytest.mark.parametrize("must_divide", [True, False])
def test_reading_continues_in_any_text_whatever_ends_its_documents(tmp_path, monkeypatch, must_divide):
    """Lines that are cut, separators within and at the end, blank lines, carriage returns, no last line."""
    monkeypatch.setattr(readers, "LONG_LINE", 60)
    draw, path, marks = random.Random(0), tmp_path / "any.txt", 0
    source = FileSource("any", tmp_path, (path.name,), section=40, must_divide=must_divide)
    for count in range(30):
        parts = [draw.choice("aé漢 ") * draw.choice((0, 1, 7, 30, 200)) for _ in range(count)]
        path.write_bytes("".join(part + draw.choice(ENDS) for part in parts).encode())
        whole = list(source.reader())
        for stop in range(len(whole) + 1):
            reader = source.reader()
            before = list(islice(reader, stop))
            marks += any(reader.position()["mark"])
            assert before + list(source.reader(reader.position())) == whole, path.read_bytes()
    assert marks > 50


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("lines.txt", "stories.txt", "rows.jsonl") for kind in ("plain", "gz", "zst")]
    + [("rows.parquet", "plain")],
)
def test_what_stands_before_a_position_is_not_parsed_again(tmp_path, name, kind):
    """Nothing that could be parsed stands there when reading goes on."""
    path, texts = tmp_path / name, [f"document {i} " + "word " * 20 for i in range(600)]
    if name == "rows.parquet":
        write_parquet(path, texts, row_group_size=50)
    elif name == "rows.jsonl":
        write_jsonl(path, texts)
    else:
        path.write_text(("\n" if name == "lines.txt" else "\n<|endoftext|>\n").join(texts))

    def source():
        file = path if kind == "plain" else pack(path, kind)
        return FileSource("text", tmp_path, (file.name,), section=4 * len(texts[0]))

    whole, reader = list(source().reader()), source().reader()
    before = list(islice(reader, len(whole) * 2 // 3))
    content = path.read_bytes()
    damaged = len(content) // 3
    path.write_bytes(b"PAR1" + b"\xff" * (damaged - 4) + content[damaged:])
    assert before + list(source().reader(reader.position())) == whole
    with pytest.raises((SourceError, OSError)):  # pyarrow's OSError, if it has to decode what is damaged
        list(source().reader())


def test_source_settings_depend_on_the_text_and_not_on_its_place(folder, tmp_path):
    import shutil

    before = source_of(folder).settings()
    elsewhere = tmp_path / "elsewhere" / "corpus"
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
    """A dataset folder as the Hub has it, read by the library's own code for local ones: 3 files, 30 rows."""
    root = tmp_path / "somebody" / "stories"
    root.mkdir(parents=True)
    for i in range(3):
        write_parquet(root / f"train-{i}.parquet", [f"story {i} {j}" for j in range(10)])
    write_parquet(root / "validation-0.parquet", ["held out 1", "held out 2"])
    monkeypatch.chdir(tmp_path)
    asked = []

    def dataset_info(self, name, revision=None):
        asked.append((name, revision))
        return SimpleNamespace(sha="0123abcd")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    return SimpleNamespace(
        name="somebody/stories", asked=asked, rows=[f"story {i} {j}" for i in range(3) for j in range(10)]
    )


def test_a_hub_dataset_is_streamed_split_by_split(hub):
    assert list(HubSource(hub.name).reader()) == hub.rows
    assert list(HubSource(hub.name, split="validation").reader()) == ["held out 1", "held out 2"]
    assert hub.asked == [(hub.name, None)] * 2


def test_of_a_hub_dataset_in_parquet_only_the_text_is_read(hub, monkeypatch):
    """Otherwise rows would have `n`, too. A column that is not there is named beside those that are."""
    dataset = HubSource(hub.name).open(None)
    assert [dataset.column_names, *dataset.take(2)] == [["text"], *({"text": row} for row in hub.rows[:2])]
    with pytest.raises(SourceError, match=r"has no field 'body'; it has \['n', 'text'\]"):
        next(iter(HubSource(hub.name, text_field="body").reader()))


@pytest.mark.parametrize("stop", [0, 1, 9, 10, 17, 30])
def test_a_hub_reader_continues_in_the_commit_it_began_in(hub, stop):
    source = HubSource(hub.name)
    reader = source.reader()
    before = list(islice(reader, stop))
    position = json.loads(json.dumps(reader.position()))
    reader.close()
    assert position["revision"] == "0123abcd"
    rest = HubSource(hub.name).reader(position)
    assert before + list(rest) == hub.rows
    assert len(hub.asked) == 1  # continuing does not ask what the branch means today


def test_a_name_with_a_slash_is_a_dataset_unless_it_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = source_of("HuggingFaceFW/fineweb-edu", subset="sample-10BT")
    assert found == HubSource("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert found.name == "fineweb-edu-sample-10bt"
    (tmp_path / "HuggingFaceFW" / "fineweb-edu").mkdir(parents=True)
    (tmp_path / "HuggingFaceFW" / "fineweb-edu" / "a.txt").write_text("local")
    assert isinstance(source_of("HuggingFaceFW/fineweb-edu"), FileSource)


def test_an_unreachable_hub_says_what_to_pass_instead(tmp_path):
    command = [sys.executable, "-m", "delta_trn.train", "data", "prepare", "roneneldan/TinyStories"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)},
        timeout=200,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "cannot reach dataset 'roneneldan/TinyStories'" in done.stderr
    assert "(HF_HUB_OFFLINE is set)" in done.stderr and "pass the local folder, .parquet" in done.stderr


def test_an_unknown_split_of_a_dataset_names_the_known_ones(hub):
    with pytest.raises(SourceError, match=r"no subset None with split 'test'.*train"):
        HubSource(hub.name, split="test").reader()


def test_an_unknown_dataset_differs_from_an_unreachable_hub(monkeypatch):
    import httpx
    from huggingface_hub.errors import RepositoryNotFoundError

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))

    def missing(self, name, revision=None):
        raise RepositoryNotFoundError("404", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", missing)
    with pytest.raises(SourceError, match="the Hub has no dataset 'some/body'"):
        HubSource("some/body").reader()


def test_a_connection_error_of_the_library_means_an_unreachable_hub(hub, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("name or service not known")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(SourceError, match=r"cannot reach dataset .*\(ConnectionError\)"):
        HubSource(hub.name).reader()


@pytest.fixture
def elsewhere(hub, tmp_path, monkeypatch):
    """The same dataset by its name, where no such path exists."""
    load = datasets.load_dataset
    root = str(tmp_path / hub.name)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *rest, **options: load(root, *rest, **options))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return hub


def test_validation_may_be_a_split_of_the_same_dataset(elsewhere):
    out = prepare_text(elsewhere.name, None, validation="validation")
    dataset = open_dataset(out)
    assert out.name.startswith("stories-bytes-")
    assert [dataset.tokenizer.decode(ids) for ids in documents(dataset, "val")] == [
        "held out 1",
        "held out 2",
    ]
    assert [dataset.tokenizer.decode(ids) for ids in documents(dataset, "train")] == elsewhere.rows
    # complete: the Hub is not asked again
    asked = len(elsewhere.asked)
    assert prepare_text(elsewhere.name, None, validation="validation") == out
    assert len(elsewhere.asked) == asked


@pytest.mark.parametrize("rows", [6, 10, 23])
def test_a_preparation_continues_after_its_network_went_away(elsewhere, tmp_path, monkeypatch, rows):
    monkeypatch.setattr(preparation, "BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(preparation, "COMMIT_SECONDS", 0.0)
    options = {"val_fraction": 0.2}  # held-out text is chosen from 5 rows
    whole, out = prepare_text(elsewhere.name, tmp_path / "whole", **options), tmp_path / "out"
    original = HubReader._next

    def failing(self):
        if self._rows == rows:
            self._iterator = (1 / 0 for _ in range(1))
        return original(self)

    with monkeypatch.context() as patched:
        patched.setattr(HubReader, "_next", failing)
        with pytest.raises(SourceError, match=rf"stopped after row {rows} \(ZeroDivisionError.*it continues"):
            prepare_text(elsewhere.name, out, **options)
    progress = json.loads((out / "progress.json").read_bytes())
    assert progress["documents"] == rows // 4 * 4
    assert prepare_text(elsewhere.name, out, **options) == out
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


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
    (_not_text,      {},                          r"x\.jsonl:1: field 'text' is list, expected text"),
    (_a_list,        {},                          r"x\.jsonl:1 has no field 'text'; it has list"),
    (_no_column,     {"text_field": "body"},      r"y\.parquet has no column 'body'; it has \['text', 'n'\]"),
    (_no_csv_column, {},                          r"x\.csv has no column 'text'; it has \['title', 'body'\]"),
    (_open_quote,    {},                          r"x\.csv:2 is not a line of a table .* rename the file"),
    (_not_utf8_csv,  {},                          r"x\.csv:\d is not a line of a table in UTF-8"),
    (_tar,           {},                          r"x\.tar\.gz cannot be read as it is; unpack it"),
    (_not_parquet,   {},                          r"x\.parquet is not a readable parquet file"),
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
        list(source_of(damage(tmp_path), **options).reader())
