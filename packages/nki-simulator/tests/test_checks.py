"""Every check of the simulator, violated once: the type of the exception and the key phrase of its
message.

The checks of the Python subset are in test_subset.py, those of releases in test_releases.py.
"""

import numpy as np
import pytest
from simulator_harness import F32, attempt, ones, product, psum, sbuf, write_output

from nki_simulator import (
    ConstraintError,
    NkiValidationError,
    StrictError,
    nisa,
    nki,
    nl,
    record,
)

HALF, EIGHT = nl.bfloat16, nl.float8_e4m3fn


def issue(instruction, **operands):
    """Issue an instruction whose operands, unless they are given, are tiles [4, 4] of ones."""
    own = {
        "nc_matmul": lambda: {"dst": psum(4, 4), "stationary": ones(4, 4), "moving": ones(4, 4)},
        "tensor_tensor": lambda: {"data1": ones(4, 4), "data2": ones(4, 4), "op": nl.add},
        "tensor_scalar": lambda: {"data": ones(4, 4), "op0": nl.add, "operand0": 1.0},
        "tensor_copy": lambda: {"src": ones(4, 4)},
        "dma_copy": lambda: {"src": ones(4, 4)},
        "activation": lambda: {"op": nl.exp, "data": ones(4, 4)},
        "tensor_reduce": lambda: {"op": nl.add, "data": ones(4, 4), "axis": 1},
    }.get(instruction, dict)()
    getattr(nisa, instruction)(**({"dst": sbuf(4, 4)} | own | operands))


def filled(value, *shape, dtype=F32, name="x"):
    tile = nl.ndarray(shape, dtype, nl.sbuf, name=name)
    nisa.memset(dst=tile, value=value)
    return tile


def bitwise_with_arithmetic():
    tile = ones(4, 4, dtype=nl.int32)
    issue(
        "tensor_scalar",
        dst=tile,
        data=tile,
        op0=nl.bitwise_and,
        operand0=1,
        op1=nl.add,
        operand1=1.0,
    )


def gather_out_of_bounds():
    rows = filled(7, 2, 1, dtype=nl.uint32)
    table = nl.shared_constant(np.ones((4, 4), np.float32))
    issue("dma_copy", dst=sbuf(2, 4), src=table.ap(pattern=[[4, 2], [1, 4]], vector_offset=rows))


def shift_in_place():
    tile = filled(1.0, 4, 8)
    issue("tensor_copy", dst=tile[:, 1:8], src=tile[:, 0:7])


def broadcast_of_the_tile_that_is_written():
    tile = ones(4, 8)
    issue("tensor_tensor", dst=tile, data1=tile, data2=tile[:, 0:1].broadcast(1, 8))


def scan(dst, data0, data1):
    nisa.tensor_tensor_scan(
        dst=dst, data0=data0, data1=data1, initial=0.0, op0=nl.multiply, op1=nl.add
    )


def scan_in_place():
    tile = ones(4, 8)
    scan(tile, ones(4, 8), tile)


def five_free_dimensions():
    view = ones(2, 512).ap(pattern=[[512, 2], [200, 2], [90, 2], [40, 2], [10, 2], [2, 2]])
    issue("tensor_copy", dst=sbuf(2, 32), src=view)


def accumulation_on_partly_written_psum():
    tile = psum(4, 8)
    issue("nc_matmul", dst=tile[:, 0:4])
    issue("nc_matmul", dst=tile, moving=ones(4, 8))


def accumulation_on_a_copy():
    tile = psum(4, 4)
    issue("tensor_copy", dst=tile)
    issue("nc_matmul", dst=tile)


def accumulation_where_a_copy_wrote_a_part():
    tile = product(4, 8)
    issue("tensor_copy", dst=tile[:, 0:4])
    issue("nc_matmul", dst=tile, moving=ones(4, 8))


SMALL = {"tile_position": (0, 0), "tile_size": (32, 128)}
# key phrase, what violates the check, and the target unless that is trn1
REFUSED = (
    # memory and shapes
    ("SBUF and PSUM tensors must have at least 2 dimensions", lambda: sbuf(128)),
    (
        "tensor_copy src partition dimension 129 exceeds maximum 128",
        lambda: issue("tensor_copy", dst=sbuf(129, 4), src=sbuf(129, 4)),
    ),
    (
        "dma_copy requires src and dst to have the same number of elements",
        lambda: issue("dma_copy", src=ones(4, 3)),
    ),
    (
        r"dma_copy src must be in \['sbuf', 'private_hbm', 'shared_hbm'\], got psum",
        lambda: issue("dma_copy", src=product(4, 4)),
    ),
    (
        r"must be in \['sbuf', 'psum'\], got shared_hbm",
        lambda: issue("tensor_copy", src=nl.ndarray((4, 4), F32, nl.shared_hbm)),
    ),
    ("index range .0, 127. exceed dimension size of 12", lambda: sbuf(4, 12)[:, 0:128]),
    (
        "Out-of-bound access for tensor `x` on dimension 1: index 3 exceed dimension size of 3",
        lambda: filled(0.0, 4, 3)[:, 3],
    ),
    (
        "ap.. pattern has invalid partition stride. Partition step 3 must equal tensor free "
        "dimension size 8",
        lambda: sbuf(4, 8).ap(pattern=[[3, 4], [1, 8]]),
    ),
    ("reaches element 8 of 8", lambda: sbuf(4, 8).ap(pattern=[[8, 4], [1, 8]], offset=1)),
    (
        "tensor_copy src has dtype float4_e2m1fn_x4, which is copied by DMA alone",
        lambda: issue("tensor_copy", src=sbuf(4, 4, dtype=nl.float4_e2m1fn_x4)),
    ),
    ("indirect access out of bounds: element 28 of 16", gather_out_of_bounds),
    (
        "dma_transpose dst shape must be .8, 4., got .4, 8.",
        lambda: issue("dma_transpose", dst=sbuf(4, 8), src=ones(4, 8)),
    ),
    # operands
    (
        "engine must be one of vector, gpsimd, got scalar",
        lambda: issue("tensor_tensor", engine=nisa.engine.scalar),
    ),
    (
        r"affine_select on_true_tile must be in \['sbuf'\], got psum",
        lambda: issue(
            "affine_select",
            pattern=[[1, 4]],
            channel_multiplier=1,
            on_true_tile=product(4, 4),
            on_false_value=0.0,
        ),
    ),
    (
        "requires data1 and data2 to have the same partitions and elements per partition",
        lambda: issue("tensor_tensor", data2=ones(4, 1)),
    ),
    (
        r"operand0 must be a number or a tile of shape \(4, 1\), got \(4, 2\)",
        lambda: issue("tensor_scalar", operand0=ones(4, 2)),
    ),
    ("must both be bitvec or both arithmetic", bitwise_with_arithmetic),
    ("needs integer tensors, got float32", lambda: issue("tensor_tensor", op=nl.bitwise_xor)),
    (
        "memset value must match the dtype: int32 needs an int, got 2.0",
        lambda: filled(2.0, 4, 4, dtype=nl.int32),
    ),
    ("memset value must match the dtype: float32 needs a float, got 2", lambda: filled(2, 4, 4)),
    (
        "reduce_op must be nl.add",
        lambda: issue(
            "activation",
            reduce_op=nl.maximum,
            reduce_res=sbuf(4, 1),
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        ),
    ),
    (
        "cannot reduce axis 0, the partition axis",
        lambda: issue("tensor_reduce", dst=sbuf(1, 4), axis=0),
    ),
    (
        "must be the last contiguous free axes",
        lambda: issue("tensor_reduce", data=ones(4, 2, 4), axis=1),
    ),
    (
        "not a legal reduction operator",
        lambda: issue("tensor_reduce", dst=sbuf(4, 1), op=nl.greater),
    ),
    ("pattern .* has 3 elements, dst has 4 per partition", lambda: issue("iota", pattern=[[1, 3]])),
    (
        "shuffle_mask must have 32 entries",
        lambda: issue("nc_stream_shuffle", dst=sbuf(32, 4), src=ones(32, 4), shuffle_mask=[0] * 31),
    ),
    (
        "rand_set_state src_seeds must be uint32 with 6 elements per partition",
        lambda: nisa.rand_set_state(src_seeds=sbuf(4, 5, dtype=nl.uint32)),
        "trn2",
    ),
    # the Tensor engine
    (
        r"nc_matmul stationary must be in \['sbuf'\], got psum",
        lambda: issue("nc_matmul", stationary=product(4, 4)),
    ),
    (r"dst must be in \['psum'\], got sbuf", lambda: issue("nc_matmul", dst=sbuf(4, 4))),
    (
        "Matmul contraction dimension 64 exceeds the tile's rows=32",
        lambda: issue("nc_matmul", stationary=ones(64, 4), moving=ones(64, 4), **SMALL),
        "trn2",
    ),
    (
        "Matmul contraction dimension 129 exceeds pmax=128",
        lambda: issue("nc_matmul", stationary=sbuf(129, 4), moving=sbuf(129, 4)),
    ),
    (
        "Matmul stationary free dimension 129 exceeds gemm_stationary_fmax=128",
        lambda: issue("nc_matmul", dst=psum(128, 4), stationary=ones(4, 129)),
    ),
    (
        r"Matmul contraction dimension mismatch: stationary\[0\]=4 != moving\[0\]=5",
        lambda: issue("nc_matmul", moving=ones(5, 4)),
    ),
    (
        "must both be float32/tfloat32 or neither",
        lambda: issue("nc_matmul", moving=ones(4, 4, dtype=HALF)),
    ),
    (
        "stationary dtype must be float8_e4m3, .* or float32, got int8",
        lambda: issue(
            "nc_matmul", stationary=ones(4, 4, dtype=nl.int8), moving=ones(4, 4, dtype=nl.int8)
        ),
    ),
    (
        "tile_position and tile_size must both be given",
        lambda: issue("nc_matmul", tile_size=(64, 128)),
    ),
    ("tile_size .32, 128. must be of 64, 128 on trn1", lambda: issue("nc_matmul", **SMALL)),
    (
        "tile_position .32, 0. must be multiples of tile_size",
        lambda: issue("nc_matmul", tile_position=(32, 0), tile_size=(64, 128)),
    ),
    (
        "perf_mode needs NeuronCore-v3",
        lambda: issue("nc_matmul", perf_mode=nisa.matmul_perf_mode.double_row),
    ),
    (
        "takes up to 32 x 32, got 64 x 64",
        lambda: issue(
            "nc_transpose", dst=sbuf(64, 64), data=ones(64, 64), engine=nisa.engine.vector
        ),
    ),
    (
        "nc_transpose dst dtype must be float32, got bfloat16",
        lambda: issue("nc_transpose", dst=psum(64, 64, dtype=HALF), data=ones(64, 64)),
    ),
)
# the same, and the first target that allows it
UNTIL = (
    ("bias must be a .P, 1. tile on gen2", lambda: issue("activation", bias=1.0), "trn1", "trn2"),
    (
        "tensor_copy on the Scalar engine .use activation with op=nl.copy. needs NeuronCore-v3",
        lambda: issue("tensor_copy", engine=nisa.engine.scalar),
        "trn1",
        "trn2",
    ),
    (
        "hwdge needs NeuronCore-v3",
        lambda: issue("dma_copy", dge_mode=nisa.dge_mode.hwdge),
        "trn1",
        "trn2",
    ),
    ("priority needs NeuronCore-v4", lambda: issue("dma_copy", priority=1), "trn2", "trn3"),
    (
        "rand_get_state on the gpsimd engine needs NeuronCore-v3",
        lambda: issue("rand_get_state", dst=sbuf(4, 6, dtype=nl.uint32)),
        "trn1",
        "trn2",
    ),
    (
        "Matmul moving free dimension 513 exceeds gemm_moving_fmax=512",
        lambda: issue("nc_matmul", dst=psum(4, 513), moving=ones(4, 513)),
        "trn2",
        "trn3",
    ),
    (
        "nc_matmul dst dtype must be float32 on gen2, got bfloat16",
        lambda: issue("nc_matmul", dst=psum(4, 4, dtype=HALF)),
        "trn1",
        "trn3",
    ),
    (
        "float8_e4m3fn needs NeuronCore-v4",
        lambda: issue(
            "nc_matmul", stationary=ones(4, 4, dtype=EIGHT), moving=ones(4, 4, dtype=EIGHT)
        ),
        "trn2",
        "trn3",
    ),
)
# what only the compiler or the chip would refuse; strict=False drops these checks
STRICT = (
    ("sbuf capacity exceeded: tensor", lambda: sbuf(1, 49 * 1024)),
    (
        "starts at partition 16; 16 partitions may start at 0 or 32 or 64 or 96 only",
        lambda: issue("tensor_copy", dst=sbuf(16, 4), src=ones(128, 4)[16:32]),
    ),
    (
        "starts at partition 32; 64 partitions may start at 0 or 64 only",
        lambda: issue("tensor_copy", dst=sbuf(64, 4), src=ones(128, 4)[32:96]),
    ),
    (
        "starts at partition 32; 65 partitions may start at 0 only",
        lambda: issue("tensor_copy", dst=sbuf(65, 4), src=ones(128, 4)[32:97]),
    ),
    (
        r"load of `t\d+` \(129,\) takes a partition for each element .*give it as \(1, 129\)",
        lambda: nl.load(nl.zeros((129,), F32, nl.shared_hbm)),
    ),
    ("access pattern has 5 free dimensions, the limit is 4", five_free_dimensions),
    (
        "tensor_tensor data1 and data2 cannot both be in psum",
        lambda: issue("tensor_tensor", data1=product(4, 4), data2=product(4, 4)),
    ),
    (
        "scalar_tensor_tensor data and operand1 cannot both be in psum",
        lambda: issue(
            "scalar_tensor_tensor",
            data=product(4, 4),
            op0=nl.multiply,
            operand0=2.0,
            op1=nl.add,
            operand1=product(4, 4),
        ),
    ),
    (
        "tensor_tensor_scan data0 and data1 cannot both be in psum",
        lambda: scan(sbuf(4, 4), product(4, 4), product(4, 4)),
    ),
    (
        "psum, which the GpSimd engine cannot access",
        lambda: issue("tensor_scalar", data=product(4, 4), op0=nl.power, operand0=2.0),
    ),
    (
        "runs on GpSimd for rsqrt and power alone, got",
        lambda: issue("tensor_scalar", engine=nisa.engine.gpsimd),
    ),
    (
        "operand0 dtype must be float32, got bfloat16",
        lambda: issue("tensor_scalar", operand0=ones(4, 1, dtype=HALF)),
    ),
    (
        r"nl.log is valid for inputs in .*got 0 at \[0, 0\]",
        lambda: issue("activation", op=nl.log, data=filled(0.0, 4, 4)),
    ),
    (
        r"nl.log is valid for inputs in .*got 3.68\d+e\+19 at \[0, 0\]",
        lambda: issue("activation", op=nl.log, data=filled(2.0**65, 4, 4)),
    ),
    (
        r"nl.rsqrt is valid for inputs in .*got 3.16\d+e\+29 at \[0, 0\]",
        lambda: issue("activation", op=nl.rsqrt, data=filled(2.0**98, 4, 4)),
    ),
    ("leaves the range of int32", lambda: issue("iota", pattern=[[2**30, 4]])),
    ("dst overlaps src of `x` at another position", shift_in_place),
    ("dst overlaps data2 of .* at another position", broadcast_of_the_tile_that_is_written),
    ("tensor_tensor_scan dst overlaps data1 of .* in place", scan_in_place),
    ("which no instruction has written", lambda: issue("tensor_copy", src=sbuf(4, 4))),
    # the Tensor engine
    (
        "starts at partition 64, but column 0 of the array writes partition 0",
        lambda: issue("nc_matmul", dst=psum(128, 4)[64:68]),
    ),
    ("accumulates onto uninitialized PSUM", lambda: issue("nc_matmul", accumulate=True)),
    ("only partly written", accumulation_on_partly_written_psum),
    (
        "is_stationary_onezero is declared, but stationary holds 2",
        lambda: issue("nc_matmul", stationary=filled(2.0, 4, 4), is_stationary_onezero=True),
    ),
    (
        "is_moving_onezero is declared, but moving holds 2",
        lambda: issue("nc_matmul", moving=filled(2.0, 4, 4), is_moving_onezero=True),
    ),
    (
        r"holds inf at \[0, 0\]; on gen2 the Tensor engine multiplies by an identity",
        lambda: issue("nc_transpose", dst=psum(64, 64), data=filled(float("inf"), 64, 64)),
    ),
)
STRICT_UNTIL = (
    ("a non-matmul instruction wrote last", accumulation_on_a_copy, "trn2", "trn3"),
    ("a non-matmul instruction wrote last", accumulation_where_a_copy_wrote_a_part, "trn2", "trn3"),
    (
        "spans psum banks 0 to 1",
        lambda: issue("nc_matmul", dst=psum(4, 1024)[:, 256:768], moving=ones(4, 512)),
        "trn2",
        "trn3",
    ),
    (
        "nc_transpose of bfloat16 on the Tensor engine",
        lambda: issue("nc_transpose", dst=psum(64, 64, dtype=HALF), data=ones(64, 64, dtype=HALF)),
        "trn1",
        "trn2",
    ),
)
WRONG_TYPE = (
    ("unsupported operand", lambda: ones(4, 4) + ones(4, 4)),
    ("unexpected keyword argument 'mask'", lambda: issue("tensor_copy", mask=None)),
    ("must be a tensor, got float", lambda: issue("tensor_copy", src=1.0)),
    ("must be an nl operator such as nl.add", lambda: issue("tensor_tensor", op=np.add)),
    ("must be an ALU operator, which nl.exp is not", lambda: issue("tensor_tensor", op=nl.exp)),
    (
        "must be an ALU operator, which nl.divide is not",
        lambda: issue("tensor_tensor", op=nl.divide),
    ),
    ("activation op must be an activation function", lambda: issue("activation", op=nl.add)),
    ("kernel output 0 must be a tensor, got int", lambda: 3),
)


@pytest.mark.parametrize("case", [*REFUSED, *UNTIL], ids=lambda case: case[0])
def test_what_awss_simulator_refuses_is_refused(case):
    message, body, target = (*case, "trn1")[:3]
    with pytest.raises(ConstraintError, match=message) as caught:
        attempt(body, target=target)
    assert not isinstance(caught.value, StrictError), (
        "AWS's simulator has this check; it is not a strict one"
    )


@pytest.mark.parametrize("case", [*STRICT, *STRICT_UNTIL], ids=lambda case: case[0])
def test_what_the_chip_would_refuse_is_refused_unless_checks_are_not_strict(case):
    message, body, target = (*case, "trn1")[:3]
    with pytest.raises(StrictError, match=message):
        attempt(body, target=target)
    attempt(body, target=target, strict=False)


@pytest.mark.parametrize("case", [*UNTIL, *STRICT_UNTIL], ids=lambda case: case[0])
def test_a_later_generation_allows(case):
    attempt(case[1], target=case[3])


@pytest.mark.parametrize("case", WRONG_TYPE, ids=lambda case: case[0])
def test_a_value_of_the_wrong_type_is_refused(case):
    with pytest.raises(TypeError, match=case[0]):
        attempt(case[1])


def test_a_result_of_another_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"cannot reshape the result of shape \(4, 4\) into \(4, 5\)"
    ):
        attempt(lambda: issue("nc_matmul", dst=psum(4, 5)))


@pytest.mark.parametrize(
    ("op", "operands", "target", "before"),
    [
        (
            "nc_matmul_mx",
            ("dst", "stationary", "moving", "stationary_scale", "moving_scale"),
            "trn3",
            "trn2",
        ),
        ("quantize_mx", ("dst", "src", "dst_scale"), "trn3", "trn2"),
        ("topk", ("val_dst", "idx_dst", "src", "n"), "trn1", None),
    ],
)
def test_what_is_known_and_not_simulated_says_so(op, operands, target, before):
    def kernel():
        getattr(nisa, op)(**dict.fromkeys(operands, ones(16, 16)))

    with pytest.raises(NotImplementedError, match=f"{op} is not simulated; "):
        attempt(kernel, target=target)
    if before:
        with pytest.raises(ConstraintError, match=f"{op} needs NeuronCore-v4"):
            attempt(kernel, target=before)


# Whole kernels: what is live at once, and outputs


def nine_live_banks():
    tiles = [product(4, 512) for _ in range(9)]
    for tile in tiles:
        nisa.tensor_copy(dst=sbuf(4, 512), src=tile)
    return write_output()


def sbuf_overflow_of_live_tiles():
    first, second = ones(2, 25 * 1024), ones(2, 25 * 1024)
    nisa.tensor_tensor(dst=first, data1=first, data2=second, op=nl.add)
    return write_output()


def output_with_a_hole():
    out = nl.ndarray((4, 1), F32, nl.shared_hbm)
    nisa.dma_copy(dst=out[0:2], src=ones(2, 1))
    return out


def output_from_unwritten_memory():
    tile, out = sbuf(2, 1), nl.ndarray((2, 1), F32, nl.shared_hbm)
    nisa.memset(dst=tile[0:1], value=0.0)
    copied = sbuf(2, 1)
    nisa.tensor_copy(dst=copied, src=tile)
    nisa.dma_copy(dst=out, src=copied)
    return out


inner = nki.jit(write_output)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (nine_live_banks, "psum capacity exceeded: 9 banks"),
        (sbuf_overflow_of_live_tiles, "sbuf capacity exceeded: 204800 bytes per partition live"),
        (output_with_a_hole, r"is unwritten at \[2, 0\] \(2 of 4 elements\)"),
        (
            output_from_unwritten_memory,
            "is NaN at .1, 0. and memory was read before .*: .*tensor_copy src",
        ),
        (lambda: ones(4, 4), "must be in shared_hbm, got sbuf"),
        (lambda: inner(), "is called inside a kernel; leave helpers undecorated"),
    ],
)
def test_a_whole_kernel_is_refused(kernel, message):
    with pytest.raises(StrictError, match=message):
        attempt(kernel)


def test_elementwise_instructions_work_in_place():
    def body():
        tile, out = ones(4, 8), nl.ndarray((4, 8), F32, nl.shared_hbm)
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=tile[:, 0:1])
        nisa.tensor_copy(dst=tile[:, 0:8:2], src=tile[:, 1:8:2])
        nisa.dma_copy(dst=out, src=tile)
        return out

    assert (attempt(body) == 4).all()


def test_a_launch_has_one_core_or_two_and_trn1_has_one():
    with pytest.raises(NkiValidationError, match="NKI only supports LNC 1 or 2, but got 4"):
        inner[4]
    with pytest.raises(NkiValidationError, match="LNC 2 is not supported on trn1"):
        record(inner[2], target="trn1")
    assert inner[1]() == 1.0


def test_a_kernel_takes_lists_of_integers_alone():
    for given in ([1.0, 2.0], [], [True], [np.ones(1)]):
        with pytest.raises(StrictError, match="argument x is a list"):
            attempt(lambda x: write_output(), given)
    assert attempt(lambda x: write_output(), [1, 2]) is not None


def test_a_tile_outside_a_kernel_is_refused():
    with pytest.raises(RuntimeError, match="run inside a kernel"):
        sbuf(4, 4)


def test_an_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="target 'trn9' is not one of trn1, trn2, trn3"):
        attempt(write_output, target="trn9")


def test_target_is_that_of_neurons_environment_variable(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen3")
    assert record(write_output, check_source=False).target.name == "trn2"
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    assert record(write_output, check_source=False).target.name == "trn1"
