"""What generation keeps between calls: its size does not depend on how long the text is, but in attention layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """One layer's memory; what a layer does not use stays empty.

    convolution     name -> [B, taps - 1, C]    the last inputs of a short convolution
    state           [B, HV, K, V]               the delta rule's S, float32
    keys, values    [B, H, T, D]                softmax attention's past
    """

    convolution: dict[str, Tensor] = field(default_factory=dict)
    state: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None


class DeltaCache:
    """The memory of a whole model after `length` tokens. `DeltaForCausalLM` makes, fills and returns it."""

    is_compileable = False  # transformers asks: only caches of fixed length are

    def __init__(self, layers: int) -> None:
        self.layers = [LayerCache() for _ in range(layers)]
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far, padding included. transformers' name."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps row beam_idx[i] as row i: what beam search asks for."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the given rows. transformers' name."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row. transformers' name."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def _each(self, change) -> None:
        for layer in self.layers:
            layer.convolution = {name: change(x) for name, x in layer.convolution.items()}
            for name in ("state", "keys", "values"):
                x = getattr(layer, name)
                if isinstance(x, torch.Tensor):
                    setattr(layer, name, change(x))
