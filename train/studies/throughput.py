"""How fast a model trains: tokens/s and memory of a step, also with a peer's operator in its place.

    contenders      the model as it is, and with its delta rule by a peer of `backends.peers`: same weights,
                    same tokens, same optimizer; they take turns, a step each
    parity          before any time: the operation's on small cases, and both losses at the same weights
    shares          where a step's time goes, by the profiler: an operator's time, and that of every
                    kernel it starts, belongs to the PARTS that it or its outermost caller is named after

Tokens are random: no product takes longer or shorter for that.
"""

from __future__ import annotations

import contextlib
import io
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from delta_trn.backends import machine
from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.bench.timing import Spread, ratios
from delta_trn.backends.operator import Operator
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

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

OURS, THEIRS = "ours", "transformers"
DOCUMENTS = "documents"  # our own operator, where a document begins every so many tokens
# cases that a step's operation must pass before it is timed: a seam, and gates with states
CASES = ("seam_129", "gates")
# two losses of one model may differ by what their operators may: bfloat16 keeps 2^-9 of every number
LOSSES_AGREE = {"float32": 2**-14, "bf16": 2**-7, "bf16_products": 2**-7}
# part -> names of operators, or what they begin with
PARTS: Mapping[str, tuple[str, ...]] = {
    "delta rule": ("delta_trn::gated_delta_rule",),
    "delta residual": ("delta_trn::delta_residual",),
    "short convolution": ("delta_trn::short_convolution",),
    "norms": ("delta_trn::gated_rms_norm", "delta_trn::add_rms_norm"),
    "readout and loss": ("delta_trn::linear_cross_entropy",),
    "optimizer": ("Optimizer.step", "clip"),
    "projections": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"),
}
REST = "everything else"
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
            self.advance(contender)
            machine.synchronize(self.device)
            return time.perf_counter() - begun

    @abstractmethod
    def operations(self, contender: str) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which the model's operations are the contender's."""

    @abstractmethod
    def advance(self, contender: str) -> None:
        """Computes what is timed."""

    @abstractmethod
    def loss_of(self, contender: str) -> float:
        """Returns the loss at the weights as they are."""

    def peak_bytes(self, contender: str) -> int:
        """Returns the most memory of a step: weights, gradients, optimizer's state and everything else."""
        machine.reset_peak_memory(self.device)
        self(contender)
        return machine.peak_memory(self.device)


class Workload(Contest):
    """A recipe's model, ready to step on one batch of random tokens."""

    def __init__(self, config: RunConfig, documents: int = 0) -> None:
        config, self.device = set_up_process(config)
        self.config, self.backend, self.precision = config, config.backend, config.precision
        rows = vocabulary(config)
        self.model: DeltaForCausalLM = make_model(
            model_config(config, rows=rows), seed=config.seed, device=self.device
        )
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        self.loss, sharding = loss_function(self.model, config, self.device), Sharding(self.model)
        micro, clip = config.batch.micro or config.batch.sequences, config.optimizer.clip
        self.step = TrainingStep(
            self.loss, make_optimizer(sharding, config), sharding, micro=micro, clip=clip
        )
        generator = torch.Generator().manual_seed(config.seed)
        shape = (config.batch.sequences, config.batch.length + 1)
        tokens = torch.randint(rows, shape, generator=generator)
        self.batch = self.bounded = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.tokens = self.batch.inputs.numel()
        if documents:
            places = (torch.arange(config.batch.length, dtype=torch.int32) % documents).expand(shape[0], -1)
            self.bounded = self.batch._replace(position_ids=places.contiguous())

    def operations(self, contender: str) -> contextlib.AbstractContextManager[object]:
        return operator_of(self.model, contender)

    def advance(self, contender: str) -> None:
        """Makes one step. A rate of 0 leaves the weights, so that steps are alike."""
        self.step(self._batch(contender), 0.0)

    def loss_of(self, contender: str) -> float:
        """Returns the loss of one micro-batch."""
        parts = self._batch(contender).split(self.step.micro)[0].each(lambda x: x.to(self.device))
        with self.operations(contender), torch.no_grad():
            return float(self.loss(*parts))

    def _batch(self, contender: str) -> Batch:
        return self.bounded if contender == DOCUMENTS else self.batch


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

    @contextlib.contextmanager
    def operations(self, contender: str) -> Iterator[None]:
        if contender == THEIRS:
            yield
            return
        with contextlib.redirect_stdout(io.StringIO()):
            patch = patch_transformers(self.model, self.backend)
        with patch:
            yield

    def advance(self, contender: str) -> None:
        self.model.zero_grad()
        self._loss().backward()

    def loss_of(self, contender: str) -> float:
        with self.operations(contender), torch.no_grad():
            return float(self._loss())

    def _loss(self) -> torch.Tensor:
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


@contextlib.contextmanager
def operator_of(model: nn.Module, contender: str) -> Iterator[None]:
    """Within `with`, every layer's delta rule over sequences is the contender's."""
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNet)]
    ours = [layer.scan for layer in layers]
    if contender not in (OURS, DOCUMENTS):
        theirs = PEERS[contender].load()
        for layer in layers:
            layer.scan = theirs
    try:
        yield
    finally:
        for layer, scan in zip(layers, ours, strict=True):
            layer.scan = scan


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


def measure(workload: Contest, peers: tuple[str, ...], rounds: int) -> list[Measured]:
    """Times ourselves and every peer, in turns. TrainError where a peer's loss is not ours."""
    names = (OURS, *peers)
    losses = {name: workload.loss_of(name) for name in names}
    for name, loss in losses.items():
        allowed = LOSSES_AGREE[workload.precision] * losses[OURS]
        # with documents the model computes something else, so that its loss says nothing
        if name != DOCUMENTS and not abs(loss - losses[OURS]) <= allowed:
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


def shares(workload: Workload) -> dict[str, float]:
    """Returns the share that each part has of the time of one step of ours; the largest first."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = workload.device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    workload(OURS)
    with _named_operators(), torch.profiler.profile(activities=activities) as profile:
        workload(OURS)
    spent: dict[str, float] = dict.fromkeys((*PARTS, REST), 0.0)
    for event in profile.events() or ():
        if event.device_type.name != "CPU":
            continue
        own = sum(kernel.duration for kernel in event.kernels) if on_gpu else event.self_cpu_time_total
        spent[_part(event)] += own
    total = sum(spent.values())
    found = {part: time / total for part, time in spent.items() if time > 0}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _part(event: Any) -> str:
    found = REST
    while event is not None:
        for part, names in PARTS.items():
            if event.name.startswith(names):
                found = part
        event = event.cpu_parent
    return found


@contextlib.contextmanager
def _named_operators() -> Iterator[None]:
    """Names operations in the profile: outside of torch.compile they are plain functions."""
    find, differentiate = Operator.find_function, Operator.differentiate

    def named(operator: Operator, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.profiler.record_function(f"delta_trn::{operator.name}")(function)

    changes: dict[str, Callable[..., Any]] = {
        "find_function": lambda operator, *arguments: named(operator, find(operator, *arguments)),
        "differentiate": lambda operator, *arguments: named(operator, differentiate)(operator, *arguments),
    }
    plain = {name: getattr(Operator, name) for name in changes}
    for name, function in changes.items():
        setattr(Operator, name, function)
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(Operator, name, function)
