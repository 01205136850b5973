"""The first hour on a Trn1 chip: what to measure, in order, and what each figure decides.

    python -m tools.first_hour_trn1 [STAGE ...] [--dry] [--json FILE]

    chain       small kernels, form by form: which one a graph of a whole layer would fail by, and
                which forms that we avoid could come back
    calls       what a kernel's call costs in a graph, and what it does to bmm beside it
    functions   errors of exp, silu and others beside float64: what float32 parity allows
    precision   how exact float32 products are, and by which side they lose digits
    rate        time of a product of 128, 256 and 512 columns, beside what others measured
    tables      what loading a table of the Scalar engine costs
    kernel      forward and backward of one sequence: how far the model is from our own kernels
    layer       models of 1 and 3 layers: half of the difference is a layer, beside its kernels
    step        the whole model on 15 sequences, as on each of 32 cores, beside its kernels
    cache       whether a kernel that was edited is compiled again
    zero1       whether a graph with ZeRO-1's collectives starts a second time, from the cache

Every stage has a bound, and says one thing where its figure keeps it and another where not. On a
chip each runs in a process of its own, so that one which ends its process does not end the others.
With --dry no chip is needed: the simulator runs the kernels, its cost model stands for the clock,
the recipe `tiny` runs on the CPU, and both verdicts of each stage are printed.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from delta_trn.backends import machine
from delta_trn.backends.nki_runtime_adapter import run, to_tensor
from delta_trn.backends.parity.tables import MEDIAN, MOST
from delta_trn.nki_kernels.language import RUNTIME, nisa, nki, nl
from delta_trn.nki_kernels.tiles import load, psum, sbuf
from delta_trn.train.recipes import announce
from delta_trn.train.settings.overrides import apply
from delta_trn.train.studies.throughput import OURS, Workload
from nki_simulator import record
from nki_simulator.core.tables import LOAD_US
from nki_simulator.cost import estimate
from tools.first_hour_chain import doubled, explain, try_apart, try_form, try_forms

Clock = Callable[..., float]  # clock(kernel, *arguments): microseconds
Figures = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
SUMS = 4  # PSUM tiles, and stationary tiles, that take turns
# worst relative error where operands are rounded: 15 2^-12 to 0, and half of 2^-10
LIMITS = (("float32", 2e-6), ("tfloat32", 2.0**-10), ("bfloat16", 2.0**-7))
# ns of a product of 128 x 128 and as many moving columns in bfloat16: foxl-ai/kiln,
# tools/probe_engine_rates.py, on trn1.2xlarge with nki 0.6.0
PRODUCT_NS = {128: 48.0, 256: 175.0, 512: 219.0}
RATE_WITHIN = 1.15
PAIRS = 1024  # of functions in turns: by the model, 2.6 ms of loading tables
COUNTS = (512, 4608)  # the difference takes 0.1 to 3.5 ms, a launch varies by less than 0.1
CALLS = (1, 2, 6)
CALL_US, BESIDE = 50.0, 1.5  # above, calls decide how a layer is cut; others measured 210 and 7.6
KERNEL_WITHIN = 1.3
BETWEEN = 2.0  # times what its kernels take, by the model: above, what lies between them decides
SHAPE = {"B": 1, "H": 6, "K": 128, "V": 256, "dtype": "bfloat16"}
RULE = "delta_trn.nki_kernels.gated_delta_rule_"
LAYER = "delta_trn.nki_kernels.gated_delta_layer."
SEQUENCES = 15  # of each core of a trn1.32xlarge with 480 sequences a step
STAGE_SECONDS = 5400  # of one stage on a chip, compiling included


class Verdict(NamedTuple):
    """Says whether a figure keeps its bound, and what follows."""

    holds: bool
    decides: str


@dataclass(frozen=True)
class Stage:
    """A stage of the first hour.

    bound   what its figure is held to
    sides   figures that keep the bound, and figures that do not
    fails   what to do where the stage itself fails
    """

    measure: Callable[[Clock, bool], Figures]
    judge: Callable[[Figures], Verdict]
    bound: str
    sides: tuple[Figures, Figures]
    fails: str


def give(tile_sb):
    """Copies a tile to HBM and returns it: the output of a kernel."""
    out = nl.ndarray(tile_sb.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile_sb)
    return out


def operands(side: str = "both"):
    """Returns what `products` takes for the same product `SUMS` times: their sum is as exact as
    each.

    side    which operand needs more digits than bfloat16 has; the other one holds 1 and 2 alone
    """
    rng = np.random.default_rng(0)
    a_t, b = ((1 + rng.integers(0, 16, (128, 128)) * 2.0**-12).astype(np.float32) for _ in range(2))
    plain = rng.integers(1, 3, (128, 128)).astype(np.float32)
    if side == "stationary":
        b = plain
    elif side == "moving":
        a_t = plain
    return np.tile(a_t, (1, SUMS)), b, SUMS


def name_precision(result, side: str = "both"):
    """Names the precision of a result of `products` of `operands`,
    and returns its worst relative error.
    """
    stationary, b, _ = operands(side)
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
def apply_in_turns(x, count, in_turns):
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


@nki.jit
def apply_one(x, which):
    """Applies function number `which` of FUNCTIONS to x [128, N] float32."""
    x_sb = load(x, nl.float32)
    if which == 0:
        nisa.activation(dst=x_sb, op=nl.exp, data=x_sb)
    if which == 1:
        nisa.activation(dst=x_sb, op=nl.silu, data=x_sb)
    if which == 2:
        nisa.activation(dst=x_sb, op=nl.silu_dx, data=x_sb)
    if which == 3:
        nisa.activation(dst=x_sb, op=nl.sigmoid, data=x_sb)
    if which == 4:
        nisa.activation(dst=x_sb, op=nl.softplus, data=x_sb)
    if which == 5:
        nisa.activation(dst=x_sb, op=nl.rsqrt, data=x_sb)
    if which == 6:
        nisa.activation(dst=x_sb, op=nl.log, data=x_sb)
    if which == 7:
        nisa.activation(dst=x_sb, op=nl.reciprocal, data=x_sb)
    return give(x_sb)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _spread(low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, 128 * 64).reshape(128, 64).astype(np.float32)


def _powers(low: float, high: float) -> np.ndarray:
    return (2.0 ** np.linspace(low, high, 128 * 64)).reshape(128, 64).astype(np.float32)


# by name, in the order of `apply_one`: float64's, and arguments over the range of our kernels
FUNCTIONS: Mapping[str, tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]] = {
    "exp": (np.exp, _spread(-87.0, 0.0)),
    "silu": (lambda x: x * _sigmoid(x), _spread(-20.0, 20.0)),
    "silu_dx": (lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))), _spread(-20.0, 20.0)),
    "sigmoid": (_sigmoid, _spread(-20.0, 20.0)),
    "softplus": (lambda x: np.logaddexp(x, 0.0), _spread(-20.0, 20.0)),
    "rsqrt": (lambda x: x**-0.5, _powers(-80.0, 90.0)),
    "log": (np.log, _powers(-20.0, 60.0)),
    "reciprocal": (lambda x: 1 / x, _powers(-40.0, 40.0)),
}
NEAR_ZERO = 0.1  # an error is relative to at least so much where a function crosses 0


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


def graph_clock(compute: Callable[[], Any]) -> float:
    """Returns the median of microseconds of a graph, without the first, which compiles it."""
    device, times = machine.pick("xla"), []
    for _ in range(21):
        machine.synchronize(device)
        begin = time.perf_counter()
        outputs = compute()
        machine.synchronize(device)
        times.append(1e6 * (time.perf_counter() - begin))
        del outputs
    return median(times[1:])


def model_clock(kernel: Any, *arguments: Any) -> float:
    """Returns the cost model's microseconds."""
    run = record(kernel, *arguments, target="trn1")
    return estimate(run.trace, run.target).schedule


def model_us(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[float]:
    """Returns the cost model's microseconds of kernels: a module's `example` with options.

    Beside a chip the kernels are AWS's, which leave no trace: there another process takes the
    simulator's.
    """
    if RUNTIME == "simulator":
        examples = [import_module(name).example(**options) for name, options in calls]
        return [model_clock(kernel, *arguments) for kernel, arguments in examples]
    program = f"import tools.first_hour_trn1 as h; print(h.json.dumps(h.model_us({calls!r})))"
    environment = {**os.environ, "DELTA_TRN_NKI_RUNTIME": "simulator"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the cost model failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def is_time(*figures: float) -> bool:
    """Returns whether all are times: differences of two measurements may be noise instead."""
    return all(math.isfinite(x) and x > 0 for x in figures)


def no_time(what: str, figure: float, unit: str) -> Verdict:
    return Verdict(
        False,
        f"nothing: {what} is {figure:.3g} {unit}, so the noise of two measurements is larger than "
        "their difference; run this stage again, alone on an idle machine",
    )


def measure_chain(clock: Clock, dry: bool) -> Figures:
    """Computes the forms of tools/first_hour_chain.py, on a chip each in a process of its own."""
    here = partial(try_form, device=torch.device("cpu"))
    return dict(try_forms(here if dry else try_apart))


def judge_chain(found: Figures) -> Verdict:
    bad = [name for name, what in found.items() if what.startswith(("FAILED", "WRONG"))]
    back = [name for name, what in found.items() if what.startswith("not ours, right")]
    if bad:
        return Verdict(False, f"look at {bad[0]} first: {found[bad[0]]}")
    more = f"; what our kernels avoid and could have: {', '.join(back)}" if back else ""
    return Verdict(True, f"our kernels' forms are right, and graphs of several can run{more}")


def measure_calls(clock: Clock, dry: bool) -> Figures:
    """Times graphs of 1, 2 and 6 kernels that do next to nothing, and bmm with and without one.

    Dry, the model counts kernels alone, and bmm runs on the CPU.
    """
    small, wide = np.ones((128, 64), np.float32), torch.ones(8, 128, 128)
    if dry:
        own = clock(doubled, small)
        times = {n: n * own for n in CALLS}
        timed: Callable[[Callable[[], Any]], float] = _cpu_clock
        x = torch.from_numpy(small)
        call = x.clone
    else:
        device = machine.pick("xla")
        x, wide, timed = torch.from_numpy(small).to(device), wide.to(device), graph_clock

        def repeat(n: int) -> Any:
            y = x
            for _ in range(n):
                y = run(doubled, y)
            return y

        def call() -> Any:
            return run(doubled, x)

        times = {n: timed(lambda n=n: repeat(n)) for n in CALLS}

    def products() -> Any:
        y = wide
        for _ in range(8):
            y = torch.bmm(y, wide) / 128
        return y

    alone, beside = timed(products), timed(lambda: (products(), call()))
    few, many = CALLS[-2:]
    return {
        "graph_us": times,
        "call_us": (times[many] - times[few]) / (many - few),
        "beside_bmm": beside / alone,
    }


def _cpu_clock(compute: Callable[[], Any]) -> float:
    times = []
    for _ in range(21):
        begin = time.perf_counter()
        compute()
        times.append(1e6 * (time.perf_counter() - begin))
    return median(times[1:])


def judge_calls(found: Figures) -> Verdict:
    us, beside = found["call_us"], found["beside_bmm"]
    if not is_time(us, beside):
        return no_time("a call", us, "us")
    said = []
    if us > CALL_US:
        said.append(
            f"a call costs {us:.0f} us: the fused layer, with 4 calls fewer, saves "
            f"{4 * us / 1e3:.2f} ms a layer and step whatever its kernels take, so keep it, and "
            "give more sequences to a call"
        )
    if beside > BESIDE:
        said.append(
            f"bmm beside a kernel takes {beside:.1f} times as long: see that no graph of training "
            "has both (stage `layer`), or write the product as a matmul of two dimensions"
        )
    if said:
        return Verdict(False, "; ".join(said))
    return Verdict(
        True,
        f"a call costs {us:.0f} us and leaves bmm alone: the kernels' own times decide how a layer "
        "is cut",
    )


def measure_functions(clock: Clock, dry: bool) -> Figures:
    """Applies each function over its range, and compares it with float64's.

    A function that this release lacks is named, and the others go on.
    """
    found: Figures = {}
    for which, (name, (exact, x)) in enumerate(FUNCTIONS.items()):
        try:
            y = run(apply_one, *(on_chip([x, which]) if not dry else [torch.from_numpy(x), which]))
        except Exception as error:  # what a compiler raises is of no one type
            found[name] = {"failed": explain(error)}
            continue
        expected = exact(x.astype(np.float64))
        least = NEAR_ZERO if name in ("silu_dx", "log") else 0.0
        off = np.abs(y.cpu().numpy() - expected) / np.maximum(np.abs(expected), least)
        found[name] = {"median": float(np.median(off)), "most": float(off.max())}
        if name == "exp":
            found[name]["at_0"] = float(y.cpu().numpy()[-1, -1]) - 1.0
    return found


def judge_functions(found: Figures) -> Verdict:
    failed = {name: of["failed"] for name, of in found.items() if "failed" in of}
    if failed:
        name, why = next(iter(failed.items()))
        return Verdict(False, f"kernels that use {name} do not run: {why}")
    # 5% for the rounding of float32 itself
    off = [
        f"{name} (median {of['median']:.2g}, at most {of['most']:.2g})"
        for name, of in found.items()
        if not (of["median"] <= 1.05 * MEDIAN and of["most"] <= 1.05 * MOST)
    ]
    if off:
        return Verdict(
            False,
            f"functions are off by more than parity in float32 grants, {MEDIAN:g} and at most "
            f"{MOST:g}: {', '.join(off)}; it will be red for that reason, until MEDIAN and MOST of "
            "backends/parity/tables.py are what was measured here",
        )
    worst = max(of["most"] for of in found.values())
    return Verdict(
        True,
        f"functions are off by {worst:.2g} at most: float32 parity can be green, judged by samples "
        "with such functions; expect about 1e-5 of the largest number",
    )


def measure_precision(clock: Clock, dry: bool) -> Figures:
    """Computes sums whose terms need 24 bits, and sums in which one side alone needs 13."""
    found: Figures = {}
    for side in ("both", "stationary", "moving"):
        given = operands(side)
        if dry:
            result = record(products, *given, target="trn1").outputs
        else:
            result = run(products, *on_chip(given)).cpu().numpy()
        name, error = name_precision(result, side)
        found |= {side: name, f"{side}_error": error}
    return found


def judge_precision(found: Figures) -> Verdict:
    short = [side for side in ("both", "stationary", "moving") if found[side] != "float32"]
    if not short:
        return Verdict(
            True, "products are float32 on either side: stage `functions` decides parity"
        )
    sides = [side for side in short if side != "both"] or ["both"]
    return Verdict(
        False,
        f"float32 parity cannot be green: products have {found[sides[0]]} where "
        f"{' and '.join(sides)} need more digits; set --auto-cast=none in NEURON_CC_FLAGS and "
        "measure again",
    )


def measure_rate(clock: Clock, dry: bool) -> Figures:
    """Measures a product by the difference of many and few."""
    few, many = (8, 40) if dry else COUNTS
    found: Figures = {}
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
        ns = {}
        for n in PRODUCT_NS:
            given = np.ones((128, 512), dtype), np.ones((128, n), dtype)
            extra = clock(products, *given, many) - clock(products, *given, few)
            ns[n] = round(1e3 * extra / (many - few), 1)
        found[name] = ns
    return found


def judge_rate(found: Figures) -> Verdict:
    ns = {int(n): x for n, x in found["bfloat16"].items()}
    if not is_time(*ns.values()):
        return no_time("a product", min(ns.values()), "ns")
    off = {n: x for n, x in ns.items() if not 1 / RATE_WITHIN <= x / PRODUCT_NS[n] <= RATE_WITHIN}
    if off:
        listed = ", ".join(
            f"{x:g} ns at {n} columns, not {PRODUCT_NS[n]:g}" for n, x in off.items()
        )
        return Verdict(
            False,
            f"products do not take what others measured: {listed}; add these to the published "
            "points of the cost model (packages/nki-simulator, `nki-simulator calibrate`), and "
            "order the kernels again",
        )
    return Verdict(True, "products take what others measured, by which the cost model is fitted")


def measure_tables(clock: Clock, dry: bool) -> Figures:
    """Compares functions in turns with the same functions grouped: the difference is loads of
    tables.

    Each function waits for the one before, by the model for 0.14 us, which a load hides.
    """
    x, pairs = np.zeros((128, 8), np.float32), 8 if dry else PAIRS
    turns, grouped = (clock(apply_in_turns, x, pairs, in_turns) for in_turns in (True, False))
    return {"load_us": (turns - grouped) / (2 * pairs - 2)}


def judge_tables(found: Figures) -> Verdict:
    load = found["load_us"]
    if not math.isfinite(load) or load < -LOAD_US / 4:
        return no_time("a load", load, "us")
    said = (
        f"LOAD_US is {load:.3f} to {load + 0.2:.3f} (the simulator's core/tables.py has {LOAD_US})"
    )
    if load < LOAD_US / 4:
        return Verdict(False, f"{said}; loads hardly count: functions need not be grouped")
    return Verdict(True, f"{said}; loads count: keep functions grouped")


def measure_kernel(clock: Clock, dry: bool) -> Figures:
    """Measures one sequence of 1,024 tokens and 6 heads by the difference of two lengths."""
    first, last = (256, 512) if dry else (1024, 2048)
    us, model = {}, {}
    for name, module in (("forward", f"{RULE}fwd"), ("backward", f"{RULE}bwd")):
        options = [{"T": length, **SHAPE} for length in (first, last)]
        examples = [import_module(module).example(**of) for of in options]
        short, long = (clock(function, *arguments) for function, arguments in examples)
        us[name] = (long - short) * 1024 / (last - first)
        short, long = model_us([(module, of) for of in options])
        model[name] = (long - short) * 1024 / (last - first)
    return {"us": us, "model": model}


def judge_kernel(found: Figures) -> Verdict:
    us, model = found["us"], found["model"]
    if not is_time(*us.values()):
        return no_time("a sequence", min(us.values()), "us")
    ratios = {name: us[name] / model[name] for name in us}
    listed = ", ".join(f"{name} {ratio:.2f} times the model" for name, ratio in ratios.items())
    if all(1 / KERNEL_WITHIN <= ratio <= KERNEL_WITHIN for ratio in ratios.values()):
        return Verdict(True, f"the cost model can be trusted for our kernels: {listed}")
    return Verdict(False, f"the cost model is wrong for our kernels: {listed}; profile one call")


def measure_step_seconds(dry: bool, sequences: int, **changes: str) -> float:
    """Returns the median of seconds of a training step; the first two,
    which compile, are not timed.
    """
    own = {"device": "cpu"} if dry else {"device": "xla", "model.width": "512"}
    own |= {"batch.sequences": str(sequences), "batch.micro": "1", **changes}
    work = Workload(apply(announce("tiny" if dry else "gdn_mup_adamw"), own))
    return median([work(OURS) for _ in range(9)][2:])


@cache
def layer_kernels(dry: bool) -> float:
    """Returns the seconds that the model gives a layer's kernels for one sequence, both ways."""
    options = {**SHAPE, "T": 256} if dry else SHAPE
    return sum(model_us([(f"{LAYER}fwd", {**options, "save": 1}), (f"{LAYER}bwd", options)])) / 1e6


def measure_layer(clock: Clock, dry: bool) -> Figures:
    """Measures models of one and of three layers."""
    one, three = (measure_step_seconds(dry, 1, **{"model.layers": str(n)}) for n in (1, 3))
    return {"seconds": (three - one) / 2, "kernels": layer_kernels(dry)}


def judge_layer(found: Figures) -> Verdict:
    seconds, kernels = found["seconds"], found["kernels"]
    if not is_time(seconds):
        return no_time("a layer", seconds, "s")
    said = f"a layer takes {1e3 * seconds:.2f} ms, its kernels {1e3 * kernels:.2f} by the model"
    if seconds <= BETWEEN * kernels:
        return Verdict(True, f"{said}: the kernels decide, so order and cut them")
    return Verdict(
        False, f"{said}: profile what lies between them, calls (stage `calls`) and XLA's parts"
    )


def measure_step(clock: Clock, dry: bool) -> Figures:
    """Measures a step of the whole model."""
    layers = announce("tiny" if dry else "gdn_mup_adamw").model.layers
    return {
        "seconds": measure_step_seconds(dry, SEQUENCES),
        "kernels": SEQUENCES * layers * layer_kernels(dry),
    }


def judge_step(found: Figures) -> Verdict:
    seconds, kernels = found["seconds"], found["kernels"]
    if not is_time(seconds):
        return no_time("a step", seconds, "s")
    said = f"a step takes {seconds:.3f} s, the kernels of its layers {kernels:.3f} by the model"
    if seconds <= BETWEEN * kernels:
        return Verdict(True, f"{said}: the device decides")
    return Verdict(
        False,
        f"{said}: see whether the host is tracing (a core of it is busy throughout): then take "
        "more sequences in a micro-batch; if not, the readout and XLA's parts decide: profile them",
    )


_EDITED = """
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.tiles import load
from first_hour_helper import scale


def give(x_sb):
    out = nl.ndarray(x_sb.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x_sb)
    return out


@nki.jit
def own(x):
    x_sb = load(x, nl.float32)
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0={factor})
    return give(x_sb)


@nki.jit
def helped(x):
    x_sb = load(x, nl.float32)
    scale(x_sb)
    return give(x_sb)
"""
_HELPER = """
from delta_trn.nki_kernels.language import nisa, nl


def scale(x_sb):
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0={factor})
"""
_RUN_EDITED = """
import sys
import torch
from delta_trn.backends import machine
from delta_trn.backends.nki_runtime_adapter import run
from first_hour_edited import helped, own

x = torch.ones(128, 64).to(machine.pick(sys.argv[1]))
print(*(int(run(kernel, x).cpu()[0, 0]) for kernel in (own, helped)))
"""


def measure_cache(clock: Clock, dry: bool) -> Figures:
    """Runs two kernels, edits one and a function that the other calls, and runs them again, all
    with a cache of compilations that begins empty.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for factor in (2.0, 3.0):
            edited = Path(folder, "first_hour_edited.py")
            edited.write_text(_EDITED.replace("{factor}", str(factor)))
            Path(folder, "first_hour_helper.py").write_text(_HELPER.format(factor=factor))
            path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, **_empty_cache(folder), "PYTHONPATH": path}
            # Python's own cache takes a file of the same second and size for the same
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
            done = subprocess.run(
                [sys.executable, "-c", _RUN_EDITED, "cpu" if dry else "xla"], env=environment,
                cwd=folder, capture_output=True, text=True, timeout=900,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            results.append([int(word) for word in done.stdout.splitlines()[-1].split()])
    names = ("edited kernel", "edited function that a kernel calls")
    stale = dict(zip(names, ("right" if x == 3 else "stale" for x in results[1]), strict=True))
    return {"first": results[0], "second": results[1], **stale}


def _empty_cache(folder: str) -> dict[str, str]:
    return {"NEURON_COMPILE_CACHE_URL": str(Path(folder, "compilations"))}


def judge_cache(found: Figures) -> Verdict:
    stale = [name for name, what in found.items() if what == "stale"]
    if stale:
        return Verdict(
            False,
            f"an {' and an '.join(stale)} still gives the old numbers: the cache does not hold the "
            "source; remove the folder that NEURON_COMPILE_CACHE_URL names "
            "(/var/tmp/neuron-compile-cache without it) whenever a kernel changes",
        )
    return Verdict(True, "a kernel that was edited is compiled again: the cache can stay")


def measure_zero1(clock: Clock, dry: bool) -> Figures:
    """Starts two processes twice, with a cache of compilations that begins empty."""
    found: Figures = {}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [*launch, "-m", "tools.first_hour_ranks", "cpu" if dry else "xla"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **_empty_cache(folder)}
        for start in ("first", "second"):
            begin = time.monotonic()
            done = subprocess.run(
                words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900
            )
            found[f"{start}_s"] = round(time.monotonic() - begin, 1)
            lines = (done.stdout + done.stderr).strip().splitlines() or [""]
            right = done.returncode == 0 and done.stdout.count("right") == 2
            wrong = [line for line in lines if "WRONG" in line or "rror" in line] or lines[-1:]
            found[start] = "right" if right else f"failed: {explain(RuntimeError(wrong[0]))}"
            if not right:
                break
    return found


def judge_zero1(found: Figures) -> Verdict:
    if found["first"] != "right":
        return Verdict(
            False,
            f"ZeRO-1 does not run: {found['first']}; take distribution.mode=ddp, and reboot the "
            "instance if collectives hang from now on",
        )
    if found["second"] != "right":
        return Verdict(
            False,
            f"ZeRO-1 runs once, and not from the cache: {found['second']}; after `warmup` remove "
            "the cached graph of the update, or take distribution.mode=ddp; reboot the instance if "
            "collectives hang from now on",
        )
    first, second = found["first_s"], found["second_s"]
    return Verdict(True, f"ZeRO-1 starts from the cache: {first:g} s, then {second:g} s")


STAGES: Mapping[str, Stage] = {
    "chain": Stage(
        measure_chain,
        judge_chain,
        "every form of our kernels is right",
        (
            {"one kernel": "right"},
            {"one kernel": "right", "three free dimensions": "FAILED: split"},
        ),
        "not one kernel was tried: see that `make neuron` found nki and torch_xla",
    ),
    "calls": Stage(
        measure_calls,
        judge_calls,
        f"a call in a graph takes at most {CALL_US:g} us, bmm beside one {BESIDE:g} times as long",
        ({"call_us": 8.0, "beside_bmm": 1.0}, {"call_us": 210.0, "beside_bmm": 7.6}),
        "stage `chain` says whether several kernels in a graph can run at all",
    ),
    "functions": Stage(
        measure_functions,
        judge_functions,
        f"each function is off by {MEDIAN:g} in the median and {MOST:g} at most",
        (
            {"exp": {"median": MEDIAN, "most": MOST}},
            {"exp": {"median": MEDIAN, "most": 10 * MOST}},
        ),
        "float32 on the chip is not known: run parity in bfloat16 alone",
    ),
    "precision": Stage(
        measure_precision,
        judge_precision,
        "products of float32 are off by 2e-6 at most, whichever side needs the digits",
        (
            dict.fromkeys(("both", "stationary", "moving"), "float32"),
            {"both": "bfloat16", "stationary": "bfloat16", "moving": "float32"},
        ),
        "float32 on the chip is not known: run parity in bfloat16 alone",
    ),
    "rate": Stage(
        measure_rate,
        judge_rate,
        f"products take {', '.join(f'{x:g} ns at {n}' for n, x in PRODUCT_NS.items())} columns, "
        f"within {RATE_WITHIN:g} times",
        ({"bfloat16": PRODUCT_NS}, {"bfloat16": {**PRODUCT_NS, 256: 107.0}}),
        "keep the cost model as it is fitted",
    ),
    "tables": Stage(
        measure_tables,
        judge_tables,
        f"a load takes at least a quarter of the model's {LOAD_US} us",
        ({"load_us": LOAD_US}, {"load_us": 0.0}),
        "keep functions grouped",
    ),
    "kernel": Stage(
        measure_kernel,
        judge_kernel,
        f"our kernels take what the model says, within {KERNEL_WITHIN:g} times",
        (
            {"us": {"forward": 200.0}, "model": {"forward": 210.0}},
            {"us": {"forward": 400.0}, "model": {"forward": 210.0}},
        ),
        "run `delta-trn parity --backend nki --case ragged`, the least case of the same kernels",
    ),
    "layer": Stage(
        measure_layer,
        judge_layer,
        f"a layer takes at most {BETWEEN:g} times what its kernels take by the model",
        (
            {"seconds": 1.5e-3, "kernels": 1.2e-3},
            {"seconds": 9e-3, "kernels": 1.2e-3},
        ),
        "stages `chain` and `kernel` say which of its parts cannot run",
    ),
    "step": Stage(
        measure_step,
        judge_step,
        f"a step takes at most {BETWEEN:g} times what its layers' kernels take by the model",
        ({"seconds": 0.3, "kernels": 0.2}, {"seconds": 1.2, "kernels": 0.2}),
        "stage `layer` has the same parts with one sequence: go on when it runs",
    ),
    "cache": Stage(
        measure_cache,
        judge_cache,
        "what was edited gives the new numbers in the next process",
        ({"edited kernel": "right"}, {"edited kernel": "stale"}),
        "until it is known, remove the cache of compilations whenever a kernel changes",
    ),
    "zero1": Stage(
        measure_zero1,
        judge_zero1,
        "both starts are right, of which the second finds its graph in the cache",
        (
            {"first": "right", "first_s": 60.0, "second": "right", "second_s": 12.0},
            {"first": "right", "first_s": 60.0, "second": "failed: replica groups differ"},
        ),
        "train with distribution.mode=ddp",
    ),
}


def run_stage(name: str, clock: Clock, dry: bool) -> Figures:
    """Returns a stage's figures, whether they keep the bound, and what they decide.

    A stage that fails says so under its own name; the next may still tell something.
    """
    stage = STAGES[name]
    try:
        found = stage.measure(clock, dry)
        verdict = stage.judge(found)
    except Exception as error:  # what a compiler raises is of no one type
        traceback.print_exc()
        return {"failed": True, **failure(name, f"{type(error).__name__}: {explain(error)}")}
    row = {**found, "bound": stage.bound, "holds": verdict.holds, "decides": verdict.decides}
    if dry:
        row["verdicts"] = [stage.judge(figures).decides for figures in stage.sides]
    return row


def failure(name: str, why: str) -> Figures:
    return {
        "bound": STAGES[name].bound,
        "holds": False,
        "decides": f"FAILED: stage {name} has no figure; {STAGES[name].fails} ({why})"[:600],
    }


def run_apart(name: str, path: Path | None) -> int:
    """Runs a stage in a process of its own, and says so where the process ends without a word."""
    words = [sys.executable, "-m", "tools.first_hour_trn1", name]
    words += ["--json", str(path)] if path else []
    try:
        code = subprocess.run(words, cwd=ROOT, timeout=STAGE_SECONDS).returncode
    except subprocess.TimeoutExpired:
        code = None
    if code in (0, 1):
        return code
    why = f"it took more than {STAGE_SECONDS} s" if code is None else f"its process ended: {code}"
    if code is not None and code < 0:
        why = f"{signal.Signals(-code).name} ended its process, after the last line above"
    show(name, {"failed": True, **failure(name, why)}, False, path)
    return 1


def show(name: str, row: Figures, dry: bool, path: Path | None) -> None:
    """Prints a stage's lines, and appends them to a file."""
    print(f"{name}{' (dry: by the model, or a CPU: not measured)' if dry else ''}")
    for key, x in row.items():
        if key == "verdicts":
            print(f"  would say, within the bound: {x[0]}\n  would say, beyond it: {x[1]}")
        elif key != "failed":
            print(f"  {key}: {x}")
    sys.stdout.flush()
    if path:
        with path.open("a") as lines:
            whole = {"stage": name, "dry": dry, "torch": torch.__version__, **row}
            print(json.dumps(whole), file=lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="no stage: all")
    parser.add_argument("--dry", action="store_true", help="by the simulator, without a chip")
    parser.add_argument("--json", type=Path, help="appends a JSON object per stage to this file")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.stages if name not in STAGES]:
        raise SystemExit(f"stage {unknown[0]!r} is not one of {', '.join(STAGES)}")
    if not options.dry and "xla" not in machine.platforms():
        raise SystemExit(
            "torch_xla is not installed: run in AWS's environment on a Trn1, or with --dry"
        )
    if not options.dry and RUNTIME != "neuron":
        raise SystemExit("nki is not installed: docs/trainium.md says how; or run with --dry")
    names = options.stages or list(STAGES)
    if len(names) > 1 and not options.dry:
        path = options.json and options.json.resolve()
        return max([run_apart(name, path) for name in names])
    failed = False
    for name in names:
        row = run_stage(name, model_clock if options.dry else wall_clock, options.dry)
        failed |= row.pop("failed", False)
        show(name, row, options.dry, options.json)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
