"""README and docs show what runs: commands and examples are executed,
tables are what the code prints.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from delta_trn.__main__ import main
from delta_trn.backends import dispatch
from delta_trn.backends.bench import figures
from tests.support.families import FAMILIES
from tests.support.warm import run_python

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
]
# `python -m X` is the console script's command Y
MODULES = {
    "train": [],
    "backends": ["backends"],
    "backends.parity": ["parity"],
    "backends.bench": ["bench"],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: where it starts, its language, its lines,
    and the file that it is to be.
    """

    page: Path
    line: int
    language: str
    text: str
    file: str | None = None

    @property
    def needs(self) -> str | None:
        """What the block's first line says that it needs; None if it runs anywhere."""
        first = self.text.splitlines()[0] if self.text else ""
        return first.removeprefix("# needs:").strip() if first.startswith("# needs:") else None

    def commands(self) -> Iterator[list[str]]:
        """The words of each command, comments and line continuations resolved."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def blocks(page: Path, text: str) -> list[Block]:
    fence = re.compile(r"^```(\w*)(?: file=(\S+))?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(page, text[: m.start()].count("\n") + 1, m[1], m[3].strip(), m[2])
        for m in fence.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page, page.read_text())]


def our_words(words: list[str]) -> list[str] | None:
    """The arguments of delta-trn that a command stands for; None if it is no command of ours."""
    if words[0] == "delta-trn":
        return words[1:]
    if words[0] == "nki-simulator":  # to which delta-trn hands over
        return ["simulator", *words[1:]]
    if words[0] == "torchrun":
        return our_words(["python", *words[words.index("-m") :]])
    if words[:2] == ["python", "-m"] and words[2] in MODULES:
        return [*MODULES[words[2]], *words[3:]]
    return None


def run(words: list[str]) -> tuple[int, str]:
    """Exit status and output of delta-trn with these arguments."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = main(words)
        except SystemExit as stop:  # argparse's --help and usage errors
            status = int(stop.code or 0)
    return status, output.getvalue()


def run_elsewhere(words: list[str], folder: Path, installed: Path) -> tuple[int, str]:
    """Exit status and output of the console script in a process of its own, as a shell starts it.

    It knows nothing of what a page's Python has imported, and does not search the folder that it
    runs in.

    installed   where a page's package is, if the page makes one
    """
    script = "import sys; sys.path[:1] = []; from delta_trn.__main__ import main; sys.exit(main())"
    paths = [str(installed), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = run_python(["-c", script, *words], cwd=folder, env=environment)
    return done.returncode, done.stdout + done.stderr


def install(folder: Path, installed: Path) -> None:
    """Puts where packages lie what `pip install` would put there of a page's pyproject.toml."""
    text = (folder / "pyproject.toml").read_text()
    (name,) = re.findall(r'^name = "(.*)"', text, re.MULTILINE)
    (modules,) = re.findall(r"^py-modules = \[(.*)\]", text, re.MULTILINE)
    about = installed / f"{name}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    groups = re.findall(r'^\[project\.entry-points\."(.*)"\]\n((?:.+\n)+)', text, re.MULTILINE)
    lines = [f"[{group}]\n{points}".replace('"', "") for group, points in groups]
    (about / "entry_points.txt").write_text("\n".join(lines))
    for module in re.findall(r'"(\w+)"', modules):
        shutil.copy(folder / f"{module}.py", installed)


@pytest.fixture
def backends_as_before():
    """Removes the backends and operations that a page adds."""
    backends, operations = dict(dispatch.BACKENDS), list(dispatch.OPERATIONS)
    yield
    dispatch.BACKENDS.clear()
    dispatch.BACKENDS.update(backends)
    dispatch.OPERATIONS[:] = operations


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_and_example_of_a_page_runs(
    page, tmp_path, monkeypatch, backends_as_before, capsys
):
    """In the order of the page, in one folder; each command in a process of its own.
    The next test has the blocks that need more than a CPU.
    """
    installed = tmp_path / "site-packages of the page"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        if block.page != page or block.needs is not None:
            continue
        where = f"{page.name}:{block.line}"
        if block.file:
            path = tmp_path / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text + "\n")
            if path.name == "pyproject.toml":
                install(tmp_path, installed)
        elif block.language == "python":
            exec(compile(block.text, where, "exec"), names)
            assert "<|bos|>" not in capsys.readouterr().out, f"{where}: a mark is printed as text"
        elif block.language == "sh":
            for words in block.commands():
                ours = our_words(words)
                assert ours is not None, f"{where}: {words} cannot run here; say what it needs"
                status, output = run_elsewhere(ours, tmp_path, installed)
                assert status == 0, f"{where}: {shlex.join(words)}\n{output}"


def test_a_command_knows_nothing_of_what_was_registered_here(tmp_path, backends_as_before):
    """So that a page whose command needs what its Python did is red."""
    dispatch.register(dispatch.Backend("here-alone", {}))
    words = ["parity", "--backend", "here-alone"]
    assert "no backend is named 'here-alone'" not in run(words)[1]
    status, output = run_elsewhere(words, tmp_path, tmp_path / "none")
    assert status == 2 and "no backend is named 'here-alone'" in output


def test_an_operation_is_added_by_touching_six_files(tmp_path):
    """As docs/extending.md does it: in a copy of the repository, where parity then judges it."""
    for folder in ("delta_trn", "backends"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    for folder in ("models", "nki_kernels", "triton_kernels", "train"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    page = [block for block in BLOCKS if block.page.name == "extending.md"]
    for block in page:
        if block.file and block.file.startswith("leaky/"):
            path = tmp_path / "backends" / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                block.text.replace("from leaky", "from delta_trn.backends.leaky") + "\n"
            )
    (diff,) = (block.text for block in page if block.language == "diff")
    for part in re.split(r"^---", diff, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines()
        path = tmp_path / name.strip() if name else path
        old, new = ("\n".join(x[1:] for x in lines if x[:1] != other) for other in "+-")
        text = path.read_text()
        assert text.count(old) == 1, (
            f"docs/extending.md changes what {path.name} does not have once: {old}"
        )
        path.write_text(text.replace(old, new))
    before, after = (
        {(path.relative_to(top), path.read_text()) for path in (top / "backends").rglob("*.py")}
        for top in (ROOT, tmp_path)
    )
    assert len(after - before) + 1 == 6  # with its test
    judge = [
        sys.executable,
        *shlex.split("-m delta_trn.backends.parity --op leaky_sum --backend chunked"),
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(judge, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "leaky_rows" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_need_more_are_well_formed(page):
    """Their command and recipe exist and their keys are keys:
    `--keys` resolves a run without starting it.
    """
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in BLOCKS:
        if block.page != page or block.language != "sh" or not block.needs:
            continue
        for words in block.commands():
            ours = our_words(words)
            if words[0] == "make":
                assert words[1] in targets, (
                    f"{page.name}:{block.line}: make has no target {words[1]}"
                )
            elif words[0] == "python" and words[1].startswith("results/"):
                # what it imports is there
                runpy.run_path(str(ROOT / words[1]), run_name="not main")
            elif ours and ours[0] == "run":
                recipe = [word for word in ours if word != "--or-resume"]
                status, output = run([*recipe, "--keys"])
                assert status == 0, f"{page.name}:{block.line}: {shlex.join(words)}\n{output}"
            elif ours:
                assert run([ours[0], "--help"])[0] == 0, (
                    f"{page.name}:{block.line}: no command {ours[0]}"
                )


def test_a_block_that_says_what_it_needs_is_told_from_one_that_does_not():
    text = (
        "```sh\n# needs: a GPU\nmake measure\n```\n\n```sh\ndelta-trn run \\\n  tiny  # "
        "quick\n```\n"
    )
    first, second = blocks(Path("page.md"), text)
    assert first.needs == "a GPU" and second.needs is None and second.line == 6
    assert list(second.commands()) == [["delta-trn", "run", "tiny"]]
    assert our_words(shlex.split("torchrun --nproc_per_node=2 -m train run tiny")) == [
        "run",
        "tiny",
    ]
    assert our_words(["git", "clone"]) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [
        target
        for target in targets
        if "://" not in target and not (page.parent / target.replace("\\", "")).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_section_stands_twice_on_a_page(page):
    headings = re.findall(
        r"^##? .+$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    assert headings and len(headings) == len(set(headings))


def test_the_table_of_families_names_tests_that_are_there():
    rows = re.findall(
        r"^\| (\w+) \|(.*)\|$", (ROOT / "docs" / "transformers.md").read_text(), re.MULTILINE
    )
    cells = {family: row.split("|") for family, row in rows if family in FAMILIES}
    assert cells.keys() == FAMILIES.keys()
    files = [*(ROOT / "tests" / "models" / "ecosystem").glob("test_*.py")]
    known = {"-", *(file.stem for file in files)}
    known |= {
        name
        for file in files
        for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)
    }
    assert {cell.strip() for row in cells.values() for cell in row} <= known


def test_the_readme_says_how_to_reach_the_command_before_it_calls_it():
    ours = [
        block.text
        for block in BLOCKS
        if block.page.name == "README.md" and "delta-trn " in block.text
    ]
    lines = ours[0].splitlines()
    assert lines.index(". .venv/bin/activate") < next(
        i for i, x in enumerate(lines) if x.startswith("delta-trn ")
    )


COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b")


def test_no_page_names_a_commit():
    """Who installed the package has none, and a shallow clone has one."""
    assert COMMIT.search("as 368d5cbf had it") and not COMMIT.search("magic 20240520, effaced")
    named = {
        f"{page.name}: {found}" for page in PAGES for found in COMMIT.findall(page.read_text())
    }
    assert not named


def test_the_speeds_are_those_of_the_files():
    page = (ROOT / "docs" / "operation.md").read_text()
    rows = figures.read()
    assert figures.markdown(rows) in page
    faster = [row | {"ratio": row["ratio"] and {"p50": 2 * row["ratio"]["p50"]}} for row in rows]
    assert figures.markdown(faster) not in page


def test_the_speed_that_the_readme_promises_is_reached_in_every_run():
    page = " ".join((ROOT / "README.md").read_text().split())  # wherever its lines end
    (promised,) = re.findall(r"forward and backward take at least (\d+) times less time", page)
    reached = [
        ratio
        for case in figures.CASES
        for ratio in figures.ratios(figures.read(), "chunked", case, "forward+backward")
    ]
    assert len(reached) >= 3 and min(reached) >= int(promised)
