"""One optimizer step: micro-batches forward and backward, clipping, update. No wait for the device."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from delta_trn.backends import machine as platform
from delta_trn.train.neuron import sharding as neuron
from delta_trn.train.parallel.sharding import Parallel, clip
from delta_trn.train.parallel.team import Team
from delta_trn.train.run.optimizer import set_learning_rate
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_function(model: "DeltaForCausalLM | Parallel", config: RunConfig, device: torch.device) -> Loss:
    """(inputs, targets) -> mean cross-entropy in nats, in the run's precision. Weights stay float32."""
    compute: Loss = torch.compile(model.loss, dynamic=False) if config.compile else model.loss

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16"):
            return compute(inputs, targets)

    return loss


class TrainingStep:
    """Owns what changes: calling it moves the weights once.

    Raises nothing on a loss that is not finite: seeing it takes a wait for the device, which is the caller's.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: Optimizer,
        *,
        device: torch.device,
        micro: int,
        clip: float | None,
        parallel: Parallel | None = None,
    ):
        self.loss, self.optimizer, self.device = loss, optimizer, device
        self.micro, self.clip = micro, clip
        self.team = Team() if parallel is None else parallel.team
        self._accumulating = contextlib.nullcontext if parallel is None else parallel.accumulating
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """One update. Returns the mean loss over all of the step and the unclipped norm, on the device.

        inputs, targets   int64 [B, T] on the CPU, B a multiple of `micro`: this process's share of the step
        """
        self.optimizer.zero_grad(set_to_none=True)
        set_learning_rate(self.optimizer, lr)
        parts = [self._moved(part) for part in (inputs, targets)]
        pairs: Sequence[tuple[Tensor, Tensor]] = list(
            zip(*(part.split(self.micro) for part in parts), strict=True)
        )
        total = torch.zeros((), device=self.device)
        for left, (some_inputs, some_targets) in zip(reversed(range(len(pairs))), pairs, strict=True):
            # every micro-batch has as many targets as the next, so the mean of means is the mean
            with self._accumulating(left > 0):
                loss = self.loss(some_inputs, some_targets) / len(pairs)
                loss.backward()
            total += loss.detach()
        norm = self._update()
        mean = self.team.mean(total)
        platform.synchronize(self.device, wait=False)  # on XLA a step is one graph
        return mean, norm

    def _update(self) -> Tensor:
        """Clip, move the weights. Returns the norm before."""
        if neuron.is_zero1(self.optimizer):
            return neuron.step(self.optimizer)
        norm = clip(self._parameters, self.clip)
        self.optimizer.step()
        return norm

    def _moved(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
