"""How fast a recipe trains: tokens/s and memory of a step, also with a peer's operation in the
place of ours.

    contenders      the model as it is, and with its delta rule by a peer of `backends.bench.peers`:
                    same weights, same tokens, same optimizer; they take turns, a step each
    parity          before any time: the operation's on small cases, and all losses at the same
                    weights

Tokens are random: no product takes longer or shorter for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from delta_trn.backends import machine
from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.bench.timing import Spread, ratios
from delta_trn.backends.parity import channel_cases, rule_cases
from delta_trn.backends.parity.rule import verdicts
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.train.data.loader import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import make_model, model_config, vocabulary
from delta_trn.train.run.optimizer import make_optimizer
from delta_trn.train.run.setup import set_up_process
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.errors import TrainError
from delta_trn.train.settings.schema import RunConfig

OURS = "ours"
# by the mixer, cases that a step's operation must pass before it is timed: a seam, and gates with
# states
CASES = {
    "gated_deltanet": [rule_cases.BY_NAME[name] for name in ("seam_129", "gates")],
    "kimi_delta_attention": [channel_cases.BY_NAME[name] for name in ("kimi_seam", "kimi_bound")],
}
# two losses of one model may differ by what their operators may: bfloat16 keeps 2^-9 of every
# number
LOSSES_AGREE = {"float32": 2**-14, "bf16": 2**-7, "bf16_products": 2**-7}


class Workload:
    """A recipe's model, ready to step on one batch of random tokens."""

    def __init__(self, config: RunConfig) -> None:
        config, self.device = set_up_process(config)
        rows = vocabulary(config)
        self.config = config
        self.model = make_model(
            model_config(config, rows=rows), seed=config.seed, device=self.device
        )
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        self.loss, sharding = loss_function(self.model, config, self.device), Sharding(self.model)
        micro, clip = config.batch.micro or config.batch.sequences, config.optimizer.clip
        optimizer = make_optimizer(sharding, config)
        self.step = TrainingStep(self.loss, optimizer, sharding, micro=micro, clip=clip)
        generator = torch.Generator().manual_seed(config.seed)
        shape = (config.batch.sequences, config.batch.length + 1)
        tokens = torch.randint(rows, shape, generator=generator)
        self.batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def __call__(self, contender: str) -> float:
        """Makes one step and returns its seconds. A rate of 0 leaves the weights,
        so that steps are alike.
        """
        with self.operations(contender):
            machine.synchronize(self.device)
            begun = time.perf_counter()
            self.step(self.batch, 0.0)
            machine.synchronize(self.device)
            return time.perf_counter() - begun

    def loss_of(self, contender: str) -> float:
        """Returns the loss of one micro-batch at the weights as they are."""
        parts = self.batch.split(self.step.micro)[0].each(lambda x: x.to(self.device))
        with self.operations(contender), torch.no_grad():
            return float(self.loss(*parts))

    @contextlib.contextmanager
    def operations(self, contender: str) -> Iterator[None]:
        """Within `with`, every layer's delta rule over sequences is the contender's."""
        layers = [module for module in self.model.modules() if isinstance(module, GatedDeltaNet)]
        ours = [layer.scan for layer in layers]
        if contender != OURS:
            peer = PEERS[contender]
            channels = self.config.model.mixer == "kimi_delta_attention"
            theirs = peer.load_channels() if channels else peer.load()
            for layer in layers:
                layer.scan = theirs
        try:
            yield
        finally:
            for layer, scan in zip(layers, ours, strict=True):
                layer.scan = scan


def require_parity(config: RunConfig, device: torch.device) -> None:
    """Raises TrainError, with the verdicts, unless the operation is right on this device."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    cases = CASES[config.model.mixer]
    judged = [v for case in cases for v in verdicts(case, dtype, config.backend, device.type)]
    if failed := [str(verdict) for verdict in judged if not verdict.passed]:
        raise TrainError("\n".join(["not timed, parity is red:", *failed]))


def measure(workload: Workload, peers: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Times ourselves and every peer, in turns. TrainError where a peer's loss is not ours.

    ratio       a contender's time over ours, step by step; None for ourselves
    peak_bytes  the most memory of a step: weights, gradients, optimizer's state and everything else
    """
    names = (OURS, *peers)
    losses = {name: workload.loss_of(name) for name in names}
    for name, loss in losses.items():
        allowed = LOSSES_AGREE[workload.config.precision] * losses[OURS]
        if not abs(loss - losses[OURS]) <= allowed:
            raise TrainError(
                f"not timed: with {name}'s operator the loss is {loss:.6g}, with ours "
                f"{losses[OURS]:.6g}; they may differ by {allowed:.2g}"
            )
    peaks = {}
    for name in names:
        machine.reset_peak_memory(workload.device)
        workload(name)  # also a warm-up
        peaks[name] = machine.peak_memory(workload.device)
    times: dict[str, list[float]] = {name: [] for name in names}  # milliseconds
    for _ in range(rounds):
        for name in names:
            times[name].append(1e3 * workload(name))
    over, spreads = ratios(times, OURS), {name: Spread.of(times[name]) for name in names}
    tokens = workload.batch.inputs.numel()
    return [
        {
            "contender": name,
            "ms": ms,
            "ratio": over[name],
            "tokens_per_s": tokens / (ms.p50 / 1e3),
            "peak_bytes": peaks[name],
            "loss": losses[name],
        }
        for name, ms in spreads.items()
    ]
