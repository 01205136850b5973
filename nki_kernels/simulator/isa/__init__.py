"""nki.isa: the instructions, by the engine that runs them.

matmul       nc_matmul nc_transpose                                                         Tensor
elementwise  tensor_tensor tensor_scalar scalar_tensor_tensor tensor_copy memset reciprocal
             tensor_copy_predicated nc_stream_shuffle                                       Vector, GpSimd
reduction    tensor_reduce tensor_partition_reduce tensor_tensor_scan tensor_scalar_cumulative
             tensor_scalar_reduce select_reduce bn_stats bn_aggr                            Vector, GpSimd
activation   activation activation_reduce                                                   Scalar
generate     iota affine_select                                                             GpSimd
dma          dma_copy dma_transpose dma_compute                                             DMA
enums        engine reduce_cmd dge_mode oob_mode matmul_perf_mode nc_version dma_engine
"""

from ..errors import NkiValidationError
from ..machine import current
from .activation import activation, activation_reduce
from .dma import dma_compute, dma_copy, dma_transpose
from .elementwise import (
    memset,
    nc_stream_shuffle,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from .enums import (
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
from .generate import affine_select, iota
from .matmul import nc_matmul, nc_transpose
from .reduction import (
    bn_aggr,
    bn_stats,
    select_reduce,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)


def get_nc_version() -> nc_version:
    """The generation that the running kernel is built for."""
    return nc_version(current().target.generation)
