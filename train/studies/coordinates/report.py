"""What a coordinate check shows: a table, JSON, and a picture in the style of microsoft/mup's."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

from delta_trn.train.files import write_file
from delta_trn.train.studies.coordinates.check import Reading, Slope, Verdict, slopes, verdicts
from delta_trn.train.studies.coordinates.theory import TENSORS, theory_of
from delta_trn.train.watch.figure import RED, dress, new_figure, save_figure

COLUMNS = 12
LETTERS = 24  # of a title above a panel
ADVICE = "nothing else is lost: free some space and run the same command again"


def table(rows: Sequence[Verdict], *, sizes: bool = False) -> str:
    """Formats the slopes of changes after the last step, one row per tensor.

    A tensor that fails at any step is marked; the last rows count those that pass at every step, and after
    the last.

    sizes   beside each, the slope of its size before training
    """
    columns = list(dict.fromkeys((v.optimizer, v.parametrization) for v in rows))
    cells = {(v.optimizer, v.parametrization, v.tensor): v for v in rows}
    titles = [(f"{o} {p} size", f"{o} {p} change") if sizes else (f"{o} {p}",) for o, p in columns]
    head = ["tensor", *(title for pair in titles for title in pair), "theory"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    tensors = _in_order(v.tensor for v in rows)
    for tensor in tensors:
        row = [tensor]
        for o, p in columns:
            v = cells[o, p, tensor]
            if sizes:
                row.append("0" if v.start is None else _cell(v.start, v.start.passes))
            row.append(_cell(v.change, v.passes))
        low, high = theory_of(tensor).change
        row.append(f"{low:g}" if low == high else f"{low:g} to {high:g}")
        lines.append("| " + " | ".join(row) + " |")
    for title, passes in (
        ("pass at every step", lambda v: v.passes),
        ("pass after the last", lambda v: v.size.passes and v.change.passes),
    ):
        counts = [sum(passes(v) for v in rows if (v.optimizer, v.parametrization) == c) for c in columns]
        passed = [f"{'| ' if sizes else ''}{n} of {len(tensors)}" for n in counts]
        lines.append(f"| **{title}** | " + " | ".join(passed) + " | |")
    return "\n".join(lines)


def _cell(slope: Slope, passes: bool) -> str:
    return f"{slope.slope:+.2f} ± {slope.stderr:.2f}{'' if passes else ' ✗'}"


def _in_order(names: Iterable[str]) -> list[str]:
    """Orders modules as they come, then tensors as in TENSORS; a model need not have all of them."""
    present = dict.fromkeys(names)
    return [name for name in present if name not in TENSORS] + [name for name in TENSORS if name in present]


def as_json(head: dict[str, Any], readings: Sequence[Reading], judged: Sequence[Slope]) -> str:
    """Formats everything for programs: the check's settings, every slope with its verdict, every reading."""
    tree = {
        **head,
        "tensors": {name: asdict(theory_of(name)) for name in _in_order(r.tensor for r in readings)},
        "slopes": [_plain(asdict(s)) for s in judged],
        "readings": [_plain(asdict(r)) for r in readings],
    }
    return json.dumps(tree) + "\n"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Rounds numbers to six digits, and turns NaN, which JSON lacks, into null."""
    return {
        k: (float(f"{v:.6g}") if math.isfinite(v) else None) if isinstance(v, float) else v
        for k, v in row.items()
    }


def draw(readings: Sequence[Reading], rows: Sequence[Verdict], optimizer: str, path: Path) -> Path:
    """Draws changes against width: a panel per parametrization and tensor, a line per step.

    muP promises flat lines. A red title marks a verdict that fails.
    """
    parametrizations = list(dict.fromkeys(r.parametrization for r in readings if r.optimizer == optimizer))
    verdict = {(v.parametrization, v.tensor): v for v in rows if v.optimizer == optimizer}
    changes: dict[tuple[str, str], dict[int, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for r in readings:
        if r.optimizer == optimizer and r.step:
            changes[r.parametrization, r.tensor][r.step][r.width].append(r.change)
    panels = list(product(parametrizations, _in_order(r.tensor for r in readings)))
    lines = -(-len(panels) // COLUMNS)
    # placed by hand: matplotlib's own layout takes ten times as long as drawing so many panels
    tall = 1.8 * lines + 0.5
    figure = new_figure(1.6 * COLUMNS, tall, dpi=110, layout=None)
    places = figure.subplots(lines, COLUMNS, squeeze=False, sharex=True).flatten()
    figure.subplots_adjust(
        left=0.04, right=0.995, bottom=0.25 / tall, top=1 - 0.75 / tall, wspace=0.4, hspace=0.45
    )
    for i, axes in enumerate(places):
        axes.set_visible(i < len(panels))
    for axes, panel in zip(places, panels, strict=False):
        _draw_tensor(axes, changes[panel], verdict[panel])
        axes.set_ylabel(panel[0], fontsize=6)
    places[0].legend(fontsize=4.5, frameon=False)
    figure.suptitle(f"change of what the model computes, against width, {optimizer}", fontsize=10)
    return save_figure(figure, path, ADVICE)


def _draw_tensor(axes: Any, steps: dict[int, dict[int, list[float]]], v: Verdict) -> None:
    from matplotlib import colormaps

    for step, points in sorted(steps.items()):
        xs = sorted(points)
        ys = [sum(points[x]) / len(points[x]) for x in xs]
        color = colormaps["viridis"](0.85 * (step - 1) / max(max(steps) - 1, 1))
        axes.plot(xs, ys, color=color, marker="o", markersize=2, linewidth=1, label=f"step {step}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    if low > 0 and high / low < 16:
        # at least four octaves: the noise of a flat line would fill the panel
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / 4, middle * 4)
    axes.minorticks_off()
    widths = sorted({width for points in steps.values() for width in points})
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.tick_params(labelsize=5, length=2)
    name = v.tensor if len(v.tensor) <= LETTERS else "…" + v.tensor[1 - LETTERS :]
    title = f"{name}\n{v.change.slope:+.2f} ± {v.change.stderr:.2f}"
    axes.set_title(title, fontsize=7, color="black" if v.passes else RED)
    dress(axes, grid=None)


def write(folder: Path, head: dict[str, Any], readings: Sequence[Reading]) -> list[Path]:
    """Writes coordinates.json, coordinates.md and a picture per optimizer. Returns the pictures."""
    readings = [restored(_plain(asdict(r))) for r in readings]  # as `write_again` has them
    judged = slopes(readings)
    rows = verdicts(judged)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "coordinates.json", as_json(head, readings, judged), ADVICE)
    write_file(folder / "coordinates.md", table(rows, sizes="module" in head) + "\n", ADVICE)
    optimizers = dict.fromkeys(r.optimizer for r in readings)
    return [draw(readings, rows, name, folder / f"coordinates-{name}.png") for name in optimizers]


def write_again(folder: Path) -> list[Path]:
    """Judges the readings in coordinates.json once more, and writes what `write` does."""
    head = json.loads((folder / "coordinates.json").read_text())
    rows = head.pop("readings")
    del head["slopes"], head["tensors"]
    return write(folder, head, [restored(row) for row in rows])


def restored(row: dict[str, Any]) -> Reading:
    """Returns a reading as JSON has it; readings of old also had quantiles."""
    values = {f.name: math.nan if row[f.name] is None else row[f.name] for f in fields(Reading)}
    return Reading(**values)
