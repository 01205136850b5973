"""The Python subset of NKI's compiler, checked on the source of a kernel and of every helper that it reaches.

A kernel runs here as ordinary Python, but the compilers of NKI 0.2 to 0.6 parse its source and accept less.
`check` raises for what they refuse. `findings(kernel, portable=True)` also lists what only some of the
releases 0.2 to 0.7 accept; a kernel without findings runs under all of them.

Source: Neuron documentation, NKI language guide (what a kernel may contain) and migration guide (0.2 to 0.3).
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
LOOPS = {"dynamic_range": "gone in 0.7", "fori_loop": "new in 0.6", "while_loop": "new in 0.6"}


def check(kernel: Callable[..., Any]) -> None:
    """Raise SubsetError with every construct that the compiler refuses."""
    refused = findings(kernel)
    if refused:
        lines = "\n  ".join(map(str, refused))
        raise SubsetError(f"kernel source leaves the compiler's Python subset:\n  {lines}")


@lru_cache(maxsize=512)
def findings(kernel: Callable[..., Any], portable: bool = False) -> tuple[Finding, ...]:
    """Return what in the kernel, or in a function that it reaches, lies outside the subset.

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
        result += _function_findings(tree, where, function is root)
        if portable:
            result += _portable_findings(tree, where, scope)
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


def _portable_findings(tree: Any, where: Callable, scope: dict[str, Any]) -> Iterator[Finding]:
    for node in _body(tree):
        if isinstance(node, ast.Name) and isinstance(scope.get(node.id), (list, dict, set)):
            yield Finding(where(node), f"`{node.id}` is a mutable global; a kernel must be pure, use a tuple")
        if isinstance(node, ast.Compare) and _identity(node, with_none=True):
            yield Finding(where(node), "the migration guide to 0.3 refuses `is`, with None too; use == or !=")
        if isinstance(node, ast.Attribute) and node.attr in LOOPS:
            yield Finding(where(node), f"nl.{node.attr} is {LOOPS[node.attr]}; use range")
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        instruction = isinstance(owner, ast.Name) and owner.id == "nisa"
        if instruction and node.args:
            what = f"nisa.{node.func.attr} takes keywords; argument orders differ by release"
            yield Finding(where(node), what)
        if instruction and any(keyword.arg == "accumulate" for keyword in node.keywords):
            what = "nc_matmul accumulate= is new in 0.3; write each product to a fresh tile"
            yield Finding(where(node), what)
        module = isinstance(owner, ast.Name) and isinstance(scope.get(owner.id), ModuleType)
        if node.func.attr in VIEWS and not module:
            what = f"the view method .{node.func.attr} is new in 0.5; use a slice, .ap or .reshape"
            yield Finding(where(node), what)


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
