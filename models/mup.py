"""How every parameter scales with width: one table of exponents for each parametrization.

With m = width / base_width, a parameter of a role gets

    initial std     initializer_range * m ** init_std
    multiplier      m ** multiplier            on what it computes, in the forward pass
    learning rate   lr * m ** lr_adamw         or lr_sgd; for Muon's matrices lr_muon
    Adam's epsilon  eps * m ** epsilon         follows the size of its gradient's entries

so at m = 1 every table is the standard parametrization. Sources: TP-V is Tensor Programs V,
arXiv:2203.03466, table 8; GDN is arXiv:2606.04048, tables 1 and 2. Norm gains and convolution taps
are in neither of GDN's tables. They are vector-like, so TP-V's row holds; the paper's code gives
them the learning rate of hidden matrices ("mup_authors").

Muon's update of a matrix has singular values of 0.2 sqrt(max(rows, columns)) lr (`train.run.muon`),
which must not grow with m: its rate falls as 1/sqrt(m) (the spectral condition, arXiv:2310.17813:
the norm of an update is of order sqrt(outputs / inputs)). Width makes heads larger and does not add
any, in all tables.

In a matrix whose inputs do not grow as the width does, m is the ratio of its inputs: those of
`down_proj`, the inner size, are rounded up. microsoft/mup has it so; the paper's code takes the
width's ("mup_authors").

Why, under muP at initialization: the gradient of the residual stream has entries of size 1/m, and
so have the gradients of hidden matrices, of the embedding's rows and of gains. Gates and scalars
collect the channels of a head: 1/sqrt(m). What a parameter computes must change by the same amount
at every m. SGD changes it by rate times gradient, times the m inputs that a matrix sums over; AdamW
by the rate, times those inputs.

The norm of the gradient at initialization is of one size at every m for hidden matrices (d^2
entries of 1/d), but falls as 1/sqrt(m) for the embedding, gains and taps (d entries of 1/d), and
faster for scalars. So clipping by one norm of everything does not do the same at every width. The
sum over parameters of m^lr_sgd |g|^2 is of one size: `optimizer.clip_norm=width`.

Depth (`model.base_layers`): with l = layers / base_layers, CompleteP (arXiv:2505.01618, alpha = 1)
multiplies what every sublayer adds to the stream by 1/l. The gradients inside of blocks then have a
factor 1/l, which Adam's epsilon follows; AdamW's and Muon's rates and initial values stay. SGD's
rates in blocks are multiplied by l to the same end, which is our derivation: the paper has no SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

OPTIMIZERS = ("adamw", "sgd", "muon")
Parametrization = Literal["sp", "mup_original", "mup", "mup_authors"]


class Role(Enum):
    """Says what a parameter maps from and to, and how many of its dimensions grow with width."""

    EMBEDDING = ("vocabulary to width, also as the tied readout", 1)
    READOUT = ("width to vocabulary, untied", 1)
    HIDDEN = ("width to width: projections, SwiGLU", 2)
    GATE = ("width to one number per head: the decay's and beta's projections", 1)
    SCALAR = ("one number per head: A_log, dt_bias", 0)
    VECTOR = ("one number per channel: norm gains, convolution taps", 1)
    CONSTANT = ("parameters that width does not change", 0)

    def __init__(self, meaning: str, growing: int) -> None:
        self.meaning = meaning
        self.growing = growing


# Matrices that read the width decay, in all tables: otherwise two tables would differ in two
# things.
DECAYING = frozenset({Role.HIDDEN, Role.GATE})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The powers of m for one role. A tied embedding has its multiplier on the logits only."""

    init_std: float = 0.0
    multiplier: float = 0.0
    lr_adamw: float = 0.0
    lr_sgd: float = 0.0
    lr_muon: float | None = None  # None: as AdamW
    epsilon: float = 0.0
    source: str

    def lr(self, optimizer: str) -> float:
        """Returns the power for a learning rate. Raises ValueError
        for an optimizer without a column.
        """
        if optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise ValueError(
                f"optimizer={optimizer!r} has no column in the muP table; choose one of {known}"
            )
        if optimizer == "muon" and self.lr_muon is not None:
            return self.lr_muon
        return self.lr_sgd if optimizer == "sgd" else self.lr_adamw


@dataclass(frozen=True, kw_only=True)
class Table:
    """A rule for every role, and the powers of m that belong to an operation.

    attention   multiplies softmax attention's logits, besides 1 / sqrt(head size)
    value       multiplies what Deep Delta Learning writes along a unit vector; derived in
                `models.residual`
    own_inputs  whether m is the ratio of a matrix's own inputs where these do not grow as the width
    """

    rules: Mapping[Role, Rule]
    attention: float = 0.0
    value: float = 0.0
    own_inputs: bool = True

    def __getitem__(self, role: Role) -> Rule:
        return self.rules[role]

    def but(self, changes: Mapping[Role, Rule], **options: bool) -> Table:
        """Returns this table with other rows for some roles, and other options."""
        return replace(self, rules={**self.rules, **changes}, **options)


# fmt: off
_SP = Table(rules={role: Rule(source="standard") for role in Role})
_ORIGINAL = Table(attention=-0.5, value=0.5, rules={
    Role.EMBEDDING: Rule(multiplier=-1.0, lr_sgd=1.0, epsilon=-1.0, source="TP-V; tied: GDN tables 1, 2"),
    Role.READOUT:   Rule(multiplier=-1.0, lr_sgd=1.0, epsilon=-1.0, source="TP-V"),
    Role.HIDDEN:    Rule(init_std=-0.5, lr_adamw=-1.0, lr_muon=-0.5, epsilon=-1.0, source="TP-V"),
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
    }, own_inputs=False),
}
# fmt: on
