"""The language model: embedding, blocks, readout, loss; a `transformers` model in every respect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from delta_trn.models.attention import Attention
from delta_trn.models.cache import DeltaCache, LayerCache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.cross_entropy import linear_cross_entropy
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.initialization import initialize
from delta_trn.models.layers import MLPS, NORMS, Embedding, Linear, at_least_float32
from delta_trn.models.mup import TABLES, Role, Tag
from delta_trn.models.residual import Additive, make_write
from delta_trn.models.sequence import Padding, Sequences
from delta_trn.models.stream import Whole, make_expansion, make_read


class Block(GradientCheckpointingLayer):
    """x + Mixer(Norm(x)), then x + MLP(Norm(x)); or another residual than +, see `models.residual`."""

    def __init__(self, config: DeltaConfig, index: int) -> None:
        super().__init__()
        d, norm = config.hidden_size, NORMS[config.norm]
        self.read = make_read(config)
        self.mixer_norm = norm(d, config.rms_norm_eps)
        self.mixer = Attention(config) if index in config.attention_layers else GatedDeltaNet(config)
        self.mixer_write = make_write(config)
        self.mlp_norm = norm(d, config.rms_norm_eps)
        self.mlp = MLPS[config.mlp](d, config.intermediate_size)
        self.mlp_write = make_write(config)
        depth = config.num_hidden_layers**-0.5 if config.depth_scaled_init else 1.0
        for last, scale in (
            (self.mixer.o_proj, depth * config.mixer_output_init),
            (self.mlp.down_proj, depth),
        ):
            last.tags = {"weight": replace(last.tags["weight"], scale=scale)}
        self.dropout = nn.Dropout(config.dropout)
        # a sum that is read as it is: the norm after it makes it
        self.sums = isinstance(self.mixer_write, Additive) and isinstance(self.read, Whole)

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """The residual stream [B, T, d DV], DV = 1 but for expanded states."""
        h = self.read(x, sequences, cache, "mixer_read")
        c = self.mixer_norm(h)
        y = self.dropout(self.mixer(c, sequences, cache))
        if self.sums:
            c, x = self.mlp_norm.of_sum(y, x)
            h = x
        else:
            x = self.mixer_write(x, h, c, y)
            h = self.read(x, sequences, cache, "mlp_read")
            c = self.mlp_norm(h)
        return self.mlp_write(x, h, c, self.dropout(self.mlp(c)))


class DeltaForCausalLM(PreTrainedModel, GenerationMixin):
    """logits = multiplier * E RMSNorm( blocks( E[token] ) ), E tied unless the configuration says not."""

    config: DeltaConfig
    config_class = DeltaConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - instance variables to transformers
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}  # noqa: RUF012
    # rounded to bfloat16 they would not move: its steps are 0.4% of a value, an update of theirs is less
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # noqa: RUF012
    _is_stateful = True  # a state cannot be rolled back, so no assisted decoding

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config)
        d, tied = config.hidden_size, config.tie_word_embeddings
        # the paper's code ties before it draws, and what it draws is the head: to it, a hidden matrix
        like = Role.HIDDEN if tied and config.init == "authors" else None
        self.embed = Embedding(config.vocab_size, d, Tag(Role.EMBEDDING, like=like))
        self.positions = None
        if config.positions == "learned":
            self.positions = Embedding(config.max_position_embeddings, d, Tag(Role.VECTOR))
        self.expand = make_expansion(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.read = make_read(config)
        self.norm = NORMS[config.norm](d, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.lm_head = Linear(d, config.vocab_size, Role.READOUT)
        if tied:
            self.lm_head.weight = self.embed.weight
        power = TABLES[config.parametrization][Role.EMBEDDING if tied else Role.READOUT].multiplier
        self.logits_multiplier = config.width_ratio**power
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: DeltaCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and with `labels` the loss.

            input_ids       [B, T] int64; or inputs_embeds [B, T, d]
            attention_mask  [B, past + T] or [B, T], 0 at padding: it may lie anywhere, and counts for nothing
            labels          [B, T]: position t is scored against label t + 1, transformers' way; -100: ignored
            past_key_values what an earlier call with use_cache=True returned; it is updated in place
            use_cache       None: as the configuration says, and not while training
            cu_seqlens      [N + 1] int64: N sequences packed in B = 1, without padding or cache
            logits_to_keep  only the last so many positions, or those of an index tensor; 0: all
            returns logits  [B, T, vocabulary]
                    hidden_states   L + 1 of [B, T, d DV]: the stream at first, then what each block returns

        Raises ValueError for arguments that do not go together.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(x.shape[0], past_key_values, use_cache, attention_mask, cu_seqlens)
        streams: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.hidden(
            x, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache, streams=streams
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept] * self.logits_multiplier)
        loss = None
        if labels is not None:
            targets = labels[:, 1:]
            if cu_seqlens is not None:
                targets = targets.clone()
                ends = cu_seqlens[1:-1] - 1
                targets[:, ends[ends >= 0]] = -100  # the next token is another sequence's
            loss = self._cross_entropy(hidden[:, :-1], targets, -100)
        output = CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=cache,
            hidden_states=None if streams is None else tuple(streams),  # type: ignore[arg-type]
        )
        return output.to_tuple() if return_dict is False else output

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        """Mean cross-entropy in nats, float32: position t of `input_ids` [B, T] predicts targets[:, t].

        The logits of all tokens are never in memory together; see `linear_cross_entropy`.
        """
        if input_ids.shape != targets.shape:
            raise ValueError(
                f"targets {tuple(targets.shape)} must have the shape of input_ids {tuple(input_ids.shape)}"
            )
        hidden = self.hidden(self.embed(input_ids), cu_seqlens=cu_seqlens)
        return self._cross_entropy(hidden, targets, ignore_index)

    def hidden(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DeltaCache | None = None,
        streams: list[Tensor] | None = None,
    ) -> Tensor:
        """x [B, T, d], embedded tokens -> [B, T, d], normalized for the readout.

        `cache` is moved on by T tokens; `streams` gets the residual stream before each block and after all.
        """
        B, T = x.shape[:2]
        if cu_seqlens is not None and B != 1:
            raise ValueError(
                f"cu_seqlens packs sequences into one row, not into B={B}: make it one of {B * T} tokens"
            )
        offset = 0 if cache is None else cache.length
        padding = Padding.of(attention_mask, B, T, offset)
        real = None if padding is None else padding.real
        if cache is not None:
            cache.extend(B, T, real)
            real = cache.real
        # learned positions need a token's place among those before it, as attention does
        attention = bool(self.config.attention_layers) or self.positions is not None
        if cu_seqlens is None:
            sequences = Sequences.rows(
                T, x.device, offset=offset, real=real, padded=padding is not None, attention=attention
            )
        else:
            sequences = Sequences.packed(cu_seqlens, T, attention=attention)
        x = x if padding is None else padding.arrange(x)
        if self.positions is not None:
            x = x + self._position(sequences.position)
        x = self.expand(self.dropout(x), sequences, None if cache is None else cache.first)
        for i, block in enumerate(self.blocks):
            if streams is not None:
                streams.append(x if padding is None else padding.restore(x))
            x = block(x, sequences, None if cache is None else cache.memory[i])
        if streams is not None:
            streams.append(x if padding is None else padding.restore(x))
        x = self.read(x, sequences, None if cache is None else cache.last)
        return self.norm(x if padding is None else padding.restore(x))

    def _position(self, position: Tensor) -> Tensor:
        """Learned positions [B or 1, T, d]. Raises ValueError past the last."""
        assert self.positions is not None
        most = self.positions.weight.shape[0]
        readable = position.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and int(position.max()) >= most:
            raise ValueError(
                f"position {int(position.max())} has no embedding: max_position_embeddings={most}; give "
                "shorter sequences"
            )
        return self.positions(position)

    def _cross_entropy(self, hidden: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        hidden, targets, weight = hidden.flatten(0, 1), targets.flatten(), self.lm_head.weight
        multiplier, smoothing = self.logits_multiplier, self.config.label_smoothing
        loss = linear_cross_entropy(hidden, weight, targets, multiplier, ignore_index)
        if not (smoothing and self.training):
            return loss
        # a share s of the target on all tokens alike adds s (z_y - mean z): one more row to read a token
        counted = targets != ignore_index
        rows = weight[targets.where(counted, 0)] - weight.mean(0)
        above = (at_least_float32(hidden) * rows).sum(-1) * multiplier
        return loss + smoothing * (above * counted).sum() / counted.sum().clamp(min=1)

    def _cache(
        self,
        B: int,
        given: DeltaCache | None,
        use_cache: bool | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> DeltaCache | None:
        """The cache to use: the one given, a new one, or none. Raises ValueError where there can be none."""
        if given is not None and not isinstance(given, DeltaCache):
            raise ValueError(
                f"past_key_values is a {type(given).__name__}; pass a DeltaCache, as use_cache=True returns"
            )
        if given is not None and (len(given) != len(self.blocks) or given.rows not in (None, B)):
            raise ValueError(
                f"past_key_values is of {len(given)} layers and {given.rows} rows, but the model has "
                f"{len(self.blocks)} layers and the input {B} rows; pass what this model returned for them"
            )
        if cu_seqlens is not None and (given is not None or use_cache or attention_mask is not None):
            raise ValueError(
                "cu_seqlens packs whole sequences: leave out past_key_values, use_cache and attention_mask"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None
        if given is None and not use_cache:
            return None
        if self.training and self.is_gradient_checkpointing:
            raise ValueError(
                "gradient checkpointing runs blocks twice, which a cache cannot follow; pass use_cache=False"
            )
        return DeltaCache(self.config.num_hidden_layers) if given is None else given

    def initialize_weights(self) -> None:
        """What transformers calls once the model is built, and again where a checkpoint lacks parameters."""
        initialize(self)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() would hand in its own kind; ours is made in forward

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = _retagged(value, self.embed)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = _retagged(new_embeddings, self.lm_head)


def _retagged(new: Any, old: Any) -> Any:
    """transformers resizes by putting in a plain module: it is what the old one was."""
    new.tags = old.tags
    return new
