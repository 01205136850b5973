"""What a folder has beside text is left out whole, counted and named; what is text is all there."""

import json
import os
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from delta_trn.train.data import preparation, sources
from delta_trn.train.data.dataset import open_dataset
from delta_trn.train.data.entropies import baselines
from delta_trn.train.data.sources import find_source
from delta_trn.train.settings.errors import SourceError, TokenizerError
from delta_trn.train.settings.schema import DataSection
from tests.support.corpus import pack, prepare_text, write_jsonl
from tests.support.planted_bugs import Bug, planted
from tests.support.tiny_run import keys, make_text, train

GOOD = ["one is here", "two is there"]
# more than the pieces that are read at once
LONG = "words of a long file, again and again\n" * 120_000


def source_of(path, **options):
    return find_source(DataSection(source=str(path), **options))


def read(source) -> tuple[list[str], Counter[str]]:
    skipped: Counter[str] = Counter()
    return list(source.documents(skipped)), skipped


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    root.mkdir()
    write_jsonl(root / "good.jsonl", GOOD)
    return root


class TestAFileIsLeftOutWhole:
    @pytest.mark.parametrize("last", [b"\xff", b"\0"], ids=["not UTF-8", "NUL"])
    @pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
    def test_where_its_last_byte_is_no_text(self, folder, last, packed):
        path = folder / "late.txt"
        path.write_bytes(LONG.encode() + last)
        if packed:
            pack(path, "gz")
            path.unlink()
        source = source_of(folder)
        assert read(source) == (GOOD, {sources.NOT_TEXT: 1})
        assert source.names_left_out() == {
            sources.NOT_TEXT: ["late.txt.gz" if packed else "late.txt"]
        }

    def test_where_a_late_row_is_nested_too_deeply(self, folder):
        deep = '{"text": "x", "more": ' + "[" * 200_000 + "]" * 200_000 + "}"
        (folder / "rows.jsonl").write_text('{"text": "none of this"}\n' * 500 + deep + "\n")
        assert read(source_of(folder)) == (GOOD, {"files of JSON that is nested too deeply": 1})
        with pytest.raises(SourceError, match=r"rows\.jsonl is nested too deeply"):
            read(source_of(folder / "rows.jsonl"))


class TestRows:
    @pytest.mark.parametrize(
        "name",
        [
            "ROWS.JSONL",
            "rows.ndjson",
            "Rows.Json",
            "lines.json",
            "rows.CSV",
            "rows.TSV",
            "rows.PARQUET",
            "rows.JSONL.GZ",
            "rows.Csv.gz",
            "rows.csv.GZ",
            "rows.ndjson.zst",
        ],
    )
    def test_are_known_by_their_suffix_in_any_case(self, tmp_path, name):
        path = tmp_path / name
        inner = name.lower().removesuffix(".gz").removesuffix(".zst")
        plain = tmp_path / Path(name).stem if inner != name.lower() else path
        if inner == "rows.json":
            plain.write_text(json.dumps([{"text": text} for text in GOOD]))
        elif inner.endswith(("jsonl", "ndjson", "json")):
            write_jsonl(plain, GOOD)
        elif inner.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"text": GOOD}), plain)
        else:
            end = "\tx" if inner.endswith("tsv") else ",x"
            plain.write_text("".join(f"{text}{end}\n" for text in ["text", *GOOD]))
        if plain != path:
            pack(plain, name.rpartition(".")[2].lower()).rename(path)
        assert read(source_of(path))[0] == GOOD
        (tmp_path / "folder").mkdir()
        path.rename(tmp_path / "folder" / name)
        (tmp_path / "folder" / "z.txt").write_text("last")
        assert read(source_of(tmp_path / "folder")) == ([*GOOD, "last"], {})

    def test_may_follow_a_byte_order_mark(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text("\ufeff" + json.dumps({"text": "one"}) + "\n")
        assert read(source_of(path))[0] == ["one"]

    @pytest.mark.parametrize("name", ["empty.csv", "empty.tsv", "empty.parquet"])
    def test_that_are_none_are_refused_in_words(self, tmp_path, name):
        path = tmp_path / name
        path.touch()
        if name == "empty.parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), path)
        with pytest.raises(SourceError, match=rf"{name} is empty; expected rows with 'text'"):
            read(source_of(path))

    def test_once_taken_for_text_make_another_preparation(self, folder, tmp_path):
        """Shards in which the JSON itself was the text are not taken for those of its rows."""
        was = source_of(folder).settings()
        assert "tables" not in was
        (folder / "good.jsonl").rename(folder / "good.JSONL")
        (folder / "good.JSONL").rename(folder / "rows.json")
        assert source_of(folder).settings()["tables"] == 1


def test_an_archive_is_refused_and_in_a_folder_left_out(folder):
    with zipfile.ZipFile(folder / "two.ZIP", "w") as archive:
        archive.writestr("a.txt", "first member")
        archive.writestr("b.txt", "second member")
    with pytest.raises(SourceError, match=r"two\.ZIP is an archive of files; unpack it"):
        source_of(folder / "two.ZIP")
    assert read(source_of(folder)) == (GOOD, {"archives (.zip)": 1})


@pytest.fixture
def odd(folder):
    """A folder with one of everything that is no text, by the reason why it is left out."""
    write_jsonl(folder / "no-field.jsonl", ["x"], field="body")
    (folder / "no-field.csv").write_text("title,body\na,b\n")
    (folder / "empty.csv").touch()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), folder / "no-field.parquet")
    (folder / "package.json").write_text('{"name": "a package"}')
    (folder / "tsconfig.json").write_text('{\n  // a comment\n  "strict": true\n}\n')
    (folder / "deep.jsonl").write_text("[" * 200_000 + "]" * 200_000 + "\n")
    (folder / "broken").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder)
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF")
    os.mkfifo(folder / "pipe")
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("odd name")
    (folder / "linked.txt").symlink_to(folder.parent / "elsewhere.txt")
    (folder.parent / "elsewhere.txt").write_text("a link to a file is the file")
    return folder


REASONS = {
    "tables without 'text'": [
        "empty.csv",
        "no-field.csv",
        "no-field.jsonl",
        "no-field.parquet",
        "package.json",
    ],
    "files that are not JSON, or have comments": ["tsconfig.json"],
    "files of JSON that is nested too deeply": ["deep.jsonl"],
    "links that lead nowhere": ["broken"],
    "links to folders": ["loop"],
    "pipes, sockets and devices": ["pipe"],
    "files whose names are not UTF-8": ["caf\ufffd.txt"],
    sources.NOT_TEXT: ["photo.jpg"],
}


def check_odd(odd):
    source = source_of(odd)
    assert read(source) == (
        [*GOOD, "a link to a file is the file"],
        {reason: len(names) for reason, names in REASONS.items()},
    )
    assert source.names_left_out() == REASONS


def test_what_is_odd_in_a_folder_is_counted_and_named(odd):
    check_odd(odd)


def test_the_command_names_what_it_left_out(odd, tmp_path):
    words = ["data", "prepare", odd, f"data.folder={tmp_path / 'out'}", "data.tokenizer=bytes"]
    said = train(*words)
    for reason, names in REASONS.items():
        assert f"left out: {len(names)} {reason} ({names[0]!r}" in said
    again = train("data", "info", tmp_path / "out")
    assert "left out: 1 pipes, sockets and devices ('pipe')" in again


def test_a_folder_in_which_nothing_is_left_is_refused(odd, tmp_path):
    for name in ("good.jsonl", "linked.txt"):
        (odd / name).unlink()
    with pytest.raises(
        SourceError, match=r"no document for .*1 pipes, sockets and devices \('pipe'"
    ):
        prepare_text(odd, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipe", "is no file and no folder, but a pipe"),
        ("no-field.jsonl", "row 1 has no text in field 'text'"),
        ("no-field.csv", "which data.text_field names"),
        ("package.json", "row 1 has no text in field 'text'"),
        ("tsconfig.json", r"tsconfig\.json:\d is not JSON"),
        ("deep.jsonl", "nested too deeply"),
        ("broken", "no source"),
        ("photo.jpg", "expected text in UTF-8"),
    ],
)
def test_a_file_that_is_named_itself_is_refused(odd, name, message):
    with pytest.raises(SourceError, match=message):
        read(source_of(odd / name))


class TestIdentity:
    @pytest.fixture
    def large(self, tmp_path):
        path = tmp_path / "large.txt"
        path.write_bytes(b"a" * (sources.REMEMBERED + 7))
        os.utime(path, ns=(10**18, 10**18))
        return path

    @pytest.fixture(autouse=True)
    def settled(self, monkeypatch):
        """Every file was changed long ago."""
        monkeypatch.setattr(sources, "SETTLED", -(2**62))

    @pytest.fixture
    def reads(self, monkeypatch):
        """Counts how many files are read."""
        opened, original = [], open
        monkeypatch.setattr(
            sources, "open", lambda *x: opened.append(x) or original(*x), raising=False
        )
        return opened

    def test_is_the_whole_content(self, large):
        before = source_of(large).settings()
        content = bytearray(large.read_bytes())
        content[-1] += 1
        large.write_bytes(content)
        assert source_of(large).settings() != before

    def test_is_computed_once_for_a_large_file(self, large, reads):
        known = {}
        before = source_of(large).settings(known)
        assert len(reads) == 1 and len(known) == 1
        assert source_of(large).settings(known) == before and len(reads) == 1

    @pytest.mark.parametrize("what", ["size", "time", "inode"])
    def test_is_computed_again_where_one_of_them_changes(self, large, reads, what):
        known = {}
        before = source_of(large).settings(known)
        if what == "inode":
            other = large.with_suffix(".new")
            other.write_bytes(b"b" * large.stat().st_size)
            other.replace(large)
        else:
            large.write_bytes(b"b" * (large.stat().st_size + (what == "size")))
        if what != "time":
            os.utime(large, ns=(10**18, 10**18))
        assert source_of(large).settings(known) != before and len(reads) == 2

    def test_is_not_kept_of_a_file_that_changes_just_now(self, large, monkeypatch):
        monkeypatch.setattr(sources, "SETTLED", 10**10)
        large.touch()
        known = {}
        source_of(large).settings(known)
        assert known == {}

    def test_is_kept_beside_the_shards(self, large, reads, tmp_path, monkeypatch):
        large.write_text(make_text() * (2 + sources.REMEMBERED // len(make_text())))
        out = prepare_text(large, tmp_path / "out")
        before = len(reads)
        assert prepare_text(large, out) == out and len(reads) == before
        (out / "sources.json").write_text("damaged")
        assert prepare_text(large, out) == out and len(reads) == before + 1

    def test_holds_every_key_that_changes_what_is_prepared(self, tmp_path, monkeypatch):
        """Each key of `data` is changed: the settings differ, unless a list here says why not."""
        path = write_jsonl(tmp_path / "rows.jsonl", GOOD)
        others = {
            "source": "its content and name are there",
            "folder": "where, not what",
            "subset": "of a dataset", "split": "of a dataset", "revision": "of a dataset",
            "loader": "of training", "boundaries": "of training",
        }  # fmt: skip
        changes = {
            "tokenizer": "gpt2", "vocab_size": 512, "text_field": "body", "validation": str(path),
            "val_fraction": 0.5, "shard_tokens": 99, "max_documents": 3, "max_tokens": 5, "seed": 1,
        }  # fmt: skip
        assert others.keys() | changes.keys() == DataSection.model_fields.keys()
        settings = []
        monkeypatch.setattr(
            preparation, "is_complete", lambda folder, x: settings.append(x) or True
        )
        plain = {"source": str(path), "tokenizer": "bytes"}
        for change in ({}, *({key: value} for key, value in changes.items())):
            preparation.prepare(DataSection(**{**plain, **change}), show=False)
        assert [x for x in settings[1:] if x == settings[0]] == []
        assert all(settings.count(x) == 1 for x in settings)

    def test_of_a_dataset_holds_its_keys_too(self):
        def settings(**keys):
            return source_of("somebody/stories", **keys).settings()

        keys = {"subset": "a", "split": "b", "text_field": "c", "revision": "d"}
        assert all(settings(**{key: value}) != settings() for key, value in keys.items())


# -- tokenizers that lose text ---------------------------------------------------------------------


def word_tokenizer(folder: Path, unknown: str | None) -> Path:
    folder.mkdir()
    words = {word: i for i, word in enumerate([unknown or "a", "+", "-", "=", "0", "1"])}
    options = {} if unknown is None else {"unk_token": unknown}
    tokenizer = Tokenizer(models.WordLevel(words, **({"unk_token": "[UNK]"} | options)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def lossy(tmp_path):
    source = tmp_path / "sums.txt"
    source.write_text(make_text())
    tokenizer = word_tokenizer(tmp_path / "words", "[UNK]")
    return prepare_text(source, tmp_path / "lossy", tokenizer=str(tokenizer), val_fraction=0.1)


def test_a_tokenizer_that_loses_text_is_told_and_no_bits_per_byte_are(lossy, tmp_path):
    dataset = open_dataset(lossy)
    documents = dataset.split("val").documents
    told = f"{documents} of {documents} held-out documents do not come back"
    assert told in (dataset.loss_of_text or "")
    assert {x.bits_per_byte for x in baselines(dataset).values()} == {None}
    assert told in " ".join(train("data", "info", lossy).split())
    run = tmp_path / "run"
    said = train("run", "tiny", *keys(lossy, run, model__vocab_size=64))
    assert told in " ".join(said.split())
    assert "bits/byte 0" not in said and not any(
        "bits/byte" in line for line in said.splitlines() if "val loss" in line
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {x["bits_per_byte"] for x in lines if x["split"] == "val"} == {None}
    assert json.loads((run / "summary.json").read_text())["bits_per_byte"] is None
    train("plot", run)
    train("export", run, "--to", tmp_path / "export")
    assert "bits per byte" not in (tmp_path / "export" / "README.md").read_text()


def test_kept_bits_per_byte_of_lost_text_are_not_taken_over(lossy):
    dataset = open_dataset(lossy)
    path = lossy / "baselines.json"
    baselines(dataset)
    content = json.loads(path.read_text())
    for cost in content["baselines"].values():
        cost["bits_per_byte"] = 1.2
    path.write_text(json.dumps(content))
    assert {x.bits_per_byte for x in baselines(dataset).values()} == {None}


def test_a_tokenizer_without_a_token_for_the_unknown_is_refused_in_words(tmp_path):
    source = tmp_path / "sums.txt"
    source.write_text(make_text())
    tokenizer = word_tokenizer(tmp_path / "words", None)
    with pytest.raises(TokenizerError, match=r"cannot tokenize the text .*data\.tokenizer=bytebpe"):
        prepare_text(source, tmp_path / "out", tokenizer=str(tokenizer))


# -- planted bugs ----------------------------------------------------------------------------------

FILES = "train.data.sources:FileSource"
BUGS = {
    "read before it is looked at": Bug("", f"{FILES}._why_left_out", "check_text(path)", "pass", ""),
    "only capital suffixes differ": Bug("", "train.data.readers:kind_of", ").lower()", ")", ""),
    "one stamp is forgotten": Bug(
        "", "train.data.sources:_content_hash", "kept[:-1] == stamp", "kept[0] == stamp[0]", ""
    ),
    "the beginning is hashed": Bug(
        "", "train.data.sources:_content_hash", "while block := file.read(2**20)",
        "for block in [file.read(2**20)]", "",
    ),
    "lost text is paid for": Bug(
        "", "train.data.dataset:TokenDataset.bits_per_byte",
        "if not self.meta.tokenizer.lossless", "if False", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_seen(name, folder, tmp_path, lossy, monkeypatch):
    identity, large = TestIdentity(), tmp_path / "large.txt"
    large.write_bytes(b"a" * (sources.REMEMBERED + 7))
    opened, original = [], open
    monkeypatch.setattr(sources, "open", lambda *x: opened.append(x) or original(*x), raising=False)
    monkeypatch.setattr(sources, "SETTLED", -(2**62))
    checks = {
        "read before": lambda: TestAFileIsLeftOutWhole().test_where_its_last_byte_is_no_text(
            folder, b"\0", False
        ),
        "only capital": lambda: TestRows().test_are_known_by_their_suffix_in_any_case(
            tmp_path, "ROWS.JSONL"
        ),
        "one stamp": lambda: identity.test_is_computed_again_where_one_of_them_changes(
            large, opened, "inode"
        ),
        "the beginning": lambda: identity.test_is_the_whole_content(large),
        "lost text": lambda: test_kept_bits_per_byte_of_lost_text_are_not_taken_over(lossy),
    }
    (check,) = (check for begin, check in checks.items() if name.startswith(begin))
    with planted(BUGS[name]), pytest.raises((AssertionError, SourceError)):
        check()
