"""Holds the model against published times of an H200.

    python -m tools.estimate.calibration

calibration.csv has rows of FlashQLA's benchmark (https://github.com/QwenLM/FlashQLA, MIT,
benchmark/benchmark_results_H200.txt, read 2026-11-22): the forward of flash-linear-attention 0.5.1
on an H200, torch 2.9.1 and its Triton 3.5.1, bfloat16, K = V = 128, in a CUDA graph, 100
repetitions. These are the rows of equal lengths of three of its models; lengths are in tokens,
times in milliseconds.

calibration.json.gz holds the machine code of that release, compiled by that Triton: opcodes and
control codes, and of the operands only what the model reads. The autotuner chose a configuration of
every kernel when the benchmark began; the recorded one is the fastest by the model at 1 x 32768.
The program that recorded it is in git's history (`git show 50ffe7c:tools/estimate/calibration.py`,
with peer.py beside it). So the comparison needs neither of the two packages, and a change of the
model shows in it at once.

The two factors of `estimates` were fitted to these rows: before, the geometric mean of estimated
over measured was 0.93 and the spread 4.0%.
"""

import csv
import gzip
import json
from math import exp, log, sqrt
from pathlib import Path

from delta_trn.triton_kernels.sass import Code, Instruction
from tools.estimate import peer
from tools.estimate.estimates import of_code, time_move
from tools.estimate.work import Launch, Shape

DATA = Path(__file__).with_name("calibration.json.gz")
SIZE = 128  # K and V
# heads of queries and keys, heads of values -> (sequences, tokens in each) -> milliseconds
MEASURED: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
with Path(__file__).with_suffix(".csv").open() as _file:
    for _row in list(csv.reader(_file))[1:]:
        _H, _HV, _sequences, _tokens = map(int, _row[:4])
        MEASURED.setdefault((_H, _HV), {})[_sequences, _tokens] = float(_row[4])


def compare(heads: tuple[int, int], lengths: tuple[int, int], kernels: dict[str, dict]) -> float:
    """Returns estimated over measured for a row of MEASURED, with `kernels` from `load`."""
    shape = Shape(*lengths, *heads, SIZE, SIZE)
    sizes = peer.Sizes(shape)
    # zeros of A; the running sum of g
    microseconds = time_move(sizes.A) + time_move(2 * sizes.gates)
    for name in peer.FORWARD:
        choice = kernels["choices"][f"{heads[1]} {name}"]
        words = (word.partition("=") for word in choice.split())
        blocks = {n: int(v) for n, _, v in words if n in ("BK", "BV")}
        launch = Launch(name, False, None, peer.work(peer.KERNELS[name], shape, blocks))
        microseconds += of_code(launch, kernels["codes"][choice]).microseconds
    return microseconds / 1e3 / MEASURED[heads][lengths]


def load() -> dict[str, dict]:
    """Returns the recorded machine code by options,
    and which of it runs at each number of heads.
    """
    with gzip.open(DATA, "rt") as file:
        data = json.load(file)
    codes = {
        name: Code(tuple(Instruction(*x) for x in code.pop("instructions")), **code)
        for name, code in data["codes"].items()
    }
    return {"codes": codes, "choices": data["choices"]}


def spread(ratios: list[float]) -> tuple[float, float]:
    """Returns the geometric mean of the ratios and the root mean square
    of their logarithms from it.
    """
    logarithms = [log(ratio) for ratio in ratios]
    mean = sum(logarithms) / len(logarithms)
    return exp(mean), sqrt(sum((x - mean) ** 2 for x in logarithms) / len(logarithms))


def main() -> None:
    """Prints estimated over measured for every row."""
    kernels, ratios = load(), []
    print(
        "| heads | sequences x tokens | measured ms | estimated ms | ratio |\n" + "| --- " * 5 + "|"
    )
    for heads, rows in MEASURED.items():
        for lengths, measured in rows.items():
            ratio = compare(heads, lengths, kernels)
            ratios.append(ratio)
            print(
                f"| {heads[0]}/{heads[1]} | {lengths[0]} x {lengths[1]} | {measured:.3f} "
                f"| {ratio * measured:.3f} | {ratio:.2f} |", flush=True,
            )  # fmt: skip
    mean, deviation = spread(ratios)
    print(
        f"estimated / measured over {len(ratios)} rows: geometric mean {mean:.3f}, spread "
        f"{deviation:.1%}"
    )


if __name__ == "__main__":
    main()
