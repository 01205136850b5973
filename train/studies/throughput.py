"""How fast a model trains: tokens/s and memory of a step, also with other operations in the place of ours.

    contenders      the model as it is, and with its delta rule by a peer of `backends.bench.peers`, or by
                    transformers: same weights, same tokens; they take turns, a step each
    parity          before any time: the operation's on small cases, and all losses at the same weights

Tokens are random: no product takes longer or shorter for that.
"""

from __future__ import annotations

import contextlib
import io
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from delta_trn.backends import machine
from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.bench.timing import Spread, ratios
from delta_trn.backends.parity.rule import verdicts
from delta_trn.backends.parity.rule_cases import BY_NAME
from delta_trn.models.ecosystem import patch_transformers
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.train.data import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import make_model, model_config, vocabulary
from delta_trn.train.run.optimizer import make_optimizer
from delta_trn.train.run.setup import set_up_process
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.errors import ConfigError, TrainError
from delta_trn.train.settings.schema import RunConfig

OURS, THEIRS = "ours", "transformers"
# cases that a step's operation must pass before it is timed: a seam, and gates with states
CASES = ("seam_129", "gates")
# two losses of one model may differ by what their operators may: bfloat16 keeps 2^-9 of every number
LOSSES_AGREE = {"float32": 2**-14, "bf16": 2**-7, "bf16_products": 2**-7}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 512,
    "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8,
}  # fmt: skip
# family -> configuration, model, settings besides those of all
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _EXPERTS),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", _EXPERTS | _INDEXER),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {}),
}


@dataclass(frozen=True)
class Measured:
    """One contender. ratio: its time over ours, step by step; None for ourselves."""

    contender: str
    ms: Spread
    ratio: Spread | None
    tokens_per_s: float
    peak_bytes: int
    loss: float


class Contest(ABC):
    """A model and a batch that contenders compute in turns."""

    model: Any
    device: torch.device
    backend: str | None
    precision: str
    tokens: int  # of a step

    def __call__(self, contender: str) -> float:
        """Makes one step. Returns its seconds."""
        with self.operations(contender):
            machine.synchronize(self.device)
            begun = time.perf_counter()
            self.advance()
            machine.synchronize(self.device)
            return time.perf_counter() - begun

    def loss_of(self, contender: str) -> float:
        """Returns the loss of one micro-batch at the weights as they are."""
        with self.operations(contender), torch.no_grad():
            return float(self.loss())

    def peak_bytes(self, contender: str) -> int:
        """Returns the most memory of a step: weights, gradients, optimizer's state and everything else."""
        machine.reset_peak_memory(self.device)
        self(contender)
        return machine.peak_memory(self.device)

    @abstractmethod
    def operations(self, contender: str) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which the model's operations are the contender's."""

    @abstractmethod
    def advance(self) -> None:
        """Computes what is timed."""

    @abstractmethod
    def loss(self) -> torch.Tensor:
        """Returns the loss of one micro-batch."""


class Workload(Contest):
    """A recipe's model, ready to step on one batch of random tokens."""

    def __init__(self, config: RunConfig) -> None:
        config, self.device = set_up_process(config)
        self.config, self.backend, self.precision = config, config.backend, config.precision
        rows = vocabulary(config)
        self.model = make_model(model_config(config, rows=rows), seed=config.seed, device=self.device)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        self.of_batch, sharding = loss_function(self.model, config, self.device), Sharding(self.model)
        micro, clip = config.batch.micro or config.batch.sequences, config.optimizer.clip
        optimizer = make_optimizer(sharding, config)
        self.step = TrainingStep(self.of_batch, optimizer, sharding, micro=micro, clip=clip)
        generator = torch.Generator().manual_seed(config.seed)
        shape = (config.batch.sequences, config.batch.length + 1)
        tokens = torch.randint(rows, shape, generator=generator)
        self.batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.tokens = self.batch.inputs.numel()

    @contextlib.contextmanager
    def operations(self, contender: str) -> Iterator[None]:
        """Within `with`, every layer's delta rule over sequences is the contender's."""
        layers = [module for module in self.model.modules() if isinstance(module, GatedDeltaNet)]
        ours = [layer.scan for layer in layers]
        if contender != OURS:
            theirs = PEERS[contender].load()
            for layer in layers:
                layer.scan = theirs
        try:
            yield
        finally:
            for layer, scan in zip(layers, ours, strict=True):
                layer.scan = scan

    def advance(self) -> None:
        """Makes one step. A rate of 0 leaves the weights, so that steps are alike."""
        self.step(self.batch, 0.0)

    def loss(self) -> torch.Tensor:
        return self.of_batch(*self.batch.split(self.step.micro)[0].each(lambda x: x.to(self.device)))


class Family(Contest):
    """A random model of one of transformers' families: its forward and its backward pass.

    Of `layers`, three in four are Gated DeltaNet, with 128 channels in a head. Raises ConfigError if the
    installed transformers lacks the family.
    """

    precision = "float32"

    def __init__(self, name: str, sizes: Mapping[str, int], device: str, backend: str | None) -> None:
        configuration, model, settings = FAMILIES[name]
        if not hasattr(transformers, model):
            raise ConfigError(f"transformers {transformers.__version__} has no {name}")
        torch.manual_seed(0)
        config = getattr(transformers, configuration)(**_sizes(sizes["width"], sizes["layers"]), **settings)
        self.model = getattr(transformers, model)(config).to(device).train()
        self.device, self.backend = torch.device(device), backend
        self.ids = torch.randint(4, config.vocab_size, (sizes["sequences"], sizes["length"])).to(device)
        self.tokens = self.ids.numel()

    def operations(self, contender: str) -> contextlib.AbstractContextManager[object]:
        if contender == THEIRS:
            return contextlib.nullcontext()
        with contextlib.redirect_stdout(io.StringIO()):
            return patch_transformers(self.model, self.backend)

    def advance(self) -> None:
        self.model.zero_grad()
        self.loss().backward()

    def loss(self) -> torch.Tensor:
        return self.model(self.ids, labels=self.ids, use_cache=False).loss


def _sizes(width: int, layers: int) -> dict[str, object]:
    heads = max(width // 64, 1)
    types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return {
        "vocab_size": 4096, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "layer_types": types, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64,
        "moe_intermediate_size": width, "shared_expert_intermediate_size": width,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": max(width // 128, 1), "linear_num_value_heads": 2 * max(width // 128, 1),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def require_parity(workload: Workload) -> None:
    """Raises TrainError, with the verdicts, unless the operation is right on this device."""
    dtype = torch.bfloat16 if workload.config.precision == "bf16" else torch.float32
    failed = [
        str(verdict)
        for case in CASES
        for verdict in verdicts(BY_NAME[case], dtype, workload.config.backend, workload.device.type)
        if not verdict.passed
    ]
    if failed:
        raise TrainError("\n".join(["not timed, parity is red:", *failed]))


def measure(workload: Contest, peers: Sequence[str], rounds: int) -> list[Measured]:
    """Times ourselves and every peer, in turns. TrainError where a peer's loss is not ours."""
    names = (OURS, *peers)
    losses = {name: workload.loss_of(name) for name in names}
    for name, loss in losses.items():
        allowed = LOSSES_AGREE[workload.precision] * losses[OURS]
        if not abs(loss - losses[OURS]) <= allowed:
            raise TrainError(
                f"not timed: with {name}'s operator the loss is {loss:.6g}, with ours {losses[OURS]:.6g}; "
                f"they may differ by {allowed:.2g}"
            )
    peaks = {name: workload.peak_bytes(name) for name in names}  # and a warm-up
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            seconds[name].append(workload(name))
    found, over = [], ratios(seconds, OURS)
    for name in names:
        ms = Spread.of([1e3 * x for x in seconds[name]])
        speed = workload.tokens / (ms.p50 / 1e3)
        found.append(Measured(name, ms, over[name], speed, peaks[name], losses[name]))
    return found
