"""Draws probes.png and geometry.png from metrics.jsonl: what goes on inside a model over steps.

probes.png has those of appendices C (SGD) and D (AdamW) of arXiv:2606.04048: sizes of q and k (C.1, D.1),
gradients of the block's input, q and k (C.2, D.2), beta, strong writes and the spread of W_a x and W_b x
(C.3, D.3), and the cosine of q and k at nine places of the sequence (C.4, D.4), in a panel for each run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.settings.errors import RunFolderError
from delta_trn.train.watch import metrics
from delta_trn.train.watch.figure import dress, new_figure, save_figure

PANELS = (
    ("k", "size of k before normalization"),
    ("q", "size of q before normalization"),
    ("v", "size of v"),
    ("o", "size of S^T q"),
    ("hidden", "size of the block's input"),
    ("grad_q", "gradient of q, times width"),
    ("grad_k", "gradient of k, times width"),
    ("grad_hidden", "gradient of the block's input, times width"),
    ("beta_mean", "mean of beta"),
    ("beta_strong", "share of strong writes"),
    ("alpha_mean", "mean of alpha"),
    ("memory", "tokens that a head remembers"),
    ("gate_decay_std", "spread of W_a x"),
    ("gate_beta_std", "spread of W_b x"),
    ("qk_mean", "mean cosine of q and k"),
    ("Sk", "|S k| sqrt(K) / |S|, last"),
)
PLACES = (("qk", "cosine of q and k, by token"), ("Sk", "|S k| sqrt(K) / |S|, by token"))
GROUP_PANELS = (("fraction", "last update over weight"), ("grad", "norm of the gradient"))
# theory says 1/d: times d the widths share one curve
TIMES_WIDTH = frozenset(("grad_q", "grad_k", "grad_hidden"))
MAPS = (
    ("beta_mean", "mean beta: 0 keeps, 1 replaces, 2 reflects", "RdBu_r", (0.0, 2.0)),
    ("along", "|k^T X|, what the stream holds along k", "viridis", (None, None)),
    ("determinant", "determinant (1 - beta)^DV", "RdBu", (-1.0, 1.0)),
    ("reflection", "share of tokens with beta above 3/2", "magma", (0.0, 1.0)),
)
COLUMNS = 4
Curve = tuple[str, list[int], list[float]]  # label, steps, values


@dataclass(frozen=True)
class Probed:
    """The probes of one run: (step, name -> value) of every evaluation."""

    label: str
    width: int
    series: tuple[tuple[int, dict[str, float]], ...]

    def layers(self) -> list[str]:
        """Returns the names of the probed layers, first to last."""
        names = {
            key.split("/")[1] for _, values in self.series for key in values if key.startswith("layers/")
        }
        return sorted(names, key=int)

    def over_steps(self, layer: str, name: str) -> tuple[list[int], list[float]]:
        """Returns steps and values of one layer's probe; of Sk the one at the latest token."""
        if name == "Sk" and (places := self.places(layer, name)):
            name = f"Sk/{places[-1]}"
        key = f"layers/{layer}/{name}"
        factor = self.width if name in TIMES_WIDTH else 1
        points = [(step, values[key] * factor) for step, values in self.series if key in values]
        return [step for step, _ in points], [value for _, value in points]

    def places(self, layer: str, name: str) -> list[int]:
        """Returns the tokens at which a layer's qk or Sk is measured."""
        start = f"layers/{layer}/{name}/"
        keys = {key for _, values in self.series for key in values if key.startswith(start)}
        return sorted(int(key.removeprefix(start)) for key in keys)

    def groups(self, name: str) -> list[Curve]:
        """Returns a curve of each group of parameters."""
        groups = {
            key.split("/")[1] for _, values in self.series for key in values if key.startswith("groups/")
        }
        curves = []
        for group in sorted(groups):
            key = f"groups/{group}/{name}"
            points = [(step, values[key]) for step, values in self.series if values.get(key)]
            curves.append((group, [step for step, _ in points], [y for _, y in points]))
        return curves


def load_probes(folder: RunFolder) -> Probed | None:
    """Reads the probes of a run; None if it has none."""
    config, _ = folder.read()
    lines = metrics.read(folder.metrics.path)
    series = tuple((line["step"], line["probes"]) for line in lines if line.get("probes"))
    if not series:
        return None
    return Probed(f"{folder.path.resolve().name} (d = {config.model.width})", config.model.width, series)


def plot_probes(runs: Sequence[Probed], path: Path) -> Path:
    """Draws one panel per probe: a line per layer of one run, or a line per run for its middle layer.

    Raises RunFolderError if there is no run, or nothing of a token mixer to draw.
    """
    if not runs or not any(run.layers() for run in runs):
        raise RunFolderError("there are no probes to draw; train with log.probes=true")
    from matplotlib import colormaps

    if len(runs) == 1:
        lines = [(f"layer {layer}", runs[0], layer) for layer in runs[0].layers()]
        middle = [lines[len(lines) // 2]]
    else:
        ordered = sorted(runs, key=lambda run: run.width)
        middle = lines = [(r.label, r, layers[len(layers) // 2]) for r in ordered if (layers := r.layers())]
    label, widest, _ = lines[-1]
    panels: list[tuple[str, list[Curve]]] = [
        (title, [(label, *run.over_steps(layer, name)) for label, run, layer in lines])
        for name, title in PANELS
    ]
    panels += [(f"{title}, {label}", widest.groups(name)) for name, title in GROUP_PANELS]
    for label, run, layer in middle:
        for name, title in PLACES:
            at = [(f"t = {t}", *run.over_steps(layer, f"{name}/{t}")) for t in run.places(layer, name)]
            panels.append((f"{title}, {label}", at))
    rows = -(-len(panels) // COLUMNS)
    figure = new_figure(3.2 * COLUMNS, 2.3 * rows, dpi=110, layout=None)
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.03, top=0.97, wspace=0.22, hspace=0.35)
    places = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for i, axes in enumerate(places):
        axes.set_visible(i < len(panels))
    for i, (axes, (title, curves)) in enumerate(zip(places, panels, strict=False)):
        for j, (label, steps, values) in enumerate(curves):
            color = colormaps["viridis"](0.85 * j / max(len(curves) - 1, 1))
            axes.plot(steps, values, color=color, linewidth=1.2, marker=".", markersize=3, label=label)
        dress(axes, title, size=7)
        axes.tick_params(labelsize=6)
        if title.startswith(tuple(title for _, title in GROUP_PANELS)):
            axes.set_yscale("log")
        if i == 0 or i >= len(PANELS):
            axes.legend(fontsize=5, frameon=False, ncols=2)
    return save_figure(figure, path)


def plot_geometry(folder: RunFolder) -> Path | None:
    """Draws geometry.png from metrics.jsonl, writes over steps and depth; None where none was measured."""
    series = [
        (line["step"], line["probes"])
        for line in metrics.read(folder.metrics.path)
        if any(name.startswith("depth/") for name in line.get("probes") or {})
    ]
    if not series:
        return None
    depths = sorted({int(name.split("/")[1]) for name in series[-1][1] if name.startswith("depth/")})
    shown = sorted({0, len(series) // 2, len(series) - 1})
    figure = new_figure(9, 6.4, dpi=130)
    figure.suptitle(folder.path.resolve().name, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, (name, heading, colors, (low, high)) in zip(figure.subplots(2, 2).flatten(), MAPS, strict=True):
        grid = [[values[f"depth/{i}/{name}"] for _, values in series] for i in depths]
        image = axes.imshow(
            grid, aspect="auto", origin="lower", cmap=colors, interpolation="nearest", vmin=low, vmax=high
        )
        figure.colorbar(image, ax=axes, fraction=0.05)
        axes.set_xticks(shown, [f"{series[i][0]:,}" for i in shown])
        dress(axes, heading, size=8, grid=None)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("write, in order of depth", fontsize=8)
    return save_figure(figure, folder.path / "geometry.png")
