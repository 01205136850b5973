"""One plan of muP for any model: what every parameter gets, why, and how a model gets it.

    plan = mup.plan(model, base=lambda: make(64), optimizer="adamw", lr=4e-3)
    print(plan)             # a table: role, m, rate, initial size, epsilon, decay, multiplier, why
    plan.apply()            # multipliers of the forward pass: tied readout, depth, attention's scale
    plan.initialize()       # sizes of initial values
    optimizer = plan.optimizer()

Width is `models.mup`'s tables, by the roles of `roles`. Three further rules are off unless asked for:

    depth       CompleteP, arXiv:2505.01618, alpha = 1: with l = layers now / at the base, what every
                branch adds to the stream is multiplied by 1/l, and AdamW's epsilon within blocks too;
                SGD's rates within blocks by l, which is our derivation
    tokens, batch   arXiv:2512.22382, for AdamW: with r = (batch / base) / (tokens / base) rates are
                multiplied by sqrt(r), epsilon by 1/sqrt(r), 1 - beta by r, and independent decay by
                sqrt(r)

Multipliers are the model's code and not its weights. `apply` therefore leaves a buffer in the
model, so that `load_state_dict` refuses its weights in a model without the call, by name; `fold`
writes the multipliers into the weights and takes all of it away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from delta_trn.models.ecosystem.layouts import find_layout
from delta_trn.models.ecosystem.roles import (
    Base,
    Roles,
    Sizes,
    TiedReadout,
    describe,
    find_inside,
    find_readout,
    is_tied,
    make_model,
    save_base,
    scaled_parameters,
)
from delta_trn.models.ecosystem.widths import (
    Adjustment,
    initialize,
    parameter_groups,
    scale_readout,
)
from delta_trn.models.mup import TABLES, Parametrization, Role

BUFFER = "mup_multipliers"  # what load_state_dict names where `apply` was not called
FUSED = ("c_attn", "in_proj_qkvz", "in_proj_weight", "qkv", "query_key_value", "qkv_proj", "Wqkv")
Pair = tuple[float, float]
Modes = Literal["independent", "with_rate"]
REASONS = {
    Role.EMBEDDING: "a table of rows of the width",
    Role.READOUT: "sums over the width, writes the vocabulary",
    Role.HIDDEN: "sums over the width, writes the width",
    Role.GATE: "sums over the width, writes what does not grow",
    Role.SCALAR: "one number per head",
    Role.VECTOR: "one number per channel",
    Role.CONSTANT: "does not grow with the width",
}


@dataclass(frozen=True)
class Row:
    """What one parameter gets, as factors on what the base model has.

    init        on its initial size; None where initial values stay as the model drew them
    multiplier  on what it computes, in the forward pass
    """

    parameter: str
    role: str
    m: float
    rate: float
    init: float | None
    epsilon: float
    decay: float
    multiplier: float
    why: str


@dataclass(frozen=True)
class Settings:
    """What a plan was made with, besides the model and its base."""

    optimizer: str = "adamw"
    lr: float = 1e-3
    depth: Pair | None = None
    branches: tuple[str, ...] = ()
    tokens: Pair | None = None
    batch: Pair | None = None
    weight_decay: Modes = "independent"
    table: Parametrization = "mup"
    adjust_lr_fn: Adjustment = "original"
    readout_init: float = 1.0
    roles: Mapping[str, str] | None = None
    heads: Mapping[str, int] | None = None  # sizes of the base's attention heads

    @property
    def layers(self) -> float:
        """The ratio of layers to the base's."""
        return 1.0 if self.depth is None else self.depth[1] / self.depth[0]

    @property
    def data(self) -> float:
        """The ratio of batches over that of tokens."""
        (b0, b), (t0, t) = self.batch or (1.0, 1.0), self.tokens or (1.0, 1.0)
        return (b / b0) / (t / t0)


class Plan:
    """What muP gives every parameter of a model."""

    def __init__(self, model: nn.Module, base: Base, settings: Settings, wider: Any = None) -> None:
        self.model, self.base, self.settings, self.wider = model, base, settings, wider
        self.inner = find_inside(model)
        _require(settings)
        self.branches = dict(_branches(self.inner, settings))
        self.attention = dict(_attention(self.inner, settings.heads or {}, settings.table))
        self.rows = tuple(self._rows())

    def __str__(self) -> str:
        heads = ("parameter", "role", "m", "rate", "init", "epsilon", "decay", "multiplier", "why")
        lines = [heads, *([_cell(x) for x in asdict(row).values()] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        text = [
            "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*text, *self._notes()])

    def _notes(self) -> Iterator[str]:
        s = self.settings
        if s.depth:
            yield (
                f"depth: {len(self.branches)} branches times {1 / s.layers:g} (CompleteP, "
                "arXiv:2505.01618)"
            )
        if s.data != 1:
            yield (
                f"tokens and batch: rates times {s.data**0.5:g}, 1 - beta times {s.data:g} "
                "(arXiv:2512.22382)"
            )
        for name, factor in self.attention.items():
            yield f"attention: {name}'s scale times {factor:g}, since its heads grow (1/d)"

    def _rows(self) -> Iterator[Row]:
        s = self.settings
        found = scaled_parameters(
            self.inner, describe(self.base, "meta"), s.roles, may_be_tied=True
        )
        groups = {
            name: group
            for group in self.groups(lr=1.0, weight_decay=1.0, eps=1.0, _checked=False)
            for name in group["names"]
        }
        tied = is_tied(self.inner)
        readout = getattr(find_readout(self.inner), "weight", None)
        for x in found:
            rule, group = TABLES[s.table][x.role], groups[x.name]
            size = None
            if x.role in (Role.EMBEDDING, Role.READOUT, Role.HIDDEN, Role.GATE):
                size = x.m**rule.init_std / (1.0 if s.table == "sp" else x.factor)
                size *= x.m**rule.multiplier * s.readout_init if x.role is Role.READOUT else 1.0
            multiplier = 1.0
            if tied and x.parameter is readout:
                multiplier = x.m**rule.multiplier
            owner = x.name.rpartition(".")[0]
            multiplier *= 1 / s.layers if owner in self.branches else 1.0
            why = "named by the caller" if x.named else f"{x.module}: {REASONS[x.role]}"
            if group.get("use_muon"):
                why += "; by Muon"
                if any(part in x.name for part in FUSED):
                    why += ", several matrices in one, orthogonalized whole"
            elif s.optimizer == "muon" and x.role is Role.HIDDEN:
                why += f"; {x.parameter.dim()} dimensions, so by AdamW"
            yield Row(
                x.name, x.role.name.lower(), x.m, group["lr"], size, group.get("eps", 1.0),
                group["weight_decay"], multiplier, why,
            )  # fmt: skip

    def groups(
        self,
        *,
        lr: float | None = None,
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        _checked: bool = True,
    ) -> list[dict[str, Any]]:
        """Returns groups for an optimizer of torch, as `parameter_groups` does.

        lr              of the base model; None: the plan's
        weight_decay    of the base model

        Raises ValueError where the model needs `apply` and has not got it.
        """
        s = self.settings
        if _checked:
            self._require_applied()
        made = parameter_groups(
            self.inner,
            base=self.base,
            lr=s.lr if lr is None else lr,
            optimizer=s.optimizer,
            adjust_lr_fn=s.adjust_lr_fn,
            weight_decay=weight_decay,
            independent_weight_decay=s.weight_decay == "independent",
            eps=eps,
            table=s.table,
            roles=s.roles,
            wider=self.wider,
            may_be_tied=True,
        )
        within = _block_prefixes(self.branches)
        if s.layers != 1:
            made = [part for group in made for part in _split(group, within)]
        for group in made:
            if s.layers != 1 and group["names"][0].startswith(within):
                if "eps" in group:
                    group["eps"] /= s.layers
                elif s.optimizer == "sgd":
                    group["lr"] *= s.layers
            if s.data != 1:
                group["lr"] *= s.data**0.5
                group["eps"] /= s.data**0.5
                if s.weight_decay == "independent":
                    group["weight_decay"] *= s.data**0.5
        return made

    def betas(self, beta1: float = 0.9, beta2: float = 0.95) -> tuple[float, float]:
        """Returns AdamW's betas for these tokens and batches, from those at the base."""
        r = self.settings.data
        if (1 - beta1) * r >= 1:
            raise ValueError(
                f"batch over tokens is {r:g} times the base's, which makes beta1 = "
                f"{1 - (1 - beta1) * r:g}; expected above 0: give smaller batches or more tokens"
            )
        return 1 - (1 - beta1) * r, 1 - (1 - beta2) * r

    def optimizer(
        self, *, lr: float | None = None, weight_decay: float = 0.0, **options: Any
    ) -> torch.optim.Optimizer:
        """Returns AdamW, SGD, or Muon with AdamW for what Muon does not move, with the plan's
        groups; `options` go to AdamW or SGD.
        """
        groups = self.groups(lr=lr, weight_decay=weight_decay, eps=options.pop("eps", 1e-8))
        if self.settings.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=groups[0]["lr"], **options)
        options["betas"] = self.betas(*options.pop("betas", (0.9, 0.95)))
        if self.settings.optimizer == "adamw":
            return torch.optim.AdamW(groups, **options)
        return MuonAndAdamW(groups, self.settings.adjust_lr_fn, options)

    def initialize(self, *, loaded: bool = False) -> None:
        """Rescales initial values, as `mup.initialize` does. The base must have values."""
        self._require_applied()
        s = self.settings
        initialize(
            self.inner,
            base=self.base,
            table=s.table,
            roles=s.roles,
            readout_init=s.readout_init,
            loaded=loaded,
        )

    @property
    def multipliers(self) -> dict[str, float]:
        """The multipliers of the forward pass by the name of their module."""
        found = dict.fromkeys(self.branches, 1 / self.settings.layers)
        found |= self.attention
        readout = find_readout(self.inner)
        if readout is not None and is_tied(self.inner):
            name = _name_of(readout, dict(self.inner.named_modules()))
            found[name] = readout.multiplier if isinstance(readout, TiedReadout) else math.nan
        return found

    def apply(self) -> Plan:
        """Puts the multipliers into the forward pass and a buffer into the model, and returns the
        plan. Raises ValueError for a second call.
        """
        if hasattr(self.inner, BUFFER):
            raise ValueError("the multipliers are in this model already; apply() once")
        if is_tied(self.inner) and not isinstance(find_readout(self.inner), TiedReadout):
            scale_readout(self.inner, base=self.base, table=self.settings.table)
        modules = dict(self.inner.named_modules())
        for name in self.branches:
            modules[name].register_forward_hook(_Multiply(1 / self.settings.layers))
        for name, factor in self.attention.items():
            modules[name].scaling = modules[name].scaling * factor  # type: ignore[assignment,operator]
        if values := [*self.multipliers.values()]:
            self.inner.register_buffer(BUFFER, torch.tensor(values))
        return self

    def fold(self) -> nn.Module:
        """Writes the multipliers into the weights, takes them out of the forward pass, and returns
        the model, which computes the same without this package.

        A multiplier that is a power of two changes no bit. A tied readout gets weights of its own.
        Raises ValueError where nothing linear takes a multiplier.
        """
        if not hasattr(self.inner, BUFFER):
            if self.multipliers:
                raise ValueError("the multipliers are not in this model: call apply() first")
            return self.model
        with torch.no_grad():
            self._fold()
        delattr(self.inner, BUFFER)
        return self.model

    def _fold(self) -> None:
        modules = dict(self.inner.named_modules())
        for name in self.attention:
            query = _query(modules[name], name)
            for p in query.parameters(recurse=False):
                p.mul_(self.attention[name])
            modules[name].scaling = modules[name].scaling / self.attention[name]  # type: ignore[assignment,operator]
        for name in self.branches:
            branch = modules[name]
            if find_layout(branch, "weight", 2) is None or not hasattr(branch, "weight"):
                raise ValueError(
                    f"{name} is a {type(branch).__name__}, which has no weight that takes a "
                    "multiplier: name the linear layer at its end in branches=..."
                )
        for name in self.branches:
            for p in modules[name].parameters(recurse=False):
                p.mul_(1 / self.settings.layers)
            _remove_factors(modules[name])
        readout = find_readout(self.inner)
        if isinstance(readout, TiedReadout):
            rows, width = readout.weight.shape
            own = nn.Linear(
                width, rows, bias=readout.bias is not None, device=readout.weight.device
            )
            own.weight = nn.Parameter(readout.weight.detach() * readout.multiplier)
            own.register_parameter("bias", readout.bias)
            parent, _, attribute = _name_of(readout, modules).rpartition(".")
            setattr(self.inner.get_submodule(parent), attribute, own)
            config = getattr(self.inner, "config", None)
            if hasattr(config, "tie_word_embeddings"):
                config.tie_word_embeddings = False  # type: ignore[union-attr]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the settings and the base's shapes and sizes to a JSON file."""
        file = Path(path)
        save_base(self.base, file)
        tree = {"settings": asdict(self.settings), "base": json.loads(file.read_text("utf-8"))}
        file.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")

    def _require_applied(self) -> None:
        if not hasattr(self.inner, BUFFER) and self.multipliers:
            names = ", ".join([*self.multipliers][:3])
            raise ValueError(
                f"{names} need multipliers in the forward pass, which this model does not have: "
                "call plan.apply() first, after every time that the model is made or loaded"
            )


def plan(
    model: nn.Module,
    *,
    base: Base,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    depth: Pair | None = None,
    branches: Sequence[str] = (),
    tokens: Pair | None = None,
    batch: Pair | None = None,
    weight_decay: Modes = "independent",
    table: Parametrization = "mup",
    adjust_lr_fn: Adjustment = "original",
    readout_init: float = 1.0,
    roles: Roles | None = None,
    wider: Any = None,
) -> Plan:
    """Returns what muP gives every parameter of a model; changes nothing yet.

        base            the same architecture at the width for which lr was found: see
                        `parameter_groups`
        optimizer       "adamw", "sgd" or "muon"
        lr              learning rate of the base model
        depth           (layers of the base, layers of this model)
        branches        patterns of names of the modules whose output is added to the residual
                        stream, such as "*.o_proj": depth needs them
        tokens, batch   (at the base, now), for AdamW
        weight_decay    "independent": a step takes the same share at every width; "with_rate": the
                        share falls as the rate does
        table, adjust_lr_fn, roles, wider       see `parameter_groups`
        readout_init    a factor on the readout's initial values

    Raises ValueError for what cannot be planned, by name.

        >>> from delta_trn import mup
        >>> make = lambda n: torch.nn.Sequential(torch.nn.Embedding(9, n), torch.nn.Linear(n, n))
        >>> print(mup.plan(make(256), base=lambda: make(64)))  # doctest: +ELLIPSIS
        parameter  role       m  rate  init  epsilon  decay  multiplier  why
        0.weight   embedding  4  1     1     0.25     0      1           Embedding: a table...
        1.weight   hidden     4  0.25  0.5   0.25     4      1           Linear: sums over...
        1.bias     vector     4  1     -     0.25     0      1           Linear: one number...
    """
    own = {k: r.name.lower() if isinstance(r, Role) else r for k, r in (roles or {}).items()}
    settings = Settings(
        optimizer, lr, depth, tuple(branches), tokens, batch, weight_decay, table, adjust_lr_fn,
        readout_init, own or None, _head_sizes(base),
    )  # fmt: skip
    return Plan(model, base, settings, wider)


def load_plan(path: str | PathLike[str], model: nn.Module, *, wider: Any = None) -> Plan:
    """Returns a plan of `Plan.save` for a model. Raises ValueError for any other file."""
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
        kept = tree["settings"]
        for name in ("depth", "tokens", "batch", "branches"):
            kept[name] = None if kept[name] is None else tuple(kept[name])
        settings = Settings(**kept)
        sizes = {name: (tuple(shape), rms) for name, (shape, rms) in tree["base"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(path)!r}: {error!r}; expected a file of plan.save") from None
    return Plan(model, {name: Sizes(*size) for name, size in sizes.items()}, settings, wider)


class MuonAndAdamW(torch.optim.Optimizer):
    """Moves groups with use_muon by torch.optim.Muon and the others by AdamW."""

    def __init__(
        self, groups: list[dict[str, Any]], adjust_lr_fn: Adjustment, options: dict[str, Any]
    ) -> None:
        super().__init__(groups, {"lr": groups[0]["lr"]})
        # the parts have this optimizer's groups themselves: a schedule that sets a rate sets theirs
        by_muon = [group for group in self.param_groups if group["use_muon"]]
        others = [group for group in self.param_groups if not group["use_muon"]]
        self.parts: list[torch.optim.Optimizer] = []
        if by_muon:
            self.parts.append(torch.optim.Muon(by_muon, adjust_lr_fn=adjust_lr_fn))
        if others:
            self.parts.append(torch.optim.AdamW(others, **options))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Moves all parameters; `closure` computes the loss anew, as in torch's optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of both parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the states of both parts back."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class _Multiply:
    """Multiplies what a module returns; of several tensors the first."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output * self.factor
        return type(output)((output[0] * self.factor, *output[1:]))


def _remove_factors(module: nn.Module) -> None:
    hooks = module._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Multiply)]:
        del hooks[key]


def _name_of(module: nn.Module, modules: Mapping[str, nn.Module]) -> str:
    return next(name for name, m in modules.items() if m is module)


def _require(s: Settings) -> None:
    """Raises ValueError for settings that mean nothing together."""
    for name in ("depth", "tokens", "batch"):
        pair = getattr(s, name)
        if pair is not None and not (len(pair) == 2 and min(pair) > 0):
            raise ValueError(f"{name}={pair}: expected (at the base, now), both above 0")
    if s.weight_decay not in ("independent", "with_rate"):
        raise ValueError(
            f"weight_decay={s.weight_decay!r}: expected 'independent' or 'with_rate'; the "
            "coefficient goes to groups(weight_decay=...)"
        )
    if bool(s.depth) != bool(s.branches):
        raise ValueError(
            f"depth={s.depth}, branches={s.branches}: depth needs the modules whose output is added "
            "to the residual stream, such as branches=['*.o_proj', '*.down_proj'], and they need it"
        )
    if (s.tokens or s.batch) and s.optimizer != "adamw":
        raise ValueError(
            f"tokens={s.tokens}, batch={s.batch}: the rule of arXiv:2512.22382 is AdamW's, and not "
            f"{s.optimizer}'s; leave them out and tune the rate at this number of tokens and batch"
        )


def _branches(model: nn.Module, s: Settings) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) of what is added to the stream. Raises ValueError for a pattern without
    a module.
    """
    names = dict(model.named_modules())
    for pattern in s.branches:
        found = [name for name in names if fnmatch(name, pattern)]
        if not found:
            raise ValueError(
                f"branches: {pattern!r} matches no module; names are like {[*names][-1]}"
            )
        yield from ((name, names[name]) for name in found)


def _block_prefixes(branches: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Returns what names of parameters begin with inside of the blocks of the branches."""
    found = set()
    for name in branches:
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        found.add(".".join(parts[: numbers[0] + 1] if numbers else parts) + ".")
    return tuple(sorted(found))


def _split(group: dict[str, Any], within: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yields the part of a group that is inside of blocks, and the rest."""
    pairs = list(zip(group["names"], group["params"], strict=True))
    for inside in (True, False):
        part = [pair for pair in pairs if pair[0].startswith(within) is inside]
        if part:
            yield {**group, "names": [n for n, _ in part], "params": [p for _, p in part]}


def _attention(
    model: nn.Module, heads: Mapping[str, int], table: Parametrization
) -> Iterator[tuple[str, float]]:
    """Yields (name, factor) of attention layers whose heads are larger than the base's. Raises
    ValueError where the base does not say how large its heads are.
    """
    power = TABLES[table].attention
    for name, module in _attention_layers(model):
        small = heads.get(name, heads.get(_any_layer(name)))
        if small is None:
            raise ValueError(
                f"the base does not say how large the heads of {name} are, which decides its scale: "
                "give base= as a function or a module, or load a file of plan.save"
            )
        if module.head_dim > small:  # type: ignore[operator]
            yield name, (module.head_dim / small) ** power  # type: ignore[operator]


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields attention layers that say their size of heads and their scale, as transformers' do."""
    for name, module in model.named_modules():
        size, scaling = getattr(module, "head_dim", None), getattr(module, "scaling", None)
        if isinstance(size, int) and isinstance(scaling, float) and hasattr(module, "q_proj"):
            yield name, module


def _head_sizes(base: Base) -> dict[str, int]:
    """Returns the size of heads of a base's attention layers by name, and by name without the
    numbers of layers; none of a base that has no modules.
    """
    if isinstance(base, (str, PathLike, Mapping)):
        return {}
    sizes: dict[str, int] = {}
    for name, module in _attention_layers(find_inside(make_model(base, "meta"))):
        sizes |= dict.fromkeys((name, _any_layer(name)), module.head_dim)  # type: ignore[arg-type]
    return sizes


def _any_layer(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _query(module: nn.Module, name: str) -> nn.Module:
    """Returns the layer that makes queries. Raises ValueError where a norm stands behind it."""
    if getattr(module, "q_norm", None) is not None:
        raise ValueError(
            f"{name} normalizes its queries, which takes a multiplier out of q_proj again: keep "
            "plan.apply() for this model, and do not fold it"
        )
    return module.q_proj  # type: ignore[return-value]


def _cell(x: object) -> str:
    return "-" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)
