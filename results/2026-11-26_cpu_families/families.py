"""Times whole training steps of transformers' families, with patch_transformers and without, in turns.

    python results/2026-11-26_cpu_families/families.py [WIDTH LENGTH SECONDS [FAMILY ...]]

A step is forward, backward and AdamW, whose rate is 0, so that both models keep their weights and their
losses can be compared. Random models of four layers, three of them Gated DeltaNet or Kimi Delta Attention
with 128 channels in a head; one row of tokens.
"""

import contextlib
import io
import os
import sys

import torch
import transformers

from delta_trn import patch_transformers
from delta_trn.backends.bench.timing import Spread, ratios, time_in_turns

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 512,
    "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8,
}  # fmt: skip
# latent attention, beside Kimi Delta Attention
LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3, "linear_head_dim": 128,
}  # fmt: skip
# configuration, model, settings besides those of all
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", EXPERTS | INDEXER),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", LATENT | {"qk_rope_head_dim": 32}),
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        LATENT | {"qk_rope_head_dim": 32, "head_dim": 128},
    ),
    "glm5_next": (
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        LATENT
        | {
            "qk_rope_head_dim": 0,
            "hc_mult": 2,
            "index_topk": 512,
            "index_n_heads": 2,
            "index_head_dim": 64,
            "indexer_types": ["full"] * 4,
        },
    ),
}


def make(family: str, width: int) -> torch.nn.Module:
    configuration, model, settings = FAMILIES[family]
    heads = max(width // 64, 1)
    sizes = {
        "vocab_size": 4096, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": 64, "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": max(width // 128, 1), "linear_num_value_heads": 2 * max(width // 128, 1),
        "linear_num_heads": 2 * max(width // 128, 1), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    } | settings  # fmt: skip
    if family == "glm5_next":  # there is no language model alone
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
        sizes = {"text_config": sizes, "vision_config": vision | {"out_hidden_size": width}}
    config = getattr(transformers, configuration)(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, model)(config).train()


def main(width: int = 256, length: int = 1024, seconds: int = 60, *chosen: str) -> None:
    ids = torch.randint(4, 4096, (1, length))
    for family in chosen or FAMILIES:
        if not hasattr(transformers, FAMILIES[family][1]):
            print(f"{family}: transformers {transformers.__version__} does not have it")
            continue
        models = {"ours": make(family, width), "transformers": make(family, width)}
        with contextlib.redirect_stdout(io.StringIO()):
            patch_transformers(models["ours"])
        optimizers = {
            name: torch.optim.AdamW(model.parameters(), lr=0.0) for name, model in models.items()
        }
        losses = {}

        def run(
            name: str, models: dict = models, optimizers: dict = optimizers, losses: dict = losses
        ) -> None:
            optimizers[name].zero_grad()
            losses[name] = models[name](ids, labels=ids, use_cache=False).loss
            losses[name].backward()
            optimizers[name].step()

        calls = {name: (lambda name=name, run=run: run(name)) for name in models}
        times = time_in_turns(calls, torch.device("cpu"), seconds)
        assert torch.allclose(losses["ours"], losses["transformers"], rtol=2**-14, atol=0), losses
        load = f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
        print(
            f"{family}, transformers {transformers.__version__}: width {width}, length {length}, {load}"
        )
        for name, over in ratios(times, "ours").items():
            ms = Spread.of(times[name])
            print(
                f"{name:12}{1e3 * length / ms.p50:8,.0f} tokens/s  {ms} ms  {over or 1} times ours",
                flush=True,
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
