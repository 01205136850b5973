"""Times contenders in turn, one call each, so that whatever slows the machine slows them all.

On a GPU every call starts with a cold cache and is timed by the device's events; on a CPU by the
wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from delta_trn.backends import machine

Call = Callable[[], object]

ROUNDS = (5, 300)
CACHE_BYTES = 256 * 2**20  # more than the second-level cache of any GPU at hand (H200: 60 MB)


@dataclass(frozen=True)
class Spread:
    """Holds the median and the 20th and 80th percentile."""

    p20: float
    p50: float
    p80: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Returns the spread of at least two values."""
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return Spread(deciles[1], statistics.median(values), deciles[7])

    def __str__(self) -> str:
        return f"{self.p50:.4g} ({self.p20:.3g} - {self.p80:.3g})"


def time_in_turns(
    calls: Mapping[str, Call], device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """Times every contender in milliseconds, one call each in turn,
    for about `seconds`, after a warm-up.
    """
    clock = _cuda_clock if device.type == "cuda" else _cpu_clock
    for call in calls.values():
        call()
    machine.synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    start, rounds = time.perf_counter(), 0
    while rounds < ROUNDS[0] or (rounds < ROUNDS[1] and time.perf_counter() - start < seconds):
        for name, call in calls.items():
            times[name].append(clock(call, device))
        rounds += 1
    return times


def ratios(times: Mapping[str, Sequence[float]], ours: str) -> dict[str, Spread | None]:
    """Returns every contender's time over ours, round by round; None for ourselves."""
    return {
        name: None
        if name == ours
        else Spread.of([theirs / own for theirs, own in zip(values, times[ours], strict=True)])
        for name, values in times.items()
    }


Make = Callable[[], Call]


def modes(makers: Mapping[str, Make], device: torch.device) -> dict[str, dict[str, Call | str]]:
    """Maps a mode's suffix to its calls: as they are and, on a GPU, as CUDA graphs.

    makers      name -> a function that makes the call; it does what need not be timed
    returns     in place of a graph that cannot be captured: why not
    """
    by_mode: dict[str, dict[str, Call | str]] = {
        "": {name: make() for name, make in makers.items()}
    }
    if device.type == "cuda":
        by_mode[" (graph)"] = {name: _graph(make) for name, make in makers.items()}
    return by_mode


def _graph(make: Make) -> Call | str:
    """Captures a call as a CUDA graph, which the host does not slow down; or returns why it cannot.

    The call is made on the stream that is captured. Autograd runs a backward operation on the stream
    of its forward operation: made on the default stream, which no graph may take in, the backward
    pass alone could not be captured. `torch.cuda.make_graphed_callables` does the same.
    """
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call = make()
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        return graph.replay
    except RuntimeError as error:
        torch.cuda.synchronize()
        return str(error).splitlines()[0]


def shrink() -> None:
    """Lets this process time few rounds, behind a small cache: to try a command, not to measure."""
    global ROUNDS, CACHE_BYTES
    ROUNDS, CACHE_BYTES = (2, 2), 2**20


def _cpu_clock(call: Call, device: torch.device) -> float:
    start = time.perf_counter()
    call()
    machine.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _cuda_clock(call: Call, device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(CACHE_BYTES, dtype=torch.int8, device=device).zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
