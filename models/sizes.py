"""Models of the papers by name: arguments of DeltaConfig.

>>> sorted(named_sizes["gdn-57m"].items())
[('hidden_size', 512)]
"""

from typing import Any

# "Deep Delta Learning": attention with heads of 128, RoPE and QK-RMSNorm in every layer; 50,304 tied rows
_SMALL = {"hidden_size": 768, "base_width": 768, "num_hidden_layers": 12, "num_heads": 6}
_MEDIUM = {"hidden_size": 1024, "base_width": 1024, "num_hidden_layers": 24, "num_heads": 8}
_VECTOR = {"residual": "ddl"}
_MATRIX = {"residual": "ddl", "ddl_value_channels": 4}
_CONV = {"input_embed_shortconv_kernel_size": 4}
_VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {},
    "ddl-vdim1": _VECTOR,
    "ddl-tc": {**_MATRIX, "ddl_compressor": "token"},
    "ddl-tc-ec": {**_MATRIX, "ddl_compressor": "token", **_CONV},
    "ddl-cc": {**_MATRIX, "ddl_compressor": "channel"},
    "ddl-cc-ec": {**_MATRIX, "ddl_compressor": "channel", **_CONV},
    "write-only": {**_MATRIX, "residual": "write_only", "ddl_compressor": "channel"},
}


def _transformer(sizes: dict[str, int]) -> dict[str, Any]:
    return {
        **sizes,
        "attention_layers": tuple(range(sizes["num_hidden_layers"])),
        "head_dim_k": 128,
        "expand_v": 1.0,
        "intermediate_multiple": 1,
        "use_qk_rmsnorm": True,
        "depth_scaled_init": True,
        "rms_norm_eps": 1e-5,
        # f / sqrt(d), f = 0.5
        "initializer_range": 0.5 * sizes["hidden_size"] ** -0.5,
    }


named_sizes: dict[str, dict[str, Any]] = {
    # arXiv:2606.04048: L = 8, H = 6 and 50,304 tied rows; it counts all parameters, the embedding too
    "gdn-21m": {"hidden_size": 256},
    "gdn-57m": {"hidden_size": 512},
    "gdn-105m": {"hidden_size": 768},
    "gdn-171m": {"hidden_size": 1024},
    "gdn-342m": {"hidden_size": 1536},
    **{
        f"{variant}-{size}": {**_transformer(sizes), **changes}
        for size, sizes in (("small", _SMALL), ("medium", _MEDIUM))
        for variant, changes in _VARIANTS.items()
    },
    # Deep Delta Learning LM: learned positions, LayerNorm, GELU
    "ddl-lm": {
        "vocab_size": 50257,
        "hidden_size": 384,
        "base_width": 384,
        "num_hidden_layers": 8,
        "num_heads": 8,
        "attention_layers": tuple(range(8)),
        "head_dim_k": 48,
        "expand_v": 1.0,
        "intermediate_size": 4 * 384,
        "positions": "learned",
        "max_position_embeddings": 512,
        "norm": "layer",
        "mlp": "gelu",
        "rms_norm_eps": 1e-5,
        "dropout": 0.1,
        "residual": "ddl_lm",
        "ddl_beta_init": 0.23840584404423526,  # 2 sigmoid(-2)
    },
}
