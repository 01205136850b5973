"""Draws probes.png from metrics.jsonl: what goes on inside a model over steps, for one run or several widths.

These are the quantities in appendices C (SGD) and D (AdamW) of arXiv:2606.04048: sizes of q and k (C.1, D.1),
gradients of the block's input, q and k (C.2, D.2), beta, strong writes and the spread of W_a x and W_b x
(C.3, D.3), and the cosine of q and k at nine places of the sequence (C.4, D.4), in a panel for each run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
TIMES_WIDTH = frozenset(
    ("grad_q", "grad_k", "grad_hidden")
)  # theory says 1/d: times d the widths share one curve


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

    alone = runs[0] if len(runs) == 1 else None
    # (label, run, layer)
    if alone is not None:
        lines = [(f"layer {layer}", alone, layer) for layer in alone.layers()]
    else:
        ordered = sorted(runs, key=lambda run: run.width)
        lines = [(r.label, r, layers[len(layers) // 2]) for r in ordered if (layers := r.layers())]
    middle = lines if alone is None else [lines[len(lines) // 2]]
    by_place = [(line, name, title) for line in middle for name, title in PLACES]
    columns, count = 4, len(PANELS) + len(GROUP_PANELS) + len(by_place)
    rows = -(-count // columns)
    figure = new_figure(3.2 * columns, 2.3 * rows, dpi=110, layout=None)
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.03, top=0.97, wspace=0.22, hspace=0.35)
    panels = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for axes, (name, title) in zip(panels, PANELS, strict=False):
        for i, (label, run, layer) in enumerate(lines):
            color = colormaps["viridis"](0.85 * i / max(len(lines) - 1, 1))
            steps, values = run.over_steps(layer, name)
            axes.plot(steps, values, color=color, linewidth=1.3, marker=".", markersize=3, label=label)
        _dress(axes, title)
    after = panels[len(PANELS) + len(GROUP_PANELS) :]
    for axes, ((label, run, layer), name, title) in zip(after, by_place, strict=False):
        _places(axes, run, layer, name)
        _dress(axes, f"{title}, {label}")
        axes.legend(fontsize=5, frameon=False, ncols=3)
    for axes, (name, title) in zip(panels[len(PANELS) :], GROUP_PANELS, strict=False):
        _groups(axes, lines[-1][1], name)
        _dress(axes, title if alone is not None else f"{title}, {lines[-1][0]}")
        axes.set_yscale("log")
        axes.legend(fontsize=5, frameon=False, ncols=2)
    for axes in panels[count:]:
        axes.set_visible(False)
    panels[0].legend(fontsize=6, frameon=False)
    return save_figure(figure, path)


def _places(axes: Any, run: Probed, layer: str, name: str) -> None:
    from matplotlib import colormaps

    places = run.places(layer, name)
    for i, place in enumerate(places):
        steps, values = run.over_steps(layer, f"{name}/{place}")
        color = colormaps["viridis"](0.85 * i / max(len(places) - 1, 1))
        axes.plot(steps, values, color=color, linewidth=1.1, marker=".", markersize=3, label=f"t = {place}")


def _groups(axes: Any, run: Probed, name: str) -> None:
    groups = sorted(
        {key.split("/")[1] for _, values in run.series for key in values if key.startswith("groups/")}
    )
    for group in groups:
        key = f"groups/{group}/{name}"
        points = [(step, values[key]) for step, values in run.series if values.get(key)]
        axes.plot([step for step, _ in points], [y for _, y in points], linewidth=1.1, label=group)


def _dress(axes: Any, title: str) -> None:
    dress(axes, title, size=7)
    axes.tick_params(labelsize=6)
