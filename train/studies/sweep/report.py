"""What a sweep's results say: the best rate of every width, how flank and wall move, and how sure that is."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from delta_trn.train.studies.fits import Optimum, optimum
from delta_trn.train.studies.sweep.question import Series, Sweep, Trial
from delta_trn.train.studies.sweep.results import Result, losses
from delta_trn.train.studies.sweep.sides import Curves, Name, Side, side

# A parabola is fitted to the rates within OCTAVES of the best one, or to the NEAREST if those are fewer:
# losses farther out do not follow a parabola.
OCTAVES = 1.5
NEAREST = 5
# Octaves beside the narrowest width's best rate at which the table of costs looks.
BESIDE = (-1.0, 0.0, 1.0)
DIGITS = 6  # of the logarithm of a rate: rates of a grid carry the rounding of its factor
NORMALIZED = (
    "this is normalized SGD and no control for muP. Clipping gives every step that it shortens{steps} the "
    "same length at every width, which is nearly what muP asks for"
)


@dataclass(frozen=True)
class Curve:
    """Loss against learning rate at one width.

    rates       log2 of the rate -> mean held-out loss over seeds; infinity if one diverged
    points      (log2 of the rate, loss, seed) of every trial
    fit         of loss against log2 of the rate; None if there is no inner minimum yet
    why_not     why there is no fit
    parameters  of the model; None while no trial is done
    """

    width: int
    rates: Mapping[float, float]
    points: tuple[tuple[float, float, int], ...]
    fit: Optimum | None
    why_not: str | None
    parameters: int | None = None

    @property
    def best(self) -> tuple[float, float] | None:
        """Returns (log2 of the rate, mean loss) of the best rate tried; None if all diverged."""
        finite = {x: y for x, y in self.rates.items() if math.isfinite(y)}
        return min(finite.items(), key=lambda pair: pair[1]) if finite else None

    def near(self) -> list[tuple[float, float, int]]:
        """Returns the points of rates within OCTAVES of the best one, or of the NEAREST."""
        if self.best is None:
            return []
        best, _ = self.best
        finite = [x for x in self.rates if math.isfinite(self.rates[x])]
        order = sorted(finite, key=lambda x: abs(x - best))
        chosen = {x for i, x in enumerate(order) if i < NEAREST or abs(x - best) <= OCTAVES}
        return [point for point in self.points if point[0] in chosen]


@dataclass(frozen=True)
class Cost:
    """Nats lost at one width, measured: the loss at a rate less that at the width's own best rate tried.

    octaves     the rate is that many octaves beside the best one of the narrowest width
    error       standard error of the mean over seeds, which are paired; None for one seed
    """

    width: int
    octaves: float
    nats: float
    error: float | None


@dataclass(frozen=True)
class Report:
    """All curves of a series; `done` of the `wanted` trials have a result.

    sides   drifts of flank and wall with the width
    remark  what a reader must know of this series, or nothing
    """

    series: Series
    curves: tuple[Curve, ...]
    sides: tuple[Side, ...]
    costs: tuple[Cost, ...]
    done: int
    wanted: int
    remark: str = ""

    @property
    def name(self) -> str:
        return f"{self.series} (normalized)" if self.remark else str(self.series)

    @property
    def verdict(self) -> str:
        """Returns what each side does, in one line."""
        return ", ".join(f"{side.name} {side.verdict}" for side in self.sides)


def reports(sweep: Sweep, results: Mapping[str, Result]) -> list[Report]:
    """Reports every series in the order of the definition. Trials without a result are left out.

    Keys of trials change with recipes and defaults. If no result has a key of this sweep's, each belongs
    where its own line says.
    """
    known = losses(results)
    groups: dict[Series, dict[int, list[Trial]]] = defaultdict(dict)
    for series, trials in sweep.curves(known):
        groups[series][trials[0].width] = trials
    everything = [trial for widths in groups.values() for trials in widths.values() for trial in trials]
    by_key = not results or any(trial.key in known for trial in everything)
    rows = []
    for series, widths in groups.items():
        lines = {
            width: [{**results[t.key], "lr": t.lr, "seed": t.seed} for t in trials if t.key in known]
            if by_key
            else [r for r in results.values() if r["width"] == width and _belongs(r, series)]
            for width, trials in widths.items()
        }
        curves = tuple(_curve_of(width, of_width) for width, of_width in lines.items())
        remark = _remark(series, widths, [line for of_width in lines.values() for line in of_width])
        done, wanted = (sum(map(len, group.values())) for group in (lines, widths))
        sides = (drift("flank", curves), drift("wall", curves))
        rows.append(Report(series, curves, sides, tuple(costs(curves)), done, wanted, remark))
    return rows


def _belongs(result: Result, series: Series) -> bool:
    """Whether a line is of a series; one from the base width, where all tables agree, is of several."""
    same = result["arm"] == series.arm and result["optimizer"] == series.optimizer
    return same and result["parametrization"] in ("any", series.parametrization)


def _remark(series: Series, widths: Mapping[int, Sequence[Trial]], lines: Sequence[Result]) -> str:
    """Returns why a series is not what its name says: the standard parametrization with clipped SGD."""
    config = next(iter(widths.values()))[0].config
    if (series.parametrization, series.optimizer) != ("sp", "sgd") or config.optimizer.clip is None:
        return ""
    shares = [line["clipped"] for line in lines if "clipped" in line]
    steps = f" (here in {min(shares):.0%} to {max(shares):.0%} of a run's steps)" if shares else ""
    return NORMALIZED.format(steps=steps)


def _curve_of(width: int, lines: Sequence[Result]) -> Curve:
    losses = [math.inf if line["loss"] is None else float(line["loss"]) for line in lines]
    fitted = curve(
        width, [(math.log2(line["lr"]), y, line["seed"]) for line, y in zip(lines, losses, strict=True)]
    )
    return replace(fitted, parameters=lines[0].get("parameters") if lines else None)


def curve(width: int, points: Sequence[tuple[float, float, int]]) -> Curve:
    """Fits the curve of (log2 rate, loss, seed)."""
    by_rate: dict[float, list[float]] = defaultdict(list)
    for x, y, _ in points:
        by_rate[x].append(y)
    # a rate that only some seeds have would be compared over fewer seeds than the rest
    most = max(map(len, by_rate.values()), default=0)
    rates = {x: sum(ys) / len(ys) for x, ys in sorted(by_rate.items()) if len(ys) == most}
    raw = Curve(width, rates, tuple(sorted(points)), None, None)
    fit, why_not = _fit(raw)
    return replace(raw, fit=fit, why_not=why_not)


def _fit(raw: Curve) -> tuple[Optimum | None, str | None]:
    finite = [x for x, y in raw.rates.items() if math.isfinite(y)]
    if raw.best is None or len(finite) < 4:
        return None, f"{len(finite)} rates with a finite loss; a parabola with an error needs 4"
    best, _ = raw.best
    if best == min(finite):
        return None, f"the lowest rate tried, 2^{best:g}, is the best"
    if best == max(finite):
        return None, f"the highest rate without divergence, 2^{best:g}, is the best"
    x, y, seeds = zip(*raw.near(), strict=True)
    fit = optimum(x, y, seeds)
    if fit is None:
        return None, "the losses near the best rate do not curve upwards"
    if not min(x) <= fit.at <= max(x):
        return None, f"the parabola's minimum, 2^{fit.at:.2f}, lies outside the rates it was fitted to"
    return fit, None


def drift(name: Name, curves: Sequence[Curve]) -> Side:
    """Returns how one side of the curves moves with log2 of the width."""
    return side(name, *by_scale({c.width: c for c in curves}))


def by_scale(curves: Mapping[float, Curve]) -> tuple[Curves, Mapping[float, float]]:
    """Returns the losses and best rates of curves, by log2 of their scales: arguments of `sides.side`."""
    points: dict[tuple[float, int], dict[float, float]] = defaultdict(dict)
    best = {}
    for scale, c in curves.items():
        if c.best is None:
            continue
        best[math.log2(scale)] = c.best[0] if c.fit is None else c.fit.at
        for x, y, seed in c.points:
            points[math.log2(scale), seed][x] = y
    return points, best


@dataclass(frozen=True)
class Along:
    """How curves of one width move along an axis of arms, such as depth, per doubling of it."""

    axis: str
    series: str
    width: int
    sides: tuple[Side, ...]


def along(sweep: Sweep, rows: Sequence[Report]) -> list[Along]:
    """Reports every axis of arms at every width; empty if the arms are no amounts of anything."""
    arms = {arm.name: arm for arm in sweep.arms if arm.axis}
    groups: dict[tuple[str, str, int], dict[float, Curve]] = defaultdict(dict)
    for report in rows:
        if (arm := arms.get(report.series.arm)) is not None:
            name = f"{report.series.parametrization} {report.series.optimizer}"
            for c in report.curves:
                groups[arm.axis, name, c.width][arm.scale] = c
    return [
        Along(axis, name, width, tuple(side(which, *by_scale(curves)) for which in ("flank", "wall")))
        for (axis, name, width), curves in groups.items()
    ]


def along_table(rows: Sequence[Along]) -> str:
    """Formats drifts along the axes of arms, a table per axis."""
    tables = []
    for axis in dict.fromkeys(row.axis for row in rows):
        named = [(f"{row.series}, width {row.width}", row.sides) for row in rows if row.axis == axis]
        tables.append("\n".join(_side_lines("series", f"doubling of {axis}", named)))
    return "\n\n".join(tables)


def costs(curves: Sequence[Curve]) -> list[Cost]:
    """Returns what widths lose at, below and above the narrowest width's best rate, where that was tried."""
    measured = [c for c in curves if c.best is not None]
    if len(measured) < 2:
        return []
    first, _ = measured[0].best or (0.0, 0.0)
    rows = []
    for c in measured:
        own = round((c.best or (0.0, 0.0))[0], DIGITS)
        at = {(round(x, DIGITS), seed): y for x, y, seed in c.points}
        seeds = [seed for x, seed in at if x == own]
        for octaves in BESIDE:
            asked = round(first + octaves, DIGITS)
            differences = [at[asked, seed] - at[own, seed] for seed in seeds if (asked, seed) in at]
            if not differences:
                continue
            mean, n = sum(differences) / len(differences), len(differences)
            error = None
            if n > 1 and math.isfinite(mean):
                error = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
            rows.append(Cost(c.width, octaves, mean, error))
    return rows


def table(rows: Sequence[Report]) -> str:
    """Formats the curves, the sides and the costs of every series as Markdown."""
    lines = [
        "| series | width | best rate tried | its loss | optimum, log2 rate | 95% within | rates |",
        "|---|---|---|---|---|---|---|",
    ]
    for report in rows:
        for c in report.curves:
            best = c.best
            tried = ("-", "-") if best is None else (f"2^{best[0]:g}", f"{best[1]:.4f}")
            if c.fit is None:
                fitted = ("-", c.why_not or "-")
            elif not math.isfinite(c.fit.stderr):
                fitted = (f"{c.fit.at:.2f}", "not known: scatter hides how the losses curve")
            else:
                fitted = (f"{c.fit.at:.2f}", f"{c.fit.low:.2f} to {c.fit.high:.2f}")
            lines.append(f"| {report.name} | {c.width} | {' | '.join((*tried, *fitted))} | {len(c.rates)} |")
    lines += ["", *_side_lines("series", "doubling of width", [(r.name, r.sides) for r in rows])]
    if cost_lines := _cost_lines(rows):
        lines += ["", *cost_lines]
    lines += [f"\n{r.name}: {r.remark}." for r in rows if r.remark]
    return "\n".join(lines)


def _side_lines(head: str, doubling: str, rows: Sequence[tuple[str, Sequence[Side]]]) -> list[str]:
    """Formats drifts. The last column has each window of rates and its own drift."""
    lines = [
        f"| {head} | side | octaves per {doubling} | 95%, seeds and windows | verdict | windows of rates |",
        "|---|---|---|---|---|---|",
    ]
    for name, sides in rows:
        for s in sides:
            if not s.windows:
                lines.append(f"| {name} | {s.name} | - | - | {s.verdict} | - |")
                continue
            windows = ", ".join(
                f"2^{line.rates[0]:g} to 2^{line.rates[1]:g}: {line.slope:+.3f}" for line in s.windows
            )
            interval = "-" if math.isinf(s.low) else f"{s.low:+.2f} to {s.high:+.2f}"
            lines.append(f"| {name} | {s.name} | {s.octaves:+.3f} | {interval} | {s.verdict} | {windows} |")
    return lines


def _cost_lines(rows: Sequence[Report]) -> list[str]:
    titles = {-1.0: "at half of it", 0.0: "at it", 1.0: "at twice it"}
    lines = []
    for r in rows:
        by_width: dict[int, dict[float, Cost]] = defaultdict(dict)
        for cost in r.costs:
            by_width[cost.width][cost.octaves] = cost
        for width, found in by_width.items():
            cells = (_nats(found.get(octaves)) for octaves in titles)
            lines.append(f"| {r.name} | {width} | {' | '.join(cells)} |")
    if not lines:
        return []
    return [
        "Measured nats above the width's best rate tried, paired over seeds, at the narrowest's best rate:",
        "",
        f"| series | width | {' | '.join(titles.values())} |",
        "|---|---|" + "---|" * len(titles),
        *lines,
    ]


def _nats(cost: Cost | None) -> str:
    if cost is None:
        return "-"
    if not math.isfinite(cost.nats):
        return "diverges"
    return f"{cost.nats:.4f}" if cost.error is None else f"{cost.nats:.4f} ± {cost.error:.4f}"
