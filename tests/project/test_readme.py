"""What the README shows is what commands print."""

from pathlib import Path

from delta_trn.backends.bench import figures as bench_figures
from delta_trn.models.mup import markdown_table

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_mup_table_is_the_one_that_the_optimizers_read():
    assert markdown_table() in README


def test_the_speeds_are_those_of_the_files():
    rows = bench_figures.read()
    assert bench_figures.markdown(rows) in README
    faster = [row | {"ratio": row["ratio"] and {"p50": 2 * row["ratio"]["p50"]}} for row in rows]
    assert bench_figures.markdown(faster) not in README


def test_no_placeholder_is_left():
    assert "@@" not in README


def test_the_files_it_names_are_there():
    root = Path(__file__).parents[2]
    named = [
        line.split()[0] for line in README.splitlines() if line.startswith(("backends/", "models/", "train/"))
    ]
    assert len(named) >= 5
    assert [name for name in named if not (root / name).exists()] == []
