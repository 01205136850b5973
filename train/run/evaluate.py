"""Loss on held-out text: fixed crops of it while training, the text itself at the end."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from delta_trn.backends import machine
from delta_trn.train.data.dataset import TokenDataset
from delta_trn.train.data.loader import Batch, evaluation_batches, make_loader
from delta_trn.train.parallel.layout import Layout
from delta_trn.train.parallel.team import Team
from delta_trn.train.settings.schema import RunConfig


@dataclass(frozen=True)
class Evaluation:
    """A held-out loss: `loss` in nats per token, over `tokens` of them."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf  # exp(710) overflows a float64


class Interrupted(Exception):
    """An evaluation ended before it had gone through all batches."""


def evaluate(
    loss: Callable[..., Tensor],
    batches: Iterable[Batch],
    device: torch.device,
    team: Team | None = None,
    is_to_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Returns the mean of `loss` over all targets. It waits for the device once, at the end.

    is_to_stop() is asked after each turn, on all processes and with one answer. Raises Interrupted
    where it says so.

    The data-parallel shares of the team take turns: share r of n has batches r, r + n, and so on.
    All have equally many, because a divided model's processes need each other for every batch.
    Where the last turn has fewer, the others compute its first batch as well, and do not count it.
    """
    team = team or Team()
    exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    total, tokens, left = torch.zeros((), dtype=exact, device=device), 0, iter(batches)
    with torch.no_grad():
        while turn := list(islice(left, team.data_world)):
            counts = team.data_rank < len(turn)
            batch = turn[team.data_rank if counts else 0]
            mean = loss(*batch.each(lambda x: x.to(device, non_blocking=True)))
            if counts:
                total += mean.to(exact) * batch.targets.numel()
            tokens += sum(batch.targets.numel() for batch in turn)
            machine.synchronize(device, wait=False)
            if is_to_stop():
                raise Interrupted
    # the processes of a tensor group add the same, those of a context group the means of their own
    # tokens
    return Evaluation((team.mean(total) * team.data_world / tokens).item(), tokens)


def held_out_windows(
    config: RunConfig, dataset: TokenDataset, *, tokens: int, batch: int
) -> Iterator[Batch]:
    """Yields the first `tokens` held-out tokens in order:
    whole windows of batch.length, at least one.
    """
    # nothing precedes the first token
    sequence, total = (config.batch.length, dataset.split("val").tokens - 1)
    windows = max(min(tokens, total) // sequence, 1)
    where = {"batch": 1, "sequence": sequence, "seed": 0, "boundaries": config.data.boundaries}
    loader = make_loader(dataset, "val", kind="stream", **where)
    for start in range(0, windows, batch):
        rows = [loader.next_batch() for _ in range(min(batch, windows - start))]
        fields = zip(*rows, strict=True)
        yield Batch(*(None if field[0] is None else torch.cat(field) for field in fields))  # type: ignore[arg-type]


def held_out_crops(
    config: RunConfig,
    dataset: TokenDataset,
    layout: Layout,
    *,
    at_most: int | None = None,
) -> list[Batch]:
    """Returns the fixed crops of an evaluation in batches,
    or the first `at_most` batches of them.
    """
    e, size = config.evaluation, crops_at_once(config, layout)
    where = {"sequence": config.batch.length, "seed": e.seed, "boundaries": config.data.boundaries}
    return evaluation_batches(dataset, batch=size, batches=e.sequences // size, **where)[:at_most]


def crops_at_once(config: RunConfig, layout: Layout) -> int:
    """Returns crops per forward pass: their largest divisor up to evaluation.batch, or up to a
    micro-batch.

    There are fewer where shares would otherwise have nothing to do.
    """
    e = config.evaluation
    most = min(e.batch or layout.micro, math.ceil(e.sequences / layout.shares))
    return max(n for n in range(1, most + 1) if e.sequences % n == 0)


def windows_at_once(config: RunConfig, layout: Layout) -> int:
    """Returns the largest number of windows per forward pass
    where held-out text is read in order.
    """
    e, b = config.evaluation, config.batch
    mine = math.ceil((e.final_tokens or 1) / b.length / layout.shares)
    return max(1, min(e.batch or min(b.micro or b.sequences, 64), mine))
