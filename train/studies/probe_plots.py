"""Draws probes.png and geometry.png from metrics.jsonl: what goes on inside a model over steps.

probes.png has those of appendices C (SGD) and D (AdamW) of arXiv:2606.04048: sizes of q and k (C.1,
D.1), gradients of the block's input, q and k (C.2, D.2), beta, strong writes and the spread of W_a
x and W_b x (C.3, D.3), and the cosine of q and k at nine places of the sequence (C.4, D.4), in a
panel for each run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.settings.errors import RunFolderError
from delta_trn.train.watch import metrics
from delta_trn.train.watch.figure import dress, new_figure, save_figure

# of a layer, by the names in probes.py; of Sk the one at the latest token
PANELS = (
    *("q", "k", "v", "o", "hidden", "grad_q", "grad_k", "grad_hidden"),
    *(
        "beta_mean",
        "beta_strong",
        "alpha_mean",
        "memory",
        "gate_decay_std",
        "gate_beta_std",
        "qk_mean",
        "Sk",
    ),
)
BY_TOKEN = ("qk", "Sk")
# theory says 1/d: times d the widths share one curve
TIMES_WIDTH = frozenset(("grad_q", "grad_k", "grad_hidden"))
MAPS = (
    ("beta_mean", "mean beta: 0 keeps, 1 replaces, 2 reflects", "RdBu_r", (0.0, 2.0)),
    ("along", "|k^T X|, what the stream holds along k", "viridis", (None, None)),
    ("determinant", "determinant (1 - beta)^DV", "RdBu", (-1.0, 1.0)),
    ("reflection", "share of tokens with beta above 3/2", "magma", (0.0, 1.0)),
)
COLUMNS = 4


@dataclass(frozen=True)
class Probed:
    """The probes of one run: (step, name -> value) of every evaluation."""

    label: str
    width: int
    series: tuple[tuple[int, dict[str, float]], ...]

    def names(self, start: str) -> list[str]:
        """Returns what stands behind `start`, up to the next /,
        in the names of probes; numbers in order.
        """
        keys = {key for _, values in self.series for key in values if key.startswith(start)}
        names = {key.removeprefix(start).partition("/")[0] for key in keys}
        return sorted(names, key=lambda name: (int(name) if name.isdigit() else 0, name))

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Returns steps and values of a probe, or of the Sk at the latest token."""
        if key.endswith("/Sk"):
            key = f"{key}/{self.names(f'{key}/')[-1]}"
        factor = self.width if key.rpartition("/")[2] in TIMES_WIDTH else 1
        points = [(step, values[key] * factor) for step, values in self.series if key in values]
        return [step for step, _ in points], [value for _, value in points]


def load_probes(folder: RunFolder) -> Probed | None:
    """Reads the probes of a run; None if it has none."""
    config, _ = folder.read()
    lines = metrics.read(folder.metrics.path)
    series = tuple((line["step"], line["probes"]) for line in lines if line.get("probes"))
    if not series:
        return None
    return Probed(
        f"{folder.path.resolve().name} (d = {config.model.width})", config.model.width, series
    )


def plot_probes(runs: Sequence[Probed], path: Path) -> Path:
    """Draws one panel per probe: a line per layer of one run, or a line per run for its middle
    layer.

    Raises RunFolderError if there is no run, or nothing of a token mixer to draw.
    """
    lines = [(run, run.names("layers/")) for run in sorted(runs, key=lambda run: run.width)]
    lines = [(run, layers) for run, layers in lines if layers]
    if not lines:
        raise RunFolderError("there are no probes to draw; train with log.probes=true")
    from matplotlib import colormaps

    middle = [(run.label, run, f"layers/{layers[len(layers) // 2]}") for run, layers in lines]
    shown = middle
    if len(lines) == 1:
        ((run, layers),) = lines
        shown = [(f"layer {layer}", run, f"layers/{layer}") for layer in layers]
    panels = [
        (
            name + " times width" * (name in TIMES_WIDTH),
            [(at, *run.curve(f"{of}/{name}")) for at, run, of in shown],
        )
        for name in PANELS
    ]
    for label, run, layer in middle:
        for name in BY_TOKEN:
            places = run.names(f"{layer}/{name}/")
            curves = [(f"t = {t}", *run.curve(f"{layer}/{name}/{t}")) for t in places]
            panels.append((f"{name} by token, {label}", curves))
    rows = -(-len(panels) // COLUMNS)
    figure = new_figure(3.2 * COLUMNS, 2.3 * rows, dpi=110)
    for i, (title, curves) in enumerate(panels):
        axes = figure.add_subplot(rows, COLUMNS, i + 1)
        for j, (label, steps, values) in enumerate(curves):
            color = colormaps["viridis"](0.85 * j / max(len(curves) - 1, 1))
            axes.plot(
                steps, values, color=color, linewidth=1.2, marker=".", markersize=3, label=label
            )
        dress(axes, title, size=7)
        axes.tick_params(labelsize=6)
        if i == 0 or i >= len(PANELS):
            axes.legend(fontsize=5, frameon=False, ncols=2)
    return save_figure(figure, path)


def plot_geometry(run: Probed, path: Path) -> Path | None:
    """Draws writes over steps and depth; None where none was measured."""
    depths = run.names("depth/")
    if not depths:
        return None
    figure = new_figure(9, 6.4, dpi=130)
    figure.suptitle(run.label, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, (name, heading, colors, (low, high)) in zip(
        figure.subplots(2, 2).flatten(), MAPS, strict=True
    ):
        grid = [run.curve(f"depth/{i}/{name}")[1] for i in depths]
        image = axes.imshow(
            grid,
            aspect="auto",
            origin="lower",
            cmap=colors,
            interpolation="nearest",
            vmin=low,
            vmax=high,
        )
        figure.colorbar(image, ax=axes, fraction=0.05)
        shown = sorted({0, len(run.series) // 2, len(run.series) - 1})
        axes.set_xticks(shown, [f"{run.series[i][0]:,}" for i in shown])
        dress(axes, heading, size=8, grid=None)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("write, in order of depth", fontsize=8)
    return save_figure(figure, path)
