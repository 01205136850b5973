"""Loss on fixed crops of held-out text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats a token, over `tokens` of them."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf  # exp(710) overflows a float64


def evaluate(
    loss: Callable[[Tensor, Tensor], Tensor], batches: Sequence[tuple[Tensor, Tensor]], device: torch.device
) -> Evaluation:
    """The mean of `loss` over equally large batches. One wait for the device, at the end."""
    total = torch.zeros(
        (), dtype=torch.float64 if device.type in ("cpu", "cuda") else torch.float32, device=device
    )
    with torch.no_grad():
        for inputs, targets in batches:
            total += loss(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
    return Evaluation((total / len(batches)).item(), sum(targets.numel() for _, targets in batches))


def crops_at_once(sequences: int, limit: int) -> int:
    """The largest divisor of `sequences` that is at most `limit`."""
    return max(n for n in range(1, min(sequences, limit) + 1) if sequences % n == 0)
