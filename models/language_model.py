"""The language model: embedding, blocks, readout, loss; a `transformers` model in every respect."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from models import mup
from models.attention import Attention
from models.cache import DeltaCache, LayerCache
from models.config import DeltaConfig
from models.cross_entropy import linear_cross_entropy
from models.gated_deltanet import GatedDeltaNet
from models.layers import Embedding, Linear, RMSNorm, ShortConvolution, SwiGLU
from models.mup import Role
from models.sequence import Sequences

SMALLEST_A = 1e-4  # of A ~ U(0, 16): log(0) would never learn
SMALLEST_DT = 1e-4  # of the time step, as in Mamba2's code


class Block(GradientCheckpointingLayer):
    """x + Mixer(RMSNorm(x)), then x + SwiGLU(RMSNorm(x))."""

    def __init__(self, config: DeltaConfig, index: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = Attention(config) if index in config.attention_layers else GatedDeltaNet(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        x = x + self.mixer(self.mixer_norm(x), sequences, cache)
        return x + self.mlp(self.mlp_norm(x))


class DeltaForCausalLM(PreTrainedModel, GenerationMixin):
    """logits = multiplier * E RMSNorm( blocks( E[token] ) ), E tied unless the configuration says otherwise."""

    config: DeltaConfig
    config_class = DeltaConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}
    # decay rates below bf16's resolution of 0.4% are lost if these are rounded
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]
    _is_stateful = True  # the scan's state cannot be rolled back, so no assisted decoding

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config)
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, Role.READOUT)
        role = Role.EMBEDDING if config.tie_word_embeddings else Role.READOUT
        self.logits_multiplier = mup.multiplier(role, config.parametrization, config.width_ratio)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # transformers would hand in its own cache; ours is made in forward

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: DeltaCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and with `labels` the loss.

            input_ids       [B, T] int64; or inputs_embeds [B, T, d]
            attention_mask  [B, past + T], 0 at padding, which may be left or right
            labels          [B, T]: position t is scored against label t + 1, as transformers has it; -100 is ignored
            past_key_values what an earlier call with use_cache=True returned; it is updated in place
            cu_seqlens      [N + 1] int64: N sequences packed in B = 1, without a cache
            logits_to_keep  only the last so many positions; 0: all
            returns logits  [B, T, vocabulary] float32

        `kwargs` takes what transformers' generation passes to every model (position_ids and the like); unused.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        if cu_seqlens is not None and (use_cache or past_key_values is not None):
            raise ValueError("cu_seqlens packs whole sequences and cannot be combined with a cache")
        cache = past_key_values
        if cache is None and use_cache:
            cache = DeltaCache(self.config.num_hidden_layers)
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = self.hidden(x, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache)
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        logits = logits.float() * self.logits_multiplier
        loss = None
        if labels is not None:
            if logits_to_keep:
                raise ValueError(f"labels need every logit; logits_to_keep={logits_to_keep} keeps fewer")
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # type: ignore[arg-type]

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
        hidden = self.hidden(self.embed(input_ids), cu_seqlens=cu_seqlens).flatten(0, 1)
        weight, multiplier = self.lm_head.weight, self.logits_multiplier
        return linear_cross_entropy(hidden, weight, targets.flatten(), multiplier, ignore_index)

    def hidden(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DeltaCache | None = None,
    ) -> Tensor:
        """x [B, T, d], embedded tokens -> [B, T, d], normalized for the readout. Moves `cache` on by T tokens."""
        offset = 0 if cache is None else cache.length
        sequences = Sequences(offset, _real(attention_mask, x, offset), cu_seqlens)
        for i, block in enumerate(self.blocks):
            x = block(x, sequences, None if cache is None else cache.layers[i])
        if cache is not None:
            cache.length += x.shape[1]
        return self.norm(x)

    def normal_std(self, module: nn.Module, role: Role) -> float | None:
        """Standard deviation with which a module's parameter of this role begins; None: not drawn from a normal."""
        c = self.config
        if isinstance(module, ShortConvolution) and c.init == "authors":
            role = Role.HIDDEN  # their initializer takes the convolution for a hidden matrix
        elif role in (Role.SCALAR, Role.VECTOR):
            return None
        return mup.initial_std(role, c.parametrization, c.width_ratio, c.initializer_range)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Called by transformers for each module. Values that were loaded keep their mark and are left alone."""
        for name, role in getattr(module, "roles", {}).items():
            parameter = getattr(module, name)
            if parameter is None or getattr(parameter, "_is_hf_initialized", False):
                continue
            std = self.normal_std(module, role)
            if std is not None:
                parameter.normal_(0.0, std)
            elif isinstance(module, ShortConvolution):
                parameter.uniform_(-1, 1).mul_(parameter.shape[1] ** -0.5)
            elif name == "A_log":
                parameter.uniform_(0, 16).clamp_(min=SMALLEST_A).log_()
            elif name == "dt_bias":
                dt = parameter.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=SMALLEST_DT)
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus's inverse
            else:
                parameter.fill_(1.0)


def _real(attention_mask: Tensor | None, x: Tensor, offset: int) -> Tensor | None:
    """[B, offset + T] bool of transformers' mask. Raises ValueError if it has another shape."""
    if attention_mask is None:
        return None
    expected = (x.shape[0], offset + x.shape[1])
    if tuple(attention_mask.shape) != expected:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, expected {expected}: one entry for each of "
            f"{offset} cached and {x.shape[1]} new tokens"
        )
    return attention_mask.bool()
