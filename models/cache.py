"""What generation keeps between calls: of one size however long the text is, except in attention layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import Cache


@dataclass
class LayerCache:
    """One layer's memory; what a layer does not use stays None.

    convolution     [B, taps - 1, C]    the last inputs of the short convolution
    state           [B, HV, K, V]       the delta rule's S, float32
    keys, values    [B, H, T, D]        softmax attention's past
    last_key, last_value    [B, 1, H D] its projections' last outputs, where a shift takes shares of them
    mixer_read, mlp_read    [B, taps - 1, d DV]     the last of the streams that the sublayers read by a
                                                    convolution over time
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
    """The memory of a model with so many layers. `DeltaForCausalLM` makes, fills and returns it.

    length      tokens seen, padding included: transformers' count
    real        [B, length] bool, False at padding; None: there was none
    first, last the memory of what begins the residual stream, and of what reads it at the end
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.memory = [LayerCache() for _ in range(layers)]
        self.first, self.last = LayerCache(), LayerCache()
        self.length = 0
        self.real: Tensor | None = None

    def extend(self, B: int, T: int, real: Tensor | None) -> None:
        """Notes T more tokens a row, `real` [B, T] as above."""
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
        """B of what it holds; None while that is nothing."""
        held = (x for layer in self._all() for x in vars(layer).values() if x is not None)
        return next((x.shape[0] for x in held), None)

    @property
    def is_compileable(self) -> bool:
        return False  # transformers compiles generation over caches of fixed length only

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "a delta rule's state cannot forget its last tokens; keep a copy.deepcopy from before them"
        )

    def reset(self) -> None:
        """As new."""
        self.__init__(len(self.memory))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: what beam search asks for."""
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
