"""Writes the models' code beside a checkpoint, for machines that have transformers and not this package.

With `trust_remote_code=True` transformers imports files that lie beside the weights and import each other by
`from .file import name`. So the source files of the models and of PyTorch's backend are found by following
imports, and copied as they are, but for import statements: `delta_trn.backends.layers.pytorch` becomes
`.backends_layers_pytorch`. These are made anew:

    backends                public names, each from the file that defines it
    the table of backends_dispatch      one backend, PyTorch's, on every device; kernels stay in the package
    models_settings         names and defaults, without pydantic: a saved configuration was checked already
    files that use `backends.compiler`      their kernels take no call: remote code compiles nothing
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from transformers import PretrainedConfig

from delta_trn.backends.dispatch import TABLE
from delta_trn.models.settings import CONFIG_NAMES, CompleteSettings

ENTRY, DISPATCH = "delta_trn.models.language_model", "delta_trn.backends.dispatch"
BACKEND = "chunked"
CLASSES = {
    "AutoConfig": "DeltaConfig",
    "AutoModel": "DeltaModel",
    "AutoModelForCausalLM": "DeltaForCausalLM",
    "AutoModelForSequenceClassification": "DeltaForSequenceClassification",
}


def write_remote_code(folder: Path, config: PretrainedConfig) -> None:
    """Writes the code into the folder, and tells `config`, which is saved next, which class is where."""
    for name, text in remote_code().items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    # all from one file: transformers copies a file, with those it imports, into a package of its own
    config.auto_map = {auto: f"{_flat(ENTRY)}.{name}" for auto, name in CLASSES.items()}


def remote_code() -> dict[str, str]:
    """Returns the text of every file by its name without .py.

    >>> files = remote_code()
    >>> "models_gated_deltanet" in files, any("import delta_trn" in text for text in files.values())
    (True, False)
    """
    header = f"# From delta-trn {version('delta-trn')}, {{}}. SPDX-License-Identifier: Apache-2.0\n"
    homes = _public_names()
    files: dict[str, str] = {}
    public: set[str] = set()
    waiting = [ENTRY, *(row.adapter for row in TABLE[BACKEND].values())]
    while waiting:
        module = waiting.pop()
        if _flat(module) in files:
            continue
        source = _source(module)
        if "delta_trn.backends.compiler" in _modules(source):
            files[_flat(module)] = header.format("written by its export") + _no_kernel(source)
            continue
        text, needed, names = _with_relative_imports(source, homes)
        if module == DISPATCH:
            text = _with_one_backend(text)
        files[_flat(module)] = header.format(module) + text
        public |= names
        waiting += [*needed - {"delta_trn.models.settings"}, *(homes[name] for name in names)]
    anew = {
        "backends": _backends({name: homes[name] for name in sorted(public)}),
        "models_settings": _settings(),
    }
    return files | {name: header.format("written by its export") + text for name, text in anew.items()}


def _with_relative_imports(source: str, homes: dict[str, str]) -> tuple[str, set[str], set[str]]:
    """Returns a file's text with its imports of ours made relative.

    Returns also the modules of ours that it needs, and the public names of `backends`.
    """
    lines, needed, public = source.splitlines(), set(), set()
    for statement in reversed(list(_own_imports(ast.parse(source)))):
        module, end = str(statement.module), statement.end_lineno
        new, members = [], {}
        for alias in statement.names:
            target = module
            if module == "delta_trn.backends" and alias.name in homes:
                public.add(alias.name)
            elif _is_module(member := f"{module}.{alias.name}"):
                needed.add(member)
                # the second line is for transformers, which looks for files that are named like this
                new.append(f"from . import {_flat(member)} as {alias.asname or alias.name}")
                new.append(f"from .{_flat(member)} import __name__ as _")
                continue
            else:
                needed.add(module)
            members.setdefault(target, []).append(ast.unparse(alias))
        new += [f"from .{_flat(target)} import {', '.join(names)}" for target, names in members.items()]
        indent = " " * statement.col_offset
        lines[statement.lineno - 1 : end] = [indent + line for line in new]
    return "\n".join(lines) + "\n", needed, public


def _own_imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """Yields the statements that import from this package, in the order of the file."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: node.lineno):
        if node.module and node.module.split(".")[0] == "delta_trn":
            yield node


def _modules(source: str) -> set[str]:
    """Returns the names that a file imports from this package, with those of their modules."""
    statements = _own_imports(ast.parse(source))
    return {f"{statement.module}.{alias.name}" for statement in statements for alias in statement.names}


def _no_kernel(source: str) -> str:
    """Returns a file whose functions say of every call that the kernel does not take it."""
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    functions = [
        f'def {name}(*call):\n    """Returns that this call is computed in PyTorch."""\n    return False\n'
        for name in names
        if name.startswith("takes")
    ]
    return "\n\n".join(
        ['"""The C++ kernels stay in the package: remote code compiles nothing."""\n', *functions]
    )


def _public_names() -> dict[str, str]:
    """Returns for each public name of `backends` the module that defines it."""
    statements = _own_imports(ast.parse(_source("delta_trn.backends")))
    return {
        alias.name: str(statement.module)
        for statement in statements
        for alias in statement.names
        if statement.module != "delta_trn.backends" and alias.asname is None
    }


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a file and not a folder
        return False


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin).read_text(encoding="utf-8")


def _flat(module: str) -> str:
    return module.removeprefix("delta_trn.").replace(".", "_")


def _backends(homes: dict[str, str]) -> str:
    lines = [
        '"""The operations that the models call."""',
        "",
        *(f"from .{_flat(module)} import __name__ as _{_flat(module)}" for module in _adapters()),
    ]
    return "\n".join([*lines, *(f"from .{_flat(home)} import {name}" for name, home in homes.items()), ""])


def _adapters() -> list[str]:
    return sorted({row.adapter for row in TABLE[BACKEND].values()})


def _with_one_backend(text: str) -> str:
    """Returns dispatch's text with a table of one backend, whose adapters lie beside it."""
    (table,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TABLE"
    )
    dtypes = {op: f"{{{', '.join(sorted(map(str, row.dtypes)))}}}" for op, row in TABLE[BACKEND].items()}
    package = '__name__.removesuffix("backends_dispatch")'
    rows = [
        f'        "{op}": Row({package} + "{_flat(row.adapter)}", frozenset({dtypes[op]}), automatic=None),'
        for op, row in TABLE[BACKEND].items()
    ]
    own = ["TABLE: Mapping[str, Mapping[str, Row]] = {", f'    "{BACKEND}": {{', *rows, "    }", "}"]
    lines = text.splitlines()
    return "\n".join([*lines[: table.lineno - 1], *own, *lines[table.end_lineno :], ""])


def _settings() -> str:
    defaults = {name: field.default for name, field in CompleteSettings.model_fields.items()}
    return "\n".join(
        [
            '"""The settings of a model with their defaults; a name of ours leads to that in config.json."""',
            "",
            "from types import SimpleNamespace",
            "",
            "DEFAULTS = {",
            *(f"    {name!r}: {default!r}," for name, default in defaults.items()),
            "}",
            "CONFIG_NAMES = {",
            *(f"    {name!r}: {theirs!r}," for name, theirs in CONFIG_NAMES.items()),
            "}",
            "",
            "",
            "def complete(settings):",
            '    """Fills in the defaults. The package also checks each value."""',
            "    return SimpleNamespace(**{**DEFAULTS, **settings})",
            "",
        ]
    )
