"""The sizes and switches of a delta-rule language model, checked when they are made."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any

from transformers import PretrainedConfig

from delta_trn.models.mup import TABLES

INITIALIZATIONS = ("delta_trn", "authors")
READOUTS = ("sqrt_k", "none")
GROWTHS = ("head_dim", "heads")
ACTIVATIONS = ("identity", "silu", "relu", "elu+1")
RESIDUALS = ("additive", "ddl", "write_only", "ddl_lm")
COMPRESSORS = ("none", "token", "channel")


class DeltaConfig(PretrainedConfig):
    """A decoder of pre-norm blocks: Gated DeltaNet over time (arXiv:2412.06464), then SwiGLU.

    vocab_size              rows of the embedding
    hidden_size             d, the width
    base_width              the width at which learning rates and initial scales are meant: m = d / base_width
    num_hidden_layers       blocks
    num_heads, num_v_heads  H query and key heads; HV value heads, a multiple of H (None: H)
    head_dim_k, expand_v    K (None: int(0.75 d // H)); V / K
    conv_size               taps of the causal depthwise convolution on q, k and v
    intermediate_size       inner size of SwiGLU (None: int(8 d / 3) up to the next multiple of
                            intermediate_multiple)
    attention_layers        indices of layers that are softmax attention with RoPE instead
    rope_theta              base of RoPE's wavelengths in those layers
    allow_neg_eigval        beta in (0, 2) instead of (0, 1)
    rms_norm_eps            epsilon of every RMSNorm
    parametrization         sp, mup_original, mup, ...: a table of `models.mup`
    scale_by                what grows with width, which decides the roles of per-head parameters: "head_dim"
                            (arXiv:2606.04048), or "heads" (then give num_heads and head_dim_k at every width)
    init                    "delta_trn": convolution taps of one scale at every width, U(-1, 1) / sqrt(taps);
                            "authors": as the paper's code, taps and tied embedding drawn like hidden matrices
    readout                 "sqrt_k": o = sqrt(K) S^T q, which keeps the output norm's epsilon negligible;
                            "none": o = S^T q / sqrt(K), as the paper's code; None: as `init` says
    initializer_range       standard deviation of weights at base_width: 0.02 = 0.32 / sqrt(256)
    positions               "rope", in attention_layers, or "learned": max_position_embeddings rows, added
    forgetting              initial decay rates over Mamba2's: at 1/16 heads remember 16 times as long
    depth_scaled_init       the last matrix of each sublayer begins 1 / sqrt(layers) as large
    mixer_output_init       the last matrix of each mixer begins so many times as large; 0: at first no mixer
                            says a word
    label_smoothing         share of the target that training gives to all tokens alike

    norm, mlp               "rms" or "layer"; "swiglu" or "gelu"
    dropout                 on the embedding and on every sublayer's output, while training
    residual                "additive": x + y; "ddl": X + beta k (v - k^T X)^T, Deep Delta Learning; its
                            control "write_only": X + beta k v^T; "ddl_lm": k and beta from the stream itself
    use_cache               whether forward returns a cache when not training

    Of attention_layers, under the names of "Deep Delta Learning"'s released code:

    rope_ratio              share of a head's channels that RoPE turns, the first ones
    use_qk_rmsnorm          RMSNorm with gains on q and k, after RoPE
    q_activation, k_activation, v_activation    on the projections: "identity", "silu", "relu" or "elu+1"
    use_k_shift, use_v_shift    k_t becomes a_t k_{t-1} + (1 - a_t) k_t, a = sigmoid of one number a head
    using_groupnorm         RMSNorm with gains on each head's output
    use_output_gate         RMSNorm with gains on each head's output, times SiLU(W_g x)

    Of ddl and write_only, likewise:

    ddl_value_channels      DV, values a feature of the stream
    ddl_compressor          how sublayers read it: "none" (DV = 1), "token" or "channel" convolution
    ddl_state_shortconv_kernel_size     taps of that
    ddl_state_dv_shortconv_causal   "channel": a value is made of those before it alone
    ddl_state_read_init     initial reading weights (None: 1 / DV)
    input_embed_shortconv_kernel_size   taps of the convolution that begins the stream (0: it is repeated)
    ddl_k_eps               k / sqrt(|k|^2 + k_eps^2)
    ddl_beta_init           beta at first where the gate's input is 0; of ddl_lm too
    ddl_beta_single_linear, ddl_beta_hidden_size    one map to beta's logit, or two with tanh between
    ddl_v_sigmoid, ddl_v_sigmoid_scale  v = scale * sigmoid(W x + b), or W x + b
    ddl_v_constant, ddl_v_constant_value            v is that number
    ddl_v_input             x of v: "state", what was read (released); "context", that normalized (published)

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
        forgetting: float = 1.0,
        rms_norm_eps: float = 1e-6,
        parametrization: str = "mup",
        scale_by: str = "head_dim",
        init: str = "delta_trn",
        readout: str | None = None,
        initializer_range: float = 0.02,
        depth_scaled_init: bool = False,
        mixer_output_init: float = 1.0,
        label_smoothing: float = 0.0,
        positions: str = "rope",
        max_position_embeddings: int = 512,
        rope_ratio: float = 1.0,
        use_qk_rmsnorm: bool = False,
        q_activation: str = "identity",
        k_activation: str = "identity",
        v_activation: str = "identity",
        use_k_shift: bool = False,
        use_v_shift: bool = False,
        using_groupnorm: bool = False,
        use_output_gate: bool = False,
        norm: str = "rms",
        mlp: str = "swiglu",
        dropout: float = 0.0,
        residual: str = "additive",
        ddl_value_channels: int = 1,
        ddl_compressor: str = "none",
        ddl_state_shortconv_kernel_size: int = 4,
        ddl_state_dv_shortconv_causal: bool = False,
        ddl_state_read_init: float | None = None,
        input_embed_shortconv_kernel_size: int = 0,
        ddl_k_eps: float = 1e-5,
        ddl_beta_init: float = 1.0,
        ddl_beta_single_linear: bool = True,
        ddl_beta_hidden_size: int = 128,
        ddl_v_sigmoid: bool = True,
        ddl_v_sigmoid_scale: float = 4.0,
        ddl_v_constant: bool = False,
        ddl_v_constant_value: float = 2.0,
        ddl_v_input: str = "state",
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,  # transformers' own: dtype, architectures, transformers_version, ...
    ) -> None:
        _refuse_near_misses(kwargs)
        for name, value in {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "base_width": base_width,
            "num_hidden_layers": num_hidden_layers,
            "num_heads": num_heads,
            "conv_size": conv_size,
            "intermediate_multiple": intermediate_multiple,
        }.items():
            _require_count(name, value)
        self.vocab_size, self.hidden_size, self.base_width = vocab_size, hidden_size, base_width
        self.num_hidden_layers, self.num_heads = num_hidden_layers, num_heads
        self.num_v_heads: int = num_heads if num_v_heads is None else num_v_heads
        self.head_dim_k: int = _key_size(hidden_size, num_heads) if head_dim_k is None else head_dim_k
        self.expand_v, self.conv_size = expand_v, conv_size
        if intermediate_size is None:
            intermediate_size = -(-int(8 * hidden_size / 3) // intermediate_multiple) * intermediate_multiple
        self.intermediate_size: int = intermediate_size
        self.intermediate_multiple = intermediate_multiple
        self.attention_layers, self.rope_theta = list(attention_layers), rope_theta
        self.allow_neg_eigval, self.rms_norm_eps = allow_neg_eigval, rms_norm_eps
        self.parametrization, self.scale_by, self.init = parametrization, scale_by, init
        self.readout: str = readout if readout is not None else "none" if init == "authors" else "sqrt_k"
        self.initializer_range, self.use_cache = initializer_range, use_cache
        self.forgetting, self.depth_scaled_init = forgetting, depth_scaled_init
        self.mixer_output_init = mixer_output_init
        self.label_smoothing = label_smoothing
        self.rope_ratio, self.use_k_shift, self.use_v_shift = rope_ratio, use_k_shift, use_v_shift
        self.q_activation, self.k_activation, self.v_activation = q_activation, k_activation, v_activation
        self.using_groupnorm, self.use_output_gate = using_groupnorm, use_output_gate
        self.positions, self.max_position_embeddings = positions, max_position_embeddings
        self.use_qk_rmsnorm, self.norm, self.mlp, self.dropout = use_qk_rmsnorm, norm, mlp, dropout
        self.residual, self.ddl_value_channels = residual, ddl_value_channels
        self.ddl_compressor, self.ddl_state_read_init = ddl_compressor, ddl_state_read_init
        self.ddl_state_shortconv_kernel_size = ddl_state_shortconv_kernel_size
        self.ddl_state_dv_shortconv_causal = ddl_state_dv_shortconv_causal
        self.input_embed_shortconv_kernel_size = input_embed_shortconv_kernel_size
        self.ddl_k_eps, self.ddl_beta_init = ddl_k_eps, ddl_beta_init
        self.ddl_beta_single_linear = ddl_beta_single_linear
        self.ddl_beta_hidden_size = ddl_beta_hidden_size
        self.ddl_v_sigmoid, self.ddl_v_sigmoid_scale = ddl_v_sigmoid, ddl_v_sigmoid_scale
        self.ddl_v_constant, self.ddl_v_constant_value = ddl_v_constant, ddl_v_constant_value
        self.ddl_v_input = ddl_v_input
        tokens = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        self._check(tokens)
        super().__init__(**{**kwargs, **tokens, "tie_word_embeddings": tie_word_embeddings})

    @property
    def head_dim_v(self) -> int:
        """The value size V = K expand_v."""
        return round(self.head_dim_k * self.expand_v)

    @property
    def width_ratio(self) -> float:
        """The ratio m = width / base_width."""
        return self.hidden_size / self.base_width

    @property
    def mlp_output_scale(self) -> float:
        """A factor on the initial std of each MLP's output projection."""
        return self.num_hidden_layers**-0.5 if self.depth_scaled_init else 1.0

    @property
    def mixer_output_scale(self) -> float:
        """A factor on the initial std of each mixer's output projection."""
        return self.mlp_output_scale * self.mixer_output_init

    def _check(self, tokens: dict[str, int | list[int] | None]) -> None:
        for name in ("num_v_heads", "head_dim_k", "intermediate_size"):
            _require_count(name, getattr(self, name))
        H, HV, K, L = self.num_heads, self.num_v_heads, self.head_dim_k, self.num_hidden_layers
        if HV % H:
            near = " or ".join(str(n) for n in (HV // H * H, HV // H * H + H) if n)
            raise ValueError(f"num_v_heads={HV} is not a multiple of num_heads={H}; nearest: {near}")
        for name in ("expand_v", "rope_theta", "rms_norm_eps", "initializer_range", "forgetting"):
            _require_positive(name, getattr(self, name))
        V = K * self.expand_v
        if round(V) < 1 or abs(V - round(V)) > 1e-9 * V:
            near = " or ".join(f"{n / K:.6g}" for n in sorted({max(int(V), 1), int(V) + 1}))
            raise ValueError(
                f"expand_v={self.expand_v} makes V = {V:.6g} of K = {K}, which must be whole; nearest: {near}"
            )
        layers = self.attention_layers
        outside = [i for i in layers if not (isinstance(i, int) and 0 <= i < L)]
        if outside or len(set(layers)) < len(layers):
            raise ValueError(f"attention_layers={layers} must be different layers of 0 to {L - 1}")
        if layers and self.head_dim_v % 2:
            raise ValueError(
                f"V={self.head_dim_v} must be even in attention_layers, where RoPE turns pairs; change "
                "head_dim_k or expand_v"
            )
        if not 0 <= self.mixer_output_init < float("inf"):
            raise ValueError(f"mixer_output_init={self.mixer_output_init} must be a finite number from 0 on")
        _require_known("parametrization", self.parametrization, TABLES)
        _require_known("scale_by", self.scale_by, GROWTHS)
        _require_known("init", self.init, INITIALIZATIONS)
        _require_known("readout", self.readout, READOUTS)
        self._check_residual()
        for name, ids in tokens.items():
            for token in ids if isinstance(ids, list) else [ids]:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name}={token} has no row: vocab_size={self.vocab_size}")

    def _check_residual(self) -> None:
        _require_known("residual", self.residual, RESIDUALS)
        _require_known("ddl_compressor", self.ddl_compressor, COMPRESSORS)
        _require_known("ddl_v_input", self.ddl_v_input, ("state", "context"))
        _require_known("positions", self.positions, ("rope", "learned"))
        _require_known("norm", self.norm, ("rms", "layer"))
        _require_known("mlp", self.mlp, ("swiglu", "gelu"))
        for name in (
            "max_position_embeddings", "ddl_value_channels", "ddl_state_shortconv_kernel_size",
            "ddl_beta_hidden_size",
        ):  # fmt: skip
            _require_count(name, getattr(self, name))
        for name in ("ddl_k_eps", "ddl_v_sigmoid_scale"):
            _require_positive(name, getattr(self, name))
        if self.input_embed_shortconv_kernel_size != 0:
            _require_count("input_embed_shortconv_kernel_size", self.input_embed_shortconv_kernel_size)
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if not 0 <= self.rope_ratio <= 1:
            raise ValueError(f"rope_ratio={self.rope_ratio} must be in [0, 1]")
        for name in ("q_activation", "k_activation", "v_activation"):
            _require_known(name, getattr(self, name), ACTIVATIONS)
        if not 0 <= self.ddl_beta_init <= 2:
            raise ValueError(f"ddl_beta_init={self.ddl_beta_init} must be a beta, in [0, 2], not its logit")
        DV = self.ddl_value_channels
        if DV > 1 and self.ddl_compressor == "none":
            raise ValueError(
                f"ddl_value_channels={DV} with ddl_compressor='none': sublayers need one number a feature; "
                "choose 'token' or 'channel', or 1 channel"
            )
        expanded = self.ddl_compressor != "none" or DV > 1 or self.input_embed_shortconv_kernel_size
        if self.residual in ("additive", "ddl_lm") and expanded:
            raise ValueError(
                f"residual={self.residual!r} has one value a feature: leave out ddl_value_channels, "
                "ddl_compressor and input_embed_shortconv_kernel_size, or choose 'ddl' or 'write_only'"
            )
        if self.residual == "ddl_lm" and self.hidden_size < 4:
            raise ValueError(f"hidden_size={self.hidden_size} must be at least 4 for residual='ddl_lm'")


def _key_size(width: int, heads: int) -> int:
    if not (size := int(0.75 * width // heads)):
        raise ValueError(
            f"hidden_size={width} is too narrow for num_heads={heads}: K = int(0.75 d // H) is 0; give at "
            f"most {int(0.75 * width)} heads, or head_dim_k"
        )
    return size


def _require_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number, at least 1")


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} must be a number above 0")


def _require_known(name: str, value: Any, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")


def _refuse_near_misses(kwargs: dict[str, Any]) -> None:
    """transformers makes an attribute of any unknown argument: a misspelled one would change nothing."""
    own = [name for name in signature(DeltaConfig.__init__).parameters if name not in ("self", "kwargs")]
    for name in kwargs:
        if near := get_close_matches(name, own, n=1, cutoff=0.75):
            raise ValueError(f"DeltaConfig has no {name}={kwargs[name]!r}; did you mean {near[0]}")
