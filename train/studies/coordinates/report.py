"""What a coordinate check found: a table, JSON, and a picture in the style of microsoft/mup's."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from delta_trn.train.files import disk_errors
from delta_trn.train.studies.coordinates.check import TENSORS, Reading, Slope, Verdict, slopes, verdicts

COLUMNS = 12
SAFE = "nothing else is lost: free some space and run the same command again"


def table(found: Sequence[Verdict]) -> str:
    """Slopes of changes after the last step, one row a tensor; those that do not pass are marked."""
    columns = list(dict.fromkeys((v.optimizer, v.parametrization) for v in found))
    cells = {(v.optimizer, v.parametrization, v.tensor): v for v in found}
    head = ["tensor", *(f"{o} {p}" for o, p in columns), "theory"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    tensors = _present({v.tensor for v in found})
    for tensor in tensors:
        row = [tensor]
        for o, p in columns:
            v = cells[o, p, tensor]
            mark = "" if v.passes else " ✗"
            row.append(f"{v.change.slope:+.2f} ± {v.change.stderr:.2f}{mark}")
        row.append(_range(TENSORS[tensor].change))
        lines.append("| " + " | ".join(row) + " |")
    passed = [
        f"{sum(v.passes for v in found if (v.optimizer, v.parametrization) == c)} of {len(tensors)}"
        for c in columns
    ]
    lines.append("| **pass** | " + " | ".join(passed) + " | |")
    return "\n".join(lines)


def _present(names: set[str]) -> list[str]:
    """Those tensors in the order of TENSORS: a model has not all of them."""
    return [name for name in TENSORS if name in names]


def as_json(about: dict[str, Any], found: Sequence[Reading], judged: Sequence[Slope]) -> str:
    """Everything: what was asked, every slope with its verdict, every reading."""
    tree = {
        **about,
        "tensors": {name: asdict(theory) for name, theory in TENSORS.items()},
        "slopes": [_plain(asdict(s)) for s in judged],
        "readings": [_plain(asdict(r)) for r in found],
    }
    return json.dumps(tree) + "\n"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN; and six digits say all that there is."""
    return {
        k: (float(f"{v:.6g}") if math.isfinite(v) else None) if isinstance(v, float) else v
        for k, v in row.items()
    }


def draw(found: Sequence[Reading], found_verdicts: Sequence[Verdict], optimizer: str, path: Path) -> Path:
    """Changes against width on logarithmic axes: a row a parametrization, a panel a tensor, a line a step.

    Lines that lie flat are what muP promises; a red title is a verdict that does not pass.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r.parametrization for r in found if r.optimizer == optimizer))
    verdict = {(v.parametrization, v.tensor): v for v in found_verdicts if v.optimizer == optimizer}
    last = max(r.step for r in found)
    values: dict[tuple[str, str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in found:
        if r.optimizer == optimizer and r.step:
            values[r.parametrization, r.tensor, r.step][r.width].append(r.change)
    tensors, widths = _present({r.tensor for r in found}), sorted({r.width for r in found})
    bands = [tensors[i : i + COLUMNS] for i in range(0, len(tensors), COLUMNS)]
    rows = len(bands) * len(names)
    # placed by hand: matplotlib's own placing takes ten times as long as drawing so many panels
    figure = Figure(figsize=(1.6 * COLUMNS, 1.8 * rows + 0.5), dpi=110)
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True)
    tall = 1.8 * rows + 0.5
    figure.subplots_adjust(
        left=0.04, right=0.995, bottom=0.25 / tall, top=1 - 0.75 / tall, wspace=0.4, hspace=0.45
    )
    for axes in panels.flatten():
        axes.set_visible(False)
    for row, (band, parametrization) in enumerate((b, name) for b in bands for name in names):
        for j, tensor in enumerate(band):
            axes, v = panels[row][j], verdict[parametrization, tensor]
            axes.set_visible(True)
            for step in range(1, last + 1):
                points = values[parametrization, tensor, step]
                xs = sorted(points)
                color = colormaps["viridis"](0.85 * (step - 1) / max(last - 1, 1))
                ys = [sum(points[x]) / len(points[x]) for x in xs]
                axes.plot(xs, ys, color=color, marker="o", markersize=2, linewidth=1, label=f"step {step}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            low, high = axes.get_ylim()
            if low > 0 and high / low < 16:
                # no less than four octaves: or the noise of a flat line would fill the panel
                middle = math.sqrt(low * high)
                axes.set_ylim(middle / 4, middle * 4)
            axes.minorticks_off()
            axes.set_xticks(widths, [str(width) for width in widths])
            axes.tick_params(labelsize=5, length=2)
            color = "black" if v.passes else "#c8553d"
            axes.set_title(
                f"{tensor}\n{v.change.slope:+.2f} ± {v.change.stderr:.2f}", fontsize=7, color=color
            )
            axes.spines[["top", "right"]].set_visible(False)
        panels[row][0].set_ylabel(parametrization, fontsize=9, fontweight="bold")
    panels[0][0].legend(fontsize=4.5, frameon=False)
    figure.suptitle(f"change of what the model computes, against width, {optimizer}", fontsize=10)
    beside = path.with_name(f".{path.name}")
    with disk_errors(path, SAFE):
        figure.savefig(beside, format="png")
        beside.replace(path)
    return path


def judged_again(folder: Path) -> list[Path]:
    """Table, verdicts and pictures of a check from the readings in its coordinates.json."""
    path = folder / "coordinates.json"
    about = json.loads(path.read_text())
    found = [_reading(row) for row in about.pop("readings")]
    del about["slopes"], about["tensors"]
    return write(folder, about, found)


def write(folder: Path, about: dict[str, Any], found: Sequence[Reading]) -> list[Path]:
    """coordinates.json, coordinates.md and a picture for every optimizer."""
    judged = slopes(found)
    said = verdicts(judged)
    with disk_errors(folder, SAFE):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "coordinates.json").write_text(as_json(about, found, judged))
        (folder / "coordinates.md").write_text(table(said) + "\n")
    optimizers = dict.fromkeys(r.optimizer for r in found)
    return [draw(found, said, name, folder / f"coordinates-{name}.png") for name in optimizers]


def _reading(row: dict[str, Any]) -> Reading:
    return Reading(
        parametrization=row["parametrization"],
        optimizer=row["optimizer"],
        width=row["width"],
        seed=row["seed"],
        step=row["step"],
        tensor=row["tensor"],
        size=_number(row["size"]),
        change=_number(row["change"]),
    )


def _number(x: float | None) -> float:
    return math.nan if x is None else x


def _range(ends: tuple[float, float]) -> str:
    low, high = ends
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
