"""Every check of the simulator, violated once: the type of the exception and the key phrase of its message.

The Tensor engine's checks are in test_matmul.py, those of the Python subset in test_subset.py.
"""

import numpy as np
import pytest

from delta_trn.nki_kernels.simulator import (
    ConstraintError,
    NkiValidationError,
    StrictError,
    nisa,
    nki,
    nl,
    record,
)
from tests.support.simulator_harness import (
    F32,
    Refusals,
    assert_refused,
    attempt,
    ones,
    product,
    sbuf,
    write_output,
)

CASES = Refusals()


# AWS: memory and shapes


@CASES.refuses("SBUF and PSUM tensors must have at least 2 dimensions")
def one_dimensional_tile():
    sbuf(128)


@CASES.refuses("tensor_copy src partition dimension 129 exceeds maximum 128")
def too_many_partitions_in_an_engine():
    nisa.tensor_copy(dst=sbuf(129, 4), src=sbuf(129, 4))


@CASES.refuses("dma_copy requires src and dst to have the same number of elements")
def dma_of_another_size():
    nisa.dma_copy(dst=sbuf(4, 4), src=ones(4, 3))


@CASES.refuses(r"dma_copy src must be in \['sbuf', 'private_hbm', 'shared_hbm'\], got psum")
def dma_from_psum():
    nisa.dma_copy(dst=sbuf(4, 4), src=product(4, 4))


@CASES.refuses(r"must be in \['sbuf', 'psum'\], got shared_hbm")
def engine_reads_hbm():
    nisa.tensor_copy(dst=sbuf(4, 4), src=nl.ndarray((4, 4), F32, nl.shared_hbm))


@CASES.refuses("index range .0, 127. exceed dimension size of 12")
def slice_out_of_bounds():
    nl.ndarray((4, 12), F32, nl.sbuf, name="x")[:, 0:128]


@CASES.refuses("Out-of-bound access for tensor `x` on dimension 1: index 3 exceed dimension size of 3")
def index_out_of_bounds():
    nl.ndarray((4, 3), F32, nl.sbuf, name="x")[:, 3]


@CASES.refuses(
    "ap.. pattern has invalid partition stride. Partition step 3 must equal tensor free dimension size 8"
)
def partition_stride_of_a_pattern():
    sbuf(4, 8).ap(pattern=[[3, 4], [1, 8]])


@CASES.refuses("reaches element 8 of 8")
def pattern_that_leaves_its_partition():
    sbuf(4, 8).ap(pattern=[[8, 4], [1, 8]], offset=1)


@CASES.refuses("unsupported operand", TypeError)
def operator_sugar():
    return ones(4, 4) + ones(4, 4)


@CASES.refuses("unexpected keyword argument 'mask'", TypeError)
def keyword_of_another_release():
    nisa.tensor_copy(dst=sbuf(4, 4), src=ones(4, 4), mask=None)


@CASES.refuses("must be a tensor, got float", TypeError)
def number_for_a_tensor():
    nisa.tensor_copy(dst=sbuf(4, 4), src=1.0)


@CASES.refuses("must be an nl operator such as nl.add", TypeError)
def numpy_function_for_an_operator():
    nisa.tensor_tensor(dst=sbuf(4, 4), data1=ones(4, 4), data2=ones(4, 4), op=np.add)


@CASES.refuses("must be an ALU operator, which nl.exp is not", TypeError)
def activation_function_on_the_vector_engine():
    nisa.tensor_tensor(dst=sbuf(4, 4), data1=ones(4, 4), data2=ones(4, 4), op=nl.exp)


@CASES.refuses("must be an ALU operator, which nl.divide is not", TypeError)
def division():
    nisa.tensor_tensor(dst=sbuf(4, 4), data1=ones(4, 4), data2=ones(4, 4), op=nl.divide)


@CASES.refuses("tensors are not assigned to", TypeError)
def assignment_to_a_slice():
    sbuf(4, 4)[:, 0] = 1.0


# Banks and capacity


@CASES.refuses("psum capacity exceeded: 9 banks", StrictError)
def nine_live_banks():
    tiles = []
    for _ in range(9):
        tiles.append(product(4, 512))
    for tile in tiles:
        nisa.tensor_copy(dst=sbuf(4, 512), src=tile)
    return write_output()


@CASES.refuses("sbuf capacity exceeded: 204800 bytes per partition live", StrictError)
def sbuf_overflow_of_live_tiles():
    first, second = ones(2, 25 * 1024), ones(2, 25 * 1024)
    nisa.tensor_tensor(dst=first, data1=first, data2=second, op=nl.add)
    return write_output()


@CASES.refuses("sbuf capacity exceeded: tensor", StrictError)
def one_tile_larger_than_sbuf():
    sbuf(1, 49 * 1024)


# Partitions, engines, memories


@CASES.refuses("starts at partition 16; 16 partitions may start at 0 or 32 or 64 or 96 only", StrictError)
def partition_start_of_a_small_tile():
    nisa.tensor_copy(dst=sbuf(16, 4), src=ones(128, 4)[16:32])


@CASES.refuses("starts at partition 32; 64 partitions may start at 0 or 64 only", StrictError)
def partition_start_of_half_a_tile():
    nisa.tensor_copy(dst=sbuf(64, 4), src=ones(128, 4)[32:96])


@CASES.refuses("starts at partition 32; 65 partitions may start at 0 only", StrictError)
def partition_start_of_a_large_tile():
    nisa.tensor_copy(dst=sbuf(65, 4), src=ones(128, 4)[32:97])


@CASES.refuses("access pattern has 5 free dimensions, the limit is 4", StrictError)
def five_free_dimensions():
    view = ones(2, 512).ap(pattern=[[512, 2], [200, 2], [90, 2], [40, 2], [10, 2], [2, 2]])
    nisa.tensor_copy(dst=sbuf(2, 32), src=view)


@CASES.refuses("cannot both be in psum", StrictError)
def two_psum_inputs():
    nisa.tensor_tensor(dst=sbuf(4, 4), data1=product(4, 4), data2=product(4, 4), op=nl.add)


@CASES.refuses("cannot both be in psum", StrictError)
def two_psum_inputs_of_a_fused_instruction():
    nisa.scalar_tensor_tensor(
        dst=sbuf(4, 4), data=product(4, 4), op0=nl.multiply, operand0=2.0, op1=nl.add, operand1=product(4, 4)
    )


@CASES.refuses("cannot both be in psum", StrictError)
def two_psum_inputs_of_a_scan():
    nisa.tensor_tensor_scan(
        dst=sbuf(4, 4), data0=product(4, 4), data1=product(4, 4), initial=0.0, op0=nl.multiply, op1=nl.add
    )


@CASES.refuses(r"must be in \['sbuf'\], got psum")
def affine_select_on_psum():
    nisa.affine_select(
        dst=sbuf(4, 4), pattern=[[1, 4]], channel_multiplier=1, on_true_tile=product(4, 4), on_false_value=0.0
    )


@CASES.refuses("psum, which the GpSimd engine cannot access", StrictError)
def power_on_psum():
    nisa.tensor_scalar(dst=sbuf(4, 4), data=product(4, 4), op0=nl.power, operand0=2.0)


@CASES.refuses("runs on GpSimd for rsqrt and power alone, got", StrictError)
def a_sum_on_gpsimd():
    nisa.tensor_scalar(dst=sbuf(4, 4), data=ones(4, 4), op0=nl.add, operand0=1.0, engine=nisa.engine.gpsimd)


@CASES.refuses("engine must be one of vector, gpsimd, got scalar")
def tensor_tensor_on_the_scalar_engine():
    nisa.tensor_tensor(
        dst=sbuf(4, 4), data1=ones(4, 4), data2=ones(4, 4), op=nl.add, engine=nisa.engine.scalar
    )


@CASES.refuses("requires data1 and data2 to have the same partitions and elements per partition")
def implicit_broadcasting():
    nisa.tensor_tensor(dst=sbuf(4, 4), data1=ones(4, 4), data2=ones(4, 1), op=nl.add)


@CASES.refuses(r"operand0 must be a number or a tile of shape \(4, 1\), got \(4, 2\)")
def wide_scalar_operand():
    nisa.tensor_scalar(dst=sbuf(4, 4), data=ones(4, 4), op0=nl.add, operand0=ones(4, 2))


@CASES.refuses("operand0 dtype must be float32, got bfloat16", StrictError)
def scalar_operand_in_bfloat16():
    nisa.tensor_scalar(dst=sbuf(4, 4), data=ones(4, 4), op0=nl.add, operand0=ones(4, 1, dtype=nl.bfloat16))


@CASES.refuses("must both be bitvec or both arithmetic")
def bitwise_with_arithmetic():
    tile = ones(4, 4, dtype=nl.int32)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_and, operand0=1, op1=nl.add, operand1=1.0)


@CASES.refuses("needs integer tensors, got float32")
def bitwise_on_floats():
    nisa.tensor_tensor(dst=sbuf(4, 4), data1=ones(4, 4), data2=ones(4, 4), op=nl.bitwise_xor)


@CASES.refuses("writes through a broadcast view")
def write_through_a_broadcast():
    nisa.memset(dst=sbuf(4, 1).broadcast(1, 4), value=0.0)


@CASES.refuses("memset value must match the dtype: int32 needs an int, got 2.0")
def float_into_an_integer_tile():
    nisa.memset(dst=sbuf(4, 4, dtype=nl.int32), value=2.0)


@CASES.refuses("memset value must match the dtype: float32 needs a float, got 2")
def integer_into_a_float_tile():
    nisa.memset(dst=sbuf(4, 4), value=2)


# Rules of gen2


@CASES.refuses("bias must be a .P, 1. tile on gen2")
def numeric_bias():
    nisa.activation(dst=sbuf(4, 4), op=nl.exp, data=ones(4, 4), bias=1.0)


@CASES.refuses("tensor_copy on the Scalar engine .use activation with op=nl.copy. needs NeuronCore-v3")
def copy_on_the_scalar_engine():
    nisa.tensor_copy(dst=sbuf(4, 4), src=ones(4, 4), engine=nisa.engine.scalar)


@CASES.refuses("hwdge needs NeuronCore-v3")
def hardware_descriptors_on_trn1():
    nisa.dma_copy(dst=sbuf(4, 4), src=ones(4, 4), dge_mode=nisa.dge_mode.hwdge)


@CASES.refuses("priority needs NeuronCore-v4", target="trn2")
def dma_priority_before_gen4():
    nisa.dma_copy(dst=sbuf(4, 4), src=ones(4, 4), priority=1)


@CASES.refuses("rand_get_state on the gpsimd engine needs NeuronCore-v3")
def generator_state_on_trn1():
    nisa.rand_get_state(dst=sbuf(4, 6, dtype=nl.uint32))


@CASES.refuses("rand_set_state src_seeds must be uint32 with 6 elements per partition", target="trn2")
def generator_state_of_another_size():
    nisa.rand_set_state(src_seeds=sbuf(4, 5, dtype=nl.uint32))


@CASES.refuses("nc_matmul_mx needs NeuronCore-v4", target="trn2")
def quantized_product_before_gen4():
    x = ones(4, 4)
    nisa.nc_matmul_mx(dst=product(4, 4), stationary=x, moving=x, stationary_scale=x, moving_scale=x)


# Activation and reductions


@CASES.refuses(r"nl.log is valid for inputs in .*got 0 at \[0, 0\]", StrictError)
def activation_outside_of_its_range():
    tile = sbuf(4, 4)
    nisa.memset(dst=tile, value=0.0)
    nisa.activation(dst=tile, op=nl.log, data=tile)


@CASES.refuses("activation op must be an activation function", TypeError)
def alu_operator_as_activation():
    nisa.activation(dst=sbuf(4, 4), op=nl.add, data=ones(4, 4))


@CASES.refuses("reduce_op must be nl.add")
def activation_that_reduces_with_max():
    nisa.activation(
        dst=sbuf(4, 4), op=nl.exp, data=ones(4, 4), reduce_op=nl.maximum, reduce_res=sbuf(4, 1),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip


@CASES.refuses("cannot reduce axis 0, the partition axis")
def reduction_over_partitions():
    nisa.tensor_reduce(dst=sbuf(1, 4), op=nl.add, data=ones(4, 4), axis=0)


@CASES.refuses("must be the last contiguous free axes")
def reduction_over_a_middle_axis():
    nisa.tensor_reduce(dst=sbuf(4, 4), op=nl.add, data=ones(4, 2, 4), axis=1)


@CASES.refuses("not a legal reduction operator")
def reduction_with_a_comparison():
    nisa.tensor_reduce(dst=sbuf(4, 1), op=nl.greater, data=ones(4, 4), axis=1)


@CASES.refuses("pattern .* has 3 elements, dst has 4 per partition")
def iota_of_another_size():
    nisa.iota(dst=sbuf(4, 4), pattern=[[1, 3]])


@CASES.refuses("leaves the range of int32", StrictError)
def iota_overflow():
    nisa.iota(dst=sbuf(4, 4), pattern=[[2**30, 4]])


@CASES.refuses("shuffle_mask must have 32 entries")
def short_shuffle_mask():
    nisa.nc_stream_shuffle(dst=sbuf(32, 4), src=ones(32, 4), shuffle_mask=[0] * 31)


@CASES.refuses("dma_transpose dst shape must be .8, 4., got .4, 8.")
def transposing_dma_into_the_wrong_shape():
    nisa.dma_transpose(dst=sbuf(4, 8), src=ones(4, 8))


@CASES.refuses("indirect access out of bounds: element 28 of 16")
def gather_out_of_bounds():
    rows = sbuf(2, 1, dtype=nl.uint32)
    nisa.memset(dst=rows, value=7)
    table = nl.shared_constant(np.ones((4, 4), np.float32))
    nisa.dma_copy(dst=sbuf(2, 4), src=table.ap(pattern=[[4, 2], [1, 4]], vector_offset=rows))


# In place


@CASES.refuses("dst overlaps src of `x` at another position", StrictError)
def shift_in_place():
    tile = nl.ndarray((4, 8), F32, nl.sbuf, name="x")
    nisa.memset(dst=tile, value=1.0)
    nisa.tensor_copy(dst=tile[:, 1:8], src=tile[:, 0:7])


@CASES.refuses("dst overlaps data2 of .* at another position", StrictError)
def broadcast_of_the_tile_that_is_written():
    tile = ones(4, 8)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile[:, 0:1].broadcast(1, 8), op=nl.multiply)


@CASES.refuses("tensor_tensor_scan dst overlaps data1 of .* in place", StrictError)
def scan_in_place():
    tile = ones(4, 8)
    nisa.tensor_tensor_scan(dst=tile, data0=ones(4, 8), data1=tile, initial=0.0, op0=nl.multiply, op1=nl.add)


def test_elementwise_instructions_work_in_place():
    def body():
        tile, out = ones(4, 8), nl.ndarray((4, 8), F32, nl.shared_hbm)
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=tile[:, 0:1])
        nisa.tensor_copy(dst=tile[:, 0:8:2], src=tile[:, 1:8:2])
        nisa.dma_copy(dst=out, src=tile)
        return out

    assert (attempt(body) == 4).all()


# Poison and outputs


@CASES.refuses("which no instruction has written", StrictError)
def read_of_fresh_memory():
    nisa.tensor_copy(dst=sbuf(4, 4), src=sbuf(4, 4))


@CASES.refuses(r"is unwritten at \[2, 0\] \(2 of 4 elements\)", StrictError)
def output_with_a_hole():
    out = nl.ndarray((4, 1), F32, nl.shared_hbm)
    nisa.dma_copy(dst=out[0:2], src=ones(2, 1))
    return out


@CASES.refuses("is NaN at .1, 0. and memory was read before it was written: .*tensor_copy src", StrictError)
def output_from_unwritten_memory():
    tile, out = sbuf(2, 1), nl.ndarray((2, 1), F32, nl.shared_hbm)
    nisa.memset(dst=tile[0:1], value=0.0)
    copied = sbuf(2, 1)
    nisa.tensor_copy(dst=copied, src=tile)
    nisa.dma_copy(dst=out, src=copied)
    return out


@CASES.refuses("must be in shared_hbm, got sbuf", StrictError)
def output_on_chip():
    return ones(4, 4)


@CASES.refuses("kernel output 0 must be a tensor, got int", TypeError)
def output_that_is_a_number():
    return 3


@nki.jit
def inner():
    out = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.ones((1, 1), dtype=nl.float32)
    nisa.dma_copy(dst=out, src=tile)
    return out


@CASES.refuses("is called inside a kernel; leave helpers undecorated", StrictError)
def kernel_within_a_kernel():
    return inner()


@pytest.mark.parametrize(("body", "match", "error", "target"), CASES)
def test_simulator_refuses(body, match, error, target):
    assert_refused(body, match, error, target)


STRICT = [p for p in CASES.strict() if "output" not in p.id and "kernel" not in p.id]


@pytest.mark.parametrize(("body", "match", "error", "target"), STRICT)
def test_strict_checks_can_be_switched_off(body, match, error, target):
    attempt(body, target=target, strict=False)


ALLOWED_LATER = {
    "numeric_bias": "trn2",
    "copy_on_the_scalar_engine": "trn2",
    "hardware_descriptors_on_trn1": "trn2",
    "dma_priority_before_gen4": "trn3",
}


@pytest.mark.parametrize(("name", "target"), ALLOWED_LATER.items())
def test_a_later_generation_allows(name, target):
    attempt(globals()[name], target=target)


def test_a_launch_has_one_core_or_two_and_trn1_has_one():
    with pytest.raises(NkiValidationError, match="NKI only supports LNC 1 or 2, but got 4"):
        inner[4]
    with pytest.raises(NkiValidationError, match="LNC 2 is not supported on trn1"):
        record(inner[2], target="trn1")
    assert inner[1]() == 1.0


def test_a_kernel_takes_no_lists():
    with pytest.raises(StrictError, match="argument x is a list"):
        attempt(lambda x: write_output(), [1, 2])


def test_a_tile_outside_a_kernel_is_refused():
    with pytest.raises(RuntimeError, match="run inside a kernel"):
        sbuf(4, 4)


def test_an_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="target 'trn9' is not one of trn1, trn2, trn3"):
        attempt(write_output, target="trn9")


def test_target_is_that_of_neurons_environment_variable(monkeypatch):
    def body():
        nisa.activation(dst=sbuf(4, 4), op=nl.exp, data=ones(4, 4), bias=1.0)
        return write_output()

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen3")
    assert record(body, check_source=False).target.name == "trn2"
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    with pytest.raises(ConstraintError, match="gen2"):
        record(body, check_source=False)
