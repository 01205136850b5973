"""A mixture has each source's share of the tokens, in an order that the seed alone decides."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from delta_trn.train.data import open_dataset
from delta_trn.train.data.entropies import documents
from delta_trn.train.data.mixture import mix
from delta_trn.train.settings.errors import DataError, SettingsDiffer
from tests.support.corpus import prepare_text, write_jsonl
from tests.support.tiny_run import killed_before


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> dict[str, Path]:
    """Three prepared folders; the first letter of a document is its source's."""
    root = tmp_path_factory.mktemp("parts")

    def prepared(name: str, count: int, length: int) -> Path:
        lines = (f"{name}{i:04d} " + "x" * (i * 7 % length) for i in range(count))
        return prepare_text(write_jsonl(root / f"{name}.jsonl", lines), root / name, shard_tokens=3000)

    return {"a": prepared("a", 300, 60), "b": prepared("b", 200, 20), "c": prepared("c", 60, 200)}


def texts(folder: Path, split="train") -> list[str]:
    dataset = open_dataset(folder)
    return [dataset.tokenizer.decode(ids) for ids in documents(dataset, split)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_shuffled_folder_has_every_document_once_in_another_order(parts, tmp_path):
    source = texts(parts["a"])
    out = mix([(parts["a"], 1)], tmp_path / "out", show=False)
    shuffled = texts(out)
    assert sorted(shuffled) == sorted(source) and texts(out, "val") == texts(parts["a"], "val")
    # a random order keeps 1 of n documents in place, on average, and moves one by n / 3
    places = {text: place for place, text in enumerate(source)}
    moved = [abs(places[text] - place) for place, text in enumerate(shuffled)]
    assert moved.count(0) < 8 and abs(sum(moved) / len(moved) - len(source) / 3) < len(source) / 15
    meta, before = open_dataset(out).meta.splits, open_dataset(parts["a"]).meta.splits
    for split in ("train", "val"):
        assert (meta[split].tokens, meta[split].bytes) == (before[split].tokens, before[split].bytes)
    open_dataset(out).check_tokens()
    assert texts(mix([(parts["a"], 1)], tmp_path / "seed", seed=1, show=False)) != shuffled


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"exhausted": "repeat", "max_tokens": 60_000}])
def test_each_source_has_its_share_of_the_tokens(parts, tmp_path, options):
    weights = {"a": 5, "b": 2, "c": 3}
    out = mix([(parts[name], w) for name, w in weights.items()], tmp_path / "out", show=False, **options)
    mixed = texts(out)
    lengths = [2 + len(text) for text in mixed]
    for name, weight in weights.items():
        mine = [length * (text[0] == name) for text, length in zip(mixed, lengths, strict=True)]
        # a sum of independent draws, whose deviation is that of one times the root of their number
        deviation = np.std(mine) * len(mine) ** 0.5
        assert abs(sum(mine) - sum(lengths) * weight / 10) < 4 * deviation
    if "max_tokens" in options:
        assert 60_000 <= sum(lengths) < 60_000 + max(lengths)
        again = [text for text in mixed if text[0] == "c"]
        first = again[: len(set(again))]
        assert len(set(first)) == len(first) < len(again), "every document comes before one comes again"
    else:
        assert len(mixed) == len(set(mixed)), "no document comes twice"
    in_order = [text for text in mixed if text[0] == "a"]
    assert (in_order == sorted(in_order)) == (options.get("shuffle") is False)
    assert {text[0] for text in texts(out, "val")} == {"a", "b", "c"}


def test_a_mixture_killed_at_any_moment_leaves_nothing_that_counts(parts, tmp_path):
    options = {"max_tokens": 1500, "shard_tokens": 500, "show": False}

    def run(folder):
        return mix([(parts["b"], 2), (parts["c"], 3)], folder, **options)

    expected, calls = files(run(tmp_path / "whole")), 1
    while killed_before(calls, partial(run, out := tmp_path / str(calls))):
        assert not (out / "meta.json").exists() or files(out) == expected
        assert files(run(out)) == expected, f"killed before call {calls}"
        calls += 3
    assert calls > 20 and files(out) == expected


def test_mixing_again_does_nothing_and_other_settings_are_refused(parts, tmp_path):
    out = mix([(parts["a"], 1)], tmp_path / "out", show=False)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    mix([(parts["a"], 4)], out, show=False)
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.bin")} == before
    with pytest.raises(SettingsDiffer, match="shuffle: 0 there, 3 asked for"):
        mix([(parts["a"], 1)], out, seed=3, show=False)


@pytest.mark.parametrize(
    ("names", "weight", "options", "message"),
    [
        ("", 1, {}, "there is nothing to mix"),
        ("a", 0, {}, r"weight 0\.0: expected a number above 0"),
        ("ab", float("nan"), {}, "weight nan: expected a number above 0"),
        ("ab", 1, {"exhausted": "repeat"}, "exhausted=repeat has no end without max_tokens"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused_before_any_work(
    parts, tmp_path, names, weight, options, message
):
    with pytest.raises(DataError, match=message):
        mix([(parts[name], weight) for name in names], tmp_path / "out", show=False, **options)
    assert not (tmp_path / "out").exists()


def test_folders_of_two_tokenizers_are_not_mixed(parts, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", (f"x{i}" for i in range(50)))
    other = prepare_text(source, tmp_path / "other", tokenizer="bytebpe", vocab_size=300)
    with pytest.raises(DataError, match=r"has another tokenizer than .*prepare it with data.tokenizer="):
        mix([(parts["a"], 1), (other, 1)], tmp_path / "out", show=False)
    again = prepare_text(source, tmp_path / "again", tokenizer=str(other), vocab_size=300)
    assert open_dataset(mix([(other, 1), (again, 1)], tmp_path / "out", show=False)).meta.vocab_size == 300
    with pytest.raises(DataError, match="is one of the sources"):
        mix([(other, 1)], other, show=False)
