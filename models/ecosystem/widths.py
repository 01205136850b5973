"""muP for any module: roles come from comparing shapes with a base model; rates and sizes follow from roles.

A dimension that is larger than in the base model grows with width. With m = its ratio to the base, a
parameter's role and m give the powers of `models.mup`. Fan-in is exact: m is that of the dimension which a
matrix sums over, also where a model rounds its sizes.

A model that was not written for muP has no multipliers in its forward pass. The readout's multiplier 1/m is
therefore moved into its initial values and its learning rate, which computes the same (Tensor Programs V,
arXiv:2203.03466, section J.2.1): with W = W' / m, initial values are 1/m times W', AdamW's rate is 1/m and
SGD's 1/m^2 times that of W'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from delta_trn.models.mup import DECAYING, TABLES, Parametrization, Role

Base = nn.Module | Callable[[], nn.Module]
HEAD_NUMBERS = ("A_log", "dt_bias")  # one number per head of a Gated DeltaNet layer
MARK = "_delta_trn_initialized"


@dataclass(frozen=True)
class Scaled:
    """One parameter: its role, and m, the ratio of the dimension that counts for the role to the base's."""

    name: str
    parameter: nn.Parameter
    role: Role
    m: float


def parameter_groups(
    model: nn.Module,
    *,
    base: Base,
    lr: float,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    independent_weight_decay: bool = True,
    eps: float = 1e-8,
    table: Parametrization = "mup",
    roles: Mapping[str, str | Role] | None = None,
) -> list[dict[str, Any]]:
    """Returns groups for an optimizer of torch, with the learning rates of muP for any model.

        base            the same architecture at the width for which lr was found: a module (on the meta
                        device will do), or a function that makes one
        lr              learning rate of the base model
        optimizer       "adamw" or "sgd"; SGD's groups have no eps
        weight_decay    of matrices that read the width, at the base width: torch multiplies it by a
                        group's rate, so it is divided by the rate's factor, unless
                        independent_weight_decay is false
        table           "mup", "mup_original", "sp", ...: see `delta-trn parameters`
        roles           {pattern of names: role}, which goes before what is inferred: "embedding", "readout",
                        "hidden", "gate", "scalar", "vector", "constant"
        returns         dicts with params, names, role, lr, weight_decay and eps; each parameter once

    Raises ValueError for parameters whose role cannot be inferred, all of them by name.

        >>> from delta_trn import mup
        >>> def make(n):
        ...     return torch.nn.Sequential(torch.nn.Embedding(50, n), torch.nn.Linear(n, n))
        >>> groups = mup.parameter_groups(make(256), base=lambda: make(64), lr=4e-3)
        >>> [(g["role"], g["lr"]) for g in groups]
        [('embedding', 0.004), ('hidden', 0.001), ('vector', 0.004)]
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for scaled in scaled_parameters(model, base, roles):
        rule, m = TABLES[table][scaled.role], scaled.m
        power, epsilon = rule.lr(optimizer), rule.epsilon
        if scaled.role is Role.READOUT:
            power += rule.multiplier * (1 if optimizer == "adamw" else 2)
            epsilon -= rule.multiplier
        decay = weight_decay if scaled.role in DECAYING else 0.0
        if independent_weight_decay:
            decay /= m**power
        settings: dict[str, Any] = {"lr": lr * m**power, "weight_decay": decay}
        if optimizer == "adamw":
            settings["eps"] = eps * m**epsilon
        key = (scaled.role, *settings.values())
        empty: dict[str, Any] = {"params": [], "names": [], "role": scaled.role.name.lower(), **settings}
        group = groups.setdefault(key, empty)
        group["params"].append(scaled.parameter)
        group["names"].append(scaled.name)
    return list(groups.values())


@torch.no_grad()
def initialize(
    model: nn.Module,
    *,
    base: Base,
    table: Parametrization = "mup",
    roles: Mapping[str, str | Role] | None = None,
    readout_init: float = 1.0,
    loaded: bool = False,
) -> None:
    """Rescales the initial values of a model so that they have muP's sizes, seen from the base model's.

    Every parameter is multiplied so that its root mean square is that of the base model's times m to the
    power of the table. Whether a model draws matrices with std 0.02 at any width or with 1/sqrt(fan-in) then
    no longer matters. Taps of a Gated DeltaNet layer that are too small for its output norm to normalize
    (Qwen3-Next's, std 0.02) are drawn again, uniform within 1/sqrt(taps). The readout is multiplied by
    readout_init: with 0, which Tensor Programs V recommends, a model is the same function at every width.

    base must have values: give a function that makes the model, or a module that is not on the meta device.
    Raises ValueError if the model has loaded weights, unless `loaded`, and for a second call.

        >>> from delta_trn import mup
        >>> make = lambda width: torch.nn.Linear(width, width, bias=False)
        >>> model = make(1024)
        >>> mup.initialize(model, base=lambda: make(64))
        >>> abs(model.weight.std().item() - 64**-0.5 * 3**-0.5 / 4) < 1e-3
        True
    """
    if getattr(model, MARK, False):
        raise ValueError("this model is initialized for muP already; a second call would scale it twice")
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    if path and not loaded:
        raise ValueError(
            f"this model was loaded from {path!r}, and initialize() would scale its weights: leave it out, or"
            " pass loaded=True"
        )
    small = _make(base, "cpu")
    values = dict(small.named_parameters())
    if any(p.is_meta for p in values.values()):
        raise ValueError("base is on the meta device and has no values; pass a function that makes the model")
    for scaled in scaled_parameters(model, small, roles):
        rule = TABLES[table][scaled.role]
        power, factor = rule.init_std, 1.0
        if scaled.role is Role.READOUT:
            power, factor = power + rule.multiplier, readout_init
        size, wanted = _rms(scaled.parameter), factor * _rms(values[scaled.name]) * scaled.m**power
        if size > 0:
            scaled.parameter.mul_(wanted / size)
    for taps in small_taps(model):
        taps.uniform_(-(taps.shape[-1] ** -0.5), taps.shape[-1] ** -0.5)
    setattr(model, MARK, True)


def scaled_parameters(
    model: nn.Module, base: Base, roles: Mapping[str, str | Role] | None = None
) -> list[Scaled]:
    """Returns the role and ratio of every parameter. Raises ValueError that names those without a role.

    A compiled model and one in DistributedDataParallel are looked into: names are those of the model inside.
    """
    model = _inside(model)
    shapes = {name: tuple(p.shape) for name, p in _make(base, "meta").named_parameters()}
    patterns = {pattern: _role(role) for pattern, role in (roles or {}).items()}
    modules, readout = dict(model.named_modules()), _readout(model)
    rows, unknown = [], []
    for name, parameter in model.named_parameters():
        shape, smaller = tuple(parameter.shape), shapes.get(name)
        owner, _, attribute = name.rpartition(".")
        role, m = None, 1.0
        if smaller is not None and len(smaller) == len(shape) and all(map(int.__ge__, shape, smaller)):
            ratios = [a / b if b else 1.0 for a, b in zip(shape, smaller, strict=True)]
            role, m = _infer(modules[owner], attribute, ratios, parameter is readout)
            role = next((role for pattern, role in patterns.items() if fnmatch(name, pattern)), role)
        if role is None:
            unknown.append(f"{name} {shape}: the base model has {'none' if smaller is None else smaller}")
        else:
            rows.append(Scaled(name, parameter, role, _width(model, shapes) if role is Role.SCALAR else m))
    unused = [pattern for pattern in patterns if not any(fnmatch(row.name, pattern) for row in rows)]
    if unused:
        raise ValueError(f"roles {unused} match no parameter; names are like {rows[0].name if rows else '-'}")
    if unknown:
        lines = "\n  ".join(unknown)
        raise ValueError(f"no muP role for {len(unknown)} parameters; name them in roles={{...}}:\n  {lines}")
    return rows


def _inside(model: nn.Module) -> nn.Module:
    """Returns the model that torch.compile or DistributedDataParallel has wrapped, or else the model."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return _inside(inner) if isinstance(inner, nn.Module) else model


def small_taps(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the convolution weights of Gated DeltaNet layers that are below a tenth of 1/sqrt(taps)."""
    for layer in model.modules():
        convolution = getattr(layer, "conv1d", None)
        if hasattr(layer, "A_log") and isinstance(convolution, nn.Conv1d):
            taps = convolution.weight
            if 0 < _rms(taps) < 0.1 * taps.shape[-1] ** -0.5:
                yield taps


def _infer(
    module: nn.Module, attribute: str, ratios: list[float], is_readout: bool
) -> tuple[Role | None, float]:
    """Returns a parameter's role, None where shapes do not tell, and the ratio that counts for it."""
    growing = [ratio for ratio in ratios if ratio > 1]
    if isinstance(module, nn.Embedding):
        return (Role.EMBEDDING, ratios[1]) if ratios[0] == 1 else (None, 1.0)
    if is_readout:
        return (Role.READOUT, ratios[1]) if ratios[0] == 1 else (None, 1.0)
    if not growing:
        return (Role.SCALAR if attribute in HEAD_NUMBERS else Role.CONSTANT), 1.0
    depthwise = isinstance(module, nn.Conv1d) and not any(ratio > 1 for ratio in ratios[1:])
    if len(ratios) == 1 or depthwise:
        return Role.VECTOR, growing[0]
    out, fan_in = ratios[-2:]
    if len(ratios) > 3 or any(ratio > 1 for ratio in ratios[:-2]):
        return None, 1.0
    if fan_in > 1:
        return (Role.HIDDEN if out > 1 else Role.GATE), fan_in
    return Role.EMBEDDING, out


def find_readout(model: nn.Module) -> nn.Module | None:
    """Returns the module that reads the width and writes the vocabulary; None if the model has none.

    Models of transformers say which. In others it is the last linear layer with one output per row of an
    embedding.
    """
    find = getattr(model, "get_output_embeddings", None)
    if find is not None:
        return find()
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in rows]
    return heads[-1] if heads else None


def _readout(model: nn.Module) -> nn.Parameter | None:
    """Returns the weight of the model's readout. Raises ValueError if it is tied to an embedding."""
    weight = getattr(find_readout(model), "weight", None)
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    if any(weight is embedding for embedding in embeddings):
        raise ValueError(
            "the readout is tied to the embedding, which needs a multiplier on the logits; make the model "
            "with tie_word_embeddings=False"
        )
    return weight


def _width(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the ratio of the embedding's width, or else the largest ratio of any dimension."""
    pairs = [(p, shapes[name]) for name, p in model.named_parameters() if name in shapes]
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    pairs = [(p, small) for p, small in pairs if p in tables][:1] or pairs
    return max((a / b for p, small in pairs for a, b in zip(p.shape, small, strict=True) if b), default=1.0)


def _make(base: Base, device: str) -> nn.Module:
    if isinstance(base, nn.Module):
        return base
    with torch.device(device):
        return base()


def _role(name: str | Role) -> Role:
    if isinstance(name, Role):
        return name
    if name.upper() not in Role.__members__:
        known = ", ".join(role.name.lower() for role in Role)
        raise ValueError(f"no role is named {name!r}; there are: {known}")
    return Role[name.upper()]


def _rms(x: torch.Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()
