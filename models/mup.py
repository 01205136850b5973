"""How every parameter scales with width: one table of exponents for each parametrization.

With m = width / base_width, a parameter of a role gets

    initial std     initializer_range * m ** init_std
    multiplier      m ** multiplier            on what it computes, in the forward pass
    learning rate   lr * m ** lr_adamw         or lr_sgd

so at m = 1 every table is the standard parametrization. Sources: TP-V is Tensor Programs V, arXiv:2203.03466, table 8;
GDN is arXiv:2606.04048, tables 1 and 2. Norm gains and convolution taps are not in the paper's tables: they are
vector-like, so TP-V's row holds; the paper's code gives them hidden's learning rate, as "mup_authors" does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from models.language_model import DeltaForCausalLM


class Role(Enum):
    """What a parameter maps from and to, and how many of its dimensions grow with width."""

    EMBEDDING = ("vocabulary to width, also as the tied readout", 1)
    READOUT = ("width to vocabulary, untied", 1)
    HIDDEN = ("width to width: projections, SwiGLU", 2)
    GATE = ("width to one number a head: the decay's and beta's projections", 1)
    SCALAR = ("one number a head: A_log, dt_bias", 0)
    VECTOR = ("one number a channel: norm gains, convolution taps", 1)

    def __init__(self, meaning: str, growing: int) -> None:
        self.meaning = meaning
        self.growing = growing


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Powers of m for one role, and whether weight decay touches it."""

    init_std: float = 0.0
    multiplier: float = 0.0
    lr_adamw: float = 0.0
    lr_sgd: float = 0.0
    decays: bool = False
    source: str


@dataclass(frozen=True, kw_only=True)
class Parametrization:
    """A rule for every role, and the power of m on softmax attention's logits beyond 1 / sqrt(head size)."""

    rules: Mapping[Role, Rule]
    attention: float = 0.0


# One policy of decay for all of them: matrices from width decay, the rest does not (else arms would differ in two things).
# fmt: off
SP = Parametrization(rules={
    Role.EMBEDDING: Rule(source="standard"),
    Role.READOUT:   Rule(source="standard"),
    Role.HIDDEN:    Rule(decays=True, source="standard"),
    Role.GATE:      Rule(decays=True, source="standard"),
    Role.SCALAR:    Rule(source="standard"),
    Role.VECTOR:    Rule(source="standard"),
})
MUP_ORIGINAL = Parametrization(attention=-0.5, rules={
    Role.EMBEDDING: Rule(multiplier=-1.0, lr_sgd=1.0, source="TP-V; GDN when tied"),
    Role.READOUT:   Rule(multiplier=-1.0, lr_sgd=1.0, source="TP-V"),
    Role.HIDDEN:    Rule(init_std=-0.5, lr_adamw=-1.0, decays=True, source="TP-V"),
    Role.GATE:      Rule(init_std=-0.5, lr_adamw=-1.0, decays=True, source="GDN: taken as hidden"),
    Role.SCALAR:    Rule(source="GDN: not scaled"),
    Role.VECTOR:    Rule(lr_sgd=1.0, source="TP-V"),
})
MUP = replace(MUP_ORIGINAL, rules={
    **MUP_ORIGINAL.rules,
    Role.GATE:      Rule(init_std=-0.5, lr_adamw=-1.0, lr_sgd=-0.5, decays=True, source="GDN tables 1 and 2"),
    Role.SCALAR:    Rule(lr_sgd=0.5, source="GDN tables 1 and 2"),
})
MUP_AUTHORS = replace(MUP, rules={
    **MUP.rules,
    Role.VECTOR:    Rule(lr_adamw=-1.0, source="GDN's code"),
})
# fmt: on
PARAMETRIZATIONS = {"sp": SP, "mup_original": MUP_ORIGINAL, "mup": MUP, "mup_authors": MUP_AUTHORS}
OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class ScaledParameter:
    """One parameter and what it gets. `init_std` is None where the initialization is not normal."""

    name: str
    shape: tuple[int, ...]
    role: Role
    init_std: float | None
    multiplier: float
    lr: float
    weight_decay: float
    parameter: nn.Parameter


def initial_std(role: Role, parametrization: str, m: float, initializer_range: float) -> float:
    """Standard deviation of a normal initialization."""
    return initializer_range * m ** PARAMETRIZATIONS[parametrization].rules[role].init_std


def multiplier(role: Role, parametrization: str, m: float) -> float:
    """Factor on what a parameter of this role computes: for a tied embedding, on the logits only."""
    return m ** PARAMETRIZATIONS[parametrization].rules[role].multiplier


def tagged_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Role, nn.Module]]:
    """(name, parameter, role, module that holds it), each parameter once. Raises ValueError for one without a role.

    A module that makes parameters says their roles in `roles`, a dict from attribute to Role: there, and not on the
    tensor, they outlive loading, `to_empty` and `deepcopy`.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{attribute}" if prefix else attribute
            roles = getattr(module, "roles", {})
            if attribute not in roles:
                raise ValueError(
                    f"{name} {tuple(parameter.shape)} has no muP role; name it in the roles of {type(module).__name__}"
                )
            yield name, parameter, roles[attribute], module


def scaled_parameters(
    model: DeltaForCausalLM,
    *,
    optimizer: str,
    lr: float,
    weight_decay: float,
    independent_weight_decay: bool = False,
) -> list[ScaledParameter]:
    """What every parameter of the model gets: a partition of `model.parameters()`.

    optimizer                   "adamw" or "sgd"
    lr                          learning rate at base_width
    weight_decay                coefficient at base_width, for the roles that decay
    independent_weight_decay    AdamW multiplies the coefficient by a parameter's learning rate, so under muP hidden
                                matrices decay m times slower; True divides that out

    Raises ValueError for an optimizer that has no column, or a parameter without a role.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r} has no column in the muP table; there are {OPTIMIZERS}")
    config = model.config
    m, rules = config.width_ratio, PARAMETRIZATIONS[config.parametrization].rules
    rows = []
    for name, parameter, role, module in tagged_parameters(model):
        rule = rules[role]
        factor = m ** (rule.lr_adamw if optimizer == "adamw" else rule.lr_sgd)
        decay = weight_decay if rule.decays else 0.0
        rows.append(
            ScaledParameter(
                name=name,
                shape=tuple(parameter.shape),
                role=role,
                init_std=model.normal_std(module, role),
                multiplier=m**rule.multiplier,
                lr=lr * factor,
                weight_decay=decay / factor if independent_weight_decay else decay,
                parameter=parameter,
            )
        )
    missing = {id(p) for p in model.parameters()} ^ {id(row.parameter) for row in rows}
    assert not missing, f"{len(missing)} parameters are not covered exactly once"
    return rows


def markdown_table(parametrizations: tuple[str, ...] = ("sp", "mup_original", "mup")) -> str:
    """The table as Markdown: one row a role, one column a parametrization and quantity; m = width / base width."""
    quantities = (
        ("init std", "init_std"),
        ("multiplier", "multiplier"),
        ("lr AdamW", "lr_adamw"),
        ("lr SGD", "lr_sgd"),
    )
    lines = [
        "| parameter | | " + " | ".join(parametrizations) + " |",
        "|---|---|" + "---|" * len(parametrizations),
    ]
    for role in Role:
        for i, (title, field) in enumerate(quantities):
            cells = [_power(getattr(PARAMETRIZATIONS[name].rules[role], field)) for name in parametrizations]
            lines.append(f"| {role.meaning if i == 0 else ''} | {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _power(exponent: float) -> str:
    names = {0.0: "1", 1.0: "m", -1.0: "1/m", 0.5: "√m", -0.5: "1/√m"}
    return names.get(exponent, f"m^{exponent:g}")
