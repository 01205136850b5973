"""Training on several NeuronCores, data parallel: `train.neuron.reduction` averages. Not run on a chip.

Elsewhere PyTorch's own parts divide a model: `train.parallel.pytorch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from delta_trn.backends import machine
from delta_trn.train.neuron import reduction
from delta_trn.train.parallel.sharding import Sharding, named_parameters
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM


def serves(device: torch.device) -> bool:
    """Whether work on `device` is divided by this module: torch_xla has no FSDP2 and no DTensor."""
    return device.type == "xla"


class NeuronSharding(Sharding):
    """A model on the NeuronCores of a team of at least two processes."""

    def __init__(self, model: DeltaForCausalLM, how: DistributionSection, team: Team):
        super().__init__(model, team)
        if how.mode != "ddp" or how.context > 1:
            raise ConfigError(
                f"distribution.mode={how.mode} with distribution.context={how.context} is not there on "
                "Neuron, where processes are replicas; use mode=ddp and context=1"
            )
        self._bucket = reduction.bucket_bytes()
        # they are equal anyway, drawn from one seed or read from one file
        machine.broadcast([*model.parameters(), *model.buffers()], root=0)

    def step(self, optimizer: Optimizer, clip: float | None) -> Tensor:
        parameters = (parameter for _, parameter in named_parameters(optimizer))
        reduction.average(parameters, self.team.world, self._bucket)
        return super().step(optimizer, clip)
