"""How long a training step takes on Trn1, part by part, by the simulator's calibrated cost model. Estimates.

A part's range is that of what nobody has measured:

    kernels        the traces of one layer on one sequence, in program order, under either reading of the
                   Tensor engine's rate (nki_kernels/simulator/cost.py)
    matmuls        from the best published product, 79 TFLOP/s in bfloat16 (4096x8192x8192), to 45 TFLOP/s, an
                   estimate of what the compiler reaches; a quarter of it in float32
    readout        4 to 6.5 times the float32 logits through HBM, and the gradient of its weight, which each
                   part of the logits reads twice and writes once
    elementwise    112 bytes per token, channel and layer: sums, norms, gates and casts between kernels
    optimizer      44 bytes per parameter (AdamW, clipping, casts), and the all-reduce at the data sheet's
                   bandwidth

Nothing overlaps between parts. The host's time to trace a graph is not counted.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from delta_trn.backends.layers.pytorch import LOGITS
from delta_trn.backends.registry import BackendRefusal
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
    "delta_residual": "delta residual",
}  # fmt: skip
_VOCABULARY = 64  # the readout has no kernel


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
    slower = 4 if config.precision == "float32" else 1
    flops = 6 * size.matrices * tokens
    trn1 = next(worker for worker in WORKERS if worker.name == "trn1")
    micro = micro_batch(config.batch, sequences)
    sent = collective_bytes(size, config.distribution.mode, cores, -(-sequences // micro), config.precision)
    network = trn1.near if cores <= trn1.node else min(trn1.near, trn1.far)
    rows = vocabulary(config)
    pieces = -(-sequences // micro) * -(-micro * config.batch.length * rows // LOGITS["other"])
    logits, weight = 4.0 * tokens * rows, 12.0 * pieces * rows * size.width
    update = OPTIMIZER_BYTES * size.parameters / HBM + sent / network
    elementwise = ELEMENTWISE_BYTES * size.width * tokens * size.layers / HBM
    low, high = ((slower * flops / rate) for rate in MATMULS)
    return [
        Part("matmuls", low, high),
        *(
            Part(name, layers * sequences * times["rate"], layers * sequences * times["issue"])
            for name, times in kernel_seconds(config).items()
        ),
        Part("readout", *((passes * logits + weight) / HBM for passes in LOGIT_PASSES)),
        Part("elementwise", elementwise, elementwise),
        Part("optimizer, all-reduce", update, update),
    ]


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
        name = next((part for start, part in KERNELS.items() if kernel.startswith(start)), "fused")
        total = seconds.setdefault(name, dict.fromkeys(times, 0.0))
        for reading, time in times.items():
            total[reading] += time
    if not {"scan", "fused"} & set(seconds):
        c = model.config
        raise BackendRefusal(
            f"the NKI kernels do not take keys of {c.head_dim_k} with values of {c.head_dim_v}; "
            "they take up to 256 and 512"
        )
    return seconds
