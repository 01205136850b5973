"""The muP role of every parameter of any module: from comparing its shapes with those of a base
model.

A dimension that is larger than in the base model grows with width. Fan-in is exact: m is that of
the dimension which a matrix sums over, also where a model rounds its sizes. Which dimension that
is, a parameter's module says (`layouts`). A parameter of two or more dimensions whose module does
not say it is refused: the caller names its role, and m is taken from its growing dimension, or the
last one if several grow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from delta_trn.models.ecosystem.layouts import (
    describe_module,
    embedding_power,
    find_layout,
    readout_power,
)
from delta_trn.models.mup import Role

Roles = Mapping[str, "str | Role"]
HEAD_NUMBERS = ("A_log", "dt_bias")  # one number per head of a Gated DeltaNet layer
# what torch puts into names: torch.compile, FSDP1 and activation checkpointing
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class Sizes:
    """The shape of a parameter of the base model, and its root mean square,
    None where it has no values.
    """

    shape: tuple[int, ...]
    rms: float | None


# a module, a function that makes one, a file of `save_base`, or shapes by name
Base = (
    nn.Module
    | Callable[[], nn.Module]
    | str
    | PathLike[str]
    | Mapping[str, "Sequence[int] | Sizes"]
)


@dataclass(frozen=True)
class Scaled:
    """One parameter: its role, m, the ratio of the dimension that counts for it,
    and the base's sizes.

    factor      what the model itself multiplies with after the parameter, over the same of the base
    module      the class of its module
    named       whether the caller named its role
    """

    name: str
    parameter: nn.Parameter
    role: Role
    m: float
    base: Sizes
    factor: float = 1.0
    module: str = ""
    named: bool = False


class TiedReadout(nn.Module):
    """Multiplies its input by 1/m before a readout that shares the embedding's weight."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, multiplier: float) -> None:
        super().__init__()
        self.weight, self.bias, self.multiplier = weight, bias, multiplier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x * self.multiplier, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"multiplier={self.multiplier:g}"


def scaled_parameters(
    model: nn.Module, base: Base, roles: Roles | None = None, *, may_be_tied: bool = False
) -> list[Scaled]:
    """Returns the role and ratio of every parameter. Raises ValueError that names those without a
    role.

    Names are those of the model inside of torch.compile, DistributedDataParallel and the like. A
    layer that the base model lacks is compared with the base's layers of the same names, if those
    have one shape. A tied readout without its multiplier is refused unless it `may_be_tied`.
    """
    model, known = find_inside(model), describe(base, "meta")
    patterns = {pattern: _role(role) for pattern, role in (roles or {}).items()}
    head, tied, width = find_readout(model), is_tied(model), _width(model, known)
    readout = None if tied else getattr(head, "weight", None)
    if tied and not may_be_tied and not isinstance(head, TiedReadout):
        raise ValueError(
            "the readout is tied to the embedding, which needs a multiplier on the logits: call "
            "mup.scale_readout(model, base=...) first, or make the model with "
            "tie_word_embeddings=False"
        )
    rows, unknown, gates = [], [], []
    for name, parameter, owner in name_parameters(model):
        shape, small = tuple(parameter.shape), _find(known, name)
        named = next((role for pattern, role in patterns.items() if fnmatch(name, pattern)), None)
        role, m, attribute = None, None, name.rpartition(".")[2]
        if small is not None and len(small.shape) == len(shape):
            ratios = [a / b if b else 1.0 for a, b in zip(shape, small.shape, strict=True)]
            if named is not None:
                role, m = named, _ratio(named, owner, attribute, ratios)
            elif min(ratios, default=1.0) >= 1:
                role, m = _infer(owner, attribute, ratios, parameter is readout)
        if small is None or role is None or m is None:
            why = f"the base model has {small.shape if small else 'none'}"
            if small is not None and named is not None:
                why += f", in which a {named.name.lower()} has no dimension that it sums over"
            elif small is not None and find_layout(owner, attribute, len(shape)) is None:
                why += f", and {describe_module(owner, attribute, shape)}"
            unknown.append(f"{name} {shape}: {why}")
            continue
        if role is Role.GATE and named is None:
            gates.append(name)
        m = width if role is Role.SCALAR else m
        power = readout_power(model) if role is Role.READOUT else embedding_power(owner)
        kind = type(owner).__name__
        rows.append(Scaled(name, parameter, role, m, small, m**power, kind, named is not None))
    if unknown:
        lines = "\n  ".join(unknown)
        raise ValueError(
            f"no muP role for {len(unknown)} parameters; name them in roles={{...}}:\n  {lines}"
        )
    unused = [
        pattern for pattern in patterns if not any(fnmatch(row.name, pattern) for row in rows)
    ]
    if unused:
        raise ValueError(
            f"roles {unused} match no parameter; names are like {rows[0].name if rows else '-'}"
        )
    if gates and head is None and Role.READOUT not in patterns.values():
        raise ValueError(
            f"{', '.join(gates)}: read the width and write a size that does not grow, and no readout is "
            f"known; say which is one: roles={{{gates[-1]!r}: 'readout'}}, and 'gate' for the others"
        )
    return rows


def describe(base: Base, device: str) -> dict[str, Sizes]:
    """Returns the sizes of every parameter of a base model by name; torch's random numbers stay as
    they are.

    Raises ValueError for a file that `save_base` did not write.
    """
    if isinstance(base, (str, PathLike)):
        try:
            tree = json.loads(Path(base).read_text(encoding="utf-8"))
            return {name: Sizes(tuple(shape), rms) for name, (shape, rms) in tree.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"base={str(base)!r}: {error}; expected a file of mup.save_base"
            ) from None
    if isinstance(base, Mapping):
        return {
            name: x if isinstance(x, Sizes) else Sizes(tuple(x), None) for name, x in base.items()
        }
    model = find_inside(make_model(base, device))
    return {
        name: Sizes(tuple(p.shape), None if p.is_meta else rms(p))
        for name, p, _ in name_parameters(model)
    }


def make_model(model: nn.Module | Callable[[], nn.Module], device: str) -> nn.Module:
    """Returns the model, or what a function makes on a device;
    torch's random numbers stay as they are.
    """
    if isinstance(model, nn.Module):
        return model
    with torch.random.fork_rng(devices=[]), torch.device(device):
        return model()


def save_base(model: Base, path: str | PathLike[str]) -> None:
    """Writes the shapes and sizes of a base model to a JSON file, which is then a `base` itself."""
    sizes = describe(model, "cpu")
    Path(path).write_text(
        json.dumps({name: [s.shape, s.rms] for name, s in sizes.items()}), encoding="utf-8"
    )


def name_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yields (name, parameter, its module), each parameter once,
    without what wrappers add to names.
    """
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        yield ".".join(part for part in name.split(".") if part not in WRAPPERS), parameter, owner


def find_inside(model: nn.Module) -> nn.Module:
    """Returns the model that torch.compile, DistributedDataParallel or the like wraps,
    or else the model.
    """
    children = dict(model.named_children())
    own = next(model.parameters(recurse=False), None)
    if len(children) == 1 and own is None and {*children} <= WRAPPERS | {"module"}:
        return find_inside(next(iter(children.values())))
    return model


def find_readout(model: nn.Module) -> nn.Module | None:
    """Returns the module that reads the width and writes the vocabulary; None if the model has
    none.

    Models of transformers say which. In others it is the last linear layer with one output per row
    of an embedding.
    """
    find = getattr(model, "get_output_embeddings", None)
    if find is not None:
        return find()
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = [
        m
        for m in model.modules()
        if isinstance(m, TiedReadout) or (isinstance(m, nn.Linear) and m.out_features in rows)
    ]
    return heads[-1] if heads else None


def is_tied(model: nn.Module) -> bool:
    """Returns whether the readout's weight is an embedding's."""
    weight = getattr(find_readout(model), "weight", None)
    return any(
        weight is module.weight for module in model.modules() if isinstance(module, nn.Embedding)
    )


def rms(x: torch.Tensor) -> float:
    """Returns the root mean square."""
    return x.detach().double().square().mean().sqrt().item()


def _find(known: Mapping[str, Sizes], name: str) -> Sizes | None:
    """Returns the base's parameter of a name, or of the name with other numbers of layers."""
    if name in known:
        return known[name]
    parts = ["[0-9]+" if part.isdecimal() else re.escape(part) for part in name.split(".")]
    pattern = re.compile(r"\.".join(parts))
    found = [sizes for other, sizes in known.items() if pattern.fullmatch(other)]
    return found[0] if len({sizes.shape for sizes in found}) == 1 else None


def _infer(
    module: nn.Module, attribute: str, ratios: list[float], is_readout: bool
) -> tuple[Role | None, float]:
    """Returns a parameter's role, None where shapes do not tell,
    and the ratio that counts for it.
    """
    growing = [ratio for ratio in ratios if ratio > 1]
    if isinstance(module, nn.Embedding):
        return (Role.EMBEDDING, ratios[1]) if ratios[0] == 1 else (None, 1.0)
    if is_readout:
        return (Role.READOUT, ratios[1]) if ratios[0] == 1 else (None, 1.0)
    if not growing:
        return (Role.SCALAR if attribute in HEAD_NUMBERS else Role.CONSTANT), 1.0
    layout = find_layout(module, attribute, len(ratios))
    if layout is None:
        return None, 1.0
    if layout.numbers:
        return (Role.VECTOR if len(growing) == 1 else None), growing[0]
    fan_in = 1.0 if layout.inputs is None else ratios[layout.inputs]
    out = 1.0 if layout.outputs is None else ratios[layout.outputs]
    if len(growing) > (fan_in > 1) + (out > 1):
        return None, 1.0  # more experts, or a larger kernel, than the base has
    if fan_in > 1:
        return (Role.HIDDEN if out > 1 else Role.GATE), fan_in
    if isinstance(module, _ConvNd) and module.groups > 1:
        return Role.VECTOR, out  # each channel has its own taps
    return Role.EMBEDDING, out


def _ratio(role: Role, module: nn.Module, attribute: str, ratios: list[float]) -> float | None:
    """Returns the ratio that counts for a role that the caller has named; None if there is no such
    dimension.

    A hidden matrix, a gate and a readout sum over their inputs, an embedding has one output per
    channel. Where the module does not say which dimensions these are, it is the one that grows, or
    the last one if several do.
    """
    if role in (Role.CONSTANT, Role.SCALAR):
        return 1.0
    if role is Role.VECTOR:
        return max(ratios, default=1.0)
    if role is not Role.EMBEDDING and len(ratios) < 2:
        return None
    layout = find_layout(module, attribute, len(ratios))
    if layout is not None and not layout.numbers:
        at = layout.outputs if role is Role.EMBEDDING else layout.inputs
        if at is not None:
            return ratios[at]
    growing = [ratio for ratio in ratios if ratio > 1]
    return growing[0] if len(growing) == 1 else ratios[-1] if ratios else None


def _width(model: nn.Module, known: Mapping[str, Sizes]) -> float:
    """Returns the ratio of the embedding's width, or else the largest ratio of any dimension."""
    pairs = [
        (p, small, owner)
        for name, p, owner in name_parameters(model)
        if (small := _find(known, name))
    ]
    pairs = [pair for pair in pairs if isinstance(pair[2], nn.Embedding)][:1] or pairs
    ratios = (
        a / b for p, small, _ in pairs for a, b in zip(p.shape, small.shape, strict=False) if b
    )
    return max(ratios, default=1.0)


def _role(name: str | Role) -> Role:
    if isinstance(name, Role):
        return name
    if name.upper() not in Role.__members__:
        known = ", ".join(role.name.lower() for role in Role)
        raise ValueError(f"no role is named {name!r}; there are: {known}")
    return Role[name.upper()]
