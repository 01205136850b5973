"""Compiles every graph of a run once, with the run's own model, optimizer, data and code."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from delta_trn.backends import machine
from delta_trn.train.data import Batch
from delta_trn.train.neuron.graphs import Sizes, graphs, tail
from delta_trn.train.neuron.record import caches
from delta_trn.train.run.evaluate import evaluate, held_out_crops, held_out_windows
from delta_trn.train.run.loop import Observer
from delta_trn.train.run.optimizer import learning_rate
from delta_trn.train.run.sample import Sampling, continue_text
from delta_trn.train.run.setup import Run
from delta_trn.train.run.step import Loss, TrainingStep, loss_function

Tell = Callable[[str], None]
# Nothing new is compiled from the third step on: AdamW has its memory from the second on, and the rate is no
# longer 0 (tests/train/test_xla.py counts).
STEPS = 2
# An evaluation adds the first batch's loss to a constant, and later ones to a tensor.
BATCHES = 2
# The first token ends the prompt's pass; the second is the first that is made from a state.
TOKENS = 3


def compile_all(run: Run, tell: Tell, observers: Sequence[Observer] = ()) -> list[dict[str, Any]]:
    """Compiles every graph in the order of the run, whose weights move: it is not to be continued.

    Returns for each graph its name, inputs, seconds, and the programs that were not in the cache before.
    """
    work, graphs_compiled = _work(run, observers), []
    kept = caches(run.config, run.device)
    for graph in graphs(run.config, world=run.team.world, xla=run.device.type == "xla", sizes=sizes(run)):
        before, count = [cache.keys() for cache in kept], _programs(run)
        began = time.monotonic()
        for _ in range(STEPS if graph.name == "step" else 1):
            work[graph.name]()
        machine.synchronize(run.device)
        seconds = time.monotonic() - began
        keys = sorted(set().union(*(c.keys() - old for c, old in zip(kept, before, strict=True))))
        programs = _programs(run) - count if run.device.type == "xla" else len(keys)
        graphs_compiled.append({**graph.as_dict(), "programs": programs, "seconds": round(seconds, 3)})
        tell(f"{graph}  {programs} compiled, {seconds:.1f} s")
    return graphs_compiled


def sizes(run: Run) -> Sizes:
    """Returns what only the data can tell."""
    ids = run.dataset.tokenizer.encode(run.config.sample.prompt)
    return Sizes(prompt=len(ids), held_out=run.dataset.split("val").tokens)


def _programs(run: Run) -> int:
    return machine.compilations() if run.device.type == "xla" else 0


def _work(run: Run, observers: Sequence[Observer]) -> dict[str, Callable[[], None]]:
    """Returns for each graph, by its name, the work that compiles it."""
    c, device = run.config, run.device
    micro = run.layout.micro
    loss = loss_function(run.sharding, c, device)
    plain = loss_function(run.sharding, c.model_copy(update={"compile": False}), device)
    step = TrainingStep(loss, run.optimizer, run.sharding, micro=micro, clip=c.optimizer.clip)
    counter = itertools.count()

    def train() -> None:
        step(run.next_batch(), learning_rate(c, next(counter)))

    def measure(with_loss: Loss, batches: list[Batch]) -> None:
        run.model.eval()
        evaluate(with_loss, batches, device, run.team)
        run.model.train()

    def held_out() -> None:
        measure(loss, held_out_crops(c, run.dataset, run.layout, at_most=BATCHES))

    def probe() -> None:
        train()
        for observer in observers:
            observer.after_evaluation()

    def generate() -> None:
        s = c.sample
        sampling = Sampling(min(TOKENS, s.tokens), s.temperature, s.top_k, s.top_p, seed=c.seed)
        continue_text(run.model, run.dataset.tokenizer, s.prompt, sampling)

    work = {"first step": train, "step": train, "evaluate": held_out, "probes": probe, "decode": generate}
    for name, rows in tail(c, run.layout, run.dataset.split("val").tokens):
        work[name] = lambda rows=rows: measure(plain, list(_windows(run, rows or 0)))
    work["prefill"] = _first_token(run)
    return work


def _first_token(run: Run) -> Callable[[], None]:
    s = run.config.sample

    def work() -> None:
        sampling = Sampling(1, s.temperature, s.top_k, s.top_p, seed=run.config.seed)
        continue_text(run.model, run.dataset.tokenizer, s.prompt, sampling)

    return work


def _windows(run: Run, rows: int) -> Iterator[Batch]:
    """Yields one batch of `rows` windows; values do not matter to a compiler."""
    length = run.config.batch.length
    return held_out_windows(
        run.dataset,
        tokens=rows * length,
        sequence=length,
        batch=rows,
        boundaries=run.config.data.boundaries,
    )
