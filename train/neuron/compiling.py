"""What a run compiles, graph by graph, and the work that compiles each: the run's own, once."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from delta_trn.backends import machine
from delta_trn.train.parallel.layout import layout_of
from delta_trn.train.run.evaluate import (
    crops_at_once,
    evaluate,
    held_out_crops,
    held_out_windows,
    windows_at_once,
)
from delta_trn.train.run.loop import Probe
from delta_trn.train.run.optimizer import learning_rate
from delta_trn.train.run.setup import Run
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.schema import RunConfig

Tell = Callable[[str], None]
# AdamW has its memory from the second step on, and the rate is no longer 0: nothing new is compiled
# from the third on (tests/train/test_xla.py counts).
STEPS = 3


@dataclass(frozen=True)
class Graph:
    """A graph of one process: `rows` sequences of `length` tokens.
    rows None: only the data can tell.
    """

    name: str
    rows: int | None
    length: int

    def __str__(self) -> str:
        return f"{self.name:16}[{'?' if self.rows is None else self.rows}, {self.length}]"


def graphs(config: RunConfig, *, world: int, held_out: int | None = None) -> list[Graph]:
    """Returns every graph in the order in which a run comes to it: a micro-batch is one, however
    many follow.

    held_out    held-out tokens of the data, where they are known
    """
    layout, e = layout_of(config, world), config.evaluation
    rows: dict[str, int | None] = {"step": layout.micro, "evaluate": crops_at_once(config, layout)}
    if e.final_tokens:
        batch = windows_at_once(config, layout)
        rows |= {"held-out": batch, "held-out, last": None}
        if held_out is not None:
            windows = max(min(e.final_tokens, held_out - 1) // config.batch.length, 1)
            rows |= {"held-out": min(batch, windows), "held-out, last": windows % batch}
            if windows % batch == 0 or windows < batch:
                del rows["held-out, last"]
    return [Graph(name, count, layout.length) for name, count in rows.items()]


def compile_all(run: Run, tell: Tell, probe: Probe | None = None) -> None:
    """Compiles every graph in the order of the run, whose weights move:
    it is not to be continued.
    """
    c, device, layout = run.config, run.device, run.layout
    loss = loss_function(run.sharding, c, device)
    plain = loss_function(run.sharding, c.model_copy(update={"compile": False}), device)
    step = TrainingStep(
        loss, run.optimizer, run.sharding, micro=layout.micro, clip=c.optimizer.clip
    )
    for graph in graphs(c, world=run.team.world, held_out=run.dataset.split("val").tokens):
        before, began = _programs(run), time.monotonic()
        run.model.train(graph.name == "step")
        if graph.name == "step":
            for i in range(STEPS):
                step(run.batches.next_batch(), learning_rate(c, i))
            if probe is not None:
                probe()
        elif graph.name == "evaluate":
            # the first batch's loss is added to a constant, and a later one's to a tensor
            crops = held_out_crops(c, run.dataset, layout, at_most=2 * layout.shares)
            evaluate(loss, crops, device, run.team)
        else:
            rows = graph.rows or 1
            text = held_out_windows(c, run.dataset, tokens=rows * c.batch.length, batch=rows)
            evaluate(plain, text, device, run.team)
        machine.synchronize(device)
        count = f"  {_programs(run) - before} programs" if device.type == "xla" else ""
        tell(f"{graph}{count}  {time.monotonic() - began:.1f} s")


def _programs(run: Run) -> int:
    return machine.compilations() if run.device.type == "xla" else 0


def compiles(run: Run) -> bool:
    """Returns whether anything of the run is compiled: PyTorch's own operators are not."""
    c, kind = run.config, run.device.type
    return c.compile or kind == "xla" or (c.backend == "triton" and kind == "cuda")
