"""Checks one random case on one backend: the judge, and the property that the case names.

    judge       every output and gradient is within the criterion, finite, of the right shape and dtype
    again       twice is the same bits
    alone       a packed sequence is what it is by itself: within the criterion, and bit for bit on `chunked`
                where every sequence starts on a chunk boundary and heads have multiples of 4 elements
    rows        a sequence does not depend on what the others hold, bit for bit
    cut         the sequence cut in two, with the state handed over, is within the criterion of the whole
    steps       so are the last tokens decoded one by one
    wanted      a gradient is the same bits whichever others are wanted; the others are None

The criterion is that of `judge`. Samples of the baseline are computed until they explain the result, and all
of them before a result fails. Some things are judged more leniently than in the grid:

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

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from delta_trn.backends import layers
from delta_trn.backends.delta_residual import delta_residual
from delta_trn.backends.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from delta_trn.backends.parity import dense, layer_cases, residual_cases, rule
from delta_trn.backends.parity.baseline import Noise, Rounding
from delta_trn.backends.parity.judge import FACTOR, Reference, Spread, Verdict, absolute, chance_factor
from delta_trn.backends.parity.random_cases import RandomCase

Tensors = Mapping[str, Tensor]
Call = Callable[[RandomCase, Tensors, str], dict[str, Tensor]]
SHARED = ("A_log", "dt_bias", "weight")  # all rows have these in common
CHUNK = 64
SAMPLES = 12
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


def check_sample(case: RandomCase) -> float:
    """Judges one more sample of the baseline in the place of a backend: where it fails, chance failed it."""
    n, noise = zlib.crc32(case.name.encode()), _noise(1)
    noise.generator.manual_seed(n)
    results = _sample(case, n, noise)
    finite = all(y.isfinite().all() for y in results.values())  # float16 may end on the way
    return Criterion(case).require("judge", results) if finite else 0.0


class Criterion:
    """Judges results of one case; takes samples of the baseline when it needs them."""

    def __init__(self, case: RandomCase) -> None:
        self.case, exact, self.samples = case, judge(case), samples(case)
        for name, y in exact.items():
            if not y.isfinite().all():
                raise Failure(f"{name} of the judge is not finite: the case is wrong, not the backend")
        # what is multiplied: neither exponents nor what is normalized first
        normalized = ("q", "k") if case.options.get("use_qk_l2norm_in_kernel") else ()
        factors = [
            x for name, x in case.tensors.items() if name not in ("g", "beta", *SHARED[:2], *normalized)
        ]
        factors = [x for x in (*factors, *case.douts.values()) if x.numel()]
        largest = max((x.abs().max().item() for x in factors), default=0.0)
        spreads = {
            name: Spread(y, _parts(case, name, y), absolute(_dtype(case, name), largest, case.terms))
            for name, y in exact.items()
        }
        rounded = case.dtype if case.op.startswith("gated_delta_rule") else None
        self.reference = Reference(case.op, case.name, case.dtype, exact, spreads, case.terms, rounded)
        self.add_sample()

    def add_sample(self) -> bool:
        """Adds the next sample of the baseline; returns whether there was one."""
        sample = next(self.samples, None)
        if sample is None:
            return False
        for name, spread in self.reference.spreads.items():
            spread.add([sample[name]])
        return True

    def require(self, what: str, results: Tensors) -> float:
        """Returns the largest error over what is allowed. Raises Failure where one is above."""
        names = []
        for name, exact in self.reference.judge.items():
            if name not in results:
                raise Failure(f"{what}: no {name}")
            y = results[name]
            if exact.numel() == 0 or exact.abs().max() > torch.finfo(y.dtype).max / 2:
                continue
            if what in ("alone", "cut") and name[1:] in SHARED and y.dtype.itemsize < 4:
                continue  # autograd adds up the parts' gradients in the parameter's dtype
            if not y.isfinite().all():
                raise Failure(f"{what}: {name} is not finite")
            names.append(name)
        while True:
            verdicts = self.reference.verdicts("the backend", results, names)
            ratios = {verdict: self.ratio(what, verdict) for verdict in verdicts}
            if all(ratio <= 1.0 for ratio in ratios.values()) or not self.add_sample():
                break
        ratios = {verdict: x for verdict, x in ratios.items() if self.reference.spreads[verdict.tensor].count}
        for verdict, ratio in ratios.items():
            if not ratio <= 1.0:
                raise Failure(f"{what}: {str(verdict).removeprefix('the backend ')}")
        return max(ratios.values(), default=0.0)

    def ratio(self, what: str, verdict: Verdict) -> float:
        """Returns the largest error of one tensor over what is allowed."""
        whole = replace(verdict, part=0.0, element=0.0).ratio
        whole *= FACTOR / chance_factor(self.reference.spreads[verdict.tensor].effective_parts())
        if self.case.op == "linear_cross_entropy" or self.case.dtype == torch.float64:
            return whole
        element = verdict.element if what == "judge" else 0.0
        return max(whole, verdict.part / MANY, element / MANY)


def outcome(case: RandomCase, backend: str, call: Call | None = None) -> dict[str, Tensor]:
    """Returns the outputs, and the gradients of the wanted tensors, of the public operation or of `call`."""
    leaves = {
        name: x.detach().to(case.device).requires_grad_(name in case.wanted)
        for name, x in case.tensors.items()
    }
    with torch.set_grad_enabled(bool(case.wanted)):
        outputs = (call or run)(case, leaves, backend)
    _require_forms(case, outputs)
    results = _with_gradients(case, leaves, outputs)
    _require_forms(case, results)
    return {name: y.cpu() for name, y in results.items()}


def judge(case: RandomCase) -> dict[str, Tensor]:
    """Returns the same in float64, by formulas that share nothing with a backend."""
    return _formula(_double(case), dense.substitution if case.op.startswith("gated_delta_rule") else None)


def samples(case: RandomCase) -> Iterator[dict[str, Tensor]]:
    """Yields results of plain PyTorch at the case's precision, rounded to the nearest and then at random."""
    yield _sample(case, rule.CHUNKS.index(CHUNK), None)
    noise = _noise(0)
    for n in range(SAMPLES):
        noise.generator.manual_seed(n)
        yield _sample(case, n, noise)
        if n == 3 and case.dtype == torch.float32 and case.op == "gated_delta_rule":
            yield _literal(case)


def _literal(case: RandomCase) -> dict[str, Tensor]:
    do, dstate = case.douts.get("o"), case.douts.get("final_state")
    o, final_state, gradients = rule.literal(case.tensors, case.options, do, dstate)
    results = {"o": o, "final_state": final_state} if case.options["output_final_state"] else {"o": o}
    return results | {f"d{name}": getattr(gradients, name) for name in case.wanted}


def _sample(case: RandomCase, n: int, noise: Noise | None) -> dict[str, Tensor]:
    rounding = None if noise is None else Rounding(case.dtype, noise)
    if not case.op.startswith("gated_delta_rule"):
        return _formula(case, rounding=rounding)
    form = partial(dense.chunkwise, chunk=rule.CHUNKS[n % len(rule.CHUNKS)], noise=noise)
    return _formula(case, form, rounding)


@cache
def _noise(seed: int) -> Noise:
    return Noise(seed)


def run(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
    """Calls the public operation."""
    options = dict(case.options, backend=backend)
    if case.op == "gated_delta_rule":
        o, final_state = gated_delta_rule(**x, **options)  # type: ignore[arg-type]
        return {"o": o} if final_state is None else {"o": o, "final_state": final_state}
    if case.op == "gated_delta_rule_step":
        return dict(zip(("o", "state"), gated_delta_rule_step(**x, **options), strict=True))  # type: ignore[arg-type]
    if case.op == "delta_residual":
        return {"out": delta_residual(**x, **options)}  # type: ignore[arg-type]
    if case.op == "add_rms_norm":
        return dict(zip(("y", "total"), layers.add_rms_norm(**x, **options), strict=True))  # type: ignore[arg-type]
    if case.op == "linear_cross_entropy":
        return {"loss": layers.linear_cross_entropy(**x, **options)}  # type: ignore[arg-type]
    if case.op == "gated_rms_norm":
        return {"y": layers.gated_rms_norm(**{"gate": None, **x}, **options)}  # type: ignore[arg-type]
    return {"y": layers.short_convolution(**x, **options)}  # type: ignore[arg-type]


def _formula(
    case: RandomCase, form: dense.Form | None = None, rounding: Rounding | None = None
) -> dict[str, Tensor]:
    """Returns outputs and the wanted gradients by a formula; `form` is the rule's."""
    if form is not None:
        leaves = {name: x.detach().requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
        return _with_gradients(case, leaves, _rule(case, leaves, form, rounding))
    if case.layer is not None:
        douts = {f"d{name}": x for name, x in _all_douts(case).items()}
        results = layer_cases.outcome(case.layer, {**case.tensors, **douts}, None, rounding)
    else:
        dout = case.douts.get("out", torch.zeros_like(case.tensors["x"]))
        options = () if rounding is None else (rounding,)
        results = residual_cases.formula({**case.tensors, "dout": dout}, case.options["k_eps"], *options)
    gradients = {f"d{name}" for name in case.tensors} - {f"d{name}" for name in case.wanted}
    return {name: x for name, x in results.items() if name not in gradients}


def _rule(case: RandomCase, x: Tensors, form: dense.Form, rounding: Rounding | None) -> dict[str, Tensor]:
    """Returns o and final_state or state, in the dtypes of the operation."""
    step = case.op == "gated_delta_rule_step"
    if step:
        shared = ("A_log", "dt_bias", "state")
        x = {n: y if n in shared else y[:, None] for n, y in x.items()}
        x["initial_state"] = x.pop("state")
    y = dense.gated_delta_rule(x, case.options, form, None if rounding is None else rounding.noise)
    o, state = y["o"].to(case.dtype), y["final_state"]
    if step:
        return {"o": o[:, 0], "state": state}
    return {"o": o, "final_state": state} if case.options["output_final_state"] else {"o": o}


def _with_gradients(case: RandomCase, leaves: Tensors, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    results = {name: y.detach() for name, y in outputs.items()}
    pairs = [(outputs[name], dy) for name, dy in case.douts.items() if name in outputs]
    pairs = [(y, dy.to(y)) for y, dy in pairs if y.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))  # type: ignore[arg-type]
    for name, x in leaves.items():
        if name in case.wanted:
            results[f"d{name}"] = torch.zeros_like(x) if x.grad is None else x.grad
        elif x.grad is not None:
            raise Failure(f"{name} requires no gradient and got one")
    return results


def _all_douts(case: RandomCase) -> dict[str, Tensor]:
    """Returns a gradient for each output of a layer's operation, zeros where none is in the loss."""
    names = {"add_rms_norm": ("y", "total"), "linear_cross_entropy": ("loss",)}.get(case.op, ("y",))
    like = {"loss": torch.zeros((), dtype=torch.promote_types(case.dtype, torch.float32))}
    x = next(iter(case.tensors.values()))
    return {name: case.douts.get(name, like.get(name, torch.zeros_like(x))) for name in names}


def _double(case: RandomCase) -> RandomCase:
    return _cast(case, torch.float64)


def _cast(case: RandomCase, dtype: torch.dtype) -> RandomCase:
    """Returns the case with every float in `dtype`."""

    def cast(tensors: Tensors) -> dict[str, Tensor]:
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}

    return replace(case, dtype=dtype, tensors=cast(case.tensors), douts=cast(case.douts))


def _dtype(case: RandomCase, name: str) -> torch.dtype:
    """Returns the dtype that the operation promises for an output or a gradient."""
    if name[1:] in case.tensors and name[0] == "d":
        return case.tensors[name[1:]].dtype
    full = name in ("final_state", "state", "loss")
    return torch.promote_types(case.dtype, torch.float32) if full else case.dtype


def _require_forms(case: RandomCase, results: Tensors) -> None:
    """Raises Failure unless shapes and dtypes are those that the operation promises."""
    x = case.tensors
    for name, y in results.items():
        if name in ("final_state", "state"):
            q, v = x["q"], x["v"]
            n = len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else q.shape[0]
            shape = (n, v.shape[-2], q.shape[-1], v.shape[-1])
        elif name == "loss":
            shape = ()
        elif name[0] == "d" and name[1:] in x:
            shape = x[name[1:]].shape
        else:
            shape = x["v" if case.op.startswith("gated_delta_rule") else "x"].shape
        if (y.dtype, tuple(y.shape)) != (_dtype(case, name), tuple(shape)):
            expected = f"{_dtype(case, name)} {list(shape)}"
            raise Failure(f"{name} is {y.dtype} {list(y.shape)}, expected {expected}")


def _parts(case: RandomCase, name: str, exact: Tensor) -> Tensor | None:
    """Returns the number of the sequence and head, or of the row, of each index of a tensor's first axes."""
    source = name[1:] if name[0] == "d" and name[1:] in case.tensors else name
    if source in SHARED or exact.dim() < 2 or exact.numel() == 0:
        return torch.arange(len(exact)) if source in ("A_log", "dt_bias") else None
    if not case.op.startswith("gated_delta_rule"):
        return torch.arange(len(exact))
    bounds = case.tensors.get("cu_seqlens")
    heads, state = exact.shape[1], source in ("initial_state", "final_state", "state")
    if state or case.op == "gated_delta_rule_step":
        sequence = torch.arange(len(exact))
    elif bounds is None:
        sequence, heads = torch.arange(len(exact))[:, None].expand(exact.shape[:2]), exact.shape[2]
    else:
        lengths, heads = bounds.diff(), exact.shape[2]
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    return sequence[..., None] * heads + torch.arange(heads)


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
    others = tuple(names if len(case.wanted) < len(names) else names[::2])
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
                y.mul_(0.5 if name in ("g", "beta") else -0.5)[place] = x[place]
                changed[name] = y
        return changed

    other = outcome(replace(case, tensors=change(case.tensors), douts=change(case.douts)), backend)
    places = {name: mine(name) for name in results}
    expected = {name: results[name][place] for name, place in places.items() if place is not None}
    return _require_same_bits("rows", {name: other[name][places[name]] for name in expected}, expected)


def _alone(case: RandomCase, backend: str, results: Tensors, criterion: Criterion) -> float:
    """Computes each sequence by itself; of many, the two halves of the packing."""
    bounds = _packed(case)
    if bounds is None:
        return 0.0
    cuts = list(range(len(bounds))) if len(bounds) <= 8 else [0, len(bounds) // 2, len(bounds) - 1]

    def call(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
        parts = []
        for first, last in itertools.pairwise(cuts):
            tokens, part = slice(bounds[first], bounds[last]), {}
            for name, y in x.items():
                if name == "initial_state":
                    part[name] = y[first:last]
                elif name not in (*SHARED, "cu_seqlens", "position"):
                    part[name] = y[:, tokens]
                elif name in SHARED:
                    part[name] = y
            if last > first + 1 and "cu_seqlens" in x:
                part["cu_seqlens"] = x["cu_seqlens"][first : last + 1] - bounds[first]
            elif last > first + 1:
                part["position"] = x["position"][tokens]
            if case.op == "gated_delta_rule" or tokens.stop > tokens.start:
                parts.append(run(case, part, backend))
        axes = {"final_state": 0}
        return {name: torch.cat([part[name] for part in parts], axes.get(name, 1)) for name in parts[0]}

    alone = outcome(case, backend, call)
    whole_chunks = len(bounds) <= 8 and all(b % CHUNK == 0 for b in bounds[:-1])
    # states of other sizes begin anywhere in a cache line, and BLAS chooses its kernels by that, too
    aligned = case.op == "gated_delta_rule" and not any(case.tensors[x].shape[-1] % 4 for x in ("k", "v"))
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
    at = 1 + zlib.crc32(case.name.encode()) % (T - 1)
    first, rest = slice(0, at), slice(at, T)

    def call(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
        if case.op == "gated_delta_rule":
            one = run(case, _part(x, first), backend)
            two = run(case, _part(x, rest) | {"initial_state": one["final_state"]}, backend)
            return {"o": torch.cat([one["o"], two["o"]], 1), "final_state": two["final_state"]}
        before = x["weight"].shape[1] - 1
        prefix = x.get("prefix", x["x"].new_zeros(x["x"].shape[0], before, x["x"].shape[2]))
        joined = torch.cat([prefix, x["x"]], 1)
        two = {"x": x["x"][:, rest], "weight": x["weight"], "prefix": joined[:, at : at + before]}
        ys = [run(case, part, backend)["y"] for part in ({**x, "x": x["x"][:, first]}, two)]
        return {"y": torch.cat(ys, 1)}

    return criterion.require("cut", outcome(case, backend, call))


def _steps(case: RandomCase, backend: str, results: Tensors, criterion: Criterion) -> float:
    """Decodes the last tokens one by one, without gradients."""
    T = case.tensors["q"].shape[1]
    if T == 0 or "cu_seqlens" in case.tensors:
        return 0.0
    start = max(0, T - 4)

    def call(case: RandomCase, x: Tensors, backend: str) -> dict[str, Tensor]:
        v, k, outputs = x["v"], x["k"], []
        state = x.get("initial_state")
        if start:
            y = run(case, _part(x, slice(0, start)), backend)
            outputs, state = [y["o"]], y["final_state"]
        elif state is None:
            full = torch.promote_types(case.dtype, torch.float32)
            state = v.new_zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), dtype=full)
        options = {name: y for name, y in case.options.items() if name != "output_final_state"}
        one = replace(case, op="gated_delta_rule_step", options=options)
        for t in range(start, T):
            token = {n: y if n in SHARED else y[:, t] for n, y in x.items() if n != "initial_state"}
            y = run(one, {**token, "state": state}, backend)
            outputs, state = [*outputs, y["o"][:, None]], y["state"]
        return {"o": torch.cat(outputs, 1), "final_state": state}

    return criterion.require("steps", outcome(case, backend, call))


def _part(x: Tensors, tokens: slice) -> dict[str, Tensor]:
    return {name: y if name in (*SHARED, "initial_state") else y[:, tokens] for name, y in x.items()}


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
