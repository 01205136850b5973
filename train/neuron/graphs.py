"""Every graph that a run compiles, by name and shape, from its configuration."""

from dataclasses import dataclass
from typing import Any

from delta_trn.train.parallel.layout import layout_of
from delta_trn.train.run.evaluate import crops_at_once, windows_at_once
from delta_trn.train.settings.schema import RunConfig


@dataclass(frozen=True)
class Graph:
    """inputs: shapes of the int64 tokens that go in, on one process; None for what only the data can tell."""

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
    """What only data can tell, None where not known: tokens of the sample's prompt, and held-out ones."""

    prompt: int | None = None
    held_out: int | None = None


def graphs(config: RunConfig, *, world: int, xla: bool, sizes: Sizes) -> list[Graph]:
    """In the order in which a run comes to them.

    Accumulation has no graph of its own: XLA has all micro-batches of a step in one graph, and elsewhere the
    micro-batch is the graph, however many follow. A step's first graph differs on XLA: the optimizer has no
    memory yet, and a learning rate of 0 is a constant.
    """
    layout = layout_of(config, world)
    micro, length = layout.micro, layout.length
    step = ((layout.sequences, config.batch.length),) * 2
    found = []
    if xla:
        parts = layout.micro_batches
        note = f"{parts} micro-batches of {micro} in it" if parts > 1 else ""
        found.append(Graph("first step", step, "the optimizer's memory is made in it"))
        found.append(Graph("step", step, note))
    else:
        found.append(Graph("step", ((micro, length),) * 2, "forward and backward"))
    crop = ((crops_at_once(config, micro), length),) * 2
    found.append(Graph("evaluate", crop))
    if config.log.probes:
        found.append(Graph("probes", crop, "with small ones: numbers are read one after another"))
    found += [Graph(name, ((rows, length),) * 2) for name, rows in tail(config, sizes.held_out)]
    if config.sample.tokens:
        grows = "a graph for every length: attention's past grows" if config.model.attention_layers else ""
        found.append(Graph("prefill", ((1, sizes.prompt),)))
        found.append(Graph("decode", ((1, 1),), grows if xla else ""))
    return found


def tail(config: RunConfig, held_out: int | None) -> list[tuple[str, int | None]]:
    """Rows of the batches that read held-out text in order after the last step: whole ones, and the rest."""
    e, length = config.evaluation, config.batch.length
    if not e.final_tokens:
        return []
    batch = windows_at_once(config)
    if held_out is None:
        return [("held-out", batch), ("held-out, last", None)]
    windows = max(min(e.final_tokens, held_out - 1) // length, 1)
    named = [("held-out", batch if windows >= batch else 0), ("held-out, last", windows % batch)]
    return [(name, rows) for name, rows in named if rows]
