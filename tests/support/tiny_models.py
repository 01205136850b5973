"""Makes models of a few thousand parameters and their inputs,
and bounds how far two outputs may differ.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends.parity.judge import error
from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.sequence import Sequences

VOCABULARY = 61

# every type of layer, and grouped heads; K = 6, V = 12 and a convolution as in the paper
VARIANTS: dict[str, dict[str, Any]] = {
    "gdn": {},
    "grouped": {"num_v_heads": 8, "allow_neg_eigval": True},
    "hybrid": {"attention_layers": [1]},
    "untied": {"tie_word_embeddings": False, "conv_size": 2, "expand_v": 1.0},
    "kimi": {"mixer": "kimi_delta_attention", "num_v_heads": 8, "attention_layers": [1]},
    "bounded": {"mixer": "kimi_delta_attention", "decay_bound": -5.0, "expand_v": 1.0},
}


def config(**changes: Any) -> DeltaConfig:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "base_width": 16,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "intermediate_multiple": 16,
        # large enough for logits to differ between tokens
        "initializer_range": 0.5,
    }
    return DeltaConfig(**{**sizes, **changes})


def model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> DeltaForCausalLM:
    torch.manual_seed(seed)
    return DeltaForCausalLM(config(**changes)).to(dtype).eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def rows(T: int, **options: Any) -> Sequences:
    """Returns the description of rows that are one sequence of T tokens each."""
    return Sequences.rows(T, torch.device("cpu"), **options)


def packed(lengths: list[int]) -> tuple[Tensor, list[slice]]:
    """Returns the bounds of packed sequences of these lengths, and the slice of each."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return bounds, [slice(int(a), int(b)) for a, b in pairwise(bounds)]


ORDINARY = 300  # the roundings in an ordinary error; `assert_same` derives it


def assert_same(actual: Tensor, expected: Tensor, *, what: str = "", factor: float = 1.0) -> None:
    """Asserts that two tensors differ only as different orders of summation make them differ.

    A sum of n terms has an error of about sqrt(n) u and passes it on. Here n <= 100, and each of 3
    blocks has at most 10 sums and roundings, so 30 * 10 u = 300 u is an ordinary error. `factor`
    allows more where a test knows that errors are larger.
    """
    u = torch.finfo(expected.dtype).eps / 2
    difference, allowed = error(actual, expected), ORDINARY * u * factor
    assert difference <= allowed, f"{what}: error {difference:.2g} above {allowed:.2g}"
