"""How every parameter scales with width: one table of exponents for each parametrization.

With m = width / base_width, a parameter of a role gets

    initial std     initializer_range * m ** init_std
    multiplier      m ** multiplier            on what it computes, in the forward pass
    learning rate   lr * m ** lr_adamw         or lr_sgd
    Adam's epsilon  eps * m ** epsilon         follows the size of its gradient's entries

so at m = 1 every table is the standard parametrization. Sources: TP-V is Tensor Programs V, arXiv:2203.03466,
table 8; GDN is arXiv:2606.04048, tables 1 and 2. Norm gains and convolution taps are in neither of GDN's:
they are vector-like, so TP-V's row holds; the paper's code gives them hidden's learning rate ("mup_authors").

Why, under muP at initialization: the gradient of the residual stream has entries of 1/m, and so have those of
a hidden matrix, of the embedding's rows and of gains; gates and scalars collect a head's channels: 1/sqrt(m).
What a parameter computes must change by as much at every m. SGD changes it by rate times gradient, times the
m inputs that a matrix sums over; AdamW by the rate, times those inputs. If aligned fully with what they
multiply, gates and scalars have gradients sqrt(m) larger: "mup_aligned", for comparison.

Memory. What a token stores is read by all later ones that remember it, so its gradient is a sum of about
L = 1 / (1 - alpha) terms: dL/dv_s = beta_s sum_t decay(s, t) (q_t.k_s) dL/do_t. No rule above sees it while L
does not depend on width, and alpha's initial law does not. For models that forget slowly GDN, section 5.1,
divides SGD's rates by L: as if terms added up, and dL/do stayed as it was. But the norm after the readout
makes dL/do as much smaller as o is larger, which is a sum over L stored values too: sqrt(L) if they average
out, L if they add up. What is left is 1 where both do the same, and at most sqrt(L) where gradients alone add
up; measured at initialization from L = 5 to 67, W_v's gradient goes as L^-0.01, and as L^0.06 if all tokens
have one upstream gradient. So `memory` is 1 unless asked for, and `train.sweep.arms` compares it in training
("slow_forgetting"). AdamW, whose steps have no size of the gradient's, needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from delta_trn.models.config import DeltaConfig
    from delta_trn.models.language_model import DeltaForCausalLM

OPTIMIZERS = ("adamw", "sgd")


class Role(Enum):
    """What a parameter maps from and to, and how many of its dimensions grow with width."""

    EMBEDDING = ("vocabulary to width, also as the tied readout", 1)
    READOUT = ("width to vocabulary, untied", 1)
    HIDDEN = ("width to width: projections, SwiGLU", 2)
    GATE = ("width to one number a head: the decay's and beta's projections", 1)
    SCALAR = ("one number a head: A_log, dt_bias", 0)
    VECTOR = ("one number a channel: norm gains, convolution taps", 1)
    CONSTANT = ("what no width changes", 0)

    def __init__(self, meaning: str, growing: int) -> None:
        self.meaning = meaning
        self.growing = growing


# One policy for every table, or its arms would differ in two things: matrices that read the width decay.
DECAYING = frozenset({Role.HIDDEN, Role.GATE})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Powers of m for one role. For a tied embedding the multiplier is on the logits only."""

    init_std: float = 0.0
    multiplier: float = 0.0
    lr_adamw: float = 0.0
    lr_sgd: float = 0.0
    epsilon: float = 0.0
    source: str

    def lr(self, optimizer: str) -> float:
        """The power for a learning rate. Raises ValueError for an optimizer without a column."""
        if optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise ValueError(f"optimizer={optimizer!r} has no column in the muP table; there are {known}")
        return self.lr_adamw if optimizer == "adamw" else self.lr_sgd


@dataclass(frozen=True, kw_only=True)
class Table:
    """A rule for every role, and powers of m that belong to an operation.

    attention   on softmax attention's logits, beyond 1 / sqrt(head size)
    value       on what Deep Delta Learning writes along a unit vector; derived in `models.residual`
    """

    rules: Mapping[Role, Rule]
    attention: float = 0.0
    value: float = 0.0

    def __getitem__(self, role: Role) -> Rule:
        return self.rules[role]

    def but(self, changes: Mapping[Role, Rule]) -> Table:
        """This table with other rows for some roles."""
        return replace(self, rules={**self.rules, **changes})


# fmt: off
_SP = Table(rules={role: Rule(source="standard") for role in Role})
_ORIGINAL = Table(attention=-0.5, value=0.5, rules={
    Role.EMBEDDING: Rule(multiplier=-1.0, lr_sgd=1.0, epsilon=-1.0, source="TP-V; tied: GDN tables 1, 2"),
    Role.READOUT:   Rule(multiplier=-1.0, lr_sgd=1.0, epsilon=-1.0, source="TP-V"),
    Role.HIDDEN:    Rule(init_std=-0.5, lr_adamw=-1.0, epsilon=-1.0, source="TP-V"),
    Role.GATE:      Rule(init_std=-0.5, lr_adamw=-1.0, epsilon=-0.5, source="GDN's baseline: as hidden"),
    Role.SCALAR:    Rule(epsilon=-0.5, source="GDN's baseline: not scaled"),
    Role.VECTOR:    Rule(lr_sgd=1.0, epsilon=-1.0, source="TP-V"),
    Role.CONSTANT:  Rule(source="TP-V"),
})
_MUP = _ORIGINAL.but({
    Role.GATE:      Rule(init_std=-0.5, lr_adamw=-1.0, lr_sgd=-0.5, epsilon=-0.5, source="GDN tables 1, 2"),
    Role.SCALAR:    Rule(lr_sgd=0.5, epsilon=-0.5, source="GDN tables 1, 2"),
})
TABLES: Mapping[str, Table] = {
    "sp": _SP,
    "mup_original": _ORIGINAL,
    "mup": _MUP,
    "mup_authors": _MUP.but({
        Role.VECTOR: Rule(lr_adamw=-1.0, epsilon=-1.0, source="GDN's code"),
    }),
    "mup_aligned": _MUP.but({
        Role.GATE:   Rule(init_std=-0.5, lr_adamw=-1.0, lr_sgd=-1.0, source="TP-V, full alignment"),
        Role.SCALAR: Rule(source="TP-V, full alignment"),
    }),
}
# fmt: on

Law = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Tag:
    """What is known of a parameter where it is made.

    role    how it scales
    law     fills a float32 tensor; None: normal with the std of a role
    like    the role whose std is meant, if not its own
    scale   on that std
    stored  whether its gradient comes through Gated DeltaNet's state, from all tokens that remember it
    """

    role: Role
    law: Law | None = None
    like: Role | None = None
    scale: float = 1.0
    stored: bool = False

    def std(self, config: DeltaConfig) -> float | None:
        """Standard deviation of its normal law; None if it has another."""
        if self.law is not None:
            return None
        power = TABLES[config.parametrization][self.like or self.role].init_std
        return self.scale * config.initializer_range * config.width_ratio**power


def tagged_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tag]]:
    """(name, parameter, tag), each parameter once. Raises ValueError for one without a tag.

    A module that makes parameters tags them in `tags`, a dict from attribute to Tag: there, and not on the
    tensor, tags outlive loading, `to_empty` and `deepcopy`.
    """
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        tags = getattr(module, "tags", {})
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            name = f"{prefix}.{attribute}" if prefix else attribute
            if not isinstance(tag := tags.get(attribute), Tag):
                owner = type(module).__name__
                raise ValueError(
                    f"{name} {tuple(parameter.shape)} has no muP role; give it one in the tags of {owner}"
                )
            yield name, parameter, tag


@dataclass(frozen=True)
class ScaledParameter:
    """One parameter and what it gets.

    init_std    None where the initialization is not normal
    epsilon     factor on Adam's epsilon
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    init_std: float | None
    multiplier: float
    lr: float
    weight_decay: float
    epsilon: float
    parameter: nn.Parameter


def scaled_parameters(
    model: DeltaForCausalLM,
    *,
    optimizer: str,
    lr: float,
    weight_decay: float,
    independent_weight_decay: bool = False,
    memory: float = 1.0,
) -> list[ScaledParameter]:
    """What every parameter of the model gets: a partition of `model.parameters()`.

    optimizer                   "adamw" or "sgd"
    lr                          learning rate at base_width
    weight_decay                coefficient at base_width, for the roles that decay
    independent_weight_decay    optimizers multiply the coefficient by a parameter's learning rate: under muP,
                                AdamW decays hidden matrices m times slower. True divides m out again

    memory                      what SGD's rates of stored values are divided by: see above

    Raises ValueError for an optimizer without a column, a parameter without a role, or a memory not above 0.
    """
    if not memory > 0:
        raise ValueError(f"memory={memory} must be above 0: how long heads remember, over the base model's")
    config = model.config
    m, table = config.width_ratio, TABLES[config.parametrization]
    rows = []
    for name, parameter, tag in tagged_parameters(model):
        rule = table[tag.role]
        factor = m ** rule.lr(optimizer)
        if optimizer == "sgd" and tag.stored:
            factor /= memory
        # a table gives the embedding its multiplier as the readout, which it is only if tied
        reads_out = tag.role is not Role.EMBEDDING or config.tie_word_embeddings
        decay = weight_decay if tag.role in DECAYING else 0.0
        rows.append(
            ScaledParameter(
                name=name,
                shape=tuple(parameter.shape),
                role=tag.role,
                init_std=tag.std(config),
                multiplier=m**rule.multiplier if reads_out else 1.0,
                lr=lr * factor,
                weight_decay=decay / factor if independent_weight_decay else decay,
                epsilon=m**rule.epsilon,
                parameter=parameter,
            )
        )
    assert [id(row.parameter) for row in rows] == [id(p) for p in model.parameters()], "not a partition"
    return rows


def markdown_table(parametrizations: tuple[str, ...] = ("sp", "mup_original", "mup")) -> str:
    """The table as Markdown: one row a role and quantity, one column a parametrization; m = width / base."""
    quantities = {
        "init std": "init_std",
        "multiplier": "multiplier",
        "lr AdamW": "lr_adamw",
        "lr SGD": "lr_sgd",
        "epsilon": "epsilon",
    }
    lines = [
        "| parameter | | " + " | ".join(parametrizations) + " |",
        "|---|---|" + "---|" * len(parametrizations),
    ]
    for role in Role:
        if role is Role.CONSTANT:
            continue
        for i, (title, field) in enumerate(quantities.items()):
            cells = [_power(getattr(TABLES[name][role], field)) for name in parametrizations]
            lines.append(f"| {'' if i else role.meaning} | {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _power(exponent: float) -> str:
    names = {0.0: "1", 1.0: "m", -1.0: "1/m", 0.5: "√m", -0.5: "1/√m"}
    return names.get(exponent, f"m^{exponent:g}")
