"""Loss on held-out text: fixed crops of it while training, the text itself at the end."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_trn.backends import machine
from delta_trn.train.data import TokenDataset, evaluation_batches, make_loader
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


def evaluate(
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    team: Team | None = None,
) -> Evaluation:
    """Returns the mean of `loss` over all targets. It waits for the device once, at the end.

    Every process of the team goes through all batches: a divided model needs all of them for each.
    """
    exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    total, tokens = torch.zeros((), dtype=exact, device=device), 0
    with torch.no_grad():
        for inputs, targets in batches:
            mean = loss(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
            total += mean.to(exact) * targets.numel()
            tokens += targets.numel()
            machine.synchronize(device, wait=False)
    mean = total / tokens
    return Evaluation((mean if team is None else team.mean(mean)).item(), tokens)


def held_out_windows(
    dataset: TokenDataset, *, tokens: int, sequence: int, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the first `tokens` held-out tokens in order: whole windows of `sequence`, at least one."""
    total = dataset.split("val").tokens - 1  # the first token has nothing before it
    windows = max(min(tokens, total) // sequence, 1)
    loader = make_loader(dataset, "val", kind="stream", batch=1, sequence=sequence, seed=0)
    for start in range(0, windows, batch):
        pairs = [loader.next_batch() for _ in range(min(batch, windows - start))]
        yield torch.cat([inputs for inputs, _ in pairs]), torch.cat([targets for _, targets in pairs])


def is_due(config: RunConfig, step: int) -> bool:
    """Whether an evaluation follows this step."""
    return step % config.evaluation.every == 0 or step == config.steps


def held_out_crops(
    config: RunConfig, dataset: TokenDataset, micro: int, *, at_most: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Returns the fixed crops of an evaluation in batches, or the first `at_most` batches of them."""
    e, size = config.evaluation, crops_at_once(config, micro)
    batches = evaluation_batches(
        dataset, batch=size, sequence=config.batch.length, batches=e.sequences // size, seed=e.seed
    )
    return batches[:at_most]


def crops_at_once(config: RunConfig, micro: int) -> int:
    """Returns crops per forward pass: evaluation.batch, or their largest divisor that is at most `micro`."""
    e = config.evaluation
    return e.batch or max(n for n in range(1, min(e.sequences, micro) + 1) if e.sequences % n == 0)


def windows_at_once(config: RunConfig) -> int:
    """Returns the largest number of windows per forward pass where held-out text is read in order."""
    return config.evaluation.batch or min(config.batch.micro or config.batch.sequences, 64)
