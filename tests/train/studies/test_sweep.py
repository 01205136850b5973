"""Sweeps: which trials run, how they survive kills, how optima are fitted,
and the verdict on transfer.
"""

import json
import math
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.settings.errors import RunFolderError, UsageError
from delta_trn.train.studies.fits import line, optimum, student_quantile
from delta_trn.train.studies.sweep.curves import Curve
from delta_trn.train.studies.sweep.grid import Sweep, Trial, define
from delta_trn.train.studies.sweep.report import Report, drifts, reports, table
from delta_trn.train.studies.sweep.results import Results
from tests.support.tiny_run import run_command, start

AXES = {"widths": "16,32,64", "lrs": "2**-8..2**-4", "parametrizations": "mup,sp", "seeds": "0,1"}
EVIDENCE = Path(__file__).parents[3] / "results" / "2026-11-23_cpu_evidence"


def sweep(**changes: str) -> Sweep:
    return define(
        "tiny", {**AXES, **{name.replace("__", "."): value for name, value in changes.items()}}
    )


def pretend(
    study: Sweep, best: dict[tuple[str, int], float], level: dict[str, float] | None = None
) -> list:
    """Returns lines of losses on parabolas with minima at log2 rate = best[arm or parametrization,
    width].

    The level of an arm is 3 unless given; seed 1 lies 0.01 higher.
    """

    def loss(t: Trial) -> float | None:
        at = best[t.arm or t.parametrization, t.width]
        y = (level or {}).get(t.arm, 3.0) + 0.1 * (math.log2(t.lr) - at) ** 2 + 0.01 * t.seed
        return y if math.isfinite(y) else None

    return [{**t.coordinates(), "loss": loss(t), "parameters": 1200} for t in study.trials]


class TestDefinition:
    def test_a_learning_rate_grid_is_a_list_or_a_range(self):
        grids = {
            "2**-3..2**-1": [0.125, 0.25, 0.5],
            "1e-3..1e-1:10": [1e-3, 1e-2, 1e-1],
            "0.3,0.1": [0.1, 0.3],
        }
        for text, rates in grids.items():
            trials = sweep(lrs=text, widths="32", seeds="0", parametrizations="mup").trials
            assert [t.lr for t in trials] == pytest.approx(rates)

    @pytest.mark.parametrize(
        "text", ["0", "-1,2", "a", "", "1..", "2..1", "1..2:1", "1,1", "nan", "1e400"]
    )
    def test_a_grid_that_cannot_be_read_is_refused_with_its_text(self, text: str):
        with pytest.raises(UsageError, match="expected different positive rates"):
            sweep(lrs=text)

    def test_trials_are_all_combinations_and_share_the_base_width(self):
        """3 widths, 5 rates, 2 parametrizations and 2 seeds;
        both tables agree at the base width.
        """
        trials = sweep().trials
        assert len(trials) == len({t.key for t in trials}) == 50
        shared = {(t.parametrization, t.config.parametrization) for t in trials if t.width == 16}
        assert shared == {("any", "sp")}
        places = [(t.seed, t.optimizer, t.width) for t in sweep(optimizers="adamw,sgd").trials]
        assert places == sorted(places), "what is cut short is complete"

    def test_every_axis_of_a_sweep_reaches_the_configuration_of_its_runs(self):
        (t, *_) = sweep(optimizers="sgd", widths="32", lrs="1e-4", seeds="7", steps="13").trials
        c = t.config
        assert (c.model.width, c.optimizer.name, c.optimizer.lr, c.seed, c.steps) == (
            32,
            "sgd",
            1e-4,
            7,
            13,
        )
        assert c.optimizer.weight_decay == 0 and c.evaluation.every == 13
        assert c.schedule.min_lr == 1e-4, (
            "at a rate below the recipe's floor the schedule is constant"
        )

    def test_arms_are_read_from_a_key_or_a_file(self, tmp_path: Path):
        study = sweep(arms="model.layers=1,3", widths="32", parametrizations="mup")
        assert {(t.arm, t.config.model.layers) for t in study.trials} == {("1", 1), ("3", 3)}
        file = tmp_path / "arms.json"
        file.write_text(
            json.dumps({"deep": {"model.layers": 3}, "paper's": {"parametrization": "sp"}})
        )
        study = sweep(arms=str(file), widths="32", parametrizations="mup")
        assert {(t.arm, t.parametrization, t.config.model.layers) for t in study.trials} == {
            ("deep", "mup", 3), ("paper's", "sp", 2),
        }  # fmt: skip
        assert json.loads(json.dumps(study.asked["arms"]))["deep"] == {"model.layers": "3"}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"widths": "0"}, "widths=0"),
            ({"widths": "16,16"}, "different whole numbers"),
            ({"seeds": "-1"}, "seeds=-1"),
            ({"parametrizations": "mupp"}, "parametrization=mupp"),
            ({"optimizers": "adam"}, "optimizer.name=adam"),
            ({"arms": "readout"}, "expected KEY=V1,V2"),
            ({"arms": "model.residual="}, "expected different names"),
            ({"arms": "model.residul=a,b"}, "model.residual"),
            ({"arms": "/nowhere.json"}, "cannot be read"),
            ({"model.width": "32"}, "give widths=32"),
            ({"lrs.sgd": "0.1"}, "unknown key 'lrs.sgd'"),
            ({"optimizer.memory": "2"}, "optimizer.memory=2.0 has no effect here"),
            (
                {"arms": "optimizer.eps=1e-12,1e-8", "optimizers": "sgd"},
                "optimizer.eps=1e-12 has no effect",
            ),
            (
                {"schedule.min_lr": "0.01"},
                "schedule.min_lr=0.01 is above the lowest rate, 0.00390625",
            ),
            ({"stepz": "3"}, "nearest known: steps"),
        ],
    )
    def test_a_bad_sweep_is_refused_before_anything_runs(
        self, changes: dict[str, str], message: str, tmp_path: Path
    ):
        axes = {**AXES, **changes, "out": str(tmp_path / "sweep")}
        status, _, err = run_command(
            "sweep", "tiny", *(f"{key}={value}" for key, value in axes.items())
        )
        assert status == 2 and message in err
        assert not (tmp_path / "sweep").exists()

    def test_a_sweep_without_learning_rates_is_refused(self):
        status, _, err = run_command("sweep", "tiny", "widths=16")
        assert status == 2 and "lrs.adamw=2**-10..2**-4" in err

    def test_a_folder_takes_longer_axes_and_no_other_keys_or_arms(self, tmp_path: Path):
        study = sweep(widths="32", arms="model.layers=1,2")
        (tmp_path / "sweep.json").write_text(json.dumps(study.asked))
        sweep(seeds="0,1,2", arms="model.layers=1,2,3").require_same(tmp_path)
        (tmp_path / "arms.json").write_text('{"1": {"model.layers": "9"}}')
        for other in (
            {"arms": "model.layers=1,2", "steps": "7"},
            {"arms": str(tmp_path / "arms.json")},
        ):
            with pytest.raises(RunFolderError, match="choose another out=DIR"):
                sweep(**other).require_same(tmp_path)


class TestFits:
    def test_quantiles_and_slopes_match_the_textbook(self):
        for freedom, t in ((1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423)):
            assert student_quantile(0.975, freedom) == pytest.approx(t, rel=1e-4)
        assert line([0, 1, 2], [0, 1, 3]) == pytest.approx((1.5, math.sqrt(1 / 6 / 2)))

    def test_the_optimum_of_a_parabola_is_found_whatever_the_seeds_levels(self):
        x, seeds = [float(i) for i in range(-2, 3) for _ in range(2)], [0, 1] * 5
        y = [0.1 * (a - 0.3) ** 2 + 0.5 * s for a, s in zip(x, seeds, strict=True)]
        assert optimum(x, y, seeds) == pytest.approx(0.3)
        assert optimum(x[:-1], y[:-1], seeds[:-1]) == pytest.approx(0.3)
        assert (
            optimum(x, [-a for a in y], seeds) is None and optimum(x[:6], y[:6], seeds[:6]) is None
        )


class TestVerdict:
    @staticmethod
    def curves(optima: list[float], noise: float = 0.002) -> list:
        rng = np.random.default_rng(1)
        curves = []
        for width, best in zip((64, 128, 256), optima, strict=True):
            points = [
                (x, 3 + 0.1 * (x - best) ** 2 + noise * float(rng.normal()), seed)
                for x in map(float, range(-9, -3))
                for seed in (0, 1)
            ]
            curves.append(Curve(width, points))
        return curves

    def test_sides_transfer_where_a_curve_stays_and_move_where_it_moves(self):
        for stays in drifts(self.curves([-6.2] * 3)):
            assert stays.verdict == "transfers" and stays.low <= 0 <= stays.high
        for moves in drifts(self.curves([-5.2, -6.2, -7.2])):
            assert moves.verdict == "moves" and moves.octaves == pytest.approx(-1, abs=0.1)

    def test_costs_are_found_on_a_grid_of_half_octaves(self):
        """Four times sqrt(2) is 2^2 and a rounding,
        which made half of the best rate another rate.
        """
        rates = [math.log2(2.0**-9 * 1.4142135623730951**k) for k in range(9)]
        curves = [Curve(width, [(x, 3 + (x + 6) ** 2, 0) for x in rates]) for width in (64, 256)]
        assert table([Report("", curves, ())]).endswith("| 1.0000 | 0.0000 | 1.0000 |")

    def test_rates_at_the_limit_of_a_fit_are_taken_whatever_their_rounding(self):
        """A step of a grid by sqrt(2) is half an octave and a rounding."""
        rates = [round(math.log2(2.0**-9 * 1.4142135623730951**k), 15) for k in range(9)]
        for best in (-7, -6.5, -6):
            near = Curve(64, [(x, (x - best) ** 2, 0) for x in rates]).near_best
            assert sorted(near) == pytest.approx(
                [best + k / 2 for k in range(-3, 4) if best + k / 2 <= -5]
            )

    def test_a_best_rate_at_an_end_is_no_optimum_and_has_no_wall(self):
        (low, high, middle) = self.curves([-12, 0, -6.2])
        assert low.optimum is high.optimum is None and middle.optimum == pytest.approx(
            -6.2, abs=0.05
        )
        assert low.is_at_an_end and high.is_at_an_end and not middle.is_at_an_end
        assert "three rates on this side" in drifts([high, high])[1].verdict

    @pytest.mark.parametrize("off", [0.0, 1e-12, -1e-12])
    def test_report_groups_series_and_shares_the_base_width(self, off):
        """A rate at the end of a window belongs to it however the window's center was rounded."""
        best = {("mup", w): -6.0 + off for w in (32, 64)} | {("any", 16): -6.0 + off}
        best |= {("sp", w): -6.0 + off - math.log2(w / 16) for w in (32, 64)}
        mup, sp = reports(pretend(sweep(), best))
        assert mup.curves[0] == sp.curves[0] and [len(c.points) for c in mup.curves] == [10, 10, 10]
        verdicts = [[side.verdict for side in row.sides] for row in (mup, sp)]
        assert verdicts == [["transfers"] * 3, ["moves"] * 3]

    def test_a_rate_of_two_grids_is_one_rate_however_their_factors_were_rounded(self):
        lines = list(
            pretend(
                sweep(),
                {("any", 16): -6.0, **{(x, w): -6.0 for x in ("mup", "sp") for w in (32, 64)}},
            )
        )
        other = [{**x, "lr": x["lr"] * (1 + 2**-52) if x["seed"] else x["lr"]} for x in lines]
        assert table(reports(other)) == table(reports(lines))

    def test_every_arm_is_compared_at_its_own_best_rate_seed_by_seed(self):
        """At one rate for both, b would look 0.1 worse than it is. Seeds differ,
        arms of one seed by 0.1.
        """
        study = sweep(
            arms="model.layers=1,2", parametrizations="mup", widths="16,64", lrs="2**-8..2**-6"
        )
        best = {("1", 16): -7.0, ("1", 64): -7.0, ("2", 16): -8.0, ("2", 64): -6.0}
        rows = (
            table(reports(pretend(study, best, {"1": 4.0, "2": 4.1}))).split("\n\n")[1].splitlines()
        )
        assert rows[2].startswith("| 1 mup adamw | 16 | 1,200 | 2^-7 | 4.0050 | - |")
        assert rows[4].startswith(
            "| 2 mup adamw | 16 | 1,200 | 2^-8, an end | 4.1050 | 0.1000 ± 0.0000 |"
        )
        # the narrowest width's rate costs nothing where the optimum stays, and 0.1 * 2^2 two
        # octaves away
        assert rows[3].endswith("| 0.1000 ± 0.0000 | 0.0000 ± 0.0000 | 0.1000 ± 0.0000 |")
        assert rows[5].endswith("| - | 0.4000 ± 0.0000 | 0.1000 ± 0.0000 |")
        lost = table(reports(pretend(study, best, {"1": 4.0, "2": math.inf})))
        assert "| 2 mup adamw | 64 | 1,200 | - | diverged | - | - | - | - | - |" in lost


class TestStoredEvidence:
    """What docs/mup.md says of the learning rate is printed from the stored lines,
    and is what was found.
    """

    @pytest.mark.parametrize(
        ("stages", "recorded", "optima", "flank", "wall"),
        [
            (
                ("widths",),
                "widths",
                "-6.61 -6.54 -6.79",
                "+0.109 | -0.03 to +0.21",
                "-0.239 | -1.00 to +0.42",
            ),
            (
                ("widths", "width_512"),
                ".",
                "-6.61 -6.54 -6.79 -6.83",
                "+0.090 | -0.01 to +0.19",
                "-0.236 | -0.67 to +0.12",
            ),
            (
                ("standard",),
                ".",
                "-6.65 -7.65 -8.20",
                "-0.892 | -1.52 to -0.26",
                "-0.786 | -2.13 to +0.55",
            ),
            (
                ("muon",),
                "muon",
                "-6.05 -6.14",
                "+0.019 | -0.11 to +0.13",
                "-0.199 | -1.50 to +1.10",
            ),
        ],
    )
    def test_drifts_and_costs_are_the_recorded_ones(self, stages, recorded, optima, flank, wall):
        status, out, err = run_command("sweep", *(EVIDENCE / stage for stage in stages), "--report")
        assert status == 0, err
        assert f"| flank | {flank} |" in out and f"| wall | {wall} |" in out
        (name,) = {line.split("|")[1] for line in out.splitlines() if "| flank |" in line}
        before = (EVIDENCE / recorded / "report.md").read_text()
        rows = [line for line in before.splitlines() if line.startswith(f"|{name}|")]
        printed = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()]
        curves = {(cells[1], cells[2]): cells[3:] for cells in printed if len(cells) == 12}
        assert len(rows) == 2 * len([key for key in curves if key[0] == name.strip()]) + 2
        # reports of those days have other optima: rounding decided on a rate 1.5 octaves from the
        # best one
        assert [
            cells[4] for (_, width), cells in curves.items() if width.isdigit()
        ] == optima.split()
        for cells in ([cell.strip() for cell in row.split("|")] for row in rows):
            if cells[2] in ("flank", "wall"):
                # reports of those days also had the drift of each window
                assert cells[:6] in [of_side[:6] for of_side in printed]
            elif len(cells) == 9:  # width, best rate, its loss, optimum, 95% within, rates
                of_width = curves[cells[1], cells[2]]
                assert [of_width[1].partition(",")[0], of_width[2]] == cells[3:5]
            else:  # width, nats at half of the best rate, at it, at twice it
                assert curves[cells[1], cells[2]][5:8] == cells[3:6]

    def test_a_folder_without_results_is_named(self, tmp_path: Path):
        status, _, err = run_command("sweep", EVIDENCE / "widths", tmp_path, "--report")
        assert status == 2 and f"{tmp_path} has no results of a sweep" in err


def test_a_result_line_cut_short_by_a_kill_is_skipped_and_later_ones_are_read(tmp_path: Path):
    (a, b, *_) = sweep().trials
    results = Results(tmp_path)
    results.add({**a.coordinates(), "loss": 1.0})
    with open(results.path, "ab") as file:
        file.write(b'{"arm": "", "lo')
    assert set(results.read()) == {a.place}
    results.add({**b.coordinates(), "loss": None})
    results.add({**b.coordinates(), "loss": 5.0})
    assert {place: line["loss"] for place, line in results.read().items()} == {
        a.place: 1.0,
        b.place: None,
    }


def arguments(data: Path, out: Path, **changes: object) -> list[str]:
    values = {
        "widths": "16", "lrs": "2**-7..2**-6", "seeds": 0, "jobs": 2, "threads": 1, "steps": 6,
        "checkpoint.every": 2, "batch.length": 16, "device": "cpu", "data.source": data, "out": out,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }  # fmt: skip
    return ["sweep", "tiny", *(f"{key}={value}" for key, value in values.items())]


def read_losses(out: Path) -> dict:
    return {place: result["loss"] for place, result in Results(out).read().items()}


def test_a_sweep_killed_at_any_moment_ends_with_the_same_results(data: Path, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    status, text, err = run_command(*arguments(data, whole))
    assert status == 0, err
    assert "2/2" in text and (whole / "sweep.png").exists() and (whole / "report.md").exists()
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


def test_a_sweep_asked_to_stop_saves_checkpoints_and_says_how_to_continue(
    data: Path, tmp_path: Path
):
    out = tmp_path / "sweep"
    process = start(
        arguments(data, out, steps=100_000, lrs="0.01", jobs=1, checkpoint__every=20),
        tmp_path / "log",
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("trials/*/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    assert "the same command continues" in (tmp_path / "log").read_text()
    assert read_losses(out) == {} and list(out.glob("trials/*/checkpoints/step-*"))


def test_a_diverged_trial_is_a_result_and_a_trial_that_fails_is_reported(
    data: Path, tmp_path: Path
):
    out = tmp_path / "diverges"
    changes = {"optimizers": "sgd", "lrs": "1e30", "optimizer.clip": "none", "steps": 20, "jobs": 1}
    status, text, err = run_command(*arguments(data, out, **changes))
    assert status == 0, err
    (result,) = Results(out).read().values()
    assert result["loss"] is None and "step" in result["diverged"] and "diverged" in text
    (place,) = out.glob("trials/*/")
    (place / "result.json").unlink()
    (place / "config.json").write_text("{")
    (out / "sweep.jsonl").unlink()
    status, text, _ = run_command(*arguments(data, out, **changes))
    assert status == 1 and "config.json cannot be read" in text


def test_a_second_runner_in_the_same_folder_is_refused(data: Path, tmp_path: Path):
    out = tmp_path / "sweep"
    out.mkdir()
    with RunFolder(out).hold():
        status, _, err = run_command(*arguments(data, out))
    assert status != 0 and "in use by another process" in err and not (out / "sweep.json").exists()
