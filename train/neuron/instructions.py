"""How many instructions our NKI kernels put into a graph: neuronx-cc refuses a graph that has too
many.

The kernels are unrolled, so their instructions grow with the sequences of a graph. One layer that
runs on one sequence in the simulator counts them, and so does the readout with two small
vocabularies, as all blocks of words have the same. What XLA makes of everything else is not
counted.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from delta_trn.backends import dispatch, linear_cross_entropy
from delta_trn.backends.checks import BackendRefusal
from delta_trn.train.run.model import make_model, model_config, vocabulary
from delta_trn.train.settings.schema import RunConfig

# The compiler's own, "[XTP003] Number of instructions (...) is over the threshold (5000000)". Long
# before, it takes 30 to 40 GB of memory (aws-neuron-sdk 1374), so the launch scripts stay far
# below.
MOST = 5_000_000
_VOCABULARY = 64  # the readout is counted apart


@dataclass(frozen=True)
class PerSequence:
    """Instructions of one sequence in all layers and the readout: forward,
    and forward with backward.
    """

    forward: int
    training: int


def per_sequence(config: RunConfig) -> PerSequence:
    """Counts by a model of one layer.

    Raises BackendRefusal where the kernels do not take the model, or where our simulator, which
    counts, is not installed.
    """
    if reason := dispatch.simulator_missing("cpu"):
        raise BackendRefusal(f"nki-simulator {reason}")
    layers = config.model.layers - len(config.model.attention_layers)
    changes: dict[str, Any] = {"layers": 1, "attention_layers": (), "vocab_size": _VOCABULARY}
    one = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    forward, training = _count(one.model_dump_json(), config.precision == "bf16")
    readout = _count_readout(config, vocabulary(config))
    return PerSequence(layers * forward + readout[0], layers * training + readout[1])


def _count_readout(config: RunConfig, rows: int) -> tuple[int, int]:
    """Returns the instructions of the readout's kernel, none where PyTorch computes it.

    Beyond four blocks of words they lie on a line through two and four: all vocabularies have the
    same rest, which fills no block.
    """
    from delta_trn.backends.layers.nki_adapter import readout_block
    from delta_trn.backends.nki_runtime_adapter import count_instructions

    block = readout_block(config.model.width)
    blocks, rest = divmod(rows, block)

    def count(words: int, training: bool) -> int:
        return count_instructions(partial(_run_readout, config, words, training=training))

    def extrapolate(training: bool) -> int:
        if blocks <= 4:
            return count(rows, training)
        two, four = (count(n * block + rest, training) for n in (2, 4))
        return round(two + (four - two) * (blocks - 2) / 2)

    try:
        return extrapolate(False), extrapolate(True)
    except BackendRefusal:
        return 0, 0


def _run_readout(config: RunConfig, rows: int, *, training: bool) -> None:
    """Computes the loss, and in `training` its gradients,
    by the NKI kernel in the simulator, of zeros.
    """
    tokens = config.batch.length // config.distribution.context
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    hidden = torch.zeros((tokens, config.model.width), dtype=dtype, requires_grad=training)
    weight = torch.zeros((rows, config.model.width), requires_grad=training)
    loss = linear_cross_entropy(
        hidden, weight, torch.zeros(tokens, dtype=torch.int64), backend="nki-simulator"
    )
    if training:
        loss.backward()


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
