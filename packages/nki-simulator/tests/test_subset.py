"""The compiler's Python subset: one kernel for every construct that it refuses."""

import dataclasses
import re
from functools import partial

import pytest

from nki_simulator import nisa, nki, nl
from nki_simulator.core.errors import NkiWarning
from nki_simulator.core.releases import RELEASES, RULES
from nki_simulator.kernel import RELEASE
from nki_simulator.subset import SubsetError, check, findings

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
    global_state: "global and nonlocal state makes a kernel impure",
    an_import: "import inside a kernel",
    an_integer_key: "dictionary keys must be string literals",
    a_set: "a set is not an NKI value",
    a_walrus: ":= is outside",
    a_deletion: "del is outside",
}


@pytest.mark.parametrize(
    ("function", "message"), REFUSED.items(), ids=[f.__name__ for f in REFUSED]
)
def test_a_construct_outside_the_subset_is_refused(function, message):
    with pytest.raises(SubsetError, match=message) as caught:
        check(function, "0.6.0")
    line = function.__code__.co_firstlineno
    assert "test_subset.py:" in str(caught.value)
    assert any(line <= int(f.split(":")[1]) <= line + 5 for f in findings(function, "0.6.0"))


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


def test_running_a_kernel_checks_it(monkeypatch):
    monkeypatch.delenv(RELEASE)

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
    assert findings(allowed) == ()
    assert allowed(1, Options(4)) == 3


def explicit_accumulation(x):
    nisa.nc_matmul(dst=x, stationary=x, moving=x, accumulate=True)


def make_kernel(width):
    def a_variable_of_a_factory(x):
        return x * width

    return a_variable_of_a_factory


def a_runtime_loop(x):
    nl.fori_loop(0, 3, x)


def a_deprecated_loop(x):
    for _ in nl.dynamic_range(x):
        pass


def a_pair_as_target(pairs):
    for low, high in pairs:
        print(low, high)


def a_starred_tuple(x):
    return (x, *x.shape)


def a_power(x):
    return x**2


def a_partial_function(x):
    return partial(a_power, x)()


def a_function_in_a_loop(x):
    for _ in range(2):

        def twice(y):
            return 2 * y

        x = twice(x)
    return x


def an_inner_function(x):
    def twice(y):
        return 2 * y

    return twice(x)


def a_pair_of_elements(x):
    x[0], x[1] = x[1], x[0]


def an_enumeration(x):
    for pair in enumerate(x):
        print(pair)


def a_select_without_offset(x):
    nisa.affine_select(
        dst=x,
        pattern=[[1, 4]],
        channel_multiplier=0,
        on_true_tile=x,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )


def an_iota_without_offset(x):
    nisa.iota(dst=x, pattern=[[1, 4]])


def a_convenience(x):
    return nl.load(x)


SOME_REFUSE = {
    a_mutable_global: ("`SIZES`|a mutable global", RELEASES),
    a_test_for_none: ("`is` with None", RELEASES[1:5]),
    explicit_accumulation: ("nc_matmul accumulate= is new in nki 0.3.0", RELEASES[:1]),
    make_kernel(4): ("`width`: a variable of an enclosing function is refused", RELEASES[:5]),
    a_runtime_loop: ("fori_loop is new in nki 0.6.0", RELEASES[:4]),
    a_deprecated_loop: ("dynamic_range is refused, or wrong, in nki 0.7.0", RELEASES[5:]),
    a_pair_as_target: ("a tuple as a loop's target is doubtful", RELEASES[:5]),
    a_starred_tuple: ("a starred value is doubtful", RELEASES[:5]),
    an_inner_function: ("a function inside a function is refused", RELEASES[:4]),
    a_power: ("the power operator is refused", RELEASES[4:5]),
    a_partial_function: ("functools.partial is refused", RELEASES[4:5]),
    a_function_in_a_loop: ("a function defined in a loop is refused", RELEASES[4:5]),
    a_pair_of_elements: ("an element as one of several targets is refused", RELEASES[:5]),
    an_enumeration: ("enumerate, zip, map and their like is doubtful", RELEASES[:5]),
    a_select_without_offset: ("affine_select needs offset= before nki 0.3.0", RELEASES[:1]),
    an_iota_without_offset: ("iota needs offset= before nki 0.3.0", RELEASES[:1]),
    a_convenience: ("load is new in nki 0.3.0", RELEASES[:1]),
    an_anonymous_function: ("lambda is outside", RELEASES[:5]),
}


@pytest.mark.parametrize("function", SOME_REFUSE, ids=lambda f: f.__name__)
def test_a_release_names_what_it_does_not_take(function):
    message, refusing = SOME_REFUSE[function]
    for release in RELEASES:
        found = "\n".join(findings(function, release))
        assert bool(re.search(message, found)) == (release in refusing), release
    assert any(re.search(message, f) for f in findings(function)), (
        "without a release all rules hold"
    )


def seen_in_the_source():
    """The rules that a kernel above breaks."""
    messages = " ".join(message for message, _ in SOME_REFUSE.values())
    return {"Python outside the compiler's subset", *(name for name in RULES if name in messages)}


@pytest.mark.parametrize("function", [a_test_for_none, a_mutable_global], ids=lambda f: f.__name__)
def test_what_aws_itself_writes_is_only_warned_of(function):
    with pytest.warns(
        NkiWarning, match=f"test_subset.py:.*{SOME_REFUSE[function][0]}.*public kernels have it"
    ):
        check(function, "0.3.0")
