"""nki.isa: the instructions, by the engine that runs them.

matmul       nc_matmul nc_transpose                                                         Tensor
elementwise  tensor_tensor tensor_scalar scalar_tensor_tensor tensor_copy memset reciprocal
             tensor_copy_predicated nc_stream_shuffle                                       Vector, GpSimd
reduction    tensor_reduce tensor_partition_reduce tensor_tensor_scan tensor_scalar_cumulative
             tensor_scalar_reduce select_reduce bn_stats bn_aggr                            Vector, GpSimd
activation   activation activation_reduce                                                   Scalar
generate     iota affine_select                                                             GpSimd
search       max8 nc_find_index8 nc_match_replace8 nc_n_gather local_gather sequence_bounds
             nonzero_with_count                                                             Vector, GpSimd
randomness   rng dropout rand2 set_rng_seed rand_set_state rand_get_state                   Vector, GpSimd
registers    register_alloc register_move register_load register_store                      sequencers
paired       core_barrier sendrecv (gen3, two cores)                                        DMA, GpSimd
later        range_select (gen3) exponential activate2 (gen4)                               Vector, Scalar
             nc_matmul_mx quantize_mx topk: refused
dma          dma_copy dma_transpose dma_compute                                             DMA
enums        engine reduce_cmd dge_mode oob_mode matmul_perf_mode nc_version dma_engine; also as `constants`
"""

# ruff: noqa: F401 (a namespace: every imported name is part of nisa)

from delta_trn.nki_kernels.simulator.core.errors import NkiValidationError
from delta_trn.nki_kernels.simulator.core.machine import current
from delta_trn.nki_kernels.simulator.isa import enums as constants
from delta_trn.nki_kernels.simulator.isa.activation import activation, activation_reduce
from delta_trn.nki_kernels.simulator.isa.dma import dma_compute, dma_copy, dma_transpose
from delta_trn.nki_kernels.simulator.isa.elementwise import (
    memset,
    nc_stream_shuffle,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from delta_trn.nki_kernels.simulator.isa.enums import (
    dge_mode,
    dma_engine,
    engine,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from delta_trn.nki_kernels.simulator.isa.generate import affine_select, iota
from delta_trn.nki_kernels.simulator.isa.later import (
    activate2,
    exponential,
    nc_matmul_mx,
    quantize_mx,
    range_select,
    topk,
)
from delta_trn.nki_kernels.simulator.isa.matmul import nc_matmul, nc_transpose
from delta_trn.nki_kernels.simulator.isa.paired import core_barrier, sendrecv
from delta_trn.nki_kernels.simulator.isa.randomness import (
    dropout,
    rand2,
    rand_get_state,
    rand_set_state,
    rng,
    set_rng_seed,
)
from delta_trn.nki_kernels.simulator.isa.reduction import (
    bn_aggr,
    bn_stats,
    select_reduce,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from delta_trn.nki_kernels.simulator.isa.registers import (
    VirtualRegister,
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from delta_trn.nki_kernels.simulator.isa.search import (
    local_gather,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_n_gather,
    nonzero_with_count,
    sequence_bounds,
)


def get_nc_version() -> nc_version:
    """The generation that the running kernel is built for."""
    return nc_version(current().target.generation)


def get_nc_sub_version() -> int:
    """The revision of the silicon within its generation: the first."""
    return 0
