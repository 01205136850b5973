"""python -m train data: what it prints, and what it exits with."""

import json

import pytest

from delta_trn.train.commands import data as cli
from delta_trn.train.commands.data import main
from delta_trn.train.data import open_dataset, preparation


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"body": f"document {i} of a small corpus"}) + "\n" for i in range(100))
    )
    return str(path)


def test_prepare_and_info(source, tmp_path, capsys):
    out = tmp_path / "out"
    command = [
        "prepare",
        source,
        "--out",
        str(out),
        "--text-field",
        "body",
        "--vocab-size",
        "300",
        "--val-fraction",
        "0.1",
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "bytebpe, 300 rows, uint16" in said.out and f"{out} is ready after" in said.out
    assert "tokenizer bytebpe\ntokenizing" in said.err
    assert main(["info", str(out), "--check", "--baselines", "--sample", "50"]) == 0
    said = capsys.readouterr().out
    assert "every shard has the hash" in said
    assert all(name in said for name in ("uniform", "unigram", "zlib", "lzma", "lzma_primed"))
    assert "of a small corpus" in said


def test_info_as_json_is_meta(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(
            ["prepare", source, "--out", str(out), "--text-field", "body", "--tokenizer", "bytes", "--quiet"]
        )
        == 0
    )
    assert capsys.readouterr().err == ""
    assert main(["info", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 320


def test_the_standard_library_is_a_source(tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(["prepare", "python-stdlib", "--out", str(out), "--max-documents", "40", "--vocab-size", "512"])
        == 0
    )
    dataset = open_dataset(out)
    assert dataset.meta.name == "python-stdlib" and dataset.split("train").tokens > 50_000
    assert "import" in dataset.tokenizer.decode(dataset.shards("val")[0][:2000])


def test_errors_are_one_line_and_exit_with_failure(tmp_path, capsys):
    assert main(["info", str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and "is not a folder; make it with" in said.err
    assert said.err.count("\n") == 1 and said.out == ""


def test_a_source_mistyped_leaves_no_folder_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *names, **options: 1 / 0)
    assert main(["prepare", "no/such-thing", "--out", str(tmp_path / "out")]) == 2
    assert "cannot reach dataset 'no/such-thing'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    # a folder that was there before stays
    (tmp_path / "mine").mkdir()
    assert main(["prepare", "no/such-thing", "--out", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine").exists()


def test_an_interruption_says_how_to_continue(source, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "prepare", interrupted)
    assert main(["prepare", source]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_unknown_options_are_refused(source, capsys):
    with pytest.raises(SystemExit) as error:
        main(["prepare", source, "--vocabulary", "300"])
    assert error.value.code == 2
    assert "unrecognized arguments: --vocabulary 300" in capsys.readouterr().err


def test_progress_is_a_line_now_and_then_without_a_terminal(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("delta_trn.train.data.reporting.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(preparation, "BATCH_DOCUMENTS", 10)
    assert (
        main(
            [
                "prepare",
                source,
                "--out",
                str(tmp_path / "out"),
                "--text-field",
                "body",
                "--tokenizer",
                "bytes",
            ]
        )
        == 0
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if "s left" in line]
    assert len(lines) > 3 and "tokens, " in lines[0] and "/s" in lines[0]
    shares = [int(line.split("%")[0]) for line in lines]
    assert shares == sorted(shares) and shares[-1] == 100
