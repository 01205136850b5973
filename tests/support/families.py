"""Makes small models of transformers' delta-rule families, and tokens for them."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
    "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8,
}  # fmt: skip
# latent attention, and Kimi Delta Attention beside it
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "num_key_value_heads": 2,
}
# family -> configuration, model, settings besides SIZES
FAMILIES = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {"head_dim": 16, "intermediate_size": 48, "mlp_only_layers": [0], **EXPERTS},
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {"head_dim": 16, "intermediate_size": 48},
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {"head_dim": 16, **EXPERTS}),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {"head_dim": 16, **EXPERTS, **INDEXER},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {"intermediate_size": 48}),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**LATENT, "qk_rope_head_dim": 8, "num_local_experts": 3},
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {**LATENT, "qk_rope_head_dim": 8, "num_local_experts": 3, "head_dim": 16},
    ),
    "glm5_next": (
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        {
            **LATENT,
            "qk_rope_head_dim": 0,
            "n_routed_experts": 3,
            "hc_mult": 2,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk": 64,
            "index_kpool": 4,
            "indexer_types": ["full"] * 2,
        },
    ),
}

# what surrounds a language model in released folders: a vision tower, and marks of images
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
MARKS = {
    "image_token_id": 58,
    "video_token_id": 59,
    "vision_start_token_id": 56,
    "vision_end_token_id": 57,
}
GLM_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "projection_intermediate_size": 16,
}  # fmt: skip
INDEXED = "glm5_next"  # its attention is told of no packed sequences
KIMI = ("kimi_linear", "bailing_hybrid", INDEXED)
GATED = [name for name in FAMILIES if name not in KIMI]
WHOLE = {
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
}


def make(family, **changes):
    configuration, model, settings = FAMILIES[family]
    if not hasattr(transformers, model):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    settings = {**SIZES, **settings, **changes}
    if family == INDEXED:  # there is no language model alone
        settings = {"text_config": settings, "vision_config": GLM_VISION}
    config = getattr(transformers, configuration)(**settings)
    config._experts_implementation = "eager"  # grouped products have no float64
    made = getattr(transformers, model)(config).eval()
    for p in made.parameters():
        if p.dim() > 1:  # with an initial std of 0.02, linear attention hardly changes the logits
            torch.nn.init.normal_(p, std=0.3)
    return made


def stack(model):
    """Returns the module that has the layers."""
    return getattr(model.model, "language_model", model.model)


def tokens(*shape):
    return torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(1))


def write_whole(folder, family, **changes):
    """Writes a bfloat16 folder as the released ones are laid out, in shards, with MTP layers."""
    torch.manual_seed(0)
    if family in WHOLE:
        configuration, name = (getattr(transformers, name) for name in WHOLE[family])
        text = {
            **SIZES,
            **FAMILIES[family][2],
            "dtype": "bfloat16",
            "mtp_num_hidden_layers": 1,
            **changes,
        }
        model = name(configuration(text_config=text, vision_config=VISION, **MARKS))
    else:
        model = make(family, **changes)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    mtp = {"mtp.fc.weight": (32, 64), "mtp.layers.0.mlp.experts.1.gate_proj.weight": (24, 32)}
    save_file(
        {name: torch.randn(*shape).bfloat16() for name, shape in mtp.items()},
        folder / "model-mtp.safetensors",
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(mtp, "model-mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "video_preprocessor_config.json").write_text("{}")
