"""The coordinate check of our own models: flat under the paper's rules,
and red under the standard ones.
"""

import json
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from delta_trn.models.kimi_delta_attention import KimiDeltaAttention
from delta_trn.models.mup import TABLES, Role
from delta_trn.train.commands.coord_check import OF_RECIPES
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.coordinates import modules
from delta_trn.train.studies.coordinates.modules import (
    MakeBatch,
    Reading,
    Start,
    of_recipe,
    readings,
)
from delta_trn.train.studies.coordinates.report import Verdict, judge, read, table
from tests.support.tiny_models import VOCABULARY, tokens
from tests.support.tiny_run import run_command

RATES = {key.removeprefix("lr."): rate for key, rate in OF_RECIPES.items() if key.startswith("lr.")}
optimizers = pytest.mark.parametrize("optimizer", RATES)
STORED = Path(__file__).parents[3] / "results" / "2026-11-23_cpu_coordinate-check"


def config(
    parametrization: str, optimizer: str, residual: str = "additive", words: int = VOCABULARY
) -> RunConfig:
    changes = {
        "parametrization": parametrization,
        "model.residual": residual,
        "optimizer.name": optimizer,
        "optimizer.lr": RATES[optimizer],
        "optimizer.weight_decay": "0",
        "model.mixer_output_init": ("1"),
        "model.vocab_size": str(words),
        "precision": "float32",
        "device": "cpu",
    }
    return apply(recipe("transfer"), changes)


def fit(
    start: Start,
    seeds: int = 2,
    steps: int = 2,
    batch: MakeBatch | None = None,
    widths=(64, 128, 256),
) -> dict[str, Verdict]:
    found = readings(start, "mup", "adamw", widths=widths, steps=steps, seeds=seeds, batch=batch)
    return {v.tensor.removeprefix("model."): v for v in judge(list(found))}


@cache
def check(parametrization: str, optimizer: str, residual: str = "additive") -> dict[str, Verdict]:
    start = of_recipe(config(parametrization, optimizer, residual))
    return fit(start, batch=lambda seed: tokens(4, 32, seed=seed))


@optimizers
def test_every_module_and_vector_is_flat_under_the_papers_rules(optimizer: str):
    rows = fit(of_recipe(config("mup", optimizer, words=1024)), seeds=4)
    parts = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "conv", "o_norm", "o_proj")
    assert {f"blocks.1.mixer.{part}" for part in parts} | {"logits", "logit_next"} <= rows.keys()
    vectors = (
        "mixer.A_log",
        "mixer.dt_bias",
        "mixer.conv.weight",
        "mixer.o_norm.weight",
        "mlp_norm.weight",
    )
    assert {f"blocks.0.{name}" for name in vectors} <= rows.keys()
    failed = {name: v.fails_at for name, v in rows.items() if not v.passes}
    assert not failed and len(rows) == 72


def kimi(optimizer: str = "adamw") -> Start:
    """Returns what starts Kimi Delta Attention's models at the base that docs/mup.md documents."""
    keys = {"model.mixer": "kimi_delta_attention", "model.mixer_output_init": "0.25"}
    rate = {"optimizer.lr": "2**-9"} if optimizer == "adamw" else {}
    return of_recipe(apply(config("mup", optimizer, words=1024), keys | rate))


def test_every_row_of_kimi_delta_attention_is_flat_under_adamw():
    rows = fit(kimi(), seeds=4)
    parts = (
        "f_proj.0",
        "f_proj.1",
        "g_proj.0",
        "g_proj.1",
        "b_proj",
        "conv.weight",
        "dt_bias",
        "A_log",
    )
    assert {f"blocks.1.mixer.{part}" for part in parts} | {
        "blocks.0.mixer.g_proj.1.bias"
    } <= rows.keys()
    assert not {name: v.fails_at for name, v in rows.items() if not v.passes} and len(rows) == 86


@pytest.mark.parametrize("parts", [("f_proj.0", "g_proj.1"), ("f_proj.1", "g_proj.0")], ids=str)
def test_a_wrong_rate_of_a_low_rank_gate_turns_its_row_red(parts: tuple[str, str]):
    """At a rank that does not grow with the width, the second matrix would keep its rate.

    f and g do not read each other, so a mistake in both at once is one in each.
    """
    start = kimi()
    for part in parts:
        start = misrate(start, f"blocks.0.mixer.{part}.weight", 1.0)
    rows = fit(start, seeds=4)
    for part in parts:
        row = rows[f"blocks.0.mixer.{part}"]
        assert not row.passes, row


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gated_deltanet", "kimi_delta_attention"])
def test_small_steps_are_flat_where_queries_read_their_own_keys(mixer: str):
    """Drawn apart, q and k overlap by chance, as 1 / sqrt(K), and the norm after the readout lifts
    that to 1.

    What small steps change of it then grows as the root of the width, whatever the roles are. Where
    queries begin as keys, W_q = W_k and equal taps, there is nothing small to lift.
    """
    begin = of_recipe(
        apply(config("mup", "adamw", words=1024), {"model.mixer": mixer, "optimizer.lr": "2**-12"})
    )

    def start(width: int, seed: int):
        model, optimizer = begin(width, seed)
        for m in (block.mixer for block in model.model.blocks):
            with torch.no_grad():
                m.k_proj.weight.copy_(m.q_proj.weight)
                m.conv.weight[m.sizes[0] : 2 * m.sizes[0]] = m.conv.weight[: m.sizes[0]]
        return model, optimizer

    wide = {"widths": (64, 256, 1024), "steps": 1, "seeds": 4}
    assert not {name: v.fails_at for name, v in fit(start, **wide).items() if not v.passes}
    apart = fit(begin, **wide)["blocks.0.mixer.o_norm"]
    assert not apart.passes, apart


# a parameter of Kimi Delta Attention's, and a role that it does not have
ROLES = {"b_proj.weight": Role.CONSTANT, "dt_bias": Role.HIDDEN}
ROLES |= {"A_log": Role.HIDDEN, "g_proj.1.bias": Role.HIDDEN}


def test_a_wrong_role_in_kimi_delta_attention_turns_its_row_red(monkeypatch: pytest.MonkeyPatch):
    """Adam moves each of the four by its own rate, whatever the others do: all are wrong at once."""
    made = KimiDeltaAttention.__init__

    def make(self: KimiDeltaAttention, *args) -> None:
        made(self, *args)
        for name, role in ROLES.items():
            self.tags[name] = replace(self.tags[name], role=role)

    monkeypatch.setattr(KimiDeltaAttention, "__init__", make)
    rows = fit(kimi())
    for name in ROLES:
        row = rows[f"blocks.0.mixer.{name.removesuffix('.weight')}"]
        assert not row.passes, row


# what is wrong, of which role or parameters, and a row that must be red
MISTAKES = {
    "the logits are not scaled": (Role.EMBEDDING, {"multiplier": 0.0}, "logits"),
    "gates' rate": (Role.GATE, {"lr_adamw": 0.0}, "blocks.0.mixer.a_proj"),
    "gates' initial size": (Role.GATE, {"init_std": 0.0}, "blocks.1.mixer.b_proj"),
    "one gate's rate": ("blocks.0.mixer.a_proj", 1.0, "blocks.0.mixer.a_proj"),
    "matrices' initial size": (Role.HIDDEN, {"init_std": 0.0}, "blocks.0.mixer.q_proj"),
    "matrices' rate falls as the root": (Role.HIDDEN, {"lr_adamw": -0.5}, "blocks.0.mixer.v_proj"),
    "o_proj's rate": ("blocks.1.mixer.o_proj", 1.0, "blocks.1.mixer.o_proj"),
    "k_proj's rate": ("blocks.1.mixer.k_proj", 1.0, "blocks.1.mixer.k_proj"),
    "down_proj's rate": ("mlp.down_proj", 1.0, "blocks.1.mlp"),
    "scalars' rate grows as the root": (Role.SCALAR, {"lr_adamw": 0.5}, "blocks.1.mixer.A_log"),
    "scalars' rate falls": (Role.SCALAR, {"lr_adamw": -1.0}, "blocks.1.mixer.dt_bias"),
    "the embedding's rate falls as the root": (Role.EMBEDDING, {"lr_adamw": -0.5}, "embed"),
    "the embedding's rate falls": (Role.EMBEDDING, {"lr_adamw": -1.0}, "embed"),
    "the embedding's initial size": (Role.EMBEDDING, {"init_std": -0.5}, "blocks.0.mixer_norm"),
    "gains and taps' rate falls": (Role.VECTOR, {"lr_adamw": -1.0}, "blocks.0.mixer.conv.weight"),
}
CHEAP = ("down_proj's rate", "gains and taps' rate falls")


def misrate(start: Start, part: str, power: float) -> Start:
    """Returns a start whose optimizer multiplies rates of parameters with this
    in their names by m^power.
    """

    def begin(width: int, seed: int):
        model, optimizer = start(width, seed)
        for group in [*optimizer.param_groups]:
            pairs = list(zip(group["names"], group["params"], strict=True))
            wrong = [pair for pair in pairs if part in pair[0]]
            right = [pair for pair in pairs if part not in pair[0]]
            if wrong:
                rate = group["lr"] * (width / 64) ** power
                for part_of, some in (({**group, "lr": rate}, wrong), (group, right)):
                    part_of["names"] = [name for name, _ in some]
                    part_of["params"] = [p for _, p in some]
                    if part_of is not group:
                        optimizer.param_groups.append(part_of)
        return model, optimizer

    return begin


@pytest.mark.parametrize(
    "mistake",
    [name if name in CHEAP else pytest.param(name, marks=pytest.mark.slow) for name in MISTAKES],
)
def test_a_planted_mistake_turns_its_row_red(mistake: str, monkeypatch: pytest.MonkeyPatch):
    what, change, row = MISTAKES[mistake]
    start = of_recipe(config("mup", "adamw", words=1024))
    if isinstance(what, Role):
        table = TABLES["mup"]
        monkeypatch.setitem(TABLES, "mup", table.but({what: replace(table[what], **change)}))
    else:
        start = misrate(start, what, change)
    # a rate that is wrong in one matrix of the last block shows after more steps, beside less
    # scatter
    rows = fit(start, seeds=4) if mistake in CHEAP else fit(start, seeds=8, steps=4)
    assert not rows[row].passes, rows[row]


@pytest.mark.slow
@optimizers
def test_the_documented_command_exits_with_0(optimizer: str, tmp_path: Path):
    keys = (f"optimizers={optimizer}", "parametrizations=mup", f"out={tmp_path / 'out'}")
    status, out, err = run_command("coord-check", "transfer", *keys)
    assert status == 0 and "72 of 72" in out, out + err


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["model.mixer=kimi_delta_attention", "model.attention_layers=1"])
def test_the_documented_command_exits_with_0_for_other_mixers(keys: str, tmp_path: Path):
    own = ("optimizers=adamw", "parametrizations=mup", f"out={tmp_path / 'out'}")
    status, out, err = run_command("coord-check", "transfer", keys, *own)
    assert status == 0, out + err


def test_the_check_fails_under_the_standard_parametrization():
    rows = check("sp", "adamw")
    mixer = ("q_proj", "conv", "a_proj", "b_proj", "o_norm", "o_proj")
    for name in (
        *(f"blocks.1.mixer.{part}" for part in mixer),
        "blocks.0.mlp",
        "blocks.1",
        "logit_next",
    ):
        assert not rows[name].passes and rows[name].change.slope > 0.4, (name, rows[name].change)


def test_coordinate_check_passes_for_deep_delta_learning():
    """The check follows two steps. Gates are two numbers, which scatter."""
    rows = check("mup", "adamw", "ddl")
    failed = {name for name, v in rows.items() if not v.change.passes and not name.endswith("bias")}
    assert failed <= {"blocks.0.mlp", "blocks.0.mlp.down_proj", "blocks.0.mixer.a_proj"}, failed
    assert rows["blocks.1.mixer_write.value"].change.slope == pytest.approx(0.5, abs=0.15)
    standard = check("sp", "adamw", "ddl")
    for part in ("mixer_write.gate", "mixer.conv", "mixer"):
        assert not standard[f"blocks.1.{part}"].passes, part
    # without v's factor of sqrt(m), writes move a wider stream less
    for name in ("blocks.1.mixer_write", "blocks.0.mlp_write"):
        assert not standard[name].passes and standard[name].size.slope < -0.4, (
            name,
            standard[name].size,
        )


def test_the_stored_readings_have_the_recorded_verdicts(tmp_path: Path):
    """They name tensors of the paper, each with theory's powers:
    AdamW under muP and without, then SGD.
    """
    found = read(STORED)
    assert found is not None
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    rows = judge(*found)
    for v in rows:
        now = (1, v.passes, v.size.passes and v.change.passes)
        name = f"{v.optimizer} {v.parametrization}"
        counts[name] = [a + b for a, b in zip(counts[name], now, strict=True)]
    assert counts == {
        "adamw mup": [24, 17, 24],
        "adamw sp": [24, 2, 6],
        "sgd mup": [24, 12, 20],
        "sgd sp": [24, 2, 10],
    }
    stream = {
        (v.optimizer, v.parametrization): v.change.slope for v in rows if v.tensor == "hidden"
    }
    assert stream["adamw", "mup"] == pytest.approx(-0.08, abs=0.005)
    assert stream["adamw", "sp"] == pytest.approx(1.64, abs=0.005)
    (tmp_path / "coordinates.json.gz").write_bytes((STORED / "coordinates.json.gz").read_bytes())
    status, out, _ = run_command("plot", tmp_path)
    assert status == 0 and "| **pass at every step** |  | 2 of 24 |  | 17 of 24 |" in out
    assert (tmp_path / "coordinates.png").read_bytes().startswith(b"\x89PNG")


def synthetic(power: float, noise: float = 0.0, tensor: str = "model.norm") -> list[Reading]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for width in (64, 128, 256, 512):
        for seed in range(3):
            y = width**power * math.exp(noise * float(torch.randn((), generator=generator)))
            rows += [
                Reading("mup", "adamw", width, seed, step, tensor, 1.0, y * step) for step in (0, 1)
            ]
    return rows


class TestVerdict:
    @staticmethod
    def judge(rows: list[Reading]) -> Verdict:
        (verdict,) = judge(rows)
        return verdict

    @pytest.mark.parametrize("power", [-0.7, -0.11, -0.09, 0.09, 0.11, 0.3])
    def test_a_slope_is_the_power_of_width_and_passes_within_a_tenth_of_theory(self, power: float):
        verdict = self.judge(synthetic(power))
        assert verdict.change.slope == pytest.approx(power, abs=1e-9) and verdict.passes is (
            abs(power) < 0.1
        )

    def test_noise_widens_the_tolerance_by_twice_the_standard_error(self):
        """Independent noise s on 12 points gives a slope error of s over the root
        of their squared spread.
        """
        change = self.judge(synthetic(0.0, noise=0.5)).change
        expected = 0.5 / math.log(2) / math.sqrt(12 * 1.25)
        assert change.stderr == pytest.approx(expected, rel=0.5)

    def test_a_module_that_never_changes_fails_and_one_of_some_widths_is_left_out(self):
        rows = [replace(r, change=0.0) for r in synthetic(0.0)]
        assert self.judge(rows).fails_at == ("change at step 1",)
        assert (
            judge([*rows, *(r for r in synthetic(0.0, tensor="adapter") if r.width > 64)])[1:] == []
        )

    def test_the_table_counts_what_passes_at_every_step_and_after_the_last(self):
        """The change of step 1 goes as the width, that of step 2 does not."""
        rows = [replace(r, step=r.step + 1) if r.step else r for r in synthetic(0.0)]
        early = [r for r in synthetic(1.0) if r.step == 1]
        printed = table([self.judge([*rows, *early])])
        assert "| **pass at every step** |  | 0 of 1 |" in printed
        assert "| **pass after the last** |  | 1 of 1 |" in printed

    def test_a_module_with_a_range_passes_anywhere_in_it(self):
        for power, passes in (
            (-0.62, False),
            (-0.5, True),
            (-0.2, True),
            (0.0, True),
            (0.12, False),
        ):
            assert self.judge(synthetic(power, tensor="logits")).passes is passes, power

    def test_a_noisy_row_is_judged_with_the_same_part_of_other_layers_or_is_not_decided(self):
        """Noise of 1 at 12 points leaves an error of about 0.3: of ten layers together 0.1."""

        def layers(n: int, power: float = 0.0) -> list[Verdict]:
            rows = []
            for layer in range(n):
                generator = torch.Generator().manual_seed(layer)
                for width in (64, 128, 256, 512):
                    for seed in range(3):
                        noise = 0.8 * float(torch.randn((), generator=generator))
                        y = width**power * math.exp(noise)
                        name = f"blocks.{layer}.A_log"
                        rows += [
                            Reading("mup", "adamw", width, seed, step, name, 1.0, y * step)
                            for step in (0, 1)
                        ]
            return judge(rows)

        (alone,) = layers(1)
        assert alone.passes and alone.undecided == ("change at step 1",)
        assert not any(v.undecided for v in layers(20)) and all(v.passes for v in layers(20))
        assert not any(v.passes for v in layers(20, power=0.4) if v.change.slope < 0.8)
        assert "? |" in table([alone])


class TestCommand:
    @pytest.mark.parametrize(("quiet_from", "status"), [(8, 0), (99, 3)])
    def test_noise_takes_more_seeds_and_what_is_not_decided_then_exits_with_3(
        self, quiet_from: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        asked = []

        def noisy(start, table, optimizer, *, widths, steps, seeds, batch, first_seed=0):
            asked.append((optimizer, first_seed, seeds))
            generator = torch.Generator().manual_seed(first_seed)
            for width in widths:
                for seed in range(first_seed, first_seed + seeds):
                    noise = 0.0 if seed >= quiet_from else 1.2
                    y = math.exp(noise * float(torch.randn((), generator=generator)))
                    # many quiet seeds outweigh the noisy ones
                    for copy in range(40 if seed >= quiet_from else 1):
                        place = (width, seed + 100 * copy)
                        yield Reading(table, optimizer, *place, 0, "x", 1.0, 0.0)
                        yield Reading(table, optimizer, *place, 1, "x", 1.0, y)

        monkeypatch.setattr(modules, "readings", noisy)
        keys = ("optimizers=adamw", "parametrizations=mup", "steps=1", f"out={tmp_path / 'x'}")
        found, out, err = run_command("coord-check", "tiny", *keys)
        assert asked == [("adamw", 0, 8), ("adamw", 8, 8)], err
        assert found == status and ("not decided  adamw mup x" in out) is (status == 3), out

    def test_coord_check_prints_verdicts_and_writes_readings_and_a_picture(self, tmp_path: Path):
        """Deep Delta Learning may use softmax attention in every layer."""
        out = tmp_path / "check"
        keys = (
            "widths=16,32,64",
            "steps=1",
            "seeds=1",
            "parametrizations=mup",
            f"out={out}",
            "device=cpu",
        )
        model = ("model.base_width=16", "model.attention_layers=0,1", "model.residual=ddl")
        status, text, err = run_command("coord-check", "tiny", *keys, *model)
        assert status in (0, 1), err
        rows = json.loads((out / "coordinates.json").read_text())["readings"]
        assert {(r["optimizer"], r["width"], r["step"]) for r in rows} == {
            (name, width, step) for name in RATES for width in (16, 32, 64) for step in (0, 1)
        }
        assert "| model.blocks.0.mixer_write |" in text and "mixer.conv" not in text
        found = read(out)
        assert found is not None and (out / "coordinates.png").read_bytes().startswith(b"\x89PNG")
        failing = [v.tensor for v in judge(*found) if not v.passes]
        assert (status == 1) == bool(failing) and all(f" {name}:" in text for name in failing)

    @pytest.mark.parametrize(
        ("assignment", "message"),
        [
            ("widths=64,128", "3 or more different whole numbers"),
            ("batch.length=9", "batch.length=9 has no effect: coord-check trains on random tokens"),
            ("optimizer.clip=2", "optimizer.clip=2 has no effect"),
            ("optimizers=lion", "adamw,sgd,muon"),
            ("parametrizations=mupp", "parametrization=mupp"),
            ("lr.sgd=-1", "optimizer.lr=-1"),
            ("stepz=3", "unknown key 'stepz'"),
            ("optimizer.lr=0.1", "this is an axis of coord-check; give lr.adamw"),
            ("optimizers=adamw optimizer.memory=2", "optimizer.memory=2.0 has no effect"),
        ],
    )
    def test_coord_check_refuses_bad_input_before_it_computes_anything(
        self, assignment: str, message: str
    ):
        status, _, err = run_command("coord-check", "tiny", *assignment.split())
        assert status == 2 and message in err
