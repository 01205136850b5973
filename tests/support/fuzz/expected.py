"""Computes what a random case is held against: the judge in float64, and samples of the baseline.

Both are formulas that share nothing with a backend: `dense` and `baseline` for the rule, those of parity's
cases for the rest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from delta_trn.backends.parity import dense, layer_cases, mixer_cases, residual_cases, rule
from delta_trn.backends.parity.baseline import Noise, Rounding
from delta_trn.backends.parity.mixer_cases import MixerCase
from tests.support.fuzz.cases import RandomCase

Tensors = Mapping[str, Tensor]
SHARED = ("A_log", "dt_bias", "weight", "gain")  # all rows have these in common
CHUNK, SAMPLES = 64, 12


class Failure(AssertionError):
    """A property does not hold; the message says which, and by how much."""


def judge(case: RandomCase) -> dict[str, Tensor]:
    """Returns the outputs and the wanted gradients in float64."""
    return _formula(_double(case), dense.substitution, Rounding(torch.float64))


def samples(case: RandomCase) -> Iterator[dict[str, Tensor]]:
    """Yields results of plain PyTorch at the case's precision, rounded to the nearest and then at random."""
    yield sample(case, rule.CHUNKS.index(CHUNK), None)
    noise = Noise(0)
    for n in range(SAMPLES):
        noise.generator.manual_seed(n)
        yield sample(case, n, noise)
        if n == 3 and case.dtype == torch.float32 and case.op == "gated_delta_rule":
            yield _literal(case)


def _literal(case: RandomCase) -> dict[str, Tensor]:
    do, dstate = case.douts.get("o"), case.douts.get("final_state")
    o, final_state, gradients = rule.literal(case.tensors, case.options, do, dstate)
    results = {"o": o, "final_state": final_state} if case.options["output_final_state"] else {"o": o}
    return results | {f"d{name}": getattr(gradients, name) for name in case.wanted}


def sample(case: RandomCase, n: int, noise: Noise | None) -> dict[str, Tensor]:
    """Returns sample n; without noise rounded to the nearest."""
    form = partial(dense.chunkwise, chunk=rule.CHUNKS[n % len(rule.CHUNKS)], noise=noise)
    return _formula(case, form, Rounding(case.dtype, noise))


def _formula(case: RandomCase, form: dense.Form, rounding: Rounding) -> dict[str, Tensor]:
    """Returns outputs and the wanted gradients by a formula; `form` is the rule's."""
    if case.op.startswith("gated_delta_rule") or isinstance(case.layer, MixerCase):
        leaves = {name: x.detach().requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
        if isinstance(case.layer, MixerCase):
            outputs = mixer_cases.formula(case.layer, leaves, form, rounding)
        else:
            outputs = _rule(case, leaves, form, rounding)
        return with_gradients(case, leaves, outputs)
    if case.layer is not None:
        douts = {f"d{name}": x for name, x in case.douts.items()}
        results = layer_cases.outcome(case.layer, {**case.tensors, **douts}, None, rounding)
    else:
        x = {**case.tensors, "dout": case.douts["out"]}
        results = residual_cases.formula(x, case.options["k_eps"], rounding)
    gradients = {f"d{name}" for name in case.tensors} - {f"d{name}" for name in case.wanted}
    return {name: x for name, x in results.items() if name not in gradients}


def _rule(case: RandomCase, x: Tensors, form: dense.Form, rounding: Rounding) -> dict[str, Tensor]:
    """Returns o and final_state or state, in the dtypes of the operation."""
    step = case.op == "gated_delta_rule_step"
    if step:
        shared = ("A_log", "dt_bias", "state")
        x = {n: y if n in shared else y[:, None] for n, y in x.items()}
        x["initial_state"] = x.pop("state")
    y = dense.gated_delta_rule(x, case.options, form, rounding.noise)
    o, state = y["o"].to(case.dtype), y["final_state"]
    if step:
        return {"o": o[:, 0], "state": state}
    return {"o": o, "final_state": state} if case.options["output_final_state"] else {"o": o}


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


def _double(case: RandomCase) -> RandomCase:
    """Returns the case with every float in float64."""

    def cast(tensors: Tensors) -> dict[str, Tensor]:
        return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}

    return replace(case, dtype=torch.float64, tensors=cast(case.tensors), douts=cast(case.douts))


def split(case: RandomCase, results: Tensors) -> dict[str, Tensor]:
    """Returns results with those of a layer's convolution as three tensors: q, k and v differ in size."""
    if not isinstance(case.layer, MixerCase):
        return dict(results)
    return {
        key: x for name, y in results.items() for key, x in mixer_cases.split(case.layer, name, y).items()
    }


def dtype_of(case: RandomCase, name: str) -> torch.dtype:
    """Returns the dtype that the operation promises for an output or a gradient."""
    tensor = name[1:] if name[1:] in case.tensors else name[1:].rpartition("_")[0]  # of dx_q: x
    if name[0] == "d" and tensor in case.tensors:
        return case.tensors[tensor].dtype
    full = name in ("final_state", "state", "loss")
    return torch.promote_types(case.dtype, torch.float32) if full else case.dtype


def parts(case: RandomCase, name: str, exact: Tensor) -> Tensor | None:
    """Returns the number of the sequence and head, or of the row, of each index of a tensor's first axes."""
    if isinstance(case.layer, MixerCase):
        return mixer_cases.parts(case.layer, name) if exact.numel() else None
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
