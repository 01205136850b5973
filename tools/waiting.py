"""Times training steps with each way in which idle threads may wait, alone and beside a busy process.

    python -m tools.waiting [--runs N] [--steps N] [key=value ...]

    ours    as delta-trn sets it (`train.__main__.WAITING`)     spin    libgomp's own: 300,000 looks
    sleep   at once                                             one     one thread, which waits for nobody

The ways take turns, a process each, with the steps of `quickstart` on random tokens. Prints the medians of
the processes' tokens/s, and ours over the best of the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from delta_trn.train.__main__ import WAITING

WAYS: dict[str, dict[str, str]] = {
    "ours": WAITING,
    "spin": {"GOMP_SPINCOUNT": "300000"},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "one": {"OMP_NUM_THREADS": "1"},
}
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WARM = 5  # steps before the first that counts


def train(steps: int, changes: Sequence[str]) -> float:
    """Returns the tokens/s of this process."""
    # torch reads the variables when it is loaded
    from delta_trn.train.recipes import recipe
    from delta_trn.train.settings.overrides import apply, parse
    from delta_trn.train.studies.throughput import OURS, Workload

    workload = Workload(apply(recipe("quickstart"), parse(["device=cpu", *changes])))
    seconds = [workload(OURS) for _ in range(WARM + steps)][WARM:]
    return steps * workload.batch.inputs.numel() / sum(seconds)


def time_in_a_process(way: str, steps: int, changes: Sequence[str]) -> float:
    """Returns the tokens/s of a process whose threads wait in a way."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | WAYS[way]
    command = [sys.executable, "-m", "tools.waiting", "--child", "--steps", str(steps), *changes]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keeps as many other processes busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="processes of each way (default: 5)")
    parser.add_argument("--steps", type=int, default=60, help="of each process (default: 60)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("changes", nargs="*", metavar="key=value")
    given = parser.parse_args()
    if given.child:
        print(train(given.steps, given.changes))
        return
    for others in (0, 1):
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        with busy(others):
            for _ in range(given.runs):
                for way, measured in rates.items():
                    measured.append(time_in_a_process(way, given.steps, given.changes))
        medians = {way: statistics.median(measured) for way, measured in rates.items()}
        best = max(value for way, value in medians.items() if way != "ours")
        words = ", ".join(f"{way} {value:,.0f}" for way, value in medians.items())
        print(f"{others} busy: {words} tokens/s; ours over the best {medians['ours'] / best:.2f}", flush=True)


if __name__ == "__main__":
    main()
