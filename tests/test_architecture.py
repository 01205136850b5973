"""The shape of the tree: imports point one way, kernels are leaves, files are short, the top is decided."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "nki_kernels": set(),
    "triton_kernels": set(),
    "backends": {"nki_kernels", "triton_kernels"},
    "models": {"backends"},
    "train": {"models", "backends"},
}

# who may import a package of others; everywhere else it is refused
ONLY_IN = {
    "torch_xla": ("backends/device.py", "backends/nki_adapter.py"),
    "torch_neuronx": ("backends/device.py", "backends/nki_adapter.py", "backends/neuron_adapter.py"),
    "nki": ("nki_kernels/language.py",),
    "neuronxcc": ("nki_kernels/language.py",),
    "triton": ("triton_kernels/",),
}

# kernels get arrays and know nothing of who calls them
NOT_IN_KERNELS = {"torch", "transformers", "pydantic"}

TOP_LEVEL = {
    "README.md",
    "pyproject.toml",
    "Makefile",
    "LICENSE",
    "backends",
    "nki_kernels",
    "triton_kernels",
    "models",
    "train",
    "tests",
    "results",
}

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "triton", "nki"}
LINES = 500


def tracked(pattern: str) -> list[Path]:
    """Files of the checkout that match; of the tree, where there is no git."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).exists()]
    return [path for path in ROOT.rglob(pattern) if ".venv" not in path.parts]


SOURCES = tracked("*.py")


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every absolute import, wherever it stands, import_module("...") included."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Call(
                func=ast.Name("import_module") | ast.Attribute(attr="import_module"), args=[first, *_]
            ):
                if isinstance(first, ast.Constant):
                    yield node.lineno, str(first.value)


def within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def complaints(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path`, relative to the root."""
    package, found = path.parts[0], []
    for line, module in imports(source):
        where, top = f"{path}:{line} imports {module}", module.split(".")[0]
        if package in MAY_IMPORT and top in MAY_IMPORT and top != package and top not in MAY_IMPORT[package]:
            found.append(
                f"{where}: {package} may import {sorted(MAY_IMPORT[package]) or 'none of our packages'}"
            )
        if top == "tests" and package != "tests":
            found.append(f"{where}: tests are for tests")
        if package in ("nki_kernels", "triton_kernels") and any(within(module, x) for x in NOT_IN_KERNELS):
            found.append(f"{where}: kernel packages are leaves")
        allowed = ONLY_IN.get(top)
        if package != "tests" and allowed and not any(path.as_posix().startswith(place) for place in allowed):
            found.append(f"{where}: {top} is imported only in {', '.join(allowed)}")
        adapter = path.name.endswith("_adapter.py")
        if package == "backends" and top in ("nki_kernels", "triton_kernels") and not adapter:
            found.append(f"{where}: only adapters cross into a kernel package")
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package):
    files = [path.relative_to(ROOT) for path in SOURCES if path.relative_to(ROOT).parts[0] == package]
    assert files
    found = [line for path in files for line in complaints(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("models/layers.py", "import train.config", "models may import"),
        ("backends/ops.py", "def f():\n    from models import DeltaConfig", "backends may import"),
        ("triton_kernels/tiles.py", "from backends.registry import Options", "none of our packages"),
        ("triton_kernels/tiles.py", "import torch", "kernel packages are leaves"),
        ("nki_kernels/tiles.py", "import torch.nn", "kernel packages are leaves"),
        ("backends/ops.py", "import torch_xla.core.xla_model as xm", "torch_xla is imported only in"),
        (
            "train/loop.py",
            "from importlib import import_module\nimport_module('torch_xla')",
            "torch_xla is imported",
        ),
        ("nki_kernels/tiles.py", "from nki import language", "nki is imported only in"),
        ("backends/triton_adapter.py", "import triton", "triton is imported only in"),
        ("backends/ops.py", "from triton_kernels import tiles", "only adapters cross"),
        ("train/loop.py", "from tests.conftest import poison", "tests are for tests"),
    ],
)
def test_a_wrong_import_is_found(path, source, complaint):
    found = complaints(Path(path), source)
    assert len(found) == 1 and complaint in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "backends/triton_adapter.py",
            "from triton_kernels import tiles\nfrom backends.registry import Options",
        ),
        ("triton_kernels/tiles.py", "import triton.language as tl\nfrom triton_kernels import launch"),
        ("nki_kernels/language.py", "import nki"),
        (
            "train/loop.py",
            "import torch\nfrom models import DeltaConfig\nfrom backends import gated_delta_rule",
        ),
    ],
)
def test_a_right_import_is_not(path, source):
    assert complaints(Path(path), source) == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_our_package_is_the_one_that_is_imported(package):
    """triton_kernels is also the name of a package that the Triton project distributes."""
    assert Path(import_module(package).__path__[0]).resolve() == ROOT / package


def test_importing_backends_imports_no_kernels():
    code = (
        "import sys, backends, models\n"
        "loaded = sorted(x for x in ('nki_kernels', 'triton_kernels', 'torch_xla') if x in sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_files_stay_short():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > LINES
    }
    assert not long, f"over {LINES} lines, split them: {long}"


def test_modules_are_named_for_what_they_hold():
    names = [path.relative_to(ROOT) for path in SOURCES]
    # tests/shims stands in for other people's packages, under their names
    bad = [
        str(name) for name in names if name.stem in FORBIDDEN_NAMES and name.parts[:2] != ("tests", "shims")
    ]
    assert not bad


def test_nothing_lies_at_the_top_that_was_not_decided():
    top = {path.relative_to(ROOT).parts[0] for path in tracked("*")}
    unasked = {name for name in top if not name.startswith(".")} - TOP_LEVEL
    assert not unasked


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
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and node.name != "main" and not ast.get_docstring(node):
                bare.append(f"{relative}:{node.lineno} {node.name} has no docstring")
            if public and isinstance(node, ast.FunctionDef) and node.args.kwarg:
                bare.append(f"{relative}:{node.lineno} {node.name} takes **{node.args.kwarg.arg}")
    assert not bare, "\n".join(bare)
