"""The first hour on a Trn1 chip: what to measure, in order, and what each figure decides.

    python -m tools.first_hour_trn1 [STAGE ...] [KEY=VALUE ...] [--dry READING] [--recipe NAME] [--json FILE]

    precision   how exact float32 products are: whether float32 parity can be green at all
    rate        cycles of a product of N = 64 to 512 columns: which reading of the cost model holds
    tables      what loading a table of the Scalar engine costs: whether changes of function matter
    none        whether a None argument compiles a kernel again at each call
    kernel      forward and backward of one sequence: how far the model is from our own kernels
    layer       forward, backward, update of models of 1 and 3 layers: half of the difference is a layer
    step        the whole model on 15 sequences, as on each of 32 cores

Keys change the recipe of the last two. With --dry no chip is needed: the simulator runs the kernels, its cost
model under that reading stands for the clock, and the recipe `tiny` runs on the CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
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
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.simulator import TARGETS, record
from delta_trn.nki_kernels.simulator.core.tables import LOAD_US
from delta_trn.nki_kernels.simulator.cost import READINGS, Reading, estimate
from delta_trn.nki_kernels.tiles import load, psum, sbuf
from delta_trn.train.recipes import announced
from delta_trn.train.settings.overrides import apply, parse
from delta_trn.train.studies.throughput import OURS, Workload

Clock = Callable[..., float]  # clock(kernel, *arguments): microseconds
SUMS = 4  # PSUM tiles, and stationary tiles, that take turns
# worst relative error where operands are rounded: 15 2^-12 to 0, and half of 2^-10
LIMITS = (("float32", 2e-6), ("tfloat32", 2.0**-10), ("bfloat16", 2.0**-7))
COLUMNS = (64, 128, 256, 512)
PAIRS = 1024  # of functions in turns: by the model, 2.6 ms of loading tables
COUNTS = (512, 4608)  # the difference takes 0.1 to 3.5 ms, a launch varies by less than 0.1
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHAPE = {"B": 1, "H": 6, "K": 128, "V": 256, "dtype": "bfloat16"}
LENGTHS = (1024, 2048)
SEQUENCES = 15  # of each core of a trn1.32xlarge with 480 sequences a step


@nki.jit
def product(a_t, b):
    """Computes a b by one matmul from a^T [K, M] and b [K, N], float32."""
    a_t_sb, b_sb = load(a_t, nl.float32), load(b, nl.float32)
    out_ps = psum((a_t.shape[1], b.shape[1]))
    nisa.nc_matmul(dst=out_ps, stationary=a_t_sb, moving=b_sb)
    out_sb = sbuf(out_ps.shape)
    nisa.tensor_copy(dst=out_sb, src=out_ps)
    out = nl.ndarray(out_ps.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=out_sb)
    return out


def operands():
    """Returns a^T and b."""
    rng = np.random.default_rng(0)
    return [(1 + rng.integers(0, 16, (128, 128)) * 2.0**-12).astype(np.float32) for _ in range(2)]


def verdict(result):
    """Names the precision of a result of `product` of `operands`, and returns its worst relative error."""
    a_t, b = (x.astype(np.float64) for x in operands())
    exact = a_t.T @ b
    error = float((np.abs(result - exact) / exact).max())
    for name, limit in LIMITS:
        if error <= limit:
            return name, error
    return "less than bfloat16", error


@nki.jit
def products(stationary, moving, count):
    """Returns the sum of `count` products of stationary [128, 512] and moving [128, N], [128, N] float32.

        product i = stationary[:, 128 (i mod 4) : 128 (i mod 4 + 1)].T @ moving

    Successive products have other stationary sides, as in our kernels, so that each loads its weights.
    """
    stationary_sb, moving_sb = load(stationary, stationary.dtype), load(moving, moving.dtype)
    sums_ps = []
    for _ in range(SUMS):
        sums_ps.append(psum((128, moving.shape[1])))
    for i in range(count):
        turn = i % SUMS
        nisa.nc_matmul(
            dst=sums_ps[turn], stationary=stationary_sb[:, 128 * turn : 128 * turn + 128], moving=moving_sb
        )
    out_sb = sbuf((128, moving.shape[1]))
    nisa.tensor_copy(dst=out_sb, src=sums_ps[0])
    for turn in range(1, SUMS):
        nisa.tensor_tensor(dst=out_sb, data1=out_sb, data2=sums_ps[turn], op=nl.add)
    out = nl.ndarray(out_sb.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=out_sb)
    return out


@nki.jit
def doubled(x, nothing=None):
    """Returns 2 x for x [128, N] float32; `nothing` is not read."""
    x_sb = load(x, nl.float32)
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0=2.0)
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x_sb)
    return out


@nki.jit
def functions(x, count, in_turns):
    """Applies exp(-y) and SiLU(y) `count` times each to x [128, N] float32, in turns or all of one first.

    Each takes the result of the one before, so that nothing changes their order. In turns, 2 count - 2 more
    tables are loaded than otherwise.
    """
    y_sb = load(x, nl.float32)
    for i in range(2 * count):
        out_sb = sbuf(x.shape)
        is_exp = i % 2 == 0 if in_turns else i < count
        if is_exp:
            nisa.activation(dst=out_sb, op=nl.exp, data=y_sb, scale=-1.0)
        else:
            nisa.activation(dst=out_sb, op=nl.silu, data=y_sb)
        y_sb = out_sb
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=y_sb)
    return out


def wall_clock(kernel: Any, *arguments: Any, rounds: int = 20) -> float:
    """Returns the median of microseconds from launch to result, without the first call, which compiles."""
    device = machine.pick("xla")
    given = [to_tensor(x).to(device) if isinstance(x, np.ndarray) else x for x in arguments]
    times = []
    for turn in range(rounds + 1):
        machine.synchronize(device)
        begin = time.perf_counter()
        outputs = run(kernel, *given)
        machine.synchronize(device)
        if turn:
            times.append(1e6 * (time.perf_counter() - begin))
        del outputs
    return median(times)


def model_clock(reading: Reading) -> Clock:
    """Returns a clock that asks the simulator's cost model."""

    def clock(kernel: Any, *arguments: Any) -> float:
        run = record(kernel, *arguments, target="trn1")
        return estimate(run.trace, run.target, reading).schedule

    return clock


def precision(clock: Clock, dry: bool) -> dict[str, Any]:
    """Computes sums whose terms need 24 bits, and names the precision that gives this error."""
    given = operands()
    if dry:
        result = record(product, *given, target="trn1").outputs
    else:
        device = machine.pick("xla")
        result = run(product, *(to_tensor(x).to(device) for x in given)).cpu().numpy()
    name, error = verdict(result)
    decides = (
        "float32 parity can be green: run delta-trn parity --backend nki"
        if name == "float32"
        else "float32 parity cannot be green: set --auto-cast=none in NEURON_CC_FLAGS and measure again"
    )
    return {"products": name, "error": error, "decides": decides}


def rate(clock: Clock, dry: bool) -> dict[str, Any]:
    """Measures the cycles of a pass, and names the reading of the cost model that is nearer to them."""
    ghz = TARGETS["trn1"].tensor_ghz
    cycles: dict[str, dict[int, float]] = {}
    far = dict.fromkeys((reading.name for reading in READINGS), 0.0)
    few, many = (8, 40) if dry else COUNTS
    for dtype, passes in (("float32", 4), ("bfloat16", 1)):
        stationary = np.ones((128, 512), DTYPES[dtype])
        for n in COLUMNS:
            moving = np.ones((128, n), DTYPES[dtype])
            longer, shorter = (
                clock(products, stationary, moving, many),
                clock(products, stationary, moving, few),
            )
            measured = (longer - shorter) / (many - few) * ghz * 1e3 / passes
            cycles.setdefault(dtype, {})[n] = round(measured, 1)
            for reading in READINGS:
                ratio = max(measured, 1e-3) / reading.cycles(n, 1)
                far[reading.name] += float(np.log(ratio)) ** 2
    points = [(n, c) for of in cycles.values() for n, c in of.items()]
    slope, offset = np.polyfit([n for n, _ in points], [c for _, c in points], 1)
    nearer = min(far, key=lambda name: far[name])
    return {
        "cycles_per_pass": cycles,
        "fit": f"{slope:.2f} cycles per column and {offset:.0f} per pass",
        "reading": nearer,
        "decides": f"the cost model's reading is `{nearer}`: keep it alone in READINGS (simulator/cost.py), "
        "with the fitted numbers; by `issue`, fewer and wider products pay, by `rate`, fewer columns do",
    }


def tables(clock: Clock, dry: bool) -> dict[str, Any]:
    """Compares functions in turns with the same functions grouped: the difference is loads of tables.

    Each function waits for the one before, by the model for 0.14 us, which a load hides.
    """
    x, pairs = np.zeros((128, 8), np.float32), 8 if dry else PAIRS
    turns, grouped = (clock(functions, x, pairs, in_turns) for in_turns in (True, False))
    load = (turns - grouped) / (2 * pairs - 2)
    cheap = load < LOAD_US / 4
    verdict = (
        "loads hardly count: roots may go back to the Scalar engine (invert_sums in tiles.py)"
        if cheap
        else "loads count: keep functions grouped, and roots on GpSimd"
    )
    decides = f"LOAD_US is {load:.3f} to {load + 0.2:.3f} (simulator/core/tables.py has {LOAD_US}); {verdict}"
    return {"load_us": load, "decides": decides}


def none(clock: Clock, dry: bool) -> dict[str, Any]:
    """Compares the second call with a None with the second call with a tensor."""
    if dry:
        return {"decides": "nothing without a chip: the simulator refuses None for nki 0.2 and 0.3"}
    x = to_tensor(np.ones((128, 512), np.float32)).to(machine.pick("xla"))
    times = {}
    for name, other in (("tensor", x), ("none", None)):
        for _ in range(3):
            begin = time.perf_counter()
            _ = doubled(x, other) + 0
            machine.synchronize(x.device)
            times[name] = time.perf_counter() - begin
    again = times["none"] > 10 * times["tensor"]
    verdict = "compiles again at each call: keep dummies" if again else "is free: dummies may go"
    return {
        "seconds": times,
        "compiles_again": again,
        "decides": f"a None argument {verdict} (nki_adapter.py)",
    }


def kernel(clock: Clock, dry: bool) -> dict[str, Any]:
    """Measures one sequence of 1,024 tokens and 6 heads by the difference of two lengths."""
    lengths = (256, 512) if dry else LENGTHS
    times = {}
    for name, module in (("forward", gated_delta_rule_fwd), ("backward", gated_delta_rule_bwd)):
        short, long = (clock(*of_length(module, length)) for length in lengths)
        times[name] = (long - short) * 1024 / (lengths[1] - lengths[0])
    if dry:
        return {"us": times, "decides": "nothing without a chip"}
    model = {reading.name: _modelled(reading) for reading in READINGS}
    ratios = {name: [us[name] / times[name] for us in model.values()] for name in times}
    within = all(any(1 / 1.3 <= r <= 1.3 for r in of) for of in ratios.values())
    verdict = "can be trusted for our kernels" if within else "is wrong for our kernels: profile one call"
    decides = f"the cost model {verdict} (within 1.3 times)"
    return {"us": times, "model_us": model, "model / measured": ratios, "decides": decides}


def of_length(module: Any, length: int) -> tuple[Any, ...]:
    """Returns a kernel of this module and its arguments."""
    function, arguments = module.example(T=length, **SHAPE)
    return function, *arguments


def _modelled(reading: Reading) -> dict[str, float]:
    """Returns the simulator's times, from a process that uses it even where AWS's nki is installed."""
    output = subprocess.run(
        [sys.executable, "-m", "tools.first_hour_trn1", "kernel", "--dry", reading.name, "--json", "-"],
        env={**os.environ, "DELTA_TRN_NKI_RUNTIME": "simulator"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(output.stdout.splitlines()[-1])["us"]


def measured(recipe: str, changes: dict[str, str], rounds: int = 7) -> float:
    """Returns the median of seconds of a step; the first two, which compile, are not timed."""
    work = Workload(apply(announced(recipe), changes))
    return median([work(OURS) for _ in range(rounds + 2)][2:])


def layer(recipe: str, changes: dict[str, str]) -> dict[str, Any]:
    one, three = (
        measured(recipe, {**changes, "batch.sequences": "1", "batch.micro": "1", "model.layers": str(n)})
        for n in (1, 3)
    )
    return {
        "seconds": (three - one) / 2,
        "decides": "beyond its kernels' times: profile what lies between them",
    }


def step(recipe: str, changes: dict[str, str]) -> dict[str, Any]:
    seconds = measured(recipe, {**changes, "batch.sequences": str(SEQUENCES), "batch.micro": "1"})
    return {"seconds": seconds, "decides": "a step beyond its layers: the host may be tracing"}


KERNELS = {"precision": precision, "rate": rate, "tables": tables, "none": none, "kernel": kernel}
MODELS = {"layer": layer, "step": step}


def main(arguments: Sequence[str] | None = None) -> int:
    stages = (*KERNELS, *MODELS)
    parser = argparse.ArgumentParser(
        prog="python -m tools.first_hour_trn1", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("words", nargs="*", metavar="STAGE|KEY=VALUE", help="no stage: all")
    parser.add_argument("--dry", choices=[r.name for r in READINGS], help="by the simulator, without a chip")
    parser.add_argument("--recipe", default="gdn_mup_adamw")
    parser.add_argument(
        "--json", type=Path, help="appends a JSON object per stage to this file; -: prints it"
    )
    options = parser.parse_args(arguments)
    chosen = [word for word in options.words if "=" not in word] or list(stages)
    if unknown := [name for name in chosen if name not in stages]:
        raise SystemExit(f"stage {unknown[0]!r} is not one of {', '.join(stages)}")
    if not options.dry and "xla" not in machine.platforms():
        raise SystemExit(
            "torch_xla is not installed: run this in AWS's environment on a Trn1, or with --dry issue"
        )
    reading = next((r for r in READINGS if r.name == options.dry), None)
    clock, recipe = (model_clock(reading), "tiny") if reading else (wall_clock, options.recipe)
    changes = {"device": "cpu"} if reading else {"device": "xla", "model.width": "512"}
    changes |= parse([word for word in options.words if "=" in word])
    for name in chosen:
        result = KERNELS[name](clock, bool(reading)) if name in KERNELS else MODELS[name](recipe, changes)
        result = {"stage": name, "dry": options.dry, "torch": torch.__version__, **result}
        print(f"{name}{' (dry: by the model, or a CPU: not measured)' if reading else ''}")
        print(*(f"  {key}: {x}" for key, x in result.items() if key not in ("stage", "torch")), sep="\n")
        if options.json == Path("-"):
            print(json.dumps(result))
        elif options.json:
            with options.json.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
