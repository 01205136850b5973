"""Estimates what every kernel of the gated delta rule and of a layer takes on an H200 or H100,
without one.

    python -m tools.estimate [SHAPE ...] [--peer fla] [--device h100] [--json FILE] [--jobs N]
    python -m tools.estimate --check       fails where a kernel has become slower than recorded
    python -m tools.estimate --record [SHAPE ...]      records the estimates that --check compares
                                                       with
    python -m tools.estimate --launches scan [SHAPE ...]       tries other launches of a kernel

Every number is an estimate: kernels are compiled for sm_90 and their machine code runs on a model
of one SM (`machine` has its numbers and their sources, `calibration` how it compares with published
times). A row has registers and stack bytes per thread, shared memory per program in KB, programs at
once on an SM and what limits them, the three longest waits as shares of all cycles that warps
waited, and the time with its uncertainty.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import triton
from triton import knobs

from delta_trn.backends.compiler import NotCompiled
from tools.estimate import channel_layer, choices, layer_peers, layers, machine, peer
from tools.estimate.estimates import UNCERTAINTY, Estimate, Estimator
from tools.estimate.published import compare
from tools.estimate.simulate import simulator
from tools.estimate.work import SHAPES, bytes_alone, launches

RECORDED = Path(__file__).with_name("recorded.json")
# a kernel may become this much slower, and this much faster without a new record
SLOWER = 0.05


@dataclass(frozen=True)
class Row:
    """The estimate of one kernel. Where only its bytes count, all but the time is 0 or empty."""

    shape: str
    of: str
    kernel: str
    options: str
    backward: bool
    microseconds: float
    registers: int = 0
    stack: int = 0
    shared: int = 0
    warps: int = 0
    programs: int = 0
    limit: str = ""
    waits: dict[str, float] | None = None


def row(shape: str, of: str, estimate: Estimate) -> Row:
    """Returns what is printed and written of an estimate."""
    time = round(estimate.microseconds, 1)
    code, simulation = estimate.code, estimate.simulation
    if code is None or simulation is None:
        return Row(shape, of, estimate.name, estimate.options, estimate.backward, time)
    return Row(
        shape,
        of,
        estimate.name,
        estimate.options,
        estimate.backward,
        time,
        code.registers,
        code.stack,
        code.shared,
        code.warps,
        simulation.resident,
        simulation.limit,
        {cause: round(share, 3) for cause, share in simulation.waits.items()},
    )


def rows_of(shape: str, *, with_peer: bool = False) -> list[Row]:
    """Returns the estimates of a shape's kernels, and of those that stand beside them."""
    estimator, floor = Estimator(), ()
    if shape in layers.NAMES:
        ours, floor = layers.launches(shape), layers.bytes_alone(shape)
        theirs = partial(layer_peers.peers, shape)
    elif shape in channel_layer.NAMES:
        ours, theirs = channel_layer.ours(shape), channel_layer.peers
    else:
        ours, theirs = launches(SHAPES[shape]), partial(peer.launches, SHAPES[shape])
        floor = bytes_alone(SHAPES[shape]) if SHAPES[shape].rule else ()
    rows = [row(shape, "ours", estimator.estimate(launch)) for launch in ours]
    rows += [row(shape, "bytes alone", estimator.estimate(launch)) for launch in floor]
    if with_peer:
        of = f"fla {peer.version()}"
        rows += [row(shape, of, estimator.fastest(choice)) for choice in theirs()]
    return rows


def table(rows: list[Row], device: str = "h200") -> Iterator[str]:
    """Yields the lines of a shape's table, its sums and the ratios."""
    yield f"\n## {rows[0].shape}, bfloat16: estimated for an {device.upper()}, not measured\n"
    yield (
        "| of | kernel | launch | registers | stack | shared KB | programs per SM | waits | "
        "estimated us |"
    )
    yield "|" + " --- |" * 9
    for x in rows:
        uncertain = f"{x.microseconds:.0f} ± {UNCERTAINTY[x.backward] * x.microseconds:.0f}"
        cells = [x.of, x.kernel, "", "", "", "", "", "", uncertain]
        if x.waits:
            longest = sorted(x.waits.items(), key=lambda item: -item[1])[:3]
            cells[2:8] = [
                f"{x.options}, {x.warps} warps",
                str(x.registers),
                str(x.stack),
                f"{x.shared / 1024:.0f}",
                f"{x.programs} ({x.limit})",
                ", ".join(f"{cause} {share:.0%}" for cause, share in longest),
            ]
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""
    sums = {}
    for of in dict.fromkeys(x.of for x in rows):
        forward, backward = (
            sum(x.microseconds for x in rows if x.of == of and x.backward == direction)
            for direction in (False, True)
        )
        sums[of] = forward, backward, forward + backward
        yield (
            f"{of}: forward {forward:.0f} us, backward {backward:.0f} us, "
            f"together {forward + backward:.0f} us (estimated)"
        )
    if rows[0].shape in channel_layer.NAMES:
        yield from what_pytorch_moves(rows)
    if rows[0].shape in layers.NAMES:
        yield from kernel_by_kernel(rows)
    else:
        for of in list(sums)[1:]:
            ratios = [other / our for our, other in zip(sums["ours"], sums[of], strict=True)]
            yield (
                "{} over ours: forward {:.2f}, backward {:.2f}, together {:.2f} (estimated)".format(
                    of, *ratios
                )
            )
    if device == "h200":
        yield from compare(rows[0].shape, *sums["ours"][:2])


def kernel_by_kernel(rows: list[Row]) -> Iterator[str]:
    """Yields what stands beside each of our kernels, over ours;
    several kernels of one name are added.
    """
    times: dict[tuple[str, str], float] = {}
    for x in rows:
        times[x.of, x.kernel] = times.get((x.of, x.kernel), 0.0) + x.microseconds
    for (of, kernel), time in times.items():
        if of != "ours":
            yield f"{of} over ours: {kernel} {time / times['ours', kernel]:.2f} (estimated)"


def what_pytorch_moves(rows: list[Row]) -> Iterator[str]:
    """Yields how much of our layer is PyTorch's operations, and how many bytes a token they move."""
    ours = [x for x in rows if x.of == "ours"]
    small = sum(x.microseconds for x in ours if x.kernel.startswith(channel_layer.PYTORCH))
    moved = channel_layer.Moved.of(rows[0].shape)
    yield (
        f"of ours: kernels {sum(x.microseconds for x in ours) - small:.0f} us (estimated), and "
        f"{moved.count} operations of PyTorch {small:.0f} us: {moved.per_token / 1e3:.1f} KB a "
        "token, counted"
    )


def slower(rows: list[Row], recorded: dict) -> list[str]:
    """Returns in words which kernels deviate from the record, and how."""
    known, complaints = recorded["microseconds"], []
    for x in rows:
        before = known.get(x.shape, {}).get(x.kernel)
        if before is None:
            complaints.append(f"{x.shape} {x.kernel}: no estimate is recorded; run --record")
        elif x.microseconds > (1 + SLOWER) * before:
            complaints.append(
                f"{x.shape} {x.kernel}: {x.microseconds:.1f} us estimated, {before:.1f} recorded: "
                f"{x.microseconds / before - 1:.1%} slower, at most {SLOWER:.0%} passes unnoticed. "
                "If it is meant, run python -m tools.estimate --record"
            )
    return complaints


def record(rows: list[Row]) -> None:
    """Writes the estimates that --check compares with;
    shapes that were not estimated keep theirs.
    """
    recorded = json.loads(RECORDED.read_text())
    times = recorded["microseconds"] if recorded["triton"] == triton.__version__ else {}
    times |= {x.shape: {} for x in rows}
    for x in rows:
        if x.waits:
            times[x.shape][x.kernel] = x.microseconds
    RECORDED.write_text(
        json.dumps({"triton": triton.__version__, "microseconds": times}, indent=1) + "\n"
    )


def check(rows: list[Row]) -> int:
    """Compares with the record; returns 1 where a kernel has become slower."""
    recorded = json.loads(RECORDED.read_text())
    if recorded["triton"] != triton.__version__:
        print(
            f"not compared: the record is of Triton {recorded['triton']}, this is "
            f"{triton.__version__}"
        )
        return 0
    complaints = slower([x for x in rows if x.waits], recorded)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


def main(arguments: list[str] | None = None) -> int:
    """Prints the estimates that the command line selects;
    returns 1 where a kernel has become slower.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.estimate",
        description="estimate the kernels on an H200 or H100, without one",
    )
    names = (*SHAPES, *layers.NAMES, *channel_layer.NAMES)
    parser.add_argument(
        "shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(names)} (default: all)"
    )
    parser.add_argument(
        "--peer", choices=["fla"], help="flash-linear-attention's kernels beside ours"
    )
    parser.add_argument(
        "--device", choices=list(machine.DEVICES), default="h200", help="(default: h200)"
    )
    parser.add_argument(
        "--check", action="store_true", help="fail where a kernel is slower than recorded"
    )
    parser.add_argument(
        "--record", action="store_true", help="record the estimates that --check compares with"
    )
    parser.add_argument(
        "--launches", choices=list(choices.KERNELS), help="try other launches of this kernel"
    )
    parser.add_argument("--json", type=Path, help="write the rows here as well, one per line")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)"
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.shapes if name not in names]:
        parser.error(f"no shape is named {unknown[0]!r}; choose from: {', '.join(names)}")
    of_layers = {*layers.NAMES, *channel_layer.NAMES}
    if options.launches and (layer := set(options.shapes) & of_layers):
        parser.error(f"--launches is of the gated delta rule's shapes, not of {min(layer)}")
    if options.device != "h200" and (options.record or options.check):
        parser.error("what is recorded is of an H200; leave --device out")
    if knobs.runtime.interpret:
        parser.error(
            "TRITON_INTERPRET is set, so the kernels are Python functions; unset it to compile them"
        )
    try:
        simulator()
        if options.peer:
            peer.version()
    except (NotCompiled, peer.NotInstalled) as failure:
        parser.error(str(failure))
    machine.choose(options.device)
    if options.launches:
        for shape in options.shapes or SHAPES:
            for line in choices.table(options.launches, shape):
                print(line, flush=True)
        return 0
    rows = []
    with ProcessPoolExecutor(
        options.jobs, initializer=machine.choose, initargs=(options.device,)
    ) as pool:
        for found in pool.map(
            partial(rows_of, with_peer=bool(options.peer)), options.shapes or names
        ):
            rows += found
            print(*table(found, options.device), sep="\n", flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(x)) + "\n" for x in rows))
    if options.record:
        record(rows)
    return check(rows) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
