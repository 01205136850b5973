"""muP for any module: rates and sizes follow from the roles of its parameters (`roles`).

With m = the ratio to the base model, a parameter's role and m give the powers of `models.mup`.

A model that was not written for muP has no multipliers in its forward pass. An untied readout's
multiplier 1/m is therefore moved into its initial values and its learning rate, which computes the
same (Tensor Programs V, arXiv:2203.03466, section J.2.1): with W = W' / m, initial values are 1/m
times W', AdamW's rate is 1/m and SGD's 1/m^2 times that of W'. A tied readout shares its values
with the embedding, whose size and rate do not depend on m: its multiplier has to be in the forward
pass, where `scale_readout` puts it.

Some models multiply with powers of the width themselves (`layouts.embedding_power`,
`layouts.readout_power`). That factor, over the base's, is taken out of the parameter before it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from delta_trn.models.ecosystem.layouts import embedding_power, readout_power
from delta_trn.models.ecosystem.roles import (
    Base,
    Roles,
    Scaled,
    Sizes,
    TiedReadout,
    describe,
    find_inside,
    find_readout,
    is_tied,
    make_model,
    name_parameters,
    rms,
    scaled_parameters,
)
from delta_trn.models.mup import DECAYING, TABLES, Parametrization, Role

# roles of matrices, whose initial size may follow a law of width
SIZED = frozenset({Role.EMBEDDING, Role.READOUT, Role.HIDDEN, Role.GATE})
MISSING = Sizes((), None)
MARK = "_delta_trn_initialized"
Adjustment = Literal["original", "match_rms_adamw"]


def parameter_groups(
    model: nn.Module,
    *,
    base: Base,
    lr: float,
    optimizer: str = "adamw",
    adjust_lr_fn: Adjustment = "original",
    weight_decay: float = 0.0,
    independent_weight_decay: bool = True,
    eps: float = 1e-8,
    table: Parametrization = "mup",
    roles: Roles | None = None,
    wider: nn.Module | Callable[[], nn.Module] | None = None,
    may_be_tied: bool = False,
) -> list[dict[str, Any]]:
    """Returns groups for an optimizer of torch, with the learning rates of muP for any model.

        base            the same architecture at the width for which lr was found: a module (on the
                        meta device will do), a function that makes one, a file of `save_base`, or
                        shapes by name
        lr              learning rate of the base model
        optimizer       "adamw", "sgd" or "muon"; SGD's groups have no eps. Muon's have use_muon:
                        true for hidden matrices, which are for torch.optim.Muon, the others for
                        AdamW
        adjust_lr_fn    muon: what torch.optim.Muon is given under this name
        weight_decay    of matrices that read the width, at the base width: torch multiplies it by a
                        group's rate, so it is divided by the rate's factor, unless
                        independent_weight_decay is false
        table           "mup", "mup_original", "sp", ...: see `delta-trn parameters`
        roles           {pattern of names: role}, which goes before what is inferred: "embedding",
                        "readout", "hidden", "gate", "scalar", "vector", "constant"
        wider           the model at any larger width: at the base width nothing grows, so only this
                        tells which matrices decay, and which are Muon's
        may_be_tied     whether a tied readout may still be without its multiplier
        returns         dicts with params, names, role, lr, weight_decay and eps; each parameter
                        once

    Raises ValueError for parameters whose role cannot be inferred, all of them by name.

        >>> from delta_trn import mup
        >>> def make(n):
        ...     return torch.nn.Sequential(torch.nn.Embedding(50, n), torch.nn.Linear(n, n))
        >>> groups = mup.parameter_groups(make(256), base=lambda: make(64), lr=4e-3)
        >>> [(g["role"], g["lr"]) for g in groups]
        [('embedding', 0.004), ('hidden', 0.001), ('vector', 0.004)]
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    if weight_decay or optimizer == "muon":
        roles = _roles_at_base(model, base, roles, wider)
    for scaled in scaled_parameters(model, base, roles, may_be_tied=may_be_tied):
        rule, m = TABLES[table][scaled.role], scaled.m
        rule.lr(optimizer)  # refuses an optimizer without a column
        muon = optimizer == "muon" and scaled.role is Role.HIDDEN and scaled.parameter.dim() == 2
        power, epsilon = rule.lr("sgd" if optimizer == "sgd" else "adamw"), rule.epsilon
        if scaled.role is Role.READOUT:
            power += rule.multiplier * (2 if optimizer == "sgd" else 1)
            epsilon -= rule.multiplier
        # what the model multiplies with itself is taken out of the parameter, in the same way
        own = 1.0 if table == "sp" else scaled.factor
        factor = m**power / own ** (2 if optimizer == "sgd" else 1)
        if muon:
            factor = 1.0 if rule.lr_muon is None else muon_factor(scaled, adjust_lr_fn)
        decay = weight_decay if scaled.role in DECAYING else 0.0
        if independent_weight_decay:
            decay /= factor
        settings: dict[str, Any] = {"lr": lr * factor, "weight_decay": decay}
        if optimizer == "muon":
            settings["use_muon"] = muon
        if optimizer != "sgd" and not muon:
            settings["eps"] = eps * m**epsilon * own
        key = (scaled.role, *settings.values())
        empty: dict[str, Any] = {
            "params": [],
            "names": [],
            "role": scaled.role.name.lower(),
            **settings,
        }
        group = groups.setdefault(key, empty)
        group["params"].append(scaled.parameter)
        group["names"].append(scaled.name)
    return list(groups.values())


def _roles_at_base(
    model: nn.Module,
    base: Base,
    roles: Roles | None,
    wider: nn.Module | Callable[[], nn.Module] | None,
) -> Roles | None:
    """Returns roles that a wider model tells, if the model has the base's shapes;
    else those given.
    """
    known = describe(base, "meta")
    if any(
        known.get(name, MISSING).shape != p.shape
        for name, p, _ in name_parameters(find_inside(model))
    ):
        return roles
    if wider is None:
        raise ValueError(
            "the model has the base's shapes, which do not tell the matrices that decay or are "
            "Muon's: pass wider=..., a function that makes the model at any larger width"
        )
    found = scaled_parameters(make_model(wider, "meta"), known, roles)
    return {**(roles or {}), **{row.name: row.role for row in found}}


def muon_factor(scaled: Scaled, adjust_lr_fn: Adjustment) -> float:
    """Returns the factor on Muon's rate of a matrix W [rows, columns].

    Muon's step is rate * adjustment(rows, columns) times a matrix whose singular values are about
    1. What W computes changes by one size at every width if those of the step go as sqrt(rows /
    columns), the spectral condition of arXiv:2310.17813. So with

        "original"           adjustment = sqrt(max(1, rows / columns))
        "match_rms_adamw"    adjustment = 0.2 sqrt(max(rows, columns))
        factor = sqrt(rows / columns) / adjustment(rows, columns), over the same of the base's W

    a square matrix has the factor 1 with the first and 1/sqrt(m) with the second.
    """
    if adjust_lr_fn not in ("original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}: expected 'original' or 'match_rms_adamw'")

    def of(rows: int, columns: int) -> float:
        original = adjust_lr_fn == "original"
        return (
            rows / columns / (max(1.0, rows / columns) if original else max(rows, columns))
        ) ** 0.5

    rows, columns = scaled.parameter.shape
    return of(rows, columns) / of(*scaled.base.shape)


@torch.no_grad()
def initialize(
    model: nn.Module,
    *,
    base: Base,
    table: Parametrization = "mup",
    roles: Roles | None = None,
    readout_init: float = 1.0,
    loaded: bool = False,
) -> None:
    """Rescales the initial values of a model so that they have muP's sizes, seen from the base
    model's.

    Hidden matrices, gates, embeddings and readouts are multiplied so that their root mean square is
    that of the base model's times m to the power of the table: it does not matter whether a model
    draws matrices with std 0.02 at any width or with 1/sqrt(fan-in). If one of these laws explains
    both sizes, the factor is that of the law, without the scatter of the values drawn. Biases that
    are drawn within 1/sqrt(fan-in), as torch's are, keep the base's size. All else stays as it is,
    as does everything where m = 1. The readout is multiplied by readout_init: with 0, which Tensor
    Programs V recommends, a model is the same function at every width.

    base must have values: give a function that makes the model, a module that is not on the meta
    device, or a file of `save_base`. Raises ValueError if the model has loaded weights, unless
    `loaded`, and for a second call. Warns of convolution taps that `draw_taps` would draw again.

        >>> from delta_trn import mup
        >>> make = lambda width: torch.nn.Linear(width, width, bias=False)
        >>> model = make(1024)
        >>> mup.initialize(model, base=lambda: make(64))
        >>> abs(model.weight.std().item() - 64**-0.5 * 3**-0.5 / 4) < 1e-3
        True
    """
    if getattr(model, MARK, False):
        raise ValueError(
            "this model is initialized for muP already; a second call would scale it twice"
        )
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    if path and not loaded:
        raise ValueError(
            f"this model was loaded from {path!r}, and initialize() would scale its weights: leave "
            "it out, or pass loaded=True"
        )
    if readout_init != 1 and is_tied(find_inside(model)):
        raise ValueError(
            f"readout_init={readout_init}: the readout is tied, and would take the embedding with "
            "it"
        )
    small = describe(base, "cpu")
    if any(sizes.rms is None for sizes in small.values()):
        raise ValueError(
            "base is on the meta device or made of shapes, and has no values; pass a function that "
            "makes the model"
        )
    rows = {scaled.parameter: scaled for scaled in scaled_parameters(model, small, roles)}
    # of every matrix, found before any is scaled
    laws = {p: _law(row) for p, row in rows.items() if row.role in SIZED}
    weights: dict[nn.Parameter, nn.Parameter] = {}  # of a bias, its matrix
    for layer in model.modules():
        pair = getattr(layer, "bias", None), getattr(layer, "weight", None)
        if isinstance(pair[0], nn.Parameter) and isinstance(pair[1], nn.Parameter):
            weights[pair[0]] = pair[1]
    for p, scaled in rows.items():
        rule, weight = TABLES[table][scaled.role], weights.get(p)
        if scaled.role in SIZED:
            power, factor = rule.init_std, 1.0
            if scaled.role is Role.READOUT:
                power, factor = power + rule.multiplier, readout_init
            own = 1.0 if table == "sp" else scaled.factor
            p.mul_(factor * laws[p] * scaled.m**power / own)
        elif weight is not None and weight in laws and laws[weight] == rows[weight].m ** 0.5:
            p.mul_(laws[weight])
    if next(small_taps(model), None) is not None:
        warnings.warn(
            "taps of a Gated DeltaNet layer are so small that the epsilon of its output norm "
            "decides; call mup.draw_taps(model) at every width, that of the base model too",
            stacklevel=3,
        )
    setattr(model, MARK, True)


def _law(scaled: Scaled) -> float:
    """Returns the size of the base's parameter over this one's; 1 where one is 0, and at m = 1.

    The ratio has a relative error of sqrt(1/2n + 1/2n'), n and n' the numbers of values: one of the
    laws 1 and sqrt(m) within four of those is taken for it.
    """
    size, wanted, m = rms(scaled.parameter), scaled.base.rms or 0.0, scaled.m
    if m == 1 or size * wanted == 0:
        return 1.0
    ratio, values = wanted / size, torch.Size(scaled.base.shape).numel()
    error = 4 * (0.5 / values + 0.5 / scaled.parameter.numel()) ** 0.5
    near = min((1.0, m**0.5), key=lambda law: abs(math.log(ratio / law)))
    return near if abs(ratio / near - 1) <= error else ratio


@torch.no_grad()
def draw_taps(model: nn.Module) -> None:
    """Draws small taps of Gated DeltaNet layers again, uniform within 1/sqrt(taps).

    With Qwen3-Next's std of 0.02 a layer's output is so small that the epsilon of its norm decides.
    This changes the model: call it for the base model, too.
    """
    for taps in small_taps(model):
        taps.uniform_(-(taps.shape[-1] ** -0.5), taps.shape[-1] ** -0.5)


def small_taps(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the convolution weights of Gated DeltaNet layers
    that are below a tenth of 1/sqrt(taps).
    """
    for layer in model.modules():
        convolution = getattr(layer, "conv1d", None)
        if hasattr(layer, "A_log") and isinstance(convolution, nn.Conv1d):
            taps = convolution.weight
            if 0 < rms(taps) < 0.1 * taps.shape[-1] ** -0.5:
                yield taps


def scale_readout(model: nn.Module, *, base: Base, table: Parametrization = "mup") -> None:
    """Puts muP's multiplier 1/m before a readout that is tied to the embedding.

    The readout module is replaced by a `TiedReadout` with the same weight, under the same name. It
    is part of the model's code and not of its weights: a model that is loaded again needs the call
    again, and a loss that reads `lm_head.weight` past the module does not see it. Raises ValueError
    for a readout that is not tied, or scaled already.
    """
    inner = find_inside(model)
    readout = find_readout(inner)
    if readout is None or not is_tied(inner) or isinstance(readout, TiedReadout):
        raise ValueError(
            "the readout is scaled already"
            if isinstance(readout, TiedReadout)
            else "the model has no readout that is tied to its embedding: initialize and "
            "parameter_groups do it"
        )
    known = describe(base, "meta")
    name, weight, owner = next(row for row in name_parameters(inner) if row[1] is readout.weight)
    if name not in known:
        raise ValueError(f"the base model has no {name}, which the readout is tied to")
    m = weight.shape[1] / known[name].shape[1]
    # the weights are smaller by what the model multiplies its embedding with (Gemma), and what it
    # multiplies before the readout is a part of the multiplier (T5)
    own = embedding_power(owner) - readout_power(inner) if table != "sp" else 0.0
    multiplier = m ** (TABLES[table][Role.EMBEDDING].multiplier + own)
    scaled = TiedReadout(weight, getattr(readout, "bias", None), multiplier)
    place = next(name for name, module in inner.named_modules() if module is readout)
    parent, _, attribute = place.rpartition(".")
    setattr(inner.get_submodule(parent), attribute, scaled)
