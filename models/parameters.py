"""Tags say what each parameter is; initial values and optimizer factors follow from them.

>>> import torch
>>> from delta_trn.models import DeltaConfig, DeltaForCausalLM
>>> with torch.device("meta"):
...     model = DeltaForCausalLM(DeltaConfig(hidden_size=512, base_width=256))
>>> row = scaled_parameters(model, optimizer="adamw", lr=4e-3, weight_decay=0.1)[1]
>>> row.name, row.role.name, row.lr
('model.blocks.0.mixer_norm.weight', 'VECTOR', 0.004)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from delta_trn.models.config import DeltaConfig
from delta_trn.models.mup import DECAYING, TABLES, Role

Law = Callable[[Tensor, torch.Generator], Tensor]
# the name that a module has in one which PEFT, or PyTorch's checkpointing, puts around it
WRAPPED = ("base_layer", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Tag:
    """Has what the module that makes a parameter knows about it.

    role    how the parameter scales with width
    law     fills a float32 tensor; None: normal, with the std of the role
    scale   a factor on that std
    stored  whether the gradient comes through Gated DeltaNet's state, from all tokens that remember
            the value
    heads   number of blocks of a matrix that belong to different heads: of its rows,
    of_columns      or of its columns
    inputs  the ratio of a matrix's inputs to the base model's, if that is not the width's; None: it
            is
    """

    role: Role
    law: Law | None = None
    scale: float = 1.0
    stored: bool = False
    heads: int = 1
    of_columns: bool = False
    inputs: float | None = None

    def ratio(self, config: DeltaConfig) -> float:
        """Returns the m of the parametrization's table that holds for this parameter."""
        own = self.inputs is not None and TABLES[config.parametrization].own_inputs
        return cast(float, self.inputs) if own else config.width_ratio


def initial_std(tag: Tag, config: DeltaConfig) -> float | None:
    """Returns the standard deviation of a parameter's normal law,
    or None if its law is another one.
    """
    if tag.law is not None:
        return None
    power = TABLES[config.parametrization][tag.role].init_std
    return tag.scale * config.initializer_range * tag.ratio(config) ** power


def tagged_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tag]]:
    """Yields (name, parameter, tag), each parameter once. Raises ValueError for a parameter without
    a tag.

    A module that makes parameters, or maps that have them, has an attribute `tags`, a dict from a
    parameter's name there to its Tag. Tags are there and not on the tensor, or on a map, because so
    they survive loading, `to_empty` and `deepcopy`, and layers that others put in a map's place.
    """
    for name, parameter, _ in _owned_parameters(model):
        yield name, parameter, _tag_of(model, name, parameter)


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yields (name, parameter, the module that has it), each parameter once: a tied one belongs to
    the first.
    """
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}.{attribute}" if prefix else attribute, parameter, module


def _tag_of(model: nn.Module, name: str, parameter: nn.Parameter) -> Tag:
    """Returns the tag that a parameter has with the nearest module around it. Raises ValueError if
    there is none.
    """
    parts = name.split(".")
    for depth in reversed(range(len(parts))):
        owner = model.get_submodule(".".join(parts[:depth]))
        own = ".".join(part for part in parts[depth:] if part not in WRAPPED)
        tag = getattr(owner, "tags", {}).get(own)
        if isinstance(tag, Tag):
            return tag
    owner = model.get_submodule(name.rpartition(".")[0])
    raise ValueError(
        f"{name} {tuple(parameter.shape)} has no muP role; give it one in the tags of "
        f"{type(owner).__name__}"
    )


@torch.no_grad()
def initialize(
    model: PreTrainedModel, part: Callable[[str, Tensor], Tensor] = lambda name, x: x
) -> None:
    """Draws initial values for every parameter that no checkpoint has filled; skips meta
    parameters.

    `part` maps a parameter's name and its values to those that this model has, for a model divided
    among processes. There is never more than one whole parameter.

    A parameter's numbers depend on its name in the backbone and on one draw from torch's global
    generator, not on what was made before it: models that share a layer start with the same one.
    They are drawn in float32 on the CPU, so neither device nor dtype changes them.
    """
    _draw(model, tagged_parameters(model), part)


@torch.no_grad()
def initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Draws initial values for the parameters that a module has itself, as `initialize` does for
    all of a model, but from one draw of torch's generator for each module.

    transformers asks for it where a model is drawn part by part: `model.apply(model._init_weights)`,
    and DeepSpeed's ZeRO-3, where one module's parameters are in memory at a time. A tied parameter
    is drawn with the module that has it first. An embedding or a readout that is not in the model is
    one that transformers makes to replace it. Raises ValueError for a parameter without a tag.
    """
    rows = [(name, x) for name, x, owner in _owned_parameters(model) if owner is module]
    if not rows and not any(module is m for m in model.modules()):
        old = model.get_input_embeddings()
        if isinstance(module, nn.Linear):
            old = model.get_output_embeddings()
        place = next((name for name, m in model.named_modules() if m is old), "")
        rows = [(f"{place}.{name}", x) for name, x in module.named_parameters(recurse=False)]
    _draw(model, [(name, parameter, _tag_of(model, name, parameter)) for name, parameter in rows])


def _draw(
    model: PreTrainedModel,
    rows: Iterable[tuple[str, nn.Parameter, Tag]],
    part: Callable[[str, Tensor], Tensor] = lambda name, x: x,
) -> None:
    missing = [
        (name, parameter, tag)
        for name, parameter, tag in rows
        # the mark that transformers leaves on a parameter it has loaded
        if not (parameter.is_meta or getattr(parameter, "_is_hf_initialized", False))
    ]
    if not missing:
        return
    for name, parameter, _ in missing:
        if parameter.numel() == 0:
            raise ValueError(
                f"{name} has no elements, as where DeepSpeed's zero.Init has divided it among "
                "processes, and cannot be drawn; make the model by from_config or from_pretrained "
                "after TrainingArguments(deepspeed=...) or HfDeepSpeedConfig, which gather it"
            )
    seed = int(torch.randint(2**62, (), device="cpu"))
    for name, parameter, tag in missing:
        own = name.removeprefix(f"{model.base_model_prefix}.")
        digest = hashlib.blake2b(f"{seed} {own}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        std = initial_std(tag, cast(DeltaConfig, model.config))
        if tag.law is not None:
            values = tag.law(values, generator)
        elif std is not None:
            values.normal_(0.0, std, generator=generator)
        parameter.copy_(part(name, values))


@dataclass(frozen=True)
class ScaledParameter:
    """One parameter and what it gets.

    init_std    None where the initial law is not normal
    epsilon     a factor on Adam's epsilon
    clip        weight of the squared gradient in the norm whose limit is the same at every width
    tag         what its module says of it
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    init_std: float | None
    multiplier: float
    lr: float
    weight_decay: float
    epsilon: float
    clip: float
    tag: Tag
    parameter: nn.Parameter


def scaled_parameters(
    model: PreTrainedModel,
    *,
    optimizer: str,
    lr: float,
    weight_decay: float,
    independent_weight_decay: bool = False,
    memory: float = 1.0,
    rates: Mapping[Role, float] | None = None,
) -> list[ScaledParameter]:
    """Returns what every parameter gets, one row per parameter, in the order of
    `model.parameters()`.

    optimizer                   "adamw", "sgd" or "muon"
    lr                          learning rate at base_width
    weight_decay                coefficient at base_width, for the roles that decay
    independent_weight_decay    optimizers multiply the coefficient by a parameter's learning rate,
                                so under muP AdamW decays hidden matrices m times slower; True
                                divides m out again
    memory                      divides SGD's learning rates of stored values (`Tag.stored`)
    rates                       factors on the learning rates of roles, the same at every width

    Raises ValueError for an optimizer without a column, a parameter without a role, or a memory not
    above 0.
    """
    if not memory > 0:
        raise ValueError(
            f"memory={memory} must be above 0: how long heads remember, relative to the base "
            "model's"
        )
    config = cast(DeltaConfig, model.config)
    table, deep = TABLES[config.parametrization], config.depth_ratio
    rows = []
    for name, parameter, tag in tagged_parameters(model):
        rule, m = table[tag.role], tag.ratio(config)
        depth = deep if ".blocks." in f".{name}" else 1.0
        factor = m ** rule.lr(optimizer)
        if optimizer == "sgd":
            factor *= depth / (memory if tag.stored else 1.0)
        # a table gives the embedding its multiplier as the readout, which it is only if tied
        reads_out = tag.role is not Role.EMBEDDING or config.tie_word_embeddings
        decay = weight_decay if tag.role in DECAYING else 0.0
        rows.append(
            ScaledParameter(
                name=name,
                shape=tuple(parameter.shape),
                role=tag.role,
                init_std=initial_std(tag, config),
                multiplier=m**rule.multiplier if reads_out else 1.0,
                lr=lr * factor * (rates or {}).get(tag.role, 1.0),
                weight_decay=decay / factor if independent_weight_decay else decay,
                epsilon=m**rule.epsilon / depth,
                clip=m**rule.lr_sgd * depth,
                tag=tag,
                parameter=parameter,
            )
        )
    assert [id(row.parameter) for row in rows] == [id(p) for p in model.parameters()], (
        "not a partition"
    )
    return rows
