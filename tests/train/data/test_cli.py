"""delta-trn data: what it prints, and what it exits with."""

import doctest
import importlib

import pytest

from delta_trn.train.__main__ import main
from delta_trn.train.commands import data as cli
from delta_trn.train.data import preparation
from tests.support.corpus import write_jsonl

EXAMPLES = ("train.data.tokenizer", "train.watch.display")
BODY = ("data.text_field=body",)


def data(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


@pytest.fixture
def source(tmp_path):
    return write_jsonl(
        tmp_path / "corpus.jsonl", (f"text {i} of a small corpus" for i in range(100)), "body"
    )


def test_data_prepare_and_info_print_what_was_prepared(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert data("prepare", source, f"data.folder={out}", *BODY, "data.vocab_size=300") == 0
    output = capsys.readouterr()
    assert "bytebpe, 300 rows, uint16" in output.out and f"{out} is ready after" in output.out
    assert "tokenizer bytebpe\ntokenizing" in output.err
    assert data("info", out, "--check") == 0
    output = capsys.readouterr().out
    assert "every shard has the hash" in output and "bytebpe, 300 rows, uint16" in output


def test_a_mistyped_source_is_an_error_of_one_line_and_leaves_no_folder_behind(
    source, tmp_path, capsys
):
    (tmp_path / "mine").mkdir()
    for name, was_there in (("out", False), ("mine", True)):
        words = (f"data.folder={tmp_path / name}", "data.text_field=bodi", "--quiet")
        assert data("prepare", source, *words) == 2
        output = capsys.readouterr()
        assert output.err.startswith("error: ") and "has no text in field 'bodi'" in output.err
        assert output.err.count("\n") == 1 and output.out == ""
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
        (("--val-fraction", 0.1), "keys have no dashes: data.val_fraction=0.1"),
        (
            ("data.vocabulary=300",),
            "unknown key 'data.vocabulary'; the nearest known: data.vocab_size",
        ),
        (
            ("optimizer.lr=3",),
            "optimizer.lr changes nothing in `data prepare`, whose keys are data.folder",
        ),
        (("data.val_fraction=0.0",), "data.val_fraction=0.0: expected more than 0"),
        (
            (f"data.shard_tokens={2**31}",),
            "data.shard_tokens=2147483648: expected at most 2147483647",
        ),
    ],
)
def test_data_prepare_refuses_wrong_options_keys_and_numbers(source, capsys, words, expected):
    assert data("prepare", source, *words) == 2
    assert expected in capsys.readouterr().err


def test_preparation_prints_lines_of_progress_without_a_terminal(
    source, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("delta_trn.train.watch.display.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(preparation, "BATCH_DOCUMENTS", 10)
    assert (
        data("prepare", source, f"data.folder={tmp_path / 'out'}", *BODY, "data.tokenizer=bytes")
        == 0
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith(" left")]
    assert len(lines) > 3 and "tokens, " in lines[0] and "/s" in lines[0]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_of_data_run(module):
    results = doctest.testmod(importlib.import_module(f"delta_trn.{module}"))
    assert results.attempted and not results.failed
