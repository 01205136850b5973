"""What is printed before a run, and after it."""

import json
import math
import shlex
import shutil
import statistics
import sys
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from delta_trn.backends import machine
from delta_trn.backends.dispatch import describe_choice
from delta_trn.train.recipes import RECIPES
from delta_trn.train.run.evaluate import Evaluation, evaluate, held_out_windows, windows_at_once
from delta_trn.train.run.setup import Run
from delta_trn.train.run.step import loss_function
from delta_trn.train.watch import metrics
from delta_trn.train.watch.display import NARROW, duration
from delta_trn.train.watch.flops import flops_per_token
from delta_trn.train.watch.loss_plot import BASELINES


def opening(run: Run, asked_backend: str | None) -> list[str]:
    """Returns the lines before a run: what is about to happen."""
    c, o, s = run.config, run.config.optimizer, run.config.schedule
    parameters = list(run.model.parameters())
    total = sum(p.numel() for p in parameters)
    meta = run.dataset.meta
    embedding = (
        (c.model.vocab_size or 0) * c.model.width * (1 if c.model.tie_word_embeddings else 2)
    )
    per_step = c.batch.sequences * c.batch.length
    passes = per_step * c.steps / run.dataset.split("train").tokens
    ratio, parts = c.model.width / c.model.base_width, run.layout.sequences // run.layout.micro
    accumulation = f" in {parts} parts" if parts > 1 else ""
    device = machine.describe(run.device)
    device += f", {torch.get_num_threads()} threads" if run.device.type == "cpu" else ""
    dtype = torch.bfloat16 if c.precision == "bf16" else torch.float32
    kernel = describe_choice(c.backend, dtype, run.device.type)
    lines = [
        f"run        {c.name}, fingerprint {c.fingerprint()}, in {run.folder.path}",
        f"data       {meta.name}: {run.dataset.split('train').tokens:,} training tokens, "
        f"{run.dataset.split('val').tokens:,} held out; {meta.tokenizer.kind}, "
        f"{c.model.vocab_size:,} rows",
        f"model      Gated DeltaNet, {c.model.layers} layers, width {c.model.width} ({ratio:g} x "
        f"base), {total:,} parameters, {embedding:,} of them for the vocabulary",
        f"training   {c.steps:,} steps of {c.batch.sequences} x {c.batch.length} "
        f"tokens{accumulation}: {per_step * c.steps:,} tokens, {passes:.2g} passes",
        f"optimizer  {o.name}, lr {o.lr:g} to {s.min_lr:g}, warmup {s.warmup}, {c.parametrization}",
        f"device     {c.device} ({device}), {c.precision}; delta rule by {kernel}"
        + {"auto": ", chosen by device", None: ", as before"}.get(asked_backend, ", as asked"),
    ]
    if run.team.world > 1:
        d = c.distribution
        split = "".join(
            f", {name} {n}" for name, n in (("tensor", d.tensor), ("context", d.context)) if n > 1
        )
        lines.append(f"processes  {run.team.world}, {d.mode}{split}")
    if run.sharding.is_divided and c.sample.tokens:
        lines.append(
            "note       no samples: no process has all weights; `generate` opens the checkpoints"
        )
    if run.dataset.loss_of_text is not None:
        lines.append(f"note       {run.dataset.loss_of_text}")
    if s.warmup >= c.steps:
        lines.append(
            f"note       warmup of {s.warmup} steps is not over when the run ends after {c.steps}"
        )
    return lines


def measure(run: Run) -> dict[str, Any] | None:
    """Returns what summary.json has: the loss on final_tokens in order at the end, else the last on
    crops.

    None before the first evaluation.
    """
    config, state = run.config, run.state
    path = run.folder.metrics.path
    # the leader reads what it wrote: to others a shared disk may not show it yet
    last = run.team.leader_does(
        lambda: [line for line in metrics.read(path) if line["split"] == "val"][-1:]
    )
    if not last:
        return None
    found = Evaluation(last[0]["loss"], config.evaluation.sequences * config.batch.length)
    at = last[0]["step"]
    if config.evaluation.final_tokens and state.step == config.steps and not state.owes:
        at, found = state.step, _in_order(run)
    return {
        "step": at,
        "tokens": last[0]["tokens"],
        "seconds": last[0]["seconds"],
        "held_out": found.tokens,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": run.dataset.bits_per_byte(found.loss),
    }


def _in_order(run: Run) -> Evaluation:
    config = run.config
    tokens, batch = config.evaluation.final_tokens, windows_at_once(config, run.layout)
    windows = held_out_windows(config, run.dataset, tokens=tokens, batch=batch)
    run.model.eval()
    # one pass over a few shapes: compiling would take longer
    loss = loss_function(run.sharding, config.model_copy(update={"compile": False}), run.device)
    return evaluate(loss, windows, run.device, run.team)


def peak_tokens_per_s(run: Run) -> float | None:
    """Returns tokens/s if the machine did nothing but the model's products, at the rate that it
    shows now.

    None where that is not measured: in runs of few steps, on Neuron, and where processes share a
    CPU.
    """
    if run.config.steps < 100:
        return None
    if run.device.type not in ("cpu", "cuda") or (run.device.type == "cpu" and run.team.world > 1):
        return None
    half = run.device.type == "cuda" and run.config.precision == "bf16"
    rate = machine.product_rate(run.device, torch.bfloat16 if half else torch.float32)
    return run.team.world * rate / flops_per_token(run.config)


def closing(
    run: Run, console: Console, found: dict[str, Any] | None, peak: float | None = None
) -> None:
    """Prints the result beside the baselines, a sample, and what to try next.

    found   what summary.json has; None: nothing was measured yet
    """
    if found is not None:
        console.print(_table(run.config.name, found, is_narrow=console.width < NARROW))
        bits, costs = found["bits_per_byte"], found["baselines"]
        if bits is not None and "lzma" in costs and costs["lzma"]["bits_per_byte"] < bits:
            console.print(
                "lzma stores an exact repeat once, however far back it lies. On text with many of\n"
                "them a small model needs more than minutes to pay less."
            )
    lines = metrics.read(run.folder.metrics.path)
    if rates := [x["tokens_per_s"] for x in lines if x.get("tokens_per_s")]:
        rate = statistics.median(rates)
        share = "" if peak is None else f", {rate / peak:.0%} of this machine's peak"
        console.print(f"median speed {rate:,.0f} tokens/s{share}")
    if sample := run.folder.last_sample().strip("\n"):
        console.print("\nsample", style="bold", end="")
        prompt = run.config.sample.prompt
        console.print(f", continuing {json.dumps(prompt, ensure_ascii=False)}" if prompt else "")
        console.print(sample)
    console.print("\nnext", style="bold")
    if run.folder.plot_path.exists():
        console.print(f"  the loss as a picture: {run.folder.plot_path}")
    for what, command in _next(run):
        console.print(f"  {what}:\n    {command}")


def _next(run: Run) -> list[tuple[str, str]]:
    """Returns what to try after a run, as pairs of a sentence and a command."""
    c, where = run.config, shlex.quote(str(run.folder.path))
    # how this package's command is called from this shell
    program = (
        "delta-trn" if shutil.which("delta-trn") else f"{shlex.quote(sys.executable)} -m delta_trn"
    )
    commands = []
    if run.folder.checkpoints.steps():
        prompt = shlex.quote(c.sample.prompt or "The")
        commands.append(("let it write", f"{program} generate {where} --prompt {prompt}"))
    if run.state.step < c.steps or run.state.owes:
        commands.append(("go on", f"{program} resume {where}"))
    else:
        commands.append(("train twice as long", f"{program} resume {where} steps={2 * c.steps}"))
    if c.name in RECIPES:
        wider = f"{program} run {c.name} model.width={2 * c.model.width}"
        commands.append(("train a wider model; muP keeps the learning rate", wider))
    return commands


def _table(name: str, found: dict[str, Any], *, is_narrow: bool = False) -> Table:
    """Returns the loss beside the baselines'; `is_narrow` leaves out the perplexity and the frame."""
    trained = f"{found['tokens']:,} tokens in {duration(found['seconds'])}"
    title = f"{found['held_out']:,} held-out tokens after step {found['step']} ({trained})"
    table = Table(title=title, title_justify="left", box=None if is_narrow else box.HEAVY_HEAD)
    table.add_column("")
    headings = ["nats/token", *([] if is_narrow else ["perplexity"]), "bits/byte"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [
        (cost["nats_per_token"], cost["bits_per_byte"], BASELINES[kind])
        for kind, cost in found["baselines"].items()
    ]
    mine = (found["loss"], found["bits_per_byte"], f"this model ({name})")
    for row in sorted([*rows, mine], key=lambda row: (row[0], row[2]), reverse=True):
        loss, bits, words = row
        style = "bold" if row is mine else None
        paid = "-" if bits is None else f"{bits:.4f}"
        perplexity = [] if is_narrow else [f"{math.exp(loss):,.2f}"]
        table.add_row(words, f"{loss:.4f}", *perplexity, paid, style=style)
    return table
