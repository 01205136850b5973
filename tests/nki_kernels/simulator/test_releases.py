"""What a release of NKI refuses while a kernel runs, each rule violated once."""

import numpy as np
import pytest

from delta_trn.nki_kernels.simulator import StrictError, nisa, nl, record
from delta_trn.nki_kernels.simulator.core.releases import RELEASES, RULES, releases_of
from delta_trn.nki_kernels.simulator.kernel import RELEASE
from tests.support.simulator_harness import F32, ones, psum, sbuf, write_output


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


VIEW, THIRD = "a view of a view", "a matmul operand of three dimensions"
REFUSED = {
    a_slice_of_a_slice: (VIEW, RELEASES[:3]),
    a_pattern_of_a_slice: (VIEW, RELEASES[:3]),
    a_reshape_of_a_slice: (VIEW, RELEASES[:3]),
    a_row_by_its_number: ("an integer index of the partition axis", RELEASES[:1]),
    a_stationary_of_three_dimensions: (THIRD, RELEASES[1:2]),
    a_moving_of_three_dimensions: (THIRD, RELEASES[1:2]),
    a_none_argument: ("a None argument", RELEASES[:2]),
}


def attempt(kernel, nki):
    argument = None if kernel is a_none_argument else np.ones(1, np.float32)
    return record(kernel, argument, nki=nki, check_source=False)


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda k: k.__name__)
def test_a_rule_holds_in_its_releases_and_without_a_release(kernel, monkeypatch):
    rule, refusing = REFUSED[kernel]
    monkeypatch.delenv(RELEASE)
    for release in (*RELEASES, None):
        if release is None or release in refusing:
            with pytest.raises(StrictError, match=f"{rule} .*{refusing[0]}.*{RULES[rule].source[:20]}"):
                attempt(kernel, release)
        else:
            assert attempt(kernel, release).instructions > 0


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
    assert record(kernel, x, None, **options).outputs.tolist() == x[:, 4:6].tolist(), "the view's own offset"


def test_an_unknown_release_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"nki '0.1.0' is not a release .*0.2.0, .*0.7.0"):
        releases_of("0.1.0")
