"""How long a training step takes on Trn1, part by part, by the simulator's calibrated cost model. Estimates.

A part's range is that of what nobody has measured:

    kernels        the traces of one layer on one sequence, in program order, under either reading of the
                   Tensor engine's rate (nki_kernels/simulator/cost.py)
    matmuls        of the blocks: from the best published product, 79 TFLOP/s in bfloat16
                   (4096x8192x8192), to 45 TFLOP/s, an estimate of what the compiler reaches; a quarter of it
                   in float32
    readout        its kernel, products included, by a line through two small vocabularies; 12 bytes per
                   number of its weight and call, which scale dweight and add it up; 8 per number and
                   micro-batch, which cast the weight and transpose it. Where PyTorch computes it
                   (d > 1,024), products are among the matmuls, float32 logits pass through HBM 4 to 6.5
                   times, and dweight is read twice and written once per part of the logits
    elementwise    112 bytes per token, channel and layer: sums, norms, gates and casts between kernels
    optimizer      44 bytes per parameter (AdamW, clipping, casts), and the all-reduce at the data sheet's
                   bandwidth

Nothing overlaps between parts. The host's time to trace a graph is not counted.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.layers.pytorch import count_tokens
from delta_trn.train.neuron.instructions import extrapolate, run_readout
from delta_trn.train.parallel.layout import micro_batch
from delta_trn.train.parallel.plan import WORKERS, Size, collective_bytes
from delta_trn.train.run.model import make_model, model_config, vocabulary
from delta_trn.train.settings.schema import RunConfig

HBM = 272e9  # bytes/s of one core, by its DMA
MATMULS = (79e12, 45e12)  # bfloat16 FLOP/s
LOGIT_PASSES = (4.0, 6.5)
ELEMENTWISE_BYTES = 112
OPTIMIZER_BYTES = 44
KERNELS = {
    "gated_delta_rule": "scan", "short_convolution": "convolution", "gated_rms_norm": "gated norm",
    "delta_residual": "delta residual", "gated_delta_layer": "layer",
}  # fmt: skip
WEIGHT_BYTES, CAST_BYTES = 12, 8  # of the readout's weight: per call or part, and per micro-batch
_VOCABULARY = 64  # the readout is estimated apart


@dataclass(frozen=True)
class Part:
    """Seconds of one part of a step on one core: the faster and the slower estimate."""

    name: str
    low: float
    high: float


def parts(config: RunConfig, size: Size, cores: int) -> list[Part]:
    """Returns the parts of a step on `cores` NeuronCores of Trn1, in the order of a layer.

    Raises BackendRefusal where the kernels do not take the model.
    """
    sequences = -(-config.batch.sequences // cores)
    tokens = sequences * config.batch.length
    layers = config.model.layers - len(config.model.attention_layers)
    trn1 = next(worker for worker in WORKERS if worker.name == "trn1")
    micro = micro_batch(config.batch, sequences)
    sent = collective_bytes(size, config.distribution.mode, cores, -(-sequences // micro), config.precision)
    network = trn1.near if cores <= trn1.node else min(trn1.near, trn1.far)
    update = OPTIMIZER_BYTES * size.parameters / HBM + sent / network
    elementwise = ELEMENTWISE_BYTES * size.width * tokens * size.layers / HBM
    matmuls, readout = products(config, size, sequences)
    kernels = kernel_seconds(config)
    return [
        matmuls,
        *(
            Part(name, layers * sequences * times["rate"], layers * sequences * times["issue"])
            for name, times in kernels.items()
        ),
        readout,
        Part("elementwise", elementwise, elementwise),
        Part("optimizer, all-reduce", update, update),
    ]


def products(config: RunConfig, size: Size, sequences: int) -> tuple[Part, Part]:
    """Returns matmuls and readout: its products are the kernel's, or else among the matmuls."""
    from delta_trn.backends.layers.nki_adapter import READOUT_TOKENS

    micro = micro_batch(config.batch, sequences)
    batches, tokens = -(-sequences // micro), micro * config.batch.length
    rows = vocabulary(config)
    weight = rows * size.width / HBM
    seconds = readout_seconds(config, tokens)
    matrices = size.matrices if seconds is None else size.blocks
    slower = 4 if config.precision == "float32" else 1
    flops = 6 * slower * matrices * sequences * config.batch.length
    matmuls = Part("matmuls", *(flops / rate for rate in MATMULS))
    if seconds is None:
        pieces = batches * -(-tokens // count_tokens("neuron", rows))
        logits = 4.0 * sequences * config.batch.length * rows / HBM
        times = [passes * logits + WEIGHT_BYTES * pieces * weight for passes in LOGIT_PASSES]
        return matmuls, Part("readout", *times)
    calls = batches * -(-tokens // READOUT_TOKENS)
    moves = (WEIGHT_BYTES * calls + CAST_BYTES * batches) * weight
    return matmuls, Part("readout", *(calls * seconds[reading] + moves for reading in ("rate", "issue")))


def readout_seconds(config: RunConfig, tokens: int) -> dict[str, float] | None:
    """Returns seconds of a call of the readout's kernel, with gradients, by reading; None without one.

    The call has `tokens` tokens, or the most that a call takes.
    """
    from delta_trn.backends.layers.nki_adapter import READOUT_TOKENS
    from delta_trn.backends.nki_runtime_adapter import estimate_kernels

    tokens = min(READOUT_TOKENS, tokens)

    def estimate(rows: int) -> list[float]:
        ((_, times),) = estimate_kernels(lambda: run_readout(config, tokens, rows, training=True))
        return [times["rate"], times["issue"]]

    try:
        rate, issue = extrapolate(estimate, vocabulary(config), config.model.width)
    except BackendRefusal:
        return None
    return {"rate": rate, "issue": issue}


def kernel_seconds(config: RunConfig) -> dict[str, dict[str, float]]:
    """Returns seconds of the kernels in one layer and sequence, forward and backward, by part and reading."""
    changes: dict[str, Any] = {"layers": 1, "attention_layers": (), "vocab_size": _VOCABULARY}
    one = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    return _kernel_seconds(one.model_dump_json(), config.precision == "bf16")


@lru_cache(maxsize=8)
def _kernel_seconds(settings: str, bf16: bool) -> dict[str, dict[str, float]]:
    from delta_trn.backends import default_backend
    from delta_trn.backends.nki_runtime_adapter import estimate_kernels

    config = RunConfig.model_validate_json(settings)
    model = make_model(model_config(config, rows=_VOCABULARY), seed=0, device=torch.device("cpu"))
    tokens = torch.zeros((1, config.batch.length // config.distribution.context), dtype=torch.int64)
    seconds: dict[str, dict[str, float]] = {}

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model.loss(tokens, tokens)
        loss.backward()

    with default_backend("nki-simulator", allow=["chunked"]):
        kernels = estimate_kernels(work)
    for kernel, times in kernels:
        if kernel.startswith("cross_entropy"):
            continue
        name = next((part for start, part in KERNELS.items() if kernel.startswith(start)), "fused")
        total = seconds.setdefault(name, dict.fromkeys(times, 0.0))
        for reading, time in times.items():
            total[reading] += time
    if not {"scan", "layer", "fused"} & set(seconds):
        c = model.config
        raise BackendRefusal(
            f"the NKI kernels do not take keys of {c.head_dim_k} with values of {c.head_dim_v}; "
            "they take up to 256 and 512"
        )
    return seconds
