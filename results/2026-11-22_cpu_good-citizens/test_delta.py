"""Puts our models under transformers' common tests of models; README.md says where it has to lie."""

import unittest

import torch
from transformers.models.auto import modeling_auto

from delta_trn import DeltaConfig, DeltaForCausalLM, DeltaForSequenceClassification, DeltaModel

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor

# these names tell the tests which class has a head, and which
modeling_auto.MODEL_MAPPING_NAMES["delta_trn"] = "DeltaModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["delta_trn"] = "DeltaForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["delta_trn"] = "DeltaForSequenceClassification"


class Tester:
    """Makes a model of two layers and its inputs."""

    batch_size, seq_length, vocab_size, hidden_size, num_hidden_layers = 3, 7, 99, 32, 2
    num_attention_heads, num_labels, is_training = 4, 3, True

    def __init__(self, attention_layers):
        self.attention_layers = attention_layers

    def get_config(self):
        sizes = {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "base_width": 16,
        }
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3}
        more = {"intermediate_multiple": 16, "initializer_range": 0.1}
        return DeltaConfig(**sizes, **special, **more, attention_layers=self.attention_layers)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 3) + 3
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class HybridTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    """One layer of Gated DeltaNet and one of attention, whose weights are not given out."""

    all_model_classes = (DeltaModel, DeltaForCausalLM, DeltaForSequenceClassification)
    has_attentions = False
    attention_layers = (1,)

    def setUp(self):
        self.model_tester = Tester(self.attention_layers)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, False)
        if return_labels and model_class is DeltaForCausalLM:
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
        if return_labels and model_class is DeltaForSequenceClassification:
            inputs["labels"] = torch.zeros(len(inputs["input_ids"]), dtype=torch.long)
        return inputs


class PureTest(HybridTest):
    """Two layers of Gated DeltaNet."""

    attention_layers = ()
