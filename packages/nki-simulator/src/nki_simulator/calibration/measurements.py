"""Published times of NKI kernels on Trn1, and which of our programs runs each kernel's
instructions.

measurements.csv has them. `ms` is the time in milliseconds; `vector` and `scalar` say how long
those engines were busy, in milliseconds or, by `busy`, as the share of that time, as published.
`where`: the source's file.

    AccelOpt   trn1.32xlarge, one core; profiled time, and the share of it in which each engine was
               active
    Autocomp   trn1.2xlarge; 99th percentile of nki.benchmark's time on the core
    AWS        device time in the tutorial's profiles; it names no chip, but 192 KiB of SBUF, which
               Trn1 has

The points of single instructions are in instructions.csv, those of other people's delta-rule kernels
in kernels.csv (`points` reads all three). Not here: LayerNorm of AWS, whose time includes the
launch; kernels that spill SBUF, which the simulator refuses (SwiGLU, LoRA, attention, softmax and
the first mamba of AccelOpt, the second mamba of AWS from 1024 steps on); and Trn2, of which no
published run of them states its configuration.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nki_simulator.calibration import programs

SOURCES = {
    "AccelOpt": (
        "https://github.com/zhang677/AccelOpt/tree/47e29a7c24704e3c3e534b5bcbf39cfac3f831e3"
    ),
    "Autocomp": "https://github.com/ucb-bar/autocomp/tree/dd26a5656bcd3158b80c36bc97500d76a495c765",
    "kiln": "https://github.com/foxl-ai/kiln (f5a7faf3: docs/neuron-notes.md, tools/probe_engine_rates.py)",
    "pantheonneuron": "https://github.com/pantheongpu/pantheonneuron",
    "AWS": (
        "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/guides/tutorials/fused_mamba.html"
    ),
}


@dataclass(frozen=True)
class Measurement:
    """One published time in milliseconds, and how to count its instructions.

    The program runs `runs` times one after the other, each with `parts` repetitions of its
    outermost loop. It is simulated with each number of repetitions in `samples`; a straight line
    through them leads to `parts`, which is exact in the number of instructions.
    """

    kernel: str
    source: str
    where: str
    ms: float
    program: Callable
    parts: float
    samples: tuple[int, ...]
    runs: int = 1
    size: int = 0  # K of a product, T of a scan
    vector: float | None = None  # published busy time of the Vector engine, ms
    scalar: float | None = None
    reason: str = ""  # why the model is far from the time, where it is, and from the busy times
    vector_reason: str = ""
    scalar_reason: str = ""


def _read(row: dict[str, str]) -> Measurement:
    ms = float(row["ms"])
    whole = ms if row["busy"] == "share" else 1.0
    vector, scalar = (
        whole * float(row[engine]) if row[engine] else None for engine in ("vector", "scalar")
    )
    samples = tuple(map(int, row["samples"].split()))
    return Measurement(
        row["kernel"], row["source"], row["where"], ms, getattr(programs, row["program"]),
        float(row["parts"]), samples, int(row["runs"]), int(row["size"]), vector, scalar,
        row["reason"], row["vector_reason"], row["scalar_reason"],
    )  # fmt: skip


with Path(__file__).with_suffix(".csv").open(newline="") as _file:
    MEASUREMENTS = tuple(map(_read, csv.DictReader(_file)))
