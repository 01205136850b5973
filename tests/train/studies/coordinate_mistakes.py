"""Mistakes in muP's rules, one function each, and which of them the coordinate check sees.

    python -m tests.train.studies.coordinate_mistakes [PATTERN]

makes every mistake (or those whose name has PATTERN), runs the check at widths 64, 128 and 256 with
three seeds, and prints the rows that are red and how many mistakes are seen. Exit status 1: one
that should be seen is not, or right code is red.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

from delta_trn.models.mup import TABLES, Role, Table
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.overrides import apply
from delta_trn.train.studies.coordinates.modules import Maker, Start, of_recipe, readings
from delta_trn.train.studies.coordinates.report import Verdict, judge

BASE, WIDTHS, SEEDS, STEPS = 64, (64, 128, 256), 3, 4
KIMI = {"model.mixer": "kimi_delta_attention", "model.mixer_output_init": "0.25"}
HYBRID = {"model.attention_layers": "1"}
UNTIED = {"model.tie_word_embeddings": "false"}
Change = Callable[[Start], Start]


@dataclass(frozen=True)
class Mistake:
    """What is changed: the table, or what a start returns.

    visible     whether a check of outputs and updates can see it
    thorough    whether that takes the command's widths, up to 512, and its most seeds
    """

    name: str
    optimizer: str = "adamw"
    keys: tuple[tuple[str, str], ...] = ()
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    change: Change = lambda start: start
    model: str = ""
    visible: bool = True
    thorough: bool = False


MISTAKES: list[Mistake] = []


def mistake(
    optimizer: str = "adamw", keys: dict[str, str] | None = None, **options: object
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Adds what a function returns, a table's patch or a change of a start, under its name."""

    def add(function: Callable[[], object]) -> Callable[[], object]:
        made, name = function(), function.__name__.replace("_", " ")
        kind = "change" if callable(made) and not isinstance(made, Patch) else "within"
        value = made.begin if isinstance(made, Patch) else made
        own = tuple((keys or {}).items())
        MISTAKES.append(Mistake(name, optimizer, own, **{kind: value}, **options))  # type: ignore[arg-type]
        return function

    return add


@dataclass(frozen=True)
class Patch:
    begin: Callable[[], AbstractContextManager[object]]


def rule(role: Role, **powers: float | None) -> Patch:
    """Other powers in the table's row of a role."""
    table = TABLES["mup"]
    return of_table(table.but({role: replace(table[role], **powers)}))  # type: ignore[arg-type]


def of_table(table: Table) -> Patch:
    return Patch(lambda: patch.dict(TABLES, {"mup": table}))  # type: ignore[arg-type]


def rate(power: float, *parts: str) -> Change:
    """Rates of parameters with one of these in their names, times m^power."""

    def change(start: Start) -> Start:
        def begin(width: int, seed: int):
            model, optimizer = start(width, seed)
            wrong = {id(p) for n, p in model.named_parameters() if any(x in n for x in parts)}
            for group in [*optimizer.param_groups]:
                chosen = [p for p in group["params"] if id(p) in wrong]
                if chosen:
                    factor = (width / BASE) ** power
                    optimizer.param_groups.append(
                        {**group, "lr": group["lr"] * factor, "params": chosen}
                    )
                    group["params"] = [p for p in group["params"] if id(p) not in wrong]
            return model, optimizer

        return begin

    return change


def size(power: float, *parts: str) -> Change:
    """Initial values of parameters with one of these in their names, times m^power."""

    def change(start: Start) -> Start:
        def begin(width: int, seed: int):
            model, optimizer = start(width, seed)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if any(part in name for part in parts):
                        # minus infinity: 0 at every width, as a readout that is not tied begins
                        p.mul_((width / BASE) ** power if math.isfinite(power) else 0.0)
            return model, optimizer

        return begin

    return change


def epsilon(value: float) -> Change:
    """One epsilon of AdamW at every width."""

    def change(start: Start) -> Start:
        def begin(width: int, seed: int):
            model, optimizer = start(width, seed)
            for group in optimizer.param_groups:
                group["eps"] = value
            return model, optimizer

        return begin

    return change


def attention(power: float) -> Change:
    """Softmax attention's logits times m^power."""

    def change(start: Start) -> Start:
        def begin(width: int, seed: int):
            model, optimizer = start(width, seed)
            for module in model.modules():
                if hasattr(module, "scale") and hasattr(module, "q_proj"):
                    module.scale *= (width / BASE) ** power
            return model, optimizer

        return begin

    return change


@mistake()
def gains_and_taps_at_a_rate_of_1_over_m():
    return rule(Role.VECTOR, lr_adamw=-1.0)


@mistake()
def down_proj_at_a_plain_rate():
    return rate(1.0, "down_proj")


@mistake()
def v_proj_at_a_plain_size():
    return size(0.5, "v_proj")


@mistake()
def k_proj_at_a_plain_size():
    return size(0.5, "k_proj")


@mistake()
def down_proj_at_a_plain_size():
    return size(0.5, "down_proj")


@mistake(keys=KIMI)
def the_second_matrix_of_kimis_decay_at_a_plain_rate():
    return rate(1.0, "f_proj.1.weight")


@mistake(keys=KIMI)
def the_second_matrix_of_kimis_decay_at_a_plain_size():
    return size(0.5, "f_proj.1.weight")


@mistake(keys=KIMI)
def the_second_matrix_of_kimis_output_gate_at_a_plain_rate():
    return rate(1.0, "g_proj.1.weight")


@mistake(keys=KIMI)
def the_second_matrix_of_kimis_output_gate_at_a_plain_size():
    return size(0.5, "g_proj.1.weight")


@mistake("sgd", KIMI)
def kimis_dt_bias_as_a_number_per_head():
    return rate(-0.5, "dt_bias")


@mistake("sgd", KIMI)
def kimis_numbers_per_head_as_vectors():
    return rate(0.5, "A_log")


@mistake()
def taps_of_a_size_that_falls_as_the_root():
    return size(-0.5, "conv.weight")


@mistake()
def taps_of_a_size_that_falls_as_m():
    return size(-1.0, "conv.weight")


@mistake("muon")
def muons_rate_is_not_scaled():
    return rule(Role.HIDDEN, lr_muon=0.0)


@mistake("muon")
def gates_beside_muon_at_plain_rates():
    return rule(Role.GATE, lr_adamw=0.0)


@mistake()
def logits_times_1_over_m_squared():
    return rule(Role.EMBEDDING, multiplier=-2.0)


@mistake()
def logits_times_1_over_the_root_of_m():
    return rule(Role.EMBEDDING, multiplier=-0.5)


@mistake(keys=UNTIED)
def an_untied_readout_without_its_multiplier():
    return rule(Role.READOUT, multiplier=0.0)


@mistake(keys=UNTIED)
def an_untied_readout_at_a_hidden_matrixs_rate():
    return rule(Role.READOUT, lr_adamw=-1.0)


@mistake()
def one_epsilon_of_1e_5_at_every_width():
    return epsilon(1e-5)


@mistake(keys=HYBRID)
def the_attention_layer_of_a_hybrid_at_plain_rates():
    return rate(1.0, "blocks.1.mixer.q_proj", "blocks.1.mixer.k_proj", "blocks.1.mixer.v_proj",
                "blocks.1.mixer.o_proj")  # fmt: skip


@mistake("sgd")
def gains_and_taps_not_scaled_under_sgd():
    return rule(Role.VECTOR, lr_sgd=0.0)


@mistake("sgd")
def one_gain_not_scaled_under_sgd():
    return rate(-1.0, "blocks.1.mlp_norm.weight")


@mistake("sgd")
def the_embedding_not_scaled_under_sgd():
    return rule(Role.EMBEDDING, lr_sgd=0.0)


@mistake()
def q_projs_rate_falls_as_the_root():
    return rate(0.5, "q_proj")


@mistake()
def g_projs_rate_is_plain():
    return rate(1.0, "g_proj")


@mistake()
def gate_projs_rate_falls_as_the_root():
    return rate(0.5, "gate_proj")


@mistake()
def one_block_of_two_at_plain_rates():
    return rate(1.0, *(f"blocks.1.{x}" for x in (
        "mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.g_proj", "mixer.o_proj",
        "mixer.a_proj", "mixer.b_proj", "mlp."))
    )  # fmt: skip


@mistake()
def a_projs_size_is_plain():
    return size(0.5, "a_proj")


@mistake()
def o_projs_size_is_plain():
    return size(0.5, "o_proj")


@mistake("muon")
def muons_shape_factor_is_forgotten():
    return rate(-0.5, "q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "mlp.")


@mistake("muon")
def muons_rate_falls_as_m():
    return rule(Role.HIDDEN, lr_muon=-1.0)


@mistake("muon")
def up_proj_alone_at_muons_plain_rate():
    return rate(0.5, "up_proj")


@mistake("sgd")
def the_table_is_that_before_the_papers_contribution():
    return of_table(TABLES["mup_original"])


@mistake("sgd")
def gates_not_scaled_under_sgd():
    return rule(Role.GATE, lr_sgd=0.0)


@mistake("sgd", thorough=True)
def numbers_per_head_not_scaled_under_sgd():
    return rule(Role.SCALAR, lr_sgd=0.0)


@mistake("sgd", KIMI, thorough=True)
def kimis_numbers_per_head_not_scaled_under_sgd():
    return rate(-0.5, "A_log")


@mistake(keys=HYBRID)
def attention_over_the_root_of_d_while_heads_grow():
    return attention(0.5)


@mistake(keys=HYBRID)
def attention_over_d_to_one_and_a_half():
    return attention(-0.5)


@mistake(visible=False)
def one_epsilon_of_1e_8_at_every_width():
    return epsilon(1e-8)


@mistake(visible=False)
def weight_decay_falls_with_the_rate():
    return lambda start: start  # the check has no decay


class Routed(nn.Module):
    """Has a router x @ W over eight experts, and attention whose heads grow in size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.W, self.power = nn.Parameter(torch.randn(width, 8) * width**-0.5), 1.0
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = (m(x).unflatten(-1, (2, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scale = 8 * q.shape[-1] ** -self.power if self.power == 1 else q.shape[-1] ** -self.power
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        weights = (x @ self.W).softmax(-1)
        x = x + sum(weights[..., i, None] * m(x) for i, m in enumerate(self.experts))
        return self.head(x)


class Grown(Routed):
    """Keeps 1/sqrt(d) while heads grow in size."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.power = 0.5


@mistake(model="Grown")
def the_size_of_heads_grows_in_any_model():
    return lambda start: start


@mistake(model="Routed")
def a_router_x_at_W_is_named_an_embedding():
    return lambda start: start


def start_of(one: Mistake | None, optimizer: str, keys: dict[str, str], model: str) -> Start:
    if model:
        role = "embedding" if one is not None and model == "Routed" else "gate"
        maker = Maker(Grown if model == "Grown" else Routed, BASE, {"W": role})
        return maker.start("mup", "adamw", 2**-8)
    rates = {"adamw": "2**-9" if "model.mixer" in keys else "2**-8"}
    common = {
        "parametrization": "mup", "optimizer.name": optimizer, "optimizer.weight_decay": "0",
        "optimizer.lr": rates.get(optimizer, "2**-8"), "model.mixer_output_init": "1",
        "model.vocab_size": "1024", "precision": "float32", "device": "cpu",
    }  # fmt: skip
    start = of_recipe(apply(recipe("transfer"), {**common, **keys}))
    return size(-math.inf, "lm_head")(start) if "model.tie_word_embeddings" in keys else start


def run(one: Mistake | None, optimizer: str = "adamw", keys: dict[str, str] | None = None,
        model: str = "", seeds: int = SEEDS) -> list[Verdict]:  # fmt: skip
    """Returns the check's rows with a mistake, or of right code."""
    begin = one.within if one else contextlib.nullcontext
    with begin():
        start = start_of(one, optimizer, keys or {}, model)
        start = one.change(start) if one else start
        widths = WIDTHS
        if one is None:
            seeds = 8  # the command's: of three, one row of eighty is red by chance
        elif one.thorough:
            widths, seeds = (*WIDTHS, 512), 16
        found = readings(start, "mup", optimizer, widths=widths, steps=STEPS, seeds=seeds)
        return judge(list(found))


def cases(pattern: str) -> Iterator[tuple[str, Mistake | None, str, dict[str, str], str]]:
    right = dict.fromkeys((m.optimizer, m.keys, m.model) for m in MISTAKES)
    for optimizer, keys, model in right:
        if model != "Grown":
            name = " ".join(["right:", optimizer, *(v for _, v in keys), model])
            yield name, None, optimizer, dict(keys), model
    for m in MISTAKES:
        yield m.name, m, m.optimizer, dict(m.keys), m.model


def main(pattern: str = "") -> int:
    seen, blind, wrong, made = 0, 0, 0, 0
    for name, one, optimizer, keys, model in cases(pattern):
        if pattern not in name:
            continue
        begun = time.monotonic()
        rows = run(one, optimizer, keys, model)
        red = [v.tensor for v in rows if not v.passes]
        expected = bool(one and one.visible)
        wrong += bool(red) != expected
        made += one is not None
        seen, blind = seen + (expected and bool(red)), blind + bool(one and not one.visible)
        mark = "" if bool(red) == expected else "   <- unexpected"
        seconds = time.monotonic() - begun
        print(f"{len(red):3} of {len(rows)} red  {seconds:4.0f} s  {name}: {', '.join(red[:3])}{mark}",
              flush=True)  # fmt: skip
    print(f"{seen} of {made - blind} mistakes are seen; {blind} cannot be seen")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*sys.argv[1:]))
