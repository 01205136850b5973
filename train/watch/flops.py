"""Counts the FLOPs of training on a token, from the shapes of a model's parameters."""

import math

from delta_trn.train.run.model import model_config, vocabulary
from delta_trn.train.run.optimizer import list_scaled
from delta_trn.train.settings.schema import RunConfig

CHUNK = 64  # tokens of a chunk, as the accelerators' kernels have it


def matrix_elements(config: RunConfig) -> int:
    """Counts the elements of all matrices that every token is multiplied by.
    No weights are made.
    """
    shapes = {row.name: tuple(row.shape) for row in list_scaled(config)}
    count = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and not name.endswith("conv.weight")
    )
    if not config.model.tie_word_embeddings:
        # the embedding is looked up, not multiplied
        count -= vocabulary(config) * config.model.width
    return count


def flops_per_token(config: RunConfig) -> float:
    """Returns FLOPs of forward and backward: 6 per matrix element, and 3 times the delta rule's.

    A chunk of C tokens of a head: q k^T and k k^T (2 C^2 K each), the inverse (2 C^3 / 3), its
    products with k and v (2 C^2 (K + V)), the state read twice and written (6 C K V), P u (2 C^2
    V).
    """
    c = model_config(config, rows=vocabulary(config))
    assert c.head_dim_k is not None and c.num_v_heads is not None
    C, K, V = CHUNK, c.head_dim_k, c.head_dim_v
    chunk = 4 * C * C * K + 2 * C**3 / 3 + 2 * C * C * (K + V) + 6 * C * K * V + 2 * C * C * V
    return 6 * matrix_elements(config) + 3 * config.model.layers * c.num_v_heads * chunk / C
