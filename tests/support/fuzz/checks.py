"""Checks one random case on one backend, three times over.

    judge       every output and gradient is within the criterion, finite, of the right shape and
                dtype
    rows        a sequence does not depend on what the others hold, bit for bit
    wanted      a gradient is the same bits whichever others are wanted; the others are None

Both of the latter also see what is not the same bits twice. Packing, states handed over and
decoding need no check of their own: the judge's formula has them.

The judge and the samples are by the formula of parity's case; samples are computed until they
explain the result, and all of them before a result fails.
Some things are judged more leniently than in parity's grid:

- a part or an element may be MANY times as far off, because a hundred thousand cases have ten billion;
- a whole tensor has the factor of `chance_factor`, from 4 where one sequence and head carries all of the
  error to 2 where six do;
- single elements of what is not a random case are not judged;
- of `linear_cross_entropy` only whole tensors: a logit of a thousand is rounded to a multiple of 4 or 8;
- of float64 only whole tensors: judge and baseline may round one product alike, and the backend not.

A tensor of which the judge's values exceed half of its dtype's range is not judged. One of which no
sample is finite must be finite and no more: on the way to it every sample left float16's range.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from delta_trn.backends.parity.baseline import CHUNK, Noise, Rounding
from delta_trn.backends.parity.judge import (
    FACTOR,
    Reference,
    Spread,
    Verdict,
    absolute,
    chance_factor,
)
from tests.support.fuzz.cases import RandomCase

Tensors = Mapping[str, Tensor]
GATES = ("g", "beta", "a", "b")
SHARED = ("A_log", "dt_bias", "weight", "gain")  # all rows have these in common
CHUNKS = (16, 32, 64, 128)
MANY = 4.0


class Failure(AssertionError):
    """A property does not hold; the message says which, and by how much."""


def check(case: RandomCase, backend: str) -> float:
    """Returns the largest error over what is allowed. Raises Failure,
    or whatever the backend raises.
    """
    results = outcome(case, backend)
    worst = Criterion(case).require("judge", results)
    _check_rows(case, backend, results)
    _check_wanted(case, backend, results)
    return worst


def judge(case: RandomCase) -> dict[str, Tensor]:
    """Returns the outputs and the wanted gradients in float64."""

    def cast(tensors: Tensors) -> dict[str, Tensor]:
        return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}

    exact = replace(case, dtype=torch.float64, tensors=cast(case.tensors), douts=cast(case.douts))
    return by_formula(exact, Rounding(torch.float64), None)


def samples(case: RandomCase) -> Iterator[dict[str, Tensor]]:
    """Yields results of plain PyTorch at the case's precision, rounded to the nearest and then at
    random.

    In float32 the rule's literal recurrence is one more.
    """
    yield by_formula(case, Rounding(case.dtype), CHUNK)
    if case.dtype == torch.float32 and case.case.op in ("gated_delta_rule", "kimi_delta_attention"):
        yield by_formula(case, Rounding(case.dtype), None)
    noise = Noise(0)
    for chunk in 3 * CHUNKS:
        yield by_formula(case, Rounding(case.dtype, noise), chunk)


def by_formula(case: RandomCase, rounding: Rounding, chunk: int | None) -> dict[str, Tensor]:
    """Returns the outputs and the wanted gradients by the formula of the case's operation."""
    leaves = {
        name: x.detach().clone().requires_grad_(name in case.wanted)
        for name, x in case.tensors.items()
    }
    return with_gradients(case, leaves, case.operation.formula(case.case, leaves, rounding, chunk))


def with_gradients(case: RandomCase, leaves: Tensors, outputs: Tensors) -> dict[str, Tensor]:
    """Returns the outputs, and the gradients of the wanted leaves, zeros where a leaf has none."""
    results = {name: y.detach() for name, y in outputs.items()}
    pairs = [(outputs[name], dy) for name, dy in case.douts.items() if name in outputs]
    for y, dy in pairs:
        if y.shape != dy.shape:
            raise Failure(f"an output is {list(y.shape)}, expected {list(dy.shape)}")
    pairs = [(y, dy.to(y)) for y, dy in pairs if y.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))  # type: ignore[arg-type]
    for name, x in leaves.items():
        if name in case.wanted:
            results[f"d{name}"] = torch.zeros_like(x) if x.grad is None else x.grad
        elif x.grad is not None:
            raise Failure(f"{name} requires no gradient and got one")
    return results


def dtype_of(case: RandomCase, name: str) -> torch.dtype:
    """Returns the dtype that the operation promises for an output or a gradient."""
    tensor = name[1:] if name[1:] in case.tensors else name[1:].rpartition("_")[0]  # of dx_q: x
    if name[0] == "d" and tensor in case.tensors:
        return case.tensors[tensor].dtype
    full = name in ("final_state", "loss")
    return torch.promote_types(case.dtype, torch.float32) if full else case.dtype


class Criterion:
    """Judges results of one case; takes samples of the baseline when it needs them."""

    def __init__(self, case: RandomCase) -> None:
        self.case, self.samples = case, samples(case)
        exact, operation = self.split(judge(case)), case.operation
        for name, y in exact.items():
            if not y.isfinite().all():
                raise Failure(
                    f"{name} of the judge is not finite: the case is wrong, not the backend"
                )
        # what is multiplied: neither exponents nor what is normalized first
        normalized = ("q", "k") if getattr(case.case, "normalized_inside", False) else ()
        factors = [
            x for name, x in case.tensors.items() if name not in (*GATES, *SHARED[:2], *normalized)
        ]
        factors = [x for x in (*factors, *case.douts.values()) if x.numel()]
        largest = max((x.abs().max().item() for x in factors), default=0.0)
        terms = {name: operation.terms(case.case, name) for name in exact}
        spreads = {
            name: Spread(
                y,
                operation.parts(case.case, name, y),
                absolute(dtype_of(case, name), largest, terms[name]),
            )
            for name, y in exact.items()
        }
        rounded = case.dtype if operation.rounded else None
        self.references = {
            name: Reference(case.case.op, case.case.name, case.dtype, exact, spreads, n, rounded)
            for name, n in terms.items()
        }
        self.judge, self.spreads = exact, spreads
        self.add_sample()

    def split(self, results: Tensors) -> dict[str, Tensor]:
        """Returns results with those of a layer's convolution as three tensors:
        q, k and v differ in size.
        """
        case, pairs = self.case, results.items()
        return {
            n: x for name, y in pairs for n, x in case.operation.split(case.case, name, y).items()
        }

    def add_sample(self) -> bool:
        """Adds the next sample of the baseline; returns whether there was one."""
        results = next(self.samples, None)
        if results is None:
            return False
        for name, y in self.split(results).items():
            self.spreads[name].add([y])
        return True

    def require(self, what: str, results: Tensors) -> float:
        """Returns the largest error over what is allowed. Raises Failure where one is above."""
        names, results = [], self.split(results)
        for name, exact in self.judge.items():
            if name not in results:
                raise Failure(f"{what}: no {name}")
            y = results[name]
            form, expected = (y.dtype, y.shape), (dtype_of(self.case, name), exact.shape)
            if form != expected:
                raise Failure(f"{what}: {name} is {form}, expected {expected}")
            if exact.numel() == 0 or exact.abs().max() > torch.finfo(y.dtype).max / 2:
                continue
            if not y.isfinite().all():
                raise Failure(f"{what}: {name} is not finite")
            names.append(name)
        while True:
            verdicts = [
                self.references[name].verdicts("the backend", results, [name])[0] for name in names
            ]
            ratios = {verdict: self.ratio(what, verdict) for verdict in verdicts}
            if all(ratio <= 1.0 for ratio in ratios.values()) or not self.add_sample():
                break
        ratios = {verdict: x for verdict, x in ratios.items() if self.spreads[verdict.tensor].count}
        for verdict, ratio in ratios.items():
            if not ratio <= 1.0:
                raise Failure(f"{what}: {str(verdict).removeprefix('the backend ')}")
        return max(ratios.values(), default=0.0)

    def ratio(self, what: str, verdict: Verdict) -> float:
        """Returns the largest error of one tensor over what is allowed."""
        whole = replace(verdict, part=0.0, element=0.0).ratio
        whole *= FACTOR / chance_factor(count_effective_parts(self.spreads[verdict.tensor]))
        if self.case.case.op == "linear_cross_entropy" or self.case.dtype == torch.float64:
            return whole
        element = verdict.element if what == "judge" else 0.0
        return max(whole, verdict.part / MANY, element / MANY)


def run(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
    """Calls the public operation."""
    return case.operation.run(case.case, x, backend)


def outcome(case: RandomCase, backend: str) -> dict[str, Tensor]:
    """Returns the outputs, and the gradients of the wanted tensors, of the public operation."""
    leaves = {
        name: x.detach().to(case.device).requires_grad_(name in case.wanted)
        for name, x in case.tensors.items()
    }
    with torch.set_grad_enabled(bool(case.wanted)):
        outputs = run(case, leaves, backend)
    results = with_gradients(case, leaves, outputs)
    return {name: y.cpu() for name, y in results.items()}


def _require_same_bits(what: str, results: Tensors, expected: Tensors) -> None:
    for name, y in expected.items():
        if not torch.equal(results[name], y):
            unequal = (results[name] != y).sum().item()
            raise Failure(f"{what}: {unequal} of {y.numel()} elements of {name} are other bits")


def _check_wanted(case: RandomCase, backend: str, results: Tensors) -> None:
    """Asks for other gradients than the case: for all, or where it asks for all, for every other
    one.

    A decoded token that wants none is computed by a function of its own, with other bits.
    """
    if case.case.op.endswith("_step"):
        return
    names = case.floats()
    others = names if len(case.wanted) < len(names) else names[::2]
    every = outcome(replace(case, wanted=others), backend)
    _require_same_bits("wanted", every, {name: y for name, y in results.items() if name in every})


def _check_rows(case: RandomCase, backend: str, results: Tensors) -> None:
    """Changes all rows but one; those of a readout share one loss."""
    rows = next(iter(case.tensors.values())).shape[0]
    if rows < 2 or case.case.op == "linear_cross_entropy":
        return
    n = slice(rows // 2, rows // 2 + 1)

    def change(tensors: Tensors) -> dict[str, Tensor]:
        changed = {}
        for name, x in tensors.items():
            changed[name] = x
            if name not in SHARED and 0 not in x.stride():
                # in a copy of the storage: strides and alignment decide which products BLAS uses
                storage = x.untyped_storage().clone()
                y = x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())  # type: ignore
                y.mul_(0.5 if name in GATES else -0.5)[n] = x[n]
                changed[name] = y
        return changed

    other = outcome(replace(case, tensors=change(case.tensors), douts=change(case.douts)), backend)
    expected = {name: y[n] for name, y in results.items() if name[1:] not in SHARED}
    _require_same_bits("rows", {name: other[name][n] for name in expected}, expected)


def count_effective_parts(spread: Spread) -> float:
    """Returns how many parts of equal error vary like the tensor's error does (`chance_factor`).

    With e_h the energy of part h in n samples, each part's a multiple of chi-squared with one
    degree of freedom per sample, this is the participation ratio without the bias of few samples:

        nu = ((n + 2) (sum e_h)^2 / sum e_h^2 - 2) / n
    """
    parts, largest = spread.energy.numel(), spread.energy.max()
    if largest == 0:
        return float(parts)
    energy = spread.energy / largest  # whose squares do not underflow
    ratio = (energy.sum().square() / energy.square().sum()).item()
    return min(max(1.0, ((spread.count + 2) * ratio - 2) / spread.count), float(parts))
