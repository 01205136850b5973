"""The configuration of a delta-rule language model, as `transformers` stores it."""

from difflib import get_close_matches
from typing import Any

from transformers import PretrainedConfig

from delta_trn.models.mup import TABLES, Role
from delta_trn.models.settings import CONFIG_NAMES, complete


class DeltaConfig(PretrainedConfig):
    """The settings of a model, checked, with every size that follows from others filled in.

    Arguments and attributes are the settings that `models.settings` declares, with their types,
    defaults and meanings. Four have the names that transformers knows: hidden_size (width),
    num_hidden_layers (layers), num_heads (heads) and num_v_heads (v_heads). Other arguments are
    transformers' own.

        >>> config = DeltaConfig(hidden_size=512, num_heads=8)
        >>> config.head_dim_k, config.head_dim_v, config.intermediate_size
        (48, 96, 1536)

    Raises ValueError, with the value and what was expected, for a setting out of range, for a name
    that is close to a setting's, and for sizes that do not go together.
    """

    model_type = "delta_trn"
    # of a model's outputs, what a Trainer does not gather for metrics: under both of its names
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        given = {
            name: arguments.pop(theirs)
            for name, theirs in CONFIG_NAMES.items()
            if theirs in arguments
        }
        _refuse_near_misses(arguments)
        if isinstance(given.get("attention_layers"), list):  # as JSON has it
            given["attention_layers"] = tuple(given["attention_layers"])
        settings = complete(given)
        for name, theirs in CONFIG_NAMES.items():
            setattr(self, theirs, getattr(settings, name))
        self.attention_layers = list(settings.attention_layers)
        self._derive()
        self._require_heads()
        self._require_mixer()
        self._require_attention()
        self._require_residual()
        tokens = {
            name: getattr(self, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        self._require_rows(tokens)
        self.auto_map: dict[
            str, str
        ] = {}  # TRL reads it of every model whose class is not in transformers
        super().__init__(**{**arguments, **tokens, "tie_word_embeddings": self.tie_word_embeddings})

    def to_dict(self) -> dict[str, Any]:
        """Returns what config.json holds: auto_map only where code lies beside it."""
        found = super().to_dict()
        return {name: value for name, value in found.items() if name != "auto_map" or value}

    @property
    def head_dim_v(self) -> int:
        """The value size V = K expand_v."""
        return round(self.head_dim_k * self.expand_v)

    @property
    def width_ratio(self) -> float:
        """The ratio m = width / base_width."""
        return self.hidden_size / self.base_width

    @property
    def logit_scale(self) -> float:
        """The factor that muP puts on the logits: they are logit_scale * lm_head(hidden)."""
        role = Role.EMBEDDING if self.tie_word_embeddings else Role.READOUT
        return self.width_ratio ** TABLES[self.parametrization][role].multiplier

    @property
    def inner_ratio(self) -> float:
        """The inner size of the MLP over the base model's;
        m where it does not follow from the width.
        """
        base = self._inner_size(self.base_width)
        follows = self.intermediate_size == self._inner_size(self.hidden_size)
        return self.intermediate_size / base if follows else self.width_ratio

    @property
    def depth_ratio(self) -> float:
        """The ratio l = layers / base_layers; 1 where depth has no rule."""
        return self.num_hidden_layers / (self.base_layers or self.num_hidden_layers)

    @property
    def mlp_output_scale(self) -> float:
        """A factor on the initial std of each MLP's output projection."""
        return self.num_hidden_layers**-0.5 if self.depth_scaled_init else 1.0

    @property
    def mixer_output_scale(self) -> float:
        """A factor on the initial std of each mixer's output projection."""
        return self.mlp_output_scale * self.mixer_output_init

    def _derive(self) -> None:
        """Fills in the settings that were left to follow from others."""
        d, H = self.hidden_size, self.num_heads
        if self.num_v_heads is None:
            self.num_v_heads = H
        if self.head_dim_k is None:
            self.head_dim_k = int(0.75 * d // H)
        if self.head_dim_k == 0:
            raise ValueError(
                f"hidden_size={d} is too narrow for num_heads={H}: K = int(0.75 d // H) is 0; give "
                f"at most {int(0.75 * d)} heads, or head_dim_k"
            )
        if self.intermediate_size is None:
            self.intermediate_size = self._inner_size(d)

    def _inner_size(self, width: int) -> int:
        multiple = self.intermediate_multiple
        return -(-int(8 * width / 3) // multiple) * multiple

    def _require_heads(self) -> None:
        H, HV, K = self.num_heads, self.num_v_heads, self.head_dim_k
        if HV % H:
            near = " or ".join(str(n) for n in (HV // H * H, HV // H * H + H) if n)
            raise ValueError(
                f"num_v_heads={HV} is not a multiple of num_heads={H}; nearest: {near}"
            )
        V = K * self.expand_v
        if round(V) < 1 or abs(V - round(V)) > 1e-9 * V:
            near = " or ".join(f"{n / K:.6g}" for n in sorted({max(int(V), 1), int(V) + 1}))
            raise ValueError(
                f"expand_v={self.expand_v} makes V = {V:.6g} of K = {K}, which must be whole; "
                f"nearest: {near}"
            )

    def _require_mixer(self) -> None:
        if self.decay_bound is not None and (self.mixer, self.forgetting) != (
            "kimi_delta_attention",
            1.0,
        ):
            raise ValueError(
                f"decay_bound={self.decay_bound} with mixer={self.mixer!r}, "
                f"forgetting={self.forgetting}: it bounds the decays of "
                "mixer='kimi_delta_attention', whose rates start at 1: forgetting=1"
            )

    def _require_attention(self) -> None:
        layers, L = self.attention_layers, self.num_hidden_layers
        if any(i >= L for i in layers) or len(set(layers)) < len(layers):
            raise ValueError(f"attention_layers={layers} must be different layers of 0 to {L - 1}")
        if layers and self.head_dim_v % 2:
            raise ValueError(
                f"V={self.head_dim_v} must be even in attention_layers, where RoPE rotates pairs; "
                "change head_dim_k or expand_v"
            )

    def _require_residual(self) -> None:
        DV = self.ddl_value_channels
        if DV > 1 and self.ddl_compressor == "none":
            raise ValueError(
                f"ddl_value_channels={DV} with ddl_compressor='none': sublayers need one number "
                "per feature; choose 'token' or 'channel', or 1 channel"
            )
        expanded = self.ddl_compressor != "none" or DV > 1 or self.input_embed_shortconv_kernel_size
        if self.residual in ("additive", "ddl_lm") and expanded:
            raise ValueError(
                f"residual={self.residual!r} has one value per feature: leave out "
                "ddl_value_channels, ddl_compressor and input_embed_shortconv_kernel_size, or "
                "choose 'ddl' or 'write_only'"
            )
        if self.residual != "additive" and self.base_layers is not None:
            raise ValueError(
                f"base_layers={self.base_layers} is a rule for sums, not for "
                f"residual={self.residual!r}; leave it out"
            )
        if self.residual == "ddl_lm" and self.hidden_size < 4:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be at least 4 for residual='ddl_lm'"
            )

    def _require_rows(self, tokens: dict[str, int | list[int] | None]) -> None:
        for name, ids in tokens.items():
            for token in ids if isinstance(ids, list) else [ids]:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"{name}={token} has no row: vocab_size={self.vocab_size}; give a token "
                        f"from 0 to {self.vocab_size - 1}, or more rows"
                    )


def _refuse_near_misses(arguments: dict[str, Any]) -> None:
    """Raises ValueError for a misspelled setting, which transformers would store without effect."""
    for name, value in arguments.items():
        if near := get_close_matches(name, CONFIG_NAMES.values(), n=1, cutoff=0.75):
            raise ValueError(f"DeltaConfig has no {name}={value!r}; did you mean {near[0]}")
