"""Every graph that a run compiles, by name and shape, from its configuration."""

from dataclasses import dataclass
from typing import Any

from delta_trn.train.parallel.layout import Layout, layout_of
from delta_trn.train.run.evaluate import crops_at_once, windows_at_once
from delta_trn.train.settings.schema import RunConfig


@dataclass(frozen=True)
class Graph:
    """A graph. `inputs`: shapes of one process's int64 tokens, None where only the data can tell."""

    name: str
    inputs: tuple[tuple[int | None, ...], ...]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inputs": [{"shape": list(shape), "dtype": "int64"} for shape in self.inputs],
        }

    def __str__(self) -> str:
        shapes = ", ".join(
            "[" + ", ".join("?" if n is None else str(n) for n in s) + "]" for s in self.inputs
        )
        return f"{self.name:14}{shapes:24}{self.note}".rstrip()


@dataclass(frozen=True)
class Sizes:
    """Sizes that only the data can tell, None where not known: the prompt's tokens, and all held-out ones."""

    prompt: int | None = None
    held_out: int | None = None


def graphs(config: RunConfig, *, world: int, xla: bool, sizes: Sizes) -> list[Graph]:
    """Returns every graph in the order in which a run comes to it.

    A micro-batch is a graph, however many follow. On XLA the update is one more, or part of the only
    micro-batch, and a step's first graphs differ: there are no gradients yet to add to, the optimizer has no
    memory, and a learning rate of 0 is a constant.
    """
    layout = layout_of(config, world)
    micro, length = layout.micro, layout.length
    step = ((micro, length),) * 2
    listed = []
    if xla:
        listed.append(Graph("first step", step, "the optimizer's memory is made in it"))
        note = f"{layout.micro_batches} micro-batches and the update: each a graph"
        listed.append(Graph("step", step, note if layout.micro_batches > 1 else ""))
    else:
        listed.append(Graph("step", step, "forward and backward"))
    crop = ((crops_at_once(config, layout), length),) * 2
    listed.append(Graph("evaluate", crop))
    if config.log.probes:
        listed.append(Graph("probes", crop, "and many small graphs: probes read numbers one by one"))
    listed += [Graph(name, ((rows, length),) * 2) for name, rows in tail(config, layout, sizes.held_out)]
    if config.sample.tokens:
        grows = "one graph per length: attention's past grows" if config.model.attention_layers else ""
        listed.append(Graph("prefill", ((1, sizes.prompt),)))
        listed.append(Graph("decode", ((1, 1),), grows if xla else ""))
    return listed


def tail(config: RunConfig, layout: Layout, held_out: int | None) -> list[tuple[str, int | None]]:
    """Returns name and rows of the batches that read held-out text in order: the full ones, and the last."""
    e, length = config.evaluation, config.batch.length
    if not e.final_tokens:
        return []
    batch = windows_at_once(config, layout)
    if held_out is None:
        return [("held-out", batch), ("held-out, last", None)]
    windows = max(min(e.final_tokens, held_out - 1) // length, 1)
    named = [("held-out", batch if windows >= batch else 0), ("held-out, last", windows % batch)]
    return [(name, rows) for name, rows in named if rows]
