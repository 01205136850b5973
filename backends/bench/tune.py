"""Other launches of the Triton kernels than the table's, timed beside it, one kernel after the other.

    python -m backends.tune CASE ... [--dtype NAME] [--seconds S] [--json FILE]

For every case: what other widths, warps and stages make of the pass that a kernel belongs to, ours now over
theirs, above 1 where they are faster. What wins with its 20th percentile too is kept for the kernels that
follow, and the row that comes out must pass parity. It is printed for `triton_kernels.launch`, where a person
puts it: nothing is tuned at run time. Candidates that the device refuses are named with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from delta_trn.backends.bench.__main__ import contender, prepared
from delta_trn.backends.bench.timing import Spread, interleaved
from delta_trn.backends.gated_delta_rule.triton_adapter import Config, Tile, adjusted, config
from delta_trn.backends.machine import facts
from delta_trn.backends.parity.__main__ import Subject, subjects
from delta_trn.backends.parity.judge import verdicts
from delta_trn.backends.parity.rule_cases import Case, inputs, select
from delta_trn.backends.registry import BackendRefusal

# kernel -> the pass that it belongs to
KERNELS = {"prepare": "forward", "scan": "forward", "reverse": "backward", "gradients": "backward"}


@dataclass(frozen=True)
class Trial:
    """One tile of one kernel. gain: the table's time over this one's; None: `refusal` says why."""

    case: str
    dtype: str
    kernel: str
    tile: Tile
    gain: Spread | None
    refusal: str | None = None


def candidates(tile: Tile, V: int) -> list[Tile]:
    """A step from `tile` in each direction: half and twice the columns, the other warps, stages beside."""
    found = []
    if tile.columns:
        widths = (tile.columns // 2, tile.columns * 2)
        found += [replace(tile, columns=columns) for columns in widths if 16 <= columns < 2 * V]
    found += [replace(tile, warps=warps) for warps in (tile.warps // 2, tile.warps * 2) if 2 <= warps <= 8]
    found += [replace(tile, stages=tile.stages + step) for step in (-1, 1) if 1 <= tile.stages + step <= 4]
    return found


def under(row: Config, call: Callable[[], None]) -> Callable[[], None]:
    """The call with every launch by `row`."""

    def run() -> None:
        with adjusted(lambda _: row):
            call()

    return run


def tune(
    subject: Subject, case: Case, dtype: torch.dtype, seconds: float
) -> Iterator[tuple[Config, list[Trial]]]:
    """After each kernel: the best row so far, and what was tried."""
    device = torch.device(subject.device)
    row = config(case.K, case.V, itemsize=dtype.itemsize)
    given = inputs(case, dtype).to(device)
    name = str(dtype).removeprefix("torch.")
    for kernel, phase in KERNELS.items():
        now = getattr(row, kernel)
        rows = {tile: replace(row, **{kernel: tile}) for tile in (now, *candidates(now, case.V))}
        trials, calls = [], {}
        for tile, changed in rows.items():
            call = under(changed, prepared(contender(subject.backend), given, phase))
            try:
                call()
                calls[str(tile)] = call
            except Exception as refusal:  # Triton has a class for each way in which a launch cannot be
                reason = f"{type(refusal).__name__}: {refusal}".splitlines()[0]
                trials.append(Trial(case.name, name, kernel, tile, None, reason))
        times = interleaved(calls, device, seconds)
        for tile in rows:
            if str(tile) in times:
                pairs = zip(times[str(now)], times[str(tile)], strict=True)
                gain = Spread.of([mine / theirs for mine, theirs in pairs])
                trials.append(Trial(case.name, name, kernel, tile, gain))
        best = max((trial for trial in trials if trial.gain), key=lambda trial: trial.gain.p20)  # type: ignore[union-attr]
        if best.gain is not None and best.gain.p20 > 1:
            row = rows[best.tile]
        yield row, trials


def judged(subject: Subject, case: Case, dtype: torch.dtype, row: Config) -> list[str]:
    """What of the case's parity fails by that row."""
    with adjusted(lambda _: row):
        found = verdicts(case, dtype, subject.backend, subject.device)
    return [str(verdict) for verdict in found if not verdict.passed]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m backends.tune", description="Other launches than the table's"
    )
    parser.add_argument("case", nargs="+", help="names of cases")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="per kernel (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line")
    options = parser.parse_args(argv)
    try:
        subject = subjects(["triton"])[0]
        cases = select(options.case)
        if stateful := [case.name for case in cases if case.state]:
            raise ValueError(f"{stateful[0]} starts from a state; passes are timed of cases that do not")
    except (BackendRefusal, ValueError) as complaint:
        print(complaint, file=sys.stderr)
        return 2
    about = facts(torch.device(subject.device))
    if subject.emulated:
        print("in the interpreter: these times say nothing about a GPU")
    dtype = getattr(torch, options.dtype)
    lines: list[dict[str, Any]] = []
    red = False
    for case in cases:
        rows = []
        for best, trials in tune(subject, case, dtype, options.seconds):
            rows.append(best)
            for trial in trials:
                print(f"{case.name} {trial.kernel} {trial.tile}: {trial.gain or trial.refusal}", flush=True)
                lines.append(asdict(trial) | about)
        failed = judged(subject, case, dtype, rows[-1])
        red |= bool(failed)
        print(f"{case.name}: {rows[-1]}, parity {'red' if failed else 'green'}", *failed, sep="\n")
    if options.json:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
