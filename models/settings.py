"""The settings of a model, declared once: `DeltaConfig` and the command line's `model.*` are made
of them.

Importing this loads neither torch nor transformers, so that a mistyped key is reported at once.

    >>> ModelSettings(width=512, heads=8).expand_v
    2.0
    >>> ModelSettings.model_fields["forgetting"].description
    "multiplies Mamba2's initial decay rates; at 1/16 heads remember 16 times as long"
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from delta_trn.models.mup import Parametrization

Count = Annotated[int, Field(ge=1)]
CountOrNone = Count | None
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Real = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Activation = Literal["identity", "silu", "relu", "elu+1"]


class Section(BaseModel):
    """A frozen group of settings, each documented where it is declared."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class ModelSettings(Section):
    """The language model: a delta rule (arXiv:2412.06464) or attention over time,
    a residual over depth.
    """

    width: Count = 256
    """width of the residual stream, d"""
    base_width: Count = 256
    """width at which learning rates and initial scales are tuned; m = width / base_width"""
    layers: Count = 8
    """number of blocks, each a token mixer followed by an MLP"""
    base_layers: CountOrNone = None
    """layers at which rates are tuned: sublayers add outputs times base_layers / layers; none: times 1"""
    heads: Count = 6
    """number of query and key heads, H"""
    v_heads: CountOrNone = None
    """number of value heads, a multiple of the query heads; none: as many"""
    head_dim_k: CountOrNone = None
    """size K of a key; none: int(0.75 width / heads)"""
    expand_v: Positive = 2.0
    """size V of a value as a multiple of the key size K"""
    conv_size: Count = 4
    """number of taps of the causal depthwise convolution on q, k and v"""
    intermediate_size: CountOrNone = None
    """inner size of the MLP; none: int(8 width / 3), rounded up to a multiple of intermediate_multiple"""
    intermediate_multiple: Count = 256
    """rounds an inner size of the MLP that is derived from the width up to a multiple of this number"""
    attention_layers: tuple[NotNegative, ...] = ()
    """indices of the layers that are softmax attention instead of the mixer, such as 3,7"""
    mixer: Literal["gated_deltanet", "kimi_delta_attention"] = "gated_deltanet"
    """token mixer of the other layers: one decay per head, or one per channel of its keys"""
    decay_bound: Annotated[float, Field(lt=0, allow_inf_nan=False)] | None = None
    """smallest logarithm of a decay of kimi_delta_attention, such as -5; none: there is no smallest"""
    allow_neg_eigval: bool = False
    """lets beta of the delta rule lie in (0, 2) instead of (0, 1): reflections"""
    forgetting: Positive = 1.0
    """multiplies Mamba2's initial decay rates; at 1/16 heads remember 16 times as long"""
    rms_norm_eps: Positive = 1e-6
    """epsilon of every norm"""
    initializer_range: Positive = 0.02
    """standard deviation of initial weights at base_width; 0.02 is 0.32 / sqrt(256)"""
    embedding_init: Positive = 1.0
    """multiplies the initial std of the embedding, at every width"""
    mixer_output_init: Real = 1.0
    """multiplies the initial std of each mixer's output projection; 0 starts every mixer at zero"""
    depth_scaled_init: bool = False
    """multiplies the initial std of each sublayer's output projection by 1 / sqrt(layers)"""
    rope_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """share of a head's channels, the first ones, that RoPE rotates in attention layers"""
    rope_theta: Positive = 10_000.0
    """base of RoPE's wavelengths in attention layers"""
    tie_word_embeddings: bool = True
    """uses one matrix for the embedding and the logits"""
    positions: Literal["rope", "learned"] = "rope"
    """rotates q and k of attention layers, or adds a learned vector per position to the embedding"""
    max_position_embeddings: Count = 512
    """number of learned positions: with positions=learned, the longest sequence"""
    use_qk_rmsnorm: bool = False
    """applies an RMSNorm with gains to q and k of attention layers, after RoPE"""
    q_activation: Activation = "identity"
    """function applied to the query projection of attention layers"""
    k_activation: Activation = "identity"
    """function applied to the key projection of attention layers"""
    v_activation: Activation = "identity"
    """function applied to the value projection of attention layers"""
    use_k_shift: bool = False
    """mixes each key of attention layers with the key before it, in shares that each head learns"""
    use_v_shift: bool = False
    """mixes each value of attention layers with the value before it, in shares that each head learns"""
    using_groupnorm: bool = False
    """applies an RMSNorm with gains to each head's output in attention layers"""
    use_output_gate: bool = False
    """applies an RMSNorm with gains to each head's output in attention layers, times SiLU of a projection"""
    norm: Literal["rms", "layer"] = "rms"
    """norm before each sublayer: RMSNorm or LayerNorm"""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """second sublayer of each block: SwiGLU, or W GELU(W x)"""
    dropout: Fraction = 0.0
    """probability with which training drops entries of the embedding and of each sublayer's output"""
    label_smoothing: Fraction = 0.0
    """share of the training target that is spread evenly over all tokens; held-out losses have none"""
    residual: Literal["additive", "ddl", "write_only", "ddl_lm"] = "additive"
    """x + y, Deep Delta Learning's X + beta k (v - k^T X)^T, its control X + beta k v^T, or k from x"""
    ddl_value_channels: Count = 1
    """number of values per feature of the residual stream, DV; more than 1 needs ddl_compressor"""
    ddl_compressor: Literal["none", "token", "channel"] = "none"
    """reads a stream of several values per feature by a convolution over time, or over those values"""
    ddl_state_shortconv_kernel_size: Count = 4
    """number of taps of the convolution with which ddl_compressor reads the stream"""
    ddl_state_dv_shortconv_causal: bool = False
    """makes the convolution of ddl_compressor=channel causal: it sees a value and those before it"""
    ddl_state_read_init: float | None = None
    """initial weight of each value where ddl_compressor reads the stream; none: 1 / ddl_value_channels"""
    input_embed_shortconv_kernel_size: NotNegative = 0
    """number of taps of a convolution that starts the stream; 0: it starts as copies of the embedding"""
    ddl_k_eps: Positive = 1e-5
    """epsilon in the direction of a write, k / sqrt(|k|^2 + ddl_k_eps^2)"""
    ddl_beta_init: Annotated[float, Field(ge=0, le=2)] = 1.0
    """initial beta of a write where the input of its gate is 0; from 0 to 2"""
    ddl_beta_single_linear: bool = True
    """computes the logit of a write's beta by one linear map instead of two with tanh between them"""
    ddl_beta_hidden_size: Count = 128
    """inner size of the gate of a write's beta with ddl_beta_single_linear=false"""
    ddl_v_sigmoid: bool = True
    """writes v = ddl_v_sigmoid_scale * sigmoid(W x + b) instead of v = W x + b"""
    ddl_v_sigmoid_scale: Positive = 4.0
    """upper limit of a written v with ddl_v_sigmoid=true"""
    ddl_v_constant: bool = False
    """writes the constant ddl_v_constant_value instead of a computed v"""
    ddl_v_constant_value: float = 2.0
    """value that every write has with ddl_v_constant=true"""
    ddl_v_input: Literal["state", "context"] = "state"
    """computes v of a write from the stream as read (the released code), or normalized (the paper)"""


class CompleteSettings(ModelSettings):
    """All arguments of `DeltaConfig`: also those that a run takes
    from its data or from elsewhere.
    """

    vocab_size: Count = 50304
    """number of rows of the embedding"""
    parametrization: Parametrization = "mup"
    """table of `models.mup`: how initialization, multipliers and learning rates scale with width"""
    readout: Literal["sqrt_k", "none"] = "sqrt_k"
    """multiplies S^T q by sqrt(K), or (none) by 1 / sqrt(K), as weights of flash-linear-attention need"""
    use_cache: bool = True
    """returns a cache from forward when the model is not training"""
    bos_token_id: int | None = None
    """token that starts a text"""
    eos_token_id: int | list[int] | None = None
    """token, or tokens, that end a text"""
    pad_token_id: int | None = None
    """token that fills rows up"""


# Settings that have another name in `DeltaConfig` and its config.json: the one that transformers
# knows.
CONFIG_NAMES: Mapping[str, str] = {
    name: {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_heads",
        "v_heads": "num_v_heads",
    }.get(name, name)
    for name in CompleteSettings.model_fields
}


def complete(settings: Mapping[str, Any]) -> CompleteSettings:
    """Checks some of the settings of a model, by our names, and fills in the defaults of the
    others.

    Raises ValueError for a wrong value; the message has the names that `DeltaConfig` gives them.
    """
    try:
        return CompleteSettings.model_validate(dict(settings), strict=True)
    except ValidationError as error:
        raise ValueError(explain(error, CONFIG_NAMES)) from None


_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "letters, digits, '.', '-' and '_'",
}


def explain(error: ValidationError, names: Mapping[str, str] | None = None) -> str:
    """Returns pydantic's complaints as `key=value: expected ...; ...`, keys renamed by `names`."""
    return "; ".join(_explain(problem, names or {}) for problem in error.errors())


def _explain(problem: Any, names: Mapping[str, str]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    key = ".".join(names.get(part, part) for part in problem["loc"] if isinstance(part, str))
    reason = problem["type"]
    template = _EXPECTED.get(reason) or _EXPECTED.get(reason.split("_")[0])
    if template:
        return f"{key}={problem['input']}: expected {template.format(**problem.get('ctx', {}))}"
    return f"{key}={problem['input']}: {message[0].lower()}{message[1:]}"
