"""The language model: embedding, blocks, readout and loss, as a `transformers` model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from delta_trn import backends
from delta_trn.models.attention import Attention
from delta_trn.models.cache import DeltaCache, LayerCache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.layers import MLPS, NORMS, Dropout, Embedding, Linear, at_least_float32
from delta_trn.models.mup import TABLES, Role
from delta_trn.models.parameters import Tag, initialize
from delta_trn.models.residual import Additive, Whole, make_expansion, make_read, make_write
from delta_trn.models.sequence import Padding, Sequences, packed_bounds

# arguments that transformers passes to every model, and that change nothing here
IGNORED = frozenset(
    {
        *("cache_position", "cu_seq_lens_k", "max_length_k", "max_length_q", "output_attentions"),
        "token_type_ids",
    }
)


class Block(GradientCheckpointingLayer):
    """Computes x + Mixer(Norm(x)), then x + MLP(Norm(x)); `models.residual` has other residuals than +."""

    def __init__(self, config: DeltaConfig, index: int) -> None:
        super().__init__()
        d, norm = config.hidden_size, NORMS[config.norm]
        self.read = make_read(config)
        self.mixer_norm = norm(d, config.rms_norm_eps)
        self.mixer = Attention(config) if index in config.attention_layers else GatedDeltaNet(config)
        self.mixer_write = make_write(config)
        self.mlp_norm = norm(d, config.rms_norm_eps)
        self.mlp = MLPS[config.mlp](d, config.intermediate_size, config.mlp_output_scale)
        self.mlp_write = make_write(config)
        self.mixer_dropout = Dropout(config.dropout, 2 * index + 1)
        self.mlp_dropout = Dropout(config.dropout, 2 * index + 2)
        # Where the residual is a sum that is read whole, the norm that follows computes it.
        self.sums = isinstance(self.mixer_write, Additive) and isinstance(self.read, Whole)

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """Maps the residual stream [B, T, d DV] to the next one; DV = 1 except for expanded states."""
        h = self.read(x, sequences, cache, "mixer_read")
        c = self.mixer_norm(h)
        y = self.mixer_dropout(self.mixer(c, sequences, cache), sequences.noise)
        if self.sums:
            c, x = self.mlp_norm.of_sum(y, x)
            h = x
        else:
            x = self.mixer_write(x, h, c, y)
            h = self.read(x, sequences, cache, "mlp_read")
            c = self.mlp_norm(h)
        return self.mlp_write(x, h, c, self.mlp_dropout(self.mlp(c), sequences.noise))


class DeltaForCausalLM(PreTrainedModel, GenerationMixin):
    """Computes logits = multiplier * E Norm( blocks( E[token] ) ), E tied unless the configuration says not.

    >>> from delta_trn.models import DeltaConfig
    >>> model = DeltaForCausalLM(DeltaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))
    >>> model.eval().generate(torch.tensor([[65, 66]]), max_new_tokens=3, do_sample=False).shape
    torch.Size([1, 5])
    """

    config: DeltaConfig
    config_class = DeltaConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - instance variables to transformers
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}  # noqa: RUF012
    # In bfloat16 they would not move: one step of that dtype is 0.4% of a value, and their updates are less.
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]  # noqa: RUF012
    _is_stateful = True  # a state cannot be rolled back, so there is no assisted decoding

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config)
        d, tied = config.hidden_size, config.tie_word_embeddings
        # The paper's code ties before it draws, so it draws the embedding as the head: like a hidden matrix.
        like = Role.HIDDEN if tied and config.init == "authors" else None
        self.embed = Embedding(config.vocab_size, d, Tag(Role.EMBEDDING, like=like))
        self.positions = None
        if config.positions == "learned":
            self.positions = Embedding(config.max_position_embeddings, d, Tag(Role.VECTOR))
        self.expand = make_expansion(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.read = make_read(config)
        self.norm = NORMS[config.norm](d, config.rms_norm_eps)
        self.dropout = Dropout(config.dropout, 0)
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
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Returns the logits, and with `labels` the loss.

            input_ids       [B, T] int64; or inputs_embeds [B, T, d]
            attention_mask  [B, past + T] or [B, T], 0 at padding, which may lie anywhere and changes nothing
            labels          [B, T]: position t is scored against label t + 1; -100 is ignored
            past_key_values what an earlier call with use_cache=True returned; it is updated in place
            use_cache       None: as the configuration says, and not while training
            cu_seqlens      [N + 1] int64: N sequences packed in B = 1, without padding or cache
            logits_to_keep  compute only the last n positions, or those of an index tensor; 0: all
            others          arguments of transformers: position_ids that start again at 0, or cu_seq_lens_q,
                            pack sequences, too; num_items_in_batch divides the summed loss, for its Trainer
            returns logits  [B, T, vocabulary]
                    hidden_states   L + 1 of [B, T, d DV]: the stream before each block and after the last

        Raises ValueError for arguments that do not go together, and TypeError for unknown ones.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both")
        items, bounds = others.pop("num_items_in_batch", None), packed_bounds(others, attention_mask)
        if unknown := sorted(set(others) - IGNORED):
            raise TypeError(f"forward() got unknown arguments: {', '.join(unknown)}; leave them out")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        B, T = x.shape[:2]
        if cu_seqlens is None and bounds is not None:
            # rows of packed sequences are one row of more sequences
            x, cu_seqlens, attention_mask = x.reshape(1, B * T, -1), bounds, None
        cache = self._cache(x.shape[0], past_key_values, use_cache, attention_mask, cu_seqlens)
        streams: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.hidden(
            x, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache, streams=streams
        )
        hidden = hidden.reshape(B, T, -1)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept] * self.logits_multiplier)
        loss = None
        if labels is not None:
            targets = labels[:, 1:]
            if cu_seqlens is not None:
                ends = cu_seqlens[1:-1] - 1
                ends = ends[(ends >= 0) & (ends % T < T - 1)]
                targets = targets.clone()
                targets[ends // T, ends % T] = -100  # the next token belongs to another sequence
            loss = self._cross_entropy(hidden[:, :-1], targets, -100)
            if items is not None:
                loss = loss * (targets != -100).sum() / items
        output = CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=cache,
            hidden_states=None if streams is None else tuple(y.reshape(B, T, -1) for y in streams),  # type: ignore[arg-type]
        )
        return output.to_tuple() if return_dict is False else output

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        ignore_index: int = -100,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats, float32; input_ids[:, t] predicts targets[:, t].

        noise   [B, T] int32, a random number per token from which dropout draws its masks; None: torch's
                generator draws them

        The logits of all tokens are never in memory together; see `linear_cross_entropy`.
        """
        if input_ids.shape != targets.shape:
            raise ValueError(
                f"targets {tuple(targets.shape)} must have the shape of input_ids {tuple(input_ids.shape)}"
            )
        hidden = self.hidden(self.embed(input_ids), cu_seqlens=cu_seqlens, noise=noise)
        return self._cross_entropy(hidden, targets, ignore_index)

    def hidden(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DeltaCache | None = None,
        streams: list[Tensor] | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Maps embedded tokens x [B, T, d] to [B, T, d], normalized for the readout.

        `cache` advances by T tokens. The residual stream is appended to `streams` before each block and after
        the last.
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
        # Learned positions need a token's index in its own sequence, as attention does.
        attention = bool(self.config.attention_layers) or self.positions is not None
        if cu_seqlens is None:
            sequences = Sequences.rows(
                T, x.device, offset=offset, real=real, padded=padding is not None, attention=attention
            )
        else:
            sequences = Sequences.packed(cu_seqlens, T, attention=attention)
        sequences = replace(sequences, noise=noise)
        x = x if padding is None else padding.arrange(x)
        if self.positions is not None:
            x = x + self._position(sequences.position)
        x = self.expand(self.dropout(x, noise), sequences, None if cache is None else cache.first)
        for i, block in enumerate(self.blocks):
            if streams is not None:
                streams.append(x if padding is None else padding.restore(x))
            x = block(x, sequences, None if cache is None else cache.memory[i])
        if streams is not None:
            streams.append(x if padding is None else padding.restore(x))
        x = self.read(x, sequences, None if cache is None else cache.last)
        return self.norm(x if padding is None else padding.restore(x))

    def _position(self, position: Tensor) -> Tensor:
        """Returns learned positions [B or 1, T, d]. Raises ValueError for a position beyond the last."""
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
        # A share s of the target spread over all tokens adds s (z_y - mean z): one more row of W per token.
        counted = targets != ignore_index
        rows = weight[targets.where(counted, 0)] - weight.mean(0)
        above = (at_least_float32(hidden) * rows).sum(-1) * multiplier
        return loss + smoothing * (above * counted).sum() / counted.sum().clamp(min=1)

    def _cache(
        self,
        B: int,
        past: DeltaCache | None,
        use_cache: bool | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> DeltaCache | None:
        """Returns the cache to use: `past`, a new one, or none. Raises ValueError where there can be none."""
        if past is not None and not isinstance(past, DeltaCache):
            raise ValueError(
                f"past_key_values is a {type(past).__name__}; pass a DeltaCache, as use_cache=True returns"
            )
        if past is not None and (len(past) != len(self.blocks) or past.rows not in (None, B)):
            raise ValueError(
                f"past_key_values has {len(past)} layers and {past.rows} rows, but the model has "
                f"{len(self.blocks)} layers and the input {B} rows; pass what this model returned for them"
            )
        if cu_seqlens is not None and (past is not None or use_cache or attention_mask is not None):
            raise ValueError(
                "cu_seqlens packs whole sequences: leave out past_key_values, use_cache and attention_mask"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None
        if past is None and not use_cache:
            return None
        if self.training and self.is_gradient_checkpointing:
            raise ValueError(
                "gradient checkpointing runs blocks twice, which a cache cannot follow; pass use_cache=False"
            )
        return DeltaCache(self.config.num_hidden_layers) if past is None else past

    def initialize_weights(self) -> None:
        """Draws initial values; transformers calls this after building a model and after loading weights."""
        initialize(self)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() would pass its own kind of cache; forward makes ours

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = _retag(value, self.embed)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = _retag(new_embeddings, self.lm_head)


def _retag(new: Any, old: Any) -> Any:
    """Gives `new`, the plain module that transformers puts in place of a resized one, the tags of `old`."""
    new.tags = old.tags
    return new


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, multiplier: float, ignore_index: int = -100
) -> Tensor:
    """Returns `backends.linear_cross_entropy` of the logits multiplier W h, without keeping all of them.

        hidden      [N, d]
        weight      [vocabulary, d]
        targets     [N] int64
        returns     [] float32 (float64 for float64), nats; 0 if every target is ignored

    Products are in the dtype of `hidden`, or in autocast's under autocast; everything else is in float32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        hidden = hidden * multiplier
    return backends.linear_cross_entropy(hidden, weight, targets, ignore_index=ignore_index)


AutoConfig.register(DeltaConfig.model_type, DeltaConfig, exist_ok=True)
AutoModelForCausalLM.register(DeltaConfig, DeltaForCausalLM, exist_ok=True)
