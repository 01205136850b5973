"""How many instructions our NKI kernels put into a graph: neuronx-cc refuses a graph that has too many.

The kernels are unrolled, so their instructions grow with the sequences of a graph. One layer that runs on one
sequence in the simulator counts them. What XLA makes of everything else is not counted.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.settings.schema import RunConfig

# The compiler's limit is not documented (errors NCC_EBVF030, NCC_EVRF007); graphs of this size leave room.
MOST = 300_000
_VOCABULARY = 64  # the readout has no kernel


@dataclass(frozen=True)
class PerSequence:
    """Instructions of one sequence in all layers: forward, and forward with backward."""

    forward: int
    training: int


def per_sequence(config: RunConfig) -> PerSequence:
    """Counts by a model of one layer. Raises BackendRefusal where the kernels do not take the model."""
    layers = config.model.layers - len(config.model.attention_layers)
    changes: dict[str, Any] = {"layers": 1, "attention_layers": (), "vocab_size": _VOCABULARY}
    one = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    forward, training = _count(one.model_dump_json(), config.precision == "bf16")
    return PerSequence(layers * forward, layers * training)


@lru_cache(maxsize=8)
def _count(settings: str, bf16: bool) -> tuple[int, int]:
    from delta_trn.backends import default_backend
    from delta_trn.backends.nki_runtime_adapter import count_instructions

    config = RunConfig.model_validate_json(settings)
    model = make_model(model_config(config, rows=_VOCABULARY), seed=0, device=torch.device("cpu"))
    tokens = torch.zeros((1, config.batch.length // config.distribution.context), dtype=torch.int64)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            return model.loss(tokens, tokens)

    with default_backend("nki-simulator", allow=["chunked"]):
        with torch.no_grad():
            forward = count_instructions(loss)
        return forward, count_instructions(lambda: loss().backward())
