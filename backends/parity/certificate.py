"""Writes one page and one picture for each backend of this machine: why its numbers can be trusted.

    python -m backends.parity certificate [--backend NAME] [--to DIR] [--cases N] [--seed S]

The verdict comes first. Then: the error of every tensor beside the baseline's and beside the peers that are
installed, the hard cases by name, determinism, decoding against training, random cases, and what is refused.
It takes about five minutes for `chunked` on two cores. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.checks import BackendRefusal, dtype_name
from delta_trn.backends.dispatch import BACKENDS, OPERATIONS
from delta_trn.backends.machine import facts
from delta_trn.backends.parity import layer_cases, mixer_cases, residual_cases, rule, rule_cases
from delta_trn.backends.parity.judge import DTYPES, FACTOR, Verdict, error
from delta_trn.backends.parity.random import fuzz
from delta_trn.backends.parity.rule_cases import SMALL, TIMED, Case

# the cases of the rule on a backend that is not emulated, besides the small ones
HARD = ("mixed", "heavy", "near_1", "near_2", "reflect_random", "odd", "k256", "packed_gva", "carry")
# the cases in float16 and float64; float32 and bfloat16 have all
FEW = ("ragged", "seam_65", "reflect", "gva_2", "packed_empty", "gates_wide", "norm_zero", "norm_huge")
FULL = (torch.float32, torch.bfloat16)
DECODED = ("carry", "norm", "gva_2", "collide")
STEPS = {False: 64, True: 3}  # tokens decoded one by one; of an emulated backend
RANDOM = {False: 500, True: 16}


@dataclass(frozen=True)
class Check:
    """States one result: what was asked, the answer, and whether it is what it should be."""

    name: str
    answer: str
    passed: bool


@dataclass
class Certificate:
    """Holds what was measured of one backend.

    peers       (peer, dtype, case, tensor) -> error
    refused     what the backend refused, and why
    """

    backend: str
    device: str
    emulated: bool
    verdicts: list[Verdict] = field(default_factory=list)
    peers: dict[tuple[str, torch.dtype, str, str], float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def certify(backend: str, device: str, emulated: bool, cases: int | None, seed: int) -> Certificate:
    """Measures everything."""
    page = Certificate(backend, device, emulated)
    chosen = [case for case in rule_cases.CASES if "slow" not in case.tags and not case.tags & TIMED]
    chosen = [case for case in chosen if case.tags & SMALL or (not emulated and case.name in HARD)]
    repeated = 0
    for case in chosen:
        for dtype in dtypes(backend, case.op):
            if dtype in FULL or case.name in FEW:
                repeated += _certify_case(page, case, dtype)
    _certify_others(page)
    _summarize(page, len(chosen), repeated)
    page.checks.append(_decode(page))
    page.checks.append(_random(page, RANDOM[emulated] if cases is None else cases, seed))
    _limits(page)
    return page


def dtypes(backend: str, op: str) -> list[torch.dtype]:
    """Returns the dtypes in which a backend has an operation; none if it lacks it."""
    capability = BACKENDS[backend].rows.get(op)
    return [dtype for dtype in DTYPES if capability is not None and dtype in capability.dtypes]


def _certify_case(page: Certificate, case: Case, dtype: torch.dtype) -> bool:
    """Judges one case of the rule, and the peers on it; returns whether a second run gave other bits."""
    expected = rule.reference(case, dtype, "cuda" if page.device == "cuda" else "cpu")
    x = rule_cases.inputs(case, dtype).to(page.device)
    try:
        results = rule.outcome(x, page.backend)
        again = rule.outcome(x, page.backend)
    except BackendRefusal as refusal:
        page.refused[f"case {case.name}"] = str(refusal)
        return False
    page.verdicts += expected.verdicts(page.backend, results)
    if not page.emulated and dtype in FULL:
        for name, peer in _peers(page.device):
            if case.lengths is None and (case.T <= 130 or "token" not in name):
                outputs = rule.outcome(x, name, peer)
                for tensor, exact in expected.judge.items():
                    page.peers[name, dtype, case.name, tensor] = error(outputs[tensor].cpu(), exact.cpu())
    return any(not torch.equal(y, again[name]) for name, y in results.items())


def _peers(device: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the name and the function of each peer that is installed and runs on the device."""
    for peer in PEERS.values():
        if peer.absent(device) is None:
            yield f"{peer.label()}, chunks", _without_backend(peer.load())
            if peer.name == "hf":  # flash-linear-attention's has no backward
                yield f"{peer.label()}, token by token", _without_backend(peer.load_step())


def _without_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors, backend, **options: function(*tensors, **options)


def _certify_others(page: Certificate) -> None:
    """Judges the cases of the other operations."""
    for grid in (residual_cases, layer_cases, mixer_cases):
        for case in grid.CASES:
            for dtype in filter(FULL.__contains__, dtypes(page.backend, case.op)):
                try:
                    page.verdicts += grid.verdicts(case, dtype, page.backend, page.device)  # type: ignore[arg-type]
                except BackendRefusal as refusal:
                    page.refused[f"case {case.name}"] = str(refusal)


def _summarize(page: Certificate, cases: int, repeated: int) -> None:
    failures = [str(verdict) for verdict in page.verdicts if not verdict.passed]
    worst = max((verdict.ratio for verdict in page.verdicts), default=math.inf)
    count = len({(v.case, v.dtype) for v in page.verdicts})
    answer = f"{len(page.verdicts)} tensors of {count} named cases, at most {worst:.2f} of what is allowed"
    page.checks += [
        Check("error against the float64 judge", "; ".join(failures[:5]) or answer, not failures),
        Check(
            "twice is the same bits",
            f"{repeated} cases gave other bits"
            if repeated
            else f"all {cases} cases of the rule, every dtype",
            not repeated,
        ),
    ]


def _decode(page: Certificate) -> Check:
    """Decodes the last tokens of some cases one by one, and judges that as if it were training's pass."""
    failures, worst = [], 0.0
    for name in DECODED:
        case = rule_cases.BY_NAME[name]
        if "gated_delta_rule_step" not in BACKENDS[page.backend].rows:
            return Check("decoding is training's pass", "the backend has no step", True)
        for dtype in filter(FULL.__contains__, dtypes(page.backend, "gated_delta_rule_step")):
            x = rule_cases.inputs(case, dtype).to(page.device)
            expected = rule.reference(case, dtype, "cuda" if page.device == "cuda" else "cpu")
            results = rule.decode(x, page.backend, max(1, case.T - STEPS[page.emulated]))
            for verdict in expected.verdicts(page.backend, results, ("o", "final_state")):
                worst = max(worst, verdict.ratio)
                failures += [] if verdict.passed else [str(verdict)]
    tokens = f"the last {STEPS[page.emulated]} tokens of {len(DECODED)} cases"
    answer = f"{tokens}, at most {worst:.2f} of what is allowed"
    return Check("decoding is training's pass", "; ".join(failures) or answer, not failures)


def _random(page: Certificate, cases: int, seed: int) -> Check:
    plan = fuzz.Plan(page.backend, page.device, seed, cases)
    piece = fuzz.run_piece(plan, 0, cases)
    passed, refused = sum(piece.passed.values()), sum(piece.refused.values())
    answer = f"{passed} of {cases} pass with seed {seed}" + f", {refused} are refused" * bool(refused)
    for reason, count in piece.refused.items():
        page.refused[f"{count} random cases"] = reason
    return Check("random cases", "; ".join([answer, *piece.failures[:5]]), not piece.failures)


def _limits(page: Certificate) -> None:
    """Adds what the backend declares that it cannot do."""
    for op in OPERATIONS:
        capability = BACKENDS[page.backend].rows.get(op)
        if capability is None:
            page.refused[f"`{op}`"] = "not implemented"
            continue
        lacking = [dtype_name(dtype) for dtype in DTYPES if dtype not in capability.dtypes]
        if lacking:
            page.refused[f"`{op}`"] = ", ".join(lacking)


def markdown(page: Certificate, command: str) -> str:
    """Formats the page."""
    machine = facts(torch.device(page.device))
    how = "in an interpreter or simulator, on" if page.emulated else "on"
    state = " with uncommitted changes" if machine["dirty"] else ""
    day = datetime.date.today().isoformat()
    lines = [
        f"# {'Passed' if page.passed else 'Failed'}: `{page.backend}` {how} {machine['device']}",
        "",
        f"{day}, commit {machine['commit']}{state}. `{command}`",
        "",
        "| check | result | |",
        "|---|---|---|",
        *(
            f"| {c.name} | {c.answer.replace('|', '/')} | {'pass' if c.passed else '**fail**'} |"
            for c in page.checks
        ),
        "",
        f"![Error of `{page.backend}` beside the baseline's]({page.backend}.png)",
        "",
        "A tensor's error is the root mean square of its difference to a float64 judge, over the judge's.",
        f"It may be at most {FACTOR:g} times the largest error of several runs of a plain PyTorch",
        "implementation at the same precision, on the same inputs. Each sequence and head, and each element,",
        "has a bound of its own. In the tables, 1.00 is all that is allowed.",
        "",
        "## Every tensor",
        "",
        "The median error over the cases, and the worst error over what is allowed.",
        "",
        *_tensor_table(page),
        "",
        *_peer_lines(page),
        "## Hard cases by name",
        "",
        *_case_table(page),
        "",
        "## Refused",
        "",
        *([f"- {what}: {' '.join(why.split())}" for what, why in page.refused.items()] or ["Nothing."]),
        "",
        "## Machine",
        "",
        *(f"- {name}: {value}" for name, value in machine.items() if name not in ("commit", "dirty")),
        "",
    ]
    return "\n".join(lines)


def _tensor_table(page: Certificate) -> list[str]:
    """Returns a table with a line for each tensor and dtype of the rule, and a column for each peer."""
    peers = list(dict.fromkeys(name for name, *_ in page.peers))
    heads = ["tensor", "dtype", f"`{page.backend}`", "baseline", *peers, "worst of allowed"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    mine = [v for v in page.verdicts if v.op == "gated_delta_rule"]
    for dtype in dict.fromkeys(v.dtype for v in mine):
        for tensor in rule.TENSORS:
            rows = [v for v in mine if (v.dtype, v.tensor) == (dtype, tensor) and v.baseline]
            if not rows:
                continue
            cells = [_median(v.error for v in rows), _median(v.baseline for v in rows)]
            for peer in peers:
                cells.append(
                    _median(
                        page.peers[key] for v in rows if (key := (peer, dtype, v.case, tensor)) in page.peers
                    )
                )
            cells.append(f"{max(v.ratio for v in rows):.2f}")
            lines.append(f"| {tensor} | {dtype_name(dtype)} | " + " | ".join(cells) + " |")
    return lines


def _peer_lines(page: Certificate) -> list[str]:
    """Returns a sentence for each peer: how many of its errors are above what is allowed of us."""
    lines = []
    for peer in dict.fromkeys(name for name, *_ in page.peers):
        bounds = [(v.allowed, page.peers.get((peer, v.dtype, v.case, v.tensor))) for v in page.verdicts]
        judged = [(allowed, x) for allowed, x in bounds if x is not None]
        above = sum(not x <= allowed for allowed, x in judged)
        lines += [f"{peer}: {above} of {len(judged)} tensors are above what is allowed here.", ""]
    return lines


def _case_table(page: Certificate) -> list[str]:
    """Returns a table with a line for each case of the rule: its reason, and the worst share by dtype."""
    mine = [v for v in page.verdicts if v.op == "gated_delta_rule"]
    columns = list(dict.fromkeys(v.dtype for v in mine))
    heads = ["case", "why it is hard", *map(dtype_name, columns)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in dict.fromkeys(v.case for v in mine):
        cells = []
        for dtype in columns:
            rows = [v for v in mine if (v.case, v.dtype) == (name, dtype)]
            worst = max(rows, key=lambda v: v.ratio, default=None)
            cells.append("-" if worst is None else f"{worst.ratio:.2f} ({worst.tensor})")
        lines.append(f"| {name} | {rule_cases.BY_NAME[name].reason} | " + " | ".join(cells) + " |")
    others = [v for v in page.verdicts if v.op != "gated_delta_rule"]
    for op in dict.fromkeys(v.op for v in others):
        cells = []
        for dtype in columns:
            rows = [v for v in others if (v.op, v.dtype) == (op, dtype)]
            cells.append(f"{max(v.ratio for v in rows):.2f}" if rows else "-")
        count = len({v.case for v in others if v.op == op})
        lines.append(f"| `{op}` | all {count} cases | " + " | ".join(cells) + " |")
    return lines


def _median(values: Any) -> str:
    numbers = sorted(values, key=lambda x: math.inf if math.isnan(x) else x)
    if not numbers:
        return "-"
    middle = numbers[len(numbers) // 2]
    return f"{middle:.1e}" if math.isfinite(middle) else "not finite"


def draw(page: Certificate, path: Path) -> None:
    """Draws every tensor's error beside the baseline's, with the line of what is allowed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    errors, shares = figure.subplots(1, 2)
    mine = [v for v in page.verdicts if v.op == "gated_delta_rule" and v.error > 0 and v.baseline > 0]
    colors = dict(zip(DTYPES, ("tab:blue", "tab:orange", "tab:green", "tab:purple"), strict=True))
    for peer, marker in zip(dict.fromkeys(name for name, *_ in page.peers), "x+", strict=False):
        points = [
            (v.baseline, page.peers[key])
            for v in mine
            if (key := (peer, v.dtype, v.case, v.tensor)) in page.peers
        ]
        points = [(a, b) for a, b in points if math.isfinite(b) and b > 0]
        if points:
            errors.plot(*zip(*points, strict=True), marker, color="0.65", ms=4, label=peer)
    for dtype in dict.fromkeys(v.dtype for v in mine):
        rows = [v for v in mine if v.dtype == dtype]
        errors.plot([v.baseline for v in rows], [v.error for v in rows], ".", ms=4, color=colors[dtype],
                    label=dtype_name(dtype))  # fmt: skip
    if mine:
        ends = [min(v.baseline for v in mine), max(v.baseline for v in mine)]
        errors.plot(ends, ends, "-", color="0.4", lw=0.8, label="the baseline itself")
        errors.plot(ends, [FACTOR * x for x in ends], "--", color="tab:red", lw=1, label="allowed")
    errors.set_title(f"{page.backend} in color, peers in gray", fontsize=10)
    errors.set(xscale="log", yscale="log", xlabel="the baseline's error", ylabel="error")
    errors.legend(fontsize=7)
    tensors = [name for name in rule.TENSORS if any(v.tensor == name for v in mine)]
    for dtype in dict.fromkeys(v.dtype for v in mine):
        rows = [v for v in mine if v.dtype == dtype]
        shift = 0.18 * (list(colors).index(dtype) - 1.5)
        places = [tensors.index(v.tensor) + shift for v in rows]
        shares.plot(places, [v.ratio for v in rows], ".", ms=4, color=colors[dtype], alpha=0.7)
    shares.axhline(1.0, ls="--", color="tab:red", lw=1)
    shares.set_xticks(range(len(tensors)), tensors, rotation=30)
    shares.set(ylabel="share of what is allowed, each case a point", ylim=(0, None))
    title = "passed" if page.passed else "FAILED"
    figure.suptitle(f"{page.backend}: {title}; gated delta rule, {len(mine)} tensors against a float64 judge")
    figure.savefig(path)


def main(argv: Sequence[str], plan_for: Callable[[str], tuple[str, bool]], runnable: Sequence[str]) -> int:
    """Runs the command; `plan_for` as in `fuzz.main`, `runnable` are the backends of this machine."""
    parser = argparse.ArgumentParser(
        prog="delta-trn parity certificate", description="One page for each backend"
    )
    parser.add_argument("--backend", action="append", help="only this one; may be repeated")
    parser.add_argument("--to", type=Path, default=Path("runs/certificate"), metavar="DIR")
    parser.add_argument("--cases", type=int, help="random cases; default 500, 16 of an emulated backend")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.to.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.backend or [name for name in runnable if name != "recurrent"]:
        page = certify(name, *plan_for(name), options.cases, options.seed)
        command = shlex.join(["python", "-m", "backends.parity", "certificate", "--backend", name])
        (options.to / f"{name}.md").write_text(markdown(page, command))
        draw(page, options.to / f"{name}.png")
        for check in page.checks:
            print(f"{name}: {'pass' if check.passed else 'FAIL'}: {check.name}: {check.answer}")
        print(f"{name}: {options.to / f'{name}.md'}")
        failed = failed or not page.passed
    return 1 if failed else 0
