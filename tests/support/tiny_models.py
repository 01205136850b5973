"""Models of a few thousand parameters, and how far two of their outputs may differ."""

from typing import Any

import torch
from torch import Tensor

from delta_trn.backends.parity.judge import error
from delta_trn.models import DeltaConfig, DeltaForCausalLM

VOCABULARY = 61

# every kind of layer, and heads that group; K = 6, V = 12 and a convolution as in the paper
KINDS: dict[str, dict[str, Any]] = {
    "gdn": {},
    "grouped": {"num_v_heads": 8, "allow_neg_eigval": True},
    "hybrid": {"attention_layers": [1]},
    "untied": {"tie_word_embeddings": False, "conv_size": 2, "expand_v": 1.0},
}


def config(**changes: Any) -> DeltaConfig:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "base_width": 16,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "intermediate_multiple": 16,
        # weights large enough for logits to differ between tokens
        "initializer_range": 0.5,
    }
    return DeltaConfig(**{**sizes, **changes})


def model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> DeltaForCausalLM:
    torch.manual_seed(seed)
    return DeltaForCausalLM(config(**changes)).to(dtype).eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Tensor, expected: Tensor, *, what: str = "", factor: float = 1.0) -> None:
    """The same numbers in another order of summation.

    Each sum of n terms errs by about sqrt(n) u and passes it on; with n <= 100 here and at most 10 sums and
    roundings in each of 3 blocks, 30 * 10 u = 300 u would be ordinary bad luck. `factor` is for what a test
    knows to be larger.
    """
    u = torch.finfo(expected.dtype).eps / 2
    wrong, allowed = error(found, expected), 300 * u * factor
    assert wrong <= allowed, f"{what}: error {wrong:.2g} above {allowed:.2g}"
