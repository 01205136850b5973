"""Times other launches of the Triton kernels than those of the table, one kernel after the other.

    python -m backends.bench.tune CASE ... [--dtype NAME] [--seconds S] [--json FILE]

The gain of a tile is the time of the kernel's pass with the table's tile over the time with a
neighboring one (other widths, warps, stages, and upright or not); above 1, the neighbor is faster.
A tile whose 20th percentile is above 1 is kept for the kernels that follow, and the resulting row
must pass parity. The row is printed, to be put into `triton_kernels.launch` by hand: nothing is
tuned at run time. A tile that the device refuses is printed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from delta_trn.backends.bench.__main__ import contender, pass_call
from delta_trn.backends.bench.timing import Spread, time_in_turns
from delta_trn.backends.checks import BackendRefusal, dtype_name
from delta_trn.backends.gated_delta_rule.triton_adapter import Config, Tile, adjust, config
from delta_trn.backends.machine import facts
from delta_trn.backends.parity.__main__ import Subject, subjects
from delta_trn.backends.parity.rule import verdicts
from delta_trn.backends.parity.rule_cases import Case, inputs, select

# kernel -> the pass that it belongs to
KERNELS = {"prepare": "forward", "scan": "forward", "reverse": "backward", "gradients": "backward"}
TURNED = ("scan", "reverse")  # their tiles may stand upright


# One tile of one kernel. gain: the table's time over this one's; None: `refusal` says why there is
# none.
Trial = dict[str, Any]


def candidates(tile: Tile, V: int, *, turns: bool = False) -> list[Tile]:
    """Returns the neighbors of a tile: half and twice the columns and warps, one stage more and
    less.

    With `turns`, also the tile that stands upright where this one lies, and the other way round.
    """
    columns = [n for n in (tile.columns // 2, tile.columns * 2) if tile.columns and 16 <= n < 2 * V]
    warps = [n for n in (tile.warps // 2, tile.warps * 2) if 2 <= n <= 8]
    stages = [n for n in (tile.stages - 1, tile.stages + 1) if 1 <= n <= 4]
    return [
        *(replace(tile, columns=n) for n in columns),
        *(replace(tile, warps=n) for n in warps),
        *(replace(tile, stages=n) for n in stages),
        *([replace(tile, upright=not tile.upright)] if turns else []),
    ]


def launches(case: Case, dtype: torch.dtype) -> Config:
    """Returns the rows of the launch table for a case."""
    return config(case.K, case.V, itemsize=dtype.itemsize, heads=case.sequences * case.value_heads)


def under(row: Config, call: Callable[[], None]) -> Callable[[], None]:
    """Returns the call with every launch taken from `row`."""
    return adjust(lambda _: row)(call)


def tune(
    subject: Subject, case: Case, dtype: torch.dtype, seconds: float
) -> Iterator[tuple[Config, list[Trial]]]:
    """Yields, after each kernel, the best row so far and what was tried."""
    device = torch.device(subject.device)
    row = launches(case, dtype)
    x = inputs(case, dtype).to(device)
    for kernel, phase in KERNELS.items():
        now = getattr(row, kernel)
        tiles = (now, *candidates(now, case.V, turns=kernel in TURNED))
        rows = {tile: replace(row, **{kernel: tile}) for tile in tiles}
        about = {"case": case.name, "dtype": dtype_name(dtype), "kernel": kernel}
        trials, calls = [], {}
        for tile, changed in rows.items():
            call = under(changed, pass_call(contender(subject.backend), x, phase))
            try:
                call()
                calls[str(tile)] = call
            except (
                Exception
            ) as refusal:  # Triton has a class for each way in which a launch can fail
                reason = f"{type(refusal).__name__}: {refusal}".splitlines()[0]
                trials.append({**about, "tile": tile, "gain": None, "refusal": reason})
        times = time_in_turns(calls, device, seconds)
        best, most = now, 1.0
        for tile in rows:
            if str(tile) in times:
                pairs = zip(times[str(now)], times[str(tile)], strict=True)
                gain = Spread.of([before / after for before, after in pairs])
                trials.append({**about, "tile": tile, "gain": gain, "refusal": None})
                if gain.p20 > most:
                    best, most = tile, gain.p20
        row = rows[best]
        yield row, trials


def failures(subject: Subject, case: Case, dtype: torch.dtype, row: Config) -> str:
    """Returns the verdicts of the case's parity that fail with that row, each on a new line."""
    with adjust(lambda _: row):
        judged = verdicts(case, dtype, subject.backend, subject.device)
    return "".join(f"\n{verdict}" for verdict in judged if not verdict.passed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m backends.bench.tune", description="Times other launches than the table's"
    )
    parser.add_argument("case", nargs="+", help="names of cases")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="per kernel (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object per line")
    options = parser.parse_args(argv)
    try:
        subject = subjects(["triton"])[0]
        cases = select(options.case)
        if stateful := [case.name for case in cases if case.state]:
            raise ValueError(
                f"{stateful[0]} starts from a state; only cases that do not are timed by pass"
            )
    except (BackendRefusal, ValueError) as complaint:
        print(complaint, file=sys.stderr)
        return 2
    if subject.emulated:
        print("in the interpreter: these times say nothing about a GPU")
    machine_facts, dtype = facts(torch.device(subject.device)), getattr(torch, options.dtype)
    lines, red = [], False
    for case in cases:
        row = launches(case, dtype)
        for best, trials in tune(subject, case, dtype, options.seconds):
            row = best
            for trial in trials:
                gain = trial["gain"] or trial["refusal"]
                print(f"{case.name} {trial['kernel']} {trial['tile']}: {gain}", flush=True)
                lines.append(trial | machine_facts)
        failed = failures(subject, case, dtype, row)
        red |= bool(failed)
        print(f"{case.name}: {row}, parity {'red' if failed else 'green'}{failed}")
    if options.json:
        options.json.write_text("".join(json.dumps(line, default=asdict) + "\n" for line in lines))
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
