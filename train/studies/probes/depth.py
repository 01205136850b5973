"""What Deep Delta Learning's writes do to the residual stream, sublayer by sublayer, while a model trains.

Measured for write I, from 0 to 2 L - 1 with depth, on one held-out batch, and named depth/I/NAME:

    beta_05 _50 _95     quantiles of beta over tokens, and beta_mean
    identity            share of tokens with beta below 1/2: the stream stays
    projection          from 1/2 to 3/2: what the stream holds along k is replaced
    reflection          above 3/2: what the stream holds along k changes its sign
    along               root mean square of |k^T X|, k of norm 1
    value               root mean square of |v|
    determinant         mean of det(I - beta k k^T)^DV = (1 - beta)^DV; 1 where nothing is erased
    negative            share of tokens for which it is below 0: an odd number of reflections
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from delta_trn.models.residual import DeepDelta, LatentUpdate, WriteOnly
from delta_trn.train.watch import metrics
from delta_trn.train.watch.figure import BLUE, RED, dress, new_figure, save_figure

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM
    from delta_trn.train.checkpoints.run_folder import RunFolder

COUNTED = 2**20  # torch.quantile takes 2^24 numbers at most, and sorts them


@contextlib.contextmanager
def watched(model: DeltaForCausalLM) -> Iterator[dict[int, dict[str, float]]]:
    """Within `with`, a forward pass fills the mapping from write to measures; it stays empty if additive."""
    writes: dict[int, dict[str, float]] = {}
    handles = []
    blocks: list[Any] = list(model.model.blocks)
    for place, write in enumerate(w for block in blocks for w in (block.mixer_write, block.mlp_write)):
        if isinstance(write, (DeepDelta, LatentUpdate)):

            def see(module: Any, inputs: tuple[Tensor, ...], place: int = place) -> None:
                erases = not isinstance(module, WriteOnly)
                with torch.no_grad():
                    writes[place] = measures(*module.operands(*inputs), k_eps=module.k_eps, erases=erases)

            handles.append(write.register_forward_pre_hook(see))
    try:
        yield writes
    finally:
        for handle in handles:
            handle.remove()


def measures(
    X: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, k_eps: float, erases: bool = True
) -> dict[str, float]:
    """Measures one write: X [..., D, DV], k [..., D], v [..., DV], beta [...]."""
    X, k, v, beta = (x.float() for x in (X, k, v, beta))
    k = k * (k.square().sum(-1, keepdim=True) + k_eps**2).rsqrt()
    along = torch.einsum("...d,...dv->...v", k, X).norm(dim=-1)
    determinant = (1 - beta) ** X.shape[-1] if erases else torch.ones_like(beta)
    quantiles = torch.quantile(beta.flatten()[:COUNTED], beta.new_tensor([0.05, 0.5, 0.95]))
    low, middle, high = quantiles.tolist()
    return {
        "beta_mean": float(beta.mean()),
        "beta_05": low,
        "beta_50": middle,
        "beta_95": high,
        "identity": float((beta < 0.5).float().mean()),
        "projection": float(((beta >= 0.5) & (beta <= 1.5)).float().mean()),
        "reflection": float((beta > 1.5).float().mean()),
        "along": float(along.square().mean().sqrt()),
        "value": float(v.norm(dim=-1).square().mean().sqrt()),
        "determinant": float(determinant.mean()),
        "negative": float((determinant < 0).float().mean()),
    }


def named(writes: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Names the measures as in metrics.jsonl."""
    return {f"depth/{i}/{name}": value for i, of in sorted(writes.items()) for name, value in of.items()}


def plot_geometry(folder: RunFolder) -> Path | None:
    """Draws geometry.png over depth and steps from metrics.jsonl; None where no write was measured."""
    series = [
        (line["step"], line["probes"])
        for line in metrics.read(folder.metrics.path)
        if any(name.startswith("depth/") for name in line.get("probes") or {})
    ]
    if not series:
        return None
    return save_figure(_figure(folder.path.resolve().name, series), folder.path / "geometry.png")


MAPS = (
    ("beta_mean", "mean beta: 0 keeps, 1 replaces, 2 reflects", "RdBu_r", (0.0, 2.0)),
    ("along", "|k^T X|, what the stream holds along k", "viridis", (None, None)),
    ("determinant", "determinant (1 - beta)^DV", "RdBu", (-1.0, 1.0)),
    ("reflection", "share of tokens with beta above 3/2", "magma", (0.0, 1.0)),
)


def _figure(title: str, series: Sequence[tuple[int, Mapping[str, float]]]) -> Any:
    last = series[-1][1]
    depths = sorted({int(name.split("/")[1]) for name in last if name.startswith("depth/")})
    steps = [step for step, _ in series]
    figure = new_figure(12, 6.4, dpi=130)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    panels = figure.subplots(2, 3).flatten()
    shown = sorted({0, len(steps) // 2, len(steps) - 1})
    for axes, (name, heading, colors, (low, high)) in zip(panels, MAPS, strict=False):
        grid = [[values[f"depth/{i}/{name}"] for _, values in series] for i in depths]
        image = axes.imshow(
            grid, aspect="auto", origin="lower", cmap=colors, interpolation="nearest", vmin=low, vmax=high
        )
        figure.colorbar(image, ax=axes, fraction=0.05)
        axes.set_xticks(shown, [f"{steps[i]:,}" for i in shown])
        axes.set_xlabel("step", fontsize=8)
        _dress(axes, heading)
    beta, shares = panels[4:]
    quantiles = {q: [last[f"depth/{i}/beta_{q}"] for i in depths] for q in ("05", "50", "95")}
    beta.fill_betweenx(depths, quantiles["05"], quantiles["95"], color=BLUE, alpha=0.25, linewidth=0)
    beta.plot(quantiles["50"], depths, color=BLUE, marker=".", linewidth=1.4)
    beta.set_xlim(0, 2)
    _dress(beta, f"beta at step {steps[-1]:,}: median, 5 to 95% of tokens")
    left = [0.0] * len(depths)
    for name, color in (("identity", "#9ca3af"), ("projection", BLUE), ("reflection", RED)):
        share = [last[f"depth/{i}/{name}"] for i in depths]
        shares.barh(depths, share, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, share, strict=True)]
    shares.legend(frameon=False, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    _dress(shares, f"shares of tokens at step {steps[-1]:,}")
    return figure


def _dress(axes: Any, heading: str) -> None:
    dress(axes, heading, size=8, grid=None)
    axes.set_ylabel("write, in order of depth", fontsize=8)
    axes.tick_params(labelsize=7)
