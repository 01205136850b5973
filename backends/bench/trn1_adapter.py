"""The first hour on a Trn1 chip: what to measure of the kernels, in order, and what each figure decides.

    python -m backends.bench.trn1_adapter [STAGE ...] [--dry READING] [--json FILE]

    precision   how exact float32 products are: whether float32 parity can be green at all
    rate        cycles of a product of N = 64 to 512 columns: which reading of the cost model holds
    tables      what loading a table of the Scalar engine costs: whether changes of function matter
    none        whether a None argument compiles a kernel again at each call
    kernel      forward and backward of one sequence: how far the model is from our own kernels

`make measure-trn1` runs these, then a layer and a step (train/studies/trn1.py). With --dry, no chip is
needed: the simulator runs the kernels, and its cost model under that reading stands for the clock.
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
from delta_trn.nki_kernels import gated_delta_rule_bwd, gated_delta_rule_fwd, precision_probe
from delta_trn.nki_kernels.precision_probe import doubled, functions, products
from delta_trn.nki_kernels.simulator import TARGETS, record
from delta_trn.nki_kernels.simulator.core.tables import LOAD_US
from delta_trn.nki_kernels.simulator.cost import READINGS, Reading, estimate

Clock = Callable[..., float]  # clock(kernel, *arguments): microseconds
COLUMNS = (64, 128, 256, 512)
PAIRS = 1024  # of functions in turns: by the model, 2.6 ms of loading tables
COUNTS = (512, 4608)  # the difference takes 0.1 to 3.5 ms, a launch varies by less than 0.1
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHAPE = {"B": 1, "H": 6, "K": 128, "V": 256, "dtype": "bfloat16"}
LENGTHS = (1024, 2048)


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
    given = precision_probe.operands()
    if dry:
        result = record(precision_probe.product, *given, target="trn1").outputs
    else:
        device = machine.pick("xla")
        result = run(precision_probe.product, *(to_tensor(x).to(device) for x in given)).cpu().numpy()
    name, error = precision_probe.verdict(result)
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
        [
            sys.executable,
            "-m",
            "delta_trn.backends.bench.trn1_adapter",
            "kernel",
            "--dry",
            reading.name,
            "--json",
            "-",
        ],
        env={**os.environ, "DELTA_TRN_NKI_RUNTIME": "simulator"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(output.stdout.splitlines()[-1])["us"]


STAGES = {"precision": precision, "rate": rate, "tables": tables, "none": none, "kernel": kernel}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m backends.bench.trn1_adapter",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; none: all")
    parser.add_argument("--dry", choices=[r.name for r in READINGS], help="by the simulator, without a chip")
    parser.add_argument(
        "--json", type=Path, help="appends a JSON object per stage to this file; -: prints it"
    )
    options = parser.parse_args(arguments)
    for name in options.stages:
        if name not in STAGES:
            raise SystemExit(f"stage {name!r} is not one of {', '.join(STAGES)}")
    if not options.dry and "xla" not in machine.platforms():
        raise SystemExit(
            "torch_xla is not installed: run this in AWS's environment on a Trn1, or with --dry issue"
        )
    reading = next((r for r in READINGS if r.name == options.dry), None)
    clock = model_clock(reading) if reading else wall_clock
    for name in options.stages or STAGES:
        result = {"stage": name, "dry": options.dry, "torch": torch.__version__}
        result |= STAGES[name](clock, bool(reading))
        print(f"{name}{' (dry: by the model, not measured)' if reading else ''}")
        print(
            *(f"  {key}: {value}" for key, value in result.items() if key not in ("stage", "torch")), sep="\n"
        )
        if options.json == Path("-"):
            print(json.dumps(result))
        elif options.json:
            with options.json.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
