"""Sweeps: which trials run, how they survive kills, how optima are fitted, and the verdict on transfer."""

import json
import math
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.studies.fits import line, optimum, student_quantile
from delta_trn.train.studies.sweep.arms import ARMS
from delta_trn.train.studies.sweep.question import Sweep, define, grid
from delta_trn.train.studies.sweep.report import along, along_table, costs, curve, drift, reports, table
from delta_trn.train.studies.sweep.results import Results
from delta_trn.train.studies.sweep.runner import seconds_left
from tests.support.tiny_run import run_command, start

AXES = {
    "widths": "16,32,64",
    "lrs": "2**-8..2**-4",
    "parametrizations": "mup,sp",
    "seeds": "0,1",
    "refine": "0",
}


def sweep(**changes: str) -> Sweep:
    return define("tiny", {**AXES, **{name.replace("__", "."): value for name, value in changes.items()}})


def losses(study: Sweep, best: dict[tuple[str, int], float], known: dict[str, float] | None = None) -> dict:
    """Returns losses on parabolas with minima at log2 rate = best[parametrization, width]."""
    return {
        t.key: 3 + 0.1 * (math.log2(t.lr) - best[t.series.parametrization, t.width]) ** 2 + 0.01 * t.seed
        for t in study.trials(known or {})
    }


class TestDefinition:
    def test_a_learning_rate_grid_is_a_list_or_a_range(self):
        assert grid("lrs", "2**-3..2**-1") == [0.125, 0.25, 0.5]
        assert grid("lrs", "1e-3..1e-1:10") == pytest.approx([1e-3, 1e-2, 1e-1])
        assert grid("lrs", "0.3,0.1") == [0.1, 0.3]

    @pytest.mark.parametrize("text", ["0", "-1,2", "a", "", "1..", "2..1", "1..2:1", "1,1", "nan", "1e400"])
    def test_a_grid_that_cannot_be_read_is_refused_with_its_text(self, text: str):
        with pytest.raises(UsageError, match="expected different positive rates"):
            grid("lrs", text)

    def test_trials_are_all_combinations_and_share_the_base_width(self):
        """3 widths, 5 rates, 2 parametrizations and 2 seeds; both tables agree at the base width."""
        trials = sweep().trials({})
        assert len(trials) == len({t.key for t in trials}) == 50
        assert {t.config.parametrization for t in trials if t.width == 16} == {"sp"}

    def test_trials_are_ordered_by_seed_then_optimizer_then_width(self):
        trials = sweep(optimizers="adamw,sgd").trials({})
        places = [(t.seed, t.series.optimizer, t.width) for t in trials]
        assert places == sorted(places)

    def test_the_key_of_a_trial_hashes_what_its_loss_depends_on(self):
        def key(**changes: str) -> str:
            return sweep(widths="32", lrs="0.5", seeds="7", **changes).trials({})[0].key

        assert key() == key(log__every="7", checkpoint__every="3", data__folder="elsewhere")
        others = {
            key(steps="13"),
            key(evaluation__sequences="8"),
            key(batch__length="64"),
            key(model__layers="1"),
        }
        assert len(others) == 4 and key() not in others

    def test_every_axis_of_a_sweep_reaches_the_configuration_of_its_runs(self):
        (t, *_) = sweep(optimizers="sgd", widths="32", lrs="0.5", seeds="7", steps="13").trials({})
        c = t.config
        assert (c.model.width, c.optimizer.name, c.optimizer.lr, c.seed, c.steps) == (32, "sgd", 0.5, 7, 13)
        assert c.optimizer.weight_decay == 0 and c.evaluation.every == 13

    def test_arms_are_read_from_a_key_a_file_or_a_named_set(self, tmp_path: Path):
        study = sweep(arms="model.readout=sqrt_k,none", widths="32", parametrizations="mup")
        assert {(t.series.arm, t.config.model.readout) for t in study.trials({})} == {
            ("sqrt_k", "sqrt_k"),
            ("none", "none"),
        }
        file = tmp_path / "arms.json"
        file.write_text(json.dumps({"deep": {"model.layers": 3}, "shallow": {"model.layers": "1"}}))
        study = sweep(arms=str(file), widths="32", parametrizations="mup")
        assert {(t.series.arm, t.config.model.layers) for t in study.trials({})} == {
            ("deep", 3),
            ("shallow", 1),
        }
        study = sweep(arms="sgd_gates", optimizers="sgd", widths="32", parametrizations="mup")
        assert {t.config.parametrization for t in study.trials({})} == {"mup", "mup_aligned", "mup_original"}

    def test_every_named_set_of_arms_makes_valid_trials(self):
        for name in ARMS:
            optimizer = "sgd" if name in ("sgd_gates", "slow_forgetting", "wall_sgd") else "adamw"
            trials = sweep(arms=name, optimizers=optimizer, parametrizations="mup", widths="32").trials({})
            shared = name == "depth"  # two layers with CompleteP are two layers
            assert len(trials) == (len(ARMS[name]) - shared) * 10, name

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"widths": "0"}, "widths=0"),
            ({"widths": "16,16"}, "different whole numbers"),
            ({"seeds": "-1"}, "seeds=-1"),
            ({"refine": "2,9"}, "expected one whole number"),
            ({"parametrizations": "mupp"}, "parametrization=mupp"),
            ({"optimizers": "adam"}, "optimizer.name=adam"),
            ({"arms": "redout"}, "did you mean readout"),
            ({"arms": "model.readout="}, "expected a key and different values"),
            ({"arms": "model.readot=a,b"}, "model.readout"),
            ({"arms": "/nowhere.json"}, "cannot be read"),
            ({"model.width": "32"}, "give widths=32"),
            ({"lrs.sgd": "0.1"}, "not swept"),
            ({"optimizer.memory": "2"}, "optimizer.memory=2.0 has no effect with optimizer.name=adamw"),
            ({"arms": "epsilon", "optimizers": "sgd"}, "optimizer.eps=1e-12 has no effect"),
            ({"schedule.min_lr": "0.01"}, "schedule.min_lr=0.01 is above the lowest rate, 0.00390625"),
            ({"stepz": "3"}, "nearest known: steps"),
        ],
    )
    def test_a_bad_sweep_is_refused_before_anything_runs(
        self, changes: dict[str, str], message: str, tmp_path: Path
    ):
        axes = {**AXES, **changes, "out": str(tmp_path / "sweep")}
        status, _, err = run_command("sweep", "tiny", *(f"{key}={value}" for key, value in axes.items()))
        assert status == 2 and message in err
        assert not (tmp_path / "sweep").exists()

    def test_a_key_that_one_arm_needs_and_another_ignores_is_accepted(self):
        arms = {"arms": "model.residual=additive,ddl", "model.ddl_beta_init": "0.5"}
        assert sweep(widths="32", **arms).trials({})[0].config.model.ddl_beta_init == 0.5

    def test_the_schedule_of_a_rate_below_the_recipes_floor_is_constant(self):
        (t, *_) = sweep(widths="32", lrs="1e-4").trials({})
        assert t.config.schedule.min_lr == t.config.optimizer.lr == 1e-4

    def test_a_sweep_without_learning_rates_is_refused(self):
        status, _, err = run_command("sweep", "tiny", "widths=16")
        assert status == 2 and "lrs.adamw=2**-10..2**-4" in err


class TestRefinement:
    def added_rates(self, best: float) -> list[float]:
        study = sweep(refine="1", widths="32", parametrizations="mup")
        grid_only = sweep(widths="32", parametrizations="mup")
        known = losses(grid_only, {("mup", 32): best})
        before = {t.lr for t in grid_only.trials({})}
        return sorted(math.log2(t.lr) for t in study.trials(known) if t.lr not in before and t.seed == 0)

    def test_refinement_adds_rates_beside_the_best(self):
        assert self.added_rates(-6.1) == [-6.5, -5.5]

    def test_refinement_goes_beyond_an_end_that_is_best(self):
        assert self.added_rates(-12) == [-9] and self.added_rates(1) == [-3]

    def test_refinement_waits_until_all_seeds_are_known(self):
        study = sweep(refine="1", widths="32", parametrizations="mup")
        known = losses(study, {("mup", 32): -6.1})
        known.popitem()
        assert len(study.trials(known)) == 10

    def test_refinement_goes_below_rates_that_all_diverge(self):
        study = sweep(refine="1", widths="32", parametrizations="mup")
        known = dict.fromkeys((t.key for t in study.trials({})), math.inf)
        assert sorted({math.log2(t.lr) for t in study.trials(known)})[:2] == [-10, -9]


class TestFits:
    def test_student_quantiles_match_the_tables(self):
        for freedom, t in ((1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423)):
            assert student_quantile(0.975, freedom) == pytest.approx(t, rel=1e-4)

    def test_slope_and_its_error_match_the_textbook_formula(self):
        fit = line([0, 1, 2], [0, 1, 3])
        assert (fit.slope, fit.stderr) == pytest.approx((1.5, math.sqrt(1 / 6 / 2)))

    def test_the_interval_of_an_optimum_covers_the_truth_in_95_percent(self):
        rng = np.random.default_rng(0)
        x = np.repeat(np.arange(5.0) - 2, 2)
        seeds = [0, 1] * 5
        inside = 0
        for _ in range(300):
            y = 0.1 * (x - 0.3) ** 2 + 0.05 * np.array(seeds) + 0.02 * rng.normal(size=10)
            fit = optimum(x.tolist(), y.tolist(), seeds)
            inside += fit is not None and fit.low <= 0.3 <= fit.high
        # 95% of 300, less three standard deviations of 3.8
        assert inside >= 274

    def test_misfit_of_the_parabola_widens_the_interval_of_an_optimum(self):
        """Repetitions agree to 1e-6, but a parabola does not find the minimum of |x - 0.3| to 1e-6."""
        x, seeds = [float(i) for i in range(-2, 3) for _ in range(2)], [0, 1] * 5
        y = [abs(a - 0.3) + 1e-6 * s for a, s in zip(x, seeds, strict=True)]
        fit = optimum(x, y, seeds)
        assert fit is not None and fit.high - fit.low > 0.5

    def test_a_curve_without_a_minimum_has_no_optimum(self):
        x = [0.0, 1.0, 2.0, 3.0, 4.0]
        assert optimum(x, [-a * a for a in x], [0] * 5) is None
        assert optimum(x[:3], [1.0, 0.0, 1.0], [0] * 3) is None


class TestVerdict:
    @staticmethod
    def curves(optima: list[float], noise: float = 0.002) -> list:
        rng = np.random.default_rng(1)
        curves = []
        for width, best in zip((64, 128, 256), optima, strict=True):
            points = [
                (x, 3 + 0.1 * (x - best) ** 2 + noise * float(rng.normal()), seed)
                for x in np.arange(-9.0, -3.0)
                for seed in (0, 1)
            ]
            curves.append(curve(width, points))
        return curves

    @pytest.mark.parametrize("name", ["flank", "wall"])
    def test_sides_of_a_curve_that_stays_at_one_rate_transfer(self, name):
        result = drift(name, self.curves([-6.2, -6.2, -6.2]))
        assert result.verdict == "transfers" and result.low <= 0 <= result.high

    @pytest.mark.parametrize("name", ["flank", "wall"])
    def test_sides_of_a_curve_that_halves_its_rate_per_doubling_of_width_move(self, name):
        result = drift(name, self.curves([-5.2, -6.2, -7.2]))
        assert result.verdict == "moves" and result.octaves == pytest.approx(-1, abs=0.1)

    def test_costs_are_measured_losses_at_the_narrowest_widths_best_rate(self):
        """At 2^-5 width 256 loses 0.1 (2.2^2 - 0.2^2) nats to its own best rate, 2^-7; no fit is in it."""
        rows = {(c.width, c.octaves): c for c in costs(self.curves([-5.2, -6.2, -7.2], noise=0))}
        assert rows[64, 0].nats == 0 and rows[256, 0].nats == pytest.approx(0.48) and rows[256, 0].error == 0
        assert rows[256, -1].nats == pytest.approx(0.1 * (1.2**2 - 0.2**2))

    def test_costs_are_found_on_a_grid_of_half_octaves(self):
        """Four times sqrt(2) is 2^2 and a rounding, which made half of the best rate another rate."""
        rates = [math.log2(2.0**-9 * 1.4142135623730951**k) for k in range(9)]
        curves = [curve(width, [(x, 3 + (x + 6) ** 2, 0) for x in rates]) for width in (64, 256)]
        assert [c.nats for c in costs(curves) if c.width == 256] == pytest.approx([1, 0, 1])

    def test_noise_leaves_a_side_undecided(self):
        result = drift("flank", self.curves([-6.2, -6.2, -6.2], noise=0.15))
        assert not result.windows or result.verdict == "undecided"

    def test_a_best_rate_at_an_end_is_no_optimum_and_has_no_wall(self):
        (low, high, _) = self.curves([-12, 0, -6.2])
        assert low.fit is None and "lowest rate" in low.why_not
        assert high.fit is None and "highest rate" in high.why_not
        assert "three rates on this side" in drift("wall", [high, high]).verdict

    def test_diverged_trials_do_not_enter_the_fit(self):
        points = [(x, math.inf if x > -5 else 3 + (x + 6.2) ** 2, 0) for x in np.arange(-9.0, -3.0)]
        fit = curve(64, points).fit
        assert fit is not None and fit.at == pytest.approx(-6.2, abs=1e-6)

    @pytest.mark.parametrize("off", [0.0, 1e-12, -1e-12])
    def test_report_groups_series_and_shares_the_base_width(self, off):
        """A rate at the end of a window belongs to it however the window's center was rounded."""
        study = sweep()
        best = {("mup", w): -6.0 + off for w in (16, 32, 64)}
        best |= {("sp", w): -6.0 + off - math.log2(w / 16) for w in (16, 32, 64)}
        results = {k: {"key": k, "loss": v} for k, v in losses(study, best).items()}
        mup, sp = reports(study, results)
        assert mup.curves[0] == sp.curves[0] and (mup.done, mup.wanted) == (30, 30)
        assert mup.verdict == "flank transfers, wall transfers" and sp.verdict == "flank moves, wall moves"

    def test_arms_that_are_amounts_have_drifts_along_their_axis(self):
        """Best rates fall by 0.8 octaves per doubling of the steps at width 16, and stay at width 32."""
        study = sweep(arms="steps=100,200,400", widths="16,32", parametrizations="mup", refine="0")
        lines = {}
        for t in study.trials({}):
            best = -6 - (0.8 * math.log2(t.config.steps / 200) if t.width == 16 else 0)
            loss = 3 + 0.1 * (math.log2(t.lr) - best) ** 2 + 0.01 * t.seed
            lines[t.key] = {"loss": loss, "width": t.width}
        rows = reports(study, lines)
        narrow, wide = along(study, rows)
        assert [(a.axis, a.series, a.width) for a in (narrow, wide)] == [
            ("steps", "mup adamw", 16), ("steps", "mup adamw", 32),
        ]  # fmt: skip
        for a, octaves in ((narrow, -0.8), (wide, 0.0)):
            found = [s.octaves for s in a.sides if s.windows]
            assert found and found == pytest.approx([octaves] * len(found), abs=1e-6)
        text = along_table([narrow, wide])
        assert "octaves per doubling of steps" in text and "| mup adamw, width 32 | flank | " in text
        assert along(sweep(arms="readout", widths="16"), []) == []

    @pytest.mark.parametrize("name", ["depth", "horizon", "batch"])
    def test_named_axes_change_the_amount_that_they_name(self, name: str):
        configs = {
            t.series.arm: t.config for t in define("transfer", {"lrs": "0.01", "arms": name}).trials({})
        }
        for arm in ARMS[name]:
            c = configs[arm.name] if arm.name in configs else configs["2 layers"]  # the same run
            amounts = {"depth": c.model.layers, "horizon": c.steps, "batch": c.batch.sequences}
            assert amounts[name] == arm.scale
            assert c.schedule.warmup == c.steps // 10
            assert c.batch.sequences * c.steps == 2400 or name == "horizon"
            has_rule = "CompleteP" in arm.name and arm.scale > 2
            assert c.model.base_layers == (2 if has_rule else None)

    def test_results_with_keys_of_older_defaults_are_reported_by_what_their_lines_say(self):
        study = sweep()
        best = {(p, w): -6.0 for p in ("mup", "sp") for w in (16, 32, 64)}
        known = losses(study, best)
        lines = {}
        for i, t in enumerate(study.trials({})):
            arm, p, optimizer = t.series.arm, t.series.parametrization, t.series.optimizer
            where = {"arm": arm, "parametrization": "any" if t.width == 16 else p, "optimizer": optimizer}
            lines[f"old-{i}"] = {"loss": known[t.key], "width": t.width, "lr": t.lr, "seed": t.seed, **where}
        assert table(reports(study, lines)) == table(
            reports(study, {k: {"loss": v} for k, v in known.items()})
        )
        assert [r.done for r in reports(study, lines)] == [30, 30]

    def test_the_standard_parametrization_with_clipped_sgd_is_called_normalized_and_no_control(self):
        study = sweep(optimizers="sgd,adamw")
        lines = {t.key: {"loss": 3.0, "clipped": 0.9 + 0.1 * t.seed} for t in study.trials({})}
        rows = {str(r.series): r for r in reports(study, lines)}
        assert rows["sp sgd"].name == "sp sgd (normalized)" and "no control" in table(list(rows.values()))
        assert "in 90% to 100% of a run's steps" in rows["sp sgd"].remark
        assert not rows["mup sgd"].remark and not rows["sp adamw"].remark
        free = reports(sweep(optimizers="sgd", **{"optimizer.clip": "none"}), {})
        assert not any(r.remark for r in free)


def test_a_result_line_cut_short_by_a_kill_is_skipped_and_later_ones_are_read(tmp_path: Path):
    results = Results(tmp_path)
    results.add({"key": "a", "loss": 1.0})
    with open(results.path, "ab") as file:
        file.write(b'{"key": "b", "lo')
    assert set(results.read()) == {"a"}
    results.add({"key": "b", "loss": None})
    results.add({"key": "b", "loss": 5.0})
    assert results.read() == {"a": {"key": "a", "loss": 1.0}, "b": {"key": "b", "loss": None}}


def test_time_left_is_the_median_time_of_finished_trials_times_the_open_ones():
    trials = sweep(widths="32,64", parametrizations="mup", seeds="0").trials({})
    known = {t.key: {"loss": 1.0, "width": 32, "optimizer": "adamw", "seconds": 10.0} for t in trials[:2]}
    # three of width 32 at 10 s, five of width 64 at four times that, two at a time
    assert seconds_left(trials, known, 2) == pytest.approx((3 * 10 + 5 * 40) / 2)
    assert seconds_left(trials, {}, 2) is None


def arguments(data: Path, out: Path, **changes: object) -> list[str]:
    values = {
        "widths": "16",
        "lrs": "2**-7..2**-6",
        "seeds": 0,
        "refine": 0,
        "jobs": 2,
        "threads": 1,
        "steps": 6,
        "checkpoint.every": 2,
        "batch.length": 16,
        "device": "cpu",
        "data.source": data,
        "out": out,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return ["sweep", "tiny", *(f"{key}={value}" for key, value in values.items())]


def read_losses(out: Path) -> dict[str, float]:
    return {key: result["loss"] for key, result in Results(out).read().items()}


def test_a_sweep_killed_at_any_moment_ends_with_the_same_results(data: Path, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    status, text, err = run_command(*arguments(data, whole))
    assert status == 0, err
    assert "2/2" in text and (whole / "sweep.png").exists() and (whole / "report.json").exists()
    wait = random.Random(0)
    recorded: dict[str, float] = {}
    for _ in range(2):
        process = start(arguments(data, killed), tmp_path / "log")
        # from before the first trial has begun to after it has ended
        process.join(wait.uniform(1.0, 6.0))
        process.kill()
        process.join(10)
        assert recorded.items() <= read_losses(killed).items(), "a result was lost"
        recorded = read_losses(killed)
        time.sleep(0.3)  # its trials notice that it is gone, and release their folders
    status, _, err = run_command(*arguments(data, killed))
    assert status == 0, err
    assert read_losses(killed) == read_losses(whole)
    assert not list(killed.glob("trials/*/checkpoints"))


def test_a_sweep_asked_to_stop_saves_checkpoints_and_says_how_to_continue(data: Path, tmp_path: Path):
    out = tmp_path / "sweep"
    process = start(
        arguments(data, out, steps=100_000, lrs="0.01", jobs=1, checkpoint__every=20), tmp_path / "log"
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("trials/*/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    assert "the same command continues" in (tmp_path / "log").read_text()
    assert read_losses(out) == {} and list(out.glob("trials/*/checkpoints/step-*"))


def test_a_diverged_trial_is_a_result_and_a_trial_that_fails_is_reported(data: Path, tmp_path: Path):
    out = tmp_path / "diverges"
    changes = {"optimizers": "sgd", "lrs": "1e30", "optimizer.clip": "none", "steps": 20}
    status, text, err = run_command(*arguments(data, out, **changes))
    assert status == 0, err
    (result,) = Results(out).read().values()
    assert result["loss"] is None and "step" in result["diverged"] and "diverged" in text
    (place,) = out.glob("trials/*/")
    (place / "result.json").unlink()
    (place / "config.json").write_text("{")
    (out / "sweep.jsonl").unlink()
    status, text, _ = run_command("sweep", out, "jobs=1")
    assert status == 1 and "config.json cannot be read" in text


def test_a_second_runner_in_the_same_folder_is_refused(data: Path, tmp_path: Path):
    out = tmp_path / "sweep"
    out.mkdir()
    with RunFolder(out).hold():
        status, _, err = run_command(*arguments(data, out))
    assert status != 0 and "in use by another process" in err and not (out / "sweep.json").exists()
