"""What keeping a narrow model's rate costs: read from the runs, tested against lines that are
known, and found again from the stored lines by a program that shares no code with the command.
"""

import gzip
import json
import math
import re
import shutil
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from delta_trn.train.studies.fits import fisher_tail, student_quantile
from delta_trn.train.studies.sweep import report
from delta_trn.train.studies.sweep.curves import Curve
from delta_trn.train.studies.sweep.regret import (
    Scatter,
    best_rate_drift,
    kept_rate,
    lack_of_fit,
    regrets,
    scatter_of,
)
from delta_trn.train.studies.sweep.report import Report, regret_lines, reports
from delta_trn.train.studies.sweep.results import Results
from tests.support.planted_bugs import Bug, planted
from tests.support.tiny_run import run_command

RESULTS = Path(__file__).parents[3] / "results"
TUNED, MULTIPLIERS = RESULTS / "2026-11-28_cpu_regret", RESULTS / "2026-11-26_cpu_multipliers"
UNTUNED = RESULTS / "2026-11-23_cpu_evidence"
# docs/mup.md's commands
ADAMW = [TUNED / x for x in ("widths", "width_512", "width_1024")]
STANDARD = [MULTIPLIERS / x for x in ("standard", "standard_64", "standard_256")]
README = [*ADAMW, *STANDARD, TUNED / "standard_128"]
SERIES = {
    "README's": README,
    "Muon": [MULTIPLIERS / "muon_256", TUNED / "muon_128", TUNED / "muon_between"],
    "SGD": [MULTIPLIERS / "sgd_256", TUNED / "sgd_128"],
    "full size": [TUNED / "full_size"],
    "four times the steps": [TUNED / "four_times_the_steps"],
    "untuned": [UNTUNED / x for x in ("widths", "width_512", "standard")],
}
RATES = [-7.5, -7.0, -6.5, -6.0, -5.5]
PLACE = "train.studies.sweep.regret"


def curve(
    width: int, loss, noise: float = 0.0, seeds: int = 2, levels: float = 0.0, draw: int = 0
) -> Curve:
    """Returns a curve of a function of log2 of the rate, with seeds that differ as a whole, too."""
    rng = np.random.default_rng((draw, width))
    level = levels * rng.standard_normal(seeds)
    points = [
        (x, loss(x) + level[s] + noise * float(rng.standard_normal()), s)
        for x in RATES
        for s in range(seeds)
    ]
    return Curve(width, points)


def bowl(best: float, steep: float = 0.1):
    return lambda x: 3 + steep * (x - best) ** 2


class TestDirect:
    def test_it_is_the_loss_between_the_rates_beside_the_kept_one_above_the_lowest_mean(self):
        """The narrow parabola is lowest at -6.2; at 2^-6.5 and 2^-6 the wide one loses 1 and 0."""
        wide = {-7.5: 3.5, -7.0: 2.0, -6.5: 1.0, -6.0: 0.0, -5.5: 0.5}
        narrow = curve(64, bowl(-6.2), 1e-6)
        lost = regrets([narrow, curve(128, wide.__getitem__, 1e-6)])[1]
        assert lost.kept == pytest.approx(-6.2, abs=1e-3)
        assert lost.direct == pytest.approx(0.4, abs=0.01) == lost.split
        assert lost.error == pytest.approx(0.0, abs=1e-5)

    def test_seeds_that_differ_as_a_whole_leave_no_error(self):
        lost = regrets([curve(w, bowl(-6.2), levels=1.0, seeds=4) for w in (64, 128)])[1]
        assert lost.error == pytest.approx(0, abs=1e-9)
        assert scatter_of([curve(64, bowl(-6.2), levels=1.0, seeds=4)]).size < 1e-9

    def test_two_seeds_that_agree_by_chance_have_the_scatter_of_all_runs(self):
        noisy = curve(64, bowl(-6.2), 0.05, seeds=8)
        lucky = curve(128, bowl(-6.2), 0.0)
        at, known = regrets([noisy, lucky])[1], scatter_of([noisy, lucky])
        assert known.size == pytest.approx(0.05, rel=0.3) and known.freedom == 28 + 4
        assert at.error == pytest.approx(0, abs=1e-9) and at.at_rate[1] > 0.05

    def test_halves_that_choose_do_not_pay(self):
        """Every seed has a dip of its own at another rate: no rate is better for the others."""
        points = [(x, 3.0 - 0.2 * (i == s), s) for i, x in enumerate(RATES) for s in range(4)]
        flat = Curve(128, points)
        lost = regrets([curve(64, bowl(-6.4), 0.001, seeds=4), flat])[1]
        halves = []
        for half in combinations(range(4), 2):
            chosen, rest = min(half), [s for s in range(4) if s not in half]
            at = np.array([0, 0, 0.8, 0.2, 0])
            own = -0.2 * np.eye(5)[:4]
            halves.append(np.mean([at @ own[s] - own[s][chosen] for s in rest]))
        assert lost.split == pytest.approx(np.mean(halves), abs=0.01)

    def test_a_kept_rate_beyond_those_tried_says_so(self):
        far = Curve(128, [(x + 20, 3 + x, s) for x in RATES for s in (0, 1)])
        lost = regrets([curve(64, bowl(-6.2), 0.01), far])[1]
        assert lost.direct is None and lost.paid["fitted"].beyond == 2
        row = regret_lines([Report("", (), (), [lost])])[2]
        assert row.count("beyond the rates tried") == 4 and "nan" not in row

    def test_one_seed_has_no_regret(self):
        assert regrets([curve(w, bowl(-6.2), seeds=1) for w in (64, 128)]) == []

    def test_a_seed_that_chose_does_not_pay(self):
        """Each of two seeds is lowest at a rate of its own by chance;
        to pay by it would cost nothing.
        """
        points = [
            (x, 3 + 0.1 * (x + 6) ** 2 - 0.2 * (x == -7 + seed), seed)
            for x in RATES
            for seed in (0, 1)
        ]
        (at_home, _) = regrets([Curve(64, points), Curve(128, points)])
        assert at_home.paid["best tried"].mean > 0.1

    def test_half_of_the_best_rate_costs_an_octave(self):
        (_, wide) = regrets([curve(w, bowl(-6.0), 1e-4, seeds=3) for w in (64, 128)])
        assert wide.paid["half of it"].mean == pytest.approx(0.1, abs=0.01)


class TestIntervals:
    @pytest.mark.parametrize(
        ("shape", "seeds"),
        [
            ("parabola", 8),
            ("V", 2),
            pytest.param("parabola", 2, marks=pytest.mark.slow),
            pytest.param("V", 8, marks=pytest.mark.slow),
        ],
    )
    def test_they_hold_the_regret_in_95_of_100_sweeps(self, shape: str, seeds: int):
        """Both intervals, of curves with runs' stored scatter of 0.018 and seeds' levels."""
        narrow, wide = bowl(-6.5, 0.02), bowl(-6.1, 0.05)
        if shape == "V":
            wide = lambda x: 3 + 0.05 * abs(x + 6.0)  # noqa: E731

        def truth(rate: float) -> float:
            means = [wide(x) for x in RATES]
            return float(np.interp(rate, RATES, means)) - min(means)

        given, chosen, best = 0, 0, kept_rate(curve(64, narrow), None)
        sweeps = 120
        for draw in range(sweeps):
            noisy = {"noise": 0.018, "levels": 0.02, "draw": draw}
            curves = [curve(64, narrow, seeds=8, **noisy), curve(512, wide, seeds=seeds, **noisy)]
            lost = regrets(curves)[1]
            low, high = lost.at_rate
            given += low - 1e-9 <= truth(lost.kept) <= high + 1e-9
            low, high = lost.with_choice
            chosen += low - 1e-9 <= truth(best) <= high + 1e-9
        assert min(given, chosen) >= 0.95 * sweeps - 3 * math.sqrt(0.05 * 0.95 * sweeps)

    def test_a_choice_that_is_uncertain_widens_the_second_interval(self):
        """A flat narrow curve chooses anywhere; the first interval takes its choice as given."""
        flat, steep = curve(64, bowl(-6.5, 0.005), 0.01), curve(128, bowl(-6.5, 0.3), 0.01)
        lost = regrets([flat, steep])[1]
        assert lost.with_choice[1] > lost.at_rate[1] + 0.1

    @pytest.mark.parametrize(
        "bug",
        [
            Bug("one run's scatter for the mean of all", f"{PLACE}:_bound",
                " / math.sqrt(len(losses))", "", "too wide"),
            Bug("one comparison's quantile", f"{PLACE}:_bound",
                "np.quantile(largest, 0.95)", "0.5", "too narrow"),
            Bug("seeds' levels are scatter", f"{PLACE}:scatter_of",
                "- losses.mean(1, keepdims=True) + losses.mean()", "", "levels"),
            Bug("the half that chooses pays", f"{PLACE}:_split",
                "lost[~chooses,", "lost[chooses,", "halves"),
            Bug("the luck of the lowest mean is paid by one seed", f"{PLACE}:_pay",
                "if point[2] != seed", "if True", "one seed"),
            Bug("the narrowest width's own misfit is not asked", f"{PLACE}:kept_rate",
                "misfit >= LEVEL else narrow.best", "True else narrow.best", "misfit"),
        ],
        ids=lambda bug: bug.name,
    )  # fmt: skip
    def test_these_checks_can_fail(self, bug: Bug):
        checks = {
            "too wide": TestReAnalysis().test_intervals_of_a_known_case,
            "too narrow": lambda: self.test_they_hold_the_regret_in_95_of_100_sweeps("V", 2),
            "levels": TestDirect().test_seeds_that_differ_as_a_whole_leave_no_error,
            "halves": TestDirect().test_halves_that_choose_do_not_pay,
            "one seed": TestDirect().test_a_seed_that_chose_does_not_pay,
            "misfit": TestParabola().test_a_curve_that_is_none_keeps_the_best_rate_tried,
        }
        checks[bug.check]()
        with planted(bug), pytest.raises(AssertionError):
            checks[bug.check]()


class TestParabola:
    def test_the_tail_of_fishers_distribution_is_the_textbooks(self):
        for ratio, above, below in ((4.4, 2, 68), (19.0, 2, 2), (5.3177, 1, 8), (1.0, 4, 4)):
            p = fisher_tail(ratio, above, below)
            if above == 2:  # of two degrees of freedom in closed form
                assert p == pytest.approx((1 + 2 * ratio / below) ** (-below / 2), rel=1e-6)
        assert fisher_tail(5.3177, 1, 8) == pytest.approx(0.05, rel=1e-3)
        assert fisher_tail(1.0, 4, 4) == pytest.approx(0.5, rel=1e-6)
        assert fisher_tail(student_quantile(0.975, 7) ** 2, 1, 7) == pytest.approx(0.05, rel=1e-3)

    def test_it_is_named_where_it_fits_and_only_there(self):
        narrow = curve(64, bowl(-6.5), 0.002, seeds=8)
        right = regrets([narrow, curve(128, bowl(-6.2), 0.002, seeds=8)])[1]
        assert right.parabola == pytest.approx(0.1 * 0.3**2, abs=0.002) and right.misfit > 0.05
        wrong = regrets([narrow, curve(128, lambda x: 3 + 0.1 * abs(x + 6), 0.002, seeds=8)])[1]
        assert wrong.parabola is None and wrong.misfit < 0.001
        assert "misses the losses, p < 0.001" in regret_lines([Report("", (), (), [wrong])])[2]

    def test_a_misfit_of_one_shape_is_seen_that_no_width_shows_alone(self):
        bent = lambda x: 3 + 0.03 * (x + 6.2) ** 2 - 0.012 * (x == -6)  # noqa: E731
        curves = [curve(w, bowl(-6.5) if w == 64 else bent, 0.018, 8) for w in (64, 128, 256, 512)]
        scatter = scatter_of(curves)
        together = lack_of_fit(curves[1], curves, scatter)
        alone = [lack_of_fit(c, [curves[0], c], scatter) for c in curves[1:]]
        assert together < 0.05 and together < min(alone), (together, alone)

    def test_a_curve_that_is_none_keeps_the_best_rate_tried(self):
        shape = dict(zip(RATES, (3.4, 3.3, 3.2, 3.0, 3.6), strict=True))
        narrow = curve(64, shape.__getitem__, 0.001, seeds=4)
        assert narrow.optimum is not None and abs(narrow.optimum + 6) > 0.1
        assert kept_rate(narrow, scatter_of([narrow])) == -6.0
        assert kept_rate(curve(64, bowl(-6.2)), Scatter(0.01, 4)) == pytest.approx(-6.2)

    @pytest.mark.parametrize("slope", [0.0, 0.3])
    def test_the_best_rates_drift_is_the_slope_of_the_parabolas_lowest_points(self, slope: float):
        widths = (64, 128, 256, 512)
        inside = 0
        for draw in range(40):
            curves = [
                curve(w, bowl(-6.8 + slope * i, 0.05), 0.018, seeds=4, draw=draw)
                for i, w in enumerate(widths)
            ]
            octaves, low, high = best_rate_drift(curves)
            assert low < octaves < high
            inside += low <= slope <= high
        assert inside >= 34
        assert best_rate_drift([curve(w, bowl(-6.5), seeds=1) for w in widths]) is None


class TestWhatIsComplete:
    def test_a_sweep_that_was_cut_short_says_what_its_complete_seeds_say(self, tmp_path: Path):
        """Two runs of a ninth seed once made 2^-7 the best rate, and every regret not a number."""
        folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in ADAMW]
        lines = [line for f in folders for line in Results(f).read().values()]
        (before,) = reports(lines)
        one = next(x for x in lines if x["width"] == 64 and x["seed"] == 7)
        for power in (-7.5, -7.0):
            Results(folders[0]).add({**one, "seed": 8, "lr": 2**power, "loss": 4.0})
        status, out, err = run_command("sweep", *folders, "--report")
        assert status == 0, err
        (after,) = reports(line for f in folders for line in Results(f).read().values())
        assert "| 64 | 184,744 | 2^-6.5 |" in out and "nan" not in out
        assert [x.direct for x in after.regrets] == pytest.approx(
            [x.direct for x in before.regrets], abs=0.003
        )
        assert after.regrets[0].kept == pytest.approx(before.regrets[0].kept, abs=0.1)

    def test_the_largest_complete_part_is_compared(self):
        points = [(x, 3.0, s) for x in RATES for s in range(3)]
        for more in ([(-7.5, 1.0, 9), (-7.0, 1.0, 9)], [(-9.0, 1.0, 0)], []):
            rates, seeds, losses = Curve(64, points + more).complete
            assert (rates, seeds, losses.shape) == (RATES, [0, 1, 2], (3, 5)), more

    def test_runs_that_two_folders_have_are_joined_whatever_their_order(self):
        printed = set()
        for order in (README, README[::-1], [*README[3:], *README[:3]]):
            status, out, err = run_command("sweep", *order, "--report")
            assert status == 0, err
            printed.add(out)
        assert len(printed) == 1

    @pytest.mark.parametrize("name", SERIES)
    def test_no_cell_is_not_a_number(self, name: str):
        status, out, err = run_command("sweep", *SERIES[name], "--report")
        assert status == 0 and not re.search(r"\bnan\b|\binf\b", out), err


def stored_runs(folders: list[Path]) -> dict:
    """Returns {(series, width): {log2 rate: {seed: loss}}} of raw lines; twice run, the mean."""
    runs = defaultdict(list)
    for folder in folders:
        with gzip.open(folder / "sweep.jsonl.gz", "rt") as file:
            for line in map(json.loads, file):
                rate = round(2 * math.log2(line["lr"])) / 2
                key = line["parametrization"], line["width"], rate, line["seed"]
                runs[key].append(line["loss"])
    found: dict = defaultdict(lambda: defaultdict(dict))
    for (kind, width, rate, seed), losses in runs.items():
        for own in ("mup", "sp") if kind == "any" else (kind,):
            found[own, width][rate][seed] = sum(losses) / len(losses)
    return found


def analyse(cells: dict, kept: float) -> tuple[float, float, float]:
    """Returns nats lost by a rate, their paired standard error, and the nats that halves pay."""
    most = max(len(seeds) for seeds in cells.values())
    rates = sorted(x for x in cells if len(cells[x]) == most)
    seeds = sorted(cells[rates[0]])
    left, right = next((a, b) for a, b in pairwise(rates) if a <= kept <= b)
    share = (kept - left) / (right - left)
    at = {s: (1 - share) * cells[left][s] + share * cells[right][s] for s in seeds}

    def mean(rate: float, of: list[int]) -> float:
        return sum(cells[rate][s] for s in of) / len(of)

    best = min(rates, key=lambda x: mean(x, seeds))
    lost = [at[s] - cells[best][s] for s in seeds]
    direct = sum(lost) / len(lost)
    error = math.sqrt(sum((x - direct) ** 2 for x in lost) / (len(lost) - 1) / len(lost))
    paid = []
    for half in combinations(seeds, len(seeds) // 2):
        own = min(rates, key=lambda x, half=half: mean(x, list(half)))
        rest = [s for s in seeds if s not in half]
        paid.append(sum(at[s] - cells[own][s] for s in rest) / len(rest))
    return direct, error, sum(paid) / len(paid)


class TestReAnalysis:
    """Shares no code with the command: it reads the raw lines, and the table that is printed."""

    @pytest.mark.parametrize("name", SERIES)
    def test_what_the_command_prints_is_found_again(self, name: str):
        status, out, err = run_command("sweep", *SERIES[name], "--report")
        assert status == 0, err
        rows = [line.split("|") for line in out.split("\n\n")[0].splitlines()[2:]]
        runs = stored_runs(SERIES[name])
        series = {row[1].split()[0] for row in rows}
        assert len(rows) == len([key for key in runs if key[0] in series]) and "mup" in series
        for _, series, width, kept, direct, _, _, split, *_ in rows:
            own = runs[series.split()[0], int(width)]
            lost, error, halves = analyse(own, float(kept))
            # the kept rate is printed to a hundredth of an octave
            lost_by_rounding = (
                0.005
                * 2
                * max(
                    abs(a - b)
                    for a, b in pairwise(np.mean([*own[x].values()]) for x in sorted(own))
                )
            )
            slack = 0.0011 + lost_by_rounding
            mean, _, spread = direct.partition("±")
            assert float(mean) == pytest.approx(lost, abs=slack), (series, width)
            assert float(spread) == pytest.approx(error, abs=slack), (series, width)
            assert float(split) == pytest.approx(halves, abs=slack), (series, width)

    def test_the_kept_rate_is_where_a_parabola_with_levels_by_seed_is_lowest(self):
        cells = stored_runs(README)["mup", 64]
        rates = [x for x in sorted(cells) if len(cells[x]) == 8]
        x = np.array(rates)
        a, b, _ = np.polyfit(x, [np.mean([*cells[r].values()]) for r in rates], 2)
        status, out, _ = run_command("sweep", *README, "--report")
        kept = {line.split("|")[3].strip() for line in out.split("\n\n")[0].splitlines()[2:]}
        assert status == 0 and kept == {f"{-b / 2 / a:.2f}"}

    def test_the_misfit_is_found_again(self):
        """Residuals of one shape at 128, 256 and 512, over what seed and rate do not explain."""
        runs, shape, count, squares, freedom = stored_runs(README), 0.0, 0, 0.0, 0
        for width in (64, 128, 256, 512, 1024):
            cells = runs["mup", width]
            most = max(map(len, cells.values()))
            full = [x for x in sorted(cells) if len(cells[x]) == most]
            y = np.array([[cells[x][s] for x in full] for s in sorted(cells[full[0]])])
            rest = y - y.mean(0) - y.mean(1)[:, None] + y.mean()
            squares += (rest**2).sum()
            freedom += (y.shape[0] - 1) * (y.shape[1] - 1)
            if full == RATES and width > 64:
                left = y.mean(0) - np.polyval(np.polyfit(full, y.mean(0), 2), full)
                shape, count = shape + len(y) * left, count + len(y)
        ratio = (shape**2).sum() / count / 2 / (squares / freedom)
        p = (1 + 2 * ratio / freedom) ** (-freedom / 2)
        status, out, _ = run_command("sweep", *README, "--report")
        assert status == 0 and out.count(f"misses the losses, p = {p:.3f}") >= 3

    def test_intervals_of_a_known_case(self):
        """Of two rates there is one comparison: Student's interval of a difference."""
        points = [
            (x, 3 + 0.1 * (x + 6.25) + 0.02 * ((s * 7 + i * 3) % 5 - 2), s)
            for i, x in enumerate((-6.5, -6.0))
            for s in range(5)
        ]
        two = Curve(64, points)
        _, lost = regrets([two, Curve(128, [(x, -y, s) for x, y, s in points])])
        y = np.array([[-p[1] for p in points if p[2] == s] for s in range(5)])
        d = y[:, 0] - y[:, 1]
        # both widths have the same residuals, so twice the degrees of freedom and one variance
        reach = student_quantile(0.975, 8) * d.std(ddof=1) / math.sqrt(5)
        assert lost.kept == -6.5 and lost.direct == pytest.approx(d.mean())
        assert lost.at_rate[1] == pytest.approx(d.mean() + reach, rel=0.06)


class TestPicture:
    def test_readmes_shows_the_loss_at_both_rates_and_marks_what_the_kept_one_loses(
        self, tmp_path: Path, monkeypatch
    ):
        """Widths first, then a panel a parametrization, in octaves from the rate that is kept."""
        drawn = []
        monkeypatch.setattr(
            report, "save_figure", lambda figure, path, advice: drawn.append(figure) or path
        )
        folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in README]
        (folders[0] / "report.md").write_bytes(before := b"of widths alone")
        status, out, err = run_command("plot", *folders)
        assert status == 0 and str(folders[0] / "sweep.png") in out, err
        assert (folders[0] / "report.md").read_bytes() == before
        (figure,) = drawn
        titles = [axes.get_title("left") for axes in figure.axes]
        assert titles == ["loss against width", "muP, AdamW", "standard, AdamW"]
        first, *panels = figure.axes
        runs = stored_runs(README)
        solid = {line.get_label(): line for line in first.lines if line.get_linestyle() == "-"}
        for kind, name, axes in zip(("mup", "sp"), titles[1:], panels, strict=True):
            widths = sorted(w for own, w in runs if own == kind)
            at_kept = dict(zip(*solid[name].get_data(), strict=True))
            assert sorted(at_kept) == widths
            crosses = sorted(line.get_ydata()[0] for line in axes.lines if line.get_marker() == "x")
            kept = -6.5146
            lost = sorted(analyse(runs[kind, w], kept)[0] for w in widths)
            assert crosses == pytest.approx(lost, abs=0.001)
            assert axes.get_xlim() == (-2, 2) and axes.get_ylim()[0] < 0
        assert all(axes.get_legend() is None for axes in panels) and len(figure.legends) == 1

    def test_a_sweep_of_one_width_has_no_panel_of_widths(self, tmp_path: Path, monkeypatch):
        drawn = []
        monkeypatch.setattr(
            report, "save_figure", lambda figure, path, advice: drawn.append(figure) or path
        )
        folder = shutil.copytree(UNTUNED / "decay_quarter", tmp_path / "one")
        assert run_command("plot", folder)[0] == 0
        assert drawn[0].axes[0].get_title("left") != "loss against width"


def numbers_of(page: str) -> str:
    return (RESULTS.parent / page).read_text(encoding="utf-8")


def test_readme_and_the_page_say_what_the_command_prints():
    """README's `0.014 ± 0.007` and the like stand in the rows of the command beside them."""
    status, out, err = run_command("sweep", *README, "--report")
    assert status == 0, err
    rows = [[x.strip() for x in line.split("|")] for line in out.split("\n\n")[0].splitlines()[2:]]
    cells = {(row[1].split()[0], int(row[2])): row[4:8] for row in rows}
    readme = numbers_of("README.md").partition("\n## muP\n")[2].partition("\n## ")[0]
    for key in (("mup", 256), ("mup", 512), ("mup", 1024), ("sp", 256)):
        direct, *_ = cells[key]
        assert direct in readme, (key, direct)
        assert direct in numbers_of("docs/mup.md"), (key, direct)
    assert all(cells["mup", w][3] in readme for w in (256, 512))
