"""loss.png, drawn from a run's files alone."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.settings.errors import RunFolderError
from delta_trn.train.watch import metrics
from delta_trn.train.watch.figure import BLUE, GRAY, RED, dress, new_figure, save_figure

# what a reader calls the baselines
BASELINES = {
    "uniform": "all tokens alike",
    "unigram": "token frequencies",
    "zlib": "zlib",
    "lzma": "lzma",
    "lzma_primed": "lzma, after training text",
}


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Returns the mean over the `window` values around each value; near the ends there are fewer.

    An exponential mean would lag, and show a loss that falls fast as higher than it is.
    """
    box = np.ones(2 * (window // 2) + 1)
    return np.convolve(values, box, "same") / np.convolve(np.ones(len(values)), box, "same")


def spread(levels: Sequence[float], gap: float) -> list[float]:
    """Moves ascending levels upwards until they are at least `gap` apart."""
    places: list[float] = []
    for level in levels:
        places.append(max(level, places[-1] + gap) if places else level)
    return places


def plot_loss(folder: RunFolder) -> Path:
    """Draws training and validation loss over steps, and the baselines' costs as dashed lines.

    Raises RunFolderError if metrics.jsonl has no training step.
    """
    lines = list(metrics.read(folder.metrics.path))
    train = [line for line in lines if line["split"] == "train"]
    if not train:
        raise RunFolderError(f"{folder.metrics.path} has no training step yet; train first")
    val = [line for line in lines if line["split"] == "val"]
    costs = json.loads(folder.baselines_path.read_text()) if folder.baselines_path.exists() else {}
    summary = folder.read_summary()
    figure = new_figure(8.4, 4.8)
    axes = figure.add_subplot()
    steps, losses = [line["step"] for line in train], [line["loss"] for line in train]
    end = steps[-1]
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(losses, len(losses) // 40), color=BLUE, linewidth=1.6, label="training")
    # the last evaluation itself, where the recipe asks for no other loss at the end
    is_last = summary is not None and bool(val) and summary["loss"] == val[-1]["loss"]
    if summary and not is_last:
        label = f"{summary['held_out']:,} held-out tokens in order, {summary['loss']:.4f}"
        axes.plot(
            [end],
            [summary["loss"]],
            color=RED,
            linestyle="",
            marker="D",
            label=label,
            clip_on=False,
        )
    if val:
        val_steps, val_losses = [line["step"] for line in val], [line["loss"] for line in val]
        # crops of the held-out text, the same each time: their loss is not that of the whole
        label = f"held-out crops, {val_losses[-1]:.4f} at step {val_steps[-1]:,}"
        axes.plot(
            val_steps,
            val_losses,
            color=RED,
            linewidth=1.6,
            marker="o",
            markersize=4,
            label=label,
            clip_on=False,
        )
    shown = costs.keys() - {"uniform"}  # far above all others
    levels = sorted((costs[name]["nats_per_token"], BASELINES[name]) for name in shown)
    lowest = min(losses + [line["loss"] for line in val] + [level for level, _ in levels])
    highest = max(losses + [level for level, _ in levels])
    bottom = max(0.0, lowest - 0.08 * (highest - lowest))
    top = highest + 0.03 * (highest - bottom)
    places = spread([level for level, _ in levels], 0.045 * (top - bottom))
    for (level, words), place in zip(levels, places, strict=True):
        axes.axhline(level, color=GRAY, linewidth=0.9, linestyle=(0, (5, 4)), zorder=1)
        axes.annotate(
            f"{words} {level:.2f}",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            color=GRAY,
            fontsize=8,
        )
    config, _ = folder.read()
    name, title = folder.path.resolve().name, f"{config.name}, width {config.model.width}"
    title += f", {config.optimizer.name}, lr {config.optimizer.lr:g}"
    dress(axes, title if name == config.name else f"{name}: {title}")
    axes.set_xlabel(f"steps of {train[-1]['tokens'] // end:,} tokens")
    axes.set_ylabel("loss, nats per token")
    axes.set_xlim(0, end)
    axes.set_ylim(bottom, top)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    return save_figure(figure, folder.plot_path)
