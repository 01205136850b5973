"""Writes the models' code beside a checkpoint, for machines that have transformers and not this
package.

With `trust_remote_code=True` transformers imports one file that lies beside the weights. Ours has
the sources of the models and of PyTorch's backend as they are, each as a string under its module's
name, and lets Python import them from there. Where the package is installed, the file uses that
instead. One module is another: `delta_trn.models.settings` has no pydantic, since a saved
configuration was checked already.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from transformers import PretrainedConfig

from delta_trn.backends.dispatch import TABLE
from delta_trn.models.ecosystem.files import write_text
from delta_trn.models.settings import CONFIG_NAMES, CompleteSettings

FILE = "modeling_delta_trn"
CLASSES = {
    "AutoConfig": "DeltaConfig",
    "AutoModel": "DeltaModel",
    "AutoModelForCausalLM": "DeltaForCausalLM",
    "AutoModelForSequenceClassification": "DeltaForSequenceClassification",
}
SETTINGS = '''"""The settings of a model with their defaults; a name of ours leads to that in config.json."""

from types import SimpleNamespace

DEFAULTS = {defaults!r}
CONFIG_NAMES = {names!r}


def complete(settings):
    """Fills in the defaults. The package also checks each value."""
    return SimpleNamespace(**{{**DEFAULTS, **settings}})
'''
BEGIN = '''"""Loads the models of delta-trn {version}, from its sources below where it is not installed.

SPDX-License-Identifier: Apache-2.0
"""

import sys
from dataclasses import replace
from importlib import import_module
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.util import spec_from_loader


class Sources(MetaPathFinder, ExecutionLoader):
    """Finds and loads modules in the strings below."""

    def find_spec(self, fullname, path=None, target=None):
        return spec_from_loader(fullname, self) if fullname in SOURCES else None

    def get_source(self, fullname):
        return SOURCES[fullname]

    def get_filename(self, fullname):
        return f"{{__file__}}/{{fullname}}.py"

    def is_package(self, fullname):
        return any(name.startswith(f"{{fullname}}.") for name in SOURCES)


'''
END = """
try:
    import delta_trn
except ImportError:
    sys.meta_path.append(Sources())
    # one backend, PyTorch's, on every device: kernels stay in the package
    compiler = import_module("delta_trn.backends.compiler")
    compiler.load = lambda *files: compiler.Library(None, "PyTorch, since the kernels are in the package")
    dispatch = import_module("delta_trn.backends.dispatch")
    backend = dispatch.BACKENDS["chunked"]
    dispatch.BACKENDS.clear()
    rows = {op: replace(row, automatic=None) for op, row in backend.rows.items()}
    dispatch.register(replace(backend, rows=rows))
models = import_module("delta_trn.models")

# classes of this file, so that transformers copies it where it saves them
"""


def write_remote_code(folder: Path, config: PretrainedConfig) -> None:
    """Writes the code into the folder, and tells `config`, which is saved next,
    which class is where.
    """
    write_text(folder / f"{FILE}.py", remote_code())
    config.auto_map = {auto: f"{FILE}.{name}" for auto, name in CLASSES.items()}


def remote_code() -> str:
    """Returns the text of the file.

    >>> names = {}
    >>> exec(remote_code(), names)
    >>> "delta_trn.models.gated_deltanet" in names["SOURCES"], names["DeltaModel"].__name__
    (True, 'DeltaModel')
    """
    parts = [BEGIN.format(version=version("delta-trn")), "SOURCES = {\n"]
    parts += [f"    {name!r}: r'''{source}''',\n" for name, source in sorted(sources().items())]
    parts += ["}\n", END]
    for name in CLASSES.values():
        parts.append(f"\n\nclass {name}(models.{name}):\n    __init__ = models.{name}.__init__\n")
    return "".join(parts)


def sources() -> dict[str, str]:
    """Returns the source of every module that the models need in PyTorch, by the module's name."""
    defaults = {name: field.default for name, field in CompleteSettings.model_fields.items()}
    found = {
        "delta_trn": "",
        "delta_trn.models.settings": SETTINGS.format(defaults=defaults, names=dict(CONFIG_NAMES)),
    }
    waiting = ["delta_trn.models", *(row.adapter for row in TABLE["chunked"].values())]
    while waiting:
        name = waiting.pop()
        spec = None if name in found else find_spec(name)
        if spec is not None and spec.origin is not None:
            found[name] = Path(spec.origin).read_text(encoding="utf-8")
            waiting += [name.rpartition(".")[0], *_list_imports(found[name])]
    return found


def _list_imports(source: str) -> Iterator[str]:
    """Yields the modules of ours that a source imports, at the top or in functions."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("delta_trn.")
        ):
            yield node.module
            spec = find_spec(node.module)
            # a package, whose files may be meant
            if spec is not None and spec.submodule_search_locations:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
