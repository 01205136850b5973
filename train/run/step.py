"""One optimizer step: micro-batches forward and backward, clipping, update.
It never waits for the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from delta_trn.backends import machine
from delta_trn.models import DeltaForCausalLM
from delta_trn.models.layers import micro_batches
from delta_trn.train.data.loader import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.optimizer import set_learning_rate
from delta_trn.train.settings.schema import RunConfig

Loss = Callable[..., Tensor]


def loss_function(
    model: "DeltaForCausalLM | Sharding", config: RunConfig, device: torch.device
) -> Loss:
    """Returns a function of a batch's fields: the mean cross-entropy in nats,
    in the run's precision.
    """
    compute: Loss = torch.compile(model.loss, dynamic=False) if config.compile else model.loss

    def loss(
        inputs: Tensor,
        targets: Tensor,
        position_ids: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16"):
            return compute(inputs, targets, position_ids=position_ids, noise=noise)

    return loss


class TrainingStep:
    """Moves the weights once per call.

    A loss that is not finite raises nothing: seeing it takes a wait for the device, which is the
    caller's.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: Optimizer,
        sharding: Sharding,
        *,
        micro: int,
        clip: float | None,
    ):
        self.loss, self.optimizer, self.sharding = loss, optimizer, sharding
        self.device = sharding.model.device
        self.micro, self.clip = micro, clip

    def __call__(self, batch: Batch, lr: float) -> tuple[Tensor, Tensor]:
        """Does one update. Returns the mean loss over all of the step and the unclipped norm, on
        the device.

        batch   this process's share of the step, on the CPU; its rows are a multiple of `micro`
        """
        self.optimizer.zero_grad(set_to_none=True)
        set_learning_rate(self.optimizer, lr)
        pin = self.device.type == "cuda"  # so that the copy waits for nothing
        batch = batch.each(
            lambda x: (x.pin_memory() if pin else x).to(self.device, non_blocking=pin)
        )
        micros = batch.split(self.micro)
        total = torch.zeros((), device=self.device)
        with micro_batches():
            for left, some in zip(reversed(range(len(micros))), micros, strict=True):
                with self.sharding.accumulating(left > 0):
                    # every micro-batch has as many targets as the next, so the mean of means is the
                    # mean
                    loss = self.loss(*some) / len(micros)
                    loss.backward()
                total += loss.detach()
                if len(micros) > 1:
                    # on XLA a micro-batch is one graph
                    machine.synchronize(self.device, wait=False)
        norm = self.sharding.step(self.optimizer, self.clip)
        mean = self.sharding.team.mean(total)
        machine.synchronize(self.device, wait=False)  # on XLA this is one graph, too
        return mean, norm
