"""The compiler's Python subset: one kernel for every construct that it refuses."""

import dataclasses

import pytest

from delta_trn.nki_kernels.simulator import nisa, nki, nl
from delta_trn.nki_kernels.simulator.subset import SubsetError, check, findings

SIZES = [1, 2, 3]
WIDTH = 4


@dataclasses.dataclass
class Options:
    rows: int


def keyword_only(x, *, flag=True):
    return x if flag else None


def many_arguments(*args):
    return args[0]


def identity_test(x):
    return x if x is WIDTH else 0


def a_test_for_none(x):
    return x if x is not None else 0


def an_anonymous_function(x):
    f = lambda y: y + 1  # noqa: E731
    return f(x)


def a_list_comprehension(x):
    return [i for i in range(x)]  # noqa: C416


def a_generator(x):
    yield x


def an_exception_handler(x):
    try:
        return x
    except ValueError:
        return None


def a_context(x):
    with open(x) as f:
        return f


def global_state(x):
    global WIDTH
    WIDTH = x


def a_mutable_global(x):
    return SIZES[x]


def an_import(x):
    import math

    return math.pi * x


def an_integer_key(x):
    return {1: x}


def a_set(x):
    return {x, 1}


def a_walrus(x):
    return (y := x) + y


def a_deletion(x):
    y = x
    del y


REFUSED = {
    keyword_only: "keyword-only separator",
    many_arguments: r"\*args and \*\*kwargs are not kernel parameters",
    identity_test: "`is` operator is not supported; use ==",
    an_anonymous_function: "lambda is outside",
    a_list_comprehension: "comprehension is outside",
    a_generator: "generator is outside",
    an_exception_handler: "try is outside",
    a_context: "with is outside",
    global_state: "global state makes a kernel impure",
    an_import: "import inside a kernel",
    an_integer_key: "dictionary keys must be string literals",
    a_set: "a set is not an NKI value",
    a_walrus: ":= is outside",
    a_deletion: "del is outside",
}


@pytest.mark.parametrize(("function", "message"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_a_construct_outside_the_subset_is_refused(function, message):
    with pytest.raises(SubsetError, match=message) as caught:
        check(function)
    line = function.__code__.co_firstlineno
    assert "test_subset.py:" in str(caught.value)
    assert any(line <= int(f.where.rpartition(":")[2]) <= line + 5 for f in findings(function))


def test_a_helper_is_checked_too():
    def kernel(x):
        return an_anonymous_function(x)

    with pytest.raises(SubsetError, match="lambda is outside"):
        check(kernel)


def test_a_decorated_helper_is_refused():
    @nki.jit
    def helper(x):
        return x

    def kernel(x):
        return helper(x)

    with pytest.raises(SubsetError, match="helper helper is decorated"):
        check(kernel)


def test_running_a_kernel_checks_it():
    @nki.jit
    def kernel(x):
        return [i for i in x]  # noqa: C416

    with pytest.raises(SubsetError, match="comprehension"):
        kernel(1)
    assert nki.simulate(kernel, check_source=False, strict=False)(()) == ()


def allowed(x, options, scale=1.0):
    """Everything that the language guide lists."""
    total = 0
    sizes = [1, 2]
    sizes.append(3)
    names = {"a": 1, "b": 2}
    for i in range(3):
        for size in sizes:
            total += size * names["a"] if i % 2 == 0 else min(size, i)
    while total > 3:
        total -= 1
    assert total <= 3, f"total={total}"
    if options.rows == WIDTH and x == 1:
        return total
    return apply(double, total)


def double(x):
    return 2 * x


def apply(function, x):
    return function(x)


def test_what_the_guide_lists_is_allowed():
    assert findings(allowed, portable=True) == ()
    assert allowed(1, Options(4)) == 3


def positional_instruction(x):
    nisa.tensor_copy(x, x)


def explicit_accumulation(x):
    nisa.nc_matmul(dst=x, stationary=x, moving=x, accumulate=True)


def a_view_method(x):
    return x.broadcast(1, 4)


def a_hardware_loop(x):
    nl.fori_loop(0, 3, x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (a_mutable_global, "`SIZES` is a mutable global"),
        (a_test_for_none, "refuses `is`, with None too"),
        (positional_instruction, "nisa.tensor_copy takes keywords"),
        (explicit_accumulation, "accumulate= is new in 0.3"),
        (a_view_method, "view method .broadcast is new in 0.5"),
        (a_hardware_loop, "nl.fori_loop is new in 0.6"),
    ],
)
def test_features_of_some_releases_are_listed(function, message):
    assert findings(function) == (), "one release's compiler accepts it"
    assert any(message in str(f) for f in findings(function, portable=True))
