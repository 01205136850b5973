"""Times the cases that pass parity, side by side with peers.

    python -m backends.bench [--backend NAME] [--peer hf|fla] [--case NAME] [--dtype NAME] [--json
    FILE] python -m backends.bench table [FILE ...]

The contenders take turns (`timing.py`). A ratio is the median over the rounds of (peer's time /
ours), with its 20th and 80th percentile. A floor is the least time that the pass can take here
(`roofline.py`). Memory is what a forward and backward takes beyond the inputs: from CUDA's
allocator, or as the resident size of a fresh process. One step starts from the same state in every
round, since its time does not depend on it.

Beside packed sequences the same tokens are timed as one sequence ("in one"): what packing costs.
Beside Kimi Delta Attention the gated delta rule is timed on the same shapes ("one decay"): what
decays per channel cost.

A case that fails, in parity or by an exception, is named and not timed, and the others are. The exit
status is then 1, as where a pass takes less time than its floor: then the machine was busy while its
best was measured, and that line has no floor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends import machine
from delta_trn.backends.bench import figures, roofline, timing
from delta_trn.backends.bench.figures import passes
from delta_trn.backends.bench.peers import PEERS, Run, computed_by
from delta_trn.backends.bench.roofline import Ceilings, ceilings, work
from delta_trn.backends.bench.timing import Spread, modes, ratios, time_in_turns
from delta_trn.backends.checks import BackendRefusal, dtype_name
from delta_trn.backends.dispatch import describe_choice
from delta_trn.backends.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from delta_trn.backends.kimi_delta_attention import kimi_delta_attention
from delta_trn.backends.machine import facts
from delta_trn.backends.parity import channel_cases
from delta_trn.backends.parity.__main__ import Subject, subjects
from delta_trn.backends.parity.judge import Verdict
from delta_trn.backends.parity.page import NOT_RUN
from delta_trn.backends.parity.rule import make_leaves, step_verdicts, verdicts
from delta_trn.backends.parity.rule_cases import BY_NAME, Case, Inputs, find, inputs

STEP = "gated_delta_rule_step"
IN_ONE = " in one"  # behind a backend's name: packed sequences as one
ONE_DECAY = " one decay"  # the rule with the first channel's decay
# A line of results: the times of one contender on one pass of one case. Some of its fields:
#
#   ratio           its time over ours, round by round; None for ourselves
#   floor_ms        the least time that the pass can take here; only with ours, and if nothing beats it
#   memory_bytes    only with the pass forward+backward
#   computed_by     which kernels: where a backend of ours has several, and what
#                   flash-linear-attention has handed its calls to; else None
#   worst_error     error over allowed in the parity before the timing; only with ours
#   failed          why there are no times; then only case, pass, backend and dtype stand beside it
Row = dict[str, Any]


class ParityError(RuntimeError):
    """Says that a case fails parity, so that its time would mean nothing."""


def contender(name: str) -> Run:
    """Returns a peer's operation, or the public operation on one of our backends."""
    if name in PEERS:
        return PEERS[name].run()
    if name.endswith(ONE_DECAY):
        return contender(name.removesuffix(ONE_DECAY))

    def run(x: Inputs) -> Tensor:
        options: dict[str, Any] = x.arguments()
        if name.endswith(IN_ONE):
            options = {**options, "cu_seqlens": None}
        backend = name.removesuffix(IN_ONE)
        operation = kimi_delta_attention if x.g.dim() == x.q.dim() else gated_delta_rule
        return operation(x.q, x.k, x.v, x.g, x.beta, backend=backend, **options)[0]

    return run


def inputs_of(name: str, x: Inputs) -> Inputs:
    """Returns what a contender gets: a decay per channel, or the first one for all."""
    if not name.endswith(ONE_DECAY):
        return x
    dt_bias = None if x.dt_bias is None else x.dt_bias[..., 0].contiguous()
    case = replace(x.case, lower_bound=None)  # which the gated delta rule does not have
    return replace(x, case=case, g=x.g[..., 0].contiguous(), dt_bias=dt_bias)


def pass_call(run: Run, x: Inputs, phase: str) -> Callable[[], None]:
    """Returns a call without arguments that does one pass."""
    leaves = make_leaves(x)
    x, sources = replace(x, **leaves), list(leaves.values())

    def forward() -> None:
        run(x)

    def both() -> None:
        torch.autograd.grad(run(x), sources, x.do)

    if phase == "forward":
        return forward
    if phase == "forward+backward":
        return both
    o = run(x)

    def backward() -> None:
        torch.autograd.grad(o, sources, x.do, retain_graph=True)

    return backward


def step_call(name: str, x: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """Returns a call without arguments that takes one step, by a peer or by one of our backends."""
    if name in PEERS:
        return torch.no_grad()(partial(PEERS[name].step(), x))
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": x.case.normalized_inside, "backend": name}
    token = (y[:, 0] for y in (x.q, x.k, x.v, x.g, x.beta))
    return torch.no_grad()(partial(gated_delta_rule_step, *token, x.initial_state, **options))


def peak_bytes(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> int:
    """Measures the memory that one forward and backward takes beyond the inputs,
    after a small warm-up.
    """
    small = replace(case, B=1, T=min(case.T, 64), lengths=None)
    pass_call(
        contender(name), inputs_of(name, inputs(small, dtype)).to(device), "forward+backward"
    )()
    call = pass_call(
        contender(name), inputs_of(name, inputs(case, dtype)).to(device), "forward+backward"
    )
    machine.synchronize(device)
    machine.return_freed_memory()
    machine.reset_peak_memory(device)
    before = machine.peak_memory(device)
    call()
    machine.synchronize(device)
    return machine.peak_memory(device) - before


def memory(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> int:
    """Measures `peak_bytes`; on a CPU in a fresh process,
    since in a used one freed memory hides new use.
    """
    if device.type == "cuda":
        return peak_bytes(name, case, dtype, device)
    # by its module's name: in `python -m backends.bench` this file is __main__, which the child
    # cannot import
    measure = import_module("delta_trn.backends.bench.__main__").peak_bytes
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        return pool.apply(measure, (name, case, dtype, device))


def judge(subject: Subject, case: Case, dtype: torch.dtype) -> list[Verdict]:
    """Returns the verdicts on all that will be timed. Raises ParityError, with those that fail."""
    if "step" in case.tags:
        # without tags the whole batch is judged
        case = replace(case, loss=(), op=STEP, tags=frozenset())
        judged = step_verdicts(case, dtype, subject.backend, subject.device)
    else:
        judged = verdicts(case, dtype, subject.backend, subject.device)
    if failures := [str(verdict) for verdict in judged if not verdict.passed]:
        raise ParityError("\n".join([f"{case.name} is not timed, its parity is red:", *failures]))
    return judged


def bench(
    subject: Subject,
    case: Case,
    dtype: torch.dtype,
    peers: Sequence[str],
    seconds: float,
    limits: Ceilings,
) -> Iterator[Row]:
    """Times all passes of one case. Raises ParityError unless its parity is green."""
    device = torch.device(subject.device)
    worst = max(verdict.ratio for verdict in judge(subject, case, dtype))
    in_one = [subject.backend + IN_ONE] if case.lengths and not case.state else []
    one_decay = [subject.backend + ONE_DECAY] if case.has_channels else []
    names = [subject.backend, *in_one, *one_decay, *peers]
    x, least = inputs(case, dtype).to(device), work(case, dtype)
    for phase in passes(case):
        memories: dict[str, int | None] = dict.fromkeys(names)
        if phase == "step":
            makers = {name: partial(step_call, name, x) for name in names}
        else:
            makers = {
                name: partial(pass_call, contender(name), inputs_of(name, x), phase)
                for name in names
            }
        if phase == "forward+backward":
            memories = {name: memory(name, case, dtype, device) for name in names}
        for mode, calls in modes(makers, device).items():
            about = {"case": case.name, "pass": phase + mode, "dtype": dtype_name(dtype)}
            for name, reason in calls.items():
                if isinstance(reason, str):
                    yield {**about, "backend": name, "failed": f"not captured: {reason}"}
            running = {name: call for name, call in calls.items() if not isinstance(call, str)}
            if subject.backend not in running:
                continue
            times = time_in_turns(running, device, seconds)
            over = ratios(times, subject.backend)
            for name, milliseconds in times.items():
                ours = name == subject.backend
                yield {
                    **about,
                    "op": STEP if phase == "step" else case.op,
                    "backend": name,
                    "ms": Spread.of(milliseconds),
                    "ratio": over[name],
                    "rounds": len(milliseconds),
                    "floor_ms": limits.floor_ms(least[phase]) if ours else None,
                    "memory_bytes": memories[name],
                    "computed_by": computed_by(name, x),
                    "worst_error": worst if ours else None,
                    "flops_per_s": limits.flops_per_s,
                    "bytes_per_s": limits.bytes_per_s(least[phase]),
                }


def beaten_floor(row: Row) -> str | None:
    """Returns what there is to say where a pass took less time than its floor."""
    if row.get("floor_ms") is None or row["floor_ms"] <= row["ms"].p50:
        return None
    return (
        f"no floor: {row['case']}, {row['pass']} took {row['ms'].p50:.4g} ms, less than the "
        f"{row['floor_ms']:.4g} that this machine needs at its best; something else kept it busy: "
        "run this again when it is idle"
    )


def describe(row: Row) -> str:
    """Formats a row for the terminal."""
    if "failed" in row:
        return (
            f"{row['case']:16}  {row['pass'] or 'failed':16}  {row['backend']:10}  {row['failed']}"
        )
    text = f"{row['case']:16}  {row['pass']:16}  {row['backend']:10}  "
    text += f"{row['ms']} ms"
    if row["ratio"] is not None:
        text += f"  {row['ratio']} times ours"
    if row["floor_ms"] is not None:
        text += f"  floor {row['floor_ms']:.3g} ms, {row['floor_ms'] / row['ms'].p50:.0%}"
    if row["computed_by"] is not None:
        text += f"  by {row['computed_by']}"
    if row["memory_bytes"] is not None:
        text += f"  {row['memory_bytes'] / 2**20:.0f} MiB"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn bench", description="Checks parity, then times the cases"
    )
    parser.add_argument("action", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of table")
    parser.add_argument("--backend", help="instead of the default one of this machine's device")
    parser.add_argument(
        "--peer", action="append", choices=tuple(PEERS), help="only this; may be repeated"
    )
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="float32 on CPU, else bfloat16"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="per pass (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object per line")
    parser.add_argument(
        "--small", action="store_true", help="cut every case to a few tokens: to try the command"
    )
    options = parser.parse_args(argv)
    if options.action == "table":
        print(figures.markdown(figures.read(options.files)))
        return 0
    try:
        subject = subjects([options.backend] if options.backend else None)[0]
        tag = "bench-cpu" if subject.device == "cpu" else "bench"
        known = {**BY_NAME, **channel_cases.BY_NAME}
        timed = [find(name, known) for name in options.case or ()]
        if stateful := [x.name for x in timed if x.state and "step" not in x.tags]:
            raise ValueError(
                f"{stateful[0]} starts from a state; only cases that do not are timed by pass"
            )
        cases = timed or [case for case in known.values() if tag in case.tags]
    except (BackendRefusal, ValueError) as complaint:
        print(complaint, file=sys.stderr)
        return 2
    if options.small:
        cases = [smaller(case) for case in cases]
        timing.shrink()
        roofline.shrink()
    return _run(options, subject, cases)


def smaller(case: Case) -> Case:
    """Returns a case of few tokens and heads; head sizes, and value heads per key head, stay."""
    lengths = case.lengths and tuple(min(length, 9) for length in case.lengths[:4])
    T = sum(lengths) if lengths else min(case.T, 17)
    return replace(case, B=1, T=T, lengths=lengths, H=1, HV=case.value_heads // case.H)


def _run(options: argparse.Namespace, subject: Subject, cases: Sequence[Case]) -> int:
    """Times all cases, prints a line for each contender and pass, and writes them as JSON."""
    device = torch.device(subject.device)
    dtype = getattr(torch, options.dtype or ("float32" if subject.device == "cpu" else "bfloat16"))
    wanted = options.peer or list(PEERS)
    absent = {name: reason for name in wanted if (reason := PEERS[name].absent(subject.device))}
    limits = ceilings(device, dtype)
    machine_facts: Mapping[str, Any] = facts(device) | ({"small": True} if options.small else {})
    print(
        f"{describe_choice(subject.backend, dtype, device.type)} on {machine_facts['device']}, "
        f"{machine_facts['threads']} threads, "
        f"torch {machine_facts['torch']}, {dtype_name(dtype)}; medians, 20th and 80th percentiles"
    )
    print(f"this machine at its best: {limits}")
    for name in wanted:
        print(
            f"peer {name}: {NOT_RUN}, {absent[name]}"
            if name in absent
            else f"peer {PEERS[name].label()}"
        )
    timed, red = False, False
    with open(options.json or os.devnull, "w") as lines:
        for row in _rows(options, subject, cases, dtype, absent, limits):
            line = row | machine_facts
            if complaint := beaten_floor(row):
                line["floor_ms"] = None
                print(complaint)
            red |= complaint is not None or (row.get("failed") is not None and row["pass"] is None)
            timed |= "ms" in row
            print(describe(line), flush=True)
            # at once: whoever is stopped keeps what was measured before
            print(json.dumps(line, default=asdict), file=lines, flush=True)
    return 1 if red or not timed else 0


def _rows(
    options: argparse.Namespace,
    subject: Subject,
    cases: Sequence[Case],
    dtype: torch.dtype,
    absent: Mapping[str, str],
    limits: Ceilings,
) -> Iterator[Row]:
    """Yields the rows of all cases; of one that fails, a row that says why, without a pass."""
    wanted = options.peer or list(PEERS)
    for case in cases:
        missing = {name: PEERS[name].absent(subject.device, case.has_channels) for name in wanted}
        for name in missing:
            if missing[name] and name not in absent:
                print(f"case {case.name}: peer {name} {NOT_RUN}, {missing[name]}")
        able = [x for x in wanted if not missing[x] and (PEERS[x].packed or not case.lengths)]
        about = {"case": case.name, "pass": None, "dtype": dtype_name(dtype)}
        about["backend"] = subject.backend
        try:
            yield from bench(subject, case, dtype, able, options.seconds, limits)
        except BackendRefusal as refusal:
            print(f"case {case.name}: {NOT_RUN}, {refusal}")
        except ParityError as failure:
            yield {**about, "failed": str(failure)}
        except Exception as error:  # Triton has a class for each way in which a launch can fail
            traceback.print_exc()
            yield {**about, "failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
