"""Backbone and classifier of sequences: what they load, how padding counts,
and whether they learn.
"""

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from delta_trn import DeltaForSequenceClassification, DeltaModel
from delta_trn.models.parameters import scaled_parameters
from delta_trn.train.data.tokenizer import plain_bytes
from tests.support.tiny_models import VARIANTS, assert_same, config, model, tokens

PAD = 60
variants = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(params=VARIANTS)
def causal(request, tmp_path):
    """Returns a language model and the folder that it is saved in."""
    m = model(dtype=torch.float32, **VARIANTS[request.param])
    m.save_pretrained(tmp_path)
    return m, tmp_path


def load(auto, folder, **options):
    """Loads a model in float64. Returns it, and the names of weights
    that were not in the folder.
    """
    m, info = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float64, **options)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    return m.eval(), set(info["missing_keys"])


class TestBackbone:
    def test_its_output_is_what_the_head_reads(self, causal):
        m, folder = causal
        backbone, missing = load(AutoModel, folder)
        assert type(backbone) is DeltaModel and not missing
        ids, m = tokens(2, 9), m.double()
        with torch.no_grad():
            hidden = backbone(ids).last_hidden_state
            assert_same(m.config.logit_scale * m.lm_head(hidden), m(ids).logits)
            assert torch.equal(backbone(ids, return_dict=False)[0], hidden)
            streams = backbone(ids, output_hidden_states=True).hidden_states
        assert len(streams) == m.config.num_hidden_layers + 1

    def test_a_language_model_loads_from_it(self, causal):
        m, folder = causal
        load(AutoModel, folder)[0].save_pretrained(folder / "backbone")
        again, missing = load(AutoModelForCausalLM, folder / "backbone")
        assert missing == (set() if m.config.tie_word_embeddings else {"lm_head.weight"})
        assert torch.equal(
            again.model.blocks[0].mixer.q_proj.weight.float(), m.model.blocks[0].mixer.q_proj.weight
        )


class TestScores:
    def rows(self):
        """Returns ids [3, 8] padded on both sides by turns, and the rows without their padding."""
        rows = [tokens(1, T, seed=T) % PAD for T in (8, 3, 5)]
        left, right = torch.full((3, 8), PAD), torch.full((3, 8), PAD)
        for i, row in enumerate(rows):
            left[i, 8 - row.shape[1] :], right[i, : row.shape[1]] = row[0], row[0]
        return rows, {"left": left, "right": right}

    def test_it_loads_from_a_language_model_and_padding_changes_no_score(self, causal):
        m, folder = causal
        options = {"num_labels": 3, "pad_token_id": PAD}
        classifier, missing = load(AutoModelForSequenceClassification, folder, **options)
        assert type(classifier) is DeltaForSequenceClassification and missing == {"score.weight"}
        assert torch.equal(classifier.model.embed.weight.float(), m.model.embed.weight)
        rows, padded = self.rows()
        with torch.no_grad():
            alone = torch.cat([classifier(row).logits for row in rows])
            last = torch.stack([classifier.model(row).last_hidden_state[0, -1] for row in rows])
            # width 32, base width 16: m = 2
            assert_same(alone, last @ classifier.score.weight.T / 2)
            for ids in padded.values():
                assert_same(classifier(ids, attention_mask=(ids != PAD).long()).logits, alone)
            with pytest.raises(AssertionError, match="above"):
                # without a mask, padding is text
                assert_same(classifier(padded["left"]).logits, alone)

    def test_a_batch_without_a_token_for_padding_is_refused(self):
        classifier = DeltaForSequenceClassification(config())
        with pytest.raises(ValueError, match="no padding token"):
            classifier(tokens(2, 4))

    def test_a_saved_classifier_loads_again_and_gives_its_backbone_and_a_language_model(
        self, tmp_path
    ):
        classifier = (
            DeltaForSequenceClassification(config(num_labels=3, pad_token_id=PAD)).double().eval()
        )
        classifier.save_pretrained(tmp_path)
        again, missing = load(AutoModelForSequenceClassification, tmp_path)
        ids = tokens(2, 5)
        assert not missing
        assert_same(again(ids).logits, classifier(ids).logits)
        assert torch.equal(again.score.weight, classifier.score.weight)
        for auto in (AutoModel, AutoModelForCausalLM):
            part, missing = load(auto, tmp_path)
            assert not missing and torch.equal(
                part.get_input_embeddings().weight, classifier.model.embed.weight
            )

    def test_its_readout_has_a_role_and_is_drawn_from_the_seed(self):
        def make():
            torch.manual_seed(0)
            return DeltaForSequenceClassification(config(num_labels=3))

        first, second = make(), make()
        assert (
            torch.equal(first.score.weight, second.score.weight) and first.score.weight.std() > 0.1
        )
        rows = scaled_parameters(first, optimizer="adamw", lr=1.0, weight_decay=0.0)
        assert {row.name: row.role.name for row in rows}["score.weight"] == "READOUT"


def test_trainer_teaches_a_classifier_which_letter_a_text_begins_with(tmp_path):
    """The first letter decides the label, and the score is read at the end:
    the state has to carry it.
    """
    tokenizer = plain_bytes()
    tokenizer.save(tmp_path)
    wrapped = PreTrainedTokenizerFast.from_pretrained(tmp_path, padding_side="right")
    generator = torch.Generator().manual_seed(0)

    def make_rows(count):
        rows = []
        for _ in range(count):
            length = int(torch.randint(3, 9, (), generator=generator))
            letters = torch.randint(ord("a"), ord("e"), (length,), generator=generator).tolist()
            text = bytes(letters).decode()
            rows.append({**wrapped(text), "labels": int(text[0] >= "c")})
        return rows

    torch.manual_seed(0)
    classifier = DeltaForSequenceClassification(
        config(vocab_size=320, num_labels=2, pad_token_id=tokenizer.pad, initializer_range=0.1)
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=60,
        learning_rate=5e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        data_seed=0,
        per_device_eval_batch_size=64,
        logging_steps=1,
    )
    trainer = Trainer(
        model=classifier,
        args=arguments,
        train_dataset=make_rows(1920),
        eval_dataset=make_rows(128),
        data_collator=DataCollatorWithPadding(wrapped),
        compute_metrics=lambda p: {
            "right": float((p.predictions.argmax(-1) == p.label_ids).mean())
        },
    )
    before = trainer.evaluate()["eval_right"]
    trainer.train()
    after = trainer.evaluate()["eval_right"]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert before < 0.75 and after > 0.95
    assert losses[0] < 1, "accumulated losses are added up instead of averaged"  # ln 2 at the start
