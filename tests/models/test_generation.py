"""Checks that generate() and its cache choose the tokens that the uncached forward chooses."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, TextStreamer

from delta_trn.models import (
    DeltaCache,
    DeltaConfig,
    DeltaForCausalLM,
    DeltaForSequenceClassification,
    DeltaModel,
)
from tests.support.tiny_models import VARIANTS, VOCABULARY, assert_same, config, model, tokens

variants = pytest.mark.parametrize("variant", VARIANTS)
GREEDY = {"do_sample": False, "max_new_tokens": 12}


def greedy_by_hand(m: DeltaForCausalLM, ids: Tensor, steps: int) -> Tensor:
    """Generates by taking the largest logit of a whole forward at each step, without a cache."""
    with torch.no_grad():
        for _ in range(steps):
            ids = torch.cat([ids, m(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@variants
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 63, 64, 65])
def test_greedy_generation_is_the_choice_of_the_uncached_forward(variant: str, T: int):
    """Tries prompts shorter than the convolution, and lengths on both sides of a chunk's end."""
    m, ids = model(**VARIANTS[variant]), tokens(2, T)
    output = m.generate(ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(output.sequences, greedy_by_hand(m, ids, 12))
    with torch.no_grad():
        uncached = m(output.sequences, use_cache=False).logits[:, T - 1 : -1]
    assert_same(torch.stack(output.logits, dim=1), uncached.float())  # generate() casts logits to float32
    assert isinstance(output.past_key_values, DeltaCache)


@variants
def test_greedy_generation_in_float32_is_the_choice_of_the_uncached_forward(variant: str):
    m, ids = model(dtype=torch.float32, **VARIANTS[variant]), tokens(2, 7)
    output = m.generate(ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        uncached = m(output.sequences, use_cache=False).logits[:, 6:-1]
    assert_same(torch.stack(output.logits, dim=1), uncached, factor=10)  # 19 tokens of a recurrence


@variants
def test_generation_without_a_cache_equals_generation_with_one(variant: str):
    m, ids = model(**VARIANTS[variant]), tokens(2, 5)
    assert torch.equal(m.generate(ids, **GREEDY, use_cache=False), m.generate(ids, **GREEDY))


def test_a_stale_cache_changes_generation():
    """A step from a state that is one token old gives other logits."""
    m, ids = model(), tokens(2, 9)
    with torch.no_grad():
        expected = m(ids, use_cache=False).logits[:, -1]
        stale = m(ids[:, :7], use_cache=True).past_key_values
        logits = m(ids[:, 8:], past_key_values=stale).logits[:, -1]
    with pytest.raises(AssertionError, match="above"):
        assert_same(logits, expected)


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
def test_rows_that_end_early_do_not_disturb_the_others(variant: str):
    m, ids = model(**VARIANTS[variant]), tokens(6, 4)
    free = m.generate(ids, **GREEDY)[:, 4:]
    end = int(free[0, 3])
    ended = m.generate(ids, **GREEDY, eos_token_id=end, pad_token_id=0)[:, 4:]
    for a, b in zip(ended, free, strict=True):
        ends = (b == end).nonzero()
        stop = int(ends[0]) + 1 if len(ends) else 12
        assert torch.equal(a[:stop], b[:stop]) and not a[stop:].any()


@variants
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_beam_search_reorders_the_cache(variant: str, options: dict[str, Any]):
    m, ids = model(**VARIANTS[variant]), tokens(2, 5)
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    cached, uncached = (
        m.generate(ids, attention_mask=mask, **GREEDY, **options, use_cache=use) for use in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert not torch.equal(cached[: len(ids)], m.generate(ids, attention_mask=mask, **GREEDY)), (
        "beams never crossed"
    )


@variants
def test_sampling_draws_the_same_with_and_without_a_cache(variant: str):
    m, ids = model(**VARIANTS[variant]), tokens(2, 5)
    options = {"do_sample": True, "max_new_tokens": 12, "top_k": 20, "top_p": 0.9, "temperature": 0.7}
    options |= {"repetition_penalty": 1.2, "num_return_sequences": 2}
    samples = []
    for use in (True, False):
        torch.manual_seed(3)
        samples.append(m.generate(ids, **options, use_cache=use))
    assert torch.equal(*samples) and samples[0].shape == (4, 17)


@variants
def test_a_prompt_read_in_pieces_generates_the_same(variant: str):
    m, ids = model(**VARIANTS[variant]), tokens(2, 11)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    whole = m.generate(ids, attention_mask=mask, **GREEDY)
    pieces = m.generate(
        ids,
        attention_mask=mask,
        **GREEDY,
        prefill_chunk_size=3,
        past_key_values=DeltaCache(m.config.num_hidden_layers),
    )
    assert torch.equal(pieces, whole)


@variants
def test_a_conversation_continues_from_its_cache(variant: str):
    m, ids = model(**VARIANTS[variant]), tokens(1, 5)
    first = m.generate(ids, **GREEDY, return_dict_in_generate=True)
    more = torch.cat([first.sequences, tokens(1, 3, seed=9)], dim=1)
    cache = copy.deepcopy(first.past_key_values)
    assert cache.get_seq_length() == 16  # the last token was drawn but not read
    assert torch.equal(m.generate(more, past_key_values=cache, **GREEDY), greedy_by_hand(m, more, 12))
    assert first.past_key_values.get_seq_length() == 16, "generation changed the original of a copied cache"


def test_embeddings_as_prompt_generate_what_their_ids_do():
    m, ids = model(), tokens(2, 5)
    output = m.generate(inputs_embeds=m.model.embed(ids), **GREEDY)
    assert torch.equal(output, m.generate(ids, **GREEDY)[:, 5:])


def test_streamer_receives_every_token():
    m, ids, streamed = model(), tokens(1, 5), []

    class Collect(TextStreamer):
        def __init__(self):
            pass

        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            streamed.append(None)

    output = m.generate(ids, **GREEDY, streamer=Collect())
    assert streamed == [*output[0].tolist(), None]


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
            sizes.append(
                sum(
                    x.untyped_storage().nbytes()
                    for layer in cache.memory
                    for x in vars(layer).values()
                    if x is not None
                )
            )
        assert sizes[0] == sizes[1]

    def test_states_keep_full_precision_in_a_bfloat16_model(self):
        cache = model(dtype=torch.bfloat16)(tokens(1, 5), use_cache=True).past_key_values
        assert {layer.state.dtype for layer in cache.memory} == {torch.float32}

    def test_cropping_a_cache_is_refused(self):
        with pytest.raises(NotImplementedError, match="cannot forget its last tokens; keep a copy"):
            DeltaCache(2).crop(-1)

    @pytest.mark.parametrize("name", ["cache", "cache_params"])
    def test_a_cache_is_taken_under_each_name_that_transformers_gives_it(self, name: str):
        """transformers 5.24 renamed past_key_values to cache."""
        m, _, cache = self.fill_cache("hybrid")
        ids = tokens(3, 2, seed=5)
        with torch.no_grad():
            expected = m(ids, past_key_values=copy.deepcopy(cache), use_cache=True).logits
            assert torch.equal(m(ids, **{name: copy.deepcopy(cache)}, use_cache=True).logits, expected)
            backbone = DeltaModel(m.config).to(torch.float64).eval()
            labels = config(num_labels=3, pad_token_id=0, **VARIANTS["hybrid"])
            classifier = DeltaForSequenceClassification(labels).to(torch.float64).eval()
            for other in (backbone, classifier):
                moved = copy.deepcopy(cache)
                other(ids, **{name: moved}, use_cache=True)
                assert moved.get_seq_length() == 11, f"{type(other).__name__} left the cache as it was"

    def test_the_cache_says_that_it_knows_its_length(self):
        """From 5.24 on, generate() reads all tokens again if all layers of a cache call themselves linear."""
        assert not all(DeltaCache(2).is_linear)

    def test_two_caches_are_refused(self):
        with pytest.raises(ValueError, match="two names of one argument: give one of them"):
            model()(tokens(1, 2), past_key_values=DeltaCache(3), cache=DeltaCache(3))

    def test_another_models_cache_is_refused(self):
        with pytest.raises(ValueError, match="past_key_values is a DynamicCache; pass a DeltaCache"):
            model()(tokens(1, 2), past_key_values=DynamicCache())

    def test_training_makes_no_cache_unless_asked(self):
        m = model()
        assert m(tokens(1, 2)).past_key_values is not None
        assert m.train()(tokens(1, 2)).past_key_values is None
        assert model(use_cache=False)(tokens(1, 2)).past_key_values is None


class TestSaving:
    def test_auto_classes_load_what_was_saved(self, tmp_path):
        for variant, changes in VARIANTS.items():
            m = model(dtype=torch.float32, **changes)
            m.generation_config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
            folder = tmp_path / variant
            m.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert type(loaded) is DeltaForCausalLM and isinstance(loaded.config, DeltaConfig)
            for (name, a), b in zip(m.state_dict().items(), loaded.state_dict().values(), strict=True):
                assert torch.equal(a, b), name
            tied = loaded.lm_head.weight is loaded.model.embed.weight
            assert tied == (variant != "untied")
            ids = tokens(1, 4)
            assert torch.equal(loaded.generate(ids), m.generate(ids))

    def test_loading_draws_no_random_numbers_and_fills_what_is_missing(self, tmp_path):
        from safetensors.torch import load_file, save_file

        m = model(dtype=torch.float32)
        m.save_pretrained(tmp_path)
        before = torch.get_rng_state()
        DeltaForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(before, torch.get_rng_state())
        path = tmp_path / "model.safetensors"
        weights = load_file(path)
        del weights["model.blocks.1.mixer.A_log"]
        save_file(weights, path, metadata={"format": "pt"})
        loaded = DeltaForCausalLM.from_pretrained(tmp_path)
        A = loaded.model.blocks[1].mixer.A_log.exp()
        assert (A > 0).all() and (A < 16).all() and len(A.unique()) == len(A)
        assert torch.equal(loaded.model.blocks[1].mixer.dt_bias, m.model.blocks[1].mixer.dt_bias)

    def test_resized_vocabularies_keep_their_tags(self):
        from delta_trn.models.parameters import scaled_parameters

        for tied in (True, False):
            m = model(dtype=torch.float32, tie_word_embeddings=tied)
            ids = tokens(1, 4)
            before = m(ids).logits
            m.resize_token_embeddings(VOCABULARY + 3)
            assert_same(m(ids).logits[..., :VOCABULARY], before)
            rows = scaled_parameters(m, optimizer="adamw", lr=1.0, weight_decay=0.0)
            assert {row.shape for row in rows if row.role.name in ("EMBEDDING", "READOUT")} == {
                (VOCABULARY + 3, 32)
            }
