"""The first hour on a Trn1 chip: what to measure, in order, and what each figure decides.

    python -m tools.first_hour_trn1 [STAGE ...] [--dry] [--json FILE]

    chain       small kernels in one graph, form by form: which one a graph of a whole layer would
                fail by
    precision   how exact float32 products are: whether float32 parity can be green at all
    rate        cycles of a product of N = 64 to 512 columns: which reading of the cost model holds
    tables      what loading a table of the Scalar engine costs: whether changes of function matter
    kernel      forward and backward of one sequence: how far the model is from our own kernels
    layer       forward, backward, update of models of 1 and 3 layers: half of the difference is a
                layer
    step        the whole model on 15 sequences, as on each of 32 cores

With --dry no chip is needed: the simulator runs the kernels, its cost model stands for the clock,
and the recipe `tiny` runs on the CPU.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
import torch

from delta_trn.backends import machine
from delta_trn.backends.nki_runtime_adapter import run, to_tensor
from delta_trn.nki_kernels import gated_delta_rule_bwd, gated_delta_rule_fwd
from delta_trn.nki_kernels.language import RUNTIME, nisa, nki, nl
from delta_trn.nki_kernels.tiles import load, psum, sbuf
from delta_trn.train.recipes import announce
from delta_trn.train.settings.overrides import apply
from delta_trn.train.studies.throughput import OURS, Workload
from nki_simulator import TARGETS, record
from nki_simulator.core.tables import LOAD_US
from nki_simulator.cost import COSTS, estimate
from tools.first_hour_chain import try_forms

Clock = Callable[..., float]  # clock(kernel, *arguments): microseconds
SUMS = 4  # PSUM tiles, and stationary tiles, that take turns
# worst relative error where operands are rounded: 15 2^-12 to 0, and half of 2^-10
LIMITS = (("float32", 2e-6), ("tfloat32", 2.0**-10), ("bfloat16", 2.0**-7))
COLUMNS = (64, 128, 256, 512)
PAIRS = 1024  # of functions in turns: by the model, 2.6 ms of loading tables
COUNTS = (512, 4608)  # the difference takes 0.1 to 3.5 ms, a launch varies by less than 0.1
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
SHAPE = {"B": 1, "H": 6, "K": 128, "V": 256, "dtype": "bfloat16"}
MODEL_US = {"forward": 223.0, "backward": 530.0}  # by the cost model
SEQUENCES = 15  # of each core of a trn1.32xlarge with 480 sequences a step


def give(tile_sb):
    """Copies a tile to HBM and returns it: the output of a kernel."""
    out = nl.ndarray(tile_sb.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile_sb)
    return out


def operands():
    """Returns what `products` takes for the same product `SUMS` times:
    their sum is as exact as each.
    """
    rng = np.random.default_rng(0)
    a_t, b = ((1 + rng.integers(0, 16, (128, 128)) * 2.0**-12).astype(np.float32) for _ in range(2))
    return np.tile(a_t, (1, SUMS)), b, SUMS


def verdict(result):
    """Names the precision of a result of `products` of `operands`,
    and returns its worst relative error.
    """
    stationary, b, _ = operands()
    exact = SUMS * stationary[:, :128].T.astype(np.float64) @ b.astype(np.float64)
    error = float((np.abs(result - exact) / exact).max())
    return next((name for name, limit in LIMITS if error <= limit), "less than bfloat16"), error


@nki.jit
def products(stationary, moving, count):
    """Returns the sum of `count` products of stationary [128, 512] and moving [128, N], [128, N]
    float32.

        product i = stationary[:, 128 (i mod 4) : 128 (i mod 4 + 1)].T @ moving

    Successive products have other stationary sides, as in our kernels, so that each loads its
    weights.
    """
    stationary_sb, moving_sb = load(stationary, stationary.dtype), load(moving, moving.dtype)
    sums_ps = []
    for _ in range(SUMS):
        sums_ps.append(psum((128, moving.shape[1])))
    for i in range(count):
        turn = i % SUMS
        nisa.nc_matmul(
            dst=sums_ps[turn],
            stationary=stationary_sb[:, 128 * turn : 128 * turn + 128],
            moving=moving_sb,
        )
    out_sb = sbuf((128, moving.shape[1]))
    nisa.tensor_copy(dst=out_sb, src=sums_ps[0])
    for turn in range(1, SUMS):
        nisa.tensor_tensor(dst=out_sb, data1=out_sb, data2=sums_ps[turn], op=nl.add)
    return give(out_sb)


@nki.jit
def functions(x, count, in_turns):
    """Applies exp(-y) and SiLU(y) `count` times each to x [128, N] float32, in turns or all of one
    first.

    Each takes the result of the one before, so that nothing changes their order. In turns, 2 count
    - 2 more tables are loaded than otherwise.
    """
    y_sb = load(x, nl.float32)
    for i in range(2 * count):
        out_sb = sbuf(x.shape)
        is_exp = i % 2 == 0 if in_turns else i < count
        nisa.activation(
            dst=out_sb, op=nl.exp if is_exp else nl.silu, data=y_sb, scale=-1.0 if is_exp else 1.0
        )
        y_sb = out_sb
    return give(y_sb)


def on_chip(arguments: Sequence[Any]) -> list[Any]:
    """Returns a kernel's arguments with arrays as tensors on the chip."""
    device = machine.pick("xla")
    return [to_tensor(x).to(device) if isinstance(x, np.ndarray) else x for x in arguments]


def wall_clock(kernel: Any, *arguments: Any) -> float:
    """Returns the median of microseconds from launch to result,
    without the first call, which compiles.
    """
    device, given, times = machine.pick("xla"), on_chip(arguments), []
    for _ in range(21):
        machine.synchronize(device)
        begin = time.perf_counter()
        outputs = run(kernel, *given)
        machine.synchronize(device)
        times.append(1e6 * (time.perf_counter() - begin))
        del outputs
    return median(times[1:])


def model_clock(kernel: Any, *arguments: Any) -> float:
    """Returns the cost model's microseconds."""
    run = record(kernel, *arguments, target="trn1")
    return estimate(run.trace, run.target).schedule


def chain(clock: Clock, dry: bool) -> dict[str, Any]:
    """Computes the forms of tools/first_hour_chain.py,
    each of which says what follows where it fails.
    """
    found = try_forms(torch.device("cpu") if dry else machine.pick("xla"))
    bad = [name for name, what in found.items() if what != "right"]
    return {
        **found,
        "decides": f"look at {bad[0]} first" if bad else "graphs of several kernels can run",
    }


def precision(clock: Clock, dry: bool) -> dict[str, Any]:
    """Computes sums whose terms need 24 bits, and names the precision that gives this error."""
    if dry:
        result = record(products, *operands(), target="trn1").outputs
    else:
        result = run(products, *on_chip(operands())).cpu().numpy()
    name, error = verdict(result)
    decides = "float32 parity can be green: run delta-trn parity --backend nki"
    if name != "float32":
        decides = (
            "float32 parity cannot be green: set --auto-cast=none in NEURON_CC_FLAGS and measure "
            "again"
        )
    return {"products": name, "error": error, "decides": decides}


def rate(clock: Clock, dry: bool) -> dict[str, Any]:
    """Measures the cycles of a product, and compares them with the cost model's."""
    cycles: dict[str, dict[int, float]] = {}
    few, many = (8, 40) if dry else COUNTS
    for name, dtype in DTYPES.items():
        for n in COLUMNS:
            given = np.ones((128, 512), dtype), np.ones((128, n), dtype)
            extra = clock(products, *given, many) - clock(products, *given, few)
            measured = extra / (many - few) * TARGETS["trn1"].tensor_ghz * 1e3
            cycles.setdefault(name, {})[n] = max(round(measured, 1), 0.1)
    ratio = median(
        COSTS.product(n, 128, 128, fp32=name == "float32") / c
        for name, of in cycles.items()
        for n, c in of.items()
    )
    good = 0.9 <= ratio <= 1.1
    return {
        "cycles": cycles,
        "model": ratio,
        "decides": "the cost model's products hold: its estimates can be trusted"
        if good
        else f"the cost model has {ratio:.2f} times what was measured: correct Costs "
        "(nki_simulator/cost.py) before an order is searched by it",
    }


def tables(clock: Clock, dry: bool) -> dict[str, Any]:
    """Compares functions in turns with the same functions grouped: the difference is loads of
    tables.

    Each function waits for the one before, by the model for 0.14 us, which a load hides.
    """
    x, pairs = np.zeros((128, 8), np.float32), 8 if dry else PAIRS
    turns, grouped = (clock(functions, x, pairs, in_turns) for in_turns in (True, False))
    load = (turns - grouped) / (2 * pairs - 2)
    verdict = "loads count: keep functions grouped, and roots on GpSimd"
    if load < LOAD_US / 4:
        verdict = (
            "loads hardly count: roots may go back to the Scalar engine (invert_sums in tiles.py)"
        )
    decides = (
        f"LOAD_US is {load:.3f} to {load + 0.2:.3f} (simulator/core/tables.py has {LOAD_US}); "
        f"{verdict}"
    )
    return {"load_us": load, "decides": decides}


def kernel(clock: Clock, dry: bool) -> dict[str, Any]:
    """Measures one sequence of 1,024 tokens and 6 heads by the difference of two lengths."""
    first, last = (256, 512) if dry else (1024, 2048)
    times = {}
    for name, module in (("forward", gated_delta_rule_fwd), ("backward", gated_delta_rule_bwd)):
        examples = [module.example(T=length, **SHAPE) for length in (first, last)]
        short, long = (clock(function, *arguments) for function, arguments in examples)
        times[name] = (long - short) * 1024 / (last - first)
    within = all(1 / 1.3 <= MODEL_US[name] / us <= 1.3 for name, us in times.items())
    verdict = (
        "can be trusted for our kernels" if within else "is wrong for our kernels: profile one call"
    )
    return {
        "us": times,
        "model": MODEL_US,
        "decides": f"the cost model {verdict} (within 1.3 times)",
    }


def measure_step(dry: bool, sequences: int, **changes: str) -> float:
    """Returns the median of seconds of a training step; the first two,
    which compile, are not timed.
    """
    own = {"device": "cpu"} if dry else {"device": "xla", "model.width": "512"}
    own |= {"batch.sequences": str(sequences), "batch.micro": "1", **changes}
    work = Workload(apply(announce("tiny" if dry else "gdn_mup_adamw"), own))
    return median([work(OURS) for _ in range(9)][2:])


def layer(clock: Clock, dry: bool) -> dict[str, Any]:
    """Measures models of one and of three layers."""
    one, three = (measure_step(dry, 1, **{"model.layers": str(n)}) for n in (1, 3))
    return {
        "seconds": (three - one) / 2,
        "decides": "beyond its kernels' times: profile what lies between them",
    }


def step(clock: Clock, dry: bool) -> dict[str, Any]:
    """Measures a step of the whole model."""
    seconds = measure_step(dry, SEQUENCES)
    return {"seconds": seconds, "decides": "beyond its layers: the host may be tracing"}


def main(arguments: Sequence[str] | None = None) -> int:
    stages = {
        stage.__name__: stage for stage in (chain, precision, rate, tables, kernel, layer, step)
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="no stage: all")
    parser.add_argument("--dry", action="store_true", help="by the simulator, without a chip")
    parser.add_argument("--json", type=Path, help="appends a JSON object per stage to this file")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.stages if name not in stages]:
        raise SystemExit(f"stage {unknown[0]!r} is not one of {', '.join(stages)}")
    if not options.dry and "xla" not in machine.platforms():
        raise SystemExit(
            "torch_xla is not installed: run in AWS's environment on a Trn1, or with --dry"
        )
    if not options.dry and RUNTIME != "neuron":
        raise SystemExit("nki is not installed: docs/trainium.md says how; or run with --dry")
    clock, failed = model_clock if options.dry else wall_clock, False
    for name in options.stages or stages:
        try:
            found = stages[name](clock, options.dry)
        except Exception as error:  # the next stages may still tell something
            traceback.print_exc()
            found, failed = (
                {"decides": f"FAILED, look at it first: {type(error).__name__}: {error}"[:400]},
                True,
            )
        print(f"{name}{' (dry: by the model, or a CPU: not measured)' if options.dry else ''}")
        print(*(f"  {key}: {x}" for key, x in found.items()), sep="\n", flush=True)
        if options.json:
            with options.json.open("a") as lines:
                row = {"stage": name, "dry": options.dry, "torch": torch.__version__, **found}
                print(json.dumps(row), file=lines)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
