"""The coordinate check of our own models: flat under the paper's rules, and red under the standard ones."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import repeat
from pathlib import Path

import pytest
import torch

from delta_trn.train.commands import coord_check
from delta_trn.train.data import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.recipes import recipe
from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.run.optimizer import learning_rate, make_optimizer, set_learning_rate
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.coordinates.modules import Reading, recipe_readings
from delta_trn.train.studies.coordinates.report import Verdict, judge, read, table
from tests.support.tiny_models import VOCABULARY, tokens
from tests.support.tiny_run import nudge, run_command, tolerance

RATES = {"adamw": "2**-8", "sgd": "0.1"}
optimizers = pytest.mark.parametrize("optimizer", RATES)
STORED = Path(__file__).parents[3] / "results" / "2026-11-23_cpu_coordinate-check"


def config(parametrization: str, optimizer: str, residual: str = "additive") -> RunConfig:
    changes = {
        "parametrization": parametrization,
        "model.residual": residual,
        "optimizer.name": optimizer,
        "optimizer.lr": RATES[optimizer],
        "optimizer.clip": "none",
        "optimizer.weight_decay": "0",
        "model.mixer_output_init": "1",
        "model.vocab_size": str(VOCABULARY),
        "precision": "float32",
        "device": "cpu",
    }
    return apply(recipe("transfer"), changes)


def batch(seed: int) -> Batch:
    drawn = tokens(4, 33, seed=seed)
    return Batch(drawn[:, :-1], drawn[:, 1:])


@cache
def check(parametrization: str, optimizer: str, residual: str = "additive") -> dict[str, Verdict]:
    run = config(parametrization, optimizer, residual)
    sizes = {"widths": (64, 128, 256), "steps": 2, "seeds": 2}
    rows = recipe_readings(run, **sizes, batches=lambda seed: repeat(batch(seed)))
    return {v.tensor.removeprefix("model."): v for v in judge(list(rows))}


@optimizers
def test_every_module_is_flat_under_the_papers_rules(optimizer: str):
    rows = check("mup", optimizer)
    parts = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "conv", "o_norm", "o_proj")
    assert {f"blocks.1.mixer.{part}" for part in parts} | {"logits", "logit_next"} <= rows.keys()
    failed = {name: v.fails_at for name, v in rows.items() if not v.passes}
    assert not failed and len(rows) == 37


def test_the_check_fails_under_the_standard_parametrization():
    rows = check("sp", "adamw")
    mixer = ("q_proj", "conv", "a_proj", "b_proj", "o_norm", "o_proj")
    for name in (*(f"blocks.1.mixer.{part}" for part in mixer), "blocks.0.mlp", "blocks.1", "logit_next"):
        assert not rows[name].passes and rows[name].change.slope > 0.4, (name, rows[name].change)


def test_coordinate_check_passes_for_deep_delta_learning():
    """The check follows two steps. In blocks of few numbers v's projection is noise."""
    rows = check("mup", "adamw", "ddl")
    failed = {name for name, v in rows.items() if not v.change.passes}
    assert failed <= {"blocks.0.mlp", "blocks.0.mlp.down_proj"}, failed
    assert rows["blocks.1.mixer_write.value"].change.slope == pytest.approx(0.5, abs=0.15)
    standard = check("sp", "adamw", "ddl")
    for part in ("mixer_write.gate", "mixer.conv", "mixer"):
        assert not standard[f"blocks.1.{part}"].passes, part
    # without v's factor of sqrt(m), writes move a wider stream less
    for name in ("blocks.1.mixer_write", "blocks.0.mlp_write"):
        assert not standard[name].passes and standard[name].size.slope < -0.4, (name, standard[name].size)


def test_the_stored_readings_have_the_recorded_verdicts(tmp_path: Path):
    """They name tensors of the paper, each with theory's powers: AdamW under muP and without, then SGD."""
    found = read(STORED)
    assert found is not None
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    rows = judge(*found)
    for v in rows:
        now = (1, v.passes, v.size.passes and v.change.passes)
        name = f"{v.optimizer} {v.parametrization}"
        counts[name] = [a + b for a, b in zip(counts[name], now, strict=True)]
    assert counts == {
        "adamw mup": [24, 17, 24], "adamw sp": [24, 2, 6], "sgd mup": [24, 12, 20], "sgd sp": [24, 2, 10],
    }  # fmt: skip
    stream = {(v.optimizer, v.parametrization): v.change.slope for v in rows if v.tensor == "hidden"}
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
            rows += [Reading("mup", "adamw", width, seed, step, tensor, 1.0, y * step) for step in (0, 1)]
    return rows


class TestVerdict:
    @staticmethod
    def judge(rows: list[Reading]) -> Verdict:
        (verdict,) = judge(rows)
        return verdict

    @pytest.mark.parametrize("power", [-0.7, 0.0, 0.3])
    def test_a_fitted_slope_is_the_power_of_width(self, power: float):
        assert self.judge(synthetic(power)).change.slope == pytest.approx(power, abs=1e-9)

    def test_a_slope_within_a_tenth_of_theory_passes(self):
        assert self.judge(synthetic(0.09)).passes and self.judge(synthetic(-0.09)).passes
        assert not self.judge(synthetic(0.11)).passes and not self.judge(synthetic(-0.11)).passes

    def test_noise_widens_the_tolerance_by_twice_the_standard_error(self):
        """Independent noise s on 12 points gives a slope error of s over the root of their squared spread."""
        change = self.judge(synthetic(0.0, noise=0.5)).change
        expected = 0.5 / math.log(2) / math.sqrt(12 * 1.25)
        assert change.stderr == pytest.approx(expected, rel=0.5)

    def test_a_module_that_never_changes_fails_and_one_of_some_widths_is_left_out(self):
        rows = [replace(r, change=0.0) for r in synthetic(0.0)]
        assert self.judge(rows).fails_at == ("change at step 1",)
        assert judge([*rows, *(r for r in synthetic(0.0, tensor="adapter") if r.width > 64)])[1:] == []

    def test_the_table_counts_what_passes_at_every_step_and_after_the_last(self):
        """The change of step 1 goes as the width, that of step 2 does not."""
        rows = [replace(r, step=r.step + 1) if r.step else r for r in synthetic(0.0)]
        early = [r for r in synthetic(1.0) if r.step == 1]
        printed = table([self.judge([*rows, *early])])
        assert "| **pass at every step** |  | 0 of 1 |" in printed
        assert "| **pass after the last** |  | 1 of 1 |" in printed

    def test_a_module_with_a_range_passes_anywhere_in_it(self):
        for power, passes in ((-0.62, False), (-0.5, True), (-0.2, True), (0.0, True), (0.12, False)):
            assert self.judge(synthetic(power, tensor="logits")).passes is passes, power


def test_training_as_the_recipe_follows_its_schedule_clipping_and_batches():
    """A run by hand with learning_rate, clipping and fresh batches ends at the same change."""
    run = config("mup", "adamw").model_copy(update={"steps": 12})
    schedule = run.schedule.model_copy(update={"warmup": 2})
    clipped = run.optimizer.model_copy(update={"clip": 0.1})
    run = run.model_copy(update={"schedule": schedule, "optimizer": clipped})
    options = {"widths": (64,), "seeds": 1, "steps": 5, "scheduled": True}
    of_recipe = list(recipe_readings(run, batches=lambda _: iter([batch(i) for i in range(5)]), **options))
    assert sorted({r.step for r in of_recipe}) == [0, 1, 2, 4, 5]
    own = run.model_copy(update={"model": run.model.model_copy(update={"width": 64}), "seed": 0})

    def change(nudged: int | None = None) -> float:
        m = make_model(model_config(own, rows=VOCABULARY), seed=0, device=torch.device("cpu"))
        if nudged is not None:
            nudge(m, nudged)
        optimizer, before = make_optimizer(Sharding(m), own), m(batch(0).inputs, use_cache=False).logits
        for i in range(5):
            optimizer.zero_grad()
            m.loss(batch(i).inputs, batch(i).targets).backward()
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            assert norm > 0.1
            set_learning_rate(optimizer, learning_rate(own, i))
            optimizer.step()
        after = m(batch(0).inputs, use_cache=False).logits
        return float((after - before).detach().square().mean().sqrt())

    expected = change()
    rounding = tolerance([abs(change(seed) / expected - 1) for seed in range(3)])
    (last,) = [r for r in of_recipe if (r.tensor, r.step) == ("logits", 5)]
    assert last.change == pytest.approx(expected, rel=rounding) and rounding < 5e-3
    plain = list(recipe_readings(run, batches=lambda _: repeat(batch(0)), **{**options, "scheduled": False}))
    (other,) = [r for r in plain if (r.tensor, r.step) == ("logits", 5)]
    assert other.change != pytest.approx(last.change, rel=0.05)


class TestCommand:
    def test_coord_check_prints_verdicts_and_writes_readings_and_a_picture(self, data: Path, tmp_path: Path):
        """Deep Delta Learning may use softmax attention in every layer."""
        out = tmp_path / "check"
        keys = ("widths=16,32,64", "steps=1", "seeds=1", "parametrizations=mup", "batch.length=16")
        model = ("model.base_width=16", "model.attention_layers=0,1", "model.residual=ddl")
        arguments = (*keys, *model, f"data.source={data}", f"out={out}", "device=cpu")
        status, text, err = run_command("coord-check", "tiny", *arguments)
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
            ("seeds=3,1", "seeds=3,1: expected one whole number"),
            ("training=fast", "training=fast: expected plain or recipe"),
            ("optimizers=lion", "adamw,sgd,muon"),
            ("parametrizations=mupp", "parametrization=mupp"),
            ("lr.sgd=-1", "optimizer.lr=-1"),
            ("stepz=3", "unknown key 'stepz'"),
            ("optimizer.lr=0.1", "this is an axis of coord-check; give lr.adamw"),
            ("optimizers=adamw optimizer.memory=2", "optimizer.memory=2.0 has no effect"),
        ],
    )
    def test_coord_check_refuses_bad_input_before_it_computes_anything(self, assignment: str, message: str):
        status, _, err = run_command("coord-check", "tiny", *assignment.split())
        assert status == 2 and message in err


def test_mixers_begin_at_full_size_unless_asked_or_trained_as_the_recipe_says():
    """Mixers that begin at 0 pass no gradient on in the first steps, at any width."""
    base = recipe("transfer")
    assert base.model.mixer_output_init == 0
    for given, own, start in (
        ({}, {}, 1.0),
        ({"model.mixer_output_init": "0"}, {}, 0.0),
        ({}, {"training": "recipe"}, 0.0),
    ):
        configs = coord_check._configs(base, given, coord_check.DEFAULTS | own)
        assert {c.model.mixer_output_init for c in configs} == {start}
