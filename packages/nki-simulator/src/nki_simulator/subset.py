"""The Python subset of NKI's compiler, checked on the source of a kernel and of every helper that
it reaches.

A kernel runs here as ordinary Python, but the compilers of NKI 0.2 to 0.6 parse its source and
accept less. `check` raises for what a release, or one of all releases, refuses, and warns of what
AWS's text refuses and its own kernels do. `core.releases` has the rules and their sources.
"""

import ast
import builtins
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from nki_simulator.core.errors import NkiWarning, StrictError
from nki_simulator.core.releases import rules_of, signature_problem


class SubsetError(StrictError):
    """The kernel's source uses Python that the compiler does not accept."""


REFUSED: tuple[tuple[Any, str], ...] = (
    (ast.Lambda, "lambda is outside the compiler's subset; write a function"),
    (
        (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
        "a comprehension is outside the compiler's subset; write a loop",
    ),
    ((ast.Yield, ast.YieldFrom), "a generator is outside the compiler's subset; return a list"),
    (ast.Try, "try is outside the compiler's subset"),
    (
        (ast.Global, ast.Nonlocal),
        "global and nonlocal state makes a kernel impure; pass it as an argument",
    ),
    (
        (ast.Import, ast.ImportFrom),
        "import inside a kernel is outside the compiler's subset; import at the top",
    ),
    (
        ast.ClassDef,
        "a class inside a kernel is outside the compiler's subset; define it at the top",
    ),
    (ast.Set, "a set is not an NKI value; use a list or a tuple"),
    (ast.NamedExpr, ":= is outside the compiler's subset; assign first"),
    (ast.Delete, "del is outside the compiler's subset"),
    (ast.Match, "match is outside the compiler's subset; use if"),
    ((ast.AsyncFunctionDef, ast.Await), "async is outside the compiler's subset"),
)
ITERATIONS = ("enumerate", "zip", "map", "filter", "reversed", "sorted")
SUBSET = "Python outside the compiler's subset"


def check(kernel: Callable[..., Any], nki: str | None = None) -> None:
    """Raise SubsetError with every construct that the release `nki`,
    or without one some release, refuses.
    """
    refused = [text for text, warns in _find(kernel, nki) if not warns]
    for text, warns in _find(kernel, nki):
        if warns:
            warnings.warn(text, NkiWarning, stacklevel=3)
    if refused:
        lines = "\n  ".join(refused)
        releases = (
            f"nki {nki}" if nki else "one of the releases 0.2.0 to 0.7.0 (name yours by nki=)"
        )
        raise SubsetError(f"kernel source has what {releases} does not take:\n  {lines}")


def findings(kernel: Callable[..., Any], nki: str | None = None) -> tuple[str, ...]:
    """Return what in the kernel, or in a function that it reaches, a release or one of them does
    not take.

    A finding is file:line: what is wrong, and what to write instead.

    >>> def total(x):
    ...     return sum([row for row in x])
    >>> [finding.split(": ")[1] for finding in findings(total)]
    ["a comprehension is outside the compiler's subset; write a loop"]
    """
    return tuple(text for text, _ in _find(kernel, nki))


@lru_cache(maxsize=512)
def _find(kernel: Callable[..., Any], nki: str | None) -> tuple[tuple[str, bool], ...]:
    """Return the findings, and of each whether it is only warned of."""
    root = getattr(kernel, "function", kernel)
    result: list[tuple[str, bool]] = []
    pending, seen = [root], set()
    while pending:
        function = pending.pop()
        if function in seen or not isinstance(function, FunctionType):
            continue
        seen.add(function)
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError):  # it has no source
            continue
        tree: Any = ast.parse(textwrap.dedent("".join(lines))).body[0]
        closure = inspect.getclosurevars(function)
        scope = {**closure.globals, **closure.nonlocals}
        outside = _find_outside(tree, function is root) if SUBSET in rules_of(nki) else ()
        problems = [(node, what, False) for node, what in outside]
        problems += _find_refused(tree, scope, closure.nonlocals, nki)
        file = function.__code__.co_filename.rpartition("/")[2]
        result += [
            (f"{file}:{first + node.lineno - 1}: {what}", warns) for node, what, warns in problems
        ]
        pending += _list_reached(tree, scope)
    return tuple(result)


def _body(tree: Any) -> Iterator[ast.AST]:
    """Yield every node that runs; annotations and decorators do not."""
    pending: list[ast.AST] = list(tree.body) + list(tree.args.defaults)
    while pending:
        node = pending.pop(0)
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            pending += [
                v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)
            ]


def _find_outside(tree: Any, root: bool) -> Iterator[tuple[Any, str]]:
    """Yield each node that is outside the subset of every release that has one,
    and what to write instead.
    """
    if tree.args.kwonlyargs:
        yield tree, "keyword-only separator * in a signature is not supported"
    if root and (tree.args.vararg or tree.args.kwarg):
        yield tree, "*args and **kwargs are not kernel parameters; name every argument"
    if tree.decorator_list and not root:
        yield tree, f"helper {tree.name} is decorated; helpers are plain functions"
    for node in _body(tree):
        for kinds, what in REFUSED:
            if isinstance(node, kinds):
                yield node, what
        if isinstance(node, ast.With):
            if not all("no_reorder" in ast.unparse(item.context_expr) for item in node.items):
                yield node, "with is outside the compiler's subset"
        elif isinstance(node, ast.Compare) and _identity(node, with_none=False):
            yield node, "the `is` operator is not supported; use == or !="
        elif isinstance(node, ast.Dict) and any(
            not (isinstance(key, ast.Constant) and isinstance(key.value, str)) for key in node.keys
        ):
            yield node, "dictionary keys must be string literals"


def _identity(node: ast.Compare, *, with_none: bool) -> bool:
    """Return whether the comparison uses `is` with None, or with anything else.

    The migration guide to 0.3 refuses every `is`; AWS's own library for 0.3 uses `is not None`.
    """
    sides = zip(node.ops, node.comparators, strict=True)
    compared = [side for op, side in sides if isinstance(op, (ast.Is, ast.IsNot))]
    return any(
        (isinstance(side, ast.Constant) and side.value is None) == with_none for side in compared
    )


def _find_refused(
    tree: Any, scope: dict[str, Any], outer: Mapping[str, Any], nki: str | None
) -> Iterator[tuple[Any, str, bool]]:
    """Yield each node that the rules of the release refuse, what to write instead, and whether they
    warn.

    `outer` are the variables of enclosing functions that the source reads.
    """
    rules = rules_of(nki)
    for node in _body(tree):
        forms = [(name, name) for name in _forms(node, scope)]
        if isinstance(node, ast.Name) and node.id in outer:
            name = "a variable of an enclosing function"
            forms.append((name, f"`{node.id}`: {name}"))
        for name, what in forms:
            if name in rules:
                yield node, f"{what} {rules[name]}", rules[name].only_warns(nki)
        if isinstance(node, ast.Call) and _owner(node.func) in ("nisa", "nl"):
            name = ast.unparse(node.func).partition(".")[2]
            problem = signature_problem(nki, name, tuple(k.arg or "" for k in node.keywords))
            if problem:
                yield node, problem, False


def _owner(node: ast.AST) -> str:
    """Return the name that an attribute belongs to."""
    return (
        node.value.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        else ""
    )


def _forms(node: ast.AST, scope: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the rules that a node of the syntax tree breaks."""
    if isinstance(node, ast.Name) and isinstance(scope.get(node.id), (list, dict, set)):
        yield "a mutable global"
    if isinstance(node, ast.Compare) and _identity(node, with_none=True):
        yield "`is` with None"
    if isinstance(node, ast.For) and isinstance(node.target, (ast.Tuple, ast.List)):
        yield "a tuple as a loop's target"
    if isinstance(node, ast.FunctionDef):
        yield "a function inside a function"
    if isinstance(node, (ast.For, ast.While)) and any(
        isinstance(inner, ast.FunctionDef) for inner in ast.walk(node)
    ):
        yield "a function defined in a loop"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        yield "the power operator"
    targets = node.targets[0] if isinstance(node, ast.Assign) else None
    if isinstance(targets, ast.Tuple) and any(isinstance(t, ast.Subscript) for t in targets.elts):
        yield "an element as one of several targets"
    if isinstance(node, ast.Starred):
        yield "a starred value"
    if isinstance(node, ast.Attribute) and node.attr == "dynamic_range":
        yield "dynamic_range"
    if not isinstance(node, ast.Call):
        return
    if ast.unparse(node.func) in ("partial", "functools.partial"):
        yield "functools.partial"
    if isinstance(node.func, ast.Name) and node.func.id in ITERATIONS:
        yield "enumerate, zip, map and their like"


def _list_reached(tree: Any, scope: dict[str, Any]) -> list[Any]:
    """Return the own functions that the source names, alone or as an attribute of a module."""
    reached = []
    for node in _body(tree):
        value = scope.get(node.id) if isinstance(node, ast.Name) else None
        owner = scope.get(_owner(node))
        if isinstance(node, ast.Attribute) and isinstance(owner, ModuleType):
            value = getattr(owner, node.attr, None)
        value = getattr(value, "function", value)
        if isinstance(value, FunctionType) and _own(value):
            reached.append(value)
    return reached


def _own(function: FunctionType) -> bool:
    """Return whether a function is the kernel's own, not the simulator's,
    NKI's, NumPy's or Python's.
    """
    module = function.__module__ or ""
    installed = module.partition(".")[0] in ("numpy", "nki", "ml_dtypes")
    if installed or module.startswith(__package__ or "") or hasattr(builtins, module):
        return False
    file = function.__code__.co_filename
    return "site-packages" not in file and "/lib/python" not in file
