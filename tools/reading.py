"""Prints functions and sentences of this project for someone who has not seen it to read.

    python -m tools.reading SEED [--functions 20] [--sentences 60]

The seed chooses. Functions come from six rooms in turn: Triton kernels, NKI kernels, C++, models,
training, and tests. Sentences come from docstrings, comments of several words, and the pages of
docs/. A reader marks what was understood at the first reading.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from delta_trn.backends.machine import ROOT

ROOMS = {
    "Triton": "triton_kernels/**/*.py",
    "NKI": "nki_kernels/**/*.py",
    "C++": "backends/**/*.cpp",
    "models": "models/**/*.py",
    "train": "train/**/*.py",
    "tests": "tests/**/*.py",
}
SOURCES = ("backends", "models", "nki_kernels", "packages", "train", "triton_kernels", "tools")
LEAST_LINES = 6  # shorter functions show little
LEAST_WORDS = 6
# a definition at the start of a line, up to the brace that closes it there
CPP = re.compile(
    r"^(?!namespace|struct|#)[\w:<>,*& ]+ \**(\w+)\([^;{}]*\)[^;{}]*\{.*?^\}", re.M | re.S
)
SENTENCE = re.compile(r"(?<=[.:!?])\s+(?=[A-Z`])")


def functions_of(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yields name, line and text of every function of a file."""
    text = path.read_text()
    if path.suffix == ".cpp":
        for found in CPP.finditer(text):
            yield found[1], text.count("\n", 0, found.start()) + 1, found[0]
        return
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            yield node.name, first, "\n".join(lines[first - 1 : node.end_lineno])


def choose_functions(seed: int, count: int) -> list[tuple[str, str]]:
    """Returns (place, text) of so many functions, from the rooms in turn."""
    chance = random.Random(seed)
    rooms = []
    for room, pattern in ROOMS.items():
        found = [
            (f"{room}: {path.relative_to(ROOT)}:{line} {name}", text)
            for path in sorted(ROOT.glob(pattern))
            for name, line, text in functions_of(path)
            if text.count("\n") + 1 >= LEAST_LINES
        ]
        chance.shuffle(found)
        rooms.append(iter(found))
    picked = (next(room, None) for room in cycle(rooms))
    return list(islice((function for function in picked if function), count))


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring and each block of comments, or of each paragraph of a
    page.
    """
    text = path.read_text()
    if path.suffix == ".md":
        without_code = re.sub(r"```.*?```", lambda x: "\n" * x[0].count("\n"), text, flags=re.S)
        for found in re.finditer(r"(?:^[^|#\n<!].*\n?)+", without_code, re.M):
            yield without_code.count("\n", 0, found.start()) + 1, found[0]
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                # tables and equations are indented
                if paragraph and not paragraph.startswith((" ", ">>>")):
                    yield getattr(node, "lineno", 1), paragraph
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            start = start if block else token.start[0]
            block.append(token.string.lstrip("# "))
        elif block and token.type != tokenize.NL:
            yield start, " ".join(block)
            block = []


def sentences_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and text of a file's sentences."""
    for line, text in texts_of(path):
        for sentence in SENTENCE.split(" ".join(text.split())):
            if len(sentence.split()) >= LEAST_WORDS:
                yield line, sentence


def choose_sentences(seed: int, count: int) -> list[tuple[str, str]]:
    """Returns (place, sentence) of so many sentences."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        (f"{path.relative_to(ROOT)}:{line}", sentence)
        for path in (*pages, *files)
        for line, sentence in sentences_of(path)
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="print functions and sentences for a reader who has not seen them"
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("--functions", type=int, default=20, metavar="N")
    parser.add_argument("--sentences", type=int, default=60, metavar="N")
    given = parser.parse_args(arguments)
    for place, text in choose_functions(given.seed, given.functions):
        print(f"==== {place}\n{text}\n")
    for n, (place, sentence) in enumerate(choose_sentences(given.seed, given.sentences), 1):
        print(f"{n:3}  {place}\n     {sentence}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
