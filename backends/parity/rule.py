"""Runs the cases of both delta rules on a backend, by the judge, and by the baseline.

    judge       the literal recurrence (`gated_delta_rule.recurrent`) in float64, called below the
                public operation, whose checks, defaults and gates it does not use
    samples     `parity.baseline`, chunk by chunk: once rounded to the nearest with chunks of 64,
                and SAMPLES times for each of CHUNKS with rounding errors drawn at random. In
                float32 the literal recurrence is one more: it errs less where the triangular
                inverse is badly conditioned, and more where a state is overwritten often. A chunk
                has the tokens that a matrix unit takes at once, 128 on Trainium. Its size decides
                an error: inside one chunk a decay of 1e-28 is computed as a difference of numbers
                near 1, with an error of 1e-8; over two chunks as a product of two, with one of
                1e-16

A result has passed sums over K, over V and over a chunk of tokens. In a shorter dtype it has been
rounded four times (into K S, into T X, into P U, and as a result). Evenly spread mantissas make
that .38 u, since roundings add in squares; the floor allows u / 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from delta_trn.backends.gated_delta_rule import gated_delta_rule, gated_delta_rule_step, recurrent
from delta_trn.backends.gated_delta_rule.contract import Rule
from delta_trn.backends.kimi_delta_attention import kimi_delta_attention, kimi_delta_attention_step
from delta_trn.backends.parity import baseline
from delta_trn.backends.parity.baseline import Rounding
from delta_trn.backends.parity.judge import Reference, Spread, Verdict, absolute
from delta_trn.backends.parity.rule_cases import PER_HEAD, Case, Inputs, inputs
from delta_trn.backends.parity.tables import Tables, judges_functions

CHUNKS, SAMPLES = (16, 32, 64, 128), 3
AT_ONCE = 1 << 22  # elements of q, k and v that are computed together

GRADIENTS: Mapping[str, str] = {
    "dq": "q",
    "dk": "k",
    "dv": "v",
    "dg": "g",
    "dbeta": "beta",
    "dh0": "initial_state",
    "dA_log": "A_log",
    "ddt_bias": "dt_bias",
}
TENSORS = ("o", "final_state", *GRADIENTS)


def terms(case: Case) -> int:
    """Returns how many float32 terms a result of the case has added up:
    over K, V and a chunk of tokens.
    """
    return case.K + case.V + min(case.T, baseline.CHUNK)


def outcome(
    x: Inputs, backend: str, operation: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """Computes o, final_state and every gradient by the public operation,
    or one like it, on a backend.
    """
    leaves = make_leaves(x)
    if operation is None:
        operation = kimi_delta_attention if x.case.has_channels else gated_delta_rule
    o, final_state = operation(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=leaves.get("initial_state"),
        output_final_state=True,
        backend=backend,
        **replace(x, **leaves).arguments(),
    )
    assert final_state is not None
    return _with_gradients(x, leaves, o, final_state)


def decode(x: Inputs, backend: str) -> dict[str, Tensor]:
    """Computes o and final_state by the operation for one token, token by token."""
    options = dict(x.arguments(), backend=backend)
    if options.pop("cu_seqlens") is not None:
        raise ValueError(f"case {x.case.name} is packed; decoding takes one token of each sequence")
    tensors = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta}
    outputs, state = [], x.initial_state
    step = kimi_delta_attention_step if x.case.has_channels else gated_delta_rule_step
    with torch.no_grad():
        if state is None:
            full = torch.promote_types(x.q.dtype, torch.float32)
            state = torch.zeros(
                len(x.q), *x.v.shape[2:3], x.case.K, x.case.V, dtype=full, device=x.q.device
            )
        for t in range(x.case.T):
            token = {name: y[:, t] for name, y in tensors.items()}
            o, state = step(**token, state=state, **options)
            outputs.append(o[:, None])
    return {"o": torch.cat(outputs, 1), "final_state": state}


class _Literal(torch.autograd.Function):
    """The literal recurrence for autograd, below the public operation."""

    @staticmethod
    def forward(
        ctx: Any, case: Case, names: Sequence[str], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = dict(zip(names, tensors, strict=True))
        call = Rule(
            **x, scale=case.exact_scale, beta_max=case.beta_max, l2norm=case.normalized_inside,
            output_final_state=True, lower_bound=case.lower_bound,
        )  # fmt: skip
        ctx.call, ctx.names = call, names
        o, final_state, _ = recurrent.forward(call, save=True)
        assert final_state is not None
        return o, final_state

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        do, dstate = grad_outputs
        gradients = recurrent.backward(do, dstate, ctx.call, [])
        return None, None, *(getattr(gradients, name, None) for name in ctx.names)


def formula(
    case: Case, x: Mapping[str, Tensor], rounding: Rounding, chunk: int | None
) -> dict[str, Tensor]:
    """Returns o and final_state by the baseline, in chunks of so many tokens; None: literally.

    The baseline's tensors, but cu_seqlens, may have a first axis of samples. Documents of a row are
    packed sequences, of which the first one has the row's state, and the last one leaves it.
    """
    if case.documents is not None:
        bounds = torch.tensor((0, *accumulate(case.documents)), device=x["q"].device)
        x = {**x, "cu_seqlens": bounds}
        if "initial_state" in x:
            zeros = (0, 0, 0, 0, 0, 0, 0, len(case.documents) - 1)
            x["initial_state"] = F.pad(x["initial_state"], zeros)
        results = formula(replace(case, documents=None, lengths=case.documents), x, rounding, chunk)
        return results | {"final_state": results["final_state"][..., -1:, :, :, :]}
    if chunk is None:
        outputs: Any = _Literal.apply(case, tuple(x), *x.values())
        return dict(zip(("o", "final_state"), outputs, strict=True))
    noise, gates = rounding.noise, (x["g"], x["beta"], x.get("A_log"), x.get("dt_bias"))
    g, beta = baseline.make_gates(*gates, case.beta_max, noise, case.lower_bound)
    o, final_state = baseline.gated_delta_rule(
        x["q"],
        x["k"],
        x["v"],
        g,
        beta,
        x.get("initial_state"),
        x.get("cu_seqlens"),
        case.exact_scale,
        case.normalized_inside,
        chunk=chunk,
        noise=noise,
    )
    return {"o": o, "final_state": final_state}


def judge_outcome(x: Inputs) -> dict[str, Tensor]:
    """Computes the same by the literal recurrence in float64."""
    return _by_formula(x.double(), Rounding(torch.float64), None)


def samples(x: Inputs, *, inexact: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yields results by the baseline, each with a first axis of samples.

    inexact     functions have the errors of tables, see `tables`
    """
    dtype, tables = x.q.dtype, Tables(len(CHUNKS), len(CHUNKS) * SAMPLES) if inexact else None
    noise = baseline.Noise(len(CHUNKS), x.q.device, tables)
    yield _by_formula(x, Rounding(dtype), baseline.CHUNK, 1)
    if dtype == torch.float32:
        yield {name: y[None] for name, y in _by_formula(x, Rounding(dtype), None).items()}
    most = max(1, AT_ONCE // (2 * x.q.numel() + x.v.numel() + 1))
    longest = max(x.case.lengths or x.case.documents or (x.case.T,))
    # chunks that hold the longest sequence are one and the same
    for chunk, times in Counter(min(chunk, max(longest, 1)) for chunk in CHUNKS).items():
        for start in range(0, times * SAMPLES, most):
            yield _by_formula(x, Rounding(dtype, noise), chunk, min(most, times * SAMPLES - start))


def _by_formula(x: Inputs, rounding: Rounding, chunk: int | None, n: int = 0) -> dict[str, Tensor]:
    """Computes n samples by the formula, with an axis of samples; 0: one without it."""
    leaves = make_leaves(x)
    if n:
        if rounding.noise is not None and rounding.noise.tables is not None:
            rounding.noise.tables.begin(n)
        leaves = {
            name: y.detach().expand(n, *y.shape).clone().requires_grad_()
            for name, y in leaves.items()
        }
    packed = {} if x.cu_seqlens is None else {"cu_seqlens": x.cu_seqlens}
    outputs = formula(x.case, {**leaves, **packed}, rounding, chunk)
    return _with_gradients(x, leaves, outputs["o"], outputs["final_state"])


def make_leaves(x: Inputs) -> dict[str, Tensor]:
    """Returns the tensors that get gradients, by name, each a leaf of a graph of its own."""
    tensors = x.tensors()
    return {
        name: tensors[name].detach().requires_grad_()
        for name in GRADIENTS.values()
        if name in tensors
    }


def _with_gradients(
    x: Inputs, leaves: Mapping[str, Tensor], o: Tensor, final_state: Tensor
) -> dict[str, Tensor]:
    results = {"o": o.detach(), "final_state": final_state.detach()}
    pairs = [
        (y, dy.expand_as(y)) for y, dy in ((o, x.do), (final_state, x.dstate)) if dy is not None
    ]
    if not pairs:
        return results
    outputs, douts = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, list(leaves.values()), douts, materialize_grads=True)
    names = {source: name for name, source in GRADIENTS.items()}
    return results | {names[name]: grad for name, grad in zip(leaves, grads, strict=True)}


def parts(case: Case, name: str) -> Tensor:
    """Returns the number of the sequence and head of each index of a tensor's first axes.

    Where channels decay, each is a part of dg: what strong decay leaves of one is nothing beside
    another.
    """
    if name in ("dA_log", "ddt_bias"):
        return torch.arange(case.value_heads)
    heads = case.H if name in ("dq", "dk") else case.value_heads
    sequence = torch.arange(case.sequences)
    if name not in ("final_state", "dh0", "dinitial_state"):  # which have no axis of tokens
        lengths = case.lengths or case.documents or [case.T] * case.B
        sequence = torch.arange(len(lengths))
        sequence = sequence.repeat_interleave(torch.tensor(lengths)).view(case.B, case.T)
    part = sequence[..., None] * heads + torch.arange(heads)
    return (
        part[..., None] * case.K + torch.arange(case.K)
        if name == "dg" and case.has_channels
        else part
    )


def reference_for(x: Inputs, *, inexact: bool = False) -> Reference:
    """Computes what any inputs are judged by, on a device that has float64.

    inexact     the samples' functions have the errors of tables
    """
    case, dtype = x.case, x.q.dtype
    judge = judge_outcome(x)
    # no product has g as a factor, nor q and k before they are normalized: -3.4e38 would hide any
    # error
    none = ("g", "q", "k") if case.normalized_inside else ("g",)
    floats = (
        y
        for name, y in x.tensors().items()
        if name not in none and y.is_floating_point() and y.numel()
    )
    largest = max(y[y.isfinite()].abs().max().item() for y in floats if y.isfinite().any())
    spreads = {}
    for name, exact in judge.items():
        assert exact.isfinite().all(), f"the judge's {name} of case {case.name} is not finite"
        full = name in ("final_state", "dh0", "dg", *(f"d{shared}" for shared in PER_HEAD))
        result = torch.promote_types(dtype, torch.float32) if full else dtype
        spreads[name] = Spread(exact, parts(case, name), absolute(result, largest, terms(case)))
    for sample in samples(x, inexact=inexact):
        for name, spread in spreads.items():
            spread.add(sample[name])
    for name, spread in spreads.items():
        assert spread.count, f"no sample of the baseline is finite in {name} of case {case.name}"
    return Reference(case.op, case.name, dtype, judge, spreads, terms(case), dtype, x)


@lru_cache(maxsize=4)
def reference(
    case: Case, dtype: torch.dtype, device: str = "cpu", inexact: bool = False
) -> Reference:
    """Computes what a case is judged by, on a `device` that has float64."""
    x = inputs(case, dtype).to(device)
    if "bench" in case.tags and case.B > 2:
        # sequences do not depend on each other, so the first and the last stand for the batch
        x = x.rows([0, case.B - 1])
    return reference_for(x, inexact=inexact)


def _reference_of(case: Case, dtype: torch.dtype, backend: str, device: str) -> Reference:
    """Computes what a backend's results of a case are judged by, where it has float64."""
    there = "cuda" if device.startswith("cuda") else "cpu"
    return reference(case, dtype, there, judges_functions(backend))


def verdicts(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> list[Verdict]:
    """Runs a backend on a case and judges every tensor. Raises BackendRefusal where it refuses."""
    expected = _reference_of(case, dtype, backend, device)
    results = outcome(inputs(case, dtype).to(device), backend)
    if expected.inputs.q.shape[0] != case.B:
        rows = [0, case.B - 1]
        shared = {f"d{name}" for name in PER_HEAD} & set(results)
        results = {name: x[rows] for name, x in results.items() if name not in shared}
        if shared:
            # the judge sums their gradients over these two sequences alone
            part = outcome(expected.inputs.to(device), backend)
            results |= {name: part[name] for name in shared}
    return expected.verdicts(backend, results)


def step_verdicts(
    case: Case, dtype: torch.dtype, backend: str, device: str = "cpu"
) -> list[Verdict]:
    """Decodes a case of STEPS token by token on a backend, and judges o and the final state."""
    expected = _reference_of(case, dtype, backend, device)
    return expected.verdicts(backend, decode(inputs(case, dtype).to(device), backend))
