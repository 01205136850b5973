"""The least time a pass can take: for its floating-point operations or for its bytes, whichever is
longer.

Operations are counted per token and value head, a multiplication and an addition as two. R = HV / H
value heads share a key; C = 64 is the chunk of the published counts, whatever a backend's is.
Shorter sequences are chunks of their mean length, between which no state is: terms with K V then
count only where one is given.

    forward     6 K V + 4 C V + 4 C K / R + 2 C^2 / 3        state, chunk and inverse
    backward    14 K V + 10 C V + 10 C K + 4 C^2             no state is recomputed
    step        6 K V

Bytes count each input once and each output once. The ceilings are measured on the same machine in
the same run, each as the best of many calls, since what else a machine does can only lower them:

    operations  a large product by PyTorch in the dtype of q
    bytes       a copy. On a CPU a pass runs again and again on the same tensors, and those that fit
                its cache stay there: the copy is the largest measured one that moves no more bytes
                than the pass
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from delta_trn.backends.bench.timing import Call, time_in_turns
from delta_trn.backends.parity.rule_cases import Case

CHUNK = 64
# side of the product and bytes read by the copies, by type of device: tenths of a second on every
# one at hand
PRODUCT = {"cuda": 8192, "cpu": 2048}
COPY_BYTES = {"cuda": (2**30,), "cpu": (2**20, 2**22, 2**24, 2**27)}


@dataclass(frozen=True)
class Work:
    """Counts the operations and bytes of a pass."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Ceilings:
    """Holds what a machine does at best.

    flops_per_s     operations per second
    copies          bytes moved by a copy -> bytes moved per second
    """

    flops_per_s: float
    copies: Mapping[int, float]

    def bytes_per_s(self, work: Work) -> float:
        """Returns the rate of the copy that bounds this work:
        the largest that moves no more bytes.
        """
        return self.copies[
            max((n for n in self.copies if n <= work.bytes), default=min(self.copies))
        ]

    def floor_ms(self, work: Work) -> float:
        """Returns the longer of the times for operations and for bytes."""
        return 1e3 * max(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s(work))

    def __str__(self) -> str:
        copies = ", ".join(
            f"{rate / 1e9:.4g} ({n / 2**20:g} MiB)" for n, rate in self.copies.items()
        )
        return f"product {self.flops_per_s / 1e12:.3g} TFLOP/s, copy {copies} GB/s"


def shrink() -> None:
    """Lets this process measure ceilings by small products and copies: to try a command."""
    PRODUCT["cuda"], COPY_BYTES["cuda"] = 256, (2**20,)


def work(case: Case, dtype: torch.dtype) -> Mapping[str, Work]:
    """Returns the work of each pass: forward, backward, forward+backward; and step, for T = 1."""
    H, HV, K, V, s = case.H, case.value_heads, case.K, case.V, dtype.itemsize
    tokens = case.B * case.T
    C = min(CHUNK, tokens // case.sequences)
    KV = K * V if C == CHUNK or case.state else 0
    state = 4 * case.sequences * HV * K * V
    keys, values, gates = (
        2 * H * K * s,
        HV * V * s,
        HV * (4 * K if case.has_channels else 4) + HV * s,
    )
    forward = Work(
        tokens * HV * (6 * KV + 4 * C * V + 4 * C * K * H / HV + 2 * C * C / 3),
        tokens * (keys + 2 * values + gates) + case.state * state,
    )
    backward = Work(
        tokens * HV * (14 * KV + 10 * C * V + 10 * C * K + 4 * C * C),
        tokens * 2 * (keys + gates) + tokens * 3 * values + 2 * case.state * state,
    )
    step = Work(tokens * HV * 6 * K * V, tokens * (keys + 2 * values + gates) + 2 * state)
    return {
        "forward": forward,
        "backward": backward,
        "forward+backward": forward + backward,
        "step": step,
    }


def ceilings(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.3) -> Ceilings:
    """Measures the machine's ceilings, each as the best of its calls in about `seconds`,
    after a warm-up.
    """

    def least_s(call: Call) -> float:
        return min(time_in_turns({"": call}, device, seconds)[""]) / 1e3

    n = PRODUCT[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    flops_per_s = 2 * n**3 / least_s(lambda: torch.mm(a, b, out=out))
    copies = {}
    for size in COPY_BYTES[device.type]:
        source = torch.randn(size // 4, device=device)
        target = torch.empty_like(source)
        copies[2 * size] = 2 * size / least_s(partial(target.copy_, source))
    return Ceilings(flops_per_s, copies)
