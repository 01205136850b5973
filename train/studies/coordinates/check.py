"""The coordinate check: how what a model computes, and its first changes, scale with width.

Under muP nothing that another layer reads grows or vanishes with width, neither at initialization nor in what
a few steps change (Tensor Programs V, arXiv:2203.03466, appendix D.1; Gated DeltaNet: arXiv:2606.04048). A
tensor's size is the root mean square of its entries, its change that of the difference to what it was for the
same tokens before training, and a slope the power of width that either grows with.
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
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.run.optimizer import make_optimizer
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.schema import RunConfig
from delta_trn.train.studies.fits import Line, line
from delta_trn.train.studies.probes.hooks import ModelView, normalized, observed, rms

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

TOLERANCE = 0.1
"""How far a slope may be from what theory says, beside twice its standard error."""

CONSTANT = (0.0, 0.0)


@dataclass(frozen=True)
class Tensors:
    """What theory says about one tensor under muP: the powers of width of its size before training and of its
    change lie in these ranges.
    """

    meaning: str
    size: tuple[float, float] = CONSTANT
    change: tuple[float, float] = CONSTANT


# Between two laws: where terms add up (1) and where they average out (1 / sqrt(d)).
_BETWEEN = (-0.5, 0.0)
# q and k have a positive mean after SiLU, so that q.k = Theta(1) instead of Theta(1 / sqrt(K)): S^T q begins
# between the two, and so do the gradients of W_q and W_k, between 1 / d and d^-3/2.
TENSORS: Mapping[str, Tensors] = {
    "hidden": Tensors("residual stream after the last block"),
    "q": Tensors("q after convolution and SiLU, before normalization"),
    "k": Tensors("k after convolution and SiLU, before normalization"),
    "v": Tensors("v after convolution and SiLU"),
    "q_unit": Tensors("q normalized, times sqrt(K)"),
    "k_unit": Tensors("k normalized, times sqrt(K)"),
    "gate_decay": Tensors("W_a x + dt_bias"),
    "gate_beta": Tensors("W_b x"),
    "alpha": Tensors("decay exp(g)"),
    "beta": Tensors("write strength"),
    "state": Tensors("state after the last token, times sqrt(K)"),
    "o": Tensors("S^T q, before its norm", size=_BETWEEN, change=_BETWEEN),
    "o_norm": Tensors("o after its norm, before the gate"),
    "mixer": Tensors("what the token mixer adds to the residual stream"),
    # at a random initialization they average out, 1/m times sqrt(m); what learning adds is aligned and does
    # not, but is a few of a vocabulary's entries: those of the tokens that do come next
    "logits": Tensors("logits of the whole vocabulary", size=_BETWEEN, change=_BETWEEN),
    "logit_next": Tensors("logit of the token that comes next", size=_BETWEEN),
    # a token adds up with itself, and with others as far as they share a mean: one part of either law
    "own_q": Tensors("W_q x0, x0 the input before training", change=_BETWEEN),
    "own_k": Tensors("W_k x0", change=_BETWEEN),
    "own_v": Tensors("W_v x0", change=_BETWEEN),
    "own_decay": Tensors("W_a x0", change=_BETWEEN),
    "own_beta": Tensors("W_b x0", change=_BETWEEN),
    # The paper says constant. Under SGD that takes dL/dalpha = dL/do . S^T q to average out over a head's
    # channels: sqrt(d) terms' worth of d, and sqrt(m) is the rate that makes up for it. At initialization it
    # does (+0.00 +- 0.16 at step 1). But what W_v learns is along -dL/do: from then on the two share a
    # direction and terms add up, by width^(0.26 +- 0.08) after four steps, so that sqrt(m) is too much: +0.4,
    # between sums that average out (0) and sums that add up (1/2). A premise that fails is a check that fails
    "dt_bias": Tensors("the decay's bias"),
    "A_log": Tensors("logarithm of the decay's rate"),
    # Deep Delta Learning's, see `models.residual`: k has norm 1 and v grows like sqrt(m), for which they are
    # divided by it here; what the stream holds along k is one number of d, so a sum of either law
    "write_beta": Tensors("beta of Deep Delta Learning's writes"),
    "write_value": Tensors("v of the writes, over sqrt(m)"),
    "write_along": Tensors("k^T X, over sqrt(m)", size=_BETWEEN, change=_BETWEEN),
    "written": Tensors("what a write adds to the residual stream"),
}


@dataclass(frozen=True)
class Reading:
    """Root mean squares at one width: of a tensor, and of its change since step 0 (0 at step 0)."""

    parametrization: str
    optimizer: str
    width: int
    seed: int
    step: int
    tensor: str
    size: float
    change: float


@dataclass(frozen=True)
class Slope:
    """The power of width that a tensor's `quantity` ("size" or "change") has at a step, and the verdict."""

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
    config: RunConfig, *, widths: Sequence[int], steps: int, seeds: Sequence[int], batch: Batch
) -> Iterator[Reading]:
    """Train `steps` at every width at a constant rate, and read every tensor before and after each step.

    Of a configuration without `auto`: its model, parametrization, optimizer and learning rate. `batch(seed)`
    is the one batch of inputs and targets that is trained on and looked at, the same for every width: tokens
    that were not trained on share the less with those that were, the wider the model.
    """
    for width in widths:
        for seed in seeds:
            yield from _one(_at_width(config, width, seed), steps, *batch(seed))


Batch = Callable[[int], tuple[Tensor, Tensor]]


def _at_width(config: RunConfig, width: int, seed: int) -> RunConfig:
    model = config.model.model_copy(update={"width": width})
    return config.model_copy(update={"model": model, "seed": seed})


def _one(config: RunConfig, steps: int, inputs: Tensor, targets: Tensor) -> Iterator[Reading]:
    device = torch.device(config.device)
    rows = config.model.vocab_size
    assert rows is not None, "the data says it"
    model = make_model(model_config(config, rows=rows), seed=config.seed, device=device)
    sharding = Sharding(model)
    step = TrainingStep(
        loss_function(model, config, device),
        make_optimizer(sharding, config),
        sharding,
        micro=len(inputs),
        clip=config.optimizer.clip,
    )
    seen = inputs.to(device), targets.to(device)
    first: dict[int, Tensor] = {}
    before = tensors(model, *seen, first)
    for at in range(steps + 1):
        if at:
            step(inputs, targets, config.optimizer.lr)
        now = tensors(model, *seen, first) if at else before
        for name, parts in now.items():
            yield Reading(
                config.parametrization,
                config.optimizer.name,
                config.model.width,
                config.seed,
                at,
                name,
                _joint_rms(parts),
                _joint_rms([a - b for a, b in zip(parts, before[name], strict=True)]),
            )


@torch.no_grad()
def tensors(
    model: DeltaForCausalLM, tokens: Tensor, targets: Tensor, inputs: dict[int, Tensor]
) -> dict[str, list[Tensor]]:
    """The tensors of TENSORS that the model has, for these tokens [B, T] and the next ones: one a layer.

    `inputs` holds each token mixer's input before training; where it is empty, it is filled.
    """
    training = model.training
    model.eval()
    with observed(model) as views, _writes(model) as writes:
        logits = model(tokens, use_cache=False).logits
    model.train(training)
    following = logits.gather(-1, targets[..., None])
    ends = {"hidden": [views[0].stream[-1]], "logits": [logits], "logit_next": [following]}
    for i, view in views[0].mixers.items():
        inputs.setdefault(i, view.x)
    return {**ends, **mixer_tensors(views[0], inputs), **writes}


@contextlib.contextmanager
def _writes(model: DeltaForCausalLM) -> Iterator[dict[str, list[Tensor]]]:
    """Within `with`, a forward pass appends to the mapping what Deep Delta Learning's writes compute."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    root = math.sqrt(model.config.width_ratio)

    def see(module: Any, given: tuple[Tensor, ...], out: Tensor) -> None:
        X, k, v, beta = module.operands(*given)
        k = k * (k.square().sum(-1, keepdim=True) + module.k_eps**2).rsqrt()
        found["write_beta"].append(beta)
        found["write_value"].append(v / root)
        found["write_along"].append(torch.einsum("...d,...dv->...v", k, X) / root)
        found["written"].append(out - given[0])

    writes = (w for w in model.modules() if isinstance(w, (DeepDelta, LatentUpdate)))
    handles = [write.register_forward_hook(see) for write in writes]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def mixer_tensors(view: ModelView, inputs: Mapping[int, Tensor]) -> dict[str, list[Tensor]]:
    """Those of the token mixers."""
    found: dict[str, list[Tensor]] = {}
    for i, mixer in view.mixers.items():
        layer = mixer.mixer
        q, k, v = mixer.split()
        za, zb = mixer.gate_inputs()
        g, beta = mixer.gates()
        root = math.sqrt(layer.K)
        values = {
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
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def _joint_rms(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(rms(part) ** 2 for part in parts) / len(parts))


def slopes(found: Sequence[Reading]) -> list[Slope]:
    """For every parametrization, optimizer, tensor, quantity and step, over widths and seeds.

    A change that is exactly 0 has no slope and fails: something that should learn does not. Changes are
    judged from step 1 on. A slope's error comes from the scatter of all widths and seeds about the line.
    """
    groups: dict[tuple[str, str, str, str, int], list[tuple[int, float]]] = {}
    for r in found:
        for quantity, value in (("size", r.size), ("change", r.change)):
            if quantity == "change" and r.step == 0:
                continue
            key = (r.parametrization, r.optimizer, r.tensor, quantity, r.step)
            groups.setdefault(key, []).append((r.width, value))
    judged = []
    for (parametrization, optimizer, tensor, quantity, step), points in groups.items():
        theory = TENSORS[tensor]
        expected = theory.size if quantity == "size" else theory.change
        if quantity == "size" and step:
            # what training has added counts too, and may be as large as the rest
            expected = min(expected[0], theory.change[0]), max(expected[1], theory.change[1])
        if all(0 < y < math.inf for _, y in points):
            fit = line([math.log2(x) for x, _ in points], [math.log2(y) for _, y in points])
        else:
            fit = Line(math.nan, math.nan)
        reach = TOLERANCE + 2 * fit.stderr
        passes = expected[0] - reach <= fit.slope <= expected[1] + reach
        judged.append(
            Slope(parametrization, optimizer, tensor, quantity, step, fit.slope, fit.stderr, expected, passes)
        )
    return judged


@dataclass(frozen=True)
class Verdict:
    """One tensor: its slopes after the last step, and at which steps a slope is not what theory says."""

    parametrization: str
    optimizer: str
    tensor: str
    size: Slope
    change: Slope
    fails_at: tuple[str, ...]

    @property
    def passes(self) -> bool:
        return not self.fails_at


def verdicts(judged: Sequence[Slope]) -> list[Verdict]:
    """One for every parametrization, optimizer and tensor."""
    groups: dict[tuple[str, str, str], list[Slope]] = {}
    for s in judged:
        groups.setdefault((s.parametrization, s.optimizer, s.tensor), []).append(s)
    found = []
    for (parametrization, optimizer, tensor), group in groups.items():
        last = {s.quantity: s for s in sorted(group, key=lambda s: s.step)}
        fails = tuple(f"{s.quantity} at step {s.step}" for s in group if not s.passes)
        found.append(Verdict(parametrization, optimizer, tensor, last["size"], last["change"], fails))
    return found
