"""What a coordinate check shows: powers of width, one table and one picture.

A slope is the power of width with which a module's output, or its change, grows. Under muP all are
0 but those of logits (Tensor Programs V, arXiv:2203.03466, appendix D.1), where two laws meet:
terms that share a sign add up, others average out to the root of their number.
"""

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from delta_trn.train.files import write_file
from delta_trn.train.studies.coordinates.modules import Reading
from delta_trn.train.studies.coordinates.operations import (
    ATTENTION,
    MUON_UPDATE,
    OWN_UPDATE,
    SOFTMAX_INPUT,
)
from delta_trn.train.studies.fits import line
from delta_trn.train.watch.figure import GRAY, RED, dress, new_figure, save_figure

TOLERANCE = 0.1  # how far a slope may be from theory, beside twice its standard error
NOISE = 0.1  # a slope within theory whose standard error is larger is not decided
ADVICE = "nothing else is lost: free some space and run the same command again"
# pattern of names -> quantity -> the powers that theory allows; (0, 0) where nothing is said
Theory = Mapping[str, Mapping[str, Sequence[float]]]
THEORY: Theory = {
    # Before training logits average out. What learning adds is aligned, but only in the few entries
    # of the vocabulary that do come next.
    "logits": {"size": (-0.5, 0), "change": (-0.5, 0)},
    "logit_next": {"size": (-0.5, 0)},
    # What a matrix itself adds. Muon's step has one size; AdamW's and SGD's go along with inputs
    # that tokens share, and those of unrelated tokens by chance, as the root of the width.
    f"* ({MUON_UPDATE})": {"size": (0, 0), "change": (0, 0)},
    f"* ({OWN_UPDATE})": {"size": (-0.5, 0), "change": (-0.5, 0)},
    # Queries and keys are unrelated at first; what is learned may be aligned.
    f"{ATTENTION} *": {"size": (0, 0), "change": (0, 0.5)},
    f"{SOFTMAX_INPUT} *": {"size": (-0.5, 0), "change": (-0.5, 0)},
    # Deep Delta Learning's v grows as the root of the width: it is written along a direction of
    # norm 1
    "*_write.value": {"size": (0.5, 0.5), "change": (0.5, 0.5)},
}
FLAT = (0.0, 0.0)
LABELS = 5  # in a panel of the picture


@dataclass(frozen=True)
class Slope:
    """A power of width, its standard error, and whether theory allows it."""

    slope: float
    stderr: float
    passes: bool

    def __str__(self) -> str:
        return f"{self.slope:+.2f} ± {self.stderr:.2f}{'' if self.passes else ' ✗'}"


@dataclass(frozen=True)
class Verdict:
    """One module: its slopes, and the steps at which one departs from theory.

    start           its size before training; None where that is 0
    size, change    after the last step
    undecided       the steps at which a slope is within theory, and its error above NOISE: alone,
                    and together with the same part of the other layers
    """

    parametrization: str
    optimizer: str
    tensor: str
    start: Slope | None
    size: Slope
    change: Slope
    fails_at: tuple[str, ...]
    undecided: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        return not self.fails_at


def judge(readings: Sequence[Reading], theory: Theory = THEORY) -> list[Verdict]:
    """Fits every parametrization, optimizer, module, quantity and step over widths and seeds, and
    judges it.

    Changes are judged from step 1 on. An output that is exactly 0 everywhere, before a readout or a
    mixer that starts at 0 has learned, is not judged; a change that is still 0 after the last step
    fails. A slope's error comes from the scatter of all widths and seeds about the line.
    """
    groups: dict[tuple[str, str, str], dict[tuple[int, str], list[tuple[int, float]]]] = (
        defaultdict(lambda: defaultdict(list))
    )
    for r in readings:
        points = groups[r.parametrization, r.optimizer, r.tensor]
        points[r.step, "size"].append((r.width, r.size))
        if r.step:
            points[r.step, "change"].append((r.width, r.change))
    last, widths, rows = max(r.step for r in readings), {r.width for r in readings}, []
    fitted: dict[tuple[str, str, str], dict[tuple[int, str], Slope]] = {}
    alike: dict[tuple[str, str, str], list[dict[tuple[int, str], Slope]]] = defaultdict(list)
    for key, group in groups.items():
        if {width for width, _ in group[last, "change"]} != widths:
            continue  # a module that only some of the models have
        fitted[key] = {
            at: _fit(points, *_find_allowed(theory, key[2], *at))
            for at, points in group.items()
            if at[0] == last or any(y for _, y in points)
        }
        alike[(*key[:2], _any_layer(key[2]))].append(fitted[key])
    for key, slopes in fitted.items():
        fails, undecided = [], []
        for at, slope in slopes.items():
            said, found = f"{at[1]} at step {at[0]}", slope
            if slope.passes and slope.stderr > NOISE:
                # one row is too noisy: the same part of all layers together is less so
                others = [each[at] for each in alike[(*key[:2], _any_layer(key[2]))] if at in each]
                found = _together(others, *_find_allowed(theory, key[2], *at))
            if not found.passes:
                fails.append(said)
            elif found.stderr > NOISE:
                undecided.append(said)
        size, change = slopes[last, "size"], slopes[last, "change"]
        start = slopes.get((0, "size"))
        rows.append(Verdict(*key, start, size, change, tuple(fails), tuple(undecided)))
    return rows


def _any_layer(name: str) -> str:
    """Returns a row's name without the numbers of layers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _together(slopes: Sequence[Slope], low: float, high: float) -> Slope:
    """Returns the mean slope of independent rows, judged as one."""
    slope = sum(s.slope for s in slopes) / len(slopes)
    error = math.sqrt(sum(s.stderr**2 for s in slopes)) / len(slopes)
    reach = TOLERANCE + 2 * error
    return Slope(slope, error, low - reach <= slope <= high + reach)


def _find_allowed(theory: Theory, name: str, step: int, quantity: str) -> tuple[float, float]:
    """Returns the lowest and the highest power that theory allows."""
    own = next((powers for pattern, powers in theory.items() if fnmatchcase(name, pattern)), {})
    low, high = own.get(quantity, FLAT)
    if quantity == "size" and step:
        # what training has added counts too, and may be as large as the rest
        less, more = own.get("change", FLAT)
        return min(low, less), max(high, more)
    return low, high


def _fit(points: Sequence[tuple[int, float]], low: float, high: float) -> Slope:
    if not all(0 < y < math.inf for _, y in points):
        return Slope(math.nan, math.nan, False)
    slope, error = line([math.log2(x) for x, _ in points], [math.log2(y) for _, y in points])
    reach = TOLERANCE + 2 * error
    return Slope(slope, error, low - reach <= slope <= high + reach)


def table(rows: Sequence[Verdict], theory: Theory = THEORY) -> str:
    """Formats slopes of sizes before training and of changes after the last step, one row per
    module.

    A module that fails at any step is marked with ✗, one that is not decided with ?; the last rows
    count those that pass at every step,
    and after the last.
    """
    columns = list(dict.fromkeys((v.optimizer, v.parametrization) for v in rows))
    cells = {((v.optimizer, v.parametrization), v.tensor): v for v in rows}
    heads = [
        f"{' '.join(column)} {quantity}" for column in columns for quantity in ("size", "change")
    ]
    lines = [
        "| " + " | ".join(["module", *heads, "theory"]) + " |",
        "|---" * (len(heads) + 2) + "|",
    ]
    modules = list(dict.fromkeys(v.tensor for v in rows))
    for name in modules:
        row = [name]
        for column in columns:
            v = cells.get((column, name))
            if v is None:  # Muon moves some matrices, and AdamW or SGD the same ones elsewhere
                row += ["-", "-"]
                continue
            mark = " ✗" if not v.passes else " ?" if v.undecided else ""
            changed = f"{v.change.slope:+.2f} ± {v.change.stderr:.2f}{mark}"
            row += ["0" if v.start is None else str(v.start), changed]
        low, high = _find_allowed(theory, name, 1, "change")
        row.append(f"{low:g}" if low == high else f"{low:g} to {high:g}")
        lines.append("| " + " | ".join(row) + " |")
    for title, passes in (
        ("pass at every step", lambda v: v.passes),
        ("pass after the last", lambda v: v.size.passes and v.change.passes),
    ):
        of_column = [[v for v in rows if (v.optimizer, v.parametrization) == c] for c in columns]
        passed = [f" | {sum(map(passes, own))} of {len(own)}" for own in of_column]
        lines.append(f"| **{title}** | " + " | ".join(passed) + " | |")
    return "\n".join(lines)


def draw(readings: Sequence[Reading], rows: Sequence[Verdict], path: Path) -> Path:
    """Draws changes after the last step against width: a panel per series, a line per row.

    muP promises flat lines. Red ones fail at some step, and the steepest of them carry their names.
    """
    last = max(r.step for r in readings)
    verdicts = {((v.optimizer, v.parametrization), v.tensor): v for v in rows}
    changes: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for r in readings:
        series = r.optimizer, r.parametrization
        if r.step == last and (series, r.tensor) in verdicts:
            changes[series][r.tensor][r.width].append(r.change)
    # a row of panels per parametrization, a column per optimizer
    optimizers, tables = (list(dict.fromkeys(series[i] for series in changes)) for i in (0, 1))
    figure = new_figure(3.7 * len(optimizers), 0.5 + 3.1 * len(tables), dpi=130)
    figure.suptitle(f"change of every row after {last} steps; red: the power of width", fontsize=10)
    widths = sorted({r.width for r in readings})
    panels = figure.subplots(len(tables), len(optimizers), squeeze=False, sharex=True, sharey=True)
    for axes in panels.flatten():
        axes.set_visible(False)
    any_red = any(not v.passes for v in rows)
    for series, modules in changes.items():
        axes = panels[tables.index(series[1]), optimizers.index(series[0])]
        axes.set_visible(True)
        red = [v.tensor for at, v in verdicts.items() if at[0] == series and not v.passes]
        named = sorted(red, key=lambda name: -abs(verdicts[series, name].change.slope))[:LABELS]
        labels = []
        for name, points in sorted(modules.items(), key=lambda item: item[0] in red):
            means = [sum(points[width]) / len(points[width]) for width in widths]
            color = RED if name in red else GRAY
            axes.plot(
                widths, means, color=color, marker="o", markersize=2, linewidth=0.9, alpha=0.8
            )
            if name in named:
                short = name.removeprefix("model.").removeprefix("blocks.")
                slope = verdicts[series, name].change.slope
                labels.append((means[-1], f" {short} {slope:+.2f}"))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.minorticks_off()
        # beside the lines there is room for names
        axes.set_xlim(widths[0] * 0.9, widths[-1] * (7 if any_red else 1.1))
        for i, (_, label) in enumerate(sorted(labels, reverse=True)):
            # one below another beside the lines, which lie too close to be named where they end
            place = {"transform": axes.transAxes, "va": "top", "ha": "right"}
            axes.text(1.02, 0.98 - 0.07 * i, label, fontsize=7, color=RED, **place)
        axes.tick_params(labelsize=7)
        if series[1] == tables[-1]:
            axes.set_xlabel("width", fontsize=8)
        dress(axes, f"{' '.join(series)}: {len(modules) - len(red)} of {len(modules)} pass", size=9)
    return save_figure(figure, path, ADVICE)


def write(folder: Path, head: Mapping[str, Any], readings: Sequence[Reading]) -> Path:
    """Writes coordinates.json: the check's settings, theory,
    and every reading; then the picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tree = {**head, "tensors": THEORY, "readings": [asdict(r) for r in readings]}
    write_file(folder / "coordinates.json", json.dumps(tree) + "\n", ADVICE)
    return draw(readings, judge(readings), folder / "coordinates.png")


def read(folder: Path) -> tuple[list[Reading], Theory] | None:
    """Reads a folder's coordinates.json, or its .gz, with the theory of its time;
    None if it has neither.
    """
    path = folder / "coordinates.json"
    packed = path.with_suffix(".json.gz")
    if not path.is_file() and not packed.is_file():
        return None
    tree = json.loads(path.read_text() if path.is_file() else gzip.decompress(packed.read_bytes()))
    names = [f.name for f in fields(Reading)]
    rows: list[list[Any]] = [
        [math.nan if row[name] is None else row[name] for name in names] for row in tree["readings"]
    ]
    return [Reading(*row) for row in rows], tree["tensors"]
