"""The cache of generation. Its size does not grow with the text, except in attention layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

# The field of a model's output that has the cache: transformers renamed it in version 5.24.
CACHE_NAME = (
    "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
)


@dataclass
class LayerCache:
    """The memory of one layer; a slot that the layer does not use stays None.

    convolution             [B, taps - 1, C]    last inputs of the short convolution
    state                   [B, HV, K, V]       state S of the delta rule, float32
    keys, values            [B, H, T, D]        past of softmax attention
    last_key, last_value    [B, 1, H D]         last key and value before a shift mixes them in
    mixer_read, mlp_read    [B, taps - 1, d DV] last streams that a sublayer reads by a convolution
                            over time
    """

    convolution: Tensor | None = None
    state: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    last_key: Tensor | None = None
    last_value: Tensor | None = None
    mixer_read: Tensor | None = None
    mlp_read: Tensor | None = None


class DeltaCache(Cache):
    """The memory of a model with `layers` layers. `DeltaForCausalLM` makes, fills and returns it.

    length      number of tokens seen, padding included, as transformers counts
    real        [B, length] bool, False at padding; None if there was no padding
    first, last the memory of the modules that start the residual stream and read it at the end

        >>> import torch
        >>> from delta_trn.models import DeltaConfig, DeltaForCausalLM
        >>> model = DeltaForCausalLM(DeltaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2)).eval()
        >>> cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
        >>> cache.get_seq_length(), tuple(cache.memory[0].state.shape)
        (3, (1, 6, 4, 8))
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.memory = [LayerCache() for _ in range(layers)]
        self.first, self.last = LayerCache(), LayerCache()
        self.length = 0
        self.real: Tensor | None = None

    def extend(self, B: int, T: int, real: Tensor | None) -> None:
        """Counts T more tokens per row; real [B, T] is False at padding."""
        if real is not None and self.real is None:
            self.real = real.new_ones(B, self.length)
        if self.real is not None:
            new = self.real.new_ones(B, T) if real is None else real
            self.real = torch.cat([self.real, new], dim=1)
        self.length += T

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def rows(self) -> int | None:
        """The number of rows B; None while the cache is empty."""
        tensors = (x for layer in self._all() for x in vars(layer).values() if x is not None)
        return next((x.shape[0] for x in tensors), None)

    @property
    def is_compileable(self) -> bool:
        return False  # transformers compiles generation over caches of fixed length only

    @property
    def is_linear(self) -> list[bool]:
        """Says False for each layer: to transformers,
        a cache of linear layers does not know its length.
        """
        return [False] * len(self)

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "a delta rule's state cannot forget its last tokens; keep a copy.deepcopy from before "
            "them"
        )

    def reset(self) -> None:
        """Empties the cache."""
        self.__init__(len(self.memory))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces row i by row beam_idx[i], for beam search."""
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def _all(self) -> list[LayerCache]:
        return [self.first, *self.memory, self.last]

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.real is not None:
            self.real = change(self.real)
        for layer in self._all():
            for slot in fields(layer):
                if (x := getattr(layer, slot.name)) is not None:
                    setattr(layer, slot.name, change(x))


def take_cache(past_key_values: Any, options: dict[str, Any]) -> Any:
    """Takes a cache under its other names out of `options`; returns it, or `past_key_values`.

    Raises ValueError for two different caches.
    """
    caches = [past_key_values, options.pop("cache", None), options.pop("cache_params", None)]
    given = [cache for cache in caches if cache is not None]
    if any(cache is not given[0] for cache in given):
        raise ValueError(
            "cache and past_key_values are two names of one argument: give one of them"
        )
    return given[0] if given else None
