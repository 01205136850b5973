"""Checks one random case on one backend: the judge, and the property that the case names.

    judge       every output and gradient is within the criterion, finite, of the right shape and dtype
    again       twice is the same bits
    alone       a packed sequence is what it is by itself: within the criterion, and bit for bit on `chunked`
                where every sequence starts on a chunk boundary and heads have multiples of 4 elements
    rows        a sequence does not depend on what the others hold, bit for bit
    cut         the sequence cut in two, with the state handed over, is within the criterion of the whole
    steps       so are the last tokens decoded one by one
    wanted      a gradient is the same bits whichever others are wanted; the others are None

The judge and the samples are by the formula of parity's case; samples are computed until they explain the
result, and all of them before a result fails.
Some things are judged more leniently than in parity's grid:

- a part or an element may be MANY times as far off, because a hundred thousand cases have ten billion;
- a whole tensor has the factor of `chance_factor`, from 4 where one sequence and head carries all of the
  error to 2 where six do;
- the single elements of a computation in parts are not judged, because autograd adds the parts' gradients
  in the dtype of the tensor, nor such gradients of parameters in a short dtype;
- of `linear_cross_entropy` only whole tensors: a logit of a thousand is rounded to a multiple of 4 or 8;
- of float64 only whole tensors: judge and baseline may round one product alike, and the backend not.

A tensor of which the judge's values exceed half of its dtype's range is not judged. One of which no sample is
finite must be finite and no more: on the way to it every sample left float16's range.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from delta_trn.backends.parity.baseline import CHUNK, Noise, Rounding
from delta_trn.backends.parity.judge import FACTOR, Reference, Spread, Verdict, absolute, chance_factor
from tests.support.fuzz.cases import RandomCase

Tensors = Mapping[str, Tensor]
Call = Callable[[RandomCase, Tensors, str], dict[str, Tensor]]
GATES = ("g", "beta", "a", "b")
SHARED = ("A_log", "dt_bias", "weight", "gain")  # all rows have these in common
CHUNKS = (16, 32, 64, 128)
MANY = 4.0


class Failure(AssertionError):
    """A property does not hold; the message says which, and by how much."""


def check(case: RandomCase, backend: str) -> float:
    """Returns the largest error over what is allowed. Raises Failure, or whatever the backend raises."""
    results = outcome(case, backend)
    criterion = Criterion(case)
    worst = criterion.require("judge", results)
    property_ = _PROPERTIES.get(case.check)
    return max(worst, property_(case, backend, results, criterion) if property_ else 0.0)


def judge(case: RandomCase) -> dict[str, Tensor]:
    """Returns the outputs and the wanted gradients in float64."""

    def cast(tensors: Tensors) -> dict[str, Tensor]:
        return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}

    exact = replace(case, dtype=torch.float64, tensors=cast(case.tensors), douts=cast(case.douts))
    return by_formula(exact, Rounding(torch.float64), None)


def samples(case: RandomCase) -> Iterator[dict[str, Tensor]]:
    """Yields results of plain PyTorch at the case's precision, rounded to the nearest and then at random.

    In float32 the rule's literal recurrence is one more.
    """
    yield by_formula(case, Rounding(case.dtype), CHUNK)
    if case.dtype == torch.float32 and case.case.op == "gated_delta_rule":
        yield by_formula(case, Rounding(case.dtype), None)
    noise = Noise(0)
    for chunk in 3 * CHUNKS:
        yield by_formula(case, Rounding(case.dtype, noise), chunk)


def by_formula(case: RandomCase, rounding: Rounding, chunk: int | None) -> dict[str, Tensor]:
    """Returns the outputs and the wanted gradients by the formula of the case's operation."""
    leaves = {
        name: x.detach().clone().requires_grad_(name in case.wanted) for name, x in case.tensors.items()
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
                raise Failure(f"{name} of the judge is not finite: the case is wrong, not the backend")
        # what is multiplied: neither exponents nor what is normalized first
        normalized = ("q", "k") if getattr(case.case, "normalized_inside", False) else ()
        factors = [x for name, x in case.tensors.items() if name not in (*GATES, *SHARED[:2], *normalized)]
        factors = [x for x in (*factors, *case.douts.values()) if x.numel()]
        largest = max((x.abs().max().item() for x in factors), default=0.0)
        terms = {name: operation.terms(case.case, name) for name in exact}
        spreads = {
            name: Spread(
                y, operation.parts(case.case, name, y), absolute(dtype_of(case, name), largest, terms[name])
            )
            for name, y in exact.items()
        }
        rounded = case.dtype if operation.rounded else None
        self.references = {
            name: Reference(case.case.op, case.check, case.dtype, exact, spreads, n, rounded)
            for name, n in terms.items()
        }
        self.judge, self.spreads = exact, spreads
        self.add_sample()

    def split(self, results: Tensors) -> dict[str, Tensor]:
        """Returns results with those of a layer's convolution as three tensors: q, k and v differ in size."""
        case, pairs = self.case, results.items()
        return {n: x for name, y in pairs for n, x in case.operation.split(case.case, name, y).items()}

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
            if what in ("alone", "cut") and name[1:].startswith(SHARED) and y.dtype.itemsize < 4:
                continue  # autograd adds up the parts' gradients in the parameter's dtype
            if not y.isfinite().all():
                raise Failure(f"{what}: {name} is not finite")
            names.append(name)
        while True:
            verdicts = [self.references[name].verdicts("the backend", results, [name])[0] for name in names]
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
        whole *= FACTOR / chance_factor(self.spreads[verdict.tensor].effective_parts())
        if self.case.case.op == "linear_cross_entropy" or self.case.dtype == torch.float64:
            return whole
        element = verdict.element if what == "judge" else 0.0
        return max(whole, verdict.part / MANY, element / MANY)


def run(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
    """Calls the public operation."""
    return case.operation.run(case.case, x, backend)


def outcome(case: RandomCase, backend: str, call: Call | None = None) -> dict[str, Tensor]:
    """Returns the outputs, and the gradients of the wanted tensors, of the public operation or of `call`."""
    leaves = {
        name: x.detach().to(case.device).requires_grad_(name in case.wanted)
        for name, x in case.tensors.items()
    }
    with torch.set_grad_enabled(bool(case.wanted)):
        outputs = (call or run)(case, leaves, backend)
    results = with_gradients(case, leaves, outputs)
    return {name: y.cpu() for name, y in results.items()}


def _require_same_bits(what: str, results: Tensors, expected: Tensors) -> float:
    for name, y in expected.items():
        if not torch.equal(results[name], y):
            unequal = (results[name] != y).sum().item()
            raise Failure(f"{what}: {unequal} of {y.numel()} elements of {name} are other bits")
    return 0.0


def _again(case: RandomCase, backend: str, results: Tensors, criterion: Criterion) -> float:
    return _require_same_bits("again", outcome(case, backend), results)


def _wanted(case: RandomCase, backend: str, results: Tensors, criterion: Criterion) -> float:
    """Asks for other gradients than the case: for all, or where it asks for all, for every other one."""
    names = case.floats()
    others = names if len(case.wanted) < len(names) else names[::2]
    every = outcome(replace(case, wanted=others), backend) if others else results
    return _require_same_bits("wanted", every, {name: y for name, y in results.items() if name in every})


def _rows(case: RandomCase, backend: str, results: Tensors, criterion: Criterion) -> float:
    """Changes all other rows, or all other packed sequences."""
    bounds = _packed(case)
    rows = len(bounds) - 1 if bounds else next(iter(case.tensors.values())).shape[0]
    if rows < 2:
        return 0.0
    n = rows // 2

    def mine(name: str) -> tuple[slice, ...] | None:
        """Returns where the row's part of a tensor or of its gradient is; None if all rows share it."""
        name = name[1:] if name[:1] == "d" and name[1:] in case.tensors else name
        if name in (*SHARED, "cu_seqlens", "position", "loss"):
            return None
        if bounds is None or name in ("initial_state", "final_state"):
            return (slice(n, n + 1),)
        return slice(None), slice(bounds[n], bounds[n + 1])

    def change(tensors: Tensors) -> dict[str, Tensor]:
        changed = {}
        for name, x in tensors.items():
            place = mine(name)
            changed[name] = x
            if place is not None and 0 not in x.stride():
                # in a copy of the storage: strides and alignment decide which products BLAS uses
                storage = x.untyped_storage().clone()
                y = x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())  # type: ignore
                y.mul_(0.5 if name in GATES else -0.5)[place] = x[place]
                changed[name] = y
        return changed

    other = outcome(replace(case, tensors=change(case.tensors), douts=change(case.douts)), backend)
    places = {name: mine(name) for name in results}
    expected = {name: results[name][place] for name, place in places.items() if place is not None}
    return _require_same_bits("rows", {name: other[name][places[name]] for name in expected}, expected)


def _alone(case: RandomCase, backend: str, results: Tensors, criterion: Criterion) -> float:
    """Computes each sequence by itself; of many, the first and the last ones as two packings."""
    bounds, op = _packed(case), case.case.op
    if bounds is None:
        return 0.0
    cuts = list(range(len(bounds))) if len(bounds) <= 8 else [0, len(bounds) // 2, len(bounds) - 1]

    def call(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
        pieces = []
        for first, last in itertools.pairwise(cuts):
            tokens = slice(bounds[first], bounds[last])
            part = _part({n: y for n, y in x.items() if n not in ("cu_seqlens", "position")}, tokens)
            if "initial_state" in x:
                part["initial_state"] = x["initial_state"][first:last]
            if last > first + 1 and "cu_seqlens" in x:
                part["cu_seqlens"] = x["cu_seqlens"][first : last + 1] - bounds[first]
            if last > first + 1 and "position" in x:
                part["position"] = x["position"][tokens]
            if op == "gated_delta_rule" or tokens.stop > tokens.start:
                pieces.append(run(case, part, backend))
        axes = {"final_state": 0}
        return {name: torch.cat([part[name] for part in pieces], axes.get(name, 1)) for name in pieces[0]}

    alone = outcome(case, backend, call)
    whole_chunks = len(bounds) <= 8 and all(b % CHUNK == 0 for b in bounds[:-1])
    # states of other sizes begin anywhere in a cache line, and BLAS chooses its kernels by that, too
    aligned = op == "gated_delta_rule" and case.case.K % 4 == case.case.V % 4 == 0
    if backend == "chunked" and whole_chunks and aligned:
        same = {name: y for name, y in results.items() if name[1:] not in SHARED}
        _require_same_bits("alone, on chunk boundaries", alone, same)
    return criterion.require("alone", alone)


def _cut(case: RandomCase, backend: str, results: Tensors, criterion: Criterion) -> float:
    """Cuts the sequence in two, at a place that the case's name decides."""
    x = next(iter(case.tensors.values()))
    T = x.shape[1]
    if T < 2 or "cu_seqlens" in case.tensors or "position" in case.tensors:
        return 0.0
    at = 1 + zlib.crc32(case.case.name.encode()) % (T - 1)
    first, rest = slice(0, at), slice(at, T)

    def call(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
        one, carried = run(case, _part(x, first), backend), {}
        if "weight" in x:  # of a convolution, which takes the last tokens along
            before = x["weight"].shape[1] - 1
            prefix = x.get("prefix", x["x"].new_zeros(x["x"].shape[0], before, x["x"].shape[2]))
            carried["prefix"] = torch.cat([prefix, x["x"]], 1)[:, at : at + before]
        if "final_state" in one:
            carried["initial_state"] = one["final_state"]
        two = run(case, _part(x, rest) | carried, backend)
        name = "o" if "o" in two else "y"
        return {**two, name: torch.cat([one[name], two[name]], 1)}

    return criterion.require("cut", outcome(case, backend, call))


def _steps(case: RandomCase, backend: str, results: Tensors, criterion: Criterion) -> float:
    """Decodes the last tokens one by one, without gradients."""
    T = case.tensors["q"].shape[1]
    if T == 0 or "cu_seqlens" in case.tensors:
        return 0.0
    start = max(0, T - 4)

    def call(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
        v, k, outputs, state = x["v"], x["k"], [], x.get("initial_state")
        if start:
            y = run(case, _part(x, slice(0, start)), backend)
            outputs, state = [y["o"]], y["final_state"]
        elif state is None:
            full = torch.promote_types(case.dtype, torch.float32)
            state = v.new_zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), dtype=full)
        one = replace(case, case=replace(case.case, op="gated_delta_rule_step"))
        for t in range(start, T):
            y = run(one, {**_part(x, slice(t, t + 1)), "initial_state": state}, backend)
            outputs, state = [*outputs, y["o"]], y["final_state"]
        return {"o": torch.cat(outputs, 1), "final_state": state}

    return criterion.require("steps", outcome(case, backend, call))


def _part(x: Tensors, tokens: slice) -> dict[str, Tensor]:
    whole = (*SHARED, "initial_state", "prefix")
    return {name: y if name in whole else y[:, tokens] for name, y in x.items()}


def _packed(case: RandomCase) -> list[int] | None:
    """Returns the bounds of packed sequences; None without packing."""
    if "cu_seqlens" in case.tensors:
        return case.tensors["cu_seqlens"].tolist()
    if "position" in case.tensors:
        firsts = (case.tensors["position"] == 0).nonzero().flatten().tolist()
        return [*firsts, case.tensors["position"].shape[0]]
    return None


_PROPERTIES: Mapping[str, Callable[[RandomCase, str, Tensors, Criterion], float]] = {
    "again": _again,
    "wanted": _wanted,
    "rows": _rows,
    "alone": _alone,
    "cut": _cut,
    "steps": _steps,
}
