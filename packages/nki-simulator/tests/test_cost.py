"""The cost model: instruction costs against the documented formulas,
dependencies, bounds, the report.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import isclose
from pathlib import Path

import numpy as np
import pytest
from simulator_harness import F32, ones

from nki_simulator import TARGETS, nisa, nl, record
from nki_simulator.__main__ import main
from nki_simulator.core.errors import StrictError
from nki_simulator.core.operators import OPERATORS
from nki_simulator.core.tables import EVERYWHERE, LOAD_US, owners
from nki_simulator.cost import (
    CALL_US,
    COSTS,
    LAUNCH_US,
    estimate,
    instruction_cost,
    lay_out,
)

TRN1 = TARGETS["trn1"]


def traced(body, target="trn1"):
    def kernel():
        body()
        out = nl.ndarray((1, 1), F32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=ones(1, 1))
        return out

    trace = record(kernel, target=target, check_source=False).trace[:-2]  # without the output
    return trace, estimate(trace, replace(TARGETS[target], refused=""))


def busy(body, op, target="trn1"):
    """Cycles of the last `op` that the body issues."""
    last = [r for r in traced(body, target)[0] if r.op == op][-1]
    clock = getattr(TARGETS[target], f"{last.engine.name}_ghz")
    return instruction_cost(last, TARGETS[target])[0] * clock * 1e3


FP32 = COSTS.tensor_fp32 + 512 * COSTS.tensor_fp32_column  # passes at 512 columns


@pytest.mark.parametrize(
    ("K", "M", "N", "dtype", "onezero", "cycles"),
    [
        (128, 128, 512, "bfloat16", "", 512 * 7 / 6),
        (128, 128, 16, "bfloat16", "", 64 * 7 / 6),
        (128, 16, 8, "bfloat16", "", 64 * 7 / 6),
        (128, 128, 512, "bfloat16", "stationary", 512 * 7 / 6),
        (128, 128, 512, "float32", "", 512 * 7 / 6 * FP32),
        (128, 128, 512, "float32", "moving", 256 * 7 / 6 * FP32),
        (128, 8, 512, "bfloat16", "", 512 * 7 / 6 * (1 + 512 * COSTS.tensor_narrow)),
        (64, 128, 512, "bfloat16", "", 512 * 7 / 6 * (1 + 64 * COSTS.tensor_short)),
    ],
)  # fmt: skip
def test_a_product_takes_its_columns(K, M, N, dtype, onezero, cycles):
    def body():
        ps = nl.ndarray((M, N), F32, nl.psum)
        left, right = ones(K, M, dtype=dtype), ones(K, N, dtype=dtype)
        declared = {f"is_{onezero}_onezero": True} if onezero else {}
        nisa.nc_matmul(dst=ps, stationary=left, moving=right, **declared)

    assert isclose(busy(body, "nc_matmul"), cycles)


def test_fewer_rows_or_stationary_columns_are_never_cheaper():
    """Measured: they are dearer, so nobody gains by cutting a product down."""
    for fp32 in (False, True):
        for columns in (64, 128, 512):
            whole = COSTS.product(columns, 128, 128, fp32)
            assert all(COSTS.product(columns, K, 128, fp32) > whole for K in (1, 32, 64, 96, 127))
            assert all(COSTS.product(columns, 128, M, fp32) > whole for M in (1, 8, 15))
            assert COSTS.product(columns, 128, 16, fp32) == whole
    many, few = (COSTS.product(n, 128, 128, True) / COSTS.product(n, 128, 128) for n in (512, 128))
    assert 4.9 < many < 5.6 and 3.4 < few < 3.9


@pytest.mark.parametrize("op", ["tensor_tensor", "scalar_tensor_tensor"])
def test_a_second_input_costs_nothing_where_one_is_in_psum(op):
    def body(buffer):
        def issue():
            a, b, dst = nl.ndarray((128, 512), F32, buffer), ones(128, 512), ones(128, 512)
            if buffer is nl.psum:
                half = ones(128, 128, dtype="bfloat16")
                nisa.nc_matmul(dst=a, stationary=half, moving=ones(128, 512, dtype="bfloat16"))
            else:
                nisa.memset(dst=a, value=1.0)
            if op == "tensor_tensor":
                nisa.tensor_tensor(dst=dst, data1=b, data2=a, op=nl.add)
            else:
                nisa.scalar_tensor_tensor(
                    dst=dst, data=a, op0=nl.add, operand0=1.0, op1=nl.add, operand1=b
                )

        return issue

    assert isclose(busy(body(nl.psum), op), 512 + COSTS.vector_overhead)
    assert isclose(busy(body(nl.sbuf), op), (1 + COSTS.vector_second) * 512 + COSTS.vector_overhead)


def test_an_instruction_is_busy_longer_where_it_waits_for_another_engine():
    """Once for each instruction of the other engine; its own engine's results cost no semaphore."""

    def body():
        a, b = ones(128, 64), ones(128, 64)
        nisa.activation(dst=a, op=nl.copy, data=a)  # waits for the memset, on Vector
        nisa.activation(dst=b, op=nl.copy, data=b)
        nisa.tensor_scalar(dst=b, data=b, op0=nl.add, operand0=1.0)  # waits for Scalar
        nisa.tensor_scalar(dst=a, data=a, op0=nl.add, operand0=1.0)  # which had done this before
        nisa.tensor_scalar(dst=a, data=a, op0=nl.add, operand0=1.0)

    trace, e = traced(body)
    alone = [instruction_cost(record, TRN1)[0] for record in trace]
    extra = [step.busy - own for step, own in zip(e.steps, alone, strict=True)]
    scalar, vector = COSTS.scalar_wait, COSTS.vector_wait
    assert min(scalar, vector) > 0.02
    expected = [0, 0, scalar, scalar, vector, 0, 0]
    assert all(isclose(x, y, abs_tol=1e-9) for x, y in zip(extra, expected, strict=True))


def test_engines_wait_for_whole_tensors():
    """Two halves of one tensor wait for each other between engines, not within one; two tensors
    do not.
    """

    def body(shared):
        def issue():
            whole = nl.ndarray((128, 128), F32, nl.sbuf)
            nisa.memset(dst=whole, value=1.0)
            other = ones(128, 64)
            left, right = whole[:, 0:64], whole[:, 64:128] if shared else other
            for _ in range(8):
                nisa.tensor_scalar(dst=left, data=left, op0=nl.add, operand0=1.0)
                nisa.activation(dst=right, op=nl.copy, data=right)

        return issue

    one, two = traced(body(True))[1], traced(body(False))[1]
    assert one.schedule > 1.8 * two.schedule
    trace = traced(body(True))[0]
    waits = [[j for j, _ in place.needs] for place in lay_out(trace, TRN1).places]
    assert waits[4] == [0, 2, 3]


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_no_time_is_estimated_where_the_model_is_not_calibrated(target, capsys, tmp_path):
    with pytest.raises(ValueError, match=f"no time is estimated for {target}: "):
        estimate([], TARGETS[target])
    numbers = tmp_path / "t.jsonl"
    argv = ["report", "test_kernels:matmul_tiled", "8x8,8x8", "--target", target]
    assert main([*argv, "--jsonl", str(numbers)]) == 0
    printed = capsys.readouterr().out
    assert f"No time is estimated for {target}" in printed and "bytes read" in printed
    assert " us" not in printed.replace("240 us", "").replace("time, us", "")
    (line,) = map(json.loads, numbers.read_text().splitlines())
    assert line["refused"] and line["instructions"]["nc_matmul"] == 1 and line["hbm_moved"] > 0
    assert not {"schedule", "lower", "upper", "path", "dma"} & line.keys()


def scalar_time(*functions, size=64):
    """Returns for how long functions keep the Scalar engine busy,
    the tables that it loads, and how often.
    """

    def body():
        x = ones(128, size)
        for function in functions:
            nisa.activation(dst=ones(128, size), op=function, data=x)

    costs = traced(body)[1]
    return costs.engines["scalar"], costs.tables, costs.loads


def test_each_change_of_function_loads_a_table():
    """Grouped, the same functions load one table each; copies and squares are in every table."""
    grouped, tables, few = scalar_time(nl.exp, nl.exp, nl.copy, nl.silu, nl.square, nl.silu)
    in_turns, _, many = scalar_time(nl.exp, nl.silu, nl.copy, nl.exp, nl.square, nl.silu)
    assert (few, many, tables) == (2, 4, ("exp", "silu"))
    assert isclose(in_turns - grouped, 2 * LOAD_US)
    assert scalar_time(nl.copy, nl.square, nl.abs)[1:] == ((), 0)


def test_functions_of_one_set_load_it_once():
    assert scalar_time(nl.exp, nl.tanh, nl.exp)[1:] == (("exp",), 1)
    assert scalar_time(nl.silu, nl.tanh, nl.silu)[1:] == (("silu",), 1)
    assert scalar_time(nl.log, nl.exp, nl.log)[1:] == (("log and exp",), 1)


def test_a_table_is_loaded_while_the_engine_waits():
    """The compiler moves a load forward: it costs no time where the next operand comes later."""

    def body(function):
        x, y = nl.ndarray((128, 8), F32, nl.shared_hbm), ones(128, 8)
        nisa.activation(dst=ones(128, 8), op=nl.exp, data=y)
        nisa.dma_copy(dst=x, src=y)
        z = nl.ndarray((128, 8), F32, nl.sbuf)
        nisa.dma_copy(dst=z, src=x)
        nisa.activation(dst=ones(128, 8), op=function, data=z)

    same, other = (traced(lambda f=f: body(f))[1] for f in (nl.exp, nl.silu))
    assert (same.loads, other.loads) == (1, 2) and isclose(same.schedule, other.schedule)


def test_every_function_of_the_scalar_engine_is_in_a_table():
    functions = [op.name for op in OPERATORS if op.activation is not None and not op.composed]
    assert {"exp", "silu", "rsqrt"} <= set(functions)
    assert all(owners(name) or name in EVERYWHERE for name in functions)
    with pytest.raises(ValueError, match="no set of tables has 'cosh'"):
        owners("cosh")


def test_a_program_of_more_than_eight_tables_is_refused():
    functions = (
        nl.exp,
        nl.silu,
        nl.rsqrt,
        nl.sqrt,
        nl.log,
        nl.softplus,
        nl.sigmoid,
        nl.reciprocal,
        nl.mish,
    )
    assert scalar_time(*functions[:8])[2] == 8
    with pytest.raises(StrictError, match=r"of 9 tables .*NCC_INLA001"):
        scalar_time(*functions)


def test_a_root_on_gpsimd_takes_four_cycles_per_element():
    def body():
        x = ones(128, 100)
        nisa.tensor_scalar(
            dst=ones(128, 100), data=x, op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.gpsimd
        )

    assert isclose(busy(body, "tensor_scalar"), 150 + 400)


def test_elementwise_instructions_take_their_cycles():
    def body():
        x, y, column = ones(128, 300), ones(128, 300), ones(128, 1)
        nisa.tensor_tensor(dst=y, data1=x, data2=y, op=nl.add)
        nisa.tensor_scalar(dst=y, data=x, op0=nl.add, operand0=1.0)
        nisa.reciprocal(dst=y, data=x)
        nisa.activation(dst=y, op=nl.exp, data=x)
        nisa.activation_reduce(dst=y, op=nl.exp, data=x, reduce_op=nl.add, reduce_res=column)
        nisa.tensor_tensor_scan(
            dst=ones(128, 300), data0=x, data1=x, initial=0.0, op0=nl.multiply, op1=nl.add
        )
        nisa.iota(dst=y, pattern=[[1, 300]])
        nisa.tensor_copy(dst=column, src=x[:, 0:1])

    vector, scalar = COSTS.vector_overhead, COSTS.scalar_overhead
    expected = {
        "tensor_tensor": 300 * (1 + COSTS.vector_second) + vector, "tensor_scalar": 300 + vector,
        "reciprocal": 900 + vector, "activation": 300 + scalar,
        "activation_reduce": 300 + scalar + COSTS.sum_overhead,
        "tensor_tensor_scan": 300 + vector, "iota": 450, "tensor_copy": 64,
    }  # fmt: skip
    for op, cycles in expected.items():
        assert isclose(busy(body, op), cycles), op


@pytest.mark.parametrize(("columns", "size"), [(2048, 128 * 2048 * 4), (1, 128 * 512)])
def test_dma_time_is_bytes_over_bandwidth_and_small_descriptors_cost_512_bytes(columns, size):
    def body():
        big = nl.shared_constant(np.zeros((128, 2048), np.float32))
        nisa.dma_copy(dst=nl.ndarray((128, columns), F32, nl.sbuf), src=big[:, 0:columns])

    assert isclose(instruction_cost(traced(body)[0][0], TRN1)[0], size / 272e3)


def chain(dependent):
    def body():
        a, b = ones(128, 64), ones(128, 64)
        for i in range(10):
            tile = a if dependent or i % 2 else b
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)

    return body


def test_dependent_instructions_wait_and_independent_ones_do_not():
    serial, parallel = traced(chain(True))[1], traced(chain(False))[1]
    assert isclose(serial.engines["vector"], parallel.engines["vector"])
    assert serial.path > 1.5 * parallel.path


def test_two_heads_interleaved_share_the_path():
    """Independent work adds to the engines, not to the dependency path."""

    def heads(n):
        def body():
            state = []
            for _ in range(n):
                state.append(ones(64, 64))
            for _ in range(8):
                for tile in state:
                    ps = nl.ndarray((64, 64), F32, nl.psum)
                    nisa.nc_matmul(dst=ps, stationary=tile, moving=tile)
                    nisa.tensor_scalar(dst=tile, data=ps, op0=nl.multiply, operand0=0.01)

        return traced(body)[1]

    one, four = heads(1), heads(4)
    assert isclose(four.path, one.path, rel_tol=1e-6)
    assert isclose(four.engines["tensor"], 4 * one.engines["tensor"])
    assert four.tensor_share > 1.9 * one.tensor_share
    assert one.binding == "dependency path"


def test_an_accumulation_group_streams():
    """Matmuls of one accumulation group do not wait for each other's result."""

    def path(accumulate):
        def body():
            x, ps = ones(128, 128, dtype="bfloat16"), nl.ndarray((128, 128), F32, nl.psum)
            y = nl.ndarray((128, 128), "bfloat16", nl.sbuf)
            for i in range(6):
                nisa.nc_matmul(dst=ps, stationary=x, moving=x, accumulate=accumulate and i > 0)
                if not accumulate:
                    nisa.tensor_copy(dst=y, src=ps)
            nisa.tensor_copy(dst=y, src=ps)

        return traced(body)[1].path

    latency = 124 / 2.8 / 1e3
    assert path(False) > path(True) + 5 * latency


@pytest.mark.parametrize("target", TARGETS)
def test_lower_bound_schedule_and_upper_bound_are_in_order(target):
    for dependent in (True, False):
        _, e = traced(chain(dependent), target)
        assert 0 < e.lower <= e.schedule <= e.upper
        assert e.lower == max([*e.engines.values(), *e.ports.values(), e.dma, e.path])
        assert bool(e.ports) == (target == "trn1")
        assert sum(e.instructions.values()) == len(e.steps)


def test_loads_and_stores_share_the_bandwidth():
    """Copies of tiles that DMA binds: with a bandwidth for each queue they would end
    in half of `dma`.
    """

    def body():
        big = nl.shared_constant(np.zeros((128, 2048), np.float32))
        for _ in range(4):
            tile = nl.ndarray((128, 2048), F32, nl.sbuf)
            nisa.dma_copy(dst=tile, src=big)
            nisa.dma_copy(dst=nl.ndarray((128, 2048), F32, nl.shared_hbm), src=tile)

    _, e = traced(body)
    assert isclose(e.dma, 8 * 128 * 2048 * 4 / 272e3)
    assert e.dma <= e.lower <= e.schedule <= e.upper
    spans = sorted((s.start, s.start + s.busy) for s in e.steps)
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(spans))


def test_a_load_passes_a_store_that_waits():
    def body():
        big = nl.shared_constant(np.zeros((128, 512), np.float32))
        tile = ones(128, 512)
        for _ in range(10):
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        nisa.dma_copy(dst=nl.ndarray((128, 512), F32, nl.shared_hbm), src=tile)
        nisa.dma_copy(dst=nl.ndarray((128, 512), F32, nl.sbuf), src=big)

    _, e = traced(body)
    store, load = e.steps[-2:]
    assert load.start == 0.0 and store.start > e.engines["vector"]


def test_estimate_counts_hbm_bytes_and_multiply_adds():
    def body():
        big = nl.shared_constant(np.zeros((128, 64), np.float32))
        tile = nl.ndarray((128, 64), F32, nl.sbuf)
        nisa.dma_copy(dst=tile, src=big)
        ps = nl.ndarray((64, 64), F32, nl.psum)
        nisa.nc_matmul(dst=ps, stationary=tile, moving=tile)

    _, e = traced(body)
    assert (e.traffic.hbm_read, e.traffic.hbm_written, e.traffic.multiply_adds) == (
        128 * 64 * 4,
        0,
        128 * 64 * 64,
    )


def test_report_prints_a_labeled_table_and_appends_a_line_per_shape(tmp_path, capsys):
    numbers = tmp_path / "t.jsonl"
    argv = [
        "report",
        "test_kernels:matmul_tiled",
        "256x64,256x600:float32",
    ]
    assert main([*argv, "8x8,8x8", "--jsonl", str(numbers)]) == 0
    assert main([*argv, "--target", "trn2", "--jsonl", str(numbers)]) == 0
    printed = capsys.readouterr().out
    label = "ESTIMATE from the instruction trace, not a measurement"
    for words in (label, "| **lower bound** (set by ", "| | microseconds |"):
        assert words in printed
    assert (
        f"{LAUNCH_US:.0f} us for the launch" in printed and f"{CALL_US:.0f} us for each" in printed
    )
    assert printed.index("one core of trn1") < printed.index("one core of trn2")
    lines = [json.loads(line) for line in numbers.read_text().splitlines()]
    assert [(x["shape"], x["target"]) for x in lines] == [
        (argv[2], "trn1"), ("8x8,8x8", "trn1"), (argv[2], "trn2"),
    ]  # fmt: skip
    written = lines[0]
    assert written["label"].startswith("ESTIMATE") and written["lower"] <= written["upper"]
    assert written["instructions"]["nc_matmul"] == 4
    assert written["path"] <= written["schedule"] and written["call_beside"] == CALL_US
    assert written["hbm_least"] == 4 * (256 * 64 + 256 * 600 + 64 * 600) <= written["hbm_moved"]


EXAMPLE = """
import numpy as np
from test_kernels import matmul_tiled

def example(rows=8):
    x = np.ones((rows, rows), np.float32)
    return matmul_tiled, (x, x)
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> str:
    """The name of a user's package with the modules products and empty."""
    (tmp_path / "kernels_of_a_user").mkdir()
    for name, text in {"__init__": "", "products": EXAMPLE, "empty": ""}.items():
        (tmp_path / "kernels_of_a_user" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return "kernels_of_a_user"


def test_report_takes_the_example_of_a_module(capsys, package):
    assert main(["report", f"{package}.products", "rows=16"]) == 0
    assert main(["--package", package, "report", "products", "rows=16"]) == 0
    assert capsys.readouterr().out.count("lower bound** (set by") == 2


def test_the_installed_command_finds_a_kernel_in_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(EXAMPLE)
    code = (
        "import sys; sys.path.remove(''); from nki_simulator.__main__ import main; sys.exit(main())"
    )
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "mine", "rows=16"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "lower bound" in done.stdout, done.stderr


def test_report_says_what_a_module_lacks(package):
    with pytest.raises(SystemExit, match="no function example"):
        main(["--package", package, "report", "empty", "T=1"])


def test_engines_share_ports_on_gen2_only():
    """Vector and GpSimd take turns at SBUF on Trn1, and run side by side on Trn2."""

    def body():
        x, y = ones(128, 512), ones(128, 512)
        for _ in range(4):
            nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=0.5)
            nisa.iota(dst=y, pattern=[[1, 512]])

    one, two = traced(body)[1], traced(body, "trn2")[1]
    port = one.ports["vector+gpsimd on SBUF"]
    assert isclose(port, one.engines["vector"] + one.engines["gpsimd"])
    assert one.lower == port and one.binding == "vector+gpsimd on SBUF"
    assert two.ports == {} and two.schedule < 0.8 * (two.engines["vector"] + two.engines["gpsimd"])


def test_a_kernel_that_is_not_there_is_refused_with_the_nearest_name(package):
    with pytest.raises(SystemExit, match=r"no module 'product'.*mean products"):
        main(["--package", package, "report", "product", "rows=1"])
