"""Instructions that move data: DMA, gathers, shuffles, searches, registers, random numbers."""

import ml_dtypes
import numpy as np
import pytest
from simulator_harness import F32, R, execute, normal, on_chip

from nki_simulator import ConstraintError, StrictError, nisa, nki, nl, record


def test_stream_shuffle_works_in_each_quadrant():
    x = normal(64, 3)
    mask = [(i + 1) % 32 for i in range(32)]
    mask[5] = 255

    def body(out, tile):
        nisa.memset(dst=out, value=0.0)
        nisa.nc_stream_shuffle(dst=out, src=tile, shuffle_mask=mask)

    rows = np.arange(64)
    expected = x[rows - rows % 32 + (rows + 1) % 32]
    expected[5::32] = 0
    assert (execute(body, x, shape=(64, 3)) == expected).all()


def test_a_shuffle_may_read_a_lane_of_the_tile_that_it_writes():
    x = normal(32, 4)

    def body(out, tile):
        nisa.nc_stream_shuffle(dst=tile, src=tile[0:1], shuffle_mask=[0] * 32)
        nisa.tensor_copy(dst=out, src=tile)

    assert (execute(body, x, shape=(32, 4)) == x[0]).all()

    def shifted(out, tile):
        nisa.nc_stream_shuffle(dst=tile[:, 1:3], src=tile[:, 0:2], shuffle_mask=list(range(32)))

    with pytest.raises(
        StrictError, match=r"nc_stream_shuffle dst overlaps src .* at another position"
    ):
        execute(shifted, x, shape=(32, 4))


@pytest.mark.parametrize("rows", [1, 128, 129, 300])
def test_a_matrix_of_any_number_of_rows_is_loaded_transposed(rows):
    x = normal(rows + 2, 7)

    def kernel(x):
        out = nl.ndarray((5, rows), F32, nl.shared_hbm)
        nl.store(out, nl.load_transpose2d(x[2:, 1:6]))
        return out

    for release in ("0.3.0", "0.7.0"):
        assert (record(kernel, x, nki=release, check_source=False).outputs == x[2:, 1:6].T).all()


def test_assignment_writes_by_the_instruction_that_can():
    x = normal(4, 6)

    def kernel(x):
        tile, sums = nl.ndarray((4, 6), F32, nl.sbuf), nl.ndarray((4, 1), F32, nl.sbuf)
        tile[...] = x
        tile[:, 1:2] = 2.0
        sums[...] = nl.sum(tile, axis=1)
        out = nl.ndarray((4, 7), F32, nl.shared_hbm)
        out[:, 0:6] = tile
        out[:, 6] = sums
        return out

    run = record(kernel, x)
    x[:, 1] = 2
    np.testing.assert_allclose(run.outputs, np.c_[x, x.sum(1)], rtol=1e-6)
    copies = ["dma_copy", "memset", "tensor_reduce", "tensor_copy", "dma_copy", "dma_copy"]
    assert [r.op for r in run.trace] == copies


def test_search_finds_the_eight_largest_and_where_they_are():
    x = R.permutation(40).reshape(2, 20).astype(np.float32)

    def body(out, tile):
        top, index = nl.ndarray((2, 8), F32, nl.sbuf), nl.ndarray((2, 8), nl.uint32, nl.sbuf)
        nisa.max8(dst=top, src=tile)
        nisa.nc_find_index8(dst=index, data=tile, vals=top)
        nisa.tensor_copy(dst=out[:, 0:8], src=top)
        nisa.tensor_copy(dst=out[:, 8:16], src=index)
        nisa.nc_match_replace8(dst=out[:, 16:36], data=tile, vals=top, imm=-5.0)

    result = execute(body, x, shape=(2, 36))
    order = np.argsort(-x, 1)[:, :8]
    assert (result[:, :8] == np.take_along_axis(x, order, 1)).all()
    assert (result[:, 8:16] == order).all()
    expected = x.copy()
    np.put_along_axis(expected, order, -5, 1)
    assert (result[:, 16:] == expected).all()


def test_gathers_pick_elements_within_partitions():
    x = normal(16, 12)
    own = R.integers(0, 12, (16, 5)).astype(np.uint32)
    shared = R.integers(0, 12, (16, 2)).astype(np.uint16)

    def body(out, tile, a, b):
        nisa.nc_n_gather(dst=out[:, 0:5], data=tile, indices=a)
        nisa.local_gather(dst=out[:, 5:37], src_buffer=tile, index=b)

    result = execute(body, x, own, shared, shape=(16, 37))
    assert (result[:, :5] == np.take_along_axis(x, own.astype(int), 1)).all()
    assert (result[:, 5:] == x[:, shared.T.reshape(-1)]).all()


def test_sequence_bounds_and_nonzero_indices_are_found():
    ids = np.array([[1, 1, 0, 2, 2, 2]], np.float32)

    def body(out, tile):
        nisa.sequence_bounds(dst=out, segment_ids=tile)

    assert execute(body, ids, shape=(1, 2, 6)).tolist() == [
        [[0, 0, 6, 3, 3, 3], [2, 2, -1, 6, 6, 6]]
    ]

    def count(out, tile):
        nisa.memset(dst=out, value=0)
        nisa.nonzero_with_count(dst=out, src=tile, index_offset=16)

    data = np.array([[0, 1, 1, 0, 0, 1, 0, 0]], np.float32)
    expected = [[17, 18, 21, -1, -1, -1, -1, -1, 3]]
    assert execute(count, data, shape=(1, 9), dtype=nl.int32, target="trn2").tolist() == expected


def test_dma_moves_casts_transposes_and_adds():
    x = normal(6, 8)

    def kernel(a):
        out = nl.ndarray((2, 8, 6), nl.bfloat16, nl.shared_hbm)
        half = nl.ndarray((6, 8), nl.bfloat16, nl.sbuf)
        nisa.dma_copy(dst=half, src=a)
        nisa.dma_transpose(dst=out[0], src=half)
        twice = nl.ndarray((6, 8), nl.bfloat16, nl.private_hbm)
        nisa.dma_compute(dst=twice, srcs=[a, a], reduce_op=nl.add, scales=[1.0, 0.5])
        nisa.dma_transpose(dst=out[1], src=twice)
        return out

    result = record(kernel, x, check_source=False).outputs
    assert (result[0] == x.T.astype(ml_dtypes.bfloat16)).all()
    assert (result[1] == (1.5 * x).T.astype(ml_dtypes.bfloat16)).all()


def test_dma_gathers_and_scatters_rows():
    table, rows = normal(10, 4), np.array([[7], [0], [3]], np.uint32)

    def kernel(data, index):
        picked, scattered = (
            nl.ndarray((3, 4), F32, nl.shared_hbm),
            nl.zeros((10, 4), F32, nl.shared_hbm),
        )
        where = on_chip(index)
        tile = nl.ndarray((3, 4), F32, nl.sbuf)
        nisa.dma_copy(dst=tile, src=data.ap(pattern=[[4, 3], [1, 4]], vector_offset=where))
        nisa.dma_copy(dst=picked, src=tile)
        nisa.dma_copy(dst=scattered.ap(pattern=[[4, 3], [1, 4]], vector_offset=where), src=tile)
        return picked, scattered

    picked, scattered = record(kernel, table, rows, check_source=False).outputs
    assert (picked == table[[7, 0, 3]]).all()
    expected = np.zeros_like(table)
    expected[[7, 0, 3]] = table[[7, 0, 3]]
    assert (scattered == expected).all()


def test_a_register_addresses_memory():
    table = normal(5, 4)

    def kernel(data):
        out = nl.ndarray((1, 4), F32, nl.shared_hbm)
        cell = nl.full((1, 1), 3, nl.int32)
        register = nisa.register_alloc(0)
        nisa.register_load(register, cell)
        nisa.dma_copy(dst=out, src=data.ap(pattern=[[4, 1], [1, 4]], scalar_offset=register))
        return out

    assert (record(kernel, table, check_source=False).outputs == table[3:4]).all()


def test_random_numbers_have_the_right_distribution():
    def body(out):
        nl.random_seed(3)
        ones, kept = nl.ones((100, 100), F32), nl.ndarray((100, 100), F32, nl.sbuf)
        nisa.dropout(dst=kept, data=ones, prob=0.3)
        nisa.tensor_copy(dst=out[:, 0:100], src=kept)
        bits = nl.ndarray((100, 100), nl.uint8, nl.sbuf)
        nisa.rng(dst=bits)
        nisa.tensor_copy(dst=out[:, 100:200], src=bits)

    result = execute(body, shape=(100, 200))
    assert abs(result[:, :100].mean() - 0.7) < 0.02  # 4 standard deviations of 10,000 draws
    assert abs(result[:, 100:].mean() - 127.5) < 3.0


@pytest.mark.parametrize(
    ("engine", "words", "target"), [("gpsimd", 6, "trn2"), ("vector", 24, "trn3")]
)
def test_a_generator_resumes_from_its_state(engine, words, target):
    engine = nisa.engine[engine]

    def body(out):
        state = nl.ndarray((4, words), nl.uint32, nl.sbuf)
        for part in range(2):
            if part == 0:
                nisa.rand_get_state(dst=state, engine=engine)
            else:
                nisa.rand_set_state(src_seeds=state, engine=engine)
            nisa.rng(dst=out[:, part, :])
        nisa.rng(dst=out[:, 2, :])

    first, again, after = execute(body, shape=(4, 3, 50), dtype=nl.int32, target=target).transpose(
        1, 0, 2
    )
    assert (first == again).all() and (first != after).any()


def halves(x):
    """Each core doubles half of x, swaps it with the other's,
    and writes the sum of both to its row.
    """
    rows, columns = x.shape
    core = nl.program_id(0)
    half = columns // 2
    mine, theirs = nl.ndarray((rows, half), F32, nl.sbuf), nl.ndarray((rows, half), F32, nl.sbuf)
    nisa.dma_copy(dst=mine, src=x[:, core * half : (core + 1) * half])
    nisa.tensor_scalar(dst=mine, data=mine, op0=nl.multiply, operand0=2.0)
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.tensor_tensor(dst=mine, data1=mine, data2=theirs, op=nl.add)
    shared = nl.ndarray((2, rows, half), F32, nl.shared_hbm)
    out = nl.ndarray((rows, half), F32, nl.shared_hbm)
    nisa.dma_copy(dst=shared[core], src=mine)
    nisa.core_barrier(data=shared, cores=(0, 1))
    if core == 0:
        nisa.dma_copy(dst=theirs, src=shared[1])
        nisa.dma_copy(dst=out, src=theirs)
    return out


def test_two_cores_exchange_tiles_and_share_hbm():
    x = normal(4, 6)
    run = record(nki.jit(halves)[2], x, target="trn2", check_source=False)
    assert np.allclose(run.outputs, 2 * (x[:, :3] + x[:, 3:]), rtol=1e-6)


def test_a_core_that_fails_ends_both_cores():
    def broken(x):
        if nl.program_id(0) == 1:
            nl.ndarray((4,), F32, nl.sbuf)
        nisa.core_barrier(data=x, cores=(0, 1))

    with pytest.raises(ConstraintError, match="at least 2 dimensions"):
        record(nki.jit(broken)[2], normal(4, 4), target="trn2", check_source=False)


def test_core_instructions_need_two_cores():
    def alone(x):
        nisa.core_barrier(data=x, cores=(0, 1))

    with pytest.raises(ConstraintError, match="needs two cores; launch the kernel with kernel"):
        record(alone, normal(4, 4), target="trn2", check_source=False)
    with pytest.raises(ConstraintError, match="core_barrier needs NeuronCore-v3"):
        record(alone, normal(4, 4), check_source=False)
