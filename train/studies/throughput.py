"""How fast a recipe's model trains: tokens/s and memory of a step, also with a peer's operator in its place.

    contenders      the model as it is, and with its delta rule by a peer of `backends.peers`: same weights,
                    same tokens, same optimizer; they take turns, a step each
    parity          before any time: the operation's on small cases, and both losses at the same weights
    shares          where a step's time goes, by the profiler: an operator's time, and that of every
                    kernel it starts, belongs to the PARTS that it or its outermost caller is named after

Tokens are random: no product takes longer or shorter for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from delta_trn.backends import machine
from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.bench.timing import Spread, ratios
from delta_trn.backends.operator import Operator
from delta_trn.backends.parity.rule import verdicts
from delta_trn.backends.parity.rule_cases import BY_NAME
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.train.data import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import make_model, model_config, vocabulary
from delta_trn.train.run.optimizer import make_optimizer
from delta_trn.train.run.setup import set_up_process
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.errors import TrainError
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.families import OURS, Family

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

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


@dataclass(frozen=True)
class Measured:
    """One contender. ratio: its time over ours, step by step; None for ourselves."""

    contender: str
    ms: Spread
    ratio: Spread | None
    tokens_per_s: float
    peak_bytes: int
    loss: float


class Workload:
    """A recipe's model, ready to step on one batch of random tokens."""

    def __init__(self, config: RunConfig, documents: int = 0) -> None:
        config, self.device = set_up_process(config)
        self.config = config
        rows = vocabulary(config)
        configuration = model_config(config, rows=rows)
        self.backend = config.backend
        self.model: DeltaForCausalLM = make_model(configuration, seed=config.seed, device=self.device)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        micro = config.batch.micro or config.batch.sequences
        self.loss = loss_function(self.model, config, self.device)
        sharding = Sharding(self.model)
        self.step = TrainingStep(
            self.loss,
            make_optimizer(sharding, config),
            sharding,
            micro=micro,
            clip=config.optimizer.clip,
        )
        generator = torch.Generator().manual_seed(config.seed)
        shape = (config.batch.sequences, config.batch.length + 1)
        tokens = torch.randint(rows, shape, generator=generator)
        self.batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.bounded = None
        if documents:
            places = (torch.arange(config.batch.length, dtype=torch.int32) % documents).expand(shape[0], -1)
            self.bounded = self.batch._replace(position_ids=places.contiguous())

    @property
    def precision(self) -> str:
        """Of the run's configuration."""
        return self.config.precision

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch.inputs.numel()

    def __call__(self, contender: str) -> float:
        """One step; its seconds. A rate of 0 leaves the weights, so that steps are alike."""
        with operator_of(self.model, contender):
            machine.synchronize(self.device)
            begun = time.perf_counter()
            self.step(self._batch(contender), 0.0)
            machine.synchronize(self.device)
            return time.perf_counter() - begun

    def loss_of(self, contender: str) -> float:
        """At the weights as they are, over one micro-batch."""
        parts = self._batch(contender).split(self.step.micro)[0].each(lambda x: x.to(self.device))
        with operator_of(self.model, contender), torch.no_grad():
            return float(self.loss(*parts))

    def _batch(self, contender: str) -> Batch:
        return self.bounded if contender == DOCUMENTS and self.bounded is not None else self.batch

    def peak_bytes(self, contender: str) -> int:
        """Of a step: weights, gradients, optimizer's state and everything else."""
        machine.reset_peak_memory(self.device)
        self(contender)
        return machine.peak_memory(self.device)


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
        for verdict in verdicts(BY_NAME[case], dtype, workload.backend, workload.device.type)
        if not verdict.passed
    ]
    if failed:
        raise TrainError("\n".join(["not timed, parity is red:", *failed]))


def measure(workload: Workload | Family, peers: tuple[str, ...], rounds: int) -> list[Measured]:
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
    """Part -> share of the time of one step of ours; the largest first."""
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
    words = ("compute", "differentiate")
    plain = {word: getattr(Operator, word) for word in words}

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(operator: Operator, *arguments: Any) -> Any:
            with torch.profiler.record_function(f"delta_trn::{operator.name}"):
                return function(operator, *arguments)

        return call

    for word, function in plain.items():
        setattr(Operator, word, named(function))
    try:
        yield
    finally:
        for word, function in plain.items():
            setattr(Operator, word, function)
