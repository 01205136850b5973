"""The Python subset of NKI's compiler, checked on the source of a kernel and of every helper that it reaches.

A kernel runs here as ordinary Python, but the compilers of NKI 0.2 to 0.6 parse its source and accept less.
`check` raises for what a release, or one of all releases, refuses. `core.releases` has the rules and their
sources.
"""

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from delta_trn.nki_kernels.simulator.core.errors import StrictError
from delta_trn.nki_kernels.simulator.core.releases import rules_of, signature_problem


class SubsetError(StrictError):
    """The kernel's source uses Python that the compiler does not accept."""


@dataclass(frozen=True)
class Finding:
    """One construct outside the subset: file and line, and what to write instead."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


REFUSED: dict[type[ast.AST], str] = {
    ast.Lambda: "lambda is outside the compiler's subset; write a function",
    ast.ListComp: "a comprehension is outside the compiler's subset; write a loop with append",
    ast.SetComp: "a comprehension is outside the compiler's subset; write a loop",
    ast.DictComp: "a comprehension is outside the compiler's subset; write a loop",
    ast.GeneratorExp: "a generator is outside the compiler's subset; write a loop",
    ast.Yield: "a generator is outside the compiler's subset; return a list",
    ast.YieldFrom: "a generator is outside the compiler's subset; return a list",
    ast.Try: "try is outside the compiler's subset",
    ast.Global: "global state makes a kernel impure; pass it as an argument",
    ast.Nonlocal: "nonlocal state makes a kernel impure; pass it as an argument",
    ast.Import: "import inside a kernel is outside the compiler's subset; import at the top",
    ast.ImportFrom: "import inside a kernel is outside the compiler's subset; import at the top",
    ast.ClassDef: "a class inside a kernel is outside the compiler's subset; define it at the top",
    ast.Set: "a set is not an NKI value; use a list or a tuple",
    ast.NamedExpr: ":= is outside the compiler's subset; assign first",
    ast.Delete: "del is outside the compiler's subset",
    ast.Match: "match is outside the compiler's subset; use if",
    ast.AsyncFunctionDef: "async is outside the compiler's subset",
    ast.Await: "async is outside the compiler's subset",
}
VIEWS = (
    "permute", "broadcast", "expand_dim", "squeeze_dim", "reshape_dim", "flatten_dims", "rearrange", "select",
    "vector_select", "get_pattern", "is_contiguous",
)  # fmt: skip
ITERATIONS = ("enumerate", "zip", "map", "filter", "reversed", "sorted")
SUBSET = "Python outside the compiler's subset"


def check(kernel: Callable[..., Any], nki: str | None = None) -> None:
    """Raise SubsetError with every construct that the release `nki`, or without one some release, refuses."""
    refused = findings(kernel, nki)
    if refused:
        lines = "\n  ".join(map(str, refused))
        releases = f"nki {nki}" if nki else "one of the releases 0.2.0 to 0.7.0 (name yours by nki=)"
        raise SubsetError(f"kernel source has what {releases} does not take:\n  {lines}")


@lru_cache(maxsize=512)
def findings(kernel: Callable[..., Any], nki: str | None = None) -> tuple[Finding, ...]:
    """Return what in the kernel, or in a function that it reaches, a release or one of them does not take.

    >>> def total(x):
    ...     return sum([row for row in x])
    >>> [finding.what for finding in findings(total)]
    ["a comprehension is outside the compiler's subset; write a loop with append"]
    """
    root = getattr(kernel, "function", kernel)
    result: list[Finding] = []
    pending, seen = [root], set()
    while pending:
        function = pending.pop()
        if function in seen or not isinstance(function, FunctionType):
            continue
        seen.add(function)
        tree, where = _parse(function)
        if tree is None:
            continue
        scope = _scope(function)
        if SUBSET in rules_of(nki):
            result += _function_findings(tree, where, function is root)
        result += _release_findings(tree, where, scope, nki)
        pending += _reached(tree, scope)
    return tuple(result)


def _parse(function: FunctionType) -> tuple[Any, Callable[[ast.AST], str]]:
    """Return the function's syntax tree, None without source, and what names a node's file and line."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None, lambda node: ""
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    file = function.__code__.co_filename.rpartition("/")[2]
    return tree, lambda node: f"{file}:{first + getattr(node, 'lineno', 1) - 1}"


def _scope(function: FunctionType) -> dict[str, Any]:
    """Return the global and enclosing names that the function uses, with their values."""
    closure = inspect.getclosurevars(function)
    return {**closure.globals, **closure.nonlocals}


def _body(tree: Any) -> Iterator[ast.AST]:
    """Yield every node that runs; annotations and decorators do not."""
    pending: list[ast.AST] = list(tree.body) + list(tree.args.defaults)
    while pending:
        node = pending.pop(0)
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            pending += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)]


def _function_findings(tree: Any, where: Callable, root: bool) -> Iterator[Finding]:
    if tree.args.kwonlyargs:
        yield Finding(where(tree), "keyword-only separator * in a signature is not supported")
    if root and (tree.args.vararg or tree.args.kwarg):
        yield Finding(where(tree), "*args and **kwargs are not kernel parameters; name every argument")
    if tree.decorator_list and not root:
        yield Finding(where(tree), f"helper {tree.name} is decorated; helpers are plain functions")
    for node in _body(tree):
        what = REFUSED.get(type(node))
        if what is not None:
            yield Finding(where(node), what)
        elif isinstance(node, ast.With):
            names = [ast.unparse(item.context_expr) for item in node.items]
            if not all("no_reorder" in name for name in names):
                yield Finding(where(node), "with is outside the compiler's subset")
        elif isinstance(node, ast.Compare) and _identity(node, with_none=False):
            yield Finding(where(node), "the `is` operator is not supported; use == or !=")
        elif isinstance(node, ast.Dict) and not all(map(_is_string, node.keys)):
            yield Finding(where(node), "dictionary keys must be string literals")


def _is_string(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _identity(node: ast.Compare, *, with_none: bool) -> bool:
    """Return whether the comparison uses `is` with None, or with anything else.

    The migration guide to 0.3 refuses every `is`; AWS's own library for 0.3 uses `is not None`.
    """
    sides = zip(node.ops, node.comparators, strict=True)
    tests = [
        isinstance(c, ast.Constant) and c.value is None
        for op, c in sides
        if isinstance(op, (ast.Is, ast.IsNot))
    ]
    return any(none == with_none for none in tests)


def _release_findings(
    tree: Any, where: Callable, scope: dict[str, Any], nki: str | None
) -> Iterator[Finding]:
    rules = rules_of(nki)
    for node in _body(tree):
        for name in _forms(node, scope):
            if name in rules:
                yield Finding(where(node), f"{name} {rules[name]}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _owner(node.func):
            problem = signature_problem(nki, node.func.attr, tuple(k.arg or "" for k in node.keywords))
            if problem:
                yield Finding(where(node), problem)


def _owner(node: ast.Attribute) -> bool:
    """Return whether an attribute is one of nisa or nl."""
    return isinstance(node.value, ast.Name) and node.value.id in ("nisa", "nl")


def _forms(node: ast.AST, scope: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the rules that a node of the syntax tree breaks."""
    if isinstance(node, ast.Name) and isinstance(scope.get(node.id), (list, dict, set)):
        yield "a mutable global"
    if isinstance(node, ast.Compare) and _identity(node, with_none=True):
        yield "`is` with None"
    if isinstance(node, ast.For) and isinstance(node.target, (ast.Tuple, ast.List)):
        yield "a tuple as a loop's target"
    if isinstance(node, ast.Starred):
        yield "a starred value"
    if isinstance(node, ast.Attribute) and node.attr == "dynamic_range":
        yield "dynamic_range"
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in ITERATIONS:
        yield "enumerate, zip, map and their like"
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "nisa" and node.args:
            yield "an instruction's positional arguments"
        module = isinstance(owner, ast.Name) and isinstance(scope.get(owner.id), ModuleType)
        if node.func.attr in VIEWS and not module:
            yield "a view method"


def _reached(tree: Any, scope: dict[str, Any]) -> list[Any]:
    """Return the own functions that the source names, alone or as an attribute of a module."""
    reached = []
    for node in _body(tree):
        value = None
        if isinstance(node, ast.Name):
            value = scope.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            value = getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        value = getattr(value, "function", value)
        if isinstance(value, FunctionType) and _own(value):
            reached.append(value)
    return reached


def _own(function: FunctionType) -> bool:
    """Return whether a function is the kernel's own, not the simulator's, NKI's, NumPy's or Python's."""
    module = function.__module__ or ""
    installed = module.partition(".")[0] in ("numpy", "nki", "ml_dtypes")
    if installed or module.startswith(__package__ or "") or hasattr(builtins, module):
        return False
    file = function.__code__.co_filename
    return "site-packages" not in file and "/lib/python" not in file
