"""delta-trn data: what it prints, and what it exits with."""

import doctest
import importlib
import json

import pytest

from delta_trn.train.__main__ import main
from delta_trn.train.commands import data as cli
from delta_trn.train.data import encoding, open_dataset
from tests.support.corpus import write_jsonl

EXAMPLES = ("train.data", "train.data.tokenizer", "train.watch.display")
BODY = ("data.text_field=body",)


def data(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", (f"text {i} of a small corpus" for i in range(100)), "body")


def test_data_prepare_and_info_print_what_was_prepared(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        data("prepare", source, f"data.folder={out}", *BODY, "data.vocab_size=300", "data.val_fraction=0.1")
        == 0
    )
    output = capsys.readouterr()
    assert "bytebpe, 300 rows, uint16" in output.out and f"{out} is ready after" in output.out
    assert "tokenizer bytebpe\ntokenizing" in output.err
    assert data("info", out, "--check", "--baselines", "--sample", 50) == 0
    output = capsys.readouterr().out
    assert "every shard has the hash" in output
    assert all(name in output for name in ("uniform", "unigram", "zlib", "lzma", "lzma_primed"))
    assert "of a small corpus" in output


def test_data_info_json_prints_meta_json_and_quiet_prints_nothing(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert data("prepare", source, f"data.folder={out}", *BODY, "data.tokenizer=bytes", "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert data("info", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 320


def test_data_prepare_takes_the_standard_library(tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        data("prepare", "python-stdlib", f"data.folder={out}", "data.max_documents=40", "data.vocab_size=512")
        == 0
    )
    dataset = open_dataset(out)
    assert dataset.meta.name == "python-stdlib" and dataset.split("train").tokens > 50_000
    assert "import" in dataset.tokenizer.decode(dataset.shards("val")[0][:2000])


def test_a_data_error_is_one_line_and_exits_with_2(tmp_path, capsys):
    assert data("info", tmp_path / "nothing") == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and "is not a folder; make it with" in output.err
    assert output.err.count("\n") == 1 and output.out == ""


def test_a_mistyped_source_leaves_no_folder_behind(source, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    for name, was_there in (("out", False), ("mine", True)):
        words = (f"data.folder={tmp_path / name}", "data.text_field=bodi")
        assert data("prepare", source, *words) == 2
        assert "has no field 'bodi'" in capsys.readouterr().err
        assert (tmp_path / name).exists() == was_there


def test_an_interrupted_preparation_says_that_nothing_is_left(source, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "prepare", interrupted)
    assert data("prepare", source) == 130
    assert "the same command begins anew" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--vocabulary", 300), "has no option --vocabulary; keys have no dashes: vocabulary=300"),
        (("--out", "x"), "keys have no dashes: data.folder=x"),
        (("--seed=3",), "keys have no dashes: data.seed=3"),
        (("--val-fraction", 0.1), "keys have no dashes: data.val_fraction=0.1"),
        (("data.vocabulary=300",), "unknown key 'data.vocabulary'; the nearest known: data.vocab_size"),
        (("optimizer.lr=3",), "optimizer.lr changes nothing in `data prepare`, whose keys are data.folder"),
    ],
)
def test_data_prepare_refuses_other_options_and_keys_with_the_right_spelling(source, capsys, words, expected):
    assert data("prepare", source, *words) == 2
    assert expected in capsys.readouterr().err


def test_preparation_prints_lines_of_progress_without_a_terminal(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("delta_trn.train.watch.display.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(encoding, "BATCH_DOCUMENTS", 10)
    assert data("prepare", source, f"data.folder={tmp_path / 'out'}", *BODY, "data.tokenizer=bytes") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith(" left")]
    assert len(lines) > 3 and "tokens, " in lines[0] and "/s" in lines[0]
    assert lines[-1].endswith("0:00 left")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.val_fraction", "0.0", r"data.val_fraction=0.0: expected more than 0"),
        ("data.val_fraction", "5", r"data.val_fraction=5: expected less than 1"),
        ("data.shard_tokens", 2**31, r"data.shard_tokens=2147483648: expected at most 2147483647"),
        ("data.max_documents", "0", r"data.max_documents=0: expected at least 1"),
        ("data.max_tokens", "many", r"data.max_tokens=many: expected a whole number"),
    ],
)
def test_data_prepare_refuses_numbers_out_of_range(source, capsys, key, value, message):
    assert data("prepare", source, f"{key}={value}") == 2
    assert message in capsys.readouterr().err


def test_data_mix_takes_keys_of_the_configuration_between_the_folders(source, tmp_path, capsys):
    prepared, out = tmp_path / "a", tmp_path / "mixed"
    assert data("prepare", source, f"data.folder={prepared}", "data.tokenizer=bytes", *BODY) == 0
    words = [f"{prepared}=0.5", "data.seed=3", f"data.folder={out}", "data.max_tokens=2000", "--quiet"]
    assert data("mix", *words) == 0
    settings = json.loads((out / "meta.json").read_text())["settings"]
    assert (settings["shuffle"], settings["max_tokens"], settings["shard_tokens"]) == (3, 2000, 100_000_000)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("mix", "a=1"), "data mix needs the folder to write: data.folder=DIR"),
        (("mix", "a=1", "--out", "x"), "keys have no dashes: data.folder=x"),
        (("mix", "a=1", "data.folder=x", "--seed=3"), "keys have no dashes: data.seed=3"),
        (("mix", "a=1", "data.folder=x", "steps=3"), "steps changes nothing in `data mix`, whose keys are"),
        (("mix", "a=b", "data.folder=x"), "a=b: expected DIR or DIR=WEIGHT, such as data/a=0.7, or one of"),
        (("mix", "a=1", "data.folder=x", "data.max_tokens=0"), "data.max_tokens=0: expected at least 1"),
    ],
)
def test_data_mix_refuses_what_is_no_key_of_it(capsys, words, expected):
    assert data(*words) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_of_data_run(module):
    results = doctest.testmod(importlib.import_module(f"delta_trn.{module}"))
    assert results.attempted and not results.failed
