"""The shape of the tree: imports point one way, never in a circle; kernels are leaves."""

import ast
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Which of our packages a package may import.
MAY_IMPORT = {
    "nki_kernels": set(),
    "triton_kernels": set(),
    "backends": {"nki_kernels", "triton_kernels"},
    "models": {"backends"},
    "train": {"models", "backends"},
}

# The only files that may import these packages of others.
ONLY_IN = {
    "torch_xla": ("backends/machine.py", "backends/nki_runtime_adapter.py"),
    "torch_neuronx": ("backends/machine.py", "backends/nki_runtime_adapter.py"),
    "nki": ("nki_kernels/language.py",),
    "neuronxcc": ("nki_kernels/language.py",),
    "nki_simulator": ("nki_kernels/language.py", "backends/nki_runtime_adapter.py"),
    "triton": ("triton_kernels/",),
}

# Leaves judge the product or measure it, and nothing in it needs them. Other leaves may import a
# leaf, and so may the files that stand here.
LEAVES = {
    "backends.parity": ("train/commands/warmup.py", "backends/__main__.py"),
    "backends.bench": ("train/commands/throughput.py", "train/commands/warmup.py"),
    "train.studies": ("train/commands/",),
}

# Kernels get arrays and know nothing of who calls them.
NOT_IN_KERNELS = {"torch", "transformers", "pydantic"}

LEAF_FOLDERS = tuple(leaf.replace(".", "/") + "/" for leaf in LEAVES)
WORKSHOP = ("tools", "tests")  # they may import everything

TOP_LEVEL = {
    *("README.md", "CHANGELOG.md", "pyproject.toml", "setup.py", "Makefile", "LICENSE"),
    *(
        "delta_trn",
        "backends",
        "nki_kernels",
        "triton_kernels",
        "models",
        "train",
        "packages",
        "tests",
        "results",
        "docs",
        "tools",
    ),
}

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "triton", "nki"}
FOLDER_FILES = 16  # beside __init__.py


def tracked(pattern: str) -> list[Path]:
    """Returns the files that git tracks and that match `pattern`; files of the tree, where there is
    no git.

    A file that lies in the checkout untracked is the user's own, whatever it is.
    """
    done = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    return [path for path in ROOT.rglob(pattern) if ".venv" not in path.parts]


SOURCES = tracked("*.py")
OURS = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in MAY_IMPORT]
CHECKED = (*MAY_IMPORT, "delta_trn", "tools")


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every absolute import, wherever it stands, import_module("...") included.

    `from package import name` gives `package.name`; the caller finds out whether that is a module.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name("import_module") | ast.Attribute(attr="import_module"),
                args=[first, *_],
            ):
                if isinstance(first, ast.Constant):
                    yield node.lineno, str(first.value)


def within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def complaints(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path`, relative to the root."""
    package, wrong = path.parts[0], set()
    for line, module in imports(source):
        if module.split(".")[0] in MAY_IMPORT:
            wrong.add(f"{path}:{line} imports {module}: say delta_trn.{module}")
        module = module.removeprefix("delta_trn.")
        where, top = f"{path}:{line} imports {module}", module.split(".")[0]
        if (
            package in MAY_IMPORT
            and top in MAY_IMPORT
            and top != package
            and top not in MAY_IMPORT[package]
        ):
            wrong.add(
                f"{where}: {package} may import "
                f"{sorted(MAY_IMPORT[package]) or 'none of our packages'}"
            )
        if top == "tests" and package != "tests":
            wrong.add(f"{where}: tests are for tests")
        if top == "tools" and package not in WORKSHOP:
            wrong.add(f"{where}: tools are for tools and tests")
        if package in ("nki_kernels", "triton_kernels") and any(
            within(module, x) for x in NOT_IN_KERNELS
        ):
            wrong.add(f"{where}: kernel packages are leaves")
        allowed = ONLY_IN.get(top)
        if (
            package not in WORKSHOP
            and allowed
            and not any(path.as_posix().startswith(place) for place in allowed)
        ):
            wrong.add(f"{where}: {top} is imported only in {', '.join(allowed)}")
        adapter = path.name.endswith("_adapter.py")
        if package == "backends" and top in ("nki_kernels", "triton_kernels") and not adapter:
            wrong.add(f"{where}: only adapters cross into a kernel package")
        leaf = next((leaf for leaf in LEAVES if within(module, leaf)), None)
        if (
            leaf
            and package not in WORKSHOP
            and not path.as_posix().startswith((*LEAF_FOLDERS, *LEAVES[leaf]))
        ):
            wrong.add(
                f"{where}: {leaf} is a leaf; besides leaves, {LEAVES[leaf] or 'nothing'} may "
                "import it"
            )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level and package in MAY_IMPORT:
            wrong.add(f"{path}:{node.lineno}: a relative import; imports are absolute")
    return sorted(wrong)


@pytest.mark.parametrize("package", CHECKED)
def test_imports_point_one_way(package):
    files = [
        path.relative_to(ROOT) for path in SOURCES if path.relative_to(ROOT).parts[0] == package
    ]
    assert files
    wrong = [line for path in files for line in complaints(path, (ROOT / path).read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("models/layers.py", "import delta_trn.train.recipes", "models may import"),
        ("models/layers.py", "import backends.dispatch", "say delta_trn.backends.dispatch"),
        ("models/layers.py", "from .mup import Tag", "imports are absolute"),
        (
            "backends/a.py",
            "def f():\n    from delta_trn.models import DeltaConfig",
            "backends may import",
        ),
        (
            "triton_kernels/a.py",
            "from delta_trn.backends.dispatch import Call",
            "none of our packages",
        ),
        ("nki_kernels/a.py", "import torch.nn", "kernel packages are leaves"),
        (
            "train/a.py",
            "from importlib import import_module\nimport_module('torch_xla')",
            "torch_xla is",
        ),
        ("nki_kernels/a.py", "from nki import language", "nki is imported only in"),
        ("backends/checks.py", "from delta_trn.triton_kernels import tiles", "only adapters cross"),
        ("train/run/loop.py", "from tests.conftest import poison", "tests are for tests"),
        (
            "models/layers.py",
            "def f():\n    from delta_trn.backends.parity import rule",
            "parity is a leaf",
        ),
        ("delta_trn/__init__.py", "import tools.schedule", "tools are for tools and tests"),
    ],
)
def test_a_wrong_import_is_found(path, source, complaint):
    wrong = complaints(Path(path), source)
    assert len(wrong) == 1 and complaint in wrong[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("backends/layers/triton_adapter.py", "from delta_trn.triton_kernels import tiles"),
        ("triton_kernels/tiles.py", "import triton.language as tl"),
        ("train/studies/throughput.py", "from delta_trn.backends.parity.rule import verdicts"),
        (
            "tools/first_hour_trn1.py",
            "from delta_trn.backends.parity import rule\nfrom tools import estimate",
        ),
    ],
)
def test_a_right_import_is_not_refused(path, source):
    assert complaints(Path(path), source) == []


def module_of(path: Path) -> str:
    """The import path of a file: models/mup.py is delta_trn.models.mup."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("delta_trn", *parts)).removesuffix(".__init__")


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def arrows_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which modules each module imports: in functions and under TYPE_CHECKING, too."""
    arrows: dict[str, set[str]] = {}
    for name, source in sources.items():
        targets = (
            next((m for m in (module, module.rpartition(".")[0]) if m in sources), None)
            for _, module in imports(source)
        )
        arrows[name] = {target for target in targets if target and target != name}
    return arrows


def test_no_imports_form_a_circle():
    found = circle(arrows_of({module_of(path): path.read_text() for path in OURS}))
    assert not found, f"modules that import each other in a circle: {', '.join(found)}"


def test_a_circle_through_an_annotation_is_found():
    sources = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from b import B",
        "b": "def f():\n    import c",
        "c": "from a import A",
        "d": "import a",
    }
    assert set(circle(arrows_of(sources))) == {"a", "b", "c"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_our_package_is_the_one_that_is_imported(package):
    """Other projects distribute packages of the same names: triton_kernels is one."""
    assert Path(import_module(f"delta_trn.{package}").__path__[0]).resolve() == ROOT / package


def test_folders_stay_small():
    files = Counter(
        str(path.relative_to(ROOT).parent)
        for path in tracked("*")
        if path.suffix in (".py", ".sh", ".md")
        and "results" not in path.parts
        and path.parent != ROOT / "docs"  # pages, which README's table groups
        and path.name != "__init__.py"
    )
    large = {folder: count for folder, count in files.items() if count > FOLDER_FILES}
    assert not large, f"over {FOLDER_FILES} files, group them: {large}"


def test_modules_are_named_for_what_they_hold():
    names = [path.relative_to(ROOT) for path in SOURCES]
    # tests/shims stands in for other people's packages, under their names
    bad = [
        str(name)
        for name in names
        if name.stem in FORBIDDEN_NAMES and name.parts[:2] != ("tests", "shims")
    ]
    assert not bad


def test_nothing_lies_at_the_top_that_was_not_decided():
    top = {path.relative_to(ROOT).parts[0] for path in tracked("*")}
    unasked = {name for name in top if not name.startswith(".")} - TOP_LEVEL
    assert not unasked


def test_a_folder_that_lies_untracked_at_the_top_is_nobodys_concern():
    with tempfile.TemporaryDirectory(dir=ROOT, prefix="untracked_") as folder:
        (Path(folder) / "utils.py").write_text("import backends\n")
        test_nothing_lies_at_the_top_that_was_not_decided()
        assert not any(Path(folder).name in path.parts for path in tracked("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_is_reached_by_a_relative_link(package):
    """So every tool, a type checker too, finds `delta_trn.models` without running anything."""
    link = ROOT / "delta_trn" / package
    assert link.is_symlink() and link.readlink() == Path("..") / package
    assert not [path for path in OURS if not (path.parent / "__init__.py").exists()]


def documented(path: Path) -> Iterator[tuple[str, str]]:
    """Place and text of every docstring of a file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = getattr(node, "name", "")
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}".rstrip(), text


def test_docstrings_are_whole_sentences():
    """No formatter has split one at a quotation mark, and none is a single letter or word."""
    broken = []
    for path in SOURCES:
        for place, text in documented(path):
            lines = text.splitlines()
            if any(
                line.strip() == '"' or line.startswith('"\n') or line.endswith(' "')
                for line in lines
            ):
                broken.append(f"{place}: a stray quotation mark")
            if len(text.split()) == 1:
                broken.append(f"{place}: {text!r} is no sentence")
    assert not broken, "\n".join(broken)


def test_public_functions_say_what_they_do():
    """Every public name of `backends` has a docstring, and no public function takes **kwargs."""
    bare = []
    for path in SOURCES:
        relative = path.relative_to(ROOT)
        if relative.parts[0] != "backends":
            continue
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            bare.append(f"{relative} has no docstring")
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            )
            if public and node.name != "main" and not ast.get_docstring(node):
                bare.append(f"{relative}:{node.lineno} {node.name} has no docstring")
            if public and isinstance(node, ast.FunctionDef) and node.args.kwarg:
                bare.append(f"{relative}:{node.lineno} {node.name} takes **{node.args.kwarg.arg}")
    assert not bare, "\n".join(bare)
