"""Figures in one style, drawn without a display and written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_trn.train.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, RED, GRAY = "#3b6fb6", "#c8553d", "#6b7280"
ADVICE = "everything else is whole: free some space and plot again"


def new_figure(width: float, height: float, *, dpi: int = 150, **options: Any) -> Figure:
    """Returns an empty figure of `width` by `height` inches. No state of pyplot is touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, **{"layout": "constrained", **options})
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Any, title: str = "", *, size: float = 11, grid: str | None = "y") -> None:
    """Gives a panel the common style: a bold title at the left, a light grid, two spines."""
    if title:
        axes.set_title(title, loc="left", fontsize=size, fontweight="bold")
    if grid:
        axes.grid(axis=grid, color="#e5e7eb", linewidth=0.7)
        axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, path: Path, advice: str = ADVICE) -> Path:
    """Writes a PNG and returns its path. DiskFull, with the advice, if the disk refuses."""
    with replace_file(path, advice) as file:
        figure.savefig(file, format="png")
    return path
