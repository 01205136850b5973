"""The backbone of the models: embedding, blocks and the last norm. And what all models share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from delta_trn.backends.stand_ins import may_read
from delta_trn.models.attention import Attention
from delta_trn.models.cache import CACHE_NAME, DeltaCache, LayerCache, take_cache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.kimi_delta_attention import KimiDeltaAttention
from delta_trn.models.layers import (
    MLPS,
    NORM_FORWARDS,
    NORMS,
    Dropout,
    Tags,
    is_untouched,
    make_embedding,
)
from delta_trn.models.mup import Role
from delta_trn.models.parameters import Tag, initialize, initialize_module
from delta_trn.models.residual import Additive, Whole, make_expansion, make_read, make_write
from delta_trn.models.sequence import (
    Padding,
    Sequences,
    check_bounds,
    check_mask,
    packed_bounds,
    places_in_sequences,
)

# arguments that transformers passes to every model, and that change nothing here
IGNORED = frozenset(
    {
        *("cache_position", "cu_seq_lens_k", "max_length_k", "max_length_q", "output_attentions"),
        *("output_router_logits", "token_type_ids"),
    }
)

MIXERS = {"gated_deltanet": GatedDeltaNet, "kimi_delta_attention": KimiDeltaAttention}


class Block(GradientCheckpointingLayer):
    """Computes x + Mixer(Norm(x)), then x + MLP(Norm(x)); `models.residual` has other residuals
    than +.

    With base_layers, what is added is multiplied by base_layers / layers (CompleteP, see
    `models.mup`).
    """

    def __init__(self, config: DeltaConfig, index: int) -> None:
        super().__init__()
        d, norm = config.hidden_size, NORMS[config.norm]
        self.read = make_read(config)
        self.mixer_norm = norm(d, config.rms_norm_eps)
        self.mixer = (Attention if index in config.attention_layers else MIXERS[config.mixer])(
            config
        )
        self.mixer_write = make_write(config)
        self.mlp_norm = norm(d, config.rms_norm_eps)
        self.mlp = MLPS[config.mlp](
            d, config.intermediate_size, config.mlp_output_scale, config.inner_ratio
        )
        self.mlp_write = make_write(config)
        self.mixer_dropout = Dropout(config.dropout, 2 * index + 1)
        self.mlp_dropout = Dropout(config.dropout, 2 * index + 2)
        self.share = 1 / config.depth_ratio
        # Where the residual is a sum that is read whole, the norm that follows computes it.
        self.sums = isinstance(self.mixer_write, Additive) and isinstance(self.read, Whole)

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """Maps the residual stream [B, T, d DV] to the next one;
        DV = 1 except for expanded states.
        """
        h = self.read(x, sequences, cache, "mixer_read")
        c = self.mixer_norm(h)
        y = self._scale(self.mixer_dropout(self.mixer(c, sequences, cache), sequences.noise))
        if self.sums and is_untouched(self.mlp_norm, NORM_FORWARDS):
            c, x = self.mlp_norm.of_sum(y, x)
            h = x
        else:
            x = self.mixer_write(x, h, c, y)
            h = self.read(x, sequences, cache, "mlp_read")
            c = self.mlp_norm(h)
        return self.mlp_write(x, h, c, self._scale(self.mlp_dropout(self.mlp(c), sequences.noise)))

    def takes_rows(self) -> bool:
        """Says whether this maps rows [B T, d], too, and nobody looks:
        on XLA each shape of x is recorded.
        """
        watched = any(
            m._forward_hooks or m._forward_pre_hooks for m in (self, self.mixer, self.mlp)
        )
        return self.sums and isinstance(self.mixer, GatedDeltaNet) and not watched

    def _scale(self, y: Tensor) -> Tensor:
        return y if self.share == 1 else y * self.share


class DeltaPreTrainedModel(PreTrainedModel):
    """Tells transformers how the models below are loaded, placed and initialized."""

    config: DeltaConfig
    config_class = DeltaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - instance variables to transformers
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    # In bfloat16 they would not move: one step of that dtype is 0.4% of a value, and their updates
    # are less.
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # noqa: RUF012
    _is_stateful = True  # a state cannot be rolled back, so there is no assisted decoding
    is_part = (
        False  # whether this is a part of a model that draws the initial values of all its parts
    )

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Refuses that transformers copies a class of the package beside saved weights."""
        if cls.__module__.startswith("delta_trn."):
            raise ValueError(
                f"transformers would copy only some files of {cls.__name__}; `delta-trn export "
                "RUN_DIR --to DIR --remote-code` writes all, and so does "
                "delta_trn.models.ecosystem.remote_code.write_remote_code(folder, model.config) "
                "before model.save_pretrained(folder)"
            )
        super().register_for_auto_class(auto_class)

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        """Marks nothing: a tied matrix is one parameter, and if a checkpoint lacks it,
        it has to be drawn.
        """

    def initialize_weights(self) -> None:
        """Draws initial values; transformers calls this after building a model
        and after loading weights.
        """
        if not self.is_part:
            initialize(self)

    def _init_weights(self, module: nn.Module) -> None:
        """Draws what a module has itself, where transformers goes from module to module."""
        initialize_module(self, module)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() would pass its own kind of cache; forward makes ours

    def get_input_embeddings(self) -> nn.Module:
        return cast("DeltaModel", self.base_model).embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        cast("Any", self.base_model).embed = mark_filled(value)


class DeltaModel(DeltaPreTrainedModel):
    """Computes Norm( blocks( E[token] ) ): the backbone alone, which `AutoModel` makes.

    It loads from the checkpoints of the models with a head, and they from its own.

    >>> from delta_trn.models import DeltaConfig
    >>> model = DeltaModel(DeltaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))
    >>> model(torch.tensor([[65, 66]])).last_hidden_state.shape
    torch.Size([1, 2, 32])
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]  # noqa: RUF012

    def __init__(self, config: DeltaConfig, *, is_part: bool = False) -> None:
        super().__init__(config)
        d, self.is_part = config.hidden_size, is_part
        self.tags, tag = Tags(), Tag(Role.EMBEDDING, scale=config.embedding_init)
        self.embed = make_embedding(self.tags, "embed", config.vocab_size, d, tag)
        self.positions = None
        if config.positions == "learned":
            most, tag = config.max_position_embeddings, Tag(Role.VECTOR)
            self.positions = make_embedding(self.tags, "positions", most, d, tag)
        self.expand = make_expansion(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.read = make_read(config)
        self.norm = NORMS[config.norm](d, config.rms_norm_eps)
        self.dropout = Dropout(config.dropout, 0)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: DeltaCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Returns last_hidden_state [B, T, d], normalized.
        Arguments and errors are `DeltaForCausalLM`'s.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if 0 in x.shape[:2]:
            raise ValueError(
                f"{x.shape[0]} rows of {x.shape[1]} tokens are nothing to compute; pass at least "
                "one"
            )
        if attention_mask is not None:
            check_mask(attention_mask)
        past, shape = take_cache(past_key_values, others), (x.shape[0], x.shape[1])
        if cu_seqlens is not None:
            _check_packed_row(cu_seqlens, others.get("cu_seq_lens_q"), shape)
            others["cu_seq_lens_q"] = cu_seqlens
        stated = packed_bounds(others, attention_mask, shape, continues=past is not None)
        if unknown := sorted(set(others) - IGNORED):
            raise TypeError(
                f"forward() got unknown arguments: {', '.join(unknown)}; leave them out"
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if cu_seqlens is None and stated is not None:
            cu_seqlens, attention_mask = stated, None  # padding is a sequence of its own there
        places = None if cu_seqlens is None else places_in_sequences(cu_seqlens, shape)
        cache = self._cache(x.shape[0], past, use_cache, attention_mask, cu_seqlens)
        streams: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.hidden(
            x, attention_mask=attention_mask, position_ids=places, cache=cache, streams=streams
        )
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,  # type: ignore[arg-type]
            **{CACHE_NAME: cast(Any, cache)},
            hidden_states=None if streams is None else tuple(streams),  # type: ignore[arg-type]
        )

    def hidden(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DeltaCache | None = None,
        streams: list[Tensor] | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Maps embedded tokens x [B, T, d] to [B, T, d], normalized for the readout.

        `position_ids` [B, T] are the place of each token in its own document: a row may have
        several. `cache` advances by T tokens. The residual stream is appended to `streams` before
        each block and after the last.
        """
        B, T = x.shape[:2]
        if position_ids is not None:
            alone = cache is None and attention_mask is None
            if not alone or tuple(position_ids.shape) != (B, T):
                raise ValueError(
                    f"position_ids {tuple(position_ids.shape)} with {(B, T)} tokens: give each "
                    "token its place in its own document, and no cache or attention_mask"
                )
        offset = 0 if cache is None else cache.length
        padding = Padding.of(attention_mask, B, T, offset)
        real = None if padding is None else padding.real
        if cache is not None:
            cache.extend(B, T, real)
            real = cache.real
        # Learned positions need a token's index in its own sequence, as attention does.
        attention = bool(self.config.attention_layers) or self.positions is not None
        if position_ids is not None:
            sequences = Sequences.documents(position_ids, attention=attention)
        else:
            sequences = Sequences.rows(
                T,
                x.device,
                offset=offset,
                real=real,
                padded=padding is not None,
                attention=attention,
            )
        sequences = replace(sequences, noise=noise)
        x = x if padding is None else padding.arrange(x)
        if self.positions is not None:
            x = x + self._position(sequences.position)
        x = self.expand(self.dropout(x, noise), sequences, None if cache is None else cache.first)
        plain = x.device.type == "xla" and padding is None and streams is None and noise is None
        lazily = plain and all(cast("Block", block).takes_rows() for block in self.blocks)
        x = x.flatten(0, 1) if lazily else x
        for i, block in enumerate(self.blocks):
            if streams is not None:
                streams.append(x if padding is None else padding.restore(x))
            x = block(x, sequences, None if cache is None else cache.memory[i])
        x = x.view(B, T, -1) if lazily else x
        if streams is not None:
            streams.append(x if padding is None else padding.restore(x))
        x = self.read(x, sequences, None if cache is None else cache.last)
        return self.norm(x if padding is None else padding.restore(x))

    def _position(self, position: Tensor) -> Tensor:
        """Returns learned positions [B or 1, T, d].
        Raises ValueError for a position beyond the last.
        """
        assert self.positions is not None
        most = self.config.max_position_embeddings
        readable = position.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and int(position.max()) >= most:
            raise ValueError(
                f"position {int(position.max())} has no embedding: max_position_embeddings={most}; "
                "give shorter sequences"
            )
        return self.positions(position)

    def _cache(
        self,
        B: int,
        past: DeltaCache | None,
        use_cache: bool | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> DeltaCache | None:
        """Returns the cache to use: `past`, a new one, or none.
        Raises ValueError where there can be none.
        """
        if past is not None and not isinstance(past, DeltaCache):
            raise ValueError(
                f"past_key_values is a {type(past).__name__}; pass a DeltaCache, as use_cache=True "
                "returns"
            )
        if past is not None and (len(past) != len(self.blocks) or past.rows not in (None, B)):
            raise ValueError(
                f"past_key_values has {len(past)} layers and {past.rows} rows, but the model has "
                f"{len(self.blocks)} layers and the input {B} rows; pass what this model returned "
                "for them"
            )
        if cu_seqlens is not None and (past is not None or use_cache or attention_mask is not None):
            raise ValueError(
                "cu_seqlens packs whole sequences: leave out past_key_values, use_cache and "
                "attention_mask"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None
        if past is None and not use_cache:
            return None
        checkpoints = any(getattr(block, "gradient_checkpointing", False) for block in self.blocks)
        if self.training and checkpoints:
            raise ValueError(
                "gradient checkpointing runs blocks twice, which a cache cannot follow; pass "
                "use_cache=False"
            )
        return DeltaCache(self.config.num_hidden_layers) if past is None else past


def _check_packed_row(cu_seqlens: Any, other: Any, shape: tuple[int, int]) -> None:
    """Raises TypeError or ValueError unless these are the bounds of sequences in one row, as those
    are that were given by another name.
    """
    if shape[0] != 1:
        raise ValueError(
            f"cu_seqlens packs sequences into one row, not into B={shape[0]}: make it one row"
        )
    check_bounds("cu_seqlens", cu_seqlens, shape[1])
    if other is None or other is cu_seqlens or not may_read(cu_seqlens):
        return
    if not (isinstance(other, Tensor) and other.tolist() == cu_seqlens.tolist()):
        raise ValueError(
            "cu_seqlens and cu_seq_lens_q are two names of one argument, and differ: give one of "
            "them"
        )


def mark_filled(new: Any) -> Any:
    """Marks the parameters of a module that transformers puts in place of a resized one, whose rows
    it has: `initialize` leaves them as they are.
    """
    for parameter in new.parameters():
        parameter._is_hf_initialized = True
    return new
