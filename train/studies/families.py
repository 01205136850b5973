"""Forward and backward of transformers' Gated DeltaNet models, with our operations and as they are."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator

import torch
import transformers

from delta_trn.backends import machine
from delta_trn.models.ecosystem import patch_transformers
from delta_trn.train.settings.errors import ConfigError

OURS, THEIRS = "ours", "transformers"
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 512,
    "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8,
}  # fmt: skip
# family -> configuration, model, settings besides those of all
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _EXPERTS),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", _EXPERTS | _INDEXER),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {}),
}


class Family:
    """A random model of one family and a batch: a contender for `studies.throughput.measure`.

        width, layers       three of four layers are Gated DeltaNet, with 128 channels in a head
        sequences, length   of the batch of random tokens

    Raises ConfigError if the installed transformers lacks the family.
    """

    precision = "float32"

    def __init__(
        self,
        name: str,
        *,
        width: int,
        layers: int,
        sequences: int,
        length: int,
        device: str,
        backend: str | None,
    ) -> None:
        configuration, model, settings = FAMILIES[name]
        if not hasattr(transformers, model):
            raise ConfigError(f"transformers {transformers.__version__} has no {name}")
        torch.manual_seed(0)
        config = getattr(transformers, configuration)(**_sizes(width, layers), **settings)
        self.model = getattr(transformers, model)(config).to(device).train()
        self.device, self.backend = torch.device(device), backend
        self.ids = torch.randint(4, config.vocab_size, (sequences, length)).to(device)
        self.tokens = self.ids.numel()

    def __call__(self, contender: str) -> float:
        """Returns the seconds of a forward and a backward pass."""
        with self._operations(contender):
            machine.synchronize(self.device)
            begun = time.perf_counter()
            self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()
            machine.synchronize(self.device)
            seconds = time.perf_counter() - begun
        self.model.zero_grad()
        return seconds

    def loss_of(self, contender: str) -> float:
        """Returns the loss of the batch."""
        with self._operations(contender), torch.no_grad():
            return float(self.model(self.ids, labels=self.ids, use_cache=False).loss)

    def peak_bytes(self, contender: str) -> int:
        """Returns the peak of one forward and backward pass, weights and gradients included."""
        machine.reset_peak_memory(self.device)
        self(contender)
        return machine.peak_memory(self.device)

    @contextlib.contextmanager
    def _operations(self, contender: str) -> Iterator[None]:
        if contender == THEIRS:
            yield
            return
        with contextlib.redirect_stdout(io.StringIO()):
            patch = patch_transformers(self.model, self.backend)
        with patch:
            yield


def _sizes(width: int, layers: int) -> dict[str, object]:
    heads = max(width // 64, 1)
    types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return {
        "vocab_size": 4096, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "layer_types": types, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64,
        "moe_intermediate_size": width, "shared_expert_intermediate_size": width,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": max(width // 128, 1), "linear_num_value_heads": 2 * max(width // 128, 1),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
