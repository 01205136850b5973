"""What is printed before a run, and after it."""

import math
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from backends import device as platform

from . import metrics
from .assembly import Run
from .config import RunConfig
from .progress import duration

BASELINES = {
    "lzma_primed": "lzma, after training text",
    "lzma": "lzma",
    "zlib": "zlib",
    "unigram": "token frequencies",
    "uniform": "all tokens alike",
}


def opening(run: Run, asked_backend: str) -> list[str]:
    """What is about to happen, a line each."""
    c, meta = run.config, run.dataset.meta
    parameters = list(run.model.parameters())
    total = sum(p.numel() for p in parameters)
    embedding = (c.model.vocab_size or 0) * c.model.width * (1 if c.model.tie_word_embeddings else 2)
    per_step = c.batch.sequences * c.batch.length
    passes = per_step * c.steps / run.dataset.split("train").tokens
    o, s = c.optimizer, c.schedule
    micro = min(c.batch.micro or c.batch.sequences, c.batch.sequences)
    accumulation = f" in {c.batch.sequences // micro} parts" if micro < c.batch.sequences else ""
    ratio = c.model.width / c.model.base_width
    lines = [
        f"run        {c.name}, fingerprint {c.fingerprint()}, in {run.folder.path}",
        f"data       {meta.name}: {run.dataset.split('train').tokens:,} training tokens, "
        f"{run.dataset.split('val').tokens:,} held out; {meta.tokenizer.kind}, {c.model.vocab_size:,} rows",
        f"model      Gated DeltaNet, {c.model.layers} layers, width {c.model.width} ({ratio:g} x base), "
        f"{total:,} parameters, {embedding:,} of them for the vocabulary",
        f"training   {c.steps:,} steps of {c.batch.sequences} x {c.batch.length} tokens{accumulation}: "
        f"{per_step * c.steps:,} tokens, {passes:.2g} passes",
        f"optimizer  {o.name}, lr {o.lr:g} to {s.min_lr:g}, warmup {s.warmup}, {c.parametrization}",
        f"device     {c.device} ({_device(run)}), {c.precision}; delta rule by {c.backend}"
        + (", chosen by device" if asked_backend == "auto" else ", as asked"),
    ]
    if s.warmup >= c.steps:
        lines.append(f"note       warmup of {s.warmup} steps is not over when the run ends after {c.steps}")
    return lines


def _device(run: Run) -> str:
    name = platform.describe(run.device)
    return f"{name}, {platform.threads()} threads" if run.device.type == "cpu" else name


def closing(run: Run, costs: dict[str, dict[str, float]], console: Console, plot: str | None) -> None:
    """Validation loss beside the baselines, a sample, the picture, and how to go on."""
    val = _last_evaluation(run)
    if val is not None:
        console.print(_table(run.config, val, costs))
    sample = _last_sample(run)
    if sample:
        console.print("sample", style="bold")
        console.print(sample, markup=False)
        console.print()
    if plot:
        console.print(f"curve      {plot}", markup=False)
    where = shlex.quote(str(run.folder.path))
    more = 2 * run.config.steps
    prompt = shlex.quote(run.config.sample.prompt or "The")
    if run.state.step < run.config.steps:
        console.print(f"continue   python -m train resume {where}", markup=False)
    else:
        console.print(f"continue   python -m train resume {where} steps={more}", markup=False)
    console.print(f"generate   python -m train generate {where} --prompt {prompt}", markup=False)


def _table(config: RunConfig, val: dict[str, Any], costs: dict[str, dict[str, float]]) -> Table:
    trained = f"{val['tokens']:,} tokens in {duration(val['seconds'])}"
    table = Table(title=f"held-out text after step {val['step']}, {trained}", title_justify="left")
    table.add_column("")
    for heading in ("nats/token", "perplexity", "bits/byte"):
        table.add_column(heading, justify="right")
    rows = [
        (costs[name]["nats_per_token"], costs[name]["bits_per_byte"], words)
        for name, words in BASELINES.items()
        if name in costs
    ]
    rows.append((val["loss"], val["bits_per_byte"], f"this model ({config.name})"))
    for loss, bits, words in sorted(rows, reverse=True):
        mine = words.startswith("this model")
        table.add_row(
            words, f"{loss:.4f}", f"{math.exp(loss):,.2f}", f"{bits:.4f}", style="bold" if mine else None
        )
    return table


def _last_evaluation(run: Run) -> dict[str, Any] | None:
    return next(
        (line for line in reversed(list(metrics.read(run.folder.metrics.path))) if line["split"] == "val"),
        None,
    )


def _last_sample(run: Run) -> str:
    return run.folder.last_sample().strip("\n")
