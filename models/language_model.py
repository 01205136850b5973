"""The models with a head: a language model, and a classifier of sequences,
as `transformers` models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from delta_trn.backends import linear_cross_entropy as cross_entropy_of_readout
from delta_trn.models.backbone import DeltaModel, DeltaPreTrainedModel, mark_filled
from delta_trn.models.cache import CACHE_NAME, DeltaCache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.layers import Tags, apply_linear, at_least_float32, make_linear, multiplies
from delta_trn.models.mup import TABLES, Role
from delta_trn.models.parameters import Tag
from delta_trn.models.sequence import packed_bounds

IGNORED = -100  # the target of a token that counts for nothing, as transformers and torch have it


class Score(nn.Linear):
    """Computes a classifier's scores, W x times the multiplier that muP gives a readout."""

    def __init__(self, config: DeltaConfig, rows: int, multiplier: float) -> None:
        super().__init__(config.hidden_size, rows, bias=False)
        self.multiplier = multiplier

    def reset_parameters(self) -> None:
        """Leaves the weight as it is: `initialize` fills the whole model."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps a tensor [..., d] to [..., rows]."""
        return super().forward(input * self.multiplier)


class DeltaForCausalLM(DeltaPreTrainedModel, GenerationMixin):
    """Computes logits = logit_scale * E Norm( blocks( E[token] ) ), E tied unless the configuration
    says not.

    `lm_head` is a plain matrix: trainers that call it, or multiply by its weight, find the factor
    that muP puts on the logits in the configuration, as `logit_scale`, and apply it themselves.

    >>> from delta_trn.models import DeltaConfig
    >>> model = DeltaForCausalLM(DeltaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))
    >>> model.eval().generate(torch.tensor([[65, 66]]), max_new_tokens=3, do_sample=False).shape
    torch.Size([1, 5])
    """

    _keys_to_ignore_on_load_unexpected = [r"^score\."]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config)
        self.model = DeltaModel(config, is_part=True)
        self.tags, sizes = Tags(), (config.hidden_size, config.vocab_size)
        self.lm_head = make_linear(self.tags, "lm_head", *sizes, Role.READOUT)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed.weight
        self.post_init()

    @can_return_tuple
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
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Returns the logits, and with `labels` the loss.

            input_ids       [B, T] int64; or inputs_embeds [B, T, d]
            attention_mask  [B, past + T] or [B, T], 0 at padding, which may lie anywhere and
                            changes nothing
            labels          [B, T]: position t is scored against label t + 1; -100 is ignored
            past_key_values what an earlier call with use_cache=True returned; it is updated in
            place. From
                            version 5.24 on, transformers calls it `cache`: both names are taken
            use_cache       None: as the configuration says, and not while training
            cu_seqlens      [N + 1] int64: N sequences packed in B = 1, without padding or cache
            logits_to_keep  compute only the last n positions, or those of an index tensor; 0: all
            others          arguments of transformers: position_ids that start again at 0, or
                            cu_seq_lens_q, pack sequences, too; num_items_in_batch divides the
                            summed loss, for its Trainer; shift_labels, where position t is scored
                            against label t; return_dict
            returns logits  [B, T, vocabulary]
                    hidden_states   L + 1 of [B, T, d DV]: the stream before each block and after
                                    the last

        Raises ValueError for arguments that do not go together, and TypeError for unknown ones.
        """
        items, targets = (others.pop(name, None) for name in ("num_items_in_batch", "shift_labels"))
        bounds, given = cu_seqlens, input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and targets is None and bounds is None and given is not None:
            continues = past_key_values is not None or others.get(CACHE_NAME) is not None
            shape = (given.shape[0], given.shape[1])
            bounds = packed_bounds(others, attention_mask, shape, continues=continues)
            others["cu_seq_lens_q"] = bounds
        encoded: BaseModelOutputWithPast = self.model(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **others,
        )
        hidden = encoded.last_hidden_state
        assert hidden is not None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = apply_linear(self.lm_head, hidden[:, kept] * self.config.logit_scale)
        loss = None
        if labels is not None and targets is None:
            targets = _next_tokens(labels, bounds)
        if targets is not None:
            loss = self._cross_entropy(hidden, targets)
            if items is not None:
                loss = loss * (targets != IGNORED).sum() / items
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            **{CACHE_NAME: getattr(encoded, CACHE_NAME)},
            hidden_states=encoded.hidden_states,
        )

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats, float32; input_ids[:, t] predicts targets[:, t].

        targets       [B, T], -100 where nothing is predicted
        position_ids  [B, T] int, the place of each token in its own document: one begins wherever
                      it is 0, and nothing of the document before reaches it. None: a row is one
                      document
        noise         [B, T] int32, a random number per token from which dropout draws its masks;
                      None: torch's generator draws them

        The logits of all tokens are never in memory together; see `linear_cross_entropy`.
        """
        if input_ids.shape != targets.shape:
            raise ValueError(
                f"targets {tuple(targets.shape)} must have the shape of input_ids "
                f"{tuple(input_ids.shape)}"
            )
        x = self.model.embed(input_ids)
        hidden = self.model.hidden(x, position_ids=position_ids, noise=noise)
        return self._cross_entropy(hidden, targets)

    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        smoothing = self.config.label_smoothing if self.training else 0.0
        multiplier = self.config.logit_scale
        # wrapped by PEFT, say: it computes more than its weight says
        if not multiplies(self.lm_head):
            logits = at_least_float32(self.lm_head(hidden * multiplier))
            total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
            return total / (targets != IGNORED).sum().clamp(min=1)
        weight = self.lm_head.weight
        loss = linear_cross_entropy(hidden, weight, targets, multiplier)
        if not smoothing:
            return loss
        # A share s of the target spread over all tokens adds s (z_y - mean z): one more row of W
        # per token.
        counted = targets != IGNORED
        rows = weight[targets.where(counted, 0)] - weight.mean(0)
        above = (at_least_float32(hidden) * rows).sum(-1) * multiplier
        return loss + smoothing * (above * counted).sum() / counted.sum().clamp(min=1)

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> Any:
        """Raises NotImplementedError: transformers' `generate_batch`, and what it is made of, keeps
        pages of keys and values, which a delta rule does not have.
        """
        raise NotImplementedError(
            "generate_batch keeps pages of keys and values, and a layer with a state has none; use "
            "generate, which takes rows of several lengths padded on the left, with attention_mask"
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Takes the rows of `new_embeddings`: transformers makes a plain module where it resizes.

        A layer that does more than multiply by its rows becomes the readout itself.
        """
        mark_filled(new_embeddings)
        if not (isinstance(new_embeddings, nn.Embedding) or multiplies(new_embeddings)):
            self.lm_head = new_embeddings
            return
        self.lm_head.weight = new_embeddings.weight
        self.lm_head.out_features = self.lm_head.weight.shape[0]


def _next_tokens(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns for each of labels [B, T] the next one, or -100 at the end of its sequence."""
    targets = labels.roll(-1, dims=1)
    targets[:, -1] = IGNORED
    if cu_seqlens is not None:
        ends = cu_seqlens[1:-1] - 1
        targets.view(-1)[ends[ends >= 0]] = IGNORED
    return targets


class DeltaForSequenceClassification(GenericForSequenceClassification, DeltaPreTrainedModel):
    """Scores a sequence by its last token that is not padding, for `num_labels` of the
    configuration.

    Forward, losses and padding are those of transformers' classifiers. It loads from a language
    model's checkpoint, and draws the scores' matrix.

    >>> from delta_trn.models import DeltaConfig
    >>> model = DeltaForSequenceClassification(DeltaConfig(vocab_size=320, hidden_size=32, num_labels=3))
    >>> model(torch.tensor([[65, 66]])).logits.shape
    torch.Size([1, 3])
    """

    # transformers divides no classifier's loss by num_items_in_batch: its Trainer has to average
    accepts_loss_kwargs = False
    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]  # noqa: RUF012

    def __init__(self, config: DeltaConfig) -> None:
        # the mixin's would make a matrix without a muP role
        DeltaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        assert config.num_labels is not None  # transformers counts 2 where nothing is said
        multiplier = config.width_ratio ** TABLES[config.parametrization][Role.READOUT].multiplier
        self.model = DeltaModel(config, is_part=True)
        self.score = Score(config, config.num_labels, multiplier)
        self.tags = {"score.weight": Tag(Role.READOUT)}
        self.post_init()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, multiplier: float
) -> Tensor:
    """Returns `backends.linear_cross_entropy` of the logits multiplier W h, without keeping all of
    them.

        hidden      [N, d]
        weight      [vocabulary, d]
        targets     [N] int64
        returns     [] float32 (float64 for float64), nats; 0 if every target is ignored

    Products are in the dtype of `hidden`, or in autocast's under autocast; everything else is in
    float32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        hidden = hidden * multiplier
    return cross_entropy_of_readout(hidden, weight, targets, ignore_index=IGNORED)
