"""Checks one random case on one backend: the judge, and the property that the case names.

    judge       every output and gradient is within the criterion, finite, of the right shape and dtype
    again       twice is the same bits
    alone       a packed sequence is what it is by itself: within the criterion, and bit for bit on `chunked`
                where every sequence starts on a chunk boundary and heads have multiples of 4 elements
    rows        a sequence does not depend on what the others hold, bit for bit
    cut         the sequence cut in two, with the state handed over, is within the criterion of the whole
    steps       so are the last tokens decoded one by one
    wanted      a gradient is the same bits whichever others are wanted; the others are None

The baseline's error is measured on several samples, of which the largest counts: one may be small by
chance. The later samples are computed only for a case that the first does not explain.

Two things that no arithmetic of the dtype can avoid are allowed besides: half the distance of the dtype's
smallest numbers, and products that underflow in float32. A tensor of which the judge's values exceed half
the dtype's range is not judged.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from delta_trn.backends import layers
from delta_trn.backends.delta_residual import delta_residual
from delta_trn.backends.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from delta_trn.backends.parity import baseline, dense, layer_cases, residual_cases
from delta_trn.backends.parity.judge import FACTOR, error
from delta_trn.backends.parity.random_cases import RandomCase

Tensors = Mapping[str, Tensor]
Call = Callable[[RandomCase, Tensors, str], dict[str, Tensor]]
SHARED = ("A_log", "dt_bias", "weight")  # all rows have these in common
CHUNK = 64


class Failure(AssertionError):
    """A property does not hold; the message says which, and by how much."""


def check(case: RandomCase, backend: str) -> float:
    """Returns the largest error over what is allowed. Raises Failure, or whatever the backend raises."""
    results = outcome(case, backend)
    _require_forms(case, results)
    exact = judge(case)
    worst = _require_within(case, exact, results, "judge")
    property_ = _PROPERTIES.get(case.check)
    return max(worst, property_(case, backend, results, exact) if property_ else 0.0)


def outcome(case: RandomCase, backend: str, call: Call | None = None) -> dict[str, Tensor]:
    """Returns the outputs, and the gradients of the wanted tensors, of the public operation or of `call`."""
    leaves = {name: x.detach().requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
    with torch.set_grad_enabled(bool(case.wanted)):
        outputs = (call or run)(case, leaves, backend)
    return _with_gradients(case, leaves, outputs)


def judge(case: RandomCase) -> dict[str, Tensor]:
    """Returns the same in float64, by formulas that share nothing with a backend."""
    return _formula(_double(case), dense.substitution)


def samples(case: RandomCase) -> Iterator[dict[str, Tensor]]:
    """Yields results of plain PyTorch at the case's precision, which differ in the order of their sums."""
    if not case.op.startswith("gated_delta_rule"):
        yield _formula(case)
        return
    # float64 is what float32 is, with another unit of rounding
    case = _cast(case, torch.float32) if case.dtype == torch.float64 else case
    yield _formula(case, _chunkwise)
    if case.dtype == torch.float32 and case.op == "gated_delta_rule":
        yield outcome(case, "recurrent")


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


def _formula(case: RandomCase, form: dense.Form | None = None) -> dict[str, Tensor]:
    """Returns outputs and all gradients by a formula; `form` is the rule's."""
    if case.layer is not None:
        douts = {f"d{name}": x for name, x in _all_douts(case).items()}
        results = layer_cases.outcome(case.layer, {**case.tensors, **douts}, None)
    elif case.op == "delta_residual":
        dout = case.douts.get("out", torch.zeros_like(case.tensors["x"]))
        results = residual_cases.formula({**case.tensors, "dout": dout}, case.options["k_eps"])
    else:
        assert form is not None
        leaves = {name: x.detach().requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
        outputs = _rule(case, leaves, form)
        return _with_gradients(case, leaves, {name: outputs[name] for name in outputs})
    names = {*results} - {f"d{name}" for name in case.tensors} | {f"d{name}" for name in case.wanted}
    return {name: x for name, x in results.items() if name in names}


def _rule(case: RandomCase, x: Tensors, form: dense.Form) -> dict[str, Tensor]:
    """Returns o and final_state or state, in the dtypes of the operation."""
    step = case.op == "gated_delta_rule_step"
    if step:
        shared = ("A_log", "dt_bias", "state")
        x = {n: y if n in shared else y[:, None] for n, y in x.items()}
        x["initial_state"] = x.pop("state")
    y = dense.gated_delta_rule(x, case.options, form)
    o, state = y["o"].to(case.dtype), y["final_state"]
    if step:
        return {"o": o[:, 0], "state": state}
    return {"o": o, "final_state": state} if case.options["output_final_state"] else {"o": o}


def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, scale: float, l2norm: bool
) -> tuple[Tensor, Tensor]:
    """Computes by the baseline."""
    return baseline.gated_delta_rule(q, k, v, g, beta, S, None, scale, l2norm)


def _with_gradients(case: RandomCase, leaves: Tensors, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    results = {name: y.detach() for name, y in outputs.items()}
    pairs = [(outputs[name], dy) for name, dy in case.douts.items() if name in outputs]
    pairs = [(y, dy.to(y.dtype)) for y, dy in pairs if y.requires_grad]
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


def _require_forms(case: RandomCase, results: Tensors) -> None:
    """Raises Failure unless shapes and dtypes are those that the operation promises."""
    full = torch.promote_types(case.dtype, torch.float32)
    x = case.tensors
    like = "v" if case.op.startswith("gated_delta_rule") else "x"
    for name, y in results.items():
        dtype, shape = case.dtype, None
        if name in ("final_state", "state"):
            q, v = x["q"], x["v"]
            n = len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else q.shape[0]
            dtype, shape = full, (n, v.shape[-2], q.shape[-1], v.shape[-1])
        elif name == "loss":
            dtype, shape = full, ()
        elif name.startswith("d") and name[1:] in x:
            dtype, shape = x[name[1:]].dtype, x[name[1:]].shape
        else:
            shape = x[like].shape
        if (y.dtype, tuple(y.shape)) != (dtype, tuple(shape)):
            raise Failure(f"{name} is {y.dtype} {list(y.shape)}, expected {dtype} {list(shape)}")


def _require_within(case: RandomCase, exact: Tensors, results: Tensors, what: str) -> float:
    """Returns the largest error over what is allowed. Raises Failure where one is above."""
    open_: dict[str, Tensor] = {}
    for name, right in exact.items():
        if name not in results:
            raise Failure(f"{what}: no {name}")
        y = results[name]
        if not right.isfinite().all():
            raise Failure(f"{name} of the judge is not finite: the case is wrong, not the backend")
        if right.numel() == 0 or right.abs().max() > torch.finfo(y.dtype).max / 2:
            continue
        if not y.isfinite().all():
            raise Failure(f"{what}: {name} is not finite")
        open_[name] = y
    errors = {name: error(y, exact[name]) for name, y in open_.items()}
    allowed = {name: _least(case, y, exact[name]) for name, y in open_.items()}
    # the judge in float64 is as inexact as what it judges
    unit = 2.0**-28 if case.dtype == torch.float64 and case.op.startswith("gated_delta_rule") else 1.0
    for sample in samples(case):
        for name in open_:
            base = FACTOR * unit * error(sample[name], exact[name])
            if exact[name].any() and math.isfinite(base):
                allowed[name] = max(allowed[name], base)
        if all(errors[name] <= allowed[name] for name in open_):
            break
    for name in open_:
        if not errors[name] <= allowed[name]:
            raise Failure(f"{what}: {name} has error {errors[name]:.3g}, allowed {allowed[name]:.3g}")
    return max((errors[name] / allowed[name] for name in open_ if allowed[name]), default=0.0)


def _least(case: RandomCase, y: Tensor, exact: Tensor) -> float:
    """Returns the error below which no implementation can be sure to stay: roundings, and underflow."""
    size = exact.square().mean().sqrt().item()
    if size == 0.0:
        return 0.0
    full = torch.promote_types(case.dtype, torch.float32)
    rounding = math.sqrt(case.terms) * torch.finfo(full).eps / 2
    if case.dtype != full:
        rounding += torch.finfo(case.dtype).eps / 2
    # no product has g as a factor, and the -3.4e38 of a reset would hide any error
    factors = [x for name, x in case.tensors.items() if name != "g"]
    finite = (x[x.isfinite()].abs().double() for x in (*factors, *case.douts.values()))
    largest = max([1.0, *(x.max().item() for x in finite if x.numel())])
    # a f16 subnormal is rounded to a multiple of 2^-24
    underflow = torch.finfo(full).tiny * largest * case.terms
    subnormal = torch.finfo(y.dtype).tiny * torch.finfo(y.dtype).eps / 2
    return rounding + (underflow + subnormal) / size


def _require_same_bits(what: str, results: Tensors, expected: Tensors) -> float:
    for name, y in expected.items():
        if not torch.equal(results[name], y):
            unequal = (results[name] != y).sum().item()
            raise Failure(f"{what}: {unequal} of {y.numel()} elements of {name} are other bits")
    return 0.0


def _again(case: RandomCase, backend: str, results: Tensors, exact: Tensors) -> float:
    return _require_same_bits("again", outcome(case, backend), results)


def _wanted(case: RandomCase, backend: str, results: Tensors, exact: Tensors) -> float:
    """Wants all gradients, or where all were wanted every other one."""
    names = case.floats()
    others = tuple(names if len(case.wanted) < len(names) else names[::2])
    every = outcome(replace(case, wanted=others), backend) if others else results
    return _require_same_bits("wanted", every, {name: y for name, y in results.items() if name in every})


def _rows(case: RandomCase, backend: str, results: Tensors, exact: Tensors) -> float:
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


def _alone(case: RandomCase, backend: str, results: Tensors, exact: Tensors) -> float:
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
    return _require_within(case, exact, alone, "alone")


def _cut(case: RandomCase, backend: str, results: Tensors, exact: Tensors) -> float:
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

    return _require_within(case, exact, outcome(case, backend, call), "cut")


def _steps(case: RandomCase, backend: str, results: Tensors, exact: Tensors) -> float:
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
        for t in range(start, T):
            token = {n: y if n in SHARED else y[:, t] for n, y in x.items() if n != "initial_state"}
            o, state = gated_delta_rule_step(**token, state=state, backend=backend, **options)  # type: ignore
            outputs.append(o[:, None])
        return {"o": torch.cat(outputs, 1), "final_state": state}

    return _require_within(case, exact, outcome(case, backend, call), "steps")


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


_PROPERTIES: Mapping[str, Callable[[RandomCase, str, Tensors, Tensors], float]] = {
    "again": _again,
    "wanted": _wanted,
    "rows": _rows,
    "alone": _alone,
    "cut": _cut,
    "steps": _steps,
}
