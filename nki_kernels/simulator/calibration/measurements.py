"""Published times of NKI kernels on Trn1, and which of our programs runs each kernel's instructions.

    AccelOpt   trn1.32xlarge, one core; profiled time, and the share of it in which each engine was active
    Autocomp   trn1.2xlarge; 99th percentile of nki.benchmark's time on the core
    AWS        device time in the tutorial's profiles; it names no chip, but 192 KiB of SBUF, which Trn1 has

The constants of the cost model were fitted to AccelOpt alone. AWS and Autocomp are held out.
Not here: LayerNorm of AWS, whose time includes the launch; kernels that spill SBUF, which the simulator
refuses (SwiGLU, LoRA, attention, softmax and the first mamba of AccelOpt, the second mamba of AWS from 1024
steps on); and Trn2, of which no published run states its configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass

from delta_trn.nki_kernels.simulator.calibration import programs

SOURCES = {
    "AccelOpt": "https://github.com/zhang677/AccelOpt/tree/47e29a7c24704e3c3e534b5bcbf39cfac3f831e3",
    "Autocomp": "https://github.com/ucb-bar/autocomp/tree/dd26a5656bcd3158b80c36bc97500d76a495c765",
    "AWS": "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/guides/tutorials/fused_mamba.html",
}
FITTED = "AccelOpt"


@dataclass(frozen=True)
class Measurement:
    """One published time in milliseconds, and how to count its instructions.

    The program runs `runs` times one after the other, each with `parts` repetitions of its outermost loop. It
    is simulated with each number of repetitions in `samples`; a straight line through them leads to `parts`,
    which is exact in the number of instructions.
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


CSV = "experiments/full_complete_local/profile_results.csv"
BEST = "experiments/full_complete_local/results/11110904_best_plan_id.csv"
GEMM, SCAN = "examples/trn-tutorial/1_gemm_trace.py", "examples/trn-tutorial/3_mamba_trace.py"
TUTORIAL = "device time and table of latencies"

MEASUREMENTS = (
    Measurement(
        "transpose, matmul 4096x2048x10944, fp32", "AccelOpt", CSV, 9.610311, programs.transpose_matmul,
        10944 / 1024, (1, 2), 4, size=2048, scalar=0.03794637727598188 * 9.610311,
    ),
    Measurement(
        "rmsnorm, matmul 4096x1024x2048, fp32", "AccelOpt", CSV, 1.05576, programs.rmsnorm_matmul, 4, (1, 2),
        vector=0.0387800620142612 * 1.05576, scalar=0.17750705431023017 * 1.05576,
    ),
    Measurement(
        "bmm 16x4096x64x4096, fp32", "AccelOpt", CSV, 4.610889, programs.bmm, 4, (1, 2), 64, size=64,
        scalar=0.3725796722076541 * 4.610889,
    ),
    Measurement(
        "matmul 4096x5120x12288, fp32", "AccelOpt", CSV, 35.199742, programs.matmul, 32, (1, 2), 12,
        size=5120, scalar=0.06802961330956193 * 35.199742,
    ),
    Measurement(
        "mamba, best, 256x7168", "AccelOpt", BEST, 2.277542, programs.mamba_keeping, 2, (2,),
        size=7168, vector=1.7847, scalar=0.5425,
    ),
    Measurement(
        "SiLU 4096x7168", "AccelOpt", CSV, 1.333232, programs.silu, 224, (8, 16),
        vector=0.7387849379303731 * 1.333232, scalar=0.31480337032995714 * 1.333232,
    ),
    Measurement(
        "AdamW 10944x2048", "AccelOpt", CSV, 1.999829, programs.adamw, 171, (8, 16),
        vector=0.9001726880099149 * 1.999829, scalar=0.6162108089769912 * 1.999829,
    ),
    Measurement(
        "RoPE 128x262144, tiles of 512", "AccelOpt", CSV, 4.33301, programs.rope, 512, (8, 16),
        vector=0.7164212276647561 * 4.33301, scalar=0.14111698433373762 * 4.33301,
    ),
    Measurement(
        "RoPE 128x262144, tiles of 2048", "AccelOpt", BEST, 3.332587, programs.rope_wide, 128, (4, 8),
        vector=2.7956, scalar=0.6119,
    ),
    Measurement(
        "GEMM 4096x8192x8192, bf16", "Autocomp", GEMM, 6.96, programs.gemm, 8, (1, 2), 8, size=8192,
    ),
    Measurement(
        "mamba, first, 256x2048", "Autocomp", SCAN, 0.636, programs.mamba, 2, (2,), size=2048,
    ),
    Measurement(
        "mamba, first, 256x512", "AWS", TUTORIAL, 0.17293, programs.mamba, 2, (2,), size=512,
        vector=0.9871 * 0.17293,
    ),
    Measurement(
        "mamba, first, 4096x512", "AWS", TUTORIAL, 2.34, programs.mamba, 32, (4, 8), size=512,
    ),
    Measurement(
        "mamba, second, 4096x512", "AWS", TUTORIAL, 1.61, programs.mamba_tiled, 32, (4, 8),
        size=512, vector=0.9963 * 1.61,
    ),
    *(
        Measurement(
            f"mamba, third, 4096x{length}", "AWS", TUTORIAL, ms, programs.mamba_tiled, 32, (1, 2),
            size=length, vector=0.9485 * ms if length == 8192 else None,
        )
        for length, ms in ((1024, 3.3), (2048, 6.6), (4096, 13.3), (8192, 27.8))
    ),
)  # fmt: skip
