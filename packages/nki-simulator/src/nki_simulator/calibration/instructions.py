"""Single instructions whose time on Trn1 is published: instructions.csv has them, in nanoseconds.

Each function issues the instruction once, on operands of the same place, shape and dtype. The
source timed one more of it, where nothing waits (`tools/probe_engine_rates.py` of foxl-ai/kiln).
"""

import numpy as np

from nki_simulator import nisa, nl
from nki_simulator.core.machine import Record
from nki_simulator.kernel import record

F32, BF16 = nl.float32, nl.bfloat16


def trace_instruction(program: str, *arguments: str) -> Record:
    """Returns the record of the instruction that a function of this module issues last.

    >>> trace_instruction("product", "128", "8", "512", "bfloat16").flags["M"]
    8
    """

    def kernel():
        PROGRAMS[program](*arguments)
        out = nl.ndarray((1, 1), F32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=_filled(1, 1))
        return out

    # behind the instruction stand a memset and the copy of the output
    return record(kernel, target="trn1", nki="0.6.0", check_source=False).trace[-3]


def _filled(partitions, columns, dtype=F32):
    tile = nl.ndarray((partitions, columns), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=1.0)
    return tile


def _source(place, columns, dtype=F32):
    """Returns a tile of 128 partitions in SBUF, or a product in PSUM."""
    if place == "sbuf":
        return _filled(128, columns, dtype)
    tile = nl.ndarray((128, columns), dtype=F32, buffer=nl.psum)
    nisa.nc_matmul(dst=tile, stationary=_filled(128, 128, BF16), moving=_filled(128, columns, BF16))
    return tile


def product(rows, stationary, columns, dtype):
    K, M, N = int(rows), int(stationary), int(columns)
    out = nl.ndarray((M, N), dtype=F32, buffer=nl.psum)
    nisa.nc_matmul(dst=out, stationary=_filled(K, M, dtype), moving=_filled(K, N, dtype))


def transposition(dtype):
    out = nl.ndarray((128, 128), dtype=dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=out, data=_filled(128, 128, dtype), engine=nisa.engine.tensor)


def maximum(place, columns):
    data, out = _source(place, int(columns)), _filled(128, 1)
    nisa.tensor_reduce(dst=out, op=nl.maximum, data=data, axis=1)


def sum_row(place, columns):
    data, out = _source(place, int(columns)), _filled(128, 1)
    nisa.tensor_reduce(dst=out, op=nl.add, data=data, axis=1)


def copy(place, columns, engine, dtype="bfloat16"):
    data, out = _source(place, int(columns)), _filled(128, int(columns), dtype)
    if engine == "vector":
        nisa.tensor_copy(dst=out, src=data, engine=nisa.engine.vector)
    else:
        nisa.activation(dst=out, op=nl.copy, data=data)


def two_tiles(place, columns, dtype="float32"):
    n = int(columns)
    one, two, out = _source(place, n), _filled(128, n, dtype), _filled(128, n, dtype)
    nisa.tensor_tensor(dst=out, data1=one, data2=two, op=nl.multiply, engine=nisa.engine.vector)


def two_steps(columns):
    n = int(columns)
    one, two, out = _source("psum", n), _filled(128, n), _filled(128, n)
    nisa.scalar_tensor_tensor(
        dst=out, data=one, op0=nl.multiply, operand0=0.5, op1=nl.add, operand1=two
    )


def scale(columns):
    data, factor, out = _filled(128, int(columns)), _filled(128, 1), _filled(128, int(columns))
    nisa.tensor_scalar(
        dst=out, data=data, op0=nl.multiply, operand0=factor, engine=nisa.engine.vector
    )


def count(columns):
    data, out, total = _filled(128, int(columns)), _filled(128, int(columns)), _filled(128, 1)
    nisa.tensor_scalar_reduce(
        dst=out, data=data, op0=nl.greater_equal, operand0=0.5, reduce_op=nl.add, reduce_res=total
    )


def exponent(place, columns):
    data, out = _source(place, int(columns)), _filled(128, int(columns), "bfloat16")
    bias, total = _filled(128, 1), _filled(128, 1)
    nisa.activation_reduce(
        dst=out, op=nl.exp, data=data, reduce_op=nl.add, reduce_res=total, bias=bias
    )


def load(columns):
    n = int(columns)
    source = nl.shared_constant(np.zeros((128, n), BF16.numpy))
    nisa.dma_copy(dst=nl.ndarray((128, n), dtype=BF16, buffer=nl.sbuf), src=source)


def gather():
    source = nl.shared_constant(np.zeros((1024, 1024), BF16.numpy))
    rows = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=rows, pattern=[[1, 1]], channel_multiplier=1)
    where = rows.ap(pattern=[[1, 128], [1, 1]], offset=0)
    chosen = source.ap(
        pattern=[[1024, 128], [1, 1024]], offset=0, vector_offset=where, indirect_dim=0
    )
    nisa.dma_copy(dst=nl.ndarray((128, 1024), dtype=BF16, buffer=nl.sbuf), src=chosen)


PROGRAMS = {
    "product": product, "transposition": transposition, "maximum": maximum, "sum": sum_row,
    "copy": copy, "two_tiles": two_tiles, "two_steps": two_steps, "scale": scale, "count": count,
    "exponent": exponent, "load": load, "gather": gather,
}  # fmt: skip
