"""What a step costs on many workers, computed from sizes and data sheets. Nothing here was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from delta_trn.train.parallel.layout import micro_batch
from delta_trn.train.settings.schema import RunConfig


@dataclass(frozen=True)
class Worker:
    """One process's device: dense bf16 FLOP/s, bytes, and bytes/s of a ring inside and between nodes.

    A ring over nodes enters and leaves each once, so that the whole node's network carries it.
    """

    name: str
    flops: float
    memory: float
    near: float
    far: float
    node: int
    source: str


# Trn1 counts NeuronCores, two a chip.
WORKERS = (
    Worker(
        "trn1",
        95e12,
        16 * 2**30,
        96e9,
        100e9,
        32,
        "trn1.32xlarge: 190 TFLOP/s a chip; one NeuronLink of four, one way, of 768 GB/s; EFA 800 Gb/s",
    ),
    Worker(
        "h100", 989e12, 80e9, 450e9, 400e9, 8, "H100 SXM: 989 TFLOP/s, NVLink 450 GB/s one way; 8 x 400 Gb/s"
    ),
)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CHUNK = 64  # tokens of a chunk, as the accelerators' kernels have it


@dataclass(frozen=True)
class Size:
    """Sizes of a model. `matrices` counts what every token is multiplied by, `blocks` without the readout."""

    parameters: int
    matrices: int
    blocks: int
    layers: int
    width: int
    inner: int
    HV: int
    K: int
    V: int


@dataclass(frozen=True)
class Row:
    """FLOPs and bytes of one of `workers` workers in one step, and seconds at the data sheet's peaks.

    limit   what keeps a step from being shorter: compute, network, or why there is no such run
    """

    worker: str
    workers: int
    sequences: int
    flops: float
    state_bytes: float
    activation_bytes: float
    collective_bytes: float
    compute_s: float
    network_s: float
    efficiency: float
    limit: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def size_of(config: RunConfig) -> Size:
    """Returns the sizes of a run's model from its parameters' shapes. No weights are made."""
    from delta_trn.train.run.model import model_config, vocabulary
    from delta_trn.train.run.optimizer import scaled

    shapes = {row.name: tuple(row.shape) for row in scaled(config)}
    rows = vocabulary(config)
    c = model_config(config, rows=rows)
    count = sum(_product(shape) for shape in shapes.values())
    taps = sum(_product(s) for n, s in shapes.items() if n.endswith("conv.weight"))
    matrices = sum(_product(s) for s in shapes.values() if len(s) == 2) - taps
    if not config.model.tie_word_embeddings:
        matrices -= rows * config.model.width  # looked up, not multiplied
    assert c.head_dim_k is not None and c.intermediate_size is not None and c.num_v_heads is not None
    return Size(
        count,
        matrices,
        matrices - rows * config.model.width,
        config.model.layers,
        config.model.width,
        c.intermediate_size,
        c.num_v_heads,
        c.head_dim_k,
        c.head_dim_v,
    )


def step_flops(size: Size, tokens: int) -> float:
    """Returns FLOPs of forward and backward: 6 per matrix element and token, and 3 times the delta rule's.

    A chunk of C tokens of a head: q k^T and k k^T (2 C^2 K each), the inverse (2 C^3 / 3), its products with
    k and v (2 C^2 (K + V)), the state read twice and written (6 C K V), P u (2 C^2 V).
    """
    C, K, V = CHUNK, size.K, size.V
    chunk = 4 * C * C * K + 2 * C**3 / 3 + 2 * C * C * (K + V) + 6 * C * K * V + 2 * C * C * V
    return tokens * (6 * size.matrices + 3 * size.layers * size.HV * chunk / C)


def state_bytes(size: Size, mode: str, n: int) -> float:
    """Returns bytes of weights, gradients and AdamW's moments: 16 per parameter, or the part of `mode`."""
    kept = {"ddp": 16.0, "zero1": 8 + 8 / n, "fsdp": 16 / n}[mode]
    return size.parameters * kept


def collective_bytes(size: Size, mode: str, n: int, micro_batches: int, precision: str = "float32") -> float:
    """Returns the bytes that one worker sends in a step. A ring's all-reduce is 2 (n - 1) / n of the data.

    fsdp gathers the weights for every micro-batch's forward and backward, and scatters gradients once;
    zero1 all-reduces gradients and gathers the weights, at most: PyTorch's own way scatters instead. Where
    products are in bf16, both gather the blocks' matrices in it; gradients are float32.
    """
    reductions, gathers = {"ddp": (2, 0), "zero1": (2, 1), "fsdp": (1, 2 * micro_batches)}[mode]
    gathered = 4 * size.parameters - (0 if precision in ("float32", "bf16_products") else 2 * size.blocks)
    return (reductions * 4 * size.parameters + gathers * gathered) * (n - 1) / n


def activation_bytes(size: Size, config: RunConfig, micro: int) -> float:
    """Returns an estimate of what backward reads of one micro-batch: bf16 or float32 per channel kept.

    A block keeps about 4 d, q k v g o of the mixer twice, and 3 inner; checkpointing keeps d.
    """
    element = 4 if config.precision in ("float32", "bf16_products") else 2
    mixer = 2 * size.HV * (2 * size.K + 3 * size.V)
    kept = size.width if config.gradient_checkpointing else 4 * size.width + mixer + 3 * size.inner
    return float(micro * config.batch.length * size.layers * kept * element)


def rows(config: RunConfig, size: Size) -> list[Row]:
    """Returns a row per worker and count, data parallel at the recipe's global batch (strong scaling)."""
    return [_row(config, size, worker, n) for worker in WORKERS for n in COUNTS]


def _row(config: RunConfig, size: Size, worker: Worker, n: int) -> Row:
    mode, batch = config.distribution.mode, config.batch
    used = min(n, batch.sequences)
    mine = -(-batch.sequences // n)
    micro = micro_batch(batch, mine)
    flops = step_flops(size, mine * batch.length)
    sent = collective_bytes(size, mode, n, -(-mine // micro), config.precision)
    state, activations = state_bytes(size, mode, n), activation_bytes(size, config, micro)
    compute = flops / worker.flops
    network = sent / (worker.near if n <= worker.node else min(worker.near, worker.far))
    # reductions overlap with backward at best: the longer of the two
    alone = step_flops(size, batch.sequences * batch.length) / worker.flops
    efficiency = alone / (n * max(compute, network))
    if state + activations > worker.memory:
        limit = "memory: fsdp, a smaller batch.micro, checkpointing or tensor parallelism"
    elif used < n:
        limit = f"{n - used} workers without a sequence: context parallelism or a larger batch"
    else:
        limit = "network" if network > compute else "compute"
    return Row(worker.name, n, mine, flops, state, activations, sent, compute, network, efficiency, limit)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
