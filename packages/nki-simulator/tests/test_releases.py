"""What a release of NKI refuses while a kernel runs, each rule violated once."""

import numpy as np
import pytest
from simulator_harness import F32, on_chip, ones, psum, sbuf, write_output
from test_subset import seen_in_the_source

from nki_simulator import StrictError, nisa, nki, nl, record
from nki_simulator.core.errors import NkiWarning
from nki_simulator.core.releases import RELEASES, RULES, releases_of
from nki_simulator.kernel import RELEASE, STRICT


def a_none_argument(x=None, y=None):
    return write_output()


def a_slice_of_a_slice(x):
    nisa.tensor_copy(dst=sbuf(4, 2), src=ones(4, 8)[:, 0:4][:, 0:2])
    return write_output()


def a_pattern_of_a_slice(x):
    nisa.tensor_copy(dst=sbuf(4, 2), src=ones(4, 8)[:, 0:4].ap(pattern=[[8, 4], [1, 2]]))
    return write_output()


def a_reshape_of_a_slice(x):
    nisa.tensor_copy(dst=sbuf(4, 2, 2), src=ones(4, 8)[:, 0:4].reshape((4, 2, 2)))
    return write_output()


def a_row_by_its_number(x):
    nisa.tensor_copy(dst=sbuf(1, 8), src=ones(4, 8)[0])
    return write_output()


def a_stationary_of_three_dimensions(x):
    nisa.nc_matmul(dst=psum(8, 4), stationary=ones(4, 2, 4), moving=ones(4, 4))
    return write_output()


def a_moving_of_three_dimensions(x):
    nisa.nc_matmul(dst=psum(4, 8), stationary=ones(4, 4), moving=ones(4, 4, 4)[:, 0:2, :])
    return write_output()


def a_permuted_tile(x):
    nisa.tensor_copy(dst=sbuf(4, 2, 3), src=ones(4, 3, 2).permute((0, 2, 1)))
    return write_output()


def a_sum_onto_zeros(x):
    zeros = nl.zeros((4, 4), F32, nl.psum)
    nisa.nc_matmul(dst=zeros, stationary=ones(4, 4), moving=ones(4, 4), accumulate=True)
    return write_output()


def a_row_that_repeats(x):
    nisa.tensor_copy(dst=sbuf(4, 1).ap(pattern=[[1, 4], [0, 8]]), src=ones(4, 8))
    return write_output()


def a_private_output(x):
    out = nl.ndarray((4, 4), F32, nl.private_hbm)
    nisa.dma_copy(dst=out, src=ones(4, 4))
    return out


def a_transposition_that_widens(x):
    nisa.nc_transpose(dst=psum(8, 4), data=ones(4, 8, dtype="bfloat16"), engine=nisa.engine.tensor)
    return write_output()


VIEW, THIRD = "a view of a view", "a matmul operand of three dimensions"
# each rule, the releases that refuse the kernel, and those that warn of it
REFUSED = {
    a_slice_of_a_slice: (VIEW, RELEASES[:1], RELEASES[1:3]),
    a_pattern_of_a_slice: (VIEW, RELEASES[:1], RELEASES[1:3]),
    a_reshape_of_a_slice: (VIEW, RELEASES[:1], RELEASES[1:3]),
    a_permuted_tile: ("a view method", RELEASES[:3], ()),
    a_row_by_its_number: ("an integer index of the partition axis", RELEASES[:1], ()),
    a_stationary_of_three_dimensions: (THIRD, RELEASES[1:2], ()),
    a_moving_of_three_dimensions: (THIRD, RELEASES[1:2], ()),
    a_none_argument: ("a None argument", RELEASES[:2], ()),
    a_sum_onto_zeros: ("accumulation onto zeros of another instruction", (), RELEASES),
    a_row_that_repeats: ("a destination that repeats", (), RELEASES),
    a_transposition_that_widens: ("a transposition into a wider dtype", (), RELEASES),
    a_private_output: ("an output in private_hbm", (), RELEASES),
}


def attempt(kernel, nki):
    argument = None if kernel is a_none_argument else np.ones(1, np.float32)
    return record(kernel, argument, nki=nki, check_source=False)


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda k: k.__name__)
def test_a_rule_holds_in_its_releases_and_without_a_release(kernel, monkeypatch):
    rule, refusing, warning = REFUSED[kernel]
    monkeypatch.delenv(RELEASE)
    message = f"{rule} .*{RULES[rule].first}.*{RULES[rule].source[:20]}"
    for release in (*RELEASES, None):
        if refusing and release in (None, *refusing):
            with pytest.raises(StrictError, match=message):
                attempt(kernel, release)
        elif release in (None, *warning) and warning:
            with pytest.warns(NkiWarning, match=message):
                assert attempt(kernel, release).instructions > 0
        else:
            assert attempt(kernel, release).instructions > 0


def test_every_rule_is_broken_here_or_in_the_tests_of_the_source():
    assert {rule for rule, _, _ in REFUSED.values()} == {
        r for r in RULES if r not in seen_in_the_source()
    }


def test_a_place_that_repeats_is_written_alone():
    def kernel(x):
        tile, out = sbuf(4, 8), nl.ndarray((4, 8), F32, nl.shared_hbm)
        nisa.tensor_copy(dst=tile.ap(pattern=[[8, 4], [0, 8]]), src=ones(4, 8))
        nisa.dma_copy(dst=out[:, 0:1], src=tile[:, 0:1])
        nisa.dma_copy(dst=out[:, 1:2], src=tile[:, 1:2])
        return out

    with (
        pytest.warns(NkiWarning, match="repeats"),
        pytest.raises(StrictError, match="no instruction has written"),
    ):
        attempt(kernel, "0.7.0")


def places(op, *operands, nki):
    def kernel(*arrays):
        made = [on_chip(a) for a in arrays]
        op(made)
        return write_output()

    return record(kernel, *operands, nki=nki, check_source=False)


def test_positional_operands_have_the_order_of_the_release(monkeypatch):
    monkeypatch.delenv(RELEASE)
    x, out = np.arange(12, dtype=np.float32).reshape(4, 3), {}

    def scaled(made, *rest):
        out["sum"] = sbuf(4, 3)
        nisa.dma_compute(out["sum"], made, *rest)

    assert places(lambda made: scaled(made, [2.0, 3.0], nl.add), x, x, nki="0.2.0")
    assert (out["sum"].array == 5 * x).all()
    for release in RELEASES[1:]:
        places(lambda made: scaled(made, nl.add, [2.0, 4.0]), x, x, nki=release)
        assert (out["sum"].array == 6 * x).all()
    with pytest.raises(
        StrictError, match=r"operand 3 is reduce_op in nki 0.7.0 and scales in 0.2.0: use key"
    ):
        places(lambda made: scaled(made, nl.add, [2.0, 4.0]), x, x, nki=None)
    assert places(lambda made: nisa.tensor_copy(sbuf(4, 3), made[0]), x, nki=None), (
        "the same in every release"
    )
    with pytest.raises(TypeError, match="tensor_copy got src by its place and by its name"):
        places(lambda made: nisa.tensor_copy(sbuf(4, 3), made[0], src=made[0]), x, nki=None)
    with pytest.raises(TypeError, match="tensor_copy takes 4 operands, got 5"):
        places(lambda made: nisa.tensor_copy(sbuf(4, 3), made[0], *"abc"), x, nki=None)


def test_the_environment_says_how_strict_a_run_is(monkeypatch):
    def kernel(x):
        tile = nl.load(x)
        out = nl.ndarray((4, 2), F32, nl.shared_hbm)
        nl.store(out, tile[:, 0:4][:, 0:2])
        return out

    x = np.ones((4, 8), np.float32)
    monkeypatch.setenv(RELEASE, "")
    with pytest.raises(StrictError, match="name yours by nki="):
        record(kernel, x)
    monkeypatch.setenv(STRICT, "0")
    assert nki.simulate(kernel)(x).shape == (4, 2), (
        "an empty release is none, and nothing but AWS's checks is made"
    )
    with pytest.raises(StrictError, match="name yours by nki="):
        record(kernel, x, strict=True)
    monkeypatch.setenv(STRICT, "yes")
    with pytest.raises(ValueError, match="STRICT='yes' is neither 1, every check, nor 0"):
        record(kernel, x)


def test_one_slice_of_a_reshape_is_taken_by_every_release(monkeypatch):
    monkeypatch.delenv(RELEASE)

    def kernel():
        tile = nl.ndarray((4, 8), F32, nl.sbuf)
        nisa.memset(dst=tile, value=1.0)
        out = nl.ndarray((4, 2), F32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile.reshape((4, 2, 4))[:, 1, 0:2])
        return out

    assert record(kernel).outputs.min() == 1.0


def test_the_offset_of_a_pattern_counts_from_the_start_of_the_tile():
    x = np.arange(32, dtype=np.float32).reshape(4, 8)

    def kernel(x, offset):
        tile = sbuf(4, 8)
        nisa.dma_copy(dst=tile, src=x)
        out = nl.ndarray((4, 2), F32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile[:, 4:8].ap(pattern=[[8, 4], [1, 2]], offset=offset))
        return out

    options = {"nki": "0.7.0", "check_source": False}
    assert record(kernel, x, 1, **options).outputs.tolist() == x[:, 1:3].tolist()
    assert record(kernel, x, None, **options).outputs.tolist() == x[:, 4:6].tolist(), (
        "the view's own offset"
    )


def test_an_unknown_release_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"nki '0.1.0' is not a release .*0.2.0, .*0.7.0"):
        releases_of("0.1.0")
