"""What transformers expects of every model: loading, saving,
options of the configuration, labels.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from delta_trn.models.parameters import scaled_parameters
from tests.support.tiny_models import VARIANTS, assert_same, model, tokens

variants = pytest.mark.parametrize("variant", VARIANTS)


class TestGeneration:
    @pytest.mark.parametrize(
        "options",
        [{"prompt_lookup_num_tokens": 2}, {"assistant_model": model(dtype=torch.float32)}],
        ids=str,
    )
    def test_assisted_decoding_is_refused_by_name(self, options):
        """It would have to take tokens back, and a state cannot."""
        m = model(dtype=torch.float32)
        with pytest.raises(
            ValueError, match="assisted generation is not supported with stateful models"
        ):
            m.generate(tokens(1, 6), max_new_tokens=4, **options)

    def test_continuous_batching_is_refused_by_name(self):
        """It keeps pages of keys and values."""
        m = model(dtype=torch.float32)
        with pytest.raises(NotImplementedError, match="generate_batch keeps pages"):
            m.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=2)

    def test_a_cache_is_refused_under_gradient_checkpointing(self):
        m, ids = model(dtype=torch.float32).train(), tokens(1, 5)
        m(ids, use_cache=True)
        m.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="which a cache cannot follow"):
            m(ids, use_cache=True)
        m.gradient_checkpointing_disable()
        m(ids, use_cache=True)


class TestOutputs:
    def test_a_trainer_gathers_no_cache_for_metrics(self, tmp_path):
        m, ids, seen = model(dtype=torch.float32), tokens(4, 6), []
        rows = [{"input_ids": row, "labels": row} for row in ids]
        settings = TrainingArguments(tmp_path, use_cpu=True, report_to=[], use_cache=True)
        trainer = Trainer(
            m,
            settings,
            eval_dataset=rows,  # type: ignore[arg-type]
            compute_metrics=lambda found: seen.append(found.predictions) or {},
        )
        trainer.evaluate()
        assert seen[0].shape == (4, 6, m.config.vocab_size)

    def test_the_configuration_says_what_forward_returns(self):
        m, ids = model(output_hidden_states=True, return_dict=False), tokens(2, 5)
        logits, streams = m(ids, use_cache=False)
        assert len(streams) == m.config.num_hidden_layers + 1
        output = m(ids, use_cache=False, return_dict=True, output_hidden_states=False)
        assert torch.equal(output.logits, logits) and output.hidden_states is None

    @variants
    def test_labels_that_are_shifted_already_have_the_same_loss(self, variant):
        """Context parallelism shifts before it divides a sequence."""
        m, ids, labels = model(**VARIANTS[variant]), tokens(2, 9), tokens(2, 9, seed=2)
        shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], dim=1)
        expected = m(ids, labels=labels).loss
        assert_same(m(ids, shift_labels=shifted).loss, expected)
        assert torch.equal(
            m(ids, labels=ids, shift_labels=shifted).loss, m(ids, shift_labels=shifted).loss
        )
        assert abs(m(ids, shift_labels=labels).loss - expected) > 1e-3


class TestLoading:
    def test_only_a_folder_with_code_beside_it_names_code(self, tmp_path):
        """TRL reads auto_map of every model whose class is not in transformers."""
        m = model()
        assert not m.config.auto_map
        m.save_pretrained(tmp_path)
        assert "auto_map" not in (tmp_path / "config.json").read_text()
        m.config.auto_map = {"AutoModel": "code.Class"}
        m.config.save_pretrained(tmp_path)
        assert type(m.config).from_pretrained(tmp_path).auto_map == m.config.auto_map

    @variants
    def test_a_model_in_shards_loads_where_it_is_told_to_and_in_the_dtype_that_it_was_saved_in(
        self, variant, tmp_path
    ):
        m = model(dtype=torch.bfloat16, **VARIANTS[variant])
        m.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype="auto", device_map="auto"
        ).eval()
        assert loaded.dtype == torch.bfloat16
        rates = [p for name, p in loaded.named_parameters() if name.endswith(("A_log", "dt_bias"))]
        assert rates and all(p.dtype == torch.float32 for p in rates)
        for name, parameter in m.named_parameters():
            assert torch.equal(loaded.get_parameter(name).to(parameter.dtype), parameter), name
        ids = tokens(2, 5)
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(loaded.generate(ids, **options), m.generate(ids, **options))

    @pytest.mark.parametrize("tied", [True, False])
    def test_weights_that_a_checkpoint_lacks_are_named_and_drawn(self, tied, tmp_path):
        """A tied matrix was neither: it stayed on the meta device."""
        model(dtype=torch.float32, tie_word_embeddings=tied).save_pretrained(tmp_path)
        before = torch.get_rng_state()
        AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(before, torch.get_rng_state()), "loading draws no random numbers"
        weights = load_file(tmp_path / "model.safetensors")
        del weights["model.embed.weight"], weights["model.blocks.1.mixer.A_log"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert info["missing_keys"] >= {"model.embed.weight", "model.blocks.1.mixer.A_log"}
        A = loaded.model.blocks[1].mixer.A_log.exp()
        assert (A > 0).all() and (A < 16).all() and len(A.unique()) == len(A)
        assert 0.3 < loaded.model.embed.weight.detach().std() < 0.7  # initializer_range 0.5
        assert (loaded.lm_head.weight is loaded.model.embed.weight) == tied

    def test_rows_of_a_resized_vocabulary_are_kept_when_a_larger_model_is_initialized(self):
        m, ids = model(dtype=torch.float32, tie_word_embeddings=False), tokens(1, 4)
        logits = m(ids).logits
        m.resize_token_embeddings(70)
        assert_same(m(ids).logits[..., :61], logits)
        # they keep their tags
        rows = scaled_parameters(m, optimizer="adamw", lr=1.0, weight_decay=0.0)
        assert {row.shape for row in rows if row.role.name in ("EMBEDDING", "READOUT")} == {
            (70, 32)
        }
        before = [m.model.embed.weight.clone(), m.lm_head.weight.clone()]
        m.post_init()
        assert torch.equal(m.model.embed.weight, before[0]) and torch.equal(
            m.lm_head.weight, before[1]
        )
