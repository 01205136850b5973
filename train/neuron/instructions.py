"""How many instructions our NKI kernels put into a graph: neuronx-cc refuses a graph that has too many.

The kernels are unrolled, so their instructions grow with the sequences of a graph. One layer that runs on one
sequence in the simulator counts them, and so does the readout with two small vocabularies, as all blocks of
words have the same. What XLA makes of everything else is not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from delta_trn.backends import linear_cross_entropy
from delta_trn.backends.checks import BackendRefusal
from delta_trn.train.run.model import make_model, model_config, vocabulary
from delta_trn.train.settings.schema import RunConfig

# The compiler's limit is not documented (errors NCC_EBVF030, NCC_EVRF007); graphs of this size leave room.
MOST = 300_000
_VOCABULARY = 64  # the readout is counted apart


@dataclass(frozen=True)
class PerSequence:
    """Instructions of one sequence in all layers and the readout: forward, and forward with backward."""

    forward: int
    training: int


def per_sequence(config: RunConfig) -> PerSequence:
    """Counts by a model of one layer. Raises BackendRefusal where the kernels do not take the model."""
    layers = config.model.layers - len(config.model.attention_layers)
    changes: dict[str, Any] = {"layers": 1, "attention_layers": (), "vocab_size": _VOCABULARY}
    one = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    forward, training = _count(one.model_dump_json(), config.precision == "bf16")
    readout = _count_readout(config, vocabulary(config))
    return PerSequence(layers * forward + readout[0], layers * training + readout[1])


def run_readout(config: RunConfig, tokens: int, rows: int, *, training: bool) -> None:
    """Computes the loss, and in `training` its gradients, by the NKI kernel in the simulator, of zeros.

    Raises BackendRefusal where the kernel does not take the readout.
    """
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    hidden = torch.zeros((tokens, config.model.width), dtype=dtype, requires_grad=training)
    weight = torch.zeros((rows, config.model.width), requires_grad=training)
    loss = linear_cross_entropy(
        hidden, weight, torch.zeros(tokens, dtype=torch.int64), backend="nki-simulator"
    )
    if training:
        loss.backward()


def extrapolate(measure: Callable[[int], list[float]], rows: int, width: int) -> list[float]:
    """Returns measure(rows) of a vocabulary; beyond four blocks of words, by a line through two and four.

    All three vocabularies have the same rest, which fills no block.
    """
    from delta_trn.backends.layers.nki_adapter import readout_block

    block = readout_block(width)
    count, rest = divmod(rows, block)
    if count <= 4:
        return measure(rows)
    two, four = measure(2 * block + rest), measure(4 * block + rest)
    return [a + (b - a) * (count - 2) / 2 for a, b in zip(two, four, strict=True)]


def _count_readout(config: RunConfig, rows: int) -> tuple[int, int]:
    """Returns the instructions of the readout's kernel, none where PyTorch computes it."""
    from delta_trn.backends.nki_runtime_adapter import count_instructions

    tokens = config.batch.length // config.distribution.context

    def count(words: int) -> list[float]:
        passes = [
            partial(run_readout, config, tokens, words, training=training) for training in (False, True)
        ]
        return [count_instructions(each) for each in passes]

    try:
        forward, training = extrapolate(count, rows, config.model.width)
    except BackendRefusal:
        return 0, 0
    return round(forward), round(training)


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

    readout = _count_readout(config, _VOCABULARY)
    with default_backend("nki-simulator", allow=["chunked"]):
        with torch.no_grad():
            forward = count_instructions(loss)
        training = count_instructions(lambda: loss().backward())
    return forward - readout[0], training - readout[1]
