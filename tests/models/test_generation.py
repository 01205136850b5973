"""Checks that generate() and its cache choose the tokens that the uncached forward chooses."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from delta_trn.models import (
    DeltaCache,
    DeltaForCausalLM,
    DeltaForSequenceClassification,
    DeltaModel,
)
from tests.support.tiny_models import VARIANTS, assert_same, config, model, tokens

variants = pytest.mark.parametrize("variant", VARIANTS)
GREEDY = {"do_sample": False, "max_new_tokens": 12}


def greedy_by_hand(m: DeltaForCausalLM, ids: Tensor, steps: int) -> Tensor:
    """Generates by taking the largest logit of a whole forward at each step, without a cache."""
    with torch.no_grad():
        for _ in range(steps):
            ids = torch.cat([ids, m(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@variants
@pytest.mark.parametrize("T", [1, 3, 7, 64])
def test_greedy_generation_is_the_choice_of_the_uncached_forward(variant: str, T: int):
    """Tries prompts shorter than the convolution, a chunk's end,
    and at T = 7 the kernels of float32.
    """
    dtype = torch.float32 if T == 7 else torch.float64
    m, ids = model(dtype=dtype, **VARIANTS[variant]), tokens(2, T)
    output = m.generate(ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(output.sequences, greedy_by_hand(m, ids, 12))
    with torch.no_grad():
        uncached = m(output.sequences, use_cache=False).logits[:, T - 1 : -1]
    # generate() casts logits to float32; 19 tokens of a recurrence add up in it
    assert_same(torch.stack(output.logits, dim=1), uncached.float(), factor=10 if T == 7 else 1)
    assert isinstance(output.past_key_values, DeltaCache)


@variants
def test_a_left_padded_batch_generates_what_its_rows_do_alone(variant: str):
    m = model(**VARIANTS[variant])
    rows = [tokens(1, T, seed=T) for T in (1, 3, 8, 5)]
    ids, mask = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 8 - row.shape[1] :], mask[i, 8 - row.shape[1] :] = row[0], 1
    batch = m.generate(ids, attention_mask=mask, **GREEDY)
    for i, row in enumerate(rows):
        assert torch.equal(batch[i, 8:], m.generate(row, **GREEDY)[0, row.shape[1] :]), f"row {i}"


@variants
def test_beam_search_reorders_the_cache(variant: str):
    m, ids, options = (
        model(**VARIANTS[variant]),
        tokens(2, 5),
        {"num_beams": 4, "num_return_sequences": 2},
    )
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    cached, uncached = (
        m.generate(ids, attention_mask=mask, **GREEDY, **options, use_cache=use)
        for use in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert not torch.equal(cached[: len(ids)], m.generate(ids, attention_mask=mask, **GREEDY)), (
        "beams never crossed"
    )


@variants
def test_a_prompt_read_in_pieces_generates_the_same(variant: str):
    m, ids = model(**VARIANTS[variant]), tokens(2, 11)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    whole = m.generate(ids, attention_mask=mask, **GREEDY)
    options = {"prefill_chunk_size": 3, "past_key_values": DeltaCache(m.config.num_hidden_layers)}
    pieces = m.generate(ids, attention_mask=mask, **GREEDY, **options)
    assert torch.equal(pieces, whole)


@variants
def test_a_conversation_continues_from_its_cache(variant: str):
    m, ids = model(**VARIANTS[variant]), tokens(1, 5)
    first = m.generate(ids, **GREEDY, return_dict_in_generate=True)
    more = torch.cat([first.sequences, tokens(1, 3, seed=9)], dim=1)
    cache = copy.deepcopy(first.past_key_values)
    assert cache.get_seq_length() == 16  # the last token was drawn but not read
    assert torch.equal(
        m.generate(more, past_key_values=cache, **GREEDY), greedy_by_hand(m, more, 12)
    )
    assert first.past_key_values.get_seq_length() == 16, (
        "generation changed the original of a copied cache"
    )


def test_embeddings_as_prompt_generate_what_their_ids_do():
    m, ids = model(), tokens(2, 5)
    output = m.generate(inputs_embeds=m.model.embed(ids), **GREEDY)
    assert torch.equal(output, m.generate(ids, **GREEDY)[:, 5:])


class TestCache:
    def fill_cache(self, variant: str, B: int = 3) -> tuple[DeltaForCausalLM, Tensor, DeltaCache]:
        m, ids = model(**VARIANTS[variant]), tokens(B, 9)
        mask = torch.ones(B, 9, dtype=torch.long)
        mask[0, :4] = 0
        with torch.no_grad():
            return m, ids, m(ids, attention_mask=mask, use_cache=True).past_key_values

    @variants
    def test_reordering_moves_whole_rows_of_the_cache(self, variant: str):
        m, _, cache = self.fill_cache(variant)
        next_ids = tokens(3, 1, seed=5)
        with torch.no_grad():
            expected = m(next_ids, past_key_values=copy.deepcopy(cache)).logits
            moved = copy.deepcopy(cache)
            moved.reorder_cache(torch.tensor([2, 2, 0]))
            assert_same(m(next_ids[[2, 2, 0]], past_key_values=moved).logits, expected[[2, 2, 0]])
            repeated = copy.deepcopy(cache)
            repeated.batch_repeat_interleave(2)
            assert_same(
                m(next_ids.repeat_interleave(2, 0), past_key_values=repeated).logits,
                expected.repeat_interleave(2, 0),
            )

    @variants
    def test_a_reset_cache_equals_a_new_one(self, variant: str):
        m, ids, cache = self.fill_cache(variant)
        cache.reset()
        with torch.no_grad():
            assert torch.equal(m(ids, past_key_values=cache).logits, m(ids, use_cache=True).logits)
        assert cache.get_seq_length() == 9

    def test_the_cache_does_not_grow_with_the_text(self):
        sizes = []
        m = model()
        for T in (3, 60):
            cache = m(tokens(1, T), use_cache=True).past_key_values
            slots = [x for layer in cache.memory for x in vars(layer).values() if x is not None]
            sizes.append(sum(x.untyped_storage().nbytes() for x in slots))
        assert sizes[0] == sizes[1]

    def test_states_keep_full_precision_in_a_bfloat16_model(self):
        cache = model(dtype=torch.bfloat16)(tokens(1, 5), use_cache=True).past_key_values
        assert {layer.state.dtype for layer in cache.memory} == {torch.float32}

    def test_what_a_cache_cannot_be_is_refused(self):
        with pytest.raises(NotImplementedError, match="cannot forget its last tokens; keep a copy"):
            DeltaCache(2).crop(-1)
        with pytest.raises(ValueError, match="two names of one argument: give one of them"):
            model()(tokens(1, 2), past_key_values=DeltaCache(3), cache=DeltaCache(3))
        with pytest.raises(
            ValueError, match="past_key_values is a DynamicCache; pass a DeltaCache"
        ):
            model()(tokens(1, 2), past_key_values=DynamicCache())

    @pytest.mark.parametrize("name", ["cache", "cache_params"])
    def test_a_cache_is_taken_under_each_name_that_transformers_gives_it(self, name: str):
        """transformers 5.24 renamed past_key_values to cache."""
        m, _, cache = self.fill_cache("hybrid")
        ids = tokens(3, 2, seed=5)
        with torch.no_grad():
            expected = m(ids, past_key_values=copy.deepcopy(cache), use_cache=True).logits
            assert torch.equal(
                m(ids, **{name: copy.deepcopy(cache)}, use_cache=True).logits, expected
            )
            backbone = DeltaModel(m.config).to(torch.float64).eval()
            labels = config(num_labels=3, pad_token_id=0, **VARIANTS["hybrid"])
            classifier = DeltaForSequenceClassification(labels).to(torch.float64).eval()
            for other in (backbone, classifier):
                moved = copy.deepcopy(cache)
                other(ids, **{name: moved}, use_cache=True)
                assert moved.get_seq_length() == 11, (
                    f"{type(other).__name__} left the cache as it was"
                )

    def test_the_cache_says_that_it_knows_its_length(self):
        """From 5.24 on, generate() reads all tokens again if all layers
        of a cache call themselves linear.
        """
        assert not all(DeltaCache(2).is_linear)

    def test_training_makes_no_cache_unless_asked(self):
        m = model()
        assert m(tokens(1, 2)).past_key_values is not None
        assert m.train()(tokens(1, 2)).past_key_values is None
        assert model(use_cache=False)(tokens(1, 2)).past_key_values is None
