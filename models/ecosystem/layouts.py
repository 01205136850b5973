"""What a module says about the dimensions of its parameters: which one a parameter sums over, which
one it writes, and what the model itself multiplies it with.

Shapes say which dimensions grow with width, and not what a dimension is. A matrix of an embedding
for positions, [positions, width], looks like a gate, [heads, width], and weights in the order
[inputs, outputs] look like those in the order [outputs, inputs]. So a parameter of two or more
dimensions has a layout only where its module is known. Modules of transformers are known by the
names of their classes: nothing of transformers is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

# what one number for each channel or head is called, in any shape
NUMBERS = ("A_log", "dt_bias", "D")
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


@dataclass(frozen=True)
class Layout:
    """The dimensions that a parameter sums over and writes.

    inputs, outputs     dimensions of the shape; None where there is none
    numbers             whether the parameter multiplies or shifts channels one by one
    """

    inputs: int | None = None
    outputs: int | None = None
    numbers: bool = False


MATRIX = Layout(inputs=-1, outputs=-2)
TURNED = Layout(inputs=-2, outputs=-1)
TABLE = Layout(outputs=-1)  # rows that are looked up or added, one number per channel
NUMBERED = Layout(numbers=True)
# Classes of transformers, by pattern, with a pattern of attributes. The first that fits counts.
CLASSES = (
    ("Conv1D", "weight", TURNED),
    ("Llama4TextExperts", "gate_up_proj", TURNED),
    ("Llama4TextExperts", "down_proj", TURNED),
    ("*TopKRouter", "weight", MATRIX),
    ("*TopkRouter", "weight", MATRIX),
    ("DeepseekV4HashRouter", "weight", MATRIX),
    ("*Embeddings", "cls_token", TABLE),
    ("*Embeddings", "mask_token", TABLE),
    ("*Embeddings", "distillation_token", TABLE),
    ("*Embeddings", "register_tokens", TABLE),
    ("*Embeddings", "position_embeddings", TABLE),
)
# Models of transformers that multiply what they read out by 1/sqrt(width), where their readout is
# tied; since 5.0 their configuration says so.
SCALED_READOUTS = ("T5*", "UMT5*", "MT5*", "LongT5*", "SwitchTransformers*", "Pop2Piano*")


def find_layout(module: nn.Module, attribute: str, dimensions: int) -> Layout | None:
    """Returns the layout of a module's parameter; None where the module does not say it."""
    if dimensions < 2:
        return NUMBERED
    if isinstance(module, nn.Embedding):
        return TABLE
    if isinstance(module, nn.Linear):
        return MATRIX
    if isinstance(module, _ConvTransposeNd):
        return Layout(inputs=0, outputs=1)
    if isinstance(module, _ConvNd):
        return Layout(inputs=1, outputs=0)
    if isinstance(module, NORMS) or attribute in NUMBERS:
        return NUMBERED
    if isinstance(module, nn.MultiheadAttention):
        return MATRIX if attribute.endswith("weight") else NUMBERED
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return MATRIX
    tag = getattr(module, "tags", {}).get(attribute)  # our own models say it
    if tag is not None:
        return NUMBERED if tag.role.name in ("VECTOR", "SCALAR", "CONSTANT") else MATRIX
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("transformers."):
            continue
        experts = getattr(module, "is_transposed", None)
        if isinstance(experts, bool) and fnmatchcase(kind.__name__, "*Experts"):
            if attribute.endswith("_bias"):
                return NUMBERED
            return (TURNED if experts else MATRIX) if dimensions == 3 else None
        for name, of, layout in CLASSES:
            if fnmatchcase(kind.__name__, name) and attribute == of:
                return layout
    return None


def embedding_power(module: nn.Module) -> float:
    """Returns the power of width that a module multiplies its embedding with: 0.5 for transformers'
    scaled embeddings, whose factor is sqrt(width), and else 0. Raises ValueError for a factor that
    is neither.
    """
    if not isinstance(module, nn.Embedding):
        return 0.0
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0))
    scale = float(scale)
    if scale == 1.0:
        return 0.0
    if abs(scale / module.embedding_dim**0.5 - 1) < 1e-3:
        return 0.5
    raise ValueError(
        f"{type(module).__name__} multiplies its embedding by {scale:g}, expected 1 or "
        f"sqrt(width) = {module.embedding_dim**0.5:g}: make the model with one of these"
    )


def readout_power(model: nn.Module) -> float:
    """Returns the power of width that a model multiplies its hidden states with before the readout:
    -0.5 for T5 and its like, whose tied readouts have a factor 1/sqrt(width), and else 0.
    """
    config = getattr(model, "config", None)
    known = any(
        kind.__module__.startswith("transformers.") and fnmatchcase(kind.__name__, name)
        for kind in type(model).__mro__
        for name in SCALED_READOUTS
    )
    tied = getattr(config, "tie_word_embeddings", False)
    return -0.5 if known and getattr(config, "scale_decoder_outputs", tied) else 0.0


def describe_module(module: nn.Module, attribute: str, shape: tuple[int, ...]) -> str:
    """Returns why a parameter has no layout."""
    return (
        f"{type(module).__name__} does not say which of the {len(shape)} dimensions of its "
        f"{attribute} is summed over: 'embedding' for positions, tokens and prompts, 'vector' for "
        "gains, 'gate' or 'hidden' for a matrix"
    )
