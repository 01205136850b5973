"""The sizes and switches of a delta-rule language model, checked when they are made."""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from models.mup import PARAMETRIZATIONS

INITIALIZATIONS = ("delta_trn", "authors")
READOUTS = ("sqrt_k", "none")


class DeltaConfig(PretrainedConfig):
    """A decoder of pre-norm blocks: Gated DeltaNet over time (arXiv:2412.06464), then SwiGLU.

    Width enlarges the heads and keeps their number, as in arXiv:2606.04048: K = 0.75 d / H, V = expand_v K.

    vocab_size              rows of the embedding
    hidden_size             d, the width
    base_width              the width at which learning rates and initial scales are meant: m = d / base_width
    num_hidden_layers       blocks
    num_heads, num_v_heads  H query and key heads; HV value heads, a multiple of H (None: H)
    head_dim_k, expand_v    K (None: int(0.75 d // H)); V / K
    conv_size               taps of the causal depthwise convolutions on q, k and v
    intermediate_size       inner size of SwiGLU (None: int(8 d / 3) up to a multiple of intermediate_multiple)
    attention_layers        indices of layers that are softmax attention with RoPE instead
    rope_theta              base of RoPE's wavelengths in those layers
    allow_neg_eigval        beta in (0, 2) instead of (0, 1)
    rms_norm_eps            epsilon of every RMSNorm
    parametrization         sp, mup_original or mup: the tables of `models.mup`
    init                    "delta_trn": convolution taps U(-1, 1) / sqrt(taps), of one scale at every width;
                            "authors": as the released code, which draws them like a hidden matrix
    readout                 "sqrt_k": o = sqrt(K) S^T q, which keeps the output norm's epsilon negligible;
                            "none": o = S^T q / sqrt(K), as the released code
    initializer_range       standard deviation of weights at base_width

    Raises ValueError, with the value and the nearest that fit, for sizes that do not go together.
    """

    model_type = "delta_trn"

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 256,
        base_width: int = 256,
        num_hidden_layers: int = 8,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        head_dim_k: int | None = None,
        expand_v: float = 2.0,
        conv_size: int = 4,
        intermediate_size: int | None = None,
        intermediate_multiple: int = 256,
        attention_layers: Sequence[int] = (),
        rope_theta: float = 10_000.0,
        allow_neg_eigval: bool = False,
        rms_norm_eps: float = 1e-6,
        parametrization: str = "mup",
        init: str = "delta_trn",
        readout: str = "sqrt_k",
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.base_width = vocab_size, hidden_size, base_width
        self.num_hidden_layers, self.num_heads = num_hidden_layers, num_heads
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_dim_k = int(0.75 * hidden_size // num_heads) if head_dim_k is None else head_dim_k
        self.expand_v, self.conv_size = expand_v, conv_size
        self.intermediate_multiple = intermediate_multiple
        if intermediate_size is None:
            intermediate_size = -(-int(8 * hidden_size / 3) // intermediate_multiple) * intermediate_multiple
        self.intermediate_size = intermediate_size
        self.attention_layers, self.rope_theta = list(attention_layers), rope_theta
        self.allow_neg_eigval, self.rms_norm_eps = allow_neg_eigval, rms_norm_eps
        self.parametrization, self.init, self.readout = parametrization, init, readout
        self.initializer_range = initializer_range
        self._check()
        super().__init__(
            tie_word_embeddings=tie_word_embeddings,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            **kwargs,
        )

    @property
    def head_dim_v(self) -> int:
        """V."""
        return round(self.head_dim_k * self.expand_v)

    @property
    def width_ratio(self) -> float:
        """m = width / base_width."""
        return self.hidden_size / self.base_width

    def _check(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "base_width",
            "num_hidden_layers",
            "num_heads",
            "num_v_heads",
            "conv_size",
            "intermediate_size",
        ):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.num_v_heads % self.num_heads:
            below = self.num_v_heads // self.num_heads * self.num_heads
            near = " or ".join(str(n) for n in (below, below + self.num_heads) if n)
            raise ValueError(
                f"num_v_heads={self.num_v_heads} is not a multiple of num_heads={self.num_heads}; nearest: {near}"
            )
        if self.head_dim_k < 1:
            raise ValueError(
                f"head_dim_k={self.head_dim_k}: hidden_size={self.hidden_size} is too narrow for "
                f"num_heads={self.num_heads}; give fewer heads or head_dim_k"
            )
        v = self.head_dim_k * self.expand_v
        if v < 1 or abs(v - round(v)) > 1e-9 * v:
            raise ValueError(
                f"expand_v={self.expand_v} makes V = {v:g} of K = {self.head_dim_k}; it must be a whole number >= 1"
            )
        outside = [i for i in self.attention_layers if not 0 <= i < self.num_hidden_layers]
        if outside:
            raise ValueError(
                f"attention_layers {outside} do not exist; layers are 0 to {self.num_hidden_layers - 1}"
            )
        if self.attention_layers and self.head_dim_v % 2:
            raise ValueError(f"V={self.head_dim_v} must be even for RoPE in attention_layers")
        for name, known in (
            ("parametrization", tuple(PARAMETRIZATIONS)),
            ("init", INITIALIZATIONS),
            ("readout", READOUTS),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")


# name -> width. L = 8, H = 6 and 50,304 rows, tied: the models of arXiv:2606.04048, named by all their parameters.
SIZES = {"gdn-21m": 256, "gdn-57m": 512, "gdn-105m": 768, "gdn-171m": 1024, "gdn-342m": 1536}


def named_size(name: str, **changes: Any) -> DeltaConfig:
    """The configuration of a named size, with changes. Raises ValueError for a name that is not in SIZES."""
    if name not in SIZES:
        raise ValueError(f"no size is named {name!r}; there are {', '.join(SIZES)}")
    return DeltaConfig(**{"hidden_size": SIZES[name], **changes})
