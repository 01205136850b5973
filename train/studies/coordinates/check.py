"""The coordinate check: how what a model computes, and its first changes, scale with width.

Under muP nothing that another layer reads grows or vanishes with width, neither at initialization nor in what
a few steps change (`theory.py`). The size of a tensor is the root mean square of its entries. Its change is
that of the difference to its value for the same tokens before training. A slope is the power of width with
which either grows. Beside the root mean square stands the 99% quantile of |entries|, which is not judged: it
shows whether what holds for the typical entry holds for the largest, too.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from delta_trn.models.residual import DeepDelta, LatentUpdate
from delta_trn.train.data import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.run.optimizer import learning_rate, make_optimizer
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.coordinates.theory import theory_of
from delta_trn.train.studies.fits import Line, line
from delta_trn.train.studies.probes.hooks import ModelView, normalized, observed, rms

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

TOLERANCE = 0.1  # how far a slope may be from theory, beside twice its standard error


@dataclass(frozen=True)
class Reading:
    """Root mean squares at one width: of a tensor, and of its change since step 0 (then 0).

    size_99, change_99  99% quantiles of the absolute values; NaN if not measured
    """

    parametrization: str
    optimizer: str
    width: int
    seed: int
    step: int
    tensor: str
    size: float
    change: float
    size_99: float = math.nan
    change_99: float = math.nan


@dataclass(frozen=True)
class Slope:
    """The power of width with which a tensor's `quantity` grows, and the verdict.

    quantity    "size" or "change"; "change_99", the 99% quantile of a change, always passes
    """

    parametrization: str
    optimizer: str
    tensor: str
    quantity: str
    step: int
    slope: float
    stderr: float
    expected: tuple[float, float]
    passes: bool


def readings(
    config: RunConfig,
    *,
    widths: Sequence[int],
    steps: int,
    seeds: Sequence[int],
    batches: Callable[[int], Iterator[Batch]],
    scheduled: bool = False,
) -> Iterator[Reading]:
    """Trains `steps` at every width, and reads every tensor before and after each step.

    config      a configuration without `auto`: its model, parametrization, optimizer and learning rate count
    batches     seed -> the batches to train on, the same at every width. The first is looked at. One batch
                over and over is best for few steps: tokens that were not trained on share less with those
                that were, the wider the model
    scheduled   whether the rate follows the configuration's schedule; then only steps 1, 2, 4, ... and the
                last are read
    """
    for width in widths:
        for seed in seeds:
            model = config.model.model_copy(update={"width": width})
            own = config.model_copy(update={"model": model, "seed": seed})
            yield from _train(own, steps, batches(seed), scheduled)


def _train(config: RunConfig, steps: int, batches: Iterator[Batch], scheduled: bool) -> Iterator[Reading]:
    batch = next(batches)
    device = torch.device(config.device)
    rows = config.model.vocab_size
    assert rows is not None, "the data set it"
    model = make_model(model_config(config, rows=rows), seed=config.seed, device=device)
    sharding = Sharding(model)
    step = TrainingStep(
        loss_function(model, config, device),
        make_optimizer(sharding, config),
        sharding,
        micro=len(batch.inputs),
        clip=config.optimizer.clip,
    )
    first: dict[int, Tensor] = {}
    looked_at = batch.inputs.to(device), batch.targets.to(device)
    before = tensors(model, *looked_at, first)
    for number in range(steps + 1):
        if number:
            trained = batch if number == 1 else next(batches)
            step(trained, learning_rate(config, number - 1) if scheduled else config.optimizer.lr)
        if scheduled and number & (number - 1) and number < steps:
            continue  # neither a power of 2 nor the last
        now = tensors(model, *looked_at, first) if number else before
        for name, parts in now.items():
            moved = [a - b for a, b in zip(parts, before[name], strict=True)]
            yield Reading(
                config.parametrization,
                config.optimizer.name,
                config.model.width,
                config.seed,
                number,
                name,
                joint_rms(parts),
                joint_rms(moved),
                joint_quantile(parts),
                joint_quantile(moved),
            )


@torch.no_grad()
def tensors(
    model: DeltaForCausalLM, tokens: Tensor, targets: Tensor, inputs: dict[int, Tensor]
) -> dict[str, list[Tensor]]:
    """Reads the tensors of TENSORS that the model has, one per layer.

    tokens, targets   [B, T] int64, the tokens to look at and those that follow them
    inputs            layer -> the input of its token mixer before training; filled on the first call
    """
    training = model.training
    model.eval()
    with observed(model) as views, _writes(model) as writes:
        logits = model(tokens, use_cache=False).logits
    model.train(training)
    following = logits.gather(-1, targets[..., None])
    ends = {"hidden": [views[0].stream[-1]], "logits": [logits], "logit_next": [following]}
    ends["mlp"] = views[0].mlps
    for i, view in views[0].mixers.items():
        inputs.setdefault(i, view.x)
    return {**ends, **mixer_tensors(views[0], inputs), **writes}


@contextlib.contextmanager
def _writes(model: DeltaForCausalLM) -> Iterator[dict[str, list[Tensor]]]:
    """Within `with`, a forward pass appends to the mapping what Deep Delta Learning's writes compute."""
    values: dict[str, list[Tensor]] = defaultdict(list)
    root = math.sqrt(model.config.width_ratio)

    def see(module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        X, k, v, beta = module.operands(*inputs)
        k = k * (k.square().sum(-1, keepdim=True) + module.k_eps**2).rsqrt()
        values["write_beta"].append(beta)
        values["write_value"].append(v / root)
        values["write_along"].append(torch.einsum("...d,...dv->...v", k, X) / root)
        values["written"].append(out - inputs[0])

    writes = (w for w in model.modules() if isinstance(w, (DeepDelta, LatentUpdate)))
    handles = [write.register_forward_hook(see) for write in writes]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def mixer_tensors(view: ModelView, inputs: Mapping[int, Tensor]) -> dict[str, list[Tensor]]:
    """Reads the tensors of the token mixers."""
    values: dict[str, list[Tensor]] = defaultdict(list)
    for i, mixer in view.mixers.items():
        layer = mixer.mixer
        q, k, v = mixer.split()
        za, zb = mixer.gate_inputs()
        g, beta = mixer.gates()
        root = math.sqrt(layer.K)
        of_layer = {
            "q": q,
            "k": k,
            "v": v,
            "q_unit": normalized(q) * root,
            "k_unit": normalized(k) * root,
            "gate_decay": za,
            "gate_beta": zb,
            "alpha": g.exp(),
            "beta": beta,
            "state": mixer.state() * root,
            "o": mixer.o / layer.scale,
            "o_norm": layer.o_norm(mixer.o),
            "mixer": mixer.out,
            "own_q": layer.q_proj(inputs[i]),
            "own_k": layer.k_proj(inputs[i]),
            "own_v": layer.v_proj(inputs[i]),
            "own_decay": layer.a_proj(inputs[i]),
            "own_beta": layer.b_proj(inputs[i]),
            # copies: the optimizer writes where the parameter is
            "dt_bias": layer.dt_bias.clone(),
            "A_log": layer.A_log.clone(),
        }
        for name, value in of_layer.items():
            values[name].append(value)
    return values


def joint_rms(parts: Sequence[Tensor]) -> float:
    """Returns the root mean square of tensors that count alike."""
    return math.sqrt(sum(rms(part) ** 2 for part in parts) / len(parts))


def joint_quantile(parts: Sequence[Tensor], share: float = 0.99) -> float:
    """Returns what a share of the absolute values of all entries does not exceed."""
    values = torch.cat([part.detach().flatten() for part in parts]).abs()
    return float(values.kthvalue(max(math.ceil(share * values.numel()), 1)).values)


def slopes(readings: Sequence[Reading]) -> list[Slope]:
    """Fits every parametrization, optimizer, tensor, quantity and step, over widths and seeds.

    Changes are judged from step 1 on. A tensor that is exactly 0 everywhere, before a readout or a mixer that
    starts at 0 has learned, is not judged; a change that is still 0 after the last step fails. A slope's
    error comes from the scatter of all widths and seeds about the line.
    """
    groups: dict[tuple[str, str, str, str, int], list[tuple[int, float]]] = defaultdict(list)
    for r in readings:
        groups[r.parametrization, r.optimizer, r.tensor, "size", r.step].append((r.width, r.size))
        if r.step:
            groups[r.parametrization, r.optimizer, r.tensor, "change", r.step].append((r.width, r.change))
            if not math.isnan(r.change_99):
                tails = groups[r.parametrization, r.optimizer, r.tensor, "change_99", r.step]
                tails.append((r.width, r.change_99))
    last = max((r.step for r in readings), default=0)
    return [
        _slope(*group, points)
        for group, points in groups.items()
        if group[-1] == last or any(y for _, y in points)
    ]


def _slope(
    parametrization: str,
    optimizer: str,
    tensor: str,
    quantity: str,
    step: int,
    points: Sequence[tuple[int, float]],
) -> Slope:
    theory = theory_of(tensor)
    low, high = theory.size if quantity == "size" else theory.change
    if quantity == "size" and step:
        # what training has added counts too, and may be as large as the rest
        low, high = min(low, theory.change[0]), max(high, theory.change[1])
    if all(0 < y < math.inf for _, y in points):
        fit = line([math.log2(x) for x, _ in points], [math.log2(y) for _, y in points])
    else:
        fit = Line(math.nan, math.nan)
    reach = TOLERANCE + 2 * fit.stderr
    passes = quantity == "change_99" or low - reach <= fit.slope <= high + reach
    return Slope(
        parametrization, optimizer, tensor, quantity, step, fit.slope, fit.stderr, (low, high), passes
    )


@dataclass(frozen=True)
class Verdict:
    """One tensor: its slopes, and the steps at which a slope departs from theory.

    start           its size before training; None where that is 0
    size, change    after the last step
    tail            of the change's 99% quantile after the last step; None if it was not measured
    """

    parametrization: str
    optimizer: str
    tensor: str
    start: Slope | None
    size: Slope
    change: Slope
    fails_at: tuple[str, ...]
    tail: Slope | None = None

    @property
    def passes(self) -> bool:
        return not self.fails_at


def verdicts(judged: Sequence[Slope]) -> list[Verdict]:
    """Judges every parametrization, optimizer and tensor."""
    groups: dict[tuple[str, str, str], list[Slope]] = defaultdict(list)
    for s in judged:
        groups[s.parametrization, s.optimizer, s.tensor].append(s)
    rows = []
    for key, group in groups.items():
        last = {s.quantity: s for s in sorted(group, key=lambda s: s.step)}
        fails = tuple(f"{s.quantity} at step {s.step}" for s in group if not s.passes)
        start = next((s for s in group if s.step == 0), None)
        rows.append(Verdict(*key, start, last["size"], last["change"], fails, last.get("change_99")))
    return rows
